//! Drives the agent's probes, and nothing else of it, in a network namespace of its own: what they cost and how soon they
//! see. `cargo xtask bench probes` runs it and judges what it prints: one JSON object a line.
//!
//! - `probe_load cost KIND NUMBER PERIOD_MS SECONDS`: NUMBER probes (KIND: kernel, connect, http or exec) against as many
//!   listeners of another process; what this process uses of a CPU, which connections it makes, what they leave.
//! - `probe_load kill MODE ROUNDS`, `probe_load hang MODE ROUNDS`: from kill -9, or from the first connection that nobody
//!   accepts, to the change of readiness.
//! - `probe_load jitter ROUNDS`: how far the looks of a probe with a period of 100 ms are from their places.
//! - `probe_load look NUMBER`: what one look at NUMBER ports costs, by the lookup program and by sock_diag.
//! - `probe_load serve NUMBER`: the other process; it prints its ports.

use anyhow::{Context as _, Result, bail};
use beelet::events::Recorder;
use beelet::kernel::{CheckedNetns, Interest, Kernel, KernelOptions, Mode};
use beelet::pods::manager::Request;
use beelet::pods::table::{PodEntry, PodName, PodTable};
use beelet::probes::{self, Probes, Settings};
use beelet::runtime::Runtime;
use beelet_policy::probe::{EdgePolicy, ProbeResult};
use beelet_tests::agent::monotonic_ns;
use beelet_tests::cri::FakeCri;
use beelet_tests::guards::{CgroupRoot, Mount, NetNs, Process};
use beelet_tests::workdir::{PATIENCE, unique};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["serve", number] = words.as_slice() {
        return serve(number.parse()?);
    }
    let place = Place::new()?;
    match words.as_slice() {
        ["cost", kind, number, period, seconds] => {
            cost(&place, kind, number.parse()?, period.parse()?, seconds.parse()?)
        }
        ["kill", mode, rounds] => latencies(&place, mode, rounds.parse()?, true),
        ["hang", mode, rounds] => latencies(&place, mode, rounds.parse()?, false),
        ["jitter", rounds] => jitter(&place, rounds.parse()?),
        ["look", number] => look(&place, number.parse()?),
        _ => bail!("usage: see the head of bench/src/bin/probe_load.rs"),
    }
}

/// Where it all happens: nothing of the machine is touched, and no other connection is counted.
struct Place {
    cgroup: CgroupRoot,
    bpffs: Mount,
    _netns: NetNs,
    _folder: tempfile::TempDir,
}

impl Place {
    /// Makes the namespace and moves this process into it: it must have no other thread yet.
    fn new() -> Result<Place> {
        let name = unique("probe-load");
        let (cgroup, netns) = (CgroupRoot::new(&name)?, NetNs::new(&name)?);
        let file = std::fs::File::open(netns.path())?;
        let kind = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(file.as_fd(), Some(kind)).context("could not enter it")?;
        let folder = tempfile::tempdir()?;
        let bpffs = Mount::bpffs(&folder.path().join("bpf"))?;
        Ok(Place { cgroup, bpffs, _netns: netns, _folder: folder })
    }

    fn kernel(&self, mode: Mode) -> Result<Kernel> {
        Ok(Kernel::start(&KernelOptions {
            bpffs: self.bpffs.path().to_path_buf(),
            pin_name: "beelet".to_owned(),
            cgroup: self.cgroup.dir("unified").context("no cgroup2 hierarchy")?,
            mode,
            thresholds: beelet::kernel::Thresholds::default(),
            object: None,
        }))
    }
}

/// The process that listens.
struct Server {
    child: Process,
    ports: Vec<u16>,
}

impl Server {
    fn start(number: usize) -> Result<Server> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["serve", &number.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Process(command.spawn()?);
        let output = child.0.stdout.take().context("no output")?;
        let ports = BufReader::new(output)
            .lines()
            .take(number)
            .map(|line| Ok(line?.parse()?))
            .collect::<Result<_>>()?;
        Ok(Server { child, ports })
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.child.0.id())?).context("no pid")?;
        Ok(kill_process(pid, signal)?)
    }
}

