//! What volumes look like.

use ec_cloud::VolumeView;
use ec_runtime::exit::Failure;

use super::{List, Names, locked, or_dash, row, table, told, trimmed, when};
use crate::cli::Output;

/// A list of volumes.
pub(crate) fn volumes(output: Output, volumes: &[VolumeView], names: &Names) -> Result<(), Failure> {
    output.print(
        volumes,
        || volumes.iter().map(|view| names.word(view.name.as_ref(), view.volume)).collect(),
        || {
            let header = ["VOLUME", "NAME", "NODE", "STATUS", "GB", "INSTANCE", "DEVICE", "REASON"];
            let mut list = List::new(&header, &[0, 3, 4], &[1, 0, 3, 4, 5, 6, 7, 2]);
            for view in volumes {
                list.row([
                    view.volume.to_string(),
                    or_dash(view.name.clone()),
                    or_dash(view.node.map(|node| node.to_string())),
                    view.status.clone(),
                    or_dash(view.size_gb.map(|size| size.to_string())),
                    or_dash(view.instance.map(|instance| instance.to_string())),
                    or_dash(view.device.clone()),
                    why(view),
                ]);
            }
            list.text()
        },
    )
}

/// A list of snapshots.
pub(crate) fn snapshots(output: Output, snapshots: &[VolumeView], names: &Names) -> Result<(), Failure> {
    output.print(
        snapshots,
        || snapshots.iter().map(|view| names.word(view.name.as_ref(), view.volume)).collect(),
        || snapshot_list(snapshots),
    )
}

fn snapshot_list(snapshots: &[VolumeView]) -> String {
    let header = ["SNAPSHOT", "NAME", "NODE", "STATUS", "GB", "OF", "DISKS", "CREATED", "REASON"];
    let mut list = List::new(&header, &[0, 3, 4, 6], &[1, 0, 5, 3, 4, 6, 7, 2, 8]);
    for view in snapshots {
        list.row([
            view.volume.to_string(),
            or_dash(view.name.clone()),
            or_dash(view.node.map(|node| node.to_string())),
            view.status.clone(),
            or_dash(view.size_gb.map(|size| size.to_string())),
            or_dash(view.copy_of.map(|instance| instance.to_string())),
            (1 + view.beside.len()).to_string(),
            or_dash(view.created_at.map(when)),
            why(view),
        ]);
    }
    list.text()
}

/// Why it is so, and what is done about it.
fn why(view: &VolumeView) -> String {
    told(view.node.is_some() && !view.node_alive, [&view.reason, &view.doing])
}

/// One volume.
pub(crate) fn volume(output: Output, view: &VolumeView, names: &Names) -> Result<(), Failure> {
    output.print(view, || vec![names.word(view.name.as_ref(), view.volume)], || lines(view))
}

/// The same, as lines for people.
pub(crate) fn lines(view: &VolumeView) -> String {
    let mut table = table(&[]);
    let mut row = |key: &str, value: String| row(&mut table, [key.to_owned(), value]);
    row("volume", view.volume.to_string());
    row("name", view.name.clone().unwrap_or_else(|| "-".to_owned()));
    row("status", view.status.clone());
    if let Some(reason) = &view.reason {
        row("reason", reason.clone());
    }
    if let Some(doing) = &view.doing {
        row("doing", doing.clone());
    }
    if let Some(reason) = &view.locked {
        row("locked", locked(reason));
    }
    row("size", or_dash(view.size_gb.map(|size| format!("{size} GB"))));
    if let Some(node) = view.node {
        row("node", if view.node_alive { node.to_string() } else { format!("{node} (not alive)") });
    }
    if let Some(instance) = view.instance {
        row("instance", format!("{instance} as {}", view.device.as_deref().unwrap_or("-")));
    }
    if let Some(image) = &view.image {
        row("image", image.clone());
    }
    for volume in &view.beside {
        row("beside", volume.to_string());
    }
    if let Some(volume) = view.copy_of {
        row("copy of", volume.to_string());
    }
    for (key, value) in &view.labels {
        row("label", format!("{key}={value}"));
    }
    if let Some(created) = view.created_at {
        row("created", created.to_string());
    }
    trimmed(&table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_listed_with_when_it_was_made_to_the_second() {
        let at = jiff::Timestamp::new(7, 123_456_789).unwrap();
        let snapshot = VolumeView { created_at: Some(at), ..crate::fields::volume() };
        let list = snapshot_list(&[snapshot]);
        assert!(list.contains("1970-01-01T00:00:07Z"), "{list}");
    }
}
