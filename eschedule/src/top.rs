//! `eschedule top`: nodes and instances on a screen, as they change; what is done to the selected is what the commands do.
//!
//! ```text
//!   ec_cloud::watch ────────┐                            ┌──▶ draw
//!   nodes, agents' ports ───┼──▶ News ──▶ Model ─────────┤
//!   what came of a wish ────┘               ▲            └──▶ Wish ──▶ act, show, console, …
//!                                         keys
//! ```
//!
//! The model and what it looks like are pure; here is what they stand between.

mod columns;
mod cursor;
mod draw;
mod model;
mod rates;
mod screen;
#[cfg(test)]
mod tests;

use std::{
    convert::Infallible,
    env,
    ffi::{OsStr, OsString},
    io::{self, IsTerminal},
    process::Stdio,
    time::Duration,
};

use clap::Args;
use draw::{Look, draw};
use ec_cloud::{Acted, Cloud, CloudError, Doomed, Kinds, NodeView, Seen, Verb, View, What, find};
use ec_model::{GRACE_SECONDS, InstanceId, NodeId};
use ec_runtime::exit::{FAILED, Failure, INTERRUPTED, tell};
use jiff::Timestamp;
use model::{Action, Asked, Model, Wish};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, getpid},
};
use ratatui::crossterm::event::{Event, KeyEventKind};
use rates::Reading;
use screen::Screen;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    signal::unix::{SignalKind, signal},
    sync::{
        mpsc::{self, UnboundedReceiver, UnboundedSender},
        watch::{self, Receiver},
    },
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

