//! Which instances are meant, where they are not named one by one: filters, orders and pages of a list, and selectors.

use std::collections::{BTreeMap, BTreeSet};

use ec_model::{Alive, Instance, InstanceId, Node, NodeId, State, Workload, decode, input::LabelSelector};

use crate::{Cloud, CloudError, CloudResult, View, VolumeView, intent::wanted, lookup::is_beginning};

/// So many of those that a name may mean are told.
const SOME: usize = 8;

/// What every list is narrowed by: all that is said must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Whose {
    /// On this node, or on its storage.
    pub node: Option<NodeId>,
    /// With labels that all of these take.
    pub labels: Vec<LabelSelector>,
    /// Of this project.
    pub project: Option<String>,
}

impl Whose {
    fn takes(
        &self,
        node: Option<NodeId>,
        labels: &BTreeMap<String, String>,
        project: Option<&String>,
    ) -> bool {
        (self.node.is_none() || self.node == node)
            && self.labels.iter().all(|selector| selector.takes(labels))
            && (self.project.is_none() || self.project.as_ref() == project)
    }
}

/// Which of a list of instances are wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// In one of these states; none: in any.
    pub states: Vec<State>,
    /// And all of this.
    pub whose: Whose,
}

impl Filter {
    /// Whether an instance is wanted.
    pub fn takes(&self, view: &View) -> bool {
        (self.states.is_empty() || self.states.iter().any(|state| state.to_string() == view.state))
            && self.whose.takes(view.node, &view.labels, view.project.as_ref())
    }
}

/// Which of a list of volumes are wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeFilter {
    /// Of one of these statuses, of [`VolumeView::STATUSES`]; none: of any.
    pub statuses: Vec<String>,
    /// And all of this.
    pub whose: Whose,
    /// That this instance has, or is about to, and snapshots of its disk.
    pub instance: Option<InstanceId>,
    /// Only such as are snapshots.
    pub snapshots: bool,
}

impl VolumeFilter {
    /// Whether a volume is wanted.
    pub fn takes(&self, view: &VolumeView) -> bool {
        (self.statuses.is_empty() || self.statuses.contains(&view.status))
            && self.whose.takes(view.node, &view.labels, view.project.as_ref())
            && (view.snapshot || !self.snapshots)
            && self.instance.is_none_or(|instance| {
                view.instance == Some(instance) || view.snapshot && view.copy_of == Some(instance)
            })
    }
}

/// What a list is ordered by; equals are ordered by name and uuid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SortBy {
    /// The node's uuid.
    #[default]
    Node,
    /// The name.
    Name,
    /// The state's word.
    State,
    /// The first address.
    Ip,
    /// The project.
    Project,
    /// When it was asked for, the oldest first.
    Created,
}

/// Brings a list into an order, in which every instance has one place.
pub(crate) fn sort(views: &mut [View], by: SortBy) {
    views.sort_by(|a, b| {
        let first = match by {
            SortBy::Node => a.node.cmp(&b.node),
            SortBy::Name => a.name.cmp(&b.name),
            SortBy::State => a.state.cmp(&b.state),
            SortBy::Ip => a.ip.cmp(&b.ip),
            SortBy::Project => a.project.cmp(&b.project),
            SortBy::Created => a.created_at.cmp(&b.created_at),
        };
        first.then_with(|| (&a.name, a.instance).cmp(&(&b.name, b.instance)))
    });
}

/// What a list of volumes is ordered by; equals are ordered by name and uuid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SortVolumesBy {
    /// The node's uuid.
    #[default]
    Node,
    /// The name.
    Name,
    /// The status' word.
    Status,
    /// The size, the largest first.
    Size,
    /// The project.
    Project,
    /// When it was asked for, the oldest first.
    Created,
}

fn sort_volumes(views: &mut [VolumeView], by: SortVolumesBy) {
    views.sort_by(|a, b| {
        let first = match by {
            SortVolumesBy::Node => a.node.cmp(&b.node),
            SortVolumesBy::Name => a.name.cmp(&b.name),
            SortVolumesBy::Status => a.status.cmp(&b.status),
            SortVolumesBy::Size => b.size_gb.cmp(&a.size_gb),
            SortVolumesBy::Project => a.project.cmp(&b.project),
            SortVolumesBy::Created => a.created_at.cmp(&b.created_at),
        };
        first.then_with(|| (&a.name, a.volume).cmp(&(&b.name, b.volume)))
    });
}

