//! Asks the machine's journal what services have told it.

use std::process::Stdio;
use std::time::Duration;

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

use crate::App;
use crate::containers::Failure;

/// The program that reads the journal.
const PROGRAM: &str = "journalctl";
/// What an answer may take, as by the kubelet.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes that are read at once, and pieces on their way.
const PIECE: usize = 64 << 10;
const QUEUE: usize = 4;
/// Most bytes of the list of all units.
const UNITS_MAX: u64 = 4 << 20;

fn start(arguments: &[String]) -> std::io::Result<Child> {
    Command::new(PROGRAM)
        .args(arguments)
        .env("SYSTEMD_COLORS", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
}

/// Returns true if the journal has anything of the service. Without a journal it hasn't.
pub(crate) async fn knows(service: &str) -> bool {
    let Ok(mut child) = start(&["--field=_SYSTEMD_UNIT".to_owned()]) else { return false };
    let mut units = String::new();
    let read = async {
        let output = child.stdout.take()?;
        output.take(UNITS_MAX).read_to_string(&mut units).await.ok()
    };
    let _ = timeout(PATIENCE, read).await;
    let unit = if service.contains('.') { service.to_owned() } else { format!("{service}.service") };
    units.lines().any(|line| line == unit)
}

/// What the services told, as far as `arguments` ask for it.
pub(crate) fn show(app: &App, services: &[String], arguments: &[String]) -> Result<Response, Failure> {
    let units = services.iter().map(|service| format!("--unit={service}"));
    let arguments: Vec<String> = arguments.iter().cloned().chain(units).collect();
    let failed = |error| {
        let sentence = format!("{PROGRAM} can't be run: {error}\n");
        Failure::new(StatusCode::INTERNAL_SERVER_ERROR, sentence)
    };
    let mut child = start(&arguments).map_err(failed)?;
    let (pieces, read) = mpsc::channel(QUEUE);
    app.tasks.spawn(async move {
        let Some(output) = child.stdout.take() else { return };
        // Dropped, the program is killed.
        if timeout(PATIENCE, send(output, &pieces)).await.is_err() {
            let _ = pieces.try_send(Err(std::io::Error::other("the journal took too long")));
        }
        drop(child);
    });
    let body = Body::from_stream(ReceiverStream::new(read));
    Ok(([(header::CONTENT_TYPE, "text/plain;charset=UTF-8")], body).into_response())
}

/// Sends what comes, until nobody listens.
async fn send(mut output: impl AsyncRead + Unpin, pieces: &mpsc::Sender<std::io::Result<Vec<u8>>>) {
    loop {
        let mut piece = Vec::with_capacity(PIECE);
        match output.read_buf(&mut piece).await {
            Ok(0) | Err(_) => return,
            Ok(_) if pieces.send(Ok(piece)).await.is_err() => return,
            Ok(_) => {}
        }
    }
}
