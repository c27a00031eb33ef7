//! Reading and checking what the user gives for the guest, before anything is claimed.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use ec_cloud::{Guest, Naming, resolve, resolve_name, resolve_volume};
use ec_model::{
    Blob, CopyOf, ImageId, ImageRef, InstanceId, OF_INSTANCE, OF_VOLUME, Resources, USER_DATA_MAX, Workload,
    input::{
        HOSTNAME, KEYS_MAX, catalog_name, image_name, is_hostname, is_image_url, is_public_key, is_sha256,
        is_sha512, is_whole_public_key,
    },
};
use ec_runtime::exit::Failure;
use tokio::io::AsyncReadExt;

use crate::{
    acting::CERTAIN,
    cli::Given,
    config::{Session, Settings},
    image::{Known, known, names},
};

/// A file of public keys is a few lines.
const KEY_FILE_MAX: usize = 1 << 20;

/// What of a name with a prefix is its own: the beginning of a uuid.
const SUFFIX: &str = "01234567";

/// What users call what they give.
pub(crate) struct Words {
    name: &'static str,
    key: &'static str,
    user_data: &'static str,
    sha256: &'static str,
}

/// Beside a resources query.
pub(crate) const CLASSIC: Words =
    Words { name: "--name", key: "--key", user_data: "--user-data", sha256: "--sha256" };

/// Of `eschedule run`.
pub(crate) const RUN: Words = Words { name: "NAME", ..CLASSIC };

/// In a stack's file, where the place is told before.
pub(crate) const IN_FILE: Words =
    Words { name: "the name", key: "the file", user_data: "the file", sha256: "the digest" };

/// Which part of what is given a mistake is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The key of this number, from 0 on.
    Key(usize),
    Keys,
    UserData,
    Image,
    /// The same, where what a distribution publishes cannot be had.
    Published,
    Boot,
    Sha256,
    /// None of these alone.
    Whole,
}

/// A mistake, and where it is.
pub(crate) struct Mistake {
    pub(crate) part: Part,
    pub(crate) failure: Failure,
}

impl Part {
    fn wrong(self, failure: Failure) -> Mistake {
        Mistake { part: self, failure }
    }
}

impl From<Failure> for Mistake {
    fn from(failure: Failure) -> Self {
        Part::Whole.wrong(failure)
    }
}

impl From<Mistake> for Failure {
    fn from(mistake: Mistake) -> Self {
        mistake.failure
    }
}

/// Whether what stands for a file on the command line is standard input.
pub(crate) fn is_stdin(file: &Path) -> bool {
    file == Path::new("-")
}

/// What stands for a file on the command line, to be read.
pub(crate) fn opened(file: &Path) -> io::Result<Box<dyn Read>> {
    Ok(if is_stdin(file) { Box::new(io::stdin()) } else { Box::new(File::open(file)?) })
}

/// A file that another names, which lies in this directory. It is one, too, where it is called `-`.
pub(crate) fn beside(directory: &Path, file: &Path) -> PathBuf {
    let file = directory.join(file);
    if is_stdin(&file) { Path::new(".").join(file) } else { file }
}

