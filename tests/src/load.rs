//! Process that loads the machine on command, in given cgroups and on a given CPU: kernel tests and benches
//! compare what the programs counted of it with the kernel's own files.
//!
//! [`serve`] is the process (`load [--cgroup DIR]… [--netns FILE] [--cpu N]`): it reads commands from
//! standard input, one per line, and answers each with a line when it is done. [`Load`] is the other end.

use anyhow::{Context as _, Result, bail};
use rustix::thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_setaffinity};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Place in which a [`Load`] runs.
#[derive(Debug, Clone, Default)]
pub struct Seat {
    /// Folders of cgroups to join: one, or one per hierarchy.
    pub cgroups: Vec<PathBuf>,
    /// Network namespace to enter.
    pub netns: Option<PathBuf>,
    /// CPU to run on.
    pub cpu: Option<usize>,
}

/// Controlling end of the process, which is killed on drop.
#[derive(Debug)]
pub struct Load {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Load {
    /// Starts `program`, which must call [`serve`] (with `arguments` before its own), and waits until it is
    /// in place.
    pub fn start(program: &Path, arguments: &[&str], seat: &Seat) -> Result<Load> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        for cgroup in &seat.cgroups {
            command.arg("--cgroup").arg(cgroup);
        }
        if let Some(netns) = &seat.netns {
            command.arg("--netns").arg(netns);
        }
        if let Some(cpu) = seat.cpu {
            command.arg("--cpu").arg(cpu.to_string());
        }
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let input = child.stdin.take().context("no standard input")?;
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut load = Load { child, input, output };
        load.answer()?;
        Ok(load)
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs a command and waits for its end; returns the answer without the `ok`.
    pub fn run(&mut self, command: &str) -> Result<String> {
        self.begin(command)?;
        self.answer()
    }

    /// Starts a command, for whose end [`Load::answer`] waits.
    pub fn begin(&mut self, command: &str) -> Result<()> {
        writeln!(self.input, "{command}").context("the load process has ended")
    }

    /// Waits for the end of the command sent by [`Load::begin`].
    pub fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("the load process has ended")?;
        match line.trim_end().strip_prefix("ok") {
            Some(answer) => Ok(answer.trim().to_owned()),
            None => bail!("the load process answered: {line:?}"),
        }
    }

    /// Waits until the process ends by itself.
    pub fn wait(mut self) -> Result<std::process::ExitStatus> {
        Ok(self.child.wait()?)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the process: joins its place, prints `ok`, and executes commands until the input ends.
///
/// - `burn MS`: computes
/// - `swarm THREADS MS`: computes on this many threads at once
/// - `mixed MS`: computes and sleeps in turns, on two threads
/// - `idle MS`: runs two threads that do almost nothing, ten times per second
/// - `doze ROUNDS`: sleeps 2 ms repeatedly → `ok NANOSECONDS`, the median overrun
/// - `pingpong ROUNDS`: two threads wake each other through pipes → `ok NANOSECONDS`
/// - `spawn COUNT`: short processes one after the other → `ok PID:CODE:SIGNAL …`
/// - `exit CODE`, `crowd CODE`, `abort`: ends; with many threads; by a signal
/// - `stream FILE`: reads a file once from start to end
/// - `allocate BYTES`: allocates memory and touches it
/// - `udp COUNT BYTES`: sends itself datagrams over loopback
/// - `tcp COUNT BYTES`: connects to itself and sends, repeatedly → `ok NANOSECONDS`
/// - `listen`: → `ok PORT`; then `take COUNT` accepts this many connections in sequence, and reads all data
/// - `call PORT COUNT BYTES`: connects there and sends, repeatedly → `ok NANOSECONDS`
/// - `lose`: sends over a connection whose other end drops all packets, and keeps both open
/// - `found`: removes the drop, and waits until the data has arrived
///
/// # Errors
/// The process cannot join its place.
pub fn serve(arguments: &[String]) -> Result<()> {
    if let [command, rest @ ..] = arguments
        && matches!(command.as_str(), "exit" | "crowd" | "abort")
    {
        short_life(command, rest);
    }
    join_place(arguments)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "ok")?;
    out.flush()?;
    let mut sockets = Sockets::default();
    for line in std::io::stdin().lock().lines() {
        match obey(&line?, &mut sockets) {
            Ok(answer) => writeln!(out, "ok {answer}")?,
            Err(error) => writeln!(out, "error {error:#}")?,
        }
        out.flush()?;
    }
    Ok(())
}

fn join_place(arguments: &[String]) -> Result<()> {
    let mut arguments = arguments.iter();
    while let Some(name) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--cgroup" => std::fs::write(format!("{value}/cgroup.procs"), std::process::id().to_string())
                .with_context(|| format!("cannot join the cgroup {value}"))?,
            "--netns" => {
                let file = std::fs::File::open(value).with_context(|| format!("cannot open {value}"))?;
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
            }
            "--cpu" => {
                let mut cpus = CpuSet::new();
                cpus.set(value.parse()?);
                sched_setaffinity(None, &cpus).context("cannot stay on one CPU")?;
            }
            _ => bail!("unknown argument {name}"),
        }
    }
    Ok(())
}

