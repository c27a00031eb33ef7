//! What processes of this host tell of guests, where libvirt does not.

use std::{fs, path::Path};

use ec_model::InstanceId;

/// The guest whose process has this disk open; none where no guest of this host has, or where nobody may look.
pub(crate) fn guest_with(disk: &Path) -> Option<InstanceId> {
    let disk = disk.canonicalize().ok()?;
    let entries = fs::read_dir("/proc").ok()?;
    let processes = entries.flatten().filter(|entry| {
        entry.file_name().to_str().is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
    });
    processes.filter(|process| has_open(&process.path(), &disk)).find_map(|process| {
        let command = fs::read(process.path().join("cmdline")).ok()?;
        let mut words = command.split(|byte| *byte == 0).filter_map(|word| std::str::from_utf8(word).ok());
        words.find(|word| *word == "-name")?;
        guest_of(words.next()?)
    })
}

fn has_open(process: &Path, file: &Path) -> bool {
    let entries = fs::read_dir(process.join("fd"));
    let mut open = entries.into_iter().flatten().flatten();
    open.any(|entry| fs::read_link(entry.path()).is_ok_and(|leads| leads == file))
}

/// As libvirt calls its guests' processes: `guest=NAME,debug-threads=on`.
fn guest_of(name: &str) -> Option<InstanceId> {
    name.split(',').find_map(|part| part.strip_prefix("guest="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_known_by_the_name_of_its_process() {
        let guest = "3f8f2e3c-5b1a-4c9e-9c51-1f2c3d4e5f60";
        assert_eq!(guest_of(&format!("guest={guest},debug-threads=on")), guest.parse().ok());
        assert_eq!(guest_of("guest=web,debug-threads=on"), None);
        assert_eq!(guest_with(Path::new("/nowhere")), None);
        let file = tempfile::NamedTempFile::new().unwrap();
        let own = Path::new("/proc/self");
        assert!(has_open(own, &file.path().canonicalize().unwrap()));
        assert_eq!(guest_with(file.path()), None, "this is no guest");
    }
}
