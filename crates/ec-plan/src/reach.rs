//! Whether there is anything to look at of an instance, or to reach, with a sentence where there is not.
//!
//! Locked or not: to look at a guest does nothing to it.

use std::net::IpAddr;

use ec_model::{AccessKind, Desired, InstanceId, Request, State, Status, Workload};

use crate::volumes::there;

/// Whether this of an instance can be looked at, of which control has this request, and whose agent tells this.
///
/// # Errors
/// It cannot; in these words.
pub fn look(kind: AccessKind, request: &Request, status: Option<&Status>) -> Result<(), String> {
    if kind == AccessKind::Disk {
        return disk(request, status);
    }
    let state = ran(request, status)?.state;
    match (kind, state) {
        // Whatever becomes of a guest, what it printed stays.
        (AccessKind::Log, _) => Ok(()),
        (_, State::Stopped) => {
            Err("it is stopped; `eschedule start` starts it, `eschedule logs` shows what it printed"
                .to_owned())
        }
        (_, State::Suspended) => Err("it is suspended; `eschedule resume` lets it go on".to_owned()),
        _ => Ok(()),
    }
}

/// Whether the file of a volume can be read; whether somebody has it, or it stands on an image, its node looks.
fn disk(request: &Request, status: Option<&Status>) -> Result<(), String> {
    match (request.kind, request.desired) {
        (Workload::Machine, _) => Err("it is an instance, and no volume".to_owned()),
        (Workload::Volume, Desired::Destroyed) => Err("it is being deleted".to_owned()),
        (Workload::Volume, _) => there(status),
    }
}

/// Where an instance is to be reached over the network.
///
/// # Errors
/// It cannot be; in these words.
pub fn address(request: &Request, status: Option<&Status>) -> Result<IpAddr, String> {
    let status = ran(request, status)?;
    match (status.state, status.ip) {
        (State::Stopped, _) if status.is_rescued() => {
            Err("its rescue disk's guest ended; `eschedule unrescue` boots it from its own disk again"
                .to_owned())
        }
        (State::Stopped, _) => Err("it is stopped; `eschedule start` starts it".to_owned()),
        (State::Suspended, _) => Err("it is suspended; `eschedule resume` lets it go on".to_owned()),
        (State::Paused, _) => Err("it is paused; `eschedule unpause` lets it go on".to_owned()),
        (_, None) => Err("it has no address yet; `eschedule show` tells why".to_owned()),
        (_, Some(ip)) => Ok(ip),
    }
}

/// As whose the key of its guest is remembered: its own, until it has another disk or boots from one, since that has a key of its
/// own. `root` is what is told of the volume that it boots from, where it does.
///
/// Of a new disk that failed it is another name, too: which disk was made before that is told no more, so that the key would be
/// taken for that of the first.
pub fn key_of(instance: InstanceId, status: Option<&Status>, root: Option<&Status>) -> String {
    let rescued = status.filter(|status| status.is_rescued()).and_then(|status| status.rescued.as_ref());
    if let Some(rescued) = rescued {
        return format!("{instance}-rescue-{}", rescued.wished_at.as_millisecond());
    }
    let made = [status, root].into_iter().flatten().filter_map(|status| status.rebuilt.as_ref());
    match made.map(|made| made.wished_at).max() {
        Some(made) => format!("{instance}-rebuilt-{}", made.as_millisecond()),
        None => instance.to_string(),
    }
}

