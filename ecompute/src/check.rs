//! `ecompute --check`: is everything there that an agent needs, and if not, how to mend it.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

use ec_guard::{
    Guard,
    ports::{how_to_learn_from_what_rules_see, learns_unseen},
};
use ec_hypervisor::{AddressRoom, Hypervisor};
use ec_image::StoreSection;
use ec_libvirt::{AddressFilter, LibvirtHypervisor};
use ec_metadata::{Holder, MetadataConfig, RecordDir, holder};
use ec_model::{Alive, NodeId, Resources, decode};
use ec_pki::{Certificate, endings};
use ec_placement_client::{PlacementClient, PlacementError, Provider};
use ec_plan::host::{Room, addresses_left, more_addresses};
use ec_runtime::{
    Host,
    config::exposed,
    exit::{FAILED, Failure, UNREACHABLE, chain, print},
};
use ec_store::{EtcdStore, Store, StoreError};
use nix::unistd::{AccessFlags, Group, Uid, access, getgroups};

use crate::{
    agent::{libvirt_config, sealed},
    config::Settings,
    firewall, health, hosted, identity, inventory,
    port::{Port, PortError},
    presence, storage,
};

/// What one makes of an etcd and a placement that know nothing of each other.
const MIXED: &str =
    "they seem to be of two clusters: check `etcd` (with its prefix) and `placement` in compute.yaml";
/// A probe that takes longer counts as failed.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// Less free disk than this and the next image will not fit.
const DISK_LOW_GB: u64 = 2;

/// What was found, or the exit code and what is wrong and how to mend it.
type Found<T = String> = Result<T, (u8, String)>;

/// One line of the answer.
struct Line {
    what: &'static str,
    found: Found,
}

/// Probes everything, prints a line for each, and answers the exit code.
pub async fn check(settings: &Settings, file: Option<PathBuf>) -> Result<u8, Failure> {
    let named = file
        .as_ref()
        .map_or_else(|| "defaults (no compute.yaml)".to_owned(), |path| path.display().to_string());
    let lines = [
        Line { what: "configuration", found: Ok(named) },
        Line { what: "etcd", found: bounded(etcd(settings)).await },
        Line { what: "placement", found: bounded(placement(settings)).await },
        Line { what: "cluster", found: bounded(cluster_of_this_node(settings)).await },
        Line { what: "libvirt", found: bounded(libvirt(settings)).await },
        Line { what: "network", found: bounded(network(settings)).await },
        Line { what: "guests", found: guests(settings).await },
        Line { what: "metadata", found: metadata(settings).await },
        Line { what: "disk", found: of_storage(settings, disk).await },
        Line { what: "host", found: of_storage(settings, host).await },
        Line { what: "certificates", found: certificates(settings) },
        Line { what: "port", found: port(settings).await },
    ];
    let mut code = 0;
    let mut text = String::new();
    // What others say of themselves makes no line of its own, and moves nobody's cursor.
    let plain = |text: &str| text.replace(char::is_control, "?");
    for Line { what, found } in &lines {
        match found.as_ref().map(|found| plain(found)).map_err(|(code, found)| (code, plain(found))) {
            Ok(found) => text.push_str(&format!("{what:<14} ok      {found}\n")),
            // Nothing that must be mended: code 0.
            Err((0, found)) => text.push_str(&format!("{what:<14} WARNING {found}\n")),
            Err((failure, found)) => {
                text.push_str(&format!("{what:<14} FAILED  {found}\n"));
                code = code.max(*failure);
            }
        }
    }
    for warning in warnings(settings, file.as_deref()).await {
        text.push_str(&format!("{:<14} WARNING {warning}\n", ""));
    }
    print(&text)?;
    Ok(code)
}

