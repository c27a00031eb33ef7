//! What is told of instances as they change, and what is explained.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ec_model::State;
use ec_tests::{TINY, control::Control};
use serde_json::Value;

const PLENTY: &[(&str, u64)] = &[("VCPU", 1000), ("MEMORY_MB", 1 << 20), ("DISK_GB", 1000)];

/// A command that goes on, and its lines as they come.
struct Watcher {
    child: Child,
    lines: Receiver<String>,
}

impl Watcher {
    fn start(control: &Control, arguments: &[&str]) -> Result<Self> {
        let mut child = control.command(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let stdout = child.stdout.take().context("no output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, lines })
    }

    fn line(&self) -> Result<String> {
        self.lines.recv_timeout(Duration::from_secs(20)).context("no line came")
    }

    fn json(&self) -> Result<(String, String, String)> {
        let line: Value = serde_json::from_str(&self.line()?)?;
        let word = |key: &str| line[key].as_str().unwrap_or("-").to_owned();
        Ok((word("what"), word("name"), word("state")))
    }

    fn silent(&self) -> bool {
        self.lines.recv_timeout(Duration::from_millis(700)).is_err()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn told(what: &str, name: &str, state: &str) -> (String, String, String) {
    (what.to_owned(), name.to_owned(), state.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_change_is_told_in_a_line_also_across_an_etcd_that_goes_and_comes() -> Result<()> {
    let mut control = Control::start().await?;
    let node = control.node("host", true, PLENTY).await?;
    let (_, web) = control.schedule(&["--name", "web", "--label", "role=web", TINY])?;
    let (_, db) = control.schedule(&["--name", "db", TINY])?;
    let all = Watcher::start(&control, &["watch", "-o", "json"])?;
    let mut there = vec![all.json()?, all.json()?];
    there.sort();
    assert_eq!(there, [told("there", "db", "SCHEDULED"), told("there", "web", "SCHEDULED")]);
    let one = Watcher::start(&control, &["watch", "web"])?;
    let labelled = Watcher::start(&control, &["watch", "--label", "role=web", "-o", "json"])?;
    assert_eq!(
        one.line()?,
        format!("web  {web}  SCHEDULED  (its agent has yet to take up what is asked for)")
    );
    assert_eq!(labelled.json()?, told("there", "web", "SCHEDULED"));

    control.status(node, db, State::Active, Some("10.0.0.8")).await?;
    assert_eq!(all.json()?, told("changed", "db", "ACTIVE"));
    control.status(node, web, State::Active, Some("10.0.0.7")).await?;
    assert_eq!(all.json()?, told("changed", "web", "ACTIVE"));
    assert!(one.line()?.starts_with(&format!("web  {web}  ACTIVE  10.0.0.7")));
    assert_eq!(labelled.json()?, told("changed", "web", "ACTIVE"));
    // One that comes to have the label, and one that comes.
    control.done(&["set", "db", "--label", "role=web"])?;
    assert_eq!(labelled.json()?, told("new", "db", "ACTIVE"));
    assert_eq!(all.json()?, told("changed", "db", "ACTIVE"));
    control.done(&["--name", "mail", TINY])?;
    let mut seen = all.json()?;
    while seen != told("changed", "mail", "SCHEDULED") && seen != told("new", "mail", "SCHEDULED") {
        ensure!(seen.0 != "gone", "it is being placed: {seen:?}");
        seen = all.json()?;
    }
    // Away and back: what happens afterwards is told, and nothing twice.
    control.etcd.kill();
    control.etcd.restart().await?;
    for key in [control.keys.request(node, web), control.keys.status(node, web), control.keys.instance(web)] {
        control.delete(key).await?;
    }
    let mut last = one.line()?;
    while !last.ends_with("GONE") {
        last = one.line()?;
    }
    assert_eq!(last, format!("web  {web}  GONE"));
    assert!(one.silent(), "nothing else happened");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn states_and_queries_are_explained() -> Result<()> {
    let control = Control::start().await?;
    for state in State::ALL {
        let text = control.done(&["explain", &state.to_string().to_lowercase()])?;
        ensure!(text.starts_with(&format!("{state}: ")) && text.lines().count() == 1, "{text}");
    }
    let json: Value = serde_json::from_str(&control.done(&["-o", "json", "explain", "ERROR"])?)?;
    ensure!(json["state"] == "ERROR" && json["text"].as_str().is_some_and(|text| text.contains("reason")));
    let wrong = control.eschedule(&["explain", "broken"])?;
    let text = String::from_utf8(wrong.stderr)?;
    ensure!(
        wrong.status.code() == Some(1) && text.lines().count() == 1 && text.contains("UNCLAIMED"),
        "{text}"
    );

    let nobody = control.eschedule(&["explain", TINY])?;
    assert_eq!((nobody.status.code(), nobody.stdout.as_slice()), (Some(1), &b"NO ALLOCATIONS LEFT\n"[..]));
    let node = control.node("host", true, PLENTY).await?;
    let text = control.done(&["explain", TINY])?;
    ensure!(text.starts_with(&format!("WOULD GO TO {node} (host)\n")), "{text}");
    assert_eq!(control.done(&["-o", "name", "explain", TINY])?, "host\n");
    assert_eq!(control.count("instances/").await?, 0);

    let (_, web) = control.schedule(&["--name", "web", TINY])?;
    control.status(node, web, State::Active, Some("10.0.0.7")).await?;
    let text = control.done(&["explain", "web"])?;
    ensure!(
        text.starts_with("web is ACTIVE") && text.contains(&format!("\nWOULD GO TO {node} (host)\n")),
        "{text}"
    );
    assert_eq!(control.done(&["-o", "name", "explain", &web.to_string()])?, "host\n");
    let json: Value = serde_json::from_str(&control.done(&["-o", "json", "explain", "web"])?)?;
    ensure!(json["stands"]["state"] == "ACTIVE" && json["stands"]["instance"] == web.to_string(), "{json}");
    assert_eq!(json["node"], node.to_string());
    // Nobody would take another, which is an answer: of its group one is on each node.
    control.done(&["group", "create", "apart", "--policy", "anti-affinity"])?;
    control.done(&["run", "one", "--query", TINY, "--group", "apart"])?;
    let explained = control.eschedule(&["explain", "one"])?;
    let text = String::from_utf8(explained.stdout)?;
    ensure!(
        explained.status.success() && text.contains(", in its group apart:\nNO ALLOCATIONS LEFT\n"),
        "{text}"
    );
    let json: Value = serde_json::from_str(&control.done(&["-o", "json", "explain", "one"])?)?;
    ensure!(json["stands"]["state"] == "SCHEDULED" && json["reasons"]["group"]["name"] == "apart", "{json}");
    // Of one that is to end there is no more to say.
    control.done(&["destroy", "one"])?;
    let gone = control.store_keys("requests/").await?;
    for key in gone {
        let instance = key.rsplit('/').next().unwrap_or_default().to_owned();
        let json: Value = serde_json::from_str(&control.done(&["-o", "json", "explain", &instance])?)?;
        assert_eq!(json["stands"]["instance"], instance);
    }
    Ok(())
}
