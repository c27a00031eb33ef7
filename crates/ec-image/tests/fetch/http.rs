//! Fetching over HTTP, from servers of every kind of misbehaviour.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::support::*;
use ec_image::{CacheConfig, CachedImage, ImageError, Refusal};
use ec_model::{DiskFormat, ImageRef};
use sha2::{Digest, Sha256};
use tokio::sync::{Semaphore, watch};

const SHORT: Duration = Duration::from_millis(300);

#[tokio::test]
async fn an_image_lands_under_its_digest_for_all_to_read() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(|_, _| ok(&disk(1, 100))).await;
    let got = fetch(&open(dir.path()).await, &server.image()).await.unwrap();
    assert_eq!((got.base.format, got.base.virtual_size), (DiskFormat::Raw, 51_200));
    assert_eq!(got.base.path, dir.path().join(format!("base/{}.raw", got.base.digest)));
    assert_eq!(std::fs::read(&got.base.path).unwrap(), disk(1, 100));
    assert_eq!(std::fs::metadata(&got.base.path).unwrap().permissions().mode() & 0o777, 0o444);
    assert_eq!(temporary_files(dir.path()), 0);
}

#[tokio::test]
async fn fifty_who_ask_at_once_share_one_download_and_all_see_how_far_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let body = disk(2, 8192);
    let server = Server::start(move |_, _| {
        let whole = answer("200 OK", "", &body);
        let (first, rest) = whole.split_at(3 << 20);
        vec![Step::Send(first.to_vec()), Step::Wait(Arc::clone(&held)), Step::Send(rest.to_vec())]
    })
    .await;
    let cache = open(dir.path()).await;
    let mut watchers = Vec::new();
    let mut tasks = Vec::new();
    for _ in 0..50 {
        let (sender, receiver) = watch::channel(None);
        let (cache, image) = (cache.clone(), server.image());
        tasks.push(tokio::spawn(async move { cache.fetch(&image, None, sender).await }));
        watchers.push(receiver);
    }
    // One who goes away does not take the others along.
    tasks.pop().unwrap().abort();
    watchers.pop();
    for watcher in &mut watchers {
        let seen = watcher
            .wait_for(|told| told.as_ref().is_some_and(|told| told.done >= 2 << 20))
            .await
            .unwrap()
            .clone()
            .unwrap();
        assert_eq!((seen.step.as_str(), seen.total), ("image", Some(4 << 20)));
    }
    gate.add_permits(1);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(server.hits(), 1);
}

#[tokio::test]
async fn who_leaves_and_comes_again_at_once_finds_the_download_as_far_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (rest, body) = (Arc::new(Semaphore::new(0)), disk(3, 8192));
    let (gate, whole) = (Arc::clone(&rest), answer("200 OK", "", &body));
    let server = Server::start(move |_, _| {
        let (first, second) = whole.split_at(2 << 20);
        vec![Step::Send(first.to_vec()), Step::Wait(Arc::clone(&gate)), Step::Send(second.to_vec())]
    })
    .await;
    let cache = open(dir.path()).await;
    let (sender, mut receiver) = watch::channel(None);
    let (asker, image) = (cache.clone(), server.image());
    let task = tokio::spawn(async move { asker.fetch(&image, None, sender).await.map(|_| ()) });
    receiver.wait_for(|told| told.as_ref().is_some_and(|told| told.done > 0)).await.unwrap();
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    rest.add_permits(1);
    let got = fetch(&cache, &server.image()).await.unwrap();
    assert!(std::fs::read(&got.base.path).unwrap() == body);
    assert_eq!(server.hits(), 1);
}

#[tokio::test]
async fn when_the_last_one_leaves_the_download_ends_without_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(|_, _| {
        let whole = answer("200 OK", "", &disk(3, 8192));
        vec![Step::Send(whole[..2 << 20].to_vec()), Step::Wait(Arc::new(Semaphore::new(0)))]
    })
    .await;
    let cache = open(dir.path()).await;
    let (sender, mut receiver) = watch::channel(None);
    let (asker, image) = (cache.clone(), server.image());
    let task = tokio::spawn(async move { asker.fetch(&image, None, sender).await.map(|_| ()) });
    receiver.wait_for(|told| told.as_ref().is_some_and(|told| told.done > 0)).await.unwrap();
    assert_eq!(temporary_files(dir.path()), 1);
    task.abort();
    eventually("the temporary file is gone", || async { temporary_files(dir.path()) == 0 }).await;
}