/// What does not keep an agent from working, and should be known: secrets that everybody may read, services that
/// let everybody in, an etcd with known faults. Asks etcd; where that does not answer, nothing is said of it.
pub async fn warnings(settings: &Settings, file: Option<&Path>) -> Vec<String> {
    let (etcd, placement) = (&settings.etcd, &settings.placement);
    let own = file.filter(|_| etcd.holds_secret() || placement.holds_secret()).into_iter();
    let key = settings.tls.as_ref().map(|tls| tls.key.as_path());
    let image_store = settings.images_store.secret_file();
    let mut warnings =
        exposed(own.chain(etcd.secret_files()).chain(placement.secret_files()).chain(key).chain(image_store));
    warnings.extend(endings(settings.certificates()));
    warnings.extend(etcd.unused());
    warnings.extend(etcd.open_door().await);
    warnings.extend(placement.open_door());
    warnings.extend(settings.open_port());
    let known = settings.clone();
    // Walks through directories, which may take long, or for ever: a line of the check tells of that.
    let machine = Host::default();
    let withheld = machine.blocking(move || withheld(&known));
    if let Ok(Ok(withheld)) = tokio::time::timeout(PROBE_TIMEOUT, withheld).await {
        warnings.extend(withheld);
    }
    warnings.extend(hosted::shadowed());
    let server = async { EtcdStore::connect(settings.etcd.clone()).await?.server().await };
    if let Ok(Ok(server)) = tokio::time::timeout(PROBE_TIMEOUT, server).await {
        warnings.extend(server.advice());
    }
    warnings
}

/// What speaks against etcd and placement being of one cluster, as far as both answer. Only where etcd shows hardly
/// anybody: where many live, all is well, and they may all start at once.
pub async fn mixed(settings: &Settings) -> Option<String> {
    let alive =
        async { EtcdStore::connect(settings.etcd.clone()).await?.keys(&settings.keys.all_alive()).await };
    match tokio::time::timeout(PROBE_TIMEOUT, alive).await {
        Ok(Ok(alive)) if alive.len() <= 1 => {}
        _ => return None,
    }
    match tokio::time::timeout(PROBE_TIMEOUT, cluster(settings)).await {
        Ok(Err((code, found))) if code != UNREACHABLE => Some(found),
        _ => None,
    }
}

/// What the configuration keeps back from guests that it hardly means to.
fn withheld(settings: &Settings) -> Vec<String> {
    let missing = settings.images_local.iter().filter(|directory| !directory.is_dir());
    let store = &settings.images_store;
    let mut found: Vec<String> = missing
        .filter_map(|directory| {
            // Nobody said that there is one.
            let key = match store.directory().as_ref() == Some(directory) {
                true if store.url() == StoreSection::DEFAULT_URL => return None,
                true => "images.store",
                false => "images.local",
            };
            Some(format!("{key}: {} is no directory of this host", directory.display()))
        })
        .collect();
    if let Ok(measured) = inventory::measure(settings) {
        let offered = inventory::inventory(&measured, settings, &Resources::new());
        // Of the disk, a check has a line of its own.
        let none = offered.iter().filter(|(class, own)| own.reserved >= own.total && *class != "DISK_GB");
        found.extend(none.map(|(class, own)| {
            format!("no {class} is offered: `reserved` keeps back all {} of this host", own.total)
        }));
    }
    found
}

async fn bounded(probe: impl Future<Output = Found>) -> Found {
    tokio::time::timeout(PROBE_TIMEOUT, probe)
        .await
        .unwrap_or_else(|_| Err((UNREACHABLE, format!("no answer within {} s", PROBE_TIMEOUT.as_secs()))))
}

/// Looks at this host's file systems, of which one that others serve may not answer.
async fn of_storage(settings: &Settings, look: fn(&Settings) -> Found) -> Found {
    let (known, machine) = (settings.clone(), Host::default());
    let looked = machine.blocking(move || look(&known));
    match tokio::time::timeout(PROBE_TIMEOUT, looked).await {
        Ok(looked) => looked.unwrap_or_else(|error| Err((FAILED, error.to_string()))),
        Err(_) => Err((FAILED, storage::silent(&settings.storage()))),
    }
}

fn etcd_failed(error: StoreError) -> (u8, String) {
    if error.is_transient() {
        (UNREACHABLE, format!("{error}; start etcd there, or set `etcd` in compute.yaml"))
    } else {
        (FAILED, format!("{error}; see `etcd` in compute.yaml"))
    }
}

fn placement_failed(error: PlacementError) -> (u8, String) {
    let text = chain(&error);
    if error.is_transient() {
        (UNREACHABLE, format!("{text}; start placement there, or set `placement` in compute.yaml"))
    } else {
        (FAILED, format!("{text}; see `placement` in compute.yaml"))
    }
}

