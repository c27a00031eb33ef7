//! Histories in which the shipped programs once did harm, on real parts: start a stack, do the fault, look.

mod guests_isolation;
mod guests_two_agents;
