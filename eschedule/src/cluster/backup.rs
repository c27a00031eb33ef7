//! `eschedule cluster backup` and `cluster restore`: all of a cluster's memory as a file, and back.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use ec_model::Keyspace;
use ec_placement_store::transfer::{self, Snapshot, TransferError};
use ec_runtime::exit::{Failure, INTERRUPTED, tell};
use ec_store::{EtcdStore, Store};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use uuid::Uuid;

use super::{
    Cluster,
    archive::{self, Manifest, Writing},
    files::Directory,
};
use crate::{cli::Output, config::Settings, reach::Ending};

/// What takes longer is told of so often.
const PROGRESS: Duration = Duration::from_secs(1);
/// Further than any client of an etcd has seen, so that no revision comes twice.
const BUMP: &str = "1000000000";

/// A backup, as it was made or looked at.
#[derive(Serialize)]
pub(crate) struct BackedUp {
    /// Where it is.
    pub(crate) file: PathBuf,
    /// What it is of.
    #[serde(flatten)]
    pub(crate) manifest: Manifest,
}

impl BackedUp {
    fn print(&self, what: &str, output: Output) -> Result<(), Failure> {
        let Manifest { created_at, etcd, prefix, revision, bytes, sha256, placement, .. } = &self.manifest;
        let placement = placement.as_ref().map_or_else(String::new, |placement| {
            format!("; placement: {} providers, {} consumers", placement.providers, placement.consumers)
        });
        let line = format!(
            "{what}: {} of {created_at}: etcd {etcd}, prefix {prefix}, revision {revision}, {bytes} bytes, SHA-256 {sha256}{placement}",
            self.file.display()
        );
        output.print(self, || vec![self.file.display().to_string()], || line)
    }
}

/// What came of `cluster restore`.
#[derive(Serialize)]
pub(crate) struct Restored {
    /// The new data directory.
    pub(crate) data_dir: PathBuf,
    /// What is to be done next, in this order.
    pub(crate) next: Vec<String>,
}

/// Writes all that etcd holds to a file.
pub(super) async fn backup(
    directory: &Path,
    config: Option<&Path>,
    file: &Path,
    output: Output,
) -> Result<(), Failure> {
    // Interrupted, nothing of it is left.
    let mut ending = Ending::new()?;
    tokio::select! {
        written = written(directory, config, file) => {
            BackedUp { file: file.to_owned(), manifest: written? }.print("backed up", output)
        }
        () = ending.asked() => {
            Err(Failure { code: INTERRUPTED, message: "interrupted; there is no backup".to_owned() })
        }
    }
}

async fn written(directory: &Path, config: Option<&Path>, file: &Path) -> Result<Manifest, Failure> {
    let (store, keys) = open(directory, config).await?;
    let server = store.server().await?;
    let mut writing = Writing::begin(file)?;
    let manifest = Manifest {
        version: Manifest::VERSION,
        created_at: Timestamp::now(),
        release: env!("CARGO_PKG_VERSION").to_owned(),
        prefix: keys.root().to_owned(),
        etcd: server.version,
        cluster: format!("{:x}", server.cluster),
        revision: server.revision,
        bytes: 0,
        sha256: String::new(),
        placement: None,
    };
    let mut snapshot = store.snapshot().await?;
    let (mut told, mut done) = (Instant::now(), 0_u64);
    while let Some(piece) = snapshot.next().await? {
        writing.add(&piece.bytes)?;
        done += piece.bytes.len() as u64;
        if told.elapsed() >= PROGRESS {
            told = Instant::now();
            tell(&format!("eschedule: {} of {} MiB", done >> 20, (done + piece.remaining) >> 20));
        }
    }
    let placement = placement(&store, &keys).await?;
    writing.end(manifest, placement.as_ref())
}

/// What our own placement knows; nothing where there is none of ours. What cannot be written as a document is in the database all
/// the same, so that the backup is none the worse.
async fn placement(store: &EtcdStore, keys: &Keyspace) -> Result<Option<Snapshot>, Failure> {
    let prefix = keys.placement();
    if store.keys(&format!("{}/", prefix.trim_end_matches('/'))).await?.is_empty() {
        tell(&format!(
            "eschedule: nothing lies below {prefix}, so that the backup has no document of placement: OpenStack's is backed up by itself, and an eplacement with another `prefix` by `eplacement export`"
        ));
        return Ok(None);
    }
    let loaded = transfer::load(store, &ec_placement_store::Keys::new(&prefix)).await;
    let snapshot = loaded.and_then(transfer::Loaded::whole).and_then(|state| {
        let snapshot = Snapshot::of(&state);
        snapshot.check_sound().map(|_| snapshot)
    });
    match snapshot {
        Ok(snapshot) => Ok(Some(snapshot)),
        Err(TransferError::Store(error)) => Err(error.into()),
        Err(error) => {
            tell(&format!(
                "eschedule: placement is in the backup's database only, not as a document: {error}"
            ));
            Ok(None)
        }
    }
}

