//! Who belongs to the cloud, where etcd and placement ask who somebody is.
//!
//! A node that joins gets a user of its own in etcd, with its role, and a token for placement that is bound to its
//! resource provider. The token's record, which bears the node's name, is the first that is written and the last that
//! goes: whoever is killed between finds it, and does the same again.

use std::sync::Arc;

use ec_model::{Doc, Keyspace, Node, NodeId, Token, decode, encode, placement_tokens, token_digest};
use ec_store::{Compare, Txn, Users};

use crate::{CloudError, CloudResult, rights::Part};

/// The user and the role that may do everything.
pub const ROOT: &str = "root";

/// A node's record is written by its agent, too; more often than this at once something is wrong.
const TRIES: usize = 10;

/// The etcd of a cloud as its administrator sees it.
pub struct Membership {
    store: Arc<dyn Users>,
    keys: Keyspace,
}

/// A member with a token, as etcd knows it.
struct Known {
    key: String,
    revision: ec_store::Revision,
    token: Token,
}

impl Membership {
    /// Through a connection of the user `root`.
    pub fn new(store: Arc<dyn Users>, keys: Keyspace) -> Self {
        Self { store, keys }
    }

    /// Makes users and roles of all but the nodes, gives the nodes that there are the rights of this release, and lets nobody in from now on who has none. `tokens` are those of
    /// the parts that ask placement, by their names. Doing it again changes what is otherwise.
    ///
    /// # Errors
    /// etcd is away, or does not let us.
    pub async fn settle(&self, tokens: &[(&str, &str)]) -> CloudResult<()> {
        self.store.ensure_user(ROOT, ROOT).await?;
        for (user, part) in
            [("eschedule", Part::Control), ("econtroller", Part::Control), ("eplacement", Part::Placement)]
        {
            self.admit(user, part).await?;
        }
        // Another release may need other rights. Only these: who was revoked at this moment does not come back.
        for (_, node) in self.nodes().await? {
            let part = Part::Node(node);
            self.store.ensure_role(&part.role(), &part.rights(&self.keys, &self.keys.placement())).await?;
        }
        for (name, token) in tokens {
            self.replace_token(&Token { name: (*name).to_owned(), provider: None }, token).await?;
        }
        Ok(self.store.enable_auth().await?)
    }

    /// The uuid of the node of this name, where one was added.
    ///
    /// # Errors
    /// etcd is away, or does not let us.
    pub async fn node(&self, name: &str) -> CloudResult<Option<NodeId>> {
        Ok(self
            .tokens()
            .await?
            .into_iter()
            .find_map(|known| known.token.provider.filter(|_| known.token.name.eq_ignore_ascii_case(name))))
    }

    /// Lets a node in, with this token for placement; one that it had is good no more.
    ///
    /// # Errors
    /// [`CloudError::Busy`] where somebody else adds another node of this name at the same moment.
    pub async fn add_node(&self, name: &str, node: NodeId, token: &str) -> CloudResult<()> {
        self.replace_token(&Token { name: name.to_owned(), provider: Some(node) }, token).await?;
        let nodes = self.nodes().await?;
        if nodes.iter().any(|(other, id)| other.eq_ignore_ascii_case(name) && *id != node) {
            self.drop_tokens(node).await?;
            return Err(CloudError::Busy(format!("somebody else adds a node `{name}` at this moment")));
        }
        self.mark(node, false).await?;
        let part = Part::Node(node);
        self.admit(&part.role(), part).await?;
        if self.nodes().await?.iter().any(|(_, id)| *id == node) {
            return Ok(());
        }
        // Revoked meanwhile: rights of what nobody knows could not be taken away any more.
        self.store.drop_user(&part.role()).await?;
        Err(CloudError::Busy(format!("somebody else revokes node `{name}` at this moment")))
    }

