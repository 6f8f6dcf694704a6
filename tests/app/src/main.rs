//! The program inside the test pods. Linked statically, so that it runs in an image that holds nothing else.
//!
//! - `testapp pause` waits until it is told to stop: the sandbox image's program.
//! - `testapp serve [--tcp PORT] [--http PORT] [--control PORT]` listens on the TCP port (accepts, then
//!   closes), on the HTTP port (answers every path with the health it is told to have), and takes commands on
//!   the control port: one line each, one line of answer.
//! - `testapp probe ok | fail` is a probe by command; `testapp probe hang | become | leave WORD` are some
//!   that never end: the first starts a process of its own and waits for it, the second becomes the first
//!   (exec), the third starts one that has no parent and a session of its own.
//! - `testapp script FILE …` is what a script with `#!/bin/testapp script` is run by: the words behind the
//!   file's name are its own.
//! - `testapp hurt …` harms the node as far as it may: see `hurt`.
//! - `testapp latency …` measures its own answers under open-loop load, `testapp hog …` is a noisy neighbour:
//!   see `latency`.
//!
//! Commands: `close PORT` and `open PORT` end and begin to listen, `child PORT` starts a process that does,
//! `health CODE` sets the HTTP status, `hold MIB` takes so much more memory and keeps it, `exit CODE` ends
//! the program, `ping` does nothing. The answer is `ok NANOSECONDS`, CLOCK_MONOTONIC right before the system
//! call that the command is about, or `error TEXT`.
//!
//! It stops at once on SIGTERM, which a container's first process must ask for itself.

mod hurt;
mod latency;

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
            eprintln!("testapp: can't handle signal {signal}: {error}");
            return ExitCode::FAILURE;
        }
    }
    // Some are no text at all, on purpose.
    let words = std::env::args_os().skip(1);
    let arguments: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    if arguments.first().is_some_and(|word| word == "hurt") {
        stop.store(false, Ordering::Relaxed);
    }
    let done = match arguments.first().map(String::as_str) {
        Some("pause") => forever(),
        Some("serve") => serve(&arguments[1..]),
        Some("probe") => probe(&arguments[1..]),
        Some("script") => probe(arguments.get(2..).unwrap_or_default()),
        Some("hurt") => hurt::run(&arguments[1..]),
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

/// What a probe by command may do: succeed, fail, or start another process and hang.
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
        // Its child's parent is gone when this returns.
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

/// Runs this program as another kind of probe, until that ends.
fn wait_for(kind: &str, word: &str) -> Result<(), String> {
    let mut child = own()?.args(["probe", kind, word]).spawn().map_err(|error| error.to_string())?;
    child.wait().map(drop).map_err(|error| error.to_string())
}

/// This program.
fn own() -> Result<Command, String> {
    std::env::current_exe().map(Command::new).map_err(|error| error.to_string())
}

fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

/// The listeners that are open now, by port.
#[derive(Default)]
struct App {
    open: Mutex<HashMap<u16, Listening>>,
    health: AtomicU16,
    held: Mutex<Vec<Vec<u8>>>,
}

/// One listener's thread, told to close by a byte on `wake`; it hands back the time right before it closed.
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
    // One dual-stack listener serves IPv4 and IPv6; where IPv6 is off, IPv4 alone.
    TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))
        .or_else(|_| TcpListener::bind(("0.0.0.0", port)))
        .map_err(|error| format!("can't listen on port {port}: {error}"))
}

impl App {
    /// Opens a listener and a thread that hands each connection to `serve`. Hands back the time before it.
    fn listen(&self, port: u16, serve: impl Fn(TcpStream) + Send + 'static) -> Result<u64, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.contains_key(&port) {
            return Err(format!("port {port} is open already"));
        }
        let (wake, woken) = UnixStream::pair().map_err(|error| error.to_string())?;
        let at = now();
        let socket = bind(port)?;
        // A connection may be gone again between poll and accept, which must not hold the thread up.
        socket.set_nonblocking(true).map_err(|error| error.to_string())?;
        let thread = std::thread::spawn(move || accept(socket, &woken, serve));
        open.insert(port, Listening { wake, thread });
        Ok(at)
    }

    /// Stops listening on `port`. Hands back the time before it.
    fn close(&self, port: u16) -> Result<u64, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let mut listening = open.remove(&port).ok_or(format!("port {port} is not open"))?;
        listening.wake.write_all(b"x").map_err(|error| error.to_string())?;
        listening.thread.join().map_err(|_| format!("the listener on port {port} had failed"))
    }

    /// Obeys one connection's commands until it ends.
    fn obey(&self, stream: &TcpStream) {
        let _ = stream.set_nodelay(true); // only speed is at stake
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
                // Not zeroes: every page must really be there.
                let memory = vec![1; usize::from(mib) << 20];
                self.held.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
                Ok(at)
            }
            ("exit", Some(code)) => std::process::exit(i32::from(code)),
            _ => Err(format!("unknown command: {line}")),
        }
    }
}

/// Hands each connection to `serve` until `woken` has something to read, then closes the listener. Hands back
/// the time right before the close.
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

/// Answers one HTTP request, whatever it asks for.
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
        let _ = stream.shutdown(Shutdown::Both); // the client may have gone already
    }
}

/// CLOCK_MONOTONIC in nanoseconds: the clock that the kernel half stamps its events with.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}
