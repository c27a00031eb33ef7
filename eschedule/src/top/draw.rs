//! What the model looks like.

use std::collections::BTreeMap;

use ec_cloud::NodeView;
use jiff::Timestamp;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Row, Table},
};

use super::{
    columns::{Column, mebibytes},
    model::{Mode, Model, Pane, Text, state_of},
};
use crate::output::{Mood, mood, plain, reason_and_doing};

/// Below this height all room is the instances'.
const LOW: u16 = 10;
/// Rows that are not of nodes or instances: the summary, a line for what is told, the keys.
const AROUND: u16 = 3;
/// Cells of a bar.
const BAR: u64 = 4;

const KEYS: &str =
    "?help q:quit /filter o:sort r:reverse Tab Enter s:start S:stop b:boot d:destroy l:logs c:cons";
const ABOVE: &str = "arrows, PgUp, PgDn: move  any other key: back";

/// How things are told apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    pub(super) coloured: bool,
}

impl Look {
    fn of(self, mood: Option<Mood>) -> Style {
        let Some(mood) = mood.filter(|_| self.coloured) else { return Style::new() };
        Style::new().fg(match mood {
            Mood::Well => Color::Green,
            Mood::Trouble => Color::Red,
            Mood::UnderWay => Color::Yellow,
        })
    }

    fn header(active: bool) -> Style {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        if active { bold.add_modifier(Modifier::UNDERLINED) } else { bold }
    }

    /// The selected row: plainly where keys go, and faintly in the other list.
    fn selected(active: bool) -> Style {
        Style::new().add_modifier(if active { Modifier::REVERSED } else { Modifier::UNDERLINED })
    }
}

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, model: &mut Model, look: Look, now: Timestamp) {
    let area = frame.area();
    let for_nodes = if area.height < LOW {
        0
    } else {
        let wanted = u16::try_from(model.nodes.len()).unwrap_or(u16::MAX).saturating_add(1);
        wanted.clamp(2, ((area.height - AROUND) / 3).max(2))
    };
    let rows = [
        Constraint::Length(1),
        Constraint::Length(for_nodes),
        Constraint::Min(0),
        Constraint::Length(1),
        Constraint::Length(1),
    ];
    let [above, nodes, instances, told, keys] = Layout::vertical(rows).areas(area);
    frame.render_widget(Line::styled(summary(model), Style::new().add_modifier(Modifier::BOLD)), above);
    draw_nodes(frame, nodes, model, look);
    draw_instances(frame, instances, model, look, now);
    let (line, mood) = telling(model);
    frame.render_widget(Line::styled(line, look.of(mood)), told);
    let footer = if matches!(model.mode, Mode::Text(_)) { ABOVE } else { KEYS };
    frame.render_widget(Line::styled(footer, Style::new().add_modifier(Modifier::DIM)), keys);
    if let Mode::Text(text) = &model.mode {
        draw_text(frame, area, text);
    }
}

/// The whole cluster in a line.
fn summary(model: &Model) -> String {
    let alive = model.nodes.iter().filter(|node| node.alive).count();
    let mut states: BTreeMap<&str, usize> = BTreeMap::new();
    for view in model.views.values() {
        *states.entry(&view.state).or_default() += 1;
    }
    let states: Vec<String> = states.into_iter().map(|(state, count)| format!("{count} {state}")).collect();
    let of_all = |class: &str, show: fn(u64) -> String| {
        let sum = |pick: fn(&NodeView, &str) -> u64| model.nodes.iter().map(|node| pick(node, class)).sum();
        format!("{}/{}", show(sum(used)), show(sum(capacity)))
    };
    format!(
        "nodes {alive}/{} alive  VCPU {}  MEM {}  DISK {}  instances {}{}{}",
        model.nodes.len(),
        of_all("VCPU", |count| count.to_string()),
        of_all("MEMORY_MB", mebibytes),
        of_all("DISK_GB", gibibytes),
        model.views.len(),
        if states.is_empty() { "" } else { ": " },
        states.join(", "),
    )
}

