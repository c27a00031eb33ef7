//! What is made of files that somebody may write anew, and made anew then: certificates and their keys, and those of user-data.

use std::{
    error::Error,
    fs,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::exit::chain;

/// So often files are looked at where what is made of them is asked for.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// By what files are known to be the same: each one's inode, length, and when it was written, in nanoseconds.
#[derive(Debug, PartialEq, Eq)]
pub struct Look(Vec<Option<(u64, u64, i64, i64)>>);

/// Files, and whether they were written anew.
#[derive(Debug)]
pub struct Files {
    paths: Vec<PathBuf>,
    used: Look,
    looked: Instant,
}

impl Files {
    /// To be called before they are read, so that what is written meanwhile is seen later.
    pub fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let paths: Vec<_> = paths.into_iter().collect();
        Self { used: look(&paths), paths, looked: Instant::now() }
    }

    /// How they look, where that is otherwise than when they were last used. Answers nothing between two looks.
    pub fn changed(&mut self) -> Option<Look> {
        if self.paths.is_empty() || self.looked.elapsed() < LOOK_EVERY {
            return None;
        }
        self.looked = Instant::now();
        Some(look(&self.paths)).filter(|look| *look != self.used)
    }

    /// They are used as they were read after that look. (Where they could not be, they are as new as before: a key and its
    /// certificate are two files, and are written one after the other.)
    pub fn use_as(&mut self, look: Look) {
        tracing::info!(files = ?self.paths, "files were written anew, and are used from now on");
        self.used = look;
    }
}

fn look(paths: &[PathBuf]) -> Look {
    let one = |path: &PathBuf| {
        let found = fs::metadata(path).ok()?;
        Some((found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
    };
    Look(paths.iter().map(one).collect())
}

/// A value that is made of files, as they are now.
pub struct Renewed<T, E> {
    make: Box<dyn Fn() -> Result<T, E> + Send + Sync>,
    state: Mutex<(Files, T)>,
}

impl<T: Clone, E: Error> Renewed<T, E> {
    /// Makes it for the first time.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(
        paths: impl IntoIterator<Item = PathBuf>,
        make: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        let files = Files::new(paths);
        let state = Mutex::new((files, make()?));
        Ok(Self { make: Box::new(make), state })
    }

    /// It, made of the files as they are, or were some seconds ago. Of files that cannot be used nothing is made: it stays as it was,
    /// and a warning tells why.
    pub fn now(&self) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (files, value) = &mut *state;
        if let Some(look) = files.changed() {
            match (self.make)() {
                Ok(made) => {
                    *value = made;
                    files.use_as(look);
                }
                Err(error) => tracing::warn!(
                    error = chain(&error),
                    "files were written anew, and cannot be used: what was read before is used on"
                ),
            }
        }
        value.clone()
    }
}

impl<T: std::fmt::Debug, E> std::fmt::Debug for Renewed<T, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Renewed").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers as if the last look had been long ago.
    fn later<T: Clone, E: Error>(renewed: &Renewed<T, E>) -> T {
        renewed.state.lock().unwrap().0.looked -= LOOK_EVERY;
        renewed.now()
    }

    #[test]
    fn what_is_made_of_files_follows_them_and_stays_where_they_are_of_no_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        fs::write(&path, "1").unwrap();
        let of = path.clone();
        let read = move || fs::read_to_string(&of).unwrap_or_default().parse::<u32>();
        let renewed = Renewed::new([path.clone()], read).unwrap();
        assert_eq!(renewed.now(), 1);
        fs::write(&path, "22").unwrap();
        assert_eq!(renewed.now(), 1, "not looked at yet");
        assert_eq!(later(&renewed), 22);
        fs::write(&path, "no number").unwrap();
        assert_eq!(later(&renewed), 22);
        fs::remove_file(&path).unwrap();
        assert_eq!(later(&renewed), 22);
        fs::write(&path, "333").unwrap();
        assert_eq!(later(&renewed), 333);
        // The same length, renamed into its place.
        let other = directory.path().join("other");
        fs::write(&other, "444").unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(later(&renewed), 444);
    }
}
