//! Decisions as pure functions: `(what shall be, what is, now) → what to do`.
//!
//! [`decide`] is the heart of the agent. It has no I/O, reads no clock, and sees the facts of one instance
//! at one moment; it answers with the effects to perform, in order, or with the moment at which to look
//! again. Because every effect is idempotent and the decision is made anew from facts after each run, a
//! crash between any two effects needs no special path: the next agent decides from what it finds.
//!
//! ```text
//!             request: active                     domain runs            has its address
//! SCHEDULED ───────────────▶ PREPARING ──▶ STARTING ───────────────────────▶ ACTIVE ⇄ STOPPED
//!     │                          │             │   (guest ended by itself)     │
//!     └──────────┬───────────────┴─────────────┘                               │
//!                ▼ any failure                     request: destroyed          ▼
//!              ERROR ── clean up, keep the status ──▶ gone        DESTROYING ──▶ gone
//! ```
//!
//! What it deliberately never does: destroy a domain that no request speaks of. An empty or restored etcd
//! must not wipe a host, so such a domain is reported and left alone.

mod decide;
mod facts;

pub use decide::{Decision, Effect, decide};
pub use facts::{Allocation, Facts, Limits, StatusFacts, Wanted};
