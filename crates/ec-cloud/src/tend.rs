//! What must be done for a cluster when no tool and no agent is there to do it. Everything here is decided anew from
//! what is there and done by compare-and-swap, so any number may do it at once.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::Duration,
};

use ec_model::{InstanceId, Node, NodeId, RequestId, Workload, decode};
use ec_plan::fleet::{Fleet, Move, Seen};
use futures::StreamExt;
use tokio::time::Instant;

use crate::{
    Cloud, CloudError, CloudResult, Kind,
    group::drop_failed,
    history::let_fade,
    image::{delete_copy, left_over},
    intent::{drop_alone, sweep, wanted},
    lookup::CONCURRENCY,
};

/// What takes so long to be unavailable does not answer. That a record of one cannot be read is told at once.
const AWAY: Duration = Duration::from_secs(4);

/// So many histories of which nothing else is left are looked at by one look.
const FADING: usize = 64;

/// Seconds that clocks may differ by where what somebody left is known by its age. Who is at an image says so each minute, and
/// what is ten minutes old is left.
const CLOCKS: u64 = 60;

/// Why nobody on this host may judge by its age what others left, in a sentence's part, where placement's clock is so many seconds ahead.
pub fn clocks_differ(ahead: Option<i64>) -> Option<String> {
    let ahead = ahead.filter(|ahead| ahead.unsigned_abs() > CLOCKS)?;
    Some(format!("{}, and one of them is wrong (`timedatectl` on both)", clock_in_words(ahead)))
}

/// How this host's clock is, where placement's is so many seconds ahead.
pub fn clock_in_words(ahead: i64) -> String {
    let side = if ahead.is_positive() { "behind" } else { "ahead of" };
    format!("this host's clock is {} s {side} that of placement's host", ahead.unsigned_abs())
}

/// An error where this host's clock may be why something seems to be left.
///
/// # Errors
/// [`clocks_differ`].
pub fn trust_clock(ahead: Option<i64>) -> CloudResult<()> {
    let stays =
        |why| CloudError::Refused(format!("{why}: somebody may be at what seems to be left, so it stays"));
    clocks_differ(ahead).map_or(Ok(()), |why| Err(stays(why)))
}

/// What was done about many, each for itself: one that cannot be done, say for want of a record that can be read, keeps nobody
/// from the others; but where etcd or placement does not answer for seconds, the others are left to the next look.
#[derive(Debug)]
pub struct Tended<T> {
    /// What was done.
    pub done: Vec<T>,
    /// What failed first.
    pub failed: Option<CloudError>,
    /// When the last one came to its end.
    since: Instant,
    /// Whether etcd or placement did not answer: each of the others would wait for that as long.
    is_away: bool,
}

impl<T> Tended<T> {
    pub(crate) fn new() -> Self {
        Self { done: Vec::new(), failed: None, since: Instant::now(), is_away: false }
    }

    /// Notes what came of one; nothing where there was nothing to do. Whether there is use in going on.
    pub(crate) fn note(&mut self, outcome: CloudResult<Option<T>>) -> bool {
        let took = std::mem::replace(&mut self.since, Instant::now()).elapsed();
        match outcome {
            Ok(done) => self.done.extend(done),
            Err(error) => {
                self.is_away |= error.kind() == Kind::Unreachable && took >= AWAY;
                self.failed = self.failed.take().or(Some(error));
            }
        }
        !self.is_away
    }
}

/// An instance that something was taken away of, which nobody needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cleared {
    /// Which.
    pub instance: InstanceId,
    /// Of the command that asked for it last, where that is known.
    pub request_id: Option<RequestId>,
}

