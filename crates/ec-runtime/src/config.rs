//! Configuration files: where they are looked for, how their mistakes are told, and the two sections
//! that agent and command line share.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use ec_model::Keyspace;
use ec_placement_client::PlacementConfig;
use ec_store::{EtcdConfig, EtcdTls};
use serde::{Deserialize, de::DeserializeOwned};

/// A configuration that cannot be used. Says where, what, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is there and cannot be read, or was named and is not there.
    #[error("cannot read configuration {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file's content is wrong.
    #[error("{location}: {message}")]
    Wrong {
        /// `file:line:column`, or the file alone where the place is not known.
        location: String,
        /// What is wrong and what would be right.
        message: String,
    },
}

/// A configuration and the file that it came from; none where defaults serve.
#[derive(Debug)]
pub struct Loaded<T> {
    /// What the file says, with defaults for the rest.
    pub config: T,
    /// The file.
    pub path: Option<PathBuf>,
}

impl<T> Loaded<T> {
    /// An error about a value of this configuration.
    pub fn wrong(&self, message: impl Into<String>) -> ConfigError {
        let location =
            self.path.as_ref().map_or("configuration".to_owned(), |path| path.display().to_string());
        ConfigError::Wrong { location, message: message.into() }
    }
}

/// Reads the named file, else the first of `places` that is there, else defaults.
pub fn load<T: DeserializeOwned + Default>(
    named: Option<&Path>,
    places: &[&Path],
) -> Result<Loaded<T>, ConfigError> {
    let candidates = named.map_or_else(|| places.to_vec(), |path| vec![path]);
    for path in candidates {
        match fs::read_to_string(path) {
            Ok(text) => return Ok(Loaded { config: parse(&text, path)?, path: Some(path.to_owned()) }),
            Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => {}
            Err(source) => return Err(ConfigError::Unreadable { path: path.to_owned(), source }),
        }
    }
    Ok(Loaded { config: T::default(), path: None })
}

/// Reads a configuration from its text; `path` is for messages.
pub fn parse<T: DeserializeOwned + Default>(text: &str, path: &Path) -> Result<T, ConfigError> {
    // An empty file, or one with comments only, is no mapping for the YAML reader; for people it is
    // a file that changes nothing.
    if text
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#') || line.trim() == "---")
    {
        return Ok(T::default());
    }
    serde_yaml::from_str(text).map_err(|error| {
        let location = error.location().map_or_else(
            || path.display().to_string(),
            |place| format!("{}:{}:{}", path.display(), place.line(), place.column()),
        );
        ConfigError::Wrong { location, message: explain(&error.to_string()) }
    })
}

/// The YAML reader's words, without the place (which stands in front already) and with the nearest
/// key where one is unknown.
fn explain(text: &str) -> String {
    let text = text.rfind(" at line ").map_or(text, |at| &text[..at]);
    let Some((section, rest)) = text.split_once("unknown field `") else {
        return text.to_owned();
    };
    let Some((key, expected)) = rest.split_once('`') else {
        return text.to_owned();
    };
    let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    let nearest = known
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(&key.to_lowercase(), candidate), candidate))
        .min()
        // Further away than half of its letters, a suggestion only confuses.
        .filter(|(distance, candidate)| *distance <= candidate.len().div_ceil(2));
    let hint = match nearest {
        Some((_, candidate)) => format!("did you mean `{candidate}`?"),
        None => format!("known keys are {}", known.join(", ")),
    };
    format!("{section}unknown key `{key}`; {hint}")
}

/// The `etcd` section.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EtcdSection {
    /// A single server's host; default localhost.
    pub host: Option<String>,
    /// A single server's port; default 2379.
    pub port: Option<u16>,
    /// The members of a cluster, as `host:port` or URLs; instead of host and port.
    pub endpoints: Option<Vec<String>>,
    /// User and password go together.
    pub user: Option<String>,
    /// See `user`.
    pub password: Option<Secret>,
    /// The certificate authority's file, which also switches TLS on.
    pub ca_cert: Option<PathBuf>,
    /// Our certificate's file; goes with `cert_key`.
    pub cert_cert: Option<PathBuf>,
    /// Our key's file.
    pub cert_key: Option<PathBuf>,
    /// Seconds for one request; default 5.
    pub timeout: Option<f64>,
    /// The prefix of every key; default `/ecompute`.
    pub prefix: Option<String>,
}

/// The `placement` section.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementSection {
    /// Base URL; default `http://localhost:8080`.
    pub endpoint: Option<String>,
    /// Sent as `X-Auth-Token`; default `admin`.
    pub token: Option<Secret>,
    /// A file with the token, instead of `token`; read again when it changes.
    pub token_file: Option<PathBuf>,
    /// The certificate authority's file; without one the system's authorities count.
    pub ca_cert: Option<PathBuf>,
    /// Our certificate's file; goes with `cert_key`.
    pub cert_cert: Option<PathBuf>,
    /// Our key's file.
    pub cert_key: Option<PathBuf>,
}

