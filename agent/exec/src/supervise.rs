//! The process of a single request: it starts the command, keeps its deadline, reads its output, and replies.
//! This copy of the server ends with the reply, so the server itself never holds a container's data.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, PipeReader, Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};

use beelet_base::{
    clock::After as _,
    process::{self, Moment},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{
        Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, kill_process, pidfd_open, pidfd_send_signal,
        waitpid,
    },
};
use serde_json::Value;

use crate::{
    enter::{self, Entry, Message},
    places::{Hierarchies, Places},
    plan::{LIMITS, Limit, Plan},
    seccomp,
    sys::{self, Fork, SingleThread},
    wire::{self, MAX_OUTPUT, MAX_REQUEST, Reply, Request},
};

/// Maximum time for the agent to send its request and to read the reply.
const MESSAGE_WITHIN: Duration = Duration::from_secs(10);
/// Maximum timeout of a command.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Start of the name of containerd's shims, which start the containers.
const SHIM: &str = "containerd-shim";

/// Signals that a Go program (runc) leaves ignored if they were at its start: SIGHUP, SIGINT and 32 (Go:
/// runtime/signal_unix.go, `sigInstallGoHandler`).
const KEPT_BY_GO: u64 = 1 << (libc::SIGHUP - 1) | 1 << (libc::SIGINT - 1) | 1 << 31;

/// Serves the request of a connection.
pub(crate) fn serve(
    single: SingleThread,
    mut agent: UnixStream,
    hierarchies: &Hierarchies,
) -> io::Result<()> {
    agent.set_read_timeout(Some(MESSAGE_WITHIN))?;
    agent.set_write_timeout(Some(MESSAGE_WITHIN))?;
    let request = read_request(&mut agent)?;
    let reply = run(single, request, &agent, hierarchies).unwrap_or_else(|reply| reply);
    let message = wire::encode(&reply).map_err(io::Error::other)?;
    agent.write_all(&message)
}

fn read_request(agent: &mut UnixStream) -> io::Result<Request> {
    let mut head = [0; 4];
    agent.read_exact(&mut head)?;
    let length =
        wire::length(head, MAX_REQUEST).ok_or_else(|| io::Error::other("the request is too long"))?;
    let mut body = vec![0; length];
    agent.read_exact(&mut body)?;
    serde_json::from_slice(&body).map_err(io::Error::other)
}

/// Runs the command of a request. Both values of the result are replies.
fn run(
    single: SingleThread,
    request: Request,
    agent: &UnixStream,
    hierarchies: &Hierarchies,
) -> Result<Reply, Reply> {
    let deadline = Instant::now().after(Duration::from_millis(request.within_ms).min(LONGEST));
    let first = first_process(&request)?;
    let runtime = |what: &str, error: io::Error| Reply::UseRuntime(format!("cannot {what}: {error}"));
    let inherited = Inherited::of(request.pid).map_err(|error| runtime("read the shim's limits", error))?;
    let filters = seccomp::compile(&request.plan.seccomp);
    let filters = filters.map_err(|error| Reply::UseRuntime(error.to_string()))?;
    let places = Places::of(request.pid, &request.container, hierarchies);
    let places = places.map_err(|error| runtime("find the container's cgroups", error))?;
    let (command, entry) = match prepare(request, first, &inherited, filters, &places) {
        Ok(prepared) => prepared,
        Err(error) => {
            places.leaf.release();
            return Err(runtime("prepare the command", error));
        }
    };
    let leaf = places.leaf.open().map_err(|error| runtime("open the command's cgroup", error));
    let forked = leaf.and_then(|leaf| {
        // In version 2 the container's limit of processes applies to the fork.
        let cannot = |error| Reply::NotStarted(format!("cannot start a process in the container: {error}"));
        sys::fork(single, leaf.as_ref().map(|leaf| leaf.as_fd())).map_err(cannot)
    });
    let reply = match forked {
        Ok(Fork::Child) => enter::run(single, &entry),
        Ok(Fork::Parent(entrant)) => {
            // The write ends of the pipes are the entrant's.
            let first = entry.into_first();
            command.watch(entrant, &first, agent, deadline)
        }
        Err(reply) => reply,
    };
    if !matches!(reply, Reply::Ended { .. }) {
        places.leaf.kill();
    }
    places.leaf.release();
    Ok(reply)
}

