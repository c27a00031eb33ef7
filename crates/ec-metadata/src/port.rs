//! The address and port that guests ask, and who has them.
//!
//! Another metadata server of this host listens at exactly that address: it answers for the guests of all of them. Whoever listens at all
//! addresses of the host knows no guest, and would answer them whatever it has, so the address is not to be on the bridge then.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt::IpFreebind};
use tokio::net::{TcpListener, TcpSocket};

/// Guests ask rarely.
const BACKLOG: u32 = 1024;

/// IPv4 sockets of this network namespace.
const SOCKETS: &str = "/proc/self/net/tcp";

/// What stands there of one that listens.
const LISTENS: &str = "0A";

/// A server that begins, or ends, has the port for a moment in which it does not listen.
const MOMENT: Duration = Duration::from_millis(100);

/// Who has address and port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// Another server, which listens at this very address.
    Server,
    /// Somebody who has this port of all addresses.
    Stranger,
}

/// Takes address and port, or says who has them. The address need not be there yet, so that nobody is answered by a stranger while this is
/// found out.
pub(crate) async fn take(address: Ipv4Addr, port: u16) -> io::Result<Result<TcpListener, Holder>> {
    let mut is_first = true;
    loop {
        match bind(address, port) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            taken => return taken.map(Ok),
        }
        // On a host with many connections that takes its time.
        let is_server = tokio::task::spawn_blocking(move || is_listened_at(address, port)).await;
        if is_server.unwrap_or(true) {
            return Ok(Err(Holder::Server));
        }
        if !std::mem::take(&mut is_first) {
            return Ok(Err(Holder::Stranger));
        }
        tokio::time::sleep(MOMENT).await;
    }
}

/// Who has address and port; none where they are free.
///
/// # Errors
/// They may not be had by this process, whoever has them.
pub async fn holder(address: Ipv4Addr, port: u16) -> io::Result<Option<Holder>> {
    Ok(take(address, port).await?.err())
}

fn bind(address: Ipv4Addr, port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    setsockopt(&socket, IpFreebind, &true)?;
    socket.bind(SocketAddr::from((address, port)))?;
    socket.listen(BACKLOG)
}

/// Where that cannot be seen, whoever has the port is taken for a server.
fn is_listened_at(address: Ipv4Addr, port: u16) -> bool {
    match fs::read_to_string(SOCKETS) {
        Ok(sockets) => has_listener(&sockets, address, port),
        Err(error) => {
            tracing::debug!(%error, path = SOCKETS, "cannot see who listens where");
            true
        }
    }
}

/// Whether one of the sockets listens at exactly this address and port.
fn has_listener(sockets: &str, address: Ipv4Addr, port: u16) -> bool {
    // As the kernel has it in memory.
    let local = format!("{:08X}:{port:04X}", u32::from_ne_bytes(address.octets()));
    sockets.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(1) == Some(&local) && fields.nth(1) == Some(LISTENS)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;

    #[tokio::test]
    async fn who_listens_at_this_very_address_is_a_server_and_who_listens_at_all_of_them_is_none() {
        for (at, is) in [(HERE, Holder::Server), (Ipv4Addr::UNSPECIFIED, Holder::Stranger)] {
            let other = TcpListener::bind((at, 0)).await.unwrap();
            let port = other.local_addr().unwrap().port();
            assert_eq!(holder(HERE, port).await.unwrap(), Some(is));
            // Who is connected there, on either side, is no listener.
            let (_near, _far) = (tokio::net::TcpStream::connect((HERE, port)).await.unwrap(), other);
            assert_eq!(holder(HERE, port).await.unwrap(), Some(is));
        }
    }

    #[tokio::test]
    async fn what_is_given_back_while_one_looks_is_taken() {
        let other = TcpSocket::new_v4().unwrap();
        other.bind((HERE, 0).into()).unwrap();
        let port = other.local_addr().unwrap().port();
        let (taken, ()) = tokio::join!(take(HERE, port), async {
            tokio::time::sleep(MOMENT / 2).await;
            drop(other);
        });
        assert_eq!(taken.unwrap().unwrap().local_addr().unwrap(), (HERE, port).into());
    }

    #[tokio::test]
    async fn an_address_that_is_not_there_yet_can_be_taken() {
        // For documentation, so that no host has it.
        let elsewhere = Ipv4Addr::new(192, 0, 2, 1);
        let taken = take(elsewhere, 0).await.unwrap().unwrap();
        let port = taken.local_addr().unwrap().port();
        assert_eq!(holder(elsewhere, port).await.unwrap(), Some(Holder::Server));
        drop(taken);
        assert_eq!(holder(elsewhere, port).await.unwrap(), None);
    }
}
