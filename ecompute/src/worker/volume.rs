//! Volumes: their disks, and which of them a domain has.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use ec_hypervisor::HypervisorError::{Busy, Failed, NotNow, TimedOut};
use ec_metadata::InstanceRecord;
use ec_model::{Attachment, Handover, Instance, Rebuilt, Resized, RunState, State, Status, decode};
use ec_plan::{
    RecordFacts,
    engine::{Change, Held},
    status::{Volumes, with_volumes},
    volumes::NOT_HANDED_OVER,
};

use jiff::SignedDuration;

use super::{
    Stop, Worker,
    guest::{digest_of, spec_of},
    pause_for_test_named,
};

pub(super) const DISK: &str = "DISK_GB";

/// A living agent hands a volume over within milliseconds: so often, and after such pauses, it is looked for at once.
const ARRIVES_LOOKS: u32 = 50;
const ARRIVES_PAUSE: Duration = Duration::from_millis(100);
/// After so long people have to look into it: that node may not be alive, or have lost the disk.
const ARRIVES_WITHIN: SignedDuration = SignedDuration::from_secs(60);

impl Worker {
    /// Keeps the node's record of a volume, and makes its disk.
    pub(super) async fn prepare_volume(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let parts = Arc::clone(&self.parts);
        let request = self.request()?;
        if let Some(problem) = request.problem() {
            return Err(Stop::Failed(problem));
        }
        let spec = spec_of(&request)?;
        // More may be claimed already, for a wish to extend it that has yet to come.
        let (claimed, asked) = (self.amounts().await?.get(DISK).copied(), spec.resources.get(DISK).copied());
        let gb = claimed.into_iter().chain(asked).min().unwrap_or(0);
        if claimed.is_none() || gb == 0 {
            return Err(Stop::Failed(format!("its allocation has no {DISK}, which a volume needs")));
        }
        let bytes = gb.saturating_mul(1 << 30);
        tracing::info!("MAKING VOLUME {instance} OF {bytes} BYTES");
        let mut record = self.record_of(&request).await?;
        let source = self.source(&spec.image, Some(bytes)).await?;
        record.base_digest = digest_of(&source);
        record.resources.insert(DISK.to_owned(), gb);
        self.take_permit().await?;
        self.refuse_what_came().await?;
        self.put_record(record).await?;
        pause_for_test_named("before-create-volume");
        self.touched_hypervisor = true;
        let made = parts.hypervisor.create_volume(instance, &source, Some(bytes));
        self.until_made(&source, made).await?;
        self.permit = None;
        Ok(())
    }

    /// Keeps no record of a making where another node has its disk, or has handed it over: by an older etcd, and a guest wrote it since. It
    /// would say that none did, for as long as nobody receives it, and with its request gone the disk would be swept.
    async fn refuse_what_came(&mut self) -> Result<(), Stop> {
        self.touched_hypervisor = true;
        if self.parts.hypervisor.has_volume(self.job.instance).await? && self.record().await?.is_none() {
            return Err(Stop::Retry("its disk came from another node".to_owned()));
        }
        Ok(())
    }

    /// Has a volume be another node's. Killed at any moment between, it is done again from where it ended.
    pub(super) async fn hand_over(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let Some(Handover::To(node)) = self.request()?.handover else {
            return Err(Stop::Retry("it is to stay here".to_owned()));
        };
        self.take_permit().await?;
        self.touched_hypervisor = true;
        let handed = self.parts.hypervisor.hand_over(instance, node).await;
        handed.map_err(|error| Stop::Retry(error.to_string()))?;
        self.permit = None;
        pause_for_test_named("before-forget");
        self.records(move |records| records.remove(instance)).await?;
        self.no_longer_uncounted();
        // What it holds of the storage that both share it holds there.
        self.done.extend([Change::Record(RecordFacts::Absent), Change::Allocation(Held::Nothing)]);
        self.leave_keys(None).await?;
        tracing::info!(to = %node, "HANDED VOLUME {instance} OVER");
        Ok(())
    }

