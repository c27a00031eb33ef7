//! A new disk for a real guest: what goes, what stays, and what an image that cannot be had changes.

use std::{fs, sync::Arc};

use anyhow::{Context, Result};
use ec_image::testing::{Server, Step, answer};
use ec_model::State;
use tokio::sync::Semaphore;

use crate::power::Guest;

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_gets_a_new_disk_and_keeps_all_else() -> Result<()> {
    let guest = Guest::up(&[]).await?;
    let before = guest.stack.status(guest.instance).await?.context("it is told")?;
    let none = guest.stack.eschedule(&["rebuild", "--wait", "web", "file:///nonexistent/image.qcow2"])?;
    let said = String::from_utf8_lossy(&none.stderr).into_owned();
    assert_eq!(none.status.code(), Some(1), "{none:?}");
    assert!(said.contains("has its old disk still: "), "{said}");
    assert_eq!(guest.kept().await?.trim(), "precious", "nothing was changed");
    let image = format!("file://{}", ec_tests::tiny_image().display());
    let shown = guest.asks(&["show", "web"])?;
    assert!(
        shown.contains(&image) && !shown.contains("image.qcow2\n"),
        "its disk is of the old one: {shown}"
    );

    let told = guest.asks(&["rebuild", "--wait", "web", &image])?;
    assert_eq!(told, format!("ACTIVE INSTANCE {} ON {}\n", guest.instance, guest.stack.node));
    assert_ne!(guest.kept().await?.trim(), "precious");
    let after = guest.stack.status(guest.instance).await?.context("it is told")?;
    assert_eq!(after.ip, before.ip, "its address is its own");
    // One that does not run stays so, and the image asked for last is the one.
    guest.run("echo anew | dd of=/dev/vda bs=1M seek=500 conv=fsync").await?;
    guest.asks(&["stop", "--wait", "web"])?;
    guest.asks(&["rebuild", "web"])?;
    guest
        .stack
        .until("it is rebuilt and STOPPED", async || {
            let status = guest.stack.status(guest.instance).await?.context("it is told")?;
            Ok(status.state == State::Stopped && status.rebuilt != after.rebuilt)
        })
        .await?;
    guest.asks(&["start", "--wait", "web"])?;
    assert_ne!(guest.kept().await?.trim(), "anew");
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn who_looks_at_a_guest_costs_its_rebuild_nothing_of_what_was_fetched() -> Result<()> {
    let guest = Guest::up(&[]).await?;
    let image = fs::read(ec_tests::tiny_image())?;
    let rest = Arc::new(Semaphore::new(0));
    let wait = Arc::clone(&rest);
    let server = Server::start(move |_, _| {
        let mut first = answer("200 OK", "", &image);
        let second = first.split_off(first.len() / 2);
        vec![Step::Send(first), Step::Wait(Arc::clone(&wait)), Step::Send(second)]
    })
    .await;
    guest.asks(&["rebuild", "web", &server.image().url])?;
    guest
        .stack
        .until("half of its image is there", async || {
            let status = guest.stack.status(guest.instance).await?.context("it is told")?;
            Ok(status.state == State::Rebuilding && status.progress.is_some_and(|progress| progress.done > 0))
        })
        .await?;
    for _ in 0..2 {
        let log = guest.asks(&["logs", "web"])?;
        assert!(log.contains("READY"), "its guest runs on: {log}");
    }
    rest.add_permits(1);
    guest
        .stack
        .until("it is rebuilt", async || {
            let status = guest.stack.status(guest.instance).await?.context("it is told")?;
            Ok(status.state == State::Active
                && status.rebuilt.is_some_and(|rebuilt| rebuilt.failed.is_none()))
        })
        .await?;
    let heads = server.heads.lock().map_err(|_| anyhow::anyhow!("the server broke"))?.len();
    assert_eq!(heads, 1, "it was fetched once");
    Ok(())
}
