//! The life of a server: bridge, address, port; hold them; give them back.
//!
//! ```text
//! wait (no bridge, or another has the port) ──▶ hold (answer; put the address back when it vanishes)
//!            └──────────── asked to end ────────────────────┴──▶ drain, remove the address, close
//! ```
//!
//! Only trouble that no waiting mends ends it: missing rights, a kernel that refuses from the start, or a fault of its own.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    Account, Caller, InstanceRecord, MetadataService, Origin, RecordDir,
    account::Standing,
    bridge::{Bridge, BridgeError, Presence},
    caller::{self, MARK_ACCEPTED, Marked},
    http,
    port::{self, Holder},
    registry::{self, Sources},
};

/// How often a server that cannot answer yet tries again, and one that answers looks after its address.
/// Guests take longer than this to boot, and a look costs one message to the kernel.
const PERIOD: Duration = Duration::from_secs(1);

/// What a metadata server needs to know.
#[derive(Debug, Clone)]
pub struct MetadataConfig {
    /// The bridge that the guests are on.
    pub bridge: String,
    /// The address they ask.
    pub address: Ipv4Addr,
    /// The port they ask.
    pub port: u16,
    /// The records of the instances.
    pub records: RecordDir,
    /// Where the servers of this host find each other's records.
    pub registry: PathBuf,
    /// Where questions are counted.
    pub account: Arc<Account>,
    /// Called about once a second, as long as the server works or waits.
    pub on_turn: fn(),
}

impl MetadataConfig {
    /// Where every cloud's guests look for metadata.
    pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
    /// And on which port.
    pub const PORT: u16 = 80;

    /// A server for the guests on `bridge`, at the usual address and port.
    pub fn new(bridge: impl Into<String>, records: RecordDir) -> Self {
        Self {
            bridge: bridge.into(),
            address: Self::ADDRESS,
            port: Self::PORT,
            records,
            registry: registry::DIRECTORY.into(),
            account: Arc::default(),
            on_turn: || {},
        }
    }
}

/// Why a metadata server had to give up.
#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    /// Not root.
    #[error("not permitted to {doing}: the metadata server must run as root")]
    NotPermitted {
        /// What is not permitted.
        doing: String,
    },
    /// The kernel refused.
    #[error("failed to {doing}")]
    System {
        /// What was being done.
        doing: String,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
}

/// Answers the guests on a bridge until `shutdown`, and leaves the host as it was found.
///
/// Waits for as long as there is no such bridge or another program holds address and port. Must be called
/// as root, in a multi-threaded or current-thread runtime with I/O and time.
pub async fn serve(config: MetadataConfig, shutdown: CancellationToken) -> Result<(), MetadataError> {
    let bridge = Bridge::open(config.bridge.clone(), config.address)
        .map_err(|source| MetadataError::System { doing: "talk to the kernel".to_owned(), source })?;
    let sources = Sources::new(config.bridge.clone(), config.records.clone(), &config.registry);
    let mut post = Post { config, bridge, sources, owned: false, said: None, alone: false };
    take_marks();
    let outcome = post.hold(&shutdown).await;
    // Also after a failure: what was put on the bridge does not stay there.
    let left = post.leave().await;
    outcome.and(left)
}

/// The place on the bridge from which guests are answered.
struct Post {
    config: MetadataConfig,
    bridge: Bridge,
    sources: Sources,
    /// Whether the address is to be removed at the end.
    owned: bool,
    /// What was logged last: the same is not said twice in a row.
    said: Option<Standing>,
    /// Whether it was logged that the other servers of this host cannot be met.
    alone: bool,
}

/// Has accepted sockets marked as the packets were. Where that cannot be, ports are told by the bridge.
fn take_marks() {
    let is_on = fs::read_to_string(MARK_ACCEPTED).is_ok_and(|value| value.trim() == "1");
    if !is_on && let Err(error) = fs::write(MARK_ACCEPTED, "1") {
        tracing::debug!(%error, "connections carry no marks: guests are told by the bridge's tables");
    }
}

