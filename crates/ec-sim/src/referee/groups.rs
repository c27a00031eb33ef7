//! Rules for groups: what a policy says holds of all records that there are, whoever placed whom, and when.

use ec_model::{Group, Instance, Policy, State, Status, decode};

use super::Referee;
use crate::{
    door::content,
    world::{Actor, World},
};

pub(super) const GROUPS: &str = "/ecompute/groups/";
pub(super) const MEMBERS: &str = "/ecompute/members/";

impl Referee {
    /// A member is told of while it is one, is where the policy lets it be, and has its group.
    pub(super) fn look_at_group(&mut self, world: &World, actor: Actor, key: &str, new: Option<&[u8]>) {
        let keys = &world.keys;
        if let Ok((_, instance)) = keys.parse_member(key) {
            let record = content(world, &keys.instance(instance));
            let record = record.and_then(|pair| decode::<Instance>(&pair.value).ok());
            let is_one = record.is_some_and(|record| keys.membership(&record).as_deref() == Some(key));
            // What failed before it ever ran is nowhere.
            let leaves = new.is_none() && has_failed(world, key);
            if is_one != new.is_some() && !leaves {
                self.found(format!("{actor} wrote {key}, and the instance is no member there, or is"));
            }
            return;
        }
        if key.starts_with(GROUPS) && new.is_none() {
            let left = members(world, key);
            if !left.is_empty() {
                self.found(format!("{actor} deleted {key}, which has {} members", left.len()));
            }
            return;
        }
        let record = keys.parse_instance(key).ok().and(new).and_then(|new| decode::<Instance>(new).ok());
        let Some((own, record)) = record.and_then(|record| Some((keys.membership(&record)?, record))) else {
            return;
        };
        if content(world, &own).is_none() && is_requested(world, &record) {
            self.found(format!("{actor} placed {}, and nothing tells its group of it", record.instance));
        }
        let group = keys.group(&record.project, record.group.as_deref().unwrap_or_default());
        let Some(Ok(Group { policy, .. })) = content(world, &group).map(|pair| decode(&pair.value)) else {
            self.found(format!("{} is placed in a group that there is not", record.instance));
            return;
        };
        let others = members(world, &group);
        let mut others = others.iter().filter(|other| other.instance != record.instance);
        let wrong = others.find(|other| match policy {
            Policy::AntiAffinity => other.node() == record.node(),
            Policy::Affinity => other.node() != record.node(),
            Policy::SoftAffinity | Policy::SoftAntiAffinity => false,
        });
        if let Some(other) = wrong {
            self.found(format!(
                "{} is placed against its group, which has {}",
                record.instance, other.instance
            ));
        }
    }
}

/// Whether its node is asked for it.
fn is_requested(world: &World, record: &Instance) -> bool {
    record.node().is_some_and(|node| content(world, &world.keys.request(node, record.instance)).is_some())
}

/// Whether the member of that key was given up, and never ran.
fn has_failed(world: &World, member: &str) -> bool {
    let Ok((node, instance)) = world.keys.parse_member(member) else { return false };
    let status = content(world, &world.keys.status(node, instance));
    let status = status.and_then(|pair| decode::<Status>(&pair.value).ok());
    content(world, &world.keys.request(node, instance)).is_none()
        && status.is_some_and(|status| status.state == State::Error && status.started_at.is_none())
}

/// The placed members of the group of that key, by their records. What nobody asks for, and is no member any more, is none.
pub(super) fn members(world: &World, group: &str) -> Vec<Instance> {
    let pairs = world.store.content(&world.keys.instances()).pairs;
    let records = pairs.iter().filter_map(|pair| decode::<Instance>(&pair.value).ok());
    let is_of_it = |record: &Instance| {
        record.node().is_some()
            && record.group.as_ref().is_some_and(|name| world.keys.group(&record.project, name) == group)
            && (is_requested(world, record)
                || world.keys.membership(record).is_some_and(|key| content(world, &key).is_some()))
    };
    records.filter(is_of_it).collect()
}
