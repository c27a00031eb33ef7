//! The rules themselves, as `nft` reads them.
//!
//! ```text
//! frame from a guest ──▶ bridge prerouting: is the port one of ours?
//!                          taps      the address is known: MAC, ARP, IPv4, DHCP, neighbour discovery pinned
//!                          taps_mac  it is not (second interfaces): MAC pinned
//!                        both: no connection to etcd and placement; the port's mark on questions for metadata
//! packet for the host ─▶ inet input: does it come from a bridge of guests?
//!                          DHCP, DNS, metadata and ICMP; what answers the host; nothing else
//! DHCP answer of ours ─▶ bridge output: the kernel notes which address was given to which port
//! DHCP answer routed here ─▶ inet forward: dropped, since there it would pass for one of ours
//! question for metadata that is routed on ─▶ inet forward: dropped, since who answers elsewhere would answer this host
//! ```
//!
//! A drop in any table is final and an accept is not, so these tables live beside libvirt's, Docker's and
//! firewalld's. All that differs between hosts and guests is elements of sets: the rules are loaded anew
//! (in one transaction, so that there is no moment without them) while the sets stay as they are. A flushed
//! set would leave every guest mute until it renews its lease.

/// Grows with each change of the rules. An older agent leaves a newer one's alone.
pub(crate) const VERSION: u32 = 7;

/// What a rule's comment begins with that tells the version.
pub(crate) const VERSION_COMMENT: &str = "ecompute rules ";

/// Tables, sets and chains without their rules: adding what is there already changes nothing.
const FRAME: &str = r"
table bridge ecompute {
  set taps { type ifname; }
  set taps_mac { type ifname; }
  set own_mac { typeof iifname . ether saddr; }
  set own_chaddr { typeof oifname . @th,288,48; }
  set own_ip4 { typeof iifname . @nh,96,32; flags dynamic; size 65536; }
  set control4 { typeof ip daddr . tcp dport; }
  set control6 { typeof ip6 daddr . tcp dport; }
  map marks { type ifname : mark; }
  chain learn { type filter hook output priority -200; policy accept; }
  chain pre { type filter hook prerouting priority -310; policy accept; }
  chain port { }
  chain port_arp { }
  chain port_ip4 { }
  chain port_ip6 { }
  chain port_nd { }
  chain port_rs { }
  chain port_mac { }
}
table inet ecompute {
  set bridges { type ifname; }
  chain input { type filter hook input priority -10; policy accept; }
  chain forward { type filter hook forward priority -10; policy accept; }
  chain guests_in { }
}
";

