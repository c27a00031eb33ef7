//! Load on a Placement API, cheap enough to share two cores with what it measures.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rand::RngExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};

/// What every claim takes.
pub(super) const RESOURCES: &str = "VCPU:1,MEMORY_MB:256,DISK_GB:1";
/// Bound of one request: OpenStack's server takes seconds for some.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection that is kept.
pub(super) struct Connection {
    host: String,
    stream: Option<TcpStream>,
    answer: Vec<u8>,
}

impl Connection {
    pub(super) fn new(host: &str) -> Self {
        Self { host: host.to_owned(), stream: None, answer: Vec::new() }
    }

    /// Sends a request; answers status and body.
    pub(super) async fn send(&mut self, method: &str, path: &str, body: &str) -> Result<(u16, &[u8])> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nX-Auth-Token: admin\r\nAccept: application/json\r\n\
             OpenStack-API-Version: placement 1.38\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.host,
            body.len()
        );
        let done =
            timeout(PATIENCE, self.exchange(&request)).await.with_context(|| format!("{method} {path}"))?;
        let (status, head) = done.with_context(|| format!("{method} {path}"))?;
        Ok((status, &self.answer[head..]))
    }

    /// Answers the status and where the body begins.
    async fn exchange(&mut self, request: &str) -> Result<(u16, usize)> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(&self.host).await?;
            stream.set_nodelay(true)?;
            self.stream = Some(stream);
        }
        let stream = self.stream.as_mut().context("a connection")?;
        stream.write_all(request.as_bytes()).await?;
        self.answer.clear();
        loop {
            ensure!(stream.read_buf(&mut self.answer).await? > 0, "the server closed the connection");
            let Some(end) = self.answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { continue };
            let head = std::str::from_utf8(&self.answer[..end])?.to_ascii_lowercase();
            let status = head.get(9..12).context("no status")?.parse()?;
            let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
            let length: usize = length.map_or(Ok(0), |length| length.trim().parse())?;
            while self.answer.len() < end + 4 + length {
                ensure!(stream.read_buf(&mut self.answer).await? > 0, "the answer broke off");
            }
            if head.contains("connection: close") {
                self.stream = None;
            }
            return Ok((status, end + 4));
        }
    }
}

/// What clients do for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Candidates, and the claim of one.
    Claim,
    /// The claim alone, of candidates asked for before.
    Put,
    /// Candidates alone.
    Candidates(&'static str),
}

/// What came of it.
#[derive(Debug, Default, Clone)]
pub(super) struct Outcome {
    /// Done, of those that were counted.
    pub(super) done: u64,
    /// Per second.
    pub(super) rate: f64,
    /// Milliseconds.
    pub(super) median: f64,
}

/// Lets clients work for so long.
pub(super) async fn run(host: &str, work: Work, clients: usize, time: Duration) -> Result<Outcome> {
    let done = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    let begin = Instant::now();
    for _ in 0..clients {
        tasks.spawn(client(host.to_owned(), work, begin + time, Arc::clone(&done)));
    }
    let mut times = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        times.extend(ended??);
    }
    // Slow servers answer some time after the end.
    let rate = done.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64();
    times.sort_unstable();
    let median = times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1000.0);
    Ok(Outcome { done: done.load(Ordering::Relaxed), rate, median })
}

