//! What must be there before the first guest: pool, network, and the way guests run.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt,
    path::Path,
};

use ec_guard::Subnet;
use ec_hypervisor::HostInfo;
use virt::{connect::Connect, error::ErrorNumber, network::Network};

use crate::{
    config::{LibvirtConfig, VirtType},
    disk::Pool,
    error::{CallError, absent, said},
    xml::{self, NetworkXml},
};

/// What was found out about the host once, and every definition needs.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) info: HostInfo,
    pub(crate) kvm: bool,
    pub(crate) maximum_cpu: bool,
    pub(crate) translation_cache: bool,
}

/// IPv4's routes of this network namespace.
const ROUTES: &str = "/proc/self/net/route";

/// Since this libvirt, the translation cache has a size in the domain's XML.
const TRANSLATION_CACHE_SINCE: u32 = 8_000_000;

/// Makes ready what can be, and says what cannot.
pub(crate) fn prepare(connect: &Connect, config: &LibvirtConfig, disks: &Pool) -> Result<Facts, CallError> {
    disks.make_ready(|| directory(&config.pool_path))?;
    directory(&config.console_dir)?;
    disks.define(connect)?;
    start_network(connect, &config.network)?;
    let mut facts = survey(connect, config)?;
    facts.info.bridge = survey_network(connect, config)?;
    Ok(facts)
}

/// The bridge of the first interface's network, where it has one, and that it runs or can be started, and that the second
/// interface's is there. Changes nothing.
pub(crate) fn survey_network(connect: &Connect, config: &LibvirtConfig) -> Result<Option<String>, CallError> {
    let network = network(connect, &config.network)?;
    if !network.is_active()?
        && let Some(why) = collision(&network, &config.network)?
    {
        return Err(CallError::Refused(why));
    }
    let bridge = network.bridge_name().ok();
    if let Some(second) = &config.bridge {
        second_bridge(second)?;
    }
    Ok(bridge)
}

/// The bridge of the first interface's network. A network of type macvtap or hostdev has none.
pub(crate) fn bridge(connect: &Connect, config: &LibvirtConfig) -> Result<Option<String>, CallError> {
    Ok(network(connect, &config.network)?.bridge_name().ok())
}

/// The hypervisor itself, without its networks. Changes nothing.
pub(crate) fn survey(connect: &Connect, config: &LibvirtConfig) -> Result<Facts, CallError> {
    let kvm = match config.virt_type {
        VirtType::Qemu => false,
        VirtType::Kvm => {
            capabilities(connect, "kvm")?;
            true
        }
        VirtType::Auto => processor_virtualises() && capabilities(connect, "kvm").is_ok(),
    };
    let virt_type = if kvm { "kvm" } else { "qemu" };
    let maximum_cpu = xml::offers_maximum_cpu(&capabilities(connect, virt_type)?);
    let libvirt = connect.lib_version()?;
    Ok(Facts {
        info: HostInfo {
            version: format!("QEMU {}, libvirt {}", version(connect.hyp_version()?), version(libvirt)),
            virt_type: virt_type.into(),
            bridge: None,
        },
        kvm,
        maximum_cpu,
        translation_cache: libvirt >= TRANSLATION_CACHE_SINCE,
    })
}

/// libvirt counts versions as one number: a million for the first part, a thousand for the second.
fn version(number: u32) -> String {
    format!("{}.{}.{}", number / 1_000_000, number / 1000 % 1000, number % 1000)
}

/// Made so that qemu, which is not root, may pass.
fn directory(path: &Path) -> Result<(), CallError> {
    if !path.is_absolute() {
        return Err(CallError::Refused(format!("the directory {} is not an absolute path", path.display())));
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o711)
        .create(path)
        .map_err(|error| CallError::io("make the directory", path, &error))
}

fn network(connect: &Connect, name: &str) -> Result<Network, CallError> {
    absent(connect.lookup_network_by_name(name), ErrorNumber::NoNetwork)?.ok_or_else(|| {
        CallError::Refused(format!(
            "libvirt has no network `{name}`: define it (virsh net-define) or set another name"
        ))
    })
}

/// Starts the network where it does not run. What keeps it from that is of the host, and may be mended at any time.
fn start_network(connect: &Connect, name: &str) -> Result<(), CallError> {
    let network = network(connect, name)?;
    if !network.is_active()?
        && let Err(error) = network.create()
        && !network.is_active()?
    {
        let why = collision(&network, name)?.unwrap_or_else(|| {
            format!("the network `{name}` does not run, and does not start: {}", said(&error))
        });
        return Err(CallError::NotNow(why));
    }
    Ok(())
}

