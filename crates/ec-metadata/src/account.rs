//! What a metadata server was asked, and what it does at this moment: shown by whichever program it is in.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use ec_serve::metrics::{Counter, Exposition, Histogram};
use hyper::StatusCode;

/// Microseconds.
const BOUNDS: [u64; 7] = [500, 1_000, 5_000, 25_000, 100_000, 1_000_000, 10_000_000];

/// What came of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A guest was told what it asked for.
    Answered,
    /// A guest asked for what it does not have.
    NotFound,
    /// A guest asked in a way that is refused: without its token, for example.
    Refused,
    /// No guest asked: this host, or one that pretends to be another.
    Stranger,
    /// Who asks could not be found out.
    Failed,
}

impl Outcome {
    const ALL: [(Self, &str); 5] = [
        (Self::Answered, "answered"),
        (Self::NotFound, "not_found"),
        (Self::Refused, "refused"),
        (Self::Stranger, "stranger"),
        (Self::Failed, "failed"),
    ];

    /// Of an answer to a guest that is known.
    pub(crate) fn of_known(status: StatusCode) -> Self {
        match status {
            _ if status.is_success() => Self::Answered,
            StatusCode::NOT_FOUND => Self::NotFound,
            _ if status.is_server_error() => Self::Failed,
            _ => Self::Refused,
        }
    }
}

/// What a server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    WaitsForBridge,
    WaitsForOther,
    /// Who has the port is no metadata server.
    PortTaken,
    Troubled,
    Answers,
}

impl Standing {
    const ALL: [(Self, &str); 5] = [
        (Self::Answers, "answers"),
        (Self::WaitsForOther, "waits_for_other"),
        (Self::WaitsForBridge, "waits_for_bridge"),
        (Self::PortTaken, "port_taken"),
        (Self::Troubled, "troubled"),
    ];
}

/// See the module.
#[derive(Debug)]
pub struct Account {
    outcomes: [Counter; Outcome::ALL.len()],
    durations: Histogram<7>,
    /// Its place in [`Standing::ALL`]; beyond that where there is no server.
    standing: AtomicUsize,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            outcomes: Default::default(),
            durations: Histogram::of_times(BOUNDS),
            standing: AtomicUsize::new(usize::MAX),
        }
    }
}

impl Account {
    pub(crate) fn asked(&self, outcome: Outcome, took: Duration) {
        for ((own, _), counter) in Outcome::ALL.iter().zip(&self.outcomes) {
            counter.add(u64::from(*own == outcome));
        }
        self.durations.took(took);
    }

    pub(crate) fn stands(&self, standing: Standing) {
        let place = Standing::ALL.iter().position(|(own, _)| *own == standing);
        self.standing.store(place.unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    /// Adds the numbers, which have the same names in every program.
    pub fn write(&self, text: &mut Exposition) {
        let help = "Questions to the metadata service, by what came of them; `stranger`: whoever asked is no guest here.";
        let mut family = text.counters("ecompute_metadata_requests_total", help);
        for ((_, name), counter) in Outcome::ALL.iter().zip(&self.outcomes) {
            family.sample(&[("outcome", *name)], counter.get());
        }
        let help = "How long its answers took.";
        text.histograms("ecompute_metadata_request_duration_seconds", help).histogram(&[], &self.durations);
        let help = "What the metadata server does (1); all are 0 where there is none.";
        let mut family = text.gauges("ecompute_metadata_standing", help);
        let standing = self.standing.load(Ordering::Relaxed);
        for (place, (_, name)) in Standing::ALL.iter().enumerate() {
            family.sample(&[("state", *name)], u8::from(place == standing));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_question_is_counted_once_and_one_standing_holds() {
        let account = Account::default();
        let shown = || {
            let mut text = Exposition::default();
            account.write(&mut text);
            ec_serve::metrics::parse(&text.into_text()).unwrap()
        };
        let standing = |name: &str| shown()[&format!("ecompute_metadata_standing{{state=\"{name}\"}}")];
        assert!(Standing::ALL.iter().all(|(_, name)| standing(name) == 0.0));
        account.stands(Standing::Answers);
        account.stands(Standing::WaitsForOther);
        assert_eq!((standing("answers"), standing("waits_for_other")), (0.0, 1.0));
        for (status, outcome) in [
            (200, "answered"),
            (404, "not_found"),
            (401, "refused"),
            (403, "refused"),
            (405, "refused"),
            (500, "failed"),
        ] {
            let name = format!("ecompute_metadata_requests_total{{outcome=\"{outcome}\"}}");
            let before = shown()[&name];
            let known = Outcome::of_known(StatusCode::from_u16(status).unwrap());
            account.asked(known, Duration::from_millis(1));
            assert_eq!(shown()[&name], before + 1.0, "{status}");
        }
        assert_eq!(shown()["ecompute_metadata_request_duration_seconds_count"], 6.0);
    }
}
