//! Rules for who is told that there is no room: while it was looked for, and nothing else changed, there was none.

use ec_model::{Group, Instance, Node, NodeId, Policy, ResourceQuery, decode};
use ec_store::{KeyValue, Txn};

use super::{
    Referee,
    groups::{GROUPS, MEMBERS, members},
    room::{DISABLED, has_trait, offered, used_of},
};
use crate::{
    door::content,
    world::{Actor, PLACEMENT, World},
};

/// By which room is found, as it stood: how often it was changed, and who was alive.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rooms {
    era: u64,
    changes: u64,
    alive: Vec<KeyValue>,
}

impl Rooms {
    pub(crate) fn of(world: &World) -> Self {
        let changes = world.judge(|referee, _| referee.room_changes);
        Self::at(world, changes)
    }

    fn at(world: &World, changes: u64) -> Self {
        Self { era: world.era(), changes, alive: world.store.content(&world.keys.all_alive()).pairs }
    }
}

impl Referee {
    /// Something was written by which room is found.
    pub(super) fn look_at_room(&mut self, world: &World, txn: &Txn) {
        let nodes = world.keys.nodes();
        let claims = [format!("{PLACEMENT}/consumers/"), format!("{PLACEMENT}/providers/")];
        let about = claims.iter().map(String::as_str).chain([&*nodes, GROUPS, MEMBERS]);
        if about.clone().any(|prefix| txn.then.iter().any(|op| op.key().starts_with(prefix))) {
            self.room_changes += 1;
        }
    }

    /// A user who asked for that when all stood so was told that there is no room for it.
    pub(crate) fn denied(
        &mut self,
        world: &World,
        actor: Actor,
        stood: &Rooms,
        query: &ResourceQuery,
        group: Option<&str>,
    ) {
        // A scenario may have spoiled what room is found by, and says itself what is told then.
        if world.is_calm() || Rooms::at(world, self.room_changes) != *stood {
            return;
        }
        // Or by the keys of its members, whose records may be lost.
        let told = group.map(|name| world.store.content(&format!("{MEMBERS}default/{name}/")).pairs);
        let told: Vec<NodeId> = told
            .iter()
            .flatten()
            .filter_map(|pair| Some(world.keys.parse_member(&pair.key).ok()?.0))
            .collect();
        let group = group.map(|name| world.keys.group("default", name));
        let policy = group.as_ref().map(|key| content(world, key).map(|pair| decode::<Group>(&pair.value)));
        let policy = match policy {
            None => None,
            Some(Some(Ok(group))) => Some(group.policy),
            Some(_) => return,
        };
        let peers = group.map(|key| members(world, &key)).unwrap_or_default();
        for computer in &world.computers {
            let node = computer.node;
            let is_alive = stood.alive.iter().any(|pair| pair.key == world.keys.alive(node));
            let record = content(world, &world.keys.node(node)).map(|pair| decode::<Node>(&pair.value));
            let is_let_in = matches!(record, Some(Ok(Node { revoked: false, .. })));
            let provider = content(world, &format!("{PLACEMENT}/providers/{node}"));
            let Some(provider) = provider.filter(|_| is_alive && is_let_in) else { continue };
            let mut members = peers.iter().filter_map(Instance::node).chain(told.iter().copied());
            let is_allowed = match policy {
                Some(Policy::Affinity) => members.all(|member| member == node),
                Some(Policy::AntiAffinity) => members.all(|member| member != node),
                Some(Policy::SoftAffinity | Policy::SoftAntiAffinity) | None => true,
            };
            let fits = query.total().iter().all(|(class, amount)| {
                (used_of(world, node, class) + amount) as f64 <= offered(&provider.value, class)
            });
            if is_allowed && fits && !has_trait(&provider.value, DISABLED) {
                self.found(format!("{actor} was told that there is no room, and {node} has room"));
                return;
            }
        }
    }
}
