//! What `eplacement` does beside serving: moving clouds, looking at one, asking a server how it is.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use ec_model::token_digest;
use ec_pki::Access;
use ec_runtime::exit::{Failure, UNREACHABLE, chain, print, tell};
use ec_store::EtcdStore;
use placement::{
    config::Config,
    live,
    store::{Keys, Limits, Model},
    transfer::{self, Snapshot, TransferError},
};
use reqwest::{Certificate, Client, Identity, redirect::Policy};

use super::StoreOptions;

/// For one answer of a server that is read whole.
const FETCH_TIMEOUT: Duration = Duration::from_secs(60);

/// For the answer whether a server is ready.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(4);

/// So much of what a server says of itself is told.
const TOLD: usize = 500;

/// How a server with TLS is believed, and believes us.
#[derive(clap::Args)]
pub(super) struct Tls {
    /// The authority of the server's certificate, PEM [default: the system's own]
    #[arg(long, value_name = "FILE")]
    ca_cert: Option<PathBuf>,
    /// Our certificate, PEM, where the server demands one
    #[arg(long, value_name = "FILE", requires = "cert_key")]
    cert: Option<PathBuf>,
    /// The key of our certificate, PEM
    #[arg(long, value_name = "FILE", requires = "cert")]
    cert_key: Option<PathBuf>,
}

/// Where the token of `--from` is looked for that no option says. Not clap's business: what is in the environment for a copy that is
/// made every night refuses nothing that has another token, or needs none.
const TOKEN_VARIABLE: &str = "EPLACEMENT_SOURCE_TOKEN";

/// Another Placement API, to read from.
#[derive(clap::Args)]
pub(super) struct Source {
    /// Read from this Placement API, OpenStack's or ours, instead
    #[arg(long, value_name = "URL")]
    from: Option<String>,
    /// A token that may read all of it [env: EPLACEMENT_SOURCE_TOKEN] [default: admin]
    #[arg(long, requires = "from")]
    token: Option<String>,
    /// A file with the token
    #[arg(long, value_name = "FILE", requires = "from", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    #[command(flatten)]
    tls: Tls,
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))
}

impl Tls {
    fn client(&self, url: &str, timeout: Duration) -> Result<Client, Failure> {
        let usable = url::Url::parse(url)
            .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.host().is_some());
        if !usable {
            return Err(Failure::usage(format!(
                "`{url}` is no URL: wanted for example http://127.0.0.1:8080"
            )));
        }
        let wrong = |what: &str, path: &Path, why: String| {
            Failure::usage(format!("{what} {} is not usable: {why}", path.display()))
        };
        if !url.starts_with("https://") && (self.ca_cert.is_some() || self.cert.is_some()) {
            return Err(Failure::usage(format!(
                "certificates are given, and {url} uses none: wanted https://"
            )));
        }
        let mut builder = Client::builder().timeout(timeout).no_proxy().redirect(Policy::none());
        if url.starts_with("http://") {
            // It needs nothing of the system's certificates, which may not be there.
            builder = builder.tls_certs_only([]);
        } else if let Some(path) = &self.ca_cert {
            let found = Certificate::from_pem_bundle(&read(path)?)
                .map_err(|error| wrong("--ca-cert", path, chain(&error)))?;
            if found.is_empty() {
                return Err(wrong("--ca-cert", path, "it holds no certificate".into()));
            }
            builder = builder.tls_certs_only(found);
        }
        if let (Some(cert), Some(key)) = (&self.cert, &self.cert_key) {
            let pem = [read(cert)?, b"\n".to_vec(), read(key)?].concat();
            let identity = Identity::from_pem(&pem)
                .map_err(|error| wrong("--cert with its key", cert, chain(&error)))?;
            builder = builder.identity(identity);
        }
        builder.build().map_err(|error| Failure::usage(chain(&error)))
    }
}

