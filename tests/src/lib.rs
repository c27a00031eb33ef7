//! A whole stack of real parts for one test: etcd, placement, a libvirtd of its own, an agent as
//! a process that can be killed, and the command line.
//!
//! Everything is ended when the value is dropped, also after a failed test.

mod bridge;
pub mod control;
mod placement;
mod postgres;
mod releases;
pub mod replica;
mod running;
mod s3;
mod second;
mod terminal;

use std::{
    fs,
    io::Write as _,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
pub use bridge::Bridge;
use ec_libvirt::testing::LibvirtServer;
pub use ec_libvirt::testing::tiny_image;
use ec_model::{InstanceId, NodeId, Request, State, Status, decode};
use ec_placement_client::{PlacementClient, PlacementConfig};
use ec_store::{
    EtcdConfig, EtcdStore, EtcdTls, Store,
    testing::{EtcdServer, ServerTls, certificates, send},
};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::signal::Signal,
};
pub use placement::PlacementServer;
pub use releases::{Release, program};
pub use running::Running;
pub use s3::S3;
pub use second::SecondAgent;
use tempfile::TempDir;
pub use terminal::Terminal;

/// Longer than anything here takes on a small machine; a test that waits so long has failed.
const PATIENCE: Duration = Duration::from_secs(400);

/// What a tiny guest needs.
pub const TINY: &str = "resources=VCPU:1,MEMORY_MB:128,DISK_GB:1";

/// One node's whole cloud.
pub struct Stack {
    agent: Option<Child>,
    /// The real placement.
    pub placement_server: PlacementServer,
    /// The real etcd.
    pub etcd: EtcdServer,
    /// Who may do everything there, and their password; none where nobody needs one.
    etcd_login: Option<(String, String)>,
    /// The private libvirtd.
    pub libvirt: LibvirtServer,
    /// A client of the stack's etcd.
    pub store: EtcdStore,
    /// A client of the stack's placement.
    pub placement: PlacementClient,
    /// The node's uuid.
    pub node: NodeId,
    /// Of which release the agent is, at its next start.
    pub agent_release: Release,
    /// The same of the command line.
    pub tool_release: Release,
    /// Variables that the agent is started with.
    pub agent_env: Vec<(&'static str, String)>,
    _small_disk: Option<SmallDisk>,
    directory: TempDir,
}

impl Stack {
    /// Everything but the agent.
    pub async fn start() -> Result<Self> {
        Self::start_with("").await
    }

    /// Everything but the agent, whose configuration gets these lines, too.
    pub async fn start_with(more: &str) -> Result<Self> {
        Self::start_on(more, PlacementServer::start).await
    }

    /// Everything but the agent, with OpenStack's Placement in place of ours.
    pub async fn start_openstack() -> Result<Self> {
        Self::start_on("", PlacementServer::start_openstack).await
    }

    /// The same, for many clients at a time.
    pub async fn start_openstack_concurrent() -> Result<Self> {
        Self::start_on("", PlacementServer::start_openstack_concurrent).await
    }

    /// Everything but the agent, whose state lies on a file system of so many megabytes.
    pub async fn start_small(more: &str, megabytes: u32) -> Result<Self> {
        Self::start_as(Plan { megabytes: Some(megabytes), ..Plan::new(more) }).await
    }

    /// Everything but the agent, on an etcd with authentication: `users` makes the users `agent`, `control` and
    /// `placement`, with the passwords `…-secret`.
    pub async fn start_with_users(
        users: impl Fn(&EtcdUsers, NodeId) -> Result<()> + 'static,
    ) -> Result<Self> {
        Self::start_as(Plan { users: Some(&users), ..Plan::new("") }).await
    }

    /// Everything but the agent, with certificates shown and asked for by etcd and by the agent's own port.
    pub async fn start_tls() -> Result<Self> {
        Self::start_as(Plan { tls: true, ..Plan::new("") }).await
    }

    async fn start_on(more: &str, placement: fn(&Path, &str) -> Result<PlacementServer>) -> Result<Self> {
        Self::start_as(Plan { placement, ..Plan::new(more) }).await
    }

