//! What this host has to give: amounts measured with sysinfo, traits from the processor's flags.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use ec_model::Resources;
use ec_placement_client::Inventory;

use crate::config::Settings;

/// The largest amount that placement takes for `max_unit` and `total` (a signed 32-bit integer).
const MAX_AMOUNT: u64 = i32::MAX as u64;

/// What QEMU takes of the host's memory for each guest, beside the guest's own, in MiB. Measured; see
/// docs/performance.md.
const GUEST_OVERHEAD_MB: u64 = 96;
/// What the host itself needs of its memory: so many MiB, and so much of a hundred.
const HOST_MB: u64 = 512;
const HOST_PERCENT: u64 = 3;

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Measured {
    /// Logical processors.
    pub(crate) vcpus: u64,
    /// Memory in MiB.
    pub(crate) memory_mb: u64,
    /// The file system of the guests' disks, in GiB.
    pub(crate) disk_gb: u64,
    /// Of these, what neither guests' disks nor cached images take, in GiB, rounded up.
    pub(crate) disk_others_gb: u64,
    /// What is free, in GiB.
    pub(crate) disk_free_gb: u64,
    /// Whether the image cache lies on that file system.
    pub(crate) images_there: bool,
    /// What that takes of it, in GiB, rounded up.
    pub(crate) images_gb: u64,
}

/// Measures this host.
pub(crate) fn measure(settings: &Settings) -> Result<Measured, String> {
    let disks = existing(&settings.storage());
    let failed = |error| format!("failed to measure the file system of {}: {error}", disks.display());
    let stat = nix::sys::statvfs::statvfs(&disks).map_err(failed)?;
    let device = device(&disks);
    let images_there = device.is_some() && device == self::device(&existing(&settings.images));
    let images = if images_there { bytes_in(&settings.images)? } else { 0 };
    let ours = bytes_in(&settings.storage())? + images;
    // What only root may still write is not for guests, whose QEMU is not root.
    let unavailable = (stat.blocks() - stat.blocks_available().min(stat.blocks())) * stat.fragment_size();
    Ok(Measured {
        disk_gb: (stat.blocks() * stat.fragment_size()) >> 30,
        disk_others_gb: unavailable.saturating_sub(ours).div_ceil(1 << 30),
        disk_free_gb: (stat.blocks_available() * stat.fragment_size()) >> 30,
        images_there,
        images_gb: images.div_ceil(1 << 30),
        ..but_disk()?
    })
}

/// What this host has but for its disk, of which nothing is known.
pub(crate) fn but_disk() -> Result<Measured, String> {
    let mut system =
        sysinfo::System::new().map_err(|error| format!("failed to measure this host: {error}"))?;
    system.refresh_memory();
    let vcpus = std::thread::available_parallelism()
        .map_err(|error| format!("failed to count processors: {error}"))?;
    Ok(Measured {
        vcpus: vcpus.get() as u64,
        memory_mb: system.total_memory() >> 20,
        disk_gb: 0,
        disk_others_gb: 0,
        disk_free_gb: 0,
        images_there: false,
        images_gb: 0,
    })
}

/// The nearest directory at or above the path that is there: its file system is the one that it will be on.
pub(crate) fn existing(path: &Path) -> PathBuf {
    path.ancestors().find_map(|path| path.canonicalize().ok()).unwrap_or_else(|| "/".into())
}

fn device(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|metadata| metadata.dev())
}

/// What the files of a directory and those below it take on the disk. What goes meanwhile takes nothing, nor does what is
/// kept from this agent, which is not its own. What cannot be read otherwise may be guests' disks, which are no others' either.
pub(crate) fn bytes_in(directory: &Path) -> Result<u64, String> {
    let failed = |error| format!("failed to measure what lies in {}: {error}", directory.display());
    let Some(entries) = unless_kept(std::fs::read_dir(directory)).map_err(failed)? else { return Ok(0) };
    let mut bytes = 0;
    for entry in entries {
        let entry = entry.map_err(failed)?;
        match unless_kept(entry.metadata()).map_err(failed)? {
            Some(metadata) if metadata.is_dir() => bytes += bytes_in(&entry.path())?,
            // Blocks are counted in units of 512 bytes, whatever the file system's are.
            Some(metadata) => bytes += metadata.blocks() * 512,
            None => {}
        }
    }
    Ok(bytes)
}

