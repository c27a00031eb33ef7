//! Who had which address last, beyond the end of its lease and of this process.
//!
//! A guest that is suspended, or whose host is down, goes on afterwards with the address that it has in its memory, however
//! long ago the lease ended. libvirt tells of ended leases no more, and rules that are put up anew know nothing: without
//! this such a guest could send nothing by IPv4, not even the question by which it would renew.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, ErrorKind, Write},
    net::Ipv4Addr,
    path::Path,
    sync::Mutex,
};

use ec_model::MacAddr;

/// Each address with its last holder, so that nobody is left with one that another has had since.
type Holders = BTreeMap<Ipv4Addr, MacAddr>;

/// The last holders, in a file, too.
#[derive(Debug, Default)]
pub(crate) struct LastHolders(Mutex<Option<Known>>);

#[derive(Debug, Default)]
struct Known {
    holders: Holders,
    /// Whether the file says the same.
    is_noted: bool,
}

impl LastHolders {
    /// Takes in the leases that are living, and tells the last holder of each address, those included.
    pub(crate) fn with(&self, living: &Holders, file: &Path) -> Holders {
        // A file system that does not answer holds up whoever came first, and not the rules of all later.
        let Ok(mut known) = self.0.try_lock() else { return living.clone() };
        let before = match known.take().map_or_else(|| read(file), Ok) {
            Ok(before) => before,
            Err(error) => {
                // Nor is it written then: what it says of others would be lost.
                tracing::debug!(path = %file.display(), %error, "who had which address is not known");
                return living.clone();
            }
        };
        let after = follow(before.holders.clone(), living);
        let mut is_noted = before.is_noted && after == before.holders;
        if !is_noted {
            let written = write(file, &after);
            is_noted = written.is_ok();
            if let Err(error) = written {
                tracing::debug!(path = %file.display(), %error, "failed to note who has which address");
            }
        }
        known.insert(Known { holders: after, is_noted }).holders.clone()
    }
}

/// Who has another address now has none of those before any more.
fn follow(mut last: Holders, living: &Holders) -> Holders {
    last.retain(|_, holder| living.values().all(|mac| mac != holder));
    last.extend(living);
    last
}

/// A line that cannot be read is none: whom it is about is told of by its next lease.
fn read(file: &Path) -> io::Result<Known> {
    let text = match fs::read(file) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Known::default()),
        Err(error) => return Err(error),
    };
    let line = |line: &str| {
        let (address, mac) = line.split_once(' ')?;
        Some((address.parse().ok()?, mac.parse().ok()?))
    };
    Ok(Known { holders: text.lines().filter_map(line).collect(), is_noted: true })
}

fn write(file: &Path, holders: &Holders) -> io::Result<()> {
    let new = file.with_extension("new");
    let lines: String = holders.iter().map(|(address, mac)| format!("{address} {mac}\n")).collect();
    let mut written = File::create(&new)?;
    written.write_all(lines.as_bytes())?;
    // A power cut is what this is for.
    written.sync_all()?;
    fs::rename(&new, file)?;
    match file.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 0, 0, last)
    }

    fn mac(last: u8) -> MacAddr {
        MacAddr([0x52, 0, 0, 0, 0, last])
    }

    #[test]
    fn who_had_an_address_last_is_known_after_its_lease_and_this_process_have_ended() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("addresses");
        let told = LastHolders::default();
        let both = Holders::from([(ip(1), mac(1)), (ip(2), mac(2))]);
        assert_eq!(told.with(&both, &file), both);
        assert_eq!(told.with(&Holders::new(), &file), both, "both leases have ended");
        let anew = LastHolders::default();
        assert_eq!(anew.with(&Holders::new(), &file), both);
        let others = Holders::from([(ip(1), mac(3))]);
        let after = Holders::from([(ip(1), mac(3)), (ip(2), mac(2))]);
        assert_eq!(anew.with(&others, &file), after, "another has it since");
        let moved = Holders::from([(ip(9), mac(2))]);
        let after = Holders::from([(ip(1), mac(3)), (ip(9), mac(2))]);
        assert_eq!(anew.with(&moved, &file), after, "who has another has the one before no more");
        assert_eq!(LastHolders::default().with(&Holders::new(), &file), after);
    }

    #[test]
    fn lines_that_cannot_be_read_spoil_no_others() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("addresses");
        fs::write(&file, "10.0.0.1 52:00:00:00:00:01\n10.0.0.2\n\0\0\0 x\n").unwrap();
        assert_eq!(LastHolders::default().with(&Holders::new(), &file), Holders::from([(ip(1), mac(1))]));
        // Nor does a file that cannot be had keep the rules from what is known.
        let nowhere = directory.path().join("none/addresses");
        let living = Holders::from([(ip(1), mac(1))]);
        let told = LastHolders::default();
        assert_eq!(told.with(&living, &nowhere), living);
        let others = Holders::from([(ip(1), mac(2))]);
        assert_eq!(told.with(&others, &nowhere), others);
        assert_eq!(told.with(&Holders::new(), &nowhere), others, "it is known though it was never written");
        fs::create_dir(nowhere.parent().unwrap()).unwrap();
        told.with(&Holders::new(), &nowhere);
        assert_eq!(read(&nowhere).unwrap().holders, others, "and is written when that can be");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_read_later() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("addresses");
        // As an error of the disk.
        fs::create_dir(&file).unwrap();
        let living = Holders::from([(ip(2), mac(2))]);
        let told = LastHolders::default();
        assert_eq!(told.with(&living, &file), living);
        fs::remove_dir(&file).unwrap();
        fs::write(&file, "10.0.0.1 52:00:00:00:00:01\n\u{fffd}").unwrap();
        let both = Holders::from([(ip(1), mac(1)), (ip(2), mac(2))]);
        assert_eq!(told.with(&living, &file), both, "it is read when it can be");
    }
}
