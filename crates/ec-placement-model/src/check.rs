//! Whether what is stored fits together.

use std::collections::{BTreeMap, HashSet};

use uuid::Uuid;

use crate::{Inventory, Key, Name, Node, State, is_standard_class, is_standard_trait};

/// What does not fit, one line each; nothing where all is well.
///
/// That more is used than there is, is no finding: an inventory may be made smaller under its users. See
/// [`warnings`].
pub fn check(state: &State) -> Vec<String> {
    let mut findings = broken(state);
    findings.extend(loose(state));
    findings
}

/// What cannot be served as it is: records that cannot be read, providers of one name, loops.
pub fn broken(state: &State) -> Vec<String> {
    let mut findings: Vec<String> = state.unreadable().map(str::to_owned).collect();
    for (_, node) in state.providers() {
        let (uuid, Some(provider)) = (node.uuid, &node.provider) else { continue };
        if let Some(owner) = state.provider_name(&provider.name).filter(|owner| owner.record != uuid) {
            findings.push(format!("provider {uuid}: its name {} is that of {}", provider.name, owner.record));
        }
        if let Some(Top::Loop(with)) = top(state, node) {
            findings.push(format!("provider {uuid} is in a loop with {with}"));
        }
    }
    findings
}

/// What does not fit, and is served all the same: what is there without what it belongs to, above all.
pub fn loose(state: &State) -> Vec<String> {
    let mut findings = Vec::new();
    check_providers(state, &mut findings);
    check_consumers(state, &mut findings);
    findings
}

/// What fits together and should be looked at all the same: more used than there is.
pub fn warnings(state: &State) -> Vec<String> {
    let mut warnings = Vec::new();
    for (_, node) in state.providers() {
        let Some(provider) = &node.provider else { continue };
        for (class, inventory) in &provider.inventories {
            // Reserved whole it is locked: agents do that when they end, and their guests run on.
            let locked = inventory.reserved >= inventory.total;
            let reserved = if locked { 0 } else { inventory.reserved };
            let (used, capacity) = (node.used(class), Inventory { reserved, ..inventory.clone() }.capacity());
            if used > capacity {
                warnings.push(format!(
                    "provider {} ({}): {used} of {capacity} {class} are used, more than there is",
                    node.uuid, provider.name
                ));
            }
        }
    }
    warnings
}

fn known_class(state: &State, name: &Name) -> bool {
    is_standard_class(name) || state.custom_classes().contains_key(name)
}

fn check_providers(state: &State, findings: &mut Vec<String>) {
    for (_, node) in state.providers() {
        let (uuid, Some(provider)) = (node.uuid, &node.provider) else { continue };
        match &node.generation {
            None => findings.push(format!("provider {uuid} has no generation")),
            Some(stored) if stored.record < 0 => {
                findings.push(format!("provider {uuid} has the generation {}", stored.record));
            }
            Some(_) => {}
        }
        if state.provider_name(&provider.name).is_none() {
            findings.push(format!("provider {uuid}: its name {} is nobody's", provider.name));
        }
        if let Some(Top::Missing(above)) = top(state, node) {
            findings.push(format!("provider {uuid}: {above} above it is not there"));
        }
        for (class, _) in &provider.inventories {
            if !known_class(state, class) {
                findings
                    .push(format!("provider {uuid} has inventory of {class}, which is no resource class"));
            }
        }
        for name in &provider.traits {
            if !is_standard_trait(name) && !state.custom_traits().contains_key(name) {
                findings.push(format!("provider {uuid} has {name}, which is no trait"));
            }
        }
    }
    for uuid in state.left_generations() {
        // Of one that cannot be read that is told.
        if state.trouble_with(&Key::Provider(uuid)).is_none() {
            findings.push(format!("the generation of {uuid} is there, and no provider"));
        }
    }
    for (name, owner) in state.provider_names() {
        let named = state.find(&owner.record).and_then(|node| node.provider.as_ref());
        if named.is_none_or(|provider| provider.name != *name) {
            findings.push(format!("the name {name} is that of {}, which does not have it", owner.record));
        }
    }
}

/// Where the way up from a provider ends, if not at one that has none above it.
enum Top {
    Missing(Uuid),
    Loop(Uuid),
}

fn top(state: &State, node: &Node) -> Option<Top> {
    let mut seen = HashSet::from([node.uuid]);
    let mut above = node.provider.as_ref()?.parent;
    while let Some(uuid) = above {
        let Some(parent) = state.find(&uuid).and_then(|node| node.provider.as_ref()) else {
            return Some(Top::Missing(uuid));
        };
        if !seen.insert(uuid) {
            return Some(Top::Loop(uuid));
        }
        above = parent.parent;
    }
    None
}

