//! Logging: to standard error, text for people or JSON for collectors.
//!
//! What a line is about stands in fields, by the same names in every program (docs/operations.md has the list); what many
//! lines are about, in the fields of a span around them. In JSON both are fields of the line itself.

use std::{
    fmt::{self, Debug},
    io::IsTerminal,
};

use serde_json::{Map, Value};
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter,
    filter::ParseError,
    fmt::{
        FmtContext, FormatEvent, FormattedFields,
        format::{JsonFields, Writer},
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One readable line each
    // An empty variable is as good as none.
    #[default]
    #[value(alias = "")]
    Text,
    /// One JSON object each
    Json,
}

/// Starts logging. `RUST_LOG` decides what is logged, else `default` does.
pub fn init_logging(format: LogFormat, default: &str) {
    let set = std::env::var_os(EnvFilter::DEFAULT_ENV);
    let (filter, wrong) = chosen(set.as_ref().map(|set| set.to_string_lossy()).as_deref(), default);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => builder.with_target(false).with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.fmt_fields(JsonFields::new()).event_format(JsonLines).try_init(),
    };
    // Only a second call in one process fails; the first one's choice stands.
    started.ok();
    if let Some(error) = wrong {
        tracing::warn!(%error, "RUST_LOG is not understood, and counts as not set");
    }
}

/// Which lines there are. Of what is not understood: why, with a filter that lets that be told, whatever the default is.
fn chosen(set: Option<&str>, default: &str) -> (EnvFilter, Option<ParseError>) {
    match set.map(EnvFilter::try_new) {
        None => (EnvFilter::new(default), None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (EnvFilter::new(format!("{default},{}=warn", module_path!())), Some(error)),
    }
}

/// One object per line, flat: whoever looks for an instance need not know whether the line or a span around it names it.
struct JsonLines;

impl<S: Subscriber + for<'a> LookupSpan<'a>> FormatEvent<S, JsonFields> for JsonLines {
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = Line(Map::new());
        // The innermost has the last word, and the line itself after that.
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            let extensions = span.extensions();
            if let Some(fields) = extensions.get::<FormattedFields<JsonFields>>()
                && let Ok(Value::Object(fields)) = serde_json::from_str(&fields.fields)
            {
                line.0.extend(fields);
            }
        }
        event.record(&mut line);
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        line.0.insert("timestamp".to_owned(), time.into());
        line.0.insert("level".to_owned(), event.metadata().level().as_str().into());
        writeln!(writer, "{}", Value::Object(line.0))
    }
}

/// The fields of a line.
struct Line(Map<String, Value>);

impl Line {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.put(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use serde_json::json;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(log: impl FnOnce()) -> Vec<Value> {
        lines_of(EnvFilter::new("info"), log)
    }

    fn lines_of(filter: EnvFilter, log: impl FnOnce()) -> Vec<Value> {
        let written = Written::default();
        let own = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(move || own.clone())
            .fmt_fields(JsonFields::new())
            .event_format(JsonLines)
            .finish();
        tracing::subscriber::with_default(subscriber, log);
        let bytes = written.0.lock().unwrap().clone();
        let mut lines: Vec<Value> = String::from_utf8(bytes)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        for line in &mut lines {
            assert!(
                line.as_object_mut().unwrap().remove("timestamp").unwrap().as_str().unwrap().ends_with('Z')
            );
        }
        lines
    }

    #[test]
    fn a_line_has_the_fields_of_the_spans_around_it_beside_its_own_and_each_once() {
        let none: Option<&str> = None;
        let lines = lines(|| {
            let _outer = tracing::info_span!("outer", instance = "i", request_id = none, step = 1).entered();
            let _inner = tracing::info_span!("inner", request_id = %"req", step = 2).entered();
            tracing::warn!(step = 3, error = %"a \"quoted\"\nerror", debugged = ?Some(1), much = 1.5, off = true, "two {}", "words");
        });
        let wanted = json!({
            "level": "WARN", "message": "two words", "instance": "i", "request_id": "req", "step": 3,
            "error": "a \"quoted\"\nerror", "debugged": "Some(1)", "much": 1.5, "off": true,
        });
        assert_eq!(lines, [wanted]);
    }

    #[test]
    fn a_filter_that_is_not_understood_is_told_also_where_nothing_else_is() {
        for (set, is_wrong, told) in
            [(None, false, 0), (Some("warn"), false, 2), (Some("info,ec_store=loud"), true, 1)]
        {
            let (filter, wrong) = chosen(set, "off");
            assert_eq!(wrong.is_some(), is_wrong, "{set:?}");
            let lines = lines_of(filter, || {
                tracing::warn!("here");
                tracing::warn!(target: "elsewhere", "there");
            });
            assert_eq!(lines.len(), told, "{set:?}: {lines:?}");
        }
    }

    #[test]
    fn a_line_in_no_span_has_its_own_fields_alone() {
        assert_eq!(lines(|| tracing::info!("alone")), [json!({"level": "INFO", "message": "alone"})]);
    }
}
