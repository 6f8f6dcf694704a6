//! Choice and order of the images to remove: the kubelet's image garbage collection
//! (`pkg/kubelet/images/image_gc_manager.go`, KEP-4210 for the maximum age).
//!
//! [`Collection`] is a state machine: it names one image at a time; its driver removes the image and reports
//! the result. So `plan` (which sums sizes) and the daemon (which checks again whether the image is in use,
//! removes it and *measures* the freed space) make the same decisions. Must never remove anything itself, and
//! never name an image that is in use, pinned, or younger than the minimum age.

use beelet_units::{duration, fs_usage::FsUsage};
use std::{
    collections::{BTreeMap, HashSet},
    hash::BuildHasher,
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// Thresholds of collection, and the images to spare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGcPolicy {
    high_percent: u8,
    low_percent: u8,
    min_age: Duration,
    max_age: Option<Duration>,
}

/// An error in a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// The threshold is not a percentage.
    #[error("{field} is {percent}: it must be a percentage between 0 and 100")]
    OutOfRange {
        /// The name of the configuration's field.
        field: &'static str,
        /// The field's value.
        percent: i64,
    },
    /// Collection would have to end above its start.
    #[error(
        "imageGCLowThresholdPercent is {low}: it must not be above imageGCHighThresholdPercent, which is {high}"
    )]
    LowAboveHigh {
        /// The low threshold in percent.
        low: i64,
        /// The high threshold in percent.
        high: i64,
    },
}

impl ImageGcPolicy {
    /// Creates a checked policy. `high` and `low` are percentages of the filesystem in use; collection starts
    /// at or above `high` and frees down to `low`. A `max_age` of zero disables removal by age alone.
    ///
    /// # Errors
    /// If a percentage isn't between 0 and 100, or `low` is above `high`.
    pub fn new(high: i64, low: i64, min_age: Duration, max_age: Duration) -> Result<Self, PolicyError> {
        let percent = |field, percent: i64| {
            u8::try_from(percent).ok().filter(|p| *p <= 100).ok_or(PolicyError::OutOfRange { field, percent })
        };
        let high_percent = percent("imageGCHighThresholdPercent", high)?;
        let low_percent = percent("imageGCLowThresholdPercent", low)?;
        if low_percent > high_percent {
            return Err(PolicyError::LowAboveHigh { low, high });
        }
        let max_age = Some(max_age).filter(|age| !age.is_zero());
        Ok(Self { high_percent, low_percent, min_age, max_age })
    }

    /// Returns the maximum time that an image may stay unused; `None` disables removal by age alone.
    #[must_use]
    pub fn max_age(&self) -> Option<Duration> {
        self.max_age
    }

    /// Returns the time from which ages count at `now`, for [`CollectionMode::Policy`]. `first` is the time
    /// at which collection began on this machine, and `up` the time since this agent started. A freshly
    /// started agent removes no image for its age alone: within one `period` of detection (or the maximum
    /// age, if that is shorter) it will see the images used since its predecessor's last detection.
    #[must_use]
    pub fn began(
        &self,
        first: Option<Timestamp>,
        up: Duration,
        period: Duration,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let patience = self.max_age.unwrap_or_default().min(period);
        if up <= patience { Some(now) } else { first }
    }
}

/// State kept of an image on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageRecord {
    /// The image's id (`sha256:...`).
    pub id: String,
    /// Size reported by the runtime, in bytes; layers shared with other images count in each.
    #[serde(default)]
    pub size_bytes: u64,
    /// True if the runtime asks to keep the image.
    #[serde(default)]
    pub pinned: bool,
    /// Time of the first detection; `None` if the image was present at the first detection of all, and so
    /// counts as old at once.
    #[serde(default)]
    pub first_detected: Option<Timestamp>,
    /// Time at which a container was last seen using the image; `None` for never, which sorts before any
    /// time.
    #[serde(default)]
    pub last_used: Option<Timestamp>,
}

/// An image as the runtime lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedImage<'a> {
    /// The image's id.
    pub id: &'a str,
    /// The image's size in bytes.
    pub size_bytes: u64,
    /// True if the runtime asks to keep the image.
    pub pinned: bool,
}

