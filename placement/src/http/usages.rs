//! What is used: of a provider, and by a project.

use std::collections::BTreeMap;

use ec_placement_model::{Consumer, State};
use ec_placement_schema::Query;
use serde_json::{Map, Value, json};

use super::{
    Call,
    allocations::UNKNOWN_TYPE,
    error::ApiResult,
    policy::{Rule, TOTAL_USAGES},
    providers::{find, use_known},
    reply::{Reply, now},
};

const OF_PROVIDER: Rule = Rule("placement:resource_providers:usages");

pub(super) async fn of_provider(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(OF_PROVIDER)?;
    let document = call
        .read(|state| {
            let found = find(state, call.name(0))?;
            use_known(state)?;
            let node = state.find(&found.uuid);
            let usages: Map<String, Value> = found
                .provider
                .inventories
                .iter()
                .map(|(class, _)| (class.to_string(), node.map_or(0, |node| node.used(class)).into()))
                .collect();
            Ok(json!({"resource_provider_generation": found.generation, "usages": usages}))
        })
        .await?;
    Ok(Reply::json(&document, now()))
}

/// Sums by class, and how many consumers they are of.
#[derive(Default)]
struct Sum {
    by_class: BTreeMap<String, i64>,
    consumers: u64,
}

impl Sum {
    fn add(&mut self, consumer: &Consumer) {
        self.consumers += 1;
        for (class, amount) in consumer.allocations.iter().flat_map(|(_, amounts)| amounts) {
            let sum = self.by_class.entry(class.to_string()).or_default();
            *sum = sum.saturating_add(*amount);
        }
    }
}

fn grouped(state: &State, project: &str, user: Option<&str>, kind: Option<&str>) -> BTreeMap<String, Sum> {
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    for consumer in
        state.consumers_of(project).filter(|consumer| user.is_none_or(|user| *consumer.user == *user))
    {
        let own = consumer.consumer_type.as_deref();
        let group = match kind {
            Some("all") => "all",
            Some("unknown") if own.is_none() => UNKNOWN_TYPE,
            Some("unknown") => continue,
            Some(kind) if own != Some(kind) => continue,
            _ => own.unwrap_or(UNKNOWN_TYPE),
        };
        sums.entry(group.to_owned()).or_default().add(consumer);
    }
    sums
}

pub(super) async fn total(call: &Call<'_>) -> ApiResult<Reply> {
    let project = call.param("project_id");
    call.api.config.policy.check(TOTAL_USAGES, &call.identity, project)?;
    call.check_query(Query::Usages)?;
    let project = project.unwrap_or_default();
    // An empty user filters nothing.
    let user = call.param("user_id").filter(|user| !user.is_empty());
    let by_kind = call.at_least(38);
    let kind = call.param("consumer_type").filter(|kind| by_kind && !kind.is_empty());
    let sums = call
        .read(|state| {
            use_known(state)?;
            Ok(if by_kind {
                grouped(state, project, user, kind)
            } else {
                grouped(state, project, user, Some("all"))
            })
        })
        .await?;
    let usages: Value = if by_kind {
        let groups = sums.into_iter().map(|(group, sum)| {
            let mut entry = json!(sum.by_class);
            entry["consumer_count"] = sum.consumers.into();
            (group, entry)
        });
        Value::Object(groups.collect())
    } else {
        json!(sums.into_values().next().unwrap_or_default().by_class)
    };
    Ok(Reply::json(&json!({ "usages": usages }), now()))
}
