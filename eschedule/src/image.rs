//! `eschedule image`: the catalogue of images.

mod disk;
mod fetched;
mod known;
mod published;
mod send;

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};
use ec_cloud::{Bytes, Cloud, CloudError, CloudResult, ImageChange, NewImage};
use ec_image::{ImageStore, StoreFailure};
use ec_model::{
    Image, ImageRef, ImageStatus, Visibility,
    input::{image_name, is_image_url, property, property_key},
};
use ec_placement_client::PlacementClient;
use ec_runtime::exit::{Failure, chain, tell};

pub(crate) use known::{Known, distribution, is_distribution, known, names};
pub(crate) use published::published;

use crate::{
    cli::Output,
    config::Session,
    output::{self, Deleted},
    several::Told,
    spec::{copied, once_each, sha256, sha512},
};

/// So long placement is given to tell what time it is.
const TELLS_TIME: Duration = Duration::from_secs(2);

pub(crate) const EXAMPLES: &str = "\
An image has a name within the project, and is used by it wherever an image is named. What an
instance was made from is copied into its record: an image that is changed or deleted changes no
instance.

Examples:
  eschedule image add debian:12
      of a distribution that is known, with the digest that it publishes
  eschedule image add web https://images.example/web.qcow2 --sha256 DIGEST
      from there, by each node that needs it
  eschedule image add debian:12 --copy
      the same, fetched once and kept in the image store of schedule.yaml
  eschedule image add mine disk.qcow2.zst --min-disk 10
      the file is sent to the image store of schedule.yaml
  eschedule image add golden instance:web
      the disk of an instance as it is at this moment, also while that runs; or of volume:NAME
  eschedule run web2 --flavor small --image mine";

/// What is done to images.
#[derive(Subcommand)]
pub(crate) enum ImageCommand {
    /// Make an image of a URL, a file, or a distribution that is known
    #[command(visible_alias = "create")]
    Add(Box<Adding>),
    /// List the project's images, and those that everybody may use
    ///
    /// Takes away what commands that were killed left more than ten minutes ago.
    List,
    /// Show an image
    Show {
        /// Its name or its uuid
        #[arg(value_name = "IMAGE", value_parser = NonEmptyStringValueParser::new())]
        image: String,
    },
    /// Delete images; instances that were made from them stay as they are
    Delete {
        /// Names or uuids
        #[arg(value_name = "IMAGE", required = true, value_parser = NonEmptyStringValueParser::new())]
        images: Vec<String>,
    },
    /// Change what is said of an image
    Set(Box<Setting>),
}

/// `eschedule image add`.
#[derive(Args)]
pub(crate) struct Adding {
    /// Letters, digits, and - _ . @ : in any case of letters
    #[arg(value_parser = image_name)]
    name: String,

    /// http://, https:// or file:// as nodes reach it; a file to send to the image store, or - for standard input; the disk
    /// of instance:NAME or volume:NAME, to be copied there; or a distribution with its release, as debian:12 [default: what
    /// NAME says]
    #[arg(value_name = "URL|FILE|DISK", value_parser = NonEmptyStringValueParser::new())]
    source: Option<String>,

    /// The SHA-256 that it must have, in hex
    #[arg(long, value_name = "DIGEST")]
    sha256: Option<String>,

    /// The SHA-512 that it must have, in hex
    #[arg(long, value_name = "DIGEST")]
    sha512: Option<String>,

    /// How large the copy of a disk is to be, in GiB, where no record tells how large that is: of a snapshot of several disks, or of
    /// an instance without DISK_GB
    #[arg(long, value_name = "GB", value_parser = clap::value_parser!(u64).range(1..))]
    size: Option<u64>,

    /// Copy what is at a URL, or published of a distribution, into the image store: nodes fetch it from there
    #[arg(long)]
    copy: bool,

    /// Let all projects use it
    #[arg(long)]
    public: bool,

    /// Refuse to delete it, until `image set --unprotected`
    #[arg(long)]
    protected: bool,

    /// The least DISK_GB of an instance made from it [default: 0; of a disk, what the image that it was made of needs]
    #[arg(long, value_name = "GB")]
    min_disk: Option<u64>,

