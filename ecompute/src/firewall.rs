//! Whether this host's own firewall keeps guests from asking for their metadata. DHCP and DNS libvirt opens itself; of port 80 it knows
//! nothing, and what one table of rules rejects no other table lets through.

use std::{fs, path::Path};

/// Where systemd has the processes of firewalld while it runs, by the versions of control groups.
const FIREWALLD: [&str; 3] = [
    "sys/fs/cgroup/system.slice/firewalld.service",
    "sys/fs/cgroup/systemd/system.slice/firewalld.service",
    "sys/fs/cgroup/unified/system.slice/firewalld.service",
];

/// firewalld's zone of libvirt's bridges, as the administrator has it or as it comes: the first that is there counts.
const ZONES: [&str; 2] = ["etc/firewalld/zones/libvirt.xml", "usr/lib/firewalld/zones/libvirt.xml"];

/// What to be told where guests on this bridge are kept from it, and how to let them.
pub(crate) fn in_the_way(bridge: &str) -> Option<String> {
    of(Path::new("/"), bridge)
}

fn of(root: &Path, bridge: &str) -> Option<String> {
    let (which, mend) = if ufw_keeps_out(root, bridge) {
        ("ufw", format!("ufw allow in on {bridge} to 169.254.169.254 port 80 proto tcp"))
    } else if firewalld_keeps_out(root) {
        let add = "firewall-cmd --permanent --zone=libvirt --add-service=http && firewall-cmd --reload";
        ("firewalld", add.to_owned())
    } else {
        return None;
    };
    Some(format!("this host's firewall, {which}, keeps guests from asking there: `{mend}`"))
}

/// Unless one of its rules lets them in, which it keeps as `allow tcp 80 TO any FROM in_BRIDGE` in a comment.
fn ufw_keeps_out(root: &Path, bridge: &str) -> bool {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let says = |path: &str, key: &str, value: &str| {
        read(path).lines().any(|line| {
            let (of, is) = line.split_once('=').unwrap_or_default();
            of.trim() == key && is.trim().trim_matches('"').eq_ignore_ascii_case(value)
        })
    };
    let lets_in = |rule: &str| {
        // What is behind the way in is the administrator's comment; what an action logs changes nothing of it.
        let fields = rule.split_ascii_whitespace().filter(|field| !field.starts_with("comment="));
        let fields: Vec<&str> = fields.collect();
        let [action, protocol, port, to, _, from, .., how] = fields[..] else { return false };
        matches!(action.split('_').next(), Some("allow" | "limit"))
            && matches!(from, "0.0.0.0/0" | "any")
            && matches!(protocol, "tcp" | "any")
            && port.split(',').any(|port| matches!(port, "80" | "any"))
            && matches!(to, "169.254.169.254" | "0.0.0.0/0")
            && (how == "in" || how.strip_prefix("in_") == Some(bridge))
    };
    says("etc/ufw/ufw.conf", "ENABLED", "yes")
        && !says("etc/default/ufw", "DEFAULT_INPUT_POLICY", "ACCEPT")
        && !read("etc/ufw/user.rules")
            .lines()
            .filter_map(|line| line.strip_prefix("### tuple ###"))
            .any(lets_in)
}

/// Where it has no zone of libvirt's, bridges are in one that nothing is known of here.
fn firewalld_keeps_out(root: &Path) -> bool {
    let zone = ZONES.iter().find_map(|path| fs::read_to_string(root.join(path)).ok());
    let runs = FIREWALLD.iter().any(|path| root.join(path).is_dir());
    runs && zone
        .is_some_and(|zone| !["\"http\"", "'http'", "\"80\"", "'80'"].iter().any(|it| zone.contains(it)))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Root(tempfile::TempDir);

    impl Root {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn with(&self, path: &str, text: &str) -> &Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn told(&self) -> Option<String> {
            of(self.0.path(), "virbr0")
        }
    }

    #[test]
    fn a_host_without_a_firewall_is_told_nothing() {
        assert_eq!(Root::new().told(), None);
        assert_eq!(Root::new().with("etc/ufw/ufw.conf", "# no\nENABLED=no\nLOGLEVEL=low\n").told(), None);
        assert_eq!(Root::new().with(ZONES[1], "<zone/>").told(), None);
    }

    #[test]
    fn ufw_is_in_the_way_until_a_rule_lets_guests_in() {
        let root = Root::new();
        root.with("etc/ufw/ufw.conf", "ENABLED=yes\n")
            .with("etc/default/ufw", "DEFAULT_INPUT_POLICY=\"DROP\"\n");
        let told = root.told().unwrap();
        assert!(told.contains("ufw allow in on virbr0 to 169.254.169.254 port 80 proto tcp"), "{told}");
        for (rule, lets_in) in [
            ("allow tcp 80 169.254.169.254 any 0.0.0.0/0 in_virbr0", true),
            ("allow tcp 80,443 0.0.0.0/0 any 0.0.0.0/0 in", true),
            ("allow tcp 80 0.0.0.0/0 any 0.0.0.0/0 Nginx%20HTTP - in", true),
            ("allow any any 0.0.0.0/0 any 0.0.0.0/0 in_virbr0", true),
            ("allow_log tcp 80 0.0.0.0/0 any 0.0.0.0/0 in comment=6d65746164617461", true),
            ("allow tcp 80 0.0.0.0/0 any 10.0.0.0/8 in", false),
            ("allow tcp 80 0.0.0.0/0 any 0.0.0.0/0 in_eth0", false),
            ("allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in", false),
            ("deny tcp 80 0.0.0.0/0 any 0.0.0.0/0 in", false),
            ("allow udp 80 0.0.0.0/0 any 0.0.0.0/0 in", false),
        ] {
            let text = format!("*filter\n### tuple ### {rule}\n-A ufw-user-input -p tcp\n");
            assert_eq!(root.with("etc/ufw/user.rules", &text).told().is_none(), lets_in, "{rule}");
        }
        root.with("etc/ufw/user.rules", "").with("etc/default/ufw", "DEFAULT_INPUT_POLICY=\"ACCEPT\"\n");
        assert_eq!(root.told(), None);
    }

    #[test]
    fn firewalld_is_in_the_way_while_it_runs_and_its_zone_does_not_know_of_http() {
        let root = Root::new();
        root.with(ZONES[1], "<zone target=\"ACCEPT\"><service name=\"dns\"/><rule><reject/></rule></zone>");
        assert_eq!(root.told(), None);
        for place in FIREWALLD {
            let running = Root::new();
            running.with(&format!("{place}/cgroup.procs"), "");
            assert_eq!(running.told(), None, "its zones are others");
            let told = running.with(ZONES[1], "<zone><service name=\"dns\"/></zone>").told().unwrap();
            assert!(told.contains("--zone=libvirt --add-service=http"), "{told}");
            assert_eq!(running.with(ZONES[0], "<zone><service name=\"http\"/></zone>").told(), None);
        }
    }
}