/// Why libvirt will not start this network, where the host has one of its subnets already.
fn collision(network: &Network, name: &str) -> Result<Option<String>, CallError> {
    let found: NetworkXml = xml::read(&network.xml_desc(0)?).map_err(CallError::Refused)?;
    if !found.has_own_bridge() {
        return Ok(None);
    }
    let routes = fs::read_to_string(ROUTES).unwrap_or_default();
    Ok(taken(&found.subnets(), &routes).map(|(subnet, interface)| {
        format!(
            "the network `{name}` does not run, and cannot be started, since {}/{} is this host's already, at {interface}: \
             give it another subnet (virsh net-edit {name}), or set another network (`libvirt.network`)",
            subnet.host, subnet.prefix
        )
    }))
}

/// One of the subnets to which one of the routes leads, and by which interface: as libvirt looks at it, the very same alone.
fn taken<'a>(subnets: &[Subnet], routes: &'a str) -> Option<(Subnet, &'a str)> {
    // The kernel writes addresses as they lie in memory.
    let bits = |field: &str| u32::from_str_radix(field, 16).ok().map(u32::from_be);
    routes.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [interface, to, _, _, _, _, _, mask, ..] = fields[..] else { return None };
        let (to, mask) = (bits(to)?, bits(mask)?);
        let is_it = |subnet: &&Subnet| {
            let whole = u32::MAX.checked_shl(32 - subnet.prefix.min(32)).unwrap_or(0);
            mask == whole && to == subnet.host.to_bits() & whole
        };
        Some((*subnets.iter().find(is_it)?, interface))
    })
}

/// What came of a domain's start: where somebody ended the network beside this agent, it runs again for the next try; where one is
/// not there any more, that is of the host and not of this guest.
pub(crate) fn started(
    connect: &Connect,
    config: &LibvirtConfig,
    started: Result<(), CallError>,
) -> Result<(), CallError> {
    let Err(CallError::Libvirt(_)) = started else { return started };
    let name = &config.network;
    if !network(connect, name).map_err(CallError::for_now)?.is_active()? {
        start_network(connect, name).map_err(CallError::for_now)?;
        return Err(CallError::NotNow(format!("the network `{name}` did not run, and was started")));
    }
    if let Some(second) = &config.bridge {
        second_bridge(second).map_err(CallError::for_now)?;
    }
    started
}

fn second_bridge(name: &str) -> Result<(), CallError> {
    let is_bridge = !name.contains('/') && Path::new("/sys/class/net").join(name).join("bridge").is_dir();
    if is_bridge {
        return Ok(());
    }
    Err(CallError::Refused(format!("this host has no bridge device `{name}` for guests' second interface")))
}

/// A device node alone proves nothing: it is there in guests and containers that cannot use it.
fn processor_virtualises() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    has_virtualisation_flag(&cpuinfo) && Path::new("/dev/kvm").exists()
}

fn has_virtualisation_flag(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().filter(|line| line.starts_with("flags"));
    flags.flat_map(str::split_whitespace).any(|flag| flag == "vmx" || flag == "svm")
}

fn capabilities(connect: &Connect, virt_type: &str) -> Result<String, CallError> {
    Ok(connect.domain_capabilities(None, Some("x86_64"), Some("pc"), Some(virt_type), 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_people_write_them() {
        assert_eq!(version(9_000_000), "9.0.0");
        assert_eq!(version(7_002_022), "7.2.22");
    }

    #[test]
    fn a_subnet_is_taken_by_a_route_to_all_of_it_and_to_nothing_else() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n";
        let route =
            |to: &str, mask: &str| format!("{head}eth0\t{to}\t00000000\t0001\t0\t0\t100\t{mask}\t0\t0\t0\n");
        let guests = Subnet { host: [192, 168, 122, 1].into(), prefix: 24 };
        let all = Subnet { host: [10, 0, 0, 1].into(), prefix: 8 };
        let its_own = route("007AA8C0", "00FFFFFF");
        assert_eq!(taken(&[all, guests], &its_own), Some((guests, "eth0")));
        assert_eq!(taken(&[all], &its_own), None);
        for (to, mask) in [("007AA8C0", "0000FFFF"), ("007BA8C0", "00FFFFFF"), ("00000000", "00000000")] {
            assert_eq!(taken(&[all, guests], &route(to, mask)), None, "{to}");
        }
        assert_eq!(taken(&[guests], ""), None);
    }

    #[test]
    fn the_processors_flag_is_a_word_of_its_flags() {
        assert!(has_virtualisation_flag("model name : x\nflags\t\t: fpu vmx sse\n"));
        assert!(has_virtualisation_flag("flags : svm"));
        assert!(!has_virtualisation_flag("model name : vmx\nflags : fpu svm_lock\nvmx flags : vnmi\n"));
    }
}
