use std::io::Write;
use std::time::Duration;

use tokio::task::JoinHandle;

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

fn line(second: u32, stream: &str, text: &str) -> String {
    format!("2026-11-21T19:00:{second:02}.5Z {stream} F {text}\n")
}

async fn shown(path: &Path, wanted: Wanted) -> String {
    let (sender, mut receiver) = mpsc::channel(4);
    let reading = tokio::spawn(read(path.to_owned(), wanted, sender, None::<std::future::Ready<()>>));
    let mut text = String::new();
    while let Some(piece) = receiver.recv().await {
        text.push_str(&String::from_utf8(piece.bytes).unwrap());
    }
    reading.await.unwrap().unwrap();
    text
}

fn rotated(dir: &Path) -> PathBuf {
    let log = dir.join("0.log");
    let mut gz = flate2::write::GzEncoder::new(
        File::create(dir.join("0.log.20261121-190001.gz")).unwrap(),
        flate2::Compression::fast(),
    );
    gz.write_all((line(1, "stdout", "a") + &line(2, "stdout", "b")).as_bytes()).unwrap();
    gz.finish().unwrap();
    fs::write(dir.join("0.log.20261121-190003"), line(3, "stderr", "c")).unwrap();
    fs::write(&log, line(4, "stdout", "d") + &line(5, "stdout", "e")).unwrap();
    log
}

#[tokio::test]
async fn rotated_files_are_read_too_and_lines_counted_over_them() {
    let dir = tempfile::tempdir().unwrap();
    let log = rotated(dir.path());
    let check = async |wanted: Wanted, expected: &str| {
        assert_eq!(shown(&log, wanted.clone()).await, expected, "{wanted:?}");
    };
    let tail = |lines| Wanted { tail: Some(lines), ..Wanted::default() };
    check(Wanted::default(), "a\nb\nc\nd\ne\n").await;
    check(tail(0), "").await;
    check(tail(1), "e\n").await;
    check(tail(3), "c\nd\ne\n").await;
    check(tail(4), "b\nc\nd\ne\n").await;
    check(tail(99), "a\nb\nc\nd\ne\n").await;
    let since = Some("2026-11-21T19:00:04Z".parse().unwrap());
    check(Wanted { since, ..Wanted::default() }, "d\ne\n").await;
    let timed = Wanted { timestamps: true, ..tail(1) };
    check(timed, "2026-11-21T19:00:05.500000000Z e\n").await;
    check(Wanted { stream: Some(Stream::Err), ..Wanted::default() }, "c\n").await;
}

#[tokio::test]
async fn readers_whose_listeners_stand_still_keep_no_thread() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    fs::write(&log, line(1, "stdout", &"x".repeat(1000)).repeat(1000)).unwrap();
    // More followers than there are blocking threads.
    let mut listeners = Vec::new();
    for _ in 0..600 {
        let (sender, receiver) = mpsc::channel(1);
        let ended = None::<std::future::Ready<()>>;
        tokio::spawn(read(log.clone(), Wanted::default(), sender, ended));
        listeners.push(receiver);
    }
    for listener in &mut listeners {
        assert!(!listener.recv().await.unwrap().bytes.is_empty());
    }
    let answered = tokio::time::timeout(PATIENCE, blocking("another", || 7)).await;
    assert_eq!(answered, Ok(7));
}

#[test]
fn times_have_one_length() {
    let check = |time: &str, expected: &str| {
        assert_eq!(String::from_utf8(fixed(time)).unwrap(), expected, "{time}");
    };
    check("2026-11-21T19:00:00Z", "2026-11-21T19:00:00.000000000Z");
    check("2026-11-21T19:00:00.5+01:00", "2026-11-21T19:00:00.500000000+01:00");
    check("2026-11-21T19:00:00.123456789Z", "2026-11-21T19:00:00.123456789Z");
    check("2026-11-21T19:00:00.1234567891Z", "2026-11-21T19:00:00.123456789Z");
    check("short", "short");
    check("2026-11-21T19:00:0é", "2026-11-21T19:00:0é");
}