/// Looks whether a backup is whole.
pub(super) fn verify(file: &Path, output: Output) -> Result<(), Failure> {
    let (manifest, placement) = archive::whole(file, io::sink())?;
    let loose = placement.as_ref().map_or(Ok(Vec::new()), Snapshot::check_sound).map_err(|error| {
        Failure::failed(format!(
            "the database in {} is whole, and its placement.json of no use: {error}",
            file.display()
        ))
    })?;
    for finding in loose {
        tell(&format!("eschedule: warning: placement.json: {finding}"));
    }
    BackedUp { file: file.to_owned(), manifest }.print("whole", output)
}

/// etcd as its administrator; where there is no cluster of ours in that directory, as everybody who may.
async fn open(directory: &Path, config: Option<&Path>) -> Result<(EtcdStore, Keyspace), Failure> {
    if Directory::new(directory).expect().is_ok() {
        let cluster = Cluster::open(directory).await?;
        return Ok((EtcdStore::clone(&cluster.store), cluster.settings.keys.clone()));
    }
    let settings = Settings::load(config)?;
    Ok((EtcdStore::connect(settings.etcd.clone()).await?, settings.keys))
}

/// Makes a data directory for etcd of a backup.
pub(super) async fn restore(
    directory: &Path,
    file: &Path,
    data_dir: &Path,
    arguments: &[String],
    output: Output,
) -> Result<(), Failure> {
    // Interrupted, nothing of it is left.
    let mut ending = Ending::new()?;
    let done = tokio::select! {
        restored = restored(directory, file, data_dir, arguments) => restored?,
        () = ending.asked() => {
            return Err(Failure { code: INTERRUPTED, message: "interrupted; nothing was restored".to_owned() });
        }
    };
    let lines = || {
        let steps = done.next.iter().enumerate().map(|(number, step)| format!("{}. {step}", number + 1));
        std::iter::once(format!("made {}; next:", done.data_dir.display()))
            .chain(steps)
            .collect::<Vec<_>>()
            .join("\n")
    };
    output.print(&done, || vec![done.data_dir.display().to_string()], lines)
}

async fn restored(
    directory: &Path,
    file: &Path,
    data_dir: &Path,
    arguments: &[String],
) -> Result<Restored, Failure> {
    // What is said to be done next is done wherever.
    let data_dir = std::path::absolute(data_dir).map_err(failed("look for", data_dir))?;
    // Without a slash at its end: what is unpacked lies beside it.
    let data_dir = &data_dir.components().collect::<PathBuf>();
    sweep(data_dir);
    let refuse_taken = || match data_dir.exists() {
        true => Err(Failure::usage(format!(
            "{} is there already: name a directory that is not, and exchange the two while etcd is stopped",
            data_dir.display()
        ))),
        false => Ok(()),
    };
    refuse_taken()?;
    let tool = Tool::find().await?;
    let unpacked = Unpacked::make(data_dir)?;
    let database = unpacked.path.join("etcd.db");
    let made = File::options().write(true).create_new(true).mode(0o600).open(&database);
    let (made, from) = (made.map_err(failed("create", &database))?, file.to_owned());
    // Beside, so that a signal is heard meanwhile.
    tokio::task::spawn_blocking(move || archive::read(&from, made))
        .await
        .map_err(|error| Failure::failed(format!("failed to unpack {}: {error}", file.display())))??;
    let member =
        if arguments.is_empty() { member(&Directory::new(directory).etcd()) } else { arguments.to_vec() };
    // Killed in its midst, nothing bears the name of what is whole.
    let begun = unpacked.path.join("data");
    tool.restore(&database, &begun, &member).await?;
    // Another may have been quicker.
    refuse_taken()?;
    fs::rename(&begun, data_dir).map_err(failed("make", data_dir))?;
    let ours = Some(Directory::new(directory)).filter(|files| files.expect().is_ok());
    Ok(Restored { data_dir: data_dir.to_owned(), next: next(data_dir, file, ours.as_ref()) })
}

fn failed(what: &str, path: &Path) -> impl Fn(io::Error) -> Failure {
    let what = format!("failed to {what} {}", path.display());
    move |error| Failure::failed(format!("{what}: {error}"))
}

