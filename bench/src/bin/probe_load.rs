//! Measures the cost and the reaction time of the agent's probes alone, in their own network namespace.
//! `cargo xtask bench probes` runs this program and compares its output, one JSON object per line, with the
//! bounds.
//!
//! - `probe_load cost KIND NUMBER PERIOD_MS SECONDS`: runs NUMBER probes (KIND: kernel, connect, http,
//!   http-reuse or exec) against that number of listeners, or of containers of a fake
//!   runtime, in another process. Prints the CPU use of this process in each second, the number of its
//!   connections, and the sockets before and after.
//! - `probe_load edges MODE ROUNDS`: the time from listen(2), close(2) and kill -9 to the change of
//!   readiness. In kernel mode, the probe has the default settings; in connect mode, a period of one second
//!   and thresholds of 1.
//! - `probe_load hang MODE ROUNDS`: the time from a hung application's first connection to the change of
//!   readiness. In kernel mode there is one connection. In connect mode there are 100 new connections per
//!   second until the queue is full: before that, connect() succeeds.
//! - `probe_load jitter MODE OTHERS ROUNDS`: the deviation of the checks of a probe with a period of 100 ms
//!   from their schedule, next to OTHERS probes with a period of a second.
//! - `probe_load lookup NUMBER`: the cost of one lookup of NUMBER ports, by the lookup program and by
//!   sock_diag.
//! - `probe_load serve NUMBER`, `listen PORT`, `runtime NUMBER`: the other processes.

use anyhow::{Context as _, Result, bail};
use beelet_bpf::{CheckedNetns, Interest, Kernel, KernelOptions};
use beelet_cri::Runtime;
use beelet_model::request::Request;
use beelet_model::table::{PodEntry, PodName, PodTable};
use beelet_policy::probe::settings::{Connections, ExecMode};
use beelet_policy::probe::{EdgePolicy, Outcome, ProbeResult, listener::QueueRule};
use beelet_probes::{Handle, ProbeView, Probes, Settings};
use beelet_proto::cri;
use beelet_state::events::Recorder;
use beelet_tests::agent::monotonic_ns;
use beelet_tests::cri::{Container, FakeCri};
use beelet_tests::guards::{CgroupRoot, Mount, NetNs, Process};
use beelet_tests::workdir::{PATIENCE, unique};
use beelet_units::bpf_settings::BpfMode;
use bench::Numbers;
use jiff::Timestamp;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve", number] => return serve(number.parse()?),
        ["listen", port] => return listen(port.parse()?),
        ["runtime", number] => return fake_runtime(number.parse()?),
        _ => {}
    }
    let place = Place::new()?;
    match words.as_slice() {
        ["cost", kind, number, period, seconds] => {
            cost(&place, kind, number.parse()?, period.parse()?, seconds.parse()?)
        }
        ["edges", mode, rounds] => edges(&place, mode, rounds.parse()?),
        ["hang", mode, rounds] => hangs(&place, mode, rounds.parse()?),
        ["jitter", mode, others, rounds] => jitter(&place, mode, others.parse()?, rounds.parse()?),
        ["lookup", number] => lookup(&place, number.parse()?),
        _ => bail!("unknown arguments; see the head of bench/src/bin/probe_load.rs"),
    }
}

/// The environment of a measurement, separate from the machine's, so that no other connection is counted.
struct Place {
    cgroup: CgroupRoot,
    bpffs: Mount,
    _netns: NetNs,
    _folder: tempfile::TempDir,
}

impl Place {
    /// Creates the namespace and moves this process there. The process must not have a second thread yet.
    fn new() -> Result<Place> {
        let name = unique("probe-load");
        let (cgroup, netns) = (CgroupRoot::new(&name)?, NetNs::new(&name)?);
        let file = std::fs::File::open(netns.path())?;
        let kind = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(file.as_fd(), Some(kind))
            .context("cannot enter the network namespace")?;
        let folder = tempfile::tempdir()?;
        let bpffs = Mount::bpffs(&folder.path().join("bpf"))?;
        Ok(Place { cgroup, bpffs, _netns: netns, _folder: folder })
    }

