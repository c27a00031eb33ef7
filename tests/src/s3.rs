//! An S3 of one test: moto's server, as its package in a virtual environment has it.

use std::{
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

/// The server, with a bucket `images`. Ended when dropped.
pub struct S3 {
    process: Mutex<Child>,
    port: u16,
}

impl S3 {
    /// Starts one.
    pub async fn start() -> Result<Self> {
        ec_runtime::install_tls_provider();
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let environment = std::env::var_os("EC_TEST_S3")
            .map_or_else(|| PathBuf::from("/var/cache/etcd-compute/s3"), PathBuf::from);
        let process = Command::new(environment.join("bin/moto_server"))
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("moto's server is missing: run scripts/s3-venv.sh")?;
        let server = Self { process: Mutex::new(process), port };
        for _ in 0..300 {
            let bucket = format!("{}/images", server.endpoint());
            if let Ok(answer) = reqwest::Client::new().put(bucket).send().await {
                ensure!(answer.status().is_success(), "no bucket was made: {answer:?}");
                return Ok(server);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("moto's server does not answer")
    }

    /// Its URL.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// How many objects a bucket has whose keys begin so.
    pub async fn objects(&self, bucket: &str, prefix: &str) -> Result<usize> {
        self.count(&format!("{bucket}?list-type=2&prefix={prefix}"), "<Contents>").await
    }

    /// How many objects are being sent to it in parts.
    pub async fn uploads(&self, bucket: &str) -> Result<usize> {
        self.count(&format!("{bucket}?uploads"), "<UploadId>").await
    }

    /// Ends it, as when it crashes.
    pub fn end(&self) {
        if let Ok(mut process) = self.process.lock() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    async fn count(&self, question: &str, of: &str) -> Result<usize> {
        let answer = reqwest::get(format!("{}/{question}", self.endpoint())).await?;
        Ok(answer.error_for_status()?.text().await?.matches(of).count())
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        self.end();
    }
}
