//! The network of a test's libvirtd: a bridge and a subnet that nobody else has.

use std::{
    fs::{self, File},
    io::Write,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
};

use virt::connect::Connect;

/// Name of the network in its libvirt.
pub(super) const NAME: &str = "guests";

/// What a test's directory is called, before the number of its process.
pub(super) const DIRECTORY_PREFIX: &str = "ec-libvirt-";
const BRIDGE_PREFIX: &str = "ect";
const LOCK_PREFIX: &str = "ec-libvirt-subnet-";
/// Who starts a network holds its lock.
const ALONE: &str = "ec-libvirt-starts";

#[derive(Debug)]
pub(super) struct TestNetwork {
    bridge: String,
    subnet: u8,
    /// Held against other tests until the end.
    lock: PathBuf,
}

impl TestNetwork {
    /// Takes a subnet of 10.123.0.0/16 that no route and no other test has.
    pub(super) fn claim(number: u32) -> Self {
        let bridge = format!("{BRIDGE_PREFIX}{:x}n{number}", std::process::id());
        for subnet in 0..=u8::MAX {
            let lock = std::env::temp_dir().join(format!("{LOCK_PREFIX}{subnet}"));
            if !is_routed(subnet)
                && let Ok(mut file) = File::create_new(&lock)
            {
                write!(file, "{}", std::process::id()).expect("the lock of a subnet");
                return Self { bridge, subnet, lock };
            }
        }
        panic!("every subnet of 10.123.0.0/16 is taken");
    }

    pub(super) fn bridge(&self) -> &str {
        &self.bridge
    }

    pub(super) fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 123, self.subnet, 1)
    }

    /// Defines it, to start with its libvirtd, and starts it. No STP: a bridge with it forwards nothing
    /// in its first seconds.
    pub(super) fn define(&self, connect: &Connect) {
        let (bridge, subnet) = (&self.bridge, self.subnet);
        let document = format!(
            "<network><name>{NAME}</name><forward mode='nat'/><bridge name='{bridge}' stp='off' delay='0'/>\
             <ip address='10.123.{subnet}.1' netmask='255.255.255.0'>\
             <dhcp><range start='10.123.{subnet}.2' end='10.123.{subnet}.254'/></dhcp></ip></network>"
        );
        let network = connect.define_network_xml(&document).expect("define the test's network");
        network.set_autostart(true).expect("autostart");
        // Of two daemons that make libvirt's chains of rules at one moment, one fails.
        let alone = File::create(std::env::temp_dir().join(ALONE)).expect("the file of a lock");
        alone.lock().expect("wait for other tests' networks");
        network.create().expect("start the test's network");
    }
}

impl Drop for TestNetwork {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.lock);
    }
}

fn is_routed(subnet: u8) -> bool {
    // The kernel writes addresses as little-endian hexadecimal.
    let destination = format!("{:08X}", u32::from_le_bytes([10, 123, subnet, 0]));
    fs::read_to_string("/proc/net/route").unwrap_or_default().contains(&destination)
}

/// Removes a bridge device that its libvirtd has not; nothing happens where there is none.
pub(super) fn remove_bridge(bridge: &str) {
    if Path::new("/sys/class/net").join(bridge).exists() {
        let _ = Command::new("ip").args(["link", "delete", bridge]).status();
    }
}

/// What tests left that were killed: their processes are gone, so nobody else will.
pub(super) fn remove_leftovers() {
    let is_dead = |process: &str| {
        !process.is_empty()
            && process.bytes().all(|b| b.is_ascii_digit())
            && !Path::new("/proc").join(process).exists()
    };
    for name in names("/sys/class/net".as_ref()) {
        let process = name.strip_prefix(BRIDGE_PREFIX).and_then(|rest| rest.split_once('n'));
        let process = process.and_then(|(process, _)| u32::from_str_radix(process, 16).ok());
        if process.is_some_and(|process| is_dead(&process.to_string())) {
            remove_bridge(&name);
        }
    }
    let directory = std::env::temp_dir();
    for name in names(&directory) {
        let path = directory.join(&name);
        if name.starts_with(LOCK_PREFIX) {
            if fs::read_to_string(&path).is_ok_and(|process| is_dead(&process)) {
                let _ = fs::remove_file(path);
            }
        } else if let Some(rest) = name.strip_prefix(DIRECTORY_PREFIX)
            && rest.split_once('-').is_some_and(|(process, _)| is_dead(process))
        {
            let _ = fs::remove_dir_all(path);
        }
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
