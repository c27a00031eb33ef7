//! A configuration file, and what is made of its two shared sections.
#![no_main]

use std::path::Path;

use ec_runtime::config::{EtcdSection, PlacementSection, parse};
use libfuzzer_sys::fuzz_target;
use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Sections {
    etcd: EtcdSection,
    placement: PlacementSection,
}

fuzz_target!(|text: &str| {
    let Ok(sections) = parse::<Sections>(text, Path::new("fuzz.yaml")) else { return };
    let _ = sections.etcd.keyspace();
    let _ = sections.placement.settings();
    if let Ok(settings) = sections.etcd.settings() {
        assert!(!settings.endpoints.is_empty());
        assert_eq!(settings.user.is_some(), settings.password.is_some());
    }
});
