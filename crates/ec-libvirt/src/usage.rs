//! What guests use, from libvirt's counters.

use std::collections::{HashMap, HashSet};

use ec_hypervisor::Usage;
use ec_model::InstanceId;
use uuid::Uuid;
use virt::{connect::Connect, error::Error};

use crate::sys::{Counters, counters};

/// What these have used, of those that are up. One that was too busy to say what time it took is left out: its other
/// counters may be missing, too.
pub(crate) fn read(
    connect: &Connect,
    wanted: &HashSet<InstanceId>,
) -> Result<HashMap<InstanceId, Usage>, Error> {
    let of = |(uuid, numbers): (Uuid, Counters)| {
        let instance = Some(InstanceId::new(uuid)).filter(|instance| wanted.contains(instance))?;
        Some((instance, usage(&numbers)?))
    };
    Ok(counters(connect)?.into_iter().filter_map(of).collect())
}

fn usage(numbers: &[(String, u64)]) -> Option<Usage> {
    let mut usage = Usage::default();
    let mut timed = false;
    for (name, value) in numbers {
        // `net.0.rx.bytes`, `block.1.wr.bytes`
        let words: Vec<&str> = name.split('.').collect();
        match words[..] {
            ["cpu", "time"] => (usage.cpu_ns, timed) = (*value, true),
            ["net", _, "rx" | "tx", "bytes"] => usage.net_bytes = usage.net_bytes.saturating_add(*value),
            ["block", _, "rd" | "wr", "bytes"] => usage.disk_bytes = usage.disk_bytes.saturating_add(*value),
            _ => {}
        }
    }
    timed.then_some(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_and_interfaces_are_added_up_and_other_numbers_passed_over() {
        let numbers = |texts: &[(&str, u64)]| {
            texts.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<Vec<_>>()
        };
        let told = numbers(&[
            ("cpu.time", 7),
            ("cpu.user", 3),
            ("net.0.rx.bytes", 10),
            ("net.0.tx.bytes", 20),
            ("net.0.rx.pkts", 900),
            ("net.1.rx.bytes", u64::MAX),
            ("block.0.rd.bytes", 1),
            ("block.0.wr.bytes", 2),
            ("block.1.rd.bytes", 4),
            ("block.0.allocation", 900),
        ]);
        assert_eq!(usage(&told), Some(Usage { cpu_ns: 7, disk_bytes: 7, net_bytes: u64::MAX }));
        assert_eq!(usage(&numbers(&[("net.0.rx.bytes", 10)])), None);
    }
}
