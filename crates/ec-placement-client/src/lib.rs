//! The Placement API over HTTP, as far as an agent and a scheduler need it: providers, inventory, traits,
//! allocation candidates, claims. Works against OpenStack Placement and against our own server alike.
//!
//! Rules come from the OpenStack Placement API reference; we speak 1.39, and with an older server
//! the newest version it has, down to 1.28.

mod api;
mod client;
mod error;
mod section;
mod transport;
mod types;
mod wire;

pub use api::Placement;
pub use client::{CONSUMER_TYPE, DISABLED, PlacementClient, SHARES};
pub use error::{Conflict, PlacementError, PlacementResult};
pub use section::PlacementSection;
pub use transport::{Answer, Request, Transport};
pub use types::{Amount, Candidate, Candidates, Claim, ConsumerAllocations, Inventory, Provider, Summary};
pub use wire::PlacementConfig;
