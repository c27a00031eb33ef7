//! The terminal: all of it is taken, and given back on every way out.

use std::{
    io::{self, Stdout, stdout},
    panic,
};

use ec_runtime::exit::Failure;
use futures::StreamExt;
use ratatui::{
    Frame, Terminal, TerminalOptions, Viewport,
    backend::CrosstermBackend,
    crossterm::{
        cursor::Show,
        event::{Event, EventStream},
        execute,
        terminal::{
            Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
            size,
        },
    },
    layout::Rect,
};

/// So many columns and lines are drawn at most: a terminal can say that it has 65535 of each, for which there is no memory.
const DRAWN_MAX: u16 = 1000;

/// The terminal, while it is ours.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    /// None while it is somebody else's, who reads the keys then.
    keys: Option<EventStream>,
}

impl Screen {
    /// Takes it.
    pub(super) fn enter() -> Result<Self, Failure> {
        // What a panic says is to be read.
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            give_back();
            before(info);
        }));
        let mut screen = Self { terminal: terminal(area()?)?, keys: None };
        screen.take()?;
        Ok(screen)
    }

    /// Takes it again after [`Self::leave`].
    pub(super) fn take(&mut self) -> Result<(), Failure> {
        let take = || {
            enable_raw_mode()?;
            execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))
        };
        take().map_err(|error| failed(&error))?;
        // One that remembers nothing of what was drawn. (`clear` of the old one would ask the terminal where its cursor is.)
        self.terminal = terminal(area()?)?;
        self.keys = Some(EventStream::new());
        Ok(())
    }

    /// Leaves it to others.
    pub(super) fn leave(&mut self) {
        self.keys = None;
        give_back();
    }

    /// Draws it anew, as far as it is otherwise.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> Result<(), Failure> {
        let area = area()?;
        if area != self.terminal.get_frame().area() {
            execute!(stdout(), Clear(ClearType::All)).map_err(|error| failed(&error))?;
            self.terminal = terminal(area)?;
        }
        self.terminal.draw(draw).map(|_| ()).map_err(|error| failed(&error))
    }

    /// What is pressed next, or how else the terminal changes.
    pub(super) async fn event(&mut self) -> Result<Event, Failure> {
        match &mut self.keys {
            Some(keys) => match keys.next().await {
                Some(event) => event.map_err(|error| failed(&error)),
                None => Err(failed(&io::Error::from(io::ErrorKind::UnexpectedEof))),
            },
            None => std::future::pending().await,
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.leave();
    }
}

/// What is drawn of the terminal.
fn area() -> Result<Rect, Failure> {
    let (columns, lines) = size().map_err(|error| failed(&error))?;
    Ok(Rect::new(0, 0, columns.min(DRAWN_MAX), lines.min(DRAWN_MAX)))
}

fn terminal(area: Rect) -> Result<Terminal<CrosstermBackend<Stdout>>, Failure> {
    let options = TerminalOptions { viewport: Viewport::Fixed(area) };
    Terminal::with_options(CrosstermBackend::new(stdout()), options).map_err(|error| failed(&error))
}

fn give_back() {
    // Where the terminal is gone there is nothing to give back.
    disable_raw_mode().ok();
    execute!(stdout(), LeaveAlternateScreen, Show).ok();
}

fn failed(error: &io::Error) -> Failure {
    Failure::failed(format!("the terminal cannot be used: {error}"))
}
