//! `eschedule`: the command line.

mod cli;
mod config;
mod destroy;
mod lookup;
mod output;
mod schedule;
mod spec;
mod wait;

use std::{fs, path::Path, process::ExitCode, time::Duration};

use clap::{CommandFactory, Parser};
use cli::{Cli, Command, Output, Waiting};
use config::{Session, Settings};
use ec_model::{ResourceQuery, State};
use ec_runtime::{LogFormat, exit::Failure, init_logging, install_tls_provider};
use lookup::{View, find, resolve};
use serde_json::json;
use spec::GuestSpec;

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
            clap_complete::generate(*shell, &mut Cli::command(), "eschedule", &mut std::io::stdout());
            return Ok(());
        }
        (Some(Command::Man { directory }), _) => return manual_pages(directory),
        (Some(_), Some(target)) => {
            return Err(Failure::usage(format!(
                "`{target}` does not go with a command; see `eschedule --help`"
            )));
        }
        _ => {}
    }
    let settings = Settings::load(cli.config.as_deref())?;
    match (cli.command, cli.target) {
        (Some(Command::Destroy { instance, waiting }), _) => {
            destroy(&Session::open(settings).await?, &instance, waiting, json).await
        }
        (Some(Command::List), _) => {
            let views = lookup::list(&Session::open(settings).await?).await?;
            if json {
                output::json(&views)
            } else {
                output::instances(&views)
            }
            Ok(())
        }
        (Some(Command::Show { instance }), _) => {
            let session = Session::open(settings).await?;
            let known = find(&session, resolve(&session, &instance).await?).await?;
            let view = View::of(&known);
            if json {
                output::json(&view)
            } else {
                output::instance(&view)
            }
            Ok(())
        }
        (Some(Command::Nodes), _) => {
            let nodes = lookup::nodes(&Session::open(settings).await?).await?;
            if json {
                output::json(&nodes)
            } else {
                output::nodes(&nodes)
            }
            Ok(())
        }
        (_, Some(target)) if target.contains('=') => {
            let query = ResourceQuery::parse(&target).map_err(|error| Failure::usage(error.to_string()))?;
            let guest = GuestSpec::read(&cli.spec, cli.image.as_deref().unwrap_or(&settings.image))?;
            schedule(&Session::open(settings).await?, &query, guest, cli.waiting, json).await
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
    guest: GuestSpec,
    waiting: Waiting,
    json: bool,
) -> Result<(), Failure> {
    let scheduled = match schedule::schedule(session, query, guest).await? {
        Ok(scheduled) => scheduled,
        Err(no_room) => {
            // The classic words are the result; the reason goes where errors go.
            if !json {
                output::line("NO ALLOCATIONS LEFT");
            }
            return Err(Failure::failed(format!("no allocations left: {}", no_room.explain())));
        }
    };
    let (node, instance) = (scheduled.node, scheduled.instance);
    if !json {
        output::line(&format!("NOTIFIED TARGET, {node}, OF INSTANCE {instance}"));
    }
    if waiting.wait {
        let status = match wait::until_active(session, node, instance, Duration::from_secs(waiting.timeout))
            .await
        {
            Ok(status) => status,
            Err(failure) => {
                if json {
                    output::json(
                        &json!({"instance": instance, "node": node, "state": null, "error": failure.message}),
                    );
                }
                return Err(failure);
            }
        };
        if json {
            output::json(
                &json!({"instance": instance, "node": node, "state": status.state, "ip": status.ip}),
            );
        } else if let Some(ip) = status.ip {
            output::line(&ip.to_string());
        }
    } else if json {
        output::json(&json!({"instance": instance, "node": node, "state": State::Scheduled, "ip": null}));
    }
    Ok(())
}

/// The classic question: `eschedule <instance>`.
async fn address(session: &Session, instance: &str, waiting: Waiting, json: bool) -> Result<(), Failure> {
    let instance = resolve(session, instance).await?;
    let mut known = find(session, instance).await?;
    if waiting.wait {
        let timeout = Duration::from_secs(waiting.timeout);
        known.status = Some(wait::until_active(session, known.node, instance, timeout).await?);
    }
    let view = View::of(&known);
    match view.ip {
        Some(ip) if json => output::json(&json!({"instance": instance, "state": view.state, "ip": ip})),
        Some(ip) => output::line(&ip.to_string()),
        None => {
            let reason = view.reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            return Err(Failure::failed(format!(
                "instance {instance} has no IP, it is {}{reason}",
                view.state
            )));
        }
    }
    Ok(())
}

async fn destroy(session: &Session, instance: &str, waiting: Waiting, json: bool) -> Result<(), Failure> {
    let known = find(session, resolve(session, instance).await?).await?;
    let known = destroy::destroy(session, known).await?;
    if waiting.wait {
        wait::until_gone(session, known.node, known.instance, Duration::from_secs(waiting.timeout)).await?;
    }
    let done = if waiting.wait { "DESTROYED" } else { "DESTROYING" };
    if json {
        output::json(&json!({"instance": known.instance, "node": known.node, "state": done}));
    } else {
        output::line(&format!("{done} INSTANCE {} ON {}", known.instance, known.node));
    }
    Ok(())
}

fn manual_pages(directory: &Path) -> Result<(), Failure> {
    let failed = |error| {
        Failure::failed(format!("failed to write manual pages into {}: {error}", directory.display()))
    };
    fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), directory).map_err(failed)
}
