//! An agent's way to its simulated hypervisor. What has reached the hypervisor is done, though the agent that asked
//! for it is dead by then, or waits no more.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use ec_hypervisor::{
    Console, DomainSize, DomainSpec, HostInfo, Hypervisor, HypervisorError, HypervisorEvent,
    HypervisorResult, Observed, Operation, Printed, SimulatedHypervisor, Usage, VolumeSource,
};
use ec_model::{Address, Attachment, BaseImage, InstanceId, NodeId};
use tokio::{
    net::UnixStream,
    sync::{broadcast, mpsc},
    time::sleep,
};

use crate::{
    life::Life,
    node::Computer,
    snag::Fate,
    world::{Actor, World},
};

/// As long as the agent's libvirt waits for a call.
const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(crate) struct Hands {
    pub(crate) world: Arc<World>,
    pub(crate) computer: Arc<Computer>,
    pub(crate) actor: Actor,
    pub(crate) life: Life,
}

impl Hands {
    async fn way(&self) {
        self.life.gate().await;
        self.world.way().await;
        self.life.gate().await;
    }

    fn not_now(&self, what: &str) -> HypervisorResult<()> {
        if self.world.chance(self.world.storm().hypervisor / 2) {
            return Err(HypervisorError::NotNow { what: what.into(), detail: "it is busy".into() });
        }
        Ok(())
    }

    async fn ask<T>(
        &self,
        what: &str,
        call: impl Future<Output = HypervisorResult<T>>,
    ) -> HypervisorResult<T> {
        self.way().await;
        self.not_now(what)?;
        let answer = call.await;
        // What it tells was so when it was asked.
        let asked = [format!("asks its hypervisor to {what}")];
        let late = match self.world.snagged(self.actor, &self.life, &asked).await {
            Some(Fate::IsLate(late)) => Some(late),
            _ if self.world.chance(self.world.storm().hypervisor / 4) => {
                Some(self.world.millis(1_000..25_000))
            }
            _ => None,
        };
        if let Some(late) = late {
            sleep(late).await;
        }
        self.way().await;
        answer
    }

    async fn change<F>(
        &self,
        what: Operation,
        instance: InstanceId,
        call: impl FnOnce(SimulatedHypervisor) -> F + Send + 'static,
    ) -> HypervisorResult<()>
    where
        F: Future<Output = HypervisorResult<()>> + Send + 'static,
    {
        self.way().await;
        let name = format!("{what:?} {instance}");
        let call_told = [format!("hypervisor {name}")];
        let snagged = self.world.snagged(self.actor, &self.life, &call_told).await;
        let fate = match snagged {
            Some(fate) => fate,
            None => {
                self.not_now(&name)?;
                self.fate(what)
            }
        };
        if fate == Fate::IsLost {
            return Err(HypervisorError::NotNow { what: name, detail: "it is busy".into() });
        }
        if matches!(fate, Fate::IsRefused(_) | Fate::IsDenied) {
            if fate == Fate::IsDenied {
                self.perform(what, instance, call, false).await.ok();
            }
            self.world.log(self.actor, format!("hypervisor refuses {name}"));
            self.world.judge(|referee, _| referee.disturbed(instance));
            return Err(HypervisorError::Failed { what: name, detail: "refused on request".into() });
        }
        let is_start = matches!(what, Operation::Start | Operation::StartRescue);
        if is_start && matches!(fate, Fate::IsLate(_) | Fate::LosesItsAnswer | Fate::KillsAfterwards) {
            self.world.judge(|referee, _| referee.start_unknown(instance));
        }
        let (hands, era) = (self.clone(), self.computer.era());
        if let Fate::IsLate(late) = fate {
            tokio::spawn(async move {
                sleep(late).await;
                if hands.computer.era() == era {
                    hands.perform(what, instance, call, true).await.ok();
                }
            });
            sleep(TIMEOUT).await;
            self.life.gate().await;
            return Err(HypervisorError::TimedOut { what: name, seconds: TIMEOUT.as_secs() });
        }
        let done = tokio::spawn(async move { hands.perform(what, instance, call, false).await }).await;
        match fate {
            Fate::KillsAfterwards => self.world.end(self.actor, &self.life).await,
            Fate::LosesItsAnswer => {
                sleep(TIMEOUT).await;
                self.life.gate().await;
                return Err(HypervisorError::TimedOut { what: name, seconds: TIMEOUT.as_secs() });
            }
            _ => {}
        }
        self.way().await;
        done.unwrap_or_else(|error| {
            Err(HypervisorError::Failed { what: name, detail: format!("it broke: {error}") })
        })
    }

