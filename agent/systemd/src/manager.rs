//! systemd's manager: starting, changing and stopping transient units. Its calls block.
//!
//! The connection goes to the system bus, and without one to systemd's own socket, as libcontainer does. A
//! call whose answer was lost (systemd executed itself again, the bus was restarted) is repeated for some
//! seconds: all three calls may be. A longer outage is an error, and the caller's next sync retries.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::StreamExt as _;
use zbus::message::{Message, Type};
use zbus::zvariant::{OwnedObjectPath, Value as Variant};
use zbus::{Connection, MatchRule, MessageStream, connection};

use crate::Error;

const SYSTEMD: &str = "org.freedesktop.systemd1";
const OBJECT: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const PRIVATE: &str = "unix:path=/run/systemd/private";
/// Mode of a job towards conflicting jobs: the one that libcontainer uses.
const MODE: &str = "replace";

/// Time limit of one attempt: slices wait for nothing.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Time for which a call is repeated while the bus is away.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// Capacity for signals about other jobs that end during a wait.
const SIGNALS: usize = 256;

/// A property of a unit, in D-Bus types.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Property {
    /// Name on the bus, from systemd.resource-control(5), e.g. `CPUWeight`.
    pub name: &'static str,
    /// New value.
    pub value: Value,
}

/// Value of a property.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// `b`
    Bool(bool),
    /// `t`
    Amount(u64),
    /// `ay`: a bit per CPU or memory node.
    Bits(Vec<u8>),
    /// `s`
    Text(String),
    /// `as`
    Units(Vec<String>),
}

/// Properties in their D-Bus type: `a(sv)`.
type Properties<'a> = Vec<(&'static str, Variant<'a>)>;

/// The connection, and the thread that serves it.
pub struct Manager {
    /// Runtime of the connection's thread; None only during the drop.
    runtime: Option<Runtime>,
    link: Arc<Link>,
}

/// The connection, while it works.
#[derive(Default)]
struct Link {
    connection: Mutex<Option<Connection>>,
    /// Number of times that systemd may have written all values again.
    rewrites: watch::Sender<u64>,
}

/// Failure of a call.
enum Failed {
    /// The bus or systemd is away: the call may be repeated.
    Away(String),
    /// systemd refused, with the error's name.
    Refused { name: String, why: String },
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Manager")
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // Dropping a runtime inside another one would block, which panics.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Manager {
    /// Creates the manager, which connects at its first call.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub fn new() -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(1)
            .thread_name("systemd")
            .enable_all()
            .build()
            .map_err(|error| Error::new("the agent", "start a thread for systemd's bus", &error))?;
        Ok(Self { runtime: Some(runtime), link: Arc::default() })
    }

    /// Runs `work` on the bus's own thread, repeatedly while the bus is away. For threads that may block.
    fn ask<F>(
        &self,
        action: &'static str,
        unit: &str,
        work: impl Fn(Connection) -> F + Send + Sync + 'static,
    ) -> Answer
    where
        F: Future<Output = Result<(), Failed>> + Send,
    {
        let (sender, receiver) = mpsc::sync_channel(1);
        let link = Arc::clone(&self.link);
        let patient = async move {
            let deadline = Instant::now() + PATIENCE;
            loop {
                let tried = match timeout(ATTEMPT, attempt(&link, &work)).await {
                    Ok(tried) => tried,
                    Err(_) => Err(Failed::Away("no answer".to_owned())),
                };
                match tried {
                    Err(Failed::Away(_)) if Instant::now() < deadline => {
                        link.forget();
                        sleep(PAUSE).await;
                    }
                    done => break done,
                }
            }
        };
        let said = |why: &str| Err(Error::new("systemd", format!("{action} {unit}"), why));
        let Some(runtime) = &self.runtime else { return said("the agent is shutting down") };
        runtime.spawn(async move {
            // The caller may have given up.
            let _ = sender.send(patient.await);
        });
        match receiver.recv_timeout(PATIENCE + ATTEMPT * 2) {
            Ok(Ok(())) => Ok(Ok(())),
            Ok(Err(Failed::Away(why))) => said(&why),
            Ok(Err(Failed::Refused { name, why })) => Ok(Err(Refusal { name, why })),
            Err(_) => said("no answer"),
        }
    }
}

