//! What addresses guests have: DHCP leases, the host's neighbour table, the guest's own agent.
//!
//! Leases come in one call for all and tell of an address at once. The neighbour table is read from the
//! kernel's file, because libvirt's own reader of it fails on newer kernels. The agent may block, so it
//! is asked aside, seldom, only where the others cannot know, and its last answer is what counts.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ec_hypervisor::HypervisorResult;
use ec_model::{Address, AddressSource, InstanceId, MacAddr, NodeId};
use virt::connect::Connect;

use crate::{
    calls::Scope,
    domain::{self, Found},
    error::CallError,
    lane::Lane,
    sys::{self, GuestInterface, Lease},
};

/// How often one guest's agent is asked.
const AGENT_INTERVAL: Duration = Duration::from_secs(2);

/// How long an agent's answer is kept for an instance that nobody asks about.
const AGENT_KEEP: Duration = Duration::from_secs(60);

type Seen = HashMap<MacAddr, Vec<(IpAddr, AddressSource)>>;

/// Leases and neighbours.
pub(crate) fn seen_by_host(connect: &Connect, network: &str) -> Result<Seen, CallError> {
    let leases = sys::dhcp_leases(&connect.lookup_network_by_name(network)?)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let mut seen = Seen::new();
    for (mac, ip) in leases.iter().filter_map(|lease| living(lease, now)) {
        seen.entry(mac).or_default().push((ip, AddressSource::Lease));
    }
    // A host without the file has no IPv4 neighbours.
    let neighbours = std::fs::read_to_string("/proc/net/arp").unwrap_or_default();
    for (mac, ip) in neighbours.lines().filter_map(neighbour) {
        seen.entry(mac).or_default().push((ip, AddressSource::Arp));
    }
    Ok(seen)
}

fn living(lease: &Lease, now: u64) -> Option<(MacAddr, IpAddr)> {
    let ended = u64::try_from(lease.expires).is_ok_and(|expires| expires > 0 && expires <= now);
    if ended { None } else { Some((lease.mac.as_ref()?.parse().ok()?, lease.ip.parse().ok()?)) }
}

/// A line of `/proc/net/arp`: address, hardware type, flags, hardware address, mask, device.
fn neighbour(line: &str) -> Option<(MacAddr, IpAddr)> {
    const COMPLETE: u32 = 0x2;
    let mut fields = line.split_whitespace();
    let ip = fields.next()?.parse().ok()?;
    let flags = u32::from_str_radix(fields.nth(1)?.strip_prefix("0x")?, 16).ok()?;
    let mac = fields.next()?.parse().ok()?;
    (flags & COMPLETE != 0).then_some((mac, ip))
}

/// Not an address to reach the guest by.
fn is_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local() || ip.is_unspecified(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified(),
    }
}

/// The addresses of one instance, the best first: by interface, then IPv4, then the surest source.
fn of_instance(instance: InstanceId, nics: u8, seen: &Seen) -> Vec<Address> {
    let mut found: Vec<Address> = Vec::new();
    for nic in 0..nics {
        let mac = instance.mac(nic);
        let mut known: Vec<_> = seen.get(&mac).into_iter().flatten().collect();
        known.sort_by_key(|(ip, source)| (ip.is_ipv6(), rank(*source)));
        for (ip, source) in known {
            if !found.iter().any(|address| address.nic == nic && address.ip == *ip) {
                found.push(Address { ip: *ip, mac, nic, source: *source });
            }
        }
    }
    found
}

fn rank(source: AddressSource) -> u8 {
    match source {
        AddressSource::Lease => 0,
        AddressSource::Agent => 1,
        AddressSource::Arp => 2,
    }
}

/// What guests' agents last said.
#[derive(Debug, Default)]
pub(crate) struct Agents(Mutex<HashMap<InstanceId, Asked>>);

#[derive(Debug)]
struct Asked {
    asked: Instant,
    wanted: Instant,
    under_way: bool,
    answer: Vec<(MacAddr, IpAddr)>,
}

impl Agents {
    fn map(&self) -> MutexGuard<'_, HashMap<InstanceId, Asked>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last answer, and whether it is time to ask again; then the caller must.
    fn look(&self, instance: InstanceId, now: Instant) -> (Vec<(MacAddr, IpAddr)>, bool) {
        let mut map = self.map();
        map.retain(|_, asked| asked.under_way || now.duration_since(asked.wanted) < AGENT_KEEP);
        let mut first = false;
        let asked = map.entry(instance).or_insert_with(|| {
            first = true;
            Asked { asked: now, wanted: now, under_way: false, answer: Vec::new() }
        });
        asked.wanted = now;
        let due = !asked.under_way && (first || now.duration_since(asked.asked) >= AGENT_INTERVAL);
        if due {
            asked.under_way = true;
            asked.asked = now;
        }
        (asked.answer.clone(), due)
    }

    fn answered(&self, instance: InstanceId, answer: Vec<(MacAddr, IpAddr)>) {
        if let Some(asked) = self.map().get_mut(&instance) {
            asked.under_way = false;
            asked.answer = answer;
        }
    }

    /// Forgets an instance that is gone.
    pub(crate) fn forget(&self, instance: InstanceId) {
        self.map().remove(&instance);
    }
}

