//! The node's key in etcd, under a lease: this agent is alive, and it alone is this node.
//!
//! Whatever the agent writes into etcd is written only while the key is its own ([`Presence::fence`]). A cloned
//! machine brings a second agent with the same uuid: it finds the key taken, says by whom, and ends without
//! having touched anything. It ends for good: one that tried again and again would be the node as soon as the first one
//! is started anew.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ec_calls::Part;
use ec_model::{Alive, Keyspace, NodeId, decode, encode};
use ec_runtime::{Host, planted};
use ec_store::{Compare, LeaseId, Revision, Store, StoreError, StoreResult, Txn, TxnOutcome};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// How long the node's key outlives a dead agent. Long enough for etcd to elect a leader and for an
/// agent to be restarted, short enough that schedulers soon pass a dead node over.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(15);
/// A key of another that is still there after so long is kept alive by somebody: twice the lease, and an election.
const OTHER_LIVES: Duration = Duration::from_secs(35);
/// Between two looks at a key that another holds.
const OTHER_PERIOD: Duration = Duration::from_secs(1);

/// Whether this agent is the node, for everybody who writes.
#[derive(Debug)]
pub struct Presence {
    /// Says which agent is the node.
    agent_key: String,
    /// Says that the node takes instances.
    alive_key: String,
    /// How both were put last.
    held: watch::Sender<Option<Hold>>,
    shown: AtomicBool,
    look: Notify,
    /// Whether the lease is held, as far as is known.
    pub(crate) lease: Part,
}

impl Presence {
    /// Not held yet.
    pub(crate) fn new(keys: &Keyspace, node: NodeId, host: &Host) -> Self {
        Self {
            agent_key: keys.agent(node),
            alive_key: keys.alive(node),
            held: watch::Sender::new(None),
            shown: AtomicBool::new(false),
            look: Notify::new(),
            lease: Part::new(host),
        }
    }

    /// The condition under which this agent may write; `None` while it is not the node.
    pub(crate) fn fence(&self) -> Option<Compare> {
        (*self.held.borrow()).map(|hold| Compare::Unchanged(self.agent_key.clone(), hold.revision))
    }

    /// A write failed that may have failed for the fence's sake: look at the keys at once.
    pub(crate) fn doubt(&self) {
        self.look.notify_one();
    }

    /// From now on the node is shown as alive: schedulers may choose it.
    pub(crate) fn show(&self) {
        if !self.shown.swap(true, Ordering::Relaxed) {
            self.look.notify_one();
        }
    }

    /// Tells when the keys were put anew, or lost.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Hold>> {
        self.held.subscribe()
    }

    /// Waits until this agent is the node.
    pub(crate) async fn wait(&self) {
        let mut held = self.held.subscribe();
        // The sender lives in `self`.
        let _ = held.wait_for(Option::is_some).await;
    }
}

/// Another agent is this node.
#[derive(Debug, thiserror::Error)]
#[error(
    "node {node} is already served by another agent, on host {host} (alive since {since}); this one, on host {here}, \
     ends and touches no guest. Two machines were made from one image or one copy of the state directory: on the one \
     that is not to be {node}, remove the file {uuid_file} and, where it was joined to a cluster, have it join with a bundle of its own \
     (`eschedule node add`, `ecompute join`); its guests, if it has any, stay as they are. Where this one is to be it, do that on the \
     other, and start this agent again: it does not try by itself"
)]
pub(crate) struct Taken {
    node: NodeId,
    host: String,
    since: String,
    here: String,
    uuid_file: String,
}

/// What tells this agent from any other: the kernel's boot, and the state directory, which only one process holds.
pub(crate) fn machine(state_dir: &Path) -> io::Result<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let directory = fs::metadata(state_dir)?;
    Ok(format!("{}:{}:{}", boot.trim(), directory.dev(), directory.ino()))
}