/// A refusal from systemd.
struct Refusal {
    name: String,
    why: String,
}

impl Refusal {
    fn is(&self, name: &str) -> bool {
        self.name == name
    }

    fn of(self, action: &'static str, unit: &str) -> Error {
        Error::new("systemd", format!("{action} {unit}"), &self.why)
    }
}

/// Result of a call: done, refused, or without an answer.
type Answer = Result<Result<(), Refusal>, Error>;

impl Manager {
    /// Creates and starts the transient unit; an existing unit is started and keeps its properties.
    ///
    /// # Errors
    /// Fails without an answer, or if systemd refuses.
    pub fn start(&self, unit: &str, properties: &[Property]) -> Result<(), Error> {
        let (name, wanted) = (unit.to_owned(), properties.to_vec());
        let made = self.ask("start", unit, move |connection| {
            let (name, wanted) = (name.clone(), wanted.clone());
            async move {
                let no_others: Vec<(&str, Properties<'_>)> = Vec::new();
                let body = (name.as_str(), MODE, variants(&wanted), no_others);
                job(&connection, call(&connection, "StartTransientUnit", &body)).await
            }
        })?;
        match made {
            Ok(()) => Ok(()),
            Err(refusal) if refusal.is("org.freedesktop.systemd1.UnitExists") => self.start_existing(unit),
            Err(refusal) => Err(refusal.of("start", unit)),
        }
    }

    /// Changes properties until the next boot, and skips those that this systemd does not know.
    ///
    /// # Errors
    /// Fails without an answer, or if systemd refuses.
    pub fn set(&self, unit: &str, properties: &[Property]) -> Result<(), Error> {
        let (name, wanted) = (unit.to_owned(), properties.to_vec());
        let set = self.ask("set properties of", unit, move |connection| {
            let (name, wanted) = (name.clone(), wanted.clone());
            async move {
                let until_boot = true;
                let body = (name.as_str(), until_boot, variants(&wanted));
                call(&connection, "SetUnitProperties", &body).await.map(|_| ())
            }
        })?;
        match set {
            Ok(()) => Ok(()),
            // An older systemd: only the file is written. Reading it back shows the result.
            Err(refusal)
                if refusal.is("org.freedesktop.DBus.Error.PropertyReadOnly")
                    || refusal.is("org.freedesktop.DBus.Error.InvalidArgs") =>
            {
                Ok(())
            }
            // The cgroup exists without its unit, which has ended.
            Err(refusal) if refusal.is("org.freedesktop.systemd1.NoSuchUnit") => Ok(()),
            Err(refusal) => Err(refusal.of("set properties of", unit)),
        }
    }

    /// Returns a counter that changes whenever systemd may have written all values again.
    #[must_use]
    pub fn rewrites(&self) -> watch::Receiver<u64> {
        self.link.rewrites.subscribe()
    }

    /// Stops the unit; a missing unit is a success.
    ///
    /// # Errors
    /// Fails without an answer, or if systemd refuses.
    pub fn stop(&self, unit: &str) -> Result<(), Error> {
        match self.job_of_unit("stop", "StopUnit", unit)? {
            Err(refusal) if !refusal.is("org.freedesktop.systemd1.NoSuchUnit") => {
                Err(refusal.of("stop", unit))
            }
            _ => Ok(()),
        }
    }

    /// Starts a unit that exists but may have been stopped meanwhile.
    fn start_existing(&self, unit: &str) -> Result<(), Error> {
        self.job_of_unit("start", "StartUnit", unit)?.map_err(|refusal| refusal.of("start", unit))
    }

    fn job_of_unit(&self, action: &'static str, method: &'static str, unit: &str) -> Answer {
        let name = unit.to_owned();
        self.ask(action, unit, move |connection| {
            let name = name.clone();
            async move { job(&connection, call(&connection, method, &(name.as_str(), MODE))).await }
        })
    }
}

impl Link {
    async fn connection(&self) -> Result<Connection, Failed> {
        if let Some(connection) = self.lock().clone().filter(|connection| !connection.is_closed()) {
            return Ok(connection);
        }
        let connection = connect().await.map_err(|error| Failed::Away(error.to_string()))?;
        *self.lock() = Some(connection.clone());
        tokio::spawn(follow_reloads(connection.clone(), self.rewrites.clone()));
        Ok(connection)
    }

