//! A backup as a file: a tar archive of etcd's database as its member sent it, and behind it documents of placement and of what
//! all that is.
//!
//! ```text
//!   etcd.db          the database, and behind it 32 bytes, which are the SHA-256 of all before
//!   placement.json   what placement knows, as `eplacement export` writes it; not where placement is somebody else's
//!   manifest.json    the digests of both, and when, of which cluster, by which release
//! ```
//!
//! It is written beside its place and gets its name when it is whole and proved, so that a file of that name is a backup.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use ec_pki::{create_held, directory, rename_new, sweep};
use ec_placement_store::transfer::Snapshot;
use ec_runtime::exit::Failure;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tar::{Archive, Builder, EntryType, Header};
use uuid::Uuid;

const DATABASE: &str = "etcd.db";
const PLACEMENT: &str = "placement.json";
const MANIFEST: &str = "manifest.json";
/// Of the digest that etcd sends behind its database.
const DIGEST: usize = 32;
/// What tar counts in.
const BLOCK: usize = 512;
/// No document of ours is longer.
const MANIFEST_MAX: u64 = 1 << 20;
/// That of placement holds some hundred bytes for each consumer.
const PLACEMENT_MAX: u64 = 1 << 32;

/// What a backup is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// The format of the file.
    pub(crate) version: u32,
    /// When it was begun.
    pub(crate) created_at: Timestamp,
    /// The release that wrote it.
    pub(crate) release: String,
    /// What our keys begin with.
    pub(crate) prefix: String,
    /// etcd's release.
    pub(crate) etcd: String,
    /// etcd's cluster, in hex.
    pub(crate) cluster: String,
    /// All changes up to this revision are in it, perhaps some later ones.
    pub(crate) revision: i64,
    /// How long the database is.
    pub(crate) bytes: u64,
    /// Its SHA-256, in hex.
    pub(crate) sha256: String,
    /// The document of placement; none where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) placement: Option<Document>,
}

/// What placement knows, as one document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Document {
    /// Resource providers.
    pub(crate) providers: usize,
    /// Who uses them.
    pub(crate) consumers: usize,
    /// How long it is.
    pub(crate) bytes: u64,
    /// Its SHA-256, in hex.
    pub(crate) sha256: String,
}

impl Document {
    /// Of such a text, with what it says.
    fn of(text: &[u8]) -> Result<(Self, Snapshot), String> {
        let wrong = |error: &dyn std::fmt::Display| format!("{PLACEMENT}: {error}");
        let snapshot = Snapshot::read(text).map_err(|error| wrong(&error))?;
        snapshot.check_version().map_err(|error| wrong(&error))?;
        let (providers, consumers) = (snapshot.providers.len(), snapshot.consumers.len());
        let sha256 = hex(&Sha256::digest(text));
        Ok((Self { providers, consumers, bytes: text.len() as u64, sha256 }, snapshot))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Manifest {
    /// The format that this release writes, and the last that it reads.
    pub(crate) const VERSION: u32 = 1;
}

fn failed(what: &str, path: &Path) -> impl Fn(io::Error) -> Failure {
    let what = format!("failed to {what} {}", path.display());
    move |error| Failure::failed(format!("{what}: {error}"))
}

/// A sum over all but the last 32 bytes, and those.
#[derive(Default)]
struct Proof {
    sum: Sha256,
    tail: Vec<u8>,
    bytes: u64,
}

impl Proof {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.tail.extend_from_slice(bytes);
        let summed = self.tail.len().saturating_sub(DIGEST);
        self.sum.update(&self.tail[..summed]);
        self.tail.drain(..summed);
    }

    /// How long the database is, and its digest; why it is damaged.
    fn end(self) -> Result<(u64, String), String> {
        let sum = self.sum.finalize();
        if self.tail.len() < DIGEST || *sum != *self.tail {
            return Err(
                "the digest at its end is not that of its content: it is not whole, or damaged".to_owned()
            );
        }
        Ok((self.bytes - DIGEST as u64, hex(&sum)))
    }
}

/// A backup that is being written.
pub(super) struct Writing {
    path: PathBuf,
    half: PathBuf,
    file: BufWriter<File>,
    proof: Proof,
    kept: bool,
}

impl Writing {
    /// Beside this file, which must not be there.
    pub(super) fn begin(path: &Path) -> Result<Self, Failure> {
        if path.exists() {
            return Err(taken(path));
        }
        // It is as secret, and as large, as the backups that were killed.
        if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
            sweep(directory(path), |found| is_half(found, name));
        }
        // Nobody else's: another backup to the same file may be under way.
        let (half, file) = create_held(|| {
            let mut half = path.as_os_str().to_owned();
            half.push(format!(".{}.part", Uuid::new_v4().simple()));
            PathBuf::from(half)
        })
        .map_err(failed("write beside", path))?;
        let mut file = BufWriter::new(file);
        // The header goes there when its length is known.
        file.write_all(&[0; BLOCK]).map_err(failed("write", &half))?;
        Ok(Self { path: path.to_owned(), half, file, proof: Proof::default(), kept: false })
    }

