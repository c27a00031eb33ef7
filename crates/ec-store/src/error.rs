//! What can go wrong with a store, by what the caller can do about it.

use ec_runtime::exit::{FAILED, Failure, UNREACHABLE, USAGE, chain};

use crate::{LeaseId, Revision, types::GIVES_SPACE};

/// Result of a store operation.
pub type StoreResult<T> = Result<T, StoreError>;

/// What went wrong. The texts are fragments that fit behind "failed to …:".
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The store was not reached, and the operation has certainly not happened: try again.
    #[error("etcd is not reachable at {endpoints}: {detail}")]
    Unreachable {
        /// Where it was looked for.
        endpoints: String,
        /// The transport's own words, with their causes.
        detail: String,
    },
    /// The connection broke or time ran out after the request was sent: a write may have happened.
    #[error("etcd did not answer, so the outcome is unknown: {0}")]
    Unknown(String),
    /// There is no space for a write. It has come to its end, and was done if it was the one with which the space ended: etcd looks
    /// at its quota before it applies a change, and says so afterwards.
    #[error(
        "etcd has no space left, and may have made this change all the same: {0}; what helps: {GIVES_SPACE}"
    )]
    Full(String),
    /// History from the wanted revision on is gone; list again.
    #[error("revision {wanted} is compacted, history begins at {first}")]
    Compacted {
        /// The revision asked for.
        wanted: Revision,
        /// The first one still there.
        first: Revision,
    },
    /// The lease has expired or was revoked.
    #[error("lease {:x} is gone", .0.0)]
    LeaseLost(LeaseId),
    /// The server refused: credentials, permissions, size limits.
    #[error("etcd refused: {0}")]
    Refused(String),
    /// The settings of the connection are wrong: a certificate file, an endpoint's form.
    #[error("{0}")]
    Invalid(String),
}

impl StoreError {
    /// Whether trying the same again later may help.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Unknown(_))
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let code = match &error {
            StoreError::Invalid(_) => USAGE,
            error if error.is_transient() => UNREACHABLE,
            _ => FAILED,
        };
        Self { code, message: chain(&error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_failure_has_its_code() {
        let unreachable = StoreError::Unreachable { endpoints: "x".into(), detail: "y".into() };
        assert_eq!(Failure::from(unreachable).code, UNREACHABLE);
        assert_eq!(Failure::from(StoreError::Invalid("x".into())).code, USAGE);
        assert_eq!(Failure::from(StoreError::Refused("x".into())).code, FAILED);
    }
}
