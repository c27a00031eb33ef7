//! A guest's disk, its record on the node, and how large it is.

use std::{sync::Arc, time::Duration};

use ec_hypervisor::DomainSpec;
use ec_metadata::{InstanceRecord, RECORD_VERSION, RecordDir};
use ec_model::{Blob, MacAddr, Progress, Request, Resources, Spec, State, Status};
use ec_plan::{RecordFacts, engine::Change, status};
use tokio::sync::watch;

use super::{Stop, Worker, hostname, pause_for_test_named};

/// Progress is for people: once a second is enough, and keeps etcd's history small.
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);

impl Worker {
    /// Fetches the image, keeps the node's record, makes the overlay.
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
        // Once: who tries again has told a reason.
        if self.status.known().is_none_or(|status| status.reason.is_none()) {
            tracing::info!("INSTANTIATE INSTANCE {instance} WITH IMAGE {}", without_secrets(&wanted.url));
            if let Some(allocated) = &self.job.allocated {
                tracing::info!(%instance, "ALLOCATIONS ARE {}", serde_json::json!(allocated));
            }
        }
        let disk_gb = self.job.allocated.as_ref().and_then(|amounts| amounts.get("DISK_GB")).copied();
        // Where disks are as large as their images, DISK_GB bounds none.
        let disk_bytes = disk_gb.map(|gb| gb.saturating_mul(1 << 30)).filter(|_| parts.settings.resize);

        let (progress, mut steps) = watch::channel(None::<Progress>);
        let fetch = parts.images.fetch(wanted, disk_bytes, progress);
        tokio::pin!(fetch);
        let mut period = tokio::time::interval(PROGRESS_PERIOD);
        period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first tick comes at once, when there is nothing to tell yet.
        period.tick().await;
        let cancel = self.cancel.clone();
        let image = loop {
            tokio::select! {
                biased;
                image = &mut fetch => break image?,
                () = cancel.cancelled() => return Err(Stop::Abandoned),
                _ = period.tick() => {
                    let step = steps.borrow_and_update().clone();
                    let old = self.status.known();
                    if let Some(status) = status::progressed(&self.subject, old, step, self.parts.host.now()) {
                        // Not telling progress must not end a download.
                        self.write(status).await.ok();
                    }
                }
            }
        };
        if let Some(gb) = disk_gb.filter(|gb| !parts.settings.resize && image.base.virtual_size > gb << 30) {
            tracing::warn!(
                %instance,
                image_bytes = image.base.virtual_size,
                "its image is larger than the {gb} GiB allocated, and is taken all the same: resize is off"
            );
        }

        self.take_permit().await?;
        let mut record = self.record_of(&request).await?;
        record.base_digest = Some(image.base.digest.clone());
        self.put_record(record).await?;
        pause_for_test_named("before-overlay");
        self.touched_hypervisor = true;
        parts.hypervisor.create_overlay(instance, &image.base, disk_bytes).await?;
        Ok(())
    }

    /// Writes the record of a guest that is here anew: somebody deleted it, and metadata stands on it.
    pub(super) async fn keep_record(&mut self) -> Result<(), Stop> {
        tracing::warn!(instance = %self.job.instance, "its record was gone from this node; writing it anew");
        let request = self.request()?;
        let mut record = self.record_of(&request).await?;
        record.started = true;
        self.put_record(record).await
    }

    /// The node's record as the request has it, of a guest that has not run.
    async fn record_of(&self, request: &Request) -> Result<InstanceRecord, Stop> {
        let spec = spec_of(request)?;
        Ok(InstanceRecord {
            version: RECORD_VERSION,
            instance: self.job.instance,
            name: hostname(request),
            macs: self.macs(),
            base_digest: None,
            keys: spec.keys.clone(),
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

    async fn put_record(&mut self, record: InstanceRecord) -> Result<(), Stop> {
        let started = record.started;
        self.records(move |records| records.put(&record)).await?;
        self.done.push(Change::Record(RecordFacts::Kept { started }));
        Ok(())
    }

    /// The node's own record, where there is one that can be read.
    pub(super) async fn record(&self) -> Result<Option<InstanceRecord>, Stop> {
        let instance = self.job.instance;
        self.records(move |records| records.get(instance)).await
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

    /// What the guest takes: as allocated, else as this node wrote down, else as its domain is.
    pub(super) async fn amounts(&self) -> Result<Resources, Stop> {
        if let Some(allocated) = &self.job.allocated {
            return Ok(allocated.clone());
        }
        if let Some(record) = self.record().await?.filter(|record| !record.resources.is_empty()) {
            return Ok(record.resources);
        }
        let size = self.parts.hypervisor.size(self.job.instance).await?;
        let size =
            size.ok_or_else(|| Stop::Retry("neither placement nor this node knows how large it is".into()))?;
        let disk_gb = size.disk_bytes.div_ceil(1 << 30);
        Ok([("VCPU", size.vcpus), ("MEMORY_MB", size.memory_mb), ("DISK_GB", disk_gb)]
            .into_iter()
            .filter(|(_, amount)| *amount > 0)
            .map(|(class, amount)| (class.to_owned(), amount))
            .collect())
    }

    /// The domain as it is to be defined.
    pub(super) async fn domain_spec(&self) -> Result<DomainSpec, Stop> {
        let amounts = self.amounts().await?;
        let amount = |class: &str| {
            let missing =
                || Stop::Failed(format!("its allocation has no {class}, which a virtual machine needs"));
            amounts.get(class).copied().filter(|amount| *amount > 0).ok_or_else(missing)
        };
        let title = match &self.job.request {
            Some(request) => hostname(request),
            None => self.record().await?.map(|record| record.name).unwrap_or_default(),
        };
        Ok(DomainSpec {
            instance: self.job.instance,
            title,
            vcpus: amount("VCPU")?,
            memory_mb: amount("MEMORY_MB")?,
        })
    }
}

/// What the instance shall be.
fn spec_of(request: &Request) -> Result<&Spec, Stop> {
    request.spec.as_ref().ok_or_else(|| Stop::Failed("its request does not say what it shall be".to_owned()))
}

/// An image's URL as logs may have it: without user, password and query.
fn without_secrets(url: &str) -> &str {
    let url = &url[..url.find(['?', '#']).unwrap_or(url.len())];
    match url.split_once("://").and_then(|(_, rest)| rest.split('/').next()) {
        Some(authority) if authority.contains('@') => "(a URL with a password)",
        _ => url,
    }
}
