//! Looking: at everything, at one, at every allocation; and what is made of it.

use std::collections::{BTreeMap, BTreeSet};

use ec_model::{InstanceId, Observed};

use super::{
    AUDIT_RETRY, Audit, Begun, Command, Engine, Held, Known, LOOK_PERIOD, LOOK_SOON, Question, StatusEntry,
    agenda::What,
};
use crate::{RecordFacts, Wanted};

/// What a look at everything saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The statuses of this node in etcd.
    pub statuses: BTreeMap<InstanceId, StatusEntry>,
    /// What the hypervisor has.
    pub observed: BTreeMap<InstanceId, Observed>,
    /// The node's own records.
    pub records: BTreeMap<InstanceId, RecordFacts>,
    /// Which instances users destroyed here, and as of which placement where that is known.
    pub buried: BTreeMap<InstanceId, Option<u64>>,
    /// What this node holds in etcd, so that it can be brought back.
    pub held: BTreeSet<InstanceId>,
}

/// Whether a look that began then tells anything of this instance: not of what our own work changed since.
fn tells_of(known: &Known, begun: Begun) -> bool {
    known.touched < begun.0 && known.busy.is_none()
}

impl Engine {
    fn begin_look(&mut self) -> Begun {
        self.looks += 1;
        Begun(self.looks)
    }

    /// Has everything looked at, unless that is under way.
    pub(super) fn look(&mut self) {
        let pause = if self.looked { LOOK_PERIOD } else { LOOK_SOON };
        self.agenda.set(What::Look, self.now.since_start + pause);
        if !self.looking {
            self.looking = true;
            let begun = self.begin_look();
            self.commands.push(Command::LookAtAll(begun));
        }
    }

    pub(super) fn observe(&mut self, instance: InstanceId) {
        let begun = self.begin_look();
        self.commands.push(Command::Observe(instance, begun));
    }

    /// Has every allocation of this node looked at, unless that is under way.
    pub(super) fn audit(&mut self) {
        if self.auditing || !self.looked {
            return;
        }
        self.agenda.clear(What::Audit);
        self.auditing = true;
        let begun = self.begin_look();
        self.commands.push(Command::Audit(begun));
    }

    pub(super) fn looked_at_all(&mut self, begun: Begun, seen: Result<Seen, String>) {
        self.looking = false;
        let soon = self.now.since_start + LOOK_SOON;
        let seen = match seen {
            Ok(seen) => seen,
            Err(why) => {
                self.agenda.set(What::Look, soon);
                // Said once: what is away may be so for a night.
                if !std::mem::replace(&mut self.look_failed, true) {
                    self.warn(None, "failed to look at everything; trying on", Some(why));
                }
                return;
            }
        };
        self.look_failed = false;
        self.take_look(begun, seen);
        let unseen = self.known.values().any(Known::is_unseen);
        self.agenda.set(What::Look, if unseen { soon } else { self.now.since_start + LOOK_PERIOD });
        if !std::mem::replace(&mut self.looked, true) {
            self.audit();
        }
        self.consider_all();
    }

    fn take_look(&mut self, begun: Begun, mut seen: Seen) {
        let here = seen.observed.iter().filter(|(_, observed)| !observed.is_nothing());
        let here = here.map(|(instance, _)| instance);
        let names = here.chain(seen.statuses.keys()).chain(seen.records.keys());
        for instance in names.chain(&seen.held) {
            self.known.entry(*instance).or_default();
        }
        for (instance, known) in &mut self.known {
            if tells_of(known, begun) {
                known.observe(seen.observed.remove(instance).unwrap_or_default(), self.now);
                known.read(seen.statuses.remove(instance).unwrap_or_default());
                known.record = seen.records.remove(instance).unwrap_or_default();
                known.buried = seen.buried.get(instance).copied();
                known.held = seen.held.contains(instance);
            }
        }
        self.buried = seen.buried;
        // What was destroyed is kept in mind only as long as an older look may come that has yet to see so.
        if !self.auditing {
            let is_over = |known: &Known| known.is_gone() && tells_of(known, begun);
            let over = self.known.iter().filter(|(_, known)| is_over(known)).map(|(instance, _)| *instance);
            over.collect::<Vec<_>>().into_iter().for_each(|instance| self.forget(instance));
        }
    }

    pub(super) fn observed(&mut self, instance: InstanceId, begun: Begun, seen: Result<Observed, String>) {
        let observed = match seen {
            Ok(observed) => observed,
            Err(why) => return self.tell(false, Some(instance), "failed to observe an instance", Some(why)),
        };
        let was_made = self.is_made(instance);
        match self.known.get_mut(&instance) {
            Some(known) if tells_of(known, begun) => {
                known.observe(observed, self.now);
                self.consider(instance);
                self.consider_who_boots_from(instance, was_made);
            }
            // Our own work overtook the look.
            Some(known) if known.busy.is_some() => known.hinted = true,
            Some(_) => self.observe(instance),
            // What else is known of it, the look tells.
            None if !observed.is_nothing() => self.look(),
            _ => {}
        }
    }

    pub(super) fn audited(&mut self, begun: Begun, held: Result<Option<Audit>, String>) {
        self.auditing = false;
        match held {
            Ok(Some(held)) => {
                match held.values().find_map(|of| of.as_ref().err()) {
                    None => self.audits_failed = 0,
                    Some(why) => self.audit_again(why.clone()),
                }
                let told = held.iter().filter(|(_, of)| of.is_ok());
                self.commands.push(Command::Counted(told.map(|(instance, _)| *instance).collect()));
                for instance in self.take_audit(begun, &held) {
                    self.ask(instance, Question::Placement);
                }
                self.consider_all();
            }
            // Not registered yet, or not any more, which the registration makes good.
            Ok(None) => {}
            Err(why) => self.audit_again(why),
        }
    }

    /// What is away may be so for a night, and what cannot be told of for longer: it is said once, and asked for ever more seldom.
    fn audit_again(&mut self, why: String) {
        let pause = AUDIT_RETRY.saturating_mul(2u32.saturating_pow(self.audits_failed)).min(LOOK_PERIOD);
        self.agenda.set(What::Audit, self.now.since_start + pause);
        if self.audits_failed == 0 {
            self.warn(None, "failed to audit this node's allocations; trying on", Some(why));
        }
        self.audits_failed = self.audits_failed.saturating_add(1);
    }

    /// Allocations of this node that nobody here knows of, and those that are gone. Answers the guests that are
    /// here and not among them: they may hold parts of the node's tree only, or nothing any more.
    fn take_audit(&mut self, begun: Begun, held: &Audit) -> Vec<InstanceId> {
        for instance in held.keys() {
            self.entry(*instance);
        }
        let mut missing = Vec::new();
        for (instance, known) in &mut self.known {
            if !tells_of(known, begun) {
                continue;
            }
            let (is_here, unwanted) = (known.is_here(), known.wanted() == Wanted::Nothing);
            match held.get(instance) {
                // Before a build the consumer itself is asked: it may hold parts on other providers too.
                Some(Ok(amounts)) if is_here || unwanted => known.hold(Held::Here(amounts.clone()), self.now),
                Some(_) => {}
                None if is_here => missing.push(*instance),
                None if unwanted => {
                    known.hold(Held::Nothing, self.now);
                    known.asked_for = None;
                }
                // Its disk is gone, and it is kept until it is destroyed: so is its claim.
                None if matches!(known.record, RecordFacts::Kept { .. }) => missing.push(*instance),
                None => {}
            }
        }
        missing
    }
}
