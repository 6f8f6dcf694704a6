//! Process that listens on command: kernel tests put it into its own cgroup and network namespace, and kill
//! it. The process reads one command per line from standard input, answers each with one line, and ends at
//! the end of its input.
//!
//! `listener [--cgroup DIR] [--netns FILE] [--inherited FD]`
//! - `listen ADDRESS:PORT [reuseport] [reuseaddr] [v6only] [defer] [device=NAME] [backlog=N]` → `ok ID PORT
//!   COOKIE` (`defer` sets `TCP_DEFER_ACCEPT`, `device` sets `SO_BINDTODEVICE`)
//! - `listen-unbound` → `ok ID PORT COOKIE` (listens without bind: the kernel chooses the port)
//! - `bind ADDRESS:PORT [reuseaddr]` → `ok ID PORT COOKIE` (does not listen yet)
//! - `listen-bound ID` → `ok ID PORT COOKIE`
//! - `close ID`, `shutdown ID` → `ok`
//! - `connect ADDRESS:PORT` → `ok` after a connection was established and closed
//! - `hold ADDRESS:PORT` → `ok ID PORT COOKIE` of a connection that stays open
//! - `try ADDRESS:PORT` → `ok ID PORT COOKIE` of a connection attempt that may never succeed
//! - `send ID` → `ok` after one byte was sent on a connection
//! - `accept ID` → `ok` after one connection was accepted and closed; `serve ID` → `ok`, and every later
//!   connection is accepted and closed
//! - `fd ID` → `ok FD`; `take PID FD` → `ok ID PORT COOKIE` of another process' socket, which both processes
//!   then hold
//! - `exec ID` → `ok ID PORT COOKIE`, after the program has executed itself with only that socket

use anyhow::{Context as _, Result, bail};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::collections::BTreeMap;
use std::io::{BufRead as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;

fn main() -> Result<()> {
    let mut sockets = Sockets::default();
    let mut arguments = std::env::args().skip(1);
    while let (Some(name), value) = (arguments.next(), arguments.next()) {
        let value = value.with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--cgroup" => std::fs::write(format!("{value}/cgroup.procs"), std::process::id().to_string())
                .with_context(|| format!("cannot join the cgroup {value}"))?,
            "--netns" => {
                let file = std::fs::File::open(&value).with_context(|| format!("cannot open {value}"))?;
                let kind = rustix::thread::LinkNameSpaceType::Network;
                rustix::thread::move_into_link_name_space(file.as_fd(), Some(kind))?;
            }
            "--inherited" => {
                // SAFETY: the starting process left the descriptor open for this one, and nothing else here
                // owns it.
                let socket = unsafe { OwnedFd::from_raw_fd(value.parse()?) };
                println!("ok{}", sockets.keep(socket)?);
            }
            _ => bail!("unknown argument {name}"),
        }
    }
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        match sockets.command(&line?) {
            Ok(answer) => writeln!(out, "ok{answer}")?,
            Err(error) => writeln!(out, "error {error:#}")?,
        }
        out.flush()?;
    }
    Ok(())
}

#[derive(Default)]
struct Sockets {
    open: BTreeMap<u32, OwnedFd>,
    next: u32,
}

