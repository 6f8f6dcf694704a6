//! Attacks of a container on its node, one per word; `tests/tests/e2e/hostile` runs them all.
//!
//! - `hurt names DIR` fills DIR with files, folders and links of every awkward name, and renames `DIR/sub`
//!   and `DIR/file`, if they exist, to names that are not UTF-8.
//! - `hurt processes` starts child processes with such names and arguments.
//! - `hurt cgroups` creates cgroups of such names below its own, with a process in each, and 50 nested
//!   cgroups.
//! - `hurt deep DIR LEVELS` creates nested folders; `hurt many DIR COUNT` creates empty files, most of them
//!   in one folder.
//! - `hurt plant KIND PATH …` replaces the file at each PATH: `fifo`, `socket`, `folder`, `link=TARGET`.
//! - `hurt bomb` starts itself again and again, recursively.
//! - `hurt listeners COUNT` opens and closes COUNT listeners, and then opens as many of them as possible at
//!   once.
//! - `hurt shout BYTES` writes one endless line: zeroes, halves of characters, escape sequences.
//! - `hurt probe never|daemon WORD` are probes that ignore signals, and that leave a daemon behind.
//! - `hurt watch FILE` looks at the processes that enter the container, tries to write to them and to their
//!   programs, and appends everything that it can find out to FILE, a line each.
//! - `hurt http [KIND PORT] …` answers HTTP badly: see [`http`].
//!
//! Commands that end by themselves exit with 0. SIGTERM does not end any of them.

mod watch;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, mkdirat, mknodat, openat, symlinkat, unlinkat};
use std::ffi::{CString, OsStr, OsString};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// File names that may break a reader.
const NAMES: [&[u8]; 14] = [
    b"\xff",
    b"\xff\xfe half \xc3",
    b"new\nline",
    b"\n",
    b"back\\slash\\040",
    b"spa ce\ttab",
    b" ",
    b"\x1b[31mred\x1b]0;title\x07",
    b"-rf",
    b"..\xff",
    b"...",
    b"(deleted)",
    b"quote\"'`$(x)",
    b"\xe2\x80\xaetxt.exe",
];
/// Most files per small folder of `many`.
const PER_FOLDER: usize = 1000;

pub(super) fn run(arguments: &[String]) -> Result<(), String> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["names", dir] => names(Path::new(dir)),
        ["processes"] => processes(),
        ["named", _, ..] => named(),
        ["cgroups"] => cgroups(),
        ["deep", dir, levels] => deep(Path::new(dir), number(levels)?),
        ["many", dir, count] => many(Path::new(dir), number(count)?),
        ["plant", kind, paths @ ..] => paths.iter().try_for_each(|path| plant(kind, Path::new(path))),
        ["bomb"] => bomb(),
        ["listeners", count] => listeners(number(count)?),
        ["shout", bytes] => shout(number(bytes)?),
        ["probe", "never", word] => never(word, true),
        ["probe", "child", word] => never(word, false),
        ["probe", "daemon", word] => {
            let nothing = || Stdio::null();
            let mut daemon = own()?;
            daemon.args(["hurt", "daemon", word]).stdin(nothing()).stdout(nothing()).stderr(nothing());
            daemon.spawn().map(drop).map_err(text)
        }
        ["daemon", _] => {
            rustix::process::setsid().map_err(text)?;
            super::forever()
        }
        ["watch", file] => watch::run(Path::new(file)),
        ["http", pairs @ ..] => http(pairs),
        _ => Err("usage: see the head of tests/app/src/hurt.rs".to_owned()),
    }
}

fn number(word: &str) -> Result<usize, String> {
    word.parse().map_err(|_| format!("{word}: not a number"))
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Returns a command for this program.
fn own() -> Result<Command, String> {
    super::own()
}

fn names(dir: &Path) -> Result<(), String> {
    for (index, name) in NAMES.iter().enumerate() {
        let path = dir.join(OsStr::from_bytes(name));
        let folder = dir.join(format!("folder{index}"));
        std::fs::create_dir_all(&folder).map_err(text)?;
        let inside = folder.join(OsStr::from_bytes(name));
        match index % 3 {
            0 => std::fs::write(&path, "x").and_then(|()| std::fs::create_dir_all(inside)).map_err(text)?,
            1 => std::fs::create_dir_all(&path)
                .and_then(|()| std::fs::write(path.join(OsStr::from_bytes(name)), "x"))
                .map_err(text)?,
            _ => {
                let _ = std::fs::remove_file(&path); // of an earlier run
                std::os::unix::fs::symlink(OsStr::from_bytes(name), &path).map_err(text)?;
            }
        }
    }
    for (from, to) in [("sub", &b"moved \xff\n\\040"[..]), ("file", b"moved file \xfe")] {
        let to = dir.join(OsStr::from_bytes(to));
        match std::fs::rename(dir.join(from), to) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(text(error)),
            _ => {}
        }
    }
    Ok(())
}

