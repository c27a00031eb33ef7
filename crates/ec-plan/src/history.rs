//! What was done to an instance and what came of it, put together from two lists: what users asked for, and how the
//! instance came to stand afterwards.

use std::time::Duration;

use ec_model::{
    Action, ActionVerb, Actions, HISTORY_MAX, InstanceId, NodeId, Outcome, Outcomes, RequestId, State, Status,
};
use jiff::Timestamp;
use serde::Serialize;

use crate::status::is_under_way;

/// How long the status of a failed instance, and the history of one whose end was wished, can be read before they go by themselves.
pub const RETENTION: Duration = Duration::from_hours(24);

/// What came of what a user asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fate {
    /// It was done.
    Done,
    /// It was not, and the reason says why.
    Failed,
    /// Before it was done something else was asked for.
    Overtaken,
    /// Its agent has yet to do it, or is about it.
    Pending,
    /// Nobody knows any more.
    Unknown,
}

/// Something that was done to an instance, or became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Happening {
    /// When it was asked for, or became so.
    pub at: Timestamp,
    /// Who asked for it; nobody, where it became so by itself.
    pub user: Option<String>,
    /// The project for which.
    pub project: Option<String>,
    /// The node.
    pub node: NodeId,
    /// The id of the command that asked for it, where that noted one.
    pub request_id: Option<RequestId>,
    /// What was asked for.
    pub verb: Option<ActionVerb>,
    /// How, where the verb does not say all.
    pub detail: Option<String>,
    /// What came of it.
    pub outcome: Option<Fate>,
    /// How it stood then.
    pub state: Option<State>,
    /// Why.
    pub reason: Option<String>,
    /// When it was so.
    pub finished_at: Option<Timestamp>,
}

/// What is to be noted when a status takes the place of another: nothing on the way, nor where nothing came of anything.
pub fn noted(old: Option<&Status>, new: &Status) -> Option<Outcome> {
    let facts = |status: &Status| {
        (
            status.state,
            status.reason.clone(),
            status.power_generation,
            status.rebuilt.clone(),
            status.rescued.clone(),
            status.resized.clone(),
            status.restarts,
        )
    };
    let volumes = had(new);
    let are_others = volumes.is_some() && old.and_then(had) != volumes;
    let is_news = are_others || old.is_none_or(|old| facts(old) != facts(new));
    (is_settled(new) && is_news).then(|| Outcome {
        at: new.updated_at,
        state: Some(new.state),
        reason: new.reason.clone(),
        generation: new.observed_generation,
        power_generation: new.power_generation,
        rebuilt: new.rebuilt.clone(),
        rescued: new.rescued.clone(),
        resized: new.resized.clone(),
        restarts: new.restarts,
        volumes,
    })
}

/// The volumes that one has which is told of so, where it has all that it is to have.
fn had(status: &Status) -> Option<Vec<InstanceId>> {
    let are_so = !status.volumes_changing && status.volumes_failed.is_none();
    are_so.then(|| status.volumes.iter().map(|has| has.volume).collect())
}

fn is_settled(status: &Status) -> bool {
    !is_under_way(status.state) && status.state != State::Scheduled
}

/// The end of an instance, which its status told last.
pub fn ended(old: Option<&Status>, now: Timestamp) -> Outcome {
    Outcome {
        at: now,
        state: None,
        reason: None,
        generation: old.map_or(0, |old| old.observed_generation),
        power_generation: old.map_or(0, |old| old.power_generation),
        rebuilt: old.and_then(|old| old.rebuilt.clone()),
        rescued: None,
        resized: old.and_then(|old| old.resized.clone()),
        restarts: 0,
        volumes: None,
    }
}

/// What happened, in the order of time, and what was asked for in the order in which it was. The statuses are those of now, of each node.
pub fn told(actions: &Actions, outcomes: &[Outcomes], statuses: &[Status]) -> Vec<Happening> {
    let settled = statuses.iter().filter(|status| is_settled(status));
    let seen = settled.map(|status| status.observed_generation).max().unwrap_or(0);
    let all: Vec<(NodeId, &Outcome)> =
        outcomes.iter().flat_map(|of| of.outcomes.iter().map(|outcome| (of.node, outcome))).collect();
    let mut of_users = vec![false; all.len()];
    // Each with when it has its place: what was asked for later comes later, also where a clock was wrong meanwhile.
    let (mut told, mut latest) = (Vec::new(), Timestamp::MIN);
    for action in &actions.actions {
        let at = action.asked_at.unwrap_or(action.at);
        latest = latest.max(at);
        let mut came = match action.verb {
            ActionVerb::Set => (set(action, actions, &all, statuses), None),
            ActionVerb::AttachVolume | ActionVerb::DetachVolume => {
                with_volume(action, actions, &all, statuses)
            }
            _ => match fate(action, actions, &all, seen) {
                (Fate::Pending, _) if is_of_power(action.verb) && could_not(action, statuses).is_some() => {
                    (Fate::Failed, None)
                }
                fate => fate,
            },
        };
        if outcomes.iter().any(|of| is_before(action, of)) {
            came = certain(action.verb, came);
        }
        let (fate, place) = came;
        if let Some(place) = place {
            of_users[place] = true;
        }
        let outcome = place.map(|place| all[place].1);
        let failure = match action.verb {
            ActionVerb::AttachVolume | ActionVerb::DetachVolume => {
                status_of(action, statuses).and_then(|status| status.volumes_failed.clone())
            }
            _ if outcome.is_none() => could_not(action, statuses).and_then(|status| status.reason.clone()),
            verb => outcome.and_then(|outcome| carried_out(verb, outcome)).and_then(|(_, failed)| failed),
        };
        // Of what is told by its agent having seen it nobody knows when that was.
        let is_of_level = !action.at_once
            && matches!(action.verb, ActionVerb::Set | ActionVerb::AttachVolume | ActionVerb::DetachVolume);
        let at_once = (fate == Fate::Done && !is_of_level).then_some(at);
        let happening = Happening {
            at,
            user: Some(action.user.clone()),
            project: Some(action.project.clone()),
            node: action.node,
            request_id: action.request_id,
            verb: Some(action.verb),
            detail: action.detail.clone(),
            outcome: Some(fate),
            state: outcome.and_then(|outcome| outcome.state),
            reason: failure
                .filter(|_| fate == Fate::Failed)
                .or_else(|| outcome.and_then(|outcome| outcome.reason.clone())),
            finished_at: outcome.map(|outcome| outcome.at).or(at_once),
        };
        told.push((latest, happening));
    }
    // What came of actions that are kept no more is not what came by itself.
    let begun = actions.actions.first().filter(|_| actions.actions.len() >= HISTORY_MAX);
    let by_itself = all.iter().zip(of_users).enumerate().filter(|(place, ((_, outcome), of_user))| {
        !of_user && begun.is_none_or(|first| outcome.at >= first.at) && !is_of_volumes_alone(&all, *place)
    });
    let by_itself = by_itself.map(|(_, ((node, outcome), _))| Happening {
        at: outcome.at,
        user: None,
        project: None,
        node: *node,
        request_id: None,
        verb: None,
        detail: (outcome.restarts > 0).then(|| format!("restart {}", outcome.restarts)),
        outcome: None,
        state: outcome.state,
        reason: outcome.reason.clone(),
        finished_at: Some(outcome.at),
    });
    told.extend(by_itself.map(|happening| (happening.at, happening)));
    told.sort_by_key(|(place, _)| *place);
    told.into_iter().map(|(_, happening)| happening).collect()
}

