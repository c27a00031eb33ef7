//! The agent is killed before and after each step of a build and of a destroy; the next one finishes it.

use std::time::Duration;

use ec_hypervisor::{End, Operation};
use ec_model::State;

use super::{Scenario, Stage, stage::Sight};
use crate::snag::Fate;

const BUILD: &str =
    "an agent is killed at this step of a build: the next one finishes it, and starts the guest once";
const DESTROY: &str =
    "an agent is killed at this step of a destroy: the next one finishes it, and nothing is left";
const ANSWER: &str =
    "an agent's write is done and its answer lost, or is lost itself: it comes to the same end";

macro_rules! build {
    ($name:literal, $call:literal, $fate:expr) => {
        Scenario::new($name, BUILD, |stage| Box::pin(killed_in_a_build(stage, $call, $fate)))
    };
}

macro_rules! destroy {
    ($name:literal, $call:literal, $fate:expr) => {
        Scenario::new($name, DESTROY, |stage| Box::pin(killed_in_a_destroy(stage, $call, $fate)))
    };
}

macro_rules! answer {
    ($name:literal, $call:literal, $fate:expr) => {
        Scenario::new($name, ANSWER, |stage| Box::pin(unheard(stage, $call, $fate)))
    };
}

pub(super) const ALL: &[Scenario] = &[
    build!("build-killed-before-preparing", "put status/n1/i1 PREPARING", Fate::Kills),
    build!("build-killed-before-the-question", "GET /allocations/i1", Fate::Kills),
    build!("build-killed-before-the-disk", "hypervisor CreateOverlay", Fate::Kills),
    build!("build-killed-after-the-disk", "hypervisor CreateOverlay", Fate::KillsAfterwards),
    build!("build-killed-before-starting", "put status/n1/i1 STARTING", Fate::Kills),
    build!("build-killed-before-the-definition", "hypervisor Define", Fate::Kills),
    build!("build-killed-after-the-definition", "hypervisor Define", Fate::KillsAfterwards),
    build!("build-killed-before-the-start", "hypervisor Start", Fate::Kills),
    build!("build-killed-after-the-start", "hypervisor Start", Fate::KillsAfterwards),
    build!("build-killed-before-active", "put status/n1/i1 ACTIVE", Fate::Kills),
    build!("build-killed-after-active", "put status/n1/i1 ACTIVE", Fate::KillsAfterwards),
    destroy!("destroy-killed-before-destroying", "put status/n1/i1 DESTROYING", Fate::Kills),
    destroy!("destroy-killed-before-the-domain", "hypervisor Destroy", Fate::Kills),
    destroy!("destroy-killed-after-the-domain", "hypervisor Destroy", Fate::KillsAfterwards),
    destroy!("destroy-killed-before-the-release", "DELETE /allocations/i1", Fate::Kills),
    destroy!("destroy-killed-after-the-release", "DELETE /allocations/i1", Fate::KillsAfterwards),
    destroy!("destroy-killed-before-the-keys", "delete requests/n1/i1", Fate::Kills),
    destroy!("destroy-killed-after-the-keys", "delete requests/n1/i1", Fate::KillsAfterwards),
    answer!("answer-lost-of-preparing", "put status/n1/i1 PREPARING", Fate::LosesItsAnswer),
    answer!("answer-lost-of-active", "put status/n1/i1 ACTIVE", Fate::LosesItsAnswer),
    answer!("answer-lost-of-the-release", "DELETE /allocations/i1", Fate::LosesItsAnswer),
    answer!("answer-lost-of-the-keys", "delete requests/n1/i1", Fate::LosesItsAnswer),
    answer!("write-lost-of-active", "put status/n1/i1 ACTIVE", Fate::IsLost),
    answer!("write-lost-of-the-keys", "delete requests/n1/i1", Fate::IsLost),
    Scenario::new(
        "status-written-late",
        "a killed agent's word that a guest is STARTING arrives when the next one has told ACTIVE: it is not written any more",
        |stage| Box::pin(late(stage)),
    ),
    Scenario::new(
        "start-told-to-have-failed",
        "a hypervisor says that a start failed which worked, then the agent is killed, etcd loses everything, and somebody ends and undefines \
         the guest: its disk is kept, for the guest may have written it",
        |stage| Box::pin(denied(stage)),
    ),
    Scenario::new(
        "agent-updated",
        "an agent is asked to end and started anew in the middle of a build: the guest is built, and the one that ran \
         before is adopted",
        |stage| Box::pin(updated(stage)),
    ),
    Scenario::new(
        "destroyed-during-its-build",
        "a user destroys a guest at each moment of its build: nothing of it is left",
        |stage| Box::pin(destroyed(stage)),
    ),
];

