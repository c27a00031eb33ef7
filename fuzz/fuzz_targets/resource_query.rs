//! The resources query of the command line: what is accepted asks for something.
#![no_main]

use ec_model::ResourceQuery;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(query) = ResourceQuery::parse(text) {
        assert!(!query.total().is_empty());
        assert!(query.pairs().iter().any(|(key, _)| key.starts_with("resources")));
    }
});
