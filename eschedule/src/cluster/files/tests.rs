use std::os::unix::fs::PermissionsExt;

use super::{said::ETCD_DEFAULTS, *};

fn hosts(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// A directory with a cluster, which goes with its first part.
fn begun() -> (tempfile::TempDir, Directory) {
    let place = tempfile::tempdir().unwrap();
    let files = Directory::new(place.path());
    files.complete(&hosts(&["10.0.0.1", "h1"])).unwrap();
    (place, files)
}

/// Gives a node a certificate.
fn give(files: &Directory, user: &str, names: &[&str]) {
    let issued = files.read_authority().unwrap().issue(user, &hosts(names)).unwrap();
    files.keep_given("host1", &issued.certificate).unwrap();
}

/// Run once more as a program of its own, whose umask is another.
#[test]
fn services_may_look_into_the_directory_of_a_cluster_whatever_the_umask() {
    let name = "cluster::files::tests::services_may_look_into_the_directory_of_a_cluster_whatever_the_umask";
    const IS_CHILD: &str = "EC_TEST_HAS_UMASK";
    if std::env::var_os(IS_CHILD).is_none() {
        let mut child = std::process::Command::new("sh");
        child.args(["-c", "umask 077 && exec \"$0\" --exact \"$1\""]).env(IS_CHILD, "");
        let output = child.arg(std::env::current_exe().unwrap()).arg(name).output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && told.contains("1 passed"), "{told}");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let files = Directory::new(&place.path().join("etc"));
    files.complete(&hosts(&["10.0.0.1"])).unwrap();
    assert_eq!(fs::metadata(files.path()).unwrap().permissions().mode() & 0o777, 0o755);
}

#[test]
fn a_lost_authority_is_not_made_anew() {
    let (_place, files) = begun();
    let before = [files.file("ca.key"), files.etcd()].map(|path| fs::read(path).unwrap());
    fs::remove_file(files.authority()).unwrap();
    for told in [files.expect().err(), files.complete(&hosts(&["10.0.0.1"])).err()] {
        let message = told.unwrap().message;
        assert!(message.contains("ca.pem is missing: copy it back"), "{message}");
    }
    assert_eq!([files.file("ca.key"), files.etcd()].map(|path| fs::read(path).unwrap()), before);
    // One that was killed before anybody had a certificate begins anew.
    let place = tempfile::tempdir().unwrap();
    let files = Directory::new(place.path());
    files.write("ca.key", "half").unwrap();
    files.complete(&hosts(&["10.0.0.1"])).unwrap();
}

#[test]
fn with_a_key_that_is_not_the_authoritys_or_without_one_nothing_is_signed() {
    let (_place, files) = begun();
    let pairs = || MEMBERS.map(|(name, _)| [files.pair(name).0, files.pair(name).1].map(fs::read));
    let before = pairs().map(|pair| pair.map(Result::unwrap));
    let (_, other) = Authority::create().unwrap();
    files.write("ca.key", other).unwrap();
    let message = files.renew().err().unwrap().message;
    assert!(
        message.ends_with("ca.key is not the key of ca.pem: put back the one that belongs to it"),
        "{message}"
    );
    fs::remove_file(files.file("ca.key")).unwrap();
    let message = files.renew().err().unwrap().message;
    assert!(message.contains("ca.key: No such file"), "{message}");
    assert!(message.ends_with(": put it back from where you keep it"), "{message}");
    assert_eq!(pairs().map(|pair| pair.map(Result::unwrap)), before);
}

#[tokio::test]
async fn init_says_renew_where_a_pair_does_not_fit_and_not_that_etcd_is_to_be_started() {
    ec_runtime::install_tls_provider();
    let (place, files) = begun();
    fs::copy(files.file("eschedule.key"), files.file("root.key")).unwrap();
    let failure = super::super::init(place.path(), &[], false, crate::cli::Output::Table).await.unwrap_err();
    assert!(failure.message.contains("root.key is not the key of"), "{}", failure.message);
    assert!(failure.message.contains("`eschedule cluster renew"), "{}", failure.message);
}

#[test]
fn pairs_that_do_not_fit_are_told_and_renewed_and_empty_secrets_are_made() {
    let (_place, files) = begun();
    assert_eq!(files.unfit().unwrap(), None);
    // As a `renew` leaves it that is killed between the two.
    let before = fs::read(files.file("etcd.pem")).unwrap();
    files.renew().unwrap();
    fs::write(files.file("etcd.pem"), before).unwrap();
    fs::write(files.file("eschedule.key"), "").unwrap();
    fs::write(files.file("eplacement.pem"), "").unwrap();
    let told = files.unfit().unwrap().unwrap();
    for what in [
        "/etcd.key is not the key of",
        "no key in",
        "no certificate in",
        "`eschedule cluster renew --directory",
    ] {
        assert!(told.contains(what), "{told}");
    }
    files.renew().unwrap();
    assert_eq!(files.unfit().unwrap(), None);
    assert_eq!(files.unnamed(&hosts(&["10.0.0.1", "h1"])), None, "for the same names");

    fs::write(files.file("eschedule.token"), "\n").unwrap();
    fs::write(files.file(USER_DATA_KEY), "").unwrap();
    assert_eq!(files.complete(&[]).unwrap(), ["eschedule.token", USER_DATA_KEY]);
    assert_eq!(files.token("eschedule").unwrap().len(), 64);
    give(&files, "ecompute-1", &["h2"]);
    fs::write(files.file(USER_DATA_KEY), "").unwrap();
    let message = files.complete(&[]).err().unwrap().message;
    assert!(message.contains("user-data.key is empty: copy it back"), "{message}");
}

#[test]
fn a_lost_key_of_user_data_is_made_anew_only_where_no_node_has_it() {
    let (_place, files) = begun();
    let key = files.file(USER_DATA_KEY);
    assert!(files.seals());
    fs::remove_file(&key).unwrap();
    assert_eq!(files.complete(&[]).unwrap(), [USER_DATA_KEY]);
    give(&files, "ecompute-1", &["h2"]);
    fs::remove_file(&key).unwrap();
    let message = files.complete(&[]).err().unwrap().message;
    assert!(message.contains("user-data.key is missing: copy it back"), "{message}");
    // Where nothing was sealed with it, nodes have none.
    fs::write(files.schedule(), "etcd:\n  # user_data_key: x\n").unwrap();
    assert!(!files.seals());
    assert_eq!(files.complete(&[]).unwrap(), [USER_DATA_KEY]);
}

#[test]
fn whom_an_operator_gave_a_key_to_reads_the_next_one_too() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let (_place, files) = begun();
    let key = files.file("eschedule.key");
    let before = fs::read(&key).unwrap();
    let is = || fs::metadata(&key).map(|key| (key.mode() & 0o777, key.gid())).unwrap();
    // Only root can give it to a group that is not its own.
    let group = if Uid::effective().is_root() { 12345 } else { is().1 };
    std::os::unix::fs::chown(&key, None, Some(group)).unwrap();
    for (mode, kept) in [(0o640, 0o640), (0o644, 0o600)] {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        files.renew().unwrap();
        assert_eq!(is().0, kept);
        assert!(kept == 0o600 || is().1 == group);
    }
    assert_ne!(fs::read(&key).unwrap(), before);
}

