//! The domain. What is in it and why:
//!
//! * Machine `pc`: its virtio devices also speak the protocol of before 1.0, so that old images boot on
//!   it as surely as new ones; `q35` puts them behind PCI Express ports, where they do not.
//! * Firmware BIOS, boot from the first disk; no network boot ROM, which only costs time.
//! * SMBIOS says OpenStack, as Nova's guests do: by it cloud-init's detection finds the metadata service
//!   in stock images, and takes `uuid` for the instance's id.
//! * The disk is written back through the host's cache: a guest's flush reaches the disk, and the pages of
//!   a base image are shared by all its guests. Discard gives space back to the host.
//! * The console is a file of virtlogd's, which rotates it, so that it is bounded (2 MiB and 3 old ones as
//!   shipped).
//! * A screen, where guests shall have one, is served to nobody by itself: only what libvirt hands over reaches it. Its
//!   mouse is a tablet, so that the viewer's pointer is the guest's.
//! * Emulated guests get a translation cache of 32 MiB, where libvirt can say so: by default qemu takes up
//!   to 1 GiB, which no claim accounts for.
//! * Volumes come behind its own disk, and have their uuids as serial numbers: a guest finds them by these, whatever order its
//!   kernel finds them in. One that is started from a rescue disk has none of them.
//! * One that boots from a volume has that as its first disk, and none of its own.
//! * A rescue disk, where it is started from one, is the first, so that it boots from that, and the disk that is its own the
//!   second. The mark tells of it, since the definition does not: such a guest is started once, as it is here.
//! * It has room to grow while it runs ([`Room`]): processors that are not there yet, and slots for memory, which libvirt
//!   wants a NUMA cell for.
//! * The guest's kernel tells of its panic by an ISA device (pvpanic), which Linux and Windows have drivers for: libvirt ends it then,
//!   as crashed. Without that a guest whose system crashed runs on for ever.
//! * Whatever ends the guest leaves the domain defined: only the agent takes it away.

use ec_guard::ports::tap_name;
use ec_hypervisor::{DomainSpec, Room};
use ec_model::NodeId;
use serde::Serialize;

use super::{Empty, MARK_NAMESPACE, Size};

/// How often memory can be added until the guest is started anew.
pub(super) const SLOTS: u8 = 16;

/// What this host and its configuration add to a spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Machine {
    pub(crate) node: NodeId,
    /// By the processor, else emulated.
    pub(crate) kvm: bool,
    /// Whether emulated guests can have the processor `maximum`.
    pub(crate) maximum_cpu: bool,
    /// Whether libvirt knows the size of the translation cache.
    pub(crate) translation_cache: bool,
    pub(crate) network: String,
    pub(crate) bridge: Option<String>,
    pub(crate) graphics: bool,
    /// Absolute paths. What it boots from: its own disk, or a volume, which is told by its serial number.
    pub(crate) disk: String,
    pub(crate) serial: Option<String>,
    /// To boot from in its place.
    pub(crate) rescue: Option<String>,
    pub(crate) volumes: Vec<VolumeFile>,
    pub(crate) console: String,
}

/// A volume as a domain has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeFile {
    pub(crate) file: String,
    pub(crate) device: String,
    pub(crate) serial: String,
}

/// The document for [`DomainSpec`] on [`Machine`].
#[derive(Debug, Serialize)]
#[serde(rename = "domain")]
pub(crate) struct DomainXml {
    #[serde(rename = "@type")]
    kind: &'static str,
    name: String,
    uuid: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    title: String,
    metadata: Metadata,
    #[serde(rename = "maxMemory", skip_serializing_if = "Option::is_none")]
    max_memory: Option<MaxMemory>,
    memory: Size,
    vcpu: Vcpu,
    os: Os,
    sysinfo: SysInfo,
    features: Features,
    cpu: Cpu,
    clock: Clock,
    on_poweroff: &'static str,
    on_reboot: &'static str,
    on_crash: &'static str,
    devices: Devices,
}

#[derive(Debug, Serialize)]
struct Metadata {
    instance: MarkOut,
}

#[derive(Debug, Serialize)]
struct MarkOut {
    #[serde(rename = "@xmlns")]
    namespace: &'static str,
    #[serde(rename = "@node")]
    node: String,
    #[serde(rename = "@rescued", skip_serializing_if = "Option::is_none")]
    rescued: Option<bool>,
}

