//! What must come to be when nothing goes wrong any more: everybody converges in bounded time, and nothing is left over.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use ec_cloud::{CloudError, Verb, act, delete_volume, destroy, list};
use ec_model::{Actions, Desired, Handover, Held, Instance, InstanceId, Outcomes, Resources, State, decode};
use ec_plan::history::{Fate, told};
use ec_store::LeaseId;
use tokio::time::{Instant, sleep};

use crate::{
    acts::guests,
    door::content,
    last::{bring_home, bring_to_an_end},
    life::Life,
    node::PROCESSORS,
    referee::{Known, asked_of, claimed, marked, offered_by},
    rest::stay_at_rest,
    traces::{Records, Traces, has_room, is_kept_free, records},
    user::cloud,
    world::{Actor, PLACEMENT, World},
};

/// Beyond a follower's resync, ten minutes after which left-overs count as such, and an audit's grace.
const BOUND: Duration = Duration::from_secs(30 * 60);
/// What somebody asks for is come to much sooner: beyond a row of failures, and a look that fails.
const SOON: Duration = Duration::from_secs(150);
/// But for a watch that says nothing any more: a follower lists anew after so long.
pub(crate) const RESYNC: Duration = Duration::from_secs(300);
const PERIOD: Duration = Duration::from_secs(10);

/// What is wrong, and how long it may be.
type Complaint = (Duration, String);

/// Every instance of which there is anything, or was.
async fn everything(world: &World, records: &Records) -> BTreeSet<InstanceId> {
    let mut all: BTreeSet<InstanceId> =
        world.judge(|referee, _| referee.instances().map(|(instance, _)| instance).collect());
    for prefix in [
        "/ecompute/requests/",
        "/ecompute/status/",
        "/ecompute/instances/",
        "/ecompute/names/",
        "/ecompute/volume-names/",
        "/ecompute/members/",
    ] {
        all.extend(last_parts(world, prefix));
    }
    all.extend(last_parts(world, &format!("{PLACEMENT}/consumers/")));
    for computer in &world.computers {
        all.extend(guests(world, computer).await);
    }
    let names = records.values().flat_map(BTreeMap::keys);
    all.extend(names.filter_map(|name| name.parse::<InstanceId>().ok()));
    let sealed = world.judge(|referee, _| referee.sealed_guests().clone());
    all.retain(|instance| !sealed.contains(instance));
    all
}

fn last_parts(world: &World, prefix: &str) -> Vec<InstanceId> {
    let pairs = world.store.content(prefix).pairs;
    pairs.iter().filter_map(|pair| pair.key.rsplit('/').next()?.parse().ok()).collect()
}

/// Waits until everybody has come to rest, then until nothing is left after everything was destroyed.
pub(crate) async fn converge(world: &Arc<World>) {
    let begun = Instant::now();
    world.log(Actor::Nemesis, "everything shall come to what is asked for");
    let lost = world.judge(|referee, _| referee.instances().any(|(_, known)| known.request_lost));
    if (lost || world.shares_storage()) && !world.is_calm() {
        // Until everybody has told what an older etcd does not ask for.
        sleep(Duration::from_secs(90)).await;
        bring_home(world).await;
    }
    until(world, begun, "did not come to rest", || async { unrest(world).await }).await;
    if world.failed.is_cancelled() {
        return;
    }
    stay_at_rest(world).await;
    if world.failed.is_cancelled() {
        return;
    }
    if world.chance(40) {
        bring_to_an_end(world).await;
        let begun = Instant::now();
        until(world, begun, "did not come to rest again", || async { unrest(world).await }).await;
        if world.failed.is_cancelled() {
            return;
        }
    }
    world.log(Actor::Nemesis, "everything shall be destroyed");
    let begun = Instant::now();
    until(world, begun, "is left over", || async {
        destroy_all(world).await;
        left(world).await
    })
    .await;
}