    /// The least MEMORY_MB of an instance made from it [default: as of --min-disk]
    #[arg(long, value_name = "MB")]
    min_ram: Option<u64>,

    /// What else is said of it; may be given more than once
    #[arg(long, value_name = "KEY=VALUE", value_parser = property)]
    property: Vec<(String, String)>,
}

/// `eschedule image set`.
#[derive(Args)]
pub(crate) struct Setting {
    /// Its name or its uuid
    #[arg(value_name = "IMAGE", value_parser = NonEmptyStringValueParser::new())]
    image: String,

    /// Call it so
    #[arg(long, value_name = "NAME", value_parser = image_name)]
    name: Option<String>,

    /// Let all projects use it
    #[arg(long, conflicts_with = "private")]
    public: bool,

    /// Let only its project use it
    #[arg(long)]
    private: bool,

    /// Refuse to delete it
    #[arg(long, conflicts_with = "unprotected")]
    protected: bool,

    /// Let it be deleted
    #[arg(long)]
    unprotected: bool,

    /// The least DISK_GB of an instance made from it
    #[arg(long, value_name = "GB")]
    min_disk: Option<u64>,

    /// The least MEMORY_MB of an instance made from it
    #[arg(long, value_name = "MB")]
    min_ram: Option<u64>,

    /// Say something of it; may be given more than once
    #[arg(long, value_name = "KEY=VALUE", value_parser = property)]
    property: Vec<(String, String)>,

    /// Take back what is said by this key; may be given more than once
    #[arg(long, value_name = "KEY", value_parser = property_key)]
    unset: Vec<String>,
}

/// Where a new image comes from.
enum Source {
    At(ImageRef),
    /// Bytes that lie in the image store, of another image.
    Stored(ImageRef),
    Disk(ImageRef),
    File(PathBuf),
    Standard,
}

impl ImageCommand {
    /// Whether it takes back, when it is interrupted, what it began with.
    pub(crate) const fn is_long(&self) -> bool {
        matches!(self, Self::Add(_))
    }
}

/// Does it.
pub(crate) async fn image(session: &Session, command: ImageCommand, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    match command {
        ImageCommand::Add(adding) => output::image(output, &add(session, *adding).await?),
        ImageCommand::List => {
            tidy(session).await;
            output::images(output, &cloud.project, &ec_cloud::images(cloud).await?)
        }
        ImageCommand::Show { image } => output::image(output, &ec_cloud::image(cloud, &image).await?),
        ImageCommand::Delete { images } => delete(session, &images, output).await,
        ImageCommand::Set(setting) => {
            let Setting { image, name, public, private, protected, unprotected, min_disk, min_ram, .. } =
                &*setting;
            let visibility = match (public, private) {
                (true, _) => Some(Visibility::Public),
                (_, true) => Some(Visibility::Private),
                _ => None,
            };
            let set = once_each("--property", &setting.property)?.into_iter();
            let mut properties: BTreeMap<_, _> = set.map(|(key, value)| (key, Some(value))).collect();
            for key in &setting.unset {
                if properties.insert(key.clone(), None).is_some_and(|value| value.is_some()) {
                    return Err(Failure::usage(format!("property {key} is both set and taken off")));
                }
            }
            let change = ImageChange {
                name: name.clone(),
                visibility,
                protected: (*protected || *unprotected).then_some(*protected),
                min_disk: *min_disk,
                min_ram: *min_ram,
                properties,
            };
            if change == ImageChange::default() {
                return Err(Failure::usage("nothing to set: `eschedule image set --help` tells what can be"));
            }
            output::image(output, &ec_cloud::change_image(cloud, image, &change).await?)
        }
    }
}

