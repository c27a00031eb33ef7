//! A small model: projects with a limit, and who takes how much of it.
//!
//! ```text
//!   <prefix>/limits/<project>            the limit, a bare number: rewritten with every change of what is taken
//!   <prefix>/takes/<project>/<taker>     how much, a bare number
//! ```

use std::{collections::BTreeMap, sync::Arc};

use ec_replica::{Commands, Model, Prefix, Reading};
use ec_store::{KeyValue, Op, Revision};
use jiff::Timestamp;

/// What a record is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Key {
    /// The limit of a project.
    Limit(Arc<str>),
    /// What somebody takes of it.
    Take(Arc<str>, Arc<str>),
}

/// A record as it is from now on, and when it was written; none: it is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) key: Key,
    pub(crate) stored: Option<(i64, Revision)>,
}

/// All records, and what of each project is taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    records: BTreeMap<Key, (i64, Revision)>,
    taken: BTreeMap<Arc<str>, i64>,
}

impl State {
    pub(crate) fn get(&self, key: &Key) -> Option<i64> {
        self.records.get(key).map(|(number, _)| *number)
    }

    pub(crate) fn taken(&self, project: &str) -> i64 {
        self.taken.get(project).copied().unwrap_or(0)
    }

    fn count(&mut self, key: &Key, more: i64) {
        if let Key::Take(project, _) = key {
            *self.taken.entry(Arc::clone(project)).or_default() += more;
            self.taken.retain(|_, taken| *taken != 0);
        }
    }
}

/// A record that says this is there, and the state knows nothing of it: not even its revision.
pub(crate) const HIDDEN: &str = "hidden";

/// Where it lies.
#[derive(Debug, Clone)]
pub(crate) struct Quota(pub(crate) Prefix);

impl Quota {
    pub(crate) fn new() -> Self {
        Self(Prefix::new("/q"))
    }

    fn key_of(&self, key: &str) -> Option<Key> {
        let (kind, id) = self.0.strip(key)?.split_once('/')?;
        match kind {
            "limits" => Some(Key::Limit(id.into())),
            "takes" => id.split_once('/').map(|(project, taker)| Key::Take(project.into(), taker.into())),
            _ => None,
        }
    }
}

impl Model for Quota {
    type State = State;
    type Key = Key;
    type Change = Change;

    const IMPORTING: &'static str = "an import is under way";

    fn prefix(&self) -> &Prefix {
        &self.0
    }

    fn read(&self, pair: &KeyValue) -> Reading<Change> {
        let Some(key) = self.key_of(&pair.key) else { return Reading::Foreign };
        let text = String::from_utf8_lossy(&pair.value);
        if text == HIDDEN {
            return Reading::Sound(Vec::new());
        }
        match text.parse() {
            Ok(number) => Reading::Sound(vec![Change { key, stored: Some((number, pair.mod_revision)) }]),
            // Nobody may take what cannot be read: such a limit is none, and such a take everything.
            Err(why) => {
                let number = if matches!(key, Key::Limit(_)) { 0 } else { i64::from(u32::MAX) };
                let change = Change { key, stored: Some((number, pair.mod_revision)) };
                Reading::Unreadable { why: format!("{}: {why}", pair.key), known: None, change }
            }
        }
    }

    fn deleted(&self, key: &str) -> Option<Change> {
        Some(Change { key: self.key_of(key)?, stored: None })
    }

    fn key(change: &Change) -> Key {
        change.key.clone()
    }

    fn written_at(change: Change, revision: Revision) -> Change {
        Change { stored: change.stored.map(|(number, _)| (number, revision)), ..change }
    }

    fn apply(state: &mut State, changes: impl IntoIterator<Item = Change>) {
        for Change { key, stored } in changes {
            let before = state.get(&key).unwrap_or(0);
            state.count(&key, stored.map_or(0, |(number, _)| number) - before);
            match stored {
                Some(stored) => drop(state.records.insert(key, stored)),
                None => drop(state.records.remove(&key)),
            }
        }
    }
}

/// What may be asked.
#[derive(Debug, Clone)]
pub(crate) enum Command {
    /// So much may be taken of a project.
    Limit(Arc<str>, i64),
    /// Somebody takes so much of a project, in place of what they took until now.
    Take(Arc<str>, Arc<str>, i64),
    /// Somebody gives back what they took.
    Give(Arc<str>, Arc<str>),
}

/// How much of the project is taken from now on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Taken(pub(crate) i64);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("there is no such project")]
    NoProject,
    #[error("{0} would be taken of {1}")]
    Over(i64, i64),
    #[error("nothing was taken")]
    NothingTaken,
}

/// A state with changes that are not written yet.
pub(crate) struct Draft<'s> {
    base: &'s State,
    /// The changes so far, and what each replaced.
    written: BTreeMap<Key, Option<i64>>,
    undo: Vec<(Key, Option<Option<i64>>)>,
    seen: BTreeMap<Key, Revision>,
    looks: Vec<Key>,
}

