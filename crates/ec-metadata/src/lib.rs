//! The metadata service: what guests ask 169.254.169.254.
//!
//! ```text
//! guest ──HTTP──▶ address on the bridge ──▶ who asks?  source address → hardware address (the kernel's
//!                 (bridge, serve, http)                neighbour table) → instance (a record file)
//!                                       ──▶ what?      the EC2 tree or the OpenStack tree (ec2, openstack)
//! ```
//!
//! It needs nothing but the record files that the agent writes, one for each instance: it goes on
//! answering while etcd, placement and the agent are down. A guest is told from the frames it sends, which
//! the network's filter holds to its own address; nothing that a request says about itself counts. Whoever
//! is not the guest of a record, this host included, gets 404 for everything.
//!
//! The agent runs [`serve`] itself, and `mdserver` is the same as a program of its own; where both run,
//! one answers and the other waits to take over.

mod answer;
mod bridge;
mod ec2;
mod http;
mod neighbours;
mod openstack;
mod records;
mod serve;
mod token;

pub use answer::MetadataService;
pub use neighbours::neighbour;
pub use records::{InstanceRecord, RecordDir, RecordFileError};
pub use serve::{MetadataConfig, MetadataError, serve};
