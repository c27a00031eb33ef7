//! `eplacement`: the Placement API, with its state in etcd.

mod tools;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use clap::{Parser, Subcommand};
use ec_model::placement_tokens;
use ec_pki::endings;
use ec_replica::Model;
use ec_runtime::{
    Host, LogFormat, config,
    exit::{Failure, arguments},
    init_logging, install_tls_provider, raise_file_limit, service, shutdown_on_signals,
};
use ec_serve::{TlsSection, tell_endings};
use ec_store::{EtcdStore, Store};
use placement::{
    config::{AuthKind, Config, Settings},
    http::{Api, Auth, Policy, ROLES, ServerConfig, serve},
    store::Replica,
};
use tokio_util::sync::CancellationToken;

/// A request makes some hundred small allocations on one thread and frees some on another; glibc's allocator
/// spends a quarter of the server's time on that.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Where etcd is away at the start, its release is asked for again after so long.
const ADVISE_AGAIN: std::time::Duration = std::time::Duration::from_secs(5);

/// Where the configuration is looked for.
const PLACES: [&str; 2] = ["eplacement.yaml", "/etc/ecompute/eplacement.yaml"];

/// The Placement API server of etcd-compute: counts what hosts have and who uses it.
///
/// Speaks the OpenStack Placement API, microversions 1.0 to 1.39. All its state lies in etcd under one
/// prefix; any number of replicas may serve it, there is no leader, and a replica may be killed at any
/// moment. With no options it serves 127.0.0.1:8080 from an etcd at localhost:2379.
#[derive(Parser)]
#[command(
    name = "eplacement",
    version,
    after_help = "Beside the API: GET /healthz (alive), /readyz (up to date with etcd, and writes work), /metrics (Prometheus).\n\
                  Signals: SIGINT or SIGTERM finish what is being answered and end; a second one ends at once.\n\
                  Logging: to standard error; RUST_LOG=debug shows more.\n\
                  Exit codes: 0 ended as asked, 1 failed, 2 wrong usage or configuration, 3 etcd is not reachable\n\n\
                  Examples:\n  \
                  eplacement --etcd http://10.0.0.1:2379,http://10.0.0.2:2379\n  \
                  eplacement --listen 0.0.0.0:8778 --auth tokens --config /etc/ecompute/eplacement.yaml\n  \
                  curl -H 'X-Auth-Token: admin' http://127.0.0.1:8080/resource_providers"
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Tool>,
    #[command(flatten)]
    server: ServerOptions,
    #[command(flatten)]
    store: StoreOptions,
}

#[derive(clap::Args)]
struct ServerOptions {
    /// Address and port to serve [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// Who may do what [default: legacy]
    #[arg(long)]
    policy: Option<Policy>,
    /// How it is told who a request is from [default: noauth]
    #[arg(long)]
    auth: Option<AuthKind>,
    /// Serve noauth beyond loopback, where everybody is believed
    #[arg(long)]
    allow_remote_noauth: bool,
}

#[derive(clap::Args)]
struct StoreOptions {
    /// etcd, as URLs or host:port [default: localhost:2379]
    #[arg(long, global = true, value_name = "URL[,URL…]", value_delimiter = ',')]
    etcd: Vec<String>,
    /// What every key begins with [default: /ecompute/placement]
    #[arg(long, global = true, value_name = "KEY")]
    prefix: Option<String>,
    /// Configuration [default: ./eplacement.yaml, then /etc/ecompute/eplacement.yaml, then defaults]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How log lines look; RUST_LOG decides which there are
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text", env = "LOG_FORMAT")]
    log_format: LogFormat,
}

#[derive(Subcommand)]
enum Tool {
    /// Write everything that placement knows to a JSON document
    Export {
        /// Where to [default: standard output]
        file: Option<PathBuf>,
        #[command(flatten)]
        source: tools::Source,
    },
    /// Move a cloud in, from a document or live from another Placement API, and compare both sides
    ///
    /// The place must be empty. Nobody should write to the source meanwhile.
    Import {
        /// The document
        #[arg(required_unless_present = "from", conflicts_with = "from")]
        file: Option<PathBuf>,
        #[command(flatten)]
        source: tools::Source,
    },
    /// Prove that what is stored fits together: usages, consumers, generations, trees
    Check,
    /// Ask a running server whether it is ready; exit code 3 where it is not
    Health {
        /// Where it serves
        #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
        url: String,
        #[command(flatten)]
        tls: tools::Tls,
    },
    /// Make an entry for `tokens` of a token read from standard input
    HashToken {
        /// Who it is, for people
        #[arg(long, default_value = "")]
        name: String,
        /// admin, service, member (who claims for its own project only) or reader
        #[arg(long, default_value = "admin", value_parser = ROLES)]
        role: String,
        /// The project that it speaks for
        #[arg(long)]
        project: Option<String>,
    },
    /// Print a completion script
    Completions {
        /// For which shell
        shell: clap_complete::Shell,
    },
}

impl ServerOptions {
    fn is_given(&self) -> bool {
        self.listen.is_some() || self.policy.is_some() || self.auth.is_some() || self.allow_remote_noauth
    }
}

impl StoreOptions {
    fn load(&self) -> Result<config::Loaded<Config>, Failure> {
        let mut loaded = config::load::<Config>(self.config.as_deref(), &PLACES.map(Path::new))?;
        if !self.etcd.is_empty() {
            loaded.config.etcd.endpoints = Some(self.etcd.clone());
            (loaded.config.etcd.host, loaded.config.etcd.port) = (None, None);
        }
        if let Some(prefix) = &self.prefix {
            loaded.config.prefix = Some(prefix.clone());
        }
        Ok(loaded)
    }
}

