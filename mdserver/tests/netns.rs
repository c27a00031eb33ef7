//! The program on a real bridge with real guests (network namespaces on veth pairs), as root.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends there")]
#![expect(clippy::print_stderr, reason = "what was not tried, and why, is worth saying")]

use std::{
    fs,
    io::Read,
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use ec_guard::ports::{mark_of, tap_name};
use ec_metadata::{InstanceRecord, RECORD_VERSION, RecordDir};
use ec_model::{Blob, InstanceId};
use jiff::Timestamp;

const URL: &str = "http://169.254.169.254";
const USER_DATA: &[u8] = b"#!/bin/sh\n\0\xff\r\n";
const WAIT: Duration = Duration::from_secs(20);

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program).args(args).output().unwrap()
}

fn ip(args: &str) {
    let output = run("ip", &args.split(' ').collect::<Vec<_>>());
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
}

fn eventually(what: &str, check: impl Fn() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < WAIT, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A host with a bridge `br0`, and two guests on it of which one has a record; gone on drop.
struct Lab {
    host: String,
    guests: [String; 2],
    instance: InstanceId,
    state: tempfile::TempDir,
}

impl Lab {
    /// None where namespaces cannot be made.
    fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("mdt{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let host = format!("{name}-h");
        if !run("ip", &["netns", "add", &host]).status.success() {
            eprintln!("skipped: making network namespaces needs root");
            return None;
        }
        let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        let guests = [1, 2].map(|number| format!("{name}-g{number}"));
        let lab = Self { host, guests, instance, state: tempfile::tempdir().unwrap() };
        ip(&format!("-n {} link set lo up", lab.host));
        for guest in &lab.guests {
            ip(&format!("netns add {guest}"));
        }
        let records = RecordDir::open(lab.state.path().join("instances")).unwrap();
        records
            .put(&InstanceRecord {
                version: RECORD_VERSION,
                instance,
                name: "web".into(),
                macs: vec![instance.mac(0)],
                base_digest: None,
                next_base_digest: None,
                next_wished_at: None,
                next_is_whole: false,
                rescue_base_digest: None,
                rebuilt: None,
                rescued: None,
                resized: None,
                resources_before: None,
                growing: None,
                intent: None,
                metadata: std::collections::BTreeMap::new(),
                keys: vec!["ssh-ed25519 AAAA me".into()],
                user_data: Some(Blob(USER_DATA.to_vec())),
                token_required: false,
                project: "p".into(),
                resources: ec_model::Resources::new(),
                started: false,
                created_at: Timestamp::UNIX_EPOCH,
            })
            .unwrap();
        Some(lab)
    }

    /// Brings the bridge up with both guests on it, as a network that is started does.
    fn start_network(&self) {
        let host = &self.host;
        ip(&format!("-n {host} link add br0 type bridge"));
        ip(&format!("-n {host} addr add 192.168.150.1/24 dev br0"));
        ip(&format!("-n {host} link set br0 up"));
        for (number, guest) in (1..).zip(&self.guests) {
            let mac = self.instance.mac(number - 1);
            let tap = tap_name(mac);
            ip(&format!("-n {host} link add {tap} type veth peer name eth0 address {mac} netns {guest}"));
            ip(&format!("-n {host} link set {tap} master br0 up"));
            ip(&format!("-n {guest} addr add 192.168.150.1{number}/24 dev eth0"));
            ip(&format!("-n {guest} link set eth0 up"));
            ip(&format!("-n {guest} route add default via 192.168.150.1"));
        }
    }

    fn stop_network(&self) {
        for number in [0, 1] {
            ip(&format!("-n {} link del {}", self.host, tap_name(self.instance.mac(number))));
        }
        ip(&format!("-n {} link del br0", self.host));
    }

    fn server(&self) -> Server {
        self.server_of(self.state.path(), "br0")
    }

    /// Another one, with records and a bridge of its own.
    fn server_of(&self, state: &Path, bridge: &str) -> Server {
        self.server_with(state, bridge, &[])
    }

    fn server_with(&self, state: &Path, bridge: &str, more: &[&str]) -> Server {
        let log = self.state.path().join(format!("log-{}", Timestamp::now().as_nanosecond()));
        let child = Command::new("ip")
            .args([
                "netns",
                "exec",
                &self.host,
                env!("CARGO_BIN_EXE_mdserver"),
                "--listen",
                "127.0.0.1:0",
                "--bridge",
                bridge,
                "--state-dir",
            ])
            .arg(state)
            .args(more)
            .stderr(fs::File::create(&log).unwrap())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Server { child, log }
    }

    /// Status and body of what `namespace` gets from the server; status 0 where there is no answer.
    fn get(&self, namespace: &str, path: &str) -> (u16, Vec<u8>) {
        self.get_at(namespace, &format!("{URL}{path}"))
    }

    fn get_at(&self, namespace: &str, url: &str) -> (u16, Vec<u8>) {
        let body = self.state.path().join("body");
        let _ = fs::remove_file(&body);
        let output = run(
            "ip",
            &[
                "netns",
                "exec",
                namespace,
                "curl",
                "-s",
                "-m",
                "2",
                "-o",
                body.to_str().unwrap(),
                "-w",
                "%{http_code}",
                url,
            ],
        );
        let status = String::from_utf8(output.stdout).unwrap().parse().unwrap_or(0);
        (status, fs::read(&body).unwrap_or_default())
    }

    fn guest_is_answered(&self) -> bool {
        self.get(&self.guests[0], "/latest/meta-data/hostname") == (200, b"web".to_vec())
    }

    fn addresses(&self) -> String {
        String::from_utf8(run("ip", &["-n", &self.host, "-4", "addr", "show"]).stdout).unwrap()
    }

    fn has_address(&self) -> bool {
        self.addresses().contains("169.254.169.254/32")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for namespace in self.guests.iter().chain([&self.host]) {
            run("ip", &["netns", "del", namespace]);
        }
    }
}

/// A namespace more.
struct Gone<'a>(&'a str);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        run("ip", &["netns", "del", self.0]);
    }
}

