//! etcd is emptied, or put back to a time before guests, and `eschedule heal` brings back what their node holds.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ec_model::{Instance, InstanceId, Keyspace, State, decode};
use ec_store::Store;
use ec_tests::Stack;
use serde_json::Value;

async fn guest(stack: &Stack, arguments: &[&str]) -> Result<InstanceId> {
    let instance = stack.schedule(arguments)?;
    stack.until_state(instance, State::Active).await?;
    Ok(instance)
}

/// Which run of the domain it is: another number after each start.
fn run_of(stack: &Stack, instance: InstanceId) -> Result<Option<u32>> {
    Ok(stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?.id())
}

async fn record(stack: &Stack, instance: InstanceId) -> Result<Instance> {
    let pair =
        stack.store.get(&Keyspace::default().instance(instance)).await?.0.context("there is no record")?;
    Ok(decode(&pair.value)?)
}

fn done(stack: &Stack, arguments: &[&str]) -> Result<String> {
    let output = stack.eschedule(arguments)?;
    ensure!(output.status.success(), "{arguments:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

fn healed(stack: &Stack, arguments: &[&str]) -> Result<Vec<Value>> {
    let all: Value = serde_json::from_str(&done(stack, &[&["heal", "-o", "json"], arguments].concat())?)?;
    Ok(all.as_array().context("a list")?.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_emptied_etcd_lost_is_brought_back_and_the_guests_run_on() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let data = stack.directory().join("data");
    std::fs::write(&data, "#!/bin/sh\necho hello\n")?;
    let data_file = data.to_string_lossy().into_owned();
    let web = guest(&stack, &["--name", "web", "--user-data", &data_file, "--label", "role=front"]).await?;
    let db = guest(&stack, &["--name", "db"]).await?;
    done(&stack, &["lock", "web", "--reason", "mine"])?;
    done(&stack, &["stop", "db", "--grace", "0", "--wait"])?;
    stack
        .until("its node has heard of the lock", async || {
            let status = stack.status(web).await?.context("no status")?;
            Ok(status.observed_generation == record(&stack, web).await?.generation)
        })
        .await?;
    let (before, run) = (record(&stack, web).await?, run_of(&stack, web)?);
    stack.etcd.kill();
    stack.etcd.wipe()?;
    stack.etcd.restart().await?;
    for instance in [web, db] {
        stack.until_state(instance, State::Unclaimed).await?;
    }

    // To look changes nothing, and nobody is asked where there is no terminal.
    let lost = healed(&stack, &["--dry-run"])?;
    assert_eq!(lost.len(), 2, "{lost:?}");
    assert!(lost.iter().all(|lost| lost["outcome"] == "lost" && lost["notes"] == serde_json::json!([])));
    assert_eq!(stack.eschedule(&["heal"])?.status.code(), Some(2));
    assert!(record(&stack, web).await.is_err());
    let refused = stack.eschedule(&["heal", "--yes", "nobody"])?;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    // One by its name, then the rest.
    let one = healed(&stack, &["--yes", "web"])?;
    assert_eq!((one.len(), &one[0]["outcome"]), (1, &Value::from("healed")));
    assert_eq!(healed(&stack, &["--yes"])?.len(), 1);
    assert_eq!(healed(&stack, &["--yes"])?.len(), 0, "a second time finds nothing");

    stack.until_state(web, State::Active).await?;
    stack.until_state(db, State::Stopped).await?;
    let after = record(&stack, web).await?;
    let (power, generation) = (after.power.clone(), after.generation);
    // The command that wishes it is another.
    let request_id = after.request_id;
    assert!(request_id.is_some() && request_id != before.request_id, "{request_id:?}");
    assert_eq!(after, Instance { power, generation, request_id, ..before });
    assert_eq!(after.locked.as_deref(), Some("mine"));
    let kept =
        stack.store.get(&Keyspace::default().user_data(stack.node, web)).await?.0.context("no user-data")?;
    assert_eq!(kept.value, b"#!/bin/sh\necho hello\n");
    stack
        .until("nothing is held any more", async || {
            let held = stack.store.list(&Keyspace::default().every_held()).await?.pairs.len();
            Ok(held + stack.store.list(&Keyspace::default().every_held_user_data()).await?.pairs.len() == 0)
        })
        .await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(run_of(&stack, web)?, run, "it ran on");
    assert_eq!(run_of(&stack, db)?, None, "it was not started");
    assert_eq!(stack.eschedule(&["destroy", "web"])?.status.code(), Some(1), "it is locked");
    done(&stack, &["unlock", "web"])?;
    done(&stack, &["start", "db", "--wait"])?;
    done(&stack, &["destroy", "--wait", "web", "db"])?;
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_anothers_by_now_stays_theirs_and_what_was_destroyed_stays_so() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let backup = stack.directory().join("backup");
    stack.etcd.snapshot(&backup)?;
    let web = guest(&stack, &["--name", "web"]).await?;
    let doomed = guest(&stack, &["--name", "doomed"]).await?;
    done(&stack, &["destroy", "--wait", "doomed"])?;
    let run = run_of(&stack, web)?;
    stack.etcd.kill();
    stack.etcd.restore(&backup)?;
    stack.etcd.restart().await?;
    stack.until_state(web, State::Unclaimed).await?;
    stack.until("another takes the name", async || Ok(stack.schedule(&["--name", "WEB"]).is_ok())).await?;
    let all = healed(&stack, &["--yes"])?;
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!((&all[0]["instance"], &all[0]["name"]), (&Value::from(web.to_string()), &Value::Null));
    assert!(all[0]["notes"].to_string().contains("eschedule rename"), "{all:?}");
    stack.until_state(web, State::Active).await?;
    assert_eq!(run_of(&stack, web)?, run, "it ran on");
    assert!(stack.libvirt.connection().lookup_domain_by_uuid(doomed.uuid()).is_err());
    done(&stack, &["rename", &web.to_string(), "web2"])?;
    done(&stack, &["destroy", "--wait", "web2", "web"])?;
    stack.until_exactly(&[]).await
}
