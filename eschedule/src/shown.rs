//! How far what is waited for is: a moving line on a terminal, a line for each change elsewhere.

use std::{cell::RefCell, io::IsTerminal, time::Duration};

use ec_cloud::Step;
use ec_model::{State, Status};
use ec_runtime::exit::tell;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::plain;

/// What the user sees.
pub(crate) struct Shown {
    bar: Option<ProgressBar>,
    last: RefCell<String>,
}

impl Shown {
    pub(crate) fn new(first: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed:>4} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        let shown = Self { bar, last: RefCell::default() };
        shown.tell(first);
        shown
    }

    /// Shows a step.
    pub(crate) fn step(&self, step: Step<'_>) {
        match step {
            Step::Status(status) => self.status(status),
            Step::Lost(why) => tell(&format!("eschedule: {why}; waiting on")),
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
            (State::Preparing, Some(progress)) => {
                let step = plain(&progress.step);
                match progress.percent() {
                    Some(percent) => format!("{step} {percent} %"),
                    None => format!("{step} {} MiB", progress.done >> 20),
                }
            }
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
            Some(bar) => bar.set_message(text.to_owned()),
            None if *self.last.borrow() != text => tell(text),
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