#[derive(Debug, Serialize)]
struct MaxMemory {
    #[serde(rename = "@slots")]
    slots: u8,
    #[serde(rename = "@unit")]
    unit: &'static str,
    #[serde(rename = "$text")]
    amount: u64,
}

#[derive(Debug, Serialize)]
struct Vcpu {
    #[serde(rename = "@current")]
    current: u64,
    #[serde(rename = "$text")]
    most: u64,
}

#[derive(Debug, Serialize)]
struct Os {
    #[serde(rename = "type")]
    kind: OsType,
    boot: Dev,
    smbios: Mode,
}

#[derive(Debug, Serialize)]
struct OsType {
    #[serde(rename = "@arch")]
    arch: &'static str,
    #[serde(rename = "@machine")]
    machine: &'static str,
    #[serde(rename = "$text")]
    kind: &'static str,
}

#[derive(Debug, Serialize)]
struct Dev {
    #[serde(rename = "@dev")]
    dev: &'static str,
}

#[derive(Debug, Serialize)]
struct Mode {
    #[serde(rename = "@mode")]
    mode: &'static str,
}

#[derive(Debug, Serialize)]
struct SysInfo {
    #[serde(rename = "@type")]
    kind: &'static str,
    system: System,
}

#[derive(Debug, Serialize)]
struct System {
    entry: Vec<Entry>,
}

#[derive(Debug, Serialize)]
struct Entry {
    #[serde(rename = "@name")]
    name: &'static str,
    #[serde(rename = "$text")]
    value: String,
}

#[derive(Debug, Serialize)]
struct Features {
    acpi: Empty,
    apic: Empty,
    #[serde(skip_serializing_if = "Option::is_none")]
    tcg: Option<Tcg>,
}

#[derive(Debug, Serialize)]
struct Tcg {
    #[serde(rename = "tb-cache")]
    cache: Size,
}

#[derive(Debug, Serialize)]
struct Cpu {
    #[serde(rename = "@mode", skip_serializing_if = "Option::is_none")]
    mode: Option<&'static str>,
    topology: Topology,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa: Option<Numa>,
}

/// One socket with all: some guests' systems use no more than one or two, whatever cores these have.
#[derive(Debug, Serialize)]
struct Topology {
    #[serde(rename = "@sockets")]
    sockets: u8,
    #[serde(rename = "@cores")]
    cores: u64,
    #[serde(rename = "@threads")]
    threads: u8,
}

#[derive(Debug, Serialize)]
struct Numa {
    cell: Cell,
}

#[derive(Debug, Serialize)]
struct Cell {
    #[serde(rename = "@id")]
    id: u8,
    #[serde(rename = "@cpus")]
    cpus: String,
    #[serde(rename = "@memory")]
    memory: u64,
    #[serde(rename = "@unit")]
    unit: &'static str,
}

/// Memory that is added to a guest that runs.
#[derive(Debug, Serialize)]
#[serde(rename = "memory")]
pub(crate) struct MemoryXml {
    #[serde(rename = "@model")]
    model: &'static str,
    target: MemoryTarget,
}

#[derive(Debug, Serialize)]
struct MemoryTarget {
    size: Size,
    node: u8,
}

impl MemoryXml {
    pub(crate) fn new(mib: u64) -> Self {
        Self { model: "dimm", target: MemoryTarget { size: Size::new(mib, "MiB"), node: 0 } }
    }
}

#[derive(Debug, Serialize)]
struct Clock {
    #[serde(rename = "@offset")]
    offset: &'static str,
}

#[derive(Debug, Serialize)]
struct Devices {
    disk: Vec<DiskXml>,
    interface: Vec<Interface>,
    serial: Serial,
    channel: Channel,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<Input>,
    #[serde(skip_serializing_if = "Option::is_none")]
    graphics: Option<Graphics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    video: Option<Video>,
    rng: Rng,
    memballoon: Model,
    panic: Model,
}

