//! Records and allocations that are not as the agent left them.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use ec_model::{Keyspace, NodeId, State};
use ec_placement_client::Inventory;
use ec_store::{Store, Txn};
use ec_tests::Stack;

/// Longer than the agent's grace in these tests, and than it takes to act on a change.
const A_WHILE: Duration = Duration::from_secs(8);

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_or_is_newer_is_touched_by_nobody() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let up = stack.schedule(&[])?;
    stack.until_state(up, State::Active).await?;
    let keys = Keyspace::default();
    let key = keys.request(stack.node, up);
    let good = stack.store.get(&key).await?.0.context("no request")?.value;
    let newer = String::from_utf8(good.clone())?.replace("\"version\":1", "\"version\":7");
    let later =
        String::from_utf8(good.clone())?.replace("\"desired\":\"active\"", "\"desired\":\"hibernated\"");
    // A second one, of which there is nothing but its claim.
    stack.kill_agent()?;
    let waiting = stack.schedule(&[])?;
    let waiting_key = keys.request(stack.node, waiting);
    let waiting_good = stack.store.get(&waiting_key).await?.0.context("no request")?.value;
    stack.store.txn(Txn::new().put(&waiting_key, "{")).await?;
    stack.start_agent("").await?;
    for unreadable in ["garbage".to_owned(), newer, later] {
        stack.store.txn(Txn::new().put(&key, unreadable.clone())).await?;
        tokio::time::sleep(A_WHILE).await;
        assert_eq!(stack.store.get(&key).await?.0.context("it was deleted")?.value, unreadable.as_bytes());
        assert_eq!(stack.status(up).await?.context("no status")?.state, State::Active);
        assert_eq!(
            stack.placement.provider_allocations(stack.node).await?.len(),
            2,
            "no claim is given away"
        );
        assert!(stack.status(waiting).await?.is_none());
    }
    // Mended, all goes on.
    stack.store.txn(Txn::new().put(&key, good).put(&waiting_key, waiting_good)).await?;
    stack.until_state(waiting, State::Active).await?;

    // The same of statuses, and of the node's own record.
    let status_key = keys.status(stack.node, up);
    let status = stack.store.get(&status_key).await?.0.context("no status")?.value;
    let newer = String::from_utf8(status.clone())?.replace("\"version\":1", "\"version\":7");
    stack.kill_agent()?;
    stack.store.txn(Txn::new().put(&status_key, newer.clone())).await?;
    stack.start_agent("").await?;
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(stack.store.get(&status_key).await?.0.context("it was deleted")?.value, newer.as_bytes());
    stack.store.txn(Txn::new().put(&status_key, status)).await?;
    let mut both = [up, waiting];
    both.sort_unstable();
    stack.until_exactly(&both).await
}

#[tokio::test(flavor = "multi_thread")]
async fn images_under_guests_whose_records_cannot_be_read_are_not_evicted() -> Result<()> {
    let mut stack = Stack::start_with("images: {max_gb: 1}").await?;
    stack.start_agent("").await?;
    let instance = stack.schedule(&[])?;
    stack.until_state(instance, State::Active).await?;
    stack.kill_agent()?;
    let record = stack.directory().join(format!("state/instances/{instance}.json"));
    fs::write(&record, "{\"version\": 99}")?;
    stack.start_agent("").await?;
    // An image that fills the cache to its bound.
    let large = stack.directory().join("large.raw");
    let file = fs::File::create(&large)?;
    file.set_len(1 << 30)?;
    drop(file);
    let other = stack
        .schedule_as("resources=VCPU:1,MEMORY_MB:128,DISK_GB:2", &[&format!("file://{}", large.display())])?;
    stack
        .until("it is told or taken", async || {
            let status = stack.status(other).await?;
            Ok(status.is_some_and(|status| status.reason.is_some() || status.state == State::Error))
        })
        .await?;
    let bases: Vec<_> = fs::read_dir(stack.directory().join("state/images/base"))?.collect();
    assert!(!bases.is_empty(), "the base under the running guest is there");
    assert_eq!(fs::read(&record)?, b"{\"version\": 99}", "and the record is as it was");
    assert_eq!(stack.status(instance).await?.context("no status")?.state, State::Active);
    Ok(())
}

fn plenty(total: u64) -> Inventory {
    Inventory { total, reserved: 0, min_unit: 1, max_unit: total, step_size: 1, allocation_ratio: 1.0 }
}

/// A provider of another host.
async fn other_node(stack: &Stack) -> Result<NodeId> {
    let node = NodeId::new(uuid::Uuid::new_v4());
    stack.placement.ensure_provider(node, &node.to_string()).await?;
    let inventory = [("VCPU", 64), ("MEMORY_MB", 65_536), ("DISK_GB", 1000)];
    let inventory = inventory.into_iter().map(|(class, total)| (class.to_owned(), plenty(total))).collect();
    stack.placement.set_inventory(node, &inventory).await?;
    Ok(node)
}

#[tokio::test(flavor = "multi_thread")]
async fn room_on_another_node_builds_nothing_here_and_stays_where_it_is() -> Result<()> {
    let mut stack = Stack::start().await?;
    let other = other_node(&stack).await?;
    stack.start_agent("").await?;
    // A request as eschedule writes it, whose claim an operator moved to another host before the agent saw it.
    stack.signal_agent(nix::sys::signal::Signal::SIGSTOP)?;
    let instance = stack.schedule(&[])?;
    let amounts =
        stack.placement.provider_allocations(stack.node).await?.remove(&instance).context("no claim")?;
    stack.placement.release(instance).await?;
    stack.placement.claim_exact(instance, &[(other, amounts.clone())].into(), "p", "u").await?;
    stack.signal_agent(nix::sys::signal::Signal::SIGCONT)?;
    let status = stack.until_state(instance, State::Error).await?;
    assert!(status.reason.unwrap_or_default().contains("other resource providers"));
    stack
        .until("its request is taken back", async || {
            Ok(stack.store.get(&Keyspace::default().request(stack.node, instance)).await?.0.is_none())
        })
        .await?;
    assert!(stack.libvirt.connection().list_all_domains(0)?.is_empty());
    let there = stack.placement.provider_allocations(other).await?;
    assert_eq!(there.get(&instance), Some(&amounts), "the other host's allocation is not ours to delete");
    Ok(())
}