#[tokio::test]
async fn the_origin_is_asked_whether_the_image_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(|number, head| {
        let unchanged = head.contains("if-none-match: \"v1\"")
            && head.contains("if-modified-since: Wed, 01 Jan 2025 00:00:00 GMT");
        let tags = "etag: \"v1\"\r\nlast-modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n";
        vec![Step::Send(match number {
            0 => answer("200 OK", tags, &disk(1, 10)),
            1 if unchanged => b"HTTP/1.1 304 Not Modified\r\n\r\n".to_vec(),
            _ => answer("200 OK", "etag: \"v2\"\r\n", &disk(2, 10)),
        })]
    })
    .await;
    let first = fetch(&open(dir.path()).await, &server.image()).await.unwrap().base;
    // What was remembered outlives the program.
    let cache = open(dir.path()).await;
    assert_eq!(fetch(&cache, &server.image()).await.unwrap().base, first);
    let changed = fetch(&cache, &server.image()).await.unwrap();
    assert_ne!(changed.base.digest, first.digest);
    assert_eq!(server.hits(), 3);
    assert!(first.path.exists(), "overlays may lie on the old one");
}

#[tokio::test]
async fn what_was_fetched_in_vain_is_not_fetched_again_until_it_is_another() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(|number, _| {
        let (tag, seed) = match number {
            0 | 1 => ("etag: \"one\"\r\n", 1),
            // One by which nothing tells whether it is the same.
            2 | 3 => ("etag: W/\"two\"\r\n", 1),
            _ => ("etag: \"three\"\r\n", 2),
        };
        vec![Step::Send(answer("200 OK", tag, &disk(seed, 400)))]
    })
    .await;
    let cache = open(dir.path()).await;
    let demanded = Sha256::digest(disk(2, 400)).iter().map(|byte| format!("{byte:02x}")).collect();
    let wanted = ImageRef { sha256: Some(demanded), ..server.image() };
    let size = disk(1, 400).len() as u64;
    for (number, came) in [1, 1, 2, 3].into_iter().enumerate() {
        let error = fetch(&cache, &wanted).await.unwrap_err();
        let is_told_again =
            matches!(&error, ImageError::InVain { why, .. } if matches!(**why, ImageError::Checksum { .. }));
        assert!(is_told_again || matches!(error, ImageError::Checksum { .. }), "{error}");
        assert_eq!(is_told_again, number == 1, "{error}");
        assert_eq!((server.hits(), cache.downloaded()), (number + 1, came * size));
    }
    fetch(&cache, &wanted).await.unwrap();
}

#[tokio::test]
async fn what_was_put_together_of_two_that_are_not_one_is_fetched_anew_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(|number, head| {
        let whole = answer("200 OK", "etag: \"same\"\r\n", &disk(1, 400));
        let other = disk(2, 400);
        let from = head.lines().find_map(|line| line.strip_prefix("range: bytes=")?.strip_suffix('-'));
        vec![Step::Send(match from.map(|from| from.parse::<usize>().unwrap()) {
            // Of another mirror, which says the same of what it has.
            Some(from) => {
                let (last, length) = (other.len() - 1, other.len());
                let headers = format!("etag: \"same\"\r\ncontent-range: bytes {from}-{last}/{length}\r\n");
                answer("206 Partial Content", &headers, &other[from..])
            }
            None if number == 0 => whole[..100_000].to_vec(),
            None => whole,
        })]
    })
    .await;
    let cache = open(dir.path()).await;
    let demanded = Sha256::digest(disk(1, 400)).iter().map(|byte| format!("{byte:02x}")).collect();
    let wanted = ImageRef { sha256: Some(demanded), ..server.image() };
    let error = fetch(&cache, &wanted).await.unwrap_err();
    assert!(matches!(error, ImageError::Checksum { .. }), "{error}");
    fetch(&cache, &wanted).await.unwrap();
    assert_eq!(server.hits(), 3);
}

