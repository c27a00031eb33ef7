use super::*;

fn shelf(directory: &Path, max_bytes: u64, in_use: &[&str]) -> Arc<Shelf> {
    let in_use: HashSet<String> = in_use.iter().map(|digest| (*digest).to_owned()).collect();
    Arc::new(Shelf::open(directory, max_bytes, Box::new(move || in_use.clone())).unwrap())
}

fn digest(letter: char) -> String {
    letter.to_string().repeat(64)
}

/// Puts a raw base of `size` bytes on the shelf.
fn put(shelf: &Arc<Shelf>, letter: char, size: u64) -> Result<Landed, ImageError> {
    let mut room = shelf.reservation();
    room.cover(size, true)?;
    room.write(size)?;
    let temporary = shelf.temporary()?;
    temporary.file.set_len(size).unwrap();
    let base = BaseImage {
        path: PathBuf::new(),
        format: DiskFormat::Raw,
        virtual_size: size,
        digest: digest(letter),
    };
    shelf.place(temporary, base)
}

fn age(shelf: &Arc<Shelf>, letter: char, seconds: u64) {
    let used = SystemTime::now() - std::time::Duration::from_secs(seconds);
    File::open(shelf.path(&digest(letter), DiskFormat::Raw)).unwrap().set_modified(used).unwrap();
}

#[test]
fn what_was_used_longest_ago_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = shelf(dir.path(), 3 * 512, &[]);
    for (letter, seconds) in [('a', 30), ('b', 20), ('c', 10)] {
        put(&shelf, letter, 512).unwrap();
        age(&shelf, letter, seconds);
    }
    assert!(shelf.find(&digest('a')).is_some(), "use makes it young again");
    put(&shelf, 'd', 512).unwrap();
    let left = ['a', 'b', 'c', 'd'].map(|letter| shelf.has(&digest(letter), 512));
    assert_eq!(left, [true, false, true, true]);
    assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
}

#[test]
fn what_is_pinned_or_in_use_stays_and_the_cache_says_it_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = shelf(dir.path(), 2 * 512, &[&digest('a')]);
    put(&shelf, 'a', 512).unwrap();
    let pinned = put(&shelf, 'b', 512).unwrap();
    let error = put(&shelf, 'c', 512).map(|_| ()).unwrap_err();
    assert!(matches!(error, ImageError::CacheFull { wanted: 512, held: 1024, max_bytes: 1024 }), "{error}");
    drop(pinned);
    put(&shelf, 'c', 512).unwrap();
    assert!(shelf.has(&digest('a'), 512) && !shelf.has(&digest('b'), 512));
    assert_eq!(shelf.ledger().reserved, 0);
}

#[test]
fn a_base_pinned_while_the_caller_is_asked_stays() {
    let dir = tempfile::tempdir().unwrap();
    let slot: Arc<Mutex<Option<Arc<Shelf>>>> = Arc::default();
    let inner = Arc::clone(&slot);
    // An overlay is laid on `a` just after the caller has looked: its answer does not name it.
    let in_use = move || {
        if let Some(shelf) = &*inner.lock().unwrap() {
            drop(shelf.find(&digest('a')));
        }
        HashSet::new()
    };
    let shelf = Arc::new(Shelf::open(dir.path(), 512, Box::new(in_use)).unwrap());
    put(&shelf, 'a', 512).unwrap();
    *slot.lock().unwrap() = Some(Arc::clone(&shelf));
    assert!(matches!(put(&shelf, 'b', 512).map(|_| ()), Err(ImageError::CacheFull { .. })));
    assert!(shelf.has(&digest('a'), 512));
    *slot.lock().unwrap() = None;
}

#[test]
fn an_image_bigger_than_the_cache_is_refused_before_anything_is_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = shelf(dir.path(), 1024, &[]);
    put(&shelf, 'a', 512).unwrap();
    assert!(matches!(put(&shelf, 'b', 1536).map(|_| ()), Err(ImageError::TooBig { size: 1536, .. })));
    assert!(shelf.has(&digest('a'), 512));
}

