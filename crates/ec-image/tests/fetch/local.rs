//! Fetching from `file://`, and a file system that fills up.

use std::{fs, os::unix::fs::MetadataExt, path::Path, process::Command, time::Duration};

use crate::support::*;
use ec_image::{CacheConfig, ImageError, Refusal};
use ec_model::ImageRef;

fn url(path: &Path) -> ImageRef {
    image(&format!("file://{}", path.display()))
}

/// As `rsync` and `cp -p` write, which give it the time of what they copy.
async fn rewrite_with_its_time(path: &Path, bytes: &[u8]) {
    let before = fs::metadata(path).unwrap();
    let changed = |metadata: &fs::Metadata| (metadata.ctime(), metadata.ctime_nsec());
    fs::write(path, bytes).unwrap();
    // A file system tells times by some milliseconds only.
    loop {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(before.modified().unwrap()).unwrap();
        if changed(&file.metadata().unwrap()) != changed(&before) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_file_is_copied_once_and_again_when_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&dir.path().join("cache")).await;
    let source = dir.path().join("a disk.raw");
    fs::write(&source, disk(1, 10)).unwrap();
    let wanted = image(&format!("file://{}", source.display().to_string().replace(' ', "%20")));

    let first = fetch(&cache, &wanted).await.unwrap();
    let again = fetch(&cache, &wanted).await.unwrap();
    assert_eq!(first.base, again.base);
    fs::write(&source, disk(2, 10)).unwrap();
    let changed = fetch(&cache, &wanted).await.unwrap();
    assert_ne!(changed.base.digest, first.base.digest);
    assert_eq!(fs::read(&first.base.path).unwrap(), disk(1, 10), "the old base is as it was");
    rewrite_with_its_time(&source, &disk(3, 10)).await;
    let as_old = fetch(&cache, &wanted).await.unwrap();
    assert_eq!(fs::read(&as_old.base.path).unwrap(), disk(3, 10));
    assert_eq!(fs::read_dir(dir.path().join("cache/base")).unwrap().count(), 3);
}

#[tokio::test]
async fn what_an_earlier_release_copied_is_not_copied_again_but_where_it_changed_since() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("disk");
    fs::write(&source, disk(1, 10)).unwrap();
    let cache = open(&dir.path().join("cache")).await;
    fetch(&cache, &url(&source)).await.unwrap();
    let [entry] = &fs::read_dir(dir.path().join("cache/index")).unwrap().collect::<Vec<_>>()[..] else {
        panic!()
    };
    let entry = entry.as_ref().unwrap().path();
    let mut old: serde_json::Value = serde_json::from_slice(&fs::read(&entry).unwrap()).unwrap();
    let stamp = old["validators"]["file"].as_object_mut().unwrap();
    stamp.retain(|key, _| !key.starts_with("changed_"));
    assert_eq!(stamp.len(), 4);
    let as_written = || fs::read_to_string(&entry).unwrap();
    fs::write(&entry, old.to_string()).unwrap();
    let before = as_written();
    fetch(&cache, &url(&source)).await.unwrap();
    assert_eq!(as_written(), before, "each copy writes it anew");

    rewrite_with_its_time(&source, &disk(2, 10)).await;
    let changed = fetch(&cache, &url(&source)).await.unwrap();
    assert_eq!(fs::read(&changed.base.path).unwrap(), disk(2, 10));
    assert_ne!(as_written(), before);
}

#[tokio::test]
async fn what_is_not_a_readable_disk_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&dir.path().join("cache")).await;
    let missing = fetch(&cache, &url(&dir.path().join("none"))).await.unwrap_err();
    assert!(matches!(missing, ImageError::Local { .. }) && chain(&missing).contains("No such file"));
    assert!(matches!(fetch(&cache, &url(dir.path())).await, Err(ImageError::NotAFile { .. })));
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(matches!(fetch(&cache, &url(&pipe)).await, Err(ImageError::NotAFile { .. })));
    let page = dir.path().join("disk.qcow2");
    fs::write(&page, "<html>").unwrap();
    let error = fetch(&cache, &url(&page)).await.unwrap_err();
    assert!(matches!(error, ImageError::Refused { refusal: Refusal::Html, .. }), "the name says nothing");
}

#[tokio::test]
async fn only_regular_files_below_the_named_directories_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("images/sub")).unwrap();
    fs::create_dir(at("images-not")).unwrap();
    for name in ["images/sub/disk", "images-not/disk", "secret"] {
        fs::write(at(name), disk(1, 10)).unwrap();
    }
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(at(to), at(name)).unwrap();
    link("secret", "images/link");
    link("images-not", "images/directory");
    link("images/sub/disk", "images/inside");
    // The directory that was named may itself be reached by a link.
    link("images", "named");
    let local = vec![at("named"), at("images")];
    let cache =
        open_cache(CacheConfig { local, ..config(&at("cache"), 64 << 20, Duration::from_secs(1)) }).await;
    for good in ["images/sub/disk", "named/sub/disk"] {
        fetch(&cache, &url(&at(good))).await.unwrap();
    }
    for name in ["secret", "images-not/disk"] {
        let error = fetch(&cache, &url(&at(name))).await.unwrap_err();
        assert!(matches!(error, ImageError::NotLocal { .. }), "{name}: {}", chain(&error));
        assert!(error.to_string().contains("images.local") && !error.is_transient());
    }
    for name in ["images/link", "images/directory/disk", "images/inside"] {
        let error = fetch(&cache, &url(&at(name))).await.unwrap_err();
        assert!(matches!(error, ImageError::Link { .. }), "{name}: {}", chain(&error));
    }
    // In spellings that mean something above.
    let root = format!("file://{}/images", dir.path().display());
    for rest in ["/../secret", "/sub/%2e%2e/../../secret", "/..%2fsecret", "/sub/..%2f..%2fsecret"] {
        let error = fetch(&cache, &image(&format!("{root}{rest}"))).await.unwrap_err();
        assert!(
            matches!(error, ImageError::NotLocal { .. } | ImageError::Link { .. }),
            "{rest}: {}",
            chain(&error)
        );
    }
    // Also with the digest of what the cache has.
    let digest = fetch(&cache, &url(&at("images/sub/disk"))).await.unwrap().base.digest;
    let wanted = ImageRef { sha256: Some(digest), ..url(&at("secret")) };
    assert!(matches!(fetch(&cache, &wanted).await, Err(ImageError::NotLocal { .. })));
    drop(cache);

    let closed = CacheConfig::new(at("closed"), 64 << 20);
    let error = fetch(&open_cache(closed).await, &url(&at("images/sub/disk"))).await.unwrap_err();
    assert!(matches!(error, ImageError::NotLocal { .. }), "none by default: {}", chain(&error));
}

