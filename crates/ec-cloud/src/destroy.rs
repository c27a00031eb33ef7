//! Destroying: change what is wanted; the node's agent does it, now or when it is back.

use ec_model::{
    ActionVerb, Desired, Doc, ImageId, Instance, InstanceId, NodeId, Request, Restart, State, Status,
    Workload, decode, input::LabelSelector,
};
use ec_plan::verbs::locked;
use ec_runtime::planted;
use ec_store::{Compare, Revision, Txn};

use crate::{
    Cloud, CloudError, CloudResult,
    group::member_key,
    history::{Asked, Unheard, note_end},
    image::image_of_copy,
    intent::{sweep, young_for},
    lookup::{Claimed, Found, Known, MENDS, Read, claimed, find},
    moving::{Giver, giver},
    select::in_words,
    source::kind_of,
    storage::storage_of,
    volume::refuse_missed,
};

/// Another writer changed the request in between so often: something is wrong with the cluster.
const TRIES: usize = 10;

/// Who will do it.
#[derive(Debug, Clone, Copy)]
pub enum Doomed {
    /// The agent of this node, when it is alive.
    By {
        /// Which.
        node: NodeId,
        /// Whether its agent is.
        alive: bool,
    },
    /// It was never placed: there was nothing but its record, and that is gone.
    Already,
    /// There was nothing of it but a claim of storage that nodes share, and that is given back.
    Released,
}

/// Asks for the instance's end. Asking again is not an error.
///
/// # Errors
/// It is a volume, which holds what others wrote: [`crate::delete_volume`] is meant to end one.
pub async fn destroy(cloud: &Cloud, instance: InstanceId) -> CloudResult<Doomed> {
    destroy_as(cloud, Workload::Machine, instance, Chosen::uuid()).await
}

/// The same of one that was selected by its labels: it is spared where somebody has changed them since.
///
/// # Errors
/// As [`destroy`]; [`CloudError::Refused`] where a selector does not take it any more.
pub async fn destroy_selected(
    cloud: &Cloud,
    instance: InstanceId,
    selectors: &[LabelSelector],
) -> CloudResult<Doomed> {
    destroy_as(cloud, Workload::Machine, instance, Chosen::By { labels: selectors, name: None }).await
}

/// The same of one that was called so then, or nothing: it is spared where somebody has given it another name since, too.
///
/// # Errors
/// As [`destroy_selected`].
pub async fn destroy_called(
    cloud: &Cloud,
    instance: InstanceId,
    name: &str,
    selectors: &[LabelSelector],
) -> CloudResult<Doomed> {
    let chosen = Chosen::By { labels: selectors, name: Some(name) };
    destroy_as(cloud, Workload::Machine, instance, chosen).await
}

/// By what it was chosen: it is spared where that is otherwise by now.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Chosen<'a> {
    /// By labels that all of these take, and where there is one, by what it was called; by its uuid alone where there is neither.
    By { labels: &'a [LabelSelector], name: Option<&'a str> },
    /// By the name of a copy that was made for this image.
    CopyFor(ImageId),
}

impl Chosen<'_> {
    pub(crate) fn uuid() -> Self {
        Self::By { labels: &[], name: None }
    }

    /// Whether it is meant still. Of labels the record alone tells; of a name what there is of the three.
    pub(crate) fn means(
        &self,
        record: Option<&Instance>,
        request: Option<&Request>,
        status: Option<&Status>,
    ) -> bool {
        match self {
            Self::By { labels, name } => record.is_none_or(|record| {
                let called = record.name.as_deref().unwrap_or_default();
                labels.iter().all(|selector| selector.takes(&record.labels))
                    && name.is_none_or(|name| name.eq_ignore_ascii_case(called))
            }),
            Self::CopyFor(image) => {
                let name = match (record, request) {
                    (Some(record), _) => record.name.as_ref(),
                    (None, Some(request)) => request.name.as_ref(),
                    (None, None) => status.and_then(|status| status.name.as_ref()),
                };
                name.and_then(|name| image_of_copy(name)) == Some(*image)
            }
        }
    }

    /// That an instance is not meant any more.
    pub(crate) fn spared(&self, instance: InstanceId) -> CloudError {
        CloudError::Refused(match self {
            Self::By { labels, name } => {
                let called = name.map(|name| format!("is not called `{name}`"));
                let has = (!labels.is_empty()).then(|| format!("has not the label {}", in_words(labels)));
                let otherwise: Vec<_> = called.into_iter().chain(has).collect();
                format!("{instance} {} any more, and was left as it is", otherwise.join(" or "))
            }
            Self::CopyFor(image) => format!(
                "{instance} is not called as the copy for image {image} any more, and was not deleted"
            ),
        })
    }
}

