//! The service's address on the bridge.
//!
//! An address that a server put there carries a label of ours (`ip addr` shows it as `virbr0:md`). That is
//! how a server knows the address of one before it that was killed, and takes it over, from one that the
//! operator or the network's own definition put there, which stays when the server ends.

use std::{
    io,
    net::{IpAddr, Ipv4Addr},
};

use futures::TryStreamExt;
use nix::{errno::Errno, net::if_::if_nametoindex};
use rtnetlink::{
    Handle,
    packet_route::{
        AddressFamily,
        address::{AddressAttribute, AddressMessage, AddressScope},
    },
};
use tokio::task::JoinHandle;

/// The longest label that the kernel takes.
const LABEL_MAX: usize = 15;
const LABEL_END: &str = ":md";

/// What was found or done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// There is no such bridge now.
    NoBridge,
    /// The address was missing and is there now.
    Added,
    /// The address is there already.
    There,
}

/// The kernel refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BridgeError {
    #[error("not permitted")]
    NotPermitted,
    #[error("{0}")]
    Kernel(#[source] io::Error),
    #[error("netlink failed")]
    Netlink(#[source] rtnetlink::Error),
}

pub(crate) struct Bridge {
    name: String,
    address: Ipv4Addr,
    handle: Handle,
    connection: JoinHandle<()>,
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Bridge {
    pub(crate) fn open(name: String, address: Ipv4Addr) -> io::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        Ok(Self { name, address, handle, connection: tokio::spawn(connection) })
    }

    /// Whether there is such a bridge now.
    pub(crate) fn is_there(&self) -> Result<bool, BridgeError> {
        Ok(self.index()?.is_some())
    }

    /// Puts the address on the bridge where it is not there. One message where it is.
    pub(crate) async fn ensure(&self) -> Result<Presence, BridgeError> {
        let Some(index) = self.index()? else { return Ok(Presence::NoBridge) };
        let mut request = self.handle.address().add(index, IpAddr::V4(self.address), 32);
        let message = request.message_mut();
        // It means something on this link only, and is never to be taken as a source for elsewhere.
        message.header.scope = AddressScope::Link;
        message.attributes.push(AddressAttribute::Label(self.label()));
        match request.execute().await {
            Ok(()) => Ok(Presence::Added),
            Err(error) => match errno(&error) {
                Some(Errno::EEXIST) => Ok(Presence::There),
                Some(Errno::ENODEV) => Ok(Presence::NoBridge),
                _ => Err(refused(error)),
            },
        }
    }

    /// Whether the address on the bridge is one that a server put there.
    pub(crate) async fn is_ours(&self) -> Result<bool, BridgeError> {
        Ok(self
            .find()
            .await?
            .is_some_and(|message| message.attributes.contains(&AddressAttribute::Label(self.label()))))
    }

    /// Takes the address off the bridge; it or the bridge being gone is fine.
    pub(crate) async fn remove(&self) -> Result<(), BridgeError> {
        let Some(message) = self.find().await? else { return Ok(()) };
        match self.handle.address().del(message).execute().await {
            Ok(()) => Ok(()),
            Err(error) => match errno(&error) {
                Some(Errno::EADDRNOTAVAIL | Errno::ENODEV) => Ok(()),
                _ => Err(refused(error)),
            },
        }
    }

    async fn find(&self) -> Result<Option<AddressMessage>, BridgeError> {
        let Some(index) = self.index()? else { return Ok(None) };
        let mut request = self.handle.address().get();
        request.message_mut().header.family = AddressFamily::Inet;
        let mut messages = Box::pin(
            request
                .set_link_index_filter(index)
                .set_prefix_length_filter(32)
                .set_address_filter(IpAddr::V4(self.address))
                .execute(),
        );
        let mut found = None;
        // To the end, or the rest of the answer would meet the next request.
        while let Some(message) = messages.try_next().await.map_err(refused)? {
            found = Some(message);
        }
        Ok(found)
    }

    fn index(&self) -> Result<Option<u32>, BridgeError> {
        match if_nametoindex(self.name.as_str()) {
            Ok(index) => Ok(Some(index)),
            Err(Errno::ENODEV | Errno::ENXIO) => Ok(None),
            Err(errno) => Err(BridgeError::Kernel(errno.into())),
        }
    }

    fn label(&self) -> String {
        let kept: String = self.name.chars().take(LABEL_MAX - LABEL_END.len()).collect();
        kept + LABEL_END
    }
}

fn errno(error: &rtnetlink::Error) -> Option<Errno> {
    match error {
        rtnetlink::Error::NetlinkError(message) => Some(Errno::from_raw(-message.raw_code())),
        _ => None,
    }
}

fn refused(error: rtnetlink::Error) -> BridgeError {
    match errno(&error) {
        Some(Errno::EPERM | Errno::EACCES) => BridgeError::NotPermitted,
        Some(errno) => BridgeError::Kernel(errno.into()),
        None => BridgeError::Netlink(error),
    }
}
