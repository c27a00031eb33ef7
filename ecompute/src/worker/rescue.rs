//! A disk to boot from in the place of a guest's own, which is never touched.

use std::sync::Arc;

use ec_metadata::InstanceRecord;
use ec_model::{Rescue, Rescued};
use ec_plan::status;
use ec_runtime::planted;

use super::{Stop, Worker, guest::unrecorded};

impl Worker {
    /// Fetches the image and makes the rescue disk. Its base is in use until that is gone.
    pub(super) async fn prepare_rescue(&mut self) -> Result<(), Stop> {
        let (instance, parts) = (self.job.instance, Arc::clone(&self.parts));
        let wish = self.rescue_wish()?;
        // No larger than what it may take anyway: nobody counts it.
        let disk_bytes = self.disk_bytes().await?;
        let image = self.fetch(&wish.image, disk_bytes).await?;
        self.take_permit().await?;
        let record = self.own_record().await?;
        let rescue_base_digest = Some(image.base.digest.clone());
        self.put_record(InstanceRecord { rescue_base_digest, ..record }).await?;
        parts.hypervisor.create_rescue(instance, &image.base).await?;
        Ok(())
    }

    /// The guest has ended: it is started from the rescue disk from now on.
    pub(super) async fn enter_rescue(&mut self) -> Result<(), Stop> {
        let rescued = Some(Rescued { wished_at: self.rescue_wish()?.wished_at, failed: None });
        self.permit = None;
        let record = self.own_record().await?;
        self.put_record(InstanceRecord { rescued, ..record }).await?;
        tracing::info!("RESCUED INSTANCE {}", self.job.instance);
        Ok(())
    }

    /// It is not wanted any more: the rescue disk goes, and the guest is started from its own from now on.
    pub(super) async fn leave_rescue(&mut self) -> Result<(), Stop> {
        // Nothing goes of which that could not be noted.
        self.own_record().await?;
        if !planted("rescue-disk-kept") {
            self.drop_rescue().await?;
        }
        let record = self.own_record().await?;
        self.put_record(InstanceRecord { rescue_base_digest: None, rescued: None, ..record }).await?;
        tracing::info!("UNRESCUED INSTANCE {}", self.job.instance);
        Ok(())
    }

    /// It cannot be: the guest stays with its own disk, and that is all there is.
    pub(super) async fn give_up_rescue(&mut self, reason: String) -> Result<(), Stop> {
        tracing::warn!(reason, "it cannot be rescued; it boots from its own disk");
        let rescued = Some(Rescued { wished_at: self.rescue_wish()?.wished_at, failed: Some(reason) });
        self.drop_rescue().await?;
        let record = self.own_record().await?;
        self.put_record(InstanceRecord { rescue_base_digest: None, rescued, ..record }).await
    }

    /// Tells what the node's record has; where that cannot be read, that it was not done.
    pub(super) async fn note_rescue(&mut self) -> Result<(), Stop> {
        let rescued = match self.looked_at().await? {
            Ok(record) => record.rescued,
            Err(facts) => self.request()?.rescue.as_ref().map(|wish| Rescued {
                wished_at: wish.wished_at,
                failed: Some(unrecorded(facts).to_owned()),
            }),
        };
        let status = status::rescued(&self.subject, self.status.known(), rescued, self.parts.host.now());
        self.write(status).await
    }

    /// Whatever is in the way, nothing is noted as done that is not.
    async fn drop_rescue(&mut self) -> Result<(), Stop> {
        self.touched_hypervisor = true;
        let dropped = self.parts.hypervisor.drop_rescue(self.job.instance).await;
        dropped.map_err(|error| Stop::Retry(error.to_string()))
    }

    fn rescue_wish(&self) -> Result<Rescue, Stop> {
        let wish = self.request()?.rescue.clone();
        wish.ok_or_else(|| Stop::Retry("it is not to be rescued any more".to_owned()))
    }
}