impl Sockets {
    fn command(&mut self, line: &str) -> Result<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["listen", address, options @ ..] => {
                let backlog = options.iter().find_map(|option| option.strip_prefix("backlog="));
                let backlog = backlog.map_or(Ok(16), str::parse)?;
                let options: Vec<&str> =
                    options.iter().copied().filter(|option| !option.starts_with("backlog=")).collect();
                let socket = bound(address.parse()?, &options)?;
                rustix::net::listen(&socket, backlog)?;
                self.keep(socket)
            }
            ["listen-unbound"] => {
                let socket = tcp(AddressFamily::INET)?;
                rustix::net::listen(&socket, 16)?;
                self.keep(socket)
            }
            ["bind", address, options @ ..] => {
                let socket = bound(address.parse()?, options)?;
                self.keep(socket)
            }
            ["listen-bound", id] => {
                let id: u32 = id.parse()?;
                let socket = self.open.get(&id).context("unknown socket")?;
                rustix::net::listen(socket, 16)?;
                describe(id, socket)
            }
            ["close", id] => {
                self.open.remove(&id.parse()?).context("unknown socket")?;
                Ok(String::new())
            }
            ["shutdown", id] => {
                let socket = self.open.get(&id.parse()?).context("unknown socket")?;
                rustix::net::shutdown(socket, rustix::net::Shutdown::Read)?;
                Ok(String::new())
            }
            ["connect", address] => {
                drop(TcpStream::connect(address.parse::<SocketAddr>()?)?);
                Ok(String::new())
            }
            ["hold", address] => {
                let stream = TcpStream::connect(address.parse::<SocketAddr>()?)?;
                self.keep(stream.into())
            }
            ["try", address] => {
                let stream = tcp(AddressFamily::INET)?;
                rustix::io::ioctl_fionbio(&stream, true)?;
                // Established in the background, or never.
                let _ = rustix::net::connect(&stream, &address.parse::<SocketAddr>()?);
                self.keep(stream)
            }
            ["send", id] => {
                let socket = self.open.get(&id.parse()?).context("unknown socket")?;
                rustix::net::send(socket, b"x", rustix::net::SendFlags::empty())?;
                Ok(String::new())
            }
            ["accept", id] => {
                let socket = self.open.get(&id.parse()?).context("unknown socket")?;
                drop(rustix::net::accept(socket)?);
                Ok(String::new())
            }
            ["serve", id] => {
                let socket = self.open.get(&id.parse()?).context("unknown socket")?.try_clone()?;
                // Ends with the process: a blocked accept keeps the socket open.
                std::thread::spawn(move || while rustix::net::accept(&socket).is_ok() {});
                Ok(String::new())
            }
            ["fd", id] => {
                let socket = self.open.get(&id.parse()?).context("unknown socket")?;
                Ok(format!(" {}", socket.as_raw_fd()))
            }
            ["take", pid, fd] => {
                let pid = rustix::process::Pid::from_raw(pid.parse()?).context("no pid")?;
                let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
                let flags = rustix::process::PidfdGetfdFlags::empty();
                self.keep(rustix::process::pidfd_getfd(process, fd.parse()?, flags)?)
            }
            ["exec", id] => {
                let socket = self.open.remove(&id.parse()?).context("unknown socket")?;
                rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::empty())?;
                let fd = socket.into_raw_fd().to_string();
                Err(std::process::Command::new(std::env::current_exe()?)
                    .args(["--inherited", &fd])
                    .exec()
                    .into())
            }
            _ => bail!("unknown command {line:?}"),
        }
    }

    fn keep(&mut self, socket: OwnedFd) -> Result<String> {
        let id = self.next;
        let answer = describe(id, &socket)?;
        self.next += 1;
        self.open.insert(id, socket);
        Ok(answer)
    }
}

fn describe(id: u32, socket: &OwnedFd) -> Result<String> {
    let address = SocketAddr::try_from(rustix::net::getsockname(socket)?)?;
    Ok(format!(" {id} {} {}", address.port(), sockopt::socket_cookie(socket)?))
}

fn tcp(family: AddressFamily) -> Result<OwnedFd> {
    Ok(rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

fn bound(address: SocketAddr, options: &[&str]) -> Result<OwnedFd> {
    let family = match address.ip() {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = tcp(family)?;
    for option in options {
        match *option {
            "reuseport" => sockopt::set_socket_reuseport(&socket, true)?,
            "reuseaddr" => sockopt::set_socket_reuseaddr(&socket, true)?,
            "v6only" => sockopt::set_ipv6_v6only(&socket, true)?,
            // Time to wait for data, in seconds: longer than any test.
            "defer" => set(&socket, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, &3600_i32.to_ne_bytes())?,
            _ => match option.strip_prefix("device=") {
                Some(device) => set(&socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device.as_bytes())?,
                None => bail!("unknown option {option}"),
            },
        }
    }
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

/// Sets an option that rustix does not provide.
fn set(socket: &OwnedFd, level: i32, option: i32, value: &[u8]) -> Result<()> {
    let length = libc::socklen_t::try_from(value.len())?;
    // SAFETY: the descriptor is open, and `value` has `length` bytes.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value.as_ptr().cast(), length) };
    if set != 0 {
        return Err(std::io::Error::last_os_error()).context("cannot set a socket option");
    }
    Ok(())
}
