//! The files of a cluster on the host that it is administered from.
//!
//! ```text
//!   ca.pem ca.key                       the authority: whoever has the key may be anybody
//!   root.pem root.key                   the administrator in etcd
//!   etcd.pem, eplacement.pem … .key     servers
//!   eschedule.pem, econtroller.pem … .key and .token
//!   user-data.key                       what user-data is sealed with in etcd
//!   monitoring.pem monitoring.key       for reading numbers: nobody in etcd, and without a token
//!   nodes/ revoked/                     certificates that nodes were given, and those that are good no more
//!   revoked.crl                         the list of the latter, at which etcd looks
//!   etcd.yaml eplacement.yaml controller.yaml schedule.yaml
//! ```
//!
//! What is there is never written again: it is completed. Configuration as it was shipped is as good as none.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use ec_cloud::ROOT;
use ec_pki::{
    Access, Authority, Certificate,
    config::{self, Found, quoted_path, served, trust},
    new_token, revoked_serials, write,
};
use ec_runtime::exit::Failure;
use nix::unistd::{Group, Uid};

use super::{DIRECTORY, wrong};

/// Ports where those who serve are looked for.
const ETCD: u16 = 2379;
const PLACEMENT: u16 = 8080;
/// The port of etcd on loopback, for its numbers.
const METRICS: u16 = 2381;
/// The groups, where packages made them, of those who serve without being root, by the secrets that they must be able to read.
const GROUPS: [(&str, &str); 5] = [
    ("etcd.key", "etcd"),
    ("eplacement.key", "ecompute"),
    ("econtroller.key", "ecompute"),
    ("econtroller.token", "ecompute"),
    ("monitoring.key", "prometheus"),
];
/// Who has a certificate on this host, and whether it serves others by this host's names.
const MEMBERS: [(&str, bool); 6] = [
    ("etcd", true),
    ("eplacement", true),
    (ROOT, false),
    ("eschedule", false),
    ("econtroller", false),
    ("monitoring", false),
];
/// Configuration as it is shipped, which says nothing but defaults.
const SHIPPED: [&str; 3] = [
    include_str!("../../../eplacement.yaml"),
    include_str!("../../../controller.yaml"),
    include_str!("../../../schedule.yaml"),
];
/// The keys that user-data is sealed with in etcd.
const USER_DATA_KEY: &str = "user-data.key";
/// Certificates that nodes were given.
const GIVEN: &str = "nodes";
/// Certificates that the programs beside the authority ever had: one that was copied is good until it is revoked, also when others
/// have taken its place.
const ISSUED: &str = "issued";
/// Certificates that are good no more, whoever put them there.
const REVOKED: &str = "revoked";
/// The list of them, for etcd.
const REVOKED_LIST: &str = "revoked.crl";
/// By these a host reaches itself.
const ITSELF: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// The directory with all of them.
pub(super) struct Directory(PathBuf);

/// The certificates in a directory, with their paths; none where there is no such directory.
fn certificates(directory: &Path) -> Result<Vec<(PathBuf, Certificate)>, Failure> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed("read", directory))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed("read", directory))?.path();
        // Half a file of somebody who was killed is none.
        if path.extension().is_some_and(|extension| extension == "pem") {
            found.push((path.clone(), Certificate::read(&path).map_err(Failure::failed)?));
        }
    }
    Ok(found)
}

fn failed(what: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let what = format!("failed to {what} {}", path.display());
    move |error| Failure::failed(format!("{what}: {error}"))
}

