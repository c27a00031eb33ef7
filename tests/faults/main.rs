//! Black-box histories against the programs as they are shipped: start real parts, do the fault, look.

mod placement_callers;
mod placement_far;
mod placement_records;
mod placement_restore;
