//! What scenarios are written in.

use std::{fmt, ops::Deref, sync::Arc, time::Duration};

use ec_cloud::Scheduled;
use ec_hypervisor::{End, Pause, RunState};
use ec_model::{Desired, InstanceId, State};
use ec_placement_client::{DISABLED, Request};
use ec_store::{Backup, Store, Txn};
use reqwest::{
    Method, Url,
    header::{HeaderMap, HeaderValue},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::people::User;
use crate::{
    acts,
    door::content,
    life::Life,
    node::Computer,
    referee::observed,
    replica::ADMIN,
    snag::Fate,
    traces::{Traces, records},
    way::Way,
    world::{Actor, World},
};

/// What comes to be comes to be in this time, whatever has to be waited for: leases, looks, audits, resyncs.
const PATIENCE: Duration = Duration::from_secs(10 * 60);
const PERIOD: Duration = Duration::from_millis(250);

/// The world, for who writes scenarios. Nodes, replicas and users count from 1.
#[derive(Clone)]
pub(crate) struct Stage {
    pub(super) world: Arc<World>,
}

/// All that is to be seen of an instance at a moment.
pub(super) struct Sight {
    traces: Traces,
    pub(super) domain: Option<RunState>,
    /// It can be read, and asks for this.
    pub(super) asked_for: Option<Desired>,
}

impl Deref for Sight {
    type Target = Traces;

    fn deref(&self) -> &Traces {
        &self.traces
    }
}

impl Sight {
    pub(super) fn is(&self, state: State) -> bool {
        self.status.as_ref().is_some_and(|status| status.state == state)
    }

    /// Whether it gives this among its reasons.
    pub(super) fn says(&self, text: &str) -> bool {
        let reason = self.status.as_ref().and_then(|status| status.reason.as_ref());
        reason.is_some_and(|reason| reason.contains(text))
    }

    pub(super) fn runs(&self) -> bool {
        self.domain == Some(RunState::Running)
    }

    /// Its guest runs, everybody knows it, and it is counted.
    pub(super) fn is_well(&self) -> bool {
        self.is(State::Active) && self.runs() && self.is_kept()
    }

    /// Nothing of what it needs was taken away.
    pub(super) fn is_kept(&self) -> bool {
        self.claim && self.volume && self.domain.is_some() && self.record
    }

    pub(super) fn is_gone(&self) -> bool {
        !self.is_anything()
    }
}

impl fmt::Display for Sight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told())?;
        self.domain.map_or(Ok(()), |domain| write!(f, " ({domain:?})"))
    }
}

impl Stage {
    pub(crate) fn new(world: &Arc<World>) -> Self {
        Self { world: Arc::clone(world) }
    }

    pub(super) fn say(&self, what: impl AsRef<str>) {
        acts::say(&self.world, what);
    }

    pub(super) async fn pass(&self, seconds: u64) {
        sleep(Duration::from_secs(seconds)).await;
    }

    /// What must not be; nothing follows.
    pub(super) async fn fail<T>(&self, what: impl Into<String>) -> T {
        self.world.judge(|referee, _| referee.found(what));
        std::future::pending().await
    }

    /// Ends the history where this does not hold.
    pub(super) async fn demand(&self, holds: bool, what: &str) {
        if !holds {
            self.fail::<()>(format!("this does not hold: {what}")).await;
        }
        self.say(format!("so it is: {what}"));
    }

    // What there is.

    /// A node by its number; behind the last their clones.
    pub(super) fn node(&self, number: usize) -> &Arc<Computer> {
        let nodes = &self.world.computers;
        nodes.get(number - 1).unwrap_or_else(|| &self.world.clones[number - 1 - nodes.len()])
    }

    pub(super) fn sight(&self, instance: InstanceId) -> Sight {
        let seen = self.world.computers.iter().find_map(|computer| observed(computer, instance));
        let traces = Traces::of(&self.world, &records(&self.world), instance);
        let asked_for = traces.request.as_ref().map(|request| request.desired);
        Sight { traces, domain: seen.and_then(|seen| seen.domain), asked_for }
    }