/// One that fails does not keep the others from being deleted.
async fn delete(session: &Session, images: &[String], output: Output) -> Result<(), Failure> {
    let of_failed = |word: &str, _, why: &str| Deleted::failed(&session.cloud, word, why);
    let mut told = Told::new(output, images.len() == 1, &of_failed);
    // Before any is deleted: once it is gone its name would mean another's, or nobody.
    let (mut said, mut named) = (HashSet::new(), HashSet::new());
    let mut each = Vec::new();
    for text in images.iter().filter(|text| said.insert(*text)) {
        each.push((text, ec_cloud::image(&session.cloud, text).await));
    }
    for (text, meant) in each {
        // Named twice it is deleted once, whichever way.
        if meant.is_ok_and(|image| !named.insert(image.id)) {
            continue;
        }
        let remove = async |image: &Image| remove(session, image).await;
        let deleted = async {
            attend_for(session, text).await?;
            ec_cloud::delete_image(&session.cloud, text, remove).await
        };
        match deleted.await {
            Ok(deleted) => told.tell(Deleted::one(&session.cloud, "IMAGE", &deleted.name, "DELETED")),
            Err(error) => told.fail(text, &error.into()),
        }
    }
    tidy_copies(session).await;
    told.end()?;
    unmark(session);
    Ok(())
}

async fn add(session: &Session, adding: Adding) -> Result<Image, Failure> {
    let cloud = &session.cloud;
    let new = new_image(cloud, &adding, None).await?;
    new.check()?;
    let demanded = ImageRef {
        sha256: adding.sha256.as_deref().map(|digest| sha256(digest, "--sha256")).transpose()?,
        sha512: adding.sha512.as_deref().map(|digest| sha512(digest, "--sha512")).transpose()?,
        ..ImageRef::default()
    };
    let source = source(session, &adding, &demanded).await?;
    let publisher = adding.source.as_deref().unwrap_or(&adding.name);
    let demanding = |all| send::Demanded { all, given: &demanded, publisher };
    if adding.size.is_some() && !matches!(source, Source::Disk(_)) {
        return Err(Failure::usage(
            "--size is how large the copy of a disk is to be: of instance:NAME or volume:NAME",
        ));
    }
    let remove = async |image: &Image| remove(session, image).await;
    match source {
        Source::At(at) if adding.copy => {
            let sender = fetched::sender(&at.url).await?;
            send::send(session, &new, send::From::Here(sender), demanding(&at)).await
        }
        Source::Stored(at) => {
            let sender = fetched::stored(&store(session)?, &at.url).await?;
            send::send(session, &new, send::From::Here(sender), demanding(&at)).await
        }
        Source::At(at) => {
            let is_whole = async |image: &Image| is_whole(session, image).await;
            let is_any = at.sha256.is_none() && at.sha512.is_none();
            let ahead = async || clock_ahead(session).await;
            let added = ec_cloud::add_image(cloud, &new, Bytes::At(at), ahead, is_whole, remove).await?;
            if is_any {
                tell(
                    "eschedule: nobody has looked at what is there, and nodes will take whatever it is by then: `--sha256` demands its digest, `--copy` keeps what is there now",
                );
            }
            Ok(added.image().clone())
        }
        Source::File(path) => {
            let sender = send::Sender::file(&path).await?;
            send::send(session, &new, send::From::Here(sender), demanding(&demanded)).await
        }
        Source::Disk(of) => {
            let new = new_image(cloud, &adding, Some(&of)).await?;
            let from = send::From::Disk(of.clone(), adding.size);
            let image = send::send(session, &new, from, demanding(&demanded)).await?;
            send::tell_left_out(session, &of).await;
            Ok(image)
        }
        Source::Standard => {
            let sender = send::Sender::standard();
            send::send(session, &new, send::From::Here(sender), demanding(&demanded)).await
        }
    }
}

/// What is said of a new image. That of a disk needs what the image of that did, where nothing else is said.
async fn new_image(cloud: &Cloud, adding: &Adding, disk: Option<&ImageRef>) -> Result<NewImage, Failure> {
    let (min_disk, min_ram) = match disk {
        Some(of) if adding.min_disk.is_none() || adding.min_ram.is_none() => {
            ec_cloud::least_of_origin(cloud, of).await?
        }
        _ => (0, 0),
    };
    Ok(NewImage {
        name: adding.name.clone(),
        visibility: if adding.public { Visibility::Public } else { Visibility::Private },
        protected: adding.protected,
        min_disk: adding.min_disk.unwrap_or(min_disk),
        min_ram: adding.min_ram.unwrap_or(min_ram),
        properties: once_each("--property", &adding.property)?,
    })
}

