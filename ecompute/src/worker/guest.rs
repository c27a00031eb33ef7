//! A guest's disk, its record on the node, and how large it is.

use std::{sync::Arc, time::Duration};

use ec_hypervisor::{DomainSpec, HypervisorResult, VolumeSource};
use ec_image::CachedImage;
use ec_metadata::{InstanceRecord, RECORD_VERSION, RecordDir};
use ec_model::{
    Attachment, Blob, CopyOf, ImageRef, MacAddr, Progress, Rebuilt, Request, Resources, Spec, State, Status,
    Workload,
};
use ec_plan::{
    RecordFacts,
    engine::Change,
    status::{self, Pace},
};
use tokio::{sync::watch, time::Instant};

use super::{Stop, Worker, hostname, pause_for_test_named};
use crate::{bases::base_of, look::record_facts};

/// So often it is looked whether there is progress to tell: see [`status::progressed`].
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);

impl Worker {
    /// Fetches the image, keeps the node's record, makes the overlay, or a copy.
    pub(super) async fn prepare_disk(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let parts = Arc::clone(&self.parts);
        let request = self.request()?;
        if let Some(problem) = request.problem() {
            return Err(Stop::Failed(problem));
        }
        let wanted = &spec_of(&request)?.image;
        // What stood in the way before does not any more.
        let stood = |old: &Status| old.reason.is_some() && old.doing.as_deref() != Some(&*self.subject.why);
        if self.status.known().is_some_and(stood) {
            self.announce(State::Preparing, None).await?;
        }
        let boots_from = Attachment::root_of(&request.volumes);
        // Once: who tries again has told a reason.
        if self.status.known().is_none_or(|status| status.reason.is_none()) {
            let from = match boots_from {
                Some(volume) => format!("ON VOLUME {volume}"),
                None => format!("WITH IMAGE {}", wanted.told()),
            };
            tracing::info!("INSTANTIATE INSTANCE {instance} {from}");
            if let Some(allocated) = &self.job.allocated {
                tracing::info!("ALLOCATIONS ARE {}", serde_json::json!(allocated));
            }
        }
        if boots_from.is_some() {
            // Its disk is there, and somebody else's: nothing is made.
            let record = self.record_of(&request).await?;
            return self.put_record(record).await;
        }
        let disk_bytes = self.disk_bytes().await?;
        let source = self.source(wanted, disk_bytes).await?;
        self.take_permit().await?;
        let mut record = self.record_of(&request).await?;
        record.base_digest = digest_of(&source);
        // Made from what is wished last.
        record.rebuilt =
            request.rebuild.as_ref().map(|wish| Rebuilt { wished_at: wish.wished_at, failed: None });
        self.put_record(record).await?;
        pause_for_test_named("before-overlay");
        self.touched_hypervisor = true;
        match &source {
            VolumeSource::Image(base) => {
                Ok(parts.hypervisor.create_overlay(instance, base, disk_bytes).await?)
            }
            VolumeSource::Copy(_) => {
                self.until_made(&source, parts.hypervisor.create_volume(instance, &source, disk_bytes)).await
            }
            VolumeSource::Empty => Err(Stop::Failed("it has no image to boot".to_owned())),
        }
    }

    /// What a disk is made of: of an image, which is fetched, as a copy of another of this node, or of nothing.
    pub(super) async fn source(
        &mut self,
        image: &ImageRef,
        disk_bytes: Option<u64>,
    ) -> Result<VolumeSource, Stop> {
        Ok(match image.copied() {
            Some(of) => VolumeSource::Copy(self.disks_of(of).await?),
            None if image.is_none() => VolumeSource::Empty,
            None => {
                let image = self.fetch(image, disk_bytes).await?;
                let base = image.base.clone();
                self.standing_on = Some(image);
                VolumeSource::Image(base)
            }
        })
    }

    /// What is to be copied, with the volume that a machine boots from in the place of a disk of its own.
    async fn disks_of(&self, of: CopyOf) -> Result<CopyOf, Stop> {
        let machine = of.disk;
        let record = match of.kind {
            Workload::Machine => self.records(move |records| records.get(machine)).await?,
            Workload::Volume => None,
        };
        let root = record.and_then(|record| record.intent?.root());
        Ok(CopyOf { disk: root.unwrap_or(of.disk), ..of })
    }