#[test]
fn leftovers_of_a_crash_are_swept_and_bases_are_readable_by_who_knows_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    fs::create_dir_all(cache.join("tmp")).unwrap();
    fs::write(cache.join("tmp/7-1.part"), "half a disk").unwrap();
    let shelf = shelf(&cache, 1024, &[]);
    assert_eq!(fs::read_dir(cache.join("tmp")).unwrap().count(), 0);
    let landed = put(&shelf, 'a', 512).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&landed.base.path), 0o444);
    for (directory, wanted) in [("base", 0o711), ("tmp", 0o700)] {
        assert_eq!(mode(&cache.join(directory)), wanted, "{directory}");
    }
}

#[test]
fn a_directory_has_one_cache_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let first = shelf(dir.path(), 1024, &[]);
    let second = Shelf::open(dir.path(), 1024, Box::new(HashSet::new)).map(|_| ()).unwrap_err();
    assert!(matches!(second, ImageError::InUse { .. }) && second.to_string().contains("images.directory"));
    drop(first);
    Shelf::open(dir.path(), 1024, Box::new(HashSet::new)).unwrap();
}

#[test]
fn a_base_that_is_there_already_keeps_its_inode_and_a_damaged_one_is_put_right() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let shelf = shelf(dir.path(), 8192, &[]);
    let path = put(&shelf, 'a', 1024).unwrap().base.path;
    let inode = fs::metadata(&path).unwrap().ino();
    put(&shelf, 'a', 1024).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().ino(), inode);

    fs::remove_file(&path).unwrap();
    fs::write(&path, [0; 100]).unwrap();
    assert!(shelf.find(&digest('a')).is_none());
    put(&shelf, 'a', 1024).unwrap();
    assert!(shelf.find(&digest('a')).is_some());
}

#[test]
fn a_damaged_base_of_the_same_length_is_put_right() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = shelf(dir.path(), 8192, &[]);
    let path = put(&shelf, 'a', 1024).unwrap().base.path;
    fs::remove_file(&path).unwrap();
    // What is said to be a raw disk begins as a qcow2.
    fs::write(&path, [&b"QFI\xfb"[..], &[0; 1020]].concat()).unwrap();
    assert!(shelf.find(&digest('a')).is_none());
    put(&shelf, 'a', 1024).unwrap();
    assert!(shelf.find(&digest('a')).is_some());
}

#[test]
fn who_lets_go_or_looks_does_not_wait_for_files_that_do_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = shelf(dir.path(), 4 * 512, &[]);
    let landed = put(&shelf, 'a', 512).unwrap();
    let mut room = shelf.reservation();
    room.cover(512, true).unwrap();
    // As long as a rename, or a look at all of them, that does not come back.
    let hangs = shelf.files();
    let (told, done) = std::sync::mpsc::channel();
    let by = Arc::clone(&shelf);
    let letting_go = std::thread::spawn(move || {
        drop((landed, room));
        told.send(by.find(&digest('a')).is_some()).ok();
    });
    let found = done.recv_timeout(std::time::Duration::from_secs(10));
    drop(hangs);
    letting_go.join().unwrap();
    assert_eq!(found, Ok(true));
}

#[test]
fn what_is_leaving_is_not_found_and_what_was_found_does_not_leave() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = shelf(dir.path(), 4 * 512, &[]);
    drop(put(&shelf, 'a', 512).unwrap());
    shelf.ledger().touched = Some(HashSet::new());
    assert!(shelf.leaves(&digest('a')));
    assert!(shelf.find(&digest('a')).is_none(), "its file may go at any moment");
    shelf.ledger().leaving = None;
    drop(shelf.find(&digest('a')).unwrap());
    assert!(!shelf.leaves(&digest('a')), "an overlay may lie on it by now");
}

#[test]
fn of_many_who_fetch_and_look_at_once_each_has_what_it_found() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = shelf(dir.path(), 3 * 512, &[]);
    std::thread::scope(|scope| {
        for letter in ['a', 'b', 'c', 'd'] {
            let shelf = &shelf;
            scope.spawn(move || {
                for _ in 0..50 {
                    let landed = shelf.find(&digest(letter)).or_else(|| put(shelf, letter, 512).ok());
                    std::thread::yield_now();
                    assert!(landed.is_none_or(|landed| landed.base.path.is_file()));
                }
            });
        }
    });
    let ledger = shelf.ledger();
    assert!(ledger.reserved == 0 && ledger.pins.is_empty());
    assert!(shelf.bases().unwrap().len() <= 3);
}