/// Puts together what the host sees and what agents said, and has those agents asked that are due.
pub(crate) fn collect(
    instances: &[InstanceId],
    nics: u8,
    mut seen: Seen,
    agents: &Arc<Agents>,
    ask: impl Fn(InstanceId),
) -> HashMap<InstanceId, Vec<Address>> {
    let mut found = HashMap::new();
    for instance in instances {
        let has_lease = seen
            .get(&instance.mac(0))
            .is_some_and(|known| known.iter().any(|(_, source)| *source == AddressSource::Lease));
        if nics > 1 || !has_lease {
            let (answer, due) = agents.look(*instance, Instant::now());
            for (mac, ip) in answer {
                seen.entry(mac).or_default().push((ip, AddressSource::Agent));
            }
            if due {
                ask(*instance);
            }
        }
        let addresses = of_instance(*instance, nics, &seen);
        if !addresses.is_empty() {
            found.insert(*instance, addresses);
        }
    }
    found
}

/// Asks one guest's agent and keeps the answer. No agent is the usual case and no error.
pub(crate) async fn ask_agent(lane: Arc<Lane>, agents: Arc<Agents>, node: NodeId, instance: InstanceId) {
    let what = format!("ask the guest agent of {instance}");
    let result: HypervisorResult<Vec<GuestInterface>> = lane
        .call(what, Scope::Host, move |connect| match domain::find(connect, node, instance)? {
            Found::Ours(domain) if domain.is_active()? => Ok(sys::agent_addresses(&domain)?),
            _ => Ok(Vec::new()),
        })
        .await;
    let interfaces = result.unwrap_or_else(|error| {
        tracing::trace!(%instance, %error, "no answer from the guest agent");
        Vec::new()
    });
    agents.answered(instance, interfaces.iter().flat_map(usable).collect());
}

fn usable(interface: &GuestInterface) -> impl Iterator<Item = (MacAddr, IpAddr)> + use<'_> {
    let mac: Option<MacAddr> = interface.mac.as_ref().and_then(|mac| mac.parse().ok());
    let ips = interface.ips.iter().filter_map(|ip| ip.parse().ok()).filter(|ip| !is_local(ip));
    mac.into_iter().flat_map(move |mac| ips.clone().map(move |ip| (mac, ip)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance() -> InstanceId {
        "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap()
    }

    #[test]
    fn only_complete_neighbours_count() {
        let line = "10.0.0.7         0x1         0x2         52:00:00:00:00:01     *        virbr0";
        assert_eq!(neighbour(line).unwrap().1.to_string(), "10.0.0.7");
        assert!(neighbour(&line.replace("0x2", "0x0")).is_none());
        assert!(
            neighbour("IP address       HW type     Flags       HW address            Mask     Device")
                .is_none()
        );
    }

    #[test]
    fn an_expired_lease_does_not_count_and_an_endless_one_does() {
        let lease = |expires| Lease { mac: Some("52:00:00:00:00:01".into()), ip: "10.0.0.7".into(), expires };
        assert!(living(&lease(99), 100).is_none());
        assert!(living(&lease(101), 100).is_some());
        assert!(living(&lease(0), 100).is_some());
    }

    #[test]
    fn the_first_address_is_the_first_interfaces_ipv4_lease() {
        let (ip4, ip6): (IpAddr, IpAddr) = ("10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap());
        let mut seen = Seen::new();
        seen.insert(
            instance().mac(0),
            vec![(ip6, AddressSource::Lease), (ip4, AddressSource::Arp), (ip4, AddressSource::Lease)],
        );
        seen.insert(instance().mac(1), vec![("192.0.2.9".parse().unwrap(), AddressSource::Arp)]);
        let found = of_instance(instance(), 2, &seen);
        assert_eq!(
            found.iter().map(|a| (a.nic, a.ip.to_string(), a.source)).collect::<Vec<_>>(),
            [
                (0, "10.0.0.7".into(), AddressSource::Lease),
                (0, "fd00::7".into(), AddressSource::Lease),
                (1, "192.0.2.9".into(), AddressSource::Arp),
            ]
        );
    }

    #[test]
    fn agents_are_asked_where_no_lease_tells_once_at_a_time_and_seldom() {
        let (agents, begin) = (Agents::default(), Instant::now());
        let ip: IpAddr = "10.0.0.7".parse().unwrap();
        let due = |after| agents.look(instance(), begin + after).1;
        assert!(due(Duration::ZERO));
        assert!(!due(Duration::from_secs(9)), "one question at a time");
        agents.answered(instance(), vec![(instance().mac(0), ip)]);
        assert!(due(Duration::from_secs(10)));
        agents.answered(instance(), vec![(instance().mac(0), ip)]);
        assert!(!due(Duration::from_secs(11)), "too soon");

        let agents = Arc::new(agents);
        let asked = Mutex::new(0);
        let count = |_| *asked.lock().unwrap() += 1;
        let lease = Seen::from([(instance().mac(0), vec![(ip, AddressSource::Lease)])]);
        collect(&[instance()], 1, lease, &Arc::new(Agents::default()), count);
        assert_eq!(*asked.lock().unwrap(), 0, "the lease tells");
        let found = collect(&[instance()], 1, Seen::new(), &agents, count);
        assert_eq!(found[&instance()][0].source, AddressSource::Agent);
    }

    #[test]
    fn loopback_and_link_local_are_not_told() {
        let interface = GuestInterface {
            mac: Some(instance().mac(0).to_string()),
            ips: ["127.0.0.1", "fe80::1", "169.254.3.4", "10.0.0.7", "x"].map(Into::into).to_vec(),
        };
        assert_eq!(usable(&interface).map(|(_, ip)| ip.to_string()).collect::<Vec<_>>(), ["10.0.0.7"]);
    }
}
