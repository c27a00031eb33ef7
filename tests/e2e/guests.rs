//! What arrives inside the guests: their metadata, their disks, their second interface.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use ec_model::State;
use ec_tests::{Bridge, Stack, debian_image};
use sha2::{Digest, Sha256};

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_gets_its_own_name_key_and_user_data_byte_for_byte() -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let key = stack.key_pair()?;
    // Every byte there is, up to the bound: no reader may take it for text.
    let data: Vec<u8> = (0..64 * 1024_u32).map(|n| (n % 251 + n / 251).to_le_bytes()[0]).collect();
    let path = stack.directory().join("user-data");
    fs::write(&path, &data)?;
    let (path, public) = (path.display().to_string(), format!("{key}.pub"));
    let first = stack.schedule(&["--name", "one", "--key", &public, "--user-data", &path])?;
    let second = stack.schedule(&["--name", "two", "--key", &public])?;
    for (instance, name) in [(first, "one"), (second, "two")] {
        let ip = stack.until_state(instance, State::Active).await?.ip.context("no address")?;
        let seen = stack
            .ssh(
                &key,
                "root",
                ip,
                "hostname; wget -q -O - http://169.254.169.254/latest/meta-data/instance-id",
            )
            .await?;
        assert_eq!(seen, format!("{name}\ni-{instance}"));
        // No header makes it another guest.
        let forged = format!(
            "wget -q -O - --header 'X-Forwarded-For: 127.0.0.1' --header 'X-Instance-ID: {first}' \
             http://169.254.169.254/latest/meta-data/local-hostname"
        );
        assert_eq!(stack.ssh(&key, "root", ip, &forged).await?, name);
        if instance == first {
            let sum = stack
                .ssh(&key, "root", ip, "wget -q -O - http://169.254.169.254/latest/user-data | sha256sum")
                .await?;
            let wanted: String = Sha256::digest(&data).iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(sum.starts_with(&wanted), "{sum}");
        }
    }
    // What its user has it told comes at once, in both trees, and goes.
    let ip = stack.until_state(second, State::Active).await?.ip.context("no address")?;
    let ask = async |path: &str| {
        let url = format!("wget -q -O - http://169.254.169.254/{path} || echo none");
        stack.ssh(&key, "root", ip, &url).await
    };
    assert!(ask("openstack/latest/meta_data.json").await?.contains("\"meta\":{}"));
    for (arguments, tag, meta) in [
        (["set", "two", "--meta", "role=the db"], "the db", "\"meta\":{\"role\":\"the db\"}"),
        (["unset", "two", "--meta", "role"], "none", "\"meta\":{}"),
    ] {
        assert!(stack.eschedule(&arguments)?.status.success(), "{arguments:?}");
        stack
            .until("the guest is told", async || Ok(ask("latest/meta-data/tags/instance/role").await? == tag))
            .await?;
        let told = ask("openstack/latest/meta_data.json").await?;
        assert!(told.contains(meta), "{told}");
    }
    // From the host itself nobody is found.
    let host = std::net::TcpStream::connect("169.254.169.254:80");
    assert!(host.is_ok(), "the service listens: {host:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_interface_on_a_bridge_gets_its_address_told_too() -> Result<()> {
    let mut bridge = Bridge::add()?;
    let mut stack = Stack::start_with(&format!("bridge: {}", bridge.name())).await?;
    bridge.serve_dhcp(stack.directory())?;
    stack.start_agent("").await?;
    let instance = stack.schedule(&[])?;
    stack.until_state(instance, State::Active).await?;
    stack
        .until("both interfaces have addresses", async || {
            let addresses = stack.status(instance).await?.map(|status| status.addresses).unwrap_or_default();
            Ok(addresses.iter().any(|address| address.nic == 0)
                && addresses.iter().any(|a| a.nic == 1 && a.ip.to_string().starts_with("198.51.100.")))
        })
        .await?;
    let status = stack.status(instance).await?.context("no status")?;
    let first = status.addresses.iter().find(|address| address.nic == 0).map(|address| address.ip);
    assert_eq!(status.ip, first, "the libvirt network's address is the instance's IP");
    assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_never_asks_for_an_address_is_told_and_runs_on() -> Result<()> {
    let mut stack = Stack::start_with("address_timeout: 15").await?;
    stack.start_agent("").await?;
    // Nothing to boot on it: the firmware says so on its console and waits.
    let blank = stack.directory().join("blank.raw");
    fs::File::create(&blank)?.set_len(1 << 20)?;
    let url = format!("file://{}", blank.display());
    let output = stack.eschedule(&["--wait", ec_tests::TINY, &url])?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("no address of it was seen in 15 s"), "{error}");
    let text = String::from_utf8(output.stdout)?;
    let instance = text.split_whitespace().find_map(|word| word.parse().ok()).context("no instance")?;
    stack.until_exactly(&[instance]).await?;
    assert!(stack.libvirt.connection().lookup_domain_by_uuid(instance.uuid())?.is_active()?);
    assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn without_resize_an_image_larger_than_its_allocation_is_taken_with_a_warning() -> Result<()> {
    let mut stack = Stack::start_with("resize: False").await?;
    stack.start_agent("").await?;
    let large = stack.directory().join("large.qcow2");
    let create = ["create", "-q", "-f", "qcow2"];
    let made = std::process::Command::new("qemu-img").args(create).arg(&large).arg("3G").status()?;
    anyhow::ensure!(made.success());
    let instance = stack.schedule(&[&format!("file://{}", large.display())])?;
    stack.until_state(instance, State::Starting).await?;
    let log = stack.log();
    assert!(log.contains("larger than the 1 GiB allocated"), "{log}");
    let url = large.display();
    assert!(log.contains(&format!("INSTANTIATE INSTANCE {instance} WITH IMAGE file://{url}")), "{log}");
    assert!(log.contains("ALLOCATIONS ARE {\"DISK_GB\":1,\"MEMORY_MB\":128,\"VCPU\":1}"), "{log}");
    let header = fs::read(stack.directory().join(format!("state/disks/{instance}.qcow2")))?;
    assert_eq!(u64::from_be_bytes(header[24..32].try_into()?), 3 << 30, "as large as its image");
    assert!(stack.eschedule(&["destroy", "--wait", &instance.to_string()])?.status.success());
    stack.until_exactly(&[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn real_cloud_init_takes_key_name_and_cloud_config_and_grows_its_disk() -> Result<()> {
    // Found by itself, as in every stock image.
    has_what_it_was_given(debian_image("")?, "openstack").await
}

/// The other tree, which an image must be told to use.
#[tokio::test(flavor = "multi_thread")]
async fn real_cloud_init_takes_the_same_from_the_tree_of_ec2() -> Result<()> {
    has_what_it_was_given(debian_image("-Ec2")?, "ec2").await
}

async fn has_what_it_was_given(image: PathBuf, platform: &str) -> Result<()> {
    let mut stack = Stack::start().await?;
    stack.start_agent("").await?;
    let key = stack.key_pair()?;
    let config = stack.directory().join("cloud-config");
    fs::write(&config, "#cloud-config\nwrite_files:\n- {path: /etc/written, content: by cloud-config}\n")?;
    let (config, public) = (config.display().to_string(), format!("{key}.pub"));
    let url = format!("file://{}", image.display());
    let arguments = ["--name", "large", "--key", &public, "--user-data", &config, &url];
    let instance = stack.schedule_as("resources=VCPU:1,MEMORY_MB:768,DISK_GB:4", &arguments)?;
    // The distribution's own first user.
    let os = fs::read_to_string("/etc/os-release")?;
    let user = if os.contains("ID=ubuntu") { "ubuntu" } else { "debian" };
    stack.until_state(instance, State::Active).await?;
    // Exit code 2 only tells of warnings, which an unknown EC2 gives.
    let wait = "cloud-init status --wait >/dev/null; cloud-init query v1.platform; hostname; \
                cat /etc/written; echo; df -BM --output=size / | tail -1";
    let told = stack.ssh_to(&key, user, instance, wait).await?;
    let lines: Vec<&str> = told.lines().map(str::trim).collect();
    assert_eq!(lines[..3], [platform, "large", "by cloud-config"], "{told}");
    let size: u64 = lines.last().context("no size")?.trim_end_matches('M').parse()?;
    assert!(size > 3500, "4 GiB are allocated, the root file system has {size} MiB");
    Ok(())
}