struct Server {
    child: Child,
    log: std::path::PathBuf,
}

impl Server {
    fn signal(&self, signal: &str) {
        // `ip netns exec` has become the program itself.
        assert!(run("kill", &[signal, &self.child.id().to_string()]).status.success());
    }

    fn end(mut self, signal: &str) -> Option<i32> {
        self.signal(signal);
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < WAIT, "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Where operators read.
    fn port(&self) -> String {
        let log = self.log();
        let line = log.lines().find(|line| line.contains("serving health")).unwrap();
        line.split_once("listen=\"").unwrap().1.split_once('"').unwrap().0.to_owned()
    }

    fn resident_kib(&self) -> u64 {
        let status =
            fs::read_to_string(Path::new("/proc").join(self.child.id().to_string()).join("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_guest_is_answered_a_stranger_is_not_and_the_bridge_is_left_as_it_was() {
    let Some(lab) = Lab::new() else { return };
    let server = lab.server();
    eventually("the server says that it waits", || server.log().contains("no such bridge"));
    lab.start_network();
    eventually("the guest is answered", || lab.guest_is_answered());
    assert_eq!(lab.get(&lab.guests[0], "/openstack/latest/user_data"), (200, USER_DATA.to_vec()));
    assert_eq!(lab.get(&lab.guests[0], "/latest/meta-data/local-ipv4"), (200, b"192.168.150.11".to_vec()));
    assert_eq!(lab.get(&lab.guests[1], "/latest/meta-data/").0, 404, "a neighbour without a record");
    assert_eq!(lab.get(&lab.host, "/latest/meta-data/").0, 404, "the host itself");
    eprintln!("resident: {} KiB", server.resident_kib());
    assert_eq!(server.end("-TERM"), Some(0));
    assert!(!lab.has_address(), "{}", lab.addresses());
}

#[test]
fn operators_read_numbers_and_guests_cannot() {
    let Some(lab) = Lab::new() else { return };
    let server = lab.server();
    eventually("the server says that it waits", || server.log().contains("no such bridge"));
    let port = server.port();
    let read = |path: &str| {
        let (status, body) = lab.get_at(&lab.host, &format!("http://{port}{path}"));
        (status, String::from_utf8(body).unwrap())
    };
    let shows = |line: &str| read("/metrics").1.lines().any(|own| own == line);
    assert_eq!(read("/healthz"), (200, "ok\n".to_owned()));
    assert!(shows("ecompute_metadata_standing{state=\"waits_for_bridge\"} 1"), "{}", read("/metrics").1);
    lab.start_network();
    eventually("the guest is answered", || lab.guest_is_answered());
    assert_eq!(lab.get(&lab.guests[0], "/latest/meta-data/nothing").0, 404);
    assert_eq!(lab.get(&lab.guests[1], "/latest/meta-data/").0, 404);
    let text = read("/metrics").1;
    for line in [
        concat!("mdserver_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        "mdserver_records 1",
        "ecompute_metadata_standing{state=\"answers\"} 1",
        "ecompute_metadata_standing{state=\"waits_for_bridge\"} 0",
        "ecompute_metadata_requests_total{outcome=\"not_found\"} 1",
        "ecompute_metadata_requests_total{outcome=\"stranger\"} 1",
        "ecompute_metadata_requests_total{outcome=\"failed\"} 0",
    ] {
        assert!(shows(line), "{line} is not in\n{text}");
    }
    assert!(!shows("ecompute_metadata_requests_total{outcome=\"answered\"} 0"), "{text}");
    assert!(!text.contains(&lab.instance.to_string()), "{text}");

    // Neither at the address that they ask nor at the host's own on the bridge.
    let number = port.rsplit(':').next().unwrap();
    for host in ["169.254.169.254", "192.168.150.1"] {
        assert_eq!(lab.get_at(&lab.guests[0], &format!("http://{host}:{number}/metrics")).0, 0, "{host}");
    }
    assert_eq!(lab.get(&lab.guests[0], "/metrics").0, 404);

    // A second one that shall have the same port ends, before it has touched anything.
    let second = run(
        "ip",
        &["netns", "exec", &lab.host, env!("CARGO_BIN_EXE_mdserver"), "--bridge", "br0", "--listen", &port],
    );
    let text = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1), "{text}");
    assert!(text.contains(&format!("cannot listen at {port}")) && text.contains("--listen"), "{text}");
    assert!(lab.guest_is_answered());
}

#[test]
fn a_network_that_is_restarted_is_served_again() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let server = lab.server();
    eventually("the guest is answered", || lab.guest_is_answered());
    lab.stop_network();
    eventually("the server has noticed", || server.log().contains("no such bridge"));
    lab.start_network();
    eventually("the guest is answered again", || lab.guest_is_answered());
    assert_eq!(server.log().matches("no such bridge").count(), 1);
    assert_eq!(server.end("-INT"), Some(0));
    assert!(!lab.has_address());
}

#[test]
fn the_address_of_a_killed_server_is_taken_over_and_removed_and_one_of_the_operators_stays() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let killed = lab.server();
    eventually("the guest is answered", || lab.guest_is_answered());
    assert_eq!(killed.end("-KILL"), None);
    assert!(lab.has_address());
    let server = lab.server();
    eventually("the guest is answered", || lab.guest_is_answered());
    assert_eq!(server.end("-TERM"), Some(0));
    assert!(!lab.has_address());

    ip(&format!("-n {} addr add 169.254.169.254/32 dev br0", lab.host));
    let server = lab.server();
    eventually("the guest is answered", || lab.guest_is_answered());
    assert_eq!(server.end("-TERM"), Some(0));
    assert!(lab.has_address());
}

#[test]
fn a_second_server_waits_and_takes_over_when_the_first_one_ends_or_is_killed() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    for (signal, code) in [("-TERM", Some(0)), ("-KILL", None)] {
        let first = lab.server();
        eventually("the guest is answered", || lab.guest_is_answered());
        let second = lab.server();
        eventually("the second one waits", || second.log().contains("another server answers"));
        // One that ends while it waits takes nothing away from the one that answers.
        let third = lab.server();
        eventually("the third one waits", || third.log().contains("another server answers"));
        assert_eq!(third.end("-TERM"), Some(0));
        assert!(lab.has_address());
        assert_eq!(first.end(signal), code);
        eventually("the second one answers", || {
            second.log().contains("answering") && lab.guest_is_answered()
        });
        assert_eq!(second.end("-TERM"), Some(0));
        assert!(!lab.has_address(), "{signal}");
    }
}

