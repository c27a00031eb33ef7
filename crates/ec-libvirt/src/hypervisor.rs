//! The trait on libvirt: which lane, which scope, which words for the error.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use ec_hypervisor::{
    AddressRoom, Console, DomainSize, DomainSpec, HostInfo, Hypervisor, HypervisorError, HypervisorEvent,
    HypervisorResult, Observed, Printed, Usage, VolumeSource,
};
use ec_model::{Address, Attachment, BaseImage, CopyOf, InstanceId, NodeId};
use tokio::{
    net::UnixStream,
    sync::{Semaphore, broadcast, mpsc, watch},
};
use virt::{domain::Domain, error::ErrorNumber};

use crate::{
    addresses::{self, Agents, Told},
    calls::{Hung, Scope},
    config::LibvirtConfig,
    console,
    copy::{self, Copy, Progress, Turns},
    disk::{Contents, Pool},
    domain::{self, Found, Whose},
    error::{CallError, absent},
    lane::{Lanes, Listener, Notice, locked},
    moving, plugs,
    prepare::{self, Facts},
    protect::Protection,
    reading, sys, terminal, usage, volumes,
    xml::{self, DomainXml, Machine, Mark},
};

/// Hints waiting for a slow receiver; one that lags behind further looks at everything.
const EVENTS: usize = 256;

/// Lanes of each kind. All of them, with their openings, stay below the 20 workers of libvirtd, so that stuck
/// calls of ours leave it able to answer.
const ACTING: usize = 12;
/// Of those that act, so many are kept for what ends guests.
const ENDING: usize = 3;
const LOOKING: usize = 4;
const ASKING_AGENTS: usize = 3;
/// Consoles that may be open at a time; each is a connection and a thread.
const CONSOLES: usize = 8;

/// Copies that are made at a time. Each takes as much of the disks as it can have, and where `qemu-img` makes it one of the lanes
/// that act.
const COPYING: usize = 4;

/// Guests whose memory is saved at a time. Each is written in one call, which takes minutes where there is much of it.
const SAVING: usize = 4;
/// So long one waits for its turn at once; then it is told so, and its user may think better of it between two tries.
const SAVING_WAITS: Duration = Duration::from_secs(2);

/// Between two looks whether a copy is whole, a sixteenth of the time that it took so far, so that it is seen soon after its
/// end; but no less than the first, and no more than the second.
const COPY_LOOKS: [Duration; 2] = [Duration::from_millis(25), Duration::from_secs(1)];

/// The same once it is over, while its guest may stand still for it.
const COPY_OVER: Duration = Duration::from_secs(15);

/// libvirt on this host. Cheap to share behind an `Arc`; connects with the first call.
pub struct LibvirtHypervisor {
    config: Arc<LibvirtConfig>,
    pool: Arc<Pool>,
    /// Starting, destroying, making disks.
    act: Lanes,
    /// Everything that only looks; it also listens to events.
    look: Arc<Lanes>,
    agent: Arc<Lanes>,
    /// Places for consoles that are open.
    consoles: Arc<Semaphore>,
    agents: Arc<Agents>,
    told: Told,
    protection: Arc<Protection>,
    /// The copies that are being made, by for whom: to be told when they are not wanted any more.
    copies: Mutex<HashMap<InstanceId, watch::Sender<bool>>>,
    /// Places for copies under way.
    copying: Arc<Semaphore>,
    /// Places for memory that is being saved.
    saving: Arc<Semaphore>,
    saves: Arc<domain::Saves>,
    turns: Turns,
    facts: OnceLock<Facts>,
    events: broadcast::Sender<HypervisorEvent>,
}

impl LibvirtHypervisor {
    /// A hypervisor of that configuration; the connection comes with the first call.
    ///
    /// Fails where the configuration cannot be told to libvirt.
    pub fn connect(config: LibvirtConfig) -> HypervisorResult<Self> {
        let texts = [Some(&config.uri), Some(&config.network), Some(&config.pool), config.bridge.as_ref()];
        if texts.into_iter().flatten().any(|text| text.is_empty() || text.contains('\0')) {
            return Err(HypervisorError::Failed {
                what: "use the configuration of libvirt".into(),
                detail: "the URI and the names of network, pool and bridge must not be empty".into(),
            });
        }
        let events = broadcast::channel(EVENTS).0;
        let hung = Arc::new(Hung::default());
        let lanes = |count, kept, listener| {
            Lanes::new(&config.uri, config.call_timeout, count, kept, &hung, listener)
        };
        Ok(Self {
            act: lanes(ACTING, ENDING, None),
            look: Arc::new(lanes(LOOKING, 0, Some(listener(events.clone())))),
            agent: Arc::new(lanes(ASKING_AGENTS, 0, None)),
            consoles: Arc::new(Semaphore::new(CONSOLES)),
            agents: Arc::default(),
            told: Told::default(),
            protection: Arc::default(),
            copies: Mutex::default(),
            copying: Arc::new(Semaphore::new(COPYING)),
            saving: Arc::new(Semaphore::new(SAVING)),
            saves: Arc::default(),
            turns: Turns::default(),
            pool: Arc::new(Pool::new(&config.pool, &config.pool_path)),
            config: Arc::new(config),
            facts: OnceLock::new(),
            events,
        })
    }

    /// What libvirt is, without a look at its networks, and without making or starting anything.
    pub async fn probe(&self) -> HypervisorResult<HostInfo> {
        let config = Arc::clone(&self.config);
        let what = "look at libvirt".to_owned();
        let facts =
            self.look.call(what, Scope::Host, move |connect| prepare::survey(connect, &config)).await?;
        Ok(facts.info)
    }