    /// Adds what comes next of the database.
    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.proof.add(bytes);
        self.file.write_all(bytes).map_err(failed("write", &self.half))
    }

    /// Proves that it is whole, adds the document of placement, and gives it its name. `manifest` is completed.
    pub(super) fn end(
        mut self,
        manifest: Manifest,
        placement: Option<&Snapshot>,
    ) -> Result<Manifest, Failure> {
        let length = self.proof.bytes;
        let (bytes, sha256) = std::mem::take(&mut self.proof)
            .end()
            .map_err(|why| Failure::failed(format!("etcd's snapshot is of no use: {why}; try again")))?;
        let unwritable = |why: String| Failure::failed(format!("placement cannot be written down: {why}"));
        let document = placement.map(serde_json::to_vec_pretty).transpose();
        let document = document.map_err(|error| unwritable(error.to_string()))?;
        let placement = document.as_deref().map(Document::of).transpose().map_err(unwritable)?;
        let placement = placement.map(|(document, _)| document);
        let manifest = Manifest { bytes, sha256, placement, ..manifest };
        self.finish(length, &manifest, document.as_deref()).map_err(failed("write", &self.half))?;
        rename_new(&self.half, &self.path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => taken(&self.path),
            _ => failed("rename", &self.half)(error),
        })?;
        self.kept = true;
        let directory = directory(&self.path);
        File::open(directory).and_then(|file| file.sync_all()).map_err(failed("sync", directory))?;
        Ok(manifest)
    }

    fn finish(&mut self, length: u64, manifest: &Manifest, placement: Option<&[u8]>) -> io::Result<()> {
        let block = BLOCK as u64;
        let padding = (block - length % block) % block;
        io::copy(&mut io::repeat(0).take(padding), &mut self.file)?;
        let told = serde_json::to_vec_pretty(manifest)?;
        let mut archive = Builder::new(&mut self.file);
        for (name, text) in placement.map(|text| (PLACEMENT, text)).into_iter().chain([(MANIFEST, &*told)]) {
            archive.append_data(&mut header(text.len() as u64, manifest), name, text)?;
        }
        archive.finish()?;
        drop(archive);
        let mut first = header(length, manifest);
        first.set_path(DATABASE)?;
        first.set_cksum();
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(first.as_bytes())?;
        self.file.flush()?;
        self.file.get_ref().sync_all()
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.kept {
            fs::remove_file(&self.half).ok();
        }
    }
}

/// Whether a name is of what was to be the backup of that name.
fn is_half(found: &str, name: &str) -> bool {
    let middle = found.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".part"));
    middle.is_some_and(|id| id.parse::<Uuid>().is_ok())
}

fn taken(path: &Path) -> Failure {
    Failure::usage(format!("{} is there already: name another file", path.display()))
}

fn header(size: u64, manifest: &Manifest) -> Header {
    // GNU's, which has room for any length.
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o600);
    header.set_size(size);
    header.set_mtime(u64::try_from(manifest.created_at.as_second()).unwrap_or(0));
    header
}

/// Reads a backup to its end; the database goes to `database`, with the digest behind it. Told is only of what is whole.
///
/// # Errors
/// It is damaged, or none of ours.
pub(super) fn read(path: &Path, database: impl Write) -> Result<Manifest, Failure> {
    whole(path, database).map(|(manifest, _)| manifest)
}