    /// The same, of a domain that is to be so.
    async fn change_as<F>(
        &self,
        what: Operation,
        spec: &DomainSpec,
        call: impl FnOnce(SimulatedHypervisor, DomainSpec) -> F + Send + 'static,
    ) -> HypervisorResult<()>
    where
        F: Future<Output = HypervisorResult<()>> + Send + 'static,
    {
        let spec = spec.clone();
        self.change(what, spec.instance, move |hypervisor| call(hypervisor, spec)).await
    }

    fn fate(&self, what: Operation) -> Fate {
        if self.world.chance(self.world.storm().refusals) {
            // A start that works may be told to have failed.
            let is_done = what == Operation::Start && self.world.chance(30);
            return if is_done { Fate::IsDenied } else { Fate::IsRefused(0) };
        }
        if self.world.chance(self.world.storm().hypervisor / 2) {
            return Fate::IsLate(self.world.millis(31_000..90_000));
        }
        Fate::Arrives
    }

    async fn perform<F>(
        &self,
        what: Operation,
        instance: InstanceId,
        call: impl FnOnce(SimulatedHypervisor) -> F + Send,
        late: bool,
    ) -> HypervisorResult<()>
    where
        F: Future<Output = HypervisorResult<()>> + Send,
    {
        let hypervisor = self.computer.hypervisor.clone();
        let before = hypervisor.observe(instance).await?;
        let effects = hypervisor.effects(what, instance);
        let done = call(hypervisor.clone()).await;
        if hypervisor.effects(what, instance) > effects {
            let remark = if late { " (late)" } else { "" };
            self.world.log(self.actor, format!("hypervisor {what:?} {instance}{remark}"));
            self.world.judge(|referee, world| {
                referee.touched(world, self.computer.node, what, instance, before, late);
            });
            self.world.happened_to(instance);
        }
        done
    }
}

#[async_trait]
impl Hypervisor for Hands {
    async fn prepare(&self) -> HypervisorResult<HostInfo> {
        self.ask("prepare the host", self.computer.hypervisor.prepare()).await
    }

    async fn list(&self) -> HypervisorResult<HashMap<InstanceId, Observed>> {
        self.ask("list the instances", self.computer.hypervisor.list()).await
    }

    async fn observe(&self, instance: InstanceId) -> HypervisorResult<Observed> {
        self.ask("observe the instance", self.computer.hypervisor.observe(instance)).await
    }

    async fn create_overlay(
        &self,
        instance: InstanceId,
        base: &BaseImage,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        let base = base.clone();
        self.change(Operation::CreateOverlay, instance, move |hypervisor| async move {
            hypervisor.create_overlay(instance, &base, capacity_bytes).await
        })
        .await
    }

    async fn create_successor(
        &self,
        instance: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        let source = source.clone();
        self.change(Operation::CreateSuccessor, instance, move |hypervisor| async move {
            hypervisor.create_successor(instance, &source, capacity_bytes).await
        })
        .await
    }

    async fn replace_overlay(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(Operation::ReplaceOverlay, instance, move |hypervisor| async move {
            hypervisor.replace_overlay(instance).await
        })
        .await
    }

    async fn drop_successor(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(Operation::DropSuccessor, instance, move |hypervisor| async move {
            hypervisor.drop_successor(instance).await
        })
        .await
    }

    async fn create_rescue(&self, instance: InstanceId, base: &BaseImage) -> HypervisorResult<()> {
        let base = base.clone();
        self.change(Operation::CreateRescue, instance, move |hypervisor| async move {
            hypervisor.create_rescue(instance, &base).await
        })
        .await
    }

    async fn drop_rescue(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(Operation::DropRescue, instance, move |hypervisor| async move {
            hypervisor.drop_rescue(instance).await
        })
        .await
    }

    async fn define(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.change_as(Operation::Define, spec, |host, spec| async move { host.define(&spec).await }).await
    }

    async fn persist(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.change_as(Operation::Persist, spec, |host, spec| async move { host.persist(&spec).await }).await
    }

    async fn create_volume(
        &self,
        volume: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        let source = source.clone();
        self.change(Operation::CreateVolume, volume, move |hypervisor| async move {
            hypervisor.create_volume(volume, &source, capacity_bytes).await
        })
        .await
    }

    fn give_up_copy(&self, owner: InstanceId) {
        self.computer.hypervisor.give_up_copy(owner);
    }

    async fn set_volumes(&self, instance: InstanceId, volumes: &[Attachment]) -> HypervisorResult<()> {
        let volumes = volumes.to_vec();
        self.change(Operation::SetVolumes, instance, move |hypervisor| async move {
            hypervisor.set_volumes(instance, &volumes).await
        })
        .await
    }

    async fn volumes_of(&self, instance: InstanceId) -> HypervisorResult<Vec<Attachment>> {
        self.ask("look which volumes it has", self.computer.hypervisor.volumes_of(instance)).await
    }

