//! Reaching a guest from elsewhere: its console, by pipes and by a terminal, its log, its shell.

use std::{
    fs::File,
    io::{Read, Write},
    net::TcpStream,
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    process::{Child, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_model::{Access, AccessKind, AccessWish, Doc, InstanceId, Keyspace, Request, State};
use ec_store::{Store, Txn};
use ec_tests::{Stack, Terminal};
use nix::{
    pty::{Winsize, openpty},
    sys::{signal::Signal, termios::tcgetattr},
};

const PATIENCE: Duration = Duration::from_secs(60);

struct Guest {
    stack: Stack,
    key: String,
    instance: InstanceId,
}

impl Guest {
    async fn up() -> Result<Self> {
        let mut stack = Stack::start().await?;
        stack.start_agent("").await?;
        let key = stack.key_pair()?;
        let public = format!("{key}.pub");
        let instance = stack.schedule(&["--wait", "--name", "web", "--key", &public])?;
        // Its shells are there by then.
        stack.ssh_to(&key, "root", instance, "true").await?;
        Ok(Self { stack, key, instance })
    }

    fn asks(&self, arguments: &[&str]) -> Result<String> {
        let output = self.stack.eschedule(arguments)?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// What it is refused with.
    fn refuses(&self, arguments: &[&str]) -> Result<String> {
        let output = self.stack.eschedule(arguments)?;
        ensure!(output.status.code() == Some(1), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stderr)?)
    }

    /// Writes a wish to look at it, as control does.
    async fn wish(&self, generation: u64, kind: AccessKind) -> Result<bool> {
        let key = Keyspace::default().request(self.stack.node, self.instance);
        let (pair, _) = self.stack.store.get(&key).await?;
        let mut order = Doc::<Request>::decode(&pair.context("it is requested")?.value)?;
        order.record.access = Some(AccessWish { kind, generation, request_id: None });
        Ok(self.stack.store.txn(Txn::new().put(key, order.encode())).await?.succeeded)
    }

    /// What becomes of that wish.
    async fn answer(&self, generation: u64) -> Result<Access> {
        let told =
            async || anyhow::Ok(self.stack.status(self.instance).await?.and_then(|status| status.access));
        let of_it = |access: Option<Access>| access.filter(|access| access.generation == generation);
        self.stack.until("the wish is answered", async || Ok(of_it(told().await?).is_some())).await?;
        of_it(told().await?).context("it was there")
    }

    fn begin(&self, arguments: &[&str]) -> Result<Talk> {
        let mut command = self.stack.command("eschedule");
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let input = child.stdin.take().map(OwnedFd::from);
        let output = child.stdout.take().map(OwnedFd::from).context("it prints")?;
        Ok(Talk::new(child, input.map(File::from), File::from(output)))
    }
}

/// A program that somebody types to, and reads.
struct Talk {
    child: Child,
    input: Option<File>,
    output: mpsc::Receiver<Vec<u8>>,
    said: String,
}

impl Talk {
    fn new(child: Child, input: Option<File>, mut output: File) -> Self {
        let (told, said) = mpsc::channel();
        std::thread::spawn(move || {
            let mut piece = vec![0; 4096];
            while let Ok(count @ 1..) = output.read(&mut piece) {
                told.send(piece[..count].to_vec()).ok();
            }
        });
        Self { child, input, output: said, said: String::new() }
    }

    fn types(&mut self, keys: &str) -> Result<()> {
        Ok(self.input.as_mut().context("it takes no more")?.write_all(keys.as_bytes())?)
    }

    /// Reads until this was said.
    fn until(&mut self, wanted: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !self.said.contains(wanted) {
            let left = deadline.saturating_duration_since(Instant::now());
            let piece = self.output.recv_timeout(left).with_context(|| format!("{wanted}: {}", self.said))?;
            self.said.push_str(&String::from_utf8_lossy(&piece));
        }
        Ok(())
    }

    fn ends(&mut self) -> Result<Option<i32>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            ensure!(Instant::now() < deadline, "it does not end: {}", self.said);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn complaint(&mut self) -> Result<String> {
        let mut text = String::new();
        self.child.stderr.take().context("once")?.read_to_string(&mut text)?;
        Ok(text)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_console_is_typed_on_by_one_at_a_time_and_ends_with_its_guest() -> Result<()> {
    let guest = Guest::up().await?;
    let mut first = guest.begin(&["console", "web"])?;
    first.types("echo is $((6 * 7))\r")?;
    first.until("is 42")?;
    let refused = guest.refuses(&["console", "web"])?;
    ensure!(refused.contains("console session") && refused.lines().count() == 1, "{refused}");
    // At the end of what is typed, what comes of it is printed, and it is left.
    first.types("echo is $((7 * 7))\r")?;
    first.input = None;
    first.until("is 49")?;
    assert_eq!(first.ends()?, Some(0), "{}", first.complaint()?);

    // What it is told to look at does nothing to it.
    guest.asks(&["lock", "web"])?;
    let mut second = loop {
        let mut again = guest.begin(&["console", "web"])?;
        again.types("echo is $((8 * 8))\r")?;
        // Closing takes its moment.
        if again.until("is 64").is_ok() {
            break again;
        }
        ensure!(again.complaint()?.contains("console session"), "it is free");
    };
    guest.asks(&["unlock", "web"])?;
    guest.asks(&["stop", "--grace", "0", "--wait", "web"])?;
    assert_eq!(second.ends()?, Some(0));
    let why = second.complaint()?;
    ensure!(why.contains("the guest has ended"), "{why}");
    let refused = guest.refuses(&["console", "web"])?;
    ensure!(refused.contains("it is stopped") && refused.contains("eschedule start"), "{refused}");
    let log = guest.asks(&["logs", "web"])?;
    ensure!(log.contains("READY") && log.contains("is 42") && !log.contains('\u{1b}'), "{log}");
    assert_eq!(guest.asks(&["logs", "--lines", "2", "web"])?, last_two(&log));
    Ok(())
}

fn last_two(text: &str) -> String {
    let lines: Vec<_> = text.split_inclusive('\n').collect();
    lines[lines.len().saturating_sub(2)..].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_is_told_how_to_leave_and_is_as_before_afterwards() -> Result<()> {
    let guest = Guest::up().await?;
    for signal in [None, Some(Signal::SIGTERM), Some(Signal::SIGHUP)] {
        let window = Winsize { ws_row: 50, ws_col: 160, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&window), None)?;
        let before = tcgetattr(&pty.slave)?;
        let mut command = guest.stack.command("eschedule");
        let end = || pty.slave.try_clone().map(Stdio::from);
        command.args(["console", "web"]).stdin(end()?).stdout(end()?).stderr(end()?);
        let child = command.spawn()?;
        let master = File::from(pty.master);
        let mut talk = Talk::new(child, Some(master.try_clone()?), master);
        talk.until("Ctrl-] leaves it")?;
        talk.until("`stty rows 50 cols 160` there")?;
        talk.types("\r")?;
        talk.until("#")?;
        assert_ne!(tcgetattr(&pty.slave)?, before, "every key goes to the guest");
        // Ctrl-C is the guest's.
        talk.types("half a line\u{3}echo is $((9 * 9))\r")?;
        talk.until("is 81")?;
        match signal {
            None => talk.types("\u{1d}")?,
            Some(signal) => {
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(talk.child.id().try_into()?), signal)?;
            }
        }
        assert_eq!(talk.ends()?, Some(if signal.is_some() { 130 } else { 0 }), "{}", talk.said);
        assert_eq!(tcgetattr(&pty.slave)?, before, "{signal:?}");
        // Closing takes its moment.
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    // The console of another command's, which ends with that.
    let mut command = guest.stack.command("eschedule");
    command.arg("top");
    let mut top = Terminal::start(&command)?;
    top.until_seen("ACTIVE")?;
    top.types("c")?;
    top.until_seen("Ctrl-] leaves it")?;
    top.types("echo is $((8 * 9))\r")?;
    top.until_seen("is 72")?;
    top.signal(Signal::SIGTERM)?;
    top.ends(130)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_is_followed_through_a_boot_and_ended_with_its_agent() -> Result<()> {
    let mut guest = Guest::up().await?;
    let mut follower = guest.begin(&["logs", "--follow", "--lines", "0", "web"])?;
    guest.asks(&["reboot", "--hard", "--wait", "web"])?;
    follower.until("READY")?;
    let said = follower.said.matches("READY").count();
    assert_eq!(said, 1, "only what came after: {}", follower.said);
    // The agent goes, and takes along what hangs on it.
    assert_eq!(guest.stack.end_agent()?, Some(0));
    assert_eq!(follower.ends()?, Some(0));
    let why = follower.complaint()?;
    ensure!(why.contains("agent ends"), "{why}");
    let dead = guest.refuses(&["console", "web"])?;
    ensure!(dead.contains("not alive"), "{dead}");
    guest.stack.start_agent("").await?;
    let mut again = guest.begin(&["console", "web"])?;
    again.types("echo is $((3 * 7))\r")?;
    again.until("is 21")
}

/// A wish that nobody waits for is answered all the same, and a ticket of an agent that was started anew is good for
/// nothing: who has it asks again.
#[tokio::test(flavor = "multi_thread")]
async fn a_wish_is_answered_by_whatever_agent_and_a_ticket_lets_in_once() -> Result<()> {
    let mut guest = Guest::up().await?;
    let instance = guest.instance;
    ensure!(guest.wish(7, AccessKind::Log).await?);
    let ticket = guest.answer(7).await?.ticket.context("a ticket")?;
    let status = guest.stack.status(instance).await?.context("it is told")?;
    assert_eq!(status.state, State::Active, "to look at it changes nothing");
    let port = guest.stack.agent_port().context("the agent has a port")?;
    let client = reqwest::Client::builder().no_proxy().build()?;
    let ask = async |ticket: &str, headers: &[(&str, &str)]| {
        let mut request = client.get(format!("http://{port}/streams/{ticket}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        anyhow::Ok(request.send().await?.status().as_u16())
    };
    let socket = [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    assert_eq!(ask(&ticket.0, &[]).await?, 426, "no stream is asked for: the ticket is as good as before");
    assert_eq!(ask("guessed", &socket).await?, 404);
    assert_eq!(ask(&ticket.0, &socket).await?, 101);
    assert_eq!(ask(&ticket.0, &socket).await?, 404, "once");
    let (_, view) = guest.stack.ask_agent("/view").await?;
    ensure!(!view.contains(&ticket.0), "no reader finds a ticket: {view}");
    ensure!(guest.wish(3, AccessKind::Unknown).await?);
    let refused = guest.answer(3).await?;
    ensure!(refused.ticket.is_none() && refused.reason.is_some(), "{refused:?}");
    guest.stack.kill_agent()?;
    ensure!(guest.wish(4, AccessKind::Console).await?);
    guest.stack.start_agent("").await?;
    ensure!(guest.answer(4).await?.ticket.is_some(), "the next agent answers");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_reached_by_ssh_whose_exit_code_is_told() -> Result<()> {
    let guest = Guest::up().await?;
    let known =
        guest.stack.status(guest.instance).await?.and_then(|status| status.ip).context("its address")?;
    // One that remembers guests' keys here, and not for whoever runs this.
    let own = tempfile::tempdir()?;
    let (program, keys) = (own.path().join("ssh"), own.path().join("known"));
    let script = format!(
        "#!/bin/sh\nexec /usr/bin/ssh -o HashKnownHosts=no -o UserKnownHostsFile={} \"$@\"\n",
        keys.display()
    );
    std::fs::write(&program, script)?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let ssh = |command: &[&str]| {
        let arguments = [&["ssh", "-i", &guest.key, "web", "--"], command].concat();
        let mut ssh = guest.stack.command("eschedule");
        ssh.args(arguments).env("PATH", format!("{}:/usr/bin:/bin", own.path().display()));
        ssh.stdin(Stdio::null()).output()
    };
    let output = ssh(&["ip", "addr", "show", "eth0"])?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(String::from_utf8_lossy(&output.stdout).contains(&known.to_string()), "{output:?}");
    assert_eq!(ssh(&["exit", "7"])?.status.code(), Some(7));
    // Whoever names no key is let in with the one of which the guest was given the public part.
    let home = own.path().join(".ssh");
    std::fs::create_dir(&home)?;
    std::fs::copy(&guest.key, home.join("work"))?;
    std::fs::copy(format!("{}.pub", guest.key), home.join("work.pub"))?;
    let mut found = guest.stack.command("eschedule");
    found.args(["ssh", "web", "--", "id", "-un"]).env("HOME", own.path());
    found.env("PATH", format!("{}:/usr/bin:/bin", own.path().display()));
    let output = found.stdin(Stdio::null()).output()?;
    ensure!(output.status.success() && output.stdout == b"root\n", "{output:?}");
    let remembered = std::fs::read_to_string(&keys)?;
    ensure!(remembered.starts_with(&guest.instance.to_string()), "by the instance: {remembered}");
    ensure!(!remembered.contains(&known.to_string()), "not by its address: {remembered}");
    guest.asks(&["pause", "--wait", "web"])?;
    let refused = guest.refuses(&["ssh", "web"])?;
    ensure!(refused.contains("it is paused") && refused.contains("unpause"), "{refused}");
    guest.asks(&["unpause", "--wait", "web"])?;
    guest.asks(&["destroy", "--wait", "web"])?;
    let gone = guest.refuses(&["ssh", &guest.instance.to_string()])?;
    ensure!(gone.contains("there is no instance"), "{gone}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_screen_is_shown_to_viewers_where_guests_have_one() -> Result<()> {
    let mut guest = Guest::up().await?;
    let refused = guest.refuses(&["vnc", "web"])?;
    ensure!(refused.contains("libvirt.graphics") && refused.lines().count() == 1, "{refused}");
    let file = guest.stack.directory().join("compute.yaml");
    let text = std::fs::read_to_string(&file)?.replace("libvirt: {", "libvirt: {graphics: vnc, ");
    std::fs::write(&file, text)?;
    guest.stack.kill_agent()?;
    guest.stack.start_agent("").await?;
    guest.stack.schedule(&["--wait", "--name", "seen"])?;
    let mut shown = guest.begin(&["vnc", "seen"])?;
    shown.until("\n")?;
    for _ in 0..2 {
        let mut viewer = TcpStream::connect(shown.said.trim())?;
        viewer.set_read_timeout(Some(PATIENCE))?;
        let mut greeting = [0; 12];
        viewer.read_exact(&mut greeting)?;
        assert_eq!(&greeting, b"RFB 003.008\n");
        viewer.write_all(&greeting)?;
        // One kind of authentication: none is needed by who comes this way.
        let mut kinds = [0; 2];
        viewer.read_exact(&mut kinds)?;
        assert_eq!(kinds, [1, 1]);
    }
    guest.asks(&["stop", "--grace", "0", "--wait", "seen"])?;
    let refused = guest.refuses(&["vnc", "seen"])?;
    ensure!(refused.contains("it is stopped"), "{refused}");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(shown.child.id().try_into()?), Signal::SIGINT)?;
    assert_eq!(shown.ends()?, Some(130));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_without_a_port_or_out_of_reach_is_told_in_one_line() -> Result<()> {
    let mut stack = Stack::start_with("listen: null").await?;
    stack.start_agent("").await?;
    let instance = stack.schedule(&["--wait", "--name", "web"])?;
    let output = stack.eschedule(&["logs", "web"])?;
    let why = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{why}");
    ensure!(why.contains("listen") && why.lines().count() == 1, "{why}");
    assert_eq!(output.stdout, b"");
    drop(stack);

    // A name that leads nowhere.
    let mut stack = Stack::start_with("listen: 127.0.0.1:0\nadvertise: nowhere.invalid").await?;
    stack.start_agent("").await?;
    assert_ne!(stack.schedule(&["--wait", "--name", "web"])?, instance);
    let output = stack.eschedule(&["logs", "web"])?;
    let why = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(3), "{why}");
    ensure!(why.contains("http://nowhere.invalid:") && why.contains("advertise"), "{why}");
    ensure!(why.lines().count() == 1, "{why}");
    Ok(())
}
