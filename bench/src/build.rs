//! From the request to the running domain, against the bare libvirt calls with the same XML.

use std::{
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use ec_model::{Desired, InstanceId, NodeId};
use ec_tests::Stack;
use virt::{
    connect::Connect,
    domain::{Domain, DomainState},
    enumutil::Enum,
    error::ErrorNumber,
    storage_pool::StoragePool,
    storage_vol::StorageVol,
    sys,
};

use crate::{
    bare::PATIENCE,
    orders::Orders,
    stats::{Figure, Goal, Samples},
};

const ROUNDS: usize = 25;
/// How exactly the moment is seen at which a domain runs; the same for both sides.
const POLL: Duration = Duration::from_millis(2);
/// Before each measured build, so that the taking down of the one before does not weigh on it.
const SETTLE: Duration = Duration::from_millis(300);

/// Measures with the stack's agent, which must run.
pub(crate) async fn measure(stack: &Stack) -> Result<Vec<Figure>> {
    let resources = [("VCPU", 1), ("MEMORY_MB", 128), ("DISK_GB", 1)];
    let orders = Orders::new(stack, stack.node, &resources).await?;
    // The first is not counted: it takes the image into the cache, and shows what the product defines.
    let first = Orders::instance();
    build(&orders, first).await?;
    let pattern = tokio::task::block_in_place(|| Pattern::of(stack, first))?;
    destroy(&orders, first).await?;
    let (mut bare, mut ours) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        bare.push_time(tokio::task::block_in_place(|| pattern.build(stack, Orders::instance()))?);
        let instance = Orders::instance();
        ours.push_time(build(&orders, instance).await?);
        destroy(&orders, instance).await?;
    }
    Ok(vec![Figure {
        name: "agent: put of a request → domain running",
        unit: "ms",
        ours,
        bare: Some(("libvirt's volume-create, define and start of the same XML", bare)),
        // An image that is there already is cloned as an overlay, which both sides make.
        goals: vec![Goal::Ratio(1.15), Goal::Above(50.0)],
    }])
}

/// Answers the time from before the put until the domain runs.
async fn build(orders: &Orders<'_>, instance: InstanceId) -> Result<Duration> {
    orders.claim(&[instance]).await?;
    tokio::time::sleep(SETTLE).await;
    let seen = when_running(orders.stack, instance)?;
    let begun = Instant::now();
    orders.order(instance, Desired::Active).await?;
    Ok(tokio::task::block_in_place(|| joined(seen))? - begun)
}

async fn destroy(orders: &Orders<'_>, instance: InstanceId) -> Result<()> {
    orders.order(instance, Desired::Destroyed).await?;
    orders.until_gone(instance).await
}

/// Looks from a thread and a connection of its own for the moment at which the domain runs.
fn when_running(stack: &Stack, instance: InstanceId) -> Result<JoinHandle<Result<Instant>>> {
    let connect = stack.libvirt.connection();
    let watcher = thread::Builder::new().name("watcher".to_owned()).spawn(move || {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match connect.lookup_domain_by_uuid(instance.uuid()) {
                // Active alone would be too early: it is said as soon as qemu is about to be started.
                Ok(domain) if matches!(domain.state()?.0, Enum::Known(DomainState::Running)) => {
                    return Ok(Instant::now());
                }
                Err(error) if !matches!(error.code(), Enum::Known(ErrorNumber::NoDomain)) => {
                    return Err(error.into());
                }
                _ => thread::sleep(POLL),
            }
        }
        bail!("{instance} does not run")
    })?;
    Ok(watcher)
}

fn joined(watcher: JoinHandle<Result<Instant>>) -> Result<Instant> {
    watcher.join().map_err(|_| anyhow!("the watcher panicked"))?
}

/// What the product made of a request, to be made again by hand.
pub(crate) struct Pattern {
    connect: Connect,
    pool: StoragePool,
    instance: InstanceId,
    node: NodeId,
    domain: String,
    capacity: String,
    base: String,
}

impl Pattern {
    pub(crate) fn of(stack: &Stack, instance: InstanceId) -> Result<Self> {
        let connect = stack.libvirt.connection();
        let domain =
            connect.lookup_domain_by_uuid(instance.uuid())?.xml_desc(sys::VIR_DOMAIN_XML_INACTIVE)?;
        let disk = stack.directory().join(format!("state/disks/{instance}.qcow2"));
        let volume = connect.lookup_storage_vol_by_path(&disk.display().to_string())?;
        let text = volume.xml_desc(0)?;
        let backing = text.split("<backingStore>").nth(1).context("the volume has no backing store")?;
        Ok(Self {
            pool: volume.lookup_storage_pool()?,
            instance,
            node: stack.node,
            domain,
            capacity: element(&text, "<capacity unit='bytes'>")?,
            base: element(backing, "<path>")?,
            connect,
        })
    }

