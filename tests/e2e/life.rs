//! From a query to a guest with an address, and back to nothing.

use anyhow::{Context, Result};
use ec_model::{Size, State};
use ec_tests::Stack;

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_built_tells_its_ip_and_is_destroyed_without_a_trace() -> Result<()> {
    whole_life(Stack::start().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_works_with_openstacks_placement() -> Result<()> {
    whole_life(Stack::start_openstack().await?).await
}

async fn whole_life(mut stack: Stack) -> Result<()> {
    stack.start_agent("").await?;
    let instance = stack.schedule(&["--wait", "--name", "web"])?;
    let ip = stack.eschedule(&["web"])?;
    assert!(ip.status.success(), "{ip:?}");
    let status = stack.until_state(instance, State::Active).await?;
    assert_eq!(Some(String::from_utf8(ip.stdout)?.trim().parse()?), status.ip);
    stack.until_exactly(&[instance]).await?;

    // What it claims follows its size.
    let large = "resources=VCPU:2,MEMORY_MB:192,DISK_GB:2";
    for (arguments, size) in [
        (&["stop", "--grace", "0", "--wait", "web"][..], (1, 128, 1)),
        (&["resize", "--wait", "web", large], (2, 192, 2)),
        (&["resize", "--revert", "--wait", "web"], (1, 128, 2)),
        (&["resize", "--wait", "web", large], (2, 192, 2)),
        (&["resize", "--confirm", "web"], (2, 192, 2)),
    ] {
        let output = stack.eschedule(arguments)?;
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        let held = stack.placement.allocations(instance).await?.context("it has a claim")?;
        let Size { vcpus, memory_mb, disk_gb } = Size::of(&held.total());
        assert_eq!((vcpus, memory_mb, disk_gb), size, "{arguments:?}");
    }

    assert!(stack.eschedule(&["destroy", "--wait", "web"])?.status.success());
    stack.until_exactly(&[]).await?;
    let again = stack.eschedule(&["destroy", &instance.to_string()])?;
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    Ok(())
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
async fn the_domain_is_as_allocated_and_carries_our_mark() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let instance = stack.schedule_as("resources=VCPU:2,MEMORY_MB:160,DISK_GB:2", &["--name", "big"])?;
    stack.until_state(instance, State::Active).await?;
    let domain = stack.libvirt.connection().lookup_domain_by_name(&instance.to_string())?;
    assert_eq!(domain.uuid_string()?, instance.to_string());
    let info = domain.info()?;
    assert_eq!((info.nr_virt_cpu, info.max_mem), (2, 160 * 1024));
    let xml = domain.xml_desc(0)?;
    for wanted in [stack.node.to_string().as_str(), "<rng ", "org.qemu.guest_agent.0", "<log file="] {
        assert!(xml.contains(wanted), "{wanted}: {xml}");
    }
    let disk = stack.directory().join(format!("state/disks/{instance}.qcow2"));
    let header = std::fs::read(disk)?;
    // The virtual size lies at 24 of a qcow2 header.
    assert_eq!(u64::from_be_bytes(header[24..32].try_into()?), 2 << 30);
    Ok(())
}