    /// Waits a while until a volume is handed over, and keeps the node's record of it then.
    pub(super) async fn receive(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        // First: what comes is not what was destroyed here, whenever it comes and whatever is asked for then.
        self.records(move |records| records.unbury(instance)).await?;
        self.done.push(Change::Unburied);
        for _ in 0..ARRIVES_LOOKS {
            if self.cancel.is_cancelled() {
                return Err(Stop::Abandoned);
            }
            if self.parts.hypervisor.observe(instance).await?.volume {
                self.touched_hypervisor = true;
                self.keep_what_came().await?;
                tracing::info!("RECEIVED VOLUME {instance}");
                return Ok(());
            }
            tokio::time::sleep(ARRIVES_PAUSE).await;
        }
        let waits = self.told()?;
        let waited = self.parts.host.now().duration_since(waits.since);
        if waits.state == State::Preparing && waited > ARRIVES_WITHIN {
            self.announce(State::Error, Some(format!("{NOT_HANDED_OVER}; it is waited for on"))).await?;
        }
        Err(Stop::Retry(NOT_HANDED_OVER.to_owned()))
    }

    /// Writes the node's record of a volume that came. What was wished to be made anew of it had come to its end before, or it would
    /// not have come; an older etcd wishes that again. Told before it is told to be there: until then it counts as being made anew.
    async fn keep_what_came(&mut self) -> Result<(), Stop> {
        let wished = self.request()?.rebuild.as_ref().map(|wish| wish.wished_at);
        let found = self.record_as_found().await?;
        let Some(wished_at) = wished else { return self.put_record(found).await };
        self.put_record(InstanceRecord { rebuilt: Some(Rebuilt { wished_at, failed: None }), ..found })
            .await?;
        self.note_rebuild().await
    }

    /// Grows a volume, which its guest may go on using meanwhile.
    pub(super) async fn extend(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let record = self.own_record().await?;
        let request = self.request()?;
        let (Some(wish), Some(gb)) = (request.resize, spec_of(&request)?.resources.get(DISK).copied()) else {
            return Err(Stop::Retry("nobody asks for more any longer".to_owned()));
        };
        self.take_permit().await?;
        self.touched_hypervisor = true;
        self.parts.hypervisor.grow_disk(instance, gb.saturating_mul(1 << 30)).await?;
        self.permit = None;
        pause_for_test_named("before-note-size");
        let mut resources = record.resources.clone();
        resources.insert(DISK.to_owned(), gb);
        let resized = Some(Resized { wished_at: wish.wished_at, failed: None, resources: resources.clone() });
        self.put_record(InstanceRecord { resources, resized, ..record }).await?;
        tracing::info!("EXTENDED VOLUME {instance} TO {gb} GB");
        Ok(())
    }

    /// Notes that a volume cannot be as large as was wished; it stays as large as it is.
    pub(super) async fn give_up_extend(&mut self, reason: String) -> Result<(), Stop> {
        tracing::warn!(reason, "it cannot have its new size, and keeps the old one");
        let record = self.own_record().await?;
        let Some(wish) = self.request()?.resize else { return Ok(()) };
        let mut resources = record.resources.clone();
        // The call may have come to its end all the same. Of a disk that is none any more nobody knows better.
        match self.parts.hypervisor.disk_bytes(self.job.instance).await {
            Ok(Some(bytes)) => {
                resources.insert(DISK.to_owned(), bytes.div_ceil(1 << 30));
            }
            Err(error) if error.is_transient() => return Err(error.into()),
            Ok(None) | Err(_) => {}
        }
        let resized =
            Some(Resized { wished_at: wish.wished_at, failed: Some(reason), resources: resources.clone() });
        self.put_record(InstanceRecord { resources, resized, ..record }).await
    }

