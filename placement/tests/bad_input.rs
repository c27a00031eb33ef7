//! Whatever a client sends, it gets a 4xx in the API's own form, soon, and nothing changes.
#![expect(clippy::unwrap_used, reason = "what tests share")]

mod support;

use std::time::{Duration, Instant};

use ec_store::MemoryStore;
use placement::{
    store::Keys,
    transfer::{Snapshot, import, load},
};
use proptest::{prelude::*, test_runner::Config};
use reqwest::Method;
use serde_json::{Value, json};
use support::{Server, claim, open, uuid};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Every route with a body: method, path, and a body that is right.
fn writes(host: &str) -> Vec<(Method, String, Value)> {
    let provider = format!("/resource_providers/{host}");
    let inventory = json!({"resource_provider_generation": 99, "total": 5});
    vec![
        (Method::POST, "/resource_providers".into(), json!({"name": "n", "uuid": uuid(77)})),
        (Method::PUT, provider.clone(), json!({"name": "n"})),
        (Method::POST, "/resource_classes".into(), json!({"name": "CUSTOM_A"})),
        (Method::POST, format!("{provider}/inventories"), json!({"resource_class": "DISK_GB", "total": 5})),
        (
            Method::PUT,
            format!("{provider}/inventories"),
            json!({"resource_provider_generation": 99, "inventories": {"VCPU": {"total": 5}}}),
        ),
        (Method::PUT, format!("{provider}/inventories/VCPU"), inventory),
        (
            Method::PUT,
            format!("{provider}/aggregates"),
            json!({"resource_provider_generation": 99, "aggregates": []}),
        ),
        (
            Method::PUT,
            format!("{provider}/traits"),
            json!({"resource_provider_generation": 99, "traits": []}),
        ),
        (Method::PUT, format!("/allocations/{}", uuid(60)), claim(host, "VCPU", 1)),
        (Method::POST, "/allocations".into(), json!({uuid(60): claim(host, "VCPU", 1)})),
        (
            Method::POST,
            "/reshaper".into(),
            json!({"inventories": {}, "allocations": {uuid(60): claim(host, "VCPU", 1)}}),
        ),
    ]
}

/// Everything with a number, text or object in it made something else, one at a time.
fn broken(document: &Value) -> Vec<Value> {
    let wrong = [
        Value::Null,
        json!(true),
        json!(-1),
        json!(1.5),
        json!(1e300),
        json!(u64::MAX),
        json!("\u{0}\u{fffd}😀"),
        json!("x".repeat(5000)),
        json!(""),
        json!([]),
        json!([[[]]]),
        json!({"unknown": {"unknown": 1}}),
    ];
    let mut found: Vec<Value> = wrong.to_vec();
    if let Value::Object(object) = document {
        for key in object.keys() {
            let mut without = object.clone();
            without.remove(key);
            found.push(without.into());
            for inner in broken(&object[key]) {
                let mut with = object.clone();
                with.insert(key.clone(), inner);
                found.push(with.into());
            }
        }
        let mut more = object.clone();
        more.insert("unknown".into(), json!(1));
        found.push(more.into());
    }
    found
}

fn is_error_document(answer: &Value, status: u16) {
    let error = &answer["errors"][0];
    assert_eq!(error["status"], status, "{answer}");
    assert!(error["detail"].as_str().is_some_and(|detail| detail.len() < 60_000), "{answer}");
    assert!(error["request_id"].as_str().is_some_and(|id| id.starts_with("req-")), "{answer}");
    assert!(error["code"].is_string() && error["title"].is_string(), "{answer}");
}