impl Source {
    fn token(&self) -> Result<String, Failure> {
        match (&self.token_file, &self.token) {
            (Some(path), _) => Ok(String::from_utf8_lossy(&read(path)?).trim().to_owned()),
            (None, Some(token)) => Ok(token.clone()),
            (None, None) => {
                let set = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty());
                // What noauth takes for an administrator.
                Ok(set.unwrap_or_else(|| "admin".to_owned()))
            }
        }
    }
}

fn transfer_failure(error: TransferError) -> Failure {
    match error {
        TransferError::Store(error) => error.into(),
        error => Failure::failed(error.to_string()),
    }
}

fn seconds() -> i64 {
    jiff::Timestamp::now().as_second()
}

async fn open(options: &StoreOptions) -> Result<(EtcdStore, Keys, Config), Failure> {
    let loaded = options.load()?;
    let (etcd, keys) = loaded.config.store().map_err(|error| Failure::from(loaded.wrong(error)))?;
    Ok((EtcdStore::connect(etcd).await?, keys, loaded.config))
}

async fn fetch(url: &str, source: &Source) -> Result<Snapshot, Failure> {
    tell(&format!("eplacement: reading {url}"));
    let client = source.tls.client(url, FETCH_TIMEOUT)?;
    live::fetch(client, url, &source.token()?, seconds()).await.map_err(transfer_failure)
}

pub(super) async fn export(
    file: Option<PathBuf>,
    source: Source,
    options: StoreOptions,
) -> Result<(), Failure> {
    let snapshot = match &source.from {
        Some(url) => fetch(url, &source).await?,
        None => {
            let (store, keys, _) = open(&options).await?;
            let loaded = transfer::load(&store, &keys).await.map_err(transfer_failure)?;
            Snapshot::of(&loaded.whole().map_err(transfer_failure)?)
        }
    };
    // Who writes it every night hears of that as long as it can be mended.
    if let Err(error) = snapshot.check_sound() {
        tell(&format!("eplacement: warning: {error}"));
    }
    let text = serde_json::to_string_pretty(&snapshot)
        .map_err(|error| Failure::failed(format!("cannot write the document: {error}")))?;
    let text = text + "\n";
    match file.as_deref().filter(|file| *file != Path::new("-")) {
        // A pipe, or a device.
        Some(path) if path.exists() && !path.is_file() => fs::write(path, text),
        // The last export stays until this one is whole.
        Some(path) => ec_pki::write(path, text, Access::Public),
        None => return print(&text).map(|()| told_export(&snapshot)),
    }
    .map_err(|error| {
        let file = file.as_deref().unwrap_or(Path::new("-")).display();
        Failure::failed(format!("cannot write the document to {file}: {error}"))
    })?;
    told_export(&snapshot);
    Ok(())
}

fn told_export(snapshot: &Snapshot) {
    tell(&format!(
        "eplacement: exported {} providers and {} consumers",
        snapshot.providers.len(),
        snapshot.consumers.len()
    ));
}

