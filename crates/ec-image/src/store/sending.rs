//! Bytes on their way into a store.

use std::{
    fs::{self, File, Permissions},
    io::Write,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use object_store::{
    PutPayload,
    aws::AmazonS3,
    multipart::{MultipartStore, PartId},
    path::Path as Key,
};

use super::{
    StoreFailure,
    objects::{Place, SILENCE, answered, key, part},
};

/// What is sent to S3 at once; it takes 10,000 of these for one object, and at least 5 MiB in each but the last.
const PART: usize = 16 << 20;
const PARTS_MAX: usize = 10_000;

/// The largest object that a bucket is sent, which is 524 MiB in a part: how large something becomes is what its origin says, and each
/// part is kept here as a whole.
const MOST: u64 = 5 << 40;

/// A part may go by a slow line, and a store may have to put thousands of them together: 16 MiB in so long are 55 KiB a second.
const SLOWEST: Duration = Duration::from_secs(300);

/// How many bytes a part of so many is to have.
fn part_of(size: u64) -> usize {
    usize::try_from(size.div_ceil(PARTS_MAX as u64)).unwrap_or(usize::MAX).max(PART)
}

/// QEMU's host's agent reads what lies there; nobody but the store's owner writes.
const READABLE: u32 = 0o644;
/// Agents open objects by the names that their records have; no other user of the host learns those here.
const PASSABLE: u32 = 0o711;

/// Bytes of one image on their way. Nobody sees the object before [`Sending::finish`]; what came before is taken away by
/// [`super::ImageStore::remove`].
pub struct Sending {
    way: Way,
}

enum Way {
    File {
        file: File,
        part: PathBuf,
        path: PathBuf,
    },
    S3 {
        s3: Arc<AmazonS3>,
        url: String,
        key: Key,
        upload: String,
        parts: Vec<PartId>,
        /// So many bytes are in each but the last.
        part: usize,
        rest: Vec<u8>,
    },
}

impl Sending {
    pub(super) async fn begin(place: Place, name: String) -> Result<Self, StoreFailure> {
        let way = match place {
            Place::Directory(directory) => {
                make(&directory)?;
                let (part, path) = (part(&directory, &name), directory.join(&name));
                let created = File::options().write(true).create_new(true).mode(0o600).open(&part);
                Way::File { file: created.map_err(file("create", &part))?, part, path }
            }
            Place::S3 { s3, prefix, url } => {
                let key = key(&prefix, &name);
                let upload = answered(&url, "begin an object", SILENCE, s3.create_multipart(&key)).await?;
                Way::S3 { s3, url, key, upload, parts: Vec::new(), part: PART, rest: Vec::new() }
            }
        };
        Ok(Self { way })
    }

    /// By what the store knows what came so far, where it has to be told so to forget it.
    pub fn upload(&self) -> Option<String> {
        match &self.way {
            Way::File { .. } => None,
            Way::S3 { upload, .. } => Some(upload.clone()),
        }
    }

    /// So many bytes will come: to be said before the first of them, since a store may take a large object in larger parts only.
    ///
    /// # Errors
    /// The store takes no object that is so large.
    pub fn expect(&mut self, size: u64) -> Result<(), StoreFailure> {
        let Way::S3 { part, .. } = &mut self.way else { return Ok(()) };
        if size > MOST {
            let most = crate::Size(MOST);
            return Err(StoreFailure::Wrong(format!(
                "the image is larger than {most}, the most that is sent to a bucket"
            )));
        }
        *part = part_of(size);
        Ok(())
    }

    /// What came so far, where it can be looked at as a whole before it is finished.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn look(&self) -> Result<Option<File>, StoreFailure> {
        match &self.way {
            Way::File { part, .. } => File::open(part).map(Some).map_err(file("read", part)),
            Way::S3 { .. } => Ok(None),
        }
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// The store takes no more.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), StoreFailure> {
        match &mut self.way {
            Way::File { file: to, part, .. } => to.write_all(bytes).map_err(file("write", part)),
            Way::S3 { part, rest, .. } => {
                let room = *part - rest.len();
                let (now, later) = bytes.split_at(room.min(bytes.len()));
                // Else it would grow to twice as much.
                rest.reserve_exact(room);
                rest.extend_from_slice(now);
                if rest.len() < *part {
                    return Ok(());
                }
                self.send().await?;
                Box::pin(self.push(later)).await
            }
        }
    }

    async fn send(&mut self) -> Result<(), StoreFailure> {
        let Way::S3 { s3, url, key, upload, parts, part, rest } = &mut self.way else { return Ok(()) };
        if parts.len() == PARTS_MAX {
            let most = crate::Size(*part as u64 * PARTS_MAX as u64);
            return Err(StoreFailure::Wrong(format!(
                "the image is larger than {most}, the most that S3 takes where nobody knows before how large it is: send it as a file"
            )));
        }
        // As slow as before, with more in each.
        let slowest = SLOWEST.mul_f64(*part as f64 / PART as f64);
        let bytes = PutPayload::from(Bytes::from(std::mem::take(rest)));
        let sent = s3.put_part(key, upload, parts.len(), bytes);
        parts.push(answered(url, "take a part of an object", slowest, sent).await?);
        Ok(())
    }

    /// All bytes came: the object is there from now on, whole.
    ///
    /// # Errors
    /// It may be there, or not.
    pub async fn finish(mut self) -> Result<(), StoreFailure> {
        if let Way::S3 { parts, rest, .. } = &self.way
            && (!rest.is_empty() || parts.is_empty())
        {
            self.send().await?;
        }
        match self.way {
            Way::File { file: whole, part, path } => {
                whole
                    .set_permissions(Permissions::from_mode(READABLE))
                    .map_err(file("set the mode of", &part))?;
                whole.sync_all().map_err(file("sync", &part))?;
                fs::rename(&part, &path).map_err(file("rename", &part))?;
                let directory = path.parent().map(PathBuf::from).unwrap_or_default();
                File::open(&directory).and_then(|it| it.sync_all()).map_err(file("sync", &directory))
            }
            Way::S3 { s3, url, key, upload, parts, .. } => {
                let done = s3.complete_multipart(&key, &upload, parts);
                answered(&url, "complete an object", SLOWEST, done).await.map(drop)
            }
        }
    }

    /// It is not to be, and no record knows by what the store knows it: [`super::ImageStore::remove`] would not find that.
    ///
    /// # Errors
    /// The store keeps it.
    pub async fn abandon(self) -> Result<(), StoreFailure> {
        match self.way {
            // That is found by its name.
            Way::File { .. } => Ok(()),
            Way::S3 { s3, url, key, upload, .. } => {
                match answered(&url, "delete an object", SILENCE, s3.abort_multipart(&key, &upload)).await {
                    // The record was told after all, and somebody went by it.
                    Err(error) if error.is_not_found() => Ok(()),
                    outcome => outcome,
                }
            }
        }
    }
}

