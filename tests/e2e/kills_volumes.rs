//! kill -9 of the agent before each step of what is asked of a volume, under a guest that runs, as [`crate::kills`] has it of instances.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, State};
use ec_tests::Stack;
use serde_json::Value;

use crate::{
    kills::{Kills, anew, armed, points},
    power::Guest,
    volumes::{TWO, id, is_whole},
};

/// What is asked, and what it finds.
struct Verb {
    ask: &'static [&'static str],
    /// What is done before each time, so that it can be asked for.
    ready: &'static [&'static [&'static str]],
    /// When it is done.
    done: Done,
    /// The steps that make it.
    steps: &'static [&'static str],
}

#[derive(Clone, Copy)]
enum Done {
    /// `new` is there.
    New,
    /// `data` is so.
    Data(&'static str),
    /// What was there as `new` is no more.
    Gone,
    /// `data` is as large as was asked for.
    Larger,
    /// `data` was made anew.
    Anew,
}

/// A volume or a snapshot by its name, where it is there.
fn shown(stack: &Stack, name: &str) -> Result<Option<Value>> {
    let output = stack.eschedule(&["volume", "show", name, "-o", "json"])?;
    if output.status.success() {
        return Ok(Some(serde_json::from_slice(&output.stdout)?));
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1) && said.contains("no volume"), "{output:?}");
    Ok(None)
}

struct Trial {
    guest: Guest,
    kills: Kills,
    data: InstanceId,
    /// Of whom something was asked last.
    asked: InstanceId,
    /// The digest of what the guest wrote on it.
    written: String,
    /// In GiB.
    size: u64,
}

/// Whether what was asked of this one is done; `size` in GiB is what it is to have.
async fn is_done(stack: &Stack, (of, size): (InstanceId, u64), done: Done) -> Result<bool> {
    Ok(match done {
        Done::New => shown(stack, "new")?.is_some_and(|view| view["status"] == "available"),
        // Its guest has told so.
        Done::Data(wanted) => {
            let request = stack.request_at(stack.node, of).await?.context("no request")?;
            let told = stack.status(of).await?.context("no status")?;
            let is_so = shown(stack, "data")?.is_some_and(|view| view["status"] == wanted);
            is_so && told.observed_generation >= request.generation
        }
        Done::Gone => stack.request_at(stack.node, of).await?.is_none(),
        Done::Larger => {
            let told = stack.status(of).await?.and_then(|status| status.resized);
            told.is_some_and(|told| told.resources.get("DISK_GB") == Some(&size))
        }
        Done::Anew => {
            let request = stack.request_at(stack.node, of).await?.context("no request")?;
            let told = stack.status(of).await?.context("no status")?;
            let wished = request.rebuild.map(|wish| wish.wished_at);
            told.state == State::Active && told.rebuilt.map(|rebuilt| rebuilt.wished_at) == wished
        }
    })
}

impl Trial {
    async fn ready(&self, verb: &Verb) -> Result<()> {
        for ready in verb.ready {
            if *ready != DELETE {
                self.guest.asks(ready)?;
            } else if let Some(view) = shown(&self.guest.stack, "new")? {
                let kind = if view["snapshot"] == true { "snapshot" } else { "volume" };
                self.guest.asks(&[&[kind], DELETE].concat())?;
            }
        }
        self.look().await
    }

    /// All of what was written is there, whoever reads it.
    async fn look(&self) -> Result<()> {
        let guest = &self.guest;
        match shown(&guest.stack, "data")?.context("it is there")?["status"].as_str() {
            Some("in-use")
                if guest.stack.status(guest.instance).await?.context("no status")?.state == State::Active =>
            {
                ensure!(guest.digest("vdb").await? == self.written, "another digest");
            }
            Some("in-use") => {}
            _ => is_whole(guest, self.data)?,
        }
        Ok(())
    }

    fn ask(&mut self, verb: &Verb) -> Result<()> {
        self.asked = match verb.done {
            Done::Gone => id(&shown(&self.guest.stack, "new")?.context("it is there")?)?,
            Done::Data(_) => self.guest.instance,
            _ => self.data,
        };
        if let Done::Larger = verb.done {
            self.size += 1;
            self.guest.asks(&[verb.ask, &[&self.size.to_string()]].concat())?;
        } else {
            self.guest.asks(verb.ask)?;
        }
        Ok(())
    }

    /// Done once, with nothing lost, doubled or left.
    async fn settle(&mut self, verb: &Verb) -> Result<()> {
        let stack = &self.guest.stack;
        stack.until("it is done", async || is_done(stack, (self.asked, self.size), verb.done).await).await?;
        let mut there = Vec::new();
        for name in ["data", "snap", "new"] {
            there.extend(shown(stack, name)?.map(|view| id(&view)).transpose()?);
        }
        stack.until_exactly_with(&[self.guest.instance], &there).await?;
        if let Done::New = verb.done {
            is_whole(&self.guest, *there.last().context("it is there")?)?;
        }
        if let Done::Larger = verb.done {
            let sectors = self.guest.run("cat /sys/block/vdb/size").await?;
            ensure!(sectors == (self.size << 21).to_string(), "the guest sees {sectors} sectors");
        }
        self.look().await
    }

