//! What ever ran is kept: whatever is missing is made again or told, and nothing is deleted.

use std::{borrow::Cow, time::Duration};

use ec_model::{End, Pause, Power, Restart, RunState, State, Workload, mark_again};

use super::{
    Admit, Announce, Aspect, Claim, Define, DropSuccessor, KeepIntent, KeepRecord, LOOKS_FOR_ADDRESS,
    MarkStarted, Next, NoteStart, Persist, Plan, Problem, Question, RESUME_PERIOD, Reopen, Resume, Until,
    finish_start, first, is_up, known,
    power::{end_at_once, wish},
    rebuild::rebuild,
    rescue::rescue,
    resize::{resize, short},
    start, state,
    volumes::volumes,
};
use crate::{
    Allocation, Facts, Limits, RecordFacts,
    status::{AND_STOPPED, STARTED_AGAIN, WITHOUT_DISK, is_started_again},
};

/// Looking at a guest comes first: it stands on nothing, and is wished above all where something is wrong. The definition
/// comes before the disk: what somebody undefined while it runs is defined for good whatever else is wrong with it, and
/// nothing is defined on a disk that is gone. Its volumes come before it is started, and hold nothing up. So do the wishes for a new disk, which may replace one that is gone, for another
/// size, with which it is to start, for another to boot from, and for power: a guest can be ended without its disk.
/// A guest that is not to be asked is ended before all that may wait for it.
const ASPECTS: [Aspect; 13] = [
    access,
    record,
    intent,
    definition,
    end_at_once,
    volumes,
    rebuild,
    resize,
    rescue,
    wish,
    disk,
    power,
    ready,
];

/// The first pause before its policy starts a guest again, doubled each time in a row, and what it grows to.
const RESTART_FIRST: Duration = Duration::from_secs(1);
const RESTART_LONGEST: Duration = Duration::from_secs(300);
/// So often in a row a guest that fails is started again by [`Restart::OnFailure`].
const RESTARTS_MOST: u32 = 5;
/// One that ran so long was well, whatever became of it.
const RESTARTS_FORGOTTEN: Duration = Duration::from_secs(600);

pub(super) fn plan(facts: &Facts, limits: &Limits) -> Plan {
    keep(&ASPECTS, facts, limits)
}

/// The plan of the first aspect that is not as it shall be; last, where nothing else is to be done, what is in nobody's way.
pub(super) fn keep(aspects: &[Aspect], facts: &Facts, limits: &Limits) -> Plan {
    let plan = first(aspects, facts, limits);
    let at_rest =
        matches!(plan.next, Next::Settled | Next::Stuck(Problem::Told) | Next::Wait(Until::Address));
    match known(facts) {
        // Of a wish that was left out, or by a call that came late. Before what placement may have no room for.
        // Beside a volume that is gone it may be what is left of a snapshot of several disks.
        _ if at_rest && facts.observed.successor && !is_rest_of_volume(facts) => {
            Plan::run(vec![DropSuccessor], "sweeping a disk that was to take the place of its own")
        }
        // Last, since it is not in the guest's way: it is here all the same, and takes room.
        _ if at_rest && facts.allocation == Allocation::Absent => count(),
        _ if at_rest && let Some(short) = short(facts) => short,
        // What is asked for now changes nothing of how it is: whoever waits for it is told so.
        Some(status) if at_rest && status.generation < facts.generation => {
            let same = Announce(status.state, status.reason.clone());
            Plan::run(vec![same], "telling that what is asked for now was taken up")
        }
        _ => plan,
    }
}

/// Whether what is there in the place of a successor may be the rest of a volume that is missed.
fn is_rest_of_volume(facts: &Facts) -> bool {
    facts.kind == Workload::Volume && !facts.observed.volume
}

pub(super) fn count() -> Plan {
    Plan::run(vec![Claim], "placement forgot it; claiming what it takes")
}

/// Before a guest that runs is ended only to be started again: where placement has no room for it, it would stay ended.
pub(super) fn uncounted(facts: &Facts) -> Option<Plan> {
    let runs = facts.observed.domain == Some(RunState::Running);
    let is_ending = matches!(
        state(facts),
        Some(State::Stopping | State::Rebooting | State::Rebuilding | State::Rescuing | State::Resizing)
    );
    (runs && !is_ending && facts.allocation == Allocation::Absent).then(count)
}

pub(super) fn access(facts: &Facts, _: &Limits) -> Option<Plan> {
    let wish = facts.access?;
    Some(Plan::run(vec![Admit(wish)], "letting somebody look at it"))
}

