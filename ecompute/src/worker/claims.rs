//! What an instance holds in placement.

use std::collections::BTreeMap;

use ec_model::{Instance, Workload, decode};
use ec_placement_client::PlacementError;
use ec_plan::engine::{Change, Held};
use ec_runtime::planted;

use super::{Stop, Worker, keys::NOT_OURS, volume::DISK};
use crate::{
    look::ask_placement,
    register::{claim_kept, refresh},
};

impl Worker {
    /// Claims what a guest takes that is here and that placement does not know of. Where there is no room, as
    /// much of the inventory is reserved.
    pub(super) async fn claim(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        let amounts = self.amounts().await?;
        let (project, user) = match &self.job.request {
            Some(request) => (request.project.clone(), request.user.clone()),
            None => self.record().await?.map_or_else(Default::default, |record| {
                let asked = record.intent.and_then(|intent| intent.request().ok());
                (record.project, asked.map(|asked| asked.record.user).unwrap_or_default())
            }),
        };
        let [project, user] =
            [project, user].map(|text| if text.is_empty() { "default".to_owned() } else { text });
        let (placement, node) = (self.placement(), self.parts.node);
        let mut allocations = BTreeMap::from([(node, amounts.clone())]);
        if let Some(shared) = &self.parts.settings.shared
            && let Some(of_node) = allocations.get_mut(&node)
            && let Some(disk) = of_node.remove(DISK)
        {
            allocations.insert(shared.storage.provider, [(DISK.to_owned(), disk)].into());
        }
        allocations.retain(|_, amounts| !amounts.is_empty());
        let claim = || placement.claim_exact(instance, &allocations, &project, &user);
        // Of its guests another agent may know better by now.
        let is_the_node = || match self.parts.presence.fence() {
            Some(_) => Ok(()),
            None => Err(Stop::Retry(NOT_OURS.to_owned())),
        };
        is_the_node()?;
        let mut claimed = claim().await;
        if matches!(claimed, Err(PlacementError::Conflict(_)))
            && self.parts.uncounted.borrow().contains_key(&instance)
        {
            // What stands in its way may be what is kept free for it.
            claimed = claim_kept(&self.parts, instance, &allocations, (&project, &user))
                .await
                .ok_or_else(|| Stop::Retry(NOT_OURS.to_owned()))?;
            let is_undone =
                matches!(&claimed, Err(error) if !matches!(error, PlacementError::Unreachable { .. }));
            if is_undone && self.no_longer_uncounted() {
                // A placement that does not let this agent do both at once; or what is given out several times is reserved in
                // steps, and it takes less than one.
                claimed = match refresh(&self.parts).await {
                    Ok(()) => {
                        is_the_node()?;
                        claim().await
                    }
                    Err(error) => Err(error),
                };
            }
        }
        let Err(error) = claimed else {
            self.no_longer_uncounted();
            let told = serde_json::json!(amounts);
            tracing::info!(amounts = %told, "counted a guest that placement did not know of");
            self.done.push(Change::Allocation(Held::Here(amounts)));
            return Ok(());
        };
        // Until it is counted, as much is kept free for it.
        self.parts.uncounted.send_if_modified(|uncounted| {
            uncounted.insert(instance, amounts.clone()).as_ref() != Some(&amounts)
        });
        Err(match error {
            PlacementError::Conflict(why) => {
                // What is reserved of storage that nodes share each of them would say otherwise.
                let but = match self.parts.settings.shared {
                    Some(_) => ", but for its disk on storage that others share",
                    None => "",
                };
                Stop::Retry(format!("placement has no room to count it, so as much is reserved{but}: {why}"))
            }
            error => error.into(),
        })
    }

