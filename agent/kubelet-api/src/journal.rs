//! Reads services' logs from the machine's journal.

use std::time::Duration;

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

use beelet_base::program::{Bounds, Complaints, Program};

use crate::App;
use crate::containers::Failure;

/// Maximum time for an answer, as in the kubelet.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes per read, and queued pieces.
const PIECE: usize = 64 << 10;
const QUEUE: usize = 4;
/// Limits for the list of all units.
const UNITS: Bounds = Bounds { within: PATIENCE, output: 4 << 20, complaints: Complaints::Unheard };

/// The program that reads the journal.
fn journalctl() -> Program {
    Program::tool("journalctl").env("SYSTEMD_COLORS", "0")
}

/// Returns true if the journal has entries of the service; false without a journal.
pub(crate) async fn knows(service: &str) -> bool {
    let units = journalctl().setting("--field", "_SYSTEMD_UNIT").run(UNITS).await;
    let units = units.map(|ended| ended.output).unwrap_or_default();
    let unit = if service.contains('.') { service.to_owned() } else { format!("{service}.service") };
    units.split(|byte| *byte == b'\n').any(|line| line == unit.as_bytes())
}

/// Returns the services' logs, filtered by `settings`.
pub(crate) fn show(
    app: &App,
    services: &[String],
    settings: &[(&'static str, String)],
) -> Result<Response, Failure> {
    let program = journalctl().flag("--utc").flag("--no-pager").flag("--quiet");
    let program = settings.iter().fold(program, |program, (name, value)| program.setting(name, value));
    let program = services.iter().fold(program, |program, unit| program.setting("--unit", unit));
    let failed = |error| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"));
    let mut running = program.start().map_err(failed)?;
    let (pieces, read) = mpsc::channel(QUEUE);
    app.tasks.spawn(async move {
        let Some(output) = running.output() else { return };
        if timeout(PATIENCE, send(output, &pieces)).await.is_err() {
            let _ = pieces.try_send(Err(std::io::Error::other("reading the journal timed out")));
        }
        // Dropping kills a program that still runs.
        drop(running);
    });
    let body = Body::from_stream(ReceiverStream::new(read));
    Ok(([(header::CONTENT_TYPE, "text/plain;charset=UTF-8")], body).into_response())
}

/// Sends output until it ends or the receiver closes.
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
