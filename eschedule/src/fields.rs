//! That docs/cli.md tells the fields of every result: scripts stand on them.

use std::collections::{BTreeMap, BTreeSet};

use ec_cloud::{
    GroupView, Happening, Healed, Member, NodeView, Preview, Reasons, StorageView, View, VolumeView, What,
};
use ec_model::{
    Flavor, Group, Image, ImageStatus, Instance, Keypair, Policy, Request, Status, Visibility, decode,
};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    acting::Done,
    apply::Applied,
    cluster::{Added, BackedUp, Document, Initialised, Manifest, Restored},
    doctor::Finding,
    explain::{Explained, Stands},
    output::Deleted,
    run::{Made, Reached},
    watch::Line,
};

const UUID: &str = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";
const REQUEST: &str = "req-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";

/// The fields that each section's table tells, by the section.
fn told() -> BTreeMap<String, BTreeSet<String>> {
    let page = include_str!("../../docs/cli.md");
    let mut told: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut section = None;
    for line in page.lines() {
        if line.starts_with('#') {
            section = line.strip_prefix("### `").and_then(|rest| rest.strip_suffix('`'));
        }
        let Some((name, cell)) =
            section.zip(line.strip_prefix("| `").and_then(|rest| rest.split(" |").next()))
        else {
            continue;
        };
        let fields = cell.split(", ").map(|field| field.trim_matches('`').to_owned());
        told.entry(name.to_owned()).or_default().extend(fields);
    }
    told
}

fn record() -> Instance {
    let text = json!({
        "version": 2, "instance": UUID, "volumes": [{"volume": UUID, "device": "vdb"}], "project": "p", "user": "u", "name": "web", "labels": {"a": "b"}, "group": "g",
        "spec": {
            "query": "q", "resources": {"VCPU": 1}, "image": {"url": "u", "sha256": "s"}, "keys": ["k"],
            "metadata": {"a": "b"},
            "user_data_bytes": 1, "token_required": true,
        },
        "made_of": {"url": "u", "sha256": "s"},
        "power": {"power": "running", "generation": 1, "grace_seconds": 1, "anew": true},
        "before": {"query": "q", "resources": {"VCPU": 1}},
        "restart": "always", "locked": "", "assigned": {"node": UUID, "epoch": 1}, "generation": 1,
        "request_id": REQUEST, "created_at": "1970-01-01T00:00:00Z",
    });
    decode(text.to_string().as_bytes()).unwrap()
}

fn request() -> Request {
    let record = record();
    Request {
        instance: record.instance,
        kind: record.kind,
        volumes: record.volumes.clone(),
        epoch: 1,
        generation: 1,
        desired: ec_model::Desired::Active,
        power: record.power,
        restart: record.restart,
        rebuild: Some(ec_model::Rebuild {
            wished_at: Timestamp::UNIX_EPOCH,
            before: Some(record.spec.image.clone()),
        }),
        rescue: Some(ec_model::Rescue { wished_at: Timestamp::UNIX_EPOCH, image: record.spec.image.clone() }),
        resize: Some(ec_model::Resize { wished_at: Timestamp::UNIX_EPOCH }),
        handover: None,
        request_id: record.request_id,
        access: Some(ec_model::AccessWish {
            kind: ec_model::AccessKind::Log,
            generation: 1,
            request_id: None,
        }),
        name: record.name,
        project: record.project,
        user: record.user,
        spec: Some(record.spec),
        created_at: Timestamp::UNIX_EPOCH,
    }
}

