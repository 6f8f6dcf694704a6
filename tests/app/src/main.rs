//! Program in the test pods. Linked statically, so that it runs in an image without other files.
//!
//! - `testapp pause` waits until it is stopped: the program of the sandbox image. `pause -v` prints a
//!   version.
//! - `testapp serve [--tcp PORT] [--http PORT] [--control PORT]` listens on the TCP port (accepts, then
//!   closes), on the HTTP port (answers every path with the current health), and executes commands on the
//!   control port: one line each, one line of answer.
//! - `testapp probe ok | fail` is a probe by command; `testapp probe hang | become | leave WORD` are probes
//!   that never end: the first starts a child process and waits for it, the second becomes the first (exec),
//!   the third starts a process without a parent, in its own session.
//! - `testapp script FILE …` is the interpreter of scripts with `#!/bin/testapp script`: the words after the
//!   file's name are its arguments.
//! - `testapp report` prints its own identity: see `report`.
//! - `testapp hurt …` attacks the node as far as permitted: see `hurt`.
//! - `testapp latency …` measures its own answers under open-loop load, `testapp hog …` is a noisy neighbour:
//!   see `latency`.
//!
//! Commands: `close PORT` and `open PORT` end and begin to listen, `child PORT` starts a process that
//! listens, `health CODE` sets the HTTP status, `hold MIB` allocates more memory and keeps it, `exit CODE`
//! ends the program, `ping` has no effect. The answer is `ok NANOSECONDS`, CLOCK_MONOTONIC right before the
//! system call of the command, or `error TEXT`.
//!
//! SIGTERM ends the program immediately; a container's first process must install a handler for that.

mod hurt;
mod latency;
mod report;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