#[test]
fn an_address_or_port_that_packet_rules_keep_guests_from_is_told() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let told = |more: &[&str]| {
        let server = lab.server_with(lab.state.path(), "br0", more);
        eventually("it answers", || server.log().contains("answering guests"));
        let is_told = server.log().contains("no guest will ask here");
        assert_eq!(server.end("-TERM"), Some(0));
        is_told
    };
    assert!(!told(&["--port", "8080"]), "there are no rules");
    let rules = "table inet ecompute { set bridges { type ifname; elements = { \"br0\" }; }; }";
    assert!(run("ip", &["netns", "exec", &lab.host, "nft", rules]).status.success());
    assert!(told(&["--port", "8080"]) && told(&["--address", "192.168.151.9"]));
    assert!(!told(&[]), "as usual");
}

#[test]
fn guests_are_not_led_to_a_web_server_that_has_the_port_and_are_answered_when_it_is_gone() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let (web, log) = (lab.state.path().join("web"), std::path::PathBuf::new());
    fs::create_dir_all(web.join("latest/meta-data")).unwrap();
    fs::write(web.join("latest/meta-data/hostname"), "somebody").unwrap();
    // The second one has IPv4's port, too.
    for all in ["0.0.0.0", "::"] {
        // What a server leaves that is killed leads there, too.
        let killed = lab.server();
        eventually("the guest is answered", || lab.guest_is_answered());
        assert_eq!(killed.end("-KILL"), None);
        assert!(lab.has_address());
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &lab.host, "python3", "-m", "http.server", "80", "--bind", all]);
        command.current_dir(&web).stdout(Stdio::null()).stderr(Stdio::null());
        let stranger = Server { child: command.spawn().unwrap(), log: log.clone() };
        let asks = || lab.get(&lab.guests[0], "/latest/meta-data/hostname");
        eventually("the web server answers", || asks() == (200, b"somebody".to_vec()));

        let server = lab.server();
        eventually("it says who has the port", || server.log().contains("another program has this port"));
        assert!(!lab.has_address(), "{}", lab.addresses());
        assert_eq!(asks().0, 0);
        let numbers = lab.get_at(&lab.host, &format!("http://{}/metrics", server.port())).1;
        let numbers = String::from_utf8(numbers).unwrap();
        assert!(numbers.contains("ecompute_metadata_standing{state=\"port_taken\"} 1"), "{numbers}");
        drop(stranger);
        eventually("the guest is answered", || lab.guest_is_answered());
        assert_eq!(server.end("-TERM"), Some(0));
        assert!(!lab.has_address(), "{}", lab.addresses());
    }
}