impl Draft<'_> {
    fn get(&mut self, key: &Key) -> Option<i64> {
        if !self.seen.contains_key(key) {
            let revision = self.base.records.get(key).map_or(0, |(_, revision)| *revision);
            self.seen.insert(key.clone(), revision);
            self.looks.push(key.clone());
        }
        match self.written.get(key) {
            Some(written) => *written,
            None => self.base.get(key),
        }
    }

    fn put(&mut self, key: &Key, number: Option<i64>) {
        self.get(key);
        let replaced = self.written.insert(key.clone(), number);
        self.undo.push((key.clone(), replaced));
    }

    /// What is taken of a project. It stands on the limit, which every change of it rewrites.
    fn taken(&self, project: &Arc<str>) -> i64 {
        let more = self.written.iter().filter(|(key, _)| matches!(key, Key::Take(own, _) if own == project));
        let more: i64 = more.map(|(key, now)| now.unwrap_or(0) - self.base.get(key).unwrap_or(0)).sum();
        self.base.taken(project) + more
    }
}

impl Commands for Quota {
    type Command = Command;
    type Outcome = Taken;
    type Refusal = Refusal;
    type Draft<'s> = Draft<'s>;
    type Savepoint = (usize, usize);

    fn draft(base: &State) -> Draft<'_> {
        Draft { base, written: BTreeMap::new(), undo: Vec::new(), seen: BTreeMap::new(), looks: Vec::new() }
    }

    fn decide(draft: &mut Draft<'_>, command: &Command, _: Timestamp) -> Result<Taken, Refusal> {
        let (Command::Limit(project, _) | Command::Take(project, ..) | Command::Give(project, _)) = command;
        let of_project = Key::Limit(Arc::clone(project));
        let (known, taken) = (draft.get(&of_project), draft.taken(project));
        let (limit, change) = match command {
            Command::Limit(_, limit) => (*limit, None),
            Command::Take(_, taker, amount) => {
                let limit = known.ok_or(Refusal::NoProject)?;
                (limit, Some((Key::Take(Arc::clone(project), Arc::clone(taker)), Some(*amount))))
            }
            Command::Give(_, taker) => {
                let limit = known.ok_or(Refusal::NoProject)?;
                (limit, Some((Key::Take(Arc::clone(project), Arc::clone(taker)), None)))
            }
        };
        let mut after = taken;
        if let Some((key, number)) = &change {
            let before = draft.get(key);
            if number.is_none() && before.is_none() {
                return Err(Refusal::NothingTaken);
            }
            after += number.unwrap_or(0) - before.unwrap_or(0);
        }
        if after > limit {
            return Err(Refusal::Over(after, limit));
        }
        if let Some((key, number)) = change {
            draft.put(&key, number);
        }
        draft.put(&of_project, Some(limit));
        Ok(Taken(after))
    }

    fn savepoint(draft: &Draft<'_>) -> (usize, usize) {
        (draft.undo.len(), draft.looks.len())
    }

    fn forget(draft: &mut Draft<'_>, (writes, looks): (usize, usize)) {
        for (key, replaced) in draft.undo.drain(writes..).rev() {
            match replaced {
                Some(written) => draft.written.insert(key, written),
                None => draft.written.remove(&key),
            };
        }
        for key in draft.looks.drain(looks..) {
            draft.seen.remove(&key);
        }
    }

    fn seen<'d>(draft: &'d Self::Draft<'_>) -> impl ExactSizeIterator<Item = (&'d Key, Revision)> {
        draft.seen.iter().map(|(key, revision)| (key, *revision))
    }

    fn seen_since<'d>(
        draft: &'d Self::Draft<'_>,
        (_, looks): (usize, usize),
    ) -> impl Iterator<Item = &'d Key> {
        draft.looks.iter().skip(looks)
    }

    fn size(draft: &Draft<'_>) -> usize {
        draft.written.len()
    }

    fn guard(&self, key: &Key) -> String {
        let prefix = self.0.as_str();
        match key {
            Key::Limit(project) => format!("{prefix}limits/{project}"),
            Key::Take(project, taker) => format!("{prefix}takes/{project}/{taker}"),
        }
    }

    fn writes(&self, draft: &Draft<'_>) -> Vec<Op> {
        let write = |(key, number): (&Key, &Option<i64>)| match number {
            Some(number) => {
                Op::Put { key: self.guard(key), value: number.to_string().into_bytes(), lease: None }
            }
            None => Op::Delete(self.guard(key)),
        };
        draft.written.iter().map(write).collect()
    }

    fn written(draft: &Draft<'_>) -> Vec<Change> {
        let change = |(key, number): (&Key, &Option<i64>)| Change {
            key: key.clone(),
            stored: number.map(|number| (number, 0)),
        };
        draft.written.iter().map(change).collect()
    }
}
