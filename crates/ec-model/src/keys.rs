//! The layout of the keys under the root prefix; see `docs/keyspace.md`.

use std::fmt;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::{Image, ImageId, Instance, InstanceId, InvalidId, NodeId, Visibility, Workload};

/// A key below the prefix that is not of the form which belongs there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("key `{}` is not of the form `{form}`", .key.escape_debug())]
pub struct KeyError {
    key: String,
    form: &'static str,
}

/// Builds and parses every key of one cluster, all under one root prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keyspace {
    root: String,
}

/// What the keys of placement's tokens begin with, beside its own records under `prefix`, which a cloud that is moved in
/// or out takes along. Behind it stands the digest of the token.
pub fn placement_tokens(prefix: &str) -> String {
    format!("{}-tokens/", prefix.trim_end_matches('/'))
}

impl Default for Keyspace {
    fn default() -> Self {
        Self::new(Self::DEFAULT_ROOT)
    }
}

impl Keyspace {
    /// The root where the configuration names none.
    pub const DEFAULT_ROOT: &str = "/ecompute";

    /// A keyspace under `root`; slashes at its end do not count.
    pub fn new(root: &str) -> Self {
        Self { root: root.trim_end_matches('/').to_owned() }
    }

    /// The keyspace that a configuration names, or the usual one.
    pub fn configured(root: Option<&str>) -> Result<Self, String> {
        let root = root.unwrap_or(Self::DEFAULT_ROOT);
        if root.trim_matches('/').is_empty() {
            return Err(format!("etcd.prefix `{root}` is empty: wanted for example /ecompute"));
        }
        if root.chars().any(char::is_control) {
            return Err(format!(
                "etcd.prefix {root:?} has a control character: wanted for example /ecompute"
            ));
        }
        Ok(Self::new(root))
    }

    /// What every key begins with, without a slash at its end.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// Where placement's records lie, as our own server has them: `<root>/placement`.
    pub fn placement(&self) -> String {
        format!("{}/placement", self.root)
    }

    /// `<root>/nodes/`
    pub fn nodes(&self) -> String {
        format!("{}/nodes/", self.root)
    }

    /// A node, alive or not.
    pub fn node(&self, node: NodeId) -> String {
        format!("{}/nodes/{node}", self.root)
    }

    /// `<root>/alive/`
    pub fn all_alive(&self) -> String {
        format!("{}/alive/", self.root)
    }

    /// That a node takes instances: lives as long as its agent does.
    pub fn alive(&self, node: NodeId) -> String {
        format!("{}/alive/{node}", self.root)
    }

    /// The key of the one agent that is `node`. Whatever an agent writes it writes only while this is its own.
    pub fn agent(&self, node: NodeId) -> String {
        format!("{}/agents/{node}", self.root)
    }

    /// `<root>/instances/`
    pub fn instances(&self) -> String {
        format!("{}/instances/", self.root)
    }

    /// An instance as it is wanted, and where it is: looking one up is a single read.
    pub fn instance(&self, instance: InstanceId) -> String {
        format!("{}/instances/{instance}", self.root)
    }

    /// The names of all projects: machines and volumes have names apart.
    pub fn all_names(&self, kind: Workload) -> String {
        match kind {
            Workload::Machine => format!("{}/names/", self.root),
            Workload::Volume => format!("{}/volume-names/", self.root),
        }
    }

    /// All of that kind that bear this name within a project. Letters' case makes no other name, as in DNS.
    pub fn names(&self, kind: Workload, project: &str, name: &str) -> String {
        format!("{}/", self.names_beginning(kind, project, name))
    }

    /// All names of a project that begin so.
    pub fn names_beginning(&self, kind: Workload, project: &str, beginning: &str) -> String {
        let beginning = beginning.to_ascii_lowercase();
        format!("{}{}/{}", self.all_names(kind), escaped(project), escaped(&beginning))
    }

