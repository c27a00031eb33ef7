//! Distributions that are known by name: where their images for clouds are, and where the digests of these are published.
//!
//! What is known is where to look. The digest is read when an image is added, over HTTPS, and stands in its record.

use std::collections::BTreeMap;

use ec_model::{
    ImageRef,
    input::{is_sha256, is_sha512},
};

/// An image of a distribution. Paths are seen from the distribution's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    /// What it is called: the distribution, a colon, the release.
    pub(crate) name: &'static str,
    path: &'static str,
    /// The file of digests.
    sums: &'static str,
}

/// Where each distribution publishes.
const PLACES: [(&str, &str); 5] = [
    ("alpine", "https://dl-cdn.alpinelinux.org/alpine"),
    ("cirros", "https://download.cirros-cloud.net"),
    ("debian", "https://cloud.debian.org/images/cloud"),
    ("fedora", "https://dl.fedoraproject.org/pub/fedora/linux/releases"),
    ("ubuntu", "https://cloud-images.ubuntu.com/releases"),
];

/// The newest release of each distribution comes first.
const KNOWN: [Known; 11] = [
    Known {
        name: "alpine:3.22",
        path: "v3.22/releases/cloud/generic_alpine-3.22.2-x86_64-bios-cloudinit-r0.qcow2",
        sums: "v3.22/releases/cloud/generic_alpine-3.22.2-x86_64-bios-cloudinit-r0.qcow2.sha512",
    },
    Known {
        name: "alpine:3.20",
        path: "v3.20/releases/cloud/generic_alpine-3.20.10-x86_64-bios-cloudinit-r0.qcow2",
        sums: "v3.20/releases/cloud/generic_alpine-3.20.10-x86_64-bios-cloudinit-r0.qcow2.sha512",
    },
    Known { name: "cirros:0.6.3", path: "0.6.3/cirros-0.6.3-x86_64-disk.img", sums: "0.6.3/SHA256SUMS" },
    Known { name: "cirros:0.6.2", path: "0.6.2/cirros-0.6.2-x86_64-disk.img", sums: "0.6.2/SHA256SUMS" },
    Known {
        name: "debian:13",
        path: "trixie/latest/debian-13-genericcloud-amd64.qcow2",
        sums: "trixie/latest/SHA512SUMS",
    },
    Known {
        name: "debian:12",
        path: "bookworm/latest/debian-12-genericcloud-amd64.qcow2",
        sums: "bookworm/latest/SHA512SUMS",
    },
    Known {
        name: "fedora:44",
        path: "44/Cloud/x86_64/images/Fedora-Cloud-Base-Generic-44-1.7.x86_64.qcow2",
        sums: "44/Cloud/x86_64/images/Fedora-Cloud-44-1.7-x86_64-CHECKSUM",
    },
    Known {
        name: "fedora:43",
        path: "43/Cloud/x86_64/images/Fedora-Cloud-Base-Generic-43-1.6.x86_64.qcow2",
        sums: "43/Cloud/x86_64/images/Fedora-Cloud-43-1.6-x86_64-CHECKSUM",
    },
    Known {
        name: "fedora:42",
        path: "42/Cloud/x86_64/images/Fedora-Cloud-Base-Generic-42-1.1.x86_64.qcow2",
        sums: "42/Cloud/x86_64/images/Fedora-Cloud-42-1.1-x86_64-CHECKSUM",
    },
    Known {
        name: "ubuntu:24.04",
        path: "noble/release/ubuntu-24.04-server-cloudimg-amd64.img",
        sums: "noble/release/SHA256SUMS",
    },
    Known {
        name: "ubuntu:22.04",
        path: "jammy/release/ubuntu-22.04-server-cloudimg-amd64.img",
        sums: "jammy/release/SHA256SUMS",
    },
];

/// The image that is called so: by its whole name, or by its distribution alone. Between that and the release people write `@`, `-`
/// or nothing, too.
pub(crate) fn known(name: &str) -> Option<Known> {
    let name = name.to_ascii_lowercase();
    let (distribution, release) = parts(&name)?;
    KNOWN.into_iter().find(|known| {
        let newest_or_that = release.is_none_or(|(_, release)| release == known.release());
        known.distribution() == distribution && newest_or_that
    })
}

