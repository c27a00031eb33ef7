//! eplacement: the OpenStack Placement API, with its state in etcd.
//!
//! ```text
//!   ec-placement-model ◀── store ◀── http        arrows point at what is known
//!           ec-replica ◀──┘
//! ```

pub mod config;
pub mod http;
pub mod metrics;
pub mod store;
mod tokens;
pub mod transfer;
