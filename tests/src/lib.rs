//! A whole stack of real parts for one test: etcd, OpenStack Placement, a libvirtd of its own, an agent as
//! a process that can be killed, and the command line.
//!
//! Everything is ended when the value is dropped, also after a failed test.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ec_libvirt::testing::{LibvirtServer, tiny_image};
use ec_model::{InstanceId, NodeId, State, Status, decode};
use ec_placement_client::{PlacementClient, PlacementConfig};
use ec_store::{EtcdConfig, EtcdStore, Store, testing::EtcdServer};
use tempfile::TempDir;

/// Longer than anything here takes on a small machine; a test that waits so long has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// One node's whole cloud.
pub struct Stack {
    agent: Option<Child>,
    placement_process: Child,
    /// The real etcd.
    pub etcd: EtcdServer,
    /// The private libvirtd.
    pub libvirt: LibvirtServer,
    /// A client of the stack's etcd.
    pub store: EtcdStore,
    /// A client of the stack's placement.
    pub placement: PlacementClient,
    /// The node's uuid.
    pub node: NodeId,
    directory: TempDir,
}

impl Stack {
    /// Everything but the agent.
    pub async fn start() -> Result<Self> {
        ec_runtime::install_tls_provider();
        // QEMU must be able to pass through.
        let directory = tempfile::Builder::new().prefix("ec-e2e-").tempdir()?;
        let etcd = EtcdServer::start(None).await?;
        let endpoint = etcd.endpoint();
        let (placement_process, port) = start_placement(directory.path())?;
        let libvirt = LibvirtServer::start();
        let node = NodeId::new(uuid::Uuid::new_v4());
        let config = format!(
            "uuid: {node}\nname: {node}\netcd: {{endpoints: [\"{endpoint}\"]}}\nplacement: {{endpoint: \"http://127.0.0.1:{port}\"}}\n\
             state_dir: {}\nlibvirt: {{uri: \"{}\", network: {}}}\nallocation_ratio: {{VCPU: 16.0}}\naudit_grace: 5\n",
            directory.path().join("state").display(),
            libvirt.uri(),
            libvirt.network(),
        );
        fs::write(directory.path().join("compute.yaml"), config)?;
        let config = format!(
            "etcd: {{endpoints: [\"{endpoint}\"]}}\nplacement: {{endpoint: \"http://127.0.0.1:{port}\"}}\nimage: file://{}\n",
            tiny_image().display()
        );
        fs::write(directory.path().join("schedule.yaml"), config)?;
        let store = EtcdStore::connect(EtcdConfig {
            endpoints: vec![endpoint],
            user: None,
            password: None,
            tls: None,
            timeout: Duration::from_secs(5),
        })
        .await?;
        let placement = PlacementClient::new(&PlacementConfig {
            endpoint: format!("http://127.0.0.1:{port}"),
            token: "admin".into(),
            timeout: Duration::from_secs(30),
        })?;
        let stack = Self { agent: None, placement_process, etcd, libvirt, store, placement, node, directory };
        stack.until("placement answers", async || Ok(stack.placement.probe().await.is_ok())).await?;
        Ok(stack)
    }

    /// Starts the agent, stopping for ever at the named points.
    pub async fn start_agent(&mut self, failpoints: &str) -> Result<()> {
        let log =
            fs::File::options().create(true).append(true).open(self.directory.path().join("ecompute.log"))?;
        let agent = Command::new(program("ecompute"))
            .arg("--config")
            .arg(self.directory.path().join("compute.yaml"))
            .env("FAILPOINTS", failpoints)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("failed to start ecompute")?;
        self.agent = Some(agent);
        self.until("the agent is alive", async || {
            Ok(self.eschedule(&["-o", "json", "nodes"])?.stdout.len() > 4)
        })
        .await
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
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(i32::try_from(agent.id())?),
            nix::sys::signal::SIGTERM,
        )?;
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

    /// Runs the command line to its end.
    pub fn eschedule(&self, arguments: &[&str]) -> Result<Output> {
        Command::new(program("eschedule"))
            .arg("--config")
            .arg(self.directory.path().join("schedule.yaml"))
            .args(arguments)
            .output()
            .context("failed to run eschedule")
    }