/// Whether an outcome tells nothing but which volumes it has: that is no event for who did not ask for it.
fn is_of_volumes_alone(all: &[(NodeId, &Outcome)], place: usize) -> bool {
    let (node, outcome) = all[place];
    let before = place.checked_sub(1).map(|before| all[before]).filter(|(of, _)| *of == node);
    let rest =
        |it: &Outcome| Outcome { at: Timestamp::UNIX_EPOCH, generation: 0, volumes: None, ..it.clone() };
    outcome.volumes.is_some()
        && before
            .is_some_and(|(_, before)| before.volumes != outcome.volumes && rest(before) == rest(outcome))
}

fn status_of<'a>(action: &Action, statuses: &'a [Status]) -> Option<&'a Status> {
    statuses.iter().find(|status| status.node == action.node)
}

/// How it stands, where that is an ERROR which its agent knew the action in: that it stays in one, for the same reason, is no outcome.
fn could_not<'a>(action: &Action, statuses: &'a [Status]) -> Option<&'a Status> {
    status_of(action, statuses)
        .filter(|it| it.state == State::Error && it.observed_generation >= action.generation)
}

/// Whether the agent acts by what was set. Labels are so at once.
fn set(action: &Action, actions: &Actions, all: &[(NodeId, &Outcome)], statuses: &[Status]) -> Fate {
    let of_outcomes = all.iter().map(|(_, outcome)| outcome.generation);
    let of_statuses = statuses.iter().map(|status| status.observed_generation);
    let is_heard = of_outcomes.chain(of_statuses).any(|heard| heard >= action.generation);
    let later = || actions.actions.iter().skip_while(|other| *other != action);
    match action.at_once || is_heard {
        true => Fate::Done,
        // Its agent may be gone for good.
        false if later().any(|other| other.verb == ActionVerb::Delete) => Fate::Overtaken,
        false => Fate::Pending,
    }
}

/// Whether it has, or has no more, the volume that it was asked of. What it has is told when it is so; that it cannot be only for as
/// long as it cannot, since its agent tries that again.
fn with_volume(
    action: &Action,
    actions: &Actions,
    all: &[(NodeId, &Outcome)],
    statuses: &[Status],
) -> (Fate, Option<usize>) {
    let wants = action.verb == ActionVerb::AttachVolume;
    let status = status_of(action, statuses).filter(|it| it.observed_generation >= action.generation);
    let settled = status.filter(|it| !it.volumes_changing);
    let Some(volume) = action.volume else {
        let is_so = settled.is_some_and(|it| it.volumes_failed.is_none());
        return (if is_so { Fate::Done } else { Fate::Unknown }, None);
    };
    let is_so = |(_, it): &(NodeId, &Outcome)| {
        let has = it.volumes.as_ref().map(|volumes| volumes.contains(&volume));
        it.generation >= action.generation && has == Some(wants)
    };
    // The next wish about the same volume is the other one: what is told after that is told of that.
    let next = actions.actions.iter().filter(|other| other.generation > action.generation).find(|other| {
        other.verb == ActionVerb::Delete || (other.volume == Some(volume) && other.verb != action.verb)
    });
    let in_time = |(_, it): &(NodeId, &Outcome)| next.is_none_or(|next| it.generation < next.generation);
    match all.iter().position(|it| is_so(it) && in_time(it)) {
        Some(place) => (Fate::Done, Some(place)),
        // An agent of an older release tells of no volumes here.
        None if next.is_some() && all.iter().any(|(_, it)| it.volumes.is_some()) => (Fate::Overtaken, None),
        None if next.is_some() => (Fate::Unknown, None),
        None => match settled {
            // Which of them it was about nobody says: the last that was asked for.
            Some(it) if it.volumes_failed.is_some() => {
                let is_later =
                    |other: &&Action| other.generation > action.generation && other.volume.is_some();
                let is_last = !actions.actions.iter().any(|other| is_later(&other));
                (if is_last { Fate::Failed } else { Fate::Unknown }, None)
            }
            Some(it) if it.volumes.iter().any(|has| has.volume == volume) == wants => (Fate::Done, None),
            _ => (Fate::Pending, None),
        },
    }
}

/// Whether what came of an action may be kept no more.
fn is_before(action: &Action, of: &Outcomes) -> bool {
    let first = of.outcomes.first().filter(|_| of.outcomes.len() >= HISTORY_MAX);
    first.is_some_and(|first| action.at < first.at)
}

/// What is certain of that still: an outcome that is kept may have come of something later.
fn certain(verb: ActionVerb, came: (Fate, Option<usize>)) -> (Fate, Option<usize>) {
    match (verb, came.0) {
        (verb, Fate::Done | Fate::Overtaken) if is_of_power(verb) || verb == ActionVerb::Unrescue => {
            (Fate::Unknown, None)
        }
        (ActionVerb::Create | ActionVerb::Pause | ActionVerb::Suspend, Fate::Failed) => (Fate::Unknown, None),
        // What told that it was carried out may be kept no more.
        (
            ActionVerb::Rebuild
            | ActionVerb::Rescue
            | ActionVerb::Resize
            | ActionVerb::RevertResize
            | ActionVerb::AttachVolume
            | ActionVerb::DetachVolume,
            Fate::Overtaken,
        ) => (Fate::Unknown, None),
        _ => came,
    }
}

