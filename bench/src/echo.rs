//! How long a key takes to the guest's shell and back: `eschedule console` against `virsh console` on the node, both on a
//! terminal of their own, by turns.

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use ec_tests::Stack;
use nix::pty::openpty;

use crate::{
    bare::PATIENCE,
    stats::{Figure, Goal, Samples},
};

/// By turns.
const ROUNDS: usize = 3;
const KEYS: usize = 40;
/// Not counted, in each round: the first keys find everything asleep.
const WARM_UP: usize = 3;
/// Somebody types quickly.
const PAUSE: Duration = Duration::from_millis(80);
/// A console is silent when nothing came for so long.
const QUIET: Duration = Duration::from_secs(1);
/// So long until a console can be opened again.
const CLOSING: Duration = Duration::from_secs(1);
const LEAVE: &[u8] = b"\x1d";

/// Measures on a guest that runs and has a shell on its console.
pub(crate) async fn measure(stack: &Stack) -> Result<Vec<Figure>> {
    let key = stack.key_pair()?;
    let instance = stack.schedule(&["--wait", "--key", &format!("{key}.pub")])?;
    stack.ssh_to(&key, "root", instance, "true").await?;
    let name = instance.to_string();
    let (mut ours, mut bare) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        let mut eschedule = stack.command("eschedule");
        eschedule.args(["console", &name]);
        let mut virsh = Command::new("virsh");
        virsh.args(["--quiet", "--connect", stack.libvirt.uri(), "console", &name]);
        for (command, samples) in [(eschedule, &mut ours), (virsh, &mut bare)] {
            tokio::task::block_in_place(|| type_on(command, samples))?;
            std::thread::sleep(CLOSING);
        }
    }
    let output = stack.eschedule(&["destroy", "--wait", &name])?;
    anyhow::ensure!(output.status.success(), "{output:?}");
    Ok(vec![Figure {
        name: "console: a key → its echo",
        unit: "ms",
        ours,
        bare: Some(("virsh console on the node", bare)),
        goals: vec![Goal::Above(5.0)],
    }])
}

fn type_on(mut command: Command, samples: &mut Samples) -> Result<()> {
    let pty = openpty(None, None)?;
    let end = || pty.slave.try_clone().map(Stdio::from);
    let mut child: Child = command.stdin(end()?).stdout(end()?).stderr(end()?).spawn()?;
    drop(pty.slave);
    let mut keys = File::from(pty.master);
    let mut screen = keys.try_clone()?;
    let (told, printed) = mpsc::channel();
    std::thread::spawn(move || {
        let mut piece = [0; 1024];
        while let Ok(count @ 1..) = screen.read(&mut piece) {
            told.send((Instant::now(), count)).ok();
        }
    });
    // A new line, and all that it brings.
    keys.write_all(b"\r")?;
    printed.recv_timeout(PATIENCE).context("the console says nothing")?;
    loop {
        while printed.recv_timeout(QUIET).is_ok() {}
        keys.write_all(b"\r")?;
        if printed.recv_timeout(QUIET).is_ok() {
            break;
        }
    }
    while printed.recv_timeout(QUIET).is_ok() {}
    for number in 0..WARM_UP + KEYS {
        let before = Instant::now();
        keys.write_all(b"x")?;
        let (after, _) = printed.recv_timeout(PATIENCE).context("a key has no echo")?;
        if number >= WARM_UP {
            samples.push_time(after - before);
        }
        std::thread::sleep(PAUSE);
        while printed.try_recv().is_ok() {}
    }
    // What was typed is no command.
    keys.write_all(b"\x15")?;
    // `virsh` looks for it at the beginning of what it reads only.
    std::thread::sleep(PAUSE);
    keys.write_all(LEAVE)?;
    child.wait()?;
    Ok(())
}
