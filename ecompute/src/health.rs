//! Whether this host is fit for new work: measured again and again, told in the node's record, and felt by placement, which is
//! offered no processor while it is not.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ec_hypervisor::{AddressRoom, FirstDirectory, HypervisorResult};
use ec_model::Trouble;
use ec_plan::host::{Measured, Room, judge};
use ec_runtime::Host;
use nix::sys::statvfs::{FsFlags, Statvfs, statvfs};
use tokio_util::sync::CancellationToken;

use crate::{
    config::Settings,
    inventory::existing,
    parts::Parts,
    storage::{self, Asked},
};

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

/// The questions that a look asks, each of its own: one that is not answered keeps no other from its answer.
#[derive(Default)]
pub(crate) struct Questions {
    memory: Asked<Memory>,
    places: [Asked<Option<Seen>>; 3],
    storage: Asked<Option<String>>,
    addresses: OfNetworks<AddressRoom>,
    network: OfNetworks<String>,
}

/// What the hypervisor told last of guests' networks.
struct OfNetworks<T>(Mutex<Option<T>>);

impl<T> Default for OfNetworks<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> OfNetworks<T> {
    /// What it tells now; what it told last, while it does not: that it is away frees no address, and brings no network back.
    async fn ask(&self, asked: impl Future<Output = HypervisorResult<Option<T>>>) -> Option<T> {
        let told = tokio::time::timeout(storage::ANSWERS_IN, asked).await;
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(Ok(told)) = told {
            *known = told;
        }
        known.clone()
    }
}

/// What is left of memory, and what waited for it.
type Memory = (Option<Room>, Option<f64>);

/// What was seen of a file system.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    place: String,
    room: Room,
    /// Nothing where it makes files as long as it has room.
    files: Option<Room>,
    is_read_only: bool,
}

/// Looks once.
pub(crate) async fn look(parts: &Parts) {
    let (settings, first) = (parts.settings.clone(), Arc::clone(&parts.disks));
    let disks = settings.disks(parts.node);
    let gone = move || gone(&settings).or_else(|| is_another(&disks, &first));
    let places = places(&parts.settings);
    let (measured, addresses, network) = tokio::join!(
        parts.health.measured(&parts.host, places, seen, gone),
        parts.health.addresses.ask(parts.hypervisor.address_room()),
        parts.health.network.ask(parts.hypervisor.network_trouble()),
    );
    let addresses = addresses.map(|room| (room.network, Room { left: room.left, total: room.total }));
    let measured = Measured { clock_behind: parts.placement.clock_ahead(), network, addresses, ..measured };
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
    judge(&measure(settings, None), &[], Host::default().now())
}

impl Questions {
    /// What all of them answer. Of a place that does not, it is as it was seen last, but that nothing can be written there.
    async fn measured(
        &self,
        host: &Host,
        places: [PathBuf; 3],
        seen: impl Fn(&Path) -> Option<Seen> + Clone + Send + 'static,
        gone: impl FnOnce() -> Option<String> + Send + 'static,
    ) -> Measured {
        let of_places = self.places.iter().zip(&places).map(|(asked, place)| {
            let (seen, place) = (seen.clone(), place.clone());
            asked.ask(host, move || seen(&place))
        });
        let (memory, of_places, gone) = tokio::join!(
            self.memory.ask(host, memory),
            futures::future::join_all(of_places),
            self.storage.ask(host, gone),
        );
        let silent = of_places.iter().zip(&places).find(|(answer, _)| answer.is_err());
        // Whether storage is there is asked of the records, too: where those are silent, it is they.
        let silent = silent.map(|(_, place)| place).or_else(|| gone.is_err().then_some(&places[0]));
        let silent = silent.map(|place| storage::silent(place));
        let known: Vec<Seen> =
            of_places.into_iter().filter_map(|answer| answer.unwrap_or_else(Option::flatten)).collect();
        put_together(memory.unwrap_or_else(Option::unwrap_or_default), known, silent.or(gone.ok().flatten()))
    }
}

/// Where guests' disks, images and the agent's records are written.
fn places(settings: &Settings) -> [PathBuf; 3] {
    [settings.storage(), settings.images.clone(), settings.state_dir.clone()]
}

fn measure(settings: &Settings, clock_behind: Option<i64>) -> Measured {
    let known = places(settings).iter().filter_map(|place| seen(place)).collect();
    Measured { clock_behind, ..put_together(memory(), known, gone(settings)) }
}

fn put_together((memory, memory_stall): Memory, known: Vec<Seen>, gone: Option<String>) -> Measured {
    let read_only = known.iter().find(|seen| seen.is_read_only);
    let unwritable =
        gone.or_else(|| read_only.map(|seen| format!("the file system of {} is read-only", seen.place)));
    let files = known.iter().filter_map(|seen| Some((seen.place.clone(), seen.files?))).collect();
    let disks = known.into_iter().map(|seen| (seen.place, seen.room)).collect();
    Measured { memory, memory_stall, disks, files, unwritable, ..Measured::default() }
}

fn memory() -> Memory {
    let memory = sysinfo::System::new().ok().map(|mut system| {
        system.refresh_memory();
        Room { left: system.available_memory(), total: system.total_memory() }
    });
    let stall = std::fs::read_to_string("/proc/pressure/memory").ok().as_deref().and_then(full_of_a_minute);
    (memory, stall)
}

