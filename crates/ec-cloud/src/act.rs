//! What users ask of an instance that is there: judged, then written as what is wanted; the node's agent does it.

use ec_model::{
    ActionVerb, Desired, Doc, Extent, ImageRef, Instance, InstanceId, Node, NodeId, PowerWish, Rebuild,
    Record, Request, Rescue, Resize, State, Status, Workload, decode, input::LabelSelector,
};
use ec_plan::{
    sizes::{of_disk, reverted, under_way},
    status::is_lost,
    verbs::{Change, IS_VOLUME, NOT_LOCKED, Verb, Verdict, Wish, judge},
    volumes::{Sides, made_of},
};
use ec_runtime::planted;
use ec_store::{Compare, StoreError, Txn};
use jiff::{SignedDuration, Timestamp};

use crate::{
    Cloud, CloudError, CloudResult, Kind,
    destroy::{Chosen, refuse_elsewhere},
    heal::RECORD_LOST,
    history::{Asked, Unheard, last_of, note},
    image,
    intent::free,
    lookup::{Known, MENDS, Read, find_placed, verb_of_end},
    schedule::not_understood,
    sizes::{claim, settle},
    source::{self, Source, kind_of},
    volume::{nameable, refuse_held},
    wait::Awaited,
};

/// Another writer changed the instance in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

/// How a resize is ended.
const ENDS_OF_RESIZE: [ActionVerb; 2] = [ActionVerb::ConfirmResize, ActionVerb::RevertResize];

/// What became of what was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acted {
    /// Where the instance is.
    pub node: NodeId,
    /// Whether that node's agent is alive.
    pub node_alive: bool,
    /// What to wait for, where there is something to wait for.
    pub awaited: Option<Awaited>,
    /// Why nothing had to be written, where that is so.
    pub already: Option<String>,
}

/// Asks something of an instance. What it is already is not an error.
///
/// # Errors
/// It cannot be as the instance stands: [`CloudError::Refused`], with nothing changed.
pub async fn act(cloud: &Cloud, instance: InstanceId, verb: &Verb) -> CloudResult<Acted> {
    act_as(cloud, Workload::Machine, instance, verb, Chosen::uuid()).await
}

/// The same of one that was selected by its labels: it is spared where somebody has changed them since.
///
/// # Errors
/// As [`act`]; [`CloudError::Refused`] where a selector does not take it any more.
pub async fn act_selected(
    cloud: &Cloud,
    instance: InstanceId,
    verb: &Verb,
    selectors: &[LabelSelector],
) -> CloudResult<Acted> {
    let chosen = Chosen::By { labels: selectors, name: None };
    act_as(cloud, Workload::Machine, instance, verb, chosen).await
}

/// The same of any kind of workload: what a volume has on it, and its size, are changed by who says that it is one.
pub(crate) async fn act_as(
    cloud: &Cloud,
    kind: Workload,
    instance: InstanceId,
    verb: &Verb,
    chosen: Chosen<'_>,
) -> CloudResult<Acted> {
    let acted = wish(cloud, kind, instance, verb, chosen).await;
    let is_over = match (&acted, verb) {
        // What was claimed for it is needed; or this is the second time, and nothing is known of what became of the first.
        (Ok(acted), Verb::Resize(_)) => acted.already.is_some(),
        (Ok(_), Verb::Confirm | Verb::Revert) => true,
        (Err(error), Verb::Resize(_) | Verb::Confirm | Verb::Revert) => error.kind() != Kind::Unreachable,
        _ => false,
    };
    if is_over && let Err(error) = settle(cloud, instance).await {
        let room = "what it has claimed and does not need is given back later, by a controller";
        (cloud.notice)(&format!("{instance}: {room}: {error}"));
    }
    acted
}

async fn wish(
    cloud: &Cloud,
    kind: Workload,
    instance: InstanceId,
    verb: &Verb,
    chosen: Chosen<'_>,
) -> CloudResult<Acted> {
    let mut unheard = Unheard::default();
    let wished = wish_heard(cloud, kind, instance, verb, chosen, &mut unheard).await;
    wished.map_err(|error| unheard.doubt(error))
}