    /// The name in a `<root>/names/<project>/<name>/<instance>` key, in small letters; or in one of a volume.
    pub fn parse_name(&self, key: &str) -> Option<String> {
        let kinds = [Workload::Machine, Workload::Volume];
        let rest = kinds.iter().find_map(|kind| key.strip_prefix(&self.all_names(*kind)))?;
        let (_, rest) = rest.split_once('/')?;
        let (name, _) = rest.split_once('/')?;
        percent_decode_str(name).decode_utf8().ok().map(Into::into)
    }

    /// The instance of a key that says what it is called, or which group it is a member of.
    pub fn parse_bearer(&self, key: &str) -> Option<InstanceId> {
        let below = [self.all_names(Workload::Machine), self.all_names(Workload::Volume), self.all_members()];
        let is_ours = below.iter().any(|prefix| key.starts_with(prefix));
        key.rsplit('/').next().filter(|_| is_ours).and_then(canonical)
    }

    /// That an instance bears its name. The value is empty.
    pub fn name(&self, kind: Workload, project: &str, name: &str, instance: InstanceId) -> String {
        format!("{}{instance}", self.names(kind, project, name))
    }

    /// `<root>/flavors/`
    pub fn flavors(&self) -> String {
        format!("{}/flavors/", self.root)
    }

    /// A placement query that has a name. Letters' case makes no other name here either.
    pub fn flavor(&self, name: &str) -> String {
        format!("{}{}", self.flavors(), escaped(&name.to_ascii_lowercase()))
    }

    /// The images of all projects.
    pub fn images(&self) -> String {
        format!("{}/images/", self.root)
    }

    /// An image of the catalogue.
    pub fn image(&self, image: ImageId) -> String {
        format!("{}{image}", self.images())
    }

    /// The names of the images of all projects.
    pub fn all_image_names(&self) -> String {
        format!("{}/image-names/", self.root)
    }

    /// The images that bear this name within a project.
    pub fn image_names(&self, project: &str, name: &str) -> String {
        let name = name.to_ascii_lowercase();
        format!("{}{}/{}/", self.all_image_names(), escaped(project), escaped(&name))
    }

    /// The names of the images that all projects have.
    pub fn all_public_images(&self) -> String {
        format!("{}/public-images/", self.root)
    }

    /// The images of this name that all projects have.
    pub fn public_images(&self, name: &str) -> String {
        format!("{}{}/", self.all_public_images(), escaped(&name.to_ascii_lowercase()))
    }

    /// By which an image is found by its name. The values are empty.
    pub fn names_of_image(&self, image: &Image) -> Vec<String> {
        if !image.status.has_name() {
            return Vec::new();
        }
        let mut keys = vec![format!("{}{}", self.image_names(&image.project, &image.name), image.id)];
        if image.visibility == Visibility::Public {
            keys.push(format!("{}{}", self.public_images(&image.name), image.id));
        }
        keys
    }

    /// The image of a `<root>/images/<image>` key, or of one of its names.
    pub fn parse_image(&self, key: &str) -> Result<ImageId, KeyError> {
        let below = [self.images(), self.all_image_names(), self.all_public_images()];
        let is_ours = below.iter().any(|prefix| key.starts_with(prefix));
        let last = key.rsplit('/').next().filter(|_| is_ours);
        last.and_then(canonical)
            .ok_or_else(|| KeyError { key: key.to_owned(), form: "<root>/images/<image uuid>" })
    }

    /// The keypairs of all projects.
    pub fn all_keypairs(&self) -> String {
        format!("{}/keypairs/", self.root)
    }

    /// All keypairs of a project.
    pub fn keypairs(&self, project: &str) -> String {
        format!("{}{}/", self.all_keypairs(), escaped(project))
    }

    /// Public keys that have a name within a project.
    pub fn keypair(&self, project: &str, name: &str) -> String {
        format!("{}{}", self.keypairs(project), escaped(&name.to_ascii_lowercase()))
    }

    /// The groups of all projects.
    pub fn all_groups(&self) -> String {
        format!("{}/groups/", self.root)
    }

