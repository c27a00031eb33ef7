//! `eschedule`: the command line.

mod acting;
mod agents;
mod apply;
mod bounded;
mod catalog;
mod cli;
mod cluster;
mod complete;
mod config;
mod doctor;
mod events;
mod explain;
#[cfg(test)]
mod fields;
mod heal;
mod image;
mod list;
mod output;
mod reach;
mod run;
mod several;
mod show;
mod shown;
mod snapshot;
mod spec;
mod stack;
mod storage;
mod top;
mod volume;
mod watch;

use std::{fs, path::Path, process::ExitCode, time::Duration};

use clap::CommandFactory;
use cli::{Cli, Command, Output};
use cluster::NodeCommand;
use config::{Session, Settings, with_ended};
use ec_model::ResourceQuery;
use ec_runtime::{
    exit::{Failure, INTERRUPTED, UNREACHABLE, print, tell},
    init_logging, install_tls_provider, shutdown_on_signals,
};

fn main() -> ExitCode {
    install_tls_provider();
    complete::answer();
    let cli = match Cli::read() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    init_logging(cli.log_format, "off");
    // One thread: everything here waits for the network.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::failed(format!("failed to start: {error}")).report("eschedule"),
    };
    let outcome = runtime.block_on(run(cli));
    // Whoever reads standard input waits in a thread that nothing ends but the input's end.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report("eschedule"),
    }
}

async fn run(cli: Cli) -> Result<(), Failure> {
    // They have certificates of their own.
    let administers = matches!(cli.command, Some(Command::Cluster(_) | Command::Node(_)));
    let named = cli.named();
    Box::pin(command(cli)).await.map_err(|failure| {
        if failure.code != UNREACHABLE || administers {
            return failure;
        }
        let settings = Settings::load(named.as_ref().map(|(_, file)| file.as_path()));
        with_ended(failure, &settings.map(|settings| settings.ended()).unwrap_or_default())
    })
}

