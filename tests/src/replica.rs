//! An `eplacement` of a test, as a process of its own: as shipped, with any arguments, to be stopped, killed
//! and asked over HTTP.

use std::{
    fs,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ec_store::testing::send;
use nix::sys::signal::Signal;
use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::program;

/// Longer than anything here takes on a small machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// One replica; killed when dropped.
pub struct Replica {
    child: Option<Child>,
    directory: TempDir,
    port: u16,
    http: Client,
}

/// What it answered: status and document, or text where it is none.
pub type Answer = (u16, Value);

impl Replica {
    /// Starts one on this etcd, and waits until it is ready.
    pub async fn start(etcd: &str) -> Result<Self> {
        let replica = Self::spawn(&[], etcd, &[])?;
        replica.until_ready().await?;
        Ok(replica)
    }

    /// Starts one with these words before its name (`prlimit …`) and these arguments.
    pub fn spawn(before: &[&str], etcd: &str, arguments: &[&str]) -> Result<Self> {
        ec_runtime::install_tls_provider();
        let directory = tempfile::tempdir()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let name = program("eplacement");
        ensure!(name.exists(), "eplacement is not built");
        let words: Vec<PathBuf> = before.iter().map(PathBuf::from).chain([name]).collect();
        let (first, rest) = words.split_first().context("no program")?;
        let log = fs::File::create(directory.path().join("log"))?;
        let child = Command::new(first)
            .args(rest)
            .args(["--etcd", etcd, "--listen", &format!("127.0.0.1:{port}")])
            .args(arguments)
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("failed to start eplacement")?;
        let http = Client::builder().no_proxy().timeout(PATIENCE).build()?;
        Ok(Self { child: Some(child), directory, port, http })
    }

    /// Where it answers.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What it said.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("it does not run")?;
        Ok(send(i32::try_from(child.id())?, signal)?)
    }

    /// Waits until it has ended by itself.
    pub async fn ended(&mut self) -> Result<ExitStatus> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.as_mut().context("it does not run")?.try_wait()? {
                return Ok(status);
            }
            ensure!(Instant::now() < end, "it did not end\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Sends a request as an administrator, of the newest microversion.
    pub async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Answer> {
        let mut request = self
            .http
            .request(method, format!("{}{path}", self.url()))
            .header("X-Auth-Token", "admin")
            .header("OpenStack-API-Version", "placement 1.39");
        if let Some(body) = body {
            request = request.json(body);
        }
        let answer = request.send().await?;
        let status = answer.status().as_u16();
        let text = answer.text().await?;
        Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// GET.
    pub async fn get(&self, path: &str) -> Result<Answer> {
        self.send(Method::GET, path, None).await
    }

    /// Waits until it says that it is ready.
    pub async fn until_ready(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let last = self.get("/readyz").await;
            if matches!(last, Ok((200, _))) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "not ready: {last:?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Makes a provider with so many VCPU.
    pub async fn provider(&self, uuid: &str, vcpu: i64) -> Result<()> {
        let body = json!({"name": format!("host-{uuid}"), "uuid": uuid});
        let made = self.send(Method::POST, "/resource_providers", Some(&body)).await?;
        ensure!(made.0 == 200, "{made:?}");
        let body = json!({"resource_provider_generation": 0, "inventories": {"VCPU": {"total": vcpu}}});
        let path = format!("/resource_providers/{uuid}/inventories");
        let made = self.send(Method::PUT, &path, Some(&body)).await?;
        ensure!(made.0 == 200, "{made:?}");
        Ok(())
    }

    /// Claims so many VCPU of each of these providers for a consumer, whatever it had.
    pub async fn claim(&self, consumer: &str, providers: &[&str], vcpu: i64) -> Result<Answer> {
        let (_, before) = self.get(&format!("/allocations/{consumer}")).await?;
        let body = claim(providers, vcpu, before["consumer_generation"].as_i64());
        self.send(Method::PUT, &format!("/allocations/{consumer}"), Some(&body)).await
    }

    /// Releases all that a consumer has.
    pub async fn release(&self, consumer: &str) -> Result<()> {
        let answer = self.send(Method::DELETE, &format!("/allocations/{consumer}"), None).await?;
        ensure!(answer.0 == 204, "{answer:?}");
        Ok(())
    }

    /// How many VCPU are used of a provider.
    pub async fn used(&self, provider: &str) -> Result<i64> {
        let (status, answer) = self.get(&format!("/resource_providers/{provider}/usages")).await?;
        match answer["usages"]["VCPU"].as_i64() {
            Some(used) if status == 200 => Ok(used),
            _ => bail!("{status} {answer}"),
        }
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// A claim of a consumer that has this generation; none: that is not there yet.
pub fn claim(providers: &[&str], vcpu: i64, generation: Option<i64>) -> Value {
    let allocations: serde_json::Map<String, Value> = providers
        .iter()
        .map(|provider| ((*provider).to_owned(), json!({"resources": {"VCPU": vcpu}})))
        .collect();
    json!({
        "allocations": allocations, "project_id": "p", "user_id": "u", "consumer_type": "INSTANCE",
        "consumer_generation": generation,
    })
}
