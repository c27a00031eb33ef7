//! Administrators of a cloud whose etcd asks who somebody is: they let nodes in, and out.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use ec_cloud::{CloudError, Membership};
use ec_model::{InstanceId, Request, decode};
use ec_store::{Grant, StoreResult, Users};
use tokio::time::sleep;

use crate::{
    door::Door,
    life::Life,
    node::Computer,
    user::{cloud, doom},
    volumes,
    world::{Actor, World},
};

/// Who lets nodes out, and who lets them in again, it may be at the same time.
const OUT: Actor = Actor::User(41);
const IN: Actor = Actor::User(42);
/// Who has a host forgotten that is gone.
const FORGETS: Actor = Actor::User(43);

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

/// Somebody has a host forgotten that was not heard of for a while: its users end what was there, most of it. It may come back all the
/// same, at any moment.
pub(crate) async fn forget(world: &Arc<World>, computer: &Computer) {
    sleep(world.millis(30_000..60_000)).await;
    let node = computer.node;
    let Ok(cloud) = cloud(world, FORGETS, &Life::new()) else { return };
    let asked = || -> BTreeMap<InstanceId, Request> {
        let pairs = world.store.content(&world.keys.requests(node)).pairs;
        let requests = pairs.iter().filter_map(|pair| decode::<Request>(&pair.value).ok());
        requests.map(|request| (request.instance, request)).collect()
    };
    let is_left = world.chance(20);
    // Whoever has them goes first.
    let (machines, volumes): (Vec<Request>, Vec<Request>) =
        asked().into_values().partition(|request| request.kind.is_machine());
    for request in machines.into_iter().chain(volumes) {
        if computer.is_up() {
            return;
        }
        if is_left && world.chance(50) {
            continue;
        }
        let instance = request.instance;
        _ = match request.kind.is_machine() {
            true => doom(world, FORGETS, &cloud, instance).await,
            false => volumes::delete(world, FORGETS, &cloud, instance).await,
        };
    }
    world.log(FORGETS, format!("forgets {}", name(computer)));
    world.judge(|referee, _| referee.forgotten(node));
    let before = asked();
    let told = ec_cloud::forget(&cloud, node).await;
    world.log(FORGETS, told.map_or_else(|error| error.to_string(), |()| "it is forgotten".to_owned()));
    let after = asked();
    for instance in before.into_keys().filter(|instance| !after.contains_key(instance)) {
        world.judge(|referee, _| referee.forgotten_there(instance));
    }
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
