//! Shared parts of the kernel tests: a cgroup, a network namespace and a bpf file system of the test's own, a
//! process in them that listens on command, and waits for edges of that namespace alone (the programs see the
//! whole machine).

#![allow(dead_code)] // tests/libbpf uses only a part
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use beelet_bpf::{
    Counters, Edge, Edges, Interest, Kernel, KernelOptions, Listener, NetnsHandle, built_in_object,
};
use beelet_tests::guards::{CgroupRoot, Mount, NetNs};
use beelet_tests::load::{Load, Seat};
use beelet_tests::requires;
use beelet_tests::workdir::{PATIENCE, target_dir, unique};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

pub(crate) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Everything that a test changes on the machine; the drop restores it.
pub(crate) struct Place {
    pub(crate) cgroup: CgroupRoot,
    pub(crate) netns: NetNs,
    pub(crate) bpffs: Mount,
    pub(crate) handle: NetnsHandle,
    _folder: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new(name: &str) -> Place {
        let name = unique(name);
        let cgroup = CgroupRoot::new(&name).unwrap();
        let netns = NetNs::new(&name).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let bpffs = Mount::bpffs(&folder.path().join("bpf")).unwrap();
        let handle = NetnsHandle::open(&netns.path()).unwrap();
        Place { cgroup, netns, bpffs, handle, _folder: folder }
    }

    pub(crate) fn options(&self) -> KernelOptions {
        KernelOptions {
            bpffs: self.bpffs.path().to_path_buf(),
            cgroup: self.cgroup_dir(),
            ..KernelOptions::default()
        }
    }

    pub(crate) fn cgroup_dir(&self) -> PathBuf {
        self.cgroup.dir("unified").unwrap()
    }

    pub(crate) fn cgroup_id(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::metadata(self.cgroup_dir()).unwrap().ino()
    }

    pub(crate) fn pins(&self) -> PathBuf {
        self.bpffs.path().join("beelet").join(format!("v{}", beelet_ebpf_abi::ABI_VERSION))
    }

    /// Starts the kernel half; every program must load.
    pub(crate) fn start(&self) -> Kernel {
        start(&self.options())
    }

    /// Creates a container's cgroup, by its path below the pods' root; also in the version-1 hierarchies of
    /// these controllers, if mounted.
    pub(crate) fn container(&self, path: &str, controllers: &[&str]) -> Container {
        let mut dirs: Vec<PathBuf> = ["unified"]
            .iter()
            .chain(controllers)
            .map(|name| self.cgroup.dir(name).unwrap().join(path))
            .collect();
        dirs.dedup();
        for dir in &dirs {
            std::fs::create_dir_all(dir).unwrap();
        }
        Container { dirs }
    }

    /// Starts a process in the cgroup and the namespace.
    pub(crate) fn process(&self) -> Process {
        Process::start(Some(&self.cgroup_dir()), &self.netns)
    }

    /// Returns the listeners of this namespace in the map.
    pub(crate) fn snapshot(&self, kernel: &Kernel) -> Vec<Listener> {
        let all = kernel.listeners().unwrap().snapshot().unwrap();
        all.into_iter().filter(|listener| listener.netns_cookie == self.handle.cookie()).collect()
    }

    /// Returns true if a listener for this port and address is in the map.
    pub(crate) fn listens(&self, kernel: &Kernel, port: u16, ip: IpAddr) -> bool {
        kernel.listeners().unwrap().is_listening(self.handle.cookie(), port, &[ip]).unwrap().is_some()
    }

    /// Waits for the next edge of this namespace.
    pub(crate) fn next(&self, edges: &Edges) -> Seen {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match edges.recv_deadline(deadline) {
                Ok(Edge::ListenerOpened { listener, at_ns })
                    if listener.netns_cookie == self.handle.cookie() =>
                {
                    return Seen::Opened(listener, at_ns);
                }
                Ok(Edge::ListenerClosed { listener, at_ns })
                    if listener.netns_cookie == self.handle.cookie() =>
                {
                    return Seen::Closed(listener, at_ns);
                }
                Ok(Edge::Lost) => return Seen::Lost,
                Ok(_) => {}
                Err(error) => panic!("no edge arrived in {PATIENCE:?}: {error}"),
            }
        }
    }
}

/// An edge of the test's own namespace.
#[derive(Debug, PartialEq)]
pub(crate) enum Seen {
    Opened(Listener, u64),
    Closed(Listener, u64),
    Lost,
}

impl Seen {
    pub(crate) fn opened(self) -> (Listener, u64) {
        match self {
            Seen::Opened(listener, at_ns) => (listener, at_ns),
            other => panic!("expected a listener to open, got {other:?}"),
        }
    }