    /// Waits for a disk that may be a copy, which takes hours: one that is not wanted any more is given up. The call is waited
    /// for all the same, lest what comes next meets it.
    pub(super) async fn until_made(
        &mut self,
        source: &VolumeSource,
        made: impl Future<Output = HypervisorResult<()>>,
    ) -> Result<(), Stop> {
        // Copies take turns of their own: all else of this node would wait for them.
        if matches!(source, VolumeSource::Copy(_)) {
            self.permit = None;
        }
        tokio::pin!(made);
        loop {
            tokio::select! {
                biased;
                made = &mut made => return Ok(made?),
                () = self.cancel.cancelled() => break,
                Ok(()) = self.newer.changed() => self.let_look().await,
            }
        }
        self.parts.hypervisor.give_up_copy(self.job.instance);
        Ok(made.await?)
    }

    /// How large its disk shall be; nothing where it is as large as its image.
    pub(super) async fn disk_bytes(&self) -> Result<Option<u64>, Stop> {
        // Where disks are as large as their images, DISK_GB bounds none.
        if !self.parts.settings.resize {
            return Ok(None);
        }
        let disk_gb = self.amounts().await?.get("DISK_GB").copied();
        Ok(disk_gb.map(|gb| gb.saturating_mul(1 << 30)))
    }

    /// Fetches an image, telling how far that is.
    pub(super) async fn fetch(
        &mut self,
        wanted: &ImageRef,
        disk_bytes: Option<u64>,
    ) -> Result<CachedImage, Stop> {
        let parts = Arc::clone(&self.parts);
        let (progress, mut steps) = watch::channel(None::<Progress>);
        let fetch = parts.images.fetch(wanted, disk_bytes, progress);
        tokio::pin!(fetch);
        let mut period = tokio::time::interval(PROGRESS_PERIOD);
        period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first tick comes at once, when there is nothing to tell yet.
        period.tick().await;
        let cancel = self.cancel.clone();
        let begun = Instant::now();
        let mut told = begun;
        let image = loop {
            tokio::select! {
                biased;
                image = &mut fetch => break image?,
                () = cancel.cancelled() => return Err(Stop::Abandoned),
                Ok(()) = self.newer.changed() => self.let_look().await,
                _ = period.tick() => {
                    let step = steps.borrow_and_update().clone();
                    let (old, now) = (self.status.known(), self.parts.host.now());
                    let pace = Pace { taken: begun.elapsed(), told: told.elapsed() };
                    if let Some(status) = status::progressed(&self.subject, old, step, pace, now) {
                        told = Instant::now();
                        // Not telling progress must not end a download.
                        self.write(status).await.ok();
                    }
                }
            }
        };
        let disk_gb = self.job.allocated.as_ref().and_then(|amounts| amounts.get("DISK_GB")).copied();
        if let Some(gb) = disk_gb.filter(|gb| !parts.settings.resize && image.base.virtual_size > gb << 30) {
            tracing::warn!(
                image_bytes = image.base.virtual_size,
                "its image is larger than the {gb} GiB allocated, and is taken all the same: resize is off"
            );
        }
        Ok(image)
    }

    /// Writes the record of a guest that is here anew: somebody deleted it, and metadata stands on it.
    pub(super) async fn keep_record(&mut self) -> Result<(), Stop> {
        // What is there, be it readable or not, is not written over for what a look missed.
        if self.looked_at().await? != Err(RecordFacts::Absent) {
            return Err(Stop::Abandoned);
        }
        tracing::warn!("its record was gone from this node; writing it anew");
        let record = self.record_as_found().await?;
        self.put_record(record).await
    }

    /// The record of what is here without one.
    pub(super) async fn record_as_found(&mut self) -> Result<InstanceRecord, Stop> {
        let request = self.request()?;
        let mut record = match self.record_of(&request).await {
            // Lost with its record: its guest had it, and all that is asked for stands on there being a record.
            Err(Stop::Failed(why)) => {
                tracing::warn!(why, "its record is written anew without user-data");
                let spec = Spec { user_data_bytes: None, ..spec_of(&request)?.clone() };
                self.record_of(&Request { spec: Some(spec), ..Request::clone(&request) }).await?
            }
            made => made?,
        };
        record.started = true;
        let (disks, instance) = (self.parts.settings.disks(self.parts.node), self.job.instance);
        let base = self.parts.host.blocking(move || base_of(&disks, instance)).await;
        record.base_digest = base.unwrap_or_default();
        // Whether that was done nobody can tell, unless the status does; doing it again might cost what a guest wrote since. Of what lost
        // everything there is nothing to lose.
        let told = self.status.known().and_then(|status| status.rebuilt.clone());
        let observed = self.parts.hypervisor.observe(instance).await?;
        let is_anything = observed.volume || observed.domain.is_some();
        let is_untold =
            |wished_at| is_anything && told.as_ref().is_none_or(|told| told.wished_at < wished_at);
        record.rebuilt = match &request.rebuild {
            Some(wish) if is_untold(wish.wished_at) => Some(Rebuilt {
                wished_at: wish.wished_at,
                failed: Some(
                    "its node's record of it was lost, so nobody can tell whether it was done".into(),
                ),
            }),
            _ => told,
        };
        // Wanted or not, that is what it was started from as far as anybody knows.
        record.rescued = self.status.known().and_then(|status| status.rescued.clone());
        // How large it is, is seen: more may be claimed already, for a wish that has yet to be heard of.
        if request.kind == Workload::Volume {
            // Of several disks the first says nothing of the others.
            if !spec_of(&request)?.image.is_of_several()
                && let Some(bytes) = self.parts.hypervisor.disk_bytes(self.job.instance).await?
            {
                record.resources.insert("DISK_GB".to_owned(), bytes.div_ceil(1 << 30));
            }
        } else if let Some(size) = self.parts.hypervisor.size(self.job.instance).await? {
            record.resources = self.as_large_as(size, &record.resources);
        }
        if request.resize.is_some() {
            record.resized = self.status.known().and_then(|status| status.resized.clone());
        }
        Ok(record)
    }

