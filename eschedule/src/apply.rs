//! `eschedule apply`: what a stack's file says is made so. What differs is told before; the same file again does nothing.
//!
//! ```text
//!   groups ─▶ new instances, where their volumes lie or find room ─▶ what is otherwise
//!     ─▶ new volumes, beside who is to have them ─▶ labels, sizes ─▶ surplus instances ─▶ detach ─▶ attach ─▶ surplus volumes, groups
//! ```

mod entry;
mod making;
mod volumes;
mod waits;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use clap::Args;
use ec_cloud::{
    Ask, Change, CloudError, Difference, GroupView, HeldNamed, Placed, Prune, STACK, Standing, VolumeStep,
    Volumes, differences,
};
use ec_model::{InstanceId, NodeId, Policy, RequestId, Workload};
use ec_runtime::{
    exit::{FAILED, Failure, tell},
    shutdown_on_signals,
};
use serde::Serialize;

use self::{
    entry::{Entry, entry, wish},
    making::{Making, interrupted},
    waits::note,
};
use crate::{
    cli::{Output, YEAR},
    config::Session,
    several,
    stack::{HostName, Place, Source, Stack},
};

pub(crate) const EXAMPLES: &str = "\
The file, of which `eschedule apply --schema` prints the schema for editors:
  stack: shop
  groups:
    front: {policy: anti-affinity}
  volumes:
    data: {size: 100}
  instances:
    web: {count: 3, flavor: small, image: debian, keys: [me], group: front, labels: {role: web}}
    db: {query: 'resources=VCPU:2,MEMORY_MB:2048,DISK_GB:20', restart: on-failure, volumes: [data]}

Files that it names are seen from where it lies, and where it is read from standard input, from
the current directory.

Examples:
  eschedule apply -f shop.yaml --diff
      what is otherwise than the file says; exit code 1 where something of it would be changed, or
      is left to you (`!`)
  eschedule apply -f shop.yaml
      makes web-1, web-2, web-3, db and its volume; again: nothing; exit code 1 where something
      differs that it leaves to you (`!`)
  generate | eschedule apply -f -
      the same of what comes from standard input
  eschedule apply -f shop.yaml --wait
      the same, and ends when what it asked for is there
  eschedule apply -f shop.yaml --prune
      destroys, too, what it made and the file says no more; not volumes: those go, with all that
      was written on them, by --prune-volumes";

/// What is applied.
#[derive(Args)]
pub(crate) struct Apply {
    /// What shall be; `-` is standard input
    #[arg(long, short, value_name = "FILE", required_unless_present = "schema")]
    file: Option<PathBuf>,

    /// Print the schema of such files, as editors check them by, and do nothing
    #[arg(long, conflicts_with_all = ["file", "prune", "prune_volumes", "diff"])]
    pub(crate) schema: bool,

    /// Destroy instances and delete groups of the stack that the file does not name
    #[arg(long)]
    prune: bool,

    /// Delete volumes of the stack that the file does not name, with all that was written on them
    #[arg(long)]
    prune_volumes: bool,

    /// Say what is otherwise, and change nothing; exit code 1 where something would be changed, or is left to you
    #[arg(long)]
    diff: bool,

    /// Wait until all that was asked for is so, now or before: instances are ACTIVE, volumes there, as large as asked for, and with
    /// them, and what this run takes away is gone
    #[arg(long, conflicts_with_all = ["schema", "diff"])]
    wait: bool,

    /// Wait at most so many seconds: with --wait for all of it, from when the last was asked for, and at any time for a volume that is
    /// needed at once
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(..=YEAR))]
    timeout: u64,
}

/// What was done, or is to be.
#[derive(Default, Serialize)]
pub(crate) struct Applied {
    /// `group`, `run`, `set`, `stands`, `destroy` or `delete`; of volumes `create`, `extend`, `detach`, `attach`,
    /// `delete-volume` or `keep`, too.
    pub(crate) what: &'static str,
    pub(crate) name: String,
    pub(crate) instance: Option<InstanceId>,
    /// Where it is a volume that this is of, and that is known.
    pub(crate) volume: Option<InstanceId>,
    pub(crate) node: Option<NodeId>,
    /// The id of the command, of what was asked for by it.
    pub(crate) request_id: Option<RequestId>,
    /// What differs, or why it failed.
    pub(crate) note: Option<String>,
    /// Whether it is of a volume.
    #[serde(skip)]
    pub(crate) of_volume: bool,
    /// Whether it failed, or was never begun.
    #[serde(skip)]
    pub(crate) undone: bool,
}

