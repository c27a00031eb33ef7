//! A real guest that is booted from a rescue disk, so that its own can be mended, and from its own again.

use anyhow::{Context, Result};
use ec_model::State;

use crate::power::Guest;

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_mended_from_a_rescue_disk() -> Result<()> {
    let mut guest = Guest::up(&[]).await?;
    let before = guest.stack.status(guest.instance).await?.context("it is told")?;
    let none =
        guest.stack.eschedule(&["rescue", "--wait", "web", "--image", "file:///nonexistent/image.qcow2"])?;
    let said = String::from_utf8_lossy(&none.stderr).into_owned();
    assert_eq!(none.status.code(), Some(1), "{none:?}");
    assert!(said.contains("boots from its own disk still: "), "{said}");
    assert_eq!(guest.kept().await?.trim(), "precious", "nothing was changed");

    let told = guest.asks(&["rescue", "--wait", "web"])?;
    assert_eq!(told, format!("RESCUED INSTANCE {} ON {}\n", guest.instance, guest.stack.node));
    assert_ne!(guest.kept().await?.trim(), "precious", "it runs from another disk");
    let own = guest.run("dd if=/dev/vdb bs=1M skip=500 count=1 | head -n 1").await?;
    assert_eq!(own.trim(), "precious", "its own is the second");
    let rescued = guest.stack.status(guest.instance).await?.context("it is told")?;
    assert_eq!(rescued.ip, before.ip, "its address is its own");
    for refused in [&["stop", "web"], &["rebuild", "web"], &["suspend", "web"]] {
        let refused = guest.stack.eschedule(refused)?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        assert!(said.contains("it is rescued; `eschedule unrescue`"), "{said}");
    }
    assert!(guest.asks(&["rescue", "web"])?.starts_with("NOTHING TO DO"), "it is so already");
    guest.run("echo mended | dd of=/dev/vdb bs=1M seek=500 conv=fsync").await?;

    // Somebody starts it from its own disk by hand: a rescue is wanted still. Without an agent, which would end it as it comes up.
    guest.stack.kill_agent()?;
    let domain = guest.stack.libvirt.connection().lookup_domain_by_name(&guest.instance.to_string())?;
    domain.destroy()?;
    domain.create()?;
    guest.stack.start_agent("").await?;
    guest
        .stack
        .until("it is started from its rescue disk again", async || {
            let status = guest.stack.status(guest.instance).await?.context("it is told")?;
            Ok(status.state == State::Rescued && status.started_at > rescued.started_at)
        })
        .await?;

    let told = guest.asks(&["unrescue", "--wait", "web", "-o", "json"])?;
    let told: serde_json::Value = serde_json::from_str(&told)?;
    assert_eq!(told["state"], "ACTIVE", "{told}");
    assert_eq!(guest.kept().await?.trim(), "mended");
    assert_eq!(guest.stack.eschedule(&["unrescue", "web"])?.status.code(), Some(0), "it is so already");

    guest.asks(&["rescue", "--wait", "web"])?;
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.stack.until_exactly(&[]).await
}