use crate::{
    acting::under_way, agents::Agents, cli::Output, config::Session, list::Which, output, reach::Ending,
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  eschedule top                              all nodes and instances
  eschedule top --state ERROR,UNKNOWN        what is in trouble
  eschedule top --label role=web --interval 5
In it, `?` tells the keys.";

/// Who leaves waits so long for an answer to what was asked for.
const LEAVING: Duration = Duration::from_secs(15);

/// What runs on the terminal in its place gives that back within, when it is told to end.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// So many lines of a guest's log are shown at first.
const LOG_LINES: &str = "200";

/// What is on the screen.
#[derive(Args)]
pub(crate) struct Top {
    /// Look at the nodes, and at what guests use, every so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,

    #[command(flatten)]
    which: Which,
}

/// What is heard beside the keys.
enum News {
    Seen(Seen),
    Nodes(Vec<NodeView>),
    Used(Vec<(NodeId, Option<Reading>)>),
    Trouble(String),
    /// What came of something that was asked for.
    Note(String),
    Shown(String, Vec<String>),
    /// The watch has ended, which it does not by itself.
    Ended(CloudError),
}

/// Whether this can be at all.
///
/// # Errors
/// A form for scripts is wanted, nobody looks, or the terminal has lines alone.
pub(crate) fn for_people(output: Output) -> Result<(), Failure> {
    if output == Output::Table && io::stdin().is_terminal() && io::stdout().is_terminal() {
        // Nothing else says that what places a cursor is printed there as it is.
        return match env::var_os("TERM").is_some_and(|term| term == "dumb") {
            true => Err(Failure::usage(
                "`top` draws on the whole of a terminal, and this one prints lines alone (`TERM` is `dumb`): `eschedule watch` and \
                 `eschedule list` are for that",
            )),
            false => Ok(()),
        };
    }
    Err(Failure::usage(
        "`top` is for people at a terminal: for scripts there are `eschedule watch -o json` and `eschedule list -o json`",
    ))
}

/// A signal is heard of within.
const HEARD_OF: Duration = Duration::from_millis(100);

/// Shows it until its user leaves. `config` is the configuration's file, where one was named.
pub(crate) async fn top(session: &Session, top: Top, config: Option<OsString>) -> Result<(), Failure> {
    let cloud = Cloud { notice: |_| {}, ..session.cloud.clone() };
    let filter = top.which.filter(&cloud).await?;
    let agents = Agents::new(&session.settings)?;
    let (news, mut heard) = mpsc::unbounded_channel();
    let (drawn, asked) = watch::channel(Asked::default());
    tokio::spawn(follow(cloud.clone(), news.clone()));
    tokio::spawn(look(cloud.clone(), agents, Duration::from_secs(top.interval), asked, news.clone()));

    let mut model = Model::new(filter);
    let look = Look { coloured: output::coloured() };
    // Before the terminal is another: none of these ends the program by itself any more.
    let mut ending = Ending::new()?;
    let mut stopped = signal(SignalKind::from_raw(Signal::SIGTSTP as i32))
        .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
    let mut screen = Screen::enter()?;
    // What was asked for and is not told of yet.
    let mut acts = JoinSet::new();
    loop {
        while acts.try_join_next().is_some() {}
        screen.draw(|frame| draw(frame, &mut model, look, Timestamp::now()))?;
        drawn.send_replace(model.asked());
        let wish = tokio::select! {
            event = screen.event() => match event? {
                Event::Key(key) if key.kind != KeyEventKind::Release => model.key(key),
                // Whatever else there is, as another size: it is drawn anew.
                _ => None,
            },
            one = heard.recv() => {
                let mut next = one;
                // All that there is, before it is drawn.
                while let Some(one) = next {
                    take_in(&mut model, one)?;
                    next = heard.try_recv().ok();
                }
                None
            }
            _ = stopped.recv() => Some(Wish::Suspend),
            () = ending.asked() => {
                screen.leave();
                // Nobody waits any more; what was written a moment ago may be answered yet.
                let came = told_of(acts, &mut ending, ENDS_WITHIN).await;
                let message = came.err().map(|untold| untold.message).unwrap_or_default();
                return Err(Failure { code: INTERRUPTED, message });
            }
        };
        match wish {
            None => {}
            Some(Wish::Quit) => {
                screen.leave();
                return told_of(acts, &mut ending, LEAVING).await;
            }
            Some(Wish::Suspend) => {
                screen.leave();
                // Goes on behind this when the shell says so.
                kill(getpid(), Signal::SIGSTOP).ok();
                screen.take()?;
            }
            Some(Wish::Act(action, instance)) => {
                let name = model.name(instance);
                model.note = Some(format!("{}: asking for it", action.word()));
                let (cloud, news) = (cloud.clone(), news.clone());
                acts.spawn(async move {
                    let came = act(&cloud.for_another(), action, instance).await;
                    let came = came.unwrap_or_else(|error| format!("cannot {}: {error}", action.word()));
                    let told = format!("{name}: {came}");
                    news.send(News::Note(told.clone())).ok();
                    told
                });
            }
            Some(Wish::Show(instance)) => {
                let (cloud, news) = (cloud.clone(), news.clone());
                tokio::spawn(async move {
                    let told = match find(&cloud, instance).await {
                        Ok(found) => {
                            let lines = output::lines_of(&View::found(&found));
                            let title = format!("Instance {instance}");
                            News::Shown(title, lines.lines().map(str::to_owned).collect())
                        }
                        Err(error) => News::Note(error.to_string()),
                    };
                    news.send(told).ok();
                });
            }
            Some(wish @ (Wish::Console(instance) | Wish::Logs(instance))) => {
                let words: &[&str] = match wish {
                    Wish::Console(_) => &["console"],
                    _ => &["logs", "--follow", "--lines", LOG_LINES],
                };
                screen.leave();
                // Nothing of them is drawn now.
                drawn.send_replace(Asked::Nobody);
                let mut heard_all = Ok(());
                let note = tokio::select! {
                    note = beside(config.as_deref(), words, instance) => note?,
                    // The same key stops the other command, which goes on with this.
                    never = stopped_with(&mut stopped) => match never {},
                    never = take_all(&mut model, &mut heard, &mut heard_all) => match never {},
                };
                heard_all?;
                model.note = note;
                // Ctrl-C was for that, and may be heard of here a little later.
                tokio::time::sleep(HEARD_OF).await;
                ending = Ending::new()?;
                screen.take()?;
            }
        }
    }
}

/// What comes of what was asked for a moment ago, to who leaves and waits so long for it.
async fn told_of(mut acts: JoinSet<String>, ending: &mut Ending, patience: Duration) -> Result<(), Failure> {
    if !acts.is_empty() {
        tell("eschedule: waiting for what comes of what was asked for last");
    }
    let all = async {
        while let Some(told) = acts.join_next().await {
            // A task that panicked has said so.
            told.map(|told| tell(&format!("eschedule: {}", output::plain(&told)))).ok();
        }
    };
    let code = tokio::select! {
        waited = tokio::time::timeout(patience, all) => match waited {
            Ok(()) => return Ok(()),
            Err(_) => FAILED,
        },
        () = ending.asked() => INTERRUPTED,
    };
    let message = "nobody knows yet what came of what was asked for last: look at it (`eschedule list`)";
    Err(Failure { code, message: message.to_owned() })
}

/// Until somebody ends the program from elsewhere.
async fn told_to_end() {
    let caught = [SignalKind::terminate(), SignalKind::hangup()].map(signal);
    let [Ok(mut terminate), Ok(mut hangup)] = caught else { return std::future::pending().await };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
}

/// Stops with the shell's job, whenever its user wants that.
async fn stopped_with(stopped: &mut tokio::signal::unix::Signal) -> Infallible {
    loop {
        match stopped.recv().await {
            Some(()) => _ = kill(getpid(), Signal::SIGSTOP),
            None => return std::future::pending().await,
        }
    }
}

/// Takes in what is heard for as long as this is polled, until one tells of an end.
async fn take_all(
    model: &mut Model,
    heard: &mut UnboundedReceiver<News>,
    outcome: &mut Result<(), Failure>,
) -> Infallible {
    while let Some(one) = heard.recv().await {
        *outcome = take_in(model, one);
        if outcome.is_err() {
            break;
        }
    }
    std::future::pending().await
}

fn take_in(model: &mut Model, news: News) -> Result<(), Failure> {
    match news {
        News::Seen(Seen::Is(What::Gone, view)) => model.gone(view.instance),
        News::Seen(Seen::Is(What::There | What::New | What::Changed, view)) => model.is(*view),
        News::Seen(Seen::Lost(why)) | News::Trouble(why) => model.trouble = Some(why),
        News::Nodes(nodes) => model.nodes(nodes),
        News::Used(readings) => model.readings(readings),
        News::Note(note) => model.note = Some(note),
        News::Shown(title, lines) => model.text(&title, lines),
        News::Ended(error) => return Err(error.into()),
    }
    Ok(())
}

/// Every instance, as it changes.
async fn follow(cloud: Cloud, news: UnboundedSender<News>) {
    let all = ec_cloud::Watched::default();
    let ended = ec_cloud::watch(&cloud, all, |seen| {
        // Nobody hears it any more at the end.
        news.send(News::Seen(seen)).ok();
        Ok::<_, CloudError>(())
    });
    if let Err(error) = ended.await {
        news.send(News::Ended(error)).ok();
    }
}

/// Nodes, and what those agents say that are asked, again and again.
async fn look(
    cloud: Cloud,
    agents: Agents,
    every: Duration,
    mut asked: Receiver<Asked>,
    news: UnboundedSender<News>,
) {
    let mut due = interval(every);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut kinds = Kinds::default();
    loop {
        due.tick().await;
        let told = match ec_cloud::nodes_again(&cloud, &mut kinds).await {
            Ok(mut nodes) => {
                let told = news.send(News::Nodes(nodes.clone()));
                // The first time they are drawn before it is known who is asked.
                let asked = match nodes.is_empty() {
                    true => Asked::Nobody,
                    false => match asked.wait_for(|asked| *asked != Asked::Nobody).await {
                        Ok(asked) => asked.clone(),
                        Err(_) => return,
                    },
                };
                nodes.retain(|view| asked.has(view.node));
                let readings = agents.ask::<Reading>(&nodes, "/usage").await;
                // Whether it cannot be reached, or does not know.
                let readings = readings.into_iter().map(|(node, answer)| (node, answer.and_then(Result::ok)));
                told.and_then(|()| news.send(News::Used(readings.collect())))
            }
            Err(error) => news.send(News::Trouble(error.to_string())),
        };
        if told.is_err() {
            return;
        }
    }
}

/// Does it as the command would; what came of it.
async fn act(cloud: &Cloud, action: Action, instance: InstanceId) -> Result<String, CloudError> {
    let verb = match action {
        Action::Start => Verb::Start,
        Action::Stop => Verb::Stop(GRACE_SECONDS),
        Action::Reboot => Verb::Reboot(GRACE_SECONDS),
        Action::Destroy => {
            return Ok(match ec_cloud::destroy(cloud, instance).await? {
                Doomed::By { alive: true, .. } => "DESTROYING".to_owned(),
                Doomed::By { alive: false, .. } => "is destroyed when its node is back".to_owned(),
                Doomed::Already | Doomed::Released => "DESTROYED".to_owned(),
            });
        }
    };
    let Acted { node_alive, already, .. } = ec_cloud::act(cloud, instance, &verb).await?;
    Ok(match already {
        Some(why) => format!("nothing to do: {why}"),
        None if node_alive => under_way(&verb).to_owned(),
        None => format!("{}, when its node is back", under_way(&verb)),
    })
}

/// Runs another command of ours on the terminal until it ends; what it said last, where that was no good end.
///
/// # Errors
/// Somebody ends the program meanwhile.
async fn beside(
    config: Option<&OsStr>,
    words: &[&str],
    instance: InstanceId,
) -> Result<Option<String>, Failure> {
    let cannot = |error: io::Error| Some(format!("cannot {}: {error}", words[0]));
    let run = || {
        let mut command = Command::new(std::env::current_exe()?);
        if let Some(config) = config {
            command.arg("--config").arg(config);
        }
        command.args(words).arg(instance.to_string()).stderr(Stdio::piped()).kill_on_drop(true);
        command.spawn()
    };
    let mut child = match run() {
        Ok(child) => child,
        Err(error) => return Ok(cannot(error)),
    };
    let said = child.stderr.take();
    let ended = async {
        let mut last = None;
        if let Some(said) = said {
            let mut lines = BufReader::new(said).lines();
            while let Some(line) = lines.next_line().await? {
                tell(&line);
                last = Some(line);
            }
        }
        let status = child.wait().await?;
        let ended = status.success() || status.code() == Some(i32::from(INTERRUPTED));
        Ok(last.filter(|_| !ended))
    };
    tokio::select! {
        note = ended => return Ok(note.unwrap_or_else(cannot)),
        () = told_to_end() => {}
    }
    // Killed, it would leave the terminal as it has it.
    if let Some(id) = child.id().and_then(|id| id.try_into().ok()) {
        kill(Pid::from_raw(id), Signal::SIGTERM).ok();
    }
    tokio::time::timeout(ENDS_WITHIN, child.wait()).await.ok();
    Err(Failure { code: INTERRUPTED, message: String::new() })
}
