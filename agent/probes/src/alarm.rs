//! A kernel timer for all deadlines. The runtime's own timers are kept in slots of growing length, and a wait
//! longer than the first slots wakes the thread in between: wake-ups are most of the cost of probes that the
//! kernel answers. A simulation, whose clock the kernel's timers do not follow, uses the runtime's own timer.

use std::{io, os::fd::OwnedFd, time::Duration};

use rustix::{
    io::Errno,
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};
use tokio::io::{Interest, unix::AsyncFd};

use beelet_base::simulation;
use beelet_bpf::watched;

use crate::worker::now;

/// Rings at times of `CLOCK_MONOTONIC`.
#[derive(Debug)]
pub(super) struct Alarm {
    /// None in a simulation.
    timer: Option<AsyncFd<OwnedFd>>,
    set: Option<Duration>,
}

impl Alarm {
    /// Returns an unset alarm. Must be called in a runtime with I/O enabled.
    ///
    /// # Errors
    /// The timer can't be made.
    pub(super) fn new() -> io::Result<Self> {
        if simulation::is_on() {
            return Ok(Self { timer: None, set: None });
        }
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self { timer: Some(watched(timer, Interest::READABLE)?), set: None })
    }

    /// Waits until `at`, or forever without it. A dropped wait may be followed by a wait for another time.
    ///
    /// # Errors
    /// The timer can't be set, which never happens for a valid time.
    pub(super) async fn until(&mut self, at: Option<Duration>) -> io::Result<()> {
        let Some(timer) = &self.timer else {
            match at {
                Some(at) => tokio::time::sleep(at.saturating_sub(now())).await,
                None => std::future::pending().await,
            }
            return Ok(());
        };
        if self.set != at {
            let it_value = at.map_or(Timespec { tv_sec: 0, tv_nsec: 0 }, |at| Timespec {
                tv_sec: i64::try_from(at.as_secs()).unwrap_or(i64::MAX),
                // Zero would disarm the timer.
                tv_nsec: i64::from(at.subsec_nanos()).max(i64::from(at.as_secs() == 0)),
            });
            let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
            timerfd_settime(timer.get_ref(), TimerfdTimerFlags::ABSTIME, &once)?;
            self.set = at;
        }
        loop {
            let mut ready = timer.readable().await?;
            let mut times = [0; 8];
            match rustix::io::read(timer.get_ref(), &mut times) {
                Ok(_) => {
                    self.set = None;
                    return Ok(());
                }
                // The timer had expired for another time, before it was set to this one.
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::worker::now;

    const SOON: Duration = Duration::from_millis(20);
    const LATE: Duration = Duration::from_secs(3600);
    const PATIENCE: Duration = Duration::from_secs(60);

    async fn rings_at(alarm: &mut Alarm, at: Duration) {
        timeout(PATIENCE, alarm.until(Some(at))).await.unwrap().unwrap();
        assert!(now() >= at, "{at:?}");
    }

    #[tokio::test]
    async fn an_alarm_rings_at_its_time_and_not_before() {
        let mut alarm = Alarm::new().unwrap();
        for _ in 0..3 {
            rings_at(&mut alarm, now() + SOON).await;
        }
        rings_at(&mut alarm, Duration::ZERO).await;
    }

    #[tokio::test]
    async fn a_dropped_wait_may_be_followed_by_another_time() {
        let mut alarm = Alarm::new().unwrap();
        assert!(timeout(SOON, alarm.until(None)).await.is_err());
        assert!(timeout(SOON, alarm.until(Some(now() + LATE))).await.is_err());
        // The alarm rings without a waiter, and is then set to a later time.
        assert!(timeout(Duration::ZERO, alarm.until(Some(now() + SOON))).await.is_err());
        tokio::time::sleep(2 * SOON).await;
        rings_at(&mut alarm, now() + 3 * SOON).await;
        assert!(timeout(SOON, alarm.until(None)).await.is_err());
    }
}