    /// The pool's name.
    pub(crate) fn pool_name(&self) -> Result<String> {
        Ok(self.pool.name()?)
    }

    /// Volume and domain under another uuid.
    pub(crate) fn documents(&self, instance: InstanceId) -> (String, String) {
        let volume = format!(
            "<volume><name>{instance}.qcow2</name><capacity unit='bytes'>{}</capacity>\
             <target><format type='qcow2'/></target>\
             <backingStore><path>{}</path><format type='qcow2'/></backingStore></volume>",
            self.capacity, self.base
        );
        (volume, self.renamed(&self.domain, instance))
    }

    /// A document of this domain under another uuid.
    pub(crate) fn renamed(&self, document: &str, instance: InstanceId) -> String {
        let document = document
            .replace(&self.instance.to_string(), &instance.to_string())
            .replace(&self.instance.mac(0).to_string(), &instance.mac(0).to_string())
            // Another mark, so that the agent knows it for none of its own.
            .replace(&self.node.to_string(), &InstanceId::new(uuid::Uuid::nil()).to_string());
        without_port_name(&document)
    }

    /// Makes it under another uuid, and starts it.
    pub(crate) fn make(&self, instance: InstanceId) -> Result<Domain> {
        let (volume, domain) = self.documents(instance);
        StorageVol::create_xml(&self.pool, &volume, 0)?;
        let domain = self.connect.define_domain_xml(&domain)?;
        domain.create()?;
        Ok(domain)
    }

    /// Starts a domain that is not kept.
    pub(crate) fn create(&self, document: &str) -> Result<()> {
        self.connect.create_domain_xml(document, 0)?;
        Ok(())
    }

    /// Takes a disk away by its name.
    pub(crate) fn delete_disk(&self, name: &str) -> Result<()> {
        Ok(self.pool.lookup_storage_vol_by_name(name)?.delete(0)?)
    }

    /// Makes an empty disk of that name, of so many bytes; where it lies.
    pub(crate) fn make_empty(&self, name: &str, bytes: u64) -> Result<String> {
        let volume = format!(
            "<volume><name>{name}</name><capacity unit='bytes'>{bytes}</capacity>\
             <target><format type='qcow2'/></target></volume>"
        );
        Ok(StorageVol::create_xml(&self.pool, &volume, 0)?.path()?)
    }

    /// Makes the disk that a new instance of that name gets.
    pub(crate) fn make_disk(&self, instance: InstanceId, name: &str) -> Result<()> {
        let (volume, _) = self.documents(instance);
        let volume = volume.replacen(&format!("{instance}.qcow2"), name, 1);
        StorageVol::create_xml(&self.pool, &volume, 0)?;
        Ok(())
    }

    /// Takes away what was made of it.
    pub(crate) fn remove(&self, stack: &Stack, instance: InstanceId) -> Result<()> {
        let domain = self.connect.lookup_domain_by_uuid(instance.uuid())?;
        domain.destroy()?;
        domain.undefine()?;
        self.delete_disk(&format!("{instance}.qcow2"))?;
        let console = stack.directory().join(format!("state/consoles/{instance}.log"));
        std::fs::remove_file(&console).with_context(|| format!("failed to remove {}", console.display()))
    }

    /// Makes it again under another uuid, and takes it away.
    fn build(&self, stack: &Stack, instance: InstanceId) -> Result<Duration> {
        thread::sleep(SETTLE);
        let watcher = when_running(stack, instance)?;
        let begun = Instant::now();
        self.make(instance)?;
        let seen = joined(watcher)?;
        self.remove(stack, instance)?;
        Ok(seen - begun)
    }
}

/// Without the name of the interface's device: the product names each guest's own, libvirt finds one.
fn without_port_name(domain: &str) -> String {
    const START: &str = "<target dev='ec";
    match domain.split_once(START).and_then(|(before, rest)| Some((before, rest.split_once("/>")?.1))) {
        Some((before, after)) => format!("{before}{after}"),
        None => domain.to_owned(),
    }
}

/// The text of the first element that begins so.
fn element(xml: &str, start: &str) -> Result<String> {
    let rest = xml.split_once(start).map(|(_, rest)| rest);
    let text = rest.and_then(|rest| rest.split_once('<')).map(|(text, _)| text.to_owned());
    text.with_context(|| format!("no {start} in {xml}"))
}