/// A part of a list.
#[derive(Debug)]
pub struct Page<V> {
    /// In their order.
    pub views: Vec<V>,
    /// How many follow.
    pub more: usize,
}

/// The page of a whole list that is wanted: what the filter takes, behind the instance `after`, as many as `limit`.
///
/// The order is that of the whole list, so that a page goes on behind an instance that the filter takes no more.
///
/// # Errors
/// [`CloudError::Refused`] where `after` is not in the list.
pub fn page(
    mut views: Vec<View>,
    filter: &Filter,
    by: SortBy,
    after: Option<InstanceId>,
    limit: Option<usize>,
) -> CloudResult<Page<View>> {
    sort(&mut views, by);
    let begin = behind(after, "instance", views.iter().map(|view| view.instance))?;
    Ok(cut(views.drain(begin..).filter(|view| filter.takes(view)).collect(), limit))
}

/// The same of volumes.
///
/// # Errors
/// [`CloudError::Refused`] where `after` is not in the list.
pub fn page_of_volumes(
    mut views: Vec<VolumeView>,
    filter: &VolumeFilter,
    by: SortVolumesBy,
    after: Option<InstanceId>,
    limit: Option<usize>,
) -> CloudResult<Page<VolumeView>> {
    sort_volumes(&mut views, by);
    let begin = behind(after, "volume", views.iter().map(|view| view.volume))?;
    Ok(cut(views.drain(begin..).filter(|view| filter.takes(view)).collect(), limit))
}

/// How many of the list there are up to that one.
fn behind(
    after: Option<InstanceId>,
    what: &str,
    mut listed: impl Iterator<Item = InstanceId>,
) -> CloudResult<usize> {
    let Some(after) = after else { return Ok(0) };
    match listed.position(|one| one == after) {
        Some(place) => Ok(place + 1),
        None => Err(CloudError::Refused(format!(
            "{what} {after} is not in the list any more: begin with the first page"
        ))),
    }
}

fn cut<V>(mut views: Vec<V>, limit: Option<usize>) -> Page<V> {
    let more = views.len().saturating_sub(limit.unwrap_or(usize::MAX));
    views.truncate(views.len() - more);
    Page { views, more }
}

/// The instances of the project that all selectors take.
///
/// # Errors
/// [`CloudError::NotFound`] where there are none.
pub async fn select(cloud: &Cloud, selectors: &[LabelSelector]) -> CloudResult<Vec<InstanceId>> {
    select_of(cloud, selectors, "instance", |record| record.kind.is_machine()).await
}

/// The same of its volumes, or of its snapshots, which are volumes that nothing changes.
///
/// # Errors
/// [`CloudError::NotFound`] where there are none.
pub async fn select_volumes(
    cloud: &Cloud,
    selectors: &[LabelSelector],
    snapshots: bool,
) -> CloudResult<Vec<InstanceId>> {
    let what = if snapshots { "snapshot" } else { "volume" };
    let is_one =
        |record: &Instance| record.kind == Workload::Volume && record.spec.is_snapshot() == snapshots;
    select_of(cloud, selectors, what, is_one).await
}

async fn select_of(
    cloud: &Cloud,
    selectors: &[LabelSelector],
    what: &str,
    is_one: impl Fn(&Instance) -> bool,
) -> CloudResult<Vec<InstanceId>> {
    let mut selected = Vec::new();
    for pair in cloud.store.list(&cloud.keys.instances()).await?.pairs {
        let Ok(instance) = cloud.keys.parse_instance(&pair.key) else { continue };
        match wanted(instance, &pair.value) {
            Ok(record) => {
                let is_ours = record.project == cloud.project && is_one(&record);
                if is_ours && selectors.iter().all(|one| one.takes(&record.labels)) {
                    selected.push(instance);
                }
            }
            Err(why) => {
                (cloud.notice)(&format!("{instance} is passed over: its record cannot be read: {why}"))
            }
        }
    }
    if selected.is_empty() {
        return Err(CloudError::NotFound(format!(
            "no {what} of project `{}` has the label {}; nothing was done",
            cloud.project,
            in_words(selectors)
        )));
    }
    Ok(selected)
}