impl Directory {
    pub(super) fn new(path: &Path) -> Self {
        // Configuration files name others by their whole paths, wherever their reader stands.
        Self(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(super) fn authority(&self) -> PathBuf {
        self.file("ca.pem")
    }

    pub(super) fn etcd(&self) -> PathBuf {
        self.file("etcd.yaml")
    }

    pub(super) fn schedule(&self) -> PathBuf {
        self.file("schedule.yaml")
    }

    /// A certificate and its key.
    pub(super) fn pair(&self, name: &str) -> (PathBuf, PathBuf) {
        (self.file(&format!("{name}.pem")), self.file(&format!("{name}.key")))
    }

    pub(super) fn read(&self, path: &Path) -> Result<String, Failure> {
        fs::read_to_string(path).map_err(failed("read", path))
    }

    pub(super) fn token(&self, name: &str) -> Result<String, Failure> {
        Ok(self.read(&self.file(&format!("{name}.token")))?.trim().to_owned())
    }

    /// The keys that user-data is sealed with, where there are any.
    pub(super) fn user_data_key(&self) -> Result<Option<String>, Failure> {
        let path = self.file(USER_DATA_KEY);
        path.exists().then(|| self.read(&path)).transpose()
    }

    pub(super) fn read_authority(&self) -> Result<Authority, Failure> {
        Authority::read(&self.read(&self.authority())?, &self.read(&self.file("ca.key"))?).map_err(wrong)
    }

    /// How etcd is started.
    pub(super) fn start_etcd(&self) -> String {
        format!("etcd --config-file {}", self.file("etcd.yaml").display())
    }

    /// How `cluster init` is said again.
    pub(super) fn again(&self) -> String {
        let elsewhere = match self.0 == Path::new(DIRECTORY) {
            true => String::new(),
            false => format!(" --directory {}", self.0.display()),
        };
        format!("eschedule cluster init{elsewhere}")
    }

    /// How placement and the controller are started.
    pub(super) fn start_control(&self) -> String {
        format!(
            "start `eplacement --config {}` and `econtroller --config {}`",
            self.file("eplacement.yaml").display(),
            self.file("controller.yaml").display()
        )
    }

    /// Refuses where there is no cluster.
    pub(super) fn expect(&self) -> Result<(), Failure> {
        if self.authority().exists() {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "there is no cluster in {}: say `eschedule cluster init HOST`, or --directory for where it is",
            self.0.display()
        )))
    }

    /// Makes what is missing; answers what was made.
    pub(super) fn complete(&self, hosts: &[String]) -> Result<Vec<String>, Failure> {
        let mut made = Vec::new();
        let begins = !self.authority().exists();
        if begins {
            if hosts.is_empty() {
                return Err(Failure::usage(format!(
                    "there is no cluster in {} yet: name this host as others reach it, for example `eschedule \
                     cluster init 10.0.0.1`",
                    self.0.display()
                )));
            }
            self.refuse_others()?;
            fs::create_dir_all(&self.0).map_err(failed("make directory", &self.0))?;
        }
        let _lock = self.lock()?;
        // Somebody else may have begun it meanwhile.
        let begins = begins && !self.authority().exists();
        for (name, text) in hosts.first().map(|host| self.configurations(host)).into_iter().flatten() {
            // Those of a call that was killed may be for another host.
            if begins || self.find(name)? == Found::Nothing {
                self.write(name, &text)?;
                made.push(name.to_owned());
            }
        }
        // The certificate last: where it is, the key and all configuration are, too.
        if begins {
            let (authority, key) = Authority::create().map_err(wrong)?;
            self.write("ca.key", &key)?;
            self.write("ca.pem", authority.certificate())?;
            made.extend(["ca.key".to_owned(), "ca.pem".to_owned()]);
        }
        let served: Vec<String> = hosts.iter().cloned().chain(ITSELF.map(str::to_owned)).collect();
        for (name, serves) in MEMBERS {
            let hosts = if serves { &served[..] } else { &[] };
            let (certificate, _) = self.pair(name);
            if certificate.exists() {
                self.keep_issued(name)?;
                continue;
            }
            if serves && hosts.len() == ITSELF.len() {
                return Err(Failure::usage(format!(
                    "{} is missing, and is made for the names of this host: name them",
                    certificate.display()
                )));
            }
            // Only here: its key may be kept elsewhere.
            made.extend(self.issue(&self.read_authority()?, name, hosts)?);
        }
        for name in ["eschedule.token", "econtroller.token", USER_DATA_KEY] {
            if !self.file(name).exists() {
                self.write(name, format!("{}\n", new_token()))?;
                made.push(name.to_owned());
            }
        }
        // The authority's key may be kept elsewhere, and what is to be listed waits for it; but etcd waits for a list.
        let wanted = !self.list_is_ignored() && !self.revoked_list().exists();
        if wanted || self.file("ca.key").exists() {
            made.extend(self.list_revoked_alone()?);
        }
        Ok(made)
    }

    /// Until it is dropped, nobody else makes anything here: two at once would mix keys and certificates, and each would write
    /// what the other had not seen.
    fn lock(&self) -> Result<File, Failure> {
        let lock = File::open(&self.0).map_err(failed("read", &self.0))?;
        lock.lock().map_err(failed("lock", &self.0))?;
        Ok(lock)
    }

