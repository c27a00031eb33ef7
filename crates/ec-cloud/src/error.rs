//! Why a use-case failed, by what can be done about it.

use ec_model::RecordError;
use ec_placement_client::PlacementError;
use ec_runtime::exit::{FAILED, Failure, INTERRUPTED, UNREACHABLE, USAGE, chain};
use ec_store::StoreError;

/// Result of a use-case.
pub type CloudResult<T> = Result<T, CloudError>;

/// Why a use-case failed. The texts are whole: what was wrong, where, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum CloudError {
    /// etcd.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Placement.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// What was asked for cannot be.
    #[error("{0}")]
    Invalid(String),
    /// There is no such thing.
    #[error("{0}")]
    NotFound(String),
    /// A name is somebody else's.
    #[error("the name `{name}` is taken within project `{project}` by {by}")]
    Taken {
        /// The name.
        name: String,
        /// Within which it is unique.
        project: String,
        /// Who bears it.
        by: String,
    },
    /// Somebody else is at it at this moment.
    #[error("{0}")]
    Busy(String),
    /// It cannot be as things stand; nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// A record is of a newer release, or damaged; nothing was changed.
    #[error("{0}")]
    Unreadable(String),
    /// The instance is not in the state that was waited for, and will not be.
    #[error("{0}")]
    Elsewhere(String),
    /// It is not done in time, and goes on.
    #[error("{0}")]
    TimedOut(String),
    /// A service does not answer, and it is not known what was done.
    #[error("{0}")]
    Unavailable(String),
    /// Asked to end, before anything was requested.
    #[error("interrupted; nothing was requested")]
    Interrupted,
    /// Asked to end, when something was asked for that goes on.
    #[error("interrupted; {0}")]
    BrokenOff(String),
    /// One of these, and what came of it.
    #[error("{error}; {more}")]
    And {
        /// What failed.
        error: Box<Self>,
        /// What else is to be known.
        more: String,
    },
}

/// What can be done about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Ask for something else.
    Wrong,
    /// It cannot be as things are.
    Refused,
    /// Try again when the service is back.
    Unreachable,
    /// It was wished to end.
    Interrupted,
}

impl CloudError {
    /// What can be done about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Store(StoreError::Invalid(_))
            | Self::Placement(PlacementError::Invalid(_))
            | Self::Invalid(_) => Kind::Wrong,
            Self::Store(error) if error.is_transient() => Kind::Unreachable,
            Self::Placement(PlacementError::Unreachable { .. }) | Self::Unavailable(_) => Kind::Unreachable,
            Self::Interrupted | Self::BrokenOff(_) => Kind::Interrupted,
            Self::And { error, .. } => error.kind(),
            _ => Kind::Refused,
        }
    }

    /// Whether it came about elsewhere, so that whoever looks into it looks there: at a service that was asked, or a node.
    pub fn is_of_others(&self) -> bool {
        match self {
            Self::Store(_) | Self::Placement(_) => self.kind() != Kind::Wrong,
            Self::Elsewhere(_) | Self::TimedOut(_) | Self::Unavailable(_) => true,
            Self::And { error, .. } => error.is_of_others(),
            _ => false,
        }
    }

    /// The same, with what came of it.
    pub(crate) fn and(self, more: impl Into<String>) -> Self {
        Self::And { error: Box::new(self), more: more.into() }
    }
}

impl From<RecordError> for CloudError {
    fn from(error: RecordError) -> Self {
        Self::Unreadable(error.to_string())
    }
}

impl From<CloudError> for Failure {
    fn from(error: CloudError) -> Self {
        let code = match error.kind() {
            Kind::Wrong => USAGE,
            Kind::Refused => FAILED,
            Kind::Unreachable => UNREACHABLE,
            Kind::Interrupted => INTERRUPTED,
        };
        Self { code, message: chain(&error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_went_wrong_elsewhere_is_told_from_what_was_asked_for_wrongly() {
        let text = || "x".to_owned();
        let away = || PlacementError::Unreachable { endpoint: text(), detail: text() };
        for (error, wanted) in [
            (CloudError::Placement(away()), true),
            (CloudError::Placement(PlacementError::Invalid(text())), false),
            (CloudError::Placement(PlacementError::Conflict(text().into())), true),
            (CloudError::Store(StoreError::Unknown(text())), true),
            (CloudError::Store(StoreError::Invalid(text())), false),
            (CloudError::Elsewhere(text()), true),
            (CloudError::TimedOut(text()), true),
            (CloudError::Unavailable(text()), true),
            (CloudError::Refused(text()), false),
            (CloudError::Interrupted, false),
            (CloudError::Placement(away()).and("more"), true),
            (CloudError::Busy(text()).and("more"), false),
        ] {
            assert_eq!(error.is_of_others(), wanted, "{error:?}");
        }
    }
}