/// Looks at all nodes, and marks in placement those that are down, or are back. Answers what was seen and done.
///
/// # Errors
/// etcd or placement does not answer, and nothing was done.
pub async fn tend_nodes(
    cloud: &Cloud,
    fleet: &mut Fleet,
    now: Duration,
) -> CloudResult<(Seen, Tended<Move>)> {
    let prefixes = (cloud.keys.nodes(), cloud.keys.all_alive());
    let (known, alive) = tokio::try_join!(cloud.store.list(&prefixes.0), cloud.store.keys(&prefixes.1))?;
    let known: BTreeMap<NodeId, bool> = known
        .pairs
        .iter()
        .filter_map(|pair| {
            let is_revoked = decode::<Node>(&pair.value).is_ok_and(|node| node.revoked);
            Some((cloud.keys.parse_node(&pair.key).ok()?, is_revoked))
        })
        .collect();
    let seen = Seen {
        revoked: known.iter().filter(|(_, revoked)| **revoked).map(|(node, _)| *node).collect(),
        known: known.into_keys().collect(),
        alive: alive.iter().filter_map(|key| cloud.keys.parse_alive(key).ok()).collect(),
        marked: cloud.placement.marked_down().await?,
    };
    let mut tended = Tended::new();
    let mut left = futures::stream::iter(fleet.look(&seen, now))
        .map(async |next| {
            let changed = match next {
                // Of many, that are cut off say, some may be back by now.
                Move::MarkDown(node) if cloud.store.get(&cloud.keys.alive(node)).await?.0.is_some() => false,
                Move::MarkDown(node) => cloud.placement.mark_down(node, true).await?,
                Move::MarkUp(node) => cloud.placement.mark_down(node, false).await?,
            };
            Ok(changed.then_some(next))
        })
        .buffer_unordered(CONCURRENCY)
        .boxed();
    while let Some(moved) = left.next().await {
        if !tended.note(moved) {
            break;
        }
    }
    drop(left);
    Ok((seen, tended))
}

