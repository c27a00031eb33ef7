//! Records at the edges of what may be stored, and what is said of those beyond.

use std::sync::Arc;

use ec_placement_model::{
    Consumer, Inventory, MAX_INT, NamedRecord, Provider, generation_problem, intern, is_custom,
    is_custom_name, is_standard_class, is_standard_trait, standard_first,
};
use serde_json::{Value, json};

use crate::support::{aggregate, id, names, some};

#[test]
fn of_an_inventory_only_what_is_not_usual_is_written() {
    type Change = fn(&mut Inventory);
    let written = |change: Change| {
        let mut inventory = some(0);
        change(&mut inventory);
        let value = serde_json::to_value(&inventory).expect("numbers");
        assert_eq!(serde_json::from_value::<Inventory>(value.clone()).expect("as written"), inventory);
        value
    };
    let cases: [(Change, Value); 7] = [
        (|_| {}, json!({"total": 0})),
        (|own| own.total = 5, json!({"total": 5})),
        (|own| own.reserved = 1, json!({"total": 0, "reserved": 1})),
        (|own| own.min_unit = 2, json!({"total": 0, "min_unit": 2})),
        (|own| own.max_unit = 9, json!({"total": 0, "max_unit": 9})),
        (|own| own.step_size = 3, json!({"total": 0, "step_size": 3})),
        (|own| own.allocation_ratio = 16.0, json!({"total": 0, "allocation_ratio": 16.0})),
    ];
    for (change, expected) in cases {
        assert_eq!(written(change), expected);
    }
}

#[test]
fn an_inventory_that_the_api_would_have_refused_is_named() {
    let problem = |inventory: Inventory| {
        let mut provider = Provider::new("h", None, 0);
        provider.inventories = vec![(intern("DISK_GB"), some(1)), (intern("VCPU"), inventory)];
        provider.problem()
    };
    let most = Inventory { total: MAX_INT, reserved: MAX_INT, max_unit: MAX_INT, ..Inventory::default() };
    let least = Inventory { max_unit: 1, allocation_ratio: 0.0, ..Inventory::default() };
    let below = Inventory { allocation_ratio: -0.5, ..some(8) };
    assert_eq!((problem(most), problem(least), problem(below)), (None, None, None));
    for beyond in [
        Inventory { total: -1, ..some(8) },
        Inventory { total: MAX_INT + 1, ..some(8) },
        Inventory { reserved: -1, ..some(8) },
        Inventory { min_unit: 0, ..some(8) },
        Inventory { max_unit: 0, ..some(8) },
        Inventory { step_size: 0, ..some(8) },
        Inventory { step_size: MAX_INT + 1, ..some(8) },
    ] {
        let told = problem(beyond.clone()).unwrap_or_default();
        assert!(told.starts_with("of VCPU, ") && told.contains("must be between"), "{beyond:?}: {told}");
    }
    for ratio in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let told = problem(Inventory { allocation_ratio: ratio, ..some(8) });
        assert_eq!(told, Some(format!("of VCPU, allocation_ratio is {ratio}")));
    }
}

#[test]
fn an_amount_is_admitted_from_the_least_to_the_most_in_steps() {
    let inventory = Inventory { min_unit: 4, max_unit: 8, step_size: 2, ..some(100) };
    let admitted: Vec<i64> = (0..12).filter(|amount| inventory.admits(*amount)).collect();
    assert_eq!(admitted, [4, 6, 8]);
}

#[test]
fn what_a_provider_has_is_found_by_its_name() {
    let mut provider = Provider::new("h", Some(id(9)), 3);
    assert_eq!((provider.version(), provider.created_at, provider.updated_at), (1, 3, 3));
    provider.inventories = vec![(intern("DISK_GB"), some(1)), (intern("VCPU"), some(2))];
    provider.traits = names(&["CUSTOM_T", "HW_CPU_X86_AVX"]);
    provider.aggregates = vec![aggregate(1), aggregate(2)];
    assert_eq!(provider.inventory("VCPU").map(|own| own.total), Some(2));
    assert_eq!(provider.inventory("MEMORY_MB"), None);
    assert!(provider.has_trait("CUSTOM_T") && !provider.has_trait("CUSTOM_NO"));
    assert!(provider.in_aggregate(&aggregate(2)) && !provider.in_aggregate(&aggregate(3)));
    let mut value = serde_json::to_value(&provider).expect("plain");
    assert_eq!(serde_json::from_value::<Provider>(value.clone()).expect("as written"), provider);
    value["version"] = 2.into();
    assert_eq!(serde_json::from_value::<Provider>(value).expect("as written").version(), 2);
}

#[test]
fn records_written_by_hand_are_sorted_when_they_are_read() {
    let text = r#"{"version":1,"name":"h","inventories":{"VCPU":{"total":1},"DISK_GB":{"total":2}},
                   "created_at":0,"updated_at":0}"#;
    let provider: Provider = serde_json::from_str(text).expect("a provider");
    let classes: Vec<&str> = provider.inventories.iter().map(|(class, _)| &**class).collect();
    assert_eq!(classes, ["DISK_GB", "VCPU"]);
}

