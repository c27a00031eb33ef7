//! What is to be done so that the instances of a stack are what its file says: pure, from the file and from the records of
//! the project.

use std::collections::{BTreeMap, BTreeSet};

use ec_model::{
    Attachment, Blob, ImageRef, Instance, InstanceId, Request, ResourceQuery, Restart, State, Status,
    Workload,
};

use crate::{sizes, verbs::Change};

mod volumes;

pub use volumes::{Prune, Refused, VolumeStep, Volumes, WishedVolume};

/// The label that tells of which stack an instance is.
pub const STACK: &str = "stack";

/// An instance as a file says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wished {
    /// What it is called.
    pub name: String,
    /// What room it takes.
    pub query: String,
    /// What its disk is made from.
    pub image: ImageRef,
    /// What the file calls that; none where it says nothing, and the site's own is meant.
    pub said: Option<String>,
    /// Whether it boots from a volume in the place of that.
    pub boots: bool,
    /// The group that it is a member of.
    pub group: Option<String>,
    /// What its user tells it apart by; that of the stack is added.
    pub labels: BTreeMap<String, String>,
    /// What it is told of itself.
    pub metadata: BTreeMap<String, String>,
    /// What follows when it ends by itself.
    pub restart: Restart,
    /// Public keys in OpenSSH's form.
    pub keys: Begun<Vec<String>>,
    /// What it is given as user-data.
    pub user_data: Begun<Option<Blob>>,
    /// Whether the guest is given its metadata only with a session token.
    pub require_token: bool,
}

/// What an instance is given at its beginning, and keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Begun<T> {
    /// That.
    pub with: T,
    /// Whether the file says it; else it is the site's own, which may be another by now.
    pub said: bool,
}

/// An instance as etcd has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// What is wanted of it.
    pub record: Instance,
    /// What it was given as user-data; of instances of the stack only.
    pub user_data: Option<Blob>,
    /// What is wrong with it, and what helps; of what is of the stack only.
    pub ails: Option<String>,
}

impl Standing {
    /// One of which nothing else is looked at.
    pub fn of_record(record: Instance) -> Self {
        Self { record, user_data: None, ails: None }
    }

    /// One of the stack, by what its node was asked for and tells: a disk or a size that was wished and failed it has not.
    pub fn of_stack(
        mut record: Instance,
        user_data: Option<Blob>,
        request: Option<&Request>,
        status: Option<&Status>,
    ) -> Self {
        let mut ails = ailing(&record, request, status);
        if let (Some(request), Some(status)) = (request, status) {
            let wish = request.rebuild.as_ref().filter(|wish| {
                let came = status.rebuilt.as_ref().filter(|came| came.wished_at >= wish.wished_at);
                came.is_some_and(|came| came.failed.is_some())
            });
            if let Some(before) = wish.and_then(|wish| wish.before.clone()) {
                record.spec.image = before;
            }
            if let Some(was) = sizes::missed(request, Some(status)) {
                if record.kind == Workload::Volume && !was.resources.is_empty() {
                    record.spec.resources.clone_from(&was.resources);
                } else if record.before.is_some() {
                    let why = was.failed.as_deref().unwrap_or_default();
                    ails.get_or_insert_with(|| {
                        format!("its last resize failed ({why}): `eschedule resize --revert` it, or ask for it again")
                    });
                }
            }
        }
        Self { record, user_data, ails }
    }

    /// Whether it is of the stack.
    pub fn is_of(record: &Instance, stack: &str) -> bool {
        record.labels.get(STACK).is_some_and(|of| of == stack)
    }
}

/// What is placed, to be found by its name in any case of letters.
#[derive(Debug)]
pub struct Placed<'a>(BTreeMap<String, &'a Standing>);

impl<'a> Placed<'a> {
    /// Of these. What is being placed, or was left over by a killed command, is not there yet.
    pub fn of(all: &'a [Standing]) -> Self {
        let mut placed = BTreeMap::new();
        for standing in all.iter().filter(|standing| standing.record.assigned.is_some()) {
            if let Some(name) = &standing.record.name {
                placed.entry(fold(name)).or_insert(standing);
            }
        }
        Self(placed)
    }

    /// The one of that name.
    pub fn named(&self, name: &str) -> Option<&'a Standing> {
        self.0.get(&fold(name)).copied()
    }
}