    async fn start_as(plan: Plan<'_>) -> Result<Self> {
        ec_runtime::install_tls_provider();
        // QEMU must be able to pass through.
        let directory = tempfile::Builder::new().prefix("ec-e2e-").tempdir()?;
        let file = |name: &str| directory.path().join(name);
        let etcd = if plan.tls {
            certificates(directory.path())?;
            let (cert, key) = (file("server.pem"), file("server.key"));
            EtcdServer::start_tls(None, ServerTls { cert, key, client_ca: Some(file("ca.pem")) }).await?
        } else {
            EtcdServer::start(None).await?
        };
        let endpoint = etcd.endpoint();
        let node = NodeId::new(uuid::Uuid::new_v4());
        let root = plan.users.map(|users| EtcdUsers::make(&endpoint, node, users)).transpose()?;
        // What a part of the cloud says of itself to etcd.
        let login = |user: &str| {
            let user_and_password = format!(", user: {user}, password: {user}-secret");
            let (ca, cert, key) = (file("ca.pem"), file("client.pem"), file("client.key"));
            let (ca, cert, key) = (ca.display(), cert.display(), key.display());
            let trust = format!(", ca_cert: {ca}, cert_cert: {cert}, cert_key: {key}");
            format!(
                "etcd: {{endpoints: [\"{endpoint}\"]{}{}}}",
                root.as_ref().map_or("", |_| &user_and_password),
                if plan.tls { &trust } else { "" },
            )
        };
        if root.is_some() || plan.tls {
            fs::write(directory.path().join("eplacement.yaml"), login("placement"))?;
        }
        let placement_server = (plan.placement)(directory.path(), &endpoint)?;
        let placement = placement_server.endpoint();
        // Before libvirtd, whose mount namespace is a copy of this one.
        let state = directory.path().join("state");
        let small_disk = plan.megabytes.map(|size| SmallDisk::mount(state, size)).transpose()?;
        let libvirt = LibvirtServer::start();
        let more = plan.more;
        // Tests ask for more than a small machine has to spare; what is reserved by default has its own tests.
        let reserved = if more.contains("reserved:") { "" } else { "reserved: {MEMORY_MB: 0, DISK_GB: 0}" };
        // Several agents may be beside each other.
        let mut listen = if more.contains("listen:") { "" } else { "listen: 127.0.0.1:0" }.to_owned();
        if plan.tls {
            let (cert, key, ca) = (file("server.pem"), file("server.key"), file("ca.pem"));
            let (cert, key, ca) = (cert.display(), key.display(), ca.display());
            listen.push_str(&format!("\ntls: {{certificate: {cert}, key: {key}, client_ca: {ca}}}"));
        }
        // The tests' own images, and web servers beside them.
        let caches = [Some(tiny_image()), debian_image("").ok()];
        let mut local = vec![directory.path().display().to_string()];
        local.extend(caches.iter().flatten().filter_map(|image| Some(image.parent()?.display().to_string())));
        let sources = format!("local: {local:?}, allow_addresses: [127.0.0.0/8]");
        let more = match more.split_once("images: {") {
            Some((_, own)) if own.contains("local:") => more.to_owned(),
            Some((before, own)) => format!("{before}images: {{{sources}, {own}"),
            None => format!("images: {{{sources}}}\n{more}"),
        };
        let config = format!(
            "uuid: {node}\nname: {node}\n{}\nplacement: {{endpoint: \"{placement}\"}}\n\
             state_dir: {}\nlibvirt: {{uri: \"{}\", network: {}}}\nallocation_ratio: {{VCPU: 1000.0}}\naudit_grace: 5\n{reserved}\n{listen}\n{more}\n",
            login("agent"),
            directory.path().join("state").display(),
            libvirt.uri(),
            libvirt.network(),
        );
        fs::write(directory.path().join("compute.yaml"), config)?;
        let config = format!(
            "{}\nplacement: {{endpoint: \"{placement}\"}}\nimage: file://{}\n",
            login("control"),
            tiny_image().display()
        );
        fs::write(directory.path().join("schedule.yaml"), config)?;
        let etcd_login = root.as_ref().map(|root| ("root".to_owned(), root.root_password.clone()));
        let store = EtcdStore::connect(EtcdConfig {
            endpoints: vec![endpoint.clone()],
            user: etcd_login.as_ref().map(|(user, _)| user.clone()),
            password: etcd_login.as_ref().map(|(_, password)| password.clone()),
            tls: plan.tls.then(|| EtcdTls {
                ca_cert: file("ca.pem"),
                client: Some((file("client.pem"), file("client.key"))),
            }),
            ..EtcdConfig::default()
        })
        .await?;
        let placement = PlacementClient::new(&PlacementConfig {
            endpoint: placement_server.endpoint(),
            token: "admin".into(),
            timeout: Duration::from_secs(30),
            ..PlacementConfig::default()
        })?;
        let stack = Self {
            agent: None,
            placement_server,
            etcd,
            etcd_login,
            libvirt,
            store,
            placement,
            node,
            agent_release: Release::This,
            tool_release: Release::This,
            agent_env: Vec::new(),
            _small_disk: small_disk,
            directory,
        };
        stack.until("placement answers", async || Ok(stack.placement.probe().await.is_ok())).await?;
        Ok(stack)
    }

