//! A store and its objects: opened by its configuration, read, taken away.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use ec_model::{Image, ImageId, ImageStatus};
use ec_runtime::exit::chain;
use futures::{Stream, StreamExt, stream};
use object_store::{
    GetOptions, GetRange, GetResult, ObjectStore, ObjectStoreExt, aws::AmazonS3, multipart::MultipartStore,
    path::Path as Key,
};
use tokio::time::timeout;

use crate::access::has_any;

use super::{
    Sending, StoreSection,
    bucket::{self, Route},
    section::{Settings, object},
};

/// How long one answer is waited for of a store that takes the connection, and says nothing.
pub(super) const SILENCE: Duration = Duration::from_secs(60);

/// By this file a directory is known from which the last image was taken away: whoever was killed right after that finds none there.
const MARK: &str = "etcd-compute.images";

/// What a store says, in a line: its client repeats in each of its errors what is below, and the store's whole document with it.
pub(crate) fn told(error: &object_store::Error) -> String {
    if is_of_no_bucket(error) {
        return "there is no such bucket".to_owned();
    }
    if let object_store::Error::NotFound { path, .. } = error {
        return format!("it has no object {path}");
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    let text = cause.to_string();
    let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
    let line = text.split(['<', '\n']).next().unwrap_or_default().trim_end_matches([':', ' ']);
    match code {
        Some((code, _)) => format!("{line}: {code}"),
        None => line.to_owned(),
    }
}

/// Whether it is the bucket that is missed, and not an object in it.
fn is_of_no_bucket(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::NotFound { source, .. } if chain(&**source).contains("<Code>NoSuchBucket</Code>"))
}

/// What went wrong with a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreFailure {
    /// What is configured cannot be.
    #[error("{0}")]
    Wrong(String),
    /// The directory's files.
    #[error("failed to {doing} {path}", path = .path.display())]
    File {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// S3.
    #[error("the image store {url} failed to {doing}: {}", told(.answer))]
    Object {
        /// The store.
        url: String,
        /// What was being done.
        doing: &'static str,
        /// What it says.
        answer: Box<object_store::Error>,
    },
    /// S3 takes the connection, and says nothing.
    #[error("the image store {url} failed to {doing}: it did not answer for {} s", .after.as_secs())]
    Silent {
        /// The store.
        url: String,
        /// What was being done.
        doing: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
    /// A directory in which images are to lie, and none does.
    #[error(
        "{path} is missing, or has none of the {images} image(s) of the catalogue that lie in it: is its file system mounted? \
         (Where they are lost for good, make an empty file {path}/{one}.)",
        path = .path.display()
    )]
    NotThere {
        /// The directory.
        path: PathBuf,
        /// How many.
        images: usize,
        /// What one of them is called there.
        one: String,
    },
    /// The object lies elsewhere.
    #[error("the image's bytes lie at {url}, and the image store that is configured is {store}")]
    Elsewhere {
        /// The object.
        url: String,
        /// The store.
        store: String,
    },
}

impl StoreFailure {
    /// Whether S3 has no such object, in a bucket that it has.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Object { answer, .. } if matches!(**answer, object_store::Error::NotFound { .. }))
            && !self.is_of_no_bucket()
    }

    /// Whether S3 has no such bucket.
    fn is_of_no_bucket(&self) -> bool {
        matches!(self, Self::Object { answer, .. } if is_of_no_bucket(answer))
    }

    /// Whether another time may help.
    pub fn is_away(&self) -> bool {
        match self {
            Self::Object { answer, .. } => matches!(**answer, object_store::Error::Generic { .. }),
            Self::Silent { .. } => true,
            _ => false,
        }
    }
}

/// An image store.
#[derive(Debug, Clone)]
pub struct ImageStore {
    url: String,
    place: Place,
}

#[derive(Debug, Clone)]
pub(super) enum Place {
    Directory(PathBuf),
    S3 { s3: Arc<AmazonS3>, prefix: Key, url: String },
}

