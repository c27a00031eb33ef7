//! What the engine knows, for whoever looks in from outside.

use ec_model::{InstanceId, Observed, Status, Workload};

use super::{Engine, Requested};

/// What is known of one instance.
#[derive(Debug, Clone, PartialEq)]
pub struct Sight<'a> {
    /// The instance.
    pub instance: InstanceId,
    /// Of what kind it is: as its request says, or its status; a machine where neither does.
    pub kind: Workload,
    /// What is requested, where anything is.
    pub request: Option<&'a Requested>,
    /// Its status as last read or written, where there is one that can be read.
    pub status: Option<&'a Status>,
    /// What the hypervisor has, as it was last seen.
    pub observed: Observed,
    /// What the agent is about with it, or waits for.
    pub why: &'a str,
    /// Whether work for it is under way, or a question.
    pub busy: bool,
    /// How often it has failed in a row, for passing reasons.
    pub failures: u32,
}

impl Engine {
    /// All instances that it knows of. Those that were destroyed here, and of which nothing else is left, are none.
    pub fn sights(&self) -> impl Iterator<Item = Sight<'_>> {
        self.known.iter().filter(|(_, known)| !known.is_gone()).map(|(instance, known)| Sight {
            instance: *instance,
            kind: known.kind_told(),
            request: known.request.as_ref(),
            status: known.status.known(),
            observed: known.observed(),
            why: &known.why,
            busy: known.busy.is_some(),
            failures: known.failures,
        })
    }
}
