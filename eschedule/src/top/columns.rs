//! The columns of instances: what stands in them, how they are ordered, and which fit.

use std::cmp::Ordering;

use ec_cloud::View;
use jiff::Timestamp;

use super::rates::Rate;

/// One of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Column {
    #[default]
    Name,
    State,
    Node,
    Age,
    Address,
    Vcpu,
    Memory,
    Cpu,
    Disk,
    Net,
    Doing,
}

/// What a row is made of: the instance, its node's name, what it uses.
pub(super) type Row<'a> = (&'a View, &'a str, Option<Rate>);

impl Column {
    /// From left to right.
    pub(super) const ALL: [Self; 11] = [
        Self::Name,
        Self::State,
        Self::Node,
        Self::Age,
        Self::Address,
        Self::Vcpu,
        Self::Memory,
        Self::Cpu,
        Self::Disk,
        Self::Net,
        Self::Doing,
    ];

    /// Where there is no room for all, those that come first here are shown.
    const BY_WORTH: [Self; 11] = [
        Self::Name,
        Self::State,
        Self::Node,
        Self::Cpu,
        Self::Address,
        Self::Memory,
        Self::Vcpu,
        Self::Age,
        Self::Disk,
        Self::Net,
        Self::Doing,
    ];

    /// Whether it is what agents say that their guests use.
    pub(super) fn is_measured(self) -> bool {
        matches!(self, Self::Cpu | Self::Disk | Self::Net)
    }

    /// What stands above it.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Name => "NAME",
            Self::State => "STATE",
            Self::Node => "NODE",
            Self::Age => "AGE",
            Self::Address => "ADDRESS",
            Self::Vcpu => "VCPU",
            Self::Memory => "MEM",
            Self::Cpu => "CPU%",
            Self::Disk => "DISK/S",
            Self::Net => "NET/S",
            Self::Doing => "DOING",
        }
    }

    /// How wide it is, with room for the mark beside its title; of the name and the last, at least.
    pub(super) fn width(self) -> u16 {
        match self {
            Self::Name => 14,
            Self::State => 13,
            Self::Node => 10,
            Self::Age | Self::Vcpu | Self::Memory => 5,
            Self::Address => 15,
            Self::Cpu | Self::Net => 6,
            Self::Disk => 7,
            Self::Doing => 20,
        }
    }

    /// Whether numbers stand in it, the largest first.
    pub(super) fn is_number(self) -> bool {
        matches!(self, Self::Age | Self::Vcpu | Self::Memory | Self::Cpu | Self::Disk | Self::Net)
    }

    /// The one that is ordered by after this.
    pub(super) fn next(self) -> Self {
        let at = Self::ALL.iter().position(|column| *column == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }

    /// Those that fit.
    pub(super) fn fitting(width: u16) -> Vec<Self> {
        let mut left = width;
        let mut fit = Vec::new();
        for column in Self::BY_WORTH {
            let gap = u16::from(!fit.is_empty());
            match left.checked_sub(column.width() + gap) {
                Some(rest) => left = rest,
                // Narrower than a name: a part of that.
                None if fit.is_empty() => left = 0,
                None => break,
            }
            fit.push(column);
        }
        Self::ALL.into_iter().filter(|column| fit.contains(column)).collect()
    }

    /// What stands in it. Of a number all digits: with fewer it would be another.
    pub(super) fn cell(self, (view, node, rate): Row<'_>, now: Timestamp) -> String {
        let amount = |class: &str| view.resources.get(class).copied();
        let text = match self {
            Self::Name => Some(crate::output::called(view.name.as_ref(), view.instance)),
            Self::State => Some(view.state.clone()),
            Self::Node => Some(node.to_owned()),
            Self::Age => view.created_at.map(|since| age(now.duration_since(since).as_secs())),
            Self::Address => view.ip.map(|ip| ip.to_string()),
            Self::Vcpu => amount("VCPU").map(|count| count.to_string()),
            Self::Memory => amount("MEMORY_MB").map(mebibytes),
            Self::Cpu => rate.map(|rate| percent(rate.cpu)),
            Self::Disk => rate.map(|rate| bytes(rate.disk)),
            Self::Net => rate.map(|rate| bytes(rate.net)),
            Self::Doing => Some(crate::output::reason_and_doing(view)),
        };
        let text = text.unwrap_or_else(|| "-".to_owned());
        let room = usize::from(self.width());
        if self.is_number() && text.len() > room {
            return "#".repeat(room);
        }
        crate::output::plain(&text)
    }

    /// Which of two comes first; what is not known comes last.
    pub(super) fn order(self, a: Row<'_>, b: Row<'_>) -> Ordering {
        let amount = |row: Row<'_>, class: &str| row.0.resources.get(class).copied();
        let largest = |of: fn(Rate) -> f64| {
            let number = |row: Row<'_>| row.2.map_or(-1.0, of);
            number(b).total_cmp(&number(a))
        };
        match self {
            Self::Name => known_first(a.0.name.as_ref(), b.0.name.as_ref()),
            Self::State => a.0.state.cmp(&b.0.state),
            Self::Node => (a.0.node.is_none(), a.1, a.0.node).cmp(&(b.0.node.is_none(), b.1, b.0.node)),
            Self::Age => known_first(a.0.created_at, b.0.created_at),
            Self::Address => known_first(a.0.ip, b.0.ip),
            Self::Vcpu => amount(b, "VCPU").cmp(&amount(a, "VCPU")),
            Self::Memory => amount(b, "MEMORY_MB").cmp(&amount(a, "MEMORY_MB")),
            Self::Cpu => largest(|rate| rate.cpu),
            Self::Disk => largest(|rate| rate.disk),
            Self::Net => largest(|rate| rate.net),
            Self::Doing => known_first(a.0.doing.as_ref(), b.0.doing.as_ref()),
        }
    }
}

