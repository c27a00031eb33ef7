//! Watching instances: every change of how they are, as it happens.
//!
//! Three prefixes are followed, requests, statuses and records, each from a listing on. What is known of each instance is
//! kept as its keys' values say it, and told anew when what people see of it is otherwise than it was told last. A follower
//! that lists again gives all that there is: what is not in it any more is gone, and is told as that.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ec_model::{Instance, InstanceId, Keyspace, NodeId, Rebuild, Request, Status, input::LabelSelector};
use ec_store::{Change, Event, FollowOptions, KeyValue, follow};
use serde::Serialize;

use crate::{Cloud, CloudError, View, intent::wanted, lookup::read};

/// What is seen while instances are watched.
#[derive(Debug)]
pub enum Seen {
    /// An instance is so now.
    Is(What, Box<View>),
    /// The store is away, in these words; it is waited for, and then everything is looked at again.
    Lost(String),
}

/// What became of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// It was there when the watch began.
    There,
    /// It is new.
    New,
    /// Something of it is otherwise.
    Changed,
    /// No node speaks of it any more, though its record may stand, or the selectors do not take it any more; how it was last.
    Gone,
}

/// Which instances are watched: all, or those that are named, and that the selectors take.
#[derive(Debug, Clone, Default)]
pub struct Watched {
    /// None named: all.
    pub instances: BTreeSet<InstanceId>,
    /// All of them take it; then only instances of the project are meant.
    pub labels: Vec<LabelSelector>,
    /// The project.
    pub project: String,
}

impl Watched {
    fn takes(&self, view: &View) -> bool {
        let is_machine = view.kind.is_machine();
        let named = self.instances.is_empty() || self.instances.contains(&view.instance);
        let selected = self.labels.is_empty()
            || (view.project.as_ref() == Some(&self.project)
                && self.labels.iter().all(|selector| selector.takes(&view.labels)));
        is_machine && named && selected
    }
}

/// Which of the three a key belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Record,
    Request,
    Status,
}

/// What lies under one node's prefixes about an instance.
#[derive(Debug, Default)]
struct Pairs {
    request: Option<KeyValue>,
    status: Option<KeyValue>,
}

/// All that is known, and what of it was told.
struct Board {
    keys: Keyspace,
    watched: Watched,
    records: BTreeMap<InstanceId, KeyValue>,
    placed: BTreeMap<InstanceId, BTreeMap<NodeId, Pairs>>,
    told: BTreeMap<InstanceId, View>,
}

impl Board {
    fn new(keys: Keyspace, watched: Watched) -> Self {
        Self { keys, watched, records: BTreeMap::new(), placed: BTreeMap::new(), told: BTreeMap::new() }
    }

    /// Takes in what lies under a key now. The instance that it speaks of; none where it is no key of ours.
    fn set(&mut self, kind: Kind, key: &str, pair: Option<KeyValue>) -> Option<InstanceId> {
        if kind == Kind::Record {
            let instance = self.keys.parse_instance(key).ok()?;
            match pair {
                Some(pair) => _ = self.records.insert(instance, pair),
                None => _ = self.records.remove(&instance),
            }
            return Some(instance);
        }
        let parsed =
            if kind == Kind::Request { self.keys.parse_request(key) } else { self.keys.parse_status(key) };
        let (node, instance) = parsed.ok()?;
        let nodes = self.placed.entry(instance).or_default();
        let pairs = nodes.entry(node).or_default();
        if kind == Kind::Request {
            pairs.request = pair
        } else {
            pairs.status = pair
        }
        nodes.retain(|_, pairs| pairs.request.is_some() || pairs.status.is_some());
        if nodes.is_empty() {
            self.placed.remove(&instance);
        }
        Some(instance)
    }