#[tokio::test]
async fn what_the_cache_has_serves_while_the_origin_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let server = Server::start(|number, _| match number {
        0 => ok(&disk(1, 10)),
        _ => vec![Step::Send(answer("503 Service Unavailable", "", b"later"))],
    })
    .await;
    let image = server.image();
    let first = fetch(&cache, &image).await.unwrap();
    assert_eq!(fetch(&cache, &image).await.unwrap().base, first.base, "a gateway without its origin");
    drop(server);
    assert_eq!(fetch(&cache, &image).await.unwrap().base, first.base, "nobody listens");
    // Another digest than the cached one is not served from the cache.
    let other = ImageRef { sha256: Some("0".repeat(64)), ..image };
    assert!(matches!(fetch(&cache, &other).await, Err(ImageError::Unreachable { .. })));
}

#[tokio::test]
async fn a_demanded_digest_needs_no_network_where_this_url_gave_it_and_gives_nobody_elses_image() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let server = Server::start(|number, _| match number {
        0 => ok(&disk(1, 10)),
        // Whoever says "not modified" to all questions has not shown to have it.
        _ => vec![Step::Send(answer("304 Not Modified", "", b""))],
    })
    .await;
    let digest = fetch(&cache, &server.image()).await.unwrap().base.digest;
    let again = ImageRef { sha256: Some(digest.to_uppercase()), ..server.image() };
    assert_eq!(fetch(&cache, &again).await.unwrap().base.digest, digest);
    assert_eq!(server.hits(), 1);

    for url in ["http://nowhere.invalid/x".to_owned(), format!("{}/other", server.url)] {
        let elsewhere = ImageRef { sha256: Some(digest.clone()), ..ImageRef::at(url) };
        let error = fetch(&cache, &elsewhere).await.unwrap_err();
        let told = matches!(error, ImageError::Unreachable { .. } | ImageError::Status { status: 304, .. });
        assert!(told, "{}", chain(&error));
        assert!(!error.to_string().contains(&digest));
    }
}

#[tokio::test]
async fn what_a_url_gave_before_it_gave_another_is_fetched_no_more_than_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    // A distribution replaces what it publishes.
    let server = Server::start(|number, _| ok(&disk(u8::try_from(number).unwrap(), 10))).await;
    let [before, now] =
        [fetch(&cache, &server.image()).await.unwrap(), fetch(&cache, &server.image()).await.unwrap()];
    assert_ne!(before.base.digest, now.base.digest);
    let demands = |of: &CachedImage| ImageRef { sha256: Some(of.base.digest.clone()), ..server.image() };
    for of in [&before, &now] {
        assert_eq!(fetch(&cache, &demands(of)).await.unwrap().base, of.base);
    }
    assert_eq!(server.hits(), 2);
    // Of another URL nobody knows that it has the same.
    let elsewhere = ImageRef { sha256: demands(&before).sha256, ..image(&format!("{}/other", server.url)) };
    assert!(matches!(fetch(&cache, &elsewhere).await, Err(ImageError::Checksum { .. })));
}

#[tokio::test]
async fn a_wrong_digest_is_an_error_and_keeps_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let server = Server::start(|_, _| ok(&disk(1, 10))).await;
    let wanted = ImageRef { sha256: Some("1".repeat(64)), ..server.image() };
    let error = fetch(&cache, &wanted).await.unwrap_err();
    assert!(
        matches!(&error, ImageError::Checksum { expected, .. } if *expected == "1".repeat(64)),
        "{error}"
    );
    assert!(!error.is_transient());
    assert_eq!(std::fs::read_dir(dir.path().join("base")).unwrap().count(), 0);
    assert_eq!(temporary_files(dir.path()), 0);
}

#[tokio::test]
async fn a_refusal_names_status_and_url_without_secrets_and_is_repeated_only_if_it_may_pass() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    for (status, transient) in [("404 Not Found", false), ("403 Forbidden", false), ("500 Oops", true)] {
        let server =
            Server::start(move |_, _| vec![Step::Send(answer(status, "", b"<html>no</html>"))]).await;
        let url = format!("{}/disk?sig=hidden", server.url).replace("http://", "http://user:hidden@");
        let error = fetch(&cache, &image(&url)).await.unwrap_err();
        let text = chain(&error);
        assert!(text.contains(&status[..3]) && text.contains(&format!("{}/disk", server.url)), "{text}");
        assert!(!text.contains("hidden"), "{text}");
        assert_eq!((error.is_transient(), server.hits() == 1), (transient, !transient));
        assert!(server.heads.lock().unwrap()[0].contains("authorization: Basic"), "but they are sent");
    }
}