fn processes() -> Result<(), String> {
    for name in NAMES {
        own()?.args(["hurt", "named"]).arg(OsStr::from_bytes(name)).spawn().map_err(text)?;
    }
    call_it(b") R 1 1 \xff")?;
    // The parent must stay: the container ends with its first process.
    Err(exec_serve())
}

/// Becomes the listening program: a test asks its port whether the attack is complete.
fn exec_serve() -> String {
    use std::os::unix::process::CommandExt as _;
    match own() {
        Ok(mut own) => own.args(["serve", "--tcp", "8080", "--control", "9000"]).exec().to_string(),
        Err(error) => error,
    }
}

/// Renames this process to its last argument.
fn named() -> Result<(), String> {
    let name: OsString = std::env::args_os().next_back().unwrap_or_default();
    call_it(name.as_bytes())?;
    super::forever()
}

/// Sets the name of the process, of which the kernel keeps 15 bytes.
fn call_it(name: &[u8]) -> Result<(), String> {
    let name = CString::new(&name[..name.len().min(15)]).map_err(text)?;
    rustix::thread::set_name(&name).map_err(text)
}

fn cgroups() -> Result<(), String> {
    let root = Path::new("/sys/fs/cgroup");
    // In version 2 the folder is the cgroup itself; otherwise each hierarchy has a folder.
    let mut tops = vec![root.to_path_buf()];
    if !root.join("cgroup.procs").exists() {
        tops = std::fs::read_dir(root).map_err(text)?.flatten().map(|entry| entry.path()).collect();
        tops.retain(|top| top.join("cgroup.procs").exists() && !top.is_symlink());
    }
    let mut made = 0;
    for top in tops {
        // A newline is the only character that is invalid in a cgroup's name.
        for name in NAMES.iter().filter(|name| !name.contains(&b'\n') && name.len() > 1 || **name == b"\xff")
        {
            let cgroup = top.join(OsStr::from_bytes(name));
            if std::fs::create_dir(&cgroup).is_err() {
                continue; // read-only, or left from an earlier run
            }
            made += 1;
            let child = own()?.args(["hurt", "named", "inside"]).spawn().map_err(text)?;
            let _ = std::fs::write(cgroup.join("cgroup.procs"), child.id().to_string()); // fails if the cgroup needs a cpuset
        }
        let mut deep = top.join("deep");
        for _ in 0..50 {
            if std::fs::create_dir(&deep).is_err() {
                break;
            }
            made += 1;
            deep.push("deep");
        }
    }
    println!("created {made} cgroups");
    if made == 0 { Err("cannot create any cgroup".to_owned()) } else { Err(exec_serve()) }
}

fn deep(dir: &Path, levels: usize) -> Result<(), String> {
    std::env::set_current_dir(dir).map_err(text)?;
    for _ in 0..levels {
        match mkdirat(CWD, "d", Mode::from_raw_mode(0o777)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(text(error)),
        }
        // By its name alone: every full path would be too long.
        std::env::set_current_dir("d").map_err(text)?;
    }
    std::fs::write("bottom", "x").map_err(text)
}

fn many(dir: &Path, count: usize) -> Result<(), String> {
    let large = count / 4 * 3;
    let fill = |name: &str, files: usize| -> Result<(), String> {
        let path = dir.join(name);
        std::fs::create_dir_all(&path).map_err(text)?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(CWD, &path, flags, Mode::empty()).map_err(text)?;
        for number in 0..files {
            let mode = Mode::from_raw_mode(0o600);
            match mknodat(&folder, format!("file{number}"), FileType::RegularFile, mode, 0) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(text(error)),
            }
        }
        Ok(())
    };
    fill("large", large)?;
    let mut left = count - large;
    for number in 0.. {
        if left == 0 {
            break;
        }
        fill(&format!("small{number}"), left.min(PER_FOLDER))?;
        left = left.saturating_sub(PER_FOLDER);
    }
    Ok(())
}

