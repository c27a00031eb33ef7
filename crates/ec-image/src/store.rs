//! The image store: where bytes lie that were sent to us. A directory, or a bucket of S3.
//!
//! Each object is called by its image's uuid, and is never changed. Who sends one writes the image's record first, so that
//! what a killed command leaves is found by it. Whoever reads demands the digest that the record has.
//!
//! Only what lies below the URL that the configuration names is read or written: our rights there are not those of whoever
//! names an image.

mod bucket;
mod fetch;
mod objects;
mod section;
mod sending;

pub(crate) use fetch::bring;
pub(crate) use objects::told;
pub use objects::{ImageStore, StoreFailure};
pub use section::StoreSection;
pub use sending::Sending;
