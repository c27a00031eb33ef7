//! The files of a cluster on the host that it is administered from.
//!
//! ```text
//!   ca.pem ca.key                       the authority: whoever has the key may be anybody
//!   root.pem root.key                   the administrator in etcd
//!   etcd.pem, eplacement.pem … .key     servers
//!   eschedule.pem, econtroller.pem … .key and .token
//!   user-data.key                       what user-data is sealed with in etcd
//!   monitoring.pem monitoring.key       for reading numbers: nobody in etcd, and without a token
//!   etcd.yaml eplacement.yaml controller.yaml schedule.yaml
//! ```
//!
//! What is there is never written again: it is completed. Configuration as it was shipped is as good as none.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use ec_cloud::ROOT;
use ec_pki::{
    Access, Authority, Certificate,
    config::{self, Found, quoted_path, served, trust},
    new_token, write,
};
use ec_runtime::exit::Failure;
use nix::unistd::{Group, Uid};

use super::{DIRECTORY, wrong};

/// Ports where those who serve are looked for.
const ETCD: u16 = 2379;
const PLACEMENT: u16 = 8080;
/// Ports of etcd on loopback: for its numbers, and for whatever else it has for HTTP.
const METRICS: u16 = 2381;
const HTTP: u16 = 2382;
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
/// By these a host reaches itself.
const ITSELF: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// The directory with all of them.
pub(super) struct Directory(PathBuf);

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
                self.write(name, &format!("{}\n", new_token()))?;
                made.push(name.to_owned());
            }
        }
        Ok(made)
    }

    /// Makes all certificates of this host anew, for the same names; answers what was made. Whoever uses them takes the new ones by
    /// itself.
    pub(super) fn renew(&self) -> Result<Vec<String>, Failure> {
        let authority = self.read_authority()?;
        let known = MEMBERS.map(|(name, serves)| {
            let hosts = Certificate::read(&self.pair(name).0).map(|known| known.hosts);
            hosts.map(|hosts| (name, if serves { hosts } else { Vec::new() }))
        });
        let known = known.into_iter().collect::<Result<Vec<_>, _>>().map_err(|why| {
            Failure::failed(format!("{why}: `{} HOST…` makes what is missing", self.again()))
        })?;
        let made = known.iter().map(|(name, hosts)| self.issue(&authority, name, hosts));
        Ok(made.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
    }

    /// Makes a certificate and its key, in place of any that were there.
    fn issue(&self, authority: &Authority, name: &str, hosts: &[String]) -> Result<[String; 2], Failure> {
        let issued = authority.issue(name, hosts).map_err(wrong)?;
        let made = [format!("{name}.key"), format!("{name}.pem")];
        self.write(&made[0], &issued.key)?;
        self.write(&made[1], &issued.certificate)?;
        Ok(made)
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

    fn write(&self, name: &str, text: &str) -> Result<(), Failure> {
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
        write(&path, text, access).map_err(failed("write", &path))
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
                     # Numbers, for a Prometheus on this host; 3.5 has them at the clients' port no more, 3.4 has them there, too.\n\
                     listen-metrics-urls: https://127.0.0.1:{METRICS}\nlisten-client-http-urls: https://127.0.0.1:{HTTP}\n\
                     listen-peer-urls: https://127.0.0.1:2380\ninitial-advertise-peer-urls: https://127.0.0.1:2380\n\
                     initial-cluster: etcd1=https://127.0.0.1:2380\n\
                     auto-compaction-mode: periodic\nauto-compaction-retention: 1h\n{}{}",
                    transport("client"),
                    transport("peer")
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
