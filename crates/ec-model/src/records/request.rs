//! What one node shall do about an instance.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{AccessWish, Attachment, PowerWish, Rebuild, Rescue, Resize, Restart, Workload};
use crate::{InstanceId, NodeId, RequestId, Spec, request_id::overlooked};

/// The work order for one node. Written by control tools only, in one transaction with the [`crate::Instance`];
/// deleted by the agent with the last of what it says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The instance, as in the key.
    pub instance: InstanceId,
    /// What kind of workload it is, as in [`crate::Instance::kind`].
    #[serde(default, skip_serializing_if = "Workload::is_machine")]
    pub kind: Workload,
    /// The placement that this is about: [`crate::Assigned::epoch`].
    pub epoch: u64,
    /// Which of the changes of what is wanted this is: [`crate::Instance::generation`].
    pub generation: u64,
    /// What shall be.
    pub desired: Desired,
    /// Whether and how it shall run, as in [`crate::Instance::power`].
    #[serde(default)]
    pub power: PowerWish,
    /// What follows when it ends without anybody's wish, as in [`crate::Instance::restart`].
    #[serde(default)]
    pub restart: Restart,
    /// That its disk is to be made anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuild: Option<Rebuild>,
    /// That it is to be booted from another disk; its own again where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rescue: Option<Rescue>,
    /// That it is to be of the size of its spec, whatever it was made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resize: Option<Resize>,
    /// The volumes that it is to have, as in [`crate::Instance::volumes`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Attachment>,
    /// That it moves from one node to another, which share the storage where it lies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handover: Option<Handover>,
    /// The guest's hostname; where there is none, one is made from the instance's uuid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The project that the allocation is accounted to.
    #[serde(default)]
    pub project: String,
    /// The user that the allocation is accounted to.
    #[serde(default)]
    pub user: String,
    /// What it shall be. A request to destroy needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Spec>,
    /// The last wish to look at it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<AccessWish>,
    /// Of the command that wrote what is wanted last; a wish to look at it has its own. None of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "overlooked")]
    pub request_id: Option<RequestId>,
    /// When the instance was asked for.
    pub created_at: Timestamp,
}

/// The other node of a volume that moves. Both have a request as long as the first has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Handover {
    /// This node hands it over to that one.
    To(NodeId),
    /// This node has it from that one, and makes nothing in its place.
    From(NodeId),
}

/// What a request wants. One that this release does not know makes the request unreadable: nobody guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Desired {
    /// Built, started, with an address.
    Active,
    /// Gone, with everything that belonged to it.
    Destroyed,
}
