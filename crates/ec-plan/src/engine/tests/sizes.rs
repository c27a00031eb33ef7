//! Guests that get another size.

use ec_model::{End, Resize, Size, Spec};

use super::*;
use crate::{RecordFacts, SizeFacts};

fn amounts(vcpus: u64) -> Resources {
    [("VCPU".to_owned(), vcpus), ("MEMORY_MB".to_owned(), 128)].into()
}

/// One that runs, is to have two processors, and has claimed so many.
fn wished(claimed: u64) -> (Told, Vec<Command>) {
    let mut told = waiting();
    let spec = Spec {
        query: String::new(),
        resources: amounts(2),
        image: ec_model::ImageRef::default(),
        keys: Vec::new(),
        metadata: std::collections::BTreeMap::new(),
        user_data_bytes: None,
        token_required: false,
        snapshot: false,
    };
    let resize = Some(Resize { wished_at: Timestamp::UNIX_EPOCH });
    let before = (*requested(Desired::Active).record.unwrap()).clone();
    let request = Request { resize, spec: Some(spec), ..before };
    let wish = Requested { record: Ok(Arc::new(request)), revision: 2 };
    let commands = told.on(Event::Changed(vec![(one(), Some(wish))]));
    assert!(commands.contains(&Command::AskPlacement(one())), "{commands:?}");
    let commands = told.on(Event::Allocation(one(), Ok(Held::Here(amounts(claimed)))));
    (told, commands)
}

/// It is being ended, and was started as it was wished before.
fn resizing() -> Change {
    let mut status = says(State::Resizing, None);
    if let StatusEntry::Known(status, _) = &mut status {
        status.power_generation = 1;
    }
    Change::Status(status)
}

fn noted(size: SizeFacts) -> Change {
    Change::Record(RecordFacts::Kept {
        started: true,
        rebuilt: None,
        rescued: None,
        metadata: 0,
        root: None,
        intent: super::KEPT,
        size,
        rescue_begun: false,
    })
}

#[test]
fn a_size_that_cannot_be_had_is_given_up_and_the_guest_started_as_it_was() {
    let (mut told, commands) = wished(2);
    assert_eq!(begun(&commands), Some(&vec![Effect::Grow]));
    let commands = told.ended(vec![resizing()], Outcome::Done);
    assert_eq!(begun(&commands), Some(&vec![Effect::ShutDown]), "it cannot be while it runs");
    let ended = Observed { domain: Some(RunState::Ended(End::ByGuest)), ..HERE };
    let done = vec![resizing(), Change::Observed(Ok(ended))];
    let commands = told.ended(done, Outcome::Done);
    assert_eq!(begun(&commands), Some(&vec![Effect::Resize]));
    let commands = told.ended(vec![], Outcome::Failed("no".to_owned()));
    assert_eq!(begun(&commands), Some(&vec![Effect::GiveUpResize("no".to_owned())]));
    let is = Size { vcpus: 1, memory_mb: 128, disk_gb: 0 };
    let failed =
        SizeFacts { is, wished_at: Some(Timestamp::UNIX_EPOCH), failed: true, ..SizeFacts::default() };
    let commands = told.ended(vec![noted(failed)], Outcome::Done);
    assert_eq!(begun(&commands), Some(&vec![Effect::NoteResize, Effect::Reopen(0)]));
}

#[test]
fn a_start_that_fails_with_a_new_size_takes_that_back_and_no_other_does() {
    let (mut told, _) = wished(2);
    let is = Size { vcpus: 2, memory_mb: 128, disk_gb: 0 };
    let wished_at = Some(Timestamp::UNIX_EPOCH);
    let unproven = SizeFacts { is, wished_at, unproven: true, ..SizeFacts::default() };
    let ended = Observed { domain: Some(RunState::Ended(End::ByGuest)), ..HERE };
    let done = vec![noted(unproven), resizing(), Change::Observed(Ok(ended))];
    let commands = told.ended(done, Outcome::Done);
    assert_eq!(begun(&commands), Some(&vec![Effect::Reopen(0)]), "told when it is up");
    let commands = told.ended(vec![], Outcome::Failed("no memory".to_owned()));
    assert_eq!(begun(&commands), Some(&vec![Effect::GiveUpResize("no memory".to_owned())]));
    let proven = SizeFacts { unproven: false, ..unproven };
    told.ended(vec![noted(proven)], Outcome::Done);
    let commands = told.ended(vec![], Outcome::Failed("no memory".to_owned()));
    let Some(Command::Begin(job)) = commands.first() else { panic!("{commands:?}") };
    assert_eq!(job.work, Work::Fail("no memory".to_owned()));
}

#[test]
fn what_is_not_claimed_is_claimed_before_the_guest_is_given_it() {
    let (mut told, commands) = wished(1);
    assert_eq!(begun(&commands), Some(&vec![Effect::Cover]));
    let commands = told.ended(vec![Change::Allocation(Held::Here(amounts(2)))], Outcome::Done);
    assert_eq!(begun(&commands), Some(&vec![Effect::Grow]));
}
