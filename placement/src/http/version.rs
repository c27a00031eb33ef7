//! Microversions: which one a request is of.

use std::num::IntErrorKind;

use hyper::HeaderMap;

use super::error::{ApiError, ApiResult};

/// N of the newest microversion 1.N.
pub(super) const NEWEST: u32 = 39;

/// A microversion in writing.
pub(super) fn text(minor: u32) -> String {
    format!("1.{minor}")
}

/// The minor version that a request wants; the oldest where it says nothing.
pub(super) fn wanted(headers: &HeaderMap) -> ApiResult<u32> {
    let values: Vec<_> = headers
        .get_all("openstack-api-version")
        .iter()
        .map(|value| String::from_utf8_lossy(value.as_bytes()))
        .collect();
    let joined = values.join(",");
    // Of several for us, the last counts.
    let ours = joined.split(',').rev().find_map(|value| {
        let (service, version) = value.trim().split_once(char::is_whitespace)?;
        service.eq_ignore_ascii_case("placement").then(|| version.trim())
    });
    match ours {
        None | Some("") => Ok(0),
        Some("latest") => Ok(NEWEST),
        Some(version) => parse(version),
    }
}

fn parse(version: &str) -> ApiResult<u32> {
    let malformed =
        || ApiError::bad_request(format!("Invalid microversion: invalid version string: {version}"));
    let (major, minor) = version.split_once('.').ok_or_else(malformed)?;
    let number = |text: &str| match text.trim().parse::<i64>() {
        Ok(number) => Ok(number),
        // A version as any other, of which there is none.
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Ok(i64::MAX),
        Err(_) => Err(malformed()),
    };
    match (number(major)?, number(minor)?) {
        (1, minor) if (0..=i64::from(NEWEST)).contains(&minor) => {
            u32::try_from(minor).map_err(|_| malformed())
        }
        _ => Err(ApiError::new(406, format!("Invalid microversion: Unacceptable version header: {version}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[&'static str]) -> Result<u32, u16> {
        let mut headers = HeaderMap::new();
        for value in values {
            let value = hyper::header::HeaderValue::from_bytes(value.as_bytes()).unwrap();
            headers.append("openstack-api-version", value);
        }
        wanted(&headers).map_err(|error| error.status)
    }

    #[test]
    fn the_last_version_for_us_counts() {
        assert_eq!(of(&[]), Ok(0));
        assert_eq!(of(&["placement latest"]), Ok(39));
        assert_eq!(of(&["compute 2.1, placement 1.10"]), Ok(10));
        assert_eq!(of(&["placement 1.3", "placement 1.4"]), Ok(4));
        assert_eq!(of(&["compute 2.1"]), Ok(0));
        assert_eq!(of(&["placement 1.99"]), Err(406));
        assert_eq!(of(&["placement 0.9"]), Err(406));
        assert_eq!(of(&["placement 1.99999999999999999999"]), Err(406));
        assert_eq!(of(&["placement pony"]), Err(400));
        assert_eq!(of(&["placement 1.pony"]), Err(400));
        assert_eq!(of(&["placement 1.\u{ff15}"]), Err(400), "a digit that is none");
    }
}