#[test]
fn a_consumer_is_read_whole_or_as_what_it_uses_and_what_is_wrong_with_it_is_named() {
    let mut consumer = Consumer::new(intern("p"), intern("u"), Some(intern("INSTANCE")), 7);
    consumer.generation = 3;
    consumer.allocations = vec![(id(1), vec![(intern("DISK_GB"), 1), (intern("VCPU"), MAX_INT)])];
    assert_eq!((consumer.version(), consumer.problem()), (1, None));
    let mut value = serde_json::to_value(&consumer).expect("plain");
    assert_eq!(value["type"], "INSTANCE");
    assert_eq!(serde_json::from_value::<Consumer>(value.clone()).expect("as written"), consumer);
    let salvage = |value: &Value| Consumer::salvage(value.to_string().as_bytes());
    value["version"] = 2.into();
    assert_eq!(serde_json::from_value::<Consumer>(value.clone()).expect("as written").version(), 2);
    value["generation"] = "three".into();
    value["project"] = Value::Null;
    let salvaged = salvage(&value).expect("what it uses can be read");
    assert_eq!((salvaged.allocations, salvaged.generation), (consumer.allocations.clone(), 0));
    assert_eq!((&*salvaged.project, salvaged.consumer_type), ("", None));
    let host = id(1).to_string();
    value["allocations"][&host]["VCPU"] = (-1).into();
    assert_eq!(
        (salvage(&value), salvage(&json!({"allocations": 5})), salvage(&json!([]))),
        (None, None, None)
    );
    for amount in [0, MAX_INT + 1] {
        let mut spoilt = consumer.clone();
        spoilt.allocations = vec![(id(1), vec![(intern("VCPU"), amount)])];
        assert_eq!(spoilt.problem(), Some(format!("its amount of VCPU is {amount}")));
    }
    consumer.generation = -1;
    assert_eq!(consumer.problem(), Some("its generation is -1".into()));
}

#[test]
fn a_generation_is_one_that_json_can_tell() {
    let most = 9_007_199_254_740_992;
    assert_eq!((generation_problem(0), generation_problem(most)), (None, None));
    for beyond in [-1, most + 1] {
        assert_eq!(generation_problem(beyond), Some(format!("its generation is {beyond}")));
    }
}

#[test]
fn a_name_that_is_made_says_when_and_by_which_format() {
    let record = NamedRecord::new(5);
    assert_eq!((record.version(), record.created_at), (1, 5));
    let later: NamedRecord =
        serde_json::from_value(json!({"version": 2, "created_at": 5})).expect("a record");
    assert_eq!(later.version(), 2);
}

#[test]
fn names_are_ours_or_standard_and_standard_ones_come_first() {
    assert!(is_custom("CUSTOM_A") && !is_custom("VCPU") && !is_custom("XCUSTOM_A"));
    assert!(
        is_standard_class("VCPU") && !is_standard_class("HW_CPU_X86_AVX") && !is_standard_class("CUSTOM_A")
    );
    assert!(
        is_standard_trait("HW_CPU_X86_AVX") && !is_standard_trait("VCPU") && !is_standard_trait("CUSTOM_A")
    );
    let mixed = names(&["CUSTOM_A", "HW_CPU_X86_AVX", "CUSTOM_B", "MISC_SHARES_VIA_AGGREGATE"]);
    let sorted: Vec<&str> = standard_first(&mixed).map(|name| &**name).collect();
    assert_eq!(sorted, ["HW_CPU_X86_AVX", "MISC_SHARES_VIA_AGGREGATE", "CUSTOM_A", "CUSTOM_B"]);
}

#[test]
fn names_that_nobody_uses_any_more_are_dropped_and_others_stay_the_same() {
    let stays = intern("CUSTOM_STAYS");
    let many: Vec<_> = (0..1100).map(|number| intern(&format!("CUSTOM_MANY_{number}"))).collect();
    let goes = Arc::downgrade(&many[7]);
    drop(many);
    // The pool is swept whenever it has doubled.
    for number in 0..5000 {
        intern(&format!("CUSTOM_PASSING_{number}"));
    }
    assert!(goes.upgrade().is_none());
    assert!(Arc::ptr_eq(&stays, &intern("CUSTOM_STAYS")));
}

#[test]
fn a_name_that_users_may_make_is_custom_and_of_capitals_digits_and_underscores() {
    for name in ["CUSTOM_A", "CUSTOM_9", "CUSTOM__", &format!("CUSTOM_{}", "A".repeat(248))] {
        assert!(is_custom_name(name), "{name}");
    }
    for name in [
        "",
        "VCPU",
        "A_CUSTOM_B",
        "CUSTOM_",
        "CUSTOM_a",
        "CUSTOM_A-B",
        &format!("CUSTOM_{}", "A".repeat(249)),
    ] {
        assert!(!is_custom_name(name), "{name}");
    }
}
