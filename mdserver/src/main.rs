//! `mdserver`: the metadata server as a program of its own.

mod readings;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
};

use clap::Parser;
use ec_metadata::{MetadataConfig, RecordDir, serve};
use ec_runtime::{
    LogFormat,
    exit::{Failure, arguments, chain},
    init_logging, shutdown_on_signals,
};
use ec_serve::port::{Port, Readings as Desk};
use readings::{Readings, turned};
use tokio_util::sync::CancellationToken;

/// Where the operators' port is where nothing else is said.
const LISTEN: &str = "127.0.0.1:18092";
/// What would be right where it cannot be had.
const REMEDY: &str = "choose another --listen (MDSERVER_LISTEN), or `none`";

/// The metadata server of etcd-compute: answers guests on a bridge.
///
/// Guests ask http://169.254.169.254/ for their hostname, keys and user-data, in the form of EC2 or of
/// OpenStack. The answers come from the record files that ecompute writes, so guests are answered while
/// ecompute, etcd and placement are down. A guest is told by the port of the bridge that it is on; whoever
/// is not a guest on the bridge, this host included, gets 404.
///
/// Needs root, or CAP_NET_ADMIN, CAP_NET_BIND_SERVICE and CAP_DAC_READ_SEARCH: it puts the address on the bridge, and takes it off when it ends. It waits where there is
/// no such bridge yet, and where another server answers already (ecompute has one built in), which then
/// answers for the guests of both.
///
/// Operators have a port of their own (--listen): GET /healthz (alive), /metrics (Prometheus). Guests must not
/// reach it: leave it on loopback.
#[derive(Parser)]
#[command(
    version,
    after_help = "Signals: SIGINT or SIGTERM remove the address and end; a second one ends at once.\n\
                  Logging: to standard error; RUST_LOG=debug shows each request.\n\
                  Exit codes: 0 ended as asked, 1 failed, 2 wrong usage\n\
                  Example: mdserver --bridge virbr0 --state-dir /var/lib/ecompute"
)]
struct Cli {
    /// Directory of ecompute's state; the records are in DIR/instances
    #[arg(long, value_name = "DIR", default_value = "/var/lib/ecompute")]
    state_dir: PathBuf,

    /// Bridge that the guests are on
    #[arg(long, value_name = "NAME", default_value = "virbr0", value_parser = interface)]
    bridge: String,

    /// Address to answer at; put on the bridge as a /32
    ///
    /// Where the bridge is guarded by the packet rules of an agent (its `libvirt.address_filter` is not `off`), guests reach nothing but
    /// port 80 of 169.254.169.254: another address, or another port, is for bridges of other guests.
    #[arg(long, value_name = "IPV4", default_value_t = MetadataConfig::ADDRESS, value_parser = host_address)]
    address: Ipv4Addr,

    /// Port to answer at; as with --address, another one is for bridges without packet rules
    #[arg(long, value_name = "PORT", default_value_t = MetadataConfig::PORT, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,

    /// Where operators read its numbers; `none` for nowhere
    #[arg(long, value_name = "ADDRESS", default_value = LISTEN, value_parser = listen, env = "MDSERVER_LISTEN")]
    listen: Listen,

    /// How log lines look; RUST_LOG decides which there are
    #[arg(long, value_name = "FORMAT", default_value = "text", env = "LOG_FORMAT")]
    log_format: LogFormat,
}

/// Where the operators' port is, if anywhere.
#[derive(Debug, Clone, Copy)]
struct Listen(Option<SocketAddr>);

/// An address with a port, or none.
fn listen(text: &str) -> Result<Listen, String> {
    if text == "none" {
        return Ok(Listen(None));
    }
    // An empty variable is as good as none.
    let text = if text.is_empty() { LISTEN } else { text };
    let address = text.parse().map_err(|_| format!("wanted for example {LISTEN}, or none"))?;
    Ok(Listen(Some(address)))
}

/// The name of a network interface, as the kernel takes it.
fn interface(text: &str) -> Result<String, String> {
    let usable = ec_model::input::is_interface_name(text);
    usable
        .then(|| text.to_owned())
        .ok_or_else(|| "not the name of a network interface: wanted for example virbr0".to_owned())
}

/// An address that an interface can have.
fn host_address(text: &str) -> Result<Ipv4Addr, String> {
    let address: Ipv4Addr = text.parse().map_err(|_| "wanted for example 169.254.169.254".to_owned())?;
    if address.is_unspecified() || address.is_broadcast() || address.is_multicast() || address.is_loopback() {
        return Err(
            "no interface of guests can have this address: wanted for example 169.254.169.254".to_owned()
        );
    }
    Ok(address)
}

fn main() -> ExitCode {
    let cli: Cli = match arguments("mdserver") {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    init_logging(cli.log_format, "info");
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report("mdserver"),
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    let records = RecordDir::reader(cli.state_dir.join("instances"));
    let config = MetadataConfig {
        address: cli.address,
        port: cli.port,
        on_turn: turned,
        ..MetadataConfig::new(cli.bridge, records.clone())
    };
    // One thread, and one more while a request is looked up: guests ask rarely.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("failed to start: {error}")))?;
    runtime.block_on(async {
        let shutdown = shutdown_on_signals()
            .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
        let port = open(cli.listen, cli.address).await?;
        let (readings, closed) =
            (Readings::new(Arc::clone(&config.account), records), CancellationToken::new());
        let desk = Desk(Arc::new(readings));
        let served = port.map(|port| tokio::spawn(port.serve(desk, "health and metrics", closed.clone())));
        let ended = serve(config, shutdown).await.map_err(|error| Failure::failed(chain(&error)));
        closed.cancel();
        if let Some(served) = served {
            // Whoever reads at the end reads again.
            served.await.ok();
        }
        ended
    })
}

/// Opens the operators' port, before anything is touched.
async fn open(listen: Listen, guests: Ipv4Addr) -> Result<Option<Port>, Failure> {
    let Some(address) = listen.0 else { return Ok(None) };
    if address.ip().to_canonical() == guests {
        let why = format!("--listen {address} is where guests ask, who must not read this: {REMEDY}");
        return Err(Failure::usage(why));
    }
    if !address.ip().to_canonical().is_loopback() {
        tracing::warn!("whoever reaches {address}, guests among them, may read this server's numbers");
    }
    Port::open(address, "mdserver", REMEDY)
        .await
        .map(Some)
        .map_err(|error| Failure::failed(error.to_string()))
}
