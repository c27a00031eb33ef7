//! What every [`Hypervisor`] must do, told as tests that an implementation runs on itself.
//!
//! Each check makes instances of its own and leaves nothing behind, so that checks may run side by side
//! on one host. They panic where the implementation is wrong. The base image must be one that boots.
#![expect(clippy::expect_used, clippy::panic, reason = "a suite for tests says what is wrong by panicking")]

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
    slice::from_ref,
    sync::Arc,
    time::Duration,
};

use ec_model::{Address, Attachment, BaseImage, CopyOf, InstanceId, NodeId, Workload};
use tokio::{
    sync::broadcast::error::RecvError,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    DomainSpec, End, Hypervisor, HypervisorError, HypervisorEvent, Observed, Pause, Printed, RunState, Typed,
    Usage, VolumeSource,
};

/// Bound of every wait; emulated guests on a busy host are slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Ids for the checks, so that the suite itself brings no randomness: the caller gives fresh ones.
pub type FreshId<'a> = &'a (dyn Fn() -> InstanceId + Send + Sync);

/// Runs every check that needs one node.
pub async fn all(hypervisor: Arc<dyn Hypervisor>, base: &BaseImage, fresh: FreshId<'_>) {
    let info = hypervisor.prepare().await.expect("prepare");
    assert_eq!(hypervisor.prepare().await.expect("prepare again"), info, "preparing twice changes nothing");
    what_is_not_there_is_absent_and_not_an_error(&*hypervisor, fresh()).await;
    an_overlay_is_made_once_and_replaced_when_it_is_another(&*hypervisor, base, fresh()).await;
    a_capacity_below_the_image_is_refused(&*hypervisor, base, fresh()).await;
    a_life_from_overlay_to_gone_is_idempotent_at_every_step(&*hypervisor, base, fresh()).await;
    half_made_instances_are_destroyed(&*hypervisor, base, fresh(), fresh()).await;
    a_start_that_cannot_work_fails_and_is_not_a_run(&*hypervisor, base, fresh(), fresh()).await;
    a_disk_is_replaced_when_its_guest_has_ended(&*hypervisor, base, fresh()).await;
    a_guest_is_started_from_its_rescue_disk_and_from_its_own_again(&*hypervisor, base, fresh()).await;
    a_guest_gets_another_size(&*hypervisor, base, fresh()).await;
    volumes_outlive_the_guests_that_have_them(&*hypervisor, base, std::array::from_fn(|_| fresh())).await;
    a_guest_boots_from_a_volume_in_the_place_of_its_own_disk(
        &*hypervisor,
        base,
        std::array::from_fn(|_| fresh()),
    )
    .await;
    changes_are_told(&*hypervisor, base, fresh()).await;
    a_guest_is_paused_saved_and_ended_and_starts_again(&*hypervisor, base, fresh()).await;
    a_console_is_read_typed_on_and_followed_until_its_guest_ends(&*hypervisor, base, fresh()).await;
}

/// The spec of a small domain, as the checks use it.
pub fn small_domain(instance: InstanceId) -> DomainSpec {
    // The title tries to break out of its element; nothing may be injected that way.
    DomainSpec { instance, title: "conform & <b>'\"".into(), vcpus: 1, memory_mb: 128, volumes: Vec::new() }
}

/// Makes an instance run, as an agent does it.
pub async fn build(hypervisor: &dyn Hypervisor, base: &BaseImage, instance: InstanceId) {
    hypervisor.create_overlay(instance, base, None).await.expect("create the overlay");
    hypervisor.define(&small_domain(instance)).await.expect("define");
    hypervisor.start(instance).await.expect("start");
}

