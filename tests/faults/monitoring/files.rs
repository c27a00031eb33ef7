//! What is shipped for Prometheus and Grafana, as files.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// What is shipped for Prometheus and Grafana.
pub(super) fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/monitoring").join(name)
}

/// What tells of each number and each alert.
pub(super) fn manual() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/monitoring.md")
}

/// The example for a cluster of which all is on this host, with its certificates in this directory.
pub(crate) fn example_on_one_host(certificates: &Path) -> Result<String> {
    let rules = format!("{}/", shipped("").display());
    Ok(fs::read_to_string(shipped("prometheus.yml"))?
        .replace("/usr/share/etcd-compute/monitoring/", &rules)
        .replace("/etc/ecompute", &certificates.display().to_string())
        .replace("15s", "1s")
        .replace("10.0.0.1:", "127.0.0.1:")
        .replace("\"10.0.0.2:18090\", \"10.0.0.3:18090\"", "\"127.0.0.1:18090\""))
}

/// The metrics that an expression names.
pub(super) fn names(expression: &str) -> BTreeSet<String> {
    const WORDS: [&str; 10] =
        ["and", "or", "unless", "by", "without", "on", "ignoring", "offset", "bool", "group_left"];
    let mut found = BTreeSet::new();
    let (mut rest, mut grouped) = (expression, false);
    while let Some(first) = rest.chars().next() {
        // No value of ours holds a bracket.
        if let Some(close) =
            [('{', "}"), ('[', "]")].iter().find_map(|(open, close)| (*open == first).then_some(close))
        {
            rest = rest.split_once(close).map_or("", |(_, after)| after);
        } else if first == '(' && grouped {
            rest = rest.split_once(')').map_or("", |(_, after)| after);
            grouped = false;
        } else if first.is_ascii_alphabetic() {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            let called = ["(", "by", "without"].iter().any(|next| after.trim_start().starts_with(next));
            grouped = ["by", "without", "on", "ignoring"].contains(&word);
            if !called && !WORDS.contains(&word) {
                found.insert(word.to_owned());
            }
            rest = after;
        } else if first.is_ascii_digit() {
            rest = rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '.');
        } else {
            rest = &rest[first.len_utf8()..];
        }
    }
    found
}

/// Every expression of the dashboard.
pub(super) fn charted() -> Result<Vec<String>> {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(shipped("dashboard.json"))?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let expressions: Vec<_> =
        targets.filter_map(|target| target["expr"].as_str()).map(str::to_owned).collect();
    ensure!(expressions.len() > 40, "{expressions:?}");
    Ok(expressions)
}

/// Runs it with this input; it must be content.
pub(super) fn promtool(arguments: &[&str], input: &str) -> Result<()> {
    let mut child = Command::new("promtool")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("scripts/install-deps.sh test brings promtool")?;
    child.stdin.take().context("no input")?.write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "promtool {arguments:?}: {said}");
    Ok(())
}

#[test]
fn the_files_are_what_prometheus_takes_and_each_rule_has_its_test() -> Result<()> {
    let (rules, tests) = (shipped("alerts.yml"), shipped("alerts_test.yml"));
    promtool(&["check", "rules", &rules.display().to_string()], "")?;
    promtool(&["test", "rules", &tests.display().to_string()], "")?;
    let config = fs::read_to_string(shipped("prometheus.yml"))?;
    let (directory, place) = (tempfile::tempdir()?, "/usr/share/etcd-compute/monitoring/alerts.yml");
    let file = directory.path().join("prometheus.yml");
    fs::write(&file, config.replace(place, &rules.display().to_string()))?;
    promtool(&["check", "config", "--syntax-only", &file.display().to_string()], "")?;

    let (rules, tests) = (fs::read_to_string(rules)?, fs::read_to_string(tests)?);
    let manual = fs::read_to_string(manual())?;
    let alerts: Vec<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    ensure!(alerts.len() > 20, "{alerts:?}");
    for alert in alerts {
        let fires = format!("alertname: {alert}\n        exp_alerts:\n          - exp_labels");
        ensure!(tests.contains(&fires), "{alert} has no test in which it fires");
        ensure!(manual.contains(&format!("| `{alert}` |")), "docs/monitoring.md does not tell of {alert}");
    }
    let jobs = rules.split("job=\"").skip(1).filter_map(|rest| rest.split_once('"'));
    for (job, _) in jobs {
        ensure!(config.contains(&format!("job_name: {job}\n")), "prometheus.yml has no job {job}");
    }
    Ok(())
}

#[test]
fn the_names_in_an_expression_are_found() {
    for (expression, wanted) in [
        ("up{job=\"a_b\"} == 0", &["up"][..]),
        ("time() - a_b{x=\"y\"} > 3 * 86400 or c", &["a_b", "c"]),
        ("sum by (le, x) (rate(a_bucket{x=~\"y|z\"}[5m])) / sum without(x) (b)", &["a_bucket", "b"]),
        ("histogram_quantile(0.99, sum by (le) (rate(a[$__rate_interval])))", &["a"]),
        ("1e9 * 5m", &[]),
    ] {
        assert_eq!(names(expression), wanted.iter().map(|name| (*name).to_owned()).collect(), "{expression}");
    }
}
