//! What results look like.

use comfy_table::{Table, presets::NOTHING};
use ec_cloud::{NodeView, View};
use ec_model::Restart;
use ec_runtime::exit::{Failure, print};
use serde::Serialize;

/// A value as JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value);
    print(&text.map_err(|error| Failure::failed(format!("failed to write the answer as JSON: {error}")))?)
}

pub(crate) fn instances(views: &[View]) -> Result<(), Failure> {
    let mut table = table(&["INSTANCE", "NAME", "NODE", "STATE", "IP", "REASON"]);
    for view in views {
        row(
            &mut table,
            [
                view.instance.to_string(),
                view.name.clone().unwrap_or_else(|| "-".to_owned()),
                view.node.map_or_else(|| "-".to_owned(), |node| node.to_string()),
                view.state.clone(),
                view.ip.map_or_else(|| "-".to_owned(), |ip| ip.to_string()),
                reason(view),
            ],
        );
    }
    print(&trimmed(&table))
}

/// The reason, and before it that nobody keeps it up to date.
fn reason(view: &View) -> String {
    let dead = view.node.is_some() && !view.node_alive;
    let dead = dead.then_some("its node is not alive");
    dead.into_iter().chain(view.reason.as_deref()).collect::<Vec<_>>().join("; ")
}

pub(crate) fn nodes(nodes: &[NodeView]) -> Result<(), Failure> {
    let mut table =
        table(&["NODE", "NAME", "VIRT", "VCPU", "MEMORY_MB", "DISK_GB", "AGENT", "SINCE", "NOTE"]);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for node in nodes {
        let amount = |class: &str| {
            let used = node.used.get(class).copied().unwrap_or(0);
            or_dash(node.capacity.get(class).map(|capacity| format!("{used}/{capacity}")))
        };
        row(
            &mut table,
            [
                node.node.to_string(),
                node.name.clone(),
                or_dash(node.virt_type.clone()),
                amount("VCPU"),
                amount("MEMORY_MB"),
                amount("DISK_GB"),
                or_dash(node.agent.clone()),
                or_dash(node.started_at.map(|since| since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())),
                node.note.clone().unwrap_or_default(),
            ],
        );
    }
    print(&trimmed(&table))
}

pub(crate) fn instance(view: &View) -> Result<(), Failure> {
    let mut table = table(&[]);
    let mut row = |key: &str, value: String| row(&mut table, [key.to_owned(), value]);
    row("instance", view.instance.to_string());
    row("name", view.name.clone().unwrap_or_else(|| "-".to_owned()));
    if let Some(node) = view.node {
        row("node", if view.node_alive { node.to_string() } else { format!("{node} (not alive)") });
    }
    row("state", view.state.clone());
    if let Some(reason) = &view.reason {
        row("reason", reason.clone());
    }
    if let Some(doing) = &view.doing {
        row("doing", doing.clone());
    }
    if let Some(record) = &view.record {
        if let Some(reason) = &record.locked {
            row("locked", if reason.is_empty() { "yes".to_owned() } else { reason.clone() });
        }
        for (key, value) in &record.labels {
            row("label", format!("{key}={value}"));
        }
    }
    if let Some(status) = &view.status {
        for address in &status.addresses {
            row("address", format!("{} ({}, interface {})", address.ip, address.mac, address.nic));
        }
        if let Some(progress) = &status.progress {
            row(
                "progress",
                progress.percent().map_or_else(|| format!("{} bytes", progress.done), |p| format!("{p} %")),
            );
        }
        row("since", status.since.to_string());
        if let Some(started) = status.started_at {
            row("started", started.to_string());
        }
    }
    if let Some(request) = &view.request {
        if let Some(spec) = &request.spec {
            let resources: Vec<_> =
                spec.resources.iter().map(|(class, amount)| format!("{class}:{amount}")).collect();
            row("resources", resources.join(","));
            row("query", spec.query.clone());
            row("image", spec.image.url.clone());
        }
        let wish = &request.power;
        let pending = view.status.as_ref().is_some_and(|status| status.power_generation < wish.generation);
        row("power", format!("{}{}", word(&wish.power), if pending { ", not yet" } else { "" }));
        if request.restart != Restart::No {
            row("restart", word(&request.restart));
        }
        row("requested", request.created_at.to_string());
    }
    let mut text = trimmed(&table);
    if let Some(console) = view.status.as_ref().and_then(|status| status.console.as_ref()) {
        text.push_str(&format!("\n\nend of the console:\n{}", plain(console, &['\n', '\t'])));
    }
    print(&text)
}

/// As records have it.
fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn row<const N: usize>(table: &mut Table, cells: [String; N]) {
    table.add_row(cells.map(|cell| plain(&cell, &[])));
}

/// Text that guests, servers and other people's records may have put together, without what would move a
/// terminal's cursor or break a line. Of a console the lines stay.
fn plain(text: &str, keep: &[char]) -> String {
    text.chars().map(|c| if c.is_control() && !keep.contains(&c) { ' ' } else { c }).collect()
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    if !header.is_empty() {
        table.set_header(header.to_vec());
    }
    table
}

/// Without the blanks at both ends of the lines, of which each has one at its beginning.
fn trimmed(table: &Table) -> String {
    let line = |line: String| line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned();
    table.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_guests_say_moves_no_cursor() {
        assert_eq!(plain("a\u{1b}[2Jb\r\n\u{9b}c", &[]), "a [2Jb   c");
        assert_eq!(plain("login:\n\u{7}\tok", &['\n', '\t']), "login:\n \tok");
        let mut lines = table(&["A", "B"]);
        row(&mut lines, ["x\ny".to_owned(), "z".to_owned()]);
        assert_eq!(trimmed(&lines).lines().count(), 2);
    }
}
