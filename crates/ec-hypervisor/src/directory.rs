//! The directory that guests' disks lie in, of which nothing is known while another lies in its place.

use std::{io, os::unix::fs::MetadataExt, path::Path, sync::OnceLock};

/// Which directory lay at a path at first, by its inode: what lies in its place while its file system is not mounted has another.
/// The root of a second file system may have the same; but the device's number does not outlive that the first is mounted again.
#[derive(Debug, Default)]
pub struct FirstDirectory(OnceLock<u64>);

impl FirstDirectory {
    /// Whether it was [remembered](Self::remember).
    pub fn is_known(&self) -> bool {
        self.0.get().is_some()
    }

    /// Remembers the one that is there, the first time.
    ///
    /// # Errors
    /// As of the kernel's where it cannot be looked at.
    pub fn remember(&self, path: &Path) -> io::Result<()> {
        let inode = std::fs::metadata(path)?.ino();
        self.0.get_or_init(|| inode);
        Ok(())
    }

    /// That another is there now, as a sentence; nothing before one was remembered.
    ///
    /// # Errors
    /// As of the kernel's where it cannot be looked at.
    pub fn another(&self, path: &Path) -> io::Result<Option<String>> {
        let inode = std::fs::metadata(path)?.ino();
        let is_another = self.0.get().is_some_and(|first| *first != inode);
        Ok(is_another.then(|| {
            format!(
                "{} is another directory than the one that this agent began with: mount again what was there, or start ecompute anew",
                path.display()
            )
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_directory_in_the_place_of_the_first_is_told_whatever_lies_in_it() {
        let place = tempfile::tempdir().expect("a directory");
        let (disks, aside) = (place.path().join("disks"), place.path().join("aside"));
        let first = FirstDirectory::default();
        let another = || first.another(&disks).expect("it is there");
        first.remember(&disks).expect_err("it is not there yet");
        assert!(!first.is_known());
        std::fs::create_dir(&disks).expect("make it");
        assert_eq!(another(), None, "none was remembered");
        for _ in 0..2 {
            first.remember(&disks).expect("it is there");
            assert_eq!(another(), None);
        }
        std::fs::rename(&disks, &aside).expect("take it away");
        first.another(&disks).expect_err("it is not there");
        std::fs::create_dir(&disks).expect("make another");
        first.remember(&disks).expect("only the first is remembered");
        let told = another().expect("it is another");
        assert!(told.contains("another directory") && told.contains("mount again"), "{told}");
        std::fs::remove_dir(&disks).expect("take it away");
        std::fs::rename(&aside, &disks).expect("put the first back");
        assert_eq!(another(), None);
    }
}