/// A disk of a domain, as one that runs is given it, too.
#[derive(Debug, Serialize)]
#[serde(rename = "disk")]
pub(crate) struct DiskXml {
    #[serde(rename = "@type")]
    kind: &'static str,
    #[serde(rename = "@device")]
    device: &'static str,
    driver: DiskDriver,
    source: File,
    target: Target,
    #[serde(skip_serializing_if = "Option::is_none")]
    serial: Option<String>,
}

impl DiskXml {
    fn new(file: &str, device: &str, serial: Option<String>) -> Self {
        Self {
            kind: "file",
            device: "disk",
            driver: DiskDriver { name: "qemu", kind: "qcow2", cache: "writeback", discard: "unmap" },
            source: File { file: file.to_owned() },
            target: Target { dev: device.to_owned(), bus: "virtio" },
            serial,
        }
    }

    /// That of a volume.
    pub(crate) fn of(volume: &VolumeFile) -> Self {
        Self::new(&volume.file, &volume.device, Some(volume.serial.clone()))
    }
}

#[derive(Debug, Serialize)]
struct DiskDriver {
    #[serde(rename = "@name")]
    name: &'static str,
    #[serde(rename = "@type")]
    kind: &'static str,
    #[serde(rename = "@cache")]
    cache: &'static str,
    #[serde(rename = "@discard")]
    discard: &'static str,
}

#[derive(Debug, Serialize)]
struct File {
    #[serde(rename = "@file")]
    file: String,
}

#[derive(Debug, Serialize)]
struct Target {
    #[serde(rename = "@dev")]
    dev: String,
    #[serde(rename = "@bus")]
    bus: &'static str,
}

#[derive(Debug, Serialize)]
struct Interface {
    #[serde(rename = "@type")]
    kind: &'static str,
    mac: Mac,
    source: Source,
    target: Tap,
    model: Type,
    rom: Rom,
}

#[derive(Debug, Serialize)]
struct Mac {
    #[serde(rename = "@address")]
    address: String,
}

/// The device on the host. Named here, so that packet rules can stand before the guest runs.
#[derive(Debug, Serialize)]
struct Tap {
    #[serde(rename = "@dev")]
    dev: String,
}

#[derive(Debug, Default, Serialize)]
struct Source {
    #[serde(rename = "@network", skip_serializing_if = "Option::is_none")]
    network: Option<String>,
    #[serde(rename = "@bridge", skip_serializing_if = "Option::is_none")]
    bridge: Option<String>,
}

#[derive(Debug, Serialize)]
struct Type {
    #[serde(rename = "@type")]
    kind: &'static str,
}

#[derive(Debug, Serialize)]
struct Rom {
    #[serde(rename = "@enabled")]
    enabled: &'static str,
}

#[derive(Debug, Serialize)]
struct Serial {
    #[serde(rename = "@type")]
    kind: &'static str,
    log: Log,
    target: Port,
}

#[derive(Debug, Serialize)]
struct Log {
    #[serde(rename = "@file")]
    file: String,
    #[serde(rename = "@append")]
    append: &'static str,
}

#[derive(Debug, Serialize)]
struct Port {
    #[serde(rename = "@port")]
    port: u8,
}

#[derive(Debug, Serialize)]
struct Channel {
    #[serde(rename = "@type")]
    kind: &'static str,
    target: ChannelTarget,
}

#[derive(Debug, Serialize)]
struct ChannelTarget {
    #[serde(rename = "@type")]
    kind: &'static str,
    #[serde(rename = "@name")]
    name: &'static str,
}

#[derive(Debug, Serialize)]
struct Input {
    #[serde(rename = "@type")]
    kind: &'static str,
    #[serde(rename = "@bus")]
    bus: &'static str,
}

#[derive(Debug, Serialize)]
struct Graphics {
    #[serde(rename = "@type")]
    kind: &'static str,
    listen: Type,
}

#[derive(Debug, Serialize)]
struct Video {
    model: Type,
}

#[derive(Debug, Serialize)]
struct Rng {
    #[serde(rename = "@model")]
    model: &'static str,
    backend: Backend,
}

#[derive(Debug, Serialize)]
struct Backend {
    #[serde(rename = "@model")]
    model: &'static str,
    #[serde(rename = "$text")]
    source: &'static str,
}

#[derive(Debug, Serialize)]
struct Model {
    #[serde(rename = "@model")]
    model: &'static str,
}

