use std::{collections::BTreeSet, os::unix::fs::PermissionsExt, time::Instant};

use super::*;

fn id(number: u32) -> InstanceId {
    format!("7d3c1f0a-2b4e-4c55-9a7e-{number:012}").parse().unwrap()
}

fn record(number: u32) -> InstanceRecord {
    InstanceRecord {
        version: RECORD_VERSION,
        instance: id(number),
        name: format!("guest-{number}"),
        macs: vec![id(number).mac(0), id(number).mac(1)],
        base_digest: None,
        next_base_digest: None,
        next_wished_at: None,
        next_is_whole: false,
        rescue_base_digest: None,
        rebuilt: None,
        rescued: None,
        resized: None,
        resources_before: None,
        growing: None,
        intent: None,
        metadata: std::collections::BTreeMap::new(),
        keys: vec!["ssh-ed25519 AAAA me".into()],
        user_data: Some(Blob(vec![0, 255, b'\n'])),
        token_required: false,
        project: "p".into(),
        resources: ec_model::Resources::new(),
        started: false,
        created_at: Timestamp::UNIX_EPOCH,
    }
}

#[test]
fn a_record_is_found_by_any_of_its_addresses_until_it_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let records = RecordDir::open(dir.path().join("state/instances")).unwrap();
    let reader = RecordDir::reader(dir.path().join("state/instances"));
    assert_eq!(reader.find_by_mac(id(1).mac(0)).unwrap(), None);
    records.put(&record(1)).unwrap();
    records.put(&record(2)).unwrap();
    for dir in [&records, &reader] {
        assert_eq!(dir.find_by_mac(id(1).mac(1)).unwrap(), Some(record(1)));
        assert_eq!(dir.find_by_mac(id(2).mac(0)).unwrap(), Some(record(2)));
        assert_eq!(dir.find_by_mac(id(3).mac(0)).unwrap(), None);
    }
    records.remove(id(1)).unwrap();
    records.remove(id(1)).unwrap();
    assert_eq!(reader.find_by_mac(id(1).mac(0)).unwrap(), None);
    assert_eq!(records.list().unwrap(), [(id(2), Some(record(2)))]);
    assert_eq!(records.get(id(1)).unwrap(), None);
}

#[test]
fn a_change_is_seen_at_once_even_within_one_tick_of_the_clock() {
    let dir = tempfile::tempdir().unwrap();
    let records = RecordDir::open(dir.path()).unwrap();
    for number in 0..200 {
        records.put(&record(number)).unwrap();
        assert!(records.find_by_mac(id(number).mac(0)).unwrap().is_some());
        let renamed = InstanceRecord { macs: vec![id(number).mac(7)], ..record(number) };
        records.put(&renamed).unwrap();
        assert!(records.find_by_mac(id(number).mac(0)).unwrap().is_none());
        assert_eq!(records.find_by_mac(id(number).mac(7)).unwrap(), Some(renamed));
    }
}

#[test]
fn a_record_of_before_there_were_tokens_to_require_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let records = RecordDir::open(dir.path()).unwrap();
    let text = serde_json::to_string(&record(1)).unwrap();
    assert!(text.contains("\"token_required\":false"), "{text}");
    fs::write(records.path(id(1)), text.replace("\"token_required\":false,", "")).unwrap();
    assert_eq!(records.get(id(1)).unwrap(), Some(record(1)));
}

#[test]
fn a_directory_that_is_not_there_yet_is_an_empty_one() {
    let dir = tempfile::tempdir().unwrap();
    let reader = RecordDir::reader(dir.path().join("later"));
    assert_eq!(reader.find_by_mac(id(1).mac(0)).unwrap(), None);
    assert!(reader.list().unwrap().is_empty());
    RecordDir::open(dir.path().join("later")).unwrap().put(&record(1)).unwrap();
    assert!(reader.find_by_mac(id(1).mac(0)).unwrap().is_some());
}

#[test]
fn files_and_directory_are_for_their_owner_only_and_leftovers_are_swept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("instances");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let records = RecordDir::open(&path).unwrap();
    records.put(&record(1)).unwrap();
    assert_eq!((mode(&path), mode(&records.path(id(1)))), (0o700, 0o600));
    fs::write(path.join(format!("{TEMPORARY}{}", id(2))), "half").unwrap();
    RecordDir::open(&path).unwrap();
    let names = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: BTreeSet<_> = names.collect();
    assert_eq!(names, [format!("{}.json", id(1)), "spare".to_owned(), "spare-record".to_owned()].into());
    // And one that was left since is no obstacle.
    fs::write(path.join(format!("{TEMPORARY}{}", id(2))), "half").unwrap();
    records.put(&record(2)).unwrap();
    assert_eq!(records.list().unwrap().len(), 2);
}

#[test]
fn damaged_records_are_passed_over_and_the_others_serve() {
    let dir = tempfile::tempdir().unwrap();
    let records = RecordDir::open(dir.path()).unwrap();
    records.put(&record(1)).unwrap();
    let good = fs::read(records.path(id(1))).unwrap();
    let text = String::from_utf8(good).unwrap();
    for (number, content) in [
        (2, String::new()),
        (3, "{".to_owned()),
        (4, text.replace("\"version\":1", "\"version\":99")),
        (5, text.clone()),
        (6, "x".repeat(2 << 20)),
    ] {
        fs::write(records.path(id(number)), content).unwrap();
    }
    // The system itself fails to read it.
    fs::create_dir(records.path(id(7))).unwrap();
    fs::write(dir.path().join("notes.json"), "{}").unwrap();
    let (read, unreadable): (Vec<_>, Vec<_>) =
        records.list().unwrap().into_iter().partition(|(_, record)| record.is_some());
    assert_eq!(
        (read, unreadable.len()),
        (vec![(id(1), Some(record(1)))], 6),
        "those are there, and cannot be read"
    );
    assert_eq!(records.find_by_mac(id(1).mac(0)).unwrap(), Some(record(1)));
    assert_eq!(records.find_by_mac(id(3).mac(0)).unwrap(), None);
    // Put right, it serves again.
    records.put(&record(3)).unwrap();
    assert_eq!(records.find_by_mac(id(3).mac(0)).unwrap(), Some(record(3)));
}

#[test]
fn a_thousand_instances_are_looked_up_within_milliseconds() {
    let dir = tempfile::tempdir().unwrap();
    let records = RecordDir::open(dir.path()).unwrap();
    for number in 0..1000 {
        let json = serde_json::to_vec(&record(number)).unwrap();
        fs::write(records.path(id(number)), json).unwrap();
    }
    let past = SystemTime::now() - Duration::from_secs(60);
    File::open(dir.path()).unwrap().set_modified(past).unwrap();
    records.find_by_mac(id(0).mac(0)).unwrap();
    let begun = Instant::now();
    for number in 0..1000 {
        assert!(records.find_by_mac(id(number).mac(0)).unwrap().is_some());
    }
    let each = begun.elapsed() / 1000;
    assert!(each < Duration::from_millis(2), "{each:?}");
}

#[test]
fn a_directory_that_is_read_in_part_is_not_taken_for_whole() {
    let file = |name: &str| Ok(Path::new("/records").join(name));
    let whole = [file(&format!("{}.json", id(1))), file("lost+found"), file(".new-1")];
    let found = instances(whole.into_iter()).unwrap();
    assert_eq!(found, [(id(1), Path::new("/records").join(format!("{}.json", id(1))))]);
    let broken = [file(&format!("{}.json", id(1))), Err(io::ErrorKind::Other.into())];
    assert!(instances(broken.into_iter()).is_err());
}
