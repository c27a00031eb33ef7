use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

use ec_model::{BaseImage, DiskFormat};
use uuid::Uuid;
use virt::connect::Connect;

use super::*;
use crate::xml::VolumeXml;

#[test]
fn a_disk_that_fails_for_want_of_inodes_or_room_is_waited_for_and_another_failure_is_not() {
    virt::error::clear_error_callback();
    let directory = tempfile::tempdir().unwrap();
    let connect = Connect::open(Some("test:///default")).unwrap();
    let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let fails_at = |path: &Path| {
        let pool = Pool::new("default-pool", path);
        let place = pool.volume_path(instance);
        let make = || pool.create(&connect, &place, |name| VolumeXml::alone(name, 1 << 20), None);
        // Whatever libvirt refuses: here the second disk of one name, and to grow any.
        let grow = || pool.grow(&connect, instance, 2 << 20, None);
        [make().and_then(|()| make()).unwrap_err(), grow().unwrap_err()]
    };
    let place = directory.path().join(volume_name(instance));
    qemu_img(&["create", "-q", "-f", "qcow2", place.to_str().unwrap(), "1M"]);
    let failed = fails_at(directory.path());
    assert!(failed.iter().all(|failed| matches!(failed, CallError::Libvirt(_))), "{failed:?}");
    // But what is there already where it is to be made is never swept for that.
    let pool = Pool::new("default-pool", directory.path());
    let made = pool.create_volume(&connect, instance, None, 2 << 20).unwrap_err();
    assert!(matches!(made, CallError::NotNow(_)) && place.exists(), "{made:?}");
    for (options, why) in
        [("nr_inodes=2", "has no inode left"), ("size=1M", "is full"), ("ro", "is read-only")]
    {
        let script = "mount -t tmpfs -o \"${1#ro}\" tmpfs \"$2\" && qemu-img create -q -f qcow2 \"$3\" 1M &&
            { [ \"$1\" != ro ] || mount -o remount,ro \"$2\"; } && echo ready && read end";
        let mut other = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", options])
            .args([directory.path(), &place])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare of util-linux");
        let mut line = String::new();
        BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let seen = format!("/proc/{}/root{}", other.id(), directory.path().display());
        let failed = fails_at(seen.as_ref());
        drop(other.stdin.take());
        other.wait().unwrap();
        assert_eq!(line, "ready\n", "no namespace of mounts");
        for failed in failed {
            let CallError::NotNow(told) = failed else { panic!("{failed:?}") };
            assert!(told.contains(why), "{told}");
        }
    }
}

#[test]
fn of_an_instance_that_went_while_its_rescue_disk_was_made_that_does_not_stay() {
    virt::error::clear_error_callback();
    let directory = tempfile::tempdir().unwrap();
    let connect = Connect::open(Some("test:///default")).unwrap();
    let pool = Pool::new("default-pool", directory.path());
    let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let base = BaseImage {
        path: directory.path().join("image"),
        format: DiskFormat::Qcow2,
        virtual_size: 1 << 20,
        digest: "0".repeat(64),
    };
    let create = |still_wanted: &[bool]| {
        let looks = std::cell::RefCell::new(still_wanted.iter());
        pool.create_rescue(&connect, instance, &base, || {
            let is_wanted = *looks.borrow_mut().next().expect("it is asked before and after");
            // libvirt's own driver for tests makes no files.
            std::fs::write(pool.rescue_path(instance), "").unwrap();
            Ok(is_wanted)
        })
    };
    let is_known = || {
        let known = connect.lookup_storage_pool_by_name("default-pool").unwrap().list_volumes().unwrap();
        known.contains(&rescue_name(instance))
    };
    create(&[true, true]).unwrap();
    assert!(is_known());
    let refused = create(&[true, false]).unwrap_err();
    assert!(matches!(refused, CallError::Refused(_)), "{refused:?}");
    assert!(!is_known() && !pool.rescue_path(instance).exists());
}

#[test]
fn only_files_named_by_an_instance_are_volumes() {
    let directory = tempfile::tempdir().unwrap();
    let pool = Pool::new("p", directory.path());
    let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let other: InstanceId = "8d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let fourth: InstanceId = "ad3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let fifth: InstanceId = "bd3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let third: InstanceId = "9d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    for name in [
        volume_name(instance),
        rescue_name(instance),
        successor_name(other),
        part_name(third, instance, None),
        part_name(third, instance, Some(other)),
        format!("{third}.x.part.qcow2"),
        format!("{third}.{instance}.x.part.qcow2"),
        // Of a snapshot whose first disk is there, and of one that is not whole.
        copy_name(instance, other),
        copy_name(fourth, other),
        // Of one that was handed over, and is not in its place yet.
        moved_name(fifth, Uuid::from_u128(1)),
        format!("{third}.x.moved.qcow2"),
        "x.qcow2".into(),
        "x.new.qcow2".into(),
        "7D3C1F0A-2B4E-4C55-9A7E-0123456789AC.qcow2".into(),
    ] {
        std::fs::write(directory.path().join(name), "").unwrap();
    }
    let Contents { volumes, mut successors, copies, handed_over } = pool.contents().unwrap();
    successors.sort_unstable();
    successors.dedup();
    assert_eq!((volumes, handed_over), (vec![instance], vec![fifth]));
    assert_eq!(
        (copies, pool.beside(instance).unwrap().1),
        (HashMap::from([(instance, vec![other])]), vec![other])
    );
    assert_eq!(successors, [other, third, fourth]);
    assert!(pool.beside(fourth).unwrap().0);
    assert!(pool.beside(other).unwrap().0 && !pool.beside(instance).unwrap().0);
    assert!(pool.beside(third).unwrap().0);
    let mut parts = pool.parts_of(third).unwrap();
    parts.sort_unstable();
    let both = [None, Some(other)].map(|disk| (pool.part_path(third, instance, disk), instance));
    assert_eq!(parts.iter().collect::<BTreeSet<_>>(), both.iter().collect());
    pool.refuse_snapshots(instance).expect("copies are no layers");
    pool.refuse_snapshots(third).expect("it is nobody's part, and stands on nothing");
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    assert_eq!(pool.owner(&path(&volume_name(instance))), Some(instance));
    for file in [path("x.qcow2"), path(&rescue_name(instance)), format!("/{}", volume_name(instance))] {
        assert_eq!(pool.owner(&file), None, "{file}");
    }
    assert!(pool.has_volume(instance).unwrap());
}

#[test]
fn of_a_directory_that_is_gone_or_another_nothing_is_known_and_nothing_in_it_is_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("disks");
    let pool = Pool::new("p", &place);
    let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let make = || {
        std::fs::create_dir(&place).unwrap();
        Ok(())
    };
    pool.make_ready(make).unwrap();
    std::fs::write(pool.volume_path(instance), "").unwrap();
    pool.make_ready(|| panic!("it was made twice")).unwrap();
    assert_eq!(pool.contents().unwrap().volumes, [instance]);
    // Not mounted: nothing is there, or what lies below.
    let mounted = directory.path().join("elsewhere");
    std::fs::rename(&place, &mounted).unwrap();
    for _ in 0..2 {
        let not_now = |error| matches!(error, CallError::NotNow(_));
        assert!(not_now(pool.contents().unwrap_err()));
        assert!(not_now(pool.has_volume(instance).unwrap_err()));
        assert!(not_now(pool.beside(instance).unwrap_err()));
        assert!(not_now(pool.has_whole_successor(instance).unwrap_err()));
        assert!(not_now(pool.remove(None, instance).unwrap_err()));
        assert!(not_now(pool.make_ready(|| panic!("it is not made anew")).unwrap_err()));
        std::fs::create_dir_all(&place).unwrap();
    }
    std::fs::remove_dir(&place).unwrap();
    // As of a mount whose server is gone: no name in it can be looked for.
    std::os::unix::fs::symlink(&place, &place).unwrap();
    let why = pool.has_volume(instance).unwrap_err();
    assert!(matches!(&why, CallError::NotNow(why) if why.contains("where disks are")), "{why:?}");
    assert_eq!(pool.takes_none(), Some("does not answer"));
    std::fs::remove_file(&place).unwrap();
    std::fs::rename(&mounted, &place).unwrap();
    assert_eq!(pool.contents().unwrap().volumes, [instance]);
    pool.remove(None, instance).unwrap();
    assert!(!pool.has_volume(instance).unwrap());
}

#[test]
fn a_link_that_cannot_be_followed_is_not_taken_for_gone_and_hides_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("disks");
    std::fs::create_dir(&place).unwrap();
    let pool = Pool::new("p", &place);
    let [loops, away, other] = ["7d", "8d", "9d"]
        .map(|start| -> InstanceId { format!("{start}3c1f0a-2b4e-4c55-9a7e-0123456789ab").parse().unwrap() });
    let (link, mounted) = (pool.volume_path(away), directory.path().join("mounted"));
    std::os::unix::fs::symlink(pool.volume_path(loops), pool.volume_path(loops)).unwrap();
    std::os::unix::fs::symlink(mounted.join("disk"), &link).unwrap();
    std::fs::write(pool.volume_path(other), "").unwrap();
    let mut volumes = pool.contents().unwrap().volumes;
    volumes.sort_unstable();
    assert_eq!(volumes, [loops, away, other]);
    pool.has_volume(loops).expect_err("nobody knows");
    let layer = place.join(format!("{away}.snapshot"));
    overlay_on(&layer, &link);
    let says = |error| match error {
        CallError::NotNow(why) => assert!(why.contains("mount it, or remove the link"), "{why}"),
        other => panic!("{other:?}"),
    };
    says(pool.has_volume(away).unwrap_err());
    says(pool.capacity(away).unwrap_err());
    says(pool.remove(None, away).unwrap_err());
    assert!(link.is_symlink() && layer.exists());
    std::fs::create_dir(&mounted).unwrap();
    std::fs::write(mounted.join("disk"), "").unwrap();
    assert!(pool.has_volume(away).unwrap());
    pool.remove(None, away).unwrap();
    assert!(!link.is_symlink() && !mounted.join("disk").exists() && !layer.exists());
}

