//! `eschedule cluster` and `eschedule node`: who belongs to a cluster, and what proves it.

mod archive;
mod backup;
mod files;

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::{
    Args, Subcommand,
    builder::{PathBufValueParser, TypedValueParser},
};
use ec_cloud::{CloudError, CloudResult, Membership, Part, ROOT, forget, node_to_forget};
use ec_model::{NodeId, RequestId, encode, input::is_hostname};
use ec_pki::{Access, Bundle, new_token};
use ec_runtime::exit::{Failure, UNREACHABLE, tell};
use ec_store::{Compare, EtcdConfig, EtcdStore, EtcdTls, Store, StoreError, Txn};
use serde::Serialize;

use self::files::Directory;
#[cfg(test)]
pub(crate) use self::{
    archive::{Document, Manifest},
    backup::{BackedUp, Restored},
};
use crate::{
    cli::Output,
    config::{Session, Settings, with_ended},
    output::{self, Deleted},
    several::Told,
};

/// Where what belongs to the cluster lies on the host that it is administered from.
const DIRECTORY: &str = "/etc/ecompute";

pub(crate) const CLUSTER: &str = "\
The first time it makes certificates and configuration files, and tells how to start etcd; again,
when etcd runs, users and roles in it, and tokens for placement. It changes nothing that is there
and may be repeated at any time.

Examples:
  eschedule cluster init 10.0.0.1 control.example
      on the host where etcd and eplacement shall run, which others reach by these two
  eschedule cluster init
      when etcd runs: from now on it lets nobody in without a certificate of this cluster
  eschedule cluster renew
      new certificates for all that runs on this host, within 398 days; by cron once a month, say
  eschedule cluster renew --authority
      the authority's own, within ten years; ca.pem then belongs on every host";

pub(crate) const NODES: &str = "\
A bundle is all that one host needs to be a node, and nothing with which it could be another:
bring it there by a way that nobody else reads (scp), say `ecompute join BUNDLE`, and delete it.

Examples:
  eschedule node add host1
      writes host1.bundle
  eschedule node add host1 --again
      the same node with new credentials: its certificate is good for 398 days
  eschedule node revoke host1
      lets it in no more, neither into etcd nor into placement, and puts its certificate on etcd's
      list of revoked ones; its guests run on. Connections that it has at that moment end when etcd
      is started anew
  eschedule node forget host1
      a host that will never come back, once `eschedule destroy` and `eschedule volume delete` were
      said of all that was there: takes away what its agent would have, in etcd and placement";

pub(crate) const BACKUPS: &str = "\
Examples:
  eschedule cluster backup /backup/cluster.tar
  eschedule cluster backup /backup/cluster.tar --verify
  eschedule cluster restore /backup/cluster.tar --data-dir /var/lib/etcd/restored
  eschedule heal          # when etcd runs with it: brings back what nodes hold and the backup lacks";

/// An etcd of this host answers in less.
const ANSWERS_IN: Duration = Duration::from_secs(2);

/// What a revoked node still has: etcd looks at rights when a watch begins and at certificates when a connection does, and never again.
const STILL_OPEN: &str = "eschedule: what it watches in etcd at this moment it goes on hearing of; to end that, start etcd anew: systemctl restart etcd";