/// What is checked of [`Given`], with the site's defaults where it says nothing, for an instance of this size.
pub(crate) async fn read(
    session: &Session,
    name: Option<&str>,
    words: &Words,
    given: &Given,
    image: Option<&str>,
    size: &Resources,
) -> Result<Guest, Mistake> {
    let Settings { defaults, image: usual, .. } = &session.settings;
    let naming = match (name, &defaults.name_prefix) {
        (Some(name), _) => Naming::Name(hostname(words.name, name)?),
        (None, Some(prefix)) => {
            hostname(words.name, &format!("{prefix}{SUFFIX}"))
                .map_err(|_| Failure::usage(format!("defaults.name_prefix `{prefix}` begins no hostname")))?;
            Naming::Prefix(prefix.clone())
        }
        (None, None) => Naming::None,
    };
    let seen = |file: &Path| match &given.beside {
        Some(directory) => beside(directory, file),
        None => file.to_owned(),
    };
    let files = given.key.iter().map(|key| seen(Path::new(key)));
    let files = files.chain(given.user_data.as_deref().map(seen));
    if files.filter(|file| is_stdin(file)).count() > 1 {
        let why = format!(
            "standard input is read once: give `-` to one {} or {} alone",
            words.key, words.user_data
        );
        return Err(Failure::usage(why).into());
    }
    let user_data = match (&given.user_data, &defaults.user_data) {
        (Some(path), _) => Some(read_user_data(&seen(path), words.user_data).await),
        (None, Some(path)) => Some(read_user_data(path, "defaults.user_data").await),
        (None, None) => None,
    };
    let user_data = user_data.transpose().map_err(|it| Part::UserData.wrong(it))?;
    let keys = match &given.keeps_keys {
        Some(keys) => keys.clone(),
        None => read_keys(session, given, seen, words).await?,
    };
    let digest = given.sha256.as_deref().map(|digest| sha256(digest, words.sha256)).transpose();
    let digest = digest.map_err(|it| Part::Sha256.wrong(it))?;
    let boot = match &given.boot_volume {
        Some(volume) => Some(boot_of(session, volume, image).await.map_err(|it| Part::Boot.wrong(it))?),
        None => None,
    };
    let image = if boot.is_some() || given.boots {
        ImageRef::default()
    } else {
        let text = image.unwrap_or(usual);
        let image = image_of(session, text, size).await?;
        demanding(image, text, digest, words.sha256).map_err(|it| Part::Sha256.wrong(it))?
    };
    Ok(Guest {
        kind: Workload::Machine,
        naming,
        user_data,
        keys,
        image,
        boot,
        volumes: Vec::new(),
        token_required: given.require_token || defaults.require_token,
        snapshot: false,
        labels: once_each("--label", &given.traits.label)?,
        metadata: once_each("--meta", &given.traits.meta)?,
        restart: given.traits.restart.map(Into::into).unwrap_or_default(),
    })
}

/// The keys that are given, else the site's own.
async fn read_keys(
    session: &Session,
    given: &Given,
    seen: impl Fn(&Path) -> PathBuf,
    words: &Words,
) -> Result<Vec<String>, Mistake> {
    let mut keys = Vec::new();
    for (number, text) in given.key.iter().enumerate() {
        let of_text = keys_of(session, text, &seen(Path::new(text)), words.key).await;
        keys.extend(of_text.map_err(|it| Part::Key(number).wrong(it))?);
    }
    if given.key.is_empty() {
        for file in &session.settings.defaults.keys {
            keys.extend(keys_in(file, "defaults.keys").await.map_err(|it| Part::Keys.wrong(it))?);
        }
    }
    bounded(&keys).map_err(|it| Part::Keys.wrong(it))?;
    Ok(keys)
}

/// The volume to boot from, of which no image is made.
async fn boot_of(session: &Session, volume: &str, image: Option<&str>) -> Result<InstanceId, Failure> {
    if let Some(image) = image {
        return Err(Failure::usage(format!(
            "it boots from volume `{volume}` as that is, and not from image `{image}`: give one of both"
        )));
    }
    Ok(resolve_volume(&session.cloud, volume).await?)
}

/// Each key with its value; a key that is given two of them is an error.
pub(crate) fn once_each(
    option: &str,
    words: &[(String, String)],
) -> Result<BTreeMap<String, String>, Failure> {
    let mut once = BTreeMap::new();
    for (key, value) in words {
        if let Some(other) = once.insert(key.clone(), value.clone()).filter(|other| other != value) {
            return Err(Failure::usage(format!(
                "{option} {key} is given twice: as `{other}` and as `{value}`"
            )));
        }
    }
    Ok(once)
}

/// The keys of the project's keypair of that name; else those of the file. What cannot be a keypair's name is a file at
/// once.
async fn keys_of(session: &Session, text: &str, file: &Path, option: &str) -> Result<Vec<String>, Failure> {
    if catalog_name(text).is_err() {
        return keys_in(file, option).await;
    }
    if let Some(keypair) = ec_cloud::keypair(&session.cloud, text).await? {
        return Ok(keypair.keys);
    }
    keys_in(file, option).await.map_err(|failure| Failure {
        message: format!(
            "{}; and project `{}` has no keypair of that name",
            failure.message, session.settings.project
        ),
        ..failure
    })
}

/// An image by its URL, its name in the configuration or that in the catalogue, and the digest that it must have.
pub(crate) async fn image_ref(
    session: &Session,
    text: &str,
    digest: Option<&str>,
) -> Result<ImageRef, Failure> {
    demanded(session, text, digest, &CLASSIC).await.map_err(Failure::from)
}

