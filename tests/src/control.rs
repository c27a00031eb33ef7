//! What the command line talks to, and nothing behind it: etcd, placement, and nodes that only say that they are
//! alive.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ec_model::{
    Alive, ImageRef, Instance, InstanceId, Keyspace, NodeId, Request, Resources, Spec, State, Status, decode,
    encode,
};
use ec_placement_client::{Inventory, PlacementClient, PlacementConfig};
use ec_store::{EtcdConfig, EtcdStore, KeyValue, Store, Txn, testing::EtcdServer};
use jiff::Timestamp;
use tempfile::TempDir;

use crate::{PlacementServer, program};

/// An etcd with a placement.
pub struct Control {
    /// The real placement, ours.
    pub placement_server: PlacementServer,
    /// The real etcd.
    pub etcd: EtcdServer,
    /// A client of it.
    pub store: EtcdStore,
    /// A client of placement.
    pub placement: PlacementClient,
    /// The keys' layout.
    pub keys: Keyspace,
    directory: TempDir,
}

impl Control {
    /// Starts both; the command line is configured for them.
    pub async fn start() -> Result<Self> {
        ec_runtime::install_tls_provider();
        let directory = tempfile::Builder::new().prefix("ec-control-").tempdir()?;
        let etcd = EtcdServer::start(None).await?;
        let placement_server = PlacementServer::start(directory.path(), &etcd.endpoint())?;
        placement_server.until_it_answers().await?;
        let store = EtcdStore::connect(EtcdConfig {
            endpoints: vec![etcd.endpoint()],
            timeout: Duration::from_secs(5),
            ..EtcdConfig::default()
        })
        .await?;
        let placement = PlacementClient::new(&PlacementConfig {
            endpoint: placement_server.endpoint(),
            ..PlacementConfig::default()
        })?;
        let control = Self { placement_server, etcd, store, placement, keys: Keyspace::default(), directory };
        control.configure("")?;
        Ok(control)
    }

    /// Writes schedule.yaml anew, with these lines beside where the services are.
    pub fn configure(&self, more: &str) -> Result<()> {
        self.configure_for(&format!("{{endpoint: \"{}\"}}", self.placement_server.endpoint()), more)
    }

    /// The same, with this section for placement.
    pub fn configure_for(&self, placement: &str, more: &str) -> Result<()> {
        let text = format!(
            "etcd: {{endpoints: [\"{}\"]}}\nplacement: {placement}\nimage: file:///nowhere\n{more}\n",
            self.etcd.endpoint()
        );
        Ok(fs::write(self.directory().join("schedule.yaml"), text)?)
    }

