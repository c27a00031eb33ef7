//! What addresses guests have: DHCP leases, the host's neighbour table, the guest's own agent.
//!
//! Leases come in one call for all and tell of an address at once. A neighbour counts only on a bridge of
//! ours, and only where the bridge has seen its hardware address behind that guest's own port: anybody can
//! answer ARP for anybody. The agent may block, so it is asked aside, seldom, only where the others cannot
//! know, and its last answer is what counts.
//!
//! What a guest says is bounded: so many addresses for each interface, and so many changes in a time.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ec_guard::ports::{self, Ports, is_tap_of};
use ec_hypervisor::{AddressRoom, HypervisorResult};
use ec_model::{Address, AddressSource, InstanceId, MacAddr, NodeId};
use virt::{connect::Connect, network::Network};

use crate::{
    calls::Scope,
    config::LibvirtConfig,
    domain::{self, Found},
    error::CallError,
    lane::Lanes,
    sys::{self, GuestInterface, Lease},
    xml::{self, NetworkXml},
};

/// How often one guest's agent is asked.
const AGENT_INTERVAL: Duration = Duration::from_secs(2);

/// How long an agent's answer is kept for an instance that nobody asks about.
const AGENT_KEEP: Duration = Duration::from_secs(60);

/// The most addresses that are told of one interface.
const ADDRESSES_MAX: usize = 16;

/// So many changes of an instance's addresses are told at once: a start brings one for each interface and
/// family.
const CHANGES_MAX: u32 = 8;

/// And then one in such a time: a guest can have another address whenever it likes.
const CHANGE_INTERVAL: Duration = Duration::from_secs(60);

type Seen = HashMap<MacAddr, Vec<(IpAddr, AddressSource)>>;

/// Leases, and the neighbours that are these instances' own.
pub(crate) fn seen_by_host(
    connect: &Connect,
    config: &LibvirtConfig,
    instances: &[InstanceId],
) -> Result<Seen, CallError> {
    let network = connect.lookup_network_by_name(&config.network)?;
    let mut seen = Seen::new();
    for (mac, ip) in leases(&network)? {
        seen.entry(mac).or_default().push((ip, AddressSource::Lease));
    }
    for (nic, bridge) in [(0, network.bridge_name().ok()), (1, config.bridge.clone())] {
        if let Some(bridge) = bridge {
            // A host without the table has no IPv4 neighbours.
            for (mac, ip) in neighbours(&bridge, nic, instances).unwrap_or_default() {
                note_neighbour(&mut seen, mac, ip);
            }
        }
    }
    Ok(seen)
}

/// Where a lease tells, a neighbour tells nothing more: an entry of the table says who answered, not from
/// where, and what the bridge has seen last may be another than who answered.
fn note_neighbour(seen: &mut Seen, mac: MacAddr, ip: IpAddr) {
    let known = seen.entry(mac).or_default();
    if known.iter().all(|(_, source)| *source != AddressSource::Lease) {
        known.push((ip, AddressSource::Arp));
    }
}

