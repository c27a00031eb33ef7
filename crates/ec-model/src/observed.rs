//! What a hypervisor has of an instance; what decisions are made from.

/// What is of an instance on this host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Observed {
    /// The domain, where there is one.
    pub domain: Option<RunState>,
    /// Whether its volume is there.
    pub volume: bool,
    /// Whether there is a disk beside it that is to take its place, from which no guest was ever started.
    pub successor: bool,
    /// The domain is not defined for good: somebody undefined it while it runs, and it is gone when it ends.
    pub transient: bool,
    /// The guest was started from its rescue disk, and is up or was saved so.
    pub rescued: bool,
    /// The volumes that its domain has, as [`crate::Attachment::fingerprint`] has them: those of the guest that is up and of
    /// the next start alike.
    pub volumes: u64,
    /// The disks whose copies lie beside it, where it is a snapshot of several, as [`crate::CopyOf::fingerprint`] has them.
    pub copies: u64,
    /// A domain of its uuid bears no mark of this node, and a disk of its name lies here. Neither is touched, and nothing else is told
    /// of them: this is for people alone, who would take the disk for gone.
    pub foreign: bool,
}

impl Observed {
    /// The volumes of a guest that is up, or whose memory is saved, where its next start would be with others.
    pub const OTHER_VOLUMES: u64 = u64::MAX;

    /// Whether there is nothing of it that is this node's.
    pub fn is_nothing(&self) -> bool {
        Self { foreign: false, ..*self } == Self::default()
    }
}

/// The namespace of the mark in a domain's metadata that makes it a node's. A name, not an address.
pub const MARK_NAMESPACE: &str = "urn:project:etcd-compute/1";

/// What helps where a domain bears no mark of the node, in a sentence's part. Both are uuids, or words for them.
pub fn mark_again(instance: &str, node: &str) -> String {
    format!(
        "if it is the instance's own, `virsh metadata {instance} --uri {MARK_NAMESPACE} --key ec --set '<instance node=\"{node}\"/>' \
         --config` marks it again (where it runs, with `--live`, too); if it is another's, end it and undefine it, which leaves the disk here"
    )
}

/// Whether a domain runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// Its processors run.
    Running,
    /// Its processors are halted, its process is there and holds the disk.
    Paused(Pause),
    /// Defined; the hypervisor knows of no start (also after libvirtd itself was restarted).
    NotStarted,
    /// It ran and the guest or its process has ended.
    Ended(End),
    /// It does not run; its memory lies on the host's disk, and a start goes on from there.
    Saved,
}

/// Why a domain is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Its disk could not be written or read.
    Storage {
        /// Whether the host's file system below the disk has room, so that going on may work.
        room: bool,
    },
    /// Somebody suspended it.
    ByHand,
    /// The guest's system crashed and is kept as it is.
    Crashed,
    /// By a migration, a dump, a snapshot, or nobody knows: whoever did it will go on with it.
    Other,
}

/// Why a domain does not run any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The guest powered itself off.
    ByGuest,
    /// Somebody ended its process.
    ByHand,
    /// Its process or its system crashed.
    Crashed,
    /// The hypervisor's daemon gave it up, when it was started anew and could not take it over.
    ByHypervisor,
    /// Not known.
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_of_others_is_nothing_of_ours() {
        assert!(Observed::default().is_nothing());
        assert!(Observed { foreign: true, ..Observed::default() }.is_nothing());
        assert!(!Observed { volume: true, ..Observed::default() }.is_nothing());
        assert!(!Observed { volume: true, foreign: true, ..Observed::default() }.is_nothing());
    }

    #[test]
    fn the_command_that_marks_a_domain_again_names_both() {
        let how = mark_again("7d3c", "n1");
        assert!(how.contains("`virsh metadata 7d3c --uri urn:project:etcd-compute/1"), "{how}");
        assert!(how.contains("<instance node=\"n1\"/>"), "{how}");
    }
}