fn qemu_img(arguments: &[&str]) {
    let output = std::process::Command::new("qemu-img").args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

/// Whether the backing file is there or not.
fn overlay_on(path: &Path, backing: &Path) {
    let [path, backing] = [path, backing].map(|path| path.to_str().unwrap());
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "qcow2", path, "8M"]);
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn what_a_snapshot_put_beside_a_disk_goes_with_it_and_nothing_of_others() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, at) = (Pool::new("p", directory.path()), |name: &str| directory.path().join(name));
    let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let second: InstanceId = "8d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let [image, other] = ["image".to_owned(), volume_name(second)];
    let theirs = ["backup.qcow2", "mine.qcow2", "qcow2.bak", "raw", "on-backup"]
        .map(|end| format!("{instance}.{end}"));
    for on_image in [&volume_name(instance), &rescue_name(instance), &other, &theirs[0]] {
        overlay_on(&at(on_image), &at(&image));
    }
    // A chain, by words of all kinds, and what a guest wrote that was up from its rescue disk.
    let layer = |end: &str| at(&format!("{instance}.{end}"));
    overlay_on(&layer("s1"), &pool.volume_path(instance));
    overlay_on(&layer("s2"), Path::new(&format!("{instance}.s1")));
    let words = format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{}"}}}}"#,
        pool.volume_path(instance).display()
    );
    overlay_on(&layer("s3.qcow2"), Path::new(&words));
    overlay_on(&layer("rescue.s1"), &pool.rescue_path(instance));
    let own = [
        successor_name(instance),
        part_name(instance, second, None),
        part_name(instance, second, Some(second)),
        copy_name(instance, second),
        moved_name(instance, Uuid::from_u128(1)),
    ];
    for name in own.iter().chain(&theirs[1..4]) {
        std::fs::write(at(name), "").unwrap();
    }
    overlay_on(&at(&theirs[4]), &at(&theirs[0]));
    std::fs::create_dir(layer("directory")).unwrap();
    let pipe = layer("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink(&other, layer("link")).unwrap();
    let mut left: BTreeSet<String> = theirs.into_iter().chain([other]).collect();
    left.extend(["directory", "pipe", "link"].map(|end| format!("{instance}.{end}")));
    pool.remove(None, instance).unwrap();
    assert_eq!(names_in(directory.path()), left);
    // One that was broken off took the disk first.
    overlay_on(&layer("s1"), &pool.volume_path(instance));
    pool.remove(None, instance).unwrap();
    assert_eq!(names_in(directory.path()), left);
}

