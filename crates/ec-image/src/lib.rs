//! Image cache: fetch, verify, tell the format, evict.
