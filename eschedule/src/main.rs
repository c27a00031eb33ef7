//! `eschedule`: the command line.

mod acting;
mod cli;
mod config;
mod output;
mod shown;
mod spec;

use std::{fs, path::Path, process::ExitCode, time::Duration};

use clap::{CommandFactory, Parser};
use cli::{Cli, Command, Output, Waiting};
use config::{Session, Settings};
use ec_cloud::{Found, NoRoom, Scheduled, View, Wanted, find, find_placed, resolve, until_active};
use ec_model::{InstanceId, NodeId, ResourceQuery, State, Status};
use ec_runtime::{
    LogFormat,
    exit::{Failure, INTERRUPTED, print, tell},
    init_logging, install_tls_provider, shutdown_on_signals,
};
use serde_json::json;
use shown::Shown;
use tokio_util::sync::CancellationToken;

fn main() -> ExitCode {
    let cli = Cli::parse();
    init_logging(LogFormat::Text, "off");
    install_tls_provider();
    // One thread: everything here waits for the network.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::failed(format!("failed to start: {error}")).report("eschedule"),
    };
    match runtime.block_on(run(cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report("eschedule"),
    }
}

async fn run(cli: Cli) -> Result<(), Failure> {
    let json = cli.output == Output::Json;
    match (&cli.command, &cli.target) {
        (Some(Command::Completions { shell }), _) => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "eschedule", &mut text);
            return print(&String::from_utf8_lossy(&text));
        }
        (Some(Command::Man { directory }), _) => return manual_pages(directory),
        (Some(_), Some(target)) => {
            return Err(Failure::usage(format!(
                "`{target}` does not go with a command; see `eschedule --help`"
            )));
        }
        _ => {}
    }
    // An empty variable is as good as none.
    let config = cli.config.as_deref().filter(|file| !file.is_empty());
    let settings = Settings::load(config.map(Path::new))?;
    match (cli.command, cli.target) {
        (Some(Command::Destroy { instances, waiting }), _) => {
            acting::destroy(&Session::open(settings).await?, &instances, waiting, json).await
        }
        (Some(Command::Act(act)), _) => {
            let (verb, instances, waiting) = act.what()?;
            acting::act(&Session::open(settings).await?, &verb, &instances, waiting, json).await
        }
        (Some(Command::List), _) => {
            let views = ec_cloud::list(&Session::open(settings).await?.cloud).await?;
            if json { output::json(&views) } else { output::instances(&views) }
        }
        (Some(Command::Show { instance }), _) => {
            let session = Session::open(settings).await?;
            let instance = resolve(&session.cloud, &instance).await?;
            let view = match find(&session.cloud, instance).await? {
                Found::Placed(known) => View::of(&known),
                Found::Unplaced(record, _) => View::unplaced(&record),
            };
            if json { output::json(&view) } else { output::instance(&view) }
        }
        (Some(Command::Nodes), _) => {
            let session = Session::open(settings).await?;
            let nodes = ec_cloud::nodes(&session.cloud).await?;
            if json { output::json(&nodes) } else { output::nodes(&nodes) }?;
            warn(&session).await;
            Ok(())
        }
        (_, Some(target)) if target.contains('=') => {
            let query = ResourceQuery::parse(&target).map_err(|error| Failure::usage(error.to_string()))?;
            let image = cli.image.as_deref().unwrap_or(&settings.image);
            let guest = spec::read(&cli.spec, image, &settings.defaults)?;
            let wanted = Wanted::new(&query, &guest)?;
            schedule(&Session::open(settings).await?, &query, &wanted, cli.waiting, json).await
        }
        (_, Some(instance)) => {
            if cli.image.is_some() {
                return Err(Failure::usage(format!(
                    "`{instance}` is not a resources query: wanted for example `resources=VCPU:1,MEMORY_MB:256`"
                )));
            }
            address(&Session::open(settings).await?, &instance, cli.waiting, json).await
        }
        (_, None) => Err(Failure::usage("nothing to do; see `eschedule --help`")),
    }
}

