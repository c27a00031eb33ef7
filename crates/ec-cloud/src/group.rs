//! Groups: instances that shall be near to each other, or far.
//!
//! ```text
//!   groups/<project>/<name>                              the group, which is never changed
//!   members/<project>/<group>/<node>/<instance>          that it has this member there
//! ```
//!
//! A member's key is written with its request, and goes with its record; or earlier, where its build failed before it ever ran, since
//! it is nowhere then. Whoever writes one demands in the same transaction
//! what the policy says, of the keys that are there then: so it holds however many place members at once, whoever of
//! them is killed, and whichever older etcd comes back.

use std::collections::{BTreeMap, BTreeSet};

use ec_model::{Group, Instance, InstanceId, NodeId, Policy, decode};
use ec_plan::choice::Peers;
use ec_runtime::planted;
use ec_store::{Compare, KeyValue, Revision, Txn};
use futures::{StreamExt, TryStreamExt};
use serde::Serialize;

use crate::{
    Cloud, CloudError, CloudResult,
    catalog::{all, create, deletable, missing},
    intent::{Left, clear, failed, is_wanted, trust_age, wanted, young_for},
    lookup::{CONCURRENCY, Found, MENDS, find},
};

/// Members come and go while we look; so often is enough for anybody.
const TRIES: usize = 5;

/// A group with its members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupView {
    /// The group.
    #[serde(flatten)]
    pub group: Group,
    /// By node.
    pub members: Vec<Member>,
}

/// A member of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Member {
    /// Where it is.
    pub node: NodeId,
    /// Which.
    pub instance: InstanceId,
}

/// Makes a group in the project, where it is of a stack's file with the stack's name.
///
/// # Errors
/// [`CloudError::Refused`] where the project has one of that name.
pub async fn create_group(
    cloud: &Cloud,
    name: &str,
    policy: Policy,
    stack: Option<&str>,
) -> CloudResult<GroupView> {
    let (project, stack) = (cloud.project.clone(), stack.map(str::to_owned));
    let group = Group { name: name.to_owned(), project, policy, stack, created_at: cloud.host.now() };
    create(cloud, cloud.keys.group(&cloud.project, name), &group, |group| &group.name).await?;
    Ok(GroupView { group, members: Vec::new() })
}

/// All groups of the project, by name.
pub async fn groups(cloud: &Cloud) -> CloudResult<Vec<GroupView>> {
    let groups: Vec<Group> = all(cloud, &cloud.keys.groups(&cloud.project)).await?;
    // At once: there may be thousands, and most may be empty.
    let keys = cloud.store.keys(&cloud.keys.project_members(&cloud.project)).await?;
    let mut members: BTreeMap<&str, Vec<Member>> = BTreeMap::new();
    for key in &keys {
        let Some((of, Ok((node, instance)))) = group_of(key).map(|of| (of, cloud.keys.parse_member(key)))
        else {
            continue;
        };
        members.entry(of).or_default().push(Member { node, instance });
    }
    let views = groups.into_iter().map(|group| {
        let members = members.remove(cloud.keys.members(&cloud.project, &group.name).as_str());
        GroupView { group, members: members.unwrap_or_default() }
    });
    Ok(views.collect())
}

/// The groups of the project that have members, and whose own keys somebody deleted: nobody is placed in them.
///
/// # Errors
/// etcd does not answer.
pub async fn lost_groups(cloud: &Cloud) -> CloudResult<BTreeSet<String>> {
    let keys = &cloud.keys;
    let groups: Vec<Group> = all(cloud, &keys.groups(&cloud.project)).await?;
    let known: BTreeSet<String> =
        groups.iter().map(|group| keys.members(&cloud.project, &group.name)).collect();
    let mut lost = BTreeSet::new();
    for key in cloud.store.keys(&keys.project_members(&cloud.project)).await? {
        let Some((_, Ok((_, instance)))) =
            group_of(&key).filter(|of| !known.contains(*of)).map(|of| (of, keys.parse_member(&key)))
        else {
            continue;
        };
        let record = cloud.store.get(&keys.instance(instance)).await?.0;
        let name = record.and_then(|pair| decode::<Instance>(&pair.value).ok()).and_then(|it| it.group);
        // It may have been made since.
        if let Some(name) = name.filter(|name| !lost.contains(name))
            && cloud.store.get(&keys.group(&cloud.project, &name)).await?.0.is_none()
        {
            lost.insert(name);
        }
    }
    Ok(lost)
}

/// What the keys of all members of a member's group begin with.
fn group_of(key: &str) -> Option<&str> {
    let (node, _) = key.rmatch_indices('/').nth(1)?;
    key.get(..=node)
}

/// The project's group of that name.
///
/// # Errors
/// [`CloudError::NotFound`] where there is none.
pub async fn group(cloud: &Cloud, name: &str) -> CloudResult<GroupView> {
    view(cloud, Joining::new(cloud, name).await?.group).await
}

async fn view(cloud: &Cloud, group: Group) -> CloudResult<GroupView> {
    let members = members(cloud, &group.name).await?;
    Ok(GroupView { group, members })
}

