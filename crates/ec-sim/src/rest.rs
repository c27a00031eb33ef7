//! What is at rest stays so: where nothing is left to be done, nothing is done.

use std::{collections::BTreeSet, time::Duration};

use ec_model::{InstanceId, Status, decode};
use ec_plan::status::{AGAIN, STARTED_AGAIN};
use tokio::time::sleep;

use crate::{
    door::content,
    heal::RESYNC,
    world::{PLACEMENT, World},
};

/// So long it is looked whether it does.
const WHILE: Duration = Duration::from_secs(299);

/// Whoever told the last word of something may have a little left to do.
const MOMENT: Duration = Duration::from_secs(1);

/// Everything is as it is asked for; looks whether anybody does anything all the same.
pub(crate) async fn stay_at_rest(world: &World) {
    // What says of itself that it is in trouble may be so by what was asked for before.
    sleep(if world.has_silent_watches() { RESYNC } else { MOMENT }).await;
    let mut trying = trying_on(world);
    world.judge(|referee, _| referee.rests());
    sleep(WHILE).await;
    trying.extend(trying_on(world));
    world.judge(|referee, _| {
        let deeds = referee.deeds().into_iter().filter(|(of, _)| !trying.contains(of));
        let deeds: Vec<String> = deeds.map(|(_, what)| what).collect();
        if !deeds.is_empty() {
            referee.found(format!("all was at rest, and this was done: {}", deeds.join("; ")));
        }
    });
}

/// Who tells that it tries something on, by itself; what is left over; and what placement does not count, of which its agent asks time and again
/// whether there is room.
fn trying_on(world: &World) -> BTreeSet<InstanceId> {
    let goes_on = |told: &str| told.ends_with(AGAIN) || told.contains(STARTED_AGAIN);
    let tries_on = |status: &Status| {
        let told = [status.reason.as_deref(), status.doing.as_deref()];
        let is_counted = content(world, &format!("{PLACEMENT}/consumers/{}", status.instance)).is_some();
        status.volumes_failed.is_some() || !is_counted || told.into_iter().flatten().any(goes_on)
    };
    let all = world.store.content(&world.keys.all_statuses()).pairs;
    let all = all.iter().filter_map(|pair| decode::<Status>(&pair.value).ok());
    let left = left_over(world);
    all.filter(tries_on).map(|status| status.instance).chain(left).collect()
}

/// Records that etcd brought back, of what its node knows to be destroyed: a controller takes them away when they are old enough.
fn left_over(world: &World) -> BTreeSet<InstanceId> {
    let keys = &world.keys;
    let under = |prefix: &str| world.store.content(prefix).pairs;
    let told =
        under(&keys.all_statuses()).into_iter().filter_map(|pair| Some(keys.parse_status(&pair.key).ok()?.1));
    let asked = under(&keys.all_requests())
        .into_iter()
        .filter_map(|pair| Some(keys.parse_request(&pair.key).ok()?.1));
    let spoken_of: BTreeSet<InstanceId> = told.chain(asked).collect();
    let recorded =
        under(&keys.instances()).into_iter().filter_map(|pair| keys.parse_instance(&pair.key).ok());
    recorded.filter(|instance| !spoken_of.contains(instance)).collect()
}
