//! Decisions as pure functions: `(what shall be, what is) → what to do`.
//!
//! [`machine::plan`] is the heart of the agent. It has no I/O, reads no clock, and sees the facts of one instance
//! at one moment; it answers with the effects to perform, in order, or with what to ask or to wait for before it
//! plans again. Because every effect is idempotent and the plan is made anew from facts after each run, a
//! crash between any two effects needs no special path: the next agent decides from what it finds.
//! [`engine`] is what stands around it: what is known of all instances, one job for each at a time, and when.
//!
//! ```text
//!             request: active                     domain runs            has its address
//! SCHEDULED ───────────────▶ PREPARING ──▶ STARTING ───────────────────────▶ ACTIVE ⇄ PAUSED, STOPPED
//!     │                          │             │ marked as started            │
//!     └──────────┬───────────────┴─────────────┘ before it is                 │
//!                ▼ any failure before that       request: destroyed           ▼
//!              ERROR ── clean up, keep the status ──▶ gone        DESTROYING ──▶ gone
//! ```
//!
//! Two rules stand above all others. **What never ran is swept when it fails**: disk, record, claim. **What ever
//! ran is kept**, whatever is missing or failing, until a user destroys it: its state is told anew from what is
//! found each time, so an ERROR of such an instance ends when its cause does. A guest of ours that no request
//! speaks of (etcd was emptied, or restored to a time before it) is UNCLAIMED: it runs on and is counted.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod choice;
pub mod engine;
mod facts;
pub mod fleet;
pub mod forget;
pub mod heal;
pub mod history;
pub mod host;
pub mod lack;
pub mod machine;
pub mod reach;
pub mod sizes;
pub mod stack;
pub mod status;
pub mod verbs;
pub mod volumes;

pub use facts::{
    Allocation, Asked, Facts, KnownStatus, Limits, PowerFacts, RebuildFacts, RecordFacts, RescueFacts,
    RescuedFacts, ResizeFacts, SizeFacts, StatusFacts, VolumesFacts, Wanted, fingerprint,
};
