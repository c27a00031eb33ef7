//! What a configuration says of an image store.

use std::path::{Path, PathBuf};

use ec_model::ImageId;
use object_store::path::Path as Key;
use serde::Deserialize;
use url::Url;

/// An image store as a configuration file has it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreSection {
    /// `file:///directory` or `s3://bucket/prefix`.
    pub url: Option<String>,
    /// Where S3 is spoken to, where that is not Amazon's.
    pub endpoint: Option<String>,
    /// S3's region.
    pub region: Option<String>,
    /// S3's access key.
    pub access_key: Option<String>,
    /// A file with the secret that belongs to it.
    pub secret_key_file: Option<PathBuf>,
}

/// What the object of that URL is called within a store. Either may be written in another form than URLs have, as a prefix with a space in
/// it: agents read the first, and what an earlier release recorded is as its store was written.
pub(super) fn object<'a>(store: &str, url: &'a str) -> Option<&'a str> {
    let (_, name) = url.rsplit_once('/')?;
    // Nothing else is ever called so, and no path leads out of it.
    name.parse::<ImageId>().ok()?;
    let of_store = Url::parse(&format!("{store}/{name}")).ok()?;
    (Url::parse(url).ok()? == of_store).then_some(name)
}

/// What was said, checked.
#[derive(Debug, Clone)]
pub(super) enum Settings {
    Directory(PathBuf),
    S3(S3Settings),
}

#[derive(Debug, Clone)]
pub(super) struct S3Settings {
    /// In the form that URLs have: agents of an earlier release know an object for one of the store by its text.
    pub(super) url: String,
    pub(super) bucket: String,
    /// Below which objects are, as a bucket knows it: no URL's escapes are in it.
    pub(super) prefix: Key,
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
    pub(super) keys: Option<(String, PathBuf)>,
}

impl StoreSection {
    /// The store where nothing is said.
    pub const DEFAULT_URL: &str = "file:///var/lib/ecompute/image-store";

    /// The URL that all objects' begin with, without a slash at its end.
    pub fn url(&self) -> &str {
        self.url.as_deref().unwrap_or(Self::DEFAULT_URL).trim_end_matches('/')
    }

    /// The image whose bytes are to lie at this URL, where that is one of the store.
    pub fn image(&self, url: &str) -> Option<ImageId> {
        object(self.url(), url)?.parse().ok()
    }

    /// The directory, where it is one.
    pub fn directory(&self) -> Option<PathBuf> {
        match self.settings() {
            Ok(Settings::Directory(directory)) => Some(directory),
            _ => None,
        }
    }

    /// The file with a secret in it.
    pub fn secret_file(&self) -> Option<&Path> {
        self.secret_key_file.as_deref()
    }

    /// The same; its paths are seen from where the configuration file is.
    pub fn seen_from(mut self, file: Option<&Path>) -> Self {
        if let (Some(directory), Some(path)) = (file.and_then(Path::parent), &mut self.secret_key_file) {
            *path = directory.join(&*path);
        }
        self
    }

    /// Says what is wrong with it, by the key below the section.
    ///
    /// # Errors
    /// What is wrong, and what would be right.
    pub fn check(&self) -> Result<(), String> {
        self.settings().map(drop)
    }

