//! What guests get, path by path, from a service whose lookup is a closure.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends there")]

use std::net::{IpAddr, Ipv4Addr};

use base64::{Engine, prelude::BASE64_STANDARD};
use ec_metadata::{Caller, InstanceRecord, MetadataService, Origin, RECORD_VERSION};
use ec_model::{Blob, InstanceId};
use hyper::http::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};

const GUEST: Ipv4Addr = Ipv4Addr::new(192, 168, 122, 7);
const BARE: Ipv4Addr = Ipv4Addr::new(192, 168, 122, 8);
const BROKEN: Ipv4Addr = Ipv4Addr::new(192, 168, 122, 9);
const UUID: &str = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";
const BINARY: &[u8] = b"\0\xff#!/bin/sh\r\n\n\n";

fn record(address: Ipv4Addr) -> Option<InstanceRecord> {
    let id: InstanceId = UUID.parse().unwrap();
    let full = InstanceRecord {
        version: RECORD_VERSION,
        instance: id,
        name: "web".into(),
        macs: vec![id.mac(0), id.mac(1)],
        base_digest: Some("0123456789abcdef".repeat(4)),
        next_base_digest: None,
        next_wished_at: None,
        next_is_whole: false,
        rescue_base_digest: None,
        rebuilt: None,
        rescued: None,
        resized: None,
        resources_before: None,
        growing: None,
        intent: None,
        metadata: std::collections::BTreeMap::new(),
        keys: vec!["ssh-ed25519 AAAA me@home".into(), "ssh-rsa BBBB me@home\n".into()],
        user_data: Some(Blob(BINARY.to_vec())),
        token_required: false,
        project: "proj".into(),
        resources: ec_model::Resources::new(),
        started: false,
        created_at: jiff::Timestamp::UNIX_EPOCH,
    };
    let bare = InstanceRecord {
        instance: "00000000-0000-4000-8000-000000000008".parse().unwrap(),
        keys: vec![],
        user_data: None,
        base_digest: None,
        next_base_digest: None,
        next_wished_at: None,
        next_is_whole: false,
        rescue_base_digest: None,
        rebuilt: None,
        rescued: None,
        resized: None,
        resources_before: None,
        growing: None,
        intent: None,
        metadata: std::collections::BTreeMap::new(),
        ..full.clone()
    };
    [(GUEST, full), (BARE, bare)].into_iter().find(|(at, _)| *at == address).map(|(_, record)| record)
}

fn service() -> MetadataService {
    MetadataService::new(|caller| match caller.address.to_canonical() {
        IpAddr::V4(BROKEN) => Err("disk on fire"),
        IpAddr::V4(address) => Ok(record(address)),
        IpAddr::V6(_) => Ok(None),
    })
}

fn caller(address: IpAddr) -> Caller {
    Caller { address, origin: Origin::Stranger }
}

fn ask(
    service: &MetadataService,
    peer: Ipv4Addr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
) -> Response<Vec<u8>> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    service.answer(&caller(IpAddr::V4(peer)), &request.body(()).unwrap())
}

fn get(peer: Ipv4Addr, path: &str) -> Response<Vec<u8>> {
    ask(&service(), peer, Method::GET, path, &[])
}

fn text(path: &str) -> String {
    let response = get(GUEST, path);
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    assert_eq!(response.headers()["content-type"], "text/plain", "{path}");
    String::from_utf8(response.into_body()).unwrap()
}

fn json_at(path: &str) -> Value {
    let response = get(GUEST, path);
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    assert_eq!(response.headers()["content-type"], "application/json", "{path}");
    serde_json::from_slice(response.body()).unwrap()
}

