//! Lanes: connections of one kind, each opened when needed, replaced when lost or stuck, and with one call at a
//! time, so that their number bounds the threads that work on them.
//!
//! One call at a time, and no keepalive of ours, because libvirt's client (before 10.4, CVE-2024-4418) may crash the
//! process when something else wants the connection of a call that waits. It costs nothing: libvirtd works on five
//! calls of one connection at most, and whoever waits here has a deadline.
//!
//! ```text
//!           first call                  opened
//!  Closed ─────────────▶ Opening ───────────────────▶ Open
//!    ▲                      │ refused                  │ closed by the daemon, or a call on it
//!    └──────────────────────┴──────────────────────────┘ passed its deadline
//! ```
//! Opening may hang too, so it happens on one thread of its own and callers only wait for it.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ec_hypervisor::{HypervisorError, HypervisorResult};
use ec_model::InstanceId;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::timeout_at,
};
use uuid::Uuid;
use virt::connect::Connect;

use crate::{
    calls::{self, Hung, NoResult, Scope},
    domain,
    error::{CallError, unreachable},
    events,
    sys::{Callbacks, Signal},
};

/// How often a lost connection is tried again while nobody calls, so that its return is told.
const RETURN_INTERVAL: Duration = Duration::from_millis(500);

/// What a lane tells its owner: a domain changed, or the connection was lost or came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The domain of that uuid changed.
    Domain(Uuid),
    /// Anything may have changed.
    Everything,
}

pub(crate) type Listener = Arc<dyn Fn(Notice) + Send + Sync>;

/// One connection. Ends on the thread that lets go of it last, never on an async one.
#[derive(Debug)]
struct Session {
    connect: Connect,
    callbacks: Callbacks,
    alive: Arc<AtomicBool>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.callbacks.deregister(&self.connect);
    }
}

#[derive(Debug)]
enum Link {
    Closed(Option<HypervisorError>),
    Opening(Instant),
    Open(Arc<Session>),
}

/// A daemon that is well answers in less.
const AT_ONCE: Duration = Duration::from_secs(1);

/// See the module.
pub(crate) struct Lanes {
    timeout: Duration,
    hung: Arc<Hung>,
    permits: Arc<Semaphore>,
    /// For all but what ends guests, which is what frees hung calls: those must not keep every lane from it.
    others: Arc<Semaphore>,
    /// As many as there are permits. The one used last is used next, so that few are opened where few are needed.
    free: Arc<Mutex<Vec<Arc<Lane>>>>,
    /// Of the one question at a time for what a call waits for: a daemon that stands still answers none.
    asks: Arc<Semaphore>,
}

/// A lane while a call has it, to the end of the call's thread.
struct Turn {
    lane: Arc<Lane>,
    free: Arc<Mutex<Vec<Arc<Lane>>>>,
    /// Given back after the lane.
    _permit: OwnedSemaphorePermit,
    _other: Option<OwnedSemaphorePermit>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        locked(&self.free).push(Arc::clone(&self.lane));
    }
}

impl Lanes {
    /// So many lanes to the same daemon, of which some are kept for what ends guests; with a listener, the first of them listens.
    pub(crate) fn new(
        uri: &str,
        timeout: Duration,
        count: usize,
        kept: usize,
        hung: &Arc<Hung>,
        listener: Option<Listener>,
    ) -> Self {
        let others = (1..count).map(|_| Lane::new(uri, timeout, hung, None));
        let lanes = others.chain([Lane::new(uri, timeout, hung, listener)]).collect();
        Self {
            timeout,
            hung: Arc::clone(hung),
            permits: Arc::new(Semaphore::new(count)),
            others: Arc::new(Semaphore::new(count - kept)),
            free: Arc::new(Mutex::new(lanes)),
            asks: Arc::new(Semaphore::new(1)),
        }
    }

