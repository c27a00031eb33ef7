//! What is asked for, checked before anything is asked or written: the room, and the guest that shall have it.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

use ec_model::{
    Alive, Blob, ImageRef, Instance, InstanceId, NodeId, Record, Request, ResourceQuery, Restart, Spec,
    Workload, decode,
    input::{LABELS_MAX, METADATA_MAX},
};
use ec_placement_client::{Candidate, DISABLED};
use ec_plan::choice::{Choice, Offer, Order, Strategy, choose, fullness};

use crate::{
    Cloud, CloudError, CloudResult, Joining, Naming, schedule::Looked, source::Source, volume::bootable,
};

/// So many candidates are asked for, then so many, then all: most often the first of a few will do, and all of
/// 5,000 are megabytes.
const LIMITS: [Option<usize>; 3] = [Some(16), Some(256), None];

/// Which tree a candidate must be of (Placement API, 1.31 for the group without a suffix).
const IN_TREE: &str = "in_tree";

const DISK: &str = "DISK_GB";

/// What the provider of the host itself must have, or must not (Placement API, 1.35).
pub(crate) const ROOT_REQUIRED: &str = "root_required";

/// What a guest shall be, beside its resources; checked already. Or a volume, of which most says nothing.
#[derive(Debug, Clone, Default)]
pub struct Guest {
    /// What kind of workload it is.
    pub kind: Workload,
    /// What it shall be called.
    pub naming: Naming,
    /// Given to it byte for byte.
    pub user_data: Option<Blob>,
    /// Public keys in OpenSSH's form.
    pub keys: Vec<String>,
    /// What its disk is made from; none where that is nothing.
    pub image: ImageRef,
    /// The volume that it boots from in the place of a disk of its own.
    pub boot: Option<InstanceId>,
    /// Volumes that it has from its first start besides, where they lie on the node that it goes to.
    pub volumes: Vec<InstanceId>,
    /// Whether metadata is given only with a token.
    pub token_required: bool,
    /// Whether it is a volume that stays as it is made.
    pub snapshot: bool,
    /// What its user tells it apart by.
    pub labels: BTreeMap<String, String>,
    /// What it is told of itself in its user's words.
    pub metadata: BTreeMap<String, String>,
    /// What follows when it ends without anybody's wish.
    pub restart: Restart,
}

impl Guest {
    /// Whether it is to have some from its first start.
    pub(crate) fn has_volumes(&self) -> bool {
        self.boot.is_some() || !self.volumes.is_empty()
    }
}

/// Room that is asked for, checked before anything is asked.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// As it was asked for, with the disk of a copy.
    pub(crate) query: Cow<'a, ResourceQuery>,
    /// The same, of the nodes that may be.
    pub(crate) plain: ResourceQuery,
    /// The same, without nodes that are marked as not to be used.
    pub(crate) asked: ResourceQuery,
    /// The only node that may be.
    pub(crate) node: Option<NodeId>,
    /// That node cannot be asked for by itself.
    among_all: bool,
    /// How many living nodes may be tried.
    pub(crate) limit: usize,
    /// Which of them first, where placement's order is not what is wanted, and for an instance of which name.
    strategy: Option<(Strategy, Option<String>)>,
    /// What it shall be a member of.
    pub(crate) group: Option<Joining>,
    /// The format of the request that is written then: whose agent does not read it is passed over.
    pub(crate) format: u32,
}

impl<'a> Ask<'a> {
    /// Checks that a virtual machine can be made of it.
    ///
    /// # Errors
    /// [`CloudError::Invalid`] with what is wrong in the query.
    pub fn new(query: &'a ResourceQuery) -> CloudResult<Self> {
        Self::needing(query, &[("VCPU", 1), ("MEMORY_MB", 256)], "a virtual machine")
    }