fn main() -> ExitCode {
    let cli: Cli = match arguments("eplacement") {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    init_logging(cli.store.log_format, "info");
    install_tls_provider();
    let result = match cli.command {
        Some(_) if cli.server.is_given() => Err(Failure::usage(
            "--listen, --policy, --auth and --allow-remote-noauth are of the server: they have no meaning with a command",
        )),
        None => run(&cli.server, &cli.store),
        Some(Tool::Export { file, source }) => tool(tools::export(file, source, cli.store)),
        Some(Tool::Import { file, source }) => tool(tools::import(file, source, cli.store)),
        Some(Tool::Check) => tool(tools::check(cli.store)),
        Some(Tool::Health { url, tls }) => tool(tools::health(url, tls)),
        Some(Tool::HashToken { name, role, project }) => tools::hash_token(&name, &role, project.as_deref()),
        Some(Tool::Completions { shell }) => {
            let mut command = <Cli as clap::CommandFactory>::command();
            clap_complete::generate(shell, &mut command, "eplacement", &mut std::io::stdout());
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report("eplacement"),
    }
}

fn run(options: &ServerOptions, store: &StoreOptions) -> Result<(), Failure> {
    let mut loaded = store.load()?;
    let config = &mut loaded.config;
    if let Some(listen) = &options.listen {
        config.listen = Some(listen.clone());
    }
    config.policy = options.policy.unwrap_or(config.policy);
    config.auth = options.auth.unwrap_or(config.auth);
    config.allow_remote_noauth |= options.allow_remote_noauth;
    let settings = loaded.config.settings().map_err(|error| Failure::from(loaded.wrong(error)))?;
    let tls = settings
        .tls
        .as_ref()
        .map(TlsSection::open)
        .transpose()
        .map_err(|error| Failure::usage(error.to_string()))?;
    let files = raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("failed to start: {error}")))?;
    runtime.block_on(async {
        let stop = shutdown_on_signals()
            .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
        let store: Arc<dyn Store> = Arc::new(EtcdStore::connect(settings.etcd.clone()).await?);
        for warning in warnings(&loaded, &settings).await {
            tracing::warn!("{warning}");
        }
        tokio::spawn(tell_endings(settings.api.certificates.clone()));
        let listener = tokio::net::TcpListener::bind(settings.listen).await.map_err(|error| {
            Failure::failed(format!(
                "cannot listen at {}: {error}; another program may, or choose another with --listen",
                settings.listen
            ))
        })?;
        let bound = listener.local_addr().unwrap_or(settings.listen);
        // Ended after what is being answered: that may still want to read and write.
        let end = CancellationToken::new();
        let of_tokens = placement_tokens(settings.keys.prefix().as_str());
        let unlisted = matches!(&settings.api.auth, Auth::Tokens(tokens) if tokens.lists_nobody());
        tokio::spawn(advise(Arc::clone(&store), unlisted.then(|| of_tokens.clone())));
        let (keys, limits, host) = (settings.keys, settings.limits, Host::default());
        let replica = Replica::start(Arc::clone(&store), keys, limits, host, end.clone());
        if let Auth::Tokens(tokens) = &settings.api.auth {
            replica.tasks().spawn("following tokens", tokens.keep(store, of_tokens));
        }
        let (watched, asked) = (replica.clone(), replica.clone());
        let with_tls = tls.is_some();
        tracing::info!(listen = %bound, tls = with_tls, "serving the Placement API");
        let api = Arc::new(Api::new(replica, settings.api, with_tls));
        tokio::select! {
            () = serve(ServerConfig { listener, tls, files }, api, stop) => {
                end.cancel();
                Ok(())
            }
            // In the task that takes connections, and with a look at the state: where either hangs, nothing is told.
            never = service::vouch(async || asked.peek(|_| true)) => match never {},
            why = watched.failed() => Err(Failure::failed(format!("{why}; ending, to be started again"))),
        }
    })
}

/// What does not keep it from serving, and should be known: doors that are open, and secrets that everybody may read.
async fn warnings(loaded: &config::Loaded<Config>, settings: &Settings) -> Vec<String> {
    let own = loaded.path.as_deref().filter(|_| settings.etcd.holds_secret());
    let key = settings.tls.as_ref().map(|tls| tls.key.as_path());
    let mut warnings = config::exposed(own.into_iter().chain(settings.etcd.secret_files()).chain(key));
    warnings.extend(endings(settings.api.certificates.iter().map(PathBuf::as_path)));
    warnings.extend(settings.etcd.unused());
    warnings.extend(settings.etcd.open_door().await);
    if loaded.config.auth == AuthKind::Noauth && !settings.listen.ip().to_canonical().is_loopback() {
        warnings.push(format!(
            "whoever reaches {} is believed to be who they say: give it tokens, see docs/security.md",
            settings.listen
        ));
    }
    warnings
}

/// Says what is to be said of the etcd that is used, as soon as it answers; and where no token is listed, whether it has any.
async fn advise(store: Arc<dyn Store>, unlisted: Option<String>) {
    loop {
        match store.server().await {
            Ok(server) => {
                if let Some(advice) = server.advice() {
                    tracing::warn!("{advice}");
                }
                if let Some(tokens) = &unlisted
                    && store.keys(tokens).await.is_ok_and(|all| all.is_empty())
                {
                    tracing::warn!(
                        "nobody is let in: the configuration lists no token, and etcd has none below {tokens}; `eplacement hash-token` makes an entry"
                    );
                }
                return;
            }
            Err(error) if error.is_transient() => tokio::time::sleep(ADVISE_AGAIN).await,
            Err(error) => {
                tracing::debug!(%error, "etcd does not tell its release");
                return;
            }
        }
    }
}

/// Runs a tool to its end.
fn tool(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("failed to start: {error}")))?
        .block_on(work)
}
