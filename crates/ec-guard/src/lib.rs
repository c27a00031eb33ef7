//! The host's packet rules around guests, and which port a guest is on.
//!
//! ```text
//! Guard::sync ──▶ nft -j list ──▶ have ──▶ plan (pure) ──▶ one transaction ──▶ two tables of our own
//!   (at the start, every 30 s)                 ▲
//! Guard::admit (before a guest runs) ──────────┘ elements only
//! ```
//!
//! A guest may send from the hardware address that it was given and from the addresses that the host's own
//! DHCP server gave to that hardware address, which the kernel itself notes as the answer goes out. It
//! reaches DHCP, DNS, metadata and ICMP of its host and nothing else there, and neither etcd nor placement
//! anywhere. What it asks the metadata service carries a mark that says which port it came in on.
//!
//! The tables are shared by all agents of a host. Elements belong to ports, so two agents never touch each
//! other's; whatever somebody else takes away (a firewall that is restarted flushes everything) comes back
//! with the next sync. The rules stay when an agent ends, as its guests do.

mod have;
mod nft;
mod plan;
pub mod ports;
mod rules;

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use ec_model::MacAddr;

use have::Have;
use nft::Failed;
pub use plan::{Subnet, Want};

/// Elements of a port that is not there may be of a guest that another agent is about to start.
const GONE_AFTER: Duration = Duration::from_secs(600);

/// Others change the tables too, the kernel among them.
const ATTEMPTS: usize = 4;

/// What a port is held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    /// Its hardware address, and the addresses that the host's DHCP server gave it.
    Learned,
    /// Its hardware address.
    Mac,
}

/// A guest's port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    /// The device's name.
    pub name: String,
    /// The guest's hardware address.
    pub mac: MacAddr,
    /// What it is held to.
    pub pin: Pin,
}

/// Why there are no rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuardError {
    /// There is no such program.
    #[error("there is no program `nft`: install the package nftables")]
    NoProgram,
    /// Not root.
    #[error("not permitted to change packet rules: that needs root (CAP_NET_ADMIN)")]
    NotPermitted,
    /// The kernel or the program does not take them.
    #[error("the kernel or nft refuses the rules: {0}")]
    Refused(String),
    /// The program did not end in this time: nothing is known of whether rules can be here.
    #[error("nft did not end in {} s", .0.as_secs())]
    Silent(Duration),
}

/// The rules of this host as one agent keeps them. Its calls block for some milliseconds.
#[derive(Debug, Default)]
pub struct Guard {
    memory: Mutex<Memory>,
    /// Ports that wait to be let in, for whoever runs nft next: of many at once, few run it.
    waiting: Mutex<Vec<Tap>>,
    admitting: Mutex<()>,
}

#[derive(Debug, Default)]
struct Memory {
    /// How the rules look that this process has loaded.
    loaded: Option<Vec<String>>,
    /// The ports that are let in, by name, as of the last sync and since.
    admitted: HashMap<String, Tap>,
    /// Since when ports of others have not been there.
    missing: HashMap<String, Instant>,
    /// Bridges of which it was said that they learn from what no rule sees: it is said once.
    told: BTreeSet<String>,
}

impl Guard {
    /// Whether rules can be here. Changes nothing.
    pub fn probe() -> Result<(), GuardError> {
        Ok(nft::run(&["-c", "-f", "-"], &rules::load()).map(drop)?)
    }

    /// Whether this process has seen its rules in place.
    pub fn is_loaded(&self) -> bool {
        self.memory().loaded.is_some()
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        locked(&self.memory)
    }

    /// Makes the tables as they shall be: the rules where they are missing, older or changed, the elements
    /// of these ports, and nothing of ports that are long gone.
    pub fn sync(&self, want: &Want) -> Result<(), GuardError> {
        // Before the look: who is let in meanwhile stays so.
        self.memory().admitted.clear();
        self.apply(want, Goes::WhatIsLongGone)?;
        self.settle(want);
        Ok(())
    }