    fn kernel(&self, mode: BpfMode) -> Result<Kernel> {
        Ok(Kernel::start(&KernelOptions {
            bpffs: self.bpffs.path().to_path_buf(),
            cgroup: self.cgroup.dir("unified").context("no cgroup2 hierarchy")?,
            mode,
            ..KernelOptions::default()
        }))
    }
}

/// Another process of this program with other arguments, killed when this value is dropped.
struct Other {
    child: Process,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(arguments: &[&str]) -> Result<Other> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Process(command.spawn()?);
        let input = child.0.stdin.take().context("no input")?;
        let output = BufReader::new(child.0.stdout.take().context("no output")?);
        Ok(Other { child, input, output })
    }

    /// Returns the next line of its output.
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("the other process has ended");
        }
        Ok(line.trim_end().to_owned())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.child.0.id())?).context("no pid")?;
        Ok(kill_process(pid, signal)?)
    }
}

/// Starts another process that listens on `number` ports.
fn server(number: usize) -> Result<(Other, Vec<u16>)> {
    let mut server = Other::start(&["serve", &number.to_string()])?;
    let ports = (0..number).map(|_| Ok(server.line()?.parse()?)).collect::<Result<_>>()?;
    Ok((server, ports))
}

/// Listens on `number` ports and answers every connection like an HTTP server, until standard input ends.
fn serve(number: usize) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _in_runtime = runtime.enter();
    for _ in 0..number {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        println!("{}", listener.local_addr()?.port());
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        runtime.spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut request = [0; 1024];
                    // A request fits into one read.
                    while let Ok(length @ 1..) = stream.read(&mut request).await {
                        let asked = String::from_utf8_lossy(&request[..length]).to_lowercase();
                        let closes = asked.contains("connection: close");
                        let how = if closes { "Connection: close\r\n" } else { "" };
                        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n{how}\r\nok");
                        // The client may have closed the connection.
                        if stream.write_all(answer.as_bytes()).await.is_err() || closes {
                            break;
                        }
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

/// Listens on a port and accepts connections until a line of input arrives; prints the times right before
/// listen(2) and close(2).
fn listen(port: u16) -> Result<()> {
    let began = monotonic_ns();
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    println!("{began}");
    let input = std::io::stdin();
    loop {
        let mut waiting = [PollFd::new(&listener, PollFlags::IN), PollFd::new(&input, PollFlags::IN)];
        poll(&mut waiting, None)?;
        if !waiting[1].revents().is_empty() {
            break;
        }
        drop(listener.accept()?);
    }
    let began = monotonic_ns();
    drop(listener);
    println!("{began}");
    input.lock().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Serves a fake runtime with `number` running containers until standard input ends; prints its endpoint.
fn fake_runtime(number: usize) -> Result<()> {
    let cri = FakeCri::start();
    cri.change(|world| {
        for index in 0..number {
            let container = Container::running(format!("c{index}"), "s", cri::ContainerConfig::default());
            world.containers.insert(container.id.clone(), container);
        }
    });
    println!("{}", cri.endpoint());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The probes' task with its inputs and outputs.
struct Probing {
    updates: mpsc::Receiver<Request>,
    handle: Handle,
    runtime: tokio::runtime::Runtime,
    _table: watch::Sender<Arc<PodTable>>,
    _kernel: Kernel,
    shutdown: CancellationToken,
}

impl Probing {
    /// Starts the probes. With `by_kernel`, the kernel answers tcpSocket probes; otherwise they connect.
    /// `endpoint` is that of the container runtime.
    fn start(place: &Place, by_kernel: bool, endpoint: Option<&str>, pods: Vec<Value>) -> Result<Probing> {
        let kernel = place.kernel(if by_kernel { BpfMode::Auto } else { BpfMode::Off })?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let mut table = PodTable::default();
        for pod in pods {
            let pod = serde_json::from_value(pod)?;
            let name = PodName::of(&pod);
            table.pods.insert(name, Arc::new(PodEntry::of(pod)));
        }
        let table = watch::Sender::new(Arc::new(table));
        let (requests, updates) = mpsc::channel(16_384);
        let door = endpoint.map(|endpoint| Runtime::new(endpoint, Duration::from_secs(120))).transpose()?;
        let (handle, commands) = beelet_probes::handle();
        let task = Probes::new(beelet_probes::Parts {
            table: table.subscribe(),
            requests,
            runtime: door,
            listeners: kernel.listeners(),
            checker: kernel.checker(),
            edges: kernel.subscribe(Interest::LISTENERS),
            commands,
            settings: Settings {
                tcp_by_kernel: by_kernel,
                edge_policy: EdgePolicy::Immediate,
                canary: Duration::ZERO,
                queue_rule: QueueRule::Room,
                exec: ExecMode::Runtime,
                connections: Connections::Fresh,
            },
            exec_socket: "/nonexistent".into(),
            events: Recorder::default(),
            metrics: beelet_probes::Metrics::default(),
            asking: runtime.handle().clone(),
        });
        let shutdown = CancellationToken::new();
        runtime.spawn(task.run(shutdown.clone()));
        Ok(Probing { updates, handle, runtime, _table: table, _kernel: kernel, shutdown })
    }

    /// Returns the time of the next change to `wanted`.
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
        self.runtime.block_on(limited).with_context(|| format!("no probe changed to {wanted:?} in time"))?
    }

    fn list(&self) -> Result<Vec<ProbeView>> {
        Ok(self.runtime.block_on(self.handle.list())?)
    }
}

impl Drop for Probing {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// Returns a host network pod with one readiness probe. The first check of a `ready` pod is at its own offset
/// in its period, as after a restart of the agent.
fn pod(number: usize, probe: &Value, annotation: &str, ready: bool) -> Value {
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
                "restartCount": 0, "ready": ready, "started": true,
                "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
            }],
        },
    })
}

