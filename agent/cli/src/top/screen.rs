//! The terminal: set up, drawn on, read from, and restored in every case (Ctrl-C, SIGTERM, a lost terminal, a
//! panic).

use std::io::{self, IsTerminal, Write as _};
use std::mem::ManuallyDrop;
use std::time::Duration;

use anyhow::Context;
use beelet_proto::beelet::SignalSnapshot;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tonic::Streaming;

use super::TopArgs;
use super::app::App;
use super::causes::{self, Asker};
use super::draw::draw;
use beelet_client::{ClientError, signals::Client};

/// Maximum queued keys; the terminal buffers more.
const KEYS: usize = 64;
/// Pause between two connection attempts.
const AGAIN: Duration = Duration::from_secs(1);

/// The terminal in raw mode with the alternate screen. Dropping it restores the terminal.
///
/// ratatui's own destructor prints to standard error if the terminal is lost; standard error is the same
/// terminal, so the print panics.
struct Screen(ManuallyDrop<DefaultTerminal>);

impl Screen {
    fn enter() -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() {
            anyhow::bail!("standard input is not a terminal, so keys cannot be read: use `--once`");
        }
        let terminal = ratatui::try_init().context("cannot set up the terminal; use `--once`")?;
        Ok(Self(ManuallyDrop::new(terminal)))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A lost terminal cannot be restored, and the error cannot be reported.
        let _ = self.0.show_cursor();
        let _ = ratatui::try_restore();
        let _ = io::stdout().flush();
    }
}

/// Shows snapshots until the user quits.
pub(super) async fn run(
    mut app: App,
    args: &TopArgs,
    snapshots: Streaming<SignalSnapshot>,
) -> anyhow::Result<()> {
    let mut term = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut int = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot handle SIGHUP")?;
    let mut source = Source { args, snapshots: Some(snapshots) };
    let mut asker = Asker::start(args.agent.socket.clone());
    let mut screen = Screen::enter()?;
    let mut keys = read_keys();
    let mut changed = true;
    while !app.done {
        if changed && screen.0.draw(|frame| draw(&mut app, frame)).is_err() {
            // The terminal is lost, so the error cannot be reported.
            return Ok(());
        }
        changed = tokio::select! {
            key = keys.recv() => match key {
                Some(event) => app.event(&event),
                None => return Ok(()),
            },
            next = source.next() => match next {
                Ok(snapshot) => {
                    if causes::are_wanted(&snapshot) {
                        asker.want();
                    }
                    app.update(snapshot)
                }
                Err(why) => {
                    app.lost(why);
                    true
                }
            },
            causes = asker.next() => app.learn(causes),
            _ = term.recv() => return Ok(()),
            _ = int.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        };
    }
    Ok(())
}

/// Reads keys and resizes in a thread of their own, because reading blocks. The thread ends with the process
/// or with the terminal.
fn read_keys() -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(KEYS);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Snapshots across restarts of the agent.
struct Source<'a> {
    args: &'a TopArgs,
    snapshots: Option<Streaming<SignalSnapshot>>,
}

impl Source<'_> {
    /// Returns the next snapshot, or the reason for its absence; after a failure the next call waits and
    /// reconnects. Cancel safe.
    async fn next(&mut self) -> Result<SignalSnapshot, String> {
        if self.snapshots.is_none() {
            sleep(AGAIN).await;
            self.snapshots = Some(self.connect().await?);
        }
        let Some(snapshots) = &mut self.snapshots else { return Err(String::new()) };
        let ended = match snapshots.message().await {
            Ok(Some(snapshot)) => return Ok(snapshot),
            Ok(None) => "the agent stopped".to_owned(),
            Err(status) => ClientError::from(status).to_string(),
        };
        self.snapshots = None;
        Err(format!("{ended}; waiting for it"))
    }

    async fn connect(&self) -> Result<Streaming<SignalSnapshot>, String> {
        let connected = async {
            let mut client = Client::connect(&self.args.agent.socket).await?;
            client.snapshots(&self.args.namespace).await
        };
        connected.await.map_err(|error: ClientError| match error.is_transient() {
            true => "the agent does not answer; waiting for it".to_owned(),
            false => error.to_string(),
        })
    }
}
