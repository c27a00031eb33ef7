//! A bridge of the host for guests' second interfaces, with a DHCP server that libvirt knows nothing of.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// Gone when dropped.
pub struct Bridge {
    name: String,
    dhcp: Option<Child>,
}

impl Bridge {
    /// Adds it, with addresses in 198.51.100.0/24, which RFC 5737 keeps out of every real network.
    pub fn add() -> Result<Self> {
        // 15 characters at most; the process' number keeps runs apart.
        let bridge = Self { name: format!("ect2-{}", std::process::id()), dhcp: None };
        ip(&["link", "add", &bridge.name, "type", "bridge", "stp_state", "0", "forward_delay", "0"])?;
        ip(&["addr", "add", "198.51.100.1/24", "dev", &bridge.name])?;
        ip(&["link", "set", &bridge.name, "up"])?;
        Ok(bridge)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Starts the DHCP server.
    pub fn serve_dhcp(&mut self, directory: &std::path::Path) -> Result<()> {
        let child = Command::new("dnsmasq")
            .args(["--conf-file=/dev/null", "--keep-in-foreground", "--bind-interfaces", "--port=0"])
            .arg("--except-interface=lo")
            .arg(format!("--interface={}", self.name))
            .arg("--dhcp-range=198.51.100.10,198.51.100.200,255.255.255.0,1h")
            // No default route by it: the first interface has that.
            .arg("--dhcp-option=3")
            .arg(format!("--dhcp-leasefile={}", directory.join("second.leases").display()))
            .arg(format!("--pid-file={}", directory.join("second.pid").display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("failed to start dnsmasq")?;
        self.dhcp = Some(child);
        Ok(())
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        if let Some(mut dhcp) = self.dhcp.take() {
            dhcp.kill().ok();
            dhcp.wait().ok();
        }
        // A guest's interface may hold it for a moment.
        let deadline = Instant::now() + Duration::from_secs(5);
        while ip(&["link", "del", &self.name]).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().context("failed to run ip")?;
    ensure!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