    /// Starts the agent, stopping for ever at the named points.
    pub async fn start_agent(&mut self, failpoints: &str) -> Result<()> {
        // The sign of life of one that was killed stays for a while.
        let others = self.signs_of_life()?;
        self.begin_agent(failpoints)?;
        self.until("the agent is alive", async || {
            Ok(self.signs_of_life()?.iter().any(|sign| !others.contains(sign)))
        })
        .await
    }

    /// The same, and does not wait until it is alive.
    pub fn begin_agent(&mut self, failpoints: &str) -> Result<()> {
        // A log for each start: what is waited for must come from this one. The last ones tell of failures.
        let path = self.directory.path().join("ecompute.log");
        let before = self.log();
        let mut earlier = fs::OpenOptions::new().create(true).append(true).open(self.earlier_log())?;
        writeln!(earlier, "{before}-- killed, or ended")?;
        let log = fs::File::create(path)?;
        let agent = self
            .command("ecompute")
            .env("FAILPOINTS", failpoints)
            .envs(self.agent_env.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("failed to start ecompute")?;
        self.agent = Some(agent);
        Ok(())
    }

    /// Since when each living agent is alive.
    fn signs_of_life(&self) -> Result<Vec<String>> {
        let nodes = self.eschedule(&["-o", "json", "nodes"])?.stdout;
        let nodes: serde_json::Value = serde_json::from_slice(&nodes).unwrap_or_default();
        let living = nodes.as_array().into_iter().flatten().filter(|node| node["alive"] == true);
        Ok(living.map(|node| node["started_at"].to_string()).collect())
    }

    /// SIGKILL: nothing is said, nothing is finished.
    pub fn kill_agent(&mut self) -> Result<()> {
        let mut agent = self.agent.take().context("no agent runs")?;
        agent.kill()?;
        agent.wait()?;
        Ok(())
    }

    /// SIGTERM; answers the exit code.
    pub fn end_agent(&mut self) -> Result<Option<i32>> {
        let mut agent = self.agent.take().context("no agent runs")?;
        send(i32::try_from(agent.id())?, Signal::SIGTERM)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = agent.try_wait()? {
                return Ok(status.code());
            }
            if Instant::now() > deadline {
                agent.kill()?;
                agent.wait()?;
                bail!("the agent did not end after SIGTERM\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Sends the agent a signal, SIGSTOP and SIGCONT for example.
    pub fn signal_agent(&self, signal: Signal) -> Result<()> {
        let agent = self.agent.as_ref().context("no agent runs")?;
        Ok(send(i32::try_from(agent.id())?, signal)?)
    }

    /// The running agent's process.
    pub fn agent_pid(&self) -> Option<u32> {
        self.agent.as_ref().map(Child::id)
    }

    /// Waits until the agent of this start has come to a failpoint.
    pub async fn until_reached(&self, point: &str) -> Result<()> {
        let wanted = format!("failpoint point=\"{point}\"");
        self.until(&format!("the agent comes to {point}"), async || Ok(self.log().contains(&wanted))).await
    }

    /// A program of the product with the stack's configuration, not started yet.
    pub fn command(&self, name: &str) -> Command {
        let (file, release) = match name {
            "ecompute" => ("compute.yaml", self.agent_release),
            _ => ("schedule.yaml", self.tool_release),
        };
        let mut command = Command::new(release.program(name));
        command.arg("--config").arg(self.directory.path().join(file));
        command
    }

    /// Runs the command line to its end.
    pub fn eschedule(&self, arguments: &[&str]) -> Result<Output> {
        self.command("eschedule").args(arguments).output().context("failed to run eschedule")
    }

    /// Schedules a tiny guest; answers its instance.
    pub fn schedule(&self, arguments: &[&str]) -> Result<InstanceId> {
        self.schedule_as(TINY, arguments)
    }

    /// Schedules a guest by this query; answers its instance.
    #[expect(clippy::print_stderr, reason = "a boot that is tried again is worth saying")]
    pub fn schedule_as(&self, query: &str, arguments: &[&str]) -> Result<InstanceId> {
        let output = self.eschedule(&[&[query], arguments].concat())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().next().unwrap_or_default();
        let instance = line.strip_prefix(&format!("NOTIFIED TARGET, {}, OF INSTANCE ", self.node));
        let instance =
            instance.with_context(|| format!("unexpected answer: {output:?}"))?.parse().context("no uuid")?;
        // With `--wait` it may have been asked for and not have come up.
        if !output.status.success() {
            let console = self.console_end(instance);
            // Seen once in some thousand boots with two emulated processors: QEMU's second gets no timer any more.
            // The guest's kernel says so, nothing of ours takes part, and another boot is all that helps.
            ensure!(
                console.contains("timer wakeup didn't happen"),
                "{output:?}; its console ends with:\n{console}"
            );
            eprintln!("a processor of guest {instance} has no timer, as its kernel says; it is booted again");
            let again = self.eschedule(&["reboot", "--hard", "--wait", &instance.to_string()])?;
            ensure!(
                again.status.success(),
                "{again:?}; its console ends with:\n{}",
                self.console_end(instance)
            );
        }
        Ok(instance)
    }

    /// The last lines that a guest wrote to its console: why it did not come up.
    fn console_end(&self, instance: InstanceId) -> String {
        let file = self.directory.path().join(format!("state/consoles/{instance}.log"));
        let written = fs::read(file).unwrap_or_default();
        let written = String::from_utf8_lossy(&written);
        let lines: Vec<_> = written.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// The instance's status.
    pub async fn status(&self, instance: InstanceId) -> Result<Option<Status>> {
        self.status_at(self.node, instance).await
    }

    /// What is asked of a node about an instance.
    pub async fn request_at(&self, node: NodeId, instance: InstanceId) -> Result<Option<Request>> {
        let key = ec_model::Keyspace::default().request(node, instance);
        Ok(self.store.get(&key).await?.0.map(|pair| decode(&pair.value)).transpose()?)
    }

    /// The same of one that may be on another node.
    pub async fn status_at(&self, node: NodeId, instance: InstanceId) -> Result<Option<Status>> {
        let key = ec_model::Keyspace::default().status(node, instance);
        Ok(self.store.get(&key).await?.0.map(|pair| decode(&pair.value)).transpose()?)
    }

    /// Waits for a state.
    pub async fn until_state(&self, instance: InstanceId, state: State) -> Result<Status> {
        self.until(&format!("{instance} is {state}"), async || {
            let status = self.status(instance).await?;
            ensure!(status.as_ref().is_some_and(|status| status.state == state), "it is {status:?}");
            Ok(true)
        })
        .await?;
        self.status(instance).await?.context("the status went away")
    }

    /// Waits for a level, bounded; tells the agent's log where it is not reached.
    pub async fn until(&self, what: &str, reached: impl AsyncFn() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let outcome = reached().await;
            if matches!(outcome, Ok(true)) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let earlier = fs::read_to_string(self.earlier_log()).unwrap_or_default();
                bail!(
                    "not within {} s: {what} (last: {outcome:?})\n{earlier}{}\n{}",
                    PATIENCE.as_secs(),
                    self.log(),
                    self.libvirt.told()
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Allocations, domains, disks and requests speak of exactly these instances, and of nothing else.
    pub async fn until_exactly(&self, wanted: &[InstanceId]) -> Result<()> {
        self.until_exactly_with(wanted, &[]).await
    }

    /// The same, with these volumes beside, of which there are no domains.
    pub async fn until_exactly_with(&self, machines: &[InstanceId], volumes: &[InstanceId]) -> Result<()> {
        self.until_exactly_booting(machines, &[], volumes).await
    }

    /// The same, with these machines that boot from volumes and have no disks of their own.
    pub async fn until_exactly_booting(
        &self,
        machines: &[InstanceId],
        booting: &[InstanceId],
        volumes: &[InstanceId],
    ) -> Result<()> {
        let sorted = |ids: &[&[InstanceId]]| {
            let mut ids = ids.concat();
            ids.sort_unstable();
            ids
        };
        let (disks, machines) = (sorted(&[machines, volumes]), sorted(&[machines, booting]));
        let wanted = sorted(&[&machines, volumes]);
        self.until(&format!("exactly {wanted:?} are there"), async || {
            let mut allocated: Vec<_> =
                self.placement.provider_allocations(self.node).await?.into_keys().collect();
            allocated.sort_unstable();
            let requests = ec_model::Keyspace::default().requests(self.node);
            let requests: Vec<InstanceId> = (self.store.list(&requests).await?.pairs.iter())
                .filter_map(|pair| pair.key.rsplit('/').next()?.parse().ok())
                .collect();
            let mut domains = Vec::new();
            for domain in self.libvirt.connection().list_all_domains(0)? {
                domains.push(domain.name()?.parse::<InstanceId>()?);
            }
            domains.sort_unstable();
            ensure!(requests == wanted, "requests are {requests:?}");
            ensure!(allocated == wanted, "allocations are {allocated:?}");
            ensure!(domains == machines, "domains are {domains:?}");
            for (kind, wanted) in [("disks", &disks), ("instances", &wanted), ("consoles", &machines)] {
                let files = instances_in(&self.directory.path().join("state").join(kind))?;
                ensure!(files == *wanted, "{kind} are {files:?}");
            }
            let idle = self.etcd.idle_leases(self.etcd_login.clone()).await?;
            ensure!(idle.is_empty(), "leases without a key are {idle:?}");
            Ok(true)
        })
        .await
    }

    /// A key pair, made the first time; answers the private key's path. The public one has `.pub` behind it.
    pub fn key_pair(&self) -> Result<String> {
        let path = self.directory.path().join("id");
        let is_made = path.exists();
        let path = path.display().to_string();
        if is_made {
            return Ok(path);
        }
        let output =
            Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &path]).output()?;
        ensure!(output.status.success(), "ssh-keygen: {output:?}");
        Ok(path)
    }

    /// Runs a command in a guest, trying until it lets us in; answers what it printed.
    pub async fn ssh(&self, key: &str, user: &str, ip: IpAddr, command: &str) -> Result<String> {
        self.ssh_where(key, user, async || Ok(ip), command).await
    }

    /// The same of an instance, at whatever address its status tells at each try: a guest may get another one
    /// while it boots.
    pub async fn ssh_to(&self, key: &str, user: &str, instance: InstanceId, command: &str) -> Result<String> {
        let ip =
            async || self.status(instance).await?.and_then(|status| status.ip).context("it has no address");
        self.ssh_where(key, user, ip, command).await
    }

    async fn ssh_where(
        &self,
        key: &str,
        user: &str,
        ip: impl AsyncFn() -> Result<IpAddr>,
        command: &str,
    ) -> Result<String> {
        let deadline = Instant::now() + PATIENCE * 3;
        loop {
            let ip = ip().await?;
            let mut ssh = tokio::process::Command::new("ssh");
            ssh.args(["-n", "-i", key, "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"])
                .args(["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"])
                .args(["-o", "LogLevel=ERROR", &format!("{user}@{ip}"), command])
                .kill_on_drop(true);
            let output = tokio::time::timeout(PATIENCE, ssh.output()).await??;
            // 255 is ssh's own: not let in, or not there yet.
            if output.status.code() != Some(255) {
                ensure!(output.status.success(), "`{command}` in the guest: {output:?}");
                return Ok(String::from_utf8(output.stdout)?.trim().to_owned());
            }
            ensure!(Instant::now() < deadline, "no login at {ip}: {output:?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// The test's directory: `state` in it is the agent's.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    fn earlier_log(&self) -> PathBuf {
        self.directory.path().join("ecompute-earlier.log")
    }

    /// Asks the agent's own port; answers the status and the text.
    pub async fn ask_agent(&self, path: &str) -> Result<(u16, String)> {
        let address = self.agent_port().context("the agent has not told its port")?;
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build()?;
        let answer = client.get(format!("http://{address}{path}")).send().await?;
        Ok((answer.status().as_u16(), answer.text().await?))
    }

    /// Where the agent's own port is, as its log tells.
    pub fn agent_port(&self) -> Option<String> {
        let log = self.log();
        let line = log.lines().find(|line| line.contains("serving health"))?;
        Some(line.split_once("listen=\"")?.1.split_once('"')?.0.to_owned())
    }

    /// A file of this stack's own: a configuration, a certificate.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// What the agent said since its last start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("ecompute.log")).unwrap_or_default()
    }
}

/// Makes the users of a cloud with this node.
type MakeUsers = dyn Fn(&EtcdUsers, NodeId) -> Result<()>;

/// What a stack is to be.
struct Plan<'a> {
    more: &'a str,
    placement: fn(&Path, &str) -> Result<PlacementServer>,
    megabytes: Option<u32>,
    users: Option<&'a MakeUsers>,
    tls: bool,
}

impl<'a> Plan<'a> {
    fn new(more: &'a str) -> Self {
        Self { more, placement: PlacementServer::start, megabytes: None, users: None, tls: false }
    }
}

/// An etcd that is about to ask who is there, and who may make users in it.
pub struct EtcdUsers {
    /// Where it is.
    pub endpoint: String,
    /// The password of `root`.
    pub root_password: String,
}

impl EtcdUsers {
    /// Makes `root`, lets `make` make the others, and switches authentication on.
    fn make(endpoint: &str, node: NodeId, make: &MakeUsers) -> Result<Self> {
        let users = Self { endpoint: endpoint.to_owned(), root_password: "root-secret".to_owned() };
        let etcdctl = |arguments: &[&str]| {
            let output = Command::new("etcdctl")
                .env("ETCDCTL_API", "3")
                .args(["--endpoints", endpoint])
                .args(arguments)
                .output()?;
            ensure!(output.status.success(), "etcdctl {arguments:?}: {output:?}");
            anyhow::Ok(())
        };
        etcdctl(&["user", "add", &format!("root:{}", users.root_password)])?;
        etcdctl(&["user", "grant-role", "root", "root"])?;
        etcdctl(&["auth", "enable"])?;
        make(&users, node)?;
        Ok(users)
    }
}

/// A small file system, as long as the value lives.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: PathBuf, megabytes: u32) -> Result<Self> {
        fs::create_dir_all(&path)?;
        let options = format!("size={megabytes}m,mode=755");
        mount(Some("small"), &path, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))?;
        Ok(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).ok();
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if let Some(agent) = &mut self.agent {
            agent.kill().ok();
            agent.wait().ok();
        }
    }
}

/// The image with real cloud-init that `scripts/guests/build-debian.sh` built, or its copy with this ending.
pub fn debian_image(ending: &str) -> Result<PathBuf> {
    let path = std::env::var_os("EC_TEST_DEBIAN_IMAGE")
        .map_or_else(|| PathBuf::from("/var/cache/etcd-compute/debian.qcow2"), PathBuf::from);
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let path = path.with_file_name(format!("{stem}{ending}.qcow2"));
    ensure!(path.exists(), "{} is missing: run scripts/guests/build-debian.sh", path.display());
    Ok(path)
}

/// The instances that a directory has a file of, in order.
fn instances_in(directory: &Path) -> Result<Vec<InstanceId>> {
    let mut found: Vec<InstanceId> = fs::read_dir(directory)?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.split('.').next()?.parse().ok())
        .collect();
    found.sort_unstable();
    // A console log may have been put aside as full.
    found.dedup();
    Ok(found)
}