    /// All groups of a project.
    pub fn groups(&self, project: &str) -> String {
        format!("{}{}/", self.all_groups(), escaped(project))
    }

    /// A group, which has a name within a project.
    pub fn group(&self, project: &str, name: &str) -> String {
        format!("{}{}", self.groups(project), escaped(&name.to_ascii_lowercase()))
    }

    /// The members of all groups.
    pub fn all_members(&self) -> String {
        format!("{}/members/", self.root)
    }

    /// The members of all groups of a project.
    pub fn project_members(&self, project: &str) -> String {
        format!("{}{}/", self.all_members(), escaped(project))
    }

    /// All members of a group.
    pub fn members(&self, project: &str, group: &str) -> String {
        format!("{}{}/", self.project_members(project), escaped(&group.to_ascii_lowercase()))
    }

    /// All members of a group that are on this node.
    pub fn members_on(&self, project: &str, group: &str, node: NodeId) -> String {
        format!("{}{node}/", self.members(project, group))
    }

    /// That an instance on this node is a member of a group. The value is empty.
    pub fn member(&self, project: &str, group: &str, node: NodeId, instance: InstanceId) -> String {
        format!("{}{instance}", self.members_on(project, group, node))
    }

    /// The key that says so of an instance, where it has a group and is placed.
    pub fn membership(&self, record: &Instance) -> Option<String> {
        Some(self.member(&record.project, record.group.as_ref()?, record.node()?, record.instance))
    }

    /// All user-data of all nodes' guests.
    pub fn every_user_data(&self) -> String {
        format!("{}/userdata/", self.root)
    }

    /// All user-data of one node's guests.
    pub fn all_user_data(&self, node: NodeId) -> String {
        format!("{}{node}/", self.every_user_data())
    }

    /// An instance's user-data, byte for byte.
    pub fn user_data(&self, node: NodeId, instance: InstanceId) -> String {
        format!("{}{instance}", self.all_user_data(node))
    }

    /// What all nodes hold of guests that no request speaks of.
    pub fn every_held(&self) -> String {
        format!("{}/held/", self.root)
    }

    /// What one node holds of such guests.
    pub fn all_held(&self, node: NodeId) -> String {
        format!("{}{node}/", self.every_held())
    }

    /// What a node holds of an instance that no request speaks of.
    pub fn held(&self, node: NodeId, instance: InstanceId) -> String {
        format!("{}{instance}", self.all_held(node))
    }

    /// The user-data of such guests of all nodes.
    pub fn every_held_user_data(&self) -> String {
        format!("{}/held-userdata/", self.root)
    }

    /// What all keys with user-data begin with: their values are sealed, where there is a key.
    pub fn secrets(&self) -> Vec<String> {
        vec![self.every_user_data(), self.every_held_user_data()]
    }

    /// The user-data of one node's such guests.
    pub fn all_held_user_data(&self, node: NodeId) -> String {
        format!("{}{node}/", self.every_held_user_data())
    }

    /// The user-data of an instance that no request speaks of, byte for byte.
    pub fn held_user_data(&self, node: NodeId, instance: InstanceId) -> String {
        format!("{}{instance}", self.all_held_user_data(node))
    }

    /// Every request of one node.
    pub fn requests(&self, node: NodeId) -> String {
        format!("{}/requests/{node}/", self.root)
    }

    /// What shall be of an instance.
    pub fn request(&self, node: NodeId, instance: InstanceId) -> String {
        format!("{}/requests/{node}/{instance}", self.root)
    }

    /// Every request of every node.
    pub fn all_requests(&self) -> String {
        format!("{}/requests/", self.root)
    }

    /// Every status of one node.
    pub fn statuses(&self, node: NodeId) -> String {
        format!("{}/status/{node}/", self.root)
    }

    /// What is of an instance.
    pub fn status(&self, node: NodeId, instance: InstanceId) -> String {
        format!("{}/status/{node}/{instance}", self.root)
    }

    /// Every status of every node.
    pub fn all_statuses(&self) -> String {
        format!("{}/status/", self.root)
    }

