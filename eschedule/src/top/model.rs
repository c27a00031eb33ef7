//! What is known, what of it is shown, and what a key means. Nothing here knows of a terminal or a network.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ec_cloud::{Filter, NodeView, View};
use ec_model::{InstanceId, NodeId};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{
    columns::Column,
    cursor::{Cursor, Step},
    rates::{Meter, Rate, Reading},
};
use crate::output::or_dash;

/// Rows that PgUp and PgDn go.
const PAGE: usize = 10;

/// All that is on the screen.
#[derive(Default)]
pub(super) struct Model {
    /// What the command line asked for.
    pub(super) filter: Filter,
    pub(super) views: BTreeMap<InstanceId, View>,
    pub(super) nodes: Vec<NodeView>,
    meters: HashMap<NodeId, Meter>,
    /// What is looked for in names, uuids, nodes and states.
    pub(super) text: String,
    pub(super) sort: Column,
    pub(super) reverse: bool,
    pub(super) pane: Pane,
    pub(super) mode: Mode,
    /// What came of the last thing that was asked for.
    pub(super) note: Option<String>,
    /// Why nothing new is heard.
    pub(super) trouble: Option<String>,
    pub(super) instance: Cursor<InstanceId>,
    pub(super) node: Cursor<NodeId>,
    /// The nodes that were drawn, and those of the instances that were.
    pub(super) seen: BTreeSet<NodeId>,
}

/// Whose agents are asked what their guests use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Asked {
    /// Nothing of them was drawn yet.
    #[default]
    Nobody,
    These(BTreeSet<NodeId>),
    All,
}

impl Asked {
    pub(super) fn has(&self, node: NodeId) -> bool {
        match self {
            Self::Nobody => false,
            Self::These(nodes) => nodes.contains(&node),
            Self::All => true,
        }
    }
}

/// Where arrows go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Pane {
    Nodes,
    #[default]
    Instances,
}

/// What keys are taken for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    Browse,
    /// They are the text to look for.
    Filter,
    /// An answer, whether this shall be done.
    Ask(Action, InstanceId),
    /// They move a text.
    Text(Text),
}

/// A text above everything else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Text {
    pub(super) title: String,
    pub(super) lines: Vec<String>,
    /// The first line that is seen.
    pub(super) first: usize,
}

/// What can be done to an instance from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Start,
    Stop,
    Reboot,
    Destroy,
}

impl Action {
    /// The word of the command line for it.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Reboot => "reboot",
            Self::Destroy => "destroy",
        }
    }
}

/// What somebody else is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wish {
    Quit,
    /// Leave the terminal to the shell for a while.
    Suspend,
    Act(Action, InstanceId),
    Show(InstanceId),
    Console(InstanceId),
    Logs(InstanceId),
}

/// What `?` says.
const HELP: &[&str] = &[
    "Up, Down, PgUp, PgDn, Home, End   select another",
    "Tab                               go between nodes and instances",
    "/                                 show only what has a text in its name, uuid, node or state",
    "o, r                              order by another column, the other way round",
    "Enter                             everything that is known of the selected",
    "s                                 start it",
    "S                                 stop it: ask its guest to end, and end it after 60 s",
    "b                                 reboot it: the same, and start it again",
    "d                                 destroy it",
    "l                                 what its guest prints, until Ctrl-C",
    "c                                 its console, until Ctrl-]",
    "q, Esc, Ctrl-C                    leave",
    "",
    "What is done to an instance is asked about before. CPU% is of one of the host's processors; DISK/S and NET/S are",
    "bytes per second. `-` stands where a node's agent cannot be reached, or has not been asked twice yet.",
];

impl Model {
    /// Nothing yet; of the instances those are shown that the filter takes.
    pub(super) fn new(filter: Filter) -> Self {
        Self { filter, ..Self::default() }
    }

    /// An instance is so now.
    pub(super) fn is(&mut self, mut view: View) {
        view.node_alive = self.is_alive(view.node);
        self.views.insert(view.instance, view);
    }

    /// Whether a node is alive; of one that nobody has told of yet that is to be seen.
    fn is_alive(&self, node: Option<NodeId>) -> bool {
        self.nodes.iter().find(|view| Some(view.node) == node).is_none_or(|view| view.alive)
    }

    /// Nothing speaks of it any more.
    pub(super) fn gone(&mut self, instance: InstanceId) {
        self.views.remove(&instance);
    }

    /// The nodes are so now.
    pub(super) fn nodes(&mut self, nodes: Vec<NodeView>) {
        self.meters.retain(|node, _| nodes.iter().any(|view| view.node == *node && view.alive));
        self.nodes = nodes;
        let alive: HashMap<_, _> = self.nodes.iter().map(|view| (view.node, view.alive)).collect();
        for view in self.views.values_mut() {
            view.node_alive = view.node.and_then(|node| alive.get(&node).copied()).unwrap_or(true);
        }
        self.trouble = None;
    }