fn known_first<T: Ord>(a: Option<T>, b: Option<T>) -> Ordering {
    (a.is_none(), a).cmp(&(b.is_none(), b))
}

/// How long ago, in the largest unit that there is one of.
fn age(seconds: i64) -> String {
    const UNITS: [(i64, &str); 3] = [(86_400, "d"), (3600, "h"), (60, "m")];
    // Another machine's clock may be ahead.
    let seconds = seconds.max(0);
    let unit = UNITS.into_iter().find(|(unit, _)| seconds >= *unit);
    unit.map_or_else(|| format!("{seconds}s"), |(unit, name)| format!("{}{name}", seconds / unit))
}

/// Parts of a processor, and of many whole ones.
fn percent(amount: f64) -> String {
    // 999.95 would be shown as 1000.0.
    let digits = usize::from(amount < 999.95);
    format!("{amount:.digits$}")
}

/// An amount of memory.
pub(super) fn mebibytes(amount: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let bytes = amount as f64 * f64::from(1 << 20);
    self::bytes(bytes)
}

/// At most five characters.
pub(super) fn bytes(amount: f64) -> String {
    let mut amount = amount;
    for unit in ["", "K", "M", "G", "T"] {
        // 1023.5 would be shown as 1024.
        if amount < 1023.5 {
            let digits = usize::from(amount < 9.95 && !unit.is_empty());
            return format!("{amount:.digits$}{unit}");
        }
        amount /= 1024.0;
    }
    format!("{amount:.0}P")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_ages_are_short() {
        for (amount, wanted) in [
            (0.0, "0"),
            (1023.0, "1023"),
            (1023.9, "1.0K"),
            (1536.0, "1.5K"),
            (10_239.0, "10K"),
            (5e9, "4.7G"),
            (1e15, "909T"),
            (1e20, "88818P"),
        ] {
            assert_eq!(bytes(amount), wanted, "{amount}");
        }
        assert_eq!((mebibytes(512), mebibytes(2048)), ("512M".to_owned(), "2.0G".to_owned()));
        for (seconds, wanted) in [(-5, "0s"), (59, "59s"), (60, "1m"), (7300, "2h"), (900_000, "10d")] {
            assert_eq!(age(seconds), wanted);
        }
    }

    #[test]
    fn titles_have_room_for_the_mark_of_their_order_and_percents_for_all_processors() {
        for column in Column::ALL {
            assert!(column.title().len() < usize::from(column.width()), "{column:?}");
        }
        let shown = [0.0, 99.94, 999.94, 999.96, 1600.0, 102_400.0].map(percent);
        assert_eq!(shown, ["0.0", "99.9", "999.9", "1000", "1600", "102400"]);
    }

    #[test]
    fn a_narrow_screen_shows_what_is_worth_most() {
        let titles = |width| Column::fitting(width).into_iter().map(Column::title).collect::<Vec<_>>();
        assert_eq!(titles(0), ["NAME"]);
        assert_eq!(titles(30), ["NAME", "STATE"]);
        assert_eq!(titles(80), ["NAME", "STATE", "NODE", "AGE", "ADDRESS", "VCPU", "MEM", "CPU%"]);
        assert_eq!(titles(200).len(), 11);
    }
}