    /// Whether libvirt, where it has the pool, sees the file system there that this program sees.
    pub async fn probe_pool(&self) -> HypervisorResult<()> {
        let pool = Arc::clone(&self.pool);
        let what = format!("look at the pool `{}`", self.config.pool);
        self.look.call(what, Scope::Host, move |connect| pool.survey(connect)).await
    }

    /// The bridge of the configured network, where it has one, without starting it.
    pub async fn probe_network(&self) -> HypervisorResult<Option<String>> {
        let config = Arc::clone(&self.config);
        let what = format!("look at the network `{}`", config.network);
        self.look.call(what, Scope::Host, move |connect| prepare::survey_network(connect, &config)).await
    }

    /// What `prepare` found; done here where nobody has called it.
    async fn facts(&self) -> HypervisorResult<Facts> {
        match self.facts.get() {
            Some(facts) => Ok(facts.clone()),
            None => self.find_facts().await,
        }
    }

    async fn find_facts(&self) -> HypervisorResult<Facts> {
        let (config, pool) = (Arc::clone(&self.config), Arc::clone(&self.pool));
        let what = "prepare libvirt's pool and network".to_owned();
        let prepare = move |connect: &virt::connect::Connect| prepare::prepare(connect, &config, &pool);
        let facts = self.look.call(what, Scope::Host, prepare).await?;
        // Of two at once, both found the same.
        let _ = self.facts.set(facts.clone());
        Ok(facts)
    }

    /// Rules and elements as they shall be, and ports in their bridges.
    async fn guard(&self) -> HypervisorResult<()> {
        self.protection.resolve(&self.config).await;
        self.sync().await?;
        let config = Arc::clone(&self.config);
        let what = "look for guests' ports that are in no bridge".to_owned();
        let fallen = move |connect: &virt::connect::Connect| plugs::fallen(connect, &config);
        match self.look.call(what, Scope::Host, fallen).await {
            Ok(fallen) if fallen.is_empty() => Ok(()),
            // The bridge is guarded by now, and each port has to be.
            Ok(fallen) => {
                plugs::put_back(fallen).await;
                self.sync().await
            }
            Err(error) => {
                tracing::debug!(%error, "whether guests' ports are in their bridges is not known");
                Ok(())
            }
        }
    }

    async fn sync(&self) -> HypervisorResult<()> {
        let (config, protection) = (Arc::clone(&self.config), Arc::clone(&self.protection));
        let what = "put up the packet rules around guests".to_owned();
        self.look.call(what, Scope::Host, move |connect| protection.sync(connect, &config)).await
    }

    /// Makes the copy, unless it is there. A guest's disk may take hours, which one call must not.
    async fn copy(
        &self,
        what: String,
        copy: Copy,
        is_there: impl Future<Output = HypervisorResult<bool>>,
    ) -> HypervisorResult<()> {
        let (owner, (give_up, given_up)) = (copy.owner, watch::channel(false));
        locked(&self.copies).insert(owner, give_up);
        let copied = match is_there.await {
            Ok(true) => Ok(()),
            Ok(false) => self.copy_unless(given_up, what, copy).await,
            Err(error) => Err(error),
        };
        locked(&self.copies).remove(&owner);
        copied
    }

