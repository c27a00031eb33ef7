//! Tables, and what of them is cut or coloured on a terminal.

use std::io::IsTerminal;

use comfy_table::{Cell, Color, ColumnConstraint, ContentArrangement, Row, Table, Width, presets::NOTHING};
use ec_model::State;
use unicode_width::UnicodeWidthStr;

use super::fit::{GAP, fitted, total};

pub(super) fn row<const N: usize>(table: &mut Table, cells: [String; N]) {
    table.add_row(cells.map(|cell| plain(&cell)));
}

/// A table with one line for each of many. On a terminal it is as wide as that: uuids give way, then the columns that are
/// worth the least.
#[derive(Clone)]
pub(crate) struct List {
    table: Table,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    whole: &'static [usize],
    worth: &'static [usize],
    coloured: bool,
}

impl List {
    /// With these columns, of which `whole` are shown as they are or not at all, and `worth` are all, that worth the most first.
    pub(crate) fn new(header: &[&str], whole: &'static [usize], worth: &'static [usize]) -> Self {
        let mut table = table(header);
        // What is too wide is cut here.
        table.set_content_arrangement(ContentArrangement::Disabled);
        // Blanks have no colour.
        table.style_text_only();
        let header = header.iter().map(|name| (*name).to_owned()).collect();
        Self { table, header, rows: Vec::new(), whole, worth, coloured: coloured() }
    }

    /// Adds a line.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.iter().map(|cell| plain(cell)).collect());
    }

    /// All of it.
    pub(crate) fn text(mut self) -> String {
        if let Some(room) = self.table.width().filter(|width| *width > 0) {
            self.fit(usize::from(room));
        }
        let state = self.header.iter().position(|name| name == "STATE");
        for cells in self.rows {
            let cells = cells.into_iter().enumerate().map(|(number, text)| {
                let colour = colour(&text).filter(|_| self.coloured && state == Some(number));
                let cell = Cell::new(text);
                match colour {
                    Some(colour) => cell.fg(colour),
                    None => cell,
                }
            });
            let mut row = Row::from(cells);
            row.max_height(1);
            self.table.add_row(row);
        }
        trimmed(&self.table)
    }

    /// Makes it as narrow as that, where it is wider.
    fn fit(&mut self, room: usize) {
        if total(self.widths().into_iter()) <= room {
            return;
        }
        for cell in self.rows.iter_mut().flatten() {
            *cell = first_part(std::mem::take(cell));
        }
        for (number, width) in fitted(&self.widths(), self.whole, self.worth, room).into_iter().enumerate() {
            let Some(column) = self.table.column_mut(number) else { continue };
            // The library counts the blanks at both sides.
            let width = width.map(|width| u16::try_from(width + GAP).unwrap_or(u16::MAX));
            column.set_constraint(
                width.map_or(ColumnConstraint::Hidden, |width| {
                    ColumnConstraint::Absolute(Width::Fixed(width))
                }),
            );
        }
    }

    /// How wide each column would be.
    fn widths(&self) -> Vec<usize> {
        let mut widths = vec![0; self.header.len()];
        for cells in std::iter::once(&self.header).chain(&self.rows) {
            for (width, cell) in widths.iter_mut().zip(cells) {
                *width = (*width).max(cell.width());
            }
        }
        widths
    }
}

/// Of a uuid its beginning, which is understood wherever all of it is, as long as no other begins so.
fn first_part(text: String) -> String {
    match uuid::Uuid::try_parse(&text) {
        Ok(_) => text.chars().take(8).collect(),
        Err(_) => text,
    }
}

/// Whether people look, and want colours (<https://no-color.org>).
pub(crate) fn coloured() -> bool {
    std::io::stdout().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|terminal| terminal != "dumb")
}

fn colour(state: &str) -> Option<Color> {
    mood(state).map(|mood| match mood {
        Mood::Well => Color::Green,
        Mood::Trouble => Color::Red,
        Mood::UnderWay => Color::Yellow,
    })
}

/// What a colour tells of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    Well,
    Trouble,
    UnderWay,
}

/// What runs, what is in trouble, and what is on its way.
pub(crate) fn mood(state: &str) -> Option<Mood> {
    mood_of(State::named(state)?)
}

/// The same of a state.
pub(crate) fn mood_of(state: State) -> Option<Mood> {
    match state {
        State::Active => Some(Mood::Well),
        State::Error | State::Unclaimed | State::Unknown => Some(Mood::Trouble),
        State::Paused | State::Stopped | State::Suspended | State::Rescued => None,
        State::Scheduled
        | State::Preparing
        | State::Starting
        | State::Stopping
        | State::Rebooting
        | State::Suspending
        | State::Rebuilding
        | State::Rescuing
        | State::Unrescuing
        | State::Resizing
        | State::VerifyResize
        | State::Destroying => Some(Mood::UnderWay),
    }
}