/// Time from the start of the probes to the measurement: the first connections exist and memory is touched by
/// then. The checks of the probes are spread evenly from the start, for any period.
const SETTLE: Duration = Duration::from_millis(1500);

fn cost(place: &Place, kind: &str, number: usize, period: u64, seconds: u64) -> Result<()> {
    let (_server, ports) = server(if kind == "exec" { 0 } else { number })?;
    let mut cri = if kind == "exec" { Some(Other::start(&["runtime", &number.to_string()])?) } else { None };
    let endpoint = cri.as_mut().map(Other::line).transpose()?;
    let connections = if kind == "http-reuse" { "reuse" } else { "fresh" };
    let annotation = format!("period={period}ms timeout=1s connections={connections}");
    let pods = (0..number).map(|index| {
        let port = ports.get(index);
        let probe = match kind {
            "http" | "http-reuse" => json!({ "httpGet": { "port": port, "path": "/healthz" } }),
            "exec" => json!({ "exec": { "command": ["true"] } }),
            _ => json!({ "tcpSocket": { "port": port } }),
        };
        pod(index, &probe, &annotation, true)
    });
    let probing = Probing::start(place, kind == "kernel", endpoint.as_deref(), pods.collect())?;
    std::thread::sleep(SETTLE);
    let (before, opened_before) = (sockets()?, opened()?);
    let (mut cpu, mut at) = (cpu_seconds(), Instant::now());
    for _ in 0..seconds {
        std::thread::sleep(Duration::from_secs(1));
        let (used, took) = (cpu_seconds() - cpu, at.elapsed().as_secs_f64());
        (cpu, at) = (cpu + used, Instant::now());
        println!("{}", json!({ "percent": 100.0 * used / took }));
    }
    let (after, opened) = (sockets()?, opened()? - opened_before);
    println!(
        "{}",
        json!({
            "opened": opened as f64,
            "sockets_before": before.used as f64, "sockets_after": after.used as f64,
            "time_wait_before": before.time_wait as f64, "time_wait_after": after.time_wait as f64,
        })
    );
    // Failing probes would make the cost meaningless.
    let probes = probing.list()?;
    let failing =
        probes.iter().find(|probe| probe.last.as_ref().is_some_and(|l| l.outcome != Outcome::Success));
    if let Some(failing) = failing {
        bail!("a probe failed that must succeed: {failing:?}");
    }
    if !probes.iter().any(|probe| probe.last.is_some()) {
        bail!("no probe has run");
    }
    Ok(())
}

