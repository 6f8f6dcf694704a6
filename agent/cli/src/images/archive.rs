//! `beelet images import` and `export`: images as archives.

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

/// Archive bytes per message.
const PIECE: usize = 256 << 10;
/// Messages queued for the agent.
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
        sender.send(input(Input::Start(start))).await.context("cannot start the import")?;
        // Reading has its own thread because it may block; it ends once the receiver closes.
        let reading = tokio::task::spawn_blocking(move || send(source, &sender));
        let imported = client.images.import(ReceiverStream::new(receiver)).await;
        // The agent's error comes first: the agent may have rejected the archive while it was still being
        // read.
        let imported = imported.with_context(|| what.clone())?;
        reading.await?.with_context(|| format!("cannot read {what}"))?;
        for image in imported {
            let how = if image.is_new { "imported" } else { "already present" };
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

/// Sends the content of `source` until it ends or the receiver closes.
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
    let pieces = client.images.export(args.images.clone()).await?;
    let mut pieces = pieces.map(|piece| Ok(piece.map_err(beelet_client::ClientError::from)?.data));
    // An export error is returned before the file is created.
    let Some(first) = pieces.next().await.transpose()? else { anyhow::bail!("the agent sent nothing") };
    if is_standard(&args.output) {
        return write(first, &mut pieces, &mut io::stdout()).await.map(drop);
    }
    let bytes = write_file(first, &mut pieces, &args.output, termination()).await?;
    println!("{}: {}", args.output.display(), crate::gc::size(bytes));
    Ok(())
}

/// Writes all pieces to a file that appears complete or not at all, and returns the number of bytes.
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
        ended = ended => ended.and_then(|signal| Err(anyhow::anyhow!("interrupted by {signal}"))),
    };
    let written = written.and_then(|bytes| fs::rename(&part, output).map(|()| bytes).map_err(Into::into));
    if written.is_err() {
        // An incomplete archive is useless.
        let _ = fs::remove_file(&part);
    }
    written.with_context(|| format!("cannot write {}", output.display()))
}

/// Waits for a signal that would end the command and returns its name.
async fn termination() -> anyhow::Result<&'static str> {
    let on = |kind| signal(kind).context("cannot wait for signals");
    let (mut interrupt, mut terminate) = (on(SignalKind::interrupt())?, on(SignalKind::terminate())?);
    let mut hangup = on(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => "Ctrl-C",
        _ = terminate.recv() => "SIGTERM",
        _ = hangup.recv() => "SIGHUP",
    })
}

/// Returns the name of the incomplete file.
fn part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// Writes all pieces and returns the number of bytes.
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
        // Ctrl-C arrives while the next piece is awaited.
        let mut waits = tokio_stream::pending();
        let interrupted = write_file(piece(), &mut waits, &output, async { Ok("Ctrl-C") }).await;
        let words = format!("{:#}", interrupted.unwrap_err());
        assert_eq!(words, format!("cannot write {}: interrupted by Ctrl-C", output.display()));
        assert!(here().is_empty(), "{:?}", here());
        let mut breaks = tokio_stream::iter([Err(anyhow::anyhow!("the agent has exited"))]);
        write_file(piece(), &mut breaks, &output, pending()).await.unwrap_err();
        assert!(here().is_empty(), "{:?}", here());
        let mut ends = tokio_stream::iter([Ok(piece())]);
        assert_eq!(write_file(piece(), &mut ends, &output, pending()).await.unwrap(), 10);
        assert_eq!(here(), ["images.tar"]);
        assert_eq!(fs::read(output).unwrap(), b"piecepiece");
    }
}