/// Looks until there is nothing to complain of, or the same was to be complained of for too long.
async fn until<F, C>(world: &Arc<World>, begun: Instant, what: &str, mut complaints: F)
where
    F: FnMut() -> C,
    C: Future<Output = Vec<Complaint>>,
{
    let mut since: BTreeMap<String, Instant> = BTreeMap::new();
    loop {
        let found = complaints().await;
        if world.failed.is_cancelled() {
            return;
        }
        if found.is_empty() {
            world.log(Actor::Nemesis, format!("so it is after {} s", begun.elapsed().as_secs()));
            return;
        }
        let before = std::mem::take(&mut since);
        let now = Instant::now();
        for (_, what) in &found {
            since.insert(what.clone(), before.get(what).copied().unwrap_or(now));
        }
        let late: Vec<String> = found
            .into_iter()
            .filter(|(bound, what)| begun.elapsed() > BOUND || since[what].elapsed() > *bound)
            .map(|(_, what)| what)
            .collect();
        if !late.is_empty() {
            let (seconds, late) = (begun.elapsed().as_secs(), late.join("; "));
            world.judge(|referee, _| referee.found(format!("{what} in {seconds} s: {late}")));
            return;
        }
        sleep(PERIOD).await;
    }
}

/// What a replica of eplacement knows otherwise than etcd has it.
async fn astray(world: &World) -> Vec<Complaint> {
    let mut found = Vec::new();
    for (number, replica) in world.replicas.running() {
        let actor = Actor::Replica(number);
        let before = world.store.revision();
        if let Err(why) = replica.fresh().await {
            found.push((SOON, format!("{actor} does not know how far etcd is: {why}")));
            continue;
        }
        let pairs = world.store.content(&format!("{PLACEMENT}/consumers/")).pairs;
        let stored: BTreeSet<(String, i64)> = pairs
            .iter()
            .filter_map(|pair| Some((pair.key.rsplit('/').next()?.to_owned(), pair.mod_revision)))
            // Anything else is a stranger's.
            .filter(|(name, _)| name.parse::<InstanceId>().is_ok())
            .collect();
        let known: BTreeSet<(String, i64)> = replica.peek(|state| {
            state.consumers().map(|(uuid, stored)| (uuid.to_string(), stored.revision)).collect()
        });
        if world.store.revision() != before {
            // Somebody wrote meanwhile.
            continue;
        }
        found.extend(stored.symmetric_difference(&known).map(|(consumer, revision)| {
            (SOON, format!("{actor} knows otherwise of the claim of {consumer} at revision {revision}"))
        }));
    }
    found
}

/// How much is asked for, or was before a resize that is neither confirmed nor reverted; of a volume that could not grow, what it has.
fn needed(world: &World, instance: InstanceId) -> Resources {
    let record = content(world, &world.keys.instance(instance));
    let Some(record) = record.and_then(|pair| decode::<Instance>(&pair.value).ok()) else {
        return Resources::new();
    };
    asked_of(world, &record)
}

fn is_held(world: &World, instance: InstanceId) -> bool {
    let keys = world.computers.iter().map(|computer| world.keys.held(computer.node, instance));
    keys.into_iter().any(|key| content(world, &key).is_some())
}

/// What people are shown of what is wanted, and what its node is asked for, are one; and a size before this one is remembered
/// only of one whose node was asked for another.
fn at_odds(world: &World, traces: &Traces, instance: InstanceId) -> Option<String> {
    let request = traces.request.as_ref().filter(|request| request.desired == Desired::Active)?;
    // The node that is to let go of a volume, and the one that it goes to, may know of it from different times.
    if matches!(request.handover, Some(Handover::To(_))) {
        return None;
    }
    let record = content(world, &world.keys.instance(instance))?;
    let record = decode::<Instance>(&record.value).ok()?;
    if record.volumes != request.volumes {
        return Some("its record and its request want other volumes".to_owned());
    }
    if request.spec.as_ref() != Some(&record.spec) {
        return Some(format!("its record wants {:?}, and its request {:?}", record.spec, request.spec));
    }
    (record.before.is_some() && request.resize.is_none())
        .then(|| "its record tells of a resize that nobody is asked for".to_owned())
}

