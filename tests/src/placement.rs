//! The placement of a test: ours, or OpenStack's as its package in a virtual environment has it.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::{Release, postgres::Postgres};
use anyhow::{Context, Result, bail, ensure};
use ec_placement_client::{PlacementClient, PlacementConfig};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A placement of one test. Ended when dropped.
pub struct PlacementServer {
    process: Option<Child>,
    kind: Kind,
    directory: PathBuf,
    port: u16,
    /// Of which release ours is, at its next start.
    pub release: Release,
}

/// Which server it is, and where its data lie.
enum Kind {
    /// Ours, on this etcd.
    Ours(String),
    /// OpenStack's, on a file.
    Sqlite,
    /// OpenStack's, on a PostgreSQL of its own, which ends with it.
    Postgres(Postgres),
}

impl PlacementServer {
    /// Ours, on the test's etcd.
    pub fn start(directory: &Path, etcd: &str) -> Result<Self> {
        Self::begin(directory, Kind::Ours(etcd.to_owned()))
    }

    /// OpenStack's on SQLite, with one worker: it knows no concurrent writers.
    pub fn start_openstack(directory: &Path, _etcd: &str) -> Result<Self> {
        let database = directory.join("placement.sqlite");
        fs::copy(environment().join("template.sqlite"), &database)
            .context("OpenStack Placement is missing: run scripts/placement-venv.sh")?;
        configure(directory, &format!("sqlite:///{}", database.display()))?;
        Self::begin(directory, Kind::Sqlite)
    }

    /// OpenStack's on a PostgreSQL of its own, with several workers, for tests with many writers.
    pub fn start_openstack_concurrent(directory: &Path, _etcd: &str) -> Result<Self> {
        let postgres = Postgres::start(directory)?;
        let file = configure(directory, &postgres.url())?;
        let output = Command::new(environment().join("bin/placement-manage"))
            .arg("--config-file")
            .arg(&file)
            .args(["db", "sync"])
            .output()?;
        ensure!(output.status.success(), "placement-manage db sync: {output:?}");
        Self::begin(directory, Kind::Postgres(postgres))
    }

    fn begin(directory: &Path, kind: Kind) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut server =
            Self { process: None, kind, directory: directory.to_owned(), port, release: Release::This };
        server.go_on()?;
        Ok(server)
    }

    /// Where it answers.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Starts it, with the data that it had. It answers a little later.
    pub fn go_on(&mut self) -> Result<()> {
        let listen = format!("127.0.0.1:{}", self.port);
        let mut command = match &self.kind {
            Kind::Ours(etcd) => {
                let mut command = Command::new(self.release.program("eplacement"));
                // As whoever collects them has them; a release that knows no such form passes over it.
                command.args(["--listen", &listen, "--etcd", etcd]).env("LOG_FORMAT", "json");
                let config = self.directory.join("eplacement.yaml");
                if config.exists() {
                    command.arg("--config").arg(config);
                }
                command
            }
            Kind::Sqlite | Kind::Postgres(_) => {
                // SQLite has one writer.
                let workers = if matches!(self.kind, Kind::Sqlite) { "1" } else { "4" };
                let mut command = Command::new(environment().join("bin/gunicorn"));
                command
                    .args(["--worker-class", "gthread", "--workers", workers, "--threads", workers])
                    .args(["--bind", &listen, "placement.wsgi.api:application"])
                    .env("OS_PLACEMENT_CONFIG_DIR", &self.directory);
                command
            }
        };
        let child = command
            .current_dir(&self.directory)
            .stdout(Stdio::null())
            .stderr(fs::File::options().create(true).append(true).open(self.directory.join("placement.log"))?)
            .spawn()
            .context("failed to start placement")?;
        self.process = Some(child);
        Ok(())
    }

    /// Its process, while there is one.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::id)
    }

    /// Where its PostgreSQL is, as `psql` takes it; none where it has no such thing.
    pub fn database(&self) -> Option<String> {
        match &self.kind {
            Kind::Postgres(postgres) => Some(postgres.psql_url()),
            Kind::Ours(_) | Kind::Sqlite => None,
        }
    }

    /// Waits until it answers, bounded.
    pub async fn until_it_answers(&self) -> Result<()> {
        ec_runtime::install_tls_provider();
        let client = PlacementClient::new(&PlacementConfig {
            endpoint: self.endpoint(),
            token: "admin".into(),
            timeout: Duration::from_secs(5),
            ..PlacementConfig::default()
        })?;
        for _ in 0..300 {
            if client.probe().await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("placement does not answer at {}", self.endpoint())
    }

    /// Ends it; its data stays.
    pub fn end(&mut self) {
        if let Some(mut process) = self.process.take() {
            // SIGKILL would leave its worker for a while.
            if let Ok(pid) = i32::try_from(process.id()) {
                kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
            }
            process.wait().ok();
        }
    }
}

impl Drop for PlacementServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Writes the configuration of OpenStack's server; answers its file.
fn configure(directory: &Path, database: &str) -> Result<PathBuf> {
    let config = format!(
        "[api]\nauth_strategy = noauth2\n[placement_database]\nconnection = {database}\n\
         max_pool_size = 20\n[placement]\nallocation_conflict_retry_count = 100\n"
    );
    let file = directory.join("placement.conf");
    fs::write(&file, config)?;
    Ok(file)
}

fn environment() -> PathBuf {
    std::env::var_os("EC_TEST_PLACEMENT")
        .map_or_else(|| PathBuf::from("/var/cache/etcd-compute/placement"), PathBuf::from)
}