/// One difference, and what it takes to make it good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// There is none of the name: ask for it. Which of the file's.
    Run(usize),
    /// Labels, metadata or what follows its end are otherwise.
    Set(InstanceId, String, Change),
    /// This is otherwise and stays so, for whoever applies to do something about it.
    Stands(InstanceId, String, String),
    /// This is otherwise, and nothing needs to be done about it.
    Keep(InstanceId, String, String),
    /// It is of the stack, and the file says nothing of it: by what it is called, nothing where it has no name.
    Destroy(InstanceId, String),
    /// It bears a name of the file, and is not of the stack: nobody touches it.
    Foreign(InstanceId, String),
    /// Of a volume.
    Volume(VolumeStep),
    /// A group that was made for the stack, and the file says nothing of it.
    DeleteGroup(String),
    /// The same, and it stays since others are members of it.
    KeepGroup(String, String),
}

/// What is wrong with what is wanted, and what helps.
fn ailing(record: &Instance, request: Option<&Request>, status: Option<&Status>) -> Option<String> {
    let end = match record.kind {
        Workload::Machine => "`eschedule destroy`",
        Workload::Volume => "`eschedule volume delete`",
    };
    let Some(status) = status else {
        let nobodys = format!("nobody asks for it and no agent tells of it: {end} it and apply again");
        return request.is_none().then_some(nobodys);
    };
    let why = status.reason.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    match (status.state, request) {
        (State::Error, None) => Some(format!("it is in ERROR{why}: {end} it and apply again")),
        (State::Error, Some(_)) => {
            let look = match record.kind {
                Workload::Machine => "`eschedule explain`",
                Workload::Volume => "`eschedule volume show`",
            };
            Some(format!("it is in ERROR{why}: {look} it"))
        }
        (State::Unclaimed, None) => {
            Some("no request speaks of it: `eschedule heal` brings it back".to_owned())
        }
        _ => None,
    }
}

/// A name in one case of letters, which makes no other name.
fn fold(name: &str) -> String {
    name.to_ascii_lowercase()
}

/// The differences between the file and the instances of the project: first what is new, by the file's order, then what is
/// otherwise, and what is too much: it goes where `prune`, and else is told.
pub fn differences(stack: &str, wished: &[Wished], there: &[Standing], prune: bool) -> Vec<Difference> {
    // What is being placed, or was left over by a killed command, is asked for again: its name says whether that can be.
    let placed = Placed::of(there);
    let (mut new, mut other) = (Vec::new(), Vec::new());
    for (number, wish) in wished.iter().enumerate() {
        match placed.named(&wish.name) {
            None => new.push(Difference::Run(number)),
            Some(Standing { record, .. }) if !Standing::is_of(record, stack) => {
                other.push(Difference::Foreign(record.instance, wish.name.clone()));
            }
            Some(standing) => other.extend(of_one(stack, wish, standing)),
        }
    }
    let names: BTreeSet<String> = wished.iter().map(|wish| fold(&wish.name)).collect();
    let is_named = |record: &Instance| record.name.as_ref().is_some_and(|name| names.contains(&fold(name)));
    let records = there.iter().map(|standing| &standing.record);
    let too_much = records.filter(|record| Standing::is_of(record, stack) && !is_named(record));
    other.extend(too_much.filter_map(|record| {
        let (instance, name) = (record.instance, record.name.clone().unwrap_or_default());
        let why = "the file does not name it, and it stays; `--prune` destroys it";
        // What is being placed may come to nothing; of a name of the stack's it is known who asked for it.
        let is_meant = record.assigned.is_some() || (prune && record.name.is_some());
        is_meant.then(|| match prune {
            true => Difference::Destroy(instance, name),
            false => Difference::Keep(instance, name, why.to_owned()),
        })
    }));
    new.append(&mut other);
    new
}

