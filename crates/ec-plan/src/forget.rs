//! Forgetting a node that will never come back: what of it may go, and what somebody wants still.
//!
//! Only its user ends an instance. What is decided here is whether that was done, of an instance whose node will never carry
//! it out; what may go is what the node's agent would have taken away with the instance.

use ec_model::{Desired, Handover, NodeId, Request, State, Status, Workload};

/// What lies under a key.
#[derive(Debug)]
pub enum Told<'a, R> {
    /// Nothing.
    Nothing,
    /// This.
    Here(&'a R),
    /// What a later release wrote, or what is damaged. Nobody touches it.
    Unreadable,
}

// Derived, it would be so only of records that are.
impl<R> Clone for Told<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Told<'_, R> {}

impl<'a, R> Told<'a, R> {
    fn here(self) -> Option<&'a R> {
        match self {
            Self::Here(record) => Some(record),
            Self::Nothing | Self::Unreadable => None,
        }
    }
}

/// The order that another node has about an instance.
#[derive(Debug, Clone, Copy)]
pub struct Elsewhere<'a> {
    /// Which node.
    pub node: NodeId,
    /// Whether its agent is alive.
    pub alive: bool,
    /// What it was asked for.
    pub request: Told<'a, Request>,
    /// What it tells.
    pub status: Told<'a, Status>,
}

/// What etcd tells of an instance on a node whose agent is gone.
#[derive(Debug, Clone, Copy)]
pub struct Left<'a> {
    /// Its request there.
    pub request: Told<'a, Request>,
    /// Its status there.
    pub status: Told<'a, Status>,
    /// Whether that status goes by itself: it hangs on a lease.
    pub passes: bool,
    /// Whether its record says that it is there; or cannot be read, and may say so.
    pub recorded: bool,
    /// Other nodes that have a request of it.
    pub elsewhere: &'a [Elsewhere<'a>],
}

/// What is to be done about an instance there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Its end was asked for, or it came to its end: all that lies there of it may go.
    Goes,
    /// It is to be there.
    Wanted,
    /// The node told of it, and nobody asks for it: neither that it be there, nor that it end.
    Unasked,
    /// It was on its way between the node and this one, which has not come to its end with it yet.
    Moving(NodeId),
    /// What is asked or told of it cannot be read.
    Unreadable,
}

/// Judges one.
pub fn judge(left: &Left<'_>) -> Verdict {
    if matches!(left.request, Told::Unreadable) || matches!(left.status, Told::Unreadable) {
        return Verdict::Unreadable;
    }
    let request = left.request.here();
    if let Some(request) = request.filter(|request| request.desired == Desired::Active && !left.recorded)
        && let Some(Handover::To(to)) = request.handover
    {
        // It has let go of the disk, whether it came to say so or not.
        let has = |status: &Status| status.state == State::Active && status.epoch > request.epoch;
        let has_come =
            left.elsewhere.iter().any(|other| other.node == to && other.status.here().is_some_and(has));
        return if has_come { Verdict::Goes } else { Verdict::Moving(to) };
    }
    if left.recorded || request.is_some_and(|request| request.desired == Desired::Active) {
        return Verdict::Wanted;
    }
    // Which of the two gives back what is claimed turns on who has the disk; a living one comes to its end by itself. Of two that
    // are both gone, the one that is forgotten last finds nobody else.
    let is_settled = |other: &&Elsewhere<'_>| {
        !other.alive && other.request.here().is_some_and(|of| of.desired == Desired::Destroyed)
    };
    if request.is_some_and(|request| request.handover.is_some())
        && let Some(other) = left.elsewhere.iter().find(|other| !is_settled(other))
    {
        return Verdict::Moving(other.node);
    }
    match (request, left.status.here()) {
        (None, Some(status)) if !(left.passes && status.state == State::Error) => Verdict::Unasked,
        _ => Verdict::Goes,
    }
}

