//! What the programs themselves say, for who looks into a history. A subscriber of our own, which takes no chance from
//! anywhere: with the common ones each line, and each map behind them, would throw the same dice as the programs, and
//! whoever listens would hear of another history.

use std::fmt::{self, Write as _};

use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};
use tracing_subscriber::filter::Targets;

/// Has all that `filter` names told on standard error, in the form of `RUST_LOG`: levels by targets.
///
/// # Errors
/// It names what cannot be told.
pub fn tell(filter: &str) -> Result<(), String> {
    let targets = filter.parse::<Targets>().map_err(|error| error.to_string())?;
    tracing::subscriber::set_global_default(Told(targets)).map_err(|error| error.to_string())
}

struct Told(Targets);

impl Subscriber for Told {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.0.would_enable(metadata.target(), metadata.level())
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    #[expect(clippy::print_stderr, reason = "whoever set RUST_LOG wants to read it")]
    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let metadata = event.metadata();
        eprintln!("{:>5} {}: {}{}", metadata.level(), metadata.target(), line.message, line.fields);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Into a string nothing fails.
        _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
