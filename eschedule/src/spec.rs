//! Reading and checking what the user gives for the guest, before anything is claimed.

use std::{fs::File, io::Read, path::Path};

use ec_cloud::{Guest, Naming};
use ec_model::{
    Blob, ImageRef, USER_DATA_MAX,
    input::{KEYS_MAX, is_hostname, is_image_url, is_public_key, is_sha256},
};
use ec_runtime::exit::Failure;

use crate::{cli::Spec, config::Defaults};

/// A file of public keys is a few lines.
const KEY_FILE_MAX: usize = 1 << 20;

/// What of a name with a prefix is its own: the beginning of a uuid.
const SUFFIX: &str = "01234567";

/// A checked [`Spec`], with the site's defaults where it says nothing.
pub(crate) fn read(spec: &Spec, image: &str, defaults: &Defaults) -> Result<Guest, Failure> {
    let naming = match (&spec.name, &defaults.name_prefix) {
        (Some(name), _) => Naming::Name(hostname("--name", name)?),
        (None, Some(prefix)) => {
            hostname("--name", &format!("{prefix}{SUFFIX}"))
                .map_err(|_| Failure::usage(format!("defaults.name_prefix `{prefix}` begins no hostname")))?;
            Naming::Prefix(prefix.clone())
        }
        (None, None) => Naming::None,
    };
    let user_data = match (&spec.user_data, &defaults.user_data) {
        (Some(path), _) => Some(read_user_data(path, "--user-data")?),
        (None, Some(path)) => Some(read_user_data(path, "defaults.user_data")?),
        (None, None) => None,
    };
    let keys = if spec.key.is_empty() {
        read_keys(&defaults.keys, "defaults.keys")?
    } else {
        read_keys(&spec.key, "--key")?
    };
    Ok(Guest {
        naming,
        user_data,
        keys,
        image: ImageRef { url: image_url(image)?, sha256: spec.sha256.as_deref().map(sha256).transpose()? },
        token_required: spec.require_token || defaults.require_token,
        labels: spec.traits.label.iter().cloned().collect(),
        restart: spec.traits.restart.map(Into::into).unwrap_or_default(),
    })
}

/// A name, where it can be one.
pub(crate) fn hostname(option: &str, name: &str) -> Result<String, Failure> {
    if is_hostname(name) {
        Ok(name.to_owned())
    } else {
        Err(Failure::usage(format!(
            "{option} `{name}` is not a hostname: wanted letters, digits and hyphens, at most 63 in each part, and not a uuid"
        )))
    }
}

fn read_user_data(path: &Path, option: &str) -> Result<Blob, Failure> {
    let bytes = bytes_of(path, option, USER_DATA_MAX)?;
    if bytes.len() > USER_DATA_MAX {
        return Err(Failure::usage(format!(
            "{option} {} has {} bytes or more, and a guest can be given {USER_DATA_MAX}",
            path.display(),
            bytes.len()
        )));
    }
    Ok(Blob(bytes))
}

fn read_keys(files: &[impl AsRef<Path>], option: &str) -> Result<Vec<String>, Failure> {
    let mut keys = Vec::new();
    for path in files.iter().map(AsRef::as_ref) {
        let wrong = |why: &str| Failure::usage(format!("{option} {} {why}", path.display()));
        let text =
            String::from_utf8(bytes_of(path, option, KEY_FILE_MAX)?).map_err(|_| wrong("is not text"))?;
        if text.len() > KEY_FILE_MAX {
            return Err(wrong("is too large for a file of public keys"));
        }
        if text.contains("PRIVATE KEY") {
            return Err(wrong("is a private key: give the public one, which ends in .pub"));
        }
        let before = keys.len();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if !is_public_key(line) {
                return Err(wrong(
                    "has a line that is not a public key: wanted for example `ssh-ed25519 AAAA… name`",
                ));
            }
            keys.push(line.to_owned());
        }
        if keys.len() == before {
            return Err(wrong("has no public key in it"));
        }
    }
    if keys.len() > KEYS_MAX {
        return Err(Failure::usage(format!(
            "{} keys are more than the {KEYS_MAX} that a guest can be given",
            keys.len()
        )));
    }
    Ok(keys)
}

fn image_url(url: &str) -> Result<String, Failure> {
    if is_image_url(url) {
        Ok(url.to_owned())
    } else {
        Err(Failure::usage(format!(
            "image `{url}` is not usable: wanted http://…, https://… or file:///absolute/path"
        )))
    }
}

fn sha256(digest: &str) -> Result<String, Failure> {
    if is_sha256(digest) {
        Ok(digest.to_ascii_lowercase())
    } else {
        Err(Failure::usage(format!("--sha256 `{digest}` is not a SHA-256: wanted 64 hexadecimal digits")))
    }
}

/// The file's bytes, and one more than `most` where it has more: some files never end.
fn bytes_of(path: &Path, option: &str, most: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(most as u64 + 1).read_to_end(&mut bytes))
        .map_err(|error| Failure::usage(format!("{option} {} cannot be read: {error}", path.display())))?;
    Ok(bytes)
}