impl Applied {
    fn new(what: &'static str, name: &str) -> Self {
        Self { what, name: name.to_owned(), ..Self::default() }
    }

    fn undo(&mut self, why: &str) {
        (self.note, self.undone) = (Some(why.to_owned()), true);
    }

    /// The same where it is not begun for what became of another, which is told as a failure: so nobody else tells of this.
    fn leave(&mut self, why: &str) {
        tell(&format!("= {}: {why}", self.called()));
        self.undo(why);
    }

    /// What it is called in a line of its own.
    fn called(&self) -> String {
        let volume = if self.of_volume { "volume " } else { "" };
        format!("{volume}{}", self.name)
    }
}

/// Applies a file.
pub(crate) async fn apply(session: &Session, apply: Apply, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let file = apply.file.as_deref().ok_or_else(|| Failure::usage("--file says what shall be"))?;
    let (stack, source) = Stack::read(file)?;
    let there_groups = ec_cloud::groups(cloud).await?;
    let groups = missing_groups(&stack, &source, &there_groups)?;
    let (there, stored) = ec_cloud::standing(cloud, &stack.stack.0).await?;
    let (mut entries, mut wished) = (Vec::new(), Vec::new());
    let (placed, mut queries) = (Placed::of(&there), BTreeMap::new());
    for (name, entry_name, says) in stack.named() {
        let place = Place::of(&["instances", entry_name]);
        let has = placed.named(&name).map(|standing| &standing.record);
        let entry = entry(session, &stack, &source, &place, (&name, has), says, &mut queries).await?;
        wished.push(wish(session, &name, says, &entry));
        entries.push(entry);
    }
    let of_file = volumes::wished(session, &stack, &source, &wished, &stored).await?;
    let shared = if of_file.is_empty() { BTreeMap::new() } else { ec_cloud::sharing(cloud).await? };
    let of_volumes = Volumes::new(&stack.stack.0, (&wished, &of_file), (&there, &stored), &shared);
    of_volumes.check().map_err(|refused| volumes::refused(&stack, &source, &of_volumes, refused))?;
    let prune = Prune { instances: apply.prune, volumes: apply.prune_volumes };
    let mut steps = differences(&stack.stack.0, &wished, &there, apply.prune);
    steps.extend(entries.iter().flat_map(|entry| entry.kept.clone()));
    steps.extend(of_volumes.differences(prune));
    steps = of_volumes.in_order(steps);
    if apply.prune {
        // Last: until then they may have members.
        let doomed: BTreeSet<InstanceId> = steps
            .iter()
            .filter_map(|step| match step {
                Difference::Destroy(instance, _) => Some(*instance),
                _ => None,
            })
            .collect();
        steps.extend(surplus_groups(&stack, &there_groups).map(|view| without(view, &doomed)));
    }
    let mut applied: Vec<Applied> = groups.iter().map(|(name, policy)| made(name, *policy)).collect();
    applied.extend(steps.iter().map(|step| told(step, &of_volumes)));
    tell_nodes(&mut applied, [&there, &stored]);
    applied.iter().for_each(tell_of);
    if let Some(Difference::Foreign(instance, name)) =
        steps.iter().find(|step| matches!(step, Difference::Foreign(..)))
    {
        let of = &stack.stack.0;
        let failure = Failure::failed(format!(
            "`{name}` is {instance}, which is not of the stack `{of}`: nothing was changed; `eschedule set {name} --label {STACK}={of}` makes it so"
        ));
        return Err(source.wrong(&Place::of(&["instances", stack.entry_of(name)]), failure));
    }
    check_new(session, (&stack, &source), &steps, &of_volumes, &entries).await?;
    check_held(session, (&stack, &source), &steps, &of_volumes).await?;
    if apply.diff {
        print(output, &applied)?;
        return if applied.iter().all(|one| one.what == "keep") {
            Ok(())
        } else {
            Err(Failure { code: FAILED, message: String::new() })
        };
    }
    let stop = shutdown_on_signals()
        .map_err(|error| Failure::failed(format!("failed to listen for signals: {error}")))?;
    for (name, policy) in &groups {
        match ec_cloud::create_group(cloud, name, *policy, Some(&stack.stack.0)).await {
            // The same file was applied twice at once.
            Err(CloudError::Refused(_))
                if ec_cloud::group(cloud, name).await.is_ok_and(|view| view.group.policy == *policy) => {}
            made => _ = made?,
        }
    }
    let mut making = Making::new(session, &of_volumes, &entries, &stop, Duration::from_secs(apply.timeout));
    let mut failed: Option<Failure> = None;
    // Whether something of the file is not there.
    let mut is_missing = false;
    let mut of_others = Vec::new();
    let mut left = applied[groups.len()..].iter_mut();
    let mut awaited = Vec::new();
    for (step, one) in steps.iter().zip(left.by_ref()) {
        let is_interrupted = stop.is_cancelled();
        let makes = matches!(
            step,
            Difference::Run(_) | Difference::Volume(VolumeStep::Create(_) | VolumeStep::Attach(..))
        );
        let waits = match step {
            // Nobody would have it where the other cannot be given it.
            Difference::Volume(VolumeStep::Detach { .. }) => failed.is_some(),
            Difference::Destroy(..)
            | Difference::DeleteGroup(_)
            | Difference::KeepGroup(..)
            | Difference::Volume(VolumeStep::Delete(..)) => is_missing,
            _ => false,
        };
        let failure = if is_interrupted {
            one.undo("interrupted: nothing was asked for");
            interrupted()
        } else if waits {
            // What was to come in its place is not there.
            one.leave("something before it failed: it is left");
            making.note_missing(step);
            continue;
        } else if let Some(why) = making.lacks(step) {
            one.leave(&why);
            is_missing |= makes;
            making.note_missing(step);
            continue;
        } else {
            let Err(failure) = making.perform(step, one).await else {
                awaited.extend(making.asked.take().map(|asked| (one, asked)));
                continue;
            };
            one.undo(&failure.message);
            is_missing |= makes;
            making.note_missing(step);
            Failure { message: format!("{}: {}", one.name, failure.message), ..failure }
        };
        several::note(&mut failed, &failure);
        if is_interrupted {
            break;
        }
    }
    left.for_each(|one| one.undo("interrupted: nothing was asked for"));
    let otherwise = if stop.is_cancelled() { Ok(Vec::new()) } else { making.otherwise(&shared).await };
    let otherwise = otherwise.unwrap_or_else(|failure| {
        note(&mut failed, "what another made meanwhile", failure);
        Vec::new()
    });
    of_others.extend(otherwise.iter().map(|step| told(step, &of_volumes)));
    for (step, one) in otherwise.iter().zip(&mut of_others) {
        one.node = one.volume.or(one.instance).and_then(|of| making.found.get(&of).copied());
        tell_of(one);
        match making.perform(step, one).await {
            Ok(()) => awaited.extend(making.asked.take().map(|asked| (one, asked))),
            Err(failure) => {
                one.undo(&failure.message);
                note(&mut failed, &one.name, failure);
            }
        }
    }
    // What was made is waited for whatever else failed, unless somebody does not wait any more.
    if apply.wait
        && (failed.is_none() || !stop.is_cancelled())
        && let Err(failure) = making.until_all(awaited).await
    {
        several::note(&mut failed, &failure);
    }
    applied.extend(of_others);
    print(output, &applied)?;
    match failed {
        Some(failure) => Err(failure),
        None if applied.iter().any(|one| one.what == "stands") => {
            Err(Failure::failed("what stands behind a `!` is not as the file says, and is left to you"))
        }
        None => Ok(()),
    }
}

