use ec_model::{NodeId, Resources, Trouble, TroubleKind};
use jiff::ToSpan;

use super::*;

fn node(name: &str) -> NodeView {
    NodeView {
        node: NodeId::new(uuid::Uuid::from_u128(1)),
        name: name.into(),
        alive: true,
        agent: Some(env!("CARGO_PKG_VERSION").into()),
        virt_type: Some("kvm".into()),
        locked: false,
        disabled: false,
        revoked: false,
        started_at: None,
        url: None,
        storage: None,
        instances: 2,
        volumes: 0,
        used: Resources::new(),
        capacity: [("VCPU".to_owned(), 4)].into(),
        troubles: Vec::new(),
        note: None,
    }
}

fn levels(findings: &[Finding]) -> Vec<Level> {
    findings.iter().map(|finding| finding.level).collect()
}

/// The one finding, and that it says how to mend it.
fn bad(findings: &[Finding], level: Level, found: &str) {
    let [finding] = findings else { panic!("{findings:?}") };
    assert_eq!(finding.level, level, "{finding:?}");
    assert!(finding.found.contains(found), "{finding:?}");
    assert!(finding.mend.as_ref().is_some_and(|mend| !mend.is_empty()), "{finding:?}");
    assert_eq!(finding.code != 0, level == Level::Failed, "{finding:?}");
}

fn server(version: &str, cluster: u64) -> Result<Server, String> {
    Ok(Server { version: version.into(), cluster, member: 1, term: 1, revision: 1, errors: Vec::new() })
}

fn members(answers: &[Result<Server, String>]) -> Vec<Finding> {
    let named = answers.iter().enumerate().map(|(number, answer)| (format!("etcd{number}"), answer.clone()));
    of_members(&named.collect::<Vec<_>>())
}

#[test]
fn a_member_that_is_away_is_a_warning_where_others_answer_and_a_failure_where_none_does() {
    assert_eq!(levels(&members(&[server("3.5.16", 1), server("3.6.0", 1)])), [Level::Ok, Level::Ok]);
    let one = members(&[server("3.5.16", 1), Err("refused".into())]);
    assert_eq!(levels(&one), [Level::Ok, Level::Warning]);
    let none = members(&[Err("refused".into())]);
    bad(&none, Level::Failed, "etcd0: refused");
    assert_eq!(none[0].code, UNREACHABLE);
    bad(&members(&[server("3.4.23", 1)]), Level::Warning, "3.4.23");
    let full =
        server("3.5.16", 1).map(|it| Server { errors: vec!["memberID:1 alarm:NOSPACE ".into()], ..it });
    bad(&members(&[full]), Level::Failed, "no space left");
    let two = members(&[server("3.5.16", 1), server("3.5.16", 2)]);
    bad(&two[2..], Level::Failed, "different clusters");
}

#[test]
fn clocks_may_differ_by_some_seconds() {
    assert_eq!((clock(10), clock(-10)), (None, None));
    bad(&[clock(11).unwrap()], Level::Warning, "11 s behind");
    bad(&[clock(-11).unwrap()], Level::Warning, "11 s ahead of");
}

#[test]
fn a_cluster_without_agents_failed_and_one_of_two_releases_is_told_so() {
    bad(&of_nodes(&[]), Level::Failed, "no agent is alive");
    assert_eq!(levels(&of_nodes(&[node("a")])), [Level::Ok]);
    let dead = || NodeView { alive: false, agent: None, ..node("b") };
    let found = of_nodes(&[node("a"), dead()]);
    assert_eq!(found[0].found, "1 of 2 are alive");
    bad(&found[1..], Level::Warning, "marked b in placement");
    let marked = NodeView { disabled: true, ..dead() };
    assert_eq!(levels(&of_nodes(&[node("a"), marked])), [Level::Ok]);
    let nameless = NodeView { name: "-".into(), ..dead() };
    bad(&of_nodes(&[node("a"), nameless.clone()])[1..], Level::Warning, &nameless.node.to_string());
    let unknown = NodeView { capacity: Resources::new(), ..nameless };
    assert_eq!(levels(&of_nodes(&[node("a"), unknown])), [Level::Ok], "nobody can mark it");
    let old = NodeView { agent: Some("0.0.9".into()), ..node("b") };
    bad(&of_nodes(&[node("a"), old])[1..], Level::Warning, "agents are of 0.0.9");
}

