//! The controller's loop: looks at the nodes and at what killed commands left, time and again. What is to be done is
//! decided by [`ec_plan::fleet`] and done by [`ec_cloud`]; here is only when.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod tally;

use std::time::Duration;

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

/// Looks after the cluster until `shutdown`, whatever fails meanwhile, and counts it.
pub async fn tend(cloud: &Cloud, tally: &Tally, shutdown: &CancellationToken) {
    let begun = Instant::now();
    let mut fleet = Fleet::new(PATIENCE, NODES_PERIOD * 2);
    let mut surplus = Surplus::new(CLAIM_PATIENCE, INSTANCES_PERIOD * 2);
    let mut instances_due = begun;
    // Of nodes, of instances, and of claims: one may work where another does not.
    let mut troubles: [Trouble; 3] = Default::default();
    loop {
        service::turned();
        tally.turned();
        // A look that is broken off in its midst leaves nothing half done: each of its writes is whole.
        let look = async {
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
            troubles[0].tell(tally.nodes.of(looked).await);
            if Instant::now() >= instances_due {
                instances_due = Instant::now() + INSTANCES_PERIOD;
                let looked = async {
                    let swept = tend_instances(cloud).await?;
                    tally.swept(swept.done.len());
                    for Cleared { instance, request_id } in swept.done {
                        let request_id = request_id.map(tracing::field::display);
                        tracing::info!(%instance, request_id, "took away what was left of it");
                    }
                    swept.failed.map_or(Ok(()), Err)
                };
                troubles[1].tell(tally.instances.of(looked).await);
                let looked = async {
                    let settled = tend_claims(cloud, &mut surplus, begun.elapsed()).await?;
                    tally.settled(settled.done.len());
                    for Cleared { instance, request_id } in settled.done {
                        let request_id = request_id.map(tracing::field::display);
                        tracing::info!(%instance, request_id, "gave back what it had claimed and does not need");
                    }
                    settled.failed.map_or(Ok(()), Err)
                };
                troubles[2].tell(tally.claims.of(looked).await);
            }
            tokio::time::sleep(NODES_PERIOD).await;
        };
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            () = look => {}
        }
    }
}

/// Says once that something does not work, and once that it does again.
#[derive(Default)]
struct Trouble(bool);

impl Trouble {
    fn tell(&mut self, outcome: Result<(), CloudError>) {
        match (&outcome, self.0) {
            (Err(error), false) => tracing::warn!(%error, "failed to look after the cluster; trying on"),
            (Ok(()), true) => tracing::info!("etcd and placement answer again"),
            _ => {}
        }
        self.0 = outcome.is_err();
    }
}
