//! `eschedule heal`: what nodes hold and etcd lacks, after it was put back or emptied.

use std::io::{self, IsTerminal, Write};

use clap::{Args, builder::NonEmptyStringValueParser};
use ec_cloud::{CloudError, Healed, Outcome, heal};
use ec_model::Workload;
use ec_runtime::exit::{Failure, tell};

use crate::{
    cli::Output,
    config::Session,
    output::{self, Names, called},
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  eschedule heal --dry-run      what nodes hold that etcd lacks, and what would be written
  eschedule heal --yes          bring all of it back
  eschedule heal web --yes      bring one back";

/// What is brought back.
#[derive(Args)]
pub(crate) struct Healing {
    /// Only these: names as their nodes know them, uuids, or the beginnings of those
    #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
    instances: Vec<String>,

    /// Only tell what would be written, and what not
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,

    /// Do not ask
    #[arg(long)]
    yes: bool,
}

/// Brings back what nodes hold.
pub(crate) async fn bring_back(session: &Session, healing: Healing, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    if !healing.yes {
        let looked = heal(cloud, &healing.instances, true).await?;
        if let Some(error) = looked.failed {
            return Err(error.into());
        }
        let found = looked.done;
        let count = found.iter().filter(|healed| healed.outcome == Outcome::Lost).count();
        if healing.dry_run {
            output::healed(output, &found, &names(session, output).await?)?;
            return left(&found);
        }
        if count == 0 {
            output::healed(output, &found, &names(session, output).await?)?;
            return left(&found);
        }
        if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
            return Err(Failure::usage(format!(
                "{count} would be brought back: say --dry-run to see them, --yes to have it done"
            )));
        }
        // For scripts there is one list, of what was done.
        if output == Output::Table {
            output::healed(output, &found, &names(session, output).await?)?;
        }
        if !agrees(count)? {
            return Err(Failure::failed("nothing was changed"));
        }
    }
    let tended = heal(cloud, &healing.instances, false).await.map_err(|error| session.failed(error))?;
    let Some(error) = tended.failed else {
        output::healed(output, &tended.done, &names(session, output).await?)?;
        return left(&tended.done);
    };
    // What was done is told, by uuids where etcd does not tell names now.
    if !tended.done.is_empty() {
        let names = names(session, output).await.unwrap_or_default();
        output::healed(output, &tended.done, &names)?;
    }
    Err(session.failed(error))
}

/// What can be asked for by name now: what was brought back can.
async fn names(session: &Session, output: Output) -> Result<Names, CloudError> {
    Names::of(&session.cloud, Workload::Machine, output).await
}

/// An error where some stay as they are.
fn left(healed: &[Healed]) -> Result<(), Failure> {
    let left: Vec<String> = healed
        .iter()
        .filter(|healed| healed.outcome == Outcome::Left)
        .map(|healed| called(healed.name.as_ref(), healed.instance))
        .collect();
    if left.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(format!("left as they are: {}", left.join(", "))))
}

fn agrees(count: usize) -> Result<bool, Failure> {
    let failed = |error: io::Error| Failure::failed(format!("failed to ask: {error}"));
    let mut line = String::new();
    let mut terminal = io::stderr();
    write!(terminal, "bring {count} back? y: yes, anything else: no ").map_err(failed)?;
    io::stdin().read_line(&mut line).map_err(failed)?;
    Ok(line.trim().eq_ignore_ascii_case("y"))
}

/// What stands behind the list, for people.
pub(crate) fn nothing(list: &[Healed]) {
    if list.is_empty() {
        tell("eschedule: no node holds anything that etcd lacks");
    }
}