    /// Asked right before a call that takes its time and may fail.
    async fn has_volume(&self, volume: InstanceId) -> HypervisorResult<bool> {
        self.computer.hypervisor.has_volume(volume).await
    }

    async fn hand_over(&self, volume: InstanceId, node: NodeId) -> HypervisorResult<()> {
        self.change(Operation::HandOver, volume, move |hypervisor| async move {
            hypervisor.hand_over(volume, node).await
        })
        .await
    }

    async fn disk_bytes(&self, instance: InstanceId) -> HypervisorResult<Option<u64>> {
        self.ask("measure the disk", self.computer.hypervisor.disk_bytes(instance)).await
    }

    async fn grow_disk(&self, instance: InstanceId, capacity_bytes: u64) -> HypervisorResult<()> {
        self.change(Operation::GrowDisk, instance, move |hypervisor| async move {
            hypervisor.grow_disk(instance, capacity_bytes).await
        })
        .await
    }

    async fn grow(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        let has = self.computer.hypervisor.size(spec.instance).await.ok().flatten();
        if has.is_some_and(|has| spec.vcpus < has.vcpus || spec.memory_mb < has.memory_mb) {
            let what = format!("{} gives {} less than it has while it runs", self.actor, spec.instance);
            self.world.judge(|referee, _| referee.found(what));
        }
        self.change_as(Operation::Grow, spec, |host, spec| async move { host.grow(&spec).await }).await
    }

    async fn redefine(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.change_as(Operation::Redefine, spec, |host, spec| async move { host.redefine(&spec).await })
            .await
    }

    async fn start(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(
            Operation::Start,
            instance,
            move |hypervisor| async move { hypervisor.start(instance).await },
        )
        .await
    }

    async fn start_rescue(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        self.change_as(
            Operation::StartRescue,
            spec,
            |host, spec| async move { host.start_rescue(&spec).await },
        )
        .await
    }

    async fn resume(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(Operation::Resume, instance, move |hypervisor| async move {
            hypervisor.resume(instance).await
        })
        .await
    }

    async fn shut_down(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(Operation::ShutDown, instance, move |hypervisor| async move {
            hypervisor.shut_down(instance).await
        })
        .await
    }

    async fn power_off(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(Operation::PowerOff, instance, move |hypervisor| async move {
            hypervisor.power_off(instance).await
        })
        .await
    }

    async fn pause(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(
            Operation::Pause,
            instance,
            move |hypervisor| async move { hypervisor.pause(instance).await },
        )
        .await
    }

    async fn save(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(
            Operation::Save,
            instance,
            move |hypervisor| async move { hypervisor.save(instance).await },
        )
        .await
    }

    async fn drop_memory(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(Operation::DropMemory, instance, move |hypervisor| async move {
            hypervisor.drop_memory(instance).await
        })
        .await
    }

    async fn size(&self, instance: InstanceId) -> HypervisorResult<Option<DomainSize>> {
        self.ask("measure the domain", self.computer.hypervisor.size(instance)).await
    }

    async fn usage(&self, instances: &[InstanceId]) -> HypervisorResult<HashMap<InstanceId, Usage>> {
        self.ask("read what guests use", self.computer.hypervisor.usage(instances)).await
    }

    async fn destroy(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.change(Operation::Destroy, instance, move |hypervisor| async move {
            hypervisor.destroy(instance).await
        })
        .await
    }

    async fn addresses(
        &self,
        instances: &[InstanceId],
    ) -> HypervisorResult<HashMap<InstanceId, Vec<Address>>> {
        self.ask("read the addresses", self.computer.hypervisor.addresses(instances)).await
    }

    async fn console_tail(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<String> {
        self.ask("read the console", self.computer.hypervisor.console_tail(instance, max_bytes)).await
    }

    async fn open_console(&self, instance: InstanceId) -> HypervisorResult<Console> {
        self.ask("open the console", self.computer.hypervisor.open_console(instance)).await
    }

    async fn follow_console(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<Printed> {
        self.ask("follow the console", self.computer.hypervisor.follow_console(instance, max_bytes)).await
    }

    async fn open_graphics(&self, instance: InstanceId) -> HypervisorResult<UnixStream> {
        self.ask("open the screen", self.computer.hypervisor.open_graphics(instance)).await
    }

    async fn read_disk(&self, volume: InstanceId) -> HypervisorResult<mpsc::Receiver<Bytes>> {
        self.ask("read the disk", self.computer.hypervisor.read_disk(volume)).await
    }

    fn events(&self) -> broadcast::Receiver<HypervisorEvent> {
        self.computer.hypervisor.events()
    }
}
