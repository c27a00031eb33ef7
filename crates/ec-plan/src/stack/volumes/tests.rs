//! What is done of volumes, in the words of a few cases.

use ec_model::{Restart, Workload};

use super::*;

const NODES: [u128; 2] = [1, 2];

fn node(number: usize) -> NodeId {
    NodeId::new(uuid::Uuid::from_u128(NODES[number]))
}

fn id(number: u128) -> InstanceId {
    InstanceId::new(uuid::Uuid::from_u128(number))
}

fn record(number: u128, name: &str, stack: Option<&str>, on: usize) -> Instance {
    let text = format!(
        r#"{{"version":1,"instance":"{}","name":"{name}","generation":1,
            "spec":{{"query":"resources=VCPU:1","image":{{"url":"file:///x"}}}},
            "assigned":{{"node":"{}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#,
        id(number),
        node(on)
    );
    let mut record: Instance = ec_model::decode(text.as_bytes()).unwrap();
    record.labels.extend(stack.map(|stack| (STACK.to_owned(), stack.to_owned())));
    record
}

/// A volume of 5 GiB.
fn stored(number: u128, name: &str, stack: Option<&str>, on: usize) -> Standing {
    let mut volume = record(number, name, stack, on);
    volume.kind = Workload::Volume;
    volume.spec.image = ImageRef::default();
    volume.spec.resources.insert("DISK_GB".to_owned(), 5);
    Standing::of_record(volume)
}

/// An instance that has these.
fn standing(number: u128, name: &str, stack: Option<&str>, on: usize, has: &[u128]) -> Standing {
    let mut record = record(number, name, stack, on);
    record.volumes =
        has.iter().map(|volume| Attachment { volume: id(*volume), device: "vdb".to_owned() }).collect();
    Standing::of_record(record)
}

fn instance(name: &str) -> Wished {
    Wished {
        name: name.to_owned(),
        query: "resources=VCPU:1".to_owned(),
        image: ImageRef::at("file:///x"),
        said: None,
        boots: false,
        group: None,
        labels: BTreeMap::new(),
        metadata: BTreeMap::new(),
        restart: Restart::No,
        keys: crate::stack::Begun::default(),
        user_data: crate::stack::Begun::default(),
        require_token: false,
    }
}

fn volume(name: &str, holder: Option<usize>) -> WishedVolume {
    WishedVolume { name: name.to_owned(), size_gb: Some(5), holder, ..WishedVolume::default() }
}

struct Case {
    instances: Vec<Wished>,
    volumes: Vec<WishedVolume>,
    there: Vec<Standing>,
    stored: Vec<Standing>,
    shared: BTreeMap<NodeId, NodeId>,
}

impl Case {
    fn of(&self) -> Volumes<'_> {
        let Self { instances, volumes, there, stored, shared } = self;
        Volumes::new("shop", (instances, volumes), (there, stored), shared)
    }

    /// Each step in a word or two.
    fn steps(&self, instances: bool, volumes: bool) -> Vec<String> {
        assert_eq!(self.of().check(), Ok(()));
        let steps = self.of().differences(Prune { instances, volumes });
        steps
            .iter()
            .map(|step| match step {
                Difference::Volume(VolumeStep::Create(number)) => {
                    format!("create {}", self.volumes[*number].name)
                }
                Difference::Volume(VolumeStep::Set(_, name, change)) => format!("set {name} {change}"),
                Difference::Volume(VolumeStep::Extend { name, from, to, .. }) => {
                    format!("extend {name} {from} {to}")
                }
                Difference::Volume(VolumeStep::Detach { name, called, .. }) => {
                    format!("detach {name} {called}")
                }
                Difference::Volume(VolumeStep::Attach(volume, instance)) => {
                    format!("attach {} {}", self.volumes[*volume].name, self.instances[*instance].name)
                }
                Difference::Volume(VolumeStep::Stands(_, name, _)) => format!("stands {name}"),
                Difference::Volume(VolumeStep::Delete(_, name)) => format!("delete {name}"),
                Difference::Volume(VolumeStep::Keep(_, name)) => format!("keep {name}"),
                step => panic!("{step:?}"),
            })
            .collect()
    }
}

#[test]
fn what_is_not_there_is_made_and_given_and_what_is_so_is_left_alone() {
    let mut case = Case {
        instances: vec![instance("db"), instance("web")],
        volumes: vec![volume("data", Some(0)), volume("spare", None)],
        there: vec![standing(1, "DB", Some("shop"), 0, &[])],
        stored: Vec::new(),
        shared: BTreeMap::new(),
    };
    assert_eq!(case.steps(true, true), ["create data", "create spare", "attach data db"]);
    assert_eq!((case.of().node_for(0), case.of().node_for(1)), (Some(node(0)), None));
    assert_eq!((case.of().room_for(0, false), case.of().room_for(1, false)), (5, 0));
    // One that is being placed is asked for again, as an instance is.
    let mut begun = stored(7, "data", Some("shop"), 0);
    begun.record.assigned = None;
    case.stored = vec![begun];
    assert_eq!(case.steps(true, true), ["create data", "create spare", "attach data db"]);
    case.stored = vec![stored(7, "Data", Some("shop"), 0), stored(8, "spare", Some("shop"), 1)];
    assert_eq!(case.steps(false, false), ["attach data db"]);
    case.there = vec![standing(1, "db", Some("shop"), 0, &[7])];
    assert_eq!(case.steps(true, true), Vec::<String>::new());
    assert_eq!(case.of().room_for(0, false), 0);
}

#[test]
fn what_an_instance_boots_from_is_made_before_it_and_is_neither_given_nor_taken() {
    let mut case = Case {
        instances: vec![Wished { boots: true, ..instance("db") }],
        volumes: vec![WishedVolume { boots: true, ..volume("root", Some(0)) }, volume("data", Some(0))],
        there: Vec::new(),
        stored: Vec::new(),
        shared: BTreeMap::new(),
    };
    assert_eq!(case.steps(true, true), ["create root", "create data", "attach data db"]);
    assert_eq!((case.of().root_of(0), case.of().root_of(1)), (Some(0), None));
    assert_eq!((case.of().room_for(0, false), case.of().room_for(0, true)), (10, 5));
    case.stored = vec![stored(7, "root", Some("shop"), 1), stored(8, "data", Some("shop"), 1)];
    assert_eq!(case.of().node_for(0), Some(node(1)), "it is placed where they lie");
    assert_eq!(case.steps(true, true), ["attach data db"]);
    // Another has it, and lets go of it; but not of what it boots from, till it is destroyed.
    case.there = vec![standing(1, "old", Some("shop"), 1, &[7])];
    assert_eq!(case.steps(false, false), ["detach root old", "attach data db"]);
    assert_eq!(case.steps(true, false), ["attach data db"]);
    let booting = |name| {
        let mut booting = standing(1, name, Some("shop"), 1, &[7]);
        booting.record.volumes[0].device = Attachment::ROOT.to_owned();
        booting
    };
    case.there = vec![booting("old")];
    assert_eq!(case.steps(false, false), ["stands root", "attach data db"]);
    assert_eq!(case.steps(true, false), ["attach data db"]);
    case.there = vec![booting("db")];
    assert_eq!(case.steps(true, true), ["attach data db"]);
    // One that is there keeps what it boots from.
    case.there = vec![standing(1, "db", Some("shop"), 1, &[])];
    assert_eq!(case.steps(true, true), ["stands root", "attach data db"]);
    case.volumes.remove(0);
    case.there = vec![booting("db")];
    assert_eq!(case.steps(false, true), ["stands root", "attach data db"]);
}

#[test]
fn labels_and_sizes_are_changed_and_what_it_was_made_of_matters_once() {
    let mut wish = volume("data", None);
    (wish.size_gb, wish.image) = (Some(6), Some(ImageRef::at("file:///y")));
    wish.labels = [("tier".to_owned(), "back".to_owned())].into();
    let mut case = Case {
        instances: Vec::new(),
        volumes: vec![wish],
        there: Vec::new(),
        stored: vec![stored(7, "data", Some("shop"), 0)],
        shared: BTreeMap::new(),
    };
    assert_eq!(case.steps(false, false), ["set data labels tier", "extend data 5 6"]);
    // What is not said is as it is.
    (case.volumes[0].size_gb, case.volumes[0].image) = (None, None);
    case.volumes[0].labels.clear();
    assert_eq!(case.steps(false, false), Vec::<String>::new());
    // Less is refused before anything is done, unless another has made it larger since.
    case.volumes[0].size_gb = Some(4);
    let steps = case.of().differences(Prune { instances: false, volumes: false });
    let stands = |step: &Difference| matches!(step, Difference::Volume(VolumeStep::Stands(_, _, why)) if why.contains("never shrinks"));
    assert!(steps.len() == 1 && stands(&steps[0]), "{steps:?}");
}

#[test]
fn a_volume_moves_to_another_instance_of_the_stack_and_is_taken_from_no_other() {
    let mut case = Case {
        instances: vec![instance("db"), instance("web")],
        volumes: vec![volume("data", Some(0)), volume("logs", Some(1))],
        there: vec![standing(1, "db", Some("shop"), 0, &[8]), standing(2, "web", Some("shop"), 0, &[7])],
        stored: vec![stored(7, "data", Some("shop"), 0), stored(8, "logs", Some("shop"), 0)],
        shared: BTreeMap::new(),
    };
    assert_eq!(
        case.steps(false, false),
        ["detach data web", "detach logs db", "attach data db", "attach logs web"]
    );
    case.there[1].record.labels.clear();
    case.instances.pop();
    (case.volumes[1].holder, case.there[0].record.volumes) = (None, Vec::new());
    assert_eq!(case.steps(true, true), ["stands data"], "another's instance has it");
    // Whom the file does not name keeps what the file gives to nobody.
    case.volumes[0].holder = None;
    assert_eq!(case.steps(true, true), Vec::<String>::new());
    case.there[0].record.volumes = case.there[1].record.volumes.clone();
    assert_eq!(case.steps(false, false), ["detach data db"]);
}

#[test]
fn one_that_goes_by_prune_leaves_its_volume_to_the_next() {
    let mut case = Case {
        instances: vec![instance("new")],
        volumes: vec![volume("data", Some(0))],
        there: vec![standing(1, "old", Some("shop"), 1, &[7])],
        stored: vec![stored(7, "data", Some("shop"), 1)],
        shared: BTreeMap::new(),
    };
    assert_eq!(case.of().node_for(0), Some(node(1)), "where its volume lies");
    assert_eq!(case.steps(true, false), ["attach data new"], "its end lets go of it");
    assert_eq!(case.steps(false, false), ["detach data old", "attach data new"]);
    // What the file does not name stays; by its own wish alone it goes.
    (case.instances, case.volumes) = (Vec::new(), Vec::new());
    assert_eq!(case.steps(false, false), ["keep data"], "what is too much is told");
    assert_eq!(case.steps(true, false), ["keep data"]);
    assert_eq!(case.steps(true, true), ["delete data"]);
    assert_eq!(case.steps(false, true), ["detach data old", "delete data"]);
    case.there[0].record.labels.clear();
    assert_eq!(case.steps(true, true), ["stands data"], "another's instance has it");
    case.stored[0].record.labels.clear();
    assert_eq!(case.steps(true, true), Vec::<String>::new(), "it is of no stack");
}

#[test]
fn a_snapshot_that_bears_the_stacks_label_is_none_of_its_volumes_and_stays() {
    let mut case = Case {
        instances: Vec::new(),
        volumes: Vec::new(),
        there: Vec::new(),
        stored: ["one", "several", "data"].map(|name| stored(7, name, Some("shop"), 0)).to_vec(),
        shared: BTreeMap::new(),
    };
    case.stored[0].record.spec.snapshot = true;
    // Before there was a word for it.
    case.stored[1].record.spec.image = ImageRef::at(format!("instance:{}+{}", id(1), id(8)));
    assert_eq!(case.steps(true, true), ["delete data"]);
    assert_eq!(case.steps(true, false), ["keep data"]);
}

#[test]
fn what_goes_ends_after_what_may_be_a_copy_of_it_and_before_what_boots_from_its_volume() {
    let mut case = Case {
        instances: vec![instance("new")],
        volumes: vec![volume("copy", None), volume("root", Some(0))],
        there: vec![standing(1, "old", Some("shop"), 1, &[7]), standing(2, "other", Some("shop"), 1, &[])],
        stored: vec![stored(7, "root", Some("shop"), 1), stored(8, "surplus", Some("shop"), 1)],
        shared: BTreeMap::new(),
    };
    let order = |case: &Case| {
        let mut steps = super::super::differences("shop", &case.instances, &case.there, true);
        steps.extend(case.of().differences(Prune { instances: true, volumes: true }));
        let steps = case.of().in_order(steps);
        let told = |step: &Difference| match step {
            Difference::Run(_) => "run".to_owned(),
            Difference::Destroy(_, name) => format!("destroy {name}"),
            Difference::Volume(VolumeStep::Create(_)) => "create".to_owned(),
            Difference::Volume(VolumeStep::Attach(..)) => "attach".to_owned(),
            Difference::Volume(VolumeStep::Delete(..)) => "delete".to_owned(),
            step => panic!("{step:?}"),
        };
        steps.iter().map(told).collect::<Vec<_>>()
    };
    assert_eq!(order(&case), ["run", "create", "destroy old", "destroy other", "attach", "delete"]);
    (case.instances[0].boots, case.volumes[1].boots) = (true, true);
    assert_eq!(order(&case), ["destroy old", "run", "create", "destroy other", "delete"]);
    // Who is to boot from what another has waits until that lets go of it; else all that is taken comes last.
    let detach = || {
        let (name, called) = ("root".to_owned(), "old".to_owned());
        Difference::Volume(VolumeStep::Detach { volume: id(7), name, from: id(1), called })
    };
    for (boots, order) in [(true, [detach(), Difference::Run(0)]), (false, [Difference::Run(0), detach()])] {
        (case.instances[0].boots, case.volumes[1].boots) = (boots, boots);
        let [one, other] = order.clone();
        assert_eq!(case.of().in_order(vec![other, one]), order, "{boots}");
    }
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_done() {
    let case = |wish: WishedVolume, there: Vec<Standing>, stored: Vec<Standing>| Case {
        instances: vec![instance("db")],
        volumes: vec![wish, volume("logs", Some(0))],
        there,
        stored,
        shared: BTreeMap::new(),
    };
    let mut small = volume("data", None);
    small.size_gb = Some(4);
    let refused = case(small, Vec::new(), vec![stored(7, "data", Some("shop"), 0)]).of().check();
    assert!(
        matches!(&refused, Err(Refused::Size(0, why)) if why.contains("5 GB, and never shrinks")),
        "{refused:?}"
    );
    for stack in [None, Some("other")] {
        let refused = case(volume("data", None), Vec::new(), vec![stored(7, "DATA", stack, 0)]).of().check();
        let hint = format!("set {} --label stack=shop", id(7));
        assert!(matches!(&refused, Err(Refused::Volume(0, why)) if why.contains(&hint)), "{refused:?}");
    }
    for stack in [None, Some("shop")] {
        let mut snapshot = stored(7, "DATA", stack, 0);
        snapshot.record.spec.snapshot = true;
        let refused = case(volume("data", None), Vec::new(), vec![snapshot]).of().check();
        assert!(
            matches!(&refused, Err(Refused::Volume(0, why)) if why.contains("is a snapshot")),
            "{refused:?}"
        );
    }
    // Both are there, on two nodes; and one of them is not, and can only be made on another.
    let apart = vec![stored(7, "data", Some("shop"), 0), stored(8, "logs", Some("shop"), 1)];
    let mut copy = volume("data", Some(0));
    copy.copied_on = Some(node(0));
    for (wish, stored) in [(volume("data", Some(0)), apart.clone()), (copy.clone(), vec![apart[1].clone()])] {
        let refused = case(wish, Vec::new(), stored).of().check();
        assert!(
            matches!(&refused, Err(Refused::Instance(0, why)) if why.contains("another of its volumes")),
            "{refused:?}"
        );
    }
    let refused = case(copy, vec![standing(1, "db", Some("shop"), 1, &[])], Vec::new()).of().check();
    assert!(matches!(&refused, Err(Refused::Instance(0, why)) if why.contains("it is on")), "{refused:?}");
}

#[test]
fn of_what_lies_on_another_node_than_its_instance_is_told_and_the_rest_is_done() {
    let case = Case {
        instances: vec![instance("db")],
        volumes: vec![volume("data", Some(0)), volume("logs", Some(0))],
        there: vec![standing(1, "db", Some("shop"), 0, &[])],
        stored: vec![stored(7, "data", Some("shop"), 1)],
        shared: BTreeMap::new(),
    };
    assert_eq!(case.steps(true, true), ["stands data", "create logs", "attach logs db"]);
}

#[test]
fn what_is_wrong_with_a_volume_is_told() {
    let mut case = Case {
        instances: Vec::new(),
        volumes: vec![volume("data", None)],
        there: Vec::new(),
        stored: vec![stored(7, "data", Some("shop"), 0), stored(8, "other", None, 0)],
        shared: BTreeMap::new(),
    };
    assert_eq!(case.of().differences(Prune::default()), []);
    case.stored[0].ails = Some("it is ill".to_owned());
    let stands = VolumeStep::Stands(id(7), "data".to_owned(), "it is ill".to_owned());
    assert_eq!(case.of().differences(Prune::default()), [Difference::Volume(stands)]);
}

#[test]
fn on_storage_that_nodes_share_a_volume_comes_to_its_instance_unless_it_stands_on_an_image() {
    let mut case = Case {
        instances: vec![instance("db")],
        volumes: vec![volume("data", Some(0)), volume("log", Some(0))],
        there: vec![],
        stored: vec![stored(1, "data", Some("shop"), 0), stored(2, "log", Some("shop"), 1)],
        shared: BTreeMap::new(),
    };
    let storage = |number| NodeId::new(uuid::Uuid::from_u128(number));
    assert!(case.of().check().is_err(), "each on storage of its own");
    case.shared = [(node(0), storage(7)), (node(1), storage(7))].into();
    assert_eq!(case.steps(false, false), ["attach data db", "attach log db"]);
    assert_eq!(case.of().node_for(0), Some(node(0)));
    // One of them stays.
    case.stored[1].record.spec.image = ImageRef::at("file:///x");
    assert_eq!(case.of().node_for(0), Some(node(1)));
    assert_eq!(case.steps(false, false), ["attach data db", "attach log db"]);
    case.there = vec![standing(9, "db", Some("shop"), 0, &[])];
    assert_eq!(case.steps(false, false), ["stands log", "attach data db"]);
    case.there = vec![standing(9, "db", Some("shop"), 1, &[])];
    assert_eq!(case.steps(false, false), ["attach data db", "attach log db"]);
    // What is booted from is not moved, nor is anything between storages.
    case.there = vec![];
    case.volumes[0].boots = true;
    assert!(case.of().check().is_err());
    case.volumes[0].boots = false;
    case.shared = [(node(0), storage(7)), (node(1), storage(8))].into();
    assert!(case.of().check().is_err());
}

/// Who looked through all of them for each, and that at each comparison, would not come to an end here.
#[test]
fn thousands_of_instances_that_boot_from_volumes_of_others_are_brought_into_order() {
    const MANY: u128 = 3000;
    let (first, last) = (1..=MANY, MANY + 1..=2 * MANY);
    let case = Case {
        instances: first
            .clone()
            .map(|number| Wished { boots: true, ..instance(&format!("new-{number}")) })
            .collect(),
        volumes: (first.clone().zip(0..))
            .map(|(number, holder)| WishedVolume {
                boots: true,
                ..volume(&format!("root-{number}"), Some(holder))
            })
            .collect(),
        there: (first.clone().zip(last.clone()))
            .map(|(number, root)| standing(number, &format!("old-{number}"), Some("shop"), 0, &[root]))
            .collect(),
        stored: first
            .zip(last)
            .map(|(number, root)| stored(root, &format!("ROOT-{number}"), Some("shop"), 0))
            .collect(),
        shared: BTreeMap::new(),
    };
    let of = case.of();
    assert_eq!(of.check(), Ok(()));
    let mut steps = super::super::differences("shop", &case.instances, &case.there, true);
    steps.extend(of.differences(Prune { instances: true, volumes: true }));
    let steps = of.in_order(steps);
    let (destroyed, run) = steps.split_at(case.there.len());
    assert!(destroyed.iter().all(|step| matches!(step, Difference::Destroy(..))));
    assert!(run.iter().enumerate().all(|(number, step)| *step == Difference::Run(number)));
    assert_eq!(run.len(), case.instances.len());
}