/// Keeps the node's keys until asked to end, then revokes their lease. A lost lease, a wiped, restored or
/// restarted etcd: the keys are put again. Fails only where another living agent is the node.
pub(crate) async fn keep(
    presence: &Presence,
    store: Arc<dyn Store>,
    record: Alive,
    state_dir: &Path,
    shutdown: CancellationToken,
) -> Result<(), Taken> {
    let mut hold: Option<Hold> = None;
    let mut lost = false;
    // The key of another, with the term of etcd's leader, and since when both are seen as they are, without a gap.
    let mut other_since: Option<(Sight, Instant)> = None;
    let mut renewed_at = Instant::now();
    let outcome = loop {
        let pause = match renew(store.as_ref(), hold, presence, &record).await {
            Ok(Renewed::Ours(renewed)) => {
                if lost {
                    tracing::info!("etcd is back");
                }
                (hold, lost, other_since) = (Some(renewed), false, None);
                presence.lease.up();
                renewed_at = Instant::now();
                presence.held.send_if_modified(|held| held.replace(renewed) != Some(renewed));
                LEASE_TTL / 3
            }
            Ok(Renewed::Others(other, revision)) => {
                presence.held.send_replace(None);
                if let Some(hold) = hold.take() {
                    store.revoke(hold.lease).await.ok();
                }
                let host = other.as_ref().map_or("unknown", |other| other.host.as_str()).to_owned();
                presence.lease.down(format!("another agent is this node, on host {host}"));
                if other_since.is_none() {
                    tracing::warn!(
                        node = %record.node,
                        host,
                        "another agent is this node, or this one was before its host was started anew; waiting up to {} s for that one's lease to run out",
                        OTHER_LIVES.as_secs()
                    );
                }
                // A new leader gives every lease its whole time again: what is there yet says nothing of who lives.
                let term = store.server().await.ok().map(|server| server.term);
                let sight = Sight { revision, term };
                let seen = other_since.filter(|(before, _)| *before == sight);
                let (_, since) = *other_since.insert(seen.unwrap_or((sight, Instant::now())));
                if since.elapsed() >= OTHER_LIVES {
                    break Err(Taken {
                        node: record.node,
                        host,
                        since: other
                            .map_or_else(|| "unknown".to_owned(), |other| other.started_at.to_string()),
                        here: record.host.clone(),
                        uuid_file: state_dir.join("uuid").display().to_string(),
                    });
                }
                OTHER_PERIOD
            }
            Err(StoreError::LeaseLost(lease)) => {
                tracing::warn!(
                    lease = lease.0,
                    "this node's lease is gone: it ran out, or somebody revoked it; taking another"
                );
                presence.lease.down("it ran out, or somebody revoked it");
                other_since = None;
                presence.held.send_replace(None);
                hold = None;
                // A lease that is lost at once each time must not spin.
                Duration::from_millis(200)
            }
            Err(error) => {
                if !lost {
                    tracing::warn!(%error, "failed to renew this node's lease; trying on");
                }
                lost = true;
                // An etcd that is away lets no lease run out: that a key is there yet says nothing of who lives.
                other_since = None;
                // Until then etcd keeps it.
                if renewed_at.elapsed() >= LEASE_TTL {
                    presence.lease.down(format!("it cannot be renewed: {error}"));
                }
                Duration::from_secs(1)
            }
        };
        tokio::select! {
            biased;
            () = shutdown.cancelled() => break Ok(()),
            () = presence.look.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    };
    presence.held.send_replace(None);
    if let Some(hold) = hold
        && let Err(error) = store.revoke(hold.lease).await
    {
        tracing::warn!(%error, "failed to revoke this node's lease; it runs out by itself");
    }
    outcome
}

/// The key of another, as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sight {
    revision: Option<Revision>,
    /// Under which leader of etcd; none where it did not say.
    term: Option<u64>,
}

/// The keys as they were put, in one transaction on one lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) lease: LeaseId,
    revision: Revision,
    shown: bool,
}

enum Renewed {
    /// This agent is the node.
    Ours(Hold),
    /// Another is, by a key of this revision; nothing is known of it where its record cannot be read.
    Others(Option<Box<Alive>>, Option<Revision>),
}