/// Nothing where it is gone, or kept from this agent.
fn unless_kept<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{NotFound, PermissionDenied, StaleNetworkFileHandle};
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied | StaleNetworkFileHandle) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// What is not for allocation where the configuration says nothing: the host's own memory and what QEMU takes
/// for as many guests as there are processors to give out; what else lies on the disk, and the image cache at
/// its fullest. Images in use are kept beyond its bound, so what it holds by now may be more.
fn default_reserve(class: &str, measured: &Measured, settings: &Settings) -> u64 {
    match class {
        "MEMORY_MB" => {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "placement itself truncates the product to an integer"
            )]
            let guests = (measured.vcpus as f64 * settings.ratio("VCPU")) as u64;
            let host = HOST_MB + measured.memory_mb * HOST_PERCENT / 100;
            // A small host gives half of what it has all the same: it will not have that many guests.
            (host + guests * GUEST_OVERHEAD_MB).min(measured.memory_mb / 2)
        }
        "DISK_GB" => {
            let bound = if measured.images_there { settings.images_max_bytes.div_ceil(1 << 30) } else { 0 };
            measured.disk_others_gb + bound.max(measured.images_gb)
        }
        _ => 0,
    }
}

/// The inventory to register, with what is reserved: as configured, else by default; and what guests take that
/// placement could not count.
pub(crate) fn inventory(
    measured: &Measured,
    settings: &Settings,
    uncounted: &Resources,
) -> BTreeMap<String, Inventory> {
    [("VCPU", measured.vcpus), ("MEMORY_MB", measured.memory_mb), ("DISK_GB", measured.disk_gb)]
        .into_iter()
        // Placement refuses a total of nothing.
        .filter(|(_, total)| *total > 0)
        .map(|(class, total)| {
            let total = total.min(MAX_AMOUNT);
            let configured = settings.reserved.get(class).copied();
            let uncounted = per_unit(uncounted.get(class).copied().unwrap_or(0), settings.ratio(class));
            // Somebody reserves all that there is by a number that none is above.
            let reserved = configured
                .unwrap_or_else(|| default_reserve(class, measured, settings))
                .saturating_add(uncounted);
            let inventory = Inventory {
                total,
                reserved: reserved.min(total),
                min_unit: 1,
                max_unit: total,
                step_size: 1,
                allocation_ratio: settings.ratio(class),
            };
            (class.to_owned(), inventory)
        })
        .collect()
}

/// What is left for guests' disks, in GiB, before any is allocated.
pub(crate) fn disk_offered_gb(measured: &Measured, settings: &Settings) -> u64 {
    let inventory = inventory(measured, settings, &Resources::new());
    inventory.get("DISK_GB").map_or(0, |disk| disk.total - disk.reserved)
}

/// How much of a total makes up for an amount that may be given out `ratio` times.
fn per_unit(amount: u64, ratio: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "amounts are far below 2^52"
    )]
    let units = (amount as f64 / ratio).ceil() as u64;
    units
}

/// Whether a trait speaks of the processor, so that the agent alone decides about it.
pub(crate) fn is_measured_trait(name: &str) -> bool {
    name.starts_with("HW_CPU_X86_")
}

/// The os-traits names of the flags in `/proc/cpuinfo`.
pub(crate) fn cpu_traits(cpuinfo: &str) -> BTreeSet<String> {
    let flags: BTreeSet<&str> = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("flags"))
        .and_then(|rest| rest.split_once(':'))
        .map(|(_, flags)| flags.split_whitespace().collect())
        .unwrap_or_default();
    FLAG_TRAITS
        .iter()
        .filter(|(flag, _)| flags.contains(flag))
        .map(|(_, name)| format!("HW_CPU_X86_{name}"))
        .collect()
}

