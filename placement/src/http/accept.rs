//! What form of answer a client takes.

/// The forms that errors have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ErrorForm {
    Json,
    Html,
    Plain,
}

/// How much a client wants a type: thousandths; `None` where it says nothing of it.
fn quality(accept: &str, kind: &str, sub: &str) -> Option<u32> {
    let mut best: Option<(u8, u32)> = None;
    for range in accept.split(',') {
        let mut parts = range.split(';').map(str::trim);
        let Some((range_kind, range_sub)) = parts.next().and_then(|range| range.split_once('/')) else {
            continue;
        };
        let precision = match (range_kind, range_sub) {
            ("*", "*") => 0,
            (own, "*") if own.eq_ignore_ascii_case(kind) => 1,
            (own, own_sub) if own.eq_ignore_ascii_case(kind) && own_sub.eq_ignore_ascii_case(sub) => 2,
            _ => continue,
        };
        let weight = parts
            .find_map(|parameter| parameter.strip_prefix("q=").or_else(|| parameter.strip_prefix("Q=")))
            .and_then(|weight| weight.parse::<f32>().ok())
            .map_or(1000, thousandths);
        // The more precise range counts.
        if best.is_none_or(|(known, _)| precision >= known) {
            best = Some((precision, weight));
        }
    }
    best.map(|(_, weight)| weight).filter(|weight| *weight > 0)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 1000")]
fn thousandths(weight: f32) -> u32 {
    (weight.clamp(0.0, 1.0) * 1000.0) as u32
}

/// Whether an answer in JSON will do. Saying nothing means that anything will, as does what is no list of types.
pub(super) fn json_will_do(accept: &str) -> bool {
    let is_no_type = |range: &str| !range.trim().is_empty() && !range.contains('/');
    accept.trim().is_empty()
        || accept.split(',').any(is_no_type)
        || quality(accept, "application", "json").is_some()
}

/// The form of an error. Clients that take anything get JSON.
pub(super) fn for_errors(accept: &str) -> ErrorForm {
    let accept = accept.trim();
    if accept.is_empty() || accept == "*/*" {
        return ErrorForm::Json;
    }
    match (quality(accept, "text", "html"), quality(accept, "application", "json")) {
        (Some(html), Some(json)) if json > html => ErrorForm::Json,
        (Some(_), _) => ErrorForm::Html,
        (None, Some(_)) => ErrorForm::Json,
        (None, None) => ErrorForm::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_precise_range_counts() {
        assert!(json_will_do(""));
        assert!(json_will_do("text/html,application/xml;q=0.9,*/*;q=0.8"));
        assert!(!json_will_do("text/plain"));
        assert!(!json_will_do("application/json;q=0, */*"));
        assert!(json_will_do("*") && json_will_do("*; q=.2") && !json_will_do(","));
        assert_eq!(for_errors("*/*"), ErrorForm::Json);
        assert_eq!(for_errors("text/html, application/json;q=0.5"), ErrorForm::Html);
        assert_eq!(for_errors("application/json, text/html;q=0.5"), ErrorForm::Json);
        assert_eq!(for_errors("text/plain"), ErrorForm::Plain);
    }
}