/// What releases there are of the distribution of which a word names another.
pub(crate) fn others(name: &str) -> Option<String> {
    let name = name.to_ascii_lowercase();
    let (distribution, release) = parts(&name)?;
    let (separator, release) = release?;
    // What else may be behind it is a file's name.
    let is_number = release.chars().all(|c| c.is_ascii_digit() || c == '.');
    let is_release = is_number || (matches!(separator, ":" | "@") && !release.contains(['/', '.']));
    if release.is_empty() || !is_release || known(&name).is_some() {
        return None;
    }
    let known = KNOWN.iter().filter(|known| known.distribution() == distribution);
    Some(known.map(|known| known.name).collect::<Vec<_>>().join(", "))
}

/// The distribution with which a word begins, and the release behind it, with what stands between.
fn parts(name: &str) -> Option<(&str, Option<(&str, &str)>)> {
    let (distribution, _) = PLACES.iter().find(|(distribution, _)| name.starts_with(distribution))?;
    let (distribution, rest) = name.split_at(distribution.len());
    let release = rest.trim_start_matches([':', '@', '-']);
    let (separator, release) = rest.split_at(rest.len() - release.len());
    let release = match (separator.len(), release) {
        (0, "") => None,
        // Another word, which only begins alike.
        (0, release) if !release.starts_with(|c: char| c.is_ascii_digit()) => return None,
        (0 | 1, release) => Some((separator, release)),
        _ => return None,
    };
    Some((distribution, release))
}

/// All names, in a line.
pub(crate) fn names() -> String {
    KNOWN.map(|known| known.name).join(", ")
}

/// Whether there is such a distribution.
pub(crate) fn is_distribution(name: &str) -> bool {
    PLACES.iter().any(|(distribution, _)| *distribution == name)
}

/// The distribution that a name of an image, or of a file with one, tells of: with a word of it.
pub(crate) fn distribution(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let mut words = name.split(|c: char| !c.is_ascii_alphanumeric());
    words.find_map(|word| PLACES.iter().map(|(distribution, _)| *distribution).find(|known| *known == word))
}

impl Known {
    fn distribution(&self) -> &'static str {
        self.name.split(':').next().unwrap_or_default()
    }

    /// Whether that is its name, or its distribution's, as we write it.
    pub(crate) fn is_called(&self, text: &str) -> bool {
        [self.name, self.distribution()].iter().any(|name| name.eq_ignore_ascii_case(text))
    }

    fn release(&self) -> &'static str {
        self.name.split(':').nth(1).unwrap_or_default()
    }

    /// Where it is fetched from, of a mirror where one is configured for its distribution; and where its digest is.
    pub(crate) fn urls(&self, mirrors: &BTreeMap<String, String>) -> (String, String) {
        let official = PLACES.iter().find(|(distribution, _)| *distribution == self.distribution());
        let place = mirrors.get(self.distribution()).map(String::as_str);
        let place = place.or(official.map(|(_, place)| *place)).unwrap_or_default().trim_end_matches('/');
        (format!("{place}/{}", self.path), format!("{place}/{}", self.sums))
    }

    /// The image, by a published file of digests.
    pub(crate) fn image(&self, url: String, sums: &str) -> Option<ImageRef> {
        let file = self.path.rsplit('/').next().unwrap_or_default();
        let digest = digest_of(file, sums)?.to_ascii_lowercase();
        let (sha256, sha512) = if is_sha256(&digest) { (Some(digest), None) } else { (None, Some(digest)) };
        Some(ImageRef { sha256, sha512, ..ImageRef::at(url) })
    }
}

