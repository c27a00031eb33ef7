//! What operators read.

use std::{
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::{Duration, Instant},
};

use ec_metadata::{Account, RecordDir, Source};
use ec_runtime::service;
use ec_serve::{metrics::Exposition, port::Tells};

/// The server turns once a second, and nothing in it waits for long.
const PATIENCE: Duration = Duration::from_secs(30);

/// When the server turned last.
static TURNED: LazyLock<Mutex<Instant>> = LazyLock::new(|| Mutex::new(Instant::now()));

/// The server has turned.
pub(crate) fn turned() {
    service::turned();
    *TURNED.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
}

/// What is known of this server.
pub(crate) struct Readings {
    account: Arc<Account>,
    records: Source,
}

impl Readings {
    pub(crate) fn new(account: Arc<Account>, records: RecordDir) -> Self {
        Self { account, records: Source::new(records) }
    }
}

impl Tells for Readings {
    fn health(&self) -> Result<&'static str, &'static str> {
        let turned = *TURNED.lock().unwrap_or_else(PoisonError::into_inner);
        if turned.elapsed() < PATIENCE { Ok("ok") } else { Err("the server's loop does not turn") }
    }

    fn numbers(&self) -> String {
        let mut text = Exposition::default();
        text.gauges("mdserver_build_info", "The metadata server's release.")
            .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
        let help = "Instances and volumes that have a record in this server's state directory; none where that cannot be read.";
        let mut family = text.gauges("mdserver_records", help);
        if let Ok(count) = self.records.count() {
            family.sample(&[], count);
        }
        self.account.write(&mut text);
        text.into_text()
    }
}
