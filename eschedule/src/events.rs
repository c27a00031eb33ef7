//! `eschedule events`: what was done to an instance, by whom, and what came of it.

use ec_cloud::{Happening, history};
use ec_runtime::exit::Failure;

use crate::{
    cli::Output,
    config::Session,
    output::{List, when, word},
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  eschedule events web                              what was asked for, by whom, and what came of it
  eschedule events 7d3c1f0a-2b4e-4c55-9a7e-0123456789ab   also of one that was destroyed today
  eschedule events web -o json | jq '.[] | select(.outcome == \"failed\")'";

/// Prints the history of an instance.
pub(crate) async fn events(session: &Session, instance: &str, output: Output) -> Result<(), Failure> {
    let happened = history(&session.cloud, instance).await?;
    output.print(
        &happened,
        || happened.iter().map(what).collect(),
        || {
            let header = ["AT", "BY", "WHAT", "OUTCOME", "STATE", "AFTER", "REASON"];
            let mut list = List::new(&header, &[0, 3, 4], &[2, 3, 0, 6, 4, 1, 5]);
            for it in &happened {
                let node = || format!("node {}", it.node);
                list.row([
                    when(it.at),
                    it.user.clone().unwrap_or_else(node),
                    what(it),
                    it.outcome.as_ref().map_or_else(|| "-".to_owned(), word),
                    it.state.map_or_else(|| "-".to_owned(), |state| state.to_string()),
                    after(it),
                    it.reason.clone().unwrap_or_default(),
                ]);
            }
            list.text()
        },
    )
}

fn what(it: &Happening) -> String {
    let verb = it.verb.map(|verb| verb.to_string());
    let words: Vec<String> = verb.into_iter().chain(it.detail.clone()).collect();
    if words.is_empty() { "-".to_owned() } else { words.join(", ") }
}

/// How long it took. Two clocks may say that it was done before it was asked for.
fn after(it: &Happening) -> String {
    match it.finished_at.filter(|_| it.user.is_some()) {
        Some(end) => format!("{} s", end.duration_since(it.at).as_secs().max(0)),
        None => "-".to_owned(),
    }
}
