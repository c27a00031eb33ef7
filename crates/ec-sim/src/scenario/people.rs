//! People with command lines, one start of it each.

use std::time::Duration;

use ec_cloud::{Cloud, Scheduled, Verb, View};
use ec_model::{AccessKind, CopyOf, ImageId, ImageRef, InstanceId, NodeId, Policy, Restart, State};
use tokio_util::sync::CancellationToken;

use super::Stage;
use crate::{
    catalog,
    life::Life,
    user::{self, Order},
    volumes,
    world::Actor,
};

/// So long somebody waits for a guest.
const PATIENCE: Duration = Duration::from_secs(10 * 60);

/// A guest of one processor.
pub(super) const SMALL: &str = "resources=VCPU:1,MEMORY_MB:128,DISK_GB:1";

/// One start of somebody's command line.
pub(super) struct User {
    stage: Stage,
    actor: Actor,
    cloud: Option<Cloud>,
    life: Life,
    pub(super) stop: CancellationToken,
}

impl User {
    pub(super) fn new(stage: &Stage, number: u32) -> Self {
        let (actor, life) = (Actor::User(number), Life::new());
        let cloud = user::cloud(&stage.world, actor, &life).ok();
        Self { stage: stage.clone(), actor, cloud, life, stop: CancellationToken::new() }
    }

    /// What comes of it, unless the command is killed.
    async fn living<T>(&self, does: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        tokio::select! {
            biased;
            () = self.life.over() => {
                self.stage.world.log(self.actor, "is killed");
                Err("killed".to_owned())
            }
            done = does => done,
        }
    }

    fn cloud(&self) -> Result<&Cloud, String> {
        self.cloud.as_ref().ok_or_else(|| "there is no command line".to_owned())
    }

    pub(super) async fn schedule(&self, name: &'static str) -> Result<Scheduled, String> {
        self.order(Order {
            name: Some(name),
            data: false,
            query: SMALL,
            restart: Restart::No,
            group: None,
            boot: None,
        })
        .await
    }

    /// As after Ctrl-Z, till so long is over.
    pub(super) async fn sleeps(&self, time: Duration) {
        self.stage.world.have_sleep(self.actor, &self.life, time).await;
    }

    /// Does something with the catalogue.
    pub(super) async fn catalogs(&self, deed: catalog::Deed) {
        if let Ok(cloud) = self.cloud() {
            catalog::perform(&self.stage.world, self.actor, cloud, deed).await;
        }
    }

    /// Asks for a guest that boots from this volume.
    pub(super) async fn boots(&self, name: &'static str, volume: InstanceId) -> Result<Scheduled, String> {
        self.order(Order {
            name: Some(name),
            data: false,
            query: "resources=VCPU:1,MEMORY_MB:128",
            restart: Restart::No,
            group: None,
            boot: Some(volume),
        })
        .await
    }

    pub(super) async fn order(&self, order: Order) -> Result<Scheduled, String> {
        let cloud = self.cloud()?;
        self.living(user::place(&self.stage.world, self.actor, cloud, order, &self.stop)).await
    }

    pub(super) async fn waits_for(&self, placed: Scheduled) -> bool {
        let Ok(cloud) = self.cloud() else { return false };
        user::await_active(&self.stage.world, self.actor, cloud, placed, PATIENCE).await
    }

    pub(super) async fn destroy(&self, instance: InstanceId) -> Result<(), String> {
        let cloud = self.cloud()?;
        self.living(user::doom(&self.stage.world, self.actor, cloud, instance)).await
    }

    /// Destroys what is called so.
    pub(super) async fn destroys_called(&self, instance: InstanceId, name: &str) -> Result<(), String> {
        let cloud = self.cloud()?;
        self.living(user::doom_called(&self.stage.world, self.actor, cloud, instance, name)).await
    }

    /// Asks something of an instance, and waits until it is so.
    pub(super) async fn wish(&self, instance: InstanceId, verb: &Verb) -> Result<Option<State>, String> {
        let cloud = self.cloud()?;
        let asked = user::wish(&self.stage.world, self.actor, cloud, instance, verb, Some(PATIENCE));
        self.living(asked).await
    }

    /// Asks something of an instance, and waits for nothing.
    pub(super) async fn asks(&self, instance: InstanceId, verb: &Verb) {
        let Ok(cloud) = self.cloud() else { return };
        let asked = user::wish(&self.stage.world, self.actor, cloud, instance, verb, None);
        self.living(asked).await.ok();
    }

    pub(super) async fn makes_group(&self, name: &str, policy: Policy) -> Result<(), String> {
        let cloud = self.cloud()?;
        self.living(user::have_group(&self.stage.world, self.actor, cloud, name, policy)).await
    }

