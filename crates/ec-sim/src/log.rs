//! The log of a history, for people: simulated seconds, who, what. Instances are called by the order in which they
//! came up, so that a log reads the same whatever their uuids are.

use std::{
    collections::BTreeMap,
    io::{LineWriter, Stdout, Write},
    path::PathBuf,
    time::Duration,
};

use uuid::Uuid;

/// The canonical spelling of a uuid.
const UUID: usize = 36;

pub(crate) struct Log {
    names: BTreeMap<Uuid, String>,
    instances: usize,
    /// What is otherwise each time, or on each machine, and what stands for it.
    scrubbed: Vec<(String, &'static str)>,
    out: LineWriter<Stdout>,
}

impl Log {
    pub(crate) fn new(names: BTreeMap<Uuid, String>, directory: Option<PathBuf>) -> Self {
        let mut scrubbed = Vec::new();
        scrubbed.extend(directory.map(|directory| (directory.display().to_string(), "~")));
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        scrubbed.push((format!("on host {}", host.trim()), "on host H"));
        Self { names, instances: 0, scrubbed, out: LineWriter::new(std::io::stdout()) }
    }

    pub(crate) fn line(&mut self, at: Duration, who: &str, what: &str) {
        let named = self.named(what);
        let what = self.scrubbed.iter().fold(named, |what, (is, told)| what.replace(is, told));
        // Nobody reading is no reason to end a history.
        writeln!(self.out, "{:>9.3}  {who:<4} {what}", at.as_secs_f64()).ok();
    }

    /// The text with names in place of uuids.
    pub(crate) fn named(&mut self, text: &str) -> String {
        let mut named = String::with_capacity(text.len());
        let mut rest = text;
        while !rest.is_empty() {
            let uuid = rest.get(..UUID).filter(|part| part.as_bytes()[8] == b'-');
            if let Some(uuid) = uuid.and_then(|part| Uuid::try_parse(part).ok()) {
                let name = self.names.entry(uuid).or_insert_with(|| {
                    self.instances += 1;
                    format!("i{}", self.instances)
                });
                named.push_str(name);
                rest = &rest[UUID..];
            } else {
                let next = rest.chars().next().map_or(1, char::len_utf8);
                named.push_str(&rest[..next]);
                rest = &rest[next..];
            }
        }
        named
    }
}
