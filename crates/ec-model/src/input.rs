//! What people may give: checked here for every program, by those who take it and again by the agent that acts on it.

use std::{collections::BTreeMap, fmt};

use base64::{Engine, prelude::BASE64_STANDARD};

use crate::{ImageId, InstanceId, OF_INSTANCE, OF_VOLUME, Request};

/// Keys for one guest; more is a mistake rather than a wish.
pub const KEYS_MAX: usize = 64;

/// A project or a user, as placement has them.
pub const OWNER_MAX: usize = 255;

/// What [`is_hostname`] takes, in words.
pub const HOSTNAME: &str =
    "letters, digits and hyphens, at most 63 in each part and 253 in all, and not a uuid";

/// Whether a guest can be called so: RFC 1123's labels of letters, digits and hyphens, at most 63 each and 253 in all,
/// and not a uuid, which is what instances are told apart by.
pub fn is_hostname(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(is_label) && name.parse::<InstanceId>().is_err()
}

/// Whether a project or a user can be called so.
pub fn is_owner(name: &str) -> bool {
    (1..=OWNER_MAX).contains(&name.chars().count())
}

/// Whether it is `type base64 comment` in one line, as sshd(8) describes the format of public keys.
pub fn is_public_key(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let kind = words.next().unwrap_or_default();
    let blob = words.next().and_then(|text| BASE64_STANDARD.decode(text).ok()).unwrap_or_default();
    // The blob begins with the length of the type's name and the name again (RFC 4253, section 6.6).
    let length = blob.first_chunk::<4>().map_or(0, |bytes| u32::from_be_bytes(*bytes) as usize);
    ["ssh-", "ecdsa-", "sk-"].iter().any(|start| kind.starts_with(start))
        && blob.get(4..4 + length.min(blob.len())).is_some_and(|name| name == kind.as_bytes())
        && !line.chars().any(|c| c.is_control() && c != '\t')
}

/// Whether [a public key](is_public_key) is all there: the fields of its blob, each with its length before it (RFC 4253, section 6.6), end
/// where that ends. Records of earlier releases may have some that are not.
pub fn is_whole_public_key(line: &str) -> bool {
    let blob = line.split_whitespace().nth(1).and_then(|text| BASE64_STANDARD.decode(text).ok());
    let mut rest = blob.as_deref().unwrap_or_default();
    let mut fields = 0;
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let Some(after) = after.get(u32::from_be_bytes(*length) as usize..) else { return false };
        (rest, fields) = (after, fields + 1);
    }
    rest.is_empty() && fields > 1
}

/// Whether an image can be at such a URL.
pub fn is_image_url(url: &str) -> bool {
    let is_absolute = |rest: &str| rest.starts_with('/') || rest.starts_with("localhost/");
    let is_known = match url.split_once("://") {
        Some(("http" | "https", rest)) => !rest.is_empty() && !rest.starts_with('/'),
        Some(("file", rest)) => is_absolute(rest),
        _ => false,
    };
    is_known && !url.chars().any(|c| c.is_control() || c == ' ')
}

/// Whether it is a SHA-512 in hex.
pub fn is_sha512(digest: &str) -> bool {
    digest.len() == 128 && digest.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether it is a SHA-256 in hex. Digests become file names, so nothing else may pass for one.
pub fn is_sha256(digest: &str) -> bool {
    digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether a network interface of Linux can be called so.
pub fn is_interface_name(name: &str) -> bool {
    // IFNAMSIZ is 16 with its closing zero.
    (1..16).contains(&name.len())
        && ![".", ".."].contains(&name)
        && name.chars().all(|c| c.is_ascii_graphic() && c != '/' && c != ':')
}

impl Request {
    /// What is wrong with it that whoever wrote it should have refused; its image is judged by who fetches it.
    pub fn problem(&self) -> Option<String> {
        if let Some(name) = self.name.as_ref().filter(|name| !is_hostname(name)) {
            return Some(format!("its name {name:?} is not a hostname"));
        }
        let keys = self.spec.as_ref().map_or(&[][..], |spec| &spec.keys);
        if keys.len() > KEYS_MAX {
            return Some(format!("it has {} keys, more than {KEYS_MAX}", keys.len()));
        }
        let key = keys.iter().position(|key| !is_public_key(key));
        key.map(|number| format!("the public key number {} is none", number + 1))
    }
}

/// So many labels an instance may have: as many as OpenStack's Compute API allows of metadata.
pub const LABELS_MAX: usize = 128;

/// The key and the value of a label, as `KEY=VALUE`.
pub fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("wanted KEY=VALUE")?;
    Ok((label_key(key)?, line(value, 255)?))
}

/// The key of a label.
pub fn label_key(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | '/');
    if text.is_empty() || text.len() > 63 || !text.chars().all(fits) {
        return Err("wanted a key of 1 to 63 letters, digits, and - _ . : /".to_owned());
    }
    Ok(text.to_owned())
}

