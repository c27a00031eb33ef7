//! How a status becomes the next one. Pure: who writes it brings the time.

use std::time::Duration;

use ec_model::{
    Access, AccessWish, Address, Attachment, Edition, InstanceId, NodeId, Power, Progress, Rebuilt, Request,
    Rescued, Resized, State, Status, Workload,
};
use jiff::Timestamp;

use crate::machine;

/// Whose status it is.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The instance.
    pub instance: InstanceId,
    /// The node that tells.
    pub node: NodeId,
    /// The guest's hostname as its request has it, where there is a request.
    pub name: Option<String>,
    /// What its request says, where there is one.
    pub order: Option<Order>,
    /// Of which request its node keeps a copy.
    pub kept: Option<Edition>,
    /// Why its plan is what it is.
    pub why: String,
}

/// What a status tells of the request that it is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// Of what kind of workload.
    pub kind: Workload,
    /// Its epoch.
    pub epoch: u64,
    /// Its generation.
    pub generation: u64,
    /// The generation of the wish for power in it.
    pub power_generation: u64,
    /// Whether that wishes it to run.
    pub runs: bool,
}

impl Order {
    /// Of a request.
    pub fn of(request: &Request) -> Self {
        Self {
            kind: request.kind,
            epoch: request.epoch,
            generation: request.generation,
            power_generation: request.power.generation,
            runs: request.power.power == Power::Running,
        }
    }
}

/// What was known, in this state, now. The one place where a status is made.
fn next(subject: &Subject, old: Option<&Status>, state: State, now: Timestamp) -> Status {
    let known = old.map_or((0, 0), |old| (old.epoch, old.observed_generation));
    let order = subject.order;
    // What no request speaks of is told with what its node knows of it.
    let known = match subject.kept {
        Some(kept) if state == State::Unclaimed => (kept.epoch, kept.generation),
        _ => known,
    };
    let (epoch, observed_generation) = order.map_or(known, |order| (order.epoch, order.generation));
    let under_way = is_under_way(state);
    // Of a guest that ran and whose status was lost nobody can tell any more what was carried out: it is told as it is.
    let carried_out = order.filter(|_| !under_way).map_or(0, |order| order.power_generation);
    Status {
        instance: subject.instance,
        kind: order.map(|order| order.kind).or(old.map(|old| old.kind)).unwrap_or_default(),
        node: subject.node,
        epoch,
        observed_generation,
        power_generation: old.map_or(carried_out, |old| old.power_generation),
        rebuilt: old.and_then(|old| old.rebuilt.clone()),
        rescued: old.and_then(|old| old.rescued.clone()),
        resized: old.and_then(|old| old.resized.clone()),
        restarts: old.map_or(0, |old| old.restarts),
        state,
        reason: None,
        doing: under_way.then(|| subject.why.clone()),
        progress: None,
        ip: old.and_then(|old| old.ip),
        addresses: old.map(|old| old.addresses.clone()).unwrap_or_default(),
        name: subject.name.clone().or_else(|| old.and_then(|old| old.name.clone())),
        volumes: old.map(|old| old.volumes.clone()).unwrap_or_default(),
        volumes_changing: old.is_some_and(|old| old.volumes_changing),
        volumes_failed: old.and_then(|old| old.volumes_failed.clone()),
        console: None,
        access: old.and_then(|old| old.access.clone()),
        since: old.filter(|old| old.state == state).map_or(now, |old| old.since),
        started_at: old.and_then(|old| old.started_at.or(ran_before(old, state))),
        updated_at: now,
    }
}

/// That a guest ran of which its node told by UNCLAIMED, and by no start, with an older etcd: ERROR alone would not tell that.
fn ran_before(old: &Status, state: State) -> Option<Timestamp> {
    (old.state == State::Unclaimed && state == State::Error).then_some(old.since)
}

/// Whether somebody waits for what comes next.
pub(crate) fn is_under_way(state: State) -> bool {
    matches!(
        state,
        State::Preparing
            | State::Starting
            | State::Stopping
            | State::Rebooting
            | State::Suspending
            | State::Rebuilding
            | State::Rescuing
            | State::Unrescuing
            | State::Resizing
            | State::Destroying
    )
}

/// What is tried again and fails again is told once; and once more of each request, for whoever waits for what comes of that.
pub fn is_told(subject: &Subject, old: Option<&Status>, state: State, reason: Option<&str>) -> bool {
    let is_of_it = |old: &Status| {
        let told = (old.epoch, old.observed_generation);
        subject.order.as_ref().is_none_or(|order| told == (order.epoch, order.generation))
    };
    let old = old.filter(|old| state == State::Error && is_of_it(old));
    old.is_some_and(|old| old.state == state && old.reason.as_deref() == reason)
}

/// Whether a guest's last words belong to what is told: they are what people need where it did not come up.
pub fn wants_console(old: Option<&Status>, state: State, reason: Option<&str>) -> bool {
    reason.is_some()
        && matches!(state, State::Starting | State::Stopped | State::Error)
        && old.is_some_and(|old| old.ip.is_none() && old.started_at.is_some())
}

