//! Who may come to placement.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::NodeId;

/// Whom a token of placement lets in. Its key ends with the token's digest ([`token_digest`]): the token itself is nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// Who it is, for people; a node's name, where it is a node's.
    pub name: String,
    /// The one resource provider that it may change, with what is used of it; none where it is nobody's agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<NodeId>,
}

/// SHA-256 of a token in hex, as it is kept.
pub fn token_digest(token: &str) -> String {
    Sha256::digest(token.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_that_of_sha256sum() {
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(token_digest("abc"), digest);
    }
}
