//! `/allocation_candidates`

use std::{collections::HashSet, io::Write, sync::Arc};

use ec_placement_model::{
    State,
    search::{Candidate, Candidates, Options, Query, SearchError, Summary, search},
    standard_first,
};
use uuid::Uuid;

use super::{
    Call,
    error::{ApiError, ApiResult},
    policy::Rule,
    providers::use_known,
    reply::{Reply, now},
    search::Sought,
};

const LIST: Rule = Rule("placement:allocation_candidates:list");

pub(super) async fn list(call: &Call<'_>) -> ApiResult<Reply> {
    call.allow(LIST)?;
    let query = call.candidates_query()?;
    let config = &call.api.config;
    let options = Options { randomize: config.randomize.then(rand::random), ..config.search };
    let minor = call.minor;
    let query = Arc::new(query);
    let asked = Arc::clone(&query);
    call.read(use_known).await?;
    let find = move |state: &State, budget| search(state, &query, options, budget);
    let found = call.search(Sought::Candidates, find, move |found| write(&found, &asked, minor)).await?;
    Ok(Reply::raw(found.map_err(refused)?, now()))
}

fn refused(error: SearchError) -> ApiError {
    ApiError::bad_request(match error {
        SearchError::UnknownClass(_) => format!("Invalid resource class in resources parameter: {error}"),
        _ => error.to_string(),
    })
}

/// Writes the answer as it was asked for. By hand, since it may be large.
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
        // A class's may end with a newline, as upstream takes it. Writing to memory does not fail.
        serde_json::to_writer(&mut self.text, name).ok();
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