/// The same for a disk that is made anew, which costs what was written on it: what is called by nobody any more may well be the
/// beginning of a stranger's uuid.
pub(crate) async fn certain_ref(
    session: &Session,
    text: &str,
    digest: Option<&str>,
) -> Result<ImageRef, Failure> {
    // What is called nearly as a distribution's may have been an image of one's own.
    let is_own = session.settings.images.contains_key(text);
    if let Some(known) = known(text).filter(|known| !is_own && !known.is_called(text))
        && let Found::Known(_) = found(session, text, &Resources::new()).await?
    {
        return Err(Failure::failed(format!(
            "there is no image `{text}`; what its distribution publishes is called `{}`",
            known.name
        )));
    }
    let image = image_ref(session, text, digest).await?;
    if let Some(id) = image.id {
        let is_named = image.name.as_deref().is_some_and(|name| name.eq_ignore_ascii_case(text));
        certain("image", text, &id.to_string(), is_named)?;
    }
    if let (Some(of), Some((_, word))) = (image.copied(), text.split_once(':')) {
        let (disk, part) = word.split_once('/').unwrap_or((word, ""));
        certain_disk(session, of.kind, disk, of.disk).await?;
        if let Some(held) = of.held {
            certain_disk(session, Workload::Volume, part, held).await?;
        }
    }
    Ok(image)
}

/// That a word is the disk's name, or enough of its uuid.
async fn certain_disk(
    session: &Session,
    kind: Workload,
    word: &str,
    disk: InstanceId,
) -> Result<(), Failure> {
    let named = resolve_name(&session.cloud, kind, word).await;
    certain(kind.word(), word, &disk.to_string(), named.is_ok_and(|named| named == disk))
}

fn certain(what: &str, word: &str, uuid: &str, is_named: bool) -> Result<(), Failure> {
    if is_named || word.len() >= CERTAIN {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "no {what} is named `{word}`; {uuid} begins so: give {CERTAIN} characters of that or more"
    )))
}

/// The same, and of which of both a mistake is.
pub(crate) async fn demanded(
    session: &Session,
    text: &str,
    digest: Option<&str>,
    words: &Words,
) -> Result<ImageRef, Mistake> {
    let wrong = |it| Part::Sha256.wrong(it);
    let digest = digest.map(|digest| sha256(digest, words.sha256)).transpose().map_err(wrong)?;
    // How large the instance is its node looks at, which knows that.
    let image = image_of(session, text, &Resources::new()).await?;
    demanding(image, text, digest, words.sha256).map_err(wrong)
}

/// A copy of the disk that is named by `volume:NAME` or `instance:NAME`; nothing where it is neither.
pub(crate) async fn copied(session: &Session, text: &str) -> Result<Option<ImageRef>, Failure> {
    if [OF_VOLUME, OF_INSTANCE].contains(&text) {
        return Err(Failure::usage(format!("`{text}` names nothing: a name or a uuid follows the colon")));
    }
    Ok(if let Some(volume) = text.strip_prefix(OF_VOLUME) {
        Some(ImageRef::copy_of(&held(session, volume).await?))
    } else if let Some(instance) = text.strip_prefix(OF_INSTANCE) {
        let instance = resolve(&session.cloud, instance).await?;
        Some(ImageRef::copy_of(&CopyOf::disk(Workload::Machine, instance)))
    } else {
        None
    })
}

/// A volume, or with `/` behind it one of those whose copies a snapshot has beside its first.
async fn held(session: &Session, text: &str) -> Result<CopyOf, Failure> {
    let cloud = &session.cloud;
    let (text, part) = match text.split_once('/') {
        Some((text, part)) => (text, Some(part)),
        None => (text, None),
    };
    let volume = resolve_volume(cloud, text).await?;
    let of = CopyOf::disk(Workload::Volume, volume);
    let Some(part) = part else { return Ok(of) };
    let has = ec_cloud::volume(cloud, volume).await?.beside;
    // By the beginning of its uuid, too, though it may be gone by now.
    let named = match has.iter().filter(|has| has.to_string().starts_with(part)).collect::<Vec<_>>()[..] {
        [one] if part.len() >= CERTAIN => Some(*one),
        _ => resolve_volume(cloud, part).await.ok().filter(|named| has.contains(named)),
    };
    let Some(named) = named else {
        let has: Vec<_> = has.iter().map(ToString::to_string).collect();
        let has = if has.is_empty() { "nothing beside its first disk".to_owned() } else { has.join(", ") };
        return Err(Failure::usage(format!("`{text}` has no copy of a volume `{part}`: it has {has}")));
    };
    Ok(CopyOf { held: Some(named), ..of })
}