async fn command(cli: Cli) -> Result<(), Failure> {
    let output = cli.output;
    if let (Some(Command::Explain { word }), None) = (&cli.command, &cli.target)
        && let Some(explained) = explain::word(word)
    {
        return explain::explained(&explained, output);
    }
    match (&cli.command, &cli.target) {
        (Some(Command::Completions { shell }), _) => {
            return complete::script(*shell);
        }
        (Some(Command::Man { directory }), _) => return manual_pages(directory),
        (Some(Command::Apply(apply)), _) if apply.schema => return print(&stack::schema()?),
        (Some(_), Some(target)) => {
            let hint = cli::meant(target).unwrap_or_else(|| "see `eschedule --help`".to_owned());
            return Err(Failure::usage(format!("`{target}` does not go with a command; {hint}")));
        }
        // Else it would be left out without a word.
        (Some(_), None) if !cli.given.is_empty() => {
            return Err(Failure::usage(format!(
                "{} stands before a command, and goes with a resources query; what a command takes stands behind it",
                cli.given.join(", ")
            )));
        }
        _ => {}
    }
    // What they write is of no command that anybody follows.
    let has_no_id = match &cli.command {
        Some(Command::Node(command)) => !matches!(command, NodeCommand::Forget { .. }),
        command => matches!(command, Some(Command::Cluster(_))),
    };
    if cli.request_id.is_some() && has_no_id {
        return Err(Failure::usage(
            "--request-id goes with none of `cluster` and, but for `node forget`, `node`: what they do has no id",
        ));
    }
    let named = cli.named();
    // They have a configuration of their own.
    let command = match cli.command {
        Some(Command::Cluster(command)) => {
            return cluster::cluster(command, named.as_ref(), output).await;
        }
        Some(Command::Node(command)) => {
            return cluster::node(command, named.as_ref(), cli.request_id, output).await;
        }
        command => command,
    };
    let config = named.as_ref().map(|(_, file)| file.as_path());
    let settings = Settings { request_id: cli.request_id, ..Settings::load(config)? };
    match (command, cli.target) {
        (Some(Command::Destroy { instances, waiting }), _) => {
            let session = Session::open(settings).await?;
            to_its_end(acting::destroy(&session, &instances, waiting, output)).await
        }
        (Some(Command::Act(act)), _) => {
            let session = Session::open(settings).await?;
            let (verb, instances, waiting) = act.what(&session).await?;
            to_its_end(acting::act(&session, &verb, &instances, waiting, output)).await
        }
        (Some(Command::Resize(resizing)), _) => {
            let session = Session::open(settings).await?;
            to_its_end(acting::resize(&session, resizing, output)).await
        }
        (Some(Command::Reach(_)), _) if output != Output::Table => {
            Err(Failure::usage("what comes of a console, a log or ssh has no other form: leave --output out"))
        }
        (Some(Command::Reach(reach)), _) => reach::reach(&Session::open(settings).await?, reach).await,
        (Some(Command::Run(run)), _) => run::run(&Session::open(settings).await?, *run, output).await,
        (Some(Command::List(listing)), _) => {
            list::list(&Session::open(settings).await?, listing, output).await
        }
        (Some(Command::Watch(watching)), _) => {
            watch::watch(&Session::open(settings).await?, watching, output).await
        }
        (Some(Command::Top(top)), _) => {
            top::for_people(output)?;
            top::top(&Session::open(settings).await?, top, cli.config).await
        }
        (Some(Command::Show { instances }), _) => {
            show::show(&Session::open(settings).await?, &instances, output).await
        }
        (Some(Command::Events { instance }), _) => {
            events::events(&Session::open(settings).await?, &instance, output).await
        }
        (Some(Command::Explain { word }), _) => {
            let session = Session::open(settings).await?;
            if word.contains('=') {
                explain::query(&session, &word, output).await
            } else {
                explain::instance(&session, &word, output).await
            }
        }
        (Some(Command::Heal(healing)), _) => {
            heal::bring_back(&Session::open(settings).await?, healing, output).await
        }
        (Some(Command::Nodes), _) => {
            let session = Session::open(settings).await?;
            let nodes = ec_cloud::nodes(&session.cloud).await?;
            let names = match output {
                Output::Name => ec_cloud::named_nodes(&session.cloud).await?,
                _ => ec_cloud::NodeNames::default(),
            };
            output::nodes(output, &nodes, &names)?;
            warn(&session).await;
            Ok(())
        }
        (Some(Command::Doctor), _) => doctor::doctor(&Session::open(settings).await?, output).await,
        (Some(Command::Flavor(command)), _) => {
            let session = Session::open(settings).await?;
            to_its_end(catalog::flavor(&session, command, output)).await
        }
        (Some(Command::Keypair(command)), _) => {
            let session = Session::open(settings).await?;
            to_its_end(catalog::keypair(&session, command, output)).await
        }
        (Some(Command::Image(command)), _) => {
            let session = Session::open(settings).await?;
            // What takes back what it began with is not cut short.
            let is_long = command.is_long();
            let work = image::image(&session, command, output);
            if is_long { work.await } else { to_its_end(work).await }
        }
        (Some(Command::Apply(apply)), _) => {
            apply::apply(&Session::open(settings).await?, apply, output).await
        }
        (Some(Command::Volume(command)), _) => {
            let session = Session::open(settings).await?;
            let is_long = command.is_long();
            let work = volume::volume(&session, command, output);
            if is_long { work.await } else { to_its_end(work).await }
        }
        (Some(Command::Snapshot(command)), _) => {
            let session = Session::open(settings).await?;
            let is_long = command.is_long();
            let work = snapshot::snapshot(&session, command, output);
            if is_long { work.await } else { to_its_end(work).await }
        }
        (Some(Command::Storage(command)), _) => {
            let session = Session::open(settings).await?;
            to_its_end(storage::storage_command(&session, command, output)).await
        }
        (Some(Command::Group(command)), _) => {
            let session = Session::open(settings).await?;
            to_its_end(catalog::group(&session, command, output)).await
        }
        (_, Some(target)) if target.contains('=') => {
            let query = ResourceQuery::parse(&target).map_err(|error| Failure::usage(error.to_string()))?;
            let session = Session::open(settings).await?;
            let (name, image) = (cli.spec.name.as_deref(), cli.image.as_deref());
            let guest =
                spec::read(&session, name, &spec::CLASSIC, &cli.spec.given, image, &query.total()).await?;
            run::schedule(&session, &query, &guest, &cli.place, cli.waiting, output).await
        }
        (_, Some(instance)) => {
            let hint = cli::meant(&instance).map(|hint| format!("; {hint}")).unwrap_or_default();
            if cli.image.is_some() {
                return Err(Failure::usage(format!(
                    "`{instance}` is not a resources query: wanted for example `resources=VCPU:1,MEMORY_MB:256`{hint}"
                )));
            }
            let left_out =
                cli.given.iter().find(|option| !["--wait", "--timeout"].contains(&option.as_str()));
            if let Some(option) = left_out {
                return Err(Failure::usage(format!(
                    "{option} goes with a resources query: of `{instance}` the address is told, with --wait once it has one{hint}"
                )));
            }
            run::address(&Session::open(settings).await?, &instance, &hint, cli.waiting, output).await
        }
        (_, None) => Err(Failure::usage("nothing to do; see `eschedule --help`")),
    }
}

/// Who is interrupted in the midst of what he asks for may come to the end of that, and say so; who waits for something says what
/// goes on.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// What comes of work that is short, or ends by itself when it is interrupted. Where it does not, nobody here knows what was done.
async fn to_its_end(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let stop = shutdown_on_signals()
        .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
    tokio::pin!(work);
    tokio::select! {
        biased;
        done = &mut work => return done,
        () = stop.cancelled() => {}
    }
    let unknown = "interrupted: nobody here knows whether what was asked for last was done; look before you ask again (`list`, `show`)";
    let ended = tokio::time::timeout(ENDS_WITHIN, work).await;
    ended.unwrap_or_else(|_| Err(Failure { code: INTERRUPTED, message: unknown.to_owned() }))
}

fn manual_pages(directory: &Path) -> Result<(), Failure> {
    let failed = |error| {
        Failure::failed(format!("failed to write manual pages into {}: {error}", directory.display()))
    };
    fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), directory).map_err(failed)?;
    tell(&format!("`man -l {}` shows the first of the pages", directory.join("eschedule.1").display()));
    Ok(())
}

/// Tells what is not as it should be, where an operator looks: at the nodes.
async fn warn(session: &Session) {
    let settings = &session.settings;
    let old = session.cloud.store.server().await.ok().and_then(|server| server.advice());
    let warnings = settings.warnings.iter().cloned();
    let warnings = warnings.chain(settings.etcd.open_door().await).chain(settings.placement.open_door());
    for warning in warnings.chain(old) {
        tell(&format!("eschedule: {warning}"));
    }
}