#[tokio::test]
async fn redirects_are_followed_up_to_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let hop = |to: &str| vec![Step::Send(answer("302 Found", &format!("location: {to}\r\n"), b""))];
    let server = Server::start(move |number, _| match number {
        0 => hop("/elsewhere"),
        1 => ok(&disk(1, 10)),
        _ => hop("/round"),
    })
    .await;
    fetch(&cache, &server.image()).await.unwrap();
    let error = fetch(&cache, &image(&format!("{}/round", server.url))).await.unwrap_err();
    assert!(matches!(error, ImageError::TooManyRedirects { limit: 10, .. }), "{}", chain(&error));

    for (to, wanted) in [("file:///etc/passwd", "of file:"), ("ftp://host/x", "of ftp:"), ("", "no place")] {
        let server = Server::start(move |_, _| match to {
            "" => vec![Step::Send(answer("302 Found", "", b""))],
            to => hop(to),
        })
        .await;
        let error = fetch(&cache, &server.image()).await.unwrap_err();
        assert!(
            matches!(&error, ImageError::Nowhere { how, .. } if how.contains(wanted)),
            "{}",
            chain(&error)
        );
        assert_eq!(server.hits(), 1);
    }
}

#[tokio::test]
async fn a_server_that_stalls_is_given_up_wherever_it_stalls() {
    let whole = answer("200 OK", "", &disk(1, 4096));
    let head = whole.iter().position(|byte| *byte == b'\n').unwrap();
    for sent in [0, head, 100_000] {
        let dir = tempfile::tempdir().unwrap();
        let cache = open_with(dir.path(), 64 << 20, SHORT).await;
        let part = whole[..sent].to_vec();
        let server = Server::start(move |_, _| {
            vec![Step::Send(part.clone()), Step::Wait(Arc::new(Semaphore::new(0)))]
        })
        .await;
        let begun = Instant::now();
        let error = fetch(&cache, &server.image()).await.unwrap_err();
        assert!(matches!(error, ImageError::Stalled { after: SHORT, .. }), "{sent}: {}", chain(&error));
        assert!(error.is_transient() && begun.elapsed() < Duration::from_secs(5));
        eventually("the temporary file is gone", || async { temporary_files(dir.path()) == 0 }).await;
    }
}

/// Lets a slow server go on, so many steps each time: that it takes its time is what it is for.
fn pulse(gate: Arc<Semaphore>, steps: usize) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(SHORT / 3).await;
            gate.add_permits(steps);
        }
    })
}

#[tokio::test]
async fn a_slow_server_that_keeps_sending_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open_with(dir.path(), 64 << 20, SHORT).await;
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let server = Server::start(move |_, _| {
        answer("200 OK", "", &disk(1, 10))
            .chunks(600)
            .flat_map(|part| [Step::Send(part.to_vec()), Step::Wait(Arc::clone(&held))])
            .collect()
    })
    .await;
    let pulse = pulse(gate, 1);
    let begun = Instant::now();
    fetch(&cache, &server.image()).await.unwrap();
    assert!(begun.elapsed() > SHORT, "longer in all than any one pause may be");
    pulse.abort();
}