/// The metadata service stands on it, and so does a wish for a new disk: of one that lost everything with its node's disks, too.
pub(super) fn record(facts: &Facts, _: &Limits) -> Option<Plan> {
    let is_here = facts.observed.domain.is_some() || facts.observed.volume;
    let is_to_be_made = facts.rebuild.told < facts.rebuild.wished;
    (facts.record == RecordFacts::Absent && (is_here || is_to_be_made))
        .then(|| Plan::run(vec![KeepRecord], "writing its record anew, which was gone from this node"))
}

/// The guest may ask for its metadata at any moment; and what is acted upon from here on is known to this node should etcd
/// lose it.
pub(super) fn intent(facts: &Facts, _: &Limits) -> Option<Plan> {
    let RecordFacts::Kept { metadata, intent, .. } = facts.record else { return None };
    ((metadata, intent) != (facts.metadata, facts.edition))
        .then(|| Plan::run(vec![KeepIntent], "writing down what is asked for"))
}

fn definition(facts: &Facts, _: &Limits) -> Option<Plan> {
    match facts.observed.domain {
        Some(RunState::Running | RunState::Paused(_)) if facts.observed.transient => Some(persist(facts)),
        None if facts.observed.volume => Some(redefine(facts)),
        _ => None,
    }
}

/// It is told, and then told that all is as it shall be: a word in its history.
fn persist(facts: &Facts) -> Plan {
    let reason = "somebody undefined it while it ran: its agent defines it for good again";
    let tells = state(facts).filter(|state| matches!(state, State::Active | State::Rescued));
    let word = tells.map(|state| Announce(state, Some(reason.to_owned())));
    Plan::run(word.into_iter().chain([Persist]).collect(), reason)
}

/// Defines a domain anew that libvirt does not know any more, as large as it was.
fn redefine(facts: &Facts) -> Plan {
    let reason =
        "its domain was gone from libvirt, and is defined again by its agent from what this node knows";
    match (facts.allocation, facts.record) {
        // It could not be before, and that is told until it can; or its new disk is there before it.
        (Allocation::Held { .. }, _) | (_, RecordFacts::Kept { .. })
            if matches!(state(facts), Some(State::Error | State::Rebuilding)) =>
        {
            Plan::run(vec![Define], "defining its domain again, which is gone from libvirt")
        }
        // Told first: of a domain that is there again, nobody could tell any more why it does not run.
        (Allocation::Held { .. }, _) | (_, RecordFacts::Kept { .. }) => {
            Plan::run(vec![Announce(State::Stopped, Some(reason.to_owned())), Define], reason)
        }
        (Allocation::Unknown, _) => Plan::ask(Question::Placement),
        (Allocation::Absent | Allocation::Elsewhere, _) => Plan::tell(
            facts,
            State::Error,
            "its domain is gone from libvirt, and neither placement nor this node knows how large it was; its disk is kept",
        ),
    }
}

fn disk(facts: &Facts, _: &Limits) -> Option<Plan> {
    if facts.observed.volume {
        return None;
    }
    if is_up(facts) {
        let reason =
            "its disk file was deleted under the running guest; what the guest writes is lost when it ends";
        return Some(Plan::tell(facts, State::Error, reason));
    }
    let stopped = if was_stopped(facts) { AND_STOPPED } else { "" };
    if facts.observed.foreign {
        let reason = format!(
            "its domain in libvirt does not carry this node's mark{stopped}, so that and its disk, which is there, are left alone: {}",
            mark_again("INSTANCE", "NODE")
        );
        return Some(Plan::tell(facts, State::Error, &reason));
    }
    let what = if facts.on_volume { "the disk of the volume that it boots from" } else { "its disk" };
    let reason = format!("{what} is gone{stopped}{WITHOUT_DISK}");
    Some(Plan::tell(facts, State::Error, &reason))
}

fn was_stopped(facts: &Facts) -> bool {
    known(facts).is_some_and(|status| {
        status.state == State::Stopped
            || status.reason.as_ref().is_some_and(|reason| reason.contains(AND_STOPPED))
    })
}

fn power(facts: &Facts, _: &Limits) -> Option<Plan> {
    match facts.observed.domain? {
        RunState::Running => None,
        RunState::Paused(why) => Some(paused(facts, why)),
        RunState::NotStarted => Some(not_started(facts)),
        // Nobody saw it come up: its hypervisor died while it was started, say, and took it along.
        RunState::Ended(why) if start_in_doubt(facts, why) => Some(start_again(facts)),
        RunState::Ended(why) => Some(ended(facts, why)),
        RunState::Saved => Some(saved(facts)),
    }
}

/// By its user's wish, or by somebody's hand: it goes on from there when it is resumed.
fn saved(facts: &Facts) -> Plan {
    match known(facts) {
        Some(status) if status.state == State::Suspended => Plan::told("its memory lies on the node's disk"),
        _ => Plan::tell(
            facts,
            State::Suspended,
            "somebody saved its memory to the node's disk, or the call of an older wish came late; `eschedule resume` lets it go on",
        ),
    }
}