    pub(crate) fn closed(self) -> (Listener, u64) {
        match self {
            Seen::Closed(listener, at_ns) => (listener, at_ns),
            other => panic!("expected a listener to close, got {other:?}"),
        }
    }
}

/// Subscribes to edges of listeners, from now on.
pub(crate) fn listener_edges(kernel: &Kernel) -> Edges {
    kernel.subscribe(Interest::LISTENERS)
}

/// Starts the kernel half; every program must load.
pub(crate) fn start(options: &KernelOptions) -> Kernel {
    let kernel = Kernel::start(options);
    for row in kernel.capabilities() {
        assert_eq!(row.have, Ok(()), "{row:?}");
    }
    kernel
}

/// The process that listens (tests/src/bin/listener.rs).
pub(crate) struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// A socket of a [`Process`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Socket {
    pub(crate) id: u32,
    pub(crate) port: u16,
    pub(crate) cookie: u64,
}

impl Process {
    pub(crate) fn start(cgroup: Option<&Path>, netns: &NetNs) -> Process {
        Process::start_at(cgroup, &netns.path())
    }

    /// Starts the process in the network namespace of this path.
    pub(crate) fn start_at(cgroup: Option<&Path>, netns: &Path) -> Process {
        let mut command = Command::new(program("listener", option_env!("CARGO_BIN_EXE_listener")));
        command.arg("--netns").arg(netns).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(cgroup) = cgroup {
            command.arg("--cgroup").arg(cgroup);
        }
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Process { child, input, output }
    }

    /// Sends a command. Returns the answer without its `ok`, or the error.
    pub(crate) fn send(&mut self, command: &str) -> Result<String, String> {
        writeln!(self.input.as_mut().unwrap(), "{command}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        match line.trim_end().strip_prefix("ok") {
            Some(answer) => Ok(answer.trim().to_owned()),
            None => Err(line),
        }
    }

    /// Sends a command that makes or changes a socket.
    pub(crate) fn socket(&mut self, command: &str) -> Socket {
        let answer = self.send(command).unwrap();
        let mut words = answer.split(' ');
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        let (id, port, cookie) = (number(), number(), number());
        Socket { id: id as u32, port: port as u16, cookie }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn close(&mut self, socket: Socket) {
        self.send(&format!("close {}", socket.id)).unwrap();
    }

    /// Kills the process with SIGKILL and waits for its end.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes the built-in object with another digest: with one more byte at its end, which readers of ELF
/// ignore.
pub(crate) fn other_object(folder: &Path) -> PathBuf {
    let mut bytes = built_in_object().to_vec();
    bytes.push(0);
    let path = folder.join("other.bpf.o");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Returns true if this kernel lists sockets; otherwise prints a skip.
pub(crate) fn lists_sockets() -> bool {
    let listed = NetnsHandle::of_process(std::process::id()).and_then(|own| own.listening(None));
    let Err(error) = listed else { return true };
    requires::skip(&requires::Missing { what: error.to_string(), remedy: "modprobe tcp_diag".to_owned() });
    false
}

/// A container's cgroup below the pods' root; the first folder is cgroup2's.
pub(crate) struct Container {
    pub(crate) dirs: Vec<PathBuf>,
}

impl Container {
    pub(crate) fn id(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::metadata(&self.dirs[0]).unwrap().ino()
    }

    /// Starts a process in the cgroup that loads the machine on command.
    pub(crate) fn load(&self, cpu: Option<usize>) -> Load {
        load(&Seat { cgroups: self.dirs.clone(), cpu, netns: None })
    }

    /// Returns the programs' counters.
    pub(crate) fn counters(&self, kernel: &Kernel) -> Counters {
        kernel.measures().unwrap().of(self.id()).unwrap().unwrap_or_default()
    }

    /// Returns the number after `name` in one of the cgroup's files.
    pub(crate) fn number(&self, file: &str, name: &str) -> u64 {
        let text = std::fs::read_to_string(self.dirs[0].join(file)).unwrap();
        let after = text.split([' ', '\n', '=']).skip_while(|word| *word != name).nth(1);
        after.unwrap_or_else(|| panic!("{file} has no {name}: {text}")).parse().unwrap()
    }
}

/// Returns the path of a program of the tests' package. Cargo sets `built` only for tests of that package.
fn program(name: &str, built: Option<&str>) -> PathBuf {
    built.map_or_else(|| target_dir().join("debug").join(name), PathBuf::from)
}

pub(crate) fn load(seat: &Seat) -> Load {
    let program = program("load", option_env!("CARGO_BIN_EXE_load"));
    Load::start(&program, &[], seat).unwrap()
}
