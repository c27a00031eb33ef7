//! The kernel's neighbour table: which hardware address an address on a bridge has now.
//!
//! A request that arrives was answered a SYN, so the kernel has resolved who sent it. An entry that the
//! kernel has not confirmed, or one on another interface, says nothing about this bridge's guests.

use std::{fs, io, net::Ipv4Addr};

use ec_model::MacAddr;

const TABLE: &str = "/proc/net/arp";

/// The entry is complete (`ATF_COM`).
const COMPLETE: u32 = 0x02;

/// The hardware address of `address` on the interface `bridge`, where the kernel knows it.
pub fn neighbour(bridge: &str, address: Ipv4Addr) -> io::Result<Option<MacAddr>> {
    Ok(find(&fs::read_to_string(TABLE)?, bridge, address))
}

/// Columns: address, hardware type, flags, hardware address, mask, device.
fn find(table: &str, bridge: &str, address: Ipv4Addr) -> Option<MacAddr> {
    table.lines().skip(1).find_map(|line| {
        let mut columns = line.split_ascii_whitespace();
        let at = columns.next()?.parse::<Ipv4Addr>().ok()?;
        let flags = columns.nth(1)?.strip_prefix("0x").and_then(|hex| u32::from_str_radix(hex, 16).ok())?;
        let mac = columns.next()?.parse::<MacAddr>().ok()?;
        let device = columns.nth(1)?;
        (at == address && flags & COMPLETE != 0 && device == bridge).then_some(mac)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
IP address       HW type     Flags       HW address            Mask     Device
192.168.122.7    0x1         0x2         52:aa:00:00:00:07     *        othbr0
192.168.122.7    0x1         0x2         52:aa:00:00:00:01     *        virbr0
192.168.122.8    0x1         0x0         00:00:00:00:00:00     *        virbr0
192.168.122.9    0x1         0x6         52:aa:00:00:00:09     *        virbr0
garbage
";

    #[test]
    fn only_confirmed_neighbours_on_the_bridge_count() {
        let find = |last: u8| find(TABLE, "virbr0", Ipv4Addr::new(192, 168, 122, last));
        assert_eq!(find(7), Some("52:aa:00:00:00:01".parse().unwrap()));
        assert_eq!(find(8), None);
        assert_eq!(find(9), Some("52:aa:00:00:00:09".parse().unwrap()));
        assert_eq!(find(1), None);
    }

    #[test]
    fn the_table_of_this_host_can_be_read() {
        assert_eq!(neighbour("no-such-bridge", Ipv4Addr::LOCALHOST).unwrap(), None);
    }
}
