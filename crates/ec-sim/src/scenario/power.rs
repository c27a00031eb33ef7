//! What users wish of guests' power, and what follows ends that nobody wished.

use std::time::Duration;

use ec_cloud::Verb;
use ec_hypervisor::{End, Operation};
use ec_model::{InstanceId, Restart, RunState, State};

use super::{Scenario, Stage, people::SMALL, stage::Sight};
use crate::{snag::Fate, user::Order};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "stop-and-start",
        "a user stops a guest and starts it again: it is asked to end, STOPPED and kept; then well",
        |stage| Box::pin(stop_and_start(stage)),
    ),
    Scenario::new(
        "stop-of-a-deaf-guest",
        "a guest does not hear that it is to end: it is asked again, ended when its grace is over, and that is told",
        |stage| Box::pin(deaf(stage)),
    ),
    Scenario::new(
        "stop-while-the-agent-is-down",
        "a user stops a guest while its agent is down: it is stopped when the agent is back",
        |stage| Box::pin(agent_down(stage)),
    ),
    Scenario::new(
        "stop-before-it-is-built",
        "a user stops a guest that is being built: it comes up, and is stopped then",
        |stage| Box::pin(before_built(stage)),
    ),
    Scenario::new(
        "start-while-it-stops",
        "a user changes their mind while a guest is being stopped: it ends, and is started again",
        |stage| Box::pin(other_mind(stage)),
    ),
    Scenario::new(
        "reboot-with-kills",
        "the agent is killed in the midst of a reboot, before each of its steps: the guest is rebooted once",
        |stage| Box::pin(reboot(stage)),
    ),
    Scenario::new(
        "reboot-whose-start-fails",
        "a guest that is rebooted does not start at once, and its agent is killed when it does: it is not ended once more",
        |stage| Box::pin(start_fails(stage)),
    ),
    Scenario::new(
        "rebooted-before-a-power-cut",
        "a guest was rebooted long ago; after a power cut it does not start at once, and its agent is killed when it does: it runs on",
        |stage| Box::pin(rebooted_before(stage)),
    ),
    Scenario::new(
        "pause-and-suspend",
        "a user pauses a guest, lets it go on, suspends it, and resumes it; in each of them the agent is started anew",
        |stage| Box::pin(pause_and_suspend(stage)),
    ),
    Scenario::new(
        "suspended-and-rebooted",
        "a user reboots a suspended guest hard, and its agent is killed before and after each step: its memory is deleted once, and it boots anew",
        |stage| Box::pin(suspended_and_rebooted(stage)),
    ),
    Scenario::new(
        "suspend-that-comes-late",
        "a guest's memory is saved by a call that its agent waits for no more, after its user wished it stopped, or paused: it is that in the end",
        |stage| Box::pin(late_suspend(stage)),
    ),
    Scenario::new(
        "host-reboot-as-wanted",
        "a host is started anew: the guest that ran runs again, those that were stopped and suspended are as they were",
        |stage| Box::pin(host_reboot(stage)),
    ),
    Scenario::new(
        "started-by-hand-though-stopped",
        "somebody starts a guest on its host that its user stopped: it is ACTIVE, and not ended again",
        |stage| Box::pin(by_hand(stage)),
    ),
    Scenario::new(
        "wish-with-lost-answers",
        "the answers to what a user writes are lost: each wish is written once, and carried out once",
        |stage| Box::pin(lost_answers(stage)),
    ),
    Scenario::new(
        "wish-while-etcd-is-away",
        "etcd is away while a wish is carried out: the guest is ended, and it is told when etcd is back",
        |stage| Box::pin(etcd_away(stage)),
    ),
    Scenario::new("locked", "a locked instance is neither stopped nor destroyed; unlocked, it is", |stage| {
        Box::pin(locked(stage))
    }),
    Scenario::new(
        "restart-on-failure",
        "a guest that crashes is started again by its policy, later each time, and left after five in a row",
        |stage| Box::pin(on_failure(stage)),
    ),
    Scenario::new(
        "restart-always",
        "a guest that powers itself off is started again by its policy; one that its user stops is not",
        |stage| Box::pin(always(stage)),
    ),
    Scenario::new(
        "renamed",
        "an instance is called otherwise: it is found by its new name only, and the old one is free",
        |stage| Box::pin(renamed(stage)),
    ),
];

/// Wishes, waits, and demands how it is then.
async fn becomes(stage: &Stage, guest: InstanceId, verb: &Verb, state: State) {
    match stage.user(1).wish(guest, verb).await {
        Ok(Some(is)) if is == state => {}
        other => stage.fail(format!("{} shall make it {state}: {other:?}", verb.name())).await,
    }
}