async fn source(session: &Session, adding: &Adding, demanded: &ImageRef) -> Result<Source, Failure> {
    let text = adding.source.as_deref().unwrap_or(&adding.name);
    // A file that is there is meant, unless it is called as we call a release.
    let is_file = adding.source.is_some() && Path::new(text).is_file();
    let meant = known(text).filter(|known| !is_file || known.is_called(text));
    if let Some(known) = meant {
        let found = published(known, &session.settings.image_mirrors).await?;
        for (option, demanded, found) in
            [("--sha256", &demanded.sha256, &found.sha256), ("--sha512", &demanded.sha512, &found.sha512)]
        {
            if let (Some(demanded), Some(found)) = (demanded, found)
                && demanded != found
            {
                return Err(Failure::failed(format!(
                    "{option} demands {demanded}, and {text} publishes {found}"
                )));
            }
        }
        return Ok(Source::At(ImageRef {
            sha256: found.sha256.or_else(|| demanded.sha256.clone()),
            sha512: found.sha512.or_else(|| demanded.sha512.clone()),
            ..found
        }));
    }
    if let Some(releases) = known::others(text).filter(|_| !is_file) {
        return Err(Failure::usage(format!(
            "`{text}` is no release that is known of its distribution ({releases}): give one of them, a URL, or a file, as ./{text}"
        )));
    }
    if adding.source.is_none() {
        return Err(Failure::usage(format!(
            "`{text}` is no distribution that is known ({}): give a URL or a file behind it",
            names()
        )));
    }
    if let Some(of) = copied(session, text).await? {
        return Ok(Source::Disk(of));
    }
    let at = ImageRef { url: text.to_owned(), ..demanded.clone() };
    // They go with the image that they are of.
    if session.settings.image_store.image(text).is_some() {
        return Ok(Source::Stored(at));
    }
    if is_image_url(text) {
        return Ok(Source::At(at));
    }
    if text == "-" {
        return Ok(Source::Standard);
    }
    if text.contains("://") {
        return Err(Failure::usage(format!(
            "`{text}` cannot be an image's URL: wanted http://…, https://… or file:///absolute/path"
        )));
    }
    Ok(Source::File(PathBuf::from(text)))
}

/// The image store of schedule.yaml.
pub(crate) fn store(session: &Session) -> Result<ImageStore, Failure> {
    ImageStore::open(&session.settings.image_store)
        .map_err(|error| Failure::usage(format!("image_store of schedule.yaml: {}", chain(&error))))
}

/// Looks whether the image store is there before the record of one that is to be deleted says that it goes: nobody takes that back.
async fn attend_for(session: &Session, text: &str) -> CloudResult<()> {
    let image = ec_cloud::image(&session.cloud, text).await?;
    // One that goes already goes on with it, and of one that is on its way nobody knows what has come.
    if !image.stored || image.status != ImageStatus::Active {
        return Ok(());
    }
    let store = store(session).map_err(|failure| CloudError::Invalid(failure.message))?;
    let images = ec_cloud::stored_images(&session.cloud).await?;
    let attended = store.attend_for(&image, &images).await;
    attended.map_err(|error| {
        of_store(
            &error,
            format!("the image `{text}` stays, and nothing of it was deleted: {}", chain(&error)),
        )
    })
}

/// Takes an image's bytes out of the image store.
async fn remove(session: &Session, image: &Image) -> CloudResult<()> {
    let store = store(session).map_err(|failure| CloudError::Invalid(failure.message))?;
    let kept = |error: StoreFailure| {
        let what = format!(
            "the bytes of image {} were not taken away: {}; `eschedule image delete {}` tries it again",
            image.id,
            chain(&error),
            image.id
        );
        of_store(&error, what)
    };
    store.attend(&ec_cloud::stored_images(&session.cloud).await?).map_err(kept)?;
    store.remove(image).await.map_err(kept)
}

/// What was deleted has no record any more.
fn unmark(session: &Session) {
    if let Ok(store) = store(session) {
        store.unmark();
    }
}

