//! What a host is given to join the cluster.

use ec_model::NodeId;
use serde::{Deserialize, Serialize};

/// All that one host needs to be a node, and nothing that another could use. A secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bundle {
    /// Of which form it is; [`Bundle::VERSION`] where it is made.
    pub version: u32,
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

impl Bundle {
    /// The newest form that is understood.
    pub const VERSION: u32 = 1;

    /// Reads one.
    ///
    /// # Errors
    /// In one line, why it is none.
    pub fn read(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let head: Head = serde_json::from_str(text).map_err(|error| format!("it is no bundle: {error}"))?;
        if head.version > Self::VERSION {
            return Err(format!(
                "it is of a newer release (version {}): install that one here first",
                head.version
            ));
        }
        serde_json::from_str(text).map_err(|error| format!("it is damaged: {error}"))
    }

    /// As it is written.
    ///
    /// # Panics
    /// Never: its keys are text.
    #[expect(clippy::expect_used, reason = "texts and lists only")]
    pub fn text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a bundle is JSON");
        text.push('\n');
        text
    }
}

/// A new token: 256 random bits in hex.
pub fn new_token() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_reads_as_it_was_written_and_what_is_none_is_told() {
        let bundle = Bundle {
            version: Bundle::VERSION,
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
        assert_eq!(Bundle::read(&bundle.text()).unwrap(), bundle);
        for (text, why) in [
            (String::new(), "no bundle"),
            (bundle.text().replace("\"version\": 1", "\"version\": 2"), "newer release"),
            (bundle.text().replace("\"token\"", "\"coin\""), "damaged"),
        ] {
            let error = Bundle::read(&text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