    /// Checks that a volume can be made of it, on that node where one is named.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_volume(query: &'a ResourceQuery, node: Option<NodeId>) -> CloudResult<Self> {
        let ask = Self::needing(query, &[(DISK, 1)], "a volume")?;
        match node {
            Some(node) => ask.on(node),
            None => Ok(ask),
        }
    }

    fn needing(query: &'a ResourceQuery, needs: &[(&str, u64)], what: &str) -> CloudResult<Self> {
        let (plain, asked) = (query.clone(), unmarked(query));
        let limit = limit_of(query, needs, what)?;
        Ok(Self {
            query: Cow::Borrowed(query),
            plain,
            asked,
            node: None,
            among_all: false,
            limit,
            strategy: None,
            group: None,
            format: 1,
        })
    }

    /// The same, tried in an order of ours, for an instance of that name. Then all nodes with room are looked at.
    pub fn by(self, strategy: Strategy, name: Option<&str>) -> Self {
        Self { strategy: Some((strategy, name.map(str::to_owned))), ..self }
    }

    /// The same as a member of a group: where its other members let it, or where they are rather than elsewhere.
    pub fn within(self, group: Joining) -> Self {
        Self { group: Some(group), ..self }
    }

    /// The same for an instance made from that image, which not every agent may understand.
    pub fn of(self, image: &ImageRef) -> Self {
        Self { format: image.format(), ..self }
    }

    /// The same where what it is made of lies, where only one node can do that, and with room for all of it.
    ///
    /// # Errors
    /// There is nothing of that, or it is larger, or nothing tells how large it is, or another node is asked for.
    pub async fn beside(self, cloud: &Cloud, image: &ImageRef) -> CloudResult<Self> {
        let Some(source) = Source::of(cloud, image).await? else { return Ok(self) };
        let node = self.node.unwrap_or(source.node);
        source.is_on(node)?;
        let query = match source.room(&self.query)? {
            Some(query) => Cow::Owned(query),
            None => self.query.clone(),
        };
        Self { query, ..self }.on(node)
    }

    /// The same where the volume lies that it is to boot from, where there is one, of whose agent that is understood.
    ///
    /// # Errors
    /// Nobody can boot from it, or another node is asked for.
    pub async fn on_volume(self, cloud: &Cloud, volume: Option<InstanceId>) -> CloudResult<Self> {
        let Some(volume) = volume else { return Ok(self) };
        if self.query.total().contains_key(DISK) {
            let why =
                "an instance that boots from a volume has no disk of its own: leave DISK_GB out of its query";
            return Err(CloudError::Invalid(why.to_owned()));
        }
        let lies = bootable(cloud, volume).await?;
        match self.node {
            Some(node) if node != lies => Err(CloudError::Refused(format!(
                "volume {volume} lies with node {lies}, and instances boot from it there only: on storage that both \
                 nodes share, `eschedule volume move` brings it to the other"
            ))),
            Some(_) => Ok(self),
            None => self.on(lies),
        }
        .map(|ask| Self { format: Request::FORMAT, ..ask })
    }

    /// The same on one node only. The instance's own query stays as it is: what is placed again may go elsewhere.
    ///
    /// # Errors
    /// [`CloudError::Invalid`] where the query names another tree itself.
    pub fn on(self, node: NodeId) -> CloudResult<Self> {
        let plain = match self.query.pairs().iter().find(|(key, _)| key == IN_TREE) {
            None => self.query.also(IN_TREE, &node.to_string()),
            Some((_, tree)) if tree.parse::<NodeId>().is_ok_and(|tree| tree == node) => {
                self.query.clone().into_owned()
            }
            Some((_, tree)) => {
                let why = format!("it is to be on node {node}, and its query has `{IN_TREE}={tree}`");
                return Err(CloudError::Invalid(why));
            }
        };
        Ok(Self { asked: unmarked(&plain), plain, node: Some(node), ..self })
    }

    /// The same as placement understands it, where it is for a node whose disks lie on storage that it shares: what such a candidate
    /// takes is of two trees, or of that of the storage alone.
    pub(crate) async fn on_storage(self, cloud: &Cloud) -> CloudResult<Self> {
        let wanted = self.query.total();
        let (Some(node), true) = (self.node, wanted.contains_key(DISK)) else { return Ok(self) };
        let sign = cloud.store.get(&cloud.keys.alive(node)).await?.0;
        let alive = sign.and_then(|sign| decode::<Alive>(&sign.value).ok());
        let Some(storage) = alive.and_then(|alive| alive.storage) else { return Ok(self) };
        let is_disk_alone = wanted.len() == 1;
        let plain = match is_disk_alone {
            true => self.query.also(IN_TREE, &storage.provider.to_string()),
            false => self.query.clone().into_owned(),
        };
        Ok(Self { asked: unmarked(&plain), plain, among_all: !is_disk_alone, ..self })
    }

    /// How many candidates are asked for, and asked for next.
    pub(crate) fn limits(&self) -> &'static [Option<usize>] {
        let compares_all = self.among_all
            || self.strategy.is_some()
            || self.group.as_ref().is_some_and(|group| group.group.policy.is_soft());
        if compares_all { &LIMITS[LIMITS.len() - 1..] } else { &LIMITS }
    }

    /// In which order candidates are tried.
    pub(crate) async fn order(&self, cloud: &Cloud) -> CloudResult<Order> {
        let Some((strategy, name)) = &self.strategy else { return Ok(Order::Given) };
        Ok(match strategy {
            Strategy::Spread => Order::Emptiest,
            Strategy::Pack => Order::Fullest,
            Strategy::RoundRobin => Order::After(newest_of(cloud).await?),
            Strategy::Random => Order::Drawn(cloud.host.uuid().to_string()),
            Strategy::Sticky => {
                // Letters' case makes no other name.
                let name = name.as_deref().unwrap_or_default().to_ascii_lowercase();
                Order::Drawn(format!("{}/{name}", cloud.project))
            }
        })
    }

    /// Which of the candidates to try.
    pub(crate) fn choose(&self, looked: &Looked, order: &Order) -> Choice {
        let Looked { found, alive, peers, .. } = looked;
        let wanted = self.query.total();
        let mut amounts: HashMap<(NodeId, &str), (u64, u64)> = HashMap::new();
        for (provider, summary) in &found.summaries {
            for (class, amount) in &summary.resources {
                let of_host = amounts.entry((found.root(*provider), class.as_str())).or_default();
                *of_host = (of_host.0 + amount.used, of_host.1 + amount.capacity);
            }
        }
        // Of what the host shares with others, as far as the candidate takes it.
        let of = |candidate: &Candidate, host: NodeId, class: &str| {
            let shared = candidate.allocations.keys().filter(|provider| found.shares(**provider));
            let providers = [host].into_iter().chain(shared.copied());
            providers
                .filter_map(|provider| amounts.get(&(provider, class)).copied())
                .next()
                .unwrap_or_default()
        };
        let offers = found.candidates.iter().map(|candidate| {
            let mut hosts = looked.hosts(candidate);
            hosts.retain(|host| self.node.is_none_or(|only| only == *host));
            let full = |host: &NodeId| fullness(&wanted, |class| of(candidate, *host, class));
            Offer { fullness: hosts.first().map_or(0, full), hosts }
        });
        let alive = alive.keys().copied().collect();
        choose(&offers.collect::<Vec<_>>(), order, &alive, peers.as_ref(), self.limit)
    }
}

