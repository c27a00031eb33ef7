//! The agent's numbers. No label stands for an instance: there are as many series on the first day as after a year.

use ec_model::{State, TroubleKind, Workload};
use ec_pki::write_ends;
use ec_plan::engine::Engine;
use ec_serve::metrics::Exposition;

use super::Asked;
use crate::parts::Parts;

/// What names begin with.
const PROGRAM: &str = "ecompute";

/// How many instances and volumes there are.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    machines: Count,
    volumes: Count,
}

/// How many there are of one kind.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    /// In each state, so that one that nobody is in is a 0 and not a gap.
    by_state: [u64; State::ALL.len()],
    /// Of which no status is known.
    without: u64,
    /// That failed for a passing reason, and are tried again.
    troubled: u64,
}

/// Counts what the agent knows of.
pub(super) fn count(engine: &Engine) -> Counts {
    let mut counts = Counts::default();
    for sight in engine.sights() {
        let of_kind = match sight.kind {
            Workload::Machine => &mut counts.machines,
            Workload::Volume => &mut counts.volumes,
        };
        let at = sight.status.and_then(|status| State::ALL.iter().position(|state| *state == status.state));
        *at.map_or(&mut of_kind.without, |at| &mut of_kind.by_state[at]) += 1;
        of_kind.troubled += u64::from(sight.failures > 0);
    }
    counts
}

/// What there is of one kind. People find each by its own command: what is wrong with a volume no list of instances tells.
fn write_count(text: &mut Exposition, name: &str, what: &str, count: &Count) {
    let help = format!("{what} on this node, by state; `none`: no status of it is known.");
    let mut family = text.gauges(name, &help);
    for (state, count) in State::ALL.iter().zip(count.by_state) {
        family.sample(&[("state", &state.to_string())], count);
    }
    family.sample(&[("state", "none")], count.without);
    let help = format!("{what} whose work failed for a passing reason, and is tried again.");
    text.gauges(&format!("{name}_troubled"), &help).sample(&[], count.troubled);
}

/// All numbers. Those of instances and volumes are left out where the loop does not tell them.
pub(super) fn write(parts: &Parts, counts: &Asked<Counts>) -> String {
    let mut text = Exposition::default();
    text.gauges("ecompute_build_info", "The agent's release.")
        .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);

    write_ends(&mut text, "ecompute", parts.settings.certificates());
    ec_calls::write_parts(&mut text, PROGRAM, &parts.standings());

    let troubles = parts.troubles.borrow().clone();
    let help = "Whether the host is in such trouble (1), so that nothing new is placed there, or not (0).";
    let mut family = text.gauges("ecompute_host_trouble", help);
    for kind in TroubleKind::ALL {
        let is_there = troubles.iter().any(|trouble| trouble.kind == kind);
        family.sample(&[("kind", &kind.to_string())], u8::from(is_there));
    }

    if let Asked::Answered(counts) = counts {
        write_count(&mut text, "ecompute_instances", "Instances", &counts.machines);
        write_count(&mut text, "ecompute_volumes", "Volumes", &counts.volumes);
    }

    let help = "Jobs that ended, by kind and by how they ended; `retry`: for a passing reason.";
    parts.jobs.write(&mut text.histograms("ecompute_job_duration_seconds", help));

    ec_calls::write_calls(&mut text, PROGRAM, &parts.calls.named());
    parts.metadata.write(&mut text);
    let help =
        "Bytes of images that came over HTTP or out of buckets, those of tries that failed among them.";
    text.counters("ecompute_image_downloaded_bytes_total", help).sample(&[], parts.images.downloaded());
    text.into_text()
}