/// The same of any kind of workload. What nobody can tell the kind of any more is whatever is meant.
pub(crate) async fn destroy_as(
    cloud: &Cloud,
    kind: Workload,
    instance: InstanceId,
    chosen: Chosen<'_>,
) -> CloudResult<Doomed> {
    let mut unheard = Unheard::default();
    let doomed = destroy_heard(cloud, kind, instance, chosen, &mut unheard).await;
    doomed.map_err(|error| match error {
        // That was what was asked for.
        CloudError::NotFound(_) => error,
        error => unheard.doubt(error),
    })
}

/// The same; with what of it was not heard of.
async fn destroy_heard(
    cloud: &Cloud,
    kind: Workload,
    instance: InstanceId,
    chosen: Chosen<'_>,
    unheard: &mut Unheard<Doomed>,
) -> CloudResult<Doomed> {
    for _ in 0..TRIES {
        if let Some(doomed) = unheard.written(cloud).await? {
            return Ok(*doomed);
        }
        let found = match (find(cloud, instance).await, unheard.last()) {
            // The wish whose answer was lost arrived, and its node was quick.
            (Err(CloudError::NotFound(_)), Some(doomed)) => return Ok(*doomed),
            (Err(CloudError::NotFound(_)), None) if claimed(cloud, instance).await? == Claimed::OfStorage => {
                cloud.placement.release(instance).await?;
                return Ok(Doomed::Released);
            }
            (found, _) => found?,
        };
        let known = match found {
            Found::Placed(known) => known,
            Found::Unplaced(record, _) if !chosen.means(Some(&record), None, None) => {
                return Err(chosen.spared(instance));
            }
            Found::Unplaced(record, revision) => match take_away(cloud, *record, revision).await? {
                true => return Ok(Doomed::Already),
                // It was placed at this moment.
                false => continue,
            },
        };
        if let Some(reason) = known.record.as_ref().and_then(|record| record.locked.as_ref())
            && !planted("lock-ignored")
        {
            let why = locked(instance, reason);
            let word = if kind.is_machine() { "destroy" } else { "delete" };
            return Err(CloudError::Refused(format!("cannot {word} {instance}: {why}")));
        }
        // Its wish is written only while the record is this.
        if !chosen.means(known.record.as_ref(), known.request.record(), known.status.record()) {
            return Err(chosen.spared(instance));
        }
        if kind.is_machine() && kind_of(&known) == Some(Workload::Volume) {
            let why =
                "it is a volume: `eschedule volume delete` deletes one, with all that was written on it";
            return Err(CloudError::Refused(format!("cannot destroy {instance}: {why}")));
        }
        // Of what nobody can tell any more what it was, too: its node does not know where it has no record either.
        let is_forgotten = known.record.is_none() && matches!(known.request, Read::Absent);
        let is_machine = kind_of(&known) == Some(Workload::Machine);
        let is_guarded = !planted("volume-deleted-in-use");
        let mut stands_on = Vec::new();
        if is_guarded && (!is_machine || is_forgotten) {
            stands_on = refuse_missed(cloud, &known).await?;
        }
        if is_guarded && !is_machine {
            refuse_elsewhere(cloud, &known, "destroy").await?;
        }
        let giver = giver(cloud, &known).await?;
        let doomed = match &giver {
            Some(Giver::Has { node, alive, .. }) => Doomed::By { node: *node, alive: *alive },
            Some(Giver::HasNot { .. }) | None => Doomed::By { node: known.node, alive: known.node_alive },
        };
        // It is written already.
        if known.is_doomed() && known.record.is_none() {
            return Ok(doomed);
        }
        let member = match &known.record {
            Some(record) => cloud.keys.membership(record),
            // Its place in a group stayed when its record went.
            None => member_key(cloud, known.node, instance).await?,
        };
        let (txn, generation) = wish(cloud, &known, giver, member)?;
        let asked = Asked::new(instance, known.node, ActionVerb::Delete, cloud.host.now(), generation);
        let mark = asked.mark();
        let txn = note_end(cloud, asked, txn.when_all(stands_on)).await?;
        // Where the outcome is unknown the next look tells it.
        match cloud.store.txn(txn).await {
            Ok(outcome) if outcome.succeeded => return Ok(doomed),
            Ok(_) => {}
            Err(ec_store::StoreError::Unknown(_)) => unheard.note(mark, doomed),
            Err(error) => return Err(error.into()),
        }
    }
    Err(CloudError::Busy(format!("the request of {instance} keeps changing; try again")))
}

/// An error where another node of the same storage tells that it has the disk of a volume, whatever is told of the one that is asked
/// for it: what is deleted where it is not would come back from there, and what is made anew there would be two.
pub(crate) async fn refuse_elsewhere(cloud: &Cloud, known: &Known, word: &str) -> CloudResult<()> {
    // All statuses are looked through, which is not done where nobody else can have it.
    if known.node_alive && storage_of(cloud, known.node).await?.is_none() {
        return Ok(());
    }
    let (keys, instance) = (&cloud.keys, known.instance);
    for key in cloud.store.keys(&keys.all_statuses()).await? {
        let parsed = keys.parse_status(&key).ok();
        let Some((node, _)) = parsed.filter(|(node, of)| *of == instance && *node != known.node) else {
            continue;
        };
        let told = cloud.store.get(&key).await?.0.and_then(|pair| decode::<Status>(&pair.value).ok());
        if told.is_some_and(|told| told.state == State::Unclaimed) {
            return Err(CloudError::Refused(format!(
                "cannot {word} {instance}: node {node} has its disk, and another is asked for it: first `eschedule heal {instance}`"
            )));
        }
    }
    Ok(())
}

