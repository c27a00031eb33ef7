//! Placements that are older, guarded by certificates and tokens, or lose answers.

use std::{
    fs,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use ec_store::testing::certificates;
use ec_tests::{TINY, control::Control, program};

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

/// Stands before a placement and speaks only up to a version, as an older release does.
struct Older {
    newest: u32,
    behind: String,
    http: reqwest::Client,
}

async fn older(newest: u32, behind: String) -> Result<String> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let proxy = Arc::new(Older { newest, behind, http: reqwest::Client::new() });
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(pass).with_state(proxy)).await });
    Ok(endpoint)
}

async fn pass(State(proxy): State<Arc<Older>>, request: Request) -> Response {
    match forwarded(&proxy, request).await {
        Ok(response) => response,
        Err(error) => (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response(),
    }
}

async fn forwarded(proxy: &Older, request: Request) -> Result<Response> {
    let (parts, body) = request.into_parts();
    let version = parts.headers.get("OpenStack-API-Version").context("no version")?.to_str()?;
    let minor: u32 = version.strip_prefix("placement 1.").context("another service")?.parse()?;
    if minor > proxy.newest {
        let error = serde_json::json!({"errors": [{"status": 406, "title": "Not Acceptable",
            "detail": format!("Unacceptable version header: 1.{minor}"),
            "max_version": format!("1.{}", proxy.newest), "min_version": "1.0"}]});
        return Ok((StatusCode::NOT_ACCEPTABLE, error.to_string()).into_response());
    }
    let mut headers = parts.headers;
    headers.remove("host");
    let answer = proxy
        .http
        .request(parts.method, format!("{}{}", proxy.behind, parts.uri))
        .headers(headers)
        .body(axum::body::to_bytes(body, 1 << 20).await?)
        .send()
        .await?;
    let status = answer.status();
    let mut response = Response::new(Body::from(answer.bytes().await?));
    *response.status_mut() = status;
    Ok(response)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_placement_serves_down_to_what_a_claim_needs() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    for newest in [38, 36, 33, 30, 28] {
        let endpoint = older(newest, control.placement_server.endpoint()).await?;
        control.configure_for(&format!("{{endpoint: \"{endpoint}\"}}"), "")?;
        let (at, instance) = control.schedule(&[TINY])?;
        assert_eq!(at, node, "1.{newest}");
        ensure!(control.done(&["nodes"])?.contains("host"), "1.{newest}");
        control.done(&["show", &instance.to_string()])?;
        let none = control.eschedule(&["resources=VCPU:100000,MEMORY_MB:1"])?;
        ensure!(String::from_utf8_lossy(&none.stderr).contains("on host: VCPU is short by"), "{none:?}");
    }
    let endpoint = older(27, control.placement_server.endpoint()).await?;
    control.configure_for(&format!("{{endpoint: \"{endpoint}\"}}"), "")?;
    let output = control.eschedule(&[TINY])?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{error}");
    ensure!(error.contains("1.27") && error.contains("1.28") && error.lines().count() == 1, "{error}");
    assert_eq!(control.count("instances/").await?, 5, "the intent of what was refused is gone");
    Ok(())
}

/// One that nobody can use says so, by where it listens; and who speaks to it otherwise than it does is told that, and not their password.
#[tokio::test(flavor = "multi_thread")]
async fn a_placement_that_lets_nobody_in_says_so() -> Result<()> {
    let control = Control::start().await?;
    let log = control.directory().join("tokens.log");
    let _server = Ended(
        Command::new(program("eplacement"))
            .args(["--listen", "127.0.0.1:0", "--auth", "tokens", "--etcd", &control.etcd.endpoint()])
            .args(["--prefix", "/apart"])
            .env("LOG_FORMAT", "json")
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()?,
    );
    let mut told = String::new();
    for _ in 0..100 {
        told = fs::read_to_string(&log)?;
        if told.contains("nobody is let in") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ensure!(told.contains("nobody is let in") && told.contains("hash-token"), "{told}");
    let port = told.split_once("\"listen\":\"127.0.0.1:").and_then(|(_, rest)| rest.split_once('"'));
    let port: u16 = port.context("it says where it listens")?.0.parse()?;
    ensure!(port > 0, "{told}");
    control.configure_for(&format!("{{endpoint: \"https://127.0.0.1:{port}\"}}"), "")?;
    let output = control.eschedule(&["nodes"])?;
    let error = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(3) && error.contains("it speaks plain HTTP"), "{error}");
    control.configure_for(&format!("{{endpoint: \"http://u:hunter2@127.0.0.1:{port}\"}}"), "")?;
    let output = control.eschedule(&["nodes"])?;
    let error = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && !error.contains("hunter2"), "{error}");
    Ok(())
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placement_with_a_private_authority_client_certificates_and_tokens_is_spoken_to() -> Result<()> {
    let control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let directory: PathBuf = control.directory().to_owned();
    certificates(&directory)?;
    fs::write(directory.join("token"), "first\n")?;
    let digest = |token: &str| {
        use sha2::Digest;
        sha2::Sha256::digest(token).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let token = |token: &str| {
        format!("  - {{sha256: {}, name: tester, project: p, roles: [admin]}}\n", digest(token))
    };
    let at = |name: &str| directory.join(name).display().to_string();
    let config = format!(
        "auth: tokens\ntls: {{certificate: {}, key: {}, client_ca: {}}}\ntokens:\n{}{}",
        at("server.pem"),
        at("server.key"),
        at("ca.pem"),
        token("first"),
        token("second"),
    );
    fs::write(directory.join("eplacement.yaml"), config)?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let log = fs::File::create(directory.join("tls.log"))?;
    let _server = Ended(
        Command::new(program("eplacement"))
            .args(["--listen", &format!("127.0.0.1:{port}"), "--etcd", &control.etcd.endpoint()])
            .args(["--config", &at("eplacement.yaml")])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?,
    );
    let section = |more: &str| format!("{{endpoint: \"https://127.0.0.1:{port}\", {more}}}");
    let all = format!(
        "token_file: token, ca_cert: {}, cert_cert: {}, cert_key: {}",
        at("ca.pem"),
        at("client.pem"),
        at("client.key")
    )
    .replace("token_file: token", &format!("token_file: {}", at("token")));
    control.configure_for(&section(&all), "")?;
    let mut last = None;
    for _ in 0..100 {
        let output = control.eschedule(&[TINY])?;
        if output.status.success() {
            last = None;
            break;
        }
        last = Some(output);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ensure!(last.is_none(), "{last:?}\n{}", fs::read_to_string(directory.join("tls.log"))?);
    assert_eq!(control.placement.provider_allocations(node).await?.len(), 1);
    fs::write(directory.join("token"), "second")?;
    control.schedule(&[TINY])?;
    fs::write(directory.join("token"), "wrong")?;
    let output = control.eschedule(&[TINY])?;
    let error = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && error.contains("placement.token_file"), "{error}");
    // Without our certificate, and without the authority.
    let bare = section(&format!("token: first, ca_cert: {}", at("ca.pem")));
    for section in [bare, section("token: first")] {
        control.configure_for(&section, "")?;
        let output = control.eschedule(&[TINY])?;
        let error = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(3) && error.to_lowercase().contains("certificate"), "{error}");
    }
    assert_eq!(control.count("instances/").await?, 2, "nothing stays of what was refused");
    // The server's own tools come in as the other programs do.
    fs::write(directory.join("token"), "first\n")?;
    let url = format!("https://127.0.0.1:{port}");
    let tls = ["--ca-cert", &at("ca.pem"), "--cert", &at("client.pem"), "--cert-key", &at("client.key")];
    let tool = |words: &[&str]| Command::new(program("eplacement")).args(words).output();
    let healthy = tool(&[&["health", "--url", &url], &tls[..]].concat())?;
    ensure!(healthy.status.success(), "{healthy:?}");
    let stranger = tool(&["health", "--url", &url, "--ca-cert", &at("ca.pem")])?;
    let error = String::from_utf8_lossy(&stranger.stderr).to_lowercase();
    ensure!(stranger.status.code() == Some(3) && error.contains("certificate"), "{error}");
    let moved = ["--etcd", &control.etcd.endpoint(), "--prefix", "/moved", "import", "--from", &url];
    let moved = tool(&[&moved, &tls[..], &["--token-file", &at("token")]].concat())?;
    ensure!(moved.status.success(), "{moved:?}");
    let checked = tool(&["check", "--etcd", &control.etcd.endpoint(), "--prefix", "/moved"])?;
    ensure!(String::from_utf8_lossy(&checked.stderr).contains("2 consumers fit together"), "{checked:?}");
    // A token in the environment is for who names none, and refuses nobody.
    let told = |token: &str, words: &[&str]| {
        Command::new(program("eplacement")).env("EPLACEMENT_SOURCE_TOKEN", token).args(words).output()
    };
    let (etcd, token) = (control.etcd.endpoint(), at("token"));
    let (own, document) = (["--etcd", &etcd, "--prefix", "/moved"], at("moved.json"));
    let from = [&["export", "--from", &url], &tls[..]].concat();
    let by_file = [&from[..], &["--token-file", &token]].concat();
    let ours = [&own[..], &["export", &document]].concat();
    let again = ["--etcd", &etcd, "--prefix", "/again", "import", &document];
    for (token, words, code) in [
        ("first", &from[..], 0),
        ("wrong", &from, 1),
        ("", &from, 1),
        ("wrong", &by_file, 0),
        ("wrong", &ours, 0),
        ("wrong", &again, 0),
    ] {
        let output = told(token, words)?;
        ensure!(output.status.code() == Some(code), "{token:?} {words:?}: {output:?}");
    }
    let misread = tool(&["health", "--url", &url, "--ca-cert", &at("token")])?;
    ensure!(misread.status.code() == Some(2), "{misread:?}");
    let misplaced = tool(&["--listen", "127.0.0.1:1", "check"])?;
    ensure!(misplaced.status.code() == Some(2), "{misplaced:?}");
    // Everybody may read the key: that is told where an operator looks.
    use std::os::unix::fs::PermissionsExt;
    fs::write(directory.join("token"), "first")?;
    fs::set_permissions(directory.join("token"), fs::Permissions::from_mode(0o644))?;
    control.configure_for(&section(&all), "")?;
    let output = control.eschedule(&["nodes"])?;
    ensure!(String::from_utf8_lossy(&output.stderr).contains("chmod o-r"), "{output:?}");
    Ok(())
}