/// Selectors, as a sentence has them.
pub(crate) fn in_words(selectors: &[LabelSelector]) -> String {
    let labels: Vec<String> = selectors.iter().map(ToString::to_string).collect();
    labels.join(" and ")
}

/// The node that the text is the uuid or the name of, or whose uuid begins so, as no other's does. Of one name those that are alive
/// come first.
///
/// # Errors
/// [`CloudError::NotFound`] where no node is called so, [`CloudError::Invalid`] where several are.
pub async fn node_named(cloud: &Cloud, text: &str) -> CloudResult<NodeId> {
    if let Ok(node) = text.parse() {
        return Ok(node);
    }
    named_nodes(cloud).await?.node(text)
}

/// What nodes are called.
#[derive(Debug, Default)]
pub struct NodeNames {
    /// Those that are alive, as their agents call them.
    alive: BTreeSet<(NodeId, String)>,
    /// All that there are, as their records call them: of one that is called otherwise by now, as it was before.
    recorded: BTreeSet<(NodeId, String)>,
}

impl NodeNames {
    /// Each name that a node has or had.
    pub fn all(&self) -> BTreeSet<&str> {
        self.alive.union(&self.recorded).map(|(_, name)| name.as_str()).collect()
    }

    /// Whether who says that name means this node and no other.
    pub fn means(&self, name: &str, node: NodeId) -> bool {
        self.bearers(name) == [node].into()
    }

    /// Who bears a name. What once bore it and is dead, or was revoked, takes it from nobody who lives.
    fn bearers(&self, name: &str) -> BTreeSet<NodeId> {
        let among = |all: &BTreeSet<(NodeId, String)>| -> BTreeSet<NodeId> {
            all.iter().filter(|(_, called)| called == name).map(|(node, _)| *node).collect()
        };
        let alive = among(&self.alive);
        if alive.is_empty() { among(&self.recorded) } else { alive }
    }

    /// The names of nodes that are not alive.
    pub fn gone(&self) -> BTreeSet<&str> {
        let gone = self.recorded.iter().filter(|(node, _)| !self.is_alive(*node));
        gone.map(|(_, name)| name.as_str()).collect()
    }

    fn is_alive(&self, node: NodeId) -> bool {
        self.alive.iter().any(|(alive, _)| *alive == node)
    }

    /// The node that is called so, or else whose uuid begins so.
    fn node(&self, text: &str) -> CloudResult<NodeId> {
        self.one_of(self.bearers(text), text)
    }

    /// The same; of those of that name the ones that are not alive come first.
    pub(crate) fn gone_first(&self, text: &str) -> CloudResult<NodeId> {
        let gone = self.recorded.iter().filter(|(node, called)| called == text && !self.is_alive(*node));
        let gone: BTreeSet<NodeId> = gone.map(|(node, _)| *node).collect();
        if gone.is_empty() { self.node(text) } else { self.one_of(gone, text) }
    }

    fn one_of(&self, mut found: BTreeSet<NodeId>, text: &str) -> CloudResult<NodeId> {
        let beginning = text.to_ascii_lowercase();
        if found.is_empty() && is_beginning(&beginning) {
            let all = self.alive.union(&self.recorded).map(|(node, _)| *node);
            found = all.filter(|node| node.to_string().starts_with(&beginning)).collect();
        }
        let mut each = found.iter();
        match (each.next(), each.next()) {
            (Some(node), None) => Ok(*node),
            (None, _) => Err(CloudError::NotFound(format!(
                "no node is named `{text}`, and no node's uuid is or begins so; `eschedule nodes` shows all"
            ))),
            _ => {
                let some: Vec<String> = found.iter().take(SOME).map(ToString::to_string).collect();
                let more = if found.len() > SOME { " and others" } else { "" };
                Err(CloudError::Invalid(format!(
                    "several nodes are called `{text}`, {}{more}: give the whole uuid of one",
                    some.join(", ")
                )))
            }
        }
    }
}

