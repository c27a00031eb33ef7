//! What several of these tests need: short words for records, and all that a state tells in a form to compare.

use std::collections::{BTreeMap, BTreeSet};

use ec_placement_model::{
    Change, Command, ConsumerWrite, Draft, ExpectedGeneration, Inventory, ModelError, Name, Outcome, Slot,
    State, Stored, decide, intern,
};
use uuid::Uuid;

/// The revision at which everything is written where it does not matter.
pub(crate) const REVISION: i64 = 7;

pub(crate) const CLASSES: [&str; 3] = ["VCPU", "DISK_GB", "CUSTOM_C"];
pub(crate) const TRAITS: [&str; 3] = ["CUSTOM_T", "HW_CPU_X86_AVX", "MISC_SHARES_VIA_AGGREGATE"];
pub(crate) const PROJECTS: [&str; 2] = ["p", "q"];

pub(crate) fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

pub(crate) fn aggregate(number: u128) -> Uuid {
    Uuid::from_u128(0xa00 + number)
}

pub(crate) fn stored<T>(record: T) -> Option<Stored<T>> {
    Some(Stored { record, revision: REVISION })
}

pub(crate) fn names(names: &[&str]) -> Vec<Name> {
    names.iter().map(|name| intern(name)).collect()
}

pub(crate) fn some(total: i64) -> Inventory {
    Inventory { total, ..Inventory::default() }
}

/// A consumer that wants so much, of whatever is said of its generation.
pub(crate) fn claim(consumer: u128, wanted: &[(u128, &[(&str, i64)])]) -> ConsumerWrite {
    let amounts =
        |amounts: &[(&str, i64)]| amounts.iter().map(|(class, amount)| (intern(class), *amount)).collect();
    ConsumerWrite {
        uuid: id(consumer),
        generation: ExpectedGeneration::Any,
        owner: Some((intern("p"), intern("u"))),
        consumer_type: None,
        allocations: wanted.iter().map(|(provider, of)| (id(*provider), amounts(of))).collect(),
    }
}

/// What comes of one command, and the state after it.
pub(crate) fn tried(state: &State, command: &Command, now: i64) -> (Result<Outcome, ModelError>, State) {
    let mut draft = Draft::new(state);
    let outcome = decide(&mut draft, command, now);
    let mut after = state.clone();
    after.apply(draft.written().into_iter().map(|change| change.written_at(REVISION)));
    (outcome, after)
}

/// The state after commands none of which is refused.
pub(crate) fn after(state: &State, commands: &[Command]) -> State {
    commands.iter().fold(state.clone(), |state, command| {
        let (outcome, after) = tried(&state, command, 0);
        assert!(outcome.is_ok(), "{command:?}: {outcome:?}");
        after
    })
}

pub(crate) fn state_of(changes: impl IntoIterator<Item = Change>) -> State {
    let mut state = State::default();
    state.apply(changes);
    state
}

/// What is told, by what is asked.
pub(crate) type Portrait = BTreeMap<String, String>;

/// All that a state tells, its indexes included.
pub(crate) fn portrait(state: &State) -> Portrait {
    let mut told = Portrait::new();
    let uuid = |slot: Slot| state.node(slot).uuid;
    let uuids = |slots: &BTreeSet<Slot>| slots.iter().copied().map(uuid).collect::<BTreeSet<Uuid>>();
    for (slot, node) in state.providers() {
        assert_eq!(
            (state.slot_of(&node.uuid), state.find(&node.uuid).map(|found| found.uuid)),
            (Some(slot), Some(node.uuid))
        );
        if let Some(record) = &node.provider {
            let bearers: BTreeSet<Uuid> = state.bearers(&record.name).map(|node| node.uuid).collect();
            told.insert(format!("bear {}", record.name), format!("{bearers:?}"));
        }
        let children: BTreeSet<Uuid> = node.children.iter().copied().map(uuid).collect();
        let used: BTreeMap<&Name, i64> = node.usages().iter().map(|(class, used)| (class, *used)).collect();
        assert!(
            CLASSES.iter().all(|class| node.used(class) == used.get(&intern(class)).copied().unwrap_or(0))
        );
        let below: BTreeSet<Uuid> = state.subtree(slot).into_iter().map(uuid).collect();
        let place = (uuid(node.root), node.parent.map(uuid), children, below);
        told.insert(
            format!("provider {}", node.uuid),
            format!("{:?}", (&node.provider, &node.generation, place, used, &node.consumers)),
        );
    }
    for (name, owner) in state.provider_names() {
        assert_eq!(state.provider_name(name), Some(owner));
        told.insert(format!("name {name}"), format!("{owner:?}"));
    }
    for (uuid, consumer) in state.consumers() {
        assert_eq!(state.consumer(uuid), Some(consumer));
        told.insert(format!("consumer {uuid}"), format!("{consumer:?}"));
    }
    told.insert("traits".into(), format!("{:?}", state.custom_traits()));
    told.insert("classes".into(), format!("{:?}", state.custom_classes()));
    let counts = [state.provider_count(), state.node_count(), state.consumer_count()];
    told.insert("counts".into(), format!("{counts:?}"));
    told.insert("trees".into(), state.has_trees().to_string());
    for class in CLASSES {
        let free: BTreeSet<(i64, Uuid)> =
            state.with_class(class).iter().map(|(free, slot)| (free.0, uuid(*slot))).collect();
        told.insert(format!("with {class}"), format!("{free:?}"));
    }
    for name in TRAITS {
        told.insert(format!("with {name}"), format!("{:?}", uuids(state.with_trait(name))));
    }
    told.insert("sharing".into(), format!("{:?}", uuids(state.sharing())));
    for aggregate in [1, 2].map(aggregate) {
        told.insert(format!("in {aggregate}"), format!("{:?}", uuids(state.in_aggregate(&aggregate))));
        told.insert(format!("sharing in {aggregate}"), format!("{:?}", uuids(state.sharing_in(&aggregate))));
    }
    for project in PROJECTS {
        let consumers: BTreeSet<String> =
            state.consumers_of(project).map(|consumer| format!("{consumer:?}")).collect();
        told.insert(format!("of {project}"), format!("{consumers:?}"));
    }
    told
}