#[tokio::test]
async fn a_line_in_parts_has_one_time() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    let parts = ["00Z stdout P hel", "01Z stdout F lo", "02Z stdout F x"];
    let text: String = parts.iter().map(|part| format!("2026-11-21T19:00:{part}\n")).collect();
    fs::write(&log, text).unwrap();
    let timed = Wanted { timestamps: true, ..Wanted::default() };
    let expected = "2026-11-21T19:00:00.000000000Z hello\n2026-11-21T19:00:02.000000000Z x\n";
    assert_eq!(shown(&log, timed).await, expected);
}

#[tokio::test]
async fn lines_of_no_known_form_are_shown_and_parts_put_together() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    fs::write(&log, "what?\n2026-11-21T19:00:00Z stdout P hel\n2026-11-21T19:00:00Z stdout F lo\n").unwrap();
    assert_eq!(shown(&log, Wanted::default()).await, "what?\nhello\n");
    assert_eq!(shown(&dir.path().join("none.log"), Wanted::default()).await, "");
}

#[tokio::test]
async fn a_log_is_followed_over_a_rotation_to_the_containers_end() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    fs::write(&log, line(1, "stdout", "a")).unwrap();
    let (mut pieces, end, reading) = follow(&log, 4);
    let mut next = async || {
        let piece = tokio::time::timeout(PATIENCE, pieces.recv()).await.unwrap();
        piece.map(|piece| String::from_utf8(piece.bytes).unwrap())
    };
    assert_eq!(next().await.as_deref(), Some("a\n"));
    let mut file = fs::OpenOptions::new().append(true).open(&log).unwrap();
    file.write_all(line(2, "stdout", "b").as_bytes()).unwrap();
    assert_eq!(next().await.as_deref(), Some("b\n"));
    fs::rename(&log, dir.path().join("0.log.20261121-190003")).unwrap();
    file.write_all(line(3, "stdout", "c").as_bytes()).unwrap();
    assert_eq!(next().await.as_deref(), Some("c\n"));
    // The runtime has opened the next file and has not closed this one yet.
    fs::write(&log, line(5, "stdout", "e")).unwrap();
    file.write_all(line(4, "stdout", "d").as_bytes()).unwrap();
    assert_eq!(next().await.as_deref(), Some("d\n"));
    drop(file);
    assert_eq!(next().await.as_deref(), Some("e\n"));
    end.send(()).unwrap();
    assert_eq!(next().await, None);
    reading.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_listener_that_is_slow_misses_no_rotation() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    // More than the reader reads ahead, so that it waits in the first file.
    let long = "x".repeat(PIECE);
    let mut expected = Vec::new();
    let mut write = |second: u32, lines: usize| {
        let mut file = File::create(&log).unwrap();
        for number in 0..lines {
            let text = format!("{second}-{number}-{long}");
            file.write_all(line(second, "stdout", &text).as_bytes()).unwrap();
            expected.push(text);
        }
    };
    write(1, 40);
    let (mut pieces, end, reading) = follow(&log, 1);
    let mut text = String::from_utf8(pieces.recv().await.unwrap().bytes).unwrap();
    let limits = |second: u32| dir.path().join(format!("0.log.20261121-19000{second}"));
    for second in 2..=4 {
        fs::rename(&log, limits(second - 1)).unwrap();
        write(second, 1);
    }
    // The next rotation compresses one of the files in between.
    let mut gz = flate2::write::GzEncoder::new(
        File::create(dir.path().join("0.log.20261121-190002.gz")).unwrap(),
        flate2::Compression::fast(),
    );
    gz.write_all(&fs::read(limits(2)).unwrap()).unwrap();
    gz.finish().unwrap();
    fs::remove_file(limits(2)).unwrap();
    fs::remove_file(limits(1)).unwrap();
    end.send(()).unwrap();
    while let Some(piece) = pieces.recv().await {
        text.push_str(&String::from_utf8(piece.bytes).unwrap());
    }
    reading.await.unwrap().unwrap();
    let heads = |text: &str| text.split_once("-x").unwrap().0.to_owned();
    assert_eq!(
        text.lines().map(heads).collect::<Vec<_>>(),
        expected.iter().map(|t| heads(t)).collect::<Vec<_>>()
    );
}

