//! Pools and volumes.

use std::path::Path;

use ec_model::{BaseImage, DiskFormat};
use serde::{Deserialize, Serialize};

use super::Size;

/// A directory as a pool.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename = "pool")]
pub(crate) struct PoolXml {
    #[serde(rename = "@type")]
    pub(crate) kind: String,
    name: String,
    pub(crate) target: Option<PoolTarget>,
}

/// Where the pool lies.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PoolTarget {
    pub(crate) path: String,
    #[serde(skip_serializing_if = "Option::is_none", skip_deserializing)]
    permissions: Option<Permissions>,
}

#[derive(Debug, Serialize)]
struct Permissions {
    mode: &'static str,
}

impl PoolXml {
    /// A pool of that name in that directory.
    pub(crate) fn directory(name: &str, path: &str) -> Self {
        // qemu, which does not run as root, passes through and lists nothing.
        let permissions = Some(Permissions { mode: "0711" });
        Self {
            kind: "dir".into(),
            name: name.into(),
            target: Some(PoolTarget { path: path.into(), permissions }),
        }
    }
}

/// A disk. Two are equal when an instance may run on either.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename = "volume")]
pub(crate) struct VolumeXml {
    name: String,
    capacity: Size,
    target: Format,
    #[serde(rename = "backingStore", skip_serializing_if = "Option::is_none")]
    backing: Option<Backing>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Format {
    format: Kind,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Kind {
    #[serde(rename = "@type")]
    kind: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Backing {
    path: String,
    format: Kind,
}

fn kind(format: DiskFormat) -> Kind {
    Kind { kind: format.name().into() }
}

impl VolumeXml {
    /// One of that name and capacity in bytes that stands on nothing.
    pub(crate) fn alone(name: &str, capacity: u64) -> Self {
        Self {
            name: name.into(),
            capacity: Size::new(capacity.next_multiple_of(512), "bytes"),
            target: Format { format: kind(DiskFormat::Qcow2) },
            backing: None,
        }
    }

    /// The overlay `name` on `base` with that capacity in bytes. A path that is not UTF-8 cannot be told
    /// to libvirt, so it is an error.
    pub(crate) fn overlay(name: &str, base: &BaseImage, capacity: u64) -> Result<Self, String> {
        let path = utf8(&base.path)?;
        Ok(Self {
            name: name.into(),
            // qcow2 counts in sectors, and would round up by itself; then it would not compare equal.
            capacity: Size::new(capacity.next_multiple_of(512), "bytes"),
            target: Format { format: kind(DiskFormat::Qcow2) },
            backing: Some(Backing { path: path.into(), format: kind(base.format) }),
        })
    }

    /// Whether it is one of that name on the same base, whatever its size.
    pub(crate) fn stands_as(&self, other: &Self) -> bool {
        (&self.name, &self.target, &self.backing) == (&other.name, &other.target, &other.backing)
    }
}

/// A backup of disks into files that are there.
#[derive(Debug, Serialize)]
#[serde(rename = "domainbackup")]
pub(crate) struct BackupXml {
    #[serde(rename = "@mode")]
    mode: &'static str,
    disks: BackupDisks,
}

#[derive(Debug, Serialize)]
struct BackupDisks {
    disk: Vec<BackupDisk>,
}

#[derive(Debug, Serialize)]
struct BackupDisk {
    #[serde(rename = "@name")]
    name: String,
    #[serde(rename = "@backup")]
    backup: &'static str,
    #[serde(rename = "@type")]
    kind: &'static str,
    driver: Kind,
    target: BackupTarget,
}

#[derive(Debug, Serialize)]
struct BackupTarget {
    #[serde(rename = "@file")]
    file: String,
}

impl BackupXml {
    /// Of the disks that the domain has as these devices, each into its file, and of no others.
    pub(crate) fn new<'a>(disks: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let disk = disks.into_iter().map(|(device, file)| BackupDisk {
            name: device.into(),
            backup: "yes",
            kind: "file",
            driver: kind(DiskFormat::Qcow2),
            target: BackupTarget { file: file.into() },
        });
        Self { mode: "push", disks: BackupDisks { disk: disk.collect() } }
    }
}

/// A path as libvirt wants it.
pub(crate) fn utf8(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| format!("the path {} is not UTF-8", path.display()))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{read, write},
        *,
    };

    fn base() -> BaseImage {
        BaseImage {
            path: "/cache/a&b<c>.qcow2".into(),
            format: DiskFormat::Raw,
            virtual_size: 1000,
            digest: String::new(),
        }
    }

    #[test]
    fn an_overlay_names_its_base_escaped_and_compares_with_what_libvirt_tells() {
        let overlay = VolumeXml::overlay("x.qcow2", &base(), 1000).unwrap();
        let xml = write(&overlay).unwrap();
        assert!(xml.starts_with("<volume><name>x.qcow2</name>"), "{xml}");
        assert!(xml.contains("<path>/cache/a&amp;b&lt;c&gt;.qcow2</path><format type=\"raw\"/>"), "{xml}");
        let told = "<volume type='file'><name>x.qcow2</name><key>/p/x.qcow2</key>\
            <capacity unit='bytes'>1024</capacity><allocation unit='bytes'>196624</allocation>\
            <target><path>/p/x.qcow2</path><format type='qcow2'/><permissions><mode>0600</mode></permissions>\
            <compat>1.1</compat></target><backingStore><path>/cache/a&amp;b&lt;c&gt;.qcow2</path>\
            <format type='raw'/><permissions><mode>0644</mode></permissions></backingStore></volume>";
        assert_eq!(read::<VolumeXml>(told).unwrap(), overlay);
        let half = "<volume type='file'><name>x.qcow2</name><capacity unit='bytes'>0</capacity>\
            <target><format type='raw'/></target></volume>";
        assert_ne!(read::<VolumeXml>(half).unwrap(), overlay, "a half-made one is another");
    }

    #[test]
    fn a_pool_is_a_directory_that_others_may_pass() {
        let xml = write(&PoolXml::directory("p", "/d")).unwrap();
        assert_eq!(
            xml,
            r#"<pool type="dir"><name>p</name><target><path>/d</path><permissions><mode>0711</mode></permissions></target></pool>"#
        );
        let told = "<pool type='dir'><name>p</name><uuid>u</uuid><capacity unit='bytes'>1</capacity><source>\
            </source><target><path>/d</path><permissions><mode>0711</mode><owner>0</owner></permissions></target></pool>";
        assert_eq!(read::<PoolXml>(told).unwrap().target.unwrap().path, "/d");
    }
}
