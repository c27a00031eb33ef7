//! What may be changed by somebody who speaks for one provider, or for one project.

use ec_placement_model::{Command, ConsumerWrite, ModelError, Scope, State, intern};

use crate::support::{after, aggregate, claim, id, names, portrait, some, tried};

/// 1 is ours and 2 another's, each with processors; both use disk of 3. 100 uses ours and the shared disk, 200 the other's.
fn world() -> State {
    let create =
        |number: u128| Command::CreateProvider { uuid: id(number), name: format!("h{number}"), parent: None };
    let set = |number: u128, class: &str| Command::SetInventories {
        provider: id(number),
        generation: None,
        inventories: vec![(intern(class), some(8))],
    };
    let claims = [
        claim(100, &[(1, &[("VCPU", 1)]), (3, &[("DISK_GB", 2)])]),
        claim(200, &[(2, &[("VCPU", 1)]), (3, &[("DISK_GB", 2)])]),
    ];
    let commands = [
        create(1),
        create(2),
        create(3),
        set(1, "VCPU"),
        set(2, "VCPU"),
        set(3, "DISK_GB"),
        Command::SetAllocations(claims.to_vec()),
    ];
    after(&State::default(), &commands)
}

fn within(command: Command) -> Command {
    Command::Within { own: Scope::Provider(id(1)), command: Box::new(command) }
}

fn set(write: ConsumerWrite) -> Command {
    Command::SetAllocations(vec![write])
}

/// The inventories of these as they were, and a claim, at once.
fn reshape(providers: &[u128], write: ConsumerWrite) -> Command {
    let world = world();
    let one = |number: &u128| {
        let node = world.find(&id(*number))?;
        Some((id(*number), node.generation.as_ref()?.record, node.provider.as_ref()?.inventories.clone()))
    };
    Command::Reshape { inventories: providers.iter().filter_map(one).collect(), consumers: vec![write] }
}

#[test]
fn its_own_and_what_is_used_of_it_may_be_changed() {
    let allowed = [
        Command::UpdateProvider { uuid: id(1), name: "new".into(), parent: None, may_move: true },
        Command::UpdateProvider { uuid: id(1), name: "h1".into(), parent: Some(None), may_move: true },
        Command::AddInventory { provider: id(1), class: intern("DISK_GB"), inventory: some(5) },
        Command::SetInventories {
            provider: id(1),
            generation: None,
            inventories: vec![(intern("VCPU"), some(4))],
        },
        Command::EnsureTrait(intern("CUSTOM_T")),
        Command::SetTraits { provider: id(1), generation: None, traits: names(&["HW_CPU_X86_AVX"]) },
        set(claim(100, &[(1, &[("VCPU", 2)]), (3, &[("DISK_GB", 2)])])),
        set(claim(100, &[(1, &[("VCPU", 1)]), (3, &[("DISK_GB", 1)])])),
        set(claim(100, &[(1, &[("VCPU", 1)])])),
        set(claim(100, &[])),
        set(claim(101, &[(1, &[("VCPU", 1)])])),
        Command::DeleteAllocations(id(100)),
        reshape(&[1], claim(101, &[(1, &[("VCPU", 1)])])),
    ];
    for command in allowed {
        let (alone, wanted) = tried(&world(), &command, 0);
        let (outcome, state) = tried(&world(), &within(command.clone()), 0);
        assert!(outcome.is_ok(), "{command:?}: {outcome:?}");
        assert_eq!(outcome, alone, "{command:?}");
        assert_eq!(portrait(&state), portrait(&wanted), "{command:?}");
    }
    let gone =
        after(&world(), &[Command::DeleteAllocations(id(100)), within(Command::DeleteProvider(id(1)))]);
    assert!(gone.find(&id(1)).is_none());
    let new = Command::CreateProvider { uuid: id(1), name: "h1".into(), parent: None };
    assert!(tried(&State::default(), &within(new), 0).0.is_ok());
}

#[test]
fn a_provider_that_was_put_below_another_stays_there() {
    let to = |parent| Command::UpdateProvider { uuid: id(1), name: "new".into(), parent, may_move: true };
    let below = after(&world(), &[to(Some(Some(id(3))))]);
    assert!(tried(&below, &within(to(None)), 0).0.is_ok());
    let (outcome, state) = tried(&below, &within(to(Some(None))), 0);
    assert_eq!(outcome, Err(ModelError::NotYours(Scope::Provider(id(1)))));
    assert_eq!(portrait(&state), portrait(&below));
}