/// Writes the wish, and takes record, name and place in a group (`member`) away, with the generation that it is. What is on its way
/// from one node to another is to be destroyed by both: wherever its disk is, it goes.
fn wish(
    cloud: &Cloud,
    known: &Known,
    giver: Option<Giver>,
    member: Option<String>,
) -> CloudResult<(Txn, u64)> {
    let keys = &cloud.keys;
    let key = keys.request(known.node, known.instance);
    let (mut request, unchanged) = match &known.request {
        Read::Here(request, revision) => {
            let mut doc = known.request_doc()?;
            if request.desired != Desired::Destroyed {
                doom(cloud, &mut doc.record);
            }
            (doc, Compare::Unchanged(key.clone(), *revision))
        }
        // After an ERROR, of a guest that nobody claims, or when somebody deleted the key: what is left is cleaned
        // up the same way.
        Read::Absent => (Doc::new(gone(cloud, known)), Compare::Absent(key.clone())),
        Read::Unreadable(why) => {
            return Err(CloudError::Unreadable(format!(
                "the request of {} at {key} cannot be read, so nothing was changed: {why}; {MENDS}",
                known.instance
            )));
        }
    };
    let mut of_giver = Txn::new();
    match giver {
        // What cannot be read is not touched: what it holds stays held.
        Some(Giver::Has { node, order, .. }) => {
            if let Ok(mut doc) = Doc::<Request>::decode(&order.value)
                && doc.record.desired == Desired::Active
            {
                doom(cloud, &mut doc.record);
                let key = keys.request(node, known.instance);
                of_giver =
                    of_giver.when(Compare::Unchanged(key.clone(), order.mod_revision)).put(key, doc.encode());
            }
        }
        Some(Giver::HasNot { node }) => {
            request.record.handover = None;
            of_giver = of_giver.when(Compare::Absent(keys.request(node, known.instance)));
        }
        None => {}
    }
    let record = keys.instance(known.instance);
    // What goes with the record is named by it: one that came, or was changed, since it was looked for has other names.
    let mut txn = of_giver
        .when(Compare::Unchanged(record.clone(), known.record_revision()))
        .put(key, request.encode())
        .delete(record);
    if !planted("wish-not-compared") {
        txn = txn.when(unchanged);
    }
    let Request { name, project, .. } = &request.record;
    if let Some(name) = name
        && !planted("name-kept")
    {
        txn = txn.delete(keys.name(request.record.kind, project, name, known.instance));
    }
    if let Some(member) = member {
        txn = txn.delete(member);
    }
    Ok((txn, request.record.generation))
}

/// Has a request say that it is to go.
fn doom(cloud: &Cloud, order: &mut Request) {
    order.generation = order.generation.saturating_add(1);
    order.desired = Desired::Destroyed;
    order.request_id = cloud.request_id;
}

fn gone(cloud: &Cloud, known: &Known) -> Request {
    let (record, status) = (known.record.as_ref(), known.status.record());
    let named = record.and_then(|record| record.name.clone());
    let assigned = record.and_then(|record| record.assigned).map(|assigned| assigned.epoch);
    Request {
        instance: known.instance,
        kind: record.map(|record| record.kind).or(status.map(|status| status.kind)).unwrap_or_default(),
        volumes: Vec::new(),
        epoch: assigned.or_else(|| status.map(|status| status.epoch)).unwrap_or_default(),
        generation: record.map_or(0, |record| record.generation).saturating_add(1),
        desired: Desired::Destroyed,
        name: named.or_else(|| status.and_then(|status| status.name.clone())),
        project: record.map_or(&cloud.project, |record| &record.project).clone(),
        user: cloud.user.clone(),
        power: record.map(|record| record.power.clone()).unwrap_or_default(),
        restart: Restart::No,
        rebuild: None,
        rescue: None,
        resize: None,
        handover: None,
        spec: None,
        access: None,
        request_id: cloud.request_id,
        created_at: record.map_or_else(|| cloud.host.now(), |record| record.created_at),
    }
}

/// What a killed command left, when it is old enough to be that. Whether it was.
async fn take_away(cloud: &Cloud, record: Instance, revision: Revision) -> CloudResult<bool> {
    if let Some(left) = young_for(cloud, &record) {
        let verb = match record.kind {
            Workload::Machine => "destroy",
            Workload::Volume => "delete",
        };
        return Err(CloudError::Busy(format!(
            "{} {} is being placed since {}; if its command was killed, {verb} it again in {} s",
            record.kind.word(),
            record.instance,
            record.created_at,
            left.as_secs()
        )));
    }
    sweep(cloud, record, revision).await
}
