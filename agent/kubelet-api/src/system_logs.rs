//! `/logs/`: the machine's own log files. No link leads out of their directory, because a container with a
//! hostPath there could create links to any file.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use axum::body::Body;
use axum::extract::{self, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, readlinkat};
use rustix::io::Errno;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use beelet_base::blocking::blocking;
use beelet_base::own_file;

use beelet_policy::node::log_query::LogQuery;

use crate::containers::Failure;
use crate::logs::Pairs;
use crate::{App, journal};

/// Maximum names in a listing.
const NAMES: usize = 10_000;
/// Bytes per read, and queued pieces.
const PIECE: usize = 64 << 10;
const QUEUE: usize = 4;

enum Found {
    File(File),
    Listing(String),
}

pub(crate) async fn top(State(app): State<App>, Query(pairs): Query<Pairs>) -> Result<Response, Failure> {
    let query = if app.config.log_query { LogQuery::parse(&pairs) } else { Ok(None) };
    match query.map_err(|why| Failure::new(StatusCode::BAD_REQUEST, format!("{why}\n")))? {
        None => show(app, String::new()).await,
        Some(LogQuery::File(path)) => show(app, path).await,
        Some(LogQuery::Services { names, settings }) => services(app, names, &settings).await,
    }
}

/// Returns services' logs from the journal, or else the first service's log file.
async fn services(
    app: App,
    names: Vec<String>,
    settings: &[(&'static str, String)],
) -> Result<Response, Failure> {
    let mut known = Vec::new();
    for name in &names {
        if journal::knows(name).await {
            known.push(name.clone());
        }
    }
    if !known.is_empty() {
        return journal::show(&app, &known, settings);
    }
    for name in &names {
        for path in [format!("{name}/{name}.log"), format!("{name}.log"), name.clone()] {
            let (folder, sought) = (app.system_logs.to_path_buf(), path.clone());
            let found = blocking("reading the machine's logs", move || find(&folder, &sought)).await;
            if matches!(found, Ok(Found::File(_))) {
                return show(app, path).await;
            }
        }
    }
    let sentence = format!("no logs of {} in the journal or in files\n", names.join(", "));
    Err(Failure::new(StatusCode::NOT_FOUND, sentence))
}

pub(crate) async fn below(
    State(app): State<App>,
    extract::Path(path): extract::Path<String>,
) -> Result<Response, Failure> {
    show(app, path).await
}

async fn show(app: App, path: String) -> Result<Response, Failure> {
    let folder = app.system_logs.to_path_buf();
    let found = blocking("reading the machine's logs", move || find(&folder, &path)).await;
    match found.map_err(failure)? {
        Found::Listing(page) => {
            Ok(([(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response())
        }
        Found::File(file) => {
            let (pieces, read) = mpsc::channel(QUEUE);
            app.tasks.spawn(send(file, pieces));
            let body = Body::from_stream(ReceiverStream::new(read));
            Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response())
        }
    }
}

fn failure(errno: Errno) -> Failure {
    match errno {
        Errno::NOENT | Errno::NOTDIR => Failure::new(StatusCode::NOT_FOUND, "404 page not found\n"),
        Errno::XDEV | Errno::LOOP | Errno::ACCESS | Errno::PERM => {
            Failure::new(StatusCode::FORBIDDEN, "403 Forbidden: not a file of this directory\n")
        }
        other => Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{other}\n")),
    }
}

fn find(folder: &Path, path: &str) -> Result<Found, Errno> {
    let path = path.trim_matches('/');
    let path = if path.is_empty() { "." } else { path };
    let root = rustix::fs::open(folder, own_file::FOUND | OFlags::DIRECTORY, Mode::empty())?;
    // The file is inspected before it is opened: opening a FIFO blocks, and opening a device may have side
    // effects.
    let flags = own_file::FOUND;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let found = match openat2(&root, path, flags, Mode::empty(), within) {
        // The links in `containers` contain absolute paths into this directory.
        Err(Errno::XDEV) => {
            let inside = inside(root.as_fd(), folder, path)?;
            openat2(&root, inside, flags, Mode::empty(), within)
        }
        found => found,
    }?;
    match FileType::from_raw_mode(fstat(&found)?.st_mode) {
        FileType::RegularFile => {
            let file = own_file::reopen(&found, OFlags::RDONLY);
            Ok(Found::File(file.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?))
        }
        FileType::Directory => {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            listing(&openat(&found, ".", flags, Mode::empty())?).map(Found::Listing)
        }
        _ => Err(Errno::ACCESS),
    }
}

/// Returns the target of an absolute link within the directory.
fn inside(root: BorrowedFd<'_>, folder: &Path, path: &str) -> Result<PathBuf, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let link = openat2(root, path, flags, Mode::empty(), within)?;
    let target = readlinkat(&link, "", Vec::new()).map_err(|_| Errno::XDEV)?;
    let target = Path::new(OsStr::from_bytes(target.as_bytes()));
    target.strip_prefix(folder).map(Path::to_owned).map_err(|_| Errno::XDEV)
}

/// Returns a listing as Go's file server formats it.
fn listing(folder: &std::os::fd::OwnedFd) -> Result<String, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)?.take(NAMES) {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let end = if entry.file_type() == FileType::Directory { "/" } else { "" };
        if name != "." && name != ".." {
            names.push(name + end);
        }
    }
    names.sort_unstable();
    let mut page =
        String::from("<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n");
    for name in names {
        let _ = writeln!(page, "<a href=\"{}\">{}</a>", encoded(&name), escaped(&name));
    }
    Ok(page + "</pre>\n")
}

/// Escapes text for HTML.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut safe, c| {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&#34;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
        safe
    })
}

