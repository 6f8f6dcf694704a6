//! Benches of garbage collection. Bounds: image GC over 10,000 images 10 ms, container GC over 33,000
//! containers 100 ms.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::{
    collections::{BTreeMap, HashSet},
    hint::black_box,
    time::Duration,
};

use beelet_policy::images::{
    containers::{ContainerGcPolicy, ContainerRecord, ContainerState, PodState, removable_containers},
    gc::{Collection, CollectionMode, CollectionStep, ImageGcPolicy, ImageRecord, ListedImage, detect},
};
use beelet_units::fs_usage::FsUsage;
use bench::Numbers;
use criterion::{Criterion, criterion_group, criterion_main};
use jiff::Timestamp;

const IMAGES: usize = 10_000;
const CONTAINERS: usize = 33_000;

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_secs(1_760_000_000)
}

fn ago(seconds: u64) -> Timestamp {
    now() - Duration::from_secs(seconds)
}

fn images() -> Vec<ImageRecord> {
    let mut numbers = Numbers::new(1);
    let record = |i| ImageRecord {
        id: format!("sha256:{:064x}", numbers.below(u64::MAX)),
        size_bytes: numbers.below(1 << 30),
        pinned: i % 500 == 0,
        first_detected: Some(ago(numbers.below(1_000_000))),
        last_used: (i % 3 != 0).then(|| ago(numbers.below(1_000_000))),
    };
    (0..IMAGES).map(record).collect()
}

/// Runs a whole collection, which removes every image that may be removed.
fn collect(policy: &ImageGcPolicy, images: &[ImageRecord], in_use: &HashSet<&str>) -> usize {
    let mut run = Collection::new(policy, CollectionMode::Policy { began: None }, now(), images, in_use);
    loop {
        match run.step() {
            CollectionStep::Remove(image, _) => run.removed(image.size_bytes),
            CollectionStep::Measure => run.measured(FsUsage { capacity_bytes: 1 << 50, available_bytes: 0 }),
            CollectionStep::Done => return run.outcome().removed.len(),
        }
    }
}

fn image_gc(c: &mut Criterion) {
    let images = images();
    let in_use: HashSet<&str> = images.iter().step_by(100).map(|image| image.id.as_str()).collect();
    let policy = ImageGcPolicy::new(85, 80, Duration::from_secs(120), Duration::ZERO);
    let Ok(policy) = policy else { return };
    c.bench_function("image GC over 10,000 images", |b| {
        b.iter(|| collect(&policy, black_box(&images), &in_use));
    });
    let known: BTreeMap<String, ImageRecord> =
        images.iter().map(|image| (image.id.clone(), image.clone())).collect();
    let listed = || {
        images.iter().map(|image| ListedImage {
            id: &image.id,
            size_bytes: image.size_bytes,
            pinned: image.pinned,
        })
    };
    c.bench_function("image detection over 10,000 images", |b| {
        b.iter_batched_ref(
            || known.clone(),
            |records| detect(records, listed(), &in_use, now(), false),
            criterion::BatchSize::LargeInput,
        );
    });
}

fn container_gc(c: &mut Criterion) {
    let mut numbers = Numbers::new(2);
    let ids: Vec<String> = (0..CONTAINERS).map(|i| format!("{i:064x}")).collect();
    let pods: Vec<String> = (0..2_000).map(|i| format!("00000000-0000-0000-0000-{i:012}")).collect();
    let names = ["app", "proxy", "init"];
    let mut index = |end: usize| usize::try_from(numbers.below(end as u64)).unwrap_or(0);
    let places: Vec<(usize, usize, u64)> =
        ids.iter().map(|_| (index(2_000), index(3), index(9_999) as u64)).collect();
    let containers: Vec<ContainerRecord<'_>> = ids
        .iter()
        .zip(&places)
        .map(|(id, (pod, name, age))| ContainerRecord {
            id,
            pod_uid: &pods[*pod],
            name: names[*name],
            attempt: 0,
            created_at: ago(*age),
            state: ContainerState::Exited,
            pod_state: if pod % 10 == 0 { PodState::Deleted } else { PodState::Running },
        })
        .collect();
    let policy = ContainerGcPolicy {
        min_age: Duration::from_secs(60),
        max_per_pod_container: 1,
        max_containers: 1_000,
    };
    c.bench_function("container GC over 33,000 containers", |b| {
        b.iter(|| removable_containers(&policy, now(), false, black_box(&containers)));
    });
}

criterion_group!(benches, image_gc, container_gc);
criterion_main!(benches);