/// Listens on `number` ports, answers every connection as an HTTP server would, and ends with its input.
fn serve(number: usize) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _in_runtime = runtime.enter();
    for _ in 0..number {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        println!("{}", listener.local_addr()?.port());
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut request = [0; 1024];
                    if stream.readable().await.is_ok() && matches!(stream.try_read(&mut request), Ok(1..)) {
                        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
                        let _ = stream.try_write(answer);
                    }
                });
            }
        });
    }
    std::io::stdout().flush()?;
    let ended = runtime.spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let _ = runtime.block_on(ended)?;
    Ok(())
}

/// The probes' task, fed by hand.
struct Probing {
    updates: mpsc::Receiver<Request>,
    runtime: tokio::runtime::Runtime,
    _table: watch::Sender<Arc<PodTable>>,
    _kernel: Kernel,
    shutdown: CancellationToken,
}

impl Probing {
    fn start(
        kernel: Kernel,
        tcp_by_kernel: bool,
        cri: Option<&FakeCri>,
        pods: Vec<Value>,
    ) -> Result<Probing> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let mut table = PodTable::default();
        for pod in pods {
            let pod = serde_json::from_value(pod)?;
            let name = PodName::of(&pod);
            table.pods.insert(name, Arc::new(PodEntry::of(pod)));
        }
        let table = watch::Sender::new(Arc::new(table));
        let (requests, updates) = mpsc::channel(16_384);
        let door = match cri {
            Some(cri) => Some(Runtime::new(&cri.endpoint(), Duration::from_secs(120))?),
            None => None,
        };
        let task = Probes::new(probes::Parts {
            table: table.subscribe(),
            requests,
            runtime: door,
            listeners: kernel.listeners(),
            checker: kernel.checker(),
            edges: kernel.subscribe(Interest::LISTENERS),
            commands: probes::handle().1,
            settings: Settings { tcp_by_kernel, edge_policy: EdgePolicy::Immediate, canary: Duration::ZERO },
            events: Recorder::default(),
            metrics: probes::Metrics::default(),
        });
        let shutdown = CancellationToken::new();
        runtime.spawn(task.run(shutdown.clone()));
        Ok(Probing { updates, runtime, _table: table, _kernel: kernel, shutdown })
    }

    /// The time at which the next change to `wanted` came.
    fn until(&mut self, wanted: ProbeResult) -> Result<u64> {
        let next = async {
            loop {
                match self.updates.recv().await {
                    Some(Request::Probe(update)) if update.result == wanted => return Ok(monotonic_ns()),
                    Some(_) => {}
                    None => bail!("the probes ended"),
                }
            }
        };
        let limited = async { tokio::time::timeout(PATIENCE, next).await };
        self.runtime.block_on(limited).with_context(|| format!("no change to {wanted:?} came"))?
    }
}

impl Drop for Probing {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// A host network pod with one readiness probe.
fn pod(number: usize, probe: &Value, annotation: &str) -> Value {
    json!({
        "metadata": {
            "name": format!("p{number}"), "namespace": "default", "uid": format!("u{number}"),
            "annotations": { "beelet.dev/probes": annotation },
        },
        "spec": {
            "hostNetwork": true,
            "containers": [{ "name": "main", "image": "x", "readinessProbe": probe }],
        },
        "status": {
            "podIPs": [{ "ip": "127.0.0.1" }],
            "containerStatuses": [{
                "name": "main", "containerID": format!("x://c{number}"), "image": "x", "imageID": "x",
                "restartCount": 0, "ready": false, "started": true,
                "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
            }],
        },
    })
}

fn cost(place: &Place, kind: &str, number: usize, period: u64, seconds: u64) -> Result<()> {
    let server = Server::start(if kind == "exec" { 0 } else { number })?;
    let cri = (kind == "exec").then(FakeCri::start);
    let annotation = format!("period={period}ms timeout=1s");
    let pods = (0..number).map(|index| {
        let port = server.ports.get(index);
        let probe = match kind {
            "http" => json!({ "httpGet": { "port": port, "path": "/healthz" } }),
            "exec" => json!({ "exec": { "command": ["true"] } }),
            _ => json!({ "tcpSocket": { "port": port } }),
        };
        pod(index, &probe, &annotation)
    });
    let kernel = place.kernel(if kind == "kernel" { Mode::Auto } else { Mode::Off })?;
    let _probing = Probing::start(kernel, kind == "kernel", cri.as_ref(), pods.collect())?;
    // The first looks are made, and what they left behind is as old as it gets.
    std::thread::sleep(Duration::from_millis(period + 500));
    let (cpu, opened, started) = (cpu_seconds()?, opened()?, Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let took = started.elapsed().as_secs_f64();
    let line = json!({
        "percent": 100.0 * (cpu_seconds()? - cpu) / took,
        "opened": (self::opened()? - opened) as f64,
        "time_wait": time_wait()? as f64,
        "seconds": took,
    });
    println!("{line}");
    Ok(())
}

/// CPU seconds that this process has used.
fn cpu_seconds() -> Result<f64> {
    // All threads: proc(5), user and system time in clock ticks.
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit_once(')').context("no stat")?.1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Connections that were begun in this namespace.
fn opened() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/net/snmp")?;
    let mut lines = text.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, values) = (lines.next().context("no Tcp")?, lines.next().context("no Tcp")?);
    let at = names.split_whitespace().position(|name| name == "ActiveOpens").context("no ActiveOpens")?;
    Ok(values.split_whitespace().nth(at).context("no ActiveOpens")?.parse()?)
}

/// Sockets in TIME_WAIT in this namespace.
fn time_wait() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/net/sockstat")?;
    let words: Vec<&str> =
        text.lines().find(|line| line.starts_with("TCP:")).context("no TCP")?.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "tw").context("no tw")?;
    Ok(words[at + 1].parse()?)
}