    /// The node's record as the request has it, of a guest that has not run.
    pub(super) async fn record_of(&self, request: &Request) -> Result<InstanceRecord, Stop> {
        let spec = spec_of(request)?;
        let intent = Some(self.intent().await?);
        Ok(InstanceRecord {
            version: RECORD_VERSION,
            instance: self.job.instance,
            name: hostname(request),
            macs: if request.kind == Workload::Machine { self.macs() } else { Vec::new() },
            base_digest: None,
            next_base_digest: None,
            next_wished_at: None,
            next_is_whole: false,
            rescue_base_digest: None,
            rebuilt: None,
            rescued: None,
            resized: None,
            resources_before: None,
            growing: None,
            intent,
            keys: spec.keys.clone(),
            metadata: spec.metadata.clone(),
            user_data: self.user_data(spec).await?,
            token_required: spec.token_required,
            project: request.project.clone(),
            resources: self.job.allocated.clone().unwrap_or_else(|| spec.resources.clone()),
            started: false,
            created_at: request.created_at,
        })
    }

    async fn user_data(&self, spec: &Spec) -> Result<Option<Blob>, Stop> {
        let Some(bytes) = spec.user_data_bytes else { return Ok(None) };
        let key = self.parts.settings.keys.user_data(self.parts.node, self.job.instance);
        let data = self.parts.store.get(&key).await?.0.map(|pair| pair.value).unwrap_or_default();
        // Written with the request: a part of it, or none, is not what the user gave.
        if data.len() as u64 != bytes {
            return Err(Stop::Failed(format!(
                "its user-data has {} bytes in etcd where its request says {bytes}",
                data.len()
            )));
        }
        Ok(Some(Blob(data)))
    }

    pub(super) async fn put_record(&mut self, record: InstanceRecord) -> Result<(), Stop> {
        let facts = record_facts(&record);
        self.records(move |records| records.put(&record)).await?;
        self.done.push(Change::Record(facts));
        Ok(())
    }

    /// The node's own record, where there is one that can be read.
    pub(super) async fn record(&self) -> Result<Option<InstanceRecord>, Stop> {
        let instance = self.job.instance;
        self.records(move |records| records.get(instance)).await
    }

    /// The node's record, without which nothing is begun. That it is not as it was thought to be is learnt at once.
    pub(super) async fn own_record(&mut self) -> Result<InstanceRecord, Stop> {
        let gone = |_| Stop::Retry("its node's record of it is gone or cannot be read".to_owned());
        self.looked_at().await?.map_err(gone)
    }

    /// The node's record, or why there is none to read, which is learnt: what is decided next stands on it.
    pub(super) async fn looked_at(&mut self) -> Result<Result<InstanceRecord, RecordFacts>, Stop> {
        let instance = self.job.instance;
        if let Some(record) = self.record().await? {
            self.done.push(Change::Record(record_facts(&record)));
            return Ok(Ok(record));
        }
        let is_there = self.records(move |records| records.has(instance)).await?;
        let facts = if is_there { RecordFacts::Unreadable } else { RecordFacts::Absent };
        self.done.push(Change::Record(facts));
        Ok(Err(facts))
    }

    /// Stops where the node's record can be read by now.
    pub(super) async fn reread(&mut self) -> Result<(), Stop> {
        match self.looked_at().await? {
            Ok(_) => Err(Stop::Abandoned),
            Err(_) => Ok(()),
        }
    }

