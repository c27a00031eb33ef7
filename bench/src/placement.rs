//! eplacement beside OpenStack Placement (PostgreSQL, 4 × 4 workers) and bare etcd, on one machine in one run.
//!
//! Whoever grants more than there is ends the run with an error; a goal that is missed is printed.

mod etcd;
pub(crate) mod far;
mod load;

use std::{
    fmt::Write,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ec_store::testing::EtcdServer;
use ec_tests::PlacementServer;
use serde_json::{Value, json};

use self::load::{RESOURCES, Work};

const NESTED: &str = "resources=DISK_GB:10&resources1=VCPU:2,MEMORY_MB:1024&required1=HW_NUMA_ROOT\
                      &resources2=SRIOV_NET_VF:1&group_policy=none&limit=32";
const LIMITED: &str = "resources=VCPU:1,MEMORY_MB:256,DISK_GB:1&limit=32";
const UNLIMITED: &str = "resources=VCPU:1,MEMORY_MB:256,DISK_GB:1";

/// One line: what was measured of us, of OpenStack's server and of what is bare, and what is wanted.
pub(crate) struct Row {
    name: String,
    unit: &'static str,
    ours: f64,
    openstack: Option<f64>,
    bare: Option<f64>,
    goal: Option<(String, bool)>,
}

impl Row {
    fn new(name: impl Into<String>, unit: &'static str, ours: f64) -> Self {
        Self { name: name.into(), unit, ours, openstack: None, bare: None, goal: None }
    }

    fn goal(self, text: impl Into<String>, met: bool) -> Self {
        Self { goal: Some((text.into(), met)), ..self }
    }
}

/// How large and how long.
struct Plan {
    both: &'static [u64],
    ours_only: &'static [u64],
    time: Duration,
    nested_hosts: u64,
    held: (u64, u64),
}

const WHOLE: Plan = Plan {
    both: &[100, 1_000, 5_000],
    ours_only: &[10_000, 100_000],
    time: Duration::from_secs(4),
    nested_hosts: 200,
    held: (10_000, 100_000),
};
const QUICK: Plan = Plan {
    both: &[100],
    ours_only: &[1_000],
    time: Duration::from_secs(2),
    nested_hosts: 20,
    held: (1_000, 5_000),
};

/// Measures everything.
pub(crate) async fn measure(quick: bool) -> Result<Vec<Row>> {
    let plan = if quick { QUICK } else { WHOLE };
    let mut rows = Vec::new();
    for size in plan.both.iter().chain(plan.ours_only) {
        let with_openstack = plan.both.contains(size);
        flat(&plan, *size, with_openstack, &mut rows).await?;
    }
    nested(&plan, &mut rows).await?;
    held(&plan, &mut rows).await?;
    Ok(rows)
}

fn host(server: &PlacementServer) -> String {
    server.endpoint().trim_start_matches("http://").to_owned()
}

struct Ours {
    server: PlacementServer,
    etcd: EtcdServer,
    directory: tempfile::TempDir,
}

impl Ours {
    async fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let etcd = EtcdServer::start(None).await?;
        let server = PlacementServer::start(directory.path(), &etcd.endpoint())?;
        server.until_it_answers().await?;
        Ok(Self { server, etcd, directory })
    }
}

/// OpenStack's server with flat providers, put into its database at once: by its API that takes minutes.
async fn openstack(directory: &std::path::Path, size: u64) -> Result<PlacementServer> {
    let server = PlacementServer::start_openstack_concurrent(directory, "")?;
    server.until_it_answers().await?;
    let statements = format!(
        "INSERT INTO resource_providers (uuid, name, generation) SELECT gen_random_uuid()::text, 'host-' || n, 1 \
         FROM generate_series(1, {size}) n; UPDATE resource_providers SET root_provider_id = id; \
         INSERT INTO inventories (resource_provider_id, resource_class_id, total, reserved, min_unit, max_unit, \
         step_size, allocation_ratio) SELECT p.id, c.id, c.total, 0, 1, 2147483647, 1, c.ratio FROM \
         resource_providers p, (VALUES (0, 640, 16.0), (1, 2621440, 1.0), (2, 20000, 1.0)) c(id, total, ratio); ANALYZE;"
    );
    if size > 0 {
        let url = server.database().context("OpenStack's placement is not on PostgreSQL")?;
        let output =
            Command::new("psql").args(["-q", "-v", "ON_ERROR_STOP=1", "-c", &statements, &url]).output()?;
        ensure!(output.status.success(), "psql: {output:?}");
    }
    Ok(server)
}

