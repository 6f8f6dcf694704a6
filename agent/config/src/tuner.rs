//! The `tuner` section of BeeletConfiguration.

use std::time::Duration;

use beelet_policy::tuner::{CpuCaps, Law, TunerMode, cold::ColdLaw, scheduler::SchedulerKind};
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
    best_effort_disk_weight: Option<u32>,
    #[serde(deserialize_with = "mode")]
    reclaim: Option<TunerMode>,
    reclaim_rate: Option<String>,
    reclaim_swap_rate: Option<String>,
}

/// Reads the mode from a word or a boolean: YAML reads a bare `off` as false.
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
        Some(Spelling::Switch(true)) => Err(serde::de::Error::custom("must be off, advise or enforce")),
    }
}

pub(super) fn resolve(wire: &mut TunerWire) -> Result<Tuner, Problem> {
    let default = Law::default();
    let interval = interval(&mut wire.interval)?;
    let back_off = wire.back_off.get_or_insert(GoDuration(Duration::from_secs(600))).0;
    let retry_ticks = u32::try_from(back_off.as_nanos() / interval.as_nanos().max(1)).unwrap_or(u32::MAX);
    let law = Law {
        cpu_wait_permille: number(
            "cpuWaitPerMille",
            &mut wire.cpu_wait_per_mille,
            default.cpu_wait_permille,
            1,
            1000,
        )?,
        cpu_wait_p99_us: micros("cpuWaitP99", &mut wire.cpu_wait_p99, default.cpu_wait_p99_us)?,
        memory_stall_permille: number(
            "memoryStallPerMille",
            &mut wire.memory_stall_per_mille,
            default.memory_stall_permille,
            1,
            1000,
        )?,
        throttled_permille: number(
            "throttledPerMille",
            &mut wire.throttled_per_mille,
            default.throttled_permille,
            1,
            1000,
        )?,
        release_percent: number(
            "releasePercent",
            &mut wire.release_percent,
            default.release_percent,
            1,
            100,
        )?,
        hot_ticks: number("hotTicks", &mut wire.hot_ticks, default.hot_ticks, 1, 1000)?,
        calm_ticks: number("calmTicks", &mut wire.calm_ticks, default.calm_ticks, 1, 10_000)?,
        cpu_step_percent: number(
            "cpuStepPercent",
            &mut wire.cpu_step_percent,
            default.cpu_step_percent,
            1,
            90,
        )?,
        cpu_caps: *wire.cpu_caps.get_or_insert_default(),
        memory_step_percent: number(
            "memoryStepPercent",
            &mut wire.memory_step_percent,
            default.memory_step_percent,
            1,
            90,
        )?,
        best_effort_floor_percent: number(
            "bestEffortFloorPercent",
            &mut wire.best_effort_floor_percent,
            default.best_effort_floor_percent,
            1,
            100,
        )?,
        memory_floor: bytes("memoryFloor", &mut wire.memory_floor, default.memory_floor, 1 << 20)?,
        quiet_percent: number("quietPercent", &mut wire.quiet_percent, default.quiet_percent, 0, 100)?,
        burst_percent: number("burstPercent", &mut wire.burst_percent, default.burst_percent, 0, 100)?,
        helpless_steps: number("helplessSteps", &mut wire.helpless_steps, default.helpless_steps, 0, 1000)?,
        gain_percent: number("gainPercent", &mut wire.gain_percent, default.gain_percent, 1, 90)?,
        retry_ticks: retry_ticks.max(1),
        standstill_ticks: number(
            "standstillTicks",
            &mut wire.standstill_ticks,
            default.standstill_ticks,
            0,
            10_000,
        )?,
        best_effort_disk_weight: number(
            "bestEffortDiskWeight",
            &mut wire.best_effort_disk_weight,
            default.best_effort_disk_weight,
            0,
            // The kernel's default is 100: more would favour the pods that are to yield.
            99,
        )?,
    };
    let mode = *wire.mode.get_or_insert(TunerMode::Advise);
    let scheduler = *wire.scheduler.get_or_insert_default();
    let (reclaim, cold) = cold(wire, law.memory_floor)?;
    Ok(Tuner { mode, scheduler, interval, back_off, law, reclaim, cold })
}

/// Resolves proactive reclaim.
fn cold(wire: &mut TunerWire, floor: u64) -> Result<(TunerMode, ColdLaw), Problem> {
    let default = ColdLaw::default();
    let law = ColdLaw {
        floor,
        bytes_per_second: bytes("reclaimRate", &mut wire.reclaim_rate, default.bytes_per_second, 1 << 20)?,
        swap_bytes_per_second: bytes(
            "reclaimSwapRate",
            &mut wire.reclaim_swap_rate,
            default.swap_bytes_per_second,
            0,
        )?,
        ..default
    };
    Ok((*wire.reclaim.get_or_insert(TunerMode::Off), law))
}

fn problem(field: &str, message: String) -> Problem {
    Problem::new(format!("tuner.{field}"), message)
}

fn number(field: &str, value: &mut Option<u32>, default: u32, least: u32, most: u32) -> Result<u32, Problem> {
    let value = *value.get_or_insert(default);
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    Err(problem(field, format!("{value} is out of range: {least} to {most}")))
}

fn micros(field: &str, value: &mut Option<GoDuration>, default: u64) -> Result<u64, Problem> {
    let given = value.map_or(Duration::from_micros(default), |value| value.0);
    let most = Duration::from_secs(60);
    match u64::try_from(given.as_micros()) {
        Ok(micros @ 1..) if given <= most => {
            *value = Some(GoDuration(Duration::from_micros(micros)));
            Ok(micros)
        }
        _ => Err(problem(field, format!("{given:?} is out of range: 1us to 60s"))),
    }
}

fn interval(value: &mut Option<GoDuration>) -> Result<Duration, Problem> {
    let value = value.get_or_insert(GoDuration(Duration::from_millis(500))).0;
    if (Duration::from_millis(50)..=Duration::from_secs(60)).contains(&value) {
        return Ok(value);
    }
    Err(problem("interval", format!("{value:?} is out of range: 50ms to 60s")))
}

fn bytes(field: &str, value: &mut Option<String>, default: u64, least: u64) -> Result<u64, Problem> {
    let bytes = match value.as_deref() {
        None => default,
        Some(text) => {
            let quantity = Quantity::parse(text).map_err(|error| problem(field, error.to_string()))?;
            let bytes = u64::try_from(quantity.value()).ok().filter(|bytes| *bytes >= least);
            let least = || Quantity::from_units(i64::try_from(least).unwrap_or(i64::MAX)).binary();
            bytes.ok_or_else(|| problem(field, format!("{text:?} is less than {}", least())))?
        }
    };
    *value = Some(bytes.to_string());
    Ok(bytes)
}