    /// Works on the node's records, which waits for the disk.
    pub(super) async fn records<T, E>(
        &self,
        work: impl FnOnce(&RecordDir) -> Result<T, E> + Send + 'static,
    ) -> Result<T, Stop>
    where
        T: Send + 'static,
        E: std::error::Error + Send + 'static,
    {
        let records = Arc::clone(&self.parts.records);
        let worked = self.parts.host.blocking(move || work(&records));
        worked
            .await
            .map_err(|error| Stop::Retry(error.to_string()))?
            .map_err(|error| Stop::Retry(ec_runtime::exit::chain(&error)))
    }

    fn macs(&self) -> Vec<MacAddr> {
        (0..self.parts.settings.nics()).map(|nic| self.job.instance.mac(nic)).collect()
    }

    /// What the guest takes: of one that ran as this node wrote down, since more may be allocated for a size that it is yet to be
    /// given; else as allocated, else as its domain is.
    pub(super) async fn amounts(&self) -> Result<Resources, Stop> {
        let ran = |record: &InstanceRecord| record.started || record.resized.is_some();
        let noted = self.record().await?.filter(|record| ran(record) && !record.resources.is_empty());
        if let Some(record) = noted {
            return Ok(record.resources);
        }
        if let Some(allocated) = &self.job.allocated {
            return Ok(allocated.clone());
        }
        if let Some(record) = self.record().await?.filter(|record| !record.resources.is_empty()) {
            return Ok(record.resources);
        }
        let instance = self.job.instance;
        let amounts = match self.parts.hypervisor.size(instance).await? {
            Some(size) => [size.vcpus, size.memory_mb, size.disk_bytes],
            // Of a disk without a domain: a volume, as far as anybody knows.
            None => match self.parts.hypervisor.disk_bytes(instance).await? {
                Some(bytes) => [0, 0, bytes],
                None => {
                    return Err(Stop::Retry("neither placement nor this node knows how large it is".into()));
                }
            },
        };
        let [vcpus, memory_mb, disk_bytes] = amounts;
        Ok([("VCPU", vcpus), ("MEMORY_MB", memory_mb), ("DISK_GB", disk_bytes.div_ceil(1 << 30))]
            .into_iter()
            .filter(|(_, amount)| *amount > 0)
            .map(|(class, amount)| (class.to_owned(), amount))
            .collect())
    }

    /// The domain as it is to be defined.
    pub(super) async fn domain_spec(&self) -> Result<DomainSpec, Stop> {
        self.domain_of(&self.amounts().await?).await
    }

    /// A domain that takes this.
    pub(super) async fn domain_of(&self, amounts: &Resources) -> Result<DomainSpec, Stop> {
        let amount = |class: &str| {
            let missing =
                || Stop::Failed(format!("its allocation has no {class}, which a virtual machine needs"));
            amounts.get(class).copied().filter(|amount| *amount > 0).ok_or_else(missing)
        };
        let title = match &self.job.request {
            Some(request) => hostname(request),
            None => self.record().await?.map(|record| record.name).unwrap_or_default(),
        };
        let volumes = match &self.job.request {
            Some(request) => request.volumes.clone(),
            None => self.record().await?.map(|record| volumes_of(&record)).unwrap_or_default(),
        };
        Ok(DomainSpec {
            instance: self.job.instance,
            title,
            volumes,
            vcpus: amount("VCPU")?,
            memory_mb: amount("MEMORY_MB")?,
        })
    }
}

/// Why a wish was not done of which the node's record knows nothing.
pub(super) fn unrecorded(facts: RecordFacts) -> &'static str {
    match facts {
        RecordFacts::Absent => "its node has no record of it any more, so nothing is made in its place",
        _ => "its node's record of it cannot be read, so nothing of it is touched",
    }
}

/// The digest of the image on which a disk stands, where it stands on one.
pub(super) fn digest_of(source: &VolumeSource) -> Option<String> {
    match source {
        VolumeSource::Image(base) => Some(base.digest.clone()),
        VolumeSource::Copy(_) | VolumeSource::Empty => None,
    }
}

/// The volumes that a guest has of which no request speaks, as the last one did.
fn volumes_of(record: &InstanceRecord) -> Vec<Attachment> {
    let request = record.intent.as_ref().and_then(|intent| intent.request().ok());
    request.map(|request| request.record.volumes).unwrap_or_default()
}

/// What the instance shall be.
pub(super) fn spec_of(request: &Request) -> Result<&Spec, Stop> {
    request.spec.as_ref().ok_or_else(|| Stop::Failed("its request does not say what it shall be".to_owned()))
}
