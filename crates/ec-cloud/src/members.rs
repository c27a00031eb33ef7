//! Who belongs to the cloud, where etcd and placement ask who somebody is.
//!
//! A node that joins gets a user of its own in etcd, with its role, and a token for placement that is bound to its
//! resource provider. The token's record, which bears the node's name, is the first that is written and the last that
//! goes: whoever is killed between finds it, and does the same again.

use std::sync::Arc;

use ec_model::{
    Doc, Keyspace, Node, NodeId, RecordError, Token, decode, encode, placement_tokens, token_digest,
};
use ec_store::{Compare, Txn, Users};
use jiff::Timestamp;
use serde_json::Value;

use crate::{CloudError, CloudResult, rights::Part};

/// The user and the role that may do everything.
pub const ROOT: &str = "root";

/// A node's record is written by its agent, too, and its tokens by whoever adds it; more often than this at once something is wrong.
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

    /// Lets a node in, with this token for placement; one that it had is good no more. Until all else is done it is, so that nothing
    /// that breaks off here locks a node out.
    ///
    /// # Errors
    /// [`CloudError::Busy`] where somebody else adds another node of this name, or this one by another, or revokes it, at the same
    /// moment; then this token lets nobody in.
    pub async fn add_node(&self, name: &str, node: NodeId, token: &str) -> CloudResult<()> {
        let before = self.give_token(&Token { name: name.to_owned(), provider: Some(node) }, token).await?;
        let nodes = self.nodes().await?;
        if nodes.iter().any(|(other, id)| other.eq_ignore_ascii_case(name) && *id != node) {
            self.drop_keys(vec![self.token_key(token)]).await?;
            return Err(CloudError::Busy(format!("somebody else adds a node `{name}` at this moment")));
        }
        // One of the two would be revoked with the other.
        if let Some((other, _)) =
            nodes.iter().find(|(other, id)| !other.eq_ignore_ascii_case(name) && *id == node)
        {
            self.drop_keys(vec![self.token_key(token)]).await?;
            return Err(CloudError::Busy(format!("{node} is node `{other}` by now")));
        }
        self.mark(name, node, false).await?;
        let part = Part::Node(node);
        self.admit(&part.role(), part).await?;
        if self.has_token(node).await? && !self.is_marked(node).await? {
            return self.drop_keys(before).await;
        }
        // Revoked meanwhile, by somebody who may be done with it, and no later call finds a node without a token: its rights go, the mark
        // is set again, and the sign of life goes that it may have given with these rights.
        self.end(name, node).await?;
        Err(CloudError::Busy(format!("somebody else revokes node `{name}` at this moment")))
    }

    /// Lets a node in no more: neither into etcd nor into placement. Its guests run on.
    ///
    /// # Errors
    /// [`CloudError::NotFound`] where there is none of that name; [`CloudError::Busy`] where others add it all the time.
    pub async fn revoke_node(&self, name: &str) -> CloudResult<NodeId> {
        let Some(node) = self.node(name).await? else {
            return Err(CloudError::NotFound(format!(
                "there is no node `{name}`: `eschedule node list` shows those that were added"
            )));
        };
        self.end(name, node).await?;
        Ok(node)
    }

    /// Shuts a node out, and takes its tokens away: those last, so that whoever is killed finds the node again.
    async fn end(&self, name: &str, node: NodeId) -> CloudResult<()> {
        let mut tries = 0..TRIES;
        loop {
            self.shut_out(name, node).await?;
            // Looked for after that: who adds the node at this moment gives it a token before the rights. Of whom one is found is shut out
            // once more when it is gone; whoever finds its own gone does that by itself; and who gives one from now on lets it in anew.
            let tokens = self.tokens().await?.into_iter();
            let its: Vec<_> =
                tokens.filter(|known| known.token.provider == Some(node)).map(|known| known.key).collect();
            if its.is_empty() {
                return Ok(());
            }
            // Before they are taken away: by them the next call finds the node.
            if tries.next().is_none() {
                return Err(CloudError::Busy(format!(
                    "somebody else adds node `{name}` again and again at this moment, and it may be let in; once that has ended, try again"
                )));
            }
            self.drop_keys(its).await?;
        }
    }

    /// Takes a node's rights in etcd away, marks it as revoked, and has it count as dead.
    async fn shut_out(&self, name: &str, node: NodeId) -> CloudResult<()> {
        // First its rights: until then it could write its sign of life again, and etcd asks nobody for rights to keep a lease alive.
        self.store.drop_user(&Part::Node(node).role()).await?;
        self.mark(name, node, true).await?;
        self.store.txn(Txn::new().delete(self.keys.alive(node)).delete(self.keys.agent(node))).await?;
        Ok(())
    }

    async fn has_token(&self, node: NodeId) -> CloudResult<bool> {
        Ok(self.nodes().await?.iter().any(|(_, id)| *id == node))
    }

    async fn is_marked(&self, node: NodeId) -> CloudResult<bool> {
        let pair = self.store.get(&self.keys.node(node)).await?.0;
        Ok(pair.and_then(|pair| decode::<Node>(&pair.value).ok()).is_some_and(|record| record.revoked))
    }

    /// Writes down whether a node is revoked.
    async fn mark(&self, name: &str, node: NodeId, revoked: bool) -> CloudResult<()> {
        let key = self.keys.node(node);
        for _ in 0..TRIES {
            let pair = self.store.get(&key).await?.0;
            let there = pair.as_ref().map(|pair| pair.value.as_slice());
            let Some(value) = marked(there, name, node, revoked) else { return Ok(()) };
            let revision = pair.as_ref().map_or(0, |pair| pair.mod_revision);
            let txn = Txn::new().when(Compare::Unchanged(key.clone(), revision));
            if self.store.txn(txn.put(key.clone(), value)).await?.succeeded {
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
        // Of one that is being given another token both are there.
        nodes.dedup();
        Ok(nodes)
    }

    async fn admit(&self, user: &str, part: Part) -> CloudResult<()> {
        let role = part.role();
        self.store.ensure_role(&role, &part.rights(&self.keys, &self.keys.placement())).await?;
        Ok(self.store.ensure_user(user, &role).await?)
    }

    /// Writes a token in place of those that its owner had.
    async fn replace_token(&self, owner: &Token, token: &str) -> CloudResult<()> {
        let before = self.give_token(owner, token).await?;
        self.drop_keys(before).await
    }

    /// Writes a token beside those that its owner has: a node by its uuid, however it was called then. Answers their keys.
    async fn give_token(&self, owner: &Token, token: &str) -> CloudResult<Vec<String>> {
        let key = self.token_key(token);
        let (mut before, mut txn) = (Vec::new(), Txn::new());
        for known in self.tokens().await? {
            let is_its = match owner.provider {
                Some(_) => known.token.provider == owner.provider,
                None => known.token == *owner,
            };
            if is_its && known.key != key {
                txn = txn.when(Compare::Unchanged(known.key.clone(), known.revision));
                before.push(known.key);
            }
        }
        if self.store.txn(txn.put(key, encode(owner))).await?.succeeded {
            return Ok(before);
        }
        Err(CloudError::Busy(format!("somebody else gives {} a token at this moment; try again", owner.name)))
    }

    async fn drop_keys(&self, keys: Vec<String>) -> CloudResult<()> {
        for key in keys {
            self.store.txn(Txn::new().delete(key)).await?;
        }
        Ok(())
    }

    fn token_key(&self, token: &str) -> String {
        format!("{}{}", placement_tokens(&self.keys.placement()), token_digest(token))
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

/// A node's record with the mark, or without it; nothing where it is so already.
///
/// The node itself may write it, and whoever took it over may have deleted or damaged it, so that no mark would be there: then it is
/// made anew. Of what a later release wrote all else stays.
fn marked(there: Option<&[u8]>, name: &str, node: NodeId, revoked: bool) -> Option<Vec<u8>> {
    // When it came first, nobody knows any more.
    let anew = || {
        let (name, created_at) = (name.to_owned(), Timestamp::UNIX_EPOCH);
        encode(&Node { node, name, created_at, troubles: Vec::new(), revoked })
    };
    // Its agent makes it where there is none.
    let Some(there) = there else { return revoked.then(anew) };
    match Doc::<Node>::decode(there) {
        Ok(doc) if doc.record.revoked == revoked => None,
        Ok(mut doc) => {
            doc.record.revoked = revoked;
            Some(doc.encode())
        }
        Err(RecordError::TooNew { .. }) => {
            let mut raw: Value = serde_json::from_slice(there).ok()?;
            let before = raw.get("revoked").cloned().unwrap_or(Value::Bool(false));
            *raw.as_object_mut()?.entry("revoked").or_insert(Value::Null) = Value::Bool(revoked);
            (before != Value::Bool(revoked)).then(|| raw.to_string().into_bytes())
        }
        Err(_) => Some(anew()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::{
            Mutex,
            atomic::{AtomicBool, Ordering},
        },
    };

    use async_trait::async_trait;
    use ec_store::{Grant, Layer, MemoryStore, Store, StoreError, StoreResult, TxnOutcome};
    use futures::{FutureExt, future::BoxFuture};

    use super::*;

    /// What somebody else does meanwhile, once.
    type Meanwhile = Mutex<Option<BoxFuture<'static, ()>>>;

    async fn happens(meanwhile: &Meanwhile) {
        let does = meanwhile.lock().unwrap().take();
        if let Some(does) = does {
            does.await;
        }
    }

    /// An etcd in which users cannot be made for a while.
    #[derive(Default)]
    struct Etcd {
        memory: MemoryStore,
        users: Arc<Mutex<BTreeSet<String>>>,
        ails: AtomicBool,
        /// After a token was given or taken away.
        after_token: Meanwhile,
        /// Before a user is taken away.
        before_user_goes: Meanwhile,
        /// Before a node's sign of life is taken away.
        before_end: Meanwhile,
        /// After a user was made.
        after_user: Meanwhile,
    }

    #[async_trait]
    impl Layer for Etcd {
        fn inner(&self) -> &dyn Store {
            &self.memory
        }

        async fn txn(&self, txn: Txn) -> StoreResult<TxnOutcome> {
            if format!("{txn:?}").contains("/alive/") {
                happens(&self.before_end).await;
            }
            let is_of_token = format!("{txn:?}").contains("-tokens/");
            let outcome = self.memory.txn(txn).await;
            if is_of_token {
                happens(&self.after_token).await;
            }
            outcome
        }
    }

    #[async_trait]
    impl Users for Etcd {
        async fn ensure_role(&self, _: &str, _: &[Grant]) -> StoreResult<()> {
            match self.ails.load(Ordering::Relaxed) {
                true => Err(StoreError::Unreachable { endpoints: "memory".into(), detail: "as told".into() }),
                false => Ok(()),
            }
        }

        async fn ensure_user(&self, user: &str, _: &str) -> StoreResult<()> {
            self.users.lock().unwrap().insert(user.to_owned());
            happens(&self.after_user).await;
            Ok(())
        }

        async fn drop_user(&self, user: &str) -> StoreResult<()> {
            happens(&self.before_user_goes).await;
            self.users.lock().unwrap().remove(user);
            Ok(())
        }

        async fn enable_auth(&self) -> StoreResult<()> {
            Ok(())
        }
    }

    fn node(number: u128) -> NodeId {
        NodeId::new(uuid::Uuid::from_u128(number))
    }

    fn members() -> (Arc<Etcd>, Membership) {
        let etcd = Arc::new(Etcd::default());
        (etcd.clone(), Membership::new(etcd, Keyspace::default()))
    }

    /// Somebody else at the same etcd.
    fn other(etcd: &Etcd) -> Membership {
        let (memory, users) = (etcd.memory.clone(), Arc::clone(&etcd.users));
        Membership::new(Arc::new(Etcd { memory, users, ..Etcd::default() }), Keyspace::default())
    }

    /// That a node is marked, and that nothing is left which lets it in or by which it counts as alive.
    async fn is_out(etcd: &Etcd, members: &Membership, node: NodeId) -> bool {
        let (alive, agent) = (members.keys.alive(node), members.keys.agent(node));
        members.is_marked(node).await.unwrap()
            && members.nodes().await.unwrap().is_empty()
            && etcd.users.lock().unwrap().is_empty()
            && etcd.memory.get(&alive).await.unwrap().0.is_none()
            && etcd.memory.get(&agent).await.unwrap().0.is_none()
    }

    #[tokio::test]
    async fn new_credentials_that_break_off_leave_the_old_ones_good() {
        let (etcd, members) = members();
        let has = async |token: &str| {
            let key = members.token_key(token);
            members.store.get(&key).await.unwrap().0.is_some()
        };
        members.add_node("host1", node(1), "old").await.unwrap();
        etcd.ails.store(true, Ordering::Relaxed);
        members.add_node("host1", node(1), "lost").await.unwrap_err();
        assert!(has("old").await);
        assert_eq!(members.nodes().await.unwrap(), [("host1".to_owned(), node(1))]);
        etcd.ails.store(false, Ordering::Relaxed);
        // Nor does one of another name take them away.
        members.add_node("host2", node(2), "its").await.unwrap();
        let busy = members.add_node("host2", node(1), "other").await.unwrap_err();
        assert!(matches!(busy, CloudError::Busy(_)) && has("old").await && !has("other").await, "{busy}");

        // Nor is one a second node by another name, which is not looked for before.
        let busy = members.add_node("host3", node(1), "other").await.unwrap_err();
        assert!(matches!(busy, CloudError::Busy(_)) && has("old").await && !has("other").await, "{busy}");

        members.add_node("host1", node(1), "new").await.unwrap();
        assert!(has("new").await && !has("old").await && !has("lost").await);
        members.revoke_node("HOST1").await.unwrap();
        assert!(!has("new").await && has("its").await);
    }

    #[tokio::test]
    async fn who_is_added_while_it_is_revoked_is_either() {
        let (etcd, members) = members();
        members.add_node("host1", node(1), "old").await.unwrap();

        // It is added when it was marked, and its token taken away.
        let adds = other(&etcd);
        let adds = async move { adds.add_node("host1", node(1), "new").await.unwrap() };
        *etcd.before_end.lock().unwrap() = Some(adds.boxed());
        members.revoke_node("host1").await.unwrap();
        assert!(members.is_marked(node(1)).await.unwrap() && members.nodes().await.unwrap().is_empty());

        // It is marked once more when it has a token again.
        let marks = other(&etcd);
        let marks = async move { marks.mark("host1", node(1), true).await.unwrap() };
        *etcd.after_user.lock().unwrap() = Some(marks.boxed());
        let busy = members.add_node("host1", node(1), "new").await.unwrap_err();
        assert!(matches!(busy, CloudError::Busy(_)), "{busy}");
        assert!(members.is_marked(node(1)).await.unwrap() && members.nodes().await.unwrap().is_empty());

        members.add_node("host1", node(1), "new").await.unwrap();
        assert!(!members.is_marked(node(1)).await.unwrap() && !members.nodes().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn who_is_revoked_as_a_whole_while_it_is_added_is_out() {
        let (etcd, members) = members();
        members.add_node("host1", node(1), "old").await.unwrap();

        let revokes = other(&etcd);
        let revokes = async move { revokes.revoke_node("host1").await.map(drop).unwrap() };
        *etcd.after_token.lock().unwrap() = Some(revokes.boxed());
        // With the rights of that moment its agent, which tries all the time, tells that it is there.
        let (memory, keys) = (etcd.memory.clone(), Keyspace::default());
        let tells = async move {
            let shown = Txn::new().put(keys.alive(node(1)), b"{}").put(keys.agent(node(1)), b"{}");
            memory.txn(shown).await.map(drop).unwrap();
        };
        *etcd.after_user.lock().unwrap() = Some(tells.boxed());
        let busy = members.add_node("host1", node(1), "new").await.unwrap_err();
        assert!(matches!(busy, CloudError::Busy(_)), "{busy}");
        assert!(is_out(&etcd, &members, node(1)).await);
    }

    #[tokio::test]
    async fn who_is_added_as_a_whole_while_it_is_revoked_is_out() {
        let (etcd, members) = members();
        members.add_node("host1", node(1), "old").await.unwrap();

        // When its token is gone, and it is about to be shut out once more.
        let adds = other(&etcd);
        let adds = async move { adds.add_node("host1", node(1), "new").await.unwrap() };
        let then = Arc::clone(&etcd);
        let waits = async move { *then.before_user_goes.lock().unwrap() = Some(adds.boxed()) };
        *etcd.after_token.lock().unwrap() = Some(waits.boxed());
        members.revoke_node("host1").await.unwrap();
        assert!(etcd.before_user_goes.lock().unwrap().is_none(), "it was added");
        assert!(is_out(&etcd, &members, node(1)).await);
    }

    #[tokio::test]
    async fn who_is_added_again_and_again_is_revoked_when_that_has_ended() {
        fn again(etcd: Arc<Etcd>) -> BoxFuture<'static, ()> {
            let adds = other(&etcd);
            let adds = async move {
                adds.add_node("host1", node(1), "new").await.unwrap();
                *etcd.before_end.lock().unwrap() = Some(again(etcd.clone()));
            };
            adds.boxed()
        }
        let (etcd, members) = members();
        members.add_node("host1", node(1), "old").await.unwrap();
        *etcd.before_end.lock().unwrap() = Some(again(etcd.clone()));
        let busy = members.revoke_node("host1").await.unwrap_err();
        assert!(matches!(busy, CloudError::Busy(_)), "{busy}");

        *etcd.before_end.lock().unwrap() = None;
        members.revoke_node("host1").await.unwrap();
        assert!(is_out(&etcd, &members, node(1)).await);
    }

    #[tokio::test]
    async fn a_node_that_took_its_record_away_is_marked_all_the_same() {
        let (_, members) = members();
        let key = members.keys.node(node(1));
        let put = async |value: &[u8]| {
            members.store.txn(Txn::new().put(key.clone(), value)).await.unwrap();
        };
        let value = async || members.store.get(&key).await.unwrap().0.map(|pair| pair.value);
        let said = async || decode::<Node>(&value().await.unwrap()).unwrap().revoked;

        members.add_node("host1", node(1), "token").await.unwrap();
        assert_eq!(value().await, None, "its agent makes it");
        members.revoke_node("host1").await.unwrap();
        assert!(said().await);
        members.add_node("host1", node(1), "token").await.unwrap();
        assert!(!said().await);
        put(b"{").await;
        members.revoke_node("host1").await.unwrap();
        assert!(said().await);
        put(b"none").await;
        members.add_node("host1", node(1), "token").await.unwrap();
        assert!(!said().await);

        // Of a later release.
        put(br#"{"version":9,"new":[1]}"#).await;
        let raw = async || serde_json::from_slice::<Value>(&value().await.unwrap()).unwrap();
        for revoked in [true, false] {
            members.mark("host1", node(1), revoked).await.unwrap();
            assert_eq!(raw().await, serde_json::json!({"version": 9, "new": [1], "revoked": revoked}));
        }
    }
}