    /// Takes in all that there is of a kind. The instances that it speaks of, and those that it speaks of no more.
    fn reset(&mut self, kind: Kind, pairs: Vec<KeyValue>) -> BTreeSet<InstanceId> {
        let placed = self.placed.values().flat_map(BTreeMap::values);
        let here: Vec<&KeyValue> = match kind {
            Kind::Record => self.records.values().collect(),
            Kind::Request => placed.filter_map(|pairs| pairs.request.as_ref()).collect(),
            Kind::Status => placed.filter_map(|pairs| pairs.status.as_ref()).collect(),
        };
        let mut before: BTreeSet<String> = here.into_iter().map(|pair| pair.key.clone()).collect();
        for pair in &pairs {
            before.remove(&pair.key);
        }
        let gone = before.into_iter().map(|key| (key, None));
        let here = pairs.into_iter().map(|pair| (pair.key.clone(), Some(pair)));
        let all: Vec<_> = gone.chain(here).collect();
        all.into_iter().filter_map(|(key, pair)| self.set(kind, &key, pair)).collect()
    }

    /// How an instance is now; none where nothing speaks of it.
    fn view(&self, instance: InstanceId) -> Option<View> {
        let record = self.records.get(&instance).map(|pair| wanted(instance, &pair.value));
        let nodes = self.placed.get(&instance);
        // Where several nodes speak of it, the one that its record names counts.
        let named = record.as_ref().and_then(|record| record.as_ref().ok()?.node());
        let place = nodes.and_then(|nodes| {
            named.and_then(|node| nodes.get_key_value(&node)).or_else(|| nodes.first_key_value())
        });
        match (place, record) {
            (Some((node, pairs)), record) => {
                let (request, status) = (pairs.request.as_ref(), pairs.status.as_ref());
                let (request, status) = (read(request, *node, instance), read(status, *node, instance));
                let view = View::brief(instance, *node, true, &request, &status);
                let view = View {
                    request: request.record().cloned().map(Box::new),
                    status: status.record().cloned().map(Box::new),
                    ..view
                };
                Some(match record {
                    Some(Ok(record)) => {
                        let view = view.with(&record).wished(&record, &request, &status);
                        View { record: Some(Box::new(record)), ..view }
                    }
                    Some(Err(why)) => self.as_told(view.without_record(&why)),
                    // Gone with the wish for its end, which takes a while.
                    None => self.as_told(view),
                })
            }
            (None, Some(Ok(record))) if record.assigned.is_none() => Some(View::unplaced(&record)),
            (None, Some(Err(why))) => Some(self.as_told(View::unreadable(instance, &why))),
            (None, _) => None,
        }
    }

    /// The same with what only its record tells as that was told last.
    fn as_told(&self, view: View) -> View {
        let Some(before) = self.told.get(&view.instance).cloned() else { return view };
        View { project: before.project, labels: before.labels, group: before.group, ..view }
    }

    /// What is to be told of instances of which something was taken in.
    fn tell(&mut self, of: BTreeSet<InstanceId>, first: bool) -> Vec<(What, View)> {
        let mut told = Vec::new();
        for instance in of {
            let view = self.view(instance);
            // That it is placed was heard of, and what its node is asked for comes at once.
            let is_about = view.is_none() && self.records.contains_key(&instance);
            if is_about && self.told.get(&instance).is_some_and(|before| before.node.is_none()) {
                continue;
            }
            let now = view.filter(|view| self.watched.takes(view));
            match (self.told.remove(&instance), now) {
                (None, None) => {}
                (Some(before), None) => told.push((What::Gone, before)),
                (before, Some(mut now)) => {
                    // The record can be heard to be gone before the rest is: what was told of it stays told.
                    if let Some(before) = &before {
                        now.name = now.name.or_else(|| before.name.clone());
                        if now.resources.is_empty() {
                            now.resources.clone_from(&before.resources);
                        }
                    }
                    let what = match &before {
                        None if first => Some(What::There),
                        None => Some(What::New),
                        Some(before) if same(before, &now) => None,
                        Some(_) => Some(What::Changed),
                    };
                    self.told.insert(instance, now.clone());
                    told.extend(what.map(|what| (what, now)));
                }
            }
        }
        told
    }
}

/// Whether nobody would see a difference, in `list` or in `show`: but for times, and for how far a step is.
fn same(a: &View, b: &View) -> bool {
    (&a.name, a.node, &a.state, a.ip, &a.labels, &a.group, &a.reason, &a.doing, &a.resources)
        == (&b.name, b.node, &b.state, b.ip, &b.labels, &b.group, &b.reason, &b.doing, &b.resources)
        && same_records(a, b)
}