/// The same, with what placement knows, where that is in it.
///
/// # Errors
/// It is damaged, or none of ours.
pub(super) fn whole(path: &Path, mut database: impl Write) -> Result<(Manifest, Option<Snapshot>), Failure> {
    let bad = |why: &str| Failure::failed(format!("{} is not a whole backup: {why}", path.display()));
    let file = File::open(path).map_err(failed("open", path))?;
    let mut archive = Archive::new(file);
    let entries = archive.entries().map_err(|error| bad(&error.to_string()))?;
    let (mut proved, mut placement, mut manifest) = (None, None, None);
    for entry in entries {
        let mut entry = entry.map_err(|error| bad(&error.to_string()))?;
        let name = entry.path().map(|name| name.display().to_string()).unwrap_or_default();
        match name.as_str() {
            DATABASE => {
                let mut proof = Proof::default();
                let mut buffer = vec![0; 1 << 16];
                loop {
                    let count = entry.read(&mut buffer).map_err(|error| bad(&error.to_string()))?;
                    if count == 0 {
                        break;
                    }
                    proof.add(&buffer[..count]);
                    database.write_all(&buffer[..count]).map_err(failed("write what is in", path))?;
                }
                proved = Some(proof.end().map_err(|why| bad(&why))?);
            }
            PLACEMENT => {
                let mut text = Vec::new();
                entry.take(PLACEMENT_MAX).read_to_end(&mut text).map_err(|error| bad(&error.to_string()))?;
                placement = Some(Document::of(&text).map_err(|why| bad(&why))?);
            }
            MANIFEST => {
                let mut text = Vec::new();
                entry.take(MANIFEST_MAX).read_to_end(&mut text).map_err(|error| bad(&error.to_string()))?;
                manifest = Some(told(&text).map_err(|why| bad(&why))?);
            }
            _ => {}
        }
    }
    database.flush().map_err(failed("write what is in", path))?;
    let (Some((bytes, sha256)), Some(manifest)) = (proved, manifest) else {
        return Err(bad(&format!("it lacks {DATABASE} or {MANIFEST}")));
    };
    if (bytes, &sha256) != (manifest.bytes, &manifest.sha256) {
        return Err(bad(&format!("{MANIFEST} is of another {DATABASE}")));
    }
    let (document, snapshot) = placement.unzip();
    if document != manifest.placement {
        return Err(bad(&format!("{MANIFEST} is of another {PLACEMENT}, or it is damaged")));
    }
    Ok((manifest, snapshot))
}