/// So many items of metadata a guest may have, as OpenStack's Compute API allows.
pub const METADATA_MAX: usize = 128;

/// The key and the value of an item of metadata, as `KEY=VALUE`.
pub fn metadata(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("wanted KEY=VALUE")?;
    Ok((metadata_key(key)?, line(value, 255)?))
}

/// The key of an item of metadata, as OpenStack's Compute API takes it.
pub fn metadata_key(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | ' ');
    if text.is_empty() || text.len() > 255 || !text.chars().all(fits) {
        return Err("wanted a key of 1 to 255 letters, digits, blanks, and - _ . :".to_owned());
    }
    Ok(text.to_owned())
}

/// Which instances are meant: those that have a label with this key, and where one is told, this value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelSelector {
    /// The label's key.
    pub key: String,
    /// Its value, where not any will do.
    pub value: Option<String>,
}

impl LabelSelector {
    /// Whether an instance with these labels is meant.
    pub fn takes(&self, labels: &BTreeMap<String, String>) -> bool {
        labels.get(&self.key).is_some_and(|value| self.value.as_ref().is_none_or(|wanted| wanted == value))
    }
}

impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{}={value}", self.key),
            None => f.write_str(&self.key),
        }
    }
}

/// The selector that `KEY` or `KEY=VALUE` is.
pub fn label_selector(text: &str) -> Result<LabelSelector, String> {
    if text.contains('=') {
        let (key, value) = label(text)?;
        Ok(LabelSelector { key, value: Some(value) })
    } else {
        Ok(LabelSelector { key: label_key(text)?, value: None })
    }
}

/// What a flavor, a keypair or an image of the configuration can be called. It is neither a path nor a URL.
pub fn catalog_name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@');
    let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    if !begins || text.len() > 63 || !text.chars().all(fits) {
        return Err("wanted 1 to 63 letters, digits, and - _ . @, the first a letter or a digit".to_owned());
    }
    Ok(text.to_owned())
}

/// What an image of the catalogue can be called: as other things, and with a colon as in `debian:12`. It is not a uuid, by
/// which images are told apart, nor what a copy of a disk is asked for by.
pub fn image_name(text: &str) -> Result<String, String> {
    if let Some(of) = [OF_VOLUME, OF_INSTANCE].into_iter().find(|of| text.starts_with(of)) {
        return Err(format!("begins with `{of}`, as a copy of a disk is asked for: wanted another name"));
    }
    if text.parse::<ImageId>().is_ok() {
        return Err("is a uuid: wanted a name".to_owned());
    }
    let bare = text.replace(':', "-");
    catalog_name(&bare).map_err(|why| why.replace("- _ . @", "- _ . @ :"))?;
    Ok(text.to_owned())
}

/// So many properties an image may have, as OpenStack's Image API allows by default.
pub const PROPERTIES_MAX: usize = 128;

/// The key and the value of a property of an image, as `KEY=VALUE`.
pub fn property(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("wanted KEY=VALUE")?;
    Ok((property_key(key)?, line(value, 255)?))
}

/// The key of a property.
pub fn property_key(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    if text.is_empty() || text.len() > 255 || !text.chars().all(fits) {
        return Err("wanted a key of 1 to 255 letters, digits, and - _ . :".to_owned());
    }
    Ok(text.to_owned())
}