#[test]
fn configuration_is_made_for_a_host_that_is_named() {
    let (_place, files) = begun();
    let shipped = include_str!("../../../../schedule.yaml");
    // As where the package was purged and installed again.
    fs::write(files.schedule(), shipped).unwrap();
    fs::remove_file(files.file("root.pem")).unwrap();
    for told in [files.complete(&[]).err(), files.expect_made("schedule.yaml").err()] {
        let message = told.unwrap().message;
        assert!(message.contains("schedule.yaml is missing, or as it was shipped"), "{message}");
    }
    assert!(!files.file("root.pem").exists(), "nothing is made by halves");
    files.complete(&hosts(&["10.0.0.1"])).unwrap();
    files.expect_made("schedule.yaml").unwrap();
    assert_eq!(files.complete(&[]).unwrap(), hosts(&[]));
    // Where its unit looks; and a key that is on another host.
    fs::remove_file(files.etcd()).unwrap();
    fs::remove_file(files.file("eplacement.key")).unwrap();
    assert_eq!((files.complete(&[]).unwrap(), files.unfit().unwrap()), (hosts(&[]), None));
    fs::remove_file(files.file("eplacement.yaml")).unwrap();
    let message = files.complete(&[]).err().unwrap().message;
    assert!(message.contains("eplacement.yaml is missing"), "{message}");
}

