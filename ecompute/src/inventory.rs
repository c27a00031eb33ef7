//! What this host has to give: amounts measured with sysinfo, traits from the processor's flags.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use ec_placement_client::Inventory;

use crate::config::Settings;

/// The largest amount that placement takes for `max_unit` and `total` (a signed 32-bit integer).
const MAX_AMOUNT: u64 = i32::MAX as u64;

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Measured {
    /// Logical processors.
    pub(crate) vcpus: u64,
    /// Memory in MiB.
    pub(crate) memory_mb: u64,
    /// The file system of the state directory, in GiB.
    pub(crate) disk_gb: u64,
    /// Of these, not used yet, in GiB.
    pub(crate) disk_free_gb: u64,
}

/// Measures this host.
pub(crate) fn measure(state_dir: &Path) -> Result<Measured, String> {
    let mut system =
        sysinfo::System::new().map_err(|error| format!("failed to measure this host: {error}"))?;
    system.refresh_memory();
    let vcpus = std::thread::available_parallelism()
        .map_err(|error| format!("failed to count processors: {error}"))?;
    let disks = sysinfo::Disks::new_with_refreshed_list()
        .map_err(|error| format!("failed to list file systems: {error}"))?;
    // The path may not exist yet; its mount point is that of the nearest directory above that does.
    let existing =
        state_dir.ancestors().find_map(|path| path.canonicalize().ok()).unwrap_or_else(|| "/".into());
    let disk = disks
        .iter()
        .filter(|disk| existing.starts_with(disk.mount_point()))
        .max_by_key(|disk| disk.mount_point().as_os_str().len())
        .ok_or_else(|| format!("failed to find the file system of {}", state_dir.display()))?;
    Ok(Measured {
        vcpus: vcpus.get() as u64,
        memory_mb: system.total_memory() >> 20,
        disk_gb: disk.total_space() >> 30,
        disk_free_gb: disk.available_space() >> 30,
    })
}

/// The inventory to register, with what the configuration reserves.
pub(crate) fn inventory(measured: &Measured, settings: &Settings) -> BTreeMap<String, Inventory> {
    [("VCPU", measured.vcpus), ("MEMORY_MB", measured.memory_mb), ("DISK_GB", measured.disk_gb)]
        .into_iter()
        // Placement refuses a total of nothing.
        .filter(|(_, total)| *total > 0)
        .map(|(class, total)| {
            let total = total.min(MAX_AMOUNT);
            let reserved = settings.reserved.get(class).copied().unwrap_or(0).min(total);
            let inventory = Inventory {
                total,
                reserved,
                min_unit: 1,
                max_unit: total,
                step_size: 1,
                allocation_ratio: settings.ratio(class),
            };
            (class.to_owned(), inventory)
        })
        .collect()
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
        let measured = measure(Path::new("/nonexistent/deep/down")).unwrap();
        assert!(measured.vcpus >= 1 && measured.memory_mb >= 64 && measured.disk_gb >= 1, "{measured:?}");
    }
}