async fn renew(
    store: &dyn Store,
    hold: Option<Hold>,
    presence: &Presence,
    record: &Alive,
) -> StoreResult<Renewed> {
    let Presence { agent_key, alive_key, .. } = presence;
    let shown = presence.shown.load(Ordering::Relaxed);
    if let Some(hold) = hold {
        store.keep_alive(hold.lease).await?;
        if hold.shown == shown {
            let mut unchanged = Txn::new().when(Compare::Unchanged(agent_key.clone(), hold.revision));
            if shown && !planted("sign-believed") {
                unchanged = unchanged.when(Compare::Unchanged(alive_key.clone(), hold.revision));
            }
            if store.txn(unchanged).await?.succeeded {
                return Ok(Renewed::Ours(hold));
            }
        }
    }
    let (current, _) = store.get(agent_key).await?;
    let unchanged = match current {
        None => Compare::Absent(agent_key.clone()),
        Some(pair) => {
            let other = decode::<Alive>(&pair.value).ok();
            let ours = pair.lease.is_some() && pair.lease == hold.map(|hold| hold.lease);
            let predecessor = other.as_ref().is_some_and(|other| other.machine == record.machine);
            // A key on no lease was put by hand, and is nobody's sign of life.
            if pair.lease.is_some() && !ours && !predecessor {
                return Ok(Renewed::Others(other.map(Box::new), Some(pair.mod_revision)));
            }
            Compare::Unchanged(agent_key.clone(), pair.mod_revision)
        }
    };
    let lease = match hold {
        Some(hold) => hold.lease,
        None => store.grant(LEASE_TTL).await?,
    };
    let value = encode(record);
    let mut txn = Txn::new().when(unchanged).put_leased(agent_key, value.clone(), lease);
    if shown {
        txn = txn.put_leased(alive_key, value, lease);
    }
    match store.txn(txn).await {
        Ok(TxnOutcome { succeeded: true, revision }) => Ok(Renewed::Ours(Hold { lease, revision, shown })),
        other => {
            if hold.is_none() {
                // Not left behind: the next try takes a new one.
                store.revoke(lease).await.ok();
            }
            // Somebody was faster: the next look tells who.
            other.map(|_| Renewed::Others(None, None))
        }
    }
}

#[cfg(test)]
mod tests {
    use ec_store::MemoryStore;
    use jiff::Timestamp;

    use super::*;

    fn record(machine: &str) -> Alive {
        Alive {
            node: NodeId::new(uuid::Uuid::from_u128(1)),
            name: "n".into(),
            agent: "test".into(),
            formats: Alive::formats_of_this_release(),
            virt_type: "qemu".into(),
            machine: machine.into(),
            host: format!("host-{machine}"),
            url: None,
            storage: None,
            started_at: Timestamp::UNIX_EPOCH,
        }
    }

    fn presence() -> Presence {
        Presence::new(&Keyspace::default(), NodeId::new(uuid::Uuid::from_u128(1)), &Host::default())
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_agent_with_the_same_uuid_is_refused_with_both_names_and_disturbs_nothing() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let first = Arc::new(presence());
        first.show();
        let stop = CancellationToken::new();
        let (one, in_one, stop_one) = (Arc::clone(&first), Arc::clone(&store), stop.clone());
        let keeper =
            tokio::spawn(async move { keep(&one, in_one, record("a"), Path::new("/state"), stop_one).await });
        first.wait().await;
        let (before, _) = store.get(&first.alive_key).await.unwrap();
        assert!(before.is_some());

        let second = presence();
        second.show();
        let refused = keep(&second, Arc::clone(&store), record("b"), Path::new("/state"), stop.clone()).await;
        let message = refused.unwrap_err().to_string();
        let names = ["host-a", "host-b", "/state/uuid"];
        assert!(names.iter().all(|name| message.contains(name)), "{message}");
        assert!(second.fence().is_none());
        let (after, _) = store.get(&first.alive_key).await.unwrap();
        assert_eq!(after, before, "the first one's key was not touched");
        assert!(first.fence().is_some());
        stop.cancel();
        keeper.await.unwrap().unwrap();
        assert_eq!(store.get(&first.alive_key).await.unwrap().0, None);
    }