impl Post {
    async fn hold(&mut self, shutdown: &CancellationToken) -> Result<(), MetadataError> {
        let listener = loop {
            if let Some(listener) = self.take().await? {
                break listener;
            }
            if !self.pause(shutdown).await {
                return Ok(());
            }
        };
        let (service, callers) =
            (service(&self.sources, &self.config.account), callers(&self.sources, self.is_usual()));
        let server = tokio::spawn(http::run(listener, service, callers, shutdown.clone()));
        let mut outcome = Ok(());
        while outcome.is_ok() && !server.is_finished() && self.pause(shutdown).await {
            outcome = self.look_after().await;
        }
        if outcome.is_err() {
            server.abort();
        }
        match server.await {
            // The address goes while the port is still taken: whoever waits for the port puts up an address
            // of its own and finds it not removed under its feet.
            Ok(_listener) => self.leave().await?,
            // Nobody would be answered any more, and all else would go on as if they were.
            Err(error) if error.is_panic() => {
                let doing = "go on accepting guests' connections".to_owned();
                return Err(MetadataError::System { doing, source: io::Error::other(error) });
            }
            Err(_) => {}
        }
        outcome
    }

    /// Whether it is this address and port that the rules know.
    fn is_usual(&self) -> bool {
        (self.config.address, self.config.port) == (MetadataConfig::ADDRESS, MetadataConfig::PORT)
    }

    /// Takes port and address, where the bridge is there and nobody else has them. The port first: as long as a stranger has it, the
    /// address would lead guests there.
    async fn take(&mut self) -> Result<Option<TcpListener>, MetadataError> {
        if !self.bridge.is_there().map_err(|error| self.failed("look for", error))? {
            self.register();
            self.say(Standing::WaitsForBridge);
            return Ok(None);
        }
        let MetadataConfig { address, port, .. } = self.config;
        let taken = port::take(address, port).await.map_err(|source| {
            let doing = format!("listen on {address}:{port}");
            match source.kind() {
                io::ErrorKind::PermissionDenied => MetadataError::NotPermitted { doing },
                _ => MetadataError::System { doing, source },
            }
        })?;
        self.register();
        match taken {
            Ok(listener) => {
                // It may have gone away meanwhile.
                if self.ensure().await? == Presence::NoBridge {
                    return Ok(None);
                }
                self.adopt().await?;
                self.look_at_rules().await;
                self.say(Standing::Answers);
                Ok(Some(listener))
            }
            Err(Holder::Server) => {
                if self.ensure().await? != Presence::NoBridge {
                    self.say(Standing::WaitsForOther);
                }
                Ok(None)
            }
            Err(Holder::Stranger) => {
                self.adopt().await?;
                self.leave().await?;
                self.say(Standing::PortTaken);
                Ok(None)
            }
        }
    }

    /// The rules let guests reach the usual address and port of their host, and no other.
    async fn look_at_rules(&self) {
        if self.is_usual() {
            return;
        }
        let guarded = tokio::task::spawn_blocking(ec_guard::guarded_bridges).await.unwrap_or_default();
        let MetadataConfig { bridge, address, port, .. } = &self.config;
        if guarded.contains(bridge) {
            tracing::warn!(
                bridge, %address, port,
                "packet rules of this host's agent let guests on this bridge reach no other address and port of it than {}:{}: no guest will ask here",
                MetadataConfig::ADDRESS, MetadataConfig::PORT
            );
        }
    }

    /// No other server answers, so an address with our label is left from one that was killed.
    async fn adopt(&mut self) -> Result<(), MetadataError> {
        let ours = self.bridge.is_ours().await;
        self.owned |= ours.map_err(|error| self.failed("look at", error))?;
        Ok(())
    }

    /// Tells the other servers where our records are: whoever answers must know of our guests.
    fn register(&mut self) {
        if let Err(error) = self.sources.register()
            && !std::mem::replace(&mut self.alone, true)
        {
            tracing::warn!(%error, path = %self.config.registry.display(),
                "other metadata servers of this host cannot answer for these guests");
        }
    }

