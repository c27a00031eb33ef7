//! Moving a cloud in while things go wrong.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use ec_placement_model::Command;
use ec_runtime::Host;
use ec_store::{Layer, MemoryStore, Store, StoreError, StoreResult, Txn, TxnOutcome};
use placement::{
    store::{Keys, Limits, Model, Replica},
    transfer::{Snapshot, TransferError, import, load},
};
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

fn keys() -> Keys {
    Keys::new("/p")
}

/// A cloud of so many hosts, with a guest each; `first` tells its hosts from others'.
fn cloud(first: u128, hosts: u128, name: &str) -> Snapshot {
    let (mut providers, mut consumers) = (Map::new(), Map::new());
    for number in 0..hosts {
        let host = Uuid::from_u128(first + number).to_string();
        providers.insert(
            host.clone(),
            json!({
                "version": 1, "generation": 2, "name": format!("{name}-{number}"),
                "inventories": {"VCPU": {"total": 4}}, "created_at": 1, "updated_at": 1,
            }),
        );
        consumers.insert(
            Uuid::from_u128(first + 100_000 + number).to_string(),
            json!({
                "version": 1, "generation": 1, "project": "p", "user": "u", "created_at": 1,
                "allocations": {host: {"VCPU": 2}},
            }),
        );
    }
    let document: Value = json!({
        "version": 1, "traits": ["CUSTOM_T"], "resource_classes": ["CUSTOM_R"],
        "providers": providers, "consumers": consumers,
    });
    serde_json::from_value(document).unwrap()
}

async fn stored(store: &MemoryStore) -> Snapshot {
    Snapshot::of(&load(store, &keys()).await.unwrap().whole().unwrap())
}

#[tokio::test]
async fn an_import_that_broke_off_goes_on_when_it_is_done_again() {
    let wanted = cloud(1, 100, "host");
    // Broken at each of its transactions, with the answer lost and without.
    for after in 0..12 {
        for lose in [false, true] {
            let store = MemoryStore::new();
            let broken = Faulty::new(&store, Fault::Breaks(after, lose));
            assert!(import(&broken, &keys(), &wanted, 40, 7).await.is_err(), "after {after}");
            if let Err(error) = import(&store, &keys(), &wanted, 40, 8).await {
                panic!("after {after}, lost {lose}: {error}");
            }
            assert_eq!(wanted.differences(&stored(&store).await), Vec::<String>::new());
            assert!(store.content(&keys().prefix().import()).pairs.is_empty());
            // Said once more, there is nothing to do; of another cloud, it is refused.
            import(&store, &keys(), &wanted, 40, 9).await.unwrap();
            let other = import(&store, &keys(), &cloud(1, 99, "host"), 40, 9).await.unwrap_err();
            assert!(matches!(other, TransferError::NotEmpty(..)), "{other}");
        }
    }
}

/// A replica that was there before, and one that is started on what broke off.
#[tokio::test(start_paused = true)]
async fn replicas_neither_serve_nor_write_what_broke_off_and_serve_it_when_it_is_done() {
    let wanted = cloud(1, 100, "host");
    let store = MemoryStore::new();
    let start = || {
        let store: Arc<dyn Store> = Arc::new(store.clone());
        let stop = CancellationToken::new();
        Replica::start(store, keys(), Limits::default(), Host::default(), stop)
    };
    let before = start();
    before.ready().await.unwrap();
    let broken = Faulty::new(&store, Fault::Breaks(4, false));
    assert!(import(&broken, &keys(), &wanted, 40, 7).await.is_err());
    let after = start();
    for replica in [&before, &after] {
        let create =
            || Command::CreateProvider { uuid: Uuid::from_u128(9999), name: "x".into(), parent: None };
        for error in [
            replica.ready().await.unwrap_err().to_string(),
            replica.fresh().await.unwrap_err().to_string(),
            replica.write(create()).await.unwrap_err().to_string(),
        ] {
            assert!(error.contains("an import is under way, or broke off"), "{error}");
        }
    }
    import(&store, &keys(), &wanted, 40, 8).await.unwrap();
    for replica in [&before, &after] {
        replica.ready().await.unwrap();
        replica.fresh().await.unwrap();
        assert_eq!(replica.peek(|state| state.providers().count()), 100);
    }
}

