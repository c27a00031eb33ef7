//! The packet rules around this node's guests: which ports they have, and when the rules are looked after.
//!
//! Before a guest is started, its ports are let in by the names that the definition gives them. Guests of
//! releases that left the name to libvirt are held by the names they have. Domains that do not run keep
//! their elements, so that one that is started by hand is held too.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ec_guard::{
    Guard, GuardError, Pin, Tap, Want,
    ports::{exists, tap_name},
};
use ec_model::{InstanceId, MacAddr};
use nix::ifaddrs::getifaddrs;
use virt::connect::Connect;

use crate::{
    addresses,
    config::{AddressFilter, LibvirtConfig},
    domain::{self, Found, Whose},
    error::CallError,
    last::LastHolders,
    xml::{self, NetworkXml},
};

/// A name server that takes longer is asked again half a minute later; what it said before stays.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// An instance has at most so many interfaces.
const NICS: u8 = 2;

#[derive(Debug, Default)]
pub(crate) struct Protection {
    guard: Guard,
    /// What the names in the configuration meant when they were last told.
    control: Mutex<HashMap<(String, u16), BTreeSet<SocketAddr>>>,
    /// Whether this process has taken its rules away, where there shall be none.
    released: AtomicBool,
    /// That there can be no rules is said once.
    told: AtomicBool,
    /// Whether the network gives out addresses; not known before the first look.
    learns: AtomicBool,
    last: LastHolders,
}

