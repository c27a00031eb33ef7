//! Who this node is: its uuid, kept in the state directory, and the lock that keeps a second agent out.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use ec_metadata::{InstanceRecord, RecordDir, RecordFileError};
use ec_model::{InvalidId, NodeId};
use nix::fcntl::{Flock, FlockArg};

/// Why the state directory cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Reading or writing failed.
    #[error("failed to {what} {}", path.display())]
    Io {
        /// What was being done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The file does not hold a uuid.
    #[error("{} does not hold this node's uuid: put it there again, or set `uuid` in the configuration", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What it holds.
        #[source]
        source: InvalidId,
    },
    /// Another agent runs.
    #[error("another ecompute uses {}: end it first, or give this one its own `state_dir`", path.display())]
    Busy {
        /// The state directory.
        path: PathBuf,
    },
    /// What is to run here is not the node whose guests are here.
    #[error(
        "the guests here are node {node}'s, and would be nobody's: `eschedule node add NAME --uuid {node}`, or remove {}",
        path.display()
    )]
    Others {
        /// The node.
        node: NodeId,
        /// Where it is kept.
        path: PathBuf,
    },
    /// It cannot be told which guests are here.
    #[error(transparent)]
    Records(RecordFileError),
}

/// A state directory that is ours as long as this value lives.
#[derive(Debug)]
pub struct StateDir {
    /// Held, not read: the lock ends with the process, however it ends.
    _lock: Flock<File>,
    path: PathBuf,
}

impl StateDir {
    /// Makes the directory where it is missing, and takes it.
    pub fn take(path: &Path) -> Result<Self, IdentityError> {
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |source| IdentityError::Io { what, path, source }
        };
        fs::create_dir_all(path).map_err(failed("make directory", path))?;
        let lock_path = path.join("lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .map_err(failed("open", &lock_path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EWOULDBLOCK => IdentityError::Busy { path: path.to_owned() },
            errno => IdentityError::Io { what: "lock", path: lock_path.clone(), source: errno.into() },
        })?;
        Ok(Self { _lock: lock, path: path.to_owned() })
    }

    /// The configured uuid, else the one kept here, else a new one. It is kept from now on, so that an agent whose
    /// configuration was taken away is still the node of the guests that are here. Refuses another than that of these.
    #[cfg_attr(
        not(test),
        expect(clippy::disallowed_methods, reason = "once in the life of a node, before anything runs")
    )]
    pub fn node(&self, configured: Option<NodeId>, records: &RecordDir) -> Result<NodeId, IdentityError> {
        let path = self.path.join("uuid");
        let node = match (fs::read_to_string(&path), configured) {
            (Ok(text), None) => {
                return text.trim().parse().map_err(|source| IdentityError::Damaged { path, source });
            }
            (Err(error), None) if error.kind() == io::ErrorKind::NotFound => {
                NodeId::new(uuid::Uuid::new_v4())
            }
            (Err(source), None) => return Err(IdentityError::Io { what: "read", path, source }),
            (_, Some(node)) => {
                refuse_other(&self.path, records, node)?;
                node
            }
        };
        if kept(&self.path) != Some(node) {
            let failed = |source| IdentityError::Io { what: "write", path: path.clone(), source };
            keep(&path, &path.with_extension("new"), node).map_err(failed)?;
        }
        Ok(node)
    }
}

/// Whether an agent runs on a state directory.
pub(crate) fn is_busy(state_dir: &Path) -> bool {
    let Ok(file) = File::open(state_dir.join("lock")) else { return false };
    // What is taken here is given back at once.
    matches!(Flock::lock(file, FlockArg::LockExclusiveNonblock), Err((_, nix::errno::Errno::EWOULDBLOCK)))
}

/// The uuid kept in a state directory that is not ours, perhaps; none where there is none yet.
pub(crate) fn kept(state_dir: &Path) -> Option<NodeId> {
    fs::read_to_string(state_dir.join("uuid")).ok()?.trim().parse().ok()
}

/// Refuses to be another node than the one whose guests are here: of what bears that one's mark this one would see nothing, and
/// offer what it uses.
pub(crate) fn refuse_other(state_dir: &Path, records: &RecordDir, node: NodeId) -> Result<(), IdentityError> {
    let Some(kept) = kept(state_dir).filter(|kept| *kept != node) else { return Ok(()) };
    // Most say for which node they were made: an earlier release went on under another uuid, with guests of its own.
    let of = |record: Option<InstanceRecord>| record.and_then(|record| record.intent?.node()).unwrap_or(kept);
    let mut guests = records.list().map_err(IdentityError::Records)?.into_iter();
    match guests.find_map(|(_, record)| Some(of(record)).filter(|of| *of != node)) {
        Some(node) => Err(IdentityError::Others { node, path: state_dir.join("uuid") }),
        None => Ok(()),
    }
}

