//! Reaching an instance: its console, its log, its screen, its shell.

mod login;
mod printed;
mod stream;
mod terminal;

use std::{
    io::{self, IsTerminal, Write},
    net::Ipv4Addr,
    os::unix::process::CommandExt,
    path::PathBuf,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use clap::{Subcommand, builder::NonEmptyStringValueParser};
use ec_cloud::{find_if_any, find_placed, resolve};
use ec_model::{AccessKind, Attachment, InstanceId};
use ec_runtime::exit::{Failure, INTERRUPTED, NOBODY_READS, print, tell};
use printed::Printed;
pub(crate) use stream::{Piece, Stream, trust};
use terminal::{DETACH, Raw, typed};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

use crate::{config::Session, output};

/// When there is nothing more to type, what the guest still prints is taken until it prints nothing for so long.
const QUIET: Duration = Duration::from_secs(1);
/// Of what a viewer says, so much is passed on at a time.
const VIEWER_BYTES: usize = 16 << 10;

#[derive(Subcommand)]
pub(crate) enum Reach {
    /// Read and type on an instance's serial console; Ctrl-] leaves it
    ///
    /// One at a time: while somebody else has it open, it is refused. Without a terminal, standard input is typed, and
    /// what the guest prints is taken until it has been silent for a second after the end of that.
    #[command(after_help = "Examples:\n  eschedule console web\n  echo uptime | eschedule console web")]
    Console {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: String,
    },
    /// Print what an instance printed on its console, without escape sequences: at most the last MiB
    #[command(after_help = "Examples:\n  eschedule logs web -n 50\n  eschedule logs web --follow")]
    Logs {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: String,
        /// Go on with what it prints, until it is destroyed
        #[arg(long, short)]
        follow: bool,
        /// Only so many lines of what is there
        #[arg(long, short = 'n', value_name = "N", allow_negative_numbers = true)]
        lines: Option<u32>,
    },
    /// Show an instance's screen to a viewer of VNC on this machine, until Ctrl-C
    ///
    /// Prints the address to give to the viewer. Whoever may use this machine may look, too, while this runs.
    #[command(after_help = "Examples:\n  eschedule vnc web")]
    Vnc {
        /// Its name, its uuid, or the beginning of that
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: String,
    },
    /// Run ssh to an instance's address; its exit code is ssh's
    ///
    /// The guest's key is taken on trust the first time, and remembered by the instance and its disk, not by its address: after
    /// `rebuild` and `rescue` it is another. Options stand before what is to be run, which has its own.
    #[command(
        after_help = "Examples:\n  eschedule ssh web\n  eschedule ssh debian@web -i ~/.ssh/lab\n  eschedule ssh web -- df -h /"
    )]
    Ssh {
        /// Its name, its uuid, or the beginning of that; with USER@ before it, who logs in
        #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
        instance: String,
        /// Who logs in, where USER@ does not say so [default: `defaults.ssh_user` of schedule.yaml, else whom the images of its distribution have, else root]
        #[arg(long, short = 'l', value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
        user: Option<String>,
        /// The file with the private key [default: beside a public one that the instance was given, of `defaults.keys` or ~/.ssh; else as ssh finds one]
        #[arg(long, short, value_name = "FILE")]
        identity: Option<PathBuf>,
        /// What to run there [default: a shell]
        #[arg(trailing_var_arg = true, value_name = "CMD")]
        command: Vec<String>,
    },
}

