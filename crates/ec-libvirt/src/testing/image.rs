//! The image that tests boot.

use std::{
    env, fs,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use ec_model::{BaseImage, DiskFormat};

use super::cache_directory;

/// Names an image to use instead of building one.
const VARIABLE: &str = "EC_TEST_TINY_IMAGE";

/// The path of the tiny image: what `EC_TEST_TINY_IMAGE` names, else the one that
/// `scripts/guests/build-tiny.sh` builds, once, into `target/test-images`.
pub fn tiny_image() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT
        .get_or_init(|| match env::var_os(VARIABLE) {
            Some(path) => path.into(),
            None => build(),
        })
        .clone()
}

fn build() -> PathBuf {
    let directory = cache_directory();
    fs::create_dir_all(&directory).expect("the directory of test images");
    // Tests run in several processes: one builds, the others wait.
    let lock = File::create(directory.join("lock")).expect("the lock of test images");
    lock.lock().expect("the lock of test images");
    let image = directory.join("tiny.qcow2");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/guests/build-tiny.sh");
    let output = Command::new(&script).arg(&image).arg(directory.join("packages")).output();
    let output = output.expect("scripts/guests/build-tiny.sh");
    assert!(
        output.status.success(),
        "{} failed:\n{}",
        script.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    image
}

/// A qcow2 file as a base image; its size comes from its header.
pub fn base_image(path: &Path) -> BaseImage {
    let mut header = [0; 32];
    File::open(path).and_then(|mut file| file.read_exact(&mut header)).expect("the image's header");
    assert_eq!(&header[..4], b"QFI\xfb", "{} is not a qcow2 file", path.display());
    let size = header[24..].try_into().expect("eight bytes");
    BaseImage {
        path: path.to_owned(),
        format: DiskFormat::Qcow2,
        virtual_size: u64::from_be_bytes(size),
        // Nothing that takes a base image from here looks at it.
        digest: String::new(),
    }
}
