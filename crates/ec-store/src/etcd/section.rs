//! The `etcd` section of configuration files.

use std::{path::PathBuf, time::Duration};

use ec_runtime::config::Secret;
use serde::Deserialize;

use super::{EtcdConfig, EtcdTls};

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
    /// A file with the keys that user-data is sealed with in etcd, 64 hexadecimal digits a line; the first seals, all open.
    pub user_data_key: Option<PathBuf>,
    /// The prefix of every key; default `/ecompute`.
    pub prefix: Option<String>,
}

/// Where etcd listens on a developer's machine.
const ETCD_DEFAULT: (&str, u16) = ("localhost", 2379);
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
            user_data_key: self.user_data_key.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ec_runtime::config::parse;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Example {
        etcd: EtcdSection,
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
    fn the_password_does_not_show() {
        let config: Example = parse("etcd: {user: a, password: hunter2}", Path::new("x")).unwrap();
        let settings = config.etcd.settings().unwrap();
        assert!(settings.holds_secret());
        assert!(!format!("{config:?} {settings:?}").contains("hunter2"));
    }
}
