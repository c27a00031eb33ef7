//! The Placement API over HTTP.
//!
//! ```text
//!   connection ─▶ answer: request id ─▶ CORS ─▶ who is it ─▶ microversion ─▶ route ─▶ handler ─▶ Reply
//! ```
//!
//! The order of the checks, and the texts of what is refused, are those of OpenStack Placement, since
//! clients and their tests look at them.

mod accept;
mod allocations;
mod asked;
mod auth;
mod body;
mod candidates;
mod classes;
mod cors;
mod error;
mod inventories;
mod params;
mod policy;
mod providers;
mod reply;
mod reshaper;
mod route;
mod search;
mod server;
mod traits;
mod usages;
mod version;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Instant,
};

use ec_placement_model::{Command, ModelError, Outcome, State, search::Options};
use http_body_util::Full;
use hyper::{Request, Response};
use tokio::sync::Semaphore;
use uuid::Uuid;

use self::{
    asked::Asked,
    auth::Identity,
    error::{ApiError, ApiResult},
    reply::Reply,
    route::Route,
};
pub use self::{
    auth::{Auth, ROLES, Token, Tokens},
    body::Incoming,
    cors::Cors,
    policy::Policy,
    server::{ServerConfig, serve},
};
use crate::{
    metrics::Metrics,
    store::{Replica, Unavailable, WriteError},
};

/// How the API is served.
#[derive(Debug, Clone)]
pub struct ApiConfig {
    /// Who may come in.
    pub auth: Auth,
    /// Who may do what.
    pub policy: Policy,
    /// Which web pages of other origins may.
    pub cors: Cors,
    /// Whether candidates come in random order.
    pub randomize: bool,
    /// How else candidates are chosen.
    pub search: Options,
    /// The certificates whose ends are told among the numbers.
    pub certificates: Vec<PathBuf>,
}

/// The API on a replica.
pub struct Api {
    replica: Replica,
    config: ApiConfig,
    metrics: Metrics,
    /// Places for searches for candidates that take long.
    searches: Arc<Semaphore>,
    /// The place for lists that take long.
    lists: Arc<Semaphore>,
    /// Places for bodies that are large.
    large_bodies: Arc<Semaphore>,
    /// `http` or `https`, for locations.
    scheme: &'static str,
}

/// A request on its way to its handler.
struct Call<'a> {
    api: &'a Api,
    /// N of the microversion 1.N.
    minor: u32,
    identity: Identity,
    /// The parts of the path that name something.
    names: Vec<String>,
    /// Decoded, in order.
    query: Vec<(String, String)>,
    /// Whole, for those that take one.
    body: bytes::Bytes,
    /// Whose allocations it changes, where that is an instance: for the log.
    instance: OnceLock<Uuid>,
}

impl Api {
    /// The API on a replica.
    pub fn new(replica: Replica, config: ApiConfig, tls: bool) -> Self {
        // Half of the processors, so that the other half answers everybody else.
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let searches = Arc::new(Semaphore::new((processors / 2).max(1)));
        let lists = Arc::new(Semaphore::new(1));
        let large_bodies = Arc::new(Semaphore::new(body::PLACES));
        let metrics = Metrics::default();
        let scheme = if tls { "https" } else { "http" };
        Self { replica, config, metrics, searches, lists, large_bodies, scheme }
    }

    /// Answers a request. Never fails: what goes wrong is an answer, too.
    pub async fn respond<B: Incoming>(&self, request: Request<B>) -> Response<Full<bytes::Bytes>> {
        let began = Instant::now();
        let method = request.method().clone();
        let (route, response) = self.dispatch(request).await;
        self.metrics.answered(route, method.as_str(), response.status().as_u16(), began.elapsed());
        response
    }

    async fn dispatch<B: Incoming>(
        &self,
        request: Request<B>,
    ) -> (&'static str, Response<Full<bytes::Bytes>>) {
        match request.uri().path() {
            "/healthz" => return ("/healthz", reply::text(200, "ok\n")),
            "/readyz" => {
                return match self.ready().await {
                    Ok(()) => ("/readyz", reply::text(200, "ok\n")),
                    Err(why) => ("/readyz", reply::text(503, &format!("not ready: {why}\n"))),
                };
            }
            "/metrics" => {
                // The API knows who asks by their token, and here nobody needs one.
                return match ec_serve::refusal(&request, None) {
                    Some(refused) => ("/metrics", refused),
                    None => ("/metrics", reply::text(200, &self.measurements().await)),
                };
            }
            _ => {}
        }
        let (parts, body) = request.into_parts();
        // From the thread's own generator: no call to the kernel.
        let id = format!("req-{}", uuid::Builder::from_random_bytes(rand::random()).as_uuid());
        let asked = Asked::of(&parts, &id);
        let mut frame = reply::Frame::new(&parts, id, self.scheme);
        let (name, result) = self.handle(&parts, body, &mut frame).await;
        let mut response = match result {
            Ok(reply) => frame.reply(reply),
            Err(error) => frame.error(&error),
        };
        if let Some(asked) = asked {
            asked.log(response.status(), frame.instance);
        }
        self.config.cors.decorate(&parts, &mut response);
        (name, response)
    }

