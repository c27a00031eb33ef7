//! That every command of docs/tutorial.md does what its reader expects: it ends well, or does not where `!` says so.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use ec_tests::Stack;

/// The page's blocks of commands, in order, each with the heading above it.
fn blocks(page: &str) -> Vec<(String, Vec<String>)> {
    let (mut heading, mut blocks, mut inside) = (String::new(), Vec::new(), false);
    for line in page.lines() {
        match line {
            "```sh" => {
                inside = true;
                blocks.push((heading.clone(), Vec::new()));
            }
            "```" => inside = false,
            line if inside => blocks.last_mut().into_iter().for_each(|block| block.1.push(line.to_owned())),
            line => {
                if let Some(text) = line.strip_prefix("## ") {
                    text.clone_into(&mut heading);
                }
            }
        }
    }
    blocks
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_of_the_tutorial_does_what_it_says() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let eschedule = stack.command("eschedule");
    let programs = Path::new(eschedule.get_program()).parent().context("no directory")?.to_owned();
    // What ssh remembers of a guest is the test's own.
    let own = stack.directory().join("own");
    fs::create_dir(&own)?;
    let known = own.join("known").display().to_string();
    let ssh = format!("#!/bin/sh\nexec /usr/bin/ssh -o UserKnownHostsFile={known} \"$@\"\n");
    fs::write(own.join("ssh"), ssh)?;
    fs::set_permissions(own.join("ssh"), fs::Permissions::from_mode(0o755))?;
    let mut path = vec![own, programs];
    path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let page = include_str!("../../docs/tutorial.md");
    let blocks = blocks(page);
    ensure!(blocks.len() > 15, "{} blocks", blocks.len());
    for (heading, commands) in blocks {
        for command in commands {
            let output = Command::new("bash")
                .args(["-c", &command])
                .current_dir(stack.directory())
                .env("PATH", env::join_paths(&path)?)
                .env("ESCHEDULE_CONFIG", stack.directory().join("schedule.yaml"))
                .env("ETCDCTL_API", "3")
                .env("ETCDCTL_ENDPOINTS", stack.etcd.endpoint())
                .env("HOME", stack.directory())
                .stdin(Stdio::null())
                .output()?;
            ensure!(output.status.success(), "{heading}: `{command}`: {output:?}");
            // Whom `!` lets fail says why, in one line.
            if command.starts_with('!') {
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                ensure!(text.lines().count() == 1 && text.starts_with("eschedule: "), "`{command}`: {text}");
            }
        }
    }
    stack.until_exactly(&[]).await
}
