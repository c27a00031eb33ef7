//! The agent's numbers. No label stands for an instance: there are as many series on the first day as after a year.

use ec_model::State;
use ec_pki::write_ends;
use ec_plan::engine::Engine;
use ec_serve::metrics::Exposition;

use super::Asked;
use crate::parts::Parts;

/// How many instances there are.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// In each state, so that one that nobody is in is a 0 and not a gap.
    by_state: [u64; State::ALL.len()],
    /// Of which no status is known.
    without: u64,
    /// That failed for a passing reason, and are tried again.
    troubled: u64,
}

/// Counts the instances that the agent knows of.
pub(super) fn count(engine: &Engine) -> Counts {
    let mut counts = Counts { by_state: [0; State::ALL.len()], without: 0, troubled: 0 };
    for sight in engine.sights() {
        let at = sight.status.and_then(|status| State::ALL.iter().position(|state| *state == status.state));
        *at.map_or(&mut counts.without, |at| &mut counts.by_state[at]) += 1;
        counts.troubled += u64::from(sight.failures > 0);
    }
    counts
}

/// All numbers. Those of instances are left out where the loop does not tell them.
pub(super) fn write(parts: &Parts, counts: &Asked<Counts>) -> String {
    let mut text = Exposition::default();
    text.gauges("ecompute_build_info", "The agent's release.")
        .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);

    write_ends(&mut text, "ecompute", parts.settings.certificates());

    let standings = parts.standings();
    let help = "Whether what the agent stands on is as it must be (1), or not (0).";
    let mut family = text.gauges("ecompute_part_up", help);
    for (part, standing) in &standings {
        family.sample(&[("part", *part)], u8::from(standing.ok));
    }
    let help = "When it was found to be as it must be last; of the lease, when it was renewed.";
    let mut family = text.gauges("ecompute_part_last_up_timestamp_seconds", help);
    for (part, standing) in &standings {
        if let Some(last) = standing.last_ok {
            family.sample(&[("part", *part)], last.as_second());
        }
    }

    if let Asked::Answered(counts) = counts {
        let help = "Instances on this node, by state; `none`: no status of it is known.";
        let mut family = text.gauges("ecompute_instances", help);
        for (state, count) in State::ALL.iter().zip(counts.by_state) {
            family.sample(&[("state", &state.to_string())], count);
        }
        family.sample(&[("state", "none")], counts.without);
        let help = "Instances whose work failed for a passing reason, and is tried again.";
        text.gauges("ecompute_instances_troubled", help).sample(&[], counts.troubled);
    }

    let help = "Jobs that ended, by kind and by how they ended; `retry`: for a passing reason.";
    parts.jobs.write(&mut text.histograms("ecompute_job_duration_seconds", help));

    let mut family = text.histograms("ecompute_call_duration_seconds", "Calls to what the agent stands on.");
    for (service, calls) in parts.calls.named() {
        family.histogram(&[("service", service)], &calls.durations);
    }
    let mut family = text.counters("ecompute_call_failures_total", "Of these, those that failed.");
    for (service, calls) in parts.calls.named() {
        family.sample(&[("service", service)], calls.failures.get());
    }
    let help = "Bytes of images that came over HTTP, those of tries that failed among them.";
    text.counters("ecompute_image_downloaded_bytes_total", help).sample(&[], parts.images.downloaded());
    text.into_text()
}
