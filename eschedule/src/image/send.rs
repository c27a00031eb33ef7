//! Sending an image's bytes to the image store: looked at and counted while they go, and used by nobody before all came.

use std::{fs::File, io::ErrorKind, os::unix::fs::FileTypeExt, path::Path, time::Duration};

use ec_cloud::{Bytes, Cloud, CloudError, CloudResult, Facts, NewImage, NewVolume, Upload};
use ec_image::{
    FileStamp, ImageStore, InspectError, Packing, Probe, Probed, Refusal, Sending, StoreFailure, inspect_file,
};
use ec_model::{Image, ImageRef, Workload};
use ec_runtime::{
    exit::{FAILED, Failure, INTERRUPTED, UNREACHABLE, chain, tell},
    shutdown_on_signals,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    time::{Instant, Interval, MissedTickBehavior, interval_at},
};
use tokio_util::sync::CancellationToken;

use super::{clock_ahead, disk, is_whole, remove, store};
use crate::{config::Session, shown::Shown};

const CHUNK: usize = 1 << 20;

/// So much is looked at before who interrupts is heard: of packed bytes some thousand times as much may come out.
const PIECE: usize = 16 << 10;

/// A tenth of the time after which nobody is taken to be at it any more.
const SIGN_OF_LIFE: Duration = Duration::from_secs(60);

/// When to say that somebody is at it.
pub(super) fn signs_of_life() -> Interval {
    let mut alive = interval_at(Instant::now() + SIGN_OF_LIFE, SIGN_OF_LIFE);
    alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    alive
}

/// What is sent.
pub(super) struct Sender {
    bytes: Box<dyn AsyncRead + Unpin>,
    /// What it is called in messages.
    name: String,
    /// How many there are, where that is known.
    size: Option<u64>,
    /// The file that they are read from, as it was when that was looked at.
    file: Option<(File, FileStamp)>,
}

/// Where an image's bytes come from.
pub(super) enum From {
    /// From here.
    Here(Sender),
    /// They are those of a copy of this disk, which its node makes, of so many GiB where that is said.
    Disk(ImageRef, Option<u64>),
}

impl Sender {
    /// Bytes from elsewhere, so many where that is known.
    pub(super) fn of(bytes: impl AsyncRead + Unpin + 'static, name: String, size: Option<u64>) -> Self {
        Self { bytes: Box::new(bytes), name, size, file: None }
    }

    /// What comes on standard input.
    pub(super) fn standard() -> Self {
        Self::of(tokio::io::stdin(), "standard input".to_owned(), None)
    }

    /// A file, which is looked at as a whole first: what is no disk is refused before anything is written.
    pub(super) async fn file(path: &Path) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let wrong = |why: String| Failure::usage(format!("FILE {name} {why}"));
        let mut file = File::open(path).map_err(|error| {
            let is_word = error.kind() == ErrorKind::NotFound && !name.contains('/');
            let disks = || format!("; a disk is instance:{name} or volume:{name}");
            let hint = if is_word { disks() } else { String::new() };
            wrong(format!("cannot be read: {error}{hint}"))
        })?;
        let meta = file.metadata().map_err(|error| wrong(format!("cannot be read: {error}")))?;
        if meta.is_dir() {
            return Err(wrong("is a directory".to_owned()));
        }
        if meta.file_type().is_char_device() {
            return Err(wrong("is a device without an end".to_owned()));
        }
        let mut looked_at = None;
        if meta.is_file() {
            let other = file.try_clone().map_err(|error| wrong(format!("cannot be read: {error}")))?;
            looked_at = Some((other, FileStamp::of(&meta)));
            match inspect_file(&mut file) {
                Ok(_) => {}
                Err(InspectError::Refused(Refusal::Compressed { with })) if Packing::is_known(with) => {}
                Err(InspectError::Refused(why)) => return Err(wrong(format!("cannot be used: {why}"))),
                Err(InspectError::Read(error)) => return Err(wrong(format!("cannot be read: {error}"))),
            }
            std::io::Seek::rewind(&mut file).map_err(|error| wrong(format!("cannot be read: {error}")))?;
        }
        let size = meta.is_file().then_some(meta.len());
        Ok(Self { bytes: Box::new(tokio::fs::File::from_std(file)), name, size, file: looked_at })
    }

    /// Whether all came, and of one moment: what is written while it is read gives bytes that never were a disk, with a digest of their own.
    fn ended(&self, sent: u64) -> Result<(), Failure> {
        if let Some((file, stamp)) = &self.file {
            let meta = file.metadata().map_err(|error| broken(self, sent, &error))?;
            if FileStamp::of(&meta) != *stamp {
                return Err(Failure::failed(format!(
                    "{} changed while it was being sent; nothing was added",
                    self.name
                )));
            }
        }
        match self.size {
            Some(size) if sent != size => Err(broken(self, sent, &ErrorKind::UnexpectedEof.into())),
            _ => Ok(()),
        }
    }
}