/// This state is told, for this reason.
pub fn announced(
    subject: &Subject,
    old: Option<&Status>,
    state: State,
    reason: Option<String>,
    now: Timestamp,
) -> Status {
    let status = next(subject, old, state, now);
    // That a volume was there is what a start is to a guest: it is kept from then on, whatever else is lost of it.
    let is_there = status.kind == Workload::Volume && state == State::Active;
    let started_at = status.started_at.or(is_there.then_some(now));
    Status { reason, started_at, ..status }
}

/// In the first of these how far a long step is may be told at each look, and after them once in as many: each telling is a write
/// for each of all who wait for the same image, and people see whole percents.
const EAGERLY: Duration = Duration::from_secs(10);

/// When a long step began, and when was told how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// So long it takes by now.
    pub taken: Duration,
    /// So long ago it was told last.
    pub told: Duration,
}

/// Whether people see a difference between what was told of a step and how far it is now.
fn is_seen(told: &Progress, now: &Progress) -> bool {
    match (told.percent(), now.percent()) {
        (None, None) => now.done < told.done || now.done - told.done > told.done / 10,
        (told, now) => told != now,
    }
}

/// How far the preparation of a disk is; nothing where that is told already, or soon enough later. Another step is told at once.
pub fn progressed(
    subject: &Subject,
    old: Option<&Status>,
    progress: Option<Progress>,
    pace: Pace,
    now: Timestamp,
) -> Option<Status> {
    let is_due = pace.taken < EAGERLY || pace.told >= EAGERLY;
    let news = progress.as_ref().is_some_and(|progress| {
        let told = old.and_then(|old| old.progress.as_ref()).filter(|told| told.step == progress.step);
        told.is_none_or(|told| is_due && is_seen(told, progress))
    });
    let state = match old.map(|old| old.state) {
        Some(state @ (State::Rebuilding | State::Rescuing)) => state,
        _ => State::Preparing,
    };
    news.then(|| Status { progress, ..next(subject, old, state, now) })
}

/// Its domain was started: that carries out whatever wish for power there is that wants it to run.
pub fn started(subject: &Subject, old: Option<&Status>, now: Timestamp) -> Status {
    // From its rescue disk that is all that is wanted of it.
    let is_rescued = old.is_some_and(Status::is_rescued);
    let doing = (!is_rescued).then(|| machine::LOOKS_FOR_ADDRESS.to_owned());
    let state = if is_rescued { State::Rescued } else { State::Starting };
    let status = next(subject, old, state, now);
    let to_run = subject.order.filter(|order| order.runs || is_rescued);
    // The wish of one that was brought back has no number, and is carried out all the same.
    let power_generation = to_run.map_or(status.power_generation, |order| order.power_generation.max(1));
    // A user's wish begins the count of restarts anew; nothing told of the wish is what a restart leaves.
    let wished = old.is_some_and(|old| old.power_generation != 0 && old.power_generation != power_generation);
    let restarts = if wished { 0 } else { status.restarts };
    Status { started_at: Some(now), power_generation, restarts, doing, ..status }
}

/// The wish for its power was carried out, and this is how it is.
pub fn powered(
    subject: &Subject,
    old: Option<&Status>,
    state: State,
    reason: Option<String>,
    now: Timestamp,
) -> Status {
    let status = announced(subject, old, state, reason, now);
    let power_generation = subject.order.map_or(status.power_generation, |order| order.power_generation);
    Status { power_generation, restarts: 0, ..status }
}

/// Nobody wished its end, and it is to run again as its user wished before; by its restart policy the so manyth time in
/// a row.
pub fn reopened(subject: &Subject, old: Option<&Status>, restarts: u32, now: Timestamp) -> Status {
    Status { power_generation: 0, restarts, ..next(subject, old, State::Starting, now) }
}

/// The wish for a new disk has come to this end; how it stands besides is as it was.
pub fn rebuilt(subject: &Subject, old: Option<&Status>, rebuilt: Option<Rebuilt>, now: Timestamp) -> Status {
    let reason = old.and_then(|old| old.reason.clone());
    let state = old.map_or(State::Rebuilding, |old| old.state);
    Status { rebuilt, ..announced(subject, old, state, reason, now) }
}

/// The wish for a rescue disk has come to this, or is not in force any more; how it stands besides is as it was.
pub fn rescued(subject: &Subject, old: Option<&Status>, rescued: Option<Rescued>, now: Timestamp) -> Status {
    let reason = old.and_then(|old| old.reason.clone());
    let state = old.map_or(State::Rescuing, |old| old.state);
    Status { rescued, ..announced(subject, old, state, reason, now) }
}

/// The wish for another size has come to this end; how it stands besides is as it was.
pub fn resized(subject: &Subject, old: Option<&Status>, resized: Option<Resized>, now: Timestamp) -> Status {
    let reason = old.and_then(|old| old.reason.clone());
    let state = old.map_or(State::Resizing, |old| old.state);
    Status { resized, ..announced(subject, old, state, reason, now) }
}

