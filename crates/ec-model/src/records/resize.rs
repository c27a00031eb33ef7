//! A user's wish for another size, and what came of it.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Amounts by resource class, as allocated: `VCPU` in processors, `MEMORY_MB` in MiB, `DISK_GB` in GiB.
pub type Resources = BTreeMap<String, u64>;

/// A user's last wish for another size, which is that of the spec. Whoever confirms or reverts it wishes nothing new, or
/// another size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Resize {
    /// When it was wished: later than each wish for a size before, and so which of them it is.
    pub wished_at: Timestamp,
}

/// How large an instance was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The placement query as it was asked.
    pub query: String,
    /// What it asked for in all.
    pub resources: Resources,
}

/// What came of the last wish for another size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resized {
    /// Which it was: [`Resize::wished_at`].
    pub wished_at: Timestamp,
    /// Why it has not the size that was wished; nothing where it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// What it takes since: a disk that was grown stays so, whatever failed then.
    #[serde(default)]
    pub resources: Resources,
}

/// How large a machine is, or shall be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Size {
    /// Virtual processors.
    pub vcpus: u64,
    /// Memory in MiB.
    pub memory_mb: u64,
    /// Its disk in GiB; 0 where it is as large as its image.
    pub disk_gb: u64,
}

impl Size {
    /// That of these amounts.
    pub fn of(resources: &Resources) -> Self {
        let amount = |class: &str| resources.get(class).copied().unwrap_or(0);
        Self { vcpus: amount("VCPU"), memory_mb: amount("MEMORY_MB"), disk_gb: amount("DISK_GB") }
    }

    /// Whether there is room in this for another.
    pub fn covers(self, other: Self) -> bool {
        self.vcpus >= other.vcpus && self.memory_mb >= other.memory_mb && self.disk_gb >= other.disk_gb
    }
}

/// Of each class the greater amount.
#[must_use]
pub fn greater(a: &Resources, b: &Resources) -> Resources {
    let mut most = a.clone();
    for (class, amount) in b {
        let known = most.entry(class.clone()).or_default();
        *known = (*known).max(*amount);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn amounts(pairs: &[(&str, u64)]) -> Resources {
        pairs.iter().map(|(class, amount)| ((*class).to_owned(), *amount)).collect()
    }

    #[test]
    fn a_size_is_what_a_machine_is_made_of() {
        let size = Size::of(&amounts(&[("VCPU", 2), ("MEMORY_MB", 256), ("DISK_GB", 5), ("CUSTOM_X", 9)]));
        assert_eq!(size, Size { vcpus: 2, memory_mb: 256, disk_gb: 5 });
        assert_eq!(Size::of(&Resources::new()), Size::default());
        assert!(size.covers(size) && size.covers(Size::default()));
        for more in [Size { vcpus: 3, ..size }, Size { memory_mb: 257, ..size }, Size { disk_gb: 6, ..size }]
        {
            assert!(!size.covers(more) && more.covers(size), "{more:?}");
        }
    }

    #[test]
    fn the_greater_of_two_is_that_of_each_class() {
        let [a, b] =
            [amounts(&[("VCPU", 2), ("DISK_GB", 1)]), amounts(&[("VCPU", 1), ("DISK_GB", 3), ("X", 1)])];
        let most = amounts(&[("VCPU", 2), ("DISK_GB", 3), ("X", 1)]);
        assert_eq!((greater(&a, &b), greater(&b, &a)), (most.clone(), most));
    }
}