/// Writes a line, by way of a file that nobody else writes, whole or not at all: a crash must not leave half a uuid, which would
/// orphan the provider.
pub(crate) fn keep(path: &Path, temporary: &Path, line: impl Display) -> io::Result<()> {
    write(temporary, line)?;
    fs::rename(temporary, path)?;
    keep_name(path)
}

/// The same where there is no such file; one that is there, or that another host makes at the same time, stays as it is.
pub(crate) fn keep_first(path: &Path, temporary: &Path, line: impl Display) -> io::Result<()> {
    write(temporary, line)?;
    use io::ErrorKind::{AlreadyExists, PermissionDenied, Unsupported};
    match fs::hard_link(temporary, path) {
        Ok(()) => fs::remove_file(temporary)?,
        Err(error) if error.kind() == AlreadyExists => fs::remove_file(temporary)?,
        // A file system without such links: of two in the same moment the later one stays.
        Err(error) if matches!(error.kind(), PermissionDenied | Unsupported) => match path.try_exists()? {
            true => fs::remove_file(temporary)?,
            false => fs::rename(temporary, path)?,
        },
        Err(error) => return Err(error),
    }
    keep_name(path)
}

fn write(path: &Path, line: impl Display) -> io::Result<()> {
    let mut file = File::create(path)?;
    writeln!(file, "{line}")?;
    file.sync_all()
}

/// The name too must outlive a power cut: placement and etcd will know this uuid in a moment.
pub(crate) fn keep_name(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_node() -> NodeId {
        NodeId::new(uuid::Uuid::new_v4())
    }

    #[test]
    fn a_restart_is_the_same_node_and_a_second_agent_is_kept_out() {
        let directory = tempfile::tempdir().unwrap();
        let records = RecordDir::reader(directory.path().join("instances"));
        let state = StateDir::take(directory.path()).unwrap();
        let node = state.node(None, &records).unwrap();
        assert!(matches!(StateDir::take(directory.path()), Err(IdentityError::Busy { .. })));
        assert!(is_busy(directory.path()));
        drop(state);
        assert!(!is_busy(directory.path()));
        let state = StateDir::take(directory.path()).unwrap();
        assert_eq!(state.node(None, &records).unwrap(), node);
        let other = new_node();
        assert_eq!(state.node(Some(other), &records).unwrap(), other);
        assert_eq!(state.node(None, &records).unwrap(), other, "guests that come now are that node's");
        fs::remove_file(directory.path().join("uuid")).unwrap();
        assert_eq!(state.node(Some(node), &records).unwrap(), node);
        assert_eq!(
            state.node(None, &records).unwrap(),
            node,
            "its configuration is gone, and its guests are not"
        );
    }

    #[test]
    fn a_damaged_uuid_is_an_error_and_never_a_new_node() {
        let directory = tempfile::tempdir().unwrap();
        let records = RecordDir::reader(directory.path().join("instances"));
        let state = StateDir::take(directory.path()).unwrap();
        fs::write(directory.path().join("uuid"), "half").unwrap();
        assert!(matches!(state.node(None, &records), Err(IdentityError::Damaged { .. })));
    }

    #[test]
    fn guests_of_one_node_are_not_left_to_another() {
        let directory = tempfile::tempdir().unwrap();
        let records = RecordDir::open(directory.path().join("instances")).unwrap();
        let state = StateDir::take(directory.path()).unwrap();
        let [old, new] = [state.node(None, &records).unwrap(), new_node()];
        let put = |instance: u128, of: Option<NodeId>| {
            let instance = uuid::Uuid::from_u128(instance);
            let record = of.map(|node| serde_json::json!({"assigned": {"node": node, "epoch": 1}}));
            let record = serde_json::json!({
                "version": 1, "instance": instance, "name": "x", "macs": [], "created_at": "2026-01-01T00:00:00Z",
                "intent": {"request": {}, "record": record},
            });
            records.put(&serde_json::from_value(record).unwrap()).unwrap();
        };
        // Under which an earlier release went on.
        put(1, Some(new));
        assert_eq!(state.node(Some(new), &records).unwrap(), new);
        for of in [None, Some(old)] {
            state.node(Some(old), &records).unwrap_err();
            fs::write(directory.path().join("uuid"), old.to_string()).unwrap();
            put(2, of);
            let why = state.node(Some(new), &records).unwrap_err().to_string();
            assert!(why.contains(&format!("--uuid {old}`, or remove /")), "{why}");
            assert_eq!(kept(directory.path()), Some(old), "nothing is changed");
            fs::remove_file(directory.path().join("uuid")).unwrap();
            assert_eq!(state.node(Some(new), &records).unwrap(), new, "somebody said so");
        }
    }
}
