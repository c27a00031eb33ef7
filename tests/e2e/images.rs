//! Images from web servers, good and bad, up to the guest or its ERROR.

use std::{
    fs,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use ec_image::testing::{Server, Step, answer, ok};
use ec_model::State;
use ec_tests::{Stack, TINY, tiny_image};
use tokio::sync::Semaphore;

#[tokio::test(flavor = "multi_thread")]
async fn one_download_serves_all_who_wait_and_outlives_a_killed_agent() -> Result<()> {
    let mut stack = Stack::start().await?;
    let image = fs::read(tiny_image())?;
    let whole = answer("200 OK", "etag: \"one\"\r\n", &image);
    let stuck = Arc::new(Semaphore::new(0));
    let wait = Arc::clone(&stuck);
    let server = Server::start(move |number, head| {
        if head.contains("if-none-match") {
            return vec![Step::Send(answer("304 Not Modified", "", b""))];
        }
        let (first, rest) = whole.split_at(whole.len() / 2);
        match number {
            0 => vec![Step::Send(first.to_vec()), Step::Wait(Arc::clone(&wait)), Step::Send(rest.to_vec())],
            _ => vec![Step::Send(whole.clone())],
        }
    })
    .await;
    let url = server.image().url;
    stack.start_agent("").await?;
    let mut instances = vec![stack.schedule(&[&url])?];
    for _ in 0..2 {
        instances.push(stack.schedule(&[&url])?);
    }
    for instance in &instances {
        stack
            .until("its status tells the percentage", async || {
                let status = stack.status(*instance).await?;
                Ok(status.and_then(|status| status.progress?.percent()).is_some_and(|percent| percent > 30))
            })
            .await?;
    }
    assert_eq!(server.hits(), 1, "one download for three");
    stack.kill_agent()?;
    stack.start_agent("").await?;
    for instance in &instances {
        stack.until_state(*instance, State::Active).await?;
    }
    stack.until_exactly(&instances).await?;
    let images = stack.directory().join("state/images");
    assert_eq!(fs::read_dir(images.join("tmp"))?.count(), 0, "nothing half is left");
    assert_eq!(fs::read_dir(images.join("base"))?.count(), 1, "and one base is there");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destroy_during_a_download_is_done_without_waiting_for_it() -> Result<()> {
    let mut stack = Stack::start().await?;
    let never = Arc::new(Semaphore::new(0));
    let image = answer("200 OK", "", &fs::read(tiny_image())?);
    let server = Server::start(move |_, _| {
        vec![Step::Send(image[..image.len() / 2].to_vec()), Step::Wait(Arc::clone(&never))]
    })
    .await;
    stack.start_agent("").await?;
    let instance = stack.schedule(&[&server.image().url])?;
    stack.until("the download has begun", async || Ok(server.hits() == 1)).await?;
    assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_good_image_ends_in_an_error_that_says_why() -> Result<()> {
    let mut stack = Stack::start_with("images: {stall_timeout: 3}").await?;
    stack.start_agent("").await?;
    let image = fs::read(tiny_image())?;
    let whole = answer("200 OK", "", &image);
    let truncated = whole[..whole.len() - 1000].to_vec();
    // A backing file's name: its place and length stand at 8 and 16 of the header.
    let mut backed = image.clone();
    backed[8..16].copy_from_slice(&1024_u64.to_be_bytes());
    backed[16..20].copy_from_slice(&7_u32.to_be_bytes());
    let mut strange = image.clone();
    // Incompatible features stand at 72; nobody has given a meaning to this one.
    strange[72] = 0x80;
    let path = stack.directory().join("large.qcow2");
    let made =
        Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("3G").status()?;
    assert!(made.success());
    let large = fs::read(path)?;
    let never = Arc::new(Semaphore::new(0));
    let start = whole[..5000].to_vec();
    let cases: Vec<(&str, Server)> = vec![
        ("404", Server::start(|_, _| vec![Step::Send(answer("404 Not Found", "", b"no"))]).await),
        ("HTML", Server::start(|_, _| ok(b"<!DOCTYPE html><html><body>log in</body></html>")).await),
        ("bytes", Server::start(move |_, _| vec![Step::Send(truncated.clone())]).await),
        ("backing file", Server::start(move |_, _| ok(&backed)).await),
        ("feature", Server::start(move |_, _| ok(&strange)).await),
        ("DISK_GB", Server::start(move |_, _| ok(&large)).await),
        (
            "stalled",
            Server::start(move |_, _| vec![Step::Send(start.clone()), Step::Wait(Arc::clone(&never))]).await,
        ),
    ];
    // Side by side: what may pass is tried again for a minute, and that once for all is enough.
    let begun = Instant::now();
    let asked: Vec<_> = (cases.iter())
        .map(|(word, server)| {
            let mut command = stack.command("eschedule");
            command.args(["--wait", TINY, &server.image().url]).stdout(Stdio::null()).stderr(Stdio::piped());
            Ok((*word, command.spawn()?))
        })
        .collect::<Result<_>>()?;
    for (word, child) in asked {
        let output = child.wait_with_output()?;
        let error = String::from_utf8(output.stderr)?;
        let last = error.lines().last().unwrap_or_default();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(last.contains("is in ERROR") && last.contains(word), "wanted `{word}`: {last}");
    }
    assert!(begun.elapsed() < Duration::from_secs(180), "what does not pass ends");
    let digest = "0".repeat(64);
    let url = format!("file://{}", tiny_image().display());
    let output = stack.eschedule(&["--wait", "--sha256", &digest, TINY, &url])?;
    assert!(String::from_utf8_lossy(&output.stderr).contains(&digest), "{output:?}");
    stack.until_exactly(&[]).await
}
