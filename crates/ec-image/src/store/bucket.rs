//! How a bucket is spoken to: by the configuration, and what that leaves open by the environment.

use std::{fs, sync::Arc, time::Duration};

use object_store::{
    ClientConfigKey, ClientOptions, RetryConfig, StaticCredentialProvider,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredential},
};

use super::{StoreFailure, objects::failed, section::S3Settings};

/// How long a store is asked again that does not answer.
const PATIENCE: Duration = Duration::from_secs(20);
const TRIES: usize = 6;

/// Amazon's first one: other makers of S3 take any.
const REGION: &str = "us-east-1";

/// Which way a store is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// As the environment says, by a proxy, too.
    Environment,
    /// Without any proxy.
    Direct,
}

/// Opens it; it is not asked for anything yet.
pub(super) fn open(settings: &S3Settings, route: Route) -> Result<AmazonS3, StoreFailure> {
    // reqwest panics where no provider is installed; a program that has chosen one keeps its choice.
    rustls::crypto::ring::default_provider().install_default().ok();
    // What the configuration does not say the environment may, as for other tools (`AWS_ACCESS_KEY_ID` and so on).
    configured(AmazonS3Builder::from_env(), settings, route)
}

fn configured(
    environment: AmazonS3Builder,
    settings: &S3Settings,
    route: Route,
) -> Result<AmazonS3, StoreFailure> {
    let said = |key| environment.get_config_value(&key);
    let plain = match &settings.endpoint {
        Some(endpoint) => endpoint.starts_with("http://").to_string(),
        None => said(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp)).unwrap_or_default(),
    };
    let has_region = said(AmazonS3ConfigKey::Region).is_some();
    // How long an image takes nobody knows: each answer is waited for by who asks. How the client speaks otherwise is not the
    // environment's to say.
    let mut client =
        ClientOptions::new().with_config(ClientConfigKey::AllowHttp, plain).with_timeout_disabled();
    if route == Route::Direct {
        // One that is named keeps the client from those of the environment, and this one is for no name and no address.
        client = client.with_proxy_url("http://proxy.invalid").with_proxy_excludes("*,0.0.0.0/0,::/0");
    }
    let mut builder = environment
        .with_bucket_name(&settings.bucket)
        .with_client_options(client)
        .with_retry(RetryConfig { max_retries: TRIES, retry_timeout: PATIENCE, ..RetryConfig::default() });
    if let Some(region) = &settings.region {
        builder = builder.with_region(region);
    } else if !has_region {
        builder = builder.with_region(REGION);
    }
    if let Some(endpoint) = &settings.endpoint {
        // The environment may have one of S3 alone, which comes before that of all services.
        builder = builder.with_endpoint(endpoint).with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    if let Some((key, file)) = &settings.keys {
        let secret = fs::read_to_string(file).map_err(|source| StoreFailure::File {
            doing: "read",
            path: file.clone(),
            source,
        })?;
        // The environment's token belongs to its own keys, and a store takes none that is not of these.
        let own = AwsCredential { key_id: key.clone(), secret_key: secret.trim().to_owned(), token: None };
        builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(own)));
    }
    builder.build().map_err(failed(&settings.url, "be set up"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        store::section::{Settings, StoreSection},
        testing::{Server, Step, answer},
    };

    fn settings(more: &serde_json::Value) -> S3Settings {
        let mut section = serde_json::json!({"url": "s3://bucket/ours"});
        section.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let section: StoreSection = serde_json::from_value(section).unwrap();
        let Ok(Settings::S3(settings)) = section.settings() else { panic!("{section:?}") };
        settings
    }

    /// It has whatever it is asked for.
    async fn server() -> Server {
        let found = "last-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\netag: x\r\n";
        Server::start(move |_, _| vec![Step::Send(answer("200 OK", found, b"x"))]).await
    }

    #[tokio::test]
    async fn what_the_configuration_says_comes_before_the_environment_and_keys_go_without_its_token() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let directory = tempfile::tempdir().unwrap();
        let secret = directory.path().join("secret");
        fs::write(&secret, "SK\n").unwrap();
        let server = server().await;
        let environment = || {
            AmazonS3Builder::new()
                .with_access_key_id("theirs")
                .with_secret_access_key("theirs")
                .with_token("theirs")
                .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp), "true")
        };
        let own = settings(&serde_json::json!({
            "endpoint": server.url, "access_key": "ours", "secret_key_file": secret,
        }));
        let elsewhere = environment().with_config(AmazonS3ConfigKey::S3Endpoint, "http://127.0.0.1:1");
        let theirs = environment().with_config(AmazonS3ConfigKey::S3Endpoint, &server.url);
        for (s3, key) in [
            (configured(elsewhere, &own, Route::Direct), "ours"),
            (configured(theirs, &settings(&serde_json::json!({})), Route::Direct), "theirs"),
        ] {
            object_store::ObjectStoreExt::get(&s3.unwrap(), &"ours/x".into()).await.unwrap();
            let head = server.heads.lock().unwrap().pop().unwrap();
            assert!(head.contains(&format!("Credential={key}/")), "{head}");
            assert_eq!(head.contains("x-amz-security-token"), key == "theirs", "{head}");
        }
    }

    /// Run once more as a program of its own, whose environment has a proxy: that is read once.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_store_is_reached_by_the_proxy_of_the_environment_or_by_none() {
        let name = "store::bucket::tests::a_store_is_reached_by_the_proxy_of_the_environment_or_by_none";
        const IS_CHILD: &str = "EC_TEST_HAS_PROXY";
        let server = server().await;
        if std::env::var_os(IS_CHILD).is_none() {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args([name, "--exact"]).env(IS_CHILD, "").env("http_proxy", &server.url);
            // What comes before that in the environment of who runs the tests.
            for name in ["HTTP_PROXY", "NO_PROXY", "no_proxy", "REQUEST_METHOD"] {
                child.env_remove(name);
            }
            let output = tokio::task::spawn_blocking(move || child.output()).await.unwrap().unwrap();
            let (told, failed) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success() && told.contains("1 passed"), "{told}{failed}");
            assert_eq!(server.hits(), 1, "of one of both");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let secret = directory.path().join("secret");
        fs::write(&secret, "SK").unwrap();
        let by_name = server.url.replace("127.0.0.1", "localhost");
        let ways = [(&server.url, Route::Direct), (&by_name, Route::Direct), (&by_name, Route::Environment)];
        for ((endpoint, route), hits) in ways.into_iter().zip([1, 2, 2]) {
            let own = settings(&serde_json::json!({
                "endpoint": endpoint, "access_key": "ours", "secret_key_file": secret,
            }));
            let s3 = open(&own, route).unwrap();
            object_store::ObjectStoreExt::get(&s3, &"ours/x".into()).await.unwrap();
            assert_eq!(server.hits(), hits, "{endpoint} {route:?}");
        }
    }
}