    async fn copy_unless(
        &self,
        mut given_up: watch::Receiver<bool>,
        what: String,
        copy: Copy,
    ) -> HypervisorResult<()> {
        let detail = "it is not wanted any more".to_owned();
        let not_wanted = HypervisorError::NotNow { what: what.clone(), detail };
        let mut place = tokio::select! {
            biased;
            _ = given_up.wait_for(|given_up| *given_up) => return Err(not_wanted),
            place = Arc::clone(&self.copying).acquire_owned() => Some(Arc::new(place.ok())),
        };
        let (node, scope) = (self.config.node, Scope::Instance(copy.owner));
        let (pool, begun, turns) = (Arc::clone(&self.pool), copy.clone(), self.turns.clone());
        // Kept also by a call that is not waited for any more.
        let also = place.clone();
        let begin = move |connect: &virt::connect::Connect| {
            let _place = also;
            copy::begin(connect, node, &pool, &begun, &turns)
        };
        let Some(copying) = self.act.call(what.clone(), scope, begin).await? else { return Ok(()) };
        let (begun, from) = (Instant::now(), copying.from());
        let pause = |took: Duration, is_over: bool| match is_over {
            // Each look waits for an agent that does not answer, and others wait for that.
            true => COPY_OVER,
            false => (took / 16).clamp(COPY_LOOKS[0], COPY_LOOKS[1]),
        };
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause(begun.elapsed(), place.is_none())) => {}
                _ = given_up.wait_for(|given_up| *given_up) => return Err(not_wanted),
            }
            let (pool, copy, copying) = (Arc::clone(&self.pool), copy.clone(), copying.clone());
            let look = move |connect: &virt::connect::Connect| {
                copy::look_after(connect, node, &pool, &copy, &copying)
            };
            let looked = self.act.call(what.clone(), scope, look).await;
            if looked.is_err() {
                // Its guest may stand still for want of room, which there is again.
                let _ = self.events.send(HypervisorEvent::Changed(from));
            }
            match looked? {
                Progress::UnderWay => {}
                // What is waited for still keeps no other guest's disks from being copied.
                Progress::Over => drop(place.take()),
                Progress::Done => return Ok(()),
            }
        }
    }

    /// One call on one domain.
    async fn on_domain(
        &self,
        what: &str,
        call: fn(&virt::connect::Connect, NodeId, InstanceId) -> Result<(), CallError>,
        instance: InstanceId,
    ) -> HypervisorResult<()> {
        self.within(Scope::Instance(instance), what, call, instance).await
    }

    async fn within(
        &self,
        scope: Scope,
        what: &str,
        call: fn(&virt::connect::Connect, NodeId, InstanceId) -> Result<(), CallError>,
        instance: InstanceId,
    ) -> HypervisorResult<()> {
        let node = self.config.node;
        let work = move |connect: &virt::connect::Connect| call(connect, node, instance);
        self.act.call(format!("{what} domain {instance}"), scope, work).await
    }

    /// As large as this, and with the volumes that it has: those are set apart, and may be refused it.
    async fn with_its_volumes(&self, spec: &DomainSpec) -> HypervisorResult<DomainSpec> {
        let (node, pool, spec) = (self.config.node, Arc::clone(&self.pool), spec.clone());
        let what = format!("read the volumes of domain {}", spec.instance);
        let scope = Scope::Instance(spec.instance);
        let work = move |connect: &virt::connect::Connect| {
            let has = volumes::kept(connect, node, &pool, &spec)?;
            Ok(DomainSpec { volumes: has.unwrap_or_else(|| spec.volumes.clone()), ..spec })
        };
        self.look.call(what, scope, work).await
    }

    /// With the volumes that it can have, and the one that it is to boot from in any case.
    async fn with_usable_volumes(&self, spec: &DomainSpec) -> HypervisorResult<DomainSpec> {
        if spec.volumes.iter().all(Attachment::is_root) {
            return Ok(spec.clone());
        }
        let (pool, spec) = (Arc::clone(&self.pool), spec.clone());
        let what = format!("look for the volumes of domain {}", spec.instance);
        let scope = Scope::Instance(spec.instance);
        let work = move |connect: &virt::connect::Connect| {
            let mut usable = Vec::new();
            for has in &spec.volumes {
                if has.is_root() || volumes::is_usable(connect, &pool, spec.instance, has.volume)? {
                    usable.push(has.clone());
                }
            }
            Ok(DomainSpec { volumes: usable, ..spec })
        };
        self.look.call(what, scope, work).await
    }

    fn machine(&self, facts: &Facts, spec: &DomainSpec) -> Result<Machine, String> {
        let (instance, root) = (spec.instance, spec.root());
        let volumes = spec.volumes.iter().filter(|has| !has.is_root());
        Ok(Machine {
            node: self.config.node,
            kvm: facts.kvm,
            maximum_cpu: facts.maximum_cpu,
            translation_cache: facts.translation_cache,
            network: self.config.network.clone(),
            bridge: self.config.bridge.clone(),
            graphics: self.config.graphics,
            disk: xml::utf8(&self.pool.volume_path(root.unwrap_or(instance)))?.to_owned(),
            serial: root.map(|root| root.to_string()),
            rescue: None,
            volumes: volumes.map(|volume| volumes::file(&self.pool, volume)).collect::<Result<_, _>>()?,
            console: xml::utf8(&console::path(&self.config.console_dir, instance))?.to_owned(),
        })
    }

    /// The definition of a domain that is as large as this, and boots from its own disk, or the volume in the place of that.
    fn document(&self, facts: &Facts, spec: &DomainSpec) -> Result<String, CallError> {
        let machine = self.machine(facts, spec);
        machine.and_then(|machine| xml::write(&DomainXml::new(spec, &machine))).map_err(CallError::Refused)
    }
}

/// What is of a domain of ours, but for its disks; nothing where it went meanwhile.
fn seen(domain: &Domain, mark: &Mark, pool: &Pool, instance: InstanceId) -> Result<Observed, CallError> {
    let look = || {
        let Some(state) = domain::run_state(domain, || pool.has_room())? else { return Ok(None) };
        let rescued = domain::is_rescued(domain, mark, state)?;
        Ok(Some(Observed {
            domain: Some(state),
            volume: false,
            successor: false,
            transient: !domain.is_persistent()?,
            rescued,
            volumes: volumes::fingerprint(domain, pool, instance, rescued)?,
            copies: 0,
            foreign: false,
        }))
    };
    let seen = match look() {
        // Between any two questions, too.
        Err(CallError::Libvirt(error)) => absent(Err(error), ErrorNumber::NoDomain)?.flatten(),
        seen => seen?,
    };
    Ok(seen.unwrap_or_default())
}

/// From libvirt's notices to the trait's hints, of others' domains, too: what is ours shows when it is looked at.
fn listener(events: broadcast::Sender<HypervisorEvent>) -> Listener {
    Arc::new(move |notice| {
        // Nobody listening is not an error: events are hints.
        let _ = events.send(match notice {
            Notice::Everything => HypervisorEvent::LookAtAll,
            Notice::Domain(uuid) => HypervisorEvent::Changed(InstanceId::new(uuid)),
        });
    })
}

#[async_trait]
impl Hypervisor for LibvirtHypervisor {
    async fn prepare(&self) -> HypervisorResult<HostInfo> {
        // Always done: pool and network may have gone since.
        let info = self.find_facts().await?.info;
        self.guard().await?;
        Ok(info)
    }

