//! Where programs are: those that were built with the tests, and those of the release before.

use std::path::PathBuf;

/// Whose programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Those of this checkout.
    This,
    /// Those that `scripts/upgrade-test.sh` built; only its tests ask for them.
    Previous,
}

impl Release {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Previous, Self::This];

    /// One of its programs. Where it is not there, its start fails and says so.
    pub fn program(self, name: &str) -> PathBuf {
        match self {
            Self::This => program(name),
            Self::Previous => {
                PathBuf::from(std::env::var_os("EC_TEST_PREVIOUS").unwrap_or_default()).join(name)
            }
        }
    }

    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::This => Self::Previous,
            Self::Previous => Self::This,
        }
    }
}

/// Beside our own executable, or above it where that is a test: where cargo puts every program.
pub fn program(name: &str) -> PathBuf {
    let me = std::env::current_exe().unwrap_or_default();
    me.ancestors()
        .skip(1)
        .map(|directory| directory.join(name))
        .find(|path| path.exists())
        .unwrap_or_default()
}
