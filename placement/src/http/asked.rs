//! On whose behalf something is asked, and what the log says of it.

use ec_model::RequestId;
use hyper::{Method, StatusCode, http::request::Parts};
use uuid::Uuid;

use super::reply::REQUEST_ID;

/// Of a path so many characters are told; ours are shorter.
const PATH_MAX: usize = 200;

/// What is asked on behalf of somebody's request, who named it as OpenStack's services do among themselves.
pub(super) struct Asked {
    request_id: RequestId,
    /// The id of what is asked here, which the answer has.
    local_request_id: String,
    method: Method,
    path: String,
}

impl Asked {
    /// None where nobody named a request, or what they named is no id of one: no log repeats what anybody sends.
    pub(super) fn of(parts: &Parts, local_request_id: &str) -> Option<Self> {
        let request_id = parts.headers.get(REQUEST_ID)?.to_str().ok()?.parse().ok()?;
        Some(Self {
            request_id,
            local_request_id: local_request_id.to_owned(),
            method: parts.method.clone(),
            path: parts.uri.path().chars().take(PATH_MAX).collect(),
        })
    }

    /// Says what was asked and what came of it; of what only reads, to who wants to know it all.
    pub(super) fn log(self, status: StatusCode, instance: Option<Uuid>) {
        let Self { request_id, local_request_id, method, path } = self;
        let (status, instance) = (status.as_u16(), instance.map(tracing::field::display));
        // Nor does whoever is not let in fill it.
        if method.is_safe() || status == 401 {
            tracing::debug!(%request_id, local_request_id, instance, %method, path, status, "answered");
        } else {
            tracing::info!(%request_id, local_request_id, instance, %method, path, status, "answered");
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn asked(header: &[u8]) -> Option<Asked> {
        let request =
            Request::put("/allocations/x?y=z").header("X-OpenStack-Request-ID", header).body(()).unwrap();
        Asked::of(&request.into_parts().0, "req-own")
    }

    #[test]
    fn what_is_no_id_of_a_request_is_not_taken_over() {
        let id = "req-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";
        let taken = asked(id.as_bytes()).unwrap();
        assert_eq!((taken.request_id.to_string().as_str(), taken.path.as_str()), (id, "/allocations/x"));
        let long = "req-".repeat(2000);
        for other in [
            "",
            "x",
            &id[4..],
            &id[..39],
            long.as_str(),
            "req-7d3c1f0a-2b4e-4c55-9a7e-0123456789ab instance=y",
        ] {
            assert!(asked(other.as_bytes()).is_none(), "{other}");
        }
        assert!(asked(b"req-\xff").is_none());
        assert!(Asked::of(&Request::new(()).into_parts().0, "req-own").is_none());
    }
}