    /// Gives the domain the volumes that it is to have, and takes others away. What it may have meanwhile is told before, so
    /// that nobody gives another what this one has.
    pub(super) async fn set_volumes(&mut self) -> Result<(), Stop> {
        let mut wanted = self.wanted_volumes();
        // A definition of before the first start has some of which was not told, and an older etcd knows of none that it was given since.
        let has = self.parts.hypervisor.volumes_of(self.job.instance).await?;
        let kept = self.not_to_be_taken(&wanted, &has).await?;
        let keeps = self.keeps(&kept);
        wanted.extend(kept);
        let is_so = has.iter().collect::<BTreeSet<_>>() == wanted.iter().collect();
        if let Some(why) = keeps.clone().filter(|_| is_so) {
            return self.tell_volumes_failed(wanted, why).await;
        }
        let old = self.told()?.volumes.iter().cloned();
        let either: BTreeSet<Attachment> = old.chain(wanted.iter().cloned()).chain(has).collect();
        let either: Vec<Attachment> = either.into_iter().collect();
        self.tell_volumes(Volumes::Changing(either.clone())).await?;
        pause_for_test_named("before-set-volumes");
        let parts = Arc::clone(&self.parts);
        let set = self.of_guest(parts.hypervisor.set_volumes(self.job.instance, &wanted)).await?;
        match (set, keeps) {
            (Ok(()), None) => {
                tracing::info!(volumes = %serde_json::json!(wanted), "it has the volumes that it is to have");
                Ok(())
            }
            (Ok(()), Some(why)) => self.tell_volumes_failed(wanted, why).await,
            // For now or for good: nothing else that is wanted of it waits for that.
            (Err(error @ (Failed { .. } | NotNow { .. } | TimedOut { .. } | Busy { .. })), _) => {
                self.tell_volumes_failed(either, error.to_string()).await
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    /// What a guest that is up, or that goes on from saved memory, has and is not to have, and was never given by this etcd: one that
    /// was put back to before that, say. Taken away it would be under the file systems that the guest has there, and nobody asked for
    /// that; whoever takes a volume from a guest finds it given.
    async fn not_to_be_taken(
        &self,
        wanted: &[Attachment],
        has: &[Attachment],
    ) -> Result<Vec<Attachment>, Stop> {
        let instance = self.job.instance;
        let mut kept = Vec::new();
        for has in has.iter().filter(|has| wanted.iter().all(|wanted| wanted.volume != has.volume)) {
            let key = self.parts.settings.keys.instance(has.volume);
            let record = self.parts.store.get(&key).await?.0;
            let record = record.and_then(|pair| decode::<Instance>(&pair.value).ok());
            if record.and_then(|record| record.attached) != Some(instance) {
                kept.push(has.clone());
            }
        }
        if !kept.is_empty() {
            let domain = self.parts.hypervisor.observe(instance).await?.domain;
            if !matches!(domain, Some(RunState::Running | RunState::Paused(_) | RunState::Saved)) {
                kept.clear();
            }
        }
        Ok(kept)
    }

    /// That it keeps these, where there are any, and what helps.
    fn keeps(&self, kept: &[Attachment]) -> Option<String> {
        let first = kept.first()?.volume;
        let named = kept.iter().map(|has| format!("volume {} as {}", has.volume, has.device));
        Some(format!(
            "it keeps {}, which this etcd does not know to be given to it: `eschedule volume attach {first} {}` says that it has it; \
             it is taken from it once it does not run",
            named.collect::<Vec<_>>().join(", "),
            self.job.instance,
        ))
    }

    /// Tells that it has, or may have, these, and why not those that it is to have, unless that is told already.
    async fn tell_volumes_failed(&mut self, has: Vec<Attachment>, why: String) -> Result<(), Stop> {
        let told = self.told()?;
        let is_told =
            !told.volumes_changing && told.volumes == has && told.volumes_failed.as_ref() == Some(&why);
        if !is_told {
            tracing::warn!(why, "it has not the volumes that it is to have");
            self.tell_volumes(Volumes::Failed(has, why)).await?;
        }
        self.done.push(Change::VolumesFailed);
        Ok(())
    }

    /// Tells that it has the volumes that it is to have.
    pub(super) async fn note_volumes(&mut self) -> Result<(), Stop> {
        let wanted = self.wanted_volumes();
        self.tell_volumes(Volumes::Are(wanted)).await
    }

    pub(super) fn wanted_volumes(&self) -> Vec<Attachment> {
        self.job.request.as_ref().map(|request| request.volumes.clone()).unwrap_or_default()
    }

    fn told(&self) -> Result<&Status, Stop> {
        self.status.known().ok_or_else(|| Stop::Retry("it has no status yet".to_owned()))
    }

    async fn tell_volumes(&mut self, volumes: Volumes) -> Result<(), Stop> {
        let status = with_volumes(&self.subject, self.told()?, volumes, self.parts.host.now());
        self.write(status).await
    }
}