#[tokio::test]
async fn another_document_takes_the_place_of_one_that_broke_off() {
    let store = MemoryStore::new();
    let broken = Faulty::new(&store, Fault::Breaks(4, false));
    assert!(import(&broken, &keys(), &cloud(1, 100, "old"), 40, 7).await.is_err());
    let wanted = cloud(50, 30, "new");
    let told = import(&store, &keys(), &wanted, 40, 8).await.unwrap();
    // Of four transactions of 37 records each the new one has the trait and the class, too.
    assert_eq!(told, ["146 records of another document, whose import broke off here, were taken away"]);
    assert_eq!(wanted.differences(&stored(&store).await), Vec::<String>::new());
}

/// Somebody wrote it by hand: no import can be finished by it.
#[tokio::test]
async fn a_mark_that_no_import_wrote_is_told_with_what_helps() {
    let store = MemoryStore::new();
    store.txn(Txn::new().put("/p/import", "garbage")).await.unwrap();
    let helps = "/p/import is not what an import writes";
    let error = import(&store, &keys(), &cloud(1, 3, "host"), 40, 7).await.unwrap_err().to_string();
    assert!(error.contains(helps) && error.contains("delete that key"), "{error}");
    let loaded = load(&store, &keys()).await.unwrap();
    assert!(loaded.importing.as_ref().is_some_and(|why| why.contains(helps)), "{:?}", loaded.importing);
    assert!(loaded.whole().map(drop).unwrap_err().to_string().contains(helps));
    store.txn(Txn::new().delete("/p/import")).await.unwrap();
    import(&store, &keys(), &cloud(1, 3, "host"), 40, 7).await.unwrap();
}

#[tokio::test]
async fn whoever_writes_meanwhile_is_neither_overwritten_nor_deleted() {
    let store = MemoryStore::new();
    let broken = Faulty::new(&store, Fault::Breaks(3, false));
    assert!(import(&broken, &keys(), &cloud(1, 100, "host"), 40, 7).await.is_err());
    // A replica that serves there writes, as each does, the clock.
    store.txn(Txn::new().put("/p/clock", "r-1").put("/p/traits/CUSTOM_X", "{}")).await.unwrap();
    let before: BTreeMap<String, Vec<u8>> =
        store.content("/p/").pairs.into_iter().map(|pair| (pair.key, pair.value)).collect();
    let error = import(&store, &keys(), &cloud(1, 100, "host"), 40, 8).await.unwrap_err();
    assert!(matches!(error, TransferError::NotEmpty(..)), "{error}");
    let after: BTreeMap<String, Vec<u8>> =
        store.content("/p/").pairs.into_iter().map(|pair| (pair.key, pair.value)).collect();
    assert_eq!(before, after);
    // And in the midst of it.
    let store = MemoryStore::new();
    let meddled = Faulty::new(&store, Fault::Meddles);
    let error = import(&meddled, &keys(), &cloud(1, 100, "host"), 40, 8).await.unwrap_err();
    assert!(matches!(error, TransferError::Met(_)), "{error}");
}

/// As of an OpenStack that is newer than ours.
#[tokio::test]
async fn names_that_nobody_made_and_this_release_does_not_know_are_told() {
    let document = serde_json::to_value(cloud(1, 3, "host")).unwrap();
    let (host, guest) = (Uuid::from_u128(2).to_string(), Uuid::from_u128(100_002).to_string());
    let mut newer = document.clone();
    let provider = &mut newer["providers"][&host];
    provider["traits"] = json!(["CUSTOM_T", "HW_CPU_X86_AVX2", "HW_CPU_X86_YET_TO_COME"]);
    provider["inventories"]["QUBITS"] = json!({"total": 4});
    newer["consumers"][&guest]["allocations"][&host]["SHARE_OF_LUCK"] = json!(1);
    let store = MemoryStore::new();
    let newer: Snapshot = serde_json::from_value(newer).unwrap();
    let error = newer.check_names().unwrap_err().to_string();
    assert!(error.contains("with HW_CPU_X86_YET_TO_COME, QUBITS, SHARE_OF_LUCK, which"), "{error}");
    let document: Snapshot = serde_json::from_value(document).unwrap();
    document.check_names().unwrap();
    // A document that was written when they were taken is not lost for that.
    let mut newer = serde_json::to_value(newer).unwrap();
    newer["providers"][&host]["inventories"]["SHARE_OF_LUCK"] = json!({"total": 4});
    import(&store, &keys(), &serde_json::from_value(newer).unwrap(), 40, 7).await.unwrap();
}

