//! `plan image-gc`: the images to remove.

use std::{collections::HashSet, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{Scenario, number};
use beelet_policy::images::gc::{
    Collection, CollectionMode, CollectionStep, Event, ImageGcPolicy, ImageRecord, Outcome,
};
use beelet_units::{field::FieldError, fs_usage::FsUsage};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct ImageGcScenario {
    name: String,
    now: Timestamp,
    policy: Policy,
    #[serde(rename = "beganGC", default)]
    began_gc: Option<Timestamp>,
    fs: Fs,
    images: Vec<Image>,
    in_use: Vec<String>,
    #[serde(default)]
    sandbox_image: Option<String>,
    #[serde(default)]
    fail_remove: Vec<String>,
    #[serde(default)]
    delete_all_unused: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Policy {
    #[serde(rename = "imageGCHighThresholdPercent", deserialize_with = "number::required")]
    high: i64,
    #[serde(rename = "imageGCLowThresholdPercent", deserialize_with = "number::required")]
    low: i64,
    #[serde(rename = "imageMinimumGCAge", default, deserialize_with = "number::duration")]
    min_age: Option<Duration>,
    #[serde(rename = "imageMaximumGCAge", default, deserialize_with = "number::duration")]
    max_age: Option<Duration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Fs {
    #[serde(deserialize_with = "number::required")]
    capacity_bytes: u64,
    #[serde(deserialize_with = "number::required")]
    available_bytes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Image {
    id: String,
    #[serde(deserialize_with = "number::required")]
    size_bytes: u64,
    #[serde(default)]
    pinned: bool,
    first_detected: Timestamp,
    #[serde(default)]
    last_used: Option<Timestamp>,
}

#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageGcOutput {
    usage_percent: Option<u8>,
    bytes_to_free: Option<i64>,
    removed: Vec<String>,
    freed_bytes: u64,
    events: Vec<Event>,
    error: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    why: Vec<String>,
}

impl From<Outcome> for ImageGcOutput {
    fn from(outcome: Outcome) -> Self {
        Self {
            usage_percent: outcome.usage_percent,
            bytes_to_free: outcome.bytes_to_free,
            removed: outcome.removed,
            freed_bytes: outcome.freed_bytes,
            events: outcome.events,
            error: outcome.error,
            why: outcome.why,
        }
    }
}

impl Scenario for ImageGcScenario {
    type Output = ImageGcOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<ImageGcOutput, FieldError> {
        let ages = (self.policy.min_age.unwrap_or_default(), self.policy.max_age.unwrap_or_default());
        let policy = match ImageGcPolicy::new(self.policy.high, self.policy.low, ages.0, ages.1) {
            Ok(policy) => policy,
            Err(error) => {
                return Ok(ImageGcOutput { error: Some(error.to_string()), ..ImageGcOutput::default() });
            }
        };
        let records = self.records()?;
        let in_use: HashSet<&str> =
            self.in_use.iter().chain(&self.sandbox_image).map(String::as_str).collect();
        let stuck: HashSet<&str> = self.fail_remove.iter().map(String::as_str).collect();
        let mode = if self.delete_all_unused {
            CollectionMode::AllUnused
        } else {
            CollectionMode::Policy { began: self.began_gc }
        };
        let mut run = Collection::new(&policy, mode, self.now, &records, &in_use);
        loop {
            match run.step() {
                CollectionStep::Remove(image, _) if stuck.contains(image.id.as_str()) => {
                    run.failed("the runtime refuses to remove it");
                }
                CollectionStep::Remove(image, _) => run.removed(image.size_bytes),
                CollectionStep::Measure => run.measured(FsUsage {
                    capacity_bytes: self.fs.capacity_bytes,
                    available_bytes: self.fs.available_bytes,
                }),
                CollectionStep::Done => return Ok(run.outcome().into()),
            }
        }
    }
}

impl ImageGcScenario {
    fn records(&self) -> Result<Vec<ImageRecord>, FieldError> {
        let mut seen = HashSet::new();
        let record = |(i, image): (usize, &Image)| {
            if !seen.insert(image.id.clone()) {
                return Err(FieldError::new(
                    format!("images[{i}].id"),
                    format!("{:?} is there twice", image.id),
                ));
            }
            Ok(ImageRecord {
                id: image.id.clone(),
                size_bytes: image.size_bytes,
                pinned: image.pinned,
                first_detected: Some(image.first_detected),
                last_used: image.last_used,
            })
        };
        self.images.iter().enumerate().map(record).collect()
    }
}
