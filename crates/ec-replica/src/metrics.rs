//! What is counted of a replica.

use ec_metrics::{Counter, Histogram};

/// See the module.
#[derive(Debug)]
pub struct Metrics {
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
            conflicts: Counter::default(),
            contention: Counter::default(),
            turns: Counter::default(),
            relists: Counter::default(),
            events: Counter::default(),
            batch_sizes: Histogram::new([1, 2, 4, 8, 16, 32, 64, 128]),
        }
    }
}