/// What is told of one that ran, and is wanted.
fn ran<'a>(request: &Request, status: Option<&'a Status>) -> Result<&'a Status, String> {
    if request.kind == Workload::Volume {
        return Err("it is a volume, and no guest".to_owned());
    }
    let status = match status {
        _ if request.desired == Desired::Destroyed => None,
        Some(status) if status.state == State::Destroying => None,
        // Its agent has not begun.
        None => return Err("it is being built, and there is nothing of it yet".to_owned()),
        told => told,
    };
    match status {
        None => Err("it is being destroyed".to_owned()),
        Some(status) if status.started_at.is_some() => Ok(status),
        Some(status) if status.state == State::Error => {
            Err("it is in ERROR and never ran: `eschedule show` tells why".to_owned())
        }
        Some(_) => Err("it is being built, and there is nothing of it yet".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    fn request(desired: Desired) -> Request {
        let text = r#"{"version":1,"instance":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab","epoch":1,"generation":1,
                       "desired":"active","created_at":"1970-01-01T00:00:00Z"}"#;
        Request { desired, ..ec_model::decode(text.as_bytes()).unwrap() }
    }

    fn told(state: State, started: bool, ip: Option<&str>) -> Status {
        let text = r#"{"version":1,"instance":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab","node":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
                       "state":"ACTIVE","since":"1970-01-01T00:00:00Z","updated_at":"1970-01-01T00:00:00Z"}"#;
        Status {
            state,
            started_at: started.then_some(Timestamp::UNIX_EPOCH),
            ip: ip.map(|ip| ip.parse().unwrap()),
            ..ec_model::decode(text.as_bytes()).unwrap()
        }
    }

    #[test]
    fn a_guests_key_is_that_of_the_disk_that_it_boots_from() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let plain = told(State::Active, true, None);
        let id = plain.instance;
        let rebuilt = |second, failed: Option<&str>| Status {
            rebuilt: Some(ec_model::Rebuilt { wished_at: at(second), failed: failed.map(str::to_owned) }),
            ..plain.clone()
        };
        let rescued = |failed: Option<&str>| Status {
            rescued: Some(ec_model::Rescued { wished_at: at(9), failed: failed.map(str::to_owned) }),
            ..rebuilt(1, None)
        };
        let root = rebuilt(5, None);
        for (status, root, name) in [
            (None, None, id.to_string()),
            (Some(&plain), None, id.to_string()),
            (Some(&rebuilt(1, None)), None, format!("{id}-rebuilt-1000")),
            // Neither that of the disk before, which may have been rebuilt itself.
            (Some(&rebuilt(2, Some("no such image"))), None, format!("{id}-rebuilt-2000")),
            (Some(&rescued(None)), None, format!("{id}-rescue-9000")),
            (Some(&rescued(Some("no such image"))), None, format!("{id}-rebuilt-1000")),
            (Some(&plain), Some(&root), format!("{id}-rebuilt-5000")),
            (Some(&plain), Some(&plain), id.to_string()),
        ] {
            assert_eq!(key_of(id, status, root), name);
        }
    }

    #[test]
    fn a_volume_is_neither_looked_at_nor_reached() {
        let volume = Request { kind: Workload::Volume, ..request(Desired::Active) };
        let told = told(State::Active, true, Some("10.0.0.1"));
        assert!(look(AccessKind::Log, &volume, Some(&told)).unwrap_err().contains("a volume"));
        assert!(address(&volume, Some(&told)).unwrap_err().contains("a volume"));
    }

    #[test]
    fn a_disk_is_read_of_a_volume_that_is_there_alone() {
        let volume = |desired| Request { kind: Workload::Volume, ..request(desired) };
        let of = |request: &Request, status: Option<&Status>| look(AccessKind::Disk, request, status);
        let (there, error) = (told(State::Active, true, None), told(State::Error, true, None));
        assert_eq!(of(&volume(Desired::Active), Some(&there)), Ok(()));
        assert!(of(&volume(Desired::Active), Some(&error)).unwrap_err().contains("ERROR"));
        assert!(of(&volume(Desired::Active), None).unwrap_err().contains("about to be made"));
        assert!(of(&volume(Desired::Destroyed), Some(&there)).unwrap_err().contains("being deleted"));
        assert!(of(&request(Desired::Active), Some(&there)).unwrap_err().contains("an instance"));
    }

    #[test]
    fn what_never_ran_or_is_to_go_shows_nothing_and_what_ran_its_log_and_what_is_up_its_console() {
        let (active, destroyed) = (request(Desired::Active), request(Desired::Destroyed));
        for kind in [AccessKind::Console, AccessKind::Log, AccessKind::Vnc] {
            let refused = |request, status: Option<Status>| look(kind, request, status.as_ref()).unwrap_err();
            assert!(refused(&active, None).contains("being built"));
            for state in [State::Scheduled, State::Preparing, State::Starting] {
                assert!(refused(&active, Some(told(state, false, None))).contains("being built"), "{state}");
            }
            assert!(refused(&active, Some(told(State::Error, false, None))).contains("never ran"));
            assert!(refused(&destroyed, Some(told(State::Active, true, None))).contains("being destroyed"));
            assert!(refused(&destroyed, None).contains("being destroyed"));
            assert!(refused(&active, Some(told(State::Destroying, true, None))).contains("being destroyed"));
            // Up, or perhaps: its agent tells.
            for state in [
                State::Starting,
                State::Active,
                State::Paused,
                State::Stopping,
                State::Rebooting,
                State::Suspending,
                State::Error,
                State::Unclaimed,
                State::Unknown,
            ] {
                assert_eq!(look(kind, &active, Some(&told(state, true, None))), Ok(()), "{state}");
            }
        }
        for (state, hint) in [(State::Stopped, "eschedule start"), (State::Suspended, "eschedule resume")] {
            let status = told(state, true, None);
            assert_eq!(look(AccessKind::Log, &active, Some(&status)), Ok(()));
            assert!(look(AccessKind::Console, &active, Some(&status)).unwrap_err().contains(hint));
        }
    }

    #[test]
    fn a_guest_is_reached_where_it_is_up_and_has_an_address() {
        let active = request(Desired::Active);
        let of = |state, started, ip| address(&active, Some(&told(state, started, ip)));
        assert_eq!(of(State::Active, true, Some("10.0.0.7")), Ok("10.0.0.7".parse().unwrap()));
        assert_eq!(of(State::Rescued, true, Some("10.0.0.7")), Ok("10.0.0.7".parse().unwrap()));
        let rescued = ec_model::Rescued { wished_at: Timestamp::UNIX_EPOCH, failed: None };
        let ended = Status { rescued: Some(rescued), ..told(State::Stopped, true, Some("10.0.0.7")) };
        assert!(address(&active, Some(&ended)).unwrap_err().contains("eschedule unrescue"));
        assert_eq!(of(State::Error, true, Some("10.0.0.7")), Ok("10.0.0.7".parse().unwrap()));
        for (state, started, ip, why) in [
            (State::Starting, true, None, "no address yet"),
            (State::Preparing, false, None, "being built"),
            (State::Stopped, true, Some("10.0.0.7"), "eschedule start"),
            (State::Suspended, true, Some("10.0.0.7"), "eschedule resume"),
            (State::Paused, true, Some("10.0.0.7"), "eschedule unpause"),
        ] {
            let refused = of(state, started, ip).unwrap_err();
            assert!(refused.contains(why), "{state}: {refused}");
        }
    }
}