#[test]
fn it_does_not_begin_to_share_and_may_go_on_or_end() {
    let traits =
        |traits: &[&str]| Command::SetTraits { provider: id(1), generation: None, traits: names(traits) };
    let begins = traits(&["HW_CPU_X86_AVX", "MISC_SHARES_VIA_AGGREGATE"]);
    let (outcome, state) = tried(&world(), &within(begins.clone()), 0);
    assert_eq!(outcome, Err(ModelError::NotYours(Scope::Provider(id(1)))));
    assert_eq!(portrait(&state), portrait(&world()));
    let sharing = after(&world(), &[traits(&["MISC_SHARES_VIA_AGGREGATE"])]);
    for command in [begins, traits(&["HW_CPU_X86_AVX"])] {
        let (outcome, _) = tried(&sharing, &within(command.clone()), 0);
        assert!(outcome.is_ok(), "{command:?}: {outcome:?}");
    }
}

#[test]
fn nothing_else_may_and_nothing_of_a_refused_command_is_done() {
    let inventories = || vec![(intern("VCPU"), some(8))];
    let refused = [
        Command::CreateProvider { uuid: id(4), name: "h4".into(), parent: None },
        Command::CreateProvider { uuid: id(1), name: "h1".into(), parent: Some(id(2)) },
        Command::UpdateProvider { uuid: id(2), name: "new".into(), parent: None, may_move: true },
        Command::UpdateProvider { uuid: id(1), name: "h1".into(), parent: Some(Some(id(2))), may_move: true },
        Command::DeleteProvider(id(2)),
        Command::AddInventory { provider: id(2), class: intern("DISK_GB"), inventory: some(5) },
        Command::UpdateInventory {
            provider: id(2),
            generation: 2,
            class: intern("VCPU"),
            inventory: some(5),
        },
        Command::SetInventories { provider: id(2), generation: None, inventories: inventories() },
        Command::DeleteInventory { provider: id(2), class: intern("VCPU") },
        Command::SetAggregates { provider: id(1), generation: None, aggregates: vec![aggregate(1)] },
        Command::SetTraits { provider: id(2), generation: None, traits: names(&["HW_CPU_X86_AVX"]) },
        Command::DeleteTrait(intern("CUSTOM_T")),
        Command::CreateClass(intern("CUSTOM_C")),
        Command::EnsureClass(intern("CUSTOM_C")),
        Command::RenameClass { from: intern("CUSTOM_C"), to: intern("CUSTOM_D") },
        Command::DeleteClass(intern("CUSTOM_C")),
        // Another's consumer, another's room, and more of what is shared.
        Command::DeleteAllocations(id(200)),
        set(claim(200, &[(1, &[("VCPU", 1)])])),
        set(claim(200, &[])),
        set(claim(101, &[(2, &[("VCPU", 1)])])),
        set(claim(101, &[(1, &[("VCPU", 1)]), (3, &[("DISK_GB", 1)])])),
        set(claim(100, &[(1, &[("VCPU", 1)]), (3, &[("DISK_GB", 3)])])),
        set(claim(100, &[(1, &[("VCPU", 1)]), (3, &[("DISK_GB", 2), ("VCPU", 1)])])),
        Command::SetAllocations(vec![claim(100, &[(1, &[("VCPU", 1)])]), claim(101, &[(2, &[("VCPU", 1)])])]),
        reshape(&[2], claim(101, &[(1, &[("VCPU", 1)])])),
        reshape(&[1, 2], claim(101, &[(1, &[("VCPU", 1)])])),
        reshape(&[1], claim(101, &[(2, &[("VCPU", 1)])])),
        reshape(&[1], claim(200, &[(1, &[("VCPU", 1)])])),
        within(Command::EnsureTrait(intern("CUSTOM_T"))),
    ];
    let before = portrait(&world());
    for command in refused {
        let (outcome, state) = tried(&world(), &within(command.clone()), 0);
        assert_eq!(outcome, Err(ModelError::NotYours(Scope::Provider(id(1)))), "{command:?}");
        assert_eq!(portrait(&state), before, "{command:?}");
    }
}

/// As [`claim`], for this project; for nobody's where none is said, as before 1.8.
fn owned(write: ConsumerWrite, project: Option<&str>) -> ConsumerWrite {
    ConsumerWrite { owner: project.map(|project| (intern(project), intern("u"))), ..write }
}

/// 100 is of project a, 200 of b.
fn projects() -> State {
    let claims = [
        owned(claim(100, &[(1, &[("VCPU", 1)])]), Some("a")),
        owned(claim(200, &[(2, &[("VCPU", 1)])]), Some("b")),
    ];
    let commands = [
        Command::DeleteAllocations(id(100)),
        Command::DeleteAllocations(id(200)),
        Command::SetAllocations(claims.to_vec()),
    ];
    after(&world(), &commands)
}

