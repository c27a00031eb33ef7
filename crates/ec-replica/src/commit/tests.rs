use ec_store::{MemoryStore, Op};

use super::*;
use crate::quota::Quota;

#[tokio::test(start_paused = true)]
async fn a_turn_is_given_back_where_no_other_has_taken_it_since() {
    let store = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let reader = Reader::start(Arc::clone(&shared), Quota::new(), CancellationToken::new());
    let committer = Committer::new(shared, Limits::default(), &reader, Host::default());
    let turn = committer.prefix().turn();
    let holder = async || store.get(&turn).await.unwrap().0.map(|pair| pair.value);
    // Of what a view is to have heard nothing can be waited for; the time is simulated.
    let told = || tokio::time::sleep(Duration::from_millis(100));
    committer.lanes().push(Pending::new(None, oneshot::channel().0, Duration::from_secs(10)));
    let mut lane = committer.set_out().unwrap();
    let mut gives_it_back = |own| {
        lane.turn = Some(own);
        let txn = committer.plan(&mut lane, 1).txn.unwrap();
        txn.then.iter().any(|op| matches!(op, Op::Delete(key) if *key == turn))
    };
    told().await;

    let own = committer.ask_for_turn().await.unwrap();
    assert!(gives_it_back(own), "also before the watch tells of it");
    told().await;
    assert!(gives_it_back(own));
    committer.give_turn_back(own).await;
    assert_eq!(holder().await, None);
    told().await;

    let own = committer.ask_for_turn().await.unwrap();
    store.txn(Txn::new().put(turn.clone(), "another")).await.unwrap();
    told().await;
    assert!(!gives_it_back(own));
    committer.give_turn_back(own).await;
    assert_eq!(holder().await.as_deref(), Some(b"another".as_slice()));
}
