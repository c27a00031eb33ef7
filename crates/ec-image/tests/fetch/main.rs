//! Fetching images into the cache, from the outside.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends there")]

mod http;
mod local;
mod packed;
mod support;
