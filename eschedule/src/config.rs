//! `schedule.yaml`.

use std::path::Path;

use ec_model::Keyspace;
use ec_placement_client::{PlacementClient, PlacementConfig};
use ec_runtime::{
    config::{EtcdSection, PlacementSection, load},
    exit::Failure,
};
use ec_store::{EtcdConfig, EtcdStore};
use serde::Deserialize;

/// Looked for in this order where `--config` names none.
const PLACES: [&str; 2] = ["schedule.yaml", "/etc/ecompute/schedule.yaml"];

/// A current CirrOS: small, boots anywhere, reads our metadata.
const DEFAULT_IMAGE: &str = "http://download.cirros-cloud.net/0.6.3/cirros-0.6.3-x86_64-disk.img";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ScheduleFile {
    etcd: EtcdSection,
    placement: PlacementSection,
    image: Option<String>,
    project: Option<String>,
    user: Option<String>,
}

/// Everything the command line needs to know, checked.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) etcd: EtcdConfig,
    pub(crate) keys: Keyspace,
    pub(crate) placement: PlacementConfig,
    pub(crate) image: String,
    pub(crate) project: String,
    pub(crate) user: String,
}

impl Settings {
    pub(crate) fn load(named: Option<&Path>) -> Result<Self, Failure> {
        let loaded = load::<ScheduleFile>(named, &PLACES.map(Path::new))?;
        let wrong = |why: String| Failure::from(loaded.wrong(why));
        let file = &loaded.config;
        let name = |key: &str, value: &Option<String>| match value {
            None => Ok("default".to_owned()),
            Some(text) if (1..=255).contains(&text.chars().count()) => Ok(text.clone()),
            Some(_) => Err(wrong(format!("{key}: wanted 1 to 255 characters, as placement has it"))),
        };
        Ok(Self {
            etcd: file.etcd.settings().map_err(wrong)?,
            keys: file.etcd.keyspace().map_err(wrong)?,
            placement: file.placement.settings().map_err(wrong)?,
            image: file.image.clone().unwrap_or_else(|| DEFAULT_IMAGE.to_owned()),
            project: name("project", &file.project)?,
            user: name("user", &file.user)?,
        })
    }
}

/// The two services that every command talks to. Nothing is sent before it is needed.
pub(crate) struct Session {
    pub(crate) settings: Settings,
    pub(crate) store: EtcdStore,
    pub(crate) placement: PlacementClient,
}

impl Session {
    pub(crate) async fn open(settings: Settings) -> Result<Self, Failure> {
        let store = EtcdStore::connect(settings.etcd.clone()).await?;
        let placement = PlacementClient::new(&settings.placement)?;
        Ok(Self { settings, store, placement })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_file_is_valid_and_says_nothing_but_defaults() {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../schedule.yaml");
        let shipped = Settings::load(Some(Path::new(shipped))).map_err(|failure| failure.message).unwrap();
        assert_eq!(shipped.image, DEFAULT_IMAGE);
        assert_eq!(shipped.keys, Keyspace::default());
        assert_eq!(shipped.etcd.endpoints, ["localhost:2379"]);
        assert_eq!(shipped.placement.endpoint, "http://localhost:8080");
        assert_eq!((shipped.project.as_str(), shipped.user.as_str()), ("default", "default"));
    }
}