/// Updates the records to the runtime's list (the kubelet's `detectImages`): new images are first detected
/// now, those in use are last used now, missing ones are dropped. `first` marks the first detection of all,
/// when the images' ages are unknown.
pub fn detect<'a, S: BuildHasher>(
    records: &mut BTreeMap<String, ImageRecord>,
    listed: impl IntoIterator<Item = ListedImage<'a>>,
    in_use: &HashSet<&str, S>,
    now: Timestamp,
    first: bool,
) {
    let mut known = std::mem::take(records);
    for image in listed {
        let mut record = known.remove(image.id).unwrap_or_else(|| ImageRecord {
            id: image.id.to_owned(),
            size_bytes: 0,
            pinned: false,
            first_detected: (!first).then_some(now),
            last_used: None,
        });
        record.size_bytes = image.size_bytes;
        record.pinned = image.pinned;
        if in_use.contains(image.id) {
            record.last_used = Some(now);
        }
        records.insert(record.id.clone(), record);
    }
}

/// Moves recorded times by `step`, the change of the wall clock since they were written, so that ages stay
/// the same. A time still in the future becomes `now`: the clock was set while the agent was down, and the
/// image would be too young for removal until the clock caught up.
pub fn follow_clock<'a>(
    times: impl IntoIterator<Item = &'a mut Timestamp>,
    step: SignedDuration,
    now: Timestamp,
) {
    for time in times {
        *time = time.saturating_add(step).unwrap_or(*time).min(now);
    }
}

/// The mode of a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectionMode {
    /// By the policy: first images past their maximum age, then, if the filesystem is too full, further
    /// images until it is not.
    Policy {
        /// Time at which garbage collection began; no image is removed for its age alone until the maximum
        /// age has passed since then (earlier use is unknown). `None`: long ago.
        began: Option<Timestamp>,
    },
    /// Every image that is unused and not too young, regardless of the filesystem's state (the answer to disk
    /// pressure).
    AllUnused,
}

/// The reason for removing an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The image was unused for longer than the maximum age.
    Age,
    /// The filesystem needs the space.
    Space,
}

/// The next task of a [`Collection`]'s driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectionStep<'a> {
    /// Remove this image, then call [`Collection::removed`], [`Collection::failed`] or
    /// [`Collection::spared`].
    Remove(&'a ImageRecord, Reason),
    /// Measure the filesystem, then call [`Collection::measured`].
    Measure,
    /// Nothing; take the [`Collection::outcome`].
    Done,
}

/// An event of the node, in the kubelet's words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    /// `Warning`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// `InvalidDiskCapacity` or `FreeDiskSpaceFailed`.
    pub reason: &'static str,
    /// The event's message.
    pub message: String,
}

/// The result of a collection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Usage of the filesystem in percent; `None` if it was not measured.
    pub usage_percent: Option<u8>,
    /// Bytes to free; may be negative (the first eligible image is removed all the same). `None` if none had
    /// to be freed.
    pub bytes_to_free: Option<i64>,
    /// Removed images, in order.
    pub removed: Vec<String>,
    /// Bytes freed by all removals, for either reason.
    pub freed_bytes: u64,
    /// Events of the node.
    pub events: Vec<Event>,
    /// The failure, if any.
    pub error: Option<String>,
    /// Explanations of the decision.
    pub why: Vec<String>,
}

enum Phase {
    Age {
        next: usize,
    },
    Measure,
    /// `sizes` is the sum of the removed images' sizes as the runtime reports them.
    Space {
        next: usize,
        to_free: i64,
        freed: i64,
        sizes: i64,
    },
    Done,
}

/// A run of garbage collection, one step at a time.
///
/// ```
/// use std::collections::HashSet;
/// use std::time::Duration;
/// use beelet_policy::images::gc::*;
/// use beelet_units::fs_usage::FsUsage;
///
/// let policy = ImageGcPolicy::new(85, 80, Duration::from_secs(120), Duration::ZERO)?;
/// let old = ImageRecord {
///     id: "old".into(),
///     size_bytes: 7,
///     pinned: false,
///     first_detected: None,
///     last_used: None,
/// };
/// let (now, none) = ("2026-11-21T12:00:00Z".parse()?, HashSet::<&str>::new());
/// let images = [old];
/// let mode = CollectionMode::Policy { began: None };
/// let mut run = Collection::new(&policy, mode, now, &images, &none);
/// assert_eq!(run.step(), CollectionStep::Measure);
/// run.measured(FsUsage { capacity_bytes: 100, available_bytes: 14 });
/// assert!(matches!(run.step(), CollectionStep::Remove(image, Reason::Space) if image.id == "old"));
/// run.removed(7);
/// assert_eq!(run.step(), CollectionStep::Done);
/// assert_eq!(run.outcome().removed, ["old"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Collection<'a> {
    policy: ImageGcPolicy,
    now: Timestamp,
    mode: CollectionMode,
    /// Unused and unpinned images, in the order of removal.
    order: Vec<&'a ImageRecord>,
    gone: Vec<bool>,
    phase: Phase,
    failures: Vec<String>,
    fs: Option<(u8, u64)>,
    outcome: Outcome,
}

