//! Real guests that boot from volumes themselves: what one wrote, the next one boots with.

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, Size, State};
use ec_tests::{Stack, tiny_image};
use serde_json::Value;

use crate::power::Guest;

/// Of one that has no disk of its own; with two processors, since the tiny guest with one hears of no new disk.
const TWO: &str = "resources=VCPU:2,MEMORY_MB:128";

/// A volume of the tiny image, and a guest that boots from it.
async fn up() -> Result<(Guest, InstanceId)> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let image = format!("file://{}", tiny_image().display());
    let made = stack
        .eschedule(&["volume", "create", "root", "--size", "1", "--image", &image, "--wait", "-o", "json"])?;
    ensure!(made.status.success(), "{made:?}");
    let volume = id(&serde_json::from_slice(&made.stdout)?)?;
    Ok((Guest::up_on(stack, TWO, &["--boot-volume", "root"]).await?, volume))
}

fn id(view: &Value) -> Result<InstanceId> {
    Ok(view["volume"].as_str().context("it has a uuid")?.parse()?)
}

fn shown(guest: &Guest, volume: &str) -> Result<Value> {
    Ok(serde_json::from_str(&guest.asks(&["volume", "show", volume, "-o", "json"])?)?)
}

fn refused(guest: &Guest, arguments: &[&str], why: &str) -> Result<()> {
    let output = guest.stack.eschedule(arguments)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(matches!(output.status.code(), Some(1 | 2)) && said.contains(why), "{arguments:?}: {output:?}");
    ensure!(said.lines().count() == 1, "one line: {said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_guest_wrote_on_the_volume_that_it_boots_from_the_next_one_boots_with() -> Result<()> {
    let (mut guest, root) = up().await?;
    guest.stack.until_exactly_booting(&[], &[guest.instance], &[root]).await?;
    let held = guest.stack.placement.allocations(guest.instance).await?.context("it has a claim")?;
    assert_eq!(Size::of(&held.total()).disk_gb, 0, "its disk is the volume's");
    assert_eq!(guest.run("cat /sys/block/vda/serial").await?, root.to_string()[..20]);
    let view = shown(&guest, "root")?;
    assert_eq!((&view["status"], &view["device"]), (&"in-use".into(), &"vda".into()), "{view}");
    refused(&guest, &["volume", "detach", "root"], "boots from that")?;
    refused(&guest, &["volume", "delete", "root"], "boots from it")?;
    refused(&guest, &["rebuild", "web"], "`eschedule volume restore` makes that anew")?;
    let larger = "resources=VCPU:2,MEMORY_MB:128,DISK_GB:2";
    refused(&guest, &["resize", "web", larger], "has no disk of its own")?;
    refused(&guest, &["--name", "two", "--boot-volume", "root", TWO], "has it")?;
    refused(&guest, &["--name", "two", "--boot-volume", "root", larger], "leave DISK_GB out")?;
    refused(&guest, &["--boot-volume", "root", TWO, "file:///x"], "and not from image")?;

    // It grows under the guest; its power is as everybody's; a rescue disk comes before it; it has another size.
    guest.asks(&["volume", "extend", "root", "2", "--wait"])?;
    assert_eq!(guest.run("cat /sys/block/vda/size").await?, (2_u64 << 21).to_string());
    guest.asks(&["reboot", "--wait", "web"])?;
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    assert_eq!(guest.kept().await?.trim(), "precious");
    let image = format!("file://{}", tiny_image().display());
    guest.asks(&["rescue", "--wait", "web", "--image", &image])?;
    assert_ne!(guest.kept().await?.trim(), "precious", "it runs from another disk");
    let beside = guest.run("dd if=/dev/vdb bs=1M skip=500 count=1 | head -n 1").await?;
    assert_eq!(beside.trim(), "precious", "its volume is the second");
    guest.asks(&["unrescue", "--wait", "web"])?;
    guest.asks(&["resize", "--wait", "web", "resources=VCPU:2,MEMORY_MB:160"])?;
    guest.asks(&["resize", "--confirm", "web"])?;
    assert_eq!(guest.kept().await?.trim(), "precious");
    guest.stack.until_exactly_booting(&[], &[guest.instance], &[root]).await?;

    // Its domain is taken away while it does not run: it is defined again, from the volume.
    guest.asks(&["stop", "--grace", "0", "--wait", "web"])?;
    guest.stack.libvirt.connection().lookup_domain_by_name(&guest.instance.to_string())?.undefine()?;
    guest
        .stack
        .until("its domain is there again", async || {
            Ok(guest.stack.libvirt.connection().lookup_domain_by_name(&guest.instance.to_string()).is_ok())
        })
        .await?;
    guest.asks(&["start", "--wait", "web"])?;
    assert_eq!(guest.kept().await?.trim(), "precious");

    // The agent dies while the guest is destroyed; the volume stays, and the next guest boots from it.
    guest.stack.kill_agent()?;
    guest.stack.start_agent("before-drop-record=pause").await?;
    guest.asks(&["destroy", "web"])?;
    guest.stack.until_reached("before-drop-record").await?;
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    guest.stack.until_exactly_booting(&[], &[], &[root]).await?;
    guest.stack.until("it is free", async || Ok(shown(&guest, "root")?["status"] == "available")).await?;
    let public = format!("{}.pub", guest.key());
    guest.instance = guest
        .stack
        .schedule_as(TWO, &["--wait", "--name", "next", "--key", &public, "--boot-volume", "root"])?;
    assert_eq!(guest.kept().await?.trim(), "precious");
    guest.asks(&["destroy", "--wait", "next"])?;
    guest.asks(&["volume", "delete", "root", "--wait"])?;
    guest.stack.until_exactly(&[]).await
}

/// The steps at which the agent is killed while it builds one.
const KILLS: [&str; 6] = [
    "before-disk",
    "before-announce",
    "before-define",
    "before-mark-started",
    "before-start",
    "before-note-start",
];

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_each_step_of_building_a_guest_on_a_volume_its_next_agent_goes_on() -> Result<()> {
    let (mut guest, root) = up().await?;
    let public = format!("{}.pub", guest.key());
    for step in KILLS {
        guest.asks(&["destroy", "--wait", &guest.instance.to_string()])?;
        guest.stack.until_exactly_booting(&[], &[], &[root]).await?;
        guest.stack.kill_agent()?;
        guest.stack.start_agent(&format!("{step}=pause")).await?;
        guest.instance =
            guest.stack.schedule_as(TWO, &["--name", "web", "--key", &public, "--boot-volume", "root"])?;
        guest.stack.until_reached(step).await?;
        guest.stack.kill_agent()?;
        guest.stack.start_agent("").await?;
        guest.stack.until_state(guest.instance, State::Active).await?;
        assert_eq!(guest.kept().await?.trim(), "precious", "{step}");
        guest.stack.until_exactly_booting(&[], &[guest.instance], &[root]).await?;
    }
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.asks(&["volume", "delete", "root", "--wait"])?;
    guest.stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_file_says_boots_from_its_volume_and_is_snapshotted_and_restored_with_it() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let public = format!("{}.pub", stack.key_pair()?);
    let path = stack.directory().join("shop.yaml");
    let file = path.display().to_string();
    let image = format!("file://{}", tiny_image().display());
    // What it was made of does not matter any more once it is restored.
    let made_of = format!(", image: \"{image}\"");
    let says = |name: &str, made_of: &str| {
        format!(
            "stack: shop\nvolumes: {{root: {{size: 1{made_of}}}, data: {{size: 1}}}}\ninstances:\n  {name}: {{query: \"{TWO}\", boot: root, volumes: [data], keys: [\"{public}\"]}}\n"
        )
    };
    std::fs::write(&path, says("web", &made_of))?;
    let applied = stack.eschedule(&["apply", "-f", &file])?;
    ensure!(applied.status.success(), "{applied:?}");
    let mut guest = Guest::of(stack, &public, "web")?;
    guest.stack.until_state(guest.instance, State::Active).await?;
    assert_eq!(guest.asks(&["apply", "-f", &file, "--diff", "-o", "name"])?, "");
    let [root, data] = ["root", "data"].map(|name| shown(&guest, name).and_then(|view| id(&view)));
    let (root, data) = (root?, data?);
    guest.stack.until_exactly_booting(&[], &[guest.instance], &[root, data]).await?;
    guest.run("echo precious | dd of=/dev/vda bs=1M seek=500 conv=fsync").await?;

    guest.asks(&["snapshot", "create", "web", "snap", "--wait"])?;
    let snap: Value = serde_json::from_str(&guest.asks(&["snapshot", "show", "snap", "-o", "json"])?)?;
    assert_eq!(snap["size_gb"], 2, "{snap}");
    let copy = serde_json::from_str(&guest.asks(&[
        "volume",
        "create",
        "copy",
        "--image",
        "instance:web",
        "--wait",
        "-o",
        "json",
    ])?)?;
    let copy = id(&copy)?;
    guest.run("echo spoilt | dd of=/dev/vda bs=1M seek=500 conv=fsync").await?;
    guest.asks(&["snapshot", "restore", "snap"])?;
    guest.stack.until_state(guest.instance, State::Active).await?;
    assert_eq!(guest.kept().await?.trim(), "precious", "its volume is as it was");
    guest.asks(&["snapshot", "delete", "snap", "--wait"])?;

    // Another takes its place, and boots from the same volume.
    std::fs::write(&path, says("web2", ""))?;
    guest.asks(&["apply", "-f", &file, "--prune"])?;
    guest = Guest::of(guest.stack, &public, "web2")?;
    guest.stack.until_state(guest.instance, State::Active).await?;
    assert_eq!(guest.kept().await?.trim(), "precious");
    guest.stack.until_exactly_booting(&[], &[guest.instance], &[root, data, copy]).await?;
    guest.asks(&["volume", "delete", "copy", "--wait"])?;
    std::fs::write(&path, "stack: shop\n")?;
    guest.asks(&["apply", "-f", &file, "--prune"])?;
    guest.asks(&["apply", "-f", &file, "--prune-volumes"])?;
    guest.stack.until_exactly(&[]).await
}