/// Whether this host is fit for new work.
fn host(settings: &Settings) -> Found {
    let troubles = health::troubles(settings);
    match troubles.is_empty() {
        true => Ok("memory and disks have room for new work".to_owned()),
        false => {
            let whys: Vec<_> = troubles.into_iter().map(|trouble| trouble.why).collect();
            Err((0, format!("{}: nothing new is placed here until that is better", whys.join("; "))))
        }
    }
}

/// Which of the certificates that there are ends first. What is wrong with one is told where it is used, and that one ends soon, among
/// the warnings.
fn certificates(settings: &Settings) -> Found {
    let known = settings.certificates().filter_map(|file| Some((Certificate::read(file).ok()?, file)));
    Ok(known.min_by_key(|(certificate, _)| certificate.ends).map_or_else(
        || "none".to_owned(),
        |(first, file)| format!("the first to run out, on {}, is {}", first.last_day(), file.display()),
    ))
}

async fn etcd(settings: &Settings) -> Found {
    let store = EtcdStore::connect(settings.etcd.clone()).await.map_err(etcd_failed)?;
    let store = sealed(settings, store).map_err(etcd_failed)?;
    let (_, revision) = Store::get(&store, &settings.keys.all_alive()).await.map_err(etcd_failed)?;
    // A user of its own need not be let in on that.
    let trouble = Store::server(&store).await.ok().and_then(|server| server.trouble());
    if let Some((trouble, mend)) = trouble {
        return Err((FAILED, format!("{trouble}: {mend}")));
    }
    Ok(format!("{} at revision {revision}", settings.etcd.endpoints.join(", ")))
}

async fn placement(settings: &Settings) -> Found {
    let client = PlacementClient::new(&settings.placement).map_err(placement_failed)?;
    let newest = client.probe().await.map_err(placement_failed)?;
    Ok(format!("{} speaks up to {newest}", client.endpoint()))
}

/// As [`cluster`], and whether this node's own agent is where placement thinks that it is: an agent that ends
/// properly locks what it offers.
async fn cluster_of_this_node(settings: &Settings) -> Found {
    let found = cluster(settings).await?;
    let Some(me) = settings.uuid.or_else(|| identity::kept(&settings.state_dir)) else { return Ok(found) };
    let store = EtcdStore::connect(settings.etcd.clone()).await.map_err(etcd_failed)?;
    if store.get(&settings.keys.alive(me)).await.map_err(etcd_failed)?.0.is_some() {
        return Ok(found);
    }
    let client = PlacementClient::new(&settings.placement).map_err(placement_failed)?;
    let is_offered = match client.inventory(me).await {
        Ok(inventory) => inventory.get("VCPU").is_some_and(|own| own.reserved < own.total),
        Err(PlacementError::NotFound(_)) => false,
        Err(error) => return Err(placement_failed(error)),
    };
    if is_offered {
        return Err((
            0,
            format!(
                "placement offers what this node {me} has, and etcd shows no agent of it: its agent was killed, or {MIXED}"
            ),
        ));
    }
    Ok(found)
}

/// Whether etcd and placement are of one cluster, and this node has its place there.
async fn cluster(settings: &Settings) -> Found {
    let store = EtcdStore::connect(settings.etcd.clone()).await.map_err(etcd_failed)?;
    let client = PlacementClient::new(&settings.placement).map_err(placement_failed)?;
    let keys = &settings.keys;
    let alive = store.keys(&keys.all_alive()).await.map_err(etcd_failed)?;
    let alive = alive.iter().filter_map(|key| keys.parse_alive(key).ok()).collect();
    let speaks_of = match store.keys(&keys.all_statuses()).await {
        // An agent's own user need not read what is of other nodes.
        Err(StoreError::Refused(_)) => Vec::new(),
        other => other.map_err(etcd_failed)?,
    };
    let speaks_of = speaks_of.iter().filter_map(|key| Some(keys.parse_status(key).ok()?.0)).collect();
    let providers = client.providers().await.map_err(placement_failed)?;
    let me = settings.uuid.or_else(|| identity::kept(&settings.state_dir));
    if let Some(other) = other_agent(&store, settings, me).await? {
        return Err((FAILED, other));
    }
    fits(me, &settings.name, &alive, &speaks_of, &providers)
}

