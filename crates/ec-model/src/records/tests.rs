use std::collections::BTreeMap;

use jiff::Timestamp;
use proptest::prelude::*;

use super::*;
use crate::{InstanceId, Keyspace};

fn spec() -> Spec {
    Spec {
        query: "resources=VCPU:1,MEMORY_MB:256&required=HW_X".into(),
        resources: [("VCPU".into(), 1)].into(),
        image: ImageRef::at("file:///x"),
        keys: vec!["ssh-ed25519 AAAA".into()],
        metadata: std::collections::BTreeMap::new(),
        user_data_bytes: Some(3),
        token_required: false,
        snapshot: false,
    }
}

fn request() -> Request {
    Request {
        instance: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
        epoch: 1,
        generation: 1,
        desired: Desired::Active,
        power: PowerWish::default(),
        restart: Restart::No,
        rebuild: None,
        rescue: None,
        kind: crate::Workload::Machine,
        volumes: Vec::new(),
        resize: None,
        handover: None,
        name: Some("web".into()),
        project: "p".into(),
        user: "u".into(),
        spec: Some(spec()),
        access: None,
        request_id: None,
        created_at: Timestamp::UNIX_EPOCH,
    }
}

fn json<R: Record>(record: &R) -> Value {
    serde_json::from_slice(&encode(record)).unwrap()
}

#[test]
fn of_what_cannot_be_read_only_the_ends_are_told() {
    let long = format!("\"{}\"", "a".repeat(1_000_000));
    let why = decode::<Request>(long.as_bytes()).unwrap_err().to_string();
    assert!(
        why.len() < 300 && why.contains("invalid type: string \"aaa") && why.ends_with("column 1000002"),
        "{why}"
    );
    let all = "a".repeat(80);
    let why = decode::<Request>(format!("\"{all}\"").as_bytes()).unwrap_err().to_string();
    assert!(why.contains(&all), "{why}");
}

#[test]
fn a_request_reads_back_as_written_and_user_data_hides_from_debug() {
    let request = request();
    assert_eq!(decode::<Request>(&encode(&request)).unwrap(), request);
    assert_eq!(format!("{:?}", Blob(vec![0, 255, 10])), "Blob(3 bytes)");
}

#[test]
fn what_is_no_id_of_a_command_costs_nothing_but_that() {
    let id: crate::RequestId = "req-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let mut json = json(&Request { request_id: Some(id), ..request() });
    assert_eq!(json["request_id"], id.to_string());
    assert_eq!(decode::<Request>(json.to_string().as_bytes()).unwrap().request_id, Some(id));
    for none in [Value::Null, 7.into(), "req-mine".into(), serde_json::json!({})] {
        json["request_id"] = none;
        assert_eq!(decode::<Request>(json.to_string().as_bytes()).unwrap(), request());
    }
}

#[test]
fn unknown_fields_are_passed_over_and_a_later_format_is_refused() {
    let mut json = json(&request());
    json["later"] = 1.into();
    assert!(decode::<Request>(json.to_string().as_bytes()).is_ok());
    json["version"] = (Request::FORMAT + 1).into();
    let error = decode::<Request>(json.to_string().as_bytes()).unwrap_err().to_string();
    assert!(error.contains(&format!("version {}", Request::FORMAT + 1)), "{error}");
}