/// Whether all of an image's bytes are in the image store.
async fn is_whole(session: &Session, image: &Image) -> CloudResult<bool> {
    let store = store(session).map_err(|failure| CloudError::Invalid(failure.message))?;
    let unknown = |error: StoreFailure| {
        let what = format!(
            "nobody knows whether all bytes of image {} are there: {}; `eschedule image delete {}` takes away what is",
            image.id,
            chain(&error),
            image.id
        );
        of_store(&error, what)
    };
    store.attend(&ec_cloud::stored_images(&session.cloud).await?).map_err(unknown)?;
    store.has_whole(image).await.map_err(unknown)
}

/// What the store could not do, told so.
fn of_store(error: &StoreFailure, what: String) -> CloudError {
    if error.is_away() { CloudError::Unavailable(what) } else { CloudError::Refused(what) }
}

/// So many seconds placement's clock is ahead of this host's, where it answers soon and tells.
async fn clock_ahead(session: &Session) -> Option<i64> {
    let client = PlacementClient::new(&session.settings.placement).ok()?;
    // Whatever it answers has a date.
    tokio::time::timeout(TELLS_TIME, client.probe()).await.ok();
    client.clock_ahead()
}

/// Takes away what killed commands left; where that cannot be, it is told and stays.
async fn tidy(session: &Session) {
    let remove = async |image: &Image| remove(session, image).await;
    let is_whole = async |image: &Image| is_whole(session, image).await;
    let ahead = async || clock_ahead(session).await;
    match ec_cloud::tend_images(&session.cloud, ahead, is_whole, remove).await {
        Ok(gone) => {
            for image in gone.done {
                tell(&format!("eschedule: took away what was left of the image `{}`", image.name));
            }
            match gone.failed {
                Some(error) => tell(&format!("eschedule: what is left of an image stays: {}", chain(&error))),
                None => unmark(session),
            }
        }
        Err(error) => tell(&format!("eschedule: what is left of an image stays: {}", chain(&error))),
    }
    tidy_copies(session).await;
}

