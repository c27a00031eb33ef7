//! What can go wrong with an image, and whether trying again may help.

use std::{fmt, io, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use ec_runtime::may_pass;

use crate::Refusal;

/// A failed fetch. Everyone who waited for the same download gets the same error, so it can be cloned.
///
/// URLs in it are fit for logs: without user, password and query.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ImageError {
    /// The URL is of no kind that can be fetched.
    #[error("cannot fetch the image `{url}`: {why} (wanted `http://…`, `https://…` or `file:///…`)")]
    BadUrl {
        /// The URL.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The demanded digest is not one.
    #[error("`{text}` is not a {algorithm} in hex (wanted {digits} digits)")]
    BadDigest {
        /// What was demanded.
        text: String,
        /// As which digest.
        algorithm: &'static str,
        /// Of how many digits those are.
        digits: usize,
    },
    /// No connection, or one that broke before an answer came.
    #[error("cannot reach the origin of the image {url}")]
    Unreachable {
        /// The URL.
        url: String,
        /// What the HTTP client says.
        #[source]
        source: Arc<reqwest::Error>,
    },
    /// Not a byte came for too long.
    #[error("the origin of the image {url} stalled: nothing came for {after:?}")]
    Stalled {
        /// The URL.
        url: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// The origin answered, and not with the image.
    #[error("the origin of the image {url} answered with HTTP status {status}")]
    Status {
        /// The URL.
        url: String,
        /// The status code.
        status: u16,
    },
    /// The origin sends to where nothing is fetched from.
    #[error("the origin of the image {url} {how}")]
    Nowhere {
        /// The URL.
        url: String,
        /// To where, as [`crate::leads_nowhere`] tells it.
        how: String,
    },
    /// The origin sends from one place to the next.
    #[error("the origin of the image {url} redirects more than {limit} times")]
    TooManyRedirects {
        /// The URL.
        url: String,
        /// How many redirects are followed.
        limit: usize,
    },
    /// The request cannot be made, or its answer not be understood.
    #[error("the origin of the image {url} cannot be asked, or not be understood")]
    BadAnswer {
        /// The URL.
        url: String,
        /// What the HTTP client says.
        #[source]
        source: Arc<reqwest::Error>,
    },
    /// The connection ended before the image did.
    #[error("the image {url} came truncated: {received} bytes received{}", expected_text(*.expected))]
    Truncated {
        /// The URL.
        url: String,
        /// Bytes that came.
        received: u64,
        /// Bytes that were announced, where they were.
        expected: Option<u64>,
    },
    /// Other content than was demanded.
    #[error("the image {url} has {algorithm} {actual}, {expected} was demanded")]
    Checksum {
        /// The URL.
        url: String,
        /// Which digest.
        algorithm: &'static str,
        /// The digest demanded, in hex.
        expected: String,
        /// The digest found, in hex.
        actual: String,
    },
    /// What was refused not long ago, and its origin has still.
    #[error(
        "{why}: it came so not long ago, and what its server calls the same is fetched again {} minutes after that",
        kept.as_secs() / 60
    )]
    InVain {
        /// Why it was refused.
        why: Box<ImageError>,
        /// For how long it is not fetched again.
        kept: Duration,
    },
    /// What it is packed in is damaged, ends too early, or is not all.
    #[error(
        "the image {url} is packed with {packing} and cannot be unpacked: it is damaged, not whole, or something follows its end"
    )]
    Unpacking {
        /// The URL.
        url: String,
        /// With what.
        packing: &'static str,
        /// What the decoder says.
        #[source]
        source: Arc<io::Error>,
    },
    /// An image store cannot be asked, or does not give the image.
    #[error("the image store does not give the image {url}: {}", crate::store::told(answer))]
    Store {
        /// The URL.
        url: String,
        /// What the store says.
        answer: Arc<object_store::Error>,
    },
    /// What is configured as an image store is none.
    #[error("the image store of `images.store` cannot be used")]
    BadStore {
        /// Why not.
        #[source]
        source: Arc<crate::StoreFailure>,
    },
    /// The directory that is the image store has nothing in it.
    #[error(
        "the image {url} lies in an image store that is empty or missing on this node: it has to be the same directory on every host (is its file system mounted?), or a bucket"
    )]
    StoreAway {
        /// The URL.
        url: String,
    },
    /// An object of an image store that this node does not know.
    #[error(
        "the image {url} lies in an image store, and this node reads {}: `images.store` of compute.yaml names it",
        known.as_ref().map_or_else(|| "none".to_owned(), |known| format!("only {known}"))
    )]
    NoStore {
        /// The URL.
        url: String,
        /// The store that it knows.
        known: Option<String>,
    },
    /// The content is not a disk that can be used.
    #[error("the image {url} cannot be used")]
    Refused {
        /// The URL.
        url: String,
        /// Why not.
        #[source]
        refusal: Refusal,
    },
    /// The disk in it is bigger than what was allocated.
    #[error("the image {url} needs a disk of {}, DISK_GB allocated is {}", beyond(*.needed, *.allowed), Size(*.allowed))]
    VirtualSize {
        /// The URL.
        url: String,
        /// The size of the disk in it, in bytes; none where that is not known before all of it has come.
        needed: Option<u64>,
        /// The size allowed, in bytes.
        allowed: u64,
    },
    /// The image alone is bigger than the whole cache may be.
    #[error("an image of {} does not fit the image cache, which may hold {}: images.max_gb of compute.yaml is its bound", beyond(Some(*.size), *.max_bytes), Size(*.max_bytes))]
    TooBig {
        /// Size of the image, as far as known, in bytes.
        size: u64,
        /// Bound of the cache, in bytes.
        max_bytes: u64,
    },
    /// Everything in the cache is in use.
    #[error(
        "the image cache is full: {} more wanted, {} of {} held by images in use and what is being fetched: images.max_gb of \
         compute.yaml is its bound",
        Size(*.wanted), Size(*.held), Size(*.max_bytes)
    )]
    CacheFull {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes that cannot be evicted.
        held: u64,
        /// Bound of the cache, in bytes.
        max_bytes: u64,
    },
    /// The file system of the cache is full.
    #[error("no space left on the disk of the image cache at {path}", path = .path.display())]
    DiskFull {
        /// The file being written.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: Arc<io::Error>,
    },
    /// The cache's own files cannot be worked on.
    #[error("failed to {doing} {path}", path = .path.display())]
    Cache {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: Arc<io::Error>,
    },
    /// The file that a `file://` URL names cannot be read.
    #[error("cannot read the image file {path}", path = .path.display())]
    Local {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: Arc<io::Error>,
    },
    /// There is no such file, and nothing at all in the directory that it is to lie below.
    #[error(
        "there is no image file {path}, and {directory} of `images.local` is empty or missing on this node: is its file system mounted?",
        path = .path.display(), directory = .directory.display()
    )]
    LocalAway {
        /// The file.
        path: PathBuf,
        /// The directory.
        directory: PathBuf,
    },
    /// A `file://` URL names something that is not a file.
    #[error("the image {path} is not a regular file", path = .path.display())]
    NotAFile {
        /// What the URL names.
        path: PathBuf,
    },
    /// A `file://` URL names what this host gives nobody.
    #[error(
        "the image file {path} lies below none of the directories that this node gives images from: name its directory in `images.local` of compute.yaml",
        path = .path.display()
    )]
    NotLocal {
        /// What the URL names.
        path: PathBuf,
    },
    /// A `file://` URL leads through a link.
    #[error("the image file {path} lies behind a symbolic link or `..`, and neither is followed below `images.local`", path = .path.display())]
    Link {
        /// What the URL names.
        path: PathBuf,
    },
    /// A URL, or what it redirects to, leads to this host itself.
    #[error(
        "the image {url} leads to {ip}, and this node fetches nothing from loopback and link-local addresses \
         unless `images.allow_addresses` of compute.yaml names them"
    )]
    Forbidden {
        /// The URL.
        url: String,
        /// Where it leads.
        ip: IpAddr,
    },
    /// A redirect leads from `https://` to `http://`.
    #[error("the origin of the image {url} redirects from https:// to http://, which is not followed")]
    Downgrade {
        /// The URL.
        url: String,
    },
    /// Another cache has the directory.
    #[error(
        "another agent has the image cache at {directory}: give each agent of a host its own `images.directory`",
        directory = .directory.display()
    )]
    InUse {
        /// The cache's directory.
        directory: PathBuf,
    },
    /// Too little came for too long.
    #[error(
        "the origin of the image {url} {}: {bytes} bytes came within {window:?}{}",
        if *.others_wait { "is slow" } else { "stalled" }, if *.others_wait { ", and other images waited for their turn" } else { "" }
    )]
    Crawl {
        /// The URL.
        url: String,
        /// What came.
        bytes: u64,
        /// Within how long.
        window: Duration,
        /// Whether other images waited for their turn, for whom more was to come.
        others_wait: bool,
    },
    /// The file was written to while it was being copied.
    #[error("the image file {path} changed while it was being copied", path = .path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The HTTP client cannot be made.
    #[error("failed to set up the HTTP client")]
    Client {
        /// What the HTTP client says.
        #[source]
        source: Arc<reqwest::Error>,
    },
    /// The work ended without an outcome: the program is shutting down.
    #[error("fetching the image was interrupted")]
    Interrupted,
}

