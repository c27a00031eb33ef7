//! What is to be done so that a stack's volumes are what its file says, and its instances have those that it gives them.
//!
//! ```text
//!   a name of the file ─┬─ nobody bears it ────────────▶ create
//!                       ├─ a volume of the stack ──────▶ labels, a larger size; what it was made of matters no more
//!                       └─ a smaller one, another's ───▶ refused, before anything is done
//!   whose it is to be ──── has it another of the file ─▶ detach there ──▶ attach here
//!   no name of the file ─┬ prune_volumes ──────────────▶ detach ──▶ delete
//!                        └ else ───────────────────────▶ told that it stays
//! ```
//!
//! A volume that lies with another node of the storage that its instance's node has comes to it, if it stands on no image.
//!
//! What the file does not name is left as it is, volumes of instances and instances of volumes, too.

use std::collections::{BTreeMap, BTreeSet};

use ec_model::{Attachment, ImageRef, Instance, InstanceId, NodeId};

use super::{Difference, Placed, STACK, Standing, Wished, fold, words};
use crate::{sizes::of_disk, verbs::Change, volumes::lies_alone};

/// A volume as a file says it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WishedVolume {
    /// What it is called.
    pub name: String,
    /// How large it is, in GiB; as what it is a copy of where the file does not say.
    pub size_gb: Option<u64>,
    /// What it is made of, where the file says it. It does not matter any more once it is made.
    pub image: Option<ImageRef>,
    /// The node of what it is to be a copy of.
    pub copied_on: Option<NodeId>,
    /// What its user tells it apart by; that of the stack is added.
    pub labels: BTreeMap<String, String>,
    /// Which of the file's instances is to have it.
    pub holder: Option<usize>,
    /// Whether that boots from it.
    pub boots: bool,
}

/// One difference of volumes, and what it takes to make it good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeStep {
    /// There is none of the name: make it. Which of the file's.
    Create(usize),
    /// Its labels are otherwise.
    Set(InstanceId, String, Change),
    /// It is to be as large as this.
    Extend {
        /// Which.
        volume: InstanceId,
        /// What it is called.
        name: String,
        /// How large it is, in GiB.
        from: u64,
        /// How large it shall be.
        to: u64,
    },
    /// An instance has it that is not to have it.
    Detach {
        /// Which.
        volume: InstanceId,
        /// What it is called.
        name: String,
        /// The instance.
        from: InstanceId,
        /// What that is called.
        called: String,
    },
    /// An instance is to have it: which of the file's volumes, which of its instances.
    Attach(usize, usize),
    /// This is otherwise and stays so, for whoever applies to do something about it.
    Stands(InstanceId, String, String),
    /// It is of the stack, and the file says nothing of it.
    Delete(InstanceId, String),
    /// The same, and it stays, with what was written on it.
    Keep(InstanceId, String),
}

/// What a file says that cannot be: nothing at all is done then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// Of the file's volume of this number.
    Volume(usize, String),
    /// Of the size that the file says of this one.
    Size(usize, String),
    /// Of the volumes that the file's instance of this number is to have.
    Instance(usize, String),
}

/// What the file says of volumes, and what there is. Either may be thousands, and each difference asks for what belongs together: that is
/// looked up once.
#[derive(Debug)]
pub struct Volumes<'a> {
    /// The stack's name.
    pub stack: &'a str,
    /// The file's instances.
    pub instances: &'a [Wished],
    /// The file's volumes.
    pub volumes: &'a [WishedVolume],
    /// The project's volumes.
    stored: &'a [Standing],
    /// Of the living nodes that share storage, which: its resource provider.
    shared: &'a BTreeMap<NodeId, NodeId>,
    /// Of each of the file's volumes, the one that is there.
    there: Vec<Option<&'a Standing>>,
    /// The same of its instances.
    instances_there: Vec<Option<&'a Instance>>,
    /// The numbers of the file's instances, by their names in one case of letters.
    numbers: BTreeMap<String, usize>,
    /// The volumes that each of the file's instances is to have.
    given: BTreeMap<usize, Vec<usize>>,
    /// The instance that has a volume by now.
    holders: BTreeMap<InstanceId, &'a Instance>,
}

/// What goes that the file does not name.
#[derive(Debug, Clone, Copy, Default)]
pub struct Prune {
    /// Instances and groups.
    pub instances: bool,
    /// Volumes, with what was written on them.
    pub volumes: bool,
}