async fn flat(plan: &Plan, size: u64, with_openstack: bool, rows: &mut Vec<Row>) -> Result<()> {
    eprintln!("{size} providers");
    let ours = Ours::start().await?;
    let rate = load::register(&host(&ours.server), size).await?;
    rows.push(Row::new(format!("{size} providers: registrations (3 requests)"), "/s", rate));
    let directory = tempfile::tempdir()?;
    let theirs = if with_openstack { Some(openstack(directory.path(), size).await?) } else { None };
    // The bare one holds as many keys: each is a little slower with more.
    let bare = EtcdServer::start(None).await?;
    let keys = etcd::count(&ours.etcd.endpoint()).await?;
    etcd::fill(&bare.endpoint(), keys).await?;
    let bare = etcd::compare_and_swap(&bare.endpoint(), 64, plan.time).await?;
    let name = format!("{size} providers: bare etcd with {keys} keys, compare-and-swap, 64 clients");
    rows.push(Row::new(name, "/s", bare));
    let mut claimed = 0;
    for clients in [1, 8, 64] {
        let own = load::run(&host(&ours.server), Work::Claim, clients, plan.time).await?;
        let put = load::run(&host(&ours.server), Work::Put, clients, plan.time).await?;
        claimed += own.done + put.done;
        let mut claims = Row::new(format!("{size} providers, {clients} clients: claims"), "/s", own.rate);
        if let Some(server) = &theirs {
            let other = load::run(&host(server), Work::Claim, clients, plan.time).await?;
            claims.openstack = Some(other.rate);
            if clients == 8 && size == 5_000 {
                let met = own.rate >= 1000.0 * other.rate || own.rate >= 0.25 * bare;
                claims = claims.goal("≥ 1000 × OpenStack or ≥ 0.25 × bare etcd", met);
            }
        }
        let mut puts =
            Row::new(format!("{size} providers, {clients} clients: the PUT alone"), "/s", put.rate);
        (claims.bare, puts.bare) = (Some(bare), Some(bare));
        if clients == 64 {
            claims = claims.goal("≥ 0.5 × bare etcd", own.rate >= 0.5 * bare);
            puts = puts.goal("≥ 1 × bare etcd", put.rate >= bare);
        }
        rows.push(claims);
        rows.push(puts);
        if clients == 1 {
            let median = Row::new(format!("{size} providers, one client: a claim, median"), "ms", own.median);
            rows.push(median.goal("≤ 3 ms", own.median <= 3.0));
        }
    }
    let sum = load::audit(&host(&ours.server)).await?;
    ensure!(u64::try_from(sum)? == claimed, "{claimed} claims were acknowledged, and {sum} VCPU are used");
    let limited = load::run(&host(&ours.server), Work::Candidates(LIMITED), 1, plan.time).await?;
    let mut row = Row::new(format!("{size} providers: candidates, limit 32, median"), "ms", limited.median);
    let unlimited = load::run(&host(&ours.server), Work::Candidates(UNLIMITED), 1, plan.time).await?;
    let mut whole =
        Row::new(format!("{size} providers: candidates without limit, median"), "ms", unlimited.median);
    whole.bare = Some(serialising(&host(&ours.server)).await?);
    if let Some(server) = &theirs {
        row.openstack = Some(load::run(&host(server), Work::Candidates(LIMITED), 1, plan.time).await?.median);
        whole.openstack =
            Some(load::run(&host(server), Work::Candidates(UNLIMITED), 1, plan.time).await?.median);
    }
    let most = if size <= 1_000 { 1.0 } else { 2.0 };
    rows.push(row.goal(format!("≤ {most} ms"), limited.median <= most));
    let bound = whole.bare.unwrap_or(f64::NAN) * 5.0;
    rows.push(whole.goal("≤ 5 × serialising", unlimited.median <= bound));
    Ok(())
}

/// Milliseconds that merely writing the whole answer as JSON takes.
async fn serialising(host: &str) -> Result<f64> {
    let mut connection = load::Connection::new(host);
    let (_, body) =
        connection.send("GET", &format!("/allocation_candidates?resources={RESOURCES}"), "").await?;
    let answer: Value = serde_json::from_slice(body)?;
    let begin = Instant::now();
    let text = serde_json::to_vec(&answer)?;
    ensure!(!text.is_empty(), "nothing was written");
    Ok(begin.elapsed().as_secs_f64() * 1000.0)
}

