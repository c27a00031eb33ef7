//! One more agent on the host of a stack: another node, with its own state and the same libvirt.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Result, ensure};
use ec_model::NodeId;

use crate::{Release, Running, Stack};

/// The second agent; killed when dropped.
pub struct SecondAgent {
    /// Which node it is.
    pub node: NodeId,
    log: PathBuf,
    _agent: Running,
}

impl SecondAgent {
    /// Starts that of this release. It is configured as the first one, but for what makes it another node and what `change` makes of that.
    pub fn start(stack: &Stack, release: Release, change: impl FnOnce(String) -> String) -> Result<Self> {
        let node = NodeId::new(uuid::Uuid::new_v4());
        let first = fs::read_to_string(stack.file("compute.yaml"))?;
        let second =
            first.replace(&stack.node.to_string(), &node.to_string()).replace("/state\n", "/state2\n");
        ensure!(second.contains("/state2\n") && second.contains(&node.to_string()), "{second}");
        let (file, log) = (stack.file("second.yaml"), stack.file("second.log"));
        fs::write(&file, change(second))?;
        let mut agent = Command::new(release.program("ecompute"));
        agent.arg("--config").arg(file).stdout(Stdio::null()).stderr(fs::File::create(&log)?);
        Ok(Self { node, log, _agent: Running(agent.spawn()?) })
    }

    /// What it said.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}
