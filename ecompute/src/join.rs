//! `ecompute join`: makes this host a node of a cluster, by a bundle that `eschedule node add` made.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use ec_model::decode;
use ec_pki::{
    Access, Bundle,
    config::{self, Found, quoted, quoted_path, served, trust},
    write,
};
use ec_runtime::exit::Failure;

/// Where the agent looks for its configuration.
pub const DIRECTORY: &str = "/etc/ecompute";

/// The agent's port, for consoles and readings by whoever has a certificate of the cluster.
const PORT: u16 = 18090;

/// The file with the keys of user-data.
const USER_DATA_KEY: &str = "user-data.key";

/// Bytes of a bundle at most: some kilobytes are usual, and a device has no end.
const LARGEST: u64 = 1 << 20;

/// The configuration as it is shipped, which says nothing but defaults and is as good as none.
const SHIPPED: &str = include_str!("../../compute.yaml");

/// What the configuration begins with, by which it is known again.
const MARK: &str = "# Made by `ecompute join`; change it as you like: joining again leaves it as it is.";

/// Installs a bundle; answers what was written.
///
/// Credentials are put in the place of those that were there, the configuration only where there is none.
///
/// # Errors
/// What is wrong with the bundle, or what stands in the way. Then nothing was changed, or what was begun is finished by
/// doing it again.
pub fn join(bundle: &Path, directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut content = Vec::new();
    File::open(bundle)
        .and_then(|file| file.take(LARGEST).read_to_end(&mut content))
        .map_err(|error| Failure::usage(format!("failed to read {}: {error}", bundle.display())))?;
    let bundle: Bundle = decode(&content)
        .map_err(|error| Failure::usage(format!("{} cannot be used: {error}", bundle.display())))?;
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    let failed = |what: &str, path: &Path| {
        let what = format!("failed to {what} {}", path.display());
        move |error: io::Error| Failure::failed(format!("{what}: {error}"))
    };
    let file = directory.join("compute.yaml");
    let known = match config::find(&file, MARK, &[SHIPPED]).map_err(failed("read", &file))? {
        Found::Nothing => None,
        Found::Ours(there) => Some(there),
        Found::Others => {
            return Err(Failure::usage(format!(
                "{} is there already, and is not of a bundle: move it away and join; then put into the new one what you need \
                 of it",
                file.display()
            )));
        }
    };
    if known.as_ref().is_some_and(|there| !there.contains(&format!("uuid: {}\n", bundle.node))) {
        return Err(Failure::usage(format!(
            "{} is of another node than {} ({}): this host is a node already; move it away to make it another",
            file.display(),
            bundle.name,
            bundle.node
        )));
    }
    fs::create_dir_all(&directory).map_err(failed("make directory", &directory))?;
    let mut files = vec![
        ("ca.pem", bundle.authority.clone(), Access::Public),
        ("node.key", bundle.key.clone(), Access::Secret),
        ("node.pem", bundle.certificate.clone(), Access::Public),
        ("node.token", format!("{}\n", bundle.token), Access::Secret),
    ];
    if let Some(keys) = &bundle.user_data_key {
        let there = fs::read_to_string(directory.join(USER_DATA_KEY)).unwrap_or_default();
        files.push((USER_DATA_KEY, with_keys(&there, keys), Access::Secret));
    }
    if known.is_none() {
        // The last: where it is, all that it names is there.
        files.push(("compute.yaml", configuration(&bundle, &directory), Access::Public));
    }
    files
        .into_iter()
        .map(|(name, text, access)| {
            let path = directory.join(name);
            write(&path, &text, access).map_err(failed("write", &path))?;
            Ok(path)
        })
        .collect()
}

/// The keys that are there, where the bundle has none beside: they were turned since it was made; else those of the bundle, with what is
/// there and not in it behind them. What was sealed with any stays readable.
fn with_keys(there: &str, keys: &str) -> String {
    let has = |keys: &str, key: &str| keys.lines().any(|one| one.trim() == key.trim());
    if !keys.trim().is_empty() && keys.lines().all(|key| has(there, key)) {
        return there.to_owned();
    }
    let left = there.lines().filter(|key| !key.trim().is_empty() && !has(keys, key));
    let left: String = left.map(|key| format!("{key}\n")).collect();
    if left.is_empty() { keys.to_owned() } else { format!("{}\n{left}", keys.trim_end()) }
}