/// What is otherwise of one that is there.
fn of_one(stack: &str, wish: &Wished, Standing { record, user_data, ails }: &Standing) -> Vec<Difference> {
    let (instance, name) = (record.instance, wish.name.clone());
    let mut labels = wish.labels.clone();
    labels.insert(STACK.to_owned(), stack.to_owned());
    let change = Change {
        labels: words(&record.labels, &labels),
        metadata: words(&record.spec.metadata, &wish.metadata),
        restart: (record.restart != wish.restart).then_some(wish.restart),
    };
    let mut steps = Vec::new();
    if change != Change::default() {
        steps.push(Difference::Set(instance, name.clone(), change));
    }
    steps.extend(ails.clone().map(|why| Difference::Stands(instance, name.clone(), why)));
    let boots = Attachment::root_of(&record.volumes).is_some();
    if boots != wish.boots {
        let from = if boots { "a volume" } else { "a disk of its own" };
        let why = format!(
            "it boots from {from}, and an instance keeps what it boots from: destroy it and apply again"
        );
        steps.push(Difference::Stands(instance, name.clone(), why));
    } else if !boots {
        steps.extend(of_image(&record.spec.image, wish).map(|other| other.of(instance, &name)));
    }
    steps.extend(of_room(&record.spec.query, wish).map(|other| other.of(instance, &name)));
    let group = |name: Option<&String>| name.map(|name| name.to_ascii_lowercase());
    if group(record.group.as_ref()) != group(wish.group.as_ref()) {
        let is = record.group.as_ref().map_or_else(|| "none".to_owned(), |group| format!("`{group}`"));
        let why = format!("its group is {is}, and an instance keeps its group: destroy it and apply again");
        steps.push(Difference::Stands(instance, name.clone(), why));
    }
    let sorted = |keys: &[String]| keys.iter().cloned().collect::<BTreeSet<_>>();
    // That of one that failed is gone.
    let is_unknown = user_data.is_none() && record.spec.user_data_bytes.is_some();
    for (what, is_so, said) in [
        ("list of keys", sorted(&record.spec.keys) == sorted(&wish.keys.with), wish.keys.said),
        ("user-data", is_unknown || *user_data == wish.user_data.with, wish.user_data.said),
        // Who wrote nothing of it may have had it from elsewhere, as from `defaults`.
        ("demand for a session token", record.spec.token_required || !wish.require_token, true),
    ] {
        if is_so {
            continue;
        }
        // Of the site's own nobody who wrote the file wished for another.
        let (of, helps) = if said {
            ("the file says", ": destroy it and apply again")
        } else {
            ("`defaults` say by now", "")
        };
        let why = format!("its {what} is not what {of}, and an instance keeps what it began with{helps}");
        steps.push(Other { needs_somebody: said, why }.of(instance, &name));
    }
    steps
}

/// What is otherwise and stays so, and whether that is for whoever applies to do something about.
struct Other {
    needs_somebody: bool,
    why: String,
}

impl Other {
    fn of(self, instance: InstanceId, name: &str) -> Difference {
        let of = if self.needs_somebody { Difference::Stands } else { Difference::Keep };
        of(instance, name.to_owned(), self.why)
    }
}

/// Another image than it was made of. The same file again is no wish for another disk: what its word for the image means may
/// be another by now, and what was restored is a copy of a disk. Of whoever wrote another word somebody is needed.
fn of_image(has: &ImageRef, wish: &Wished) -> Option<Other> {
    let wanted = &wish.image;
    let is_one_place = has.url == wanted.url;
    let digests = [(&has.sha256, &wanted.sha256), (&has.sha512, &wanted.sha512)];
    if is_one_place && digests.iter().all(|(is, demanded)| demanded.is_none() || is == demanded) {
        return None;
    }
    let needs_somebody = match (&wish.said, &has.name) {
        (None, _) => false,
        _ if has.copied().is_some() => false,
        (Some(said), name) if wanted.copied().is_none() && *said != wanted.url => {
            let is_it = |name: &String| name.eq_ignore_ascii_case(said) || Some(name) == wanted.name.as_ref();
            name.as_ref().is_some_and(|name| !is_it(name))
        }
        // Where it was made without a digest nobody knows whether it has this one.
        _ => {
            !is_one_place
                || digests.iter().any(|(is, demanded)| is.is_some() && demanded.is_some() && is != demanded)
        }
    };
    let [is, wanted] = apart(has, wanted);
    // By itself a rebuild takes the image that it has.
    let by =
        format!("eschedule rebuild {} --image {}", wish.name, wish.said.as_ref().unwrap_or(&wish.image.url));
    let why =
        format!("its image is {is}: `{by}` gives it a new disk from {wanted}, and what it wrote is lost");
    Some(Other { needs_somebody, why })
}

/// Both as people tell them apart: what lies at one URL by its digest.
fn apart(one: &ImageRef, other: &ImageRef) -> [String; 2] {
    let is_one_place = one.told() == other.told();
    [one, other].map(|image| match image.sha256.as_ref().or(image.sha512.as_ref()) {
        Some(digest) if is_one_place => {
            format!("{} (digest {}…)", image.told(), digest.chars().take(12).collect::<String>())
        }
        _ => image.told(),
    })
}