    /// What can be said to a port, or a bridge, only once it is there.
    pub fn settle(&self, want: &Want) {
        want.taps.iter().for_each(|tap| ports::refuse_bridges(&tap.name));
        let of_taps = want.taps.iter().filter_map(|tap| ports::bridge_of(&tap.name));
        let bridges: BTreeSet<String> = want.bridge.iter().cloned().chain(of_taps).collect();
        for bridge in bridges {
            ports::learn_from_what_rules_see(&bridge);
            if ports::learns_unseen(&bridge) && self.memory().told.insert(bridge.clone()) {
                let helps = ports::how_to_learn_from_what_rules_see(&bridge);
                tracing::warn!(
                    bridge,
                    "the bridge learns from frames that no rule sees, so that a guest can take over what is sent to another: {helps}"
                );
            }
        }
    }

    /// Lets a guest in before it runs. Cheaper than a sync, which it falls back to where the tables are not
    /// there; free for one that was let in since the last, or is there.
    pub fn admit(&self, want: &Want) -> Result<(), GuardError> {
        let taps = plain(&want.taps);
        if self.is_admitted(&taps) {
            return Ok(());
        }
        locked(&self.waiting).extend(taps.iter().cloned());
        let _turn = locked(&self.admitting);
        let all = std::mem::take(&mut *locked(&self.waiting));
        // Whoever had the turn before may have taken these along. What it failed with, these find out themselves.
        if self.is_admitted(&taps) && all.is_empty() {
            return Ok(());
        }
        let all: Vec<Tap> = taps.iter().cloned().chain(all).collect();
        if self.is_loaded() {
            match nft::run(&["-f", "-"], &plan::admit(&all, &want.leases)) {
                Ok(_) => {
                    self.memory().admitted.extend(by_name(all));
                    return Ok(());
                }
                Err(Failed::Refused(why)) => {
                    tracing::debug!(error = why, "admitting a guest the long way")
                }
                Err(Failed::Told(error)) => return Err(error),
            }
        }
        self.apply(want, Goes::Only(BTreeSet::new()))
    }

    fn is_admitted(&self, taps: &[Tap]) -> bool {
        let memory = self.memory();
        taps.iter().all(|tap| memory.admitted.get(&tap.name) == Some(tap))
    }

    /// Forgets ports whose guests are gone. Tables that are not there are fine.
    pub fn dismiss(&self, ports: &[String]) -> Result<(), GuardError> {
        if !self.is_loaded() {
            return Ok(());
        }
        let gone = ports.iter().filter(|port| ports::is_plain(port)).cloned().collect();
        self.apply(&Want::default(), Goes::Only(gone))
    }

    /// Takes away what was said of these guests, their bridge and these endpoints. The tables stay for others.
    pub fn release(&self, want: &Want) -> Result<(), GuardError> {
        let mut refused = None;
        for _ in 0..ATTEMPTS {
            let script = plan::release(&list()?, want);
            if script.is_empty() {
                return Ok(());
            }
            match nft::run(&["-f", "-"], &script) {
                Ok(_) => return Ok(()),
                Err(Failed::Refused(why)) => refused = Some(why),
                Err(Failed::Told(error)) => return Err(error),
            }
        }
        Err(GuardError::Refused(refused.unwrap_or_default()))
    }

