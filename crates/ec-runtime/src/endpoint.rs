//! Where a service is, by its name in a configuration.

use std::net::IpAddr;

/// Whether `host:port`, or a URL, is this machine's own.
pub fn is_loopback(endpoint: &str) -> bool {
    let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    let authority = rest.split('/').next().unwrap_or_default();
    let host = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, _)) => host,
        None => authority.rsplit_once(':').map_or(authority, |(host, _)| host),
    };
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known_in_every_spelling() {
        for own in [
            "localhost:2379",
            "127.0.0.1:2379",
            "http://127.1.2.3:1/",
            "[::1]:2379",
            "LOCALHOST:1",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert!(is_loopback(own), "{own}");
        }
        for far in ["etcd1:2379", "10.0.0.1:2379", "http://[fd00::1]:2379", "localhost.evil:1"] {
            assert!(!is_loopback(far), "{far}");
        }
    }
}
