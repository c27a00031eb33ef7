//! `schedule.yaml`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use ec_cloud::{Cloud, CloudError};
use ec_image::StoreSection;
use ec_model::{
    ImageRef, Keyspace, RequestId,
    input::{catalog_name, is_image_url, is_owner},
};
use ec_pki::{ended, endings};
use ec_placement_client::{PlacementClient, PlacementConfig, PlacementSection};
use ec_runtime::{
    config::{exposed, load},
    exit::{Failure, UNREACHABLE, tell},
};
use ec_store::{EtcdConfig, EtcdSection, EtcdStore, Sealed};
use serde::Deserialize;
use tokio::sync::Mutex;

use crate::{
    image::{self, Known, is_distribution},
    run::Order,
    spec::beside,
};

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
    images: BTreeMap<String, String>,
    image_store: StoreSection,
    image_mirrors: BTreeMap<String, String>,
    strategy: Option<Order>,
    project: Option<String>,
    user: Option<String>,
    defaults: Defaults,
}

/// What a guest gets where the command line says nothing.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Defaults {
    /// Files with public keys.
    pub(crate) keys: Vec<PathBuf>,
    /// A file with user-data.
    pub(crate) user_data: Option<PathBuf>,
    /// What a name begins with; the uuid's beginning follows.
    pub(crate) name_prefix: Option<String>,
    /// Who logs in by ssh.
    pub(crate) ssh_user: Option<String>,
    /// Whether metadata is given only with a token.
    pub(crate) require_token: bool,
}

impl Defaults {
    /// Paths are seen from where the file is.
    fn seen_from(mut self, file: Option<&Path>) -> Self {
        if let Some(directory) = file.and_then(Path::parent) {
            for path in self.keys.iter_mut().chain(&mut self.user_data) {
                *path = beside(directory, path);
            }
        }
        self
    }
}

/// Everything the command line needs to know, checked.
#[derive(Clone)]
pub(crate) struct Settings {
    /// Where it stands; none where these are defaults.
    pub(crate) file: Option<PathBuf>,
    pub(crate) etcd: EtcdConfig,
    pub(crate) keys: Keyspace,
    pub(crate) placement: PlacementConfig,
    pub(crate) image: String,
    /// Images that have a name, by it.
    pub(crate) images: BTreeMap<String, String>,
    /// Where bytes of images go that are sent.
    pub(crate) image_store: StoreSection,
    /// Where known distributions' images are, by the distribution, instead of where they are published.
    pub(crate) image_mirrors: BTreeMap<String, String>,
    /// Which node first.
    pub(crate) strategy: Option<Order>,
    pub(crate) project: String,
    pub(crate) user: String,
    pub(crate) defaults: Defaults,
    /// The id of the command, where its user gave one.
    pub(crate) request_id: Option<RequestId>,
    /// Files with secrets in them that everybody may read, and certificates that end soon.
    pub(crate) warnings: Vec<String>,
}

impl Settings {
    /// Which of the certificates that it shows to others are over, and of the authorities that these and others' are of.
    pub(crate) fn ended(&self) -> Vec<String> {
        ended(self.etcd.certificates().chain(self.placement.certificates()))
    }

    pub(crate) fn load(named: Option<&Path>) -> Result<Self, Failure> {
        let loaded = load::<ScheduleFile>(named, &PLACES.map(Path::new))?;
        let wrong = |why: String| Failure::from(loaded.wrong(why));
        let file = &loaded.config;
        let name = |key: &str, value: &Option<String>| match value {
            None => Ok("default".to_owned()),
            Some(text) => owner(text).map_err(|why| wrong(format!("{key}: {why}"))),
        };
        for (name, url) in &file.images {
            catalog_name(name).map_err(|why| wrong(format!("images: `{name}`: {why}")))?;
            if !is_image_url(url) {
                let why = "wanted http://…, https://… or file:///absolute/path";
                return Err(wrong(format!("images.{name}: `{url}` is not usable: {why}")));
            }
        }
        file.image_store.check().map_err(|why| wrong(format!("image_store.{why}")))?;
        for (distribution, url) in &file.image_mirrors {
            if !is_distribution(distribution) {
                let why = "wanted alpine, cirros, debian, fedora or ubuntu";
                return Err(wrong(format!("image_mirrors: `{distribution}` is not known: {why}")));
            }
            if !is_image_url(url) || url.starts_with("file:") {
                let why = "wanted http://… or https://…";
                return Err(wrong(format!("image_mirrors.{distribution}: `{url}` is not usable: {why}")));
            }
        }
        let etcd = file.etcd.settings().map_err(wrong)?;
        let placement = file.placement.settings().map_err(wrong)?;
        let image_store = file.image_store.clone().seen_from(loaded.path.as_deref());
        let holds_secret = etcd.holds_secret() || placement.holds_secret();
        let own = loaded.path.as_deref().filter(|_| holds_secret).into_iter();
        let mut warnings = exposed(
            own.chain(etcd.secret_files()).chain(placement.secret_files()).chain(image_store.secret_file()),
        );
        warnings.extend(endings(etcd.certificates().chain(placement.certificates())));
        warnings.extend(etcd.unused());
        Ok(Self {
            file: loaded.path.clone(),
            warnings,
            defaults: file.defaults.clone().seen_from(loaded.path.as_deref()),
            etcd,
            keys: Keyspace::configured(file.etcd.prefix.as_deref()).map_err(wrong)?,
            placement,
            images: file.images.clone(),
            image_mirrors: file.image_mirrors.clone(),
            strategy: file.strategy,
            image: file.image.clone().unwrap_or_else(|| DEFAULT_IMAGE.to_owned()),
            project: name("project", &file.project)?,
            user: name("user", &file.user)?,
            image_store,
            request_id: None,
        })
    }
}

