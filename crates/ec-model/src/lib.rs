//! What the parts of etcd-compute say to each other: ids as types, the records that lie in etcd, the
//! layout of the keys, the states of an instance, and the grammar of a resources query.
//!
//! Pure: nothing here reads a clock, a file or a socket. `docs/keyspace.md` is the contract that
//! [`Keyspace`] and the records implement.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod ids;
mod image;
pub mod input;
mod keys;
mod observed;
mod query;
mod records;
mod request_id;

pub use ids::{ImageId, InstanceId, InvalidId, InvalidMac, MacAddr, NodeId};
pub use image::{BaseImage, DiskFormat};
pub use keys::{KeyError, Keyspace, placement_tokens};
pub use observed::{End, MARK_NAMESPACE, Observed, Pause, RunState, mark_again};
pub use query::{QUERY_MAX, QueryError, ResourceQuery};
pub use records::{
    Access, AccessKind, AccessWish, Action, ActionVerb, Actions, Address, AddressSource, Alive, Assigned,
    Attachment, BEING_COPIED, Blob, CopyOf, Desired, Doc, Edition, Extent, Flavor, GRACE_SECONDS, Group,
    HISTORY_MAX, Handover, Held, Image, ImageRef, ImageStatus, Instance, Intent, Keypair, Node, OF_INSTANCE,
    OF_VOLUME, Outcome, Outcomes, Policy, Power, PowerWish, Progress, Rebuild, Rebuilt, Record, RecordError,
    Request, Rescue, Rescued, Resize, Resized, Resources, Restart, SharedStorage, Size, Spec, State, Status,
    Ticket, Token, Trouble, TroubleKind, USER_DATA_MAX, Visibility, Workload, decode, decode_part, encode,
    greater, token_digest,
};
pub use request_id::{InvalidRequestId, RequestId};
