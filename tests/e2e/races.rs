//! Many clients at a time, for little room.

use std::collections::BTreeMap;

use anyhow::Result;
use ec_model::{Alive, InstanceId, Keyspace, NodeId, encode};
use ec_placement_client::Inventory;
use ec_store::{Store, Txn};
use ec_tests::{Stack, TINY};

/// Nodes with room for this many each.
const ROOM: u64 = 4;
const NODES: usize = 3;
const CLIENTS: usize = 18;

/// A provider with little room, and the key of an agent, alive or not.
async fn node(stack: &Stack, alive: bool) -> Result<NodeId> {
    let node = NodeId::new(uuid::Uuid::new_v4());
    stack.placement.ensure_provider(node, &node.to_string()).await?;
    let inventory = |total| Inventory {
        total,
        reserved: 0,
        min_unit: 1,
        max_unit: total,
        step_size: 1,
        allocation_ratio: 1.0,
    };
    let inventories = [("VCPU", ROOM), ("MEMORY_MB", 65_536), ("DISK_GB", 1000)];
    let inventories: BTreeMap<_, _> =
        inventories.into_iter().map(|(class, total)| (class.to_owned(), inventory(total))).collect();
    stack.placement.set_inventory(node, &inventories).await?;
    if alive {
        let record = Alive {
            node,
            name: node.to_string(),
            agent: "test".to_owned(),
            formats: Alive::formats_of_this_release(),
            virt_type: "qemu".to_owned(),
            machine: String::new(),
            host: String::new(),
            url: None,
            storage: None,
            started_at: jiff::Timestamp::now(),
        };
        stack.store.txn(Txn::new().put(Keyspace::default().alive(node), encode(&record))).await?;
    }
    Ok(node)
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_clients_each_gets_room_with_its_request_or_is_told_that_there_is_none() -> Result<()> {
    let placed = many_clients(&Stack::start().await?).await?;
    assert_eq!(placed as u64, ROOM * NODES as u64, "to the last place, and not one more");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_clients_on_openstacks_placement_each_gets_room_or_is_told_that_there_is_none() -> Result<()>
{
    let placed = many_clients(&Stack::start_openstack_concurrent().await?).await?;
    // OpenStack's own server may grant a little more than there is, never less.
    assert!(placed as u64 >= ROOM * NODES as u64, "{placed} placed");
    Ok(())
}

/// Answers how many were placed.
async fn many_clients(stack: &Stack) -> Result<usize> {
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        nodes.push(node(stack, true).await?);
    }
    let dead = node(stack, false).await?;
    let mut children = Vec::new();
    for _ in 0..CLIENTS {
        let mut command = stack.command("eschedule");
        command.arg(TINY).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        children.push(command.spawn()?);
    }
    let (mut placed, mut refused) = (Vec::new(), 0);
    for child in children {
        let output = child.wait_with_output()?;
        let text = String::from_utf8(output.stdout.clone())?;
        if let Some(rest) = text.strip_prefix("NOTIFIED TARGET, ") {
            let (node, instance) = rest.trim_end().split_once(", OF INSTANCE ").unwrap_or_default();
            placed.push((node.parse::<NodeId>()?, instance.parse::<InstanceId>()?));
        } else {
            assert_eq!(
                (text.as_str(), output.status.code()),
                ("NO ALLOCATIONS LEFT\n", Some(1)),
                "{output:?}"
            );
            refused += 1;
        }
    }
    assert_eq!(placed.len() + refused, CLIENTS);
    assert!(stack.placement.provider_allocations(dead).await?.is_empty(), "nothing where no agent lives");
    for node in nodes {
        let mut wanted: Vec<_> = placed.iter().filter(|(at, _)| *at == node).map(|(_, id)| *id).collect();
        wanted.sort_unstable();
        let mut held: Vec<_> = stack.placement.provider_allocations(node).await?.into_keys().collect();
        held.sort_unstable();
        assert_eq!(held, wanted, "claims of {node}");
        let requests = stack.store.list(&Keyspace::default().requests(node)).await?.pairs;
        let mut requested: Vec<InstanceId> =
            requests.iter().filter_map(|pair| pair.key.rsplit('/').next()?.parse().ok()).collect();
        requested.sort_unstable();
        assert_eq!(requested, wanted, "requests of {node}");
    }
    Ok(placed.len())
}
