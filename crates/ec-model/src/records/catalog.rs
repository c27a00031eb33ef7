//! What users give names to, so that they need not say it each time.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A placement query that has a name. What an instance was made with is copied into its [`crate::Spec`], so that nothing
/// hangs on the flavor afterwards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flavor {
    /// The name, in the letters that it was given in.
    pub name: String,
    /// What is asked of placement.
    pub query: String,
    /// When it was made.
    pub created_at: Timestamp,
}

/// Public keys that have a name within a project. Like a [`Flavor`]'s query they are copied where they are used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keypair {
    /// The name, in the letters that it was given in.
    pub name: String,
    /// The project whose it is.
    pub project: String,
    /// Public keys in OpenSSH's form.
    pub keys: Vec<String>,
    /// When it was made.
    pub created_at: Timestamp,
}
