//! Where programs are: those that were built with the tests, and those of the release before.

use std::path::PathBuf;

use anyhow::{Result, ensure};

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

    /// Fails where the previous release was not built.
    pub fn both_are_there() -> Result<()> {
        let there =
            Self::Previous.program("ecompute").is_file() && std::env::var_os("EC_TEST_PREVIOUS").is_some();
        ensure!(there, "the previous release is not there: run scripts/upgrade-test.sh");
        Ok(())
    }

    /// One of its programs.
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