fn plant(kind: &str, path: &Path) -> Result<(), String> {
    let failed = |error: rustix::io::Errno| format!("{}: {error}", path.display());
    match unlinkat(CWD, path, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(rustix::io::Errno::ISDIR) => std::fs::remove_dir_all(path).map_err(text)?,
        Err(error) => return Err(failed(error)),
    }
    let mode = Mode::from_raw_mode(0o666);
    match (kind, kind.strip_prefix("link=")) {
        (_, Some(target)) => symlinkat(target, CWD, path).map_err(failed),
        ("fifo", _) => mknodat(CWD, path, FileType::Fifo, mode, 0).map_err(failed),
        // A socket without a listener: only the file matters.
        ("socket", _) => mknodat(CWD, path, FileType::Socket, mode, 0).map_err(failed),
        ("folder", _) => mkdirat(CWD, path, Mode::from_raw_mode(0o777))
            .map_err(failed)
            .and_then(|()| std::fs::write(path.join("inside"), "x").map_err(text)),
        _ => Err(format!("unknown kind {kind}")),
    }
}

fn bomb() -> Result<(), String> {
    loop {
        // Retries at the limit of processes.
        if let Ok(child) = own()?.args(["hurt", "bomb"]).spawn() {
            drop(child);
        } else {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn listeners(count: usize) -> Result<(), String> {
    // Port by port: finding a free one among many used ones would dominate the kernel's work.
    let ports = || (1025..=u16::MAX).cycle().take(count);
    for port in ports() {
        std::net::TcpListener::bind(("0.0.0.0", port)).map_err(text)?;
    }
    let held: Vec<_> =
        ports().map_while(|port| std::net::TcpListener::bind(("0.0.0.0", port)).ok()).collect();
    println!("opened {count} in sequence, {} at once", held.len());
    Ok(())
}

fn shout(bytes: usize) -> Result<(), String> {
    let mut piece: Vec<u8> = Vec::new();
    while piece.len() < 1 << 16 {
        piece.extend_from_slice(b"\0\0\xff\xfe\xc3 \xe2\x80 \x1b[31m text \x08\r");
    }
    let mut out = std::io::stdout().lock();
    let mut left = bytes;
    while left > 0 {
        let now = left.min(piece.len());
        out.write_all(&piece[..now]).map_err(text)?;
        left -= now;
    }
    out.write_all(b"\nend\n").and_then(|()| out.flush()).map_err(text)
}

/// Gives itself a name that is not text, ignores signals, and never ends; the first one starts two more.
fn never(word: &str, first: bool) -> Result<(), String> {
    call_it(b"\xff) Z \xfe")?;
    if first {
        for _ in 0..2 {
            own()?.args(["hurt", "probe", "child", word]).spawn().map_err(text)?;
        }
    }
    super::forever()
}

/// Serves HTTP badly.
///
/// | kind | sent data |
/// | --- | --- |
/// | `drip` | one byte per minute |
/// | `header` | endless headers; `line`: one endless header |
/// | `circle` | a redirect to itself |
/// | `mute` | nothing, also during a TLS handshake |
/// | `flood` | an endless body |
fn http(pairs: &[&str]) -> Result<(), String> {
    static OPEN: AtomicUsize = AtomicUsize::new(0);
    let mut last = None;
    for pair in pairs.chunks(2) {
        let [kind, port] = *pair else { return Err(format!("{} needs a port", pair[0])) };
        let listener = super::bind(u16::try_from(number(port)?).map_err(text)?)?;
        let kind = kind.to_owned();
        last = Some(std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let kind = kind.clone();
                // A probe disconnects after its timeout; this program must survive even if it does not.
                if OPEN.fetch_add(1, Ordering::Relaxed) > 1000 {
                    continue;
                }
                std::thread::spawn(move || {
                    let _ = answer(&kind, stream); // the client has disconnected
                    OPEN.fetch_sub(1, Ordering::Relaxed);
                });
            }
        }));
    }
    match last {
        Some(thread) => thread.join().map_err(|_| "a server failed".to_owned()),
        None => Err("http needs kinds and ports".to_owned()),
    }
}

fn answer(kind: &str, mut stream: TcpStream) -> std::io::Result<()> {
    if kind == "mute" {
        let mut nothing = [0; 1 << 10];
        while stream.read(&mut nothing)? > 0 {}
        return Ok(());
    }
    let mut request = [0; 4096];
    let _ = stream.read(&mut request)?;
    match kind {
        "drip" => {
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n".chunks(1) {
                stream.write_all(byte)?;
                // Ends when the client disconnects.
                stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                match stream.read(&mut request) {
                    Ok(0) => return Ok(()),
                    Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Err(error),
                    _ => {}
                }
            }
            Ok(())
        }
        "header" => {
            stream.write_all(b"HTTP/1.1 200 OK\r\n")?;
            loop {
                stream.write_all(b"X-Padding: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n")?;
            }
        }
        "line" => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nX-Padding: ")?;
            loop {
                stream.write_all(&[b'a'; 4096])?;
            }
        }
        "circle" => stream.write_all(
            b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        ),
        _ => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?;
            loop {
                stream.write_all(&[0xff; 1 << 16])?;
            }
        }
    }
}
