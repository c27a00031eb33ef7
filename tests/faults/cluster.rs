//! A cluster as an administrator makes it: certificates, rights, nodes that join and one that is thrown out.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use ec_libvirt::testing::{LibvirtServer, tiny_image};
use ec_model::{InstanceId, Keyspace, NodeId};
use ec_store::{EtcdConfig, EtcdStore, EtcdTls, Store, Txn, Users, testing::EtcdServer};
use ec_tests::{Running, TINY, program};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use reqwest::{Certificate, Client, ClientBuilder, Identity, Method, tls::TlsInfo};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use serde_json::{Value, json};

use crate::monitoring::example_on_one_host;

fn start(mut command: Command, log: &Path) -> Result<Running> {
    let log = fs::File::create(log)?;
    let child = command.stdout(log.try_clone()?).stderr(log).stdin(Stdio::null()).spawn();
    Ok(Running(child.with_context(|| format!("{command:?}"))?))
}

/// One administrator's host.
struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    fn new() -> Result<Self> {
        ec_runtime::install_tls_provider();
        // QEMU must be able to pass through.
        Ok(Self { directory: tempfile::Builder::new().prefix("ec-cluster-").tempdir()? })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// `eschedule cluster …` or `node …` on the cluster's directory.
    fn administer(&self, arguments: &[&str]) -> Result<Output> {
        let directory = self.file("cluster");
        Ok(Command::new(program("eschedule")).args(arguments).arg("--directory").arg(directory).output()?)
    }

    fn administered(&self, arguments: &[&str]) -> Result<String> {
        let output = self.administer(arguments)?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    fn refused(&self, arguments: &[&str], code: i32, why: &str) -> Result<()> {
        let output = self.administer(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(code), "{arguments:?}: {output:?}");
        ensure!(said.lines().next().is_some_and(|line| line.contains(why)), "{arguments:?}: {said}");
        Ok(())
    }

    /// As a user of the cluster.
    fn scheduled(&self, arguments: &[&str]) -> Result<String> {
        let config = self.file("cluster/schedule.yaml");
        let output =
            Command::new(program("eschedule")).arg("--config").arg(config).args(arguments).output()?;
        ensure!(output.status.success(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Whether etcd is there, and has its users and their list.
    fn is_secured(&self) -> bool {
        self.administer(&["cluster", "init"]).is_ok_and(|output| output.status.success())
    }

    /// A cluster of this host alone, on an etcd of this program that has its users.
    async fn begin(&self, binary: &Path) -> Result<Running> {
        self.administered(&["cluster", "init", "127.0.0.1"])?;
        let etcd = self.start_etcd_of(binary)?;
        self.until("etcd has users", async || self.is_secured()).await?;
        Ok(etcd)
    }

    fn start_etcd(&self) -> Result<Running> {
        self.start_etcd_of(Path::new("etcd"))
    }

    /// This binary of etcd, with the cluster's configuration.
    fn start_etcd_of(&self, binary: &Path) -> Result<Running> {
        let file = self.file("cluster/etcd.yaml");
        let text = fs::read_to_string(&file)?;
        // A test's data is its own; all else is as it was made.
        let data = self.file("etcd").display().to_string();
        fs::write(&file, text.replace("/var/lib/etcd/ecompute", &data))?;
        // As a distribution's service is told it.
        let mut etcd = Command::new(binary);
        etcd.env("ETCD_CONFIG_FILE", file);
        start(etcd, &self.file("etcd.log"))
    }

    fn start_placement(&self) -> Result<Running> {
        let mut placement = Command::new(program("eplacement"));
        placement.arg("--config").arg(self.file("cluster/eplacement.yaml"));
        start(placement, &self.file("eplacement.log"))
    }

    /// A node of this name, joined in a directory of its own.
    fn join(&self, name: &str) -> Result<Member> {
        let (bundle, place) = (self.file(&format!("{name}.bundle")), self.file(name));
        let out = bundle.display().to_string();
        let added =
            self.administered(&["-o", "json", "node", "add", name, "--host", "127.0.0.1", "--out", &out])?;
        let added: Value = serde_json::from_str(&added)?;
        let node: NodeId = added["node"].as_str().context("its uuid")?.parse()?;
        let output = Command::new(program("ecompute"))
            .arg("join")
            .arg(&bundle)
            .arg("--directory")
            .arg(&place)
            .output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(Member { node, place })
    }

    async fn until(&self, what: &str, reached: impl AsyncFn() -> bool) -> Result<()> {
        for _ in 0..300 {
            if reached().await {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let logs = ["etcd.log", "eplacement.log", "ecompute.log"].map(|name| {
            let text = fs::read_to_string(self.file(name)).unwrap_or_default();
            let end = text.lines().rev().take(12).collect::<Vec<_>>();
            format!("-- {name}\n{}", end.into_iter().rev().collect::<Vec<_>>().join("\n"))
        });
        bail!("not within a minute: {what}\n{}", logs.join("\n"))
    }
}

async fn etcd_as(place: &Path, name: &str) -> Result<EtcdStore> {
    let file = |ending: &str| place.join(format!("{name}.{ending}"));
    let tls = EtcdTls { ca_cert: place.join("ca.pem"), client: Some((file("pem"), file("key"))) };
    let endpoints = vec!["https://127.0.0.1:2379".into()];
    Ok(EtcdStore::connect(EtcdConfig { endpoints, tls: Some(tls), ..EtcdConfig::default() }).await?)
}

fn client_as(place: &Path, name: &str) -> Result<Client> {
    Ok(builder_as(place, name)?.build()?)
}

fn builder_as(place: &Path, name: &str) -> Result<ClientBuilder> {
    let file = |name: String| fs::read(place.join(name));
    Ok(Client::builder()
        .no_proxy()
        .tls_info(true)
        .tls_certs_only([Certificate::from_pem(&file("ca.pem".into())?)?])
        .identity(Identity::from_pem(
            &[file(format!("{name}.pem"))?, file(format!("{name}.key"))?].concat(),
        )?))
}

/// Whether etcd takes a connection with this certificate, by what it asks no rights for.
fn opens(place: &Path, name: &str) -> Result<bool> {
    let file = |name: String| place.join(name).into_os_string();
    let asked = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .args(["--endpoints", "https://127.0.0.1:2379", "--dial-timeout", "3s", "--command-timeout", "3s"])
        .args(["--cacert".into(), file("ca.pem".into()), "--cert".into(), file(format!("{name}.pem"))])
        .args(["--key".into(), file(format!("{name}.key"))])
        .args(["lease", "grant", "60"])
        .output()?;
    Ok(asked.status.success())
}

/// A node's credentials, in whoever's hands.
struct Member {
    node: NodeId,
    place: PathBuf,
}

impl Member {
    async fn etcd(&self) -> Result<EtcdStore> {
        etcd_as(&self.place, "node").await
    }

    /// The certificate that is served at a port now, to a new connection.
    async fn served(&self, port: u16) -> Result<Vec<u8>> {
        let client = client_as(&self.place, "node")?;
        let answer = client.get(format!("https://127.0.0.1:{port}/healthz")).send().await?;
        let info = answer.extensions().get::<TlsInfo>().context("no TLS")?;
        Ok(info.peer_certificate().context("no certificate")?.to_owned())
    }

    /// Asks placement; answers the status and the document.
    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Result<(u16, Value)> {
        let file = |name: &str| fs::read(self.place.join(name));
        let client = client_as(&self.place, "node")?;
        let mut request = client
            .request(method, format!("https://127.0.0.1:8080{path}"))
            .header("OpenStack-API-Version", "placement 1.39")
            .header("X-Auth-Token", String::from_utf8(file("node.token")?)?.trim());
        if let Some(body) = body {
            request = request.json(&body);
        }
        let answer = request.send().await?;
        let status = answer.status().as_u16();
        Ok((status, answer.json().await.unwrap_or_default()))
    }

    async fn allocate(&self, consumer: InstanceId, document: &Value) -> Result<u16> {
        Ok(self.ask(Method::PUT, &format!("/allocations/{consumer}"), Some(document.clone())).await?.0)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_begins_grows_by_bundles_and_a_stolen_one_opens_nothing_of_anothers() -> Result<()> {
    let host = Host::new()?;
    let directory = host.file("cluster");
    // Not before its time.
    host.refused(&["node", "list"], 2, "there is no cluster")?;
    host.refused(&["cluster", "init"], 2, "name this host")?;
    host.refused(&["cluster", "init", "a:1"], 2, "without a port")?;
    ensure!(!directory.exists());

    // What an operator wrote is not written over; what was shipped is.
    fs::create_dir(&directory)?;
    fs::write(directory.join("schedule.yaml"), "project: mine\n")?;
    host.refused(&["cluster", "init", "127.0.0.1"], 2, "is there already")?;
    assert_eq!(fs::read_dir(&directory)?.count(), 1);
    fs::write(directory.join("schedule.yaml"), include_str!("../../schedule.yaml"))?;
    let first = host.administered(&["cluster", "init", "127.0.0.1"])?;
    ensure!(first.contains("start etcd: etcd --config-file"), "{first}");
    let mode = |file: &str| {
        Ok::<_, std::io::Error>(fs::metadata(directory.join(file))?.permissions().mode() & 0o777)
    };
    for secret in ["ca.key", "root.key", "eschedule.key", "eschedule.token"] {
        assert_eq!(mode(secret)?, 0o600, "{secret}");
    }
    // Their services' groups may read these, where there are such groups.
    for secret in ["etcd.key", "eplacement.key", "econtroller.key", "econtroller.token"] {
        assert_eq!(mode(secret)? & 0o137, 0, "{secret}");
    }
    let authority = fs::read(directory.join("ca.pem"))?;
    host.refused(&["cluster", "init", "127.0.0.1"], 3, "start it: etcd --config-file")?;

    let running_etcd = host.start_etcd()?;
    host.until("etcd has users", async || {
        host.administer(&["cluster", "init"]).is_ok_and(|output| output.status.success())
    })
    .await?;
    // Again: nothing new.
    let again = host.administered(&["cluster", "init", "127.0.0.1"])?;
    ensure!(!again.contains("made ") && again.contains("eschedule node add"), "{again}");
    assert_eq!(fs::read(directory.join("ca.pem"))?, authority);

    let _placement = host.start_placement()?;
    host.until("placement listens", async || tokio::net::TcpStream::connect("127.0.0.1:8080").await.is_ok())
        .await?;

    // A node that joins while all of this runs, and a guest on it.
    let libvirt = LibvirtServer::start();
    let honest = host.join("host1")?;
    host.refused(&["node", "add", "host1", "--out", "x"], 1, "--again")?;
    let config = honest.place.join("compute.yaml");
    let images = tiny_image();
    let more = format!(
        "state_dir: {}\nlibvirt: {{uri: \"{}\", network: {}}}\nreserved: {{MEMORY_MB: 0, DISK_GB: 0}}\nimages: {{local: [{}]}}\n",
        host.file("state").display(),
        libvirt.uri(),
        libvirt.network(),
        images.parent().context("a directory")?.display(),
    );
    fs::write(&config, fs::read_to_string(&config)? + &more)?;
    let mut agent = Command::new(program("ecompute"));
    agent.arg("--config").arg(&config);
    let _agent = start(agent, &host.file("ecompute.log"))?;
    host.until("the node is there", async || {
        host.scheduled(&["nodes"]).is_ok_and(|nodes| nodes.contains("host1"))
    })
    .await?;
    let data = host.file("user-data");
    fs::write(&data, "#!/bin/sh\necho secret\n")?;
    let image = format!("file://{}", images.display());
    host.scheduled(&["--wait", "--name", "web", "--user-data", &data.display().to_string(), TINY, &image])?;
    host.until("its console is read through TLS", async || {
        host.scheduled(&["logs", "web"]).is_ok_and(|log| log.contains("READY"))
    })
    .await?;
    let web: Value = serde_json::from_str(&host.scheduled(&["-o", "json", "show", "web"])?)?;
    let web: InstanceId = web["instance"].as_str().context("its uuid")?.parse()?;

    // Its user-data reached it, and whoever has all of etcd, or a backup of it, cannot read it.
    let root = etcd_as(&directory, "root").await?;
    let everything = root.list("/").await?;
    let secrets =
        everything.pairs.iter().filter(|pair| String::from_utf8_lossy(&pair.value).contains("secret"));
    assert_eq!(secrets.map(|pair| &pair.key).collect::<Vec<_>>(), Vec::<&String>::new());
    let sealed = root.get(&Keyspace::default().user_data(honest.node, web)).await?.0.context("sealed")?;
    ensure!(sealed.value.starts_with(b"\0sealed1"), "{sealed:?}");
    // Who may read numbers may do nothing else.
    let reader = client_as(&directory, "monitoring")?;
    for port in [2381, 8080, 18090] {
        let answer = reader.get(format!("https://127.0.0.1:{port}/metrics")).send().await?;
        ensure!(answer.status() == 200 && answer.text().await?.contains("# TYPE "), "{port}");
    }
    let providers = reader.get("https://127.0.0.1:8080/resource_providers").send().await?;
    assert_eq!(providers.status(), 401);
    let nobody = etcd_as(&directory, "monitoring").await?;
    ensure!(nobody.list("/").await.is_err() && nobody.txn(Txn::new().put("/ecompute/x", "")).await.is_err());

    // Prometheus, too, by the example that is shipped.
    fs::write(host.file("prometheus.yml"), example_on_one_host(&directory)?)?;
    let mut prometheus = Command::new("prometheus");
    prometheus.arg(format!("--config.file={}", host.file("prometheus.yml").display()));
    prometheus.arg(format!("--storage.tsdb.path={}", host.file("series").display()));
    let _prometheus = start(prometheus, &host.file("prometheus.log"))?;
    let plain = Client::builder().no_proxy().build()?;
    host.until("Prometheus reads all through TLS", async || {
        let query = plain.get("http://127.0.0.1:9090/api/v1/query?query=up").send();
        let Ok(answer) = query.await else { return false };
        let answer: Value = answer.json().await.unwrap_or_default();
        let series = answer["data"]["result"].as_array().cloned().unwrap_or_default();
        let up = |job: &str| series.iter().any(|one| one["metric"]["job"] == job && one["value"][1] == "1");
        ["ecompute", "eplacement", "etcd"].into_iter().all(up)
    })
    .await?;

    // Another's credentials, stolen.
    let thief = host.join("host2")?;
    let (keys, etcd) = (Keyspace::default(), Arc::new(thief.etcd().await?));
    for key in
        [keys.request(honest.node, web), keys.user_data(honest.node, web), keys.status(honest.node, web)]
    {
        ensure!(etcd.get(&key).await.is_err(), "{key} was read");
    }
    for prefix in ["/ecompute/requests/", "/ecompute/userdata/", "/ecompute/placement-tokens/", "/"] {
        ensure!(etcd.list(prefix).await.is_err(), "{prefix} was read");
        ensure!(etcd.watch(prefix, 1).await.is_err(), "{prefix} was watched");
    }
    for key in [
        keys.request(honest.node, web),
        keys.status(honest.node, web),
        keys.node(honest.node),
        keys.alive(honest.node),
        keys.agent(honest.node),
        keys.instance(web),
        format!("/ecompute/placement/consumers/{web}"),
        "/ecompute/placement-tokens/x".into(),
    ] {
        ensure!(etcd.txn(Txn::new().put(&key, "{}")).await.is_err(), "{key} was written");
        ensure!(etcd.txn(Txn::new().delete(&key)).await.is_err(), "{key} was deleted");
    }
    // Nor is anything told of another node at its port, with a ticket or without, nor of the cluster in numbers.
    for (place, name) in [(&thief.place, "node"), (&directory, "eplacement"), (&directory, "etcd")] {
        let curious = client_as(place, name)?;
        for (port, path, wanted) in [
            (18090, "healthz", 200),
            (18090, "readyz", 200),
            (18090, "metrics", 403),
            (18090, "view", 403),
            (18090, "usage", 403),
            (18090, "streams/ticket", 403),
            (8080, "healthz", 200),
            (8080, "readyz", 200),
            (8080, "metrics", 403),
        ] {
            let answer = curious.get(format!("https://127.0.0.1:{port}/{path}")).send().await?;
            let (status, text) = (answer.status(), answer.text().await?);
            ensure!(
                status == wanted && (wanted == 200 || !text.contains(&web.to_string())),
                "{port}, {path}: {text}"
            );
        }
    }
    for (place, name) in [(&honest.place, "node"), (&directory, "root"), (&directory, "econtroller")] {
        let reader = client_as(place, name)?;
        let view = reader.get("https://127.0.0.1:18090/view").send().await?.text().await?;
        ensure!(view.contains(&web.to_string()), "{name}: {view}");
    }
    ensure!(etcd.enable_auth().await.is_err() && etcd.drop_user("ecompute-control").await.is_err());
    // Its own is its own; rights that another release knew otherwise come with `cluster init`.
    let role = format!("ecompute-{}", thief.node);
    root.ensure_role(&role, &[]).await?;
    ensure!(etcd.txn(Txn::new().put(keys.status(thief.node, web), "{}")).await.is_err());
    host.administered(&["cluster", "init"])?;
    etcd.txn(Txn::new().put(keys.status(thief.node, web), "{}")).await?;
    etcd.txn(Txn::new().delete(keys.status(thief.node, web))).await?;

    let provider = |node: NodeId| format!("/resource_providers/{node}");
    let (own, others) = (provider(thief.node), provider(honest.node));
    let (made, _) = thief
        .ask(Method::POST, "/resource_providers", Some(json!({"uuid": thief.node, "name": "host2"})))
        .await?;
    assert_eq!(made, 200, "its own provider is its own");
    let inventory = json!({"resource_provider_generation": 0, "inventories": {"VCPU": {"total": 4}}});
    let (set, _) = thief.ask(Method::PUT, &format!("{own}/inventories"), Some(inventory)).await?;
    assert_eq!(set, 200, "its own inventory, too");
    let claim = |of: &[NodeId]| {
        let allocations: serde_json::Map<_, _> =
            of.iter().map(|node| (node.to_string(), json!({"resources": {"VCPU": 1}}))).collect();
        json!({"allocations": allocations, "project_id": "p", "user_id": "u", "consumer_generation": null,
            "consumer_type": "INSTANCE"})
    };
    let mine = InstanceId::new(uuid::Uuid::new_v4());
    assert_eq!(thief.allocate(mine, &claim(&[thief.node])).await?, 204, "and what is used of it");
    let new = InstanceId::new(uuid::Uuid::new_v4());
    // What it has and what is used of it change at once.
    let reshape = |of: NodeId, generation: &Value, consumer: InstanceId, used: &[NodeId]| {
        let inventory =
            json!({"resource_provider_generation": generation, "inventories": {"VCPU": {"total": 4}}});
        json!({"inventories": {of.to_string(): inventory}, "allocations": {consumer.to_string(): claim(used)}})
    };
    let (_, provided) = thief.ask(Method::GET, &own, None).await?;
    let at_once =
        reshape(thief.node, &provided["generation"], InstanceId::new(uuid::Uuid::new_v4()), &[thief.node]);
    assert_eq!(thief.ask(Method::POST, "/reshaper", Some(at_once)).await?.0, 204, "as its own");
    let (_, provided) = thief.ask(Method::GET, &own, None).await?;
    let own_generation = &provided["generation"];
    let (_, provided) = thief.ask(Method::GET, &others, None).await?;
    let generation = &provided["generation"];
    let set = |what: &str, value: Value| {
        (
            Method::PUT,
            format!("{others}/{what}"),
            json!({"resource_provider_generation": generation, what: value}),
        )
    };
    for (method, path, body) in [
        set("inventories", json!({})),
        set("traits", json!(["COMPUTE_STATUS_DISABLED"])),
        set("aggregates", json!([mine])),
        (Method::PUT, others.clone(), json!({"name": "stolen"})),
        (Method::DELETE, others.clone(), Value::Null),
        (Method::DELETE, format!("{others}/inventories"), Value::Null),
        (Method::DELETE, format!("/allocations/{web}"), Value::Null),
        (Method::PUT, format!("/allocations/{web}"), claim(&[thief.node])),
        (Method::PUT, format!("/allocations/{mine}"), claim(&[thief.node, honest.node])),
        (Method::POST, "/resource_providers".into(), json!({"name": "third"})),
        (Method::POST, "/resource_classes".into(), json!({"name": "CUSTOM_MINE"})),
        (Method::POST, "/reshaper".into(), reshape(honest.node, generation, new, &[thief.node])),
        (Method::POST, "/reshaper".into(), reshape(thief.node, own_generation, new, &[honest.node])),
        (Method::POST, "/reshaper".into(), reshape(thief.node, own_generation, web, &[thief.node])),
        (
            Method::PUT,
            format!("{own}/aggregates"),
            json!({"resource_provider_generation": own_generation, "aggregates": [mine]}),
        ),
    ] {
        let (status, document) =
            thief.ask(method.clone(), &path, Some(body).filter(|body| !body.is_null())).await?;
        ensure!(status == 403, "{method} {path} is answered {status}: {document}");
    }

    // Thrown out, at once; the others go on. What it watched before it goes on hearing of until etcd is started anew, as the
    // command says, so that nothing may be written for it any more.
    let started =
        json!({"node": thief.node, "name": "host2", "created_at": "2026-01-01T00:00:00Z", "version": 1});
    let sign = Txn::new().put(keys.node(thief.node), started.to_string());
    etcd.txn(sign.put(keys.alive(thief.node), "{}").put(keys.agent(thief.node), "")).await?;
    let (_, now) = etcd.get(&keys.node(thief.node)).await?;
    let mut watched = etcd.watch(&keys.node(thief.node), now + 1).await?;
    let revoked = host.administer(&["node", "revoke", "host2"])?;
    ensure!(revoked.status.success(), "{revoked:?}");
    let said = String::from_utf8(revoked.stderr)?;
    ensure!(said.contains("start etcd anew") && said.contains("revoked.crl has its certificate"), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
    let heard = tokio::time::timeout(Duration::from_secs(10), watched.next()).await;
    ensure!(matches!(heard, Ok(Ok(_))), "docs/cluster.md tells that it goes on: {heard:?}");
    for key in [keys.alive(thief.node), keys.agent(thief.node)] {
        ensure!(root.get(&key).await?.0.is_none(), "{key} is there");
    }
    let marked: Value =
        serde_json::from_slice(&root.get(&keys.node(thief.node)).await?.0.context("gone")?.value)?;
    assert_eq!(marked["revoked"], true, "{marked}");
    host.refused(&["node", "revoke", "host2"], 1, "there is no node")?;
    // Who may not take away what only agents write is told who may.
    let config = host.file("cluster/schedule.yaml");
    let denied = Command::new(program("eschedule"))
        .arg("--config")
        .arg(config)
        .args(["node", "forget", "host2"])
        .output()?;
    let said = String::from_utf8(denied.stderr)?;
    ensure!(denied.status.code() == Some(1) && said.contains("by the administrator alone"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    // What is left of it but the mark is forgotten by its name, through the cluster's own TLS and token; again, too.
    for _ in 0..2 {
        let forgotten = host.administer(&["node", "forget", "host2", "-o", "json"])?;
        let said = String::from_utf8(forgotten.stderr)?;
        ensure!(forgotten.status.success() && said.contains("stays marked as revoked"), "{said}");
        let told: Value = serde_json::from_slice(&forgotten.stdout)?;
        assert_eq!((&told["deleted"], &told["state"]), (&json!("host2"), &json!("DELETED")), "{told}");
        ensure!(told["request_id"].is_string(), "{told}");
    }
    ensure!(root.get(&keys.node(thief.node)).await?.0.is_some(), "the mark stays");
    let (status, document) = honest.ask(Method::GET, &own, None).await?;
    ensure!(status == 404, "its provider is gone: {status} {document}");
    host.refused(&["node", "forget", "host1"], 1, "its agent is alive")?;
    let late = etcd.txn(Txn::new().put(keys.status(thief.node, web), "{}")).await;
    ensure!(late.is_err(), "a connection that was open before lets in no more");
    ensure!(thief.etcd().await?.get(&keys.node(thief.node)).await.is_err());
    ensure!(!opens(&thief.place, "node")? && opens(&directory, "monitoring")?);
    host.until("its token lets in no more", async || {
        thief.ask(Method::GET, &own, None).await.is_ok_and(|(status, _)| status == 401)
    })
    .await?;
    assert_eq!(host.administered(&["-o", "name", "node", "list"])?, "host1\n");

    // New credentials in the place of the old ones; the guest is there throughout, and nothing is started anew.
    let files = [
        (8080, directory.join("eplacement.pem")),
        (2379, directory.join("etcd.pem")),
        (18090, honest.place.join("node.pem")),
    ];
    host.administered(&["cluster", "renew"])?;
    ensure!(!host.administered(&["cluster", "init"])?.contains("made "), "a renewed cluster is whole");
    let bundle = host.file("host1-again.bundle").display().to_string();
    // Whatever it is called by: the old token is good no more.
    host.administered(&["node", "add", "HOST1", "--again", "--host", "127.0.0.1", "--out", &bundle])?;
    assert_eq!(host.administered(&["-o", "name", "node", "list"])?, "HOST1\n");
    let joined = Command::new(program("ecompute"))
        .args(["join", &bundle, "--directory"])
        .arg(&honest.place)
        .output()?;
    ensure!(joined.status.success(), "{joined:?}");
    host.until("placement takes its new token", async || {
        honest.ask(Method::GET, &others, None).await.is_ok_and(|(status, _)| status == 200)
    })
    .await?;
    for (port, file) in files {
        let written = CertificateDer::from_pem_file(&file)?;
        host.until("what is served was made just now", async || {
            // etcd has no such page for this user; a connection is all that is asked for.
            honest.served(port).await.is_ok_and(|served| served == *written)
        })
        .await?;
    }
    let client = client_as(&directory, "monitoring")?;
    let metrics = client.get("https://127.0.0.1:18090/metrics").send().await?.text().await?;
    let placement = client.get("https://127.0.0.1:8080/metrics").send().await?.text().await?;
    for (text, name, file) in [
        (&metrics, "ecompute", honest.place.join("node.pem")),
        (&metrics, "ecompute", honest.place.join("ca.pem")),
        (&placement, "eplacement", directory.join("eplacement.pem")),
    ] {
        let line = format!("{name}_certificate_not_after_timestamp_seconds{{file=\"{}\"}}", file.display());
        ensure!(text.contains(&line), "{line}: {text}");
    }
    fs::rename(directory.join("root.pem"), directory.join("root.away"))?;
    host.refused(&["cluster", "renew"], 1, "makes what is missing")?;
    fs::rename(directory.join("root.away"), directory.join("root.pem"))?;
    // All of it is backed up and put back, while the agent and eplacement go on running.
    let (backup, restored) = (host.file("cluster.tar"), host.file("restored"));
    let [backup, restored] = [backup, restored].map(|path| path.display().to_string());
    host.administered(&["cluster", "backup", &backup])?;
    host.administered(&["cluster", "backup", &backup, "--verify"])?;
    host.scheduled(&["rename", "web", "later"])?;
    host.administered(&["cluster", "restore", &backup, "--data-dir", &restored])?;
    drop(running_etcd);
    fs::remove_dir_all(host.file("etcd"))?;
    fs::rename(&restored, host.file("etcd"))?;
    let _etcd = host.start_etcd()?;
    while tokio::time::timeout(Duration::from_secs(60), watched.next()).await?.is_ok() {}
    host.until("it is as the backup says", async || {
        host.scheduled(&["list", "-o", "name"]).is_ok_and(|names| names == "web\n")
    })
    .await?;
    host.until("nothing is to be healed", async || {
        host.scheduled(&["heal", "--yes", "-o", "json"]).is_ok_and(|none| none.trim() == "[]")
    })
    .await?;
    host.until("it is destroyed", async || host.scheduled(&["destroy", "--wait", "web"]).is_ok()).await?;
    host.until("nothing is claimed any more", async || {
        let asked = honest.ask(Method::GET, &format!("/allocations/{web}"), None).await;
        asked.is_ok_and(|(_, document)| document["allocations"] == json!({}))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_revoked_opens_no_connection_to_etcd() -> Result<()> {
    for binary in EtcdServer::binaries() {
        revoked_at(&binary).await.with_context(|| binary.display().to_string())?;
    }
    Ok(())
}

async fn revoked_at(binary: &Path) -> Result<()> {
    let host = Host::new()?;
    let directory = host.file("cluster");
    let (key, list) = (directory.join("ca.key"), directory.join("revoked.crl"));
    let mut etcd = host.begin(binary).await?;
    let nodes = ["host1", "host2", "host3"].map(|name| host.join(name));
    let [known, late, unknown] = &nodes.into_iter().collect::<Result<Vec<_>>>()?[..] else { bail!("three") };
    let node = |member: &Member| opens(&member.place, "node");
    ensure!(node(known)? && node(late)? && node(unknown)? && opens(&directory, "eschedule")?);
    // Members speak to each other, and nobody else to them.
    for (place, name, answered) in [(&directory, "etcd", true), (&known.place, "node", false)] {
        let client = builder_as(place, name)?.http1_only().build()?;
        let answer = client.get("https://127.0.0.1:2380/members").send().await;
        assert_eq!(answer.is_ok_and(|answer| answer.status() == 200), answered, "{name}");
    }

    host.administered(&["node", "revoke", "host1"])?;
    ensure!(!node(known)? && node(late)? && node(unknown)?);
    // Rights do not wait for the authority's key, and the list does.
    fs::rename(&key, host.file("ca.key"))?;
    host.refused(&["node", "revoke", "host2"], 1, "start etcd anew")?;
    assert_eq!(host.administered(&["-o", "name", "node", "list"])?, "host3\n");
    ensure!(!host.administered(&["cluster", "init"])?.contains("made ") && node(late)?);
    fs::rename(host.file("ca.key"), &key)?;
    // Said again, nobody knows the node any more, and the list has it.
    let again = host.administer(&["node", "revoke", "host2"])?;
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    ensure!(again.status.code() == Some(1) && said.contains("on etcd's list now") && !node(late)?, "{said}");
    // Of an earlier release.
    fs::remove_dir_all(directory.join("nodes"))?;
    let said = String::from_utf8(host.administer(&["node", "revoke", "host3"])?.stderr)?;
    ensure!(said.contains("is not known here") && node(unknown)?, "{said}");
    fs::copy(unknown.place.join("node.pem"), directory.join("revoked/host3.pem"))?;
    ensure!(host.administered(&["cluster", "init"])?.contains("revoked.crl") && !node(unknown)?);
    // Any other, the same way.
    let copied = host.file("copied");
    fs::create_dir(&copied)?;
    for name in ["ca.pem", "eschedule.pem", "eschedule.key"] {
        fs::copy(directory.join(name), copied.join(name))?;
    }
    // Copied before others took their place, as somebody's cron has it each month.
    host.administered(&["cluster", "renew"])?;
    ensure!(opens(&copied, "eschedule")? && opens(&directory, "eschedule")?);
    for entry in fs::read_dir(directory.join("issued"))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("it has a name")?;
        if name.starts_with("eschedule-") {
            fs::copy(&path, directory.join("revoked").join(name))?;
        }
    }
    host.administered(&["cluster", "renew"])?;
    ensure!(!opens(&copied, "eschedule")? && opens(&directory, "eschedule")?);

    // etcd takes nobody without a list; the next is whole.
    fs::remove_file(&list)?;
    ensure!(!opens(&directory, "root")?);
    host.until("the list is there again", async || host.is_secured()).await?;
    ensure!(!node(known)? && opens(&directory, "monitoring")?);
    // With the configuration of an earlier release it goes without, and that is told.
    let (file, mut lines) = (directory.join("etcd.yaml"), Vec::new());
    let text = fs::read_to_string(&file)?;
    lines.extend(text.lines().take_while(|line| !line.starts_with("ClientTLSInfo")));
    fs::write(&file, lines.join("\n"))?;
    etcd.0.kill()?;
    etcd.0.wait()?;
    let _etcd = host.start_etcd_of(binary)?;
    host.until("etcd is there", async || host.is_secured()).await?;
    ensure!(host.administered(&["cluster", "init"])?.contains("etcd does not look at"));
    ensure!(node(known)?);
    // Let in again, it is looked for where it was.
    let (uuid, out) = (known.node.to_string(), host.file("again.bundle"));
    host.administered(&["node", "add", "host1", "--uuid", &uuid, "--out", &out.display().to_string()])?;
    let bundle: Value = serde_json::from_str(&fs::read_to_string(out)?)?;
    assert_eq!(bundle["host"], "127.0.0.1");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_had_a_cloud_brings_it_along() -> Result<()> {
    let (host, other) = (Host::new()?, Host::new()?);
    let directory = host.file("cluster");
    let mut etcd = Command::new("etcd");
    etcd.arg("--data-dir").arg(host.file("old"));
    let mut old = start(etcd, &host.file("etcd.log"))?;
    let cloud = EtcdStore::connect(EtcdConfig::default()).await?;
    let put = async || cloud.txn(Txn::new().put("/ecompute/kept", "kept")).await.is_ok();
    host.until("the old etcd is there", put).await?;
    host.refused(&["cluster", "init", "127.0.0.1"], 2, "--anew begins without it")?;
    ensure!(!directory.exists());
    // One that hangs may know a cloud, too.
    let signal = |signal| kill(Pid::from_raw(old.0.id().try_into()?), signal).map_err(anyhow::Error::from);
    signal(Signal::SIGSTOP)?;
    host.refused(&["cluster", "init", "127.0.0.1"], 3, "does not say whether it knows a cloud")?;
    ensure!(!directory.exists());
    signal(Signal::SIGCONT)?;
    // Who wants none of it says so.
    other.administered(&["cluster", "init", "127.0.0.1", "--anew"])?;

    let (file, data) =
        (host.file("cloud.tar").display().to_string(), host.file("etcd").display().to_string());
    host.administered(&["cluster", "backup", &file])?;
    old.0.kill()?;
    old.0.wait()?;
    host.administered(&["cluster", "init", "127.0.0.1"])?;
    host.administered(&["cluster", "restore", &file, "--data-dir", &data])?;
    let _etcd = host.start_etcd()?;
    host.until("etcd has users", async || {
        host.administer(&["cluster", "init"]).is_ok_and(|output| output.status.success())
    })
    .await?;
    let kept = etcd_as(&directory, "root").await?.get("/ecompute/kept").await?.0.context("it came along")?;
    assert_eq!(kept.value, b"kept");
    Ok(())
}

#[test]
fn who_names_a_configuration_administers_no_other_cluster() -> Result<()> {
    let host = Host::new()?;
    fs::create_dir(host.file("cluster"))?;
    let config = host.file("elsewhere.yaml");
    fs::write(&config, "etcd: {endpoints: [\"127.0.0.1:1\"]}\n")?;
    let of = |name: &str| host.file(name).display().to_string();
    let (config, out) = (of("elsewhere.yaml"), of("cluster.tar"));
    let asked: [&[&str]; 5] = [
        &["node", "list"],
        &["node", "add", "host1"],
        &["node", "revoke", "host1"],
        &["cluster", "init", "10.0.0.1"],
        &["cluster", "renew"],
    ];
    for arguments in asked {
        for (by, variable, option) in
            [("ESCHEDULE_CONFIG", &*config, &[][..]), ("--config", "", &["--config", &*config][..])]
        {
            let say = |more: &[&str]| -> Result<String> {
                let mut command = Command::new(program("eschedule"));
                command.args(option).args(arguments).args(more).env("ESCHEDULE_CONFIG", variable);
                Ok(String::from_utf8(command.output()?.stderr)?)
            };
            let said = say(&[])?;
            ensure!(said.contains(&format!("{by} names")) && said.contains("--directory"), "{said}");
            // Who says which directory means that.
            if arguments != asked[3] {
                let said = say(&["--directory", &of("cluster")])?;
                ensure!(!said.contains(by) && said.contains("cluster init"), "{said}");
            }
        }
    }
    // Where there is no cluster of ours, a backup is of the etcd of that file.
    host.refused(&["--config", &config, "cluster", "backup", &out], 3, "127.0.0.1:1")
}

/// etcd lets nobody in whose authority is over, whatever else they have.
#[tokio::test(flavor = "multi_thread")]
async fn an_authority_that_is_over_is_renewed_and_what_it_signed_stays_good() -> Result<()> {
    let host = Host::new()?;
    let file = |name: &str| host.file("cluster").join(name);
    let etcd = host.begin(Path::new("etcd")).await?;
    let member = host.join("host1")?;
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, "etcd-compute authority");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
    params.not_after = rcgen::date_time_ymd(2025, 1, 2);
    let key = rcgen::KeyPair::from_pem(&fs::read_to_string(file("ca.key"))?)?;
    let over = params.self_signed(&key)?.pem();
    for place in [file("ca.pem"), member.place.join("ca.pem")] {
        fs::write(place, &over)?;
    }
    drop(etcd);
    let etcd = host.start_etcd()?;
    host.until("etcd refuses whoever comes", async || {
        let told = host
            .administer(&["node", "list"])
            .map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
        fs::read_to_string(host.file("etcd.log")).is_ok_and(|log| log.contains("expired"))
            && told.is_ok_and(|told| {
                told.contains("/ca.pem ran out on 2025-01-02") && told.contains("--authority")
            })
    })
    .await?;
    drop(etcd);
    let made = host.administered(&["cluster", "renew", "--authority"])?;
    assert_eq!(made, format!("made {}\n", file("ca.pem").display()));
    let _etcd = host.start_etcd()?;
    host.until("etcd lets in who was let in", async || host.administered(&["node", "list"]).is_ok()).await?;
    // Also who has the old one only: our programs ask for its key.
    member.etcd().await?.get(&Keyspace::default().agent(member.node)).await?;
    let bundle = host.file("again.bundle").display().to_string();
    host.administered(&["node", "add", "host1", "--again", "--out", &bundle])?;
    let join = Command::new(program("ecompute"))
        .args(["join", &bundle, "--directory"])
        .arg(&member.place)
        .output()?;
    let said = String::from_utf8(join.stdout)?;
    ensure!(join.status.success() && !said.contains("authority"), "{said}");
    assert_eq!(fs::read(member.place.join("ca.pem"))?, fs::read(file("ca.pem"))?);
    ensure!(opens(&member.place, "node")?);
    Ok(())
}

/// Nobody knows a node whose rights are gone, so what it was given is found by its name.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_could_not_be_revoked_is_when_it_is_said_again() -> Result<()> {
    let host = Host::new()?;
    let directory = host.file("cluster");
    let _etcd = host.begin(Path::new("etcd")).await?;
    let member = host.join("host1")?;
    ensure!(opens(&member.place, "node")?);
    let half = directory.join("nodes/host0-00.pem");
    fs::write(&half, "half")?;
    let failed = host.administer(&["node", "revoke", "host1"])?;
    let said = String::from_utf8(failed.stderr)?;
    ensure!(failed.status.code() == Some(1) && said.contains("say the same again"), "{said}");
    fs::remove_file(&half)?;
    ensure!(opens(&member.place, "node")?, "nothing is listed yet");
    let again = host.administer(&["node", "revoke", "host1"])?;
    let said = String::from_utf8(again.stderr)?;
    ensure!(said.contains("is on etcd's list now") && !opens(&member.place, "node")?, "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn rights_go_at_once_also_while_another_call_is_at_the_directory() -> Result<()> {
    let host = Host::new()?;
    let directory = host.file("cluster");
    let _etcd = host.begin(Path::new("etcd")).await?;
    let member = host.join("host1")?;
    let lock = fs::File::open(&directory)?;
    lock.lock()?;
    let mut revoke = Command::new(program("eschedule"));
    revoke.args(["node", "revoke", "host1", "--directory"]).arg(&directory);
    let mut revoke = revoke.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let gone =
        async || host.administered(&["-o", "name", "node", "list"]).is_ok_and(|nodes| nodes.is_empty());
    host.until("its rights are gone", gone).await?;
    ensure!(revoke.try_wait()?.is_none() && opens(&member.place, "node")?, "the list waits");
    drop(lock);
    let output = revoke.wait_with_output()?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(output.status.success() && said.contains("waiting for another"), "{said}");
    ensure!(!opens(&member.place, "node")?, "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_who_add_at_once_one_waits_and_takes_nothing_from_the_other() -> Result<()> {
    let host = Host::new()?;
    let directory = host.file("cluster");
    let _etcd = host.begin(Path::new("etcd")).await?;
    let (uuid, out) = (uuid::Uuid::new_v4().to_string(), host.file("one.bundle"));
    let other = host.file("other.bundle");
    let adds = |name: &str, out: &Path| {
        let mut command = Command::new(program("eschedule"));
        command.args(["node", "add", name, "--uuid", &uuid, "--out"]).arg(out);
        command.arg("--directory").arg(&directory).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn()
    };
    // As the one that came first.
    let lock = fs::File::open(&directory)?;
    lock.lock()?;
    let mut both = vec![adds("host1", &out)?, adds("host1", &out)?, adds("host2", &other)?];
    tokio::time::sleep(Duration::from_secs(3)).await;
    for add in &mut both {
        ensure!(add.try_wait()?.is_none() && !out.exists(), "it has not waited");
    }
    drop(lock);
    let ended: Vec<_> = both.into_iter().map(|add| add.wait_with_output()).collect::<Result<_, _>>()?;
    let done: Vec<_> = ended.iter().filter(|output| output.status.success()).collect();
    ensure!(done.len() == 1, "{ended:?}");
    let listed = host.administered(&["-o", "name", "node", "list"])?;
    let made = if listed == "host1\n" { &out } else { &other };
    ensure!(made.exists() && !(out.exists() && other.exists()), "{listed}: {ended:?}");
    ensure!(!directory.join("revoked").read_dir()?.any(|_| true), "nothing of it is revoked");
    let joined = Command::new(program("ecompute"))
        .arg("join")
        .arg(made)
        .arg("--directory")
        .arg(host.file("joined"))
        .output()?;
    ensure!(joined.status.success() && opens(&host.file("joined"), "node")?, "{joined:?}");
    Ok(())
}
