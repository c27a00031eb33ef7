//! OpenStack Placement, as its package in a virtual environment has it.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A placement of one test, on SQLite. Ended when dropped.
pub struct PlacementServer {
    process: Option<Child>,
    directory: PathBuf,
    port: u16,
}

impl PlacementServer {
    pub(crate) fn start(directory: &Path) -> Result<Self> {
        let database = directory.join("placement.sqlite");
        fs::copy(environment().join("template.sqlite"), &database)
            .context("OpenStack Placement is missing: run scripts/placement-venv.sh")?;
        let config = format!(
            "[api]\nauth_strategy = noauth2\n[placement_database]\nconnection = sqlite:///{}\n",
            database.display()
        );
        fs::write(directory.join("placement.conf"), config)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut server = Self { process: None, directory: directory.to_owned(), port };
        server.go_on()?;
        Ok(server)
    }

    /// Where it answers.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Starts it, with the data that it had. It answers a little later.
    pub fn go_on(&mut self) -> Result<()> {
        // One synchronous worker: SQLite knows no concurrent writers.
        let child = Command::new(environment().join("bin/gunicorn"))
            .args(["--workers", "1", "--bind", &format!("127.0.0.1:{}", self.port)])
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
