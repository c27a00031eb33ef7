//! Another size for a guest that is here.

use std::sync::Arc;

use ec_hypervisor::{DomainSize, HypervisorError};
use ec_metadata::InstanceRecord;
use ec_model::{Attachment, Resized, Resources, RunState, Size, State, Workload, greater};
use ec_placement_client::PlacementError;
use ec_plan::{
    engine::{Change, Held},
    sizes::{placed, total},
    status,
};
use jiff::Timestamp;

use super::{
    Stop, Worker,
    guest::{spec_of, unrecorded},
    pause_for_test_named,
};
use crate::look::ask_placement;

/// Another writer changed the allocations in between so often: later, then.
const TRIES: usize = 8;

const DISK: &str = "DISK_GB";

/// One that is getting another size.
struct Begun {
    record: InstanceRecord,
    is: DomainSize,
    /// What it is to take.
    target: Resources,
    /// What is to be noted when it does.
    resized: Option<Resized>,
}

impl Worker {
    /// Has its claim cover what it takes and is to take. What it holds beside stays.
    pub(super) async fn cover(&mut self) -> Result<(), Stop> {
        let (instance, record) = (self.job.instance, self.own_record().await?);
        let is_rescued = record.rescued.as_ref().is_some_and(|rescued| rescued.failed.is_none());
        // What it is to take waits for the end of its rescue, and is not given up for want of room before.
        let target = if is_rescued { record.resources.clone() } else { self.target(&record)? };
        let wanted = greater(&record.resources, &target);
        for _ in 0..TRIES {
            let held = self.placement().allocations(instance).await?;
            let Some(held) = held.filter(|_| !self.cancel.is_cancelled()) else { break };
            let larger = greater(&total(&held.allocations), &wanted);
            let allocations = placed(&held.allocations, &larger).map_err(Stop::Failed)?;
            if allocations == held.allocations {
                break;
            }
            match self.placement().reallocate(instance, &held, &allocations).await {
                Ok(()) => {
                    tracing::info!(amounts = %serde_json::json!(wanted), "claimed all of what it takes");
                    break;
                }
                Err(PlacementError::Conflict(why)) => {
                    let now = self.placement().allocations(instance).await?;
                    if now.as_ref().map(|now| now.generation) != Some(held.generation) {
                        continue;
                    }
                    let why = format!("placement has no room for all that it takes: {why}");
                    // What it has it keeps, and only what it is to have can be given up.
                    let grows = target != record.resources;
                    return Err(if grows { Stop::Failed(why) } else { Stop::Retry(why) });
                }
                Err(error) => return Err(error.into()),
            }
        }
        let held = ask_placement(&self.parts, instance, self.request_id()).await?;
        let covers = matches!(&held, Held::Here(amounts) if Size::of(amounts).covers(Size::of(&wanted)));
        self.done.push(Change::Allocation(held));
        if covers { Ok(()) } else { Err(Stop::Retry("its allocation keeps changing".to_owned())) }
    }

    /// Looks what it is and is to be, and grows its disk.
    async fn begin_resize(&mut self) -> Result<Begun, Stop> {
        let record = self.own_record().await?;
        let target = self.target(&record)?;
        let wished_at = self.resized_at(&record)?;
        self.take_permit().await?;
        let is = self.size().await?;
        self.touched_hypervisor = true;
        self.grow_disk(is, &record, &target).await?;
        let resized =
            wished_at.map(|wished_at| Resized { wished_at, failed: None, resources: target.clone() });
        Ok(Begun { record, is, target, resized })
    }

    /// Gives the guest that runs what it is to have beside what it has. Where it cannot have that so, what it has stays
    /// until it ends, which is told.
    pub(super) async fn grow(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let Begun { record, target, resized, .. } = self.begin_resize().await?;
        let record = InstanceRecord { growing: Some(target.clone()), ..record };
        self.put_record(record.clone()).await?;
        pause_for_test_named("before-grow-guest");
        let domain = self.domain_of(&target).await?;
        let parts = Arc::clone(&self.parts);
        match self.of_guest(parts.hypervisor.grow(&domain)).await? {
            Err(HypervisorError::Failed { detail, .. }) => {
                tracing::info!(reason = detail, "it cannot have its new size while it runs");
                return self.announce(State::Resizing, None).await;
            }
            grown => grown?,
        }
        self.permit = None;
        pause_for_test_named("before-note-size");
        // It runs with it, which shows that it can.
        let (resources_before, growing) = (None, None);
        let record = InstanceRecord { resources: target, resources_before, growing, resized, ..record };
        self.put_record(record).await?;
        tracing::info!("RESIZED INSTANCE {instance} WHILE IT RAN");
        Ok(())
    }