/// Where the project's newest instance went.
async fn newest_of(cloud: &Cloud) -> CloudResult<Option<NodeId>> {
    let pairs = cloud.store.list(&cloud.keys.instances()).await?.pairs;
    let records =
        pairs.iter().filter_map(|pair| Some((pair.create_revision, decode::<Instance>(&pair.value).ok()?)));
    let placed = records.filter(|(_, record)| {
        record.project == cloud.project && record.assigned.is_some() && record.kind.is_machine()
    });
    // By etcd's count: several are made in one second, and callers' clocks differ.
    Ok(placed.max_by_key(|(revision, _)| *revision).and_then(|(_, record)| record.node()))
}

fn unmarked(query: &ResourceQuery) -> ResourceQuery {
    query.also(ROOT_REQUIRED, &format!("!{DISABLED}"))
}

/// What was asked for, checked before anything is written.
pub struct Wanted<'a> {
    pub(crate) ask: Ask<'a>,
    pub(crate) guest: &'a Guest,
}

impl<'a> Wanted<'a> {
    /// Checks that a virtual machine can be made of it.
    ///
    /// # Errors
    /// [`CloudError::Invalid`] with what is wrong.
    pub fn new(ask: Ask<'a>, guest: &'a Guest) -> CloudResult<Self> {
        if guest.metadata.len() > METADATA_MAX {
            let count = guest.metadata.len();
            return Err(CloudError::Invalid(format!(
                "{count} items of metadata are more than {METADATA_MAX}"
            )));
        }
        if guest.labels.len() > LABELS_MAX {
            let count = guest.labels.len();
            return Err(CloudError::Invalid(format!("{count} labels are more than {LABELS_MAX}")));
        }
        let ask = ask.of(&guest.image);
        let is_plain = guest.kind.is_machine() && !guest.has_volumes();
        let format = if is_plain { ask.format } else { Request::FORMAT };
        Ok(Self { ask: Ask { format, ..ask }, guest })
    }

