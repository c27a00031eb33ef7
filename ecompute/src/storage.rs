//! Where guests' disks lie, and whether it is there: on this node's own file systems ([`local`]), or on storage that several nodes
//! share, a directory that each of them has mounted, in which each has a directory of its own.
//!
//! A file in it says what it is. A mount that is missing is told by that from storage that is new, and one mounted in the place of
//! another, too.

mod local;
mod mark;
pub(crate) mod place;

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use ec_metadata::{InstanceRecord, RecordDir, RecordFileError};
use ec_model::{InstanceId, NodeId, SharedStorage};
use ec_placement_client::{PlacementClient, PlacementError, PlacementResult};
use ec_runtime::Host;
use futures::future::BoxFuture;
use tokio::{sync::Mutex, time::timeout};

use crate::{
    config::{DISKS, Settings, Shared},
    identity::{keep, keep_first},
    parts::Parts,
    register::RETRY,
};
pub(crate) use local::MARK as LOCAL_MARK;
use mark::Mark;

/// In the directory that is shared: the name of the storage and its id.
const MARK: &str = "etcd-compute.storage";
/// In a node's state directory: the same of the storage where its guests' disks lie.
const USED: &str = "shared-storage";

/// A file system that is there answers in less; one whose server is away holds up whoever looks at it for as long as that is.
pub(crate) const ANSWERS_IN: Duration = Duration::from_secs(10);

/// A question to the host's file systems, of which one may not answer. It is asked once at a time: each that is not answered holds
/// a thread.
pub(crate) struct Asked<T>(Mutex<Question<T>>);

struct Question<T> {
    under_way: Option<BoxFuture<'static, Option<T>>>,
    /// What was answered last.
    before: Option<T>,
}

impl<T> Default for Asked<T> {
    fn default() -> Self {
        Self(Mutex::new(Question { under_way: None, before: None }))
    }
}

impl<T: Clone + Send + 'static> Asked<T> {
    /// What that answers.
    ///
    /// # Errors
    /// It does not answer; what it answered before, where it did.
    pub(crate) async fn ask(
        &self,
        host: &Host,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Option<T>> {
        let mut asked = self.0.lock().await;
        // Whoever goes before it is answered leaves it to the next.
        let under_way = asked.under_way.get_or_insert_with(|| {
            let host = host.clone();
            Box::pin(async move { host.blocking(question).await.ok() })
        });
        let Ok(answer) = timeout(ANSWERS_IN, under_way).await else { return Err(asked.before.clone()) };
        asked.under_way = None;
        match answer {
            Some(answer) => {
                asked.before = Some(answer.clone());
                Ok(answer)
            }
            None => Err(asked.before.clone()),
        }
    }
}

/// What that answers, however long it takes, which is told.
pub(crate) async fn answer<T: Clone + Send + 'static>(
    host: &Host,
    path: &Path,
    question: impl Fn() -> T + Clone + Send + 'static,
) -> T {
    let (asked, mut told) = (Asked::default(), false);
    loop {
        match asked.ask(host, question.clone()).await {
            Ok(answer) => return answer,
            Err(_) if std::mem::replace(&mut told, true) => {}
            Err(_) => tracing::warn!("{}: waiting for it", silent(path)),
        }
    }
}

/// What is told of one that does not answer.
pub(crate) fn silent(path: &Path) -> String {
    format!("the file system of {} has not answered for {} s", path.display(), ANSWERS_IN.as_secs())
}

