//! How far what is waited for is: a moving line on a terminal, a line for each change elsewhere.

use std::{cell::RefCell, io::IsTerminal, time::Duration};

use ec_cloud::Step;
use ec_model::{self as model, State, Status};
use ec_runtime::exit::tell;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::output::plain;

/// What the user sees of several that are waited for at the same time.
pub(crate) struct Progress {
    bars: MultiProgress,
    several: bool,
}

impl Progress {
    /// Of so many.
    pub(crate) fn of(many: usize) -> Self {
        Self { bars: MultiProgress::new(), several: many > 1 }
    }

    /// What the user sees of one of them, which is called so.
    pub(crate) fn shown(&self, who: &str, first: &str) -> Shown {
        let bar = Shown::bar().map(|bar| self.bars.add(bar));
        let who = if self.several { format!("{}: ", plain(who)) } else { String::new() };
        Shown::with(bar, self.bars.clone(), who, first)
    }

    /// Does what prints something, which lines that move would cover.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bars.suspend(print)
    }
}

/// What the user sees.
pub(crate) struct Shown {
    bar: Option<ProgressBar>,
    /// That, and others'.
    all: MultiProgress,
    /// Whom it is about, where that is not clear.
    who: String,
    last: RefCell<String>,
}

impl Shown {
    pub(crate) fn new(first: &str) -> Self {
        Self::alone(String::new(), first)
    }

    /// One of several that are waited for one after the other, which is called so.
    pub(crate) fn of(who: &str, first: &str) -> Self {
        Self::alone(format!("{}: ", plain(who)), first)
    }

    fn alone(who: String, first: &str) -> Self {
        let all = MultiProgress::new();
        Self::with(Self::bar().map(|bar| all.add(bar)), all, who, first)
    }

    fn with(bar: Option<ProgressBar>, all: MultiProgress, who: String, first: &str) -> Self {
        if let Some(bar) = &bar {
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        let shown = Self { bar, all, who, last: RefCell::default() };
        shown.tell(first);
        shown
    }

    fn bar() -> Option<ProgressBar> {
        std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed:>4} {msg}") {
                bar.set_style(style);
            }
            bar
        })
    }

    /// Shows a step.
    pub(crate) fn step(&self, step: Step<'_>) {
        match step {
            Step::Status(status) => self.status(status),
            Step::Lost(why) => self.all.suspend(|| tell(&format!("eschedule: {why}; waiting on"))),
        }
    }

    /// Shows a step of a volume: what is told of a machine that is there says nothing of it.
    pub(crate) fn step_of_volume(&self, step: Step<'_>) {
        match step {
            Step::Status(status) if status.state == State::Active => {}
            step => self.step(step),
        }
    }

    fn status(&self, status: &Status) {
        let text = match (status.state, &status.progress) {
            (State::Preparing, Some(progress)) => how_far(progress),
            (State::Starting, _) if status.started_at.is_some() => "booting".to_owned(),
            (State::Active, _) => status.ip.map_or_else(|| "active".to_owned(), |ip| format!("IP {ip}")),
            (state, _) => state.to_string().to_lowercase(),
        };
        let text = match &status.reason {
            Some(reason) => format!("{text}: {}", plain(reason)),
            None => text,
        };
        self.tell(&text);
    }

    /// Shows this.
    pub(crate) fn tell(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(format!("{}{text}", self.who)),
            None if *self.last.borrow() != text => tell(&format!("{}{text}", self.who)),
            None => {}
        }
        text.clone_into(&mut self.last.borrow_mut());
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// What is under way of a long step, and how far it is.
pub(crate) fn how_far(progress: &model::Progress) -> String {
    let step = plain(&progress.step);
    match progress.percent() {
        Some(percent) => format!("{step} {percent} %"),
        None => format!("{step} {} MiB", progress.done >> 20),
    }
}
