//! Packed images: unpacked while they come, by whatever way, whole or not at all.

use std::{os::unix::fs::MetadataExt, path::Path, sync::Arc};

use ec_image::{ImageError, Packing};
use sha2::{Digest, Sha256, Sha512};
use tokio::sync::Semaphore;

use super::support::*;

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 1).unwrap()
}

#[tokio::test]
async fn a_packed_image_is_the_disk_in_it_and_its_digests_are_those_that_are_published() {
    let dir = tempfile::tempdir().unwrap();
    let disk = disk(1, 4096);
    let packed = zstd(&disk);
    let (sha256, sha512) = (hex(&Sha256::digest(&packed)), hex(&Sha512::digest(&packed)));
    let served = packed.clone();
    let server = Server::start(move |_, _| ok(&served)).await;
    for (wanted256, wanted512, hits) in [
        (None, None, 1),
        (Some(sha256.clone()), None, 1),
        // Nobody looked at that one before.
        (None, Some(sha512.clone()), 2),
        (Some(sha256), Some(sha512.to_uppercase()), 2),
    ] {
        // What was remembered outlives the program.
        let cache = open(dir.path()).await;
        let image = ec_model::ImageRef { sha256: wanted256, sha512: wanted512, ..server.image() };
        let base = fetch(&cache, &image).await.unwrap().base;
        assert_eq!(base.digest, hex(&Sha256::digest(&disk)), "the base is called by what it is");
        assert_eq!((std::fs::read(&base.path).unwrap() == disk, base.virtual_size), (true, 4096 * 512));
        assert_eq!(server.hits(), hits);
    }
    // The digest of what came out is not that of what was published.
    let cache = open(dir.path()).await;
    let image = ec_model::ImageRef { sha256: Some(hex(&Sha256::digest(&disk))), ..server.image() };
    let error = fetch(&cache, &image).await.unwrap_err();
    assert!(
        matches!(&error, ImageError::Checksum { actual, .. } if *actual == hex(&Sha256::digest(&packed)))
    );
    let image = ec_model::ImageRef { sha512: Some("0".repeat(128)), ..server.image() };
    let error = fetch(&cache, &image).await.unwrap_err();
    assert!(error.to_string().contains("has SHA-512") && !error.is_transient(), "{error}");
    assert_eq!(temporary_files(dir.path()), 0);
}

#[tokio::test]
async fn what_is_empty_of_a_disk_takes_no_room() {
    let dir = tempfile::tempdir().unwrap();
    // Written here and there, also across blocks and at neither's beginning; what it ends with is empty.
    let mut disk = vec![0; 8 << 20];
    for at in [512, 4096, 1 << 20, (2 << 20) - 3, (5 << 20) + 4095] {
        disk[at..at + 6].copy_from_slice(b"sector");
    }
    let (plain, packed) = (disk.clone(), zstd(&disk));
    let server =
        Server::start(move |_, head| ok(if head.contains("/packed") { &packed } else { &plain })).await;
    for path in ["plain", "packed"] {
        let cache = open(&dir.path().join(path)).await;
        let image = ec_model::ImageRef { url: format!("{}{path}", server.image().url), ..server.image() };
        let base = fetch(&cache, &image).await.unwrap().base;
        assert!(std::fs::read(&base.path).unwrap() == disk, "{path}");
        let taken = std::fs::metadata(&base.path).unwrap().blocks() * 512;
        assert!(taken <= 64 << 10, "{path} takes {taken} bytes");
    }
}

#[tokio::test]
async fn a_packed_image_goes_on_where_its_connection_broke() {
    let dir = tempfile::tempdir().unwrap();
    // What hardly packs, so that there is enough to break off in.
    let mut state = 1_u32;
    let disk: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(1 << 20)
    .collect();
    let disk = [vec![0; 512], disk].concat();
    let packed = zstd(&disk);
    let server = Server::start(move |number, head| {
        let tag = "etag: \"one\"\r\n";
        let whole = answer("200 OK", tag, &packed);
        match head
            .split("range: bytes=")
            .nth(1)
            .and_then(|rest| rest.split('-').next()?.parse::<usize>().ok())
        {
            _ if number == 0 => vec![Step::Send(whole[..whole.len() / 2].to_vec())],
            Some(from) => {
                let range =
                    format!("{tag}content-range: bytes {from}-{}/{}\r\n", packed.len() - 1, packed.len());
                vec![Step::Send(answer("206 Partial Content", &range, &packed[from..]))]
            }
            None => vec![Step::Send(whole)],
        }
    })
    .await;
    let base = fetch(&open(dir.path()).await, &server.image()).await.unwrap().base;
    assert!(std::fs::read(base.path).unwrap() == disk);
    assert!(server.heads.lock().unwrap()[1].contains("range: bytes="));
}

