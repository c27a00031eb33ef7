//! The simulated hypervisor passes the suite, and its knobs do what they say.
#![expect(clippy::unwrap_used, reason = "what tests share")]

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ec_hypervisor::{
    End, Hypervisor, HypervisorError, HypervisorEvent, Operation, RunState, SimulatedHypervisor, conformance,
};
use ec_model::{BaseImage, DiskFormat, InstanceId, NodeId};
use tokio::time::{Instant, timeout};

fn node(number: u128) -> NodeId {
    format!("{number:032x}").parse().unwrap()
}

fn fresh() -> InstanceId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{:032x}", NEXT.fetch_add(1, Ordering::Relaxed)).parse().unwrap()
}

fn base() -> BaseImage {
    BaseImage {
        path: PathBuf::from("/images/base.qcow2"),
        format: DiskFormat::Qcow2,
        virtual_size: 1 << 30,
        digest: "00".repeat(32),
    }
}

fn failed() -> HypervisorError {
    HypervisorError::Failed { what: "test".into(), detail: "as told".into() }
}

#[tokio::test(start_paused = true)]
async fn the_simulated_hypervisor_passes_the_conformance_suite() {
    let hypervisor = SimulatedHypervisor::new(node(1));
    conformance::all(Arc::new(hypervisor.clone()), &base(), &fresh).await;
    hypervisor.set_address_delay(Duration::from_secs(5));
    conformance::a_guest_gets_an_address(&hypervisor, &base(), fresh()).await;
    let other = hypervisor.as_node(node(2));
    conformance::another_nodes_mark_is_neither_seen_nor_touched(&hypervisor, &other, &base(), fresh()).await;
    conformance::a_volume_is_handed_over(&hypervisor, (node(2), &other), &base(), [fresh(), fresh()]).await;
    assert_eq!(hypervisor.running(), 0);
}

#[tokio::test(start_paused = true)]
async fn calls_and_effects_are_counted_per_instance() {
    let hypervisor = SimulatedHypervisor::new(node(1));
    let (one, two) = (fresh(), fresh());
    for instance in [one, one, two] {
        conformance::build(&hypervisor, &base(), instance).await;
    }
    assert_eq!(hypervisor.calls(Operation::Start), 3);
    assert_eq!(hypervisor.calls_of(Operation::Start, one), 2);
    for operation in [Operation::CreateOverlay, Operation::Define, Operation::Start] {
        assert_eq!(hypervisor.effects(operation, one), 1, "{operation:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_call_that_was_told_to_fails_and_the_others_do_not() {
    let hypervisor = SimulatedHypervisor::new(node(1));
    hypervisor.fail_nth(Operation::List, 2, failed());
    hypervisor.list().await.unwrap();
    assert!(!hypervisor.list().await.unwrap_err().is_transient());
    hypervisor.list().await.unwrap();
    hypervisor.fail_next(Operation::List, failed());
    assert!(hypervisor.list().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn latency_address_delay_and_hangs_follow_the_clock() {
    let hypervisor = SimulatedHypervisor::new(node(1));
    hypervisor.set_latency(Operation::Start, Duration::from_secs(3));
    hypervisor.set_address_delay(Duration::from_secs(7));
    let (instance, begin) = (fresh(), Instant::now());
    conformance::build(&hypervisor, &base(), instance).await;
    assert_eq!(begin.elapsed().as_secs(), 3);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(hypervisor.addresses(&[instance]).await.unwrap().is_empty());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(hypervisor.addresses(&[instance]).await.unwrap()[&instance][0].ip.is_ipv4());

    hypervisor.hang(Operation::Observe);
    let hung = tokio::spawn({
        let hypervisor = hypervisor.clone();
        async move { hypervisor.observe(instance).await }
    });
    let second = timeout(Duration::from_secs(60), hypervisor.observe(instance)).await;
    assert!(second.is_err(), "it hangs");
    hypervisor.list().await.expect("other operations do not");
    hypervisor.release(Operation::Observe);
    assert_eq!(hung.await.unwrap().unwrap().domain, Some(RunState::Running));
}

#[tokio::test(start_paused = true)]
async fn an_ended_guest_and_a_lost_connection_are_told() {
    let hypervisor = SimulatedHypervisor::new(node(1));
    let instance = fresh();
    conformance::build(&hypervisor, &base(), instance).await;
    hypervisor.set_console(instance, "boot: ä panic");
    let mut events = hypervisor.events();
    hypervisor.end_guest(instance);
    assert_eq!(events.recv().await.unwrap(), HypervisorEvent::Changed(instance));
    assert_eq!(hypervisor.observe(instance).await.unwrap().domain, Some(RunState::Ended(End::ByGuest)));
    assert!(hypervisor.addresses(&[instance]).await.unwrap().is_empty());
    assert_eq!(hypervisor.console_tail(instance, 7).await.unwrap(), " panic", "never half a character");

    hypervisor.set_unreachable(true);
    assert_eq!(events.recv().await.unwrap(), HypervisorEvent::LookAtAll);
    assert!(hypervisor.list().await.unwrap_err().is_transient());
    hypervisor.set_unreachable(false);
    assert_eq!(events.recv().await.unwrap(), HypervisorEvent::LookAtAll);
    hypervisor.list().await.unwrap();
}
