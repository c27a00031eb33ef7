//! Who is connected: so many at a time as there are files for, and nobody with more than a share of them.
//!
//! Where there is no place left, a connection on which nothing is being answered makes room for a new one, unless it came or was used a
//! moment ago: those that say nothing cannot keep out those that ask, and neither can those that never come to the end of a
//! question, nor a few that ask again and again, each within its share. For whom no place is made it waits, before those that wait and
//! say nothing ([`crate::queue`]).

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    hash::Hash,
    io::{self, IoSlice},
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
    sync::Notify,
    time::{Instant, Sleep, sleep},
};
use tokio_util::sync::CancellationToken;

/// A connection that was made, began to speak, was asked or was answered within this time is about to be used.
const RECENT: Duration = Duration::from_millis(500);

/// What a connection is doing. Every request carries its connection's among its extensions.
#[derive(Debug)]
pub struct Activity {
    answering: AtomicBool,
    /// Whether there is a request of which the head is whole and the answer is not there yet.
    asked: AtomicBool,
    /// Whether there is an answer of which not all is written yet.
    unsent: AtomicBool,
    /// Whether it ever sent anything.
    spoke: AtomicBool,
    born: Instant,
    /// Milliseconds from then to its first byte, or to the last of a body or an answer.
    last: AtomicU64,
}

impl Activity {
    fn new() -> Self {
        Self {
            answering: AtomicBool::new(false),
            asked: AtomicBool::new(false),
            unsent: AtomicBool::new(false),
            spoke: AtomicBool::new(false),
            born: Instant::now(),
            last: AtomicU64::new(0),
        }
    }

    /// From here on there is a request, whole up to its body, or it has its answer, which is written next.
    pub(crate) fn set_asked(&self, asked: bool) {
        self.asked.store(asked, Ordering::Relaxed);
        self.unsent.store(!asked, Ordering::Relaxed);
        self.set_answering(asked);
    }

    /// From here on a request is being answered, or not any more: one whose body is still awaited is not, so that
    /// it makes room for others.
    pub fn set_answering(&self, answering: bool) {
        self.answering.store(answering, Ordering::Relaxed);
        self.touch();
    }

    /// Whether anything was ever heard of it.
    pub(crate) fn has_spoken(&self) -> bool {
        self.spoke.load(Ordering::Relaxed)
    }

    fn touch(&self) {
        let millis = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(millis, Ordering::Relaxed);
    }

    /// Some of it was read. Its first byte counts, and what belongs to a request: a head that comes byte by byte would
    /// keep others out for as long as it likes.
    fn note_read(&self) {
        let is_first = !self.spoke.swap(true, Ordering::Relaxed);
        if is_first || self.is_asked() {
            self.touch();
        }
    }

    fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    fn is_answering(&self) -> bool {
        self.answering.load(Ordering::Relaxed)
    }

    /// Whether its peer takes an answer. One that takes nothing any more keeps nobody out.
    fn is_sending(&self) -> bool {
        self.unsent.load(Ordering::Relaxed) && self.is_recent()
    }

    fn is_recent(&self) -> bool {
        let last = self.born + Duration::from_millis(self.last.load(Ordering::Relaxed));
        last.elapsed() <= RECENT
    }

    fn may_go(&self) -> bool {
        !self.is_answering() && !self.is_recent()
    }
}

struct Entry<K> {
    share: K,
    activity: Arc<Activity>,
    close: CancellationToken,
}

struct Book<K> {
    next: u64,
    /// In the order in which they came.
    entries: BTreeMap<u64, Entry<K>>,
    shares: HashMap<K, usize>,
}

/// See the module. Clones are the same ones.
pub(crate) struct Guests<K: Eq + Hash> {
    book: Arc<Mutex<Book<K>>>,
    freed: Arc<Notify>,
    most: usize,
    share: usize,
}

impl<K: Eq + Hash> Clone for Guests<K> {
    fn clone(&self) -> Self {
        Self { book: Arc::clone(&self.book), freed: Arc::clone(&self.freed), ..*self }
    }
}

/// A place that was given to a connection; free again when this is dropped.
pub(crate) struct Place<K: Eq + Hash> {
    guests: Guests<K>,
    number: u64,
    /// What the connection is doing.
    pub(crate) activity: Arc<Activity>,
    /// Cancelled when another one needs the place more.
    pub(crate) close: CancellationToken,
}

impl<K: Eq + Hash + Clone> Guests<K> {
    /// So many at a time, and of one kind no more than a share of them.
    pub(crate) fn new(most: usize, share: usize) -> Self {
        let book = Book { next: 0, entries: BTreeMap::new(), shares: HashMap::new() };
        Self { book: Arc::new(Mutex::new(book)), freed: Arc::default(), most, share }
    }

