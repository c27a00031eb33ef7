//! Volumes: disks with a life of their own, which machines have beside the one that they are made with.
//!
//! A volume is a workload like a machine: it has a record, a request for the node whose storage it lies on, a status and a
//! claim, and it outlives every machine that has it. What it is to a machine stands in the machine's own record and request.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::InstanceId;

/// What kind of workload it is. One that this release does not know makes its record unreadable: nobody guesses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// A virtual machine.
    #[default]
    Machine,
    /// A disk that machines can have.
    Volume,
}

impl Workload {
    /// Whether it is a virtual machine, which records do not say.
    pub fn is_machine(&self) -> bool {
        *self == Self::Machine
    }

    /// What people call one.
    pub fn word(self) -> &'static str {
        match self {
            Self::Machine => "instance",
            Self::Volume => "volume",
        }
    }
}

/// A volume that a machine has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attachment {
    /// The volume.
    pub volume: InstanceId,
    /// What it is called in the machine's domain: `vdb`. Its guest may call it otherwise, and finds it by its serial number,
    /// which begins with the volume's uuid.
    pub device: String,
}

impl Attachment {
    /// So many volumes a machine may have: each takes a slot of its PCI bus, which has 32.
    pub const MOST: usize = 16;

    /// What the disk is called that a machine boots from. A volume that is called so is that: then the machine has no disk of
    /// its own, from its beginning to its end.
    pub const ROOT: &'static str = "vda";

    /// What the first volume is called beside that.
    const FIRST: u8 = b'b';

    /// A volume that a machine boots from.
    pub fn root(volume: InstanceId) -> Self {
        Self { volume, device: Self::ROOT.to_owned() }
    }

    /// The one of these volumes that their machine boots from; none where that has a disk of its own.
    pub fn root_of(volumes: &[Self]) -> Option<InstanceId> {
        volumes.iter().find(|has| has.is_root()).map(|has| has.volume)
    }

    /// Whether its machine boots from it.
    pub fn is_root(&self) -> bool {
        self.device == Self::ROOT
    }

    /// The first name for another device, beside these.
    pub fn free_device(volumes: &[Self]) -> Option<String> {
        (Self::FIRST..=b'z')
            .map(|letter| format!("vd{}", char::from(letter)))
            .find(|device| volumes.iter().all(|has| has.device != *device))
    }

    /// Whether a volume can be called so that a machine has beside the disk that it boots from.
    pub fn is_device(name: &str) -> bool {
        matches!(name.as_bytes(), [b'v', b'd', Self::FIRST..=b'z'])
    }

    /// Tells one set of volumes from another within one process; 0 of none.
    pub fn fingerprint(volumes: &[Self]) -> u64 {
        fingerprint(volumes)
    }
}

/// Tells one set from another within one process; 0 of none.
pub(super) fn fingerprint<T: Ord + Hash>(set: &[T]) -> u64 {
    if set.is_empty() {
        return 0;
    }
    let mut sorted: Vec<&T> = set.iter().collect();
    sorted.sort_unstable();
    let mut hasher = DefaultHasher::new();
    sorted.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(volume: u128, device: &str) -> Attachment {
        Attachment { volume: InstanceId::new(uuid::Uuid::from_u128(volume)), device: device.to_owned() }
    }

    #[test]
    fn a_device_is_free_that_nobody_has() {
        assert_eq!(Attachment::free_device(&[]).as_deref(), Some("vdb"));
        let has = [attachment(1, "vdb"), attachment(2, "vdd")];
        assert_eq!(Attachment::free_device(&has).as_deref(), Some("vdc"));
        let all: Vec<_> = (b'b'..=b'z').map(|c| attachment(1, &format!("vd{}", char::from(c)))).collect();
        assert_eq!(Attachment::free_device(&all), None);
        assert!(all.iter().all(|one| Attachment::is_device(&one.device)));
        for name in ["", "vd", "vda", "vdC", "vdcc", "sdc", "vd{"] {
            assert!(!Attachment::is_device(name), "{name}");
        }
    }

    #[test]
    fn the_volume_that_a_machine_boots_from_is_told_by_its_device() {
        let (a, root) = (attachment(1, "vdb"), attachment(2, "vda"));
        assert_eq!(Attachment::root(root.volume), root);
        assert!(root.is_root() && !a.is_root());
        assert_eq!(Attachment::root_of(&[a.clone(), root.clone()]), Some(root.volume));
        assert_eq!(Attachment::root_of(&[a]), None);
        assert_eq!(
            Attachment::free_device(&[root]).as_deref(),
            Some("vdb"),
            "beside it there is what there is"
        );
    }

    #[test]
    fn sets_of_volumes_are_told_apart_and_their_order_is_none() {
        let (a, b) = (attachment(1, "vdc"), attachment(2, "vdd"));
        let both = Attachment::fingerprint(&[a.clone(), b.clone()]);
        assert_eq!(both, Attachment::fingerprint(&[b.clone(), a.clone()]));
        assert_eq!(Attachment::fingerprint(&[]), 0);
        for other in [vec![], vec![a.clone()], vec![a, attachment(2, "vde")]] {
            assert_ne!(both, Attachment::fingerprint(&other), "{other:?}");
        }
    }

    #[test]
    fn what_kind_it_is_is_said_of_volumes_and_not_guessed() {
        assert!(Workload::default().is_machine() && !Workload::Volume.is_machine());
        assert_eq!([Workload::Machine, Workload::Volume].map(Workload::word), ["instance", "volume"]);
        assert_eq!(serde_json::to_string(&Workload::Volume).unwrap(), r#""volume""#);
        assert!(serde_json::from_str::<Workload>(r#""process""#).is_err());
    }
}
