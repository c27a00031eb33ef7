//! `controller.yaml`.

use std::{path::Path, sync::Arc};

use ec_cloud::Cloud;
use ec_model::Keyspace;
use ec_pki::endings;
use ec_placement_client::{PlacementClient, PlacementConfig, PlacementSection};
use ec_runtime::{
    Host,
    config::{exposed, load},
    exit::Failure,
};
use ec_store::{EtcdConfig, EtcdSection, EtcdStore};
use serde::Deserialize;

/// Looked for in this order where `--config` names none.
const PLACES: [&str; 2] = ["controller.yaml", "/etc/ecompute/controller.yaml"];

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ControllerFile {
    etcd: EtcdSection,
    placement: PlacementSection,
}

/// Everything the controller needs to know, checked.
pub(crate) struct Settings {
    etcd: EtcdConfig,
    keys: Keyspace,
    placement: PlacementConfig,
    /// Files with secrets in them that everybody may read, and certificates that end soon.
    pub(crate) warnings: Vec<String>,
}

impl Settings {
    pub(crate) fn load(named: Option<&Path>) -> Result<Self, Failure> {
        let loaded = load::<ControllerFile>(named, &PLACES.map(Path::new))?;
        let wrong = |why: String| Failure::from(loaded.wrong(why));
        let file = &loaded.config;
        let etcd = file.etcd.settings().map_err(wrong)?;
        let placement = file.placement.settings().map_err(wrong)?;
        let holds_secret = etcd.holds_secret() || placement.holds_secret();
        let own = loaded.path.as_deref().filter(|_| holds_secret).into_iter();
        let mut warnings = exposed(own.chain(etcd.secret_files()).chain(placement.secret_files()));
        warnings.extend(endings(etcd.certificates().chain(placement.certificates())));
        Ok(Self {
            warnings,
            keys: Keyspace::configured(file.etcd.prefix.as_deref()).map_err(wrong)?,
            etcd,
            placement,
        })
    }

    /// The services that it looks after the cluster with. Nothing is sent before it is needed.
    pub(crate) async fn connect(&self) -> Result<Cloud, Failure> {
        Ok(Cloud {
            store: Arc::new(EtcdStore::connect(self.etcd.clone()).await?),
            placement: Arc::new(PlacementClient::new(&self.placement)?),
            keys: self.keys.clone(),
            host: Host::default(),
            // It makes nothing that would be accounted to anybody.
            project: String::new(),
            user: String::new(),
            notice: |text| tracing::info!("{text}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_file_is_valid_and_says_nothing_but_defaults() {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../controller.yaml");
        let shipped = Settings::load(Some(Path::new(shipped))).map_err(|failure| failure.message).unwrap();
        assert_eq!(shipped.keys, Keyspace::default());
        assert_eq!(shipped.etcd.endpoints, ["localhost:2379"]);
        assert_eq!(shipped.placement.endpoint, "http://localhost:8080");
    }
}
