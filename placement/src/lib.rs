//! eplacement: the OpenStack Placement API, with its state in etcd.
//!
//! ```text
//!   model ◀── search ◀── store ◀── http        arrows point at what is known
//! ```

pub mod check;
pub mod config;
pub mod http;
pub mod metrics;
pub mod model;
pub mod search;
pub mod store;
pub mod transfer;