fn status() -> Status {
    let text = json!({
        "version": 1, "instance": UUID, "volumes": [{"volume": UUID, "device": "vdb"}], "volumes_changing": true, "volumes_failed": "f", "node": UUID, "epoch": 1, "observed_generation": 1, "power_generation": 1,
        "rebuilt": {"wished_at": "1970-01-01T00:00:00Z", "failed": "f"}, "rescued": {"wished_at": "1970-01-01T00:00:00Z", "failed": "f"},
        "resized": {"wished_at": "1970-01-01T00:00:00Z", "failed": "f", "resources": {"VCPU": 1}}, "access": {"kind": "log", "generation": 1, "ticket": "t", "expires_at": "1970-01-01T00:00:00Z"},
        "restarts": 1, "state": "ERROR", "reason": "r", "doing": "d", "progress": {"step": "image", "done": 1, "total": 2},
        "ip": "10.0.0.1", "addresses": [{"ip": "10.0.0.1", "mac": "52:00:00:00:00:01", "nic": 0, "source": "arp"}],
        "name": "web", "console": "c", "since": "1970-01-01T00:00:00Z", "started_at": "1970-01-01T00:00:00Z",
        "updated_at": "1970-01-01T00:00:00Z",
    });
    decode(text.to_string().as_bytes()).unwrap()
}

pub(crate) fn volume() -> VolumeView {
    VolumeView {
        volume: record().instance,
        name: None,
        status: "error".to_owned(),
        size_gb: Some(1),
        node: None,
        node_alive: true,
        instance: None,
        device: None,
        image: None,
        copy_of: None,
        copy_of_kind: None,
        snapshot: true,
        beside: Vec::new(),
        project: None,
        labels: BTreeMap::new(),
        created_at: None,
        reason: None,
        doing: Some("d".to_owned()),
        locked: Some(String::new()),
        request_id: Some(REQUEST.parse().unwrap()),
    }
}

pub(crate) fn view(all: bool) -> View {
    let record = record();
    View {
        instance: record.instance,
        kind: record.kind,
        name: record.name.clone(),
        node: record.node(),
        node_alive: true,
        state: "ERROR".to_owned(),
        ip: None,
        project: None,
        labels: BTreeMap::new(),
        group: None,
        created_at: None,
        reason: None,
        resources: BTreeMap::new(),
        since: None,
        volumes_failed: false,
        doing: Some("d".to_owned()),
        request_id: record.request_id.filter(|_| all),
        record: all.then(|| Box::new(record)),
        request: all.then(|| Box::new(request())),
        status: all.then(|| Box::new(status())),
    }
}