/// What one has used; waited for where the guest is up and busy.
async fn used(hypervisor: &dyn Hypervisor, instance: InstanceId) -> Option<Usage> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let told = hypervisor.usage(&[instance]).await.expect("usage").remove(&instance);
        if told.is_some() || Instant::now() > deadline {
            return told;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// `observe` and `list` must tell the same.
async fn expect(hypervisor: &dyn Hypervisor, instance: InstanceId, domain: Option<RunState>, volume: bool) {
    let wanted = Observed { domain, volume, ..Observed::default() };
    assert_eq!(hypervisor.observe(instance).await.expect("observe"), wanted, "observe {instance}");
    let listed = hypervisor.list().await.expect("list").remove(&instance);
    assert_eq!(listed.unwrap_or_default(), wanted, "list {instance}");
}

fn expect_failed<T>(result: Result<T, HypervisorError>, what: &str) {
    match result {
        Err(HypervisorError::Failed { .. }) => {}
        Err(other) => panic!("{what}: wanted a lasting failure, got: {other}"),
        Ok(_) => panic!("{what}: wanted a failure, but it worked"),
    }
}

async fn what_is_not_there_is_absent_and_not_an_error(hypervisor: &dyn Hypervisor, instance: InstanceId) {
    expect(hypervisor, instance, None, false).await;
    assert!(!hypervisor.list().await.expect("list").contains_key(&instance));
    hypervisor.destroy(instance).await.expect("destroy what is not there");
    assert!(hypervisor.addresses(&[instance]).await.expect("addresses").is_empty());
    assert_eq!(hypervisor.size(instance).await.expect("size"), None);
    assert!(hypervisor.usage(&[instance]).await.expect("usage").is_empty());
    expect_failed(hypervisor.resume(instance).await, "resume what is not there");
    assert_eq!(hypervisor.console_tail(instance, 100).await.expect("console"), "");
}

async fn an_overlay_is_made_once_and_replaced_when_it_is_another(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    instance: InstanceId,
) {
    for capacity in [None, None, Some(base.virtual_size), Some(base.virtual_size + (64 << 20)), None] {
        hypervisor.create_overlay(instance, base, capacity).await.expect("create the overlay");
        expect(hypervisor, instance, None, true).await;
    }
    hypervisor.destroy(instance).await.expect("destroy a volume with no domain");
    expect(hypervisor, instance, None, false).await;
}

async fn a_capacity_below_the_image_is_refused(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    instance: InstanceId,
) {
    let result = hypervisor.create_overlay(instance, base, Some(base.virtual_size - 512)).await;
    expect_failed(result, "an overlay smaller than its base");
    assert!(!hypervisor.observe(instance).await.expect("observe").volume);
    hypervisor.destroy(instance).await.expect("destroy");
}

async fn a_life_from_overlay_to_gone_is_idempotent_at_every_step(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    instance: InstanceId,
) {
    hypervisor.create_overlay(instance, base, None).await.expect("create the overlay");
    for _ in 0..2 {
        hypervisor.define(&small_domain(instance)).await.expect("define");
        expect(hypervisor, instance, Some(RunState::NotStarted), true).await;
    }
    for _ in 0..2 {
        hypervisor.start(instance).await.expect("start");
        expect(hypervisor, instance, Some(RunState::Running), true).await;
    }
    hypervisor.resume(instance).await.expect("resume what runs");
    let size = hypervisor.size(instance).await.expect("size").expect("there is a domain");
    assert_eq!(
        (size.vcpus, size.memory_mb, size.disk_bytes),
        (1, 128, base.virtual_size.next_multiple_of(1024))
    );
    let before = used(hypervisor, instance).await.expect("what a guest uses that runs");
    assert!(before.cpu_ns > 0, "{before:?}");
    let after = used(hypervisor, instance).await.expect("again");
    assert!(
        after.cpu_ns >= before.cpu_ns
            && after.disk_bytes >= before.disk_bytes
            && after.net_bytes >= before.net_bytes,
        "{before:?} {after:?}"
    );
    assert_eq!(
        hypervisor.usage(&[]).await.expect("usage"),
        HashMap::new(),
        "only what was asked for is told"
    );
    // A build done again after a crash goes through every step and must not disturb the guest.
    build(hypervisor, base, instance).await;
    expect(hypervisor, instance, Some(RunState::Running), true).await;
    let other = BaseImage { path: PathBuf::from("/nonexistent/other.qcow2"), ..base.clone() };
    let result = hypervisor.create_overlay(instance, &other, None).await;
    expect_failed(result, "another overlay under a running guest");
    expect(hypervisor, instance, Some(RunState::Running), true).await;
    for _ in 0..2 {
        hypervisor.destroy(instance).await.expect("destroy");
        expect(hypervisor, instance, None, false).await;
    }
}

async fn half_made_instances_are_destroyed(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    no_volume: InstanceId,
    not_started: InstanceId,
) {
    hypervisor.define(&small_domain(no_volume)).await.expect("define without a volume");
    expect(hypervisor, no_volume, Some(RunState::NotStarted), false).await;
    hypervisor.create_overlay(not_started, base, None).await.expect("create the overlay");
    hypervisor.define(&small_domain(not_started)).await.expect("define");
    for instance in [no_volume, not_started] {
        hypervisor.destroy(instance).await.expect("destroy half of an instance");
        expect(hypervisor, instance, None, false).await;
    }
}

async fn a_start_that_cannot_work_fails_and_is_not_a_run(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    no_domain: InstanceId,
    no_volume: InstanceId,
) {
    expect_failed(hypervisor.start(no_domain).await, "start without a domain");
    hypervisor.define(&small_domain(no_volume)).await.expect("define");
    expect_failed(hypervisor.start(no_volume).await, "start without a volume");
    expect(hypervisor, no_volume, Some(RunState::NotStarted), false).await;
    hypervisor.create_overlay(no_volume, base, None).await.expect("create the overlay");
    hypervisor.start(no_volume).await.expect("start once the volume is there");
    hypervisor.destroy(no_volume).await.expect("destroy");
}

async fn a_guest_is_paused_saved_and_ended_and_starts_again(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    instance: InstanceId,
) {
    let expect = |state| expect(hypervisor, instance, Some(state), true);
    build(hypervisor, base, instance).await;
    for _ in 0..2 {
        hypervisor.pause(instance).await.expect("pause");
        expect(RunState::Paused(Pause::ByHand)).await;
    }
    hypervisor.resume(instance).await.expect("resume");
    expect(RunState::Running).await;
    for _ in 0..2 {
        hypervisor.save(instance).await.expect("save");
        expect(RunState::Saved).await;
    }
    hypervisor.shut_down(instance).await.expect("shut down what does not run");
    hypervisor.start(instance).await.expect("start from the saved memory");
    expect(RunState::Running).await;
    expect_failed(hypervisor.drop_memory(instance).await, "drop the memory of a guest that runs");
    hypervisor.save(instance).await.expect("save once more");
    for _ in 0..2 {
        hypervisor.drop_memory(instance).await.expect("drop the saved memory");
        let observed = hypervisor.observe(instance).await.expect("observe");
        assert!(
            matches!(observed.domain, Some(RunState::Ended(End::ByHand) | RunState::NotStarted)),
            "{observed:?}"
        );
        assert!(observed.volume, "{observed:?}");
    }
    hypervisor.start(instance).await.expect("boot anew");
    for _ in 0..2 {
        hypervisor.power_off(instance).await.expect("power off");
        expect(RunState::Ended(End::ByHand)).await;
    }
    expect_failed(hypervisor.pause(instance).await, "pause what does not run");
    hypervisor.start(instance).await.expect("start again");
    expect(RunState::Running).await;
    // Whether a guest hears is its own affair.
    hypervisor.shut_down(instance).await.expect("shut down");
    hypervisor.destroy(instance).await.expect("destroy");
    expect_failed(hypervisor.power_off(instance).await, "power off what is not there");
}

async fn a_disk_is_replaced_when_its_guest_has_ended(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    instance: InstanceId,
) {
    let expect = |state| expect(hypervisor, instance, Some(state), true);
    let on_base = VolumeSource::Image(base.clone());
    let beside = Observed { successor: true, ..Observed::default() };
    let disk = async || hypervisor.size(instance).await.expect("size").expect("there is a domain").disk_bytes;
    let larger = (base.virtual_size + (64 << 20)).next_multiple_of(1024);
    build(hypervisor, base, instance).await;
    expect_failed(hypervisor.replace_overlay(instance).await, "replace by nothing");
    expect_failed(
        hypervisor.create_successor(instance, &on_base, Some(base.virtual_size - 512)).await,
        "a successor smaller than its base",
    );
    let of_itself = VolumeSource::Copy(CopyOf::disk(Workload::Machine, instance));
    for source in [&of_itself, &on_base] {
        for capacity in [None, Some(larger)] {
            hypervisor.create_successor(instance, source, capacity).await.expect("make a successor");
            let wanted = Observed { domain: Some(RunState::Running), volume: true, ..beside };
            assert_eq!(hypervisor.observe(instance).await.expect("observe"), wanted);
        }
    }
    expect_failed(hypervisor.replace_overlay(instance).await, "replace under a guest that runs");
    for _ in 0..2 {
        hypervisor.drop_successor(instance).await.expect("drop the successor");
    }
    hypervisor.power_off(instance).await.expect("power off");
    expect_failed(hypervisor.replace_overlay(instance).await, "replace by what was dropped");
    assert_eq!(disk().await, base.virtual_size.next_multiple_of(1024), "the disk that there was");

    hypervisor.start(instance).await.expect("start");
    hypervisor.save(instance).await.expect("save");
    for capacity in [larger + 1024, larger] {
        let source = if capacity == larger { &on_base } else { &of_itself };
        hypervisor.create_successor(instance, source, Some(capacity)).await.expect("make a successor");
        hypervisor.replace_overlay(instance).await.expect("replace");
        assert_eq!(disk().await, capacity, "the new disk");
    }
    let observed = hypervisor.observe(instance).await.expect("observe");
    assert!(
        matches!(observed.domain, Some(RunState::Ended(_) | RunState::NotStarted)) && observed.volume,
        "memory of the old disk's guest is gone: {observed:?}"
    );
    hypervisor.start(instance).await.expect("start from the new disk");
    expect(RunState::Running).await;
    hypervisor.create_successor(instance, &on_base, None).await.expect("make another successor");
    hypervisor.destroy(instance).await.expect("destroy");
    expect_failed(hypervisor.replace_overlay(instance).await, "a successor goes with its instance");
    // A call that comes late makes one of an instance that is gone, and somebody has to see it.
    hypervisor.create_successor(instance, &on_base, None).await.expect("make one of what is not there");
    assert_eq!(hypervisor.observe(instance).await.expect("observe"), beside, "observe {instance}");
    let listed = hypervisor.list().await.expect("list").remove(&instance);
    assert_eq!(listed, Some(beside), "list {instance}");
    hypervisor.drop_successor(instance).await.expect("drop it");
    assert_eq!(hypervisor.observe(instance).await.expect("observe"), Observed::default());
    assert_eq!(hypervisor.list().await.expect("list").remove(&instance), None);
}

async fn a_guest_is_started_from_its_rescue_disk_and_from_its_own_again(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    instance: InstanceId,
) {
    let spec = small_domain(instance);
    let expect = async |state, rescued| {
        let wanted = Observed { domain: Some(state), volume: true, rescued, ..Observed::default() };
        assert_eq!(hypervisor.observe(instance).await.expect("observe"), wanted, "observe {instance}");
        let listed = hypervisor.list().await.expect("list").remove(&instance);
        assert_eq!(listed, Some(wanted), "list {instance}");
    };
    build(hypervisor, base, instance).await;
    for _ in 0..2 {
        hypervisor.create_rescue(instance, base).await.expect("make a rescue disk");
        expect(RunState::Running, false).await;
    }
    hypervisor.start_rescue(&spec).await.expect("start what runs");
    expect(RunState::Running, false).await;
    hypervisor.power_off(instance).await.expect("power off");
    for _ in 0..2 {
        hypervisor.start_rescue(&spec).await.expect("start from the rescue disk");
        expect(RunState::Running, true).await;
    }
    expect_failed(
        hypervisor.create_rescue(instance, base).await,
        "another rescue disk under a running guest",
    );
    expect_failed(hypervisor.drop_rescue(instance).await, "no rescue disk under a running guest");
    hypervisor.save(instance).await.expect("save");
    expect(RunState::Saved, true).await;
    hypervisor.start(instance).await.expect("start from the saved memory");
    expect(RunState::Running, true).await;
    hypervisor.power_off(instance).await.expect("power off");
    expect(RunState::Ended(End::ByHand), false).await;
    hypervisor.start_rescue(&spec).await.expect("start from the rescue disk again");
    hypervisor.save(instance).await.expect("save");
    for _ in 0..2 {
        hypervisor.drop_rescue(instance).await.expect("drop the rescue disk, and the memory of its guest");
    }
    let observed = hypervisor.observe(instance).await.expect("observe");
    assert!(!observed.rescued && observed.volume && observed.domain != Some(RunState::Saved), "{observed:?}");
    expect_failed(hypervisor.start_rescue(&spec).await, "start from a rescue disk that is not there");
    hypervisor.start(instance).await.expect("start from its own disk");
    expect(RunState::Running, false).await;
    hypervisor.save(instance).await.expect("save");
    hypervisor.drop_rescue(instance).await.expect("drop what is not there");
    expect(RunState::Saved, false).await;
    hypervisor.create_rescue(instance, base).await.expect("make a rescue disk");
    hypervisor.destroy(instance).await.expect("destroy");
    expect_failed(hypervisor.start_rescue(&spec).await, "start what is not there");
    expect_failed(hypervisor.create_rescue(instance, base).await, "a rescue disk without its own");
    assert_eq!(hypervisor.observe(instance).await.expect("observe"), Observed::default());
    hypervisor.create_overlay(instance, base, None).await.expect("create the overlay");
    hypervisor.define(&spec).await.expect("define");
    expect_failed(hypervisor.start_rescue(&spec).await, "the rescue disk went with its instance");
    hypervisor.destroy(instance).await.expect("destroy");
}

async fn volumes_outlive_the_guests_that_have_them(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    [instance, other, data, second, third, nothing]: [InstanceId; 6],
) {
    let attachment = |volume, device: &str| Attachment { volume, device: device.to_owned() };
    let (vdb, vdc) = (attachment(data, "vdb"), attachment(second, "vdc"));
    let both = [vdb.clone(), vdc.clone()];
    let has = async |instance, wanted: &[Attachment]| {
        let fingerprint = Attachment::fingerprint(wanted);
        assert_eq!(hypervisor.observe(instance).await.expect("observe").volumes, fingerprint);
        let listed = hypervisor.list().await.expect("list").remove(&instance).unwrap_or_default();
        assert_eq!(listed.volumes, fingerprint);
        let has = hypervisor.volumes_of(instance).await.expect("look which it has");
        assert_eq!(BTreeSet::from_iter(&has), BTreeSet::from_iter(wanted));
    };
    let bytes = async |volume| hypervisor.disk_bytes(volume).await.expect("measure");

    assert_eq!(bytes(data).await, None);
    expect_failed(hypervisor.set_volumes(instance, &[]).await, "volumes of what is not there");
    for capacity in [1 << 20, 1 << 20, 64 << 20] {
        hypervisor
            .create_volume(data, &VolumeSource::Empty, Some(capacity))
            .await
            .expect("create an empty volume");
        expect(hypervisor, data, None, true).await;
        assert_eq!(bytes(data).await, Some(capacity));
    }
    let capacity = base.virtual_size.next_multiple_of(1024);
    let of_image = VolumeSource::Image(base.clone());
    hypervisor.create_volume(second, &of_image, Some(capacity)).await.expect("create a volume of an image");
    expect_failed(hypervisor.create_volume(other, &of_image, Some(512)).await, "less than its image has");

    // One is there before the guest is, the other comes while it runs.
    hypervisor.create_overlay(instance, base, None).await.expect("create the overlay");
    let spec = DomainSpec { volumes: vec![vdb.clone()], ..small_domain(instance) };
    hypervisor.define(&spec).await.expect("define");
    has(instance, from_ref(&vdb)).await;
    hypervisor.start(instance).await.expect("start");
    for _ in 0..2 {
        hypervisor.set_volumes(instance, &both).await.expect("give a guest that runs a volume");
        has(instance, &both).await;
    }
    hypervisor.grow_disk(data, 128 << 20).await.expect("grow a volume under its guest");
    assert_eq!(bytes(data).await, Some(128 << 20));

    // What one has no other gets, and nobody deletes or replaces.
    build(hypervisor, base, other).await;
    expect_failed(hypervisor.set_volumes(other, from_ref(&vdb)).await, "a volume that another has");
    has(other, &[]).await;
    hypervisor.read_disk(data).await.expect_err("read what a guest may write");
    hypervisor.read_disk(nothing).await.expect_err("read what is not there");
    hypervisor.create_overlay(nothing, base, None).await.expect("create the overlay");
    let with_both = vec![vdb.clone(), attachment(third, "vdc")];
    let spec = DomainSpec { volumes: with_both, ..small_domain(nothing) };
    hypervisor.define(&spec).await.expect("define, without what another has and what is not there");
    has(nothing, &[]).await;
    hypervisor.destroy(nothing).await.expect("destroy");
    let destroyed = hypervisor.destroy(data).await.expect_err("destroy a volume that a guest has");
    assert!(destroyed.is_transient(), "until it has it no more: {destroyed}");
    hypervisor
        .create_volume(data, &VolumeSource::Empty, Some(1 << 20))
        .await
        .expect_err("make anew what a guest has");
    // Copies are of one moment, whether a guest may write meanwhile or not.
    let copy = VolumeSource::Copy(CopyOf::disk(Workload::Volume, data));
    let own = VolumeSource::Copy(CopyOf::disk(Workload::Machine, instance));
    for (source, least) in [(&copy, 128 << 20), (&own, base.virtual_size.next_multiple_of(1024))] {
        expect_failed(
            hypervisor.create_volume(third, source, Some(least - 512)).await,
            "a copy that is smaller",
        );
        expect(hypervisor, third, None, false).await;
        for capacity in [least, least, least + (1 << 20)] {
            hypervisor
                .create_volume(third, source, Some(capacity))
                .await
                .expect("copy what a guest may write");
            assert_eq!(bytes(third).await, Some(capacity));
        }
        has(instance, &both).await;
        hypervisor.destroy(third).await.expect("delete the copy");
    }
    // Several disks are copied at one moment, and one of them is copied from there.
    let of_all = CopyOf { beside: vec![data, second], ..CopyOf::disk(Workload::Machine, instance) };
    let of_all = VolumeSource::Copy(of_all);
    let first = base.virtual_size.next_multiple_of(1024);
    let least = first + (128 << 20) + capacity;
    expect_failed(hypervisor.create_volume(third, &of_all, Some(least - 512)).await, "less than all have");
    expect(hypervisor, third, None, false).await;
    for _ in 0..2 {
        hypervisor.create_volume(third, &of_all, Some(least)).await.expect("copy several disks of a guest");
        assert_eq!(bytes(third).await, Some(first));
    }
    let copies = CopyOf::fingerprint(&[second, data]);
    let wanted = Observed { volume: true, copies, ..Observed::default() };
    assert_eq!(hypervisor.observe(third).await.expect("observe"), wanted, "both lie beside it");
    assert_eq!(hypervisor.list().await.expect("list").remove(&third), Some(wanted));
    let held =
        |held| VolumeSource::Copy(CopyOf { held: Some(held), ..CopyOf::disk(Workload::Volume, third) });
    hypervisor.create_volume(nothing, &held(data), None).await.expect("copy what is in a snapshot");
    assert_eq!(bytes(nothing).await, Some(128 << 20));
    hypervisor.destroy(nothing).await.expect("delete the copy");
    expect_failed(hypervisor.create_volume(nothing, &held(other), Some(1 << 30)).await, "what is not in it");
    let of_others = CopyOf { beside: vec![data], ..CopyOf::disk(Workload::Machine, other) };
    let of_others = VolumeSource::Copy(of_others);
    expect_failed(hypervisor.create_volume(nothing, &of_others, Some(least)).await, "disks of two guests");
    // A volume is made anew when no guest is up with it.
    let anew = held(data);
    hypervisor.create_successor(data, &anew, Some(128 << 20)).await.expect("make it anew beside it");
    hypervisor.replace_overlay(data).await.expect_err("put it under a guest");
    hypervisor.drop_successor(data).await.expect("drop it");
    has(instance, &both).await;
    hypervisor.destroy(third).await.expect("delete the snapshot");
    expect(hypervisor, third, None, false).await;
    let of_nothing = VolumeSource::Copy(CopyOf::disk(Workload::Volume, nothing));
    expect_failed(hypervisor.create_volume(third, &of_nothing, Some(1 << 30)).await, "a copy of nothing");
    expect_failed(
        hypervisor.set_volumes(other, &[attachment(nothing, "vdb")]).await,
        "a volume that is not there",
    );

    // A guest lets go of a disk when its system is up.
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = hypervisor.set_volumes(instance, from_ref(&vdc)).await {
        assert!(Instant::now() < deadline, "the guest does not let go: {error}");
        sleep(Duration::from_secs(1)).await;
    }
    has(instance, from_ref(&vdc)).await;
    hypervisor.set_volumes(other, from_ref(&vdb)).await.expect("give the volume to another guest");
    has(other, &[vdb]).await;
    // Nor is one made anew with which a guest goes on from its memory.
    hypervisor.save(instance).await.expect("save");
    hypervisor.create_successor(second, &of_image, Some(capacity)).await.expect("make it anew beside it");
    expect_failed(hypervisor.replace_overlay(second).await, "put it under a guest whose memory is saved");
    hypervisor.drop_successor(second).await.expect("drop it");
    hypervisor.start(instance).await.expect("go on");
    has(instance, from_ref(&vdc)).await;
    hypervisor.power_off(instance).await.expect("power off");
    hypervisor.redefine(&small_domain(instance)).await.expect("define it as large as it is");
    has(instance, from_ref(&vdc)).await;
    hypervisor.set_volumes(instance, &[]).await.expect("take the volume of one that does not run");
    has(instance, &[]).await;

    // Volumes stay when guests go, and are copied and deleted then.
    hypervisor.destroy(other).await.expect("destroy");
    hypervisor.destroy(instance).await.expect("destroy");
    expect(hypervisor, data, None, true).await;
    expect_failed(hypervisor.create_volume(other, &copy, Some(1 << 20)).await, "a copy that is smaller");
    for _ in 0..2 {
        hypervisor.create_volume(other, &copy, Some(128 << 20)).await.expect("copy a volume");
        assert_eq!(bytes(other).await, Some(128 << 20));
    }
    expect_read(hypervisor, other).await;
    let of_other = VolumeSource::Copy(CopyOf::disk(Workload::Volume, other));
    hypervisor.create_successor(data, &of_other, Some(128 << 20)).await.expect("make it anew beside it");
    hypervisor.replace_overlay(data).await.expect("make it anew");
    expect(hypervisor, data, None, true).await;
    hypervisor.grow_disk(data, 256 << 20).await.expect("grow a volume that nobody has");
    assert_eq!(bytes(data).await, Some(256 << 20));
    for volume in [data, second, other] {
        hypervisor.destroy(volume).await.expect("delete the volume");
        expect(hypervisor, volume, None, false).await;
    }
}

async fn a_guest_boots_from_a_volume_in_the_place_of_its_own_disk(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    [instance, other, root, nothing]: [InstanceId; 4],
) {
    let booting =
        |instance, root| DomainSpec { volumes: vec![Attachment::root(root)], ..small_domain(instance) };
    let spec = booting(instance, root);
    let expect_booting = async |domain, rescued| {
        let observed = hypervisor.observe(instance).await.expect("observe");
        assert_eq!(
            (observed.domain, observed.volume, observed.rescued),
            (Some(domain), false, rescued),
            "it has no disk of its own"
        );
        if !rescued {
            assert_eq!(observed.volumes, Attachment::fingerprint(&spec.volumes));
        }
    };
    let capacity = base.virtual_size.next_multiple_of(1024);
    let of_image = VolumeSource::Image(base.clone());
    hypervisor.create_volume(root, &of_image, Some(capacity)).await.expect("create a volume of an image");
    expect_failed(hypervisor.define(&booting(instance, nothing)).await, "on a volume that is not there");
    for _ in 0..2 {
        hypervisor.define(&spec).await.expect("define on the volume");
        expect_booting(RunState::NotStarted, false).await;
    }
    expect_failed(hypervisor.define(&booting(other, root)).await, "on a volume that another boots from");
    expect(hypervisor, other, None, false).await;
    expect_failed(hypervisor.redefine(&small_domain(instance)).await, "on another disk");
    hypervisor.start(instance).await.expect("start from the volume");
    expect_booting(RunState::Running, false).await;
    let size = hypervisor.size(instance).await.expect("measure").expect("it is there");
    assert_eq!(size.disk_bytes, 0, "it has no disk of its own");
    expect_failed(hypervisor.set_volumes(instance, &[]).await, "without what it boots from");
    hypervisor.set_volumes(instance, &spec.volumes).await.expect("it has it already");
    let destroyed = hypervisor.destroy(root).await.expect_err("destroy what a guest boots from");
    assert!(destroyed.is_transient(), "until it has it no more: {destroyed}");
    let larger = capacity + (64 << 20);
    hypervisor.grow_disk(root, larger).await.expect("grow it under its guest");
    let bytes = async |volume| hypervisor.disk_bytes(volume).await.expect("measure");
    assert_eq!(bytes(root).await, Some(larger));
    let copy = VolumeSource::Copy(CopyOf::disk(Workload::Volume, root));
    hypervisor.create_volume(other, &copy, Some(larger)).await.expect("copy it under its guest");
    hypervisor.destroy(other).await.expect("delete the copy");

    // A rescue disk comes before it.
    expect_failed(hypervisor.create_rescue(nothing, base).await, "a rescue disk of what is not there");
    hypervisor.create_rescue(instance, base).await.expect("make a rescue disk");
    hypervisor.power_off(instance).await.expect("power off");
    hypervisor.start_rescue(&spec).await.expect("start from the rescue disk");
    expect_booting(RunState::Running, true).await;
    hypervisor.destroy(root).await.expect_err("destroy what a rescued guest has beside");
    hypervisor.power_off(instance).await.expect("power off");
    hypervisor.drop_rescue(instance).await.expect("drop the rescue disk");
    hypervisor.start(instance).await.expect("start from the volume again");
    expect_booting(RunState::Running, false).await;

    for _ in 0..2 {
        hypervisor.destroy(instance).await.expect("destroy");
        expect(hypervisor, instance, None, false).await;
        expect(hypervisor, root, None, true).await;
    }
    assert_eq!(bytes(root).await, Some(larger), "what was written stays");
    hypervisor.destroy(root).await.expect("delete the volume");
    expect(hypervisor, root, None, false).await;
}

/// The file of a volume is read to its end, after how long it is.
async fn expect_read(hypervisor: &dyn Hypervisor, volume: InstanceId) {
    let mut output = hypervisor.read_disk(volume).await.expect("read the disk");
    let size = output.recv().await.expect("how many bytes it has");
    let size = u64::from_be_bytes(size.as_ref().try_into().expect("eight bytes"));
    let mut read = 0;
    while let Some(piece) = output.recv().await {
        read += piece.len() as u64;
    }
    assert!(size > 0, "it is empty");
    assert_eq!(read, size);
}

async fn a_guest_gets_another_size(hypervisor: &dyn Hypervisor, base: &BaseImage, instance: InstanceId) {
    let expect = |state| expect(hypervisor, instance, Some(state), true);
    let size = async || {
        let size = hypervisor.size(instance).await.expect("size").expect("there is a domain");
        (size.vcpus, size.memory_mb, size.disk_bytes)
    };
    let large = DomainSpec { vcpus: 2, memory_mb: 192, ..small_domain(instance) };
    expect_failed(hypervisor.grow_disk(instance, 1 << 30).await, "grow what is not there");
    expect_failed(hypervisor.redefine(&large).await, "define anew what is not there");
    expect_failed(hypervisor.grow(&large).await, "grow a guest that is not there");
    assert_eq!(hypervisor.observe(instance).await.expect("observe"), Observed::default());

    build(hypervisor, base, instance).await;
    let disk = base.virtual_size.next_multiple_of(1024);
    let (larger, largest) = (disk + (64 << 20), disk + (128 << 20));
    for _ in 0..2 {
        hypervisor.grow_disk(instance, larger).await.expect("grow under a guest that runs");
        expect(RunState::Running).await;
    }
    assert_eq!(size().await, (1, 128, larger));
    hypervisor.grow_disk(instance, disk).await.expect("what is larger already is left");
    assert_eq!(size().await, (1, 128, larger));
    expect_failed(hypervisor.redefine(&large).await, "define anew what runs");
    expect_failed(hypervisor.grow(&large).await, "grow the memory of a small guest");
    let crowded = DomainSpec { vcpus: 5, ..small_domain(instance) };
    expect_failed(hypervisor.grow(&crowded).await, "more processors than it was started with room for");
    let busier = DomainSpec { vcpus: 2, ..small_domain(instance) };
    let is_emulated = hypervisor.prepare().await.expect("prepare").virt_type == "qemu";
    if is_emulated {
        expect_failed(hypervisor.grow(&busier).await, "more processors for a guest that is emulated");
        expect(RunState::Running).await;
    } else {
        for _ in 0..2 {
            hypervisor.grow(&busier).await.expect("a second processor for a guest that runs");
            expect(RunState::Running).await;
        }
        expect_failed(hypervisor.grow(&small_domain(instance)).await, "take a processor away");
    }
    let vcpus = if is_emulated { 1 } else { 2 };
    assert_eq!(size().await, (vcpus, 128, larger));

    hypervisor.power_off(instance).await.expect("power off");
    assert_eq!(size().await, (vcpus, 128, larger), "it has that for good");
    expect_failed(hypervisor.grow(&large).await, "grow a guest that does not run");
    for _ in 0..2 {
        hypervisor.redefine(&large).await.expect("define anew");
        hypervisor.grow_disk(instance, largest).await.expect("grow under a guest that does not run");
    }
    assert_eq!(size().await, (2, 192, largest));
    hypervisor.start(instance).await.expect("start with the new size");
    expect(RunState::Running).await;
    assert_eq!(size().await, (2, 192, largest));

    // Large ones have room for memory, too, and keep what came later when they are saved.
    hypervisor.power_off(instance).await.expect("power off");
    let roomy = DomainSpec { memory_mb: 1024, ..large };
    hypervisor.redefine(&roomy).await.expect("define anew");
    hypervisor.start(instance).await.expect("start with much memory");
    let uneven = DomainSpec { memory_mb: 1100, ..roomy.clone() };
    expect_failed(hypervisor.grow(&uneven).await, "memory that is no whole number of blocks");
    let vcpus = if is_emulated { 2 } else { 3 };
    let grown = DomainSpec { vcpus, memory_mb: 1280, ..roomy };
    for _ in 0..2 {
        hypervisor.grow(&grown).await.expect("more memory for a guest that runs");
        expect(RunState::Running).await;
    }
    assert_eq!(size().await, (vcpus, 1280, largest));
    hypervisor.save(instance).await.expect("save");
    hypervisor.start(instance).await.expect("go on");
    assert_eq!(size().await, (vcpus, 1280, largest));
    hypervisor.save(instance).await.expect("save");
    expect_failed(hypervisor.redefine(&small_domain(instance)).await, "define anew under saved memory");
    hypervisor.destroy(instance).await.expect("destroy");
}

async fn changes_are_told(hypervisor: &dyn Hypervisor, base: &BaseImage, instance: InstanceId) {
    let mut events = hypervisor.events();
    build(hypervisor, base, instance).await;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match timeout_at(deadline, events.recv()).await.expect("an event about the start in time") {
            Ok(HypervisorEvent::Changed(changed)) if changed == instance => break,
            Ok(_) => {}
            Err(RecvError::Lagged(_)) => break,
            Err(RecvError::Closed) => panic!("the events ended"),
        }
    }
    hypervisor.destroy(instance).await.expect("destroy");
}

