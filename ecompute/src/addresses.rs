//! Looking for guests' addresses. Waiting for one holds no worker.

use std::{sync::Arc, time::Duration};

use ec_hypervisor::Hypervisor;
use ec_plan::engine::{Found, Search};
use tokio::sync::{mpsc, watch};

/// How soon a new address is noticed while somebody waits for one: within the 200 ms that we promise.
const WAITING_PERIOD: Duration = Duration::from_millis(150);
/// How soon a changed or further address is noticed.
const KNOWN_PERIOD: Duration = Duration::from_secs(10);

/// Looks as often as is wanted, until the receiver is gone.
pub(crate) async fn look_for_addresses(
    hypervisor: Arc<dyn Hypervisor>,
    mut wanted: watch::Receiver<Search>,
    found: mpsc::Sender<Found>,
) {
    let mut known_due = tokio::time::Instant::now() + KNOWN_PERIOD;
    loop {
        let now = tokio::time::Instant::now();
        let waiting = wanted.borrow_and_update().waiting.clone();
        let mut look_at = waiting.clone();
        let period = if look_at.is_empty() { KNOWN_PERIOD } else { WAITING_PERIOD };
        if now >= known_due {
            look_at.extend(wanted.borrow().known.iter().copied());
            known_due = now + KNOWN_PERIOD;
        }
        if !look_at.is_empty() {
            match hypervisor.addresses(&look_at).await {
                Ok(addresses) => {
                    if found
                        .send(Found { waiting, addresses: addresses.into_iter().collect() })
                        .await
                        .is_err()
                    {
                        return;
                    }
                }
                // The driver notices a lost hypervisor by itself; here it only means not yet.
                Err(error) => tracing::debug!(%error, "failed to look for addresses"),
            }
        }
        tokio::select! {
            biased;
            () = tokio::time::sleep_until((now + period).min(known_due).max(tokio::time::Instant::now())) => {}
            changed = wanted.changed() => if changed.is_err() { return },
        }
    }
}