/// A document in which this is otherwise.
fn with(document: &Value, changes: Vec<(String, Value)>) -> Snapshot {
    let mut changed = document.clone();
    for (at, value) in changes {
        let (within, field) = at.rsplit_once('/').unwrap();
        changed.pointer_mut(within).unwrap()[field] = value;
    }
    serde_json::from_value(changed).unwrap()
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_before_anything_is_written() {
    let document = serde_json::to_value(cloud(1, 20, "host")).unwrap();
    let (first, second) = (Uuid::from_u128(1).to_string(), Uuid::from_u128(2).to_string());
    let guest = Uuid::from_u128(100_001).to_string();
    let provider = |field: &str, value: Value| (format!("/providers/{first}/{field}"), value);
    let consumer = |field: &str, value: Value| (format!("/consumers/{guest}/{field}"), value);
    let many: Vec<Uuid> = (0..60_000).map(Uuid::from_u128).collect();
    let cases = [
        (vec![provider("inventories", json!({"VCPU": {"total": -5}}))], "total is -5"),
        (vec![provider("version", json!(9))], "its version is 9"),
        (vec![provider("generation", json!(-1))], "its generation is -1"),
        (
            vec![provider("parent", json!(second)), (format!("/providers/{second}/parent"), json!(first))],
            "is in a loop",
        ),
        (vec![provider("name", json!("host-1"))], "its name host-1 is that of"),
        (vec![consumer("version", json!(9))], "its version is 9"),
        (vec![consumer("generation", json!(-1))], "its generation is -1"),
        (vec![consumer("allocations", json!({&first: {"VCPU": 0}}))], "its amount of VCPU is 0"),
        (vec![("/traits".to_owned(), json!(["TRAIT"]))], "trait \"TRAIT\" is no custom name"),
        (vec![("/traits".to_owned(), json!(["CUSTOM_t"]))], "trait \"CUSTOM_t\" is no custom name"),
        (
            vec![("/resource_classes".to_owned(), json!(["CUSTOM_A B/C"]))],
            "resource class \"CUSTOM_A B/C\" is no custom name",
        ),
        (vec![provider("name", json!("ä".repeat(201)))], "its name has 201 characters, more than 200"),
        (
            vec![provider("aggregates", json!(many))],
            "bytes, more than the 1048576 that can be written at once",
        ),
        (vec![("/traits".to_owned(), json!(["CUSTOM_T", "CUSTOM_T"]))], "trait CUSTOM_T stands twice"),
        (
            vec![("/resource_classes".to_owned(), json!(["CUSTOM_R", "CUSTOM_R"]))],
            "resource class CUSTOM_R stands twice",
        ),
    ];
    for (changes, wanted) in cases {
        let store = MemoryStore::new();
        let broken = with(&document, changes);
        let error = import(&store, &keys(), &broken, 40, 7).await.unwrap_err();
        assert!(matches!(error, TransferError::Unsound(_)), "{error}");
        assert!(error.to_string().contains(wanted), "{wanted}: {error}");
        assert_eq!(store.content("/p/").pairs, Vec::new(), "{wanted}");
    }
    for name in ["ä".repeat(200), String::new()] {
        let (store, named) = (MemoryStore::new(), with(&document, vec![provider("name", json!(name))]));
        assert_eq!(import(&store, &keys(), &named, 40, 7).await.unwrap(), Vec::<String>::new());
        assert_eq!(stored(&store).await, named);
    }
    // Not all of a document in which nothing can be read.
    let spoilt = (1..=20).map(|number| {
        let host = Uuid::from_u128(number);
        (format!("/providers/{host}/generation"), json!(-1))
    });
    let error = import(&MemoryStore::new(), &keys(), &with(&document, spoilt.collect()), 40, 7).await;
    assert!(error.unwrap_err().to_string().ends_with("; and 10 more"));
}

/// As only a fault of ours would have it.
#[tokio::test]
async fn what_comes_to_differ_is_told_with_the_way_out_and_that_is_one() {
    let (store, mut odd) = (MemoryStore::new(), cloud(1, 3, "host"));
    let mended = odd.clone();
    let aggregates = [2, 1].map(Uuid::from_u128).to_vec();
    odd.providers.get_mut(&Uuid::from_u128(1)).unwrap().provider.aggregates = aggregates;
    let error = import(&store, &keys(), &odd, 40, 7).await.unwrap_err();
    assert!(matches!(error, TransferError::Differs(_)), "{error}");
    assert!(error.to_string().contains("import again"), "{error}");
    import(&store, &keys(), &mended, 40, 7).await.unwrap();
    assert_eq!(stored(&store).await, mended);
}

/// JSON has the last of two members win: what the other says would be lost, a claim with it.
#[test]
fn what_stands_twice_in_a_document_is_refused_and_so_is_a_field_that_nobody_knows() {
    let document = serde_json::to_string(&cloud(0xa, 1, "host")).unwrap();
    let (host, guest) = (Uuid::from_u128(0xa), Uuid::from_u128(100_010));
    assert_eq!(Snapshot::read(document.as_bytes()).unwrap(), cloud(0xa, 1, "host"));
    let shouted = host.simple().to_string().to_uppercase();
    let provider = json!({"version": 1, "generation": 0, "name": "n", "created_at": 1, "updated_at": 1});
    let consumer = json!({
        "version": 1, "generation": 1, "project": "p", "user": "u", "created_at": 1,
        "allocations": {host.to_string(): {"VCPU": 1}},
    });
    let cases = [
        ("\"providers\":{", format!("\"{host}\":{provider},"), format!("{host} stands twice")),
        ("\"providers\":{", format!("\"{shouted}\":{provider},"), format!("{host} stands twice")),
        ("\"consumers\":{", format!("\"{guest}\":{consumer},"), format!("{guest} stands twice")),
        (
            "\"consumers\":{",
            format!("\"{}\":{consumer},", guest.simple().to_string().to_uppercase()),
            format!("{guest} stands twice"),
        ),
        ("\"inventories\":{", "\"VCPU\":{\"total\":9},".to_owned(), "VCPU stands twice".to_owned()),
        ("\"allocations\":{", format!("\"{host}\":{{\"VCPU\":1}},"), format!("{host} stands twice")),
        ("\"VCPU\":2", "\"VCPU\":2,".to_owned(), "VCPU stands twice".to_owned()),
        ("\"project\":", "\"hello\":1,".to_owned(), "unknown field `hello`".to_owned()),
        ("\"name\":", format!("\"parnet\":\"{host}\","), "unknown field `parnet`".to_owned()),
        ("\"total\":", "\"totla\":1,".to_owned(), "unknown field `totla`".to_owned()),
        ("\"traits\":", "\"trials\":1,".to_owned(), "unknown field `trials`".to_owned()),
    ];
    for (text, wanted) in [("root:x:0:0", "no JSON"), ("", "no JSON"), ("[]", "invalid")] {
        let error = Snapshot::read(text.as_bytes()).unwrap_err();
        assert!(error.contains(wanted), "{text}: {error}");
    }
    for (at, more, wanted) in cases {
        let put = if at.ends_with('{') { format!("{at}{more}") } else { format!("{more}{at}") };
        let text = document.replacen(at, &put, 1);
        assert_ne!(text, document, "{at}");
        let error = Snapshot::read(text.as_bytes()).unwrap_err();
        assert!(error.contains(&wanted), "{wanted}: {error}");
    }
}

/// Every field that a record has is known in a document.
#[test]
fn a_document_with_everything_in_it_is_read() {
    let (host, guest) = (Uuid::from_u128(1), Uuid::from_u128(2));
    let document = json!({
        "version": 1, "traits": ["CUSTOM_T"], "resource_classes": [],
        "providers": {host.to_string(): {
            "version": 1, "generation": 2, "name": "host", "parent": host, "traits": ["CUSTOM_T"],
            "aggregates": [host], "created_at": 1, "updated_at": 1,
            "inventories": {"VCPU": {
                "total": 4, "reserved": 1, "min_unit": 2, "max_unit": 3, "step_size": 2, "allocation_ratio": 1.5,
            }},
        }},
        "consumers": {guest.to_string(): {
            "version": 1, "generation": 1, "project": "p", "user": "u", "type": "T", "created_at": 1,
            "allocations": {host.to_string(): {"VCPU": 2}},
        }},
    });
    let read = Snapshot::read(document.to_string().as_bytes()).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), document);
}

