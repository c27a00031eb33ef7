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

mod given;
mod said;

use std::{
    collections::BTreeSet,
    fs::{self, File, TryLockError},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use ec_cloud::ROOT;
use ec_pki::{
    Access, Authority, Certificate, PkiError,
    config::{self, Found, quoted_path, served, trust},
    ended, endings, make_directory, new_token, unfit, write, write_pair,
};
use ec_runtime::exit::{Failure, tell};
use nix::unistd::{Group, Uid};

use super::{DIRECTORY, wrong};
use given::{GIVEN, newest};

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
/// Certificates that the programs beside the authority ever had: one that was copied is good until it is revoked, also when others
/// have taken its place.
const ISSUED: &str = "issued";
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
        if path.extension().is_none_or(|extension| extension != "pem") {
            continue;
        }
        match Certificate::read(&path) {
            Ok(certificate) => found.push((path, certificate)),
            // Somebody who reads nothing else of it has no lock: a node is revoked at this moment.
            Err(_) if !path.exists() => {}
            Err(why) => return Err(Failure::failed(why)),
        }
    }
    Ok(found)
}

/// Whether both are the same name, or the same address however it is written.
fn same_host(one: &str, other: &str) -> bool {
    match (one.parse::<IpAddr>(), other.parse::<IpAddr>()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one.eq_ignore_ascii_case(other),
    }
}