    /// Who has to be asked for what was drawn: of thousands those on the screen, unless what all use says which these are.
    pub(super) fn asked(&self) -> Asked {
        match (self.nodes.is_empty(), self.sort.is_measured()) {
            (true, _) => Asked::Nobody,
            (false, true) => Asked::All,
            (false, false) => Asked::These(self.seen.clone()),
        }
    }

    /// What those say who were asked. Of the others nothing is known any more.
    pub(super) fn readings(&mut self, readings: Vec<(NodeId, Option<Reading>)>) {
        self.meters.retain(|node, _| readings.iter().any(|(of, _)| of == node));
        for (node, reading) in readings {
            self.read(node, reading);
        }
    }

    /// What an agent says that its guests have used; none where it cannot be reached.
    pub(super) fn read(&mut self, node: NodeId, reading: Option<Reading>) {
        match (reading, self.meters.get_mut(&node)) {
            (Some(reading), Some(meter)) => meter.read(reading),
            (Some(reading), None) => _ = self.meters.insert(node, Meter::new(reading)),
            (None, _) => _ = self.meters.remove(&node),
        }
    }

    /// The load of a node's host.
    pub(super) fn load(&self, node: NodeId) -> Option<f64> {
        self.meters.get(&node)?.last.load1
    }

    /// What an instance uses.
    pub(super) fn rate(&self, view: &View) -> Option<Rate> {
        self.meters.get(&view.node?)?.rate(view.instance)
    }

    /// What a node is called.
    pub(super) fn node_name(&self, node: NodeId) -> String {
        let known = self.nodes.iter().find(|view| view.node == node && view.name != "-");
        known.map_or_else(|| node.to_string(), |view| view.name.clone())
    }

    /// What an instance is called.
    pub(super) fn name(&self, instance: InstanceId) -> String {
        crate::output::called(self.views.get(&instance).and_then(|view| view.name.as_ref()), instance)
    }

    /// The instances that are shown, in their order.
    pub(super) fn instances(&self) -> Vec<InstanceId> {
        let text = self.text.to_lowercase();
        let names: HashMap<NodeId, &str> =
            self.nodes.iter().map(|view| (view.node, view.name.as_str())).collect();
        let node_of = |view: &View| view.node.and_then(|node| names.get(&node).copied()).unwrap_or("-");
        let has = |view: &&View| {
            let uuids = [Some(view.instance.to_string()), view.node.map(|node| node.to_string())];
            let mut words = [view.name.as_deref().unwrap_or(""), node_of(view), &view.state]
                .map(str::to_lowercase)
                .into_iter()
                .chain(uuids.into_iter().flatten());
            text.is_empty() || words.any(|word| word.contains(&text))
        };
        let mut shown: Vec<(&View, Option<Rate>)> = self
            .views
            .values()
            .filter(|view| self.filter.takes(view))
            .filter(has)
            .map(|view| (view, self.rate(view)))
            .collect();
        shown.sort_by(|a, b| {
            let order = self.sort.order((a.0, node_of(a.0), a.1), (b.0, node_of(b.0), b.1));
            let order = if self.reverse { order.reverse() } else { order };
            order.then_with(|| (&a.0.name, a.0.instance).cmp(&(&b.0.name, b.0.instance)))
        });
        shown.into_iter().map(|(view, _)| view.instance).collect()
    }

    /// The nodes, in their order.
    pub(super) fn node_ids(&self) -> Vec<NodeId> {
        self.nodes.iter().map(|view| view.node).collect()
    }

