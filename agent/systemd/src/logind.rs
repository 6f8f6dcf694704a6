//! logind's interface for shutdowns of the machine (`org.freedesktop.login1(5)`, "Inhibitor Locks").
//!
//! A *delay lock* is a file descriptor: while one is open the machine delays its shutdown, at most by
//! `InhibitDelayMaxUSec`. The signal `PrepareForShutdown` announces a shutdown. Any local process may send
//! this signal, so it is only a hint: the callers always ask logind itself.

use std::{os::fd::OwnedFd, time::Duration};

use tokio::{sync::watch, task::AbortHandle, time::timeout};
use tokio_stream::StreamExt as _;
use zbus::{
    Connection, MatchRule, MessageStream, connection,
    message::{Message, Type},
    zvariant::{self, OwnedValue},
};

use crate::Error;

const LOGIND: &str = "org.freedesktop.login1";
const OBJECT: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// Time limit of one answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Signal number, the same on every architecture of Linux.
const SIGHUP: i32 = 1;
/// Capacity for signals that wait for their reader; all of them are equal.
const SIGNALS: usize = 16;

/// A connection to logind.
#[derive(Debug)]
pub struct Logind {
    connection: Connection,
    /// Channel that changes with each signal and ends with the connection.
    signals: watch::Receiver<()>,
    listening: AbortHandle,
}

impl Drop for Logind {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

/// Delays a shutdown while it lives.
#[derive(Debug)]
pub struct DelayLock {
    _held: OwnedFd,
}

impl Logind {
    /// Connects through the bus at this address (None: the system bus), and follows shutdowns from then on.
    ///
    /// # Errors
    /// Fails if the system bus is missing or does not answer.
    pub async fn connect(bus: Option<&str>) -> Result<Self, Error> {
        let failed = |error: zbus::Error| Error::new("the system bus", "connect", &error);
        let connected = async {
            let builder = match bus {
                Some(address) => connection::Builder::address(address)?,
                None => connection::Builder::system()?,
            };
            let connection = builder.build().await?;
            let rule = MatchRule::builder()
                .msg_type(Type::Signal)
                .path(OBJECT)?
                .interface(MANAGER)?
                .member("PrepareForShutdown")?;
            let stream = MessageStream::for_match_rule(rule.build(), &connection, Some(SIGNALS)).await?;
            let (heard, signals) = watch::channel(());
            let listening = tokio::spawn(listen(stream, heard)).abort_handle();
            Ok(Self { connection, signals, listening })
        };
        let late = |_| Error::new("the system bus", "connect", "no answer");
        timeout(ANSWER, connected).await.map_err(late)?.map_err(failed)
    }

    /// Returns the longest delay of a shutdown by locks: `InhibitDelayMaxSec=` of logind.conf(5).
    ///
    /// # Errors
    /// Fails without an answer.
    pub async fn longest_delay(&self) -> Result<Duration, Error> {
        let action = "report its InhibitDelayMaxUSec";
        let value = self.property("InhibitDelayMaxUSec", action).await?;
        let micros = u64::try_from(value).map_err(|error| Error::new("logind", action, &error))?;
        Ok(Duration::from_micros(micros))
    }

    /// Returns true if the machine is going down.
    ///
    /// # Errors
    /// Fails without an answer.
    pub async fn is_preparing_for_shutdown(&self) -> Result<bool, Error> {
        let action = "report whether the machine goes down";
        let value = self.property("PreparingForShutdown", action).await?;
        bool::try_from(value).map_err(|error| Error::new("logind", action, &error))
    }

    /// Takes a delay lock for shutdowns. `systemd-inhibit --list` shows `who` and `why`.
    ///
    /// # Errors
    /// Fails without an answer, or if logind refuses: the machine is going down already.
    pub async fn delay_shutdown(&self, who: &str, why: &str) -> Result<DelayLock, Error> {
        let action = "grant a lock that delays shutdowns";
        let body = ("shutdown", who, why, "delay");
        let answer = self.call(LOGIND, OBJECT, MANAGER, "Inhibit", &body, action).await?;
        let lock: zvariant::OwnedFd =
            answer.body().deserialize().map_err(|error| Error::new("logind", action, &error))?;
        Ok(DelayLock { _held: lock.into() })
    }

    /// Makes logind read its configuration again, by SIGHUP from systemd. Returns before logind has read it.
    ///
    /// # Errors
    /// Fails without an answer, or if systemd refuses.
    pub async fn reload(&self) -> Result<(), Error> {
        let body = ("systemd-logind.service", "main", SIGHUP);
        let (object, interface) = ("/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager");
        let action = "send SIGHUP to logind";
        self.call("org.freedesktop.systemd1", object, interface, "KillUnit", &body, action).await.map(drop)
    }

    /// Waits for the next signal about a shutdown; returns false once the connection has ended. Signals that
    /// came meanwhile count as one.
    pub async fn changed(&mut self) -> bool {
        self.signals.changed().await.is_ok()
    }

    async fn property(&self, name: &str, action: &'static str) -> Result<OwnedValue, Error> {
        let answer = self.call(LOGIND, OBJECT, PROPERTIES, "Get", &(MANAGER, name), action).await?;
        answer.body().deserialize().map_err(|error| Error::new("logind", action, &error))
    }

    async fn call<B>(
        &self,
        service: &str,
        object: &str,
        interface: &str,
        method: &str,
        body: &B,
        action: &'static str,
    ) -> Result<Message, Error>
    where
        B: serde::Serialize + zvariant::DynamicType + Sync,
    {
        let call = self.connection.call_method(Some(service), object, Some(interface), method, body);
        let who = if service == LOGIND { "logind" } else { "systemd" };
        match timeout(ANSWER, call).await {
            Ok(answer) => answer.map_err(|error| Error::new(who, action, &error)),
            Err(_) => Err(Error::new(who, action, "no answer")),
        }
    }
}

/// Reads the stream continuously: an unread stream would block every answer on the connection.
async fn listen(mut stream: MessageStream, heard: watch::Sender<()>) {
    while let Some(Ok(_)) = stream.next().await {
        heard.send_replace(());
    }
}
