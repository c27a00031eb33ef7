//! The controller's loop: looks at the nodes and at what killed commands left, time and again. What is to be done is
//! decided by [`ec_plan::fleet`] and done by [`ec_cloud`]; here is only when.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod tally;

use std::{convert::Infallible, time::Duration};

use ec_cloud::{Cleared, Cloud, CloudError, tend_claims, tend_instances, tend_nodes};
use ec_plan::fleet::{Fleet, Move, Surplus};
use ec_runtime::service;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use tally::Tally;

/// Between two looks at the nodes.
pub const NODES_PERIOD: Duration = Duration::from_secs(5);
/// A node whose agent was missing for so long is down. Twice the lease of its key: an agent that is restarted, and an
/// etcd that elects a leader, are back before.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at what killed commands left, which is touched when it is ten minutes old.
const INSTANCES_PERIOD: Duration = Duration::from_secs(60);
/// A claim that was greater than what its instance needs for so long is looked into. Who claims more asks for it at once, and
/// claims it once more where this was quicker.
const CLAIM_PATIENCE: Duration = Duration::from_secs(60);

/// What goes wrong in another way is told at most so often of each look.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// Looks after the cluster until `shutdown`, whatever fails meanwhile, and counts it.
pub async fn tend(cloud: &Cloud, tally: &Tally, shutdown: &CancellationToken) {
    // Beside each other: claims are asked for of every node, and where that takes minutes a node that dies is marked all the same.
    // A look that is broken off in its midst leaves nothing half done: each of its writes is whole.
    let looks = async { tokio::join!(look_at_nodes(cloud, tally), look_at_what_is_left(cloud, tally)) };
    tokio::select! {
        biased;
        () = shutdown.cancelled() => {}
        (never, _) = looks => match never {},
    }
}

/// Marks nodes that are gone, and those that are back. That this goes on is what a service manager is told.
async fn look_at_nodes(cloud: &Cloud, tally: &Tally) -> Infallible {
    let begun = Instant::now();
    let mut fleet = Fleet::new(PATIENCE, NODES_PERIOD * 2);
    let mut trouble = Trouble::of("nodes");
    loop {
        service::turned();
        tally.turned();
        let looked = async {
            let (seen, tended) = tend_nodes(cloud, &mut fleet, begun.elapsed()).await?;
            tally.saw(&seen, &tended.done);
            for done in tended.done {
                match done {
                    Move::MarkDown(node) => {
                        tracing::warn!(%node, "its agent is gone: nothing is placed there any more")
                    }
                    Move::MarkUp(node) => {
                        tracing::info!(%node, "its agent is back: instances may be placed there again")
                    }
                }
            }
            tended.failed.map_or(Ok(()), Err)
        };
        trouble.tell(tally.nodes.of(looked).await);
        tokio::time::sleep(NODES_PERIOD).await;
    }
}

/// Takes away what killed commands left, and claims that are greater than what their instances need.
async fn look_at_what_is_left(cloud: &Cloud, tally: &Tally) -> Infallible {
    let begun = Instant::now();
    let mut surplus = Surplus::new(CLAIM_PATIENCE, INSTANCES_PERIOD * 2);
    // One may work where the other does not.
    let (mut of_instances, mut of_claims) = (Trouble::of("instances"), Trouble::of("claims"));
    loop {
        let looked = async {
            tally.trust_clock().await?;
            let swept = tend_instances(cloud).await?;
            tally.swept(swept.done.len());
            for Cleared { instance, request_id } in swept.done {
                let request_id = request_id.map(tracing::field::display);
                tracing::info!(%instance, request_id, "took away what was left of it");
            }
            swept.failed.map_or(Ok(()), Err)
        };
        of_instances.tell(tally.instances.of(looked).await);
        let looked = async {
            let settled = tend_claims(cloud, &mut surplus, begun.elapsed()).await?;
            tally.settled(settled.done.len());
            for Cleared { instance, request_id } in settled.done {
                let request_id = request_id.map(tracing::field::display);
                tracing::info!(%instance, request_id, "gave back what it had claimed and does not need");
            }
            settled.failed.map_or(Ok(()), Err)
        };
        of_claims.tell(tally.claims.of(looked).await);
        tokio::time::sleep(INSTANCES_PERIOD).await;
    }
}

/// Says that a look does not go well, when that is for another reason, and once that it does again.
struct Trouble {
    look: &'static str,
    told: Option<(String, Instant)>,
}

impl Trouble {
    fn of(look: &'static str) -> Self {
        Self { look, told: None }
    }

    fn tell(&mut self, outcome: Result<(), CloudError>) {
        match outcome {
            Err(error) => {
                if self.is_news(&error.to_string()) {
                    tracing::warn!(look = self.look, %error, "failed to look after the cluster; trying on");
                }
            }
            Ok(()) if self.told.take().is_some() => {
                tracing::info!("the look at {} went well again", self.look);
            }
            Ok(()) => {}
        }
    }

    /// Whether this was not told last. Words with numbers in them, as times and uuids, are others each time and tell nothing new.
    fn is_news(&mut self, why: &str) -> bool {
        let words = why.split_whitespace().filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
        let gist = words.collect::<Vec<_>>().join(" ");
        if self.told.as_ref().is_some_and(|(told, at)| *told == gist || at.elapsed() < TOLD_EVERY) {
            return false;
        }
        self.told = Some((gist, Instant::now()));
        true
    }
}

#[cfg(test)]
mod tests;