/// What is to be told of its volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Volumes {
    /// It is being given what it is to have, and may have all of these meanwhile.
    Changing(Vec<Attachment>),
    /// It has these.
    Are(Vec<Attachment>),
    /// It may have all of these, and this is why it has not what it is to have.
    Failed(Vec<Attachment>, String),
}

/// Its volumes are so; how it stands besides is as it was.
pub fn with_volumes(subject: &Subject, old: &Status, volumes: Volumes, now: Timestamp) -> Status {
    let (volumes, volumes_changing, volumes_failed) = match volumes {
        Volumes::Changing(volumes) => (volumes, true, None),
        Volumes::Are(volumes) => (volumes, false, None),
        Volumes::Failed(volumes, why) => (volumes, false, Some(why)),
    };
    let status = announced(subject, Some(old), old.state, old.reason.clone(), now);
    // What they waited for is over with that.
    let doing = old.doing.clone().filter(|doing| volumes_changing || !doing.ends_with(AGAIN));
    Status { volumes, volumes_changing, volumes_failed, doing, ..status }
}

/// The wish to look at it that its status does not answer; none where there is no status that could.
pub fn looked_for(request: &Request, status: Option<&Status>) -> Option<AccessWish> {
    let answered = status?.access.as_ref().map(|access| access.generation);
    request.access.filter(|wish| answered != Some(wish.generation))
}

/// A wish to look at it was answered; all else is as it was.
pub fn admitted(old: &Status, access: Access, now: Timestamp) -> Status {
    Status { access: Some(access), updated_at: now, ..old.clone() }
}

/// It runs and has these addresses, which makes one that was requested ACTIVE, or RESCUED.
pub fn addressed(subject: &Subject, old: Option<&Status>, addresses: Vec<Address>, now: Timestamp) -> Status {
    let status = match old {
        // It runs, and is no request's all the same.
        Some(old) if old.state == State::Unclaimed => {
            Status { reason: old.reason.clone(), ..next(subject, Some(old), State::Unclaimed, now) }
        }
        Some(old) if old.is_rescued() => next(subject, Some(old), State::Rescued, now),
        old => next(subject, old, State::Active, now),
    };
    let first = addresses.iter().find(|address| address.nic == 0).or(addresses.first());
    Status { ip: first.map(|address| address.ip), addresses, ..status }
}

/// Its request goes, and the status stays for people to read.
pub fn ended_in_error(subject: &Subject, old: Option<&Status>, now: Timestamp) -> Status {
    Status {
        reason: old.and_then(|old| old.reason.clone()),
        console: old.and_then(|old| old.console.clone()),
        ..next(subject, old, State::Error, now)
    }
}

/// How it begins what is told of a guest that was asked to end so that it can be started from another disk: it stands in front of what
/// is in the way, since it has to be known as long as that guest is up.
pub(crate) const ASKED: &str = "its guest is asked to end";

/// How it ends what is told of what is in the way.
pub const AGAIN: &str = "; trying again";

/// What is told in the pause before a restart policy starts a guest again, in front of how long that is.
pub const STARTED_AGAIN: &str = "; it is started again in ";

/// Whether that is told: its restart policy has it run soon.
pub fn is_started_again(reason: Option<&str>) -> bool {
    reason.is_some_and(|reason| reason.contains(STARTED_AGAIN))
}

/// How it ends what is told of one whose disk is gone. Nothing of that runs: of a guest that goes on without its disk something else is told.
pub(crate) const WITHOUT_DISK: &str = "; the rest is kept until it is destroyed";

/// What is told of a snapshot of several disks some of which are there no more.
pub const NOT_WHOLE: &str =
    "one of its disks is gone: the others can be copied on (`eschedule volume restore`, `eschedule rebuild`)";

/// What is told besides of one that did not run when its disk was missed: it is left when that is there again.
pub const AND_STOPPED: &str = ", and it was stopped";

/// Whether its disk is gone, or that of the volume that it boots from, and nothing of it runs.
pub fn is_lost(status: &Status) -> bool {
    status.state == State::Error
        && status.reason.as_ref().is_some_and(|reason| reason.ends_with(WITHOUT_DISK))
}

/// What is to be told of what is in the way; nothing where nobody waits, or that is told already.
pub fn waiting(subject: &Subject, old: &Status, why: &str, now: Timestamp) -> Option<Status> {
    match delayed(old, why) {
        Some((state, reason)) => Some(announced(subject, Some(old), state, Some(reason), now)),
        None => held_up(subject, old, why, now),
    }
}