#[test]
fn whoever_takes_a_guests_address_on_another_port_is_told_nothing() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let server = lab.server();
    eventually("the guest is answered", || lab.guest_is_answered());
    let [guest, attacker] = &lab.guests;
    let mac = lab.instance.mac(0);
    // Its hardware address, and then its IP address too, while it is quiet: without packet rules the bridge's
    // table has the port that was seen last.
    ip(&format!("-n {guest} link set eth0 down"));
    ip(&format!("-n {attacker} link set eth0 address {mac}"));
    for take in ["", "192.168.150.11/24"] {
        if !take.is_empty() {
            ip(&format!("-n {attacker} addr flush dev eth0"));
            ip(&format!("-n {attacker} addr add {take} dev eth0"));
        }
        ip(&format!("-n {attacker} route replace default via 192.168.150.1"));
        ip(&format!("-n {} neigh flush dev br0", lab.host));
        for _ in 0..3 {
            for path in ["/latest/user-data", "/latest/meta-data/hostname", "/openstack/latest/user_data"] {
                let (status, body) = lab.get(attacker, path);
                assert_eq!(status, 404, "{take} {path}: {}", String::from_utf8_lossy(&body));
            }
        }
    }
    drop(server);
}

#[test]
fn one_guest_with_many_addresses_does_not_keep_the_others_from_being_answered() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let server = lab.server();
    eventually("the guest is answered", || lab.guest_is_answered());
    let attacker = &lab.guests[1];
    for last in 100..140 {
        ip(&format!("-n {attacker} addr add 192.168.150.{last}/24 dev eth0"));
    }
    // Far more than all connections there can be, again and again, each of which says half a question.
    let flood = "import socket, threading, time