    /// A place for a connection of this share; none where all are answering, or came or were used a moment ago.
    pub(crate) fn admit(&self, share: K) -> Option<Place<K>> {
        let mut book = self.book();
        let own = book.shares.get(&share).copied().unwrap_or(0);
        if own >= self.share {
            book.make_room(Some(&share))?;
        } else if book.entries.len() >= self.most {
            // Of whoever has the most.
            let greediest =
                book.shares.iter().max_by_key(|(_, count)| **count).map(|(share, _)| share.clone());
            book.make_room(greediest.as_ref())
                .or_else(|| book.make_room(None))
                .or_else(|| book.level(&share, self.most))?;
        }
        let (number, activity, close) = (book.next, Arc::new(Activity::new()), CancellationToken::new());
        book.next += 1;
        *book.shares.entry(share.clone()).or_default() += 1;
        book.entries.insert(number, Entry { share, activity: Arc::clone(&activity), close: close.clone() });
        drop(book);
        Some(Place { guests: self.clone(), number, activity, close })
    }

    /// Gives a file back, where the process has none left all the same.
    pub(crate) fn shed(&self) {
        self.book().make_room(None);
    }
}

impl<K: Eq + Hash> Guests<K> {
    /// How many have a place.
    pub(crate) fn count(&self) -> usize {
        self.book().entries.len()
    }

    /// How many places there are.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Waits until a connection has ended.
    pub(crate) async fn freed(&self) {
        self.freed.notified().await;
    }

    fn book(&self) -> MutexGuard<'_, Book<K>> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash> Book<K> {
    /// Ends the oldest connection that may go, of one share or of all; first those that never said anything.
    fn make_room(&mut self, share: Option<&K>) -> Option<()> {
        let number = [false, true].into_iter().find_map(|spoke| {
            let mut of_share =
                self.entries.iter().filter(|(_, entry)| share.is_none_or(|share| *share == entry.share));
            let found =
                of_share.find(|(_, entry)| entry.activity.has_spoken() == spoke && entry.activity.may_go());
            found.map(|(number, _)| *number)
        })?;
        self.remove(number)?.close.cancel();
        Some(())
    }

    /// For a share that has less than its part of all places, ends a connection of one that has more, however lately
    /// that was used: of whoever has the most the oldest, and none of which a question or an answer is under way while
    /// there are others.
    fn level(&mut self, share: &K, most: usize) -> Option<()> {
        let own = self.shares.get(share).copied().unwrap_or(0);
        let part = most / (self.shares.len() + usize::from(own == 0));
        if own >= part {
            return None;
        }
        let counted = self.entries.iter().map(|(number, entry)| (number, entry, self.shares[&entry.share]));
        let may_go = counted.filter(|(_, entry, count)| *count > part && !entry.activity.is_answering());
        let (number, ..) = may_go.min_by_key(|(number, entry, count)| {
            let activity = &entry.activity;
            (activity.is_sending(), activity.is_asked(), activity.has_spoken(), Reverse(*count), **number)
        })?;
        let number = *number;
        self.remove(number)?.close.cancel();
        Some(())
    }

    fn remove(&mut self, number: u64) -> Option<Entry<K>> {
        let entry = self.entries.remove(&number)?;
        if let Some(count) = self.shares.get_mut(&entry.share) {
            *count -= 1;
            if *count == 0 {
                self.shares.remove(&entry.share);
            }
        }
        Some(entry)
    }
}

impl<K: Eq + Hash> Drop for Place<K> {
    fn drop(&mut self) {
        self.guests.book().remove(self.number);
        self.guests.freed.notify_one();
    }
}

