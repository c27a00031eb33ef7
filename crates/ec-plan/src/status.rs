//! How a status becomes the next one. Pure: who writes it brings the time.

use ec_model::{Address, InstanceId, NodeId, Progress, State, Status};
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
    /// Epoch and generation of its request, where there is one.
    pub order: Option<(u64, u64)>,
    /// Why its plan is what it is.
    pub why: String,
}

/// What was known, in this state, now. The one place where a status is made.
fn next(subject: &Subject, old: Option<&Status>, state: State, now: Timestamp) -> Status {
    let known = old.map_or((0, 0), |old| (old.epoch, old.observed_generation));
    let (epoch, observed_generation) = subject.order.unwrap_or(known);
    let under_way = matches!(state, State::Preparing | State::Starting | State::Destroying);
    Status {
        instance: subject.instance,
        node: subject.node,
        epoch,
        observed_generation,
        state,
        reason: None,
        doing: under_way.then(|| subject.why.clone()),
        progress: None,
        ip: old.and_then(|old| old.ip),
        addresses: old.map(|old| old.addresses.clone()).unwrap_or_default(),
        name: subject.name.clone().or_else(|| old.and_then(|old| old.name.clone())),
        console: None,
        since: old.filter(|old| old.state == state).map_or(now, |old| old.since),
        started_at: old.and_then(|old| old.started_at),
        updated_at: now,
    }
}

/// What is tried again and fails again is told once.
pub fn is_told(old: Option<&Status>, state: State, reason: Option<&str>) -> bool {
    state == State::Error && old.is_some_and(|old| old.state == state && old.reason.as_deref() == reason)
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
    Status { reason, ..next(subject, old, state, now) }
}

/// How far a preparation is; nothing where that is told already.
pub fn progressed(
    subject: &Subject,
    old: Option<&Status>,
    progress: Option<Progress>,
    now: Timestamp,
) -> Option<Status> {
    let news = progress.is_some() && old.is_none_or(|old| old.progress != progress);
    news.then(|| Status { progress, ..next(subject, old, State::Preparing, now) })
}

/// Its domain was started.
pub fn started(subject: &Subject, old: Option<&Status>, now: Timestamp) -> Status {
    let doing = Some(machine::LOOKS_FOR_ADDRESS.to_owned());
    Status { started_at: Some(now), doing, ..next(subject, old, State::Starting, now) }
}

/// It runs and has these addresses, which makes one that was requested ACTIVE.
pub fn addressed(subject: &Subject, old: Option<&Status>, addresses: Vec<Address>, now: Timestamp) -> Status {
    let status = match old {
        // It runs, and is no request's all the same.
        Some(old) if old.state == State::Unclaimed => {
            Status { reason: old.reason.clone(), ..next(subject, Some(old), State::Unclaimed, now) }
        }
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

/// Whoever waits is told what for: the state to tell and its reason, where they are not told yet.
pub fn delayed(old: &Status, why: &str) -> Option<(State, String)> {
    let reason = format!("{why}; trying again");
    let under_way = match old.state {
        State::Preparing | State::Destroying => true,
        // Of one that was started nothing is waited for but its guest: whoever reads a reason there gives it up.
        State::Starting => old.started_at.is_none(),
        _ => false,
    };
    (under_way && old.reason.as_ref() != Some(&reason)).then_some((old.state, reason))
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
            order: name.map(|_| (2, 3)),
            why: "building it".to_owned(),
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
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

    #[test]
    fn a_life_keeps_what_is_known_and_drops_what_was_of_a_moment() {
        let subject = subject(Some("web"));
        let preparing = announced(&subject, None, State::Preparing, None, at(10));
        let image = Progress { step: "image".to_owned(), done: 5, total: Some(10) };
        let told = progressed(&subject, Some(&preparing), Some(image.clone()), at(11)).unwrap();
        assert_eq!((told.state, told.since, told.updated_at), (State::Preparing, at(10), at(11)));
        assert_eq!(progressed(&subject, Some(&told), Some(image), at(12)), None, "told once");
        assert_eq!(progressed(&subject, Some(&told), None, at(12)), None);

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
        assert!(is_told(Some(&error), State::Error, Some("broken")));
        assert!(!is_told(Some(&error), State::Error, Some("broken otherwise")));
        assert!(
            !is_told(Some(&starting), State::Starting, None),
            "only errors: other states have news in them"
        );
        let left = ended_in_error(&subject, Some(&error), at(4));
        assert_eq!((left.reason, left.console, left.since), (error.reason, error.console, at(3)));
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
        let starting = announced(&subject, Some(&told), State::Starting, None, at(4));
        assert!(delayed(&starting, "libvirt is away").is_some());
        assert_eq!(delayed(&started(&subject, Some(&starting), at(5)), "placement is away"), None);
    }
}