/// What is done to the cluster.
#[derive(Subcommand)]
pub(crate) enum ClusterCommand {
    /// Make certificates, configuration, users and rights of a cluster; the first time on its first host
    #[command(after_help = CLUSTER)]
    Init {
        /// Names and addresses of this host, for others; the first is where they will look for etcd and placement
        #[arg(value_name = "HOST", value_parser = host)]
        hosts: Vec<String>,
        /// Begin with an empty etcd, also where one is there that knows a cloud
        #[arg(long)]
        anew: bool,
        #[command(flatten)]
        place: Administered,
    },
    /// Make all certificates of this host anew: they are good for 398 days, and nothing has to be started anew
    Renew {
        /// Make the authority's own certificate anew instead, which is good for ten years: all that it signed stays good. etcd is to be
        /// started anew for it, and ca.pem belongs on every host
        #[arg(long)]
        authority: bool,
        #[command(flatten)]
        place: Administered,
    },
    /// Write all that etcd holds to a file, which tells by itself whether it is whole
    ///
    /// That is all of the cluster's memory: instances, placement, users and rights; with user-data, so that the file is a secret.
    /// What our own placement knows is in it as a document, too, as `eplacement export` writes it.
    #[command(after_help = BACKUPS)]
    Backup {
        /// The file, which must not be there yet
        #[arg(value_parser = PathBufValueParser::new().try_map(file_itself))]
        file: PathBuf,
        /// Write nothing: look whether the file is a whole backup
        #[arg(long)]
        verify: bool,
        #[command(flatten)]
        place: Administered,
    },
    /// Make a data directory for etcd of a backup, and tell what is to be done with it
    ///
    /// Nothing that runs is touched by it. It needs etcdutl or etcdctl.
    #[command(after_help = BACKUPS)]
    Restore {
        /// The backup
        #[arg(value_parser = PathBufValueParser::new().try_map(file_itself))]
        file: PathBuf,
        /// The data directory to make, which must not be there yet
        #[arg(long, value_name = "DIR")]
        data_dir: PathBuf,
        /// What etcd's program shall be told of this member, for clusters of several
        #[arg(last = true, value_name = "OPTION")]
        options: Vec<String>,
        #[command(flatten)]
        place: Administered,
    },
}

/// A file, and no stream: a backup gets its name when it is whole and proved, and is looked at as a whole before it is restored.
fn file_itself(file: PathBuf) -> Result<PathBuf, &'static str> {
    if file.as_os_str() == "-" {
        return Err(
            "a backup is a file, and neither written to standard output nor read from standard input: name it",
        );
    }
    Ok(file)
}

impl ClusterCommand {
    fn place(&self) -> &Administered {
        match self {
            Self::Init { place, .. }
            | Self::Renew { place, .. }
            | Self::Backup { place, .. }
            | Self::Restore { place, .. } => place,
        }
    }
}

/// What is done to nodes.
#[derive(Subcommand)]
pub(crate) enum NodeCommand {
    /// Make the bundle with which a host joins the cluster
    Add {
        /// The node's name: letters, digits, - and .
        #[arg(value_parser = host)]
        name: String,
        /// By what others reach the host, for consoles and readings; may be given more than once [default: what the node's last bundle
        /// had, or NAME]
        #[arg(long = "host", value_name = "HOST", value_parser = host)]
        hosts: Vec<String>,
        /// The uuid of a node that is there already [default: a new one]
        #[arg(long, value_name = "UUID")]
        uuid: Option<NodeId>,
        /// Give a node that was added before new credentials
        #[arg(long, conflicts_with = "uuid")]
        again: bool,
        /// Where the bundle is written to, which must not be there yet [default: NAME.bundle]
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        #[command(flatten)]
        place: Administered,
    },
    /// List the nodes that were added
    List {
        #[command(flatten)]
        place: Administered,
    },
    /// Let a node in no more
    Revoke {
        /// Its name
        // Not NODE: completions would offer those of the cluster that ESCHEDULE_CONFIG names.
        name: String,
        #[command(flatten)]
        place: Administered,
    },
    /// Forget nodes that will never come back and of which nothing is wanted any more
    ///
    /// Refused where a node's agent is alive, or an instance or a volume is to be there: only its user ends one. Where etcd asks who
    /// somebody is, this is for the administrator. Without a cluster that `cluster init` made, it is for whoever schedule.yaml says.
    Forget {
        /// By name or uuid
        #[arg(value_name = "NODE", required = true)]
        nodes: Vec<String>,
        #[command(flatten)]
        place: Administered,
    },
}

impl NodeCommand {
    fn place(&self) -> &Administered {
        match self {
            Self::Add { place, .. }
            | Self::List { place }
            | Self::Revoke { place, .. }
            | Self::Forget { place, .. } => place,
        }
    }
}