    /// `<root>/actions/`
    pub fn all_actions(&self) -> String {
        format!("{}/actions/", self.root)
    }

    /// What users asked of an instance.
    pub fn actions(&self, instance: InstanceId) -> String {
        format!("{}/actions/{instance}", self.root)
    }

    /// What came of instances on all nodes.
    pub fn every_outcomes(&self) -> String {
        format!("{}/outcomes/", self.root)
    }

    /// What came of the instances on a node.
    pub fn all_outcomes(&self, node: NodeId) -> String {
        format!("{}{node}/", self.every_outcomes())
    }

    /// What came of an instance on a node.
    pub fn outcomes(&self, node: NodeId, instance: InstanceId) -> String {
        format!("{}{instance}", self.all_outcomes(node))
    }

    /// The node of a `<root>/nodes/<node>` key.
    pub fn parse_node(&self, key: &str) -> Result<NodeId, KeyError> {
        parse_last(key, &self.nodes(), "<root>/nodes/<node uuid>")
    }

    /// The node of a `<root>/alive/<node>` key.
    pub fn parse_alive(&self, key: &str) -> Result<NodeId, KeyError> {
        parse_last(key, &self.all_alive(), "<root>/alive/<node uuid>")
    }

    /// The instance of a `<root>/instances/<instance>` key.
    pub fn parse_instance(&self, key: &str) -> Result<InstanceId, KeyError> {
        parse_last(key, &self.instances(), "<root>/instances/<instance uuid>")
    }

    /// Node and instance of a request key.
    pub fn parse_request(&self, key: &str) -> Result<(NodeId, InstanceId), KeyError> {
        parse_pair(key, &self.all_requests(), "<root>/requests/<node uuid>/<instance uuid>")
    }

    /// Node and instance of a member's key.
    pub fn parse_member(&self, key: &str) -> Result<(NodeId, InstanceId), KeyError> {
        let form = "<root>/members/<project>/<group>/<node uuid>/<instance uuid>";
        let pair = key.strip_prefix(&self.all_members()).and_then(|rest| rest.splitn(3, '/').nth(2));
        parse_pair(pair.unwrap_or_default(), "", form).map_err(|_| KeyError { key: key.to_owned(), form })
    }

    /// The key of the group that a member's key is of.
    pub fn group_of_member(&self, key: &str) -> Option<String> {
        self.parse_member(key).ok()?;
        let mut parts = key.strip_prefix(&self.all_members())?.splitn(3, '/');
        Some(format!("{}{}/{}", self.all_groups(), parts.next()?, parts.next()?))
    }

    /// Node and instance of a key of what a node holds.
    pub fn parse_held(&self, key: &str) -> Result<(NodeId, InstanceId), KeyError> {
        parse_pair(key, &self.every_held(), "<root>/held/<node uuid>/<instance uuid>")
    }

    /// Node and instance of a status key.
    pub fn parse_status(&self, key: &str) -> Result<(NodeId, InstanceId), KeyError> {
        parse_pair(key, &self.all_statuses(), "<root>/status/<node uuid>/<instance uuid>")
    }
}

/// What a user may have typed, as one segment of a key.
fn escaped(text: &str) -> impl fmt::Display {
    const SAFE: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_');
    utf8_percent_encode(text, SAFE)
}

/// One id has one key: only the canonical spelling of a uuid is accepted.
fn canonical<T: std::str::FromStr<Err = InvalidId> + std::fmt::Display>(text: &str) -> Option<T> {
    text.parse::<T>().ok().filter(|id| id.to_string() == text)
}

