//! Histories that somebody wrote: what was seen to go wrong once, or could, each with what must hold. A scenario is a
//! name, a sentence and a function over a [`Stage`]; then everything is healed, everybody has to come to rest, and all is
//! destroyed without anything left, as in every history. Nothing is left to chance, so that each has one log, which is
//! kept in `scenarios/NAME/log` for people to read and compare.

mod believed;
mod build;
mod callers;
mod controller;
mod etcd;
mod forget;
mod groups;
mod guards;
mod guests;
mod heal;
mod host;
mod looks;
mod operators;
mod people;
mod placement;
mod power;
mod reach;
mod rebuild;
mod records;
mod rescue;
mod resize;
mod snapshots;
mod stage;
mod still;
mod volumes;

use futures::future::LocalBoxFuture;

pub(crate) use stage::Stage;

type Play = fn(Stage) -> LocalBoxFuture<'static, ()>;

/// One history that somebody wrote.
pub struct Scenario {
    /// What it is called, in arguments and as a directory.
    pub name: &'static str,
    /// What happens, and what must hold.
    pub story: &'static str,
    pub(crate) nodes: usize,
    pub(crate) replicas: usize,
    pub(crate) controllers: usize,
    pub(crate) storages: usize,
    pub(crate) play: Play,
}

impl Scenario {
    /// On one node, with one replica of eplacement.
    const fn new(name: &'static str, story: &'static str, play: Play) -> Self {
        Self { name, story, nodes: 1, replicas: 1, controllers: 0, storages: 0, play }
    }

    const fn on_nodes(self, nodes: usize) -> Self {
        Self { nodes, ..self }
    }

    /// All of whose disks lie on the same storage.
    const fn on_shared_storage(self) -> Self {
        Self { storages: 1, ..self }
    }

    const fn with_controllers(self, controllers: usize) -> Self {
        Self { controllers, ..self }
    }

    const fn with_replicas(self, replicas: usize) -> Self {
        Self { replicas, ..self }
    }
}

/// All of them, the most dangerous first.
///
/// Were this made part of who calls it, all that scenarios play would be compiled there again.
#[inline(never)]
pub fn scenarios() -> impl Iterator<Item = &'static Scenario> {
    [
        etcd::ALL,
        heal::ALL,
        host::ALL,
        guests::ALL,
        power::ALL,
        reach::ALL,
        rebuild::ALL,
        rescue::ALL,
        resize::ALL,
        snapshots::ALL,
        still::ALL,
        volumes::ALL,
        build::ALL,
        records::ALL,
        believed::ALL,
        placement::ALL,
        operators::ALL,
        controller::ALL,
        forget::ALL,
        callers::ALL,
        groups::ALL,
        guards::ALL,
        looks::ALL,
    ]
    .into_iter()
    .flatten()
}