    pub(super) fn settings(&self) -> Result<Settings, String> {
        let text = self.url();
        let wanted = "wanted file:///directory or s3://bucket/prefix";
        let wrong = |why: &str| format!("url: `{text}` {why}: {wanted}");
        let url = Url::parse(text).map_err(|error| wrong(&format!("is no URL ({error})")))?;
        if url.query().is_some() || url.fragment().is_some() {
            return Err(wrong("has `?` or `#` in it, behind which nothing is of its place"));
        }
        match url.scheme() {
            "file" => {
                let only_s3 = [
                    ("endpoint", self.endpoint.is_some()),
                    ("region", self.region.is_some()),
                    ("access_key", self.access_key.is_some()),
                    ("secret_key_file", self.secret_key_file.is_some()),
                ];
                if let Some((key, _)) = only_s3.into_iter().find(|(_, said)| *said) {
                    return Err(format!("{key}: is of s3://, and the store is {text}"));
                }
                let path = url.to_file_path().map_err(|()| wrong("is on another host"))?;
                if path == Path::new("/") {
                    Err(wrong("is no directory of its own"))
                } else {
                    Ok(Settings::Directory(path))
                }
            }
            "s3" => {
                let bucket = url.host_str().filter(|bucket| !bucket.is_empty());
                let bucket = bucket.ok_or_else(|| wrong("names no bucket"))?.to_owned();
                if !url.username().is_empty() || url.password().is_some() || url.port().is_some() {
                    return Err(wrong("has more than a bucket and a prefix"));
                }
                let keys = match (&self.access_key, &self.secret_key_file) {
                    (Some(key), Some(file)) => Some((key.clone(), file.clone())),
                    (None, None) => None,
                    (Some(_), None) => return Err("secret_key_file: is missing beside access_key".to_owned()),
                    (None, Some(_)) => return Err("access_key: is missing beside secret_key_file".to_owned()),
                };
                if let Some(endpoint) = &self.endpoint
                    && !["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme))
                {
                    return Err(format!("endpoint: `{endpoint}` is no URL: wanted http://… or https://…"));
                }
                let segments: Vec<&str> = url.path().split('/').filter(|part| !part.is_empty()).collect();
                let prefix = Key::from_url_path(segments.join("/"))
                    .map_err(|error| wrong(&format!("has no prefix for objects ({error})")))?;
                Ok(Settings::S3(S3Settings {
                    url: url.as_str().trim_end_matches('/').to_owned(),
                    bucket,
                    prefix,
                    endpoint: self.endpoint.clone(),
                    region: self.region.clone(),
                    keys,
                }))
            }
            _ => Err(wrong("is no store")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ImageStore;

    fn section(url: &str) -> StoreSection {
        StoreSection { url: Some(url.to_owned()), ..StoreSection::default() }
    }

    #[test]
    fn a_store_is_a_directory_or_a_bucket_and_everything_else_is_told() {
        assert_eq!(section("file:///a/b/").directory(), Some(PathBuf::from("/a/b")));
        assert_eq!(StoreSection::default().directory(), Some("/var/lib/ecompute/image-store".into()));
        let Ok(Settings::S3(s3)) = section("s3://bucket/a/b/").settings() else { panic!() };
        assert_eq!(
            (s3.bucket.as_str(), s3.prefix.as_ref(), s3.url.as_str()),
            ("bucket", "a/b", "s3://bucket/a/b")
        );
        for url in ["s3://bucket/a%20b", "s3://Bucket_1/a~b/c", "file:///a b"] {
            assert_eq!(section(url).check(), Ok(()), "{url}");
        }
        assert!(section("s3://bucket").check().is_ok() && section("s3://bucket").directory().is_none());
        for (url, why) in [
            ("", "is no URL"),
            ("/var/images", "is no URL"),
            ("file://elsewhere/x", "on another host"),
            ("file:///", "no directory of its own"),
            ("http://host/x", "is no store"),
            ("s3:///x", "names no bucket"),
            ("s3://key:secret@bucket/x", "more than a bucket"),
            ("s3://bucket/a?b", "has `?`"),
            ("s3://bucket/a#b", "has `?` or `#`"),
            ("file:///a?b", "has `?`"),
        ] {
            let error = section(url).check().unwrap_err();
            assert!(error.starts_with("url: ") && error.contains(why), "{url}: {error}");
        }
    }

    #[test]
    fn a_prefix_is_the_same_in_whatever_form_it_is_written() {
        let id = "00000000-0000-0000-0000-000000000001";
        for (written, normal) in [
            ("s3://bucket/a b/", "s3://bucket/a%20b"),
            ("s3://bucket/ä", "s3://bucket/%C3%A4"),
            ("s3://bucket/{a}", "s3://bucket/%7Ba%7D"),
            ("s3://bucket/a/../b", "s3://bucket/b"),
            ("s3://bucket/b/..", "s3://bucket"),
        ] {
            let (Ok(Settings::S3(one)), Ok(Settings::S3(other))) =
                (section(written).settings(), section(normal).settings())
            else {
                panic!("{written}")
            };
            assert_eq!((one.url.as_str(), one.prefix), (normal, other.prefix));
            assert_eq!(ImageStore::open(&section(written)).unwrap().url(), normal, "what records will have");
            let urls = [format!("{}/{id}", section(written).url()), format!("{normal}/{id}")];
            for (store, url) in
                [written, normal].iter().flat_map(|store| urls.iter().map(move |url| (store, url)))
            {
                let image = section(store).image(url);
                assert_eq!(image, id.parse().ok(), "{url} in {store}");
            }
        }
        let Ok(Settings::S3(s3)) = section("s3://bucket/im ages//%C3%A4~").settings() else { panic!() };
        assert_eq!(s3.prefix.as_ref(), "im ages/ä~", "as others see it there");
        let error = section("s3://bucket/a%FF").check().unwrap_err();
        assert!(error.contains("has no prefix for objects"), "{error}");
        let store = section("s3://bucket/a");
        for other in [
            "s3://bucket/a/b",
            "s3://bucket",
            "s3://bucket/a%2Fb/..",
            "file:///a",
            "s3://bucket/a?",
            "s3://bucket/a/",
        ] {
            assert_eq!(store.image(&format!("{other}/{id}")), None, "{other}");
        }
        for name in ["", "x", "..", &format!("{id}?"), &format!("{id}/.")] {
            assert_eq!(store.image(&format!("s3://bucket/a/{name}")), None, "{name}");
        }
    }

    #[test]
    fn what_belongs_to_the_other_kind_of_store_or_is_half_is_told() {
        let key = || Some("key".to_owned());
        let s3 = || section("s3://bucket");
        for (section, why) in [
            (StoreSection { region: key(), ..section("file:///x") }, "region: "),
            (StoreSection { access_key: key(), ..s3() }, "secret_key_file: is missing"),
            (StoreSection { secret_key_file: Some("f".into()), ..s3() }, "access_key: is missing"),
            (StoreSection { endpoint: key(), ..s3() }, "endpoint: `key`"),
        ] {
            let error = section.check().unwrap_err();
            assert!(error.starts_with(why), "{error}");
        }
    }
}