impl ImageStore {
    /// Of a configuration. Nothing is asked or made before it is needed.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn open(section: &StoreSection) -> Result<Self, StoreFailure> {
        Self::by(section, Route::Environment)
    }

    /// The same, as an agent reads it, which uses no proxy for any image.
    pub(crate) fn open_directly(section: &StoreSection) -> Result<Self, StoreFailure> {
        Self::by(section, Route::Direct)
    }

    fn by(section: &StoreSection, route: Route) -> Result<Self, StoreFailure> {
        let (url, place) = match section.settings().map_err(StoreFailure::Wrong)? {
            Settings::Directory(directory) => (section.url().to_owned(), Place::Directory(directory)),
            Settings::S3(settings) => {
                let s3 = Arc::new(bucket::open(&settings, route)?);
                let url = settings.url.clone();
                (url, Place::S3 { s3, prefix: settings.prefix, url: settings.url })
            }
        };
        Ok(Self { url, place })
    }

    /// What all objects' URLs begin with.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Whether an image's bytes are to lie here.
    pub fn keeps(&self, image: &Image) -> bool {
        self.name(&image.url).is_some()
    }

    /// Looks whether the directory is the one that had these images: one whose file system is not mounted has none of
    /// them, and what is written or missed there is so on the wrong disk. A bucket is always the same.
    ///
    /// # Errors
    /// [`StoreFailure::NotThere`].
    pub fn attend(&self, images: &[Image]) -> Result<(), StoreFailure> {
        let Place::Directory(path) = &self.place else { return Ok(()) };
        // One that is being taken away may be gone.
        let stay = images.iter().filter(|image| image.status != ImageStatus::PendingDelete);
        let names = stay.filter_map(|image| self.name(&image.url));
        let Some(one) = names.clone().next() else { return Ok(()) };
        match names.clone().any(|name| path.join(name).exists()) {
            true => Ok(()),
            false => {
                Err(StoreFailure::NotThere { path: path.clone(), images: names.count(), one: one.to_owned() })
            }
        }
    }

    /// Whether a file is missed because the directory is not the one that it lies in.
    pub(crate) fn misses(&self, file: &Path) -> bool {
        matches!(&self.place, Place::Directory(path) if file.parent() == Some(path) && !has_any(path))
    }

    /// Begins to take bytes for an image; `image.upload` of its record is to be [`Sending::upload`] from then on.
    ///
    /// # Errors
    /// The store cannot be written to.
    pub async fn begin(&self, image: &Image) -> Result<Sending, StoreFailure> {
        Sending::begin(self.place.clone(), self.object(image)?).await
    }

    /// Whether all bytes of an image are there: an object gets its name once it is whole.
    ///
    /// # Errors
    /// The store cannot be asked, or there is no such bucket, or it is a directory without any image: of what is not mounted nobody knows.
    pub async fn has_whole(&self, image: &Image) -> Result<bool, StoreFailure> {
        let name = self.object(image)?;
        match &self.place {
            Place::Directory(directory) => {
                let path = directory.join(&name);
                match path.try_exists() {
                    // That one is missed among others says nothing of those.
                    Ok(false) if self.is_without_images(directory).await? => {
                        Err(StoreFailure::NotThere { path: directory.clone(), images: 1, one: name })
                    }
                    there => there.map_err(|source| StoreFailure::File { doing: "look for", path, source }),
                }
            }
            Place::S3 { url, .. } => match self.ask_for(url, image).await {
                Err(error) if error.is_not_found() => Ok(false),
                answer => answer.map(|_| true),
            },
        }
    }

    /// Begins to read the object. Who asks for it is told, as who asks for what is said of it is not, whether it is the bucket that is missed.
    async fn ask_for(&self, url: &str, image: &Image) -> Result<GetResult, StoreFailure> {
        answered(url, "read an object", SILENCE, self.read(&image.url, None)).await
    }

    /// Whether no image lies in the directory, whole or in part, nor lay there: it may be a mount point.
    async fn is_without_images(&self, directory: &Path) -> Result<bool, StoreFailure> {
        Ok(!directory.join(MARK).exists() && self.images().await?.is_empty())
    }

    /// Looks whether the store is there of which an image's bytes are to be taken away, one of these that lie in stores: to be asked before its
    /// record says that it goes, which nobody takes back.
    ///
    /// # Errors
    /// They lie elsewhere, or the directory or the bucket is not there, or does not answer.
    pub async fn attend_for(&self, image: &Image, images: &[Image]) -> Result<(), StoreFailure> {
        self.object(image)?;
        self.attend(images)?;
        let Place::S3 { url, .. } = &self.place else { return Ok(()) };
        match self.ask_for(url, image).await {
            Err(error) if error.is_of_no_bucket() || error.is_away() => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes away all that there is of an image's bytes, also where only some had come.
    ///
    /// # Errors
    /// What is left then may be taken away by another try. Of an image whose bytes all came: a directory or a bucket that is not there, or a
    /// directory in which nothing lies that is an image's, may not be the one that they lie in.
    pub async fn remove(&self, image: &Image) -> Result<(), StoreFailure> {
        let name = self.object(image)?;
        match &self.place {
            Place::Directory(directory) => {
                let mut is_any = false;
                let mark = directory.join(MARK);
                // Who still sends it cannot put it in its place between the two.
                let paths = [part(directory, &name), directory.join(&name)];
                let all_came = image.size.is_some();
                if all_came && paths.iter().any(|path| path.symlink_metadata().is_ok()) {
                    // For the last alone it is needed; where there is no room for it, this makes some.
                    fs::File::create(&mark).map(drop).unwrap_or_else(|error| {
                        tracing::debug!(%error, path = %mark.display(), "the store is not marked");
                    });
                }
                for path in paths {
                    match fs::remove_file(&path) {
                        Ok(()) => is_any = true,
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        Err(source) => return Err(StoreFailure::File { doing: "remove", path, source }),
                    }
                }
                // Where others lie, or lay, this one is gone; of what is not mounted nobody knows.
                if all_came && !is_any && self.is_without_images(directory).await? {
                    return Err(StoreFailure::NotThere { path: directory.clone(), images: 1, one: name });
                }
                Ok(())
            }
            Place::S3 { s3, prefix, url } => {
                let key = key(prefix, &name);
                let gone = async |deleted| match answered(url, "delete an object", SILENCE, deleted).await {
                    Err(error) if error.is_not_found() => Ok(()),
                    outcome => outcome,
                };
                if let Some(upload) = &image.upload {
                    gone(s3.abort_multipart(&key, upload)).await?;
                }
                gone(Box::pin(s3.delete(&key))).await
            }
        }
    }

    /// Takes away what [`ImageStore::remove`] knows a directory by, once the records of what went are gone. Where it stays it harms nobody.
    pub fn unmark(&self) {
        if let Place::Directory(directory) = &self.place {
            fs::remove_file(directory.join(MARK)).ok();
        }
    }

    /// The images of which there are bytes, whole or in part. Of a directory that is not there that is none, as of a new store.
    ///
    /// # Errors
    /// The store cannot be listed.
    pub async fn images(&self) -> Result<BTreeSet<ImageId>, StoreFailure> {
        let of_name = |name: &str| name.strip_suffix(PART).unwrap_or(name).parse().ok();
        match &self.place {
            Place::Directory(directory) => {
                let listed = match fs::read_dir(directory) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
                    entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>),
                };
                let entries = listed.map_err(|source| StoreFailure::File {
                    doing: "list",
                    path: directory.clone(),
                    source,
                })?;
                Ok(entries.iter().filter_map(|entry| of_name(entry.file_name().to_str()?)).collect())
            }
            Place::S3 { s3, prefix, url } => {
                let listed = s3.list_with_delimiter(Some(prefix));
                let listed = answered(url, "list objects", SILENCE, listed).await?;
                Ok(listed.objects.iter().filter_map(|object| of_name(object.location.filename()?)).collect())
            }
        }
    }

    /// The bytes of an object of a bucket, and how many there are. Of a directory they are read as other files.
    ///
    /// # Errors
    /// There is none, or the store does not answer.
    pub async fn bytes(
        &self,
        url: &str,
    ) -> Result<(impl Stream<Item = io::Result<Bytes>> + Unpin + use<>, u64), StoreFailure> {
        let found = answered(&self.url, "read an object", SILENCE, self.read(url, None)).await?;
        let size = found.meta.size;
        let pieces = stream::unfold(found.into_stream(), async |mut pieces| {
            let piece = match timeout(SILENCE, pieces.next()).await {
                Ok(piece) => piece?.map_err(|error| io::Error::other(told(&error))),
                Err(_) => Err(io::Error::other(format!("nothing came for {} s", SILENCE.as_secs()))),
            };
            Some((piece, pieces))
        });
        Ok((Box::pin(pieces), size))
    }

    /// The object of a bucket at this URL, or the rest of it, behind so many bytes of the one with that tag. Of a directory they are read
    /// as other files.
    pub(crate) async fn read(
        &self,
        url: &str,
        rest: Option<(u64, &str)>,
    ) -> Result<GetResult, object_store::Error> {
        let (Place::S3 { s3, prefix, .. }, Some(name)) = (&self.place, self.name(url)) else {
            return Err(object_store::Error::NotFound {
                path: url.to_owned(),
                source: "not of this store".into(),
            });
        };
        let options = rest.map_or_else(GetOptions::default, |(from, tag)| GetOptions {
            range: Some(GetRange::Offset(from)),
            if_match: Some(tag.to_owned()),
            ..GetOptions::default()
        });
        s3.get_opts(&key(prefix, name), options).await
    }

    /// Whether it is a bucket, and the URL one of its objects.
    pub(crate) fn has(&self, url: &str) -> bool {
        matches!(self.place, Place::S3 { .. }) && self.name(url).is_some()
    }

    /// What the object of that URL is called within the store.
    fn name<'a>(&self, url: &'a str) -> Option<&'a str> {
        object(&self.url, url)
    }

    fn object(&self, image: &Image) -> Result<String, StoreFailure> {
        self.name(&image.url)
            .map(str::to_owned)
            .ok_or_else(|| StoreFailure::Elsewhere { url: image.url.clone(), store: self.url.clone() })
    }
}

