//! Sizes that users ask for, and what has to be claimed for them.
//!
//! ```text
//!   claimed:  old ──▶ the greater of both ───────────────────────────────▶ new ──▶ …
//!   asked:            resize ─▶ RESIZING ─▶ VERIFY_RESIZE ─▶ confirmed
//!                                  │ failed       └────────▶ reverted ─▶ RESIZING ─▶ old, with the larger disk
//!                                  └─────────────▶ (it has its old size) ─▶ reverted
//! ```
//!
//! The new claim comes first, and what is not needed is given back last, when the agent has told that it is so.

use std::collections::BTreeMap;

use ec_model::{
    Desired, Extent, Instance, NodeId, Request, Resized, ResourceQuery, Resources, Status, Workload, greater,
};

use crate::verbs::{Situation, Verb, Verdict, Wish};

/// What is asked of a resize that there is not.
pub(crate) const NOT_RESIZED: &str = "there is no resize of it that could be confirmed or reverted";

const DISK: &str = "DISK_GB";

/// How far a wish for another size is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resizing {
    /// Its agent has yet to tell what came of it.
    UnderWay,
    /// It has its new size, which its user has neither confirmed nor reverted.
    Done,
    /// It has its old size.
    Failed,
}

/// How far the last wish for another size is; nothing where that is over.
pub fn resized(instance: &Instance, request: &Request, status: &Status) -> Option<Resizing> {
    if under_way(request, Some(status)) {
        return Some(Resizing::UnderWay);
    }
    instance.before.as_ref()?;
    let failed = status.resized.as_ref().is_some_and(|was| was.failed.is_some());
    Some(if failed { Resizing::Failed } else { Resizing::Done })
}

/// What came of the last wish for another size, where that failed: then it is not as large as its record says.
pub fn missed<'a>(request: &Request, status: Option<&'a Status>) -> Option<&'a Resized> {
    let wished_at = request.resize.map(|wish| wish.wished_at);
    let told = status.and_then(|status| status.resized.as_ref());
    told.filter(|was| was.failed.is_some() && Some(was.wished_at) == wished_at)
}

/// Whether its agent has yet to tell what came of its last wish for a size.
pub fn under_way(request: &Request, status: Option<&Status>) -> bool {
    let told = status.and_then(|status| status.resized.as_ref()).map(|was| was.wished_at);
    told < request.resize.map(|wish| wish.wished_at)
}

/// What becomes of a wish for a size, beside what the table says of it.
pub(crate) fn judge(
    verb: &Verb,
    instance: &Instance,
    request: &Request,
    status: Option<&Status>,
    situation: Situation,
) -> Option<Verdict> {
    let is_elsewhere = matches!(
        situation,
        Situation::Rescuing | Situation::Rescued | Situation::RescuedOff | Situation::Unrescuing
    );
    match verb {
        // Both at once can only come of an etcd that was put back.
        Verb::Confirm | Verb::Revert if instance.before.is_some() && is_elsewhere => Some(Verdict::Refuse(
            format!("it is {situation}; `eschedule unrescue` boots it from its own disk first"),
        )),
        Verb::Resize(extent) if matches!(situation, Situation::Running | Situation::Stopped) => {
            resize(extent, instance, request, status)
        }
        // It failed, or its guest is in ERROR: then the table knows nothing of its size.
        Verb::Revert
            if instance.before.is_some()
                && !matches!(situation, Situation::Resizing | Situation::Rebuilding) =>
        {
            Some(Verdict::Do(Wish::Revert))
        }
        // To go back failed, and is tried again.
        Verb::Revert
            if instance.before.is_none()
                && matches!(situation, Situation::Running | Situation::Stopped | Situation::Error)
                && missed(request, status).is_some() =>
        {
            Some(Verdict::Do(Wish::Revert))
        }
        Verb::Confirm if instance.before.is_some() && !is_of_sizes(situation) => {
            let resized = status.and_then(|status| resized(instance, request, status));
            Some(Verdict::Refuse(if resized == Some(Resizing::Done) {
                // Whether it is well with it nobody can see.
                format!("it is {situation}; ask again when it is not, `eschedule resize --revert` goes back")
            } else {
                "it has not its new size; `eschedule resize --revert` gives back what is claimed for it"
                    .to_owned()
            }))
        }
        _ => None,
    }
}

fn is_of_sizes(situation: Situation) -> bool {
    matches!(situation, Situation::Resizing | Situation::Resized)
}

/// What becomes of a wish that a volume is as large as this. It is done at once, so there is nothing to confirm.
pub(crate) fn extend(
    extent: &Extent,
    instance: &Instance,
    request: &Request,
    status: Option<&Status>,
) -> Verdict {
    // A node that cannot read its record of it does not know how large it is.
    let told = missed(request, status).map(|was| &was.resources).filter(|was| was.contains_key(DISK));
    let takes = told.unwrap_or(&instance.spec.resources);
    let (has, asked) = (of_disk(takes), of_disk(&extent.resources));
    if extent.resources.keys().any(|class| class != DISK) {
        return Verdict::Refuse(format!("it is a volume, which has {DISK} alone"));
    }
    match asked.cmp(&has) {
        std::cmp::Ordering::Less => {
            Verdict::Refuse(format!("it has {has} GB, and never shrinks: ask for more than that"))
        }
        std::cmp::Ordering::Equal if missed(request, status).is_none() => {
            let has_it = if under_way(request, status) { "is to have" } else { "has" };
            Verdict::Already(format!("it {has_it} {has} GB already"))
        }
        // Of one that could not grow: to stay as it is takes that wish back.
        std::cmp::Ordering::Equal | std::cmp::Ordering::Greater => Verdict::Do(Wish::Resize(extent.clone())),
    }
}