    /// Schedules a tiny guest; answers its instance.
    pub fn schedule(&self, arguments: &[&str]) -> Result<InstanceId> {
        let query = "resources=VCPU:1,MEMORY_MB:128,DISK_GB:1";
        let output = self.eschedule(&[&[query], arguments].concat())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().next().unwrap_or_default();
        let instance = line.strip_prefix(&format!("NOTIFIED TARGET, {}, OF INSTANCE ", self.node));
        instance.with_context(|| format!("unexpected answer: {output:?}"))?.parse().context("no uuid")
    }

    /// The instance's status.
    pub async fn status(&self, instance: InstanceId) -> Result<Option<Status>> {
        let key = ec_model::Keyspace::default().status(self.node, instance);
        Ok(self.store.get(&key).await?.0.map(|pair| decode(&pair.value)).transpose()?)
    }

    /// Waits for a state.
    pub async fn until_state(&self, instance: InstanceId, state: State) -> Result<Status> {
        self.until(&format!("{instance} is {state}"), async || {
            Ok(self.status(instance).await?.is_some_and(|status| status.state == state))
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
                bail!("not within {} s: {what} (last: {outcome:?})\n{}", PATIENCE.as_secs(), self.log());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Allocations, domains, disks and requests speak of exactly these instances, and of nothing else.
    pub async fn until_exactly(&self, wanted: &[InstanceId]) -> Result<()> {
        let mut wanted = wanted.to_vec();
        wanted.sort_unstable();
        self.until(&format!("exactly {wanted:?} are there"), async || {
            let mut allocated: Vec<_> =
                self.placement.provider_allocations(self.node).await?.into_keys().collect();
            allocated.sort_unstable();
            let mut domains = Vec::new();
            for domain in self.libvirt.connection().list_all_domains(0)? {
                domains.push(domain.name()?.parse::<InstanceId>()?);
            }
            domains.sort_unstable();
            let mut disks: Vec<InstanceId> = fs::read_dir(self.directory.path().join("state/disks"))?
                .filter_map(|entry| entry.ok()?.path().file_stem()?.to_str()?.parse().ok())
                .collect();
            disks.sort_unstable();
            ensure!(allocated == wanted, "allocations are {allocated:?}");
            ensure!(domains == wanted, "domains are {domains:?}");
            ensure!(disks == wanted, "disks are {disks:?}");
            Ok(true)
        })
        .await
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("ecompute.log")).unwrap_or_default()
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if let Some(agent) = &mut self.agent {
            agent.kill().ok();
            agent.wait().ok();
        }
        self.placement_process.kill().ok();
        self.placement_process.wait().ok();
    }
}

/// Beside the test's own executable, where cargo puts every program.
fn program(name: &str) -> PathBuf {
    let me = std::env::current_exe().unwrap_or_default();
    me.ancestors().nth(2).unwrap_or(Path::new(".")).join(name)
}

fn start_placement(directory: &Path) -> Result<(Child, u16)> {
    let venv =
        std::env::var("EC_TEST_PLACEMENT").unwrap_or_else(|_| "/var/cache/etcd-compute/placement".into());
    let venv = Path::new(&venv);
    let database = directory.join("placement.sqlite");
    fs::copy(venv.join("template.sqlite"), &database)
        .context("OpenStack Placement is missing: run scripts/placement-venv.sh")?;
    let config = format!(
        "[api]\nauth_strategy = noauth2\n[placement_database]\nconnection = sqlite:///{}\n",
        database.display()
    );
    fs::write(directory.join("placement.conf"), config)?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    // One synchronous worker: SQLite knows no concurrent writers.
    let child = Command::new(venv.join("bin/gunicorn"))
        .args(["--workers", "1", "--bind", &format!("127.0.0.1:{port}"), "placement.wsgi.api:application"])
        .env("OS_PLACEMENT_CONFIG_DIR", directory)
        .stdout(Stdio::null())
        .stderr(fs::File::create(directory.join("placement.log"))?)
        .spawn()
        .context("failed to start OpenStack Placement")?;
    Ok((child, port))
}
