//! `compute.yaml`: the form on disk, and the checked settings that the agent runs with.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::{Component, Path, PathBuf},
    time::Duration,
};

use ec_image::StoreSection;
use ec_libvirt::{AddressFilter, VirtType};
use ec_model::{
    Keyspace, NodeId, SharedStorage,
    input::{is_hostname, is_interface_name},
};
use ec_placement_client::{PlacementConfig, PlacementSection};
use ec_runtime::config::{ConfigError, Loaded, load};
use ec_serve::{
    TlsSection,
    port::{Listen, open_to_others},
};
use ec_store::{EtcdConfig, EtcdSection};
use ipnet::IpNet;
use serde::Deserialize;

use crate::inventory;

/// Looked for in this order where `--config` names none.
pub const PLACES: [&str; 2] = ["compute.yaml", "/etc/ecompute/compute.yaml"];
/// What a node keeps lies here, where nothing else is said.
pub const STATE_DIR: &str = "/var/lib/ecompute";

/// The classes of an ordinary host, which is what this agent measures.
pub const CLASSES: [&str; 3] = ["VCPU", "MEMORY_MB", "DISK_GB"];

/// The file's form. Every key may be left out; the shipped `compute.yaml` explains each.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ComputeFile {
    uuid: Option<String>,
    name: Option<String>,
    listen: Listen,
    advertise: Option<String>,
    tls: Option<TlsSection>,
    etcd: EtcdSection,
    placement: PlacementSection,
    resize: Option<bool>,
    bridge: Option<String>,
    state_dir: Option<PathBuf>,
    shared_storage: Option<SharedSection>,
    images: ImagesSection,
    workers: Option<usize>,
    reserved: BTreeMap<String, u64>,
    allocation_ratio: BTreeMap<String, f64>,
    libvirt: LibvirtSection,
    traits: Vec<String>,
    address_timeout: Option<u64>,
    audit_grace: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ImagesSection {
    directory: Option<PathBuf>,
    max_gb: Option<u64>,
    stall_timeout: Option<u64>,
    local: Vec<PathBuf>,
    allow_addresses: Vec<String>,
    store: Option<StoreSection>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct SharedSection {
    name: String,
    path: PathBuf,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LibvirtSection {
    uri: Option<String>,
    virt_type: Option<VirtTypeName>,
    network: Option<String>,
    address_filter: Option<AddressFilterName>,
    graphics: GraphicsName,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum AddressFilterName {
    Learned,
    Mac,
    Off,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum GraphicsName {
    #[default]
    None,
    Vnc,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum VirtTypeName {
    #[default]
    Auto,
    Kvm,
    Qemu,
}

/// Storage that this node shares with others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shared {
    /// Which: its nodes all call it the same.
    pub storage: SharedStorage,
    /// Where it is mounted here.
    pub path: PathBuf,
}

/// Everything the agent needs to know, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The uuid to use instead of the one kept in the state directory.
    pub uuid: Option<NodeId>,
    /// The provider's name.
    pub name: String,
    /// Where the agent's own port is, where it has one.
    pub listen: Option<SocketAddr>,
    /// The host by which others reach that port, where it is another than that.
    pub advertise: Option<String>,
    /// TLS on that port, where it is wanted.
    pub tls: Option<TlsSection>,
    /// How to reach etcd.
    pub etcd: EtcdConfig,
    /// The keys' layout.
    pub keys: Keyspace,
    /// How to reach placement.
    pub placement: PlacementConfig,
    /// Whether a disk is as large as the allocated DISK_GB, or as its image.
    pub resize: bool,
    /// A host bridge for a second interface.
    pub bridge: Option<String>,
    /// Where the agent keeps what must outlive it.
    pub state_dir: PathBuf,
    /// The storage that this node shares with others, where guests' disks are to lie there.
    pub shared: Option<Shared>,
    /// The image cache's directory.
    pub images: PathBuf,
    /// The image cache's bound, in bytes.
    pub images_max_bytes: u64,
    /// A download without a byte for so long has stalled.
    pub stall_timeout: Duration,
    /// The directories below which `file://` images may lie.
    pub images_local: Vec<PathBuf>,
    /// Loopback and link-local networks that images may be fetched from.
    pub images_allow_addresses: Vec<IpNet>,
    /// The image store that objects may be fetched from; where it is a directory, it is one of those above, too.
    pub images_store: StoreSection,
    /// How many builds and destroys run at once.
    pub workers: usize,
    /// Per class, what is not for allocation.
    pub reserved: BTreeMap<String, u64>,
    /// Per class, how often what is there may be given out.
    pub allocation_ratio: BTreeMap<String, f64>,
    /// libvirt's connection URI.
    pub libvirt_uri: String,
    /// How guests run.
    pub virt_type: VirtType,
    /// The libvirt network of the first interface.
    pub network: String,
    /// Whether guests that are built from now on have a screen.
    pub graphics: bool,
    /// What guests' ports are held to.
    pub address_filter: AddressFilter,
    /// Whether the configuration says so, and does not leave it to what the host can.
    pub filter_required: bool,
    /// The operator's own traits.
    pub traits: BTreeSet<String>,
    /// A guest without an address for so long after its start has failed.
    pub address_timeout: Duration,
    /// An allocation without a request for so long is released.
    pub audit_grace: Duration,
}

/// Where the agent's own port is where nothing else is said.
const LISTEN: &str = "127.0.0.1:18090";
/// In the state directory: where guests' disks lie, unless they lie on shared storage.
pub(crate) const DISKS: &str = "disks";
/// Its records of guests, in the same.
pub(crate) const RECORDS: &str = "instances";

/// Processors are shared in time, so several guests may count on one (what OpenStack's Nova gives out too).
const VCPU_RATIO: f64 = 4.0;
/// The image cache's bound in GiB where none is configured: a tenth of its file system or a quarter of what is free
/// there beside the cache itself, whichever is less, since as much is kept free of guests' disks; at most room for a few
/// dozen base images.
const IMAGES_GB: std::ops::RangeInclusive<u64> = 1..=50;
/// As many as libvirt takes at once from one client beside those that look: its daemon has 20 threads, and waits
/// for QEMU more than it works. The host's processors bound nothing here.
const WORKERS: usize = 12;
/// A mirror that sends nothing for this long will not send anything.
const STALL_TIMEOUT: u64 = 30;
/// An emulated guest on a busy host takes minutes to ask for its address.
const ADDRESS_TIMEOUT: u64 = 300;
/// Where the members of an etcd cluster speak to each other, usually without a password.
const ETCD_PEER_PORT: u16 = 2380;
/// Far more than the milliseconds between a claim and its request.
const AUDIT_GRACE: u64 = 60;

/// See [`IMAGES_GB`].
fn default_cache_gb(images: &Path) -> u64 {
    let stat = images.ancestors().find_map(|path| nix::sys::statvfs::statvfs(path).ok());
    // What cannot be read here fails where it is measured.
    let cached = inventory::bytes_in(images).unwrap_or_default();
    stat.map_or(*IMAGES_GB.start(), |stat| {
        let unit = stat.fragment_size();
        cache_gb(stat.blocks() * unit, stat.blocks_available() * unit, cached)
    })
}

/// The bound on a file system of so many bytes, of which so many are free, and so many are the cache's: else it would shrink at
/// each start by what the cache has grown.
fn cache_gb(total: u64, free: u64, cached: u64) -> u64 {
    let gb = (total / 10).min((free + cached) / 4) >> 30;
    gb.clamp(*IMAGES_GB.start(), *IMAGES_GB.end())
}

impl Settings {
    /// Reads and checks the configuration.
    pub fn load(named: Option<&Path>) -> Result<(Self, Option<PathBuf>), ConfigError> {
        let loaded: Loaded<ComputeFile> = load(named, &PLACES.map(Path::new))?;
        let settings = Self::check(&loaded.config).map_err(|why| loaded.wrong(why))?;
        Ok((settings, loaded.path))
    }

    /// Checks what the form alone does not show. All mistakes are told at once.
    pub fn check(file: &ComputeFile) -> Result<Self, String> {
        let mut wrong = Vec::new();
        let mut note = |why: String| wrong.push(why);

        let uuid =
            file.uuid.as_deref().and_then(|text| text.parse().map_err(|e| note(format!("uuid: {e}"))).ok());
        let name = file.name.clone().unwrap_or_else(hostname);
        if name.is_empty() || name.chars().count() > 200 || name.chars().any(char::is_control) {
            note("name: wanted 1 to 200 characters in one line, as placement has it".to_owned());
        }
        let listen = file.listen.address(LISTEN).map_err(&mut note).ok().flatten();
        if file.listen == Listen::Nowhere && file.tls.is_some() {
            note("tls is of the agent's own port, and `listen` is null: leave one of them out".to_owned());
        }
        if let Some(host) = &file.advertise
            && host.parse::<IpAddr>().is_err()
            && url::Host::parse(host).is_err()
        {
            note(format!("advertise: `{host}` is no host: wanted a name or an address, without a port"));
        }
        let etcd = file.etcd.settings().map_err(&mut note).ok();
        let keys = Keyspace::configured(file.etcd.prefix.as_deref()).map_err(&mut note).ok();
        let placement = file.placement.settings().map_err(&mut note).ok();
        for class in file.reserved.keys().chain(file.allocation_ratio.keys()) {
            if !CLASSES.contains(&class.as_str()) {
                note(format!(
                    "`{class}` is not a resource class of this agent: wanted {}",
                    CLASSES.join(", ")
                ));
            }
        }
        for (class, ratio) in &file.allocation_ratio {
            if !(ratio.is_finite() && *ratio > 0.0 && *ratio <= 1000.0) {
                note(format!("allocation_ratio.{class} is {ratio}: wanted more than 0, up to 1000"));
            }
        }
        for name in &file.traits {
            let custom = name.strip_prefix("CUSTOM_").is_some_and(|rest| {
                !rest.is_empty()
                    && rest.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
            });
            if !custom || name.len() > 255 {
                note(format!("traits: `{name}` is not a custom trait: wanted CUSTOM_ and then A-Z, 0-9, _"));
            }
        }
        if let Some(bridge) = &file.bridge
            && !is_interface_name(bridge)
        {
            note(format!("bridge: `{bridge}` is not the name of a network interface"));
        }
        let state_dir = file.state_dir.clone().unwrap_or_else(|| PathBuf::from(STATE_DIR));
        let images = file.images.directory.clone().unwrap_or_else(|| state_dir.join("images"));
        let shared = file.shared_storage.as_ref().map(|SharedSection { name, path }| Shared {
            storage: SharedStorage::named(name),
            path: path.clone(),
        });
        let mut paths = vec![("state_dir", &state_dir), ("images.directory", &images)];
        if let Some(Shared { storage, path }) = &shared {
            paths.push(("shared_storage.path", path));
            if !is_hostname(&storage.name) {
                note(format!(
                    "shared_storage.name: `{}` is not usable: wanted letters, digits and hyphens, at most 63",
                    storage.name
                ));
            }
            if state_dir.starts_with(path) {
                note(format!(
                    "state_dir: {} lies on the shared storage, and is this node's alone: name a directory of this host",
                    state_dir.display()
                ));
            }
        }
        for (key, path) in paths {
            if !path.is_absolute() {
                note(format!("{key}: `{}` is not an absolute path", path.display()));
            }
        }
        for path in &file.images.local {
            let plain = path.is_absolute() && path.components().all(|part| part != Component::ParentDir);
            if !plain || path.parent().is_none() {
                note(format!("images.local: `{}` is not an absolute path below /", path.display()));
            }
        }
        let mut images_store = file.images.store.clone().unwrap_or_default();
        images_store.url.get_or_insert_with(|| StoreSection::DEFAULT_URL.to_owned());
        let mut images_local = file.images.local.clone();
        match images_store.check() {
            Ok(()) => images_local.extend(images_store.directory()),
            Err(why) => note(format!("images.store.{why}")),
        }
        let mut allow_addresses = Vec::new();
        for text in &file.images.allow_addresses {
            match text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)) {
                Ok(network) => allow_addresses.push(network),
                Err(_) => note(format!(
                    "images.allow_addresses: `{text}` is no network: wanted one like 127.0.0.0/8 or ::1"
                )),
            }
        }
        let workers = file.workers.unwrap_or(WORKERS);
        if !(1..=256).contains(&workers) {
            note(format!("workers is {workers}: wanted 1 to 256"));
        }
        let mut seconds = |key: &str, value: Option<u64>, default: u64| {
            let value = value.unwrap_or(default);
            if !(1..=86_400).contains(&value) {
                note(format!("{key} is {value}: wanted seconds from 1 to 86400"));
            }
            value.clamp(1, 86_400)
        };
        let stall_timeout =
            Duration::from_secs(seconds("images.stall_timeout", file.images.stall_timeout, STALL_TIMEOUT));
        let address = seconds("address_timeout", file.address_timeout, ADDRESS_TIMEOUT);
        let grace = seconds("audit_grace", file.audit_grace, AUDIT_GRACE);
        let max_gb = file.images.max_gb.unwrap_or_else(|| default_cache_gb(&images));
        if !(1..=1_000_000).contains(&max_gb) {
            note(format!("images.max_gb is {max_gb}: wanted 1 to 1000000"));
        }

        let (Some(etcd), Some(keys), Some(placement), true) = (etcd, keys, placement, wrong.is_empty())
        else {
            return Err(wrong.join("; "));
        };
        Ok(Self {
            uuid,
            name,
            listen,
            advertise: file.advertise.clone(),
            tls: file.tls.clone(),
            etcd,
            keys,
            placement,
            resize: file.resize.unwrap_or(true),
            bridge: file.bridge.clone(),
            state_dir,
            shared,
            images,
            images_max_bytes: max_gb << 30,
            stall_timeout,
            images_local,
            images_allow_addresses: allow_addresses,
            images_store,
            workers,
            reserved: file.reserved.clone(),
            allocation_ratio: file.allocation_ratio.clone(),
            libvirt_uri: file.libvirt.uri.clone().unwrap_or_else(|| "qemu:///system".to_owned()),
            virt_type: match file.libvirt.virt_type.unwrap_or_default() {
                VirtTypeName::Auto => VirtType::Auto,
                VirtTypeName::Kvm => VirtType::Kvm,
                VirtTypeName::Qemu => VirtType::Qemu,
            },
            network: file.libvirt.network.clone().unwrap_or_else(|| "default".to_owned()),
            graphics: file.libvirt.graphics == GraphicsName::Vnc,
            address_filter: match file.libvirt.address_filter {
                None | Some(AddressFilterName::Learned) => AddressFilter::Learned,
                Some(AddressFilterName::Mac) => AddressFilter::Mac,
                Some(AddressFilterName::Off) => AddressFilter::Off,
            },
            filter_required: file.libvirt.address_filter.is_some(),
            traits: file.traits.iter().cloned().collect(),
            address_timeout: Duration::from_secs(address),
            audit_grace: Duration::from_secs(grace),
        })
    }

    /// The ratio of a class.
    pub fn ratio(&self, class: &str) -> f64 {
        let default = if class == "VCPU" { VCPU_RATIO } else { 1.0 };
        self.allocation_ratio.get(class).copied().unwrap_or(default)
    }

    /// The hosts and ports of etcd, between its members too, and of placement: what no guest may reach.
    pub fn control_endpoints(&self) -> Vec<(String, u16)> {
        let mut found = BTreeSet::new();
        for endpoint in &self.etcd.endpoints {
            // Of the form `host:port` or a URL.
            let text = if endpoint.contains("://") { endpoint.clone() } else { format!("http://{endpoint}") };
            if let Some((host, port)) = host_and_port(&text) {
                found.extend([(host.clone(), port), (host, ETCD_PEER_PORT)]);
            }
        }
        found.extend(host_and_port(&self.placement.endpoint));
        found.into_iter().collect()
    }

    /// All certificates that these settings name.
    pub fn certificates(&self) -> impl Iterator<Item = &Path> {
        let served = self.tls.iter().flat_map(TlsSection::certificates);
        self.etcd.certificates().chain(self.placement.certificates()).chain(served)
    }

    /// What it means where the agent's own port can be reached by others who need no certificate.
    pub fn open_port(&self) -> Option<String> {
        open_to_others(self.listen, self.tls.as_ref(), "what runs on this node")
    }

    /// How many network interfaces a guest has.
    pub fn nics(&self) -> u8 {
        if self.bridge.is_some() { 2 } else { 1 }
    }

    /// Where the guests' disks of a node lie: on shared storage each node has a directory of its own, so that none takes
    /// another's for its own.
    pub fn disks(&self, node: NodeId) -> PathBuf {
        match &self.shared {
            Some(shared) => shared.path.join(node.to_string()),
            None => self.state_dir.join(DISKS),
        }
    }

    /// Where the disks of all nodes lie that have the same storage.
    pub fn storage(&self) -> PathBuf {
        match &self.shared {
            Some(shared) => shared.path.clone(),
            None => self.state_dir.join(DISKS),
        }
    }

    /// Of which provider the disks of a node are claimed.
    pub fn disk_provider(&self, node: NodeId) -> NodeId {
        self.shared.as_ref().map_or(node, |shared| shared.storage.provider)
    }

    /// Where the guests' console logs lie.
    pub fn consoles(&self) -> PathBuf {
        self.state_dir.join("consoles")
    }

    /// Where it stands who had which address last.
    pub fn addresses(&self) -> PathBuf {
        self.state_dir.join("addresses")
    }

    /// Where the node's own records of its instances lie.
    pub fn records(&self) -> PathBuf {
        self.state_dir.join(RECORDS)
    }
}

pub(crate) fn hostname() -> String {
    nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default()
}

fn host_and_port(url: &str) -> Option<(String, u16)> {
    let url = url::Url::parse(url.trim()).ok()?;
    let port = url.port_or_known_default()?;
    // A resolver wants IPv6 addresses without their brackets.
    let host = match url.host()? {
        url::Host::Domain(name) => name.to_owned(),
        url::Host::Ipv4(ip) => ip.to_string(),
        url::Host::Ipv6(ip) => ip.to_string(),
    };
    Some((host, port))
}

#[cfg(test)]
mod tests {
    use ec_runtime::config::parse;

    use super::*;

    fn check(text: &str) -> Result<Settings, String> {
        Settings::check(&parse(text, Path::new("compute.yaml")).map_err(|error| error.to_string())?)
    }

    #[test]
    fn the_shipped_file_is_valid_and_says_nothing_but_defaults() {
        let shipped = check(include_str!("../../compute.yaml")).unwrap();
        let defaults = Settings::check(&ComputeFile::default()).unwrap();
        let mut shipped = shipped;
        // The file spells out the ratios, which the defaults compute.
        for class in CLASSES {
            assert_eq!(shipped.ratio(class), defaults.ratio(class));
        }
        shipped.allocation_ratio.clear();
        assert_eq!(format!("{shipped:?}"), format!("{defaults:?}"));
    }

    #[test]
    fn the_caches_bound_does_not_shrink_by_what_it_holds() {
        let bound = |free: u64, cached: u64| cache_gb(1000 << 30, free << 30, cached << 30);
        assert_eq!((bound(120, 0), bound(90, 30), bound(0, 120)), (30, 30, 30));
        assert_eq!((bound(1000, 0), bound(0, 0)), (50, 1));
        assert_eq!(cache_gb(100 << 30, 90 << 30, 0), 10);
    }

    #[test]
    fn the_classic_keys_keep_working() {
        let settings = check(
            "uuid: c1a6523e-c50a-42c2-8952-f2d3a8479e99\netcd:\n  host: ds1\nplacement:\n  endpoint: http://ds1:8080\nresize: False\nbridge: br0\n",
        )
        .unwrap();
        assert_eq!(settings.etcd.endpoints, ["ds1:2379"]);
        assert!(!settings.resize);
        assert_eq!(settings.bridge.as_deref(), Some("br0"));
    }

    #[test]
    fn shared_storage_has_a_name_and_a_place_of_its_own() {
        let node = NodeId::new(uuid::Uuid::from_u128(7));
        let settings = check("shared_storage: {name: nfs, path: /srv/nfs}").unwrap();
        assert_eq!(settings.disks(node), Path::new("/srv/nfs").join(node.to_string()));
        assert_eq!(settings.disk_provider(node), SharedStorage::named("nfs").provider);
        let own = check("").unwrap();
        assert_eq!((own.disks(node), own.disk_provider(node)), (own.storage(), node));
        for (text, wanted) in [
            ("shared_storage: {name: 'a b', path: /srv/nfs}", "shared_storage.name: `a b`"),
            ("shared_storage: {name: nfs, path: srv}", "shared_storage.path: `srv`"),
            (
                "shared_storage: {name: nfs, path: /var/lib}",
                "state_dir: /var/lib/ecompute lies on the shared",
            ),
            ("shared_storage: {name: nfs}", "path"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn control_endpoints_are_found_in_every_form() {
        let endpoints = |text: &str| {
            let found = check(text).unwrap().control_endpoints();
            found.into_iter().map(|(host, port)| format!("{host} {port}")).collect::<Vec<_>>()
        };
        assert_eq!(endpoints(""), ["localhost 2379", "localhost 2380", "localhost 8080"]);
        assert_eq!(
            endpoints(
                "etcd: {endpoints: ['e1:2379', 'http://10.0.0.2:4001/', '[fd00::1]:2379']}\nplacement: {endpoint: 'https://p.example/placement'}"
            ),
            [
                "10.0.0.2 2380",
                "10.0.0.2 4001",
                "e1 2379",
                "e1 2380",
                "fd00::1 2379",
                "fd00::1 2380",
                "p.example 443"
            ]
        );
    }

    #[test]
    fn what_guests_are_held_to_is_left_to_the_host_where_nothing_is_said() {
        let filter =
            |text: &str| check(text).map(|settings| (settings.address_filter, settings.filter_required));
        assert_eq!(filter("").unwrap(), (AddressFilter::Learned, false));
        assert_eq!(filter("libvirt: {address_filter: learned}").unwrap(), (AddressFilter::Learned, true));
        assert_eq!(filter("libvirt: {address_filter: mac}").unwrap(), (AddressFilter::Mac, true));
        assert_eq!(filter("libvirt: {address_filter: off}").unwrap(), (AddressFilter::Off, true));
        assert!(filter("libvirt: {address_filter: none}").unwrap_err().contains("learned"));
    }

    #[test]
    fn the_port_is_on_loopback_where_nothing_else_is_said_and_null_closes_it() {
        let listen = |text: &str| check(text).map(|settings| settings.listen.map(|own| own.to_string()));
        assert_eq!(listen("").unwrap().as_deref(), Some(LISTEN));
        assert_eq!(listen("listen: '[::]:9000'").unwrap().as_deref(), Some("[::]:9000"));
        assert_eq!(listen("listen: null").unwrap(), None);
        assert!(listen("listen: 18090").unwrap_err().contains("listen"));
        let open = |text: &str| check(text).unwrap().open_port();
        assert_eq!((open(""), open("listen: null"), open("listen: '[::1]:1'")), (None, None, None));
        assert!(open("listen: 0.0.0.0:1").unwrap().contains("client_ca"));
        assert!(open("listen: 0.0.0.0:1\ntls: {certificate: /a, key: /b}").is_some());
        assert_eq!(open("listen: 0.0.0.0:1\ntls: {certificate: /a, key: /b, client_ca: /c}"), None);
        for (text, wanted) in [
            ("listen: localhost:18090", "listen `localhost:18090` is no address"),
            ("{listen: null, tls: {certificate: /a, key: /b}}", "`listen` is null"),
            ("tls: {certificate: /a}", "key"),
        ] {
            let error = listen(text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn images_come_from_no_file_and_no_address_of_this_host_unless_it_is_named() {
        let defaults = check("").unwrap();
        assert!(defaults.images_allow_addresses.is_empty());
        let own = Path::new("/var/lib/ecompute/image-store");
        assert_eq!(defaults.images_local, [own], "the store that `eschedule` has where nothing is said");
        let named = check("images: {local: [/srv/images], allow_addresses: [127.0.0.0/8, '::1']}").unwrap();
        assert_eq!(named.images_local, [Path::new("/srv/images"), own]);
        assert_eq!(named.images_allow_addresses.len(), 2);
        let store = check("images: {local: [/a], store: {url: 'file:///srv/store'}}").unwrap();
        assert_eq!(store.images_local, [Path::new("/a"), Path::new("/srv/store")]);
        let store = check("images: {store: {url: 's3://bucket/x', region: r}}").unwrap();
        assert!(store.images_local.is_empty() && store.images_store.url() == "s3://bucket/x");
        for (text, key) in [
            ("images: {local: [images]}", "images.local"),
            ("images: {local: [/]}", "images.local"),
            ("images: {local: [/srv/../etc]}", "images.local"),
            ("images: {store: {url: 'http://x'}}", "images.store.url"),
            ("images: {store: {url: 's3://x', access_key: k}}", "images.store.secret_key_file"),
            ("images: {allow_addresses: [localhost]}", "images.allow_addresses"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(key), "{text}: {error}");
        }
    }

    #[test]
    fn all_mistakes_are_told_at_once_by_key() {
        let error = check(
            "uuid: x\nworkers: 0\ntraits: [gpu]\nreserved: {CPU: 1}\nallocation_ratio: {VCPU: -1}\nstate_dir: here\netcd: {user: a}",
        )
        .unwrap_err();
        for wanted in
            ["uuid:", "workers is 0", "`gpu`", "`CPU`", "allocation_ratio.VCPU", "state_dir", "etcd.user"]
        {
            assert!(error.contains(wanted), "{wanted} is missing in: {error}");
        }
    }
}
