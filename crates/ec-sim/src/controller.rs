//! Controllers, as they ship but for their configuration.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::{
    life::Life,
    user::cloud,
    world::{Actor, World},
};

/// All of them; none where one is down.
pub(crate) struct Controllers(Mutex<Vec<Option<Life>>>);

impl Controllers {
    pub(crate) fn new(count: usize) -> Self {
        Self(Mutex::new((0..count).map(|_| None).collect()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Life>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn is_up(&self, number: usize) -> bool {
        self.life(number).is_some()
    }

    pub(crate) fn life(&self, number: usize) -> Option<Life> {
        self.lock().get(number).cloned().flatten()
    }

    pub(crate) fn start(&self, world: &Arc<World>, number: usize) {
        let (life, actor) = (Life::new(), Actor::Controller(number));
        if let Some(slot) = self.lock().get_mut(number) {
            *slot = Some(life.clone());
        }
        world.log(actor, "econtroller starts");
        let world = Arc::clone(world);
        tokio::task::spawn_local(async move {
            let Ok(cloud) = cloud(&world, actor, &life) else { return };
            let (tally, unasked) =
                (econtroller::Tally::new(&cloud.host, Vec::new()), CancellationToken::new());
            tokio::select! {
                biased;
                () = life.over() => {}
                () = econtroller::tend(&cloud, &tally, &unasked) => {}
            }
        });
    }

    /// Whether it was running.
    pub(crate) fn kill(&self, number: usize) -> bool {
        let Some(life) = self.lock().get_mut(number).and_then(Option::take) else { return false };
        life.end();
        true
    }
}
