//! Who may do what in etcd, where it asks who somebody is: each part of the cloud what it must, and no more.
//! docs/security.md shows the same as a table.

use ec_model::{Keyspace, NodeId, Workload, placement_tokens};
use ec_store::Grant;

/// Whom the cloud consists of, by their names in etcd, which are those of their roles, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A node's agent.
    Node(NodeId),
    /// Who acts for users: `eschedule`, and `econtroller`.
    Control,
    /// Our own server of placement.
    Placement,
}

impl Part {
    /// The role's name.
    pub fn role(self) -> String {
        match self {
            Self::Node(node) => node.user(),
            Self::Control => "ecompute-control".to_owned(),
            Self::Placement => "ecompute-placement".to_owned(),
        }
    }

    /// Its rights. `placement` is what the keys of our own server of placement begin with.
    pub fn rights(self, keys: &Keyspace, placement: &str) -> Vec<Grant> {
        let own = |key: String| Grant { key, tree: false, write: true };
        let writes = |key: String| Grant { key, tree: true, write: true };
        let reads = |key: String| Grant { key, tree: true, write: false };
        match self {
            Self::Node(node) => vec![
                own(keys.agent(node)),
                own(keys.alive(node)),
                own(keys.node(node)),
                writes(keys.requests(node)),
                writes(keys.all_user_data(node)),
                writes(keys.statuses(node)),
                writes(keys.all_outcomes(node)),
                writes(keys.all_held(node)),
                writes(keys.all_held_user_data(node)),
                // Whether a claim is ours, and which nodes there are.
                reads(keys.instances()),
                reads(keys.nodes()),
                reads(keys.all_alive()),
            ],
            Self::Control => vec![
                writes(keys.instances()),
                writes(keys.all_names(Workload::Machine)),
                writes(keys.all_names(Workload::Volume)),
                writes(keys.all_requests()),
                writes(keys.every_user_data()),
                writes(keys.flavors()),
                writes(keys.all_keypairs()),
                writes(keys.images()),
                writes(keys.all_image_names()),
                writes(keys.all_public_images()),
                writes(keys.all_groups()),
                writes(keys.all_members()),
                writes(keys.all_actions()),
                reads(keys.nodes()),
                reads(keys.all_alive()),
                reads(keys.all_statuses()),
                reads(keys.every_outcomes()),
                reads(keys.every_held()),
                reads(keys.every_held_user_data()),
            ],
            Self::Placement => {
                vec![
                    writes(format!("{}/", placement.trim_end_matches('/'))),
                    reads(placement_tokens(placement)),
                ]
            }
        }
    }
}