/// The same; with what of it was not heard of.
async fn wish_heard(
    cloud: &Cloud,
    kind: Workload,
    instance: InstanceId,
    verb: &Verb,
    chosen: Chosen<'_>,
    unheard: &mut Unheard<Option<Awaited>>,
) -> CloudResult<Acted> {
    let mut unlock_unheard = false;
    for _ in 0..TRIES {
        let known = find_placed(cloud, instance).await?;
        // An earlier try was done after all. What others did since is not overwritten by it then.
        if let Some(awaited) = unheard.written(cloud).await? {
            return Ok(acted(&known, *awaited, None));
        }
        if *verb == Verb::Unlock
            && matches!(known.request, Read::Absent)
            && let Some(record) = known.record_doc()?
        {
            if record.record.locked.is_none() {
                let why = (!unlock_unheard).then(|| NOT_LOCKED.to_owned());
                return Ok(acted(&known, None, why));
            }
            match unlock_lost(cloud, &known, record).await? {
                Some(acted) => return Ok(acted),
                None => {
                    unlock_unheard = true;
                    continue;
                }
            }
        }
        let (mut record, order) = docs(&known)?;
        // What is written compares the record.
        if !chosen.means(Some(&record.record), None, None) {
            return Err(chosen.spared(instance));
        }
        // In the words of who asks.
        let word = verb.name_of(kind);
        if kind.is_machine()
            && record.record.kind == Workload::Volume
            && matches!(verb, Verb::Rebuild(_) | Verb::Remake(..) | Verb::Resize(_))
        {
            return Err(CloudError::Refused(format!("cannot {} {instance}: {}", verb.name(), IS_VOLUME)));
        }
        // One that is not there yet is being built; of this nobody knows.
        if let Read::Unreadable(why) = &known.status
            && !is_of_record(verb)
        {
            return Err(CloudError::Unreadable(format!(
                "the status of {instance} cannot be read, so nothing was changed: {why}; {MENDS}"
            )));
        }
        let wish = match judge(verb, &record.record, &order.record, known.status.record()) {
            Verdict::Do(wish) => wish,
            // Said again it is so already; but what was confirmed is not reverted.
            Verdict::Already(why)
                if ENDS_OF_RESIZE.contains(&verb.recorded().0)
                    && last_of(cloud, instance, &ENDS_OF_RESIZE).await? != Some(verb.recorded().0) =>
            {
                return Err(CloudError::Refused(format!("cannot {word} {instance}: {why}")));
            }
            Verdict::Already(why) => {
                return Ok(acted(&known, waited(&known, verb), Some(why)));
            }
            Verdict::Refuse(why) => {
                return Err(CloudError::Refused(format!("cannot {word} {instance}: {why}")));
            }
        };
        if let Wish::Name(name) = &wish
            && !same_name(record.record.name.as_deref(), name)
        {
            if record.record.kind == Workload::Volume {
                nameable(name)?;
            }
            // Names are those of its project.
            let of_project = Cloud { project: record.record.project.clone(), ..cloud.clone() };
            free(&of_project, record.record.kind, name).await?;
        }
        let its_own = its_own(&known, &record, &order);
        if let Wish::Rescue(image) = &wish
            && let image = image.as_ref().unwrap_or(its_own)
            && (image.is_none() || image.copied().is_some())
        {
            let why =
                "a rescue disk is made of an image, and not as a copy of a disk: name one with `--image`";
            return Err(CloudError::Refused(format!("cannot {word} {instance}: {why}")));
        }
        let (mut held, mut made_of) = (None, record.record.made_of.clone());
        if record.record.kind == Workload::Volume && matches!(wish, Wish::Rebuild(_) | Wish::Resize(_)) {
            held = refuse_held(cloud, &known, verb).await?;
        }
        if let Wish::Rebuild(image) = &wish {
            if record.record.kind == Workload::Volume && known.status.record().is_some_and(is_lost) {
                refuse_elsewhere(cloud, &known, word).await?;
            }
            if let Some(image) = image {
                image::fits(cloud, image, &record.record.spec.resources).await?;
            }
            let image = image.as_ref().unwrap_or(its_own);
            can_be_made_of(cloud, &known, image).await?;
            made_of = source::origin(cloud, image).await;
        }
        // Its own image it was made of already, whatever that has been said to need since.
        if let Wish::Rescue(Some(image)) = &wish {
            image::fits(cloud, image, &record.record.spec.resources).await?;
        }
        if let Wish::Resize(extent) = &wish
            && record.record.kind.is_machine()
        {
            // Its disk never shrinks.
            // Nor is it to have more than it has had all along, whatever its image has been said to need since.
            let had = &record.record.spec.resources;
            let is_less = |class: &str, amount| had.get(class).is_none_or(|had| amount < *had);
            let memory = extent.resources.iter();
            let memory = memory.filter(|(class, amount)| *class == "MEMORY_MB" && is_less(class, **amount));
            let memory = memory.map(|(class, amount)| (class.clone(), *amount)).collect();
            image::fits(cloud, its_own, &memory).await?;
        }
        if let Wish::Resize(extent) = &wish
            && !planted("size-not-claimed")
        {
            claim(cloud, &known, extent, word).await?;
        }
        record.record.made_of = made_of;
        let Changed { awaited, order, generation, txn } = change(cloud, &known, record, order, wish);
        let txn = txn.when_all(held);
        understood(cloud, &known, &order, "such an image").await?;
        let txn = let_in(cloud, &known, word, matches!(verb, Verb::Unlock | Verb::LetGo(_)), txn).await?;
        let (recorded, detail) = verb.recorded();
        let at = match awaited {
            Some(
                Awaited::Rebuild(wished_at) | Awaited::Rescue { wished_at, .. } | Awaited::Resize(wished_at),
            ) => wished_at,
            _ => cloud.host.now(),
        };
        // Nobody waits for labels: that they are written is all.
        let at_once = matches!(verb, Verb::Set(_)) && awaited.is_none();
        let asked = Asked { detail, at_once, ..Asked::new(instance, known.node, recorded, at, generation) };
        let mark = asked.mark();
        let txn = note(cloud, asked, txn, None).await?;
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => return Ok(acted(&known, awaited, None)),
            Ok(_) => {}
            Err(StoreError::Unknown(_)) => unheard.note(mark, awaited),
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!("{instance} keeps changing; try again")))
}

