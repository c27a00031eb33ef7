//! Whether this host is fit for new work: measured again and again, told in the node's record, and felt by placement, which is
//! offered no processor while it is not.

use std::{path::Path, sync::Arc, time::Duration};

use ec_hypervisor::FirstDirectory;
use ec_model::Trouble;
use ec_plan::host::{Measured, Room, judge};
use nix::sys::statvfs::{FsFlags, Statvfs, statvfs};
use tokio_util::sync::CancellationToken;

use crate::{config::Settings, inventory::existing, parts::Parts, storage};

/// Between two looks at the host.
const PERIOD: Duration = Duration::from_secs(10);

/// Looks at the host until `stop`.
pub(crate) async fn watch(parts: &Parts, stop: CancellationToken) {
    let looking = async {
        loop {
            look(parts).await;
            tokio::time::sleep(PERIOD).await;
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = looking => {}
    }
}

/// Looks once.
pub(crate) async fn look(parts: &Parts) {
    let settings = parts.settings.clone();
    let (disks, first) = (settings.disks(parts.node), Arc::clone(&parts.disks));
    let clock_behind = parts.placement.clock_ahead();
    let look = move || {
        let measured = measure(&settings, clock_behind);
        Measured { unwritable: measured.unwritable.or_else(|| is_another(&disks, &first)), ..measured }
    };
    let asked = parts.health.ask(&parts.host, look).await;
    let measured = asked.unwrap_or_else(|before| Measured {
        unwritable: Some(storage::silent(&parts.settings.storage())),
        ..before.unwrap_or_default()
    });
    let before = parts.troubles.borrow().clone();
    let now = judge(&measured, &before, parts.host.now());
    if now == before {
        return;
    }
    for trouble in now.iter().filter(|trouble| !before.contains(trouble)) {
        tracing::warn!(trouble = %trouble.kind, "{}: nothing new is placed here until that is better", trouble.why);
    }
    for trouble in before.iter().filter(|trouble| now.iter().all(|now| now.kind != trouble.kind)) {
        tracing::info!(trouble = %trouble.kind, since = %trouble.since, "this is better");
    }
    parts.troubles.send_replace(now);
}

/// The troubles that a host of these settings is in at this moment, as far as it can tell without asking anybody.
pub(crate) fn troubles(settings: &Settings) -> Vec<Trouble> {
    judge(&measure(settings, None), &[], ec_runtime::Host::default().now())
}

fn measure(settings: &Settings, clock_behind: Option<i64>) -> Measured {
    let memory = sysinfo::System::new().ok().map(|mut system| {
        system.refresh_memory();
        Room { left: system.available_memory(), total: system.total_memory() }
    });
    let stall = std::fs::read_to_string("/proc/pressure/memory").ok().as_deref().and_then(full_of_a_minute);
    let places = [&settings.storage(), &settings.images, &settings.state_dir].map(|place| existing(place));
    let known: Vec<_> =
        places.iter().filter_map(|place| Some((place, statvfs(place.as_path()).ok()?))).collect();
    let disks = known.iter().map(|(place, stat)| (place.display().to_string(), room(stat))).collect();
    let gone = storage::check(settings).err();
    let read_only = known.iter().find(|(_, stat)| stat.flags().contains(FsFlags::ST_RDONLY));
    let unwritable = gone.map(|why| ec_runtime::exit::chain(&why)).or_else(|| {
        read_only.map(|(place, _)| format!("the file system of {} is read-only", place.display()))
    });
    Measured { memory, memory_stall: stall, disks, unwritable, clock_behind }
}

/// That guests' disks are looked for in another directory than at first, whatever lies in it: nothing is known of guests then.
fn is_another(disks: &Path, first: &FirstDirectory) -> Option<String> {
    first.remember(disks).and_then(|()| first.another(disks)).ok().flatten()
}

fn room(stat: &Statvfs) -> Room {
    let unit = stat.fragment_size();
    Room { left: stat.blocks_available() * unit, total: stat.blocks() * unit }
}

/// `avg60` of the line `full`.
fn full_of_a_minute(pressure: &str) -> Option<f64> {
    let line = pressure.lines().find_map(|line| line.strip_prefix("full "))?;
    line.split_whitespace().find_map(|field| field.strip_prefix("avg60="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_word_on_memory_is_read_and_another_is_passed_over() {
        let text = "some avg10=1.00 avg60=2.00 avg300=3.00 total=4\nfull avg10=5.00 avg60=6.50 avg300=7.00 total=8\n";
        assert_eq!(full_of_a_minute(text), Some(6.5));
        assert_eq!(full_of_a_minute("some avg10=1.00 avg60=2.00 avg300=3.00 total=4\n"), None);
        assert_eq!(full_of_a_minute(""), None);
    }

    #[test]
    fn this_host_can_be_measured() {
        let settings = Settings::check(&crate::config::ComputeFile::default()).unwrap();
        let measured = measure(&settings, Some(3));
        assert!(measured.memory.is_some_and(|room| 0 < room.left && room.left < room.total));
        assert_eq!((measured.disks.len(), measured.clock_behind), (3, Some(3)));
    }
}
