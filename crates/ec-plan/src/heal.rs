//! What an etcd that lost it is told again of an instance, by what its node holds.
//!
//! The request that is made of it finds everything done: nothing that runs is started, ended, made anew or given another
//! size by it. So a wish that was under way when etcd lost it is left out, and that is told; a user may wish it again. But a volume is
//! still to grow, which does nothing where it has grown.

use ec_model::{
    AccessWish, Assigned, Desired, Doc, Edition, Extent, Held, Instance, NodeId, Request, Rescue, Resize,
    ResourceQuery, Resources, Size, Spec, State, Status, Workload,
};

/// What is to be written.
#[derive(Debug, Clone)]
pub struct Brought {
    /// What is wanted of it.
    pub record: Doc<Instance>,
    /// The same for its node.
    pub request: Doc<Request>,
    /// What is otherwise than it was, in sentences.
    pub notes: Vec<String>,
}

/// What is to be written of an instance that this is held of, whose node tells this of it, and of which this is recorded.
///
/// # Errors
/// Why it is left as it is.
pub fn brought(
    held: &Held,
    status: Option<&Status>,
    recorded: Option<&Doc<Instance>>,
) -> Result<Brought, String> {
    let unreadable = |error| format!("what its node kept of it cannot be read: {error}");
    let mut request = held.intent.request().map_err(unreadable)?;
    let mut kept = held.intent.record().map_err(unreadable)?;
    let edition = Edition::of(&request.record);
    let named = kept.as_ref().map_or(held.instance, |kept| kept.record.instance);
    if request.record.instance != held.instance || named != held.instance {
        return Err("what its node kept of it speaks of another instance".to_owned());
    }
    if request.record.desired != Desired::Active {
        return Err("its user destroyed it".to_owned());
    }
    let status = status.filter(|status| status.state == State::Unclaimed);
    let told = status.map(|status| Edition { epoch: status.epoch, generation: status.observed_generation });
    let Some(status) = status.filter(|_| told == Some(edition)) else {
        return Err("its node does not tell of it as UNCLAIMED now, or is about to tell it anew".to_owned());
    };
    if let Some(Assigned { node, epoch }) = recorded.and_then(|recorded| recorded.record.assigned)
        && (epoch > edition.epoch || node != held.node && epoch >= edition.epoch)
    {
        return Err(format!("it is recorded on node {node}, by a placement that is not older than this one"));
    }
    let mut notes = Notes::default();
    let heard = Heard::of(&request.record, kept.as_ref().map(|kept| &kept.record));
    let here = Some(Assigned { node: held.node, epoch: edition.epoch });
    // Changed after its node heard of it last, where only its request was lost.
    let newer = recorded.filter(|recorded| {
        let since = kept.as_ref().map_or(0, |kept| kept.record.generation);
        recorded.record.assigned == here && recorded.record.generation >= since
    });
    let record = newer.cloned().or_else(|| kept.take()).or_else(|| recorded.cloned());
    let mut record = record.unwrap_or_else(|| {
        notes.add(NOT_KNOWN);
        Doc::new(of_request(&request.record))
    });
    let known = recorded.map_or(0, |recorded| recorded.record.generation);
    let generation = record.record.generation.max(edition.generation).max(known).saturating_add(1);

    let (wanted, order) = (&mut record.record, &mut request.record);
    (wanted.generation, wanted.assigned) = (generation, here);
    // As it was told last, and so carried out.
    (wanted.power.generation, wanted.power.anew) = (status.power_generation, false);
    leave_unheard(heard, wanted, &mut notes);
    undo_rebuild(held, wanted, order, &mut notes);
    keep_rescue(held, wanted, order, &mut notes);
    undo_resize(held, wanted, order, &mut notes);
    if wanted.spec.user_data_bytes != held.user_data_bytes {
        notes.add("its user-data is what its node has of it");
        wanted.spec.user_data_bytes = held.user_data_bytes;
    }
    // Whoever wished to look at it does not wait any more.
    let answered = status.access.as_ref();
    order.access =
        answered.map(|was| AccessWish { kind: was.kind, generation: was.generation, request_id: None });
    order.generation = generation;
    (order.power, order.restart) = (wanted.power.clone(), wanted.restart);
    (order.project, order.user) = (wanted.project.clone(), wanted.user.clone());
    order.volumes.clone_from(&wanted.volumes);
    (order.name, order.spec) = (wanted.name.clone(), Some(wanted.spec.clone()));
    Ok(Brought { record, request, notes: notes.0 })
}