#[test]
fn the_ec2_tree_has_what_guests_look_for() {
    let listing = "ami-id\nami-launch-index\nhostname\ninstance-id\nlocal-hostname\nlocal-ipv4\nplacement/\npublic-keys/";
    for version in ["latest", "1.0", "2009-04-04", "2016-09-02", "2018-09-24", "2021-03-23"] {
        for (path, wanted) in [
            ("", "meta-data/\nuser-data"),
            ("/meta-data", listing),
            ("/meta-data/ami-id", "ami-0123456789abcdef0"),
            ("/meta-data/ami-launch-index", "0"),
            ("/meta-data/hostname", "web"),
            ("/meta-data/local-hostname", "web"),
            ("/meta-data/instance-id", &format!("i-{UUID}")),
            ("/meta-data/local-ipv4", "192.168.122.7"),
            ("/meta-data/placement", "availability-zone"),
            ("/meta-data/placement/availability-zone", "nova"),
            ("/meta-data/public-keys", "0=key-0\n1=key-1"),
            ("/meta-data/public-keys/0", "openssh-key"),
            ("/meta-data/public-keys/0/openssh-key", "ssh-ed25519 AAAA me@home\n"),
            ("/meta-data/public-keys/1/openssh-key", "ssh-rsa BBBB me@home\n"),
        ] {
            assert_eq!(text(&format!("/{version}{path}")), wanted, "{path}");
            assert_eq!(text(&format!("//{version}/{path}//")), wanted, "slashes do not count: {path}");
        }
    }
    let versions = text("/");
    assert!(
        versions.starts_with("1.0\n2007-01-19\n") && versions.ends_with("\n2021-03-23\nlatest"),
        "{versions}"
    );
}

#[test]
fn metadata_is_among_the_tags_where_its_key_can_be_part_of_a_path() {
    let with = |keys: &[&str]| {
        let metadata = keys.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect();
        let record = InstanceRecord { metadata, ..record(GUEST).unwrap() };
        let service = MetadataService::new(move |_| Ok::<_, String>(Some(record.clone())));
        move |path: &str| {
            let response = ask(&service, GUEST, Method::GET, &format!("/latest/meta-data/{path}"), &[]);
            (response.status(), String::from_utf8_lossy(response.body()).into_owned())
        }
    };
    let some = with(&["role", "...", "a.b", ".", "..", "a b"]);
    assert_eq!(some("tags/instance").1, "...\na.b\nrole");
    assert_eq!(some("tags/instance/role"), (StatusCode::OK, "x".to_owned()));
    let none = with(&[".", "..", "a b"]);
    assert!(!none("").1.contains("tags"));
    assert_eq!(none("tags/instance").0, StatusCode::NOT_FOUND);
}

#[test]
fn every_name_that_a_listing_gives_can_be_fetched() {
    fn crawl(peer: Ipv4Addr, base: &str, fetched: &mut usize) {
        let response = get(peer, base);
        assert_eq!(response.status(), StatusCode::OK, "{base}");
        for line in String::from_utf8(response.into_body()).unwrap().lines() {
            if line.ends_with('/') {
                crawl(peer, &format!("{base}{line}"), fetched);
            } else {
                let name =
                    line.split_once('=').map_or(line.to_owned(), |(id, _)| format!("{id}/openssh-key"));
                assert_eq!(get(peer, &format!("{base}{name}")).status(), StatusCode::OK, "{base}{name}");
                *fetched += 1;
            }
        }
    }
    for (peer, wanted) in [(GUEST, 9), (BARE, 6)] {
        let mut fetched = 0;
        crawl(peer, "/latest/meta-data/", &mut fetched);
        assert_eq!(fetched, wanted);
        for version in String::from_utf8(get(peer, "/").into_body()).unwrap().lines() {
            assert_eq!(get(peer, &format!("/{version}/")).status(), StatusCode::OK, "{version}");
        }
        for version in String::from_utf8(get(peer, "/openstack").into_body()).unwrap().lines() {
            crawl(peer, &format!("/openstack/{version}/"), &mut fetched);
        }
    }
}

#[test]
fn user_data_comes_byte_for_byte_or_not_at_all() {
    for path in [
        "/latest/user-data",
        "/2009-04-04/user-data/",
        "/openstack/latest/user_data",
        "/openstack/2018-08-27/user_data",
    ] {
        let response = get(GUEST, path);
        assert_eq!(response.body(), BINARY, "{path}");
        assert_eq!(response.headers()["content-type"], "application/octet-stream");
        assert_eq!(get(BARE, path).status(), StatusCode::NOT_FOUND, "{path}");
    }
}

