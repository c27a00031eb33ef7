//! Guests that get another size, with their claims.

use std::time::Duration;

use ec_cloud::Verb;
use ec_hypervisor::{Hypervisor, Operation};
use ec_model::{InstanceId, Restart, State};
use reqwest::Method;
use serde_json::json;

use super::{
    Scenario, Stage,
    operators::{change_claim, others_claim},
    people::SMALL,
    stage::Sight,
};
use crate::{fashion::resize as to, referee::claimed, snag::Fate, user::Order};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "resize",
        "a user gives a guest that runs more processors, then more disk, and confirms; one that is stopped stays so",
        |stage| Box::pin(resize(stage)),
    ),
    Scenario::new(
        "resize-reverted",
        "a user gives a guest more of all and reverts that: it has the processors that it had, and the disk that it has; only these stay claimed",
        |stage| Box::pin(reverted(stage)),
    ),
    Scenario::new(
        "resize-without-room",
        "a user wants more processors than the node has left, and less disk than there is: both are refused, and nothing is changed",
        |stage| Box::pin(no_room(stage)),
    ),
    Scenario::new(
        "resize-with-kills",
        "the agent is killed in the midst of a resize, before and after each of its steps: the guest comes up with its new size each time",
        |stage| Box::pin(kills(stage)),
    ),
    Scenario::new(
        "resize-that-fails",
        "a guest cannot be given its new size, and then does not start with it: it runs with the old one, which is told, and reverting gives back the claim",
        |stage| Box::pin(fails(stage)),
    ),
    Scenario::new(
        "resize-in-an-older-etcd",
        "etcd is put back to before a resize, and to in its midst: the guest comes to have the size that is wanted there, and claims it",
        |stage| Box::pin(older_etcd(stage)),
    ),
    Scenario::new(
        "suspended-larger-than-an-older-etcd-knows",
        "etcd is put back to before a guest was given more, which is suspended by now: what it has stays claimed, whatever a controller sees of it, and it has \
         what is wanted there once it goes on",
        |stage| Box::pin(suspended_larger(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "resize-in-an-older-etcd-that-cannot-be",
        "etcd is put back to before any resize, and the hypervisor refuses the size that is wanted there for good: the guest goes on as large as it is, and that is told",
        |stage| Box::pin(older_etcd_in_vain(stage)),
    ),
    Scenario::new(
        "resize-lost-while-growing",
        "the agent is killed before and after it gives a guest more, and etcd put back to before that was wished: the guest ends once, and has what it had",
        |stage| Box::pin(lost(stage)),
    ),
    Scenario::new(
        "resize-lost-while-it-is-stopped",
        "the same of a guest that is stopped and defined anew for that: it is measured again, and has what it had",
        |stage| Box::pin(lost_while_stopped(stage)),
    ),
    Scenario::new(
        "resize-claimed-and-its-domain-gone",
        "the command is killed between its claim and its wish, and somebody undefines the guest: it is defined as large as it was",
        |stage| Box::pin(claimed_alone(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "resize-with-a-killed-caller",
        "the command is killed between its claim and its wish: said again it goes on; left alone, a controller gives back what it had claimed",
        |stage| Box::pin(killed_caller(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "resize-claimed-twice",
        "two commands are killed between their claims and their wishes, the second when a controller is about to give back what the first claimed: it waits \
         anew",
        |stage| Box::pin(claimed_twice(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "resize-without-room-when-it-may-have-grown",
        "the agent is killed when it has given a guest more, and an operator gives the room for that to others: the guest ends to have what it had",
        |stage| Box::pin(room_lost(stage)),
    ),
    Scenario::new(
        "resize-with-a-late-claim",
        "placement gets a claim for another size when its command has given up: a controller gives it back",
        |stage| Box::pin(late_claim(stage)),
    )
    .with_controllers(1),
    Scenario::new(
        "resize-with-a-late-return",
        "placement gets late what a controller gives back of a claim, which its user wished for again meanwhile: it stays claimed",
        |stage| Box::pin(late_return(stage)),
    )
    .with_controllers(1),
];

/// Processors and GB of disk that a guest has.
async fn size(stage: &Stage, guest: InstanceId) -> (u64, u64) {
    let size = stage.node(1).hypervisor.size(guest).await.ok().flatten();
    size.map_or((0, 0), |size| (size.vcpus, size.disk_bytes >> 30))
}

/// Processors and GB of disk that it has claimed.
fn claim(stage: &Stage, guest: InstanceId) -> (u64, u64) {
    (claimed(&stage.world, guest, "VCPU"), claimed(&stage.world, guest, "DISK_GB"))
}

pub(super) async fn is(stage: &Stage, guest: InstanceId, wanted: (u64, u64), has_claimed: (u64, u64)) {
    let (has, holds) = (size(stage, guest).await, claim(stage, guest));
    let what = format!("it has {wanted:?} and has claimed {has_claimed:?}");
    if (has, holds) != (wanted, has_claimed) {
        stage.fail::<()>(format!("{what}: it has {has:?} and has claimed {holds:?}")).await;
    }
    stage.say(format!("so it is: {what}"));
}

pub(super) async fn does(stage: &Stage, guest: InstanceId, verb: &Verb) {
    let done = stage.user(1).wish(guest, verb).await;
    stage.demand(done.is_ok(), "it is done").await;
}

fn starts(stage: &Stage, guest: InstanceId) -> u64 {
    stage.node(1).hypervisor.effects(Operation::Start, guest)
}

async fn resize(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = starts(&stage, guest);
    does(&stage, guest, &to(2, 1)).await;
    stage.until_well(guest).await;
    is(&stage, guest, (2, 1), (2, 1)).await;
    let refused = stage.user(1).wish(guest, &Verb::Stop(0)).await.err();
    stage.demand(refused.is_some_and(|why| why.contains("not confirmed")), "its power waits").await;
    does(&stage, guest, &Verb::Confirm).await;
    does(&stage, guest, &Verb::Confirm).await;
    does(&stage, guest, &to(2, 2)).await;
    stage.until_well(guest).await;
    is(&stage, guest, (2, 2), (2, 2)).await;
    stage.demand(starts(&stage, guest) == before, "it ran all the time").await;
    does(&stage, guest, &Verb::Confirm).await;
    does(&stage, guest, &Verb::Stop(0)).await;
    does(&stage, guest, &to(1, 2)).await;
    is(&stage, guest, (1, 2), (2, 2)).await;
    does(&stage, guest, &Verb::Confirm).await;
    is(&stage, guest, (1, 2), (1, 2)).await;
    stage.stays(guest, 60, "STOPPED", |is| is.is(State::Stopped) && !is.runs() && is.is_kept()).await;
}

async fn reverted(stage: Stage) {
    let guest = stage.ready("web").await;
    does(&stage, guest, &to(2, 2)).await;
    stage.until_well(guest).await;
    is(&stage, guest, (2, 2), (2, 2)).await;
    does(&stage, guest, &Verb::Revert).await;
    stage.until_well(guest).await;
    is(&stage, guest, (1, 2), (1, 2)).await;
    does(&stage, guest, &Verb::Revert).await;
    stage.stays(guest, 120, "well", Sight::is_well).await;
}

async fn no_room(stage: Stage) {
    let guest = stage.ready("web").await;
    for (name, query) in [("db", "resources=VCPU:2,MEMORY_MB:128,DISK_GB:1"), ("mail", SMALL)] {
        let order =
            Order { name: Some(name), data: false, query, restart: Restart::No, group: None, boot: None };
        stage.demand(stage.user(1).order(order).await.is_ok(), "another takes room").await;
    }
    for (verb, why) in [
        (to(2, 1), "VCPU is short by 1 (0 of 4 free)"),
        (to(3, 1), "VCPU is short by 2 (0 of 4 free)"),
        (to(1, 0), "a disk never shrinks"),
        (Verb::Confirm, ""),
    ] {
        let refused = stage.user(1).wish(guest, &verb).await.err();
        let is_told = why.is_empty() || refused.is_some_and(|told| told.contains(why));
        stage.demand(is_told, "it is told why").await;
        is(&stage, guest, (1, 1), (1, 1)).await;
    }
    stage.stays(guest, 60, "well", Sight::is_well).await;
    stage.demand(starts(&stage, guest) == 1, "it was not disturbed").await;
}

async fn kills(stage: Stage) {
    let guest = stage.ready("web").await;
    let mut vcpus = 1;
    for (call, grows) in [
        ("hypervisor Grow", true),
        ("put status/n1/i1 RESIZING", false),
        ("hypervisor ShutDown", false),
        ("hypervisor Redefine", false),
        ("put status/n1/i1 STARTING", false),
        ("hypervisor Start", false),
    ] {
        for fate in [Fate::Kills, Fate::KillsAfterwards] {
            // It grows while it runs, and ends to become smaller.
            let before = if grows { 1 } else { 2 };
            if vcpus != before {
                does(&stage, guest, &to(before, 1)).await;
                stage.until_well(guest).await;
                does(&stage, guest, &Verb::Confirm).await;
            }
            vcpus = 3 - before;
            stage.snag("n1", call, fate);
            let (user, verb) = (stage.user(1), to(vcpus, 1));
            let (done, ()) = tokio::join!(user.wish(guest, &verb), async {
                stage.until_down(1).await;
                stage.pass(20).await;
                stage.start(1);
            });
            stage.demand(done.is_ok(), "it is resized").await;
            stage.until_well(guest).await;
            is(&stage, guest, (vcpus, 1), (2, 1)).await;
            does(&stage, guest, &Verb::Confirm).await;
            is(&stage, guest, (vcpus, 1), (vcpus, 1)).await;
        }
    }
}

async fn fails(stage: Stage) {
    let guest = stage.ready("web").await;
    for (call, disk) in [("hypervisor GrowDisk", 1), ("hypervisor Redefine", 2), ("hypervisor Start", 2)] {
        stage.snag("n1", "hypervisor Grow ", Fate::IsRefused(0));
        stage.snag("n1", call, Fate::IsRefused(0));
        let told = stage.user(1).wish(guest, &to(2, 2)).await.err();
        stage
            .demand(
                told.is_some_and(|why| why.contains("is as large as it was before that")),
                "it is told why",
            )
            .await;
        stage.until_well(guest).await;
        is(&stage, guest, (1, disk), (2, 2)).await;
        does(&stage, guest, &Verb::Revert).await;
        stage.until_well(guest).await;
        is(&stage, guest, (1, disk), (1, disk)).await;
    }
}

async fn older_etcd(stage: Stage) {
    let guest = stage.ready("web").await;
    let first = stage.back_up();
    does(&stage, guest, &to(2, 2)).await;
    stage.until_well(guest).await;
    let unconfirmed = stage.back_up();
    does(&stage, guest, &Verb::Revert).await;
    stage.until_well(guest).await;
    for (backup, vcpus) in [(&unconfirmed, 2), (&first, 1), (&unconfirmed, 2)] {
        stage.restore(backup);
        stage.pass(120).await;
        stage.until_well(guest).await;
        is(&stage, guest, (vcpus, 2), (vcpus, 2)).await;
    }
}

async fn suspended_larger(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    does(&stage, guest, &to(2, 1)).await;
    stage.until_well(guest).await;
    does(&stage, guest, &Verb::Confirm).await;
    does(&stage, guest, &Verb::Suspend).await;
    let suspended = |is: &Sight| is.is(State::Suspended) && is.claim;
    stage.until(guest, "SUSPENDED", suspended).await;
    stage.restore(&before);
    stage.pass(90).await;
    stage.until(guest, "SUSPENDED", suspended).await;
    is(&stage, guest, (2, 1), (2, 1)).await;
    stage.stays(guest, 600, "claimed as it is", |_| claim(&stage, guest) == (2, 1)).await;
    does(&stage, guest, &Verb::Resume).await;
    stage.pass(180).await;
    stage.until_well(guest).await;
    is(&stage, guest, (1, 1), (1, 1)).await;
}

async fn older_etcd_in_vain(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    does(&stage, guest, &to(2, 2)).await;
    stage.until_well(guest).await;
    stage.world.snag("n1", "hypervisor Redefine", Fate::IsRefused(0), 1_000);
    stage.restore(&before);
    stage.pass(200).await;
    stage.until_well(guest).await;
    is(&stage, guest, (2, 2), (2, 2)).await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn lost(stage: Stage) {
    let guest = stage.ready("web").await;
    let before = stage.back_up();
    for fate in [Fate::Kills, Fate::KillsAfterwards] {
        stage.snag("n1", "hypervisor Grow ", fate);
        let user = stage.user(1);
        let verb = to(2, 1);
        tokio::join!(
            async {
                // Nobody tells what came of it.
                _ = user.wish(guest, &verb).await;
            },
            async {
                stage.until_down(1).await;
                stage.restore(&before);
                stage.start(1);
                stage.pass(200).await;
            }
        );
        stage.until_well(guest).await;
        is(&stage, guest, (1, 1), (1, 1)).await;
    }
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn lost_while_stopped(stage: Stage) {
    let guest = stage.ready("web").await;
    does(&stage, guest, &Verb::Stop(0)).await;
    let before = stage.back_up();
    for fate in [Fate::Kills, Fate::KillsAfterwards] {
        stage.snag("n1", "hypervisor Redefine", fate);
        stage.user(1).asks(guest, &to(2, 1)).await;
        stage.until_down(1).await;
        stage.restore(&before);
        stage.start(1);
        stage.pass(200).await;
        is(&stage, guest, (1, 1), (1, 1)).await;
    }
    stage.stays(guest, 60, "STOPPED", |is| is.is(State::Stopped) && !is.runs() && is.is_kept()).await;
}

/// A command that is killed between its claim and its wish.
async fn claims_and_is_killed(stage: &Stage, guest: InstanceId, verb: &Verb) {
    stage.snag("u1", "put instances/", Fate::Kills);
    let told = stage.user(1).wish(guest, verb).await;
    stage.demand(told.is_err_and(|why| why == "killed"), "it was killed").await;
}

async fn claimed_alone(stage: Stage) {
    let guest = stage.ready("web").await;
    does(&stage, guest, &Verb::Stop(0)).await;
    claims_and_is_killed(&stage, guest, &to(2, 1)).await;
    // Its node has seen by then what is claimed.
    stage.pass(40).await;
    stage.undefine(1, guest);
    stage.until(guest, "defined again", |is| is.domain.is_some()).await;
    is(&stage, guest, (1, 1), (2, 1)).await;
    stage.pass(200).await;
    is(&stage, guest, (1, 1), (1, 1)).await;
    does(&stage, guest, &Verb::Start).await;
    stage.until_well(guest).await;
}

async fn killed_caller(stage: Stage) {
    let guest = stage.ready("web").await;
    for fate in [Fate::Kills, Fate::KillsAfterwards] {
        stage.snag("u1", "PUT /allocations", fate);
        let told = stage.user(1).wish(guest, &to(2, 1)).await;
        stage.demand(told.is_err_and(|why| why == "killed"), "it was killed").await;
    }
    is(&stage, guest, (1, 1), (2, 1)).await;
    does(&stage, guest, &to(2, 1)).await;
    stage.until_well(guest).await;
    is(&stage, guest, (2, 1), (2, 1)).await;
    does(&stage, guest, &Verb::Confirm).await;
    claims_and_is_killed(&stage, guest, &to(2, 2)).await;
    is(&stage, guest, (2, 1), (2, 2)).await;
    stage.pass(200).await;
    is(&stage, guest, (2, 1), (2, 1)).await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn claimed_twice(stage: Stage) {
    let guest = stage.ready("web").await;
    for (verb, claimed) in [(to(2, 1), (2, 1)), (to(2, 2), (2, 2))] {
        claims_and_is_killed(&stage, guest, &verb).await;
        stage.pass(80).await;
        is(&stage, guest, (1, 1), claimed).await;
    }
    stage.pass(100).await;
    is(&stage, guest, (1, 1), (1, 1)).await;
}

async fn room_lost(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("n1", "hypervisor Grow ", Fate::KillsAfterwards);
    stage.user(1).asks(guest, &to(2, 1)).await;
    stage.until_down(1).await;
    stage.expects_trouble(guest);
    change_claim(&stage, guest, |claim| {
        for provider in claim.as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
            provider["resources"]["VCPU"] = json!(1);
        }
    })
    .await;
    let others = [others_claim(&stage, 0, 2).await, others_claim(&stage, 1, 1).await];
    stage.start(1);
    stage
        .until(guest, "told that it has no room", |is| {
            let resized = is.status.as_ref().and_then(|status| status.resized.as_ref());
            is.is_well() && resized.is_some_and(|resized| resized.failed.is_some())
        })
        .await;
    is(&stage, guest, (1, 1), (1, 1)).await;
    for claim in &others {
        stage.placement(Method::DELETE, claim, None).await;
    }
}

async fn late_claim(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("u1", "PUT /allocations", Fate::IsLate(Duration::from_secs(120)));
    let told = stage.user(1).wish(guest, &to(2, 1)).await;
    stage.demand(told.is_err(), "nobody knows what became of it").await;
    is(&stage, guest, (1, 1), (1, 1)).await;
    stage.pass(120).await;
    is(&stage, guest, (1, 1), (2, 1)).await;
    stage.pass(200).await;
    is(&stage, guest, (1, 1), (1, 1)).await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}

async fn late_return(stage: Stage) {
    let guest = stage.ready("web").await;
    stage.snag("u1", "PUT /allocations", Fate::KillsAfterwards);
    let told = stage.user(1).wish(guest, &to(2, 1)).await;
    stage.demand(told.is_err_and(|why| why == "killed"), "it was killed").await;
    stage.snag("c1", "PUT /allocations", Fate::IsLate(Duration::from_secs(120)));
    stage.pass(150).await;
    is(&stage, guest, (1, 1), (2, 1)).await;
    does(&stage, guest, &to(2, 1)).await;
    stage.until_well(guest).await;
    stage.pass(120).await;
    is(&stage, guest, (2, 1), (2, 1)).await;
    stage.stays(guest, 60, "well", Sight::is_well).await;
}
