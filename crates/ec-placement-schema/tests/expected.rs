//! Our texts compared with those of OpenStack's server, which `expected.py` wrote down.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may fail anywhere")]

use ec_placement_schema::{Body, Query, check_body, check_query};
use serde_json::Value;

enum Target {
    Body(Body),
    Query(Query),
}

fn target(name: &str) -> Target {
    match name {
        "ResourceProviderCreate" => Target::Body(Body::ResourceProviderCreate),
        "ResourceProviderUpdate" => Target::Body(Body::ResourceProviderUpdate),
        "ResourceClassCreate" => Target::Body(Body::ResourceClassCreate),
        "InventoryPost" => Target::Body(Body::InventoryPost),
        "InventoryPut" => Target::Body(Body::InventoryPut),
        "InventoriesPut" => Target::Body(Body::InventoriesPut),
        "Aggregates" => Target::Body(Body::Aggregates),
        "ProviderTraits" => Target::Body(Body::ProviderTraits),
        "AllocationsPut" => Target::Body(Body::AllocationsPut),
        "AllocationsPost" => Target::Body(Body::AllocationsPost),
        "Reshaper" => Target::Body(Body::Reshaper),
        "ResourceProviders" => Target::Query(Query::ResourceProviders),
        "AllocationCandidates" => Target::Query(Query::AllocationCandidates),
        "Traits" => Target::Query(Query::Traits),
        "Usages" => Target::Query(Query::Usages),
        other => panic!("no schema is called {other}"),
    }
}

fn answer(case: &[Value]) -> Result<(), String> {
    let minor = case[1].as_u64().unwrap().try_into().unwrap();
    match target(case[0].as_str().unwrap()) {
        Target::Body(body) => check_body(body, minor, &case[2]),
        Target::Query(query) => {
            let pairs: Vec<(String, String)> = serde_json::from_value(case[2].clone()).unwrap();
            check_query(query, minor, &pairs)
                .map_err(|error| error.strip_prefix("Invalid query string parameters: ").unwrap().to_owned())
        }
    }
}

/// Compares each case of the file, and gives the number of those that ended in an error.
fn compare(file: &str) -> usize {
    let file: Value = serde_json::from_str(file).unwrap();
    let mut wrong = Vec::new();
    let mut errors = 0;
    for case in file["cases"].as_array().unwrap() {
        let case = case.as_array().unwrap();
        let expected = match case.as_slice() {
            [_, _, _, head, schema, tail] => {
                errors += 1;
                let schema = file["schemas"][usize::try_from(schema.as_u64().unwrap()).unwrap()].as_str();
                let (head, tail) = (head.as_str().unwrap(), tail.as_str().unwrap());
                Err(format!("{head}\n    {}\n\n{tail}", schema.unwrap()))
            }
            _ => Ok(()),
        };
        let ours = answer(case);
        if ours != expected {
            let texts = [expected, ours].map(|text| text.err().unwrap_or_else(|| "right".to_owned()));
            let [expected, ours] = texts;
            wrong.push(format!(
                "{} 1.{} {}\n--- expected\n{expected}\n--- ours\n{ours}\n",
                case[0], case[1], case[2]
            ));
        }
    }
    let shown = wrong.iter().take(5).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty(), "{} texts differ, among them:\n{shown}", wrong.len());
    errors
}

#[test]
fn texts_are_those_of_the_python_server() {
    assert!(compare(include_str!("expected.json")) > 150);
}

/// `EXPECTED=wide.json cargo test -p ec-placement-schema -- --ignored`
#[test]
#[ignore = "needs a file which expected.py wrote, named in EXPECTED"]
fn texts_of_a_wide_choice_are_those_of_the_python_server() {
    let path = std::env::var("EXPECTED").expect("EXPECTED names a file");
    let errors = compare(&std::fs::read_to_string(path).unwrap());
    println!("{errors} errors are equal");
}
