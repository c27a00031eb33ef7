//! `scripts/etcd-roles.sh` makes roles for an etcd with passwords, where no program of ours is needed. It must give the rights
//! that the programs' own table has.

use std::{
    collections::BTreeSet,
    error::Error,
    fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    process::{Command, Stdio},
};

use ec_cloud::Part;
use ec_model::{Keyspace, NodeId};
use ec_store::Grant;

/// Knows nobody yet, takes everything, and writes down what it was told.
const ETCDCTL: &str = "#!/bin/sh\necho \"$@\" >>\"$0.log\"\n[ \"$2\" != get ]\n";

/// The rights that the script gives for these words, where it is given this password.
fn given(arguments: &[&str], role: &str, password: &[u8]) -> Result<BTreeSet<Grant>, Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let etcdctl = directory.path().join("etcdctl");
    fs::write(&etcdctl, ETCDCTL)?;
    fs::set_permissions(&etcdctl, fs::Permissions::from_mode(0o755))?;
    let path = std::env::var("PATH")?;
    let mut script = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/etcd-roles.sh"))
        .args(arguments)
        .env("PATH", format!("{}:{path}", directory.path().display()))
        .env("PREFIX", "/cloud/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    script.stdin.take().ok_or("no input")?.write_all(password)?;
    assert!(script.wait()?.success(), "{arguments:?}");
    let told = fs::read_to_string(directory.path().join("etcdctl.log"))?;
    assert!(!told.contains("secret"), "{told}");
    let mut grants = BTreeSet::new();
    for line in told.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let (tree, may, key) = match words[..] {
            ["role", "grant-permission", of, "--prefix", may, key] if of == role => (true, may, key),
            ["role", "grant-permission", of, may, key] if of == role => (false, may, key),
            _ if line.contains("grant-permission") => return Err(format!("not understood: {line}").into()),
            _ => continue,
        };
        assert!(["read", "readwrite"].contains(&may), "{line}");
        grants.insert(Grant { key: key.to_owned(), tree, write: may == "readwrite" });
    }
    Ok(grants)
}

#[test]
fn the_script_gives_each_part_the_rights_that_the_programs_give_it() -> Result<(), Box<dyn Error>> {
    let node = NodeId::new(uuid::Uuid::from_u128(7));
    let name = node.to_string();
    let keys = Keyspace::new("/cloud");
    for (part, arguments, password) in [
        (Part::Node(node), &["node", &name][..], &b"secret\n"[..]),
        (Part::Control, &["control"], b"secret"),
        (Part::Placement, &["placement"], b"secret\n"),
    ] {
        let wanted: BTreeSet<Grant> = part.rights(&keys, &keys.placement()).into_iter().collect();
        assert_eq!(given(arguments, &part.role(), password)?, wanted, "{arguments:?}");
    }
    Ok(())
}
