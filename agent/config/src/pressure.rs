//! Settings of image and container garbage collection and of eviction.
//!
//! Defaults and checks: `pkg/kubelet/apis/config/{v1beta1/defaults.go,validation}` and
//! `pkg/kubelet/eviction/{defaults_linux,helpers}.go`.

use std::collections::BTreeMap;
use std::time::Duration;

use beelet_codec::data;
use beelet_policy::{
    eviction::{Signal, Threshold, ThresholdValue},
    images::{containers::ContainerGcPolicy, gc::ImageGcPolicy},
};

use super::beelet::BeeletWire;
use super::error::Problem;
use super::kubelet::KubeletWire;
use super::values::Amounts;
use super::words::{duration, duration_or_zero, number};

/// Default hard eviction thresholds.
const DEFAULT_HARD: [(&str, &str); 5] = [
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
];

/// Settings of image garbage collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGc {
    /// Use of the images' filesystem, in percent, at which collection starts. 100: never for space.
    pub high_percent: i64,
    /// Use of the images' filesystem, in percent, at which collection ends.
    pub low_percent: i64,
    /// Minimum age of a removed image.
    pub min_age: Duration,
    /// Unused time after which an image is removed regardless of space; zero: never for age alone.
    pub max_age: Duration,
    /// The settings in the form of the crate `policy`.
    pub policy: ImageGcPolicy,
}

impl ImageGc {
    /// Returns true if automatic collection is on; eviction may request a collection in any case.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.high_percent < 100 || !self.max_age.is_zero()
    }
}

/// Settings of eviction.
#[derive(Debug, Clone, PartialEq)]
pub struct Eviction {
    /// All thresholds in the form of the crate `policy`, hard ones first, without the derived ones for the
    /// containers' file system and for allocatable memory.
    pub thresholds: Vec<Threshold>,
    /// Time for which a condition is reported after its last observation.
    pub pressure_transition: Duration,
    /// Maximum grace period of a pod at a soft threshold; None: the pod's own grace period.
    pub max_pod_grace: Option<Duration>,
}

/// Unparsed thresholds by signal.
struct EvictionTexts {
    /// `evictionHard`, with defaults if they apply.
    hard: BTreeMap<String, String>,
    /// `evictionSoft`.
    soft: BTreeMap<String, String>,
    /// `evictionSoftGracePeriod`.
    soft_grace: BTreeMap<String, String>,
    /// `evictionMinimumReclaim`.
    min_reclaim: BTreeMap<String, String>,
}

pub(super) fn image_gc(wire: &mut KubeletWire) -> Result<ImageGc, Problem> {
    let (high, low) = (&mut wire.image_gc_high_threshold_percent, &mut wire.image_gc_low_threshold_percent);
    let high_percent = number("imageGCHighThresholdPercent", high, 85, 0, 100)?;
    let low_percent = number("imageGCLowThresholdPercent", low, 80, 0, 100)?;
    let min_age = duration(&mut wire.image_minimum_gc_age, Duration::from_secs(120));
    let max_age = duration_or_zero(&mut wire.image_maximum_gc_age);
    if low_percent >= high_percent {
        let message =
            format!("{low_percent} is not below imageGCHighThresholdPercent, which is {high_percent}");
        return Err(Problem::new("imageGCLowThresholdPercent", message));
    }
    if !max_age.is_zero() && max_age <= min_age {
        let message = format!("{max_age:?} is not above imageMinimumGCAge, which is {min_age:?}");
        return Err(Problem::new("imageMaximumGCAge", message));
    }
    let policy = ImageGcPolicy::new(high_percent, low_percent, min_age, max_age)
        .map_err(|error| Problem::new("imageGCHighThresholdPercent", error.to_string()))?;
    Ok(ImageGc { high_percent, low_percent, min_age, max_age, policy })
}

pub(super) fn container_gc(wire: &mut BeeletWire) -> Result<ContainerGcPolicy, Problem> {
    let (per_pod, all) =
        (&mut wire.container_gc_max_per_pod_container, &mut wire.container_gc_max_containers);
    let most = i64::from(i32::MAX);
    Ok(ContainerGcPolicy {
        min_age: duration_or_zero(&mut wire.container_gc_minimum_age),
        max_per_pod_container: number("containerGCMaxPerPodContainer", per_pod, 1, -1, most)?,
        max_containers: number("containerGCMaxContainers", all, -1, -1, most)?,
    })
}

