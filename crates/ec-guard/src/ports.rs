//! Which port of a bridge a guest is on, by what the kernel and nothing else says.
//!
//! A guest chooses the hardware address and the IP address that it sends from; it does not choose the port
//! that its frames come in on, nor that port's name and own address, which the host gives.

use std::{
    collections::HashMap,
    fs, io,
    net::Ipv4Addr,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use ec_model::MacAddr;

/// Where marks of ours begin: 0xEC and 24 bits of the guest's hardware address.
const MARK_SPACE: u32 = 0xec00_0000;

/// The mark that the rules put on what a guest asks the metadata service.
pub fn mark_of(mac: MacAddr) -> u32 {
    let [_, _, _, a, b, c] = mac.0;
    MARK_SPACE | u32::from_be_bytes([0, a, b, c])
}

/// Whether a mark is one of ours.
pub fn is_mark(mark: u32) -> bool {
    mark & 0xff00_0000 == MARK_SPACE
}

/// The name of the port of the interface with that address: `ec` and ten hexadecimal digits, which stand for
/// the instance and the number of the interface as the address does. libvirt keeps a name that does not
/// begin as its own do.
pub fn tap_name(mac: MacAddr) -> String {
    let [_, rest @ ..] = mac.0;
    format!("ec{}", rest.map(|octet| format!("{octet:02x}")).concat())
}

/// Whether `port` is the tap of the guest with that address: by its name or, for guests of releases that
/// left the name to libvirt, by its own address, which libvirt makes the guest's with 0xfe in front.
pub fn is_tap_of(port: &str, mac: MacAddr) -> bool {
    if port == tap_name(mac) {
        return true;
    }
    let [_, rest @ ..] = mac.0;
    let [a, b, c, d, e] = rest;
    device_file(port, "address").is_some_and(|text| text.trim().parse() == Ok(MacAddr([0xfe, a, b, c, d, e])))
}

/// Has the bridge close a port that takes part in its spanning tree, whose frames no rule sees. Nothing happens on a device
/// that is on no bridge.
pub(crate) fn refuse_bridges(port: &str) {
    if is_plain(port)
        && let Err(error) = switch_on(&device_directory(port).join("brport/bpdu_guard"))
    {
        tracing::debug!(port, %error, "the port may take part in the bridge's spanning tree");
    }
}

/// The bridge that a port is on.
pub(crate) fn bridge_of(port: &str) -> Option<String> {
    let bridge = is_plain(port).then(|| fs::read_link(device_directory(port).join("brport/bridge")).ok())?;
    bridge?.file_name()?.to_str().map(str::to_owned)
}

/// Has a bridge learn nothing from frames that are for bridges alone, LLDP's for example, before any guest is on it: who
/// sends one from another's hardware address would take over what is sent to that one.
pub(crate) fn learn_from_what_rules_see(bridge: &str) {
    if is_plain(bridge)
        && let Err(error) = switch_on(&device_directory(bridge).join(NO_LINK_LOCAL_LEARN))
    {
        tracing::debug!(bridge, %error, "what the bridge learns from cannot be changed");
    }
}

/// Whether a bridge of this host learns from frames that no rule sees, and cannot be kept from that: by a kernel before
/// 4.20, or where /sys cannot be written.
pub fn learns_unseen(bridge: &str) -> bool {
    exists(bridge) && is_out_of_reach(&device_directory(bridge).join(NO_LINK_LOCAL_LEARN))
}

/// What the host's administrator does about one of which [`learns_unseen`] says so.
pub fn how_to_learn_from_what_rules_see(bridge: &str) -> String {
    format!(
        "run `ip link set {bridge} type bridge no_linklocal_learn 1` on the host, as root (Linux 4.20 and later)"
    )
}

/// Below a bridge's own directory.
const NO_LINK_LOCAL_LEARN: &str = "bridge/no_linklocal_learn";

/// Whether it is off and stays so. Opening says what writing would; nothing is written.
fn is_out_of_reach(switch: &Path) -> bool {
    let is_on = fs::read_to_string(switch).is_ok_and(|value| value.trim() == "1");
    !is_on && fs::OpenOptions::new().write(true).open(switch).is_err()
}

/// One that is not there, or is on already, stays as it is.
fn switch_on(switch: &Path) -> io::Result<()> {
    match fs::read_to_string(switch) {
        Ok(value) if value.trim() == "0" => fs::write(switch, "1"),
        _ => Ok(()),
    }
}

fn device_directory(device: &str) -> PathBuf {
    Path::new("/sys/class/net").join(device)
}

/// Whether there is a network device of that name.
pub fn exists(device: &str) -> bool {
    is_plain(device) && device_directory(device).exists()
}

fn device_file(device: &str, file: &str) -> Option<String> {
    is_plain(device).then(|| fs::read_to_string(device_directory(device).join(file)).ok())?
}

/// Neither a path nor anything that a script would read as its own.
pub(crate) fn is_plain(device: &str) -> bool {
    (1..16).contains(&device.len())
        && device.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !device.starts_with('.')
}

/// Where on a bridge the kernel has lately seen which hardware address.
#[derive(Debug, Default)]
pub struct Ports {
    names: HashMap<u16, String>,
    table: Vec<u8>,
}

impl Ports {
    /// As it is now; nothing where there is no such bridge.
    pub fn of(bridge: &str) -> io::Result<Self> {
        if !is_plain(bridge) {
            return Ok(Self::default());
        }
        let bridge = device_directory(bridge);
        let table = match fs::File::open(bridge.join("brforward")) {
            Ok(file) => read_table(&file)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(error),
        };
        let mut names = HashMap::new();
        for entry in fs::read_dir(bridge.join("brif"))?.flatten() {
            let text = fs::read_to_string(entry.path().join("port_no")).unwrap_or_default();
            let number = text.trim().strip_prefix("0x").and_then(|hex| u16::from_str_radix(hex, 16).ok());
            names.extend(number.zip(entry.file_name().into_string().ok()));
        }
        Ok(Self { names, table })
    }

    /// The port behind which `mac` was last seen.
    pub fn get(&self, mac: MacAddr) -> Option<&str> {
        self.names.get(&find_port(&self.table, mac)?).map(String::as_str)
    }
}

/// An entry of the kernel's table: address, number of the port (low half), whether it is the host's own,
/// age, number of the port (high half), padding.
const ENTRY: usize = 16;

/// The kernel gives it out in whole entries only.
fn read_table(file: &fs::File) -> io::Result<Vec<u8>> {
    let mut table = Vec::new();
    let mut part = [0; 256 * ENTRY];
    loop {
        let length = file.read_at(&mut part, table.len() as u64)?;
        if length == 0 {
            return Ok(table);
        }
        table.extend_from_slice(&part[..length]);
    }
}

fn find_port(table: &[u8], mac: MacAddr) -> Option<u16> {
    table.chunks_exact(ENTRY).find_map(|entry| {
        let is_local = entry[7] != 0;
        (entry[..6] == mac.0 && !is_local).then(|| u16::from_le_bytes([entry[6], entry[12]]))
    })
}

/// An IPv4 neighbour that the kernel has confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// Its address.
    pub ip: Ipv4Addr,
    /// Its hardware address.
    pub mac: MacAddr,
    /// On which interface of this host.
    pub device: String,
}

