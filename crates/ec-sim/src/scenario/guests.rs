//! What happens to guests, by themselves or by somebody's hands.

use std::time::Duration;

use ec_hypervisor::{End, Pause};
use ec_model::State;

use super::{Scenario, Stage, stage::Sight};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "undefined-while-it-runs",
        "somebody undefines a guest while it runs: it is defined for good again, so that its end does not take it along",
        |stage| Box::pin(undefined(stage)),
    ),
    Scenario::new(
        "disk-deleted-while-it-runs",
        "somebody deletes the disk under a running guest: that is told as an ERROR, the guest runs on and is counted, and \
         its domain is kept when it ends",
        |stage| Box::pin(disk_deleted(stage)),
    ),
    Scenario::new(
        "record-deleted",
        "somebody deletes the node's own record of a guest: it is written anew, for metadata stands on it",
        |stage| Box::pin(record_deleted(stage)),
    ),
    Scenario::new(
        "record-damaged",
        "the node's own record of a guest is damaged while the agent is down: the guest runs on, and a destroy takes all",
        |stage| Box::pin(record_damaged(stage)),
    ),
    Scenario::new(
        "record-damaged-and-all-else-lost",
        "the node's own record of a guest is damaged, etcd loses everything, and somebody ends and undefines the guest: nobody can tell that it never ran, \
         and its disk is kept",
        |stage| Box::pin(all_lost(stage)),
    ),
    Scenario::new(
        "guest-powers-off",
        "a guest powers itself off: it is STOPPED with the reason and kept",
        |stage| Box::pin(ends(stage, End::ByGuest, "powered itself off")),
    ),
    Scenario::new(
        "guest-ended-by-hand",
        "somebody ends a guest with virsh destroy: it is STOPPED with the reason and kept",
        |stage| Box::pin(ends(stage, End::ByHand, "somebody ended it")),
    ),
    Scenario::new("guest-crashes", "a guest crashes: it is STOPPED with the reason and kept", |stage| {
        Box::pin(ends(stage, End::Crashed, "the guest crashed"))
    }),
    Scenario::new(
        "guest-started-by-hand",
        "somebody starts a guest with virsh that was STOPPED: it is ACTIVE again",
        |stage| Box::pin(started_by_hand(stage)),
    ),
    Scenario::new(
        "guest-ends-before-its-address",
        "a guest ends before it had an address: that is told, and its disk is kept",
        |stage| Box::pin(ends_early(stage)),
    ),
    Scenario::new(
        "guest-without-an-address",
        "a guest never has an address: that is told as the reason, it runs on, and is ACTIVE when it has one at last",
        |stage| Box::pin(no_address(stage)),
    ),
    Scenario::new(
        "guest-paused-by-a-full-disk",
        "the host's disk is full and pauses a guest: PAUSED with the reason, and it goes on by itself when there is room",
        |stage| Box::pin(disk_full(stage)),
    ),
    Scenario::new(
        "guest-suspended",
        "somebody suspends a guest: PAUSED with the reason, and nobody lets it go on but who suspended it",
        |stage| Box::pin(suspended(stage)),
    ),
];

async fn undefined(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.undefine(1, guest);
    stage.pass(40).await;
    stage.end_guest(1, guest, End::ByGuest);
    stage.until(guest, "STOPPED and kept", |is| is.is(State::Stopped) && is.is_kept()).await;
}

async fn disk_deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.delete_disk(1, guest);
    let told = |is: &Sight| {
        is.is(State::Error) && is.says("deleted under the running guest") && is.runs() && is.claim
    };
    stage.until(guest, "in ERROR and running", told).await;
    stage.end_guest(1, guest, End::ByGuest);
    let kept =
        |is: &Sight| is.is(State::Error) && is.says("its disk is gone") && is.domain.is_some() && is.claim;
    stage.until(guest, "in ERROR and kept", kept).await;
}

fn record_of(stage: &Stage, guest: ec_model::InstanceId) -> std::path::PathBuf {
    stage.node(1).directory.join(format!("state/instances/{guest}.json"))
}

