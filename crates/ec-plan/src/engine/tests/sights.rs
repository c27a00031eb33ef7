//! What whoever looks in from outside sees.

use super::*;

#[test]
fn what_is_known_of_each_instance_is_seen_and_one_that_is_only_remembered_as_destroyed_is_not() {
    let destroyed = InstanceId::new(uuid::Uuid::from_u128(2));
    let seen = Seen {
        statuses: [(one(), says(State::Preparing, None))].into(),
        buried: [(destroyed, None)].into(),
        ..Seen::default()
    };
    let (mut told, _) = Told::looked(seen, Desired::Active);
    let sights: Vec<_> = told.engine.sights().collect();
    let [sight] = &sights[..] else { panic!("{sights:?}") };
    assert_eq!((sight.instance, sight.observed, sight.failures), (one(), Observed::default(), 0));
    assert_eq!(sight.status.map(|status| status.state), Some(State::Preparing));
    assert_eq!(sight.request, Some(&requested(Desired::Active)));
    assert!(sight.busy, "placement is asked");
    let why = told.engine.why(one()).unwrap();
    assert!(!why.is_empty() && sight.why == why);

    told.on(Event::Allocation(one(), Err("placement is away".to_owned())));
    assert_eq!(told.engine.sights().map(|sight| sight.failures).collect::<Vec<_>>(), [1]);
}

#[test]
fn what_the_hypervisor_has_is_seen() {
    let seen = Seen { observed: [(one(), HERE)].into(), ..Seen::default() };
    let (told, _) = Told::looked(seen, Desired::Active);
    assert_eq!(told.engine.sights().map(|sight| sight.observed).collect::<Vec<_>>(), [HERE]);
}
