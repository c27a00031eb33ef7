//! What an error of the client library means: was the request sent, may it be sent again.
//!
//! Decided by the gRPC code, and where one code stands for several things, by the server's fixed
//! phrases. The text kept is the whole chain of causes, because the useful part is at its end.

use std::error::Error as _;

/// Why an attempt failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The request never reached etcd, or etcd turned it away before looking at it.
    Unsent(String),
    /// The connection broke, or etcd itself gave up: it may or may not have happened.
    Broken(String),
    /// The authentication token is not, or no longer, valid.
    StaleToken(String),
    /// Users or roles were changed between etcd's first look at who asks and the moment at which it would have done it: it was not done, and
    /// may well be done when it is asked again.
    Outdated(String),
    /// There is no such lease.
    LeaseGone,
    /// A lease with the id asked for is there already.
    LeaseExists,
    /// The revision asked for is compacted.
    Compacted,
    /// The revision asked for has not been reached.
    Future,
    /// The answer is larger than we accept.
    TooBig(String),
    /// There is no space: a write that this was said of may have been done.
    Full(String),
    /// etcd said no, and will say no again.
    Refused(String),
}

/// Phrases of the layers below for "no connection came about".
const NEVER_SENT: [&str; 6] = [
    "tcp connect error",
    "dns error",
    "invalid peer certificate",
    "received fatal alert",
    "tls handshake eof",
    "received corrupt message of type",
];

/// What etcd says where users or roles were changed meanwhile, to who has a certificate, too.
pub(super) const OUTDATED: &str = "revision of auth store is old";

/// The meaning of an error.
pub(super) fn classify(error: etcd_client::Error) -> Failure {
    use etcd_client::Error as E;
    match error {
        // Tonic's codes are plain gRPC numbers, and etcd-client does not export their type.
        E::GRpcStatus(status) => {
            by_code(status.code() as i32, with_causes(status.message().to_owned(), status.source()))
        }
        E::LeaseKeepAliveError(text) if text.contains("lease not found") => Failure::LeaseGone,
        E::LeaseKeepAliveError(text) | E::WatchError(text) => Failure::Broken(text),
        E::TransportError(error) => Failure::Unsent(with_causes(error.to_string(), error.source())),
        E::IoError(error) => Failure::Broken(error.to_string()),
        other => Failure::Refused(other.to_string()),
    }
}

/// What its own words, and those of whoever answers in its place, leave unsaid.
const MEANS: [(&str, &str); 4] = [
    (
        "user name is empty",
        "it has users, and none is configured here: `etcd.user` and `etcd.password` say who asks",
    ),
    (
        "authentication is not enabled",
        "it has no users, and one is configured here: leave `etcd.user` and `etcd.password` out",
    ),
    (NO_GRPC, NO_ETCD),
    ("invalid compression flag", NO_ETCD),
];
/// Of an answer that is HTTP and no more.
const NO_GRPC: &str = "grpc-status header missing";
const NO_ETCD: &str = "what answers there is no etcd";

fn by_code(code: i32, text: String) -> Failure {
    let means = MEANS.iter().find(|(phrase, _)| text.contains(phrase));
    let text = means.map_or_else(|| text.clone(), |(_, means)| format!("{means} ({text})"));
    let says = |phrase: &str| text.contains(phrase);
    if NEVER_SENT.iter().any(|phrase| says(phrase)) {
        return Failure::Unsent(text);
    }
    match code {
        // By its release Unavailable or FailedPrecondition: a member that does not vote yet passes nothing on.
        _ if says("not supported for learner") => Failure::Unsent(text),
        // Cancelled, Unknown, DeadlineExceeded, Aborted, Internal, Unavailable, DataLoss.
        1 | 2 | 4 | 10 | 13..=15 => Failure::Broken(text),
        // NotFound.
        5 if says("lease not found") => Failure::LeaseGone,
        // FailedPrecondition.
        9 if says("lease already exists") => Failure::LeaseExists,
        // ResourceExhausted: too many requests passes by, a full database does not, nor does a message that is too large. What
        // is left comes with a connection that etcd closes for too many pings, whatever was under way on it.
        8 if says("too many requests") => Failure::Unsent(text),
        8 if says("space exceeded") => Failure::Full(text),
        8 if says("larger than max") => Failure::Refused(text),
        8 => Failure::Broken(text),
        // OutOfRange.
        11 if says("has been compacted") => Failure::Compacted,
        11 if says("future revision") => Failure::Future,
        11 if says("message length too large") => Failure::TooBig(text),
        // Unimplemented, of HTTP's 404: a gateway that says anything else may have passed it on.
        12 if says(NO_GRPC) => Failure::Unsent(text),
        // Unauthenticated.
        16 => Failure::StaleToken(text),
        // InvalidArgument.
        3 if says(OUTDATED) => Failure::Outdated(text),
        _ => Failure::Refused(text),
    }
}