/// What each node is called, and was.
///
/// # Errors
/// etcd does not answer.
pub async fn named_nodes(cloud: &Cloud) -> CloudResult<NodeNames> {
    let (keys, store) = (&cloud.keys, &cloud.store);
    let prefixes = (keys.all_alive(), keys.nodes());
    let (alive, recorded) = tokio::try_join!(store.list(&prefixes.0), store.list(&prefixes.1))?;
    let alive = alive.pairs.iter().filter_map(|pair| decode::<Alive>(&pair.value).ok());
    let recorded = recorded.pairs.iter().filter_map(|pair| decode::<Node>(&pair.value).ok());
    Ok(NodeNames {
        alive: alive.map(|one| (one.node, one.name)).collect(),
        recorded: recorded.map(|one| (one.node, one.name)).collect(),
    })
}

#[cfg(test)]
mod tests {
    use ec_model::input::label_selector;
    use jiff::Timestamp;

    use super::*;
    use crate::volume::{Holder, told};

    fn view(number: u128, name: &str, state: State, role: Option<&str>) -> View {
        View {
            kind: ec_model::Workload::Machine,
            instance: InstanceId::new(uuid::Uuid::from_u128(number)),
            name: Some(name.to_owned()),
            node: Some(NodeId::new(uuid::Uuid::from_u128(100 - number))),
            node_alive: true,
            state: state.to_string(),
            ip: None,
            project: Some(if number < 3 { "p" } else { "q" }.to_owned()),
            labels: role
                .map(|role| ("role".to_owned(), role.to_owned()))
                .into_iter()
                .collect::<BTreeMap<_, _>>(),
            group: None,
            created_at: Some(Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_secs(i64::from(number != 2))),
            reason: None,
            resources: BTreeMap::new(),
            since: None,
            volumes_failed: false,
            doing: None,
            request_id: None,
            record: None,
            request: None,
            status: None,
        }
    }

    fn all() -> Vec<View> {
        vec![
            view(1, "c", State::Active, Some("web")),
            view(2, "b", State::Error, Some("db")),
            view(3, "a", State::Active, None),
            view(4, "d", State::Stopped, Some("web")),
        ]
    }

    fn names(page: &Page<View>) -> String {
        page.views.iter().filter_map(|view| view.name.as_deref()).collect()
    }

    #[test]
    fn who_is_forgotten_is_not_whoever_bears_the_name_now() {
        let [old, new, other] = [1, 2, 3].map(|number| NodeId::new(uuid::Uuid::from_u128(number)));
        let named =
            |all: &[(NodeId, &str)]| all.iter().map(|(node, name)| (*node, (*name).to_owned())).collect();
        let nodes = NodeNames {
            alive: named(&[(new, "h1"), (other, "h2")]),
            recorded: named(&[(old, "h1"), (new, "h1"), (other, "h2")]),
        };
        assert_eq!(nodes.node("h1").unwrap(), new);
        assert_eq!(nodes.gone_first("h1").unwrap(), old);
        assert_eq!(nodes.gone_first("h2").unwrap(), other, "which is told to be alive");
        assert!(matches!(nodes.gone_first("h3"), Err(CloudError::NotFound(_))));
        assert_eq!(nodes.gone(), ["h1"].into());
        let two = NodeNames { recorded: named(&[(old, "h1"), (new, "h1")]), ..NodeNames::default() };
        assert!(matches!(two.gone_first("h1"), Err(CloudError::Invalid(_))));
    }

    #[test]
    fn a_filter_takes_what_all_that_it_says_holds_of() {
        let took = |filter: Filter| names(&page(all(), &filter, SortBy::Name, None, None).unwrap());
        let (none, whose) = (Filter::default, Whose::default);
        let of = |whose| Filter { whose, ..none() };
        assert_eq!(took(none()), "abcd");
        assert_eq!(took(Filter { states: vec![State::Active, State::Error], ..none() }), "abc");
        assert_eq!(took(of(Whose { node: Some(NodeId::new(uuid::Uuid::from_u128(98))), ..whose() })), "b");
        assert_eq!(took(of(Whose { project: Some("q".into()), ..whose() })), "ad");
        let labels = |texts: &[&str]| texts.iter().map(|text| label_selector(text).unwrap()).collect();
        assert_eq!(took(of(Whose { labels: labels(&["role"]), ..whose() })), "bcd");
        assert_eq!(took(of(Whose { labels: labels(&["role=web"]), ..whose() })), "cd");
        assert_eq!(took(of(Whose { labels: labels(&["role=web", "role=db"]), ..whose() })), "");
        let web = Whose { labels: labels(&["role=web"]), ..whose() };
        let web = Filter { whose: web, states: vec![State::Active] };
        assert_eq!(took(web), "c");
    }

