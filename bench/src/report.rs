//! The result, for people and for programs.

use serde_json::{Value, json};

use crate::stats::{Figure, Goal, Samples};

/// A table with a line of headings; the comparisons' other sides are named below it.
pub(crate) fn table(figures: &[Figure]) -> String {
    let headings = ["figure", "n", "median", "p90", "bare median", "bare p90", "ratio", "goal"];
    let mut rows = vec![headings.map(str::to_owned)];
    rows.extend(figures.iter().map(row));
    let mut widths = [0; 8];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            // Words begin at one place, numbers end at one.
            line += &match column {
                0 => format!("{cell:<width$}"),
                7 => format!("  {cell}"),
                _ => format!("  {cell:>width$}"),
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text.push('\n');
    for figure in figures {
        if let Some((what, _)) = &figure.bare {
            text += &format!("{}: bare is {what}\n", figure.name);
        }
    }
    text
}

fn row(figure: &Figure) -> [String; 8] {
    let value = |value: Option<f64>| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2} {}", figure.unit))
    };
    let bare = figure.bare.as_ref().map(|(_, samples)| samples);
    let goals: Vec<_> = figure.goals.iter().map(|goal| verdict(figure, *goal)).collect();
    [
        figure.name.to_owned(),
        figure.ours.count().to_string(),
        value(figure.ours.median()),
        value(figure.ours.p90()),
        value(bare.and_then(Samples::median)),
        value(bare.and_then(Samples::p90)),
        figure.ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
        if goals.is_empty() { "-".to_owned() } else { goals.join(", ") },
    ]
}

fn verdict(figure: &Figure, goal: Goal) -> String {
    let met = if figure.meets(goal) { "met" } else { "MISSED" };
    match goal {
        Goal::Ratio(most) => format!("ratio ≤ {most} {met}"),
        Goal::AtMost(most) => format!("≤ {most} {} {met}", figure.unit),
        Goal::Above(most) => format!("≤ {most} {} above {met}", figure.unit),
        Goal::Under(bound) => format!("< {bound} {} {met}", figure.unit),
    }
}

/// The same as one JSON document.
pub(crate) fn document(figures: &[Figure]) -> Value {
    let figures: Vec<_> = figures
        .iter()
        .map(|figure| {
            let goals: Vec<_> = figure
                .goals
                .iter()
                .map(|goal| {
                    let (kind, limit) = match goal {
                        Goal::Ratio(limit) => ("ratio_at_most", limit),
                        Goal::AtMost(limit) => ("median_at_most", limit),
                        Goal::Above(limit) => ("median_above_bare_at_most", limit),
                        Goal::Under(limit) => ("median_under", limit),
                    };
                    json!({"kind": kind, "limit": limit, "met": figure.meets(*goal)})
                })
                .collect();
            let bare = figure.bare.as_ref().map(|(what, samples)| {
                let mut summary = summary(samples);
                summary["what"] = json!(what);
                summary
            });
            json!({
                "figure": figure.name, "unit": figure.unit, "ours": summary(&figure.ours), "bare": bare,
                "ratio": figure.ratio(), "goals": goals,
            })
        })
        .collect();
    json!({ "figures": figures })
}

fn summary(samples: &Samples) -> Value {
    json!({"n": samples.count(), "median": samples.median(), "p90": samples.p90()})
}