/// One line of text that people read, of so many characters at most.
pub fn line(text: &str, most: usize) -> Result<String, String> {
    if text.chars().count() > most {
        return Err(format!("wanted {most} characters at most"));
    }
    if text.chars().any(char::is_control) {
        return Err("wanted one line without control characters".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPPDZ0RoaDTsdTuMBMHFLPz5VvQGVcTQWqXkTfpZzYJ me@here";

    #[test]
    fn only_public_keys_are_keys() {
        assert!(is_public_key(KEY));
        for line in [
            "ssh-ed25519",
            "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIGPPDZ0RoaDTsdTuMBMHFLPz5VvQGVcTQWqXkTfpZzYJ",
            "hello world",
            "",
            &format!("{KEY}\nssh-ed25519 another"),
        ] {
            assert!(!is_public_key(line), "{line}");
        }
    }

    #[test]
    fn a_key_that_was_cut_off_is_not_whole() {
        assert!(is_whole_public_key(KEY));
        let [kind, blob] = [KEY.split(' ').next().unwrap(), KEY.split(' ').nth(1).unwrap()];
        // Whole groups of base64 are gone of each, up to all but the type.
        for kept in [20, 24, 44, 64] {
            let cut = format!("{kind} {}", &blob[..kept]);
            assert!(is_public_key(&cut) && !is_whole_public_key(&cut), "{cut}");
        }
        assert!(!is_whole_public_key(kind) && !is_whole_public_key(""));
    }

    #[test]
    fn names_urls_and_digests_are_as_they_must_be() {
        for name in ["", "-a", "a-", "a_b", "a b", &"a".repeat(64), "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab"] {
            assert!(!is_hostname(name), "{name}");
        }
        assert!(is_hostname("web-1.example") && !is_hostname(&["a"; 128].join(".")));
        for url in
            ["", "x", "ftp://a/b", "file://rel", "http://", "http:///x", "https://a/ b", "http://a/\nb"]
        {
            assert!(!is_image_url(url), "{url}");
        }
        assert!(is_image_url("file:///a/b") && is_image_url("https://a/b"));
        assert!(is_sha256(&"Ab".repeat(32)));
        for digest in ["", "ab", &"g".repeat(64), &format!("../{}", "a".repeat(61))] {
            assert!(!is_sha256(digest), "{digest}");
        }
        assert!(is_sha512(&"aB".repeat(64)));
        for digest in [&"a".repeat(64), &"a".repeat(127), &"a".repeat(129), &"g".repeat(128)] {
            assert!(!is_sha512(digest), "{digest}");
        }
        for name in ["debian", "debian:12", "a.b_c@d-e"] {
            assert_eq!(image_name(name).as_deref(), Ok(name));
        }
        let uuid = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";
        for name in ["", ":a", "-a", "a/b", "a b", &"a".repeat(64), uuid, "volume:db", "instance:web"] {
            assert!(image_name(name).is_err(), "{name}");
        }
        assert_eq!(property("os_distro=debian"), Ok(("os_distro".to_owned(), "debian".to_owned())));
        for wrong in ["x", "=x", "a b=x", &format!("{}=x", "a".repeat(256)), "a=b\nc"] {
            assert!(property(wrong).is_err(), "{wrong}");
        }
        assert!(property_key(&"a".repeat(255)).is_ok());
        assert!(is_owner("p") && is_owner(&"ü".repeat(255)));
        assert!(!is_owner("") && !is_owner(&"p".repeat(256)));
    }

    #[test]
    fn an_interface_is_called_as_the_kernel_takes_it() {
        for name in ["virbr0", "br-1", "eth0.7", "a"] {
            assert!(is_interface_name(name), "{name}");
        }
        for name in ["", "a/b", "a b", "..", "a:b", "ü", "a234567890123456", "a\n"] {
            assert!(!is_interface_name(name), "{name}");
        }
    }

    #[test]
    fn a_hostname_is_as_long_as_it_may_be_and_no_longer() {
        let label = "a".repeat(63);
        let whole = |last: usize| format!("{label}.{label}.{label}.{}", "a".repeat(last));
        assert!(is_hostname(&label) && is_hostname("a") && is_hostname("0"));
        assert!(is_hostname(&whole(61)) && !is_hostname(&whole(62)));
        for name in ["a..b", ".a", "a.", "a.-b", "a-.b", "ü"] {
            assert!(!is_hostname(name), "{name}");
        }
    }

    #[test]
    fn every_kind_of_key_is_a_key_where_its_blob_says_the_same() {
        for line in [
            "sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29tAAAAAXg= me",
            "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAABeA==",
            &format!("{KEY}\tand more"),
        ] {
            assert!(is_public_key(line), "{line}");
        }
        for line in [
            "foo AAAAA2ZvbwAAAAF4",
            "ssh-ed25519 !!!",
            "sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29tAAAAAXg= \u{7f}",
        ] {
            assert!(!is_public_key(line), "{line}");
        }
    }

    #[test]
    fn an_image_on_this_host_is_named_by_an_absolute_path_and_none_has_spaces() {
        assert!(is_image_url("file://localhost/a") && is_image_url("http://a"));
        for url in ["file://localhost", "file://", "https://", "https:///x", "http://a\u{7f}", "http://a b"] {
            assert!(!is_image_url(url), "{url}");
        }
        assert!(!is_sha256(&"a".repeat(63)) && !is_sha256(&"a".repeat(65)));
        assert!(is_interface_name("a23456789012345") && !is_interface_name("."));
    }

    #[test]
    fn labels_and_lines_are_bounded_and_plain() {
        assert_eq!(label("role=web server"), Ok(("role".to_owned(), "web server".to_owned())));
        assert_eq!(label("a/b.c:d-e_f="), Ok(("a/b.c:d-e_f".to_owned(), String::new())));
        assert_eq!(label("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert_eq!(label("role"), Err("wanted KEY=VALUE".to_owned()));
        for key in ["", "a b", "ä", &"k".repeat(64)] {
            assert!(label_key(key).is_err(), "{key}");
        }
        assert!(label_key(&"k".repeat(63)).is_ok());
        assert_eq!(line("ä", 1), Ok("ä".to_owned()));
        assert_eq!(line("ab", 1), Err("wanted 1 characters at most".to_owned()));
        assert_eq!(line("a\nb", 9), Err("wanted one line without control characters".to_owned()));
        assert!(
            label(&format!("k={}", "v".repeat(255))).is_ok()
                && label(&format!("k={}", "v".repeat(256))).is_err()
        );
    }

    #[test]
    fn metadata_is_as_the_compute_api_takes_it() {
        assert_eq!(metadata("the role=a=b"), Ok(("the role".to_owned(), "a=b".to_owned())));
        assert_eq!(metadata("role"), Err("wanted KEY=VALUE".to_owned()));
        for key in ["", "a/b", "ä", &"k".repeat(256)] {
            assert!(metadata_key(key).is_err(), "{key}");
        }
        assert!(metadata_key(&"k".repeat(255)).is_ok() && metadata_key("a-b_c.d:e").is_ok());
        assert!(metadata(&format!("k={}", "v".repeat(256))).is_err());
    }

    #[test]
    fn a_selector_takes_what_has_its_key_and_its_value_where_it_has_one() {
        let labels: BTreeMap<String, String> =
            [("role", "web"), ("empty", "")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        for (text, takes) in [
            ("role", true),
            ("role=web", true),
            ("role=db", false),
            ("role=", false),
            ("empty=", true),
            ("empty", true),
            ("web", false),
        ] {
            let selector = label_selector(text).unwrap();
            assert_eq!((selector.takes(&labels), selector.to_string().as_str()), (takes, text));
        }
        for text in ["", "=x", "a b", "a b=x", "a=\n"] {
            assert!(label_selector(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_has_a_name_is_called_by_a_word_that_is_no_path_and_no_url() {
        for name in ["a", "0", "m1.small", "me@home-2_x", &"n".repeat(63)] {
            assert_eq!(catalog_name(name).as_deref(), Ok(name));
        }
        for name in ["", ".a", "-a", "@a", "_a", "a/b", "a b", "a:b", "ä", &"n".repeat(64)] {
            assert!(catalog_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_request_is_named() {
        let request = |name: Option<&str>, keys: Vec<String>| {
            let spec = crate::Spec {
                query: String::new(),
                resources: crate::Resources::new(),
                image: crate::ImageRef::default(),
                keys,
                metadata: std::collections::BTreeMap::new(),
                user_data_bytes: None,
                token_required: false,
                snapshot: false,
            };
            Request {
                instance: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
                epoch: 1,
                generation: 1,
                desired: crate::Desired::Active,
                power: crate::PowerWish::default(),
                restart: crate::Restart::No,
                rebuild: None,
                rescue: None,
                kind: crate::Workload::Machine,
                volumes: Vec::new(),
                resize: None,
                handover: None,
                name: name.map(str::to_owned),
                project: String::new(),
                user: String::new(),
                spec: Some(spec),
                access: None,
                request_id: None,
                created_at: jiff::Timestamp::UNIX_EPOCH,
            }
        };
        let keys = |count| vec![KEY.to_owned(); count];
        assert_eq!(request(Some("web"), keys(KEYS_MAX)).problem(), None);
        assert_eq!(Request { spec: None, ..request(None, vec![]) }.problem(), None);
        let cases = [
            (request(Some("a_b"), vec![]), "its name \"a_b\" is not a hostname"),
            (request(None, keys(KEYS_MAX + 1)), "it has 65 keys, more than 64"),
            (request(None, vec![KEY.to_owned(), "none".to_owned()]), "the public key number 2 is none"),
        ];
        for (request, expected) in cases {
            assert_eq!(request.problem().as_deref(), Some(expected));
        }
    }
}
