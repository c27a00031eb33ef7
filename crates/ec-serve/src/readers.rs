//! Who reads at the ports of programs, told by the certificate that was shown.

use bytes::Bytes;
use ec_model::NodeId;
use http_body_util::Full;
use hyper::{Request, Response, StatusCode};

use crate::{Shown, port::text};

/// What everybody hears who is let in at all.
const FOR_ALL: [&str; 2] = ["/healthz", "/readyz"];
/// Who has a certificate to be asked by others, and asks nothing of ports.
const SERVERS: [&str; 2] = ["etcd", "eplacement"];

/// The answer to who is not to read this: nodes but `own`, and servers. What is a node's is that node's, and its certificate is
/// good for TLS until it runs out, also where the node was revoked.
pub fn refusal<B>(request: &Request<B>, own: Option<NodeId>) -> Option<Response<Full<Bytes>>> {
    let names = request.extensions().get::<Shown>()?.common_names();
    why_refused(&names, own, request.uri().path()).map(|why| text(StatusCode::FORBIDDEN, why))
}

fn why_refused(names: &[String], own: Option<NodeId>, path: &str) -> Option<String> {
    let stranger = |name: &&String| {
        NodeId::of_user(name).is_some_and(|node| Some(node) != own) || SERVERS.contains(&name.as_str())
    };
    let name = names.iter().find(stranger).filter(|_| !FOR_ALL.contains(&path))?;
    Some(format!("this is not for {name}: {} are", FOR_ALL.join(" and ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_for_nodes_is_told_to_no_other_node_and_to_no_server() {
        let [own, other] = [9, 10].map(|number| NodeId::new(uuid::Uuid::from_u128(number)));
        let told = |names: &[String], own, path: &str| why_refused(names, own, path).is_none();
        let readings = ["/metrics", "/view", "/usage", "/streams/word", "/healthz/../view", "/readyz/", "/"];
        for reader in ["eschedule", "econtroller", "root", "monitoring", "ecompute-control", "somebody"] {
            assert!(readings.iter().all(|path| told(&[reader.to_owned()], Some(own), path)), "{reader}");
        }
        // Where nobody is asked for a certificate, nobody has a name.
        assert!(told(&[], Some(own), "/view") && told(&[own.user()], Some(own), "/view"));
        assert!(told(&[], None, "/metrics") && !told(&[own.user()], None, "/metrics"));
        for stranger in [other.user(), "etcd".to_owned(), "eplacement".to_owned()] {
            for names in [vec![stranger.clone()], vec!["root".to_owned(), stranger.clone()]] {
                assert!(readings.iter().all(|path| !told(&names, Some(own), path)), "{names:?}");
                assert!(FOR_ALL.iter().all(|path| told(&names, Some(own), path)), "{names:?}");
            }
        }
        let why = why_refused(&[other.user()], Some(own), "/view").unwrap();
        assert_eq!(why, format!("this is not for ecompute-{other}: /healthz and /readyz are"));
    }
}