/// Each result with everything in it, by its section.
fn results() -> Vec<(&'static str, Value)> {
    let (record, now) = (record(), Timestamp::UNIX_EPOCH);
    let (instance, node) = (record.instance, record.node().unwrap());
    let name = || "n".to_owned();
    let made = Made {
        instance: None,
        node: None,
        state: None,
        ip: None,
        request_id: None,
        error: Some(name()),
        reason: Some(name()),
        reasons: Some(Reasons::default()),
    };
    let nodes = NodeView {
        node,
        name: name(),
        alive: true,
        agent: None,
        virt_type: None,
        locked: false,
        disabled: false,
        revoked: false,
        started_at: None,
        url: None,
        storage: None,
        instances: 0,
        volumes: 0,
        used: BTreeMap::new(),
        capacity: BTreeMap::new(),
        troubles: Vec::new(),
        note: None,
    };
    let done = Done { asked: Some(name()), error: Some(name()), ..Done::default() };
    let preview =
        Preview { node, name: name(), resources: BTreeMap::new(), others: 0, not_alive: Vec::new() };
    let list = view(false);
    let group = Group {
        name: name(),
        project: name(),
        policy: Policy::Affinity,
        stack: Some(name()),
        created_at: now,
    };
    let applied = Applied { what: "run", name: name(), ..Applied::default() };
    let json = |value: Result<Value, serde_json::Error>| value.unwrap();
    vec![
        ("list", json(serde_json::to_value(&list))),
        ("record", json(serde_json::to_value(&record))),
        ("request", json(serde_json::to_value(request()))),
        ("spec", json(serde_json::to_value(&record.spec))),
        ("power", json(serde_json::to_value(&record.power))),
        ("status", json(serde_json::to_value(status()))),
        ("nodes", json(serde_json::to_value(nodes))),
        ("run", json(serde_json::to_value(made))),
        ("reasons", json(serde_json::to_value(Reasons::default()))),
        ("--dry-run", json(serde_json::to_value(preview))),
        (
            "INSTANCE",
            json(serde_json::to_value(Reached { instance, state: name(), ip: [10, 0, 0, 1].into() })),
        ),
        ("stop", json(serde_json::to_value(done))),
        ("watch", json(serde_json::to_value(Line::of(What::New, &list)))),
        ("explain", json(serde_json::to_value(Explained { state: "ACTIVE", text: "" }))),
        (
            "stands",
            json(serde_json::to_value(Stands {
                instance,
                node_alive: true,
                state: name(),
                text: name(),
                reason: None,
                doing: None,
            })),
        ),
        ("flavor", json(serde_json::to_value(Flavor { name: name(), query: name(), created_at: now }))),
        (
            "image",
            json(serde_json::to_value(Image {
                id: UUID.parse().unwrap(),
                name: name(),
                project: name(),
                visibility: Visibility::Public,
                status: ImageStatus::Active,
                protected: true,
                url: name(),
                stored: true,
                upload: Some(name()),
                sha256: Some(name()),
                sha512: Some(name()),
                size: Some(1),
                compression: Some(name()),
                disk_format: Some(name()),
                virtual_size: Some(1),
                min_disk: 1,
                min_ram: 1,
                properties: [(name(), name())].into(),
                created_at: now,
                updated_at: now,
            })),
        ),
        ("volume", json(serde_json::to_value(volume()))),
        (
            "keypair",
            json(serde_json::to_value(Keypair {
                name: name(),
                project: name(),
                keys: Vec::new(),
                created_at: now,
            })),
        ),
        (
            "events",
            json(serde_json::to_value(Happening {
                at: now,
                user: None,
                project: None,
                node,
                request_id: None,
                verb: None,
                detail: None,
                outcome: None,
                state: None,
                reason: None,
                finished_at: None,
            })),
        ),
        (
            "heal",
            json(serde_json::to_value(Healed {
                instance,
                name: None,
                project: None,
                node,
                outcome: ec_cloud::Outcome::Left,
                request_id: None,
                notes: Vec::new(),
            })),
        ),
        ("group", json(serde_json::to_value(GroupView { group, members: Vec::new() }))),
        (
            "storage",
            json(serde_json::to_value(StorageView {
                storage: name(),
                provider: node,
                nodes: BTreeMap::new(),
                used_gb: 0,
                capacity_gb: 1,
            })),
        ),
        ("member", json(serde_json::to_value(Member { instance, node }))),
        ("apply", json(serde_json::to_value(applied))),
        (
            "delete",
            json(serde_json::to_value(Deleted {
                request_id: Some(REQUEST.parse().unwrap()),
                asked: Some(name()),
                error: Some(name()),
                ..Deleted::default()
            })),
        ),
        ("doctor", json(serde_json::to_value(Finding::warning("p", "f", "m")))),
        (
            "node",
            json(serde_json::to_value(Added {
                name: "n".into(),
                node: UUID.parse().unwrap(),
                bundle: Some("n".into()),
            })),
        ),
        (
            "backup",
            json(serde_json::to_value(BackedUp {
                file: "f".into(),
                manifest: Manifest {
                    version: 1,
                    created_at: now,
                    release: name(),
                    prefix: name(),
                    etcd: name(),
                    cluster: name(),
                    revision: 1,
                    bytes: 1,
                    sha256: name(),
                    placement: Some(Document { providers: 1, consumers: 1, bytes: 1, sha256: name() }),
                },
            })),
        ),
        ("restore", json(serde_json::to_value(Restored { data_dir: "d".into(), next: vec![] }))),
        (
            "cluster",
            json(serde_json::to_value(Initialised {
                directory: "d".into(),
                made: vec![],
                secured: Some(true),
            })),
        ),
    ]
}

#[test]
fn the_fields_of_every_result_are_told_and_no_others() {
    let mut told = told();
    let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    for (section, value) in results() {
        assert_eq!(told.remove(section).as_ref(), Some(&fields(&value)), "{section}");
    }
    // What `show` has beside `list`.
    let (all, list) = (fields(&serde_json::to_value(view(true)).unwrap()), fields(&results()[0].1));
    assert_eq!(told.remove("show").unwrap(), all.difference(&list).cloned().collect());
    assert_eq!(told, BTreeMap::new(), "sections of nothing that is printed");
}
