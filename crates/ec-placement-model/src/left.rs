//! What a change leaves: the records at which it counted before it, and does not any more.
//!
//! What is used of a provider, and who has a trait, a class or a parent, is not stored: it is counted. So whoever
//! gives something back changes what others decide on, and has to write where that is, as whoever takes does. Else
//! a decision could pass in an etcd that was put back behind the giving back.

use std::sync::Arc;

use super::{
    draft::{Key, Record},
    names::{is_standard_class, is_standard_trait},
    records::Provider,
};

/// What a record counts at before a change and not after it. What is decided there may stand on that.
pub(super) fn left_behind(before: Option<&Record>, after: Option<&Record>) -> Vec<Key> {
    match (before, after) {
        // Where it stays it takes something, and writes for that.
        (Some(Record::Consumer(before)), _) => {
            before.allocations.iter().map(|(provider, _)| Key::Provider(*provider)).collect()
        }
        (Some(Record::Provider(before, _)), after) => {
            let after = match after {
                Some(Record::Provider(after, _)) => Some(after),
                _ => None,
            };
            let stays = |holds: &dyn Fn(&Provider) -> bool| after.is_some_and(|after| holds(after));
            let mut left = Vec::new();
            left.extend(
                before
                    .parent
                    .filter(|parent| !stays(&|after| after.parent == Some(*parent)))
                    .map(Key::Provider),
            );
            let traits = before.traits.iter().filter(|name| !is_standard_trait(name));
            left.extend(
                traits
                    .filter(|name| !stays(&|after| after.has_trait(name)))
                    .map(|name| Key::Trait(Arc::clone(name))),
            );
            let classes =
                before.inventories.iter().map(|(class, _)| class).filter(|name| !is_standard_class(name));
            left.extend(
                classes
                    .filter(|name| !stays(&|after| after.inventory(name).is_some()))
                    .map(|name| Key::Class(Arc::clone(name))),
            );
            left
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::{
        Change, Command, ConsumerWrite, Draft, ExpectedGeneration, Inventory, State, decide, intern,
    };

    const PARENT: Uuid = Uuid::from_u128(1);
    const CHILD: Uuid = Uuid::from_u128(2);
    const CONSUMER: Uuid = Uuid::from_u128(3);

    fn claim(provider: Uuid) -> Command {
        Command::SetAllocations(vec![ConsumerWrite {
            uuid: CONSUMER,
            generation: ExpectedGeneration::Any,
            owner: None,
            consumer_type: None,
            allocations: vec![(provider, vec![(intern("VCPU"), 1)])],
        }])
    }

    fn inventory(provider: Uuid, class: &str) -> Command {
        let inventory = Inventory { total: 8, ..Inventory::default() };
        Command::AddInventory { provider, class: intern(class), inventory }
    }

    fn traits(provider: Uuid, traits: Vec<crate::Name>) -> Command {
        Command::SetTraits { provider, generation: None, traits }
    }

    /// The state after these commands, each at a revision of its own.
    fn after(commands: &[Command]) -> State {
        let mut state = State::default();
        for (at, command) in (1..).zip(commands) {
            let changes: Vec<Change> = {
                let mut draft = Draft::new(&state);
                decide(&mut draft, command, 0).unwrap();
                draft.written()
            };
            state.apply(changes.into_iter().map(|change| change.written_at(at)));
        }
        state
    }

    fn child() -> Vec<Command> {
        vec![
            Command::CreateProvider { uuid: PARENT, name: "parent".into(), parent: None },
            Command::CreateProvider { uuid: CHILD, name: "child".into(), parent: Some(PARENT) },
            Command::EnsureTrait(intern("CUSTOM_T")),
            Command::EnsureClass(intern("CUSTOM_C")),
            traits(CHILD, vec![intern("CUSTOM_T")]),
            inventory(CHILD, "CUSTOM_C"),
            inventory(CHILD, "VCPU"),
            inventory(PARENT, "VCPU"),
            claim(CHILD),
        ]
    }

    /// Whatever counts no more is written where it did: the key's record as it was, its generation too.
    #[test]
    fn who_gives_something_back_writes_where_it_was() {
        let provider = Key::Provider;
        let (custom_trait, class) = (Key::Trait(intern("CUSTOM_T")), Key::Class(intern("CUSTOM_C")));
        let release = Command::DeleteAllocations(CONSUMER);
        let cases = [
            (vec![release.clone()], vec![provider(CHILD)]),
            (vec![claim(PARENT)], vec![provider(CHILD)]),
            (vec![traits(CHILD, Vec::new())], vec![custom_trait.clone()]),
            (
                vec![Command::DeleteInventory { provider: CHILD, class: intern("CUSTOM_C") }],
                vec![class.clone()],
            ),
            (
                vec![release.clone(), Command::DeleteProvider(CHILD)],
                vec![provider(PARENT), custom_trait, class],
            ),
            (
                vec![Command::UpdateProvider {
                    uuid: CHILD,
                    name: "child".into(),
                    parent: Some(None),
                    may_move: true,
                }],
                vec![provider(PARENT)],
            ),
        ];
        let state = after(&child());
        for (commands, written) in cases {
            let mut draft = Draft::new(&state);
            for command in &commands {
                decide(&mut draft, command, 0).unwrap();
            }
            for key in written {
                assert!(draft.seen().contains_key(&key), "{commands:?} does not compare {key:?}");
                let found = draft.changes().find(|(own, _)| **own == key).map(|(_, record)| record.clone());
                assert!(found.is_some(), "{commands:?} does not write {key:?}");
                assert_eq!(found.flatten(), Draft::new(&state).get(key), "{commands:?}: it is another");
            }
        }
    }

    /// Some of it was deleted by hand: what is left can be released all the same.
    #[test]
    fn what_is_not_there_or_cannot_be_read_is_not_written() {
        let whole = after(&child());
        let lost = Change::Provider(CHILD, None);
        let spoilt = Change::Unreadable {
            key: Key::Provider(CHILD),
            part: crate::Part::Generation,
            why: "spoilt".into(),
        };
        for damage in [lost, spoilt] {
            let mut state = whole.clone();
            state.apply([damage]);
            let mut draft = Draft::new(&state);
            decide(&mut draft, &Command::DeleteAllocations(CONSUMER), 0).unwrap();
            assert!(!draft.seen().contains_key(&Key::Provider(CHILD)));
        }
    }
}