const DISK: &str = "DISK_GB";

/// Other room than it was asked for by. A disk that is larger was grown, and never shrinks: that is so for good.
fn of_room(has: &str, wish: &Wished) -> Option<Other> {
    if *has == wish.query {
        return None;
    }
    if let (Ok(is), Ok(wanted)) = (ResourceQuery::parse(has), ResourceQuery::parse(&wish.query)) {
        let but_disk = |query: &ResourceQuery| query.without(DISK).map(|left| demands(&left)).ok();
        let (size, least) = (sizes::of_disk(&is.total()), sizes::of_disk(&wanted.total()));
        if but_disk(&is) == but_disk(&wanted) && size >= least {
            let why = format!("its disk has {size} GB, where the file says {least}, and never shrinks");
            // Of a copy for whose disk nothing is asked as much is claimed as what was copied has.
            let is_said = least > 0 || wish.image.copied().is_none();
            return (size > least && is_said).then_some(Other { needs_somebody: false, why });
        }
    }
    let why = format!(
        "its room was asked for by {has}: `eschedule resize` gives it another size on its node, by {}",
        wish.query
    );
    Some(Other { needs_somebody: true, why })
}

/// What a query demands, in one order: in which it is written says nothing.
fn demands(query: &ResourceQuery) -> Vec<(String, String)> {
    let pairs = query.pairs().iter().map(|(key, value)| {
        let mut amounts: Vec<&str> = value.split(',').collect();
        // Of other lists the first word may say how they are read.
        if key.starts_with("resources") {
            amounts.sort_unstable();
        }
        (key.clone(), amounts.join(","))
    });
    let mut demands: Vec<_> = pairs.collect();
    demands.sort_unstable();
    demands
}

/// The changes that make `wished` of `there`.
fn words(
    there: &BTreeMap<String, String>,
    wished: &BTreeMap<String, String>,
) -> BTreeMap<String, Option<String>> {
    let gone = there.keys().filter(|key| !wished.contains_key(*key)).map(|key| (key.clone(), None));
    let set = wished.iter().filter(|(key, value)| there.get(*key) != Some(value));
    gone.chain(set.map(|(key, value)| (key.clone(), Some(value.clone())))).collect()
}

#[cfg(test)]
mod tests {
    use ec_model::{Rebuild, Rebuilt, Resized, Resources};

    use super::*;

    fn wish(name: &str) -> Wished {
        Wished {
            name: name.to_owned(),
            query: "resources=VCPU:1,MEMORY_MB:1".to_owned(),
            image: ImageRef::at("file:///x"),
            said: Some("file:///x".to_owned()),
            boots: false,
            group: None,
            labels: [("role".to_owned(), "web".to_owned())].into(),
            metadata: BTreeMap::new(),
            restart: Restart::No,
            keys: Begun { with: Vec::new(), said: true },
            user_data: Begun { with: None, said: true },
            require_token: false,
        }
    }

