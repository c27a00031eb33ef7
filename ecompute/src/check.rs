//! `ecompute --check`: is everything there that an agent needs, and if not, how to mend it.

use std::{path::PathBuf, time::Duration};

use ec_guard::Guard;
use ec_libvirt::{AddressFilter, LibvirtHypervisor};
use ec_model::NodeId;
use ec_placement_client::PlacementClient;
use ec_runtime::exit::{FAILED, UNREACHABLE, chain};
use ec_store::{EtcdStore, Store};

use crate::{agent::libvirt_config, config::Settings, inventory};

/// A probe that takes longer counts as failed.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// Less free disk than this and the next image will not fit.
const DISK_LOW_GB: u64 = 2;

/// One line of the answer.
struct Line {
    what: &'static str,
    /// What was found, or what is wrong and how to mend it.
    found: Result<String, (u8, String)>,
}

/// Probes everything, prints a line for each, and answers the exit code.
#[expect(clippy::print_stdout, reason = "the lines are what the user asked for")]
pub async fn check(settings: &Settings, file: Option<PathBuf>) -> u8 {
    let file =
        file.map_or_else(|| "defaults (no compute.yaml)".to_owned(), |path| path.display().to_string());
    let lines = [
        Line { what: "configuration", found: Ok(file) },
        Line { what: "etcd", found: bounded(etcd(settings)).await },
        Line { what: "placement", found: bounded(placement(settings)).await },
        Line { what: "libvirt", found: bounded(libvirt(settings)).await },
        Line { what: "network", found: bounded(network(settings)).await },
        Line { what: "guests", found: guests(settings).await },
        Line { what: "disk", found: disk(settings) },
    ];
    let mut code = 0;
    for Line { what, found } in &lines {
        match found {
            Ok(text) => println!("{what:<14} ok      {text}"),
            Err((failure, text)) => {
                println!("{what:<14} FAILED  {text}");
                code = code.max(*failure);
            }
        }
    }
    code
}

async fn bounded(probe: impl Future<Output = Result<String, (u8, String)>>) -> Result<String, (u8, String)> {
    tokio::time::timeout(PROBE_TIMEOUT, probe)
        .await
        .unwrap_or_else(|_| Err((UNREACHABLE, format!("no answer within {} s", PROBE_TIMEOUT.as_secs()))))
}

async fn etcd(settings: &Settings) -> Result<String, (u8, String)> {
    let wrong = |error: ec_store::StoreError| {
        let code = if error.is_transient() { UNREACHABLE } else { FAILED };
        (code, format!("{error}; start etcd there, or set `etcd` in compute.yaml"))
    };
    let store = EtcdStore::connect(settings.etcd.clone()).await.map_err(wrong)?;
    let (_, revision) = store.get(&settings.keys.nodes()).await.map_err(wrong)?;
    Ok(format!("{} at revision {revision}", settings.etcd.endpoints.join(", ")))
}

async fn placement(settings: &Settings) -> Result<String, (u8, String)> {
    let wrong = |error: ec_placement_client::PlacementError| {
        let code = if error.is_transient() { UNREACHABLE } else { FAILED };
        (code, format!("{}; start placement there, or set `placement` in compute.yaml", chain(&error)))
    };
    let client = PlacementClient::new(&settings.placement).map_err(wrong)?;
    let newest = client.probe().await.map_err(wrong)?;
    Ok(format!("{} speaks up to {newest}", client.endpoint()))
}

async fn libvirt(settings: &Settings) -> Result<String, (u8, String)> {
    let host = hypervisor(settings)?.probe().await.map_err(|error| {
        (FAILED, format!("{}; start libvirtd, or set `libvirt.uri` in compute.yaml", chain(&error)))
    })?;
    Ok(format!("{}, guests run as {}", host.version, host.virt_type))
}

async fn network(settings: &Settings) -> Result<String, (u8, String)> {
    let bridge = hypervisor(settings)?.probe_network().await.map_err(|error| {
        let mend = "`virsh net-list --all` shows what there is; set `libvirt.network` and `bridge` to that";
        (FAILED, format!("{}; {mend}", chain(&error)))
    })?;
    let first = match bridge {
        Some(bridge) => format!("{} on bridge {bridge}", settings.network),
        None => format!("{}, which has no bridge: there will be no metadata service", settings.network),
    };
    Ok(match &settings.bridge {
        Some(second) => format!("{first}, second interface on {second}"),
        None => first,
    })
}

/// Whether guests can be held to their own addresses here.
async fn guests(settings: &Settings) -> Result<String, (u8, String)> {
    let held = match settings.address_filter {
        AddressFilter::Learned => "to the addresses that they were given",
        AddressFilter::Mac => "to their hardware addresses",
        AddressFilter::Off => {
            return Ok("libvirt.address_filter is off: they can take each other's addresses".to_owned());
        }
    };
    let probed = tokio::task::spawn_blocking(Guard::probe).await;
    match probed.map_err(|error| (FAILED, error.to_string()))? {
        Ok(()) => Ok(format!("packet rules hold them {held}")),
        Err(error) => {
            let meant = "`libvirt.address_filter: off` in compute.yaml does without";
            Err((FAILED, format!("they can take each other's addresses: {error}; {meant}")))
        }
    }
}

fn hypervisor(settings: &Settings) -> Result<LibvirtHypervisor, (u8, String)> {
    // The node's own uuid does not matter for probing; nothing is made under it.
    let config = libvirt_config(settings, NodeId::new(uuid::Uuid::nil()));
    LibvirtHypervisor::connect(config).map_err(|error| (FAILED, chain(&error)))
}

fn disk(settings: &Settings) -> Result<String, (u8, String)> {
    let measured = inventory::measure(settings).map_err(|error| (FAILED, error))?;
    let place = settings.state_dir.display();
    if measured.disk_free_gb < DISK_LOW_GB {
        let free = measured.disk_free_gb;
        return Err((FAILED, format!("{free} GiB free at {place}: make room, or set `state_dir` elsewhere")));
    }
    Ok(format!("{} of {} GiB free at {place}", measured.disk_free_gb, measured.disk_gb))
}
