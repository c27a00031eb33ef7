//! The whole cluster in one process under simulated time: agents, use-cases of control and replicas of eplacement as
//! they ship, around the store in memory, the simulated hypervisor and a placement without sockets.
//!
//! ```text
//!   users, econtroller ──▶ Way ──▶ eplacement ──────┐
//!        │                ▲                         ▼
//!        │              agents ─────────────────▶ Door ──▶ MemoryStore      Nemesis: kills, breaks, delays
//!        └────────────────┼───────────────────────▲         │
//!                         └─▶ Hands ─▶ SimulatedHypervisor  └──▶ Referee: what must never be
//! ```
//!
//! A program talks to the outside only by its `Door` (the store), its `Way` (placement), its `Hands` (the hypervisor)
//! and its machine (time, chance, files). Each of them asks the program's `Life` before it does anything and before it
//! answers: of a program that was killed no call ever comes back, so every await is a place where it may die.
//!
//! One seed is one history; a [`Scenario`] is one that somebody wrote, in which nothing is left to chance. Time is tokio's, paused, on one thread; all chance comes from one generator; what the
//! standard library and tokio take from the kernel's own is made the same each time ([`chance`]), which is why each
//! history runs in a process of its own.

mod acts;
mod catalog;
pub mod chance;
mod controller;
mod door;
mod fashion;
mod hands;
mod heal;
mod history;
mod last;
mod life;
mod log;
mod mend;
mod nemesis;
mod node;
mod operator;
mod referee;
mod replica;
mod rest;
mod scenario;
mod snag;
mod told;
mod traces;
mod user;
mod volumes;
mod way;
mod world;

pub use history::{Ended, play, run};
pub use scenario::{Scenario, scenarios};
pub use told::tell;
