//! Administrators of a cloud whose etcd asks who somebody is: they let nodes in, and out.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use ec_cloud::{CloudError, Membership};
use ec_store::{Grant, StoreResult, Users};
use tokio::time::sleep;

use crate::{
    door::Door,
    life::Life,
    node::Computer,
    world::{Actor, World},
};

/// Who lets nodes out, and who lets them in again, it may be at the same time.
const OUT: Actor = Actor::User(41);
const IN: Actor = Actor::User(42);

/// Where etcd does not answer, they try it again so often.
const TRIES: usize = 3;

/// Somebody does not let a node in any more: its agent has no rights, and what is written for it may be read by others.
pub(crate) async fn revoke(world: &Arc<World>, computer: &Computer) {
    let (members, name) = (membership(world, OUT), name(computer));
    world.log(OUT, format!("revokes {name}"));
    for _ in 0..TRIES {
        let told = match members.revoke_node(&name).await {
            // etcd did not ask until now.
            Err(CloudError::NotFound(_)) => members.add_node(&name, computer.node, &token(world)).await,
            told => told.map(drop),
        };
        world.log(OUT, told.as_ref().map_or_else(ToString::to_string, |()| "it is done".to_owned()));
        if told.is_ok() && computer.is_revoked() {
            return;
        }
    }
}

/// It is let in again, and starts; where it was not revoked, nothing. Whether it is in.
pub(crate) async fn let_in(world: &Arc<World>, computer: &Computer) -> bool {
    let (members, name) = (membership(world, IN), name(computer));
    // It is one who does, and does not know yet what another try of theirs sees.
    let _one = computer.letting_in.lock().await;
    for _ in 0..TRIES {
        if !computer.is_revoked() {
            return true;
        }
        world.log(IN, format!("lets {name} in again"));
        let told = members.add_node(&name, computer.node, &token(world)).await;
        world.log(IN, told.map_or_else(|error| error.to_string(), |()| "it is done".to_owned()));
        sleep(Duration::from_secs(1)).await;
    }
    !computer.is_revoked()
}

fn name(computer: &Computer) -> String {
    Actor::Agent(computer.node, 0).to_string()
}

fn token(world: &World) -> String {
    format!("{:032x}", world.any())
}

fn membership(world: &Arc<World>, actor: Actor) -> Membership {
    let door = Door { world: Arc::clone(world), actor, life: Life::new(), request_id: None };
    Membership::new(Arc::new(door), world.keys.clone())
}

/// Of users, those of the nodes count: whoever has none of them ends, and may start again once it has.
#[async_trait]
impl Users for Door {
    async fn ensure_role(&self, _: &str, _: &[Grant]) -> StoreResult<()> {
        self.write(async { Ok(()) }).await
    }

    async fn ensure_user(&self, user: &str, _: &str) -> StoreResult<()> {
        let world = &self.world;
        let made = async {
            for computer in of_user(world, user) {
                if computer.revoke(false) && computer.first_start() == 0 && !computer.is_up() {
                    computer.start(world);
                }
            }
            Ok(())
        };
        self.write(made).await
    }

    async fn drop_user(&self, user: &str) -> StoreResult<()> {
        let gone = async {
            for computer in of_user(&self.world, user) {
                computer.revoke(true);
            }
            Ok(())
        };
        self.write(gone).await
    }

    async fn enable_auth(&self) -> StoreResult<()> {
        self.write(async { Ok(()) }).await
    }
}

/// The computers that come to etcd as this user, with the clones.
fn of_user<'a>(world: &'a World, user: &'a str) -> impl Iterator<Item = &'a Arc<Computer>> {
    world.computers.iter().chain(&world.clones).filter(move |computer| computer.node.user() == user)
}
