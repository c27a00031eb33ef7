//! Searches: at once where they are short, and where nobody waits for them where they are long.

use std::{sync::Arc, time::Duration};

use ec_placement_model::{
    State,
    search::{BUDGET, SearchError},
};
use tokio::sync::OwnedSemaphorePermit;

use super::{
    Call,
    error::{ApiError, ApiResult},
};

/// Steps of a search that is done at once, where it was asked for: some milliseconds. What takes more is done
/// on a copy of the state and beside the threads that serve connections, so that nobody waits for it.
const QUICK: u64 = 100_000;

/// A search that may take long waits so long for its turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is searched for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sought {
    /// Combinations, of which there may be any number: what takes too many steps, or waits too long for its turn, is refused.
    Candidates,
    /// A list, which goes through all providers once. It has an end by itself and a place of its own, in which one comes after the other:
    /// none is refused.
    Providers,
}

impl Call<'_> {
    /// Searches the state as far as it is known here, and tells of what was found: that without the state, which is held during
    /// a short search.
    pub(super) async fn search<T, R: Send + 'static>(
        &self,
        sought: Sought,
        find: impl Fn(&State, u64) -> Result<T, SearchError> + Send + 'static,
        tell: impl Fn(T) -> R + Send + 'static,
    ) -> ApiResult<Result<R, SearchError>> {
        match self.api.replica.peek(|state| find(state, QUICK)) {
            Err(SearchError::TooWide) => {}
            found => return Ok(found.map(tell)),
        }
        let place = self.place(sought).await?;
        let most = match sought {
            Sought::Candidates => BUDGET,
            Sought::Providers => u64::MAX,
        };
        let replica = self.api.replica.clone();
        // Another thread, so that it goes on to its end whoever waits for it; its place goes with it.
        let work = move || {
            let found = find(&replica.copy(), most).map(tell);
            drop(place);
            found
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::new(500, error.to_string()))
    }

    /// Waits for its turn to search for long.
    async fn place(&self, sought: Sought) -> ApiResult<OwnedSemaphorePermit> {
        let turn = match sought {
            Sought::Candidates => {
                let turn = Arc::clone(&self.api.searches).acquire_owned();
                tokio::time::timeout(PATIENCE, turn)
                    .await
                    .map_err(|_| ApiError::new(503, "Too many long searches wait for each other."))?
            }
            Sought::Providers => Arc::clone(&self.api.lists).acquire_owned().await,
        };
        turn.map_err(|error| ApiError::new(500, error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ec_placement_model::{Command, search::Options};
    use ec_runtime::Host;
    use ec_store::MemoryStore;
    use http_body_util::Empty;
    use hyper::Request;
    use tokio_util::sync::CancellationToken;
    use uuid::Uuid;

    use super::*;
    use crate::{
        http::{Api, ApiConfig, Auth, Cors, Policy},
        store::{Keys, Limits, Replica},
    };

    /// As many providers as take more than is done at once, held against as many names as there is room for in an address.
    async fn api() -> (Api, String) {
        let stop = CancellationToken::new();
        let replica = Replica::start(
            Arc::new(MemoryStore::new()),
            Keys::new("/p"),
            Limits::default(),
            Host::default(),
            stop,
        );
        for number in 0..70 {
            let uuid = Uuid::from_u128(number);
            let provider = Command::CreateProvider { uuid, name: uuid.to_string(), parent: None };
            replica.write(provider).await.unwrap();
        }
        let config = ApiConfig {
            auth: Auth::NoAuth,
            policy: Policy::Legacy,
            cors: Cors::default(),
            randomize: false,
            search: Options::default(),
            certificates: Vec::new(),
        };
        let names: Vec<String> = (0..1700).map(|number| Uuid::from_u128(number).to_string()).collect();
        (Api::new(replica, config, false), format!("/resource_providers?member_of=!in:{}", names.join(",")))
    }

    async fn status(api: &Api, path: &str) -> u16 {
        let request = Request::get(path)
            .header("X-Auth-Token", "admin")
            .header("OpenStack-API-Version", "placement 1.39")
            .body(Empty::<Bytes>::new());
        api.respond(request.unwrap()).await.status().as_u16()
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_list_waits_for_no_other_search_and_as_long_as_need_be_for_another_list() {
        let (api, path) = api().await;
        let _searches =
            api.searches.acquire_many(u32::try_from(api.searches.available_permits()).unwrap()).await;
        assert_eq!(status(&api, &path).await, 200);
        let list = api.lists.acquire().await.unwrap();
        let waits = tokio::time::timeout(PATIENCE * 100, status(&api, &path)).await;
        assert!(waits.is_err(), "{waits:?}");
        drop(list);
        assert_eq!(status(&api, &path).await, 200);
    }
}
