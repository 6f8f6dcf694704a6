//! Reads a container's log including its rotated files, and follows it with inotify across rotations until
//! the container has terminated.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use flate2::read::GzDecoder;
use jiff::Timestamp;
use rustix::fs::OFlags;
use tokio::sync::mpsc;

use super::{Error, Stream, own_file, parse, rotate};
use crate::changes::Changes;
use crate::written::{Completion, Writer, Written};
use beelet_base::blocking::blocking;

/// Bytes per piece, and the number of pieces to read ahead.
const PIECE: usize = 32 << 10;
const PIECES: usize = 4;
/// Bytes to read before the reader checks that the receiver is still open.
const STEP: usize = 4 << 20;
/// Maximum length of a line that is kept whole; a longer line is split. Runtimes split lines at 16 KiB.
const LINE_MAX: u64 = 1 << 20;

/// Selection and format of a log's lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Maximum number of lines from the end.
    pub tail: Option<u64>,
    /// Only lines since this time.
    pub since: Option<Timestamp>,
    /// Prefix each line with its time.
    pub timestamps: bool,
    /// Only lines of this stream.
    pub stream: Option<Stream>,
}

/// A piece of a container's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Stream that the container wrote to.
    pub stream: Stream,
    /// Usually whole lines.
    pub bytes: Vec<u8>,
    /// Time of the last line, if a line has one.
    pub time: Option<Timestamp>,
}

/// Sends the selected lines of the log at `path`, including its rotated files, and then new lines until
/// `ended` completes. `ended` is polled after each change; None does not follow the log.
///
/// # Errors
/// The log cannot be read, or the receiver is closed.
pub async fn read(
    path: PathBuf,
    wanted: Wanted,
    pieces: mpsc::Sender<Piece>,
    ended: Option<impl Future<Output = ()> + Send>,
) -> Result<(), Error> {
    let folder = path.parent().unwrap_or(Path::new("/")).to_owned();
    let listener = pieces.clone();
    let open = move |writer: Writer| {
        blocking("reading a log", move || Reader::new(path, wanted, &writer, &|| listener.is_closed()))
    };
    let Some(ended) = ended else {
        return forward(open(Writer::Ended).await?, &pieces, || Writer::Ended).await.map(drop);
    };
    // The watch precedes the first read, so that no change in between is missed.
    let mut changes = Changes::of(&folder);
    let mut reader = forward(open(changes.writer()).await?, &pieces, || changes.writer()).await?;
    let mut ended = std::pin::pin!(ended);
    loop {
        let again = reader.again.unwrap_or_else(Instant::now);
        let over = tokio::select! {
            () = changes.next() => false,
            () = tokio::time::sleep_until(again.into()), if reader.again.is_some() => false,
            () = &mut ended => true,
            () = pieces.closed() => return Err(Error::Closed),
        };
        let writer = || if over { Writer::Ended } else { changes.writer() };
        reader = forward(reader, &pieces, writer).await?;
        if over {
            return Ok(());
        }
    }
}

/// Sends all lines that are readable now. No thread waits for a slow or stalled receiver: a thread reads a
/// piece, and this function sends it.
async fn forward(
    mut reader: Reader,
    pieces: &mpsc::Sender<Piece>,
    writer: impl Fn() -> Writer,
) -> Result<Reader, Error> {
    loop {
        // The writer's state is read before the file: once a writer has closed the file, all its lines are
        // there.
        let writer = writer();
        let is_all;
        (reader, is_all) = blocking("reading a log", move || {
            let is_all = reader.step(&writer)?;
            Ok::<_, Error>((reader, is_all))
        })
        .await?;
        if pieces.is_closed() {
            return Err(Error::Closed);
        }
        for piece in std::mem::take(&mut reader.ready) {
            pieces.send(piece).await.map_err(|_| Error::Closed)?;
        }
        if is_all {
            return Ok(reader);
        }
    }
}

/// Reader of a log. Its methods block, but never wait for the receiver.
struct Reader {
    path: PathBuf,
    wanted: Wanted,
    /// Complete rotated files to read, and the one that is being read.
    files: VecDeque<PathBuf>,
    rotated: Option<Box<dyn BufRead + Send>>,
    /// The next file after those, which may still be written to.
    open: Option<Written>,
    /// Name of the newest rotated file that was read or skipped.
    newest: OsString,
    /// Time of the next check without a change.
    again: Option<Instant>,
    /// True if the writer had ended when the file was opened, so that no file follows.
    is_last: bool,
    /// Number of lines to skip.
    skip: u64,
    /// Remaining bytes of this step.
    budget: usize,
    /// An incomplete line.
    begun: Vec<u8>,
    /// True if the next line continues the last one, and thus gets no time.
    goes_on: bool,
    gathered: Option<Piece>,
    /// Pieces to send before reading more.
    ready: Vec<Piece>,
}