fn parse_last<T>(key: &str, prefix: &str, form: &'static str) -> Result<T, KeyError>
where
    T: std::str::FromStr<Err = InvalidId> + std::fmt::Display,
{
    key.strip_prefix(prefix).and_then(canonical).ok_or_else(|| KeyError { key: key.to_owned(), form })
}

fn parse_pair(key: &str, prefix: &str, form: &'static str) -> Result<(NodeId, InstanceId), KeyError> {
    key.strip_prefix(prefix)
        .and_then(|rest| rest.split_once('/'))
        .and_then(|(node, instance)| Some((canonical(node)?, canonical(instance)?)))
        .ok_or_else(|| KeyError { key: key.to_owned(), form })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_key_built_is_parsed_back(root in "/?[a-z]{1,8}(/[a-z]{1,4})?/?", n: u128, i: u128) {
            let (node, instance) = (NodeId::new(uuid::Uuid::from_u128(n)), InstanceId::new(uuid::Uuid::from_u128(i)));
            let keys = Keyspace::new(&root);
            prop_assert_eq!(keys.parse_node(&keys.node(node)), Ok(node));
            prop_assert_eq!(keys.parse_alive(&keys.alive(node)), Ok(node));
            prop_assert_eq!(keys.parse_instance(&keys.instance(instance)), Ok(instance));
            prop_assert_eq!(keys.parse_request(&keys.request(node, instance)), Ok((node, instance)));
            prop_assert_eq!(keys.parse_status(&keys.status(node, instance)), Ok((node, instance)));
            prop_assert_eq!(keys.parse_held(&keys.held(node, instance)), Ok((node, instance)));
            prop_assert!(keys.request(node, instance).starts_with(&keys.requests(node)));
            let member = keys.member(&root, "a/b", node, instance);
            prop_assert!(member.starts_with(&keys.members_on(&root, "A/B", node)));
            prop_assert_eq!(keys.parse_member(&member), Ok((node, instance)));
            prop_assert_eq!(keys.group_of_member(&member), Some(keys.group(&root, "A/B")));
        }

        #[test]
        fn no_key_makes_the_parser_panic(key in ".*") {
            let keys = Keyspace::default();
            prop_assert!(keys.parse_request(&key).is_err());
            let _ = keys.parse_request(&format!("{}{key}", keys.all_requests()));
        }
    }

    #[test]
    fn a_second_spelling_of_a_uuid_is_not_a_second_key() {
        let keys = Keyspace::default();
        assert!(keys.parse_node("/ecompute/nodes/7D3C1F0A-2B4E-4C55-9A7E-0123456789AB").is_err());
        assert!(keys.parse_node("/ecompute/nodes/7d3c1f0a2b4e4c559a7e0123456789ab").is_err());
    }

    /// The layout that `docs/keyspace.md` tells.
    #[test]
    fn every_key_is_where_it_belongs() {
        let node: NodeId = "11111111-1111-1111-1111-111111111111".parse().unwrap();
        let one: InstanceId = "22222222-2222-2222-2222-222222222222".parse().unwrap();
        let keys = Keyspace::configured(Some("/root/")).unwrap();
        let cases = [
            (keys.root().to_owned(), "/root".to_owned()),
            (keys.placement(), "/root/placement".to_owned()),
            (placement_tokens("/p/"), "/p-tokens/".to_owned()),
            (keys.all_keypairs(), "/root/keypairs/".to_owned()),
            (keys.all_groups(), "/root/groups/".to_owned()),
            (keys.images(), "/root/images/".to_owned()),
            (keys.all_image_names(), "/root/image-names/".to_owned()),
            (keys.all_public_images(), "/root/public-images/".to_owned()),
            (keys.every_user_data(), "/root/userdata/".to_owned()),
            (keys.all_user_data(node), format!("/root/userdata/{node}/")),
            (keys.every_outcomes(), "/root/outcomes/".to_owned()),
            (keys.all_outcomes(node), format!("/root/outcomes/{node}/")),
            (keys.nodes(), "/root/nodes/".to_owned()),
            (keys.node(node), format!("/root/nodes/{node}")),
            (keys.all_alive(), "/root/alive/".to_owned()),
            (keys.alive(node), format!("/root/alive/{node}")),
            (keys.agent(node), format!("/root/agents/{node}")),
            (keys.instances(), "/root/instances/".to_owned()),
            (keys.instance(one), format!("/root/instances/{one}")),
            (keys.all_names(Workload::Machine), "/root/names/".to_owned()),
            (keys.all_names(Workload::Volume), "/root/volume-names/".to_owned()),
            (keys.names(Workload::Machine, "p", "Web"), "/root/names/p/web/".to_owned()),
            (keys.names(Workload::Machine, "a/b", "ü"), "/root/names/a%2Fb/%C3%BC/".to_owned()),
            (keys.name(Workload::Machine, "p", "web-1.x_y", one), format!("/root/names/p/web-1.x_y/{one}")),
            (keys.flavors(), "/root/flavors/".to_owned()),
            (keys.flavor("m1.Small"), "/root/flavors/m1.small".to_owned()),
            (keys.keypairs("a/b"), "/root/keypairs/a%2Fb/".to_owned()),
            (keys.keypair("p", "Me@home"), "/root/keypairs/p/me%40home".to_owned()),
            (keys.groups("a/b"), "/root/groups/a%2Fb/".to_owned()),
            (keys.group("p", "Web"), "/root/groups/p/web".to_owned()),
            (keys.all_members(), "/root/members/".to_owned()),
            (keys.members("p", "Web"), "/root/members/p/web/".to_owned()),
            (keys.members_on("p", "Web", node), format!("/root/members/p/web/{node}/")),
            (keys.member("p", "Web", node, one), format!("/root/members/p/web/{node}/{one}")),
            (keys.all_user_data(node), format!("/root/userdata/{node}/")),
            (keys.user_data(node, one), format!("/root/userdata/{node}/{one}")),
            (keys.every_held(), "/root/held/".to_owned()),
            (keys.all_held(node), format!("/root/held/{node}/")),
            (keys.held(node, one), format!("/root/held/{node}/{one}")),
            (keys.every_held_user_data(), "/root/held-userdata/".to_owned()),
            (keys.all_held_user_data(node), format!("/root/held-userdata/{node}/")),
            (keys.held_user_data(node, one), format!("/root/held-userdata/{node}/{one}")),
            (keys.secrets().join(" "), "/root/userdata/ /root/held-userdata/".to_owned()),
            (keys.all_requests(), "/root/requests/".to_owned()),
            (keys.requests(node), format!("/root/requests/{node}/")),
            (keys.request(node, one), format!("/root/requests/{node}/{one}")),
            (keys.all_statuses(), "/root/status/".to_owned()),
            (keys.statuses(node), format!("/root/status/{node}/")),
            (keys.status(node, one), format!("/root/status/{node}/{one}")),
            (keys.all_actions(), "/root/actions/".to_owned()),
            (keys.actions(one), format!("/root/actions/{one}")),
            (keys.outcomes(node, one), format!("/root/outcomes/{node}/{one}")),
        ];
        for (key, expected) in cases {
            assert_eq!(key, expected);
        }
    }

    #[test]
    fn names_are_found_by_their_beginnings_and_read_from_their_keys() {
        let keys = Keyspace::new("/root");
        let instance = InstanceId::new(uuid::Uuid::from_u128(1));
        for (name, beginning) in [("web-1.x", "WEB"), ("ümlaut/x", "ü"), ("a", "")] {
            let key = keys.name(Workload::Volume, "a/b", name, instance);
            assert!(key.starts_with(&keys.names_beginning(Workload::Volume, "a/b", beginning)), "{key}");
            assert_eq!(keys.parse_name(&key).as_deref(), Some(name));
            assert_eq!(
                keys.parse_name(&keys.name(Workload::Machine, "a/b", name, instance)).as_deref(),
                Some(name)
            );
        }
        assert_eq!(keys.names_beginning(Workload::Machine, "p", "We"), "/root/names/p/we");
        assert_eq!(keys.names_beginning(Workload::Volume, "p", "We"), "/root/volume-names/p/we");
        for other in ["/root/names/p", "/root/names/p/web", "/root/instances/x/y/z", "/names/p/web/x"] {
            assert_eq!(keys.parse_name(other), None, "{other}");
        }
    }

    #[test]
    fn who_bears_a_name_or_is_a_member_is_read_from_the_key_that_says_so() {
        let keys = Keyspace::new("/r");
        let instance = InstanceId::new(uuid::Uuid::from_u128(7));
        let node = NodeId::new(uuid::Uuid::from_u128(8));
        for key in [
            keys.name(Workload::Machine, "p", "web", instance),
            keys.name(Workload::Volume, "p/q", "data", instance),
            keys.member("p", "g", node, instance),
        ] {
            assert_eq!(keys.parse_bearer(&key), Some(instance), "{key}");
            assert_eq!(keys.parse_bearer(&key.to_uppercase()), None);
        }
        for other in [keys.instance(instance), keys.all_names(Workload::Machine), format!("/q{instance}")] {
            assert_eq!(keys.parse_bearer(&other), None, "{other}");
        }
    }

    #[test]
    fn an_image_is_found_by_its_name_and_by_everybody_where_it_is_public() {
        let keys = Keyspace::new("/root");
        let id: ImageId = "33333333-3333-3333-3333-333333333333".parse().unwrap();
        let json = serde_json::json!({
            "id": id, "name": "Debian:12", "project": "a/b", "status": "active", "url": "u",
            "created_at": "1970-01-01T00:00:00Z", "updated_at": "1970-01-01T00:00:00Z",
        });
        let mut image: Image = serde_json::from_value(json).unwrap();
        assert_eq!(keys.image(id), format!("/root/images/{id}"));
        let own = format!("/root/image-names/a%2Fb/debian%3A12/{id}");
        assert_eq!(keys.names_of_image(&image), std::slice::from_ref(&own));
        assert!(own.starts_with(&keys.image_names("a/b", "DEBIAN:12")));
        image.visibility = Visibility::Public;
        let all = format!("/root/public-images/debian%3A12/{id}");
        assert_eq!(keys.names_of_image(&image), [own.clone(), all.clone()]);
        assert!(all.starts_with(&keys.public_images("debian:12")));
        image.status = crate::ImageStatus::PendingDelete;
        assert!(keys.names_of_image(&image).is_empty());
        for key in [keys.image(id), own, all] {
            assert_eq!(keys.parse_image(&key), Ok(id));
        }
        for key in ["/root/images/x", "/root/images/", &format!("/root/flavors/{id}")] {
            assert!(keys.parse_image(key).is_err(), "{key}");
        }
    }

    #[test]
    fn a_prefix_is_the_one_that_is_configured_and_never_empty() {
        assert_eq!(Keyspace::configured(None).unwrap().nodes(), "/ecompute/nodes/");
        for root in ["", "/", "//", "/a\nb", "\t"] {
            let error = Keyspace::configured(Some(root)).unwrap_err();
            assert!(error.contains("etcd.prefix"), "{error}");
            let is_empty = root.trim_matches('/').is_empty();
            assert!(error.contains(if is_empty { "is empty" } else { "control character" }), "{error}");
        }
    }

    #[test]
    fn a_key_of_another_form_is_told_with_the_form_wanted() {
        let keys = Keyspace::default();
        let errors = [
            keys.parse_node("/ecompute/nodes/x").unwrap_err(),
            keys.parse_alive("/other/alive/x").unwrap_err(),
            keys.parse_instance("/ecompute/instances/").unwrap_err(),
            keys.parse_request("/ecompute/requests/x/y").unwrap_err(),
            keys.parse_status("/ecompute/status/x").unwrap_err(),
            keys.parse_held("/ecompute/held/x").unwrap_err(),
            keys.parse_member("/ecompute/members/p/g/x").unwrap_err(),
        ];
        let wanted = [
            "nodes/<node",
            "alive/<node",
            "instances/<instance",
            "requests/<node",
            "status/<node",
            "held/<node",
            "members/<project",
        ];
        for (error, wanted) in errors.into_iter().zip(wanted) {
            assert!(error.to_string().contains(&format!("`<root>/{wanted}")), "{error}");
        }
    }
}