fn seen(place: &Path) -> Option<Seen> {
    let place = existing(place);
    let stat = statvfs(place.as_path()).ok()?;
    let is_read_only = stat.flags().contains(FsFlags::ST_RDONLY);
    Some(Seen { place: place.display().to_string(), room: room(&stat), files: files(&stat), is_read_only })
}

/// Why what guests' disks lie on cannot serve.
fn gone(settings: &Settings) -> Option<String> {
    storage::check(settings).err().map(|why| ec_runtime::exit::chain(&why))
}

/// That guests' disks are looked for in another directory than at first, whatever lies in it: nothing is known of guests then.
fn is_another(disks: &Path, first: &FirstDirectory) -> Option<String> {
    first.remember(disks).and_then(|()| first.another(disks)).ok().flatten()
}

fn room(stat: &Statvfs) -> Room {
    let unit = stat.fragment_size();
    Room { left: stat.blocks_available() * unit, total: stat.blocks() * unit }
}

/// The inodes; btrfs, say, has no such number, and tells of none.
fn files(stat: &Statvfs) -> Option<Room> {
    let (left, total) = (stat.files_available(), stat.files());
    (total > 0).then_some(Room { left, total })
}

/// `avg60` of the line `full`.
fn full_of_a_minute(pressure: &str) -> Option<f64> {
    let line = pressure.lines().find_map(|line| line.strip_prefix("full "))?;
    line.split_whitespace().find_map(|field| field.strip_prefix("avg60="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use ec_hypervisor::{HypervisorError, SimulatedHypervisor};
    use ec_model::{NodeId, TroubleKind};
    use ec_placement_client::PlacementClient;
    use ec_runtime::config::parse;
    use ec_store::MemoryStore;

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
        let of = |place: &str| (statvfs(place).unwrap().files(), seen(place.as_ref()).unwrap().files);
        assert_eq!(of("/proc"), (0, None), "it has none, and is not short of them");
        let (has, told) = of("/");
        assert_eq!(told.map_or(0, |room| room.total), has);
    }

    #[tokio::test(start_paused = true)]
    async fn a_network_has_as_many_addresses_as_were_told_last_while_its_hypervisor_is_away() {
        let addresses = OfNetworks::default();
        let room = Some(AddressRoom { network: "n".into(), left: 0, total: 9, next: None });
        let gone = || HypervisorError::Unreachable { uri: "test:".into(), detail: "gone".into() };
        assert_eq!(addresses.ask(async { Err(gone()) }).await, None);
        assert_eq!(addresses.ask(async { Ok(room.clone()) }).await, room);
        assert_eq!(addresses.ask(async { Err(gone()) }).await, room);
        assert_eq!(addresses.ask(std::future::pending()).await, room);
        assert_eq!(addresses.ask(async { Ok(None) }).await, None);
    }

    #[tokio::test]
    async fn a_network_that_goes_while_the_agent_runs_keeps_new_work_away_until_it_is_back() {
        ec_runtime::install_tls_provider();
        let state = tempfile::tempdir().unwrap();
        let text = format!("name: n\nstate_dir: {}\n", state.path().display());
        let settings = Settings::check(&parse(&text, Path::new("compute.yaml")).unwrap()).unwrap();
        let node = NodeId::new(uuid::Uuid::from_u128(9));
        let (store, hypervisor) = (Arc::new(MemoryStore::new()), SimulatedHypervisor::new(node));
        let placement = PlacementClient::new(&settings.placement).unwrap();
        let simulated = Arc::new(hypervisor.clone());
        let parts = crate::agent::assemble(settings, node, store, simulated, placement, Host::default());
        let parts = parts.await.unwrap();
        let told = async || {
            look(&parts).await;
            let troubles = parts.troubles.borrow();
            let network = troubles.iter().find(|trouble| trouble.kind == TroubleKind::Network);
            network.map(|trouble| trouble.why.clone())
        };
        assert_eq!(told().await, None);
        hypervisor.set_network_trouble(Some("define it"));
        assert_eq!(told().await.as_deref(), Some("define it"));
        hypervisor.set_network_trouble(None);
        assert_eq!(told().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn of_several_file_systems_that_one_is_told_that_does_not_answer_and_the_others_are_measured() {
        let (questions, host) = (Questions::default(), Host::default());
        let (answer, waits) = std::sync::mpsc::channel::<()>();
        let waits = Arc::new(std::sync::Mutex::new(waits));
        let seen = move |place: &Path| {
            if place == Path::new("/images") {
                waits.lock().unwrap().recv().ok();
            }
            let room = Room { left: 1, total: 2 };
            Some(Seen { place: place.display().to_string(), room, files: Some(room), is_read_only: false })
        };
        let places = ["/disks", "/images", "/state"].map(PathBuf::from);
        let asked = questions.measured(&host, places, seen, || None);
        // Once the others have answered.
        let later = async {
            for _ in 0..300 {
                std::thread::sleep(Duration::from_millis(1));
                tokio::task::yield_now().await;
            }
            tokio::time::advance(storage::ANSWERS_IN).await;
        };
        let (measured, ()) = tokio::join!(asked, later);
        drop(answer);
        let why = measured.unwritable.unwrap();
        assert!(why.contains("the file system of /images has not answered"), "{why}");
        let known: Vec<_> = measured.disks.into_iter().map(|(place, _)| place).collect();
        assert_eq!(known, ["/disks", "/state"]);
        assert_eq!(measured.files.len(), 2);
        assert!(measured.memory.is_some());
    }
}