/// Where each is of which something is told, as far as that is known before.
fn tell_nodes(applied: &mut [Applied], there: [&[Standing]; 2]) {
    let records = there.into_iter().flatten().map(|standing| &standing.record);
    let nodes: BTreeMap<_, _> = records.map(|record| (record.instance, record.node())).collect();
    for one in applied {
        // Whose a volume is to be, that comes to where it is.
        one.node = one.instance.or(one.volume).and_then(|of| *nodes.get(&of)?);
    }
}

/// That what is new can be asked for, as far as that is known before anything is made; when it is its turn it is seen once more.
async fn check_new(
    session: &Session,
    (stack, source): (&Stack, &Source),
    steps: &[Difference],
    of: &Volumes<'_>,
    entries: &[Entry],
) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let (mut looked, mut is_answered) = (BTreeSet::new(), true);
    for step in steps {
        let Difference::Run(number) = step else { continue };
        let Entry { query, guest, says_room, .. } = &entries[*number];
        // Only for who made a mistake: it is looked for among all of them.
        let entry = || Place::of(&["instances", stack.entry_of(&of.instances[*number].name)]);
        let ask = Ask::new(query)?;
        if is_answered && looked.insert(query.text()) {
            match ec_cloud::preview(cloud, &ask).await {
                // Which classes and traits there are only placement knows.
                Err(error @ CloudError::Invalid(_)) => {
                    return Err(source.wrong(&entry().key(says_room), session.failed(error)));
                }
                // Where nobody answers each is told so when it is its turn.
                outcome => is_answered = outcome.is_ok(),
            }
        }
        let ask = match of.node_for(*number) {
            Some(node) => ask.on(node).map_err(|error| source.wrong(&entry(), error.into()))?,
            None => ask,
        };
        if let Err(error) = ask.beside(cloud, &guest.image).await {
            return Err(source.wrong(&entry().key("image"), session.failed(error)));
        }
    }
    Ok(())
}

