//! As whom and with which key somebody logs in to a guest, where nobody says: by what its image is called, and by the public keys
//! that it was given.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use ec_cloud::{Cloud, CloudError, Known, image_of};
use ec_model::ImageRef;

use crate::image::distribution;

/// Images that want another user say so to this one.
pub(super) const ROOT: &str = "root";

/// What the disk that an instance boots from is made of, as far as records tell.
pub(super) async fn made_of(cloud: &Cloud, known: &Known) -> Result<Option<ImageRef>, CloudError> {
    match image_of(cloud, known).await? {
        Some(image) => ec_cloud::made_of(cloud, &image).await,
        None => Ok(None),
    }
}

/// The user whom an image has: those for clouds of a distribution have one of its name.
pub(super) fn user(image: &ImageRef) -> &'static str {
    let named = image.name.as_deref().and_then(distribution);
    let file = image.url.rsplit('/').next().unwrap_or_default();
    named.or_else(|| distribution(file)).unwrap_or(ROOT)
}

/// The file of the private key that a guest with these lets in, beside its public one: of these files, or of `~/.ssh`.
pub(super) fn identity(keys: &[String], configured: &[PathBuf], home: Option<&Path>) -> Option<PathBuf> {
    let let_in: HashSet<&str> = keys.iter().filter_map(|key| material(key)).collect();
    let is_let_in = |public: &PathBuf| {
        let text = std::fs::read_to_string(public).unwrap_or_default();
        text.lines().filter_map(material).any(|key| let_in.contains(key))
    };
    let own = home.and_then(|home| std::fs::read_dir(home.join(".ssh")).ok());
    let mut own: Vec<PathBuf> = own.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    own.sort();
    let all = configured.iter().cloned().chain(own);
    let mut public = all.filter(|path| path.extension().is_some_and(|is| is == "pub"));
    public
        .find(|path| path.with_extension("").is_file() && is_let_in(path))
        .map(|path| path.with_extension(""))
}

/// The key itself: its kind and options may stand before it, and a comment behind. All begin with the length of their kind's name.
fn material(line: &str) -> Option<&str> {
    line.split_whitespace().find(|word| word.starts_with("AAAA"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn who_logs_in_is_whom_the_images_of_a_distribution_have() {
        let of = |name: Option<&str>, url: &str| {
            user(&ImageRef { name: name.map(str::to_owned), ..ImageRef::at(url) })
        };
        assert_eq!(of(None, "https://cloud.debian.org/a/debian-12-genericcloud-amd64.qcow2"), "debian");
        assert_eq!(of(None, "https://x/Fedora-Cloud-Base-Generic-44-1.7.x86_64.qcow2"), "fedora");
        assert_eq!(of(None, "https://x/generic_alpine-3.22.2-x86_64-bios-cloudinit-r0.qcow2"), "alpine");
        assert_eq!(of(None, "http://download.cirros-cloud.net/0.6.3/cirros-0.6.3-x86_64-disk.img"), "cirros");
        assert_eq!(of(Some("ubuntu:24.04"), "s3://images/5d0e"), "ubuntu");
        assert_eq!(of(None, "https://x/noble-server-cloudimg-amd64.img"), "root");
        // Neither a host nor a directory is the name of an image.
        assert_eq!(of(None, "https://debian.example/debian/own.qcow2"), "root");
        assert_eq!(of(Some("debianish"), "file:///i/undebian.qcow2"), "root");
    }

    #[test]
    fn the_key_is_found_whose_public_part_the_guest_was_given() {
        let home = tempfile::tempdir().unwrap();
        let ssh = home.path().join(".ssh");
        fs::create_dir(&ssh).unwrap();
        for (name, public) in [("a", "ssh-ed25519 AAAAa of a"), ("b", "no-pty ssh-ed25519 AAAAb of b")] {
            fs::write(ssh.join(name), "private").unwrap();
            fs::write(ssh.join(format!("{name}.pub")), public).unwrap();
        }
        let given = ["ssh-ed25519 AAAAb elsewhere".to_owned()];
        assert_eq!(identity(&given, &[], Some(home.path())), Some(ssh.join("b")));
        // What the configuration names comes first, and is none without its private part.
        let configured = [home.path().join("c.pub")];
        fs::write(&configured[0], "ssh-ed25519 AAAAb of c").unwrap();
        assert_eq!(identity(&given, &configured, Some(home.path())), Some(ssh.join("b")));
        fs::write(home.path().join("c"), "private").unwrap();
        assert_eq!(identity(&given, &configured, Some(home.path())), Some(home.path().join("c")));
        let another = ["ssh-ed25519 AAAAc".to_owned()];
        assert_eq!(identity(&another, &configured, Some(home.path())), None);
        assert_eq!(identity(&another, &[], None), None);
    }
}
