//! What a controller did and saw, for its port.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ec_calls::{Part, Service, Standing, readiness, write_calls, write_parts};
use ec_cloud::{CloudError, trust_clock};
use ec_pki::write_ends;
use ec_placement_client::PlacementClient;
use ec_plan::fleet::{Move, Seen};
use ec_runtime::Host;
use ec_serve::{
    metrics::{Counter, Exposition, Histogram},
    port::Tells,
};
use tokio::time::Instant;

/// What names begin with.
const PROGRAM: &str = "econtroller";
/// Microseconds.
const BOUNDS: [u64; 7] = [10_000, 50_000, 100_000, 500_000, 1_000_000, 5_000_000, 30_000_000];
/// A loop that has not turned for so long does not turn: what it waits for has bounds of its own. As WatchdogSec= of the unit.
const STANDS: Duration = Duration::from_secs(300);

/// A look that has not come to its end for so long is told as one that stands. What it waits for has bounds of its own, but it may be much:
/// who is slow is neither started anew for that nor taken for dead.
const LOOKS_IN: Duration = Duration::from_secs(1800);

/// One of the things that are looked at, each time anew.
#[derive(Debug)]
pub(crate) struct Look {
    part: Part,
    /// When the one that goes on at the moment began.
    began: Mutex<Option<Instant>>,
    durations: Histogram<7>,
    failed: Counter,
    done: Counter,
}

impl Look {
    fn new(host: &Host) -> Self {
        Self {
            part: Part::new(host),
            began: Mutex::new(None),
            durations: Histogram::of_times(BOUNDS),
            failed: Counter::default(),
            done: Counter::default(),
        }
    }

    /// Counts a look.
    pub(crate) async fn of<T>(
        &self,
        look: impl Future<Output = Result<T, CloudError>>,
    ) -> Result<T, CloudError> {
        let began = Instant::now();
        *self.began() = Some(began);
        let outcome = look.await;
        *self.began() = None;
        self.durations.took(began.elapsed());
        match &outcome {
            Ok(_) => {
                self.done.add(1);
                self.part.up();
            }
            Err(error) => {
                self.failed.add(1);
                self.part.down(error);
            }
        }
        outcome
    }

    fn began(&self) -> MutexGuard<'_, Option<Instant>> {
        self.began.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it stands: as its last one ended, unless the one after that comes to no end.
    fn standing(&self) -> Standing {
        if self.began().is_some_and(|began| began.elapsed() >= LOOKS_IN) {
            self.part.down(format!("has not come to its end for {} minutes", LOOKS_IN.as_secs() / 60));
        }
        self.part.standing()
    }
}

/// The nodes, as they were seen last.
#[derive(Debug, Default)]
struct Nodes {
    alive: AtomicU64,
    missing: AtomicU64,
    marked: AtomicU64,
}

/// See the module.
pub struct Tally {
    /// Calls to etcd.
    pub etcd: Arc<Service>,
    /// Calls to placement.
    pub placement: Arc<Service>,
    pub(crate) nodes: Look,
    pub(crate) instances: Look,
    pub(crate) claims: Look,
    seen: Nodes,
    marked_down: Counter,
    marked_up: Counter,
    swept: Counter,
    settled: Counter,
    turned: Mutex<Instant>,
    /// By whose clock this host's is judged.
    clock: OnceLock<PlacementClient>,
    /// Whose ends are told.
    certificates: Vec<PathBuf>,
}

impl Tally {
    /// Of a controller that has not begun, and has these certificates.
    pub fn new(host: &Host, certificates: Vec<PathBuf>) -> Self {
        Self {
            etcd: Arc::new(Service::new(host)),
            placement: Arc::new(Service::new(host)),
            nodes: Look::new(host),
            instances: Look::new(host),
            claims: Look::new(host),
            seen: Nodes::default(),
            marked_down: Counter::default(),
            marked_up: Counter::default(),
            swept: Counter::default(),
            settled: Counter::default(),
            turned: Mutex::new(Instant::now()),
            clock: OnceLock::new(),
            certificates,
        }
    }

