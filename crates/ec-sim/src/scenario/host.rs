//! What happens to a host and its hypervisor.

use std::time::Duration;

use ec_hypervisor::{End, Operation};
use ec_model::{Node, State, decode};

use super::{Scenario, Stage, stage::Sight};
use crate::snag::Fate;

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "host-reinstalled",
        "a host comes back without its domains and with its disks: each is defined again as it was and told of as STOPPED, \
         and no disk is deleted",
        |stage| Box::pin(reinstalled(stage)),
    ),
    Scenario::new(
        "host-without-domains-and-agent",
        "the domain of a guest is undefined while it is off and its node's agent is down: the next agent defines it again",
        |stage| Box::pin(undefined_while_away(stage)),
    ),
    Scenario::new(
        "agent-away-for-an-hour",
        "the agent is killed as a guest was started, and is back after an hour: the guest is not given up for its address, \
         and is ACTIVE",
        |stage| Box::pin(away(stage)),
    ),
    Scenario::new(
        "machine-cloned",
        "a second machine is made from a copy of the first one's disk and started beside it: its agent ends, naming both, \
         and builds nothing",
        |stage| Box::pin(cloned(stage)),
    ),
    Scenario::new(
        "machine-cloned-and-first-off",
        "the copy of a machine is started while the first is off: it is the node then, tells that the guest's disk is gone, \
         and deletes nothing; when the first is back and the copy off, the guest goes on",
        |stage| Box::pin(cloned_and_off(stage)),
    ),
    Scenario::new(
        "host-in-trouble",
        "the disk of a host is nearly full: what is new goes to the other host, what runs there runs on, and it takes new work \
         again when there is room",
        |stage| Box::pin(in_trouble(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "libvirt-defines-late",
        "libvirt answers a definition not in time and does it after the next agent has looked, when the guest was destroyed: \
         what appears is swept",
        |stage| Box::pin(defines_late(stage)),
    ),
    Scenario::new(
        "libvirt-starts-late",
        "libvirt answers a start not in time and does it a minute later: the guest is ACTIVE, and was started once",
        |stage| Box::pin(starts_late(stage)),
    ),
    Scenario::new(
        "libvirt-destroys-late",
        "libvirt answers a destroy not in time and does it after its agent was killed: the next agent finishes what is left",
        |stage| Box::pin(destroys_late(stage)),
    ),
    Scenario::new(
        "libvirt-makes-a-disk-late",
        "the disk of a guest is made late, after its user destroyed it and nothing was left: it is deleted again",
        |stage| Box::pin(disk_late(stage)),
    ),
    Scenario::new(
        "libvirt-away",
        "libvirt is away for ten minutes while a guest starts and another is destroyed: nobody is given up, and both come to \
         what was asked for",
        |stage| Box::pin(libvirt_away(stage)),
    ),
    Scenario::new(
        "libvirt-refuses",
        "libvirt refuses to define a guest: it ends in ERROR with libvirt's words, and its disk, record and claim are given \
         back, for it never ran",
        |stage| Box::pin(refuses(stage)),
    ),
    Scenario::new(
        "libvirt-refuses-a-second-start",
        "a host is started anew during a start, and libvirt refuses the next: the disk may have been written, so it is kept",
        |stage| Box::pin(refuses_second_start(stage)),
    ),
    Scenario::new(
        "libvirt-busy",
        "libvirt cannot for now, three times: it is tried again, and nobody notices but by the reason told meanwhile",
        |stage| Box::pin(busy(stage)),
    ),
    Scenario::new(
        "host-without-power",
        "a host loses its power and comes back: its guest is started again, as it was wanted",
        |stage| Box::pin(power(stage)),
    ),
    Scenario::new(
        "host-without-power-in-a-build",
        "a host loses its power as a guest was started, before anybody wrote that down: it is started again",
        |stage| Box::pin(power_in_a_build(stage)),
    ),
    Scenario::new(
        "clock-forward",
        "all clocks jump an hour forward while a guest starts: it is not given up, and no claim is taken for a left-over",
        |stage| Box::pin(clock(stage, 3600)),
    ),
    Scenario::new(
        "clock-back",
        "all clocks are set an hour back while a guest starts: it comes up, and can be destroyed",
        |stage| Box::pin(clock(stage, -3600)),
    ),
];

async fn reinstalled(stage: Stage) {
    let guests = [stage.ready("web").await, stage.ready("db").await];
    stage.crash(1).await;
    for guest in guests {
        stage.undefine(1, guest);
    }
    stage.pass(120).await;
    stage.start(1);
    for guest in guests {
        let again = |is: &Sight| is.is(State::Stopped) && is.says("gone from libvirt") && is.is_kept();
        stage.until(guest, "STOPPED and defined again", again).await;
    }
}

async fn undefined_while_away(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.end_guest(1, guest, End::ByGuest);
    stage.until(guest, "STOPPED", |is| is.is(State::Stopped)).await;
    stage.kill(1);
    stage.undefine(1, guest);
    stage.pass(30).await;
    stage.start(1);
    stage
        .until(guest, "defined again", |is| is.is(State::Stopped) && is.says("libvirt") && is.is_kept())
        .await;
}

async fn away(stage: Stage) {
    stage.snag("n1", "hypervisor Start", Fate::KillsAfterwards);
    let placed = stage.placed("web").await;
    stage.until_down(1).await;
    stage.stays(placed.instance, 3600, "there", |is| is.runs() && is.is_kept()).await;
    stage.start(1);
    stage.until_well(placed.instance).await;
}

async fn cloned(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.say("a machine that was cloned from n1 is switched on");
    stage.start(2);
    stage.ready("db").await;
    stage.until_down(2).await;
    stage.node(2).keep_down(true);
    stage.until_well(guest).await;
    let built = stage.node(2).hypervisor.calls(Operation::Define);
    stage.demand(built == 0, "the clone has built nothing").await;
}

async fn cloned_and_off(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.crash(1).await;
    stage.say("a machine that was cloned from n1 is switched on");
    stage.start(2);
    let told = |is: &Sight| is.is(State::Error) && is.says("its disk is gone") && is.volume && is.claim;
    stage.until(guest, "in ERROR and kept", told).await;
    stage.stays(guest, 300, "kept", |is| is.volume && is.claim).await;
    stage.say("the clone is switched off, and the first switched on");
    stage.kill(2);
    stage.node(2).keep_down(true);
    stage.start(1);
    stage.until_well(guest).await;
}

async fn in_trouble(stage: Stage) {
    let guest = stage.ready("web").await;
    let key = stage.world.keys.node(stage.node(1).node);
    let told = |stage: &Stage| stage.get(&key).and_then(|value| decode::<Node>(&value).ok());
    stage.trouble(1, true);
    stage.pass(5).await;
    let troubles = told(&stage).map_or(0, |node| node.troubles.len());
    stage.demand(troubles == 1, "the node's record tells of it").await;
    for name in ["db", "mail"] {
        let placed = stage.placed(name).await;
        stage.demand(placed.node == stage.node(2).node, "the other host has it").await;
    }
    stage.until_well(guest).await;
    stage.trouble(1, false);
    stage.pass(5).await;
    stage.demand(told(&stage).is_some_and(|node| node.troubles.is_empty()), "it is over").await;
    // The other one is full with it.
    for name in ["log", "backup", "cache"] {
        stage.placed(name).await;
    }
    stage.until_well(guest).await;
}

async fn defines_late(stage: Stage) {
    stage.snag("n1", "hypervisor Define", Fate::IsLate(Duration::from_secs(90)));
    let placed = stage.placed("web").await;
    stage.pass(5).await;
    stage.kill(1);
    stage.destroyed(placed.instance).await;
    stage.start(1);
    stage.until_gone(placed.instance).await;
    stage.pass(100).await;
    let defined = stage.node(1).hypervisor.effects(Operation::Define, placed.instance);
    stage.demand(defined == 1, "it was defined after all").await;
    stage.until_gone(placed.instance).await;
}

async fn starts_late(stage: Stage) {
    stage.snag("n1", "hypervisor Start", Fate::IsLate(Duration::from_secs(60)));
    let placed = stage.placed("web").await;
    stage.until_well(placed.instance).await;
    stage.pass(60).await;
    stage.until_well(placed.instance).await;
    let starts = stage.node(1).hypervisor.effects(Operation::Start, placed.instance);
    stage.demand(starts == 1, "it was started once").await;
}

async fn destroys_late(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("n1", "hypervisor Destroy", Fate::IsLate(Duration::from_secs(60)));
    stage.destroyed(guest).await;
    stage.pass(5).await;
    stage.kill(1);
    stage.pass(5).await;
    stage.start(1);
    stage.until_gone(guest).await;
    stage.pass(90).await;
    stage.ready("web").await;
}

async fn disk_late(stage: Stage) {
    stage.snag("n1", "hypervisor CreateOverlay", Fate::IsLate(Duration::from_secs(90)));
    let placed = stage.placed("web").await;
    stage.pass(5).await;
    stage.destroyed(placed.instance).await;
    stage.until_gone(placed.instance).await;
    stage.pass(100).await;
    let made = stage.node(1).hypervisor.effects(Operation::CreateOverlay, placed.instance);
    stage.demand(made == 1, "its disk was made after all").await;
    stage.until_gone(placed.instance).await;
}

async fn libvirt_away(stage: Stage) {
    let gone = stage.ready("gone").await;
    let placed = stage.placed("web").await;
    stage.until(placed.instance, "being started", |is| is.is(State::Starting) && is.runs()).await;
    stage.say("libvirt is away");
    stage.node(1).hypervisor.set_unreachable(true);
    stage.destroyed(gone).await;
    stage.pass(600).await;
    stage.say("libvirt is back");
    stage.node(1).hypervisor.set_unreachable(false);
    stage.until_well(placed.instance).await;
    stage.until_gone(gone).await;
}

async fn refuses(stage: Stage) {
    stage.snag("n1", "hypervisor Define", Fate::IsRefused(0));
    let placed = stage.placed("web").await;
    let swept = |is: &Sight| {
        is.is(State::Error)
            && is.says("refused on request")
            && is.asked_for.is_none()
            && !(is.claim || is.volume || is.record || is.domain.is_some())
    };
    stage.until(placed.instance, "in ERROR and swept", swept).await;
    let told = stage.user(2).schedule("web").await;
    stage
        .demand(told.is_err_and(|why| why.contains("taken")), "its name is kept while its status tells why")
        .await;
    stage.destroyed(placed.instance).await;
    stage.until_gone(placed.instance).await;
    stage.ready("web").await;
}

async fn refuses_second_start(stage: Stage) {
    stage.snag("n1", "hypervisor Start", Fate::KillsAfterwards);
    let placed = stage.placed("web").await;
    stage.until_down(1).await;
    stage.crash(1).await;
    stage.snag("n1", "hypervisor Start", Fate::IsRefused(0));
    stage.start(1);
    stage.until(placed.instance, "in ERROR and kept", |is| is.is(State::Error) && is.is_kept()).await;
    stage.until_well(placed.instance).await;
}

async fn busy(stage: Stage) {
    stage.world.snag("n1", "hypervisor Define", Fate::IsLost, 3);
    let placed = stage.placed("web").await;
    stage.until(placed.instance, "delayed", |is| is.says("busy")).await;
    stage.until_well(placed.instance).await;
}

async fn power(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.crash(1).await;
    stage.pass(300).await;
    stage.start(1);
    stage.until_well(guest).await;
}

async fn power_in_a_build(stage: Stage) {
    stage.snag("n1", "hypervisor Start", Fate::KillsAfterwards);
    let placed = stage.placed("web").await;
    stage.until_down(1).await;
    stage.crash(1).await;
    stage.pass(60).await;
    stage.start(1);
    stage.until_well(placed.instance).await;
}

async fn clock(stage: Stage, seconds: i64) {
    let before = stage.ready("before").await;
    let placed = stage.placed("web").await;
    stage.until(placed.instance, "being started", |is| is.is(State::Starting) && is.runs()).await;
    stage.say(format!("all clocks jump by {seconds} s"));
    stage.world.step_clock(seconds);
    stage.until_well(placed.instance).await;
    stage.stays(before, 120, "well", Sight::is_well).await;
    stage.destroyed(before).await;
    stage.until_gone(before).await;
}
