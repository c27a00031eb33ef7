//! Bodies of requests: bounded in size and time.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use ec_placement_schema::{Body, check_body};
use ec_serve::Activity;
use http_body_util::BodyExt;
use hyper::{HeaderMap, header, http::request::Parts};
use serde_json::Value;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use super::{
    Call,
    error::{ApiError, ApiResult},
};

/// The largest body that is taken. What changes all that one transaction may is a tenth of it.
const LARGEST: usize = 4 << 20;
/// What is too large is read to its end all the same, up to this, since many clients look at the answer only
/// when they have sent everything.
const DRAINED: usize = 256 << 20;
/// Room that is made for a body before it is there. What is larger needs a place.
const FORESEEN: usize = 64 << 10;
/// Places for bodies that are larger, from their reading to their answers: so many of the largest are in memory at a time.
pub(super) const PLACES: usize = 16;
/// So long may a body take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A body on its way in: of a connection, or of a caller in the same process.
pub trait Incoming: hyper::body::Body<Data = Bytes, Error: std::fmt::Display + Send> + Send + Unpin {}

impl<B> Incoming for B where B: hyper::body::Body<Data = Bytes, Error: std::fmt::Display + Send> + Send + Unpin
{}

/// A body must be declared, as upstream wants it even of those that take none.
pub(super) fn check_declared(headers: &HeaderMap) -> ApiResult<()> {
    let Some(length) = headers.get(header::CONTENT_LENGTH) else { return Ok(()) };
    let length = length.to_str().ok().and_then(|length| length.trim().parse::<u64>().ok());
    match length {
        None => Err(ApiError::bad_request("content-length header must be an integer")),
        Some(0) => Ok(()),
        Some(_) => match headers.get(header::CONTENT_TYPE) {
            Some(kind) if !kind.is_empty() => Ok(()),
            _ => Err(ApiError::bad_request("content-type header required when content-length > 0")),
        },
    }
}

/// Reads a body to its end. Meanwhile nothing is being answered on its connection: who leaves a body half sent
/// makes room for others, as who says nothing does.
pub(super) async fn read<B: Incoming>(parts: &Parts, body: B, places: &Arc<Semaphore>) -> ApiResult<Taken> {
    let activity = parts.extensions.get::<Arc<Activity>>();
    activity.inspect(|activity| activity.set_answering(false));
    let read = read_all(&parts.headers, body, places, activity.map(Arc::as_ref)).await;
    activity.inspect(|activity| activity.set_answering(true));
    read
}

/// A body, with the place that it needs, where it needs one, for as long as it is in memory.
pub(super) type Taken = (Bytes, Option<OwnedSemaphorePermit>);

async fn read_all<B: Incoming>(
    headers: &HeaderMap,
    mut body: B,
    places: &Arc<Semaphore>,
    activity: Option<&Activity>,
) -> ApiResult<Taken> {
    let deadline = Instant::now() + PATIENCE;
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let mut read = BytesMut::with_capacity(declared.unwrap_or(0).min(FORESEEN));
    let (mut size, mut place) = (0, None);
    while let Some(frame) = timeout_at(deadline, body.frame())
        .await
        .map_err(|_| ApiError::new(408, "The body did not come in time."))?
    {
        let frame = frame.map_err(|error| ApiError::bad_request(format!("The body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        size += data.len();
        if size > DRAINED {
            break;
        }
        if size > LARGEST {
            (read, place) = (BytesMut::new(), None);
            continue;
        }
        if size > FORESEEN && place.is_none() {
            // It is we who have it wait.
            activity.inspect(|activity| activity.set_answering(true));
            let turn = timeout_at(deadline, Arc::clone(places).acquire_owned()).await;
            activity.inspect(|activity| activity.set_answering(false));
            let crowded = || ApiError::new(503, "Too many large bodies are being read. Try again.");
            place = Some(turn.ok().and_then(Result::ok).ok_or_else(crowded)?);
        }
        read.extend_from_slice(&data);
    }
    if size > LARGEST {
        return Err(ApiError::new(413, format!("A body may have {LARGEST} bytes at most.")));
    }
    Ok((read.freeze(), place))
}

/// For those that take none.
pub(super) fn ignore<B: Incoming>(_: B) -> Taken {
    (Bytes::new(), None)
}

impl Call<'_> {
    /// The body as JSON that is as it should be.
    pub(super) fn json(&self, kind: Body) -> ApiResult<Value> {
        let document: Value = serde_json::from_slice(&self.body)
            .map_err(|error| ApiError::bad_request(format!("Malformed JSON: {error}")))?;
        check_body(kind, self.minor, &document)
            .map_err(|error| ApiError::bad_request(format!("JSON does not validate: {error}")))?;
        Ok(document)
    }
}

/// What a body asks for, read before the state is looked at, which everybody waits for meanwhile; refused only after it
/// is known that there is what is asked about, as upstream has it.
pub(super) fn as_asked<T>(asked: &ApiResult<T>) -> ApiResult<&T> {
    asked.as_ref().map_err(Clone::clone)
}

/// A number that the schema calls an integer: JSON's 2.0 is one. Of those too large for us the largest will do: no generation is
/// that, and no inventory has so much.
pub(super) fn integer(value: &Value) -> ApiResult<i64> {
    #[expect(clippy::cast_possible_truncation, reason = "what is beyond becomes the last")]
    let from_float = |float: f64| (float.fract() == 0.0).then_some(float as i64);
    value
        .as_i64()
        .or_else(|| value.as_f64().and_then(from_float))
        .ok_or_else(|| ApiError::bad_request(format!("JSON does not validate: {value} is no whole number")))
}
