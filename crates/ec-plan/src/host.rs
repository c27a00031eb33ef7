//! Whether a host is fit for new work, from what was measured of it: pure.
//!
//! What begins a trouble is worse than what ends it, so that a host at the edge does not come and go.

use ec_model::{Trouble, TroubleKind};
use jiff::Timestamp;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// With so many left nobody is short of them.
const FILES: u64 = 1000;

/// What was measured of a host. What could not be measured is no trouble.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measured {
    /// Memory, in bytes.
    pub memory: Option<Room>,
    /// Of the last minute, so much of a hundred all that ran was waiting for memory (`full avg60` of the kernel's pressure
    /// stall information, <https://docs.kernel.org/accounting/psi.html>).
    pub memory_stall: Option<f64>,
    /// The file systems that guests' disks, images and the agent's records are written to, each with a directory on it.
    pub disks: Vec<(String, Room)>,
    /// Of those of them that have only so many, the files that can still be made: where none can, free bytes are of no use.
    pub files: Vec<(String, Room)>,
    /// Why nothing can be written where guests' disks, images or the agent's own records are, where that is so: it is not there, or
    /// was mounted to be read alone.
    pub unwritable: Option<String>,
    /// Why guests cannot be put into their networks, where one is not there.
    pub network: Option<String>,
    /// Of the network that gives guests their addresses, its name and how many it has left.
    pub addresses: Option<(String, Room)>,
    /// So many seconds placement's clock is ahead of this host's.
    pub clock_behind: Option<i64>,
}

/// What is left, of what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// In bytes, files or addresses.
    pub left: u64,
    /// In the same.
    pub total: u64,
}

/// At which point a trouble begins, and at which it ends.
#[derive(Clone, Copy)]
enum Edge {
    Begin,
    End,
}

impl Edge {
    /// What a value is held to; to end a trouble it must be so many times better.
    fn of(self, begin: u64, better: u64) -> u64 {
        match self {
            Self::Begin => begin,
            Self::End => begin * better,
        }
    }
}

/// Seconds that clocks may differ by.
pub const CLOCKS: u64 = 10;
/// Of a hundred.
const STALL: f64 = 10.0;

/// The troubles that the host is in, given those that it was in. One that goes on stays as it was told, unless it has
/// another cause.
pub fn judge(measured: &Measured, before: &[Trouble], now: Timestamp) -> Vec<Trouble> {
    let found = TroubleKind::ALL.into_iter().filter_map(|kind| {
        let known = before.iter().find(|trouble| trouble.kind == kind);
        let edge = if known.is_some() { Edge::End } else { Edge::Begin };
        let why = match kind {
            TroubleKind::Memory => memory(measured, edge),
            TroubleKind::Disk => {
                let short = || measured.disks.iter().find_map(|(place, room)| disk(place, *room, edge));
                let no_files = || measured.files.iter().find_map(|(place, room)| files(place, *room, edge));
                measured.unwritable.clone().or_else(short).or_else(no_files)
            }
            TroubleKind::Clock => measured.clock_behind.and_then(|seconds| clock(seconds, edge)),
            TroubleKind::Network => {
                let given = measured.addresses.as_ref();
                let short = || given.and_then(|(network, room)| addresses(network, *room, edge));
                measured.network.clone().or_else(short)
            }
            TroubleKind::Unknown => None,
        }?;
        Some(match known {
            Some(known) if is_same_cause(&known.why, &why) => known.clone(),
            known => Trouble { kind, since: known.map_or(now, |known| known.since), why },
        })
    });
    found.collect()
}

/// Whether two words on a trouble differ at most in their numbers, which wobble: a cause that is told anew each time is none.
fn is_same_cause(one: &str, other: &str) -> bool {
    let words = |why: &'_ str| {
        let words = why.split_whitespace().filter(|word| word.parse::<f64>().is_err());
        words.map(str::to_owned).collect::<Vec<_>>()
    };
    words(one) == words(other)
}

fn memory(measured: &Measured, edge: Edge) -> Option<String> {
    let short = measured.memory.filter(|room| room.left < edge.of(room.total / 50, 2));
    if let Some(room) = short {
        return Some(format!("{} MiB of {} MiB of memory are left", room.left / MIB, room.total / MIB));
    }
    let bound = match edge {
        Edge::Begin => STALL,
        Edge::End => STALL / 2.0,
    };
    let stall = measured.memory_stall.filter(|stall| *stall > bound)?;
    Some(format!("everything waited for memory {stall:.0} % of the last minute"))
}

fn disk(place: &str, room: Room, edge: Edge) -> Option<String> {
    let least = edge.of(GIB.min(room.total / 20), 2);
    (room.left < least).then(|| {
        format!("{} MiB of {} MiB are left on the file system of {place}", room.left / MIB, room.total / MIB)
    })
}

