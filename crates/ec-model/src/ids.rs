//! Ids as types: a node and an instance are both UUIDs, and must never be mistaken for each other.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The text is not a UUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not the uuid of {what} (wanted the form xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)")]
pub struct InvalidId {
    what: &'static str,
    text: String,
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// The id that this UUID names.
            pub const fn new(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// The bare UUID.
            pub const fn uuid(self) -> Uuid {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Uuid::try_parse(text)
                    .map(Self)
                    .map_err(|_| InvalidId { what: $what, text: text.chars().take(80).collect() })
            }
        }
    };
}

uuid_id!(
    /// A host with an agent; also the uuid of its resource provider.
    NodeId,
    "a node"
);
uuid_id!(
    /// One workload; also its placement consumer, its libvirt domain (name and uuid) and its volume.
    InstanceId,
    "an instance"
);

uuid_id!(
    /// An image of the catalogue; also the name of its bytes in the image store.
    ImageId,
    "an image"
);

/// What the name of a node's user begins with.
const NODE_USER: &str = "ecompute-";

impl NodeId {
    /// Its user in etcd, which is its role there and the common name of its certificate, too.
    pub fn user(self) -> String {
        format!("{NODE_USER}{self}")
    }

    /// The node whose user this is; none where it is somebody else.
    pub fn of_user(user: &str) -> Option<Self> {
        user.strip_prefix(NODE_USER)?.parse().ok()
    }
}

impl InstanceId {
    /// The hardware address of the instance's network interface number `nic` (0 is the first).
    ///
    /// Derived, not stored, so that a guest can be told from its frames alone: the first octet 0x52
    /// marks a locally administered unicast address, 40 bits come from a name-based UUID.
    pub fn mac(self, nic: u8) -> MacAddr {
        let hash = Uuid::new_v5(&self.0, &[b'n', b'i', b'c', nic]);
        let b = hash.as_bytes();
        MacAddr([0x52, b[0], b[1], b[2], b[3], b[4]])
    }
}

/// The text is not a hardware address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a hardware address (wanted the form 52:xx:xx:xx:xx:xx)")]
pub struct InvalidMac(String);

/// An Ethernet hardware address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddr(pub [u8; 6]);

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddr {
    type Err = InvalidMac;

    fn from_str(text: &str) -> Result<Self, InvalidMac> {
        let invalid = || InvalidMac(text.chars().take(80).collect());
        let mut octets = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut octets {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(invalid)?;
            *octet = u8::from_str_radix(part, 16).map_err(|_| invalid())?;
        }
        if parts.next().is_some() { Err(invalid()) } else { Ok(Self(octets)) }
    }
}

impl Serialize for MacAddr {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MacAddr {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_addresses_are_stable_distinct_and_local_unicast() {
        let id: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        assert_eq!(id.mac(0), id.mac(0));
        assert_ne!(id.mac(0), id.mac(1));
        assert_eq!(id.mac(0).0[0] & 0b11, 0b10, "locally administered, not multicast");
        assert_eq!(id.mac(0).to_string().parse::<MacAddr>().unwrap(), id.mac(0));
    }

    #[test]
    fn a_node_is_told_by_its_user_in_etcd_and_nobody_else_is_one() {
        let node: NodeId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
        assert_eq!(node.user(), "ecompute-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab");
        assert_eq!(NodeId::of_user(&node.user()), Some(node));
        for other in ["ecompute-control", "ecompute-placement", "root", "", &node.to_string()] {
            assert_eq!(NodeId::of_user(other), None, "{other}");
        }
    }

    #[test]
    fn what_is_not_a_uuid_is_refused_with_the_form_wanted() {
        let error = "not-a-uuid".parse::<InstanceId>().unwrap_err().to_string();
        assert!(error.contains("`not-a-uuid` is not the uuid of an instance"), "{error}");
        assert!("52:00:00:00:00".parse::<MacAddr>().is_err());
        assert!("52:00:00:00:00:0g".parse::<MacAddr>().is_err());
        assert!("52:00:00:00:00:00:00".parse::<MacAddr>().is_err());
    }

    #[test]
    fn a_hardware_address_travels_as_its_text() {
        let mac = MacAddr([0x52, 0, 0x0a, 0xff, 1, 2]);
        let json = serde_json::to_string(&mac).unwrap();
        assert_eq!(json, r#""52:00:0a:ff:01:02""#);
        assert_eq!(serde_json::from_str::<MacAddr>(&json).unwrap(), mac);
        assert!("52:0:00:00:00:00".parse::<MacAddr>().is_err());
    }
}
