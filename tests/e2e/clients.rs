//! OpenStack's own clients and tests cannot tell our placement from theirs.

use std::{path::PathBuf, process::Command};

use anyhow::{Result, ensure};
use ec_store::testing::EtcdServer;
use ec_tests::{PlacementServer, program};

fn environment() -> PathBuf {
    std::env::var_os("EC_TEST_PLACEMENT")
        .map_or_else(|| PathBuf::from("/var/cache/etcd-compute/placement"), PathBuf::from)
}

fn script(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openstack_command_line_prints_the_same_of_both() -> Result<()> {
    let (ours, theirs) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let etcd = EtcdServer::start(None).await?;
    let theirs = PlacementServer::start_openstack(theirs.path(), "")?;
    let ours = PlacementServer::start(ours.path(), &etcd.endpoint())?;
    theirs.until_it_answers().await?;
    ours.until_it_answers().await?;
    run(Command::new(environment().join("bin/python"))
        .arg(script("osc-compare.py"))
        .args([theirs.endpoint(), ours.endpoint()]))
}

fn api_tests(arguments: &[&str]) -> Result<()> {
    run(Command::new(script("placement-api-tests/run.py")).arg("--venv").arg(environment()).args(arguments))
}

#[test]
fn openstacks_own_api_tests_pass() -> Result<()> {
    api_tests(&["--target=eplacement", "--binary", &program("eplacement").display().to_string()])
}

#[test]
fn the_same_tests_pass_on_openstacks_server_which_proves_their_runner() -> Result<()> {
    api_tests(&["--target=openstack"])
}