    fn forget(&self) {
        self.lock().take();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Connection>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn connect() -> zbus::Result<Connection> {
    match connection::Builder::system()?.build().await {
        Ok(connection) => Ok(connection),
        // A machine without dbus has systemd's private socket.
        Err(error) => connection::Builder::address(PRIVATE)?.p2p().build().await.map_err(|_| error),
    }
}

/// Counts reloads, and the end of the connection: systemd may have executed itself again.
async fn follow_reloads(connection: Connection, rewrites: watch::Sender<u64>) {
    // A failure loses nothing: the periodic comparison finds every change.
    let _ = reloads(&connection, &rewrites).await;
    rewrites.send_modify(|count| *count += 1);
}

async fn reloads(connection: &Connection, rewrites: &watch::Sender<u64>) -> Result<(), Failed> {
    let rule = MatchRule::builder().msg_type(Type::Signal).interface(MANAGER)?.member("Reloading")?.build();
    let mut told = MessageStream::for_match_rule(rule, connection, None).await?;
    call(connection, "Subscribe", &()).await?;
    while let Some(message) = told.next().await {
        let is_beginning: bool = message?.body().deserialize()?;
        if !is_beginning {
            rewrites.send_modify(|count| *count += 1);
        }
    }
    Ok(())
}

async fn attempt<F>(link: &Link, work: &impl Fn(Connection) -> F) -> Result<(), Failed>
where
    F: Future<Output = Result<(), Failed>>,
{
    work(link.connection().await?).await
}

async fn call<B>(connection: &Connection, method: &'static str, body: &B) -> Result<Message, Failed>
where
    B: serde::Serialize + zbus::zvariant::DynamicType + Sync,
{
    Ok(connection.call_method(Some(SYSTEMD), OBJECT, Some(MANAGER), method, body).await?)
}

/// Makes a call that starts a job, and waits for the end of the job.
async fn job(
    connection: &Connection,
    begin: impl Future<Output = Result<Message, Failed>>,
) -> Result<(), Failed> {
    let rule = MatchRule::builder().msg_type(Type::Signal).interface(MANAGER)?.member("JobRemoved")?.build();
    // Subscribes before the job begins: it may end at once.
    let mut ended = MessageStream::for_match_rule(rule, connection, Some(SIGNALS)).await?;
    let job: OwnedObjectPath = begin.await?.body().deserialize()?;
    while let Some(message) = ended.next().await {
        let message = message?;
        let body = message.body();
        let (_, of, _, result): (u32, OwnedObjectPath, String, String) = body.deserialize()?;
        if of == job {
            return match result.as_str() {
                "done" => Ok(()),
                _ => Err(Failed::Refused { name: String::new(), why: format!("the job ended: {result}") }),
            };
        }
    }
    Err(Failed::Away("the connection ended".to_owned()))
}

fn variants(properties: &[Property]) -> Properties<'_> {
    let variant = |value: &'_ Value| match value {
        Value::Bool(value) => Variant::from(*value),
        Value::Amount(value) => Variant::from(*value),
        Value::Bits(value) => Variant::from(value.clone()),
        Value::Text(value) => Variant::from(value.clone()),
        Value::Units(value) => Variant::from(value.clone()),
    };
    properties.iter().map(|property| (property.name, variant(&property.value))).collect()
}

impl From<zbus::Error> for Failed {
    fn from(error: zbus::Error) -> Self {
        let zbus::Error::MethodError(name, why, _) = error else { return Self::Away(error.to_string()) };
        let (name, why) = (name.to_string(), why.unwrap_or_else(|| "refused".to_owned()));
        // The bus's errors for a missing peer.
        let away = [
            "NameHasNoOwner",
            "ServiceUnknown",
            "NoReply",
            "Disconnected",
            "NoServer",
            "Timeout",
            "TimedOut",
        ];
        match name.strip_prefix("org.freedesktop.DBus.Error.") {
            Some(short) if away.contains(&short) => Self::Away(why),
            _ => Self::Refused { why: format!("{why} ({name})"), name },
        }
    }
}
