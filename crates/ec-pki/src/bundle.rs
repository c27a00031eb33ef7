//! What a host is given to join the cluster.

use ec_model::{NodeId, Record};
use serde::{Deserialize, Serialize};

/// All that one host needs to be a node, and nothing that another could use. A secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bundle {
    /// The node's name, and its resource provider's.
    pub name: String,
    /// The node's uuid, which its rights in etcd and placement are bound to.
    pub node: NodeId,
    /// By what others reach the host.
    pub host: String,
    /// etcd's members, as URLs.
    pub etcd: Vec<String>,
    /// What every key begins with.
    pub prefix: String,
    /// Placement's URL.
    pub placement: String,
    /// The authority's certificate, PEM.
    pub authority: String,
    /// The node's own certificate, PEM.
    pub certificate: String,
    /// Its key, PEM.
    pub key: String,
    /// Its token for placement.
    pub token: String,
}

impl Record for Bundle {
    const WHAT: &'static str = "bundle";
    const FORMAT: u32 = 1;
}

/// A new token: 256 random bits in hex.
pub fn new_token() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use ec_model::{decode, encode};

    use super::*;

    #[test]
    fn a_bundle_reads_as_it_was_written_and_what_is_none_is_told() {
        let bundle = Bundle {
            name: "host1".into(),
            node: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
            host: "10.0.0.1".into(),
            etcd: vec!["https://etcd1:2379".into()],
            prefix: "/ecompute".into(),
            placement: "https://etcd1:8080".into(),
            authority: "a".into(),
            certificate: "b".into(),
            key: "c".into(),
            token: new_token(),
        };
        let text = String::from_utf8(encode(&bundle)).unwrap();
        assert_eq!(decode::<Bundle>(text.as_bytes()).unwrap(), bundle);
        for (text, why) in [
            (String::new(), "not a valid bundle"),
            (text.replace("\"version\":1", "\"version\":2"), "has version 2"),
            (text.replace("\"token\"", "\"coin\""), "token"),
        ] {
            let error = decode::<Bundle>(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