/// The leases that have not ended, the newest first: a guest whose first stage of booting names itself otherwise than
/// its system does (Debian's do) has two for a while, and only the newer one is still its address.
pub(crate) fn leases(network: &Network) -> Result<Vec<(MacAddr, IpAddr)>, CallError> {
    let mut leases = sys::dhcp_leases(network)?;
    newest_first(&mut leases);
    let now = now();
    Ok(leases.iter().filter_map(|lease| living(lease, now)).collect())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

/// What is left of the addresses that the network gives. A lease is counted until it ends, whoever had it: dnsmasq gives its address
/// to nobody else before.
pub(crate) fn room(connect: &Connect, config: &LibvirtConfig) -> Result<Option<AddressRoom>, CallError> {
    let network = connect.lookup_network_by_name(&config.network)?;
    let what: NetworkXml = xml::read(&network.xml_desc(0)?).map_err(CallError::Refused)?;
    let (ranges, kept) = what.gives();
    if ranges.is_empty() {
        return Ok(None);
    }
    Ok(Some(left(&config.network, &ranges, kept, &sys::dhcp_leases(&network)?, now())))
}

fn left(
    network: &str,
    ranges: &[RangeInclusive<Ipv4Addr>],
    kept: BTreeSet<Ipv4Addr>,
    leases: &[Lease],
    now: u64,
) -> AddressRoom {
    let is_given = |ip: &Ipv4Addr| ranges.iter().any(|range| range.contains(ip));
    let living = leases.iter().filter(|lease| !has_ended(lease, now));
    let leased = living.filter_map(|lease| Some((lease.ip.parse().ok().filter(is_given)?, lease.expires)));
    let leased: Vec<(Ipv4Addr, i64)> = leased.collect();
    let ends = leased.iter().filter_map(|(_, expires)| u64::try_from(*expires).ok().filter(|at| *at > 0));
    let next = ends.min().map(|at| Duration::from_secs(at - now));
    let sizes = ranges
        .iter()
        .map(|range| u64::from(range.end().to_bits().saturating_sub(range.start().to_bits())) + 1);
    let kept = kept.into_iter().filter(is_given);
    let taken: BTreeSet<Ipv4Addr> = leased.iter().map(|(ip, _)| *ip).chain(kept).collect();
    let (total, taken) = (sizes.sum::<u64>(), u64::try_from(taken.len()).unwrap_or(u64::MAX));
    AddressRoom { network: network.to_owned(), left: total.saturating_sub(taken), total, next }
}

/// All leases of a network last equally long, so the one that ends last was given or renewed last; 0 is no end.
fn newest_first(leases: &mut [Lease]) {
    leases.sort_by_key(|lease| std::cmp::Reverse(if lease.expires == 0 { i64::MAX } else { lease.expires }));
}

fn living(lease: &Lease, now: u64) -> Option<(MacAddr, IpAddr)> {
    if has_ended(lease, now) {
        None
    } else {
        Some((lease.mac.as_ref()?.parse().ok()?, lease.ip.parse().ok()?))
    }
}

fn has_ended(lease: &Lease, now: u64) -> bool {
    u64::try_from(lease.expires).is_ok_and(|expires| expires > 0 && expires <= now)
}

/// The neighbours on a bridge that are one of these instances and sit on its port.
fn neighbours(bridge: &str, nic: u8, instances: &[InstanceId]) -> std::io::Result<Vec<(MacAddr, IpAddr)>> {
    let macs: HashSet<MacAddr> = instances.iter().map(|instance| instance.mac(nic)).collect();
    let mut found = ports::neighbours()?;
    found.retain(|neighbour| neighbour.device == bridge && macs.contains(&neighbour.mac));
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let ports = Ports::of(bridge)?;
    let sits = |mac| ports.get(mac).is_some_and(|port| is_tap_of(port, mac));
    Ok(found.into_iter().filter(|found| sits(found.mac)).map(|found| (found.mac, found.ip.into())).collect())
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
        let mut told = HashSet::new();
        let distinct = known.into_iter().filter(|(ip, _)| told.insert(*ip)).take(ADDRESSES_MAX);
        found.extend(distinct.map(|(ip, source)| Address { ip: *ip, mac, nic, source: *source }));
    }
    found
}

fn rank(source: AddressSource) -> u8 {
    match source {
        AddressSource::Lease => 0,
        AddressSource::Agent => 1,
        AddressSource::Arp | AddressSource::Unknown => 2,
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

    /// What became of a question. One that nobody could answer now says nothing of the guest, and its last answer counts.
    fn told(&self, instance: InstanceId, result: HypervisorResult<Vec<GuestInterface>>) {
        let answer = match result {
            Ok(interfaces) => Some(interfaces.iter().flat_map(usable).collect()),
            Err(error) => {
                tracing::trace!(%instance, %error, "no answer from the guest agent");
                (!error.is_transient()).then(Vec::new)
            }
        };
        if let Some(asked) = self.map().get_mut(&instance) {
            asked.under_way = false;
            if let Some(answer) = answer {
                asked.answer = answer;
            }
        }
    }

    /// Forgets an instance that is gone.
    pub(crate) fn forget(&self, instance: InstanceId) {
        self.map().remove(&instance);
    }
}

/// What was last told of each instance's addresses, and how many changes it may still have.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<HashMap<InstanceId, Last>>);

#[derive(Debug)]
struct Last {
    addresses: Vec<Address>,
    asked: Instant,
    changes: u32,
    counted: Instant,
}

impl Told {
    /// What is told now: the addresses found, or those of before where they change too often.
    fn settle(&self, instance: InstanceId, found: Vec<Address>, now: Instant) -> Vec<Address> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let keep = CHANGE_INTERVAL * CHANGES_MAX;
        map.retain(|_, last| now.duration_since(last.asked) < keep);
        let last = map.entry(instance).or_insert_with(|| Last {
            addresses: Vec::new(),
            asked: now,
            changes: CHANGES_MAX,
            counted: now,
        });
        last.asked = now;
        while last.changes < CHANGES_MAX && now.duration_since(last.counted) >= CHANGE_INTERVAL {
            last.changes += 1;
            last.counted += CHANGE_INTERVAL;
        }
        // Which of a guest's addresses comes first may differ from look to look.
        let same =
            last.addresses.len() == found.len() && found.iter().all(|one| last.addresses.contains(one));
        if !same && last.changes > 0 {
            if last.changes == CHANGES_MAX {
                last.counted = now;
            }
            last.changes -= 1;
            last.addresses = found;
        }
        last.addresses.clone()
    }

    /// Forgets an instance that is gone.
    pub(crate) fn forget(&self, instance: InstanceId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&instance);
    }
}