/// `ours` is where etcd asks who somebody is, by what we put there.
fn next(data_dir: &Path, file: &Path, ours: Option<&Directory>) -> Vec<String> {
    let mut steps = vec![
        "stop etcd".to_owned(),
        format!(
            "move its data directory away, put {} in its place, and give it to etcd's user (chown -R)",
            data_dir.display()
        ),
        format!("where etcd has several members, do both on each, of the same {}", file.display()),
        "start etcd; agents, eplacement and econtroller may go on running all the time".to_owned(),
    ];
    if let Some(files) = ours {
        let (init, there) = (files.again(), files.elsewhere());
        steps.extend([
            format!("{init}    # users, rights and tokens as they are now"),
            format!(
                "eschedule node list{there}    # whom the backup lets in: `eschedule node revoke NAME{there}` for each that was revoked \
                 since, `eschedule node add NAME --host HOST --uuid UUID{there}` for each that was added since, `eschedule node add \
                 NAME --again{there}` for each that was given new credentials since"
            ),
        ]);
    }
    let by = |name| ours.map_or_else(String::new, |files| files.configured(name));
    steps.extend([
        format!("eplacement check{}    # what does not fit in placement", by("eplacement.yaml")),
        format!("eschedule heal{}    # what nodes hold and the backup lacks", by("schedule.yaml")),
    ]);
    steps
}

/// What a directory's name ends with in which a backup is unpacked; before it come that of the data directory and a uuid.
const RESTORING: &str = ".restoring";

/// Where a backup is unpacked, and gone afterwards: it holds secrets.
struct Unpacked {
    path: PathBuf,
    /// Held, not read, as long as this lives.
    _lock: File,
}

impl Unpacked {
    /// Beside this data directory, and nobody else's: another restoration to the same place may be under way.
    fn make(data_dir: &Path) -> Result<Self, Failure> {
        loop {
            let mut path = data_dir.as_os_str().to_owned();
            path.push(format!(".{}{RESTORING}", Uuid::new_v4().simple()));
            let path = PathBuf::from(path);
            fs::DirBuilder::new().mode(0o700).create(&path).map_err(failed("make directory", &path))?;
            let lock = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                lock => lock.map_err(failed("open", &path))?,
            };
            // Where a file system knows no locks, nobody finds it to be nobody's either.
            lock.lock().ok();
            // Somebody may have swept it before it was held.
            if path.exists() {
                return Ok(Self { path, _lock: lock });
            }
        }
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.path).ok();
    }
}