/// Whichever is less: what is made here are few files, and large ones, and a file system of few is no worse for that.
fn files(place: &str, room: Room, edge: Edge) -> Option<String> {
    let least = edge.of(FILES.min(room.total / 100), 2);
    (room.left < least)
        .then(|| format!("{} of {} inodes are left on the file system of {place}", room.left, room.total))
}

/// What is told of a network that has none left, also to whom asks for it beside the agent.
pub fn addresses_left(network: &str, room: Room) -> String {
    format!("{} of {} addresses of the network {network} are free", room.left, room.total)
}

/// What helps where there are none.
pub fn more_addresses(network: &str) -> String {
    format!(
        "each is taken until its lease ends, also where its guest is gone: give the network a larger range or a shorter lease \
         (`virsh net-edit {network}`)"
    )
}

fn addresses(network: &str, room: Room, edge: Edge) -> Option<String> {
    // Of a network of one address it ends with that one.
    let least = edge.of(1, 2).min(room.total);
    (room.left < least).then(|| format!("{}; {}", addresses_left(network, room), more_addresses(network)))
}

fn clock(behind: i64, edge: Edge) -> Option<String> {
    let most = match edge {
        Edge::Begin => CLOCKS,
        Edge::End => CLOCKS / 2,
    };
    let side = if behind.is_positive() { "behind" } else { "ahead of" };
    (behind.unsigned_abs() > most).then(|| {
        format!("its clock is {} s {side} that of placement's host: one of them is wrong", behind.abs())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(measured: &Measured, before: &[Trouble]) -> Vec<TroubleKind> {
        judge(measured, before, Timestamp::UNIX_EPOCH).into_iter().map(|trouble| trouble.kind).collect()
    }

    fn begun(kind: TroubleKind) -> [Trouble; 1] {
        [Trouble { kind, since: Timestamp::UNIX_EPOCH, why: "as it was told".into() }]
    }

    #[test]
    fn what_cannot_be_measured_is_no_trouble_and_ends_one() {
        assert_eq!(kinds(&Measured::default(), &begun(TroubleKind::Disk)), []);
    }

    #[test]
    fn memory_that_runs_out_is_trouble_until_twice_as_much_is_left() {
        let of = |left| Measured { memory: Some(Room { left, total: 100 * GIB }), ..Measured::default() };
        assert_eq!(kinds(&of(2 * GIB), &[]), []);
        assert_eq!(kinds(&of(2 * GIB - 1), &[]), [TroubleKind::Memory]);
        let begun = begun(TroubleKind::Memory);
        assert_eq!(kinds(&of(4 * GIB - 1), &begun), [TroubleKind::Memory]);
        assert_eq!(kinds(&of(4 * GIB), &begun), []);
        let stalled = |stall| Measured { memory_stall: Some(stall), ..of(90 * GIB) };
        assert_eq!(kinds(&stalled(10.0), &[]), []);
        assert_eq!(kinds(&stalled(10.1), &[]), [TroubleKind::Memory]);
        assert_eq!(kinds(&stalled(5.1), &begun), [TroubleKind::Memory]);
        assert_eq!(kinds(&stalled(5.0), &begun), []);
    }

    #[test]
    fn storage_that_is_not_there_is_trouble_until_it_is() {
        let gone = Measured { unwritable: Some("mount it".into()), ..Measured::default() };
        assert_eq!(judge(&gone, &[], Timestamp::UNIX_EPOCH)[0].why, "mount it");
        assert_eq!(kinds(&gone, &begun(TroubleKind::Disk)), [TroubleKind::Disk]);
    }

    #[test]
    fn any_disk_that_is_nearly_full_is_trouble_and_a_small_one_is_measured_by_its_size() {
        let of = |left, total| Measured {
            disks: vec![
                ("/".into(), Room { left: 50 * GIB, total: 100 * GIB }),
                ("/d".into(), Room { left, total }),
            ],
            ..Measured::default()
        };
        assert_eq!(kinds(&of(GIB, 500 * GIB), &[]), []);
        let full = judge(&of(GIB - 1, 500 * GIB), &[], Timestamp::UNIX_EPOCH);
        assert_eq!(full[0].why, "1023 MiB of 512000 MiB are left on the file system of /d");
        assert_eq!(kinds(&of(2 * GIB - 1, 500 * GIB), &begun(TroubleKind::Disk)), [TroubleKind::Disk]);
        assert_eq!(kinds(&of(2 * GIB, 500 * GIB), &begun(TroubleKind::Disk)), []);
        assert_eq!(kinds(&of(5 * MIB, 100 * MIB), &[]), []);
        assert_eq!(kinds(&of(5 * MIB - 1, 100 * MIB), &[]), [TroubleKind::Disk]);
    }

    #[test]
    fn a_file_system_on_which_hardly_a_file_can_be_made_is_trouble_whatever_room_it_has() {
        let of = |left, total| Measured {
            disks: vec![("/d".into(), Room { left: 100 * GIB, total: 500 * GIB })],
            files: vec![("/".into(), Room { left: 50, total: 100 }), ("/d".into(), Room { left, total })],
            ..Measured::default()
        };
        let begun = begun(TroubleKind::Disk);
        assert_eq!(kinds(&of(1000, 32_000_000), &[]), []);
        let none = judge(&of(999, 32_000_000), &[], Timestamp::UNIX_EPOCH);
        assert_eq!(none[0].why, "999 of 32000000 inodes are left on the file system of /d");
        assert_eq!(kinds(&of(1999, 32_000_000), &begun), [TroubleKind::Disk]);
        assert_eq!(kinds(&of(2000, 32_000_000), &begun), []);
        assert_eq!(kinds(&of(10, 1000), &[]), []);
        assert_eq!(kinds(&of(9, 1000), &[]), [TroubleKind::Disk]);
    }

    #[test]
    fn a_network_without_a_free_address_is_trouble_until_it_has_two() {
        let of = |left, total| Measured {
            addresses: Some(("default".into(), Room { left, total })),
            ..Measured::default()
        };
        let begun = begun(TroubleKind::Network);
        assert_eq!(kinds(&of(1, 253), &[]), []);
        let none = judge(&of(0, 253), &[], Timestamp::UNIX_EPOCH);
        assert!(none[0].why.starts_with("0 of 253 addresses of the network default are free; "), "{none:?}");
        assert!(none[0].why.contains("`virsh net-edit default`"), "{none:?}");
        assert_eq!(kinds(&of(1, 253), &begun), [TroubleKind::Network]);
        assert_eq!(kinds(&of(2, 253), &begun), []);
        assert_eq!(kinds(&of(1, 1), &begun), []);
    }

    #[test]
    fn a_network_that_is_gone_is_trouble_until_it_is_there_however_many_addresses_it_had() {
        let addresses = Some(("default".into(), Room { left: 9, total: 9 }));
        let gone = Measured { network: Some("define it".into()), addresses, ..Measured::default() };
        assert_eq!(judge(&gone, &[], Timestamp::UNIX_EPOCH)[0].why, "define it");
        let there = Measured { network: None, ..gone };
        assert_eq!(kinds(&there, &begun(TroubleKind::Network)), []);
    }

    #[test]
    fn a_clock_that_is_away_from_placements_is_trouble_in_both_directions() {
        let of = |seconds| Measured { clock_behind: Some(seconds), ..Measured::default() };
        assert_eq!(kinds(&of(10), &[]), []);
        assert_eq!(kinds(&of(-10), &[]), []);
        for (seconds, side) in [(11, "11 s behind"), (-11, "11 s ahead of")] {
            let found = judge(&of(seconds), &[], Timestamp::UNIX_EPOCH);
            assert!(found[0].why.contains(side), "{found:?}");
        }
        assert_eq!(kinds(&of(6), &begun(TroubleKind::Clock)), [TroubleKind::Clock]);
        assert_eq!(kinds(&of(5), &begun(TroubleKind::Clock)), []);
    }

    #[test]
    fn a_trouble_that_goes_on_stays_as_it_was_told() {
        let of = |seconds| Measured {
            clock_behind: Some(seconds),
            disks: vec![("/".into(), Room { left: 0, total: GIB })],
            ..Measured::default()
        };
        let before: Vec<_> = judge(&of(20), &[], Timestamp::UNIX_EPOCH).into_iter().skip(1).collect();
        let found = judge(&of(100), &before, Timestamp::MAX);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1], before[0]);
        assert_eq!(found[0].since, Timestamp::MAX);
    }

    #[test]
    fn a_trouble_that_gets_another_cause_tells_that_and_goes_on() {
        let of = |place: &str, gone: Option<&str>| Measured {
            disks: vec![(place.into(), Room { left: 0, total: GIB })],
            unwritable: gone.map(str::to_owned),
            ..Measured::default()
        };
        let mut before = judge(&of("/d1", None), &[], Timestamp::UNIX_EPOCH);
        for (measured, why) in [(of("/d2", None), "of /d2"), (of("/d2", Some("mount it")), "mount it")] {
            before = judge(&measured, &before, Timestamp::MAX);
            assert!(before[0].why.contains(why), "{before:?}");
            assert_eq!(before[0].since, Timestamp::UNIX_EPOCH);
        }
    }
}