/// From where.
#[derive(Args)]
pub(crate) struct Administered {
    /// Where the cluster's authority, certificates and configuration lie [default: /etc/ecompute]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

/// The configuration's file that was named, and by what.
type Named = (&'static str, PathBuf);

impl Administered {
    fn directory(&self) -> &Path {
        self.directory.as_deref().unwrap_or(Path::new(DIRECTORY))
    }

    /// The same, unless somebody named a configuration, and means the cluster of that: something would be done to another.
    fn meant(&self, config: Option<&Named>) -> Result<&Path, Failure> {
        let directory = self.directory();
        match config {
            Some((by, file)) if self.directory.is_none() && !lies_in(directory, file) => {
                Err(Failure::usage(format!(
                    "{by} names {}, and this would be done to the cluster in {DIRECTORY}: say by --directory which is meant",
                    file.display()
                )))
            }
            _ => Ok(directory),
        }
    }
}

/// Whether a file, which may not be there yet, is one of the directory's.
fn lies_in(directory: &Path, file: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    matches!((real(directory), real(file)), (Ok(directory), Ok(file)) if file.starts_with(&directory))
}

fn host(text: &str) -> Result<String, String> {
    let address = text.parse::<std::net::IpAddr>().is_ok();
    if address || is_hostname(text) {
        return Ok(text.to_owned());
    }
    Err("wanted a host's name or an address, without a port".into())
}

/// What came of `cluster init` and `cluster renew`.
#[derive(Serialize)]
pub(crate) struct Initialised {
    /// Where the files lie.
    pub(crate) directory: PathBuf,
    /// What was made by this call.
    pub(crate) made: Vec<String>,
    /// Of `init`: whether etcd has its users and rights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) secured: Option<bool>,
}

/// A node that belongs to the cluster.
#[derive(Serialize)]
pub(crate) struct Added {
    /// Its name.
    pub(crate) name: String,
    /// Its uuid.
    pub(crate) node: NodeId,
    /// Its bundle, where one was made now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bundle: Option<PathBuf>,
}

/// Does what was asked for.
pub(crate) async fn cluster(
    command: ClusterCommand,
    config: Option<&Named>,
    output: Output,
) -> Result<(), Failure> {
    let files = Directory::new(command.place().directory());
    let done = on_cluster(command, config, output).await;
    done.map_err(|failure| with_ended(failure, &files.ended()))
}

async fn on_cluster(command: ClusterCommand, config: Option<&Named>, output: Output) -> Result<(), Failure> {
    match command {
        ClusterCommand::Init { hosts, anew, place } => init(place.meant(config)?, &hosts, anew, output).await,
        ClusterCommand::Renew { authority, place } => {
            let files = Directory::new(place.meant(config)?);
            files.expect()?;
            let made_anew = if authority { files.renew_authority()? } else { files.renew()? };
            if authority {
                tell(
                    "eschedule: next, start etcd anew (systemctl restart etcd), and bring ca.pem to every host: programs there take it by \
                     themselves",
                );
            }
            let done = Initialised { directory: files.path().to_owned(), made: made_anew, secured: None };
            tell_ending(&files)?;
            output.print(&done, || done.made.clone(), || made(&files, &done.made).join("\n"))
        }
        ClusterCommand::Backup { file, verify: true, .. } => backup::verify(&file, output),
        ClusterCommand::Backup { file, place, .. } => {
            // Where there is no cluster of ours, etcd is asked as that says.
            if Directory::new(place.directory()).expect().is_ok() {
                place.meant(config)?;
            }
            let config = config.map(|(_, file)| file.as_path());
            backup::backup(place.directory(), config, &file, output).await
        }
        ClusterCommand::Restore { file, data_dir, options, place } => {
            backup::restore(place.directory(), &file, &data_dir, &options, output).await
        }
    }
}

/// Does what was asked for.
pub(crate) async fn node(
    command: NodeCommand,
    config: Option<&Named>,
    request_id: Option<RequestId>,
    output: Output,
) -> Result<(), Failure> {
    let files = Directory::new(command.place().directory());
    let done = on_nodes(command, config, request_id, output).await;
    done.map_err(|failure| with_ended(failure, &files.ended()))
}

async fn on_nodes(
    command: NodeCommand,
    config: Option<&Named>,
    request_id: Option<RequestId>,
    output: Output,
) -> Result<(), Failure> {
    match command {
        NodeCommand::Add { name, hosts, uuid, again, out, place } => {
            let out = out.unwrap_or_else(|| PathBuf::from(format!("{name}.bundle")));
            let cluster = Cluster::open(place.meant(config)?).await?;
            let node = cluster.add(name, hosts, uuid, again, &out).await?;
            let line = format!("{}  {}  {}", node.name, node.node, out.display());
            output.print(&node, || vec![node.name.clone()], || line)
        }
        NodeCommand::List { place } => {
            let cluster = Cluster::open(place.meant(config)?).await?;
            let nodes = cluster.membership.nodes().await?;
            let revoked = cluster.files.revoked_users()?;
            for (name, _) in nodes.iter().filter(|(_, node)| revoked.contains(&Part::Node(*node).role())) {
                tell(&format!(
                    "eschedule: node {name} is let in, though its certificates are revoked, as where etcd was put back: \
                     `eschedule node revoke {name}` ends that, `eschedule node add {name} --again` gives it new ones"
                ));
            }
            tell_ending(&cluster.files)?;
            let nodes: Vec<_> =
                nodes.into_iter().map(|(name, node)| Added { name, node, bundle: None }).collect();
            output::members(output, &nodes)
        }
        NodeCommand::Revoke { name, place } => {
            Cluster::open(place.meant(config)?).await?.revoke(&name, output).await
        }
        NodeCommand::Forget { nodes, place } => {
            let files = Directory::new(place.directory());
            files.refuse_lost()?;
            // Where nobody says that there is a cluster of ours, and there is none, etcd asks nobody who they are, or for a password.
            let (settings, membership) = if place.directory.is_none() && files.expect().is_err() {
                (Settings::load(config.map(|(_, file)| file.as_path()))?, None)
            } else {
                let cluster = Cluster::open(place.meant(config)?).await?;
                (cluster.settings, Some(cluster.membership))
            };
            let session = Session::open(Settings { request_id, ..settings }).await?;
            forget_each(&session, membership.as_ref(), &nodes, output).await
        }
    }
}

/// Forgets each. One that is refused does not keep the others from being forgotten.
async fn forget_each(
    session: &Session,
    membership: Option<&Membership>,
    nodes: &[String],
    output: Output,
) -> Result<(), Failure> {
    let of_failed = |word: &str, _, why: &str| Deleted::failed(&session.cloud, word, why);
    let mut told = Told::new(output, nodes.len() == 1, &of_failed);
    let mut said = HashSet::new();
    for word in nodes.iter().filter(|word| said.insert(*word)) {
        match forget_one(session, membership, word).await {
            Ok(()) => told.tell(Deleted::one(&session.cloud, "NODE", word, "DELETED")),
            Err(error) => told.fail(word, &session.failed(error)),
        }
    }
    told.end()
}

async fn forget_one(session: &Session, membership: Option<&Membership>, word: &str) -> CloudResult<()> {
    let node = node_to_forget(&session.cloud, word).await?;
    let members = match membership {
        Some(membership) => membership.nodes().await?,
        None => Vec::new(),
    };
    forget(&session.cloud, node).await?;
    for (name, _) in members.iter().filter(|(_, member)| *member == node) {
        tell(&format!(
            "eschedule: node {name} is still let in, should it come back: `eschedule node revoke {name}` ends that"
        ));
    }
    Ok(())
}

async fn init(directory: &Path, hosts: &[String], anew: bool, output: Output) -> Result<(), Failure> {
    let files = Directory::new(directory);
    // Who names no host is told so.
    if !anew && !hosts.is_empty() && !files.authority().exists() {
        refuse_left_behind(&files).await?;
    }
    let made = files.complete(hosts)?;
    if let Some(unfit) = files.unfit()? {
        self::made(&files, &made).iter().for_each(|line| tell(&format!("eschedule: {line}")));
        return Err(Failure::failed(unfit));
    }
    if let Some(unnamed) = files.unnamed(hosts) {
        tell(&format!("eschedule: {unnamed}"));
    }
    let Cluster { membership, settings, .. } = Cluster::open(directory).await?;
    let moved = files.moved(hosts, &settings.etcd.endpoints);
    let tokens = [files.token("eschedule")?, files.token("econtroller")?];
    let secured = match membership.settle(&[("eschedule", &tokens[0]), ("econtroller", &tokens[1])]).await {
        Ok(()) => true,
        // It runs, perhaps, and is looked for elsewhere.
        Err(error) if error.kind() == ec_cloud::Kind::Unreachable && moved.is_some() => {
            self::made(&files, &made).iter().for_each(|line| tell(&format!("eschedule: {line}")));
            let failure = Failure::from(error);
            return Err(Failure { message: moved.unwrap_or_default(), ..failure });
        }
        // That is how it begins.
        Err(error) if error.kind() == ec_cloud::Kind::Unreachable && !made.is_empty() => false,
        Err(error) => {
            let mut failure = Failure::from(error);
            // What is refused for that runs.
            if failure.code == UNREACHABLE && files.ended().is_empty() {
                failure.message = format!("{}; start it: {}", failure.message, files.start_etcd());
            }
            return Err(failure);
        }
    };
    moved.iter().for_each(|moved| tell(&format!("eschedule: {moved}")));
    tell_ending(&files)?;
    let done = Initialised { directory: files.path().to_owned(), made, secured: Some(secured) };
    output.print(&done, || done.made.clone(), || told(&files, &done))
}

/// Tells of the authority, and of nodes, whose certificates end: a node that nobody looks at is one day let in no more.
fn tell_ending(files: &Directory) -> Result<(), Failure> {
    files.ending()?.iter().for_each(|line| tell(&format!("eschedule: {line}")));
    Ok(())
}

/// Refuses to begin a cluster, whose etcd is its own, beside an etcd that knows a cloud: that would be forgotten without a word.
async fn refuse_left_behind(files: &Directory) -> Result<(), Failure> {
    let file = files.schedule();
    // Of a file that is wrong another refusal tells.
    let Ok(settings) = Settings::load(file.exists().then_some(file.as_path())) else { return Ok(()) };
    let (etcd, root) = (settings.etcd, settings.keys.root().to_owned());
    if etcd.tls.is_some() {
        return Ok(());
    }
    for at in &etcd.endpoints {
        // Each by itself: of several the last one's answer would stand for all.
        let one = EtcdConfig { endpoints: vec![at.clone()], timeout: ANSWERS_IN, ..etcd.clone() };
        let nothing = Txn::new().when(Compare::NoneUnder(format!("{root}/")));
        let asked = one.clone();
        let knows_none = async { Ok(EtcdStore::connect(asked).await?.txn(nothing).await?.succeeded) };
        match knows_none.await {
            Ok(true) => {}
            Ok(false) => {
                return Err(Failure::usage(format!(
                    "etcd at {at} has keys below {root}, of a cloud that the etcd of a cluster made here would not know: docs/cluster.md \
                     (\"A host that had a cloud already\") says how it comes along; --anew begins without it"
                )));
            }
            Err(_) if one.is_nobody().await => {}
            Err(error) => return Err(unsaid(at, error)),
        }
    }
    Ok(())
}

/// What is told where an etcd may know a cloud and does not say so, by what helps.
fn unsaid(at: &str, error: StoreError) -> Failure {
    let transient = error.is_transient();
    let why = Failure::from(error);
    let what = if transient {
        "try again, or, where what listens there is no etcd of a cloud of yours, say --anew, which begins without asking it"
    } else {
        "that is its answer, and stays it: where it is of a cloud of yours, have schedule.yaml say who may ask it; where it is somebody \
         else's, --anew begins without asking it"
    };
    let message = format!("etcd at {at} does not say whether it knows a cloud ({}): {what}", why.message);
    Failure { message, ..why }
}

fn made(files: &Directory, names: &[String]) -> Vec<String> {
    names.iter().map(|name| format!("made {}", files.path().join(name).display())).collect()
}

/// What was made, and what is to be done next.
fn told(files: &Directory, done: &Initialised) -> String {
    let mut lines = made(files, &done.made);
    if done.secured == Some(true) {
        lines.push(
            "etcd lets in only who has a certificate of this cluster, each part with its rights".into(),
        );
        lines.push(format!("next: {}", files.start_control()));
        lines.push("then, for each host: eschedule node add NAME".into());
        lines.extend(files.list_is_ignored().then(|| ignored(files)));
        lines.extend((!files.seals()).then(|| {
            format!(
                "user-data lies in etcd as it is, since {} names no key that it is sealed with: docs/security.md says how it does",
                files.schedule().display()
            )
        }));
    } else {
        lines.push(format!("next, start etcd: {}", files.start_etcd()));
        lines.push(format!("then again, for users and rights in it: {}", files.again()));
    }
    lines.join("\n")
}

/// Where the list of revoked certificates is of no use.
fn ignored(files: &Directory) -> String {
    format!(
        "etcd does not look at {}, as {} is: docs/cluster.md says how it does",
        files.revoked_list().display(),
        files.etcd().display()
    )
}

/// A cluster as its administrator has it.
struct Cluster {
    files: Directory,
    settings: Settings,
    store: Arc<EtcdStore>,
    membership: Membership,
}

impl Cluster {
    async fn open(directory: &Path) -> Result<Self, Failure> {
        let files = Directory::new(directory);
        files.expect()?;
        files.expect_made("schedule.yaml")?;
        let mut settings = Settings::load(Some(&files.schedule()))?;
        let client = Some(files.pair(ROOT));
        settings.etcd = EtcdConfig {
            user: None,
            password: None,
            tls: Some(EtcdTls { ca_cert: files.authority(), client }),
            ..settings.etcd
        };
        let store = Arc::new(EtcdStore::connect(settings.etcd.clone()).await?);
        let membership = Membership::new(store.clone(), settings.keys.clone());
        Ok(Self { files, settings, store, membership })
    }

    async fn add(
        &self,
        name: String,
        mut hosts: Vec<String>,
        uuid: Option<NodeId>,
        again: bool,
        out: &Path,
    ) -> Result<Added, Failure> {
        // Of two at once the second finds what the first made, and neither takes the other's for left behind.
        let _lock = self.files.lock()?;
        let taken = || {
            let out = out.display();
            Failure::usage(format!("{out} is there already: move it away, or name another --out"))
        };
        if out.exists() {
            return Err(taken());
        }
        let node = match (self.membership.node(&name).await?, again) {
            (Some(node), true) => node,
            (None, false) => uuid.unwrap_or_else(|| NodeId::new(uuid::Uuid::new_v4())),
            (Some(node), false) => {
                return Err(Failure::failed(format!(
                    "node `{name}` was added before, with uuid {node}: say --again for new credentials"
                )));
            }
            (None, true) => {
                return Err(Failure::failed(format!("node `{name}` was not added yet: leave --again out")));
            }
        };
        // Its own credentials would go with these, and its agent with them.
        if let Some((other, _)) =
            self.membership.nodes().await?.into_iter().find(|(_, known)| !again && *known == node)
        {
            return Err(Failure::failed(format!(
                "{node} is node `{other}`: `node add {other} --again` gives it new credentials, or `node revoke {other}` first"
            )));
        }
        // Before anything is written: it may be kept elsewhere.
        let authority = self.files.read_authority()?;
        let user = Part::Node(node).role();
        if hosts.is_empty() {
            hosts = self.files.hosts_given(&user)?;
        }
        if hosts.is_empty() {
            hosts.push(name.clone());
        }
        if !again {
            // Nobody knows it, so what it had once is of a node that was revoked, perhaps by a call that was killed.
            self.files.revoke_given(&user)?;
            self.files.list_revoked()?;
        }
        let issued = authority.issue(&user, &hosts).map_err(wrong)?;
        self.files.keep_given(&name, &issued.certificate)?;
        let bundle = Bundle {
            name: name.clone(),
            node,
            host: hosts.swap_remove(0),
            etcd: self.settings.etcd.endpoints.clone(),
            prefix: self.settings.keys.root().to_owned(),
            placement: self.settings.placement.endpoint.clone(),
            authority: self.files.read(&self.files.authority())?,
            certificate: issued.certificate,
            key: issued.key,
            token: new_token(),
            user_data_key: self.files.user_data_key()?,
        };
        // First the file: what it lets in is of no use to anybody while nobody has it, and cannot be made again.
        // Never in the place of another: that may be the bundle of another node.
        ec_pki::write_new(out, encode(&bundle), Access::Secret).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => taken(),
            _ => Failure::failed(format!("failed to write {}: {error}", out.display())),
        })?;
        if let Err(error) = self.membership.add_node(&name, node, &bundle.token).await {
            // Its old token is the last that goes, and may be gone by now.
            if again && !matches!(error, CloudError::Busy(_)) {
                tell(&format!(
                    "eschedule: {} is kept, which may be all that lets the node in now: say the same with another --out, and use \
                     what that makes; where it cannot be made, use this",
                    out.display()
                ));
            } else if std::fs::remove_file(out).is_err() {
                tell(&format!("eschedule: {} is of no use: delete it", out.display()));
            }
            return Err(error.into());
        }
        Ok(Added { name, node, bundle: Some(out.to_owned()) })
    }