async fn killed_in_a_build(stage: Stage, call: &'static str, fate: Fate) {
    stage.snag("n1", call, fate);
    let placed = stage.placed("web").await;
    stage.until_down(1).await;
    stage.pass(2).await;
    stage.start(1);
    stage.until_well(placed.instance).await;
    for operation in [Operation::CreateOverlay, Operation::Define, Operation::Start] {
        let done = stage.node(1).hypervisor.effects(operation, placed.instance);
        stage.demand(done == 1, &format!("{operation:?} was done once")).await;
    }
}

async fn killed_in_a_destroy(stage: Stage, call: &'static str, fate: Fate) {
    let guest = stage.ready("web").await;
    stage.snag("n1", call, fate);
    stage.destroyed(guest).await;
    stage.until_down(1).await;
    stage.pass(2).await;
    stage.start(1);
    stage.until_gone(guest).await;
    stage.ready("web").await;
}

async fn unheard(stage: Stage, call: &'static str, fate: Fate) {
    stage.snag("n1", call, fate);
    let placed = stage.placed("web").await;
    stage.until_well(placed.instance).await;
    stage.destroyed(placed.instance).await;
    stage.until_gone(placed.instance).await;
}

async fn late(stage: Stage) {
    stage.snag("n1", "put status/n1/i1 STARTING", Fate::IsLate(Duration::from_secs(20)));
    let placed = stage.placed("web").await;
    stage.pass(1).await;
    stage.kill(1);
    stage.start(1);
    stage.until_well(placed.instance).await;
    stage.pass(15).await;
    stage.until_well(placed.instance).await;
}

async fn denied(stage: Stage) {
    stage.snag("n1", "hypervisor Start", Fate::IsDenied);
    let guest = stage.placed("web").await.instance;
    stage.until(guest, "up", Sight::runs).await;
    stage.snag("n1", "put status/n1/i1", Fate::Kills);
    stage.until_down(1).await;
    stage.expects_trouble(guest);
    stage.empty_etcd();
    stage.end_guest(1, guest, End::ByHand);
    stage.undefine(1, guest);
    stage.start(1);
    let kept = |is: &Sight| is.is(State::Unclaimed) && is.volume && is.record && is.claim;
    stage.until(guest, "UNCLAIMED and kept", kept).await;
    stage.stays(guest, 120, "UNCLAIMED and kept", kept).await;
}

async fn updated(stage: Stage) {
    let before = stage.ready("before").await;
    stage.node(1).hypervisor.set_latency(Operation::Define, Duration::from_secs(3));
    let placed = stage.placed("web").await;
    stage.pass(1).await;
    stage.stop(1);
    stage.until_down(1).await;
    stage.until(before, "running", |is| is.runs() && is.is_kept()).await;
    stage.until_well(placed.instance).await;
    stage.until_well(before).await;
}

async fn destroyed(stage: Stage) {
    let hypervisor = stage.node(1).hypervisor.clone();
    for operation in [Operation::CreateOverlay, Operation::Define, Operation::Start] {
        stage.say(format!("each {operation:?} takes five seconds"));
        hypervisor.set_latency(operation, Duration::from_secs(5));
        let placed = stage.placed("web").await;
        stage.pass(2).await;
        stage.destroyed(placed.instance).await;
        stage.until_gone(placed.instance).await;
        hypervisor.set_latency(operation, Duration::ZERO);
    }
    let placed = stage.placed("web").await;
    stage.until(placed.instance, "being started", |is| is.is(State::Starting) && is.runs()).await;
    stage.destroyed(placed.instance).await;
    stage.until_gone(placed.instance).await;
}