/// Makes the directory, where there is none.
fn make(directory: &Path) -> Result<(), StoreFailure> {
    if directory.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(directory).map_err(file("create", directory))?;
    fs::set_permissions(directory, Permissions::from_mode(PASSABLE))
        .map_err(file("set the mode of", directory))
}

fn file(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> StoreFailure {
    let path = path.to_owned();
    move |source| StoreFailure::File { doing, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        store::{
            bucket::{self, Route},
            section::{Settings, StoreSection},
        },
        testing::{Server, Step, answer},
    };

    #[tokio::test]
    async fn a_large_object_goes_in_larger_parts_as_it_takes_no_more_of_them() {
        const GIB: u64 = 1 << 30;
        for (size, part) in [(0, PART), (156 * GIB, PART), (157 * GIB, 16_857_747), (MOST, 549_755_814)] {
            assert_eq!(part_of(size), part, "{size}");
            assert!(part as u64 * PARTS_MAX as u64 >= size);
        }
        let begun = "<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>x</Key><UploadId>u</UploadId></InitiateMultipartUploadResult>";
        let server = Server::start(move |_, head| {
            let text = if head.starts_with("POST") { begun } else { "" };
            vec![Step::Send(answer("200 OK", "etag: x\r\n", text.as_bytes()))]
        })
        .await;
        let directory = tempfile::tempdir().unwrap();
        let secret = directory.path().join("secret");
        fs::write(&secret, "SK").unwrap();
        let section = serde_json::json!({
            "url": "s3://b", "endpoint": server.url, "access_key": "AK", "secret_key_file": secret,
        });
        let section: StoreSection = serde_json::from_value(section).unwrap();
        let Ok(Settings::S3(settings)) = section.settings() else { panic!("{section:?}") };
        let s3 = Arc::new(bucket::open(&settings, Route::Direct).unwrap());
        for (size, hits) in [(1, 2), (200 * GIB, 1)] {
            let place =
                Place::S3 { s3: Arc::clone(&s3), prefix: Key::default(), url: section.url().to_owned() };
            let before = server.hits();
            let mut sending = Sending::begin(place, "x".to_owned()).await.unwrap();
            sending.expect(size).unwrap();
            let larger = sending.expect(MOST + 1).unwrap_err().to_string();
            assert_eq!(larger, "the image is larger than 5.0 TiB, the most that is sent to a bucket");
            for piece in vec![0; PART + 1].chunks(PART) {
                sending.push(piece).await.unwrap();
                let Way::S3 { rest, part, .. } = &sending.way else { panic!() };
                assert!(rest.capacity() <= *part, "{size}");
            }
            assert_eq!(server.hits() - before, hits, "{size}");
        }
    }

    #[tokio::test]
    async fn a_directory_that_is_made_shows_nobody_what_is_in_it_and_one_that_is_there_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let (made, own) = (directory.path().join("a/store"), directory.path().join("own"));
        fs::create_dir(&own).unwrap();
        fs::set_permissions(&own, Permissions::from_mode(0o750)).unwrap();
        for (path, mode) in [(made, 0o711), (own, 0o750)] {
            Sending::begin(Place::Directory(path.clone()), "x".to_owned()).await.unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        }
    }
}
