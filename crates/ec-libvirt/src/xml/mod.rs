//! libvirt's documents as types. Written and read by serde only, so that no text from outside can become
//! markup, and what libvirt adds in later versions is passed over; but for a definition that others may have changed, of which
//! all stays that is not to be another.

mod domain;
mod ports;
mod resized;
mod storage;
#[cfg(test)]
#[cfg(feature = "testing")]
mod valid;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub(crate) use domain::{DiskXml, DomainXml, Machine, MemoryXml, VolumeFile};
pub(crate) use ports::{NetworkXml, taps};
pub(crate) use resized::resized;
pub(crate) use storage::{BackupXml, PoolXml, VolumeXml, utf8};

pub(crate) use ec_model::MARK_NAMESPACE;

/// An element without content, whose presence says it.
#[derive(Debug, Clone, Copy, Serialize)]
struct Empty {}

/// A number of bytes, as libvirt writes sizes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Size {
    #[serde(rename = "@unit")]
    unit: String,
    #[serde(rename = "$text")]
    amount: u64,
}

impl Size {
    fn new(amount: u64, unit: &str) -> Self {
        Self { unit: unit.to_owned(), amount }
    }
}

/// The mark that makes a domain ours.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Mark {
    #[serde(rename = "@node")]
    pub(crate) node: ec_model::NodeId,
    /// Started from its rescue disk.
    #[serde(rename = "@rescued", default)]
    pub(crate) rescued: bool,
}

/// A mark, as libvirt returns the metadata element; `None` where it is none.
pub(crate) fn mark(element: &str) -> Option<Mark> {
    quick_xml::de::from_str(element).ok()
}

/// Whether the whole document of a domain has a mark that tells of a rescue disk.
pub(crate) fn is_rescued(document: &str) -> bool {
    #[derive(Deserialize)]
    struct Domain {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Metadata {
        instance: Mark,
    }
    quick_xml::de::from_str::<Domain>(document).is_ok_and(|domain| domain.metadata.instance.rescued)
}

/// How many processors a guest has, and how much memory in MiB, by a document that libvirt wrote.
pub(crate) fn size_of(document: &str) -> Option<(u64, u64)> {
    #[derive(Deserialize)]
    struct Domain {
        memory: Memory,
        vcpu: Vcpu,
    }
    #[derive(Deserialize)]
    struct Memory {
        #[serde(rename = "$text")]
        kib: u64,
    }
    #[derive(Deserialize)]
    struct Vcpu {
        #[serde(rename = "@current")]
        current: Option<u64>,
        #[serde(rename = "$text")]
        most: u64,
    }
    let Domain { memory, vcpu } = quick_xml::de::from_str(document).ok()?;
    Some((vcpu.current.unwrap_or(vcpu.most), memory.kib.div_ceil(1024)))
}

/// What a domain has as a disk, and what that is called there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskFile {
    /// The path of a file or a block device; of what has none, words for what it is.
    pub(crate) file: String,
    pub(crate) device: String,
    pub(crate) serial: Option<String>,
    /// A guest can write it: it is neither a CD nor a floppy.
    pub(crate) is_disk: bool,
}

/// What the document of a domain has as disks. `place` tells where a volume of a pool lies, by the names of both.
pub(crate) fn disk_files(
    document: &str,
    place: impl Fn(&str, &str) -> String,
) -> Result<Vec<DiskFile>, String> {
    #[derive(Deserialize)]
    struct Domain {
        devices: Devices,
    }
    #[derive(Deserialize)]
    struct Devices {
        #[serde(rename = "disk", default)]
        disks: Vec<Disk>,
    }
    #[derive(Deserialize)]
    struct Disk {
        #[serde(rename = "@type", default)]
        kind: String,
        #[serde(rename = "@device", default)]
        device: Option<String>,
        source: Option<Source>,
        target: Target,
        serial: Option<String>,
    }
    #[derive(Deserialize)]
    struct Source {
        #[serde(rename = "@file")]
        file: Option<String>,
        #[serde(rename = "@dev")]
        dev: Option<String>,
        #[serde(rename = "@protocol")]
        protocol: Option<String>,
        #[serde(rename = "@name")]
        name: Option<String>,
        #[serde(rename = "@pool")]
        pool: Option<String>,
        #[serde(rename = "@volume")]
        volume: Option<String>,
    }
    #[derive(Deserialize)]
    struct Target {
        #[serde(rename = "@dev")]
        dev: String,
    }
    let Domain { devices } = read(document)?;
    let files = devices.disks.into_iter().filter_map(|Disk { kind, device, source, target, serial }| {
        let Source { file, dev, protocol, name, pool, volume } = source?;
        let file = match (file.or(dev), pool.zip(volume), protocol) {
            (Some(path), ..) => path,
            (None, Some((pool, volume)), _) => place(&pool, &volume),
            (None, None, Some(protocol)) => format!("{protocol}:{}", name.unwrap_or_default()),
            (None, None, None) => format!("something of the type {kind}"),
        };
        let is_disk = device.is_none_or(|device| device == "disk" || device == "lun");
        Some(DiskFile { file, device: target.dev, serial, is_disk })
    });
    Ok(files.collect())
}

