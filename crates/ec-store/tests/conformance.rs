//! Both stores, and both etcds, against one suite.

use std::sync::Arc;

use ec_store::{EtcdConfig, EtcdStore, MemoryStore, conformance, testing::EtcdServer};

#[tokio::test(start_paused = true)]
async fn the_store_in_memory_keeps_every_promise() {
    conformance::suite(Arc::new(MemoryStore::new()), "/conformance").await;
}

#[tokio::test]
async fn every_etcd_at_hand_keeps_every_promise() {
    for binary in EtcdServer::binaries() {
        let server = EtcdServer::start(Some(&binary)).await.unwrap();
        println!("etcd {} ({})", server.version(), binary.display());
        let config = EtcdConfig { endpoints: vec![server.endpoint()], ..EtcdConfig::default() };
        let store = EtcdStore::connect(config).await.unwrap();
        conformance::suite(Arc::new(store), "/conformance").await;
    }
}