#[tokio::test]
async fn what_is_cached_or_not_there_needs_no_turn_and_who_waits_for_one_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let origin = Server::start(|_, head| {
        let status = if head.contains("if-none-match") { "304 Not Modified" } else { "200 OK" };
        let body = if head.contains("if-none-match") { Vec::new() } else { disk(1, 10) };
        let none = head.starts_with("GET /none").then(|| answer("404 Not Found", "", b""));
        vec![Step::Send(none.unwrap_or_else(|| answer(status, "etag: \"1\"\r\n", &body)))]
    })
    .await;
    fetch(&cache, &origin.image()).await.unwrap();

    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let slow = Server::start(move |_, _| {
        let whole = answer("200 OK", "", &disk(2, 4096));
        let (first, rest) = whole.split_at(1 << 20);
        vec![Step::Send(first.to_vec()), Step::Wait(Arc::clone(&held)), Step::Send(rest.to_vec())]
    })
    .await;
    let ask = |image: ImageRef| {
        let (sender, told) = watch::channel(None);
        let cache = cache.clone();
        (tokio::spawn(async move { cache.fetch(&image, None, sender).await.map(drop) }), told)
    };
    let slow_ones: Vec<_> = (0..8).map(|number| ask(image(&format!("{}?{number}", slow.url)))).collect();
    eventually("all are at it", || async { temporary_files(dir.path()) == 8 }).await;

    let soon = Duration::from_secs(5);
    let cached = tokio::time::timeout(soon, fetch(&cache, &origin.image())).await;
    cached.expect("what is cached waits for nobody").unwrap();
    let none = tokio::time::timeout(soon, fetch(&cache, &image(&format!("{}/none", origin.url)))).await;
    let error = none.expect("what is not there waits for nobody").unwrap_err();
    assert!(matches!(error, ImageError::Status { status: 404, .. }), "{}", chain(&error));

    let (ninth, mut told) = ask(image(&format!("{}/other", origin.url)));
    let says = told.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert_eq!((says.step.as_str(), says.done), ("image waits for one of 8 turns", 0));
    assert_eq!(temporary_files(dir.path()), 8);
    gate.add_permits(8);
    for (task, _) in slow_ones.into_iter().chain([(ninth, told)]) {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn who_is_slow_waits_behind_others_and_goes_on_from_where_it_was() {
    let heads = slow_and_quick("ETag: \"same\"\r\n", SHORT).await;
    assert!(heads.iter().skip(8).any(|head| head.contains("bytes=")), "{heads:?}");
}

#[tokio::test]
async fn of_those_who_are_slow_and_would_begin_anew_six_go_on_and_the_rest_lets_others_go_first() {
    let heads = slow_and_quick("", 2 * SHORT).await;
    let tries = |number: usize| heads.iter().filter(|head| head.contains(&format!("?{number} "))).count();
    let undisturbed = (0..8).filter(|number| tries(*number) == 1).count();
    assert!((6..8).contains(&undisturbed), "{heads:?}");
}

/// Eight come slowly, and one quickly that wants their turn. Answers how the slow ones were asked for.
async fn slow_and_quick(validator: &'static str, stall: Duration) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let patience = Duration::from_secs(60);
    let cache = open_cache(CacheConfig { patience, ..config(dir.path(), 64 << 20, stall) }).await;
    // Some 160 KiB a second: nobody would mind, if nobody waited.
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let slow = Server::start(move |_, request| {
        let whole = disk(1, 800);
        let from = request.split("bytes=").nth(1).and_then(|text| text.split('-').next()?.parse().ok());
        let from: usize = from.unwrap_or(0);
        let range = format!("Content-Range: bytes {from}-{}/{}\r\n", whole.len() - 1, whole.len());
        let (status, range) = if from > 0 { ("206 Partial Content", &*range) } else { ("200 OK", "") };
        answer(status, &format!("{validator}{range}"), &whole[from..])
            .chunks(16 << 10)
            .flat_map(|part| [Step::Send(part.to_vec()), Step::Wait(Arc::clone(&held))])
            .collect()
    })
    .await;
    let pulse = pulse(gate, 8);
    let slow_ones: Vec<_> = (0..8)
        .map(|number| {
            let (cache, image) = (cache.clone(), image(&format!("{}?{number}", slow.url)));
            tokio::spawn(async move { fetch(&cache, &image).await.map(|_| ()) })
        })
        .collect();
    eventually("all are at it", || async { slow.hits() == 8 }).await;
    let quick = Server::start(|_, _| ok(&disk(2, 10))).await;
    fetch(&cache, &quick.image()).await.unwrap();
    assert!(slow_ones.iter().any(|one| !one.is_finished()), "it did not wait for all of them");
    for one in slow_ones {
        one.await.unwrap().unwrap();
    }
    pulse.abort();
    slow.heads.lock().unwrap().clone()
}

#[tokio::test]
async fn an_image_whose_url_cannot_be_remembered_is_there_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    std::fs::remove_dir(dir.path().join("index")).unwrap();
    let server = Server::start(|_, _| ok(&disk(1, 10))).await;
    fetch(&cache, &server.image()).await.unwrap();
}

