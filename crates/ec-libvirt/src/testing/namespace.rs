//! The namespaces of a test's libvirtd, and the daemons in them.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, gethostname},
};

use super::PATIENCE;

/// Process 1 of the namespace: makes the private mounts, says so, and then reaps what is orphaned (qemu is,
/// and libvirtd waits 40 s for a zombie). Where the processor cannot
/// virtualise, /dev/kvm is covered by what nobody can write, root included: libvirt would take a device
/// that can be opened for one that works, and probe qemu anew, 5 s long, at every definition and start.
const INIT: &str = r#"
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/libvirt /run/lock
for d in etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt; do
  mkdir -p "/$d"; mount --bind "$1/$d" "/$d"
done
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
if [ -e /dev/kvm ] && ! grep -qwE 'vmx|svm' /proc/cpuinfo; then
  : > "$1/no-kvm"
  mount --bind "$1/no-kvm" /dev/kvm
  mount -o remount,bind,ro /dev/kvm
fi
echo ready
exec </dev/null >/dev/null
while :; do sleep 3600 & wait $! || :; done
"#;

/// qemu as root and without the protections that need the host's own set-up.
const QEMU_CONF: &str = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\nnamespaces = []\n\
    cgroup_controllers = []\nremember_owner = 0\n";

/// Where libvirtd listens.
pub(super) fn socket(directory: &Path) -> PathBuf {
    directory.join("sock/libvirt-sock")
}

/// The namespaces; everything in them dies with their process 1, and that one with the test's process.
#[derive(Debug)]
pub(super) struct Namespace {
    directory: PathBuf,
    unshare: i32,
    init: i32,
    keeper: Option<JoinHandle<()>>,
    virtlogd: Mutex<Option<Daemon>>,
}

impl Namespace {
    pub(super) fn start(directory: &Path) -> Self {
        lay_out(directory).expect("the directories of the test's libvirtd");
        let (tell, started) = mpsc::channel();
        let path = directory.to_owned();
        // The death signal below is sent when the thread ends that started the process, not the process:
        // so a thread that stays until the end.
        let keeper = thread::spawn(move || {
            let mut child = Command::new("setpriv")
                .args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"])
                .args(["--mount-proc", "--propagation", "private", "sh", "-c", INIT, "init"])
                .arg(&path)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(log(&path, "namespace.log"))
                .spawn()
                .expect("setpriv and unshare of util-linux");
            let mut line = String::new();
            if let Some(stdout) = child.stdout.take() {
                // An early end shows as an empty line.
                let _ = BufReader::new(stdout).read_line(&mut line);
            }
            let _ = tell.send((pid(&child), line));
            let _ = child.wait();
        });
        let (unshare, line) = started.recv_timeout(PATIENCE).expect("the namespace in time");
        let mut namespace = Self {
            directory: directory.to_owned(),
            unshare,
            init: 0,
            keeper: Some(keeper),
            virtlogd: Mutex::default(),
        };
        assert_eq!(line, "ready\n", "no namespace for libvirtd:\n{}", namespace.logs());
        namespace.init = only_child(unshare);
        namespace.start_virtlogd();
        namespace
    }

    pub(super) fn start_virtlogd(&self) {
        let virtlogd = self.daemon("virtlogd", &["-f", "/etc/libvirt/virtlogd.conf"]);
        *self.virtlogd.lock().unwrap_or_else(PoisonError::into_inner) = Some(virtlogd);
    }

    pub(super) fn kill_virtlogd(&self) {
        if let Some(virtlogd) = self.virtlogd.lock().unwrap_or_else(PoisonError::into_inner).take() {
            virtlogd.kill();
        }
    }

    pub(super) fn start_libvirtd(&self) -> Daemon {
        self.daemon("libvirtd", &["-f", "/etc/libvirt/libvirtd.conf"])
    }

    fn daemon(&self, program: &str, arguments: &[&str]) -> Daemon {
        let output = || log(&self.directory, &format!("{program}.log"));
        let child = Command::new("nsenter")
            .args(["--target", &self.init.to_string(), "--mount", "--pid", "--", program])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(output())
            .spawn()
            .expect("nsenter of util-linux");
        let process = only_child(pid(&child));
        Daemon { child, process }
    }

    /// Does that among its mounts, which nobody else sees.
    pub(super) fn among_mounts(&self, command: &[&str]) {
        let done = Command::new("nsenter")
            .args(["--target", &self.init.to_string(), "--mount", "--pid", "--"])
            .args(command)
            .stdin(Stdio::null())
            .status()
            .expect("nsenter of util-linux");
        assert!(done.success(), "{command:?}: {done}");
    }

