//! Black-box histories against the programs as they are shipped: start real parts, do the fault, look.

mod agent_guests;
mod agent_nodes;
mod agent_records;
mod agent_restore;
mod placement_callers;
mod placement_far;
mod placement_records;
mod placement_restore;