/// What the API took is exported, and imported elsewhere, or a backup would be of no use.
async fn can_be_moved(store: &MemoryStore) {
    let keys = Keys::new("/p");
    let stored = async |store| Snapshot::of(&load(store, &keys).await.unwrap().whole().unwrap());
    let exported = stored(store).await;
    let document = Snapshot::read(&serde_json::to_vec(&exported).unwrap()).unwrap();
    let other = MemoryStore::new();
    import(&other, &keys, &document, 40, 7).await.unwrap();
    assert_eq!(exported.differences(&stored(&other).await), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_body_makes_more_than_a_4xx() {
    let store = MemoryStore::new();
    let server = Server::start_on(&store, open()).await;
    let host = server.provider(1, None, &[("VCPU", 8)], &[], &[]).await;
    let mut sent = 0;
    for (method, path, good) in writes(&host) {
        for body in broken(&good) {
            let (status, answer) = server.send(method.clone(), &path, Some(body.clone())).await;
            sent += 1;
            assert!(status < 500, "{method} {path} {body}: {answer}");
            if status >= 400 {
                is_error_document(&answer, status);
            }
        }
    }
    assert!(sent > 500, "{sent}");
    let providers = server.get("/resource_providers").await.1;
    let names =
        |name: &str| providers["resource_providers"].as_array().unwrap().iter().any(|p| p["name"] == name);
    assert!(names(""), "OpenStack's takes it, too: {providers}");
    can_be_moved(&store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_body_about_what_is_not_there_is_told_that() {
    let server = Server::start().await;
    let host = server.provider(1, None, &[("VCPU", 8)], &[], &[]).await;
    for what in ["", "/inventories", "/inventories/VCPU", "/aggregates"] {
        for (of, wanted) in [(uuid(2), 404), (host.clone(), 400)] {
            let path = format!("/resource_providers/{of}{what}");
            let (status, answer) = server.put(&path, json!({"unknown": 1})).await;
            assert_eq!(status, wanted, "{path}: {answer}");
            is_error_document(&answer, status);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_no_json_of_ours_are_refused_by_name() {
    let server = Server::start().await;
    let send = async |body: Vec<u8>| {
        let request = server
            .client
            .post(format!("{}/resource_providers", server.url))
            .header("X-Auth-Token", "admin")
            .header("OpenStack-API-Version", "placement latest")
            .header("Content-Type", "application/json")
            .body(body);
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        is_error_document(&answer.json().await.unwrap(), status);
        status
    };
    assert_eq!(send(Vec::new()).await, 400);
    assert_eq!(send(b"{\"name\": \"\xff\xfe\"}".to_vec()).await, 400, "no UTF-8");
    assert_eq!(send("[".repeat(100_000).into_bytes()).await, 400, "deep");
    assert_eq!(send(b"{\"name\": 1e999}".to_vec()).await, 400, "no number");
    assert_eq!(send(b"{\"name\": NaN}".to_vec()).await, 400);
    let began = Instant::now();
    assert_eq!(send(vec![b' '; 100 << 20]).await, 413, "100 MiB");
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_inventory_is_taken_is_read_by_others_and_can_be_mended() {
    let store = MemoryStore::new();
    let server = Server::start_on(&store, open()).await;
    let most = i64::from(i32::MAX);
    let ratios = [-1e308, -3.4e38, -0.5, -0.0, 0.0, 5e-324, 1.0, 3.4e38, 1e39];
    let totals = [(1, 0), (1, 1), (1, most), (most, 0), (most, 1), (most, most)];
    let cases = ratios.iter().flat_map(|ratio| totals.map(|(total, reserved)| (ratio, total, reserved)));
    let cases =
        cases.flat_map(|(ratio, total, reserved)| [false, true].map(|re| (ratio, total, reserved, re)));
    let (mut taken, mut number) = (0, 0);
    for (ratio, total, reserved, reshaped) in cases {
        number += 1;
        let host = server.provider(number, None, &[], &[], &[]).await;
        let inventory = json!({"total": total, "reserved": reserved, "allocation_ratio": ratio});
        let offers = json!({"resource_provider_generation": 2, "inventories": {"VCPU": inventory}});
        let (status, answer) = if reshaped {
            server.post("/reshaper", json!({"inventories": {host: offers}, "allocations": {}})).await
        } else {
            server.put(&format!("/resource_providers/{host}/inventories"), offers).await
        };
        assert!([200, 204, 400].contains(&status), "{inventory}: {answer}");
        taken += u32::from(status != 400);
    }
    assert!(taken > 60, "{taken}");
    can_be_moved(&store).await;
    let other = Server::start_on(&store, open()).await;
    for number in 1..=number {
        let path = format!("/resource_providers/{}/inventories", uuid(number));
        let (status, there) = other.get(&path).await;
        assert_eq!((status, &there), (200, &server.get(&path).await.1));
        let generation = &there["resource_provider_generation"];
        let mended =
            json!({"resource_provider_generation": generation, "inventories": {"VCPU": {"total": 8}}});
        assert_eq!(other.put(&path, mended).await.0, 200, "{there}");
    }
}

#[tokio::test]
async fn a_ratio_is_kept_to_its_last_digit() {
    let store = MemoryStore::new();
    let server = Server::start_on(&store, open()).await;
    let host = server.provider(1, None, &[], &[], &[]).await;
    let path = format!("/resource_providers/{host}/inventories");
    let ratio = 9.222_222_222_222_221;
    let inventory = json!({"total": 9, "allocation_ratio": ratio});
    let offers = json!({"resource_provider_generation": 2, "inventories": {"VCPU": inventory}});
    assert_eq!(server.put(&path, offers).await.0, 200);
    for server in [server, Server::start_on(&store, open()).await] {
        let told = server.get(&path).await.1["inventories"]["VCPU"]["allocation_ratio"].to_string();
        assert_eq!(told, "9.222222222222221");
    }
    can_be_moved(&store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_class_whose_name_ends_with_a_newline_is_shown_as_json() {
    let server = Server::start().await;
    let class = "CUSTOM_A\n";
    assert_eq!(server.post("/resource_classes", json!({"name": class})).await.0, 201);
    let host = server.provider(1, None, &[(class, 8)], &[], &[]).await;
    let (status, answer) = server.get("/allocation_candidates?resources=CUSTOM_A%0A:1").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["allocation_requests"][0]["allocations"][&host]["resources"], json!({class: 1}));
    let shown = &answer["provider_summaries"][&host]["resources"];
    assert_eq!(shown, &json!({class: {"capacity": 8, "used": 0}}));
}

/// Each as OpenStack's server answers it.
#[tokio::test(flavor = "multi_thread")]
async fn oddly_said_it_is_understood_as_openstack_does() {
    let server = Server::start().await;
    let send = async |method: Method, path: &str, headers: &[(&'static str, &str)]| {
        let request = server.client.request(method, format!("{}{path}", server.url));
        let request =
            request.header("X-Auth-Token", "admin").header("OpenStack-API-Version", "placement latest");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let answer = request.send().await.unwrap();
        let location = answer.headers().get("location").map(|it| it.to_str().unwrap().to_owned());
        (answer.status().as_u16(), location)
    };
    let get = async |path: &str, headers: &[(&'static str, &str)]| send(Method::GET, path, headers).await.0;

    // Whoever comes through a proxy where TLS ends is sent back there.
    let (status, location) =
        send(Method::PUT, "/traits/CUSTOM_A", &[("host", "foo"), ("x-forwarded-proto", "https")]).await;
    assert_eq!((status, location.as_deref()), (201, Some("https://foo/traits/CUSTOM_A")));
    let (_, location) = send(Method::PUT, "/traits/CUSTOM_B", &[("host", "foo")]).await;
    assert_eq!(location.as_deref(), Some("http://foo/traits/CUSTOM_B"));

    assert_eq!(get("/traits", &[("accept", "text/html"), ("accept", "application/json")]).await, 200);
    assert_eq!(get("/traits", &[("accept", "text/html")]).await, 406);
    assert_eq!(get("/traits", &[("accept", "*")]).await, 200);

    // A newline at the end of a path is no part of a name.
    let (status, location) = send(Method::PUT, "/resource_classes/CUSTOM_NL%0A", &[("host", "foo")]).await;
    assert_eq!((status, location.as_deref()), (201, Some("http://foo/resource_classes/CUSTOM_NL")));
    assert_eq!(get("/resource_classes/CUSTOM_NL", &[]).await, 200);
    assert_eq!(get("/resource_classes/%ff", &[]).await, 404);
    assert_eq!(send(Method::PUT, "/resource_classes/CUSTOM_%ff", &[]).await.0, 400);

    let host = server.provider(1, None, &[("VCPU", 8)], &[], &[]).await;
    let (_, answer) = server.get("/allocation_candidates?resources=VCPU:1;limit=1").await;
    assert_eq!(answer["allocation_requests"].as_array().map(Vec::len), Some(1), "{answer}");
    assert_eq!(server.get("/resource_providers?name=p%3Bq").await.0, 200, "written so it is data");
    let (_, answer) = server.get("/traits?name=startswith:custom_").await;
    assert_eq!(answer, json!({"traits": ["CUSTOM_A", "CUSTOM_B"]}));

    // No generation is so high, and nobody has so much.
    for huge in [json!(100_000_000_000_000_000_000_f64), json!(u64::MAX)] {
        let traits = json!({"resource_provider_generation": huge, "traits": []});
        let (status, answer) = server.put(&format!("/resource_providers/{host}/traits"), traits).await;
        assert_eq!((status, &answer["errors"][0]["code"]), (409, &json!("placement.concurrent_update")));
        let mut amount = claim(&host, "VCPU", 1);
        amount["allocations"][&host]["resources"]["VCPU"] = huge.clone();
        let mut generation = claim(&host, "VCPU", 1);
        generation["consumer_generation"] = huge;
        for body in [amount, generation] {
            let (status, answer) = server.put(&format!("/allocations/{}", uuid(9)), body).await;
            assert_eq!(status, 409, "{answer}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_wait_for_each_other_and_small_ones_for_nobody() {
    let server = Server::start().await;
    let address = server.url.trim_start_matches("http://").to_owned();
    let mut halves = Vec::new();
    for _ in 0..16 {
        let mut half = tokio::net::TcpStream::connect(&address).await.unwrap();
        let head = "POST /resource_providers HTTP/1.1\r\nHost: x\r\nX-Auth-Token: admin\r\n\
                    Content-Type: application/json\r\nContent-Length: 90000\r\n\r\n";
        half.write_all(head.as_bytes()).await.unwrap();
        half.write_all(&[b' '; 80_000]).await.unwrap();
        halves.push(half);
    }
    // Until the server has taken a place for each, of which it tells nobody.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let large = json!({"name": "n", "unknown": "x".repeat(90_000)});
    let mut large = std::pin::pin!(server.post("/resource_providers", large));
    assert!(tokio::time::timeout(Duration::from_millis(500), large.as_mut()).await.is_err(), "it waits");
    assert_eq!(server.post("/resource_providers", json!({"name": "n"})).await.0, 200);
    halves.pop();
    let answered = tokio::time::timeout(Duration::from_secs(10), large).await;
    assert_eq!(answered.unwrap().0, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_into_one_transaction_is_refused_and_nobody_else_is() {
    let server = Server::start().await;
    let host = server.provider(1, None, &[("VCPU", 1000)], &[], &[]).await;
    let aggregates: Vec<String> = (0..40_000).map(uuid).collect();
    let large = json!({"resource_provider_generation": 1, "aggregates": aggregates});
    let path = format!("/resource_providers/{host}/aggregates");
    let claim_path = format!("/allocations/{}", uuid(60));
    let (refused, claimed) =
        tokio::join!(server.put(&path, large), server.put(&claim_path, claim(&host, "VCPU", 1)));
    assert_eq!(claimed.0, 204);
    // The claim may have been first, and counted the generation up.
    assert!([400, 409].contains(&refused.0), "{}", refused.1);
    let many: serde_json::Map<String, Value> =
        (0..500).map(|number| (uuid(100 + number), claim(&host, "VCPU", 1))).collect();
    let (status, answer) = server.post("/allocations", many.into()).await;
    assert_eq!(status, 400, "{answer}");
    assert!(answer.to_string().contains("max_txn_ops"), "{answer}");
    assert_eq!(server.get(&format!("/resource_providers/{host}/usages")).await.1["usages"]["VCPU"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_of_any_kind_are_answered_soon() {
    let server = Server::start().await;
    for number in 0..20 {
        server
            .provider(100 + number, None, &[("VCPU", 8), ("MEMORY_MB", 4096)], &["HW_CPU_X86_AVX"], &[7])
            .await;
    }
    for number in 0..300 {
        server.provider(200 + number, None, &[], &[], &[7]).await;
    }
    server.provider(99, None, &[("VCPU", 8000)], &[], &[]).await;
    let many: String = (1..=2000).map(|group| format!("&resources{group}=VCPU:1")).collect();
    // As many as there is room for in an address.
    let deep: String = (0..3200).map(|group| format!("&resources{group:03x}=VCPU:1")).collect();
    let product: String = (1..=12).map(|group| format!("&resources_{group}=VCPU:1")).collect();
    let never: String = (1..=2000).map(|group| format!("_{group},")).collect();
    let repeated = format!("&member_of={}", uuid(7)).repeat(1300);
    // Each another list, and everybody is in all of them but the last.
    let others: String = (0..700).map(|n| format!("&member_of=in:{},{}", uuid(7), uuid(1000 + n))).collect();
    let nowhere = format!("&member_of={}", uuid(8));
    let traits = format!("&required=in:HW_CPU_X86_AVX{}", ",HW_CPU_X86_AVX".repeat(4000));
    let queries = [
        (format!("/allocation_candidates?resources=VCPU:1{repeated}{nowhere}"), 200),
        (format!("/allocation_candidates?resources=VCPU:1{others}{nowhere}"), 200),
        (format!("/allocation_candidates?resources=VCPU:1{others}"), 200),
        (format!("/allocation_candidates?resources=VCPU:1{traits}"), 200),
        (format!("/resource_providers?{repeated}{nowhere}"), 200),
        (format!("/resource_providers?{others}"), 200),
        (format!("/resource_providers?{traits}"), 200),
        ("/allocation_candidates?resources=%ff%fe".to_owned(), 400),
        ("/allocation_candidates?resources=VCPU:99999999999999999999".into(), 400),
        ("/allocation_candidates?resources=VCPU:9223372036854775807".into(), 200),
        ("/allocation_candidates?resources=VCPU:1&limit=99999999999999999999999".into(), 200),
        ("/allocation_candidates?resources=VCPU:1&limit=0".into(), 400),
        ("/allocation_candidates?resources=VCPU:1&limit=-1".into(), 400),
        ("/allocation_candidates?".into(), 400),
        ("/allocation_candidates?unknown=1".into(), 400),
        (format!("/allocation_candidates?group_policy=isolate{many}"), 200),
        (format!("/allocation_candidates?group_policy=none{product}&limit=3"), 200),
        (format!("/allocation_candidates?group_policy=none{deep}&limit=1"), 200),
        (format!("/allocation_candidates?resources_1=VCPU:1&same_subtree={never}"), 400),
        ("/resource_providers?resources=VCPU".into(), 400),
        ("/resource_providers?uuid=x".into(), 400),
        ("/resource_providers?required=".into(), 400),
        ("/resource_providers?member_of=in:x".into(), 400),
        ("/resource_providers?name=%00".into(), 200),
        ("/traits?name=x".into(), 400),
        ("/usages".into(), 400),
        ("/resource_providers/%ff".into(), 404),
        ("/resource_providers/%2e%2e%2f".into(), 404),
    ];
    for (query, wanted) in queries {
        let began = Instant::now();
        let (status, answer) = server.get(&query).await;
        let shown: String = query.chars().take(80).collect();
        assert_eq!(status, wanted, "{shown}: {answer}");
        assert!(began.elapsed() < Duration::from_secs(10), "{shown}: {:?}", began.elapsed());
        if status >= 400 {
            is_error_document(&answer, status);
        }
    }
}

/// The nil uuid is one as any other, and no other stands for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_misspelt_uuid_is_nobodys_whoever_there_is() {
    let server = Server::start().await;
    let nil = server.provider(0, None, &[("VCPU", 8)], &[], &[]).await;
    let host = server.provider(0xa, None, &[("VCPU", 8)], &[], &[]).await;
    for (said, wanted) in [(nil, 1), (host.to_uppercase(), 0)] {
        for query in [
            "/resource_providers?uuid",
            "/resource_providers?in_tree",
            "/allocation_candidates?resources=VCPU:1&in_tree",
        ] {
            let (status, answer) = server.get(&format!("{query}={said}")).await;
            let listed = answer.as_object().unwrap().values().next().unwrap().as_array().unwrap().len();
            assert_eq!((status, listed), (200, wanted), "{query}={said}: {answer}");
        }
        let (named, misspelt) = (json!({"name": "n", "parent_provider_uuid": said}), wanted == 0);
        let made = server.post("/resource_providers", named.clone()).await;
        let moved = server.put(&format!("/resource_providers/{host}"), named).await;
        if misspelt {
            for (status, answer) in [made, moved] {
                assert_eq!(status, 400, "{said}: {answer}");
                assert!(answer.to_string().contains("parent provider UUID does not exist"), "{answer}");
            }
        } else {
            assert_eq!((made.0, moved.0), (200, 409), "the name is taken by then");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_combinations_than_anybody_can_count_are_refused() {
    let server = Server::start().await;
    server.provider(1, None, &[], &[], &[]).await;
    for number in 0..30 {
        server.provider(100 + number, Some(1), &[("VCPU", 800)], &[], &[]).await;
    }
    let groups: String = (1..=12).map(|group| format!("&resources_{group}=VCPU:1")).collect();
    let began = Instant::now();
    let (status, answer) = server.get(&format!("/allocation_candidates?group_policy=none{groups}")).await;
    assert_eq!(status, 400, "{answer}");
    assert!(answer.to_string().contains("limit"), "{answer}");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    let (status, answer) =
        server.get(&format!("/allocation_candidates?group_policy=none&limit=2{groups}")).await;
    assert_eq!((status, answer["allocation_requests"].as_array().unwrap().len()), (200, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_slow_or_speaks_no_http_holds_nobody_up() {
    let server = Server::start().await;
    let address = server.url.trim_start_matches("http://").to_owned();
    let mut slow = tokio::net::TcpStream::connect(&address).await.unwrap();
    slow.write_all(b"POST /resource_providers HTTP/1.1\r\nHost: x\r\nX-Auth-Token: admin\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        .await
        .unwrap();
    let mut garbage = tokio::net::TcpStream::connect(&address).await.unwrap();
    garbage.write_all(b"\x16\x03\x01\x00garbage\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    garbage.read_to_end(&mut answer).await.unwrap();
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&answer));
    assert_eq!(server.get("/resource_providers").await.0, 200);
    // Half a head, and then nothing more.
    slow.shutdown().await.unwrap();
    assert_eq!(server.get("/resource_providers").await.0, 200);
}

#[test]
fn random_queries_never_make_a_500() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(async {
        let server = Server::start().await;
        server.provider(1, None, &[("VCPU", 8)], &["MISC_SHARES_VIA_AGGREGATE"], &[9]).await;
        server.provider(2, Some(1), &[("DISK_GB", 8)], &["HW_CPU_X86_AVX"], &[9]).await;
        server
    });
    let key = prop_oneof![
        Just("resources".to_owned()),
        Just("required".to_owned()),
        Just("member_of".to_owned()),
        Just("in_tree".to_owned()),
        Just("same_subtree".to_owned()),
        Just("root_required".to_owned()),
        Just("group_policy".to_owned()),
        Just("limit".to_owned()),
        "[a-z_]{1,12}",
    ];
    let value = prop_oneof![
        Just("VCPU:1".to_owned()),
        Just("VCPU:1,DISK_GB:1".to_owned()),
        Just("!HW_CPU_X86_AVX".to_owned()),
        Just("in:HW_CPU_X86_AVX,CUSTOM_X".to_owned()),
        Just(uuid(9)),
        Just(format!("!in:{},{}", uuid(9), uuid(8))),
        Just("none".to_owned()),
        Just("_A,_B".to_owned()),
        "[!-~]{0,20}",
    ];
    let suffix = prop_oneof![Just(String::new()), Just("_A".to_owned()), Just("_B".to_owned()), "[0-9]{1,3}"];
    let pairs = prop::collection::vec((key, suffix, value), 0..8);
    let path = prop_oneof![
        Just("allocation_candidates"),
        Just("resource_providers"),
        Just("traits"),
        Just("usages")
    ];
    let config = Config { cases: 600, failure_persistence: None, ..Config::default() };
    proptest!(config, |(path in path, pairs in pairs)| {
        let query: Vec<String> = pairs.iter().map(|(key, suffix, value)| {
            let value: String = url::form_urlencoded::byte_serialize(value.as_bytes()).collect();
            format!("{key}{suffix}={value}")
        }).collect();
        let query = format!("/{path}?{}", query.join("&"));
        let (status, answer) = runtime.block_on(server.get(&query));
        prop_assert!(status < 500, "{query}: {answer}");
    });
}