impl<'a> Volumes<'a> {
    /// The instances and volumes that the file says, those of the project, and of the living nodes that share storage, which: its
    /// resource provider.
    pub fn new(
        stack: &'a str,
        (instances, volumes): (&'a [Wished], &'a [WishedVolume]),
        (machines, stored): (&'a [Standing], &'a [Standing]),
        shared: &'a BTreeMap<NodeId, NodeId>,
    ) -> Self {
        let (placed_machines, placed_volumes) = (Placed::of(machines), Placed::of(stored));
        let there = volumes.iter().map(|wish| placed_volumes.named(&wish.name)).collect();
        let instances_there =
            instances.iter().map(|wish| Some(&placed_machines.named(&wish.name)?.record)).collect();
        let (mut numbers, mut holders) = (BTreeMap::new(), BTreeMap::new());
        let mut given: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (number, wish) in instances.iter().enumerate() {
            numbers.entry(fold(&wish.name)).or_insert(number);
        }
        for (number, wish) in volumes.iter().enumerate() {
            if let Some(holder) = wish.holder {
                given.entry(holder).or_default().push(number);
            }
        }
        for Standing { record, .. } in machines {
            for Attachment { volume, .. } in &record.volumes {
                holders.entry(*volume).or_insert(record);
            }
        }
        Self { stack, instances, volumes, stored, shared, there, instances_there, numbers, given, holders }
    }