/// Takes away what killed commands and instances that failed long ago left: records that nobody asks for and no
/// agent tells of, their names and memberships, and claims that were never requested; names and memberships whose records
/// are gone, unless their nodes are asked for them; and places in groups of what failed before it ever ran. Answers whose. And it deletes copies of disks for images that nobody sends any more,
/// and has histories fade of which nothing else is left.
///
/// # Errors
/// etcd does not answer, and nothing was done.
pub async fn tend_instances(cloud: &Cloud) -> CloudResult<Tended<Cleared>> {
    let keys = &cloud.keys;
    let prefixes = (keys.all_requests(), keys.all_statuses(), keys.instances(), keys.all_members());
    let names = [Workload::Machine, Workload::Volume].map(|kind| keys.all_names(kind));
    let actions = keys.all_actions();
    let (requests, statuses, records, members, names, volumes, histories) = tokio::try_join!(
        cloud.store.keys(&prefixes.0),
        cloud.store.keys(&prefixes.1),
        cloud.store.keys(&prefixes.2),
        cloud.store.keys(&prefixes.3),
        cloud.store.keys(&names[0]),
        cloud.store.keys(&names[1]),
        cloud.store.keys(&actions)
    )?;
    let of_it = |(_, instance)| instance;
    let requested: HashSet<InstanceId> =
        requests.iter().filter_map(|key| keys.parse_request(key).ok()).map(of_it).collect();
    let statuses = statuses.iter().filter_map(|key| keys.parse_status(key).ok()).map(of_it);
    let spoken_of: HashSet<InstanceId> = requested.iter().copied().chain(statuses).collect();
    let recorded: BTreeSet<InstanceId> =
        records.iter().filter_map(|key| keys.parse_instance(key).ok()).collect();
    let mut tended = Tended::new();
    for (image, copy) in left_over(cloud, &volumes).await? {
        match delete_copy(cloud, image, copy).await {
            // It is being made at this moment, or somebody gave it to an instance, or locked it, or calls it otherwise.
            Err(error) if error.kind() != Kind::Unreachable => {}
            deleted => {
                if !tended.note(deleted.map(|_| Some(Cleared { instance: copy, request_id: None }))) {
                    return Ok(tended);
                }
            }
        }
    }
    let told = |instance: &InstanceId| spoken_of.contains(instance) && !requested.contains(instance);
    for key in &members {
        if let Some((_, instance)) = keys.parse_member(key).ok().filter(|(_, instance)| told(instance)) {
            let dropped = drop_failed(cloud, key.clone(), instance).await;
            if !tended.note(dropped.map(|is| is.then_some(Cleared { instance, request_id: None }))) {
                return Ok(tended);
            }
        }
    }
    // One that is asked for has lost its record alone: with that it gets its name and its place again.
    let is_gone = |instance: &InstanceId| !recorded.contains(instance) && !requested.contains(instance);
    // And the place of one that its node tells of stays till it is healed.
    let members = members
        .into_iter()
        .filter(|key| keys.parse_member(key).is_ok_and(|(_, instance)| !spoken_of.contains(&instance)));
    for key in names.into_iter().chain(volumes).chain(members) {
        if let Some(instance) = keys.parse_bearer(&key).filter(is_gone) {
            let dropped = drop_alone(cloud, key, instance).await;
            if !tended.note(dropped.map(|is| is.then_some(Cleared { instance, request_id: None }))) {
                return Ok(tended);
            }
        }
    }
    let of_nobody = |key: &String| {
        let instance = key.strip_prefix(&actions)?.parse().ok()?;
        (!recorded.contains(&instance) && !spoken_of.contains(&instance)).then_some(instance)
    };
    let mut fading: Vec<InstanceId> = histories.iter().filter_map(of_nobody).collect();
    // Nearly all are of what was destroyed, and go by themselves: each look asks some, by turns.
    let second = usize::try_from(cloud.host.now().as_second()).unwrap_or(0);
    let first = second.checked_rem(fading.len()).unwrap_or(0);
    fading.rotate_left(first);
    for instance in fading.into_iter().take(FADING) {
        if !tended.note(let_fade(cloud, instance).await.map(|()| None)) {
            return Ok(tended);
        }
    }
    let alone = recorded.into_iter().filter(|instance| !spoken_of.contains(instance));
    let mut left = futures::stream::iter(alone)
        .map(async |instance| {
            let Some(pair) = cloud.store.get(&keys.instance(instance)).await?.0 else { return Ok(None) };
            // What cannot be read is touched by nobody; `list` shows it.
            let Ok(record) = wanted(instance, &pair.value) else { return Ok(None) };
            // Of a host whose clock is far ahead, a command may be at it now: whoever wants its name takes that over.
            if record.created_at > cloud.host.now() {
                return Ok(None);
            }
            let cleared = Cleared { instance, request_id: record.request_id };
            sweep(cloud, record, pair.mod_revision).await.map(|swept| swept.then_some(cleared))
        })
        .buffer_unordered(CONCURRENCY)
        .boxed();
    while let Some(swept) = left.next().await {
        if !tended.note(swept) {
            break;
        }
    }
    Ok(tended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_differ_by_a_minute_judge_nothing() {
        for ahead in [None, Some(0), Some(60), Some(-60)] {
            assert!(trust_clock(ahead).is_ok(), "{ahead:?}");
        }
        for (ahead, side) in [(61, "61 s behind that"), (-660, "660 s ahead of that")] {
            let error = trust_clock(Some(ahead)).unwrap_err();
            assert!(error.kind() == Kind::Refused && error.to_string().contains(side), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_nothing_is_answered_for_long_the_others_are_left_to_the_next_look() {
        let away = || Err(CloudError::Unavailable("etcd is away".into()));
        let mut tended = Tended::new();
        assert!(tended.note(Ok(Some(1))));
        assert!(tended.note(away()), "that is told at once, say of one whose record cannot be read");
        tokio::time::advance(AWAY).await;
        assert!(tended.note(Err(CloudError::Busy("it keeps changing".into()))), "it is there");
        assert!(tended.note(Ok(Some(2))));
        tokio::time::advance(AWAY).await;
        assert!(!tended.note(away()));
        assert!(!tended.note(Ok(None)), "it stays so");
        assert_eq!(tended.done, [1, 2]);
        assert!(matches!(tended.failed, Some(CloudError::Unavailable(_))));
    }
}
