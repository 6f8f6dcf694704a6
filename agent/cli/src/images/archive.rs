//! `beelet images import` and `export`: images as files.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use beelet_client::Client;
use beelet_proto::beelet as proto;
use beelet_proto::beelet::import_input::Input;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

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
    let mut pieces = client.export_images(args.images.clone()).await?;
    // What can't be exported is said before a file is made.
    let Some(first) = next(&mut pieces).await? else { anyhow::bail!("the agent sent nothing") };
    if is_standard(&args.output) {
        let mut out = io::stdout();
        return write(first, &mut pieces, &mut out).await.map(drop);
    }
    let part = part(&args.output);
    let mut file = File::create(&part).with_context(|| format!("cannot write {}", part.display()))?;
    let written = write(first, &mut pieces, &mut file).await;
    if written.is_err() {
        // Half an archive is of no use to anybody.
        let _ = fs::remove_file(&part);
    }
    let bytes = written?;
    fs::rename(&part, &args.output).with_context(|| format!("cannot write {}", args.output.display()))?;
    println!("{}: {}", args.output.display(), crate::gc::size(bytes));
    Ok(())
}

/// What a file is called until it is whole.
fn part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

async fn next(pieces: &mut tonic::Streaming<proto::ExportPiece>) -> anyhow::Result<Option<Vec<u8>>> {
    let piece = pieces.message().await.map_err(beelet_client::ClientError::from)?;
    Ok(piece.map(|piece| piece.data))
}

/// Writes all pieces; how many bytes that were.
async fn write(
    first: Vec<u8>,
    pieces: &mut tonic::Streaming<proto::ExportPiece>,
    out: &mut impl Write,
) -> anyhow::Result<u64> {
    let mut piece = Some(first);
    let mut bytes = 0;
    while let Some(data) = piece {
        out.write_all(&data).context("cannot write the archive")?;
        bytes += data.len() as u64;
        piece = next(pieces).await?;
    }
    out.flush().context("cannot write the archive")?;
    Ok(bytes)
}
