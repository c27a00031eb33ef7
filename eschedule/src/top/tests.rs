//! What is on the screen, of which keys.

use std::collections::BTreeMap;

use ec_cloud::{Filter, NodeView, View};
use ec_model::{InstanceId, NodeId, State};
use jiff::{SignedDuration, Timestamp};
use ratatui::{
    Terminal,
    backend::TestBackend,
    buffer::Buffer,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::Position,
    style::{Color, Modifier},
};
use serde_json::json;

use super::{
    columns::Column,
    draw::{Look, draw},
    model::{Action, Asked, Mode, Model, Pane, Wish},
    rates::{Rate, Reading},
};

fn id(number: u128) -> InstanceId {
    InstanceId::new(uuid::Uuid::from_u128(number))
}

fn node_id(number: u128) -> NodeId {
    NodeId::new(uuid::Uuid::from_u128(number))
}

fn node(number: u128, name: &str, alive: bool) -> NodeView {
    let amounts = |vcpu: u64, memory: u64, disk: u64| -> BTreeMap<String, u64> {
        [("VCPU", vcpu), ("MEMORY_MB", memory), ("DISK_GB", disk)].map(|(c, n)| (c.to_owned(), n)).into()
    };
    NodeView {
        node: node_id(number),
        name: name.to_owned(),
        alive,
        agent: None,
        virt_type: None,
        locked: false,
        disabled: false,
        revoked: false,
        started_at: None,
        url: None,
        storage: None,
        instances: 2,
        volumes: 0,
        used: amounts(3, 1536, 10),
        capacity: amounts(16, 16 << 10, 100),
        troubles: Vec::new(),
        note: None,
    }
}

fn view(number: u128, name: &str, state: State, node: u128) -> View {
    View {
        kind: ec_model::Workload::Machine,
        instance: id(number),
        name: Some(name.to_owned()),
        node: Some(node_id(node)),
        node_alive: true,
        state: state.to_string(),
        ip: (state == State::Active).then(|| "10.0.0.7".parse().unwrap()),
        project: Some("p".to_owned()),
        labels: BTreeMap::new(),
        group: None,
        created_at: Some(now() - SignedDuration::from_mins(i64::try_from(number).unwrap())),
        reason: (state == State::Error).then(|| "no\nimage".to_owned()),
        resources: [("VCPU".to_owned(), 1), ("MEMORY_MB".to_owned(), 512)].into(),
        since: None,
        volumes_failed: false,
        doing: None,
        request_id: None,
        record: None,
        request: None,
        status: None,
    }
}

fn now() -> Timestamp {
    Timestamp::from_second(1_000_000).unwrap()
}

fn reading(second: i64, cpu: &[(u128, u64)]) -> Reading {
    let guests: BTreeMap<_, _> = cpu
        .iter()
        .map(|(n, ms)| (id(*n), json!({"cpu_ns": ms * 1_000_000, "disk_bytes": ms, "net_bytes": 0})))
        .collect();
    let at = Timestamp::from_second(second).unwrap();
    serde_json::from_value(json!({"at": at, "load1": 0.5, "instances": guests})).unwrap()
}

/// Two nodes, one of them down, and three instances, of which the first uses what two readings say.
fn model() -> Model {
    let mut model = Model::new(Filter::default());
    model.nodes(vec![node(1, "host1", true), node(2, "host2", false)]);
    for (number, name, state, on) in
        [(1, "web", State::Active, 1), (2, "db", State::Error, 2), (3, "mail", State::Stopped, 1)]
    {
        model.is(view(number, name, state, on));
    }
    model.read(node_id(1), Some(reading(10, &[(1, 1000), (3, 5)])));
    model.read(node_id(1), Some(reading(12, &[(1, 2500), (3, 5)])));
    model.read(node_id(2), None);
    model
}

