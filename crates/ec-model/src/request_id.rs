//! The id of one command of control: written with what the command asks for, sent along with what it asks of others, and
//! named by whoever acts upon it, so that logs of all programs can be read as one.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize};
use uuid::Uuid;

/// What it begins with, as OpenStack's does.
const PREFIX: &str = "req-";
/// The uuid with its dashes: other spellings of it are none of these.
const UUID_LENGTH: usize = 36;

/// `req-` and a uuid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(Uuid);

/// The text is not the id of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the id of a request (wanted the form req-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)")]
pub struct InvalidRequestId(String);

impl RequestId {
    /// The id that has this UUID.
    pub const fn new(uuid: Uuid) -> Self {
        Self(uuid)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.0)
    }
}

impl FromStr for RequestId {
    type Err = InvalidRequestId;

    fn from_str(text: &str) -> Result<Self, InvalidRequestId> {
        let uuid = text.strip_prefix(PREFIX).filter(|uuid| uuid.len() == UUID_LENGTH);
        uuid.and_then(|uuid| Uuid::try_parse(uuid).ok())
            .map(Self)
            .ok_or_else(|| InvalidRequestId(text.chars().take(80).collect()))
    }
}

impl Serialize for RequestId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Reads one out of a record: what is none is as good as nothing, since nobody decides by it.
pub(crate) fn overlooked<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<RequestId>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(value.as_str().and_then(|text| text.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "req-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";

    #[test]
    fn an_id_is_read_as_it_is_written_and_has_one_spelling() {
        let id: RequestId = TEXT.parse().unwrap();
        assert_eq!(id.to_string(), TEXT);
        assert_eq!(TEXT.replace("7d3c1f0a", "7D3C1F0A").parse::<RequestId>().unwrap(), id);
        assert_eq!(serde_json::to_string(&id).unwrap(), format!("\"{TEXT}\""));
        assert_eq!(serde_json::from_str::<RequestId>(&format!("\"{TEXT}\"")).unwrap(), id);
    }

    #[test]
    fn what_is_not_of_the_form_is_refused_with_the_form_wanted() {
        let bare = TEXT.trim_start_matches("req-");
        let simple = format!("req-{}", bare.replace('-', ""));
        let braced = format!("req-{{{bare}}}");
        let injected = format!("{TEXT}\ninstance=x");
        for text in ["", "req-", bare, &simple, &braced, &injected, &TEXT[..39], "REQ-x"] {
            let error = text.parse::<RequestId>().unwrap_err().to_string();
            assert!(error.contains("wanted the form req-"), "{text}: {error}");
        }
        assert!(serde_json::from_str::<RequestId>("7").is_err());
    }
}
