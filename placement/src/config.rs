//! What `eplacement` is told: by its configuration file, and over that by its command line.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use ec_placement_model::search::Options;
use ec_serve::TlsSection;
use ec_store::{EtcdConfig, EtcdSection};
use serde::Deserialize;

use crate::{
    http::{ApiConfig, Auth, Cors, Policy, Token, Tokens},
    store::{Keys, Limits},
};

/// Where it listens where nothing else is said; `ecompute` and `eschedule` look there.
const LISTEN: &str = "127.0.0.1:8080";
/// Where its records lie.
const PREFIX: &str = "/ecompute/placement";

/// How it is told who a request is from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuthKind {
    /// Whoever says so in X-Auth-Token and X-Roles; on loopback only, unless told otherwise
    #[default]
    Noauth,
    /// By bearer tokens that the configuration lists
    Tokens,
}

/// How candidates of several trees are gathered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// All of one tree, then all of the next.
    #[default]
    DepthFirst,
    /// One of each tree in turn.
    BreadthFirst,
}

/// `eplacement.yaml`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address and port; default 127.0.0.1:8080.
    pub listen: Option<String>,
    /// Where etcd is, as for the other programs.
    pub etcd: EtcdSection,
    /// What every key begins with; default /ecompute/placement.
    pub prefix: Option<String>,
    /// How it is told who a request is from.
    pub auth: AuthKind,
    /// Whether `noauth` may be served beyond loopback.
    pub allow_remote_noauth: bool,
    /// Tokens, by their digests.
    pub tokens: Option<Vec<Token>>,
    /// A file with tokens, in place of those here.
    pub tokens_file: Option<PathBuf>,
    /// Who may do what.
    #[serde(deserialize_with = "policy")]
    pub policy: Policy,
    /// Which web pages may.
    pub cors: Cors,
    /// TLS, where it is wanted.
    pub tls: Option<TlsSection>,
    /// Candidates in random order.
    pub randomize_allocation_candidates: bool,
    /// No more candidates than these; -1: no bound.
    pub max_allocation_candidates: Option<i64>,
    /// How candidates of several trees are gathered.
    pub allocation_candidates_generation_strategy: Strategy,
    /// What etcd's --max-txn-ops is; default 128, as its own.
    pub max_txn_ops: Option<usize>,
}

fn policy<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Policy, D::Error> {
    let name = String::deserialize(from)?;
    Policy::from_str(&name, true).map_err(|_| {
        serde::de::Error::custom(format!("unknown policy `{name}`: wanted legacy, secure or open"))
    })
}

/// What a server needs, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Where etcd is.
    pub etcd: EtcdConfig,
    /// Where the records lie.
    pub keys: Keys,
    /// What a transaction may hold.
    pub limits: Limits,
    /// How the API is served.
    pub api: ApiConfig,
    /// TLS, where it is wanted.
    pub tls: Option<TlsSection>,
}

impl Config {
    /// Where etcd is and where the records lie: all that tools on the store need.
    ///
    /// # Errors
    /// The key that is wrong, and what would be right.
    pub fn store(&self) -> Result<(EtcdConfig, Keys), String> {
        let prefix = self.prefix.as_deref().unwrap_or(PREFIX);
        if prefix.trim_matches('/').is_empty() {
            return Err(format!("prefix `{prefix}` is empty: wanted for example {PREFIX}"));
        }
        if prefix.chars().any(char::is_control) {
            return Err(format!("prefix {prefix:?} has a control character: wanted for example {PREFIX}"));
        }
        if self.etcd.prefix.is_some() {
            return Err(format!(
                "etcd.prefix has no meaning here: the keys begin with `prefix`, by default {PREFIX}"
            ));
        }
        Ok((self.etcd.settings()?, Keys::new(prefix)))
    }

    /// Checks everything.
    ///
    /// # Errors
    /// The key that is wrong, and what would be right.
    pub fn settings(&self) -> Result<Settings, String> {
        let text = self.listen.as_deref().unwrap_or(LISTEN);
        let listen: SocketAddr = text
            .parse()
            .map_err(|_| format!("listen `{text}` is no address with a port: wanted for example {LISTEN}"))?;
        let auth = match self.auth {
            AuthKind::Noauth if !listen.ip().is_loopback() && !self.allow_remote_noauth => {
                return Err(format!(
                    "noauth believes everybody, so it is served on loopback only, and {listen} is not: use auth \
                     tokens, or say --allow-remote-noauth where only trusted hosts reach it"
                ));
            }
            AuthKind::Noauth => Auth::NoAuth,
            AuthKind::Tokens => Auth::Tokens(self.tokens()?),
        };
        if self.cors.lets_everybody_in_with_credentials() {
            return Err(
                "cors: allowed_origins has `*` and allow_credentials is on, so every web page that an administrator \
                 opens could use the API: name the origins, or say allow_credentials: false"
                    .into(),
            );
        }
        let (etcd, keys) = self.store()?;
        let operations = self.max_txn_ops.unwrap_or(Limits::default().operations);
        if operations < 16 {
            return Err(format!(
                "max_txn_ops is {operations}: wanted what etcd's --max-txn-ops is, 16 at least"
            ));
        }
        if let Some(most) = self.max_allocation_candidates
            && most != -1
            && most < 1
        {
            return Err(format!(
                "max_allocation_candidates is {most}: wanted a number from 1 on, or -1 for no bound"
            ));
        }
        if let Some(wrong) = self.cors.wrong_method() {
            return Err(format!(
                "cors: allow_methods has `{wrong}`, which is no method: wanted for example GET"
            ));
        }
        let search = Options {
            randomize: None,
            max_candidates: self.max_allocation_candidates.and_then(|most| usize::try_from(most).ok()),
            breadth_first: self.allocation_candidates_generation_strategy == Strategy::BreadthFirst,
        };
        let served = self.tls.iter().flat_map(TlsSection::certificates);
        let certificates = etcd.certificates().chain(served).map(Path::to_owned).collect();
        Ok(Settings {
            listen,
            etcd,
            keys,
            limits: Limits { operations },
            api: ApiConfig {
                auth,
                policy: self.policy,
                cors: self.cors.clone(),
                randomize: self.randomize_allocation_candidates,
                search,
                certificates,
            },
            tls: self.tls.clone(),
        })
    }

    fn tokens(&self) -> Result<Tokens, String> {
        match (&self.tokens, &self.tokens_file) {
            (Some(_), Some(_)) => Err("tokens stands instead of tokens_file: give one or the other".into()),
            (Some(tokens), None) => Tokens::new(tokens.clone()),
            (None, Some(path)) => Tokens::load(path),
            (None, None) => Ok(Tokens::default()),
        }
    }
}
