//! Bodies meant to hurt: the answer comes soon, and is not longer than it has to be.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends there")]

use std::time::{Duration, Instant};

use ec_placement_schema::{Body, Query, check_body, check_query};
use serde_json::{Value, json};

/// The schema of the largest body takes about half of it.
const LONGEST: usize = 40_000;

fn refusal(body: Body, document: &Value) -> String {
    let start = Instant::now();
    let error = check_body(body, 39, document).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(20), "{body:?} took {:?}", start.elapsed());
    assert!(error.len() < LONGEST, "{} bytes", error.len());
    error
}

#[test]
fn a_large_body_gets_a_short_answer() {
    let numbers = Value::from(vec![1; 300_000]);
    let long = "é'\n".repeat(300_000);
    let keys: serde_json::Map<_, _> = (0..100_000).map(|key| (format!("key {key}"), json!([key]))).collect();
    let mut deep = json!({});
    for _ in 0..120 {
        deep = json!({ "k".repeat(5000): [deep, 1] });
    }
    for document in [numbers, Value::from(long), Value::from(keys), deep] {
        for body in [
            Body::ResourceProviderCreate,
            Body::ResourceClassCreate,
            Body::InventoryPost,
            Body::InventoriesPut,
            Body::Aggregates,
            Body::ProviderTraits,
            Body::AllocationsPut,
            Body::AllocationsPost,
            Body::Reshaper,
        ] {
            refusal(body, &document);
        }
        refusal(Body::ProviderTraits, &json!({"traits": document, "resource_provider_generation": document}));
        refusal(Body::Aggregates, &json!({"aggregates": document, "resource_provider_generation": 1}));
        refusal(Body::InventoriesPut, &json!({"inventories": {"VCPU": document}}));
    }
}

#[test]
fn a_long_text_is_quoted_with_what_is_wrong_with_it() {
    let error = refusal(Body::ResourceProviderCreate, &json!({"name": "n".repeat(1_000_000)}));
    let first = error.lines().next().unwrap();
    assert!(first.starts_with("'nnn") && first.ends_with("n... is too long"), "{first}");
    assert!(error.contains("\n\nFailed validating 'maxLength' in schema['properties']['name']:\n"));
    assert!(error.ends_with("n..."));
}

#[test]
fn a_long_query_gets_a_short_answer() {
    let pairs: Vec<(String, String)> =
        (0..50_000).map(|at| (format!("{at}{}", "x".repeat(50)), "y".repeat(50))).collect();
    let error = check_query(Query::AllocationCandidates, 39, &pairs).unwrap_err();
    assert!(error.starts_with("Invalid query string parameters: '0xxx"));
    assert!(error.len() < LONGEST);
}

#[test]
fn a_number_beyond_64_bits_is_refused_where_there_is_a_maximum() {
    for (total, first) in [
        ("1000000000000000000000000000000", "1000000000000000000000000000000 is greater than the maximum"),
        ("-1000000000000000000000000000000", "-1000000000000000000000000000000 is less than the minimum"),
        ("18446744073709551615", "18446744073709551615 is greater than the maximum of 2147483647"),
        ("2147483648", "2147483648 is greater than the maximum of 2147483647"),
        ("1.5", "1.5 is not of type 'integer'"),
        ("true", "True is not of type 'integer'"),
    ] {
        let body = format!(r#"{{"total": {total}, "resource_provider_generation": 0}}"#);
        let error = refusal(Body::InventoryPut, &serde_json::from_str(&body).unwrap());
        assert!(error.starts_with(first), "{error}");
    }
    let ratio = json!({"total": 1, "resource_provider_generation": 0, "allocation_ratio": 1e39});
    let error = refusal(Body::InventoryPut, &ratio);
    assert!(error.starts_with("1e+39 is greater than the maximum of 3.40282e+38\n"), "{error}");
}

/// `cargo test --release -p ec-placement-schema --test hostile -- --ignored --nocapture`
#[test]
#[ignore = "measures, in a release build"]
fn how_many_bodies_are_checked_in_a_second() {
    let allocations = json!({
        "allocations": {
            "4e05a85b-e8a6-4b3a-82c1-5f6ad3f71d55": {"resources": {"VCPU": 2, "MEMORY_MB": 2048}},
            "e3bf4069-bb29-4d1a-8d1d-0d0b2a1f0d3c": {"resources": {"DISK_GB": 20}},
        },
        "consumer_generation": null,
        "consumer_type": "INSTANCE",
        "mappings": {
            "_COMPUTE": ["4e05a85b-e8a6-4b3a-82c1-5f6ad3f71d55"],
            "_DISK": ["e3bf4069-bb29-4d1a-8d1d-0d0b2a1f0d3c"],
        },
        "project_id": "6f70656e-7374-4163-8b20-706c6163656d",
        "user_id": "656e7421-6f70-456e-9374-61636b20706c",
    });
    let mut wrong = allocations.clone();
    wrong["project_id"] = json!("");
    for (name, document, rounds) in [("right", allocations, 1_000_000), ("wrong", wrong, 50_000)] {
        let start = Instant::now();
        let errors = (0..rounds)
            .filter(|_| check_body(Body::AllocationsPut, 38, std::hint::black_box(&document)).is_err())
            .count();
        let rate = f64::from(rounds) / start.elapsed().as_secs_f64();
        println!("{name}: {rate:.0} a second, {errors} errors");
    }
}