async fn runs_again(stage: &Stage, guest: InstanceId, verb: &Verb) {
    let started = stage.user(1).wish(guest, verb).await;
    stage.demand(matches!(started, Ok(Some(State::Starting | State::Active))), "it is started").await;
    stage.until_well(guest).await;
}

async fn stop_and_start(stage: Stage) {
    let guest = stage.ready("web").await;
    becomes(&stage, guest, &Verb::Stop(60), State::Stopped).await;
    let kept = |is: &Sight| is.is(State::Stopped) && !is.runs() && is.is_kept();
    stage.stays(guest, 120, "STOPPED and kept", kept).await;
    if stage.user(1).wish(guest, &Verb::Pause).await.is_ok() {
        stage.fail::<()>("what does not run is not paused").await;
    }
    runs_again(&stage, guest, &Verb::Start).await;
}

async fn deaf(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.say("guests of n1 do not hear");
    stage.node(1).hypervisor.set_deaf(true);
    becomes(&stage, guest, &Verb::Stop(25), State::Stopped).await;
    let told = |is: &Sight| is.is(State::Stopped) && is.says("did not end by itself in 25 s") && is.is_kept();
    stage.until(guest, "STOPPED with the reason", told).await;
    stage.node(1).hypervisor.set_deaf(false);
}

async fn agent_down(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.pass(20).await;
    let user = stage.user(1);
    let (wished, ()) = tokio::join!(user.wish(guest, &Verb::Stop(0)), async {
        stage.pass(20).await;
        stage.start(1);
    });
    stage.demand(wished == Ok(Some(State::Stopped)), "it is stopped").await;
}

async fn before_built(stage: Stage) {
    stage.node(1).hypervisor.set_latency(Operation::Define, Duration::from_secs(5));
    let placed = stage.placed("web").await;
    stage.until(placed.instance, "being built", |is| is.is(State::Starting) && !is.runs()).await;
    becomes(&stage, placed.instance, &Verb::Stop(60), State::Stopped).await;
    let kept = |is: &Sight| is.is(State::Stopped) && !is.runs() && is.is_kept();
    stage.stays(placed.instance, 120, "STOPPED and kept", kept).await;
}

async fn other_mind(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.node(1).hypervisor.set_deaf(true);
    let (one, other) = (stage.user(1), stage.user(2));
    let started = async {
        stage.until(guest, "being stopped", |is| is.is(State::Stopping)).await;
        other.wish(guest, &Verb::Start).await
    };
    let (_, started) = tokio::join!(one.wish(guest, &Verb::Stop(30)), started);
    stage.demand(started.is_ok(), "it is started").await;
    stage.until_well(guest).await;
    stage.node(1).hypervisor.set_deaf(false);
}

async fn reboot(stage: Stage) {
    let guest = stage.ready("web").await;
    let starts = || stage.node(1).hypervisor.effects(Operation::Start, guest);
    for call in
        ["put status/n1/i1 REBOOTING", "hypervisor ShutDown", "put status/n1/i1 STARTING", "hypervisor Start"]
    {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            let before = starts();
            stage.snag("n1", call, fate);
            let user = stage.user(1);
            let (rebooted, ()) = tokio::join!(user.wish(guest, &Verb::Reboot(60)), async {
                stage.until_down(1).await;
                stage.pass(20).await;
                stage.start(1);
            });
            stage.demand(rebooted.is_ok(), "it is rebooted").await;
            stage.until_well(guest).await;
            stage.demand(starts() == before + 1, "it was started once").await;
        }
    }
}

/// Its start fails, and the agent is killed once the next one worked.
async fn starts_unheard(stage: &Stage, guest: InstanceId) {
    stage.snag("n1", "hypervisor Start", Fate::IsRefused(0));
    stage.snag("n1", "hypervisor Start", Fate::KillsAfterwards);
    stage.until(guest, "in ERROR", |is| is.is(State::Error) && is.is_kept()).await;
    stage.until_down(1).await;
    stage.pass(20).await;
    stage.start(1);
}

async fn start_fails(stage: Stage) {
    let guest = stage.ready("web").await;
    let starts = || stage.node(1).hypervisor.effects(Operation::Start, guest);
    for grace in [0, 60] {
        let before = starts();
        let (user, verb) = (stage.user(1), Verb::Reboot(grace));
        let (rebooted, ()) = tokio::join!(user.wish(guest, &verb), starts_unheard(&stage, guest));
        let told = rebooted.is_err_and(|why| why.contains("refused on request"));
        stage.demand(told, "its user is told that it failed").await;
        stage.until_well(guest).await;
        stage.stays(guest, 120, "well", Sight::is_well).await;
        stage.demand(starts() == before + 1, "it was started once").await;
    }
}