fn drawn(model: &mut Model, width: u16, height: u16, coloured: bool) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model, Look { coloured }, now())).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(model: &mut Model, width: u16, height: u16) -> Vec<String> {
    let buffer = drawn(model, width, height, true);
    let line = |y| (0..width).map(|x| buffer[Position::new(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| line(y).trim_end().to_owned()).collect()
}

fn press(model: &mut Model, keys: &str) -> Option<Wish> {
    keys.chars().map(|key| code(model, KeyCode::Char(key))).last().flatten()
}

fn code(model: &mut Model, key: KeyCode) -> Option<Wish> {
    model.key(KeyEvent::new(key, KeyModifiers::NONE))
}

fn names(model: &Model) -> Vec<String> {
    model.instances().into_iter().map(|instance| model.name(instance)).collect()
}

#[test]
fn a_screen_of_eighty_by_twenty_four_tells_of_nodes_and_instances() {
    let mut model = model();
    let lines = lines(&mut model, 80, 24);
    let wanted = [
        "nodes 1/2 alive  VCPU 6/32  MEM 3.0G/32G  DISK 20G/200G  instances 3: 1 ACTIVE,",
        "NODE        STATE  VCPU           MEMORY            DISK              INST LOAD",
        "host1       alive  [|   ] 3/16    [|   ] 1.5G/16G   [|   ] 10G/100G   2    0.50",
        "host2       down   [|   ] 3/16    [|   ] 1.5G/16G   [|   ] 10G/100G   2    -",
        "NAME*          STATE         NODE         AGE ADDRESS          VCPU   MEM   CPU%",
        "db             ERROR         host2         2m -                   1  512M      -",
        "mail           STOPPED       host1         3m -                   1  512M    0.0",
        "web            ACTIVE        host1         1m 10.0.0.7            1  512M   75.0",
    ];
    assert_eq!(lines[..8], wanted, "{lines:#?}");
    assert!(lines[8..22].iter().all(String::is_empty), "{lines:#?}");
    // Of the selected: why it is as it is, in one line.
    assert_eq!(lines[22], "db: its node is not alive; no image");
    assert!(lines[23].starts_with("?help q:quit") && lines[23].contains("d:destroy"), "{lines:#?}");
}

#[test]
fn colours_tell_states_unless_none_are_wanted_and_the_selected_is_seen_anyway() {
    let (mut model, at) = (model(), |buffer: &Buffer, x, y| buffer[Position::new(x, y)].style());
    let buffer = drawn(&mut model, 80, 24, true);
    assert_eq!(at(&buffer, 18, 5).fg, Some(Color::Red));
    assert_eq!(at(&buffer, 18, 7).fg, Some(Color::Green));
    assert_eq!(at(&buffer, 12, 3).fg, Some(Color::Red));
    let buffer = drawn(&mut model, 80, 24, false);
    assert!(buffer.content.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    assert!(at(&buffer, 0, 5).add_modifier.contains(Modifier::REVERSED));
    assert!(!at(&buffer, 0, 6).add_modifier.contains(Modifier::REVERSED));
}

#[test]
fn any_size_can_be_drawn_with_any_name() {
    let mut model = model();
    model.is(view(9, "日本語の名前が長い\u{1b}[2J\u{200b}é", State::Error, 77));
    model.is(View {
        node: None,
        created_at: None,
        resources: BTreeMap::new(),
        ..view(10, "", State::Scheduled, 1)
    });
    for keys in ["", "/x", "\u{8}?", "q"] {
        press(&mut model, keys);
        for (width, height) in [(10, 3), (1, 1), (0, 0), (80, 1), (3, 40), (200, 50), (80, 24)] {
            drawn(&mut model, width, height, true);
        }
    }
    let lines = lines(&mut model, 200, 50);
    assert!(lines.iter().all(|line| !line.contains('\u{1b}')));
}

#[test]
fn those_are_asked_of_whom_the_screen_tells_and_all_where_what_they_say_is_the_order() {
    let mut model = Model::new(Filter::default());
    assert_eq!(model.asked(), Asked::Nobody);
    model.nodes((0..500).map(|number| node(number, &format!("host{number:03}"), true)).collect());
    model.is(view(1, "web", State::Active, 400));
    drawn(&mut model, 80, 24, true);
    let Asked::These(asked) = model.asked() else { panic!("{:?}", model.asked()) };
    assert!(asked.len() < 24 && asked.contains(&node_id(0)) && asked.contains(&node_id(400)), "{asked:?}");
    model.readings(vec![(node_id(0), Some(reading(10, &[]))), (node_id(400), None)]);
    assert_eq!(model.load(node_id(0)), Some(0.5));
    // Who is asked no more is not known any more.
    code(&mut model, KeyCode::Tab);
    code(&mut model, KeyCode::End);
    drawn(&mut model, 80, 24, true);
    let Asked::These(asked) = model.asked() else { panic!("{:?}", model.asked()) };
    assert!(!asked.contains(&node_id(0)) && asked.contains(&node_id(499)), "{asked:?}");
    model.readings(vec![(node_id(499), Some(reading(12, &[])))]);
    assert_eq!((model.load(node_id(0)), model.load(node_id(499))), (None, Some(0.5)));
    while !model.sort.is_measured() {
        press(&mut model, "o");
    }
    assert_eq!(model.asked(), Asked::All);
}

#[test]
fn of_thousands_what_is_selected_is_seen_and_no_more_is_drawn_than_there_is_room_for() {
    let mut model = model();
    for number in 100..5100 {
        model.is(view(number, &format!("n{number}"), State::Active, 1));
    }
    code(&mut model, KeyCode::End);
    let seen = lines(&mut model, 80, 24);
    assert!(seen[21].starts_with("web") && seen[20].starts_with("n999"), "{seen:#?}");
    code(&mut model, KeyCode::PageUp);
    assert_eq!(lines(&mut model, 80, 24)[21], seen[21], "it was seen already");
    code(&mut model, KeyCode::Home);
    assert!(lines(&mut model, 80, 24)[5].starts_with("db"));
}

#[test]
fn the_order_is_by_a_column_and_the_selection_stays_with_its_instance() {
    let mut model = model();
    assert_eq!(names(&model), ["db", "mail", "web"]);
    code(&mut model, KeyCode::End);
    while model.sort != Column::Cpu {
        press(&mut model, "o");
    }
    assert_eq!(names(&model), ["web", "mail", "db"]);
    assert_eq!(press(&mut model, "d"), None);
    assert_eq!(model.mode, Mode::Ask(Action::Destroy, id(1)), "web was selected");
    press(&mut model, "n");
    press(&mut model, "r");
    assert_eq!(names(&model), ["db", "mail", "web"]);
    press(&mut model, "r");
    // Its name changes, and its place with that; then it goes.
    model.is(view(1, "a", State::Stopped, 2));
    press(&mut model, "s");
    assert_eq!(model.mode, Mode::Ask(Action::Start, id(1)));
    press(&mut model, "n");
    model.gone(id(1));
    press(&mut model, "s");
    assert!(matches!(model.mode, Mode::Ask(Action::Start, other) if other != id(1)), "{:?}", model.mode);
}

#[test]
fn a_narrow_screen_tells_of_nodes_without_bars_and_then_without_what_is_worth_least() {
    let mut model = model();
    for (width, wanted) in [
        (
            60,
            [
                "NODE         STATE  VCPU    MEMORY     DISK       INST LOAD",
                "host1        alive  3/16    1.5G/16G   10G/100G   2    0.50",
                "host2        down   3/16    1.5G/16G   10G/100G   2    -",
                "NAME*                        STATE         NODE         CPU%",
            ],
        ),
        (
            40,
            [
                "NODE           STATE  VCPU    MEMORY",
                "host1          alive  3/16    1.5G/16G",
                "host2          down   3/16    1.5G/16G",
                "NAME*           STATE         NODE",
            ],
        ),
        (20, ["NODE          STATE", "host1         alive", "host2         down", "NAME*"]),
    ] {
        let lines = lines(&mut model, width, 24);
        assert_eq!(lines[1..5], wanted, "{lines:#?}");
    }
}

#[test]
fn numbers_are_shown_whole_however_large_they_are() {
    let mut model = model();
    let large = |used: u64, capacity: u64| -> [BTreeMap<String, u64>; 2] {
        [used, capacity].map(|n| {
            [("VCPU", n), ("MEMORY_MB", n << 10), ("DISK_GB", n)].map(|(c, n)| (c.to_owned(), n)).into()
        })
    };
    let [mut used, capacity] = large(128, 1023);
    used.insert("MEMORY_MB".to_owned(), 1000 << 10);
    model.nodes(vec![NodeView { used, capacity, ..node(1, "host1", true) }, node(2, "host2", false)]);
    let seen = lines(&mut model, 80, 24);
    assert_eq!(seen[2], "host1       alive  128/1023       1000G/1023G       [|   ] 128G/1023G 2    0.50");
    assert!(seen[3].contains("[|   ] 3/16 "), "others keep their bars: {seen:#?}");
    for (used, capacity) in [(1000, 1023), (9999, 99_999), (1_000_000, 12_345_678)] {
        let [used_of, capacity_of] = large(used, capacity);
        let instances = 123_456;
        let node = NodeView { used: used_of, capacity: capacity_of, instances, ..node(1, "host1", true) };
        model.nodes(vec![node]);
        for width in [30, 40, 50, 60, 80, 100] {
            let seen = lines(&mut model, width, 24);
            let cells: Vec<&str> =
                seen[2].split_whitespace().filter(|cell| !matches!(*cell, "[|" | "]")).collect();
            let titles = seen[1].split_whitespace();
            for (title, cell) in titles.zip(cells) {
                match title {
                    "VCPU" => assert_eq!(cell, format!("{used}/{capacity}"), "{width}: {seen:#?}"),
                    "INST" => assert_eq!(cell, instances.to_string(), "{width}: {seen:#?}"),
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn no_number_of_an_instance_is_wider_than_its_column() {
    let model = model();
    let rates = [0.0, 75.0, 999.96, 102_400.0, 1e9, 1e20];
    for (amount, rate) in
        [0, 1, 16, 1023, 99_999, 100_000, 1 << 40].into_iter().zip(rates.into_iter().cycle())
    {
        let created_at = Some(Timestamp::from_second(-i64::try_from(amount.min(1 << 35)).unwrap()).unwrap());
        let resources = [("VCPU".to_owned(), amount), ("MEMORY_MB".to_owned(), amount)].into();
        let view = View { created_at, resources, ..model.views[&id(1)].clone() };
        let rate = Some(Rate { cpu: rate, disk: rate, net: rate });
        for column in Column::ALL.into_iter().filter(|column| column.is_number()) {
            let cell = column.cell((&view, "host1", rate), now());
            assert!(cell.len() <= usize::from(column.width()), "{column:?}: {cell}");
        }
    }
}

#[test]
fn storage_that_nodes_share_is_counted_once() {
    let mut model = model();
    let on = |number, storage: Option<&str>| NodeView {
        storage: storage.map(str::to_owned),
        ..node(number, &format!("host{number}"), true)
    };
    model.nodes(vec![on(1, Some("nfs")), on(2, Some("nfs")), on(3, Some("ceph")), on(4, None), on(5, None)]);
    let seen = lines(&mut model, 120, 24);
    assert!(seen[0].contains("VCPU 15/80") && seen[0].contains("DISK 40G/400G"), "{seen:#?}");
}

#[test]
fn what_is_told_and_texts_are_shown_whole_where_there_is_room() {
    let mut model = model();
    let told = format!("web: cannot stop: {} the end", "because ".repeat(20));
    model.note = Some(told.clone());
    let seen = lines(&mut model, 80, 24);
    let whole: String = seen[20..23].iter().map(|line| format!("{line:80}")).collect();
    assert!(whole.trim_end() == told && seen[23].starts_with("?help"), "{seen:#?}");
    model.text("Instance", vec![format!("reason {} last", "because ".repeat(20))]);
    assert!(lines(&mut model, 80, 24).iter().any(|line| line.contains(" last")));
}

#[test]
fn each_column_orders_what_is_known_before_what_is_not() {
    let mut model = model();
    let unknown = View {
        node: None,
        ip: None,
        created_at: None,
        resources: BTreeMap::new(),
        ..view(4, "zz", State::Scheduled, 1)
    };
    model.is(View { name: None, ..unknown });
    for column in Column::ALL {
        model.sort = column;
        let last = *model.instances().last().unwrap();
        if !matches!(
            column,
            Column::State | Column::Doing | Column::Address | Column::Cpu | Column::Disk | Column::Net
        ) {
            assert_eq!(last, id(4), "{column:?}");
        }
    }
}

#[test]
fn a_filter_looks_in_names_uuids_nodes_and_states() {
    let mut model = model();
    for (text, wanted) in [
        ("WEB", &["web"][..]),
        ("host1", &["mail", "web"]),
        ("error", &["db"]),
        ("00000000-0000-0000-0000-000000000003", &["mail"]),
        ("nothing", &[]),
    ] {
        press(&mut model, "/");
        press(&mut model, text);
        assert_eq!(names(&model), wanted, "{text}");
        assert!(lines(&mut model, 80, 24)[22].contains(&format!("/{text}_")));
        // What is typed is no command.
        assert_eq!(model.mode, Mode::Filter);
        code(&mut model, KeyCode::Esc);
    }
    assert_eq!((names(&model).len(), &model.mode), (3, &Mode::Browse));
    press(&mut model, "/webx");
    code(&mut model, KeyCode::Backspace);
    code(&mut model, KeyCode::Enter);
    assert_eq!((names(&model), &model.mode), (vec!["web".to_owned()], &Mode::Browse));
    model.filter.states = vec![State::Error];
    assert!(names(&model).is_empty(), "what the command line said holds, too");
}

#[test]
fn nothing_is_done_that_was_not_confirmed_and_then_to_the_one_that_was_asked_about() {
    let mut model = model();
    for (key, action) in
        [("s", Action::Start), ("S", Action::Stop), ("b", Action::Reboot), ("d", Action::Destroy)]
    {
        assert_eq!(press(&mut model, key), None);
        let question = format!("{} db ({}) on host2? y: yes", action.word(), id(2));
        assert!(lines(&mut model, 120, 24)[22].starts_with(&question), "{question}");
        assert_eq!((press(&mut model, "x"), &model.mode), (None, &Mode::Browse));
        press(&mut model, key);
        assert_eq!(press(&mut model, "y"), Some(Wish::Act(action, id(2))));
    }
    // It went, and another stands there.
    press(&mut model, "d");
    model.gone(id(2));
    assert_eq!(press(&mut model, "y"), Some(Wish::Act(Action::Destroy, id(2))));
    code(&mut model, KeyCode::Tab);
    assert_eq!((press(&mut model, "d"), &model.mode), (None, &Mode::Browse));
    assert!(lines(&mut model, 80, 24)[22].contains("Tab goes there"));
    let mut empty = Model::new(Filter::default());
    assert_eq!((press(&mut empty, "d"), &empty.mode), (None, &Mode::Browse));
}

#[test]
fn texts_are_moved_through_and_closed_and_escape_leaves_what_is_open_first() {
    let mut model = model();
    press(&mut model, "?");
    assert!(lines(&mut model, 80, 24).iter().any(|line| line.contains("go between nodes and instances")));
    code(&mut model, KeyCode::Down);
    assert!(matches!(&model.mode, Mode::Text(text) if text.first == 1));
    assert_eq!((code(&mut model, KeyCode::Esc), &model.mode), (None, &Mode::Browse));
    assert_eq!(code(&mut model, KeyCode::Enter), Some(Wish::Show(id(2))));
    code(&mut model, KeyCode::Tab);
    assert_eq!(model.pane, Pane::Nodes);
    code(&mut model, KeyCode::Down);
    code(&mut model, KeyCode::Enter);
    assert!(lines(&mut model, 80, 24).iter().any(|line| line.contains("state      down")));
    code(&mut model, KeyCode::Enter);
    code(&mut model, KeyCode::Tab);
    assert_eq!(press(&mut model, "c"), Some(Wish::Console(id(2))));
    assert_eq!(press(&mut model, "l"), Some(Wish::Logs(id(2))));
    assert_eq!(press(&mut model, "q"), Some(Wish::Quit));
    assert_eq!(code(&mut model, KeyCode::Esc), Some(Wish::Quit));
    press(&mut model, "/");
    let control = |letter| KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
    assert_eq!(model.key(control('c')), Some(Wish::Quit), "whatever is open");
    assert_eq!(model.key(control('z')), Some(Wish::Suspend));
}

#[test]
fn a_text_that_comes_late_takes_the_keys_of_nobody_who_types_or_is_asked() {
    let mut model = model();
    press(&mut model, "/st");
    model.text("Instance", vec!["name web".to_owned()]);
    assert_eq!((press(&mut model, "d"), &model.mode, model.text.as_str()), (None, &Mode::Filter, "std"));
    code(&mut model, KeyCode::Esc);
    press(&mut model, "d");
    let asks = model.mode.clone();
    model.text("Instance", vec!["name web".to_owned()]);
    assert!(matches!(asks, Mode::Ask(Action::Destroy, _)) && model.mode == asks, "{:?}", model.mode);
    press(&mut model, "n");
    model.text("Instance", vec!["name web".to_owned()]);
    assert!(matches!(model.mode, Mode::Text(_)));
}

#[test]
fn trouble_is_told_until_nodes_are_seen_again_and_what_was_seen_stays() {
    let mut model = model();
    model.trouble = Some("etcd is not reachable".to_owned());
    let seen = lines(&mut model, 80, 24);
    assert!(
        seen[22].starts_with("not live: etcd is not reachable") && seen[7].starts_with("web"),
        "{seen:#?}"
    );
    model.note = Some("web: cannot stop".to_owned());
    assert!(lines(&mut model, 120, 24)[22].ends_with("web: cannot stop"));
    press(&mut model, "r");
    model.nodes(vec![node(1, "host1", true)]);
    let seen = lines(&mut model, 80, 24);
    assert!(!seen[21].contains("etcd") && !seen[22].contains("etcd"), "{seen:#?}");
}