/// Whether a domain has this volume.
fn is_had(world: &World, volume: InstanceId) -> bool {
    let domains = world.computers.iter().flat_map(|computer| computer.hypervisor.volumes());
    domains.into_iter().any(|(_, volumes)| volumes.iter().flatten().any(|has| has.volume == volume))
}

/// Whether a volume is made of one that a guest may write, which is waited for, and tells so.
fn waits_for_origin(world: &World, traces: &Traces, copy_of: Option<InstanceId>) -> bool {
    let reason = traces.status.as_ref().and_then(|status| status.reason.as_deref());
    copy_of.is_some_and(|of| is_had(world, of))
        && reason.is_some_and(|why| why.contains("may write what is to be copied"))
}

/// What is not as it is asked for.
async fn unrest(world: &Arc<World>) -> Vec<Complaint> {
    // What a killed command left goes when somebody comes across it.
    let Ok(cloud) = cloud(world, Actor::User(0), &Life::new()) else {
        return vec![(SOON, "no command line".into())];
    };
    if let Err(error) = list(&cloud).await {
        return vec![(SOON, format!("list: {error}"))];
    }
    let soon = SOON + if world.has_silent_watches() { RESYNC } else { Duration::ZERO };
    let mut found = Vec::new();
    for computer in &world.computers {
        if content(world, &world.keys.node(computer.node)).is_none() {
            found.push((SOON, format!("nobody knows of node {}", computer.node)));
        }
        if content(world, &world.keys.alive(computer.node)).is_none() {
            found.push((SOON, format!("node {} is not alive", computer.node)));
        }
        if marked(world, computer.node) == Some(true) {
            found.push((SOON, format!("node {} is marked as down", computer.node)));
        }
    }
    found.extend(astray(world).await);
    let records = records(world);
    for instance in everything(world, &records).await {
        let traces = Traces::of(world, &records, instance);
        let (known, restored, claims_lost) =
            world.judge(|referee, _| (referee.known(instance), referee.restored, referee.claims_lost));
        let Known {
            acknowledged,
            wished_away,
            doomed,
            wrote,
            disturbed,
            lost,
            vanished,
            was_revived,
            power_wished,
            rescues_wished,
            power_acknowledged,
            rebuild_acknowledged,
            resize_acknowledged,
            request_lost,
            is_volume,
            copy_of,
            volumes_acknowledged,
            record_lost: known_to_none,
            record_garbled,
            made_late,
            start_unknown,
            taken_up,
            root,
            ..
        } = known;
        // Brought back after somebody deleted its request: what was wished of its power counts as carried out, and a wish
        // for a disk or a size that its node had not carried out is left out, which whoever brings it back is told.
        let healed = request_lost && traces.request.is_some();
        // So is one that boots from a volume to which something was done.
        let on_disturbed = world.judge(|referee, _| root.is_some_and(|root| referee.known(root).disturbed));
        let disturbed = disturbed || healed || on_disturbed;
        let (power_acknowledged, rebuild_acknowledged, resize_acknowledged) = match healed {
            true => (0, None, None),
            false => (power_acknowledged, rebuild_acknowledged, resize_acknowledged),
        };
        let state = traces.status.as_ref().map(|status| status.state);
        let asked_for = traces.request.as_ref().map(|request| request.desired);
        let counted = traces.claim || ((restored || claims_lost) && is_kept_free(world, &traces));
        // What would end a guest, or tells more of it, waits until there is room to start it again.
        let uncounted = !traces.claim && counted;
        let waits_to_be_copied = waits_for_origin(world, &traces, copy_of);
        // The volume that it is to boot from is gone, and nobody makes it anew.
        let waits_for_root = root.is_some() && (disturbed || restored) && !traces.volume && !wrote;
        let whole = counted && traces.index && traces.domain && traces.volume && traces.record;
        let well = match (asked_for, state) {
            // A claim of storage that nodes share is of no node, where somebody took all else of it.
            _ if traces.is_only_claim() && (disturbed || vanished) && world.shares_storage() => true,
            _ if doomed && !restored => !traces.is_anything(),
            (Some(Desired::Active), Some(State::Active)) if traces.is_volume => {
                counted && traces.index && traces.volume && traces.record
            }
            // A guest that nobody asks for has it, in an etcd that was put back.
            (Some(_), Some(State::Destroying)) if traces.is_volume && restored => is_had(world, instance),
            // Nor is one made in the place of what somebody took all of, while a domain has that.
            (Some(Desired::Active), Some(State::Preparing)) if traces.is_volume => {
                waits_to_be_copied || vanished && is_had(world, instance)
            }
            (Some(Desired::Active), Some(State::Preparing)) => waits_for_root,
            (Some(Desired::Active), Some(State::Active)) => whole,
            (Some(Desired::Active), Some(State::Rescued)) => whole && rescues_wished > 0,
            (Some(Desired::Active), Some(State::Stopped | State::Paused | State::Suspended)) => {
                (disturbed || restored || power_wished) && (counted || !wrote)
            }
            // Of what never ran nothing is kept but the word.
            (Some(Desired::Active), Some(State::Error)) => {
                // Brought back at the moment at which its node, from which somebody had taken both, gave its claim back.
                let nothing_to_count = (claims_lost || healed) && !traces.domain && !traces.volume;
                (disturbed || restored)
                    && (counted || !wrote || nothing_to_count)
                    && (wrote || traces.marked && (start_unknown || record_garbled) || vanished || restored)
            }
            // Kept by its node, and counted. A disk alone that a call brought back late, after etcd had forgotten its
            // instance, may be anybody's, and nobody can tell how large it is: that stays until it is destroyed. So does
            // one whose domain and record somebody took.
            // And one of which nothing was reserved while its agent was away, since its record was gone, too, so that its room was sold.
            // And one that another node handed over before an older etcd came, and this one had not received by then.
            (None, Some(State::Unclaimed)) => {
                let is_unknown = restored && (world.shares_storage() || known_to_none) && !traces.record;
                (restored || request_lost || was_revived && !wrote)
                    && (counted || is_unknown || !(wrote && !disturbed || traces.domain || traces.record))
            }
            // A volume that is to go to where an older etcd has it goes when the guest lets go of it that has it here.
            (Some(Desired::Active), Some(State::Unclaimed)) => {
                restored && world.shares_storage() && is_had(world, instance) || uncounted
            }
            // It never ran, or its disk was taken and then all by which one could tell that it ran: its name stays until
            // somebody destroys it, and that is all.
            (None, Some(State::Error)) => {
                (!wrote || vanished || restored || is_volume && disturbed && request_lost)
                    && !traces.claim
                    && !traces.domain
                    && !traces.volume
                    && !traces.record
            }
            (None, None) => {
                // What came late takes the place of the word that it failed, and goes with it.
                let told = restored || request_lost || was_revived && !wrote;
                let missed = acknowledged.is_some() && !wished_away && !told;
                // Claimed after its record had gone with the newer etcd: nobody can tell whose that is.
                let nobodys = lost && traces.is_only_claim();
                // A volume that its user deleted goes when the guest does that has it, of which that etcd knew nothing.
                let nobodys = nobodys || restored && wished_away && is_had(world, instance);
                // A volume whose request and files were all taken away by hand: what it has claimed of storage that others
                // share stays, and with that its record, until somebody destroys it.
                let is_bare = !(traces.domain || traces.volume || traces.record);
                let nobodys = nobodys || world.shares_storage() && is_volume && request_lost && is_bare;
                (!traces.is_anything() || nobodys) && !missed
            }
            _ => false,
        };
        let as_wished = restored
            || uncounted
            || traces.is_as_wished(power_acknowledged, disturbed)
                && traces.is_rebuilt(rebuild_acknowledged)
                && traces.is_resized(resize_acknowledged);
        let ended = restored && state == Some(State::Stopped);
        let is_older = |request: &ec_model::Request| request.generation < volumes_acknowledged;
        let lost_wish = traces.request.as_ref().is_some_and(is_older) && !restored && !healed;
        let as_wished = as_wished
            && !lost_wish
            // With its node's record it was lost that there was a rescue disk, which goes with the next wish, too; and one that went when
            // an older etcd came is made with the next start.
            && (uncounted || traces.is_rescued_as_wished(was_revived || known_to_none || healed || ended))
            && traces.is_answered();
        // What is wished of its size is done when it is there.
        let is_waiting = waits_to_be_copied || waits_for_root;
        let as_wished = as_wished || state == Some(State::Preparing) && is_waiting;
        // Of one that is in ERROR, or is not wanted any more, what was asked for may be left undone.
        let is_settled = matches!(
            state,
            Some(State::Active | State::Stopped | State::Paused | State::Suspended | State::Rescued)
        );
        let history = if restored || healed || uncounted || !is_settled {
            Vec::new()
        } else {
            pending(world, instance)
        };
        if well && !history.is_empty() {
            found.push((soon, format!("{instance}: nothing is told of what came of {}", history.join(", "))));
        }
        if let Some(why) = traces.has_other_volumes() {
            found.push((soon, format!("{instance}: {why}")));
        }
        // Whoever waits until the newest wish is taken up hears of that also where it changes nothing.
        if is_settled && !(restored || uncounted) && !traces.is_taken_up() {
            found.push((soon, format!("{instance}: nothing is told of the newest that is asked for")));
        }
        let has_gb = traces.disk_bytes.div_ceil(1 << 30);
        let claimed_gb = claimed(world, instance, "DISK_GB");
        if traces.is_volume && traces.claim && claimed_gb < has_gb && !(restored || claims_lost) {
            found.push((soon, format!("{instance}: it has {has_gb} GB, and has claimed {claimed_gb}")));
        }
        if let Some(why) = traces.is_of_another_size().filter(|_| !(uncounted || record_garbled || made_late))
        {
            found.push((soon, format!("{instance}: {why}")));
        }
        // What nobody asks for and its node keeps a record of can be brought back.
        let unheld = state == Some(State::Unclaimed) && traces.record && !is_held(world, instance);
        if unheld && asked_for.is_none() {
            found.push((
                soon,
                format!("{instance}: it is UNCLAIMED, and nothing is held by which it could be brought back"),
            ));
        }
        let is_kept = !(restored || known_to_none || record_garbled);
        if let Some(why) = holds_older(world, instance, taken_up).filter(|_| is_kept) {
            found.push((soon, format!("{instance}: {why}")));
        }
        // Images are always to be had here, and room was claimed before it was wished.
        // A scenario has its own reasons.
        let is_excused = disturbed || restored || claims_lost || world.is_calm();
        if let Some(why) = traces.given_up().filter(|_| !is_excused) {
            found.push((soon, format!("{instance}: a wish was given up, and nothing was done to it: {why}")));
        }
        if traces.successor && is_settled {
            found.push((soon, format!("{instance}: a disk lies beside its own that nothing will come of")));
        }
        let root_of = |of| world.judge(|referee, _| referee.known(of).root);
        if let Some(why) = traces.is_of_other_bytes(root_of).filter(|_| !(restored || healed)) {
            found.push((soon, format!("{instance}: {why}")));
        }
        if let Some(why) = at_odds(world, &traces, instance) {
            found.push((soon, format!("{instance}: {why}")));
        }
        let has = traces.size.map_or(0, |size| size.vcpus);
        let has_claimed = claimed(world, instance, "VCPU");
        // What a call that its agent had given up made of it is mended before its next start.
        let is_mended = was_revived && state == Some(State::Stopped);
        // One that runs and that nobody asks for is as it is, till it is brought back.
        let is_mended = is_mended || state == Some(State::Unclaimed) && traces.request.is_none();
        // Somebody else may have its room.
        let is_short =
            (restored || claims_lost) && !has_room(world, &traces, has.saturating_sub(has_claimed));
        // Made anew by what was claimed a moment before an older etcd came, as somebody had taken all of it.
        let is_short = is_short || restored && vanished;
        if traces.claim && traces.domain && has_claimed < has && !(is_short || is_mended) {
            found.push((soon, format!("{instance}: it has {has} processors, and has claimed {has_claimed}")));
        }
        // Nobody gives back what is not needed but the next command and a controller, which takes its time; and nobody
        // can tell what is needed where somebody took the request, nor of one in ERROR what its node will make of a wish.
        let can_tell = traces.request.is_some() && state != Some(State::Error);
        let needs = if can_tell { needed(world, instance) } else { Resources::new() };
        for (class, has) in [("VCPU", has), ("DISK_GB", has_gb)] {
            let (claimed, needs) = (claimed(world, instance, class), needs.get(class).copied().unwrap_or(0));
            if world.controllers.count() > 0 && needs > 0 && claimed > needs.max(has) {
                let why = format!("{instance}: it has claimed {claimed} of {class}, and needs {needs}");
                found.push((BOUND / 2, why));
            }
        }
        // Somebody took its claim, or an older placement has none, and others its room since: nothing is started that is not
        // counted.
        let waits =
            matches!(state, Some(State::Rescuing | State::Unrescuing | State::Starting | State::Rebooting));
        let waits_for_room = waits && (claims_lost || restored) && !traces.claim && counted;
        // Its user deleted it where an older etcd has it go, and it goes when the guest lets go of it that has it here.
        let handover = traces.request.as_ref().and_then(|request| request.handover);
        let waits_for_guest =
            restored && matches!(handover, Some(Handover::To(_))) && is_had(world, instance);
        if !(waits_for_room || waits_for_guest || well && as_wished && traces.is_true()) {
            let bound = if traces.request.is_some() { soon } else { BOUND };
            found.push((bound, format!("{instance}: {}", traces.told())));
        }
    }
    found
}

