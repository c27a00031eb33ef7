//! What an operator should know of the services that a configuration names, in one line each.

use std::net::IpAddr;

use ec_placement_client::PlacementConfig;
use ec_store::EtcdConfig;

/// What an etcd means that lets everybody in who reaches it; nothing where it does not, or only this machine
/// reaches it.
pub fn open_etcd(config: &EtcdConfig) -> Option<String> {
    let asks = config.user.is_some() || config.tls.as_ref().is_some_and(|tls| tls.client.is_some());
    let far: Vec<_> = config.endpoints.iter().filter(|endpoint| !is_loopback(endpoint)).cloned().collect();
    (!asks && !far.is_empty()).then(|| {
        format!(
            "etcd at {} lets in whoever reaches it, and who writes there is root on every node: give it users or client certificates, see docs/security.md",
            far.join(", ")
        )
    })
}

/// The same of placement.
pub fn open_placement(config: &PlacementConfig) -> Option<String> {
    let asks = config.token_file.is_some()
        || config.client_cert.is_some()
        || config.token != PlacementConfig::default().token;
    (!asks && !is_loopback(&config.endpoint)).then(|| {
        format!(
            "placement at {} lets in whoever says `admin`: give it tokens, see docs/security.md",
            config.endpoint
        )
    })
}

/// Whether `host:port`, or a URL, is this machine's own.
fn is_loopback(endpoint: &str) -> bool {
    let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    let authority = rest.split('/').next().unwrap_or_default();
    let host = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, _)) => host,
        None => authority.rsplit_once(':').map_or(authority, |(host, _)| host),
    };
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etcd(endpoint: &str) -> EtcdConfig {
        EtcdConfig { endpoints: vec![endpoint.to_owned()], ..EtcdConfig::default() }
    }

    #[test]
    fn only_what_others_reach_and_nobody_guards_is_told() {
        for endpoint in
            ["localhost:2379", "127.0.0.1:2379", "http://127.1.2.3:1/", "[::1]:2379", "LOCALHOST:1"]
        {
            assert_eq!(open_etcd(&etcd(endpoint)), None, "{endpoint}");
        }
        for endpoint in ["etcd1:2379", "10.0.0.1:2379", "http://[fd00::1]:2379", "localhost.evil:1"] {
            assert!(open_etcd(&etcd(endpoint)).is_some_and(|line| line.contains(endpoint)), "{endpoint}");
        }
        let guarded = EtcdConfig { user: Some("u".into()), ..etcd("etcd1:2379") };
        assert_eq!(open_etcd(&guarded), None);
        let placement = |endpoint: &str, token: &str| PlacementConfig {
            endpoint: endpoint.into(),
            token: token.into(),
            ..PlacementConfig::default()
        };
        assert_eq!(open_placement(&placement("http://localhost:8080", "admin")), None);
        assert_eq!(open_placement(&placement("http://p:8080", "s3cret")), None);
        assert!(open_placement(&placement("http://p:8080", "admin")).is_some());
    }
}