impl Protection {
    /// Asks what the names of the control endpoints mean now.
    pub(crate) async fn resolve(&self, config: &LibvirtConfig) {
        if config.address_filter == AddressFilter::Off {
            return;
        }
        for name in &config.control {
            match tokio::time::timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host(name.clone())).await {
                Ok(Ok(endpoints)) => drop(self.known().insert(name.clone(), endpoints.collect())),
                Ok(Err(error)) => tracing::debug!(host = name.0, %error, "an endpoint has no address now"),
                Err(_) => tracing::debug!(host = name.0, "no name server tells an endpoint's address now"),
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<(String, u16), BTreeSet<SocketAddr>>> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes rules and elements as they shall be.
    pub(crate) fn sync(&self, connect: &Connect, config: &LibvirtConfig) -> Result<(), CallError> {
        if config.address_filter == AddressFilter::Off && self.released.load(Ordering::Relaxed) {
            return Ok(());
        }
        let network = connect.lookup_network_by_name(&config.network)?;
        let what: NetworkXml = xml::read(&network.xml_desc(0)?).map_err(CallError::Refused)?;
        self.learns.store(what.has_dhcp(), Ordering::Relaxed);
        let leases = addresses::leases(&network)?;
        let leases: BTreeMap<Ipv4Addr, MacAddr> =
            leases.into_iter().filter_map(|(mac, ip)| Some((as_ip4(ip)?, mac))).collect();
        let (mut taps, mut others) = (Vec::new(), BTreeSet::new());
        for domain in connect.list_all_domains(0)? {
            let Ok(instance) = domain.uuid().map(InstanceId::new) else { continue };
            match domain::whose(&domain, config.node)? {
                // One that goes meanwhile needs nothing.
                Whose::Ours(_) => taps.extend(self.taps(&domain, instance, config).unwrap_or_default()),
                Whose::Foreign => others.extend(names(instance)),
                Whose::Nobodys => {}
            }
        }
        let (control, control_known) = {
            let known = self.known();
            let all: BTreeSet<SocketAddr> = known.values().flatten().copied().collect();
            (reachable(&all, &own_addresses()), config.control.iter().all(|name| known.contains_key(name)))
        };
        let want = Want {
            owner: config.node.to_string(),
            bridge: what.has_own_bridge().then(|| network.bridge_name().ok()).flatten(),
            control,
            control_known,
            taps,
            others,
            last: match config.address_filter {
                AddressFilter::Learned => self.last.with(&leases, &config.addresses),
                AddressFilter::Mac | AddressFilter::Off => BTreeMap::new(),
            },
            leases,
            subnets: what.subnets(),
        };
        if config.address_filter == AddressFilter::Off {
            // What an earlier configuration put there. Without the program there is nothing.
            match self.guard.release(&want) {
                Ok(()) | Err(GuardError::NoProgram | GuardError::NotPermitted) => {
                    self.released.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(CallError::NotNow(error.to_string())),
            }
            return Ok(());
        }
        self.judge(config, self.guard.sync(&want))
    }

    /// Lets an instance's ports in before it runs.
    pub(crate) fn admit(&self, config: &LibvirtConfig, instance: InstanceId) -> Result<(), CallError> {
        if config.address_filter == AddressFilter::Off {
            return Ok(());
        }
        let taps = self.named(config, instance);
        self.judge(config, self.guard.admit(&Want { taps, ..Want::default() }))
    }

    /// The ports that an instance has by the names of its definition.
    fn named(&self, config: &LibvirtConfig, instance: InstanceId) -> Vec<Tap> {
        let name = |nic| tap_name(instance.mac(nic));
        let nics = (0..NICS).filter(|nic| *nic == 0 || config.bridge.is_some() || exists(&name(*nic)));
        nics.map(|nic| self.tap(config, instance, nic, name(nic))).collect()
    }

    /// The same for a guest that runs by now, whose definition left the names to libvirt.
    pub(crate) fn admit_running(
        &self,
        connect: &Connect,
        config: &LibvirtConfig,
        instance: InstanceId,
    ) -> Result<(), CallError> {
        if config.address_filter == AddressFilter::Off {
            return Ok(());
        }
        if exists(&tap_name(instance.mac(0))) {
            self.guard.settle(&Want { taps: self.named(config, instance), ..Want::default() });
            return Ok(());
        }
        let Found::Ours(domain) = domain::find(connect, config.node, instance)? else { return Ok(()) };
        let want = Want { taps: self.taps(&domain, instance, config)?, ..Want::default() };
        self.judge(config, self.guard.admit(&want))?;
        self.guard.settle(&want);
        Ok(())
    }

    /// Forgets an instance that is gone. What cannot be taken out now goes with a later sync.
    pub(crate) fn dismiss(&self, config: &LibvirtConfig, instance: InstanceId) {
        if config.address_filter == AddressFilter::Off {
            return;
        }
        if let Err(error) = self.guard.dismiss(&names(instance).collect::<Vec<_>>()) {
            tracing::debug!(%instance, %error, "its packet rules stay for now");
        }
    }

    fn tap(&self, config: &LibvirtConfig, instance: InstanceId, nic: u8, name: String) -> Tap {
        let learned = nic == 0
            && config.address_filter == AddressFilter::Learned
            && self.learns.load(Ordering::Relaxed);
        Tap { name, mac: instance.mac(nic), pin: if learned { Pin::Learned } else { Pin::Mac } }
    }

    /// The ports that a domain has, or will have when it is started.
    fn taps(
        &self,
        domain: &virt::domain::Domain,
        instance: InstanceId,
        config: &LibvirtConfig,
    ) -> Result<Vec<Tap>, CallError> {
        if exists(&tap_name(instance.mac(0))) || !domain.is_active()? {
            return Ok(self.named(config, instance));
        }
        let running = xml::taps(&domain.xml_desc(0)?).map_err(CallError::Refused)?;
        let of = |mac: MacAddr| (0..NICS).find(|nic| instance.mac(*nic) == mac);
        let named = running.into_iter().filter_map(|(mac, name)| Some((of(mac)?, name)));
        Ok(named.map(|(nic, name)| self.tap(config, instance, nic, name)).collect())
    }

    /// Where rules cannot be, guests run without them if the configuration does not forbid it, and the
    /// agent says so.
    fn judge(&self, config: &LibvirtConfig, outcome: Result<(), GuardError>) -> Result<(), CallError> {
        match outcome {
            Ok(()) => {
                if self.told.swap(false, Ordering::Relaxed) {
                    tracing::info!("packet rules hold guests to their own addresses now");
                }
                Ok(())
            }
            // A host that is busy, as when it starts, says nothing about whether it can have rules: no guest starts without them for that.
            Err(error @ GuardError::Silent(_)) => Err(CallError::NotNow(error.to_string())),
            Err(error @ GuardError::Refused(_)) if self.guard.is_loaded() => {
                Err(CallError::NotNow(error.to_string()))
            }
            Err(error) if config.filter_required => {
                Err(CallError::Refused(format!("libvirt.address_filter is set, but {error}")))
            }
            Err(error) => {
                if !self.told.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        "guests are not held to their own addresses, and reach this host's services: {error} \
                         (`libvirt.address_filter: off` says that this is meant)"
                    );
                }
                Ok(())
            }
        }
    }
}

/// What an instance's ports are called, whoever's it is.
fn names(instance: InstanceId) -> impl Iterator<Item = String> {
    (0..NICS).map(move |nic| tap_name(instance.mac(nic)))
}

fn as_ip4(ip: IpAddr) -> Option<Ipv4Addr> {
    match ip {
        IpAddr::V4(ip) => Some(ip),
        IpAddr::V6(_) => None,
    }
}

/// Every address of this host by which somebody else can reach it.
fn own_addresses() -> BTreeSet<IpAddr> {
    let addresses = getifaddrs().into_iter().flatten().filter_map(|interface| interface.address);
    addresses
        .filter_map(|address| {
            let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
        })
        .filter(|ip| !ip.is_loopback())
        .collect()
}

/// Where guests would find these endpoints: what listens on this host may listen on all its addresses.
fn reachable(endpoints: &BTreeSet<SocketAddr>, own: &BTreeSet<IpAddr>) -> BTreeSet<SocketAddr> {
    let mut found = BTreeSet::new();
    for endpoint in endpoints {
        let ip = endpoint.ip().to_canonical();
        if ip.is_loopback() || ip.is_unspecified() || own.contains(&ip) {
            found.extend(own.iter().map(|ip| SocketAddr::new(*ip, endpoint.port())));
        } else {
            found.insert(SocketAddr::new(ip, endpoint.port()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_guest_starts_without_rules_because_nft_is_slow() {
        let protection = Protection::default();
        let mut config = LibvirtConfig::new("00000000-0000-4000-8000-000000000001".parse().unwrap());
        for required in [false, true] {
            config.filter_required = required;
            let silent = GuardError::Silent(Duration::from_secs(10));
            let judged = protection.judge(&config, Err(silent));
            assert!(matches!(judged, Err(CallError::NotNow(why)) if why == "nft did not end in 10 s"));
        }
        config.filter_required = false;
        assert!(protection.judge(&config, Err(GuardError::NoProgram)).is_ok());
    }

    #[test]
    fn what_listens_here_is_closed_on_every_address_of_this_host() {
        let own: BTreeSet<IpAddr> =
            ["10.0.0.1", "192.168.122.1", "fd00::1"].map(|ip| ip.parse().unwrap()).into();
        let told = |endpoints: &[&str]| {
            let endpoints = endpoints.iter().map(|text| text.parse().unwrap()).collect();
            reachable(&endpoints, &own).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let all = ["10.0.0.1:2379", "192.168.122.1:2379", "[fd00::1]:2379"];
        assert_eq!(told(&["127.0.0.1:2379", "[::1]:2379"]), all);
        assert_eq!(told(&["10.0.0.1:2379"]), all);
        assert_eq!(told(&["10.0.0.9:8080", "[fd00::9]:8080"]), ["10.0.0.9:8080", "[fd00::9]:8080"]);
    }
}