/// Text that guests, servers and other people's records may have put together, without what would move a
/// terminal's cursor or break a line.
pub(crate) fn plain(text: &str) -> String {
    without_controls(text, &[])
}

pub(super) fn without_controls(text: &str, keep: &[char]) -> String {
    text.chars().map(|c| if c.is_control() && !keep.contains(&c) { ' ' } else { c }).collect()
}

pub(super) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    // As wide as a terminal; elsewhere, and where that does not know its width, as what is in it.
    let is_known = table.width() != Some(0);
    table.set_content_arrangement(if is_known {
        ContentArrangement::Dynamic
    } else {
        ContentArrangement::Disabled
    });
    if !header.is_empty() {
        let mut names = Row::from(header.to_vec());
        // Cut where there is no room, and not set letter below letter.
        names.max_height(1);
        table.set_header(names);
    }
    table
}

/// Without the blanks at both ends of the lines, of which each has one at its beginning.
pub(super) fn trimmed(table: &Table) -> String {
    let line = |line: String| line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned();
    table.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_guests_say_moves_no_cursor() {
        assert_eq!(plain("a\u{1b}[2Jb\r\n\u{9b}c"), "a [2Jb   c");
        assert_eq!(without_controls("login:\n\u{7}\tok", &['\n', '\t']), "login:\n \tok");
        let mut lines = List::new(&["A", "B"], &[], &[0, 1]);
        lines.row(["x\ny".to_owned(), "z".to_owned()]);
        assert_eq!(lines.text().lines().count(), 2);
    }

    #[test]
    fn a_list_that_is_too_wide_for_its_terminal_is_cut_where_it_may_be() {
        let mut list = List::new(&["INSTANCE", "REASON"], &[0], &[0, 1]);
        let long = "no image was there where one should have been";
        list.row(["7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".to_owned(), long.to_owned()]);
        let wide = list.clone().text();
        assert!(wide.ends_with(long), "elsewhere nothing is cut: {wide}");
        list.table.set_width(60);
        let text = list.clone().text();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        assert!(
            text.contains("\n7d3c1f0a  no image") && text.ends_with(long),
            "the beginning of a uuid is enough: {text}"
        );
        list.table.set_width(30);
        assert!(list.text().ends_with('…'));
    }

    #[test]
    fn a_list_is_never_wider_than_its_terminal_and_tells_of_what_it_is() {
        let mut list = List::new(&["INSTANCE", "NAME", "NODE", "STATE"], &[0, 3], &[1, 0, 3, 2]);
        let uuid = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";
        list.row([uuid, "a-name-that-is-long", uuid, "VERIFY_RESIZE"].map(str::to_owned));
        list.row([uuid, "広い名前です", uuid, "ACTIVE"].map(str::to_owned));
        for (width, wanted) in [
            (
                120,
                "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab  a-name-that-is-long  7d3c1f0a-2b4e-4c55-9a7e-0123456789ab  VERIFY_RESIZE",
            ),
            (60, "7d3c1f0a  a-name-that-is-long  7d3c1f0a  VERIFY_RESIZE"),
            (43, "7d3c1f0a  a-name-…  7d3c1f0a  VERIFY_RESIZE"),
            (40, "7d3c1f0a  a-name-that-is…  VERIFY_RESIZE"),
            (20, "7d3c1f0a  a-name-th…"),
        ] {
            list.table.set_width(width);
            let text = list.clone().text();
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!((lines.len(), lines[1]), (3, wanted), "{text}");
            assert!(
                lines.iter().all(|line| ratatui::text::Line::raw(*line).width() <= usize::from(width)),
                "{text}"
            );
        }
    }

    #[test]
    fn only_states_are_coloured_and_only_where_that_is_wanted() {
        let lines = |coloured| {
            let mut list = List { coloured, ..List::new(&["NAME", "STATE"], &[], &[0, 1]) };
            list.table.enforce_styling();
            list.row(["ACTIVE".to_owned(), "ERROR".to_owned()]);
            list.text()
        };
        assert!(!lines(false).contains('\u{1b}'));
        let line = lines(true);
        let line = line.lines().last().unwrap();
        assert!(line.starts_with("ACTIVE") && line.contains("\u{1b}[38;5;9mERROR\u{1b}[39m"), "{line:?}");
    }
}