/// Opens the container's first process, if it is still the one that the agent has seen.
fn first_process(request: &Request) -> Result<OwnedFd, Reply> {
    let pid = i32::try_from(request.pid).ok().and_then(Pid::from_raw).ok_or(Reply::Gone)?;
    let first = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| Reply::Gone)?;
    // Read after the process was opened: if the start time is right, the descriptor is of that process.
    let found = process::read(Path::new("/proc"), request.pid);
    match found {
        Some(found) if found.started == Moment(request.started) => Ok(first),
        _ => Err(Reply::Gone),
    }
}

/// The part of a command's identity that does not come from the spec: runc inherits it from the shim, and so
/// do the commands that runc starts.
#[derive(Debug)]
struct Inherited {
    limits: Vec<Limit>,
    umask: u32,
    /// Ignored signals, as a mask.
    ignored: u64,
}

impl Inherited {
    /// Reads the limits and the umask of the parent of a container's first process.
    fn of(first: u32) -> io::Result<Self> {
        let parent = process::read(Path::new("/proc"), first).map(|found| found.parent);
        let parent = parent.ok_or_else(|| io::Error::other("the container has ended"))?;
        let file = |name: &str| fs::read(format!("/proc/{parent}/{name}"));
        let text = |name: &str| Ok::<_, io::Error>(String::from_utf8_lossy(&file(name)?).into_owned());
        let name = text("comm")?;
        if !name.starts_with(SHIM) {
            return Err(io::Error::other(format!(
                "the container's parent is `{}`, not its shim",
                name.trim()
            )));
        }
        let status = text("status")?;
        let field = |name: &str, radix| {
            let value = status.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(value.trim(), radix).ok()
        };
        let umask = field("Umask:", 8).and_then(|umask| u32::try_from(umask).ok());
        let umask = umask.ok_or_else(|| io::Error::other("the shim has no umask"))?;
        let ignored = field("SigIgn:", 16).unwrap_or_default() & KEPT_BY_GO;
        Ok(Self { limits: parse_limits(&text("limits")?), umask, ignored })
    }
}

/// Parses `/proc/PID/limits`.
fn parse_limits(text: &str) -> Vec<Limit> {
    let value = |word: Option<&str>| match word? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    let of = |(place, name): (usize, &str)| {
        let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
        let mut words = rest.split_whitespace();
        let (soft, hard) = (value(words.next())?, value(words.next())?);
        Some(Limit { resource: u8::try_from(place).ok()?, soft, hard })
    };
    LIMITS.iter().map(|(_, name)| *name).enumerate().filter_map(of).collect()
}

/// Opens the streams of a command, and gathers all that the entrant needs.
fn prepare(
    request: Request,
    first: OwnedFd,
    inherited: &Inherited,
    filters: Vec<seccompiler::BpfProgram>,
    places: &Places,
) -> io::Result<(Command, Entry)> {
    let Request { container, plan, command, .. } = request;
    let (stdout, stdout_in) = io::pipe()?;
    let (stderr, stderr_in) = io::pipe()?;
    let (status, status_in) = io::pipe()?;
    let null = File::options().read(true).open("/dev/null")?;
    // Limits of the spec replace the inherited ones.
    let of_spec =
        |limit: &Limit| plan.limits.iter().rev().find(|own| own.resource == limit.resource).copied();
    let limits = inherited.limits.iter().map(|limit| of_spec(limit).unwrap_or(*limit)).collect();
    let entry = Entry {
        first,
        joined: places.joined.clone(),
        keyring: CString::new(format!("_ses.{container}")).map_err(io::Error::other)?,
        limits,
        umask: plan.umask.unwrap_or(inherited.umask),
        ignored: inherited.ignored,
        filters,
        command,
        streams: [null.into(), stdout_in.into(), stderr_in.into()],
        status: status_in.into(),
        plan: Plan { seccomp: Value::Null, ..plan },
    };
    Ok((Command { outputs: [Output::new(stdout), Output::new(stderr)], status: Output::new(status) }, entry))
}

