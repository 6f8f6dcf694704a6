//! The target for containers' logs, in real files.

use std::fs;
use std::path::PathBuf;

use tokio::sync::mpsc;

use beelet_logs::read::{Piece, Wanted, fixed, read};
use beelet_logs::{Stream, end_of, parse};

/// Capacity of the channel, sufficient for any input, so that the reader never waits.
const PIECES: usize = 1 << 16;

/// Tests a log: the whole log and its last lines equal the lines that the container wrote. The first byte has
/// the options and the place of the rotation.
pub fn log_lines(input: &[u8]) {
    let Some((options, log)) = input.split_first() else { return };
    let whole: Vec<&[u8]> =
        log.split_inclusive(|b| *b == b'\n').filter(|line| line.ends_with(b"\n")).collect();
    for line in &whole {
        if let Some(read) = parse(line) {
            let stream = if read.stream == Stream::Out { "stdout" } else { "stderr" };
            let tag = if read.partial { "P" } else { "F" };
            let mut again = format!("{} {stream} {tag} ", read.time).into_bytes();
            again.extend_from_slice(read.text);
            assert_eq!(parse(&again), Some(read));
        }
    }
    let folder = std::env::temp_dir().join(format!("beelet-fuzz-logs-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let current = folder.join("0.log");
    // A rotated file may end anywhere: the line continues in the next file.
    let cut = log.len() * usize::from(options & 7) / 8;
    let (older, newer) = log.split_at(cut);
    if !older.is_empty() {
        fs::write(folder.join("0.log.20260101-000000"), older).unwrap();
    }
    fs::write(&current, newer).unwrap();

    let timestamps = options & 8 != 0;
    let all = shown(&current, Wanted { timestamps, ..Wanted::default() });
    assert_eq!(all, expected(&whole, timestamps));
    let tail = u64::from(options >> 4);
    if cut == 0 {
        let last = &whole[whole.len().saturating_sub(tail as usize)..];
        assert_eq!(
            shown(&current, Wanted { tail: Some(tail), timestamps, ..Wanted::default() }),
            expected(last, timestamps)
        );
    }
    let most = usize::from(*options);
    assert!(end_of(&current, 5, most).is_none_or(|text| text.len() <= most));
    fs::remove_dir_all(folder).unwrap();
}

/// Returns the output of the log's reader; joins consecutive pieces of the same stream.
fn shown(path: &std::path::Path, wanted: Wanted) -> Vec<(Stream, Vec<u8>)> {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().build().unwrap();
    }
    let (sender, mut receiver) = mpsc::channel(PIECES);
    let reading = read(PathBuf::from(path), wanted, sender, None::<std::future::Ready<()>>);
    RUNTIME.with(|runtime| runtime.block_on(reading)).unwrap();
    let mut all: Vec<(Stream, Vec<u8>)> = Vec::new();
    while let Ok(Piece { stream, bytes, .. }) = receiver.try_recv() {
        append(&mut all, stream, &bytes);
    }
    all
}

fn expected(lines: &[&[u8]], timestamps: bool) -> Vec<(Stream, Vec<u8>)> {
    let mut all = Vec::new();
    let mut goes_on = false;
    for line in lines {
        match parse(line) {
            None => append(&mut all, Stream::Out, line),
            Some(read) => {
                if timestamps && !goes_on {
                    append(&mut all, read.stream, &[fixed(read.time), b" ".to_vec()].concat());
                }
                goes_on = read.partial;
                append(&mut all, read.stream, read.text);
                append(&mut all, read.stream, if read.partial { b"" } else { b"\n" });
            }
        }
    }
    all
}

fn append(all: &mut Vec<(Stream, Vec<u8>)>, stream: Stream, bytes: &[u8]) {
    match all.last_mut() {
        _ if bytes.is_empty() => {}
        Some((last, there)) if *last == stream => there.extend_from_slice(bytes),
        _ => all.push((stream, bytes.to_vec())),
    }
}
