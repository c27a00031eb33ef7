//! What lies under a prefix of etcd, in the memory of whoever needs it: every replica holds all of it, from a watch, and
//! writes by transactions that compare every record they stand on.
//!
//! ```text
//!             ┌─────────────────── watch ──────────────────┐
//!             ▼                                            │
//!   read ──▶ View ──▶ History ◀── how far is it? ── Barrier ──▶ etcd
//!             ▲                                                  ▲
//!             └── decide ── Committer ── one transaction ────────┘ ◀── commands
//! ```
//!
//! `View` holds the state; `History` how far it is, and whether it is to be believed; it knows nothing of what the
//! state holds, and the barrier knows nothing but it. What the state holds, how its records read and how commands are
//! decided is a [`Model`]'s and its [`Commands`]': a [`Reader`] needs the first, a [`Replica`] both.
//!
//! There is no leader: replicas meet in etcd's transactions only.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod barrier;
mod commit;
mod history;
mod metrics;
mod model;
mod prefix;
mod reader;
mod replica;
mod view;

pub use self::{
    commit::{Limits, WriteError},
    metrics::Metrics,
    model::{Commands, Model, Reading},
    prefix::{Common, Prefix},
    reader::{Reader, Unavailable},
    replica::Replica,
};
use self::{reader::ended, replica::Health};

// The model of all our tests, which calls us by our name.
#[cfg(test)]
extern crate self as ec_replica;
#[cfg(test)]
#[path = "../tests/quota/mod.rs"]
mod quota;
