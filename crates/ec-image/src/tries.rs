//! How often what fails on the way is tried again: as long as the last progress is not too long ago.

use std::time::{Duration, Instant};

/// The first pause before another try, which doubles up to the longest.
const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_LONGEST: Duration = Duration::from_secs(4);

/// Who gets ahead by so much between two failures is not given up.
const PROGRESS: u64 = 64 << 10;

pub(crate) struct Tries {
    progressed: Instant,
    furthest: u64,
    pause: Duration,
}

impl Tries {
    pub(crate) fn new() -> Self {
        Self { progressed: Instant::now(), furthest: 0, pause: PAUSE_FIRST }
    }

    /// Time in which nothing could be tried does not count.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.progressed += time;
    }

    /// How long to wait for the next try after one that reached so many bytes; none where nothing has come for too long.
    ///
    /// How far it came counts over all tries: a server that always breaks off at one place gets nowhere.
    pub(crate) fn next(&mut self, reached: u64, patience: Duration) -> Option<Duration> {
        if reached >= self.furthest + PROGRESS {
            *self = Self { furthest: reached, ..Self::new() };
        }
        if self.progressed.elapsed() + self.pause >= patience {
            return None;
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(PAUSE_LONGEST);
        Some(pause)
    }
}