/// The configuration's names come first: they are whoever runs the command's own.
async fn image_of(session: &Session, text: &str, size: &Resources) -> Result<ImageRef, Mistake> {
    let found = match found(session, text, size).await.map_err(|it| Part::Image.wrong(it))? {
        Found::Image(image) => return Ok(image),
        Found::Known(known) => session.published(known, text).await,
    };
    found.map_err(|it| Part::Published.wrong(it))
}

/// What the word for an image stands for.
enum Found {
    Image(ImageRef),
    /// A distribution's that nobody added, which is taken as it is published.
    Known(Known),
}

async fn found(session: &Session, text: &str, size: &Resources) -> Result<Found, Failure> {
    if let Some(url) = session.settings.images.get(text) {
        return image_url(url).map(ImageRef::at).map(Found::Image);
    }
    if let Some(copied) = copied(session, text).await? {
        return Ok(Found::Image(copied));
    }
    if image_name(text).is_err() && text.parse::<ImageId>().is_err() {
        return image_url(text).map(ImageRef::at).map(Found::Image);
    }
    if let Some(image) = ec_cloud::image_for(&session.cloud, text, size).await? {
        return Ok(Found::Image(image));
    }
    // `debian` is also what was added by the whole name.
    let Some(known) = known(text) else { return Err(unusable(text)) };
    let added = ec_cloud::image_for(&session.cloud, known.name, size).await?;
    Ok(added.map_or(Found::Known(known), Found::Image))
}

fn demanding(image: ImageRef, text: &str, digest: Option<String>, option: &str) -> Result<ImageRef, Failure> {
    match (&image.sha256, &digest) {
        (_, Some(_)) if image.copied().is_some() => Err(Failure::usage(format!(
            "{option} goes with an image: `{text}` is a copy of a disk, of which nobody knows a digest"
        ))),
        (Some(has), Some(demanded)) if has != demanded => {
            Err(Failure::usage(format!("{option} demands {demanded}, and image `{text}` has {has}")))
        }
        (None, Some(_)) => Ok(ImageRef { sha256: digest, ..image }),
        _ => Ok(image),
    }
}

/// A name, where it can be one.
pub(crate) fn hostname(option: &str, name: &str) -> Result<String, Failure> {
    if is_hostname(name) {
        Ok(name.to_owned())
    } else {
        Err(Failure::usage(format!("{option} `{name}` is not a hostname: wanted {HOSTNAME}")))
    }
}

async fn read_user_data(path: &Path, option: &str) -> Result<Blob, Failure> {
    let bytes = bytes_of(path, option, USER_DATA_MAX).await?;
    if bytes.len() > USER_DATA_MAX {
        return Err(Failure::usage(format!(
            "{option} {} has {} bytes or more, and a guest can be given {USER_DATA_MAX}",
            path.display(),
            bytes.len()
        )));
    }
    Ok(Blob(bytes))
}

/// The public keys of a file: one at least, and not more than a guest can be given.
pub(crate) async fn keys_in(path: &Path, option: &str) -> Result<Vec<String>, Failure> {
    let wrong = |why: &str| Failure::usage(format!("{option} {} {why}", path.display()));
    let text =
        String::from_utf8(bytes_of(path, option, KEY_FILE_MAX).await?).map_err(|_| wrong("is not text"))?;
    if text.len() > KEY_FILE_MAX {
        return Err(wrong("is too large for a file of public keys"));
    }
    if text.contains("PRIVATE KEY") {
        return Err(wrong("is a private key: give the public one, which ends in .pub"));
    }
    let mut keys = Vec::new();
    // Some editors begin with a mark that it is UTF-8.
    let lines = (1..).zip(text.trim_start_matches('\u{feff}').lines().map(str::trim));
    for (number, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
        if !is_public_key(line) {
            return Err(wrong(&format!(
                "has in line {number} what is not a public key: wanted for example `ssh-ed25519 AAAA… name`"
            )));
        }
        if !is_whole_public_key(line) {
            return Err(wrong(&format!(
                "has in line {number} a public key that is not whole: was it cut off?"
            )));
        }
        keys.push(line.to_owned());
    }
    if keys.is_empty() {
        return Err(wrong("has no public key in it"));
    }
    bounded(&keys)?;
    Ok(keys)
}