    async fn grow_disk(
        &self,
        is: DomainSize,
        record: &InstanceRecord,
        target: &Resources,
    ) -> Result<(), Stop> {
        let bytes = target.get(DISK).copied().unwrap_or(0).saturating_mul(1 << 30);
        if !self.parts.settings.resize || bytes == 0 {
            return Ok(());
        }
        if is.disk_bytes > bytes && !record.resources.contains_key(DISK) {
            let gb = is.disk_bytes.div_ceil(1 << 30);
            return Err(Stop::Failed(format!(
                "its disk is as large as its image, {} bytes: ask for {DISK}:{gb} at least",
                is.disk_bytes
            )));
        }
        if is.disk_bytes < bytes {
            self.parts.hypervisor.grow_disk(self.job.instance, bytes).await?;
        }
        Ok(())
    }

    /// Grows its disk, and defines its domain anew where that is another.
    pub(super) async fn resize(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let Begun { record, is, target, resized } = self.begin_resize().await?;
        let (was, now) = (Size::of(&record.resources), Size::of(&target));
        let is_other = (was.vcpus, was.memory_mb) != (now.vcpus, now.memory_mb);
        // A guest whose disk alone grows may be up, as somebody by hand may have made it.
        let is_defined = !is_other && record.growing.is_none();
        // Whoever finds it after a crash, or after the wish was lost, measures it again.
        let record = InstanceRecord { growing: Some(target.clone()), ..record };
        self.put_record(record.clone()).await?;
        pause_for_test_named("before-redefine");
        if !is_defined {
            self.define_as(Some(is), &target).await?;
        }
        self.permit = None;
        // That its disk is larger needs no start.
        let resources_before =
            is_other.then(|| record.resources_before.clone().unwrap_or(record.resources.clone()));
        pause_for_test_named("before-note-size");
        let growing = None;
        self.put_record(InstanceRecord { resources: target, resources_before, growing, resized, ..record })
            .await?;
        tracing::info!("RESIZED INSTANCE {instance}");
        Ok(())
    }

    /// It cannot be so large: it goes on as large as it was, with the disk that it has.
    pub(super) async fn give_up_resize(&mut self, reason: String) -> Result<(), Stop> {
        tracing::warn!(reason, "it cannot have its new size, and keeps the old one");
        let record = self.own_record().await?;
        let wished_at = self.resized_at(&record)?;
        if record.growing.is_some() && self.status.known().map(|status| status.state) != Some(State::Resizing)
        {
            // It may have more already, which it loses when it ends.
            return self.announce(State::Resizing, None).await;
        }
        let observed = self.parts.hypervisor.observe(self.job.instance).await?;
        let has_disk = observed.volume || Attachment::root_of(&self.wanted_volumes()).is_some();
        // Of a disk that is gone, or is none any more, nobody knows better than the record.
        let is = match has_disk {
            false => None,
            true => match self.size().await {
                Err(Stop::Failed(_)) => None,
                size => Some(size?),
            },
        };
        let is_saved = observed.domain == Some(RunState::Saved);
        let old = record.resources_before.clone().unwrap_or(record.resources.clone());
        self.touched_hypervisor = true;
        // For good or not: what it is defined as must be known. Before it is started without its memory it is seen to again.
        if has_disk && !is_saved {
            self.define_as(is, &old).await?;
        }
        let mut resources = old.clone();
        if let Some(is) = is {
            let Size { vcpus, memory_mb, .. } = Size::of(&old);
            // Its memory was saved with what it had been given by then.
            let is_or_was = if is_saved { is } else { DomainSize { vcpus, memory_mb, ..is } };
            resources = self.as_large_as(is_or_was, &old);
            // One that was as large as its image was grown before the rest failed.
            let asked = self.target(&record)?.get(DISK).copied().unwrap_or(0);
            if !resources.contains_key(DISK) && asked > 0 && is.disk_bytes == asked.saturating_mul(1 << 30) {
                resources.insert(DISK.to_owned(), asked);
            }
        }
        let resized = wished_at.map(|wished_at| Resized {
            wished_at,
            failed: Some(reason),
            resources: resources.clone(),
        });
        let (resources_before, growing) = (None, None);
        self.put_record(InstanceRecord { resources, resources_before, growing, resized, ..record }).await
    }

    /// Tells what the node's record has, and that it is well so; where that cannot be read, that it was not done.
    pub(super) async fn note_resize(&mut self) -> Result<(), Stop> {
        let wished = self.job.request.as_ref().and_then(|request| request.resize).map(|wish| wish.wished_at);
        let resized = match self.looked_at().await? {
            Ok(record) => {
                let noted = record.resized.clone();
                let last = wished.max(noted.as_ref().map(|noted| noted.wished_at));
                let failed =
                    noted.filter(|noted| Some(noted.wished_at) == last).and_then(|noted| noted.failed);
                let resources = record.resources.clone();
                let resized = last.map(|wished_at| Resized { wished_at, failed, resources });
                if record.resized != resized || record.resources_before.is_some() {
                    let resized = resized.clone();
                    self.put_record(InstanceRecord { resized, resources_before: None, ..record }).await?;
                }
                resized
            }
            Err(facts) => wished.map(|wished_at| Resized {
                wished_at,
                failed: Some(unrecorded(facts).to_owned()),
                resources: Resources::new(),
            }),
        };
        let status = status::resized(&self.subject, self.status.known(), resized, self.parts.host.now());
        self.write(status).await
    }

