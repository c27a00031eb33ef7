//! What guests do to each other and to their host: take another's addresses, ask for another's metadata,
//! reach for what is not theirs. Two real guests, one of which is an attacker with root rights.

use std::{collections::BTreeMap, fs, net::TcpListener, process::Command, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, State};
use ec_tests::Stack;

const SECRET: &str = "VICTIM-SECRET-42";

/// What the attacker runs. Each line that it prints is a name and what came of it.
const ATTACK: &str = r#"
own=$(cat /sys/class/net/eth0/address) ip=$(cat /run/ip)
say() { echo "$1=$2" >>/run/told; }
md() { timeout 4 wget -q -O - "http://169.254.169.254/latest/$1" 2>/dev/null | tr '\n' ' '; }
can() { timeout 3 wget -q -O - "http://$1:$2/" >/dev/null 2>/run/why; case $(cat /run/why) in *refused*|*unreach*|*"o route"*|"") echo no ;; *) echo yes ;; esac; }
pings() { if ping -c 3 -W 1 "$@" >/dev/null 2>&1; then echo yes; else echo no; fi; }
plain() {
  ip link set eth0 address $own; ip addr flush dev eth0; ip addr add $ip/24 dev eth0
  ip route add default via $G; ip route add 169.254.169.254/32 dev eth0 2>/dev/null
}
say metadata "$(md meta-data/local-hostname)"
say neighbour "$(pings $V)"
say gateway "$(pings $G)"
ip link set eth0 address $VM
say mac "$(md user-data)"
ip addr flush dev eth0; ip addr add $V/24 dev eth0; ip route add default via $G
say mac-and-ip "$(md user-data)"
plain
ip addr add $V/32 dev eth0
say ip-of-neighbour "$(pings -I $V $G)"
arping -c 3 -U -I eth0 $V >/dev/null 2>&1
arping -c 3 -s $V -I eth0 $G >/dev/null 2>&1
arping -c 3 -A -I eth0 $V >/dev/null 2>&1
ip addr del $V/32 dev eth0
ip addr add $F/32 dev eth0
say ip-of-nobody "$(pings -I $F $G)"
plain
say port-of-host "$(can $G $P)"
say port-by-metadata-address "$(can 169.254.169.254 $P)"
udhcpc -n -q -i eth0 -s /etc/dhcp -t 5 -T 1 >/dev/null 2>&1 && say renewed yes || say renewed no
say metadata-afterwards "$(md meta-data/local-hostname)"
say gateway-afterwards "$(pings $G)"
say done yes
"#;

/// Two guests with keys: the attacker, and the victim with its secret.
struct Pair {
    stack: Stack,
    key: String,
    attacker: InstanceId,
    victim: InstanceId,
}

impl Pair {
    async fn start(filter: &str) -> Result<Self> {
        let mut stack = Stack::start().await?;
        set_filter(&stack, filter)?;
        stack.start_agent("").await?;
        let key = stack.key_pair()?;
        let (secret, public) = (stack.directory().join("secret"), format!("{key}.pub"));
        fs::write(&secret, format!("password: {SECRET}\n"))?;
        let attacker = stack.schedule(&["--name", "attacker", "--key", &public])?;
        let secret = secret.display().to_string();
        let victim = stack.schedule(&["--name", "victim", "--key", &public, "--user-data", &secret])?;
        for instance in [attacker, victim] {
            stack.until_state(instance, State::Active).await?;
        }
        Ok(Self { stack, key, attacker, victim })
    }

    async fn ip(&self, instance: InstanceId) -> Result<std::net::IpAddr> {
        self.stack.status(instance).await?.and_then(|status| status.ip).context("no address")
    }

    /// The last start of the agent shows as alive while the one before still does.
    async fn until_held(&self, tap: &str) -> Result<()> {
        let held = async || Ok(nft("list table bridge ecompute").is_ok_and(|text| text.contains(tap)));
        self.stack.until(&format!("{tap} is held"), held).await
    }

    async fn on(&self, instance: InstanceId, command: &str) -> Result<String> {
        self.stack.ssh(&self.key, "root", self.ip(instance).await?, command).await
    }

    /// libvirt tells of no lease any more, as after their time.
    fn leases_end(&self) -> Result<()> {
        for entry in fs::read_dir(self.stack.libvirt.directory().join("var/lib/libvirt/dnsmasq"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "status") {
                fs::write(path, "[]")?;
            }
        }
        Ok(())
    }

