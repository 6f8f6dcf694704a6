//! Prints everything that a process can find out about its own identity and its surroundings, one line each,
//! in a stable order: two ways of starting a command in a container are equal if the reports are.

use std::fs;
use std::path::Path;

use rustix::process::{getpgid, getpid, getppid, getsid};

/// Fields of `/proc/self/status`.
const STATUS: [&str; 17] = [
    "Umask:",
    "Uid:",
    "Gid:",
    "Groups:",
    "CapInh:",
    "CapPrm:",
    "CapEff:",
    "CapBnd:",
    "CapAmb:",
    "NoNewPrivs:",
    "Seccomp:",
    "SigBlk:",
    "SigIgn:",
    "SigCgt:",
    "Cpus_allowed_list:",
    "Mems_allowed_list:",
    "THP_enabled:",
];
/// Start of the name of a probe's own cgroup, which is below the container's.
const LEAF: &str = "/beelet-exec-";

pub(super) fn run() -> Result<(), String> {
    let status = fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    for name in STATUS {
        let value = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("absent");
        println!("{name} {}", value.trim());
    }
    println!("cwd {:?}", std::env::current_dir().map_err(|error| error.to_string()));
    let mut environment: Vec<_> = std::env::vars_os().collect();
    environment.sort();
    environment.iter().for_each(|(name, value)| println!("env {name:?}={value:?}"));
    file("limits");
    file("oom_score_adj");
    file("personality");
    file("timerslack_ns");
    file("attr/current");
    file("loginuid");
    file("sessionid");
    file("coredump_filter");
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroups.lines().for_each(|line| println!("cgroup {}", line.split(LEAF).next().unwrap_or_default()));
    let mut namespaces: Vec<_> = fs::read_dir("/proc/self/ns")
        .map(|all| all.flatten().map(|entry| (entry.file_name(), fs::read_link(entry.path()).ok())).collect())
        .unwrap_or_default();
    namespaces.sort();
    namespaces.iter().for_each(|(name, target)| println!("namespace {name:?} {target:?}"));
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // proc_pid_stat(5): terminal, priority, nice value, real-time priority and policy; the first here is
    // field 3.
    for place in [7, 18, 19, 40, 41] {
        println!("stat {place} {:?}", fields.get(place - 3));
    }
    let (pid, leader) = (getpid(), |id: rustix::io::Result<_>| id.is_ok_and(|id| id == getpid()));
    println!("session leader {} group leader {}", leader(getsid(Some(pid))), leader(getpgid(Some(pid))));
    // With the machine's PID namespace the parent is the runtime's process, or the helper's.
    println!("has a parent in its namespace {}", getppid().is_some());
    descriptors();
    calls();
    Ok(())
}

fn file(name: &str) {
    match fs::read_to_string(Path::new("/proc/self").join(name)) {
        Ok(content) => content.lines().for_each(|line| println!("{name} {line}")),
        Err(error) => println!("{name} {:?}", error.kind()),
    }
}

/// Prints the kinds of the open descriptors.
fn descriptors() {
    let all = fs::read_dir("/proc/self/fd").map(|all| all.flatten().collect::<Vec<_>>()).unwrap_or_default();
    let mut all: Vec<String> = all
        .iter()
        .filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?;
            let target = target.display().to_string();
            let kind = target.split(':').next().unwrap_or_default().to_owned();
            Some(format!("descriptor {} {kind}", entry.file_name().display()))
        })
        .filter(|line| !line.contains("/proc/"))
        .collect();
    all.sort();
    all.iter().for_each(|line| println!("{line}"));
    // The container's user may open its own streams by name.
    for stream in ["stdout", "stderr"] {
        let opened = fs::OpenOptions::new()
            .append(true)
            .open(format!("/proc/self/fd/{}", if stream == "stdout" { 1 } else { 2 }));
        println!("{stream} opens by name: {:?}", opened.map(drop).map_err(|error| error.kind()));
    }
}

/// Prints the errors of calls that capabilities and seccomp filters decide about.
fn calls() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use rustix::mount::{MountFlags, mount, unmount};
    use rustix::net::{AddressFamily, SocketType, socket};
    let show = |name: &str, result: Result<(), rustix::io::Errno>| println!("call {name}: {result:?}");
    for name in ["chown", "mknod"] {
        let path = format!("/tmp-of-report-{}", getpid().as_raw_nonzero());
        let made = mknodat(CWD, &path, FileType::CharacterDevice, Mode::RUSR, rustix::fs::makedev(1, 3));
        show(name, made);
        let _ = fs::remove_file(path);
    }
    show("mount", mount("none", "/no-such-folder", "tmpfs", MountFlags::empty(), None));
    show("umount", unmount("/no-such-folder", rustix::mount::UnmountFlags::empty()));
    show("chroot", rustix::process::chroot("/no-such-folder"));
    show("sethostname", rustix::system::sethostname(&[b'x'; 100]));
    show(
        "raw socket",
        socket(AddressFamily::INET, SocketType::RAW, Some(rustix::net::ipproto::ICMP)).map(drop),
    );
    show("vsock", socket(AddressFamily::VSOCK, SocketType::STREAM, None).map(drop));
    show("setuid", rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(12345)));
    show("signal", rustix::process::test_kill_process(getpid()));
}