/// Linux's flag and the name in os-traits 3.9 (`os_traits/hw/cpu/x86`), behind `HW_CPU_X86_`.
const FLAG_TRAITS: &[(&str, &str)] = &[
    ("3dnow", "3DNOW"),
    ("abm", "ABM"),
    ("aes", "AESNI"),
    ("amx_bf16", "AMXBF16"),
    ("amx_int8", "AMXINT8"),
    ("amx_tile", "AMXTILE"),
    ("avx", "AVX"),
    ("avx2", "AVX2"),
    ("avx512_bitalg", "AVX512BITALG"),
    ("avx512_vbmi2", "AVX512VBMI2"),
    ("avx512_vnni", "AVX512VNNI"),
    ("avx512_vpopcntdq", "AVX512VPOPCNTDQ"),
    ("avx512bw", "AVX512BW"),
    ("avx512cd", "AVX512CD"),
    ("avx512dq", "AVX512DQ"),
    ("avx512er", "AVX512ER"),
    ("avx512f", "AVX512F"),
    ("avx512ifma", "AVX512IFMA"),
    ("avx512pf", "AVX512PF"),
    ("avx512vbmi", "AVX512VBMI"),
    ("avx512vl", "AVX512VL"),
    ("bmi1", "BMI"),
    ("bmi2", "BMI2"),
    ("f16c", "F16C"),
    ("fma", "FMA3"),
    ("fma4", "FMA4"),
    ("mmx", "MMX"),
    ("mpx", "MPX"),
    ("pclmulqdq", "CLMUL"),
    ("pdpe1gb", "PDPE1GB"),
    ("pni", "SSE3"),
    ("rtm", "TSX"),
    ("sgx", "SGX"),
    ("sha_ni", "SHA"),
    ("sse", "SSE"),
    ("sse2", "SSE2"),
    ("sse4_1", "SSE41"),
    ("sse4_2", "SSE42"),
    ("sse4a", "SSE4A"),
    ("ssse3", "SSSE3"),
    ("stibp", "STIBP"),
    ("svm", "SVM"),
    ("tbm", "TBM"),
    ("vmx", "VMX"),
    ("xop", "XOP"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_become_the_traits_of_the_standard_list() {
        let traits = cpu_traits("processor : 0\nflags\t\t: fpu sse sse4_1 pni bmi1 unheard_of\nbugs : x\n");
        let wanted = ["HW_CPU_X86_BMI", "HW_CPU_X86_SSE", "HW_CPU_X86_SSE3", "HW_CPU_X86_SSE41"];
        assert_eq!(traits, wanted.map(str::to_owned).into());
        assert!(cpu_traits("").is_empty());
    }

    #[test]
    fn this_host_has_something_to_give_even_for_a_directory_still_to_be_made() {
        let settings = settings("state_dir: /nonexistent/deep/down");
        let measured = measure(&settings).unwrap();
        assert!(measured.vcpus >= 1 && measured.memory_mb >= 64 && measured.disk_gb >= 1, "{measured:?}");
    }

    #[test]
    fn what_cannot_be_listed_is_not_taken_for_empty() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("disk");
        assert_eq!(bytes_in(&file), Ok(0), "it is not there");
        std::fs::write(&file, [1; 8192]).unwrap();
        assert!(bytes_in(place.path()).unwrap() >= 8192);
        assert!(bytes_in(&file).unwrap_err().contains("failed to measure what lies in"));
    }

    fn settings(yaml: &str) -> Settings {
        Settings::check(&serde_yaml::from_str(yaml).unwrap()).unwrap()
    }

    const HOST: Measured = Measured {
        vcpus: 8,
        memory_mb: 16_384,
        disk_gb: 500,
        disk_others_gb: 30,
        disk_free_gb: 400,
        images_there: true,
        images_gb: 3,
    };

    #[test]
    fn what_the_host_the_guests_processes_and_the_images_need_is_not_offered() {
        let settings = settings("images: {max_gb: 40}");
        let reserved = |uncounted: &Resources| {
            let inventory = inventory(&HOST, &settings, uncounted);
            ["VCPU", "MEMORY_MB", "DISK_GB"].map(|class| inventory[class].reserved)
        };
        assert_eq!(reserved(&Resources::new()), [0, 512 + 491 + 32 * 96, 70]);
        // Six processors that are given out four times each are one and a half.
        let uncounted =
            [("VCPU".to_owned(), 6), ("MEMORY_MB".to_owned(), 1024), ("DISK_GB".to_owned(), 5)].into();
        assert_eq!(reserved(&uncounted), [2, 512 + 491 + 32 * 96 + 1024, 75]);
    }

    #[test]
    fn more_than_there_can_be_is_all_that_there_is() {
        let settings = settings("reserved: {MEMORY_MB: 18446744073709551615}");
        let uncounted = [("MEMORY_MB".to_owned(), 1024)].into();
        assert_eq!(inventory(&HOST, &settings, &uncounted)["MEMORY_MB"].reserved, HOST.memory_mb);
    }

    #[test]
    fn of_a_host_whose_disk_cannot_be_measured_no_disk_is_told() {
        let settings = settings("{}");
        let told = inventory(&but_disk().unwrap(), &settings, &Resources::new());
        assert_eq!(told.into_keys().collect::<Vec<_>>(), ["MEMORY_MB", "VCPU"]);
    }

    #[test]
    fn images_beyond_the_caches_bound_are_not_offered_either() {
        let settings = settings("images: {max_gb: 40}");
        let offered = |measured: &Measured| disk_offered_gb(measured, &settings);
        assert_eq!(offered(&HOST), 500 - 30 - 40);
        assert_eq!(offered(&Measured { images_gb: 64, ..HOST }), 500 - 30 - 64);
        assert_eq!(offered(&Measured { images_there: false, images_gb: 0, ..HOST }), 500 - 30);
    }

    #[test]
    fn what_is_configured_holds_and_no_reserve_passes_the_total() {
        let settings = settings("{reserved: {MEMORY_MB: 0}, images: {max_gb: 400}}");
        let tiny = Measured { memory_mb: 1024, disk_gb: 10, disk_others_gb: 9, ..HOST };
        let inventory = inventory(&tiny, &settings, &Resources::new());
        assert_eq!((inventory["MEMORY_MB"].reserved, inventory["DISK_GB"].reserved), (0, 10));
    }
}
