//! The OpenStack tree: `/openstack/<version>/…`. Every version has all files, which is more than the
//! older ones had: readers take what they know.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Map, Value, json};

use crate::{
    InstanceRecord,
    answer::Content,
    ec2::{ZONE, key_name, listing},
};

const VERSIONS: [&str; 9] = [
    "2012-08-10",
    "2013-04-04",
    "2013-10-17",
    "2015-10-15",
    "2016-06-30",
    "2016-10-06",
    "2017-02-22",
    "2018-08-27",
    "latest",
];

/// Bytes of randomness for a guest that has little of its own yet.
const SEED_LEN: usize = 512;

/// `path` is what comes after `/openstack`.
pub(crate) fn find(record: &InstanceRecord, path: &[&str]) -> Option<Content> {
    match path {
        [] => Some(listing(VERSIONS)),
        [version, rest @ ..] if VERSIONS.contains(version) => match rest {
            [] => {
                let mut names =
                    vec!["meta_data.json", "network_data.json", "vendor_data.json", "vendor_data2.json"];
                names.extend(record.user_data.as_ref().map(|_| "user_data"));
                Some(listing(names))
            }
            ["meta_data.json"] => Some(Content::Json(meta_data(record))),
            ["network_data.json"] => Some(Content::Json(network_data(record))),
            ["vendor_data.json" | "vendor_data2.json"] => Some(Content::Json(json!({}))),
            ["user_data"] => record.user_data.as_ref().map(|data| Content::Bytes(data.0.clone())),
            _ => None,
        },
        _ => None,
    }
}

fn meta_data(record: &InstanceRecord) -> Value {
    let mut seed = [0_u8; SEED_LEN];
    rand::fill(&mut seed[..]);
    let named = || record.keys.iter().enumerate().map(|(number, key)| (key_name(number), key.trim_end()));
    let keys: Vec<Value> =
        named().map(|(name, data)| json!({"name": name, "type": "ssh", "data": data})).collect();
    let public_keys: Map<String, Value> = named().map(|(name, data)| (name, data.into())).collect();
    json!({
        "uuid": record.instance,
        "name": record.name,
        "hostname": record.name,
        "launch_index": 0,
        "availability_zone": ZONE,
        "project_id": record.project,
        "meta": record.metadata,
        "public_keys": public_keys,
        "keys": keys,
        "devices": [],
        "random_seed": BASE64_STANDARD.encode(seed),
    })
}

/// Every interface by its hardware address, each with an address from DHCP.
fn network_data(record: &InstanceRecord) -> Value {
    let interfaces = || record.macs.iter().enumerate();
    let links: Vec<Value> = interfaces()
        .map(|(number, mac)| {
            json!({
                "id": format!("nic{number}"),
                "type": "phy",
                "ethernet_mac_address": mac,
                "mtu": null,
            })
        })
        .collect();
    let networks: Vec<Value> = interfaces()
        .map(|(number, _)| {
            json!({
                "id": format!("network{number}"),
                "type": "ipv4_dhcp",
                "link": format!("nic{number}"),
                "network_id": format!("network{number}"),
            })
        })
        .collect();
    json!({"links": links, "networks": networks, "services": []})
}