async fn record_deleted(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.say(format!("deletes the record of {guest} on n1"));
    let deleted = std::fs::remove_file(record_of(&stage, guest)).is_ok();
    stage.demand(deleted && !stage.sight(guest).record, "the record is gone").await;
    stage.until_well(guest).await;
}

async fn record_damaged(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.say(format!("damages the record of {guest} on n1"));
    let damaged = std::fs::write(record_of(&stage, guest), "{\"version\":").is_ok();
    stage.demand(damaged, "the record is damaged").await;
    stage.start(1);
    stage.stays(guest, 300, "well", Sight::is_well).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn all_lost(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.expects_trouble(guest);
    stage.say(format!("damages the record of {guest} on n1"));
    stage.demand(stage.node(1).garble_record(guest), "the record is damaged").await;
    stage.empty_etcd();
    stage.end_guest(1, guest, End::ByHand);
    stage.undefine(1, guest);
    stage.start(1);
    stage.stays(guest, 300, "kept", |is| is.volume && is.record).await;
    stage.say("mends it");
    stage.node(1).mend_records();
    stage.until(guest, "UNCLAIMED", |is| is.is(State::Unclaimed) && is.volume && is.claim).await;
}

async fn ends(stage: Stage, why: End, reason: &'static str) {
    let guest = stage.ready("web").await;
    stage.end_guest(1, guest, why);
    let kept = |is: &Sight| is.is(State::Stopped) && is.says(reason) && is.is_kept();
    stage.until(guest, "STOPPED and kept", kept).await;
    stage.kill(1);
    stage.pass(30).await;
    stage.start(1);
    stage.stays(guest, 120, "STOPPED and kept", kept).await;
}

async fn started_by_hand(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.end_guest(1, guest, End::ByGuest);
    stage.until(guest, "STOPPED and kept", |is| is.is(State::Stopped) && is.is_kept()).await;
    stage.say("somebody starts it with virsh");
    ec_hypervisor::Hypervisor::start(&stage.node(1).hypervisor, guest).await.ok();
    stage.until_well(guest).await;
}

async fn ends_early(stage: Stage) {
    let placed = stage.placed("web").await;
    stage.until(placed.instance, "being started", |is| is.is(State::Starting) && is.runs()).await;
    stage.end_guest(1, placed.instance, End::ByGuest);
    let told = |is: &Sight| is.is(State::Stopped) && is.says("before it had an address") && is.is_kept();
    stage.until(placed.instance, "STOPPED and kept", told).await;
}

async fn no_address(stage: Stage) {
    stage.say("guests of n1 have their address after ten minutes");
    stage.node(1).hypervisor.set_address_delay(Duration::from_secs(600));
    let placed = stage.placed("web").await;
    let told = |is: &Sight| {
        is.is(State::Starting) && is.says("no address of it was seen") && is.runs() && is.is_kept()
    };
    stage.until(placed.instance, "told and running", told).await;
    stage.stays(placed.instance, 400, "running", |is| is.runs() && is.is_kept()).await;
    stage.until_well(placed.instance).await;
}

async fn disk_full(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.pause_guest(1, guest, Pause::Storage { room: false });
    stage
        .until(guest, "PAUSED and kept", |is| is.is(State::Paused) && is.says("no space") && is.is_kept())
        .await;
    stage.pass(120).await;
    stage.pause_guest(1, guest, Pause::Storage { room: true });
    stage.until_well(guest).await;
}

async fn suspended(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.pause_guest(1, guest, Pause::ByHand);
    let told = |is: &Sight| is.is(State::Paused) && is.says("somebody suspended it") && is.is_kept();
    stage.until(guest, "PAUSED and kept", told).await;
    stage.stays(guest, 300, "PAUSED and kept", told).await;
    stage.say("somebody resumes it with virsh");
    ec_hypervisor::Hypervisor::resume(&stage.node(1).hypervisor, guest).await.ok();
    stage.until_well(guest).await;
}
