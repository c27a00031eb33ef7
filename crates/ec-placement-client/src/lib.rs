//! The Placement API over HTTP, as far as an agent and a scheduler need it: providers, inventory, traits,
//! allocation candidates, claims. Works against OpenStack Placement and against our own server alike.
//!
//! Rules come from the OpenStack Placement API reference; every request is sent at [`MICROVERSION`].

mod client;
mod error;
mod types;

pub use client::{MICROVERSION, PlacementClient, PlacementConfig};
pub use error::{PlacementError, PlacementResult};
pub use types::{Candidate, Candidates, Claim, ConsumerAllocations, Inventory, Provider};
