//! How commands and services are said of the directory, to whoever is to start or to run them.

use std::path::Path;

use super::{super::DIRECTORY, Directory};

/// What etcd's service is told, where Debian's packages brought it; below `/`.
pub(super) const ETCD_DEFAULTS: &str = "etc/default/etcd";

impl Directory {
    /// How etcd is started.
    pub(in crate::cluster) fn start_etcd(&self) -> String {
        self.start_etcd_of(Path::new("/"))
    }

    /// The same on the host whose files these are.
    pub(super) fn start_etcd_of(&self, root: &Path) -> String {
        let etcd = self.etcd();
        let etcd = etcd.display();
        match self.is_of_services(root, &["etcd"]) && root.join(ETCD_DEFAULTS).exists() {
            true => format!("echo ETCD_CONFIG_FILE={etcd} >>/{ETCD_DEFAULTS} && systemctl restart etcd"),
            false => format!("etcd --config-file {etcd}"),
        }
    }

    /// How `cluster init` is said again.
    pub(in crate::cluster) fn again(&self) -> String {
        self.said("init")
    }

    /// How a command of `cluster` is said of this one.
    pub(super) fn said(&self, command: &str) -> String {
        format!("eschedule cluster {command}{}", self.elsewhere())
    }

    /// The option by which `cluster` and `node` know this directory; none of the one where they look by themselves.
    pub(in crate::cluster) fn elsewhere(&self) -> String {
        match self.0 == Path::new(DIRECTORY) {
            true => String::new(),
            false => format!(" --directory {}", self.0.display()),
        }
    }

    /// The same for who looks for a configuration of this name.
    pub(in crate::cluster) fn configured(&self, name: &str) -> String {
        match self.0 == Path::new(DIRECTORY) {
            true => String::new(),
            false => format!(" --config {}", self.file(name).display()),
        }
    }

    /// How placement and the controller are started.
    pub(in crate::cluster) fn start_control(&self) -> String {
        self.start_control_of(Path::new("/"))
    }

    /// The same on the host whose files these are.
    pub(super) fn start_control_of(&self, root: &Path) -> String {
        if self.is_of_services(root, &["eplacement", "econtroller"]) {
            return "systemctl enable --now eplacement econtroller".to_owned();
        }
        format!(
            "start `eplacement --config {}` and `econtroller --config {}`",
            self.file("eplacement.yaml").display(),
            self.file("controller.yaml").display()
        )
    }

    /// Whether these are what services of these names read, on a host where systemd runs and has such.
    fn is_of_services(&self, root: &Path, names: &[&str]) -> bool {
        let is_there = |name: &&str| {
            let unit = format!("systemd/system/{name}.service");
            ["etc", "usr/lib", "lib"].iter().any(|place| root.join(place).join(&unit).exists())
        };
        self.0 == Path::new(DIRECTORY)
            && root.join("run/systemd/system").exists()
            && names.iter().all(is_there)
    }
}