fn short_life(command: &str, rest: &[String]) -> ! {
    if command == "abort" {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
    if command == "crowd" {
        // exit_group(2) ends all threads at the same moment.
        for _ in 0..4 {
            std::thread::spawn(std::thread::park);
        }
    }
    std::process::exit(rest.first().and_then(|code| code.parse().ok()).unwrap_or(0))
}

fn obey(line: &str, sockets: &mut Sockets) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let done = |result: Result<()>| result.map(|()| String::new());
    match words.as_slice() {
        ["burn", ms] => {
            burn(Duration::from_millis(ms.parse()?));
            Ok(String::new())
        }
        ["swarm", threads, ms] => {
            swarm(threads.parse()?, Duration::from_millis(ms.parse()?));
            Ok(String::new())
        }
        ["mixed", ms] => {
            mixed(Duration::from_millis(ms.parse()?));
            Ok(String::new())
        }
        ["idle", ms] => {
            idle(Duration::from_millis(ms.parse()?));
            Ok(String::new())
        }
        ["doze", rounds] => Ok(doze(rounds.parse()?).as_nanos().to_string()),
        ["pingpong", rounds] => Ok(pingpong(rounds.parse()?)?.as_nanos().to_string()),
        ["spawn", count] => spawn(count.parse()?),
        ["exit", code] => std::process::exit(code.parse()?),
        ["abort"] => short_life("abort", &[]),
        ["stream", file] => done(stream(Path::new(file))),
        ["allocate", bytes] => {
            allocate(bytes.parse()?);
            Ok(String::new())
        }
        ["udp", count, bytes] => done(udp(count.parse()?, bytes.parse()?)),
        ["tcp", count, bytes] => Ok(tcp(count.parse()?, bytes.parse()?)?.as_nanos().to_string()),
        ["listen"] => {
            let listener = sockets.listener.insert(TcpListener::bind("127.0.0.1:0")?);
            Ok(listener.local_addr()?.port().to_string())
        }
        ["take", count] => done(
            accept(sockets.listener.as_ref().context("nothing listens")?, count.parse()?).map_err(Into::into),
        ),
        ["call", port, count, bytes] => {
            let address = SocketAddr::from(([127, 0, 0, 1], port.parse()?));
            Ok(call(address, count.parse()?, bytes.parse()?)?.as_nanos().to_string())
        }
        ["lose"] => {
            sockets.lossy = Some(Lossy::begin()?);
            Ok(String::new())
        }
        ["found"] => done(sockets.lossy.take().context("no data was lost")?.end()),
        _ => bail!("unknown command: {line}"),
    }
}

fn burn(time: Duration) {
    let end = Instant::now() + time;
    let mut value = 1_u64;
    while Instant::now() < end {
        for _ in 0..1000 {
            value = std::hint::black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
}

/// Starts computing when all threads exist: each new one would have to wait for its turn.
fn swarm(threads: usize, time: Duration) {
    let all_are_there = std::sync::Barrier::new(threads);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                all_are_there.wait();
                burn(time);
            });
        }
    });
}

fn doze(rounds: usize) -> Duration {
    const NAP: Duration = Duration::from_millis(2);
    let nap = |_| {
        let began = Instant::now();
        std::thread::sleep(NAP);
        began.elapsed().saturating_sub(NAP)
    };
    let mut late: Vec<Duration> = (0..rounds).map(nap).collect();
    late.sort_unstable();
    late.get(rounds / 2).copied().unwrap_or_default()
}

fn mixed(time: Duration) {
    let end = Instant::now() + time;
    let turns = |work: u64, rest: u64| {
        while Instant::now() < end {
            burn(Duration::from_micros(work));
            std::thread::sleep(Duration::from_micros(rest));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| turns(3000, 2000));
        scope.spawn(|| turns(150, 100));
    });
}