/// Who is this node already, where that is not the agent of this machine and state directory.
async fn other_agent(
    store: &EtcdStore,
    settings: &Settings,
    me: Option<NodeId>,
) -> Result<Option<String>, (u8, String)> {
    let Some(me) = me else { return Ok(None) };
    let (pair, _) = store.get(&settings.keys.agent(me)).await.map_err(etcd_failed)?;
    let Some(other) = pair.and_then(|pair| decode::<Alive>(&pair.value).ok()) else { return Ok(None) };
    let ours = presence::machine(&settings.state_dir).ok();
    Ok((ours.as_ref() != Some(&other.machine)).then(|| {
        format!(
            "node {me} is served by another agent, on host {} (alive since {}), or was by this one before the host was started anew: where two machines were made from one image, remove {} on the one that is not to be it and, in a cluster, join it with a bundle of its own",
            other.host,
            other.started_at,
            settings.state_dir.join("uuid").display()
        )
    }))
}

/// The decision of [`cluster`].
fn fits(
    me: Option<NodeId>,
    name: &str,
    alive: &BTreeSet<NodeId>,
    speaks_of: &BTreeSet<NodeId>,
    providers: &[Provider],
) -> Found {
    if let Some(owner) = providers.iter().find(|provider| provider.name == name && Some(provider.uuid) != me)
    {
        let me =
            me.map_or_else(|| "this node, which has no uuid yet".to_owned(), |me| format!("this node {me}"));
        let owner = owner.uuid;
        let helps = if alive.contains(&owner) {
            ", whose agent is alive: set another `name`".to_owned()
        } else {
            format!(
                ": set another `name`, or `uuid: {owner}` to take it over, or delete that provider (`eschedule node forget`, where it is of a node that will never come back)"
            )
        };
        return Err((
            FAILED,
            format!("the name `{name}` belongs to resource provider {owner}, not to {me}{helps}"),
        ));
    }
    let known: BTreeSet<NodeId> = providers.iter().map(|provider| provider.uuid).collect();
    if !alive.is_empty() && alive.is_disjoint(&known) {
        return Err((
            FAILED,
            format!("etcd shows {} living nodes and placement knows none of them; {MIXED}", alive.len()),
        ));
    }
    let spoken_of = speaks_of.iter().chain(alive).chain(&me).any(|node| known.contains(node));
    if !known.is_empty() && !spoken_of {
        // Others may use placement, too.
        return Err((
            0,
            format!(
                "placement knows {} nodes and etcd speaks of none of them; if one of them should be an agent of this etcd, {MIXED}",
                known.len()
            ),
        ));
    }
    Ok(format!("{} nodes alive, {} known to placement", alive.len(), known.len()))
}

async fn libvirt(settings: &Settings) -> Found {
    let hypervisor = hypervisor(settings)?;
    let host = hypervisor
        .probe()
        .await
        .map_err(|error| (FAILED, format!("{}; {}", chain(&error), libvirt_mend(settings))))?;
    hypervisor.probe_pool().await.map_err(|error| (FAILED, chain(&error)))?;
    Ok(format!("{}, guests run as {}", host.version, host.virt_type))
}

/// What to do where libvirt does not answer: most people may not speak to the system's.
fn libvirt_mend(settings: &Settings) -> &'static str {
    let of_the_system = settings.libvirt_uri.contains("/system");
    if of_the_system && !Uid::effective().is_root() && !in_group("libvirt") {
        "run as root or in group libvirt"
    } else {
        "start libvirtd, or set `libvirt.uri` in compute.yaml"
    }
}

fn in_group(name: &str) -> bool {
    let group = Group::from_name(name).ok().flatten();
    group.is_some_and(|group| getgroups().is_ok_and(|groups| groups.contains(&group.gid)))
}

async fn network(settings: &Settings) -> Found {
    let hypervisor = hypervisor(settings)?;
    let bridge = hypervisor.probe_network().await.map_err(|error| {
        let mend = if error.is_transient() {
            libvirt_mend(settings)
        } else {
            "`virsh net-list --all` shows what there is; set `libvirt.network` and `bridge` to that"
        };
        (FAILED, format!("{}; {mend}", chain(&error)))
    })?;
    let first = match bridge {
        Some(bridge) => format!("{} on bridge {bridge}", settings.network),
        None => format!("{}, which has no bridge: there will be no metadata service", settings.network),
    };
    let found = match &settings.bridge {
        Some(second) => format!("{first}, second interface on {second}"),
        None => first,
    };
    // One that does not run gives none, nor tells.
    match hypervisor.address_room().await.ok().flatten() {
        None => Ok(found),
        Some(room) => with_addresses(found, &room),
    }
}