/// The rules. Offsets in bits: in an ARP packet the sender's address is at 112; in a DHCP packet, from the
/// UDP header on, the address that the client has at 160, the one given at 192, the client's hardware address
/// at 288 and the first option, which dnsmasq makes the message's type, at 1984; in neighbour discovery the
/// address that is spoken of at 64, the first option at 192, the second at 256 and a third at 320. What a packet is too
/// short for matches nothing, `!=` included.
///
/// Who has an address already and asks for settings alone (DHCPINFORM) is answered as one that is given an
/// address, and dnsmasq leaves in that answer what the client wrote where that stands. So a client may write
/// nothing there, and an answer to one that has an address teaches nothing: what is renewed is known, or could
/// not have been asked for, and after a flush the next sync tells it.
///
/// At fe80::a9fe:a9fe cloud-init asks for metadata beside 169.254.169.254, and believes whoever answers first. No host of
/// ours has that address, and IPv6 addresses are not pinned: so nobody has it, and nobody is asked there.
///
/// Systems look for a hardware address among all options of neighbour discovery, and rules only at places: so there are
/// two options at most, of eight bytes each, and nothing but hardware addresses and the nonce of who looks whether its
/// address is free. Who asks for a router has one, and whoever routes believes it. In a packet's first part the options
/// may be missing that the next one brings; nobody needs that, and systems of today take no such parts (RFC 6980).
const RULES: &str = r#"
table bridge ecompute {
  chain learn {
    ether type ip udp sport 67 udp dport 68 @th,1984,24 0x350105 @th,160,32 0 oifname . @th,288,48 @own_chaddr update @own_ip4 { oifname . @th,192,32 } comment "ecompute rules VERSION"
  }
  chain pre {
    iifname @taps goto port
    iifname @taps_mac goto port_mac
  }
  chain port {
    iifname . ether saddr != @own_mac counter drop
    ether type arp goto port_arp
    ether type ip goto port_ip4
    ether type ip6 goto port_ip6
    ether type 0x8035 accept
    counter drop
  }
  chain port_arp {
    iifname . arp saddr ether != @own_mac counter drop
    arp saddr ip 0.0.0.0 accept
    iifname . @nh,112,32 @own_ip4 accept
    counter drop
  }
  chain port_ip4 {
    ip daddr . tcp dport @control4 counter drop
    udp sport 67 counter drop
    udp dport 68 counter drop
    udp dport 67 ip frag-off & 0x3fff != 0 counter drop
    udp dport 67 iifname . @th,288,48 != @own_chaddr counter drop
    udp dport 67 @th,192,32 != 0 counter drop
    ip saddr 0.0.0.0 ip daddr 255.255.255.255 udp sport 68 udp dport 67 accept
    ip daddr 169.254.169.254 tcp dport 80 meta mark set iifname map @marks
    iifname . @nh,96,32 @own_ip4 accept
    counter drop
  }
  chain port_ip6 {
    ip6 daddr . tcp dport @control6 counter drop
    ip6 saddr fe80::a9fe:a9fe counter drop
    ip6 daddr fe80::a9fe:a9fe counter drop
    icmpv6 type { nd-router-advert, nd-redirect } counter drop
    icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } goto port_nd
    icmpv6 type nd-router-solicit goto port_rs
    udp sport 547 counter drop
    udp dport 546 counter drop
    accept
  }
  chain port_nd {
    exthdr frag exists counter drop
    @th,64,128 0xfe8000000000000000000000a9fea9fe counter drop
    @th,192,16 != { 0x0101, 0x0201, 0x0e01 } counter drop
    @th,256,16 != { 0x0101, 0x0201, 0x0e01 } counter drop
    @th,320,8 >= 0 counter drop
    @th,192,16 { 0x0101, 0x0201 } iifname . @th,208,48 != @own_chaddr counter drop
    @th,256,16 { 0x0101, 0x0201 } iifname . @th,272,48 != @own_chaddr counter drop
    accept
  }
  chain port_rs {
    exthdr frag exists counter drop
    @th,64,16 != { 0x0101, 0x0e01 } counter drop
    @th,128,8 >= 0 counter drop
    @th,64,16 0x0101 iifname . @th,80,48 != @own_chaddr counter drop
    accept
  }
  chain port_mac {
    iifname . ether saddr != @own_mac counter drop
    ether type { 8021q, 8021ad } counter drop
    ether type arp iifname . arp saddr ether != @own_mac counter drop
    ip daddr . tcp dport @control4 counter drop
    ip6 daddr . tcp dport @control6 counter drop
    ip6 saddr fe80::a9fe:a9fe counter drop
    ip6 daddr fe80::a9fe:a9fe counter drop
    icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } goto port_nd
    icmpv6 type nd-router-solicit goto port_rs
    ip daddr 169.254.169.254 tcp dport 80 meta mark set iifname map @marks
  }
}
table inet ecompute {
  chain input {
    iifname @bridges goto guests_in
  }
  chain forward {
    oifname @bridges udp sport 67 udp dport 68 counter drop
    iifname @bridges ct original ip daddr 169.254.169.254 counter drop
  }
  chain guests_in {
    ct state established,related accept
    udp dport { 53, 67, 547 } accept
    tcp dport 53 accept
    ip daddr 169.254.169.254 tcp dport 80 accept
    meta l4proto { icmp, icmpv6 } accept
    counter reject
  }
}
"#;

/// What both tables are called.
pub(crate) const TABLE: &str = "ecompute";

/// And where they lie.
pub(crate) const FAMILIES: [&str; 2] = ["bridge", "inet"];

/// In the first of them, the map of ports to marks.
pub(crate) const MARKS: &str = "marks";

/// And in the second, the set of guests' bridges.
pub(crate) const BRIDGES: &str = "bridges";

/// Makes what is missing and puts the rules in place of those that are there, leaving the sets alone.
pub(crate) fn load() -> String {
    let mut script = FRAME.to_owned();
    let mut table = "";
    for line in FRAME.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("table"), Some(family)) => table = family,
            (Some("chain"), Some(chain)) => {
                script.push_str(&format!("flush chain {table} ecompute {chain}\n"));
            }
            _ => {}
        }
    }
    script + &RULES.replace("VERSION", &VERSION.to_string())
}
