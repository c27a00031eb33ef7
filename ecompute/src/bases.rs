//! Which images of the cache disks stand on: those are not evicted.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use ec_metadata::RecordDir;
use ec_model::InstanceId;

use crate::storage::{LOCAL_MARK, StorageError};

/// The digests of the bases that some disk stands on, as the disks themselves say, or is about to, as the records do.
/// Where one of them cannot be read, or what the disks lie on is not mounted, that is all bases: rather a full disk than a guest
/// without its base.
pub(crate) fn bases_in_use(
    records: &RecordDir,
    bases: &Path,
    disks: &Path,
    check: impl Fn() -> Result<(), StorageError>,
) -> HashSet<String> {
    let known = recorded(records).and_then(|mut digests| {
        digests.extend(under(disks)?);
        // Last: it may go while it is read.
        check().map_err(|error| ec_runtime::exit::chain(&error))?;
        Ok(digests)
    });
    known.unwrap_or_else(|why| {
        tracing::warn!(error = why, "no image is evicted");
        let all = files_of(bases).unwrap_or_default();
        all.iter().filter_map(|base| digest(base)).collect()
    })
}

/// What records name: written before a disk is made.
fn recorded(records: &RecordDir) -> Result<HashSet<String>, String> {
    let mut digests = HashSet::new();
    for (instance, record) in records.list().map_err(|error| ec_runtime::exit::chain(&error))? {
        let record = record.ok_or_else(|| format!("the record of {instance} does not tell its base"))?;
        let named = [record.base_digest, record.next_base_digest, record.rescue_base_digest];
        digests.extend(named.into_iter().flatten());
    }
    Ok(digests)
}

/// What the disks in this directory stand on, and whatever else lies beside them.
fn under(disks: &Path) -> Result<HashSet<String>, String> {
    // There is one wherever an agent is: what it lies in is not mounted.
    if !disks.is_dir() {
        return Err(format!("{} is not there", disks.display()));
    }
    let mut digests = HashSet::new();
    for path in files_of(disks)? {
        match base_in(&path) {
            // It went, or was renamed, since the directory was read: of its other name the record tells.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            base => {
                digests.extend(base.map_err(|error| format!("failed to read {}: {error}", path.display()))?);
            }
        }
    }
    Ok(digests)
}

/// A base is called by its digest.
fn digest(base: &Path) -> Option<String> {
    base.file_stem().and_then(OsStr::to_str).map(str::to_owned)
}

/// What a machine's or a volume's disk stands on, where that can be told.
pub(crate) fn base_of(disks: &Path, instance: InstanceId) -> Option<String> {
    base_in(&disks.join(format!("{instance}.qcow2"))).ok()?
}

/// The digest of what the disk in this file stands on.
fn base_in(disk: &Path) -> io::Result<Option<String>> {
    let base = ec_image::stands_on(&mut File::open(disk)?)?;
    Ok(base.and_then(|base| digest(Path::new(&base))))
}

/// The files in a directory, and what others have there leads to; none where there is no directory.
fn files_of(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: io::Error| format!("failed to list {}: {error}", directory.display());
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        // It is to lead nowhere, and is no disk.
        if entry.file_name() == LOCAL_MARK {
            continue;
        }
        match fs::metadata(&path) {
            Ok(found) if found.is_file() => files.push(path),
            Ok(_) => {}
            // It went since; but what leads to something that is not there now may lead to it again.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !path.is_symlink() => {}
            Err(error) => return Err(format!("failed to look at {}: {error}", path.display())),
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, os::unix::fs::symlink, process::Command};

    use ec_metadata::InstanceRecord;
    use jiff::Timestamp;

    use super::*;

    fn qemu_img(arguments: &[&str], directory: &Path) {
        let output = Command::new("qemu-img").args(arguments).current_dir(directory).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn record(base: Option<&str>) -> InstanceRecord {
        let instance = InstanceId::new(uuid::Uuid::new_v4());
        let text = serde_json::json!({
            "version": 1, "instance": instance, "name": "x", "macs": [], "base_digest": base,
            "created_at": Timestamp::now(),
        });
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn what_disks_and_records_name_is_in_use_and_all_where_one_of_them_cannot_be_read() {
        let directory = tempfile::tempdir().unwrap();
        let [bases, disks] = ["base", "disks"].map(|name| directory.path().join(name));
        let records = RecordDir::open(directory.path().join("instances")).unwrap();
        let is_mounted = Cell::new(true);
        let check = || match is_mounted.get() {
            true => Ok(()),
            false => Err(StorageError::Absent { path: disks.clone(), name: "x".into() }),
        };
        let in_use = || {
            let mut in_use: Vec<_> = bases_in_use(&records, &bases, &disks, check).into_iter().collect();
            in_use.sort_unstable();
            in_use.join(" ")
        };
        assert_eq!(in_use(), "");
        for made in [&bases, &disks] {
            fs::create_dir(made).unwrap();
        }
        symlink("an-id", disks.join(LOCAL_MARK)).unwrap();
        for base in ["aa", "bb", "cc", "dd"] {
            qemu_img(&["create", "-q", "-f", "qcow2", &format!("{base}.qcow2"), "1M"], &bases);
        }
        records.put(&record(Some("aa"))).unwrap();
        // It stands on none, as an empty volume and a copy do.
        records.put(&record(None)).unwrap();
        qemu_img(&["create", "-q", "-f", "qcow2", "empty.qcow2", "1M"], &disks);
        fs::write(disks.join("half.part"), "").unwrap();
        fs::create_dir(disks.join("lost+found")).unwrap();
        assert_eq!(in_use(), "aa");
        is_mounted.set(false);
        assert_eq!(in_use(), "aa bb cc dd", "disks of which no record tells are not there");
        is_mounted.set(true);
        // One without a record, a snapshot's copy, whatever it is called.
        for (name, base) in [("one.qcow2", "bb"), ("snap.volume.copy.qcow2", "cc")] {
            let base = bases.join(format!("{base}.qcow2")).display().to_string();
            qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, name], &disks);
        }
        assert_eq!(in_use(), "aa bb cc");
        let mut torn = fs::read(disks.join("one.qcow2")).unwrap();
        torn.truncate(80);
        fs::write(disks.join("torn.qcow2"), &torn).unwrap();
        assert_eq!(in_use(), "aa bb cc dd");
        fs::remove_file(disks.join("torn.qcow2")).unwrap();
        assert_eq!(in_use(), "aa bb cc");
        // One that somebody put elsewhere, where there was room, with a link to it.
        let moved = InstanceId::new(uuid::Uuid::new_v4());
        let base = bases.join("dd.qcow2").display().to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, "moved"], directory.path());
        symlink(directory.path().join("moved"), disks.join(format!("{moved}.qcow2"))).unwrap();
        assert_eq!((in_use(), base_of(&disks, moved)), ("aa bb cc dd".to_owned(), Some("dd".to_owned())));
        qemu_img(&["create", "-q", "-f", "qcow2", "moved", "1M"], directory.path());
        assert_eq!((in_use(), base_of(&disks, moved)), ("aa bb cc".to_owned(), None));
        fs::remove_file(directory.path().join("moved")).unwrap();
        assert_eq!(in_use(), "aa bb cc dd", "nobody knows what stands there");
        fs::remove_file(disks.join(format!("{moved}.qcow2"))).unwrap();
        let unreadable = InstanceId::new(uuid::Uuid::new_v4());
        fs::write(directory.path().join(format!("instances/{unreadable}.json")), "{\"version\": 99}")
            .unwrap();
        assert_eq!(in_use(), "aa bb cc dd");
    }
}