async fn schedule(
    session: &Session,
    query: &ResourceQuery,
    wanted: &Wanted<'_>,
    waiting: Waiting,
    json: bool,
) -> Result<(), Failure> {
    let stop = shutdown_on_signals()
        .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
    hear(&stop);
    let Scheduled { node, instance } = match ec_cloud::schedule(&session.cloud, wanted, &stop).await? {
        Ok(scheduled) => scheduled,
        Err(no_room) => return Err(no_allocations(session, query, &no_room, json).await?),
    };
    // Whatever fails from here on, the instance is there.
    let requested = |failure: Failure| beside(failure, node, instance);
    if !json {
        print(&format!("NOTIFIED TARGET, {node}, OF INSTANCE {instance}")).map_err(requested)?;
    }
    let (state, ip) = if waiting.wait {
        let timeout = Duration::from_secs(waiting.timeout);
        let outcome = tokio::select! {
            outcome = wait_for_active(session, node, instance, timeout) => outcome,
            () = stop.cancelled() => Err(Failure { code: INTERRUPTED, message: going_on(instance) }),
        };
        match outcome {
            Ok(status) => (status.state, status.ip),
            Err(failure) => {
                if json {
                    output::json(
                        &json!({"instance": instance, "node": node, "state": null, "error": failure.message}),
                    )
                    .map_err(requested)?;
                }
                return Err(failure);
            }
        }
    } else {
        (State::Scheduled, None)
    };
    if json {
        output::json(&json!({"instance": instance, "node": node, "state": state, "ip": ip}))
            .map_err(requested)?;
    } else if let Some(ip) = ip {
        print(&ip.to_string()).map_err(requested)?;
    }
    if stop.is_cancelled() {
        return Err(Failure { code: INTERRUPTED, message: going_on(instance) });
    }
    Ok(())
}

async fn wait_for_active(
    session: &Session,
    node: NodeId,
    instance: InstanceId,
    timeout: Duration,
) -> Result<Status, Failure> {
    let shown = Shown::new("claimed");
    let outcome = until_active(&session.cloud, node, instance, timeout, |step| shown.step(step)).await;
    shown.finish();
    Ok(outcome?)
}

fn going_on(instance: InstanceId) -> String {
    format!(
        "interrupted after the request was written: {instance} goes on, `eschedule destroy {instance}` ends it"
    )
}

/// The failure, with the instance that nobody would know of otherwise.
fn beside(mut failure: Failure, node: NodeId, instance: InstanceId) -> Failure {
    let made = format!("instance {instance} is requested on {node} and goes on");
    failure.message = if failure.message.is_empty() { made } else { format!("{}; {made}", failure.message) };
    failure
}

/// The classic words are the result; the reason goes where errors go.
async fn no_allocations(
    session: &Session,
    query: &ResourceQuery,
    no_room: &NoRoom,
    json: bool,
) -> Result<Failure, Failure> {
    let reasons = ec_cloud::explain(&session.cloud, query, no_room).await;
    let text = match &reasons {
        Ok(reasons) => reasons.text(),
        Err(error) => format!("the reason cannot be told: {error}"),
    };
    if json {
        output::json(&json!({
            "instance": null,
            "node": null,
            "error": "no allocations left",
            "reason": text,
            "reasons": reasons.ok(),
        }))?;
    } else {
        print("NO ALLOCATIONS LEFT")?;
    }
    Ok(Failure::failed(format!("no allocations left: {text}")))
}

/// The classic question: `eschedule <instance>`.
async fn address(session: &Session, instance: &str, waiting: Waiting, json: bool) -> Result<(), Failure> {
    let instance = resolve(&session.cloud, instance).await?;
    let known = find_placed(&session.cloud, instance).await?;
    let mut view = View::of(&known);
    if waiting.wait {
        let timeout = Duration::from_secs(waiting.timeout);
        let status = wait_for_active(session, known.node, instance, timeout).await?;
        (view.state, view.ip, view.reason) = (status.state.to_string(), status.ip, status.reason);
    }
    match view.ip {
        Some(ip) if json => output::json(&json!({"instance": instance, "state": view.state, "ip": ip})),
        Some(ip) => print(&ip.to_string()),
        None => {
            let reason = view.reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            Err(Failure::failed(format!("instance {instance} has no IP, it is {}{reason}", view.state)))
        }
    }
}

fn manual_pages(directory: &Path) -> Result<(), Failure> {
    let failed = |error| {
        Failure::failed(format!("failed to write manual pages into {}: {error}", directory.display()))
    };
    fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), directory).map_err(failed)
}

/// Tells what is not as it should be, where an operator looks: at the nodes.
async fn warn(session: &Session) {
    let settings = &session.settings;
    let old = session.cloud.store.server().await.ok().and_then(|server| server.advice());
    let warnings = settings.exposed.iter().cloned();
    let warnings = warnings.chain(settings.etcd.open_door().await).chain(settings.placement.open_door());
    for warning in warnings.chain(old) {
        tell(&format!("eschedule: {warning}"));
    }
}

/// Tells once that the signal was heard: what is being written comes to its end first.
fn hear(stop: &CancellationToken) {
    let stop = stop.clone();
    tokio::spawn(async move {
        stop.cancelled().await;
        tell("eschedule: interrupted; a second time ends at once");
    });
}
