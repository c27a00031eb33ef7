//! A PostgreSQL of one test, for a placement with many writers.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, User},
};

/// It will not run as root; this user comes with its package.
const USER: &str = "postgres";
const PATIENCE: Duration = Duration::from_secs(30);

/// Reached by a socket in its directory only. Gone when dropped.
pub(crate) struct Postgres {
    server: Child,
    directory: PathBuf,
}

impl Postgres {
    pub(crate) fn start(parent: &Path) -> Result<Self> {
        let user = User::from_name(USER)?.context("there is no user postgres: install postgresql")?;
        fs::set_permissions(parent, fs::Permissions::from_mode(0o755))?;
        let directory = parent.join("postgres");
        fs::create_dir(&directory)?;
        chown(&directory, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
        let data = directory.join("data");
        let output = Self::command("initdb", &user)?
            .args(["--auth=trust", "--no-sync", "--encoding=UTF8", "-D"])
            .arg(&data)
            .output()?;
        ensure!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));
        let server = Self::command("postgres", &user)?
            .arg("-D")
            .arg(&data)
            .arg("-k")
            .arg(&directory)
            .args(["-c", "listen_addresses=", "-c", "fsync=off"])
            .stdout(Stdio::null())
            .stderr(fs::File::create(parent.join("postgres.log"))?)
            .spawn()?;
        let postgres = Self { server, directory };
        let deadline = Instant::now() + PATIENCE;
        while !postgres.answers()? {
            let log = fs::read_to_string(parent.join("postgres.log")).unwrap_or_default();
            ensure!(Instant::now() < deadline, "postgres does not answer: {log}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(postgres)
    }

    fn answers(&self) -> Result<bool> {
        let output = Command::new(programs()?.join("pg_isready")).arg("-h").arg(&self.directory).output()?;
        Ok(output.status.success())
    }

    /// What SQLAlchemy connects by.
    pub(crate) fn url(&self) -> String {
        format!("postgresql+psycopg2://{USER}@/postgres?host={}", self.directory.display())
    }

    /// What its own command line connects by.
    pub(crate) fn psql_url(&self) -> String {
        format!("postgresql://{USER}@/postgres?host={}", self.directory.display())
    }

    fn command(program: &str, user: &User) -> Result<Command> {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(programs()?.join(program));
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw()).current_dir("/");
        Ok(command)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.server.id()) {
            // Without waiting for clients, of which some may hang.
            kill(Pid::from_raw(pid), Signal::SIGINT).ok();
        }
        self.server.wait().ok();
    }
}

/// Debian keeps them by version.
fn programs() -> Result<PathBuf> {
    fs::read_dir("/usr/lib/postgresql")
        .context("PostgreSQL is missing: run scripts/install-deps.sh test")?
        .filter_map(|entry| Some(entry.ok()?.path().join("bin")))
        .find(|path| path.join("initdb").exists())
        .context("PostgreSQL is missing: run scripts/install-deps.sh test")
}