fn latencies(place: &Place, mode: &str, rounds: usize, kill: bool) -> Result<()> {
    for _ in 0..rounds {
        let server = Server::start(1)?;
        let port = server.ports[0];
        let probe = json!({ "tcpSocket": { "port": port }, "failureThreshold": 1 });
        let annotation = if kill && mode == "kernel" { "" } else { "period=1s timeout=1s" };
        let kernel = place.kernel(if mode == "kernel" { Mode::Auto } else { Mode::Off })?;
        let mut probing = Probing::start(kernel, mode == "kernel", None, vec![pod(0, &probe, annotation)])?;
        probing.until(ProbeResult::Success)?;
        let mut waits = None;
        let began = if kill {
            let began = monotonic_ns();
            server.signal(Signal::KILL)?;
            began
        } else {
            server.signal(Signal::STOP)?;
            waits = Some(TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port)))?);
            monotonic_ns()
        };
        let seen = probing.until(ProbeResult::Failure)?;
        drop(waits);
        println!("{}", json!({ "ms": seen.saturating_sub(began) as f64 / 1e6 }));
    }
    Ok(())
}

fn jitter(place: &Place, rounds: usize) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let probe = json!({ "tcpSocket": { "port": listener.local_addr()?.port() } });
    let _probing =
        Probing::start(place.kernel(Mode::Off)?, false, None, vec![pod(0, &probe, "period=100ms")])?;
    let mut first = None;
    for round in 0..rounds + 5 {
        let _ = listener.accept()?;
        let at = Instant::now();
        if round >= 5 {
            // From the place that the first one sets: neither early nor late may add up.
            let from = *first.get_or_insert(at);
            let place = Duration::from_millis(100) * u32::try_from(round - 5)?;
            let off = (at - from).as_secs_f64() - place.as_secs_f64();
            println!("{}", json!({ "ms": off.abs() * 1e3 }));
        }
    }
    Ok(())
}

fn look(place: &Place, number: usize) -> Result<()> {
    let server = Server::start(number)?;
    let kernel = place.kernel(Mode::Auto)?;
    let checker = kernel.checker().context("the lookup program can't be loaded here (beelet doctor)")?;
    let netns = CheckedNetns::open(Path::new("/proc/self/ns/net"), Some(&checker))?;
    let at = |port: &u16| netns.target(SocketAddr::from(([127, 0, 0, 1], *port)), None);
    let targets: Vec<_> = server.ports.iter().filter_map(at).collect();
    for _ in 0..20 {
        let started = Instant::now();
        checker.look(&targets)?;
        let program = started.elapsed().as_nanos() as f64 / number as f64;
        let started = Instant::now();
        for port in &server.ports {
            netns.handle().accept_queues(*port, [127, 0, 0, 1].into())?;
        }
        let diag = started.elapsed().as_nanos() as f64 / number as f64;
        println!("{}", json!({ "program_ns": program, "sock_diag_ns": diag }));
    }
    Ok(())
}