/// What is to be written of an instance that is asked for on a node, and of which no record is there; its place in a `group` stayed.
pub fn made_of_request(mut request: Doc<Request>, node: NodeId, group: Option<String>) -> Brought {
    let generation = request.record.generation.saturating_add(1);
    let not_known = if group.is_some() { NOT_KNOWN_OF_MEMBER } else { NOT_KNOWN };
    let mut record = Instance { group, ..of_request(&request.record) };
    record.assigned = Some(Assigned { node, epoch: request.record.epoch });
    (record.generation, request.record.generation) = (generation, generation);
    Brought { record: Doc::new(record), request, notes: vec![not_known.to_owned()] }
}

const NOT_KNOWN: &str = "its labels, its group and whether it was locked are not known";
const NOT_KNOWN_OF_MEMBER: &str = "its labels and whether it was locked are not known";

/// What is otherwise than it was, each once.
#[derive(Default)]
struct Notes(Vec<String>);

impl Notes {
    fn add(&mut self, note: &str) {
        if !self.0.iter().any(|noted| noted == note) {
            self.0.push(note.to_owned());
        }
    }
}

const NO_NEW_DISK: &str = "a new disk was asked for and not made: it keeps the one that it has";
const NO_NEW_SIZE: &str = "another size was asked for and not given: it stays as large as it is";

/// What its node heard of last of what is done by wishes, which stand in the request alone.
struct Heard {
    spec: Option<Spec>,
    /// What it was before its size of then, where that is known.
    before: Option<Extent>,
}

impl Heard {
    fn of(request: &Request, kept: Option<&Instance>) -> Self {
        let spec = request.spec.clone();
        // The record may have been read later than the request.
        let is_of_then =
            |kept: &&Instance| Some(&kept.spec.resources) == spec.as_ref().map(|spec| &spec.resources);
        let before = kept.filter(is_of_then).and_then(|kept| kept.before.clone());
        Self { spec, before }
    }
}

/// The record may tell of a wish whose request was lost before its node heard of it: that is left out like one that was not
/// carried out yet, or the record would tell of a disk or a size that the guest never had.
fn leave_unheard(heard: Heard, wanted: &mut Instance, notes: &mut Notes) {
    let Some(spec) = heard.spec else { return };
    if wanted.spec.image != spec.image {
        (wanted.spec.image, wanted.made_of) = (spec.image, None);
        notes.add(NO_NEW_DISK);
    }
    if wanted.spec.resources != spec.resources {
        (wanted.spec.query, wanted.spec.resources) = (spec.query, spec.resources);
        wanted.before = heard.before;
        notes.add(NO_NEW_SIZE);
    }
}

impl Brought {
    /// The same without a name, since that is somebody else's by now.
    pub fn without_name(&mut self, by: &str) {
        let name = self.record.record.name.take().unwrap_or_default();
        self.request.record.name = None;
        self.notes.push(format!(
            "its name `{name}` is that of {by} by now, so it has none: `eschedule rename` gives it another"
        ));
    }

    /// Whether no record tells in which group it is.
    pub fn may_be_in_a_group(&self) -> bool {
        self.notes.iter().any(|note| note == NOT_KNOWN)
    }

    /// The same in this group, where its place stayed when its record went.
    pub fn in_group(&mut self, group: String) {
        self.record.record.group = Some(group);
        for note in self.notes.iter_mut().filter(|note| *note == NOT_KNOWN) {
            NOT_KNOWN_OF_MEMBER.clone_into(note);
        }
    }

    /// The same outside of its group.
    pub fn without_group(&mut self, why: &str) {
        let group = self.record.record.group.take().unwrap_or_default();
        self.notes.push(format!("it is not in its group `{group}` any more: {why}"));
    }

    /// The same without user-data, which its guest has all the same.
    pub fn without_user_data(&mut self) {
        self.record.record.spec.user_data_bytes = None;
        if let Some(spec) = &mut self.request.record.spec {
            spec.user_data_bytes = None;
        }
        self.notes.push("its user-data is not to be had".to_owned());
    }
}