/// A text that never shows in logs.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(hidden)")
    }
}

/// Where etcd listens on a developer's machine.
const ETCD_DEFAULT: (&str, u16) = ("localhost", 2379);
/// Of a file's mode, as in stat(2): S_IROTH.
const READABLE_FOR_OTHERS: u32 = 0o004;
/// One request to etcd is milliseconds; five seconds outlast a leader election.
const ETCD_TIMEOUT: f64 = 5.0;

impl EtcdSection {
    /// The checked settings; the error names the key.
    pub fn settings(&self) -> Result<EtcdConfig, String> {
        let endpoints = match (&self.endpoints, &self.host, self.port) {
            (Some(_), Some(_), _) | (Some(_), _, Some(_)) => {
                return Err(
                    "etcd.endpoints stands instead of etcd.host and etcd.port: give one or the other".into(),
                );
            }
            (Some(endpoints), None, None) if endpoints.is_empty() => {
                return Err(
                    "etcd.endpoints is empty: name at least one member, for example [\"etcd1:2379\"]".into(),
                );
            }
            (Some(endpoints), None, None) => endpoints.clone(),
            (None, host, port) => {
                let host = host.as_deref().unwrap_or(ETCD_DEFAULT.0);
                // An IPv6 address needs its brackets before a port.
                let host = if host.contains(':') && !host.starts_with('[') {
                    format!("[{host}]")
                } else {
                    host.into()
                };
                vec![format!("{host}:{}", port.unwrap_or(ETCD_DEFAULT.1))]
            }
        };
        if self.user.is_some() != self.password.is_some() {
            return Err("etcd.user and etcd.password go together: one of them is missing".into());
        }
        let client_cert = match (&self.cert_cert, &self.cert_key) {
            (Some(cert), Some(key)) => Some((cert.clone(), key.clone())),
            (None, None) => None,
            _ => return Err("etcd.cert_cert and etcd.cert_key go together: one of them is missing".into()),
        };
        let tls = match (&self.ca_cert, client_cert) {
            (Some(ca_cert), client_cert) => Some(EtcdTls { ca_cert: ca_cert.clone(), client: client_cert }),
            (None, None) => None,
            (None, Some(_)) => return Err("etcd.cert_cert needs etcd.ca_cert beside it".into()),
        };
        let timeout = self.timeout.unwrap_or(ETCD_TIMEOUT);
        if !(timeout.is_finite() && (0.1..=3600.0).contains(&timeout)) {
            return Err(format!("etcd.timeout is {timeout}: wanted seconds from 0.1 to 3600"));
        }
        Ok(EtcdConfig {
            endpoints,
            user: self.user.clone(),
            password: self.password.as_ref().map(|secret| secret.0.clone()),
            tls,
            timeout: Duration::from_secs_f64(timeout),
        })
    }

    /// The keys' layout.
    pub fn keyspace(&self) -> Result<Keyspace, String> {
        let prefix = self.prefix.as_deref().unwrap_or(Keyspace::DEFAULT_ROOT);
        if prefix.trim_matches('/').is_empty() || prefix.chars().any(char::is_control) {
            return Err(format!("etcd.prefix `{prefix}` is empty: wanted for example /ecompute"));
        }
        Ok(Keyspace::new(prefix))
    }
}

impl PlacementSection {
    /// The checked settings; the error names the key.
    pub fn settings(&self) -> Result<PlacementConfig, String> {
        let defaults = PlacementConfig::default();
        if self.token.is_some() && self.token_file.is_some() {
            return Err(
                "placement.token_file stands instead of placement.token: give one or the other".into()
            );
        }
        let client_cert = match (&self.cert_cert, &self.cert_key) {
            (Some(cert), Some(key)) => Some((cert.clone(), key.clone())),
            (None, None) => None,
            _ => {
                return Err(
                    "placement.cert_cert and placement.cert_key go together: one of them is missing".into()
                );
            }
        };
        Ok(PlacementConfig {
            endpoint: self.endpoint.clone().unwrap_or(defaults.endpoint),
            token: self.token.as_ref().map_or(defaults.token, |secret| secret.0.clone()),
            token_file: self.token_file.clone(),
            ca_cert: self.ca_cert.clone(),
            client_cert,
            timeout: defaults.timeout,
        })
    }
}