/// The same of what only `show` tells. Of what is gone, while others speak of the instance still, nobody sees a difference.
fn same_records(a: &View, b: &View) -> bool {
    fn both<R>(a: Option<&R>, b: Option<&R>, same: impl Fn(&R, &R) -> bool) -> bool {
        a.zip(b).is_none_or(|(a, b)| same(a, b))
    }
    let image = |view: &View| {
        let request = view.request.as_ref()?;
        let came = view.status.as_ref().and_then(|status| status.rebuilt.as_ref());
        Some(Rebuild::disk(request.rebuild.as_ref(), &request.spec.as_ref()?.image, came).clone())
    };
    let wanted = |a: &Instance, b: &Instance| {
        let of = |it: &Instance| (it.locked.clone(), it.before.clone(), it.spec.metadata.clone());
        of(a) == of(b)
    };
    let asked = |a: &Request, b: &Request| {
        let of = |it: &Request| (it.restart, it.power.power, it.spec.as_ref().map(|spec| spec.query.clone()));
        of(a) == of(b)
    };
    let told = |a: &Status, b: &Status| {
        let failed = |it: &Status| {
            [
                it.rebuilt.clone().and_then(|came| came.failed),
                it.rescued.clone().and_then(|came| came.failed),
                it.resized.clone().and_then(|came| came.failed),
                it.volumes_failed.clone(),
            ]
        };
        let volumes = |it: &Status| (it.volumes.clone(), it.volumes_changing);
        // How one became known, which is another way now and then, is told to scripts alone.
        let addresses = |it: &Status| -> Vec<_> {
            it.addresses.iter().map(|address| (address.ip, address.mac, address.nic)).collect()
        };
        addresses(a) == addresses(b)
            && volumes(a) == volumes(b)
            && a.console == b.console
            && failed(a) == failed(b)
    };
    both(a.record.as_deref(), b.record.as_deref(), wanted)
        && both(a.request.as_deref(), b.request.as_deref(), asked)
        && both(a.status.as_deref(), b.status.as_deref(), told)
        && both(image(a).as_ref(), image(b).as_ref(), |a, b| a == b)
}

/// Watches until `seen` has an error, which it answers.
pub async fn watch<E: From<CloudError>>(
    cloud: &Cloud,
    watched: Watched,
    mut seen: impl FnMut(Seen) -> Result<(), E>,
) -> Result<(), E> {
    let keys = &cloud.keys;
    let follow = |prefix: String| follow(Arc::clone(&cloud.store), prefix, FollowOptions::default());
    let mut records = follow(keys.instances());
    let mut requests = follow(keys.all_requests());
    let mut statuses = follow(keys.all_statuses());
    let mut board = Board::new(keys.clone(), watched);
    // Told together when all three were listed, so that nobody is told of half of an instance.
    let mut listed: BTreeMap<Kind, BTreeSet<InstanceId>> = BTreeMap::new();
    let mut begun = false;
    let mut lost = BTreeSet::new();
    loop {
        let (kind, change) = tokio::select! {
            biased;
            change = records.recv() => (Kind::Record, change),
            change = requests.recv() => (Kind::Request, change),
            change = statuses.recv() => (Kind::Status, change),
        };
        let Some(change) = change else {
            return Err(CloudError::Unavailable("the watch ended".into()).into());
        };
        let of = match change {
            Change::Reset(listing) => {
                lost.remove(&kind);
                board.reset(kind, listing.pairs)
            }
            Change::Events(batch) => {
                lost.remove(&kind);
                let mut of = BTreeSet::new();
                for event in batch.events {
                    let key = event.key().to_owned();
                    let pair = match event {
                        Event::Put(pair) => Some(pair),
                        Event::Delete { .. } => None,
                    };
                    of.extend(board.set(kind, &key, pair));
                }
                of
            }
            // Of one outage all three are told.
            Change::Lost(error) => {
                if lost.is_empty() {
                    seen(Seen::Lost(error.to_string()))?;
                }
                lost.insert(kind);
                continue;
            }
        };
        let of = if begun {
            of
        } else {
            listed.entry(kind).or_default().extend(of);
            if listed.len() < 3 {
                continue;
            }
            std::mem::take(&mut listed).into_values().flatten().collect()
        };
        for (what, view) in board.tell(of, !begun) {
            seen(Seen::Is(what, Box::new(view)))?;
        }
        begun = true;
    }
}

