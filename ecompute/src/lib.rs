//! The agent: one per host. It watches its own requests in etcd, makes them so through libvirt, and
//! writes what is. `docs/architecture.md` tells how the parts play together.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod about;
mod addresses;
pub mod agent;
#[cfg(test)]
mod alone;
mod bases;
mod calls;
pub mod check;
pub mod config;
mod driver;
mod firewall;
mod health;
mod held;
mod hosted;
pub mod identity;
mod inventory;
mod jobs;
pub mod join;
mod look;
mod parts;
pub mod port;
mod presence;
mod register;
mod storage;
mod worker;

pub use parts::Parts;