/// The SHA-256 or SHA-512 of a file, in one of the forms in which they are published: a line of `sha256sum`; a line of
/// BSD's tools, which is signed or not; or the digest and nothing else.
fn digest_of<'a>(file: &str, sums: &'a str) -> Option<&'a str> {
    let is_digest = |word: &&str| is_sha256(word) || is_sha512(word);
    let named = sums.lines().find_map(|line| {
        if let Some((what, digest)) = line.split_once(" = ") {
            let name = what.split_once(" (").and_then(|(_, name)| name.strip_suffix(')'));
            return Some(digest.trim()).filter(|_| name == Some(file));
        }
        let (digest, name) = line.split_once(char::is_whitespace)?;
        let name = name.trim().trim_start_matches('*').trim_start_matches("./");
        Some(digest).filter(|_| name == file)
    });
    let alone = Some(sums.trim()).filter(|text| !text.contains(char::is_whitespace));
    named.or(alone).filter(is_digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_has_a_place_and_is_called_by_its_distribution_and_release() {
        for it in KNOWN {
            assert_eq!(known(it.name), Some(it));
            assert!(ec_model::input::image_name(it.name).is_ok());
            let (url, sums) = it.urls(&BTreeMap::new());
            assert!(url.starts_with("https://") && sums.starts_with("https://"), "{url}");
            assert!(url.contains(it.name.split(':').nth(1).unwrap()), "{url}");
            // Those look for no metadata service.
            assert!(!url.contains("nocloud"), "{url}");
        }
        for (distribution, place) in PLACES {
            assert!(!place.ends_with('/') && is_distribution(distribution));
            assert_eq!(known(distribution).unwrap().distribution(), distribution);
        }
        assert_eq!(known("Debian").unwrap().name, "debian:13", "the newest");
        for (text, name) in [
            ("alpine@3.20", "alpine:3.20"),
            ("debian-12", "debian:12"),
            ("Ubuntu24.04", "ubuntu:24.04"),
            ("fedora:43", "fedora:43"),
        ] {
            assert_eq!(known(text).map(|known| known.name), Some(name), "{text}");
            assert_eq!(others(text), None, "{text}");
        }
        for text in ["debian:11", "debian-11", "debian11", "debian@sid", "DEBIAN:sid"] {
            assert_eq!(
                (known(text), others(text).as_deref()),
                (None, Some("debian:13, debian:12")),
                "{text}"
            );
        }
        for file in [
            "debian-12-genericcloud-amd64.qcow2",
            "debian.qcow2",
            "debianish",
            "debian:",
            "debian::12",
            "mine",
        ] {
            assert_eq!((known(file), others(file)), (None, None), "{file}");
        }
        assert!(known("debian:1").is_none() && known("").is_none() && !is_distribution("debian:12"));
        let mirrors = BTreeMap::from([("debian".to_owned(), "http://mirror/d/".to_owned())]);
        let (url, sums) = known("debian:12").unwrap().urls(&mirrors);
        assert_eq!(url, "http://mirror/d/bookworm/latest/debian-12-genericcloud-amd64.qcow2");
        assert_eq!(sums, "http://mirror/d/bookworm/latest/SHA512SUMS");
        assert!(known("cirros").unwrap().urls(&mirrors).0.starts_with("https://download.cirros-cloud.net/"));
    }

    #[test]
    fn digests_are_read_in_each_form_and_of_that_file_only() {
        let (a, b, long) = ("a".repeat(64), "b".repeat(64), "C".repeat(128));
        for (sums, found) in [
            (format!("{a}  other.img\n{b}  disk.img\n"), Some(&b)),
            (format!("{b} *disk.img"), Some(&b)),
            (format!("{b}  ./disk.img"), Some(&b)),
            (format!("# disk.img: 9 bytes\nSHA256 (disk.img) = {b}\nSHA256 (x) = {a}\n"), Some(&b)),
            (
                format!("-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\nSHA256 (disk.img) = {b}"),
                Some(&b),
            ),
            (format!("{long}\n"), Some(&long)),
            (format!("{a}  disk.img.sig\n{a}  xdisk.img\n"), None),
            ("abc  disk.img".to_owned(), None),
            ("<html>no such thing</html>".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(digest_of("disk.img", &sums), found.map(String::as_str), "{sums}");
        }
        let debian = known("debian:12").unwrap();
        let image = debian.image("u".into(), &format!("{long}  debian-12-genericcloud-amd64.qcow2")).unwrap();
        assert_eq!((image.sha256, image.sha512), (None, Some("c".repeat(128))));
        let image = debian.image("u".into(), &format!("{a}  debian-12-genericcloud-amd64.qcow2")).unwrap();
        assert_eq!((image.sha256, image.sha512), (Some(a), None));
    }
}
