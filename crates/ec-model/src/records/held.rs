//! What a node keeps of what is wanted of its guests, so that an etcd that lost it can be told again.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Attachment, Doc, Instance, Rebuilt, Record, RecordError, Request, Rescued, Resized, Resources};
use crate::{InstanceId, NodeId};

/// Which of the requests for an instance one is: of which placement, and after how many changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edition {
    /// [`Request::epoch`].
    pub epoch: u64,
    /// [`Request::generation`].
    pub generation: u64,
}

impl Edition {
    /// Of a request.
    pub fn of(request: &Request) -> Self {
        Self { epoch: request.epoch, generation: request.generation }
    }
}

/// What is wanted of an instance as its node read it: its records as they lay in etcd, with all that a later release
/// wrote into them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// The value of the request's key.
    pub request: Value,
    /// The value of the [`Instance`]'s key, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<Value>,
}

impl Intent {
    /// Of the values of both keys.
    ///
    /// # Errors
    /// The request is none that this release reads. A record that it does not read is kept as it is.
    pub fn of(request: &[u8], record: Option<&[u8]>) -> Result<Self, RecordError> {
        let request = Doc::<Request>::decode(request)?.into_value();
        Ok(Self { request, record: record.and_then(|record| serde_json::from_slice(record).ok()) })
    }

    /// Which request it is of; none where that does not say.
    pub fn edition(&self) -> Option<Edition> {
        let number = |field: &str| self.request.get(field)?.as_u64();
        Some(Edition { epoch: number("epoch")?, generation: number("generation")? })
    }

    /// The volume that the machine boots from that this is of; none where that has a disk of its own.
    pub fn root(&self) -> Option<InstanceId> {
        let volumes = self.request.get("volumes")?.as_array()?.iter();
        let mut volumes = volumes.filter_map(|has| Attachment::deserialize(has).ok());
        volumes.find(Attachment::is_root).map(|has| has.volume)
    }

    /// The node that it was placed on; none where that does not say.
    pub fn node(&self) -> Option<NodeId> {
        let assigned = self.record.as_ref()?.get("assigned")?;
        NodeId::deserialize(assigned.get("node")?).ok()
    }

    /// The request, to be changed.
    ///
    /// # Errors
    /// As [`Doc::decode`].
    pub fn request(&self) -> Result<Doc<Request>, RecordError> {
        doc(&self.request)
    }

    /// The record, to be changed.
    ///
    /// # Errors
    /// As [`Doc::decode`].
    pub fn record(&self) -> Result<Option<Doc<Instance>>, RecordError> {
        self.record.as_ref().map(doc).transpose()
    }
}

fn doc<R: Record>(value: &Value) -> Result<Doc<R>, RecordError> {
    Doc::decode(&serde_json::to_vec(value).unwrap_or_default())
}

/// What a node holds of an instance that no request speaks of: written by its agent with the status UNCLAIMED, and deleted
/// with the next other one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The instance, as in the key.
    pub instance: InstanceId,
    /// The node, as in the key.
    pub node: NodeId,
    /// What was wanted of it last, as far as the node heard.
    pub intent: Intent,
    /// The last wish for a new disk that came to its end there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuilt: Option<Rebuilt>,
    /// What came of the last wish to boot from another disk, for as long as that is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rescued: Option<Rescued>,
    /// The last wish for another size that came to its end there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resized: Option<Resized>,
    /// What it was given.
    #[serde(default)]
    pub resources: Resources,
    /// How many bytes of user-data lie under [`crate::Keyspace::held_user_data`]; nothing where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data_bytes: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_intent_is_kept_with_what_a_later_release_wrote_into_it() {
        let id = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";
        let request = format!(
            r#"{{"version":1,"instance":"{id}","epoch":2,"generation":7,"desired":"active","created_at":"1970-01-01T00:00:00Z","later":[1]}}"#
        );
        let intent = Intent::of(request.as_bytes(), Some(br#"{"version":9}"#)).unwrap();
        assert_eq!(intent.edition(), Some(Edition { epoch: 2, generation: 7 }));
        let read: Intent = serde_json::from_slice(&serde_json::to_vec(&intent).unwrap()).unwrap();
        assert_eq!(read, intent);
        assert_eq!(read.root(), None);
        let mut doc = read.request().unwrap();
        doc.record.volumes = [("vdb", 8), ("vda", 9)]
            .map(|(device, n)| Attachment {
                volume: InstanceId::new(uuid::Uuid::from_u128(n)),
                device: device.to_owned(),
            })
            .to_vec();
        let booting = Intent { request: doc.clone().into_value(), ..read.clone() };
        assert_eq!(booting.root(), None, "as it was read");
        let booting = Intent::of(&doc.encode(), None).unwrap();
        assert_eq!(booting.root(), Attachment::root_of(&doc.record.volumes));
        doc.record.volumes.clear();
        doc.record.generation = 8;
        let written: Value = serde_json::from_slice(&doc.encode()).unwrap();
        assert_eq!(
            (&written["later"], &written["generation"]),
            (&serde_json::json!([1]), &serde_json::json!(8))
        );
        let placed = format!(r#"{{"version":9,"assigned":{{"node":"{id}","epoch":1}}}}"#);
        let placed = Intent::of(request.as_bytes(), Some(placed.as_bytes())).unwrap();
        assert_eq!((read.node(), placed.node()), (None, id.parse().ok()));
        // Nobody acts upon a half of it.
        assert!(read.record().is_err());
        assert!(Intent::of(b"{}", None).is_err());
        assert_eq!(Intent { request: Value::Null, record: None }.edition(), None);
    }
}
