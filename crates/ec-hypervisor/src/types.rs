//! What the agent and the hypervisor tell each other.

use std::time::Duration;

use bytes::Bytes;
use ec_model::{Attachment, BaseImage, CopyOf, InstanceId};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

/// Result of a hypervisor operation.
pub type HypervisorResult<T> = Result<T, HypervisorError>;

/// What went wrong, by what the caller can do about it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HypervisorError {
    /// The hypervisor cannot be reached now: wait and try again, nothing about the instance is wrong.
    #[error("hypervisor is not reachable at {uri}: {detail}")]
    Unreachable {
        /// The connection URI.
        uri: String,
        /// Its own words.
        detail: String,
    },
    /// A call did not come back in time. What it did is unknown; other domains are not affected.
    #[error("{what} did not come back within {seconds} s")]
    TimedOut {
        /// The call and what it was for.
        what: String,
        /// The deadline that passed, in seconds.
        seconds: u64,
    },
    /// All that may be asked at a time waits: nothing was asked, and nothing about the instance is wrong.
    #[error("none of the calls before the one to {what} came back within {seconds} s")]
    Busy {
        /// What was to be done to what.
        what: String,
        /// The deadline that passed, in seconds.
        seconds: u64,
    },
    /// Something on the host is not as it must be for now: wait and try again.
    #[error("cannot {what} for now: {detail}")]
    NotNow {
        /// What was being done to what.
        what: String,
        /// What is in the way.
        detail: String,
    },
    /// The hypervisor refused or failed; trying the same again will not help.
    #[error("failed to {what}: {detail}")]
    Failed {
        /// What was being done to what.
        what: String,
        /// The hypervisor's own words.
        detail: String,
    },
}

impl HypervisorError {
    /// Whether trying the same again later may help.
    pub fn is_transient(&self) -> bool {
        !matches!(self, Self::Failed { .. })
    }
}

/// What the hypervisor is, for `ecompute --check` and the node's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostInfo {
    /// For example `QEMU 7.2.0, libvirt 9.0.0`.
    pub version: String,
    /// `kvm` or `qemu`.
    pub virt_type: String,
    /// The bridge device of the libvirt network, where guests' metadata requests arrive.
    pub bridge: Option<String>,
}

/// A hint that something changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HypervisorEvent {
    /// Look at this instance again.
    Changed(InstanceId),
    /// Look at everything again: the connection was lost or came back.
    LookAtAll,
}

/// What a guest prints. An error comes last where it breaks off though the guest may run on.
pub type Printed = mpsc::Receiver<HypervisorResult<Bytes>>;

/// A guest's serial console, open. Whoever drops the receiver closes it, once the guest has taken what was typed before.
#[derive(Debug)]
pub struct Console {
    /// What the guest prints from now on; ends when the guest does. What nobody takes in time is lost, as on a line
    /// without flow control: a guest must not fill this host's memory.
    pub output: Printed,
    /// What is typed.
    pub input: mpsc::Sender<Typed>,
}

/// A piece of what is typed on a console.
#[derive(Debug)]
pub struct Typed {
    /// It.
    pub bytes: Bytes,
    /// Told once the hypervisor has taken all of it for the guest; dropped where it never does.
    pub handed: oneshot::Sender<()>,
}

impl Typed {
    /// A piece, and where it is heard that it is handed over.
    pub fn new(bytes: impl Into<Bytes>) -> (Self, oneshot::Receiver<()>) {
        let (handed, heard) = oneshot::channel();
        (Self { bytes: bytes.into(), handed }, heard)
    }
}

/// What a domain shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainSpec {
    /// Its name and its uuid.
    pub instance: InstanceId,
    /// A title for people who run `virsh list --title`: the hostname.
    pub title: String,
    /// Virtual processors, exactly as allocated.
    pub vcpus: u64,
    /// Memory in MiB, exactly as allocated.
    pub memory_mb: u64,
    /// The volumes that it has beside its own disk; one that is started from its rescue disk has none of them. The one that
    /// is called [`Attachment::ROOT`] takes the place of its own.
    pub volumes: Vec<Attachment>,
}

impl DomainSpec {
    /// The volume that it boots from; none where it has a disk of its own.
    pub fn root(&self) -> Option<InstanceId> {
        Attachment::root_of(&self.volumes)
    }
}

/// What a volume is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeSource {
    /// Nothing: it reads as zeros.
    Empty,
    /// An overlay on this image.
    Image(BaseImage),
    /// A copy of other disks of this node, as they were at one moment; their file systems are at rest then where their guest
    /// has an agent.
    Copy(CopyOf),
}

/// What a network that gives guests their addresses has left of them. A guest that is gone has its own until its lease ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressRoom {
    /// The network's name.
    pub network: String,
    /// So many can be given.
    pub left: u64,
    /// Of so many.
    pub total: u64,
    /// In so long the first of the others is free again, unless its guest asks for it anew; nothing where none has an end.
    pub next: Option<Duration>,
}

/// How large a guest can grow while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Virtual processors.
    pub vcpus: u64,
    /// Memory in MiB, in whole [`Room::MEMORY_STEP_MB`]; none where it cannot grow.
    pub memory_mb: Option<u64>,
}

impl Room {
    /// Linux takes memory that comes later in blocks of so many MiB (`/sys/devices/system/memory/block_size_bytes`).
    pub const MEMORY_STEP_MB: u64 = 128;
    /// What may come later lies above 4 GiB, and a Linux that is told of that sets 64 MiB aside (its `swiotlb`): too much
    /// to ask of a guest with less than this.
    const MEMORY_FROM_MB: u64 = 1024;
    const TIMES: u64 = 4;
    /// Each processor that may come takes a Linux guest a quarter of a MiB.
    const VCPUS_MOST: u64 = 64;

    /// What a guest with so many processors and so much memory is started with room for: four times that. One that is
    /// `emulated` gets no processors: QEMU ends with an assertion where no part of the translation cache is left for one
    /// more.
    pub fn of(vcpus: u64, memory_mb: u64, emulated: bool) -> Self {
        let most = memory_mb.saturating_mul(Self::TIMES);
        let times = if emulated { 1 } else { Self::TIMES };
        Self {
            vcpus: vcpus.saturating_mul(times).min(Self::VCPUS_MOST).max(vcpus),
            memory_mb: (memory_mb >= Self::MEMORY_FROM_MB).then_some(most),
        }
    }
}

/// What a guest has used since it was started. The counters only go up until its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Time of the host's processors, in nanoseconds.
    pub cpu_ns: u64,
    /// Bytes that were read from its disks and written to them.
    pub disk_bytes: u64,
    /// Bytes that its interfaces received and sent.
    pub net_bytes: u64,
}

/// How large a domain is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainSize {
    /// Virtual processors.
    pub vcpus: u64,
    /// Memory in MiB.
    pub memory_mb: u64,
    /// The capacity of its disk in bytes; 0 where it has none.
    pub disk_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_started_with_room_for_four_times_what_it_has_where_that_costs_it_little() {
        let room = |vcpus, memory_mb| {
            let room = Room::of(vcpus, memory_mb, false);
            (room.vcpus, room.memory_mb)
        };
        assert_eq!(Room::of(2, 1024, true), Room { vcpus: 2, memory_mb: Some(4096) });
        assert_eq!(room(1, 1023), (4, None));
        assert_eq!(room(2, 1024), (8, Some(4096)));
        assert_eq!(room(16, 1500), (64, Some(6000)));
        assert_eq!(room(17, 1 << 20), (64, Some(4 << 20)));
        assert_eq!(room(96, 128), (96, None), "no less than it has");
    }
}