#[tokio::test]
async fn a_connection_that_breaks_is_tried_again_and_a_short_body_is_never_taken_for_whole() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let server = Server::start(|number, _| match number {
        0 => vec![],
        1 => vec![Step::Send(answer("200 OK", "", &disk(1, 10))[..3000].to_vec())],
        _ => ok(&disk(1, 10)),
    })
    .await;
    assert_eq!(fetch(&cache, &server.image()).await.unwrap().base.virtual_size, 5120);
    assert_eq!(server.hits(), 3);

    let server =
        Server::start(|_, _| vec![Step::Send(answer("200 OK", "", &disk(2, 10))[..3000].to_vec())]).await;
    let error = fetch(&cache, &server.image()).await.unwrap_err();
    assert!(matches!(error, ImageError::Truncated { expected: Some(5120), .. }), "{error}");
    assert!((3..10).contains(&server.hits()), "{}", server.hits());
    assert_eq!(temporary_files(dir.path()), 0);
}

#[tokio::test]
async fn bodies_without_a_length_are_taken_and_a_broken_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let chunked = |whole: bool| {
        let mut bytes = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        for part in disk(1, 10).chunks(1024) {
            bytes.extend(format!("{:x}\r\n", part.len()).into_bytes());
            bytes.extend(part);
            bytes.extend(b"\r\n");
        }
        if whole {
            bytes.extend(b"0\r\n\r\n");
        }
        vec![Step::Send(bytes)]
    };
    let server = Server::start(move |_, _| chunked(true)).await;
    assert_eq!(fetch(&cache, &server.image()).await.unwrap().base.virtual_size, 5120);
    let server = Server::start(move |_, _| chunked(false)).await;
    let error = fetch(&cache, &server.image()).await.unwrap_err();
    assert!(matches!(error, ImageError::Truncated { expected: None, .. }), "{error}");

    let server = Server::start(|_, _| {
        let mut bytes = b"HTTP/1.0 200 OK\r\n\r\n".to_vec();
        bytes.extend(disk(3, 10));
        vec![Step::Send(bytes)]
    })
    .await;
    assert_eq!(fetch(&cache, &server.image()).await.unwrap().base.virtual_size, 5120);
}

#[tokio::test]
async fn an_error_page_with_status_200_is_no_disk() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    for (body, wanted) in [
        (&b"<!DOCTYPE html><html>please log in</html>"[..], Refusal::Html),
        (b"not found", Refusal::Text),
        (b"", Refusal::Empty),
        (b"BZh91AY&SY and so on", Refusal::Compressed { with: "bzip2" }),
    ] {
        let server = Server::start(move |_, _| ok(body)).await;
        let error = fetch(&cache, &server.image()).await.unwrap_err();
        assert!(matches!(&error, ImageError::Refused { refusal, .. } if *refusal == wanted), "{error:?}");
    }
    assert_eq!(temporary_files(dir.path()), 0);
}

#[tokio::test]
async fn an_image_bigger_than_the_cache_is_refused_with_and_without_a_length() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open_with(dir.path(), 1 << 20, SHORT).await;
    let server = Server::start(|number, _| {
        let head = if number == 0 { "content-length: 2097152\r\n" } else { "" };
        let mut bytes = format!("HTTP/1.1 200 OK\r\n{head}\r\n").into_bytes();
        bytes.extend(disk(1, 4096));
        vec![Step::Send(bytes)]
    })
    .await;
    for _ in 0..2 {
        let error = fetch(&cache, &server.image()).await.unwrap_err();
        assert!(matches!(error, ImageError::TooBig { max_bytes: 1_048_576, .. }), "{error}");
    }
    assert_eq!(temporary_files(dir.path()), 0);
}

