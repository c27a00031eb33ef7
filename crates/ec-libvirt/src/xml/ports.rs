//! What libvirt says of interfaces: the taps of a domain that runs, and what a network is.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
};

use ec_guard::Subnet;
use ec_model::MacAddr;
use serde::Deserialize;

/// Each interface's hardware address and device on the host, where it has both.
pub(crate) fn taps(domain: &str) -> Result<Vec<(MacAddr, String)>, String> {
    #[derive(Deserialize)]
    struct Domain {
        devices: Devices,
    }
    #[derive(Deserialize)]
    struct Devices {
        #[serde(rename = "interface", default)]
        interfaces: Vec<Interface>,
    }
    #[derive(Deserialize)]
    struct Interface {
        mac: Option<Mac>,
        target: Option<Target>,
    }
    #[derive(Deserialize)]
    struct Mac {
        #[serde(rename = "@address")]
        address: String,
    }
    #[derive(Deserialize)]
    struct Target {
        #[serde(rename = "@dev")]
        dev: Option<String>,
    }
    let domain: Domain = super::read(domain)?;
    let tap = |interface: Interface| Some((interface.mac?.address.parse().ok()?, interface.target?.dev?));
    Ok(domain.devices.interfaces.into_iter().filter_map(tap).collect())
}

/// A libvirt network.
#[derive(Debug, Deserialize)]
pub(crate) struct NetworkXml {
    forward: Option<Forward>,
    #[serde(rename = "ip", default)]
    ips: Vec<Ip>,
}

#[derive(Debug, Deserialize)]
struct Forward {
    #[serde(rename = "@mode")]
    mode: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Ip {
    #[serde(rename = "@family")]
    family: Option<String>,
    #[serde(rename = "@address")]
    address: Option<String>,
    #[serde(rename = "@prefix")]
    prefix: Option<u32>,
    #[serde(rename = "@netmask")]
    netmask: Option<Ipv4Addr>,
    dhcp: Option<Dhcp>,
}

impl Ip {
    fn is_ipv4(&self) -> bool {
        self.family.as_deref().unwrap_or("ipv4") == "ipv4"
    }

    fn subnet(&self) -> Option<Subnet> {
        let host = self.address.as_ref().filter(|_| self.is_ipv4())?.parse().ok()?;
        let ones = |mask: Ipv4Addr| mask.to_bits().leading_ones();
        Some(Subnet { host, prefix: self.prefix.or_else(|| self.netmask.map(ones))? })
    }
}

#[derive(Debug, Deserialize)]
struct Dhcp {
    #[serde(rename = "range", default)]
    ranges: Vec<Range>,
    #[serde(rename = "host", default)]
    hosts: Vec<Reserved>,
}

#[derive(Debug, Deserialize)]
struct Range {
    #[serde(rename = "@start")]
    start: IpAddr,
    #[serde(rename = "@end")]
    end: IpAddr,
}

#[derive(Debug, Deserialize)]
struct Reserved {
    #[serde(rename = "@ip")]
    ip: Option<IpAddr>,
}

impl NetworkXml {
    /// Whether libvirt made its bridge, so that only guests are on it. Others, with a card of the host in
    /// them perhaps, are only used.
    pub(crate) fn has_own_bridge(&self) -> bool {
        let mode = self.forward.as_ref().map(|forward| forward.mode.as_deref().unwrap_or("nat"));
        matches!(mode, None | Some("nat" | "route" | "open"))
    }

    /// Whether this host gives out its IPv4 addresses.
    pub(crate) fn has_dhcp(&self) -> bool {
        self.has_own_bridge() && self.ips.iter().any(|ip| ip.dhcp.is_some() && ip.is_ipv4())
    }

    /// The IPv4 addresses that it gives to whoever asks, and those that it keeps for somebody.
    pub(crate) fn gives(&self) -> (Vec<RangeInclusive<Ipv4Addr>>, BTreeSet<Ipv4Addr>) {
        let dhcp = || {
            self.ips
                .iter()
                .filter(|ip| self.has_own_bridge() && ip.is_ipv4())
                .filter_map(|ip| ip.dhcp.as_ref())
        };
        let ranges =
            dhcp().flat_map(|dhcp| &dhcp.ranges).filter_map(|range| match (range.start, range.end) {
                (IpAddr::V4(start), IpAddr::V4(end)) => Some(start..=end),
                _ => None,
            });
        let kept = dhcp().flat_map(|dhcp| &dhcp.hosts).filter_map(|host| match host.ip {
            Some(IpAddr::V4(ip)) => Some(ip),
            _ => None,
        });
        (ranges.collect(), kept.collect())
    }