fn with_addresses(found: String, room: &AddressRoom) -> Found {
    let (network, left, total) = (&room.network, room.left, room.total);
    let told = format!("{found}; {}", addresses_left(network, Room { left, total }));
    if left > 0 {
        return Ok(told);
    }
    let next = room.next.map(|next| format!(", the next in {} min", next.as_secs().div_ceil(60)));
    Err((0, format!("{told}{}: {}", next.unwrap_or_default(), more_addresses(network))))
}

/// Whether guests can be held to their own addresses here.
#[cfg_attr(
    not(test),
    expect(clippy::disallowed_methods, reason = "`--check` asks the machine that it runs on")
)]
async fn guests(settings: &Settings) -> Found {
    let held = match settings.address_filter {
        AddressFilter::Learned => "to the addresses that they were given",
        AddressFilter::Mac => "to their hardware addresses",
        AddressFilter::Off => {
            return Ok("libvirt.address_filter is off: they can take each other's addresses".to_owned());
        }
    };
    let probed = tokio::task::spawn_blocking(Guard::probe).await;
    match probed.map_err(|error| (FAILED, error.to_string()))? {
        Ok(()) => match deceivable(settings).await {
            None => Ok(format!("packet rules hold them {held}")),
            Some(bridge) => Err((
                0,
                format!(
                    "packet rules hold them {held}, but bridge {bridge} learns from frames that no rule sees, so that a guest can take over what is sent to another, and the agent cannot change that: {}",
                    how_to_learn_from_what_rules_see(&bridge)
                ),
            )),
        },
        Err(error) => {
            let meant = "`libvirt.address_filter: off` in compute.yaml does without";
            Err((FAILED, format!("they can take each other's addresses: {error}; {meant}")))
        }
    }
}

/// Of the bridges of guests one that cannot be kept from learning what rules do not see. That there is none is told elsewhere.
async fn deceivable(settings: &Settings) -> Option<String> {
    own_bridge(settings).await.into_iter().chain(settings.bridge.clone()).find(|bridge| learns_unseen(bridge))
}

/// The bridge of the guests' network, where that is to be had.
async fn own_bridge(settings: &Settings) -> Option<String> {
    let network = async { hypervisor(settings).ok()?.probe_network().await.ok().flatten() };
    tokio::time::timeout(PROBE_TIMEOUT, network).await.ok().flatten()
}

/// Whether guests can be answered at the address where they ask, and can ask there.
async fn metadata(settings: &Settings) -> Found {
    let answered = answered(settings).await?;
    match own_bridge(settings).await.and_then(|bridge| firewall::in_the_way(&bridge)) {
        None => Ok(answered),
        Some(why) => Err((0, format!("{answered}, but {why}"))),
    }
}

async fn answered(settings: &Settings) -> Found {
    let (address, port) = (MetadataConfig::ADDRESS, MetadataConfig::PORT);
    let at = format!("{address}:{port}");
    match holder(address, port).await {
        Ok(None) => Ok(format!("{at} is free")),
        Ok(Some(Holder::Server)) if identity::is_busy(&settings.state_dir) => Ok(format!(
            "{at} is taken, as it seems by this node's agent, which runs, or by a server that answers for it"
        )),
        Ok(Some(Holder::Server)) => Ok(format!(
            "{at} is taken by another server, which answers for this node's guests, too, if it is one of ours"
        )),
        Ok(Some(Holder::Stranger)) => match has_bridge(settings).await {
            false => Ok(format!("none, since {} has no bridge", settings.network)),
            true => Err((
                FAILED,
                format!(
                    "another program has port {port} of all addresses, so guests get no metadata: `ss -ltnp sport = :{port}` says which; have it listen at addresses of its own"
                ),
            )),
        },
        Err(error) => match has_bridge(settings).await {
            false => Ok(format!("none, since {} has no bridge", settings.network)),
            true => Err((FAILED, format!("guests cannot be answered at {at}: {error}; run as root"))),
        },
    }
}

