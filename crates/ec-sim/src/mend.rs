//! What went wrong is mended.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;

use crate::{
    acts::{self, say},
    nemesis::any_computer,
    operator,
    world::{Actor, Storm, World},
};

/// Everything is as it should be again, and everybody is up; but for one agent, now and then, that a controller is to
/// find missing.
pub(crate) async fn heal(world: &Arc<World>) {
    let dead = (world.controllers.count() > 0 && world.chance(30)).then(|| any_computer(world));
    mend(world).await;
    if let Some(computer) = dead {
        say(world, format!("keeps the agent of {} down", Actor::Agent(computer.node, 0)));
        computer.keep_down(true);
    }
    // Who was to be killed with the answer of a replica that slept till now was killed after that.
    sleep(Duration::from_secs(5)).await;
    for computer in world.computers.iter().filter(|computer| !computer.is_up()) {
        computer.start(world);
    }
    // Calls that are late by the most come till then.
    sleep(Duration::from_secs(90)).await;
    if let Some(computer) = dead {
        world.judge(|referee, world| referee.is_marked(world, computer.node));
        computer.keep_down(false);
        computer.start(world);
    }
}

/// Everything is as it should be again, and everybody is up.
async fn mend(world: &Arc<World>) {
    say(world, "heals everything");
    world.change_storm(|storm| *storm = Storm::default());
    world.mend_cuts();
    world.clear_snags();
    world.store.faults().set_reachable(true);
    world.store.faults().fail_writes(None);
    for number in 0..world.replicas.count() {
        match world.replicas.life(number) {
            Some(life) => life.wake(),
            None => world.replicas.start(world, number),
        }
    }
    for number in 0..world.controllers.count() {
        match world.controllers.life(number) {
            Some(life) => life.wake(),
            None => world.controllers.start(world, number),
        }
    }
    for clone in &world.clones {
        clone.keep_down(true);
    }
    for computer in &world.computers {
        while !operator::let_in(world, computer).await {}
        computer.hypervisor.set_unreachable(false);
        acts::mend_records(world, computer);
        computer.troubles.send_if_modified(|troubles| !std::mem::take(troubles).is_empty());
        match computer.life() {
            Some(life) => life.wake(),
            None => computer.start(world),
        }
    }
}