/// Both threads are due at the same time, so on one CPU one of them waits for the other.
fn idle(time: Duration) {
    let start = Instant::now();
    let ticks = || {
        let mut next = start;
        while start.elapsed() < time {
            next += Duration::from_millis(100);
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            burn(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(ticks);
        scope.spawn(ticks);
    });
}

/// Each round has two switches and two wake-ups if both threads are on one CPU.
fn pingpong(rounds: u64) -> Result<Duration> {
    let (mut ping_out, mut ping_in) = std::io::pipe()?;
    let (mut pong_out, mut pong_in) = std::io::pipe()?;
    let other = std::thread::spawn(move || -> std::io::Result<()> {
        let mut byte = [0];
        for _ in 0..rounds {
            ping_out.read_exact(&mut byte)?;
            pong_in.write_all(&byte)?;
        }
        Ok(())
    });
    let start = Instant::now();
    let mut byte = [7];
    for _ in 0..rounds {
        ping_in.write_all(&byte)?;
        pong_out.read_exact(&mut byte)?;
    }
    let took = start.elapsed();
    other.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
    Ok(took)
}

/// Spawns processes: every fifth is killed by a signal, the others exit with different codes, some of them
/// with several threads.
fn spawn(count: u64) -> Result<String> {
    use std::os::unix::process::ExitStatusExt as _;
    let program = std::env::current_exe()?;
    // Arguments of a command that wraps this one, if it is not a program of its own.
    let lead: Vec<String> = std::env::args().skip(1).take_while(|word| !word.starts_with("--")).collect();
    let mut all = Vec::new();
    for index in 0..count {
        let mut command = Command::new(&program);
        command.args(&lead).stdin(Stdio::null()).stdout(Stdio::null());
        if index % 5 == 4 {
            command.arg("abort");
        } else {
            let how = if index % 5 == 2 { "crowd" } else { "exit" };
            command.args([how, &(index % 100).to_string()]);
        }
        let mut child = command.spawn()?;
        let pid = child.id();
        let status = child.wait()?;
        all.push(format!("{pid}:{}:{}", status.code().unwrap_or(0), status.signal().unwrap_or(0)));
    }
    Ok(all.join(" "))
}

fn stream(file: &Path) -> Result<()> {
    let mut file = std::fs::File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    let mut buffer = vec![0; 1 << 16];
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

fn allocate(bytes: usize) {
    let mut memory = vec![0_u8; bytes];
    for page in memory.chunks_mut(4096) {
        page[0] = 1;
    }
    std::hint::black_box(&memory);
}

fn udp(count: usize, bytes: usize) -> Result<()> {
    let receiver = UdpSocket::bind("127.0.0.1:0")?;
    let sender = UdpSocket::bind("127.0.0.1:0")?;
    sender.connect(receiver.local_addr()?)?;
    let mut buffer = vec![1; bytes];
    for _ in 0..count {
        sender.send(&buffer)?;
        receiver.recv(&mut buffer)?;
    }
    Ok(())
}

fn tcp(count: usize, bytes: usize) -> Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let server = std::thread::spawn(move || accept(&listener, count));
    let took = call(address, count, bytes)?;
    server.join().map_err(|_| anyhow::anyhow!("the server panicked"))??;
    Ok(took)
}

fn accept(listener: &TcpListener, count: usize) -> std::io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    for _ in 0..count {
        let (mut connection, _) = listener.accept()?;
        while connection.read(&mut buffer)? > 0 {}
    }
    Ok(())
}

fn call(address: SocketAddr, count: usize, bytes: usize) -> Result<Duration> {
    let start = Instant::now();
    let buffer = vec![1; 1 << 16];
    for _ in 0..count {
        let mut connection = TcpStream::connect(address)?;
        let mut left = bytes;
        while left > 0 {
            let part = left.min(buffer.len());
            connection.write_all(&buffer[..part])?;
            left -= part;
        }
        // Waits until the server has read the data: otherwise, on one CPU, the accept queue fills up and TCP
        // waits for seconds.
        connection.shutdown(Shutdown::Write)?;
        connection.read_exact(&mut [0]).err().context("the server closes without data")?;
    }
    Ok(start.elapsed())
}

/// Sockets that stay open between commands.
#[derive(Default)]
struct Sockets {
    listener: Option<TcpListener>,
    lossy: Option<Lossy>,
}

/// Connection on which one byte is in flight and does not arrive.
struct Lossy {
    _sender: TcpStream,
    receiver: TcpStream,
}

impl Lossy {
    fn begin() -> Result<Lossy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut sender = TcpStream::connect(listener.local_addr()?)?;
        let (receiver, _) = listener.accept()?;
        // The kernel runs a socket's filter before TCP sees the packet: a packet cut to zero bytes is treated
        // as never received (net/ipv4/tcp_ipv4.c, tcp_filter).
        let keep_nothing = socket2::SockFilter::new(BPF_RET_K, 0, 0, 0);
        socket2::SockRef::from(&receiver)
            .attach_filter(&[keep_nothing])
            .context("cannot attach a socket filter")?;
        sender.write_all(&[1])?;
        Ok(Lossy { _sender: sender, receiver })
    }

    fn end(mut self) -> Result<()> {
        socket2::SockRef::from(&self.receiver).detach_filter()?;
        Ok(self.receiver.read_exact(&mut [0])?)
    }
}

/// `BPF_RET | BPF_K` of linux/filter.h.
const BPF_RET_K: u16 = 0x06;