    fn standing(number: u128, name: &str, stack: Option<&str>) -> Standing {
        let text = format!(
            r#"{{"version":1,"instance":"{}","name":"{name}","labels":{{"role":"web"}},"generation":1,
                "spec":{{"query":"resources=VCPU:1,MEMORY_MB:1","image":{{"url":"file:///x"}}}},
                "assigned":{{"node":"7d3c1f0a-2b4e-4c55-9a7e-0123456789ab","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#,
            uuid::Uuid::from_u128(number)
        );
        let mut record: Instance = ec_model::decode(text.as_bytes()).unwrap();
        record.labels.extend(stack.map(|stack| (STACK.to_owned(), stack.to_owned())));
        Standing::of_record(record)
    }

    const UUID: &str = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";

    fn asked() -> Request {
        let text = format!(
            r#"{{"version":1,"instance":"{UUID}","epoch":1,"generation":1,"desired":"active","created_at":"1970-01-01T00:00:00Z"}}"#
        );
        ec_model::decode(text.as_bytes()).unwrap()
    }

    fn told(state: State, reason: Option<&str>) -> Status {
        let text = format!(
            r#"{{"version":1,"instance":"{UUID}","node":"{UUID}","state":"ACTIVE","since":"1970-01-01T00:00:00Z","updated_at":"1970-01-01T00:00:00Z"}}"#
        );
        let status: Status = ec_model::decode(text.as_bytes()).unwrap();
        Status { state, reason: reason.map(str::to_owned), ..status }
    }

    #[test]
    fn what_failed_is_wrong_and_says_what_helps() {
        let of = |kind, request: Option<&Request>, status: Option<&Status>| {
            let record = Instance { kind, ..standing(1, "web", Some("shop")).record };
            Standing::of_stack(record, None, request, status).ails.unwrap_or_default()
        };
        let (error, active) = (told(State::Error, Some("404")), told(State::Active, None));
        for (kind, request, status, wanted) in [
            (Workload::Machine, None, Some(&error), "it is in ERROR (404): `eschedule destroy`"),
            (Workload::Volume, None, Some(&error), "it is in ERROR (404): `eschedule volume delete`"),
            (Workload::Machine, Some(asked()), Some(&error), "it is in ERROR (404): `eschedule explain`"),
            (Workload::Volume, Some(asked()), Some(&error), "it is in ERROR (404): `eschedule volume show`"),
            (Workload::Machine, None, None, "nobody asks for it"),
            (Workload::Machine, None, Some(&told(State::Unclaimed, None)), "`eschedule heal` brings it back"),
        ] {
            let why = of(kind, request.as_ref(), status);
            assert!(why.starts_with(wanted) || why.ends_with(wanted), "{why}, wanted: {wanted}");
        }
        for status in [None, Some(&active)] {
            assert_eq!(of(Workload::Machine, Some(&asked()), status), "");
        }
        let ill = Standing { ails: Some("it is ill".to_owned()), ..standing(1, "web", Some("shop")) };
        let (instance, name) = (ill.record.instance, "web".to_owned());
        let steps = differences("shop", &[wish("web")], &[ill], false);
        assert_eq!(steps, [Difference::Stands(instance, name, "it is ill".to_owned())]);
    }

    #[test]
    fn a_disk_and_a_size_that_were_wished_and_failed_are_what_they_were_before() {
        let at = |second| jiff::Timestamp::from_second(second).unwrap();
        let (before, after) = (ImageRef::at("file:///x"), ImageRef::at("file:///y"));
        let mut record = standing(1, "web", Some("shop")).record;
        record.spec.image = after.clone();
        let mut request = asked();
        request.rebuild = Some(Rebuild { wished_at: at(5), before: Some(before.clone()) });
        let came = |second, failed: Option<&str>| {
            let failed = failed.map(str::to_owned);
            Status { rebuilt: Some(Rebuilt { wished_at: at(second), failed }), ..told(State::Active, None) }
        };
        for (status, image) in [
            (came(5, Some("404")), &before),
            (came(5, None), &after),
            (came(4, Some("404")), &after),
            (told(State::Active, None), &after),
        ] {
            let seen = Standing::of_stack(record.clone(), None, Some(&request), Some(&status));
            assert_eq!((&seen.record.spec.image, &seen.ails), (image, &None));
        }

        let disk = |gigabytes| Resources::from([("DISK_GB".to_owned(), gigabytes)]);
        request.resize = Some(ec_model::Resize { wished_at: at(7) });
        let resized = |failed: Option<&str>| {
            let failed = failed.map(str::to_owned);
            let resized = Some(Resized { wished_at: at(7), failed, resources: disk(10) });
            Status { resized, ..told(State::Active, None) }
        };
        let mut volume = Instance { kind: Workload::Volume, ..record.clone() };
        volume.spec.resources = disk(20);
        let size = |status: &Status| {
            let seen = Standing::of_stack(volume.clone(), None, Some(&request), Some(status));
            (seen.record.spec.resources, seen.ails)
        };
        assert_eq!(size(&resized(Some("no"))), (disk(10), None), "it is extended again");
        assert_eq!(size(&resized(None)), (disk(20), None));
        record.before = Some(ec_model::Extent { query: "resources=VCPU:1".to_owned(), resources: disk(10) });
        let seen = Standing::of_stack(record.clone(), None, Some(&request), Some(&resized(Some("no"))));
        assert!(seen.ails.is_some_and(|why| why.contains("failed (no)") && why.contains("--revert")));
        let seen = Standing::of_stack(record, None, Some(&request), Some(&resized(None)));
        assert_eq!(seen.ails, None);
    }

    #[test]
    fn what_is_as_the_file_says_is_left_alone() {
        let there =
            [standing(1, "web", Some("shop")), standing(2, "old", Some("shop")), standing(3, "x", None)];
        let told = differences("shop", &[wish("WEB")], &there, false);
        assert!(
            matches!(&told[..], [Difference::Keep(_, name, why)] if name == "old" && why.contains("--prune")),
            "what is too much is told: {told:?}"
        );
        let other = differences("shop", &[wish("web")], &there, true);
        assert_eq!(
            other,
            [Difference::Destroy(there[1].record.instance, "old".to_owned())],
            "of the stack, and no other"
        );
        assert_eq!(differences("other", &[], &there, true), []);
        let mut begun = there[1].clone();
        begun.record.assigned = None;
        assert_eq!(
            differences("shop", &[], std::slice::from_ref(&begun), false),
            [],
            "it may come to nothing"
        );
        begun.record.name = None;
        assert_eq!(differences("shop", &[], &[begun], true), [], "what a killed command left is swept");
    }

    #[test]
    fn what_is_not_there_is_asked_for_and_what_is_somebody_elses_is_told() {
        let mut begun = standing(1, "a", Some("shop"));
        begun.record.assigned = None;
        let there = [begun, standing(2, "b", Some("other")), standing(3, "c", None)];
        let steps = differences("shop", &["c", "b", "a", "d"].map(wish), &there, true);
        let foreign =
            |number: usize, name: &str| Difference::Foreign(there[number].record.instance, name.to_owned());
        assert_eq!(steps, [Difference::Run(2), Difference::Run(3), foreign(2, "c"), foreign(1, "b")]);
    }

    #[test]
    fn words_are_set_and_unset_and_what_cannot_be_changed_is_told() {
        let mut there = standing(1, "web", Some("shop"));
        there.record.labels.insert("old".to_owned(), "1".to_owned());
        there.record.spec.metadata.insert("k".to_owned(), "1".to_owned());
        let mut wished = wish("web");
        wished.labels = [("role".to_owned(), "db".to_owned())].into();
        (wished.restart, wished.group) = (Restart::Always, Some("g".to_owned()));
        (wished.image.url, wished.said) = ("file:///y".to_owned(), Some("file:///y".to_owned()));
        wished.query = "resources=VCPU:2,MEMORY_MB:1".to_owned();
        (wished.keys.with, wished.user_data.with) = (vec!["ssh-ed25519 A".to_owned()], Some(Blob(vec![1])));
        let steps = differences("shop", &[wished.clone()], &[there.clone()], false);
        let Some(Difference::Set(_, _, change)) = steps.first() else { panic!("{steps:?}") };
        let mut made = there;
        change.make(&mut made.record);
        let stack = (STACK.to_owned(), "shop".to_owned());
        assert_eq!(made.record.labels, [("role".to_owned(), "db".to_owned()), stack].into());
        assert!(made.record.spec.metadata.is_empty() && made.record.restart == Restart::Always);
        let told: Vec<&str> = steps[1..]
            .iter()
            .map(|step| match step {
                Difference::Stands(_, _, why) => why.as_str(),
                step => panic!("{step:?}"),
            })
            .collect();
        assert!(
            told[0].contains("rebuild") && told[1].contains("VCPU:1") && told[2].contains("none"),
            "{told:?}"
        );
        assert!(told.len() == 5 && told[3].contains("keys") && told[4].contains("user-data"), "{told:?}");
        let again = differences("shop", &[wished], &[made], false);
        assert_eq!(again, steps[1..], "what was set is so");
    }

    /// The differences of one instance of the file and one that is there: each by its sign and why.
    fn one(wished: &Wished, there: &Standing) -> Vec<(char, String)> {
        let steps = differences("shop", std::slice::from_ref(wished), std::slice::from_ref(there), false);
        let told = |step| match step {
            Difference::Stands(_, _, why) => ('!', why),
            Difference::Keep(_, _, why) => ('=', why),
            step => panic!("{step:?}"),
        };
        steps.into_iter().map(told).collect()
    }

    #[test]
    fn of_another_image_somebody_is_needed_only_where_the_file_says_another() {
        let of = |url: &str, name: Option<&str>| ImageRef {
            name: name.map(str::to_owned),
            id: name.map(|_| ec_model::ImageId::new(uuid::Uuid::from_u128(7))),
            ..ImageRef::at(url)
        };
        let copy = format!("volume:{UUID}");
        let (old, new) = ("https://a.example/1", "https://a.example/2");
        for (has, said, means, sign) in [
            (of(old, None), Some(old), of(old, None), ""),
            // Its word is another.
            (of(old, None), Some(new), of(new, None), "!"),
            (of(old, Some("a")), Some("b"), of(new, Some("b")), "!"),
            (of(old, Some("a")), Some(new), of(new, None), "!"),
            (of(old, None), Some("volume:golden"), of(&copy, None), "!"),
            (of(old, Some("a")), Some("b"), of(new, None), "!"),
            // Its word means another: in the catalogue, and in the site's configuration.
            (of(old, Some("A")), Some("a"), of(new, Some("a")), "="),
            (of(old, None), Some("a"), of(new, None), "="),
            (of(old, None), None, of(new, None), "="),
            (of(old, Some("a")), None, of(new, Some("b")), "="),
            (of(old, Some("a")), Some(UUID), of(new, Some("a")), "="),
            // It was restored.
            (of(&copy, None), Some(new), of(new, None), "="),
            (of(&copy, None), Some("a"), of(new, Some("a")), "="),
            (of(&copy, None), None, of(new, None), "="),
        ] {
            let (mut there, mut wished) = (standing(1, "web", Some("shop")), wish("web"));
            (there.record.spec.image, wished.image, wished.said) = (has, means, said.map(str::to_owned));
            let told = one(&wished, &there);
            assert_eq!(told.iter().map(|(sign, _)| *sign).collect::<String>(), sign, "{wished:?} {there:?}");
            let image = said.unwrap_or(&wished.image.url);
            let by = format!("`eschedule rebuild web --image {image}` gives it a new disk");
            assert!(told.iter().all(|(_, why)| why.contains(&by) && why.contains("lost")), "{told:?}");
        }
        // A release that lies where the one before it lay.
        let (mut there, mut wished) = (standing(1, "web", Some("shop")), wish("web"));
        there.record.spec.image.sha256 = Some("a".repeat(64));
        wished.image.sha256 = Some("b".repeat(64));
        let [(sign, why)] = &one(&wished, &there)[..] else { panic!("it is another") };
        assert!(
            *sign == '!' && why.contains("(digest aaaaaaaaaaaa…)") && why.contains("bbbbbbbbbbbb…"),
            "{why}"
        );
        wished.image.url = "https://a.example/elsewhere".to_owned();
        assert!(!one(&wished, &there)[0].1.contains("digest"), "their places tell them apart");
        wished.image.url.clone_from(&there.record.spec.image.url);
        wished.image.sha256 = None;
        assert_eq!(one(&wished, &there), [], "none is demanded");
        (there.record.spec.image.sha256, wished.image.sha256) = (None, Some("b".repeat(64)));
        assert_eq!(one(&wished, &there)[0].0, '=', "nobody knows which it has");
    }

    #[test]
    fn a_disk_that_was_grown_needs_nobody() {
        let told = |has: &str, wanted: &str| {
            let (mut there, mut wished) = (standing(1, "web", Some("shop")), wish("web"));
            (there.record.spec.query, wished.query) = (has.to_owned(), wanted.to_owned());
            one(&wished, &there).into_iter().map(|(sign, why)| format!("{sign} {why}")).collect::<String>()
        };
        let (small, grown) =
            ("resources=VCPU:1,DISK_GB:5,MEMORY_MB:1", "resources=VCPU:1,MEMORY_MB:1,DISK_GB:9");
        assert_eq!(told(grown, small), "= its disk has 9 GB, where the file says 5, and never shrinks");
        assert_eq!(told("resources=VCPU:1,MEMORY_MB:1,DISK_GB:5", small), "", "as it is after a revert");
        assert!(told(small, grown).starts_with("! its room was asked for by "), "it is to grow");
        let more = "resources=VCPU:2,MEMORY_MB:1,DISK_GB:5";
        assert!(told(grown, more).starts_with("! its room"), "of all else");
        assert!(told(&format!("{grown}&required=A"), small).starts_with("! its room"), "a demand");
        assert!(told("resources=DISK_GB:9", "resources=DISK_GB:5").starts_with("= its disk"));
    }

    #[test]
    fn the_same_room_in_another_order_is_the_same() {
        let told = |has: &str, wanted: &str| {
            let (mut there, mut wished) = (standing(1, "web", Some("shop")), wish("web"));
            (there.record.spec.query, wished.query) = (has.to_owned(), wanted.to_owned());
            one(&wished, &there).into_iter().map(|(sign, _)| sign).collect::<String>()
        };
        let has = "resources=VCPU:1,MEMORY_MB:256,DISK_GB:1&required=A&resources1=X:1,Y:2";
        let same = "resources1=Y:2,X:1&required=A&resources=DISK_GB:1,MEMORY_MB:256,VCPU:1";
        assert_eq!(told(has, same), "");
        assert_eq!(
            told("resources=VCPU:1,MEMORY_MB:2", "resources=MEMORY_MB:2,VCPU:1"),
            "",
            "without a disk"
        );
        assert_eq!(told(has, &same.replace("X:1", "X:2")), "!");
        assert_eq!(told(has, &same.replace("DISK_GB:1", "DISK_GB:2")), "!");
        assert_eq!(told(has, &same.replace("required=A", "required=B")), "!");
    }

    #[test]
    fn a_copy_of_which_the_file_does_not_say_how_large_it_is_has_what_it_claimed() {
        let (mut there, mut wished) = (standing(1, "web", Some("shop")), wish("web"));
        there.record.spec.query = "resources=VCPU:1,MEMORY_MB:1,DISK_GB:5".to_owned();
        wished.query = "resources=VCPU:1,MEMORY_MB:1".to_owned();
        assert_eq!(one(&wished, &there)[0].0, '=', "of an image it is told");
        let copy = ImageRef::at("volume:7d3c1f0a-2b4e-4c55-9a7e-0123456789ab");
        (there.record.spec.image, wished.image) = (copy.clone(), copy);
        assert_eq!(one(&wished, &there), []);
        wished.query.push_str(",DISK_GB:3");
        assert_eq!(one(&wished, &there)[0].0, '=', "that it is larger than the file says is told");
        wished.query.push_str("&required=A");
        assert_eq!(one(&wished, &there)[0].0, '!');
    }

    #[test]
    fn keys_in_another_order_are_the_same_and_other_user_data_of_the_same_length_is_not() {
        let (mut there, mut wished) = (standing(1, "web", Some("shop")), wish("web"));
        there.record.spec.keys = ["a", "b"].map(str::to_owned).to_vec();
        wished.keys.with = ["b", "a"].map(str::to_owned).to_vec();
        there.user_data = Some(Blob(vec![1]));
        wished.user_data.with.clone_from(&there.user_data);
        assert_eq!(differences("shop", &[wished.clone()], &[there.clone()], true), []);
        wished.user_data.with = Some(Blob(vec![2]));
        assert_eq!(differences("shop", &[wished.clone()], &[there.clone()], true).len(), 1);
        there.user_data = None;
        assert_eq!(differences("shop", &[wished.clone()], &[there.clone()], true).len(), 1);
        there.record.spec.user_data_bytes = Some(1);
        assert_eq!(differences("shop", &[wished], &[there], true), [], "it is gone, and cannot be compared");
    }

    #[test]
    fn what_defaults_say_by_now_is_told_and_needs_nobody() {
        let (mut there, mut wished) = (standing(1, "web", Some("shop")), wish("web"));
        there.record.spec.keys = vec!["a".to_owned()];
        wished.keys.with = vec!["b".to_owned()];
        let told = |wished: &Wished| one(wished, &there);
        assert!(matches!(&told(&wished)[..], [('!', why)] if why.ends_with("destroy it and apply again")));
        wished.keys.said = false;
        assert!(matches!(&told(&wished)[..], [('=', why)] if why.contains("`defaults` say by now")));
    }

    #[test]
    fn an_instance_keeps_what_it_boots_from() {
        let (mut there, mut wished) = (standing(1, "web", Some("shop")), wish("web"));
        let volume = ec_model::InstanceId::new(uuid::Uuid::from_u128(7));
        let told = |there: &Standing, wished: &Wished| {
            let steps = differences("shop", std::slice::from_ref(wished), std::slice::from_ref(there), false);
            let why = |step: &Difference| match step {
                Difference::Stands(_, _, why) => why.clone(),
                step => panic!("{step:?}"),
            };
            steps.iter().map(why).collect::<Vec<_>>().join("; ")
        };
        (wished.boots, wished.image) = (true, ImageRef::default());
        assert!(told(&there, &wished).starts_with("it boots from a disk of its own, and"));
        there.record.volumes = vec![Attachment::root(volume)];
        assert_eq!(told(&there, &wished), "", "of which image it was made says nothing");
        wished.boots = false;
        assert!(told(&there, &wished).starts_with("it boots from a volume, and"));
    }
}
