//! A new disk in the place of an old one.

use std::sync::Arc;

use ec_hypervisor::VolumeSource;
use ec_metadata::InstanceRecord;
use ec_model::{Attachment, Rebuilt};
use ec_plan::status;

use super::{
    Stop, Worker,
    guest::{digest_of, spec_of, unrecorded},
    volume::DISK,
};

impl Worker {
    /// Makes the new disk of its image, which is fetched, or as a copy, beside the one that there is. Both bases are in use until it is
    /// known which disk stays.
    pub(super) async fn prepare_rebuild(&mut self) -> Result<(), Stop> {
        let (instance, parts) = (self.job.instance, Arc::clone(&self.parts));
        let request = self.request()?;
        if Attachment::root_of(&request.volumes).is_some() {
            return Err(Stop::Failed("it boots from a volume, and has no disk of its own".to_owned()));
        }
        let record = self.own_record().await?;
        // What it was made of may be gone since.
        if self.is_replaced(&record).await? {
            return Ok(());
        }
        let disk_bytes = match self.is_volume() {
            // As large as it is.
            true => Some(record.resources.get(DISK).copied().unwrap_or(0).saturating_mul(1 << 30)),
            false => self.disk_bytes().await?,
        };
        let source = self.source(&spec_of(&request)?.image, disk_bytes).await?;
        self.take_permit().await?;
        let next_wished_at = Some(self.wished_at()?);
        // A copy that is whole stays, since it may take longer than the call for it is waited for; not one of an older wish.
        if matches!(source, VolumeSource::Copy(_)) && record.next_wished_at != next_wished_at {
            let dropped = parts.hypervisor.drop_successor(instance).await;
            dropped.map_err(|error| Stop::Retry(error.to_string()))?;
        }
        let next_base_digest = digest_of(&source);
        let next_is_whole = false;
        self.put_record(InstanceRecord { next_base_digest, next_wished_at, next_is_whole, ..record }).await?;
        self.until_made(&source, parts.hypervisor.create_successor(instance, &source, disk_bytes)).await
    }

    /// The guest has ended: the new disk comes, and the old one goes.
    pub(super) async fn replace_disk(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let wished_at = self.wished_at()?;
        // Nothing is replaced of which that could not be noted.
        let mut record = self.own_record().await?;
        if !self.is_replaced(&record).await? {
            record.next_is_whole = true;
            self.put_record(record.clone()).await?;
            self.touched_hypervisor = true;
            self.parts.hypervisor.replace_overlay(instance).await?;
        }
        self.permit = None;
        let base_digest = record.next_base_digest.clone();
        let rebuilt = Some(Rebuilt { wished_at, failed: None });
        self.put_record(InstanceRecord {
            base_digest,
            next_base_digest: None,
            next_wished_at: None,
            next_is_whole: false,
            rebuilt,
            ..record
        })
        .await?;
        tracing::info!("REBUILT INSTANCE {instance}");
        Ok(())
    }

    /// It cannot be: the old disk stays, and that is all there is.
    pub(super) async fn give_up_rebuild(&mut self, reason: String) -> Result<(), Stop> {
        tracing::warn!(reason, "its disk cannot be made anew; the old one stays");
        let wished_at = self.wished_at()?;
        // For good or not: a wish that is given up for it would be given up again at once.
        self.drop_successor().await?;
        let record = self.own_record().await?;
        let rebuilt = Some(Rebuilt { wished_at, failed: Some(reason) });
        self.put_record(InstanceRecord {
            next_base_digest: None,
            next_wished_at: None,
            next_is_whole: false,
            rebuilt,
            ..record
        })
        .await
    }

    /// Whether the new disk of this wish came in the old one's place, and whoever did that was killed before it was noted.
    async fn is_replaced(&self, record: &InstanceRecord) -> Result<bool, Stop> {
        if !record.next_is_whole || record.next_wished_at != Some(self.wished_at()?) {
            return Ok(false);
        }
        let observed = self.parts.hypervisor.observe(self.job.instance).await?;
        Ok(observed.volume && !observed.successor)
    }

    /// What was to take the place of the disk goes. That it does not come is noted first: else it would pass for what came.
    pub(super) async fn drop_successor(&mut self) -> Result<(), Stop> {
        if let Ok(record) = self.looked_at().await?
            && record.next_is_whole
        {
            self.put_record(InstanceRecord { next_is_whole: false, ..record }).await?;
        }
        self.touched_hypervisor = true;
        let dropped = self.parts.hypervisor.drop_successor(self.job.instance).await;
        dropped.map_err(|error| Stop::Retry(error.to_string()))
    }

    /// Tells what the node's record has; where that cannot be read, that it was not done.
    pub(super) async fn note_rebuild(&mut self) -> Result<(), Stop> {
        let looked_at = self.looked_at().await?;
        let wished =
            self.job.request.as_ref().and_then(|request| request.rebuild.as_ref()).map(|wish| wish.wished_at);
        let rebuilt = match looked_at {
            Ok(record) => record.rebuilt,
            Err(facts) => {
                wished.map(|wished_at| Rebuilt { wished_at, failed: Some(unrecorded(facts).to_owned()) })
            }
        };
        let status = status::rebuilt(&self.subject, self.status.known(), rebuilt, self.parts.host.now());
        self.write(status).await
    }

    fn wished_at(&self) -> Result<jiff::Timestamp, Stop> {
        let request = self.request()?;
        (request.rebuild.as_ref().map(|wish| wish.wished_at))
            .ok_or_else(|| Stop::Retry("it is not to be rebuilt any more".to_owned()))
    }
}
