//! Files with and without secrets, written whole or not at all.

use std::{
    ffi::OsString,
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use nix::unistd::{Gid, Group};

use crate::held::{create_held, directory, rename_new, sweep};

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Its owner only.
    Secret,
    /// Its owner, and the members of the group with this id.
    Group(u32),
    /// Everybody.
    Public,
}

/// Writes a file, in place of one that is there; of a secret that a group may read, that goes on. Whoever reads it, and whenever this breaks off, finds the old or the new one.
///
/// # Errors
/// Why it cannot be written.
pub fn write(path: &Path, content: impl AsRef<[u8]>, access: Access) -> io::Result<()> {
    let mut half = Half::put_down(path, content.as_ref(), access)?;
    half.place()?;
    File::open(directory(path))?.sync_all()
}

/// Makes the directory of such files, and those above it, where they are not there. Everybody may look into them, whatever the umask of
/// who says it is: services read what is theirs as users of their own, and secrets are kept by the modes of their files.
///
/// # Errors
/// Why it cannot be made.
pub fn make_directory(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    make_directory(directory(path))?;
    match fs::create_dir(path) {
        // Another made it meanwhile.
        Err(_) if path.is_dir() => Ok(()),
        made => made.and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o755))),
    }
}

/// The same of a key and its certificate, which are of use together only: what breaks off before both are written whole leaves those
/// that were there.
///
/// # Errors
/// Why they cannot be written, and which.
pub fn write_pair(pair: [(&Path, &str, Access); 2]) -> Result<(), (PathBuf, io::Error)> {
    let of = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    let mut halves = Vec::new();
    for (path, content, access) in pair {
        halves.push(Half::put_down(path, content.as_bytes(), access).map_err(of(path))?);
    }
    for half in &mut halves {
        half.place().map_err(of(half.path))?;
    }
    for (path, ..) in pair {
        File::open(directory(path)).and_then(|directory| directory.sync_all()).map_err(of(path))?;
    }
    Ok(())
}

/// Writes a file that must not be there, as [`write`] does.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] where it is; why it cannot be written.
pub fn write_new(path: &Path, content: impl AsRef<[u8]>, access: Access) -> io::Result<()> {
    let mut half = Half::put_down(path, content.as_ref(), access)?;
    half.place_new()?;
    File::open(directory(path))?.sync_all()
}

/// What the name of a file ends with until it is whole.
const HALF: &str = ".new";

/// A file beside the one that it is to be, under a name that nobody else gives: others may write the same one.
struct Half<'a> {
    path: &'a Path,
    own: PathBuf,
    /// Open, since it is held by that.
    file: File,
    is_placed: bool,
}

impl<'a> Half<'a> {
    /// Begins one, and removes what was left of others to the same file: it may be as secret.
    fn begin(path: &'a Path) -> io::Result<Self> {
        let Some(name) = path.file_name() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it has no file's name"));
        };
        if let Some(name) = name.to_str() {
            sweep(directory(path), |found| is_half(found, name));
        }
        let (own, file) = create_held(|| {
            let mut half = OsString::from(".");
            half.push(name);
            half.push(format!(".{:016x}{HALF}", rand::random::<u64>()));
            path.with_file_name(half)
        })?;
        Ok(Self { path, own, file, is_placed: false })
    }

    /// All of it, as it is to be.
    fn put_down(path: &'a Path, content: &[u8], access: Access) -> io::Result<Self> {
        let mut half = Self::begin(path)?;
        put_down(&mut half.file, path, content, access)?;
        Ok(half)
    }

    /// Gives it its name, in place of what has that.
    fn place(&mut self) -> io::Result<()> {
        fs::rename(&self.own, self.path)?;
        self.is_placed = true;
        Ok(())
    }

    /// Gives it its name, which nothing else may have.
    fn place_new(&mut self) -> io::Result<()> {
        rename_new(&self.own, self.path)?;
        self.is_placed = true;
        Ok(())
    }
}

impl Drop for Half<'_> {
    fn drop(&mut self) {
        if !self.is_placed {
            fs::remove_file(&self.own).ok();
        }
    }
}

