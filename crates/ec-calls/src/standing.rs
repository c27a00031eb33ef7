//! Whether the parts that a program stands on are as they must be, and since when.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ec_runtime::Host;
use ec_serve::metrics::Exposition;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// How one part stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Standing {
    /// Whether it is as it must be.
    pub ok: bool,
    /// Since when it is, or is not.
    pub since: Timestamp,
    /// When it was found to be last.
    pub last_ok: Option<Timestamp>,
    /// Why it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// One part, as whoever deals with it finds it.
#[derive(Debug)]
pub struct Part {
    host: Host,
    standing: Mutex<Standing>,
}

impl Part {
    /// Of which nothing is known yet.
    pub fn new(host: &Host) -> Self {
        let why = Some("not known yet".to_owned());
        let standing = Standing { ok: false, since: host.now(), last_ok: None, why };
        Self { host: host.clone(), standing: Mutex::new(standing) }
    }

    /// It was found to be as it must be.
    pub fn up(&self) {
        let now = self.host.now();
        let mut standing = self.lock();
        let since = if standing.ok { standing.since } else { now };
        *standing = Standing { ok: true, since, last_ok: Some(now), why: None };
    }

    /// It was found not to be, and why.
    pub fn down(&self, why: impl ToString) {
        let now = self.host.now();
        let mut standing = self.lock();
        let since = if standing.ok { now } else { standing.since };
        *standing = Standing { ok: false, since, last_ok: standing.last_ok, why: Some(why.to_string()) };
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How each part stands, by its name, as JSON.
pub fn parts(standings: &[(&'static str, Standing)]) -> Value {
    standings
        .iter()
        .map(|(name, standing)| ((*name).to_owned(), json!(standing)))
        .collect::<Map<_, _>>()
        .into()
}

/// Whether all parts are as they must be, with the document that `/readyz` shows.
pub fn readiness(standings: &[(&'static str, Standing)]) -> (bool, Value) {
    let ready = standings.iter().all(|(_, standing)| standing.ok);
    (ready, json!({ "ready": ready, "parts": parts(standings) }))
}

/// How each part stands, as a program of this name shows it in its numbers.
pub fn write_parts(text: &mut Exposition, program: &str, standings: &[(&'static str, Standing)]) {
    let name = format!("{program}_part_up");
    let help = "Whether what the program stands on is as it must be (1), or not (0).";
    let mut family = text.gauges(&name, help);
    for (part, standing) in standings {
        family.sample(&[("part", *part)], u8::from(standing.ok));
    }
    let name = format!("{program}_part_last_up_timestamp_seconds");
    let help = "When it was found to be as it must be last; of a lease, when it was renewed.";
    let mut family = text.gauges(&name, help);
    for (part, standing) in standings {
        if let Some(last) = standing.last_ok {
            family.sample(&[("part", *part)], last.as_second());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    };

    use ec_runtime::{Machine, Work};
    use futures::future::BoxFuture;

    use super::*;

    #[derive(Default)]
    struct Clock(AtomicI64);

    impl Machine for Clock {
        fn now(&self) -> Timestamp {
            Timestamp::from_second(self.0.fetch_add(1, Ordering::Relaxed)).unwrap()
        }

        fn random(&self) -> u128 {
            0
        }

        fn work(&self, _: Work) -> BoxFuture<'static, ()> {
            Box::pin(async {})
        }
    }

    #[test]
    fn since_when_is_told_of_the_change_and_not_of_the_last_look() {
        let part = Part::new(&Host::simulated(Arc::new(Clock::default())));
        let at = |second| Timestamp::from_second(second).unwrap();
        let standing = |ok, since, last_ok: Option<i64>, why: Option<&str>| Standing {
            ok,
            since: at(since),
            last_ok: last_ok.map(at),
            why: why.map(str::to_owned),
        };
        assert_eq!(part.standing(), standing(false, 0, None, Some("not known yet")));
        part.down("away");
        assert_eq!(part.standing(), standing(false, 0, None, Some("away")));
        part.up();
        part.up();
        assert_eq!(part.standing(), standing(true, 2, Some(3), None));
        part.down("away");
        part.down("still away");
        assert_eq!(part.standing(), standing(false, 4, Some(3), Some("still away")));
    }
}