/// The members of a group of the project, by node.
async fn members(cloud: &Cloud, group: &str) -> CloudResult<Vec<Member>> {
    let keys = cloud.store.keys(&cloud.keys.members(&cloud.project, group)).await?;
    let members = keys.iter().filter_map(|key| cloud.keys.parse_member(key).ok());
    Ok(members.map(|(node, instance)| Member { node, instance }).collect())
}

/// Deletes a group that has no members.
///
/// # Errors
/// [`CloudError::NotFound`] where the project has none of that name, [`CloudError::Refused`] where it has members.
pub async fn delete_group(cloud: &Cloud, name: &str) -> CloudResult<()> {
    delete(cloud, name, None).await
}

/// The same of a group that was made for this stack: one of that name that somebody has made since is not what is meant.
///
/// # Errors
/// As of [`delete_group`]; [`CloudError::Refused`] where it is not of the stack, too.
pub async fn delete_group_of(cloud: &Cloud, name: &str, stack: &str) -> CloudResult<()> {
    delete(cloud, name, Some(stack)).await
}

async fn delete(cloud: &Cloud, name: &str, stack: Option<&str>) -> CloudResult<()> {
    let key = cloud.keys.group(&cloud.project, name);
    for _ in 0..TRIES {
        let Some((group, unchanged)) = deletable::<Group>(cloud, &key).await? else {
            return Err(missing::<Group>(name));
        };
        if let Some(stack) = stack.filter(|stack| group.stack.as_deref() != Some(stack)) {
            return Err(CloudError::Refused(format!("it is not of the stack `{stack}` any more")));
        }
        let alone = Compare::NoneUnder(cloud.keys.members(&cloud.project, name));
        let txn = Txn::new().when(unchanged).when(alone).delete(key.clone());
        if cloud.store.txn(txn).await?.succeeded {
            return Ok(());
        }
        tidy(cloud, name).await?;
        match members(cloud, name).await?.len() {
            0 => {}
            count => {
                return Err(CloudError::Refused(format!(
                    "the group `{name}` has {count} members, so it was not deleted: `eschedule group show {name}` shows them, destroy them before"
                )));
            }
        }
    }
    Err(CloudError::Busy(format!("members of the group `{name}` come and go; try again")))
}

/// Takes away what is left of members that are gone or failed before they ever ran, or of commands that were killed. Answers of how
/// many.
pub(crate) async fn tidy(cloud: &Cloud, group: &str) -> CloudResult<usize> {
    let stood = members(cloud, group).await?.into_iter().map(async |Member { node, instance }| {
        // Most often its node is asked for it, and then it stands.
        if cloud.store.get(&cloud.keys.request(node, instance)).await?.0.is_some() {
            return Ok::<_, CloudError>(Left::Stands);
        }
        let key = cloud.keys.member(&cloud.project, group, node, instance);
        match clear(cloud, key.clone(), instance).await? {
            Left::Stands if drop_failed(cloud, key, instance).await? => Ok(Left::Nothing),
            left => Ok(left),
        }
    });
    let stood: Vec<Left> = futures::stream::iter(stood).buffer_unordered(CONCURRENCY).try_collect().await?;
    Ok(stood.iter().filter(|left| matches!(left, Left::Nothing)).count())
}

/// The key that says of which group an instance on that node is a member.
pub(crate) async fn member_key(
    cloud: &Cloud,
    node: NodeId,
    instance: InstanceId,
) -> CloudResult<Option<String>> {
    let members = cloud.store.keys(&cloud.keys.all_members()).await?;
    let is_its = |key: &String| cloud.keys.parse_member(key).is_ok_and(|of| of == (node, instance));
    Ok(members.into_iter().find(is_its))
}

/// Where an instance is a member.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    /// Nowhere.
    None,
    /// By this key, in the project's group of this name.
    In(String, String),
    /// By this key, in a group that is not there, as this demands.
    Gone(String, Compare),
}

/// Where an instance on that node is a member, as its key tells.
///
/// # Errors
/// [`CloudError::Unreadable`] where nobody can read what that group is called: its place is not taken away for that.
pub(crate) async fn place_of(cloud: &Cloud, node: NodeId, instance: InstanceId) -> CloudResult<Place> {
    let Some(key) = member_key(cloud, node, instance).await? else { return Ok(Place::None) };
    let Some(group) = cloud.keys.group_of_member(&key) else { return Ok(Place::None) };
    let Some(pair) = cloud.store.get(&group).await?.0 else {
        return Ok(Place::Gone(key, Compare::Absent(group)));
    };
    let name = read_group(&pair)?.name;
    match cloud.keys.member(&cloud.project, &name, node, instance) == key {
        true => Ok(Place::In(key, name)),
        false => {
            Err(CloudError::Unreadable(format!("key {group} tells of group `{name}`, {key} of another")))
        }
    }
}

fn read_group(pair: &KeyValue) -> CloudResult<Group> {
    decode(&pair.value).map_err(|error| {
        CloudError::Unreadable(format!(
            "key {} cannot be read: {error}; nothing was changed: {MENDS}",
            pair.key
        ))
    })
}