/// Joins causes with colons and leaves out those which the text already ends with.
fn with_causes(mut text: String, mut cause: Option<&(dyn std::error::Error + 'static)>) -> String {
    while let Some(error) = cause {
        let next = error.to_string();
        if !next.is_empty() && !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_certainly_not_sent_counts_as_unsent() {
        assert!(matches!(by_code(14, "tcp connect error: Connection refused".into()), Failure::Unsent(_)));
        assert!(matches!(by_code(2, "transport error: received fatal alert: x".into()), Failure::Unsent(_)));
        assert!(matches!(by_code(8, "etcdserver: too many requests".into()), Failure::Unsent(_)));
        for code in [9, 14] {
            let learner = by_code(code, "etcdserver: rpc not supported for learner".into());
            assert!(matches!(learner, Failure::Unsent(_)), "{code}");
        }
        for (code, text) in [
            (14, "etcdserver: request timed out"),
            (14, "keep-alive timed out"),
            (2, "h2 protocol error: error reading a body from connection"),
            (1, "operation was canceled"),
            (4, "context deadline exceeded"),
            (
                8,
                "h2 protocol error: http2 error: connection error received: detected excessive load generating behavior",
            ),
        ] {
            assert!(matches!(by_code(code, text.into()), Failure::Broken(_)), "{code} {text}");
        }
    }

    #[test]
    fn refusals_are_told_from_trouble() {
        assert!(matches!(by_code(7, "etcdserver: permission denied".into()), Failure::Refused(_)));
        assert!(matches!(by_code(8, "etcdserver: mvcc: database space exceeded".into()), Failure::Full(_)));
        let large = "grpc: received message larger than max (1600512 vs. 1573864)";
        assert!(matches!(by_code(8, large.into()), Failure::Refused(_)));
        assert!(matches!(by_code(5, "etcdserver: requested lease not found".into()), Failure::LeaseGone));
        assert!(matches!(by_code(9, "etcdserver: lease already exists".into()), Failure::LeaseExists));
        assert!(matches!(by_code(16, "etcdserver: invalid auth token".into()), Failure::StaleToken(_)));
        let outdated = "etcdserver: revision of auth store is old";
        assert!(matches!(by_code(3, outdated.into()), Failure::Outdated(_)));
        assert!(matches!(by_code(3, "etcdserver: user name is empty".into()), Failure::Refused(_)));
        let compacted = "etcdserver: mvcc: required revision has been compacted";
        assert!(matches!(by_code(11, compacted.into()), Failure::Compacted));
    }

    #[test]
    fn what_etcd_leaves_unsaid_is_told() {
        let told = |failure| match failure {
            Failure::Refused(text) | Failure::Unsent(text) | Failure::Broken(text) => text,
            other => panic!("{other:?}"),
        };
        let nobody = told(by_code(3, "etcdserver: user name is empty".into()));
        assert!(
            nobody.contains("`etcd.user`") && nobody.ends_with("(etcdserver: user name is empty)"),
            "{nobody}"
        );
        let somebody = told(by_code(9, "etcdserver: authentication is not enabled".into()));
        assert!(somebody.contains("leave `etcd.user`"), "{somebody}");
        let http = "grpc-status header missing, mapped from HTTP status code";
        let other = by_code(12, format!("{http} 404"));
        assert!(matches!(&other, Failure::Unsent(text) if text.starts_with(NO_ETCD)), "{other:?}");
        let gateway = by_code(14, format!("{http} 502"));
        assert!(matches!(&gateway, Failure::Broken(text) if text.starts_with(NO_ETCD)), "{gateway:?}");
    }

    #[test]
    fn a_cause_is_not_said_twice() {
        let cause = std::io::Error::other("connection refused");
        assert_eq!(
            with_causes("tcp connect error".into(), Some(&cause)),
            "tcp connect error: connection refused"
        );
        assert_eq!(with_causes("x: connection refused".into(), Some(&cause)), "x: connection refused");
    }
}