/// Removes what restorations to this directory have left that were killed: it is as secret as the backup.
fn sweep(data_dir: &Path) {
    let name = data_dir.file_name().and_then(|name| name.to_str());
    let (Some(name), Some(parent)) = (name, data_dir.parent()) else { return };
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let found = entry.file_name();
        let drawn = found.to_str().and_then(|found| found.strip_prefix(name)?.strip_suffix(RESTORING));
        let is_id = |drawn: &str| drawn.strip_prefix('.').is_some_and(|id| id.parse::<Uuid>().is_ok());
        // Earlier releases drew none.
        if !drawn.is_some_and(|drawn| drawn.is_empty() || is_id(drawn)) {
            continue;
        }
        // Who unpacks there holds it; and who begins waits until it is gone.
        if let Ok(lock) = File::open(entry.path())
            && lock.try_lock().is_ok()
        {
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

/// Who the member is, as etcd's configuration says where it is ours; etcd's own defaults elsewhere.
fn member(configuration: &Path) -> Vec<String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Etcd {
        name: String,
        initial_cluster: String,
        initial_advertise_peer_urls: String,
    }
    let text = fs::read_to_string(configuration).unwrap_or_default();
    let Ok(etcd) = serde_yaml::from_str::<Etcd>(&text) else { return Vec::new() };
    [
        ("--name", etcd.name),
        ("--initial-cluster", etcd.initial_cluster),
        ("--initial-advertise-peer-urls", etcd.initial_advertise_peer_urls),
    ]
    .into_iter()
    .flat_map(|(option, value)| [option.to_owned(), value])
    .collect()
}

/// etcd's own program for that: there is no library for it.
struct Tool {
    name: &'static str,
    /// It can see to it that no revision comes twice.
    bumps: bool,
}

impl Tool {
    async fn find() -> Result<Self, Failure> {
        for name in ["etcdutl", "etcdctl"] {
            let mut help = Command::new(name);
            help.args(["snapshot", "restore", "--help"]).env("ETCDCTL_API", "3");
            let help = help.output().await;
            if let Ok(help) = help
                && help.status.success()
            {
                let bumps = String::from_utf8_lossy(&help.stdout).contains("--bump-revision");
                return Ok(Self { name, bumps });
            }
        }
        Err(Failure::failed(
            "neither etcdutl nor etcdctl is there, of which one is needed to restore: Debian has them in etcd-client",
        ))
    }

    /// What is left of one that fails goes with where it was unpacked.
    async fn restore(&self, database: &Path, data_dir: &Path, member: &[String]) -> Result<(), Failure> {
        let name = self.name;
        let mut command = Command::new(name);
        command.args(["snapshot", "restore"]).arg(database).arg("--data-dir").arg(data_dir).args(member);
        if self.bumps {
            command.args(["--bump-revision", BUMP, "--mark-compacted"]);
        }
        let done = command
            .env("ETCDCTL_API", "3")
            // It would go on to write what nobody waits for.
            .kill_on_drop(true)
            .output()
            .await
            .map_err(|error| Failure::failed(format!("failed to start {name}: {error}")))?;
        if done.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        Err(Failure::failed(format!("{name} snapshot restore failed: {said}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whom_a_backup_lets_in_is_told_of_where_etcd_asks_who_somebody_is() {
        let steps = |place: Option<&str>| {
            let ours = place.map(|place| Directory::new(Path::new(place)));
            next(Path::new("/new"), Path::new("/b.tar"), ours.as_ref()).join("\n")
        };
        for wanted in ["cluster init", "node list", "node revoke", "--uuid", "--again", "eschedule heal"] {
            assert!(steps(Some(super::super::DIRECTORY)).contains(wanted), "{wanted}");
        }
        assert!(!steps(Some(super::super::DIRECTORY)).contains("--directory"));
        // Of one that lies elsewhere each command says where.
        let elsewhere = steps(Some("/srv/c"));
        let commands = ["cluster init", "node list", "node revoke NAME", "UUID", "--again"];
        let commands = commands.map(|command| format!("{command} --directory /srv/c"));
        let configured = ["check --config /srv/c/eplacement.yaml", "heal --config /srv/c/schedule.yaml"];
        for wanted in commands.iter().map(String::as_str).chain(configured) {
            assert!(elsewhere.contains(wanted), "{wanted}: {elsewhere}");
        }
        assert!(!steps(None).contains("node ") && steps(None).contains("eschedule heal "));
    }

    /// As an earlier release wrote them, too.
    #[test]
    fn a_document_that_no_import_takes_is_told_and_the_database_is_there_all_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let (host, nobody) = ("11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222");
        let verified = |parent: &str| {
            let document = serde_json::json!({
                "version": 1, "traits": [], "resource_classes": [], "consumers": {},
                "providers": {host: {"version": 1, "generation": 1, "name": "h", "parent": parent, "created_at": 1, "updated_at": 1}},
            });
            let snapshot: Snapshot = serde_json::from_value(document).unwrap();
            let file = directory.path().join(format!("{parent}.tar"));
            archive::tests::written(&file, b"database", 3, Some(&snapshot)).unwrap();
            archive::read(&file, io::sink()).unwrap();
            verify(&file, Output::Table)
        };
        let refused = verified(host).err().unwrap();
        assert!(
            refused.code == ec_runtime::exit::FAILED && refused.message.contains("is in a loop"),
            "{}",
            refused.message
        );
        verified(nobody).unwrap();
    }

    #[test]
    fn of_two_restorations_to_one_place_neither_takes_the_others_away_and_what_a_killed_one_left_goes() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("etcd");
        let left = ["etcd.restoring", "etcd.6ba7b8109dad11d180b400c04fd430c8.restoring"];
        let others = ["etcd.mine.restoring", "etcd2.restoring", "etcd"];
        for name in left.iter().chain(&others) {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        let (one, other) = (Unpacked::make(&data_dir).unwrap(), Unpacked::make(&data_dir).unwrap());
        fs::write(one.path.join("etcd.db"), "secret").unwrap();
        sweep(&data_dir);
        assert!(left.iter().all(|name| !directory.path().join(name).exists()));
        drop(other);
        assert!(one.path.join("etcd.db").exists());
        drop(one);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), others.len());
    }

    #[test]
    fn a_member_is_who_its_configuration_says_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("etcd.yaml");
        assert_eq!(member(&file), [""; 0]);
        fs::write(&file, "name: a\n").unwrap();
        assert_eq!(member(&file), [""; 0]);
        let text =
            "name: a\ninitial-cluster: a=https://h:2380\ninitial-advertise-peer-urls: https://h:2380\nx: 1\n";
        fs::write(&file, text).unwrap();
        let told = member(&file);
        assert_eq!(told[..4], ["--name", "a", "--initial-cluster", "a=https://h:2380"]);
    }
}