/// What kind of workload it is, as far as anybody tells.
pub fn kind_of(left: &Left<'_>) -> Workload {
    let asked = left.request.here().map(|request| request.kind);
    asked.or(left.status.here().map(|status| status.kind)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const INSTANCE: &str = "00000000-0000-0000-0000-000000000001";
    const AT: &str = "2026-01-01T00:00:00Z";

    fn node(number: u128) -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(number))
    }

    fn request(desired: &str, handover: Option<Handover>) -> Request {
        let request = json!({
            "instance": INSTANCE, "epoch": 1, "generation": 1, "desired": desired, "created_at": AT, "handover": handover,
        });
        serde_json::from_value(request).unwrap()
    }

    fn status(state: State) -> Status {
        let of =
            json!({"instance": INSTANCE, "node": node(1), "state": state, "since": AT, "updated_at": AT});
        serde_json::from_value(of).unwrap()
    }

    fn left<'a>(request: Told<'a, Request>, status: Told<'a, Status>) -> Left<'a> {
        Left { request, status, passes: false, recorded: false, elsewhere: &[] }
    }

    #[test]
    fn only_what_its_user_ended_or_what_failed_and_passes_goes() {
        let (wanted, doomed) = (request("active", None), request("destroyed", None));
        let (wanted, doomed) = (Told::Here(&wanted), Told::Here(&doomed));
        let (active, failed) = (status(State::Active), status(State::Error));
        let (active, failed) = (Told::Here(&active), Told::Here(&failed));
        let unclaimed = status(State::Unclaimed);
        for (request, status, verdict) in [
            (doomed, active, Verdict::Goes),
            (doomed, Told::Nothing, Verdict::Goes),
            // What lies beside them, say user-data or what it held.
            (Told::Nothing, Told::Nothing, Verdict::Goes),
            (wanted, active, Verdict::Wanted),
            (wanted, Told::Nothing, Verdict::Wanted),
            (Told::Nothing, Told::Here(&unclaimed), Verdict::Unasked),
            (Told::Nothing, active, Verdict::Unasked),
            (Told::Nothing, failed, Verdict::Unasked),
            (Told::Unreadable, active, Verdict::Unreadable),
            (doomed, Told::Unreadable, Verdict::Unreadable),
        ] {
            assert_eq!(judge(&left(request, status)), verdict, "{request:?} {status:?}");
        }
        let passes = Left { passes: true, ..left(Told::Nothing, failed) };
        assert_eq!(judge(&passes), Verdict::Goes);
        assert_eq!(judge(&Left { passes: true, ..left(Told::Nothing, active) }), Verdict::Unasked);
        assert_eq!(judge(&Left { recorded: true, ..passes }), Verdict::Wanted);
        assert_eq!(judge(&Left { recorded: true, ..left(doomed, active) }), Verdict::Wanted);
    }

    #[test]
    fn its_kind_is_told_by_what_is_asked_for_or_else_by_what_is_told() {
        let (machine, volume) = (request("destroyed", None), status(State::Active));
        let volume = Status { kind: Workload::Volume, ..volume };
        let of = |request, status| kind_of(&left(request, status));
        assert_eq!(of(Told::Here(&machine), Told::Here(&volume)), Workload::Machine);
        assert_eq!(of(Told::Nothing, Told::Here(&volume)), Workload::Volume);
        let volume = Request { kind: Workload::Volume, ..machine.clone() };
        assert_eq!(of(Told::Here(&volume), Told::Nothing), Workload::Volume);
        assert_eq!(of(Told::Nothing, Told::Nothing), Workload::Machine);
    }

    #[test]
    fn what_was_on_its_way_is_left_until_the_other_node_is_done_with_it() {
        let ours = request("destroyed", Some(Handover::To(node(2))));
        let (theirs, kept) = (request("destroyed", Some(Handover::From(node(1)))), request("active", None));
        let of = |elsewhere: &[Elsewhere<'_>]| {
            judge(&Left { elsewhere, ..left(Told::Here(&ours), Told::Nothing) })
        };
        let other = |alive, request| [Elsewhere { node: node(2), alive, request, status: Told::Nothing }];
        assert_eq!(of(&[]), Verdict::Goes);
        assert_eq!(of(&other(true, Told::Here(&theirs))), Verdict::Moving(node(2)));
        assert_eq!(of(&other(false, Told::Here(&theirs))), Verdict::Goes, "neither ever comes to its end");
        assert_eq!(of(&other(false, Told::Here(&kept))), Verdict::Moving(node(2)));
        assert_eq!(of(&other(false, Told::Unreadable)), Verdict::Moving(node(2)));
        // It went, and the node was lost before it said so.
        let going = request("active", Some(Handover::To(node(2))));
        let has = Status { epoch: 2, ..status(State::Active) };
        for (has, recorded, verdict) in [
            (Told::Here(&has), false, Verdict::Goes),
            (Told::Here(&Status { epoch: 1, ..has.clone() }), false, Verdict::Moving(node(2))),
            (Told::Here(&Status { state: State::Preparing, ..has.clone() }), false, Verdict::Moving(node(2))),
            (Told::Nothing, false, Verdict::Moving(node(2))),
            (Told::Here(&has), true, Verdict::Wanted),
        ] {
            let elsewhere =
                [Elsewhere { node: node(2), alive: true, request: Told::Here(&kept), status: has }];
            let left = Left { recorded, elsewhere: &elsewhere, ..left(Told::Here(&going), Told::Nothing) };
            assert_eq!(judge(&left), verdict, "{left:?}");
        }
        // Of what never moved another's word says nothing.
        let still = request("destroyed", None);
        let told =
            Left { elsewhere: &other(true, Told::Here(&kept)), ..left(Told::Here(&still), Told::Nothing) };
        assert_eq!(judge(&told), Verdict::Goes);
    }
}
