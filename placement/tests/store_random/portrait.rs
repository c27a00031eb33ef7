//! All that a state tells, its indexes included, in a form to compare.

use std::collections::{BTreeMap, BTreeSet};

use ec_placement_model::{Name, State};
use uuid::Uuid;

/// The names that histories use, and by which the indexes are asked.
const CLASSES: [&str; 2] = ["VCPU", "CUSTOM_C"];
const TRAITS: [&str; 1] = ["CUSTOM_T"];
const PROJECTS: [&str; 1] = ["project"];
const AGGREGATES: [u128; 1] = [0x3000];

/// What is told, by what is asked.
pub(crate) type Portrait = BTreeMap<String, String>;

pub(crate) fn portrait(state: &State) -> Portrait {
    let mut told = Portrait::new();
    let uuid = |slot: u32| state.node(slot).uuid;
    for (_, node) in state.providers() {
        let children: BTreeSet<Uuid> = node.children.iter().copied().map(uuid).collect();
        let used: BTreeMap<&Name, i64> = node.usages().iter().map(|(class, used)| (class, *used)).collect();
        let place = (uuid(node.root), node.parent.map(uuid), children);
        let all = (&node.provider, &node.generation, place, used, &node.consumers);
        told.insert(format!("provider {}", node.uuid), format!("{all:?}"));
    }
    for (name, owner) in state.provider_names() {
        told.insert(format!("name {name}"), format!("{owner:?}"));
    }
    for (id, consumer) in state.consumers() {
        told.insert(format!("consumer {id}"), format!("{consumer:?}"));
    }
    told.insert("traits".into(), format!("{:?}", state.custom_traits()));
    told.insert("classes".into(), format!("{:?}", state.custom_classes()));
    let counts = [state.provider_count(), state.node_count(), state.consumer_count()];
    told.insert("counts".into(), format!("{counts:?}"));
    told.insert("trees".into(), format!("{}", state.has_trees()));
    for class in CLASSES {
        let free: BTreeSet<(i64, Uuid)> =
            state.with_class(class).iter().map(|(free, slot)| (free.0, uuid(*slot))).collect();
        told.insert(format!("with {class}"), format!("{free:?}"));
    }
    let mut index = |name: String, slots: &BTreeSet<u32>| {
        let uuids: BTreeSet<Uuid> = slots.iter().copied().map(uuid).collect();
        told.insert(name, format!("{uuids:?}"));
    };
    for name in TRAITS {
        index(format!("with {name}"), state.with_trait(name));
    }
    for number in AGGREGATES {
        let aggregate = Uuid::from_u128(number);
        index(format!("in {aggregate}"), state.in_aggregate(&aggregate));
        index(format!("sharing in {aggregate}"), state.sharing_in(&aggregate));
    }
    for project in PROJECTS {
        let mut consumers: Vec<String> =
            state.consumers_of(project).map(|consumer| format!("{consumer:?}")).collect();
        consumers.sort_unstable();
        told.insert(format!("of {project}"), format!("{consumers:?}"));
    }
    told
}

/// The first things in which two differ.
pub(crate) fn differences(left: &Portrait, right: &Portrait) -> Vec<String> {
    let keys: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
    keys.into_iter()
        .filter(|key| left.get(*key) != right.get(*key))
        .map(|key| format!("{key}: {:?} and {:?}", left.get(key), right.get(key)))
        .collect()
}