    /// This host's IPv4 addresses there; none where one of them does not say how large its subnet is.
    pub(crate) fn subnets(&self) -> Vec<Subnet> {
        let subnets = self.ips.iter().filter(|ip| ip.is_ipv4()).map(Ip::subnet);
        subnets.collect::<Option<_>>().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taps_of_all_releases_are_found() {
        let xml = "<domain type='qemu' id='1'><name>x</name><devices><emulator>/q</emulator>\
            <interface type='network'><mac address='52:00:00:00:00:01'/><source network='default' bridge='virbr0'/>\
            <target dev='vnet3'/><model type='virtio'/></interface><serial type='pty'><target port='0'/></serial>\
            <interface type='bridge'><mac address='52:00:00:00:00:02'/><target dev='ec0000000002'/></interface>\
            <interface type='user'/></devices></domain>";
        let found = taps(xml).unwrap();
        assert_eq!(
            found.iter().map(|(mac, dev)| format!("{mac} {dev}")).collect::<Vec<_>>(),
            ["52:00:00:00:00:01 vnet3", "52:00:00:00:00:02 ec0000000002"]
        );
        assert!(taps("<domain/>").is_err());
    }

    #[test]
    fn a_network_tells_whether_its_bridge_and_its_addresses_are_libvirts() {
        let read = |xml: &str| {
            let network: NetworkXml = super::super::read(xml).unwrap();
            (network.has_own_bridge(), network.has_dhcp())
        };
        let dhcp = "<ip address='192.168.122.1' netmask='255.255.255.0'><dhcp><range start='192.168.122.2' end='192.168.122.254'/></dhcp></ip>";
        let network = |forward: &str, rest: &str| {
            format!("<network><name>n</name>{forward}<bridge name='b'/>{rest}</network>")
        };
        assert_eq!(
            read(&network("<forward mode='nat'><nat><port start='1' end='2'/></nat></forward>", dhcp)),
            (true, true)
        );
        assert_eq!(read(&network("<forward/>", dhcp)), (true, true));
        assert_eq!(read(&network("", dhcp)), (true, true));
        assert_eq!(read(&network("<forward mode='route'/>", "<ip address='10.0.0.1'/>")), (true, false));
        assert_eq!(read(&network("", "<ip family='ipv6' address='fd00::1'><dhcp/></ip>")), (true, false));
        assert_eq!(read(&network("<forward mode='bridge'/>", "")), (false, false));
    }

    #[test]
    fn a_network_tells_which_addresses_it_gives() {
        let read = |text: &str| {
            let network: NetworkXml = super::super::read(text).unwrap();
            network.gives()
        };
        let ips = "<ip address='10.0.0.1' prefix='24'><dhcp><range start='10.0.0.2' end='10.0.0.9'><lease expiry='5'/></range>\
            <range start='10.0.0.20' end='10.0.0.29'/><host mac='52:54:00:00:00:01' name='a' ip='10.0.0.3'/>\
            <host name='b'/></dhcp></ip><ip address='10.0.1.1' prefix='24'/>\
            <ip family='ipv6' address='fd00::1' prefix='64'><dhcp><range start='fd00::2' end='fd00::9'/><host id='0:1' ip='fd00::3'/></dhcp></ip>";
        let (ranges, kept) = read(&format!("<network><name>n</name>{ips}</network>"));
        let ip = |last| Ipv4Addr::new(10, 0, 0, last);
        assert_eq!((ranges, kept), (vec![ip(2)..=ip(9), ip(20)..=ip(29)], [ip(3)].into()));
        let bridged = format!("<network><name>n</name><forward mode='bridge'/>{ips}</network>");
        assert_eq!(read(&bridged), Default::default());
    }

    #[test]
    fn a_network_tells_of_which_subnets_it_gives_addresses() {
        let read = |ips: &str| {
            let network: NetworkXml =
                super::super::read(&format!("<network><name>n</name>{ips}</network>")).unwrap();
            network.subnets()
        };
        let ips = "<ip address='192.168.122.1' netmask='255.255.254.0'><dhcp/></ip>\
            <ip family='ipv4' address='10.0.0.1' prefix='8'/><ip family='ipv6' address='fd00::1' prefix='64'/>";
        let of = |host: [u8; 4], prefix| Subnet { host: host.into(), prefix };
        assert_eq!(read(ips), [of([192, 168, 122, 1], 23), of([10, 0, 0, 1], 8)]);
        assert!(read("").is_empty());
        assert!(read("<ip address='10.0.0.1' prefix='8'/><ip address='192.0.2.1'><dhcp/></ip>").is_empty());
    }
}
