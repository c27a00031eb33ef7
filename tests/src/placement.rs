//! OpenStack Placement, as its package in a virtual environment has it.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::postgres::Postgres;
use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A placement of one test. Ended when dropped.
pub struct PlacementServer {
    process: Option<Child>,
    /// Where there is one; else the database is a file.
    postgres: Option<Postgres>,
    directory: PathBuf,
    port: u16,
}

impl PlacementServer {
    /// On SQLite, with one worker: it knows no concurrent writers.
    pub(crate) fn start(directory: &Path) -> Result<Self> {
        let database = directory.join("placement.sqlite");
        fs::copy(environment().join("template.sqlite"), &database)
            .context("OpenStack Placement is missing: run scripts/placement-venv.sh")?;
        Self::start_on(directory, &format!("sqlite:///{}", database.display()), None)
    }

    /// On a PostgreSQL of its own, with several workers, for tests with many writers.
    pub(crate) fn start_concurrent(directory: &Path) -> Result<Self> {
        let postgres = Postgres::start(directory)?;
        let url = postgres.url();
        let server = Self::start_on(directory, &url, Some(postgres))?;
        Ok(server)
    }

    fn start_on(directory: &Path, database: &str, postgres: Option<Postgres>) -> Result<Self> {
        let config = format!(
            "[api]\nauth_strategy = noauth2\n[placement_database]\nconnection = {database}\n\
             max_pool_size = 20\n[placement]\nallocation_conflict_retry_count = 100\n"
        );
        let file = directory.join("placement.conf");
        fs::write(&file, config)?;
        if postgres.is_some() {
            let output = Command::new(environment().join("bin/placement-manage"))
                .arg("--config-file")
                .arg(&file)
                .args(["db", "sync"])
                .output()?;
            ensure!(output.status.success(), "placement-manage db sync: {output:?}");
        }
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut server = Self { process: None, postgres, directory: directory.to_owned(), port };
        server.go_on()?;
        Ok(server)
    }

    /// Where it answers.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Starts it, with the data that it had. It answers a little later.
    pub fn go_on(&mut self) -> Result<()> {
        let workers = if self.postgres.is_some() { "4" } else { "1" };
        let child = Command::new(environment().join("bin/gunicorn"))
            .args(["--workers", workers, "--bind", &format!("127.0.0.1:{}", self.port)])
            .arg("placement.wsgi.api:application")
            .env("OS_PLACEMENT_CONFIG_DIR", &self.directory)
            .stdout(Stdio::null())
            .stderr(fs::File::options().create(true).append(true).open(self.directory.join("placement.log"))?)
            .spawn()
            .context("failed to start OpenStack Placement")?;
        self.process = Some(child);
        Ok(())
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

fn environment() -> PathBuf {
    std::env::var_os("EC_TEST_PLACEMENT")
        .map_or_else(|| PathBuf::from("/var/cache/etcd-compute/placement"), PathBuf::from)
}
