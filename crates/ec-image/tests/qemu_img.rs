//! The inspection against what qemu-img itself makes, whole and cut short.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends there")]

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use ec_image::{InspectError, Refusal, inspect_file};
use ec_model::DiskFormat;

const MIB: u64 = 1 << 20;

fn qemu(program: &str, args: &[&str]) -> bool {
    let output = Command::new(program).args(args).output().unwrap();
    if !output.status.success() {
        eprintln!("{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    output.status.success()
}

fn qemu_img_is_there() -> bool {
    let there = Command::new("qemu-img").arg("--version").output().is_ok();
    if !there {
        eprintln!("skipped: there is no qemu-img");
    }
    there
}

/// A raw disk with data at both ends and in the middle, of a size that is no multiple of a cluster.
fn raw(dir: &Path) -> PathBuf {
    let path = dir.join("disk.raw");
    let size = usize::try_from(9 * MIB + 512).unwrap();
    let mut bytes = vec![0; size];
    let mut state = 1_u32;
    let mut noise = |part: &mut [u8]| {
        for byte in part {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = state.to_be_bytes()[0];
        }
    };
    noise(&mut bytes[..3 << 20]);
    noise(&mut bytes[5 << 20..(5 << 20) + 5000]);
    noise(&mut bytes[size - 700..]);
    fs::write(&path, bytes).unwrap();
    path
}

fn refusal(path: &Path) -> Option<Refusal> {
    match inspect_file(&mut File::open(path).unwrap()) {
        Err(InspectError::Refused(refusal)) => Some(refusal),
        other => {
            other.unwrap();
            None
        }
    }
}

/// Makes one image of each kind from the raw disk.
fn zoo(dir: &Path) -> Vec<PathBuf> {
    let disk = raw(dir);
    let disk = disk.to_str().unwrap();
    let mut made = Vec::new();
    let mut make = |name: &str, args: &[&str]| {
        let path = dir.join(name);
        let target = path.to_str().unwrap().to_owned();
        let convert = [&["convert", "-f", "raw", "-O", "qcow2"], args, &[disk, &target]].concat();
        assert!(qemu("qemu-img", &convert), "{name}");
        made.push(path);
    };
    make("plain", &[]);
    make("v2", &["-o", "compat=0.10"]);
    make("compressed", &["-c"]);
    make("compressed-v2", &["-c", "-o", "compat=0.10"]);
    make("zstd", &["-c", "-o", "compression_type=zstd"]);
    make("lazy", &["-o", "lazy_refcounts=on"]);
    make("refcount1", &["-o", "refcount_bits=1"]);
    make("refcount64", &["-o", "refcount_bits=64"]);
    make("small-clusters", &["-o", "cluster_size=512"]);
    make("small-clusters-compressed", &["-c", "-o", "cluster_size=512"]);
    make("big-clusters", &["-o", "cluster_size=2M"]);
    make("big-clusters-compressed", &["-c", "-o", "cluster_size=2M"]);
    make("extended", &["-o", "extended_l2=on,cluster_size=128k"]);
    make("extended-compressed", &["-c", "-o", "extended_l2=on,cluster_size=16k"]);
    for preallocation in ["metadata", "falloc", "full"] {
        make(preallocation, &["-o", &format!("preallocation={preallocation}")]);
    }
    let snapshots = dir.join("snapshots");
    fs::copy(dir.join("plain"), &snapshots).unwrap();
    let target = snapshots.to_str().unwrap();
    for round in 0..3 {
        assert!(qemu("qemu-img", &["snapshot", "-c", &format!("round {round}"), target]));
        let write = format!("write -P {round} {}k 300k", 1000 + round * 77);
        assert!(qemu("qemu-io", &["-f", "qcow2", "-c", &write, target]));
    }
    made.push(snapshots);
    made
}

#[test]
fn every_kind_of_image_that_qemu_img_makes_is_taken_and_a_truncated_one_is_not() {
    if !qemu_img_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for path in zoo(dir.path()) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let inspected = inspect_file(&mut File::open(&path).unwrap())
            .unwrap_or_else(|error| panic!("{name}: {:?}", std::error::Error::source(&error)));
        assert_eq!(
            (inspected.format, inspected.virtual_size),
            (DiskFormat::Qcow2, Some(9 * MIB + 512)),
            "{name}"
        );

        let size = fs::metadata(&path).unwrap().len();
        let cluster = match name {
            "small-clusters" | "small-clusters-compressed" => 512,
            "big-clusters" | "big-clusters-compressed" => 2 << 20,
            "extended" => 128 << 10,
            _ => 64 << 10,
        };
        // A file that ends within its last cluster cannot be told from one that qemu made so.
        for cut in [60, 100, 4096, size / 4, size / 2, size * 3 / 4, size.saturating_sub(cluster + 512)] {
            // Preallocated clusters that were never written read as zeroes, there or not.
            if cut >= size || (matches!(name, "metadata" | "falloc" | "full") && cut > size / 2) {
                continue;
            }
            let short = dir.path().join("short");
            fs::copy(&path, &short).unwrap();
            File::options().write(true).open(&short).unwrap().set_len(cut).unwrap();
            assert!(
                matches!(refusal(&short), Some(Refusal::Truncated { .. })),
                "{name} cut to {cut} of {size}: {:?}",
                refusal(&short)
            );
        }
    }
}

#[test]
fn fresh_images_of_any_size_are_taken() {
    if !qemu_img_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fresh");
    for size in ["512", "1M", "1G", "10G", "2T"] {
        for options in ["compat=1.1", "compat=0.10", "cluster_size=512,compat=1.1", "preallocation=metadata"]
        {
            if (options.contains("512") || options.contains("metadata")) && matches!(size, "2T" | "10G") {
                continue;
            }
            assert!(qemu(
                "qemu-img",
                &["create", "-f", "qcow2", "-o", options, path.to_str().unwrap(), size]
            ));
            assert_eq!(refusal(&path), None, "{size} {options}");
        }
    }
}

#[test]
fn what_leads_outside_the_file_is_refused() {
    if !qemu_img_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let create = |args: &[&str]| assert!(qemu("qemu-img", &[&["create", "-q"], args].concat()));
    create(&["-f", "qcow2", &at("base"), "1M"]);
    create(&["-f", "qcow2", "-b", &at("base"), "-F", "qcow2", &at("overlay")]);
    create(&["-f", "qcow2", "-o", &format!("data_file={}", at("data")), &at("external"), "1M"]);
    create(&[
        "-f",
        "qcow2",
        "--object",
        "secret,id=key,data=abc",
        "-o",
        "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10",
        &at("encrypted"),
        "1M",
    ]);
    match refusal(Path::new(&at("overlay"))) {
        Some(Refusal::BackingFile { name }) => assert_eq!(name, at("base")),
        other => panic!("{other:?}"),
    }
    assert_eq!(refusal(Path::new(&at("external"))), Some(Refusal::ExternalDataFile));
    assert_eq!(refusal(Path::new(&at("encrypted"))), Some(Refusal::Encrypted));
    for (format, name) in [("vmdk", "VMDK"), ("vdi", "VDI"), ("vhdx", "VHDX"), ("vpc", "VHD"), ("qed", "QED")]
    {
        create(&["-f", format, &at(format), "8M"]);
        assert_eq!(refusal(Path::new(&at(format))), Some(Refusal::Foreign { format: name }));
    }
}
