//! From what is there and what shall be to the elements that go in and out. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use ec_model::MacAddr;

use crate::{Pin, Tap, have::Have, ports::mark_of};

/// What shall be in the tables, as far as one agent knows it.
#[derive(Debug, Default, Clone)]
pub struct Want {
    /// Whose endpoints these are: others' are left alone.
    pub owner: String,
    /// The bridge of the guests, where nothing but guests is on it: what they may ask of the host is limited.
    pub bridge: Option<String>,
    /// What no guest may reach.
    pub control: BTreeSet<SocketAddr>,
    /// Whether that is all of it: else what was put there before stays.
    pub control_known: bool,
    /// The ports of this agent's guests.
    pub taps: Vec<Tap>,
    /// Ports of other agents' guests, up or not: what was said of them stays.
    pub others: BTreeSet<String>,
    /// The living leases of the guests' network.
    pub leases: BTreeMap<Ipv4Addr, MacAddr>,
    /// Who had which address last, also where that lease has ended: a guest that stood still meanwhile goes on with it.
    pub last: BTreeMap<Ipv4Addr, MacAddr>,
    /// This host's own addresses on it, of whose subnets alone its DHCP server gives out others; none where that is not known.
    pub subnets: Vec<Subnet>,
}

/// An address of this host, and of how many bits those begin with the same that are on the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet {
    /// The host's own.
    pub host: Ipv4Addr,
    /// The length of the prefix.
    pub prefix: u32,
}

impl Subnet {
    /// Whether a DHCP server there can give out `address`.
    fn can_give(self, address: Ipv4Addr) -> bool {
        let rest = u32::MAX.checked_shr(self.prefix).unwrap_or(0);
        let (own, asked) = (self.host.to_bits(), address.to_bits());
        own & !rest == asked & !rest && own != asked && ![0, rest].contains(&(asked & rest))
    }
}

impl Want {
    /// Whether a port whose guest has this hardware address may keep an address that it has learnt.
    fn may_keep(&self, mac: MacAddr, address: Ipv4Addr) -> bool {
        match self.leases.get(&address) {
            Some(holder) => *holder == mac,
            // That a lease is not told may mean that the network was restarted and forgot it. But under rules before
            // the sixth version a guest could have any address learnt, and sets outlive rules.
            None => self.subnets.is_empty() || self.can_give(address),
        }
    }

    fn can_give(&self, address: Ipv4Addr) -> bool {
        self.subnets.iter().any(|subnet| subnet.can_give(address))
    }

    /// The addresses that a guest goes on with after its leases have ended: those that it had last, if it has been given none since and
    /// they are nobody else's. dnsmasq asks whether somebody has an address before it gives that to another, which this guest
    /// can answer then.
    fn left_to(&self, mac: MacAddr) -> impl Iterator<Item = Ipv4Addr> {
        let has_none = self.leases.values().all(|holder| *holder != mac);
        let last = self.last.iter().filter(move |(_, holder)| has_none && **holder == mac);
        last.map(|(address, _)| *address)
            .filter(|address| !self.leases.contains_key(address) && self.can_give(*address))
    }
}

/// Lines of a script.
#[derive(Default)]
struct Script(String);

impl Script {
    fn element(&mut self, verb: &str, table: &str, set: &str, element: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{verb} element {table} ecompute {set} {{ {element} }}");
    }

    fn add(&mut self, set: &str, element: &str) {
        self.element("add", "bridge", set, element);
    }

    fn delete(&mut self, set: &str, element: &str) {
        self.element("delete", "bridge", set, element);
    }
}

fn with_mac(tap: &str, mac: MacAddr) -> String {
    format!("\"{tap}\" . {mac}")
}

fn with_chaddr(tap: &str, mac: MacAddr) -> String {
    format!("\"{tap}\" . 0x{}", mac.0.map(|octet| format!("{octet:02x}")).concat())
}

fn with_ip4(tap: &str, address: Ipv4Addr) -> String {
    format!("\"{tap}\" . {:#x}", address.to_bits())
}

