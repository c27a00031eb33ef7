//! What a program counts, in the text form that Prometheus reads.

use std::{
    fmt::{Display, Write},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The media type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Times are kept in microseconds and shown in seconds.
const MICROSECONDS: f64 = 1e6;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// The sum.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How often values were up to each bound.
#[derive(Debug)]
pub struct Histogram<const N: usize> {
    bounds: [u64; N],
    /// So many of what is kept make one of what is shown.
    per_unit: f64,
    /// One for each bound, and one for what is above them all.
    counts: [AtomicU64; N],
    above: AtomicU64,
    sum: AtomicU64,
}

impl<const N: usize> Histogram<N> {
    /// Of values, by bounds that grow.
    pub const fn new(bounds: [u64; N]) -> Self {
        Self::by(bounds, 1.0)
    }

    /// Of times, by bounds in microseconds that grow.
    pub const fn of_times(bounds: [u64; N]) -> Self {
        Self::by(bounds, MICROSECONDS)
    }

    const fn by(bounds: [u64; N], per_unit: f64) -> Self {
        Self {
            bounds,
            per_unit,
            counts: [const { AtomicU64::new(0) }; N],
            above: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }

    /// Counts a value.
    pub fn observe(&self, value: u64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        self.counts.get(at).unwrap_or(&self.above).fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Counts a time.
    pub fn took(&self, time: Duration) {
        self.observe(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    #[expect(clippy::cast_precision_loss, reason = "for people to look at")]
    fn shown(&self, value: u64) -> f64 {
        value as f64 / self.per_unit
    }
}

/// The text, in the making.
#[derive(Debug, Default)]
pub struct Exposition(String);

impl Exposition {
    /// A number that only grows; `name` ends in `_total`.
    pub fn counters<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.family(name, "counter", help)
    }

    /// A number as it is now.
    pub fn gauges<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.family(name, "gauge", help)
    }

    /// How often values were up to each bound.
    pub fn histograms<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.family(name, "histogram", help)
    }

    fn family<'a>(&'a mut self, name: &'a str, kind: &str, help: &str) -> Family<'a> {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Family { text: &mut self.0, name }
    }

    /// What was written.
    pub fn into_text(self) -> String {
        self.0
    }
}

/// All that have one name, told apart by labels.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
}

impl Family<'_> {
    /// A number.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) -> &mut Self {
        let (name, labels) = (self.name, Labels(labels, None));
        let _ = writeln!(self.text, "{name}{labels} {value}");
        self
    }

    /// A histogram.
    pub fn histogram<const N: usize>(
        &mut self,
        labels: &[(&str, &str)],
        histogram: &Histogram<N>,
    ) -> &mut Self {
        let (name, mut count) = (self.name, 0);
        for (bound, own) in histogram.bounds.iter().zip(&histogram.counts) {
            count += own.load(Ordering::Relaxed);
            let bound = histogram.shown(*bound).to_string();
            let _ = writeln!(self.text, "{name}_bucket{} {count}", Labels(labels, Some(&bound)));
        }
        count += histogram.above.load(Ordering::Relaxed);
        let _ = writeln!(self.text, "{name}_bucket{} {count}", Labels(labels, Some("+Inf")));
        let (labels, sum) = (Labels(labels, None), histogram.sum.load(Ordering::Relaxed));
        let _ = writeln!(self.text, "{name}_sum{labels} {}", histogram.shown(sum));
        let _ = writeln!(self.text, "{name}_count{labels} {count}");
        self
    }
}

/// Labels, and the bound of a bucket.
struct Labels<'a>(&'a [(&'a str, &'a str)], Option<&'a str>);

impl Display for Labels<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bound = self.1.map(|bound| ("le", bound));
        let mut separator = '{';
        for (name, value) in self.0.iter().copied().chain(bound) {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            write!(f, "{separator}{name}=\"{value}\"")?;
            separator = ',';
        }
        if separator == ',' { f.write_str("}") } else { Ok(()) }
    }
}