fn configuration(bundle: &Bundle, directory: &Path) -> String {
    let [ca, certificate, key] = ["ca.pem", "node.pem", "node.key"].map(|name| directory.join(name));
    let trust = trust(&ca, &certificate, &key);
    // An IPv6 address is reached by IPv6.
    let any = if bundle.host.contains(':') { "[::]" } else { "0.0.0.0" };
    let user_data_key = bundle.user_data_key.as_ref().map_or_else(String::new, |_| {
        format!("  user_data_key: {}\n", quoted_path(&directory.join(USER_DATA_KEY)))
    });
    let members: Vec<_> = bundle.etcd.iter().map(|member| quoted(member)).collect();
    format!(
        "{MARK}\nuuid: {}\nname: {}\nlisten: \"{any}:{PORT}\"\nadvertise: {}\n{}etcd:\n  endpoints: [{}]\n  prefix: \
         {}\n{user_data_key}{trust}placement:\n  endpoint: {}\n  token_file: {}\n{trust}",
        bundle.node,
        quoted(&bundle.name),
        quoted(&bundle.host),
        served(&ca, &certificate, &key),
        members.join(", "),
        quoted(&bundle.prefix),
        quoted(&bundle.placement),
        quoted_path(&directory.join("node.token")),
    )
}

#[cfg(test)]
mod tests {
    use ec_model::{NodeId, encode};

    use super::*;
    use crate::config::Settings;

    fn bundle(node: NodeId) -> Bundle {
        Bundle {
            name: "host1".into(),
            node,
            host: "10.0.0.2".into(),
            etcd: vec!["https://10.0.0.1:2379".into()],
            prefix: "/cloud".into(),
            placement: "https://10.0.0.1:8080".into(),
            authority: "authority".into(),
            certificate: "certificate".into(),
            key: "key".into(),
            token: "token".into(),
            user_data_key: Some("a".repeat(64)),
        }
    }

    #[test]
    fn keys_that_were_turned_since_are_not_turned_back_and_none_is_lost() {
        for (there, bundle, are) in [
            ("", "a", "a"),
            ("a\n", "a\n", "a\n"),
            ("b\na\n", "a\n", "b\na\n"),
            ("a\n", "b\na\n", "b\na\n"),
            ("c\n", "a\n", "a\nc\n"),
        ] {
            assert_eq!(with_keys(there, bundle), are, "{there:?} {bundle:?}");
        }
    }

    #[test]
    fn joining_again_changes_credentials_only_and_never_another_nodes_or_an_operators_configuration() {
        let directory = tempfile::tempdir().unwrap();
        let (file, place) = (directory.path().join("bundle"), directory.path().join("etc"));
        let node = NodeId::new(uuid::Uuid::new_v4());
        let config = place.join("compute.yaml");
        let join_with = |bundle: &Bundle| {
            fs::write(&file, encode(bundle)).unwrap();
            join(&file, &place).map_err(|failure| failure.message)
        };
        fs::create_dir(&place).unwrap();
        fs::write(&config, SHIPPED).unwrap();
        assert_eq!(join_with(&bundle(node)).unwrap().len(), 6);
        let (settings, _) = Settings::load(Some(&config)).map_err(|error| error.to_string()).unwrap();
        assert_eq!((settings.uuid, settings.name.as_str()), (Some(node), "host1"));
        assert_eq!(settings.keys.root(), "/cloud");
        assert_eq!(settings.etcd.user_data_key, Some(place.join("user-data.key")));
        assert_eq!(settings.etcd.endpoints, ["https://10.0.0.1:2379"]);

        let changed = format!("{}bridge: br0\n", fs::read_to_string(&config).unwrap());
        fs::write(&config, &changed).unwrap();
        assert_eq!(join_with(&Bundle { token: "new".into(), ..bundle(node) }).unwrap().len(), 5);
        assert_eq!(fs::read_to_string(place.join("node.token")).unwrap(), "new\n");
        assert_eq!(fs::read_to_string(&config).unwrap(), changed);

        let other = join_with(&bundle(NodeId::new(uuid::Uuid::new_v4()))).unwrap_err();
        assert!(other.contains("another node"), "{other}");
        fs::write(&config, "name: mine\n").unwrap();
        let mine = join_with(&bundle(node)).unwrap_err();
        assert!(mine.contains("not of a bundle"), "{mine}");
        fs::write(&file, "{}").unwrap();
        assert!(join(&file, &place).is_err());
        assert_eq!(fs::read_to_string(place.join("node.token")).unwrap(), "new\n");
    }
}