    /// Makes all certificates of this host anew, for the same names; answers what was made. Whoever uses them takes the new ones by
    /// itself.
    pub(super) fn renew(&self) -> Result<Vec<String>, Failure> {
        let _lock = self.lock()?;
        let authority = self.read_authority()?;
        let known = MEMBERS.map(|(name, serves)| {
            let hosts = Certificate::read(&self.pair(name).0).map(|known| known.hosts);
            hosts.map(|hosts| (name, if serves { hosts } else { Vec::new() }))
        });
        let known = known.into_iter().collect::<Result<Vec<_>, _>>().map_err(|why| {
            Failure::failed(format!("{why}: `{} HOST…` makes what is missing", self.again()))
        })?;
        let made = known.iter().map(|(name, hosts)| self.issue(&authority, name, hosts));
        let made = made.collect::<Result<Vec<_>, _>>()?.into_iter().flatten();
        Ok(made.chain(self.list_revoked_alone()?).collect())
    }

    /// Keeps a certificate that a node is given, so that it is known when the node is revoked.
    pub(super) fn keep_given(&self, name: &str, certificate: &str) -> Result<(), Failure> {
        let directory = self.file(GIVEN);
        fs::create_dir_all(&directory).map_err(failed("make directory", &directory))?;
        // It may have others, which are good still.
        self.write(&format!("{GIVEN}/{name}-{}.pem", &new_token()[..16]), certificate)
    }

    /// Puts the certificates that this user was given to those that are good no more; answers how many there were.
    pub(super) fn revoke_given(&self, user: &str) -> Result<usize, Failure> {
        let (from, to) = (self.file(GIVEN), self.revoked());
        let given = certificates(&from)?.into_iter().filter(|(_, certificate)| certificate.name == user);
        let mut count = 0;
        for (path, _) in given {
            fs::create_dir_all(&to).map_err(failed("make directory", &to))?;
            fs::rename(&path, to.join(path.file_name().unwrap_or_default()))
                .map_err(failed("move", &path))?;
            count += 1;
        }
        Ok(count)
    }

    /// Writes the list of certificates that are good no more, where it lacks any; answers its name then. Whoever is on it stays.
    pub(super) fn list_revoked(&self) -> Result<Option<String>, Failure> {
        let _lock = self.lock()?;
        self.list_revoked_alone()
    }

