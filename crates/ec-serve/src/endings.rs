//! That a certificate ends is told by programs that run on: they may be started once a year.

use std::{convert::Infallible, path::PathBuf, time::Duration};

use ec_pki::endings;

/// So often. The first time is at the start, which whoever runs it sees to.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Says in the log, once a day, which of these certificates are over, or soon will be.
pub async fn tell_endings(files: Vec<PathBuf>) -> Infallible {
    tell_each_day(files, |line| tracing::warn!("{line}")).await
}

async fn tell_each_day(files: Vec<PathBuf>, tell: impl Fn(String)) -> Infallible {
    loop {
        tokio::time::sleep(DAY).await;
        // They may be others than the day before.
        endings(files.iter().map(PathBuf::as_path)).into_iter().for_each(&tell);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Mutex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_ends_is_told_each_day_until_another_is_in_its_place() {
        let place = tempfile::tempdir().unwrap();
        let [over, good] = ["over.pem", "good.pem"].map(|name| place.path().join(name));
        let certificate = |year| {
            let mut params = rcgen::CertificateParams::new(["h1".to_owned()]).unwrap();
            params.not_after = rcgen::date_time_ymd(year, 1, 2);
            params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().pem()
        };
        fs::write(&over, certificate(2025)).unwrap();
        fs::write(&good, certificate(4000)).unwrap();
        let told = Mutex::new(Vec::new());
        let telling = tell_each_day(vec![over.clone(), good], |line| told.lock().unwrap().push(line));
        let days = async {
            tokio::time::sleep(DAY / 2).await;
            assert_eq!(told.lock().unwrap().len(), 0, "its start did");
            tokio::time::sleep(DAY * 2).await;
            fs::write(&over, certificate(4000)).unwrap();
            tokio::time::sleep(DAY * 2).await;
        };
        tokio::select! {
            never = telling => match never {},
            () = days => {}
        }
        let told = told.into_inner().unwrap();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[1].contains("over.pem ran out on 2025-01-02"), "{told:?}");
    }
}
