//! Who sends a request.

use std::{collections::HashMap, path::Path, sync::Arc};

use ec_model::token_digest;
use ec_placement_model::{Scope, intern};
use ec_store::Store;
use hyper::{HeaderMap, http::request::Parts};
use serde::Deserialize;
use uuid::Uuid;

use super::error::{ApiError, ApiResult};
use crate::tokens::Stored;

/// Who a request is from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) roles: Vec<String>,
    pub(super) project: Option<String>,
    /// Whether it speaks for the whole system instead of a project.
    pub(super) system: bool,
    /// All that it may change, where that is not everything.
    pub(super) scope: Option<Scope>,
}

/// How it is told who a request is from.
#[derive(Debug, Clone)]
pub enum Auth {
    /// Whoever says so: as upstream's noauth2, for tests and a trusted host.
    NoAuth,
    /// By tokens that are listed.
    Tokens(Tokens),
}

/// A token's owner, as the file has it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    /// SHA-256 of the token, in hex.
    pub sha256: String,
    /// Who it is, for people.
    #[serde(default)]
    pub name: String,
    /// `admin`, `service`, `member` (who looks at what there is, and claims for its own project) or `reader`.
    pub roles: Vec<String>,
    /// The project that it speaks for.
    #[serde(default)]
    pub project: Option<String>,
    /// The one resource provider that it may change, with what is used of it; by default it may change all.
    #[serde(default)]
    pub provider: Option<Uuid>,
}

/// What a token's owner can be.
pub const ROLES: [&str; 4] = ["admin", "service", "member", "reader"];

impl Token {
    /// Whether it is a member of its project, and nothing more.
    fn is_member(&self) -> bool {
        let has = |role: &str| self.roles.iter().any(|own| own == role);
        has("member") && !has("admin") && !has("service")
    }

    fn scope(&self) -> Option<Scope> {
        let project = self.project.as_ref().filter(|_| self.is_member());
        self.provider.map(Scope::Provider).or_else(|| project.map(|project| Scope::Project(intern(project))))
    }
}

/// Tokens that let in, by their digests: the tokens themselves are nowhere.
#[derive(Debug, Clone, Default)]
pub struct Tokens {
    listed: HashMap<String, Token>,
    /// Those that lie in etcd.
    stored: Arc<Stored>,
}

impl Tokens {
    /// Takes tokens up.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub fn new(tokens: Vec<Token>) -> Result<Self, String> {
        let mut by_digest = HashMap::new();
        for token in tokens {
            let digest = token.sha256.to_ascii_lowercase();
            if digest.len() != 64 || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(format!(
                    "token `{}`: sha256 must be 64 hexadecimal digits; `eplacement hash-token` makes them",
                    token.name
                ));
            }
            if digest.bytes().all(|byte| byte == b'0') {
                return Err(format!(
                    "token `{}`: this sha256 is that of the example, which lets nobody in; `eplacement hash-token` makes \
                     one of a token",
                    token.name
                ));
            }
            if let Some(role) = token.roles.iter().find(|role| !ROLES.contains(&role.as_str())) {
                return Err(format!(
                    "token `{}`: unknown role `{role}`; roles are admin, service, member and reader",
                    token.name
                ));
            }
            if token.is_member() && token.project.is_none() {
                return Err(format!("token `{}`: a member is one of a project: name it", token.name));
            }
            by_digest.insert(digest, token);
        }
        Ok(Self { listed: by_digest, stored: Arc::default() })
    }

    /// Reads a YAML list of tokens.
    ///
    /// # Errors
    /// The file, and what is wrong with it.
    pub fn load(path: &Path) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct File {
            tokens: Vec<Token>,
        }
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let file: File = ec_runtime::config::parse(&text, path).map_err(|error| error.to_string())?;
        Self::new(file.tokens).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Lets in whom the store says, too, as it says it, for as long as this is polled: it never ends.
    pub fn keep(&self, store: Arc<dyn Store>, prefix: String) -> impl Future<Output = ()> + use<> {
        Arc::clone(&self.stored).keep(store, prefix)
    }

    /// Whether the configuration lists none.
    pub fn lists_nobody(&self) -> bool {
        self.listed.is_empty()
    }

    /// Whether it is known whom the store says, as far as anybody may need that.
    fn ready(&self) -> Result<(), String> {
        self.stored.ready(!self.listed.is_empty())
    }

    /// Whom a token lets in.
    fn owner(&self, token: &str) -> ApiResult<Identity> {
        // Looking up a digest tells nothing about the token by the time that it takes.
        let digest = token_digest(token);
        if let Some(owner) = self.listed.get(&digest) {
            let (roles, project) = (owner.roles.clone(), owner.project.clone());
            return Ok(Identity { roles, project, system: false, scope: owner.scope() });
        }
        match self.stored.find(&digest) {
            Ok(Some(owner)) => Ok(Identity {
                roles: vec!["service".to_owned()],
                scope: owner.provider.map(|node| Scope::Provider(node.uuid())),
                ..Identity::default()
            }),
            Ok(None) => Err(nobody()),
            Err(why) => Err(ApiError::new(503, format!("This token is not known: {why}; try again."))),
        }
    }
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn nobody() -> ApiError {
    ApiError::new(401, "Send a token in the header X-Auth-Token.")
}

impl Auth {
    /// Whether it can be told of everybody whether they come in.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn ready(&self) -> Result<(), String> {
        match self {
            Self::NoAuth => Ok(()),
            Self::Tokens(tokens) => tokens.ready(),
        }
    }

    /// Who a request is from. The root of the API may be seen by anybody.
    pub(super) fn identify(&self, parts: &Parts) -> ApiResult<Identity> {
        if matches!(parts.uri.path(), "/" | "") {
            return Ok(Identity::default());
        }
        let token = header(&parts.headers, "x-auth-token").ok_or_else(nobody)?;
        match self {
            Self::NoAuth => Ok(as_said(&parts.headers, token)),
            Self::Tokens(tokens) => tokens.owner(token),
        }
    }
}

fn as_said(headers: &HeaderMap, token: &str) -> Identity {
    let (user, project) = token.split_once(':').unwrap_or((token, ""));
    let roles = match header(headers, "x-roles") {
        Some(roles) => roles.split(',').map(|role| role.trim().to_owned()).collect(),
        None if user == "admin" => vec!["admin".to_owned()],
        None => Vec::new(),
    };
    let system = header(headers, "openstack-system-scope").is_some_and(|scope| !scope.is_empty());
    let own = if project.is_empty() { user } else { project };
    let project = header(headers, "x-project-id").unwrap_or(own);
    Identity { roles, project: (!system).then(|| project.to_owned()), system, scope: None }
}
