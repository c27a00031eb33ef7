//! Who is connected: so many at a time as there are files for, and nobody with more than a share of them.
//!
//! Where there is no place left, a connection on which nothing is being answered makes room for a new one: those
//! that say nothing cannot keep out those that ask.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, IoSlice},
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};
use tokio_util::sync::CancellationToken;

/// Connections at a time, however many files there may be.
const MOST: usize = 4096;
/// Files that are not for connections: etcd, logs, what the runtime needs.
const RESERVE: usize = 64;
/// A connection that was used within this time is about to be used again.
const RECENT: Duration = Duration::from_millis(500);
/// So long a client may take nothing of what is being sent to it.
const STALLED: Duration = Duration::from_secs(20);

/// What a connection is doing.
#[derive(Debug)]
pub(super) struct Activity {
    answering: AtomicBool,
    /// Whether it ever sent anything.
    spoke: AtomicBool,
    born: Instant,
    /// Milliseconds from then to the last byte in or out.
    last: AtomicU64,
}

impl Activity {
    fn new() -> Self {
        Self {
            answering: AtomicBool::new(false),
            spoke: AtomicBool::new(false),
            born: Instant::now(),
            last: AtomicU64::new(0),
        }
    }

    /// From here on a request is being answered, or not any more.
    pub(super) fn set_answering(&self, answering: bool) {
        self.answering.store(answering, Ordering::Relaxed);
        self.touch();
    }

    /// Whether anything was ever heard of it.
    pub(super) fn has_spoken(&self) -> bool {
        self.spoke.load(Ordering::Relaxed)
    }

    fn touch(&self) {
        let millis = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(millis, Ordering::Relaxed);
    }

    fn may_go(&self) -> bool {
        let last = self.born + Duration::from_millis(self.last.load(Ordering::Relaxed));
        !self.answering.load(Ordering::Relaxed) && (!self.has_spoken() || last.elapsed() > RECENT)
    }
}

struct Entry {
    peer: IpAddr,
    activity: Arc<Activity>,
    close: CancellationToken,
}

#[derive(Default)]
struct Book {
    next: u64,
    /// In the order in which they came.
    entries: BTreeMap<u64, Entry>,
    by_peer: HashMap<IpAddr, usize>,
}

/// See the module. Clones are the same ones.
#[derive(Clone)]
pub(super) struct Guests {
    book: Arc<Mutex<Book>>,
    most: usize,
    share: usize,
}

/// A place that was given to a connection; free again when this is dropped.
pub(super) struct Place {
    guests: Guests,
    number: u64,
    /// What the connection is doing.
    pub(super) activity: Arc<Activity>,
    /// Cancelled when another one needs the place more.
    pub(super) close: CancellationToken,
}

impl Guests {
    /// For a process that may have so many files open.
    pub(super) fn new(files: usize) -> Self {
        let most = files.saturating_sub(RESERVE).clamp(1, MOST);
        // The rest is for the others.
        Self { book: Arc::default(), most, share: (most / 2).max(1) }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection of this peer; none where all are answering.
    pub(super) fn admit(&self, peer: IpAddr) -> Option<Place> {
        let peer = peer.to_canonical();
        let mut book = self.book();
        let own = book.by_peer.get(&peer).copied().unwrap_or(0);
        if own >= self.share {
            book.make_room(Some(peer))?;
        } else if book.entries.len() >= self.most {
            // Of whoever has the most.
            let greediest = book.by_peer.iter().max_by_key(|(_, count)| **count).map(|(peer, _)| *peer);
            book.make_room(greediest).or_else(|| book.make_room(None))?;
        }
        let (number, activity, close) = (book.next, Arc::new(Activity::new()), CancellationToken::new());
        book.next += 1;
        *book.by_peer.entry(peer).or_default() += 1;
        book.entries.insert(number, Entry { peer, activity: Arc::clone(&activity), close: close.clone() });
        drop(book);
        Some(Place { guests: self.clone(), number, activity, close })
    }

    /// Gives a file back, where the process has none left all the same.
    pub(super) fn shed(&self) {
        self.book().make_room(None);
    }
}

impl Book {
    /// Ends the oldest connection that may go, of one peer or of all; first those that never said anything.
    fn make_room(&mut self, peer: Option<IpAddr>) -> Option<()> {
        let number = [false, true].into_iter().find_map(|spoke| {
            let mut of_peer =
                self.entries.iter().filter(|(_, entry)| peer.is_none_or(|peer| peer == entry.peer));
            let found =
                of_peer.find(|(_, entry)| entry.activity.has_spoken() == spoke && entry.activity.may_go());
            found.map(|(number, _)| *number)
        })?;
        self.remove(number)?.close.cancel();
        Some(())
    }

    fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.entries.remove(&number)?;
        if let Some(count) = self.by_peer.get_mut(&entry.peer) {
            *count -= 1;
            if *count == 0 {
                self.by_peer.remove(&entry.peer);
            }
        }
        Some(entry)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.guests.book().remove(self.number);
    }
}

/// A stream that notes when it is used, and breaks where its peer takes nothing for too long.
pub(super) struct Watched<S> {
    inner: S,
    activity: Arc<Activity>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Watched<S> {
    pub(super) fn new(inner: S, activity: Arc<Activity>) -> Self {
        Self { inner, activity, stalled: None }
    }

    /// What comes of an attempt to write.
    fn wrote<T>(&mut self, outcome: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stalled = None;
            self.activity.touch();
            return outcome;
        }
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(STALLED)));
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes nothing of its answer")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.inner).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.activity.spoke.store(true, Ordering::Relaxed);
            self.activity.touch();
        }
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.wrote(outcome, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.wrote(outcome, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_flush(context);
        self.wrote(outcome, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_shutdown(context);
        self.wrote(outcome, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;

    fn peer(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    #[tokio::test(start_paused = true)]
    async fn the_silent_make_room_and_those_being_answered_do_not() {
        let guests = Guests::new(RESERVE + 8);
        let answering: Vec<Place> = (0..3).map(|_| guests.admit(peer(1)).unwrap()).collect();
        for place in &answering {
            place.activity.spoke.store(true, Ordering::Relaxed);
            place.activity.set_answering(true);
        }
        let silent: Vec<Place> = (0..9).map(|_| guests.admit(peer(1)).unwrap()).collect();
        // Four is the share of one peer: the newest silent one has the fourth place.
        assert_eq!(silent.iter().filter(|place| place.close.is_cancelled()).count(), 8);
        assert!(answering.iter().all(|place| !place.close.is_cancelled()));
        let others: Vec<Place> = (2..=9).map(|number| guests.admit(peer(number)).unwrap()).collect();
        assert!(silent[8].close.is_cancelled(), "the greediest peer pays first");
        assert!(answering.iter().all(|place| !place.close.is_cancelled()));
        drop(others);
        silent.into_iter().for_each(drop);
        assert_eq!(guests.book().entries.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn where_all_are_being_answered_nobody_is_let_in() {
        let guests = Guests::new(RESERVE + 2);
        let one = guests.admit(peer(1)).unwrap();
        one.activity.set_answering(true);
        assert!(guests.admit(peer(1)).is_none(), "its share");
        let two = guests.admit(peer(2)).unwrap();
        two.activity.set_answering(true);
        assert!(guests.admit(peer(3)).is_none(), "all");
        one.activity.spoke.store(true, Ordering::Relaxed);
        one.activity.set_answering(false);
        assert!(guests.admit(peer(3)).is_none(), "it was answered a moment ago");
        sleep(RECENT * 2).await;
        assert!(guests.admit(peer(3)).is_some());
        assert!(one.close.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_of_an_answer_is_let_go() {
        let (near, _far) = duplex(1024);
        let mut stream = Watched::new(near, Arc::new(Activity::new()));
        let error = stream.write_all(&[0; 4096]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