/// The files that a backup is written into by its document.
pub(crate) fn backup_files(document: &str) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Backup {
        #[serde(default)]
        disks: Disks,
    }
    #[derive(Default, Deserialize)]
    struct Disks {
        #[serde(rename = "disk", default)]
        disks: Vec<Disk>,
    }
    #[derive(Deserialize)]
    struct Disk {
        target: Option<Target>,
    }
    #[derive(Deserialize)]
    struct Target {
        #[serde(rename = "@file")]
        file: Option<String>,
    }
    let Backup { disks } = read(document)?;
    Ok(disks.disks.into_iter().filter_map(|disk| disk.target?.file).collect())
}

/// Whether the capabilities of a domain type offer the processor mode `maximum`.
pub(crate) fn offers_maximum_cpu(capabilities: &str) -> bool {
    #[derive(Deserialize)]
    struct Capabilities {
        cpu: Cpu,
    }
    #[derive(Deserialize)]
    struct Cpu {
        #[serde(rename = "mode", default)]
        modes: Vec<Mode>,
    }
    #[derive(Deserialize)]
    struct Mode {
        #[serde(rename = "@name")]
        name: String,
        #[serde(rename = "@supported")]
        supported: String,
    }
    quick_xml::de::from_str::<Capabilities>(capabilities).is_ok_and(|capabilities| {
        capabilities.cpu.modes.iter().any(|mode| mode.name == "maximum" && mode.supported == "yes")
    })
}

pub(crate) fn write<T: Serialize>(document: &T) -> Result<String, String> {
    quick_xml::se::to_string(document).map_err(|error| format!("could not write XML: {error}"))
}