    /// Waits until an instance is so.
    pub(super) async fn until(&self, instance: InstanceId, what: &str, is_so: impl Fn(&Sight) -> bool) {
        let begun = Instant::now();
        while !is_so(&self.sight(instance)) {
            if begun.elapsed() > PATIENCE {
                let is = self.sight(instance);
                self.fail::<()>(format!("{instance} shall be {what}, and there is {is}")).await;
            }
            sleep(PERIOD).await;
        }
        self.say(format!("{instance} is {what}: {}", self.sight(instance)));
    }

    /// An instance is so now, and all the time for so long.
    pub(super) async fn stays(
        &self,
        instance: InstanceId,
        seconds: u64,
        what: &str,
        is_so: impl Fn(&Sight) -> bool,
    ) {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(seconds) {
            let is = self.sight(instance);
            if !is_so(&is) {
                self.fail::<()>(format!("{instance} shall stay {what}, and there is {is}")).await;
            }
            sleep(PERIOD).await;
        }
        self.say(format!("{instance} stays {what} for {seconds} s: {}", self.sight(instance)));
    }

    pub(super) async fn until_well(&self, instance: InstanceId) {
        self.until(instance, "well", Sight::is_well).await;
    }

    pub(super) async fn until_gone(&self, instance: InstanceId) {
        self.until(instance, "gone", Sight::is_gone).await;
    }

    pub(super) async fn until_down(&self, node: usize) {
        let begun = Instant::now();
        while self.node(node).is_up() {
            if begun.elapsed() > PATIENCE {
                self.fail::<()>(format!("the agent of n{node} shall end")).await;
            }
            sleep(PERIOD).await;
        }
    }

    /// It may be in trouble from here on.
    pub(super) fn expects_trouble(&self, instance: InstanceId) {
        self.world.judge(|referee, _| referee.disturbed(instance));
    }

    // What people with command lines do.

    pub(super) fn user(&self, number: u32) -> User {
        User::new(self, number)
    }

    /// One instance that was asked for, and is placed.
    pub(super) async fn placed(&self, name: &'static str) -> Scheduled {
        match self.user(1).schedule(name).await {
            Ok(placed) => placed,
            Err(why) => self.fail(format!("{name} was not placed: {why}")).await,
        }
    }

    /// One that is ACTIVE.
    pub(super) async fn ready(&self, name: &'static str) -> InstanceId {
        let placed = self.placed(name).await;
        if !self.user(1).waits_for(placed).await {
            self.fail::<()>(format!("{name} does not come up")).await;
        }
        placed.instance
    }

    /// A user's destroy that is answered as it should be.
    pub(super) async fn destroyed(&self, instance: InstanceId) {
        if let Err(why) = self.user(1).destroy(instance).await {
            self.fail::<()>(format!("{instance} was not destroyed: {why}")).await;
        }
    }

    // What is done to the cluster.

    pub(super) fn snag(&self, who: &'static str, call: &'static str, fate: Fate) {
        self.world.snag(who, call, fate, 1);
    }

    pub(super) fn kill(&self, node: usize) {
        acts::kill_agent(&self.world, self.node(node));
    }

    pub(super) fn start(&self, node: usize) {
        let computer = self.node(node);
        if !computer.is_up() {
            computer.start(&self.world);
        }
    }

    pub(super) fn stop(&self, node: usize) {
        acts::stop_agent(&self.world, self.node(node));
    }

    pub(super) async fn crash(&self, node: usize) {
        acts::crash_host(&self.world, self.node(node)).await;
    }

    pub(super) fn trouble(&self, node: usize, is_full: bool) {
        acts::trouble(&self.world, self.node(node), is_full);
    }

    pub(super) fn kill_replica(&self, number: usize) {
        acts::kill_replica(&self.world, number - 1);
    }

    pub(super) fn start_replica(&self, number: usize) {
        self.world.replicas.start(&self.world, number - 1);
    }

    pub(super) fn agent(&self, node: usize) -> Actor {
        acts::name(self.node(node))
    }

    pub(super) fn cut(&self, who: Actor, seconds: u64) {
        self.say(format!("cuts {who} off from etcd for {seconds} s"));
        self.world.cut(who, Duration::from_secs(seconds));
        self.world.store.faults().break_watches();
    }

    pub(super) async fn etcd_away(&self, seconds: u64) {
        self.say(format!("takes etcd away for {seconds} s"));
        self.world.store.faults().set_reachable(false);
        self.pass(seconds).await;
        self.world.store.faults().set_reachable(true);
        self.say("gives etcd back");
    }

