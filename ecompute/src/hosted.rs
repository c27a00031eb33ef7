//! Whether this host is itself a machine of some cloud, whose metadata its own programs ask where our guests ask ours.

use std::fs;

/// What the firmware says of itself: the maker, what was made, and the tag on it.
const FIRMWARE: [&str; 3] = ["sys_vendor", "product_name", "chassis_asset_tag"];

/// The tag on each of Azure's machines; its maker is that of Hyper-V, which is no cloud.
const AZURE: &str = "7783-7084-3265-9085-8269-3286-77";

/// IPv4's routes of this network namespace.
const ROUTES: &str = "/proc/self/net/route";

/// What is to be known where this host is a cloud's machine.
pub(crate) fn shadowed() -> Option<String> {
    let told =
        FIRMWARE.map(|name| fs::read_to_string(format!("/sys/class/dmi/id/{name}")).unwrap_or_default());
    let cloud = cloud_of(told.each_ref().map(|text| text.trim()))?;
    // Nothing is asked by who has no way there.
    let leads_out = fs::read_to_string(ROUTES).is_ok_and(|routes| has_default(&routes));
    leads_out.then(|| {
        format!(
            "this host is a machine of {cloud} itself, and its own programs do not reach that cloud's metadata at 169.254.169.254 while guests are answered there: see docs/operations.md, \"A host that is a cloud's machine\""
        )
    })
}

/// Which cloud has made such a machine, of those whose metadata is at 169.254.169.254.
fn cloud_of([maker, product, tag]: [&str; 3]) -> Option<&'static str> {
    match (maker, product) {
        ("Amazon EC2", _) => Some("Amazon EC2"),
        ("Google", "Google Compute Engine") => Some("Google Cloud"),
        ("OpenStack Foundation", _) => Some("an OpenStack cloud"),
        // Where its operator has put its own name in the maker's place.
        _ if product.starts_with("OpenStack ") || tag.starts_with("OpenStack ") => Some("an OpenStack cloud"),
        ("Microsoft Corporation", _) if tag == AZURE => Some("Microsoft Azure"),
        _ => None,
    }
}

/// Whether one of the routes leads everywhere.
fn has_default(routes: &str) -> bool {
    routes.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        matches!(fields[..], [_, "00000000", _, _, _, _, _, "00000000", ..])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_of_clouds_are_known_and_others_are_none() {
        for (told, cloud) in [
            (["Amazon EC2", "m5.large", "Amazon EC2"], Some("Amazon EC2")),
            (["Google", "Google Compute Engine", ""], Some("Google Cloud")),
            (["OpenStack Foundation", "OpenStack Nova", ""], Some("an OpenStack cloud")),
            (["RDO", "OpenStack Compute", ""], Some("an OpenStack cloud")),
            (["Microsoft Corporation", "Virtual Machine", AZURE], Some("Microsoft Azure")),
            (["Microsoft Corporation", "Virtual Machine", "1234"], None),
            (["Google", "Chromebook", ""], None),
            (["QEMU", "Standard PC (Q35 + ICH9, 2009)", ""], None),
            (["Dell Inc.", "PowerEdge R650", ""], None),
            (["", "", ""], None),
        ] {
            assert_eq!(cloud_of(told), cloud, "{told:?}");
        }
    }

    #[test]
    fn a_way_out_is_a_route_to_everywhere() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n";
        let near = "virbr0\t007AA8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        let half = "tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n";
        let out = "eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        assert!(!has_default(head) && !has_default(&[head, near, half].concat()));
        assert!(has_default(&[head, near, out].concat()));
    }
}
