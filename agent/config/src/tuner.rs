//! The `tuner` section of BeeletConfiguration.

use std::time::Duration;

use beelet_policy::tuner::{CpuCaps, Law, TunerMode, scheduler::SchedulerKind};
use beelet_units::quantity::Quantity;
use serde::{Deserialize, Deserializer, Serialize};

use super::Tuner;
use super::error::Problem;
use super::values::GoDuration;

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct TunerWire {
    #[serde(deserialize_with = "mode")]
    mode: Option<TunerMode>,
    scheduler: Option<SchedulerKind>,
    interval: Option<GoDuration>,
    back_off: Option<GoDuration>,
    cpu_wait_per_mille: Option<u32>,
    cpu_wait_p99: Option<GoDuration>,
    memory_stall_per_mille: Option<u32>,
    throttled_per_mille: Option<u32>,
    release_percent: Option<u32>,
    hot_ticks: Option<u32>,
    calm_ticks: Option<u32>,
    cpu_step_percent: Option<u32>,
    cpu_caps: Option<CpuCaps>,
    memory_step_percent: Option<u32>,
    best_effort_floor_percent: Option<u32>,
    memory_floor: Option<String>,
    quiet_percent: Option<u32>,
    burst_percent: Option<u32>,
    helpless_steps: Option<u32>,
    gain_percent: Option<u32>,
    standstill_ticks: Option<u32>,
}

/// YAML reads a bare `off` as false.
fn mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TunerMode>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "off, advise or enforce")]
    enum Spelling {
        Word(TunerMode),
        Switch(bool),
    }
    match Option::<Spelling>::deserialize(deserializer)? {
        None => Ok(None),
        Some(Spelling::Word(mode)) => Ok(Some(mode)),
        Some(Spelling::Switch(false)) => Ok(Some(TunerMode::Off)),
        Some(Spelling::Switch(true)) => {
            Err(serde::de::Error::custom("say how far the tuner goes: off, advise or enforce"))
        }
    }
}

impl TunerWire {
    pub(super) fn of(tuner: &Tuner) -> Self {
        let law = &tuner.law;
        Self {
            mode: Some(tuner.mode),
            scheduler: Some(tuner.scheduler),
            interval: Some(GoDuration(tuner.interval)),
            back_off: Some(GoDuration(tuner.back_off)),
            cpu_wait_per_mille: Some(law.cpu_wait_permille),
            cpu_wait_p99: Some(GoDuration(Duration::from_micros(law.cpu_wait_p99_us))),
            memory_stall_per_mille: Some(law.memory_stall_permille),
            throttled_per_mille: Some(law.throttled_permille),
            release_percent: Some(law.release_percent),
            hot_ticks: Some(law.hot_ticks),
            calm_ticks: Some(law.calm_ticks),
            cpu_step_percent: Some(law.cpu_step_percent),
            cpu_caps: Some(law.cpu_caps),
            memory_step_percent: Some(law.memory_step_percent),
            best_effort_floor_percent: Some(law.best_effort_floor_percent),
            memory_floor: Some(law.memory_floor.to_string()),
            quiet_percent: Some(law.quiet_percent),
            burst_percent: Some(law.burst_percent),
            helpless_steps: Some(law.helpless_steps),
            gain_percent: Some(law.gain_percent),
            standstill_ticks: Some(law.standstill_ticks),
        }
    }
}

