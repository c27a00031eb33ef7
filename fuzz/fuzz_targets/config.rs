//! A configuration file, and what is made of its two shared sections.
#![no_main]

use std::path::Path;

use ec_model::Keyspace;
use ec_placement_client::PlacementSection;
use ec_runtime::config::parse;
use ec_store::EtcdSection;
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
    let _ = Keyspace::configured(sections.etcd.prefix.as_deref());
    let _ = sections.placement.settings();
    if let Ok(settings) = sections.etcd.settings() {
        assert!(!settings.endpoints.is_empty());
        assert_eq!(settings.user.is_some(), settings.password.is_some());
    }
});