#[tokio::test]
async fn what_is_torn_or_no_disk_inside_is_told_and_keeps_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let packed = zstd(&disk(1, 100));
    for (bytes, word) in [
        (packed[..packed.len() - 3].to_vec(), "packed with zstd and cannot be unpacked"),
        (b"\x1f\x8b\x08 and no more".to_vec(), "packed with gzip"),
        (zstd(b"<!doctype html><p>404"), "HTML"),
        (zstd(&packed), "compressed with zstd"),
        (zstd(&[0; 700]), "multiple of 512"),
    ] {
        let server = Server::start(move |_, _| ok(&bytes)).await;
        let error = fetch(&cache, &server.image()).await.unwrap_err();
        assert!(chain(&error).contains(word) && !error.is_transient(), "{word}: {}", chain(&error));
    }
    assert_eq!(std::fs::read_dir(dir.path().join("base")).unwrap().count(), 0);
    assert_eq!(temporary_files(dir.path()), 0);
    assert!(Packing::is_known("xz") && !Packing::is_known("bzip2"));
}

#[tokio::test]
async fn a_bomb_ends_at_the_disk_that_was_asked_for_or_at_the_caches_bound() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let bomb = zstd(&vec![0; 96 << 20]);
    assert!(bomb.len() < 32 << 10);
    let server = Server::start(move |_, _| ok(&bomb)).await;
    // The cache may hold 64 MiB.
    let error = fetch(&cache, &server.image()).await.unwrap_err();
    assert!(matches!(error, ImageError::TooBig { .. }), "{error}");
    // How large it becomes nobody knows yet.
    let begun = zstd(&vec![0; 32 << 20]);
    let slow = Server::start(move |_, _| {
        let bytes = [b"HTTP/1.1 200 OK\r\ncontent-length: 50000000\r\n\r\n", &begun[..]].concat();
        vec![Step::Send(bytes), Step::Wait(Arc::new(Semaphore::new(0)))]
    })
    .await;
    let error = cache.fetch(&slow.image(), Some(8 << 20), no_progress()).await.unwrap_err();
    assert!(error.to_string().contains("a disk of more than 8.0 MiB"), "{error}");
    let error = cache.fetch(&server.image(), Some(8 << 20), no_progress()).await.unwrap_err();
    assert!(
        matches!(error, ImageError::VirtualSize { needed: None, .. } | ImageError::TooBig { .. }),
        "{error}"
    );
    for _ in 0..100 {
        if temporary_files(dir.path()) == 0 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("something is left");
}

#[tokio::test]
async fn an_object_of_a_store_that_is_not_configured_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let image = image("s3://bucket/7d3c1f0a-2b4e-4c55-9a7e-0123456789ab");
    let error = fetch(&open(dir.path()).await, &image).await.unwrap_err().to_string();
    assert!(error.contains("reads none") && error.contains("images.store"), "{error}");
    let store = ec_image::StoreSection {
        url: Some("s3://bucket/ours".to_owned()),
        endpoint: Some("http://127.0.0.1:1".to_owned()),
        ..ec_image::StoreSection::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let config = ec_image::CacheConfig {
        store: Some(store),
        ..config(dir.path(), 64 << 20, std::time::Duration::from_secs(10))
    };
    let cache = open_cache(config).await;
    // Only objects of the store, by their uuids, are read with the node's rights.
    for url in [
        "s3://bucket/7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
        "s3://bucket/ours/secret",
        "s3://bucket/ours/../7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
        "s3://bucket/oursx/7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
        "s3://other/ours/7d3c1f0a-2b4e-4c55-9a7e-0123456789ab",
    ] {
        let error = fetch(&cache, &ec_model::ImageRef::at(url)).await.unwrap_err().to_string();
        assert!(error.contains("reads only s3://bucket/ours"), "{url}: {error}");
    }
}