impl<'a> Collection<'a> {
    /// Creates a run over `images` that spares those in `in_use` (ids; image volumes and the sandbox image
    /// included).
    #[must_use]
    pub fn new<S: BuildHasher>(
        policy: &ImageGcPolicy,
        mode: CollectionMode,
        now: Timestamp,
        images: &'a [ImageRecord],
        in_use: &HashSet<&str, S>,
    ) -> Self {
        let mut order: Vec<&ImageRecord> =
            images.iter().filter(|image| !image.pinned && !in_use.contains(image.id.as_str())).collect();
        // `None` sorts first: images never used come first, and those present from the start before those
        // detected later.
        order.sort_by_key(|image| (image.last_used, image.first_detected, image.id.as_str()));
        let (phase, outcome) = match mode {
            CollectionMode::Policy { .. } => (Phase::Age { next: 0 }, Outcome::default()),
            CollectionMode::AllUnused => {
                (Phase::Space { next: 0, to_free: i64::MAX, freed: 0, sizes: 0 }, Outcome::default())
            }
        };
        let gone = vec![false; order.len()];
        Self { policy: *policy, now, mode, order, gone, phase, failures: Vec::new(), fs: None, outcome }
    }

    /// Returns the next step. A repeated call without an answer returns the same step.
    pub fn step(&mut self) -> CollectionStep<'a> {
        if let Phase::Age { next } = self.phase {
            match self.next_for_age(next) {
                Some(next) => {
                    self.phase = Phase::Age { next };
                    return CollectionStep::Remove(self.order[next], Reason::Age);
                }
                None => self.end_age(),
            }
        }
        if let Phase::Space { next, to_free, freed, sizes } = self.phase {
            match (next..self.order.len()).find(|i| !self.gone[*i] && self.may_go_for_space(self.order[*i])) {
                Some(next) => {
                    self.phase = Phase::Space { next, to_free, freed, sizes };
                    return CollectionStep::Remove(self.order[next], Reason::Space);
                }
                None => self.end_space(to_free, freed),
            }
        }
        match self.phase {
            Phase::Measure => CollectionStep::Measure,
            _ => CollectionStep::Done,
        }
    }

    /// Records that the image of the last step was removed and freed this many bytes.
    ///
    /// A run for space ends once the freed bytes suffice, and at the latest when the sum of the images' sizes
    /// does, which is the kubelet's measure: next to a fast writer, or where space is freed late (btrfs, the
    /// inode collector of XFS, discard), the measured bytes stay near zero, and every unused image would be
    /// removed in vain. Where images share layers, the next run continues.
    pub fn removed(&mut self, freed_bytes: u64) {
        if let Some(index) = self.advance() {
            self.gone[index] = true;
            self.outcome.removed.push(self.order[index].id.clone());
            self.outcome.freed_bytes = self.outcome.freed_bytes.saturating_add(freed_bytes);
            if let Phase::Space { to_free, freed, sizes, .. } = &mut self.phase {
                *freed = freed.saturating_add_unsigned(freed_bytes);
                *sizes = sizes.saturating_add_unsigned(self.order[index].size_bytes);
                let (to_free, counted) = (*to_free, *freed.max(sizes));
                if counted >= to_free {
                    self.end_space(to_free, counted);
                }
            }
        }
    }

    /// Records that the runtime could not remove the image of the last step.
    pub fn failed(&mut self, message: &str) {
        if let Some(index) = self.advance() {
            self.failures.push(format!("{}: {message}", self.order[index].id));
        }
    }

    /// Records that the image of the last step turned out to be in use.
    pub fn spared(&mut self) {
        if let Some(index) = self.advance() {
            self.gone[index] = true;
        }
    }

    /// Records the filesystem's state after [`CollectionStep::Measure`].
    pub fn measured(&mut self, fs: FsUsage) {
        if !matches!(self.phase, Phase::Measure) {
            return;
        }
        let Some(disk) = Disk::of(fs) else {
            let message = "invalid capacity 0 on image filesystem".to_owned();
            self.outcome.events.push(warning("InvalidDiskCapacity", &message));
            self.outcome.error = Some(message);
            self.phase = Phase::Done;
            return;
        };
        self.fs = Some((disk.usage_percent, fs.capacity_bytes));
        self.outcome.usage_percent = Some(disk.usage_percent);
        let (high, low) = (self.policy.high_percent, self.policy.low_percent);
        if disk.usage_percent < high {
            self.outcome
                .why
                .push(format!("{}% of the filesystem is in use, below {high}%", disk.usage_percent));
            self.phase = Phase::Done;
            return;
        }
        let to_free = disk.bytes_above(low);
        self.outcome.bytes_to_free = Some(to_free);
        self.outcome.why.push(format!(
            "{}% of the filesystem is in use, at or above {high}%: {to_free} bytes must be freed to reach {low}%",
            disk.usage_percent
        ));
        self.phase = Phase::Space { next: 0, to_free, freed: 0, sizes: 0 };
    }

    /// Returns the outcome; before [`CollectionStep::Done`], the outcome so far.
    #[must_use]
    pub fn outcome(self) -> Outcome {
        self.outcome
    }

    /// Returns the index of the image of the last step; the next step starts behind it.
    fn advance(&mut self) -> Option<usize> {
        match &mut self.phase {
            Phase::Age { next } | Phase::Space { next, .. } if *next < self.order.len() => {
                *next += 1;
                Some(*next - 1)
            }
            _ => None,
        }
    }

    fn next_for_age(&self, from: usize) -> Option<usize> {
        let max_age = self.policy.max_age?;
        if let CollectionMode::Policy { began: Some(began) } = self.mode
            && older(began, self.now) <= nanos(max_age)
        {
            return None;
        }
        let past =
            |image: &ImageRecord| image.last_used.is_none_or(|used| older(used, self.now) > nanos(max_age));
        (from..self.order.len()).find(|i| past(self.order[*i]))
    }

    fn end_age(&mut self) {
        self.phase = Phase::Measure;
        if self.failures.is_empty() {
            return;
        }
        let age = duration::format(self.policy.max_age.unwrap_or_default());
        let what = self.failures.join("; ");
        self.outcome.error = Some(format!("cannot remove some images unused for longer than {age}: {what}"));
        self.phase = Phase::Done;
    }

    fn may_go_for_space(&self, image: &ImageRecord) -> bool {
        image.last_used.is_none_or(|used| used < self.now)
            && image.first_detected.is_none_or(|seen| older(seen, self.now) >= nanos(self.policy.min_age))
    }

    fn end_space(&mut self, to_free: i64, freed: i64) {
        self.phase = Phase::Done;
        if !self.failures.is_empty() {
            let what = self.failures.join("; ");
            self.outcome.error =
                Some(format!("freed {freed} of {to_free} bytes: cannot remove some images: {what}"));
            return;
        }
        if let Some((usage, capacity)) = self.fs
            && freed < to_free
        {
            let message = format!(
                "Insufficient free disk space on the node's image filesystem ({usage}% of {} used). Failed to free sufficient \
                 space by deleting unused images (freed {freed} bytes). Investigate disk usage, as it could be used by active \
                 images, logs, volumes, or other data.",
                human_size(capacity)
            );
            self.outcome.events.push(warning("FreeDiskSpaceFailed", &message));
            self.outcome.error = Some(message);
        }
    }
}