/// The same of copies of disks alone.
async fn tidy_copies(session: &Session) {
    match ec_cloud::tend_copies(&session.cloud, async || clock_ahead(session).await).await {
        Ok(gone) => {
            for image in gone {
                tell(&format!("eschedule: deleted the copy of a disk that was left of the image {image}"));
            }
        }
        Err(error) => tell(&format!("eschedule: a copy that was made for an image stays: {}", chain(&error))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ec_cloud::Facts;
    use ec_model::encode;
    use ec_store::Txn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// An image all of whose bytes lie in the store.
    async fn whole(session: &Session, name: &str) -> Image {
        let new = NewImage { name: name.to_owned(), ..NewImage::default() };
        let store = session.settings.image_store.url().to_owned();
        let nothing = async |_: &Image| Ok(());
        let added = ec_cloud::add_image(
            &session.cloud,
            &new,
            Bytes::Sent { store },
            async || None,
            async |_| Ok(true),
            nothing,
        );
        let facts = Facts {
            size: 1,
            sha256: "a".repeat(64),
            sha512: None,
            compression: None,
            disk_format: "raw",
            virtual_size: 512,
        };
        added.await.unwrap().finish(&session.cloud, facts).await.unwrap()
    }

    #[tokio::test]
    async fn one_that_is_named_in_two_ways_is_deleted_once() {
        let session = Session::in_memory().await;
        let at = || Bytes::At(ImageRef::at("http://127.0.0.1:1/a"));
        let (whole, nothing) = (async |_: &Image| Ok(true), async |_: &Image| Ok(()));
        let new = NewImage { name: "web".to_owned(), ..NewImage::default() };
        let added = ec_cloud::add_image(&session.cloud, &new, at(), async || None, whole, nothing);
        let id = added.await.unwrap().image().id.to_string();
        let words = [id.clone(), "web".to_owned(), "WEB".to_owned()];
        delete(&session, &words, Output::Table).await.unwrap();
        assert!(ec_cloud::image(&session.cloud, &id).await.is_err());
        delete(&session, &words, Output::Table).await.unwrap_err();
    }

    #[tokio::test]
    async fn nothing_is_deleted_or_marked_of_a_store_that_is_not_mounted() {
        let (mut session, directory) = (Session::in_memory().await, tempfile::tempdir().unwrap());
        let (mounted, away) = (directory.path().join("store"), directory.path().join("away"));
        let url = serde_json::json!({"url": format!("file://{}", mounted.display())});
        session.settings.image_store = serde_json::from_value(url).unwrap();
        let names = ["a", "b"].map(str::to_owned);
        fs::create_dir(&mounted).unwrap();
        let mut images = Vec::new();
        for name in &names {
            let image = whole(&session, name).await;
            fs::write(mounted.join(image.id.to_string()), "x").unwrap();
            images.push(image);
        }
        let status = async |image: &Image| {
            let now = ec_cloud::image(&session.cloud, &image.id.to_string()).await;
            now.ok().map(|image| image.status)
        };
        fs::rename(&mounted, &away).unwrap();
        for is_there in [false, true] {
            if is_there {
                fs::create_dir(&mounted).unwrap();
            }
            delete(&session, &names, Output::Table).await.unwrap_err();
            let told = attend_for(&session, "a").await.unwrap_err().to_string();
            let why = "the image `a` stays, and nothing of it was deleted: ";
            assert!(told.starts_with(why) && told.contains("is its file system mounted?"), "{told}");
            tidy(&session).await;
            for image in &images {
                assert_eq!(status(image).await, Some(ImageStatus::Active), "{is_there}");
            }
        }
        // One that goes already, whose command was killed, stays until the store is there.
        let [going, other] = &images[..] else { panic!("there are two") };
        let killed = async |_: &Image| Err(CloudError::Interrupted);
        ec_cloud::delete_image(&session.cloud, "a", killed).await.unwrap_err();
        ec_cloud::delete_image(&session.cloud, "b", async |_: &Image| Ok(())).await.unwrap();
        tidy(&session).await;
        delete(&session, &[going.id.to_string()], Output::Table).await.unwrap_err();
        assert_eq!(status(going).await, Some(ImageStatus::PendingDelete));
        fs::remove_dir(&mounted).unwrap();
        fs::rename(&away, &mounted).unwrap();
        tidy(&session).await;
        assert_eq!((status(going).await, status(other).await), (None, None));
        let left = |image: &Image| mounted.join(image.id.to_string()).exists();
        assert_eq!((left(going), left(other)), (false, true), "that of the other nobody asked for");
    }

    #[tokio::test]
    async fn what_seems_to_be_left_is_not_marked_while_its_store_is_not_mounted() {
        let (mut session, directory) = (Session::in_memory().await, tempfile::tempdir().unwrap());
        let (mounted, away) = (directory.path().join("store"), directory.path().join("away"));
        let url = serde_json::json!({"url": format!("file://{}", mounted.display())});
        session.settings.image_store = serde_json::from_value(url).unwrap();
        session.settings.placement.endpoint = "http://127.0.0.1:1".to_owned();
        fs::create_dir(&mounted).unwrap();
        let other = whole(&session, "other").await;
        // As etcd has it that was put back to before its end.
        let image = whole(&session, "a").await;
        let image = Image {
            status: ImageStatus::Saving,
            size: None,
            updated_at: jiff::Timestamp::UNIX_EPOCH,
            ..image
        };
        let key = session.cloud.keys.image(image.id);
        session.cloud.store.txn(Txn::new().put(key, encode(&image))).await.unwrap();
        for image in [&image, &other] {
            fs::write(mounted.join(image.id.to_string()), "x").unwrap();
        }
        fs::rename(&mounted, &away).unwrap();
        fs::create_dir(&mounted).unwrap();
        // An image that nobody knows, so that it is not without any.
        fs::write(mounted.join("00000000-0000-0000-0000-000000000001"), "x").unwrap();
        tidy(&session).await;
        let now = ec_cloud::image(&session.cloud, &image.id.to_string()).await.unwrap();
        assert_eq!(now.status, ImageStatus::Saving);
        fs::remove_dir_all(&mounted).unwrap();
        fs::rename(&away, &mounted).unwrap();
        tidy(&session).await;
        assert!(mounted.join(image.id.to_string()).exists());
    }

    /// A placement whose clock was never set.
    async fn of_long_ago() -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let answer = "HTTP/1.1 503 no\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        url
    }

    #[tokio::test]
    async fn what_seems_to_be_left_stays_where_clocks_differ() {
        let mut session = Session::in_memory().await;
        let new = NewImage { name: "a".to_owned(), ..NewImage::default() };
        let store = "file:///store".to_owned();
        let (whole, nothing) = (async |_: &Image| Ok(false), async |_: &Image| Ok(()));
        let added =
            ec_cloud::add_image(&session.cloud, &new, Bytes::Sent { store }, async || None, whole, nothing);
        // Nothing of it lies anywhere.
        let image = Image {
            stored: false,
            updated_at: jiff::Timestamp::UNIX_EPOCH,
            ..added.await.unwrap().image().clone()
        };
        let key = session.cloud.keys.image(image.id);
        session.cloud.store.txn(Txn::new().put(key.clone(), encode(&image))).await.unwrap();
        for (endpoint, stays) in [(of_long_ago().await, true), ("http://127.0.0.1:1".to_owned(), false)] {
            session.settings.placement.endpoint = endpoint;
            let differ = ec_cloud::clocks_differ(clock_ahead(&session).await);
            assert_eq!(differ.is_some(), stays, "{differ:?}");
            tidy(&session).await;
            assert_eq!(session.cloud.store.get(&key).await.unwrap().0.is_some(), stays);
        }
    }

    fn adding(source: &str) -> Adding {
        Adding {
            name: "a".to_owned(),
            source: Some(source.to_owned()),
            sha256: None,
            sha512: None,
            size: None,
            copy: false,
            public: false,
            protected: false,
            min_disk: None,
            min_ram: None,
            property: Vec::new(),
        }
    }

    #[tokio::test]
    async fn an_image_of_a_disk_needs_what_its_origin_did_unless_that_is_said() {
        let session = Session::in_memory().await;
        let cloud = &session.cloud;
        let new = NewImage { name: "debian".to_owned(), min_disk: 3, min_ram: 512, ..NewImage::default() };
        let at = Bytes::At(ImageRef::at("file:///x"));
        let added = ec_cloud::add_image(
            cloud,
            &new,
            at,
            async || None,
            async |_: &Image| Ok(true),
            async |_: &Image| Ok(()),
        );
        let id = added.await.unwrap().image().id;
        let web = ec_model::InstanceId::new(uuid::Uuid::from_u128(7));
        let record = serde_json::json!({
            "version": 1, "instance": web, "generation": 1, "created_at": "1970-01-01T00:00:00Z",
            "assigned": {"node": uuid::Uuid::from_u128(1), "epoch": 1},
            "spec": {"query": "", "image": {"url": "file:///x", "id": id}},
        });
        cloud.store.txn(Txn::new().put(cloud.keys.instance(web), record.to_string())).await.unwrap();
        let of = ImageRef::copy_of(&ec_model::CopyOf::disk(ec_model::Workload::Machine, web));
        let said = |min_disk, min_ram| Adding { min_disk, min_ram, ..adding("instance:web") };
        for (adding, least) in [
            (said(None, None), (3, 512)),
            (said(Some(0), None), (0, 512)),
            (said(None, Some(64)), (3, 64)),
            (said(Some(9), Some(64)), (9, 64)),
        ] {
            let image = new_image(cloud, &adding, Some(&of)).await.unwrap();
            assert_eq!((image.min_disk, image.min_ram), least);
            let image = new_image(cloud, &adding, None).await.unwrap();
            assert_eq!(image.min_disk, adding.min_disk.unwrap_or(0), "of no disk");
        }
    }

    #[tokio::test]
    async fn placement_is_not_asked_its_clock_where_nothing_is_sent() {
        let mut session = Session::in_memory().await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        session.settings.placement.endpoint = format!("http://{}", listener.local_addr().unwrap());
        let adding = adding("http://127.0.0.1:1/a");
        tokio::select! {
            added = add(&session, adding) => assert_eq!(added.unwrap().name, "a"),
            _ = listener.accept() => panic!("it was asked"),
        }
    }
}