#[test]
fn a_project_may_change_what_its_own_consumers_use_wherever_that_is_and_nothing_else() {
    let of_a = |command: &Command| Command::Within {
        own: Scope::Project(intern("a")),
        command: Box::new(command.clone()),
    };
    let own = |number, of: u128, project| set(owned(claim(number, &[(of, &[("VCPU", 2)])]), project));
    let allowed = [
        own(100, 2, Some("a")),
        own(101, 2, Some("a")),
        set(owned(claim(100, &[]), Some("a"))),
        set(owned(claim(100, &[]), None)),
        Command::DeleteAllocations(id(100)),
    ];
    for command in allowed {
        let (outcome, state) = tried(&projects(), &of_a(&command), 0);
        let (alone, wanted) = tried(&projects(), &command, 0);
        assert!(outcome.is_ok(), "{command:?}: {outcome:?}");
        assert_eq!((outcome, portrait(&state)), (alone, portrait(&wanted)), "{command:?}");
    }
    let mixed = [claim(100, &[(1, &[("VCPU", 1)])]), claim(200, &[(1, &[("VCPU", 1)])])];
    let refused = [
        own(200, 2, Some("b")),
        own(200, 2, Some("a")),
        own(200, 2, None),
        // It would be given away, or come from nobody.
        own(100, 1, Some("b")),
        own(100, 1, None),
        set(owned(claim(100, &[]), Some("b"))),
        own(101, 1, Some("b")),
        own(101, 1, None),
        Command::SetAllocations(mixed.map(|write| owned(write, Some("a"))).to_vec()),
        Command::DeleteAllocations(id(200)),
        Command::EnsureTrait(intern("CUSTOM_T")),
        Command::DeleteProvider(id(3)),
        Command::SetTraits { provider: id(1), generation: None, traits: names(&["HW_CPU_X86_AVX"]) },
        Command::Reshape { inventories: vec![], consumers: vec![] },
        of_a(&own(100, 2, Some("a"))),
    ];
    let before = portrait(&projects());
    for command in refused {
        let (outcome, state) = tried(&projects(), &of_a(&command), 0);
        assert_eq!(outcome, Err(ModelError::NotYours(Scope::Project(intern("a")))), "{command:?}");
        assert_eq!(portrait(&state), before, "{command:?}");
    }
    let told = |scope| ModelError::NotYours(scope).to_string();
    assert_eq!(
        told(Scope::Project(intern("a"))),
        "Only what consumers of project a use may be changed with this token."
    );
    assert_eq!(
        told(Scope::Provider(id(1))),
        format!("Only resource provider {}, and what is used of it, may be changed with this token.", id(1))
    );
}

#[test]
fn storage_that_shares_with_it_is_its_own_as_far_as_others_said_so() {
    let sharing = |provider: u128, aggregates: &[u128]| {
        let aggregates = aggregates.iter().map(|number| aggregate(*number)).collect();
        Command::SetAggregates { provider: id(provider), generation: None, aggregates }
    };
    let shares = Command::SetTraits {
        provider: id(3),
        generation: None,
        traits: names(&["MISC_SHARES_VIA_AGGREGATE"]),
    };
    let volume = |number: u128| set(claim(number, &[(3, &[("DISK_GB", 1)])]));
    let joined = [sharing(1, &[7]), sharing(3, &[7, 8]), shares.clone(), volume(300)];
    let state = after(&world(), &joined);
    let total = |provider: u128| Command::SetInventories {
        provider: id(provider),
        generation: None,
        inventories: vec![(intern("DISK_GB"), some(6))],
    };
    let allowed = [
        total(3),
        volume(301),
        Command::DeleteAllocations(id(300)),
        set(claim(100, &[(1, &[("VCPU", 1)]), (3, &[("DISK_GB", 3)])])),
    ];
    for command in allowed {
        let (outcome, _) = tried(&state, &within(command.clone()), 0);
        assert!(outcome.is_ok(), "{command:?}: {outcome:?}");
    }
    let refused = [
        // What it uses of another node beside is that node's.
        Command::DeleteAllocations(id(200)),
        set(claim(200, &[(3, &[("DISK_GB", 1)])])),
        Command::SetTraits { provider: id(3), generation: None, traits: names(&[]) },
        sharing(3, &[]),
        sharing(1, &[8]),
        Command::DeleteProvider(id(3)),
    ];
    for command in refused {
        let (outcome, _) = tried(&state, &within(command.clone()), 0);
        assert_eq!(outcome, Err(ModelError::NotYours(Scope::Provider(id(1)))), "{command:?}");
    }
    // Neither an aggregate alone, nor a trait alone.
    for missing in
        [sharing(1, &[9]), Command::SetTraits { provider: id(3), generation: None, traits: names(&[]) }]
    {
        let (outcome, _) = tried(&after(&state, &[missing]), &within(total(3)), 0);
        assert_eq!(outcome, Err(ModelError::NotYours(Scope::Provider(id(1)))));
    }
}
