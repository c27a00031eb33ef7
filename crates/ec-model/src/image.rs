//! Base images, between the cache that holds them and the hypervisor that lays overlays on them.

use std::path::PathBuf;

/// The format of a base image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFormat {
    /// QEMU's copy-on-write format, version 2 or 3.
    Qcow2,
    /// Sectors as they are.
    Raw,
}

impl DiskFormat {
    /// As libvirt and qemu call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
        }
    }
}

/// A base image in the cache, read-only and never replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseImage {
    /// Where it lies, absolute.
    pub path: PathBuf,
    /// Its format, told from its header.
    pub format: DiskFormat,
    /// The size of the disk in it, in bytes.
    pub virtual_size: u64,
    /// SHA-256 of its content, in hex: also its name in the cache.
    pub digest: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_called_as_qemu_calls_them() {
        assert_eq!((DiskFormat::Qcow2.name(), DiskFormat::Raw.name()), ("qcow2", "raw"));
    }
}