/// Of an instance whose record its node never saw.
fn of_request(request: &Request) -> Instance {
    let nothing = || Spec {
        query: String::new(),
        resources: Resources::new(),
        image: ec_model::ImageRef::default(),
        keys: Vec::new(),
        metadata: std::collections::BTreeMap::new(),
        user_data_bytes: None,
        token_required: false,
        snapshot: false,
    };
    Instance {
        instance: request.instance,
        kind: request.kind,
        volumes: request.volumes.clone(),
        attached: None,
        made_of: None,
        project: request.project.clone(),
        user: request.user.clone(),
        name: request.name.clone(),
        labels: std::collections::BTreeMap::new(),
        group: None,
        spec: request.spec.clone().unwrap_or_else(nothing),
        power: request.power.clone(),
        restart: request.restart,
        before: None,
        locked: None,
        request_id: None,
        assigned: None,
        generation: request.generation,
        created_at: request.created_at,
    }
}

/// A new disk that was not made is not made now: what the guest wrote since would go with the old one.
fn undo_rebuild(held: &Held, wanted: &mut Instance, order: &mut Request, notes: &mut Notes) {
    let done = held.rebuilt.as_ref().map(|rebuilt| rebuilt.wished_at);
    let Some(wish) = order.rebuild.take_if(|wish| Some(wish.wished_at) > done) else { return };
    if let Some(before) = wish.before {
        (wanted.spec.image, wanted.made_of) = (before, None);
    }
    notes.add(NO_NEW_DISK);
}

/// It goes on booting from the disk that it boots from.
fn keep_rescue(held: &Held, wanted: &Instance, order: &mut Request, notes: &mut Notes) {
    let noted = held.rescued.as_ref().map(|rescued| rescued.wished_at);
    let in_force = held.rescued.as_ref().filter(|rescued| rescued.failed.is_none());
    if order.rescue.take_if(|wish| Some(wish.wished_at) != noted).is_some() && in_force.is_none() {
        notes.add("a rescue was asked for and not begun: it boots from its own disk");
    }
    if let Some(rescued) = in_force.filter(|_| order.rescue.is_none()) {
        // Made of whatever image: that disk is there.
        order.rescue = Some(Rescue { wished_at: rescued.wished_at, image: wanted.spec.image.clone() });
        notes.add("its rescue was to end or to begin anew, and goes on: `eschedule unrescue` ends it");
    }
}

/// It stays as large as it is.
///
/// A volume is still to grow: its node may have made it larger and not noted that yet, all of it is claimed, and growing it to
/// a size that it has does nothing.
fn undo_resize(held: &Held, wanted: &mut Instance, order: &mut Request, notes: &mut Notes) {
    if order.kind == Workload::Volume {
        return;
    }
    let noted = held.resized.as_ref().map(|resized| resized.wished_at);
    // Made as large as was claimed for a wish of which its node had not heard: it is so, and nobody noted a size.
    let is_made_so = noted.is_none()
        && !held.resources.is_empty()
        && Size::of(&held.resources) != Size::of(&wanted.spec.resources);
    if order.resize.map(|wish| wish.wished_at) == noted && !is_made_so {
        return;
    }
    order.resize = noted.map(|wished_at| Resize { wished_at });
    let is = Size::of(&held.resources);
    let before = wanted.before.take().filter(|before| Size::of(&before.resources) == is);
    match before {
        Some(before) => (wanted.spec.query, wanted.spec.resources) = (before.query, before.resources),
        None => {
            for class in ["VCPU", "MEMORY_MB", "DISK_GB"] {
                let Some(amount) = held.resources.get(class).copied() else { continue };
                if wanted.spec.resources.insert(class.to_owned(), amount) == Some(amount) {
                    continue;
                }
                // In the group of the query that asks for it, so that it is not asked for twice.
                let query =
                    ResourceQuery::parse(&wanted.spec.query).and_then(|query| query.with(class, amount));
                if let Ok(query) = query {
                    wanted.spec.query = query.text().to_owned();
                }
            }
        }
    }
    notes.add(NO_NEW_SIZE);
}

#[cfg(test)]
mod tests;