/// The failure to reach somebody, with those certificates that were shown to them and are over: who refuses one says so to nobody here.
pub(crate) fn with_ended(failure: Failure, ended: &[String]) -> Failure {
    // What was told already has no words.
    if failure.code != UNREACHABLE || failure.message.is_empty() || ended.is_empty() {
        return failure;
    }
    let message = format!(
        "{}; {}; `eschedule cluster renew` makes new ones of those that ran out, and with --authority of an authority, on the host that \
         the cluster is administered from",
        failure.message,
        ended.join(", ")
    );
    Failure { message, ..failure }
}

/// The services that every command talks to. Nothing is sent before it is needed.
pub(crate) struct Session {
    pub(crate) settings: Settings,
    pub(crate) cloud: Cloud,
    /// What distributions publish, as far as it was asked for, by the whole names of their images.
    published: Mutex<BTreeMap<&'static str, Result<ImageRef, Failure>>>,
}

impl Session {
    /// What a distribution publishes, for who calls it so: asked for once, so that all that one command makes is of one image.
    pub(crate) async fn published(&self, known: Known, called: &str) -> Result<ImageRef, Failure> {
        let mut published = self.published.lock().await;
        if let Some(image) = published.get(known.name) {
            return image.clone();
        }
        let image = image::published(known, &self.settings.image_mirrors).await;
        let image = image.map(|image| ImageRef { name: Some(known.name.to_owned()), ..image });
        if let Ok(ImageRef { url, .. }) = &image {
            let name = known.name;
            tell(&format!(
                "eschedule: nobody added an image `{called}`: taking {name} as published at {url}"
            ));
        }
        published.insert(known.name, image.clone());
        image
    }

    pub(crate) async fn open(settings: Settings) -> Result<Self, Failure> {
        let host = ec_runtime::Host::default();
        let request_id = Some(settings.request_id.unwrap_or_else(|| RequestId::new(host.mark())));
        let cloud = Cloud {
            host,
            store: Arc::new(Sealed::new(
                Arc::new(EtcdStore::connect(settings.etcd.clone()).await?),
                settings.etcd.user_data_key.as_deref(),
                settings.keys.secrets(),
            )?),
            placement: Arc::new(PlacementClient::new(&settings.placement)?.on_behalf(request_id)),
            keys: settings.keys.clone(),
            project: settings.project.clone(),
            user: settings.user.clone(),
            request_id,
            notice: |text| tell(&format!("eschedule: {text}")),
        };
        Ok(Self { settings, cloud, published: Mutex::default() })
    }

    /// The failure of a command that changes something: where it came about elsewhere, with the id that it has there.
    pub(crate) fn failed(&self, error: CloudError) -> Failure {
        let of_others = error.is_of_others();
        let mut failure = Failure::from(error);
        if let Some(request_id) = self.cloud.request_id.filter(|_| of_others) {
            failure.message = format!("{} ({request_id})", failure.message);
        }
        failure
    }
}