/// Holds a text to the form, strictly; answers its samples by name with labels. For tests of whoever exposes one.
///
/// # Errors
/// The first line that is wrong, and what is.
#[cfg(feature = "testing")]
pub fn parse(text: &str) -> Result<std::collections::BTreeMap<String, f64>, String> {
    let mut samples = std::collections::BTreeMap::new();
    let mut families = std::collections::BTreeSet::new();
    let (mut name, mut kind, mut bucket) = ("", "", (String::new(), 0.0));
    if !text.ends_with('\n') {
        return Err("the last line has no end".to_owned());
    }
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let wrong = |what: &str| Err(format!("{what}: {line}"));
        if let Some(help) = line.strip_prefix("# HELP ") {
            let Some((own, _)) = help.split_once(' ') else { return wrong("no help") };
            let typed = lines.next().and_then(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
            let Some((typed, own_kind)) = typed else { return wrong("no type") };
            if typed != own || !is_name(own) || !families.insert(own) {
                return wrong("no name of a family of its own");
            }
            if !["counter", "gauge", "histogram"].contains(&own_kind) {
                return wrong("no such type");
            }
            if (own_kind == "counter") != own.ends_with("_total") {
                return wrong("a counter is called _total, and nothing else is");
            }
            (name, kind) = (own, own_kind);
            continue;
        }
        let Some((series, value)) = line.rsplit_once(' ') else { return wrong("no value") };
        let Ok(value) = value.parse::<f64>() else { return wrong("no number") };
        let (own, labels) = series.split_once('{').map_or((series, None), |(own, rest)| (own, Some(rest)));
        let suffix = match own.strip_prefix(name) {
            Some(suffix) if !name.is_empty() => suffix,
            _ => return wrong("not of the family above it"),
        };
        let known = if kind == "histogram" { ["_bucket", "_sum", "_count"].as_slice() } else { &[""] };
        if !known.contains(&suffix) {
            return wrong("not of the family's type");
        }
        let mut bound = None;
        if let Some(labels) = labels {
            let Some(mut rest) = labels.strip_suffix('}') else { return wrong("labels without an end") };
            while let Some((label, after)) = rest.split_once("=\"") {
                // None of our labels' values holds a quote.
                let Some((value, after)) = after.split_once('"') else {
                    return wrong("a label without an end");
                };
                if !is_name(label) {
                    return wrong("no name of a label");
                }
                bound = (label == "le").then_some(value).or(bound);
                rest = after.strip_prefix(',').unwrap_or(after);
            }
            if !rest.is_empty() {
                return wrong("something behind the labels");
            }
        }
        if kind != "gauge" && value < 0.0 {
            return wrong("less than nothing");
        }
        match (suffix, bound) {
            ("_bucket", Some(bound)) => {
                let Ok(_) = bound.replace("+Inf", "inf").parse::<f64>() else { return wrong("no bound") };
                let others = series.replace(&format!("le=\"{bound}\""), "");
                if bucket.0 == others && bucket.1 > value {
                    return wrong("less than up to a lower bound");
                }
                bucket = (others, value);
            }
            ("_bucket", None) => return wrong("a bucket without a bound"),
            (_, Some(_)) => return wrong("a bound of what is no bucket"),
            ("_count", None) if bucket.1 != value => return wrong("not as many as in all buckets"),
            _ => {}
        }
        if samples.insert(series.to_owned(), value).is_some() {
            return wrong("twice the same");
        }
    }
    Ok(samples)
}

#[cfg(feature = "testing")]
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c == '_')
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_prometheus_reads() {
        let times = Histogram::of_times([1_000, 2_000_000]);
        for millis in [1, 1_500, 2_500] {
            times.took(Duration::from_millis(millis));
        }
        let counter = Counter::default();
        counter.add(3);
        let mut text = Exposition::default();
        text.counters("a_calls_total", "Calls.").sample(&[("to", "x"), ("as", "y")], counter.get());
        text.gauges("a_bytes", "Bytes.").sample(&[], 7);
        text.histograms("a_duration_seconds", "Times.").histogram(&[("to", "x")], &times);
        let text = text.into_text();
        assert_eq!(
            text,
            "# HELP a_calls_total Calls.\n# TYPE a_calls_total counter\na_calls_total{to=\"x\",as=\"y\"} 3\n\
             # HELP a_bytes Bytes.\n# TYPE a_bytes gauge\na_bytes 7\n\
             # HELP a_duration_seconds Times.\n# TYPE a_duration_seconds histogram\n\
             a_duration_seconds_bucket{to=\"x\",le=\"0.001\"} 1\na_duration_seconds_bucket{to=\"x\",le=\"2\"} 2\n\
             a_duration_seconds_bucket{to=\"x\",le=\"+Inf\"} 3\na_duration_seconds_sum{to=\"x\"} 4.001\n\
             a_duration_seconds_count{to=\"x\"} 3\n"
        );
        let samples = parse(&text).unwrap();
        assert_eq!(samples["a_duration_seconds_bucket{to=\"x\",le=\"+Inf\"}"], 3.0);
    }

    #[test]
    fn a_value_of_a_label_cannot_end_it() {
        let mut text = Exposition::default();
        text.gauges("a", "A.").sample(&[("b", "x\"} 1\n\\")], 1);
        assert!(text.into_text().ends_with("a{b=\"x\\\"} 1\\n\\\\\"} 1\n"));
    }

    #[test]
    fn each_mistake_in_a_text_is_found() {
        let head = "# HELP a A.\n# TYPE a gauge\n";
        for (text, wanted) in [
            ("a 1".to_owned(), "no end"),
            ("a 1\n".to_owned(), "not of the family"),
            (format!("{head}a one\n"), "no number"),
            (format!("{head}a 1\na 1\n"), "twice"),
            (format!("{head}a{{b=\"1\" 1\n"), "without an end"),
            (format!("{head}a_sum 1\n"), "not of the family's type"),
            (format!("{head}{head}"), "of its own"),
            ("# HELP a A.\n# TYPE a counter\n".to_owned(), "_total"),
            ("# HELP a A.\n# TYPE a sum\n".to_owned(), "no such type"),
            ("# HELP a A.\na 1\n".to_owned(), "no type"),
            ("# HELP a_total A.\n# TYPE a_total counter\na_total -1\n".to_owned(), "less than nothing"),
            (
                "# HELP a A.\n# TYPE a histogram\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1\n".to_owned(),
                "lower bound",
            ),
            ("# HELP a A.\n# TYPE a histogram\na_bucket{le=\"+Inf\"} 2\na_count 1\n".to_owned(), "as many"),
        ] {
            let found = parse(&text).unwrap_err();
            assert!(found.contains(wanted), "{text}{found}");
        }
    }
}