async fn rebooted_before(stage: Stage) {
    let guest = stage.ready("web").await;
    let starts = || stage.node(1).hypervisor.effects(Operation::Start, guest);
    for grace in [0, 60] {
        runs_again(&stage, guest, &Verb::Reboot(grace)).await;
        let before = starts();
        stage.crash(1).await;
        stage.pass(30).await;
        stage.start(1);
        starts_unheard(&stage, guest).await;
        stage.until_well(guest).await;
        stage.stays(guest, 120, "well", Sight::is_well).await;
        stage.demand(starts() == before + 1, "it was started once").await;
    }
}

async fn pause_and_suspend(stage: Stage) {
    let guest = stage.ready("web").await;
    becomes(&stage, guest, &Verb::Pause, State::Paused).await;
    stage.kill(1);
    stage.start(1);
    let paused = |is: &Sight| is.is(State::Paused) && !is.runs() && is.is_kept();
    stage.stays(guest, 60, "PAUSED and kept", paused).await;
    becomes(&stage, guest, &Verb::Unpause, State::Active).await;
    becomes(&stage, guest, &Verb::Suspend, State::Suspended).await;
    stage.kill(1);
    stage.start(1);
    let saved = |is: &Sight| is.is(State::Suspended) && !is.runs() && is.is_kept();
    stage.stays(guest, 60, "SUSPENDED and kept", saved).await;
    if stage.user(1).wish(guest, &Verb::Start).await.is_ok() {
        stage.fail::<()>("what is suspended is resumed, not started").await;
    }
    runs_again(&stage, guest, &Verb::Resume).await;
}

/// Its agent is killed before and after each step.
async fn suspended_and_rebooted(stage: Stage) {
    let guest = stage.ready("web").await;
    for call in ["put status/n1/i1 REBOOTING", "hypervisor DropMemory", "put status/n1/i1 STARTING"] {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            becomes(&stage, guest, &Verb::Suspend, State::Suspended).await;
            let dropped = || stage.node(1).hypervisor.effects(Operation::DropMemory, guest);
            let before = dropped();
            stage.snag("n1", call, fate);
            let user = stage.user(1);
            let (rebooted, ()) = tokio::join!(user.wish(guest, &Verb::Reboot(0)), async {
                stage.until_down(1).await;
                stage.pass(20).await;
                stage.start(1);
            });
            stage.demand(rebooted.is_ok(), "it is rebooted").await;
            stage.until_well(guest).await;
            stage.demand(dropped() == before + 1, "its memory was deleted once").await;
        }
    }
}

async fn late_suspend(stage: Stage) {
    let guest = stage.ready("web").await;
    // What was wished since takes longer than until the call comes: a pause is late itself, and a deaf guest is up still.
    stage.node(1).hypervisor.set_deaf(true);
    stage.snag("n1", "hypervisor Pause", Fate::IsLate(Duration::from_secs(20)));
    for (verb, state, back) in
        [(Verb::Pause, State::Paused, Verb::Unpause), (Verb::Stop(30), State::Stopped, Verb::Start)]
    {
        stage.snag("n1", "hypervisor Save", Fate::IsLate(Duration::from_secs(40)));
        let (one, other) = (stage.user(1), stage.user(2));
        let changed = async {
            stage.until(guest, "being suspended", |is| is.is(State::Suspending)).await;
            stage.pass(5).await;
            let taken_back = other.wish(guest, &Verb::Resume).await;
            stage.demand(taken_back.is_ok(), "the suspend is taken back").await;
            other.wish(guest, &verb).await
        };
        let (_, changed) = tokio::join!(one.wish(guest, &Verb::Suspend), changed);
        stage.demand(changed == Ok(Some(state)), &format!("it is {state}")).await;
        let as_wished = |is: &Sight| is.is(state) && is.domain != Some(RunState::Saved) && is.is_kept();
        stage.until(guest, "as its user wished last", as_wished).await;
        stage.pass(60).await;
        stage.stays(guest, 60, "as its user wished last", as_wished).await;
        runs_again(&stage, guest, &back).await;
    }
    stage.node(1).hypervisor.set_deaf(false);
}