fn not_started(facts: &Facts) -> Plan {
    match known(facts).map(|status| (status.state, status.start_noted)) {
        Some((State::Scheduled | State::Preparing | State::Starting, _)) => start_again(facts),
        // Its start failed, and nobody ever saw one work: tried again, with the reason told meanwhile.
        Some((State::Error, false)) => start_again(facts),
        // Its hypervisor, started anew in the pause before that, does not tell any more how it ended.
        Some((State::Stopped, _)) if is_to_restart(facts) => reopen(
            known(facts).map_or(0, |status| status.restarts.saturating_add(1)),
            "it ended before its host or its hypervisor was started anew; its restart policy starts it again",
        ),
        Some((State::Stopped, _)) => stopped(facts),
        Some((State::Suspended, _)) => forgotten(facts),
        // Its disk was missed, say, when it should have been, and is there again.
        Some((State::Active | State::Paused | State::Rescued | State::Error, _))
            if facts.power.wanted == Power::Running && !was_stopped(facts) =>
        {
            reopen(
                known(facts).map_or(0, |status| status.restarts),
                "it ran before its host or its hypervisor was started anew; starting it as it was wanted",
            )
        }
        _ => Plan::tell(facts, State::Stopped, "it does not run, perhaps since its host was started anew"),
    }
}

fn reopen(restarts: u32, why: impl Into<Cow<'static, str>>) -> Plan {
    Plan::run(vec![Reopen(restarts)], why)
}

/// Its reason, where it has one, is still the reason; but that its policy starts it again, once that was taken away.
fn stopped(facts: &Facts) -> Plan {
    let reason = known(facts).and_then(|status| status.reason.clone());
    if let Some((how, _)) = reason.as_deref().and_then(|reason| reason.split_once(STARTED_AGAIN)) {
        return Plan::tell(facts, State::Stopped, how);
    }
    Plan::told(reason.map_or("it does not run, as its status says".into(), Cow::from))
}

/// Whether a start was begun of which nobody wrote down that it worked; or that the hypervisor took back before the
/// guest was there.
fn start_in_doubt(facts: &Facts, why: End) -> bool {
    known(facts).is_some_and(|status| {
        status.state == State::Starting && (!status.start_noted || why == End::ByHypervisor)
    })
}

pub(super) fn start_again(facts: &Facts) -> Plan {
    match facts.allocation {
        // What failed last stands until it works. But that it was ended for a reboot is told first: should nobody hear that it
        // works, it would be ended for that once more.
        Allocation::Held { .. } if state(facts) == Some(State::Error) => {
            let is_rebooted = facts.power.pending && facts.power.anew;
            let told = is_rebooted.then_some(Reopen(0));
            let effects = told.into_iter().chain([MarkStarted, start(facts), NoteStart]).collect();
            Plan::run(effects, "starting it again, which failed")
        }
        Allocation::Held { .. } => finish_start(facts),
        Allocation::Unknown => Plan::ask(Question::Placement),
        Allocation::Absent => count(),
        Allocation::Elsewhere => Plan::tell(
            facts,
            if facts.observed.domain == Some(RunState::Saved) { State::Suspended } else { State::Stopped },
            "its allocation is on other resource providers, so it is not started here",
        ),
    }
}

fn paused(facts: &Facts, why: Pause) -> Plan {
    // By its user's wish, for whatever reason it would be besides.
    if facts.power.wanted == Power::Paused && state(facts) == Some(State::Paused) {
        return Plan::told("its user paused it");
    }
    let reason = match why {
        Pause::Storage { room: true } => match facts.resumed {
            // It ran into the same wall again.
            Some(ago) if ago < RESUME_PERIOD => {
                let rest = RESUME_PERIOD.saturating_sub(ago);
                return Plan::wait(
                    Until::After(rest),
                    "its disk had an I/O error again; a pause before the next try",
                );
            }
            _ => {
                let reason = "an I/O error on its disk; there is room again, it is let go on";
                // Told afterwards: an etcd that takes nothing, perhaps for want of space, too, holds no guest up.
                return Plan::run(vec![Resume, Announce(State::Paused, Some(reason.to_owned()))], reason);
            }
        },
        Pause::Storage { room: false } => {
            "no space on the host's disk; it goes on by itself when there is room"
        }
        Pause::ByHand => {
            "somebody suspended it on its host, or a pause of before came late; `eschedule unpause` lets it go on"
        }
        Pause::Crashed => "the guest's system crashed and is kept as it was",
        Pause::Other => "its hypervisor holds it, by a migration, a dump or a snapshot",
    };
    Plan::tell(facts, State::Paused, reason)
}

fn ended(facts: &Facts, why: End) -> Plan {
    if restarts(facts, why) {
        return restart(facts, why);
    }
    match state(facts) {
        Some(State::Stopped) => stopped(facts),
        Some(State::Suspended) => forgotten(facts),
        _ => Plan::tell(facts, State::Stopped, how(facts, why)),
    }
}