fn used(node: &NodeView, class: &str) -> u64 {
    node.used.get(class).copied().unwrap_or(0)
}

fn capacity(node: &NodeView, class: &str) -> u64 {
    node.capacity.get(class).copied().unwrap_or(0)
}

fn gibibytes(amount: u64) -> String {
    mebibytes(amount.saturating_mul(1024))
}

/// The columns of nodes: their titles, how wide they are, and how wide without bars.
const OF_NODES: [(&str, u16, u16); 7] = [
    ("NODE", 10, 10),
    ("STATE", 6, 6),
    ("VCPU", 14, 7),
    ("MEMORY", 17, 10),
    ("DISK", 17, 10),
    ("INST", 4, 4),
    ("LOAD", 5, 5),
];
/// The same, those that are worth the most first.
const BY_WORTH: [usize; 7] = [0, 1, 2, 3, 5, 6, 4];

/// Which columns of nodes fit, and whether with bars: where there is no room for all, bars go first.
fn of_nodes(width: u16) -> (Vec<usize>, bool) {
    let needed = |columns: &[usize], of: fn(&(&str, u16, u16)) -> u16| {
        columns.iter().map(|column| of(&OF_NODES[*column]) + 1).sum::<u16>() - 1
    };
    let has_bars = needed(&BY_WORTH, |column| column.1) <= width;
    let mut fit = BY_WORTH.to_vec();
    while !has_bars && fit.len() > 1 && needed(&fit, |column| column.2) > width {
        fit.pop();
    }
    fit.sort_unstable();
    (fit, has_bars)
}

/// How much of it is taken.
fn amount(node: &NodeView, class: &str, show: fn(u64) -> String, has_bar: bool) -> String {
    let (used, capacity) = (used(node, class), capacity(node, class));
    if capacity == 0 && used == 0 {
        return "-".to_owned();
    }
    let amount = format!("{}/{}", show(used), show(capacity));
    if !has_bar {
        return amount;
    }
    // What is taken at all is seen, and only what is full is seen as that.
    let full = (used.saturating_mul(BAR).div_ceil(capacity.max(1))).min(BAR);
    let full = if full == BAR && used < capacity { BAR - 1 } else { full };
    let cells: String = (0..BAR).map(|cell| if cell < full { '|' } else { ' ' }).collect();
    format!("[{cells}] {amount}")
}

fn draw_nodes(frame: &mut Frame<'_>, area: Rect, model: &mut Model, look: Look) {
    let active = model.pane == Pane::Nodes;
    let ids = model.node_ids();
    let (seen, selected) = model.node.window(&ids, usize::from(area.height.saturating_sub(1)));
    model.seen = seen.iter().copied().collect();
    let (columns, has_bars) = of_nodes(area.width);
    let rows = seen.iter().enumerate().filter_map(|(at, id)| {
        let node = model.nodes.iter().find(|view| view.node == *id)?;
        let state = state_of(node);
        let mood = match state {
            "alive" => Some(Mood::Well),
            "down" => Some(Mood::Trouble),
            _ => Some(Mood::UnderWay),
        };
        let load = model.load(*id).map_or_else(|| "-".to_owned(), |load| format!("{load:.2}"));
        let cells = [
            Span::raw(plain(&model.node_name(*id))),
            Span::styled(state, look.of(mood)),
            Span::raw(amount(node, "VCPU", |count| count.to_string(), has_bars)),
            Span::raw(amount(node, "MEMORY_MB", mebibytes, has_bars)),
            Span::raw(amount(node, "DISK_GB", gibibytes, has_bars)),
            Span::raw(node.instances.to_string()),
            Span::raw(load),
        ];
        let cells = columns.iter().map(|column| cells[*column].clone()).collect::<Vec<_>>();
        let style = if selected == Some(at) { Look::selected(active) } else { Style::new() };
        Some(Row::new(cells).style(style))
    });
    let widths = columns.iter().map(|column| match OF_NODES[*column] {
        _ if *column == 0 => Constraint::Fill(1),
        (_, with_bar, without) => Constraint::Length(if has_bars { with_bar } else { without }),
    });
    let header = Row::new(columns.iter().map(|column| OF_NODES[*column].0));
    frame.render_widget(Table::new(rows, widths).header(header.style(Look::header(active))), area);
}

