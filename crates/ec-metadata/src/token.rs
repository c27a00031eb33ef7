//! Session tokens of the EC2 tree (IMDSv2).
//!
//! A token is its own proof: the time it ends and a signature over that and the instance. Nothing has to
//! be remembered, so nothing grows. The secret is new with each start; guests then get a 401 and ask for
//! another token, as they do when one has ended.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use ec_model::InstanceId;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

const EXPIRY_LEN: usize = 8;

/// The block of SHA-256: a key of this length is used as it is.
const SECRET_LEN: usize = 64;

pub(crate) struct Tokens {
    secret: [u8; SECRET_LEN],
}

impl Tokens {
    pub(crate) fn new() -> Self {
        Self { secret: rand::random() }
    }

    /// A token for the instance that ends at `expires`, in seconds since the epoch.
    pub(crate) fn issue(&self, instance: InstanceId, expires: i64) -> String {
        let mut token = expires.to_be_bytes().to_vec();
        token.extend(self.sign(instance, &token).finalize().into_bytes());
        BASE64_URL_SAFE_NO_PAD.encode(token)
    }

    /// Whether the token is one of ours, for this instance, and has not ended at `now`.
    pub(crate) fn holds(&self, instance: InstanceId, token: &[u8], now: i64) -> bool {
        let Ok(bytes) = BASE64_URL_SAFE_NO_PAD.decode(token) else { return false };
        let Some((expiry, signature)) = bytes.split_first_chunk::<EXPIRY_LEN>() else { return false };
        self.sign(instance, expiry).verify_slice(signature).is_ok() && now < i64::from_be_bytes(*expiry)
    }

    fn sign(&self, instance: InstanceId, expiry: &[u8]) -> Hmac<Sha256> {
        Hmac::<Sha256>::new(&self.secret.into()).chain_update(instance.uuid().as_bytes()).chain_update(expiry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_holds_for_its_instance_until_it_ends() {
        let (own, other) = ("7d3c1f0a-2b4e-4c55-9a7e-000000000001", "7d3c1f0a-2b4e-4c55-9a7e-000000000002");
        let (own, other) = (own.parse().unwrap(), other.parse().unwrap());
        let tokens = Tokens::new();
        let token = tokens.issue(own, 100);
        assert!(tokens.holds(own, token.as_bytes(), 99));
        assert!(!tokens.holds(own, token.as_bytes(), 100), "it has ended");
        assert!(!tokens.holds(other, token.as_bytes(), 99), "it is another's");
        assert!(!Tokens::new().holds(own, token.as_bytes(), 99), "it is from before a restart");
        for bad in ["", "AAAA", &token[..token.len() - 1], &format!("{token}A"), "not base64!"] {
            assert!(!tokens.holds(own, bad.as_bytes(), 99), "{bad}");
        }
    }
}