    /// Gives back what the instance holds here. What it holds on other nodes is not this node's to give back.
    pub(super) async fn release(&mut self) -> Result<(), Stop> {
        let instance = self.job.instance;
        if self.is_elsewhere().await? {
            tracing::info!("it lies with another node of the same storage by now, and so does its claim");
            self.no_longer_uncounted();
            self.done.push(Change::Allocation(Held::Nothing));
            return Ok(());
        }
        match ask_placement(&self.parts, instance, self.request_id()).await? {
            Held::Here { .. } => self.placement().release(instance).await?,
            Held::Elsewhere => {
                tracing::warn!("its allocation is on other resource providers, and stays there");
            }
            Held::Nothing => {}
        }
        self.no_longer_uncounted();
        self.done.push(Change::Allocation(Held::Nothing));
        Ok(())
    }

    /// Stops where something of it is here after all.
    pub(super) async fn ascertain(&mut self) -> Result<(), Stop> {
        let observed = self.parts.hypervisor.observe(self.job.instance).await?;
        if observed.domain.is_some() || observed.volume {
            self.touched_hypervisor = true;
            return Err(Stop::Retry("something of it has come to this node, and counts".to_owned()));
        }
        Ok(())
    }

    /// Stops where a request speaks of it after all.
    pub(super) async fn inquire(&self) -> Result<(), Stop> {
        if planted("silent-watch-believed") {
            return Ok(());
        }
        let key = self.parts.request_key(self.job.instance);
        match self.parts.store.get(&key).await?.0 {
            Some(_) => Err(Stop::Retry("it is asked for, as this node will hear".to_owned())),
            None => Ok(()),
        }
    }

    /// Whether a volume is with another node, which has the same storage: what is claimed of that does not tell which.
    async fn is_elsewhere(&self) -> Result<bool, Stop> {
        if self.parts.settings.shared.is_none() {
            return Ok(false);
        }
        let key = self.parts.settings.keys.instance(self.job.instance);
        let record =
            self.parts.store.get(&key).await?.0.and_then(|pair| decode::<Instance>(&pair.value).ok());
        Ok(record.is_some_and(|record| {
            record.kind == Workload::Volume && record.node().is_some_and(|node| node != self.parts.node)
        }))
    }

    /// Nothing need be reserved for it any more; whether something was.
    pub(super) fn no_longer_uncounted(&self) -> bool {
        let instance = self.job.instance;
        self.parts.uncounted.send_if_modified(|uncounted| uncounted.remove(&instance).is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ec_model::InstanceId;
    use ec_plan::{
        engine::{Job, Outcome, StatusEntry, Work},
        machine::Effect,
    };
    use tokio::sync::Semaphore;
    use tokio_util::sync::CancellationToken;

    use super::NOT_OURS;
    use crate::{
        alone::Alone,
        worker::{Reins, perform},
    };

    #[tokio::test(start_paused = true)]
    async fn who_is_not_the_node_claims_nothing_for_its_guests() {
        let state = tempfile::tempdir().unwrap();
        let alone = Alone::new(state.path()).await;
        let parts = &alone.parts;
        let claim = async || {
            let job = Job {
                instance: InstanceId::new(uuid::Uuid::from_u128(1)),
                work: Work::Effects(vec![Effect::Claim]),
                why: "placement forgot it".into(),
                request: None,
                request_revision: None,
                kept: None,
                status: StatusEntry::Absent,
                allocated: Some([("VCPU".to_owned(), 1)].into()),
            };
            let before = alone.asked();
            let pool = Arc::new(Semaphore::new(1));
            let report = perform(Arc::clone(parts), pool, job, Reins::default().heard()).await;
            (report.outcome, alone.asked() - before)
        };
        assert_eq!(claim().await, (Outcome::Retry(NOT_OURS.to_owned()), 0));
        let end = CancellationToken::new();
        let keeper = alone.be_the_node(end.clone());
        parts.presence.wait().await;
        let (outcome, asks) = claim().await;
        assert!(matches!(outcome, Outcome::Retry(why) if why != NOT_OURS) && asks > 0);
        end.cancel();
        keeper.await.unwrap();
        assert_eq!(claim().await, (Outcome::Retry(NOT_OURS.to_owned()), 0), "another may be the node");
    }
}
