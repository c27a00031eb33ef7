//! Who is at the other end of a connection.
//!
//! The packet rules mark what a guest asks by the port that it came in on, and the accepted socket has the
//! mark of the packet that opened the connection: nothing can change in between. Where there are no rules
//! for a port, the kernel's neighbour table tells the hardware address, the bridge's own table the port that
//! it was last seen on, and that port must be the tap of the guest with that address. What was last seen may
//! change at any moment, so that a port which does give marks is not believed without one.

use std::{
    collections::BTreeSet,
    fs, io,
    net::{IpAddr, Ipv4Addr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use ec_guard::{
    marked_ports,
    ports::{self, Ports, is_mark, is_tap_of},
};
use ec_model::MacAddr;

/// Where this is 1, an accepted socket has the mark of the packet that opened its connection.
pub(crate) const MARK_ACCEPTED: &str = "/proc/sys/net/ipv4/tcp_fwmark_accept";

/// Asking for the marks costs a process.
const MARKED_AGE: Duration = Duration::from_secs(1);

/// What the kernel tells of who made a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The guest whose port gives this mark.
    Mark(u32),
    /// The guest with this hardware address, on its own port.
    Guest(MacAddr),
    /// Somebody else, or a guest that pretends to be another.
    Stranger,
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// The address that it asks from.
    pub address: IpAddr,
    /// What the kernel tells of it.
    pub origin: Origin,
}

/// What a mark alone tells, where it is one of ours.
pub(crate) fn by_mark(mark: Option<u32>) -> Option<Origin> {
    mark.filter(|mark| is_mark(*mark)).map(Origin::Mark)
}

/// What the tables of one of these bridges tell of a connection without a mark. Blocks for some small files.
pub(crate) fn by_port(
    bridges: impl IntoIterator<Item = String>,
    address: IpAddr,
    marks: impl Fn(&str) -> bool,
) -> io::Result<Origin> {
    let IpAddr::V4(address) = address.to_canonical() else { return Ok(Origin::Stranger) };
    for bridge in bridges {
        if let Some(mac) = ports::neighbour_on(&bridge, address)?
            && Ports::of(&bridge)?.get(mac).is_some_and(|port| is_tap_of(port, mac) && !marks(port))
        {
            return Ok(Origin::Guest(mac));
        }
    }
    Ok(Origin::Stranger)
}

/// Which ports give marks, as it was a moment ago.
#[derive(Debug, Default)]
pub(crate) struct Marked(Mutex<Option<(Instant, BTreeSet<String>)>>);

impl Marked {
    /// Whether what comes from this port would have a mark.
    pub(crate) fn has(&self, port: &str) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().is_none_or(|(since, _)| since.elapsed() >= MARKED_AGE) {
            let arrive = fs::read_to_string(MARK_ACCEPTED).is_ok_and(|value| value.trim() == "1");
            *known = Some((Instant::now(), if arrive { marked_ports() } else { BTreeSet::new() }));
        }
        known.as_ref().is_some_and(|(_, ports)| ports.contains(port))
    }
}

/// The hardware address on any of these bridges: tells guests with one mark apart, which the rules hold to
/// their own addresses.
pub(crate) fn neighbour(
    bridges: impl IntoIterator<Item = String>,
    address: Ipv4Addr,
) -> io::Result<Option<MacAddr>> {
    for bridge in bridges {
        if let Some(mac) = ports::neighbour_on(&bridge, address)? {
            return Ok(Some(mac));
        }
    }
    Ok(None)
}