    /// The test's directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The command line, not started yet.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("eschedule"));
        command.arg("--config").arg(self.directory().join("schedule.yaml")).args(arguments);
        command.stdin(Stdio::null());
        // Of who runs the tests: all that they ask listens here.
        for name in ["http_proxy", "https_proxy", "all_proxy", "no_proxy"] {
            command.env_remove(name).env_remove(name.to_uppercase());
        }
        command
    }

    /// Runs the command line to its end.
    pub fn eschedule(&self, arguments: &[&str]) -> Result<Output> {
        self.command(arguments).output().context("failed to run eschedule")
    }

    /// Runs it; it must end well. Answers what it printed.
    pub fn done(&self, arguments: &[&str]) -> Result<String> {
        let output = self.eschedule(arguments)?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Schedules; answers node and instance.
    pub fn schedule(&self, arguments: &[&str]) -> Result<(NodeId, InstanceId)> {
        notified(&self.done(arguments)?)
    }

    /// A provider with this inventory, and where `alive` the key of its agent.
    pub async fn node(&self, name: &str, alive: bool, inventory: &[(&str, u64)]) -> Result<NodeId> {
        let node = NodeId::new(uuid::Uuid::new_v4());
        self.placement.ensure_provider(node, name).await?;
        let inventory: BTreeMap<_, _> =
            inventory.iter().map(|(class, total)| ((*class).to_owned(), all_of(*total))).collect();
        self.placement.set_inventory(node, &inventory).await?;
        if alive {
            self.come_alive(node, name).await?;
        }
        Ok(node)
    }

    /// Writes the key of a node's agent.
    pub async fn come_alive(&self, node: NodeId, name: &str) -> Result<()> {
        let record = Alive {
            node,
            name: name.to_owned(),
            agent: "test".to_owned(),
            formats: Alive::formats_of_this_release(),
            virt_type: "qemu".to_owned(),
            machine: String::new(),
            host: String::new(),
            url: None,
            storage: None,
            started_at: Timestamp::now(),
        };
        self.put(self.keys.alive(node), encode(&record)).await
    }

    /// Writes a key.
    pub async fn put(&self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> Result<()> {
        self.store.txn(Txn::new().put(key, value)).await?;
        Ok(())
    }

    /// Deletes a key.
    pub async fn delete(&self, key: impl Into<String>) -> Result<()> {
        self.store.txn(Txn::new().delete(key)).await?;
        Ok(())
    }

    /// What lies under a key.
    pub async fn get(&self, key: &str) -> Result<Option<KeyValue>> {
        Ok(self.store.get(key).await?.0)
    }

    /// Writes a status, as the agent of the node would.
    pub async fn status(
        &self,
        node: NodeId,
        instance: InstanceId,
        state: State,
        ip: Option<&str>,
    ) -> Result<()> {
        let mut status = serde_json::json!({
            "version": 1, "instance": instance, "node": node, "state": state,
            "since": Timestamp::now(), "updated_at": Timestamp::now(),
        });
        if let Some(ip) = ip {
            status["ip"] = ip.into();
        }
        // Through the record, so that the test notices where its form changes.
        let status: Status = decode(status.to_string().as_bytes())?;
        self.put(self.keys.status(node, instance), encode(&status)).await
    }

    /// The request of an instance.
    pub async fn request(&self, node: NodeId, instance: InstanceId) -> Result<Option<Request>> {
        let pair = self.get(&self.keys.request(node, instance)).await?;
        Ok(pair.map(|pair| decode(&pair.value)).transpose()?)
    }

    /// What is wanted of an instance.
    pub async fn record(&self, instance: InstanceId) -> Result<Option<Instance>> {
        let pair = self.get(&self.keys.instance(instance)).await?;
        Ok(pair.map(|pair| decode(&pair.value)).transpose()?)
    }

    /// The keys under a prefix below the root.
    pub async fn store_keys(&self, prefix: &str) -> Result<Vec<String>> {
        Ok(self.store.keys(&format!("{}/{prefix}", Keyspace::DEFAULT_ROOT)).await?)
    }

    /// How many keys lie under a prefix below the root.
    pub async fn count(&self, prefix: &str) -> Result<usize> {
        Ok(self.store_keys(prefix).await?.len())
    }
}

/// An instance as a command writes it before anything is claimed.
pub fn unplaced(instance: InstanceId, name: Option<&str>, project: &str, created_at: Timestamp) -> Instance {
    Instance {
        instance,
        project: project.to_owned(),
        user: "default".to_owned(),
        name: name.map(str::to_owned),
        spec: Spec {
            query: crate::TINY.to_owned(),
            resources: Resources::new(),
            image: ImageRef::at("file:///nowhere"),
            keys: Vec::new(),
            metadata: std::collections::BTreeMap::new(),
            user_data_bytes: None,
            token_required: false,
            snapshot: false,
        },
        power: ec_model::PowerWish::default(),
        restart: ec_model::Restart::No,
        group: None,
        before: None,
        kind: ec_model::Workload::Machine,
        volumes: Vec::new(),
        attached: None,
        made_of: None,
        locked: None,
        request_id: None,
        labels: std::collections::BTreeMap::new(),
        assigned: None,
        generation: 1,
        created_at,
    }
}

/// All of it may be taken, at once, too.
pub fn all_of(total: u64) -> Inventory {
    Inventory { total, reserved: 0, min_unit: 1, max_unit: total, step_size: 1, allocation_ratio: 1.0 }
}

/// Node and instance of the classic line.
pub fn notified(text: &str) -> Result<(NodeId, InstanceId)> {
    let line = text.lines().next().unwrap_or_default();
    let rest =
        line.strip_prefix("NOTIFIED TARGET, ").with_context(|| format!("unexpected answer: {text}"))?;
    let (node, instance) = rest.split_once(", OF INSTANCE ").context("no instance")?;
    Ok((node.parse()?, instance.parse()?))
}
