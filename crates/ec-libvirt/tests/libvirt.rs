//! The libvirt hypervisor against a real libvirtd of its own. Needs root and the programs that
//! `ec_libvirt::testing` names.
#![expect(clippy::unwrap_used, clippy::panic, reason = "what tests share")]

use std::{
    future::Future,
    io::Write,
    sync::{Arc, OnceLock},
    time::Duration,
};

use ec_hypervisor::{
    DomainSpec, Hypervisor, HypervisorError, HypervisorEvent, HypervisorResult, Observed, RunState, Typed,
    VolumeSource, conformance,
};
use ec_libvirt::{
    LibvirtConfig, LibvirtHypervisor,
    testing::{LibvirtServer, assert_valid, base_image, tiny_image},
};
use ec_model::{AddressSource, Attachment, BaseImage, CopyOf, DiskFormat, End, InstanceId, NodeId, Workload};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(120);

fn fresh() -> InstanceId {
    InstanceId::new(Uuid::new_v4())
}

fn node() -> NodeId {
    NodeId::new(Uuid::new_v4())
}

fn base() -> BaseImage {
    static BASE: OnceLock<BaseImage> = OnceLock::new();
    BASE.get_or_init(|| base_image(&tiny_image())).clone()
}

/// Servers block while they start and end, which the runtime must not see.
struct Test {
    server: Option<LibvirtServer>,
    hypervisor: Arc<LibvirtHypervisor>,
    config: LibvirtConfig,
}

impl Test {
    async fn new(change: impl FnOnce(&mut LibvirtConfig)) -> Self {
        let server = tokio::task::spawn_blocking(LibvirtServer::start).await.unwrap();
        let mut config = server.config(node());
        change(&mut config);
        let hypervisor = Arc::new(LibvirtHypervisor::connect(config.clone()).unwrap());
        Self { server: Some(server), hypervisor, config }
    }

    fn server(&self) -> &LibvirtServer {
        self.server.as_ref().unwrap()
    }

    fn second(&self, change: impl FnOnce(&mut LibvirtConfig)) -> LibvirtHypervisor {
        let mut config = self.config.clone();
        change(&mut config);
        LibvirtHypervisor::connect(config).unwrap()
    }

    async fn end(mut self) {
        let (bridge, directory) = (self.server().bridge().to_owned(), self.server().directory().to_owned());
        let server = self.server.take();
        tokio::task::spawn_blocking(move || drop(server)).await.unwrap();
        assert!(!std::path::Path::new("/sys/class/net").join(bridge).exists(), "the bridge is gone");
        assert!(!directory.exists(), "and the files");
    }
}

async fn wait_for<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "no {what} within {PATIENCE:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