/// The members of a group that have no place there any more, which nobody has taken away yet: [`tidy`] would. Nothing is changed.
pub(crate) async fn placeless(cloud: &Cloud, group: &str) -> CloudResult<Vec<Member>> {
    let mut found = Vec::new();
    for member in members(cloud, group).await? {
        let placeless = match find(cloud, member.instance).await {
            Ok(Found::Placed(known)) => match &known.record {
                Some(record) => failed(cloud, record).await?.is_some(),
                None => !is_wanted(&known) && known.status.is_absent(),
            },
            Ok(Found::Unplaced(record, _)) => {
                young_for(cloud, &record).is_none() && trust_age(cloud, &record).await.is_ok()
            }
            Err(CloudError::NotFound(_)) => true,
            Err(CloudError::Unreadable(_)) => false,
            Err(error) => return Err(error),
        };
        found.extend(placeless.then_some(member));
    }
    Ok(found)
}

/// Takes the place of a member away whose build failed before it ever ran. Where it is brought back all the same, it joins again.
/// Whether it was that.
pub(crate) async fn drop_failed(cloud: &Cloud, key: String, instance: InstanceId) -> CloudResult<bool> {
    let record = cloud.keys.instance(instance);
    let Some(pair) = cloud.store.get(&record).await?.0 else { return Ok(false) };
    let Ok(is) = wanted(instance, &pair.value) else { return Ok(false) };
    if cloud.keys.membership(&is).as_ref() != Some(&key) {
        return Ok(false);
    }
    let Some(still) = failed(cloud, &is).await? else { return Ok(false) };
    let txn = Txn::new().when_all(still).when(Compare::Unchanged(record, pair.mod_revision)).delete(key);
    Ok(cloud.store.txn(txn).await?.succeeded)
}

/// A group that an instance shall go into, as it was read.
#[derive(Debug, Clone)]
pub struct Joining {
    pub(crate) group: Group,
    /// Of this revision the policy is.
    revision: Revision,
}

impl Joining {
    /// The project's group of that name.
    ///
    /// # Errors
    /// [`CloudError::NotFound`] where there is none.
    pub async fn new(cloud: &Cloud, name: &str) -> CloudResult<Self> {
        let key = cloud.keys.group(&cloud.project, name);
        let pair = cloud.store.get(&key).await?.0.ok_or_else(|| missing::<Group>(name))?;
        Ok(Self { group: read_group(&pair)?, revision: pair.mod_revision })
    }

    /// The members that there are now.
    pub(crate) async fn peers(&self, cloud: &Cloud) -> CloudResult<Peers> {
        let listing = cloud.store.list(&cloud.keys.members(&cloud.project, &self.group.name)).await?;
        let (policy, as_of) = (self.group.policy, listing.revision);
        let mut peers = Peers { policy, on: BTreeMap::new(), as_of };
        for pair in &listing.pairs {
            if let Ok((node, instance)) = cloud.keys.parse_member(&pair.key) {
                peers.on.entry(node).or_default().insert(instance);
            }
        }
        Ok(peers)
    }

    /// The members that there are after a place was not had.
    ///
    /// # Errors
    /// [`CloudError::Refused`] where the group is gone, or is another.
    pub(crate) async fn peers_still(&self, cloud: &Cloud) -> CloudResult<Peers> {
        let Group { project, name, .. } = &self.group;
        let now = cloud.store.get(&cloud.keys.group(project, name)).await?.0;
        if now.is_none_or(|pair| pair.mod_revision != self.revision) {
            return Err(CloudError::Refused(format!(
                "the group `{name}` was deleted while a member of it was being placed; nothing was requested"
            )));
        }
        self.peers(cloud).await
    }

    /// Adds the demand that one more member may go to this node. Of a group with affinity all are on one node, so who joins
    /// one that is there still joins all. Of a soft one it is that the node is as it was when it was preferred, where that `matters`.
    pub(crate) fn demand(
        &self,
        cloud: &Cloud,
        peers: &Peers,
        node: NodeId,
        matters: bool,
        mut txn: Txn,
    ) -> Txn {
        let (keys, Group { project, name, policy, .. }) = (&cloud.keys, &self.group);
        txn = txn.when(Compare::Unchanged(keys.group(project, name), self.revision));
        if planted("group-not-compared") {
            return txn;
        }
        match policy {
            Policy::AntiAffinity => txn.when(Compare::NoneUnder(keys.members_on(project, name, node))),
            Policy::Affinity => match peers.on.get(&node).and_then(|there| there.first()) {
                Some(peer) => txn.when(Compare::Present(keys.member(project, name, node, *peer))),
                None => txn.when(Compare::NoneUnder(keys.members(project, name))),
            },
            Policy::SoftAntiAffinity if matters => {
                txn.when(Compare::NoneSince(keys.members_on(project, name, node), peers.as_of))
            }
            Policy::SoftAffinity if matters && peers.on.is_empty() => {
                txn.when(Compare::NoneUnder(keys.members(project, name)))
            }
            Policy::SoftAffinity | Policy::SoftAntiAffinity => txn,
        }
    }
}