/// The digests that what is sent must have.
#[derive(Clone, Copy)]
pub(super) struct Demanded<'a> {
    pub(super) all: &'a ImageRef,
    /// Those of them that the command was given.
    pub(super) given: &'a ImageRef,
    /// Where the others are published.
    pub(super) publisher: &'a str,
}

impl Demanded<'_> {
    /// What is wrong with bytes that have other digests.
    fn refuse(&self, found: &Probed) -> Result<(), String> {
        let Self { all, given, publisher } = self;
        for (name, option, found, demanded, is_given) in [
            ("SHA-256", "--sha256", Some(&found.sha256), &all.sha256, given.sha256.is_some()),
            ("SHA-512", "--sha512", found.sha512.as_ref(), &all.sha512, given.sha512.is_some()),
        ] {
            if let (Some(found), Some(demanded)) = (found, demanded)
                && found != demanded
            {
                let demands = match is_given {
                    true => format!("{option} demands"),
                    false => format!("{publisher} publishes"),
                };
                return Err(format!("its {name} is {found}, and {demands} {demanded}"));
            }
        }
        Ok(())
    }
}

/// Says which volumes of an instance are not in an image of its disk.
pub(super) async fn tell_left_out(session: &Session, of: &ImageRef) {
    let Some(copied) = of.copied().filter(|of| of.kind == Workload::Machine && of.beside.is_empty()) else {
        return;
    };
    // Whether it can be copied is said by who does that.
    let Ok(all) = ec_cloud::snapshot_of(&session.cloud, copied.disk).await else { return };
    let beside: Vec<_> = all.copied().into_iter().flat_map(|all| all.beside).collect();
    if !beside.is_empty() {
        let volumes: Vec<_> = beside.iter().map(ToString::to_string).collect();
        tell(&format!(
            "eschedule: the image has the disk of {} alone, and not what is on its volumes ({}): `eschedule snapshot create` copies all of one moment, of each of which an image can be made",
            copied.disk,
            volumes.join(", ")
        ));
    }
}