/// Puts together what the host sees and what agents said, and has those agents asked that are due.
pub(crate) fn collect(
    instances: &[InstanceId],
    nics: u8,
    mut seen: Seen,
    agents: &Arc<Agents>,
    told: &Told,
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
        let addresses = told.settle(*instance, of_instance(*instance, nics, &seen), Instant::now());
        if !addresses.is_empty() {
            found.insert(*instance, addresses);
        }
    }
    found
}

/// Asks one guest's agent and keeps the answer. No agent is the usual case and no error.
pub(crate) async fn ask_agent(
    lanes: Arc<Lanes>,
    agents: Arc<Agents>,
    node: NodeId,
    instance: InstanceId,
    nics: u8,
) {
    let what = format!("ask the guest agent of {instance}");
    let result: HypervisorResult<Vec<GuestInterface>> = lanes
        .call(what, Scope::Host, move |connect| match domain::find(connect, node, instance)? {
            Found::Ours(domain) if domain.is_active()? => {
                let macs: Vec<String> = (0..nics).map(|nic| instance.mac(nic).to_string()).collect();
                let ours = |mac: &str| macs.iter().any(|own| own.eq_ignore_ascii_case(mac));
                Ok(sys::agent_addresses(&domain, ours, ADDRESSES_MAX)?)
            }
            _ => Ok(Vec::new()),
        })
        .await;
    agents.told(instance, result);
}

fn usable(interface: &GuestInterface) -> impl Iterator<Item = (MacAddr, IpAddr)> + use<'_> {
    let mac: Option<MacAddr> = interface.mac.as_ref().and_then(|mac| mac.parse().ok());
    let ips = interface.ips.iter().filter_map(|ip| ip.parse().ok()).filter(|ip| !is_local(ip));
    mac.into_iter().flat_map(move |mac| ips.clone().map(move |ip| (mac, ip)))
}

#[cfg(test)]
mod tests {
    use ec_hypervisor::HypervisorError;

    use super::*;

    fn instance() -> InstanceId {
        "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap()
    }

    #[test]
    fn nobody_gives_a_guest_with_a_lease_another_address_by_arp() {
        let [lease, forged]: [IpAddr; 2] = ["10.0.0.7", "10.0.0.200"].map(|ip| ip.parse().unwrap());
        let (with, without) = (instance().mac(0), instance().mac(1));
        let mut seen = Seen::from([(with, vec![(lease, AddressSource::Lease)])]);
        note_neighbour(&mut seen, with, forged);
        note_neighbour(&mut seen, without, forged);
        assert_eq!(seen[&with], [(lease, AddressSource::Lease)]);
        assert_eq!(seen[&without], [(forged, AddressSource::Arp)]);
    }

    #[test]
    fn an_expired_lease_does_not_count_and_an_endless_one_does() {
        let lease = |expires| Lease { mac: Some("52:00:00:00:00:01".into()), ip: "10.0.0.7".into(), expires };
        assert!(living(&lease(99), 100).is_none());
        assert!(living(&lease(101), 100).is_some());
        assert!(living(&lease(0), 100).is_some());
    }

    #[test]
    fn an_address_is_taken_until_its_lease_ends_and_where_it_is_kept_for_somebody() {
        let ip = |last| Ipv4Addr::new(10, 0, 0, last);
        let lease = |last, expires| Lease { mac: None, ip: ip(last).to_string(), expires };
        let kept = || BTreeSet::from([ip(3), ip(200)]);
        let ranges = [ip(2)..=ip(4), ip(9)..=ip(9)];
        let room = |leases: &[Lease]| {
            let room = left("n", &ranges, kept(), leases, 100);
            (room.left, room.total, room.next.map(|next| next.as_secs()))
        };
        assert_eq!(room(&[]), (3, 4, None));
        assert_eq!(room(&[lease(2, 100), lease(201, 110)]), (3, 4, None), "one has ended, one is no other's");
        assert_eq!(room(&[lease(3, 500), lease(2, 0)]), (2, 4, Some(400)));
        assert_eq!(room(&[lease(2, 300), lease(4, 160), lease(9, 0), lease(3, 400)]), (0, 4, Some(60)));
    }

