//! The metadata service: what guests ask 169.254.169.254.
//!
//! ```text
//! guest ──HTTP──▶ address on the bridge ──▶ who asks?  the port it came in on (caller) → hardware address
//!                 (bridge, serve, http)                → instance (records of all servers here, registry)
//!                                       ──▶ what?      the EC2 tree or the OpenStack tree (ec2, openstack)
//! ```
//!
//! It needs nothing but the record files that the agent writes, one for each instance: it goes on
//! answering while etcd, placement and the agent are down. A guest is told by the port of the bridge that
//! its question came in on; nothing that a request, a packet or a frame says about itself counts. Whoever is
//! not the guest of a record, this host included, gets 404 for everything.
//!
//! The agent runs [`serve`] itself, and `mdserver` is the same as a program of its own. Any number may run
//! on a host: one answers, for the guests of all of them, and the others wait to take over. Whoever else has
//! that port of the host (port) gets no guest's question.

mod account;
mod answer;
mod bridge;
mod caller;
mod destroyed;
mod ec2;
mod http;
mod openstack;
mod port;
mod records;
mod registry;
mod serve;
mod spare;
mod token;

pub use account::Account;
pub use answer::MetadataService;
pub use caller::{Caller, Origin};
pub use port::{Holder, holder};
pub use records::{InstanceRecord, RECORD_VERSION, RecordDir, RecordFileError};
pub use registry::Source;
pub use serve::{MetadataConfig, MetadataError, serve};
