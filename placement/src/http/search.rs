//! Searches: at once where they are short, and where nobody waits for them where they are long.

use std::{sync::Arc, time::Duration};

use ec_placement_model::{State, search::SearchError};

use super::{
    Call,
    error::{ApiError, ApiResult},
};

/// Steps of a search that is done at once, where it was asked for: some milliseconds. What takes more is done
/// on a copy of the state and beside the threads that serve connections, so that nobody waits for it.
const QUICK: u64 = 100_000;

/// A search that may take long waits so long for its turn.
const PATIENCE: Duration = Duration::from_secs(10);

impl Call<'_> {
    /// Searches the state as far as it is known here, in so many steps at most, and tells of what was found: that without the state,
    /// which is held during a short search.
    pub(super) async fn search<T, R: Send + 'static>(
        &self,
        most: u64,
        find: impl Fn(&State, u64) -> Result<T, SearchError> + Send + 'static,
        tell: impl Fn(T) -> R + Send + 'static,
    ) -> ApiResult<Result<R, SearchError>> {
        match self.api.replica.peek(|state| find(state, QUICK)) {
            Err(SearchError::TooWide) => {}
            found => return Ok(found.map(tell)),
        }
        let searches = Arc::clone(&self.api.searches);
        let place = tokio::time::timeout(PATIENCE, searches.acquire_owned())
            .await
            .map_err(|_| ApiError::new(503, "Too many long searches wait for each other."))?;
        let replica = self.api.replica.clone();
        // Another thread, so that it goes on to its end whoever waits for it; its place goes with it.
        let work = move || {
            let found = find(&replica.copy(), most).map(tell);
            drop(place);
            found
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::new(500, error.to_string()))
    }
}