    /// A network that is restarted brings a new bridge without the address. The listening socket is bound
    /// to the address, not to the bridge, and works again as soon as the address is back.
    async fn look_after(&mut self) -> Result<(), MetadataError> {
        self.register();
        match self.ensure().await {
            Ok(Presence::NoBridge) => {}
            Ok(_) => self.say(Standing::Answers),
            // It worked before: a bridge that is half there, a kernel short of memory.
            Err(MetadataError::System { doing, source }) => {
                self.config.account.stands(Standing::Troubled);
                if self.said.replace(Standing::Troubled) != Some(Standing::Troubled) {
                    tracing::warn!(error = %source, "failed to {doing}: trying again");
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn ensure(&mut self) -> Result<Presence, MetadataError> {
        let presence = self.bridge.ensure().await.map_err(|error| self.failed("put", error))?;
        match presence {
            Presence::NoBridge => self.say(Standing::WaitsForBridge),
            Presence::Added => self.owned = true,
            Presence::There => {}
        }
        Ok(presence)
    }

    async fn leave(&mut self) -> Result<(), MetadataError> {
        if std::mem::take(&mut self.owned) {
            self.bridge.remove().await.map_err(|error| self.failed("remove", error))?;
        }
        Ok(())
    }

    /// Waits for one period; false where the server is to end.
    async fn pause(&self, shutdown: &CancellationToken) -> bool {
        (self.config.on_turn)();
        tokio::select! {
            () = shutdown.cancelled() => false,
            () = tokio::time::sleep(PERIOD) => true,
        }
    }

    fn failed(&self, verb: &str, error: BridgeError) -> MetadataError {
        let doing = format!("{verb} {} on bridge {}", self.config.address, self.config.bridge);
        match error {
            BridgeError::NotPermitted => MetadataError::NotPermitted { doing },
            BridgeError::Kernel(source) => MetadataError::System { doing, source },
            BridgeError::Netlink(error) => MetadataError::System { doing, source: io::Error::other(error) },
        }
    }

    fn say(&mut self, what: Standing) {
        self.config.account.stands(what);
        if self.said.replace(what) == Some(what) {
            return;
        }
        let MetadataConfig { bridge, address, port, .. } = &self.config;
        match what {
            Standing::WaitsForBridge => tracing::warn!(bridge, "there is no such bridge: waiting for it"),
            Standing::WaitsForOther => {
                tracing::info!(%address, port, "another server answers, for these guests too: waiting to take over");
            }
            Standing::PortTaken => tracing::warn!(
                bridge, %address, port,
                "another program has this port of all addresses: guests get no metadata until it ends, or listens at addresses of its own"
            ),
            // Said where the error is at hand.
            Standing::Troubled => {}
            Standing::Answers => {
                tracing::info!(bridge, %address, port, "answering guests' metadata requests")
            }
        }
    }
}

/// Finds the record of who asks.
fn service(sources: &Sources, account: &Arc<Account>) -> MetadataService {
    let sources = sources.clone();
    MetadataService::new(move |caller| find(&sources, caller)).counting(Arc::clone(account))
}

fn find(sources: &Sources, caller: &Caller) -> Result<Option<InstanceRecord>, String> {
    let failed = |error: crate::RecordFileError| error.to_string();
    let mac = match caller.origin {
        // Looked at again: the bridge's table says what was seen last, which may have been luck before.
        Origin::Guest(mac) => caller::by_port(sources.bridges(), caller.address, |_| false)
            .map_err(|error| error.to_string())?
            .eq(&caller.origin)
            .then_some(mac),
        Origin::Stranger => None,
        Origin::Mark(mark) => match sources.macs_of_mark(mark).map_err(failed)?.as_slice() {
            [] => None,
            [mac] => Some(*mac),
            // 24 bits that are the same: the rules hold each of them to its own address.
            several => match caller.address.to_canonical() {
                IpAddr::V4(address) => caller::neighbour(sources.bridges(), address)
                    .map_err(|error| error.to_string())?
                    .filter(|mac| several.contains(mac)),
                IpAddr::V6(_) => None,
            },
        },
    };
    mac.map_or(Ok(None), |mac| sources.find_by_mac(mac).map_err(failed))
}

/// Tells who made a connection that has no mark of ours.
fn callers(sources: &Sources, marked: bool) -> Arc<http::ByPort> {
    let (sources, marks) = (sources.clone(), Marked::default());
    Arc::new(move |address| caller::by_port(sources.bridges(), address, |port| marked && marks.has(port)))
}