/// Reaches it, until it or its user ends that.
pub(crate) async fn reach(session: &Session, reach: Reach) -> Result<(), Failure> {
    match reach {
        Reach::Console { instance } => {
            let instance = resolve(&session.cloud, &instance).await?;
            console(session, instance).await
        }
        Reach::Logs { instance, follow, lines } => {
            let instance = resolve(&session.cloud, &instance).await?;
            logs(session, instance, follow, lines.map(|lines| lines as usize)).await
        }
        Reach::Vnc { instance } => {
            let instance = resolve(&session.cloud, &instance).await?;
            vnc(session, instance).await
        }
        Reach::Ssh { instance, user, identity, command } => {
            // As ssh takes it: nothing that an instance is called has an @.
            let (instance, user) = match (instance.rsplit_once('@'), user) {
                (None, user) => (instance.as_str(), user),
                (Some((named, instance)), None) if !named.is_empty() => (instance, Some(named.to_owned())),
                (Some((named, instance)), Some(user)) if named == user => (instance, Some(user)),
                (Some(_), Some(_)) => {
                    return Err(Failure::usage("two users would log in: give USER@, or --user"));
                }
                (Some(_), None) => return Err(Failure::usage("wanted who logs in before the `@`")),
            };
            let instance = resolve(&session.cloud, instance).await?;
            ssh(session, instance, user, identity, command).await
        }
    }
}

/// How the guest is told of this window, where that is not as large as it takes each for: a serial line does not tell it.
fn other_window() -> Option<String> {
    let (columns, rows) = crossterm::terminal::size().ok()?;
    let is_known = columns > 0 && rows > 0 && (columns, rows) != (80, 24);
    is_known.then(|| {
        format!(
            "The guest knows no window's size: `stty rows {rows} cols {columns}` there tells it this one's."
        )
    })
}

async fn console(session: &Session, instance: InstanceId) -> Result<(), Failure> {
    let mut stream = Stream::open(session, instance, AccessKind::Console).await?;
    let by_hand = io::stdin().is_terminal();
    if by_hand {
        tell(&format!("Connected to the console of {instance}; Ctrl-] leaves it, Enter shows a prompt."));
        if let Some(window) = other_window() {
            tell(&window);
        }
    }
    // Before the terminal is another: none of these ends the program by itself any more.
    let mut ending = Ending::new()?;
    // Dropped on every way out.
    let raw = Raw::enter()?;
    let outcome = converse(&mut stream, typed(), by_hand, &mut ending).await;
    drop(raw);
    if by_hand {
        tell("");
    }
    ended(outcome?);
    Ok(())
}

/// Passes on what is typed and what is printed; why it ended, where its user did not end it.
async fn converse(
    stream: &mut Stream,
    mut keys: mpsc::Receiver<Bytes>,
    by_hand: bool,
    ending: &mut Ending,
) -> Result<Option<String>, Failure> {
    let mut typing = true;
    // What the guest has not taken yet. Whoever types may leave meanwhile; what is read from elsewhere waits.
    let mut unsent = BytesMut::new();
    loop {
        tokio::select! {
            key = keys.recv(), if typing && (by_hand || unsent.is_empty() && !stream.is_sending()) => {
                let Some(bytes) = key else {
                    typing = false;
                    stream.ask_what_is_taken();
                    continue;
                };
                let end = bytes.iter().position(|byte| by_hand && *byte == DETACH);
                unsent.extend_from_slice(&bytes[..end.unwrap_or(bytes.len())]);
                if end.is_some() {
                    stream.close_after(unsent).await;
                    return Ok(None);
                }
            }
            piece = stream.next_while(&mut unsent) => match piece? {
                Piece::Bytes(bytes) => out(&bytes)?,
                Piece::End(why) => return Ok(Some(why)),
            },
            () = tokio::time::sleep(QUIET), if stream.is_taken() => {
                stream.close().await;
                return Ok(None);
            }
            () = ending.asked() => return Err(Failure { code: INTERRUPTED, message: String::new() }),
        }
    }
}

async fn logs(
    session: &Session,
    instance: InstanceId,
    follow: bool,
    lines: Option<usize>,
) -> Result<(), Failure> {
    let mut stream = Stream::open(session, instance, AccessKind::Log).await?;
    let mut ending = Ending::new()?;
    tokio::select! {
        why = print_log(&mut stream, follow, lines, out) => ended(why?),
        () = ending.asked() => return Err(Failure { code: INTERRUPTED, message: String::new() }),
        gone = output::nobody_reads() => return Err(gone),
    }
    Ok(())
}

