//! Ordering instances on one node as a control tool does: claim, request, destroy.

use anyhow::{Context, Result};
use ec_model::{
    Desired, ImageRef, InstanceId, Keyspace, NodeId, Request, Resources, Spec, State, Status, decode, encode,
};
use ec_store::Store;
use ec_tests::{Stack, tiny_image};
use jiff::Timestamp;

use crate::bare;

/// One node, and what each instance on it takes.
pub(crate) struct Orders<'a> {
    pub(crate) stack: &'a Stack,
    pub(crate) node: NodeId,
    pub(crate) keys: Keyspace,
    pub(crate) resources: Resources,
    /// The put is etcd's own, with nothing of ours around it.
    etcd: etcd_client::KvClient,
    /// Where placement answers, as `address:port`.
    pub(crate) placement: String,
}

impl<'a> Orders<'a> {
    /// For instances with these resources on this node.
    pub(crate) async fn new(stack: &'a Stack, node: NodeId, resources: &[(&str, u64)]) -> Result<Self> {
        let client = etcd_client::Client::connect([stack.etcd.endpoint()], None).await?;
        Ok(Self {
            stack,
            node,
            keys: Keyspace::default(),
            resources: resources.iter().map(|(class, amount)| ((*class).to_owned(), *amount)).collect(),
            etcd: client.kv_client(),
            placement: placement_host(stack),
        })
    }

    /// A new instance.
    pub(crate) fn instance() -> InstanceId {
        InstanceId::new(uuid::Uuid::new_v4())
    }

    /// The value of an instance's request key.
    pub(crate) fn request(&self, instance: InstanceId, desired: Desired) -> Vec<u8> {
        encode(&Request {
            instance,
            epoch: 1,
            generation: if desired == Desired::Active { 1 } else { 2 },
            desired,
            power: ec_model::PowerWish::default(),
            restart: ec_model::Restart::No,
            rebuild: None,
            rescue: None,
            kind: ec_model::Workload::Machine,
            volumes: Vec::new(),
            resize: None,
            handover: None,
            name: None,
            spec: Some(Spec {
                query: "resources=VCPU:1".to_owned(),
                resources: self.resources.clone(),
                image: ImageRef::at(format!("file://{}", tiny_image().display())),
                keys: Vec::new(),
                metadata: std::collections::BTreeMap::new(),
                user_data_bytes: None,
                token_required: false,
                snapshot: false,
            }),
            project: "default".to_owned(),
            user: "default".to_owned(),
            access: None,
            request_id: None,
            created_at: Timestamp::now(),
        })
    }

    /// Claims what each of the instances takes.
    pub(crate) async fn claim(&self, instances: &[InstanceId]) -> Result<()> {
        bare::claim_all(&self.placement, self.node, instances, &self.resources).await
    }

    /// Puts a key.
    pub(crate) async fn put(&self, key: String, value: Vec<u8>) -> Result<()> {
        self.etcd.clone().put(key, value, None).await.map(drop).context("failed to put a key")
    }

    /// Puts an instance's request.
    pub(crate) async fn order(&self, instance: InstanceId, desired: Desired) -> Result<()> {
        self.put(self.keys.request(self.node, instance), self.request(instance, desired)).await
    }

    /// Waits until so many instances of the node are ACTIVE; one in ERROR is a failure.
    pub(crate) async fn until_active(&self, count: usize) -> Result<()> {
        let prefix = self.keys.statuses(self.node);
        self.stack
            .until(&format!("{count} instances are ACTIVE"), async || {
                let mut active = 0;
                for pair in self.stack.store.list(&prefix).await?.pairs {
                    let status: Status = decode(&pair.value)?;
                    anyhow::ensure!(status.state != State::Error, "in ERROR: {:?}", status.reason);
                    active += usize::from(status.state == State::Active);
                }
                Ok(active == count)
            })
            .await
    }

    /// Waits until nothing is left of the instance.
    pub(crate) async fn until_gone(&self, instance: InstanceId) -> Result<()> {
        let key = self.keys.request(self.node, instance);
        let what = format!("{instance} is gone");
        self.stack.until(&what, async || Ok(self.stack.store.get(&key).await?.0.is_none())).await
    }

    /// Waits until the node's agent lives.
    pub(crate) async fn until_alive(&self) -> Result<()> {
        let key = self.keys.alive(self.node);
        let what = format!("the agent of {} lives", self.node);
        self.stack.until(&what, async || Ok(self.stack.store.get(&key).await?.0.is_some())).await
    }
}

/// Where the stack's placement answers, as `address:port`.
pub(crate) fn placement_host(stack: &Stack) -> String {
    stack.placement_server.endpoint().trim_start_matches("http://").to_owned()
}