#[test]
fn a_node_is_well_where_its_agent_and_placement_say_so() {
    let ready = |ok: bool| {
        let part = PartOfAgent { ok, why: (!ok).then(|| "no answer".to_owned()) };
        Ok(Ready { parts: [("libvirt".to_owned(), part)].into() })
    };
    for (answer, told) in [(None, "has no port"), (Some(&ready(true)), "all that it stands on is well")] {
        let found = of_node(&node("a"), answer);
        assert_eq!(levels(&found), [Level::Ok]);
        assert!(found[0].found.contains(told), "{found:?}");
    }
    bad(&of_node(&node("a"), Some(&ready(false))), Level::Failed, "libvirt: no answer");
    bad(&of_node(&node("a"), Some(&Err("refused".into()))), Level::Warning, "not reached from here: refused");
    bad(&of_node(&NodeView { alive: false, ..node("a") }, None), Level::Failed, "2 instances are there");
    let holds = NodeView { alive: false, volumes: 3, ..node("a") };
    bad(&of_node(&holds, None), Level::Failed, "2 instances and 3 volumes are there");
    let revoked = NodeView { alive: false, revoked: true, ..node("a") };
    bad(&of_node(&revoked, None), Level::Failed, "was revoked, and 2 instances");
    assert_eq!(levels(&of_nodes(&[node("b"), revoked])), [Level::Ok]);
    bad(&of_node(&NodeView { disabled: true, ..node("a") }, None), Level::Warning, "offers nothing");
    bad(&of_node(&NodeView { locked: true, ..node("a") }, None), Level::Warning, "reserved");
    bad(
        &of_node(&NodeView { capacity: Resources::new(), ..node("a") }, None),
        Level::Failed,
        "does not know",
    );
    let nobody = NodeView { agent: None, note: Some("its record cannot be read: no".into()), ..node("-") };
    let found = of_node(&nobody, None);
    bad(&found, Level::Failed, "its record cannot be read");
    assert_eq!(found[0].part, format!("node {}", nobody.node));
    assert_eq!(of_nodes(&[node("b"), nobody])[0].found, "1 of 2 are alive");
    let full = Trouble { kind: TroubleKind::Disk, since: Timestamp::UNIX_EPOCH, why: "it is full".into() };
    let troubled = NodeView { locked: true, troubles: vec![full], ..node("a") };
    bad(&of_node(&troubled, None), Level::Warning, "it is full");
}

#[test]
fn volumes_that_need_somebody_are_told_by_name() {
    let view = |number: u128, status: &str| VolumeView {
        name: Some(format!("data{number}")),
        status: status.into(),
        ..crate::fields::volume()
    };
    assert_eq!(levels(&of_volumes(&[view(0, "available"), view(1, "in-use")])), [Level::Ok]);
    bad(&of_volumes(&[view(0, "error"), view(1, "error")])[1..], Level::Warning, "2 in error: data0, data1");
    bad(&of_volumes(&[view(0, "unclaimed")])[1..], Level::Warning, "no request speaks of them: data0");
    bad(&of_volumes(&[view(0, "unknown")])[1..], Level::Warning, "cannot be told of: data0");
}

#[test]
fn instances_that_need_somebody_are_told_by_name_some_of_them() {
    let now = Timestamp::UNIX_EPOCH + 1.hour();
    let view = |number: u128, state: &str, minutes: i64| View {
        name: Some(format!("vm{number}")),
        state: state.into(),
        node_alive: true,
        created_at: Some(now - minutes.minutes()),
        since: Some(now - minutes.minutes()),
        ..crate::fields::view(false)
    };
    assert_eq!(levels(&of_instances(&[view(0, "ACTIVE", 60), view(1, "BUILDING", 15)], now)), [Level::Ok]);
    let broken: Vec<_> = (0..5).map(|number| view(number, "ERROR", 1)).collect();
    bad(&of_instances(&broken, now)[1..], Level::Warning, "5 in ERROR: vm0, vm1, vm2 and 2 more");
    bad(
        &of_instances(&[view(0, "UNCLAIMED", 1)], now)[1..],
        Level::Warning,
        "no request speaks of them: vm0",
    );
    bad(&of_instances(&[view(0, "UNKNOWN", 1)], now)[1..], Level::Warning, "cannot be told of: vm0");
    bad(&of_instances(&[view(0, "SCHEDULED", 16)], now)[1..], Level::Warning, "on their way for long: vm0");
    bad(&of_instances(&[view(0, "PREPARING", 16)], now)[1..], Level::Warning, "on their way for long: vm0");
    assert_eq!(
        levels(&of_instances(&[view(0, "VERIFY_RESIZE", 16)], now)),
        [Level::Ok],
        "it waits for its user"
    );
    let just_now = View { since: Some(now), ..view(0, "REBUILDING", 16) };
    assert_eq!(levels(&of_instances(&[just_now], now)), [Level::Ok], "not for long");
    let failing = |minutes| View {
        reason: Some("cannot unlink the disk; trying again".into()),
        ..view(0, "DESTROYING", minutes)
    };
    bad(&of_instances(&[failing(2)], now)[1..], Level::Warning, "which is tried again: vm0");
    bad(&of_instances(&[failing(20)], now)[1..], Level::Warning, "which is tried again: vm0");
    assert_eq!(levels(&of_instances(&[failing(1)], now)), [Level::Ok], "it may have been a moment");
    let held_up = View { reason: None, doing: failing(2).reason, ..view(0, "STARTING", 2) };
    bad(&of_instances(&[held_up], now)[1..], Level::Warning, "which is tried again: vm0");
    let beside = View { doing: failing(2).reason, ..view(0, "ACTIVE", 2) };
    bad(&of_instances(&[beside], now)[1..], Level::Warning, "which is tried again: vm0");
    let with_others = View { volumes_failed: true, ..view(0, "ACTIVE", 2) };
    bad(
        &of_instances(&[with_others], now)[1..],
        Level::Warning,
        "volumes that they are to have, or with others: vm0",
    );
    let untold = View { since: None, ..view(0, "DESTROYING", 16) };
    assert_eq!(levels(&of_instances(&[untold], now)), [Level::Ok], "its agent has yet to hear of it");
    let dead = View { node_alive: false, ..view(0, "SCHEDULED", 16) };
    assert_eq!(levels(&of_instances(&[dead], now)), [Level::Ok]);
}
