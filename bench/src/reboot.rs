//! A host that lost its power, from the start of its libvirtd to the moment at which all guests run that ran before: the
//! agent's against libvirt's own autostart, by turns.

use std::time::{Duration, Instant};

use anyhow::Result;
use ec_model::InstanceId;
use ec_tests::Stack;

use crate::{
    build::Pattern,
    burst::Look,
    orders::Orders,
    stats::{Figure, Goal, Samples},
};

const ROUNDS: usize = 5;
const GUESTS: usize = 6;
/// So that what was ended before does not weigh on what begins.
const SETTLE: Duration = Duration::from_secs(2);

/// Measures with the stack's agent, which must run; it runs again at the end.
pub(crate) async fn measure(stack: &mut Stack) -> Result<Vec<Figure>> {
    let ours: Vec<InstanceId> =
        (0..GUESTS).map(|_| stack.schedule(&["--wait"])).collect::<Result<Vec<_>>>()?;
    let pattern = tokio::task::block_in_place(|| Pattern::of(stack, ours[0]))?;
    let twins: Vec<InstanceId> = (0..GUESTS).map(|_| Orders::instance()).collect();
    for twin in &twins {
        pattern.make(*twin)?.destroy()?;
    }
    // Its connection does not survive what follows.
    let pool = pattern.pool_name()?;
    drop(pattern);
    let (mut by_agent, mut by_libvirt) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        for (begins_itself, samples) in [(true, &mut by_libvirt), (false, &mut by_agent)] {
            let connect = stack.libvirt.connection();
            for twin in &twins {
                connect.lookup_domain_by_uuid(twin.uuid())?.set_autostart(begins_itself)?;
            }
            drop(connect);
            if stack.agent_pid().is_some() {
                stack.kill_agent()?;
            }
            stack.libvirt.cut_power();
            tokio::time::sleep(SETTLE).await;
            let begun = Instant::now();
            stack.libvirt.power_on();
            let look = Look::begin(stack, if begins_itself { &twins } else { &ours });
            if !begins_itself {
                stack.start_agent("").await?;
            }
            samples.push_time(tokio::task::block_in_place(|| look.all_run(stack))? - begun);
        }
    }
    for instance in &ours {
        let output = stack.eschedule(&["destroy", "--wait", &instance.to_string()])?;
        anyhow::ensure!(output.status.success(), "{output:?}");
    }
    let connect = stack.libvirt.connection();
    let disks = connect.lookup_storage_pool_by_name(&pool)?;
    for twin in &twins {
        let domain = connect.lookup_domain_by_uuid(twin.uuid())?;
        domain.set_autostart(false)?;
        domain.undefine()?;
        disks.lookup_storage_vol_by_name(&format!("{twin}.qcow2"))?.delete(0)?;
    }
    Ok(vec![Figure {
        name: "host: libvirtd's start → all six guests run again",
        unit: "ms",
        ours: by_agent,
        bare: Some(("libvirt's autostart of the same domains", by_libvirt)),
        goals: vec![Goal::Ratio(1.1)],
    }])
}