    /// From now on what others left is judged by this host's clock only where that is near to placement's.
    pub fn compare_clocks(&self, placement: PlacementClient) {
        self.clock.set(placement).ok();
    }

    /// An error where what others left cannot be judged by its age here.
    pub(crate) async fn trust_clock(&self) -> Result<(), CloudError> {
        let Some(placement) = self.clock.get() else { return Ok(()) };
        // What an earlier answer told may be of before a clock was set. Without an answer nothing better is known.
        placement.probe().await.ok();
        trust_clock(placement.clock_ahead())
    }

    pub(crate) fn turned(&self) {
        *self.turned.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub(crate) fn saw(&self, seen: &Seen, moves: &[Move]) {
        let set = |number: &AtomicU64, count: usize| number.store(as_number(count), Ordering::Relaxed);
        set(&self.seen.alive, seen.alive.len());
        set(&self.seen.missing, seen.missing());
        let (down, up): (Vec<&Move>, Vec<_>) =
            moves.iter().partition(|done| matches!(done, Move::MarkDown(_)));
        set(&self.seen.marked, (seen.marked.len() + down.len()).saturating_sub(up.len()));
        self.marked_down.add(as_number(down.len()));
        self.marked_up.add(as_number(up.len()));
    }

    pub(crate) fn swept(&self, count: usize) {
        self.swept.add(as_number(count));
    }

    pub(crate) fn settled(&self, count: usize) {
        self.settled.add(as_number(count));
    }

    fn looks(&self) -> [(&'static str, &Look); 3] {
        [("nodes", &self.nodes), ("instances", &self.instances), ("claims", &self.claims)]
    }

    fn standings(&self) -> [(&'static str, Standing); 5] {
        [
            ("etcd", self.etcd.part.standing()),
            ("placement", self.placement.part.standing()),
            ("nodes", self.nodes.standing()),
            ("instances", self.instances.standing()),
            ("claims", self.claims.standing()),
        ]
    }
}

fn as_number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

impl Tells for Tally {
    fn health(&self) -> Result<&'static str, &'static str> {
        let turned = *self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        if turned.elapsed() < STANDS { Ok("ok") } else { Err("the controller's loop does not turn") }
    }

    fn readiness(&self) -> Option<(bool, String)> {
        let (ready, document) = readiness(&self.standings());
        Some((ready, document.to_string()))
    }

    fn numbers(&self) -> String {
        let mut text = Exposition::default();
        text.gauges("econtroller_build_info", "The controller's release.")
            .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
        write_ends(&mut text, PROGRAM, self.certificates.iter().map(PathBuf::as_path));
        write_parts(&mut text, PROGRAM, &self.standings());

        let help = "Looks at nodes, at what killed commands left, and at claims, by how they ended.";
        let mut family = text.counters("econtroller_looks_total", help);
        for (name, look) in self.looks() {
            family.sample(&[("look", name), ("outcome", "done")], look.done.get());
            family.sample(&[("look", name), ("outcome", "failed")], look.failed.get());
        }
        let mut family = text.histograms("econtroller_look_duration_seconds", "How long looks took.");
        for (name, look) in self.looks() {
            family.histogram(&[("look", name)], &look.durations);
        }
        // Before the first look nobody knows.
        if self.nodes.done.get() > 0 {
            let number = |number: &AtomicU64| number.load(Ordering::Relaxed);
            let help = "Nodes that etcd knows, as the last look saw them; `missing`: without a living agent, and not revoked.";
            text.gauges("econtroller_nodes", help)
                .sample(&[("state", "alive")], number(&self.seen.alive))
                .sample(&[("state", "missing")], number(&self.seen.missing));
            let help = "Of these, nodes that a controller has marked, so that nothing is placed there.";
            text.gauges("econtroller_nodes_marked", help).sample(&[], number(&self.seen.marked));
        }
        let help = "Marks that this controller set (down) and took away (up).";
        text.counters("econtroller_marks_total", help)
            .sample(&[("mark", "down")], self.marked_down.get())
            .sample(&[("mark", "up")], self.marked_up.get());
        let help = "Left-overs of instances and volumes that this controller took away: records with their names, \
                    names and places in groups that are no one's any more, copies for images that nobody sends (record); \
                    room that they do not need (claim).";
        text.counters("econtroller_swept_total", help)
            .sample(&[("what", "record")], self.swept.get())
            .sample(&[("what", "claim")], self.settled.get());
        write_calls(&mut text, PROGRAM, &[("etcd", &self.etcd), ("placement", &self.placement)]);
        text.into_text()
    }
}

#[cfg(test)]
mod tests {
    use ec_model::NodeId;

    use super::*;

    fn nodes(numbers: &[u128]) -> std::collections::BTreeSet<NodeId> {
        numbers.iter().map(|number| NodeId::new(uuid::Uuid::from_u128(*number))).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_seen_and_done_is_told_and_nothing_of_nodes_before() {
        let tally = Tally::new(&Host::default(), Vec::new());
        let shown = || ec_serve::metrics::parse(&tally.numbers()).unwrap();
        assert!(!shown().contains_key("econtroller_nodes_marked"), "nobody knows");
        assert!(!tally.readiness().unwrap().0);
        let failed = tally.nodes.of(async { Err::<(), _>(CloudError::Invalid("no".into())) }).await;
        assert!(failed.is_err());
        tally.nodes.of(async { Ok(()) }).await.unwrap();
        let seen = Seen {
            known: nodes(&[1, 2, 3, 4, 5]),
            alive: nodes(&[1, 2]),
            marked: nodes(&[2, 3]),
            revoked: nodes(&[5]),
        };
        let node = |number| NodeId::new(uuid::Uuid::from_u128(number));
        tally.saw(&seen, &[Move::MarkDown(node(4)), Move::MarkUp(node(2))]);
        tally.swept(2);
        tally.settled(3);
        let numbers = shown();
        for (name, value) in [
            ("econtroller_looks_total{look=\"nodes\",outcome=\"failed\"}", 1.0),
            ("econtroller_looks_total{look=\"nodes\",outcome=\"done\"}", 1.0),
            ("econtroller_nodes{state=\"alive\"}", 2.0),
            ("econtroller_nodes{state=\"missing\"}", 2.0),
            ("econtroller_nodes_marked", 2.0),
            ("econtroller_marks_total{mark=\"down\"}", 1.0),
            ("econtroller_marks_total{mark=\"up\"}", 1.0),
            ("econtroller_swept_total{what=\"record\"}", 2.0),
            ("econtroller_swept_total{what=\"claim\"}", 3.0),
            ("econtroller_part_up{part=\"nodes\"}", 1.0),
            ("econtroller_part_up{part=\"claims\"}", 0.0),
        ] {
            assert_eq!(numbers[name], value, "{name}");
        }
        assert_eq!(tally.health(), Ok("ok"));
        tokio::time::advance(STANDS).await;
        assert!(tally.health().is_err());
        tally.turned();
        assert_eq!(tally.health(), Ok("ok"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_comes_to_no_end_is_told_and_ends_nobody() {
        let tally = Tally::new(&Host::default(), Vec::new());
        tally.etcd.part.up();
        tally.placement.part.up();
        for (_, look) in tally.looks() {
            look.of(async { Ok(()) }).await.unwrap();
        }
        let mut stands = Box::pin(tally.claims.of(std::future::pending::<Result<(), CloudError>>()));
        let mut goes_on = async |time| assert!(tokio::time::timeout(time, &mut stands).await.is_err());
        goes_on(LOOKS_IN - Duration::from_secs(1)).await;
        assert!(tally.readiness().unwrap().0, "it may take long");
        goes_on(Duration::from_secs(1)).await;
        tally.turned();
        let (ready, document) = tally.readiness().unwrap();
        assert!(!ready && document.contains("has not come to its end for 30 minutes"), "{document}");
        assert_eq!(tally.health(), Ok("ok"), "nodes are looked at all the same");
        drop(stands);
        tally.claims.of(async { Ok(()) }).await.unwrap();
        assert!(tally.readiness().unwrap().0);
    }
}
