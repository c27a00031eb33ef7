//! Image cache: fetch, verify, tell the format, evict.
//!
//! An agent asks [`ImageCache::fetch`] for an image and gets a [`CachedImage`]: a read-only base that
//! overlays can lie on, held by a pin for as long as the value lives.
//!
//! ```text
//! <directory>/lock                         held while the cache is open: a directory has one cache at a time
//! <directory>/base/<sha256>.<qcow2|raw>    content-addressed, mode 0444 in a directory 0711, never replaced
//! <directory>/index/<sha256 of url>.json   what a URL gave last, and how to ask whether it changed
//! <directory>/tmp/                         downloads under way; swept when the cache is opened
//! ```
//!
//! Where images may come from is the caller's to say ([`CacheConfig::local`], [`CacheConfig::allow_addresses`]):
//! whoever may ask for an image must not read this host's files or speak to its own services by it ([`access`]).
//!
//! One download serves everyone who asks for the same image while it runs ([`flight`]). The async side
//! only moves bytes; a thread of its own writes, hashes and checks them ([`landing`]), and dropping the
//! download at any moment makes that thread remove what it wrote. Nothing reaches `base/` before it is
//! whole, has the digest that was demanded, and is a disk that can be an overlay's base ([`inspect`]).
//!
//! A base that was used longest ago goes first when room is needed; one that is pinned, or that the
//! caller says an overlay lies on, never goes. When a base was last used is its modification time.
//!
//! What is deliberately not here: overlays, and anything about libvirt. The library never runs a
//! program on an image: what it refuses, qemu never sees.

mod access;
mod cache;
mod error;
mod flight;
mod foreign;
mod http;
mod index;
mod inspect;
mod landing;
mod local;
mod probe;
mod qcow2;
mod shelf;
mod source;
mod space;
mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod tries;
mod turns;
mod unpack;
mod vain;

pub use cache::{CacheConfig, CachedImage, ImageCache};
pub use error::{ImageError, Size};
pub use http::leads_nowhere;
pub use index::FileStamp;
pub use inspect::{HEADER_LEN, InspectError, Inspected, Refusal, inspect, inspect_file, stands_on};
pub use probe::{Probe, ProbeFailure, Probed};
pub use store::{ImageStore, Sending, StoreFailure, StoreSection};
pub use unpack::Packing;