    async fn revoke(&self, name: &str, output: Output) -> Result<(), Failure> {
        // What another call moves away while this one reads it would be read as damaged. But rights do not wait for that call.
        let lock = self.files.try_lock()?;
        let node = self.membership.node(name).await?;
        // First what a call that is killed after its rights went could not find any more; but those do not wait for it.
        let revoke = || node.map_or(Ok(0), |node| self.files.revoke_given(&Part::Node(node).role()));
        if lock.is_some() {
            // What fails is tried once more, and told then.
            revoke().ok();
        }
        let mut outcome = self.membership.revoke_node(name).await;
        let _lock = match lock {
            Some(lock) => lock,
            None => {
                if outcome.is_ok() {
                    tell(&format!(
                        "eschedule: the rights of node {name} are gone; its certificate has yet to come to etcd's list"
                    ));
                }
                let lock = self.files.lock()?;
                // Who had it may have given the node others at this moment.
                if outcome.is_ok() && self.membership.node(name).await? == node {
                    outcome = self.membership.revoke_node(name).await;
                }
                lock
            }
        };
        if let Err(error) = outcome {
            // A call that was killed, or failed, may have come so far that nobody knows the node, and not to the list.
            if matches!(error, CloudError::NotFound(_)) {
                let nodes = self.membership.nodes().await?.into_iter();
                let users = nodes.map(|(_, node)| Part::Node(node).role()).collect();
                self.files.revoke_left(name, &users)?;
                if self.files.list_revoked()?.is_some() {
                    tell("eschedule: what was revoked before is on etcd's list now");
                }
            }
            return Err(error.into());
        }
        // Once more: it may have been given another at this moment, from another host.
        let known = revoke();
        tell(STILL_OPEN);
        let listed = known.and_then(|known| self.files.list_revoked().map(|_| known));
        let known = listed.map_err(|failure| {
            Failure::failed(format!(
                "the rights of node {name} are gone, but etcd's list does not have its certificate: {}; then say the same again",
                failure.message
            ))
        })?;
        let list = self.files.revoked_list();
        tell(&match known {
            0 => format!(
                "eschedule: it was added by an earlier release, and its certificate is not known here: put that into {}, \
                 if you have it, and say `{}`",
                self.files.revoked().display(),
                self.files.again()
            ),
            _ => format!(
                "eschedule: {} has its certificate now: bring that file to the other members of etcd, if there are any",
                list.display()
            ),
        });
        if self.files.list_is_ignored() {
            tell(&format!("eschedule: {}", ignored(&self.files)));
        }
        // Last: where nobody reads it, all is done.
        output::deleted(output, "the rights of node", name)
    }
}

