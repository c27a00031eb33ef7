//! eplacement: the OpenStack Placement API, with its state in etcd.
//!
//! ```text
//!   ec-placement-model ◀── ec-placement-store ◀── http        arrows point at what is known
//!           ec-replica ◀──┘
//! ```

pub mod config;
pub mod http;
pub mod live;
pub mod metrics;
mod tokens;

pub use ec_placement_store::{self as store, transfer};