    async fn handle<B: Incoming>(
        &self,
        parts: &hyper::http::request::Parts,
        body: B,
        frame: &mut reply::Frame,
    ) -> (&'static str, ApiResult<Reply>) {
        // Nothing has a name that is not UTF-8, and nothing is made that would be called what it is read as.
        let path = percent_encoding::percent_decode_str(parts.uri.path()).decode_utf8_lossy();
        let found = Route::find(&path).ok_or_else(|| ApiError::new(404, ""));
        let name = found.as_ref().map_or("unknown", |(route, _)| route.pattern());
        (name, self.checked(parts, body, found, frame).await)
    }

    async fn checked<B: Incoming>(
        &self,
        parts: &hyper::http::request::Parts,
        body: B,
        found: ApiResult<(Route, Vec<String>)>,
        frame: &mut reply::Frame,
    ) -> ApiResult<Reply> {
        let identity = self.config.auth.identify(parts)?;
        let minor = version::wanted(&parts.headers)?;
        frame.minor = Some(minor);
        body::check_declared(&parts.headers)?;
        let (route, names) = found?;
        route.check(parts, minor, frame)?;
        let query =
            if route.takes_query() { params::decode(parts.uri.query().unwrap_or(""))? } else { Vec::new() };
        let (body, place) = if route.takes_body(&parts.method) {
            body::read(parts, body, &self.large_bodies).await?
        } else {
            body::ignore(body)
        };
        let call = Call { api: self, minor, identity, names, query, body, instance: OnceLock::new() };
        let answer = route.call(&parts.method, &call).await;
        frame.instance = call.instance.into_inner();
        drop(place);
        answer
    }

    /// Whether all who may come in are answered.
    async fn ready(&self) -> Result<(), Unavailable> {
        self.replica.ready().await?;
        self.config.auth.ready().map_err(Unavailable)
    }

    async fn measurements(&self) -> String {
        let ready = self.ready().await.is_ok();
        let revision = self.replica.revision();
        let (providers, consumers, unreadable) = self
            .replica
            .peek(|state| (state.provider_count(), state.consumer_count(), state.unreadable().len()));
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.render(
            self.config.certificates.iter().map(PathBuf::as_path),
            self.replica.metrics(),
            &[
                (
                    "eplacement_ready",
                    "Whether the state is up to date with etcd, writes work and tokens can be read (1), or not (0).",
                    i64::from(ready),
                ),
                ("eplacement_revision", "Revision of etcd that the state in memory has.", revision),
                (
                    "eplacement_revision_lag",
                    "Revisions of the state known to be in etcd and not in memory yet.",
                    self.replica.lag(),
                ),
                ("eplacement_providers", "Resource providers.", number(providers)),
                ("eplacement_consumers", "Consumers.", number(consumers)),
                (
                    "eplacement_unreadable_records",
                    "Stored records that cannot be read; what depends on them is refused.",
                    number(unreadable),
                ),
            ],
        )
    }
}

impl Call<'_> {
    /// Refuses whoever may not do this.
    fn allow(&self, rule: policy::Rule) -> ApiResult<()> {
        self.api.config.policy.check(rule, &self.identity, self.identity.project.as_deref())
    }

    fn at_least(&self, minor: u32) -> bool {
        self.minor >= minor
    }

    fn name(&self, index: usize) -> &str {
        self.names.get(index).map_or("", String::as_str)
    }

    /// Reads the state as of now.
    async fn read<T>(&self, look: impl FnOnce(&State) -> ApiResult<T>) -> ApiResult<T> {
        self.api.replica.fresh().await?;
        self.api.replica.peek(look)
    }

    /// Looks at what a request is about, as far as it is known here; what is refused is looked at again with
    /// what is known of etcd.
    async fn prepare<T>(&self, make: impl Fn(&State) -> ApiResult<T>) -> ApiResult<T> {
        match self.api.replica.peek(&make) {
            Err(_) => self.read(make).await,
            made => made,
        }
    }

    /// Carries a command out; `refused` words why it must not be.
    async fn write(
        &self,
        command: Command,
        refused: impl FnOnce(ModelError) -> ApiError,
    ) -> ApiResult<Outcome> {
        let command = match self.identity.scope.clone() {
            Some(own) => Command::Within { own, command: Box::new(command) },
            None => command,
        };
        self.api.replica.write(command).await.map_err(|error| match error {
            WriteError::Refused(error @ ModelError::NotYours(_)) => ApiError::new(403, error.to_string()),
            WriteError::Refused(ModelError::Unreadable(why)) => Unavailable(why).into(),
            WriteError::Refused(ModelError::ConsumerTwice(uuid)) => {
                ApiError::bad_request(ModelError::ConsumerTwice(uuid).to_string())
            }
            WriteError::Refused(error) => refused(error),
            WriteError::TooBig { .. } => ApiError::bad_request(format!(
                "{error} Split it, or raise etcd's --max-txn-ops and max_txn_ops of eplacement."
            )),
            WriteError::TooLarge { .. } => ApiError::bad_request(error.to_string()),
            WriteError::NotTaken(_) => ApiError::bad_request(format!(
                "{error} Split it, or raise etcd's --max-txn-ops or --max-request-bytes; max_txn_ops of eplacement \
                 must not say more than etcd's."
            )),
            WriteError::Unavailable(unavailable) => unavailable.into(),
        })
    }
}

impl From<Unavailable> for ApiError {
    fn from(unavailable: Unavailable) -> Self {
        Self::new(503, unavailable.0)
    }
}