fn wrong(error: ec_pki::PkiError) -> Failure {
    Failure::usage(ec_runtime::exit::chain(&error))
}

#[cfg(test)]
mod tests {
    use ec_runtime::exit::FAILED;

    use super::*;

    #[test]
    fn a_backup_is_a_file_and_no_stream() {
        use clap::Parser;
        let parsed =
            |words: &[&str]| crate::cli::Cli::try_parse_from([&["eschedule", "cluster"], words].concat());
        for words in
            [&["backup", "-"][..], &["backup", "-", "--verify"], &["restore", "-", "--data-dir", "d"]]
        {
            let refused = parsed(words).err().unwrap().to_string();
            assert!(refused.contains("a backup is a file"), "{refused}");
        }
        assert!(parsed(&["backup", "./-"]).is_ok());
    }

    #[test]
    fn only_what_may_answer_later_is_to_be_tried_again() {
        let away = StoreError::Unreachable { endpoints: "x".into(), detail: "no answer".into() };
        for error in [away, StoreError::Unknown("it broke".into())] {
            let failure = unsaid("h:1", error);
            assert_eq!(failure.code, UNREACHABLE);
            assert!(
                failure.message.contains("try again") && failure.message.contains("--anew"),
                "{failure:?}"
            );
        }
        // An etcd with users, and nobody of them asks.
        let failure = unsaid("h:1", StoreError::Refused("etcdserver: user name is empty".into()));
        assert_eq!(failure.code, FAILED);
        let told =
            ["h:1", "user name is empty", "--anew"].iter().all(|words| failure.message.contains(words));
        assert!(told && !failure.message.contains("try again"), "{failure:?}");
    }
}
