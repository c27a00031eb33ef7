//! Looking at guests: who wishes it has a ticket, whoever else does and whatever becomes of the agent.

use ec_cloud::Verb;
use ec_model::State;

use super::{Scenario, Stage};
use crate::snag::Fate;

pub(super) const ALL: &[Scenario] = &[
    Scenario::new(
        "looked-at-by-many",
        "three users look at a locked guest at once: each has a ticket of their own, and nothing of it changes",
        |stage| Box::pin(many(stage)),
    ),
    Scenario::new(
        "looked-at-with-kills",
        "the agent is killed before and after it tells of a ticket: who looks again has one of the next agent",
        |stage| Box::pin(kills(stage)),
    ),
    Scenario::new(
        "looked-at-in-vain",
        "a guest that is stopped, and one whose agent is gone, cannot be looked at, and that is told",
        |stage| Box::pin(in_vain(stage)),
    ),
];

async fn many(stage: Stage) {
    let guest = stage.ready("web").await;
    let locked = stage.user(1).wish(guest, &Verb::Lock("mine".to_owned())).await;
    stage.demand(locked.is_ok(), "it is locked").await;
    let users = [1, 2, 3].map(|number| stage.user(number));
    let [one, two, three] = users.each_ref().map(|user| user.looks_at(guest));
    let (one, two, three) = tokio::join!(one, two, three);
    let different = one != two && two != three && three != one;
    let each = one.is_ok() && two.is_ok() && three.is_ok() && different;
    stage.demand(each, "each has a ticket of their own").await;
    let unlocked = stage.user(1).wish(guest, &Verb::Unlock).await;
    stage.demand(unlocked.is_ok(), "it is unlocked").await;
    stage.until_well(guest).await;
}

async fn kills(stage: Stage) {
    let guest = stage.ready("web").await;
    let mut before = stage.user(1).looks_at(guest).await;
    for fate in [Fate::Kills, Fate::KillsAfterwards] {
        stage.snag("n1", "put status/n1/i1 ACTIVE", fate);
        let user = stage.user(1);
        let (looked, ()) = tokio::join!(user.looks_at(guest), async {
            stage.until_down(1).await;
            stage.start(1);
        });
        stage.demand(looked.is_ok() && looked != before, "there is another ticket").await;
        before = looked;
    }
    let again = stage.user(1).looks_at(guest).await;
    stage.demand(again.is_ok() && again != before, "who is sent away with it has another").await;
    stage.until_well(guest).await;
}

async fn in_vain(stage: Stage) {
    let guest = stage.ready("web").await;
    let stopped = stage.user(1).wish(guest, &Verb::Stop(0)).await;
    stage.demand(stopped == Ok(Some(State::Stopped)), "it is stopped").await;
    let told = stage.user(1).looks_at(guest).await;
    stage.demand(told.is_err_and(|why| why.contains("it is stopped")), "that is told").await;
    let started = stage.user(1).wish(guest, &Verb::Start).await;
    stage.demand(started.is_ok(), "it is started").await;
    stage.kill(1);
    stage.pass(60).await;
    let told = stage.user(1).looks_at(guest).await;
    stage.demand(told.is_err_and(|why| why.contains("not alive")), "that is told").await;
    stage.start(1);
    stage.until_well(guest).await;
}
