//! An agent, its guests and its placement while etcd is restored from an older backup.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, State};
use ec_store::{Store, Txn};
use ec_tests::{Stack, TINY};

/// Puts etcd back, and ahead of what was seen of it.
async fn restore(stack: &mut Stack) -> Result<()> {
    let backup = stack.directory().join("backup");
    stack.etcd.kill();
    stack.etcd.restore(&backup)?;
    stack.etcd.restart().await?;
    for _ in 0..300 {
        stack.store.txn(Txn::new().put("/elsewhere", "")).await?;
    }
    Ok(())
}

async fn guest(stack: &Stack, name: &str) -> Result<InstanceId> {
    let instance = stack.schedule(&["--name", name])?;
    stack.until_state(instance, State::Active).await?;
    Ok(instance)
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_newer_than_the_backup_stay_and_a_destroy_stays_done() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let older = guest(&stack, "older").await?;
    let doomed = guest(&stack, "doomed").await?;
    let done = |stack: &Stack, arguments: &[&str]| -> Result<String> {
        let output = stack.eschedule(arguments)?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let data = done(&stack, &["volume", "create", "data", "--size", "1", "--wait", "-o", "name"])?;
    let data = serde_json::from_str::<serde_json::Value>(&done(
        &stack,
        &["volume", "show", data.trim(), "-o", "json"],
    )?)?;
    let data: InstanceId = data["volume"].as_str().context("no uuid")?.parse()?;
    stack.etcd.snapshot(&stack.directory().join("backup"))?;
    let newer = guest(&stack, "newer").await?;
    assert!(stack.eschedule(&["destroy", "--wait", "doomed"])?.status.success());
    done(&stack, &["volume", "attach", "data", "older", "--wait"])?;
    restore(&mut stack).await?;

    // The newer one stays, is told, and is counted again.
    let status = stack.until_state(newer, State::Unclaimed).await?;
    assert!(status.reason.unwrap_or_default().contains("without a request"));
    stack
        .until("each guest that is here is counted, and no other", async || {
            let mut held: Vec<_> =
                stack.placement.provider_allocations(stack.node).await?.into_keys().collect();
            let mut here = vec![older, newer, data];
            held.sort_unstable();
            here.sort_unstable();
            Ok(held == here)
        })
        .await?;
    let told = stack.status(newer).await?.context("no status")?;
    assert_eq!(told.name.as_deref(), Some("newer"), "its node knows its name");
    stack
        .until("its address is told", async || {
            let status = stack.status(newer).await?.context("no status")?;
            Ok(status.state == State::Unclaimed && status.ip.is_some() && status.reason.is_some())
        })
        .await?;
    let list = String::from_utf8(stack.eschedule(&["list"])?.stdout)?;
    assert!(list.contains("UNCLAIMED") && list.contains(&newer.to_string()), "{list}");
    stack.until_state(older, State::Active).await?;
    for instance in [older, newer] {
        let domain = stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?;
        assert!(domain.is_active()?, "nobody was disturbed");
    }
    // The guest keeps the volume that it was given since, till somebody who knows of it takes it.
    let has = || -> Result<bool> {
        let domain = stack.libvirt.connection().lookup_domain_by_uuid(older.uuid())?;
        Ok(domain.xml_desc(0)?.contains(&data.to_string()))
    };
    stack
        .until("it is told to have what nobody asks for", async || {
            let told = stack.status(older).await?.context("no status")?;
            Ok(told.volumes_failed.is_some_and(|why| why.contains("it keeps")))
        })
        .await?;
    assert!(has()?, "it keeps it");
    let found = stack.eschedule(&["doctor"])?;
    assert!(String::from_utf8_lossy(&found.stdout).contains("or with others: older"), "{found:?}");
    done(&stack, &["volume", "attach", "data", "older", "--wait"])?;
    assert!(has()?, "it keeps it");
    done(&stack, &["volume", "detach", "data", "--wait"])?;
    assert!(!has()?, "it was taken");
    done(&stack, &["volume", "delete", "data", "--wait"])?;
    // The destroy that was acknowledged is not undone.
    stack
        .until("the destroyed one does not come back", async || Ok(stack.status(doomed).await?.is_none()))
        .await?;
    assert!(stack.libvirt.connection().lookup_domain_by_uuid(doomed.uuid()).is_err());

    // All works on.
    let output = stack.eschedule(&["--wait", TINY])?;
    assert!(output.status.success(), "{output:?}");
    let destroyed = stack.eschedule(&["destroy", "--wait", &newer.to_string()])?;
    assert!(destroyed.status.success(), "{destroyed:?}");
    let text = String::from_utf8(output.stdout)?;
    let third =
        text.split_whitespace().find_map(|word| word.parse::<InstanceId>().ok()).context("no uuid")?;
    let mut left = [older, third];
    left.sort_unstable();
    stack.until_exactly(&left).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_agent_on_an_etcd_that_was_emptied_and_restarted_goes_on() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let instance = guest(&stack, "here").await?;
    stack.etcd.kill();
    stack.etcd.wipe()?;
    stack.etcd.restart().await?;
    stack.until_state(instance, State::Unclaimed).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let domain = stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?;
    assert!(domain.is_active()?);
    stack.until("new ones are built", async || Ok(stack.eschedule(&["--wait", TINY])?.status.success())).await
}