impl DomainXml {
    pub(crate) fn new(spec: &DomainSpec, machine: &Machine) -> Self {
        let uuid = spec.instance.to_string();
        let room = Room::of(spec.vcpus, spec.memory_mb, !machine.kvm);
        let numa = room.memory_mb.map(|_| Numa {
            cell: Cell {
                id: 0,
                cpus: format!("0-{}", room.vcpus.saturating_sub(1)),
                memory: spec.memory_mb,
                unit: "MiB",
            },
        });
        let entry = |name, value: &str| Entry { name, value: value.to_owned() };
        Self {
            kind: if machine.kvm { "kvm" } else { "qemu" },
            name: uuid.clone(),
            title: title(&spec.title),
            metadata: Metadata {
                instance: MarkOut {
                    namespace: MARK_NAMESPACE,
                    node: machine.node.to_string(),
                    rescued: machine.rescue.is_some().then_some(true),
                },
            },
            max_memory: room.memory_mb.map(|amount| MaxMemory { slots: SLOTS, unit: "MiB", amount }),
            memory: Size::new(spec.memory_mb, "MiB"),
            vcpu: Vcpu { current: spec.vcpus, most: room.vcpus },
            os: Os {
                kind: OsType { arch: "x86_64", machine: "pc", kind: "hvm" },
                boot: Dev { dev: "hd" },
                smbios: Mode { mode: "sysinfo" },
            },
            sysinfo: SysInfo {
                kind: "smbios",
                system: System {
                    entry: vec![
                        entry("manufacturer", "OpenStack Foundation"),
                        entry("product", "OpenStack Nova"),
                        entry("serial", &uuid),
                        entry("uuid", &uuid),
                        entry("family", "Virtual Machine"),
                    ],
                },
            },
            uuid,
            features: Features {
                acpi: Empty {},
                apic: Empty {},
                tcg: (!machine.kvm && machine.translation_cache).then(|| Tcg { cache: Size::new(32, "MiB") }),
            },
            cpu: Cpu {
                mode: match (machine.kvm, machine.maximum_cpu) {
                    (true, _) => Some("host-passthrough"),
                    (false, true) => Some("maximum"),
                    (false, false) => None,
                },
                topology: Topology { sockets: 1, cores: room.vcpus, threads: 1 },
                numa,
            },
            clock: Clock { offset: "utc" },
            on_poweroff: "destroy",
            on_reboot: "restart",
            on_crash: "destroy",
            devices: Devices::new(spec, machine),
        }
    }
}

impl Devices {
    fn new(spec: &DomainSpec, machine: &Machine) -> Self {
        let interface = |nic, kind, source| Interface {
            kind,
            mac: Mac { address: spec.instance.mac(nic).to_string() },
            source,
            target: Tap { dev: tap_name(spec.instance.mac(nic)) },
            model: Type { kind: "virtio" },
            rom: Rom { enabled: "no" },
        };
        let own = (&machine.disk, machine.serial.clone());
        let own = machine.rescue.iter().map(|file| (file, None)).chain([own]);
        let own = own.zip([crate::disk::DISK, "vdb"]);
        let own = own.map(|((file, serial), device)| DiskXml::new(file, device, serial));
        let volumes = machine.volumes.iter().filter(|_| machine.rescue.is_none()).map(DiskXml::of);
        let network = Source { network: Some(machine.network.clone()), ..Source::default() };
        let mut interfaces = vec![interface(0, "network", network)];
        if let Some(bridge) = &machine.bridge {
            let source = Source { bridge: Some(bridge.clone()), ..Source::default() };
            interfaces.push(interface(1, "bridge", source));
        }
        Self {
            disk: own.chain(volumes).collect(),
            interface: interfaces,
            serial: Serial {
                kind: "pty",
                log: Log { file: machine.console.clone(), append: "on" },
                target: Port { port: 0 },
            },
            channel: Channel {
                kind: "unix",
                target: ChannelTarget { kind: "virtio", name: "org.qemu.guest_agent.0" },
            },
            input: machine.graphics.then_some(Input { kind: "tablet", bus: "usb" }),
            graphics: machine.graphics.then_some(Graphics { kind: "vnc", listen: Type { kind: "none" } }),
            video: machine.graphics.then_some(Video { model: Type { kind: "vga" } }),
            rng: Rng { model: "virtio", backend: Backend { model: "random", source: "/dev/urandom" } },
            memballoon: Model { model: "virtio" },
            panic: Model { model: "isa" },
        }
    }
}

