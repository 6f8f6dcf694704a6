//! The terminal: taken, drawn on, read from, and given back whatever happens (Ctrl-C, SIGTERM, a lost
//! terminal, a panic).

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

/// Keys that wait to be handled; the terminal keeps more.
const KEYS: usize = 64;
/// How long between two tries to reach an agent that has gone.
const AGAIN: Duration = Duration::from_secs(1);

/// The terminal while it is ours. Dropped, it is as it was.
///
/// ratatui's own destructor complains on standard error when the terminal has gone, which is the same
/// terminal: a panic.
struct Screen(ManuallyDrop<DefaultTerminal>);

impl Screen {
    fn take() -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() {
            anyhow::bail!("standard input is no terminal, so no key could ever be read: use --once");
        }
        let terminal = ratatui::try_init().context("the terminal can't be drawn on; use --once")?;
        Ok(Self(ManuallyDrop::new(terminal)))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that has gone can't be given back, and nobody is there to be told.
        let _ = self.0.show_cursor();
        let _ = ratatui::try_restore();
        let _ = io::stdout().flush();
    }
}

/// Shows snapshots until somebody ends it.
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
    let mut screen = Screen::take()?;
    let mut keys = read_keys();
    let mut changed = true;
    while !app.done {
        if changed && screen.0.draw(|frame| draw(&mut app, frame)).is_err() {
            // The terminal has gone. There is nobody left to tell.
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
                    app.take(snapshot)
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

/// Keys and new sizes, from a thread of its own: reading them blocks. It ends with the process, or with the
/// terminal.
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

/// Snapshots, over as many agents' lives as it takes.
struct Source<'a> {
    args: &'a TopArgs,
    snapshots: Option<Streaming<SignalSnapshot>>,
}

impl Source<'_> {
    /// The next one, or why there is none: then the one after that is waited for a while. Safe to be dropped.
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
            true => "no agent answers; waiting for it".to_owned(),
            false => error.to_string(),
        })
    }
}