/// A project, where there can be one.
pub(crate) fn owner(text: &str) -> Result<String, String> {
    match is_owner(text) {
        true => Ok(text.to_owned()),
        false => Err("wanted 1 to 255 characters, as placement has it".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use ec_model::{Instance, encode};
    use ec_store::{MemoryStore, Txn};

    use super::*;

    impl Session {
        /// One of the shipped file, with an etcd in memory, and with a placement that does not answer.
        pub(crate) async fn in_memory() -> Self {
            ec_runtime::install_tls_provider();
            let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../schedule.yaml");
            let settings = Settings::load(Some(Path::new(shipped))).unwrap();
            let mut session = Self::open(settings).await.unwrap();
            session.cloud.store = Arc::new(MemoryStore::new());
            session
        }

        /// Has one of the project be there that was asked for and is placed.
        pub(crate) async fn put(&self, record: Instance) -> Instance {
            let record = Instance { project: self.cloud.project.clone(), ..record };
            let (keys, instance) = (&self.cloud.keys, record.instance);
            let request = format!(
                r#"{{"version":1,"instance":"{instance}","epoch":1,"generation":1,"desired":"active",
                "created_at":"1970-01-01T00:00:00Z"}}"#
            );
            let name = record.name.as_deref().unwrap();
            let txn = Txn::new()
                .put(keys.instance(instance), encode(&record))
                .put(keys.name(record.kind, &record.project, name, instance), "")
                .put(keys.request(record.node().unwrap(), instance), request);
            assert!(self.cloud.store.txn(txn).await.unwrap().succeeded);
            record
        }
    }

    /// The file of a user whose certificate was good until 2025, with an etcd that is not there.
    fn over(directory: &Path) -> (std::path::PathBuf, String) {
        let [file, certificate, key] =
            ["schedule.yaml", "over.pem", "over.key"].map(|name| directory.join(name));
        let mut params = rcgen::CertificateParams::default();
        params.not_after = rcgen::date_time_ymd(2025, 1, 2);
        let pair = rcgen::KeyPair::generate().unwrap();
        std::fs::write(&certificate, params.self_signed(&pair).unwrap().pem()).unwrap();
        std::fs::write(&key, pair.serialize_pem()).unwrap();
        let tls = ec_pki::config::trust(&certificate, &certificate, &key);
        std::fs::write(&file, format!("etcd:\n  endpoints: [\"https://127.0.0.1:1\"]\n{tls}")).unwrap();
        (file, format!("certificate {} ran out on 2025-01-02", certificate.display()))
    }

    #[test]
    fn who_is_not_reached_with_a_certificate_that_is_over_hears_that() {
        ec_runtime::install_tls_provider();
        let directory = tempfile::tempdir().unwrap();
        let (file, over) = over(directory.path());
        let listed = move || {
            let cli = crate::cli::Cli::parse_from([
                "eschedule".as_ref(),
                "--config".as_ref(),
                file.as_os_str(),
                "list".as_ref(),
            ]);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(Box::pin(crate::run(cli))).unwrap_err()
        };
        // As large as the program's own; a test's is not.
        let thread = std::thread::Builder::new().stack_size(8 << 20);
        let failure = thread.spawn(listed).unwrap().join().unwrap();
        assert_eq!(failure.code, UNREACHABLE, "{}", failure.message);
        assert!(
            failure.message.contains(&format!("; {over}; `eschedule cluster renew`")),
            "{}",
            failure.message
        );
    }

    #[test]
    fn of_a_certificate_that_is_over_is_spoken_only_where_it_may_be_why() {
        let ended = ["certificate a.pem ran out".to_owned()];
        for (code, message, ended) in
            [(UNREACHABLE, "not reachable", &[][..]), (1, "not found", &ended), (UNREACHABLE, "", &ended)]
        {
            let failure = Failure { code, message: message.to_owned() };
            assert_eq!(with_ended(failure, ended).message, message);
        }
    }

    #[test]
    fn the_shipped_file_is_valid_and_says_nothing_but_defaults() {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../schedule.yaml");
        let shipped = Settings::load(Some(Path::new(shipped))).map_err(|failure| failure.message).unwrap();
        assert_eq!(shipped.image, DEFAULT_IMAGE);
        assert!(shipped.images.is_empty() && shipped.strategy.is_none() && shipped.image_mirrors.is_empty());
        assert_eq!(shipped.image_store.url(), StoreSection::DEFAULT_URL);
        assert_eq!(shipped.keys, Keyspace::default());
        assert_eq!(shipped.etcd.endpoints, ["localhost:2379"]);
        assert_eq!(shipped.placement.endpoint, "http://localhost:8080");
        let defaults = shipped.defaults;
        assert!(defaults.keys.is_empty() && defaults.user_data.is_none() && defaults.name_prefix.is_none());
        assert_eq!(defaults.ssh_user, None);
        assert_eq!((shipped.project.as_str(), shipped.user.as_str()), ("default", "default"));
    }
}