const GIB: u64 = 1 << 30;

/// A shelf on a file system of 100 GiB, of which some is free and one has to stay so.
fn on_a_disk(directory: &Path, space: fn(&Path) -> io::Result<Space>) -> Arc<Shelf> {
    let shelf = Shelf::open(directory, 1000 * GIB, Box::new(HashSet::new)).unwrap();
    Arc::new(Shelf { space, ..shelf })
}

#[test]
fn downloads_leave_the_disk_some_room_and_none_takes_what_another_may_write() {
    let dir = tempfile::tempdir().unwrap();
    let shelf = on_a_disk(dir.path(), |_| Ok(Space { free: 10 * GIB, whole: 100 * GIB }));
    let (mut one, mut other) = (shelf.reservation(), shelf.reservation());
    one.write(6 * GIB).unwrap();
    let error = other.write(4 * GIB).unwrap_err();
    assert!(matches!(error, ImageError::DiskFull { .. }) && error.is_transient(), "{error}");
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(
        why,
        "10.0 GiB wanted for what is being fetched, 10.0 GiB free, of which 1.0 GiB stay free for guests"
    );
    // What is written is no longer free: it counts once.
    one.wrote(GIB);
    other.write(4 * GIB).unwrap();
    drop(one);
    // There is less to spare for what follows than is taken where there is plenty.
    other.write(9 * GIB - 1).unwrap();
    let mut third = shelf.reservation();
    third.write(2).unwrap_err();
    third.write(1).unwrap();
    drop((other, third));
    let ledger = shelf.ledger();
    assert_eq!((ledger.reserved, ledger.to_write), (0, 0));
}

#[test]
fn the_disk_is_looked_at_again_after_each_step_and_what_is_empty_takes_none_of_it() {
    let dir = tempfile::tempdir().unwrap();
    // Guests write as much as is in this file.
    let space = |tmp: &Path| {
        let of_guests = fs::metadata(tmp.parent().unwrap().join("guests")).map_or(0, |meta| meta.len());
        Ok(Space { free: 2 * GIB - of_guests, whole: 100 * GIB })
    };
    let shelf = on_a_disk(dir.path(), space);
    let mut room = shelf.reservation();
    // Far more than there is, most of which is empty.
    room.cover(500 * GIB, true).unwrap();
    room.write(SMALL_STEP).unwrap();
    room.wrote(0);
    room.write(STEP).unwrap();
    room.wrote(STEP);
    File::create(dir.path().join("guests")).unwrap().set_len(GIB).unwrap();
    let error = room.write(SMALL_STEP).unwrap_err();
    assert!(matches!(error, ImageError::DiskFull { .. }), "{error}");
}

#[test]
fn where_the_disk_is_short_what_nobody_uses_goes() {
    let dir = tempfile::tempdir().unwrap();
    // As free as what lies there lets it be.
    let space = |tmp: &Path| {
        let bases = fs::read_dir(tmp.parent().unwrap().join("base"))?;
        let taken: u64 = bases.flatten().map(|base| base.metadata().unwrap().blocks() * 512).sum();
        Ok(Space { free: GIB + (3 << 20) - taken, whole: 100 * GIB })
    };
    let shelf = on_a_disk(dir.path(), space);
    let written = |letter| {
        let landed = put(&shelf, letter, 1 << 20).unwrap();
        fs::set_permissions(&landed.base.path, Permissions::from_mode(0o600)).unwrap();
        fs::write(&landed.base.path, vec![0; 1 << 20]).unwrap();
        landed
    };
    drop(written('a'));
    let pinned = written('b');
    assert!(shelf.reservation().write(2 << 20).is_ok(), "one had to go for it");
    let has = |letter| shelf.has(&digest(letter), 1 << 20);
    assert!(!has('a') && has('b'));
    let error = shelf.reservation().write(3 << 20).unwrap_err();
    assert!(matches!(error, ImageError::DiskFull { .. }), "{error}");
    drop(pinned);
    shelf.reservation().write(3 << 20).unwrap();
    assert!(!has('b'));
}
