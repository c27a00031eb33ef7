//! Reading a cloud out of an API that spells as OpenStack's may.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::collections::BTreeMap;

use ec_store::MemoryStore;
use placement::{
    live,
    store::Keys,
    transfer::{Snapshot, TransferError, import},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpListener,
};
use uuid::Uuid;

const HOST: &str = "00000000-0000-0000-0000-000000000001";
const CONSUMER: &str = "AAAAAAAA-0000-0000-0000-00000000000A";

/// What is answered, by path.
type Answers = BTreeMap<String, Value>;

/// One host that a consumer uses, which was made in capitals, and is found by these only.
fn answers() -> Answers {
    let of_host = format!("/resource_providers/{HOST}");
    let resources = json!({"VCPU": 2});
    let listed = json!({"uuid": HOST, "name": "h", "generation": 3, "parent_provider_uuid": null});
    let allocations = json!({
        "allocations": {HOST: {"generation": 3, "resources": resources}},
        "project_id": "p", "user_id": "u", "consumer_generation": 1, "consumer_type": "INSTANCE",
    });
    [
        ("/traits".to_owned(), json!({"traits": []})),
        ("/resource_classes".to_owned(), json!({"resource_classes": [{"name": "VCPU"}]})),
        ("/resource_providers".to_owned(), json!({"resource_providers": [listed]})),
        (format!("{of_host}/inventories"), json!({"inventories": {"VCPU": {"total": 8}}})),
        (format!("{of_host}/traits"), json!({"traits": []})),
        (format!("{of_host}/aggregates"), json!({"aggregates": []})),
        (format!("{of_host}/allocations"), json!({"allocations": {CONSUMER: {"resources": resources}}})),
        (format!("/allocations/{CONSUMER}"), allocations),
    ]
    .into()
}

/// What is read where this is answered, and `later` to who asks for the same once more; of another consumer nothing is told.
async fn fetched(mut answers: Answers, mut later: Answers) -> Result<Snapshot, TransferError> {
    ec_runtime::install_tls_provider();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut lines = BufReader::new(&mut connection).lines();
            let asked = lines.next_line().await.unwrap().unwrap();
            while lines.next_line().await.unwrap().is_some_and(|line| !line.is_empty()) {}
            let path = asked.split(' ').nth(1).unwrap();
            let nothing = json!({"allocations": {}});
            let body = answers.get(path).unwrap_or(&nothing).to_string();
            let head =
                format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
            if let Some((path, then)) = later.remove_entry(path) {
                answers.insert(path, then);
            }
            connection.write_all((head + &body).as_bytes()).await.unwrap();
        }
    });
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let snapshot = live::fetch(client, &url, "admin", 0).await;
    serving.abort();
    snapshot
}

#[tokio::test]
async fn a_consumer_is_asked_for_as_the_provider_spells_it() {
    let snapshot = fetched(answers(), Answers::new()).await.unwrap();
    let consumer = &snapshot.consumers[&CONSUMER.parse::<Uuid>().unwrap()];
    assert_eq!(consumer.allocations[0].0, HOST.parse::<Uuid>().unwrap());
}

#[tokio::test]
async fn a_consumer_that_a_provider_tells_of_is_never_left_out() {
    let mut silent = answers();
    silent.remove(&format!("/allocations/{CONSUMER}"));
    let error = fetched(silent, Answers::new()).await.unwrap_err().to_string();
    assert!(error.contains(CONSUMER) && error.contains("mended there first"), "{error}");
    let mut twice = answers();
    let of_host = twice.get_mut(&format!("/resource_providers/{HOST}/allocations")).unwrap();
    of_host["allocations"][CONSUMER.to_lowercase()] = json!({"resources": {"VCPU": 1}});
    let error = fetched(twice, Answers::new()).await.unwrap_err().to_string();
    assert!(error.contains("would be one here"), "{error}");
}

#[tokio::test]
async fn an_aggregate_in_two_spellings_is_one_and_can_be_imported() {
    let (plain, dashed) = (Uuid::from_u128(9).simple().to_string(), Uuid::from_u128(9).to_string());
    let mut spelt = answers();
    spelt.insert(format!("/resource_providers/{HOST}/aggregates"), json!({"aggregates": [plain, dashed]}));
    let snapshot = fetched(spelt, Answers::new()).await.unwrap();
    assert_eq!(snapshot.providers[&HOST.parse::<Uuid>().unwrap()].provider.aggregates, [Uuid::from_u128(9)]);
    import(&MemoryStore::new(), &Keys::new("/p"), &snapshot, 40, 0).await.unwrap();
}

/// It ends after its provider has told of it, and before it is asked for.
#[tokio::test]
async fn a_consumer_that_ends_meanwhile_is_left_out() {
    let mut ended = answers();
    ended.remove(&format!("/allocations/{CONSUMER}"));
    let later = (format!("/resource_providers/{HOST}/allocations"), json!({"allocations": {}}));
    let snapshot = fetched(ended, [later].into()).await.unwrap();
    assert_eq!((snapshot.providers.len(), snapshot.consumers.len()), (1, 0));
}