/// Returns the CPU seconds of all threads of this process.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the number of connections that processes of this namespace have opened.
fn opened() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/net/snmp")?;
    let mut lines = text.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, values) = (lines.next().context("no Tcp")?, lines.next().context("no Tcp")?);
    let at = names.split_whitespace().position(|name| name == "ActiveOpens").context("no ActiveOpens")?;
    Ok(values.split_whitespace().nth(at).context("no ActiveOpens")?.parse()?)
}

/// The TCP sockets of this namespace, as `ss -s` counts them.
struct Sockets {
    used: u64,
    time_wait: u64,
}

fn sockets() -> Result<Sockets> {
    let text = std::fs::read_to_string("/proc/self/net/sockstat")?;
    let words: Vec<&str> =
        text.lines().find(|line| line.starts_with("TCP:")).context("no TCP")?.split_whitespace().collect();
    let number = |name: &str| -> Result<u64> {
        let at = words.iter().position(|word| *word == name).with_context(|| format!("no {name}"))?;
        Ok(words.get(at + 1).context("no number")?.parse()?)
    };
    Ok(Sockets { used: number("inuse")?, time_wait: number("tw")? })
}

/// Returns an unused port.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Waits for a random part of a second, so that the next step is at a random time between two checks.
fn any_time(numbers: &mut Numbers) {
    std::thread::sleep(Duration::from_millis(numbers.below(1000)));
}

fn milliseconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e6
}

fn edges(place: &Place, mode: &str, rounds: usize) -> Result<()> {
    let (port, by_kernel) = (free_port()?, mode == "kernel");
    let mut probe = json!({ "tcpSocket": { "port": port } });
    if !by_kernel {
        (probe["periodSeconds"], probe["failureThreshold"]) = (1.into(), 1.into());
    }
    let mut probing = Probing::start(place, by_kernel, None, vec![pod(0, &probe, "", false)])?;
    probing.until(ProbeResult::Failure)?;
    let mut numbers = Numbers::new(7);
    let mut wait =
        || if by_kernel { std::thread::sleep(Duration::from_millis(5)) } else { any_time(&mut numbers) };
    for _ in 0..rounds {
        for kill in [false, true] {
            wait();
            let mut listener = Other::start(&["listen", &port.to_string()])?;
            let listened = listener.line()?.parse()?;
            println!(
                "{}",
                json!({ "listen_ms": milliseconds(listened, probing.until(ProbeResult::Success)?) })
            );
            wait();
            if kill {
                let killed = monotonic_ns();
                listener.signal(Signal::KILL)?;
                println!(
                    "{}",
                    json!({ "kill_ms": milliseconds(killed, probing.until(ProbeResult::Failure)?) })
                );
            } else {
                writeln!(listener.input)?;
                let closed = listener.line()?.parse()?;
                println!(
                    "{}",
                    json!({ "close_ms": milliseconds(closed, probing.until(ProbeResult::Failure)?) })
                );
            }
        }
    }
    Ok(())
}

fn hangs(place: &Place, mode: &str, rounds: usize) -> Result<()> {
    let (port, by_kernel) = (free_port()?, mode == "kernel");
    let probe = json!({ "tcpSocket": { "port": port }, "periodSeconds": 1, "failureThreshold": 1 });
    let mut probing = Probing::start(place, by_kernel, None, vec![pod(0, &probe, "", false)])?;
    let mut numbers = Numbers::new(7);
    for _ in 0..rounds {
        let mut listener = Other::start(&["listen", &port.to_string()])?;
        listener.line()?;
        probing.until(ProbeResult::Success)?;
        any_time(&mut numbers);
        listener.signal(Signal::STOP)?;
        let began = monotonic_ns();
        let calls = Calls::start(port, if by_kernel { 1 } else { 1000 })?;
        let seen = probing.until(ProbeResult::Failure)?;
        drop(calls);
        println!("{}", json!({ "ms": milliseconds(began, seen) }));
        listener.signal(Signal::KILL)?;
    }
    Ok(())
}

