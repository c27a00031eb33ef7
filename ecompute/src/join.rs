//! `ecompute join`: makes this host a node of a cluster, by a bundle that `eschedule node add` made.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use ec_metadata::RecordDir;
use ec_model::{NodeId, decode};
use ec_pki::{
    Access, Bundle,
    config::{self, Found, quoted, quoted_path, served, trust},
    is_same_authority, make_directory, write, write_pair,
};
use ec_runtime::exit::{Failure, chain};

use crate::{
    config::{RECORDS, Settings},
    identity,
};

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

/// What came of a bundle.
pub struct Joined {
    /// What was written.
    pub written: Vec<PathBuf>,
    /// What is to be known of it: whose certificates were believed before, and what a configuration that was there and stays as it is
    /// says otherwise than the bundle.
    pub told: Vec<String>,
}

/// Installs a bundle, on a host whose guests are those of `state_dir`.
///
/// Credentials are put in the place of those that were there, the configuration only where there is none.
///
/// # Errors
/// What is wrong with the bundle, or what stands in the way. Then nothing was changed, or what was begun is finished by
/// doing it again.
pub fn join(bundle: &Path, directory: &Path, state_dir: &Path) -> Result<Joined, Failure> {
    let mut content = Vec::new();
    File::open(bundle)
        .and_then(|file| file.take(LARGEST).read_to_end(&mut content))
        .map_err(|error| Failure::usage(format!("failed to read {}: {error}", bundle.display())))?;
    let unusable = |why: &dyn Display| {
        Failure::usage(format!("{} cannot be used, and nothing was changed: {why}", bundle.display()))
    };
    let bundle: Bundle = decode(&content).map_err(|error| unusable(&error))?;
    bundle.check().map_err(|why| unusable(&format!("{why}; make another by `eschedule node add`")))?;
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
    if known.as_ref().is_some_and(|there| !is_of(there, &file, bundle.node)) {
        return Err(Failure::usage(format!(
            "{} is of another node than {} ({}): this host is a node already; move it away to make it another",
            file.display(),
            bundle.name,
            bundle.node
        )));
    }
    let [authority, key, certificate] = ["ca.pem", "node.key", "node.pem"].map(|name| directory.join(name));
    // One that was renewed is the same, with another day at which it ends.
    let is_other = |there: &str| there != bundle.authority && !is_same_authority(there, &bundle.authority);
    if known.is_none() {
        match fs::read_to_string(&authority) {
            Ok(there) if is_other(&there) => {
                return Err(Failure::usage(format!(
                    "{} is of another cluster than the bundle, and what is of that would believe nobody any more: move it away to \
                     make this host a node of the bundle's",
                    authority.display()
                )));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("read", &authority)(error));
            }
            _ => {}
        }
        identity::refuse_other(state_dir, &RecordDir::reader(state_dir.join(RECORDS)), bundle.node)
            .map_err(|error| Failure::failed(chain(&error)))?;
    }
    // Its cluster was made anew, perhaps; who did that knows.
    let before = fs::read_to_string(&authority).ok().filter(|there| known.is_some() && is_other(there));
    make_directory(&directory).map_err(failed("make directory", &directory))?;
    let mut files = vec![("node.token", format!("{}\n", bundle.token), Access::Secret)];
    if let Some(keys) = &bundle.user_data_key {
        let path = directory.join(USER_DATA_KEY);
        let there = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            // What cannot be read may be all that opens what was sealed.
            there => there.map_err(failed("read", &path))?,
        };
        files.push((USER_DATA_KEY, with_keys(&there, keys), Access::Secret));
    }
    if known.is_none() {
        // The last: where it is, all that it names is there.
        files.push(("compute.yaml", configuration(&bundle, &directory), Access::Public));
    }
    write(&authority, &bundle.authority, Access::Public).map_err(failed("write", &authority))?;
    write_pair([(&key, &bundle.key, Access::Secret), (&certificate, &bundle.certificate, Access::Public)])
        .map_err(|(path, error)| failed("write", &path)(error))?;
    let changed = before.map(|_| {
        format!(
            "{} was of another authority than the bundle's: this node is of the bundle's cluster now, and of no other",
            authority.display()
        )
    });
    let mut written = vec![authority, key, certificate];
    for (name, text, access) in files {
        let path = directory.join(name);
        write(&path, &text, access).map_err(failed("write", &path))?;
        written.push(path);
    }
    let differs = known.and_then(|_| differs(&bundle, &directory, &file));
    Ok(Joined { written, told: changed.into_iter().chain(differs).collect() })
}

