//! Volumes as people and scripts see them.

use std::collections::{BTreeMap, HashMap};

use ec_model::{ImageRef, Instance, InstanceId, NodeId, RequestId, State, Status, Workload, decode};
use ec_plan::volumes::NOT_HANDED_OVER;
use jiff::Timestamp;
use serde::Serialize;

use super::{
    DISK,
    holder::{Holder, given_to, held_by},
    no_volume, not_a_volume,
};
use crate::{
    Cloud, CloudError, CloudResult,
    lookup::{Found, Known, find},
    moving::{Giver, giver},
    view::{View, list_of},
};

/// What people and scripts see of a volume.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VolumeView {
    /// Which.
    pub volume: InstanceId,
    /// What it is called.
    pub name: Option<String>,
    /// One of [`STATUSES`](Self::STATUSES).
    pub status: String,
    /// How large it is, or shall be, in GiB.
    pub size_gb: Option<u64>,
    /// The node on whose storage it lies.
    pub node: Option<NodeId>,
    /// Whether that node's agent is alive.
    pub node_alive: bool,
    /// The machine that has it, or is about to.
    pub instance: Option<InstanceId>,
    /// What that machine's domain calls it.
    pub device: Option<String>,
    /// The image that it was made of.
    pub image: Option<String>,
    /// The volume, or the instance, of whose disk it was made a copy.
    pub copy_of: Option<InstanceId>,
    /// Which of both that is.
    #[serde(skip)]
    pub copy_of_kind: Option<Workload>,
    /// Whether it is a snapshot of that, and stays as it was made.
    pub snapshot: bool,
    /// The volumes that were copied at the same moment as the disk of that instance, and lie beside it.
    pub beside: Vec<InstanceId>,
    /// The project that it is accounted to, where that is told.
    pub project: Option<String>,
    /// What its user tells it apart by.
    pub labels: BTreeMap<String, String>,
    /// When it was asked for, where that is told.
    pub created_at: Option<Timestamp>,
    /// Why it is so.
    pub reason: Option<String>,
    /// What its agent is about with it, or waits for; or what is under way with who has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
    /// Why nothing is done to it; left out where it is not locked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locked: Option<String>,
    /// The id of the command that wrote what is wanted of it last; left out where an older release did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
}

impl VolumeView {
    /// What a volume's status may be; `changing` where it grows, or is made anew.
    pub const STATUSES: [&str; 8] =
        ["creating", "available", "in-use", "changing", "deleting", "error", "unclaimed", "unknown"];
}

/// A volume, and all that is known of it.
///
/// # Errors
/// There is no such volume.
pub async fn volume(cloud: &Cloud, volume: InstanceId) -> CloudResult<VolumeView> {
    let found = find(cloud, volume).await.map_err(|error| no_volume(error, volume))?;
    let mut view = View::found(&found);
    if view.kind != Workload::Volume {
        return Err(not_a_volume(volume));
    }
    let record = match found {
        Found::Placed(known) => {
            view.reason = not_handed_over(cloud, &known).await?.or(view.reason);
            known.record_as_made()
        }
        Found::Unplaced(record, _) => Some(*record),
    };
    let mut holder = None;
    if let Some(attached) = given_to(cloud, volume, record.as_ref()).await? {
        holder = match find(cloud, attached).await {
            Ok(Found::Placed(machine)) => held_by(&machine, volume),
            Ok(Found::Unplaced(..)) | Err(CloudError::NotFound(_)) => None,
            Err(error) => return Err(error),
        };
    }
    Ok(told(view, record.as_ref(), holder))
}

/// Why a volume is not there yet that is waited for on another node, as the node tells that had it; none where it is not waited for.
async fn not_handed_over(cloud: &Cloud, known: &Known) -> CloudResult<Option<String>> {
    let waits = known.status.record().filter(|status| {
        [&status.reason, &status.doing].into_iter().flatten().any(|told| told.starts_with(NOT_HANDED_OVER))
    });
    let (Some(waits), Some(giver)) = (waits, giver(cloud, known).await?) else { return Ok(None) };
    let volume = known.instance;
    Ok(match giver {
        Giver::Has { node, alive: false, .. } => {
            Some(format!("node {node} has yet to hand it over, and is not alive"))
        }
        Giver::Has { node, .. } => {
            let told = cloud.store.get(&cloud.keys.status(node, volume)).await?.0;
            let doing = told.and_then(|pair| decode::<Status>(&pair.value).ok()?.doing);
            doing.map(|doing| format!("node {node} has yet to hand it over: {doing}"))
        }
        // At first it may be on its way.
        Giver::HasNot { .. } if waits.state != State::Error => None,
        Giver::HasNot { node } => Some(format!(
            "node {node} has let go of it, and its disk has not come: where it is in neither node's directory it was gone before, and `eschedule volume delete {volume}` takes away what is left"
        )),
    })
}