    /// What a key brings about here; what somebody else is to do for it.
    pub(super) fn key(&mut self, key: KeyEvent) -> Option<Wish> {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return Some(Wish::Quit),
            KeyCode::Char('z') if control => return Some(Wish::Suspend),
            KeyCode::Char(_) if control => return None,
            _ => {}
        }
        self.note = None;
        match std::mem::take(&mut self.mode) {
            Mode::Browse => self.browse(key.code),
            Mode::Filter => {
                self.filtering(key.code);
                None
            }
            Mode::Ask(action, instance) => match key.code {
                KeyCode::Char('y' | 'Y') => Some(Wish::Act(action, instance)),
                _ => {
                    self.note = Some(format!("{}: not done", action.word()));
                    None
                }
            },
            Mode::Text(text) => {
                self.scroll(text, key.code);
                None
            }
        }
    }

    fn browse(&mut self, key: KeyCode) -> Option<Wish> {
        match key {
            KeyCode::Char('q') | KeyCode::Esc => return Some(Wish::Quit),
            KeyCode::Tab | KeyCode::BackTab => {
                self.pane = match self.pane {
                    Pane::Nodes => Pane::Instances,
                    Pane::Instances => Pane::Nodes,
                };
            }
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('o') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('?') => self.text("Keys", HELP.iter().map(|line| (*line).to_owned()).collect()),
            KeyCode::Enter if self.pane == Pane::Nodes => self.show_node(),
            KeyCode::Enter => return self.on_selected(Wish::Show),
            KeyCode::Char('l') => return self.on_selected(Wish::Logs),
            KeyCode::Char('c') => return self.on_selected(Wish::Console),
            KeyCode::Char(letter) => {
                let action = match letter {
                    's' => Action::Start,
                    'S' => Action::Stop,
                    'b' => Action::Reboot,
                    'd' => Action::Destroy,
                    _ => return None,
                };
                if let Some(instance) = self.selected() {
                    self.mode = Mode::Ask(action, instance);
                }
            }
            key => {
                if let Some(step) = step(key) {
                    match self.pane {
                        Pane::Nodes => self.node.step(&self.node_ids(), step),
                        Pane::Instances => self.instance.step(&self.instances(), step),
                    }
                }
            }
        }
        None
    }

    /// The instance that is selected; where there is none, that is told.
    fn selected(&mut self) -> Option<InstanceId> {
        let selected = match self.pane {
            Pane::Nodes => None,
            Pane::Instances => self.instance.selected(&self.instances()),
        };
        if selected.is_none() {
            self.note = Some(
                match self.pane {
                    Pane::Nodes => "that is done to instances: Tab goes there",
                    Pane::Instances => "no instance is selected",
                }
                .to_owned(),
            );
        }
        selected
    }

    fn on_selected(&mut self, wish: fn(InstanceId) -> Wish) -> Option<Wish> {
        self.selected().map(wish)
    }

    fn filtering(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => return,
            KeyCode::Esc => return self.text.clear(),
            KeyCode::Backspace => _ = self.text.pop(),
            KeyCode::Char(letter) => self.text.push(letter),
            _ => {}
        }
        self.mode = Mode::Filter;
    }

    /// Shows a text until a key is pressed that does not move it. Not to who types by now, or is asked something: their keys mean what
    /// they meant.
    pub(super) fn text(&mut self, title: &str, lines: Vec<String>) {
        if matches!(self.mode, Mode::Filter | Mode::Ask(..)) {
            return;
        }
        self.mode = Mode::Text(Text { title: title.to_owned(), lines, first: 0 });
    }

    fn scroll(&mut self, mut text: Text, key: KeyCode) {
        let Some(step) = step(key) else { return };
        let last = text.lines.len().saturating_sub(1);
        text.first = match step {
            Step::Up(lines) => text.first.saturating_sub(lines),
            Step::Down(lines) => text.first.saturating_add(lines).min(last),
            Step::Begin => 0,
            Step::End => last,
        };
        self.mode = Mode::Text(text);
    }

    fn show_node(&mut self) {
        let Some(id) = self.node.selected(&self.node_ids()) else { return };
        let Some(node) = self.nodes.iter().find(|view| view.node == id) else { return };
        let mut lines = vec![
            format!("node       {id}"),
            format!("name       {}", node.name),
            format!("state      {}", state_of(node)),
            format!("note       {}", or_dash(node.note.clone())),
            format!("agent      {}", or_dash(node.agent.clone())),
            format!("virt       {}", or_dash(node.virt_type.clone())),
            format!("since      {}", or_dash(node.started_at.map(crate::output::when))),
            format!("url        {}", or_dash(node.url.clone())),
            format!("load       {}", or_dash(self.load(id).map(|load| format!("{load:.2}")))),
            format!("instances  {}", node.instances),
        ];
        lines.extend(node.capacity.iter().map(|(class, capacity)| {
            format!("{class}  {} of {capacity}", node.used.get(class).copied().unwrap_or(0))
        }));
        let title = format!("Node {}", node.name);
        self.text(&title, lines);
    }
}

/// Whether a node takes instances.
pub(super) fn state_of(node: &NodeView) -> &'static str {
    match node {
        NodeView { alive: false, .. } => "down",
        NodeView { locked: true, .. } => "locked",
        NodeView { disabled: true, .. } => "disabled",
        _ => "alive",
    }
}

fn step(key: KeyCode) -> Option<Step> {
    Some(match key {
        KeyCode::Up => Step::Up(1),
        KeyCode::Down => Step::Down(1),
        KeyCode::PageUp => Step::Up(PAGE),
        KeyCode::PageDown => Step::Down(PAGE),
        KeyCode::Home => Step::Begin,
        KeyCode::End => Step::End,
        _ => return None,
    })
}