    async fn list(&self) -> HypervisorResult<HashMap<InstanceId, Observed>> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            let mut found: HashMap<InstanceId, Observed> = HashMap::new();
            let mut foreign = HashSet::new();
            for domain in connect.list_all_domains(0)? {
                let Ok(instance) = domain.uuid().map(InstanceId::new) else { continue };
                match domain::whose(&domain, node)? {
                    Whose::Foreign => _ = foreign.insert(instance),
                    Whose::Nobodys => {}
                    Whose::Ours(mark) => {
                        let observed = seen(&domain, &mark, &pool, instance)?;
                        found.extend(observed.domain.map(|_| (instance, observed)));
                    }
                }
            }
            let Contents { mut volumes, successors, copies, handed_over } = pool.contents()?;
            for volume in handed_over {
                match moving::take_in(connect, &pool, volume) {
                    Ok(is_there) => volumes.extend(is_there.then_some(volume)),
                    // It takes nothing of the others, nor of the one that lies in its place: a second one may have come.
                    Err(CallError::Refused(why) | CallError::NotNow(why)) => {
                        tracing::warn!(%volume, why, "a disk that came stays aside");
                        volumes.extend(pool.has_volume(volume)?.then_some(volume));
                    }
                    Err(error) => return Err(error),
                }
            }
            let not_foreign = |instance: &InstanceId| !foreign.contains(instance);
            for instance in volumes {
                let of_it = found.entry(instance).or_default();
                if foreign.contains(&instance) {
                    of_it.foreign = true;
                    continue;
                }
                of_it.volume = true;
                of_it.copies = copies.get(&instance).map_or(0, |disks| CopyOf::fingerprint(disks));
            }
            for instance in successors.into_iter().filter(not_foreign) {
                found.entry(instance).or_default().successor = true;
            }
            Ok(found)
        };
        self.look.call("list the domains".into(), Scope::Host, work).await
    }

    async fn observe(&self, instance: InstanceId) -> HypervisorResult<Observed> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            let volume = pool.has_volume(instance)? || moving::take_in(connect, &pool, instance)?;
            let (successor, copies) = pool.beside(instance)?;
            let copies = if volume { CopyOf::fingerprint(&copies) } else { 0 };
            let mut observed = Observed { volume, successor, copies, ..Observed::default() };
            match domain::find(connect, node, instance)? {
                Found::Ours(domain) => {
                    if let Whose::Ours(mark) = domain::whose(&domain, node)? {
                        let seen = seen(&domain, &mark, &pool, instance)?;
                        observed = Observed { volume, successor, copies, ..seen };
                    }
                }
                Found::Foreign => return Ok(Observed { foreign: volume, ..Observed::default() }),
                Found::Nothing => {}
            }
            Ok(observed)
        };
        self.look.call(format!("observe domain {instance}"), Scope::Instance(instance), work).await
    }

    async fn create_overlay(
        &self,
        instance: InstanceId,
        base: &BaseImage,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        let (pool, base) = (Arc::clone(&self.pool), base.clone());
        let (config, protection) = (Arc::clone(&self.config), Arc::clone(&self.protection));
        let work = move |connect: &virt::connect::Connect| {
            let in_use = match domain::find(connect, config.node, instance)? {
                Found::Ours(domain) => domain.is_active()?,
                Found::Foreign => return Err(domain::foreign(config.node, instance)),
                Found::Nothing => false,
            };
            // Let in while qemu-img works, so that the start need not wait for it.
            std::thread::scope(|scope| {
                let admit = || protection.admit(&config, instance);
                let admitted = std::thread::Builder::new().spawn_scoped(scope, admit);
                let admitted = admitted
                    .map_err(|error| CallError::NotNow(format!("no thread for the packet rules: {error}")))?;
                pool.create_overlay(connect, instance, &base, capacity_bytes, in_use)?;
                admitted.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        };
        self.act.call(format!("create the overlay of {instance}"), Scope::Instance(instance), work).await
    }

    async fn create_successor(
        &self,
        instance: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let what = format!("create a new disk of {instance}");
        let base = match source {
            VolumeSource::Copy(of) => {
                let place = pool.successor_path(instance);
                // It has its name from when it is whole, which may be after the call for it was not waited for any more.
                let is_whole = move |_: &virt::connect::Connect| pool.has_whole_successor(instance);
                let is_whole = self.act.call(what.clone(), Scope::Instance(instance), is_whole);
                let copy = Copy { owner: instance, of: of.clone(), capacity: capacity_bytes, place };
                return self.copy(what, copy, is_whole).await;
            }
            VolumeSource::Image(base) => base.clone(),
            VolumeSource::Empty => {
                return Err(HypervisorError::Failed {
                    what,
                    detail: "nothing boots from an empty disk".into(),
                });
            }
        };
        let work = move |connect: &virt::connect::Connect| {
            if let Found::Foreign = domain::find(connect, node, instance)? {
                return Err(domain::foreign(node, instance));
            }
            copy::give_up(connect, node, &pool, instance)?;
            volumes::refuse_astray(connect, &pool, instance)?;
            pool.create_successor(connect, instance, &base, capacity_bytes)
        };
        self.act.call(what, Scope::Instance(instance), work).await
    }

    async fn replace_overlay(&self, instance: InstanceId) -> HypervisorResult<()> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            volumes::refuse_astray(connect, &pool, instance)?;
            let domain = domain::down(connect, node, instance)?;
            // From the looks to the end no guest is started on the one that goes.
            let _kept = pool.keep_from_writing(instance)?;
            // One that is gone from here may lie with another node, and is there once. For good: what comes back from there was not
            // gone when this was wished.
            if !pool.has_volume(instance)? {
                moving::refuse_second(connect, &pool, instance).map_err(|error| match error {
                    CallError::NotNow(why) => CallError::Refused(why),
                    error => error,
                })?;
            }
            // Who writes it already holds the same kind of lock.
            volumes::refuse_written(&pool, instance)?;
            // A domain has a disk of its own; what has none may be a volume of one.
            if domain.is_none()
                && let Some(user) = volumes::user_of(connect, &pool, instance)?
            {
                let guest = user.instance;
                if user.device.is_some() {
                    return Err(CallError::Refused(format!("the guest {guest} is up with it")));
                }
                if domain::is_saved(&user.domain)? {
                    let why =
                        format!("the memory of the guest {guest} is saved, and goes on with it as it is");
                    return Err(CallError::Refused(why));
                }
            }
            // Where it is refused the disk stays, and the guest goes on with it from its memory.
            pool.replace_overlay(connect, instance, || domain::forget_memory(connect, node, instance))
        };
        self.act.call(format!("replace the overlay of {instance}"), Scope::Instance(instance), work).await
    }

    async fn drop_successor(&self, instance: InstanceId) -> HypervisorResult<()> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            copy::give_up(connect, node, &pool, instance)?;
            pool.drop_successor(connect, instance)
        };
        self.act.call(format!("drop the new overlay of {instance}"), Scope::Instance(instance), work).await
    }

    async fn create_rescue(&self, instance: InstanceId, base: &BaseImage) -> HypervisorResult<()> {
        let (node, pool, base) = (self.config.node, Arc::clone(&self.pool), base.clone());
        let work = move |connect: &virt::connect::Connect| {
            domain::leave_rescue(connect, node, instance)?;
            let has_disk = || {
                let boots_from_volume = match domain::find(connect, node, instance)? {
                    Found::Ours(domain) => volumes::has_root(&domain, &pool, instance)?,
                    Found::Foreign | Found::Nothing => false,
                };
                Ok(boots_from_volume || pool.has_volume(instance)?)
            };
            volumes::refuse_astray(connect, &pool, instance)?;
            pool.create_rescue(connect, instance, &base, has_disk)
        };
        self.act.call(format!("create the rescue disk of {instance}"), Scope::Instance(instance), work).await
    }

    async fn drop_rescue(&self, instance: InstanceId) -> HypervisorResult<()> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            domain::leave_rescue(connect, node, instance)?;
            pool.drop_rescue(connect, instance)
        };
        self.act.call(format!("drop the rescue disk of {instance}"), Scope::Instance(instance), work).await
    }

    async fn define(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        let spec = &self.with_usable_volumes(spec).await?;
        let document = self.document(&self.facts().await?, spec);
        let (node, instance, pool) = (self.config.node, spec.instance, Arc::clone(&self.pool));
        let spec = spec.clone();
        let work = move |connect: &virt::connect::Connect| {
            let found = domain::find(connect, node, instance)?;
            match &found {
                Found::Ours(domain) if domain.is_persistent()? => return Ok(()),
                Found::Foreign => return Err(domain::foreign(node, instance)),
                Found::Ours(domain) => volumes::refuse_other(domain, &pool, &spec)?,
                Found::Nothing => {}
            }
            volumes::refuse_astray(connect, &pool, instance)?;
            volumes::refuse_root(connect, &pool, &spec)?;
            let document = match found {
                Found::Ours(domain) => domain::as_named(&domain, instance, &document?)?,
                Found::Foreign | Found::Nothing => document?,
            };
            connect.define_domain_xml(&document)?;
            Ok(())
        };
        self.act.call(format!("define domain {instance}"), Scope::Instance(instance), work).await
    }

    async fn persist(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        let spec = &self.with_usable_volumes(spec).await?;
        let document = self.document(&self.facts().await?, spec);
        let (node, instance, pool) = (self.config.node, spec.instance, Arc::clone(&self.pool));
        let spec = spec.clone();
        let work = move |connect: &virt::connect::Connect| {
            // Nor is it defined with what was left behind of a disk of its that somebody moved.
            let disks = std::iter::once(instance).chain(spec.volumes.iter().map(|has| has.volume));
            for disk in disks {
                volumes::refuse_astray(connect, &pool, disk)?;
            }
            volumes::kept(connect, node, &pool, &spec)?;
            domain::persist(connect, node, instance, &document?)
        };
        self.act.call(format!("define domain {instance} for good"), Scope::Instance(instance), work).await
    }

    async fn create_volume(
        &self,
        volume: InstanceId,
        source: &VolumeSource,
        capacity_bytes: Option<u64>,
    ) -> HypervisorResult<()> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let what = format!("create volume {volume}");
        let place = pool.volume_path(volume);
        let base = match source {
            VolumeSource::Copy(of) => {
                let copy = Copy { owner: volume, of: of.clone(), capacity: capacity_bytes, place };
                let is_snapshot = !of.beside.is_empty();
                let is_there = move |connect: &virt::connect::Connect| {
                    volumes::refuse_used(connect, &pool, volume)?;
                    if domain::up(connect, node, volume)?.is_some() {
                        return Err(CallError::Refused(
                            "a guest is up from the disk that is to be made".into(),
                        ));
                    }
                    // It has its name from when it is whole.
                    let is_there = moving::refuse_second(connect, &pool, volume)?;
                    if let Some(bytes) = capacity_bytes.filter(|_| is_there && !is_snapshot) {
                        pool.refuse_snapshots(volume).map_err(CallError::for_now)?;
                        pool.grow_what_is_there(connect, volume, bytes)?;
                    }
                    Ok(is_there)
                };
                let is_there = self.look.call(what.clone(), Scope::Instance(volume), is_there);
                return self.copy(what, copy, is_there).await;
            }
            VolumeSource::Image(base) => Some(base.clone()),
            VolumeSource::Empty => None,
        };
        let Some(capacity) = capacity_bytes.or(base.as_ref().map(|base| base.virtual_size)) else {
            return Err(HypervisorError::Failed { what, detail: "an empty disk has to have a size".into() });
        };
        let work = move |connect: &virt::connect::Connect| {
            volumes::refuse_used(connect, &pool, volume)?;
            moving::refuse_second(connect, &pool, volume)?;
            pool.create_volume(connect, volume, base.as_ref(), capacity)
        };
        self.act.call(what, Scope::Instance(volume), work).await
    }

    fn give_up_copy(&self, owner: InstanceId) {
        if let Some(give_up) = locked(&self.copies).get(&owner) {
            give_up.send_replace(true);
        }
    }

    async fn set_volumes(&self, instance: InstanceId, volumes: &[Attachment]) -> HypervisorResult<()> {
        let (node, pool, wanted) = (self.config.node, Arc::clone(&self.pool), volumes.to_vec());
        let work =
            move |connect: &virt::connect::Connect| volumes::set(connect, node, &pool, instance, &wanted);
        self.act.call(format!("set the volumes of domain {instance}"), Scope::Instance(instance), work).await
    }

    async fn volumes_of(&self, instance: InstanceId) -> HypervisorResult<Vec<Attachment>> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| volumes::all_of(connect, node, &pool, instance);
        // Also where another call about it hangs: this one waits for no guest.
        self.look.call(format!("look which volumes domain {instance} has"), Scope::Host, work).await
    }

    async fn has_volume(&self, volume: InstanceId) -> HypervisorResult<bool> {
        let pool = Arc::clone(&self.pool);
        let work = move |connect: &virt::connect::Connect| moving::refuse_second(connect, &pool, volume);
        self.look.call(format!("look for volume {volume}"), Scope::Instance(volume), work).await
    }

    async fn hand_over(&self, volume: InstanceId, node: NodeId) -> HypervisorResult<()> {
        let pool = Arc::clone(&self.pool);
        let work = move |connect: &virt::connect::Connect| moving::hand_over(connect, &pool, volume, node);
        self.act.call(format!("hand over the disk of {volume}"), Scope::Instance(volume), work).await
    }

    async fn disk_bytes(&self, instance: InstanceId) -> HypervisorResult<Option<u64>> {
        let pool = Arc::clone(&self.pool);
        let work = move |_: &virt::connect::Connect| pool.capacity(instance);
        self.look.call(format!("measure the disk of {instance}"), Scope::Instance(instance), work).await
    }

    async fn grow_disk(&self, instance: InstanceId, capacity_bytes: u64) -> HypervisorResult<()> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            let found = domain::find(connect, node, instance)?;
            let is_own = matches!(found, Found::Ours(_));
            let in_use = |found| match found {
                Found::Ours(domain) if domain.is_active()? => {
                    match volumes::device_of(&domain, &pool, instance)? {
                        Some(device) => Ok(Some((domain, device))),
                        // What lies there is not what it writes.
                        None if pool.has_volume(instance)? => {
                            Err(CallError::Refused("the guest is not up with its disk".to_owned()))
                        }
                        None => Ok(None),
                    }
                }
                Found::Ours(_) => Ok(None),
                Found::Foreign => Err(domain::foreign(node, instance)),
                Found::Nothing => match volumes::user_of(connect, &pool, instance)? {
                    // Its memory knows the disk as large as it is.
                    Some(user) if user.device.is_none() && domain::is_saved(&user.domain)? => {
                        let holder = user.instance;
                        Err(CallError::NotNow(format!("the domain {holder} has it, and its memory is saved")))
                    }
                    Some(user) => match user.device.clone() {
                        Some(device) => user.refuse_foreign(node).map(|()| Some((user.domain, device))),
                        None => Ok(None),
                    },
                    None => Ok(None),
                },
            };
            volumes::refuse_astray(connect, &pool, instance)?;
            let running = in_use(found)?;
            let running = running.as_ref().map(|(domain, device)| (domain, device.as_str()));
            let grown = pool.grow(connect, instance, capacity_bytes, running);
            match (grown, running) {
                // It ended, or the disk was taken from it: then it is grown otherwise.
                (Err(_), Some((domain, device)))
                    if !volumes::is_up_with(domain, &pool, instance, device)? =>
                {
                    Err(CallError::NotNow("the guest let go of it meanwhile".to_owned()))
                }
                // Whoever began the copy: QEMU changes no disk under one. A volume waits for its end, which a machine, of which all
                // else would wait, too, does not.
                (Err(_), Some((domain, _))) if !is_own && sys::backup(domain)?.is_some() => {
                    Err(CallError::NotNow("it is being copied, and grows when that is done".to_owned()))
                }
                // QEMU has opened it meanwhile, and lets nobody else write to it.
                (Err(_), None) if in_use(domain::find(connect, node, instance)?)?.is_some() => {
                    Err(CallError::NotNow("a guest has got it meanwhile".to_owned()))
                }
                (grown, _) => grown,
            }
        };
        self.act.call(format!("grow the disk of {instance}"), Scope::Instance(instance), work).await
    }

    async fn redefine(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        let spec = self.with_its_volumes(spec).await?;
        let document = self.document(&self.facts().await?, &spec);
        let (node, instance, pool) = (self.config.node, spec.instance, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            volumes::refuse_astray(connect, &pool, instance)?;
            domain::redefine(connect, node, &spec, &document?)
        };
        self.act.call(format!("define domain {instance} anew"), Scope::Instance(instance), work).await
    }

    async fn grow(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        let spec = self.with_its_volumes(spec).await?;
        let document = self.document(&self.facts().await?, &spec);
        let (node, instance, pool) = (self.config.node, spec.instance, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            volumes::refuse_astray(connect, &pool, instance)?;
            domain::grow(connect, node, &spec, &document?)
        };
        self.act.call(format!("grow domain {instance}"), Scope::Instance(instance), work).await
    }

    async fn start(&self, instance: InstanceId) -> HypervisorResult<()> {
        let (config, protection) = (Arc::clone(&self.config), Arc::clone(&self.protection));
        let pool = Arc::clone(&self.pool);
        let work = move |connect: &virt::connect::Connect| {
            // Of another directory it would be another disk.
            pool.there()?;
            volumes::refuse_stale(connect, config.node, &pool, instance)?;
            protection.admit(&config, instance)?;
            let started = domain::start(connect, config.node, instance);
            let started = prepare::started(connect, &config, started);
            volumes::started(connect, config.node, &pool, instance, started)?;
            protection.admit_running(connect, &config, instance)
        };
        self.act.call(format!("start domain {instance}"), Scope::Instance(instance), work).await
    }

    async fn start_rescue(&self, spec: &DomainSpec) -> HypervisorResult<()> {
        let (facts, instance) = (self.facts().await?, spec.instance);
        let (config, protection) = (Arc::clone(&self.config), Arc::clone(&self.protection));
        let document = self.machine(&facts, spec).and_then(|machine| {
            let rescue = Some(xml::utf8(&self.pool.rescue_path(instance))?.to_owned());
            xml::write(&DomainXml::new(spec, &Machine { rescue, ..machine }))
        });
        let (pool, spec) = (Arc::clone(&self.pool), spec.clone());
        let work = move |connect: &virt::connect::Connect| {
            let document = document.map_err(CallError::Refused)?;
            // Of another directory it would be another disk.
            pool.there()?;
            volumes::refuse_stale_second(connect, config.node, &pool, &spec)?;
            protection.admit(&config, instance)?;
            let started = domain::start_as(connect, config.node, instance, &document);
            let started = prepare::started(connect, &config, started);
            volumes::started(connect, config.node, &pool, instance, started)?;
            protection.admit_running(connect, &config, instance)
        };
        let what = format!("start domain {instance} from its rescue disk");
        self.act.call(what, Scope::Instance(instance), work).await
    }

    async fn resume(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.on_domain("resume", domain::resume, instance).await
    }

    async fn shut_down(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.on_domain("shut down", domain::shut_down, instance).await
    }

    async fn power_off(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.within(Scope::End(instance), "power off", domain::power_off, instance).await
    }

    async fn pause(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.on_domain("pause", domain::pause, instance).await
    }

    async fn save(&self, instance: InstanceId) -> HypervisorResult<()> {
        let what = format!("save domain {instance}");
        let place = Arc::clone(&self.saving).acquire_owned();
        let Ok(place) = tokio::time::timeout(SAVING_WAITS, place).await else {
            let detail = format!("the memory of {SAVING} others is being saved");
            return Err(HypervisorError::NotNow { what, detail });
        };
        let (node, saves) = (self.config.node, Arc::clone(&self.saves));
        let work = move |connect: &virt::connect::Connect| {
            // Kept also by a call that is not waited for any more.
            let _place = place;
            domain::save(connect, node, instance, &saves)
        };
        self.act.call(what, Scope::Instance(instance), work).await
    }

    async fn drop_memory(&self, instance: InstanceId) -> HypervisorResult<()> {
        self.on_domain("delete the saved memory of", domain::forget_memory, instance).await
    }

    async fn size(&self, instance: InstanceId) -> HypervisorResult<Option<DomainSize>> {
        let (node, pool) = (self.config.node, Arc::clone(&self.pool));
        let work = move |connect: &virt::connect::Connect| {
            let Found::Ours(domain) = domain::find(connect, node, instance)? else { return Ok(None) };
            // From memory that was saved it goes on as large as it was then, however it is defined by now.
            let saved = if domain.is_active()? { None } else { domain::saved_document(&domain)? };
            let (vcpus, memory_mb) = match saved.as_deref().and_then(xml::size_of) {
                Some(size) => size,
                None => {
                    let info = domain.info()?;
                    // libvirt counts in KiB.
                    (info.nr_virt_cpu.into(), info.max_mem.div_ceil(1024))
                }
            };
            Ok(Some(DomainSize { vcpus, memory_mb, disk_bytes: pool.capacity(instance)?.unwrap_or(0) }))
        };
        self.look.call(format!("measure domain {instance}"), Scope::Instance(instance), work).await
    }

    async fn destroy(&self, instance: InstanceId) -> HypervisorResult<()> {
        let (config, pool) = (Arc::clone(&self.config), Arc::clone(&self.pool));
        let protection = Arc::clone(&self.protection);
        let log = console::path(&self.config.console_dir, instance);
        let work = move |connect: &virt::connect::Connect| {
            if pool.has_volume(instance)?
                && matches!(domain::find(connect, config.node, instance)?, Found::Nothing)
            {
                volumes::refuse_used(connect, &pool, instance)?;
            }
            copy::give_up(connect, config.node, &pool, instance)?;
            domain::remove(
                connect,
                config.node,
                instance,
                |domain| {
                    volumes::refuse_to_forget(domain, &pool, instance)?;
                    volumes::own_beside(domain, &pool, instance)
                },
                |files| pool.delete_files(connect, &files),
            )?;
            volumes::refuse_written(&pool, instance)?;
            // Not before: whoever writes it may be a guest that libvirt does not know, and sends from its ports.
            protection.dismiss(&config, instance);
            pool.delete_volume(connect, instance)?;
            console::remove(&log)
        };
        self.act.call(format!("destroy domain {instance}"), Scope::End(instance), work).await?;
        self.agents.forget(instance);
        self.told.forget(instance);
        Ok(())
    }

    async fn addresses(
        &self,
        instances: &[InstanceId],
    ) -> HypervisorResult<HashMap<InstanceId, Vec<Address>>> {
        if instances.is_empty() {
            return Ok(HashMap::new());
        }
        let (config, wanted) = (Arc::clone(&self.config), instances.to_vec());
        let what = format!("read the leases of network {}", config.network);
        let work = move |connect: &virt::connect::Connect| addresses::seen_by_host(connect, &config, &wanted);
        let seen = self.look.call(what, Scope::Host, work).await?;
        let nics = if self.config.bridge.is_some() { 2 } else { 1 };
        Ok(addresses::collect(instances, nics, seen, &self.agents, &self.told, |instance| {
            let (lanes, agents) = (Arc::clone(&self.agent), Arc::clone(&self.agents));
            // Ends by the lane's deadlines, and there is one per instance at most.
            tokio::spawn(addresses::ask_agent(lanes, agents, self.config.node, instance, nics));
        }))
    }

    async fn usage(&self, instances: &[InstanceId]) -> HypervisorResult<HashMap<InstanceId, Usage>> {
        if instances.is_empty() {
            return Ok(HashMap::new());
        }
        let wanted: HashSet<InstanceId> = instances.iter().copied().collect();
        let work = move |connect: &virt::connect::Connect| Ok(usage::read(connect, &wanted)?);
        self.look.call("read what guests use".into(), Scope::Host, work).await
    }

    async fn address_room(&self) -> HypervisorResult<Option<AddressRoom>> {
        let config = Arc::clone(&self.config);
        let what = format!("count the addresses of network {}", config.network);
        self.look.call(what, Scope::Host, move |connect| addresses::room(connect, &config)).await
    }

    async fn network_trouble(&self) -> HypervisorResult<Option<String>> {
        let config = Arc::clone(&self.config);
        let what = format!("look at the network `{}`", config.network);
        let look = move |connect: &virt::connect::Connect| match prepare::survey_network(connect, &config) {
            Ok(_) => Ok(None),
            Err(CallError::Refused(why) | CallError::NotNow(why)) => Ok(Some(why)),
            Err(error @ CallError::Libvirt(_)) => Err(error),
        };
        self.look.call(what, Scope::Host, look).await
    }

    async fn bridge(&self) -> HypervisorResult<Option<String>> {
        let config = Arc::clone(&self.config);
        let what = format!("ask for the bridge of network {}", config.network);
        self.look.call(what, Scope::Host, move |connect| prepare::bridge(connect, &config)).await
    }

    async fn protect(&self) -> HypervisorResult<()> {
        self.guard().await
    }

    async fn console_tail(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<String> {
        let log = console::path(&self.config.console_dir, instance);
        let failed =
            |detail| HypervisorError::Failed { what: format!("read the console of {instance}"), detail };
        // A local file, not libvirt: the runtime's own threads will do.
        match tokio::task::spawn_blocking(move || console::tail(&log, max_bytes)).await {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(CallError::Refused(detail) | CallError::NotNow(detail))) => Err(failed(detail)),
            Ok(Err(CallError::Libvirt(error))) => Err(failed(error.message().to_owned())),
            Err(ended) => Err(failed(ended.to_string())),
        }
    }

    async fn open_console(&self, instance: InstanceId) -> HypervisorResult<Console> {
        terminal::open(&self.config, &self.look, &self.consoles, instance).await
    }

    async fn follow_console(&self, instance: InstanceId, max_bytes: usize) -> HypervisorResult<Printed> {
        Ok(console::follow(console::path(&self.config.console_dir, instance), max_bytes))
    }

    async fn open_graphics(&self, instance: InstanceId) -> HypervisorResult<UnixStream> {
        let what = format!("open the screen of {instance}");
        let node = self.config.node;
        let failed =
            |error: std::io::Error| HypervisorError::Failed { what: what.clone(), detail: error.to_string() };
        let (near, far) = UnixStream::pair().map_err(failed)?;
        let far = far.into_std().map_err(failed)?;
        let work =
            move |connect: &virt::connect::Connect| domain::open_graphics(connect, node, instance, &far);
        self.look.call(what, Scope::Instance(instance), work).await?;
        Ok(near)
    }

    async fn read_disk(&self, volume: InstanceId) -> HypervisorResult<mpsc::Receiver<Bytes>> {
        let pool = Arc::clone(&self.pool);
        let open = move |connect: &virt::connect::Connect| reading::open(connect, &pool, volume);
        let what = format!("read the disk of {volume}");
        Ok(reading::begin(self.look.call(what, Scope::Instance(volume), open).await?))
    }

    fn events(&self) -> broadcast::Receiver<HypervisorEvent> {
        self.events.subscribe()
    }
}