#[tokio::test]
async fn a_full_cache_makes_room_and_never_from_what_is_held() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open_with(dir.path(), 3 * 512 * 10, SHORT).await;
    let server = Server::start(|_, head| {
        let seed = head.as_bytes()["GET /".len()];
        ok(&disk(seed, 10))
    })
    .await;
    let at = |path: &str| image(&format!("{}/{path}", server.url));
    let held = fetch(&cache, &at("a")).await.unwrap();
    for path in ["b", "c", "d", "e"] {
        fetch(&cache, &at(path)).await.unwrap();
    }
    assert!(held.base.path.exists());
    assert_eq!(std::fs::read_dir(dir.path().join("base")).unwrap().count(), 3);
    let all = [fetch(&cache, &at("d")).await.unwrap(), fetch(&cache, &at("e")).await.unwrap()];
    let error = fetch(&cache, &at("f")).await.unwrap_err();
    assert!(matches!(error, ImageError::CacheFull { wanted: 5120, .. }) && error.is_transient(), "{error}");
    drop(all);
    fetch(&cache, &at("f")).await.unwrap();
}

#[tokio::test]
async fn a_new_version_takes_the_room_of_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open_with(dir.path(), 512 * 15, SHORT).await;
    let server = Server::start(|number, _| ok(&disk(u8::try_from(number).unwrap(), 10))).await;
    fetch(&cache, &server.image()).await.unwrap();
    fetch(&cache, &server.image()).await.unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("base")).unwrap().count(), 1);
}

#[tokio::test]
async fn a_disk_that_is_too_big_is_refused_before_the_rest_has_come() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path()).await;
    let mut header = vec![0_u8; 1 << 20];
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x02");
    for (at, value) in [(20, 16_u32), (36, 64), (56, 1)] {
        header[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }
    header[24..32].copy_from_slice(&(3_u64 << 30).to_be_bytes());
    let server = Server::start(move |_, _| {
        let mut bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 50000000\r\n\r\n".to_vec();
        bytes.extend(&header);
        vec![Step::Send(bytes), Step::Wait(Arc::new(Semaphore::new(0)))]
    })
    .await;
    let error = cache.fetch(&server.image(), Some(1 << 30), no_progress()).await.unwrap_err();
    assert!(matches!(
        error,
        ImageError::VirtualSize { needed: Some(3_221_225_472), allowed: 1_073_741_824, .. }
    ));
    eventually("the temporary file is gone", || async { temporary_files(dir.path()) == 0 }).await;
}

/// A server that breaks off after `step` bytes of each answer, and can be asked for the rest.
async fn brittle(body: Vec<u8>, step: usize, headers: &'static str) -> Server {
    Server::start(move |_, head| {
        let from = head.split("range: bytes=").nth(1).and_then(|rest| rest.split_once('-'));
        let from: usize = from.map_or(0, |(from, _)| from.parse().unwrap());
        let status = if from == 0 { "200 OK" } else { "206 Partial Content" };
        let range = format!("{headers}content-range: bytes {from}-{}/{}\r\n", body.len() - 1, body.len());
        let whole = answer(status, if from == 0 { headers } else { &range }, &body[from..]);
        let head = whole.len() - (body.len() - from);
        vec![Step::Send(whole[..whole.len().min(head + step)].to_vec())]
    })
    .await
}

#[tokio::test]
async fn a_download_that_breaks_goes_on_where_it_ended_as_often_as_it_gets_ahead() {
    let body = disk(5, 4096);
    for headers in [
        "etag: \"one\"\r\n",
        "last-modified: Wed, 01 Jan 2025 00:00:00 GMT\r\ndate: Thu, 02 Jan 2025 00:00:00 GMT\r\n",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path()).await;
        // More tries than patience would have pauses for, were there no progress.
        let server = brittle(body.clone(), 150_000, headers).await;
        let got = fetch(&cache, &server.image()).await.unwrap();
        assert_eq!(std::fs::read(&got.base.path).unwrap(), body);
        assert_eq!(server.hits(), 14);
        let heads = server.heads.lock().unwrap().clone();
        assert!(heads[1].contains("range: bytes=150000-") && heads[1].contains("if-range: "), "{}", heads[1]);
        assert_eq!(temporary_files(dir.path()), 0);
    }
}