    async fn ours(store: &dyn Store, hold: Option<Hold>, presence: &Presence, machine: &str) -> Hold {
        match renew(store, hold, presence, &record(machine)).await.unwrap() {
            Renewed::Ours(hold) => hold,
            Renewed::Others(other, _) => panic!("it is {other:?}'s"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_held_as_long_as_etcd_keeps_it_although_etcd_is_away() {
        let (store, presence, stop) = (MemoryStore::new(), Arc::new(presence()), CancellationToken::new());
        let (behind, kept, end): (Arc<dyn Store>, _, _) =
            (Arc::new(store.clone()), Arc::clone(&presence), stop.clone());
        let keeper =
            tokio::spawn(async move { keep(&kept, behind, record("a"), Path::new("/state"), end).await });
        assert!(!presence.lease.standing().ok, "not yet");
        presence.wait().await;
        assert!(presence.lease.standing().ok);
        store.faults().set_reachable(false);
        tokio::time::sleep(LEASE_TTL / 2).await;
        assert!(presence.lease.standing().ok);
        tokio::time::sleep(LEASE_TTL).await;
        let lost = presence.lease.standing();
        assert!(!lost.ok && lost.why.unwrap().contains("cannot be renewed"));
        store.faults().set_reachable(true);
        tokio::time::sleep(LEASE_TTL).await;
        assert!(presence.lease.standing().ok);
        stop.cancel();
        keeper.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_etcd_that_was_away_has_of_another_is_no_sign_of_its_life() {
        let (store, presence, stop) = (MemoryStore::new(), Arc::new(presence()), CancellationToken::new());
        let (behind, kept, end): (Arc<dyn Store>, _, _) =
            (Arc::new(store.clone()), Arc::clone(&presence), stop.clone());
        let lease = store.grant(OTHER_LIVES * 10).await.unwrap();
        let put = Txn::new().put_leased(&presence.agent_key, encode(&record("a")), lease);
        store.txn(put).await.unwrap();
        let keeper =
            tokio::spawn(async move { keep(&kept, behind, record("b"), Path::new("/state"), end).await });
        for _ in 0..2 {
            tokio::time::sleep(OTHER_LIVES - OTHER_PERIOD * 5).await;
            store.faults().set_reachable(false);
            tokio::time::sleep(OTHER_PERIOD * 10).await;
            store.faults().set_reachable(true);
        }
        assert!(!keeper.is_finished());
        tokio::time::sleep(OTHER_LIVES + OTHER_PERIOD * 5).await;
        assert!(keeper.is_finished());
        keeper.await.unwrap().unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_etcd_has_of_another_under_a_new_leader_is_no_sign_of_its_life() {
        let (store, presence, stop) = (MemoryStore::new(), Arc::new(presence()), CancellationToken::new());
        let (behind, kept, end): (Arc<dyn Store>, _, _) =
            (Arc::new(store.clone()), Arc::clone(&presence), stop.clone());
        // Of this node before its host was started anew.
        let lease = store.grant(LEASE_TTL).await.unwrap();
        let put = Txn::new().put_leased(&presence.agent_key, encode(&record("a")), lease);
        store.txn(put).await.unwrap();
        let keeper =
            tokio::spawn(async move { keep(&kept, behind, record("b"), Path::new("/state"), end).await });
        for _ in 0..4 {
            tokio::time::sleep(LEASE_TTL - OTHER_PERIOD * 2).await;
            assert!(!keeper.is_finished() && presence.fence().is_none());
            store.faults().elect();
        }
        tokio::time::sleep(LEASE_TTL + OTHER_PERIOD * 2).await;
        assert!(presence.fence().is_some(), "it ran out");
        stop.cancel();
        keeper.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_start_of_the_same_agent_takes_over_at_once_and_is_shown_when_it_is_ready() {
        let (store, presence) = (MemoryStore::new(), presence());
        let before = ours(&store, None, &presence, "a").await;
        let after = ours(&store, None, &presence, "a").await;
        assert!(after.revision > before.revision, "what the predecessor still writes is refused");
        let other = renew(&store, None, &presence, &record("b")).await.unwrap();
        assert!(matches!(other, Renewed::Others(Some(_), Some(_))));
        assert_eq!(store.get(&presence.alive_key).await.unwrap().0, None);

        presence.show();
        let shown = ours(&store, Some(after), &presence, "a").await;
        assert_eq!(
            ours(&store, Some(shown), &presence, "a").await,
            shown,
            "what is there is not written again"
        );
        // Somebody deletes the key by hand.
        store.txn(Txn::new().delete(&presence.alive_key)).await.unwrap();
        let again = ours(&store, Some(shown), &presence, "a").await;
        assert!(again.revision > shown.revision);
        assert!(store.get(&presence.alive_key).await.unwrap().0.is_some());
    }
}