async fn nested(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    eprintln!("{} hosts with NUMA nodes, devices and shared disks", plan.nested_hosts);
    let ours = Ours::start().await?;
    let directory = tempfile::tempdir()?;
    let theirs = openstack(directory.path(), 0).await?;
    load::register_nested(&host(&ours.server), plan.nested_hosts).await?;
    load::register_nested(&host(&theirs), plan.nested_hosts).await?;
    let own = load::run(&host(&ours.server), Work::Candidates(NESTED), 1, plan.time).await?;
    let other = load::run(&host(&theirs), Work::Candidates(NESTED), 1, plan.time).await?;
    let name = format!("{} hosts, nested and sharing, granular: candidates, median", plan.nested_hosts);
    let mut row = Row::new(name, "ms", own.median);
    row.openstack = Some(other.median);
    rows.push(row.goal("≥ 100 × faster", other.median / own.median >= 100.0));
    Ok(())
}

async fn held(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let (providers, allocations) = plan.held;
    eprintln!("{providers} providers with {allocations} allocations");
    let mut ours = Ours::start().await?;
    load::register(&host(&ours.server), providers).await?;
    let before = etcd::compacted_size(&ours.etcd.endpoint()).await?;
    let mut claimed = 0;
    while claimed < allocations {
        claimed += load::run(&host(&ours.server), Work::Put, 64, Duration::from_secs(2)).await?.done;
    }
    let churned = etcd::size(&ours.etcd.endpoint()).await?;
    let after = etcd::compacted_size(&ours.etcd.endpoint()).await?;
    let per_claim = (after - before) as f64 / claimed as f64;
    rows.push(Row::new(format!("etcd keeps per claim, {claimed} claims"), "bytes", per_claim));
    rows.push(Row::new("etcd's database before compaction", "MB", churned as f64 / 1e6));
    rows.push(Row::new("etcd's database after compaction", "MB", after as f64 / 1e6));
    rows.push(resident(&ours, "after the claims")?);
    ours.server.end();
    let begin = Instant::now();
    ours.server.go_on()?;
    let mut connection = load::Connection::new(&host(&ours.server));
    while !matches!(connection.send("GET", "/readyz", "").await, Ok((200, _))) {
        ensure!(begin.elapsed() < Duration::from_secs(120), "it does not become ready");
        connection = load::Connection::new(&host(&ours.server));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let ready = begin.elapsed().as_secs_f64();
    let name = format!("{providers} providers, {claimed} allocations: start to ready");
    rows.push(Row::new(name, "s", ready).goal("≤ 2 s", ready <= 2.0));
    rows.push(resident(&ours, "after its start")?);
    drop(ours.directory);
    Ok(())
}

/// Resident memory of our server.
fn resident(ours: &Ours, when: &str) -> Result<Row> {
    let pid = ours.server.pid().context("it does not run")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let megabytes = kilobytes.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0 / 1e6;
    let row = Row::new(format!("resident memory {when}"), "MB", megabytes);
    Ok(row.goal("≤ 250 MB", megabytes <= 250.0))
}

/// A number with as many digits as it needs.
fn number(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// For people.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<66} {:>14} {:>14} {:>10} {:>12} {:>7}  goal",
        "figure", "eplacement", "OpenStack", "×", "bare", "ratio"
    );
    for row in rows {
        let value = |value: Option<f64>| value.map_or_else(|| "-".into(), number);
        // Of times, less is better.
        let times =
            row.openstack.map(|other| if row.unit == "ms" { other / row.ours } else { row.ours / other });
        let goal = row.goal.as_ref().map_or_else(String::new, |(text, met)| {
            format!("{text}: {}", if *met { "met" } else { "MISSED" })
        });
        let _ = writeln!(
            text,
            "{:<66} {:>14} {:>14} {:>10} {:>12} {:>7}  {goal}",
            row.name,
            format!("{} {}", number(row.ours), row.unit),
            value(row.openstack),
            value(times),
            value(row.bare),
            value(row.bare.map(|bare| row.ours / bare)),
        );
    }
    text
}

/// For programs.
pub(crate) fn document(rows: &[Row]) -> Value {
    let rows: Vec<Value> = rows
        .iter()
        .map(|row| {
            let goal = row.goal.as_ref().map(|(text, met)| json!({"text": text, "met": met}));
            json!({
                "figure": row.name, "unit": row.unit, "eplacement": row.ours, "openstack": row.openstack,
                "bare": row.bare, "goal": goal,
            })
        })
        .collect();
    json!({ "placement": rows })
}