async fn client(host: String, work: Work, end: Instant, done: Arc<AtomicU64>) -> Result<Vec<Duration>> {
    let mut connection = Connection::new(&host);
    let (mut times, mut known): (Vec<Duration>, Vec<String>) = (Vec::new(), Vec::new());
    while Instant::now() < end {
        let mut begin = Instant::now();
        if work != Work::Put || known.is_empty() {
            let path = match work {
                Work::Candidates(query) => format!("/allocation_candidates?{query}"),
                Work::Claim => format!("/allocation_candidates?resources={RESOURCES}&limit=32"),
                Work::Put => format!("/allocation_candidates?resources={RESOURCES}&limit=500"),
            };
            let (status, body) = connection.send("GET", &path, "").await?;
            ensure!(status == 200, "{path}: {status} {}", String::from_utf8_lossy(body));
            if let Work::Candidates(_) = work {
                times.push(begin.elapsed());
                done.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            known = providers(std::str::from_utf8(body)?);
            ensure!(!known.is_empty(), "the cloud is full");
            if work == Work::Put {
                begin = Instant::now();
            }
        }
        let provider = &known[rand::rng().random_range(0..known.len())];
        let body = format!(
            "{{\"allocations\":{{\"{provider}\":{{\"resources\":{{\"VCPU\":1,\"MEMORY_MB\":256,\"DISK_GB\":1}}}}}},\
             \"project_id\":\"p\",\"user_id\":\"u\",\"consumer_generation\":null,\"consumer_type\":\"INSTANCE\"}}"
        );
        let consumer = uuid::Builder::from_random_bytes(rand::random()).into_uuid();
        let (status, answer) = connection.send("PUT", &format!("/allocations/{consumer}"), &body).await?;
        match status {
            204 => {
                done.fetch_add(1, Ordering::Relaxed);
                times.push(begin.elapsed());
            }
            409 => known.clear(),
            _ => bail!("a claim: {status} {}", String::from_utf8_lossy(answer)),
        }
    }
    Ok(times)
}

/// The providers of candidates, without reading all of the answer.
fn providers(answer: &str) -> Vec<String> {
    let requests = answer.split("\"provider_summaries\"").next().unwrap_or(answer);
    let compact = requests.replace(": ", ":");
    let mark = "{\"allocations\":{\"";
    compact
        .match_indices(mark)
        .filter_map(|(at, _)| compact.get(at + mark.len()..at + mark.len() + 36))
        .map(str::to_owned)
        .collect()
}

/// Makes flat providers by the API: three requests each. Answers how many a second.
pub(super) async fn register(host: &str, count: u64) -> Result<f64> {
    let next = Arc::new(AtomicU64::new(0));
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..64 {
        let (host, next) = (host.to_owned(), Arc::clone(&next));
        tasks.spawn(async move {
            let mut connection = Connection::new(&host);
            while next.fetch_add(1, Ordering::Relaxed) < count {
                let uuid = uuid::Builder::from_random_bytes(rand::random()).into_uuid();
                let path = format!("/resource_providers/{uuid}");
                let steps = [
                    ("POST", "/resource_providers".to_owned(), format!("{{\"name\":\"{uuid}\",\"uuid\":\"{uuid}\"}}")),
                    (
                        "PUT",
                        format!("{path}/inventories"),
                        "{\"resource_provider_generation\":0,\"inventories\":{\"VCPU\":{\"total\":640,\
                         \"allocation_ratio\":16.0},\"MEMORY_MB\":{\"total\":2621440},\"DISK_GB\":{\"total\":20000}}}"
                            .to_owned(),
                    ),
                    (
                        "PUT",
                        format!("{path}/traits"),
                        "{\"resource_provider_generation\":1,\"traits\":[\"HW_CPU_X86_AVX\",\"COMPUTE_NODE\"]}".to_owned(),
                    ),
                ];
                for (method, path, body) in steps {
                    let (status, answer) = connection.send(method, &path, &body).await?;
                    ensure!(status == 200, "{method} {path}: {status} {}", String::from_utf8_lossy(answer));
                }
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(count as f64 / begin.elapsed().as_secs_f64())
}

/// Makes hosts with two NUMA nodes and a network device each, and a disk that they share.
pub(super) async fn register_nested(host: &str, hosts: u64) -> Result<()> {
    let mut connection = Connection::new(host);
    let mut aggregate = uuid::Uuid::nil();
    for number in 0..hosts {
        // A shared disk for every twenty.
        if number % 20 == 0 {
            aggregate = uuid::Uuid::new_v4();
            let traits = ["MISC_SHARES_VIA_AGGREGATE"];
            nested(&mut connection, None, "\"DISK_GB\":{\"total\":100000}", &traits, Some(aggregate)).await?;
        }
        let root = nested(&mut connection, None, "", &["COMPUTE_NODE"], Some(aggregate)).await?;
        for _ in 0..2 {
            let inventory = "\"VCPU\":{\"total\":16},\"MEMORY_MB\":{\"total\":65536}";
            nested(&mut connection, Some(root), inventory, &["HW_NUMA_ROOT"], None).await?;
        }
        nested(&mut connection, Some(root), "\"SRIOV_NET_VF\":{\"total\":8}", &["HW_NIC_OFFLOAD_TSO"], None)
            .await?;
    }
    Ok(())
}

async fn nested(
    connection: &mut Connection,
    parent: Option<uuid::Uuid>,
    inventories: &str,
    traits: &[&str],
    aggregate: Option<uuid::Uuid>,
) -> Result<uuid::Uuid> {
    let uuid = uuid::Uuid::new_v4();
    let path = format!("/resource_providers/{uuid}");
    let document = serde_json::json!({"name": uuid, "uuid": uuid, "parent_provider_uuid": parent});
    let mut steps = vec![("POST", "/resource_providers".to_owned(), document.to_string())];
    let inventories = format!("{{\"resource_provider_generation\":0,\"inventories\":{{{inventories}}}}}");
    steps.push(("PUT", format!("{path}/inventories"), inventories));
    let document = serde_json::json!({"resource_provider_generation": 1, "traits": traits});
    steps.push(("PUT", format!("{path}/traits"), document.to_string()));
    if let Some(aggregate) = aggregate {
        let document = serde_json::json!({"resource_provider_generation": 2, "aggregates": [aggregate]});
        steps.push(("PUT", format!("{path}/aggregates"), document.to_string()));
    }
    for (method, path, body) in steps {
        let (status, answer) = connection.send(method, &path, &body).await?;
        ensure!(status == 200, "{method} {path}: {status} {}", String::from_utf8_lossy(answer));
    }
    Ok(uuid)
}

/// Looks at every provider's usage: nothing may be above what there is. Answers the sum of VCPU.
pub(super) async fn audit(host: &str) -> Result<i64> {
    let mut connection = Connection::new(host);
    let (_, body) = connection.send("GET", "/allocation_candidates?resources=VCPU:1", "").await?;
    let answer: serde_json::Value = serde_json::from_slice(body)?;
    let mut sum = 0;
    for (provider, summary) in answer["provider_summaries"].as_object().context("no summaries")? {
        for (class, resource) in summary["resources"].as_object().context("no resources")? {
            let number = |key: &str| resource[key].as_i64().context("no number");
            let (used, capacity) = (number("used")?, number("capacity")?);
            ensure!(used <= capacity, "OVER CAPACITY: {used} of {capacity} {class} at {provider}");
            if class == "VCPU" {
                sum += used;
            }
        }
    }
    Ok(sum)
}