/// Prints what comes of a log; why it ended, where its reader did not end it.
async fn print_log(
    stream: &mut Stream,
    follow: bool,
    lines: Option<usize>,
    mut out: impl FnMut(&[u8]) -> Result<(), Failure>,
) -> Result<Option<String>, Failure> {
    let mut printed = Printed::default();
    // What was there before, until it is known where it ends.
    let mut before = Some(Vec::new());
    let outcome = loop {
        let bytes = match stream.next().await {
            Ok(Piece::Bytes(bytes)) => bytes,
            Ok(Piece::End(why)) if follow => break Ok(Some(why)),
            Ok(Piece::End(why)) => break Err(Failure::failed(format!("the log broke off: {why}"))),
            Err(failure) => break Err(failure),
        };
        let text = printed.next(&bytes);
        match &mut before {
            Some(kept) if bytes.is_empty() => {
                out(last_lines(kept, lines))?;
                before = None;
                if !follow {
                    stream.close().await;
                    return Ok(None);
                }
            }
            Some(kept) => kept.extend(text.bytes()),
            None => out(text.as_bytes())?,
        }
    };
    // Of a log that broke, too, what came is what there is to read.
    out(last_lines(&before.unwrap_or_default(), lines))?;
    outcome
}

/// Each viewer has a stream of its own, one after the other.
async fn vnc(session: &Session, instance: InstanceId) -> Result<(), Failure> {
    let failed = |error| Failure::failed(format!("failed to open a port on this machine: {error}"));
    // Where there is nothing to see, it is told before any viewer comes.
    Stream::open(session, instance, AccessKind::Vnc).await?.close().await;
    let mut ending = Ending::new()?;
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
    print(&port.local_addr().map_err(failed)?.to_string())?;
    loop {
        let shown = async {
            let (viewer, _) = port.accept().await.map_err(failed)?;
            viewer.set_nodelay(true).ok();
            // It may run no more, or not yet again; the next viewer finds it where this one did.
            let shown = async {
                let mut stream = Stream::open(session, instance, AccessKind::Vnc).await?;
                show(&mut stream, viewer).await
            };
            Ok::<_, Failure>(shown.await.unwrap_or_else(|failure| Some(failure.message)))
        };
        tokio::select! {
            shown = shown => ended(shown?),
            () = ending.asked() => return Err(Failure { code: INTERRUPTED, message: String::new() }),
        }
    }
}

/// Passes on what a viewer and its guest say; why it ended, where the viewer did not end it.
async fn show(stream: &mut Stream, mut viewer: TcpStream) -> Result<Option<String>, Failure> {
    let (mut from_viewer, mut to_viewer) = viewer.split();
    let mut said = BytesMut::new();
    loop {
        said.reserve(VIEWER_BYTES);
        tokio::select! {
            read = from_viewer.read_buf(&mut said) => match read {
                Ok(1..) => stream.send(said.split().freeze()).await?,
                _ => break,
            },
            piece = stream.next() => match piece? {
                Piece::Bytes(bytes) => if to_viewer.write_all(&bytes).await.is_err() {
                    break;
                },
                Piece::End(why) => return Ok(Some(why)),
            },
        }
    }
    stream.close().await;
    Ok(None)
}

/// The last of these lines; all, where nobody says how many.
fn last_lines(text: &[u8], lines: Option<usize>) -> &[u8] {
    let Some(lines) = lines else { return text };
    // The end of the last line is no beginning of another.
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let ends = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    let start = match lines.checked_sub(1) {
        Some(before) => ends.map(|(at, _)| at + 1).nth(before).unwrap_or(0),
        None => text.len(),
    };
    &text[start..]
}