    /// Runs `work` on a free lane. `what` completes "failed to …". Waiting for a free lane, for its connection and
    /// for the work itself are each bounded by the call timeout.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        what: String,
        scope: Scope,
        work: impl FnOnce(&Connect) -> Result<T, CallError> + Send + 'static,
    ) -> HypervisorResult<T> {
        let timed_out = |what| HypervisorError::TimedOut { what, seconds: self.timeout.as_secs() };
        if self.hung.is(scope) {
            return Err(timed_out(format!("an earlier call to libvirt, before the one to {what},")));
        }
        let permits = async {
            let other = match scope {
                Scope::End(_) => None,
                Scope::Host | Scope::Instance(_) => {
                    Some(Arc::clone(&self.others).acquire_owned().await.ok()?)
                }
            };
            Some((Arc::clone(&self.permits).acquire_owned().await.ok()?, other))
        };
        let permits = tokio::time::timeout(self.timeout, permits).await.ok().flatten();
        // With the permit alone: a lane that is taken without one comes back never.
        let Some(turn) = permits.and_then(|(permit, other)| self.turn(permit, other)) else {
            return Err(HypervisorError::Busy { what, seconds: self.timeout.as_secs() });
        };
        let lane = Arc::clone(&turn.lane);
        let called = lane.call(turn, what.clone(), scope, work).await;
        match (called, scope) {
            (Err(error @ HypervisorError::TimedOut { .. }), Scope::Instance(instance)) => {
                Err(match self.held(instance, error.clone()).await {
                    Some(why) => HypervisorError::NotNow { what, detail: why.to_owned() },
                    None => error,
                })
            }
            (called, _) => called,
        }
    }

    /// The lane that goes with a permit.
    fn turn(&self, permit: OwnedSemaphorePermit, other: Option<OwnedSemaphorePermit>) -> Option<Turn> {
        let lane = locked(&self.free).pop()?;
        Some(Turn { lane, free: Arc::clone(&self.free), _permit: permit, _other: other })
    }

    /// Why no call about an instance comes back, where libvirt can tell at once.
    async fn held(&self, instance: InstanceId, error: HypervisorError) -> Option<&'static str> {
        let asks = Arc::clone(&self.asks).try_acquire_owned().ok()?;
        // One of those that are kept, where there is no other: there is one such question at a time.
        let turn = self.turn(Arc::clone(&self.permits).try_acquire_owned().ok()?, None)?;
        let lane = Arc::clone(&turn.lane);
        let work = move |connect: &Connect| {
            let held = domain::held(connect, instance, &error);
            drop(asks);
            held
        };
        let what = format!("look what domain {instance} waits for");
        tokio::time::timeout(AT_ONCE, lane.call(turn, what, Scope::Host, work)).await.ok()?.ok()?
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One connection.
struct Lane {
    uri: String,
    timeout: Duration,
    hung: Arc<Hung>,
    link: Mutex<Link>,
    /// Counts the openings that ended.
    opened: watch::Sender<u64>,
    /// Where there is one, this lane listens to domains, and comes back by itself.
    listener: Option<Listener>,
    returning: AtomicBool,
}

impl Lane {
    fn new(uri: &str, timeout: Duration, hung: &Arc<Hung>, listener: Option<Listener>) -> Arc<Self> {
        Arc::new(Self {
            uri: uri.to_owned(),
            timeout,
            hung: Arc::clone(hung),
            link: Mutex::new(Link::Closed(None)),
            opened: watch::Sender::new(0),
            listener,
            returning: AtomicBool::new(false),
        })
    }