/// Everything that one port's guest needs, added blindly: what is there already stays.
pub(crate) fn admit(taps: &[Tap], leases: &BTreeMap<Ipv4Addr, MacAddr>) -> String {
    let mut script = Script::default();
    let want = Want { leases: leases.clone(), ..Want::default() };
    for tap in taps {
        put(&mut script, tap, &Have::default(), &want);
    }
    script.0
}

/// What makes the tables as they shall be, apart from the rules; `gone` are ports and bridges that nobody has
/// any more.
pub(crate) fn elements(have: &Have, want: &Want, gone: &BTreeSet<String>) -> String {
    let mut script = Script::default();
    for tap in gone {
        forget(&mut script, tap, have);
    }
    for tap in &want.taps {
        put(&mut script, tap, have, want);
    }
    if let Some(bridge) = want.bridge.as_ref().filter(|bridge| !have.bridges.contains(*bridge)) {
        script.element("add", "inet", "bridges", &format!("\"{bridge}\""));
    }
    for (endpoint, owner) in &have.control {
        if want.control_known && *owner == want.owner && !want.control.contains(endpoint) {
            script.delete(control_set(endpoint), &control_element(endpoint));
        }
    }
    for endpoint in want.control.iter().filter(|endpoint| !have.control.contains_key(endpoint)) {
        let element = format!("{} comment \"{}\"", control_element(endpoint), want.owner);
        script.add(control_set(endpoint), &element);
    }
    script.0
}

/// Takes away everything of these ports, this bridge and this owner.
pub(crate) fn release(have: &Have, want: &Want) -> String {
    let mut script = Script::default();
    for tap in &want.taps {
        forget(&mut script, &tap.name, have);
    }
    if let Some(bridge) = want.bridge.as_ref().filter(|bridge| have.bridges.contains(*bridge)) {
        script.element("delete", "inet", "bridges", &format!("\"{bridge}\""));
    }
    for (endpoint, _) in have.control.iter().filter(|(_, owner)| **owner == want.owner) {
        script.delete(control_set(endpoint), &control_element(endpoint));
    }
    script.0
}

fn control_set(endpoint: &SocketAddr) -> &'static str {
    if endpoint.is_ipv4() { "control4" } else { "control6" }
}

fn control_element(endpoint: &SocketAddr) -> String {
    match endpoint.ip() {
        IpAddr::V4(ip) => format!("{ip} . {}", endpoint.port()),
        IpAddr::V6(ip) => format!("{ip} . {}", endpoint.port()),
    }
}

fn put(script: &mut Script, tap: &Tap, have: &Have, want: &Want) {
    let Tap { name, mac, pin } = tap;
    // First what the port may send, then the rule that asks for it: in one transaction it would not
    // matter, but it reads as it is meant.
    for (set, entries, element) in [
        ("own_mac", &have.own_mac, with_mac as fn(&str, MacAddr) -> String),
        ("own_chaddr", &have.own_chaddr, with_chaddr),
    ] {
        let mut there = false;
        // A name like vnet0 is given to one guest after the other.
        for (_, other) in entries.iter().filter(|(port, _)| port == name) {
            if other == mac {
                there = true;
            } else {
                script.delete(set, &element(name, *other));
            }
        }
        if !there {
            script.add(set, &element(name, *mac));
        }
    }
    match have.marks.get(name) {
        Some(mark) if *mark == mark_of(*mac) => {}
        other => {
            if other.is_some() {
                script.delete("marks", &format!("\"{name}\""));
            }
            script.add("marks", &format!("\"{name}\" : {:#x}", mark_of(*mac)));
        }
    }
    let stranger = have.own_mac.iter().any(|(port, other)| port == name && other != mac);
    for (_, address) in have.own_ip4.iter().filter(|(port, _)| port == name) {
        // Where a port has its hardware address only, its addresses hold nothing, and another network's may be among them.
        if stranger || *pin == Pin::Learned && !want.may_keep(*mac, *address) {
            script.delete("own_ip4", &with_ip4(name, *address));
        }
    }
    for (address, _) in want.leases.iter().filter(|(_, holder)| *holder == mac) {
        if stranger || !have.own_ip4.contains(&(name.clone(), *address)) {
            script.add("own_ip4", &with_ip4(name, *address));
        }
    }
    if *pin == Pin::Learned {
        for address in want.left_to(*mac) {
            // The kernel may have noted an answer to another that no lease tells yet.
            let elsewhere = have.own_ip4.iter().any(|(port, known)| port != name && *known == address);
            if !elsewhere && (stranger || !have.own_ip4.contains(&(name.clone(), address))) {
                script.add("own_ip4", &with_ip4(name, address));
            }
        }
    }
    let quoted = format!("\"{name}\"");
    let (on, on_have, off, off_have) = match pin {
        Pin::Learned => ("taps", &have.taps, "taps_mac", &have.taps_mac),
        Pin::Mac => ("taps_mac", &have.taps_mac, "taps", &have.taps),
    };
    if !on_have.contains(name) {
        script.add(on, &quoted);
    }
    if off_have.contains(name) {
        script.delete(off, &quoted);
    }
}

