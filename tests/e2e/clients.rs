//! OpenStack's own clients and tests cannot tell our placement from theirs.

use std::{path::PathBuf, process::Command};

use anyhow::{Result, ensure};
use ec_store::testing::EtcdServer;
use ec_tests::{PlacementServer, program};
use tempfile::TempDir;

fn environment() -> PathBuf {
    std::env::var_os("EC_TEST_PLACEMENT")
        .map_or_else(|| PathBuf::from("/var/cache/etcd-compute/placement"), PathBuf::from)
}

fn script(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name)
}

#[expect(clippy::print_stderr, reason = "what a client said is worth seeing where it fails")]
fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    eprintln!("{text}");
    ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// OpenStack's server and ours, both empty.
struct Both {
    theirs: PlacementServer,
    ours: PlacementServer,
    _etcd: EtcdServer,
    directories: [TempDir; 2],
}

impl Both {
    async fn start() -> Result<Self> {
        let directories = [tempfile::tempdir()?, tempfile::tempdir()?];
        let etcd = EtcdServer::start(None).await?;
        let theirs = PlacementServer::start_openstack(directories[0].path(), "")?;
        let ours = PlacementServer::start(directories[1].path(), &etcd.endpoint())?;
        theirs.until_it_answers().await?;
        ours.until_it_answers().await?;
        Ok(Self { theirs, ours, _etcd: etcd, directories })
    }

    /// Runs a script that compares them.
    fn compare(&self, name: &str, arguments: &[&str]) -> Result<()> {
        run(Command::new(environment().join("bin/python"))
            .arg(script(name))
            .args([self.theirs.endpoint(), self.ours.endpoint()])
            .args(arguments)
            .current_dir(self.directories[0].path()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openstack_command_line_prints_the_same_of_both() -> Result<()> {
    Both::start().await?.compare("osc-compare.py", &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn random_worlds_writes_and_queries_are_answered_alike_by_both() -> Result<()> {
    Both::start().await?.compare("placement-diff.py", &["--rounds", "8"])
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_once_answered_differently_is_answered_alike() -> Result<()> {
    let both = Both::start().await?;
    let mut files: Vec<_> = std::fs::read_dir(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("replays"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.sort();
    ensure!(!files.is_empty(), "no replays");
    for file in files {
        both.compare("placement-diff.py", &["--replay", &file.display().to_string()])?;
    }
    Ok(())
}

/// That they pass on OpenStack's own server, too, is looked at by `make fuzz-placement`: it takes minutes.
#[test]
fn openstacks_own_api_tests_pass() -> Result<()> {
    run(Command::new(script("placement-api-tests/run.py"))
        .args(["--target=eplacement", "--binary"])
        .arg(program("eplacement"))
        .arg("--venv")
        .arg(environment()))
}