/// Nothing is made that a node has, of which etcd lost what is wanted, as one does that was put back: it would be there twice.
async fn check_held(
    session: &Session,
    (stack, source): (&Stack, &Source),
    steps: &[Difference],
    of: &Volumes<'_>,
) -> Result<(), Failure> {
    let new: Vec<(Workload, &str)> = steps
        .iter()
        .filter_map(|step| match step {
            Difference::Run(number) => Some((Workload::Machine, of.instances[*number].name.as_str())),
            Difference::Volume(VolumeStep::Create(number)) => {
                Some((Workload::Volume, of.volumes[*number].name.as_str()))
            }
            _ => None,
        })
        .collect();
    if new.is_empty() {
        return Ok(());
    }
    let held = ec_cloud::held_named(&session.cloud).await?;
    for (kind, name) in new {
        let is_it = |one: &&HeldNamed| one.kind == kind && one.name.eq_ignore_ascii_case(name);
        if let Some(one) = held.iter().find(is_it) {
            let failure =
                Failure::failed(format!("`{name}` is not made: {}; nothing was changed", one.way()));
            return Err(match kind {
                Workload::Machine => source.wrong(&Place::of(&["instances", stack.entry_of(name)]), failure),
                Workload::Volume => failure,
            });
        }
    }
    Ok(())
}

/// The groups of the file that there are not. One that there is, with another policy, is an error.
fn missing_groups(
    stack: &Stack,
    source: &Source,
    there: &[GroupView],
) -> Result<Vec<(String, Policy)>, Failure> {
    let mut missing = Vec::new();
    for (name, entry) in &stack.groups {
        let policy = Policy::from(entry.policy);
        match there.iter().find(|view| view.group.name.eq_ignore_ascii_case(&name.0)) {
            None => missing.push((name.0.clone(), policy)),
            Some(view) if view.group.policy == policy => {}
            Some(view) => {
                let failure = Failure::failed(format!(
                    "there is one with {}, and a group is never changed: nothing was changed",
                    view.group.policy
                ));
                return Err(source.wrong(&Place::of(&["groups", &name.0, "policy"]), failure));
            }
        }
    }
    // Also one that makes none for now.
    for (HostName(entry), says) in &stack.instances {
        let Some(group) = &says.group else { continue };
        let is_it = |name: &str| name.eq_ignore_ascii_case(&group.0);
        if !stack.groups.keys().any(|name| is_it(&name.0))
            && !there.iter().any(|view| is_it(&view.group.name))
        {
            let failure = Failure::failed(format!(
                "there is no group `{}`, neither in the file nor in the project: nothing was changed",
                group.0
            ));
            return Err(source.wrong(&Place::of(&["instances", entry, "group"]), failure));
        }
    }
    Ok(missing)
}