fn told(text: &[u8]) -> Result<Manifest, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let wrong = |error: serde_json::Error| format!("{MANIFEST}: {error}");
    let Version { version } = serde_json::from_slice(text).map_err(wrong)?;
    if version > Manifest::VERSION {
        return Err(format!("it is of format {version}, this release reads up to {}", Manifest::VERSION));
    }
    serde_json::from_slice(text).map_err(wrong)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::cluster) fn manifest() -> Manifest {
        Manifest {
            version: Manifest::VERSION,
            created_at: Timestamp::UNIX_EPOCH,
            release: "1".to_owned(),
            prefix: "/ecompute".to_owned(),
            etcd: "3.5.16".to_owned(),
            cluster: "c".to_owned(),
            revision: 7,
            bytes: 0,
            sha256: String::new(),
            placement: None,
        }
    }

    fn snapshot() -> Snapshot {
        Snapshot {
            version: Snapshot::VERSION,
            traits: vec!["CUSTOM_ONE".to_owned(), "CUSTOM_TWO".to_owned()],
            ..Snapshot::default()
        }
    }

    /// As etcd sends it, in pieces of so many bytes.
    pub(in crate::cluster) fn written(
        path: &Path,
        database: &[u8],
        piece: usize,
        placement: Option<&Snapshot>,
    ) -> Result<Manifest, Failure> {
        let digest = Sha256::digest(database);
        let all = [database, &*digest].concat();
        let mut writing = Writing::begin(path)?;
        for piece in all.chunks(piece) {
            writing.add(piece)?;
        }
        writing.end(manifest(), placement)
    }

    #[test]
    fn what_is_written_is_read_and_for_its_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let snapshot = snapshot();
        for (number, (length, piece)) in
            [(0, 1), (1, 7), (480, 32), (512, 512), (100_001, 4096)].into_iter().enumerate()
        {
            let path = directory.path().join(format!("{length}.tar"));
            let database: Vec<u8> = (0..length).map(|n: u32| (n % 251) as u8).collect();
            let placement = (number % 2 == 0).then_some(&snapshot);
            let manifest = written(&path, &database, piece, placement).unwrap();
            assert_eq!(manifest.bytes, u64::from(length));
            assert_eq!(manifest.placement.is_some(), placement.is_some());
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            let mut read_back = Vec::new();
            assert_eq!(read(&path, &mut read_back).unwrap(), manifest);
            assert_eq!(read_back[..database.len()], database[..]);
            assert_eq!(read_back.len(), database.len() + DIGEST);
        }
    }

    #[test]
    fn what_placement_knew_comes_with_what_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        for (name, placement) in [("with.tar", Some(snapshot())), ("without.tar", None)] {
            let path = directory.path().join(name);
            let manifest = written(&path, b"database", 3, placement.as_ref()).unwrap();
            assert_eq!(whole(&path, io::sink()).unwrap(), (manifest, placement));
        }
    }

    #[test]
    fn a_file_that_is_there_is_not_touched_and_what_is_not_whole_gets_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("b.tar");
        let mut torn = Writing::begin(&path).unwrap();
        torn.add(b"half of a database, and no digest at all behind it").unwrap();
        assert!(torn.end(manifest(), None).err().unwrap().message.contains("not whole"));
        let mut short = Writing::begin(&path).unwrap();
        short.add(b"x").unwrap();
        assert!(short.end(manifest(), None).is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        written(&path, b"database", 3, None).unwrap();
        assert_eq!(Writing::begin(&path).err().unwrap().code, ec_runtime::exit::USAGE);
        read(&path, io::sink()).unwrap();
    }

    #[test]
    fn of_two_that_write_the_same_file_one_gets_the_name_and_the_other_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("b.tar");
        let whole = |database: &[u8]| [database, &*Sha256::digest(database)].concat();
        let (mut first, mut second) = (Writing::begin(&path).unwrap(), Writing::begin(&path).unwrap());
        first.add(&whole(b"one")).unwrap();
        second.add(&whole(b"another")).unwrap();
        let kept = first.end(manifest(), None).unwrap();
        assert_eq!(second.end(manifest(), None).err().unwrap().code, ec_runtime::exit::USAGE);
        assert_eq!(read(&path, io::sink()).unwrap(), kept);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_a_killed_one_left_is_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("b.tar");
        let left = directory.path().join(format!("b.tar.{}.part", Uuid::new_v4().simple()));
        let others = ["b.tar.old.part", "a.tar.part"].map(|name| directory.path().join(name));
        for file in others.iter().chain([&left]) {
            fs::write(file, "half").unwrap();
        }
        let under_way = Writing::begin(&path).unwrap();
        assert!(!left.exists());
        let second = Writing::begin(&path).unwrap();
        assert!(under_way.half.exists() && second.half.exists() && others.iter().all(|file| file.exists()));
    }

    #[test]
    fn each_damage_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("b.tar");
        written(&path, &vec![7; 3000], 999, Some(&snapshot())).unwrap();
        let whole = fs::read(&path).unwrap();
        let document = 512 + 3072 + 512;
        let name = document + whole[document..].windows(10).position(|text| text == b"CUSTOM_ONE").unwrap();
        // In the header, in the database, in its digest, in the document's header, in a name that it holds, in the last one's header.
        for at in [3, 600, 512 + 3000 + 5, 512 + 3072 + 3, name, document + 512 + 3] {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x20;
            fs::write(&path, &damaged).unwrap();
            assert!(read(&path, io::sink()).is_err(), "at {at}");
        }
        for length in [0, 100, 512, 2000, document - 512, document + 20, document + 512, document + 1024 + 20]
        {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(read(&path, io::sink()).is_err(), "{length} bytes");
        }
        // Without the document that the manifest tells of, and with one that it does not.
        let of = |placement: Option<&Snapshot>| {
            fs::remove_file(&path).unwrap();
            written(&path, b"database", 3, placement).unwrap();
            let all = fs::read(&path).unwrap();
            all[1024..].to_vec()
        };
        fs::write(&path, "").unwrap();
        let (with, without) = (of(Some(&snapshot())), of(None));
        let start = fs::read(&path).unwrap()[..1024].to_vec();
        fs::write(&path, [&start[..], &with[1024..]].concat()).unwrap();
        assert!(read(&path, io::sink()).err().unwrap().message.contains("another placement.json"));
        fs::write(&path, [&start[..], &with[..1024], &without[..]].concat()).unwrap();
        assert!(read(&path, io::sink()).err().unwrap().message.contains("another placement.json"));
        let other = String::from_utf8_lossy(&whole).into_owned().replace("\"version\": 1", "\"version\": 9");
        assert!(other.contains("\"version\": 9"));
        let told = super::told(br#"{"version": 9}"#).err().unwrap();
        assert!(told.contains("format 9"));
    }
}
