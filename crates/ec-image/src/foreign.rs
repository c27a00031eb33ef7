//! Content that is no disk for us, told by its first bytes, so that its name can be said.

use crate::{Packing, Refusal};

/// Beside what is unpacked.
const COMPRESSED: &[(&[u8], &str)] = &[
    (b"BZh", "bzip2"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip"),
    (b"Rar!\x1a\x07", "RAR"),
];

const FOREIGN: &[(usize, &[u8], &str)] = &[
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (0x40, b"\x7f\x10\xda\xbe", "VDI"),
    (0, b"QED\0", "QED"),
    (0, b"WithoutFreeSpace", "Parallels"),
    (0, b"WithouFreSpacExt", "Parallels"),
];

const TAR: (usize, &[u8]) = (257, b"ustar");
const LUKS: &[u8] = b"LUKS\xba\xbe";
const ISO_9660: (usize, &[u8]) = (0x8001, b"CD001");
const BOOT_SIGNATURE: (usize, &[u8]) = (510, b"\x55\xaa");

/// How much of the beginning must be text for the whole to be called so.
const TEXT_PROBE: usize = 1024;

/// Why content which is not qcow2 cannot be taken for a raw disk, if so.
pub(crate) fn refusal(header: &[u8]) -> Option<Refusal> {
    let has =
        |(offset, magic): (usize, &[u8])| header.get(offset..).is_some_and(|rest| rest.starts_with(magic));
    if header.is_empty() {
        return Some(Refusal::Empty);
    }
    if let Some((_, _, name)) = FOREIGN.iter().find(|(offset, magic, _)| has((*offset, magic))) {
        return Some(Refusal::Foreign { format: name });
    }
    let other = || COMPRESSED.iter().find(|(magic, _)| has((0, magic))).map(|(_, name)| *name);
    if let Some(with) = Packing::of(header).map(Packing::name).or_else(other) {
        return Some(Refusal::Compressed { with });
    }
    if has((0, LUKS)) {
        return Some(Refusal::Encrypted);
    }
    if has(TAR) {
        return Some(Refusal::Archive { format: "tar" });
    }
    // An ISO made to be written to a stick has a boot sector too, and boots as a disk.
    if has(ISO_9660) && !has(BOOT_SIGNATURE) {
        return Some(Refusal::CdImage);
    }
    text(&header[..header.len().min(TEXT_PROBE)])
}

/// Error pages are the usual thing to find where an image should be.
fn text(probe: &[u8]) -> Option<Refusal> {
    let text = match std::str::from_utf8(probe) {
        Ok(text) => text,
        // A character that the end of the probe cuts in two is still text.
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
            std::str::from_utf8(&probe[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    if text.chars().any(|c| c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\x0c')) {
        return None;
    }
    let start = text.trim_start_matches('\u{feff}').trim_start().to_ascii_lowercase();
    let html = ["<!doctype html", "<html", "<head", "<body"].iter().any(|tag| start.starts_with(tag));
    Some(if html { Refusal::Html } else { Refusal::Text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_disk_is_called_by_its_name() {
        let at = |offset: usize, magic: &[u8]| {
            let mut bytes = vec![0; 0x9000];
            bytes[offset..offset + magic.len()].copy_from_slice(magic);
            bytes
        };
        for (bytes, wanted) in [
            (Vec::new(), "it is empty"),
            (at(0, b"KDMV"), "a VMDK disk"),
            (at(0x40, b"\x7f\x10\xda\xbe"), "a VDI disk"),
            (at(0, b"vhdxfile"), "a VHDX disk"),
            (at(0, b"\x1f\x8b\x08"), "compressed with gzip"),
            (at(0, b"\xfd7zXZ\0"), "compressed with xz"),
            (at(0, b"\x28\xb5\x2f\xfd"), "compressed with zstd"),
            (at(0, b"BZh91AY"), "compressed with bzip2"),
            (at(0, b"PK\x03\x04"), "compressed with zip"),
            (at(0, b"LUKS\xba\xbe\0\x01"), "encrypted"),
            (at(257, b"ustar"), "a tar archive"),
            (at(0x8001, b"CD001"), "a CD image"),
            (b"\n <!DOCTYPE HTML><p>404".to_vec(), "an HTML page"),
            (b"{\"error\": \"no such thing\"}".to_vec(), "it is text"),
        ] {
            let refusal = refusal(&bytes).unwrap().to_string();
            assert!(refusal.contains(wanted), "{wanted}: {refusal}");
        }
    }

    #[test]
    fn disks_are_not_taken_for_something_else() {
        assert_eq!(refusal(&[0; 4096]), None);
        let mut hybrid = vec![0; 0x9000];
        hybrid[0x8001..0x8006].copy_from_slice(b"CD001");
        hybrid[510..512].copy_from_slice(b"\x55\xaa");
        assert_eq!(refusal(&hybrid), None);
        let mut boot = b"some words that a boot sector may well begin with".to_vec();
        boot.resize(510, b' ');
        boot.extend(b"\x55\xaa");
        assert_eq!(refusal(&boot), None);
    }
}
