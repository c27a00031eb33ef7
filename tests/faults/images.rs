//! Where images come from: what may be read and asked in whose name, and what passes.

use std::{
    fs::{self, File},
    net::{TcpListener, TcpStream},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_image::testing::{Server, Step, answer, ok};
use ec_model::State;
use ec_store::testing::certificates;
use ec_tests::{Stack, TINY, tiny_image};

/// The last line of what a scheduling that is to fail says.
fn refusal(stack: &Stack, arguments: &[&str]) -> Result<String> {
    let output = stack.eschedule(&[&["--wait", TINY], arguments].concat())?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{error}");
    Ok(error.lines().last().unwrap_or_default().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_the_host_itself_is_given_out_as_an_image() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let given = directory.path().join("given");
    fs::create_dir(&given)?;
    let images = format!("images: {{local: [{}], allow_addresses: []}}", given.display());
    let mut stack = Stack::start_with(&images).await?;
    stack.start_agent("").await?;
    // As etcd's database looks: whole sectors of bytes that are no text.
    let secret = stack.directory().join("secret");
    File::create(&secret)?.set_len(1 << 20)?;
    symlink(&secret, given.join("link"))?;
    assert!(Command::new("mkfifo").arg(given.join("pipe")).status()?.success());
    let server = Server::start(|_, _| ok(&vec![0; 4096])).await;
    let port = server.url.rsplit(':').next().unwrap_or_default().to_owned();
    for (url, word) in [
        (format!("file://{}", secret.display()), "images.local"),
        (format!("file://{}/..%2f..{}", given.display(), secret.display()), "images"),
        (format!("file://{}/link", given.display()), "symbolic link"),
        (format!("file://{}/pipe", given.display()), "not a regular file"),
        (format!("http://127.0.0.1:{port}/disk"), "images.allow_addresses"),
        (format!("http://localhost:{port}/disk"), "images.allow_addresses"),
        (format!("http://[::ffff:127.0.0.1]:{port}/disk"), "images.allow_addresses"),
        ("http://169.254.169.254/latest/user-data".to_owned(), "images.allow_addresses"),
    ] {
        let said = refusal(&stack, &[&url])?;
        assert!(said.contains("is in ERROR") && said.contains(word), "{url}: {said}");
    }
    assert_eq!(server.hits(), 0, "nobody was asked");
    assert_eq!(fs::read_dir(stack.directory().join("state/images/base"))?.count(), 0);
    stack.until_exactly(&[]).await?;

    // And what lies where it may is given.
    fs::copy(tiny_image(), given.join("tiny.qcow2"))?;
    let instance = stack.schedule(&[&format!("file://{}/tiny.qcow2", given.display())])?;
    stack.until_state(instance, State::Active).await?;
    let mode =
        |path: &str| Ok::<_, anyhow::Error>(fs::metadata(stack.directory().join(path))?.permissions().mode());
    assert_eq!(mode("state/images/base")? & 0o777, 0o711, "names are not for all to read");
    assert_eq!(mode("state/images/tmp")? & 0o777, 0o700);
    Ok(())
}

/// `openssl s_server`, which gives out files as they are, heads and all.
struct SecureServer {
    process: Child,
    url: String,
}

impl SecureServer {
    fn start(directory: &Path) -> Result<Self> {
        certificates(directory)?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let process = Command::new("openssl")
            .args(["s_server", "-HTTP", "-quiet", "-cert", "server.pem", "-key", "server.key"])
            .args(["-accept", &address.to_string()])
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let server = Self { process, url: format!("https://{address}") };
        let deadline = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(address).is_err() {
            ensure!(Instant::now() < deadline, "openssl does not listen");
            thread::sleep(Duration::from_millis(50));
        }
        Ok(server)
    }
}

impl Drop for SecureServer {
    fn drop(&mut self) {
        // It has ended already where the test failed by that.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_asked_for_in_private_is_not_fetched_in_public() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let image = fs::read(tiny_image())?;
    fs::write(directory.path().join("kept"), answer("200 OK", "", &image))?;
    let public = Server::start(move |_, _| ok(&image)).await;
    let location = format!("location: {}/disk\r\n", public.url);
    fs::write(directory.path().join("moved"), answer("302 Found", &location, b""))?;
    let private = SecureServer::start(directory.path())?;
    let mut stack = Stack::start().await?;
    let authority = directory.path().join("ca.pem").display().to_string();
    stack.agent_env = vec![("SSL_CERT_FILE", authority)];
    stack.start_agent("").await?;

    let said = refusal(&stack, &[&format!("{}/moved", private.url)])?;
    assert!(said.contains("redirects from https:// to http://"), "{said}");
    assert_eq!(public.hits(), 0, "nobody was asked");
    stack.until_exactly(&[]).await?;
    let instance = stack.schedule(&[&format!("{}/kept", private.url)])?;
    stack.until_state(instance, State::Active).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_digest_gives_nobody_an_image_that_another_url_brought() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let image = fs::read(tiny_image())?;
    let server = Server::start(move |_, head| match head.contains("GET /private ") {
        true => ok(&image),
        false => vec![Step::Send(answer("404 Not Found", "", b"no"))],
    })
    .await;
    let first = stack.schedule(&[&format!("{}/private", server.url)])?;
    stack.until_state(first, State::Active).await?;
    let base = fs::read_dir(stack.directory().join("state/images/base"))?.next().context("no base")??.path();
    let digest = base.file_stem().context("no name")?.to_string_lossy().into_owned();

    let said = refusal(&stack, &["--sha256", &digest, &format!("{}/guess", server.url)])?;
    assert!(said.contains("404"), "{said}");
    // Who knows where it is gets it without the origin.
    let hits = server.hits();
    let second = stack.schedule(&["--sha256", &digest, &format!("{}/private", server.url)])?;
    stack.until_state(second, State::Active).await?;
    assert_eq!(server.hits(), hits);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_agents_do_not_share_an_image_directory() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let text = fs::read_to_string(stack.directory().join("compute.yaml"))?;
    let state = stack.directory().join("state");
    let other = (text.replace(&stack.node.to_string(), "8d1de2f2-4c1c-4f9a-8a0e-2f4e1bd1a5a1"))
        .replace(
            &format!("state_dir: {}", state.display()),
            &format!("state_dir: {}", stack.directory().join("other").display()),
        )
        .replace("images: {", &format!("images: {{directory: {}, ", state.join("images").display()));
    let config = stack.directory().join("other.yaml");
    fs::write(&config, other)?;
    let mut second = Command::new(ec_tests::program("ecompute"));
    let output = second.arg("--config").arg(&config).stdin(Stdio::null()).output()?;
    let error = String::from_utf8(output.stderr)?;
    assert!(!output.status.success());
    assert!(error.lines().last().is_some_and(|line| line.contains("images.directory")), "{error}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_breaks_off_and_is_away_for_half_a_minute_ends_no_instance() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let image = fs::read(tiny_image())?;
    let begun = Instant::now();
    let server = Server::start(move |number, head| {
        let tag = "etag: \"one\"\r\n";
        if number == 0 {
            let whole = answer("200 OK", tag, &image);
            return vec![Step::Send(whole[..whole.len() / 2].to_vec())];
        }
        if begun.elapsed() < Duration::from_secs(32) {
            return vec![];
        }
        let from =
            head.split("range: bytes=").nth(1).and_then(|rest| rest.split('-').next()?.parse::<usize>().ok());
        match from {
            Some(from) => {
                let range =
                    format!("{tag}content-range: bytes {from}-{}/{}\r\n", image.len() - 1, image.len());
                vec![Step::Send(answer("206 Partial Content", &range, &image[from..]))]
            }
            None => vec![Step::Send(answer("200 OK", tag, &image))],
        }
    })
    .await;
    let instance = stack.schedule(&[&server.image().url])?;
    stack
        .until("what it waits for is told", async || {
            let status = stack.status(instance).await?;
            Ok(status.and_then(|status| status.reason).is_some_and(|reason| reason.contains("trying again")))
        })
        .await?;
    stack.until_state(instance, State::Active).await?;
    let heads = server.heads.lock().map_err(|_| anyhow::anyhow!("the server broke"))?;
    assert!(heads[1].contains("range: bytes="), "it goes on where it ended: {}", heads[1]);
    Ok(())
}