fn draw_instances(frame: &mut Frame<'_>, area: Rect, model: &mut Model, look: Look, now: Timestamp) {
    let active = model.pane == Pane::Instances;
    let all = model.instances();
    let (seen, selected) = model.instance.window(&all, usize::from(area.height.saturating_sub(1)));
    model.seen.extend(seen.iter().filter_map(|id| model.views.get(id)?.node));
    let columns = Column::fitting(area.width);
    let rows = seen.iter().enumerate().filter_map(|(at, id)| {
        let view = model.views.get(id)?;
        let node = view.node.map_or_else(|| "-".to_owned(), |node| model.node_name(node));
        let cells: Vec<Line<'_>> = columns
            .iter()
            .map(|column| {
                let text = column.cell((view, &node, model.rate(view)), now);
                let mood = if *column == Column::State { mood(&text) } else { None };
                // Of a node that is not alive nobody keeps it up to date: whether it is well nobody knows.
                let mood = mood.filter(|mood| view.node_alive || *mood == Mood::Trouble);
                aligned(*column, text).style(look.of(mood))
            })
            .collect();
        let style = if selected == Some(at) { Look::selected(active) } else { Style::new() };
        Some(Row::new(cells).style(style))
    });
    let widths = columns.iter().map(|column| match column {
        Column::Name | Column::Doing => Constraint::Min(column.width().min(area.width)),
        _ => Constraint::Length(column.width()),
    });
    let titles = columns.iter().map(|column| {
        let sorted = *column == model.sort;
        let mark = match (sorted, model.reverse) {
            (false, _) => "",
            (true, false) => "*",
            (true, true) => "^",
        };
        aligned(*column, format!("{}{mark}", column.title()))
    });
    let header = Row::new(titles).style(Look::header(active));
    frame.render_widget(Table::new(rows, widths).header(header), area);
}

fn aligned(column: Column, text: String) -> Line<'static> {
    let line = Line::raw(text);
    if column.is_number() { line.right_aligned() } else { line }
}

/// The line above the keys: what is asked, what is wrong, what came of the last thing, or why the selected is as it is.
fn telling(model: &mut Model) -> (String, Option<Mood>) {
    match &model.mode {
        Mode::Filter => return (format!("/{}_", plain(&model.text)), None),
        Mode::Ask(action, instance) => {
            let place = model.views.get(instance).and_then(|view| view.node);
            let place = place.map(|node| format!(" on {}", model.node_name(node))).unwrap_or_default();
            let question = format!(
                "{} {} ({instance}){place}? y: yes, any other key: no",
                action.word(),
                model.name(*instance)
            );
            return (plain(&question), Some(Mood::UnderWay));
        }
        Mode::Browse | Mode::Text(_) => {}
    }
    let mut words: Vec<String> = model.trouble.iter().map(|why| format!("not live: {why}")).collect();
    words.extend(model.note.clone());
    let mood = model.trouble.as_ref().map(|_| Mood::Trouble);
    if words.is_empty() {
        if !model.text.is_empty() {
            words.push(format!("filter: {}", model.text));
        }
        let all = model.instances();
        let view = model.instance.selected(&all).and_then(|id| model.views.get(&id));
        if let Some(view) = view.filter(|_| model.pane == Pane::Instances) {
            let why = reason_and_doing(view);
            if !why.is_empty() {
                words.push(format!("{}: {why}", model.name(view.instance)));
            }
        }
    }
    (plain(&words.join(" - ")), mood)
}

fn draw_text(frame: &mut Frame<'_>, area: Rect, text: &Text) {
    let [inside] =
        Layout::vertical([Constraint::Fill(1)]).areas(Rect { height: area.height.saturating_sub(1), ..area });
    let lines: Vec<Line<'_>> =
        text.lines.iter().skip(text.first).map(|line| Line::raw(plain(line))).collect();
    frame.render_widget(Clear, inside);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(plain(&text.title))), inside);
}
