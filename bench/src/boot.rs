//! From a request to a running domain, beside the three libvirt calls that make the same one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ec_model::{InstanceId, ResourceQuery};
use ec_placement_client::Claim;
use ec_store::{Store, Txn};
use ec_tests::{Stack, TINY};
use virt::{connect::Connect, domain::Domain, error::Error, storage_vol::StorageVol, sys};

use crate::figures::{Comparison, Goal, Rounds};

const GOAL: Goal = Goal { ratio: 1.15, ms: None };
const WARM_UP: usize = 1;
/// How finely a domain's start is seen.
const POLL: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures, with the real agent. Both sides use one libvirtd, one image and one kind of guest.
pub(crate) async fn measure(stack: &mut Stack, rounds: usize) -> Result<Comparison> {
    stack.start_agent("").await?;
    let mut measured = Rounds::default();
    for round in 0..rounds + WARM_UP {
        let instance = stack.schedule(&[])?;
        stack.until_state(instance, ec_model::State::Active).await?;
        let template = tokio::task::block_in_place(|| Template::of(stack, instance))?;
        stack.eschedule(&["destroy", "--wait", &instance.to_string()])?;

        let instance = InstanceId::new(uuid::Uuid::new_v4());
        let ours = ours(stack, instance).await?;
        stack.eschedule(&["destroy", "--wait", &instance.to_string()])?;
        stack.until_exactly(&[]).await?;

        let bare = tokio::task::block_in_place(|| template.build(stack))?;
        if round >= WARM_UP {
            measured.ours.push(ours);
            measured.bare.push(bare);
        }
    }
    stack.end_agent()?;
    Ok(measured.compare("request to running domain", GOAL))
}

/// Claimed before the clock starts: what is measured begins with the request's put.
async fn ours(stack: &Stack, instance: InstanceId) -> Result<Duration> {
    let found = stack.placement.candidates(&ResourceQuery::parse(TINY)?).await?;
    let candidate = found.candidates.first().context("no room")?;
    stack.placement.claim(&Claim { instance, candidate, project: "bench", user: "bench" }).await?;
    let keys = ec_model::Keyspace::default();
    let request = ec_model::Request {
        version: ec_model::RECORD_VERSION,
        instance,
        desired: ec_model::Desired::Active,
        name: None,
        resources: ec_model::Resources::new(),
        image: Some(ec_model::ImageRef {
            url: format!("file://{}", ec_tests::tiny_image().display()),
            sha256: None,
        }),
        keys: Vec::new(),
        user_data: None,
        project: "bench".to_owned(),
        user: "bench".to_owned(),
        created_at: jiff::Timestamp::now(),
    };
    let index = ec_model::IndexEntry { version: ec_model::RECORD_VERSION, node: stack.node, name: None };
    let connect = stack.libvirt.connection();
    let txn = Txn::new()
        .put(keys.request(stack.node, instance), ec_model::encode(&request))
        .put(keys.instance(instance), ec_model::encode(&index));
    let begin = Instant::now();
    stack.store.txn(txn).await?;
    loop {
        let running = tokio::task::block_in_place(|| runs(&connect, instance));
        if running {
            return Ok(begin.elapsed());
        }
        ensure!(begin.elapsed() < PATIENCE, "no domain: {}", stack.log());
        tokio::time::sleep(POLL).await;
    }
}

fn runs(connect: &Connect, instance: InstanceId) -> bool {
    // Not there is the usual answer until it is.
    connect.lookup_domain_by_uuid(instance.uuid()).and_then(|domain| domain.is_active()).unwrap_or(false)
}

/// The product's own documents, to be given another instance's names.
struct Template {
    instance: InstanceId,
    domain: String,
    volume: String,
    pool: String,
}

impl Template {
    fn of(stack: &Stack, instance: InstanceId) -> Result<Self> {
        let connect = stack.libvirt.connection();
        let domain = connect.lookup_domain_by_uuid(instance.uuid())?;
        let disk = stack.directory().join(format!("state/disks/{instance}.qcow2"));
        let volume = connect.lookup_storage_vol_by_path(disk.to_str().context("path")?)?;
        let directory = stack.directory().join("state/disks");
        let pool = connect.lookup_storage_pool_by_target_path(directory.to_str().context("path")?)?.name()?;
        let xml = volume.xml_desc(0)?;
        let base = between(&xml, "<backingStore>", "</backingStore>")?;
        let path = between(base, "<path>", "</path>")?;
        let capacity = volume.info()?.capacity;
        let volume = format!(
            "<volume><name>{instance}.qcow2</name><capacity unit='bytes'>{capacity}</capacity>\
             <target><format type='qcow2'/></target>\
             <backingStore><path>{path}</path><format type='qcow2'/></backingStore></volume>"
        );
        Ok(Self { instance, domain: domain.xml_desc(sys::VIR_DOMAIN_XML_INACTIVE)?, volume, pool })
    }

    fn build(&self, stack: &Stack) -> Result<Duration> {
        let other = InstanceId::new(uuid::Uuid::new_v4());
        let rename = |text: &str| {
            text.replace(&self.instance.to_string(), &other.to_string())
                .replace(&self.instance.mac(0).to_string(), &other.mac(0).to_string())
        };
        let (domain, volume) = (rename(&self.domain), rename(&self.volume));
        let connect = stack.libvirt.connection();
        let pool = connect.lookup_storage_pool_by_name(&self.pool)?;
        let begin = Instant::now();
        let volume = StorageVol::create_xml(&pool, &volume, 0)?;
        let domain = connect.define_domain_xml(&domain)?;
        domain.create()?;
        let elapsed = begin.elapsed();
        remove(&domain, &volume)?;
        // The agent would; here nobody else does.
        std::fs::remove_file(stack.directory().join(format!("state/consoles/{other}.log"))).ok();
        Ok(elapsed)
    }
}

fn remove(domain: &Domain, volume: &StorageVol) -> Result<(), Error> {
    domain.destroy()?;
    domain.undefine()?;
    volume.delete(0)
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Result<&'a str> {
    let (_, rest) = text.split_once(start).with_context(|| format!("no {start}"))?;
    Ok(rest.split_once(end).with_context(|| format!("no {end}"))?.0)
}
