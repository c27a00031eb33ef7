//! What a hypervisor has of an instance; what decisions are made from.

/// What is of an instance on this host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Observed {
    /// The domain, where there is one.
    pub domain: Option<RunState>,
    /// Whether its volume is there.
    pub volume: bool,
}

/// Whether a domain runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// Running, or paused for a moment.
    Running,
    /// Defined; libvirt knows of no start (also after libvirtd itself was restarted).
    NotStarted,
    /// It ran and the guest or its process has ended.
    Ended,
}
