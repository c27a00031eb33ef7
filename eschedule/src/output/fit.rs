//! How wide the columns of a table are where there is no room for all of each.

/// Blanks between two columns.
pub(super) const GAP: usize = 2;

/// What is cut to fewer characters says nothing any more.
const LEAST: usize = 8;

/// How wide each column is, so that all of them together are not wider than `room`; none of those that are left out. Those
/// that are worth the least go first, and what is left is shared by all but the `whole`, which are never cut. The one
/// that is worth the most always stays, cut if it must be.
pub(super) fn fitted(widths: &[usize], whole: &[usize], worth: &[usize], room: usize) -> Vec<Option<usize>> {
    let least = |column: &usize| match widths[*column] {
        width if whole.contains(column) => width,
        width => width.min(LEAST),
    };
    let needed = |shown: &[usize]| total(shown.iter().map(least));
    let mut shown = worth.to_vec();
    while shown.len() > 1 && needed(&shown) > room {
        shown.pop();
    }
    let mut fit = vec![None; widths.len()];
    for column in &shown {
        fit[*column] = Some(least(column).min(room).max(1));
    }
    let mut left = room.saturating_sub(needed(&shown));
    loop {
        let before = left;
        for (fit, width) in fit.iter_mut().zip(widths) {
            if let Some(fit) = fit.as_mut().filter(|fit| **fit < *width && left > 0) {
                (*fit, left) = (*fit + 1, left - 1);
            }
        }
        if left == before {
            return fit;
        }
    }
}

/// How wide such columns are together.
pub(super) fn total(widths: impl Iterator<Item = usize>) -> usize {
    widths.map(|width| width + GAP).sum::<usize>().saturating_sub(GAP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_worth_least_goes_first_and_what_is_left_is_shared() {
        let (widths, worth) = ([8, 20, 8, 13, 40], [0, 1, 3, 4, 2]);
        let fit = |room| fitted(&widths, &[0, 3], &worth, room);
        assert_eq!(fit(97), widths.map(Some), "there is room for all of each");
        assert_eq!(fit(96), [Some(8), Some(20), Some(8), Some(13), Some(39)]);
        assert_eq!(fit(53), [Some(8), Some(8), Some(8), Some(13), Some(8)]);
        assert_eq!(fit(52), [Some(8), Some(13), None, Some(13), Some(12)]);
        assert_eq!(fit(42), [Some(8), Some(17), None, Some(13), None]);
        assert_eq!(fit(20), [Some(8), Some(10), None, None, None]);
        assert_eq!(fit(5), [Some(5), None, None, None, None]);
        assert_eq!(fit(0), [Some(1), None, None, None, None]);
    }

    #[test]
    fn nothing_is_wider_than_its_room() {
        let widths = [36, 63, 12, 13, 15, 200];
        for room in 1..400 {
            let fit = fitted(&widths, &[0, 3, 4], &[1, 0, 3, 4, 5, 2], room);
            assert!(total(fit.iter().flatten().copied()) <= room, "{room}: {fit:?}");
            assert!(fit[1].is_some_and(|width| width >= room.min(LEAST)), "{room}: {fit:?}");
        }
    }
}