#[tokio::test]
async fn what_does_not_fit_together_is_taken_and_told() {
    let document = serde_json::to_value(cloud(1, 3, "host")).unwrap();
    let (first, nobody) = (Uuid::from_u128(1), Uuid::from_u128(99).to_string());
    let guest = Uuid::from_u128(100_001);
    let provider = |field: &str, value: Value| (format!("/providers/{first}/{field}"), value);
    let consumer = |field: &str, value: Value| (format!("/consumers/{guest}/{field}"), value);
    let cases = [
        (provider("parent", json!(nobody)), "above it is not there"),
        (provider("traits", json!(["CUSTOM_NOBODYS"])), "which is no trait"),
        (provider("inventories", json!({})), "which has none"),
        (consumer("allocations", json!({&nobody: {"VCPU": 1}})), "which is not there"),
        (consumer("allocations", json!({})), "has no allocations"),
        (provider("inventories", json!({"VCPU": {"total": 1}})), "2 of 1 VCPU are used, more than there is"),
    ];
    for (change, wanted) in cases {
        let (store, loose) = (MemoryStore::new(), with(&document, vec![change]));
        let told = import(&store, &keys(), &loose, 40, 7).await.unwrap();
        assert!(told.len() == 1 && told[0].contains(wanted), "{wanted}: {told:?}");
        assert_eq!(stored(&store).await, loose);
    }
    let sound = import(&MemoryStore::new(), &keys(), &with(&document, Vec::new()), 40, 7).await.unwrap();
    assert_eq!(sound, Vec::<String>::new());
}

