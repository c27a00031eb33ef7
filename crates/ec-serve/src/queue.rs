//! Who waits for a place: whoever asks many things at once is answered one after another, and none of it is cut.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::Hash,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    io::ReadBuf,
    net::TcpStream,
    time::{Instant, sleep},
};

use crate::guests::{Guests, Place};

/// So long a connection waits: places come free as soon as what is asked is answered, and those who ask have patience for that.
const PATIENCE: Duration = Duration::from_secs(5);
/// So many of one share wait.
const MOST: usize = 64;
/// So often it is looked whether somebody may go by now who could not before: that nobody tells.
const LOOK: Duration = Duration::from_millis(50);

/// What waits for a place.
pub(crate) trait Waits {
    /// Whether anything has come of it so far.
    fn has_spoken(&self) -> bool;
}

impl<C> Waits for (TcpStream, C) {
    fn has_spoken(&self) -> bool {
        // It stays there for whoever reads it. Nobody is to be woken: it is looked often enough.
        let (mut byte, mut context) = ([0], Context::from_waker(Waker::noop()));
        matches!(self.0.poll_peek(&mut context, &mut ReadBuf::new(&mut byte)), Poll::Ready(Ok(1..)))
    }
}

struct Waiter<K, C> {
    share: K,
    since: Instant,
    has_spoken: bool,
    what: C,
}

/// Those that have asked something before those that say nothing, who would keep them out; else in the order in which they came.
pub(crate) struct Queue<K, C>(VecDeque<Waiter<K, C>>);

impl<K: Eq + Hash + Clone, C: Waits> Queue<K, C> {
    pub(crate) fn new() -> Self {
        Self(VecDeque::new())
    }

    /// Lets one wait, behind those of its share. Where too many of them wait, one is refused.
    pub(crate) fn join(&mut self, share: K, what: C) {
        let is_one_too_many = self.0.iter().filter(|waiter| waiter.share == share).count() >= MOST;
        self.0.push_back(Waiter { share: share.clone(), since: Instant::now(), has_spoken: false, what });
        if is_one_too_many {
            self.listen();
            self.refuse(&share);
        }
    }

    /// Those for which there is a place now. Who waits is no one's loss: together with who has a place they are no more than there are
    /// places, or one of whoever has the most of them waiting goes.
    pub(crate) fn admitted(&mut self, guests: &Guests<K>) -> Vec<(Place<K>, C)> {
        self.listen();
        let (mut admitted, mut full) = (Vec::new(), HashSet::new());
        for waiter in std::mem::take(&mut self.0) {
            if full.contains(&waiter.share) {
                self.0.push_back(waiter);
            } else if let Some(place) = guests.admit(waiter.share.clone()) {
                admitted.push((place, waiter.what));
            } else {
                full.insert(waiter.share.clone());
                self.0.push_back(waiter);
            }
        }
        self.0.retain(|waiter| waiter.since.elapsed() < PATIENCE);
        while !self.0.is_empty() && guests.count() + self.0.len() > guests.most() {
            self.shed();
        }
        admitted
    }

    /// Refuses one.
    pub(crate) fn shed(&mut self) {
        let mut counts = HashMap::<&K, usize>::new();
        self.0.iter().for_each(|waiter| *counts.entry(&waiter.share).or_default() += 1);
        let Some(greediest) = counts.into_iter().max_by_key(|(_, count)| *count) else { return };
        let greediest = greediest.0.clone();
        self.refuse(&greediest);
    }

    /// Refuses one of this share: whoever has said nothing for the longest time, since who has just come is about to. Where all have
    /// asked something, the last.
    fn refuse(&mut self, share: &K) {
        let silent = self.0.iter().position(|waiter| waiter.share == *share && !waiter.has_spoken);
        let last = || self.0.iter().rposition(|waiter| waiter.share == *share);
        if let Some(refused) = silent.or_else(last) {
            self.0.remove(refused);
            tracing::debug!("no place for one more connection");
        }
    }

    /// Finds out who has begun to speak.
    fn listen(&mut self) {
        for waiter in &mut self.0 {
            waiter.has_spoken = waiter.has_spoken || waiter.what.has_spoken();
        }
        self.0.make_contiguous().sort_by_key(|waiter| !waiter.has_spoken);
    }