/// Follows a log with a channel of `ahead` pieces. The second value ends the log.
fn follow(
    log: &Path,
    ahead: usize,
) -> (mpsc::Receiver<Piece>, tokio::sync::oneshot::Sender<()>, JoinHandle<Result<(), Error>>) {
    let (sender, pieces) = mpsc::channel(ahead);
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let ended = async move {
        let _ = ended.await;
    };
    let reading = tokio::spawn(read(log.to_owned(), Wanted::default(), sender, Some(ended)));
    (pieces, end, reading)
}

/// Returns the next lines, as many as expected.
#[track_caller]
fn expect(expected: &str, pieces: &mut mpsc::Receiver<Piece>) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let mut text = String::new();
        while text.len() < expected.len() {
            let piece = tokio::time::timeout(PATIENCE, pieces.recv()).await.unwrap();
            text.push_str(&String::from_utf8(piece.unwrap().bytes).unwrap());
        }
        assert_eq!(text, expected, "{caller}");
    }
}

fn write(file: &mut File, text: &str) {
    file.write_all(line(1, "stdout", text).as_bytes()).unwrap();
}

#[tokio::test]
async fn a_follower_that_comes_in_the_middle_of_a_rotation_misses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (log, rotated) = (dir.path().join("0.log"), dir.path().join("0.log.20261121-190001"));
    let mut old = File::create(&rotated).unwrap();
    write(&mut old, "z1");
    let mut new = File::create(&log).unwrap();
    write(&mut new, "a1");
    let (mut pieces, _end, _) = follow(&log, 4);
    expect("z1\n", &mut pieces).await;
    write(&mut old, "z2");
    expect("z2\n", &mut pieces).await;
    drop(old);
    expect("a1\n", &mut pieces).await;
    write(&mut new, "a2");
    expect("a2\n", &mut pieces).await;
}

#[tokio::test]
async fn rotations_that_overlap_and_other_files_that_are_closed_change_no_order() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    let rotated = |number: u32| dir.path().join(format!("0.log.20261121-19000{number}"));
    let mut a = File::create(&log).unwrap();
    write(&mut a, "a1");
    let (mut pieces, _end, _) = follow(&log, 4);
    expect("a1\n", &mut pieces).await;
    fs::rename(&log, rotated(1)).unwrap();
    let mut b = File::create(&log).unwrap();
    write(&mut b, "b1");
    // Closing another container's file does not affect this one.
    drop(File::create(dir.path().join("7.log.20261121-190001")).unwrap());
    fs::rename(&log, rotated(2)).unwrap();
    let mut c = File::create(&log).unwrap();
    write(&mut c, "c1");
    write(&mut a, "a2");
    expect("a2\n", &mut pieces).await;
    drop(a);
    expect("b1\n", &mut pieces).await;
    write(&mut b, "b2");
    expect("b2\n", &mut pieces).await;
    drop(b);
    expect("c1\n", &mut pieces).await;
}

#[tokio::test]
async fn a_log_that_was_removed_doubles_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    let mut a = File::create(&log).unwrap();
    write(&mut a, "a1");
    let (mut pieces, end, _) = follow(&log, 4);
    expect("a1\n", &mut pieces).await;
    fs::rename(&log, dir.path().join("0.log.20261121-190001")).unwrap();
    let mut b = File::create(&log).unwrap();
    drop(a);
    write(&mut b, "b1");
    expect("b1\n", &mut pieces).await;
    fs::remove_file(&log).unwrap();
    let mut c = File::create(&log).unwrap();
    drop(b);
    write(&mut c, "c1");
    expect("c1\n", &mut pieces).await;
    end.send(()).unwrap();
    assert!(tokio::time::timeout(PATIENCE, pieces.recv()).await.unwrap().is_none());
}

#[tokio::test]
async fn a_reader_whose_listener_has_left_stops_counting() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    // A file without line ends: 4 TiB of zeroes.
    File::create(&log).unwrap().set_len(4 << 40).unwrap();
    let (sender, pieces) = mpsc::channel(1);
    let tail = Wanted { tail: Some(1), ..Wanted::default() };
    let reading = tokio::spawn(read(log, tail, sender, None::<std::future::Ready<()>>));
    drop(pieces);
    let ended = tokio::time::timeout(PATIENCE, reading).await.unwrap().unwrap();
    assert!(matches!(ended, Err(Error::Closed)), "{ended:?}");
}
