//! What an image may be fetched from: files below the directories that were named, and no address of this
//! host itself. Whoever asks for an image is not whoever runs the host.

use std::{
    fs::{self, File, OpenOptions},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use ipnet::IpNet;
use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::{Host, Url};

use crate::ImageError;

/// Which files may be read.
#[derive(Debug, Default)]
pub(crate) struct Local(pub(crate) Vec<PathBuf>);

impl Local {
    /// Whether the path lies, by its text, below one of the directories: the directory and the rest of it.
    fn below<'a>(&'a self, path: &'a Path) -> Option<(&'a Path, &'a Path)> {
        self.0.iter().find_map(|directory| Some((directory.as_path(), path.strip_prefix(directory).ok()?)))
    }

    /// Says so where the file may not be read; looks at no file.
    pub(crate) fn permit(&self, path: &Path) -> Result<(), ImageError> {
        match self.below(path) {
            Some(_) => Ok(()),
            None => Err(ImageError::NotLocal { path: path.to_owned() }),
        }
    }

    /// The directory that is empty or missing, where the path lies below such a one: its file system is not mounted, perhaps, and
    /// nobody knows what is there.
    pub(crate) fn misses(&self, path: &Path) -> Option<&Path> {
        let own = self.0.iter().map(PathBuf::as_path);
        own.filter(|directory| path.starts_with(directory)).find(|directory| !has_any(directory))
    }

    /// Opens a regular file below one of the directories.
    ///
    /// The directory itself may be reached by links, which are its operator's; nothing below it may. What it is
    /// is looked at before it is opened: opening a pipe would wait, and opening a device may do things.
    pub(crate) fn open(&self, path: &Path) -> Result<File, ImageError> {
        self.permit(path)?;
        let failed =
            |source: io::Error| ImageError::Local { path: path.to_owned(), source: Arc::new(source) };
        let Some((directory, rest)) = self.below(path) else {
            return Err(ImageError::NotAFile { path: path.to_owned() });
        };
        let rest = if rest.as_os_str().is_empty() { Path::new(".") } else { rest };
        let directory = OpenOptions::new()
            .read(true)
            .custom_flags((OFlag::O_PATH | OFlag::O_DIRECTORY).bits())
            .open(directory)
            .map_err(failed)?;
        let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_MAGICLINKS,
        );
        let found = openat2(&directory, rest, how).map_err(|errno| match errno {
            Errno::ELOOP | Errno::EXDEV => ImageError::Link { path: path.to_owned() },
            errno => failed(errno.into()),
        })?;
        let found = File::from(found);
        let kind = found.metadata().map_err(failed)?.file_type();
        if !kind.is_file() {
            return Err(ImageError::NotAFile { path: path.to_owned() });
        }
        // The same file and no other, whatever its name means by now.
        OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(format!("/proc/self/fd/{}", found.as_raw_fd()))
            .map_err(failed)
    }
}

/// Whether anything lies in a directory.
pub(crate) fn has_any(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some())
}

/// Which addresses may be spoken to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Addresses(pub(crate) Arc<[IpNet]>);

/// A URL, a redirect or a name leads where this host does not fetch from.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0} is an address of this host or of its link")]
pub(crate) struct Forbidden(pub(crate) IpAddr);

impl Addresses {
    /// Loopback, link-local, unspecified and multicast addresses are refused, also where an IPv6 address
    /// stands for one of them, unless a network with it was named.
    pub(crate) fn permit(&self, ip: IpAddr) -> Result<(), Forbidden> {
        let named = |ip: IpAddr| self.0.iter().any(|network| network.contains(&ip));
        let ip = ip.to_canonical();
        if named(ip) {
            return Ok(());
        }
        let own = match ip {
            IpAddr::V4(ip) => own_v4(ip),
            IpAddr::V6(ip) => {
                let embedded = embedded(ip);
                if embedded.is_some_and(|ip| named(ip.into())) {
                    return Ok(());
                }
                ip.is_loopback()
                    || ip.is_unspecified()
                    || ip.is_unicast_link_local()
                    || ip.is_multicast()
                    || embedded.is_some_and(own_v4)
            }
        };
        if own { Err(Forbidden(ip)) } else { Ok(()) }
    }

    /// The same for a URL whose host is an address; names are looked at when they are resolved.
    pub(crate) fn permit_url(&self, url: &Url) -> Result<(), Forbidden> {
        match url.host() {
            Some(Host::Ipv4(ip)) => self.permit(ip.into()),
            Some(Host::Ipv6(ip)) => self.permit(ip.into()),
            Some(Host::Domain(_)) | None => Ok(()),
        }
    }
}

fn own_v4(ip: Ipv4Addr) -> bool {
    // All of 0.0.0.0/8 means "this host".
    ip.octets()[0] == 0 || ip.is_loopback() || ip.is_link_local() || ip.is_multicast() || ip.is_broadcast()
}

/// The IPv4 address that a translated, tunnelled or compatible IPv6 address leads to.
fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let segments = ip.segments();
    let pair =
        |at: usize| Some(Ipv4Addr::from_bits(u32::from(segments[at]) << 16 | u32::from(segments[at + 1])));
    match segments {
        [0x64, 0xff9b, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0, 0, ..] => pair(6),
        [0x2002, ..] => pair(1),
        _ => None,
    }
}

/// Resolves names for each connection anew, and gives out only what may be spoken to: what a name meant when
/// it was looked at before says nothing about what it means now.
impl Resolve for Addresses {
    fn resolve(&self, name: Name) -> Resolving {
        let addresses = self.clone();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let mut refused = None;
            let mut permitted = Vec::new();
            for address in found {
                match addresses.permit(address.ip()) {
                    Ok(()) => permitted.push(address),
                    Err(forbidden) => refused = Some(forbidden),
                }
            }
            match refused {
                Some(forbidden) if permitted.is_empty() => Err(forbidden.into()),
                _ => Ok(Box::new(permitted.into_iter()) as Addrs),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permitted(allowed: &[&str], ip: &str) -> bool {
        let allowed = allowed.iter().map(|network| network.parse().unwrap()).collect();
        Addresses(allowed).permit(ip.parse().unwrap()).is_ok()
    }

    #[test]
    fn addresses_of_this_host_are_refused_in_every_form() {
        for ip in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
        ] {
            assert!(!permitted(&[], ip), "{ip}");
        }
        for ip in [
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.9",
            "fd00::1",
            "93.184.216.34",
            "2606:2800::1",
            "64:ff9b::808:808",
        ] {
            assert!(permitted(&[], ip), "{ip}");
        }
    }

    #[test]
    fn what_is_named_is_allowed_and_nothing_beside_it() {
        assert!(permitted(&["127.0.0.0/8"], "127.0.0.1"));
        assert!(permitted(&["127.0.0.0/8"], "::ffff:127.0.0.1"));
        assert!(!permitted(&["127.0.0.0/8"], "::1"));
        assert!(!permitted(&["127.0.0.0/8"], "169.254.169.254"));
        assert!(permitted(&["::1/128"], "::1"));
    }

    #[test]
    fn urls_with_addresses_in_odd_spellings_are_refused() {
        let permit = |url: &str| Addresses::default().permit_url(&Url::parse(url).unwrap()).is_ok();
        for url in [
            "http://127.1/",
            "http://2130706433/",
            "http://0x7f.0.0.1/",
            "http://[::ffff:7f00:1]/",
            "http://017700000001/",
        ] {
            assert!(!permit(url), "{url}");
        }
        assert!(permit("http://192.168.0.1/"));
    }
}