/// Reads until this was printed; nothing where it ended before.
async fn printed(output: &mut Printed, wanted: &str) -> Option<()> {
    let mut text = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while !String::from_utf8_lossy(&text).contains(wanted) {
        let piece = timeout_at(deadline, output.recv()).await.expect("output in time")?;
        text.extend(piece.expect("it breaks off with nothing but its guest"));
    }
    Some(())
}

/// The guest must print what is typed, as every terminal does.
async fn a_console_is_read_typed_on_and_followed_until_its_guest_ends(
    hypervisor: &dyn Hypervisor,
    base: &BaseImage,
    instance: InstanceId,
) {
    expect_failed(hypervisor.open_console(instance).await, "the console of what is not there");
    let mut early = hypervisor.follow_console(instance, 100).await.expect("follow what is not there yet");
    hypervisor.create_overlay(instance, base, None).await.expect("create the overlay");
    hypervisor.define(&small_domain(instance)).await.expect("define");
    expect_failed(hypervisor.open_console(instance).await, "the console of what does not run");
    hypervisor.start(instance).await.expect("start");

    let mut console = hypervisor.open_console(instance).await.expect("open the console");
    assert!(hypervisor.open_console(instance).await.is_err(), "one at a time");
    // A boot loader would take what is typed for itself.
    addresses_of(hypervisor, instance).await;
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Its shell may not be there yet.
        console.input.send(Typed::new("typed\r").0).await.expect("the console is open");
        let heard =
            timeout_at(Instant::now() + Duration::from_secs(2), printed(&mut console.output, "typed")).await;
        if heard.is_ok_and(|heard| heard.is_some()) {
            break;
        }
        assert!(Instant::now() < deadline, "the guest takes nothing");
    }
    printed(&mut early, "typed").await.expect("the log has it, too");
    let mut late = hypervisor.follow_console(instance, usize::MAX).await.expect("follow");
    printed(&mut late, "typed").await.expect("what was printed before");
    let caught_up =
        async { while !late.recv().await.expect("it goes on").expect("no trouble").is_empty() {} };
    timeout_at(deadline, caught_up).await.expect("an empty piece where that ends");
    let (left, handed) = Typed::new("left\r");
    console.input.send(left).await.expect("the console is open");
    drop(console);
    handed.await.expect("the guest is handed it");
    printed(&mut late, "left").await.expect("what was typed just before is typed");

    let mut again = loop {
        // Closing takes its moment.
        match hypervisor.open_console(instance).await {
            Ok(console) => break console,
            Err(error) => assert!(Instant::now() < deadline, "still open: {error}"),
        }
        sleep(Duration::from_millis(100)).await;
    };
    hypervisor.destroy(instance).await.expect("destroy");
    for output in [&mut again.output, &mut early, &mut late] {
        assert_eq!(printed(output, "what nobody prints").await, None, "it ends with its guest");
    }
}