/// What came of an action, and the place of the outcome that tells so. All up to the generation that its agent has seen
/// is settled.
fn fate(action: &Action, actions: &Actions, all: &[(NodeId, &Outcome)], seen: u64) -> (Fate, Option<usize>) {
    let first = |is: &dyn Fn(&Outcome) -> bool| all.iter().position(|(_, outcome)| is(outcome));
    let failed = || first(&|it| it.generation >= action.generation && it.state == Some(State::Error));
    // Before something else was wished of its power, and so by this wish: that stays so, whatever is wished afterwards.
    let next = actions.actions.iter().filter(|other| other.generation > action.generation);
    let next = next.filter(|other| is_of_power(other.verb) || other.verb == ActionVerb::Delete);
    let until = next.map(|other| other.generation).min().unwrap_or(u64::MAX);
    let failed_by_itself = || {
        let is_so = |it: &Outcome| {
            it.state == Some(State::Error) && (action.generation..until).contains(&it.generation)
        };
        first(&is_so).map(|place| (Fate::Failed, Some(place)))
    };
    let or_failed = |overtaken: bool| match failed() {
        _ if overtaken => (Fate::Overtaken, None),
        Some(place) => (Fate::Failed, Some(place)),
        None => (Fate::Pending, None),
    };
    let later = |is: fn(ActionVerb) -> bool| {
        actions.actions.iter().any(|other| other.generation > action.generation && is(other.verb))
    };
    match action.verb {
        verb if verb.is_done_at_once() => (Fate::Done, None),
        ActionVerb::Create => match first(&|it| it.generation >= action.generation) {
            Some(place) if all[place].1.state == Some(State::Error) => (Fate::Failed, Some(place)),
            // The first may be kept no more.
            Some(place) if all.len() >= HISTORY_MAX && all[place].1.generation > action.generation => {
                (Fate::Unknown, None)
            }
            Some(place) => (Fate::Done, Some(place)),
            None if later(|verb| verb == ActionVerb::Delete) => (Fate::Overtaken, None),
            None => (Fate::Pending, None),
        },
        // It is there when that node tells so; another that went on from there had it, too.
        ActionVerb::Migrate => {
            let is_there = |(node, outcome): &(NodeId, &Outcome)| {
                *node == action.node
                    && outcome.generation >= action.generation
                    && outcome.state == Some(State::Active)
            };
            match all.iter().position(is_there) {
                Some(place) => (Fate::Done, Some(place)),
                None => or_failed(later(|verb| matches!(verb, ActionVerb::Migrate | ActionVerb::Delete))),
            }
        }
        ActionVerb::Rebuild | ActionVerb::Rescue | ActionVerb::Resize | ActionVerb::RevertResize => {
            let wish = |it: &Outcome| carried_out(action.verb, it).map(|(wished_at, _)| wished_at);
            // One that was carried out later may have been wished by a clock that was behind this one's.
            let own = first(&|it| wish(it) == Some(action.at));
            let another =
                || first(&|it| it.generation >= action.generation && wish(it).cmp(&Some(action.at)).is_gt());
            match own.or_else(another) {
                Some(place) if wish(all[place].1) != Some(action.at) => (Fate::Overtaken, None),
                Some(place)
                    if carried_out(action.verb, all[place].1).is_some_and(|(_, failed)| failed.is_some()) =>
                {
                    (Fate::Failed, Some(place))
                }
                Some(place) => (Fate::Done, Some(place)),
                None => or_failed(later(match action.verb {
                    ActionVerb::Rebuild => |verb| matches!(verb, ActionVerb::Rebuild | ActionVerb::Delete),
                    ActionVerb::Resize | ActionVerb::RevertResize => |verb| {
                        use ActionVerb::{Delete, Resize, RevertResize};
                        matches!(verb, Resize | RevertResize | Delete)
                    },
                    _ => {
                        |verb| matches!(verb, ActionVerb::Rescue | ActionVerb::Unrescue | ActionVerb::Delete)
                    }
                })),
            }
        }
        ActionVerb::Unrescue => {
            let is_so = |it: &Outcome| {
                it.generation >= action.generation && it.rescued.is_none() && it.state != Some(State::Error)
            };
            let overtaken = later(|verb| matches!(verb, ActionVerb::Rescue | ActionVerb::Delete));
            match first(&is_so).map_or_else(|| or_failed(overtaken), |place| (Fate::Done, Some(place))) {
                // It came before the rescue was begun: there was nothing to end, and nothing to tell.
                (Fate::Pending, _) if seen >= action.generation => (Fate::Done, None),
                fate => fate,
            }
        }
        ActionVerb::Delete => match first(&|it| it.state.is_none()) {
            Some(place) => (Fate::Done, Some(place)),
            None => or_failed(false),
        },
        ActionVerb::Unknown => (Fate::Unknown, None),
        verb => match first(&|it| it.state.is_some() && it.power_generation >= action.generation) {
            // It did not run any more when its agent came to that: nothing of it was kept.
            Some(place)
                if matches!(verb, ActionVerb::Pause | ActionVerb::Suspend)
                    && all[place].1.power_generation == action.generation
                    && all[place].1.state == Some(State::Stopped) =>
            {
                (Fate::Failed, Some(place))
            }
            Some(place) if all[place].1.power_generation == action.generation => (Fate::Done, Some(place)),
            Some(_) => failed_by_itself().unwrap_or((Fate::Overtaken, None)),
            None => failed_by_itself()
                .unwrap_or_else(|| or_failed(later(|verb| is_of_power(verb) || verb == ActionVerb::Delete))),
        },
    }
}

/// Which wish of that kind came to its end last, and why it failed, where it did.
fn carried_out(verb: ActionVerb, outcome: &Outcome) -> Option<(Timestamp, Option<String>)> {
    match verb {
        ActionVerb::Rebuild => outcome.rebuilt.as_ref().map(|it| (it.wished_at, it.failed.clone())),
        ActionVerb::Rescue => outcome.rescued.as_ref().map(|it| (it.wished_at, it.failed.clone())),
        ActionVerb::Resize | ActionVerb::RevertResize => {
            outcome.resized.as_ref().map(|it| (it.wished_at, it.failed.clone()))
        }
        _ => None,
    }
}