/// What the name of an object ends with while it comes.
const PART: &str = ".part";

/// What an object is called while it comes.
pub(super) fn part(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}{PART}"))
}

pub(super) fn key(prefix: &Key, name: &str) -> Key {
    prefix.clone().join(name)
}

/// What S3 says, where it says anything within that time.
pub(super) async fn answered<T>(
    url: &str,
    doing: &'static str,
    after: Duration,
    asked: impl Future<Output = Result<T, object_store::Error>>,
) -> Result<T, StoreFailure> {
    match timeout(after, asked).await {
        Ok(answer) => answer.map_err(failed(url, doing)),
        Err(_) => Err(StoreFailure::Silent { url: url.to_owned(), doing, after }),
    }
}

pub(super) fn failed(url: &str, doing: &'static str) -> impl FnOnce(object_store::Error) -> StoreFailure {
    let url = url.to_owned();
    move |error| StoreFailure::Object { url, doing, answer: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(store: &str) -> Image {
        image_of(1, store)
    }

    fn image_of(number: u8, store: &str) -> Image {
        let id: ImageId = format!("00000000-0000-0000-0000-{number:012}").parse().unwrap();
        let image = serde_json::json!({
            "id": id, "name": "x", "project": "p", "status": "active", "url": format!("{store}/{id}"),
            "created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z",
        });
        serde_json::from_value(image).unwrap()
    }

    #[test]
    fn what_a_store_says_is_told_once_and_in_a_line() {
        let generic = |source: Box<dyn std::error::Error + Send + Sync>| object_store::Error::Generic {
            store: "S3",
            source,
        };
        let gone = object_store::Error::NotFound {
            path: "a/b".into(),
            source: "<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>".into(),
        };
        let no_bucket = object_store::Error::NotFound {
            path: "a/b".into(),
            source: "<?xml version='1.0'?><Error><Code>NoSuchBucket</Code></Error>".into(),
        };
        let denied = "Client error with status 403 Forbidden: <Error><Code>AccessDenied</Code>\n</Error>";
        let refused = io::Error::other("connection refused");
        for (error, expected) in [
            (gone, "it has no object a/b"),
            (no_bucket, "there is no such bucket"),
            (generic(denied.into()), "Client error with status 403 Forbidden: AccessDenied"),
            (generic(Box::new(refused)), "connection refused"),
        ] {
            assert_eq!(told(&error), expected);
        }
    }

    #[tokio::test]
    async fn an_empty_directory_in_which_images_are_to_lie_is_not_the_store() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let url = format!("file://{}", path.display());
        let store =
            ImageStore::open(&serde_json::from_value(serde_json::json!({"url": url})).unwrap()).unwrap();
        store.attend(&[]).unwrap();
        assert!(store.images().await.unwrap().is_empty(), "a new one has no directory yet");
        store.attend(&[image("file:///elsewhere")]).unwrap();
        let ours = [image(&url)];
        let why = store.attend(&ours).unwrap_err().to_string();
        assert!(why.contains("1 image(s)") && why.contains("is its file system mounted?"), "{why}");
        fs::create_dir(&path).unwrap();
        assert!(store.attend(&ours).is_err(), "a mount point is there");
        let name = store.name(&ours[0].url).unwrap();
        assert!(
            store.has_whole(&ours[0]).await.is_err(),
            "and nobody knows what lies on what is not mounted"
        );
        fs::write(path.join("one"), "").unwrap();
        let why = store.attend(&ours).unwrap_err().to_string();
        assert!(
            why.contains("none of the 1 image(s)") && why.contains(&path.join(name).display().to_string())
        );
        let why = store.has_whole(&ours[0]).await.unwrap_err().to_string();
        assert!(
            why.contains("is its file system mounted?"),
            "what lies beside, as lost+found, is no image: {why}"
        );
        fs::write(path.join(MARK), "").unwrap();
        assert!(!store.has_whole(&ours[0]).await.unwrap(), "images lay there");
        store.unmark();
        assert!(
            store.keeps(&ours[0]) && store.images().await.unwrap().is_empty(),
            "what is called otherwise is none"
        );
        for name in [format!("{name}.part"), name.to_owned()] {
            fs::write(path.join(name), "").unwrap();
            assert_eq!(store.images().await.unwrap(), [ours[0].id].into());
        }
        store.attend(&ours).unwrap();
        store.attend(&[image_of(2, &url), ours[0].clone()]).unwrap();
        store.attend(&[image_of(2, &url)]).unwrap_err();
        assert!(store.has_whole(&ours[0]).await.unwrap());
        assert!(!store.has_whole(&image_of(2, &url)).await.unwrap(), "it is missed among others");
        fs::remove_file(path.join(name)).unwrap();
        assert!(!store.has_whole(&ours[0]).await.unwrap(), "only some of it came");
    }

    #[tokio::test]
    async fn what_is_missed_of_a_directory_without_any_image_may_lie_in_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let url = format!("file://{}", path.display());
        let store =
            ImageStore::open(&serde_json::from_value(serde_json::json!({"url": url})).unwrap()).unwrap();
        let came =
            |number| Image { size: Some(1), status: ImageStatus::PendingDelete, ..image_of(number, &url) };
        let (last, other) = (came(1), came(2));
        let why = store.remove(&last).await.unwrap_err().to_string();
        assert!(why.contains("is missing") && why.contains("is its file system mounted?"), "{why}");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("lost+found"), "").unwrap();
        let why = store.remove(&last).await.unwrap_err().to_string();
        let mends = path.join(store.name(&last.url).unwrap());
        assert!(why.contains(&format!("make an empty file {}", mends.display())), "{why}");
        // One whose bytes never came need not have any.
        store.remove(&image(&url)).await.unwrap();
        fs::write(mends, "").unwrap();
        store.remove(&other).await.unwrap();
        store.remove(&last).await.unwrap();
        assert!(store.images().await.unwrap().is_empty());
        // Killed before its record went, and said again.
        store.remove(&last).await.unwrap();
        store.unmark();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1, "lost+found");
        fs::remove_dir_all(&path).unwrap();
        store.remove(&last).await.unwrap_err();
    }

    #[tokio::test]
    async fn nothing_goes_of_a_bucket_that_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let secret = directory.path().join("secret");
        fs::write(&secret, "SK").unwrap();
        for (code, is_there) in [("NoSuchBucket", false), ("NoSuchKey", true)] {
            let missing = format!("<Error><Code>{code}</Code></Error>");
            let server = crate::testing::Server::start(move |_, head| {
                // To a HEAD nothing but the status is answered.
                let body = if head.starts_with("HEAD") { "" } else { &missing };
                let head = "content-type: application/xml\r\n";
                let missing = crate::testing::answer("404 Not Found", head, body.as_bytes());
                vec![crate::testing::Step::Send(missing)]
            })
            .await;
            let store = serde_json::json!({
                "url": "s3://bucket/ours", "endpoint": server.url, "access_key": "AK", "secret_key_file": secret,
            });
            let store = ImageStore::open(&serde_json::from_value(store).unwrap()).unwrap();
            let whole = Image { size: Some(1), ..image("s3://bucket/ours") };
            for outcome in [
                store.attend_for(&whole, std::slice::from_ref(&whole)).await,
                store.remove(&whole).await,
                store.remove(&Image { upload: Some("parts".to_owned()), ..whole.clone() }).await,
            ] {
                assert_eq!(outcome.is_ok(), is_there, "{code}: {outcome:?}");
            }
            let has_whole = store.has_whole(&whole).await;
            assert_eq!(has_whole.as_ref().ok(), is_there.then_some(&false), "{code}: {has_whole:?}");
            let elsewhere = image("s3://other/ours");
            let outcome = store.attend_for(&elsewhere, &[]).await;
            assert!(matches!(outcome, Err(StoreFailure::Elsewhere { .. })), "{outcome:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_bucket_that_takes_the_connection_and_says_nothing_is_not_waited_for_without_end() {
        let directory = tempfile::tempdir().unwrap();
        let secret = directory.path().join("secret");
        fs::write(&secret, "SK").unwrap();
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let store = serde_json::json!({
            "url": "s3://bucket/ours", "endpoint": format!("http://{}", silent.local_addr().unwrap()),
            "access_key": "AK", "secret_key_file": secret,
        });
        let store = ImageStore::open(&serde_json::from_value(store).unwrap()).unwrap();
        let mut image = image("s3://bucket/ours");
        for upload in [None, Some("parts".to_owned())] {
            image.upload = upload;
            let error = store.remove(&image).await.unwrap_err();
            assert!(error.is_away() && error.to_string().contains("did not answer for 60 s"), "{error}");
        }
        let error = store.begin(&image).await.map(drop).unwrap_err();
        assert!(matches!(error, StoreFailure::Silent { .. }), "{error}");
    }
}