    #[test]
    fn a_filter_of_volumes_takes_what_all_that_it_says_holds_of() {
        let holder = InstanceId::new(uuid::Uuid::from_u128(9));
        let has = Holder { instance: holder, device: "vdb".into(), doing: None, reason: None };
        let mut all = [
            told(view(1, "a", State::Active, None), None, None),
            told(view(2, "b", State::Active, Some("db")), None, Some(has)),
            told(view(3, "c", State::Error, None), None, None),
            told(view(4, "d", State::Active, None), None, None),
        ];
        (all[3].snapshot, all[3].copy_of) = (true, Some(holder));
        let took = |filter: VolumeFilter| {
            let names = all.iter().filter(|view| filter.takes(view)).filter_map(|view| view.name.as_deref());
            names.collect::<String>()
        };
        let (none, whose) = (VolumeFilter::default, Whose::default);
        let of = |whose| VolumeFilter { whose, ..none() };
        assert_eq!(took(none()), "abcd");
        let statuses = vec!["available".to_owned(), "error".to_owned()];
        assert_eq!(took(VolumeFilter { statuses, ..none() }), "acd");
        let node = Some(NodeId::new(uuid::Uuid::from_u128(98)));
        assert_eq!(took(of(Whose { node, ..whose() })), "b");
        assert_eq!(took(VolumeFilter { instance: Some(holder), ..none() }), "bd");
        assert_eq!(took(of(Whose { project: Some("q".into()), ..whose() })), "cd");
        let labels = vec![label_selector("role=db").unwrap()];
        assert_eq!(took(of(Whose { labels, ..whose() })), "b");
        assert_eq!(took(of(Whose { project: Some("q".into()), node, ..whose() })), "");
        assert_eq!(took(VolumeFilter { snapshots: true, ..none() }), "d");
    }

    #[test]
    fn a_list_of_volumes_has_pages_in_each_of_its_orders() {
        let all = || {
            let of = |number: u32, name, state, size| VolumeView {
                size_gb: size,
                created_at: jiff::Timestamp::from_second(10 - i64::from(number)).ok(),
                ..told(view(u128::from(number), name, state, None), None, None)
            };
            vec![
                of(1, "a", State::Error, Some(2)),
                of(2, "b", State::Active, Some(9)),
                of(3, "c", State::Active, None),
                of(4, "d", State::Active, Some(2)),
            ]
        };
        let id = |number: u128| InstanceId::new(uuid::Uuid::from_u128(number));
        let of = |filter: &VolumeFilter, by, after, limit| {
            let page = page_of_volumes(all(), filter, by, after, limit)?;
            let names = page.views.iter().filter_map(|view| view.name.as_deref());
            Ok::<_, CloudError>((names.collect::<String>(), page.more))
        };
        let any = VolumeFilter::default();
        for (by, order) in [
            (SortVolumesBy::Name, "abcd"),
            (SortVolumesBy::Status, "bcda"),
            (SortVolumesBy::Size, "badc"),
            (SortVolumesBy::Created, "dcba"),
        ] {
            assert_eq!(of(&any, by, None, None).unwrap(), (order.to_owned(), 0), "{by:?}");
        }
        assert_eq!(of(&any, SortVolumesBy::Size, None, Some(3)).unwrap(), ("bad".to_owned(), 1));
        assert_eq!(of(&any, SortVolumesBy::Size, Some(id(4)), Some(3)).unwrap(), ("c".to_owned(), 0));
        // A page goes on behind one that the filter takes no more.
        let there = VolumeFilter { statuses: vec!["available".to_owned()], ..VolumeFilter::default() };
        assert_eq!(of(&there, SortVolumesBy::Name, Some(id(1)), Some(1)).unwrap(), ("b".to_owned(), 2));
        let error = of(&any, SortVolumesBy::Name, Some(id(7)), None).unwrap_err().to_string();
        assert!(error.starts_with("volume ") && error.contains("begin with the first page"), "{error}");
    }

