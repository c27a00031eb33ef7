//! `eschedule show`: everything known of instances.

use ec_cloud::{Cloud, CloudError, View, VolumeView, find, resolve, select};
use ec_model::Workload;
use ec_runtime::exit::Failure;
use serde::Serialize;

use crate::{
    cli::{Instances, Output},
    config::Session,
    output::{self, Names},
    several::note,
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  eschedule show web
  eschedule show web db -o json | jq '.[].status.addresses'
  eschedule show --label role=web";

/// What was found of one; or why nothing was.
#[derive(Serialize)]
#[serde(untagged)]
enum Shown {
    Instance(Box<View>),
    /// Its uuid may be all that somebody has of it.
    Volume(Box<VolumeView>),
    Failed {
        asked: String,
        error: String,
    },
}

impl Shown {
    async fn of(cloud: &Cloud, text: &str) -> Result<Self, CloudError> {
        let instance = resolve(cloud, text).await?;
        let view = View::found(&find(cloud, instance).await?);
        Ok(match view.kind {
            Workload::Machine => Self::Instance(Box::new(view)),
            Workload::Volume => Self::Volume(Box::new(ec_cloud::volume(cloud, instance).await?)),
        })
    }

    /// The words by which scripts may call it, of instances and of volumes.
    fn name(&self, [instances, volumes]: &[Names; 2]) -> Option<String> {
        match self {
            Self::Instance(view) => Some(instances.word(view.name.as_ref(), view.instance)),
            Self::Volume(view) => Some(volumes.word(view.name.as_ref(), view.volume)),
            Self::Failed { .. } => None,
        }
    }

    fn lines(&self) -> Option<String> {
        match self {
            Self::Instance(view) => Some(output::lines_of(view)),
            Self::Volume(view) => Some(output::volume_lines(view)),
            Self::Failed { .. } => None,
        }
    }
}

/// Shows each. One that is not there does not keep the others from being shown.
pub(crate) async fn show(session: &Session, instances: &Instances, output: Output) -> Result<(), Failure> {
    let cloud = &session.cloud;
    let mut texts = instances.instances.clone();
    if !instances.label.is_empty() {
        texts.extend(select(cloud, &instances.label).await?.iter().map(ToString::to_string));
    }
    let (mut all, mut failed) = (Vec::new(), None::<Failure>);
    for text in texts {
        all.push(match Shown::of(cloud, &text).await {
            Ok(shown) => shown,
            // Of one alone that is all there is to say.
            Err(error) if instances.instances.len() == 1 => return Err(error.into()),
            Err(error) => {
                let failure = Failure::from(error);
                note(&mut failed, &failure);
                Shown::Failed { asked: text, error: failure.message }
            }
        });
    }
    let names = [Workload::Machine, Workload::Volume].map(|kind| Names::of(cloud, kind, output));
    let [instances_called, volumes_called] = names;
    let names = [instances_called.await?, volumes_called.await?];
    let called = || all.iter().filter_map(|shown| shown.name(&names)).collect();
    let lines = || all.iter().filter_map(Shown::lines).collect::<Vec<_>>().join("\n\n");
    match &all[..] {
        // One that was named is no list.
        [one] if instances.instances.len() == 1 => output.print(one, called, lines)?,
        all => output.print(all, called, lines)?,
    }
    failed.map_or(Ok(()), Err)
}