/// The groups that were made for the stack, and which nothing in the file names.
fn surplus_groups<'a>(stack: &Stack, there: &'a [GroupView]) -> impl Iterator<Item = &'a GroupView> {
    let of_instances = stack.instances.values().filter_map(|says| says.group.as_ref());
    let named: BTreeSet<String> =
        stack.groups.keys().chain(of_instances).map(|name| name.0.to_ascii_lowercase()).collect();
    let name = stack.stack.0.clone();
    let of_stack = there.iter().filter(move |view| view.group.stack.as_ref() == Some(&name));
    of_stack.filter(move |view| !named.contains(&view.group.name.to_ascii_lowercase()))
}

/// What becomes of a group that is too much, once these are destroyed: with members besides it stays, and that is no failure, since
/// the same file again would not make it otherwise.
fn without(view: &GroupView, doomed: &BTreeSet<InstanceId>) -> Difference {
    let name = view.group.name.clone();
    match view.members.iter().filter(|member| !doomed.contains(&member.instance)).count() {
        0 => Difference::DeleteGroup(name),
        count => {
            let why = format!("it has {count} members that stay: `eschedule group show {name}` shows them");
            Difference::KeepGroup(name, why)
        }
    }
}

fn made(name: &str, policy: Policy) -> Applied {
    Applied { note: Some(policy.to_string()), ..Applied::new("group", name) }
}

/// A step as it is told; what has no name by its uuid.
fn told(step: &Difference, of_volumes: &Volumes<'_>) -> Applied {
    let mut one = as_called(step, of_volumes);
    if let Some(instance) = one.volume.or(one.instance).filter(|_| one.name.is_empty()) {
        one.name = instance.to_string();
    }
    one
}

fn as_called(step: &Difference, of_volumes: &Volumes<'_>) -> Applied {
    let of = |what, name: &str, instance: &InstanceId, note| Applied {
        instance: Some(*instance),
        note,
        ..Applied::new(what, name)
    };
    match step {
        Difference::Run(number) => {
            let wish = &of_volumes.instances[*number];
            Applied { note: Some(wish.query.clone()), ..Applied::new("run", &wish.name) }
        }
        Difference::Set(instance, name, change) => of("set", name, instance, Some(words(change))),
        Difference::Stands(instance, name, why) => of("stands", name, instance, Some(why.clone())),
        Difference::Keep(instance, name, why) => of("keep", name, instance, Some(why.clone())),
        Difference::Destroy(instance, name) => of("destroy", name, instance, None),
        Difference::Volume(step) => volumes::told(step, of_volumes),
        Difference::DeleteGroup(name) => Applied::new("delete", name),
        Difference::KeepGroup(name, why) => Applied { note: Some(why.clone()), ..Applied::new("keep", name) },
        Difference::Foreign(instance, name) => {
            of("stands", name, instance, Some("it is not of this stack".to_owned()))
        }
    }
}

/// Says what is to be done, before it is.
fn tell_of(one: &Applied) {
    let note = one.note.as_ref().map(|note| format!(": {note}")).unwrap_or_default();
    tell(&format!("{} {}{note}", sign(one.what), one.called()));
}

fn sign(what: &str) -> &'static str {
    match what {
        "group" | "run" | "create" => "+",
        "destroy" | "delete" | "delete-volume" => "-",
        "set" | "extend" | "detach" | "attach" => "~",
        "keep" => "=",
        _ => "!",
    }
}

/// A change in the words of the command line.
fn words(change: &Change) -> String {
    let word = |option: &str, key: &String, value: &Option<String>| match value {
        Some(value) => format!("set {option} {key}={value}"),
        None => format!("unset {option} {key}"),
    };
    let mut words: Vec<String> =
        change.labels.iter().map(|(key, value)| word("--label", key, value)).collect();
    words.extend(change.metadata.iter().map(|(key, value)| word("--meta", key, value)));
    words.extend(change.restart.map(|restart| format!("set --restart {}", crate::output::word(&restart))));
    words.join(", ")
}