async fn ssh(
    session: &Session,
    instance: InstanceId,
    user: Option<String>,
    identity: Option<PathBuf>,
    command: Vec<String>,
) -> Result<(), Failure> {
    let known = find_placed(&session.cloud, instance).await?;
    let refuse = |why: &str| Failure::failed(format!("cannot reach {instance}: {why}"));
    let request = known.request.record().ok_or_else(|| refuse("nothing of it is wanted, or can be read"))?;
    let address = ec_plan::reach::address(request, known.status.record()).map_err(|why| refuse(&why))?;
    let spec = request.spec.as_ref().ok_or_else(|| refuse("nothing tells what it is made of"))?;
    let defaults = &session.settings.defaults;
    let mut ssh = std::process::Command::new("ssh");
    // Addresses are given to others in time; an instance's uuid is not.
    let volumes = known.record.as_ref().map(|record| &record.volumes[..]).unwrap_or_default();
    let root = match Attachment::root_of(volumes) {
        Some(root) => find_if_any(&session.cloud, root).await?,
        None => None,
    };
    let root = root.as_ref().and_then(|root| root.status.record());
    let key = ec_plan::reach::key_of(instance, known.status.record(), root);
    ssh.args(["-o", &format!("HostKeyAlias={key}"), "-o", "StrictHostKeyChecking=accept-new"]);
    let user = match user.or_else(|| defaults.ssh_user.clone()) {
        Some(user) => user,
        None => {
            let image = match &request.rescue {
                Some(rescue) => Some(rescue.image.clone()),
                None => login::made_of(&session.cloud, &known).await?,
            };
            let user = image.as_ref().map_or(login::ROOT, login::user);
            if image.is_none() {
                tell(&format!(
                    "eschedule: nothing tells what its disk is made of, so {user} logs in: else say USER@"
                ));
            }
            user.to_owned()
        }
    };
    ssh.args(["-l", &user]);
    let own = || login::identity(&spec.keys, &defaults.keys, std::env::home_dir().as_deref());
    if let Some(file) = identity.or_else(own) {
        ssh.arg("-i").arg(file);
    }
    ssh.arg(address.to_string());
    if !command.is_empty() {
        // It would take options for its own behind the host, too.
        ssh.arg("--").args(command);
    }
    // Comes back only where there is no ssh.
    Err(Failure::failed(format!("cannot run ssh: {}", ssh.exec())))
}

/// Why a stream ended that its user did not end.
fn ended(why: Option<String>) {
    if let Some(why) = why {
        tell(&format!("eschedule: {why}"));
    }
}

/// Prints at once, as it is.
fn out(bytes: &[u8]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Err(Failure { code: NOBODY_READS, message: String::new() })
        }
        outcome => {
            outcome.map_err(|error| Failure::failed(format!("failed to write to standard output: {error}")))
        }
    }
}

/// The signals that ask to end. All of them are caught, so that the terminal is as it was before.
pub(crate) struct Ending([tokio::signal::unix::Signal; 3]);

impl Ending {
    pub(crate) fn new() -> Result<Self, Failure> {
        let caught = |kind| {
            signal(kind).map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))
        };
        Ok(Self([
            caught(SignalKind::interrupt())?,
            caught(SignalKind::terminate())?,
            caught(SignalKind::hangup())?,
        ]))
    }

    pub(crate) async fn asked(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_whole_and_no_more_than_asked_for() {
        for (text, lines, wanted) in [
            ("a\nb\nc\n", Some(2), "b\nc\n"),
            ("a\nb\nc", Some(2), "b\nc"),
            ("a\nb\n", Some(9), "a\nb\n"),
            ("a\n\n", Some(1), "\n"),
            ("a\nb\n", Some(0), ""),
            ("a\nb\n", None, "a\nb\n"),
            ("", Some(3), ""),
        ] {
            let last = String::from_utf8_lossy(last_lines(text.as_bytes(), lines)).into_owned();
            assert_eq!(last, wanted, "{text:?} {lines:?}");
        }
    }
}