/// An error where its disk cannot be made anew as this copy. Its agent would find that, too, with its guest's disk untouched.
pub(crate) async fn can_be_made_of(cloud: &Cloud, known: &Known, image: &ImageRef) -> CloudResult<()> {
    let Some(source) = Source::of(cloud, image).await? else { return Ok(()) };
    source.is_on(known.node)?;
    let claimed = known.record.as_ref().map(|record| of_disk(&record.spec.resources));
    claimed.map_or(Ok(()), |claimed| source.fits_claim(known.instance, claimed))
}

/// Whether this may be asked for as all stands, or why not.
///
/// # Errors
/// Nobody can tell: its keys cannot be read, or it is being moved.
pub(crate) fn could_be(known: &Known, verb: &Verb) -> CloudResult<Result<(), String>> {
    let (record, order) = docs(known)?;
    Ok(match judge(verb, &record.record, &order.record, known.status.record()) {
        Verdict::Refuse(why) => Err(why),
        Verdict::Do(_) | Verdict::Already(_) => Ok(()),
    })
}

/// Unlocks one whose request was lost, in its record alone: locked, it could neither be destroyed nor, where its node holds
/// nothing of it, be brought back. Nothing where somebody else was quicker.
async fn unlock_lost(cloud: &Cloud, known: &Known, mut record: Doc<Instance>) -> CloudResult<Option<Acted>> {
    let instance = known.instance;
    let generation = record.record.generation.saturating_add(1);
    (record.record.locked, record.record.generation) = (None, generation);
    record.record.request_id = cloud.request_id;
    let key = cloud.keys.instance(instance);
    let txn = Txn::new()
        .when(Compare::Unchanged(key.clone(), known.record_revision()))
        .when(Compare::Absent(cloud.keys.request(known.node, instance)))
        .put(key, record.encode());
    let (verb, detail) = Verb::Unlock.recorded();
    let asked = Asked { detail, ..Asked::new(instance, known.node, verb, cloud.host.now(), generation) };
    let txn = note(cloud, asked, txn, None).await?;
    match cloud.store.txn(txn).await {
        Ok(outcome) if outcome.succeeded => Ok(Some(acted(known, None, None))),
        Ok(_) | Err(StoreError::Unknown(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether the node's agent reads the request, where that becomes one of a later format than it was. That it is the same agent when
/// the request is written, [`let_in`] demands. Of the format that is there already whatever is asked for is written, whoever is
/// away.
///
/// # Errors
/// It does not, or nobody knows, since it is not alive.
pub(crate) async fn understood(cloud: &Cloud, known: &Known, order: &Request, what: &str) -> CloudResult<()> {
    if order.format() <= known.request.record().map_or(1, Record::format) {
        return Ok(());
    }
    let refused = |why: String| {
        CloudError::Refused(format!(
            "{} cannot have {what} there, and nothing was changed: {why}",
            known.instance
        ))
    };
    let sign = match known.node_alive {
        true => cloud.store.get(&cloud.keys.alive(known.node)).await?.0,
        false => None,
    };
    let why = match sign {
        Some(sign) => not_understood(known.node, &sign.value, order.format()),
        None => {
            Some(format!("node {} is not alive, so it is not known whether its agent reads that", known.node))
        }
    };
    why.map_or(Ok(()), |why| Err(refused(why)))
}

/// Adds the demand that the node is not revoked meanwhile: whoever has its credentials may still watch what is written for it.
///
/// # Errors
/// It was. What was locked can be unlocked all the same (`anyway`), so that it can be destroyed.
pub(crate) async fn let_in(
    cloud: &Cloud,
    known: &Known,
    verb: &str,
    anyway: bool,
    txn: Txn,
) -> CloudResult<Txn> {
    let node = known.node;
    // It goes with the rights.
    if known.node_alive {
        return Ok(txn.when(Compare::Unchanged(cloud.keys.alive(node), known.alive_revision())));
    }
    let key = cloud.keys.node(node);
    let pair = cloud.store.get(&key).await?.0;
    let revision = pair.as_ref().map_or(0, |pair| pair.mod_revision);
    let (instance, record) = (known.instance, pair.map(|pair| decode::<Node>(&pair.value)));
    let ends = verb_of_end(kind_of(known).unwrap_or(Workload::Machine));
    let why = match record.filter(|_| !anyway) {
        Some(Ok(record)) if record.revoked => format!(
            "cannot {verb} {instance}: its node {} ({node}) was revoked, and nothing is written for it any more; `eschedule {ends}` ends it, `eschedule node add --uuid` lets the node in again",
            record.name
        ),
        // The node may have damaged it itself, against a mark.
        Some(Err(error)) => format!(
            "cannot {verb} {instance}: the record of its node {node} cannot be read, so that it may have been revoked ({error}); start the node's agent, or `eschedule {ends}` ends it"
        ),
        Some(Ok(_)) | None => return Ok(txn.when(Compare::Unchanged(key, revision))),
    };
    Err(CloudError::Refused(why))
}

fn acted(known: &Known, awaited: Option<Awaited>, already: Option<String>) -> Acted {
    Acted { node: known.node, node_alive: known.node_alive, awaited, already }
}

/// A wish that is not carried out yet can be waited for by who asks for the same, too.
fn waited(known: &Known, verb: &Verb) -> Option<Awaited> {
    let request = known.request.record()?;
    let status = known.status.record();
    match verb {
        Verb::Start
        | Verb::Stop(_)
        | Verb::Reboot(_)
        | Verb::Pause
        | Verb::Unpause
        | Verb::Suspend
        | Verb::Resume => {
            let PowerWish { power, generation, .. } = request.power;
            // One that was started is waited for until it is up.
            let is_done =
                |status: &Status| status.power_generation >= generation && status.state != State::Starting;
            (!status.is_some_and(is_done)).then_some(Awaited::Power { generation, power })
        }
        Verb::Resize(_) | Verb::Revert => under_way(request, status)
            .then_some(request.resize)
            .flatten()
            .map(|wish| Awaited::Resize(wish.wished_at)),
        Verb::Unrescue => {
            let is_on_its_way = |status: &Status| {
                status.is_rescued()
                    || matches!(status.state, State::Rescuing | State::Unrescuing | State::Starting)
            };
            status.is_some_and(is_on_its_way).then_some(Awaited::Unrescue(request.generation))
        }
        Verb::Set(change) => {
            let has_heard = |status: &Status| status.observed_generation >= request.generation;
            (is_of_node(change) && !status.is_some_and(has_heard))
                .then_some(Awaited::Heard(request.generation))
        }
        // It is done where it is written, or is not asked for again.
        Verb::Rebuild(_)
        | Verb::Remake(..)
        | Verb::Rescue(_)
        | Verb::Confirm
        | Verb::Lock(_)
        | Verb::Hold(_)
        | Verb::Unlock
        | Verb::LetGo(_)
        | Verb::Rename(_) => None,
    }
}

/// Whether it changes what its node tells its guest, or does for it. Labels are nobody's business but etcd's.
fn is_of_node(change: &Change) -> bool {
    !change.metadata.is_empty() || change.restart.is_some()
}

/// Record and request, to be changed. Both have to be there: what nobody wants can only be destroyed.
pub(crate) fn docs(known: &Known) -> CloudResult<(Doc<Instance>, Doc<Request>)> {
    let instance = known.instance;
    let unwanted = || {
        let is_forgotten = known.status.record().is_some_and(|status| status.state == State::Unclaimed);
        CloudError::Refused(if is_forgotten {
            format!(
                "etcd has forgotten what is wanted of {instance}, which its node has: `eschedule heal` brings it back, `eschedule destroy {instance}` ends it with all that was written on it"
            )
        } else {
            format!(
                "nothing is recorded of what is wanted of {instance}, as it was never requested, failed, or belongs to a lost state of etcd; `eschedule destroy {instance}` ends it"
            )
        })
    };
    match (known.record_doc()?, &known.request) {
        (_, Read::Unreadable(why)) => Err(CloudError::Unreadable(format!(
            "the request of {instance} cannot be read, so nothing was changed: {why}; {MENDS}"
        ))),
        (Some(record), Read::Here(request, _)) => {
            let assigned = record.record.assigned.map(|assigned| assigned.epoch);
            if assigned != Some(request.epoch) && request.desired == Desired::Active {
                return Err(CloudError::Busy(format!("{instance} is being moved; try again")));
            }
            Ok((record, known.request_doc()?))
        }
        // Its record goes with the wish to destroy.
        (None, Read::Here(request, _)) if request.desired == Desired::Destroyed => {
            Err(CloudError::Refused(format!("{instance} is being destroyed")))
        }
        (None, Read::Here(..)) => {
            Err(CloudError::Refused(format!("cannot change {instance}: {RECORD_LOST}")))
        }
        _ => Err(unwanted()),
    }
}

/// Whether it changes what is recorded, however the instance stands.
fn is_of_record(verb: &Verb) -> bool {
    matches!(
        verb,
        Verb::Lock(_) | Verb::Hold(_) | Verb::Unlock | Verb::LetGo(_) | Verb::Rename(_) | Verb::Set(_)
    )
}

/// Names that differ in the case of letters only are one.
fn same_name(before: Option<&str>, name: &str) -> bool {
    before.is_some_and(|before| before.eq_ignore_ascii_case(name))
}

/// What is to be written of a wish, and what to wait for then.
struct Changed {
    awaited: Option<Awaited>,
    /// The request as it will be.
    order: Request,
    /// Of what is wanted then.
    generation: u64,
    txn: Txn,
}

/// When a new disk is wished: later than each wish for one before.
fn rebuild_wished_at(cloud: &Cloud, known: &Known, order: &Request) -> Timestamp {
    let told = known.status.record().and_then(|status| status.rebuilt.as_ref()).map(|was| was.wished_at);
    later(cloud, order.rebuild.as_ref().map(|wish| wish.wished_at).max(told))
}

/// The same of a rescue disk.
fn rescue_wished_at(cloud: &Cloud, known: &Known, order: &Request) -> Timestamp {
    let told = known.status.record().and_then(|status| status.rescued.as_ref()).map(|was| was.wished_at);
    later(cloud, order.rescue.as_ref().map(|wish| wish.wished_at).max(told))
}

/// When another size is wished, in the same way.
fn resized_at(cloud: &Cloud, known: &Known, order: &Request) -> Timestamp {
    let told = known.status.record().and_then(|status| status.resized.as_ref()).map(|was| was.wished_at);
    later(cloud, order.resize.map(|wish| wish.wished_at).max(told))
}

/// Now, and later than the last, by whosever clock that was.
fn later(cloud: &Cloud, last: Option<Timestamp>) -> Timestamp {
    let next = |last: Timestamp| last.saturating_add(SignedDuration::from_nanos(1)).unwrap_or(last);
    last.map_or(cloud.host.now(), |last| cloud.host.now().max(next(last)))
}

/// What its disk was made of.
fn its_own<'a>(known: &'a Known, record: &'a Doc<Instance>, order: &'a Doc<Request>) -> &'a ImageRef {
    made_of(Sides { record: &record.record, request: &order.record, status: known.status.record() })
}

/// The transaction that writes a wish into record and request.
fn change(
    cloud: &Cloud,
    known: &Known,
    mut record: Doc<Instance>,
    mut order: Doc<Request>,
    wish: Wish,
) -> Changed {
    let (keys, instance) = (&cloud.keys, known.instance);
    let (record_key, order_key) = (keys.instance(instance), keys.request(known.node, instance));
    let generation = record.record.generation.max(order.record.generation).saturating_add(1);
    record.record.generation = generation;
    (record.record.request_id, order.record.request_id) = (cloud.request_id, cloud.request_id);
    let mut txn = Txn::new()
        .when(Compare::Unchanged(record_key.clone(), known.record_revision()))
        .when(Compare::Unchanged(order_key.clone(), known.request_revision()));
    let mut awaited = None;
    match wish {
        Wish::Locked(locked) => record.record.locked = locked,
        Wish::Name(name) => {
            let (kind, project) = (record.record.kind, record.record.project.clone());
            let before = record.record.name.replace(name.clone());
            if !same_name(before.as_deref(), &name) {
                txn = txn
                    .when(Compare::NoneUnder(keys.names(kind, &project, &name)))
                    .put(keys.name(kind, &project, &name, instance), "");
                if let Some(before) = before {
                    txn = txn.delete(keys.name(kind, &project, &before, instance));
                }
            }
            order.record.name = Some(name);
        }
        Wish::Set(change) => {
            change.make(&mut record.record);
            awaited = is_of_node(&change).then_some(Awaited::Heard(generation));
            order.record.restart = record.record.restart;
            if let Some(spec) = &mut order.record.spec {
                spec.metadata = record.record.spec.metadata.clone();
            }
        }
        Wish::Power(wish) => {
            let wish = PowerWish { generation, ..wish };
            (record.record.power, order.record.power) = (wish.clone(), wish);
            awaited = Some(Awaited::Power { generation, power: record.record.power.power });
        }
        Wish::Rebuild(image) => {
            let before = its_own(known, &record, &order).clone();
            record.record.spec.image = image.unwrap_or_else(|| before.clone());
            if let Some(spec) = &mut order.record.spec {
                spec.image = record.record.spec.image.clone();
            }
            let wished_at = rebuild_wished_at(cloud, known, &order.record);
            order.record.rebuild = Some(Rebuild { wished_at, before: Some(before) });
            awaited = Some(Awaited::Rebuild(wished_at));
        }
        Wish::Rescue(image) => {
            let wished_at = rescue_wished_at(cloud, known, &order.record);
            let image = image.unwrap_or_else(|| its_own(known, &record, &order).clone());
            order.record.rescue = Some(Rescue { wished_at, image });
            awaited = Some(Awaited::Rescue { wished_at, generation });
        }
        Wish::Unrescue => {
            order.record.rescue = None;
            awaited = Some(Awaited::Unrescue(generation));
        }
        Wish::Confirm => record.record.before = None,
        Wish::Resize(_) | Wish::Revert => {
            let spec = &record.record.spec;
            let extent = match wish {
                // A volume grows at once, and there is nothing to confirm.
                Wish::Resize(extent) if record.record.kind == Workload::Volume => Some(extent),
                Wish::Resize(extent) => {
                    let (query, resources) = (spec.query.clone(), spec.resources.clone());
                    record.record.before.get_or_insert(Extent { query, resources });
                    Some(extent)
                }
                _ => {
                    let extent = reverted(&record.record, known.status.record());
                    record.record.before = None;
                    extent
                }
            };
            for spec in [Some(&mut record.record.spec), order.record.spec.as_mut()].into_iter().flatten() {
                if let Some(Extent { query, resources }) = extent.clone() {
                    (spec.query, spec.resources) = (query, resources);
                }
            }
            let wished_at = resized_at(cloud, known, &order.record);
            order.record.resize = Some(Resize { wished_at });
            awaited = Some(Awaited::Resize(wished_at));
        }
    }
    // Its node hears of all that changes, so that it can tell it again should etcd lose it.
    order.record.generation = generation;
    txn = txn.put(order_key, order.encode());
    Changed { awaited, order: order.record, generation, txn: txn.put(record_key, record.encode()) }
}
