//! What the Placement API answers when it does not do what was asked.

use ec_runtime::exit::{FAILED, Failure, UNREACHABLE, USAGE, chain};

/// Result of a placement operation.
pub type PlacementResult<T> = Result<T, PlacementError>;

/// Why a placement operation failed, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// No usable answer: not there, broken off, or a server error. What a write did is unknown.
    #[error("placement is not reachable at {endpoint}: {detail}")]
    Unreachable {
        /// Where it was looked for.
        endpoint: String,
        /// The transport's own words, or the server's status.
        detail: String,
    },
    /// Somebody else changed what this write was based on: read again and decide again.
    #[error("placement refused because of a concurrent change: {0}")]
    Conflict(Conflict),
    /// There is no such thing.
    #[error("placement knows no {0}")]
    NotFound(String),
    /// The token is wrong or lacks a role.
    #[error("placement at {endpoint} refuses the token (HTTP {status}): check `{setting}`")]
    Denied {
        /// Where it was asked.
        endpoint: String,
        /// 401 or 403.
        status: u16,
        /// Where the token comes from.
        setting: String,
    },
    /// The server's API is older than what must be done needs.
    #[error(
        "placement at {endpoint} speaks only up to version 1.{speaks}, and the oldest that serves is 1.{oldest} (OpenStack Rocky): update it, or use eplacement"
    )]
    TooOld {
        /// Where it was asked.
        endpoint: String,
        /// The newest minor version that it speaks.
        speaks: u32,
        /// The oldest that would do.
        oldest: u32,
    },
    /// The request itself is wrong.
    #[error("placement refused the request: {0}")]
    Refused(String),
    /// The name belongs to another provider.
    #[error(
        "the name `{name}` belongs to resource provider {owner}, not to this node {node}: set another `name`; only where no agent is alive that is {owner} (`eschedule nodes`), `uuid: {owner}` takes it over, or `eschedule node forget` deletes that provider, where its node will never come back"
    )]
    NameTaken {
        /// The name.
        name: String,
        /// The uuid that has it.
        owner: String,
        /// The uuid that wanted it.
        node: String,
    },
    /// The settings are wrong.
    #[error("{0}")]
    Invalid(String),
}

/// What a write met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// In the server's words.
    pub why: String,
    /// Whether what was asked for was looked at and does not fit: there is no such room. Otherwise something is not as the write says;
    /// of a claim for a consumer that must not exist, perhaps that it does, by this very claim: what lies in between may have sent it
    /// twice, when the first answer was lost.
    pub does_not_fit: bool,
}

impl From<String> for Conflict {
    fn from(why: String) -> Self {
        Self { why, does_not_fit: false }
    }
}

impl std::fmt::Display for Conflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.why)
    }
}

impl PlacementError {
    /// Whether trying the same again later may help.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Conflict(_))
    }
}

impl From<PlacementError> for Failure {
    fn from(error: PlacementError) -> Self {
        let code = match &error {
            PlacementError::Invalid(_) => USAGE,
            PlacementError::Unreachable { .. } => UNREACHABLE,
            _ => FAILED,
        };
        Self { code, message: chain(&error) }
    }
}
