//! What the server counts, in the text form that Prometheus reads.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// The sum.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How often values were up to each bound.
#[derive(Debug)]
pub struct Histogram<const N: usize> {
    bounds: [u64; N],
    /// One for each bound, and one for what is above them all.
    counts: [AtomicU64; N],
    above: AtomicU64,
    sum: AtomicU64,
}

impl<const N: usize> Histogram<N> {
    const fn new(bounds: [u64; N]) -> Self {
        Self {
            bounds,
            counts: [const { AtomicU64::new(0) }; N],
            above: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }

    fn add(&self, value: u64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        self.counts.get(at).unwrap_or(&self.above).fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Counts a value.
    pub fn observe(&self, value: usize) {
        self.add(u64::try_from(value).unwrap_or(u64::MAX));
    }

    #[expect(clippy::cast_precision_loss, reason = "for people to look at")]
    fn write(&self, text: &mut String, name: &str, labels: &str, scale: f64) {
        let mut sum = 0;
        let comma = if labels.is_empty() { "" } else { "," };
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            sum += count.load(Ordering::Relaxed);
            let bound = *bound as f64 * scale;
            let _ = writeln!(text, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {sum}");
        }
        sum += self.above.load(Ordering::Relaxed);
        let _ = writeln!(text, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {sum}");
        let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(text, "{name}_sum{braces} {}", self.sum.load(Ordering::Relaxed) as f64 * scale);
        let _ = writeln!(text, "{name}_count{braces} {sum}");
    }
}

/// Microseconds.
const LATENCY_BOUNDS: [u64; 12] =
    [250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 50_000, 100_000, 500_000, 1_000_000, 10_000_000];

/// Those that are counted each on its own.
const METHODS: [&str; 5] = ["GET", "PUT", "POST", "DELETE", "OPTIONS"];

/// What is counted of one route.
#[derive(Debug)]
struct Route {
    by_status: BTreeMap<u16, u64>,
    latency: Histogram<12>,
}

/// See the module.
#[derive(Debug)]
pub struct Metrics {
    routes: Mutex<BTreeMap<(&'static str, &'static str), Route>>,
    /// Transactions that met another's.
    pub conflicts: Counter,
    /// Writes that were given up because others kept changing the same records.
    pub contention: Counter,
    /// How often other replicas were asked to let this one write.
    pub turns: Counter,
    /// How often all was read anew because etcd was not what was known of it.
    pub relists: Counter,
    /// Records that came by the watch.
    pub events: Counter,
    /// Commands per transaction.
    pub batch_sizes: Histogram<8>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            routes: Mutex::default(),
            conflicts: Counter::default(),
            contention: Counter::default(),
            turns: Counter::default(),
            relists: Counter::default(),
            events: Counter::default(),
            batch_sizes: Histogram::new([1, 2, 4, 8, 16, 32, 64, 128]),
        }
    }
}

impl Metrics {
    /// Counts a request that was answered. `route` is one of few: never what a client made up.
    pub fn answered(&self, route: &'static str, method: &str, status: u16, took: Duration) {
        // A client may send any method; only those that there are get a place of their own.
        let method = METHODS.into_iter().find(|own| *own == method).unwrap_or("other");
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let route = routes
            .entry((route, method))
            .or_insert_with(|| Route { by_status: BTreeMap::new(), latency: Histogram::new(LATENCY_BOUNDS) });
        *route.by_status.entry(status).or_default() += 1;
        route.latency.add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }

    /// Everything, as text. `state` has further numbers: name, what it is, value.
    pub fn render(&self, state: &[(&str, &str, i64)]) -> String {
        let mut text = String::new();
        let head = |text: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        let routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        head(&mut text, "eplacement_requests_total", "counter", "Requests answered.");
        for ((route, method), counted) in routes.iter() {
            for (status, count) in &counted.by_status {
                let _ = writeln!(
                    text,
                    "eplacement_requests_total{{route=\"{route}\",method=\"{method}\",status=\"{status}\"}} {count}"
                );
            }
        }
        let name = "eplacement_request_duration_seconds";
        head(&mut text, name, "histogram", "From the head of a request to its answer.");
        for ((route, method), counted) in routes.iter() {
            counted.latency.write(&mut text, name, &format!("route=\"{route}\",method=\"{method}\""), 1e-6);
        }
        drop(routes);
        for (name, help, counter) in [
            (
                "eplacement_transaction_conflicts_total",
                "Transactions that met another's and were decided again.",
                &self.conflicts,
            ),
            (
                "eplacement_contention_total",
                "Writes given up because others kept changing the same records.",
                &self.contention,
            ),
            (
                "eplacement_turns_total",
                "Times that other replicas were asked to let this one write.",
                &self.turns,
            ),
            (
                "eplacement_relists_total",
                "Times that all was read anew because etcd was not what was known of it.",
                &self.relists,
            ),
            ("eplacement_watch_changes_total", "Records that came by the watch.", &self.events),
        ] {
            head(&mut text, name, "counter", help);
            let _ = writeln!(text, "{name} {}", counter.get());
        }
        let name = "eplacement_batch_commands";
        head(&mut text, name, "histogram", "Commands written by one transaction.");
        self.batch_sizes.write(&mut text, name, "", 1.0);
        for (name, help, value) in state {
            head(&mut text, name, "gauge", help);
            let _ = writeln!(text, "{name} {value}");
        }
        text
    }
}
