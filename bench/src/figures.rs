//! What was measured, summed up and printed.

use std::time::Duration;

use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde::Serialize;

/// Ours beside the bare calls, measured alternately in one run.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    what: &'static str,
    rounds: usize,
    ours: Spread,
    bare: Spread,
    /// Median to median.
    ratio: f64,
    goal: Goal,
}

/// What the figure should be.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Goal {
    /// At most so many times the bare calls.
    pub(crate) ratio: f64,
    /// At most so many milliseconds.
    pub(crate) ms: Option<f64>,
}

/// Milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Spread {
    median_ms: f64,
    p90_ms: f64,
}

/// Resident memory.
#[derive(Debug, Serialize)]
pub(crate) struct Memory {
    pub(crate) what: &'static str,
    pub(crate) mib: f64,
    pub(crate) goal_mib: Option<f64>,
}

/// Pairs of durations, one of each side per round.
#[derive(Default)]
pub(crate) struct Rounds {
    pub(crate) ours: Vec<Duration>,
    pub(crate) bare: Vec<Duration>,
}

impl Rounds {
    /// Sums up. There is at least one round.
    pub(crate) fn compare(self, what: &'static str, goal: Goal) -> Comparison {
        let rounds = self.ours.len();
        let (ours, bare) = (Spread::of(self.ours), Spread::of(self.bare));
        Comparison { what, rounds, ratio: ours.median_ms / bare.median_ms, ours, bare, goal }
    }
}

impl Spread {
    fn of(mut samples: Vec<Duration>) -> Self {
        samples.sort_unstable();
        let at = |part: usize| {
            let index = (samples.len() * part / 10).min(samples.len().saturating_sub(1));
            samples.get(index).map_or(f64::NAN, |sample| sample.as_secs_f64() * 1000.0)
        };
        Self { median_ms: at(5), p90_ms: at(9) }
    }
}

impl Comparison {
    fn met(&self) -> bool {
        self.ratio <= self.goal.ratio && self.goal.ms.is_none_or(|ms| self.ours.median_ms <= ms)
    }
}

/// Everything as JSON, or as tables for people.
#[expect(clippy::print_stdout, reason = "the figures are what was asked for")]
pub(crate) fn print(comparisons: &[Comparison], memory: &[Memory], json: bool) {
    if json {
        let all = serde_json::json!({ "comparisons": comparisons, "memory": memory });
        println!("{all:#}");
        return;
    }
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header(["", "rounds", "ours", "p90", "bare", "p90", "ratio", "goal", ""]);
    for c in comparisons {
        let goal = match c.goal.ms {
            Some(ms) => format!("<= {} x, {ms} ms", c.goal.ratio),
            None => format!("<= {} x", c.goal.ratio),
        };
        let ms = |value: f64| format!("{value:.2} ms");
        table.add_row([
            c.what.to_owned(),
            c.rounds.to_string(),
            ms(c.ours.median_ms),
            ms(c.ours.p90_ms),
            ms(c.bare.median_ms),
            ms(c.bare.p90_ms),
            format!("{:.2} x", c.ratio),
            goal,
            verdict(c.met()).to_owned(),
        ]);
    }
    println!("{table}\n");
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header(["resident memory", "MiB", "goal", ""]);
    for m in memory {
        table.add_row([
            m.what.to_owned(),
            format!("{:.1}", m.mib),
            m.goal_mib.map_or_else(String::new, |goal| format!("<= {goal} MiB")),
            m.goal_mib.map_or("", |goal| verdict(m.mib <= goal)).to_owned(),
        ]);
    }
    println!("{table}");
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_of_the_medians_and_one_outlier_does_not_move_it() {
        let ms = |all: &[u64]| all.iter().map(|n| Duration::from_millis(*n)).collect();
        let rounds = Rounds { ours: ms(&[20, 900, 22]), bare: ms(&[11, 10, 12]) };
        let compared = rounds.compare("x", Goal { ratio: 2.0, ms: Some(30.0) });
        assert!((compared.ratio - 2.0).abs() < 1e-9 && compared.met());
        assert!((compared.ours.p90_ms - 900.0).abs() < 1e-9);
    }
}
