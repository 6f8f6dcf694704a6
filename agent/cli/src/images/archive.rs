//! `beelet images import` and `export`: images as files.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use beelet_client::Client;
use beelet_proto::beelet as proto;
use beelet_proto::beelet::import_input::Input;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};

use super::{ExportArgs, ImportArgs};
use crate::plain;

/// Bytes of an archive in one message.
const PIECE: usize = 256 << 10;
/// Messages on their way to the agent.
const QUEUE: usize = 4;

pub(super) async fn import(args: &ImportArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    for path in &args.files {
        let what = if is_standard(path) { "standard input".to_owned() } else { path.display().to_string() };
        let source: Box<dyn Read + Send> = match is_standard(path) {
            true => Box::new(io::stdin()),
            false => Box::new(open(path)?),
        };
        let (sender, receiver) = mpsc::channel(QUEUE);
        let start = proto::ImportStart { what: what.clone(), name: args.name.clone().unwrap_or_default() };
        sender.send(input(Input::Start(start))).await.context("the import could not begin")?;
        // A thread of its own: reading may block, and ends when nobody takes more.
        let reading = tokio::task::spawn_blocking(move || send(source, &sender));
        let imported = client.import_images(ReceiverStream::new(receiver)).await;
        // The agent's word comes first: it may have refused what was still being read.
        let imported = imported.with_context(|| what.clone())?;
        reading.await?.with_context(|| format!("cannot read {what}"))?;
        for image in imported {
            let how = if image.is_new { "imported" } else { "was here" };
            println!("{}", plain::line(&format!("{} {how}", image.name)));
        }
    }
    Ok(())
}

fn open(path: &Path) -> anyhow::Result<File> {
    let failed = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(failed)?;
    if file.metadata().with_context(failed)?.is_dir() {
        return Err(io::Error::from(io::ErrorKind::IsADirectory)).with_context(failed);
    }
    Ok(file)
}

fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn input(input: Input) -> proto::ImportInput {
    proto::ImportInput { input: Some(input) }
}

/// Sends all that is in `source`, or as much as is wanted.
fn send(mut source: Box<dyn Read + Send>, sender: &mpsc::Sender<proto::ImportInput>) -> io::Result<()> {
    loop {
        let mut piece = Vec::with_capacity(PIECE);
        (&mut source).take(PIECE as u64).read_to_end(&mut piece)?;
        if piece.is_empty() || sender.blocking_send(input(Input::Data(piece))).is_err() {
            return Ok(());
        }
    }
}

pub(super) async fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let pieces = client.export_images(args.images.clone()).await?;
    let mut pieces = pieces.map(|piece| Ok(piece.map_err(beelet_client::ClientError::from)?.data));
    // What can't be exported is said before a file is made.
    let Some(first) = pieces.next().await.transpose()? else { anyhow::bail!("the agent sent nothing") };
    if is_standard(&args.output) {
        return write(first, &mut pieces, &mut io::stdout()).await.map(drop);
    }
    let bytes = write_file(first, &mut pieces, &args.output, told_to_end()).await?;
    println!("{}: {}", args.output.display(), crate::gc::size(bytes));
    Ok(())
}

/// Writes all pieces to a file that is there whole or not at all; how many bytes that were.
async fn write_file(
    first: Vec<u8>,
    pieces: &mut (impl Stream<Item = anyhow::Result<Vec<u8>>> + Unpin),
    output: &Path,
    ended: impl Future<Output = anyhow::Result<&'static str>>,
) -> anyhow::Result<u64> {
    let part = part(output);
    let mut file = File::create(&part).with_context(|| format!("cannot write {}", part.display()))?;
    let written = tokio::select! {
        written = write(first, pieces, &mut file) => written,
        ended = ended => ended.and_then(|signal| Err(anyhow::anyhow!("ended by {signal}"))),
    };
    let written = written.and_then(|bytes| fs::rename(&part, output).map(|()| bytes).map_err(Into::into));
    if written.is_err() {
        // Half an archive is of no use to anybody.
        let _ = fs::remove_file(&part);
    }
    written.with_context(|| format!("{} is not written", output.display()))
}

/// Waits for a signal that would end the command; which one it was.
async fn told_to_end() -> anyhow::Result<&'static str> {
    let on = |kind| signal(kind).context("cannot wait for signals");
    let (mut interrupt, mut terminate) = (on(SignalKind::interrupt())?, on(SignalKind::terminate())?);
    let mut hangup = on(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => "Ctrl-C",
        _ = terminate.recv() => "SIGTERM",
        _ = hangup.recv() => "SIGHUP",
    })
}

/// What a file is called until it is whole.
fn part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// Writes all pieces; how many bytes that were.
async fn write(
    first: Vec<u8>,
    pieces: &mut (impl Stream<Item = anyhow::Result<Vec<u8>>> + Unpin),
    out: &mut impl Write,
) -> anyhow::Result<u64> {
    let mut piece = Some(first);
    let mut bytes = 0;
    while let Some(data) = piece {
        out.write_all(&data).context("cannot write the archive")?;
        bytes += data.len() as u64;
        piece = pieces.next().await.transpose()?;
    }
    out.flush().context("cannot write the archive")?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn an_archive_is_there_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("images.tar");
        let here = || {
            let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
            names.collect::<Vec<_>>()
        };
        let piece = || b"piece".to_vec();
        // Ctrl-C while the next piece is awaited.
        let mut waits = tokio_stream::pending();
        let interrupted = write_file(piece(), &mut waits, &output, async { Ok("Ctrl-C") }).await;
        let words = format!("{:#}", interrupted.unwrap_err());
        assert_eq!(words, format!("{} is not written: ended by Ctrl-C", output.display()));
        assert!(here().is_empty(), "{:?}", here());
        let mut breaks = tokio_stream::iter([Err(anyhow::anyhow!("the agent has gone"))]);
        write_file(piece(), &mut breaks, &output, pending()).await.unwrap_err();
        assert!(here().is_empty(), "{:?}", here());
        let mut ends = tokio_stream::iter([Ok(piece())]);
        assert_eq!(write_file(piece(), &mut ends, &output, pending()).await.unwrap(), 10);
        assert_eq!(here(), ["images.tar"]);
        assert_eq!(fs::read(output).unwrap(), b"piecepiece");
    }
}