#[tokio::test]
async fn a_store_that_takes_the_connection_and_says_nothing_is_not_waited_for_without_end() {
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "SK").unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let store = ec_image::StoreSection {
        url: Some("s3://bucket/ours".to_owned()),
        endpoint: Some(format!("http://{}", silent.local_addr().unwrap())),
        access_key: Some("AK".to_owned()),
        secret_key_file: Some(secret),
        ..ec_image::StoreSection::default()
    };
    let config = ec_image::CacheConfig {
        store: Some(store),
        ..config(&dir.path().join("cache"), 64 << 20, std::time::Duration::from_millis(300))
    };
    let image = ec_model::ImageRef::at("s3://bucket/ours/7d3c1f0a-2b4e-4c55-9a7e-0123456789ab");
    let error = fetch(&open_cache(config).await, &image).await.unwrap_err();
    assert!(matches!(error, ImageError::Stalled { .. }), "{error}");
}

/// A bucket's answer to one question for an object, which breaks off behind so many bytes of it.
fn bucket(head: &str, object: &[u8], tag: &str, most: usize) -> Vec<Step> {
    let header = |name: &str| {
        let line = head.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}: ")));
        line.map(|line| line[name.len() + 2..].to_owned())
    };
    if header("if-match").is_some_and(|wanted| wanted != tag) {
        return vec![Step::Send(answer("412 Precondition Failed", "", b""))];
    }
    let range = header("range");
    let from = range.as_deref().map_or(0, |range| {
        let (from, _) = range.trim_start_matches("bytes=").split_once('-').unwrap();
        from.parse().unwrap()
    });
    let length = object.len();
    let (status, of) = match range {
        Some(_) => {
            ("206 Partial Content", format!("content-range: bytes {from}-{}/{length}\r\n", length - 1))
        }
        None => ("200 OK", String::new()),
    };
    let headers = format!("etag: {tag}\r\nlast-modified: Tue, 03 Feb 2026 00:00:00 GMT\r\n{of}");
    let mut bytes = answer(status, &headers, &object[from..]);
    let sent = bytes.len() - (object.len() - from) + most.min(object.len() - from);
    bytes.truncate(sent);
    vec![Step::Send(bytes)]
}

async fn cache_of_bucket(directory: &Path, server: &Server) -> ec_image::ImageCache {
    let secret = directory.join("secret");
    std::fs::write(&secret, "SK").unwrap();
    let store = ec_image::StoreSection {
        url: Some("s3://bucket/ours".to_owned()),
        endpoint: Some(server.url.clone()),
        access_key: Some("AK".to_owned()),
        secret_key_file: Some(secret),
        ..ec_image::StoreSection::default()
    };
    open_cache(ec_image::CacheConfig {
        store: Some(store),
        ..config(&directory.join("cache"), 64 << 20, std::time::Duration::from_secs(10))
    })
    .await
}

const OBJECT: &str = "s3://bucket/ours/7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";

#[tokio::test]
async fn an_object_goes_on_where_it_broke_off_however_often_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let object = disk(7, 4096);
    let whole = object.clone();
    // More often than the store's client tries by itself.
    let server = Server::start(move |_, head| bucket(head, &object, "\"one\"", 128 << 10)).await;
    let cache = cache_of_bucket(dir.path(), &server).await;
    let fetched = fetch(&cache, &ec_model::ImageRef::at(OBJECT)).await.unwrap();
    assert_eq!(std::fs::read(&fetched.base.path).unwrap(), whole);
    assert_eq!((server.hits(), cache.downloaded()), (16, whole.len() as u64), "nothing came twice");
    assert_eq!(temporary_files(&dir.path().join("cache")), 0);
}

#[tokio::test]
async fn an_object_that_was_replaced_while_it_came_is_asked_for_from_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (disk(8, 4096), disk(9, 4096));
    let whole = second.clone();
    let server = Server::start(move |number, head| match number {
        0 => bucket(head, &first, "\"one\"", 1 << 20),
        _ => bucket(head, &second, "\"two\"", usize::MAX),
    })
    .await;
    let cache = cache_of_bucket(dir.path(), &server).await;
    let fetched = fetch(&cache, &ec_model::ImageRef::at(OBJECT)).await.unwrap();
    assert_eq!(std::fs::read(&fetched.base.path).unwrap(), whole);
}