/// Why what guests' disks lie on cannot serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StorageError {
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
    /// There is no such directory.
    #[error("shared_storage.path: {} is no directory of this host: mount `{name}` there first", path.display())]
    Absent {
        /// Where it was to be.
        path: PathBuf,
        /// What it is called.
        name: String,
    },
    /// The directory is there, and what was in it is not.
    #[error(
        "shared_storage.path: {} is not `{}`, which this node has used: mount that there again ({MARK} in it is missing; if it is the same, write `{noted}` into that)",
        path.display(), noted.name
    )]
    NotMounted {
        /// Where it was to be.
        path: PathBuf,
        /// What it is.
        noted: Mark,
    },
    /// It is called the same, and is another: what lies below its mount point, perhaps.
    #[error(
        "shared_storage.path: {0} is another `{1}` than this node has used: mount that there again ({MARK} in it says `{found}`, and {2} `{noted}`; if this one is to be used from now on, remove {2})",
        path.display(), noted.name, used.display()
    )]
    Another {
        /// Where it was to be.
        path: PathBuf,
        /// What it is.
        noted: Box<Mark>,
        /// What is there.
        found: Box<Mark>,
        /// Where the first is remembered.
        used: PathBuf,
    },
    /// Nobody has used what is there, and nodes use the storage.
    #[error(
        "shared_storage.path: {} is not `{name}`, which node {by} uses: mount that there first (if it is the same, or begins anew, write `{name}` into {MARK} in it)",
        path.display()
    )]
    New {
        /// Where it was to be.
        path: PathBuf,
        /// What it is called.
        name: String,
        /// Who has it.
        by: NodeId,
    },
    /// The disks of this node's guests lie on storage that is not named any more.
    #[error(
        "shared_storage: this node's guests have their disks on `{name}`, and nobody would look for them there: name it in compute.yaml again until they are destroyed (where it is lost for good, remove {})",
        used.display()
    )]
    Left {
        /// What it is called.
        name: String,
        /// Where that is remembered.
        used: PathBuf,
    },
    /// The disks of this node's guests lie on a disk of its own.
    #[error(
        "shared_storage: this node's guests have their disks in {}, and nobody would look for them there: take the section out of compute.yaml again until they are destroyed",
        disks.display()
    )]
    NotEmptied {
        /// Where they are.
        disks: PathBuf,
    },
    /// What lies where the disks of this node's guests are to lie is not what they lie on.
    #[error(
        "{} is not where this node's guests have their disks ({} in it {}, and `{noted}` is noted): mount that there again (where they lie there all the same, or are lost for good, remove {})",
        disks.display(), local::MARK, said(found.as_deref()), used.display()
    )]
    OtherDisks {
        /// Where they are to lie.
        disks: PathBuf,
        /// The id of what they lie on.
        noted: String,
        /// That of what is there, where it has one.
        found: Option<String>,
        /// Where that is remembered.
        used: PathBuf,
    },
    /// The state directory was moved or copied.
    #[error(
        "state_dir: {} was {before} when this node's guests were made, and libvirt knows their disks there: mount or link it there, and set `state_dir: {before}` again (where none of them is left, or libvirt knows all of them here, remove {})",
        place.display(), noted.display()
    )]
    MovedState {
        /// Where it is.
        place: PathBuf,
        /// Where it was.
        before: String,
        /// Where that is remembered.
        noted: PathBuf,
    },
    /// Placement says for good that it does not tell who uses it.
    #[error(transparent)]
    Placement(PlacementError),
    /// It is another.
    #[error("shared_storage.name: what is mounted at {} is `{is}`, not `{name}`", path.display())]
    Other {
        /// Where it is.
        path: PathBuf,
        /// What it says it is.
        is: String,
        /// What it was to be.
        name: String,
    },
}

/// What a mark says, for people.
fn said(found: Option<&str>) -> String {
    found.map_or_else(|| "is missing".to_owned(), |id| format!("says `{id}`"))
}

/// Whether what guests' disks lie on may be what it shall be.
pub(crate) fn check(settings: &Settings) -> Result<(), StorageError> {
    match &settings.shared {
        Some(shared) => check_shared(shared, &settings.state_dir),
        None => local::check(&settings.state_dir),
    }
}

/// Makes sure of that, and marks what nobody has used yet.
pub(crate) fn take(settings: &Settings, node: NodeId) -> Result<(), StorageError> {
    match &settings.shared {
        Some(shared) => take_shared(shared, &settings.state_dir, node),
        None => local::take(&settings.state_dir),
    }
}

/// An id that nothing else has.
#[cfg_attr(
    not(test),
    expect(clippy::disallowed_methods, reason = "once in the life of a storage, before anything runs")
)]
fn new_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// A disk that a record of this node tells of: its own, or the volume's that it boots from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recorded {
    disk: InstanceId,
    /// Whether it was made, and a guest may have written it.
    is_made: bool,
}

/// The disks that this node's records tell of. Of a record that cannot be read that is its own, as of most.
pub(crate) fn recorded(records: &RecordDir) -> Result<Vec<Recorded>, RecordFileError> {
    let of = |(instance, record): (InstanceId, Option<InstanceRecord>)| {
        let is_made = record.as_ref().is_none_or(|record| record.started);
        let root = record.and_then(|record| record.intent?.root());
        Recorded { disk: root.unwrap_or(instance), is_made }
    };
    Ok(records.list()?.into_iter().map(of).collect())
}

