//! Where a service is, by its name in a configuration.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use tokio::net::TcpStream;

/// This machine answers itself at once, or not at all.
const OWN_ANSWER: Duration = Duration::from_millis(300);

fn authority(endpoint: &str) -> &str {
    let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    rest.split('/').next().unwrap_or_default()
}

/// Where else a service that is spoken to by loopback takes connections: at which of this machine's addresses
/// that others may reach.
pub async fn beyond_loopback(endpoint: &str) -> Vec<SocketAddr> {
    let port = authority(endpoint).rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let (true, Some(port)) = (is_loopback(endpoint), port) else { return Vec::new() };
    let own = nix::ifaddrs::getifaddrs().into_iter().flatten().filter_map(|interface| {
        let address = interface.address?;
        let (v4, v6) = (address.as_sockaddr_in(), address.as_sockaddr_in6());
        v4.map(|address| IpAddr::from(address.ip())).or(v6.map(|address| address.ip().into()))
    });
    let others = own.filter(|ip| match ip {
        IpAddr::V4(ip) => !ip.is_loopback(),
        // A link-local one needs its interface said, too.
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    });
    answering(others.map(|ip| SocketAddr::new(ip, port)).collect()).await
}

async fn answering(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for address in addresses {
        if matches!(tokio::time::timeout(OWN_ANSWER, TcpStream::connect(address)).await, Ok(Ok(_))) {
            found.push(address);
        }
    }
    found
}

/// `host:port`, or a URL, fit for logs: without a user and a password in front of the host.
pub fn without_user(endpoint: &str) -> String {
    let authority = authority(endpoint);
    match authority.rsplit_once('@') {
        Some((_, host)) => endpoint.replacen(authority, host, 1),
        None => endpoint.to_owned(),
    }
}

/// Whether `host:port`, or a URL, is this machine's own.
pub fn is_loopback(endpoint: &str) -> bool {
    let authority = authority(endpoint);
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
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

    #[tokio::test]
    async fn a_service_is_found_where_it_listens_and_nowhere_else() {
        let listener = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap();
        let there = listener.local_addr().unwrap();
        let elsewhere = SocketAddr::new([127, 0, 0, 3].into(), there.port());
        assert_eq!(answering(vec![elsewhere, there]).await, [there]);
        assert_eq!(beyond_loopback(&format!("10.0.0.1:{}", there.port())).await, []);
        assert_eq!(beyond_loopback(&format!("http://127.0.0.2:{}/", there.port())).await, []);
    }

    #[test]
    fn this_machine_is_known_in_every_spelling() {
        for own in [
            "localhost:2379",
            "127.0.0.1:2379",
            "http://127.1.2.3:1/",
            "[::1]:2379",
            "LOCALHOST:1",
            "[::ffff:127.0.0.1]:1",
            "http://u:p@localhost:1/",
        ] {
            assert!(is_loopback(own), "{own}");
        }
        for far in ["etcd1:2379", "10.0.0.1:2379", "http://[fd00::1]:2379", "localhost.evil:1"] {
            assert!(!is_loopback(far), "{far}");
        }
    }

    #[test]
    fn no_password_is_told() {
        for (endpoint, told) in [
            ("http://u:p@host:1/x@y", "http://host:1/x@y"),
            ("u:p@q@host:1", "host:1"),
            ("http://host:1", "http://host:1"),
            ("host", "host"),
        ] {
            assert_eq!(without_user(endpoint), told);
        }
    }
}
