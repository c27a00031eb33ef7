//! What guests use per second, from what they have used at two moments.

use std::collections::HashMap;

use ec_model::InstanceId;
use jiff::Timestamp;
use serde::Deserialize;

/// What an agent's port says at `/usage`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Reading {
    /// When, by the node's clock.
    at: Timestamp,
    /// The host's load average over a minute.
    pub(super) load1: Option<f64>,
    instances: HashMap<InstanceId, Used>,
}

/// What a guest has used since it was started.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Used {
    cpu_ns: u64,
    disk_bytes: u64,
    net_bytes: u64,
}

/// What a guest uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rate {
    /// Of one of the host's processors, in percent.
    pub(super) cpu: f64,
    /// Bytes per second.
    pub(super) disk: f64,
    /// Bytes per second.
    pub(super) net: f64,
}

/// One node's readings.
#[derive(Debug)]
pub(super) struct Meter {
    pub(super) last: Reading,
    rates: HashMap<InstanceId, Rate>,
}

impl Meter {
    /// After the first reading there is a load, and nothing to compare counters with.
    pub(super) fn new(first: Reading) -> Self {
        Self { last: first, rates: HashMap::new() }
    }

    /// Takes in another reading. One of the same moment, as an agent gives that many ask, says nothing new; and with one of
    /// an earlier moment the node's clock was set back.
    pub(super) fn read(&mut self, reading: Reading) {
        let seconds = reading.at.duration_since(self.last.at).as_secs_f64();
        if seconds == 0.0 {
            return;
        }
        let rate = |instance: &InstanceId, now: &Used| {
            let before = self.last.instances.get(instance)?;
            let grown = |pick: fn(&Used) -> u64| pick(now).checked_sub(pick(before)).map(per(seconds));
            // One whose counters went back was started anew.
            Some(Rate {
                cpu: grown(|used| used.cpu_ns)? / 1e7,
                disk: grown(|used| used.disk_bytes)?,
                net: grown(|used| used.net_bytes)?,
            })
        };
        let all = reading.instances.iter().filter(|_| seconds > 0.0);
        self.rates = all.filter_map(|(instance, now)| Some((*instance, rate(instance, now)?))).collect();
        self.last = reading;
    }

    /// What it uses, where that is known.
    pub(super) fn rate(&self, instance: InstanceId) -> Option<Rate> {
        self.rates.get(&instance).copied()
    }
}

#[expect(clippy::cast_precision_loss, reason = "nobody reads more than three digits of it")]
fn per(seconds: f64) -> impl Fn(u64) -> f64 {
    move |grown| grown as f64 / seconds
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reading(second: i64, guests: &[(u128, u64)]) -> Reading {
        let of = |n: &u64| json!({"cpu_ns": n * 1_000_000, "disk_bytes": n * 3, "net_bytes": n});
        let guests: HashMap<_, _> =
            guests.iter().map(|(id, n)| (InstanceId::new(uuid::Uuid::from_u128(*id)), of(n))).collect();
        let at = Timestamp::from_second(second).unwrap();
        serde_json::from_value(json!({"at": at, "load1": 0.5, "instances": guests, "more": 1})).unwrap()
    }

    #[test]
    fn rates_are_of_the_time_between_two_readings_and_of_guests_that_were_not_started_anew() {
        let [one, two, three] = [1, 2, 3].map(|n| InstanceId::new(uuid::Uuid::from_u128(n)));
        let mut meter = Meter::new(reading(10, &[(1, 100), (2, 900)]));
        assert_eq!(meter.rate(one), None);
        meter.read(reading(12, &[(1, 1100), (2, 5), (3, 7)]));
        assert_eq!(meter.rate(one), Some(Rate { cpu: 50.0, disk: 1500.0, net: 500.0 }));
        assert_eq!((meter.rate(two), meter.rate(three)), (None, None));
        // The same answer again.
        meter.read(reading(12, &[(1, 1100)]));
        assert_eq!(meter.rate(one).map(|rate| rate.net), Some(500.0));
        // The node's clock was set back: from there on.
        meter.read(reading(2, &[(1, 2000)]));
        assert_eq!(meter.rate(one), None);
        meter.read(reading(3, &[(1, 2001)]));
        assert_eq!(meter.rate(one).map(|rate| rate.net), Some(1.0));
    }
}
