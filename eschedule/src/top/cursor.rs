//! Which row of a list is selected, and which of its rows are seen.

/// Follows what is selected, wherever that comes to stand.
#[derive(Debug)]
pub(super) struct Cursor<K> {
    selected: Option<K>,
    /// Where it stood last: what stands there is next where it is gone.
    at: usize,
    /// The first row that is seen.
    first: usize,
}

impl<K> Default for Cursor<K> {
    fn default() -> Self {
        Self { selected: None, at: 0, first: 0 }
    }
}

/// How far to go.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    Up(usize),
    Down(usize),
    Begin,
    End,
}

impl<K: Copy + PartialEq> Cursor<K> {
    /// What is selected of these rows.
    pub(super) fn selected(&mut self, rows: &[K]) -> Option<K> {
        let found = self.selected.and_then(|selected| rows.iter().position(|row| *row == selected));
        self.at = found.unwrap_or(self.at).min(rows.len().saturating_sub(1));
        self.selected = rows.get(self.at).copied();
        self.selected
    }

    /// Selects another.
    pub(super) fn step(&mut self, rows: &[K], step: Step) {
        self.selected(rows);
        let last = rows.len().saturating_sub(1);
        self.at = match step {
            Step::Up(rows) => self.at.saturating_sub(rows),
            Step::Down(rows) => self.at.saturating_add(rows).min(last),
            Step::Begin => 0,
            Step::End => last,
        };
        self.selected = rows.get(self.at).copied();
    }

    /// The rows that are seen where there is room for so many, with the selected one among them, and which of them it is.
    pub(super) fn window<'r>(&mut self, rows: &'r [K], room: usize) -> (&'r [K], Option<usize>) {
        let selected = self.selected(rows);
        let room = room.min(rows.len());
        if room == 0 {
            return (&[], None);
        }
        self.first = self.first.clamp((self.at + 1).saturating_sub(room), self.at).min(rows.len() - room);
        let seen = &rows[self.first..self.first + room];
        (seen, selected.map(|_| self.at - self.first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_selection_follows_its_row_and_goes_to_its_neighbour_when_that_is_gone() {
        let mut cursor = Cursor::default();
        assert_eq!(cursor.selected(&[] as &[u8]), None);
        assert_eq!(cursor.selected(&[7, 8, 9]), Some(7));
        cursor.step(&[7, 8, 9], Step::Down(1));
        assert_eq!(cursor.selected(&[9, 1, 8, 7]), Some(8));
        assert_eq!(cursor.selected(&[9, 1, 7]), Some(7));
        assert_eq!(cursor.selected(&[9]), Some(9));
        cursor.step(&[9, 1, 2], Step::End);
        assert_eq!(cursor.selected(&[9, 1, 2]), Some(2));
        cursor.step(&[9, 1, 2], Step::Up(100));
        assert_eq!(cursor.selected(&[9, 1, 2]), Some(9));
    }

    #[test]
    fn what_is_selected_is_seen_in_any_room() {
        let rows: Vec<usize> = (0..100).collect();
        let mut cursor = Cursor::default();
        assert_eq!(cursor.window(&rows, 3), (&rows[0..3], Some(0)));
        cursor.step(&rows, Step::Down(4));
        assert_eq!(cursor.window(&rows, 3), (&rows[2..5], Some(2)));
        cursor.step(&rows, Step::Up(1));
        assert_eq!(cursor.window(&rows, 3), (&rows[2..5], Some(1)), "it is seen already");
        assert_eq!(cursor.window(&rows, 0), (&[][..], None));
        cursor.step(&rows, Step::End);
        assert_eq!(cursor.window(&rows, 10), (&rows[90..], Some(9)));
        assert_eq!(cursor.window(&rows[..5], 10), (&rows[..5], Some(4)));
        assert_eq!(cursor.window(&[], 10), (&[][..], None));
    }
}