fn print(output: Output, applied: &[Applied]) -> Result<(), Failure> {
    output.print(applied, || names(applied), String::new)
}

/// What was done to whom.
fn names(applied: &[Applied]) -> Vec<String> {
    // One to which several things are done is named once; a volume, an instance and a group may be called the same.
    let mut named = BTreeSet::new();
    let is_group = |one: &Applied| !one.of_volume && one.instance.is_none() && one.what != "run";
    let done = applied.iter().filter(|one| !one.undone);
    let once = done.filter(|one| named.insert((one.of_volume, is_group(one), &one.name)));
    once.map(|one| one.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_name_is_told_by_its_uuid() {
        let shared = BTreeMap::new();
        let none = Volumes::new("shop", (&[], &[]), (&[], &[]), &shared);
        let instance = InstanceId::new(uuid::Uuid::from_u128(7));
        for step in [
            Difference::Destroy(instance, String::new()),
            Difference::Keep(instance, String::new(), "it stays".to_owned()),
            Difference::Volume(VolumeStep::Delete(instance, String::new())),
            Difference::Volume(VolumeStep::Keep(instance, String::new())),
        ] {
            assert_eq!(told(&step, &none).name, instance.to_string(), "{step:?}");
        }
        assert_eq!(told(&Difference::Destroy(instance, "web".to_owned()), &none).name, "web");
    }

    fn record(number: u128, node: u128) -> Standing {
        let [instance, node] = [number, node].map(uuid::Uuid::from_u128);
        let text = format!(
            r#"{{"version":1,"instance":"{instance}","name":"web","generation":1,
            "spec":{{"query":"resources=VCPU:1","image":{{"url":""}}}},
            "assigned":{{"node":"{node}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#
        );
        Standing::of_record(ec_model::decode(text.as_bytes()).unwrap())
    }

    #[test]
    fn of_a_volume_it_is_told_where_it_is_and_who_has_it_and_it_is_named_once() {
        let shared = BTreeMap::new();
        let none = Volumes::new("shop", (&[], &[]), (&[], &[]), &shared);
        let [volume, from] = [1, 2].map(|number| InstanceId::new(uuid::Uuid::from_u128(number)));
        let name = || "web".to_owned();
        let steps = [
            VolumeStep::Extend { volume, name: name(), from: 1, to: 2 },
            VolumeStep::Detach { volume, name: name(), from, called: name() },
            VolumeStep::Delete(volume, name()),
        ];
        let mut applied: Vec<Applied> =
            steps.into_iter().map(|step| told(&Difference::Volume(step), &none)).collect();
        assert_eq!(applied[1].instance, Some(from));
        tell_nodes(&mut applied, [&[record(2, 7)], &[record(1, 7)]]);
        let node = NodeId::new(uuid::Uuid::from_u128(7));
        assert!(applied.iter().all(|one| one.node == Some(node)));
        assert_eq!(names(&applied), ["web"]);
    }

    #[tokio::test]
    async fn an_entry_of_no_instances_for_now_names_its_group() {
        let (session, directory) = (Session::in_memory().await, tempfile::tempdir().unwrap());
        let file = directory.path().join("shop.yaml");
        let text = "stack: shop\ninstances:\n  web: {count: 0, flavor: small, group: Front}\n";
        std::fs::write(&file, text).unwrap();
        let (stack, source) = Stack::read(&file).unwrap();
        let missing = missing_groups(&stack, &source, &[]).unwrap_err().message;
        assert!(missing.contains(":3:") && missing.contains("there is no group `Front`"), "{missing}");
        for name in ["front", "other"] {
            ec_cloud::create_group(&session.cloud, name, Policy::Affinity, Some("shop")).await.unwrap();
        }
        let there = ec_cloud::groups(&session.cloud).await.unwrap();
        assert_eq!(missing_groups(&stack, &source, &there).unwrap(), []);
        let surplus: Vec<&str> =
            surplus_groups(&stack, &there).map(|view| view.group.name.as_str()).collect();
        assert_eq!(surplus, ["other"]);
    }
}
