//! Looking at an instance from here: the wish, and the ticket that comes of it.

use std::time::Duration;

use ec_model::{Access, AccessKind, AccessWish, InstanceId, NodeId, Ticket};
use ec_plan::reach::look;
use ec_store::{Compare, StoreError, Txn};

use crate::{
    Cloud, CloudError, CloudResult,
    lookup::{Known, Read, find_placed},
    wait::until_status,
};

/// Others may wish the same at the same time: so often it is wished again.
const TRIES: usize = 10;
/// An agent answers within milliseconds, unless it is in the middle of something with the instance.
const PATIENCE: Duration = Duration::from_secs(30);

/// What lets in whoever wished to look at an instance: soon, and once.
#[derive(Debug)]
pub struct Door {
    /// The node whose agent shows it.
    pub node: NodeId,
    /// Where that agent's port is.
    pub url: String,
    /// To be brought there.
    pub ticket: Ticket,
}

/// Wishes to look at an instance, and waits for the ticket.
///
/// # Errors
/// There is nothing to look at, or nobody to show it: [`CloudError::Refused`].
pub async fn look_at(cloud: &Cloud, instance: InstanceId, kind: AccessKind) -> CloudResult<Door> {
    for _ in 0..TRIES {
        let known = find_placed(cloud, instance).await?;
        let Some((url, generation)) = wish(cloud, &known, kind).await? else { continue };
        let Some(answer) = answered(cloud, &known, generation).await? else { continue };
        let node = known.node;
        return match (answer.ticket, answer.reason) {
            (Some(ticket), _) => Ok(Door { node, url, ticket }),
            (None, why) => {
                let why = why.unwrap_or_else(|| "its node's agent gives no ticket".to_owned());
                Err(CloudError::Refused(format!("cannot look at the {kind} of {instance}: {why}")))
            }
        };
    }
    Err(CloudError::Busy(format!("many want to look at {instance} at once; try again")))
}

/// Writes the wish; where to go with its ticket, and which wish it is. Nothing where somebody else was quicker.
async fn wish(cloud: &Cloud, known: &Known, kind: AccessKind) -> CloudResult<Option<(String, u64)>> {
    let (instance, node) = (known.instance, known.node);
    let refuse =
        |why: &str| Err(CloudError::Refused(format!("cannot look at the {kind} of {instance}: {why}")));
    let request = match &known.request {
        Read::Here(request, _) => request,
        Read::Absent => return refuse("nothing of it is wanted, so that its node is not asked for it"),
        Read::Unreadable(why) => return refuse(&format!("its request cannot be read: {why}")),
    };
    if let Err(why) = look(kind, request, known.status.record()) {
        return refuse(&why);
    }
    if !known.node_alive {
        return refuse(&format!("its node {node} is not alive"));
    }
    let Some(url) = known.node_url.clone() else {
        return refuse(&format!(
            "the agent of its node {node} has no port to show it by: `listen` is null there, or it is of an older release"
        ));
    };
    let mut order = known.request_doc()?;
    let wished = order.record.access.map(|wish| wish.generation);
    let answered = known.status.record().and_then(|status| Some(status.access.as_ref()?.generation));
    let generation = wished.max(answered).unwrap_or(0).saturating_add(1);
    order.record.access = Some(AccessWish { kind, generation, request_id: cloud.request_id });
    let (record_key, order_key) = (cloud.keys.instance(instance), cloud.keys.request(node, instance));
    let txn = Txn::new()
        .when(Compare::Unchanged(record_key, known.record_revision()))
        .when(Compare::Unchanged(order_key.clone(), known.request_revision()))
        // It goes when the node is revoked, for which nothing is written then.
        .when(Compare::Unchanged(cloud.keys.alive(node), known.alive_revision()))
        .put(order_key, order.encode());
    match cloud.store.txn(txn).await {
        Ok(outcome) if outcome.succeeded => Ok(Some((url, generation))),
        // Whether it was done after all: the next wish is as good.
        Ok(_) | Err(StoreError::Unknown(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Waits for the answer to this wish; nothing where it is one to a later wish.
async fn answered(cloud: &Cloud, known: &Known, generation: u64) -> CloudResult<Option<Access>> {
    let (node, instance) = (known.node, known.instance);
    let answer = until_status(
        cloud,
        node,
        instance,
        PATIENCE,
        |_| {},
        |status| {
            let told = status.access.as_ref().is_some_and(|access| access.generation >= generation);
            Ok(told.then_some(status))
        },
        |_| Ok(()),
    );
    match answer.await {
        Ok(status) => Ok(status.access.filter(|access| access.generation == generation)),
        Err(CloudError::TimedOut(_)) => Err(CloudError::TimedOut(format!(
            "the agent of node {node} gave no ticket for {instance} in {} s; `eschedule show {instance}` tells what it is about",
            PATIENCE.as_secs()
        ))),
        Err(error) => Err(error),
    }
}