/// What is wrong with what is held of an instance, of whose requests this is the newest by which its node told anything.
fn holds_older(world: &World, instance: InstanceId, taken_up: Option<(u64, u64)>) -> Option<String> {
    let held = world.computers.iter().find_map(|computer| {
        let pair = content(world, &world.keys.held(computer.node, instance))?;
        decode::<Held>(&pair.value).ok()
    });
    let edition = held?.intent.edition()?;
    let is_older = taken_up.is_some_and(|taken_up| (edition.epoch, edition.generation) < taken_up);
    is_older.then(|| format!("{edition:?} is held of it, and {taken_up:?} was taken up"))
}

/// What its history says is still to be done.
fn pending(world: &World, instance: InstanceId) -> Vec<String> {
    let Some(pair) = content(world, &world.keys.actions(instance)) else { return Vec::new() };
    let Ok(actions) = decode::<Actions>(&pair.value) else { return vec!["all".into()] };
    let outcomes = world.computers.iter().filter_map(|computer| {
        let pair = content(world, &world.keys.outcomes(computer.node, instance))?;
        decode::<Outcomes>(&pair.value).ok()
    });
    let statuses = world.computers.iter().filter_map(|computer| {
        decode(&content(world, &world.keys.status(computer.node, instance))?.value).ok()
    });
    let told = told(&actions, &outcomes.collect::<Vec<_>>(), &statuses.collect::<Vec<_>>());
    let pending = told.iter().filter(|it| it.outcome == Some(Fate::Pending));
    pending.filter_map(|it| it.verb).map(|verb| verb.to_string()).collect()
}