/// Waits until a guest has addresses.
async fn addresses_of(hypervisor: &dyn Hypervisor, instance: InstanceId) -> Vec<Address> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut known = hypervisor.addresses(&[instance]).await.expect("addresses");
        if let Some(addresses) = known.remove(&instance) {
            return addresses;
        }
        assert!(Instant::now() < deadline, "no address in {PATIENCE:?}");
        sleep(Duration::from_millis(150)).await;
    }
}

/// A started guest has an address of its first interface within the suite's patience.
pub async fn a_guest_gets_an_address(hypervisor: &dyn Hypervisor, base: &BaseImage, instance: InstanceId) {
    build(hypervisor, base, instance).await;
    let addresses = addresses_of(hypervisor, instance).await;
    assert!(addresses.iter().any(|a| a.nic == 0 && a.mac == instance.mac(0)), "{addresses:?}");
    hypervisor.destroy(instance).await.expect("destroy");
}

/// Two nodes' agents on one host do not see or touch each other's instances.
pub async fn another_nodes_mark_is_neither_seen_nor_touched(
    ours: &dyn Hypervisor,
    theirs: &dyn Hypervisor,
    base: &BaseImage,
    instance: InstanceId,
) {
    ours.prepare().await.expect("prepare ours");
    theirs.prepare().await.expect("prepare theirs");
    build(ours, base, instance).await;
    // But that there is one whose disk lies here, which people are told.
    let foreign = Observed { foreign: true, ..Observed::default() };
    assert_eq!(theirs.observe(instance).await.expect("observe"), foreign);
    assert_eq!(theirs.list().await.expect("list").get(&instance), Some(&foreign));
    assert!(foreign.is_nothing());
    expect_failed(theirs.destroy(instance).await, "destroy with another node's mark");
    expect_failed(theirs.start(instance).await, "start with another node's mark");
    expect_failed(theirs.define(&small_domain(instance)).await, "define over another node's domain");
    expect(ours, instance, Some(RunState::Running), true).await;
    ours.destroy(instance).await.expect("destroy ours");
}

