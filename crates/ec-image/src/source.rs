//! Where an image comes from: its URL, told apart and made fit for logs.

use std::path::PathBuf;

use ec_model::{
    ImageRef,
    input::{is_sha256, is_sha512},
};
use url::Url;

use crate::ImageError;

/// What is wanted, checked.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) source: Source,
    /// The URL without secrets.
    pub(crate) label: String,
    /// The digests demanded, in lower case.
    pub(crate) sha256: Option<String>,
    pub(crate) sha512: Option<String>,
}

#[derive(Debug, Clone)]
pub(crate) enum Source {
    Http(Url),
    File {
        url: Url,
        path: PathBuf,
    },
    /// Of an image store.
    Object(Url),
}

impl Source {
    pub(crate) fn url(&self) -> &Url {
        match self {
            Self::Http(url) | Self::File { url, .. } | Self::Object(url) => url,
        }
    }
}

impl Wanted {
    pub(crate) fn parse(image: &ImageRef) -> Result<Self, ImageError> {
        let bad = |url: String, why: &str| ImageError::BadUrl { url, why: why.to_owned() };
        let label = image.told();
        let url = Url::parse(&image.url).map_err(|error| bad(label.clone(), &error.to_string()))?;
        let source = match url.scheme() {
            "http" | "https" => Source::Http(url),
            "file" => {
                let path = url
                    .to_file_path()
                    .map_err(|()| bad(label.clone(), "a file on another host cannot be read"))?;
                Source::File { url, path }
            }
            "s3" => Source::Object(url),
            scheme => return Err(bad(label.clone(), &format!("`{scheme}` is not supported"))),
        };
        let sha256 = digest(image.sha256.as_deref(), "SHA-256", 64, is_sha256)?;
        let sha512 = digest(image.sha512.as_deref(), "SHA-512", 128, is_sha512)?;
        Ok(Self { source, label, sha256, sha512 })
    }

    /// Whether it is the same from the same place.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let of = |it: &Self| (it.source.url().clone(), it.sha256.clone(), it.sha512.clone());
        of(self) == of(other)
    }
}

fn digest(
    text: Option<&str>,
    algorithm: &'static str,
    digits: usize,
    is_one: fn(&str) -> bool,
) -> Result<Option<String>, ImageError> {
    match text {
        Some(text) if !is_one(text) => {
            Err(ImageError::BadDigest { text: text.chars().take(80).collect(), algorithm, digits })
        }
        text => Ok(text.map(str::to_ascii_lowercase)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str, sha256: Option<&str>) -> Result<Wanted, ImageError> {
        Wanted::parse(&ImageRef { sha256: sha256.map(Into::into), ..ImageRef::at(url) })
    }

    #[test]
    fn other_kinds_of_url_are_refused_with_what_would_be_right() {
        for (url, wanted) in [
            ("ftp://host/x", "`ftp` is not supported"),
            ("debian.qcow2", "relative URL"),
            ("", "relative URL"),
            ("file://elsewhere/x", "another host"),
            ("http://", "empty host"),
        ] {
            let error = parse(url, None).unwrap_err().to_string();
            assert!(error.contains(wanted) && error.contains("file:///"), "{url}: {error}");
        }
    }

    #[test]
    fn secrets_in_urls_never_show() {
        let wanted = parse("https://user:secret@host:8443/disk.qcow2?sig=secret#secret", None).unwrap();
        assert_eq!(wanted.label, "https://host:8443/disk.qcow2?…");
        let error = parse("ftp://user:secret@host/x", None).unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
        let error = parse("http://user:secret@host:port/x", None).unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn a_digest_is_64_digits_of_either_case() {
        let digest = "A".repeat(64);
        assert_eq!(parse("file:///x", Some(&digest)).unwrap().sha256, Some("a".repeat(64)));
        for bad in ["", "abc", &"g".repeat(64), &format!("../{}", "a".repeat(61))] {
            assert!(matches!(parse("file:///x", Some(bad)), Err(ImageError::BadDigest { .. })), "{bad}");
        }
    }
}