/// Whether a name is of one that was to be the file of that name.
fn is_half(found: &str, name: &str) -> bool {
    let middle = found
        .strip_prefix('.')
        .and_then(|rest| rest.strip_prefix(name)?.strip_prefix('.')?.strip_suffix(HALF));
    middle.is_some_and(|id| id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn put_down(file: &mut File, path: &Path, content: &[u8], access: Access) -> io::Result<()> {
    let mode = match access {
        Access::Secret => 0o600,
        Access::Group(_) => 0o640,
        Access::Public => 0o644,
    };
    // Whom an operator let read a secret reads the next one too, unless that was everybody.
    let before = fs::metadata(path).ok().filter(|before| {
        let mode = before.permissions().mode();
        access != Access::Public && mode & 0o070 != 0 && mode & 0o007 == 0
    });
    // A group that there is no more read it before its host, or the package, was installed anew.
    let is_there = |group: u32| Group::from_gid(Gid::from_raw(group)).is_ok_and(|found| found.is_some());
    let (group, mut mode) = match (before, access) {
        (Some(before), Access::Group(group)) if !is_there(before.gid()) => (Some(group), mode),
        (Some(before), _) => (Some(before.gid()), before.permissions().mode() & 0o777),
        (None, Access::Group(group)) => (Some(group), mode),
        (None, _) => (None, mode),
    };
    if let Some(group) = group {
        match fchown(&*file, None, Some(group)) {
            // Only root can give it to a group that is not its own.
            Err(error) if access == Access::Secret && error.kind() == io::ErrorKind::PermissionDenied => {
                mode = 0o600;
            }
            given => given?,
        }
    }
    // Whatever the umask is.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(content)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_its_owners_also_where_something_else_was_there() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        fs::write(&path, "open to all").unwrap();
        write(&path, "secret", Access::Secret).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "secret");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        let group = fs::metadata(&path).unwrap().gid();
        write(&path, "shared", Access::Group(group)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        // Somebody let its group read it, and then everybody.
        for (mode, kept) in [(0o440, 0o440), (0o644, 0o600)] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            write(&path, "secret", Access::Secret).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, kept);
        }
    }

    /// Run once more as a program of its own, whose umask is another.
    #[test]
    fn directories_that_are_made_are_for_everybody_to_look_into_and_others_stay() {
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let name = "files::tests::directories_that_are_made_are_for_everybody_to_look_into_and_others_stay";
        const IS_CHILD: &str = "EC_TEST_HAS_UMASK";
        if std::env::var_os(IS_CHILD).is_none() {
            let mut child = std::process::Command::new("sh");
            child.args(["-c", "umask 077 && exec \"$0\" --exact \"$1\""]).env(IS_CHILD, "");
            let output = child.arg(std::env::current_exe().unwrap()).arg(name).output().unwrap();
            let told = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && told.contains("1 passed"), "{told}");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let [there, above, made] =
            ["there", "there/above", "there/above/made"].map(|name| place.path().join(name));
        fs::create_dir(&there).unwrap();
        for _ in 0..2 {
            make_directory(&made).unwrap();
            assert_eq!([&there, &above, &made].map(|path| mode(path)), [0o700, 0o755, 0o755]);
        }
        let file = made.join("file");
        fs::write(&file, "").unwrap();
        make_directory(&file).unwrap_err();
    }

    #[test]
    fn of_a_pair_both_are_written_or_none() {
        let directory = tempfile::tempdir().unwrap();
        let [key, certificate] = ["a.key", "a.pem"].map(|name| directory.path().join(name));
        let put = |text: &str, certificate: &Path| {
            write_pair([(&key, text, Access::Secret), (certificate, text, Access::Public)])
        };
        put("old", &certificate).unwrap();
        let (missing, _) = put("new", &directory.path().join("missing/a.pem")).unwrap_err();
        assert!(missing.ends_with("missing/a.pem"), "{missing:?}");
        assert_eq!(fs::read_to_string(&key).unwrap(), "old");
        put("new", &certificate).unwrap();
        for (file, mode) in [(&key, 0o600), (&certificate, 0o644)] {
            assert_eq!(fs::read_to_string(file).unwrap(), "new");
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, mode);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_killed_ones_left_goes_and_nothing_that_is_somebodys() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let path = at("placement.json");
        let theirs = [
            "placement.json.new",
            ".placement.json.new",
            ".placement.json.0123456789abcde.new",
            ".ca.pem.0123456789abcdef.new",
        ];
        let left = at(".placement.json.0123456789abcdef.new");
        for file in theirs.map(at).iter().chain([&left]) {
            fs::write(file, "theirs").unwrap();
        }
        let under_way = Half::begin(&path).unwrap();
        assert!(!left.exists());
        write(&path, "ours", Access::Public).unwrap();
        assert!(under_way.own.exists());
        drop(under_way);
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours");
        assert!(theirs.iter().all(|name| fs::read_to_string(at(name)).unwrap() == "theirs"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1 + theirs.len());
    }

    #[test]
    fn of_two_that_write_the_same_file_each_writes_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("placement.json");
        let put = |text: &[u8]| Half::put_down(&path, text, Access::Public).unwrap();
        let (mut first, mut second) = (put(b"first"), put(b"second"));
        let place = |half: &mut Half<'_>| {
            half.place().unwrap();
            fs::read_to_string(&path).unwrap()
        };
        assert_eq!((place(&mut first), place(&mut second)), ("first".to_owned(), "second".to_owned()));
        // What is there stays when who wrote it is done.
        drop((first, second));
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(
            write_new(&path, "third", Access::Public).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
