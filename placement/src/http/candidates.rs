//! `/allocation_candidates`

use std::{collections::HashSet, io::Write};

use uuid::Uuid;

use super::{
    Call,
    error::{ApiError, ApiResult},
    policy::Rule,
    reply::{Reply, now},
};
use crate::model::standard_first;
use crate::search::{Candidate, Candidates, Query, SearchError, Summary, search};

const LIST: Rule = Rule("placement:allocation_candidates:list");

/// A search over more providers than these is done beside the threads that serve connections.
const QUICK: usize = 2_000;

pub(super) async fn list(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(LIST)?;
    let query = call.candidates_query()?;
    let options = call.api.config.search;
    let quick = query.limit.is_some() && !options.randomize;
    let few = call.api.replica.peek(|state| state.provider_count() <= QUICK);
    call.api.replica.fresh().await?;
    let minor = call.minor;
    let replica = call.api.replica.clone();
    let work = move || -> ApiResult<Vec<u8>> {
        let found = replica.peek(|state| search(state, &query, options)).map_err(|error| {
            ApiError::bad_request(match error {
                SearchError::UnknownClass(_) => {
                    format!("Invalid resource class in resources parameter: {error}")
                }
                _ => error.to_string(),
            })
        })?;
        Ok(write(&found, &query, minor))
    };
    let document = if quick || few {
        work()?
    } else {
        tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::new(500, error.to_string()))??
    };
    Ok(Reply::raw(document, now()))
}

/// Writes the answer as it was asked for. By hand, since it may be large: names need no escaping, for they
/// are made of capitals, digits and underscores.
fn write(found: &Candidates, query: &Query, minor: u32) -> Vec<u8> {
    let mut writer = Writer { text: Vec::with_capacity(found.candidates.len() * 200 + 64), minor };
    writer.raw("{\"allocation_requests\":[");
    for (index, candidate) in found.candidates.iter().enumerate() {
        writer.comma(index);
        writer.candidate(found, candidate, query);
    }
    writer.raw("],\"provider_summaries\":{");
    let wanted: HashSet<&str> =
        query.groups.iter().flat_map(|group| &group.resources).map(|(class, _)| &**class).collect();
    for (index, summary) in found.summaries.iter().enumerate() {
        writer.comma(index);
        writer.summary(summary, &wanted);
    }
    writer.raw("}}");
    writer.text
}

struct Writer {
    text: Vec<u8>,
    minor: u32,
}

impl Writer {
    fn raw(&mut self, text: &str) {
        self.text.extend_from_slice(text.as_bytes());
    }

    fn comma(&mut self, index: usize) {
        if index > 0 {
            self.text.push(b',');
        }
    }

    fn number(&mut self, number: i64) {
        // Writing to memory does not fail.
        write!(self.text, "{number}").ok();
    }

    fn uuid(&mut self, uuid: &Uuid) {
        self.text.push(b'"');
        self.raw(uuid.hyphenated().encode_lower(&mut Uuid::encode_buffer()));
        self.text.push(b'"');
    }

    fn name(&mut self, name: &str) {
        self.text.push(b'"');
        self.raw(name);
        self.text.push(b'"');
    }

    fn candidate(&mut self, found: &Candidates, candidate: &Candidate, query: &Query) {
        let as_list = self.minor < 12;
        self.raw(if as_list { "{\"allocations\":[" } else { "{\"allocations\":{" });
        let by_provider = candidate.allocations.chunk_by(|a, b| a.0 == b.0);
        for (index, chunk) in by_provider.enumerate() {
            self.comma(index);
            let uuid = &found.providers[chunk[0].0 as usize];
            if as_list {
                self.raw("{\"resource_provider\":{\"uuid\":");
                self.uuid(uuid);
                self.raw("},\"resources\":{");
            } else {
                self.uuid(uuid);
                self.raw(":{\"resources\":{");
            }
            for (index, (_, class, amount)) in chunk.iter().enumerate() {
                self.comma(index);
                self.name(class);
                self.raw(":");
                self.number(*amount);
            }
            self.raw("}}");
        }
        self.raw(if as_list { "]" } else { "}" });
        if self.minor >= 34 {
            self.raw(",\"mappings\":{");
            for (index, (group, providers)) in query.groups.iter().zip(&candidate.mappings).enumerate() {
                self.comma(index);
                self.name(&group.suffix);
                self.raw(":[");
                for (index, provider) in providers.iter().enumerate() {
                    self.comma(index);
                    self.uuid(&found.providers[*provider as usize]);
                }
                self.raw("]");
            }
            self.raw("}");
        }
        self.raw("}");
    }

    fn summary(&mut self, summary: &Summary, wanted: &HashSet<&str>) {
        self.uuid(&summary.uuid);
        self.raw(":{\"resources\":{");
        let inventories = summary.provider.inventories.iter().zip(&summary.used);
        let shown = inventories.filter(|((class, _), _)| self.minor >= 27 || wanted.contains(&**class));
        for (index, ((class, inventory), used)) in shown.collect::<Vec<_>>().into_iter().enumerate() {
            self.comma(index);
            self.name(class);
            self.raw(":{\"capacity\":");
            self.number(inventory.capacity());
            self.raw(",\"used\":");
            self.number(*used);
            self.raw("}");
        }
        self.raw("}");
        if self.minor >= 17 {
            self.raw(",\"traits\":[");
            for (index, name) in standard_first(&summary.provider.traits).enumerate() {
                self.comma(index);
                self.name(name);
            }
            self.raw("]");
        }
        if self.minor >= 29 {
            self.raw(",\"parent_provider_uuid\":");
            match &summary.provider.parent {
                Some(parent) => self.uuid(parent),
                None => self.raw("null"),
            }
            self.raw(",\"root_provider_uuid\":");
            self.uuid(&summary.root);
        }
        self.raw("}");
    }
}
