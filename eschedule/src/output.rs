//! Printing results. The only place that writes to standard output.
#![expect(clippy::print_stdout, reason = "results are what standard output is for")]

use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

use crate::lookup::{NodeView, View};

/// A line of plain text.
pub(crate) fn line(text: &str) {
    println!("{text}");
}

/// A value as JSON.
pub(crate) fn json(value: &impl Serialize) {
    // Our own types: maps with string keys, which serde_json never fails on.
    println!("{}", serde_json::to_string_pretty(value).unwrap_or_default());
}

pub(crate) fn instances(views: &[View]) {
    let mut table = table(&["INSTANCE", "NAME", "NODE", "STATE", "IP", "REASON"]);
    for view in views {
        table.add_row([
            view.instance.to_string(),
            view.name.clone().unwrap_or_else(|| "-".to_owned()),
            view.node.to_string(),
            view.state.to_string(),
            view.ip.map_or_else(|| "-".to_owned(), |ip| ip.to_string()),
            view.reason.clone().unwrap_or_default(),
        ]);
    }
    println!("{}", trimmed(&table));
}

pub(crate) fn nodes(nodes: &[NodeView]) {
    let mut table = table(&["NODE", "NAME", "VIRT", "VCPU", "MEMORY_MB", "DISK_GB", "AGENT", "SINCE"]);
    for node in nodes {
        let amount = |class: &str| {
            let used = node.used.get(class).copied().unwrap_or(0);
            node.capacity.get(class).map_or_else(|| "-".to_owned(), |capacity| format!("{used}/{capacity}"))
        };
        table.add_row([
            node.node.to_string(),
            node.name.clone(),
            node.virt_type.clone(),
            amount("VCPU"),
            amount("MEMORY_MB"),
            amount("DISK_GB"),
            node.agent.clone(),
            node.started_at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        ]);
    }
    println!("{}", trimmed(&table));
}

pub(crate) fn instance(view: &View) {
    let mut table = table(&[]);
    let mut row = |key: &str, value: String| {
        table.add_row([key.to_owned(), value]);
    };
    row("instance", view.instance.to_string());
    row("name", view.name.clone().unwrap_or_else(|| "-".to_owned()));
    row("node", view.node.to_string());
    row("state", view.state.to_string());
    if let Some(reason) = &view.reason {
        row("reason", reason.clone());
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
        let resources: Vec<_> =
            request.resources.iter().map(|(class, amount)| format!("{class}:{amount}")).collect();
        row("resources", resources.join(","));
        if let Some(image) = &request.image {
            row("image", image.url.clone());
        }
        row("requested", request.created_at.to_string());
    }
    println!("{}", trimmed(&table));
    if let Some(console) = view.status.as_ref().and_then(|status| status.console.as_ref()) {
        println!("\nend of the console:\n{console}");
    }
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