/// It was suspended, and cannot go on where it was.
pub(super) fn forgotten(facts: &Facts) -> Plan {
    Plan::tell(facts, State::Stopped, "its saved memory is gone: the next start boots it anew")
}

/// Whether its policy has it started again. What somebody ended by hand is left to them.
fn restarts(facts: &Facts, why: End) -> bool {
    let failed = matches!(why, End::Crashed | End::ByHypervisor);
    facts.power.wanted == Power::Running
        && match facts.power.restart {
            Restart::No => false,
            Restart::OnFailure => failed,
            Restart::Always => failed || matches!(why, End::ByGuest | End::Unknown),
        }
}

/// Whether it was told that its policy starts it again, and nobody wished otherwise since.
fn is_to_restart(facts: &Facts) -> bool {
    let told = known(facts).and_then(|status| status.reason.as_deref());
    facts.power.wanted == Power::Running && facts.power.restart != Restart::No && is_started_again(told)
}

/// Told, waited for, and started again; each time in a row later.
fn restart(facts: &Facts, why: End) -> Plan {
    let how = how(facts, why);
    let in_a_row = match known(facts) {
        Some(status) if facts.ran_for < RESTARTS_FORGOTTEN => status.restarts,
        _ => 0,
    };
    if facts.power.restart == Restart::OnFailure && in_a_row >= RESTARTS_MOST {
        let reason = format!(
            "{how}; it was started again {RESTARTS_MOST} times in a row, and is left now: `eschedule start` tries on"
        );
        return Plan::tell(facts, State::Stopped, &reason);
    }
    let pause = RESTART_FIRST.saturating_mul(1 << in_a_row.min(16)).min(RESTART_LONGEST);
    let reason = format!("{how}{STARTED_AGAIN}{} s", pause.as_secs());
    let told = Plan::tell(facts, State::Stopped, &reason);
    if told.next != Next::Stuck(Problem::Told) {
        return told;
    }
    match pause.checked_sub(facts.ended_for).filter(|rest| !rest.is_zero()) {
        Some(rest) => Plan { next: Next::Wait(Until::After(rest)), why: told.why },
        None => reopen(in_a_row.saturating_add(1), format!("{how}; its restart policy starts it again")),
    }
}

/// How it came to its end.
fn how(facts: &Facts, why: End) -> &'static str {
    let before_address = known(facts).is_some_and(|status| !status.has_address);
    match why {
        // libvirt tells both in the same way.
        End::Crashed => "the guest crashed (a kernel panic), or its process died",
        End::ByHypervisor => "libvirtd gave it up when it was started anew",
        End::ByHand => "somebody ended it",
        _ if before_address => "the guest ended before it had an address",
        End::ByGuest => "the guest powered itself off",
        End::Unknown => "it ended",
    }
}

/// What is told of one that is well besides.
const UNREAD: &str = "its node's record of it cannot be read, so it is given no metadata: mend the file in `instances` of the agent's state directory, or delete it, and it is written anew";

/// A guest that runs is ready when it has an address; one that runs from its rescue disk at once, since nobody knows
/// what that is to be.
fn ready(facts: &Facts, limits: &Limits) -> Option<Plan> {
    let Some(status) = known(facts).filter(|status| status.start_noted) else {
        return Some(Plan::run(
            vec![NoteStart],
            "noting its start: a crash came between the two, or its status was lost",
        ));
    };
    let waits = Plan::wait(Until::Address, LOOKS_FOR_ADDRESS);
    if facts.observed.rescued {
        let told = status.state == State::Rescued && status.reason.is_none();
        if !told {
            return Some(Plan::run(vec![Announce(State::Rescued, None)], "it runs from its rescue disk"));
        }
        return (!status.has_address).then_some(waits);
    }
    if status.has_address {
        let reason = (facts.record == RecordFacts::Unreadable).then_some(UNREAD);
        let told = status.state == State::Active && status.reason.as_deref() == reason;
        let announce = Announce(State::Active, reason.map(str::to_owned));
        return (!told).then(|| Plan::run(vec![announce], "it runs and has its address"));
    }
    if facts.searched < limits.address {
        return Some(match status.state {
            State::Starting => waits,
            _ => Plan::run(vec![Announce(State::Starting, None)], "it runs, and has no address yet"),
        });
    }
    let reason = format!(
        "the guest runs, but no address of it was seen in {} s: neither a lease, nor a neighbour, nor an answer of its agent",
        limits.address.as_secs()
    );
    let told = Plan::tell(facts, State::Starting, &reason);
    // Looked for on, all the same.
    Some(if told.next == Next::Stuck(Problem::Told) { Plan { why: told.why, ..waits } } else { told })
}
