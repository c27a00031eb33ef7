//! The model against plainer ones: what a state tells against a count of its records, a draft against what is
//! written, a search against trying every combination; and, as tables, what each command is answered.
#![expect(clippy::panic, reason = "what tests share")]

mod allocations;
mod commands;
mod draft;
mod hosts;
mod queries;
mod records;
mod search;
mod state;
mod support;
mod within;