/// Usage of a filesystem, in the kubelet's arithmetic.
struct Disk {
    capacity: u128,
    available: u128,
    usage_percent: u8,
}

impl Disk {
    /// Returns `None` if the filesystem has no capacity.
    fn of(fs: FsUsage) -> Option<Self> {
        let capacity = u128::from(fs.capacity_bytes);
        let available = u128::from(fs.available_bytes).min(capacity);
        let free_percent = (available * 100).checked_div(capacity)?;
        Some(Self { capacity, available, usage_percent: 100 - u8::try_from(free_percent).unwrap_or(100) })
    }

    /// Returns the bytes to free so that no more than `percent` is in use; may be negative.
    fn bytes_above(&self, percent: u8) -> i64 {
        let wanted_free = self.capacity * (100 - u128::from(percent)) / 100;
        match wanted_free.checked_sub(self.available) {
            Some(bytes) => i64::try_from(bytes).unwrap_or(i64::MAX),
            None => i64::try_from(self.available - wanted_free).map_or(i64::MIN, |bytes| -bytes),
        }
    }
}

/// Returns the time from `then` to `now`, in nanoseconds.
fn older(then: Timestamp, now: Timestamp) -> i128 {
    now.as_nanosecond() - then.as_nanosecond()
}

fn nanos(duration: Duration) -> i128 {
    i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX)
}

fn warning(reason: &'static str, message: &str) -> Event {
    Event { kind: "Warning", reason, message: message.to_owned() }
}

/// Formats a size as `16.6 GiB`, with one decimal.
#[expect(clippy::cast_precision_loss, reason = "for display, with one decimal")]
fn human_size(bytes: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
#[path = "gc_tests.rs"]
mod tests;