fn forget(script: &mut Script, tap: &str, have: &Have) {
    let quoted = format!("\"{tap}\"");
    for (set, entries) in [("taps", &have.taps), ("taps_mac", &have.taps_mac)] {
        if entries.contains(tap) {
            script.delete(set, &quoted);
        }
    }
    if have.bridges.contains(tap) {
        script.element("delete", "inet", "bridges", &quoted);
    }
    if have.marks.contains_key(tap) {
        script.delete("marks", &quoted);
    }
    for (_, mac) in have.own_mac.iter().filter(|(port, _)| port == tap) {
        script.delete("own_mac", &with_mac(tap, *mac));
    }
    for (_, mac) in have.own_chaddr.iter().filter(|(port, _)| port == tap) {
        script.delete("own_chaddr", &with_chaddr(tap, *mac));
    }
    for (_, address) in have.own_ip4.iter().filter(|(port, _)| port == tap) {
        script.delete("own_ip4", &with_ip4(tap, *address));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddr = MacAddr([0x52, 0, 0, 0, 0, 1]);
    const OTHER: MacAddr = MacAddr([0x52, 0, 0, 0, 0, 2]);

    fn ip(last: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 0, 0, last)
    }

    fn tap(name: &str) -> Tap {
        Tap { name: name.into(), mac: MAC, pin: Pin::Learned }
    }

    /// The tables as they are with that one guest.
    fn full(name: &str) -> Have {
        Have {
            taps: [name.to_owned()].into(),
            own_mac: [(name.to_owned(), MAC)].into(),
            own_chaddr: [(name.to_owned(), MAC)].into(),
            own_ip4: [(name.to_owned(), ip(1))].into(),
            marks: [(name.to_owned(), mark_of(MAC))].into(),
            ..Have::default()
        }
    }

    fn want(taps: Vec<Tap>) -> Want {
        Want { owner: "me".into(), taps, leases: [(ip(1), MAC)].into(), ..Want::default() }
    }

    #[test]
    fn a_guest_that_is_there_as_it_shall_be_costs_nothing() {
        assert_eq!(elements(&full("t"), &want(vec![tap("t")]), &BTreeSet::new()), "");
    }

    #[test]
    fn a_new_guest_gets_all_its_elements() {
        let script = elements(&Have::default(), &want(vec![tap("t")]), &BTreeSet::new());
        assert_eq!(
            script,
            "add element bridge ecompute own_mac { \"t\" . 52:00:00:00:00:01 }\n\
             add element bridge ecompute own_chaddr { \"t\" . 0x520000000001 }\n\
             add element bridge ecompute marks { \"t\" : 0xec000001 }\n\
             add element bridge ecompute own_ip4 { \"t\" . 0xa000001 }\n\
             add element bridge ecompute taps { \"t\" }\n"
        );
        assert_eq!(admit(&[tap("t")], &[(ip(1), MAC)].into()), script);
    }

    #[test]
    fn what_is_not_ours_stays_and_what_is_gone_goes_whole() {
        let mut have = full("t");
        have.control.insert("10.0.0.9:2379".parse().unwrap(), "another".into());
        have.bridges.insert("br9".into());
        assert_eq!(elements(&have, &want(vec![]), &BTreeSet::new()), "");
        let script = elements(&have, &want(vec![]), &["t".to_owned()].into());
        assert_eq!(script.lines().count(), 5, "{script}");
        assert!(script.lines().all(|line| line.starts_with("delete") && line.contains("\"t\"")), "{script}");
    }

    #[test]
    fn an_address_goes_only_when_another_has_it_now() {
        let mut wanted = want(vec![tap("t")]);
        wanted.leases.clear();
        assert_eq!(elements(&full("t"), &wanted, &BTreeSet::new()), "", "a lease that is not told");
        wanted.leases = [(ip(1), OTHER)].into();
        let script = elements(&full("t"), &wanted, &BTreeSet::new());
        assert_eq!(script, "delete element bridge ecompute own_ip4 { \"t\" . 0xa000001 }\n");
    }

    #[test]
    fn a_guest_keeps_the_address_that_it_had_last_unless_that_is_anothers_by_now() {
        let mut wanted = want(vec![tap("t")]);
        wanted.leases.clear();
        wanted.last = [(ip(1), MAC), (ip(2), OTHER)].into();
        wanted.subnets = vec![Subnet { host: ip(254), prefix: 24 }];
        let mut have = full("t");
        have.own_ip4.clear();
        let put = |have: &Have, want: &Want| elements(have, want, &BTreeSet::new());
        assert_eq!(put(&have, &wanted), "add element bridge ecompute own_ip4 { \"t\" . 0xa000001 }\n");
        assert_eq!(put(&full("t"), &wanted), "", "it is there");
        let renewed = Want { leases: [(ip(3), MAC)].into(), ..wanted.clone() };
        assert!(!put(&have, &renewed).contains("0xa000001"), "it has been given another");
        let given = Want { leases: [(ip(1), OTHER)].into(), ..wanted.clone() };
        assert_eq!(put(&have, &given), "", "another has the lease");
        let elsewhere = Want { subnets: vec![Subnet { host: ip(1), prefix: 24 }], ..wanted.clone() };
        assert_eq!(put(&have, &elsewhere), "", "it is the host's own");
        assert_eq!(put(&have, &Want { subnets: vec![], ..wanted.clone() }), "", "nobody knows whose it is");
        let held = Want { taps: vec![Tap { pin: Pin::Mac, ..tap("t") }], ..wanted.clone() };
        assert!(!put(&have, &held).contains("own_ip4"), "its addresses hold nothing");
        have.own_ip4 = [("u".to_owned(), ip(1))].into();
        assert_eq!(put(&have, &wanted), "", "another was given it just now");
    }

    #[test]
    fn an_address_that_no_dhcp_server_of_ours_can_give_goes() {
        let mut wanted = want(vec![tap("t")]);
        wanted.leases.clear();
        wanted.subnets = vec![
            Subnet { host: ip(254), prefix: 24 },
            Subnet { host: Ipv4Addr::new(10, 1, 0, 1), prefix: 16 },
        ];
        let (metadata, other_end) = (Ipv4Addr::new(169, 254, 169, 254), Ipv4Addr::new(10, 1, 255, 255));
        let learnt = [ip(1), Ipv4Addr::new(10, 1, 7, 0), ip(254), ip(0), ip(255), metadata, other_end];
        let mut have = full("t");
        have.own_ip4 = learnt.map(|address| ("t".to_owned(), address)).into();
        let gone = |want: &Want| {
            let script = elements(&have, want, &BTreeSet::new());
            learnt
                .iter()
                .filter(|address| {
                    script.contains(&format!(
                        "delete element bridge ecompute own_ip4 {{ {} }}",
                        with_ip4("t", **address)
                    ))
                })
                .copied()
                .collect::<Vec<_>>()
        };
        assert_eq!(gone(&wanted), learnt[2..]);
        let told = Want { leases: [(metadata, MAC)].into(), ..wanted.clone() };
        assert!(!gone(&told).contains(&metadata), "whoever gives it out says that it is this guest's");
        let unknown = Want { subnets: vec![], ..wanted.clone() };
        assert!(gone(&unknown).is_empty(), "of a network of which nothing is known");
        let elsewhere = Want { taps: vec![Tap { pin: Pin::Mac, ..tap("t") }], ..wanted };
        assert!(gone(&elsewhere).is_empty(), "of another network, whose addresses hold nothing");
    }

    #[test]
    fn a_name_that_another_guest_had_keeps_nothing_of_it() {
        let mut have = full("vnet0");
        have.own_mac = [("vnet0".to_owned(), OTHER)].into();
        have.own_chaddr = have.own_mac.clone();
        have.marks = [("vnet0".to_owned(), mark_of(OTHER))].into();
        have.own_ip4 = [("vnet0".to_owned(), ip(2))].into();
        let script = elements(&have, &want(vec![tap("vnet0")]), &BTreeSet::new());
        for wanted in [
            "delete element bridge ecompute own_mac { \"vnet0\" . 52:00:00:00:00:02 }",
            "delete element bridge ecompute own_chaddr { \"vnet0\" . 0x520000000002 }",
            "delete element bridge ecompute own_ip4 { \"vnet0\" . 0xa000002 }",
            "delete element bridge ecompute marks { \"vnet0\" }",
            "add element bridge ecompute marks { \"vnet0\" : 0xec000001 }",
            "add element bridge ecompute own_ip4 { \"vnet0\" . 0xa000001 }",
        ] {
            assert!(script.lines().any(|line| line == wanted), "no {wanted} in {script}");
        }
    }

    #[test]
    fn another_pin_moves_the_port_from_one_set_to_the_other() {
        let moved = Tap { pin: Pin::Mac, ..tap("t") };
        let script = elements(&full("t"), &want(vec![moved]), &BTreeSet::new());
        assert_eq!(
            script,
            "add element bridge ecompute taps_mac { \"t\" }\ndelete element bridge ecompute taps { \"t\" }\n"
        );
    }

    #[test]
    fn who_goes_takes_its_own_and_nothing_else() {
        let mut have = full("t");
        have.taps.insert("ecother".into());
        have.bridges = ["br0", "br1"].map(str::to_owned).into();
        have.control.insert("10.0.0.1:2379".parse().unwrap(), "me".into());
        have.control.insert("10.0.0.2:2379".parse().unwrap(), "another".into());
        let wanted = Want { bridge: Some("br0".into()), ..want(vec![tap("t")]) };
        let script = release(&have, &wanted);
        assert_eq!(script.lines().count(), 7, "{script}");
        assert!(script.lines().all(|line| line.starts_with("delete")), "{script}");
        assert!(
            !script.contains("ecother") && !script.contains("br1") && !script.contains("10.0.0.2"),
            "{script}"
        );
        assert_eq!(release(&Have::default(), &wanted), "");
    }

    #[test]
    fn endpoints_come_and_go_with_their_owner() {
        let mut have = Have::default();
        for (endpoint, owner) in
            [("10.0.0.1:2379", "me"), ("[fd00::1]:8080", "me"), ("10.0.0.3:2379", "another")]
        {
            have.control.insert(endpoint.parse().unwrap(), owner.into());
        }
        let mut wanted = want(vec![]);
        wanted.control = ["10.0.0.1:2379", "10.0.0.2:2379"].map(|text| text.parse().unwrap()).into();
        wanted.bridge = Some("virbr0".into());
        let unsure = elements(&have, &wanted, &BTreeSet::new());
        assert!(!unsure.contains("delete"), "a name that nobody tells now may mean what it meant: {unsure}");
        wanted.control_known = true;
        assert_eq!(
            elements(&have, &wanted, &BTreeSet::new()),
            "add element inet ecompute bridges { \"virbr0\" }\n\
             delete element bridge ecompute control6 { fd00::1 . 8080 }\n\
             add element bridge ecompute control4 { 10.0.0.2 . 2379 comment \"me\" }\n"
        );
    }
}