#[tokio::test]
async fn a_device_is_no_image() {
    let dir = tempfile::tempdir().unwrap();
    let devices = CacheConfig { local: vec!["/dev".into()], ..CacheConfig::new(dir.path(), 64 << 20) };
    let cache = open_cache(devices).await;
    for device in ["/dev/zero", "/dev/tty", "/dev"] {
        let error = fetch(&cache, &url(Path::new(device))).await.unwrap_err();
        assert!(matches!(error, ImageError::NotAFile { .. }), "{device}: {}", chain(&error));
    }
}

/// A small file system of its own.
struct Mount(tempfile::TempDir);

impl Mount {
    /// None where this may not mount.
    fn new(bytes: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(dir.path())
            .status();
        mounted.is_ok_and(|status| status.success()).then_some(Self(dir))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[tokio::test]
async fn a_full_disk_is_an_error_of_its_own_and_leaves_no_temporary_file() {
    let Some(small) = Mount::new(1 << 20) else {
        eprintln!("skipped: mounting a tmpfs needs root");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let cache = open(small.0.path()).await;
    let source = dir.path().join("disk");
    fs::write(&source, disk(1, 4096)).unwrap();
    let error = fetch(&cache, &url(&source)).await.unwrap_err();
    assert!(matches!(error, ImageError::DiskFull { .. }), "{}", chain(&error));
    assert_eq!(temporary_files(small.0.path()), 0);
    fs::write(&source, disk(1, 100)).unwrap();
    fetch(&cache, &url(&source)).await.unwrap();
}

#[tokio::test]
async fn a_store_that_is_not_mounted_yet_is_waited_for_and_an_image_that_is_gone_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("store");
    let store = ec_image::StoreSection {
        url: Some(format!("file://{}", directory.display())),
        ..ec_image::StoreSection::default()
    };
    let config = CacheConfig {
        store: Some(store),
        ..config(&dir.path().join("cache"), 64 << 20, Duration::from_secs(1))
    };
    let cache = open_cache(config).await;
    let wanted = url(&directory.join("7d3c1f0a-2b4e-4c55-9a7e-0123456789ab"));
    for _ in ["missing", "an empty mount point"] {
        let error = fetch(&cache, &wanted).await.unwrap_err();
        assert!(matches!(error, ImageError::StoreAway { .. }) && error.is_transient(), "{error}");
        fs::create_dir(&directory).ok();
    }
    // What lies beside the store is nobody's to wait for.
    let error = fetch(&cache, &url(&dir.path().join("none"))).await.unwrap_err();
    assert!(matches!(error, ImageError::Local { .. }) && !error.is_transient(), "{error}");
    fs::write(directory.join("another"), "").unwrap();
    let error = fetch(&cache, &wanted).await.unwrap_err();
    assert!(matches!(error, ImageError::Local { .. }) && !error.is_transient(), "{error}");
}

#[tokio::test]
async fn a_directory_of_images_that_is_not_mounted_yet_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let [images, others] = ["images", "others"].map(|name| dir.path().join(name));
    fs::create_dir(&others).unwrap();
    fs::write(others.join("one"), "").unwrap();
    let config = CacheConfig {
        local: vec![others.clone(), images.clone()],
        ..config(&dir.path().join("cache"), 64 << 20, Duration::from_secs(1))
    };
    let cache = open_cache(config).await;
    let wanted = url(&images.join("debian/13"));
    for _ in ["missing", "an empty mount point"] {
        let error = fetch(&cache, &wanted).await.unwrap_err();
        assert!(matches!(error, ImageError::LocalAway { .. }) && error.is_transient(), "{error}");
        assert!(error.to_string().contains(&images.display().to_string()), "{error}");
        fs::create_dir(&images).ok();
    }
    fs::write(images.join("another"), "").unwrap();
    for gone in [wanted, url(&others.join("none"))] {
        let error = fetch(&cache, &gone).await.unwrap_err();
        assert!(matches!(error, ImageError::Local { .. }) && !error.is_transient(), "{error}");
    }
    fs::create_dir(images.join("debian")).unwrap();
    fs::write(images.join("debian/13"), disk(1, 4096)).unwrap();
    fetch(&cache, &url(&images.join("debian/13"))).await.unwrap();
}