fn failure<T>(result: HypervisorResult<T>) -> String {
    match result {
        Err(error @ HypervisorError::Failed { .. }) => error.to_string(),
        Err(other) => panic!("wanted a lasting failure, got {other}"),
        Ok(_) => panic!("wanted a failure"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn libvirt_passes_the_conformance_suite() {
    let test = Test::new(|_| ()).await;
    let begin = Instant::now();
    conformance::all(Arc::clone(&test.hypervisor) as Arc<dyn Hypervisor>, &base(), &fresh).await;
    println!("conformance: {:?}", begin.elapsed());
    let begin = Instant::now();
    conformance::a_guest_gets_an_address(&*test.hypervisor, &base(), fresh()).await;
    println!("build, address and destroy: {:?}", begin.elapsed());
    let other = test.second(|config| config.node = node());
    conformance::another_nodes_mark_is_neither_seen_nor_touched(&*test.hypervisor, &other, &base(), fresh())
        .await;
    assert!(test.hypervisor.list().await.unwrap().is_empty());
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_on_shared_storage_is_handed_over_and_never_over_another() {
    let place = tempfile::tempdir().unwrap();
    let beside = |config: &mut LibvirtConfig| {
        config.pool_path = place.path().join(config.node.to_string());
        config.pool = format!("shared-{}", config.node);
    };
    let test = Test::new(beside).await;
    let (ours, node) = (&*test.hypervisor, node());
    let other = test.second(|config| {
        config.node = node;
        beside(config);
    });
    conformance::a_volume_is_handed_over(ours, (node, &other), &base(), [fresh(), fresh()]).await;

    let file =
        |of: NodeId, volume: InstanceId| place.path().join(of.to_string()).join(format!("{volume}.qcow2"));
    let own = test.config.node;
    let create = async |source: &VolumeSource| {
        let volume = fresh();
        ours.create_volume(volume, source, Some(1 << 30)).await.unwrap();
        volume
    };
    let handed = |volume: InstanceId| {
        let names = std::fs::read_dir(place.path().join(node.to_string())).unwrap();
        let mut names = names.map(|entry| entry.unwrap().path());
        names.find(|path| path.to_str().is_some_and(|path| path.contains(&format!("{volume}."))))
    };
    // Killed when it was handed over, and before that was told.
    let volume = create(&VolumeSource::Empty).await;
    for _ in 0..2 {
        ours.hand_over(volume, node).await.unwrap();
        assert!(!file(own, volume).exists() && !file(node, volume).exists() && handed(volume).is_some());
    }
    // Nothing is given up for that: people can bring it back.
    let Err(HypervisorError::NotNow { detail, .. }) =
        ours.create_volume(volume, &VolumeSource::Empty, Some(1 << 30)).await
    else {
        panic!("it is made a second time")
    };
    assert!(detail.contains("has its disk"), "{detail}");
    // A look at everything puts it in its place, as one at it alone does.
    for _ in 0..2 {
        assert!(other.list().await.unwrap()[&volume].volume && file(node, volume).exists());
        assert!(other.observe(volume).await.unwrap().volume);
    }
    // So `virsh vol-list` has it there, and no more here.
    let connect = virt::connect::Connect::open(Some(&test.config.uri)).unwrap();
    let is_known = |of: NodeId| {
        let pool = connect.lookup_storage_pool_by_name(&format!("shared-{of}")).unwrap();
        pool.list_volumes().unwrap().contains(&format!("{volume}.qcow2"))
    };
    assert_eq!((is_known(node), is_known(own)), (true, false));
    // Two of one volume, by an older etcd: the one that is not in its place hides nothing.
    let second = file(node, volume).with_file_name(format!("{volume}.{}.moved.qcow2", Uuid::new_v4()));
    let first = second.with_file_name(format!("{volume}.{}.moved.qcow2", Uuid::new_v4()));
    std::fs::rename(file(node, volume), first).unwrap();
    std::fs::write(&second, "").unwrap();
    for _ in 0..2 {
        assert!(other.list().await.unwrap()[&volume].volume && file(node, volume).exists());
    }
    other.destroy(volume).await.unwrap();
    // A network's file system still tells of the name by which it went away from there: the file itself must not go.
    let volume = create(&VolumeSource::Empty).await;
    std::fs::hard_link(file(own, volume), file(node, volume)).unwrap();
    ours.hand_over(volume, node).await.unwrap();
    std::fs::remove_file(file(node, volume)).unwrap();
    assert!(other.observe(volume).await.unwrap().volume && file(node, volume).exists());
    // It came where it is to be made, by an older order, which knows of another size: it stays, and nothing is made in its place.
    use std::os::unix::fs::MetadataExt;
    let inode = std::fs::metadata(file(node, volume)).unwrap().ino();
    other.hand_over(volume, own).await.unwrap();
    for capacity in [1_u64 << 30, 2 << 30, 1 << 30] {
        ours.create_volume(volume, &VolumeSource::Empty, Some(capacity)).await.unwrap();
        assert_eq!(std::fs::metadata(file(own, volume)).unwrap().ino(), inode);
    }
    assert_eq!(ours.disk_bytes(volume).await.unwrap(), Some(2 << 30));
    ours.hand_over(volume, node).await.unwrap();
    assert!(other.observe(volume).await.unwrap().volume);
    // What is not taken in yet goes with its volume.
    other.hand_over(volume, own).await.unwrap();
    ours.destroy(volume).await.unwrap();
    assert!(!ours.observe(volume).await.unwrap().volume);
    // Nothing is put over what is there, and nothing goes where nobody has a directory.
    let volume = create(&VolumeSource::Empty).await;
    std::fs::write(file(node, volume), "other").unwrap();
    assert!(failure(ours.hand_over(volume, node).await).contains("another disk lies at"));
    assert_eq!(std::fs::read(file(node, volume)).unwrap(), b"other");
    std::fs::remove_file(file(node, volume)).unwrap();
    failure(ours.hand_over(volume, NodeId::new(Uuid::new_v4())).await);
    // Where a link leads is this node's, and of one that leads nowhere nobody knows: it may not be mounted.
    let elsewhere = place.path().join("elsewhere.qcow2");
    std::fs::rename(file(own, volume), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, file(own, volume)).unwrap();
    assert!(failure(ours.hand_over(volume, node).await).contains("is a link"));
    let hidden = place.path().join("hidden.qcow2");
    std::fs::rename(&elsewhere, &hidden).unwrap();
    let not_now = |error| matches!(error, HypervisorError::NotNow { .. });
    assert!(ours.list().await.unwrap()[&volume].volume);
    assert!(not_now(ours.observe(volume).await.unwrap_err()));
    assert!(not_now(ours.hand_over(volume, node).await.unwrap_err()));
    let made = ours.create_volume(volume, &VolumeSource::Empty, Some(1 << 30)).await;
    assert!(not_now(made.unwrap_err()) && not_now(ours.destroy(volume).await.unwrap_err()));
    assert!(file(own, volume).is_symlink());
    // What lies behind it goes with what takes its place, and with its end.
    std::fs::rename(&hidden, &elsewhere).unwrap();
    ours.create_successor(volume, &VolumeSource::Image(base()), None).await.unwrap();
    ours.replace_overlay(volume).await.unwrap();
    assert!(!elsewhere.exists() && !file(own, volume).is_symlink());
    let linked = create(&VolumeSource::Empty).await;
    std::fs::rename(file(own, linked), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, file(own, linked)).unwrap();
    ours.destroy(linked).await.unwrap();
    assert!(!elsewhere.exists() && !file(own, linked).is_symlink());
    // But not where that is another's.
    std::os::unix::fs::symlink(file(own, volume), file(own, linked)).unwrap();
    ours.destroy(linked).await.unwrap();
    assert!(file(own, volume).exists() && !file(own, linked).is_symlink());
    let of_image = create(&VolumeSource::Image(base())).await;
    // Nor is it made anew where it is another's by now, or cannot be read.
    let kept = create(&VolumeSource::Empty).await;
    std::fs::write(file(own, kept), vec![7; 1 << 16]).unwrap();
    for source in [VolumeSource::Empty, VolumeSource::Image(base())] {
        let why = ours.create_volume(kept, &source, Some(1 << 30)).await.unwrap_err();
        assert!(why.is_transient() && why.to_string().contains("not made anew"), "{why}");
        assert_eq!(std::fs::read(file(own, kept)).unwrap(), vec![7; 1 << 16]);
    }
    ours.destroy(kept).await.unwrap();
    // What lies there by now tells, and not what libvirt knew of it.
    let swapped = create(&VolumeSource::Empty).await;
    std::fs::copy(file(own, of_image), file(own, swapped)).unwrap();
    for of_image in [of_image, swapped] {
        assert!(failure(ours.hand_over(of_image, node).await).contains("stands on an image"));
        assert!(failure(ours.read_disk(of_image).await).contains("stands on an image"));
    }
    for volume in [volume, of_image, swapped] {
        assert!(file(own, volume).exists());
        ours.destroy(volume).await.unwrap();
    }
    drop(other);
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_libvirtd_is_told_and_reconnected_to_and_guests_run_on() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    let process = test.server().guest_process(instance).expect("the guest's process");
    let mut events = hypervisor.events();
    for round in 0..2 {
        tokio::task::block_in_place(|| test.server().kill_daemon());
        assert!(hypervisor.list().await.unwrap_err().is_transient(), "gone is unreachable, not a failure");
        wait_for_event(&mut events, HypervisorEvent::LookAtAll).await;
        assert!(hypervisor.start(instance).await.unwrap_err().is_transient());
        // A loss may be told twice; what comes from here on is the return.
        while events.try_recv().is_ok() {}
        tokio::task::block_in_place(|| test.server().start_daemon());
        // Nobody calls: the return is told by itself.
        wait_for_event(&mut events, HypervisorEvent::LookAtAll).await;
        let state = hypervisor.observe(instance).await.unwrap();
        assert_eq!(state.domain, Some(RunState::Running), "round {round}");
        assert_eq!(test.server().guest_process(instance), Some(process), "the same process");
        hypervisor.start(instance).await.expect("every lane reconnects by its next call");
    }
    // Events come again over the new connection. Only once libvirtd talks to the guest again: one that ends
    // before that is found ended, without an event.
    let talks =
        |connect: virt::connect::Connect| connect.lookup_domain_by_uuid(instance.uuid())?.block_stats("vda");
    tokio::task::block_in_place(|| talks(test.server().connection())).unwrap();
    kill(process);
    wait_for_event(&mut events, HypervisorEvent::Changed(instance)).await;
    wait_for("end of the guest", || async {
        let observed = hypervisor.observe(instance).await.unwrap();
        matches!(observed.domain, Some(RunState::Ended(_))).then_some(())
    })
    .await;
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

fn kill(process: i32) {
    send("-9", process);
}

fn send(signal: &str, process: i32) {
    let status = std::process::Command::new("kill").args([signal, &process.to_string()]).status();
    assert!(status.unwrap().success());
}

async fn wait_for_event(
    events: &mut tokio::sync::broadcast::Receiver<HypervisorEvent>,
    wanted: HypervisorEvent,
) {
    let wait = async { while events.recv().await.unwrap() != wanted {} };
    assert!(timeout(PATIENCE, wait).await.is_ok(), "no event {wanted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_does_not_answer_costs_the_deadline_and_no_more() {
    let limit = Duration::from_secs(2);
    let test = Test::new(|config| config.call_timeout = limit).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    wait_for("libvirt", || async { hypervisor.prepare().await.ok() }).await;
    test.server().pause_daemon();
    let begin = Instant::now();
    let error = hypervisor.observe(instance).await.unwrap_err();
    assert!(matches!(error, HypervisorError::TimedOut { .. }), "{error}");
    assert!(begin.elapsed() < limit * 2, "{:?}", begin.elapsed());
    let begin = Instant::now();
    let error = hypervisor.observe(instance).await.unwrap_err();
    assert!(error.is_transient() && begin.elapsed() < limit / 2, "at once: {error}, {:?}", begin.elapsed());
    // Many calls meanwhile neither pile up nor block: each is bounded.
    let begin = Instant::now();
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let hypervisor = Arc::clone(hypervisor);
            tokio::spawn(async move { hypervisor.observe(fresh()).await.is_err() })
        })
        .collect();
    for call in calls {
        assert!(call.await.unwrap());
    }
    assert!(begin.elapsed() < limit * 4, "{:?}", begin.elapsed());
    test.server().resume_daemon();
    wait_for("answer after the pause", || async { hypervisor.observe(instance).await.ok() }).await;
    wait_for("act lane", || async { hypervisor.destroy(instance).await.ok() }).await;
    test.end().await;
}

/// Longer than libvirt's own keepalive would have patience. Where calls share a connection this may end by a crash of
/// libvirt's client (CVE-2024-4418), now and then.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_stands_still_under_many_calls_takes_nobody_along() {
    let test = Test::new(|_| ()).await;
    let hypervisor = &test.hypervisor;
    wait_for("libvirt", || async { hypervisor.prepare().await.ok() }).await;
    for _ in 0..2 {
        let calls: Vec<_> = (0..24)
            .map(|number| {
                let hypervisor = Arc::clone(hypervisor);
                tokio::spawn(async move {
                    for _ in 0..50 {
                        let outcome = match number % 3 {
                            0 => hypervisor.observe(fresh()).await.map(drop),
                            1 => hypervisor.list().await.map(drop),
                            _ => hypervisor.destroy(fresh()).await,
                        };
                        if let Err(error) = outcome {
                            assert!(error.is_transient(), "{error}");
                        }
                    }
                })
            })
            .collect();
        test.server().pause_daemon();
        // Longer than libvirt's keepalive (25 s) has patience.
        tokio::time::sleep(Duration::from_secs(28)).await;
        test.server().resume_daemon();
        for call in calls {
            call.await.unwrap();
        }
    }
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn five_guests_start_side_by_side_and_get_addresses_while_looking_stays_fast() {
    let test = Test::new(|_| ()).await;
    let hypervisor = &test.hypervisor;
    hypervisor.prepare().await.unwrap();
    let instances: Vec<_> = (0..5).map(|_| fresh()).collect();
    let begin = Instant::now();
    let builds: Vec<_> = instances
        .iter()
        .map(|instance| {
            let (hypervisor, instance) = (Arc::clone(hypervisor), *instance);
            tokio::spawn(async move { conformance::build(&*hypervisor, &base(), instance).await })
        })
        .collect();
    let mut slowest = Duration::ZERO;
    let mut seen = 0;
    while builds.iter().any(|build| !build.is_finished()) {
        let look = Instant::now();
        hypervisor.addresses(&instances).await.unwrap();
        slowest = slowest.max(look.elapsed());
        sleep(Duration::from_millis(20)).await;
    }
    for build in builds {
        build.await.unwrap();
    }
    println!("five built: {:?}, slowest look at addresses meanwhile: {slowest:?}", begin.elapsed());
    while seen < instances.len() {
        let addresses = hypervisor.addresses(&instances).await.unwrap();
        seen = addresses.values().filter(|all| all[0].source == AddressSource::Lease).count();
        assert!(begin.elapsed() < PATIENCE * 3, "{seen} addresses only");
        sleep(Duration::from_millis(150)).await;
    }
    println!("five addresses: {:?}", begin.elapsed());
    let room = hypervisor.address_room().await.unwrap().unwrap();
    // A guest may have had another one for its first stage of booting.
    assert!(room.total == 253 && room.left <= 248 && room.next.is_some(), "{room:?}");
    let look = Instant::now();
    assert_eq!(hypervisor.list().await.unwrap().len(), 5);
    println!("list of five: {:?}", look.elapsed());
    let begin = Instant::now();
    let ends: Vec<_> = instances
        .iter()
        .map(|instance| {
            let (hypervisor, instance) = (Arc::clone(hypervisor), *instance);
            tokio::spawn(async move { hypervisor.destroy(instance).await.unwrap() })
        })
        .collect();
    for end in ends {
        end.await.unwrap();
    }
    println!("five destroyed: {:?}", begin.elapsed());
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert_eq!(std::fs::read_dir(&test.config.pool_path).unwrap().count(), 0, "no volume is left");
    assert_eq!(std::fs::read_dir(&test.config.console_dir).unwrap().count(), 0, "no console log is left");
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn five_guests_whose_memory_is_saved_without_end_leave_room_for_what_is_done_to_others() {
    let test = Test::new(|config| config.call_timeout = Duration::from_secs(3)).await;
    let hypervisor = &test.hypervisor;
    hypervisor.prepare().await.unwrap();
    let instances: Vec<_> = (0..6).map(|_| fresh()).collect();
    for instance in &instances {
        conformance::build(&**hypervisor, &base(), *instance).await;
    }
    let (stuck, other) = instances.split_at(5);
    for instance in stuck {
        send("-STOP", test.server().guest_process(*instance).expect("it runs"));
    }
    let save = |instance: InstanceId| {
        let hypervisor = Arc::clone(hypervisor);
        tokio::spawn(async move { hypervisor.save(instance).await })
    };
    let saves: Vec<_> = stuck.iter().copied().map(save).collect();
    let mut saved = Vec::new();
    for save in saves {
        saved.push(save.await.unwrap());
    }
    let count =
        |is: fn(&HypervisorError) -> bool| saved.iter().filter(|it| it.as_ref().is_err_and(is)).count();
    assert_eq!(count(|error| matches!(error, HypervisorError::TimedOut { .. })), 4, "{saved:?}");
    let waits = |error: &HypervisorError| error.to_string().contains("the memory of 4 others is being saved");
    assert_eq!(count(waits), 1, "{saved:?}");
    hypervisor.pause(other[0]).await.expect("another is paused meanwhile");
    // libvirt gives each ten seconds to end by itself.
    for instance in &instances {
        wait_for("each can be ended", || async { hypervisor.destroy(*instance).await.ok() }).await;
    }
    let later = fresh();
    conformance::build(&**hypervisor, &base(), later).await;
    wait_for("a save", || async { hypervisor.save(later).await.ok() }).await;
    hypervisor.destroy(later).await.unwrap();
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overlay_of_an_image_with_an_odd_number_of_sectors_is_found_as_wanted() {
    use std::os::unix::fs::MetadataExt;

    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    let path = test.config.pool_path.with_extension("odd.raw");
    std::fs::write(&path, vec![0; 2049 * 512]).unwrap();
    let odd = BaseImage { path, format: DiskFormat::Raw, virtual_size: 2049 * 512, digest: "odd".into() };
    let volume = test.config.pool_path.join(format!("{instance}.qcow2"));
    hypervisor.create_overlay(instance, &odd, None).await.unwrap();
    let made = std::fs::metadata(&volume).unwrap();
    hypervisor.create_overlay(instance, &odd, None).await.unwrap();
    let found = std::fs::metadata(&volume).unwrap();
    assert_eq!((found.ino(), found.ctime_nsec()), (made.ino(), made.ctime_nsec()), "made again");
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

/// As it is after a kill between two of libvirt's own notes: that it copies, and what it copies to where.
#[tokio::test(flavor = "multi_thread")]
async fn a_backup_that_libvirt_lost_track_of_is_told_with_what_helps() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance, copy) = (&test.hypervisor, fresh(), fresh());
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    let process = test.server().guest_process(instance).expect("the guest's process");
    let noted = format!("/proc/{process}/root/run/libvirt/qemu/{instance}.xml");
    let start = || tokio::task::block_in_place(|| test.server().start_daemon());
    let kill = || tokio::task::block_in_place(|| test.server().kill_daemon());
    kill();
    let was = std::fs::read_to_string(&noted).unwrap();
    let job = "<job type='none' async='backup' flags='0x0' asyncStarted='1700000000000'/>";
    let is = was.replacen("<domain type=", &format!("{job}<domain type="), 1);
    assert!(is != was && !was.contains("<job "), "{was}");
    std::fs::write(&noted, is).unwrap();
    start();

    let of = VolumeSource::Copy(CopyOf::disk(Workload::Machine, instance));
    let told = async |wanted: &str, error: HypervisorError| {
        assert!(error.is_transient() && error.to_string().contains(wanted), "{error}");
    };
    let begun = Instant::now();
    told("stop the guest", hypervisor.create_volume(copy, &of, Some(1 << 30)).await.unwrap_err()).await;
    assert!(begun.elapsed() < PATIENCE, "it is told before anybody waits for a lock");
    told("stop the guest", hypervisor.save(instance).await.unwrap_err()).await;
    hypervisor.power_off(instance).await.unwrap();
    told("has to be started anew", hypervisor.start(instance).await.unwrap_err()).await;
    kill();
    start();
    hypervisor.start(instance).await.unwrap();
    hypervisor.create_volume(copy, &of, Some(1 << 30)).await.unwrap();
    for disk in [copy, instance] {
        hypervisor.destroy(disk).await.unwrap();
    }
    test.end().await;
}

/// libvirt looks into no pool's directory while it makes a disk there, and a copy takes minutes.
#[tokio::test(flavor = "multi_thread")]
async fn while_libvirt_copies_one_disk_others_are_replaced_and_a_next_agent_waits_for_it() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, big, copy, other) = (Arc::clone(&test.hypervisor), fresh(), fresh(), fresh());
    let [guest, named, renamed, live] = [fresh(), fresh(), fresh(), fresh()];
    hypervisor.prepare().await.unwrap();
    let file = |name: String| test.config.pool_path.join(name);
    // A guest's volume that libvirt's pool has not heard of, as of one that another node handed over.
    conformance::build(&*hypervisor, &base(), guest).await;
    hypervisor.create_volume(named, &VolumeSource::Empty, Some(1 << 20)).await.unwrap();
    std::fs::rename(file(format!("{named}.qcow2")), file(format!("{renamed}.qcow2"))).unwrap();
    let given = [Attachment { volume: renamed, device: "vdb".to_owned() }];
    hypervisor.set_volumes(guest, &given).await.unwrap();
    hypervisor.create_volume(big, &VolumeSource::Empty, Some(1 << 30)).await.unwrap();
    let written = test.config.pool_path.with_extension("raw");
    let mut random = std::io::Read::take(std::fs::File::open("/dev/urandom").unwrap(), 700 << 20);
    std::io::copy(&mut random, &mut std::fs::File::create(&written).unwrap()).unwrap();
    let wrote = std::process::Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .args([&written, &file(format!("{big}.qcow2"))])
        .status();
    assert!(wrote.unwrap().success());
    hypervisor.create_overlay(other, &base(), None).await.unwrap();
    hypervisor.create_successor(other, &VolumeSource::Image(base()), None).await.unwrap();

    let of = VolumeSource::Copy(CopyOf::disk(Workload::Volume, big));
    let copying = {
        let (hypervisor, of) = (Arc::clone(&hypervisor), of.clone());
        tokio::spawn(async move { hypervisor.create_volume(copy, &of, Some(1 << 30)).await })
    };
    let part = file(format!("{copy}.{big}.part.qcow2"));
    wait_for("beginning of a copy", async || {
        std::fs::metadata(&part).ok().filter(|part| part.len() > 1 << 20)
    })
    .await;
    hypervisor.replace_overlay(other).await.unwrap();
    let bytes = base().virtual_size.next_multiple_of(1024);
    assert_eq!(hypervisor.disk_bytes(other).await.unwrap(), Some(bytes), "measured all the same");
    let live_copy = {
        let (hypervisor, of) =
            (Arc::clone(&hypervisor), VolumeSource::Copy(CopyOf::disk(Workload::Volume, renamed)));
        tokio::spawn(async move { hypervisor.create_volume(live, &of, Some(1 << 20)).await })
    };
    // What waits for the end of the copy: nothing is wrong with it.
    let grown = hypervisor.grow_disk(big, 2 << 30).await.unwrap_err();
    assert!(grown.is_transient(), "{grown}");
    // The next agent's, whose predecessor was killed: libvirt goes on with what that began.
    let next = test.second(|_| ()).create_volume(copy, &of, Some(1 << 30)).await.unwrap_err();
    assert!(next.is_transient(), "{next}");
    assert!(!copying.is_finished(), "it was to be copied meanwhile");
    copying.await.unwrap().unwrap();
    live_copy.await.unwrap().expect("a copy from a guest that is up");
    for disk in [guest, renamed, live] {
        hypervisor.destroy(disk).await.unwrap();
    }

    assert_eq!(hypervisor.disk_bytes(copy).await.unwrap(), Some(1 << 30));
    // A start meets the same lock as long as somebody holds it, which a copy may cease to do at any moment.
    let volumes = vec![Attachment { volume: big, device: "vdb".to_owned() }];
    let spec = DomainSpec { volumes, ..conformance::small_domain(other) };
    hypervisor.define(&spec).await.unwrap();
    let big_file = file(format!("{big}.qcow2"));
    let hold =
        || std::process::Command::new("qemu-io").args(["-c", "sleep 60000"]).arg(&big_file).spawn().unwrap();
    let holder = std::sync::Mutex::new(hold());
    wait_for("lock", async || {
        // Whoever copies it may be at its end just now.
        let mut holder = holder.lock().unwrap();
        if holder.try_wait().unwrap().is_some() {
            *holder = hold();
        }
        let look = std::process::Command::new("qemu-img").arg("info").arg(&big_file).output().unwrap();
        (!look.status.success()).then_some(())
    })
    .await;
    let started = hypervisor.start(other).await.unwrap_err();
    assert!(started.is_transient(), "{started}");
    let mut holder = holder.into_inner().unwrap();
    holder.kill().unwrap();
    holder.wait().unwrap();
    hypervisor.start(other).await.unwrap();
    hypervisor.power_off(other).await.unwrap();
    let connect = virt::connect::Connect::open(Some(&test.config.uri)).unwrap();
    let pool = connect.lookup_storage_pool_by_name(&test.config.pool).unwrap();
    let mut known: Vec<_> =
        pool.list_all_volumes(0).unwrap().iter().map(|volume| volume.name().unwrap()).collect();
    known.sort_unstable();
    let mut there: Vec<_> = [big, copy, other].iter().map(|disk| format!("{disk}.qcow2")).collect();
    there.sort_unstable();
    assert_eq!(known, there, "and libvirt has heard of all");
    // What an agent could not tell it any more the next one does.
    let gone = format!("{copy}.qcow2");
    std::fs::remove_file(file(gone.clone())).unwrap();
    test.second(|_| ()).drop_successor(other).await.unwrap();
    pool.lookup_storage_vol_by_name(&gone).expect_err("it is not there");
    for disk in [other, big, copy] {
        hypervisor.destroy(disk).await.unwrap();
    }
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_grows_under_its_guest_whatever_somebody_calls_it() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    hypervisor.create_overlay(instance, &base(), None).await.unwrap();
    hypervisor.define(&conformance::small_domain(instance)).await.unwrap();
    let connect = virt::connect::Connect::open(Some(&test.config.uri)).unwrap();
    let document = connect.lookup_domain_by_uuid(instance.uuid()).unwrap().xml_desc(0).unwrap();
    connect.define_domain_xml(&document.replace("'vda'", "'vdc'")).unwrap();
    hypervisor.start(instance).await.unwrap();
    hypervisor.grow_disk(instance, 1 << 31).await.unwrap();
    assert_eq!(hypervisor.disk_bytes(instance).await.unwrap(), Some(1 << 31));
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

/// As of a guest that did not let go of it, and whose next start is without it.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_saved_memory_alone_has_is_seen_and_that_a_rescued_guest_has_none_is_not_what_it_will_have()
 {
    let test = Test::new(|_| ()).await;
    let (hypervisor, [instance, volume]) = (&test.hypervisor, [fresh(), fresh()]);
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    hypervisor.create_volume(volume, &VolumeSource::Empty, Some(1 << 30)).await.unwrap();
    let has = [Attachment { volume, device: "vdb".to_owned() }];
    let seen = async || {
        let seen = hypervisor.observe(instance).await.unwrap();
        (seen.domain, seen.rescued, seen.volumes)
    };
    let (saved, ended) = (Some(RunState::Saved), Some(RunState::Ended(End::ByHand)));
    hypervisor.set_volumes(instance, &has).await.unwrap();
    hypervisor.save(instance).await.unwrap();
    assert_eq!(seen().await, (saved, false, Attachment::fingerprint(&has)));
    let mut command = std::process::Command::new("virsh");
    command.args(["--connect", &test.config.uri, "detach-disk", &instance.to_string(), "vdb", "--config"]);
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(seen().await, (saved, false, Observed::OTHER_VOLUMES));
    assert_eq!(hypervisor.volumes_of(instance).await.unwrap(), has);
    hypervisor.start(instance).await.unwrap();
    assert_eq!(seen().await, (Some(RunState::Running), false, Observed::OTHER_VOLUMES));
    hypervisor.power_off(instance).await.unwrap();
    assert_eq!(seen().await, (ended, false, Attachment::fingerprint(&[])));

    hypervisor.set_volumes(instance, &has).await.unwrap();
    hypervisor.create_rescue(instance, &base()).await.unwrap();
    hypervisor.start_rescue(&conformance::small_domain(instance)).await.unwrap();
    assert_eq!(seen().await, (Some(RunState::Running), true, Attachment::fingerprint(&has)));
    hypervisor.save(instance).await.unwrap();
    assert_eq!(seen().await, (saved, true, Attachment::fingerprint(&has)));
    for disk in [instance, volume] {
        hypervisor.destroy(disk).await.unwrap();
    }
    test.end().await;
}

/// libvirt itself throws such memory away at the next start.
#[tokio::test(flavor = "multi_thread")]
async fn saved_memory_that_a_power_cut_left_in_halves_is_none_and_hides_no_guest() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    hypervisor.create_overlay(instance, &base(), None).await.unwrap();
    hypervisor.define(&conformance::small_domain(instance)).await.unwrap();
    hypervisor.start(instance).await.unwrap();
    hypervisor.save(instance).await.unwrap();
    let saved = test.server.as_ref().unwrap().directory().join("var/lib/libvirt/qemu/save");
    let saved = std::fs::File::options().write(true).open(saved.join(format!("{instance}.save")));
    assert_eq!(hypervisor.observe(instance).await.unwrap().domain, Some(RunState::Saved));
    let mut saved = saved.unwrap();
    // As libvirt begins to write it; and not even that.
    saved.write_all(b"LibvirtQemudPart").unwrap();
    for is_empty in [false, true] {
        if is_empty {
            saved.set_len(0).unwrap();
        }
        let seen = hypervisor.observe(instance).await.unwrap().domain;
        assert_eq!(seen, Some(RunState::Ended(End::ByHand)), "its memory is gone");
    }
    assert!(hypervisor.list().await.unwrap().contains_key(&instance), "and nobody else is hidden");
    hypervisor.drop_rescue(instance).await.unwrap();
    // Nor does it keep its guest from having another size, other volumes or another disk.
    let spec = DomainSpec { vcpus: 2, ..conformance::small_domain(instance) };
    hypervisor.redefine(&spec).await.unwrap();
    hypervisor.set_volumes(instance, &[]).await.unwrap();
    hypervisor.create_rescue(instance, &base()).await.unwrap();
    hypervisor.start_rescue(&spec).await.unwrap();
    let seen = hypervisor.observe(instance).await.unwrap();
    assert_eq!((seen.domain, seen.rescued), (Some(RunState::Running), true));
    hypervisor.power_off(instance).await.unwrap();
    hypervisor.drop_rescue(instance).await.unwrap();
    hypervisor.start(instance).await.unwrap();
    let seen = hypervisor.observe(instance).await.unwrap();
    assert_eq!((seen.domain, seen.rescued), (Some(RunState::Running), false));
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_console_is_text_and_half_made_overlays_are_made_again() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    // As left by a daemon that ended while making it: libvirt does not know the file.
    std::fs::write(test.config.pool_path.join(format!("{instance}.qcow2")), "half").unwrap();
    assert!(hypervisor.observe(instance).await.unwrap().volume);
    let begin = Instant::now();
    hypervisor.create_overlay(instance, &base(), Some(100 << 20)).await.unwrap();
    println!("overlay: {:?}", begin.elapsed());
    let begin = Instant::now();
    hypervisor.define(&conformance::small_domain(instance)).await.unwrap();
    println!("define: {:?}", begin.elapsed());
    let begin = Instant::now();
    hypervisor.start(instance).await.unwrap();
    println!("start: {:?}", begin.elapsed());
    let text = wait_for("line on the console", || async {
        let text = hypervisor.console_tail(instance, 4000).await.unwrap();
        text.contains("vda 100 MiB").then_some(text)
    })
    .await;
    println!("console: {:?}", begin.elapsed());
    assert!(!text.contains(|c: char| c.is_control() && c != '\n' && c != '\t'), "{text:?}");
    assert!(hypervisor.console_tail(instance, 10).await.unwrap().len() <= 10);
    hypervisor.destroy(instance).await.unwrap();
    assert_eq!(hypervisor.console_tail(instance, 10).await.unwrap(), "");

    std::fs::write(test.config.pool_path.join(format!("{instance}.qcow2")), "half").unwrap();
    hypervisor.destroy(instance).await.unwrap();
    assert!(!hypervisor.observe(instance).await.unwrap().volume);
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_console_runs_commands_survives_a_flood_and_ends_with_its_daemon() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    wait_for("address", || async { hypervisor.addresses(&[instance]).await.unwrap().remove(&instance) })
        .await;
    let mut console = hypervisor.open_console(instance).await.unwrap();
    // Computed by the guest, so that it is not the echo of what was typed.
    let (mut text, begin) = (String::new(), Instant::now());
    while !text.contains("is 42\r") {
        console.input.send(Typed::new("echo it is $((6*7))\r").0).await.unwrap();
        if let Ok(piece) = timeout(Duration::from_secs(2), console.output.recv()).await {
            text.push_str(&String::from_utf8_lossy(&piece.unwrap().unwrap()));
        }
        assert!(begin.elapsed() < PATIENCE, "{text}");
    }
    let begin = Instant::now();
    console.input.send(Typed::new("echo and $((6*8))\r").0).await.unwrap();
    while !text.contains("and 48\r") {
        text.push_str(&String::from_utf8_lossy(&console.output.recv().await.unwrap().unwrap()));
    }
    println!("an answer on the console: {:?}", begin.elapsed());

    // Nobody reads for a while: what is kept is bounded, and what comes afterwards is heard.
    console
        .input
        .send(Typed::new("dd if=/dev/zero bs=1k count=600 | tr '\\0' x; echo done $((6*9))\r").0)
        .await
        .unwrap();
    sleep(Duration::from_secs(5)).await;
    let begin = Instant::now();
    let (mut heard, mut end) = (0, String::new());
    while !end.contains("done 54\r") {
        if let Ok(piece) = timeout(Duration::from_secs(2), console.output.recv()).await {
            let piece = piece.unwrap().unwrap();
            heard += piece.len();
            end = end.chars().skip(end.len().saturating_sub(100)).collect();
            end.push_str(&String::from_utf8_lossy(&piece));
        } else {
            console.input.send(Typed::new("echo done $((6*9))\r").0).await.unwrap();
        }
        assert!(begin.elapsed() < PATIENCE, "{heard} bytes, then {end}");
    }
    println!("of 600 KiB {heard} bytes were heard");

    tokio::task::block_in_place(|| test.server().kill_daemon());
    let mut last = None;
    let ended = timeout(Duration::from_secs(10), async {
        while let Some(piece) = console.output.recv().await {
            last = Some(piece);
        }
    });
    ended.await.expect("it ends with its daemon");
    let broke = last.unwrap().unwrap_err();
    assert!(broke.is_transient(), "the guest runs on: {broke}");
    assert!(hypervisor.open_console(instance).await.unwrap_err().is_transient());
    tokio::task::block_in_place(|| test.server().start_daemon());
    wait_for("console", || async { hypervisor.open_console(instance).await.ok() }).await;
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_configured_wrong_is_refused_with_the_names_in_question() {
    let test = Test::new(|_| ()).await;
    test.hypervisor.prepare().await.unwrap();
    let elsewhere = test.server().directory().join("elsewhere");
    let error = failure(test.second(|config| config.pool_path = elsewhere.clone()).prepare().await);
    for part in ["`ecompute`", "elsewhere", "instances"] {
        assert!(error.contains(part), "{error}");
    }
    let error = failure(test.second(|config| config.pool = "other".into()).prepare().await);
    assert!(error.contains("`ecompute`") && error.contains("`other`"), "{error}");
    let error = failure(test.second(|config| config.network = "nowhere".into()).prepare().await);
    assert!(error.contains("`nowhere`"), "{error}");
    let error = failure(test.second(|config| config.bridge = Some("nobr0".into())).prepare().await);
    assert!(error.contains("`nobr0`"), "{error}");
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_sees_another_file_system_at_the_pool_is_told_of_before_anything_is_made() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, place) = (&test.hypervisor, &test.config.pool_path);
    hypervisor.probe_pool().await.expect("there is no pool yet");
    std::fs::create_dir_all(place).unwrap();
    // Before the pool is there, and below one that is.
    for _ in 0..2 {
        test.server().mount_over(place);
        let pool = test.server().connection().lookup_storage_pool_by_name(&test.config.pool);
        if let Ok(pool) = pool {
            pool.refresh(0).unwrap();
        }
        let why = failure(hypervisor.prepare().await);
        assert!(why.contains("another file system at") && why.contains("64 MiB instead of"), "{why}");
        assert_eq!(failure(hypervisor.probe_pool().await).split_once("libvirtd has").map(|_| ()), Some(()));
        test.server().unmount(place);
        // What libvirt knew was of before.
        hypervisor.probe_pool().await.unwrap();
        hypervisor.prepare().await.unwrap();
    }
    test.end().await;
}

/// What is really defined: as libvirt tells it, through everything that a guest may become.
#[tokio::test(flavor = "multi_thread")]
async fn what_libvirt_made_of_our_documents_is_valid_by_its_own_schemas() {
    let mut test = Test::new(|config| config.graphics = true).await;
    let bridge = test.server().bridge().to_owned();
    test.hypervisor = Arc::new(test.second(|config| config.bridge = Some(bridge)));
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    let look = |what: &str, is_up: bool| {
        tokio::task::block_in_place(|| {
            let connect = test.server().connection();
            let domain = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
            assert_eq!(domain.is_active().unwrap(), is_up, "{what}");
            assert_valid(&domain.xml_desc(virt::sys::VIR_DOMAIN_XML_INACTIVE).unwrap(), "domain");
            let now = domain.xml_desc(0).unwrap();
            assert_valid(&now, "domain");
            now
        })
    };
    hypervisor.create_overlay(instance, &base(), None).await.unwrap();
    let spec = conformance::small_domain(instance);
    hypervisor.define(&spec).await.unwrap();
    look("defined", false);
    hypervisor.start(instance).await.unwrap();
    let up = look("up", true);
    for part in ["<graphics type='vnc'", "<interface type='bridge'>", "<metadata>"] {
        assert!(up.contains(part), "no {part} in {up}");
    }
    hypervisor.create_rescue(instance, &base()).await.unwrap();
    hypervisor.power_off(instance).await.unwrap();
    hypervisor.start_rescue(&spec).await.unwrap();
    assert!(look("rescued", true).contains("'vdb'"), "its own disk is the second");
    hypervisor.power_off(instance).await.unwrap();
    hypervisor.drop_rescue(instance).await.unwrap();
    let large = ec_hypervisor::DomainSpec { vcpus: 2, memory_mb: 1024, ..spec };
    hypervisor.redefine(&large).await.unwrap();
    let resized = look("resized", false);
    assert!(resized.contains(">2</vcpu>") && resized.contains("<maxMemory "), "{resized}");
    hypervisor.start(instance).await.unwrap();
    hypervisor.grow(&ec_hypervisor::DomainSpec { memory_mb: 1152, ..large }).await.unwrap();
    assert!(look("grown", true).contains("<memory model='dimm'>"), "it was given more");
    hypervisor.power_off(instance).await.unwrap();
    let defined = look("grown, and ended", false);
    assert!(defined.contains(">1179648</memory>") && !defined.contains("dimm"), "{defined}");
    tokio::task::block_in_place(|| {
        let connect = test.server().connection();
        for pool in connect.list_all_storage_pools(0).unwrap() {
            assert_valid(&pool.xml_desc(0).unwrap(), "storagepool");
            for volume in pool.list_all_volumes(0).unwrap() {
                assert_valid(&volume.xml_desc(0).unwrap(), "storagevol");
            }
        }
        for network in connect.list_all_networks(0).unwrap() {
            assert_valid(&network.xml_desc(0).unwrap(), "network");
        }
    });
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

/// As `virsh edit` and `virsh attach-disk --config` do it.
#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_changed_of_a_definition_stays_when_the_guest_gets_another_size() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    hypervisor.create_overlay(instance, &base(), None).await.unwrap();
    let spec = conformance::small_domain(instance);
    hypervisor.define(&spec).await.unwrap();
    let connect = test.server().connection();
    let defined = || {
        tokio::task::block_in_place(|| {
            let domain = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
            domain.xml_desc(virt::sys::VIR_DOMAIN_XML_INACTIVE).unwrap()
        })
    };
    let edit = |from: &str, to: &str| {
        let document = defined();
        assert!(document.contains(from), "no {from} in {document}");
        let edited = document.replacen(from, to, 1);
        tokio::task::block_in_place(|| connect.define_domain_xml(&edited).unwrap());
    };
    let theirs = test.config.pool_path.with_extension("raw");
    std::fs::File::create(&theirs).unwrap().set_len(1 << 20).unwrap();
    let disk = format!(
        "<disk type='file' device='disk'><source file='{}'/><target dev='vdx' bus='virtio'/></disk></devices>",
        theirs.display()
    );
    edit("</devices>", &disk);
    edit("<os>", "<cputune><shares>512</shares></cputune><description>a &amp; b</description><os>");
    let is_as_they_made_it = |size: (u64, u64)| {
        let document = defined();
        for part in ["dev='vdx'", "<shares>512</shares>", "a &amp; b", "<panic model='isa'"] {
            assert!(document.contains(part), "no {part} in {document}");
        }
        assert_valid(&document, "domain");
        let size = format!(">{}</memory>", size.1 << 10);
        assert!(document.contains(&size), "no {size} in {document}");
    };
    let size = async || {
        let size = hypervisor.size(instance).await.unwrap().unwrap();
        (size.vcpus, size.memory_mb)
    };

    for (vcpus, memory_mb) in [(2, 1024), (1, 128), (3, 2048), (2, 1024)] {
        hypervisor.redefine(&DomainSpec { vcpus, memory_mb, ..spec.clone() }).await.unwrap();
        assert_eq!(size().await, (vcpus, memory_mb));
        is_as_they_made_it((vcpus, memory_mb));
    }
    hypervisor.start(instance).await.unwrap();
    hypervisor.grow(&DomainSpec { vcpus: 2, memory_mb: 1152, ..spec.clone() }).await.unwrap();
    is_as_they_made_it((2, 1152));
    hypervisor.power_off(instance).await.unwrap();
    assert_eq!(size().await, (2, 1152));

    // A size of theirs is not kept, however they said it.
    let dimm =
        "<memory model='dimm'><target><size unit='MiB'>256</size><node>0</node></target></memory></devices>";
    edit("</devices>", dimm);
    assert_eq!(size().await, (2, 1408));
    hypervisor.redefine(&DomainSpec { vcpus: 2, memory_mb: 1152, ..spec.clone() }).await.unwrap();
    assert_eq!(size().await, (2, 1152));
    is_as_they_made_it((2, 1152));

    // What cannot be made another size is as a new one would be.
    edit(
        "<cell id='0' cpus='0-1' memory='1179648' unit='KiB'/>",
        "<cell id='0' cpus='0' memory='589824' unit='KiB'/><cell id='1' cpus='1' memory='589824' unit='KiB'/>",
    );
    hypervisor.redefine(&DomainSpec { vcpus: 1, memory_mb: 128, ..spec.clone() }).await.unwrap();
    assert_eq!(size().await, (1, 128));
    assert!(!defined().contains("vdx") && !defined().contains("<shares>"), "{}", defined());
    hypervisor.destroy(instance).await.unwrap();
    assert!(theirs.exists(), "their disk is theirs");
    test.end().await;
}

/// Between the question for a domain and that for its mark it goes: then it is nobody's, and not another's, whose disk would be
/// none of ours.
#[tokio::test(flavor = "multi_thread")]
async fn a_domain_that_goes_while_it_is_looked_at_leaves_its_disk_seen() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    hypervisor.power_off(instance).await.unwrap();
    let connect = test.server().connection();
    let comes_and_goes = tokio::task::spawn_blocking(move || {
        let domain = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
        let document = domain.xml_desc(0).unwrap();
        for _ in 0..200 {
            connect.lookup_domain_by_uuid(instance.uuid()).unwrap().undefine().unwrap();
            connect.define_domain_xml(&document).unwrap();
        }
    });
    while !comes_and_goes.is_finished() {
        let observed = hypervisor.observe(instance).await.unwrap();
        assert!(observed.volume, "{observed:?}");
        let all = hypervisor.list().await.unwrap();
        assert!(all.get(&instance).is_some_and(|observed| observed.volume), "{all:?}");
    }
    comes_and_goes.await.unwrap();
    test.end().await;
}

/// Somebody undefines a guest that runs, and ends it while it is defined for good again: whatever was first, nobody takes
/// what is left for a domain that was never started.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_somebody_undefines_and_ends_is_not_taken_for_one_that_never_ran() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    let spec = conformance::small_domain(instance);
    let connect = test.server().connection();
    let domain = || connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
    let undefine = || tokio::task::block_in_place(|| domain().undefine().unwrap());
    hypervisor.persist(&spec).await.expect("it is for good already");
    for grows in [false, true] {
        undefine();
        match grows {
            false => hypervisor.persist(&spec).await.expect("it runs"),
            true => hypervisor.grow(&spec).await.expect("it runs, and is as large"),
        }
        let observed = hypervisor.observe(instance).await.unwrap();
        assert!(observed.domain == Some(RunState::Running) && !observed.transient, "{observed:?}");
    }
    for (pause_ms, grows) in [0, 1, 2, 3, 5, 8].into_iter().flat_map(|ms| [(ms, false), (ms, true)]) {
        undefine();
        let ended = domain();
        let ends = tokio::task::spawn_blocking(move || {
            // Not waited for anything: its end is to fall between other calls each time.
            std::thread::sleep(Duration::from_millis(pause_ms));
            ended.destroy().unwrap();
        });
        // What has its size already is only defined by that, too.
        let defined = match grows {
            false => hypervisor.persist(&spec).await,
            true => hypervisor.grow(&spec).await,
        };
        ends.await.unwrap();
        let left = hypervisor.observe(instance).await.unwrap().domain;
        match defined {
            Ok(()) => assert_eq!(left, Some(RunState::Ended(ec_hypervisor::End::ByHand))),
            Err(error) => assert!((grows || error.is_transient()) && left.is_none(), "{error}: {left:?}"),
        }
        hypervisor.define(&spec).await.unwrap();
        hypervisor.start(instance).await.unwrap();
    }
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

/// `virsh metadata … --remove`, by hand or by a tool that writes definitions anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_whose_mark_somebody_took_away_is_seen_and_is_the_nodes_again_by_what_is_told() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    let uri = test.config.uri.clone();
    let shell = |command: &str| {
        let done =
            std::process::Command::new("sh").args(["-c", command]).env("LIBVIRT_DEFAULT_URI", &uri).output();
        let done = done.unwrap();
        assert!(done.status.success(), "{command}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let foreign = Observed { foreign: true, ..Observed::default() };
    for (runs, how) in [(true, " --live"), (false, "")] {
        shell(&format!("virsh metadata {instance} --uri urn:project:etcd-compute/1 --config{how} --remove"));
        assert_eq!(hypervisor.observe(instance).await.unwrap(), foreign);
        assert_eq!(hypervisor.list().await.unwrap().get(&instance), Some(&foreign));
        let why = failure(hypervisor.destroy(instance).await);
        let command = why.split('`').nth(1).unwrap();
        assert!(command.starts_with(&format!("virsh metadata {instance} ")), "{why}");
        shell(&format!("{command}{how}"));
        let seen = hypervisor.observe(instance).await.unwrap();
        assert!(seen.volume && (seen.domain == Some(RunState::Running)) == runs && !seen.foreign, "{seen:?}");
        hypervisor.power_off(instance).await.unwrap();
    }
    // Without a disk of its name there is nothing that anybody could take for gone.
    let disk = test.config.pool_path.join(format!("{instance}.qcow2"));
    shell(&format!("virsh metadata {instance} --uri urn:project:etcd-compute/1 --config --remove"));
    std::fs::rename(&disk, disk.with_extension("away")).unwrap();
    assert_eq!(hypervisor.observe(instance).await.unwrap(), Observed::default());
    assert!(hypervisor.list().await.unwrap().is_empty());
    std::fs::rename(disk.with_extension("away"), &disk).unwrap();
    shell(&format!("virsh undefine {instance}"));
    assert!(hypervisor.observe(instance).await.unwrap().volume);
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

/// As `virsh snapshot-create-as --disk-only` and `virsh blockcopy --pivot` do it.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_somebody_moved_is_not_taken_for_the_file_that_was_left_behind() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    let [volume, other, copy] = [fresh(), fresh(), fresh()];
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    for volume in [volume, other] {
        hypervisor.create_volume(volume, &VolumeSource::Empty, Some(1 << 30)).await.unwrap();
    }
    let has = |volume, device: &str| Attachment { volume, device: device.to_owned() };
    let [one, both] = [vec![has(volume, "vdb")], vec![has(volume, "vdb"), has(other, "vdc")]];
    hypervisor.set_volumes(instance, &one).await.unwrap();
    let virsh = |arguments: &[&str]| {
        let mut command = std::process::Command::new("virsh");
        let done = command.args(["--connect", &test.config.uri]).args(arguments).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let domain = instance.to_string();
    let away = test.config.pool_path.with_extension("away");
    std::fs::create_dir(&away).unwrap();
    let elsewhere = |device: &str| format!("{device},file={}/{device}.qcow2", away.display());
    virsh(&[
        "snapshot-create-as",
        &domain,
        "--disk-only",
        "--no-metadata",
        "--diskspec",
        &elsewhere("vda"),
        "--diskspec",
        &elsewhere("vdb"),
    ]);

    let of = |kind, disk| VolumeSource::Copy(CopyOf::disk(kind, disk));
    for (is_up, volumes) in [(true, &one), (false, &both)] {
        let observed = hypervisor.observe(instance).await.unwrap();
        assert_eq!(observed.volumes, Attachment::fingerprint(volumes), "it has it still");
        for refused in [
            hypervisor.create_successor(instance, &VolumeSource::Image(base()), None).await,
            hypervisor.replace_overlay(instance).await,
            hypervisor.create_rescue(instance, &base()).await,
            hypervisor.grow_disk(instance, 1 << 31).await,
            hypervisor.grow_disk(volume, 1 << 31).await,
            hypervisor.grow(&conformance::small_domain(instance)).await,
            hypervisor.set_volumes(instance, &[]).await,
            hypervisor.create_volume(copy, &of(Workload::Machine, instance), Some(1 << 30)).await,
            hypervisor.create_volume(copy, &of(Workload::Volume, volume), Some(1 << 30)).await,
        ] {
            let why = failure(refused);
            assert!(why.contains("/away") || why.contains(".away/"), "{why}");
            assert!(why.contains("bring it back"), "{why}");
        }
        hypervisor.destroy(volume).await.expect_err("its guest has it");
        // Nobody else would know where it is.
        let why = failure(hypervisor.destroy(instance).await);
        assert!(why.contains(".away/vdb.qcow2") && why.contains("bring it back"), "{why}");
        let observed = hypervisor.observe(instance).await.unwrap();
        assert!(observed.domain.is_some(), "{observed:?}");
        // What else it has is none of that.
        hypervisor.set_volumes(instance, &both).await.unwrap();
        if is_up {
            hypervisor.power_off(instance).await.unwrap();
        }
    }
    hypervisor.set_volumes(instance, &one).await.unwrap();
    hypervisor.start(instance).await.unwrap();
    for device in ["vda", "vdb"] {
        // Not into the image below.
        virsh(&["blockcommit", &domain, device, "--active", "--shallow", "--pivot", "--wait"]);
    }
    hypervisor.grow_disk(instance, 1 << 31).await.unwrap();
    hypervisor.power_off(instance).await.unwrap();
    hypervisor.set_volumes(instance, &[]).await.unwrap();
    for disk in [instance, volume, other] {
        hypervisor.destroy(disk).await.unwrap();
    }
    test.end().await;
}

/// By each word of what is told, beside what an operator laid there.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_told_of_a_disk_that_somebody_moved_beside_itself_helps_and_a_backup_there_is_nobodys() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    let domain = instance.to_string();
    let at = |end: &str| test.config.pool_path.join(format!("{instance}.{end}"));
    let run = |program: &str, arguments: &[&str]| {
        let done = std::process::Command::new(program).args(arguments).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let virsh = |arguments: &[&str]| run("virsh", &[&["--connect", &test.config.uri], arguments].concat());
    let passes = async || {
        hypervisor.create_successor(instance, &VolumeSource::Image(base()), None).await.unwrap();
        hypervisor.drop_successor(instance).await.unwrap();
    };
    let refused =
        async || failure(hypervisor.create_successor(instance, &VolumeSource::Image(base()), None).await);
    hypervisor.power_off(instance).await.unwrap();
    std::fs::copy(at("qcow2"), at("backup.qcow2")).unwrap();
    std::fs::write(at("mine.qcow2"), "").unwrap();
    passes().await;

    hypervisor.start(instance).await.unwrap();
    virsh(&["snapshot-create-as", &domain, "ext", "--disk-only", "--atomic"]);
    let why = refused().await;
    assert!(why.contains("while the guest is up (`virsh blockcommit --shallow --active --pivot`)"), "{why}");
    virsh(&["blockcommit", &domain, "vda", "--shallow", "--active", "--pivot", "--wait"]);
    assert!(at("ext").exists(), "libvirt leaves it there");
    passes().await;

    // Nor does it help to have the file gone.
    virsh(&[
        "snapshot-create-as",
        &domain,
        "--disk-only",
        "--no-metadata",
        "--diskspec",
        &format!("vda,file={}", at("e2").display()),
    ]);
    hypervisor.power_off(instance).await.unwrap();
    assert!(refused().await.contains("blockcommit"));
    run("qemu-img", &["commit", "-q", "-b", at("qcow2").to_str().unwrap(), at("e2").to_str().unwrap()]);
    std::fs::remove_file(at("e2")).unwrap();
    let why = refused().await;
    assert!(why.contains("virsh edit") && !why.contains("block"), "{why}");
    let connect = virt::connect::Connect::open(Some(&test.config.uri)).unwrap();
    let document = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
    let document = document.xml_desc(virt::sys::VIR_DOMAIN_XML_INACTIVE).unwrap();
    let (before, chain) = document.split_once("<backingStore").unwrap();
    let (_, after) = chain.rsplit_once("</backingStore>").unwrap();
    let before = before.replace(&format!("{instance}.e2"), &format!("{instance}.qcow2"));
    connect.define_domain_xml(&format!("{before}{after}")).unwrap();
    passes().await;

    // One that stands on the image itself is not for a commit, which would write into that.
    hypervisor.start(instance).await.unwrap();
    let to = |end: &str| at(end).display().to_string();
    let copied = ["--pivot", "--wait", "--transient-job"];
    virsh(&[&["blockcopy", &domain, "vda", &to("copied")], copied.as_slice()].concat());
    let why = refused().await;
    assert!(why.contains("(`virsh blockcopy --reuse-external --format qcow2 --pivot`)"), "{why}");
    let back = ["blockcopy", &domain, "vda", &to("qcow2"), "--reuse-external", "--format", "qcow2"];
    virsh(&[back.as_slice(), &copied].concat());
    passes().await;

    // What its domain has goes with it, and what is left of a snapshot.
    virsh(&[&["blockcopy", &domain, "vda", &to("used")], copied.as_slice()].concat());
    hypervisor.destroy(instance).await.unwrap();
    let left = std::fs::read_dir(&test.config.pool_path).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().path()).collect();
    left.sort_unstable();
    assert_eq!(left, ["backup.qcow2", "copied", "mine.qcow2"].map(at));
    test.end().await;
}

/// In the one document that is not kept. Its guest wrote above the disk from then on.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_snapshotted_while_its_guest_was_rescued_is_not_started_on_what_is_below() {
    let test = Test::new(|_| ()).await;
    let hypervisor = &test.hypervisor;
    let connect = virt::connect::Connect::open(Some(&test.config.uri)).unwrap();
    hypervisor.prepare().await.unwrap();
    let at = |name: String| test.config.pool_path.join(name);
    let snapshot = |instance: InstanceId, layer: &std::path::Path| {
        let disk = format!("vdb,file={}", layer.display());
        let domain = instance.to_string();
        let snapshot = ["snapshot-create-as", &domain, "--disk-only", "--no-metadata", "--diskspec"];
        let mut command = std::process::Command::new("virsh");
        command.args(["--connect", &test.config.uri]).args(snapshot);
        let done = command.args([&disk, "--diskspec", "vda,snapshot=no"]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    for is_on_volume in [false, true] {
        let instance = fresh();
        let disk = if is_on_volume { fresh() } else { instance };
        let root = Attachment { volume: disk, device: "vda".to_owned() };
        let volumes = if is_on_volume { vec![root] } else { Vec::new() };
        let spec = DomainSpec { volumes, ..conformance::small_domain(instance) };
        if is_on_volume {
            let of_image = VolumeSource::Image(base());
            hypervisor.create_volume(disk, &of_image, Some(base().virtual_size)).await.unwrap();
        } else {
            hypervisor.create_overlay(disk, &base(), None).await.unwrap();
        }
        hypervisor.define(&spec).await.unwrap();
        hypervisor.create_rescue(instance, &base()).await.unwrap();
        hypervisor.start_rescue(&spec).await.unwrap();
        let (place, layer) = (at(format!("{disk}.qcow2")), at(format!("{disk}.snapshot")));
        snapshot(instance, &layer);
        // Running already is no error, and neither is what goes on from memory.
        hypervisor.start_rescue(&spec).await.unwrap();
        hypervisor.save(instance).await.unwrap();
        hypervisor.start(instance).await.unwrap();
        hypervisor.power_off(instance).await.unwrap();
        let age = |seconds| {
            let earlier = std::time::SystemTime::now() - Duration::from_secs(seconds);
            std::fs::File::options().write(true).open(&place).unwrap().set_modified(earlier).unwrap();
        };
        age(60);
        let below = std::fs::read(&place).unwrap();
        let why = failure(hypervisor.start_rescue(&spec).await);
        assert!(why.contains(layer.to_str().unwrap()), "{why}");
        hypervisor.drop_rescue(instance).await.unwrap();
        let why = failure(hypervisor.start(instance).await);
        assert!(why.contains(layer.to_str().unwrap()), "{why}");
        assert_eq!(hypervisor.observe(instance).await.unwrap().domain, Some(RunState::Ended(End::ByHand)));
        assert!(std::fs::read(&place).unwrap() == below, "nothing wrote it");

        // Whose definition names what was written last is started, and nothing is done below that.
        let domain = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
        let is = domain.xml_desc(virt::sys::VIR_DOMAIN_XML_INACTIVE).unwrap();
        let other = is.replace(place.to_str().unwrap(), layer.to_str().unwrap());
        assert_ne!(is, other);
        connect.define_domain_xml(&other).unwrap();
        hypervisor.start(instance).await.unwrap();
        hypervisor.power_off(instance).await.unwrap();
        failure(hypervisor.start_rescue(&spec).await);
        // Nor is one in the way of what a commit left of a snapshot.
        connect.define_domain_xml(&is).unwrap();
        age(0);
        hypervisor.start(instance).await.unwrap();
        hypervisor.destroy(instance).await.unwrap();
        hypervisor.destroy(disk).await.unwrap();
    }
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_met_a_lock_is_tried_again_whoever_has_it() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    hypervisor.create_overlay(instance, &base(), None).await.unwrap();
    hypervisor.define(&conformance::small_domain(instance)).await.unwrap();
    // Of an operator's own disk nobody here looks who has it: as of ours when a copy has just ended.
    let disk = test.config.pool_path.with_extension("qcow2");
    let create = ["create", "-q", "-f", "qcow2"];
    let made = std::process::Command::new("qemu-img").args(create).arg(&disk).arg("1M").status();
    assert!(made.unwrap().success());
    let connect = virt::connect::Connect::open(Some(&test.config.uri)).unwrap();
    let document = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{}'/>\
         <target dev='vdb' bus='virtio'/></disk>",
        disk.display()
    );
    let domain = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
    domain.attach_device_flags(&document, virt::sys::VIR_DOMAIN_AFFECT_CONFIG).unwrap();
    let hold =
        || tokio::process::Command::new("qemu-io").args(["-c", "sleep 60000"]).arg(&disk).spawn().unwrap();
    let holder = std::cell::RefCell::new(hold());
    wait_for("lock", async || {
        // Whoever looks has a lock, too, for a moment: one that came then has none, and is gone.
        if holder.borrow_mut().try_wait().unwrap().is_some() {
            holder.replace(hold());
        }
        let look = std::process::Command::new("qemu-img").arg("info").arg(&disk).output().unwrap();
        (!look.status.success()).then_some(())
    })
    .await;
    let mut holder = holder.into_inner();
    let started = hypervisor.start(instance).await.unwrap_err();
    assert!(started.is_transient() && started.to_string().contains("lock"), "{started}");
    holder.kill().await.unwrap();
    hypervisor.start(instance).await.unwrap();
    hypervisor.destroy(instance).await.unwrap();
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_in_trouble_holds_up_no_other_of_its_guest() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    let [good, later, astray, gone] = [fresh(), fresh(), fresh(), fresh()];
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    for volume in [good, later, astray] {
        hypervisor.create_volume(volume, &VolumeSource::Empty, Some(1 << 20)).await.unwrap();
    }
    let has = |volume, device: &str| Attachment { volume, device: device.to_owned() };
    let is_given = async |volumes: &[Attachment]| {
        let observed = hypervisor.observe(instance).await.unwrap();
        assert_eq!(observed.volumes, Attachment::fingerprint(volumes));
    };
    let set = async |volumes: &[Attachment]| failure(hypervisor.set_volumes(instance, volumes).await);
    let why = set(&[has(gone, "vdb"), has(good, "vdc")]).await;
    assert!(why.contains(&gone.to_string()) && why.contains("is not there"), "{why}");
    is_given(&[has(good, "vdc")]).await;
    hypervisor.power_off(instance).await.unwrap();
    hypervisor.set_volumes(instance, &[has(astray, "vdb"), has(good, "vdc")]).await.unwrap();
    let connect = virt::connect::Connect::open(Some(&test.config.uri)).unwrap();
    let domain = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
    let document = domain.xml_desc(virt::sys::VIR_DOMAIN_XML_INACTIVE).unwrap();
    let file = |volume| test.config.pool_path.join(format!("{volume}.qcow2")).display().to_string();
    connect.define_domain_xml(&document.replace(&file(astray), "/elsewhere")).unwrap();
    // What it keeps has its name still, and each try does what there is to do.
    for _ in 0..2 {
        let why = set(&[has(later, "vdd"), has(gone, "vde"), has(good, "vdb")]).await;
        assert!(why.contains("its domain has /elsewhere"), "{why}");
        is_given(&[has(astray, "vdb"), has(later, "vdd")]).await;
    }
    connect.define_domain_xml(&document).unwrap();
    hypervisor.set_volumes(instance, &[has(later, "vdd"), has(good, "vdb")]).await.unwrap();
    is_given(&[has(later, "vdd"), has(good, "vdb")]).await;
    hypervisor.set_volumes(instance, &[]).await.unwrap();
    for disk in [instance, good, later, astray] {
        hypervisor.destroy(disk).await.unwrap();
    }
    test.end().await;
}

/// A block device in front of a file, until it is dropped.
struct Loop(String);

impl Loop {
    fn new(file: &std::path::Path, bytes: u64) -> Self {
        std::fs::File::create(file).unwrap().set_len(bytes).unwrap();
        let made =
            std::process::Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Self(String::from_utf8(made.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_somebody_moved_to_a_block_device_or_another_bus_is_still_the_guests() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    let [volume, copy, other] = [fresh(), fresh(), fresh()];
    hypervisor.prepare().await.unwrap();
    conformance::build(&**hypervisor, &base(), instance).await;
    hypervisor.create_volume(volume, &VolumeSource::Empty, Some(64 << 20)).await.unwrap();
    let has = [Attachment { volume, device: "vdb".to_owned() }];
    hypervisor.set_volumes(instance, &has).await.unwrap();
    let bytes = hypervisor.disk_bytes(instance).await.unwrap().unwrap();
    let devices = [("vda", bytes), ("vdb", 64 << 20)]
        .map(|(device, bytes)| Loop::new(&test.config.pool_path.with_extension(device), bytes));
    let domain = instance.to_string();
    let file = |disk| test.config.pool_path.join(format!("{disk}.qcow2")).display().to_string();
    let virsh = |arguments: &[&str]| {
        let mut command = std::process::Command::new("virsh");
        let done = command.args(["--connect", &test.config.uri]).args(arguments).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {done:?}");
    };
    let copied = ["--wait", "--pivot", "--transient-job"];
    for (device, Loop(to)) in ["vda", "vdb"].into_iter().zip(&devices) {
        let to = ["blockcopy", &domain, device, "--dest", to, "--blockdev", "--format", "raw"];
        virsh(&[to.as_slice(), &copied].concat());
    }

    let refused = async |of_own: &[&str], of_volume: &str| {
        let of = |kind, disk| VolumeSource::Copy(CopyOf::disk(kind, disk));
        for (refused, says) in [
            (hypervisor.create_successor(instance, &VolumeSource::Image(base()), None).await, of_own),
            (hypervisor.replace_overlay(instance).await, of_own),
            (hypervisor.create_rescue(instance, &base()).await, of_own),
            (hypervisor.grow_disk(instance, 1 << 31).await, of_own),
            (hypervisor.create_volume(copy, &of(Workload::Machine, instance), Some(1 << 30)).await, of_own),
            (hypervisor.grow_disk(volume, 1 << 31).await, &[of_volume, "bring it back"]),
            (
                hypervisor.create_volume(copy, &of(Workload::Volume, volume), Some(1 << 30)).await,
                &[of_volume, "bring it back"],
            ),
        ] {
            let why = failure(refused);
            assert!(says.iter().all(|says| why.contains(says)), "{why}");
        }
        hypervisor.destroy(volume).await.expect_err("its guest has it");
    };
    for is_up in [true, false] {
        let observed = hypervisor.observe(instance).await.unwrap();
        assert_eq!(observed.volumes, Attachment::fingerprint(&has), "it has it still");
        refused(&[&devices[0].0, "bring it back"], &devices[1].0).await;
        if is_up {
            hypervisor.power_off(instance).await.unwrap();
        }
    }
    let connect = virt::connect::Connect::open(Some(&test.config.uri)).unwrap();
    let inactive = virt::sys::VIR_DOMAIN_XML_INACTIVE;
    let found = connect.lookup_domain_by_uuid(instance.uuid()).unwrap();
    let moved = found.xml_desc(inactive).unwrap();
    let sata = moved.replace("dev='vda' bus='virtio'", "dev='sda' bus='sata'");
    assert_ne!(sata, moved);
    // Its place on the bus is another, too.
    let sata: String = sata.lines().filter(|line| !line.contains("<address type='pci'")).collect();
    connect.define_domain_xml(&sata).unwrap();
    refused(&[&devices[0].0, "bring it back"], &devices[1].0).await;
    virsh(&["detach-disk", &domain, "sda", "--config"]);
    refused(&["attach it again"], &devices[1].0).await;

    // Back in their places, the one as libvirt's volume.
    let why = failure(hypervisor.destroy(instance).await);
    assert!(why.contains(&devices[1].0), "{why}");
    virsh(&["detach-disk", &domain, "vdb", "--config"]);
    hypervisor.destroy(instance).await.unwrap();
    let document = format!(
        "<domain type='qemu'><name>{other}</name><uuid>{other}</uuid><memory>65536</memory><os><type>hvm</type></os>\
         <devices><disk type='volume' device='disk'><driver name='qemu' type='qcow2'/>\
         <source pool='{}' volume='{volume}.qcow2'/><target dev='sdb' bus='sata'/></disk></devices></domain>",
        test.config.pool
    );
    let theirs = connect.define_domain_xml(&document).unwrap();
    hypervisor.destroy(volume).await.expect_err("another domain has it");
    theirs.undefine().unwrap();
    assert!(std::path::Path::new(&file(volume)).exists());
    hypervisor.destroy(volume).await.unwrap();
    drop(devices);
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_somebody_writes_who_is_no_domain_here_is_neither_deleted_nor_replaced() {
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
    };

    let test = Test::new(|_| ()).await;
    let (hypervisor, volume, saved) = (&test.hypervisor, fresh(), fresh());
    hypervisor.prepare().await.unwrap();
    hypervisor.create_volume(volume, &VolumeSource::Empty, Some(1 << 30)).await.unwrap();
    let at = |disk: InstanceId| test.config.pool_path.join(format!("{disk}.qcow2"));
    let path = at(volume);
    // As QEMU does it for a guest of another host.
    let write = |path: &std::path::Path| {
        let mut writer = Command::new("qemu-io")
            .args(["-f", "qcow2"])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut asked = writer.stdin.take().unwrap();
        asked.write_all(b"write 0 512\n").unwrap();
        let mut line = String::new();
        BufReader::new(writer.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("wrote 512/512"), "{line}");
        (writer, asked)
    };
    conformance::build(&**hypervisor, &base(), saved).await;
    hypervisor.save(saved).await.unwrap();
    let is_saved = || async { hypervisor.observe(saved).await.unwrap().domain == Some(RunState::Saved) };
    assert!(failure(hypervisor.replace_overlay(saved).await).contains("to put in place"));
    assert!(is_saved().await, "the disk stays, and so does the memory of it");
    hypervisor.create_successor(saved, &VolumeSource::Image(base()), None).await.unwrap();
    let (mut writer, asked) = write(&at(saved));
    let why = hypervisor.replace_overlay(saved).await.unwrap_err().to_string();
    assert!(why.contains("is written by somebody"), "{why}");
    drop(asked);
    writer.wait().unwrap();
    assert!(is_saved().await, "nor does it go while somebody is in the way");
    hypervisor.replace_overlay(saved).await.unwrap();
    assert!(!is_saved().await, "it was of the disk that went");
    let (mut writer, asked) = write(&path);
    hypervisor.create_successor(volume, &VolumeSource::Image(base()), None).await.unwrap();
    for refused in [
        hypervisor.destroy(volume).await,
        hypervisor.hand_over(volume, NodeId::new(Uuid::new_v4())).await,
        hypervisor.replace_overlay(volume).await,
    ] {
        let why = refused.unwrap_err().to_string();
        assert!(why.contains("is written by somebody"), "{why}");
    }
    drop(asked);
    writer.wait().unwrap();
    hypervisor.destroy(volume).await.unwrap();
    assert!(!path.exists());
}

/// As `virsh pool-destroy` does it, and `virsh pool-undefine` beside, or a libvirtd that does not start it by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_somebody_ends_beside_the_agent_is_there_again_for_all() {
    let test = Test::new(|_| ()).await;
    let hypervisor = &test.hypervisor;
    hypervisor.prepare().await.unwrap();
    let connect = test.server().connection();
    for round in 0..10 {
        let pool = connect.lookup_storage_pool_by_name(&test.config.pool).unwrap();
        pool.destroy().unwrap();
        if round % 2 == 0 {
            pool.undefine().unwrap();
        }
        let make = || {
            let hypervisor = Arc::clone(hypervisor);
            tokio::spawn(async move {
                hypervisor.create_volume(fresh(), &VolumeSource::Empty, Some(1 << 20)).await
            })
        };
        for made in [make(), make(), make(), make(), make()] {
            made.await.unwrap().unwrap();
        }
        let pool = connect.lookup_storage_pool_by_name(&test.config.pool).unwrap();
        assert!(pool.autostart().unwrap(), "it is there after a restart of libvirtd, too");
    }
    // Where another has its directory by now, that is told, and nothing is given up for it.
    let pool = connect.lookup_storage_pool_by_name(&test.config.pool).unwrap();
    let document = pool.xml_desc(0).unwrap();
    pool.destroy().unwrap();
    pool.undefine().unwrap();
    let (before, _) = document.split_once("<uuid>").unwrap();
    let (_, after) = document.split_once("</uuid>").unwrap();
    let name = |name: &str| format!("<name>{name}</name>");
    let other = format!("{before}{after}").replace(&name(&test.config.pool), &name("theirs"));
    let other = connect.define_storage_pool_xml(&other, 0).unwrap();
    other.create(0).unwrap();
    let why = hypervisor.create_volume(fresh(), &VolumeSource::Empty, Some(1 << 20)).await.unwrap_err();
    assert!(why.is_transient() && why.to_string().contains("belongs to the storage pool `theirs`"), "{why}");
    other.destroy().unwrap();
    other.undefine().unwrap();
    hypervisor.create_volume(fresh(), &VolumeSource::Empty, Some(1 << 20)).await.unwrap();
    test.end().await;
}

/// As of a host whose own network is the one that libvirt brings. Here another network has it.
#[tokio::test(flavor = "multi_thread")]
async fn a_network_whose_subnet_the_host_has_is_told_before_and_waited_for() {
    let test = Test::new(|_| ()).await;
    let (connect, gateway) = (test.server().connection(), test.server().gateway());
    let document = format!(
        "<network><name>late</name><forward mode='nat'/><bridge name='{}l' stp='off' delay='0'/>\
         <ip address='{gateway}' netmask='255.255.255.0'/></network>",
        test.server().bridge()
    );
    let late = connect.define_network_xml(&document).unwrap();
    let hypervisor = test.second(|config| config.network = "late".into());
    let told = failure(hypervisor.probe_network().await);
    for part in [test.server().bridge(), "virsh net-edit late", "`libvirt.network`", &format!("{gateway}/24")]
    {
        assert!(told.contains(part), "{told}");
    }
    let waits = hypervisor.prepare().await.unwrap_err();
    assert!(waits.is_transient() && waits.to_string().contains("virsh net-edit late"), "{waits}");
    connect.lookup_network_by_name(&test.config.network).unwrap().destroy().unwrap();
    hypervisor.probe_network().await.unwrap();
    hypervisor.prepare().await.unwrap();
    late.destroy().unwrap();
    late.undefine().unwrap();
    test.end().await;
}

/// As `virsh net-destroy` does it.
#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_somebody_ends_beside_the_agent_is_started_for_the_next_try() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, instance) = (&test.hypervisor, fresh());
    hypervisor.prepare().await.unwrap();
    hypervisor.create_overlay(instance, &base(), None).await.unwrap();
    hypervisor.define(&conformance::small_domain(instance)).await.unwrap();
    let runs = fresh();
    conformance::build(&**hypervisor, &base(), runs).await;
    let connect = test.server().connection();
    let network = connect.lookup_network_by_name(&test.config.network).unwrap();
    let bridge = network.bridge_name().unwrap();
    let plugged = |of: InstanceId| {
        let port = format!("/sys/class/net/{}/master", ec_guard::ports::tap_name(of.mac(0)));
        std::fs::read_link(port).ok().and_then(|to| Some(to.file_name()?.to_str()?.to_owned()))
    };
    assert_eq!(plugged(runs).as_deref(), Some(&*bridge));
    network.destroy().unwrap();
    let not_yet = hypervisor.start(instance).await.unwrap_err();
    assert!(not_yet.is_transient() && not_yet.to_string().contains("network"), "{not_yet}");
    hypervisor.start(instance).await.unwrap();
    // What ran meanwhile is in the bridge that there is now.
    assert_eq!((plugged(runs), plugged(instance).as_deref()), (None, Some(&*bridge)));
    hypervisor.protect().await.unwrap();
    assert_eq!(plugged(runs).as_deref(), Some(&*bridge));
    // What somebody takes out of it stays out.
    let port = ec_guard::ports::tap_name(instance.mac(0));
    assert!(
        std::process::Command::new("ip").args(["link", "set", &port, "nomaster"]).status().unwrap().success()
    );
    hypervisor.protect().await.unwrap();
    assert_eq!(plugged(instance), None);
    for guest in [instance, runs] {
        hypervisor.destroy(guest).await.unwrap();
    }
    test.end().await;
}

/// As `virsh net-undefine` and `ip link delete` do it.
#[tokio::test(flavor = "multi_thread")]
async fn a_network_or_bridge_that_is_gone_is_the_hosts_trouble_and_no_guests() {
    let test = Test::new(|_| ()).await;
    let connect = test.server().connection();
    let network = connect.lookup_network_by_name(&test.config.network).unwrap();
    let document = network.xml_desc(0).unwrap();
    let second = format!("{}s", test.server().bridge());
    let ip =
        |words: &[&str]| assert!(std::process::Command::new("ip").args(words).status().unwrap().success());
    ip(&["link", "add", &second, "type", "bridge"]);
    let hypervisor = test.second(|config| config.bridge = Some(second.clone()));
    hypervisor.prepare().await.unwrap();
    assert_eq!(hypervisor.network_trouble().await.unwrap(), None);
    let instance = fresh();
    hypervisor.create_overlay(instance, &base(), None).await.unwrap();
    hypervisor.define(&conformance::small_domain(instance)).await.unwrap();
    let waits = async |what: &str| {
        let told = hypervisor.network_trouble().await.unwrap().unwrap();
        assert!(told.contains(what), "{told}");
        let not_yet = hypervisor.start(instance).await.unwrap_err();
        assert!(not_yet.is_transient() && not_yet.to_string().contains(what), "{not_yet}");
    };
    ip(&["link", "delete", &second]);
    waits(&format!("no bridge device `{second}`")).await;
    ip(&["link", "add", &second, "type", "bridge"]);
    network.destroy().unwrap();
    network.undefine().unwrap();
    waits("virsh net-define").await;
    hypervisor.bridge().await.unwrap_err();
    connect.define_network_xml(&document).unwrap();
    assert_eq!(hypervisor.bridge().await.unwrap().as_deref(), Some(test.server().bridge()));
    assert_eq!(hypervisor.network_trouble().await.unwrap(), None, "it can be started");
    assert!(hypervisor.start(instance).await.unwrap_err().is_transient());
    hypervisor.start(instance).await.unwrap();
    hypervisor.destroy(instance).await.unwrap();
    ip(&["link", "delete", &second]);
    test.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_done_to_a_guest_of_somebody_else_that_has_a_volume() {
    let test = Test::new(|_| ()).await;
    let (hypervisor, volume, copy) = (&test.hypervisor, fresh(), fresh());
    hypervisor.prepare().await.unwrap();
    hypervisor.create_volume(volume, &VolumeSource::Empty, Some(1 << 30)).await.unwrap();
    let document = format!(
        "<domain type='qemu'><name>of-somebody</name><memory unit='MiB'>32</memory>\
         <os><type arch='x86_64' machine='pc'>hvm</type></os><devices><disk type='file' device='disk'>\
         <driver name='qemu' type='qcow2'/><source file='{}/{volume}.qcow2'/><target dev='vda' bus='virtio'/>\
         </disk></devices></domain>",
        test.config.pool_path.display()
    );
    let connect = test.server().connection();
    let domain = connect.create_domain_xml(&document, 0).unwrap();
    let of = VolumeSource::Copy(CopyOf::disk(Workload::Volume, volume));
    for refused in [
        hypervisor.create_volume(copy, &of, Some(1 << 30)).await,
        hypervisor.grow_disk(volume, 2 << 30).await,
    ] {
        let why = refused.unwrap_err();
        assert!(why.is_transient() && why.to_string().contains("is not this node's"), "{why}");
    }
    assert!(!hypervisor.observe(copy).await.unwrap().successor, "nothing is begun");
    assert_eq!(hypervisor.disk_bytes(volume).await.unwrap(), Some(1 << 30));
    domain.destroy().unwrap();
    hypervisor.create_volume(copy, &of, Some(1 << 30)).await.unwrap();
    hypervisor.grow_disk(volume, 2 << 30).await.unwrap();
    for disk in [volume, copy] {
        hypervisor.destroy(disk).await.unwrap();
    }
    test.end().await;
}