/// The read end of a pipe, and the start of its content.
#[derive(Debug)]
struct Output {
    pipe: Option<PipeReader>,
    kept: Vec<u8>,
}

impl Output {
    fn new(pipe: PipeReader) -> Self {
        Self { pipe: Some(pipe), kept: Vec::new() }
    }

    /// Reads what the pipe has, and keeps the first [`MAX_OUTPUT`] bytes. The pipe must be readable.
    fn read(&mut self) {
        let mut buffer = [0; 64 << 10];
        match self.pipe.as_mut().map(|pipe| pipe.read(&mut buffer)) {
            Some(Ok(count)) if count > 0 => {
                let room = MAX_OUTPUT.saturating_sub(self.kept.len()).min(count);
                self.kept.extend_from_slice(buffer.get(..room).unwrap_or_default());
            }
            Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => self.pipe = None,
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }
}

/// A command on its way, from the supervisor's side.
#[derive(Debug)]
struct Command {
    outputs: [Output; 2],
    status: Output,
}

/// A child process.
#[derive(Debug)]
struct Child {
    pid: Pid,
    process: OwnedFd,
}

impl Command {
    /// Waits until the command has ended and its output is complete, as the runtime does, but not beyond
    /// `deadline`, and not without the agent.
    fn watch(mut self, entrant: Pid, first: &OwnedFd, agent: &UnixStream, deadline: Instant) -> Reply {
        let mut child: Option<Child> = None;
        let mut ended: Option<WaitStatus> = None;
        loop {
            if self.status.pipe.is_none() && child.is_none() && ended.is_none() {
                match started(entrant, &self.status.kept, first) {
                    Ok(found) => child = Some(found),
                    Err(reply) => return reply,
                }
            }
            if let Some(status) = ended
                && self.outputs.iter().all(|output| output.pipe.is_none())
            {
                return self.reply(status);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(left) = Timespec::try_from(left) else { return Reply::TimedOut };
            if left == Timespec::default() {
                break;
            }
            match self.wait(child.as_ref(), agent, &left) {
                Ok(Event::ChildEnded) => {
                    let status = child.take().and_then(|child| reap(child.pid));
                    let Some(status) = status else {
                        return Reply::NotStarted("the command was lost".to_owned());
                    };
                    ended = Some(status);
                }
                // No client waits for the reply any more.
                Ok(Event::AgentGone) | Err(_) => break,
                Ok(Event::Read) => {}
            }
        }
        // The rest of the command's processes are in its cgroup. Without `child` and `ended`, the entrant
        // has not been reaped, and may not have joined that cgroup yet.
        match child {
            Some(child) => {
                let _ = pidfd_send_signal(&child.process, Signal::KILL);
                let _ = reap(child.pid);
            }
            None if ended.is_none() => {
                let _ = kill_process(entrant, Signal::KILL);
                let _ = reap(entrant);
            }
            None => {}
        }
        Reply::TimedOut
    }

    /// Waits for the next event, and reads the pipes.
    fn wait(&mut self, child: Option<&Child>, agent: &UnixStream, left: &Timespec) -> io::Result<Event> {
        let mut list = vec![PollFd::new(agent, PollFlags::RDHUP)];
        list.extend(child.map(|child| PollFd::new(&child.process, PollFlags::IN)));
        let before = list.len();
        let mut open: Vec<&mut Output> = Vec::new();
        let [stdout, stderr] = &mut self.outputs;
        open.extend([&mut self.status, stdout, stderr].into_iter().filter(|output| output.pipe.is_some()));
        list.extend(
            open.iter().flat_map(|output| output.pipe.as_ref()).map(|pipe| PollFd::new(pipe, PollFlags::IN)),
        );
        match poll(&mut list, Some(left)) {
            Err(rustix::io::Errno::INTR) => return Ok(Event::Read),
            polled => polled?,
        };
        let happened: Vec<bool> = list.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(list);
        for (output, _) in
            open.into_iter().zip(happened.iter().skip(before)).filter(|(_, happened)| **happened)
        {
            output.read();
        }
        Ok(match (happened.first(), child.is_some() && happened.get(1) == Some(&true)) {
            (Some(true), _) => Event::AgentGone,
            (_, true) => Event::ChildEnded,
            _ => Event::Read,
        })
    }

    fn reply(&self, status: WaitStatus) -> Reply {
        let signal = status.terminating_signal();
        if signal == Some(libc::SIGSYS) {
            return Reply::UseRuntime("a seccomp filter ended the command (SIGSYS)".to_owned());
        }
        let code = signal.map_or(status.exit_status(), |signal| Some(signal.saturating_add(128)));
        let [stdout, stderr] = &self.outputs;
        Reply::Ended { code: code.unwrap_or(-1), stdout: stdout.text(), stderr: stderr.text() }
    }
}

/// An event of a running command.
enum Event {
    /// The command's process has ended.
    ChildEnded,
    /// The agent has closed its connection.
    AgentGone,
    /// A pipe was read, or nothing happened.
    Read,
}

/// Waits for the end of a child, which has ended or was killed.
fn reap(pid: Pid) -> Option<WaitStatus> {
    loop {
        match waitpid(Some(pid), WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            found => return found.ok().flatten().map(|(_, status)| status),
        }
    }
}

/// Judges the entrant's and the command's messages once all have arrived: the pipe's last writer has ended or
/// executed the command.
fn started(entrant: Pid, messages: &[u8], first: &OwnedFd) -> Result<Child, Reply> {
    let end = reap(entrant);
    let (chunks, _) = messages.as_chunks::<{ Message::LENGTH }>();
    let messages: Vec<Message> = chunks.iter().filter_map(|chunk| Message::decode(*chunk)).collect();
    let child = messages.iter().find_map(|message| match message {
        // Only a child can be reaped, so another pid does no harm.
        Message::Started(pid) => Pid::from_raw(*pid),
        Message::Failed(..) => None,
    });
    let failed = messages.iter().find_map(|message| match message {
        Message::Failed(stage, errno) => Some((*stage, io::Error::from_raw_os_error(*errno))),
        Message::Started(_) => None,
    });
    let refused = match failed {
        Some((stage, error)) if stage.is_the_commands() => {
            Reply::NotStarted(format!("cannot {}: {error}", stage.text()))
        }
        Some((stage, error)) => Reply::UseRuntime(format!("cannot {}: {error}", stage.text())),
        None => match child.map(|pid| (pid, pidfd_open(pid, PidfdFlags::empty()))) {
            Some((pid, Ok(process))) => return Ok(Child { pid, process }),
            _ => Reply::UseRuntime(format!(
                "the entrant ended before the command's start (signal {:?})",
                end.and_then(WaitStatus::terminating_signal)
            )),
        },
    };
    if let Some(pid) = child {
        let _ = reap(pid);
    }
    // A container that ends at this moment can't be entered.
    let mut ended = [PollFd::new(first, PollFlags::IN)];
    match poll(&mut ended, Some(&Timespec::default())) {
        Ok(1) => Err(Reply::Gone),
        _ => Err(refused),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_parsed() {
        let text = "\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max open files            1024                 1048576              files
Max nice priority         0                    0
";
        let limit = |resource, soft, hard| Limit { resource, soft, hard };
        let expected = [limit(0, u64::MAX, u64::MAX), limit(7, 1024, 1_048_576), limit(13, 0, 0)];
        assert_eq!(parse_limits(text), expected);
        assert_eq!(parse_limits("Max open files many"), []);
    }

    #[test]
    fn output_beyond_the_limit_is_read_and_dropped() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut output = Output::new(reader);
        for _ in 0..3 {
            writer.write_all(&[b'x'; 8 << 10]).unwrap();
            output.read();
        }
        drop(writer);
        output.read();
        assert!(output.pipe.is_none());
        assert_eq!(output.text().len(), MAX_OUTPUT);
    }
}