def keep(n):
    held = []
    while True:
        s = socket.socket(); s.settimeout(2)
        try:
            s.bind(('192.168.150.%d' % (100 + n), 0)); s.connect(('169.254.169.254', 80)); s.send(b'GET / HT'); held.append(s)
        except OSError: pass
        held = held[-20:]
        time.sleep(0.05)
for n in range(40): threading.Thread(target=keep, args=(n,), daemon=True).start()
time.sleep(3); print('held', flush=True); time.sleep(30)";
    let mut command = Command::new("ip");
    command.args(["netns", "exec", attacker, "python3", "-c", flood]).stdout(Stdio::piped());
    let mut flood = Server { child: command.spawn().unwrap(), log: std::path::PathBuf::new() };
    let mut line = [0; 4];
    flood.child.stdout.take().unwrap().read_exact(&mut line).unwrap();
    let begun = Instant::now();
    for _ in 0..5 {
        assert!(lab.guest_is_answered(), "after {:?}", begun.elapsed());
    }
    drop((flood, server));
}

#[test]
fn a_port_that_gives_marks_is_not_believed_without_one() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let server = lab.server();
    eventually("the guest is answered", || lab.guest_is_answered());
    let nft = |rules: &str| {
        let output = run("ip", &["netns", "exec", &lab.host, "nft", rules]);
        assert!(output.status.success(), "{rules}: {}", String::from_utf8_lossy(&output.stderr));
    };
    // Somebody who sends as the guest from elsewhere could be taken for it, as the bridge has seen its
    // address last here or there; but the guest's own question would have a mark.
    let (tap, mark) = (tap_name(lab.instance.mac(0)), mark_of(lab.instance.mac(0)));
    nft(&format!(
        "table bridge ecompute {{ map marks {{ type ifname : mark; elements = {{ \"{tap}\" : {mark} }}; }}; \
         chain pre {{ type filter hook prerouting priority -310; }}; }}"
    ));
    let refused = || lab.get(&lab.guests[0], "/latest/meta-data/hostname").0 == 404;
    eventually("a question without a mark is nobody's", refused);
    nft("add rule bridge ecompute pre meta mark set iifname map @marks");
    assert!(lab.guest_is_answered(), "with it, it is the guest's");
    // Somebody on a port without rules, with the guest's hardware address, while the guest sends all the time.
    let [guest, attacker] = &lab.guests;
    let chatter = "import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while True: s.sendto(b'x', ('192.168.150.1', 9)); time.sleep(0.01)";
    let mut command = Command::new("ip");
    command.args(["netns", "exec", guest, "python3", "-c", chatter]);
    let chatter = Server { child: command.spawn().unwrap(), log: std::path::PathBuf::new() };
    ip(&format!("-n {attacker} link set eth0 address {}", lab.instance.mac(0)));
    ip(&format!("-n {attacker} route replace default via 192.168.150.1"));
    let flow = "import socket
told = set()
for n in range(150):
    s = socket.socket(); s.settimeout(0.1)
    try:
        s.connect(('169.254.169.254', 80)); s.send(b'GET /latest/meta-data/hostname HTTP/1.0\\r\\n\\r\\n'); told.add(s.recv(12)[9:])
    except OSError: pass
