//! What is in the kernel's tables, as `nft -j` tells it. What is not ours, or of a later form, is passed over.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use ec_model::MacAddr;
use serde_json::Value;

use crate::rules::VERSION_COMMENT;

/// The content of both tables.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Have {
    /// The version of the rules, where there are any.
    pub(crate) version: Option<u32>,
    /// Chains and rules, without counters and numbers, to compare.
    pub(crate) rules: Vec<String>,
    pub(crate) taps: BTreeSet<String>,
    pub(crate) taps_mac: BTreeSet<String>,
    pub(crate) own_mac: BTreeSet<(String, MacAddr)>,
    pub(crate) own_chaddr: BTreeSet<(String, MacAddr)>,
    pub(crate) own_ip4: BTreeSet<(String, Ipv4Addr)>,
    pub(crate) marks: BTreeMap<String, u32>,
    /// With whose endpoint it is.
    pub(crate) control: BTreeMap<SocketAddr, String>,
    pub(crate) bridges: BTreeSet<String>,
}

impl Have {
    /// Takes what nft lists of one table.
    pub(crate) fn read(&mut self, json: &str) -> Result<(), String> {
        let document: Value =
            serde_json::from_str(json).map_err(|error| format!("could not read what nft lists: {error}"))?;
        for object in document["nftables"].as_array().into_iter().flatten() {
            self.take(object);
        }
        Ok(())
    }

    fn take(&mut self, object: &Value) {
        if let Some(set) = object.get("set").or_else(|| object.get("map")) {
            let name = set["name"].as_str().unwrap_or_default();
            for element in set["elem"].as_array().into_iter().flatten() {
                // Not understood is not there: it would be added again, which changes nothing.
                let _ = self.take_element(name, element);
            }
        } else if let Some(rule) = object.get("rule") {
            if let Some(version) =
                rule["comment"].as_str().and_then(|text| text.strip_prefix(VERSION_COMMENT))
            {
                self.version = version.parse().ok();
            }
            let mut rule = rule.clone();
            strip(&mut rule);
            self.rules.push(rule.to_string());
        } else if let Some(chain) = object.get("chain") {
            let mut chain = chain.clone();
            strip(&mut chain);
            self.rules.push(chain.to_string());
        }
    }

    fn take_element(&mut self, set: &str, element: &Value) -> Option<()> {
        let (element, comment) = match element.get("elem") {
            Some(inner) => (inner.get("val")?, inner["comment"].as_str().unwrap_or_default()),
            None => (element, ""),
        };
        let part = |at: usize| element["concat"].get(at);
        let tap = || Some(part(0)?.as_str()?.to_owned());
        match set {
            "taps" => drop(self.taps.insert(element.as_str()?.to_owned())),
            "taps_mac" => drop(self.taps_mac.insert(element.as_str()?.to_owned())),
            "bridges" => drop(self.bridges.insert(element.as_str()?.to_owned())),
            "own_mac" => drop(self.own_mac.insert((tap()?, part(1)?.as_str()?.parse().ok()?))),
            "own_chaddr" => {
                let [0, 0, octets @ ..] = part(1)?.as_u64()?.to_be_bytes() else { return None };
                self.own_chaddr.insert((tap()?, MacAddr(octets)));
            }
            "own_ip4" => {
                let address = u32::try_from(part(1)?.as_u64()?).ok()?;
                self.own_ip4.insert((tap()?, address.into()));
            }
            "control4" | "control6" => {
                let address: IpAddr = part(0)?.as_str()?.parse().ok()?;
                let port = u16::try_from(part(1)?.as_u64()?).ok()?;
                self.control.insert((address, port).into(), comment.to_owned());
            }
            // In a map, an element is a pair.
            "marks" => {
                let tap = element.get(0)?.as_str()?.to_owned();
                self.marks.insert(tap, u32::try_from(element.get(1)?.as_u64()?).ok()?);
            }
            _ => {}
        }
        Some(())
    }

    /// Every port and bridge that anything is said about.
    pub(crate) fn devices(&self) -> BTreeSet<&str> {
        let pairs = self.own_mac.iter().chain(&self.own_chaddr).map(|(tap, _)| tap);
        let pairs = pairs.chain(self.own_ip4.iter().map(|(tap, _)| tap));
        self.taps
            .iter()
            .chain(&self.taps_mac)
            .chain(self.marks.keys())
            .chain(pairs)
            .chain(&self.bridges)
            .map(String::as_str)
            .collect()
    }
}

/// Takes away what differs between two loadings of the same rules.
fn strip(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.remove("handle");
            if let Some(counter) = map.get_mut("counter") {
                *counter = Value::Null;
            }
            map.values_mut().for_each(strip);
        }
        Value::Array(list) => list.iter_mut().for_each(strip),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nft_prints_is_read_and_the_unknown_passed_over() {
        let json = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}}, {"table": {"family": "bridge", "name": "ecompute"}},
            {"set": {"name": "taps", "elem": ["ec0123456789"]}}, {"set": {"name": "taps_mac"}},
            {"set": {"name": "own_mac", "elem": [{"concat": ["ec0123456789", "52:54:00:00:00:01"]}]}},
            {"set": {"name": "own_chaddr", "elem": [{"concat": ["ec0123456789", 90520730730497]}]}},
            {"set": {"name": "own_ip4", "elem": [{"elem": {"val": {"concat": ["ec0123456789", 3232266757]}, "expires": 7}}]}},
            {"set": {"name": "control4", "elem": [{"elem": {"val": {"concat": ["10.0.0.1", 2379]}, "comment": "n1"}}]}},
            {"set": {"name": "control6", "elem": [{"concat": ["fe80::1", 2379]}, {"strange": 1}]}},
            {"map": {"name": "marks", "elem": [["ec0123456789", 3959422977]]}},
            {"set": {"name": "bridges", "elem": ["virbr0"]}},
            {"rule": {"chain": "learn", "handle": 17, "comment": "ecompute rules 3", "expr": [{"counter": {"packets": 5, "bytes": 9}}]}}]}"#;
        let mut have = Have::default();
        have.read(json).unwrap();
        let tap = "ec0123456789".to_owned();
        assert_eq!(have.version, Some(3));
        assert_eq!(
            have.rules,
            [r#"{"chain":"learn","comment":"ecompute rules 3","expr":[{"counter":null}]}"#]
        );
        let mac: MacAddr = "52:54:00:00:00:01".parse().unwrap();
        assert_eq!(have.own_mac, BTreeSet::from([(tap.clone(), mac)]));
        assert_eq!(have.own_chaddr, have.own_mac);
        assert_eq!(have.own_ip4, BTreeSet::from([(tap.clone(), "192.168.122.5".parse().unwrap())]));
        assert_eq!(have.marks, BTreeMap::from([(tap.clone(), 0xec00_0001)]));
        assert_eq!(have.control["10.0.0.1:2379".parse::<SocketAddr>().as_ref().unwrap()], "n1");
        assert_eq!(have.control["[fe80::1]:2379".parse::<SocketAddr>().as_ref().unwrap()], "");
        assert_eq!(have.devices(), BTreeSet::from([tap.as_str(), "virbr0"]));
        assert!(have.read("{").is_err());
    }
}