#[cfg(test)]
mod tests {
    use ec_model::{Assigned, State, encode};
    use serde_json::json;

    use super::*;

    const NODE: u128 = 7;

    fn id(number: u128) -> InstanceId {
        InstanceId::new(uuid::Uuid::from_u128(number))
    }

    fn node() -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(NODE))
    }

    fn pair(key: String, value: Vec<u8>) -> KeyValue {
        KeyValue { key, value, create_revision: 1, mod_revision: 1, version: 1, lease: None }
    }

    fn record(number: u128, role: &str, project: &str) -> KeyValue {
        let text = json!({
            "version": 1, "instance": id(number), "project": project, "name": format!("n{number}"),
            "labels": {"role": role}, "spec": {"query": "", "image": {"url": ""}}, "generation": 1,
            "created_at": "1970-01-01T00:00:00Z", "assigned": Assigned { node: node(), epoch: 1 },
        });
        let record: Instance = ec_model::decode(text.to_string().as_bytes()).unwrap();
        pair(Keyspace::default().instance(id(number)), encode(&record))
    }

    fn status(number: u128, state: State, ip: Option<&str>) -> KeyValue {
        let text = json!({
            "version": 1, "instance": id(number), "node": node(), "state": state, "ip": ip, "epoch": 1,
            "since": "1970-01-01T00:00:00Z", "updated_at": "1970-01-01T00:00:00Z",
        });
        pair(Keyspace::default().status(node(), id(number)), text.to_string().into_bytes())
    }

    fn told(board: &mut Board, of: BTreeSet<InstanceId>) -> Vec<(What, String)> {
        board.tell(of, false).into_iter().map(|(what, view)| (what, view.state)).collect()
    }

    #[test]
    fn each_change_that_people_see_is_told_once_and_others_are_not() {
        let mut board = Board::new(Keyspace::default(), Watched::default());
        let mut set = |kind, pair: KeyValue| {
            let of = board.set(kind, &pair.key.clone(), Some(pair)).into_iter().collect();
            told(&mut board, of)
        };
        assert_eq!(set(Kind::Record, record(1, "web", "p")), []);
        assert_eq!(set(Kind::Status, status(1, State::Starting, None)), [(What::New, "STARTING".into())]);
        assert_eq!(set(Kind::Status, status(1, State::Starting, None)), []);
        let ip = Some("10.0.0.1");
        assert_eq!(set(Kind::Status, status(1, State::Starting, ip)), [(What::Changed, "STARTING".into())]);
        assert_eq!(set(Kind::Status, status(1, State::Active, ip)), [(What::Changed, "ACTIVE".into())]);
        assert_eq!(set(Kind::Record, record(1, "db", "p")), [(What::Changed, "ACTIVE".into())]);
        assert_eq!(set(Kind::Status, pair("/ecompute/status/x".into(), Vec::new())), []);
        let key = Keyspace::default().status(node(), id(1));
        let of = board.set(Kind::Status, &key, None).into_iter().collect();
        assert_eq!(told(&mut board, of), [(What::Gone, "ACTIVE".into())]);
    }

    #[test]
    fn what_only_show_tells_is_told_once_too_but_for_how_far_a_step_is() {
        let mut board = Board::new(Keyspace::default(), Watched::default());
        let (is, has) = (record(1, "web", "p"), status(1, State::Active, Some("10.0.0.1")));
        board.set(Kind::Record, &is.key.clone(), Some(is.clone()));
        board.set(Kind::Status, &has.key.clone(), Some(has.clone()));
        assert_eq!(told(&mut board, [id(1)].into()), [(What::New, "ACTIVE".into())]);
        let mut set = |kind, pair: &KeyValue, field: &str, value: serde_json::Value| {
            let mut text: serde_json::Value = serde_json::from_slice(&pair.value).unwrap();
            text[field] = value;
            let pair = KeyValue { value: text.to_string().into_bytes(), ..pair.clone() };
            let mut again = || {
                let of = board.set(kind, &pair.key, Some(pair.clone())).into_iter().collect();
                told(&mut board, of).len()
            };
            (again(), again())
        };
        let image = json!({"url": ""});
        let address = |source: &str| json!([{"ip": "10.1.0.1", "mac": "52:54:00:00:00:01", "nic": 1, "source": source}]);
        for (kind, pair, field, value) in [
            (Kind::Record, &is, "locked", json!("mine")),
            (Kind::Record, &is, "spec", json!({"query": "", "image": image, "metadata": {"a": "b"}})),
            (Kind::Record, &is, "group", json!("apart")),
            (Kind::Status, &has, "addresses", address("arp")),
            (Kind::Status, &has, "volumes", json!([{"volume": id(9), "device": "vdb"}])),
            (Kind::Status, &has, "volumes_failed", json!("no such disk")),
        ] {
            assert_eq!(set(kind, pair, field, value), (1, 0), "{field}");
        }
        // How it was last.
        assert_eq!(set(Kind::Status, &has, "volumes", json!([])), (1, 0));
        // Somebody looks at it, say at its log.
        let ticket =
            json!({"kind": "log", "generation": 1, "ticket": "t", "expires_at": "1970-01-01T00:00:01Z"});
        assert_eq!(set(Kind::Status, &has, "access", ticket), (0, 0));
        assert_eq!(set(Kind::Status, &has, "addresses", address("arp")), (1, 0));
        assert_eq!(set(Kind::Status, &has, "addresses", address("lease")), (0, 0));
        assert_eq!(set(Kind::Status, &has, "addresses", json!([])), (1, 0));
        let progress = json!({"step": "image", "done": 1});
        assert_eq!(set(Kind::Status, &has, "progress", progress), (0, 0));
        assert_eq!(set(Kind::Status, &has, "started_at", json!("1970-01-01T00:00:01Z")), (0, 0));
    }

    #[test]
    fn one_whose_record_goes_first_keeps_its_name_and_labels_to_the_end() {
        let labels = vec![ec_model::input::label_selector("role=web").unwrap()];
        let watched = Watched { labels, project: "p".into(), ..Watched::default() };
        let mut board = Board::new(Keyspace::default(), watched);
        let mut set = |kind, key: String, pair| {
            let of = board.set(kind, &key, pair).into_iter().collect();
            let told = board.tell(of, false);
            told.into_iter().map(|(what, view)| (what, view.name, view.state)).collect::<Vec<_>>()
        };
        let (record, status) = (record(1, "web", "p"), status(1, State::Active, None));
        let (record_key, status_key) = (record.key.clone(), status.key.clone());
        assert_eq!(set(Kind::Record, record_key.clone(), Some(record)), []);
        let named = |what, state: &str| vec![(what, Some("n1".to_owned()), state.to_owned())];
        assert_eq!(set(Kind::Status, status_key.clone(), Some(status)), named(What::New, "ACTIVE"));
        assert_eq!(set(Kind::Record, record_key, None), []);
        let destroying = super::tests::status(1, State::Destroying, None);
        let told = set(Kind::Status, status_key.clone(), Some(destroying));
        assert_eq!(told, named(What::Changed, "DESTROYING"));
        assert_eq!(set(Kind::Status, status_key, None), named(What::Gone, "DESTROYING"));
    }

    #[test]
    fn one_whose_record_cannot_be_read_is_unknown_and_not_gone() {
        for labels in [Vec::new(), vec![ec_model::input::label_selector("role=web").unwrap()]] {
            let watched = Watched { labels, project: "p".into(), ..Watched::default() };
            let mut board = Board::new(Keyspace::default(), watched);
            let mut set = |kind, pair: KeyValue| {
                let of = board.set(kind, &pair.key.clone(), Some(pair)).into_iter().collect();
                let told = board.tell(of, false).into_iter();
                told.map(|(what, view)| (what, view.state, view.reason)).collect::<Vec<_>>()
            };
            let whole = record(1, "web", "p");
            set(Kind::Record, whole.clone());
            let status = status(1, State::Active, None);
            assert_eq!(set(Kind::Status, status.clone()), [(What::New, "ACTIVE".to_owned(), None)]);
            let later = KeyValue { value: br#"{"version":99}"#.to_vec(), ..whole.clone() };
            let told = set(Kind::Record, later);
            let [(What::Changed, state, Some(why))] = &told[..] else { panic!("{told:?}") };
            assert!(state == "UNKNOWN" && why.contains("cannot be read") && why.contains("99"), "{told:?}");
            assert_eq!(set(Kind::Status, status), [], "it is told once");
            assert_eq!(set(Kind::Record, whole), [(What::Changed, "ACTIVE".to_owned(), None)]);
        }
    }

    #[test]
    fn one_that_is_placed_is_not_gone_between_what_is_heard_of_it() {
        let mut board = Board::new(Keyspace::default(), Watched::default());
        let mut set = |kind, key: String, pair| {
            let of = board.set(kind, &key, pair).into_iter().collect();
            told(&mut board, of)
        };
        let placed = record(1, "web", "p");
        let unplaced = Instance { assigned: None, ..ec_model::decode(&placed.value).unwrap() };
        let key = placed.key.clone();
        let scheduled = "SCHEDULED".to_owned();
        let told = set(Kind::Record, key.clone(), Some(pair(key.clone(), encode(&unplaced))));
        assert_eq!(told, [(What::New, scheduled)]);
        assert_eq!(set(Kind::Record, key.clone(), Some(placed)), []);
        let starting = status(1, State::Starting, None);
        let told = set(Kind::Status, starting.key.clone(), Some(starting.clone()));
        assert_eq!(told, [(What::Changed, "STARTING".to_owned())]);
        assert_eq!(set(Kind::Status, starting.key, None), [(What::Gone, "STARTING".to_owned())]);
        assert_eq!(set(Kind::Record, key, None), []);
    }

    #[test]
    fn what_a_new_listing_does_not_have_is_gone() {
        let mut board = Board::new(Keyspace::default(), Watched::default());
        let listed = |numbers: &[u128]| {
            numbers.iter().map(|number| status(*number, State::Active, None)).collect::<Vec<_>>()
        };
        let of = board.reset(Kind::Status, listed(&[1, 2]));
        let first: Vec<What> = board.tell(of, true).into_iter().map(|(what, _)| what).collect();
        assert_eq!(first, [What::There, What::There]);
        let of = board.reset(Kind::Status, listed(&[2, 3]));
        let told: Vec<(What, InstanceId)> =
            board.tell(of, false).into_iter().map(|(what, view)| (what, view.instance)).collect();
        assert_eq!(told, [(What::Gone, id(1)), (What::New, id(3))]);
        assert!(board.placed.len() == 2 && !board.placed.contains_key(&id(1)));
    }

    #[test]
    fn one_that_comes_to_be_meant_is_new_and_one_that_is_meant_no_more_is_gone() {
        let labels = vec![ec_model::input::label_selector("role=web").unwrap()];
        let watched = Watched { labels, project: "p".into(), ..Watched::default() };
        let mut board = Board::new(Keyspace::default(), watched);
        let mut set = |kind, pair: KeyValue| {
            let of = board.set(kind, &pair.key.clone(), Some(pair)).into_iter().collect();
            told(&mut board, of)
        };
        assert_eq!(set(Kind::Status, status(1, State::Active, None)), []);
        assert_eq!(set(Kind::Record, record(1, "web", "other")), []);
        assert_eq!(set(Kind::Record, record(1, "web", "p")), [(What::New, "ACTIVE".into())]);
        assert_eq!(set(Kind::Record, record(1, "db", "p")), [(What::Gone, "ACTIVE".into())]);
        let named = Watched { instances: [id(2)].into(), ..Watched::default() };
        let mut board = Board::new(Keyspace::default(), named);
        for (number, count) in [(1, 0), (2, 1)] {
            let pair = status(number, State::Active, None);
            let of = board.set(Kind::Status, &pair.key.clone(), Some(pair)).into_iter().collect();
            assert_eq!(told(&mut board, of).len(), count);
        }
    }
}