async fn host_reboot(stage: Stage) {
    let [runs, stopped, suspended] = ["web", "db", "mail"].map(|name| stage.ready(name));
    let (runs, stopped, suspended) = (runs.await, stopped.await, suspended.await);
    becomes(&stage, stopped, &Verb::Stop(0), State::Stopped).await;
    becomes(&stage, suspended, &Verb::Suspend, State::Suspended).await;
    stage.crash(1).await;
    stage.pass(30).await;
    stage.start(1);
    stage.until_well(runs).await;
    stage.stays(stopped, 60, "STOPPED", |is| is.is(State::Stopped) && is.is_kept()).await;
    stage.stays(suspended, 60, "SUSPENDED", |is| is.is(State::Suspended) && is.is_kept()).await;
}

async fn by_hand(stage: Stage) {
    let guest = stage.ready("web").await;
    becomes(&stage, guest, &Verb::Stop(0), State::Stopped).await;
    stage.say("somebody starts it with virsh");
    stage.expects_trouble(guest);
    ec_hypervisor::Hypervisor::start(&stage.node(1).hypervisor, guest).await.ok();
    stage.until_well(guest).await;
    stage.stays(guest, 120, "well", Sight::is_well).await;
}

async fn lost_answers(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("u1", "put requests/n1/i1", Fate::LosesItsAnswer);
    becomes(&stage, guest, &Verb::Stop(60), State::Stopped).await;
    stage.snag("u1", "put requests/n1/i1", Fate::LosesItsAnswer);
    runs_again(&stage, guest, &Verb::Start).await;
}

async fn etcd_away(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.node(1).hypervisor.set_deaf(true);
    let user = stage.user(1);
    let (stopped, ()) = tokio::join!(user.wish(guest, &Verb::Stop(15)), async {
        stage.until(guest, "being stopped", |is| is.is(State::Stopping)).await;
        stage.etcd_away(60).await;
    });
    stage.node(1).hypervisor.set_deaf(false);
    stage.demand(stopped == Ok(Some(State::Stopped)), "it is stopped").await;
}

async fn locked(stage: Stage) {
    let guest = stage.ready("web").await;
    let lock = Verb::Lock("backup".into());
    stage.demand(stage.user(1).wish(guest, &lock).await == Ok(None), "it is locked").await;
    for refused in
        [stage.user(1).wish(guest, &Verb::Stop(0)).await.err(), stage.user(1).destroy(guest).await.err()]
    {
        stage.demand(refused.is_some_and(|why| why.contains("locked (backup)")), "it is refused").await;
    }
    stage.stays(guest, 60, "well", Sight::is_well).await;
    stage.demand(stage.user(1).wish(guest, &Verb::Unlock).await == Ok(None), "it is unlocked").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

pub(super) async fn with_policy(stage: &Stage, restart: Restart) -> InstanceId {
    let order = Order { name: Some("web"), data: false, query: SMALL, restart, group: None, boot: None };
    let user = stage.user(1);
    match user.order(order).await {
        Ok(placed) if user.waits_for(placed).await => placed.instance,
        other => stage.fail(format!("it does not come up: {other:?}")).await,
    }
}

async fn on_failure(stage: Stage) {
    let guest = with_policy(&stage, Restart::OnFailure).await;
    for _ in 0..5 {
        stage.end_guest(1, guest, End::Crashed);
        stage.until(guest, "started again soon", |is| is.says("it is started again in")).await;
        stage.until_well(guest).await;
    }
    stage.end_guest(1, guest, End::Crashed);
    let left = |is: &Sight| is.is(State::Stopped) && is.says("5 times in a row") && is.is_kept();
    stage.until(guest, "STOPPED and left", left).await;
    stage.stays(guest, 400, "STOPPED and left", left).await;
    runs_again(&stage, guest, &Verb::Start).await;
}

async fn always(stage: Stage) {
    let guest = with_policy(&stage, Restart::Always).await;
    stage.end_guest(1, guest, End::ByGuest);
    stage.until(guest, "started again soon", |is| is.says("it is started again in 1 s")).await;
    stage.until_well(guest).await;
    becomes(&stage, guest, &Verb::Stop(60), State::Stopped).await;
    stage.stays(guest, 400, "STOPPED", |is| is.is(State::Stopped) && is.is_kept()).await;
}

async fn renamed(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.ready("db").await;
    let rename = |name: &str| Verb::Rename(name.to_owned());
    let taken = stage.user(1).wish(guest, &rename("db")).await.err();
    stage.demand(taken.is_some_and(|why| why.contains("taken")), "db is another's name").await;
    stage.demand(stage.user(1).wish(guest, &rename("mail")).await == Ok(None), "it is called mail").await;
    stage
        .until(guest, "known to its agent", |is| {
            is.status.as_ref().is_some_and(|status| status.name.as_deref() == Some("mail"))
        })
        .await;
    stage.ready("web").await;
}
