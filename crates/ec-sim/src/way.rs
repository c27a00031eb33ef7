//! The way of the placement client's requests to a replica of eplacement, without sockets.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use ec_placement_client::{Answer, PlacementClient, PlacementConfig, Request, Transport};
use http_body_util::{BodyExt, Full};
use tokio::time::sleep;

use crate::{
    life::Life,
    referee::Question,
    snag::Fate,
    world::{Actor, World},
};

/// As long as the shipped client waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) world: Arc<World>,
    pub(crate) actor: Actor,
    pub(crate) life: Life,
}

impl Way {
    /// The shipped client, by this way, with this token.
    pub(crate) fn client(
        world: &Arc<World>,
        actor: Actor,
        token: &str,
        life: &Life,
    ) -> anyhow::Result<PlacementClient> {
        let token = token.to_owned();
        let config =
            PlacementConfig { endpoint: "http://placement".to_owned(), token, ..PlacementConfig::default() };
        let way = Self { world: Arc::clone(world), actor, life: life.clone() };
        Ok(PlacementClient::new(&config)?.over(Arc::new(way)))
    }

    /// Has a replica answer; what it has begun it ends, whoever waits. Whether anybody hears that, its fate says.
    pub(crate) async fn ask(&self, request: Request, is_heard: bool) -> Result<Answer, String> {
        let question = Question::of(&self.world, &request);
        if let Some(question) = &question {
            self.world.judge(|referee, _| referee.asked(self.actor, question));
        }
        let Some((replica, life)) = self.world.replicas.any(&self.world) else {
            return Err("connection refused".into());
        };
        let mut path = request.url.path().to_owned();
        if let Some(query) = request.url.query() {
            path = format!("{path}?{query}");
        }
        let mut builder = hyper::Request::builder().method(request.method).uri(path);
        if let Some(headers) = builder.headers_mut() {
            *headers = request.headers;
            if request.body.is_some() {
                let json = hyper::header::HeaderValue::from_static("application/json");
                headers.insert(hyper::header::CONTENT_TYPE, json);
            }
        }
        let body = request.body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        let request = builder.body(Full::new(body)).map_err(|error| error.to_string())?;
        let answering = tokio::spawn(async move {
            let response = replica.respond(request).await;
            let status = response.status();
            let body = match response.into_body().collect().await {
                Ok(body) => body.to_bytes().to_vec(),
                Err(never) => match never {},
            };
            Answer { status, body, ahead: None }
        });
        tokio::select! {
            biased;
            answer = answering => {
                let answer = answer.map_err(|error| error.to_string())?;
                if let Some(question) = &question {
                    self.world.judge(|referee, world| {
                        referee.answered(world, self.actor, question, &answer);
                        if is_heard {
                            referee.heard(world, self.actor, question, &answer);
                        }
                    });
                }
                Ok(answer)
            }
            () = life.over() => Err("connection reset by peer".into()),
        }
    }

    async fn carried(&self, request: Request) -> Result<Answer, String> {
        self.world.way().await;
        self.life.gate().await;
        let told = format!("{} {}", request.method, request.url.path());
        let snagged = self.world.snagged(self.actor, &self.life, std::slice::from_ref(&told)).await;
        match snagged.unwrap_or_else(|| self.fate()) {
            Fate::Arrives => {
                let answer = self.ask(request, true).await;
                self.world.way().await;
                answer
            }
            Fate::IsRefused(0) | Fate::IsDenied => Err("connection refused".into()),
            Fate::IsRefused(status) => {
                let status = hyper::StatusCode::from_u16(status).map_err(|error| error.to_string())?;
                let body = serde_json::json!({"errors": [{"detail": "refused on request"}]});
                Ok(Answer { status, body: body.to_string().into_bytes(), ahead: None })
            }
            Fate::IsLost => {
                sleep(TIMEOUT).await;
                Err("the request was lost".into())
            }
            Fate::LosesItsAnswer => {
                self.ask(request, false).await.ok();
                self.world.log(self.actor, format!("lost the answer of placement to {told}"));
                Err("connection reset by peer".into())
            }
            Fate::IsRepeated => {
                self.ask(request.clone(), false).await.ok();
                let answer = self.ask(request, true).await;
                self.world.way().await;
                answer
            }
            Fate::IsLate(by) => {
                let way = self.clone();
                tokio::spawn(async move {
                    sleep(by).await;
                    way.ask(request, false).await.ok();
                });
                sleep(TIMEOUT).await;
                Err("no answer in time".into())
            }
            Fate::Kills | Fate::KillsAfterwards => {
                self.ask(request, false).await.ok();
                self.world.end(self.actor, &self.life).await;
                Err("the caller is dead".into())
            }
        }
    }

    fn fate(&self) -> Fate {
        if !self.world.chance(self.world.storm().placement) {
            return Fate::Arrives;
        }
        match self.world.pick(0..3) {
            0 => Fate::IsRefused(0),
            1 => Fate::IsLost,
            _ => Fate::LosesItsAnswer,
        }
    }
}

#[async_trait]
impl Transport for Way {
    async fn exchange(&self, request: Request) -> Result<Answer, String> {
        self.life.gate().await;
        let answer = tokio::time::timeout(TIMEOUT, self.carried(request)).await;
        self.life.gate().await;
        answer.unwrap_or_else(|_| Err("operation timed out".into()))
    }
}