fn is_of_power(verb: ActionVerb) -> bool {
    use ActionVerb::{Pause, Reboot, Resume, Start, Stop, Suspend, Unpause};
    matches!(verb, Start | Stop | Reboot | Pause | Unpause | Suspend | Resume)
}

#[cfg(test)]
mod tests {
    use ec_model::{InstanceId, Rebuilt};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn node() -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(7))
    }

    fn asked(second: i64, verb: ActionVerb, generation: u64) -> Action {
        let (user, project) = ("ann".to_owned(), "p".to_owned());
        let request_id = Some(RequestId::new(uuid::Uuid::from_u128(u128::from(generation))));
        let (at_once, volume, at, asked_at, detail) = (false, None, at(second), None, None);
        Action {
            at,
            asked_at,
            verb,
            detail,
            user,
            project,
            node: node(),
            generation,
            at_once,
            volume,
            request_id,
        }
    }

    fn came(second: i64, state: Option<State>, generation: u64, power_generation: u64) -> Outcome {
        let (reason, rebuilt, rescued, resized) = (None, None, None, None);
        let (at, restarts) = (at(second), 0);
        let volumes = None;
        Outcome {
            at,
            state,
            reason,
            generation,
            power_generation,
            rebuilt,
            rescued,
            resized,
            restarts,
            volumes,
        }
    }

    fn history(actions: Vec<Action>, outcomes: Vec<Outcome>) -> Vec<Happening> {
        seen(actions, outcomes, &[])
    }

    fn seen(actions: Vec<Action>, outcomes: Vec<Outcome>, statuses: &[Status]) -> Vec<Happening> {
        let instance = InstanceId::new(uuid::Uuid::from_u128(1));
        told(&Actions { instance, actions }, &[Outcomes { instance, node: node(), outcomes }], statuses)
    }

    /// Of generation 3.
    fn status(state: State, power_generation: u64) -> Status {
        let text = format!(
            r#"{{"version": 1, "instance": "{0}", "node": "{0}", "state": "{state}", "observed_generation": 3,
            "power_generation": {power_generation}, "since": "1970-01-01T00:00:00Z",
            "updated_at": "1970-01-01T00:00:09Z"}}"#,
            uuid::Uuid::nil()
        );
        ec_model::decode::<Status>(text.as_bytes()).unwrap()
    }

    /// Second, verb, outcome, state, second of the end.
    type Row = (i64, Option<ActionVerb>, Option<Fate>, Option<State>, Option<i64>);

    fn rows(told: &[Happening]) -> Vec<Row> {
        let second = |at: Timestamp| at.as_second();
        told.iter()
            .map(|it| (second(it.at), it.verb, it.outcome, it.state, it.finished_at.map(second)))
            .collect()
    }

    #[test]
    fn a_volume_is_moved_when_its_new_node_tells_so() {
        let there = NodeId::new(uuid::Uuid::from_u128(8));
        let moved =
            |second, generation, node| Action { node, ..asked(second, ActionVerb::Migrate, generation) };
        let instance = InstanceId::new(uuid::Uuid::from_u128(1));
        let fates = |actions: &[Action], of: NodeId, outcome: Outcome| -> Vec<Fate> {
            let outcomes = [Outcomes { instance, node: of, outcomes: vec![outcome] }];
            let told = told(&Actions { instance, actions: actions.to_vec() }, &outcomes, &[]);
            told.iter().filter(|it| it.verb.is_some()).filter_map(|it| it.outcome).collect()
        };
        let active = |generation| came(9, Some(State::Active), generation, 0);
        let once = [moved(3, 2, there)];
        for (of, outcome, fate) in [
            (there, active(2), Fate::Done),
            (there, active(5), Fate::Done),
            (there, active(1), Fate::Pending),
            (node(), active(2), Fate::Pending),
            (there, came(9, Some(State::Stopped), 2, 0), Fate::Pending),
            (there, came(9, Some(State::Error), 2, 0), Fate::Failed),
        ] {
            assert_eq!(fates(&once, of, outcome.clone()), [fate], "{of} {outcome:?}");
        }
        let back = [moved(3, 2, there), moved(4, 3, node())];
        assert_eq!(fates(&back, node(), active(1)), [Fate::Overtaken, Fate::Pending]);
        let gone = [moved(3, 2, there), asked(4, ActionVerb::Delete, 3)];
        assert_eq!(fates(&gone, node(), active(1)), [Fate::Overtaken, Fate::Pending]);
        let stays = [moved(3, 2, there), asked(4, ActionVerb::Rename, 3)];
        assert_eq!(fates(&stays, node(), active(1))[0], Fate::Pending);
    }

    /// Of the volumes that a status or an outcome may tell of.
    fn disk(number: u128) -> InstanceId {
        InstanceId::new(uuid::Uuid::from_u128(number))
    }

    fn of_volume(second: i64, verb: ActionVerb, generation: u64, number: u128) -> Action {
        Action { volume: Some(disk(number)), ..asked(second, verb, generation) }
    }

    /// Of generation 3, with these volumes.
    fn having(volumes: &[u128], changing: bool, failed: Option<&str>) -> Status {
        let has = |number: &u128| ec_model::Attachment { volume: disk(*number), device: "vdb".into() };
        Status {
            volumes: volumes.iter().map(has).collect(),
            volumes_changing: changing,
            volumes_failed: failed.map(str::to_owned),
            node: node(),
            ..status(State::Active, 1)
        }
    }

    #[test]
    fn a_volume_is_attached_when_its_agent_says_so_and_failed_for_as_long_as_that_says_why() {
        use ActionVerb::{AttachVolume, Delete, DetachVolume};
        let fates = |actions: Vec<Action>, outcomes: Vec<Outcome>, statuses: &[Status]| {
            let told: Vec<Happening> = seen(actions, outcomes, statuses);
            told.into_iter().filter_map(|it| Some((it.outcome?, it.reason))).collect::<Vec<_>>()
        };
        let plain = |fate: Fate| vec![(fate, None)];
        let wish = |generation| vec![of_volume(8, AttachVolume, generation, 7)];
        // Nothing is told of it yet, or of an earlier generation, or it is about it.
        assert_eq!(fates(wish(2), vec![], &[]), plain(Fate::Pending));
        assert_eq!(fates(wish(4), vec![], &[having(&[7], false, None)]), plain(Fate::Pending));
        assert_eq!(fates(wish(3), vec![], &[having(&[7], true, None)]), plain(Fate::Pending));
        assert_eq!(fates(wish(3), vec![], &[having(&[], false, None)]), plain(Fate::Pending));
        assert_eq!(fates(wish(3), vec![], &[having(&[7], false, None)]), plain(Fate::Done));
        let broken = having(&[7], false, Some("it does not let go"));
        let failed = vec![(Fate::Failed, Some("it does not let go".to_owned()))];
        assert_eq!(fates(wish(3), vec![], std::slice::from_ref(&broken)), failed);
        let away = vec![of_volume(8, DetachVolume, 3, 7)];
        assert_eq!(fates(away.clone(), vec![], &[broken]), failed);
        assert_eq!(fates(away.clone(), vec![], &[having(&[7], false, None)]), plain(Fate::Pending));
        assert_eq!(fates(away, vec![], &[having(&[8], false, None)]), plain(Fate::Done));
        // What was so once is told by the list, whatever came after.
        let so = |second, generation, volumes: &[u128]| {
            let volumes = Some(volumes.iter().map(|number| disk(*number)).collect());
            Outcome { volumes, ..came(second, Some(State::Active), generation, 0) }
        };
        let both = || vec![of_volume(8, AttachVolume, 2, 7), of_volume(10, DetachVolume, 3, 7)];
        let fate = |outcomes, statuses: &[Status]| {
            fates(both(), outcomes, statuses).into_iter().map(|(fate, _)| fate).collect::<Vec<_>>()
        };
        assert_eq!(fate(vec![so(9, 2, &[7]), so(11, 3, &[])], &[]), [Fate::Done, Fate::Done]);
        assert_eq!(fate(vec![so(11, 3, &[])], &[]), [Fate::Overtaken, Fate::Done]);
        assert_eq!(fate(vec![], &[having(&[], false, None)]), [Fate::Unknown, Fate::Done]);
        let ended = vec![of_volume(8, AttachVolume, 2, 7), asked(10, Delete, 3)];
        assert_eq!(fates(ended, vec![so(11, 3, &[7])], &[])[0].0, Fate::Overtaken);
        // One of an older release says of which volume in words alone.
        let older = || vec![asked(8, AttachVolume, 3)];
        assert_eq!(fates(older(), vec![], &[having(&[7], false, None)]), plain(Fate::Done));
        assert_eq!(fates(older(), vec![], &[having(&[7], true, None)]), plain(Fate::Unknown));
    }

    #[test]
    fn what_was_set_is_done_once_its_agent_acts_by_it_and_labels_at_once() {
        use ActionVerb::Set;
        let done = |action, statuses: &[Status]| {
            let told = seen(vec![action], vec![came(5, Some(State::Active), 1, 0)], statuses);
            let set = told.into_iter().find(|it| it.verb == Some(Set)).unwrap();
            (set.outcome.unwrap(), set.finished_at)
        };
        let labels = Action { at_once: true, ..asked(8, Set, 4) };
        assert_eq!(done(labels, &[]), (Fate::Done, Some(at(8))));
        assert_eq!(done(asked(8, Set, 4), &[status(State::Active, 1)]), (Fate::Pending, None));
        assert_eq!(done(asked(8, Set, 3), &[status(State::Active, 1)]), (Fate::Done, None));
        assert_eq!(done(asked(8, Set, 1), &[]), (Fate::Done, None));
        // Its node was forgotten, whose agent never heard of either.
        let fates = |actions| {
            let told = seen(actions, vec![came(5, Some(State::Active), 1, 0), came(20, None, 3, 0)], &[]);
            told.into_iter().filter_map(|it| Some((it.verb?, it.outcome?))).collect::<Vec<_>>()
        };
        let delete = || asked(10, ActionVerb::Delete, 5);
        assert!(fates(vec![asked(8, Set, 4), delete()]).starts_with(&[(Set, Fate::Overtaken)]));
        // Brought back since; or something else was asked for.
        assert!(fates(vec![delete(), asked(20, Set, 9)]).ends_with(&[(Set, Fate::Pending)]));
        assert!(
            fates(vec![asked(8, Set, 4), asked(20, ActionVerb::Stop, 9)])
                .starts_with(&[(Set, Fate::Pending)])
        );
        assert!(fates(vec![asked(8, Set, 3), delete()]).starts_with(&[(Set, Fate::Done)]));
    }

    #[test]
    fn which_volumes_it_has_is_noted_when_they_are_so_and_is_no_event_by_itself() {
        let told = |old: Option<&Status>, new: &Status| noted(old, new).map(|it| it.volumes);
        let (none, has) = (having(&[], false, None), having(&[7], false, None));
        let (changing, failed) = (having(&[7], true, None), having(&[7], false, Some("no")));
        assert_eq!(told(None, &none), Some(Some(Vec::new())));
        assert_eq!((told(Some(&none), &changing), told(Some(&none), &none)), (None, None));
        assert_eq!(told(Some(&changing), &has), Some(Some(vec![disk(7)])));
        assert_eq!((told(Some(&has), &has), told(Some(&changing), &failed)), (None, None));
        assert_eq!(told(Some(&changing), &none), Some(Some(Vec::new())));
        let so = Outcome { volumes: Some(vec![disk(7)]), ..came(9, Some(State::Active), 2, 0) };
        let outcomes = vec![came(5, Some(State::Active), 1, 0), so, came(20, Some(State::Stopped), 2, 0)];
        let told = history(vec![asked(1, ActionVerb::Create, 1)], outcomes);
        assert_eq!(told.iter().map(|it| it.at).collect::<Vec<_>>(), [at(1), at(20)]);
    }

    #[test]
    fn by_a_clock_that_was_wrong_what_was_asked_for_keeps_its_order_and_later_things_their_time() {
        let rebuild = |wish, by_its_clock: Option<i64>, generation| Action {
            asked_at: by_its_clock.map(at),
            ..asked(wish, ActionVerb::Rebuild, generation)
        };
        let actions = vec![
            asked(5, ActionVerb::Create, 1),
            // An hour ahead, and then two that are not.
            rebuild(3610, None, 2),
            rebuild(3611, Some(20), 3),
            rebuild(3612, Some(30), 4),
        ];
        let told = history(actions, Vec::new());
        assert_eq!(told.iter().map(|it| it.at).collect::<Vec<_>>(), [at(5), at(3610), at(20), at(30)]);
        // An hour behind.
        let told =
            history(vec![asked(5000, ActionVerb::Create, 1), asked(1400, ActionVerb::Lock, 2)], Vec::new());
        assert_eq!(
            told.iter().map(|it| it.verb).collect::<Vec<_>>(),
            [Some(ActionVerb::Create), Some(ActionVerb::Lock)]
        );
    }

    #[test]
    fn a_wish_is_told_with_the_id_of_its_command_and_what_came_by_itself_with_none() {
        let told = history(
            vec![asked(1, ActionVerb::Create, 1)],
            vec![came(2, Some(State::Active), 1, 1), came(9, Some(State::Stopped), 1, 1)],
        );
        let id = Some(RequestId::new(uuid::Uuid::from_u128(1)));
        assert_eq!(told.iter().map(|it| it.request_id).collect::<Vec<_>>(), [id, None]);
    }

    #[test]
    fn each_wish_is_told_with_what_came_of_it_and_what_came_by_itself_stands_between() {
        use ActionVerb::{Create, Delete, Lock, Start, Stop};
        let told = history(
            vec![
                asked(1, Create, 1),
                asked(10, Stop, 2),
                asked(11, Start, 3),
                asked(20, Lock, 4),
                asked(50, Stop, 5),
                asked(60, Delete, 6),
            ],
            vec![
                came(5, Some(State::Active), 1, 0),
                came(15, Some(State::Active), 3, 3),
                Outcome { restarts: 1, ..came(30, Some(State::Active), 4, 3) },
                came(70, None, 6, 3),
            ],
        );
        let (done, active) = (Some(Fate::Done), Some(State::Active));
        let expected: Vec<Row> = vec![
            (1, Some(Create), done, active, Some(5)),
            (10, Some(Stop), Some(Fate::Overtaken), None, None),
            (11, Some(Start), done, active, Some(15)),
            (20, Some(Lock), done, None, Some(20)),
            (30, None, None, active, Some(30)),
            (50, Some(Stop), Some(Fate::Overtaken), None, None),
            (60, Some(Delete), done, None, Some(70)),
        ];
        assert_eq!(rows(&told), expected);
        assert_eq!(told[4].detail.as_deref(), Some("restart 1"));
        assert_eq!((told[4].user.as_deref(), told[1].user.as_deref()), (None, Some("ann")));
    }

    #[test]
    fn what_is_not_done_yet_is_pending_and_what_failed_says_why() {
        use ActionVerb::{Create, Pause, Rebuild, Start, Stop, Suspend, Unknown};
        let of = |actions, outcomes| {
            let told: Vec<Happening> = history(actions, outcomes);
            told.into_iter().filter_map(|it| Some((it.outcome?, it.reason))).collect::<Vec<_>>()
        };
        let failed = |second, generation| {
            let reason = Some("broken".to_owned());
            Outcome { reason, ..came(second, Some(State::Error), generation, 0) }
        };
        let broken = (Fate::Failed, Some("broken".to_owned()));
        assert_eq!(of(vec![asked(1, Create, 1)], vec![]), [(Fate::Pending, None)]);
        assert_eq!(of(vec![asked(1, Create, 1)], vec![failed(2, 1)]), std::slice::from_ref(&broken));
        // The wish for power came before it ever was up.
        let later = came(9, Some(State::Active), 4, 4);
        let both = || vec![asked(1, Create, 1), asked(8, Start, 4)];
        assert_eq!(of(both(), vec![later.clone()]), [(Fate::Done, None), (Fate::Done, None)]);
        // Its outcome is not kept any more.
        assert_eq!(of(both(), vec![later.clone(); HISTORY_MAX])[0].0, Fate::Unknown);
        assert_eq!(of(both(), vec![came(2, Some(State::Active), 1, 0); HISTORY_MAX])[0].0, Fate::Done);
        assert_eq!(of(vec![asked(8, Stop, 3)], vec![later.clone()])[0], (Fate::Overtaken, None));
        assert_eq!(of(vec![asked(8, Stop, 5)], vec![failed(9, 5)]), std::slice::from_ref(&broken));
        // It was tried, and failed: what was wished afterwards, and what came of that, changes nothing of it.
        let then = || vec![asked(8, Start, 5), asked(10, Stop, 6), asked(11, Start, 7)];
        let [first, second] = [failed(9, 5), came(12, Some(State::Active), 7, 7)];
        let fates = of(then(), vec![first.clone(), second.clone()]);
        assert_eq!(fates[0], broken);
        assert_eq!((fates[1].0, fates[2].0), (Fate::Overtaken, Fate::Done));
        assert_eq!(of(then(), vec![first])[0], broken);
        assert_eq!(
            of(then(), vec![failed(12, 7), second.clone()])[0].0,
            Fate::Overtaken,
            "that is of the last"
        );
        // What is set meanwhile is nothing that is wished of its power; its end is.
        let between = |verb| vec![asked(8, Start, 5), asked(9, verb, 6), asked(11, Start, 7)];
        let fate = |verb| of(between(verb), vec![failed(10, 6), second.clone()])[0].0;
        assert_eq!((fate(ActionVerb::Set), fate(ActionVerb::Delete)), (Fate::Failed, Fate::Overtaken));
        // What is to be halted and has ended is not halted; one that was halted and ended later was.
        for verb in [Pause, Suspend] {
            let fate = |state, power| of(vec![asked(8, verb, 5)], vec![came(9, Some(state), 5, power)])[0].0;
            assert_eq!(fate(State::Stopped, 5), Fate::Failed, "{verb:?}");
            assert_eq!(fate(State::Stopped, 6), Fate::Overtaken, "{verb:?}");
            assert_eq!(fate(State::Paused, 5), Fate::Done, "{verb:?}");
            let trimmed = vec![came(9, Some(State::Stopped), 6, 5); HISTORY_MAX];
            assert_eq!(of(vec![asked(8, verb, 5)], trimmed)[0].0, Fate::Unknown, "{verb:?}");
        }
        assert_eq!(of(vec![asked(8, Start, 5)], vec![came(9, Some(State::Stopped), 5, 5)])[0].0, Fate::Done);
        assert_eq!(of(vec![asked(8, Unknown, 5)], vec![failed(1, 3)])[0].0, Fate::Unknown);
        let rebuilt = |second: i64, failed: Option<&str>| {
            let failed = failed.map(str::to_owned);
            Outcome {
                rebuilt: Some(Rebuilt { wished_at: at(second), failed }),
                generation: 6,
                ..later.clone()
            }
        };
        let wish = || vec![asked(20, Rebuild, 5)];
        assert_eq!(of(wish(), vec![rebuilt(20, None)]), [(Fate::Done, None)]);
        assert_eq!(
            of(wish(), vec![rebuilt(20, Some("no image"))]),
            [(Fate::Failed, Some("no image".into()))]
        );
        assert_eq!(of(wish(), vec![rebuilt(21, None)])[0].0, Fate::Overtaken);
        assert_eq!(of(wish(), vec![rebuilt(19, None)])[0].0, Fate::Pending);
    }

    #[test]
    fn what_its_agent_knows_and_leaves_in_error_has_failed_though_nothing_new_came_of_it() {
        let gone = Outcome { reason: Some("its disk is gone".into()), ..came(2, Some(State::Error), 2, 0) };
        let of = |verb, state, observed_generation| {
            let reason = gone.reason.clone();
            let now = Status { node: node(), reason, observed_generation, ..status(state, 0) };
            let told = seen(vec![asked(8, verb, 3)], vec![gone.clone()], &[now]);
            let asked = told.into_iter().find(|it| it.outcome.is_some()).unwrap();
            (asked.outcome.unwrap(), asked.reason, asked.finished_at)
        };
        let failed = (Fate::Failed, gone.reason.clone(), None);
        assert_eq!(of(ActionVerb::Start, State::Error, 3), failed);
        assert_eq!(of(ActionVerb::Reboot, State::Error, 4), failed);
        // Not known yet, on its way, or told by what came of it.
        let pending = (Fate::Pending, None, None);
        assert_eq!(of(ActionVerb::Start, State::Error, 2), pending);
        assert_eq!(of(ActionVerb::Start, State::Starting, 3), pending);
        assert_eq!(of(ActionVerb::Rebuild, State::Error, 3), pending);
    }

    #[test]
    fn an_outcome_that_is_kept_is_not_told_of_what_was_asked_for_before_the_others_went() {
        let actions = || {
            vec![
                asked(1, ActionVerb::Create, 1),
                asked(3, ActionVerb::Stop, 2),
                asked(5, ActionVerb::Start, 3),
            ]
        };
        let all = vec![
            came(2, Some(State::Active), 1, 0),
            came(4, Some(State::Stopped), 2, 2),
            came(6, Some(State::Active), 3, 3),
        ];
        let fates = |outcomes| {
            let told = history(actions(), outcomes);
            let of_users = told.into_iter().filter(|happening| happening.verb.is_some());
            of_users.map(|happening| (happening.outcome.unwrap(), happening.state)).collect::<Vec<_>>()
        };
        let known = vec![
            (Fate::Done, Some(State::Active)),
            (Fate::Done, Some(State::Stopped)),
            (Fate::Done, Some(State::Active)),
        ];
        assert_eq!(fates(all.clone()), known);
        for (state, first) in [(State::Paused, (Fate::Unknown, None)), (State::Error, (Fate::Unknown, None))]
        {
            let later = vec![came(9, Some(state), 3, 3); HISTORY_MAX];
            let nobody_knows = (Fate::Unknown, None);
            assert_eq!(fates(later.clone()), [first, nobody_knows, nobody_knows], "{state}");
            // The first that is kept may be of one that was asked for in that moment.
            let at_once = vec![came(5, Some(state), 3, 3); HISTORY_MAX];
            assert_eq!(fates(at_once), [first, nobody_knows, (Fate::Done, Some(state))], "{state}");
            // One less, and all that ever came is kept.
            let mut kept = all.clone();
            kept.extend(later.into_iter().take(HISTORY_MAX - 4));
            assert_eq!(fates(kept), known, "{state}");
        }
    }

    #[test]
    fn what_was_carried_out_and_is_kept_no_more_is_not_told_to_have_been_overtaken() {
        let volume = InstanceId::new(uuid::Uuid::from_u128(8));
        let with = |action: Action| Action { volume: Some(volume), ..action };
        let actions = || {
            vec![
                asked(1, ActionVerb::Rescue, 1),
                asked(2, ActionVerb::Unrescue, 2),
                asked(3, ActionVerb::Rebuild, 3),
                with(asked(4, ActionVerb::AttachVolume, 4)),
                with(asked(5, ActionVerb::DetachVolume, 5)),
                asked(6, ActionVerb::Rebuild, 6),
            ]
        };
        let rebuilt = Some(Rebuilt { wished_at: at(6), failed: None });
        let later = Outcome { rebuilt, volumes: Some(vec![]), ..came(7, Some(State::Active), 6, 0) };
        for (many, first) in [(HISTORY_MAX, Fate::Unknown), (1, Fate::Overtaken)] {
            let told = history(actions(), vec![later.clone(); many]);
            let fates: Vec<_> = told.into_iter().filter_map(|happening| happening.outcome).collect();
            let unrescued = if many == 1 { Fate::Done } else { Fate::Unknown };
            assert_eq!(fates, [first, unrescued, first, first, Fate::Done, Fate::Done], "{many}");
        }
    }

    #[test]
    fn a_wish_by_a_clock_that_went_back_is_told_by_what_came_of_it() {
        let rescue = |second, generation, rescued: Option<i64>| {
            let rescued = rescued.map(|second| ec_model::Rescued { wished_at: at(second), failed: None });
            Outcome { rescued, ..came(second, Some(State::Rescued), generation, 0) }
        };
        let actions = vec![asked(50, ActionVerb::Rescue, 1), asked(40, ActionVerb::Rescue, 3)];
        let outcomes = [rescue(51, 1, Some(50)), rescue(52, 2, None), rescue(53, 3, Some(40))];
        for (many, second) in [(2, Fate::Pending), (3, Fate::Done)] {
            let told = history(actions.clone(), outcomes[..many].to_vec());
            let mut fates: Vec<_> = told.into_iter().filter_map(|it| Some((it.at, it.outcome?))).collect();
            fates.sort_by_key(|(at, _)| *at);
            assert_eq!(fates, [(at(40), second), (at(50), Fate::Done)]);
        }
    }

    #[test]
    fn what_came_of_actions_that_are_kept_no_more_is_not_told_as_having_come_by_itself() {
        let last = i64::try_from(HISTORY_MAX).unwrap();
        let actions = |many| (0..many).map(|n| asked(100 + n, ActionVerb::Set, 9)).collect::<Vec<_>>();
        let outcomes = vec![came(99, Some(State::Stopped), 8, 8), came(100, Some(State::Active), 9, 9)];
        let by_itself = |many| {
            let told = history(actions(many), outcomes.clone());
            told.iter().filter(|it| it.verb.is_none()).map(|it| it.at).collect::<Vec<_>>()
        };
        assert_eq!(by_itself(last - 1), [at(99), at(100)]);
        assert_eq!(by_itself(last), [at(100)]);
    }

    #[test]
    fn a_resize_and_its_revert_are_told_by_their_time_and_a_confirm_is_done_at_once() {
        use ActionVerb::{ConfirmResize, Delete, Resize, RevertResize, Stop};
        let resized = |second: i64, failed: Option<&str>| {
            let (wished_at, failed) = (at(second), failed.map(str::to_owned));
            let resized = ec_model::Resized { wished_at, failed, resources: ec_model::Resources::new() };
            Outcome { resized: Some(resized), ..came(second + 1, Some(State::Active), 5, 1) }
        };
        let fates = |actions, outcomes| -> Vec<Fate> {
            history(actions, outcomes).into_iter().filter_map(|it| it.outcome).collect()
        };
        for verb in [Resize, RevertResize] {
            let wish = || vec![asked(20, verb, 5)];
            assert_eq!(fates(wish(), vec![resized(20, None)]), [Fate::Done]);
            assert_eq!(fates(wish(), vec![resized(20, Some("no room"))]), [Fate::Failed]);
            assert_eq!(fates(wish(), vec![resized(21, None)]), [Fate::Overtaken]);
            assert_eq!(fates(wish(), vec![resized(19, None)]), [Fate::Pending]);
            for (next, fate) in [(Resize, Fate::Overtaken), (Delete, Fate::Overtaken), (Stop, Fate::Pending)]
            {
                assert_eq!(fates(vec![asked(20, verb, 5), asked(30, next, 6)], vec![])[0], fate, "{next}");
            }
        }
        let told = history(vec![asked(20, Resize, 5)], vec![resized(20, Some("no room"))]);
        assert_eq!(told[0].reason.as_deref(), Some("no room"));
        assert_eq!(fates(vec![asked(20, ConfirmResize, 5)], vec![]), [Fate::Done]);
    }

    #[test]
    fn a_rescue_is_told_by_its_disk_and_its_end_by_there_being_none() {
        use ActionVerb::{Rescue, Unrescue};
        let fates = |actions, outcomes| {
            let told: Vec<Happening> = history(actions, outcomes);
            told.into_iter().filter_map(|it| it.outcome).collect::<Vec<_>>()
        };
        let rescued = |second: i64, generation, failed: Option<&str>| {
            let failed = failed.map(str::to_owned);
            let rescued = Some(ec_model::Rescued { wished_at: at(second), failed });
            Outcome { rescued, ..came(second + 1, Some(State::Rescued), generation, 0) }
        };
        let active = |generation| came(50, Some(State::Active), generation, 0);
        let wish = || vec![asked(20, Rescue, 5)];
        let both = || vec![asked(20, Rescue, 5), asked(30, Unrescue, 6)];
        assert_eq!(fates(wish(), vec![active(4)]), [Fate::Pending]);
        assert_eq!(fates(wish(), vec![rescued(20, 5, None)]), [Fate::Done]);
        assert_eq!(fates(wish(), vec![rescued(20, 5, Some("no image"))]), [Fate::Failed]);
        assert_eq!(fates(wish(), vec![rescued(21, 6, None)]), [Fate::Overtaken]);
        assert_eq!(fates(both(), vec![rescued(20, 5, None)]), [Fate::Done, Fate::Pending]);
        assert_eq!(fates(both(), vec![rescued(20, 5, None), active(6)]), [Fate::Done, Fate::Done]);
        assert_eq!(fates(both(), vec![active(6)]), [Fate::Overtaken, Fate::Done]);
        let broken = came(50, Some(State::Error), 6, 0);
        assert_eq!(fates(both(), vec![rescued(20, 5, None), broken])[1], Fate::Failed);
    }

    #[test]
    fn an_unrescue_before_the_rescue_is_done_as_soon_as_its_agent_has_seen_it() {
        use ActionVerb::{Rescue, Unrescue};
        let fates = |generation, state| -> Vec<(Fate, Option<Timestamp>)> {
            let both = vec![asked(20, Rescue, 2), asked(30, Unrescue, generation)];
            let told = seen(both, vec![came(5, Some(State::Active), 1, 0)], &[status(state, 1)]);
            told.into_iter().filter_map(|it| Some((it.outcome?, it.finished_at))).collect()
        };
        let overtaken = (Fate::Overtaken, None);
        assert_eq!(fates(3, State::Active), [overtaken, (Fate::Done, Some(at(30)))]);
        assert_eq!(fates(3, State::Rescuing), [overtaken, (Fate::Pending, None)]);
        assert_eq!(fates(4, State::Active), [overtaken, (Fate::Pending, None)]);
    }

    #[test]
    fn only_what_is_settled_and_new_is_noted() {
        let (starting, active) = (status(State::Starting, 1), status(State::Active, 1));
        assert_eq!(noted(None, &starting), None);
        assert_eq!(noted(None, &status(State::Scheduled, 1)), None);
        let noted_so = Outcome { volumes: Some(Vec::new()), ..came(9, Some(State::Active), 3, 1) };
        assert_eq!(noted(Some(&starting), &active), Some(noted_so));
        let touched = Status { updated_at: at(10), observed_generation: 4, ..active.clone() };
        assert_eq!(noted(Some(&active), &touched), None);
        assert_eq!(noted(Some(&active), &status(State::Active, 3)).unwrap().power_generation, 3);
        assert!(noted(Some(&active), &Status { reason: Some("x".into()), ..active.clone() }).is_some());
        let gone = ended(Some(&active), at(20));
        assert_eq!((gone.state, gone.generation, gone.at), (None, 3, at(20)));
    }
}
