//! What storage that nodes share says of itself, and what a node has noted of it.

use std::{fmt, path::Path};

use super::{StorageError, new_id, read};

/// The name of a storage, and an id that nothing else has: the directory that it is mounted at may bear its name, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(super) name: String,
    /// None of one that was made by hand, or before there were ids.
    id: Option<String>,
}

impl Mark {
    /// Of storage that nobody has used yet.
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), id: Some(new_id()) }
    }

    /// What a file says; nothing where there is none.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, StorageError> {
        Ok(read(path)?.map(|text| Self::parse(&text)))
    }

    fn parse(text: &str) -> Self {
        let mut words = text.split_whitespace().map(str::to_owned);
        Self { name: words.next().unwrap_or_default(), id: words.next() }
    }

    /// Whether what is found may be that of which this was noted.
    pub(super) fn may_be(&self, found: &Self) -> bool {
        self.name == found.name && (self.id.is_none() || self.id == found.id)
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.id.as_ref().map_or(Ok(()), |id| write!(f, " {id}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_is_told_by_its_name_and_where_it_was_noted_by_its_id() {
        let [name, one, two] = ["nfs", "nfs 1", "nfs 2"].map(Mark::parse);
        assert!(name.may_be(&name) && name.may_be(&one) && one.may_be(&one));
        assert!(!one.may_be(&two) && !one.may_be(&name) && !name.may_be(&Mark::parse("other 1")));
        for mark in [name, one, Mark::new("nfs")] {
            assert_eq!(Mark::parse(&mark.to_string()), mark);
        }
        assert_ne!(Mark::new("nfs"), Mark::new("nfs"));
    }
}