/// Makes an image of what is sent. Where that fails, or is interrupted, nothing is left of it.
pub(super) async fn send(
    session: &Session,
    new: &NewImage,
    from: From,
    demanded: Demanded<'_>,
) -> Result<Image, Failure> {
    let cloud = &session.cloud;
    let store = store(session)?;
    let stop = shutdown_on_signals()
        .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
    let remove = async |image: &Image| remove(session, image).await;
    store.attend(&ec_cloud::stored_images(cloud).await?).map_err(stored)?;
    if let From::Disk(of, size_gb) = &from {
        // Before there is anything of it: nothing may tell how large the copy is to be.
        let new = NewVolume { size_gb: *size_gb, image: Some(of.clone()), ..NewVolume::default() };
        ec_cloud::room_of(cloud, &new).await.map_err(|error| session.failed(error))?;
    }
    let now = clock_ahead(session).await;
    if let Some(why) = ec_cloud::clocks_differ(now) {
        tell(&format!(
            "eschedule: warning: {why}: while the image is being sent, others may take it away as if nobody were at it"
        ));
    }
    let place = Bytes::Sent { store: store.url().to_owned() };
    let is_whole = async |image: &Image| is_whole(session, image).await;
    let mut upload = ec_cloud::add_image(cloud, new, place, async || now, is_whole, remove).await?;
    let shown = Shown::new("sending");
    // First of all: a store that takes nothing is told before a disk is copied for it.
    let image = upload.image().clone();
    let begun = begun(&store, &image, async |part| upload.go_on(cloud, part).await).await;
    let outcome = match (begun, from) {
        (Err(failure), _) => Err(failure),
        (Ok(sending), From::Here(mut sender)) => {
            bytes(session, sending, &mut upload, &mut sender, demanded, &stop, &shown).await
        }
        (Ok(sending), From::Disk(of, size_gb)) => {
            let outcome = async {
                let part = sending.upload();
                let mut sender =
                    disk::sender(session, &mut upload, part, (&of, size_gb), &stop, &shown).await?;
                bytes(session, sending, &mut upload, &mut sender, demanded, &stop, &shown).await
            };
            let outcome = outcome.await;
            disk::end(session, &upload).await;
            outcome
        }
    };
    shown.finish();
    let failure = match outcome {
        Ok(facts) => match upload.finish(cloud, facts).await {
            Ok(image) => return Ok(image),
            // Whatever came is nobody's now.
            Err(error @ CloudError::Busy(_)) => error.into(),
            // It may be written all the same. If not, nobody takes away what is whole but who says so.
            Err(error) => {
                let id = upload.image().id;
                let failure = Failure::from(error);
                return Err(Failure {
                    message: format!(
                        "{}; all of its bytes are in the image store: if `eschedule image show {id}` does not tell that it is active, `eschedule image delete {id}` takes them away",
                        failure.message
                    ),
                    ..failure
                });
            }
        },
        Err(failure) => failure,
    };
    match upload.give_up(cloud, remove).await {
        Ok(()) => Err(failure),
        Err(error) => Err(Failure {
            message: format!(
                "{}; what came so far could not be taken away ({}): `eschedule image list` does so in ten minutes",
                failure.message,
                chain(&error)
            ),
            ..failure
        }),
    }
}

/// Begins to send, and has the record say so.
async fn begun(
    store: &ImageStore,
    image: &Image,
    note: impl AsyncFnOnce(Option<String>) -> CloudResult<()>,
) -> Result<Sending, Failure> {
    let sending = store.begin(image).await.map_err(stored)?;
    let Some(part) = sending.upload() else { return Ok(sending) };
    let Err(error) = note(Some(part)).await else { return Ok(sending) };
    let failure = Failure::from(error);
    // Who takes away what came goes by the record, which may not know of it.
    match sending.abandon().await {
        Ok(()) => Err(failure),
        Err(error) => {
            let kept = chain(&error);
            let message =
                format!("{}; the image store keeps an upload of which nothing came: {kept}", failure.message);
            Err(Failure { message, ..failure })
        }
    }
}

async fn bytes(
    session: &Session,
    mut sending: Sending,
    upload: &mut Upload,
    sender: &mut Sender,
    demanded: Demanded<'_>,
    stop: &CancellationToken,
    shown: &Shown,
) -> Result<Facts, Failure> {
    let cloud = &session.cloud;
    let wrong =
        |why: String| Failure::failed(format!("{} cannot be used: {why}; nothing was added", sender.name));
    let mut probe = Probe::new(demanded.all.sha512.is_some());
    let mut chunk = vec![0; CHUNK];
    let mut alive = signs_of_life();
    let mut sent = 0_u64;
    if let Some(size) = sender.size {
        sending.expect(size).map_err(stored)?;
    }
    loop {
        let length = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(interrupted()),
            // Nothing is lost of what is being read: it is read anew.
            _ = alive.tick() => {
                upload.still_at_it(cloud, sending.upload()).await?;
                continue;
            }
            read = sender.bytes.read(&mut chunk) => read.map_err(|error| broken(sender, sent, &error))?,
        };
        if length == 0 {
            break;
        }
        for piece in chunk[..length].chunks(PIECE) {
            probe.push(piece).map_err(|error| wrong(chain(&error)))?;
            tokio::task::yield_now().await;
            if stop.is_cancelled() {
                return Err(interrupted());
            }
        }
        let part = sending.upload();
        let pushed = async { sending.push(&chunk[..length]).await.map_err(stored) };
        attended(cloud, upload, part, &mut alive, stop, pushed).await?;
        sent += length as u64;
        shown.tell(&progress(sent, sender.size));
    }
    sender.ended(sent)?;
    let probed = probe.finish().map_err(|error| wrong(chain(&error)))?;
    demanded.refuse(&probed).map_err(wrong)?;
    // Of a file that was sent all was looked at before; of what came by a pipe only its beginning.
    if let (None, Some(mut whole)) = (probed.packing, sending.look().map_err(stored)?) {
        match inspect_file(&mut whole) {
            Ok(_) => {}
            Err(InspectError::Refused(why)) => return Err(wrong(why.to_string())),
            Err(InspectError::Read(error)) => return Err(wrong(error.to_string())),
        }
    }
    // The last look whether it is still ours: what is whole from here on has a record that knows it.
    let part = sending.upload();
    upload.complete(cloud, part.clone()).await?;
    let finished = async { sending.finish().await.map_err(stored) };
    attended(cloud, upload, part, &mut alive, stop, finished).await?;
    Ok(facts(probed))
}

