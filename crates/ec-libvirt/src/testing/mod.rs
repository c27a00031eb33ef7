//! A libvirtd for tests: private, real, and gone without a trace.
//!
//! It lives in mount and process namespaces of its own, where its configuration, state and sockets are
//! directories of the test. The host's libvirt, installed or not, running or not, is neither used nor
//! touched. The network namespace is the host's, so that a test reaches its guests; the one thing that
//! is seen outside is a bridge whose name tells the test's process.
//!
//! Needs root, and the programs `libvirtd`, `virtlogd`, `dnsmasq`, `qemu-system-x86_64`, `unshare`,
//! `nsenter`, `setpriv` and `ip`. Everything here blocks, and panics where a test cannot go on.
#![expect(clippy::expect_used, clippy::panic, reason = "support of tests, which end by panicking")]

mod image;
mod namespace;
mod network;
mod valid;

use std::{
    fs, io,
    net::Ipv4Addr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use ec_model::{InstanceId, NodeId};
use nix::sys::signal::Signal;
use tempfile::TempDir;
use virt::{connect::Connect, domain::Domain, error::Error, sys};

pub use image::{base_image, tiny_image};
use namespace::{Daemon, Namespace};
use network::TestNetwork;
pub use valid::assert_valid;

use crate::{AddressFilter, LibvirtConfig, VirtType, events};

/// Bound of every wait for a daemon.
const PATIENCE: Duration = Duration::from_secs(30);
/// In which a daemon finds out what its QEMU can, also beside other work: it takes it seconds.
const PROBED: Duration = Duration::from_secs(120);
/// So many daemons are started for one that finds it out.
const STARTS: usize = 3;
/// Where a daemon keeps what it found out, below its directory. It takes nothing from there that is not of the same QEMU, libvirt
/// and kernel.
const FOUND_OUT: &str = "var/cache/libvirt/qemu/capabilities";

/// Begins a backup by libvirt's own call into files that are there, for whoever measures ours beside it.
///
/// # Errors
/// libvirt refuses it.
pub fn begin_backup(domain: &Domain, document: &str) -> Result<(), Error> {
    crate::sys::begin_backup(domain, document)
}

/// Whether the domain is at a backup.
///
/// # Errors
/// libvirt does not tell.
pub fn is_backed_up(domain: &Domain) -> Result<bool, Error> {
    Ok(crate::sys::backup(domain)?.is_some())
}

/// See the module. Dropping it takes down guests, network, daemons and files.
#[derive(Debug)]
pub struct LibvirtServer {
    uri: String,
    network: TestNetwork,
    daemon: Mutex<Option<Daemon>>,
    namespace: Namespace,
    directory: TempDir,
}

impl LibvirtServer {
    /// Starts one, with a network of its own. Any number may run side by side.
    ///
    /// It has come to know its QEMU by then, which takes a daemon seconds where none did before, and which one of thousands seems
    /// not to have come back from: such a one is told of, and another takes its place.
    pub fn start() -> Self {
        for _ in 0..STARTS {
            let server = Self::start_one();
            if server.knows_its_qemu() {
                copy_missing(&server.directory().join(FOUND_OUT), &found_out());
                return server;
            }
            tracing::warn!("the test's libvirtd does not come to know its QEMU\n{}", server.told());
        }
        panic!("no libvirtd came to know its QEMU")
    }

    /// Whether it comes to know it in time. What it knows it keeps.
    fn knows_its_qemu(&self) -> bool {
        let (uri, (done, wait)) = (self.uri.clone(), mpsc::channel());
        thread::spawn(move || {
            let known = Connect::open(Some(&uri)).and_then(|connect| {
                connect.domain_capabilities(None, Some("x86_64"), Some("pc"), Some("qemu"), 0)?;
                connect.capabilities()
            });
            let _ = done.send(known.is_ok());
        });
        wait.recv_timeout(PROBED).unwrap_or(false)
    }

    /// What its daemons said, and what they are at; for the message of a test that fails.
    pub fn told(&self) -> String {
        self.namespace.told()
    }

    fn start_one() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let owner = fs::metadata("/proc/self").map(|process| process.uid());
        assert!(owner.is_ok_and(|uid| uid == 0), "a private libvirtd needs root");
        events::start_loop().expect("libvirt's event loop");
        network::remove_leftovers();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = tempfile::Builder::new()
            .prefix(&format!("{}{}-", network::DIRECTORY_PREFIX, std::process::id()))
            .tempdir()
            .expect("a directory for the test's libvirtd");
        copy_missing(&found_out(), &directory.path().join(FOUND_OUT));
        let namespace = Namespace::start(directory.path());
        let socket = namespace::socket(directory.path());
        let uri = format!("qemu+unix:///system?socket={}", socket.display());
        let server =
            Self { uri, network: TestNetwork::claim(number), daemon: Mutex::new(None), namespace, directory };
        server.start_daemon();
        let connect = server.connection();
        server.network.define(&connect);
        server
    }

    /// The URI to connect by.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Name of the libvirt network: NAT, with DHCP.
    pub fn network(&self) -> &str {
        network::NAME
    }

    /// Name of the network's bridge device.
    pub fn bridge(&self) -> &str {
        self.network.bridge()
    }

    /// The bridge's address, which is the guests' gateway, in a /24.
    pub fn gateway(&self) -> Ipv4Addr {
        self.network.gateway()
    }

    /// A directory that goes with the server; its daemon and its qemu see it under the same path.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A configuration for [`crate::LibvirtHypervisor`] with a pool in the server's directory.
    pub fn config(&self, node: NodeId) -> LibvirtConfig {
        LibvirtConfig {
            uri: self.uri.clone(),
            network: network::NAME.into(),
            virt_type: VirtType::Auto,
            // Packet rules would be the host's, which is not the test's alone.
            address_filter: AddressFilter::Off,
            pool: "ecompute".into(),
            pool_path: self.directory().join("instances"),
            console_dir: self.directory().join("consoles"),
            addresses: self.directory().join("addresses"),
            ..LibvirtConfig::new(node)
        }
    }

    /// A connection beside the one under test, to look and to meddle.
    pub fn connection(&self) -> Connect {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Connect::open(Some(&self.uri)) {
                Ok(connect) => return connect,
                Err(error) if Instant::now() > deadline => {
                    panic!("the test's libvirtd does not answer: {error}\n{}", self.told())
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn daemon(&self) -> MutexGuard<'_, Option<Daemon>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills libvirtd alone, as a crash does; guests run on.
    pub fn kill_daemon(&self) {
        if let Some(daemon) = self.daemon().take() {
            daemon.kill();
        }
    }

    /// libvirtd, and nobody else, has another file system at this path.
    pub fn mount_over(&self, path: &Path) {
        let path = path.to_str().expect("a path in UTF-8");
        self.namespace.among_mounts(&["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", path]);
    }

    /// It has that no more.
    pub fn unmount(&self, path: &Path) {
        self.namespace.among_mounts(&["umount", "--lazy", path.to_str().expect("a path in UTF-8")]);
    }

    /// Starts libvirtd again and waits until it answers. Nothing happens where it runs.
    pub fn start_daemon(&self) {
        let mut daemon = self.daemon();
        if daemon.is_none() {
            *daemon = Some(self.namespace.start_libvirtd());
        }
        drop(daemon);
        drop(self.connection());
    }

    /// The host loses its power: daemons, guests and bridge are gone, and what is defined and lies on disks stays.
    pub fn cut_power(&self) {
        self.namespace.cut_power();
        self.kill_daemon();
        network::remove_bridge(self.bridge());
    }

    /// It comes up again, up to the moment at which libvirtd answers.
    pub fn power_on(&self) {
        self.namespace.start_virtlogd();
        self.start_daemon();
    }

    /// Stops libvirtd without ending it: connections stay and nothing is answered.
    pub fn pause_daemon(&self) {
        if let Some(daemon) = &*self.daemon() {
            daemon.signal(Signal::SIGSTOP);
        }
    }

    /// Lets libvirtd go on.
    pub fn resume_daemon(&self) {
        if let Some(daemon) = &*self.daemon() {
            daemon.signal(Signal::SIGCONT);
        }
    }

    /// Kills virtlogd, without which libvirtd starts no guest.
    pub fn kill_virtlogd(&self) {
        self.namespace.kill_virtlogd();
    }

    /// Starts virtlogd again.
    pub fn start_virtlogd(&self) {
        self.namespace.start_virtlogd();
    }

    /// The process of a guest, where it runs; by it a test kills or stops a guest.
    pub fn guest_process(&self, instance: InstanceId) -> Option<i32> {
        namespace::find_process(&format!("guest={instance},"))
    }
}

impl Drop for LibvirtServer {
    fn drop(&mut self) {
        // A test that failed may have left the daemon in any state.
        self.resume_daemon();
        let (uri, bridge) = (self.uri.clone(), self.network.bridge().to_owned());
        if !thread::panicking() || self.daemon().is_some() {
            self.start_daemon();
            // Bounded: what libvirtd does not take down in time goes with its namespace.
            let (done, wait) = mpsc::channel();
            thread::spawn(move || {
                let result = take_down(&uri);
                let _ = done.send(result);
            });
            match wait.recv_timeout(PATIENCE) {
                Ok(Err(error)) => tracing::warn!(%error, "the test's libvirtd was not emptied"),
                Ok(Ok(())) => {}
                Err(_) => tracing::warn!("the test's libvirtd was not emptied in time"),
            }
        }
        self.kill_daemon();
        self.namespace.end();
        network::remove_bridge(&bridge);
    }
}

fn take_down(uri: &str) -> Result<(), Error> {
    let connect = Connect::open(Some(uri))?;
    for domain in connect.list_all_domains(0)? {
        // Not running is fine, and so is having ended meanwhile.
        let _ = domain.destroy();
        let _ = domain.undefine_flags(sys::VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | sys::VIR_DOMAIN_UNDEFINE_NVRAM);
    }
    for network in connect.list_all_networks(0)? {
        let _ = network.destroy();
        network.undefine()?;
    }
    Ok(())
}

/// Where tests find what an earlier daemon found out of its QEMU.
fn found_out() -> PathBuf {
    cache_directory().join("qemu-capabilities")
}

/// Copies the files of a directory that the other has not. Tests run in several processes, so each file is there whole or not at all.
fn copy_missing(from: &Path, to: &Path) {
    let copy = || -> io::Result<()> {
        fs::create_dir_all(to)?;
        let Ok(files) = fs::read_dir(from) else { return Ok(()) };
        for file in files {
            let file = file?;
            let name = file.file_name();
            let is_whole = name.to_string_lossy().ends_with(".xml");
            if is_whole && !to.join(&name).exists() {
                let part = tempfile::NamedTempFile::new_in(to)?;
                fs::copy(file.path(), part.path())?;
                part.persist(to.join(&name))?;
            }
        }
        Ok(())
    };
    copy().expect("the files of what a daemon found out");
}

/// Where files of tests that are worth keeping between runs lie.
fn cache_directory() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().expect("the workspace").join("target/test-images")
}