    pub(super) fn back_up(&self) -> Backup {
        acts::back_up(&self.world)
    }

    pub(super) fn restore(&self, backup: &Backup) {
        acts::restore(&self.world, backup);
    }

    pub(super) fn empty_etcd(&self) {
        self.say("empties etcd");
        self.world.next_era();
        self.world.judge(|referee, world| referee.replaced(world));
        self.world.store.faults().wipe();
    }

    pub(super) fn undefine(&self, node: usize, guest: InstanceId) {
        acts::undefine(&self.world, self.node(node), guest);
    }

    pub(super) fn delete_disk(&self, node: usize, guest: InstanceId) {
        acts::delete_disk(&self.world, self.node(node), guest);
    }

    pub(super) fn end_guest(&self, node: usize, guest: InstanceId, why: End) {
        acts::end_guest(&self.world, self.node(node), guest, why);
    }

    pub(super) fn pause_guest(&self, node: usize, guest: InstanceId, why: Pause) {
        acts::pause_guest(&self.world, self.node(node), guest, why);
    }

    /// While the first node's agent is down somebody deletes its record of a guest, and the guest's status, too.
    pub(super) async fn forget(&self, guest: InstanceId, with_status: bool) {
        self.kill(1);
        self.say(format!("somebody deletes the record of {guest} on n1"));
        self.node(1).lose_record(guest);
        if with_status {
            self.delete(&self.world.keys.status(self.node(1).node, guest)).await;
        }
        self.start(1);
    }

    // What operators do by hand. The referee is told, where programs could be blamed for it.

    pub(super) fn get(&self, key: &str) -> Option<Vec<u8>> {
        content(&self.world, key).map(|pair| pair.value)
    }

    pub(super) async fn put(&self, key: &str, value: impl Into<Vec<u8>>) {
        self.say(format!("puts {key} by hand"));
        self.world.store.txn(Txn::new().put(key, value)).await.ok();
    }

    pub(super) async fn delete(&self, key: &str) {
        self.say(format!("deletes {key} by hand"));
        self.world.judge(|referee, world| referee.replaced(world));
        self.world.store.txn(Txn::new().delete(key)).await.ok();
    }

    /// Asks placement for something as an operator does; the status and the document of the answer.
    pub(super) async fn placement(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        self.say(format!("asks placement by hand: {method} {path}"));
        let answer = self.ask_placement(ADMIN, method, path, body).await;
        let why = answer.1["errors"][0]["detail"].as_str().unwrap_or_default().trim().to_owned();
        self.say(format!("     is answered with {} {why}", answer.0).trim_end());
        answer
    }

    /// Has placement offer nothing of a node, as an operator does, or offer it again.
    pub(super) async fn disable(&self, node: usize, is_disabled: bool) {
        let path = format!("/resource_providers/{}/traits", self.node(node).node);
        let (_, mut traits) = self.placement(Method::GET, &path, None).await;
        if let Some(all) = traits["traits"].as_array_mut() {
            all.retain(|name| name != DISABLED);
            all.extend(is_disabled.then(|| json!(DISABLED)));
        }
        self.placement(Method::PUT, &path, Some(traits)).await;
    }

    /// The same with this token, without a word in the log.
    pub(super) async fn ask_placement(
        &self,
        token: &str,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> (u16, Value) {
        let url: Url = match format!("http://placement{path}").parse() {
            Ok(url) => url,
            Err(error) => return self.fail(format!("{path}: {error}")).await,
        };
        let mut headers = HeaderMap::new();
        let Ok(token) = token.parse() else { return self.fail(format!("no token: {token}")).await };
        headers.insert("x-auth-token", token);
        headers.insert("openstack-api-version", HeaderValue::from_static("placement 1.39"));
        let way = Way { world: Arc::clone(&self.world), actor: Actor::Nemesis, life: Life::new() };
        match way.ask(Request { method, url, headers, body }, true).await {
            Ok(answer) => {
                let status = answer.status.as_u16();
                (status, serde_json::from_slice(&answer.body).unwrap_or_default())
            }
            Err(error) => self.fail(format!("placement does not answer by hand: {error}")).await,
        }
    }
}