/// What is told of bytes that did not come.
fn broken(sender: &Sender, sent: u64, error: &std::io::Error) -> Failure {
    let came = match sender.size {
        Some(size) => format!("{sent} of {size} bytes came"),
        None => format!("{sent} bytes came"),
    };
    // What was wrong stands last, behind the words of each layer.
    let mut why: &dyn std::error::Error = error;
    while let Some(source) = why.source() {
        why = source;
    }
    Failure::failed(format!("{} broke off: {came} ({why}); nothing was added, run it again", sender.name))
}

/// What comes of something that the store is asked for, which may take its time: meanwhile the record goes on saying that somebody is
/// at it, and who interrupts is heard.
async fn attended(
    cloud: &Cloud,
    upload: &mut Upload,
    part: Option<String>,
    alive: &mut Interval,
    stop: &CancellationToken,
    work: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    tokio::pin!(work);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return Err(interrupted()),
            _ = alive.tick() => upload.still_at_it(cloud, part.clone()).await?,
            done = &mut work => return done,
        }
    }
}

fn interrupted() -> Failure {
    Failure { code: INTERRUPTED, message: "interrupted; nothing was added".to_owned() }
}

fn facts(probed: Probed) -> Facts {
    Facts {
        size: probed.size,
        sha256: probed.sha256,
        sha512: probed.sha512,
        compression: probed.packing.map(Packing::name),
        disk_format: probed.format.name(),
        virtual_size: probed.virtual_size,
    }
}

/// Tenths, or hundreds of MiB: each is a line where there is no terminal.
fn progress(sent: u64, size: Option<u64>) -> String {
    match size.filter(|size| *size > 0) {
        Some(size) => format!("sent {} %", sent.saturating_mul(10) / size * 10),
        None => format!("sent {} MiB", (sent >> 20) / 100 * 100),
    }
}

pub(super) fn stored(error: StoreFailure) -> Failure {
    let code = if error.is_away() { UNREACHABLE } else { FAILED };
    Failure { code, message: format!("{}; nothing was added", chain(&error)) }
}

#[cfg(test)]
mod tests {
    use ec_image::StoreSection;
    use tokio::{io::AsyncWriteExt, net::TcpListener};

    use super::*;

