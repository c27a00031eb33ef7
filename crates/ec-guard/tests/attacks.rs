//! The rules on a real bridge: guests are namespaces that send frames of their own making, the host is a
//! namespace with a DHCP server. Needs root and the programs `nft`, `ip`, `unshare`, `nsenter`, `dnsmasq`
//! and `python3`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends there")]

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    net::Ipv4Addr,
    process::{Child, Command, Output, Stdio},
    thread,
    time::Duration,
};

use ec_guard::{Guard, Pin, Subnet, Tap, Want, ports};
use ec_model::MacAddr;
use nix::sched::{CloneFlags, unshare};

const BRIDGE: &str = "br0";
const GATEWAY: &str = "192.168.150.1";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/guest.py");

/// Somewhere else on the network: another namespace behind the host.
const FAR: &str = "10.9.9.2";

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

#[track_caller]
fn sh(script: &str) -> String {
    let output = run("sh", &["-ec", script]);
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A process that holds a network namespace, or serves; gone on drop.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Guest {
    process: Process,
    mac: MacAddr,
    tap: String,
}

impl Guest {
    /// On the bridge by a port of that name.
    fn plug(mac: MacAddr, tap: String) -> Self {
        let guest = Self { process: namespace(), mac, tap };
        let (pid, mac, tap) = (guest.process.0.id(), guest.mac, &guest.tap);
        // As libvirt does it.
        let own = MacAddr([0xfe, mac.0[1], mac.0[2], mac.0[3], mac.0[4], mac.0[5]]);
        sh(&format!(
            "ip link add {tap} address {own} type veth peer name eth0 address {mac} netns {pid}
             ip link set {tap} master {BRIDGE} up
             sysctl -qw net.ipv6.conf.{tap}.disable_ipv6=1"
        ));
        guest.sh("ip link set lo up; ip link set eth0 up");
        guest
    }

    fn new(last: u8) -> Self {
        let mac = MacAddr([0x52, 0, 0, 0, 0, last]);
        Self::plug(mac, ports::tap_name(mac))
    }

    fn tap(&self) -> Tap {
        Tap { name: self.tap.clone(), mac: self.mac, pin: Pin::Learned }
    }

    #[track_caller]
    fn sh(&self, script: &str) -> String {
        let output = self.run(script);
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn run(&self, script: &str) -> Output {
        run("nsenter", &["-t", &self.process.0.id().to_string(), "-n", "sh", "-ec", script])
    }

    fn try_sh(&self, script: &str) -> bool {
        self.run(script).status.success()
    }

    /// Takes an address from the host's DHCP server, and uses it.
    fn dhcp(&self) -> Option<Ipv4Addr> {
        let told = self.sh(&format!("python3 {SCRIPT} dhcp eth0 {}", self.mac));
        let ip = told.trim().parse().ok()?;
        self.sh(&format!("ip addr replace {ip}/24 dev eth0; ip route replace default via {GATEWAY}"));
        Some(ip)
    }

    fn connects(&self, host: &str, port: u16) -> bool {
        let code = format!("import socket; socket.create_connection((\"{host}\", {port}), 0.7)");
        self.try_sh(&format!("python3 -c '{code}' 2>/dev/null"))
    }

    fn pings(&self, host: &str) -> bool {
        self.try_sh(&format!("python3 {SCRIPT} ping {host}"))
    }
}

fn namespace() -> Process {
    let mut child = Command::new("unshare")
        .args(["--net", "sh", "-c", "echo ready; exec sleep 1000"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    Process(child)
}

/// A host of its own for this thread: network and /sys, a bridge with DHCP, servers on several ports, a
/// network behind it. Its processes go with it.
struct Host {
    /// Of the process that is somewhere else on the network.
    far: u32,
    _processes: Vec<Process>,
    _files: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
        sh("mount --make-rprivate /; mount -t sysfs sysfs /sys; ip link set lo up");
        sh(&format!(
            "ip link add {BRIDGE} type bridge; ip addr add {GATEWAY}/24 dev {BRIDGE}; ip link set {BRIDGE} up
             ip addr add 169.254.169.254/32 dev {BRIDGE}
             sysctl -qw net.ipv4.ip_forward=1 net.ipv4.tcp_fwmark_accept=1"
        ));
        let files = tempfile::tempdir().unwrap();
        let far = namespace();
        let far_pid = far.0.id();
        sh(&format!(
            "ip link add far type veth peer name eth0 netns {0}; ip addr add 10.9.9.1/24 dev far; ip link set far up
             nsenter -t {0} -n sh -ec 'ip link set lo up; ip addr add {FAR}/24 dev eth0; ip link set eth0 up
             ip route add default via 10.9.9.1'",
            far.0.id()
        ));
        let serve = "import socket, sys, threading, time
def serve(port):
    s = socket.socket(); s.setsockopt(1, 2, 1); s.bind((\"0.0.0.0\", port)); s.listen()
    while True:
        c, _ = s.accept(); c.send(b\"%08x\" % (c.getsockopt(1, 36) & 0xFFFFFFFF)); c.close()
for p in (80, 2379, 8080, 22): threading.Thread(target=serve, args=(p,), daemon=True).start()
print(\"ready\", flush=True); time.sleep(1000)";
        let server = |enter: &[&str]| {
            let mut command = Command::new(enter[0]);
            command.args(&enter[1..]).args(["python3", "-c", serve]).stdout(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            Process(child)
        };
        let processes = vec![
            server(&["env"]),
            server(&["nsenter", "-t", &far.0.id().to_string(), "-n"]),
            Process(
                Command::new("dnsmasq")
                    .args(["--conf-file=/dev/null", "--keep-in-foreground", "--bind-interfaces", "--port=0"])
                    .args(["--except-interface=lo", "--interface=br0", "--user=root", "--no-ping"])
                    .args([
                        "--dhcp-range=192.168.150.10,192.168.150.50,255.255.255.0,1h",
                        "--dhcp-authoritative",
                    ])
                    .arg(format!("--dhcp-leasefile={}", files.path().join("leases").display()))
                    .arg(format!("--pid-file={}", files.path().join("pid").display()))
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap(),
            ),
            far,
        ];
        Self { far: far_pid, _processes: processes, _files: files }
    }

    /// Which of the attacker's frames arrive at the other guest.
    fn seen(attacker: &Guest, address: Ipv4Addr, victim: &Guest, victims: Ipv4Addr) -> BTreeSet<String> {
        let mut watch = Command::new("nsenter")
            .args(["-t", &victim.process.0.id().to_string(), "-n", "python3", SCRIPT, "watch", "eth0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
        lines.next().unwrap().unwrap();
        let (own, peer) = (attacker.mac, victim.mac);
        attacker.sh(&format!("python3 {SCRIPT} attack eth0 {own} {address} {peer} {victims} {GATEWAY}"));
        drop(watch.stdin.take());
        let seen = lines.map(Result::unwrap).collect();
        watch.wait().unwrap();
        seen
    }
}

fn want(taps: Vec<Tap>) -> Want {
    Want {
        owner: "a-node".into(),
        bridge: Some(BRIDGE.into()),
        control: [format!("{FAR}:2379").parse().unwrap()].into(),
        control_known: true,
        taps,
        ..Want::default()
    }
}

/// The host's memory of where an address is.
fn arp_entry(ip: Ipv4Addr) -> String {
    sh(&format!("ip neigh show {ip} dev {BRIDGE}"))
}

#[test]
fn a_guest_sends_as_itself_or_not_at_all() {
    let _host = Host::new();
    let (attacker, victim) = (Guest::new(1), Guest::new(2));
    // Without rules, all of it arrives: the test would see it.
    let (a, v) = (attacker.dhcp().unwrap(), victim.dhcp().unwrap());
    let seen = Host::seen(&attacker, a, &victim, v);
    for name in ["ip-free", "arp-ip-of-gateway", "router-asked-by-another-second", "router-asked-in-parts"] {
        assert!(seen.contains(name) && seen.len() > 20, "{name}: {seen:?}");
    }

    let guard = Guard::default();
    guard.sync(&want(vec![attacker.tap(), victim.tap()])).unwrap();
    assert!(!attacker.pings(&v.to_string()), "an address that nobody gave it is not its own");
    let (a, v) = (attacker.dhcp().unwrap(), victim.dhcp().unwrap());
    assert!(attacker.pings(&v.to_string()) && attacker.pings(GATEWAY) && attacker.pings(FAR));
    let seen = Host::seen(&attacker, a, &victim, v);
    let neighbours = ["ok-na", "ok-na-bare", "ok-ns", "ok-ns-both", "ok-ns-nonce"];
    let routers = ["ok-rs", "ok-rs-bare", "ok-rs-nonce"];
    let allowed =
        [&["ok-arp", "ok-arp-probe"], &neighbours[..], &["ok-rarp"], &routers[..], &["ok-udp"]].concat();
    assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), allowed);

    // The host's own memory of the victim stays right while the attacker claims its address.
    assert!(victim.pings(GATEWAY));
    attacker.sh(&format!("ip addr add {v}/32 dev eth0; sysctl -qw net.ipv4.ip_nonlocal_bind=1"));
    assert!(!attacker.try_sh(&format!("python3 {SCRIPT} ping {GATEWAY} {v}")));
    assert!(arp_entry(v).contains(&victim.mac.to_string()), "{}", arp_entry(v));
    assert!(victim.pings(GATEWAY) && attacker.pings(GATEWAY));

    // And with its hardware address, it is nobody.
    attacker.sh(&format!("ip addr del {v}/32 dev eth0; ip link set eth0 address {}", victim.mac));
    assert!(!attacker.connects("169.254.169.254", 80));
    assert!(victim.connects("169.254.169.254", 80), "the bridge has not learnt the attacker's port");
    attacker.sh(&format!("ip link set eth0 address {}", attacker.mac));
    assert!(attacker.connects("169.254.169.254", 80));
}

#[test]
fn a_port_on_somebody_elses_network_has_its_hardware_address_only() {
    let _host = Host::new();
    let (attacker, victim) = (Guest::new(1), Guest::new(2));
    let (a, v) = (attacker.dhcp().unwrap(), victim.dhcp().unwrap());
    let tap = Tap { pin: Pin::Mac, ..attacker.tap() };
    Guard::default().sync(&want(vec![tap])).unwrap();
    let seen = Host::seen(&attacker, a, &victim, v);
    for name in [
        "mac-of-another",
        "mac-of-peer",
        "arp-mac-of-another",
        "advert-of-another",
        "solicit-of-another",
        "advert-of-another-second",
        "solicit-of-another-second",
        "advert-of-another-third",
        "advert-of-another-longer",
        "advert-of-another-unknown",
        "router-asked-by-another",
        "router-asked-by-another-second",
        "router-asked-by-another-nonce",
        "router-asked-by-another-longer",
        "advert-in-parts",
        "solicit-in-parts",
        "router-asked-in-parts",
        "advert-of-metadata",
        "solicit-of-metadata",
        "ip6-of-metadata",
        "ip6-to-metadata",
        "vlan0",
        "qinq",
    ] {
        assert!(!seen.contains(name), "{name}: {seen:?}");
    }
    let neighbours = ["ok-ns", "ok-ns-both", "ok-na-bare", "ok-rs", "ok-rs-bare", "ok-rs-nonce"];
    for name in [&["ok-udp", "ok-arp", "ip-free", "router-advert"], &neighbours[..]].concat() {
        assert!(seen.contains(name), "{name}: {seen:?}");
    }
    assert!(attacker.pings(GATEWAY) && !attacker.connects(FAR, 2379) && attacker.connects(FAR, 8080));

    // Whoever receives it takes tags of no VLAN off, as many as there are.
    let (own, host) = (attacker.mac, sh(&format!("cat /sys/class/net/{BRIDGE}/address")));
    let answered = |port: u16| {
        attacker.sh(&format!("python3 {SCRIPT} connect_tagged eth0 {own} {a} {FAR} {} {port}", host.trim()))
    };
    assert_eq!((answered(8080).trim(), answered(2379).trim()), ("0", ""));
}

#[test]
fn a_guest_is_no_bridge() {
    let _host = Host::new();
    let (one, two, free) = (Guest::new(1), Guest::new(2), Guest::new(3));
    sh(&format!("ip link set {BRIDGE} type bridge stp_state 1"));
    thread::sleep(Duration::from_millis(300));
    let root = || sh(&format!("cat /sys/class/net/{BRIDGE}/bridge/root_id"));
    let own = root();
    let guard = Guard::default();
    guard.sync(&want(vec![one.tap(), Tap { pin: Pin::Mac, ..two.tap() }])).unwrap();
    let claim = |guest: &Guest| guest.sh(&format!("python3 {SCRIPT} bpdu eth0 {}", guest.mac));
    claim(&one);
    claim(&two);
    assert_eq!(root(), own);
    // One that is not held is believed.
    claim(&free);
    assert_ne!(root(), own);
}

#[test]
fn no_bridge_learns_from_a_frame_that_no_rule_sees() {
    let _host = Host::new();
    let (attacker, victim) = (Guest::new(1), Guest::new(2));
    // With it on, as libvirt makes its bridges, the frames of a spanning tree go past the rules, too.
    sh(&format!("ip link set {BRIDGE} type bridge stp_state 1 forward_delay 0"));
    // Of a spanning tree, LACP, 802.1X and LLDP; where the victim was seen after each. It may say something in between itself.
    let claim = |last: &str| {
        let seen = (0..3).map(|_| {
            victim.dhcp().unwrap();
            attacker.sh(&format!("python3 {SCRIPT} to_bridge eth0 {} {last}", victim.mac));
            ports::Ports::of(BRIDGE).unwrap().get(victim.mac).map(str::to_owned)
        });
        seen.collect::<BTreeSet<_>>()
    };
    for last in ["00", "02", "03", "0e"] {
        assert!(claim(last).contains(&Some(attacker.tap.clone())), "{last}: nothing is said about it yet");
    }
    let guard = Guard::default();
    let held = want(vec![attacker.tap(), victim.tap()]);
    guard.sync(&held).unwrap();
    for last in ["00", "02", "03", "0e"] {
        assert_eq!(claim(last), [Some(victim.tap.clone())].into(), "{last}");
    }
    // Of a bridge that is somebody else's, as that of second interfaces, the ports tell.
    let switch = format!("/sys/class/net/{BRIDGE}/bridge/no_linklocal_learn");
    sh(&format!("echo 0 >{switch}"));
    guard.settle(&Want { taps: vec![attacker.tap()], ..Want::default() });
    assert_eq!(sh(&format!("cat {switch}")).trim(), "1");
    // And of the guests' own it is so before any is there, also after the network was started anew.
    sh(&format!("echo 0 >{switch}"));
    guard.sync(&want(vec![])).unwrap();
    assert_eq!(sh(&format!("cat {switch}")).trim(), "1");
    // As in a container of Docker's, where that is the host's to do.
    sh(&format!("echo 0 >{switch}; mount -o remount,bind,ro /sys"));
    guard.sync(&want(vec![attacker.tap()])).unwrap();
    assert!(ports::learns_unseen(BRIDGE));
    let helps = ports::how_to_learn_from_what_rules_see(BRIDGE);
    sh(helps.split('`').nth(1).unwrap());
    assert_eq!((ports::learns_unseen(BRIDGE), sh(&format!("cat {switch}")).trim()), (false, "1"));
}

#[test]
fn nobody_gives_back_or_takes_another_guests_lease() {
    let _host = Host::new();
    let (attacker, victim, late) = (Guest::new(1), Guest::new(2), Guest::new(3));
    let guard = Guard::default();
    guard.sync(&want(vec![attacker.tap(), victim.tap(), late.tap()])).unwrap();
    attacker.dhcp().unwrap();
    let v = victim.dhcp().unwrap();
    let (own, theirs) = (attacker.mac, victim.mac);
    attacker.sh(&format!("python3 {SCRIPT} release eth0 {own} {theirs} {v} {GATEWAY}"));
    assert_eq!(attacker.sh(&format!("python3 {SCRIPT} dhcp eth0 {own} {theirs}")).trim(), "none");
    assert_ne!(late.dhcp().unwrap(), v, "the victim's lease stands");
    assert_eq!(victim.dhcp(), Some(v), "and is renewed");
    assert!(victim.pings(GATEWAY));
}

#[test]
fn a_release_in_parts_too_short_to_tell_whose_it_is_gives_nothing_back() {
    let _host = Host::new();
    let (attacker, victim, late) = (Guest::new(1), Guest::new(2), Guest::new(3));
    let guard = Guard::default();
    guard.sync(&want(vec![attacker.tap(), victim.tap(), late.tap()])).unwrap();
    let (a, v) = (attacker.dhcp().unwrap(), victim.dhcp().unwrap());
    let (own, theirs) = (attacker.mac, victim.mac);
    let gateway = sh(&format!("cat /sys/class/net/{BRIDGE}/address"));
    let gateway = gateway.trim();
    attacker.sh(&format!(
        "python3 {SCRIPT} release_in_fragments eth0 {own} {theirs} {v} {GATEWAY} {gateway} {a}"
    ));
    // Nobody tells of a packet that is dropped: so long the helper has to take it, were it let through.
    thread::sleep(Duration::from_millis(500));
    assert_ne!(late.dhcp().unwrap(), v, "the victim's lease stands");
    assert_eq!(victim.dhcp(), Some(v), "and is renewed");
    assert!(victim.pings(GATEWAY));
}

#[test]
fn an_answer_of_somebody_far_away_gives_nobody_an_address() {
    let host = Host::new();
    let attacker = Guest::new(1);
    let guard = Guard::default();
    guard.sync(&want(vec![attacker.tap()])).unwrap();
    let a = attacker.dhcp().unwrap();
    let serve = format!(
        "import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((\"0.0.0.0\", 67)); print(\"ready\", flush=True)
while True:
    asked, asker = s.recvfrom(2048)
    answer = bytearray(asked); answer[0] = 2; answer[16:20] = socket.inet_aton(\"{GATEWAY}\")
    answer[240:243] = bytes([53, 1, 5]); s.sendto(bytes(answer), asker)"
    );
    let mut child = Command::new("nsenter")
        .args(["-t", &host.far.to_string(), "-n", "python3", "-c", &serve])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let _far = Process(child);
    let own = attacker.mac;
    assert_eq!(attacker.sh(&format!("python3 {SCRIPT} ask_far {FAR} {own}")).trim(), "none");
    assert!(has_learnt(a) && !has_learnt(GATEWAY.parse().unwrap()));
}

/// Whether any port has that address.
fn has_learnt(ip: Ipv4Addr) -> bool {
    sh("nft list set bridge ecompute own_ip4").contains(&format!("{:#x}", u32::from(ip)))
}

#[test]
fn a_guest_whose_lease_has_ended_goes_on_with_its_address_under_new_rules() {
    let _host = Host::new();
    let (one, two) = (Guest::new(1), Guest::new(2));
    let held = Want {
        subnets: vec![Subnet { host: GATEWAY.parse().unwrap(), prefix: 24 }],
        ..want(vec![one.tap(), two.tap()])
    };
    Guard::default().sync(&held).unwrap();
    let (a, b) = (one.dhcp().unwrap(), two.dhcp().unwrap());
    // The host is started anew, or somebody flushes everything, and no lease tells.
    sh("nft flush ruleset");
    Guard::default().sync(&held).unwrap();
    assert!(!one.pings(GATEWAY) && !two.pings(GATEWAY));
    // Of the second, the address is another's by now.
    let known = Want {
        last: [(a, one.mac), (b, two.mac)].into(),
        leases: [(b, MacAddr([0x52, 0, 0, 0, 0, 9]))].into(),
        ..held
    };
    Guard::default().sync(&known).unwrap();
    assert!(one.pings(GATEWAY) && !two.pings(GATEWAY));
}

#[test]
fn who_asks_for_settings_alone_is_given_no_address() {
    let _host = Host::new();
    let (one, two) = (Guest::new(1), Guest::new(2));
    let guard = Guard::default();
    // The second is of a network whose addresses are not known to be the host's to give, and may be so later.
    guard.sync(&want(vec![one.tap(), Tap { pin: Pin::Mac, ..two.tap() }])).unwrap();
    let inform = |guest: &Guest, ip: Ipv4Addr, given: &str| {
        guest
            .sh(&format!("python3 {SCRIPT} inform eth0 {} {ip} {GATEWAY} {given}", guest.mac))
            .trim()
            .to_owned()
    };
    for guest in [&one, &two] {
        let ip = guest.dhcp().unwrap();
        assert_eq!(inform(guest, ip, ""), "answered", "settings are everybody's");
        // dnsmasq leaves what it was asked with in its answer.
        let answers: Vec<_> = [GATEWAY, "169.254.169.254"].map(|given| inform(guest, ip, given)).into();
        for given in [GATEWAY, "169.254.169.254"] {
            assert!(!has_learnt(given.parse().unwrap()), "{given} by {}: {answers:?}", guest.tap);
        }
        assert_eq!(answers.iter().all(|answer| answer == "none"), guest.tap == one.tap, "{answers:?}");
        // Who says that it has no address is not answered at all.
        let mac = guest.mac;
        guest.sh(&format!("python3 {SCRIPT} inform eth0 {mac} 0.0.0.0 255.255.255.255 {GATEWAY}"));
        assert!(!has_learnt(GATEWAY.parse().unwrap()), "{}", guest.tap);
        assert!(has_learnt(ip));
    }
}

#[test]
fn what_a_guest_had_itself_given_under_earlier_rules_goes_with_them() {
    let _host = Host::new();
    let guest = Guest::new(1);
    let held = Want {
        subnets: vec![Subnet { host: GATEWAY.parse().unwrap(), prefix: 24 }],
        ..want(vec![guest.tap()])
    };
    Guard::default().sync(&held).unwrap();
    let own = guest.dhcp().unwrap();
    let forged = [GATEWAY, "169.254.169.254", FAR].map(|text| text.parse::<Ipv4Addr>().unwrap());
    for ip in forged {
        sh(&format!(
            "nft add element bridge ecompute own_ip4 '{{ \"{}\" . {:#x} }}'",
            guest.tap,
            ip.to_bits()
        ));
        assert!(has_learnt(ip));
    }
    // As whoever is upgraded, which finds no rules of its own and leaves the sets as they are.
    Guard::default().sync(&held).unwrap();
    assert!(!forged.into_iter().any(has_learnt) && has_learnt(own) && guest.pings(GATEWAY));
}

#[test]
fn a_guest_reaches_dhcp_dns_metadata_and_icmp_of_its_host_and_no_control_endpoint_anywhere() {
    let host = Host::new();
    let (one, two) = (Guest::new(1), Guest::new(2));
    let guard = Guard::default();
    let taps = vec![one.tap(), Tap { pin: Pin::Mac, ..two.tap() }];
    let mut want = want(taps);
    want.bridge = None;
    guard.sync(&want).unwrap();
    for guest in [&one, &two] {
        guest.dhcp().unwrap();
        assert!(guest.connects(GATEWAY, 2379), "nothing is said about the host yet");
        assert!(!guest.connects(FAR, 2379), "the control endpoint");
        assert!(guest.connects(FAR, 8080), "another port of it");
        // Both say who they are by the port that they are on.
        let mark =
            "import socket; print(socket.create_connection((\"169.254.169.254\", 80)).recv(8).decode())";
        assert_eq!(
            guest.sh(&format!("python3 -c '{mark}'")).trim(),
            format!("{:08x}", ports::mark_of(guest.mac))
        );
        assert!(ec_guard::marked_ports().contains(&guest.tap));
        assert_eq!(ports::Ports::of(BRIDGE).unwrap().get(guest.mac), Some(guest.tap.as_str()));
    }
    want.bridge = Some(BRIDGE.into());
    guard.sync(&want).unwrap();
    for guest in [&one, &two] {
        for host in [GATEWAY, "169.254.169.254", "10.9.9.1"] {
            for port in [2379, 8080, 22] {
                assert!(!guest.connects(host, port), "{host}:{port}");
            }
        }
        assert!(guest.connects("169.254.169.254", 80) && guest.connects(FAR, 8080));
        assert!(guest.pings(GATEWAY) && guest.dhcp().is_some());
    }
    // Where no server has put the address on the bridge, guests do not ask in the host's name whoever answers that elsewhere: the cloud
    // of which it is a machine itself.
    let far = host.far;
    sh(&format!(
        "ip addr del 169.254.169.254/32 dev {BRIDGE}; ip route add 169.254.169.254/32 via {FAR}
         nsenter -t {far} -n ip addr add 169.254.169.254/32 dev eth0"
    ));
    let _there = std::net::TcpStream::connect(("169.254.169.254", 80)).unwrap();
    for guest in [&one, &two] {
        assert!(!guest.connects("169.254.169.254", 80) && guest.connects(FAR, 8080));
    }
    // The host reaches its guests, and is answered.
    let pid = one.process.0.id().to_string();
    let _server = Process(
        Command::new("nsenter")
            .args(["-t", &pid, "-n", "python3", "-m", "http.server", "7777"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let ip = one.dhcp().unwrap();
    let mut left = 50;
    while !run("curl", &["-sf", "-m", "2", &format!("http://{ip}:7777/")]).status.success() {
        left -= 1;
        assert!(left > 0, "the host is answered by its guest");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn no_guest_is_the_metadata_service_of_another_by_ipv6() {
    const METADATA: &str = "fe80::a9fe:a9fe";
    let _host = Host::new();
    let (server, asker) = (Guest::new(1), Guest::new(2));
    let own = format!("fe80::5000:ff:fe00:{}", server.mac.0[5]);
    server.sh(&format!("ip -6 addr add {METADATA}/64 dev eth0 nodad"));
    let _serves = [METADATA, &own].map(|address| {
        let mut child = Command::new("nsenter")
            .args([
                "-t",
                &server.process.0.id().to_string(),
                "-n",
                "python3",
                SCRIPT,
                "serve6",
                "eth0",
                address,
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        Process(child)
    });
    let reaches = |address: &str| {
        asker.sh("ip -6 neigh flush dev eth0");
        asker.try_sh(&format!("python3 {SCRIPT} connect6 eth0 {address} 2>/dev/null"))
    };
    // Both have to find out first that nobody else has their addresses.
    let mut left = 20;
    while !(reaches(METADATA) && reaches(&own)) {
        left -= 1;
        assert!(left > 0, "nothing is said about it yet");
    }
    // Whichever of the two is held: the other may be anybody's.
    for guest in [&server, &asker] {
        for pin in [Pin::Learned, Pin::Mac] {
            let held = want(vec![Tap { pin, ..guest.tap() }]);
            Guard::default().sync(&held).unwrap();
            assert!(!reaches(METADATA), "{pin:?} of {}", guest.tap);
            assert!(reaches(&own), "{pin:?} of {}", guest.tap);
            Guard::default().release(&held).unwrap();
        }
    }
    assert!(reaches(METADATA), "nobody is held any more");
}

#[test]
fn a_guest_that_starts_is_let_in_whatever_became_of_its_elements_since_the_last_look() {
    let _host = Host::new();
    let mac = MacAddr([0x52, 0, 0, 0, 0, 3]);
    let stopped = want(vec![Tap { name: ports::tap_name(mac), mac, pin: Pin::Mac }]);
    let guard = Guard::default();
    guard.sync(&stopped).unwrap();
    // As another agent of this host may, which does not know it.
    sh("nft flush set bridge ecompute taps_mac");
    guard.admit(&stopped).unwrap();
    let listed = run("nft", &["list", "set", "bridge", "ecompute", "taps_mac"]);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains(&ports::tap_name(mac)), "{listed}");
}

#[test]
fn whatever_others_do_to_the_tables_comes_back_and_running_guests_keep_their_addresses() {
    let _host = Host::new();
    let (one, two) = (Guest::new(1), Guest::plug(MacAddr([0x52, 0, 0, 0, 0, 2]), "vnet7".into()));
    let (first, second) = (Guard::default(), Guard::default());
    let mut ours = want(vec![one.tap()]);
    let theirs =
        Want { owner: "b-node".into(), control: BTreeSet::new(), taps: vec![two.tap()], ..want(vec![]) };
    first.sync(&ours).unwrap();
    second.sync(&theirs).unwrap();
    let (a, b) = (one.dhcp().unwrap(), two.dhcp().unwrap());
    // Again and again, also by an agent that starts anew: nothing of the other's goes.
    for _ in 0..2 {
        first.sync(&ours).unwrap();
        second.sync(&theirs).unwrap();
        Guard::default().sync(&ours).unwrap();
        assert!(one.pings(&b.to_string()) && two.pings(&a.to_string()));
        assert!(!one.connects(FAR, 2379));
    }
    // A firewall that is started anew flushes everything. The leases say who has what.
    ours.leases = [(a, one.mac), (b, two.mac)].into();
    let theirs = Want { leases: ours.leases.clone(), ..theirs };
    for damage in [
        "nft flush ruleset",
        "nft delete table inet ecompute",
        "nft delete table bridge ecompute",
        "nft flush chain bridge ecompute port_arp",
        "nft flush table bridge ecompute",
        "nft insert rule bridge ecompute pre accept",
        "nft flush set bridge ecompute own_mac",
        "nft flush set bridge ecompute own_ip4",
        "nft flush set bridge ecompute taps",
    ] {
        sh(damage);
        first.sync(&ours).unwrap();
        second.sync(&theirs).unwrap();
        assert!(one.pings(&b.to_string()) && two.pings(&a.to_string()), "{damage}");
        assert!(!one.connects(GATEWAY, 2379) && !one.connects(FAR, 2379), "{damage}");
        one.sh("ip addr add 192.168.150.77/32 dev eth0");
        assert!(!one.try_sh(&format!("python3 {SCRIPT} ping {GATEWAY} 192.168.150.77")), "{damage}");
        one.sh("ip addr del 192.168.150.77/32 dev eth0");
    }
    // Who does without rules takes its own away and leaves the other's.
    second.release(&theirs).unwrap();
    let left = sh("nft list ruleset");
    assert!(!left.contains("vnet7") && left.contains(&one.tap), "{left}");
    second.sync(&theirs).unwrap();
    // A guest that is gone is forgotten, and the next of that name has nothing of it.
    second.dismiss(&["vnet7".into()]).unwrap();
    let left = sh("nft list table bridge ecompute");
    assert!(!left.contains("vnet7"), "{left}");
    assert!(one.pings(GATEWAY));
    // Also where libvirt has given its name to a guest of somebody else's by now.
    second.sync(&theirs).unwrap();
    sh("ip link set vnet7 address fe:54:00:aa:bb:cc");
    first.sync(&ours).unwrap();
    assert!(!sh("nft list ruleset").contains("vnet7"));
    sh("ip link set vnet7 address fe:00:00:00:00:02");
    // Admitting works with tables, and makes them where somebody took them away.
    sh("nft flush ruleset");
    let third = Guest::new(3);
    second.admit(&want(vec![third.tap()])).unwrap();
    assert!(sh("nft list table bridge ecompute").contains(&third.tap));
    third.dhcp().unwrap();
    assert!(third.pings(GATEWAY));
    second.sync(&theirs).unwrap();
    assert!(sh("nft list table bridge ecompute").contains("vnet7"));
    assert!(two.pings(GATEWAY));
}

#[test]
fn who_lets_a_guest_in_or_forgets_one_says_nothing_of_others() {
    let _host = Host::new();
    let (gone, other) = (Guest::new(1), Guest::plug(MacAddr([0x52, 0, 0, 0, 0, 2]), "vnet7".into()));
    let guard = Guard::default();
    guard.sync(&want(vec![gone.tap(), other.tap()])).unwrap();
    let has = |port: &str| sh("nft list table bridge ecompute").contains(port);
    // Whoever looks at all guests knows whose it is now, and that it is not there for good.
    sh("ip link set vnet7 address fe:54:00:aa:bb:cc");
    guard.dismiss(std::slice::from_ref(&gone.tap)).unwrap();
    assert!(!has(&gone.tap) && has("vnet7"));
    // Also where it has to make the rules first.
    Guard::default().admit(&want(vec![gone.tap()])).unwrap();
    assert!(has(&gone.tap) && has("vnet7"));
    guard.sync(&want(vec![gone.tap()])).unwrap();
    assert!(has(&gone.tap) && !has("vnet7"));
}

#[test]
fn where_rules_cannot_be_it_says_why() {
    Guard::probe().unwrap();
    let output = run(
        "setpriv",
        &["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "nft", "list", "ruleset"],
    );
    assert!(!output.status.success(), "the kernel does not let everybody");
}