    fn apply(&self, want: &Want, goes: Goes) -> Result<(), GuardError> {
        let mut want = want.clone();
        want.taps = plain(&want.taps);
        want.bridge = want.bridge.filter(|bridge| ports::is_plain(bridge));
        let mut refused = None;
        for _ in 0..ATTEMPTS {
            let have = list()?;
            let mut memory = self.memory();
            let gone = match &goes {
                Goes::Only(ports) => ports.clone(),
                Goes::WhatIsLongGone => memory.long_gone(&have, &want, Instant::now(), device),
            };
            let load = memory.must_load(&have);
            let mut script = if load { rules::load() } else { String::new() };
            script.push_str(&plan::elements(&have, &want, &gone));
            memory.admitted.retain(|port, _| !load && !gone.contains(port));
            let done = if script.is_empty() { Ok(String::new()) } else { nft::run(&["-f", "-"], &script) };
            if done.is_ok() {
                // What is said of a port that is not there another agent of this host may take for left over.
                let there = want.taps.iter().filter(|tap| ports::exists(&tap.name)).cloned().collect();
                memory.admitted.extend(by_name(there));
            }
            match done {
                Ok(_) if load => {
                    let word = if memory.loaded.is_some() { "back" } else { "up" };
                    tracing::info!("put the packet rules around guests {word}");
                    memory.loaded = Some(list()?.rules);
                    return Ok(());
                }
                Ok(_) => return Ok(()),
                // Somebody was in between: what was to be deleted is gone, or what was there is flushed.
                Err(Failed::Refused(why)) => refused = Some(why),
                Err(Failed::Told(error)) => return Err(error),
            }
        }
        Err(GuardError::Refused(refused.unwrap_or_default()))
    }
}

/// Of which ports and bridges everything goes.
enum Goes {
    /// Of these.
    Only(BTreeSet<String>),
    /// Of those that nobody has any more. Only whoever wants all of an agent's guests at once can tell: to
    /// anybody else all others look so.
    WhatIsLongGone,
}

impl Memory {
    fn must_load(&mut self, have: &Have) -> bool {
        match have.version {
            // A newer agent's, which it looks after.
            Some(version) if version > rules::VERSION => {
                self.loaded = Some(have.rules.clone());
                false
            }
            Some(rules::VERSION) => self.loaded.as_ref() != Some(&have.rules),
            _ => true,
        }
    }

    /// Devices of which elements are left, that are not wanted and have not been there for long, and those
    /// whose name somebody else's device has by now.
    fn long_gone(
        &mut self,
        have: &Have,
        want: &Want,
        now: Instant,
        look: impl Fn(&str, &[MacAddr]) -> Device,
    ) -> BTreeSet<String> {
        let known = want.taps.iter().map(|tap| &tap.name).chain(&want.bridge).chain(&want.others);
        let wanted: BTreeSet<&str> = known.map(|name| &**name).collect();
        let (mut gone, mut missing) = (BTreeSet::new(), BTreeSet::new());
        for name in have.devices().into_iter().filter(|name| !wanted.contains(name)) {
            let macs: Vec<MacAddr> =
                have.own_mac.iter().filter(|(port, _)| port == name).map(|(_, mac)| *mac).collect();
            match look(name, &macs) {
                Device::There => {}
                Device::Missing => drop(missing.insert(name)),
                Device::Another => drop(gone.insert(name.to_owned())),
            }
        }
        self.missing.retain(|port, _| missing.contains(port.as_str()));
        for port in missing {
            let since = *self.missing.entry(port.to_owned()).or_insert(now);
            if now.duration_since(since) >= GONE_AFTER {
                gone.insert(port.to_owned());
                // Who puts it there again has use for it.
                self.missing.remove(port);
            }
        }
        gone
    }
}

/// What is under a name that elements are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Device {
    There,
    Missing,
    /// A device of somebody else: libvirt gives names like vnet0 out again.
    Another,
}

fn device(name: &str, macs: &[MacAddr]) -> Device {
    if !ports::exists(name) {
        Device::Missing
    } else if macs.is_empty() || macs.iter().any(|mac| ports::is_tap_of(name, *mac)) {
        // A bridge has no element with a hardware address.
        Device::There
    } else {
        Device::Another
    }
}