/// Encodes a name for a URL; a name with a colon must not look like a scheme.
fn encoded(name: &str) -> String {
    name.bytes().fold(String::from("./"), |mut safe, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
            safe.push(char::from(byte));
        } else {
            let _ = write!(safe, "%{byte:02X}");
        }
        safe
    })
}

/// Sends the current content of the file until the receiver closes. No thread waits for the receiver: each
/// piece is read on a thread and sent from here.
async fn send(mut file: File, pieces: mpsc::Sender<io::Result<Vec<u8>>>) {
    // Bytes appended later are left out: a file that grows faster than it is read would never end.
    let mut left = file.metadata().map_or(0, |found| found.len());
    while left > 0 {
        let read = blocking("reading the machine's logs", move || {
            let mut piece = Vec::new();
            file.by_ref().take(left.min(PIECE as u64)).read_to_end(&mut piece)?;
            Ok::<_, io::Error>((file, piece))
        });
        let piece = match read.await {
            Ok((_, piece)) if piece.is_empty() => return,
            Ok((same, piece)) => {
                file = same;
                left -= piece.len() as u64;
                piece
            }
            Err(error) => {
                let _ = pieces.send(Err(error)).await; // a disconnected client needs no error
                return;
            }
        };
        if pieces.send(Ok(piece)).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_and_folders_are_shown_and_nothing_outside_is() {
        let dir = tempfile::tempdir().unwrap();
        let logs = dir.path().join("log");
        std::fs::create_dir_all(logs.join("sub")).unwrap();
        std::fs::write(logs.join("sub/a<b"), "text").unwrap();
        std::fs::write(dir.path().join("secret"), "secret").unwrap();
        symlink("../secret", logs.join("relative")).unwrap();
        symlink("/etc/hostname", logs.join("absolute")).unwrap();
        symlink("sub/a<b", logs.join("inside")).unwrap();
        symlink(logs.join("sub/a<b"), logs.join("by its whole path")).unwrap();
        symlink(logs.join("sub/../../secret"), logs.join("and out again")).unwrap();
        let check = |path: &str, expected: Result<&str, Errno>| {
            let found = find(&logs, path).map(|found| match found {
                Found::Listing(page) => page,
                Found::File(mut file) => {
                    let mut text = String::new();
                    file.read_to_string(&mut text).unwrap();
                    text
                }
            });
            match (found, expected) {
                (Ok(text), Ok(part)) => assert!(text.contains(part), "{path}: {text}"),
                (Err(errno), Err(expected)) => assert_eq!(errno, expected, "{path}"),
                (found, _) => panic!("{path}: {found:?}"),
            }
        };
        check("", Ok("<a href=\"./sub/\">sub/</a>"));
        check("sub/", Ok("<a href=\"./a%3Cb\">a&lt;b</a>"));
        check("sub/a<b", Ok("text"));
        check("inside", Ok("text"));
        check("by its whole path", Ok("text"));
        check("and out again", Err(Errno::XDEV));
        check("nothing", Err(Errno::NOENT));
        check("../secret", Err(Errno::XDEV));
        check("sub/../../secret", Err(Errno::XDEV));
        check("relative", Err(Errno::XDEV));
        check("absolute", Err(Errno::XDEV));
    }
}
