//! Tickets: each lets whoever has it in once, for one thing, and soon or not at all.
//!
//! Pure: time and the tickets' words come from outside. A word must be one that nobody can guess.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

/// A ticket is good for so long. Whoever asked for it has it within a second, and uses it at once.
pub const LIFE: Duration = Duration::from_secs(30);
/// Tickets that are good at a time.
const MOST: usize = 64;

/// As many tickets are out as may be: later there are fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooMany;

impl std::fmt::Display for TooMany {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{MOST} tickets are out and not used; each is good for {} s", LIFE.as_secs())
    }
}

impl std::error::Error for TooMany {}

/// The tickets that are out, and what each is for. Not to be printed: they are secrets.
pub struct Tickets<T> {
    /// In an order: a map by hashes would take chance from the machine, which is to come from outside.
    out: BTreeMap<String, (T, Instant)>,
}

impl<T> Default for Tickets<T> {
    fn default() -> Self {
        Self { out: BTreeMap::new() }
    }
}

impl<T> Tickets<T> {
    /// Gives a ticket out. One of the same word is replaced.
    ///
    /// # Errors
    /// As many as may be are out.
    pub fn issue(&mut self, word: String, what: T, now: Instant) -> Result<(), TooMany> {
        self.out.retain(|_, (_, issued)| now.saturating_duration_since(*issued) < LIFE);
        if self.out.len() >= MOST && !self.out.contains_key(&word) {
            return Err(TooMany);
        }
        self.out.insert(word, (what, now));
        Ok(())
    }

    /// Takes a ticket back: what it was for, where it is good.
    pub fn take(&mut self, word: &str, now: Instant) -> Option<T> {
        let (what, issued) = self.out.remove(word)?;
        (now.saturating_duration_since(issued) < LIFE).then_some(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_good_once_and_for_its_time_and_no_other_word_is() {
        let (mut tickets, now) = (Tickets::default(), Instant::now());
        tickets.issue("a".to_owned(), 1, now).unwrap();
        tickets.issue("b".to_owned(), 2, now).unwrap();
        assert_eq!(tickets.take("", now), None);
        assert_eq!(tickets.take("a", now + LIFE - Duration::from_millis(1)), Some(1));
        assert_eq!(tickets.take("a", now), None, "once");
        assert_eq!(tickets.take("b", now + LIFE), None, "too late");
        assert_eq!(tickets.take("b", now), None, "nor ever after");
    }

    #[test]
    fn no_more_are_out_than_may_be_and_old_ones_make_room() {
        let (mut tickets, now) = (Tickets::default(), Instant::now());
        for number in 0..MOST {
            tickets.issue(number.to_string(), number, now).unwrap();
        }
        assert_eq!(tickets.issue("more".to_owned(), 0, now), Err(TooMany));
        tickets.issue("0".to_owned(), 7, now).unwrap();
        assert_eq!(tickets.take("0", now), Some(7), "the same again is none more");
        tickets.issue("more".to_owned(), 0, now).unwrap();
        assert_eq!(tickets.issue("late".to_owned(), 0, now), Err(TooMany));
        tickets.issue("late".to_owned(), 0, now + LIFE).unwrap();
        assert_eq!(tickets.out.len(), 1, "what is good no more is kept no more");
    }
}