/// The host of an endpoint, `host:port` or a URL.
fn host_of(endpoint: &str) -> Option<String> {
    let url = if endpoint.contains("://") { endpoint.to_owned() } else { format!("http://{endpoint}") };
    let url = reqwest::Url::parse(&url).ok()?;
    Some(url.host_str()?.trim_matches(['[', ']']).to_owned())
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
        let certificate = self.read(&self.authority())?;
        let path = self.file("ca.key");
        let key = fs::read_to_string(&path).map_err(|error| {
            // Off line is where it should be.
            let mend = match error.kind() {
                io::ErrorKind::NotFound => ": put it back from where you keep it",
                _ => "",
            };
            Failure::failed(format!("failed to read {}: {error}{mend}", path.display()))
        })?;
        Authority::read(&certificate, &key).map_err(|error| match error {
            PkiError::OtherKey => Failure::failed(format!(
                "{} is not the key of ca.pem: put back the one that belongs to it",
                path.display()
            )),
            error => wrong(error),
        })
    }

    /// Refuses where there is no cluster.
    pub(super) fn expect(&self) -> Result<(), Failure> {
        if self.authority().exists() {
            return Ok(());
        }
        self.refuse_lost()?;
        Err(Failure::usage(format!(
            "there is no cluster in {}: say `eschedule cluster init HOST`, or --directory for where it is",
            self.0.display()
        )))
    }

    /// Refuses where a cluster was made and its authority is missing: nobody who belongs to it would believe another.
    pub(super) fn refuse_lost(&self) -> Result<(), Failure> {
        let (authority, members) = (self.authority(), MEMBERS.map(|(name, _)| self.pair(name).0));
        let mut traces = [GIVEN, ISSUED].map(|name| self.file(name)).into_iter().chain(members);
        if authority.exists() || !traces.any(|path| path.exists()) {
            return Ok(());
        }
        Err(Failure::failed(format!(
            "{} is missing: copy it back from any node's {DIRECTORY}, and say this again",
            authority.display()
        )))
    }

    /// Whether the command line's configuration names a key that user-data is sealed with.
    pub(super) fn seals(&self) -> bool {
        let names = |line: &str| !line.trim_start().starts_with('#') && line.contains("user_data_key:");
        fs::read_to_string(self.schedule()).is_ok_and(|text| text.lines().any(names))
    }

    /// Whether a file of a secret is missing, or holds none.
    fn lacks(&self, name: &str) -> bool {
        match fs::read_to_string(self.file(name)) {
            Ok(text) => text.trim().is_empty(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Refuses where the key that user-data was sealed with is missing: with another in its place, nodes could not open what is sealed
    /// from now on, nor anybody here what was sealed before.
    fn refuse_lost_key(&self) -> Result<(), Failure> {
        let key = self.file(USER_DATA_KEY);
        if !self.lacks(USER_DATA_KEY) || !self.seals() || certificates(&self.file(GIVEN))?.is_empty() {
            return Ok(());
        }
        let is = if key.exists() { "empty" } else { "missing" };
        Err(Failure::failed(format!(
            "{} is {is}: copy it back from a node's {DIRECTORY}, and say this again",
            key.display()
        )))
    }

    /// Which of these names and addresses the certificates of those who serve here are not for, and what is to be done.
    pub(super) fn unnamed(&self, hosts: &[String]) -> Option<String> {
        let (mut missing, mut pairs) = (BTreeSet::new(), BTreeSet::new());
        for (name, _) in MEMBERS.into_iter().filter(|(_, serves)| *serves) {
            let (path, _) = self.pair(name);
            // One that is somebody's own may be of another kind.
            let Ok(Certificate { hosts: known, .. }) = Certificate::read(&path) else { continue };
            for host in hosts.iter().filter(|host| !known.iter().any(|known| same_host(known, host))) {
                missing.insert(host.clone());
                pairs.insert(path.display().to_string());
            }
        }
        let list = |set: BTreeSet<String>, between| set.into_iter().collect::<Vec<_>>().join(between);
        (!missing.is_empty()).then(|| {
            format!(
                "certificates of this host are not for {}: move them away (mv {} /root/), name all names of this host to `{}`, \
                 and start etcd and eplacement anew",
                list(missing, ", "),
                list(pairs, " "),
                self.again()
            )
        })
    }

    /// That etcd is looked for where none of these names and addresses of this host leads, as after its address was replaced, and what is
    /// to be done.
    pub(super) fn moved(&self, hosts: &[String], endpoints: &[String]) -> Option<String> {
        let here = host_of(endpoints.first()?)?;
        let is_here = |at: &String| {
            let here = host_of(at);
            here.is_none_or(|here| {
                hosts.iter().any(|host| same_host(host, &here)) || ITSELF.contains(&&*here)
            })
        };
        if hosts.is_empty() || endpoints.iter().any(is_here) {
            return None;
        }
        let written = if here.contains(':') { format!("//[{here}]:") } else { format!("//{here}:") };
        let names = |path: &PathBuf| fs::read_to_string(path).is_ok_and(|text| text.contains(&written));
        let files = self.configurations("").map(|(name, _)| self.file(name)).into_iter().filter(names);
        let files: Vec<_> = files.map(|path| path.display().to_string()).collect();
        Some(format!(
            "{} has etcd at {here}, which is none of {}: where that was this host's address, put the new one in its place in {}, start \
             etcd, eplacement and econtroller anew, and say this again; nodes hear of it by `eschedule node add NAME --again{}`",
            self.schedule().display(),
            hosts.join(", "),
            files.join(" "),
            self.elsewhere()
        ))
    }

    /// Which certificates are here that nobody can use with what lies beside them, as where a `renew` was killed between the two.
    pub(super) fn unfit(&self) -> Result<Option<String>, Failure> {
        let _lock = self.lock()?;
        let unfit = MEMBERS.iter().filter_map(|(name, _)| {
            let (certificate, key) = self.pair(name);
            // Of a service that runs on another host the key is there.
            if *name == ROOT || key.exists() { unfit(&certificate, &key) } else { None }
        });
        let unfit: Vec<_> = unfit.collect();
        Ok((!unfit.is_empty())
            .then(|| format!("{}: `{}` makes all anew", unfit.join(", "), self.said("renew"))))
    }

    /// Which certificates here are over, and whether their authority is.
    pub(super) fn ended(&self) -> Vec<String> {
        let authority = self.authority();
        let pairs = MEMBERS.map(|(name, _)| self.pair(name).0);
        ended(pairs.iter().chain([&authority]).map(PathBuf::as_path))
    }

    /// Which certificates that nobody here makes anew by the way are over, or soon will be: the authority's, and those of nodes.
    pub(super) fn ending(&self) -> Result<Vec<String>, Failure> {
        let mut told = endings([self.authority().as_path()]);
        told.extend(self.ending_given()?);
        Ok(told)
    }

    /// Makes what is missing; answers what was made.
    pub(super) fn complete(&self, hosts: &[String]) -> Result<Vec<String>, Failure> {
        let mut made = Vec::new();
        let begins = !self.authority().exists();
        if begins {
            self.refuse_lost()?;
            if hosts.is_empty() {
                return Err(Failure::usage(format!(
                    "there is no cluster in {} yet: name this host as others reach it, for example `eschedule \
                     cluster init 10.0.0.1`",
                    self.0.display()
                )));
            }
            self.refuse_others()?;
            make_directory(&self.0).map_err(failed("make directory", &self.0))?;
        }
        let _lock = self.lock()?;
        if hosts.is_empty() {
            // That of etcd may lie where its own unit looks.
            let ours = self.configurations("");
            let ours = ours.iter().map(|(name, _)| *name).filter(|name| *name != "etcd.yaml");
            ours.into_iter().try_for_each(|name| self.expect_made(name))?;
        }
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
        self.refuse_lost_key()?;
        for name in ["eschedule.token", "econtroller.token", USER_DATA_KEY] {
            if self.lacks(name) {
                self.write(name, format!("{}\n", new_token()))?;
                made.push(name.to_owned());
            }
        }
        // The authority's key may be kept elsewhere, and what is to be listed waits for it; but etcd waits for a list.
        let wanted = !self.list_is_ignored() && !self.revoked_list().exists();
        if wanted || self.file("ca.key").exists() {
            made.extend(self.list_revoked()?);
        }
        Ok(made)
    }

    /// Until it is dropped, nobody else makes anything here: two at once would mix keys and certificates, and each would write
    /// what the other had not seen.
    /// Who has to wait for somebody else is told so.
    pub(super) fn lock(&self) -> Result<File, Failure> {
        if let Some(lock) = self.try_lock()? {
            return Ok(lock);
        }
        tell(&format!(
            "eschedule: waiting for another `eschedule cluster` or `eschedule node` that is at {}",
            self.0.display()
        ));
        let lock = File::open(&self.0).map_err(failed("read", &self.0))?;
        lock.lock().map_err(failed("lock", &self.0))?;
        Ok(lock)
    }

    /// The same without waiting: none where somebody else has it.
    pub(super) fn try_lock(&self) -> Result<Option<File>, Failure> {
        let lock = File::open(&self.0).map_err(failed("read", &self.0))?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(lock)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(failed("lock", &self.0)(error)),
        }
    }

    /// Makes all certificates of this host anew, for the same names; answers what was made. Whoever uses them takes the new ones by
    /// itself.
    pub(super) fn renew(&self) -> Result<Vec<String>, Failure> {
        let _lock = self.lock()?;
        let authority = self.read_authority()?;
        let known = MEMBERS.map(|(name, serves)| {
            let (path, _) = self.pair(name);
            let known = Certificate::read(&path).or_else(|why| {
                // An empty file is not made by `init`, and what was there before is known.
                let issued = path.exists().then(|| certificates(&self.file(ISSUED)).ok()).flatten();
                newest(issued.into_iter().flatten(), name).ok_or(why)
            });
            known.map(|known| (name, if serves { known.hosts } else { Vec::new() }))
        });
        let known = known.into_iter().collect::<Result<Vec<_>, _>>().map_err(|why| {
            Failure::failed(format!("{why}: `{} HOST…` makes what is missing", self.again()))
        })?;
        let made = known.iter().map(|(name, hosts)| self.issue(&authority, name, hosts));
        let made = made.collect::<Result<Vec<_>, _>>()?.into_iter().flatten();
        Ok(made.chain(self.list_revoked()?).collect())
    }

    /// Makes the authority good for longer, with the same key: all that it signed stays good. Answers what was made.
    pub(super) fn renew_authority(&self) -> Result<Vec<String>, Failure> {
        let _lock = self.lock()?;
        let renewed = self.read_authority()?.renewed().map_err(wrong)?;
        self.write("ca.pem", renewed)?;
        Ok(vec!["ca.pem".to_owned()])
    }

    /// Makes a certificate and its key, in place of any that were there.
    fn issue(&self, authority: &Authority, name: &str, hosts: &[String]) -> Result<[String; 2], Failure> {
        let issued = authority.issue(name, hosts).map_err(wrong)?;
        let made = [format!("{name}.key"), format!("{name}.pem")];
        self.keep_issued(name)?;
        let (certificate, key) = self.pair(name);
        let access = Self::access_of(&made[0]);
        write_pair([(&key, &issued.key, access), (&certificate, &issued.certificate, Access::Public)])
            .map_err(|(path, error)| failed("write", &path)(error))?;
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

    /// Refuses where a configuration file is missing, or is as it was shipped: it names nobody who is of this cluster.
    pub(super) fn expect_made(&self, name: &str) -> Result<(), Failure> {
        if self.find(name)? != Found::Nothing {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "{} is missing, or as it was shipped, and is made for this host: name it as others reach it, as in `{} 10.0.0.1`",
            self.file(name).display(),
            self.again()
        )))
    }

    /// What is in the place of a configuration file.
    fn find(&self, name: &str) -> Result<Found, Failure> {
        let path = self.file(name);
        config::find(&path, MARK, &SHIPPED).map_err(failed("read", &path))
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<(), Failure> {
        let path = self.file(name);
        write(&path, content, Self::access_of(name)).map_err(failed("write", &path))
    }

    /// Who may read a file of this name.
    fn access_of(name: &str) -> Access {
        let secret = name.ends_with(".key") || name.ends_with(".token");
        // Only root can give a file to a group that is not its own.
        let group = GROUPS.iter().find(|(file, _)| *file == name && Uid::effective().is_root());
        let group = group.and_then(|(_, group)| Group::from_name(group).ok().flatten());
        match (secret, group) {
            (false, _) => Access::Public,
            (true, None) => Access::Secret,
            (true, Some(group)) => Access::Group(group.gid.as_raw()),
        }
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

#[cfg(test)]
mod tests;