impl ImageError {
    /// Whether the same fetch may succeed later with nothing changed by the user.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Stalled { .. }
            | Self::Crawl { .. }
            | Self::Truncated { .. }
            | Self::Changed { .. }
            | Self::CacheFull { .. }
            | Self::DiskFull { .. }
            | Self::StoreAway { .. }
            | Self::LocalAway { .. }
            | Self::Interrupted => true,
            Self::Status { status, .. } => matches!(status, 408 | 429 | 500..),
            // What is wrong with our rights there, or with the name, another time does not mend.
            Self::Store { answer, .. } => matches!(**answer, object_store::Error::Generic { .. }),
            Self::Local { source, .. } | Self::Cache { source, .. } => may_pass(source),
            _ => false,
        }
    }

    /// Whether it is the way to the origin that failed, so that asking again goes on where it ended.
    pub(crate) fn is_of_the_way(&self) -> bool {
        let here = matches!(
            self,
            Self::Changed { .. }
                | Self::Cache { .. }
                | Self::CacheFull { .. }
                | Self::DiskFull { .. }
                | Self::Interrupted
        );
        self.is_transient() && !here
    }

    /// Whether the origin never came to speak: a cached copy may serve then.
    pub(crate) fn origin_is_away(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Stalled { .. } | Self::Crawl { .. } => true,
            // A gateway speaks for an origin that it cannot reach.
            Self::Status { status, .. } => matches!(status, 502..=504),
            _ => false,
        }
    }

    pub(crate) fn cache(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path, source: Arc::new(source) }
            }
            _ => Self::Cache { doing, path, source: Arc::new(source) },
        }
    }
}