#[test]
fn the_openstack_tree_has_what_cloud_init_reads() {
    for version in ["2012-08-10", "2013-10-17", "2015-10-15", "2016-10-06", "2018-08-27", "latest"] {
        let base = format!("/openstack/{version}");
        let meta = json_at(&format!("{base}/meta_data.json"));
        assert_eq!(meta["uuid"], UUID);
        assert_eq!((&meta["name"], &meta["hostname"]), (&json!("web"), &json!("web")));
        assert_eq!((&meta["launch_index"], &meta["project_id"]), (&json!(0), &json!("proj")));
        assert_eq!(meta["availability_zone"], "nova");
        assert_eq!(
            meta["public_keys"],
            json!({"key-0": "ssh-ed25519 AAAA me@home", "key-1": "ssh-rsa BBBB me@home"})
        );
        assert_eq!(meta["keys"][1], json!({"name": "key-1", "type": "ssh", "data": "ssh-rsa BBBB me@home"}));
        assert_eq!(BASE64_STANDARD.decode(meta["random_seed"].as_str().unwrap()).unwrap().len(), 512);
        assert_eq!(json_at(&format!("{base}/vendor_data.json")), json!({}));
        assert_eq!(json_at(&format!("{base}/vendor_data2.json")), json!({}));
        let network = json_at(&format!("{base}/network_data.json"));
        let id: InstanceId = UUID.parse().unwrap();
        for number in 0..2_u8 {
            let (link, net) =
                (&network["links"][usize::from(number)], &network["networks"][usize::from(number)]);
            assert_eq!(link["ethernet_mac_address"], id.mac(number).to_string());
            assert_eq!((&link["type"], &net["type"]), (&json!("phy"), &json!("ipv4_dhcp")));
            assert_eq!(net["link"], link["id"]);
        }
        assert_eq!(network["services"], json!([]));
        assert_eq!(get(GUEST, &format!("{base}/password")).status(), StatusCode::NOT_FOUND);
    }
    assert!(text("/openstack/").lines().any(|line| line == "2018-08-27"));
    assert_ne!(
        json_at("/openstack/latest/meta_data.json")["random_seed"],
        json_at("/openstack/latest/meta_data.json")["random_seed"]
    );
}

#[test]
fn what_is_not_there_is_404() {
    for path in [
        "/9999-01-01/",
        "/latest/meta-data/nothing",
        "/latest/meta-data/public-keys/2",
        "/latest/meta-data/public-keys/x",
        "/latest/meta-data/public-keys/-1/openssh-key",
        "/latest/meta-data/public-keys/0/other",
        "/latest/meta-data/hostname/x",
        "/latest/../latest/meta-data",
        "/latest/meta%2ddata",
        "/latest/dynamic",
        "/latest/api",
        "/openstack/1999",
        "/openstack/latest/x",
        "/openstack/content/0000",
    ] {
        assert_eq!(get(GUEST, path).status(), StatusCode::NOT_FOUND, "{path}");
    }
    for path in [
        "/latest/meta-data/public-keys/",
        "/latest/meta-data/public-keys/0/openssh-key",
        "/latest/meta-data/ami-id",
    ] {
        assert_eq!(get(BARE, path).status(), StatusCode::NOT_FOUND, "{path}");
    }
}

#[test]
fn a_stranger_gets_404_for_everything_whatever_it_says_about_itself() {
    let stranger = Ipv4Addr::new(192, 168, 122, 1);
    let service = service();
    let claims = [
        ("x-forwarded-for", "192.168.122.7"),
        ("forwarded", "for=192.168.122.7"),
        ("x-real-ip", "192.168.122.7"),
    ];
    for (method, path) in [
        (Method::GET, "/"),
        (Method::GET, "/latest/meta-data/"),
        (Method::GET, "/latest/user-data"),
        (Method::GET, "/openstack"),
        (Method::PUT, "/latest/api/token"),
        (Method::POST, "/"),
        (Method::DELETE, "/latest"),
    ] {
        let response = ask(&service, stranger, method, path, &claims);
        assert_eq!(response.status(), StatusCode::NOT_FOUND, "{path}");
    }
    let request = Request::builder().uri("/latest/meta-data/").body(()).unwrap();
    assert_eq!(service.answer(&caller("fe80::1".parse().unwrap()), &request).status(), StatusCode::NOT_FOUND);
    let mapped = caller("::ffff:192.168.122.7".parse().unwrap());
    assert_eq!(service.answer(&mapped, &request).status(), StatusCode::OK);
}

#[test]
fn a_lookup_that_fails_is_500_so_that_the_guest_asks_again() {
    assert_eq!(get(BROKEN, "/latest/meta-data/").status(), StatusCode::INTERNAL_SERVER_ERROR);
}