    async fn call<T: Send + 'static>(
        self: &Arc<Self>,
        turn: Turn,
        what: String,
        scope: Scope,
        work: impl FnOnce(&Connect) -> Result<T, CallError> + Send + 'static,
    ) -> HypervisorResult<T> {
        let session = self.session().await?;
        let (lane, used) = (Arc::clone(self), Arc::downgrade(&session));
        let on_thread = what.clone();
        let result = calls::run(turn, &self.hung, scope, self.timeout, move || {
            work(&session.connect).map_err(|error| {
                // Told without asking the daemon.
                let lost = !session.connect.is_alive().unwrap_or(false);
                if lost {
                    lane.replace(&Arc::downgrade(&session));
                }
                error.classify(&on_thread, &lane.uri, lane.timeout.as_secs(), lost)
            })
        })
        .await;
        result.unwrap_or_else(|no_result| match no_result {
            NoResult::Deadline => {
                self.replace(&used);
                let what = format!("the call to {what}");
                Err(HypervisorError::TimedOut { what, seconds: self.timeout.as_secs() })
            }
            NoResult::Thread(detail) => Err(unreachable(&self.uri, detail)),
        })
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        locked(&self.link)
    }

    /// The connection, opened where it is not.
    async fn session(self: &Arc<Self>) -> HypervisorResult<Arc<Session>> {
        let mut opened = self.opened.subscribe();
        let deadline = tokio::time::Instant::now() + self.timeout;
        let mut waited = false;
        loop {
            match &mut *self.link() {
                Link::Open(session) if session.alive.load(Ordering::Acquire) => {
                    return Ok(Arc::clone(session));
                }
                Link::Opening(since) if since.elapsed() >= self.timeout => {
                    let detail = format!("connecting has hung for {} s", since.elapsed().as_secs());
                    return Err(unreachable(&self.uri, detail));
                }
                Link::Closed(Some(error)) if waited => return Err(error.clone()),
                Link::Opening(_) => {}
                link => self.begin_opening(link),
            }
            waited = true;
            if timeout_at(deadline, opened.changed()).await.is_err() {
                return Err(HypervisorError::TimedOut {
                    what: format!("connecting to {}", self.uri),
                    seconds: self.timeout.as_secs(),
                });
            }
        }
    }

    /// Starts the one thread that opens the connection.
    fn begin_opening(self: &Arc<Self>, link: &mut Link) {
        let before = std::mem::replace(link, Link::Opening(Instant::now()));
        let lane = Arc::clone(self);
        let spawned = thread::Builder::new().name("libvirt-open".into()).spawn(move || {
            drop(before);
            let result = lane.open();
            let is_open = result.is_ok();
            *lane.link() = match result {
                Ok(session) => Link::Open(Arc::new(session)),
                Err(error) => Link::Closed(Some(error)),
            };
            let again = *lane.opened.borrow() > 0;
            if is_open {
                lane.opened.send_modify(|count| *count += 1);
                if again {
                    lane.tell(Notice::Everything);
                }
            } else {
                lane.opened.send_modify(|_| ());
            }
        });
        if let Err(error) = spawned {
            *link = Link::Closed(Some(unreachable(&self.uri, format!("no thread to connect: {error}"))));
            self.opened.send_modify(|_| ());
        }
    }

    fn open(self: &Arc<Self>) -> HypervisorResult<Session> {
        let failed = |error: virt::error::Error| unreachable(&self.uri, error.message().to_owned());
        events::start_loop().map_err(|detail| unreachable(&self.uri, detail))?;
        let connect = Connect::open(Some(&self.uri)).map_err(failed)?;
        let alive = Arc::new(AtomicBool::new(true));
        let (lane, flag) = (Arc::downgrade(self), Arc::clone(&alive));
        let callbacks = Callbacks::register(&connect, self.listener.is_some(), move |signal| {
            if signal == Signal::Closed {
                flag.store(false, Ordering::SeqCst);
            }
            if let Some(lane) = lane.upgrade() {
                match signal {
                    Signal::Domain(uuid) => lane.tell(Notice::Domain(uuid)),
                    Signal::Closed => lane.lost(),
                }
            }
        })
        .map_err(failed)?;
        Ok(Session { connect, callbacks, alive })
    }

    fn tell(&self, notice: Notice) {
        if let Some(listener) = &self.listener {
            listener(notice);
        }
    }

    /// Lets go of a connection that is lost or on which a call hangs; the next call opens another.
    fn replace(self: &Arc<Self>, used: &Weak<Session>) {
        let mut link = self.link();
        let Link::Open(current) = &*link else { return };
        if !std::ptr::eq(Arc::as_ptr(current), used.as_ptr()) {
            return;
        }
        let before = std::mem::replace(&mut *link, Link::Closed(None));
        drop(link);
        end_elsewhere(before);
        self.lost();
    }

    /// Tells the loss, and sees to the return where somebody listens.
    fn lost(self: &Arc<Self>) {
        self.tell(Notice::Everything);
        if self.listener.is_none() || self.returning.swap(true, Ordering::SeqCst) {
            return;
        }
        let lane = Arc::downgrade(self);
        let spawned = thread::Builder::new().name("libvirt-return".into()).spawn(move || {
            while let Some(lane) = lane.upgrade() {
                match &mut *lane.link() {
                    Link::Open(session) if session.alive.load(Ordering::Acquire) => {
                        lane.returning.store(false, Ordering::SeqCst);
                        // A loss between the two lines before found somebody still at it.
                        if session.alive.load(Ordering::SeqCst) || lane.returning.swap(true, Ordering::SeqCst)
                        {
                            return;
                        }
                    }
                    Link::Opening(_) => {}
                    link => lane.begin_opening(link),
                }
                drop(lane);
                thread::sleep(RETURN_INTERVAL);
            }
        });
        if spawned.is_err() {
            // The next call opens the connection all the same, and tells.
            self.returning.store(false, Ordering::Release);
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let link = self.link.get_mut().unwrap_or_else(PoisonError::into_inner);
        end_elsewhere(std::mem::replace(link, Link::Closed(None)));
    }
}

/// Closing asks the daemon, so it does not happen where the caller stands.
fn end_elsewhere(link: Link) {
    if matches!(link, Link::Open(_)) {
        let kept = Arc::new(Mutex::new(Some(link)));
        let on_thread = Arc::clone(&kept);
        let spawned = thread::Builder::new().name("libvirt-close".into()).spawn(move || {
            drop(locked(&on_thread).take());
        });
        if spawned.is_err() {
            // Without a thread the connection is rather leaked than closed on an async thread.
            std::mem::forget(kept);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn what_ends_guests_has_lanes_where_hung_calls_keep_all_others() {
        let timeout = Duration::from_millis(300);
        // libvirt's own driver for tests.
        let lanes = Lanes::new("test:///default", timeout, 3, 1, &Arc::default(), None);
        let instance = |n: u8| format!("{n:032x}").parse::<InstanceId>().unwrap();
        let mut gates = Vec::new();
        for n in 0..2 {
            let (release, gate) = mpsc::channel::<()>();
            gates.push(release);
            let hangs = move |_: &Connect| Ok(gate.recv().is_ok());
            let hung = lanes.call("hang".to_owned(), Scope::Instance(instance(n)), hangs).await;
            assert!(matches!(hung, Err(HypervisorError::TimedOut { .. })), "{hung:?}");
        }
        for _ in 0..2 {
            let waits = lanes.call("wait".to_owned(), Scope::Instance(instance(2)), |_| Ok(())).await;
            assert!(matches!(waits, Err(HypervisorError::Busy { .. })), "{waits:?}");
            // Neither is a lane lost to those that waited in vain.
            lanes.call("end".to_owned(), Scope::End(instance(0)), |_| Ok(())).await.unwrap();
        }
        drop(gates);
        for n in 2..5 {
            lanes.call("go on".to_owned(), Scope::Instance(instance(n)), |_| Ok(())).await.unwrap();
        }
    }
}