/// Refuses to look for guests' disks elsewhere than they lie, for as long as this node has records of such: all of them would be
/// taken for deleted.
pub(crate) fn refuse_moved(
    shared: Option<&Shared>,
    state_dir: &Path,
    recorded: &[Recorded],
) -> Result<(), StorageError> {
    let (used, disks) = (state_dir.join(USED), state_dir.join(DISKS));
    // A link that leads to what is not mounted is one, too.
    let is_local = |of: &Recorded| disks.join(format!("{}.qcow2", of.disk)).symlink_metadata().is_ok();
    let left = |name| Err(StorageError::Left { name, used: used.clone() });
    match (Mark::read(&used)?.map(|noted| noted.name), shared) {
        (Some(name), Some(shared)) if name != shared.storage.name && !recorded.is_empty() => left(name),
        // Where none is missed, they are of an older agent, to whose node they came since it left the storage.
        (Some(name), None) if recorded.iter().any(|of| of.is_made && !is_local(of)) => left(name),
        // Of local disks that are not mounted nobody knows whose they are.
        (None, Some(_)) if !recorded.is_empty() => {
            local::check(state_dir)?;
            if recorded.iter().any(is_local) { Err(StorageError::NotEmptied { disks }) } else { Ok(()) }
        }
        _ => Ok(()),
    }
}

/// Makes sure that what is mounted is what it shall be, and notes it. Storage that nobody has used yet is marked, by one of several
/// nodes where they come at once.
fn take_shared(shared: &Shared, state_dir: &Path, node: NodeId) -> Result<(), StorageError> {
    check_shared(shared, state_dir)?;
    let (mark, used) = (shared.path.join(MARK), state_dir.join(USED));
    let failed = |what, path: &Path| {
        let path = path.to_owned();
        move |source| StorageError::Io { what, path, source }
    };
    if Mark::read(&mark)?.is_none() {
        let new = Mark::new(&shared.storage.name);
        keep_first(&mark, &mark.with_extension(node.to_string()), new).map_err(failed("write", &mark))?;
        // It may be another's.
        check_shared(shared, state_dir)?;
    }
    let gone = || failed("read", &mark)(io::ErrorKind::NotFound.into());
    let found = Mark::read(&mark)?.ok_or_else(gone)?;
    if Mark::read(&used)?.as_ref() != Some(&found) {
        keep(&used, &used.with_extension(node.to_string()), found).map_err(failed("write", &used))?;
    }
    Ok(())
}

/// Refuses a directory that nobody has used, where placement knows nodes that use the storage: it is not mounted. This node may be one
/// of them, of a host that was installed anew. Waits for a placement that is away, or does not tell.
pub(crate) async fn refuse_new(
    shared: &Shared,
    placement: &PlacementClient,
    node: NodeId,
) -> Result<(), StorageError> {
    let (name, path) = (shared.storage.name.clone(), shared.path.clone());
    let mark = path.join(MARK);
    let looked = Host::default().blocking(move || Mark::read(&mark)).await;
    if looked.unwrap_or(Ok(None))?.is_some() {
        return Ok(());
    }
    let mut told = false;
    loop {
        let shares = async {
            // A list leaves out whom placement cannot read. Of this node it says so, and nobody else may be known to use it.
            placement.provider(node).await?;
            placement.shares_of(&shared.storage).await
        };
        match shares.await {
            Ok(nodes) => {
                let by = nodes.iter().find(|other| **other == node).or(nodes.first());
                return by.map_or(Ok(()), |by| Err(StorageError::New { path, name, by: *by }));
            }
            // A replica hears of a new token when it hears of it.
            Err(error)
                if !error.is_transient() && !matches!(error, PlacementError::Denied { status: 401, .. }) =>
            {
                return Err(StorageError::Placement(error));
            }
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(%error, storage = name, "waiting for placement, which knows whose storage this is");
                }
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// Whether what is mounted may be what it shall be.
fn check_shared(shared: &Shared, state_dir: &Path) -> Result<(), StorageError> {
    let (name, path) = (shared.storage.name.clone(), shared.path.clone());
    if !path.is_dir() {
        return Err(StorageError::Absent { path, name });
    }
    let used = state_dir.join(USED);
    let noted = Mark::read(&used)?.filter(|noted| noted.name == name);
    match (Mark::read(&path.join(MARK))?, noted) {
        (Some(found), _) if found.name != name => Err(StorageError::Other { path, is: found.name, name }),
        (Some(found), Some(noted)) if !noted.may_be(&found) => {
            Err(StorageError::Another { path, noted: noted.into(), found: found.into(), used })
        }
        (None, Some(noted)) => Err(StorageError::NotMounted { path, noted }),
        _ => Ok(()),
    }
}

fn read(path: &Path) -> Result<Option<String>, StorageError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StorageError::Io { what: "read", path: path.to_owned(), source }),
    }
}

