//! The fields that keep the node alive: image and container garbage collection, eviction.
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
use super::words::{duration, number};

/// What counts as low where the configuration says nothing.
const DEFAULT_HARD: [(&str, &str); 5] = [
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
];

/// When images go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGc {
    /// At how many percent of use of the images' filesystem collecting starts. 100: never for space.
    pub high_percent: i64,
    /// Down to how many percent it frees.
    pub low_percent: i64,
    /// An image younger than this stays.
    pub min_age: Duration,
    /// An image unused for longer than this goes, however much space there is; zero: never for age alone.
    pub max_age: Duration,
    /// The same as `policy` takes it.
    pub policy: ImageGcPolicy,
}

impl ImageGc {
    /// Returns true if there is anything to do by itself; eviction may ask for a collection all the same.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.high_percent < 100 || !self.max_age.is_zero()
    }
}

/// When the node is short of something.
#[derive(Debug, Clone, PartialEq)]
pub struct Eviction {
    /// All thresholds as `policy` takes them: hard ones first, those for the containers' file system and for
    /// allocatable memory not derived yet.
    pub thresholds: Vec<Threshold>,
    /// How long a condition is reported after it was last seen.
    pub pressure_transition: Duration,
    /// Most time that a pod gets to end by itself under a soft threshold; None: its own grace period.
    pub max_pod_grace: Option<Duration>,
    /// The thresholds as they were written.
    pub texts: EvictionTexts,
}

/// Thresholds by signal, as they were written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EvictionTexts {
    /// `evictionHard`, with the defaults where they count.
    pub hard: BTreeMap<String, String>,
    /// `evictionSoft`.
    pub soft: BTreeMap<String, String>,
    /// `evictionSoftGracePeriod`.
    pub soft_grace: BTreeMap<String, String>,
    /// `evictionMinimumReclaim`.
    pub min_reclaim: BTreeMap<String, String>,
}

pub(super) fn image_gc(wire: &KubeletWire) -> Result<ImageGc, Problem> {
    let high_percent =
        number("imageGCHighThresholdPercent", wire.image_gc_high_threshold_percent, 85, 0, 100)?;
    let low_percent = number("imageGCLowThresholdPercent", wire.image_gc_low_threshold_percent, 80, 0, 100)?;
    let min_age = duration(wire.image_minimum_gc_age, Duration::from_secs(120));
    let max_age = wire.image_maximum_gc_age.map_or(Duration::ZERO, |age| age.0);
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

pub(super) fn container_gc(wire: &BeeletWire) -> Result<ContainerGcPolicy, Problem> {
    let count = |field: &str, value, default| number(field, value, default, -1, i64::from(i32::MAX));
    Ok(ContainerGcPolicy {
        min_age: wire.container_gc_minimum_age.map_or(Duration::ZERO, |age| age.0),
        max_per_pod_container: count(
            "containerGCMaxPerPodContainer",
            wire.container_gc_max_per_pod_container,
            1,
        )?,
        max_containers: count("containerGCMaxContainers", wire.container_gc_max_containers, -1)?,
    })
}

pub(super) fn eviction(wire: &KubeletWire) -> Result<Eviction, Problem> {
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
    Ok(Eviction {
        thresholds,
        pressure_transition: duration(wire.eviction_pressure_transition_period, Duration::from_secs(300)),
        max_pod_grace: wire
            .eviction_max_pod_grace_period
            .and_then(|s| u64::try_from(s).ok())
            .map(Duration::from_secs),
        texts,
    })
}

fn texts(wire: &KubeletWire) -> EvictionTexts {
    let texts = |wire: &Option<Amounts>| wire.as_ref().map(|map| map.0.clone()).unwrap_or_default();
    let defaults = || DEFAULT_HARD.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let hard = match &wire.eviction_hard {
        None => BTreeMap::from(defaults()),
        Some(given) if wire.merge_default_eviction_settings == Some(true) => {
            defaults().into_iter().chain(given.0.clone()).collect()
        }
        Some(given) => given.0.clone(),
    };
    EvictionTexts {
        hard,
        soft: texts(&wire.eviction_soft),
        soft_grace: texts(&wire.eviction_soft_grace_period),
        min_reclaim: texts(&wire.eviction_minimum_reclaim),
    }
}

fn signal(field: &str, name: &str) -> Result<Signal, Problem> {
    data::read(&serde_json::Value::String(name.to_owned())).map_err(|_| {
        let message = "is no signal: memory.available, nodefs.available, nodefs.inodesFree, imagefs.available, \
                       imagefs.inodesFree and pid.available are";
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
            "has no grace period: say under evictionSoftGracePeriod how long it must last (\"1m30s\", for example)",
        ));
    };
    match beelet_units::duration::parse(text) {
        Ok(grace) if !grace.is_zero() => Ok(grace),
        Ok(_) => Err(Problem::new(field, "must be above zero; what acts at once belongs under evictionHard")),
        Err(error) => Err(Problem::new(field, error.to_string())),
    }
}
