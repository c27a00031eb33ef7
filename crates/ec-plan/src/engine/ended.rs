//! What is learnt from the end of a job, and what comes after it.

use ec_model::{InstanceId, State};

use super::{
    Change, Engine, IMAGE_PATIENCE, LOOK_SOON, Outcome, RETRY_FIRST, RETRY_MOST, Report, Work, agenda::What,
    known::Busy,
};
use crate::{
    Facts, StatusFacts, Wanted,
    machine::{Effect, ran},
};

/// Whether it is swept once it is told that it failed, for which there is no need to wait: it is being built, and never ran. What is in
/// ERROR already is not told anything new by that.
fn is_swept_next(facts: &Facts) -> bool {
    let is_in_error = matches!(&facts.status, StatusFacts::Known(status) if status.state == State::Error);
    facts.wanted == Wanted::Active && !ran(facts) && !is_in_error
}

impl Engine {
    pub(super) fn ended(&mut self, report: Report) {
        let instance = report.instance;
        let was_made = self.is_made(instance);
        self.end(report);
        self.consider_who_boots_from(instance, was_made);
    }

    fn end(&mut self, report: Report) {
        let (instance, now) = (report.instance, self.now);
        let known = self.touch(instance);
        let busy = known.busy.take();
        let (request, tells_failure, is_expected) = match busy {
            Some(Busy::Working { request, tells_failure, cancelled, takes_up }) => {
                (request, tells_failure, cancelled || takes_up)
            }
            Some(Busy::Asking) | None => (None, false, false),
        };
        // A newer one may have come since, and was heard of before this.
        let dropped = report.done.contains(&Change::RequestDropped);
        if dropped && known.request == request {
            known.request = None;
        }
        let resumed = report.done.contains(&Change::Resumed);
        for change in report.done {
            if let Change::Observed(Err(why)) = &change {
                self.agenda.set_sooner(What::Look, now.since_start + LOOK_SOON);
                self.tell(
                    false,
                    Some(instance),
                    "failed to observe an instance after work on it",
                    Some(why.clone()),
                );
            }
            self.touch(instance).learn(change, now);
        }
        let known = self.touch(instance);
        // What failed was for a wish that another has taken the place of, of which it says nothing.
        let is_of_older = known.request.is_some() && known.request != request;
        if is_of_older && matches!(report.outcome, Outcome::RetryBounded(_) | Outcome::Failed(_)) {
            known.without_image = None;
            return self.observe(instance);
        }
        let out_of_patience = match report.outcome {
            Outcome::RetryBounded(_) => {
                let since = *known.without_image.get_or_insert(now.since_start);
                now.since_start.saturating_sub(since) >= IMAGE_PATIENCE
            }
            _ => {
                known.without_image = None;
                false
            }
        };
        match report.outcome {
            // It may be paused again by now.
            Outcome::Done if resumed => return self.observe(instance),
            Outcome::Done => {
                // What failed for good stays so until its time comes, although telling it worked.
                if !tells_failure {
                    self.agenda.clear(What::Retry(instance));
                }
                // Who has its addresses is not waited for any more.
                self.search_again = true;
            }
            Outcome::Abandoned if is_expected => {}
            Outcome::Abandoned => self.retry_later(instance, "what it stood on has changed"),
            Outcome::Retry(why) => {
                self.try_again(instance, why);
                // What stopped it may have changed what is there.
                self.observe(instance);
            }
            Outcome::RetryBounded(why) if !out_of_patience => self.try_again(instance, why),
            Outcome::RetryBounded(reason) | Outcome::Failed(reason) => {
                let facts = self.facts(instance);
                if ran(&facts) && facts.is_to_be_rebuilt() {
                    // The disk that it has stays, and nothing is wrong with that.
                    let effects = vec![Effect::GiveUpRebuild(reason.clone())];
                    return self.begin(instance, Work::Effects(effects), reason.into());
                }
                if ran(&facts) && facts.is_being_resized() {
                    // Its size goes before a rescue, and it goes on as large as it was.
                    let effects = vec![Effect::GiveUpResize(reason.clone())];
                    return self.begin(instance, Work::Effects(effects), reason.into());
                }
                if ran(&facts) && facts.is_to_be_rescued() {
                    // Nor with the disk that it boots from.
                    let effects = vec![Effect::GiveUpRescue(reason.clone())];
                    return self.begin(instance, Work::Effects(effects), reason.into());
                }
                if !is_swept_next(&facts) {
                    // It is kept, and tried again: what is wrong with it may be mended.
                    self.retry_later(instance, &reason);
                }
                self.touch(instance).why = reason.clone().into();
                return self.begin(instance, Work::Fail(reason.clone()), reason.into());
            }
        }
        self.consider(instance);
        self.follow_hint(instance);
    }

    fn try_again(&mut self, instance: InstanceId, why: String) {
        self.retry_later(instance, &why);
        self.warn(Some(instance), "did not work for now; trying again", Some(why));
    }

    /// Plans another try, later each time.
    pub(super) fn retry_later(&mut self, instance: InstanceId, why: &str) {
        let known = self.touch(instance);
        let pause = RETRY_FIRST.saturating_mul(1 << known.failures.min(16)).min(RETRY_MOST);
        known.failures = known.failures.saturating_add(1);
        known.why = format!("{why}; trying again").into();
        self.agenda.set(What::Retry(instance), self.now.since_start + pause);
    }

    /// Nothing stands in the way of the next try, nor does what failed before count: it is at rest, or wished otherwise. That a job was done
    /// between two that failed is not enough, or what fails for good would be tried with the shortest pause for ever.
    pub(super) fn no_failure(&mut self, instance: InstanceId) {
        self.agenda.clear(What::Retry(instance));
        if let Some(known) = self.known.get_mut(&instance) {
            known.failures = 0;
        }
    }
}