/// A size that is larger than a bound: what both would read alike is more than that.
fn beyond(size: Option<u64>, bound: u64) -> String {
    let bound = Size(bound).to_string();
    let told = size.map(|size| Size(size).to_string()).filter(|told| *told != bound);
    told.unwrap_or_else(|| format!("more than {bound}"))
}

fn expected_text(expected: Option<u64>) -> String {
    expected.map(|bytes| format!(" of {bytes}")).unwrap_or_default()
}

/// Bytes, as people read them: `3.0 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} bytes", self.0);
        }
        let mut unit = 0;
        // Tenths in integers, so that no number is too big to print.
        let mut tenths = u128::from(self.0) * 10 / 1024;
        while tenths >= 10_240 && unit + 1 < UNITS.len() {
            tenths /= 1024;
            unit += 1;
        }
        write!(f, "{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            (3 << 30, "3.0 GiB"),
            ((3 << 30) + (1 << 29), "3.5 GiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn a_file_that_is_not_there_stays_away_and_one_whose_disk_is_in_trouble_may_come_back() {
        for (errno, transient) in [(Errno::ENOENT, false), (Errno::ESTALE, true)] {
            let source = Arc::new(io::Error::from(errno));
            let error = ImageError::Local { path: "/srv/x".into(), source };
            assert_eq!(error.is_transient(), transient, "{errno}");
        }
    }

    #[test]
    fn who_is_ended_for_others_is_told_so() {
        let crawl = |others_wait| {
            let (url, bytes, window) =
                ("http://host/disk".to_owned(), 70_000, std::time::Duration::from_secs(60));
            ImageError::Crawl { url, bytes, window, others_wait }.to_string()
        };
        let came = "70000 bytes came within 60s";
        assert_eq!(crawl(false), format!("the origin of the image http://host/disk stalled: {came}"));
        let slow = format!(
            "the origin of the image http://host/disk is slow: {came}, and other images waited for their turn"
        );
        assert_eq!(crawl(true), slow);
    }

    #[test]
    fn an_image_too_big_for_its_disk_says_both_sizes() {
        for (needed, told) in [
            (Some(3 << 30), "3.0 GiB"),
            // They would read alike.
            (Some((1 << 30) + 512), "more than 1.0 GiB"),
            (None, "more than 1.0 GiB"),
        ] {
            let error = ImageError::VirtualSize { url: "file:///x".into(), needed, allowed: 1 << 30 };
            assert_eq!(
                error.to_string(),
                format!("the image file:///x needs a disk of {told}, DISK_GB allocated is 1.0 GiB")
            );
            assert!(!error.is_transient());
        }
        let text = ImageError::TooBig { size: (2 << 30) + 1, max_bytes: 2 << 30 }.to_string();
        assert!(text.starts_with("an image of more than 2.0 GiB does not fit"), "{text}");
    }
}
