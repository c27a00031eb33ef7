//! Histories in which the shipped programs once did harm, on real parts: start a stack, do the fault, look.

mod agent_guests;
mod agent_nodes;
mod agent_port;
mod agent_records;
mod agent_restore;
mod cli_apply;
mod cli_catalog;
mod cli_check;
mod cli_groups;
mod cli_list;
mod cli_placement;
mod cli_schedule;
mod cli_top;
mod cli_watch;
mod cli_words;
mod cluster;
mod controller;
mod etcd_roles;
mod guests_isolation;
mod guests_two_agents;
mod images;
mod placement_callers;
mod placement_far;
mod placement_records;
mod placement_restore;
mod service;