/// Whoever waits is told what for: the state to tell and its reason, where they are not told yet.
pub fn delayed(old: &Status, why: &str) -> Option<(State, String)> {
    let was_asked = old.reason.as_ref().is_some_and(|reason| reason.starts_with(ASKED));
    let reason = if was_asked { format!("{ASKED}: {why}{AGAIN}") } else { format!("{why}{AGAIN}") };
    let under_way = match old.state {
        State::Preparing
        | State::Stopping
        | State::Rebooting
        | State::Suspending
        | State::Rebuilding
        | State::Rescuing
        | State::Unrescuing
        | State::Resizing
        | State::Destroying => true,
        // Of one that was started nothing is waited for but its guest: whoever reads a reason there gives it up.
        State::Starting => old.started_at.is_none(),
        _ => false,
    };
    (under_way && old.reason.as_ref() != Some(&reason)).then_some((old.state, reason))
}

/// Whether [`waiting`] has something to tell of a request of this generation of which the status tells nothing yet.
pub(crate) fn is_news(old: &Status, generation: u64, why: &str) -> bool {
    let doing = format!("{why}{AGAIN}");
    let is_newer = generation > old.observed_generation;
    is_newer && delayed(old, why).is_none() && old.doing.as_ref() != Some(&doing)
}

/// What a newer wish, a start that was begun, or volumes that are being changed wait for while the state tells nothing of that; nothing
/// where that is told already. All else stays as it is told.
fn held_up(subject: &Subject, old: &Status, why: &str, now: Timestamp) -> Option<Status> {
    let is_newer = subject.order.is_some_and(|order| order.generation > old.observed_generation);
    let is_starting = old.state == State::Starting && old.started_at.is_some();
    let doing = Some(format!("{why}{AGAIN}"));
    ((is_newer || is_starting || old.volumes_changing) && old.doing != doing).then(|| Status {
        doing,
        updated_at: now,
        ..old.clone()
    })
}

/// What is known now replaces what was known of the same interface; interfaces of which nothing is
/// known now keep what they had. Of each interface the best comes first, as it was told.
pub fn merge(old: &[Address], new: Vec<Address>) -> Vec<Address> {
    let mut merged: Vec<_> =
        old.iter().filter(|address| new.iter().all(|fresh| fresh.nic != address.nic)).cloned().collect();
    merged.extend(new);
    merged.sort_by_key(|address| address.nic);
    merged
}

#[cfg(test)]
mod tests {
    use ec_model::{AddressSource, MacAddr};

    use super::*;