/// Without names that no device of ours has.
fn plain(taps: &[Tap]) -> Vec<Tap> {
    taps.iter().filter(|tap| ports::is_plain(&tap.name)).cloned().collect()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn by_name(taps: Vec<Tap>) -> impl Iterator<Item = (String, Tap)> {
    taps.into_iter().map(|tap| (tap.name.clone(), tap))
}

/// The ports whose questions for metadata the rules mark. Blocks for some milliseconds; nothing where there
/// are no rules.
pub fn marked_ports() -> BTreeSet<String> {
    listed(&["map", rules::FAMILIES[0], rules::TABLE, rules::MARKS]).marks.into_keys().collect()
}

/// The bridges whose guests reach nothing of this host but what the rules let them. Blocks for some milliseconds; none where there are no
/// rules.
pub fn guarded_bridges() -> BTreeSet<String> {
    listed(&["set", rules::FAMILIES[1], rules::TABLE, rules::BRIDGES]).bridges
}

/// What one set or map has; without the program, or the set, nothing.
fn listed(what: &[&str]) -> Have {
    let mut have = Have::default();
    if let Ok(json) = nft::run(&[&["-j", "list"], what].concat(), "")
        && let Err(why) = have.read(&json)
    {
        tracing::debug!(error = why, "what the rules have cannot be read");
    }
    have
}

/// What is there. A table that is not there is an empty one without a version.
fn list() -> Result<Have, GuardError> {
    let mut have = Have::default();
    let mut complete = true;
    // One after the other: a script with both finds only the one of its first line.
    for family in rules::FAMILIES {
        match nft::run(&["-j", "list", "table", family, rules::TABLE], "") {
            Ok(json) => have.read(&json).map_err(GuardError::Refused)?,
            Err(Failed::Refused(why)) => {
                tracing::trace!(family, error = why, "no such table");
                complete = false;
            }
            Err(Failed::Told(error)) => return Err(error),
        }
    }
    if !complete {
        have.version = None;
    }
    Ok(have)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn have_port(port: &str) -> Have {
        Have { taps: [port.to_owned()].into(), ..Have::default() }
    }

    #[test]
    fn a_port_of_another_agent_is_forgotten_only_when_it_is_long_gone() {
        let (mut memory, have, want) = (Memory::default(), have_port("ecother"), Want::default());
        let begin = Instant::now();
        let mut look =
            |after: Duration, device| memory.long_gone(&have, &want, begin + after, |_, _| device).len();
        assert_eq!(look(Duration::ZERO, Device::Missing), 0, "its guest may be about to start");
        assert_eq!(look(GONE_AFTER / 2, Device::There), 0);
        assert_eq!(look(GONE_AFTER, Device::Missing), 0, "it was there in between");
        assert_eq!(look(GONE_AFTER * 2, Device::Missing), 1);
        assert_eq!(look(GONE_AFTER * 2, Device::Missing), 0, "somebody put it there again");
        assert_eq!(look(GONE_AFTER * 3, Device::Missing), 1);
        assert_eq!(look(GONE_AFTER * 3, Device::Another), 1, "a name that another guest has now");
        let known = Want { others: ["ecother".to_owned()].into(), ..want };
        let left = memory.long_gone(&have, &known, begin + GONE_AFTER * 9, |_, _| Device::Missing);
        assert!(left.is_empty(), "its guest is stopped");
    }

    #[test]
    fn rules_are_loaded_where_they_are_missing_older_or_changed_and_a_newer_agents_stay() {
        let have = |version, rule: &str| Have { version, rules: vec![rule.to_owned()], ..Have::default() };
        let mut memory = Memory::default();
        assert!(memory.must_load(&Have::default()));
        assert!(memory.must_load(&have(Some(rules::VERSION), "a")), "whose they are is not known");
        memory.loaded = Some(vec!["a".to_owned()]);
        assert!(!memory.must_load(&have(Some(rules::VERSION), "a")));
        assert!(memory.must_load(&have(Some(rules::VERSION), "b")));
        assert!(memory.must_load(&have(Some(0), "a")));
        assert!(!memory.must_load(&have(Some(rules::VERSION + 1), "c")));
    }
}
