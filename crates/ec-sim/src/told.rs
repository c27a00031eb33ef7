//! What the programs themselves say, for who looks into a history. A subscriber of our own, which takes no chance from
//! anywhere: with the common ones each line, and each map behind them, would throw the same dice as the programs, and
//! whoever listens would hear of another history.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    sync::{Mutex, PoisonError},
};

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
    let spans = Mutex::default();
    tracing::subscriber::set_global_default(Told { targets, spans }).map_err(|error| error.to_string())
}

struct Told {
    targets: Targets,
    spans: Mutex<Spans>,
}

/// What lines have in common, by the numbers of their spans, and which of those are entered: there is one thread.
#[derive(Default)]
struct Spans {
    count: u64,
    fields: BTreeMap<u64, String>,
    entered: Vec<u64>,
}

impl Told {
    fn spans<T>(&self, look: impl FnOnce(&mut Spans) -> T) -> T {
        look(&mut self.spans.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Subscriber for Told {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.targets.would_enable(metadata.target(), metadata.level())
    }

    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        let mut line = Line::default();
        attributes.record(&mut line);
        self.spans(|spans| {
            spans.count += 1;
            spans.fields.insert(spans.count, line.fields);
            span::Id::from_u64(spans.count)
        })
    }

    fn try_close(&self, id: span::Id) -> bool {
        // Nothing of ours holds a span more than once.
        self.spans(|spans| spans.fields.remove(&id.into_u64())).is_some()
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    #[expect(clippy::print_stderr, reason = "whoever set RUST_LOG wants to read it")]
    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let metadata = event.metadata();
        let around: String = self.spans(|spans| {
            spans.entered.iter().filter_map(|id| spans.fields.get(id)).map(String::as_str).collect()
        });
        eprintln!("{:>5} {}: {}{}{around}", metadata.level(), metadata.target(), line.message, line.fields);
    }

    fn enter(&self, id: &span::Id) {
        self.spans(|spans| spans.entered.push(id.into_u64()));
    }

    fn exit(&self, id: &span::Id) {
        self.spans(|spans| {
            if let Some(place) = spans.entered.iter().rposition(|entered| *entered == id.into_u64()) {
                spans.entered.remove(place);
            }
        });
    }
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
