//! A cluster in which whoever asks shows a certificate: etcd and the agent's port let in nobody else.

use std::{fs, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use ec_tests::{Stack, Terminal, program};
use reqwest::{Certificate, Client, Identity};

/// What stands under a column's title, which ends where the title does, in the line of this row.
fn cell<'a>(screen: &'a str, title: &str, row: &str) -> Option<&'a str> {
    let end = screen.lines().find_map(|line| Some(line.find(title)? + title.len()))?;
    let line = screen.lines().find(|line| line.starts_with(row))?;
    line.get(..end)?.split_whitespace().next_back()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_seen_and_typed_at_through_certificates_and_by_nobody_without_one() -> Result<()> {
    let mut stack = Stack::start_tls().await?;
    stack.start_agent("").await?;
    stack.schedule(&["--wait", "--name", "web"])?;
    let logged = || {
        let output = stack.eschedule(&["logs", "web"])?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).contains("READY"))
    };
    stack.until("its log is read", async || logged()).await?;

    let mut console = Terminal::start(stack.command("eschedule").args(["console", "web"]))?;
    console.until_seen("Ctrl-] leaves it")?;
    console.types("\recho is $((9 * 9))\r")?;
    console.until_seen("is 81")?;
    console.types("\u{1d}")?;
    console.ends(0)?;

    let mut top = Terminal::start(stack.command("eschedule").args(["top", "--interval", "1"]))?;
    top.until("what it uses is known", |screen| {
        cell(screen, "CPU%", "web").is_some_and(|rate| rate.parse::<f64>().is_ok())
    })?;
    top.types("q")?;
    top.ends(0)?;

    let port = stack.agent_port().context("the agent has a port")?;
    let file = |name: &str| fs::read(stack.file(name));
    let authority = Certificate::from_pem(&file("ca.pem")?)?;
    let known = Identity::from_pem(&[file("client.pem")?, file("client.key")?].concat())?;
    let client =
        || Client::builder().no_proxy().timeout(Duration::from_secs(10)).tls_certs_only([authority.clone()]);
    for path in ["healthz", "readyz", "metrics", "view", "usage"] {
        let url = format!("https://{port}/{path}");
        let answer = client().identity(known.clone()).build()?.get(&url).send().await?;
        ensure!(answer.status() == 200, "{path}: {answer:?}");
        ensure!(
            client().build()?.get(&url).send().await.is_err(),
            "{path} is for those who show a certificate"
        );
    }

    // Without a certificate of one's own.
    let config = fs::read_to_string(stack.file("schedule.yaml"))?;
    let (before, after) = config.split_once(", cert_cert: ").context("it names one")?;
    let (_, after) = after.split_once('}').context("the end of `etcd`")?;
    let nobody = stack.file("nobody.yaml");
    fs::write(&nobody, format!("{before}}}{after}"))?;
    let output = Command::new(program("eschedule")).arg("--config").arg(nobody).arg("list").output()?;
    let why = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(3) && why.lines().count() == 1, "{why}");
    Ok(())
}