/// Of a cloud of which somebody deleted providers by hand, as the handbook says.
#[tokio::test]
async fn what_was_exported_between_two_repairs_goes_back_and_so_does_what_broke_off() {
    let store = MemoryStore::new();
    import(&store, &keys(), &cloud(1, 40, "host"), 40, 7).await.unwrap();
    for number in 1..=40 {
        let host = Uuid::from_u128(number);
        store.txn(Txn::new().delete(format!("/p/providers/{host}"))).await.unwrap();
    }
    let exported = stored(&store).await;
    assert_eq!((exported.providers.len(), exported.consumers.len()), (0, 40));
    let place = MemoryStore::new();
    let broken = Faulty::new(&place, Fault::Breaks(1, true));
    assert!(import(&broken, &keys(), &exported, 20, 7).await.is_err());
    let told = import(&place, &keys(), &exported, 20, 7).await.unwrap();
    assert!(told.len() == 11 && told[10] == "and 30 more", "{told:?}");
    assert_eq!(exported.differences(&stored(&place).await), Vec::<String>::new());
}

/// The release before kept the generation that OpenStack has for those that it made up.
#[tokio::test]
async fn a_consumer_of_the_generation_0_is_counted_from_1_wherever_it_comes_from() {
    let guest = Uuid::from_u128(100_001);
    let mut document = serde_json::to_value(cloud(1, 3, "host")).unwrap();
    document["consumers"][guest.to_string()]["generation"] = json!(0);
    let older: Snapshot = serde_json::from_value(document).unwrap();
    assert_eq!(older, cloud(1, 3, "host"));
    let store = MemoryStore::new();
    assert_eq!(import(&store, &keys(), &older, 40, 7).await.unwrap(), Vec::<String>::new());
    let key = format!("/p/consumers/{guest}");
    let text = String::from_utf8(store.content(&key).pairs[0].value.clone()).unwrap();
    assert!(text.contains("\"generation\":1,"), "{text}");
    let before = text.replace("\"generation\":1,", "\"generation\":0,");
    store.txn(Txn::new().put(key, before)).await.unwrap();
    assert_eq!(stored(&store).await, older, "exported");
    import(&store, &keys(), &older, 40, 7).await.unwrap();
}

#[tokio::test]
async fn large_records_are_written_in_bounded_pieces() {
    // Forty of 100 kB each would be four megabytes in one transaction.
    let mut document = serde_json::to_value(cloud(1, 60, "host")).unwrap();
    let aggregates: Vec<Uuid> = (0..2_500).map(Uuid::from_u128).collect();
    for provider in document["providers"].as_object_mut().unwrap().values_mut() {
        provider["aggregates"] = json!(aggregates);
    }
    let wanted = with(&document, Vec::new());
    let store = MemoryStore::new();
    import(&store, &keys(), &wanted, 128, 7).await.unwrap();
    assert_eq!(wanted.differences(&stored(&store).await), Vec::<String>::new());
}

/// What goes wrong.
#[derive(Clone, Copy)]
enum Fault {
    /// After so many transactions the next fails; whether it is done.
    Breaks(u32, bool),
    /// Somebody else writes after each.
    Meddles,
}

struct Faulty {
    inner: MemoryStore,
    fault: Mutex<Fault>,
}

impl Faulty {
    fn new(inner: &MemoryStore, fault: Fault) -> Self {
        Self { inner: inner.clone(), fault: fault.into() }
    }
}

#[async_trait]
impl Layer for Faulty {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
        let fault = {
            let mut fault = self.fault.lock().unwrap();
            let now = *fault;
            if let Fault::Breaks(left, done) = now {
                *fault = Fault::Breaks(left.saturating_sub(1), done);
            }
            now
        };
        match fault {
            Fault::Breaks(0, done) => {
                if done {
                    self.inner.txn(txn).await?;
                }
                Err(StoreError::Unknown("on request".into()))
            }
            Fault::Breaks(..) => self.inner.txn(txn).await,
            Fault::Meddles => {
                let outcome = self.inner.txn(txn).await;
                self.inner.txn(Txn::new().put("/p/clock", "r-1")).await?;
                outcome
            }
        }
    }
}
