//! Fake logind with scripted behaviour, and a fake systemd that makes logind reload its configuration, on a
//! private bus.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use tempfile::TempDir;
use tokio::{sync::watch, time::timeout};
use zbus::{Connection, connection, object_server::SignalEmitter};

use self::interfaces::{Manager, Systemd};

/// Timeout, longer than any machine needs for an operation here.
const PATIENCE: Duration = Duration::from_secs(60);
const LOGIND: &str = "/org/freedesktop/login1";
const SYSTEMD: &str = "/org/freedesktop/systemd1";

const CONFIG: &str = r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><listen>unix:path=SOCKET</listen><auth>EXTERNAL</auth><policy context="default">
<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/><allow user="*"/>
</policy></busconfig>
"#;

/// Private bus; stops when dropped.
#[derive(Debug)]
pub struct Bus {
    daemon: Child,
    dir: TempDir,
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Bus {
    /// Starts a bus; None if the machine has no dbus-daemon.
    #[must_use]
    pub fn start() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let (config, socket) = (dir.path().join("bus.conf"), dir.path().join("bus"));
        fs::write(&config, CONFIG.replace("SOCKET", &socket.display().to_string())).unwrap();
        let mut daemon = Command::new("dbus-daemon")
            .arg(format!("--config-file={}", config.display()))
            .args(["--nofork", "--nopidfile", "--print-address"])
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        // dbus-daemon prints its address when it listens.
        let mut first = [0; 1];
        daemon.stdout.take().unwrap().read_exact(&mut first).unwrap();
        Some(Self { daemon, dir })
    }

    /// Returns the bus address.
    #[must_use]
    pub fn address(&self) -> String {
        format!("unix:path={}", self.dir.path().join("bus").display())
    }

    /// Returns the folder of logind's drop-in configuration.
    #[must_use]
    pub fn drop_ins(&self) -> PathBuf {
        self.dir.path().join("logind.conf.d")
    }
}

#[derive(Debug, Default)]
struct World {
    longest_delay: Duration,
    goes_down: bool,
    locks: usize,
    /// Number of queries for a pending shutdown.
    asked: usize,
    reloads: usize,
    drop_ins: PathBuf,
}

type Shared = watch::Sender<World>;

/// Fake logind.
#[derive(Debug)]
pub struct Logind {
    connection: Connection,
    world: Arc<Shared>,
}

// The macros generate items without documentation.
#[allow(missing_docs)]
mod interfaces {
    use std::{io::Read as _, sync::Arc, thread};

    use zbus::{fdo, interface, object_server::SignalEmitter, zvariant};

    use super::{Shared, configured};

    pub(super) struct Manager(pub(super) Arc<Shared>);

    #[interface(name = "org.freedesktop.login1.Manager")]
    impl Manager {
        fn inhibit(&self, what: &str, who: &str, _why: &str, mode: &str) -> fdo::Result<zvariant::OwnedFd> {
            if (what, who, mode) != ("shutdown", "beelet", "delay") {
                return Err(fdo::Error::InvalidArgs(format!("{what} {who} {mode}")));
            }
            if self.0.borrow().goes_down {
                return Err(fdo::Error::Failed("the operation is already running".to_owned()));
            }
            let (mut held, lock) = std::io::pipe().map_err(|error| fdo::Error::IOError(error.to_string()))?;
            self.0.send_modify(|world| world.locks += 1);
            let world = Arc::clone(&self.0);
            // The read returns when all copies of the other end are closed.
            thread::spawn(move || {
                let _ = held.read(&mut [0]);
                world.send_modify(|world| world.locks -= 1);
            });
            Ok(std::os::fd::OwnedFd::from(lock).into())
        }

        #[zbus(property(emits_changed_signal = "const"), name = "InhibitDelayMaxUSec")]
        fn inhibit_delay_max_usec(&self) -> u64 {
            u64::try_from(self.0.borrow().longest_delay.as_micros()).unwrap_or(u64::MAX)
        }

