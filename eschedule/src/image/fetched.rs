//! Images whose bytes are copied from a URL into the image store: their origin is asked once, whatever number of nodes there
//! are.

use std::{env, io, path::PathBuf, time::Duration};

use ec_image::{ImageStore, leads_nowhere};
use ec_model::ImageRef;
use ec_runtime::exit::{Failure, UNREACHABLE, chain};
use futures::TryStreamExt;
use reqwest::{Client, ClientBuilder, Response, StatusCode, Url, header::LOCATION};
use tokio_util::io::StreamReader;

use super::send::{self, Sender};

/// So long nothing may come of what is fetched.
const STALLED: Duration = Duration::from_secs(60);

/// Opens what lies at this URL.
pub(super) async fn sender(url: &str) -> Result<Sender, Failure> {
    let at = ImageRef::at(url);
    if let Some(path) = file(url) {
        let elsewhere = || {
            Failure::usage(format!("{}: a file on another host cannot be read; nothing was added", at.told()))
        };
        return Sender::file(&path.map_err(|()| elsewhere())?).await;
    }
    let unreachable = |error: reqwest::Error| {
        let why = chain(&error.without_url());
        Failure {
            code: UNREACHABLE,
            message: format!("cannot fetch {}{}: {why}; nothing was added", at.told(), by_proxy(url)),
        }
    };
    // Packed or not, the digests are of what is published: nothing is unpacked on the way.
    let client = Client::builder().connect_timeout(STALLED).read_timeout(STALLED);
    let answer = answer(client, url, unreachable).await?;
    let size = answer.content_length();
    let pieces = answer.bytes_stream().map_err(|error| io::Error::other(chain(&error.without_url())));
    Ok(Sender::of(StreamReader::new(Box::pin(pieces)), at.told(), size))
}

/// Opens what lies in the image store at this URL.
pub(super) async fn stored(store: &ImageStore, url: &str) -> Result<Sender, Failure> {
    if file(url).is_some() {
        return sender(url).await;
    }
    let (bytes, size) = store.bytes(url).await.map_err(send::stored)?;
    Ok(Sender::of(StreamReader::new(bytes), url.to_owned(), Some(size)))
}

/// The path of a file's URL, as agents read it.
fn file(url: &str) -> Option<Result<PathBuf, ()>> {
    let url = Url::parse(url).ok().filter(|url| url.scheme() == "file")?;
    Some(url.to_file_path())
}

/// The variables that name a proxy for a scheme, and those for all. Of each two the HTTP client takes the first that is set, also where
/// that is empty.
const PROXIES: [(&str, [&str; 2]); 2] =
    [("http://", ["HTTP_PROXY", "http_proxy"]), ("https://", ["HTTPS_PROXY", "https_proxy"])];
const PROXY_OF_ALL: [&str; 2] = ["ALL_PROXY", "all_proxy"];

/// That a proxy is asked for it, in a sentence's part, where the environment names one: what fails may be that.
pub(super) fn by_proxy(url: &str) -> String {
    proxy_of(url, |name| env::var(name).ok())
        .map(|name| format!(" (by the proxy that `{name}` names, unless `no_proxy` has the host)"))
        .unwrap_or_default()
}

fn proxy_of(url: &str, value: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    let (_, names) = PROXIES.into_iter().find(|(scheme, _)| url.starts_with(scheme))?;
    [names, PROXY_OF_ALL].into_iter().find_map(|names| {
        let (name, value) = names.into_iter().find_map(|name| Some((name, value(name)?)))?;
        (!value.is_empty()).then_some(name)
    })
}

/// What is answered at a URL, where that is what was asked for.
pub(super) async fn answer(
    client: ClientBuilder,
    url: &str,
    unreachable: impl Fn(reqwest::Error) -> Failure,
) -> Result<Response, Failure> {
    let client = client.user_agent(concat!("etcd-compute/", env!("CARGO_PKG_VERSION")));
    // What was asked for in private is not fetched in public, and who it is fetched from next is told nothing of where it was before.
    let client = client.https_only(url.starts_with("https://")).referer(false);
    let client = client.build().map_err(&unreachable)?;
    let answer = client.get(url).send().await.map_err(&unreachable)?;
    // Nobody asked for a part.
    if answer.status().is_success() && answer.status() != StatusCode::PARTIAL_CONTENT {
        return Ok(answer);
    }
    let status = answer.status().as_u16();
    let location = answer.headers().get(LOCATION).and_then(|location| location.to_str().ok());
    let how =
        leads_nowhere(status, location).unwrap_or_else(|| format!("was answered with HTTP status {status}"));
    Err(Failure::failed(format!("{} {how}", ImageRef::at(url).told())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxy_that_is_asked_is_the_one_that_is_named_for_the_scheme() {
        let proxy = |url, set: &[&str]| {
            let empty = |name: &str| set.contains(&&*format!("{name}=")).then(String::new);
            proxy_of(url, |name| {
                set.contains(&name).then(|| "http://proxy".to_owned()).or_else(|| empty(name))
            })
        };
        assert_eq!(proxy("http://host/x", &["https_proxy"]), None);
        assert_eq!(proxy("http://host/x", &["http_proxy", "HTTP_PROXY"]), Some("HTTP_PROXY"));
        assert_eq!(proxy("https://host/x", &["https_proxy", "HTTPS_PROXY"]), Some("HTTPS_PROXY"));
        assert_eq!(proxy("http://host/x", &["all_proxy", "ALL_PROXY"]), Some("ALL_PROXY"));
        // One that is empty is none, and hides the other.
        assert_eq!(proxy("http://host/x", &["HTTP_PROXY=", "http_proxy"]), None);
        assert_eq!(proxy("http://host/x", &["HTTP_PROXY=", "http_proxy", "all_proxy"]), Some("all_proxy"));
        assert_eq!(proxy("http://host/x", &["http_proxy", "ALL_PROXY"]), Some("http_proxy"));
        assert_eq!(proxy("https://host/x", &["http_proxy", "ALL_PROXY"]), Some("ALL_PROXY"));
        assert_eq!(proxy("s3://bucket/x", &["all_proxy"]), None);
    }

    #[test]
    fn a_file_is_the_one_that_agents_read_by_its_url() {
        for (url, path) in [
            ("file:///a%20b.qcow2", Some(Ok("/a b.qcow2"))),
            ("file://localhost/x", Some(Ok("/x"))),
            ("file:///x", Some(Ok("/x"))),
            ("file://elsewhere/x", Some(Err(()))),
            ("https://host/x", None),
        ] {
            assert_eq!(file(url), path.map(|path| path.map(PathBuf::from)), "{url}");
        }
    }
}
