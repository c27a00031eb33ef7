//! The model of placement as a replica holds it in memory and writes it to etcd: see `ec-replica`; and all of it as one document.

mod document;
mod keys;
mod recall;
pub mod transfer;

use ec_placement_model::ModelError;
pub use ec_replica::{Common, Limits, Model, Unavailable};

pub use self::keys::{Keys, Put};

/// The state of placement, as one replica serves it.
pub type Replica = ec_replica::Replica<Keys>;

/// Why a command was not carried out.
pub type WriteError = ec_replica::WriteError<ModelError>;
