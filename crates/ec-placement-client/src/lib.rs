//! The Placement API over HTTP.