pub(crate) fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    quick_xml::de::from_str(text).map_err(|error| format!("could not read libvirt's XML: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_tells_how_large_its_guest_is() {
        let of =
            |memory: &str, vcpu: &str| size_of(&format!("<domain><name>x</name>{memory}{vcpu}</domain>"));
        let memory = "<memory unit='KiB'>196608</memory><currentMemory unit='KiB'>131072</currentMemory>";
        assert_eq!(of(memory, "<vcpu placement='static' current='2'>4</vcpu>"), Some((2, 192)));
        assert_eq!(of(memory, "<vcpu placement='static'>3</vcpu>"), Some((3, 192)));
        assert_eq!(of("", "<vcpu>3</vcpu>"), None);
    }

    #[test]
    fn the_mark_is_read_whatever_the_prefix_and_anything_else_is_no_mark() {
        let node = "11111111-2222-4333-8444-555555555555";
        for element in [
            format!(r#"<instance xmlns="{MARK_NAMESPACE}" node="{node}"/>"#),
            format!(r#"<ec:instance xmlns:ec="{MARK_NAMESPACE}" node="{node}"></ec:instance>"#),
        ] {
            let mark = mark(&element).unwrap();
            assert_eq!((mark.node.to_string().as_str(), mark.rescued), (node, false), "{element}");
        }
        let rescued = format!(r#"<instance xmlns="{MARK_NAMESPACE}" node="{node}" rescued="true"/>"#);
        assert!(mark(&rescued).unwrap().rescued);
        let document =
            |mark: &str| format!("<domain type='kvm'><name>x</name><metadata>{mark}</metadata></domain>");
        assert!(is_rescued(&document(&rescued)));
        let prefixed = format!(r#"<ec:instance xmlns:ec="{MARK_NAMESPACE}" node="{node}" rescued="true"/>"#);
        assert!(is_rescued(&document(&prefixed)));
        assert!(!is_rescued(&document(&rescued.replace("true", "false"))) && !is_rescued("<domain/>"));
        for element in ["", "<instance/>", "<instance node='x'/>", "<instance", "node"] {
            assert!(mark(element).is_none(), "{element}");
        }
    }

    #[test]
    fn the_files_of_a_domain_are_found_among_all_that_it_has() {
        let document = "<domain type='kvm'><name>x</name><devices><emulator>/q</emulator>\
            <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/p/a&amp;b.qcow2' index='2'/>\
            <backingStore type='file'><source file='/c/base'/></backingStore><target dev='vda' bus='virtio'/></disk>\
            <interface type='network'><source network='default'/><target dev='tap0'/></interface>\
            <disk type='file' device='cdrom'><target dev='hda' bus='ide'/></disk>\
            <disk type='block' device='disk'><source dev='/dev/sdb'/><target dev='vdc' bus='virtio'/></disk>\
            <disk type='file' device='disk'><source file='/p/v.qcow2'/><target dev='vdb' bus='virtio'/><serial>v</serial></disk>\
            <disk type='volume' device='disk'><source pool='p' volume='w'/><target dev='vdd'/></disk>\
            <disk type='network'><source protocol='rbd' name='/p/x'><host name='h'/></source><target dev='vde'/></disk>\
            <disk type='nvme' device='disk'><source type='pci' namespace='1'/><target dev='vdf'/></disk>\
            <disk type='file' device='cdrom'><source file='/p/cd'/><target dev='sda'/></disk>\
            </devices></domain>";
        let file = |file: &str, device: &str| DiskFile {
            file: file.into(),
            device: device.into(),
            serial: None,
            is_disk: true,
        };
        let place = |pool: &str, volume: &str| format!("/{pool}/{volume}");
        let all = [
            file("/p/a&b.qcow2", "vda"),
            file("/dev/sdb", "vdc"),
            DiskFile { serial: Some("v".into()), ..file("/p/v.qcow2", "vdb") },
            file("/p/w", "vdd"),
            file("rbd:/p/x", "vde"),
            file("something of the type nvme", "vdf"),
            DiskFile { is_disk: false, ..file("/p/cd", "sda") },
        ];
        assert_eq!(disk_files(document, place).unwrap(), all);
        assert_eq!(disk_files("<domain><devices/></domain>", place).unwrap(), []);
        assert!(disk_files("<domain/>", place).is_err());
    }

    #[test]
    fn the_files_of_a_backup_are_found_by_their_names_and_not_by_how_these_are_escaped() {
        let document = "<domainbackup mode='push'><disks><disk name='vda' backup='yes' type='file' backupmode='full'>\
            <driver type='qcow2'/><target file='/p&amp;q/a&apos;s.part.qcow2'/></disk><disk name='vdb' backup='no'/>\
            <disk name='vdc' backup='yes' type='block'><target dev='/dev/x'/></disk></disks></domainbackup>";
        assert_eq!(backup_files(document).unwrap(), ["/p&q/a's.part.qcow2"]);
        assert_eq!(
            backup_files("<domainbackup mode='pull'><server name='x'/></domainbackup>").unwrap(),
            [""; 0]
        );
        let ours = write(&BackupXml::new([("vda", "/p&q/<x>")])).unwrap();
        assert_eq!(backup_files(&ours).unwrap(), ["/p&q/<x>"]);
    }

    #[test]
    fn the_maximum_processor_is_taken_only_where_it_is_offered() {
        let mode = |supported: &str| {
            format!(
                "<domainCapabilities><path>/q</path><cpu><mode name='host-passthrough' supported='no'/>\
                 <mode name='maximum' supported='{supported}'><enum name='m'/></mode></cpu></domainCapabilities>"
            )
        };
        assert!(offers_maximum_cpu(&mode("yes")));
        assert!(!offers_maximum_cpu(&mode("no")));
        assert!(!offers_maximum_cpu("<domainCapabilities/>"));
    }
}