/// A disk never shrinks, whatever else is asked for.
fn resize(
    extent: &Extent,
    instance: &Instance,
    request: &Request,
    status: Option<&Status>,
) -> Option<Verdict> {
    let spec = &instance.spec;
    let has_it = instance.before.is_none() && missed(request, status).is_none();
    if has_it && extent.query == spec.query && extent.resources == spec.resources {
        return Some(Verdict::Already("it has that size already".to_owned()));
    }
    let (has, asked) = (disk(instance, status), of_disk(&extent.resources));
    (asked < has).then(|| {
        let asked =
            if asked == 0 { "none is asked for".to_owned() } else { format!("{asked} are asked for") };
        Verdict::Refuse(format!(
            "its disk has {has} GB, of which {asked}, and a disk never shrinks: ask for {DISK}:{has} at least"
        ))
    })
}

/// How large a disk is, in GiB, of what takes this.
pub fn of_disk(resources: &Resources) -> u64 {
    resources.get(DISK).copied().unwrap_or(0)
}

/// How large its disk is: as its agent told last, where that may be otherwise than it was asked for.
fn disk(instance: &Instance, status: Option<&Status>) -> u64 {
    let asked = of_disk(&instance.spec.resources);
    let Some(before) = &instance.before else { return asked };
    let told = status.and_then(|status| status.resized.as_ref());
    told.map_or(asked, |told| of_disk(&told.resources)).max(of_disk(&before.resources))
}

/// As large as it was before, but for its disk, which may have been grown and holds what the guest wrote.
pub fn reverted(instance: &Instance, status: Option<&Status>) -> Option<Extent> {
    let mut extent = instance.before.clone()?;
    let has = disk(instance, status);
    if has > of_disk(&extent.resources) {
        extent.resources.insert(DISK.to_owned(), has);
        // So that it is placed again with the disk that it has.
        if let Ok(query) = ResourceQuery::parse(&extent.query).and_then(|query| query.with(DISK, has)) {
            extent.query = query.text().to_owned();
        }
    }
    Some(extent)
}

/// What an instance has to have in placement, of each class; nothing while nobody can tell, since it is on its way.
pub fn needed(instance: &Instance, request: &Request, status: Option<&Status>) -> Option<Resources> {
    let spec = match (instance.kind, missed(request, status)) {
        // There is nothing that would be reverted. Whoever asks once more claims it first, and so does a node where it is tried anew.
        (Workload::Volume, Some(was)) => &was.resources,
        _ => &instance.spec.resources,
    };
    let measures: &[&str] = match instance.kind {
        Workload::Machine => &["VCPU", "MEMORY_MB"],
        Workload::Volume => &[DISK],
    };
    let is_measured = measures.iter().all(|class| spec.contains_key(*class));
    let is_told = match status {
        Some(status) => resized(instance, request, status) != Some(Resizing::UnderWay),
        None => request.resize.is_none(),
    };
    let told = status.and_then(|status| status.resized.as_ref()).map(|told| &told.resources);
    // Its node could not read how large it is.
    let is_unknown = told.is_some_and(Resources::is_empty);
    if request.desired != Desired::Active || !is_measured || !is_told || is_unknown {
        return None;
    }
    let before = instance.before.as_ref().map(|before| &before.resources);
    Some([before, told].into_iter().flatten().fold(spec.clone(), |needed, also| greater(&needed, also)))
}

/// By provider.
pub type Allocations = BTreeMap<NodeId, Resources>;

/// The allocations with this much of each class in all, from the providers that they are from; of classes that are not
/// named, as they are. What is new comes from the provider of the processors.
///
/// # Errors
/// A class is taken from several providers, so that nobody can tell of which more is meant.
pub fn placed(held: &Allocations, wanted: &Resources) -> Result<Allocations, String> {
    let mut placed = held.clone();
    for (class, amount) in wanted {
        let from: Vec<NodeId> =
            held.iter().filter(|(_, amounts)| amounts.contains_key(class)).map(|(node, _)| *node).collect();
        let total: u64 = held.values().filter_map(|amounts| amounts.get(class)).sum();
        let provider = match from.as_slice() {
            _ if total == *amount => continue,
            [only] => *only,
            [] => {
                let by_processors = held.iter().find(|(_, amounts)| amounts.contains_key("VCPU"));
                *by_processors.or(held.iter().next()).ok_or("it has no allocation")?.0
            }
            [_, _, ..] => return Err(format!("its {class} is of several resource providers")),
        };
        let amounts = placed.entry(provider).or_default();
        match amount {
            0 => _ = amounts.remove(class),
            _ => _ = amounts.insert(class.clone(), *amount),
        }
    }
    Ok(placed)
}

/// Of all of them together.
pub fn total(held: &Allocations) -> Resources {
    let mut total = Resources::new();
    for (class, amount) in held.values().flatten() {
        let sum = total.entry(class.clone()).or_default();
        *sum = sum.saturating_add(*amount);
    }
    total
}

/// What more than `held` is wanted, by class.
pub fn more(held: &Resources, wanted: &Resources) -> Resources {
    let more = wanted
        .iter()
        .map(|(class, amount)| (class.clone(), amount.saturating_sub(held.get(class).copied().unwrap_or(0))));
    more.filter(|(_, amount)| *amount > 0).collect()
}

#[cfg(test)]
mod tests;
