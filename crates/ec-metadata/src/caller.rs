//! Who is at the other end of a connection.
//!
//! The packet rules mark what a guest asks by the port that it came in on, and the accepted socket has the
//! mark of the packet that opened the connection: nothing can change in between. Where there are no rules,
//! the kernel's neighbour table tells the hardware address, the bridge's own table the port that it was
//! last seen on, and that port must be the tap of the guest with that address.

use std::{
    io,
    net::{IpAddr, Ipv4Addr},
};

use ec_guard::ports::{self, Ports, is_mark, is_tap_of};
use ec_model::MacAddr;

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

/// What the tables of one of these bridges tell. Blocks for some small files.
pub(crate) fn by_port(bridges: impl IntoIterator<Item = String>, address: IpAddr) -> io::Result<Origin> {
    let IpAddr::V4(address) = address.to_canonical() else { return Ok(Origin::Stranger) };
    for bridge in bridges {
        if let Some(mac) = ports::neighbour_on(&bridge, address)?
            && Ports::of(&bridge)?.get(mac).is_some_and(|port| is_tap_of(port, mac))
        {
            return Ok(Origin::Guest(mac));
        }
    }
    Ok(Origin::Stranger)
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
