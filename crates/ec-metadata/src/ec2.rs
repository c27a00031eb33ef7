//! The EC2 tree: `/<version>/{meta-data/…,user-data}`.
//!
//! A crawler fetches every name of a listing and gives up where one fails, so a listing names exactly what
//! there is. Names that end in a slash are listings themselves. Texts end without a line break, as on EC2,
//! except keys, which are appended to files.

use std::net::IpAddr;

use crate::{InstanceRecord, answer::Content};

/// Newest last, as EC2 lists them. cloud-init looks for 2021-03-23, 2018-09-24 and 2016-09-02 before the
/// 2009-04-04 that CirrOS and others use.
const VERSIONS: [&str; 12] = [
    "1.0",
    "2007-01-19",
    "2007-03-01",
    "2007-08-29",
    "2007-10-10",
    "2007-12-15",
    "2008-02-01",
    "2008-09-01",
    "2009-04-04",
    "2016-09-02",
    "2018-09-24",
    "2021-03-23",
];
const LATEST: &str = "latest";

/// There is one zone; this is what OpenStack calls it where nobody has named it.
pub(crate) const ZONE: &str = "nova";

pub(crate) fn find(record: &InstanceRecord, peer: IpAddr, path: &[&str]) -> Option<Content> {
    match path {
        [] => Some(listing(VERSIONS.iter().chain([&LATEST]))),
        [version, rest @ ..] if VERSIONS.contains(version) || *version == LATEST => match rest {
            [] => Some(listing(["meta-data/"].iter().chain(record.user_data.as_ref().map(|_| &"user-data")))),
            ["user-data"] => record.user_data.as_ref().map(|data| Content::Bytes(data.0.clone())),
            ["meta-data", rest @ ..] => meta_data(record, peer, rest),
            _ => None,
        },
        _ => None,
    }
}

fn meta_data(record: &InstanceRecord, peer: IpAddr, path: &[&str]) -> Option<Content> {
    let text = |text: &str| Some(Content::Text(text.to_owned()));
    match path {
        [] => {
            let mut names =
                vec!["ami-launch-index", "hostname", "instance-id", "local-hostname", "local-ipv4"];
            names.push("placement/");
            if record.base_digest.is_some() {
                names.insert(0, "ami-id");
            }
            if !record.keys.is_empty() {
                names.push("public-keys/");
            }
            if tags(record).next().is_some() {
                names.push("tags/");
            }
            Some(listing(names))
        }
        ["tags"] => tags(record).next().map(|_| listing(["instance/"])),
        ["tags", "instance"] => tags(record).next().map(|_| listing(tags(record).map(|(key, _)| key))),
        ["tags", "instance", wanted] => {
            tags(record).find(|(key, _)| key == wanted).map(|(_, value)| Content::Text(value.clone()))
        }
        // As many digits of the digest as EC2's ids have.
        ["ami-id"] => record
            .base_digest
            .as_ref()
            .map(|digest| Content::Text(format!("ami-{}", digest.chars().take(17).collect::<String>()))),
        ["ami-launch-index"] => text("0"),
        ["hostname" | "local-hostname"] => text(&record.name),
        // CirrOS waits for an id that begins so.
        ["instance-id"] => text(&format!("i-{}", record.instance)),
        ["local-ipv4"] => text(&peer.to_string()),
        ["placement"] => Some(listing(["availability-zone"])),
        ["placement", "availability-zone"] => text(ZONE),
        ["public-keys"] if !record.keys.is_empty() => {
            Some(listing((0..record.keys.len()).map(|number| format!("{number}={}", key_name(number)))))
        }
        ["public-keys", number] => key(record, number).map(|_| listing(["openssh-key"])),
        ["public-keys", number, "openssh-key"] => {
            key(record, number).map(|key| Content::Text(format!("{}\n", key.trim_end())))
        }
        _ => None,
    }
}

/// Metadata as EC2 has instances' tags; of a key with a blank no path can be told, and whoever asks for `.` or `..` makes another path
/// of it.
fn tags(record: &InstanceRecord) -> impl Iterator<Item = (&String, &String)> {
    record.metadata.iter().filter(|(key, _)| !key.contains(' ') && !matches!(key.as_str(), "." | ".."))
}

/// What a key is called in both trees: crawlers make maps of them, so no two may have the same name.
pub(crate) fn key_name(number: usize) -> String {
    format!("key-{number}")
}

fn key<'a>(record: &'a InstanceRecord, number: &str) -> Option<&'a String> {
    record.keys.get(number.parse::<usize>().ok()?)
}

pub(crate) fn listing<T: ToString>(names: impl IntoIterator<Item = T>) -> Content {
    let names: Vec<String> = names.into_iter().map(|name| name.to_string()).collect();
    Content::Text(names.join("\n"))
}
