//! The `placement` section of configuration files.

use std::path::PathBuf;

use ec_runtime::config::Secret;
use serde::Deserialize;

use crate::PlacementConfig;

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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ec_runtime::config::parse;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Example {
        placement: PlacementSection,
    }

    #[test]
    fn what_does_not_fit_together_is_refused_by_name() {
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
    fn the_default_token_is_no_secret_and_another_one_does_not_show() {
        let of = |text: &str| parse::<Example>(text, Path::new("x")).unwrap();
        let holds = |text: &str| of(text).placement.settings().unwrap().holds_secret();
        assert!(holds("placement: {token: hunter2}"));
        assert!(!holds("placement: {token: admin}") && !holds("") && !holds("placement: {token_file: f}"));
        let config = of("placement: {token: hunter2}");
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    #[test]
    fn only_a_placement_that_others_reach_and_that_believes_everybody_is_told() {
        let placement = |endpoint: &str, token: &str| PlacementConfig {
            endpoint: endpoint.into(),
            token: token.into(),
            ..PlacementConfig::default()
        };
        assert_eq!(placement("http://localhost:8080", "admin").open_door(), None);
        assert_eq!(placement("http://p:8080", "s3cret").open_door(), None);
        assert!(placement("http://p:8080", "admin").open_door().is_some());
    }
}