/// One line for each file with a secret in it that every user of this machine may read.
pub fn exposed(file: Option<&Path>, etcd: &EtcdConfig, placement: &PlacementConfig) -> Vec<String> {
    // The default token is no secret: it only says that nobody is asked for one.
    let in_file = etcd.password.is_some()
        || (placement.token_file.is_none() && placement.token != PlacementConfig::default().token);
    let keys = [etcd.tls.as_ref().and_then(|tls| tls.client.as_ref()), placement.client_cert.as_ref()];
    let keys = keys.into_iter().flatten().map(|(_, key)| key.as_path());
    let secret = file.filter(|_| in_file).into_iter().chain(placement.token_file.as_deref()).chain(keys);
    secret
        .filter(|path| {
            fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & READABLE_FOR_OTHERS != 0)
        })
        .map(|path| {
            let path = path.display();
            format!("{path} holds a secret and every user may read it: chmod o-r {path}")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Example {
        etcd: EtcdSection,
        placement: PlacementSection,
    }

    fn wrong(text: &str) -> String {
        parse::<Example>(text, Path::new("compute.yaml")).unwrap_err().to_string()
    }

    #[test]
    fn an_unknown_key_is_named_with_its_place_and_the_nearest_right_one() {
        let text = wrong("etcd:\n  host: a\n  prot: 2379\n");
        assert!(
            text.starts_with("compute.yaml:3:3: etcd: unknown key `prot`; did you mean `port`?"),
            "{text}"
        );
        let text = wrong("plaecment:\n  endpoint: x\n");
        assert!(
            text.starts_with("compute.yaml:1:1: unknown key `plaecment`; did you mean `placement`?"),
            "{text}"
        );
        let text = wrong("zzzzzzzzzzzzzzzz: 1\n");
        assert!(text.contains("known keys are etcd, placement"), "{text}");
    }

    #[test]
    fn a_wrong_type_is_named_with_its_key_and_place() {
        let text = wrong("etcd:\n  port: many\n");
        assert!(
            text.starts_with("compute.yaml:2:9: etcd.port: invalid type: string \"many\", expected u16"),
            "{text}"
        );
        let text = wrong("- a\n");
        assert!(text.starts_with("compute.yaml:1:1: invalid type: sequence"), "{text}");
    }

    #[test]
    fn an_empty_file_means_defaults_and_a_named_one_must_exist() {
        assert!(parse::<Example>("# nothing\n---\n", Path::new("x")).unwrap().etcd.host.is_none());
        let error = load::<Example>(Some(Path::new("/nonexistent/x.yaml")), &[]).unwrap_err();
        assert_eq!(error.to_string(), "cannot read configuration /nonexistent/x.yaml");
        assert!(load::<Example>(None, &[Path::new("/nonexistent/x.yaml")]).unwrap().path.is_none());
    }

    #[test]
    fn what_does_not_fit_together_is_refused_by_name() {
        for (text, wanted) in [
            ("etcd: {endpoints: [a], host: b}", "etcd.endpoints stands instead"),
            ("etcd: {endpoints: []}", "etcd.endpoints is empty"),
            ("etcd: {user: a}", "etcd.user and etcd.password"),
            ("etcd: {cert_cert: a}", "etcd.cert_cert and etcd.cert_key"),
            ("etcd: {cert_cert: a, cert_key: b}", "needs etcd.ca_cert"),
            ("etcd: {timeout: 0}", "etcd.timeout is 0"),
            ("etcd: {timeout: .nan}", "etcd.timeout is NaN"),
        ] {
            let config: Example = parse(text, Path::new("x")).unwrap();
            let error = config.etcd.settings().unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn what_does_not_fit_together_for_placement_is_refused_by_name() {
        for (text, wanted) in [
            ("placement: {token: a, token_file: b}", "placement.token_file stands instead"),
            ("placement: {cert_cert: a}", "placement.cert_cert and placement.cert_key"),
        ] {
            let config: Example = parse(text, Path::new("x")).unwrap();
            let error = config.placement.settings().unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn a_secret_that_everybody_may_read_is_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let told = |text: &str, mode: u32| {
            fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
            let config: Example = parse(text, file.path()).unwrap();
            let (etcd, placement) = (config.etcd.settings().unwrap(), config.placement.settings().unwrap());
            exposed(Some(file.path()), &etcd, &placement)
        };
        assert_eq!(told("placement: {token: s3cret}", 0o644).len(), 1);
        assert_eq!(told("etcd: {user: a, password: b}", 0o604).len(), 1);
        assert_eq!(told(&format!("placement: {{token_file: {}}}", file.path().display()), 0o644).len(), 1);
        assert!(told("placement: {token: s3cret}", 0o640).is_empty());
        assert!(told("placement: {token: admin}", 0o644).is_empty());
        assert!(told("", 0o644).is_empty());
    }

    #[test]
    fn secrets_do_not_show() {
        let config: Example =
            parse("etcd: {user: a, password: hunter2}\nplacement: {token: hunter2}", Path::new("x")).unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "[ -~\n]{0,200}") {
            let _ = parse::<Example>(&text, Path::new("x")).map(|config| config.etcd.settings());
        }
    }
}