print(b' '.join(sorted(told)).decode())";
    let output = run("ip", &["netns", "exec", attacker, "python3", "-c", flow]);
    let told = String::from_utf8(output.stdout).unwrap();
    assert_eq!(told.trim(), "404", "it is answered, as nobody");
    ip(&format!("-n {attacker} link set eth0 address {}", lab.instance.mac(1)));
    drop(chatter);
    eventually("the guest itself is answered", || lab.guest_is_answered());
    nft("delete table bridge ecompute");
    eventually("without rules the bridge tells", || lab.guest_is_answered());
    drop(server);
}

#[test]
fn of_two_servers_with_records_of_their_own_one_answers_for_the_guests_of_both() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let (other, state): (InstanceId, _) =
        ("7d3c1f0a-2b4e-4c55-9a7e-0123456789ac".parse().unwrap(), tempfile::tempdir().unwrap());
    // The other one's guest is on a bridge of its own.
    let (host, third) = (&lab.host, format!("{}3", lab.guests[0]));
    ip(&format!("netns add {third}"));
    let _third = Gone(&third);
    ip(&format!("-n {host} link add br1 type bridge"));
    ip(&format!("-n {host} addr add 192.168.151.1/24 dev br1"));
    ip(&format!("-n {host} link set br1 up"));
    let (mac, tap) = (other.mac(0), tap_name(other.mac(0)));
    ip(&format!("-n {host} link add {tap} type veth peer name eth0 address {mac} netns {third}"));
    ip(&format!("-n {host} link set {tap} master br1 up"));
    ip(&format!("-n {third} addr add 192.168.151.2/24 dev eth0"));
    ip(&format!("-n {third} link set eth0 up"));
    ip(&format!("-n {third} route add default via 192.168.151.1"));
    let own = RecordDir::reader(lab.state.path().join("instances")).get(lab.instance).unwrap().unwrap();
    let record =
        InstanceRecord { instance: other, name: "other".into(), macs: vec![mac], user_data: None, ..own };
    RecordDir::open(state.path().join("instances")).unwrap().put(&record).unwrap();

    let both = || {
        lab.guest_is_answered()
            && lab.get(&third, "/latest/meta-data/hostname") == (200, b"other".to_vec())
            && lab.get(&lab.guests[1], "/latest/meta-data/hostname").0 == 404
    };
    let first = lab.server();
    eventually("the first one answers", || lab.guest_is_answered());
    let second = lab.server_of(state.path(), "br1");
    eventually("the second one waits", || second.log().contains("another server answers"));
    eventually("both guests are answered", both);
    assert_eq!(first.end("-KILL"), None);
    eventually("the second one takes over", || second.log().contains("answering guests"));
    eventually("both guests are answered by the other", both);
    assert_eq!(second.end("-TERM"), Some(0));
}

#[test]
fn without_the_rights_it_says_so_and_fails() {
    let Some(lab) = Lab::new() else { return };
    lab.start_network();
    let output = run(
        "ip",
        &[
            "netns",
            "exec",
            &lab.host,
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
            env!("CARGO_BIN_EXE_mdserver"),
            "--listen",
            "none",
            "--bridge",
            "br0",
        ],
    );
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("mdserver: not permitted to listen on 169.254.169.254:80"), "{text}");
    assert!(text.contains("must run as root") && text.lines().count() == 1, "{text}");
}

#[test]
fn wrong_usage_ends_with_code_2() {
    for args in [
        &["--port", "0"][..],
        &["--address", "nowhere"],
        &["--address", "0.0.0.0"],
        &["--address", "255.255.255.255"],
        &["--bridge", ""],
        &["--bridge", "a/b"],
        &["--bridge", "a-name-longer-than-an-interface-has"],
        &["--listen", "18092"],
        &["--listen", "169.254.169.254:18092"],
        &["--colour"],
        &["extra"],
    ] {
        let output = run(env!("CARGO_BIN_EXE_mdserver"), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
    // An address that may come: who starts it tries again.
    let output = run(env!("CARGO_BIN_EXE_mdserver"), &["--listen", "192.0.2.1:1"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let help = run(env!("CARGO_BIN_EXE_mdserver"), &["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8(help.stdout).unwrap();
    for wanted in
        ["virbr0", "/var/lib/ecompute", "169.254.169.254", "Exit codes", "SIGTERM", "127.0.0.1:18092"]
    {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}
