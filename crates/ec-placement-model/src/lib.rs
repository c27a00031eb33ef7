//! The model of placement: what is stored, what may be asked of it, and what follows. Pure: it knows
//! neither etcd nor HTTP nor the time of day.
//!
//! ```text
//!   records ──▶ State (all of them, with indexes) ──▶ Draft (a State with changes not yet written)
//!                                                       ▲
//!                    Command ── decide ─────────────────┘ ──▶ Outcome or ModelError
//! ```

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod allocate;
pub mod check;
mod command;
mod draft;
mod error;
mod extra;
mod left;
mod names;
mod provide;
mod records;
pub mod search;
pub mod standard;
mod state;
mod within;

pub use self::{
    allocate::{ConsumerWrite, ExpectedGeneration},
    command::{Command, Outcome, Scope, decide},
    draft::{Draft, Key, Part, Record, Savepoint},
    error::ModelError,
    extra::Extra,
    names::{is_custom, is_custom_name, is_standard_class, is_standard_trait, standard_first},
    records::{
        Amounts, Consumer, Inventories, Inventory, MAX_INT, Name, NamedRecord, Provider, Seconds,
        generation_problem, intern,
    },
    state::{Change, Node, Slot, State, Stored},
};

/// The trait of a provider whose inventory serves every provider of its aggregates.
pub const SHARING: &str = "MISC_SHARES_VIA_AGGREGATE";
