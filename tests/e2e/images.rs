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
use ec_store::{Store, Txn};
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

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_boots_from_an_image_by_name_out_of_the_store_and_wrong_bytes_are_refused() -> Result<()> {
    let mut stack = Stack::start().await?;
    let store = stack.directory().join("store");
    let config = fs::read_to_string(stack.directory().join("schedule.yaml"))?;
    let config = format!("{config}image_store: {{url: \"file://{}\"}}\n", store.display());
    fs::write(stack.directory().join("schedule.yaml"), config)?;
    stack.start_agent("").await?;
    let tiny = fs::read(tiny_image())?;
    let packed = stack.directory().join("tiny.img");
    fs::write(&packed, zstd::stream::encode_all(&tiny[..], 1)?)?;
    let done = |arguments: &[&str]| -> Result<()> {
        let output = stack.eschedule(arguments)?;
        anyhow::ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(())
    };
    done(&["image", "add", "tiny", &packed.display().to_string()])?;
    let instance = stack.schedule(&["tiny"])?;
    stack.until_state(instance, State::Active).await?;
    let shown = stack.eschedule(&["show", &instance.to_string()])?;
    let shown = String::from_utf8(shown.stdout)?;
    assert!(shown.contains("tiny: file://"), "{shown}");
    // The image is gone, and what was made from it is not.
    done(&["image", "delete", "tiny"])?;
    assert_eq!(fs::read_dir(&store)?.count(), 0);
    done(&["reboot", "--hard", "--wait", &instance.to_string()])?;

    // Digests are of the bytes as they are published, of either kind, and what has others is refused.
    let server = Server::start(move |_, _| ok(&tiny)).await;
    let url = server.image().url;
    let (zeros, long) = ("0".repeat(64), "0".repeat(128));
    for (name, option, digest, word) in
        [("one", "--sha256", &zeros, "has SHA-256"), ("two", "--sha512", &long, "has SHA-512")]
    {
        done(&["image", "add", name, &url, option, digest])?;
        let output = stack.eschedule(&["--wait", TINY, name])?;
        let error = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(word) && error.contains("was demanded"), "{error}");
    }
    let sum = Command::new("sha512sum").arg(tiny_image()).output()?;
    let sum = String::from_utf8(sum.stdout)?;
    done(&["image", "add", "three", &url, "--sha512", sum.split(' ').next().unwrap_or_default()])?;
    let hits = server.hits();
    for name in ["third", "fourth"] {
        let output = stack.eschedule(&["--wait", TINY, "three", "--name", name])?;
        assert!(output.status.success(), "{output:?}");
    }
    assert_eq!(server.hits(), hits + 1, "what had the digest is not fetched again");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_boots_from_a_bucket_that_its_node_reads_with_its_own_keys() -> Result<()> {
    let s3 = ec_tests::S3::start().await?;
    let secret = tempfile::NamedTempFile::new()?;
    fs::write(secret.path(), "secret\n")?;
    let store = format!(
        "{{url: \"s3://images/of ours/ä\", endpoint: \"{}\", region: r, access_key: key, secret_key_file: {}}}",
        s3.endpoint(),
        secret.path().display()
    );
    let mut stack = Stack::start_with(&format!("images: {{store: {store}}}")).await?;
    let file = stack.directory().join("schedule.yaml");
    let config = fs::read_to_string(&file)?;
    fs::write(&file, format!("{config}image_store: {store}\n"))?;
    stack.start_agent("").await?;
    let run = |arguments: &[&str]| -> Result<String> {
        let output = stack.eschedule(arguments)?;
        anyhow::ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    // As others see the keys that are there.
    let objects = async || s3.objects("images", "of ours/ä/").await;
    run(&["image", "add", "tiny", &tiny_image().display().to_string()])?;
    // Larger than one part, so that it goes in several.
    let large = stack.directory().join("large.img");
    fs::File::create(&large)?.set_len(40 << 20)?;
    run(&["image", "add", "large", &large.display().to_string()])?;
    assert_eq!(objects().await?, 2);
    let instance = stack.schedule(&["tiny"])?;
    stack.until_state(instance, State::Active).await?;
    // Nothing is read of a bucket but what lies in the store.
    let shown: serde_json::Value = serde_json::from_str(&run(&["image", "show", "large", "-o", "json"])?)?;
    assert!(
        shown["url"].as_str().is_some_and(|url| url.starts_with("s3://images/of%20ours/%C3%A4/")),
        "{shown}"
    );

    // What an older etcd knows nothing of is told, and so is what somebody took away.
    let looks = |what: &str| -> Result<bool> {
        let output = stack.eschedule(&["doctor", "-o", "json"])?;
        let found: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout)?;
        let found = found.iter().filter(|it| it["part"] == "image store").map(|it| it["found"].as_str());
        Ok(found.flatten().any(|found| found.contains(what)))
    };
    assert!(looks("2 images lie at s3://images/of%20ours/%C3%A4")?);
    let url = shown["url"].as_str().unwrap_or_default();
    let id: ec_model::ImageId = url.rsplit('/').next().unwrap_or_default().parse()?;
    let key = ec_model::Keyspace::default().image(id);
    let record = stack.store.get(&key).await?.0.unwrap_or_else(|| unreachable!("it is there"));
    stack.store.txn(Txn::new().delete(&key)).await?;
    assert!(looks(&format!("1 lie at s3://images/of%20ours/%C3%A4, and etcd has no record of them: {id}"))?);
    // As it says, these bytes are taken from there, and what is done to one image is nothing to the other.
    let taken: serde_json::Value =
        serde_json::from_str(&run(&["image", "add", "taken", url, "-o", "json"])?)?;
    assert!(taken["url"] != shown["url"] && taken["sha256"] == shown["sha256"], "{taken}");
    assert_eq!(objects().await?, 3);
    run(&["image", "delete", "taken"])?;
    stack.store.txn(Txn::new().put(&key, record.value)).await?;
    assert!(looks("2 images lie")?);

    // One that is killed while it sends leaves parts, which go with its record.
    let mut sending = stack.command("eschedule");
    let mut sending = sending.args(["image", "add", "half", "-"]).stdin(Stdio::piped()).spawn()?;
    let mut pipe = sending.stdin.take().unwrap_or_else(|| unreachable!("it was asked for"));
    std::io::Write::write_all(&mut pipe, &vec![0; 20 << 20])?;
    stack.until("a part has come", async || Ok(s3.uploads("images").await? == 1)).await?;
    sending.kill()?;
    sending.wait()?;
    run(&["image", "delete", "half"])?;
    assert_eq!((s3.uploads("images").await?, objects().await?), (0, 2));
    for name in ["tiny", "large"] {
        run(&["image", "delete", name])?;
    }
    assert_eq!(objects().await?, 0);
    // A bucket that is not there, and one that does not answer.
    s3.end();
    let output = stack.eschedule(&["image", "add", "late", &tiny_image().display().to_string()])?;
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    Ok(())
}