        #[zbus(property(emits_changed_signal = "false"))]
        fn preparing_for_shutdown(&self) -> bool {
            let mut goes_down = false;
            self.0.send_modify(|world| {
                world.asked += 1;
                goes_down = world.goes_down;
            });
            goes_down
        }

        #[zbus(signal)]
        pub(super) async fn prepare_for_shutdown(
            emitter: &SignalEmitter<'_>,
            start: bool,
        ) -> zbus::Result<()>;
    }

    pub(super) struct Systemd(pub(super) Arc<Shared>);

    #[interface(name = "org.freedesktop.systemd1.Manager")]
    impl Systemd {
        fn kill_unit(&self, unit: &str, _who: &str, signal: i32) {
            if (unit, signal) != ("systemd-logind.service", 1) {
                return;
            }
            self.0.send_modify(|world| {
                world.reloads += 1;
                if let Some(longest) = configured(&world.drop_ins) {
                    world.longest_delay = longest;
                }
            });
        }
    }
}

/// Returns the delay in the last file of the folder.
fn configured(folder: &Path) -> Option<Duration> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).ok()?.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let text = fs::read_to_string(files.last()?).ok()?;
    let seconds = text.lines().find_map(|line| line.strip_prefix("InhibitDelayMaxSec="))?;
    Some(Duration::from_secs(seconds.parse().ok()?))
}

impl Logind {
    /// Starts a logind whose maximum shutdown delay is `longest_delay`.
    pub async fn start(bus: &Bus, longest_delay: Duration) -> Self {
        let world = World { longest_delay, drop_ins: bus.drop_ins(), ..World::default() };
        let world = Arc::new(watch::Sender::new(world));
        let connection = connection::Builder::address(bus.address().as_str())
            .and_then(|bus| bus.serve_at(LOGIND, Manager(Arc::clone(&world))))
            .and_then(|bus| bus.serve_at(SYSTEMD, Systemd(Arc::clone(&world))))
            .and_then(|bus| bus.name("org.freedesktop.login1"))
            .and_then(|bus| bus.name("org.freedesktop.systemd1"))
            .unwrap();
        Self { connection: connection.build().await.unwrap(), world }
    }

    /// Announces a shutdown.
    pub async fn shut_down(&self) {
        self.world.send_modify(|world| world.goes_down = true);
        self.signal(true).await;
    }

    /// Cancels the shutdown.
    pub async fn call_off(&self) {
        self.world.send_modify(|world| world.goes_down = false);
        self.signal(false).await;
    }

    /// Simulates a reboot, which sends no signal.
    pub fn boot(&self) {
        self.world.send_modify(|world| world.goes_down = false);
    }

    /// Sends a signal, as any bus client may.
    pub async fn signal(&self, goes_down: bool) {
        let emitter = SignalEmitter::new(&self.connection, LOGIND).unwrap();
        Manager::prepare_for_shutdown(&emitter, goes_down).await.unwrap();
    }

    /// Waits until `count` locks are held.
    pub async fn locks(&self, count: usize) {
        self.until("locks", |world| world.locks == count).await;
    }

    /// Returns the number of locks held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.world.borrow().locks
    }

    /// Returns the number of queries for a pending shutdown.
    #[must_use]
    pub fn asked(&self) -> usize {
        self.world.borrow().asked
    }

    /// Waits until there were more than `before` queries.
    pub async fn asked_more_than(&self, before: usize) {
        self.until("questions", |world| world.asked > before).await;
    }

    /// Returns the maximum delay and the number of configuration reloads.
    #[must_use]
    pub fn configuration(&self) -> (Duration, usize) {
        let world = self.world.borrow();
        (world.longest_delay, world.reloads)
    }

    async fn until(&self, what: &str, wanted: impl FnMut(&World) -> bool) {
        let mut world = self.world.subscribe();
        let waited = timeout(PATIENCE, world.wait_for(wanted)).await.map(drop);
        assert!(waited.is_ok(), "{what}: {:?}", self.world.borrow());
    }
}