#[test]
fn names_that_certificates_are_not_for_are_told() {
    let (_place, files) = begun();
    assert_eq!(files.unnamed(&hosts(&["H1", "10.0.0.1", "0:0::1"])), None);
    let told = files.unnamed(&hosts(&["h1", "control.example"])).unwrap();
    assert!(told.contains("not for control.example: move them away (mv /"), "{told}");
    assert!(told.contains("/etcd.pem") && told.contains("/eplacement.pem"), "{told}");
}

#[tokio::test]
async fn an_etcd_at_an_address_that_this_host_had_is_told_with_the_files_that_name_it() {
    ec_runtime::install_tls_provider();
    let (place, files) = begun();
    let at = |endpoint: &str| [endpoint.to_owned()];
    let old = at("https://10.0.0.1:2379");
    assert_eq!(files.moved(&hosts(&["10.0.0.1", "h1"]), &old), None);
    assert_eq!(files.moved(&[], &old), None);
    for own in ["localhost:2379", "https://[::1]:2379"] {
        assert_eq!(files.moved(&hosts(&["10.0.0.9"]), &at(own)), None);
    }
    assert_eq!(files.moved(&hosts(&["fd00::1"]), &at("https://[fd00:0::1]:2379")), None);
    fs::remove_file(files.file("controller.yaml")).unwrap();
    let told = files.moved(&hosts(&["10.0.0.9", "h1"]), &old).unwrap();
    assert!(told.contains("schedule.yaml has etcd at 10.0.0.1, which is none of 10.0.0.9, h1"), "{told}");
    for (name, is_named) in [("etcd", true), ("eplacement", true), ("controller", false)] {
        assert_eq!(told.contains(&format!("/{name}.yaml ")), is_named, "{told}");
    }
    assert!(told.contains("/schedule.yaml, start etcd"), "{told}");

    // Nothing answers there, and that is not told as an etcd that is to be started.
    let text = fs::read_to_string(files.schedule()).unwrap();
    fs::write(files.schedule(), text.replace("10.0.0.1:2379", "127.0.0.2:1")).unwrap();
    for name in ["etcd.pem", "eplacement.pem"] {
        fs::remove_file(files.file(name)).unwrap();
    }
    let named = hosts(&["10.0.0.9"]);
    let init = super::super::init(place.path(), &named, false, crate::cli::Output::Table);
    let failure = init.await.unwrap_err();
    assert_eq!(failure.code, ec_runtime::exit::UNREACHABLE);
    assert!(failure.message.contains("has etcd at 127.0.0.2, which is none of 10.0.0.9"), "{failure:?}");
}