/// A stream that notes when it is used, and breaks where its peer takes nothing for too long.
pub(crate) struct Watched<S> {
    inner: S,
    /// So long its peer may take nothing.
    patience: Duration,
    activity: Arc<Activity>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Watched<S> {
    pub(crate) fn new(inner: S, activity: Arc<Activity>, patience: Duration) -> Self {
        Self { inner, patience, activity, stalled: None }
    }

    /// Something was written. A flush of nothing, which comes after each read, is no use.
    fn note_written(&self, outcome: &Poll<io::Result<usize>>) {
        if matches!(outcome, Poll::Ready(Ok(1..))) {
            self.activity.touch();
        }
    }

    /// What comes of an attempt to write.
    fn wrote<T>(&mut self, outcome: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stalled = None;
            return outcome;
        }
        let patience = self.patience;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(patience)));
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
            self.activity.note_read();
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
        self.note_written(&outcome);
        self.wrote(outcome, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.note_written(&outcome);
        self.wrote(outcome, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_flush(context);
        if outcome.is_ready() {
            // Whoever writes an answer flushes when all of it is written.
            self.activity.unsent.store(false, Ordering::Relaxed);
        }
        self.wrote(outcome, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_shutdown(context);
        self.wrote(outcome, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_silent_make_room_and_those_being_answered_do_not() {
        let guests = Guests::new(8, 4);
        let answering: Vec<Place<i32>> = (0..3).map(|_| guests.admit(1).unwrap()).collect();
        for place in &answering {
            place.activity.spoke.store(true, Ordering::Relaxed);
            place.activity.set_answering(true);
        }
        let mut silent: Vec<Place<i32>> = vec![guests.admit(1).unwrap()];
        for _ in 1..9 {
            assert!(guests.admit(1).is_none(), "who came a moment ago may be about to ask");
            sleep(RECENT * 2).await;
            silent.push(guests.admit(1).unwrap());
        }
        sleep(RECENT * 2).await;
        // Four is the share of one peer: the newest silent one has the fourth place.
        assert_eq!(silent.iter().filter(|place| place.close.is_cancelled()).count(), 8);
        assert!(answering.iter().all(|place| !place.close.is_cancelled()));
        let mut others: Vec<Place<i32>> = (2..=6).map(|number| guests.admit(number).unwrap()).collect();
        assert!(silent[8].close.is_cancelled(), "the greediest peer pays first");
        assert!(answering.iter().all(|place| !place.close.is_cancelled()));
        assert!(guests.admit(7).is_none(), "all others came a moment ago");
        sleep(RECENT * 2).await;
        others.extend((7..=9).map(|number| guests.admit(number).unwrap()));
        drop(others);
        silent.into_iter().for_each(drop);
        assert_eq!(guests.book().entries.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn where_all_are_being_answered_nobody_is_let_in() {
        let guests = Guests::new(2, 1);
        let one = guests.admit(1).unwrap();
        one.activity.set_answering(true);
        assert!(guests.admit(1).is_none(), "its share");
        let two = guests.admit(2).unwrap();
        two.activity.set_answering(true);
        assert!(guests.admit(3).is_none(), "all");
        one.activity.spoke.store(true, Ordering::Relaxed);
        one.activity.set_answering(false);
        assert!(guests.admit(3).is_none(), "it was answered a moment ago");
        sleep(RECENT * 2).await;
        assert!(guests.admit(3).is_some());
        assert!(one.close.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_again_and_again_keeps_nobody_out_that_has_less_than_its_part() {
        let guests = Guests::new(256, 8);
        let greedy: Vec<Place<i32>> = (0..256).map(|number| guests.admit(number % 32).unwrap()).collect();
        for (number, place) in greedy.iter().enumerate() {
            place.activity.note_read();
            place.activity.set_asked(number < 64);
        }
        let gone = || greedy.iter().filter(|place| place.close.is_cancelled()).count();
        assert!(guests.admit(0).is_none(), "its share");
        // A 33rd of the places is seven.
        let begin = |share| {
            let place = guests.admit(share).unwrap();
            place.activity.note_read();
            place
        };
        let _late: Vec<Place<i32>> = (0..7).map(|_| begin(32)).collect();
        assert!(guests.admit(32).is_none(), "it has its part");
        assert_eq!(gone(), 7);
        assert!(
            greedy[64..71].iter().all(|place| place.close.is_cancelled()),
            "the oldest that are not being answered"
        );
        assert!(guests.admit(0).is_none(), "who made room has its part, too");
        // One whose body is awaited is the last to go.
        greedy[71..].iter().for_each(|place| place.activity.asked.store(true, Ordering::Relaxed));
        greedy[200].activity.asked.store(false, Ordering::Relaxed);
        let _another = begin(33);
        assert!(greedy[200].close.is_cancelled() && gone() == 8);
        greedy.iter().for_each(|place| place.activity.set_answering(true));
        assert!(guests.admit(34).is_none(), "all that could go are being answered");
    }

    #[tokio::test(start_paused = true)]
    async fn who_sends_a_head_byte_by_byte_makes_room_and_who_sends_a_body_does_not() {
        let guests = Guests::new(1, 1);
        let (near, mut far) = duplex(64);
        let place = guests.admit(1).unwrap();
        let activity = Arc::clone(&place.activity);
        let mut stream = Watched::new(near, Arc::clone(&activity), Duration::from_secs(20));
        let mut trickle = async |bytes| {
            for _ in 0..bytes {
                sleep(RECENT / 2).await;
                far.write_all(b"G").await.unwrap();
                stream.read_exact(&mut [0]).await.unwrap();
                // As whoever serves it does after each read.
                stream.flush().await.unwrap();
            }
        };
        trickle(1).await;
        assert!(!activity.may_go(), "it has just begun to speak");
        trickle(5).await;
        assert!(activity.may_go(), "its first head");
        activity.set_asked(true);
        activity.set_answering(false);
        trickle(5).await;
        assert!(!activity.may_go(), "a body");
        activity.set_asked(false);
        assert!(!activity.may_go(), "it was answered a moment ago");
        trickle(5).await;
        assert!(activity.may_go(), "its next head");
        assert!(guests.admit(2).is_some());
        assert!(place.close.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_of_an_answer_is_let_go() {
        let (near, _far) = duplex(1024);
        let mut stream = Watched::new(near, Arc::new(Activity::new()), Duration::from_secs(20));
        let error = stream.write_all(&[0; 4096]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
