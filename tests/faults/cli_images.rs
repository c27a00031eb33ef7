//! The catalogue of images at the command line: what is added, found and used by its name; what cannot be, and what a command
//! leaves that was killed while it sent bytes.

use std::{
    fs,
    io::Write,
    process::{Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ec_image::testing::{Server, Step, answer, ok};
use ec_model::{Image, ImageId, ImageStatus, decode, encode};
use ec_tests::{
    TINY,
    control::{Control, notified},
    tiny_image,
};
use serde_json::Value;

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// It is refused in one line with that code, and prints nothing.
fn refused(control: &Control, arguments: &[&str], code: i32, wanted: &str) -> Result<()> {
    let output = control.eschedule(arguments)?;
    let text = error(&output);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{arguments:?}: {text}");
    ensure!(text.contains(wanted) && !text.contains("panicked"), "{arguments:?}: {text}");
    Ok(())
}

/// A store in the test's directory, and where it is.
fn with_store(control: &Control, more: &str) -> Result<std::path::PathBuf> {
    let store = control.directory().join("store");
    control.configure(&format!("image_store: {{url: \"file://{}\"}}\n{more}", store.display()))?;
    Ok(store)
}

fn entries(directory: &std::path::Path) -> Vec<String> {
    let list = fs::read_dir(directory).into_iter().flatten().flatten();
    list.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

async fn images(control: &Control) -> Result<Vec<Image>> {
    let mut images = Vec::new();
    for key in control.store_keys("images/").await? {
        images.push(decode(&control.get(&key).await?.context("gone")?.value)?);
    }
    Ok(images)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_added_of_a_url_used_by_its_name_changed_and_deleted() -> Result<()> {
    let control = Control::start().await?;
    control.node("n1", true, PLENTY).await?;
    assert_eq!(control.done(&["image", "list", "-o", "name"])?, "");
    let digest = "a".repeat(64);
    let url = "https://images.example/web.qcow2";
    let output = control.eschedule(&["image", "add", "any", url])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success() && said.contains("nobody has looked at what is there"), "{said}");
    control.done(&["image", "delete", "any"])?;
    control.done(&["image", "add", "Web", url, "--sha256", &digest.to_uppercase(), "--property", "os=x"])?;
    let show: Value = serde_json::from_str(&control.done(&["image", "show", "web", "-o", "json"])?)?;
    assert_eq!((&show["url"], &show["sha256"]), (&url.into(), &digest.as_str().into()));
    assert_eq!((&show["status"], &show["properties"]["os"]), (&"active".into(), &"x".into()));
    let id = show["id"].as_str().context("no id")?.to_owned();
    for (name, arguments) in
        [("one", ["--image", "WEB"]), ("two", ["--image", &id])].map(|(name, image)| (name, image))
    {
        let (_, instance) =
            notified(&control.done(&[&["run", name, "--query", TINY], &arguments[..]].concat())?)?;
        let image = control.record(instance).await?.context("no record")?.spec.image;
        assert_eq!((image.url.as_str(), image.sha256.as_deref()), (url, Some(digest.as_str())));
        assert_eq!(
            (image.name.as_deref(), image.id.map(|it| it.to_string())),
            (Some("Web"), Some(id.clone()))
        );
    }
    // The classic grammar, a file of `apply`, and what is asked of an instance that is there know it, too.
    let (node, classic) = control.schedule(&[TINY, "web"])?;
    assert_eq!(control.record(classic).await?.context("no record")?.spec.image.url, url);
    let file = control.directory().join("s.yaml");
    fs::write(&file, format!("stack: s\ninstances:\n  db: {{query: \"{TINY}\", image: web}}\n"))?;
    control.done(&["apply", "-f", &file.display().to_string()])?;
    ensure!(
        !control.done(&["apply", "-f", &file.display().to_string()])?.contains("image"),
        "nothing differs"
    );
    control.status(node, classic, ec_model::State::Active, Some("10.0.0.1")).await?;
    control.done(&["rescue", &classic.to_string(), "--image", "web"])?;
    let request = control.request(node, classic).await?.context("no request")?;
    assert_eq!(request.rescue.context("no rescue")?.image.name.as_deref(), Some("Web"));

    let (node, roomy) = control.schedule(&[TINY, "web"])?;
    control.status(node, roomy, ec_model::State::Active, Some("10.0.0.2")).await?;
    // As instances, by the beginning of its uuid; what costs its bytes wants more of that.
    let shown: Value = serde_json::from_str(&control.done(&["image", "show", &id[..8], "-o", "json"])?)?;
    assert_eq!(shown["name"], "Web");
    control.done(&["image", "show", &id[..4].to_uppercase()])?;
    refused(&control, &["image", "delete", &id[..7]], 1, "give 8 characters of that or more")?;
    refused(&control, &["image", "show", "0000-none"], 1, "there is no image `0000-none`")?;

    control.done(&["image", "set", "web", "--name", "site", "--min-disk", "2", "--protected", "--public"])?;
    refused(&control, &["image", "show", "web"], 1, "there is no image `web`")?;
    refused(&control, &["run", "x", "--query", TINY, "--image", "site"], 2, "needs DISK_GB:2")?;
    let small = ["volume", "create", "data", "--size", "1", "--image", "site"];
    refused(&control, &small, 2, "image `site` needs DISK_GB:2, and DISK_GB:1 is asked for")?;
    let (node, plain) = control.schedule(&[TINY])?;
    control.status(node, plain, ec_model::State::Active, None).await?;
    refused(&control, &["rebuild", &plain.to_string(), "site"], 2, "image `site` needs DISK_GB:2")?;
    let rescue = ["rescue", &plain.to_string(), "--image", "site"];
    refused(&control, &rescue, 2, "image `site` needs DISK_GB:2")?;
    control.done(&["image", "set", "site", "--min-ram", "1000"])?;
    let [less, more] = [64, 999].map(|memory| format!("resources=VCPU:1,MEMORY_MB:{memory},DISK_GB:2"));
    refused(&control, &["resize", &roomy.to_string(), &less], 2, "needs MEMORY_MB:1000")?;
    // What it has it had before somebody said that of its image.
    control.done(&["resize", &roomy.to_string(), &more])?;
    refused(&control, &["image", "delete", "site"], 1, "is protected")?;
    control.configure("project: other")?;
    ensure!(control.done(&["image", "list"])?.contains("public"), "others see it");
    assert_eq!(control.done(&["image", "list", "-o", "name"])?, "site\n");
    control.done(&["image", "add", "Site", url])?;
    let names = control.done(&["image", "list", "-o", "name"])?;
    ensure!(names.starts_with("Site\n") && !names.contains("site"), "the name means their own: {names}");
    control.done(&["image", "delete", "site"])?;
    refused(&control, &["image", "set", "site", "--private"], 1, "is of project `default`")?;
    refused(&control, &["image", "delete", "site"], 1, "is of project `default`")?;
    control.configure("")?;
    control.done(&["image", "set", "site", "--unprotected", "--private"])?;
    control.configure("project: other")?;
    refused(&control, &["image", "show", "site"], 1, "there is no image `site`")?;
    control.configure("")?;
    assert_eq!(control.done(&["image", "delete", "site"])?, "DELETED IMAGE site\n");
    for prefix in ["images/", "image-names/", "public-images/"] {
        assert_eq!(control.count(prefix).await?, 0, "{prefix}");
    }
    assert_eq!(
        control.record(classic).await?.context("no record")?.spec.image.url,
        url,
        "nothing hangs on it"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_an_image_is_told_in_a_line_and_leaves_nothing() -> Result<()> {
    let control = Control::start().await?;
    let store = with_store(&control, "")?;
    let file = |name: &str, bytes: &[u8]| -> Result<String> {
        let path = control.directory().join(name);
        fs::write(&path, bytes)?;
        Ok(path.display().to_string())
    };
    let tiny = fs::read(tiny_image())?;
    let mut backed = tiny.clone();
    backed[8..16].copy_from_slice(&1024_u64.to_be_bytes());
    backed[16..20].copy_from_slice(&7_u32.to_be_bytes());
    let packed = zstd::stream::encode_all(&tiny[..], 1)?;
    let page = b"<!doctype html>no such thing".to_vec();
    let good = file("good", &tiny)?;
    let long = "k".repeat(256);
    let cases: Vec<(Vec<&str>, i32, &str)> = vec![
        (vec!["add", "a/b", "https://x/y"], 2, "wanted 1 to 63"),
        (vec!["add", "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab", "https://x/y"], 2, "is a uuid"),
        (vec!["add", "x"], 2, "no distribution that is known"),
        (vec!["add", "debian:1"], 2, "debian:13"),
        (vec!["add", "x", "debian-11"], 2, "(debian:13, debian:12): give one of them"),
        (vec!["add", "x", "ftp://host/x"], 2, "wanted http://"),
        (vec!["add", "x", "https://h/x", "--sha256", "abc"], 2, "64 hexadecimal digits"),
        (vec!["add", "x", "https://h/x", "--sha512", "abc"], 2, "128 hexadecimal digits"),
        (vec!["add", "x", "https://h/x", "--min-disk", "-1"], 2, "'-1'"),
        (vec!["add", "x", "https://h/x", "--property", "novalue"], 2, "KEY=VALUE"),
        (vec!["add", "x", "https://h/x", "--property", &long], 2, "KEY=VALUE"),
        (vec!["add", "x", "/no/such/file"], 2, "FILE /no/such/file cannot be read"),
        (vec!["add", "x", "web"], 2, "instance:web or volume:web"),
        (vec!["add", "x", "/"], 2, "is a directory"),
        (vec!["add", "x", "/dev/zero"], 2, "is a device without an end"),
        (vec!["add", "x", &good, "--sha256", DIGEST], 1, "--sha256 demands"),
        (vec!["show", "none"], 1, "there is no image `none`"),
        (vec!["delete", "none"], 1, "there is no image `none`"),
        (vec!["set", "none", "--public"], 1, "there is no image `none`"),
        (vec!["set", "none"], 2, "nothing to set"),
        (vec!["set", "none", "--public", "--private"], 2, "cannot be used with"),
    ];
    for (arguments, code, wanted) in &cases {
        refused(&control, &[&["image"], &arguments[..]].concat(), *code, wanted)?;
    }
    for (name, bytes, code, wanted) in [
        ("backed", &backed, 2, "backing file"),
        ("page", &page, 2, "HTML"),
        ("empty", &Vec::new(), 2, "it is empty"),
        ("odd", &vec![0; 1000], 2, "multiple of 512"),
        ("packed-backed", &zstd::stream::encode_all(&backed[..], 1)?, 1, "backing file"),
        ("packed-page", &zstd::stream::encode_all(&page[..], 1)?, 1, "HTML"),
        ("torn", &packed[..packed.len() - 9].to_vec(), 1, "not whole"),
        ("bzip", &b"BZh91AY and so on".to_vec(), 2, "compressed with bzip2"),
    ] {
        refused(&control, &["image", "add", name, &file(name, bytes)?], code, wanted)?;
    }
    assert_eq!((images(&control).await?.len(), entries(&store).len()), (0, 0));
    assert_eq!(control.count("image-names/").await?, 0);
    for (more, wanted) in [
        ("image_store: {url: \"http://x\"}", "image_store.url"),
        ("image_store: {url: \"s3://x\", access_key: k}", "image_store.secret_key_file"),
        ("image_mirrors: {arch: \"https://x\"}", "image_mirrors: `arch`"),
        ("image_mirrors: {debian: \"ftp://x\"}", "image_mirrors.debian"),
    ] {
        control.configure(more)?;
        refused(&control, &["image", "list"], 2, wanted)?;
    }
    Ok(())
}

const DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_sent_to_the_store_as_it_is_and_goes_with_its_image() -> Result<()> {
    let control = Control::start().await?;
    let store = with_store(&control, "")?;
    let tiny = fs::read(tiny_image())?;
    let packed = control.directory().join("tiny.zst");
    fs::write(&packed, zstd::stream::encode_all(&tiny[..], 1)?)?;
    control.done(&["image", "add", "plain", &tiny_image().display().to_string()])?;
    control.done(&["image", "add", "packed", &packed.display().to_string()])?;
    let mut piped = control.command(&["image", "add", "piped", "-"]).stdin(Stdio::piped()).spawn()?;
    piped.stdin.take().context("no pipe")?.write_all(&tiny)?;
    assert!(piped.wait()?.success());
    let all = images(&control).await?;
    assert_eq!((all.len(), entries(&store).len()), (3, 3));
    for image in &all {
        let bytes = fs::read(store.join(image.id.to_string()))?;
        assert_eq!(image.url, format!("file://{}/{}", store.display(), image.id));
        assert_eq!((image.status, image.size), (ImageStatus::Active, Some(bytes.len() as u64)));
        assert_eq!(image.disk_format.as_deref(), Some("qcow2"));
        let packing = (image.name == "packed").then_some("zstd");
        assert_eq!(image.compression.as_deref(), packing);
        assert_eq!(bytes, if packing.is_some() { fs::read(&packed)? } else { tiny.clone() });
        let sum = std::process::Command::new("sha256sum").arg(store.join(image.id.to_string())).output()?;
        let sum = String::from_utf8(sum.stdout)?;
        assert_eq!(image.sha256.as_deref(), sum.split(' ').next());
    }
    let one = &all[0];
    assert!(all.iter().all(|image| image.virtual_size == one.virtual_size));
    // Of bytes in the store another image has its own: they go with the image that they are of.
    control.done(&["image", "add", "taken", &one.url])?;
    let all = images(&control).await?;
    let taken = all.iter().find(|image| image.name == "taken").context("it is not there")?;
    assert_eq!(taken.url, format!("file://{}/{}", store.display(), taken.id));
    assert_eq!((&taken.sha256, entries(&store).len()), (&one.sha256, 4));
    for image in &all {
        control.done(&["image", "delete", &image.id.to_string()])?;
    }
    assert_eq!((images(&control).await?.len(), entries(&store).len()), (0, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_store_that_is_not_mounted_no_image_is_deleted() -> Result<()> {
    let control = Control::start().await?;
    let store = with_store(&control, "")?;
    for name in ["a", "b"] {
        control.done(&["image", "add", name, &tiny_image().display().to_string()])?;
    }
    let away = control.directory().join("away");
    fs::rename(&store, &away)?;
    let output = control.eschedule(&["image", "delete", "a", "b"])?;
    let text = error(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.matches("is its file system mounted?").count(), 2, "{text}");
    control.done(&["image", "list"])?;
    assert!(images(&control).await?.iter().all(|image| image.status == ImageStatus::Active));
    fs::rename(&away, &store)?;
    control.done(&["image", "delete", "a"])?;
    fs::rename(&store, &away)?;
    refused(&control, &["image", "delete", "b"], 1, "the image `b` stays, and nothing of it was deleted")?;
    fs::rename(&away, &store)?;
    control.done(&["image", "delete", "b"])?;
    assert_eq!((images(&control).await?.len(), entries(&store).len()), (0, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_at_a_url_is_copied_into_the_store_whole_and_its_origin_asked_once() -> Result<()> {
    let control = Control::start().await?;
    let store = with_store(&control, "")?;
    let tiny = fs::read(tiny_image())?;
    let sum = |program: &str| -> Result<String> {
        let output = Command::new(program).arg(tiny_image()).output()?;
        Ok(String::from_utf8(output.stdout)?.split(' ').next().context("a digest")?.to_owned())
    };
    let (sha256, sha512) = (sum("sha256sum")?, sum("sha512sum")?);
    let published = tiny.clone();
    let server = Server::start(move |_, _| ok(&published)).await;
    let url = server.image().url;
    control.done(&["image", "add", "web", &url, "--copy", "--sha512", &sha512])?;
    assert_eq!(server.hits(), 1);
    let show: Value = serde_json::from_str(&control.done(&["image", "show", "web", "-o", "json"])?)?;
    let id = show["id"].as_str().context("no id")?;
    assert_eq!((&show["status"], &show["stored"]), (&"active".into(), &true.into()), "{show}");
    assert_eq!((&show["sha256"], &show["sha512"]), (&sha256.as_str().into(), &sha512.as_str().into()));
    assert_eq!(show["url"], format!("file://{}", store.join(id).display()), "nodes ask the store");
    assert_eq!(fs::read(store.join(id))?, tiny);
    // Another digest, no disk, nobody there: nothing is left.
    for (arguments, code, wanted) in [
        (vec![&*url, "--sha512", &"0".repeat(128)], 1, "--sha512 demands"),
        (vec![&*url, "--sha256", DIGEST], 1, "--sha256 demands"),
        (vec!["http://127.0.0.1:9/x"], 3, "cannot fetch http://127.0.0.1:9/x"),
        (vec!["file:///no/such/file"], 2, "FILE /no/such/file cannot be read"),
    ] {
        refused(&control, &[&["image", "add", "x", "--copy"], &arguments[..]].concat(), code, wanted)?;
    }
    let absent = Server::start(|_, _| vec![Step::Send(answer("404 Not Found", "", b"no"))]).await;
    let url = absent.image().url;
    refused(&control, &["image", "add", "x", "--copy", &url], 1, "HTTP status 404")?;
    let away =
        Server::start(|_, _| vec![Step::Send(answer("302 Found", "location: file:///etc/passwd\r\n", b""))])
            .await;
    let wanted = "redirects (HTTP status 302) to a URL of file:, and only http://";
    refused(&control, &["image", "add", "x", "--copy", &away.image().url], 1, wanted)?;
    let mut by_proxy = control.command(&["image", "add", "x", "--copy", &url]);
    let failed = by_proxy.env("http_proxy", "http://127.0.0.1:9").output()?;
    let told = String::from_utf8(failed.stderr)?;
    ensure!(told.contains("by the proxy that `http_proxy` names"), "{told}");
    assert_eq!((images(&control).await?.len(), entries(&store).len()), (1, 1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_killed_while_it_sent_bytes_is_taken_away_by_who_comes_across_it() -> Result<()> {
    let control = Control::start().await?;
    let store = with_store(&control, "")?;
    let tiny = fs::read(tiny_image())?;
    let mut sending = control.command(&["image", "add", "web", "-"]).stdin(Stdio::piped()).spawn()?;
    let mut pipe = sending.stdin.take().context("no pipe")?;
    pipe.write_all(&tiny[..tiny.len() / 2])?;
    let part = async || -> Result<ImageId> {
        for _ in 0..200 {
            if let ([image], [_]) = (&images(&control).await?[..], &entries(&store)[..]) {
                return Ok(image.id);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::bail!("nothing was begun")
    };
    let id = part().await?;
    sending.kill()?;
    sending.wait()?;
    drop(pipe);
    // It may be under way for all that anybody knows.
    assert_eq!(control.done(&["image", "list", "-o", "name"])?, "web\n");
    let good = tiny_image().display().to_string();
    refused(&control, &["image", "add", "web", &good], 1, "bytes are on their way")?;
    assert_eq!(entries(&store), [format!("{id}.part")]);
    // Ten minutes later.
    let key = control.keys.image(id);
    let mut image: Image = decode(&control.get(&key).await?.context("no record")?.value)?;
    image.updated_at -= jiff::SignedDuration::from_secs(601);
    control.put(key, encode(&image)).await?;
    assert_eq!(control.done(&["image", "list", "-o", "name"])?, "");
    assert_eq!((images(&control).await?.len(), entries(&store).len()), (0, 0));
    assert_eq!(control.count("image-names/").await?, 0);
    // One that is interrupted, breaks off, or loses its image to somebody else, takes away its own.
    for signal in ["INT", "end", "none"] {
        let mut sending = control
            .command(&["image", "add", "web", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut pipe = sending.stdin.take().context("no pipe")?;
        pipe.write_all(&tiny[..tiny.len() / 2])?;
        part().await?;
        let (code, wanted) = if signal == "INT" {
            nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(i32::try_from(sending.id())?),
                nix::sys::signal::Signal::SIGINT,
            )?;
            // Standard input is still open: it is the signal that ends it.
            while sending.try_wait()?.is_none() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            (130, "interrupted; nothing was added")
        } else if signal == "end" {
            (1, "it is truncated")
        } else {
            control.done(&["image", "delete", "web"])?;
            pipe.write_all(&tiny[tiny.len() / 2..])?;
            // The bytes that came are gone with it.
            (1, "nothing was added")
        };
        drop(pipe);
        let output = sending.wait_with_output()?;
        let text = error(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        ensure!(text.contains(wanted), "{text}");
        assert_eq!((images(&control).await?.len(), entries(&store).len()), (0, 0), "{signal}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_known_distribution_is_added_with_the_digest_that_it_publishes() -> Result<()> {
    let control = Control::start().await?;
    let (sha256, sha512) = ("b".repeat(64), "c".repeat(128));
    let (of_ubuntu, of_debian) = (sha256.clone(), sha512.clone());
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    let server = Server::start(move |_, head| {
        let path = head.split(' ').nth(1).unwrap_or_default();
        match path {
            "/d/bookworm/latest/SHA512SUMS" => ok(format!(
                "{}  debian-12-generic-amd64.qcow2\n{of_debian}  debian-12-genericcloud-amd64.qcow2\n",
                "0".repeat(128)
            )
            .as_bytes()),
            "/u/noble/release/SHA256SUMS" => {
                count.fetch_add(1, Ordering::Relaxed);
                ok(format!("{of_ubuntu} *ubuntu-24.04-server-cloudimg-amd64.img\n").as_bytes())
            }
            "/u/jammy/release/SHA256SUMS" => ok(b"<html>moved</html>"),
            _ => vec![Step::Send(answer("404 Not Found", "", b"no"))],
        }
    })
    .await;
    let url = &server.url;
    control.configure(&format!(
        "image_mirrors: {{debian: \"{url}/d\", ubuntu: \"{url}/u/\", alpine: \"{url}\", fedora: \"http://127.0.0.1:1\"}}"
    ))?;
    control.done(&["image", "add", "debian:12"])?;
    control.done(&["image", "create", "noble", "ubuntu24.04", "--public"])?;
    let all = images(&control).await?;
    let of = |name: &str| all.iter().find(|image| image.name == name).context("not there");
    let debian = of("debian:12")?;
    assert_eq!(debian.url, format!("{url}/d/bookworm/latest/debian-12-genericcloud-amd64.qcow2"));
    assert_eq!((&debian.sha256, debian.sha512.as_deref()), (&None, Some(sha512.as_str())));
    assert_eq!(of("noble")?.sha256.as_deref(), Some(sha256.as_str()));
    // Each that is there goes, whatever the others are.
    control.done(&["image", "add", "noble2", "ubuntu@24.04"])?;
    let deleted = control.eschedule(&["image", "delete", "none", "noble2", "noble2"])?;
    assert_eq!((deleted.status.code(), &deleted.stdout[..]), (Some(1), &b"DELETED IMAGE noble2\n"[..]));
    ensure!(error(&deleted).contains("there is no image `none`"), "{deleted:?}");
    assert!(!control.done(&["image", "list", "-o", "name"])?.contains("noble2"));
    refused(&control, &["image", "add", "ubuntu:22.04"], 1, "tells no SHA-256")?;
    refused(&control, &["image", "add", "alpine:3.20"], 1, "HTTP status 404")?;
    refused(&control, &["image", "add", "fedora"], 3, "cannot read the published digests")?;
    refused(&control, &["image", "add", "x", "ubuntu:24.04", "--sha256", DIGEST], 1, "publishes")?;
    // A machine that believes no authority is told what it lacks.
    let mut bare = control.command(&["image", "add", "cirros:0.6.3"]);
    bare.env("SSL_CERT_FILE", "/nonexistent").env("SSL_CERT_DIR", "/nonexistent");
    let output = bare.output()?;
    let text = error(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(3), 1), "{text}");
    ensure!(
        text.contains("install its package ca-certificates, or name a file of them in SSL_CERT_FILE"),
        "{text}"
    );
    // What nobody added is taken as it is published; by another way to write it, too, and as it was added where it was.
    for (image, code, why) in [
        ("debian", 1, "HTTP status 404; `image_mirrors` of schedule.yaml"),
        ("fedora", 3, "`image_mirrors` of schedule.yaml"),
        ("debian:1", 2, "debian:13, debian:12"),
        ("debia", 1, "debian:13, debian:12"),
    ] {
        refused(&control, &["run", "x", "--query", TINY, "--image", image], code, why)?;
    }
    // By name it goes to who reads SHA-512, and to nobody else.
    let node = control.node("n1", true, PLENTY).await?;
    let alive = control.keys.alive(node);
    let sign = control.get(&alive).await?.context("not alive")?.value;
    let mut old: Value = serde_json::from_slice(&sign)?;
    old["formats"]["request"] = 1.into();
    control.put(alive.clone(), old.to_string()).await?;
    refused(
        &control,
        &["run", "web", "--query", TINY, "--image", "debian:12", "-o", "name"],
        1,
        "no allocations left",
    )?;
    let (on, plain) = notified(&control.done(&["run", "plain", "--query", TINY, "--image", "noble"])?)?;
    control.status(on, plain, ec_model::State::Active, Some("10.0.0.1")).await?;
    refused(&control, &["rebuild", &plain.to_string(), "debian:12"], 1, "does not read our requests")?;
    assert_eq!(control.record(plain).await?.context("no record")?.spec.image.sha512, None);
    let (_, ubuntu) = notified(&control.done(&["run", "newest", "--query", TINY, "--image", "ubuntu"])?)?;
    let image = control.record(ubuntu).await?.context("no record")?.spec.image;
    assert_eq!((image.name.as_deref(), image.id), (Some("ubuntu:24.04"), None));
    assert_eq!(image.url, of("noble")?.url);
    assert_eq!(image.sha256.as_deref(), Some(sha256.as_str()));
    let (_, added) =
        notified(&control.done(&["run", "spelled", "--query", TINY, "--image", "ubuntu@24.04"])?)?;
    assert_eq!(control.record(added).await?.context("no record")?.spec.image.id, None);
    control.put(alive, sign).await?;
    let (node, web) = notified(&control.done(&["run", "web", "--query", TINY, "--image", "debian:12"])?)?;
    let request = control.get(&control.keys.request(node, web)).await?.context("no request")?;
    assert_eq!(serde_json::from_slice::<Value>(&request.value)?["version"], 2);
    // Nearly a distribution's name may have been one's own image's, and what is written is not given for another.
    refused(&control, &["rebuild", &plain.to_string(), "ubuntu-24.04"], 1, "is called `ubuntu:24.04`")?;
    control.done(&["rebuild", &plain.to_string(), "debian12"])?;
    let image = control.record(plain).await?.context("no record")?.spec.image;
    assert_eq!((image.name.as_deref(), image.id.is_some()), (Some("debian:12"), true));
    // A file's instances are all of what was published at one moment, and stay of it where nobody can be asked.
    let file = control.directory().join("shop.yaml");
    let says = format!("stack: shop\ninstances:\n  web: {{count: 3, query: \"{TINY}\", image: ubuntu}}\n");
    fs::write(&file, says)?;
    let apply = ["apply", "-f", &file.display().to_string(), "-o", "name"];
    let asked = || asked.load(Ordering::Relaxed);
    let before = asked();
    control.done(&apply)?;
    assert_eq!(asked(), before + 1);
    control.configure("image_mirrors: {ubuntu: \"http://127.0.0.1:1\"}")?;
    let told = control.eschedule(&[&apply[..], &["--diff"]].concat())?;
    let (text, code) = (error(&told), told.status.code());
    ensure!(code == Some(0) && text.matches("it stays what it was made of").count() == 3, "{told:?}");
    Ok(())
}