    /// Ends all processes at once, and what lives only as long as the host is up.
    pub(super) fn cut_power(&self) {
        // Sent to all, it reaches neither process 1 nor who sends it.
        let ended = Command::new("nsenter")
            .args(["--target", &self.init.to_string(), "--mount", "--pid", "--", "sh", "-c"])
            .arg("kill -KILL -1; rm -rf /run/libvirt; mkdir /run/libvirt")
            .stdin(Stdio::null())
            .status()
            .expect("nsenter of util-linux");
        assert!(ended.success(), "the power is on still: {ended}");
        self.kill_virtlogd();
    }

    /// What the daemons said, for the message of a test that fails.
    pub(super) fn logs(&self) -> String {
        let names = ["namespace.log", "virtlogd.log", "libvirtd.log", "var/log/libvirt/libvirtd.log"];
        let read = |name: &str| fs::read_to_string(self.directory.join(name)).unwrap_or_default();
        names.map(|name| format!("--- {name}\n{}", read(name))).concat()
    }

    /// What the daemons said, and what each thread of each process here waits for.
    pub(super) fn told(&self) -> String {
        let space = |process: &str| fs::read_link(format!("/proc/{process}/ns/pid")).ok();
        let (ours, mut told) = (space(&self.init.to_string()), self.logs());
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if ours.is_none() || space(&name) != ours {
                continue;
            }
            let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            told.push_str(&format!("--- process {name} {}\n", command.chars().take(200).collect::<String>()));
            for thread in fs::read_dir(entry.path().join("task")).into_iter().flatten().flatten() {
                let read = |file: &str| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
                told.push_str(&format!("{}    in {}\n", read("stat"), read("wchan")));
            }
        }
        told
    }

    pub(super) fn end(&mut self) {
        let _ = kill(Pid::from_raw(self.unshare), Signal::SIGKILL);
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
        self.kill_virtlogd();
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.end();
    }
}

fn lay_out(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    // dnsmasq does not stay root, and must pass.
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    for name in ["sock", "etc/libvirt", "var/lib/libvirt", "var/cache/libvirt", "var/log/libvirt"] {
        fs::create_dir_all(directory.join(name))?;
    }
    // libvirtd looks its own name up at every start of a guest, and would wait for an unreachable server.
    let host = gethostname()?.to_string_lossy().into_owned();
    fs::write(directory.join("hosts"), format!("127.0.0.1 localhost {host}\n"))?;
    fs::write(directory.join("resolv.conf"), "")?;
    let configuration = directory.join("etc/libvirt");
    fs::write(configuration.join("qemu.conf"), QEMU_CONF)?;
    fs::write(configuration.join("virtlogd.conf"), "")?;
    let libvirtd = format!(
        "unix_sock_dir = \"{}\"\nunix_sock_rw_perms = \"0700\"\nauth_unix_rw = \"none\"\n\
         log_outputs = \"3:file:/var/log/libvirt/libvirtd.log\"\n",
        directory.join("sock").display()
    );
    fs::write(configuration.join("libvirtd.conf"), libvirtd)
}

fn log(directory: &Path, name: &str) -> File {
    File::options().create(true).append(true).open(directory.join(name)).expect("a log file")
}

/// A daemon in the namespace.
#[derive(Debug)]
pub(super) struct Daemon {
    /// `nsenter`, which waits for it.
    child: Child,
    /// The daemon itself, by its number outside.
    process: i32,
}

impl Daemon {
    pub(super) fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.process), signal);
        if signal != Signal::SIGSTOP {
            // `nsenter` stops itself with what it waits for, and must go on to see the end of it.
            let _ = kill(Pid::from_raw(pid(&self.child)), Signal::SIGCONT);
        }
    }

    pub(super) fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

fn pid(child: &Child) -> i32 {
    child.id().try_into().expect("a process number")
}

/// The one child of a process, once it is there.
fn only_child(parent: i32) -> i32 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let children =
            fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
        match children.split_whitespace().next().and_then(|child| child.parse().ok()) {
            Some(child) => return child,
            None => assert!(Instant::now() < deadline, "process {parent} starts no child"),
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// The process whose command line has `text` in it.
pub(super) fn find_process(text: &str) -> Option<i32> {
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let process = entry.file_name().to_str()?.parse().ok()?;
        let command = fs::read(entry.path().join("cmdline")).ok()?;
        let found = command.windows(text.len()).any(|window| window == text.as_bytes());
        found.then_some(process)
    })
}