    /// The same, by who has the lock.
    fn list_revoked_alone(&self) -> Result<Option<String>, Failure> {
        let path = self.file(REVOKED_LIST);
        // etcd lets nobody in where the list is missing or none.
        let listed = match fs::read(&path) {
            Ok(der) => revoked_serials(&der),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed("read", &path)(error)),
        };
        let revoked = certificates(&self.revoked())?;
        let revoked: BTreeSet<_> = revoked.into_iter().map(|(_, certificate)| certificate.serial).collect();
        if listed.as_ref().is_some_and(|listed| revoked.is_subset(listed)) {
            return Ok(None);
        }
        let serials = listed.into_iter().flatten().chain(revoked).collect();
        self.write(REVOKED_LIST, self.read_authority()?.revoke(&serials).map_err(wrong)?)?;
        Ok(Some(REVOKED_LIST.to_owned()))
    }

    /// Where certificates lie that are good no more.
    pub(super) fn revoked(&self) -> PathBuf {
        self.file(REVOKED)
    }

    pub(super) fn revoked_list(&self) -> PathBuf {
        self.file(REVOKED_LIST)
    }

    /// Whether etcd's configuration is here and does not make it look at the list.
    pub(super) fn list_is_ignored(&self) -> bool {
        fs::read_to_string(self.etcd()).is_ok_and(|text| {
            let says = |what: &str| text.lines().any(|line| line.trim_start().starts_with(what));
            !says("CRLFile:") || says("listen-client-http-urls:")
        })
    }

    /// Makes a certificate and its key, in place of any that were there.
    fn issue(&self, authority: &Authority, name: &str, hosts: &[String]) -> Result<[String; 2], Failure> {
        let issued = authority.issue(name, hosts).map_err(wrong)?;
        let made = [format!("{name}.key"), format!("{name}.pem")];
        self.keep_issued(name)?;
        self.write(&made[0], &issued.key)?;
        self.write(&made[1], &issued.certificate)?;
        self.keep_issued(name)?;
        Ok(made)
    }

    /// Keeps the certificate of that name that is there, if one is, so that it can be revoked later; and makes the place for what is.
    fn keep_issued(&self, name: &str) -> Result<(), Failure> {
        for directory in [self.file(ISSUED), self.revoked()] {
            fs::create_dir_all(&directory).map_err(failed("make directory", &directory))?;
        }
        let (path, _) = self.pair(name);
        let Ok(known) = Certificate::read(&path) else { return Ok(()) };
        let serial: String = known.serial.iter().map(|byte| format!("{byte:02x}")).collect();
        let kept = format!("{ISSUED}/{name}-{serial}.pem");
        if self.file(&kept).exists() {
            return Ok(());
        }
        self.write(&kept, self.read(&path)?)
    }

    /// Refuses to mix with the configuration of something else.
    fn refuse_others(&self) -> Result<(), Failure> {
        for (name, _) in self.configurations("") {
            // One of a call that was killed is ours.
            if self.find(name)? == Found::Others {
                return Err(Failure::usage(format!(
                    "{} is there already, and is not of a cluster that was made here: move it away, or name another \
                     --directory",
                    self.file(name).display()
                )));
            }
        }
        Ok(())
    }

    /// What is in the place of a configuration file.
    fn find(&self, name: &str) -> Result<Found, Failure> {
        let path = self.file(name);
        config::find(&path, MARK, &SHIPPED).map_err(failed("read", &path))
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<(), Failure> {
        let path = self.file(name);
        let secret = name.ends_with(".key") || name.ends_with(".token");
        // Only root can give a file to a group that is not its own.
        let group = GROUPS.iter().find(|(file, _)| *file == name && Uid::effective().is_root());
        let group = group.and_then(|(_, group)| Group::from_name(group).ok().flatten());
        let access = match (secret, group) {
            (false, _) => Access::Public,
            (true, None) => Access::Secret,
            (true, Some(group)) => Access::Group(group.gid.as_raw()),
        };
        write(&path, content, access).map_err(failed("write", &path))
    }

    fn configurations(&self, host: &str) -> [(&'static str, String); 4] {
        let ca = self.authority();
        // An IPv6 address needs its brackets before a port, and is reached by IPv6.
        let (host, any) =
            if host.contains(':') { (format!("[{host}]"), "[::]") } else { (host.to_owned(), "0.0.0.0") };
        let etcd = format!("https://{host}:{ETCD}");
        let trust_of = |name: &str| {
            let (certificate, key) = self.pair(name);
            trust(&ca, &certificate, &key)
        };
        let (server, server_key) = self.pair("eplacement");
        let transport = |name: &str| {
            let (certificate, key) = self.pair("etcd");
            format!(
                "{name}-transport-security:\n  cert-file: {}\n  key-file: {}\n  client-cert-auth: true\n  \
                 trusted-ca-file: {}\n",
                quoted_path(&certificate),
                quoted_path(&key),
                quoted_path(&ca)
            )
        };
        let asks = |name: &str, more: &str| {
            format!(
                "{MARK}\netcd:\n  endpoints: [\"{etcd}\"]\n{more}{}placement:\n  endpoint: https://{host}:{PLACEMENT}\n  \
                 token_file: {}\n{}",
                trust_of(name),
                quoted_path(&self.file(&format!("{name}.token"))),
                trust_of(name)
            )
        };
        let opens = format!("  user_data_key: {}\n", quoted_path(&self.file(USER_DATA_KEY)));
        [
            (
                "etcd.yaml",
                format!(
                    "{MARK}\nname: etcd1\ndata-dir: /var/lib/etcd/ecompute\n\
                     listen-client-urls: https://{any}:{ETCD}\nadvertise-client-urls: {etcd}\n\
                     # Numbers, for a Prometheus on this host. Without listen-client-http-urls, with which etcd looks at no list\n\
                     # of revoked certificates before 3.5.32 and 3.6.13.\n\
                     listen-metrics-urls: https://127.0.0.1:{METRICS}\nenable-grpc-gateway: false\n\
                     listen-peer-urls: https://127.0.0.1:2380\ninitial-advertise-peer-urls: https://127.0.0.1:2380\n\
                     initial-cluster: etcd1=https://127.0.0.1:2380\n\
                     auto-compaction-mode: periodic\nauto-compaction-retention: 1h\n{}{}\
                     # What the command line calls --client-crl-file and --peer-cert-allowed-cn; a file has no other words for it.\n\
                     ClientTLSInfo:\n  CRLFile: {}\nPeerTLSInfo:\n  AllowedCN: etcd\n",
                    transport("client"),
                    transport("peer"),
                    quoted_path(&self.revoked_list())
                ),
            ),
            (
                "eplacement.yaml",
                format!(
                    "{MARK}\nlisten: \"{any}:{PLACEMENT}\"\nauth: tokens\netcd:\n  endpoints: [\"{etcd}\"]\n{}{}",
                    trust_of("eplacement"),
                    served(&ca, &server, &server_key)
                ),
            ),
            ("controller.yaml", asks("econtroller", "")),
            ("schedule.yaml", asks("eschedule", &opens)),
        ]
    }
}

/// What our configuration files begin with.
const MARK: &str = "# Made by `eschedule cluster init`; change it as you like.";
