//! Replicas of eplacement, as they ship but for the connections.

use std::sync::{Arc, Mutex, PoisonError};

use ec_model::token_digest;
use ec_placement_model::search::Options;
use placement::{
    http::{Api, ApiConfig, Auth, Cors, Policy, Token, Tokens},
    store::{Keys, Limits, Replica},
};
use tokio_util::sync::CancellationToken;

use crate::{
    door::Door,
    life::Life,
    world::{Actor, PLACEMENT, World},
};

/// Who may change all that placement counts: operators, and whoever has a command line or is a controller.
pub(crate) const ADMIN: &str = "admin";

fn tokens(world: &World) -> Tokens {
    let of_nodes = world.computers.iter().map(|node| (node.token(), "service", Some(node.node.uuid())));
    // The last of those that are the same counts.
    let admin = [(ADMIN.to_owned(), ADMIN, None)];
    let listed = of_nodes.chain(admin).map(|(token, role, provider)| Token {
        sha256: token_digest(&token),
        name: token,
        roles: vec![role.to_owned()],
        project: None,
        provider,
    });
    Tokens::new(listed.collect()).unwrap_or_default()
}

struct Running {
    api: Arc<Api>,
    replica: Replica,
    life: Life,
    stop: CancellationToken,
}

/// All of them; none where one is down.
pub(crate) struct Replicas(Mutex<Vec<Option<Running>>>);

impl Replicas {
    pub(crate) fn new(count: usize) -> Self {
        Self(Mutex::new((0..count).map(|_| None).collect()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Option<Running>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// One that runs, as somebody between would choose it.
    pub(crate) fn any(&self, world: &World) -> Option<(Arc<Api>, Life)> {
        let running = self.lock();
        let running: Vec<&Running> = running.iter().flatten().collect();
        let chosen = match running.len() {
            0 => return None,
            1 => running.first(),
            count => running.get(world.index(count)),
        };
        chosen.map(|running| (Arc::clone(&running.api), running.life.clone()))
    }

    pub(crate) fn start(&self, world: &Arc<World>, number: usize) {
        let (life, stop) = (Life::new(), CancellationToken::new());
        let actor = Actor::Replica(number);
        let door = Door { world: Arc::clone(world), actor, life: life.clone(), request_id: None };
        let (keys, limits) = (Keys::new(PLACEMENT), Limits::default());
        let host = world.machine(&life);
        let replica = Replica::start(Arc::new(door), keys, limits, host, stop.clone());
        let (watched, in_world, watched_life) = (replica.clone(), Arc::clone(world), life.clone());
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = watched_life.over() => {}
                how = watched.failed() => {
                    in_world.judge(|referee, _| referee.found(format!("a replica of eplacement broke: {how}")));
                }
            }
        });
        let config = ApiConfig {
            auth: Auth::Tokens(tokens(world)),
            policy: Policy::Legacy,
            cors: Cors::default(),
            randomize: false,
            search: Options::default(),
            certificates: Vec::new(),
        };
        let api = Arc::new(Api::new(replica.clone(), config, false));
        if let Some(slot) = self.lock().get_mut(number) {
            *slot = Some(Running { api, replica, life, stop });
        }
        world.log(actor, "eplacement starts");
    }

    /// Whether it was running.
    pub(crate) fn kill(&self, number: usize) -> bool {
        let Some(running) = self.lock().get_mut(number).and_then(Option::take) else { return false };
        running.life.end();
        running.stop.cancel();
        true
    }

    pub(crate) fn is_up(&self, number: usize) -> bool {
        self.life(number).is_some()
    }

    pub(crate) fn life(&self, number: usize) -> Option<Life> {
        self.lock().get(number)?.as_ref().map(|running| running.life.clone())
    }

    /// What all that run know, each in its place.
    pub(crate) fn running(&self) -> Vec<(usize, Replica)> {
        let known =
            |(number, slot): (usize, &Option<Running>)| Some((number, slot.as_ref()?.replica.clone()));
        self.lock().iter().enumerate().filter_map(known).collect()
    }
}
