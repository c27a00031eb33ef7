//! Measured values, what they come to, and whether that is what was wanted.

use std::time::Duration;

/// Values of one measured thing, all in one unit.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Adds a value.
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Adds a time, in milliseconds.
    pub(crate) fn push_time(&mut self, time: Duration) {
        self.push(time.as_secs_f64() * 1000.0);
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }

    /// The middle one, or the mean of the two in the middle.
    pub(crate) fn median(&self) -> Option<f64> {
        let sorted = self.sorted();
        let upper = sorted.get(sorted.len() / 2)?;
        let lower = sorted.get(sorted.len().checked_sub(1)? / 2)?;
        Some(f64::midpoint(*lower, *upper))
    }

    /// Nine of ten are not above it.
    pub(crate) fn p90(&self) -> Option<f64> {
        let sorted = self.sorted();
        sorted.get((sorted.len() * 9).div_ceil(10).checked_sub(1)?).copied()
    }
}

/// What a figure is wanted to be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    /// The median is at most this many times the bare one.
    Ratio(f64),
    /// The median is at most this, in the figure's unit.
    AtMost(f64),
    /// The median is at most this above the bare one, in the figure's unit.
    Above(f64),
    /// The median is less than this, in the figure's unit.
    Under(f64),
}

/// One line of the result.
#[derive(Debug)]
pub(crate) struct Figure {
    /// What was measured.
    pub(crate) name: &'static str,
    /// `ms` or `MB` (a million bytes).
    pub(crate) unit: &'static str,
    /// The product's values.
    pub(crate) ours: Samples,
    /// What it is measured against, and the values of that.
    pub(crate) bare: Option<(&'static str, Samples)>,
    /// What is wanted of it.
    pub(crate) goals: Vec<Goal>,
}

impl Figure {
    /// How many times the bare median ours is.
    pub(crate) fn ratio(&self) -> Option<f64> {
        let (_, bare) = self.bare.as_ref()?;
        Some(self.ours.median()? / bare.median()?)
    }

    /// Whether a goal is met; not where there is nothing to tell by.
    pub(crate) fn meets(&self, goal: Goal) -> bool {
        match goal {
            Goal::Ratio(most) => self.ratio().is_some_and(|ratio| ratio <= most),
            Goal::AtMost(most) => self.ours.median().is_some_and(|median| median <= most),
            Goal::Above(most) => match (self.ours.median(), &self.bare) {
                (Some(ours), Some((_, bare))) => bare.median().is_some_and(|bare| ours - bare <= most),
                _ => false,
            },
            Goal::Under(bound) => self.ours.median().is_some_and(|median| median < bound),
        }
    }
}