#[test]
fn a_later_record_without_the_fields_of_today_is_told_as_later() {
    // Where the version comes first, whatever follows.
    for text in
        [r#"{"version":99,"of":"tomorrow"}"#, r#"{"of":"tomorrow","version":99}"#, r#"{"version":99,?"#]
    {
        let error = decode::<Request>(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("version 99"), "{error}");
    }
    let error = decode::<Request>(br#"{"version":1,"of":"today"}"#).unwrap_err().to_string();
    assert!(error.contains("not a valid request record"), "{error}");
    let error = decode::<Request>(br#"{"of":"nobody"}"#).unwrap_err().to_string();
    assert!(error.contains("missing field `version`"), "{error}");
}

#[test]
fn a_change_keeps_what_the_reader_does_not_know() {
    let mut json = json(&request());
    json["later"] = serde_json::json!({"x": 1});
    json["spec"]["later"] = "y".into();
    json["spec"]["image"]["later"] = 3.into();
    let mut doc = Doc::<Request>::decode(json.to_string().as_bytes()).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&doc.encode()).unwrap(), json, "unchanged, so as it was");
    doc.record.desired = Desired::Destroyed;
    doc.record.name = None;
    doc.record.spec.as_mut().unwrap().image.sha256 = Some("00".into());
    let written = doc.encode();
    let read: Value = serde_json::from_slice(&written).unwrap();
    assert_eq!((&read["later"], &read["spec"]["later"]), (&json["later"], &json["spec"]["later"]));
    assert_eq!(read["spec"]["image"]["later"], 3);
    assert_eq!(decode::<Request>(&written).unwrap(), doc.record);
}

#[test]
fn a_list_that_is_changed_keeps_what_the_reader_does_not_know_of_those_that_stay_in_it() {
    let has = |number| Attachment {
        volume: InstanceId::new(uuid::Uuid::from_u128(number)),
        device: format!("vd{number}"),
    };
    let mut json = json(&Request { volumes: vec![has(1), has(2), has(3)], ..request() });
    for number in 0..3 {
        json["volumes"][number]["later"] = number.into();
    }
    let mut doc = Doc::<Request>::decode(json.to_string().as_bytes()).unwrap();
    doc.record.volumes = vec![has(3), has(4), has(1)];
    let written = doc.encode();
    let read: Value = serde_json::from_slice(&written).unwrap();
    let of = |number: usize| read["volumes"][number]["later"].as_u64();
    assert_eq!([of(0), of(1), of(2)], [Some(2), None, Some(0)], "{read}");
    assert_eq!(decode::<Request>(&written).unwrap(), doc.record);
}

#[test]
fn words_of_a_later_release_that_may_be_overlooked_are_unknown_and_others_are_refused() {
    assert_eq!(serde_json::from_str::<State>(r#""SHELVED""#).unwrap(), State::Unknown);
    assert_eq!(serde_json::from_str::<AddressSource>(r#""ndp""#).unwrap(), AddressSource::Unknown);
    let mut json = json(&request());
    json["desired"] = "rescued".into();
    assert!(decode::<Request>(json.to_string().as_bytes()).is_err());
}

#[test]
fn an_agent_that_does_not_say_what_it_reads_reads_nothing_of_ours() {
    let text = r#"{"version":1,"node":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab","name":"n","agent":"0","virt_type":"kvm",
                   "started_at":"2026-01-01T00:00:00Z"}"#;
    let mut alive = decode::<Alive>(text.as_bytes()).unwrap();
    assert!(!alive.reads::<Request>(1));
    alive.formats = Alive::formats_of_this_release();
    assert!(alive.reads::<Request>(Request::FORMAT));
    for (last, reads) in [(0, [false, false]), (1, [true, false]), (2, [true, true])] {
        alive.formats = [("request".to_owned(), last)].into();
        assert_eq!([alive.reads::<Request>(1), alive.reads::<Request>(2)], reads, "{last}");
    }
}

#[test]
fn a_request_is_of_the_first_format_unless_an_image_in_it_needs_the_second() {
    let version = |request: &Request| json(request)["version"].as_u64();
    let sha512 = || ImageRef { sha512: Some("a".repeat(128)), ..ImageRef::at("https://host/x") };
    let with = |image: ImageRef| {
        let mut request = request();
        request.spec.as_mut().unwrap().image = image;
        request
    };
    let named = ImageRef { name: Some("debian".into()), ..ImageRef::at("https://host/x") };
    assert_eq!((version(&request()), version(&with(named))), (Some(1), Some(1)));
    assert_eq!(version(&with(sha512())), Some(2));
    assert_eq!(version(&with(ImageRef::at("s3://bucket/x"))), Some(2));
    // It is so of what is changed, too, in both directions.
    let mut doc = Doc::<Request>::decode(&encode(&request())).unwrap();
    doc.record.rescue = Some(crate::Rescue { wished_at: jiff::Timestamp::UNIX_EPOCH, image: sha512() });
    let changed = doc.encode();
    assert!(changed.starts_with(br#"{"version":2,"#));
    let mut doc = Doc::<Request>::decode(&changed).unwrap();
    doc.record.rescue = None;
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&doc.encode()).unwrap()["version"], 1);
}

#[test]
fn an_image_is_the_same_by_what_it_is_and_not_by_how_it_was_called() {
    let one = ImageRef { sha256: Some("a".into()), ..ImageRef::at("u") };
    assert!(one.is_same(&ImageRef { name: Some("n".into()), ..one.clone() }));
    for other in [
        ImageRef { url: "v".into(), ..one.clone() },
        ImageRef { sha256: None, ..one.clone() },
        ImageRef { sha512: Some("b".into()), ..one.clone() },
    ] {
        assert!(!one.is_same(&other), "{other:?}");
    }
}

#[test]
fn states_are_written_as_they_are_told_and_padded() {
    // None is forgotten: they stand in their order, and the one for all others is the last.
    assert_eq!(State::ALL.len(), State::Unknown as usize + 1);
    for (place, state) in State::ALL.into_iter().enumerate() {
        assert_eq!(place, state as usize);
        assert_eq!(serde_json::to_value(state).unwrap(), state.to_string());
    }
    assert_eq!(format!("{:8}|", State::Error), "ERROR   |");
    assert!(State::ALL.into_iter().all(|state| State::named(state.name()) == Some(state)));
    assert_eq!(State::named("active"), None);
}

#[test]
fn an_instance_is_rescued_where_that_is_told_and_did_not_fail() {
    let text = r#"{"version":1,"instance":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab","node":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
                   "state":"RESCUED","since":"1970-01-01T00:00:00Z","updated_at":"1970-01-01T00:00:00Z"}"#;
    let status = decode::<Status>(text.as_bytes()).unwrap();
    let told = |failed: Option<&str>| {
        Some(Rescued { wished_at: Timestamp::UNIX_EPOCH, failed: failed.map(str::to_owned) })
    };
    for (rescued, is_rescued) in [(None, false), (told(None), true), (told(Some("no image")), false)] {
        let status = Status { rescued, ..status.clone() };
        assert_eq!(decode::<Status>(&encode(&status)).unwrap().is_rescued(), is_rescued);
    }
    let rescue = Rescue { wished_at: Timestamp::UNIX_EPOCH, image: spec().image };
    let request = Request { rescue: Some(rescue), ..request() };
    assert_eq!(decode::<Request>(&encode(&request)).unwrap(), request);
}

#[test]
fn progress_is_told_in_percent_of_a_whole_that_is_known() {
    for (done, total, percent) in [
        (5, None, None),
        (5, Some(0), None),
        (0, Some(1), Some(0)),
        (1, Some(3), Some(33)),
        (3, Some(4), Some(75)),
        (9, Some(4), Some(100)),
    ] {
        assert_eq!(Progress { step: "image".into(), done, total }.percent(), percent, "{done} of {total:?}");
    }
}

#[test]
fn a_new_record_is_written_as_any_other_and_a_part_that_is_new_in_it_too() {
    let request = Request { spec: None, ..request() };
    let mut doc = Doc::new(request.clone());
    assert_eq!(serde_json::from_slice::<Value>(&doc.encode()).unwrap(), json(&request));
    doc.record.spec = Some(spec());
    assert_eq!(decode::<Request>(&doc.encode()).unwrap(), doc.record);
}

#[test]
fn a_wish_for_power_that_says_little_is_a_patient_one_for_a_guest_that_runs() {
    let wish: PowerWish = serde_json::from_str(r#"{"power":"stopped","generation":3}"#).unwrap();
    let patient = PowerWish { power: Power::Stopped, generation: 3, grace_seconds: 60, anew: false };
    assert_eq!(wish, patient);
    let mut json = json(&request());
    json.as_object_mut().unwrap().remove("power");
    let first = PowerWish { power: Power::Running, generation: 1, ..patient };
    assert_eq!(decode::<Request>(json.to_string().as_bytes()).unwrap().power, first);
    assert_eq!(serde_json::to_value(Restart::OnFailure).unwrap(), "on-failure");
}

#[test]
fn restarts_are_told_where_there_were_some() {
    let status = r#"{"version":1,"instance":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
        "node":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab","state":"ACTIVE","since":"1970-01-01T00:00:00Z",
        "updated_at":"1970-01-01T00:00:00Z"}"#;
    let mut status = decode::<Status>(status.as_bytes()).unwrap();
    assert_eq!((status.restarts, json(&status).get("restarts")), (0, None));
    status.restarts = 2;
    assert_eq!(json(&status)["restarts"], 2);
}

#[test]
fn an_instance_is_where_it_was_assigned() {
    let node = "11111111-1111-1111-1111-111111111111".parse().unwrap();
    let mut instance = Instance {
        instance: request().instance,
        project: String::new(),
        user: String::new(),
        name: None,
        labels: BTreeMap::new(),
        spec: spec(),
        power: PowerWish::default(),
        restart: Restart::No,
        group: None,
        before: None,
        kind: crate::Workload::Machine,
        volumes: Vec::new(),
        attached: None,
        made_of: None,
        locked: None,
        request_id: None,
        assigned: None,
        generation: 1,
        created_at: Timestamp::UNIX_EPOCH,
    };
    assert_eq!(instance.node(), None);
    instance.assigned = Some(Assigned { node, epoch: 1 });
    assert_eq!(instance.node(), Some(node));
    let keys = Keyspace::default();
    assert_eq!(keys.membership(&instance), None);
    (instance.project, instance.group) = ("p".into(), Some("Apart".into()));
    assert_eq!(keys.membership(&instance), Some(keys.member("p", "apart", node, instance.instance)));
    instance.assigned = None;
    assert_eq!(keys.membership(&instance), None);
    assert_eq!(USER_DATA_MAX, 65_536);

    // Whichever is told first.
    let disks = [1, 2].map(|n| InstanceId::new(uuid::Uuid::from_u128(n)));
    let all = CopyOf::fingerprint(&disks);
    assert_eq!((CopyOf::fingerprint(&[]), CopyOf::fingerprint(&[disks[1], disks[0]])), (0, all));
    assert!(![0, CopyOf::fingerprint(&disks[..1]), CopyOf::fingerprint(&disks[1..])].contains(&all));

    // Of a copy what was copied tells it, as far as that is known.
    let (of, none) = (ImageRef::at("http://h/debian.qcow2"), ImageRef::default());
    let copy = ImageRef::copy_of(&CopyOf::disk(Workload::Machine, instance.instance));
    let mut made = |image: &ImageRef, made_of: Option<&ImageRef>| {
        (instance.spec.image, instance.made_of) = (image.clone(), made_of.cloned());
        instance.image().cloned()
    };
    assert_eq!(made(&of, None), Some(of.clone()));
    assert_eq!(made(&copy, Some(&of)), Some(of.clone()));
    assert_eq!([made(&copy, None), made(&none, None), made(&none, Some(&of))], [None, None, None]);
    // One that was made of an image since is that.
    let other = ImageRef::at("http://h/other.qcow2");
    assert_eq!(made(&other, Some(&of)), Some(other.clone()));
    made(&other, None);

    // Who does not know volumes does not read of them, and of nothing else is anything new to anybody.
    let volumes = vec![Attachment { volume: instance.instance, device: "vdb".to_owned() }];
    assert_eq!(instance.format(), 1);
    assert_eq!(Instance { kind: Workload::Volume, ..instance.clone() }.format(), 2);
    assert_eq!(Instance { volumes: volumes.clone(), ..instance }.format(), 2);
    assert_eq!(request().format(), 1);
    assert_eq!(Request { kind: Workload::Volume, ..request() }.format(), 3);
    assert_eq!(Request { volumes, ..request() }.format(), 3);
    assert!(ImageRef::default().is_none() && !spec().image.is_none());
}

#[test]
fn what_has_a_name_reads_back_as_written_and_of_a_later_release_is_refused() {
    let flavor = Flavor {
        name: "Small".into(),
        query: "resources=VCPU:1,MEMORY_MB:256".into(),
        created_at: Timestamp::UNIX_EPOCH,
    };
    assert_eq!(decode::<Flavor>(&encode(&flavor)).unwrap(), flavor);
    let keypair = Keypair {
        name: "me".into(),
        project: "p".into(),
        keys: vec!["ssh-ed25519 AAAA".into()],
        created_at: Timestamp::UNIX_EPOCH,
    };
    let mut json = json(&keypair);
    json["later"] = 1.into();
    assert_eq!(decode::<Keypair>(json.to_string().as_bytes()).unwrap(), keypair);
    json["version"] = 2.into();
    let error = decode::<Keypair>(json.to_string().as_bytes()).unwrap_err().to_string();
    assert!(error.contains("keypair record has version 2"), "{error}");
    let group = Group {
        name: "Apart".into(),
        project: "p".into(),
        policy: Policy::AntiAffinity,
        stack: Some("shop".into()),
        created_at: Timestamp::UNIX_EPOCH,
    };
    assert_eq!(decode::<Group>(&encode(&group)).unwrap(), group);
    let mut json = self::json(&group);
    for (word, policy) in [
        ("affinity", Policy::Affinity),
        ("anti-affinity", Policy::AntiAffinity),
        ("soft-affinity", Policy::SoftAffinity),
        ("soft-anti-affinity", Policy::SoftAntiAffinity),
    ] {
        json["policy"] = word.into();
        let read = decode::<Group>(json.to_string().as_bytes()).unwrap().policy;
        assert_eq!((read, read.to_string()), (policy, word.to_owned()));
        assert_eq!(read.is_soft(), word.starts_with("soft"));
    }
    json["policy"] = "of-a-later-release".into();
    let error = decode::<Group>(json.to_string().as_bytes()).unwrap_err().to_string();
    assert!(error.contains("not a valid group record"), "{error}");
    let error = decode::<Flavor>(br#"{"version":2}"#).unwrap_err().to_string();
    assert!(error.contains("flavor record has version 2"), "{error}");
}

#[test]
fn a_trouble_is_told_by_the_word_that_it_is_written_with_and_a_later_one_is_overlooked() {
    for kind in TroubleKind::ALL {
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.to_string());
    }
    let later: TroubleKind = serde_json::from_str("\"heat\"").unwrap();
    assert_eq!((later, later.to_string()), (TroubleKind::Unknown, "unknown".to_owned()));
}

proptest! {
    #[test]
    fn no_value_makes_a_reader_panic(value: Vec<u8>) {
        let _ = decode::<Instance>(&value);
        let _ = decode::<Request>(&value);
        let _ = decode::<Status>(&value);
        let _ = decode::<Node>(&value);
        let _ = decode::<Alive>(&value);
        let _ = decode::<Flavor>(&value);
        let _ = decode::<Keypair>(&value);
        let _ = decode::<Group>(&value);
    }

    #[test]
    fn any_bytes_survive_the_json(bytes: Vec<u8>) {
        let json = serde_json::to_vec(&Blob(bytes.clone())).unwrap();
        prop_assert_eq!(serde_json::from_slice::<Blob>(&json).unwrap(), Blob(bytes));
    }
}

#[test]
fn a_record_is_written_in_the_last_format_of_its_kind_unless_it_says_otherwise() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Third {}
    impl Record for Third {
        const WHAT: &'static str = "third";
        const FORMAT: u32 = 3;
    }
    assert_eq!(String::from_utf8(encode(&Third {})).unwrap(), r#"{"version":3}"#);
}

#[test]
fn a_copy_is_told_by_what_its_url_begins_with() {
    let disk: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let other: InstanceId = "8d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let of = CopyOf::disk;
    for (copied, url) in [
        (of(Workload::Volume, disk), format!("volume:{disk}")),
        (CopyOf { held: Some(other), ..of(Workload::Volume, disk) }, format!("volume:{disk}/{other}")),
        (of(Workload::Machine, disk), format!("instance:{disk}")),
        (
            CopyOf { beside: vec![other, disk], ..of(Workload::Machine, disk) },
            format!("instance:{disk}+{other}+{disk}"),
        ),
    ] {
        let image = ImageRef::copy_of(&copied);
        assert_eq!((image.url.as_str(), image.format()), (url.as_str(), 3));
        assert_eq!(image.is_of_several(), url.contains('+'), "{url}");
        for snapshot in [false, true] {
            let spec = Spec { image: image.clone(), snapshot, ..spec() };
            assert_eq!(spec.is_snapshot(), snapshot || url.contains('+'), "{url}");
        }
        assert_eq!(image.copied(), Some(copied));
        assert!(!image.is_none());
    }
    for url in [
        "".to_owned(),
        "file:///volume:x".to_owned(),
        "volume:x".to_owned(),
        "volume://7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".to_owned(),
        format!("volume:{disk}+{other}"),
        format!("volume:{disk}/x"),
        format!("instance:{disk}/{other}"),
        format!("instance:{disk}+"),
        format!("instance:{disk}+x"),
    ] {
        assert_eq!(ImageRef::at(&url).copied(), None, "{url}");
    }
    assert_eq!(ImageRef::at("s3://b/x").format(), 2);
    assert_eq!(ImageRef { sha512: Some("x".into()), ..ImageRef::at("https://h/x") }.format(), 2);
    assert_eq!(ImageRef::at("https://h/x").format(), 1);
}

#[test]
fn of_a_url_nobody_is_told_what_may_be_secret() {
    for (url, told) in [
        ("https://host/x.qcow2?X-Amz-Signature=abc#y", "https://host/x.qcow2?…"),
        ("https://user:word@host:8443/x#y", "https://host:8443/x"),
        ("https:user:word@host/x", "https://host/x"),
        ("http://user:word@host:port/x", "(not shown: it has an `@`)"),
        ("no url?secret", "no url"),
        ("", ""),
        ("file:///a/b", "file:///a/b"),
        ("volume:7d3c1f0a-2b4e-4c55-9a7e-0123456789ab", "volume:7d3c1f0a-2b4e-4c55-9a7e-0123456789ab"),
        ("https://host/mail@home", "https://host/mail@home"),
    ] {
        assert_eq!(ImageRef::at(url).told(), told);
    }
}

#[test]
fn a_policy_is_told_as_it_is_written() {
    for policy in [Restart::No, Restart::OnFailure, Restart::Always] {
        assert_eq!(serde_json::to_value(policy).unwrap(), policy.to_string());
        assert_eq!(format!("{policy:>11}"), format!("{:>11}", policy.to_string()));
    }
}