    /// The room that is asked for, of those whose agents understand all that is said of the guest.
    pub fn ask(&self) -> &Ask<'a> {
        &self.ask
    }

    /// The same where what it is made of lies, as placement understands it.
    pub(crate) async fn beside_source(&self, cloud: &Cloud) -> CloudResult<Self> {
        let ask = self.ask.clone().beside(cloud, &self.guest.image).await?;
        let ask = ask.on_volume(cloud, self.guest.boot).await?.on_storage(cloud).await?;
        Ok(Self { ask, guest: self.guest })
    }

    pub(crate) fn spec(&self) -> Spec {
        let Self { ask: Ask { query, .. }, guest } = self;
        Spec {
            query: query.text().to_owned(),
            resources: query.total(),
            image: guest.image.clone(),
            keys: guest.keys.clone(),
            metadata: guest.metadata.clone(),
            user_data_bytes: guest.user_data.as_ref().map(|data| data.0.len() as u64),
            token_required: guest.token_required,
            snapshot: guest.snapshot,
        }
    }
}

/// Checks that a query asks for what is needed. Answers how many living nodes may be tried.
///
/// # Errors
/// [`CloudError::Invalid`] with what is wrong.
fn limit_of(query: &ResourceQuery, needs: &[(&str, u64)], what: &str) -> CloudResult<usize> {
    for (number, (key, _)) in query.pairs().iter().enumerate() {
        // Of any other placement takes one and passes over the rest without a word.
        let may_repeat = key.starts_with("required") || key.starts_with("member_of");
        if !may_repeat && query.pairs().iter().take(number).any(|(other, _)| other == key) {
            return Err(CloudError::Invalid(format!(
                "`{key}` stands twice in the query: give it once, as in `resources=VCPU:1,MEMORY_MB:256`"
            )));
        }
    }
    let total = query.total();
    for (class, example) in needs {
        if total.get(*class).is_none_or(|amount| *amount == 0) {
            return Err(CloudError::Invalid(format!(
                "the query asks for no {class}, which {what} needs: add for example `{class}:{example}`"
            )));
        }
    }
    let limit = query.pairs().iter().find(|(key, _)| key == "limit");
    match limit.map(|(_, value)| (value, value.parse::<usize>())) {
        None => Ok(usize::MAX),
        Some((_, Ok(limit))) if limit > 0 => Ok(limit),
        Some((value, _)) => {
            Err(CloudError::Invalid(format!("limit={value} is not usable: wanted a number from 1 on")))
        }
    }
}