#[test]
fn services_are_started_as_such_where_there_are_some() {
    let root = tempfile::tempdir().unwrap();
    let files = Directory::new(Path::new(DIRECTORY));
    let told = |files: &Directory| (files.start_etcd_of(root.path()), files.start_control_of(root.path()));
    let put = |file: &str| {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    };
    for service in ["etcd", "eplacement", "econtroller"] {
        put(&format!("usr/lib/systemd/system/{service}.service"));
    }
    put(ETCD_DEFAULTS);
    // systemd does not run.
    assert_eq!(told(&files).0, "etcd --config-file /etc/ecompute/etcd.yaml");
    assert!(told(&files).1.starts_with("start `eplacement --config"));
    fs::create_dir_all(root.path().join("run/systemd/system")).unwrap();
    assert_eq!(
        told(&files),
        (
            "echo ETCD_CONFIG_FILE=/etc/ecompute/etcd.yaml >>/etc/default/etcd && systemctl restart etcd"
                .into(),
            "systemctl enable --now eplacement econtroller".into()
        )
    );
    // They read no other directory.
    let (etcd, control) = told(&Directory::new(Path::new("/srv/cluster")));
    assert_eq!(etcd, "etcd --config-file /srv/cluster/etcd.yaml");
    assert!(control.starts_with("start `eplacement --config /srv/"), "{control}");
}

#[test]
fn what_a_node_was_given_tells_its_hosts_and_stays_known_when_it_is_revoked() {
    let (_place, files) = begun();
    assert_eq!(files.hosts_given("ecompute-1").ok().unwrap(), hosts(&[]));
    give(&files, "ecompute-1", &["10.0.0.2", "h2"]);
    give(&files, "ecompute-2", &["h3"]);
    assert_eq!(files.hosts_given("ecompute-1").ok().unwrap(), hosts(&["10.0.0.2", "h2"]));
    assert!(files.revoked_users().ok().unwrap().is_empty());
    // Also where it is said again.
    for _ in 0..2 {
        assert_eq!(files.revoke_given("ecompute-1").ok().unwrap(), 1);
        assert_eq!(files.hosts_given("ecompute-1").ok().unwrap(), hosts(&["10.0.0.2", "h2"]));
    }
    assert_eq!(files.revoked_users().ok().unwrap(), ["ecompute-1".to_owned()].into());
    give(&files, "ecompute-1", &["h2"]);
    assert!(files.revoked_users().ok().unwrap().is_empty());
}

#[test]
fn a_node_whose_newest_certificate_ends_is_told_with_what_helps() {
    let (_place, files) = begun();
    give(&files, "ecompute-1", &["h1"]);
    let ended = |name: &str, user: &str| {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, user);
        params.not_after = rcgen::date_time_ymd(2025, 1, 2);
        let certificate = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
        files.keep_given(name, &certificate.pem()).unwrap();
    };
    // It was given another since.
    ended("host1", "ecompute-1");
    assert_eq!(files.ending_given().unwrap(), hosts(&[]));
    ended("host-2", "ecompute-2");
    let [told] = files.ending_given().unwrap().try_into().unwrap();
    assert!(
        told.starts_with(
            "the certificate of node host-2 ran out on 2025-01-02: `eschedule node add host-2 --again --dir"
        ),
        "{told}"
    );
}

#[test]
fn what_is_left_of_a_node_that_nobody_knows_is_revoked_by_its_name() {
    let (_place, files) = begun();
    let issued = files.read_authority().unwrap();
    for (name, user) in [("host1", "ecompute-1"), ("HOST1", "ecompute-2"), ("host1-a", "ecompute-3")] {
        files.keep_given(name, &issued.issue(user, &hosts(&["h"])).unwrap().certificate).unwrap();
    }
    // Revoked by another call between the two looks of this one.
    let gone = files.file("nodes/host1-0.pem");
    std::os::unix::fs::symlink(files.file("nowhere"), &gone).unwrap();
    files.revoke_left("host1", &["ecompute-2".to_owned()].into()).unwrap();
    assert_eq!(files.revoked_users().unwrap(), ["ecompute-1".to_owned()].into());
    files.revoke_left("Host1", &BTreeSet::new()).unwrap();
    let both = ["ecompute-1", "ecompute-2"].map(str::to_owned);
    assert_eq!(files.revoked_users().unwrap(), both.into());
}