/// Every confirmed IPv4 neighbour of this host. libvirt's own reader of this table fails on newer kernels.
pub fn neighbours() -> io::Result<Vec<Neighbour>> {
    Ok(fs::read_to_string("/proc/net/arp")?.lines().filter_map(neighbour).collect())
}

/// The hardware address of `address` on the interface `bridge`, where the kernel knows it.
pub fn neighbour_on(bridge: &str, address: Ipv4Addr) -> io::Result<Option<MacAddr>> {
    let found = neighbours()?.into_iter().find(|found| found.ip == address && found.device == bridge);
    Ok(found.map(|found| found.mac))
}

/// Columns: address, hardware type, flags, hardware address, mask, device.
fn neighbour(line: &str) -> Option<Neighbour> {
    /// The entry is complete (`ATF_COM`).
    const COMPLETE: u32 = 0x02;
    let mut columns = line.split_ascii_whitespace();
    let ip = columns.next()?.parse().ok()?;
    let flags = u32::from_str_radix(columns.nth(1)?.strip_prefix("0x")?, 16).ok()?;
    let mac = columns.next()?.parse().ok()?;
    let device = columns.nth(1)?.to_owned();
    (flags & COMPLETE != 0).then_some(Neighbour { ip, mac, device })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddr = MacAddr([0x52, 1, 2, 3, 4, 0xab]);

    #[test]
    fn names_and_marks_come_from_the_address() {
        assert_eq!(tap_name(MAC), "ec01020304ab");
        assert_eq!(mark_of(MAC), 0xec03_04ab);
        assert!(is_mark(mark_of(MAC)) && !is_mark(0) && !is_mark(0x0003_04ab));
        assert!(is_tap_of("ec01020304ab", MAC) && !is_tap_of("ec01020304ac", MAC) && !is_tap_of("../x", MAC));
    }

    #[test]
    fn only_confirmed_neighbours_count() {
        let line = "192.168.122.7    0x1         0x2         52:aa:00:00:00:07     *        othbr0";
        let found = neighbour(line).unwrap();
        assert_eq!((found.ip.to_string(), found.device), ("192.168.122.7".into(), "othbr0".into()));
        assert!(neighbour(&line.replace(" 0x2 ", " 0x6 ")).is_some());
        assert!(neighbour(&line.replace(" 0x2 ", " 0x0 ")).is_none());
        assert!(
            neighbour("IP address       HW type     Flags       HW address            Mask     Device")
                .is_none()
        );
        assert!(neighbour("garbage").is_none());
    }

    #[test]
    fn a_port_is_found_by_the_address_and_the_hosts_own_are_none() {
        let entry = |mac: MacAddr, low: u8, local: u8, high: u8| {
            [&mac.0[..], &[low, local, 9, 9, 9, 9, high, 0, 0, 0]].concat()
        };
        let other = MacAddr([0x52, 0, 0, 0, 0, 0]);
        let table = [entry(other, 1, 0, 0), entry(MAC, 7, 1, 0), entry(MAC, 2, 0, 1), vec![1, 2]].concat();
        assert_eq!(find_port(&table, MAC), Some(0x102));
        assert_eq!(find_port(&table[..32], MAC), None);
    }

    #[test]
    fn a_bridge_without_the_switch_cannot_be_kept_from_learning() {
        let directory = tempfile::tempdir().unwrap();
        let switch = directory.path().join("no_linklocal_learn");
        switch_on(&switch).unwrap();
        assert!(is_out_of_reach(&switch), "an older kernel");
        fs::write(&switch, "0\n").unwrap();
        assert!(!is_out_of_reach(&switch));
        assert_eq!(fs::read_to_string(&switch).unwrap(), "0\n", "it was only asked for");
        switch_on(&switch).unwrap();
        assert_eq!(fs::read_to_string(&switch).unwrap(), "1");
        assert!(!learns_unseen("no-such-bridge") && !learns_unseen("../.."));
    }

    #[test]
    fn a_bridge_that_is_not_there_has_no_ports() {
        assert_eq!(Ports::of("no-such-bridge").unwrap().get(MAC), None);
        assert_eq!(Ports::of("../..").unwrap().get(MAC), None);
        assert_eq!(neighbour_on("no-such-bridge", Ipv4Addr::LOCALHOST).unwrap(), None);
    }
}