/// Every volume of every node, by node and name.
///
/// # Errors
/// etcd does not answer.
pub async fn volumes(cloud: &Cloud) -> CloudResult<Vec<VolumeView>> {
    let (views, machines) = list_of(cloud, Workload::Volume).await?;
    let mut holders: HashMap<InstanceId, Vec<Holder>> = HashMap::new();
    for (machine, it) in machines {
        for has in it.volumes.iter().chain(&it.told.volumes) {
            let wanted = it.is_asked_for.then_some(it.volumes.as_slice());
            let holder = Holder::of(machine, has, wanted, &it.told);
            holders.entry(has.volume).or_default().push(holder);
        }
    }
    let told_of_one = |mut view: View| {
        let (record, holders) = (view.record.take(), holders.get(&view.instance));
        // Its record names the one that has it; of one that etcd lost only machines tell.
        let is_it = |machine| record.as_ref().is_none_or(|record| record.attached == Some(machine));
        let holder = holders.and_then(|all| all.iter().find(|holder| is_it(holder.instance))).cloned();
        told(view, record.as_deref(), holder)
    };
    Ok(views.into_iter().map(told_of_one).collect())
}

pub(crate) fn told(view: View, record: Option<&Instance>, holder: Option<Holder>) -> VolumeView {
    // Of one that is there its agent does nothing else that it would tell. That it has yet to hear of another name, say, changes no disk;
    // and of a wish that does the state tells.
    let is_changing = view.status.as_ref().is_some_and(|status| status.doing.is_some());
    let status = match State::named(&view.state) {
        Some(State::Active | State::Rebuilding | State::Resizing) if holder.is_some() => "in-use",
        Some(State::Rebuilding | State::Resizing) => "changing",
        Some(State::Active) if is_changing => "changing",
        Some(State::Active) => "available",
        Some(State::Scheduled | State::Preparing) => "creating",
        Some(State::Destroying) => "deleting",
        Some(State::Unclaimed) => "unclaimed",
        Some(State::Error) => "error",
        _ => "unknown",
    };
    let (of_holder, why_not) =
        holder.as_ref().map_or((None, None), |holder| (holder.doing, holder.reason.clone()));
    // That its agent is about its disk comes first; that it has yet to hear of who has it says less.
    let of_holder = of_holder.filter(|_| !is_changing);
    let (instance, device) = holder.map(|holder| (holder.instance, holder.device)).unzip();
    let made_of = record.map(|record| &record.spec.image).filter(|image| !image.is_none());
    let copied = made_of.and_then(ImageRef::copied);
    let image = made_of.filter(|_| copied.is_none());
    VolumeView {
        volume: view.instance,
        name: view.name,
        status: status.to_owned(),
        size_gb: view.resources.get(DISK).copied(),
        node: view.node,
        node_alive: view.node_alive,
        instance,
        device,
        image: image.map(|image| image.name.clone().unwrap_or_else(|| image.told().to_owned())),
        copy_of: copied.as_ref().map(|copied| copied.disk),
        copy_of_kind: copied.as_ref().map(|copied| copied.kind),
        snapshot: record.is_some_and(|record| record.spec.is_snapshot()),
        beside: copied.map(|copied| copied.beside).unwrap_or_default(),
        project: view.project,
        labels: view.labels,
        created_at: view.created_at,
        reason: view.reason.or(why_not),
        doing: of_holder.map(str::to_owned).or(view.doing),
        locked: record.and_then(|record| record.locked.clone()),
        request_id: view.request_id.or_else(|| record.and_then(|record| record.request_id)),
    }
}