    /// Waits until it is worth a look whether there is a place for who waits.
    pub(crate) async fn turn(&self, guests: &Guests<K>) {
        if self.0.is_empty() {
            return std::future::pending().await;
        }
        tokio::select! {
            () = guests.freed() => {}
            () = sleep(LOOK) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of these numbers on something was said.
    const SPOKEN: u32 = 1000;

    impl Waits for u32 {
        fn has_spoken(&self) -> bool {
            *self >= SPOKEN
        }
    }

    fn admitted(queue: &mut Queue<u8, u32>, guests: &Guests<u8>) -> Vec<(Place<u8>, u32)> {
        queue.admitted(guests)
    }

    fn which(admitted: &[(Place<u8>, u32)]) -> Vec<u32> {
        admitted.iter().map(|(_, number)| *number).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_many_things_at_once_is_let_in_one_after_another_and_nobody_is_ended_for_it() {
        let (guests, mut queue) = (Guests::new(16, 4), Queue::new());
        (0..12).for_each(|number| queue.join(1, number));
        queue.join(2, 100);
        let mut first = admitted(&mut queue, &guests);
        assert_eq!(which(&first), [0, 1, 2, 3, 100], "its share, and another's");
        assert!(admitted(&mut queue, &guests).is_empty(), "they came a moment ago");
        assert!(first.iter().all(|(place, _)| !place.close.is_cancelled()));
        // One is answered and goes, which is told.
        first.remove(1);
        queue.turn(&guests).await;
        queue.join(1, 12);
        assert_eq!(which(&admitted(&mut queue, &guests)), [4], "in the order in which they came");
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_comes_in_where_those_with_a_place_say_nothing_and_not_for_ever() {
        let (guests, mut queue) = (Guests::new(16, 4), Queue::new());
        (0..6).for_each(|number| queue.join(1, number));
        let silent = admitted(&mut queue, &guests);
        let begun = Instant::now();
        let late = loop {
            queue.turn(&guests).await;
            let admitted = admitted(&mut queue, &guests);
            if !admitted.is_empty() {
                break admitted;
            }
        };
        assert_eq!((which(&late), begun.elapsed() < Duration::from_secs(1)), (vec![4, 5], true));
        assert_eq!(silent.iter().filter(|(place, _)| place.close.is_cancelled()).count(), 2);
        for (place, _) in silent.iter().chain(&late) {
            place.activity.set_answering(true);
        }
        queue.join(1, 6);
        for _ in 0..200 {
            assert!(admitted(&mut queue, &guests).is_empty());
            sleep(LOOK).await;
        }
        drop(late);
        assert!(admitted(&mut queue, &guests).is_empty(), "nobody waits for so long");
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_wait_are_bounded_and_the_greediest_of_them_go_for_others() {
        let (guests, mut queue) = (Guests::new(16, 4), Queue::new());
        (0..200).for_each(|number| queue.join(1, number));
        assert_eq!(queue.0.len(), MOST);
        let mut all = admitted(&mut queue, &guests);
        assert_eq!((all.len(), queue.0.len()), (4, 12), "no more than there are places");
        (2..6).for_each(|share| queue.join(share, 200));
        all.extend(admitted(&mut queue, &guests));
        assert_eq!((all.len(), queue.0.len()), (8, 8));
        let first = queue.0[0].what;
        queue.shed();
        assert_eq!((queue.0[0].what, queue.0.len()), (first + 1, 7), "the first of those that say nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_asked_something_comes_before_those_that_say_nothing_and_stays_in_their_stead() {
        let (guests, mut queue) = (Guests::new(16, 4), Queue::new());
        (0..8).for_each(|number| queue.join(1, number));
        let silent = admitted(&mut queue, &guests);
        queue.join(1, SPOKEN);
        (8..200).for_each(|number| queue.join(1, number));
        queue.join(1, SPOKEN + 1);
        assert!(admitted(&mut queue, &guests).is_empty(), "they came a moment ago");
        let waiting: Vec<u32> = queue.0.iter().map(|waiter| waiter.what).collect();
        assert_eq!((waiting.len(), &waiting[..3]), (12, [SPOKEN, SPOKEN + 1, 190].as_slice()));
        assert!(silent.iter().all(|(place, _)| !place.close.is_cancelled()));
        sleep(Duration::from_secs(1)).await;
        assert_eq!(which(&admitted(&mut queue, &guests))[..2], [SPOKEN, SPOKEN + 1]);
        // Where all have asked something, the last goes.
        let mut queue = Queue::new();
        (0..3).for_each(|number| queue.join(1, SPOKEN + number));
        queue.listen();
        queue.shed();
        assert_eq!(queue.0.iter().map(|waiter| waiter.what).collect::<Vec<_>>(), [SPOKEN, SPOKEN + 1]);
    }
}