/// Whether the network has a bridge, or may have one: where libvirt does not answer, another line tells.
async fn has_bridge(settings: &Settings) -> bool {
    let Ok(hypervisor) = hypervisor(settings) else { return true };
    !matches!(tokio::time::timeout(PROBE_TIMEOUT, hypervisor.probe_network()).await, Ok(Ok(None)))
}

fn hypervisor(settings: &Settings) -> Found<LibvirtHypervisor> {
    // The node's own uuid does not matter for probing; nothing is made under it.
    let config = libvirt_config(settings, NodeId::new(uuid::Uuid::nil()));
    LibvirtHypervisor::connect(config).map_err(|error| (FAILED, chain(&error)))
}

fn disk(settings: &Settings) -> Found {
    let measured = inventory::measure(settings).map_err(|error| (FAILED, error))?;
    let place = settings.state_dir.display();
    let records = RecordDir::reader(settings.records());
    if let Some(node) = settings.uuid {
        identity::refuse_other(&settings.state_dir, &records, node)
            .map_err(|error| (FAILED, chain(&error)))?;
    }
    let is_there = || {
        // Records that cannot be read say nothing here: the agent tells at its start.
        let recorded = storage::recorded(&records).unwrap_or_default();
        storage::place::check(&settings.state_dir, &recorded)?;
        storage::refuse_moved(settings.shared.as_ref(), &settings.state_dir, &recorded)?;
        storage::check(settings)
    };
    is_there().map_err(|error| (FAILED, error.to_string()))?;
    // Where the directory is not there yet, it is made in the nearest one that is.
    let existing = settings.state_dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if let Err(error) = access(existing, AccessFlags::W_OK | AccessFlags::X_OK) {
        return Err((
            FAILED,
            format!(
                "{} cannot be written to ({error}), so there can be no {place}: run as root, or set `state_dir` to a directory of yours",
                existing.display()
            ),
        ));
    }
    if measured.disk_free_gb < DISK_LOW_GB {
        let free = measured.disk_free_gb;
        return Err((FAILED, format!("{free} GiB free at {place}: make room, or set `state_dir` elsewhere")));
    }
    let free = format!("{} of {} GiB free at {place}", measured.disk_free_gb, measured.disk_gb);
    match inventory::disk_offered_gb(&measured, settings) {
        0 => Err((
            FAILED,
            format!(
                "{free}, and none for guests' disks once the image cache is full: make room, or lower `images.max_gb`, or set `reserved: {{DISK_GB: …}}`"
            ),
        )),
        offered => Ok(format!("{free}, {offered} GiB for guests' disks")),
    }
}

