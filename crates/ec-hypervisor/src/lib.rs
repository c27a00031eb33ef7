//! The hypervisor as the agent sees it: disks, domains, addresses, events.
//!
//! [`Hypervisor`] has two implementations held to the same [`conformance`] suite: libvirt (crate
//! `ec-libvirt`) and [`SimulatedHypervisor`], with latency and failures to set, for benchmarks and tests
//! beyond one machine. Every effect is idempotent and named by the instance's uuid: doing it again after
//! a crash is safe.

pub mod conformance;
mod directory;
mod simulated;
mod types;

use std::collections::HashMap;

use async_trait::async_trait;
use bytes::Bytes;
use ec_model::{Address, Attachment, BaseImage, InstanceId, NodeId};
use tokio::{
    net::UnixStream,
    sync::{broadcast, mpsc},
};

pub use directory::FirstDirectory;
pub use ec_model::{End, Observed, Pause, RunState};
pub use simulated::{Operation, SimulatedHypervisor};
pub use types::{
    AddressRoom, Console, DomainSize, DomainSpec, HostInfo, HypervisorError, HypervisorEvent,
    HypervisorResult, Printed, Room, Typed, Usage, VolumeSource,
};

/// What runs virtual machines on this node. Only what carries this node's mark is ever seen or touched.
#[async_trait]
pub trait Hypervisor: Send + Sync + 'static {
    /// Connects where needed, and tells what is there. Also makes sure that the storage pool is there and
    /// active, and that the network exists (starting it where it is defined and not running).
    async fn prepare(&self) -> HypervisorResult<HostInfo>;

    /// Everything of ours: domains with our mark, and volumes in our pool with no domain, or what is to take the place of one.
    async fn list(&self) -> HypervisorResult<HashMap<InstanceId, Observed>>;

    /// What is of one instance; [`Observed::default`] where nothing is.
    async fn observe(&self, instance: InstanceId) -> HypervisorResult<Observed>;

    /// Makes the instance's overlay volume on `base`. Capacity is `capacity_bytes`, or the base's own
    /// where `None`. An overlay that is there already is kept where it is whole and has that base,
    /// and replaced otherwise.
    async fn create_overlay(
        &self,
        instance: InstanceId,
        base: &BaseImage,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()>;

    /// Makes another disk beside the instance's own, in the place of one that is there from before; but of copies one that is whole stays. A guest that
    /// runs on its own goes on. Where there is no own one it is made all the same: that may be what it is to replace.
    /// Capacity is `capacity_bytes`, or where `None` that of what it is made of.
    async fn create_successor(
        &self,
        instance: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()>;

    /// Puts that overlay in the place of the instance's own, which is deleted, and memory that was saved with it. Fails
    /// while the domain is up, or a guest that has the volume, where there is none, and where its own is not there and another node
    /// has that on the same storage.
    async fn replace_overlay(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// Deletes that overlay; where there is none that is not an error.
    async fn drop_successor(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// Defines the domain for good. One that is there for good already is left as it is; one that only lives
    /// until it ends goes on running. Fails where the volume that it is to boot from is not there, or is another domain's; without
    /// other volumes of which that is so it is defined, and [`Hypervisor::set_volumes`] tells of them.
    async fn define(&self, spec: &DomainSpec) -> HypervisorResult<()>;

    /// Defines for good the domain that is up and only lives until it ends, since somebody undefined it; for good already is
    /// no error. Fails for now, and leaves nothing, where it ended meanwhile.
    async fn persist(&self, spec: &DomainSpec) -> HypervisorResult<()>;

    /// Makes the instance's rescue disk, an overlay on `base` of the same capacity, in the place of one that is there
    /// from before. Fails while a guest is up from that, and where it has neither a disk of its own nor a domain that boots
    /// from a volume: a call that comes late must leave nothing of an instance that is gone.
    async fn create_rescue(&self, instance: InstanceId, base: &BaseImage) -> HypervisorResult<()>;

    /// Deletes that disk, and memory that was saved of a guest which ran from it; where there is none that is not an
    /// error. Fails while a guest is up from it.
    async fn drop_rescue(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// Makes a volume's disk, or that of a machine whose guest never ran; none that another node has on the same storage. One that is there already is kept where it may be that, and made
    /// anew otherwise: nobody has written it. Of a snapshot of several disks the first is the volume's, as large as it was, the others lie
    /// beside it, and together they have no more than that capacity. Capacity is `capacity_bytes`, or where `None` that of what it is
    /// made of. A copy may take hours; one that failed leaves what the next call, or [`Hypervisor::destroy`], takes away.
    async fn create_volume(
        &self,
        volume: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()>;

    /// Whether a volume's disk is here. Fails for now where another node has it on storage that both have: what is noted of a making that
    /// this would hold up would be taken for how the disk came here, once that node hands it over.
    async fn has_volume(&self, volume: InstanceId) -> HypervisorResult<bool>;

    /// Has a volume's disk be that of another node, which has its disks beside this one's on the same storage. One that is there
    /// already is no error, nor is one that is at neither. Fails while a domain has it, and where another disk is in its place.
    async fn hand_over(&self, volume: InstanceId, node: NodeId) -> HypervisorResult<()>;

    /// Has the copy that is being made for this machine or volume fail soon; where there is none, nothing.
    fn give_up_copy(&self, owner: InstanceId);

    /// Gives the domain these volumes, and no others: of the guest that is up and of the next start alike. Having them already
    /// is no error. Fails where a disk is not there, or is another domain's, or the guest does not let go of one; then it may
    /// have some of them. The one that it boots from is neither given nor taken so: another one, or none, is refused.
    async fn set_volumes(&self, instance: InstanceId, volumes: &[Attachment]) -> HypervisorResult<()>;

    /// The volumes that its domain has: those of the guest that is up, or whose memory is saved, and of the next start, each once, in any
    /// order. Empty where there is no domain.
    async fn volumes_of(&self, instance: InstanceId) -> HypervisorResult<Vec<Attachment>>;

    /// The capacity of the disk in bytes, of a machine or a volume; nothing where there is none.
    async fn disk_bytes(&self, instance: InstanceId) -> HypervisorResult<Option<u64>>;

    /// Makes the disk of a machine or a volume as large as this, also under a guest that runs; one that is so large already is left as it
    /// is. What the guest wrote stays.
    async fn grow_disk(&self, instance: InstanceId, capacity_bytes: u64) -> HypervisorResult<()>;

    /// Defines the domain that is there as large as this, and otherwise as it is defined, where that can be. Fails while it is up, and
    /// where memory of it was saved.
    async fn redefine(&self, spec: &DomainSpec) -> HypervisorResult<()>;

    /// Has a guest that runs be as large as this at once, and its domain be defined so for good; being so already is no
    /// error. Fails where it does not run, has more of something, or was not started with that [`Room`].
    async fn grow(&self, spec: &DomainSpec) -> HypervisorResult<()>;

    /// Starts the domain, from its saved memory where there is one; running already is not an error.
    async fn start(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// The same, but from its rescue disk, and with its own as the second, as such a domain. How it is defined stays: the
    /// next start is from its own disk again.
    async fn start_rescue(&self, spec: &DomainSpec) -> HypervisorResult<()>;

    /// Lets a paused domain go on; running already is not an error.
    async fn resume(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// Asks the guest to end by itself, as its power button does, and does not wait for it. What does not run is not an
    /// error.
    async fn shut_down(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// Ends the guest hard, and keeps all that is of it. What does not run is not an error.
    async fn power_off(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// Halts the guest's processors; halted already is not an error.
    async fn pause(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// Writes the guest's memory to the host's disk and ends it; the next start goes on from there. What does not run
    /// is not an error.
    async fn save(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// Deletes the memory that was saved of the guest, so that the next start boots it anew; where there is none that is not an
    /// error. Fails while the domain is up.
    async fn drop_memory(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// How large the domain is, where there is one. The disk is its own, which one that boots from a volume has not.
    async fn size(&self, instance: InstanceId) -> HypervisorResult<Option<DomainSize>>;

    /// Ends the domain (hard), undefines it, deletes its disk and its console log. What is not there is
    /// not an error, so that a half-done destroy is finished by calling it again. Volumes that it had stay. Fails for now where
    /// it is a volume that a domain has, and where the domain has another file in the place of one of its volumes.
    async fn destroy(&self, instance: InstanceId) -> HypervisorResult<()>;

    /// The addresses of these instances, as far as known now. Cheap enough to be called every 150 ms.
    async fn addresses(
        &self,
        instances: &[InstanceId],
    ) -> HypervisorResult<HashMap<InstanceId, Vec<Address>>>;

    /// How many addresses the guests' network has left to give; nothing where it gives none itself.
    async fn address_room(&self) -> HypervisorResult<Option<AddressRoom>> {
        Ok(None)
    }

    /// Why no guest can be put into its networks, where one of them is not there, or cannot be started. Changes nothing.
    async fn network_trouble(&self) -> HypervisorResult<Option<String>> {
        Ok(None)
    }

    /// The bridge of the guests' network as it is now, where it has one: see [`HostInfo::bridge`].
    async fn bridge(&self) -> HypervisorResult<Option<String>> {
        Ok(None)
    }

    /// What these instances have used, of those whose guests are up. One that is busy with another call may be left out.
    async fn usage(&self, instances: &[InstanceId]) -> HypervisorResult<HashMap<InstanceId, Usage>>;

    /// The end of the guest's console, at most `max_bytes`, as text; empty where there is none.
    async fn console_tail(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<String>;

    /// Opens the serial console of a guest that runs. One at a time: while somebody else has it, this fails.
    async fn open_console(&self, instance: InstanceId) -> HypervisorResult<Console>;

    /// What the guest printed on its console, from at most `max_bytes` before its end on, and then what it prints, as
    /// it is. An empty piece comes once, between the two. Ends when the instance is destroyed. Where there is nothing
    /// yet, it is waited for.
    async fn follow_console(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<Printed>;

    /// Opens the screen of a guest that runs and has one: a server of VNC (RFC 6143) speaks on the socket.
    async fn open_graphics(&self, instance: InstanceId) -> HypervisorResult<UnixStream>;

    /// Looks after what holds guests to their own addresses, and makes it good where somebody took it away.
    /// To be called every half minute.
    async fn protect(&self) -> HypervisorResult<()> {
        Ok(())
    }

    /// Reads the file of a volume that nobody has and that stands on nothing else: first how many bytes it has, in eight bytes
    /// with the highest first, then these. Fewer come where it cannot be read to its end, or changed meanwhile.
    async fn read_disk(&self, volume: InstanceId) -> HypervisorResult<mpsc::Receiver<Bytes>>;

    /// Hints that something changed. Each means only "look again"; a receiver that lags looks at all.
    fn events(&self) -> broadcast::Receiver<HypervisorEvent>;
}
