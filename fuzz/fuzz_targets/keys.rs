//! Keys under the root prefix: a key that is understood is the one that would be built.
#![no_main]

use ec_model::Keyspace;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|key: &str| {
    let keys = Keyspace::default();
    if let Ok(node) = keys.parse_node(key) {
        assert_eq!(keys.node(node), key);
    }
    if let Ok(instance) = keys.parse_instance(key) {
        assert_eq!(keys.instance(instance), key);
    }
    if let Ok((node, instance)) = keys.parse_request(key) {
        assert_eq!(keys.request(node, instance), key);
    }
    if let Ok((node, instance)) = keys.parse_status(key) {
        assert_eq!(keys.status(node, instance), key);
    }
});
