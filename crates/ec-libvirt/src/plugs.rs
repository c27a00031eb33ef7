//! Guests' ports that fell out of their bridge.
//!
//! Whoever ends a network takes its bridge away, and whoever starts it makes another one. Guests that run meanwhile are in none then,
//! and libvirt puts them into the new one only when it is started anew itself. They are put back here; but a port that is out of a
//! bridge as old as itself was taken out of it by somebody, who may mean it.

use std::path::Path;

use ec_guard::ports::{exists, tap_name};
use nix::net::if_::if_nametoindex;
use rtnetlink::LinkUnspec;
use virt::connect::Connect;

use crate::{
    config::LibvirtConfig,
    domain::{self, Whose},
    error::CallError,
    prepare::bridge,
    xml,
};

/// A port and the bridge that it belongs into, by the numbers that the kernel gave them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fallen {
    tap: String,
    index: u32,
    bridge: String,
    bridge_index: u32,
}

/// The ports of this node's guests that are in no bridge, where that they belong into was made after them.
pub(crate) fn fallen(connect: &Connect, config: &LibvirtConfig) -> Result<Vec<Fallen>, CallError> {
    let bridges = [bridge(connect, config)?, config.bridge.clone()];
    let mut found = Vec::new();
    for domain in connect.list_all_domains(virt::sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE)? {
        let Ok(instance) = domain.uuid().map(ec_model::InstanceId::new) else { continue };
        let Whose::Ours(_) = domain::whose(&domain, config.node)? else { continue };
        // Those of an older release have the names that libvirt gave them.
        let named = |nic| (instance.mac(nic), tap_name(instance.mac(nic)));
        let taps = match exists(&tap_name(instance.mac(0))) {
            true => vec![named(0), named(1)],
            false => xml::taps(&domain.xml_desc(0)?).map_err(CallError::Refused)?,
        };
        for (mac, tap) in taps {
            let bridge = (0..).zip(&bridges).find(|(nic, _)| instance.mac(*nic) == mac);
            found.extend(bridge.and_then(|(_, bridge)| out_of(&tap, bridge.as_ref()?)));
        }
    }
    Ok(found)
}

fn out_of(tap: &str, bridge: &str) -> Option<Fallen> {
    let device = |name: &str| Path::new("/sys/class/net").join(name);
    let (index, bridge_index) = (if_nametoindex(tap).ok()?, if_nametoindex(bridge).ok()?);
    let is_out = device(tap).join("master").symlink_metadata().is_err();
    // Numbers are given in the order in which devices are made.
    (is_out && index < bridge_index && device(bridge).join("bridge").is_dir()).then(|| Fallen {
        tap: tap.to_owned(),
        index,
        bridge: bridge.to_owned(),
        bridge_index,
    })
}

/// Puts them back. What goes meanwhile needs nothing.
pub(crate) async fn put_back(fallen: Vec<Fallen>) {
    if fallen.is_empty() {
        return;
    }
    let (connection, handle) = match rtnetlink::new_connection() {
        Ok((connection, handle, _)) => (tokio::spawn(connection), handle),
        Err(error) => {
            tracing::warn!(%error, "guests' ports that fell out of their bridge stay out of it");
            return;
        }
    };
    for Fallen { tap, index, bridge, bridge_index } in fallen {
        let message = LinkUnspec::new_with_index(index).controller(bridge_index).build();
        match handle.link().set(message).execute().await {
            Ok(()) => tracing::warn!(
                tap,
                bridge,
                "put a guest's port into its bridge, which was made anew under it"
            ),
            Err(error) => {
                tracing::warn!(tap, bridge, %error, "a guest's port that fell out of its bridge stays out of it")
            }
        }
    }
    connection.abort();
}