    /// What it is to take: as its request has it, with the disk that it has where that is larger; what it has, where that
    /// was given up.
    fn target(&self, record: &InstanceRecord) -> Result<Resources, Stop> {
        let request = self.request()?;
        let wished = request.resize.map(|wish| wish.wished_at);
        let noted = record.resized.as_ref();
        let is_of_it = |at| wished.is_none_or(|wished| wished == at);
        let given_up = noted.is_some_and(|noted| noted.failed.is_some() && is_of_it(noted.wished_at));
        let spec = &spec_of(&request)?.resources;
        let is_sized = request.kind == Workload::Volume || is_measured(spec);
        if given_up || !is_sized || (wished.is_none() && noted.is_none()) {
            return Ok(record.resources.clone());
        }
        let mut target = spec.clone();
        if let Some(has) = record.resources.get(DISK) {
            let asked = target.entry(DISK.to_owned()).or_default();
            *asked = (*asked).max(*has);
        }
        Ok(target)
    }

    /// Which wish it is that comes to its end; with an older etcd, which there is none of, the last that did, where one did.
    fn resized_at(&self, record: &InstanceRecord) -> Result<Option<Timestamp>, Stop> {
        let wished = self.request()?.resize.map(|wish| wish.wished_at);
        Ok(wished.or(record.resized.as_ref().map(|noted| noted.wished_at)))
    }

    /// Before it is started: a call that was given up, and came late, or somebody by hand may have made its domain of another size
    /// than is claimed. The wish may be lost since then.
    pub(super) async fn be_as_noted(&self) -> Result<(), Stop> {
        if let Some(record) = self.record().await?.filter(|record| is_measured(&record.resources))
            && let Some(is) = self.parts.hypervisor.size(self.job.instance).await?
        {
            let Size { vcpus, memory_mb, .. } = Size::of(&record.resources);
            let is_other = (is.vcpus, is.memory_mb) != (vcpus, memory_mb);
            // From memory that was saved it goes on as large as it was then, however it is defined.
            if is_other
                && self.parts.hypervisor.observe(self.job.instance).await?.domain == Some(RunState::Saved)
            {
                return Ok(());
            }
            if self.define_as(Some(is), &record.resources).await? {
                tracing::warn!(
                    "its domain was defined with {} processors and {} MiB of memory, and has {vcpus} and {memory_mb} again, which are claimed for it",
                    is.vcpus,
                    is.memory_mb
                );
            }
        }
        Ok(())
    }

    async fn size(&self) -> Result<DomainSize, Stop> {
        let size = self.parts.hypervisor.size(self.job.instance).await?;
        let has_own = Attachment::root_of(&self.wanted_volumes()).is_none();
        size.filter(|size| size.disk_bytes > 0 || !has_own)
            .ok_or_else(|| Stop::Retry("its domain or its disk is gone".to_owned()))
    }

    /// Defines its domain with the processors and the memory of these amounts, where it is not known to have them; whether it was
    /// not.
    async fn define_as(&self, is: Option<DomainSize>, amounts: &Resources) -> Result<bool, Stop> {
        let domain = self.domain_of(amounts).await?;
        let is_other = is.map(|is| (is.vcpus, is.memory_mb)) != Some((domain.vcpus, domain.memory_mb));
        if is_other {
            self.parts.hypervisor.redefine(&domain).await?;
        }
        Ok(is_other)
    }

    /// These amounts, as a domain has them that is so large.
    pub(super) fn as_large_as(&self, size: DomainSize, amounts: &Resources) -> Resources {
        let mut amounts = amounts.clone();
        for (class, is) in [("VCPU", size.vcpus), ("MEMORY_MB", size.memory_mb)] {
            if let Some(amount) = amounts.get_mut(class) {
                *amount = is;
            }
        }
        if let Some(gb) = amounts.get_mut(DISK).filter(|_| self.parts.settings.resize && size.disk_bytes > 0)
        {
            *gb = size.disk_bytes.div_ceil(1 << 30);
        }
        amounts
    }
}

/// Whether these amounts say how large a domain is to be.
fn is_measured(amounts: &Resources) -> bool {
    let size = Size::of(amounts);
    size.vcpus > 0 && size.memory_mb > 0
}