pub(super) fn eviction(wire: &mut KubeletWire) -> Result<Eviction, Problem> {
    let texts = texts(wire);
    let mut thresholds = Vec::new();
    for (name, text) in &texts.hard {
        let signal = signal("evictionHard", name)?;
        let value = threshold("evictionHard", name, text)?;
        let min_reclaim = min_reclaim(&texts, name)?;
        let hard = value.map(|value| Threshold { signal, value, grace: Duration::ZERO, min_reclaim });
        thresholds.extend(hard);
    }
    for (name, text) in &texts.soft {
        let signal = signal("evictionSoft", name)?;
        let value = threshold("evictionSoft", name, text)?;
        let (grace, min_reclaim) = (soft_grace(&texts, name)?, min_reclaim(&texts, name)?);
        thresholds.extend(value.map(|value| Threshold { signal, value, grace, min_reclaim }));
    }
    for (field, map) in
        [("evictionSoftGracePeriod", &texts.soft_grace), ("evictionMinimumReclaim", &texts.min_reclaim)]
    {
        map.keys().try_for_each(|name| signal(field, name).map(drop))?;
    }
    let max_pod_grace = wire.eviction_max_pod_grace_period.filter(|seconds| *seconds >= 0);
    wire.eviction_max_pod_grace_period = max_pod_grace.or(Some(-1));
    let transition = &mut wire.eviction_pressure_transition_period;
    Ok(Eviction {
        thresholds,
        pressure_transition: duration(transition, Duration::from_secs(300)),
        max_pod_grace: max_pod_grace.map(|seconds| Duration::from_secs(seconds.unsigned_abs())),
    })
}

/// Returns the unparsed thresholds with their defaults.
fn texts(wire: &mut KubeletWire) -> EvictionTexts {
    let merge = wire.merge_default_eviction_settings.replace(false) == Some(true);
    let defaults = || DEFAULT_HARD.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter();
    let hard = match wire.eviction_hard.take() {
        None => defaults().collect(),
        Some(given) if merge => defaults().chain(given.0).collect(),
        Some(given) => given.0,
    };
    let texts = |amounts: &mut Option<Amounts>| amounts.get_or_insert_default().0.clone();
    wire.eviction_hard = Some(Amounts(hard));
    EvictionTexts {
        hard: texts(&mut wire.eviction_hard),
        soft: texts(&mut wire.eviction_soft),
        soft_grace: texts(&mut wire.eviction_soft_grace_period),
        min_reclaim: texts(&mut wire.eviction_minimum_reclaim),
    }
}

fn signal(field: &str, name: &str) -> Result<Signal, Problem> {
    data::read(&serde_json::Value::String(name.to_owned())).map_err(|_| {
        let message = "unknown signal; use memory.available, nodefs.available, nodefs.inodesFree, imagefs.available, \
                       imagefs.inodesFree or pid.available";
        Problem::new(format!("{field}.{name}"), message)
    })
}

fn threshold(field: &str, name: &str, text: &str) -> Result<Option<ThresholdValue>, Problem> {
    ThresholdValue::threshold(text)
        .map_err(|error| Problem::new(format!("{field}.{name}"), error.to_string()))
}

fn min_reclaim(texts: &EvictionTexts, name: &str) -> Result<Option<ThresholdValue>, Problem> {
    let wrong = |error: beelet_policy::eviction::ValueError| {
        Problem::new(format!("evictionMinimumReclaim.{name}"), error.to_string())
    };
    texts.min_reclaim.get(name).map(|text| ThresholdValue::min_reclaim(text).map_err(wrong)).transpose()
}

fn soft_grace(texts: &EvictionTexts, name: &str) -> Result<Duration, Problem> {
    let field = format!("evictionSoftGracePeriod.{name}");
    let Some(text) = texts.soft_grace.get(name) else {
        return Err(Problem::new(
            format!("evictionSoft.{name}"),
            "has no grace period; set one in evictionSoftGracePeriod, e.g. \"1m30s\"",
        ));
    };
    match beelet_units::duration::parse(text) {
        Ok(grace) if !grace.is_zero() => Ok(grace),
        Ok(_) => Err(Problem::new(field, "must be above zero; use evictionHard for immediate eviction")),
        Err(error) => Err(Problem::new(field, error.to_string())),
    }
}
