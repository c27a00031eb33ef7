//! Who is who in a cluster: its own certificate authority, the certificates of its parts, and the bundle by which one host
//! joins it.
//!
//! A certificate's common name is the user's name in etcd (`--client-cert-auth`), so that nobody needs a password: see
//! <https://etcd.io/docs/v3.5/op-guide/authentication/rbac/>, "Using TLS Common Name".

mod authority;
mod bundle;
mod certificate;
pub mod config;
mod files;
mod held;
mod pair;

pub use authority::{Authority, Issued, PkiError, is_same_authority};
pub use bundle::{Bundle, new_token};
pub use certificate::{Certificate, common_names, ended, endings, revoked_serials, write_ends};
pub use files::{Access, make_directory, write, write_new, write_pair};
pub use held::{create_held, directory, rename_new, sweep};
pub use pair::unfit;