    /// The volume that is there for that of the file.
    pub fn there(&self, number: usize) -> Option<&'a Instance> {
        self.there[number].map(|standing| &standing.record)
    }

    /// The instance that is there for that of the file.
    pub fn instance_there(&self, number: usize) -> Option<&'a Instance> {
        self.instances_there[number]
    }

    /// The node where one of the file's instances is, or has to be: where its volumes lie, or will.
    pub fn node_for(&self, instance: usize) -> Option<NodeId> {
        let there = self.instance_there(instance).and_then(Instance::node);
        // What stays where it is comes before what goes where it is wanted.
        let fixed =
            || self.of(instance).filter(|number| !self.moves(*number)).find_map(|number| self.lies(number));
        there.or_else(fixed).or_else(|| self.of(instance).find_map(|number| self.lies(number)))
    }

    /// Whether a volume that is there goes to another node of its storage where it is wanted there. What is booted from is not.
    fn moves(&self, number: usize) -> bool {
        let alone = self.there(number).is_some_and(|record| lies_alone(&record.spec.image).is_ok());
        alone && !self.volumes[number].boots
    }

    /// Whether it goes from one node to another: they share storage.
    fn goes(&self, number: usize, from: NodeId, to: NodeId) -> bool {
        let storage = self.shared.get(&from);
        self.moves(number) && storage.is_some() && storage == self.shared.get(&to)
    }

    /// The volume of the file that one of its instances boots from.
    pub fn root_of(&self, instance: usize) -> Option<usize> {
        self.of(instance).find(|number| self.volumes[*number].boots)
    }

    /// How many GiB one of the file's instances needs beside itself, for volumes that there are not yet; but for the one that
    /// it boots from, where that is made by then.
    pub fn room_for(&self, instance: usize, has_root: bool) -> u64 {
        let new = self.of(instance).filter(|number| self.there(*number).is_none());
        let new = new.filter(|number| !(has_root && self.volumes[*number].boots));
        new.filter_map(|number| self.volumes[number].size_gb).fold(0, u64::saturating_add)
    }

    /// The volumes that an instance of the file is to have.
    fn of(&self, instance: usize) -> impl Iterator<Item = usize> {
        self.given.get(&instance).into_iter().flatten().copied()
    }

    /// Where a volume of the file lies, or cannot but lie.
    fn lies(&self, number: usize) -> Option<NodeId> {
        self.there(number).map_or(self.volumes[number].copied_on, Instance::node)
    }

    /// The instance that is to have a volume by now.
    fn holder(&self, volume: InstanceId) -> Option<&'a Instance> {
        self.holders.get(&volume).copied()
    }

    /// Which of the file's instances that is.
    fn number_of(&self, record: &Instance) -> Option<usize> {
        let wished = self.numbers.get(&fold(record.name.as_ref()?)).copied();
        wished.filter(|_| Standing::is_of(record, self.stack))
    }

    /// What of it cannot be.
    ///
    /// # Errors
    /// The first thing.
    pub fn check(&self) -> Result<(), Refused> {
        for (number, wish) in self.volumes.iter().enumerate() {
            let Some(record) = self.there(number) else { continue };
            if record.spec.is_snapshot() {
                let name = &wish.name;
                return Err(Refused::Volume(
                    number,
                    format!(
                        "`{name}` is a snapshot, which stays as it was made: nothing was changed; call the volume otherwise, with `image: volume:{name}` where it is to be a copy of it"
                    ),
                ));
            }
            if !Standing::is_of(record, self.stack) {
                let (name, volume, of) = (&wish.name, record.instance, self.stack);
                return Err(Refused::Volume(
                    number,
                    format!(
                        "`{name}` is volume {volume}, which is not of the stack `{of}`: nothing was changed; `eschedule set {volume} --label {STACK}={of}` makes it so"
                    ),
                ));
            }
            let has = of_disk(&record.spec.resources);
            if wish.size_gb.is_some_and(|size| size < has) {
                let why = format!("it has {has} GB, and never shrinks: nothing was changed");
                return Err(Refused::Size(number, why));
            }
        }
        (0..self.instances.len()).try_for_each(|number| self.check_nodes(number))
    }

    /// One that is to be made has all its volumes on one node; one that is there gets only what can be on its own.
    fn check_nodes(&self, instance: usize) -> Result<(), Refused> {
        let Some(node) = self.node_for(instance) else { return Ok(()) };
        let is_there = self.instance_there(instance).is_some();
        for number in self.of(instance) {
            // What is there stays there: of that it is told only where its instance could still be elsewhere.
            let is_fixed = is_there && self.there(number).is_some();
            let Some(lies) = self.lies(number).filter(|lies| *lies != node && !is_fixed) else { continue };
            if self.goes(number, lies, node) {
                continue;
            }
            let name = &self.volumes[number].name;
            let what = if is_there { "it is on" } else { "another of its volumes lies on" };
            return Err(Refused::Instance(
                instance,
                format!(
                    "`{name}` lies on node {lies}, and {what} node {node}: an instance has volumes of its own node; nothing was changed"
                ),
            ));
        }
        Ok(())
    }

    /// The differences of the volumes, in the order in which they are made good.
    pub fn differences(&self, prune: Prune) -> Vec<Difference> {
        let (mut changed, mut detached, mut attached) = (Vec::new(), Vec::new(), Vec::new());
        for (number, wish) in self.volumes.iter().enumerate() {
            let Some(Standing { record, ails, .. }) = self.there[number] else {
                changed.push(VolumeStep::Create(number));
                // What boots from it has it from its beginning.
                let given = wish.holder.filter(|_| !wish.boots);
                attached.extend(given.map(|holder| VolumeStep::Attach(number, holder)));
                continue;
            };
            changed.extend(self.changes(wish, record, ails.clone()));
            let holder = self.holder(record.instance);
            let Some(wanted) = wish.holder else {
                // Whoever the file does not name has what it has.
                if let Some(from) = holder.filter(|holder| self.number_of(holder).is_some()) {
                    detached.push(let_go(record, &wish.name, from));
                }
                continue;
            };
            if let Some(instance) = self.instance_there(wanted)
                && instance.node() != record.node()
                && !record.node().zip(instance.node()).is_some_and(|(from, to)| self.goes(number, from, to))
            {
                let node = |record: &Instance| {
                    record.node().map_or_else(|| "no node".to_owned(), |node| node.to_string())
                };
                let why = format!(
                    "it lies on node {}, and `{}`, which is to have it, is on {}: a volume stays where it was made",
                    node(record),
                    self.instances[wanted].name,
                    node(instance)
                );
                changed.push(VolumeStep::Stands(record.instance, wish.name.clone(), why));
                continue;
            }
            if wish.boots
                && let Some(instance) = self.instance_there(wanted)
            {
                if Attachment::root_of(&instance.volumes) != Some(record.instance) {
                    let name = &self.instances[wanted].name;
                    let why = format!(
                        "`{name}` is to boot from it and does not, and an instance keeps what it boots from: destroy that and apply again"
                    );
                    changed.push(VolumeStep::Stands(record.instance, wish.name.clone(), why));
                }
                continue;
            }
            match holder {
                Some(holder) if self.number_of(holder) == Some(wanted) => continue,
                Some(holder) if !Standing::is_of(holder, self.stack) => {
                    changed.push(foreign(record, &wish.name, holder));
                    continue;
                }
                // It ends, and has none then.
                Some(holder) if prune.instances && self.number_of(holder).is_none() => {}
                Some(holder) => {
                    let step = let_go(record, &wish.name, holder);
                    if matches!(step, VolumeStep::Stands(..)) {
                        changed.push(step);
                        continue;
                    }
                    detached.push(step);
                }
                None => {}
            }
            if !wish.boots {
                attached.push(VolumeStep::Attach(number, wanted));
            }
        }
        let mut last = Vec::new();
        for record in self.surplus() {
            let name = record.name.clone().unwrap_or_default();
            if !prune.volumes {
                last.push(VolumeStep::Keep(record.instance, name));
                continue;
            }
            match self.holder(record.instance) {
                Some(holder) if !Standing::is_of(holder, self.stack) => {
                    changed.push(foreign(record, &name, holder));
                    continue;
                }
                Some(holder) if prune.instances && self.number_of(holder).is_none() => {}
                Some(holder) => {
                    let step = let_go(record, &name, holder);
                    if matches!(step, VolumeStep::Stands(..)) {
                        changed.push(step);
                        continue;
                    }
                    detached.push(step);
                }
                None => {}
            }
            last.push(VolumeStep::Delete(record.instance, name));
        }
        changed.into_iter().chain(detached).chain(attached).chain(last).map(Difference::Volume).collect()
    }

    /// Puts all that differs into the order in which it is made good.
    ///
    /// What ends, ends when what the file has made as a copy of its disk was asked for; but where it has what another is to boot
    /// from, before that: who boots from a volume has it from its beginning, and the other volumes are made beside it.
    pub fn in_order(&self, mut steps: Vec<Difference>) -> Vec<Difference> {
        let (roots, have_roots) = self.roots();
        steps.sort_by_cached_key(|step| match step {
            Difference::Run(number) => usize::from(self.instances[*number].boots),
            Difference::Destroy(instance, _) if !have_roots.contains(instance) => 3,
            Difference::Volume(VolumeStep::Detach { volume, .. }) if roots.contains(volume) => 0,
            Difference::Volume(
                VolumeStep::Create(_)
                | VolumeStep::Set(..)
                | VolumeStep::Extend { .. }
                | VolumeStep::Stands(..),
            ) => 2,
            Difference::Volume(_) => 4,
            _ => 0,
        });
        steps
    }

    /// The volumes that are there and that instances of the file are to boot from, and the instances that have those.
    fn roots(&self) -> (BTreeSet<InstanceId>, BTreeSet<InstanceId>) {
        let roots = (0..self.volumes.len()).filter(|number| self.volumes[*number].boots);
        let roots: BTreeSet<_> = roots.filter_map(|number| Some(self.there(number)?.instance)).collect();
        let holders = roots.iter().filter_map(|root| Some(self.holder(*root)?.instance)).collect();
        (roots, holders)
    }

    /// What is otherwise of one that is there, whoever has it.
    fn changes(&self, wish: &WishedVolume, record: &Instance, ails: Option<String>) -> Vec<VolumeStep> {
        let (volume, name) = (record.instance, wish.name.clone());
        let mut labels = wish.labels.clone();
        labels.insert(STACK.to_owned(), self.stack.to_owned());
        let mut steps = Vec::new();
        let change = Change { labels: words(&record.labels, &labels), ..Change::default() };
        if change != Change::default() {
            steps.push(VolumeStep::Set(volume, name.clone(), change));
        }
        steps.extend(ails.map(|why| VolumeStep::Stands(volume, name.clone(), why)));
        let from = of_disk(&record.spec.resources);
        match wish.size_gb {
            Some(to) if to > from => steps.push(VolumeStep::Extend { volume, name, from, to }),
            // It was larger when this was refused, or another has made it so since.
            Some(to) if to < from => {
                let why = format!("it has {from} GB, and never shrinks");
                steps.push(VolumeStep::Stands(volume, name, why));
            }
            _ => {}
        }
        steps
    }

    /// The volumes of the stack that the file does not name. Snapshots are none: who made them keeps them for when volumes are lost.
    fn surplus(&self) -> impl Iterator<Item = &'a Instance> {
        let names: BTreeSet<String> = self.volumes.iter().map(|wish| fold(&wish.name)).collect();
        let records = self.stored.iter().map(|standing| &standing.record);
        let of_stack =
            records.filter(|record| Standing::is_of(record, self.stack) && !record.spec.is_snapshot());
        of_stack.filter(move |record| {
            record.assigned.is_some() && !record.name.as_ref().is_some_and(|name| names.contains(&fold(name)))
        })
    }
}

/// What an instance boots from it has until its end.
fn let_go(record: &Instance, name: &str, holder: &Instance) -> VolumeStep {
    if Attachment::root_of(&holder.volumes) == Some(record.instance) {
        let why = format!("`{}` boots from it, and has it until it is destroyed", called(holder));
        return VolumeStep::Stands(record.instance, name.to_owned(), why);
    }
    let (volume, name, from, called) = (record.instance, name.to_owned(), holder.instance, called(holder));
    VolumeStep::Detach { volume, name, from, called }
}

fn foreign(record: &Instance, name: &str, holder: &Instance) -> VolumeStep {
    let why = format!(
        "`{}`, which is not of this stack, has it: `eschedule volume detach {name}` takes it from there",
        called(holder)
    );
    VolumeStep::Stands(record.instance, name.to_owned(), why)
}

fn called(record: &Instance) -> String {
    record.name.clone().unwrap_or_else(|| record.instance.to_string())
}

#[cfg(test)]
mod tests;
