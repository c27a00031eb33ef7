//! Decisions as pure functions: what is, what shall be, so what to do.