pub(super) async fn import(
    file: Option<PathBuf>,
    source: Source,
    options: StoreOptions,
) -> Result<(), Failure> {
    let snapshot = match (&source.from, &file) {
        (Some(url), _) => fetch(url, &source).await?,
        (None, Some(path)) => {
            let wrong =
                |error: &dyn std::fmt::Display| Failure::usage(format!("{}: {error}", path.display()));
            let text = std::fs::read(path).map_err(|error| wrong(&error))?;
            Snapshot::read(&text).map_err(|error| wrong(&error))?
        }
        (None, None) => return Err(Failure::usage("say a document, or --from URL")),
    };
    // A document may be our own, of what an earlier release took: it is all there is of that.
    match snapshot.check_names() {
        Err(error) if source.from.is_some() => return Err(transfer_failure(error)),
        Err(TransferError::Unknown(names)) => tell(&format!(
            "eplacement: warning: {names}: no user made these, and this release does not know them; no query can ask for them"
        )),
        _ => {}
    }
    let (store, keys, config) = open(&options).await?;
    let operations = config.max_txn_ops.unwrap_or(Limits::default().operations);
    let imported = transfer::import(&store, &keys, &snapshot, operations, seconds()).await;
    let loose = imported.map_err(|error| match (error, &file) {
        (error @ TransferError::Unsound(_), Some(path)) => {
            Failure::usage(format!("{}: {error}", path.display()))
        }
        (error, _) => transfer_failure(error),
    })?;
    for finding in loose {
        tell(&format!("eplacement: warning: {finding}"));
    }
    if let Some(url) = &source.from {
        // What changed at the source meanwhile would be lost without a word.
        let again = fetch(url, &source).await?;
        if let Some(first) = snapshot.differences(&again).first() {
            return Err(Failure::failed(format!(
                "{url} changed during the import ({first}); nobody may write there meanwhile: delete what lies under \
                 {} and import again",
                keys.prefix().as_str()
            )));
        }
    }
    tell(&format!(
        "eplacement: imported {} providers and {} consumers; both sides are the same",
        snapshot.providers.len(),
        snapshot.consumers.len()
    ));
    Ok(())
}

pub(super) async fn check(options: StoreOptions) -> Result<(), Failure> {
    let (store, keys, _) = open(&options).await?;
    let transfer::Loaded { state, importing, foreign } =
        transfer::load(&store, &keys).await.map_err(transfer_failure)?;
    let mut findings = ec_placement_model::check::check(&state);
    findings.extend(importing);
    let foreign = foreign.iter().map(|key| format!("{key} is not ours, and is passed over"));
    let warnings = ec_placement_model::check::warnings(&state).into_iter().chain(foreign);
    let warnings = warnings.map(|warning| format!("warning: {warning}"));
    for finding in findings.iter().cloned().chain(warnings) {
        print(&format!("{finding}\n"))?;
    }
    if findings.is_empty() {
        tell(&format!(
            "eplacement: {} providers and {} consumers fit together",
            state.providers().count(),
            state.consumer_count()
        ));
        return Ok(());
    }
    Err(Failure::failed(format!("{} findings", findings.len())))
}

pub(super) async fn health(url: String, tls: Tls) -> Result<(), Failure> {
    let unreachable = |error: String| Failure { code: UNREACHABLE, message: error };
    let client = tls.client(&url, HEALTH_TIMEOUT)?;
    let mut answer =
        client.get(format!("{}/readyz", url.trim_end_matches('/'))).send().await.map_err(|error| {
            unreachable(format!("nothing answers at {url}: {}", chain(&error.without_url())))
        })?;
    if answer.status().is_success() {
        return Ok(());
    }
    let status = answer.status();
    let said = answer.chunk().await.ok().flatten().unwrap_or_default();
    let said: String = String::from_utf8_lossy(&said).trim().chars().take(TOLD).collect();
    Err(unreachable(format!("{url} answers with HTTP status {status}: {said}")))
}

pub(super) fn hash_token(name: &str, role: &str, project: Option<&str>) -> Result<(), Failure> {
    if role == "member" && project.is_none() {
        return Err(Failure::usage("a member is one of a project: name it by --project"));
    }
    let mut token = String::new();
    std::io::stdin()
        .read_line(&mut token)
        .map_err(|error| Failure::failed(format!("cannot read standard input: {}", chain(&error))))?;
    let token = token.trim();
    if token.len() < 16 {
        return Err(Failure::usage(
            "the token on standard input has less than 16 characters; `openssl rand -hex 32` makes a good one",
        ));
    }
    let entry = serde_json::json!({
        "sha256": token_digest(token), "name": name, "roles": [role], "project": project,
    });
    #[expect(clippy::print_stdout, reason = "what was asked for")]
    {
        println!("{entry}");
    }
    Ok(())
}