    pub(super) async fn deletes_group(&self, name: &str) -> Result<(), String> {
        let cloud = self.cloud()?;
        self.living(user::end_group(&self.stage.world, self.actor, cloud, name)).await
    }

    pub(super) async fn makes_volume(&self, order: volumes::Order) -> Result<InstanceId, String> {
        let made = volumes::make(&self.stage.world, self.actor, self.cloud()?, order, &self.stop);
        Ok(self.living(made).await?.instance)
    }

    /// Has a copy be made for an image.
    pub(super) async fn copies_for(&self, image: ImageId, of: &ImageRef) -> Result<InstanceId, String> {
        let made = volumes::copy_for(&self.stage.world, self.actor, self.cloud()?, image, of, &self.stop);
        Ok(self.living(made).await?.instance)
    }

    /// Gives a volume to a guest, and waits until it has it.
    pub(super) async fn attaches(&self, volume: InstanceId, instance: InstanceId) -> Result<(), String> {
        let given = volumes::give(&self.stage.world, self.actor, self.cloud()?, volume, instance, true);
        self.living(given).await
    }

    /// Asks for a snapshot of a guest; as what it comes.
    pub(super) async fn snapshots(&self, instance: InstanceId) -> Result<InstanceId, String> {
        let made = volumes::snapshot(&self.stage.world, self.actor, self.cloud()?, instance, &self.stop);
        Ok(self.living(made).await?.instance)
    }

    /// Has a guest be as it was when this was made of it, and waits until it is.
    pub(super) async fn restores(&self, snapshot: InstanceId) -> Result<(), String> {
        let restored =
            volumes::restore_all(&self.stage.world, self.actor, self.cloud()?, snapshot, &self.stop);
        self.living(restored).await
    }

    /// Has a volume be as this is.
    pub(super) async fn remakes(&self, volume: InstanceId, of: &CopyOf) -> Result<(), String> {
        self.remakes_of(volume, &ImageRef::copy_of(of)).await
    }

    /// Has a volume be made anew of this.
    pub(super) async fn remakes_of(&self, volume: InstanceId, of: &ImageRef) -> Result<(), String> {
        self.living(volumes::restore(&self.stage.world, self.actor, self.cloud()?, volume, of)).await
    }

    /// Forgets a node that will not come back.
    pub(super) async fn forgets(&self, node: NodeId) -> Result<(), String> {
        let (world, cloud) = (&self.stage.world, self.cloud()?);
        world.log(self.actor, format!("forgets {node}"));
        world.judge(|referee, _| referee.forgotten(node));
        let told = self
            .living(async { ec_cloud::forget(cloud, node).await.map_err(|error| error.to_string()) })
            .await;
        world.log(self.actor, told.as_ref().map_or_else(Clone::clone, |()| "it is forgotten".to_owned()));
        told
    }

    /// Has a volume be with another node, and waits until it is.
    pub(super) async fn moves(&self, volume: InstanceId, node: NodeId) -> Result<(), String> {
        self.living(volumes::go(&self.stage.world, self.actor, self.cloud()?, volume, node, true)).await
    }

    /// Takes a volume back, and waits until it is let go of.
    pub(super) async fn detaches(&self, volume: InstanceId) -> Result<(), String> {
        self.living(volumes::take(&self.stage.world, self.actor, self.cloud()?, volume, None, true)).await
    }

    /// The same, where this guest has it and no other.
    pub(super) async fn detaches_from(&self, volume: InstanceId, guest: InstanceId) -> Result<(), String> {
        let taken = volumes::take(&self.stage.world, self.actor, self.cloud()?, volume, Some(guest), true);
        self.living(taken).await
    }

    pub(super) async fn extends(&self, volume: InstanceId, size_gb: u64) -> Result<(), String> {
        self.living(volumes::extend(&self.stage.world, self.actor, self.cloud()?, volume, size_gb)).await
    }

    pub(super) async fn deletes(&self, volume: InstanceId) -> Result<(), String> {
        self.living(volumes::delete(&self.stage.world, self.actor, self.cloud()?, volume)).await
    }

    /// Brings back what nodes hold; how many.
    pub(super) async fn heals(&self) -> Result<usize, String> {
        let cloud = self.cloud()?;
        self.living(user::mend(&self.stage.world, self.actor, cloud)).await
    }

    /// Looks at a guest's console.
    pub(super) async fn looks_at(&self, instance: InstanceId) -> Result<String, String> {
        let cloud = self.cloud()?;
        self.living(user::look_at(&self.stage.world, self.actor, cloud, instance, AccessKind::Console)).await
    }

    pub(super) async fn list(&self) -> Result<Vec<View>, String> {
        let cloud = self.cloud()?;
        self.living(user::look(&self.stage.world, self.actor, cloud)).await
    }
}
