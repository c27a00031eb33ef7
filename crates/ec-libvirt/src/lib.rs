//! libvirt behind the hypervisor trait; the only crate that knows the bindings.
//!
//! ```text
//!  LibvirtHypervisor ──▶ Lanes (act | look | agent) ──▶ one thread per call ──▶ libvirtd
//!        ▲                 one connection a call,        bounded, with a
//!        │ events          reopened when lost            deadline
//!        └──────────── event loop thread ◀───────────────────┘
//! ```
//!
//! A libvirt call may hang for as long as a daemon or a guest does. So none runs on the async threads,
//! each has a deadline, what hangs is counted against its instance only, and the connection it hangs on
//! is left to it. Slow work (starting, destroying) has other lanes than looking, so that an address is seen
//! at once while ten guests start.
//!
//! What is ours is told by a mark in the domain's metadata that names the node; nothing else is seen or
//! touched. libvirt's own words go into the errors, never to stderr.

mod addresses;
mod calls;
mod config;
mod console;
mod copy;
mod disk;
mod domain;
mod error;
mod events;
mod hypervisor;
mod lane;
mod last;
mod moving;
mod plugs;
mod prepare;
mod process;
mod protect;
mod reading;
mod sys;
mod terminal;
#[cfg(feature = "testing")]
pub mod testing;
mod usage;
mod volumes;
mod xml;

pub use config::{AddressFilter, CALL_TIMEOUT, LibvirtConfig, VirtType};
pub use hypervisor::LibvirtHypervisor;