    async fn run(&mut self, verb: &Verb) -> Result<()> {
        anew(&mut self.guest.stack, "").await?;
        self.ready(verb).await?;
        let heard = self.guest.stack.log().len();
        self.ask(verb)?;
        self.settle(verb).await?;
        let asked = verb.ask.join(" ");
        let steps = points(&self.guest.stack.log()[heard..]);
        let steps: BTreeSet<String> = self.kills.chosen(&steps, verb.steps).with_context(|| asked.clone())?;
        for step in &steps {
            self.kill_at(verb, step).await.with_context(|| format!("{asked}, {step}"))?;
        }
        self.kills.tell(&asked, &steps);
        Ok(())
    }

    async fn kill_at(&mut self, verb: &Verb, step: &str) -> Result<()> {
        let mut left = self.kills.at_each();
        // Some are not come to each time, as where a look comes in the one job or in the next.
        for _ in 0..=self.kills.at_each() {
            self.ready(verb).await?;
            anew(&mut self.guest.stack, &armed(step, left)).await?;
            self.ask(verb)?;
            let (of, done) = ((self.asked, self.size), verb.done);
            let is_done = async |stack: &Stack| is_done(stack, of, done).await;
            self.kills.harm(&mut self.guest.stack, step, &mut left, is_done).await?;
            self.settle(verb).await?;
            if left == 0 {
                break;
            }
        }
        ensure!(
            left < self.kills.at_each() || !verb.steps.contains(&step),
            "the agent did not come there again"
        );
        Ok(())
    }
}

/// Of what is there, a volume or a snapshot.
const DELETE: &[&str] = &["delete", "new", "--wait"];
const ATTACH: &[&str] = &["volume", "attach", "data", "web", "--wait"];

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_each_step_of_what_is_done_to_a_volume() -> Result<()> {
    let guest = Guest::up_as(TWO, &[]).await?;
    let (data, written) = guest.with_data().await?;
    let mut trial = Trial { guest, kills: Kills::new()?, data, asked: data, written, size: 1 };
    let noted: &[&str] = &["before-tell-volumes", "before-set-volumes", "before-note-volumes"];
    let made: &[&str] = &["before-volume", "before-create-volume", "before-mark-started"];
    for verb in [
        Verb {
            ask: &["volume", "create", "new", "--size", "1"],
            ready: &[DELETE],
            done: Done::New,
            steps: made,
        },
        Verb {
            ask: &["volume", "create", "new", "--copy-of", "data"],
            ready: &[DELETE],
            done: Done::New,
            steps: &["before-volume"],
        },
        Verb {
            ask: &["snapshot", "create", "web", "new"],
            ready: &[DELETE],
            done: Done::New,
            steps: &["before-volume"],
        },
        Verb {
            ask: &["volume", "delete", "new"],
            ready: &[DELETE, &["volume", "create", "new", "--size", "1", "--wait"]],
            done: Done::Gone,
            steps: &["before-bury", "before-drop-record", "before-release", "before-drop-keys"],
        },
        Verb {
            ask: &["volume", "detach", "data"],
            ready: &[ATTACH],
            done: Done::Data("available"),
            steps: noted,
        },
        Verb {
            ask: &["volume", "attach", "data", "web"],
            ready: &[&["volume", "detach", "data", "--wait"]],
            done: Done::Data("in-use"),
            steps: noted,
        },
        Verb {
            ask: &["volume", "extend", "data"],
            ready: &[ATTACH],
            done: Done::Larger,
            steps: &["before-extend", "before-note-size", "before-note-resize"],
        },
    ] {
        trial.run(&verb).await?;
    }
    // Of what it was then, while its guest is down.
    trial.guest.asks(&["snapshot", "create", "web", "snap", "--wait"])?;
    trial.guest.run("dd if=/dev/urandom of=/dev/vdb bs=1M count=4 conv=fsync").await?;
    trial.guest.asks(&["stop", "--grace", "0", "--wait", "web"])?;
    trial
        .run(&Verb {
            ask: &["volume", "restore", "data", "volume:snap/data"],
            ready: &[],
            done: Done::Anew,
            steps: &["before-prepare-rebuild", "before-replace-disk", "before-note-rebuild"],
        })
        .await?;
    trial.guest.asks(&["start", "--wait", "web"])?;
    trial.look().await?;
    for name in ["snap", "data"] {
        if name == "data" {
            trial.guest.asks(&["destroy", "--wait", "web"])?;
        }
        trial.guest.asks(&["volume", "delete", name, "--wait"])?;
    }
    trial.guest.stack.until_exactly(&[]).await
}