/// Whether the agent can have its own port.
async fn port(settings: &Settings) -> Found {
    let Some(listen) = settings.listen else { return Ok("none, since `listen` is null".to_owned()) };
    let tls = if settings.tls.is_some() { " with TLS" } else { "" };
    match Port::open(settings).await {
        Ok(_) => Ok(format!("{listen}{tls} is free")),
        Err(PortError::Taken { .. }) if identity::is_busy(&settings.state_dir) => {
            Ok(format!("{listen}{tls} is taken, as it seems by this node's agent, which runs"))
        }
        Err(error) => Err((FAILED, error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn node(n: u128) -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(n))
    }

    fn judged(me: Option<u128>, alive: &[u128], speaks_of: &[u128], providers: &[(u128, &str)]) -> Found {
        let providers: Vec<_> = providers
            .iter()
            .map(|(n, name)| Provider {
                uuid: node(*n),
                name: (*name).to_owned(),
                generation: 0,
                root_provider_uuid: None,
            })
            .collect();
        let nodes = |of: &[u128]| of.iter().copied().map(node).collect();
        fits(me.map(node), "me", &nodes(alive), &nodes(speaks_of), &providers)
    }

    #[test]
    fn a_network_that_has_no_address_left_is_warned_of_with_when_it_has_one_again() {
        let told = |left| {
            let next = Some(Duration::from_secs(61));
            with_addresses("n on bridge b".into(), &AddressRoom { network: "n".into(), left, total: 9, next })
        };
        assert_eq!(told(1).unwrap(), "n on bridge b; 1 of 9 addresses of the network n are free");
        let (code, why) = told(0).unwrap_err();
        assert_eq!(code, 0);
        assert!(why.contains("0 of 9 addresses of the network n are free, the next in 2 min: "), "{why}");
        assert!(why.contains("`virsh net-edit n`"), "{why}");
    }

    #[test]
    fn a_name_that_another_uuid_has_is_told_before_the_start() {
        let (code, why) = judged(Some(1), &[2], &[], &[(2, "me")]).unwrap_err();
        assert_eq!(code, FAILED);
        assert!(why.contains("the name `me` belongs to") && why.contains(&node(2).to_string()), "{why}");
        assert!(
            why.ends_with("whose agent is alive: set another `name`"),
            "nobody takes over what lives: {why}"
        );
        assert!(judged(Some(1), &[3], &[], &[(2, "me")]).unwrap_err().1.contains("to take it over"));
        assert!(judged(None, &[2], &[], &[(2, "me")]).unwrap_err().1.contains("no uuid yet"));
        assert!(judged(Some(1), &[], &[], &[(1, "me")]).is_ok());
    }

    #[test]
    fn two_clusters_are_told_and_one_is_not() {
        for (alive, speaks_of, providers) in [
            (&[][..], &[][..], &[][..]),
            (&[2], &[], &[(2, "b")]),
            // A node of an agent that registers at this moment.
            (&[2, 3], &[], &[(2, "b")]),
            // All agents have ended.
            (&[], &[2], &[(2, "b")]),
        ] {
            assert!(
                judged(Some(1), alive, speaks_of, providers).is_ok(),
                "{alive:?} {speaks_of:?} {providers:?}"
            );
        }
        // This one's own provider is there from its last start.
        assert!(judged(Some(1), &[], &[], &[(1, "me"), (2, "b")]).is_ok());
        for (alive, providers, wanted) in
            [(&[7][..], &[(2, "b")][..], FAILED), (&[7], &[], FAILED), (&[], &[(2, "b")], 0)]
        {
            let (code, why) = judged(Some(1), alive, &[], providers).unwrap_err();
            assert!(code == wanted && why.contains("two clusters"), "{code} {why}");
        }
    }

    #[test]
    fn guests_of_another_node_or_place_are_told_before_the_start() {
        let state = tempfile::tempdir().unwrap();
        let text = format!("state_dir: {}\nuuid: {}\n", state.path().display(), node(2));
        let file = ec_runtime::config::parse(&text, Path::new("compute.yaml")).unwrap();
        let settings = Settings::check(&file).unwrap();
        std::fs::write(state.path().join("uuid"), node(1).to_string()).unwrap();
        let told = || disk(&settings).is_err_and(|(_, why)| why.contains("the guests here are node"));
        assert!(!told(), "there are none");
        std::fs::create_dir(settings.records()).unwrap();
        std::fs::write(settings.records().join(format!("{}.json", uuid::Uuid::nil())), "{}").unwrap();
        assert!(told());
        std::fs::write(state.path().join("uuid"), node(2).to_string()).unwrap();
        let is_moved = || disk(&settings).is_err_and(|(_, why)| why.contains("was /elsewhere when"));
        assert!(!is_moved());
        std::fs::write(state.path().join("place"), "/elsewhere\n").unwrap();
        assert!(is_moved());
    }

    #[tokio::test(start_paused = true)]
    async fn storage_that_does_not_answer_is_told_of_and_holds_up_nothing() {
        let (state, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let text = format!(
            "state_dir: {}\nshared_storage: {{name: nfs, path: {}}}\n",
            state.path().display(),
            place.path().display()
        );
        let file = ec_runtime::config::parse(&text, Path::new("compute.yaml")).unwrap();
        let settings = Settings::check(&file).unwrap();
        // Whoever reads it waits until somebody writes.
        let mark = place.path().join("etcd-compute.storage");
        assert!(std::process::Command::new("mkfifo").arg(&mark).status().unwrap().success());
        for look in [disk, host] {
            let (found, ()) =
                tokio::join!(of_storage(&settings, look), tokio::time::advance(PROBE_TIMEOUT * 2));
            let (code, why) = found.unwrap_err();
            assert!(code == FAILED && why.contains("has not answered for 10 s"), "{why}");
        }
        // What was begun ends before this does.
        std::fs::File::options().read(true).write(true).open(&mark).unwrap().write_all(b"nfs\n").unwrap();
    }
}