/// Has placement know that this node's guests have their disks on the storage that it shares, or on none.
pub(crate) async fn join(parts: &Parts) -> PlacementResult<()> {
    let (placement, node) = (&parts.placement, parts.node);
    let shared = parts.settings.shared.as_ref().map(|shared| &shared.storage);
    let used = parts.settings.state_dir.join(USED);
    match leave_others(placement, parts, shared).await {
        // By mistake: it never had its disks there.
        Err(error @ PlacementError::Invalid(_)) if !used.exists() => {
            tracing::error!(%error, "what is claimed of that storage may be taken of this node's own disks");
        }
        left => left?,
    }
    if shared.is_none() {
        // From now on guests' disks lie with this node.
        fs::remove_file(used).ok();
    }
    let Some(storage) = shared else { return Ok(()) };
    placement.join_shared(storage, node).await.map_err(|error| match error {
        PlacementError::Denied { status: 403, .. } => PlacementError::Invalid(format!(
            "placement does not let this node join shared storage `{0}` by itself: have an operator run `eschedule storage join {0} {node}`",
            storage.name
        )),
        error => error,
    })
}

async fn leave_others(
    placement: &PlacementClient,
    parts: &Parts,
    stays: Option<&SharedStorage>,
) -> PlacementResult<()> {
    let storages = placement.shared_by(parts.node).await?;
    for storage in storages.iter().filter(|storage| Some(*storage) != stays) {
        tracing::info!(storage = storage.name, "this node's guests have their disks elsewhere: leaving it");
        let node = parts.node;
        placement.leave_shared(storage, node).await.map_err(|error| match error {
            PlacementError::Denied { status: 403, .. } => PlacementError::Invalid(format!(
                "placement does not let this node leave shared storage `{0}` by itself: have an operator run `eschedule storage leave {0} {node}`",
                storage.name
            )),
            error => error,
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ec_placement_client::PlacementConfig;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    fn node(number: u128) -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(number))
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_system_that_does_not_answer_is_asked_once_and_what_it_answered_before_is_known() {
        let (host, asked) = (Host::default(), Asked::<u8>::default());
        assert_eq!(asked.ask(&host, || 1).await, Ok(1));
        let (answer, waits) = std::sync::mpsc::channel::<u8>();
        // While a thread works the clock does not go on by itself.
        let later = || tokio::time::advance(ANSWERS_IN);
        let (first, ()) = tokio::join!(asked.ask(&host, move || waits.recv().unwrap()), later());
        let (second, ()) = tokio::join!(asked.ask(&host, || panic!("it was asked twice")), later());
        assert_eq!([first, second], [Err(Some(1)); 2]);
        answer.send(2).unwrap();
        assert_eq!(asked.ask(&host, || 3).await, Ok(2));
        assert_eq!(asked.ask(&host, || 3).await, Ok(3));
    }

    /// A placement that answers the question for a provider, and those for lists, with these.
    async fn placement(provider: (u16, &'static str), list: &'static str) -> PlacementClient {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            loop {
                let (mut peer, _) = listener.accept().await.unwrap();
                let mut asked = vec![0; 4096];
                let length = peer.read(&mut asked).await.unwrap();
                let is_list = String::from_utf8_lossy(&asked[..length]).contains("member_of");
                let (status, body) = if is_list { (200, list) } else { provider };
                let head = "content-type: application/json\r\nconnection: close";
                let answer =
                    format!("HTTP/1.1 {status} x\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                peer.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        ec_runtime::install_tls_provider();
        PlacementClient::new(&PlacementConfig { endpoint, ..PlacementConfig::default() }).unwrap()
    }

    #[tokio::test]
    async fn a_directory_is_not_new_while_placement_cannot_read_whether_this_node_uses_it() {
        let place = tempfile::tempdir().unwrap();
        let nfs = Shared { storage: SharedStorage::named("nfs"), path: place.path().to_owned() };
        let nobody = r#"{"resource_providers": []}"#;
        let unreadable = r#"{"errors": [{"status": 503, "detail": "cannot read"}]}"#;
        let unknown = r#"{"errors": [{"status": 404, "detail": "The resource could not be found."}]}"#;
        let asked = async |provider| {
            let placement = placement(provider, nobody).await;
            timeout(Duration::from_secs(1), refuse_new(&nfs, &placement, node(1))).await
        };
        asked((503, unreadable)).await.unwrap_err();
        asked((404, unknown)).await.unwrap().unwrap();
    }

    #[test]
    fn of_many_who_come_at_once_each_finds_it_marked() {
        for _ in 0..20 {
            let place = tempfile::tempdir().unwrap();
            std::thread::scope(|scope| {
                let come = (0..8).map(|number| {
                    let path = place.path().to_owned();
                    scope.spawn(move || {
                        let nfs = Shared { storage: SharedStorage::named("nfs"), path };
                        let state = tempfile::tempdir().unwrap();
                        take_shared(&nfs, state.path(), node(number)).unwrap();
                        read(&state.path().join(USED)).unwrap()
                    })
                });
                let come: Vec<_> = come.collect();
                let mark = |noted: std::thread::ScopedJoinHandle<'_, _>| noted.join().unwrap();
                let noted: Vec<_> = come.into_iter().map(mark).collect();
                assert_eq!(noted, vec![read(&place.path().join(MARK)).unwrap(); 8]);
            });
            let left: Vec<_> =
                fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(left, [MARK]);
        }
    }

    #[test]
    fn disks_are_not_looked_for_elsewhere_while_there_are_guests() {
        let (state, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let shared =
            |name: &str| Shared { storage: SharedStorage::named(name), path: place.path().to_owned() };
        let (nfs, other) = (shared("nfs"), shared("other"));
        let of = |number, is_made| Recorded { disk: InstanceId::new(uuid::Uuid::from_u128(number)), is_made };
        let refused = |shared: Option<&Shared>, recorded: &[Recorded]| {
            let moved = refuse_moved(shared, state.path(), recorded);
            moved.map_err(|error| error.to_string()).err()
        };
        let guests = [of(1, true), of(2, true)];
        let disk = |of: Recorded| state.path().join(DISKS).join(format!("{}.qcow2", of.disk));
        assert_eq!(refused(Some(&nfs), &guests), None, "they lie nowhere that is known");
        fs::create_dir(state.path().join(DISKS)).unwrap();
        fs::write(state.path().join(DISKS).join("somebodys.qcow2"), "").unwrap();
        assert_eq!(refused(Some(&nfs), &guests), None, "it is none of them");
        fs::write(disk(guests[0]), "").unwrap();
        assert!(refused(Some(&nfs), &guests).unwrap().contains("have their disks in"));
        assert_eq!((refused(Some(&nfs), &[]), refused(None, &guests)), (None, None));
        fs::remove_file(disk(guests[0])).unwrap();
        local::take(state.path()).unwrap();
        assert_eq!(refused(Some(&nfs), &guests), None);
        let (disks, away) = (state.path().join(DISKS), state.path().join("away"));
        fs::rename(&disks, &away).unwrap();
        assert!(refused(Some(&nfs), &guests).unwrap().contains("mount that there again"));
        fs::rename(&away, &disks).unwrap();
        take_shared(&nfs, state.path(), node(1)).unwrap();
        assert_eq!(refused(Some(&nfs), &guests), None);
        for elsewhere in [Some(&other), None] {
            assert!(refused(elsewhere, &guests).unwrap().contains("have their disks on `nfs`"));
            assert_eq!(refused(elsewhere, &[]), None);
        }
        // All of them, and not one of them, came since it left the storage.
        fs::write(disk(guests[0]), "").unwrap();
        assert!(refused(None, &guests).unwrap().contains("have their disks on `nfs`"));
        std::os::unix::fs::symlink("/nonexistent", disk(guests[1])).unwrap();
        assert_eq!(refused(None, &guests), None);
        assert_eq!(refused(None, &[guests[0], of(3, false)]), None, "its disk is yet to be made");
    }

    #[test]
    fn a_record_tells_of_its_own_disk_or_of_the_volume_that_it_boots_from() {
        let directory = tempfile::tempdir().unwrap();
        let records = RecordDir::open(directory.path()).unwrap();
        let id = |number| InstanceId::new(uuid::Uuid::from_u128(number));
        let put = |number, started, volumes: serde_json::Value| {
            let record = serde_json::json!({
                "version": 1, "instance": id(number), "name": "x", "macs": [], "started": started,
                "intent": {"request": {"volumes": volumes}}, "created_at": "2026-01-01T00:00:00Z",
            });
            records.put(&serde_json::from_value(record).unwrap()).unwrap();
        };
        put(1, false, serde_json::json!([{"volume": id(7), "device": "vdb"}]));
        put(2, true, serde_json::json!([{"volume": id(8), "device": "vda"}]));
        fs::write(directory.path().join(format!("{}.json", id(3))), "{\"version\": 99}").unwrap();
        let mut found: Vec<_> = recorded(&records).unwrap().iter().map(|of| (of.disk, of.is_made)).collect();
        found.sort_unstable();
        assert_eq!(found, [(id(1), false), (id(3), true), (id(8), true)]);
    }

    #[test]
    fn what_was_marked_before_there_were_ids_goes_on_and_is_told_from_others_once_it_has_one() {
        let (state, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let nfs = Shared { storage: SharedStorage::named("nfs"), path: place.path().to_owned() };
        let take = || take_shared(&nfs, state.path(), node(1));
        let (mark, used) = (place.path().join(MARK), state.path().join(USED));
        let noted = || fs::read_to_string(&used).unwrap();
        fs::write(&mark, "nfs\n").unwrap();
        take().unwrap();
        assert_eq!(noted(), "nfs\n");
        fs::write(&mark, "nfs 1\n").unwrap();
        take().unwrap();
        assert_eq!(noted(), "nfs 1\n");
        for other in ["nfs\n", "nfs 2\n"] {
            fs::write(&mark, other).unwrap();
            take().unwrap_err();
        }
        assert_eq!(noted(), "nfs 1\n");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_does_not_answer_is_waited_for() {
        let (answer, waits) = std::sync::mpsc::channel::<u8>();
        let waits = std::sync::Arc::new(std::sync::Mutex::new(waits));
        let host = Host::default();
        let waiting = super::answer(&host, Path::new("/srv"), move || waits.lock().unwrap().recv().unwrap());
        tokio::pin!(waiting);
        assert!(timeout(Duration::ZERO, &mut waiting).await.is_err());
        tokio::time::advance(ANSWERS_IN * 2).await;
        assert!(timeout(Duration::ZERO, &mut waiting).await.is_err());
        answer.send(2).unwrap();
        assert_eq!(waiting.await, 2);
    }

    #[test]
    fn storage_is_marked_once_and_what_is_not_it_is_never_used() {
        let (state, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let shared =
            |name: &str, path: &Path| Shared { storage: SharedStorage::named(name), path: path.to_owned() };
        let nfs = shared("nfs", place.path());
        take_shared(&nfs, state.path(), node(1)).unwrap();
        take_shared(&nfs, state.path(), node(1)).unwrap();
        take_shared(&nfs, tempfile::tempdir().unwrap().path(), node(2)).unwrap();
        let error =
            take_shared(&shared("other", place.path()), state.path(), node(1)).unwrap_err().to_string();
        assert!(error.contains("is `nfs`, not `other`"), "{error}");
        // The mount is gone, and what it was mounted on is there.
        fs::remove_file(place.path().join(MARK)).unwrap();
        let error = take_shared(&nfs, state.path(), node(1)).unwrap_err().to_string();
        assert!(error.contains("which this node has used"), "{error}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        // Another node has marked that.
        let other = tempfile::tempdir().unwrap();
        take_shared(&nfs, other.path(), node(2)).unwrap();
        let error = take_shared(&nfs, state.path(), node(1)).unwrap_err().to_string();
        assert!(error.contains("is another `nfs`") && error.contains("remove /"), "{error}");
        fs::copy(state.path().join(USED), place.path().join(MARK)).unwrap();
        take_shared(&nfs, state.path(), node(1)).unwrap();
        take_shared(&nfs, other.path(), node(2)).unwrap_err();
        let error = take_shared(&shared("nfs", Path::new("/nonexistent")), state.path(), node(1))
            .unwrap_err()
            .to_string();
        assert!(error.contains("mount `nfs` there first"), "{error}");
    }
}