/// libvirt refuses line ends in titles, and XML has no way to write other control characters.
fn title(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() || "\u{fffe}\u{ffff}".contains(c) { ' ' } else { c })
        .take(255)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{super::write, *};

    fn spec() -> DomainSpec {
        DomainSpec {
            instance: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
            title: "web".into(),
            vcpus: 2,
            memory_mb: 513,
            volumes: Vec::new(),
        }
    }

    fn machine() -> Machine {
        Machine {
            node: "11111111-2222-4333-8444-555555555555".parse().unwrap(),
            kvm: false,
            maximum_cpu: true,
            translation_cache: true,
            network: "default".into(),
            bridge: None,
            graphics: false,
            disk: "/pool/x.qcow2".into(),
            serial: None,
            rescue: None,
            volumes: Vec::new(),
            console: "/log/x.log".into(),
        }
    }

    #[track_caller]
    fn contains(xml: &str, parts: &[&str]) {
        for part in parts {
            assert!(xml.contains(part), "no {part} in {xml}");
        }
    }

    #[test]
    fn an_emulated_domain_is_what_was_allocated_and_carries_the_mark() {
        let xml = write(&DomainXml::new(&spec(), &machine())).unwrap();
        let mac = spec().instance.mac(0);
        contains(
            &xml,
            &[
                r#"<domain type="qemu"><name>7d3c1f0a-2b4e-4c55-9a7e-0123456789ab</name>"#,
                "<uuid>7d3c1f0a-2b4e-4c55-9a7e-0123456789ab</uuid><title>web</title>",
                r#"<metadata><instance xmlns="urn:project:etcd-compute/1" node="11111111-2222-4333-8444-555555555555"/></metadata>"#,
                r#"<memory unit="MiB">513</memory><vcpu current="2">2</vcpu>"#,
                r#"<type arch="x86_64" machine="pc">hvm</type><boot dev="hd"/><smbios mode="sysinfo"/>"#,
                r#"<entry name="product">OpenStack Nova</entry>"#,
                r#"<entry name="uuid">7d3c1f0a-2b4e-4c55-9a7e-0123456789ab</entry>"#,
                r#"<features><acpi/><apic/><tcg><tb-cache unit="MiB">32</tb-cache></tcg></features><cpu mode="maximum"><topology sockets="1" cores="2" threads="1"/></cpu>"#,
                "<on_poweroff>destroy</on_poweroff><on_reboot>restart</on_reboot><on_crash>destroy</on_crash>",
                r#"<driver name="qemu" type="qcow2" cache="writeback" discard="unmap"/><source file="/pool/x.qcow2"/>"#,
                &format!(
                    r#"<interface type="network"><mac address="{mac}"/><source network="default"/><target dev="{}"/>"#,
                    tap_name(mac)
                ),
                r#"<serial type="pty"><log file="/log/x.log" append="on"/><target port="0"/></serial>"#,
                r#"<target type="virtio" name="org.qemu.guest_agent.0"/>"#,
                r#"<backend model="random">/dev/urandom</backend>"#,
                r#"<panic model="isa"/>"#,
            ],
        );
        assert!(!xml.contains("graphics") && !xml.contains("type=\"bridge\""), "{xml}");
    }

    #[test]
    fn a_domain_by_the_processor_has_its_features_and_no_translation_cache() {
        let machine = Machine { kvm: true, ..machine() };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        contains(&xml, &[r#"<domain type="kvm">"#, r#"<cpu mode="host-passthrough"><topology "#]);
        assert!(!xml.contains("tcg"), "{xml}");
    }

    #[test]
    fn an_old_libvirt_is_not_told_what_it_does_not_know() {
        let machine = Machine { maximum_cpu: false, translation_cache: false, ..machine() };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        assert!(!xml.contains("tcg") && !xml.contains("mode=\"maximum\""), "{xml}");
    }

    #[test]
    fn a_bridge_adds_a_second_interface_with_its_own_address() {
        let machine = Machine { bridge: Some("br0".into()), ..machine() };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        let mac = spec().instance.mac(1);
        contains(
            &xml,
            &[&format!(r#"<interface type="bridge"><mac address="{mac}"/><source bridge="br0"/>"#)],
        );
    }

    #[test]
    fn a_rescue_disk_comes_before_its_own_and_is_told_by_the_mark() {
        let machine = Machine { rescue: Some("/pool/x.rescue.qcow2".into()), ..machine() };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        let disk = |file: &str, dev: &str| {
            format!(
                r#"<disk type="file" device="disk"><driver name="qemu" type="qcow2" cache="writeback" discard="unmap"/><source file="{file}"/><target dev="{dev}" bus="virtio"/></disk>"#
            )
        };
        let disks = disk("/pool/x.rescue.qcow2", "vda") + &disk("/pool/x.qcow2", "vdb");
        contains(&xml, &[r#"node="11111111-2222-4333-8444-555555555555" rescued="true"/>"#, &disks]);
    }

    #[test]
    fn volumes_come_behind_its_own_disk_and_not_beside_a_rescue_disk() {
        let volume = |file: &str, device: &str| VolumeFile {
            file: file.into(),
            device: device.into(),
            serial: "s<1>".into(),
        };
        let volumes = vec![volume("/pool/v.qcow2", "vdb"), volume("/pool/w.qcow2", "vdd")];
        let machine = Machine { volumes, ..machine() };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        contains(
            &xml,
            &[
                r#"<target dev="vda" bus="virtio"/></disk><disk type="file""#,
                r#"<source file="/pool/v.qcow2"/><target dev="vdb" bus="virtio"/><serial>s&lt;1&gt;</serial></disk><disk "#,
                r#"<source file="/pool/w.qcow2"/><target dev="vdd" bus="virtio"/><serial>"#,
            ],
        );
        let alone = write(&DiskXml::of(&machine.volumes[0])).unwrap();
        assert!(
            alone.starts_with(r#"<disk type="file" device="disk"><driver "#) && xml.contains(&alone),
            "{alone}"
        );
        let machine = Machine { rescue: Some("/pool/x.rescue.qcow2".into()), ..machine };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        assert!(!xml.contains("/pool/v.qcow2") && !xml.contains("/pool/w.qcow2"), "{xml}");
    }

    #[test]
    fn a_volume_that_it_boots_from_is_the_first_disk_and_the_second_beside_a_rescue_disk() {
        let machine = Machine { disk: "/pool/v.qcow2".into(), serial: Some("s".into()), ..machine() };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        let disk = |device: &str| {
            format!(
                r#"<source file="/pool/v.qcow2"/><target dev="{device}" bus="virtio"/><serial>s</serial></disk>"#
            )
        };
        contains(&xml, &[&disk("vda")]);
        assert_eq!(xml.matches("<disk ").count(), 1, "{xml}");
        let machine = Machine { rescue: Some("/pool/x.rescue.qcow2".into()), ..machine };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        contains(&xml, &[r#"<target dev="vda" bus="virtio"/></disk><disk "#, &disk("vdb")]);
    }

    #[test]
    fn a_screen_is_served_to_nobody_by_itself() {
        let machine = Machine { graphics: true, ..machine() };
        let xml = write(&DomainXml::new(&spec(), &machine)).unwrap();
        contains(
            &xml,
            &[r#"<graphics type="vnc"><listen type="none"/></graphics><video><model type="vga"/></video>"#],
        );
    }

    #[test]
    fn nothing_breaks_out_of_its_element() {
        let hostile = r#"</title><x a='"'>&\n"#.to_owned() + "\n\0\u{1b}";
        let machine = Machine {
            network: hostile.clone(),
            bridge: Some(hostile.clone()),
            disk: hostile.clone(),
            console: hostile.clone(),
            ..machine()
        };
        let xml = write(&DomainXml::new(&DomainSpec { title: hostile, ..spec() }, &machine)).unwrap();
        assert!(!xml.contains("<x"), "{xml}");
        contains(&xml, &["<title>&lt;/title&gt;&lt;x a="]);
        let title = xml.split("title>").nth(1).unwrap();
        assert!(!title.contains(char::is_control), "{title:?}");
    }
}
