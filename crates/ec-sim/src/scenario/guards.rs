//! What a single look, or a single comparison, is for: histories that are rare, each of which only that one holds.

use std::time::Duration;

use ec_cloud::Verb;
use ec_hypervisor::{Hypervisor, Operation};
use ec_model::{
    BaseImage, CopyOf, DiskFormat, End, Image, ImageRef, ImageStatus, Instance, InstanceId, Pause, Policy,
    Restart, State, Workload, decode, encode,
};
use futures::future::join_all;
use jiff::SignedDuration;
use reqwest::Method;
use serde_json::json;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::{
    Scenario, Stage,
    groups::{group, place},
    operators::{change_claim, others_claim},
    power::with_policy,
    stage::Sight,
    volumes::{come, given, has},
};
use crate::{
    acts,
    catalog::Deed,
    fashion::resize as to,
    operator,
    referee::{claimed, observed},
    snag::Fate,
    user,
    volumes::Order,
    world::{Actor, PLACEMENT},
};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "guest-given-up-while-it-starts",
        "a hypervisor that is started anew gives a guest up which has no address yet: its start is done once more",
        |stage| Box::pin(given_up(stage)),
    ),
    Scenario::new(
        "disk-missed-of-a-guest-that-was-stopped",
        "a guest powers itself off, its disk is missed, and its host started anew; when the disk is back it is STOPPED, as it was, and a start without a disk is \
         told to be none",
        |stage| Box::pin(missed(stage)),
    ),
    Scenario::new(
        "restarts-of-long-ago",
        "a guest crashes five times in a row, runs well for long, and crashes again: it is started again",
        |stage| Box::pin(long_ago(stage)),
    ),
    Scenario::new(
        "guest-paused-twice-by-its-disk",
        "a guest that was let go on after an I/O error has one again at once: it is let go on after a pause",
        |stage| Box::pin(paused_twice(stage)),
    ),
    Scenario::new(
        "wishes-without-a-record",
        "a new disk, a rescue and another size are wished of a guest whose node cannot read its record: each is told to have failed; when it can, the guest \
         has its size, its own disk, and boots from that",
        |stage| Box::pin(without_record(stage)),
    ),
    Scenario::new(
        "revert-without-a-record",
        "a resize is reverted whose node cannot read how large the guest is: all that it may have stays claimed till it can",
        |stage| Box::pin(reverted_blindly(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "rescue-known-to-nobody",
        "etcd is put back to before a rescue, and the node's record of it is lost: the guest is ended, and runs from its own disk",
        |stage| Box::pin(rescue_unknown(stage)),
    ),
    Scenario::new(
        "rescue-of-a-saved-guest",
        "etcd is put back to a time in which a rescue was wished of a guest that is suspended since: it is not rescued, and its memory is kept",
        |stage| Box::pin(rescue_of_saved(stage)),
    ),
    Scenario::new(
        "resize-without-a-disk",
        "somebody deletes the disk under a guest for which another size is wished: that is told, and nothing of it is measured or defined",
        |stage| Box::pin(resize_without_disk(stage)),
    ),
    Scenario::new(
        "disk-gone-before-the-first-start",
        "the agent is killed when it has defined a guest, whose disk somebody deletes: both are made anew, and it is well",
        |stage| Box::pin(gone_before_start(stage)),
    ),
    Scenario::new(
        "volume-gone-before-its-guest-is-built",
        "somebody deletes the disk of a volume before a guest is built that is to boot from it: it waits for that, and can be destroyed",
        |stage| Box::pin(volume_gone(stage)),
    ),
    Scenario::new(
        "claim-deleted-of-what-is-missed",
        "somebody takes a guest's domain and disk away, and an operator deletes its claim: it is kept till it is destroyed, and so it is claimed again",
        |stage| Box::pin(claim_of_missed(stage)),
    ),
    Scenario::new(
        "extend-that-fails",
        "a hypervisor refuses to make a volume larger, which is not tried again, but on the node to which it goes then; what is told to have failed, and was done, is \
         known",
        |stage| Box::pin(extend_fails(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-not-made-anew-and-moved",
        "a volume cannot be made anew, and goes to another node: it is recorded of what it was made",
        |stage| Box::pin(not_made_anew(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-that-stays-where-it-is",
        "a volume of an image, one that is being made anew, and one whose disk is gone are to go to another node, or to a guest: that is refused",
        |stage| Box::pin(stays_where_it_is(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-gone-where-nobody-asks-for-it",
        "an older etcd has a volume where it was before, and its disk is deleted where it is: what it holds of the storage stays held for the node that is asked for it",
        |stage| Box::pin(gone_elsewhere(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "volume-deleted-in-an-older-etcd-before-a-heal",
        "an older etcd knows a volume and not the guest that has it, and the volume is deleted there: the guest is not brought back with it",
        |stage| Box::pin(deleted_before_heal(stage)),
    ),
    Scenario::new(
        "snapshot-while-a-volume-is-taken",
        "a snapshot of a guest is refused while a volume is being taken from it",
        |stage| Box::pin(snapshot_while_taken(stage)),
    ),
    Scenario::new(
        "snapshot-restored-and-started-in-between",
        "somebody starts a guest between its stop for a restore and its lock: it is unlocked again, and nothing of it is restored",
        |stage| Box::pin(started_in_between(stage)),
    ),
    Scenario::new(
        "snapshot-restored-and-unlocked-in-between",
        "somebody unlocks a guest in the midst of its restore: no other volume of it is made anew, and the same again restores all",
        |stage| Box::pin(unlocked_in_between(stage)),
    ),
    Scenario::new(
        "name-of-a-guest-without-a-record",
        "somebody deletes the record of a guest: neither a controller nor who asks for its name takes that away, and a heal brings both back",
        |stage| Box::pin(name_kept(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "left-over-by-a-clock-far-ahead",
        "a command whose host's clock was days ahead was killed before it claimed anything: a controller leaves what it left, and who asks for its name has it",
        |stage| Box::pin(far_ahead(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "claim-of-another-placement",
        "more is claimed for a guest than it was asked for, and its record speaks of another placement: a controller gives back nothing till it is mended",
        |stage| Box::pin(other_placement(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "destroyed-by-its-old-name",
        "a guest is destroyed by what it was called when somebody looked, and is called otherwise by now: it is spared",
        |stage| Box::pin(old_name(stage)),
    ),
    Scenario::new(
        "image-protected-and-named-twice",
        "an image whose bytes are on their way is deleted, another of its name is refused while they are, and one that is protected is not deleted",
        |stage| Box::pin(image_named_twice(stage)),
    ),
    Scenario::new(
        "claim-whose-event-was-lost",
        "the watch swallows the event of a claim, and tells of the next: both replicas notice that, and no room is sold twice",
        |stage| Box::pin(event_lost(stage)),
    )
    .on_nodes(2)
    .with_replicas(2),
    Scenario::new(
        "inventory-made-less-under-guests",
        "an operator makes a node's inventory less than what is claimed of it: what a guest does not need any more is given back all the same",
        |stage| Box::pin(made_less(stage)),
    ),
    Scenario::new(
        "claim-of-nobody-and-then-of-an-older-etcd",
        "a claim is left alone that nobody asked for, as etcd has it, and etcd is put back to a time when our tools had: it is given back",
        |stage| Box::pin(nobodys_claim(stage)),
    ),
    Scenario::new(
        "volume-handed-over-and-back-at-once",
        "a volume comes back to a node that has yet to hear that it let go of it: it is there",
        |stage| Box::pin(back_at_once(stage)),
    )
    .on_nodes(2)
    .on_shared_storage(),
    Scenario::new(
        "group-with-a-member-in-error",
        "somebody deletes the request of a guest that is in ERROR and ran, while its agent is down: it keeps its place in its group",
        |stage| Box::pin(member_in_error(stage)),
    ),
    Scenario::new(
        "healed-guest-whose-disk-is-gone",
        "etcd loses everything, and the disk of a guest that was brought back goes before it is told to run: it is an ERROR of one that ran, and is kept",
        |stage| Box::pin(healed_without_disk(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "address-found-before-a-start-is-told",
        "a guest is rebooted whose address is found before its start is told: it is started once for that",
        |stage| Box::pin(address_first(stage)),
    ),
    Scenario::new(
        "node-revoked-and-let-in",
        "a node is revoked: nothing is asked of its guests but their end, which it carries out when it is let in again",
        |stage| Box::pin(revoked(stage)),
    ),
    Scenario::new(
        "stop-before-it-is-heard-of",
        "a guest is to be stopped of which its agent has yet to hear: it is built, comes up, and is stopped then",
        |stage| Box::pin(stopped_unheard(stage)),
    ),
    Scenario::new(
        "revert-without-a-status",
        "a resize is reverted while its agent is down, and somebody deletes the status of its guest: all that it has stays claimed till it has less",
        |stage| Box::pin(reverted_without_status(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "heal-of-a-size-that-was-heard",
        "etcd is emptied when an agent has heard of another size, and has not begun with it: the guest is brought back as large as it is, and so is its record",
        |stage| Box::pin(size_heard(stage)),
    ),
    Scenario::new(
        "rebuild-as-what-does-not-fit",
        "a guest is to have a disk that is a copy of what lies with another node, or of what is larger: that is refused",
        |stage| Box::pin(does_not_fit(stage)),
    )
    .on_nodes(2),
    Scenario::new(
        "detach-from-a-saved-guest",
        "a volume is to be taken from a guest whose memory is saved: that is refused till it goes on",
        |stage| Box::pin(detached_from_saved(stage)),
    ),
    Scenario::new(
        "provider-locked-beside-a-guest-that-is-not-counted",
        "an operator locks a node where a guest is not counted, since its room was sold: that lock is the operator's alone, and the guest is counted when it is taken away",
        |stage| Box::pin(locked_uncounted(stage)),
    ),
    Scenario::new(
        "group-with-a-member-that-never-ran",
        "a member of a group cannot be built, and its place is asked for: it is another's",
        |stage| Box::pin(member_never_ran(stage)),
    ),
    Scenario::new(
        "copy-for-an-image-that-is-being-sent",
        "a copy is made for an image whose command is killed: a controller leaves it as long as somebody may be at that",
        |stage| Box::pin(copy_for_image(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "image-whose-end-is-unheard",
        "nobody hears that all bytes of an image have come, and etcd does not tell for a moment: it is found out, and the image is there",
        |stage| Box::pin(end_unheard(stage)),
    ),
    Scenario::new(
        "restart-of-a-healed-guest",
        "a guest that was brought back by a heal powers itself off: its policy starts it again",
        |stage| Box::pin(healed_and_ended(stage)),
    ),
    Scenario::new(
        "heal-of-a-size-that-was-not-heard",
        "somebody deletes the request of a guest whose agent has yet to hear of another size: it is recorded as large as it is",
        |stage| Box::pin(size_not_heard(stage)),
    ),
    Scenario::new(
        "rescue-begun-and-forgotten",
        "the agent is killed when it has made a rescue disk, and etcd put back to before that was wished: the disk is swept",
        |stage| Box::pin(rescue_begun(stage)),
    ),
    Scenario::new(
        "claim-made-less-after-a-resize-that-failed",
        "an operator takes more from a guest's claim than its resize, which failed, had added: it claims what it has, and no more",
        |stage| Box::pin(claim_after_failure(stage)),
    ),
    Scenario::new(
        "machine-cloned-and-etcd-away",
        "a machine is off, and a clone of it is switched on before etcd is away for long: that time says nothing of who lives, and the clone takes over when the lease \
         has run out",
        |stage| Box::pin(cloned_while_away(stage)),
    ),
    Scenario::new(
        "reboot-and-a-volume-at-once",
        "a guest that has no address yet is to be rebooted and to have a volume, both before its agent hears of either: it is rebooted once, and has it",
        |stage| Box::pin(reboot_with_volume(stage)),
    ),
    Scenario::new(
        "error-whose-end-is-unheard",
        "an agent does not hear that it has given up what could not be built: it can be read of that for long why",
        |stage| Box::pin(error_unheard(stage)),
    ),
    Scenario::new(
        "room-of-all-guests-sold",
        "an operator deletes the claims of all guests of a node, whose room others take: all of it is kept free for them, which is no lock, and they are counted once \
         there is room",
        |stage| Box::pin(all_sold(stage)),
    ),
];

fn effects(stage: &Stage, what: Operation, instance: InstanceId) -> u64 {
    stage.world.computers.iter().map(|computer| computer.hypervisor.effects(what, instance)).sum()
}

fn is_stopped(is: &Sight) -> bool {
    is.is(State::Stopped) && !is.runs() && is.is_kept()
}

fn is_there(is: &Sight) -> bool {
    is.is(State::Active) && is.volume && is.claim && is.record
}

async fn made(stage: &Stage, order: Order) -> InstanceId {
    let asked = stage.user(1).makes_volume(order).await;
    come(stage, asked).await
}

async fn done(stage: &Stage, guest: InstanceId, verb: &Verb) {
    let done = stage.user(1).wish(guest, verb).await;
    stage.demand(done.is_ok(), &format!("{} is done", verb.name())).await;
}

/// The number of the node, of two, that has a volume.
fn node_of(stage: &Stage, volume: InstanceId) -> usize {
    if observed(stage.node(1), volume).is_some_and(|seen| seen.volume) { 1 } else { 2 }
}

async fn moved(stage: &Stage, volume: InstanceId, node: usize) {
    let moved = stage.user(1).moves(volume, stage.node(node).node).await;
    stage.demand(moved.is_ok() && node_of(stage, volume) == node, &format!("it goes to n{node}")).await;
}

async fn refused(stage: &Stage, told: Result<(), String>, why: &str) {
    stage.demand(told.is_err_and(|told| told.contains(why)), &format!("it is refused: {why}")).await;
}

async fn given_up(stage: Stage) {
    let guest = stage.placed("web").await.instance;
    let is_noted = |is: &Sight| is.status.as_ref().is_some_and(|status| status.started_at.is_some());
    stage.until(guest, "started", |is| is.is(State::Starting) && is.runs() && is_noted(is)).await;
    stage.end_guest(1, guest, End::ByHypervisor);
    stage.until_well(guest).await;
    stage.demand(effects(&stage, Operation::Start, guest) == 2, "it was started twice").await;
}

async fn missed(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.end_guest(1, guest, End::ByGuest);
    stage.until(guest, "STOPPED", is_stopped).await;
    stage.delete_disk(1, guest);
    stage.until(guest, "in ERROR", |is| is.is(State::Error) && is.says("and it was stopped")).await;
    stage.crash(1).await;
    stage.start(1);
    stage.pass(30).await;
    put_back(&stage, guest).await;
    stage.until(guest, "STOPPED", is_stopped).await;
    stage.stays(guest, 60, "STOPPED", is_stopped).await;
    stage.delete_disk(1, guest);
    stage.until(guest, "in ERROR", |is| is.is(State::Error)).await;
    stage.user(1).asks(guest, &Verb::Start).await;
    let told = |is: &Sight| is.is(State::Error) && is.says("its disk is gone") && !is.runs();
    stage.stays(guest, 60, "in ERROR", told).await;
    put_back(&stage, guest).await;
    stage.until_well(guest).await;
}

/// Somebody puts a disk there again.
async fn put_back(stage: &Stage, guest: InstanceId) {
    let base = BaseImage {
        path: "/backup/web.qcow2".into(),
        format: DiskFormat::Qcow2,
        virtual_size: 1 << 30,
        digest: "backup".to_owned(),
    };
    let is_back = stage.node(1).hypervisor.create_overlay(guest, &base, None).await.is_ok();
    stage.demand(is_back, "its disk is put there again").await;
}

async fn long_ago(stage: Stage) {
    let guest = with_policy(&stage, Restart::OnFailure).await;
    for _ in 0..5 {
        stage.end_guest(1, guest, End::Crashed);
        stage.until(guest, "stopped", |is| is.is(State::Stopped)).await;
        stage.until_well(guest).await;
    }
    stage.stays(guest, 700, "well", Sight::is_well).await;
    stage.end_guest(1, guest, End::Crashed);
    stage.until(guest, "stopped", |is| is.is(State::Stopped)).await;
    stage.until_well(guest).await;
}

async fn paused_twice(stage: Stage) {
    let guest = stage.ready("web").await;
    let resumed = || effects(&stage, Operation::Resume, guest);
    for times in [1, 2] {
        stage.pause_guest(1, guest, Pause::Storage { room: true });
        stage.pass(5).await;
        stage.demand(resumed() == 1, "it is let go on, and not again so soon").await;
        if times == 2 {
            stage.until_well(guest).await;
            stage.demand(resumed() == 2, "it is let go on once more").await;
        }
    }
}

async fn without_record(stage: Stage) {
    let guest = stage.ready("web").await;
    garbled(&stage, guest).await;
    for verb in [Verb::Rebuild(None), Verb::Rescue(None), to(2, 1)] {
        let told = stage.user(1).wish(guest, &verb).await.err();
        stage.demand(told.is_some(), &format!("{} is told to have failed", verb.name())).await;
    }
    stage.say("mends it");
    stage.node(1).mend_records();
    let is_sized = |is: &Sight| {
        let resized = is.status.as_ref().and_then(|status| status.resized.as_ref());
        is.is_well() && resized.is_some_and(|resized| resized.failed.is_none())
    };
    stage.until(guest, "told to have its size", is_sized).await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
    let is_own = effects(&stage, Operation::ReplaceOverlay, guest) == 0 && !stage.sight(guest).rescue_disk;
    stage.demand(is_own, "it has its own disk, and no other").await;
}

async fn garbled(stage: &Stage, guest: InstanceId) {
    stage.say(format!("damages the record of {guest} on n1"));
    stage.demand(stage.node(1).garble_record(guest), "the record is damaged").await;
    stage.world.judge(|referee, _| referee.record_garbled(guest));
    stage.until(guest, "told to be without a record", |is| is.says("cannot be read")).await;
}

async fn reverted_blindly(stage: Stage) {
    let guest = stage.ready("web").await;
    done(&stage, guest, &to(2, 1)).await;
    stage.until_well(guest).await;
    garbled(&stage, guest).await;
    let told = stage.user(1).wish(guest, &Verb::Revert).await.err();
    stage.demand(told.is_some(), "it is told to have failed").await;
    let claim = || claimed(&stage.world, guest, "VCPU");
    stage.pass(300).await;
    stage.demand(claim() == 2, "all that it may have is claimed").await;
    stage.say("mends it");
    stage.node(1).mend_records();
    stage.pass(300).await;
    stage.until_well(guest).await;
    stage.demand(claim() == 1, "it has what it had").await;
}

async fn rescue_unknown(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    done(&stage, guest, &Verb::Rescue(None)).await;
    stage.kill(1);
    stage.say("somebody deletes the record of i1 on n1");
    stage.world.judge(|referee, _| referee.record_lost(guest));
    stage.node(1).lose_record(guest);
    stage.restore(&before);
    stage.start(1);
    stage.pass(60).await;
    stage.until(guest, "well with its own disk", |is| is.is_well() && !is.guest.rescued).await;
}

async fn rescue_of_saved(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.user(1).asks(guest, &Verb::Rescue(None)).await;
    let wished = stage.back_up();
    stage.user(1).asks(guest, &Verb::Unrescue).await;
    stage.start(1);
    stage.pass(30).await;
    stage.until_well(guest).await;
    done(&stage, guest, &Verb::Suspend).await;
    stage.restore(&wished);
    stage.pass(120).await;
    let is = stage.sight(guest);
    stage
        .demand(!is.rescue_disk && effects(&stage, Operation::DropMemory, guest) == 0, "its memory is kept")
        .await;
    done(&stage, guest, &Verb::Resume).await;
    stage.until_well(guest).await;
}

async fn resize_without_disk(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.delete_disk(1, guest);
    stage.user(1).asks(guest, &to(2, 1)).await;
    stage.start(1);
    let told = |is: &Sight| is.is(State::Error) && is.says("deleted under the running guest") && is.runs();
    stage.until(guest, "in ERROR and running", told).await;
    stage.stays(guest, 60, "in ERROR and running", told).await;
    stage.demand(effects(&stage, Operation::Grow, guest) == 0, "nothing was given to it").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn gone_before_start(stage: Stage) {
    stage.snag("n1", "hypervisor Define", Fate::KillsAfterwards);
    let guest = stage.placed("web").await.instance;
    stage.until_down(1).await;
    stage.delete_disk(1, guest);
    stage.start(1);
    stage.until_well(guest).await;
}

async fn volume_gone(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    stage.snag("n1", "put status/n1/i2 PREPARING", Fate::Kills);
    let Ok(placed) = stage.user(1).boots("web", volume).await else {
        return stage.fail("it was not placed").await;
    };
    stage.until_down(1).await;
    stage.delete_disk(1, volume);
    stage.start(1);
    let waits = |is: &Sight| is.is(State::Preparing) && is.says("is not there yet") && is.claim;
    stage.until(placed.instance, "waiting", waits).await;
    stage.stays(placed.instance, 60, "waiting", waits).await;
    stage.destroyed(placed.instance).await;
    stage.until_gone(placed.instance).await;
}

async fn claim_of_missed(stage: Stage) {
    let guest = stage.ready("web").await;
    done(&stage, guest, &Verb::Stop(0)).await;
    stage.undefine(1, guest);
    stage.delete_disk(1, guest);
    stage.until(guest, "in ERROR", |is| is.is(State::Error) && is.claim).await;
    stage.pass(60).await;
    stage.world.judge(|referee, world| referee.replaced(world));
    stage.placement(Method::DELETE, &format!("/allocations/{guest}"), None).await;
    stage.until(guest, "claimed again", |is| is.is(State::Error) && is.claim).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn extend_fails(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let name = |node: usize| ["n1", "n2"][node - 1];
    let is_told = |is: &Sight, failed: bool| {
        let resized = is.status.as_ref().and_then(|status| status.resized.as_ref());
        resized.is_some_and(|resized| resized.failed.is_some() == failed)
    };
    stage.snag(name(node_of(&stage, volume)), "hypervisor GrowDisk", Fate::IsRefused(0));
    stage.user(1).extends(volume, 3).await.ok();
    stage.until(volume, "told not to be larger", |is| is_there(is) && is_told(is, true)).await;
    stage.stays(volume, 120, "as large as it was", |is| is_there(is) && is.disk_bytes == 1 << 30).await;
    moved(&stage, volume, 3 - node_of(&stage, volume)).await;
    stage.until(volume, "as large as was wished", |is| is_there(is) && is.disk_bytes == 3 << 30).await;
    stage.until(volume, "told so", |is| is_told(is, false)).await;
    stage.snag(name(node_of(&stage, volume)), "hypervisor GrowDisk", Fate::IsDenied);
    stage.user(1).extends(volume, 5).await.ok();
    let is_known = |is: &Sight| {
        let resized = is.status.as_ref().and_then(|status| status.resized.as_ref());
        let told = resized.and_then(|resized| resized.resources.get("DISK_GB").copied());
        is_told(is, true) && is.disk_bytes == 5 << 30 && told == Some(5)
    };
    stage.until(volume, "told how large it is", is_known).await;
}

async fn not_made_anew(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    let from = node_of(&stage, volume);
    stage.snag(["n1", "n2"][from - 1], "hypervisor CreateSuccessor", Fate::IsRefused(0));
    stage.user(1).remakes(volume, &CopyOf::disk(Workload::Volume, copy)).await.ok();
    let is_told = |is: &Sight| {
        let rebuilt = is.status.as_ref().and_then(|status| status.rebuilt.as_ref());
        rebuilt.is_some_and(|rebuilt| rebuilt.failed.is_some())
    };
    stage.until(volume, "told to be as it was", |is| is_there(is) && is_told(is)).await;
    moved(&stage, volume, 3 - from).await;
    stage.until(volume, "there", is_there).await;
    let record = stage.get(&stage.world.keys.instance(volume));
    let record = record.and_then(|value| decode::<Instance>(&value).ok());
    let is_own = record.is_some_and(|record| record.spec.image.copied().is_none());
    stage.demand(is_own, "it is recorded to be a copy of nothing").await;
    stage.stays(volume, 60, "there", is_there).await;
}

async fn stays_where_it_is(stage: Stage) {
    let guest = stage.ready("web").await;
    let near = Some(guest);
    let of_image = made(&stage, Order { of_image: true, near, ..Order::SMALL }).await;
    let volume = made(&stage, Order { near, ..Order::SMALL }).await;
    let copy = made(&stage, Order { copy_of: Some(volume), ..Order::SMALL }).await;
    let (here, user) = (node_of(&stage, volume), stage.user(1));
    let other = stage.node(3 - here).node;
    refused(&stage, user.moves(of_image, other).await, "it stands on an image").await;
    let hypervisor = &stage.node(here).hypervisor;
    hypervisor.set_latency(Operation::ReplaceOverlay, Duration::from_secs(30));
    let of = CopyOf::disk(Workload::Volume, copy);
    stage.demand(user.remakes(volume, &of).await.is_ok(), "it is to be made anew").await;
    refused(&stage, user.moves(volume, other).await, "is being made anew").await;
    refused(&stage, user.attaches(volume, guest).await, "is being made anew").await;
    stage.pass(60).await;
    hypervisor.set_latency(Operation::ReplaceOverlay, Duration::ZERO);
    stage.until(volume, "there", is_there).await;
    stage.delete_disk(here, volume);
    stage.until(volume, "in ERROR", |is| is.is(State::Error)).await;
    refused(&stage, user.moves(volume, other).await, "its disk is gone").await;
}

async fn gone_elsewhere(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    if node_of(&stage, volume) == 1 {
        moved(&stage, volume, 2).await;
    }
    let before = stage.back_up();
    moved(&stage, volume, 1).await;
    stage.stays(volume, 60, "there", is_there).await;
    stage.restore(&before);
    let told = stage.world.keys.status(stage.node(1).node, volume);
    while stage.get(&told).is_none() {
        stage.pass(1).await;
    }
    stage.pass(60).await;
    let released = || stage.world.elapsed();
    let begun = released();
    stage.delete_disk(1, volume);
    while stage.get(&told).is_some() {
        stage.pass(1).await;
    }
    stage.say(format!("n1 has nothing of it any more after {} s", (released() - begun).as_secs()));
    stage.demand(stage.sight(volume).claim, "what it holds is held").await;
    stage.stays(volume, 60, "held", |is| is.claim).await;
    stage.demand(stage.user(1).deletes(volume).await.is_ok(), "it is deleted").await;
    stage.until_gone(volume).await;
}

async fn deleted_before_heal(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let before = stage.back_up();
    let guest = stage.ready("web").await;
    given(&stage, volume, guest).await;
    stage.restore(&before);
    stage.until(guest, "UNCLAIMED", |is| is.is(State::Unclaimed)).await;
    stage.pass(60).await;
    stage.expects_trouble(guest);
    stage.cut(stage.agent(1), 5);
    stage.demand(stage.user(1).deletes(volume).await.is_ok(), "it is deleted").await;
    stage.demand(stage.user(1).heals().await == Ok(0), "its guest is not brought back with it").await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.until_gone(volume).await;
}

async fn snapshot_while_taken(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = made(&stage, Order::SMALL).await;
    given(&stage, volume, guest).await;
    stage.node(1).hypervisor.set_latency(Operation::SetVolumes, Duration::from_secs(5));
    let user = stage.user(1);
    let (taken, ()) = tokio::join!(user.detaches(volume), async {
        stage.pass(2).await;
        let told = stage.user(2).snapshots(guest).await.map(drop);
        refused(&stage, told, "are being changed").await;
    });
    stage.demand(taken.is_ok() && !has(&stage, guest, volume), "it is taken").await;
    let asked = stage.user(2).snapshots(guest).await;
    come(&stage, asked).await;
}

async fn of_two_volumes(stage: &Stage) -> (InstanceId, InstanceId) {
    let guest = stage.ready("web").await;
    for _ in 0..2 {
        let volume = made(stage, Order::SMALL).await;
        given(stage, volume, guest).await;
    }
    let asked = stage.user(1).snapshots(guest).await;
    (guest, come(stage, asked).await)
}

async fn started_in_between(stage: Stage) {
    let (guest, copy) = of_two_volumes(&stage).await;
    let user = stage.user(1);
    let (restored, ()) = tokio::join!(user.restores(copy), async {
        while !stage.sight(guest).is(State::Stopped) {
            sleep(Duration::from_millis(1)).await;
        }
        tokio::join!(user.sleeps(Duration::from_secs(5)), async {
            stage.user(2).asks(guest, &Verb::Start).await;
        });
    });
    refused(&stage, restored, "somebody started").await;
    stage.until_well(guest).await;
    stage.demand(stage.user(1).restores(copy).await.is_ok(), "it is restored").await;
    stage.until_well(guest).await;
}

async fn unlocked_in_between(stage: Stage) {
    let (guest, copy) = of_two_volumes(&stage).await;
    let hypervisor = &stage.node(1).hypervisor;
    let replaced = || hypervisor.calls(Operation::ReplaceOverlay);
    hypervisor.set_latency(Operation::ReplaceOverlay, Duration::from_secs(5));
    let user = stage.user(1);
    let (restored, ()) = tokio::join!(user.restores(copy), async {
        while replaced() == 0 {
            stage.pass(1).await;
        }
        stage.user(2).asks(guest, &Verb::Unlock).await;
    });
    refused(&stage, restored, "somebody else unlocked").await;
    stage.pass(10).await;
    stage.demand(replaced() == 1, "the other volume is as it was").await;
    hypervisor.set_latency(Operation::ReplaceOverlay, Duration::ZERO);
    stage.demand(stage.user(1).restores(copy).await.is_ok(), "it is restored").await;
    stage.until(guest, "as it was", |is| is.is_well() || is_stopped(is)).await;
}

async fn name_kept(stage: Stage) {
    let guest = stage.ready("web").await;
    let keys = &stage.world.keys;
    let name = keys.name(Workload::Machine, "default", "web", guest);
    stage.delete(&keys.instance(guest)).await;
    stage.pass(200).await;
    stage.demand(stage.get(&name).is_some(), "its name is its own").await;
    refused(&stage, stage.user(2).schedule("web").await.map(drop), "`eschedule heal` writes it anew").await;
    stage.demand(stage.get(&name).is_some(), "and is so still").await;
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back").await;
    stage.until_well(guest).await;
}

async fn far_ahead(stage: Stage) {
    let other = stage.ready("web").await;
    let keys = &stage.world.keys;
    let Some(mut left) = stage.get(&keys.instance(other)).and_then(|value| decode::<Instance>(&value).ok())
    else {
        return stage.fail("it has a record").await;
    };
    left.instance = InstanceId::new(Uuid::from_u128(7));
    left.created_at = stage.world.now().saturating_add(SignedDuration::from_hours(48)).unwrap_or_default();
    (left.name, left.assigned) = (Some("db".to_owned()), None);
    let key = keys.instance(left.instance);
    stage.put(&key, encode(&left)).await;
    stage.put(&keys.name(Workload::Machine, "default", "db", left.instance), "").await;
    stage.pass(200).await;
    stage.demand(stage.get(&key).is_some(), "a command may be at it").await;
    let guest = stage.ready("db").await;
    stage.demand(stage.get(&key).is_none(), "nothing is left of it").await;
    stage.until_well(guest).await;
}

async fn other_placement(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("u1", "put instances/", Fate::Kills);
    stage.user(1).asks(guest, &to(2, 1)).await;
    let claim = || claimed(&stage.world, guest, "VCPU");
    stage.demand(claim() == 2, "more is claimed").await;
    let key = stage.world.keys.instance(guest);
    let whole = stage.get(&key).unwrap_or_default();
    let Ok(mut other) = decode::<Instance>(&whole) else { return stage.fail("it has a record").await };
    if let Some(assigned) = &mut other.assigned {
        assigned.epoch = 7;
    }
    stage.put(&key, encode(&other)).await;
    stage.pass(300).await;
    stage.demand(claim() == 2, "it is claimed still").await;
    stage.put(&key, whole).await;
    stage.pass(300).await;
    stage.demand(claim() == 1, "it is given back").await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn old_name(stage: Stage) {
    let guest = stage.ready("web").await;
    done(&stage, guest, &Verb::Rename("db".to_owned())).await;
    refused(&stage, stage.user(2).destroys_called(guest, "web").await, "is not called `web`").await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
    stage.demand(stage.user(2).destroys_called(guest, "db").await.is_ok(), "it is destroyed").await;
    stage.until_gone(guest).await;
}

async fn image_named_twice(stage: Stage) {
    let images = || stage.world.store.content(&stage.world.keys.images()).pairs.len();
    let sent = |name| Deed::Add { name, parts: Some(40), public: false, protected: false };
    let [one, other] = [stage.user(1), stage.user(2)];
    stage.world.snag("u1", "put images/", Fate::Arrives, 3);
    stage.snag("u1", "put images/", Fate::Kills);
    let add = timeout(Duration::from_secs(60), one.catalogs(sent("debian")));
    stage.demand(add.await.is_err() && images() == 1, "its command is killed").await;
    other.catalogs(sent("debian")).await;
    stage.demand(images() == 1, "the other is refused").await;
    other.catalogs(Deed::Delete("debian".to_owned())).await;
    stage.demand(images() == 1, "its bytes may come late").await;
    stage.pass(1300).await;
    other.catalogs(Deed::List).await;
    stage.demand(images() == 0 && stage.world.objects().is_empty(), "nothing is left of it").await;
    let kept = Deed::Add { name: "alpine", parts: Some(1), public: false, protected: true };
    other.catalogs(kept).await;
    other.catalogs(Deed::Delete("alpine".to_owned())).await;
    stage.demand(images() == 1 && stage.world.objects().len() == 1, "it is not deleted").await;
}

async fn event_lost(stage: Stage) {
    let claims = |vcpus: u64| {
        [1, 2].map(|node| {
            let id = Uuid::from_u128(0xe0 + u128::from(vcpus) * 16 + node as u128);
            let claim = json!({
                "allocations": {(stage.node(node).node.to_string()): {"resources": {"VCPU": vcpus}}},
                "project_id": "p", "user_id": "u", "consumer_generation": null, "consumer_type": "OTHERS",
            });
            (format!("/allocations/{id}"), claim)
        })
    };
    for lost in [0, 1] {
        stage.pass(10).await;
        stage.say(format!("the next {lost} changes give no event"));
        stage.world.store.faults().lose_events(lost);
        let claims = claims(1 + lost as u64);
        let told = join_all(
            claims.iter().map(|(path, claim)| stage.placement(Method::PUT, path, Some(claim.clone()))),
        );
        stage.demand(told.await.iter().all(|(status, _)| *status == 204), "others have claims").await;
    }
    stage.pass(10).await;
    // Three of four processors of each node are theirs.
    let placed = [stage.ready("web").await, stage.ready("db").await];
    stage.demand(stage.user(1).schedule("mail").await.is_err(), "there is no room left").await;
    for (path, _) in claims(1).iter().chain(&claims(2)) {
        stage.placement(Method::DELETE, path, None).await;
    }
    for guest in placed {
        stage.until_well(guest).await;
    }
}

async fn made_less(stage: Stage) {
    let guest = stage.ready("web").await;
    for name in ["a", "b"] {
        stage.ready(name).await;
    }
    done(&stage, guest, &to(2, 1)).await;
    stage.until_well(guest).await;
    done(&stage, guest, &Verb::Confirm).await;
    done(&stage, guest, &to(1, 1)).await;
    stage.until_well(guest).await;
    let path = format!("/resource_providers/{}/inventories", stage.node(1).node);
    let (_, mut inventories) = stage.placement(Method::GET, &path, None).await;
    inventories["inventories"]["VCPU"]["total"] = json!(1);
    let (status, _) = stage.placement(Method::PUT, &path, Some(inventories)).await;
    stage.demand(status == 200, "it is made less").await;
    done(&stage, guest, &Verb::Confirm).await;
    stage.demand(claimed(&stage.world, guest, "VCPU") == 1, "it holds less").await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn nobodys_claim(stage: Stage) {
    stage.snag("u1", "PUT /allocations/", Fate::KillsAfterwards);
    stage.demand(stage.user(1).schedule("web").await.is_err(), "its command is killed").await;
    let records = stage.world.store.content(&stage.world.keys.instances()).pairs;
    let Some(record) = records.first() else { return stage.fail("its record is there").await };
    let before = stage.back_up();
    stage.delete(&record.key).await;
    let claims = || stage.world.store.content(&format!("{PLACEMENT}/consumers/")).pairs.len();
    stage.pass(400).await;
    stage.demand(claims() == 1, "it is left alone").await;
    stage.restore(&before);
    stage.pass(400).await;
    stage.demand(claims() == 0, "it is given back").await;
}

async fn back_at_once(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    if node_of(&stage, volume) == 2 {
        moved(&stage, volume, 1).await;
        stage.pass(10).await;
    }
    stage.say("n1 is far away from etcd");
    stage.world.move_away(stage.agent(1), Duration::from_secs(1));
    let asked = stage.world.keys.request(stage.node(1).node, volume);
    let user = stage.user(1);
    let (gone, ()) = tokio::join!(user.moves(volume, stage.node(2).node), async {
        while stage.get(&asked).is_some() {
            sleep(Duration::from_millis(1)).await;
        }
        // It hears of that in a second.
        moved(&stage, volume, 1).await;
    });
    stage.demand(gone.is_ok(), "it was there").await;
    stage.until(volume, "there", is_there).await;
    stage.stays(volume, 120, "there", is_there).await;
    stage.world.move_away(stage.agent(1), Duration::ZERO);
}

async fn member_in_error(stage: Stage) {
    group(&stage, Policy::AntiAffinity).await;
    let Ok(placed) = place(&stage, 1, "web").await else { return stage.fail("it was not placed").await };
    let guest = placed.instance;
    stage.until_well(guest).await;
    stage.delete_disk(1, guest);
    stage.until(guest, "in ERROR", |is| is.is(State::Error) && is.runs()).await;
    stage.kill(1);
    acts::delete_request(&stage.world, stage.node(1), guest, false).await;
    stage.demand(place(&stage, 2, "db").await.is_err(), "its place is its own").await;
    stage.start(1);
    stage.until(guest, "UNCLAIMED", |is| is.is(State::Unclaimed) && is.runs()).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
    stage.demand(place(&stage, 2, "db").await.is_ok(), "it is free").await;
}

async fn healed_without_disk(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.empty_etcd();
    stage.until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.claim).await;
    stage.pass(60).await;
    stage.delete_disk(1, guest);
    stage.end_guest(1, guest, End::ByGuest);
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back").await;
    let kept = |is: &Sight| is.is(State::Error) && is.says("its disk is gone") && is.claim && is.record;
    stage.until(guest, "in ERROR", kept).await;
    let ran = stage.sight(guest).status.as_ref().is_some_and(|status| status.started_at.is_some());
    stage.demand(ran, "it is told to have run").await;
    stage.stays(guest, 120, "in ERROR and kept", kept).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn address_first(stage: Stage) {
    let hypervisor = &stage.node(1).hypervisor;
    hypervisor.set_address_delay(Duration::from_secs(600));
    let guest = stage.placed("web").await.instance;
    stage.until(guest, "being started", |is| is.is(State::Starting) && is.runs()).await;
    stage.pass(5).await;
    stage.world.snag("n1", "put status/n1/i1 STARTING", Fate::Arrives, 1);
    stage.world.snag("n1", "put status/n1/i1 STARTING", Fate::IsLost, 3);
    hypervisor.set_address_delay(Duration::ZERO);
    stage.user(1).asks(guest, &Verb::Reboot(0)).await;
    stage.until_well(guest).await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
    stage.demand(effects(&stage, Operation::Start, guest) == 2, "it was started twice in all").await;
}

async fn revoked(stage: Stage) {
    let (guest, other) = (stage.ready("web").await, stage.ready("db").await);
    operator::revoke(&stage.world, stage.node(1)).await;
    stage.pass(30).await;
    let told = stage.user(1).wish(guest, &Verb::Stop(0)).await.map(drop);
    refused(&stage, told, "was revoked").await;
    stage.destroyed(other).await;
    stage.demand(operator::let_in(&stage.world, stage.node(1)).await, "it is let in").await;
    stage.start(1);
    stage.until_gone(other).await;
    stage.until_well(guest).await;
    done(&stage, guest, &Verb::Stop(0)).await;
}

async fn stopped_unheard(stage: Stage) {
    stage.snag("n1", "put status/n1/i1 PREPARING", Fate::Kills);
    let guest = stage.placed("web").await.instance;
    stage.until_down(1).await;
    stage.user(1).asks(guest, &Verb::Stop(0)).await;
    stage.start(1);
    stage.until(guest, "STOPPED", is_stopped).await;
    stage.demand(effects(&stage, Operation::Start, guest) == 1, "it was started").await;
    stage.stays(guest, 60, "STOPPED", is_stopped).await;
}

async fn reverted_without_status(stage: Stage) {
    let guest = stage.ready("web").await;
    done(&stage, guest, &to(2, 1)).await;
    stage.until_well(guest).await;
    stage.kill(1);
    stage.user(1).asks(guest, &Verb::Revert).await;
    stage.expects_trouble(guest);
    stage.world.judge(|referee, _| referee.status_lost(guest));
    stage.delete(&stage.world.keys.status(stage.node(1).node, guest)).await;
    let claim = || claimed(&stage.world, guest, "VCPU");
    stage.pass(300).await;
    stage.demand(claim() == 2, "all that it has is claimed").await;
    stage.start(1);
    stage.pass(300).await;
    stage.until_well(guest).await;
    stage.demand(claim() == 1, "it has what it had").await;
}

async fn size_heard(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("n1", "hypervisor Grow ", Fate::Kills);
    stage.user(1).asks(guest, &to(2, 1)).await;
    stage.until_down(1).await;
    stage.empty_etcd();
    stage.start(1);
    stage.until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.is_kept()).await;
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back").await;
    stage.until_well(guest).await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
    recorded(&stage, guest, 1).await;
}

async fn does_not_fit(stage: Stage) {
    let guest = stage.placed("web").await;
    stage.until_well(guest.instance).await;
    let other = if guest.node == stage.node(1).node { 2 } else { 1 };
    let beside = made(&stage, Order { near: Some(guest.instance), size_gb: 3, ..Order::SMALL }).await;
    stage.trouble(3 - other, true);
    stage.pass(60).await;
    let elsewhere = made(&stage, Order::SMALL).await;
    stage.trouble(3 - other, false);
    stage.demand(stage.sight(elsewhere).host == Some(stage.node(other).node), "it lies elsewhere").await;
    for (volume, why) in [(elsewhere, "lies on the storage of node"), (beside, "are too few for a copy")] {
        let verb = Verb::Rebuild(Some(ImageRef::copy_of(&CopyOf::disk(Workload::Volume, volume))));
        refused(&stage, stage.user(1).wish(guest.instance, &verb).await.map(drop), why).await;
    }
    stage.stays(guest.instance, 60, "well", Sight::is_well).await;
}

async fn detached_from_saved(stage: Stage) {
    let guest = stage.ready("web").await;
    let volume = made(&stage, Order::SMALL).await;
    given(&stage, volume, guest).await;
    done(&stage, guest, &Verb::Suspend).await;
    refused(&stage, stage.user(1).detaches(volume).await, "`eschedule resume` lets it go on").await;
    done(&stage, guest, &Verb::Resume).await;
    stage.until_well(guest).await;
    stage.demand(stage.user(1).detaches(volume).await.is_ok(), "it is taken").await;
}

async fn locked_uncounted(stage: Stage) {
    let guests =
        [stage.ready("a").await, stage.ready("b").await, stage.ready("c").await, stage.ready("d").await];
    stage.world.judge(|referee, world| referee.replaced(world));
    stage.placement(Method::DELETE, &format!("/allocations/{}", guests[0]), None).await;
    let last = stage.ready("e").await;
    stage.pass(60).await;
    let path = format!("/resource_providers/{}/inventories/VCPU", stage.node(1).node);
    let (_, mut inventory) = stage.placement(Method::GET, &path, None).await;
    let (before, total) = (inventory["reserved"].clone(), inventory["total"].clone());
    stage.demand(before != total, "it is not locked yet").await;
    inventory["reserved"] = total.clone();
    stage.placement(Method::PUT, &path, Some(inventory)).await;
    for guest in guests[1..].iter().chain([&last]) {
        stage.destroyed(*guest).await;
        stage.until_gone(*guest).await;
    }
    stage.pass(120).await;
    let (_, mut inventory) = stage.placement(Method::GET, &path, None).await;
    stage.demand(inventory["reserved"] == total, "it is locked still").await;
    inventory["reserved"] = before;
    stage.placement(Method::PUT, &path, Some(inventory)).await;
    stage.until_well(guests[0]).await;
}

async fn member_never_ran(stage: Stage) {
    group(&stage, Policy::AntiAffinity).await;
    stage.snag("n1", "hypervisor Define", Fate::IsRefused(0));
    let Ok(placed) = place(&stage, 1, "web").await else { return stage.fail("it was not placed").await };
    stage.until(placed.instance, "in ERROR", |is| is.is(State::Error) && is.request.is_none()).await;
    let next = place(&stage, 2, "db").await;
    let Ok(next) = next else { return stage.fail("its place is not free").await };
    stage.until_well(next.instance).await;
}

async fn copy_for_image(stage: Stage) {
    let volume = made(&stage, Order::SMALL).await;
    let user = stage.user(1);
    stage.world.snag("u1", "put images/", Fate::Arrives, 3);
    stage.snag("u1", "put images/", Fate::Kills);
    let sent = Deed::Add { name: "debian", parts: Some(40), public: false, protected: false };
    let killed = timeout(Duration::from_secs(60), user.catalogs(sent)).await.is_err();
    let images = stage.world.store.content(&stage.world.keys.images()).pairs;
    let image = images.first().and_then(|pair| stage.world.keys.parse_image(&pair.key).ok());
    let Some(image) = image.filter(|_| killed) else { return stage.fail("it is on its way").await };
    let of = ImageRef::copy_of(&CopyOf::disk(Workload::Volume, volume));
    let asked = stage.user(2).copies_for(image, &of).await;
    let copy = come(&stage, asked).await;
    stage.stays(copy, 300, "there", is_there).await;
    stage.demand(stage.user(2).deletes(copy).await.is_ok(), "it is deleted").await;
    stage.until_gone(copy).await;
    stage.user(2).catalogs(Deed::Delete("debian".to_owned())).await;
}

async fn end_unheard(stage: Stage) {
    stage.world.snag("u1", "put images/", Fate::Arrives, 5);
    stage.snag("u1", "put images/", Fate::LosesItsAnswer);
    let sent = Deed::Add { name: "debian", parts: Some(3), public: false, protected: false };
    let user = stage.user(1);
    let unheard = async {
        while stage.world.objects().is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
        stage.pass(1).await;
        stage.cut(Actor::User(1), 5);
    };
    tokio::join!(user.catalogs(sent), unheard);
    let images = stage.world.store.content(&stage.world.keys.images()).pairs;
    let image = images.first().and_then(|pair| decode::<Image>(&pair.value).ok());
    stage.demand(image.is_some_and(|image| image.status == ImageStatus::Active), "it is there").await;
}

async fn healed_and_ended(stage: Stage) {
    let guest = with_policy(&stage, Restart::Always).await;
    stage.empty_etcd();
    stage.until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.is_kept()).await;
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back").await;
    stage.until_well(guest).await;
    stage.end_guest(1, guest, End::ByGuest);
    stage.until(guest, "stopped", |is| is.is(State::Stopped)).await;
    stage.until_well(guest).await;
    stage.demand(effects(&stage, Operation::Start, guest) == 2, "it was started again").await;
}

async fn recorded(stage: &Stage, guest: InstanceId, vcpus: u64) {
    let record = stage.get(&stage.world.keys.instance(guest));
    let record = record.and_then(|value| decode::<Instance>(&value).ok());
    let is = record.and_then(|record| record.spec.resources.get("VCPU").copied());
    stage.demand(is == Some(vcpus), "it is recorded as large as it is").await;
}

async fn size_not_heard(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.kill(1);
    stage.user(1).asks(guest, &to(2, 1)).await;
    recorded(&stage, guest, 2).await;
    acts::delete_request(&stage.world, stage.node(1), guest, false).await;
    stage.start(1);
    stage.until(guest, "UNCLAIMED and counted", |is| is.is(State::Unclaimed) && is.is_kept()).await;
    stage.demand(stage.user(1).heals().await == Ok(1), "it is brought back").await;
    stage.until_well(guest).await;
    recorded(&stage, guest, 1).await;
}

async fn rescue_begun(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    stage.snag("n1", "hypervisor CreateRescue", Fate::KillsAfterwards);
    stage.user(1).asks(guest, &Verb::Rescue(None)).await;
    stage.until_down(1).await;
    stage.restore(&before);
    stage.start(1);
    stage.pass(60).await;
    stage.until(guest, "well, without that", |is| is.is_well() && !is.guest.rescued && !is.rescue_disk).await;
}

async fn claim_after_failure(stage: Stage) {
    let guest = stage.ready("web").await;
    for call in ["hypervisor Grow ", "hypervisor Redefine"] {
        stage.snag("n1", call, Fate::IsRefused(0));
    }
    stage.demand(stage.user(1).wish(guest, &to(2, 1)).await.is_err(), "it fails").await;
    stage.until_well(guest).await;
    let claim = |class| claimed(&stage.world, guest, class);
    stage.demand(claim("VCPU") == 2, "more is claimed").await;
    change_claim(&stage, guest, |claim| {
        for provider in claim.as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
            provider["resources"]["VCPU"] = json!(1);
            provider["resources"]["MEMORY_MB"] = json!(64);
        }
    })
    .await;
    stage.pass(120).await;
    stage.demand((claim("VCPU"), claim("MEMORY_MB")) == (1, 128), "it claims what it has").await;
    stage.until_well(guest).await;
}

async fn cloned_while_away(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.crash(1).await;
    stage.say("a machine that was cloned from n1 is switched on");
    stage.start(2);
    stage.pass(3).await;
    stage.etcd_away(40).await;
    let told = |is: &Sight| is.is(State::Error) && is.says("its disk is gone") && is.volume && is.claim;
    stage.until(guest, "in ERROR and kept", told).await;
    stage.say("the clone is switched off, and the first switched on");
    stage.kill(2);
    stage.node(2).keep_down(true);
    stage.start(1);
    stage.until_well(guest).await;
}

async fn reboot_with_volume(stage: Stage) {
    let hypervisor = &stage.node(1).hypervisor;
    hypervisor.set_address_delay(Duration::from_secs(120));
    let volume = made(&stage, Order::SMALL).await;
    let guest = stage.placed("web").await.instance;
    stage.until(guest, "being started", |is| is.is(State::Starting) && is.runs()).await;
    stage.kill(1);
    stage.user(1).asks(guest, &Verb::Reboot(0)).await;
    let user = stage.user(1);
    let (attached, ()) = tokio::join!(user.attaches(volume, guest), async {
        stage.pass(1).await;
        stage.start(1);
    });
    stage.demand(attached.is_ok(), "it has it").await;
    stage.until_well(guest).await;
    stage.demand(has(&stage, guest, volume), "its guest does").await;
    stage.demand(effects(&stage, Operation::Start, guest) == 2, "it was rebooted").await;
}

async fn error_unheard(stage: Stage) {
    stage.snag("n1", "hypervisor Define", Fate::IsRefused(0));
    stage.snag("n1", "delete requests/n1/i1", Fate::LosesItsAnswer);
    let guest = stage.placed("web").await.instance;
    let told = |is: &Sight| is.is(State::Error) && is.request.is_none() && !is.claim && !is.volume;
    stage.until(guest, "in ERROR and given up", told).await;
    stage.stays(guest, 900, "in ERROR", told).await;
    stage.destroyed(guest).await;
    stage.until_gone(guest).await;
}

async fn all_sold(stage: Stage) {
    let mut guests = Vec::new();
    for name in ["web", "db"] {
        let query = "resources=VCPU:2,MEMORY_MB:128,DISK_GB:1";
        let order = user::Order {
            name: Some(name),
            data: false,
            query,
            restart: Restart::No,
            group: None,
            boot: None,
        };
        match stage.user(1).order(order).await {
            Ok(placed) if stage.user(1).waits_for(placed).await => guests.push(placed.instance),
            _ => return stage.fail(format!("{name} does not come up")).await,
        }
    }
    stage.world.judge(|referee, world| referee.replaced(world));
    for guest in &guests {
        stage.placement(Method::DELETE, &format!("/allocations/{guest}"), None).await;
    }
    let others = [others_claim(&stage, 0, 2).await, others_claim(&stage, 1, 2).await];
    stage.pass(200).await;
    for claim in &others {
        stage.placement(Method::DELETE, claim, None).await;
    }
    for guest in guests {
        stage.until_well(guest).await;
    }
}
