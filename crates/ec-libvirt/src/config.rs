//! What an operator decides about libvirt.

use std::{path::PathBuf, time::Duration};

use ec_model::NodeId;

/// How long a call is waited for. libvirt itself waits 30 s for the lock of a domain before it gives up, and says then who holds it.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(35);

/// How guests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VirtType {
    /// By the processor where it can, else emulated.
    #[default]
    Auto,
    /// By the processor; an error where it cannot.
    Kvm,
    /// Emulated (TCG): slow, works everywhere.
    Qemu,
}

/// What a guest's port is held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AddressFilter {
    /// Its hardware address, and the addresses that the network's DHCP server gave it. Only the hardware
    /// address on networks without one.
    #[default]
    Learned,
    /// Its hardware address.
    Mac,
    /// Nothing: there are no rules.
    Off,
}

/// Where libvirt is and what to use of it.
#[derive(Debug, Clone)]
pub struct LibvirtConfig {
    /// The connection URI. The daemon must be on this host: its files are read directly.
    pub uri: String,
    /// Whose instances these are: the mark on every domain.
    pub node: NodeId,
    /// How guests run.
    pub virt_type: VirtType,
    /// Name of the libvirt network of the first interface.
    pub network: String,
    /// Name of a bridge of this host for a second interface, where guests shall have one.
    pub bridge: Option<String>,
    /// Whether guests that are defined from now on have a screen.
    pub graphics: bool,
    /// What guests' ports are held to.
    pub address_filter: AddressFilter,
    /// Whether guests must not start where there can be no rules.
    pub filter_required: bool,
    /// Hosts and ports that guests must not reach.
    pub control: Vec<(String, u16)>,
    /// Name of the storage pool of the overlays; made where there is none.
    pub pool: String,
    /// The pool's directory, absolute.
    pub pool_path: PathBuf,
    /// The directory of the guests' console logs, absolute.
    pub console_dir: PathBuf,
    /// The file that tells who had which address last, absolute.
    pub addresses: PathBuf,
    /// How long one call may take.
    pub call_timeout: Duration,
}

impl LibvirtConfig {
    /// The system's libvirt with its network `default`.
    pub fn new(node: NodeId) -> Self {
        Self {
            uri: "qemu:///system".into(),
            node,
            virt_type: VirtType::Auto,
            network: "default".into(),
            bridge: None,
            graphics: false,
            address_filter: AddressFilter::default(),
            filter_required: false,
            control: Vec::new(),
            pool: "ecompute".into(),
            pool_path: "/var/lib/ecompute/instances".into(),
            console_dir: "/var/lib/ecompute/consoles".into(),
            addresses: "/var/lib/ecompute/addresses".into(),
            call_timeout: CALL_TIMEOUT,
        }
    }
}