#[test]
fn nothing_is_defined_below_a_snapshot_and_what_is_none_is_in_nobodys_way() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, at) = (Pool::new("p", directory.path()), |name: &str| directory.path().join(name));
    let instance: InstanceId = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap();
    let (image, disk) = (at("image"), pool.volume_path(instance));
    let layer = |end: &str| at(&format!("{instance}.{end}"));
    let write = |path: &Path, what: &str| {
        let command = format!("write -P {what} 1M 64k");
        let output = std::process::Command::new("qemu-io").args(["-c", &command]).arg(path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    qemu_img(&["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "8M"]);
    write(&image, "1");
    overlay_on(&disk, &image);
    write(&disk, "2");
    let of_image = std::fs::read(&image).unwrap();
    // Of another, copies, and what is no image at all.
    overlay_on(&at("7d3c1f0a-2b4e-4c55-9a7e-0123456789ac.snapshot"), &disk);
    std::fs::copy(&disk, layer("backup.qcow2")).unwrap();
    std::fs::write(layer("qcow2.bak"), "").unwrap();
    std::fs::write(layer("mine.qcow2"), vec![0; 4096]).unwrap();
    pool.refuse_snapshots(instance).unwrap();

    overlay_on(&layer("s1"), &disk);
    overlay_on(&layer("s2"), &layer("s1"));
    write(&layer("s2"), "3");
    let refused = || match pool.refuse_snapshots(instance) {
        Err(CallError::Refused(why)) => why,
        other => panic!("it was not refused: {other:?}"),
    };
    let why = refused();
    assert!(why.starts_with(layer("s2").to_str().unwrap()), "{why}");
    // What it says helps, and writes nothing into what others stand on.
    assert!(why.contains("never commit it, since"), "{why}");
    let command = why.split('`').find(|part| part.starts_with("qemu-img commit")).expect(&why);
    let command: Vec<_> = command.split(' ').collect();
    let ["qemu-img", rest @ ..] = command.as_slice() else { panic!("{why}") };
    qemu_img(&[&["commit", "-q"], &rest[1..]].concat());
    assert_eq!(std::fs::read(&image).unwrap(), of_image);
    let output =
        std::process::Command::new("qemu-io").args(["-c", "read -P 3 1M 64k"]).arg(&disk).output().unwrap();
    assert!(
        output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed"),
        "{output:?}"
    );
    std::fs::remove_file(layer("s2")).unwrap();
    // What is older than what it stands on is never to be written over that; and what may be, by a clock that was set, is told both ways.
    let since = |seconds: i64| {
        let now = written(&layer("s1")).unwrap().unwrap();
        let by = Duration::from_secs(seconds.unsigned_abs());
        let at = if seconds < 0 { now - by } else { now + by };
        File::options().write(true).open(&disk).unwrap().set_modified(at).unwrap();
    };
    for (seconds, is_doubted, is_newer) in
        [(60, false, false), (5, true, false), (-5, true, false), (-60, true, true)]
    {
        since(seconds);
        let why = refused();
        assert!(why.contains("remove it and never commit it"), "{why}");
        assert_eq!(why.contains("commit -b"), is_doubted, "{why}");
        assert_eq!(pool.refuse_newer_snapshots(instance).is_err(), is_newer, "{seconds}");
    }
    // Of a disk of which nobody can tell when it was written nothing is assumed.
    let aside = at("aside");
    std::fs::rename(&disk, &aside).unwrap();
    std::os::unix::fs::symlink(&disk, &disk).unwrap();
    pool.refuse_newer_snapshots(instance).expect_err("its time cannot be read");
    std::fs::remove_file(&disk).unwrap();
    std::fs::rename(&aside, &disk).unwrap();
    std::fs::remove_file(layer("s1")).unwrap();
    pool.refuse_snapshots(instance).unwrap();
}

#[test]
fn the_directory_that_stops_qemu_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let (open, closed) = (directory.path().join("open"), directory.path().join("open/closed"));
    std::fs::create_dir_all(&closed).unwrap();
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(directory.path(), 0o711);
    mode(&open, 0o755);
    mode(&closed, 0o750);
    assert_eq!(impassable_ancestor(&closed.join("x.qcow2")), Some(closed.as_path()));
    assert_eq!(impassable_ancestor(&open.join("x.qcow2")), None);
}
