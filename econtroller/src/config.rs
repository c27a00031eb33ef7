//! `controller.yaml`.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use ec_calls::{CountedStore, CountedTransport};
use ec_cloud::Cloud;
use ec_model::Keyspace;
use ec_pki::endings;
use ec_placement_client::{PlacementClient, PlacementConfig, PlacementSection};
use ec_runtime::{
    Host,
    config::{exposed, load},
    exit::Failure,
};
use ec_serve::{
    TlsSection,
    port::{Listen, Port, PortError, open_to_others},
};
use ec_store::{EtcdConfig, EtcdSection, EtcdStore};
use econtroller::Tally;
use serde::Deserialize;

/// Looked for in this order where `--config` names none.
const PLACES: [&str; 2] = ["controller.yaml", "/etc/ecompute/controller.yaml"];
/// Where the controller's own port is where nothing else is said.
const LISTEN: &str = "127.0.0.1:18091";
/// What would be right where it cannot be had.
const REMEDY: &str = "choose another `listen` in controller.yaml, or `listen: null` for none";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ControllerFile {
    listen: Listen,
    tls: Option<TlsSection>,
    etcd: EtcdSection,
    placement: PlacementSection,
}

/// Everything the controller needs to know, checked.
pub(crate) struct Settings {
    listen: Option<SocketAddr>,
    tls: Option<TlsSection>,
    etcd: EtcdConfig,
    keys: Keyspace,
    placement: PlacementConfig,
    /// What is to be known: files with secrets that everybody may read, certificates that end soon, a port that needs no
    /// certificate.
    pub(crate) warnings: Vec<String>,
    /// Its certificates, whose ends are told.
    pub(crate) certificates: Vec<PathBuf>,
}

impl Settings {
    pub(crate) fn load(named: Option<&Path>) -> Result<Self, Failure> {
        let loaded = load::<ControllerFile>(named, &PLACES.map(Path::new))?;
        let wrong = |why: String| Failure::from(loaded.wrong(why));
        let file = &loaded.config;
        let listen = file.listen.address(LISTEN).map_err(wrong)?;
        if listen.is_none() && file.tls.is_some() {
            return Err(wrong(
                "tls is of the controller's own port, and `listen` is null: leave one of them out".to_owned(),
            ));
        }
        let open = open_to_others(listen, file.tls.as_ref(), "how the cluster fares");
        let etcd = file.etcd.settings().map_err(wrong)?;
        let placement = file.placement.settings().map_err(wrong)?;
        let holds_secret = etcd.holds_secret() || placement.holds_secret();
        let own = loaded.path.as_deref().filter(|_| holds_secret).into_iter();
        let served = file.tls.iter().flat_map(TlsSection::certificates);
        let certificates =
            etcd.certificates().chain(placement.certificates()).chain(served).map(Path::to_owned);
        let certificates: Vec<_> = certificates.collect();
        let key = file.tls.as_ref().map(|tls| tls.key.as_path());
        let mut warnings = exposed(own.chain(etcd.secret_files()).chain(placement.secret_files()).chain(key));
        warnings.extend(endings(certificates.iter().map(PathBuf::as_path)));
        warnings.extend(open);
        warnings.extend(etcd.unused());
        Ok(Self {
            listen,
            tls: file.tls.clone(),
            warnings,
            certificates,
            keys: Keyspace::configured(file.etcd.prefix.as_deref()).map_err(wrong)?,
            etcd,
            placement,
        })
    }

    /// What is to be known about who else can write to etcd, and about how placement is reached.
    pub(crate) async fn open_door(&self) -> Vec<String> {
        self.etcd.open_door().await.into_iter().chain(self.placement.open_door()).collect()
    }

    /// Opens the port, where there is to be one.
    pub(crate) async fn open(&self) -> Result<Option<Port>, PortError> {
        let Some(address) = self.listen else { return Ok(None) };
        Port::open(address, "controller", REMEDY).await?.behind(self.tls.as_ref()).map(Some)
    }

    /// The services that it looks after the cluster with, counted there. Nothing is sent before it is needed.
    pub(crate) async fn connect(&self, tally: &Tally, host: Host) -> Result<Cloud, Failure> {
        let etcd = Arc::new(EtcdStore::connect(self.etcd.clone()).await?);
        let counted = Arc::clone(&tally.placement);
        let placement =
            PlacementClient::new(&self.placement)?.through(|way| Arc::new(CountedTransport(way, counted)));
        tally.compare_clocks(placement.clone());
        Ok(Cloud {
            store: Arc::new(CountedStore::new(etcd, Arc::clone(&tally.etcd))),
            placement: Arc::new(placement),
            keys: self.keys.clone(),
            host,
            // It makes nothing that would be accounted to anybody.
            project: String::new(),
            user: String::new(),
            // What it does it does on behalf of whoever asked for the instance.
            request_id: None,
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
        assert_eq!(shipped.listen.map(|address| address.to_string()).as_deref(), Some(LISTEN));
    }

    #[test]
    fn the_port_is_where_it_is_said_and_others_are_warned_of() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let load = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            Settings::load(Some(file.path())).map_err(|failure| failure.message)
        };
        assert_eq!(load("listen: null\n").unwrap().listen, None);
        let open = load("listen: 0.0.0.0:1\n").unwrap();
        assert!(open.warnings.iter().any(|line| line.contains("client_ca")), "{:?}", open.warnings);
        let closed = load("listen: 0.0.0.0:1\ntls: {certificate: /a, key: /b, client_ca: /c}\n").unwrap();
        assert_eq!(closed.warnings, [""; 0]);
        // The file itself stands for a key that everybody may read.
        use std::os::unix::fs::PermissionsExt;
        let key = file.path().display();
        let told = |mode| {
            std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            load(&format!("listen: 127.0.0.1:1\ntls: {{certificate: /a, key: {key}}}\n")).unwrap().warnings
        };
        assert_eq!(
            told(0o644),
            [format!("{key} holds a secret and every user may read it: chmod o-r {key}")]
        );
        assert_eq!(told(0o600), [""; 0]);
        for (text, wanted) in [
            ("listen: 18091\n", "listen"),
            ("listen: localhost:1\n", "listen `localhost:1` is no address with a port"),
            ("listen: null\ntls: {certificate: /a, key: /b}\n", "`listen` is null"),
            ("lisen: 1\n", "did you mean `listen`?"),
        ] {
            let why = load(text).err().unwrap();
            assert!(why.contains(wanted), "{text}{why}");
        }
    }
}
