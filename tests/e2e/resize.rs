//! Another size for a real guest: what it sees of it, what it keeps, and what is claimed.

use anyhow::{Context, Result};
use ec_model::{Size, State};

use crate::power::Guest;

const LARGE: &str = "resources=VCPU:2,MEMORY_MB:192,DISK_GB:2";

/// What the guest finds: processors, memory in MiB, 512-byte sectors of its disk.
async fn sees(guest: &Guest) -> Result<(u64, u64, u64)> {
    let command = "grep -c ^processor /proc/cpuinfo; grep MemTotal /proc/meminfo | tr -dc 0-9; echo; cat /sys/block/vda/size";
    let said = guest.run(command).await?;
    let numbers: Vec<u64> = said.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [processors, kib, sectors] = numbers[..] else { anyhow::bail!("{said}") };
    Ok((processors, kib / 1024, sectors))
}

/// It sees so much: its kernel keeps some of the memory for itself.
#[track_caller]
fn fits((processors, mib, sectors): (u64, u64, u64), size: Size) {
    assert_eq!((processors, sectors), (size.vcpus, size.disk_gb << 21), "{mib} MiB");
    assert!(mib <= size.memory_mb && mib + 60 > size.memory_mb, "{mib} MiB of {}", size.memory_mb);
}

pub(crate) async fn claimed(guest: &Guest) -> Result<Size> {
    let held = guest.stack.placement.allocations(guest.instance).await?.context("it has a claim")?;
    Ok(Size::of(&held.total()))
}

const fn size(vcpus: u64, memory_mb: u64, disk_gb: u64) -> Size {
    Size { vcpus, memory_mb, disk_gb }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_gets_another_size_and_goes_back_and_keeps_what_it_wrote() -> Result<()> {
    let guest = Guest::up(&[]).await?;
    fits(sees(&guest).await?, size(1, 128, 1));
    let refused =
        guest.stack.eschedule(&["resize", "web", "resources=VCPU:100000,MEMORY_MB:128,DISK_GB:1"])?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("VCPU"), "{said}");
    let refused = guest.stack.eschedule(&["resize", "web", "resources=VCPU:1,MEMORY_MB:128"])?;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("a disk never shrinks"), "{refused:?}");
    let elsewhere = format!("{LARGE}&member_of={}", uuid::Uuid::new_v4());
    let refused = guest.stack.eschedule(&["resize", "web", &elsewhere])?;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("wants by `member_of="), "{refused:?}");
    // Whose disks are its own is let into no storage that nodes share: what others claim there would be taken of them.
    let refused = guest.stack.eschedule(&["storage", "join", "nfs", &guest.stack.node.to_string()])?;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("on its own storage"), "{refused:?}");
    assert_eq!(claimed(&guest).await?, size(1, 128, 1), "nothing was changed");

    let told = guest.asks(&["resize", "--wait", "web", LARGE])?;
    assert_eq!(told, format!("VERIFY_RESIZE INSTANCE {} ON {}\n", guest.instance, guest.stack.node));
    fits(sees(&guest).await?, size(2, 192, 2));
    assert_eq!(guest.kept().await?.trim(), "precious");
    let shown = guest.asks(&["list"])?;
    assert!(shown.contains("VERIFY_RESIZE"), "{shown}");
    assert_eq!(guest.stack.eschedule(&["stop", "web"])?.status.code(), Some(1), "not before it is confirmed");

    guest.asks(&["resize", "--revert", "--wait", "web"])?;
    fits(sees(&guest).await?, size(1, 128, 2));
    assert_eq!(guest.kept().await?.trim(), "precious");
    assert_eq!(claimed(&guest).await?, size(1, 128, 2), "its disk stays as it was grown");

    // A disk grows under a guest that runs.
    guest.asks(&["flavor", "create", "roomy", "resources=VCPU:1,MEMORY_MB:128,DISK_GB:3"])?;
    let boot = guest.run("cat /proc/sys/kernel/random/boot_id").await?;
    guest.asks(&["resize", "--wait", "web", "--flavor", "roomy"])?;
    fits(sees(&guest).await?, size(1, 128, 3));
    assert_eq!(guest.run("cat /proc/sys/kernel/random/boot_id").await?, boot);
    guest.asks(&["resize", "--confirm", "web"])?;

    // One that does not run stays so.
    guest.asks(&["stop", "--wait", "web"])?;
    guest.asks(&["resize", "--wait", "web", "resources=VCPU:2,MEMORY_MB:128,DISK_GB:4"])?;
    assert_eq!(claimed(&guest).await?, size(2, 128, 4));
    guest.asks(&["resize", "--confirm", "web"])?;
    guest.stack.until_state(guest.instance, State::Stopped).await?;
    guest.asks(&["start", "--wait", "web"])?;
    fits(sees(&guest).await?, size(2, 128, 4));
    assert_eq!(guest.kept().await?.trim(), "precious");
    guest.stack.until_exactly(&[guest.instance]).await?;
    guest.asks(&["destroy", "--wait", "web"])?;
    guest.stack.until_exactly(&[]).await
}

