use super::*;

const OPERATIONS: usize = 8;
const FULL: usize = OPERATIONS / 2;

/// Commands are the names of the records that they stand on.
type Bench = Lanes<&'static str, char>;

fn bench(commands: &[&'static str]) -> Bench {
    let mut lanes = Lanes::new(OPERATIONS);
    for command in commands {
        lanes.push(*command);
    }
    lanes
}

/// Takes what stands on nothing that is under way, as long as it fits.
fn choose(lanes: &Bench) -> Choice {
    let mut choice = Choice { taken: Vec::new(), full: false };
    for command in lanes.waiting() {
        let free = command.chars().all(|record| !lanes.is_under_way(&record));
        if free && choice.taken.iter().filter(|taken| **taken).count() == FULL {
            choice.full = true;
            break;
        }
        choice.taken.push(free);
    }
    choice
}

/// Sends as many of the commands as fit, where any may set out.
fn grow(lanes: &mut Bench, now: Instant) -> Option<(Number, Vec<&'static str>)> {
    let growth = lanes.growth(now)?;
    let choice = if growth == Growth::Alone { lanes.all() } else { choose(lanes) };
    let (number, mut commands) = lanes.set_out(growth, &choice)?;
    let rest = commands.split_off(commands.len().min(FULL));
    let sent: Vec<&str> = commands.into_iter().map(|(_, command)| command).collect();
    lanes.decided(number, sent.iter().flat_map(|command| command.chars()));
    lanes.sent(number, rest, now);
    Some((number, sent))
}

fn sent(grown: Option<(Number, Vec<&'static str>)>) -> Vec<&'static str> {
    grown.map_or_else(Vec::new, |(_, sent)| sent)
}

#[test]
fn another_sets_out_only_when_what_waits_fills_it() {
    let now = Instant::now();
    let mut lanes = bench(&["a", "b"]);
    let (first, _) = grow(&mut lanes, now).unwrap();
    for command in ["c", "d", "e"] {
        lanes.push(command);
        assert_eq!(lanes.growth(now), None);
    }
    lanes.push("f");
    assert_eq!(lanes.growth(now), Some(Growth::Full));
    // Four fit, and these are four: a fifth might, too.
    assert_eq!(grow(&mut lanes, now), None);
    assert_eq!(lanes.growth(now), None, "it is not looked at again before there are more");
    for command in ["g", "h", "i", "j"] {
        lanes.push(command);
    }
    assert_eq!(sent(grow(&mut lanes, now)), ["c", "d", "e", "f"]);
    lanes.ended(first, []);
    assert_eq!(lanes.growth(now), Some(Growth::Full));
}

#[test]
fn there_are_so_many_and_no_more() {
    let now = Instant::now();
    let names = [
        "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t",
        "u",
    ];
    let mut lanes = bench(&names);
    let mut under_way: Vec<Vec<&str>> = Vec::new();
    while let Some((_, sent)) = grow(&mut lanes, now) {
        under_way.push(sent);
    }
    assert_eq!(under_way.len(), LANES);
    assert_eq!(under_way.concat(), names[..LANES * FULL]);
    assert!(!lanes.may_grow());
}

#[test]
fn nothing_sets_out_beside_trouble() {
    let now = Instant::now();
    let mut lanes = bench(&["a"]);
    let (first, _) = grow(&mut lanes, now).unwrap();
    for command in ["b", "c", "d", "e", "f"] {
        lanes.push(command);
    }
    lanes.answered(first);
    assert_eq!(lanes.growth(now + SLOW), None, "it is decided again, or in doubt");
    lanes.sent(first, [], now);
    assert_eq!(lanes.growth(now), Some(Growth::Full));
}

#[test]
fn where_etcd_is_slow_whatever_may_sets_out() {
    let now = Instant::now();
    let mut lanes = bench(&["a"]);
    grow(&mut lanes, now).unwrap();
    lanes.push("a");
    lanes.push("b");
    assert_eq!(lanes.growth(now), None);
    let later = now + SLOW;
    assert_eq!(lanes.growth(later), Some(Growth::Any));
    assert_eq!(sent(grow(&mut lanes, later)), ["b"]);
    assert_eq!(lanes.growth(later + SLOW), None, "the other was passed over");
    lanes.push("c");
    assert_eq!(lanes.growth(later), None, "not so long since the last");
    assert_eq!(sent(grow(&mut lanes, later + SLOW)), ["c"]);
}

#[test]
fn whoever_was_passed_over_is_the_first_when_its_record_is_free() {
    let now = Instant::now();
    let mut lanes = bench(&["a"]);
    let (first, _) = grow(&mut lanes, now).unwrap();
    for command in ["ax", "b", "c", "d", "e", "f"] {
        lanes.push(command);
    }
    assert_eq!(sent(grow(&mut lanes, now)), ["b", "c", "d", "e"]);
    lanes.ended(first, []);
    assert_eq!(lanes.waiting().copied().collect::<Vec<_>>(), ["ax", "f"]);
    assert_eq!(sent(grow(&mut lanes, now + SLOW)), ["ax", "f"]);
}

#[test]
fn what_did_not_fit_waits_in_its_place() {
    let now = Instant::now();
    let mut lanes = bench(&["a", "b", "c", "d", "e", "f"]);
    let (number, mut commands) = lanes.set_out(Growth::Alone, &lanes.all()).unwrap();
    lanes.push("g");
    lanes.sent(number, commands.split_off(3), now);
    assert_eq!(lanes.waiting().copied().collect::<Vec<_>>(), ["d", "e", "f", "g"]);
    // Its time is over for the first of them only.
    lanes.ended(number, commands.split_off(1));
    assert_eq!(lanes.waiting().copied().collect::<Vec<_>>(), ["b", "c", "d", "e", "f", "g"]);
    assert!(!lanes.is_idle());
}

#[test]
fn as_many_come_in_as_can_be_looked_at() {
    let now = Instant::now();
    let mut lanes = bench(&["a"]);
    grow(&mut lanes, now).unwrap();
    let mut came = 0;
    // All of them want what is under way.
    loop {
        for _ in 0..lanes.room() {
            lanes.push("a");
            came += 1;
        }
        if lanes.growth(now).is_none() {
            break;
        }
        assert_eq!(grow(&mut lanes, now), None);
    }
    assert_eq!(came, LANES * OPERATIONS);
}