/// Open connections to a port, 100 more per second.
struct Calls {
    stop: std::sync::mpsc::Sender<()>,
    calling: Option<std::thread::JoinHandle<()>>,
}

impl Calls {
    fn start(port: u16, number: usize) -> Result<Calls> {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let first = call(port)?;
        let calling = std::thread::spawn(move || {
            let mut open = vec![first];
            // The connections stay open until the value is dropped.
            while stopped.recv_timeout(Duration::from_millis(10)) == Err(RecvTimeoutError::Timeout) {
                if open.len() < number {
                    open.extend(call(port).ok());
                }
            }
        });
        Ok(Calls { stop, calling: Some(calling) })
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        // Both fail only if the thread has ended already.
        let _ = self.stop.send(());
        if let Some(calling) = self.calling.take() {
            let _ = calling.join();
        }
    }
}

/// Starts a connection without waiting for the handshake.
fn call(port: u16) -> Result<OwnedFd> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::NONBLOCK, None)?;
    match connect(&socket, &SocketAddr::from(([127, 0, 0, 1], port))) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

/// The name of the pod with the measured probe.
const PROBED: &str = "p0";

fn jitter(place: &Place, mode: &str, others: usize, rounds: usize) -> Result<()> {
    let (_server, ports) = server(others + 1)?;
    // The shortest period of a connecting probe is one second.
    let by_kernel = mode == "kernel";
    let pods = ports.iter().enumerate().map(|(index, port)| {
        let annotation = if index == 0 && by_kernel { "period=100ms" } else { "period=1s" };
        pod(index, &json!({ "tcpSocket": { "port": port } }), annotation, true)
    });
    let probing = Probing::start(place, by_kernel, None, pods.collect())?;
    std::thread::sleep(SETTLE);
    let period = Duration::from_millis(if by_kernel { 100 } else { 1000 });
    let (mut looks, mut last) = (Vec::new(), None);
    while looks.len() <= rounds {
        let at = probing.list()?.iter().find(|p| p.pod == PROBED).and_then(|p| Some(p.last.as_ref()?.at));
        if let Some(at) = at.filter(|at| last != Some(*at)) {
            looks.push(at);
            last = Some(at);
        }
        // Half a period after the last check, so that this query does not disturb the next check.
        let since =
            last.map_or(Duration::ZERO, |at| Duration::try_from(Timestamp::now() - at).unwrap_or_default());
        std::thread::sleep((period + period / 2).saturating_sub(since).max(period / 10));
    }
    // Measured from the first check, so that small deviations in one direction add up.
    let first = looks[0];
    for look in &looks[1..] {
        let off = Duration::try_from(*look - first)?.as_secs_f64() / period.as_secs_f64();
        println!("{}", json!({ "ms": (off - off.round()).abs() * period.as_secs_f64() * 1000.0 }));
    }
    Ok(())
}

fn lookup(place: &Place, number: usize) -> Result<()> {
    let (_server, ports) = server(number)?;
    let kernel = place.kernel(BpfMode::Auto)?;
    let checker =
        kernel.checker().context("this machine cannot load the lookup program; run beelet doctor")?;
    let netns = CheckedNetns::open(Path::new("/proc/self/ns/net"), Some(&checker))?;
    let at = |port: &u16| netns.target(SocketAddr::from(([127, 0, 0, 1], *port)), None);
    let targets: Vec<_> = ports.iter().filter_map(at).collect();
    for _ in 0..20 {
        let started = Instant::now();
        checker.lookup(&targets)?;
        let program = started.elapsed().as_nanos() as f64 / number as f64;
        let started = Instant::now();
        for port in &ports {
            netns.handle().accept_queues(*port, [127, 0, 0, 1].into())?;
        }
        let diag = started.elapsed().as_nanos() as f64 / number as f64;
        println!("{}", json!({ "program_ns": program, "sock_diag_ns": diag }));
    }
    Ok(())
}