fn check_consumers(state: &State, findings: &mut Vec<String>) {
    let mut sums: BTreeMap<(Uuid, &Name), i64> = BTreeMap::new();
    for (uuid, stored) in state.consumers() {
        let consumer = &stored.record;
        if consumer.generation < 1 {
            findings.push(format!("consumer {uuid} has the generation {}", consumer.generation));
        }
        if consumer.allocations.iter().all(|(_, amounts)| amounts.is_empty()) {
            findings.push(format!("consumer {uuid} has no allocations"));
        }
        for (owner, amounts) in &consumer.allocations {
            let provider = state.find(owner).and_then(|node| node.provider.as_ref());
            if provider.is_none() {
                findings.push(format!("consumer {uuid} uses provider {owner}, which is not there"));
            }
            for (class, amount) in amounts {
                if *amount < 1 {
                    findings.push(format!("consumer {uuid} uses {amount} {class} of {owner}"));
                }
                if provider.is_some_and(|provider| provider.inventory(class).is_none()) {
                    findings.push(format!("consumer {uuid} uses {class} of {owner}, which has none"));
                }
                *sums.entry((*owner, class)).or_default() += amount;
            }
        }
    }
    for (_, node) in state.providers() {
        for (class, used) in node.usages() {
            let sum = sums.get(&(node.uuid, class)).copied().unwrap_or(0);
            if sum != *used {
                findings
                    .push(format!("provider {}: {used} {class} are used, and {sum} allocated", node.uuid));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Change, Consumer, Inventory, Provider, Stored, intern};

    fn stored<T>(record: T) -> Option<Stored<T>> {
        Some(Stored { record, revision: 1 })
    }

    /// One provider with one consumer, all as it should be.
    fn sound() -> Vec<Change> {
        let (host, user) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let mut provider = Provider::new("host", None, 0);
        provider.inventories = vec![(intern("VCPU"), Inventory { total: 4, ..Inventory::default() })];
        let mut consumer = Consumer::new(intern("p"), intern("u"), None, 0);
        consumer.generation = 1;
        consumer.allocations = vec![(host, vec![(intern("VCPU"), 2)])];
        vec![
            Change::Consumer(user, stored(Arc::new(consumer))),
            Change::Generation(host, stored(2)),
            Change::ProviderName("host".into(), stored(host)),
            Change::Provider(host, Some(Arc::new(provider))),
        ]
    }

    fn findings(changes: Vec<Change>) -> Vec<String> {
        let mut state = State::default();
        state.apply(sound());
        state.apply(changes);
        check(&state)
    }

    #[test]
    fn what_is_sound_has_no_findings() {
        assert_eq!(findings(Vec::new()), Vec::<String>::new());
    }

    #[test]
    fn more_used_than_there_is_is_a_warning() {
        let host = Uuid::from_u128(1);
        let mut state = State::default();
        state.apply(sound());
        assert_eq!(warnings(&state), Vec::<String>::new());
        let mut smaller = Provider::new("host", None, 0);
        smaller.inventories = vec![(intern("VCPU"), Inventory { total: 1, ..Inventory::default() })];
        state.apply([Change::Provider(host, Some(Arc::new(smaller)))]);
        assert_eq!(check(&state), Vec::<String>::new());
        let found = warnings(&state);
        assert!(found.len() == 1 && found[0].contains("2 of 1 VCPU are used"), "{found:?}");
    }

    #[test]
    fn each_thing_that_does_not_fit_is_told() {
        let host = Uuid::from_u128(1);
        let told = |changes, wanted: &str| {
            let found = findings(changes);
            assert!(found.iter().any(|line| line.contains(wanted)), "{wanted}: {found:?}");
        };
        told(vec![Change::Generation(host, None)], "has no generation");
        told(vec![Change::ProviderName("host".into(), None)], "is nobody's");
        told(vec![Change::ProviderName("other".into(), stored(host))], "does not have it");
        told(vec![Change::Provider(host, None)], "which is not there");
        told(vec![Change::Provider(host, None)], "is there, and no provider");
        let spoilt = Change::Unreadable {
            key: Key::Provider(host),
            part: crate::Part::Record,
            why: "it is spoilt".into(),
        };
        let found = findings(vec![spoilt]);
        assert!(found.contains(&"it is spoilt".to_owned()), "{found:?}");
        assert!(!found.iter().any(|line| line.contains("no provider")), "told once: {found:?}");
        let changed = |change: fn(&mut Provider)| {
            let mut provider = Provider::new("host", None, 0);
            change(&mut provider);
            vec![Change::Provider(Uuid::from_u128(1), Some(Arc::new(provider)))]
        };
        told(changed(|_| {}), "uses VCPU of");
        told(changed(|provider| provider.traits = vec![intern("CUSTOM_NO")]), "which is no trait");
        told(changed(|provider| provider.parent = Some(Uuid::from_u128(9))), "above it is not there");
        told(changed(|provider| provider.parent = Some(Uuid::from_u128(1))), "in a loop");
        told(
            changed(|provider| provider.inventories = vec![(intern("CUSTOM_NO"), Inventory::default())]),
            "which is no resource class",
        );
        let empty = Consumer::new(intern("p"), intern("u"), None, 0);
        told(vec![Change::Consumer(Uuid::from_u128(3), stored(Arc::new(empty)))], "has no allocations");
    }

    #[test]
    fn what_is_reserved_is_not_there_unless_all_of_it_is() {
        let told = |total, reserved| {
            let mut provider = Provider::new("host", None, 0);
            let inventory = Inventory { total, reserved, ..Inventory::default() };
            provider.inventories = vec![(intern("VCPU"), inventory)];
            let mut state = State::default();
            state.apply(sound());
            state.apply([Change::Provider(Uuid::from_u128(1), Some(Arc::new(provider)))]);
            warnings(&state)
        };
        for (total, reserved) in [(2, 0), (3, 1), (2, 2), (2, 3)] {
            assert_eq!(told(total, reserved), Vec::<String>::new(), "{reserved} of {total}");
        }
        for (total, reserved) in [(1, 0), (4, 3), (1, 1)] {
            assert_eq!(told(total, reserved).len(), 1, "{reserved} of {total}");
        }
    }

    #[test]
    fn what_is_at_the_edge_of_what_fits_is_told_or_not() {
        let (host, user) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let user_of = |generation, amounts: &[i64]| {
            let mut consumer = Consumer::new(intern("p"), intern("u"), None, 0);
            consumer.generation = generation;
            let amounts = amounts.iter().map(|amount| (intern("VCPU"), *amount)).collect();
            consumer.allocations = vec![(host, amounts)];
            Arc::new(consumer)
        };
        let (other, third) = (Uuid::from_u128(3), Uuid::from_u128(4));
        let named = || stored(crate::NamedRecord::new(0));
        let mut ours = Provider::new("host", None, 0);
        ours.inventories = ["CUSTOM_C", "VCPU"].map(|class| (intern(class), Inventory::default())).into();
        ours.traits = vec![intern("CUSTOM_T"), intern("HW_CPU_X86_AVX")];
        let ours = || Change::Provider(host, Some(Arc::new(ours.clone())));
        let (class, custom_trait) =
            (Change::Class(intern("CUSTOM_C"), named()), Change::Trait(intern("CUSTOM_T"), named()));
        let cases = [
            (vec![Change::Generation(host, stored(0))], vec![]),
            (
                vec![Change::Generation(host, stored(-1))],
                vec![format!("provider {host} has the generation -1")],
            ),
            (vec![Change::Consumer(user, stored(user_of(1, &[1])))], vec![]),
            (
                vec![Change::Consumer(user, stored(user_of(0, &[1])))],
                vec![format!("consumer {user} has the generation 0")],
            ),
            (
                vec![Change::Consumer(user, stored(user_of(1, &[-1])))],
                vec![format!("consumer {user} uses -1 VCPU of {host}")],
            ),
            (
                vec![
                    Change::Consumer(other, stored(user_of(1, &[1]))),
                    Change::Consumer(third, stored(user_of(1, &[3]))),
                ],
                vec![],
            ),
            (vec![ours(), class.clone(), custom_trait.clone()], vec![]),
            (
                vec![ours(), custom_trait],
                vec![format!("provider {host} has inventory of CUSTOM_C, which is no resource class")],
            ),
            (vec![ours(), class], vec![format!("provider {host} has CUSTOM_T, which is no trait")]),
            (
                vec![Change::ProviderName("host".into(), stored(other))],
                vec![
                    format!("provider {host}: its name host is that of {other}"),
                    format!("the name host is that of {other}, which does not have it"),
                ],
            ),
        ];
        for (changes, expected) in cases {
            assert_eq!(findings(changes.clone()), expected, "{changes:?}");
        }
        let chain = [5_u128, 6].map(|number| {
            let (name, uuid) = (format!("h{number}"), Uuid::from_u128(number));
            let record = Provider::new(&name, Some(Uuid::from_u128(if number == 5 { 1 } else { 5 })), 0);
            let name = Change::ProviderName(intern(&name), stored(uuid));
            [Change::Provider(uuid, Some(Arc::new(record))), Change::Generation(uuid, stored(0)), name]
        });
        assert_eq!(
            findings(chain.into_iter().flatten().collect()),
            Vec::<String>::new(),
            "two below each other"
        );
    }
}
