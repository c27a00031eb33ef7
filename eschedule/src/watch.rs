//! `eschedule watch`: instances, as they change.

use std::net::IpAddr;

use clap::{Args, builder::NonEmptyStringValueParser};
use ec_cloud::{CloudError, Seen, View, Watched, What};
use ec_model::{InstanceId, NodeId, input::LabelSelector};
use ec_runtime::exit::{Failure, print, tell};
use serde::Serialize;

use crate::{acting::no_volume, cli::Output, config::Session, output};

pub(crate) const EXAMPLES: &str = "\
Examples:
  eschedule watch                         all instances
  eschedule watch web db                  two
  eschedule watch --label role=web        those of the project with a label, also such as come later
  eschedule watch web -o json | jq -r .state";

/// Which instances are watched.
#[derive(Args)]
pub(crate) struct Watching {
    /// Names, uuids, or the beginnings of uuids; none: all
    #[arg(value_name = "INSTANCE", value_parser = NonEmptyStringValueParser::new())]
    instances: Vec<String>,

    /// Those of the project that have this label; given more than once, all of them
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "instances", value_parser = ec_model::input::label_selector)]
    label: Vec<LabelSelector>,
}

/// A change as scripts see it.
#[derive(Serialize)]
pub(crate) struct Line<'a> {
    pub(crate) what: What,
    pub(crate) instance: InstanceId,
    pub(crate) name: Option<&'a str>,
    pub(crate) node: Option<NodeId>,
    pub(crate) state: &'a str,
    pub(crate) ip: Option<IpAddr>,
    pub(crate) reason: Option<&'a str>,
    pub(crate) doing: Option<&'a str>,
}

impl<'a> Line<'a> {
    pub(crate) fn of(what: What, view: &'a View) -> Self {
        Self {
            what,
            instance: view.instance,
            name: view.name.as_deref(),
            node: view.node,
            state: &view.state,
            ip: view.ip,
            reason: view.reason.as_deref(),
            doing: view.doing.as_deref(),
        }
    }

    /// For people.
    fn text(&self) -> String {
        let name = output::plain(self.name.unwrap_or("-"));
        if self.what == What::Gone {
            return format!("{name}  {}  GONE", self.instance);
        }
        let mut words = vec![name, self.instance.to_string(), self.state.to_owned()];
        words.extend(self.ip.map(|ip| ip.to_string()));
        let more: Vec<String> = self.reason.into_iter().chain(self.doing).map(output::plain).collect();
        if !more.is_empty() {
            words.push(format!("({})", more.join("; ")));
        }
        words.join("  ")
    }
}

/// Watches until it is interrupted, or nobody reads any more.
pub(crate) async fn watch(session: &Session, watching: Watching, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let mut watched =
        Watched { labels: watching.label, project: cloud.project.clone(), ..Watched::default() };
    for text in &watching.instances {
        watched.instances.insert(no_volume(cloud, text).await?);
    }
    // What cannot be asked at all ends this; later, it is waited for.
    cloud.store.get(&cloud.keys.instances()).await.map_err(CloudError::from)?;
    let watched = ec_cloud::watch(cloud, watched, |seen| match seen {
        Seen::Is(what, view) => {
            let line = Line::of(what, &view);
            let failed = |why: String| Failure::failed(format!("failed to write the answer: {why}"));
            print(&match output {
                Output::Table => line.text(),
                Output::Json => output::escaped(serde_json::to_string(&line)).map_err(failed)?,
                Output::Yaml => {
                    format!("---\n{}", output::document(&line).map_err(|error| failed(error.to_string()))?)
                }
                // Who is destroyed, or belongs to others, does not have the name that it has here.
                Output::Name => {
                    let is_own = view.record.as_ref().is_some_and(|record| record.project == cloud.project);
                    let name = view.name.as_ref().filter(|_| is_own && what != What::Gone);
                    output::plain(&output::called(name, view.instance))
                }
            })
        }
        Seen::Lost(why) => {
            tell(&format!("eschedule: {why}; watching on"));
            Ok(())
        }
    });
    tokio::select! {
        ended = watched => ended,
        gone = output::nobody_reads() => Err(gone),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_volume_is_no_instance_that_could_be_watched() {
        let (session, uuid) = (Session::in_memory().await, uuid::Uuid::from_u128(7));
        let record = format!(
            r#"{{"version":1,"instance":"{uuid}","kind":"volume","name":"data","generation":1,
            "spec":{{"query":"resources=DISK_GB:1","image":{{"url":""}}}},
            "assigned":{{"node":"{uuid}","epoch":1}},"created_at":"1970-01-01T00:00:00Z"}}"#
        );
        session.put(ec_model::decode(record.as_bytes()).unwrap()).await;
        let watching = Watching { instances: vec![uuid.to_string()], label: Vec::new() };
        let watched = watch(&session, watching, Output::Table);
        let refused = tokio::time::timeout(Duration::from_secs(10), watched).await.unwrap().unwrap_err();
        assert!(refused.message.contains("is a volume: `eschedule volume show"), "{}", refused.message);
    }
}