/// What it could use: processors that are there, online or not, and blocks of memory, of 128 MiB each.
async fn could_use(guest: &Guest) -> Result<(String, u64)> {
    let command =
        "cat /sys/devices/system/cpu/present; ls -d /sys/devices/system/memory/memory[0-9]* | wc -l";
    let said = guest.run(command).await?;
    let (processors, blocks) = said.trim().split_once('\n').with_context(|| said.clone())?;
    Ok((processors.to_owned(), blocks.trim().parse()?))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_runs_is_given_processors_and_memory_and_ends_to_lose_them() -> Result<()> {
    let guest = Guest::up(&[]).await?;
    let of = |vcpus: u64, memory: u64| format!("resources=VCPU:{vcpus},MEMORY_MB:{memory},DISK_GB:1");
    let resize = |to: &str| guest.asks(&["resize", "--wait", "web", to]);
    let confirm = || guest.asks(&["resize", "--confirm", "web"]);
    let first = guest.boot().await?;
    // An emulated one gets no processors while it runs.
    let told = resize(&of(2, 128))?;
    assert!(told.starts_with("VERIFY_RESIZE "), "{told}");
    assert_eq!(could_use(&guest).await?, ("0-1".to_owned(), 1));
    let domain = guest.stack.libvirt.connection().lookup_domain_by_name(&guest.instance.to_string())?;
    let is_emulated = domain.xml_desc(0)?.starts_with("<domain type='qemu'");
    assert_eq!(guest.boot().await? != first, is_emulated, "with KVM it ran all the time");
    assert_eq!(claimed(&guest).await?, size(2, 128, 1));
    confirm()?;

    // One that is small was started without room for memory.
    resize(&of(2, 1024))?;
    let second = guest.boot().await?;
    assert_ne!(second, first);
    assert_eq!(could_use(&guest).await?, ("0-1".to_owned(), 8));
    confirm()?;
    resize(&of(2, 1280))?;
    assert_eq!(could_use(&guest).await?, ("0-1".to_owned(), 10));
    assert_eq!(guest.boot().await?, second);
    assert_eq!(claimed(&guest).await?, size(2, 1280, 1));
    // What came later is saved with the rest.
    confirm()?;
    guest.asks(&["suspend", "--wait", "web"])?;
    guest.asks(&["resume", "--wait", "web"])?;
    assert_eq!((could_use(&guest).await?, guest.boot().await?), (("0-1".to_owned(), 10), second.clone()));
    resize(&of(2, 1408))?;
    assert_eq!((could_use(&guest).await?, guest.boot().await?), (("0-1".to_owned(), 11), second.clone()));
    guest.asks(&["resize", "--revert", "--wait", "web"])?;
    let third = guest.boot().await?;
    assert_ne!(third, second);
    assert_eq!(could_use(&guest).await?, ("0-1".to_owned(), 10));
    // More than it was started with room for.
    resize(&of(2, 5248))?;
    assert_ne!(guest.boot().await?, third);
    assert_eq!(could_use(&guest).await?, ("0-1".to_owned(), 41));
    assert_eq!(claimed(&guest).await?, size(2, 5248, 1));
    assert_eq!(guest.kept().await?.trim(), "precious");
    guest.stack.until_exactly(&[guest.instance]).await
}