    fn subject(name: Option<&str>) -> Subject {
        Subject {
            instance: InstanceId::new(uuid::Uuid::from_u128(1)),
            node: NodeId::new(uuid::Uuid::from_u128(2)),
            name: name.map(str::to_owned),
            kept: None,
            order: name.map(|_| Order {
                kind: Workload::Machine,
                epoch: 2,
                generation: 3,
                power_generation: 1,
                runs: true,
            }),
            why: "building it".to_owned(),
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn what_is_waited_for_is_news_of_a_newer_request_until_it_is_told() {
        let old = |state, observed_generation, doing: Option<&str>| Status {
            observed_generation,
            doing: doing.map(str::to_owned),
            ..announced(&subject(None), None, state, None, at(1))
        };
        assert!(is_news(&old(State::Active, 2, None), 3, "why"));
        assert!(is_news(&old(State::Active, 2, Some("else")), 3, "why"));
        assert!(!is_news(&old(State::Active, 3, None), 3, "why"), "all was told");
        assert!(!is_news(&old(State::Active, 2, Some("why; trying again")), 3, "why"));
        assert!(!is_news(&old(State::Rebuilding, 2, None), 3, "why"), "its state has a reason for that");
    }

    #[test]
    fn only_of_a_volume_that_is_there_a_start_is_noted_when_its_state_is_told() {
        for kind in [Workload::Machine, Workload::Volume] {
            let mut subject = subject(Some("web"));
            subject.order = subject.order.map(|order| Order { kind, ..order });
            for state in [State::Active, State::Error] {
                let told = announced(&subject, None, state, None, at(7));
                let is_noted = kind == Workload::Volume && state == State::Active;
                assert_eq!(told.started_at, is_noted.then_some(at(7)), "{kind:?} {state}");
            }
        }
    }

    fn address(nic: u8, ip: &str) -> Address {
        Address {
            ip: ip.parse().unwrap(),
            mac: MacAddr([0x52, 0, 0, 0, 0, nic]),
            nic,
            source: AddressSource::Lease,
        }
    }

    #[test]
    fn a_new_address_replaces_the_old_one_of_its_interface_only() {
        let old = [address(0, "10.0.0.1"), address(1, "10.1.0.1")];
        assert_eq!(
            merge(&old, vec![address(0, "10.0.0.2")]),
            [address(0, "10.0.0.2"), address(1, "10.1.0.1")]
        );
        assert_eq!(merge(&old, vec![]), old);
    }

    const FIRST: Pace = Pace { taken: Duration::from_secs(1), told: Duration::from_secs(1) };

    #[test]
    fn how_far_a_download_is_is_told_where_people_see_a_difference_and_ever_more_seldom() {
        let subject = subject(Some("web"));
        let of = |step: &str, done, total| Some(Progress { step: step.to_owned(), done, total });
        let pace = |taken, told| Pace { taken: Duration::from_secs(taken), told: Duration::from_secs(told) };
        let old = Status {
            progress: of("image", 500, Some(1000)),
            ..announced(&subject, None, State::Preparing, None, at(1))
        };
        let is_told =
            |old: &Status, progress, pace| progressed(&subject, Some(old), progress, pace, at(2)).is_some();
        for (done, pace, told) in [
            (509, pace(1, 1), false),
            (510, pace(1, 1), true),
            (999, pace(10, 9), false),
            (510, pace(10, 10), true),
            (509, pace(3600, 3600), false),
            (300, pace(1, 1), true),
        ] {
            assert_eq!(is_told(&old, of("image", done, Some(1000)), pace), told, "{done} {pace:?}");
        }
        assert!(is_told(&old, of("waits for its turn", 500, Some(1000)), pace(60, 1)), "another step");
        let cleared = Status { progress: None, ..old.clone() };
        assert!(is_told(&cleared, of("image", 500, Some(1000)), pace(60, 1)), "nothing is told");
        let unknown = Status { progress: of("image", 1000, None), ..old };
        for (done, told) in [(1000, false), (1100, false), (1101, true), (900, true)] {
            assert_eq!(is_told(&unknown, of("image", done, None), FIRST), told, "{done}");
        }
    }

    #[test]
    fn a_life_keeps_what_is_known_and_drops_what_was_of_a_moment() {
        let subject = subject(Some("web"));
        let preparing = announced(&subject, None, State::Preparing, None, at(10));
        let image = Progress { step: "image".to_owned(), done: 5, total: Some(10) };
        let told = progressed(&subject, Some(&preparing), Some(image.clone()), FIRST, at(11)).unwrap();
        assert_eq!((told.state, told.since, told.updated_at), (State::Preparing, at(10), at(11)));
        assert_eq!(progressed(&subject, Some(&told), Some(image), FIRST, at(12)), None, "told once");
        assert_eq!(progressed(&subject, Some(&told), None, FIRST, at(12)), None);

        let starting = started(&subject, Some(&told), at(20));
        assert_eq!((starting.progress.clone(), starting.started_at), (None, Some(at(20))));
        assert_eq!(
            (told.doing.as_deref(), starting.doing.as_deref()),
            (Some("building it"), Some("the guest runs; looking for its address"))
        );
        let active = addressed(
            &subject,
            Some(&starting),
            vec![address(1, "10.1.0.1"), address(0, "10.0.0.1")],
            at(30),
        );
        assert_eq!((active.state, active.since, active.doing.clone()), (State::Active, at(30), None));
        assert_eq!(
            active.ip,
            Some("10.0.0.1".parse().unwrap()),
            "of the first interface, whatever the order"
        );
        let only = addressed(&subject, Some(&starting), vec![address(1, "10.1.0.1")], at(30));
        assert_eq!(only.ip, Some("10.1.0.1".parse().unwrap()));

        let stopped = announced(&subject, Some(&active), State::Stopped, Some("it ended".into()), at(40));
        assert_eq!(stopped.ip, active.ip, "what people may have noted stays");
        assert_eq!((stopped.started_at, stopped.name.as_deref()), (Some(at(20)), Some("web")));
    }

    #[test]
    fn without_a_request_the_name_is_the_one_known_and_an_unclaimed_guest_does_not_become_active() {
        let old = announced(&subject(Some("web")), None, State::Unclaimed, Some("no request".into()), at(1));
        let now = addressed(&subject(None), Some(&old), vec![address(0, "10.0.0.1")], at(2));
        assert_eq!((now.state, now.reason.as_deref()), (State::Unclaimed, Some("no request")));
        assert_eq!((now.name.as_deref(), now.since), (Some("web"), at(1)));
        assert_eq!((now.epoch, now.observed_generation), (2, 3), "of the request that there was");

        // Its node knows better what it was, and says so where nobody asks for it.
        let kept = Subject { kept: Some(Edition { epoch: 5, generation: 7 }), ..subject(None) };
        let told = |state| {
            let now = announced(&kept, Some(&old), state, None, at(3));
            (now.epoch, now.observed_generation)
        };
        assert_eq!((told(State::Unclaimed), told(State::Stopped)), ((5, 7), (2, 3)));
    }

    #[test]
    fn of_volumes_all_is_told_that_there_may_be_and_the_rest_stays_as_it_was() {
        let subject = subject(Some("web"));
        let old = Status { reason: Some("why".into()), ..started(&subject, None, at(1)) };
        let one = vec![Attachment { volume: subject.instance, device: "vdb".into() }];
        let told = |old: &Status, volumes| with_volumes(&subject, old, volumes, at(2));
        let changing = told(&old, Volumes::Changing(one.clone()));
        assert_eq!((changing.volumes.clone(), changing.volumes_changing), (one.clone(), true));
        assert_eq!((changing.state, changing.since), (old.state, old.since));
        assert_eq!(
            (changing.reason.clone(), changing.doing.clone()),
            (old.reason.clone(), old.doing.clone())
        );
        assert!(changing.doing.is_some() && changing.volumes_failed.is_none());
        // What they wait for is told with them, and no longer.
        let active = Status { state: State::Active, doing: None, ..changing.clone() };
        let waits = waiting(&subject, &active, "libvirt is away", at(3)).unwrap();
        assert_eq!(waits.doing.as_deref(), Some("libvirt is away; trying again"));
        assert_eq!(told(&waits, Volumes::Changing(one.clone())).doing, waits.doing);
        let are = told(&waits, Volumes::Are(one.clone()));
        assert_eq!((are.doing.clone(), waiting(&subject, &are, "libvirt is away", at(4))), (None, None));
        let failed = told(&changing, Volumes::Failed(one.clone(), "it does not let go".into()));
        assert_eq!(
            (failed.volumes.clone(), failed.volumes_changing, failed.volumes_failed.as_deref()),
            (one, false, Some("it does not let go"))
        );
        // Whatever else is told meanwhile.
        let later = announced(&subject, Some(&failed), State::Stopped, None, at(3));
        assert_eq!(
            (later.volumes.clone(), later.volumes_failed),
            (failed.volumes.clone(), failed.volumes_failed.clone())
        );
        assert!(announced(&subject, Some(&changing), State::Stopped, None, at(3)).volumes_changing);
        let are = told(&failed, Volumes::Are(Vec::new()));
        assert_eq!((are.volumes, are.volumes_changing, are.volumes_failed), (Vec::new(), false, None));
    }

    #[test]
    fn a_status_is_of_the_kind_that_its_request_is_or_its_last_was() {
        let order =
            Some(Order { kind: Workload::Volume, epoch: 1, generation: 1, power_generation: 0, runs: true });
        let volume = announced(&Subject { order, ..subject(None) }, None, State::Active, None, at(1));
        let told_again =
            announced(&Subject { order, ..subject(None) }, Some(&volume), State::Error, None, at(2));
        assert_eq!([volume.started_at, told_again.started_at], [Some(at(1)); 2], "it was there once");
        assert_eq!(volume.kind, Workload::Volume);
        assert_eq!(
            announced(&subject(None), Some(&volume), State::Error, None, at(2)).kind,
            Workload::Volume
        );
        assert_eq!(announced(&subject(None), None, State::Error, None, at(2)).kind, Workload::Machine);
    }

    #[test]
    fn an_error_is_told_once_and_goes_with_the_console_of_a_guest_that_did_not_come_up() {
        let subject = subject(None);
        let starting = started(&subject, None, at(1));
        assert!(wants_console(Some(&starting), State::Error, Some("broken")));
        assert!(!wants_console(Some(&starting), State::Error, None));
        assert!(!wants_console(None, State::Error, Some("broken")), "it was never started");
        let active = addressed(&subject, Some(&starting), vec![address(0, "10.0.0.1")], at(2));
        assert!(!wants_console(Some(&active), State::Stopped, Some("it ended")));

        let mut error = announced(&subject, Some(&starting), State::Error, Some("broken".into()), at(3));
        error.console = Some("panic".into());
        assert!(is_told(&subject, Some(&error), State::Error, Some("broken")));
        assert!(!is_told(&subject, Some(&error), State::Error, Some("broken otherwise")));
        assert!(
            !is_told(&subject, Some(&starting), State::Starting, None),
            "only errors: other states have news in them"
        );
        let of = |epoch, generation| Subject {
            order: Some(Order {
                kind: Workload::Machine,
                epoch,
                generation,
                power_generation: 0,
                runs: true,
            }),
            ..subject.clone()
        };
        let (epoch, generation) = (error.epoch, error.observed_generation);
        assert!(is_told(&of(epoch, generation), Some(&error), State::Error, Some("broken")));
        for (epoch, generation) in [(epoch, generation + 1), (epoch + 1, generation)] {
            let again = is_told(&of(epoch, generation), Some(&error), State::Error, Some("broken"));
            assert!(!again, "whoever asked for it waits for what comes of it");
        }
        let left = ended_in_error(&subject, Some(&error), at(4));
        assert_eq!((left.reason, left.console, left.since), (error.reason, error.console, at(3)));
    }

    #[test]
    fn a_wish_for_power_is_carried_out_by_what_tells_so() {
        let order = |power_generation, runs| Order {
            kind: Workload::Machine,
            epoch: 1,
            generation: 9,
            power_generation,
            runs,
        };
        let subject = |order| Subject { order, ..subject(None) };
        let wished = subject(Some(order(7, true)));
        let done = |status: &Status| (status.power_generation, status.restarts);

        let preparing = announced(&wished, None, State::Preparing, None, at(1));
        assert_eq!(done(&preparing), (0, 0), "nothing is yet");
        let up = started(&wished, Some(&preparing), at(2));
        assert_eq!(done(&up), (7, 0));
        let stopping = subject(Some(order(8, false)));
        assert_eq!(done(&started(&stopping, Some(&preparing), at(2))), (0, 0), "it was not to run");
        let told = announced(&stopping, Some(&up), State::Stopping, None, at(3));
        assert_eq!((done(&told), told.doing.as_deref()), ((7, 0), Some("building it")));
        let stopped = powered(&stopping, Some(&told), State::Stopped, Some("hard".into()), at(4));
        assert_eq!((done(&stopped), stopped.reason.as_deref()), ((8, 0), Some("hard")));
        assert_eq!(done(&powered(&subject(None), Some(&stopped), State::Stopped, None, at(4))), (8, 0));

        // Its policy starts it: the same wish, once more.
        let again = reopened(&wished, Some(&up), 3, at(5));
        assert_eq!((done(&again), again.state), ((0, 3), State::Starting));
        let up_again = started(&wished, Some(&again), at(6));
        assert_eq!(done(&up_again), (7, 3), "still in a row");
        let later = subject(Some(order(9, true)));
        assert_eq!(done(&started(&later, Some(&up_again), at(7))), (9, 0), "a user's wish begins anew");
        assert_eq!(done(&powered(&later, Some(&up_again), State::Active, None, at(7))), (9, 0));

        // Nobody knows any more what was carried out of what was lost.
        for (state, generation) in [(State::Stopped, 7), (State::Active, 7), (State::Starting, 0)] {
            assert_eq!(done(&announced(&wished, None, state, None, at(1))), (generation, 0), "{state}");
        }
        assert_eq!(done(&announced(&subject(None), None, State::Stopped, None, at(1))), (0, 0));
    }

    #[test]
    fn what_came_of_a_wish_for_a_new_disk_stands_beside_all_that_was_told() {
        let subject = subject(Some("web"));
        let active = announced(&subject, None, State::Active, Some("as before".into()), at(1));
        let came = |failed: Option<&str>| Rebuilt { wished_at: at(7), failed: failed.map(str::to_owned) };
        let told = rebuilt(&subject, Some(&active), Some(came(None)), at(2));
        assert_eq!((told.state, told.reason.clone(), told.since), (State::Active, active.reason, at(1)));
        assert_eq!(told.rebuilt, Some(came(None)));
        let later = announced(&subject, Some(&told), State::Stopped, None, at(3));
        assert_eq!(later.rebuilt, Some(came(None)), "until there is another");
        let failed = rebuilt(&subject, Some(&later), Some(came(Some("no image"))), at(4));
        assert_eq!((failed.rebuilt, failed.state), (Some(came(Some("no image"))), State::Stopped));
        assert_eq!(rebuilt(&subject, None, None, at(1)).state, State::Rebuilding);

        let rebuilding = announced(&subject, Some(&told), State::Rebuilding, None, at(5));
        assert_eq!(rebuilding.doing.as_deref(), Some("building it"));
        let image = Progress { step: "image".to_owned(), done: 5, total: Some(10) };
        let progress = progressed(&subject, Some(&rebuilding), Some(image), FIRST, at(6)).unwrap();
        assert_eq!(progress.state, State::Rebuilding, "it is not built for the first time");
    }

    #[test]
    fn who_boots_from_a_rescue_disk_is_told_to_be_rescued_with_or_without_an_address() {
        let subject = subject(Some("web"));
        let was = |failed: Option<&str>| Rescued { wished_at: at(7), failed: failed.map(str::to_owned) };
        let rescuing = announced(&subject, None, State::Rescuing, None, at(1));
        assert_eq!(rescuing.doing.as_deref(), Some("building it"));
        let image = Progress { step: "image".to_owned(), done: 5, total: Some(10) };
        let progress = progressed(&subject, Some(&rescuing), Some(image), FIRST, at(2)).unwrap();
        assert_eq!(progress.state, State::Rescuing, "it is not built for the first time");
        let told = rescued(&subject, Some(&rescuing), Some(was(None)), at(3));
        assert_eq!((told.state, told.rescued.clone()), (State::Rescuing, Some(was(None))));
        let up = started(&subject, Some(&told), at(4));
        assert_eq!((up.state, up.doing.clone(), up.started_at), (State::Rescued, None, Some(at(4))));
        // To one that its user had stopped it is done likewise, so that a row of restarts is told as one.
        let order =
            Order { kind: Workload::Machine, epoch: 1, generation: 9, power_generation: 8, runs: false };
        let stopped = Subject { order: Some(order), ..subject.clone() };
        let again = started(&stopped, Some(&reopened(&stopped, Some(&up), 3, at(4))), at(4));
        assert_eq!((again.state, again.power_generation, again.restarts), (State::Rescued, 8, 3));
        let found = addressed(&subject, Some(&up), vec![address(0, "10.0.0.1")], at(5));
        assert_eq!((found.state, found.ip), (State::Rescued, Some("10.0.0.1".parse().unwrap())));
        let left = rescued(&subject, Some(&found), None, at(6));
        assert_eq!((left.state, left.rescued.clone()), (State::Rescued, None), "how it stands is told next");
        assert_eq!(started(&subject, Some(&left), at(7)).state, State::Starting);
        let failed = rescued(&subject, Some(&rescuing), Some(was(Some("no image"))), at(3));
        assert_eq!(started(&subject, Some(&failed), at(4)).state, State::Starting, "from its own disk");
        assert_eq!(rescued(&subject, None, None, at(1)).state, State::Rescuing);
    }

    #[test]
    fn what_came_of_a_wish_for_another_size_stands_beside_all_that_was_told() {
        let subject = subject(Some("web"));
        let active = announced(&subject, None, State::Active, Some("as before".into()), at(1));
        let came = Resized { wished_at: at(7), failed: None, resources: ec_model::Resources::new() };
        let told = resized(&subject, Some(&active), Some(came.clone()), at(2));
        assert_eq!((told.state, told.reason.clone(), told.since), (State::Active, active.reason, at(1)));
        assert_eq!(told.resized, Some(came.clone()));
        let later = announced(&subject, Some(&told), State::Stopped, None, at(3));
        assert_eq!(later.resized, Some(came), "until there is another");
        assert_eq!(resized(&subject, None, None, at(1)).state, State::Resizing);
    }

    #[test]
    fn an_answer_to_a_wish_to_look_stands_beside_all_else_and_is_written_now() {
        let active = announced(&subject(Some("web")), None, State::Active, Some("as before".into()), at(1));
        let access = Access {
            kind: ec_model::AccessKind::Log,
            generation: 3,
            ticket: None,
            reason: Some("no".to_owned()),
            expires_at: at(9),
        };
        let told = admitted(&active, access.clone(), at(2));
        assert_eq!(told, Status { access: Some(access), updated_at: at(2), ..active });
    }

    #[test]
    fn a_delay_is_told_once_and_only_of_what_is_under_way() {
        let subject = subject(None);
        let preparing = announced(&subject, None, State::Preparing, None, at(1));
        let (state, reason) = delayed(&preparing, "no mirror").unwrap();
        assert_eq!((state, reason.as_str()), (State::Preparing, "no mirror; trying again"));
        let told = announced(&subject, Some(&preparing), state, Some(reason), at(2));
        assert_eq!(delayed(&told, "no mirror"), None);
        let stopped = announced(&subject, Some(&told), State::Stopped, None, at(3));
        assert_eq!(delayed(&stopped, "no mirror"), None);
        for state in [
            State::Stopping,
            State::Rebooting,
            State::Suspending,
            State::Rebuilding,
            State::Rescuing,
            State::Unrescuing,
            State::Resizing,
            State::Destroying,
        ] {
            let under_way = announced(&subject, Some(&stopped), state, None, at(4));
            assert!(delayed(&under_way, "libvirt is away").is_some(), "{state}");
            assert_eq!(under_way.doing.as_deref(), Some("building it"), "{state}");
        }
        // What a guest was asked is known as long as it is up.
        let asked = announced(&subject, None, State::Rescuing, Some(ASKED.to_owned()), at(4));
        let (_, reason) = delayed(&asked, "libvirt is away").unwrap();
        assert_eq!(reason, "its guest is asked to end: libvirt is away; trying again");
        let told = Status { reason: Some(reason.clone()), ..asked };
        assert_eq!(delayed(&told, "libvirt is away"), None);
        assert!(delayed(&told, "etcd is away").unwrap().1.starts_with(ASKED));
        let starting = announced(&subject, Some(&told), State::Starting, None, at(4));
        assert!(delayed(&starting, "libvirt is away").is_some());
        let up = started(&subject, Some(&starting), at(5));
        assert_eq!(delayed(&up, "placement is away"), None);
        let unclaimed = announced(&subject, None, State::Unclaimed, None, at(5));
        for (state, ran) in [(State::Error, Some(at(5))), (State::Stopped, None)] {
            assert_eq!(announced(&subject, Some(&unclaimed), state, None, at(6)).started_at, ran, "{state}");
        }
        assert_eq!(held_up(&subject, &starting, "libvirt is away", at(6)), None, "that is a reason");
        // Nobody takes that for its end.
        let told = waiting(&subject, &up, "it is being copied", at(6)).unwrap();
        assert_eq!(told.doing.as_deref(), Some("it is being copied; trying again"));
        assert_eq!((told.reason.clone(), told.state, told.updated_at), (None, State::Starting, at(6)));
        assert_eq!(held_up(&subject, &told, "it is being copied", at(7)), None, "it is told already");
        let order =
            Order { kind: Workload::Machine, epoch: 2, generation: 4, power_generation: 1, runs: true };
        let rests =
            announced(&Subject { order: Some(order), ..subject.clone() }, None, State::Active, None, at(1));
        for (generation, is_told) in [(3, false), (4, false), (5, true)] {
            let wished = Subject { order: Some(Order { generation, ..order }), ..subject.clone() };
            assert_eq!(
                held_up(&wished, &rests, "its disk is full", at(2)).is_some(),
                is_told,
                "{generation}"
            );
        }
    }
}
