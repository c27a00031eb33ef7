//! The main job on real parts, and what happens when they are killed in the middle of it.

use anyhow::Result;
use ec_model::State;
use ec_tests::Stack;

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_built_tells_its_ip_and_is_destroyed_without_a_trace() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let instance = stack.schedule(&["--wait", "--name", "web"])?;
    let ip = stack.eschedule(&["web"])?;
    assert!(ip.status.success(), "{ip:?}");
    let status = stack.until_state(instance, State::Active).await?;
    assert_eq!(String::from_utf8(ip.stdout)?.trim(), status.ip.unwrap().to_string());
    stack.until_exactly(&[instance]).await?;

    assert!(stack.eschedule(&["destroy", "--wait", "web"])?.status.success());
    stack.until_exactly(&[]).await?;
    let again = stack.eschedule(&["destroy", &instance.to_string()])?;
    assert_eq!(again.status.code(), Some(1), "{again:?}");

    let full = stack.eschedule(&["resources=VCPU:1000,MEMORY_MB:128"])?;
    assert_eq!((full.status.code(), full.stdout.as_slice()), (Some(1), b"NO ALLOCATIONS LEFT\n".as_slice()));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_killed_between_any_two_steps_loses_nothing_and_builds_once() -> Result<()> {
    let mut stack = Stack::start().await?;
    for point in ["before-overlay", "before-define", "before-start", "before-note-start"] {
        stack.start_agent(&format!("{point}=pause")).await?;
        let instance = stack.schedule(&[])?;
        let wanted = if point == "before-overlay" { State::Preparing } else { State::Starting };
        stack.until_state(instance, wanted).await?;
        stack.kill_agent()?;
        stack.start_agent("").await?;
        stack.until_state(instance, State::Active).await?;
        stack.until_exactly(&[instance]).await?;
        stack.kill_agent()?;

        stack.start_agent("before-release=pause").await?;
        assert!(stack.eschedule(&["destroy", &instance.to_string()])?.status.success());
        stack.until_state(instance, State::Destroying).await?;
        stack.kill_agent()?;
        stack.start_agent("").await?;
        stack.until_exactly(&[]).await?;
        stack.kill_agent()?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_outlive_agent_etcd_and_libvirtd_and_nothing_asked_meanwhile_is_lost() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let first = stack.schedule(&[])?;
    stack.until_state(first, State::Active).await?;

    stack.etcd.kill();
    stack.etcd.restart().await?;
    let second = stack.schedule(&[])?;
    stack.until_state(second, State::Active).await?;

    stack.libvirt.kill_daemon();
    let third = stack.schedule(&[])?;
    stack.libvirt.start_daemon();
    stack.until_state(third, State::Active).await?;

    assert_eq!(stack.end_agent()?, Some(0));
    let locked = stack.placement.inventory(stack.node).await?;
    assert_eq!(locked["VCPU"].reserved, locked["VCPU"].total);
    stack.start_agent("").await?;
    let free = stack.placement.inventory(stack.node).await?;
    assert_eq!(free["VCPU"].reserved, 0);
    stack.until_exactly(&[first, second, third]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_guests_asked_for_at_once_all_get_their_addresses() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let mut instances = Vec::new();
    for _ in 0..10 {
        instances.push(stack.schedule(&[])?);
    }
    for instance in &instances {
        stack.until_state(*instance, State::Active).await?;
    }
    stack.until_exactly(&instances).await?;
    for instance in &instances {
        assert!(stack.eschedule(&["destroy", &instance.to_string()])?.status.success());
    }
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_not_there_ends_in_error_with_the_reason_and_without_a_claim() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let output =
        stack.eschedule(&["--wait", "resources=VCPU:1,MEMORY_MB:128", "file:///nonexistent.qcow2"])?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("ERROR") && error.contains("/nonexistent.qcow2"), "{error}");
    stack.until_exactly(&[]).await
}