    #[tokio::test]
    async fn what_is_not_all_of_one_moment_is_not_added() {
        let (mut session, directory) = (Session::in_memory().await, tempfile::tempdir().unwrap());
        session.settings.placement.endpoint = "http://127.0.0.1:1".to_owned();
        let store = directory.path().join("store");
        let url = serde_json::json!({"url": format!("file://{}", store.display())});
        session.settings.image_store = serde_json::from_value(url).unwrap();
        let file = directory.path().join("disk");
        let mut disk = vec![1; 1 << 16];
        disk[510..512].copy_from_slice(b"\x55\xaa");
        std::fs::write(&file, &disk).unwrap();
        let from_file = async || Sender::file(&file).await.unwrap();
        let sent = async |sender, name: &str| {
            let new = NewImage { name: name.to_owned(), ..NewImage::default() };
            let none = ImageRef::default();
            let demanded = Demanded { all: &none, given: &none, publisher: "" };
            send(&session, &new, From::Here(sender), demanded).await
        };
        sent(from_file().await, "whole").await.map_err(|failure| failure.message).unwrap();

        let sender = from_file().await;
        // A file system tells times by some milliseconds.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let written_at = std::fs::metadata(&file).unwrap().modified().unwrap();
        disk[1000] = 2;
        std::fs::write(&file, &disk).unwrap();
        File::options().write(true).open(&file).unwrap().set_modified(written_at).unwrap();
        let failure = sent(sender, "changed").await.unwrap_err();
        let why = format!("{} changed while it was being sent; nothing was added", file.display());
        assert_eq!(failure.message, why);

        let bytes = std::io::Cursor::new(disk.clone());
        let failure = sent(Sender::of(bytes, "it".to_owned(), Some(1 << 17)), "short").await.unwrap_err();
        assert!(
            failure.message.starts_with("it broke off: 65536 of 131072 bytes came"),
            "{}",
            failure.message
        );
        assert_eq!(std::fs::read_dir(&store).unwrap().count(), 1, "the first, which is whole");
    }

    #[test]
    fn who_demanded_another_digest_is_told() {
        let digest = |letter: &str| letter.repeat(64);
        let of = |sha256, sha512| ImageRef { sha256, sha512, ..ImageRef::default() };
        let mut probe = Probe::new(true);
        probe.push(&[1; 512]).unwrap();
        let found = probe.finish().unwrap();
        let all = of(Some(found.sha256.clone()), Some(digest("b")));
        let none = ImageRef::default();
        for (all, given, why) in [
            (&all, &none, "SHA-512 is "),
            (&all, &none, &*format!("and debian:13 publishes {}", digest("b"))),
            (&all, &all, &*format!("and --sha512 demands {}", digest("b"))),
            (&of(Some(digest("a")), None), &none, "and debian:13 publishes "),
        ] {
            let told = Demanded { all, given, publisher: "debian:13" }.refuse(&found).unwrap_err();
            assert!(told.contains(why), "{told}");
        }
        Demanded { all: &none, given: &none, publisher: "" }.refuse(&found).unwrap();
    }

    #[tokio::test]
    async fn an_upload_of_which_the_record_could_not_be_told_is_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let secret = directory.path().join("secret");
        std::fs::write(&secret, "SK").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let store = serde_json::json!({
            "url": "s3://bucket/ours", "endpoint": format!("http://{}", listener.local_addr().unwrap()),
            "access_key": "AK", "secret_key_file": secret,
        });
        let store = ImageStore::open(&serde_json::from_value::<StoreSection>(store).unwrap()).unwrap();
        let id = "00000000-0000-0000-0000-000000000001";
        let image = serde_json::json!({
            "id": id, "name": "x", "project": "p", "status": "saving", "url": format!("s3://bucket/ours/{id}"),
            "created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z",
        });
        let image: Image = serde_json::from_value(image).unwrap();
        let begun = begun(&store, &image, async |part| {
            assert_eq!(part.as_deref(), Some("parts"));
            Err(CloudError::Busy("somebody else took it away".to_owned()))
        });
        let served = async {
            let mut asked = Vec::new();
            let uploads = "<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>x</Key><UploadId>parts</UploadId></InitiateMultipartUploadResult>";
            loop {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(socket.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap();
                let is_last = head.starts_with("DELETE");
                asked.push(head.lines().next().unwrap_or_default().to_owned());
                let (status, text) = if is_last { ("204 No Content", "") } else { ("200 OK", uploads) };
                let length = text.len();
                let answer = format!(
                    "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{text}"
                );
                socket.write_all(answer.as_bytes()).await.unwrap();
                if is_last {
                    return asked;
                }
            }
        };
        let served = tokio::time::timeout(Duration::from_secs(20), served);
        let (begun, asked) = tokio::join!(begun, served);
        assert!(begun.err().unwrap().message.contains("somebody else"), "what went wrong first is told");
        let asked = asked.expect("it is still there");
        assert!(asked.len() == 2 && asked[1].contains("uploadId=parts"), "{asked:?}");
    }
}