pub(super) fn resolve(wire: Option<&TunerWire>) -> Result<Tuner, Problem> {
    let nothing = TunerWire::default();
    let wire = wire.unwrap_or(&nothing);
    let default = Law::default();
    let interval = interval(wire.interval)?;
    let back_off = wire.back_off.map_or(Duration::from_secs(600), |value| value.0);
    let law = Law {
        cpu_wait_permille: number(
            "cpuWaitPerMille",
            wire.cpu_wait_per_mille,
            default.cpu_wait_permille,
            1,
            1000,
        )?,
        cpu_wait_p99_us: wire
            .cpu_wait_p99
            .map_or(Ok(default.cpu_wait_p99_us), |wait| micros("cpuWaitP99", wait.0))?,
        memory_stall_permille: number(
            "memoryStallPerMille",
            wire.memory_stall_per_mille,
            default.memory_stall_permille,
            1,
            1000,
        )?,
        throttled_permille: number(
            "throttledPerMille",
            wire.throttled_per_mille,
            default.throttled_permille,
            1,
            1000,
        )?,
        release_percent: number("releasePercent", wire.release_percent, default.release_percent, 1, 100)?,
        hot_ticks: number("hotTicks", wire.hot_ticks, default.hot_ticks, 1, 1000)?,
        calm_ticks: number("calmTicks", wire.calm_ticks, default.calm_ticks, 1, 10_000)?,
        cpu_step_percent: number("cpuStepPercent", wire.cpu_step_percent, default.cpu_step_percent, 1, 90)?,
        cpu_caps: wire.cpu_caps.unwrap_or_default(),
        memory_step_percent: number(
            "memoryStepPercent",
            wire.memory_step_percent,
            default.memory_step_percent,
            1,
            90,
        )?,
        best_effort_floor_percent: number(
            "bestEffortFloorPercent",
            wire.best_effort_floor_percent,
            default.best_effort_floor_percent,
            1,
            100,
        )?,
        memory_floor: memory_floor(wire.memory_floor.as_deref(), default.memory_floor)?,
        quiet_percent: number("quietPercent", wire.quiet_percent, default.quiet_percent, 0, 100)?,
        burst_percent: number("burstPercent", wire.burst_percent, default.burst_percent, 0, 100)?,
        helpless_steps: number("helplessSteps", wire.helpless_steps, default.helpless_steps, 0, 1000)?,
        gain_percent: number("gainPercent", wire.gain_percent, default.gain_percent, 1, 90)?,
        retry_ticks: u32::try_from(back_off.as_nanos() / interval.as_nanos().max(1))
            .unwrap_or(u32::MAX)
            .max(1),
        standstill_ticks: number(
            "standstillTicks",
            wire.standstill_ticks,
            default.standstill_ticks,
            0,
            10_000,
        )?,
    };
    let mode = wire.mode.unwrap_or(TunerMode::Advise);
    let scheduler = wire.scheduler.unwrap_or_default();
    Ok(Tuner { mode, scheduler, interval, back_off, law })
}

fn problem(field: &str, message: String) -> Problem {
    Problem::new(format!("tuner.{field}"), message)
}

fn number(field: &str, value: Option<u32>, default: u32, least: u32, most: u32) -> Result<u32, Problem> {
    let value = value.unwrap_or(default);
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    Err(problem(field, format!("{value} is out of range: {least} to {most}")))
}

fn micros(field: &str, value: Duration) -> Result<u64, Problem> {
    let most = Duration::from_secs(60);
    match u64::try_from(value.as_micros()) {
        Ok(micros @ 1..) if value <= most => Ok(micros),
        _ => Err(problem(field, format!("{value:?} is out of range: 1us to 60s"))),
    }
}

fn interval(value: Option<GoDuration>) -> Result<Duration, Problem> {
    let value = value.map_or(Duration::from_millis(500), |value| value.0);
    if (Duration::from_millis(50)..=Duration::from_secs(60)).contains(&value) {
        return Ok(value);
    }
    Err(problem("interval", format!("{value:?} is out of range: 50ms to 60s")))
}

fn memory_floor(value: Option<&str>, default: u64) -> Result<u64, Problem> {
    let Some(text) = value else { return Ok(default) };
    let quantity = Quantity::parse(text).map_err(|error| problem("memoryFloor", error.to_string()))?;
    u64::try_from(quantity.value())
        .ok()
        .filter(|bytes| *bytes >= 1 << 20)
        .ok_or_else(|| problem("memoryFloor", format!("{text:?} is less than 1Mi")))
}
