//! An etcd of one's own for a test: on free ports, in a directory that goes away with it.
//! Every method that can fail does so with what the system, or etcd in its log, said.

mod certificates;

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use etcd_client::{Client, ConnectOptions, LeaseTimeToLiveOptions};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

pub use certificates::certificates;

/// etcd 3.4 needs about two seconds to elect itself; a busy machine much more.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// After a SIGTERM.
const STOPPED_WITHIN: Duration = Duration::from_secs(20);
/// Between two looks at a server that is starting or stopping.
const POLL: Duration = Duration::from_millis(20);
/// Another process may take a port between our finding it free and etcd's opening it.
const START_ATTEMPTS: usize = 5;

/// The environment variable that names the newer etcd to test with, as `scripts/fetch-newer-etcd.sh`
/// prints it.
pub const NEWER_ETCD: &str = "ETCD_BIN_NEW";

/// Sends a process a signal. After SIGSTOP it has stopped when this returns: a thread that runs at that moment
/// would still answer something.
pub fn send(pid: i32, signal: Signal) -> io::Result<()> {
    kill(Pid::from_raw(pid), signal)?;
    let deadline = Instant::now() + STOPPED_WITHIN;
    while signal == Signal::SIGSTOP && !has_stopped(pid)? {
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not stop"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether every thread of a process is stopped, see proc(5).
fn has_stopped(pid: i32) -> io::Result<bool> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ended meanwhile does nothing any more.
        let stat = fs::read_to_string(task?.path().join("stat")).unwrap_or_default();
        if stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('T')) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Certificates for a server, all PEM files.
#[derive(Debug, Clone)]
pub struct ServerTls {
    /// The server's certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority whose clients are let in; every client must then have a certificate.
    pub client_ca: Option<PathBuf>,
}

/// A single etcd that ends, and whose data go, when this is dropped.
#[derive(Debug)]
pub struct EtcdServer {
    binary: PathBuf,
    version: String,
    directory: TempDir,
    ports: Ports,
    tls: Option<ServerTls>,
    child: Option<Child>,
}

#[derive(Debug, Clone, Copy)]
struct Ports {
    client: u16,
    peer: u16,
    health: u16,
}

impl EtcdServer {
    /// Starts an etcd and waits until it answers. `binary`: which one; `None`: the first in `PATH`.
    pub async fn start(binary: Option<&Path>) -> io::Result<Self> {
        Self::launch(binary, None).await
    }

    /// The same, with TLS for clients.
    pub async fn start_tls(binary: Option<&Path>, tls: ServerTls) -> io::Result<Self> {
        Self::launch(binary, Some(tls)).await
    }

    /// The binaries to test with: that in `PATH` and, where [`NEWER_ETCD`] names one, that too.
    pub fn binaries() -> Vec<PathBuf> {
        let newer = std::env::var_os(NEWER_ETCD).filter(|path| !path.is_empty()).map(PathBuf::from);
        std::iter::once(PathBuf::from("etcd")).chain(newer).collect()
    }

    async fn launch(binary: Option<&Path>, tls: Option<ServerTls>) -> io::Result<Self> {
        let binary = binary.map_or_else(|| PathBuf::from("etcd"), Path::to_owned);
        let version = version(&binary)?;
        let mut attempt = 1;
        loop {
            let mut server = Self {
                binary: binary.clone(),
                version: version.clone(),
                directory: tempfile::tempdir()?,
                ports: Ports::free()?,
                tls: tls.clone(),
                child: None,
            };
            match server.restart().await {
                Ok(()) => return Ok(server),
                Err(error)
                    if attempt < START_ATTEMPTS && error.to_string().contains("address already in use") =>
                {
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What the binary calls itself: `3.4.23`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Where clients connect to: `http://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.ports.client)
    }

    /// The process, while there is one.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Ends it at once (SIGKILL). Data and ports stay.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only where the process is gone already, which is what is wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Asks it to end (SIGTERM) and waits until it has.
    pub async fn stop(&mut self) -> io::Result<()> {
        self.signal(Signal::SIGTERM)?;
        let deadline = Instant::now() + STOPPED_WITHIN;
        while let Some(child) = &mut self.child {
            if child.try_wait()?.is_some() {
                self.child = None;
            } else if Instant::now() > deadline {
                self.kill();
                return Err(io::Error::new(io::ErrorKind::TimedOut, "etcd did not end, so it was killed"));
            } else {
                sleep(POLL).await;
            }
        }
        Ok(())
    }

    /// Starts it again with the same data on the same ports, after ending it where it still runs, and
    /// waits until it answers.
    pub async fn restart(&mut self) -> io::Result<()> {
        self.kill();
        let log = File::options().create(true).append(true).open(self.log())?;
        let child = self.command().stdout(log.try_clone()?).stderr(log).stdin(Stdio::null()).spawn()?;
        self.child = Some(child);
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            if let Some(child) = &mut self.child
                && let Some(status) = child.try_wait()?
            {
                self.child = None;
                return Err(io::Error::other(format!("etcd ended ({status}): {}", self.log_end())));
            }
            if self.is_healthy().await {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "etcd did not become ready"));
            }
            sleep(POLL).await;
        }
    }

    /// Leases on which nothing hangs and that do not run out in a minute, as those of killed agents do; as the user of this
    /// name and password sees them.
    ///
    /// # Errors
    /// etcd did not answer.
    pub async fn idle_leases(&self, login: Option<(String, String)>) -> Result<Vec<i64>, etcd_client::Error> {
        let options = login.map(|(user, password)| ConnectOptions::new().with_user(user, password));
        let mut client = Client::connect([self.endpoint()], options).await?;
        let mut idle = Vec::new();
        for lease in client.leases().await?.leases() {
            let asked = LeaseTimeToLiveOptions::new().with_keys();
            let told = client.lease_time_to_live(lease.id(), Some(asked)).await?;
            if told.ttl() > 0 && told.granted_ttl() > 60 && told.keys().is_empty() {
                idle.push(lease.id());
            }
        }
        Ok(idle)
    }

    /// Ends it and takes its data away; the next [`Self::restart`] makes a new cluster.
    pub fn wipe(&mut self) -> io::Result<()> {
        self.kill();
        std::fs::remove_dir_all(self.data())
    }

    /// Writes a backup of it to a file, as `etcdctl` does.
    pub fn snapshot(&self, file: &Path) -> io::Result<()> {
        let endpoint = self.endpoint();
        run(Command::new("etcdctl").args(["--endpoints", &endpoint, "snapshot", "save"]).arg(file))
    }

    /// Where its data lies.
    pub fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// What `snapshot restore` is to be told of it.
    pub fn member(&self) -> Vec<String> {
        let peer = format!("http://127.0.0.1:{}", self.ports.peer);
        let cluster = format!("test={peer}");
        ["--name", "test", "--initial-advertise-peer-urls", &peer, "--initial-cluster", &cluster]
            .map(str::to_owned)
            .into()
    }

    /// Ends it and puts a backup in place of its data, as operators are told to; the next [`Self::restart`]
    /// serves that.
    pub fn restore(&mut self, file: &Path) -> io::Result<()> {
        self.restore_with(file, &[])
    }

    /// The same, with further arguments for the tool.
    pub fn restore_with(&mut self, file: &Path, arguments: &[&str]) -> io::Result<()> {
        self.wipe()?;
        // Newer releases have a tool of its own for that, beside the server.
        let own = self.binary.with_file_name("etcdutl");
        let tool = if own.exists() { own } else { PathBuf::from("etcdctl") };
        run(Command::new(tool)
            .args(["snapshot", "restore"])
            .arg(file)
            .arg("--data-dir")
            .arg(self.data())
            .args(self.member())
            .args(arguments))
    }

    /// Stops it in its tracks (SIGSTOP): connections stay, nothing is answered.
    pub fn freeze(&self) -> io::Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets it go on after [`Self::freeze`].
    pub fn thaw(&self) -> io::Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let Some(pid) = self.pid().and_then(|pid| i32::try_from(pid).ok()) else {
            return Err(io::Error::new(io::ErrorKind::NotFound, "this etcd does not run"));
        };
        send(pid, signal)
    }

    fn log(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    fn log_end(&self) -> String {
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<_> = log.lines().rev().take(5).collect();
        lines.join(" | ")
    }

    fn command(&self) -> Command {
        let peer = format!("http://127.0.0.1:{}", self.ports.peer);
        let mut command = Command::new(&self.binary);
        command
            .args(["--name", "test", "--logger", "zap", "--data-dir"])
            .arg(self.directory.path().join("data"))
            .args(["--listen-client-urls", &self.endpoint(), "--advertise-client-urls", &self.endpoint()])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("test={peer}")])
            .args(["--listen-metrics-urls", &format!("http://127.0.0.1:{}", self.ports.health)]);
        if let Some(tls) = &self.tls {
            command.arg("--cert-file").arg(&tls.cert).arg("--key-file").arg(&tls.key);
            if let Some(ca) = &tls.client_ca {
                command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(ca);
            }
        }
        if !self.version.starts_with("3.4.") {
            // A test's data need not outlive the machine. 3.4 does not know the flag.
            command.arg("--unsafe-no-fsync");
        }
        command
    }

    /// Asks the port for metrics, which never speaks TLS.
    async fn is_healthy(&self) -> bool {
        let ask = async {
            let mut stream = TcpStream::connect(("127.0.0.1", self.ports.health)).await?;
            stream.write_all(b"GET /health HTTP/1.0\r\n\r\n").await?;
            let mut answer = String::new();
            stream.take(4096).read_to_string(&mut answer).await?;
            io::Result::Ok(answer.contains(r#""health":"true""#))
        };
        matches!(timeout(Duration::from_secs(5), ask).await, Ok(Ok(true)))
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Ports {
    fn free() -> io::Result<Self> {
        // All at once, so that none is given out twice.
        let listeners = [(); 3].map(|()| std::net::TcpListener::bind(("127.0.0.1", 0)));
        let [client, peer, health] = listeners.map(|listener| listener?.local_addr().map(|addr| addr.port()));
        Ok(Self { client: client?, peer: peer?, health: health? })
    }
}

/// Runs a tool to its end.
fn run(command: &mut Command) -> io::Result<()> {
    let output = command.env("ETCDCTL_API", "3").output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{command:?}: {} {}", output.status, text.trim())))
}

fn version(binary: &Path) -> io::Result<String> {
    let output = Command::new(binary).arg("--version").output().map_err(|error| {
        io::Error::new(error.kind(), format!("failed to run {}: {error}", binary.display()))
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .find_map(|line| line.strip_prefix("etcd Version: "))
        .map(|version| version.trim().to_owned())
        .ok_or_else(|| io::Error::other(format!("{} does not tell its version: {text}", binary.display())))
}