    fn node(number: u128) -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(number))
    }

    fn called(all: &[(NodeId, &str)]) -> BTreeSet<(NodeId, String)> {
        all.iter().map(|(node, name)| (*node, (*name).to_owned())).collect()
    }

    #[test]
    fn a_node_is_meant_by_its_name_or_else_by_a_beginning_that_no_other_has() {
        let (a, b, c) = (node(0xaaaa_1111 << 96), node(0xaaaa_2222 << 96), node(0xbbbb_0000 << 96));
        // One was called otherwise before, and another bears what may be a beginning.
        let alive = called(&[(a, "host1"), (b, "bbbb")]);
        let all = NodeNames { alive, recorded: called(&[(a, "old"), (b, "bbbb"), (c, "host2")]) };
        for (text, meant) in [
            ("host1", a),
            ("old", a),
            ("aaaa1111", a),
            ("AAAA1", a),
            ("aaaa2", b),
            ("bbbb", b),
            ("bbbb0", c),
            ("bbbb0000-0000", c),
        ] {
            assert_eq!(all.node(text).unwrap(), meant, "{text}");
        }
        assert!(matches!(all.node("aaaa"), Err(CloudError::Invalid(_))));
        for text in ["aaa", "cccc", "HOST1", ""] {
            assert!(matches!(all.node(text), Err(CloudError::NotFound(_))), "{text}");
        }
        assert_eq!(all.all().into_iter().collect::<Vec<_>>(), ["bbbb", "host1", "host2", "old"]);
    }

    #[test]
    fn a_name_means_who_lives_and_not_who_bore_it_before() {
        let (dead, revoked, alive, twin) = (node(1), node(2), node(3), node(4));
        let mut all = NodeNames {
            alive: called(&[(alive, "host1")]),
            recorded: called(&[(dead, "host1"), (revoked, "host1"), (alive, "host1"), (dead, "host2")]),
        };
        assert_eq!(all.node("host1").unwrap(), alive);
        assert!(all.means("host1", alive) && !all.means("host1", dead));
        // With nobody alive it is who is left.
        assert_eq!(all.node("host2").unwrap(), dead);
        all.alive = called(&[(alive, "host1"), (twin, "host1")]);
        let several = all.node("host1").unwrap_err().to_string();
        let wanted = format!("called `host1`, {alive}, {twin}: give the whole uuid of one");
        assert!(several.ends_with(&wanted), "{several}");
        all.alive.clear();
        let several = all.node("host1").unwrap_err().to_string();
        assert!([dead, revoked, alive].iter().all(|node| several.contains(&node.to_string())), "{several}");
    }

    #[test]
    fn every_order_is_one_that_equals_have_a_place_in() {
        let order = |by| names(&page(all(), &Filter::default(), by, None, None).unwrap());
        assert_eq!(order(SortBy::Node), "dabc");
        assert_eq!(order(SortBy::Name), "abcd");
        assert_eq!(order(SortBy::State), "acbd");
        assert_eq!(order(SortBy::Ip), "abcd");
        assert_eq!(order(SortBy::Project), "bcad");
        assert_eq!(order(SortBy::Created), "bacd");
        let mut some = all();
        some[3].ip = Some("10.0.0.2".parse().unwrap());
        some[2].ip = Some("10.0.0.10".parse().unwrap());
        sort(&mut some, SortBy::Ip);
        assert_eq!(names(&Page { views: some, more: 0 }), "bcda");
    }

    #[test]
    fn pages_meet_without_a_gap_also_where_the_last_one_changed() {
        let at = |after: Option<u128>, limit| {
            let after = after.map(|number| InstanceId::new(uuid::Uuid::from_u128(number)));
            page(
                all(),
                &Filter {
                    whose: Whose { project: Some("q".into()), ..Whose::default() },
                    ..Filter::default()
                },
                SortBy::Name,
                after,
                limit,
            )
        };
        let first = at(None, Some(1)).unwrap();
        assert_eq!((names(&first).as_str(), first.more), ("a", 1));
        let second = at(Some(3), Some(1)).unwrap();
        assert_eq!((names(&second).as_str(), second.more), ("d", 0));
        // One that the filter takes no more still has its place.
        assert_eq!(names(&at(Some(2), None).unwrap()), "d");
        assert_eq!(names(&at(Some(4), Some(9)).unwrap()), "");
        assert_eq!((names(&at(None, Some(0)).unwrap()), at(None, Some(0)).unwrap().more), (String::new(), 2));
        assert!(matches!(at(Some(9), None), Err(CloudError::Refused(_))));
    }
}
