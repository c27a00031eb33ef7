//! The mark of a node that is down: an operator who disables the node at the same moment, and a placement that is put back then.
#![expect(clippy::unwrap_used, reason = "this is a test")]

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use ec_model::NodeId;
use ec_placement_client::{Answer, DISABLED, PlacementClient, PlacementConfig, Request, Transport};
use reqwest::{Method, StatusCode};
use serde_json::json;

/// A provider's traits, and whether somebody disables it while a name is made.
#[derive(Default)]
struct Placement {
    traits: Mutex<(u64, BTreeSet<String>)>,
    is_met: bool,
    /// It was put back since a name was made.
    is_put_back: bool,
}

impl Placement {
    fn set(&self, traits: impl IntoIterator<Item = String>) {
        let mut own = self.traits.lock().unwrap();
        *own = (own.0 + 1, traits.into_iter().collect());
    }
}

#[async_trait]
impl Transport for Placement {
    async fn exchange(&self, request: Request) -> Result<Answer, String> {
        let path = request.url.path();
        let ok = |body: serde_json::Value| Answer {
            status: StatusCode::OK,
            body: body.to_string().into(),
            ahead: None,
        };
        let own = self.traits.lock().unwrap().clone();
        Ok(match (request.method, request.body) {
            (Method::PUT, None) => {
                if self.is_met {
                    self.set([DISABLED.to_owned()]);
                }
                Answer { status: StatusCode::CREATED, body: Vec::new(), ahead: None }
            }
            (Method::PUT, Some(body)) if body["resource_provider_generation"] == own.0 => {
                self.set(serde_json::from_value::<Vec<String>>(body["traits"].clone()).unwrap());
                ok(body)
            }
            (Method::PUT, Some(_)) => Answer { status: StatusCode::CONFLICT, body: Vec::new(), ahead: None },
            _ if path.ends_with("/traits") && path.contains("resource_providers") => {
                ok(json!({"traits": own.1, "resource_provider_generation": own.0}))
            }
            _ if self.is_put_back => ok(json!({"traits": [DISABLED]})),
            _ => ok(json!({"traits": [DISABLED, DOWN]})),
        })
    }
}

const DOWN: &str = "CUSTOM_ECOMPUTE_NODE_DOWN";

#[tokio::test]
async fn a_node_that_an_operator_disables_at_that_moment_is_left_to_them() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let node = NodeId::new(uuid::Uuid::nil());
    for is_met in [false, true] {
        let placement = Arc::new(Placement { is_met, ..Placement::default() });
        let client =
            PlacementClient::new(&PlacementConfig::default()).unwrap().over(Arc::clone(&placement) as _);
        let has = || placement.traits.lock().unwrap().1.iter().cloned().collect::<Vec<_>>();
        assert_eq!(client.mark_down(node, true).await.unwrap(), !is_met);
        assert_eq!(has(), if is_met { vec![DISABLED] } else { vec![DISABLED, DOWN] });
        assert_eq!(client.mark_down(node, false).await.unwrap(), !is_met);
        assert_eq!(has(), if is_met { vec![DISABLED] } else { vec![] });
    }
}

#[tokio::test]
async fn a_node_is_never_disabled_without_the_mark_that_takes_that_back() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let placement = Arc::new(Placement { is_put_back: true, ..Placement::default() });
    let client = PlacementClient::new(&PlacementConfig::default()).unwrap().over(Arc::clone(&placement) as _);
    assert!(!client.mark_down(NodeId::new(uuid::Uuid::nil()), true).await.unwrap());
    assert_eq!(placement.traits.lock().unwrap().1.len(), 0);
}