/// A volume becomes the other node's, whose disks lie beside ours on the same storage, once and whole.
pub async fn a_volume_is_handed_over(
    ours: &dyn Hypervisor,
    theirs: (NodeId, &dyn Hypervisor),
    base: &BaseImage,
    [machine, data]: [InstanceId; 2],
) {
    let (node, theirs) = theirs;
    ours.prepare().await.expect("prepare ours");
    theirs.prepare().await.expect("prepare theirs");
    let capacity = 1 << 30;
    ours.hand_over(data, node).await.expect("hand over what there is not");
    assert!(!ours.has_volume(data).await.expect("look for what there is not"));
    ours.create_volume(data, &VolumeSource::Empty, Some(capacity)).await.expect("create a volume");
    assert!(ours.has_volume(data).await.expect("look for it"));
    let second = theirs.has_volume(data).await.expect_err("another node has it");
    assert!(second.is_transient(), "{second}");
    build(ours, base, machine).await;
    let attachment = Attachment { volume: data, device: "vdb".to_owned() };
    ours.set_volumes(machine, &[attachment]).await.expect("give it to a guest");
    let refused = ours.hand_over(data, node).await;
    refused.expect_err("a domain has it");
    assert_eq!(theirs.disk_bytes(data).await.expect("measure"), None);
    ours.destroy(machine).await.expect("destroy the guest");
    for _ in 0..2 {
        ours.hand_over(data, node).await.expect("hand it over");
        ours.has_volume(data).await.expect_err("it is the other's");
        assert!(theirs.has_volume(data).await.expect("look for what came"));
        expect(ours, data, None, false).await;
        expect(theirs, data, None, true).await;
        assert_eq!(ours.disk_bytes(data).await.expect("measure"), None);
        assert_eq!(theirs.disk_bytes(data).await.expect("measure"), Some(capacity));
    }
    build(theirs, base, machine).await;
    let attachment = Attachment { volume: data, device: "vdb".to_owned() };
    theirs.set_volumes(machine, &[attachment]).await.expect("give it to their guest");
    for instance in [machine, data] {
        theirs.destroy(instance).await.expect("destroy theirs");
    }
}