    /// What came of each attack, and where the host takes the victim to be afterwards.
    async fn attack(&self) -> Result<(BTreeMap<String, String>, String)> {
        let victim = self.ip(self.victim).await?;
        // It is up, and the host knows where.
        self.on(self.victim, "true").await?;
        // As etcd does that listens everywhere: on every address of the host.
        let listener = TcpListener::bind("0.0.0.0:0")?;
        let port = listener.local_addr()?.port();
        let server = thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                use std::io::Write;
                let _ = (&stream).write_all(b"HTTP/1.0 404 here\r\n\r\n");
            }
        });
        let gateway = self.stack.libvirt.gateway();
        let [a, b, c, _] = gateway.octets();
        let script =
            format!("V={victim} VM={} G={gateway} F={a}.{b}.{c}.253 P={port}\n{ATTACK}", self.victim.mac(0));
        let encoded = script.replace('\'', "'\\''");
        // It takes its own address away, so it must go on without us.
        let begin = format!(
            "printf %s '{encoded}' >/run/attack; rm -f /run/told; setsid sh /run/attack >/dev/null 2>&1 </dev/null &"
        );
        self.on(self.attacker, &begin).await?;
        let mut told = String::new();
        for _ in 0..60 {
            tokio::time::sleep(Duration::from_secs(2)).await;
            told = self.on(self.attacker, "cat /run/told 2>/dev/null || true").await?;
            if told.contains("done=yes") {
                break;
            }
        }
        drop(server);
        let table = fs::read_to_string("/proc/net/arp")?;
        let place = table.lines().find(|line| line.split_whitespace().next() == Some(&victim.to_string()));
        let place = place.and_then(|line| line.split_whitespace().nth(3)).unwrap_or_default().to_owned();
        let told = told.lines().filter_map(|line| line.split_once('='));
        Ok((told.map(|(name, what)| (name.to_owned(), what.trim().to_owned())).collect(), place))
    }
}

/// The stack's `libvirt` section is one line, which gets one key more.
fn set_filter(stack: &Stack, filter: &str) -> Result<()> {
    let path = stack.directory().join("compute.yaml");
    let text = fs::read_to_string(&path)?;
    let filter = if filter.is_empty() { String::new() } else { format!("address_filter: {filter}, ") };
    Ok(fs::write(&path, text.replace("libvirt: {", &format!("libvirt: {{{filter}")))?)
}

