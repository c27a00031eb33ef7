//! What the model looks like.

use std::collections::{BTreeMap, BTreeSet};

use ec_cloud::NodeView;
use jiff::Timestamp;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Row, Table, Wrap},
};

use super::{
    columns::{Column, mebibytes},
    model::{Mode, Model, Pane, Text, state_of},
};
use crate::output::{Mood, mood, plain, reason_and_doing};

/// Below this height all room is the instances'.
const LOW: u16 = 10;
/// Rows that are not of nodes or instances, nor of what is told: the summary, the keys.
const AROUND: u16 = 2;
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
    let (told, mood) = telling(model);
    let told = folded(&told, area.width, (area.height / 3).max(1));
    let for_told = u16::try_from(told.len()).unwrap_or(1);
    let for_nodes = if area.height < LOW {
        0
    } else {
        let wanted = u16::try_from(model.nodes.len()).unwrap_or(u16::MAX).saturating_add(1);
        wanted.clamp(2, (area.height.saturating_sub(AROUND + for_told) / 3).max(2))
    };
    let rows = [
        Constraint::Length(1),
        Constraint::Length(for_nodes),
        Constraint::Min(0),
        Constraint::Length(for_told),
        Constraint::Length(1),
    ];
    let [above, nodes, instances, below, keys] = Layout::vertical(rows).areas(area);
    frame.render_widget(Line::styled(summary(model), Style::new().add_modifier(Modifier::BOLD)), above);
    draw_nodes(frame, nodes, model, look);
    draw_instances(frame, instances, model, look, now);
    frame.render_widget(Paragraph::new(told).style(look.of(mood)), below);
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
    let of_all = |class: &str, show: Written| {
        // Each node of a storage that several share has all of that in its numbers.
        let mut shared = BTreeSet::new();
        let (used, capacity) = model
            .nodes
            .iter()
            .map(|node| (node, used(node, class), capacity(node, class)))
            .filter(|(node, _, capacity)| {
                let storage = node.storage.as_ref().filter(|_| class == "DISK_GB" && *capacity > 0);
                storage.is_none_or(|storage| shared.insert(storage))
            })
            .fold((0_u64, 0_u64), |all, (_, used, capacity)| {
                (all.0.saturating_add(used), all.1.saturating_add(capacity))
            });
        format!("{}/{}", show(used), show(capacity))
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

/// The columns of nodes: their titles, how wide they are, and how wide without bars; of numbers, at least.
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
/// How an amount is written.
type Written = fn(u64) -> String;
/// Whose numbers may have a bar, and of what they are.
const AMOUNTS: [(usize, &str, Written); 3] =
    [(2, "VCPU", |count| count.to_string()), (3, "MEMORY_MB", mebibytes), (4, "DISK_GB", gibibytes)];
/// The first column of numbers, which are shown whole: with a digit or a unit less they would be others.
const NUMBERS: usize = 2;

/// Which columns of nodes fit and how wide each is, where their longest texts are so long, and whether with bars: where there is no
/// room for all, bars go first.
fn of_nodes(width: u16, longest: [u16; 7]) -> (Vec<(usize, u16)>, bool) {
    let wide = |column: usize, has_bars: bool| {
        let (_, with_bar, without) = OF_NODES[column];
        let least = if has_bars { with_bar } else { without };
        if column < NUMBERS { least } else { least.max(longest[column]) }
    };
    let needed = |columns: &[usize], has_bars: bool| {
        columns.iter().map(|column| wide(*column, has_bars).saturating_add(1)).fold(0, u16::saturating_add)
            - 1
    };
    let has_bars = needed(&BY_WORTH, true) <= width;
    let mut fit = BY_WORTH.to_vec();
    while !has_bars && fit.len() > 1 && needed(&fit, false) > width {
        fit.pop();
    }
    fit.sort_unstable();
    (fit.into_iter().map(|column| (column, wide(column, has_bars))).collect(), has_bars)
}

/// How much of it is taken.
fn amount(node: &NodeView, class: &str, show: Written) -> String {
    match (used(node, class), capacity(node, class)) {
        (0, 0) => "-".to_owned(),
        (used, capacity) => format!("{}/{}", show(used), show(capacity)),
    }
}

/// The same as a bar, where there is something to take.
fn bar(node: &NodeView, class: &str) -> Option<String> {
    let (used, capacity) = (used(node, class), capacity(node, class));
    if capacity == 0 && used == 0 {
        return None;
    }
    // What is taken at all is seen, and only what is full is seen as that.
    let full = (used.saturating_mul(BAR).div_ceil(capacity.max(1))).min(BAR);
    let full = if full == BAR && used < capacity { BAR - 1 } else { full };
    let cells: String = (0..BAR).map(|cell| if cell < full { '|' } else { ' ' }).collect();
    Some(format!("[{cells}]"))
}

/// What stands in the columns of a node, without bars.
fn cells_of(model: &Model, node: &NodeView) -> [String; 7] {
    let load = model.load(node.node).map_or_else(|| "-".to_owned(), |load| format!("{load:.2}"));
    let [vcpu, memory, disk] = AMOUNTS.map(|(_, class, show)| amount(node, class, show));
    let name = plain(&model.node_name(node.node));
    [name, state_of(node).to_owned(), vcpu, memory, disk, node.instances.to_string(), load]
}

fn draw_nodes(frame: &mut Frame<'_>, area: Rect, model: &mut Model, look: Look) {
    let active = model.pane == Pane::Nodes;
    let ids = model.node_ids();
    let (seen, selected) = model.node.window(&ids, usize::from(area.height.saturating_sub(1)));
    model.seen = seen.iter().copied().collect();
    let of_id = |id| model.nodes.iter().find(|view| view.node == id);
    let texts: Vec<_> =
        seen.iter().filter_map(|id| of_id(*id)).map(|node| (node, cells_of(model, node))).collect();
    let longest = std::array::from_fn(|column| {
        let all = texts.iter().map(|(_, cells)| cells[column].len()).max();
        all.map_or(0, |longest| u16::try_from(longest).unwrap_or(u16::MAX))
    });
    let (columns, has_bars) = of_nodes(area.width, longest);
    let rows = texts.iter().enumerate().map(|(at, (node, texts))| {
        let mood = match state_of(node) {
            "alive" => Mood::Well,
            "down" => Mood::Trouble,
            _ => Mood::UnderWay,
        };
        let cells = columns.iter().map(|(column, width)| {
            let text = &texts[*column];
            let class = AMOUNTS.iter().find(|(of, ..)| of == column).map(|(_, class, _)| *class);
            let with_bar = class.filter(|_| has_bars).and_then(|class| bar(node, class));
            let with_bar = with_bar.map(|bar| format!("{bar} {text}"));
            // Where both do not fit, the number.
            let text =
                with_bar.filter(|both| both.len() <= usize::from(*width)).unwrap_or_else(|| text.clone());
            Span::styled(text, look.of((*column == 1).then_some(mood)))
        });
        let style = if selected == Some(at) { Look::selected(active) } else { Style::new() };
        Row::new(cells).style(style)
    });
    let widths = columns.iter().map(|(column, width)| match column {
        0 => Constraint::Fill(1),
        _ => Constraint::Length(*width),
    });
    let header = Row::new(columns.iter().map(|(column, _)| OF_NODES[*column].0));
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

/// A text in lines of this width, as many as there is room for; one at least.
fn folded(text: &str, width: u16, room: u16) -> Vec<Line<'static>> {
    let mut lines = vec![String::new()];
    let mut left = usize::from(width);
    for letter in text.chars() {
        let wide = Span::raw(letter.to_string()).width();
        if wide > left {
            if lines.len() >= usize::from(room) {
                break;
            }
            lines.push(String::new());
            left = usize::from(width);
        }
        left = left.saturating_sub(wide);
        lines.last_mut().into_iter().for_each(|line| line.push(letter));
    }
    lines.into_iter().map(Line::raw).collect()
}

/// What stands above the keys: what is asked, what is wrong, what came of the last thing, or why the selected is as it is.
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
    let whole = Paragraph::new(lines).wrap(Wrap { trim: false });
    frame.render_widget(whole.block(Block::bordered().title(plain(&text.title))), inside);
}