/// Whether a configuration that is there is this node's, however that is written; of one that is wrong, as it was made.
fn is_of(there: &str, file: &Path, node: NodeId) -> bool {
    match Settings::load(Some(file)) {
        Ok((settings, _)) => settings.uuid == Some(node),
        Err(_) => there.contains(&format!("uuid: {node}\n")),
    }
}

/// What a configuration says otherwise than a bundle; nothing of one that is wrong, which `ecompute --check` tells.
fn differs(bundle: &Bundle, directory: &Path, file: &Path) -> Option<String> {
    let (settings, _) = Settings::load(Some(file)).ok()?;
    let members: Vec<_> = bundle.etcd.iter().map(|member| quoted(member)).collect();
    let keys = directory.join(USER_DATA_KEY);
    let placement = |url: &str| url.trim_end_matches('/').to_owned();
    let lines = [
        (settings.name != bundle.name, format!("name: {}", quoted(&bundle.name))),
        (settings.advertise.as_ref() != Some(&bundle.host), format!("advertise: {}", quoted(&bundle.host))),
        (settings.etcd.endpoints != bundle.etcd, format!("etcd.endpoints: [{}]", members.join(", "))),
        (settings.keys.root() != bundle.prefix, format!("etcd.prefix: {}", quoted(&bundle.prefix))),
        (
            bundle.user_data_key.is_some() && settings.etcd.user_data_key.is_none(),
            format!("etcd.user_data_key: {}", quoted_path(&keys)),
        ),
        (
            placement(&settings.placement.endpoint) != placement(&bundle.placement),
            format!("placement.endpoint: {}", quoted(&bundle.placement)),
        ),
    ];
    let lines: Vec<_> = lines.into_iter().filter_map(|(is_other, line)| is_other.then_some(line)).collect();
    (!lines.is_empty()).then(|| {
        format!(
            "{} stays as it is; the bundle says otherwise, change it if that is right: {}",
            file.display(),
            lines.join("; ")
        )
    })
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
    use std::os::unix::fs::PermissionsExt;

    use ec_model::encode;
    use ec_pki::Authority;

    use super::*;
    use crate::config::Settings;

    /// One that works, of that authority.
    fn bundle_of(authority: &Authority, node: NodeId) -> Bundle {
        let issued = authority.issue(&node.user(), &["10.0.0.2".into()]).unwrap();
        Bundle {
            name: "host1".into(),
            node,
            host: "10.0.0.2".into(),
            etcd: vec!["https://10.0.0.1:2379".into()],
            prefix: "/cloud".into(),
            placement: "https://10.0.0.1:8080".into(),
            authority: authority.certificate().to_owned(),
            certificate: issued.certificate,
            key: issued.key,
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
        let [file, place, state] = ["bundle", "etc", "state"].map(|name| directory.path().join(name));
        let node = NodeId::new(uuid::Uuid::new_v4());
        let (authority, _) = Authority::create().unwrap();
        let bundle = |node| bundle_of(&authority, node);
        let config = place.join("compute.yaml");
        let join_with = |bundle: &Bundle| {
            fs::write(&file, encode(bundle)).unwrap();
            join(&file, &place, &state)
                .map(|joined| (joined.written.len(), joined.told))
                .map_err(|failure| failure.message)
        };
        fs::create_dir(&place).unwrap();
        fs::write(&config, SHIPPED).unwrap();
        assert_eq!(join_with(&bundle(node)).unwrap(), (6, vec![]));
        let (settings, _) = Settings::load(Some(&config)).map_err(|error| error.to_string()).unwrap();
        assert_eq!((settings.uuid, settings.name.as_str()), (Some(node), "host1"));
        assert_eq!(settings.keys.root(), "/cloud");
        assert_eq!(settings.etcd.user_data_key, Some(place.join("user-data.key")));
        assert_eq!(settings.etcd.endpoints, ["https://10.0.0.1:2379"]);

        let changed = format!("{}bridge: br0\n", fs::read_to_string(&config).unwrap());
        fs::write(&config, &changed).unwrap();
        assert_eq!(join_with(&Bundle { token: "new".into(), ..bundle(node) }).unwrap(), (5, vec![]));
        assert_eq!(fs::read_to_string(place.join("node.token")).unwrap(), "new\n");
        assert_eq!(fs::read_to_string(&config).unwrap(), changed);

        // What it lacks is told.
        let key = |line: &&str| !line.contains("user_data_key");
        let lacking: Vec<_> = changed.lines().filter(key).collect();
        fs::write(&config, lacking.join("\n")).unwrap();
        let elsewhere = Bundle { host: "10.0.0.9".into(), token: "new".into(), ..bundle(node) };
        let told = join_with(&elsewhere).unwrap().1.concat();
        assert!(told.contains("right: advertise: \"10.0.0.9\"; etcd.user_data_key: \"/"), "{told}");
        fs::write(&config, changed.replace("https://10.0.0.1:8080\"", "https://10.0.0.1:8080/\"")).unwrap();
        let moved = Bundle {
            name: "host2".into(),
            placement: "https://10.0.0.9:8080".into(),
            token: "new".into(),
            ..bundle(node)
        };
        let told = join_with(&moved).unwrap().1.concat();
        assert!(
            told.contains(r#"right: name: "host2"; placement.endpoint: "https://10.0.0.9:8080""#),
            "{told}"
        );
        assert_eq!(join_with(&Bundle { token: "new".into(), ..bundle(node) }).unwrap(), (5, vec![]));
        // The same node however its uuid is written; where its file is wrong, as it was made.
        let uuid = format!("uuid: {node}\n");
        for (line, told) in [
            (format!("uuid: \"{node}\"  # ours\n"), Ok(())),
            (format!("uuid: {node}\r\n"), Ok(())),
            (format!("uuid: {node}\nmisspelled: 1\n"), Ok(())),
            (format!("# uuid: {node}\nuuid: {}\n", uuid::Uuid::nil()), Err("another node")),
        ] {
            fs::write(&config, changed.replace(&uuid, &line)).unwrap();
            let joined = join_with(&Bundle { token: "new".into(), ..bundle(node) });
            match told {
                Ok(()) => assert_eq!(joined.unwrap(), (5, vec![]), "{line}"),
                Err(why) => assert!(joined.unwrap_err().contains(why), "{line}"),
            }
        }
        fs::write(&config, &changed).unwrap();

        // Keys that cannot be read are not written over, and then nothing else is.
        let keys = place.join("user-data.key");
        fs::write(&keys, b"\xff").unwrap();
        let unread = join_with(&Bundle { token: "newer".into(), ..bundle(node) }).unwrap_err();
        assert!(unread.contains("failed to read") && unread.contains("user-data.key"), "{unread}");
        assert_eq!(fs::read(&keys).unwrap(), b"\xff");

        let other = join_with(&bundle(NodeId::new(uuid::Uuid::new_v4()))).unwrap_err();
        assert!(other.contains("another node"), "{other}");
        fs::write(&config, "name: mine\n").unwrap();
        let mine = join_with(&bundle(node)).unwrap_err();
        assert!(mine.contains("not of a bundle"), "{mine}");
        fs::write(&file, "{}").unwrap();
        assert!(join(&file, &place, &state).is_err());
        assert_eq!(fs::read_to_string(place.join("node.token")).unwrap(), "new\n");
    }

    /// Run once more as a program of its own, whose umask is another.
    #[test]
    fn a_directory_that_join_makes_can_be_looked_into() {
        let name = "join::tests::a_directory_that_join_makes_can_be_looked_into";
        const IS_CHILD: &str = "EC_TEST_HAS_UMASK";
        if std::env::var_os(IS_CHILD).is_none() {
            let mut child = std::process::Command::new("sh");
            child.args(["-c", "umask 077 && exec \"$0\" --exact \"$1\""]).env(IS_CHILD, "");
            let output = child.arg(std::env::current_exe().unwrap()).arg(name).output().unwrap();
            let told = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && told.contains("1 passed"), "{told}");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let [file, place, state] = ["bundle", "etc", "state"].map(|name| directory.path().join(name));
        let (authority, _) = Authority::create().unwrap();
        fs::write(&file, encode(&bundle_of(&authority, NodeId::new(uuid::Uuid::from_u128(1))))).unwrap();
        join(&file, &place, &state).unwrap();
        assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn what_is_of_another_cluster_or_the_node_of_other_guests_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let [file, place, state] = ["bundle", "etc", "state"].map(|name| directory.path().join(name));
        let [old, new] = [1, 2].map(|number| NodeId::new(uuid::Uuid::from_u128(number)));
        let (authority, _) = Authority::create().unwrap();
        let join_as = |node| {
            fs::write(&file, encode(&bundle_of(&authority, node))).unwrap();
            join(&file, &place, &state).map(|joined| joined.told.concat()).map_err(|failure| failure.message)
        };
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("ca.pem"), "another").unwrap();
        let why = join_as(new).unwrap_err();
        assert!(why.contains("ca.pem is of another cluster"), "{why}");
        assert_eq!(fs::read_to_string(place.join("ca.pem")).unwrap(), "another");
        fs::write(place.join("ca.pem"), authority.certificate()).unwrap();
        fs::create_dir_all(state.join(RECORDS)).unwrap();
        fs::write(state.join("uuid"), old.to_string()).unwrap();
        fs::write(state.join(RECORDS).join(format!("{}.json", uuid::Uuid::nil())), "{}").unwrap();
        let why = join_as(new).unwrap_err();
        assert!(why.contains(&format!("the guests here are node {old}'s")), "{why}");
        assert_eq!(fs::read_dir(&place).unwrap().count(), 1, "nothing else is written");
        assert_eq!(join_as(old).unwrap(), "");
        // Of a node that is known its own cluster decides, which may have been made anew.
        fs::write(place.join("ca.pem"), "another").unwrap();
        let told = join_as(old).unwrap();
        assert!(told.contains("ca.pem was of another authority"), "{told}");
        assert_eq!(fs::read_to_string(place.join("ca.pem")).unwrap(), authority.certificate());
        // One that was renewed is no other, for a node that is known and for one that is not.
        for there in [true, false] {
            fs::write(place.join("ca.pem"), authority.renewed().unwrap()).unwrap();
            if !there {
                fs::remove_file(place.join("compute.yaml")).unwrap();
            }
            assert_eq!(join_as(old).unwrap(), "");
            assert_eq!(fs::read_to_string(place.join("ca.pem")).unwrap(), authority.certificate());
        }
    }

    #[test]
    fn a_bundle_that_cannot_work_changes_nothing_of_a_node_that_does() {
        let directory = tempfile::tempdir().unwrap();
        let [file, place, state] = ["bundle", "etc", "state"].map(|name| directory.path().join(name));
        let node = NodeId::new(uuid::Uuid::from_u128(1));
        let (authority, _) = Authority::create().unwrap();
        let join_with = |bundle: &Bundle| {
            fs::write(&file, encode(bundle)).unwrap();
            join(&file, &place, &state).map(|_| ()).map_err(|failure| failure.message)
        };
        let good = bundle_of(&authority, node);
        // Nor does it make one.
        let keyless = Bundle { key: String::new(), ..good.clone() };
        join_with(&keyless).unwrap_err();
        assert!(!place.exists());
        join_with(&good).unwrap();
        let files = || {
            let names = ["ca.pem", "node.key", "node.pem", "node.token", "user-data.key", "compute.yaml"];
            names.map(|name| fs::read_to_string(place.join(name)).unwrap())
        };
        let before = files();
        let another = bundle_of(&Authority::create().unwrap().0, node);
        for broken in [
            keyless,
            Bundle { key: another.key, ..good.clone() },
            Bundle { authority: another.authority, ..good.clone() },
            Bundle { token: "token\r\n".into(), ..good.clone() },
        ] {
            let why = join_with(&broken).unwrap_err();
            assert!(why.contains("bundle cannot be used, and nothing was changed: its "), "{why}");
            assert!(!why.contains('\n'), "{why}");
            assert_eq!(files(), before);
        }
    }
}