    /// Lets a node in no more: neither into etcd nor into placement. Its guests run on.
    ///
    /// # Errors
    /// [`CloudError::NotFound`] where there is none of that name.
    pub async fn revoke_node(&self, name: &str) -> CloudResult<NodeId> {
        let Some(node) = self.node(name).await? else {
            return Err(CloudError::NotFound(format!(
                "there is no node `{name}`: `eschedule node list` shows those that were added"
            )));
        };
        // First its rights: until then it could write its sign of life again, and etcd asks nobody for rights to keep a lease alive.
        self.store.drop_user(&Part::Node(node).role()).await?;
        self.mark(node, true).await?;
        self.store.txn(Txn::new().delete(self.keys.alive(node)).delete(self.keys.agent(node))).await?;
        self.drop_tokens(node).await?;
        // Who added it once more at this moment finds no token of it; whoever comes after that makes a user anew.
        self.store.drop_user(&Part::Node(node).role()).await?;
        Ok(node)
    }

    /// Writes down whether a node is revoked, where it ever was there.
    async fn mark(&self, node: NodeId, revoked: bool) -> CloudResult<()> {
        let key = self.keys.node(node);
        for _ in 0..TRIES {
            let Some(pair) = self.store.get(&key).await?.0 else { return Ok(()) };
            // What a later release wrote, or somebody damaged, stays as it is: the rights are what counts.
            let Ok(mut doc) = Doc::<Node>::decode(&pair.value) else { return Ok(()) };
            if doc.record.revoked == revoked {
                return Ok(());
            }
            doc.record.revoked = revoked;
            let txn = Txn::new().when(Compare::Unchanged(key.clone(), pair.mod_revision));
            if self.store.txn(txn.put(key.clone(), doc.encode())).await?.succeeded {
                return Ok(());
            }
        }
        Err(CloudError::Busy(format!("the record of node {node} keeps changing; try again")))
    }

    /// All nodes that were added, by name.
    ///
    /// # Errors
    /// etcd is away, or does not let us.
    pub async fn nodes(&self) -> CloudResult<Vec<(String, NodeId)>> {
        let tokens = self.tokens().await?.into_iter();
        let mut nodes: Vec<_> =
            tokens.filter_map(|known| Some((known.token.name, known.token.provider?))).collect();
        nodes.sort();
        Ok(nodes)
    }

    async fn admit(&self, user: &str, part: Part) -> CloudResult<()> {
        let role = part.role();
        self.store.ensure_role(&role, &part.rights(&self.keys, &self.keys.placement())).await?;
        Ok(self.store.ensure_user(user, &role).await?)
    }

    /// Writes a token in place of those that its owner had: a node by its uuid, however it was called then.
    async fn replace_token(&self, owner: &Token, token: &str) -> CloudResult<()> {
        let key = format!("{}{}", placement_tokens(&self.keys.placement()), token_digest(token));
        let mut txn = Txn::new();
        for known in self.tokens().await? {
            let is_its = match owner.provider {
                Some(_) => known.token.provider == owner.provider,
                None => known.token == *owner,
            };
            if is_its && known.key != key {
                txn = txn.when(Compare::Unchanged(known.key.clone(), known.revision)).delete(known.key);
            }
        }
        if self.store.txn(txn.put(key, encode(owner))).await?.succeeded {
            return Ok(());
        }
        Err(CloudError::Busy(format!("somebody else gives {} a token at this moment; try again", owner.name)))
    }

    async fn drop_tokens(&self, node: NodeId) -> CloudResult<()> {
        for known in self.tokens().await?.into_iter().filter(|known| known.token.provider == Some(node)) {
            self.store.txn(Txn::new().delete(known.key)).await?;
        }
        Ok(())
    }

    async fn tokens(&self) -> CloudResult<Vec<Known>> {
        let listing = self.store.list(&placement_tokens(&self.keys.placement())).await?;
        // What cannot be read lets nobody in, and is not ours to take away.
        let readable = listing.pairs.into_iter().filter_map(|pair| {
            let token = decode(&pair.value).ok()?;
            Some(Known { key: pair.key, revision: pair.mod_revision, token })
        });
        Ok(readable.collect())
    }
}