impl Reader {
    /// Finds the first line to read. `is_over` returns true once the receiver is closed.
    fn new(
        path: PathBuf,
        wanted: Wanted,
        writer: &Writer,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Self, Error> {
        let mut reader = Self {
            path,
            wanted,
            files: VecDeque::new(),
            rotated: None,
            open: None,
            newest: OsString::new(),
            again: None,
            is_last: false,
            skip: 0,
            budget: 0,
            begun: Vec::new(),
            goes_on: false,
            gathered: None,
            ready: Vec::new(),
        };
        // The current file is opened before the listing: a file that is rotated in between is read through
        // this descriptor, and must not be read twice.
        let current = reader.current()?;
        let mut files = reader.rotated(current.as_ref())?;
        let (first, skip) = reader.start(&files, current.as_ref(), is_over)?;
        reader.skip = skip;
        reader.newest =
            files.drain(..first).next_back().map(|path| stem(&path).to_owned()).unwrap_or_default();
        reader.arrange(files, current, writer)?;
        Ok(reader)
    }

    /// Reads until enough pieces are ready. Returns true once no more lines are readable for now.
    fn step(&mut self, writer: &Writer) -> Result<bool, Error> {
        self.budget = STEP;
        self.again = None;
        if !self.read_rotated()? {
            return Ok(false);
        }
        let Some(mut open) = self.open.take() else {
            let current = self.current()?;
            let is_all = current.is_none();
            self.arrange(Vec::new(), current, writer)?;
            if is_all {
                self.flush();
            }
            return Ok(is_all);
        };
        let completion = open.completion(&self.path, writer)?;
        let is_all = self.lines(&mut open.file)?;
        let is_over = match writer {
            Writer::Ended => !self.is_last && completion != Completion::Newest,
            Writer::Watched(_) | Writer::Unwatched => completion == Completion::Complete,
        };
        if is_all && is_over {
            self.follow(&open, writer)?;
            return Ok(false);
        }
        self.open = Some(open);
        if let Completion::Until(time) = completion {
            self.again = Some(time);
        }
        if is_all {
            self.flush();
        }
        Ok(is_all)
    }

    /// Continues with the file after a complete one. A slow receiver may have missed more than one rotation.
    fn follow(&mut self, complete: &Written, writer: &Writer) -> Result<(), Error> {
        let name = complete.name()?;
        if rotate::is_rotated(&name) && name > self.newest {
            self.newest = name;
        }
        // The current file is opened before the listing, so that a file that is rotated in between is not
        // missed.
        let current = self.current()?;
        let mut files = self.rotated(current.as_ref())?;
        files.retain(|path| stem(path) > self.newest.as_os_str());
        self.arrange(files, current, writer)
    }

    /// Queues the files to read next: rotated ones, oldest first, and then `current`. Compressed files are
    /// complete. The first uncompressed file may still be written to, and [`Self::follow`] finds the files
    /// after it.
    fn arrange(&mut self, files: Vec<PathBuf>, current: Option<File>, writer: &Writer) -> Result<(), Error> {
        for path in files {
            if !is_compressed(&path) {
                match own_file::read(&path) {
                    Ok(file) => {
                        self.open = Some(Written::new(file)?);
                        return Ok(());
                    }
                    // The rotation has compressed the file in the meantime.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(e.into()),
                }
            }
            stem(&path).clone_into(&mut self.newest);
            self.files.push_back(path);
        }
        self.is_last = matches!(writer, Writer::Ended);
        self.open = current.map(Written::new).transpose()?;
        Ok(())
    }

    /// Reads the queued rotated files. Returns false if enough pieces are ready before their end.
    fn read_rotated(&mut self) -> Result<bool, Error> {
        loop {
            if self.rotated.is_none() {
                let Some(path) = self.files.pop_front() else { return Ok(true) };
                // A file that the rotation has removed in the meantime had the oldest lines and is skipped.
                self.rotated = open(&path)?;
            }
            if let Some(mut file) = self.rotated.take()
                && !self.lines(&mut file)?
            {
                self.rotated = Some(file);
                return Ok(false);
            }
        }
    }

    /// Returns the file that currently has the log's name, if any.
    fn current(&self) -> Result<Option<File>, Error> {
        match own_file::read(&self.path) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns the rotated files except the one that is already open.
    fn rotated(&self, current: Option<&File>) -> Result<Vec<PathBuf>, Error> {
        let ours = current.map(File::metadata).transpose()?.map(|found| (found.dev(), found.ino()));
        let mut files = rotate::rotated(&self.path)?;
        files.retain(|path| {
            // A missing file may have been compressed. Neither a runtime nor this crate creates anything but
            // regular files.
            let Ok(found) = fs::symlink_metadata(path) else { return true };
            found.is_file() && Some((found.dev(), found.ino())) != ours
        });
        Ok(files)
    }

    /// Returns the index of the first file to read, and the number of its lines to skip.
    fn start(
        &self,
        files: &[PathBuf],
        current: Option<&File>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<(usize, u64), Error> {
        let Some(mut missing) = self.wanted.tail else { return Ok((0, 0)) };
        if let Some(current) = current {
            // Reopens the file for a descriptor with a position of its own.
            let again = own_file::reopen(current, OFlags::RDONLY)?;
            let count = count_lines(&mut BufReader::new(again), is_over)?;
            if count >= missing {
                return Ok((files.len(), count - missing));
            }
            missing -= count;
        }
        for (index, path) in files.iter().enumerate().rev() {
            let Some(mut file) = open(path)? else { continue };
            let count = count_lines(&mut file, is_over)?;
            if count >= missing {
                return Ok((index, count - missing));
            }
            missing -= count;
        }
        Ok((0, 0))
    }

    /// Processes the remaining whole lines of a file, except skipped ones. Returns true at the end of the
    /// file, false if enough pieces are ready.
    fn lines(&mut self, file: &mut dyn BufRead) -> Result<bool, Error> {
        loop {
            if self.ready.len() >= PIECES || self.budget == 0 {
                return Ok(false);
            }
            let mut line = std::mem::take(&mut self.begun);
            let read = file.take(LINE_MAX).read_until(b'\n', &mut line)?;
            self.budget = self.budget.saturating_sub(read);
            let whole = line.ends_with(b"\n");
            if !whole && (read == 0 || (line.len() as u64) < LINE_MAX) {
                self.begun = line;
                return Ok(true);
            }
            if self.skip > 0 {
                self.skip -= 1;
                continue;
            }
            self.add_line(&line);
        }
    }

    fn add_line(&mut self, line: &[u8]) {
        // A line of unknown form is shown unchanged.
        let Some(parsed) = parse(line) else { return self.gather(Stream::Out, None, &[line]) };
        let time = parsed.time.parse::<Timestamp>().ok();
        if self.wanted.since.zip(time).is_some_and(|(since, time)| time < since) {
            return;
        }
        if self.wanted.stream.is_some_and(|stream| stream != parsed.stream) {
            return;
        }
        let end: &[u8] = if parsed.partial { b"" } else { b"\n" };
        let goes_on = std::mem::replace(&mut self.goes_on, parsed.partial);
        if self.wanted.timestamps && !goes_on {
            self.gather(parsed.stream, time, &[&fixed(parsed.time), b" ", parsed.text, end]);
        } else {
            self.gather(parsed.stream, time, &[parsed.text, end]);
        }
    }

    fn gather(&mut self, stream: Stream, time: Option<Timestamp>, parts: &[&[u8]]) {
        if self.gathered.as_ref().is_some_and(|piece| piece.stream != stream || piece.bytes.len() >= PIECE) {
            self.flush();
        }
        let piece = self.gathered.get_or_insert_with(|| Piece { stream, bytes: Vec::new(), time: None });
        piece.time = time.or(piece.time);
        parts.iter().for_each(|part| piece.bytes.extend_from_slice(part));
    }

    fn flush(&mut self) {
        self.ready.extend(self.gathered.take());
    }
}

/// Formats a time with nine fractional digits, as the kubelet does: clients split it off by its length.
#[must_use]
pub fn fixed(time: &str) -> Vec<u8> {
    const DIGITS: usize = 9;
    // 2026-11-21T19:00:00
    let Some((second, rest)) = time.split_at_checked(19) else { return time.as_bytes().to_vec() };
    let fraction = rest.strip_prefix('.').unwrap_or_default();
    let count = fraction.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, _) = fraction.split_at(count);
    let zone = if rest.starts_with('.') { &rest[1 + count..] } else { rest };
    format!("{second}.{digits:0<DIGITS$.DIGITS$}{zone}").into_bytes()
}

/// Opens a log, compressed or not. Returns None for a missing file. A file may be compressed at the same
/// time.
fn open(path: &Path) -> Result<Option<Box<dyn BufRead + Send>>, Error> {
    let compressed = is_compressed(path);
    match own_file::read(path) {
        Ok(file) if compressed => Ok(Some(Box::new(BufReader::new(GzDecoder::new(BufReader::new(file)))))),
        Ok(file) => Ok(Some(Box::new(BufReader::new(file)))),
        Err(e) if e.kind() == io::ErrorKind::NotFound && !compressed => {
            open(Path::new(&rotate::with_end(path, rotate::COMPRESSED)))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Returns the name of a rotated file without the suffix of compressed files.
fn stem(path: &Path) -> &OsStr {
    rotate::stem(path.file_name().unwrap_or_default())
}

fn is_compressed(path: &Path) -> bool {
    path.file_name().is_some_and(rotate::is_compressed)
}

fn count_lines(file: &mut dyn BufRead, is_over: &dyn Fn() -> bool) -> Result<u64, Error> {
    let mut count = 0;
    loop {
        if is_over() {
            return Err(Error::Closed);
        }
        let buffer = file.fill_buf()?;
        if buffer.is_empty() {
            return Ok(count);
        }
        count += buffer.iter().filter(|b| **b == b'\n').count() as u64;
        let length = buffer.len();
        file.consume(length);
    }
}

#[cfg(test)]
mod tests;