fn main() -> ExitCode {
    let stop = Arc::new(AtomicBool::new(true));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        if let Err(error) = signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::clone(&stop)) {
            eprintln!("testapp: cannot handle signal {signal}: {error}");
            return ExitCode::FAILURE;
        }
    }
    // Some arguments are deliberately invalid UTF-8.
    let words = std::env::args_os().skip(1);
    let arguments: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    if arguments.first().is_some_and(|word| word == "hurt") {
        stop.store(false, Ordering::Relaxed);
    }
    let done = match arguments.first().map(String::as_str) {
        // kubeadm checks that a Job of the sandbox image ends.
        Some("pause") if arguments.get(1).is_some_and(|word| word == "-v") => {
            println!("pause.c {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Some("pause") => forever(),
        Some("serve") => serve(&arguments[1..]),
        Some("probe") => probe(&arguments[1..]),
        Some("script") => probe(arguments.get(2..).unwrap_or_default()),
        Some("hurt") => hurt::run(&arguments[1..]),
        Some("report") => report::run(),
        Some("latency") => latency::run(&arguments[1..]),
        Some("hog") => latency::hog(&arguments[1..]),
        _ => Err("usage: testapp pause | probe ok|fail|hang WORD | script FILE … | hurt … | latency … | hog … | serve [--tcp PORT] [--http PORT] \
                  [--control PORT]"
            .to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("testapp: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a probe by command: succeeds, fails, or starts another process and hangs.
fn probe(arguments: &[String]) -> Result<(), String> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["ok"] => Ok(()),
        ["fail"] => {
            println!("it went wrong");
            std::process::exit(3);
        }
        ["hang", word] => wait_for("child", word),
        ["become", word] => Err(own()?.args(["probe", "hang", word]).exec().to_string()),
        ["leave", word] => {
            wait_for("starter", word)?;
            forever()
        }
        // The starter exits after the spawn, so the leaver has no parent.
        ["starter", word] => {
            own()?.args(["probe", "leaver", word]).spawn().map(drop).map_err(|error| error.to_string())
        }
        ["leaver", _] => {
            rustix::process::setsid().map_err(|error| error.to_string())?;
            forever()
        }
        ["child", _] => forever(),
        _ => Err("usage: testapp probe ok | fail | hang WORD | become WORD | leave WORD".to_owned()),
    }
}

/// Runs this program as another kind of probe, and waits for its end.
fn wait_for(kind: &str, word: &str) -> Result<(), String> {
    let mut child = own()?.args(["probe", kind, word]).spawn().map_err(|error| error.to_string())?;
    child.wait().map(drop).map_err(|error| error.to_string())
}

/// Returns a command for this program.
fn own() -> Result<Command, String> {
    std::env::current_exe().map(Command::new).map_err(|error| error.to_string())
}

fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

/// Open listeners by port.
#[derive(Default)]
struct App {
    open: Mutex<HashMap<u16, Listening>>,
    health: AtomicU16,
    held: Mutex<Vec<Vec<u8>>>,
}

/// Thread of a listener, closed by a byte on `wake`; it returns the time right before the close.
struct Listening {
    wake: UnixStream,
    thread: std::thread::JoinHandle<u64>,
}

fn serve(arguments: &[String]) -> Result<(), String> {
    let app = Arc::new(App { health: AtomicU16::new(200), ..App::default() });
    let mut control = None;
    for pair in arguments.chunks(2) {
        let [option, port] = pair else { return Err(format!("{} needs a port", pair[0])) };
        let port: u16 = port.parse().map_err(|_| format!("{option} {port}: not a port"))?;
        match option.as_str() {
            "--tcp" => app.listen(port, hang_up).map(drop)?,
            "--http" => {
                let health = Arc::clone(&app);
                app.listen(port, move |stream| answer(stream, health.health.load(Ordering::Relaxed)))
                    .map(drop)?;
            }
            "--control" => control = Some(port),
            _ => return Err(format!("unknown option {option}")),
        }
    }
    println!("serving {}", arguments.join(" "));
    let Some(port) = control else { forever() };
    let listener = bind(port)?;
    for stream in listener.incoming() {
        match stream {
            Ok(stream) => {
                let app = Arc::clone(&app);
                std::thread::spawn(move || app.obey(&stream));
            }
            Err(error) => eprintln!("testapp: accept on port {port}: {error}"),
        }
    }
    Ok(())
}

fn bind(port: u16) -> Result<TcpListener, String> {
    // One dual-stack listener serves IPv4 and IPv6; without IPv6, only IPv4.
    TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))
        .or_else(|_| TcpListener::bind(("0.0.0.0", port)))
        .map_err(|error| format!("cannot listen on port {port}: {error}"))
}

impl App {
    /// Opens a listener and a thread that passes each connection to `serve`. Returns the time right before.
    fn listen(&self, port: u16, serve: impl Fn(TcpStream) + Send + 'static) -> Result<u64, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.contains_key(&port) {
            return Err(format!("port {port} is already open"));
        }
        let (wake, woken) = UnixStream::pair().map_err(|error| error.to_string())?;
        let at = now();
        let socket = bind(port)?;
        // A connection may be closed between poll and accept, which must not block the thread.
        socket.set_nonblocking(true).map_err(|error| error.to_string())?;
        let thread = std::thread::spawn(move || accept(socket, &woken, serve));
        open.insert(port, Listening { wake, thread });
        Ok(at)
    }

    /// Stops listening on `port`. Returns the time right before.
    fn close(&self, port: u16) -> Result<u64, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let mut listening = open.remove(&port).ok_or(format!("port {port} is not open"))?;
        listening.wake.write_all(b"x").map_err(|error| error.to_string())?;
        listening.thread.join().map_err(|_| format!("the listener on port {port} panicked"))
    }

    /// Executes the commands of one connection until it ends.
    fn obey(&self, stream: &TcpStream) {
        let _ = stream.set_nodelay(true); // only for speed
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let answer = match self.command(&line) {
                Ok(at) => format!("ok {at}\n"),
                Err(message) => format!("error {message}\n"),
            };
            let mut writer = stream;
            if writer.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }

    fn command(&self, line: &str) -> Result<u64, String> {
        let mut words = line.split_whitespace();
        let command = words.next().unwrap_or_default();
        let argument =
            words.next().map(|word| word.parse::<u16>().map_err(|_| format!("{word}: not a number")));
        match (command, argument.transpose()?) {
            ("ping", None) => Ok(now()),
            ("open", Some(port)) => self.listen(port, hang_up),
            ("close", Some(port)) => self.close(port),
            ("child", Some(port)) => {
                let at = now();
                let words = ["serve", "--tcp", &port.to_string()];
                let mut child = own()?.args(words).spawn().map_err(|error| error.to_string())?;
                std::thread::spawn(move || child.wait());
                Ok(at)
            }
            ("health", Some(code)) => {
                let at = now();
                self.health.store(code, Ordering::Relaxed);
                Ok(at)
            }
            ("hold", Some(mib)) => {
                let at = now();
                // Nonzero bytes: every page must be allocated.
                let memory = vec![1; usize::from(mib) << 20];
                self.held.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
                Ok(at)
            }
            ("exit", Some(code)) => std::process::exit(i32::from(code)),
            _ => Err(format!("unknown command: {line}")),
        }
    }
}

/// Passes each connection to `serve` until `woken` is readable, then closes the listener. Returns the time
/// right before the close.
fn accept(socket: TcpListener, woken: &UnixStream, serve: impl Fn(TcpStream)) -> u64 {
    loop {
        let mut waiting = [PollFd::new(&socket, PollFlags::IN), PollFd::new(woken, PollFlags::IN)];
        let polled = poll(&mut waiting, None);
        if matches!(polled, Err(error) if error != rustix::io::Errno::INTR)
            || !waiting[1].revents().is_empty()
        {
            break;
        }
        if let Ok((stream, _)) = socket.accept()
            && stream.set_nonblocking(false).is_ok()
        {
            serve(stream);
        }
    }
    let at = now();
    drop(socket);
    at
}

fn hang_up(stream: TcpStream) {
    drop(stream);
}

/// Answers one HTTP request, for any path.
fn answer(mut stream: TcpStream, status: u16) {
    let mut request = [0; 4096];
    let mut length = 0;
    while length < request.len() && !request[..length].windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut request[length..]) {
            Ok(0) | Err(_) => return,
            Ok(read) => length += read,
        }
    }
    let text = format!("HTTP/1.1 {status} Status\r\nContent-Length: 3\r\nConnection: close\r\n\r\nhi\n");
    if stream.write_all(text.as_bytes()).is_ok() {
        let _ = stream.shutdown(Shutdown::Both); // the client may have disconnected
    }
}

/// Returns CLOCK_MONOTONIC in nanoseconds, the clock of the eBPF programs' timestamps.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}