    #[test]
    fn of_two_leases_the_newer_one_is_the_address() {
        let lease =
            |ip: &str, expires| Lease { mac: Some(instance().mac(0).to_string()), ip: ip.into(), expires };
        let mut leases = [lease("10.0.0.5", 200), lease("10.0.0.9", 260), lease("10.0.0.7", 230)];
        newest_first(&mut leases);
        let living: Vec<_> = leases.iter().filter_map(|lease| living(lease, 100)).collect();
        let seen = living.into_iter().map(|(mac, ip)| (mac, (ip, AddressSource::Lease)));
        let mut by_mac = Seen::new();
        for (mac, known) in seen {
            by_mac.entry(mac).or_default().push(known);
        }
        let found: Vec<_> =
            of_instance(instance(), 1, &by_mac).iter().map(|found| found.ip.to_string()).collect();
        assert_eq!(found, ["10.0.0.9", "10.0.0.7", "10.0.0.5"]);
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
        let mac = Some(instance().mac(0).to_string());
        let tells = || Ok(vec![GuestInterface { mac: mac.clone(), ips: vec![ip.to_string()] }]);
        agents.told(instance(), tells());
        assert!(due(Duration::from_secs(10)));
        agents.told(instance(), tells());
        assert!(!due(Duration::from_secs(11)), "too soon");
        let (uri, detail) = ("test:".to_owned(), "libvirtd is started anew".to_owned());
        let answers = |after| agents.look(instance(), begin + Duration::from_secs(after)).0;
        answers(13);
        agents.told(instance(), Err(HypervisorError::Unreachable { uri, detail: detail.clone() }));
        assert_eq!(answers(16), [(instance().mac(0), ip)], "the guest has said nothing else");
        agents.told(instance(), Err(HypervisorError::Failed { what: "ask".to_owned(), detail }));
        assert_eq!(answers(19), [], "it has no agent any more");
        agents.told(instance(), tells());

        let agents = Arc::new(agents);
        let asked = Mutex::new(0);
        let count = |_| *asked.lock().unwrap() += 1;
        let told = Told::default();
        let lease = Seen::from([(instance().mac(0), vec![(ip, AddressSource::Lease)])]);
        collect(&[instance()], 1, lease, &Arc::new(Agents::default()), &Told::default(), count);
        assert_eq!(*asked.lock().unwrap(), 0, "the lease tells");
        let found = collect(&[instance()], 1, Seen::new(), &agents, &told, count);
        assert_eq!(found[&instance()][0].source, AddressSource::Agent);
    }

    #[test]
    fn a_guest_that_tells_of_a_hundred_thousand_addresses_is_cut_short_at_once() {
        let addresses = (0..100_000_u32).map(|n| (IpAddr::from(n.to_be_bytes()), AddressSource::Agent));
        let lease: IpAddr = "192.168.122.7".parse().unwrap();
        let mut known: Vec<_> = addresses.collect();
        known.push((lease, AddressSource::Lease));
        known.extend(known.clone());
        let seen = Seen::from([(instance().mac(0), known)]);
        let begun = Instant::now();
        let found = of_instance(instance(), 1, &seen);
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        assert_eq!(found.len(), ADDRESSES_MAX);
        assert_eq!(found[0].ip, lease, "the surest comes first");
    }

    #[test]
    fn a_guest_that_changes_its_addresses_all_the_time_is_told_of_once_in_a_while() {
        let (told, begin) = (Told::default(), Instant::now());
        let list = |n: u8| {
            let ip = IpAddr::from([10, 0, 0, n]);
            vec![Address { ip, mac: instance().mac(0), nic: 0, source: AddressSource::Agent }]
        };
        let mut changes = 0;
        let mut before = Vec::new();
        // Every ten seconds for an hour.
        for look in 0..360_u32 {
            let now = told.settle(
                instance(),
                list(u8::from(look % 2 == 0)),
                begin + Duration::from_secs(10) * look,
            );
            changes += u32::from(now != before);
            before = now;
        }
        assert!((60..=60 + CHANGES_MAX).contains(&changes), "{changes}");
        // One that keeps still is told of soon.
        let later = begin + Duration::from_secs(3600) + CHANGE_INTERVAL;
        assert_eq!(told.settle(instance(), list(9), later), list(9));
        // And those of another instance do not matter.
        let other: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ac".parse().unwrap();
        assert_eq!(told.settle(other, list(3), later), list(3));
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