#[test]
fn other_methods_are_refused_with_those_that_are_allowed() {
    let service = service();
    for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH, Method::OPTIONS] {
        let response = ask(&service, GUEST, method, "/latest/meta-data/", &[]);
        assert_eq!(
            (response.status(), &response.headers()["allow"]),
            (StatusCode::METHOD_NOT_ALLOWED, &"GET, HEAD".parse().unwrap())
        );
    }
    let response = ask(&service, GUEST, Method::GET, "/latest/api/token", &[]);
    assert_eq!(
        (response.status(), &response.headers()["allow"]),
        (StatusCode::METHOD_NOT_ALLOWED, &"PUT".parse().unwrap())
    );
    assert_eq!(ask(&service, GUEST, Method::HEAD, "/latest/meta-data/", &[]).status(), StatusCode::OK);
}

#[test]
fn tokens_are_offered_checked_where_given_and_not_needed() {
    const TOKEN: &str = "X-aws-ec2-metadata-token";
    const TTL: &str = "X-aws-ec2-metadata-token-ttl-seconds";
    let service = service();
    let issue =
        |peer, headers: &[(&str, &str)]| ask(&service, peer, Method::PUT, "/latest/api/token", headers);
    for ttl in ["0", "21601", "-1", "", "x", "99999999999999999999"] {
        assert_eq!(issue(GUEST, &[(TTL, ttl)]).status(), StatusCode::BAD_REQUEST, "{ttl}");
    }
    assert_eq!(issue(GUEST, &[]).status(), StatusCode::BAD_REQUEST);
    let response = issue(GUEST, &[(TTL, "21600")]);
    assert_eq!((response.status(), &response.headers()[TTL]), (StatusCode::OK, &"21600".parse().unwrap()));
    let token = String::from_utf8(response.into_body()).unwrap();
    let with = |peer, token: &str, path| ask(&service, peer, Method::GET, path, &[(TOKEN, token)]).status();
    assert_eq!(with(GUEST, &token, "/latest/meta-data/instance-id"), StatusCode::OK);
    assert_eq!(with(GUEST, &token, "/openstack/latest/meta_data.json"), StatusCode::OK);
    assert_eq!(with(GUEST, "wrong", "/latest/meta-data/instance-id"), StatusCode::UNAUTHORIZED);
    assert_eq!(with(BARE, &token, "/latest/meta-data/instance-id"), StatusCode::UNAUTHORIZED, "another's");
    assert_eq!(
        ask(&service, GUEST, Method::GET, "/latest/meta-data/", &[]).status(),
        StatusCode::OK,
        "none is needed"
    );
}

#[test]
fn where_a_token_is_required_nothing_is_told_without_one() {
    const TOKEN: &str = "X-aws-ec2-metadata-token";
    const TTL: &str = "X-aws-ec2-metadata-token-ttl-seconds";
    let service = MetadataService::new(|_| {
        Ok::<_, String>(record(GUEST).map(|record| InstanceRecord { token_required: true, ..record }))
    });
    let get =
        |path: &str, headers: &[(&str, &str)]| ask(&service, GUEST, Method::GET, path, headers).status();
    let paths = [
        "/",
        "/latest/meta-data/",
        "/latest/user-data",
        "/2009-04-04/meta-data/instance-id",
        "/openstack",
        "/openstack/latest/meta_data.json",
        "/openstack/latest/user_data",
    ];
    for path in paths {
        assert_eq!(get(path, &[]), StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(get(path, &[(TOKEN, "AAAA")]), StatusCode::UNAUTHORIZED, "{path}");
        let head = ask(&service, GUEST, Method::HEAD, path, &[]).status();
        assert_eq!(head, StatusCode::UNAUTHORIZED, "{path}");
    }
    // Something that passes requests on does not get one for its user.
    let forwarded = [(TTL, "60"), ("X-Forwarded-For", "10.0.0.9")];
    let refused = ask(&service, GUEST, Method::PUT, "/latest/api/token", &forwarded);
    assert_eq!(refused.status(), StatusCode::FORBIDDEN);
    let issued = ask(&service, GUEST, Method::PUT, "/latest/api/token", &[(TTL, "60")]);
    assert_eq!(issued.status(), StatusCode::OK);
    let token = String::from_utf8(issued.into_body()).unwrap();
    for path in paths {
        assert_eq!(get(path, &[(TOKEN, &token)]), StatusCode::OK, "{path}");
    }
}