fn bounded(keys: &[String]) -> Result<(), Failure> {
    if keys.len() > KEYS_MAX {
        return Err(Failure::usage(format!(
            "{} keys are more than the {KEYS_MAX} that a guest can be given",
            keys.len()
        )));
    }
    Ok(())
}

fn image_url(url: &str) -> Result<String, Failure> {
    if is_image_url(url) { Ok(url.to_owned()) } else { Err(unusable(url)) }
}

fn unusable(text: &str) -> Failure {
    let wanted = format!(
        "wanted http://…, https://…, file:///absolute/path, a name of `images` in schedule.yaml or of `eschedule image list`, a \
         distribution that is known ({}), or a disk to copy (volume:NAME, instance:NAME)",
        names()
    );
    // What is no place can only be a name.
    match text.contains(['/', ':']) {
        true => Failure::usage(format!("image `{text}` is not usable: {wanted}")),
        false => Failure::failed(format!("there is no image `{text}`: {wanted}")),
    }
}

/// A SHA-256, in small letters.
pub(crate) fn sha256(digest: &str, option: &str) -> Result<String, Failure> {
    if is_sha256(digest) {
        Ok(digest.to_ascii_lowercase())
    } else {
        Err(Failure::usage(format!("{option} `{digest}` is not a SHA-256: wanted 64 hexadecimal digits")))
    }
}

/// A SHA-512, in small letters.
pub(crate) fn sha512(digest: &str, option: &str) -> Result<String, Failure> {
    if is_sha512(digest) {
        Ok(digest.to_ascii_lowercase())
    } else {
        Err(Failure::usage(format!("{option} `{digest}` is not a SHA-512: wanted 128 hexadecimal digits")))
    }
}

/// The file's bytes, and one more than `most` where it has more: some files never end.
async fn bytes_of(path: &Path, option: &str, most: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let most = most as u64 + 1;
    let read = match is_stdin(path) {
        // Whoever waits there can be interrupted.
        true => AsyncReadExt::take(tokio::io::stdin(), most).read_to_end(&mut bytes).await,
        false => File::open(path).and_then(|file| Read::take(file, most).read_to_end(&mut bytes)),
    };
    read.map_err(|error| Failure::usage(format!("{option} {} cannot be read: {error}", path.display())))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use ec_cloud::{Bytes, NewImage, add_image};
    use ec_model::Image;

    use super::*;

    #[tokio::test]
    async fn a_disk_is_made_anew_of_nothing_that_was_found_by_a_few_characters_of_its_uuid() {
        let session = Session::in_memory().await;
        for (number, kind, name) in [(0xcafe_0001_u128, "volume", "data"), (0xbeef_0001, "machine", "web")] {
            let uuid = uuid::Uuid::from_u128(number << 96);
            let text = format!(
                r#"{{"version":1,"instance":"{uuid}","kind":"{kind}","name":"{name}","generation":1,
                "spec":{{"query":"resources=DISK_GB:1","image":{{"url":""}}}},
                "assigned":{{"node":"{uuid}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#
            );
            session.put(ec_model::decode(text.as_bytes()).unwrap()).await;
        }
        let (new, at) =
            (NewImage { name: "debian".to_owned(), ..NewImage::default() }, ImageRef::at("http://x"));
        let added = add_image(
            &session.cloud,
            &new,
            Bytes::At(at),
            async || None,
            async |_: &Image| Ok(true),
            async |_: &Image| Ok(()),
        );
        let id = added.await.unwrap().image().id.to_string();
        for text in ["volume:cafe", "volume:CAFE000", "instance:beef", &id[..4], &id[..7]] {
            assert!(image_ref(&session, text, None).await.is_ok(), "{text} says which it is");
            let failed = certain_ref(&session, text, None).await.unwrap_err();
            assert!(failed.message.ends_with("give 8 characters of that or more"), "{failed:?}");
        }
        for text in
            ["volume:cafe0001", "volume:Data", "instance:beef0001", "instance:web", &id[..8], "Debian"]
        {
            assert!(certain_ref(&session, text, None).await.is_ok(), "{text}");
        }
    }
}