fn nft(arguments: &str) -> Result<String> {
    let output = Command::new("nft").args(arguments.split(' ')).output().context("failed to run nft")?;
    ensure!(output.status.success(), "nft {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn results<const N: usize>(wanted: [(&str, &str); N]) -> BTreeMap<String, String> {
    wanted.map(|(name, what)| (name.to_owned(), what.to_owned())).into()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_nobody_but_itself_and_reaches_nothing_of_its_host() -> Result<()> {
    let pair = Pair::start("learned").await?;
    let (told, place) = pair.attack().await?;
    let wanted = results([
        ("metadata", "attacker"),
        ("neighbour", "yes"),
        ("gateway", "yes"),
        ("mac", ""),
        ("mac-and-ip", ""),
        ("ip-of-neighbour", "no"),
        ("ip-of-nobody", "no"),
        ("port-of-host", "no"),
        ("port-by-metadata-address", "no"),
        ("renewed", "yes"),
        ("metadata-afterwards", "attacker"),
        ("gateway-afterwards", "yes"),
        ("done", "yes"),
    ]);
    assert_eq!(told, wanted, "{}", nft("list ruleset")?);
    assert_eq!(place, pair.victim.mac(0).to_string(), "the host knows where the victim is");
    let read = pair.on(pair.victim, "wget -q -O - http://169.254.169.254/latest/user-data").await?;
    assert_eq!(read, format!("password: {SECRET}"));
    // Nobody else's address became one of theirs.
    for instance in [pair.attacker, pair.victim] {
        let status = pair.stack.status(instance).await?.context("no status")?;
        assert_eq!(status.addresses.len(), 1, "{:?}", status.addresses);
    }

    // An agent that is killed and started again, and a firewall that flushes everything: guests stay held,
    // and go on with the addresses that they have.
    let mut pair = pair;
    pair.stack.kill_agent()?;
    nft("flush ruleset")?;
    pair.stack.start_agent("").await?;
    let tap = ec_guard::ports::tap_name(pair.attacker.mac(0));
    pair.until_held(&tap).await?;
    assert_eq!(pair.on(pair.attacker, "hostname").await?, "attacker");
    nft("flush ruleset")?;
    pair.until_held(&tap).await?;
    let (told, place) = pair.attack().await?;
    assert_eq!(told, wanted);
    assert_eq!(place, pair.victim.mac(0).to_string());

    // What is gone leaves nothing, and the other is not touched.
    let gone = pair.attacker.to_string();
    assert!(pair.stack.eschedule(&["destroy", "--wait", &gone])?.status.success());
    let text = nft("list table bridge ecompute")?;
    assert!(!text.contains(&tap), "{text}");
    assert!(text.contains(&ec_guard::ports::tap_name(pair.victim.mac(0))), "{text}");
    assert_eq!(pair.on(pair.victim, "hostname").await?, "victim");

    // The host is started anew, long after the lease of a guest that is still up with the address it has.
    let ip = pair.ip(pair.victim).await?;
    pair.stack.kill_agent()?;
    pair.leases_end()?;
    nft("flush ruleset")?;
    pair.stack.start_agent("").await?;
    pair.until_held(&ec_guard::ports::tap_name(pair.victim.mac(0))).await?;
    assert_eq!(pair.stack.ssh(&pair.key, "root", ip, "hostname").await?, "victim");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rules_guests_lie_as_the_script_sees() -> Result<()> {
    let pair = Pair::start("off").await?;
    assert!(nft("list table bridge ecompute").is_err(), "off is off");
    let (told, _) = pair.attack().await?;
    // The script sees what the rules prevent.
    for name in ["ip-of-nobody", "port-of-host", "port-by-metadata-address"] {
        assert_eq!(told[name], "yes", "{name}: {told:?}");
    }
    assert_eq!(told["metadata"], "attacker");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_of_a_release_that_did_not_name_its_tap_is_held_by_the_name_it_has() -> Result<()> {
    let mut pair = Pair::start("").await?;
    let ip = pair.ip(pair.attacker).await?;
    pair.stack.kill_agent()?;
    // As the release before defined and started it.
    let connect = pair.stack.libvirt.connection();
    let domain = connect.lookup_domain_by_uuid(pair.attacker.uuid())?;
    let tap = ec_guard::ports::tap_name(pair.attacker.mac(0));
    let xml = domain.xml_desc(0)?.replace(&format!("<target dev='{tap}'/>"), "");
    domain.destroy()?;
    domain.undefine()?;
    connect.define_domain_xml(&xml)?.create()?;
    nft("flush ruleset")?;
    pair.stack.start_agent("").await?;
    pair.until_held("\"vnet").await?;
    assert!(!nft("list table bridge ecompute")?.contains(&tap));
    assert_eq!(pair.on(pair.attacker, "hostname").await?, "attacker", "{ip}");
    let (told, _) = pair.attack().await?;
    for name in ["mac", "mac-and-ip"] {
        assert_eq!(told[name], "", "{name}: {told:?}");
    }
    for name in ["ip-of-nobody", "port-of-host"] {
        assert_eq!(told[name], "no", "{name}: {told:?}");
    }
    assert_eq!(told["metadata"], "attacker", "{told:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn where_rules_cannot_be_the_check_and_the_agent_say_so() -> Result<()> {
    let mut stack = Stack::start().await?;
    // Everything else that the agent may run.
    let programs = stack.directory().join("programs");
    fs::create_dir(&programs)?;
    for directory in ["/usr/bin", "/usr/sbin"] {
        for entry in fs::read_dir(directory)?.flatten().filter(|entry| entry.file_name() != "nft") {
            // Both may have one.
            let _ = std::os::unix::fs::symlink(entry.path(), programs.join(entry.file_name()));
        }
    }
    let without = || {
        let mut command = stack.command("ecompute");
        command.env("PATH", &programs);
        command
    };
    let output = without().arg("--check").output()?;
    let text = String::from_utf8(output.stdout)?;
    let line = text.lines().find(|line| line.starts_with("guests")).context("no line about guests")?;
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(line.contains("FAILED") && line.contains("install the package nftables"), "{line}");

    // Asked for, it is needed: no guest runs without.
    set_filter(&stack, "learned")?;
    let output = without().output()?;
    let text = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(last.contains("libvirt.address_filter is set") && last.contains("nftables"), "{text}");

    // Not asked for, it is told, and guests run.
    let path = stack.directory().join("compute.yaml");
    fs::write(&path, fs::read_to_string(&path)?.replace("address_filter: learned, ", ""))?;
    let log = stack.directory().join("without.log");
    let mut agent = without().stdout(std::process::Stdio::null()).stderr(fs::File::create(&log)?).spawn()?;
    let told = stack
        .until("the agent says so", async || {
            let text = fs::read_to_string(&log)?;
            Ok(text
                .lines()
                .any(|line| line.contains("ERROR") && line.contains("not held to their own addresses")))
        })
        .await;
    agent.kill()?;
    agent.wait()?;
    told?;
    // With the program, there are rules.
    stack.start_agent("").await?;
    let bridge = stack.libvirt.bridge().to_owned();
    let held = async || Ok(nft("list set inet ecompute bridges").is_ok_and(|text| text.contains(&bridge)));
    stack.until("the rules are there", held).await
}
