//! What the server counts, in the text form that Prometheus reads.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use ec_pki::write_ends;
use ec_serve::metrics::{Exposition, Histogram};

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
#[derive(Debug, Default)]
pub struct Metrics {
    routes: Mutex<BTreeMap<(&'static str, &'static str), Route>>,
}

impl Metrics {
    /// Counts a request that was answered. `route` is one of few: never what a client made up.
    pub fn answered(&self, route: &'static str, method: &str, status: u16, took: Duration) {
        // A client may send any method; only those that there are get a place of their own.
        let method = METHODS.into_iter().find(|own| *own == method).unwrap_or("other");
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let route = routes.entry((route, method)).or_insert_with(|| Route {
            by_status: BTreeMap::new(),
            latency: Histogram::of_times(LATENCY_BOUNDS),
        });
        *route.by_status.entry(status).or_default() += 1;
        route.latency.took(took);
    }

    /// Everything, as text: with when these `certificates` end, what was counted of the replica, and further numbers of its
    /// `state`, each with its name and what it is.
    pub fn render<'a>(
        &self,
        certificates: impl Iterator<Item = &'a Path>,
        replica: &ec_replica::Metrics,
        state: &[(&str, &str, i64)],
    ) -> String {
        let mut text = Exposition::default();
        write_ends(&mut text, "eplacement", certificates);
        let routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut requests = text.counters("eplacement_requests_total", "Requests answered.");
        for ((route, method), counted) in routes.iter() {
            for (status, count) in &counted.by_status {
                let labels = [("route", *route), ("method", *method), ("status", &status.to_string())];
                requests.sample(&labels, count);
            }
        }
        let help = "From the head of a request to its answer.";
        let mut durations = text.histograms("eplacement_request_duration_seconds", help);
        for ((route, method), counted) in routes.iter() {
            durations.histogram(&[("route", *route), ("method", *method)], &counted.latency);
        }
        drop(routes);
        for (name, help, counter) in [
            (
                "eplacement_transaction_conflicts_total",
                "Transactions that met another's and were decided again.",
                &replica.conflicts,
            ),
            (
                "eplacement_contention_total",
                "Writes given up because others kept changing the same records.",
                &replica.contention,
            ),
            (
                "eplacement_turns_total",
                "Times that other replicas were asked to let this one write.",
                &replica.turns,
            ),
            (
                "eplacement_relists_total",
                "Times that all was read anew because etcd was not what was known of it.",
                &replica.relists,
            ),
            ("eplacement_watch_changes_total", "Records that came by the watch.", &replica.events),
        ] {
            text.counters(name, help).sample(&[], counter.get());
        }
        text.histograms("eplacement_batch_commands", "Commands written by one transaction.")
            .histogram(&[], &replica.batch_sizes);
        for (name, help, value) in state {
            text.gauges(name, help).sample(&[], value);
        }
        text.into_text()
    }
}