async fn destroy_all(world: &Arc<World>) {
    let Ok(cloud) = cloud(world, Actor::User(0), &Life::new()) else { return };
    let records = records(world);
    for instance in everything(world, &records).await {
        let traces = Traces::of(world, &records, instance);
        let goes = traces.request.as_ref().is_some_and(|request| request.desired == Desired::Destroyed);
        if !traces.is_anything() || goes {
            continue;
        }
        world.judge(|referee, _| referee.wished_away(instance));
        // Of what nobody can tell any more what it was the first word serves as well.
        let gone = match destroy(&cloud, instance).await {
            Err(CloudError::Refused(_)) => delete_volume(&cloud, instance).await,
            gone => gone,
        };
        match gone {
            Ok(_) => world.log(Actor::User(0), format!("destroy {instance}: it goes")),
            // It is as good as gone.
            Err(CloudError::NotFound(_)) => {}
            Err(error) => {
                world.log(Actor::User(0), format!("destroy {instance}: {error}"));
                // It is locked, perhaps; or a machine has it, which goes first.
                if matches!(error, CloudError::Refused(_)) {
                    act(&cloud, instance, &Verb::Unlock).await.ok();
                }
            }
        }
    }
}

/// What is left though everything was destroyed.
async fn left(world: &Arc<World>) -> Vec<Complaint> {
    let mut found = Vec::new();
    let records = records(world);
    for instance in everything(world, &records).await {
        let traces = Traces::of(world, &records, instance);
        if traces.is_anything() {
            found.push((BOUND, format!("{instance}: {}", traces.told())));
        }
    }
    for prefix in [
        "/ecompute/names/",
        "/ecompute/volume-names/",
        "/ecompute/members/",
        "/ecompute/userdata/",
        "/ecompute/held/",
        "/ecompute/held-userdata/",
    ] {
        found.extend(world.store.content(prefix).pairs.into_iter().map(|pair| (BOUND, pair.key)));
    }
    // A history goes by itself. Where somebody took all else of an instance from its node and from etcd, its agent, whose word what
    // came of it is, has nothing by which it would think of it.
    let is_gone =
        |known: &Known| known.request_lost && (known.vanished || known.is_volume && known.disturbed);
    let forgotten: BTreeSet<InstanceId> = world.judge(|referee, _| {
        let gone = referee.instances().filter(|(_, known)| is_gone(known));
        gone.map(|(instance, _)| instance).collect()
    });
    // Of a history of nobody a controller thinks, as of one that came back with an older etcd.
    let restored = world.judge(|referee, _| referee.restored);
    let unthought_of = match world.controllers.count() {
        0 if restored => {
            world.judge(|referee, _| referee.instances().map(|(instance, _)| instance).collect())
        }
        0 => forgotten.clone(),
        _ => BTreeSet::new(),
    };
    for (prefix, forgotten) in [("/ecompute/actions/", unthought_of), ("/ecompute/outcomes/", forgotten)] {
        let is_forgotten = |key: &str| {
            let of = key.rsplit('/').next().and_then(|name| name.parse().ok());
            of.is_some_and(|of| forgotten.contains(&of))
        };
        let kept = world.store.content(prefix).pairs.into_iter();
        let kept = kept.filter(|pair| pair.lease.is_none() && !is_forgotten(&pair.key));
        found.extend(kept.map(|pair| (BOUND, pair.key)));
    }
    // Nothing is kept from anybody that no trouble and no guest keeps.
    let is_shared = world.shares_storage();
    for node in world.computers.iter().map(|computer| computer.node) {
        let [processors, disk] = ["VCPU", "DISK_GB"].map(|class| offered_by(world, node, class));
        if processors != PROCESSORS as f64 || disk <= 0.0 && !is_shared {
            found.push((
                BOUND,
                format!("node {node} gives out {processors} processors, and {disk} of its disk"),
            ));
        }
    }
    found.extend(world.store.idle_leases().into_iter().filter_map(|lease| idle(world, lease)));
    found
}

/// Whose a lease is on which nothing hangs, and who should have used it. Of an end that nobody tries any more, since etcd or
/// somebody else has lost the instance meanwhile, one is left for a day.
fn idle(world: &World, lease: LeaseId) -> Option<Complaint> {
    let nodes = world.computers.iter().map(|computer| computer.node);
    let keys_of = |instance| {
        let outcomes = nodes.clone().map(move |node| world.keys.outcomes(node, instance));
        outcomes.chain([world.keys.actions(instance)])
    };
    let (instances, restored) = world.judge(|referee, _| {
        let known = referee.instances().map(|(instance, known)| (instance, known.clone()));
        (known.collect::<Vec<_>>(), referee.restored)
    });
    let whose = instances.iter().find_map(|(instance, known)| {
        let key = keys_of(*instance).find(|key| LeaseId::of_key(key) == lease)?;
        Some((key, restored || known.vanished || known.request_lost))
    });
    match whose {
        Some((_, true)) => None,
        Some((key, false)) => Some((BOUND, format!("the lease of {key}, which is not there"))),
        None => Some((BOUND, format!("lease {:x}, on which nothing hangs", lease.0))),
    }
}
