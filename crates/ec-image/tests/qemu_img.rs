//! The inspection against what qemu-img itself makes, whole and cut short.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends there")]
#![expect(clippy::print_stderr, reason = "what was not tried, and why, is worth saying")]

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
fn large_images_are_looked_through_quickly() {
    if !qemu_img_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large");
    // Sparse, with all of its tables, and of more clusters than are counted in one go.
    let create =
        ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", path.to_str().unwrap(), "64G"];
    assert!(qemu("qemu-img", &create));
    let begun = std::time::Instant::now();
    assert_eq!(refusal(&path), None);
    assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn what_leads_outside_the_file_is_refused() {
    if !qemu_img_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    // LUKS is fitted to the processor's speed by a measurement that fails on a loaded machine.
    let create =
        |args: &[&str]| assert!((0..10).any(|_| qemu("qemu-img", &[&["create", "-q"], args].concat())));
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

/// Whether `qemu-img check` finds nothing wrong but perhaps clusters that nobody uses.
fn qemu_img_takes(path: &Path) -> bool {
    let output = Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(path).output().unwrap();
    matches!(output.status.code(), Some(0 | 3))
}

/// Small images of each kind: their tables are next to all there is.
fn small_zoo(dir: &Path) -> Vec<PathBuf> {
    let mut made = Vec::new();
    for (name, options) in [
        ("plain", "cluster_size=4k"),
        ("v2", "compat=0.10,cluster_size=4k"),
        ("refcount1", "refcount_bits=1,cluster_size=4k"),
        ("refcount64", "refcount_bits=64,cluster_size=512"),
        ("extended", "extended_l2=on,cluster_size=16k"),
        ("metadata", "preallocation=metadata,cluster_size=4k"),
        ("zstd", "compression_type=zstd,cluster_size=4k"),
    ] {
        let path = dir.join(name);
        let target = path.to_str().unwrap();
        assert!(qemu("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, target, "300k"]));
        let write =
            ["-f", "qcow2", "-c", "write -P 7 0 20k", "-c", "write -P 9 100k 9k", "-c", "write -z 40k 16k"];
        // What has its place already cannot be compressed.
        let compressed = if name == "metadata" { "write -P 5 64k 16k" } else { "write -c -P 5 64k 16k" };
        assert!(qemu("qemu-io", &[&write[..], &["-c", compressed, target]].concat()));
        if name == "plain" {
            assert!(qemu("qemu-img", &["snapshot", "-c", "one", target]));
            assert!(qemu("qemu-io", &["-f", "qcow2", "-c", "write -P 3 4k 4k", target]));
        }
        made.push(path);
    }
    made
}

#[test]
fn nothing_that_qemu_img_check_refuses_is_taken() {
    use rand::{RngExt, SeedableRng};
    if !qemu_img_is_there() {
        return;
    }
    let rounds: u32 = std::env::var("EC_TEST_MUTATIONS").map_or(60, |text| text.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut random = rand::rngs::StdRng::seed_from_u64(7);
    let path = dir.path().join("mutated");
    let (mut wrong, mut refused, mut strict) = (Vec::new(), 0, 0);
    for sane in small_zoo(dir.path()) {
        let name = sane.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(qemu_img_takes(&sane), "{name}");
        assert_eq!(refusal(&sane), None, "{name}");
        let bytes = fs::read(&sane).unwrap();
        let be64 =
            |at: usize| usize::try_from(u64::from_be_bytes(*bytes[at..].first_chunk().unwrap())).unwrap();
        let entry = |at: usize| be64(at) & 0x00ff_ffff_ffff_fe00;
        // Where it hurts: the header, its extensions, the L1 table, an L2 table, the reference counts' table and
        // a block of theirs, the snapshots.
        let (l1, refcounts) = (be64(40), be64(48));
        let places = [
            (0, 112),
            (104, 64),
            (l1, 8),
            (entry(l1), 640),
            (refcounts, 16),
            (entry(refcounts), 120),
            (if name == "plain" { be64(64) } else { 0 }, 80),
        ];
        for round in 0..rounds {
            let (start, length) = places[round as usize % places.len()];
            let mut mutated = bytes.clone();
            for _ in 0..random.random_range(1..3) {
                let at = start + random.random_range(0..length);
                match random.random_range(0..3) {
                    0 => mutated[at] ^= 1 << random.random_range(0..8),
                    1 => mutated[at] = random.random(),
                    _ => mutated[at] = 0,
                }
            }
            // Not a qcow2 any more, so nothing that qemu would read as one.
            if mutated[..4] != bytes[..4] {
                continue;
            }
            fs::write(&path, &mutated).unwrap();
            let (theirs, ours) = (qemu_img_takes(&path), refusal(&path));
            refused += u32::from(!theirs);
            strict += u32::from(theirs && ours.is_some());
            if !theirs && ours.is_none() {
                let changed: Vec<_> = (0..bytes.len())
                    .filter(|at| bytes[*at] != mutated[*at])
                    .map(|at| (at, bytes[at], mutated[at]))
                    .collect();
                let said =
                    Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&path).output().unwrap();
                wrong.push(format!("{name} {changed:?}: {}", String::from_utf8_lossy(&said.stderr)));
            }
        }
    }
    eprintln!("{refused} refused by qemu-img, {strict} by us alone");
    assert!(refused > rounds, "the mutations hurt");
    assert!(wrong.is_empty(), "{} taken:\n{}", wrong.len(), wrong.join("\n"));
}