#[tokio::test]
async fn what_changed_meanwhile_is_never_put_together() {
    let dir = tempfile::tempdir().unwrap();
    let patient = CacheConfig { patience: Duration::from_secs(20), ..config(dir.path(), 64 << 20, SHORT) };
    let cache = open_cache(patient).await;
    let tagged = |tag: &str, seed| answer("200 OK", &format!("etag: \"{tag}\"\r\n"), &disk(seed, 400));
    // Changed, and sent whole; weak, so not asked for in parts; a rest of something else, though it was told.
    let server = Server::start(move |number, head| match number {
        0 => vec![Step::Send(tagged("one", 1)[..100_000].to_vec())],
        1 => {
            assert!(head.contains("if-range: \"one\""));
            vec![Step::Send(tagged("two", 2)[..100_000].to_vec())]
        }
        2 => {
            let headers = "etag: \"three\"\r\ncontent-range: bytes 5-204799/204800\r\n";
            vec![Step::Send(answer("206 Partial Content", headers, &disk(3, 400)[5..]))]
        }
        3 => {
            assert!(!head.contains("range:"), "all of it again");
            vec![Step::Send(answer("200 OK", "etag: W/\"four\"\r\n", &disk(4, 400))[..100_000].to_vec())]
        }
        _ => {
            assert!(!head.contains("range:"), "a weak tag does not stand for bytes");
            vec![Step::Send(tagged("five", 5))]
        }
    })
    .await;
    let got = fetch(&cache, &server.image()).await.unwrap();
    assert_eq!(std::fs::read(&got.base.path).unwrap(), disk(5, 400));
    assert_eq!(server.hits(), 5);
}

#[tokio::test]
async fn a_server_that_is_away_for_a_while_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache =
        open_cache(CacheConfig { patience: Duration::from_secs(10), ..config(dir.path(), 64 << 20, SHORT) })
            .await;
    let begun = Instant::now();
    let server = Server::start(move |_, _| match begun.elapsed().as_millis() {
        ..1500 => vec![],
        1500..3000 => vec![Step::Send(answer("503 Service Unavailable", "", b""))],
        _ => ok(&disk(1, 10)),
    })
    .await;
    fetch(&cache, &server.image()).await.unwrap();
}

#[tokio::test]
async fn a_crawl_ends() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open_with(dir.path(), 64 << 20, SHORT).await;
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let server = Server::start(move |_, _| {
        let whole = answer("200 OK", "", &disk(1, 100));
        let steps =
            whole.chunks(10).flat_map(|part| [Step::Send(part.to_vec()), Step::Wait(Arc::clone(&held))]);
        steps.collect()
    })
    .await;
    let pulse = pulse(gate, 1);
    let begun = Instant::now();
    let error = fetch(&cache, &server.image()).await.unwrap_err();
    pulse.abort();
    assert!(matches!(error, ImageError::Crawl { .. } | ImageError::Stalled { .. }), "{}", chain(&error));
    assert!(error.is_transient() && begun.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn nothing_is_fetched_from_this_host_itself_by_address_name_or_redirect() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(|_, _| ok(&disk(1, 10))).await;
    let port = server.url.rsplit(':').next().unwrap().to_owned();
    let closed = CacheConfig { allow_addresses: Vec::new(), ..config(dir.path(), 64 << 20, SHORT) };
    let cache = open_cache(closed).await;
    for host in ["127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "[::1]", "2130706433"] {
        let error = fetch(&cache, &image(&format!("http://{host}:{port}/disk"))).await.unwrap_err();
        assert!(matches!(error, ImageError::Forbidden { .. }), "{host}: {}", chain(&error));
        assert!(error.to_string().contains("images.allow_addresses") && !error.is_transient());
    }
    assert_eq!(server.hits(), 0);
    drop(cache);

    // Where one network is allowed, a redirect leads out of it all the same to nowhere.
    let cache = open(dir.path()).await;
    for to in ["http://169.254.169.254/latest/user-data", "http://[::1]:1/", "http://0.0.0.0:1/"] {
        let hop = answer("302 Found", &format!("location: {to}\r\n"), b"");
        let server = Server::start(move |_, _| vec![Step::Send(hop.clone())]).await;
        let error = fetch(&cache, &server.image()).await.unwrap_err();
        assert!(matches!(error, ImageError::Forbidden { .. }), "{to}: {}", chain(&error));
    }
}
