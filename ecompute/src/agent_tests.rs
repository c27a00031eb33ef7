use std::path::{Path, PathBuf};

use ec_hypervisor::SimulatedHypervisor;
use ec_runtime::config::parse;
use ec_store::MemoryStore;

use super::*;

/// An agent's configuration, and the lock of its image cache, which nobody can open before somebody reads it.
fn settings(state: &Path, more: &str) -> (Settings, PathBuf) {
    ec_runtime::install_tls_provider();
    let text = format!("name: n\nstate_dir: {}\n{more}", state.display());
    let settings = Settings::check(&parse(&text, Path::new("compute.yaml")).unwrap()).unwrap();
    std::fs::create_dir_all(&settings.images).unwrap();
    let lock = settings.images.join("lock");
    assert!(std::process::Command::new("mkfifo").arg(&lock).status().unwrap().success());
    (settings, lock)
}

/// What was begun goes on, be it that its thread comes to the lock later: the runtime of a test waits for its threads.
fn answer(lock: &Path) -> std::fs::File {
    std::fs::File::options().read(true).write(true).open(lock).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_image_cache_that_does_not_answer_keeps_nothing_else_from_its_work() {
    let state = tempfile::tempdir().unwrap();
    let (settings, lock) = settings(state.path(), "");
    let node = NodeId::new(uuid::Uuid::from_u128(9));
    let (store, hypervisor) = (Arc::new(MemoryStore::new()), Arc::new(SimulatedHypervisor::new(node)));
    let placement = PlacementClient::new(&settings.placement).unwrap();
    let made = assemble(settings, node, store, hypervisor, placement, Host::default());
    let made = tokio::time::timeout(storage::ANSWERS_IN * 2, made);
    // While a thread works the clock does not go on by itself.
    let (made, ()) = tokio::join!(made, tokio::time::advance(storage::ANSWERS_IN * 3));
    let _answers = answer(&lock);
    let parts = made.expect("it waits for the image cache").unwrap();
    // Once it answers, images come.
    parts.images.opened().await.unwrap();
}

#[tokio::test]
async fn an_agent_ends_while_its_image_cache_does_not_answer() {
    let state = tempfile::tempdir().unwrap();
    let (settings, lock) = settings(state.path(), "libvirt: {uri: \"test:///default\"}\n");
    let shutdown = CancellationToken::new();
    let mut run = std::pin::pin!(run(settings, None, shutdown.clone()));
    let begun = tokio::time::timeout(Duration::from_secs(1), &mut run).await;
    shutdown.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(5), run).await;
    let _answers = answer(&lock);
    assert!(begun.is_err(), "it has not come so far: {begun:?}");
    ended.expect("it goes on").unwrap();
}

#[tokio::test]
async fn an_agent_whose_state_directory_was_moved_does_not_start_over_its_guests() {
    let state = tempfile::tempdir().unwrap();
    let (settings, lock) = settings(state.path(), "libvirt: {uri: \"test:///default\"}\n");
    let _answers = answer(&lock);
    std::fs::create_dir(settings.records()).unwrap();
    std::fs::write(settings.records().join(format!("{}.json", uuid::Uuid::from_u128(1))), "{}").unwrap();
    std::fs::write(state.path().join("place"), "/elsewhere\n").unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(5), run(settings, None, CancellationToken::new()));
    let ended = ended.await.expect("it starts").unwrap_err();
    assert!(ended.to_string().contains("was /elsewhere when this node's guests were made"), "{ended}");
}

#[tokio::test(start_paused = true)]
async fn metadata_follows_the_bridge_of_the_guests_network() {
    let state = tempfile::tempdir().unwrap();
    let (settings, lock) = settings(state.path(), "");
    let _answers = answer(&lock);
    let node = NodeId::new(uuid::Uuid::from_u128(9));
    let (store, hypervisor) = (Arc::new(MemoryStore::new()), SimulatedHypervisor::new(node));
    let placement = PlacementClient::new(&settings.placement).unwrap();
    let simulated = Arc::new(hypervisor.clone());
    let parts = assemble(settings, node, store, simulated, placement, Host::default()).await.unwrap();
    let (bridges, bridge) = watch::channel(None);
    let stop = CancellationToken::new();
    let served: Arc<Mutex<Vec<String>>> = Arc::default();
    let told = Arc::clone(&served);
    let serve = async move |bridge: String, stop: CancellationToken| {
        let is_half_there = bridge == "virbr2" && !told.lock().unwrap().contains(&bridge);
        told.lock().unwrap().push(bridge.clone());
        if is_half_there {
            return Err(MetadataError::System {
                doing: "listen".into(),
                source: std::io::ErrorKind::Other.into(),
            });
        }
        stop.cancelled().await;
        told.lock().unwrap().push(format!("left {bridge}"));
        Ok(())
    };
    let served_until = stop.clone();
    let metadata = tokio::spawn(async move { serve_metadata(bridge, serve, served_until).await });
    let protection = tokio::spawn(protect(parts, bridges, stop.clone()));
    let after = async |wanted: &[&str]| {
        tokio::time::sleep(PROTECTION_PERIOD * 3).await;
        assert_eq!(*served.lock().unwrap(), wanted);
    };
    after(&[]).await;
    hypervisor.set_bridge("virbr0");
    after(&["virbr0"]).await;
    hypervisor.set_bridge("virbr1");
    after(&["virbr0", "left virbr0", "virbr1"]).await;
    hypervisor.set_bridge("virbr2");
    after(&["virbr0", "left virbr0", "virbr1", "left virbr1", "virbr2", "virbr2"]).await;
    stop.cancel();
    metadata.await.unwrap().unwrap();
    protection.await.unwrap();
    assert_eq!(served.lock().unwrap().last().unwrap(), "left virbr2");
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_as_the_node_is_not_started_again() {
    let state = tempfile::tempdir().unwrap();
    let (settings, lock) = settings(state.path(), "");
    let _answers = answer(&lock);
    let node = NodeId::new(uuid::Uuid::from_u128(9));
    let (store, hypervisor) = (Arc::new(MemoryStore::new()), Arc::new(SimulatedHypervisor::new(node)));
    // The first one's, whose lease is kept.
    let lease = store.grant(Duration::from_secs(3600)).await.unwrap();
    let key = settings.keys.agent(node);
    store.txn(ec_store::Txn::new().put_leased(&key, "{}", lease)).await.unwrap();
    let placement = PlacementClient::new(&settings.placement).unwrap();
    let parts = assemble(settings, node, store, hypervisor, placement, Host::default()).await.unwrap();
    let refused = run_with(parts, CancellationToken::new()).await.unwrap_err();
    let told = failure(&refused);
    assert!(told.message.contains("already served by another agent"), "{}", told.message);
    assert_eq!(told.code, ec_runtime::exit::USAGE, "systemd starts it again after any other code");
    assert_eq!(failure(&anyhow::anyhow!("libvirt broke")).code, ec_runtime::exit::FAILED);
}
