use super::*;
use proptest::prelude::*;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + seconds).unwrap()
}

fn image(id: &str, size_bytes: u64, first_detected: i64, last_used: Option<i64>) -> ImageRecord {
    ImageRecord {
        id: id.to_owned(),
        size_bytes,
        pinned: false,
        first_detected: Some(at(first_detected)),
        last_used: last_used.map(at),
    }
}

/// Runs a collection as `plan` does: removals of `stubborn` fail, a removal frees the image's size.
fn run(
    policy: &ImageGcPolicy,
    mode: CollectionMode,
    images: &[ImageRecord],
    in_use: &[&str],
    stubborn: &[&str],
    fs: FsUsage,
) -> Outcome {
    let in_use: HashSet<&str> = in_use.iter().copied().collect();
    let mut run = Collection::new(policy, mode, at(0), images, &in_use);
    loop {
        match run.step() {
            CollectionStep::Remove(image, _) if stubborn.contains(&image.id.as_str()) => run.failed("no"),
            CollectionStep::Remove(image, _) => run.removed(image.size_bytes),
            CollectionStep::Measure => run.measured(fs),
            CollectionStep::Done => return run.outcome(),
        }
    }
}

fn policy(high: i64, low: i64, min_age: u64, max_age: u64) -> ImageGcPolicy {
    ImageGcPolicy::new(high, low, Duration::from_secs(min_age), Duration::from_secs(max_age)).unwrap()
}

fn fs(capacity_bytes: u64, available_bytes: u64) -> FsUsage {
    FsUsage { capacity_bytes, available_bytes }
}

/// Checks which images are removed on a filesystem of 100 bytes, 90 of them used, with thresholds 85 and 80.
fn check(images: &[ImageRecord], in_use: &[&str], expectation: &[&str]) {
    let outcome =
        run(&policy(85, 80, 60, 0), CollectionMode::Policy { began: None }, images, in_use, &[], fs(100, 10));
    assert_eq!(outcome.removed, expectation);
}

#[test]
fn thresholds_must_be_percentages_in_order() {
    let try_policy =
        |high, low| ImageGcPolicy::new(high, low, Duration::ZERO, Duration::ZERO).map_err(|e| e.to_string());
    assert!(try_policy(100, 100).is_ok());
    assert!(try_policy(0, 0).is_ok());
    assert!(try_policy(101, 80).unwrap_err().contains("imageGCHighThresholdPercent is 101"));
    assert!(try_policy(85, -1).unwrap_err().contains("imageGCLowThresholdPercent is -1"));
    assert!(try_policy(80, 85).unwrap_err().contains("must not be above"));
}

#[test]
fn the_longest_unused_goes_first_then_the_first_seen() {
    check(&[image("b", 5, -90, Some(-10)), image("a", 5, -90, Some(-20))], &[], &["a", "b"]);
    check(&[image("b", 5, -80, None), image("a", 5, -90, None)], &[], &["a", "b"]);
    check(&[image("used", 5, -99, Some(-98)), image("never", 5, -70, None)], &[], &["never", "used"]);
}

#[test]
fn collecting_stops_when_enough_is_freed() {
    check(&[image("a", 10, -90, None), image("b", 10, -80, None)], &[], &["a"]);
}

#[test]
fn used_pinned_and_young_images_stay() {
    let pinned = ImageRecord { pinned: true, ..image("pinned", 50, -99, None) };
    check(
        &[image("used", 50, -99, None), pinned, image("young", 50, -59, None), image("old", 1, -60, None)],
        &["used"],
        &["old"],
    );
    check(&[image("just", 50, -99, Some(0))], &[], &[]);
}

#[test]
fn images_there_at_the_first_look_count_as_old_at_once() {
    let mut records = BTreeMap::new();
    let listed = |id| ListedImage { id, size_bytes: 50, pinned: false };
    detect(&mut records, [listed("there")], &HashSet::<&str>::new(), at(0), true);
    detect(&mut records, [listed("there"), listed("pulled")], &HashSet::<&str>::new(), at(0), false);
    check(&records.into_values().collect::<Vec<_>>(), &[], &["there"]);
}

#[test]
fn detection_follows_the_runtime() {
    let mut records = BTreeMap::new();
    let listed = |id, size_bytes| ListedImage { id, size_bytes, pinned: false };
    detect(&mut records, [listed("a", 1), listed("b", 1)], &HashSet::from(["a"]), at(0), false);
    detect(&mut records, [listed("a", 2), listed("c", 3)], &HashSet::from(["c"]), at(9), false);
    let seen: Vec<_> =
        records.values().map(|r| (r.id.as_str(), r.size_bytes, r.first_detected, r.last_used)).collect();
    assert_eq!(seen, [("a", 2, Some(at(0)), Some(at(0))), ("c", 3, Some(at(9)), Some(at(9)))]);
}

#[test]
fn failed_removals_do_not_stop_the_run() {
    let images = [
        image("stuck", 50, -99, None),
        image("b", 5, -90, None),
        image("c", 5, -80, None),
        image("d", 5, -70, None),
    ];
    let outcome = run(
        &policy(85, 80, 0, 0),
        CollectionMode::Policy { began: None },
        &images,
        &[],
        &["stuck"],
        fs(100, 10),
    );
    assert_eq!(outcome.removed, ["b", "c"]);
    assert!(outcome.error.unwrap().contains("stuck: no"));
    assert_eq!(outcome.events, []);
}

#[test]
fn too_little_freed_is_an_event() {
    let outcome = run(
        &policy(85, 80, 0, 0),
        CollectionMode::Policy { began: None },
        &[image("a", 1, -9, None)],
        &[],
        &[],
        fs(100, 10),
    );
    assert_eq!((outcome.usage_percent, outcome.bytes_to_free, outcome.freed_bytes), (Some(90), Some(10), 1));
    assert_eq!(outcome.events.len(), 1);
    assert_eq!(outcome.events[0].reason, "FreeDiskSpaceFailed");
    assert!(outcome.error.is_some());
}

#[test]
fn a_filesystem_without_capacity_is_an_event() {
    let outcome = run(
        &policy(85, 80, 0, 0),
        CollectionMode::Policy { began: None },
        &[image("a", 1, -9, None)],
        &[],
        &[],
        fs(0, 0),
    );
    assert_eq!(outcome.events[0].reason, "InvalidDiskCapacity");
    assert_eq!(outcome.removed, Vec::<String>::new());
}

#[test]
fn with_nothing_left_to_free_the_first_image_is_still_removed() {
    // 84.1 % used counts as 85 %, which equals the low threshold and exceeds the real usage.
    let outcome = run(
        &policy(85, 85, 0, 0),
        CollectionMode::Policy { began: None },
        &[image("a", 1, -9, None), image("b", 1, -8, None)],
        &[],
        &[],
        fs(1000, 159),
    );
    assert_eq!(outcome.bytes_to_free, Some(-9));
    assert_eq!(outcome.removed, ["a"]);
    assert_eq!(outcome.error, None);
}

#[test]
fn images_past_the_maximum_age_are_removed_regardless_of_youth_and_disk() {
    let images =
        [image("unused", 1, 0, None), image("old", 1, -9, Some(-101)), image("just", 1, -9, Some(-100))];
    let go = |began| {
        run(&policy(85, 80, 60, 100), CollectionMode::Policy { began }, &images, &[], &[], fs(100, 99))
            .removed
    };
    assert_eq!(go(None), ["unused", "old"]);
    assert_eq!(go(Some(at(-101))), ["unused", "old"]);
    assert_eq!(go(Some(at(-100))), Vec::<String>::new());
}

#[test]
fn a_freshly_started_agent_removes_no_image_for_its_age() {
    let seconds = Duration::from_secs;
    let began =
        |max_age, up| policy(85, 80, 60, max_age).began(Some(at(-900)), seconds(up), seconds(300), at(0));
    assert_eq!(began(1000, 300), Some(at(0)));
    assert_eq!(began(1000, 301), Some(at(-900)));
    // A maximum age shorter than the period bounds the delay.
    assert_eq!(began(100, 100), Some(at(0)));
    assert_eq!(began(100, 101), Some(at(-900)));
}

#[test]
fn a_failed_removal_for_age_ends_the_run_before_the_disk_is_measured() {
    let images = [image("stuck", 1, -999, None), image("b", 1, -99, None)];
    let outcome = run(
        &policy(85, 80, 0, 100),
        CollectionMode::Policy { began: None },
        &images,
        &[],
        &["stuck"],
        fs(100, 0),
    );
    assert_eq!(outcome.removed, ["b"]);
    assert_eq!(outcome.usage_percent, None);
    assert!(outcome.error.unwrap().contains("longer than 1m40s"));
}

#[test]
fn all_unused_means_all_but_the_young() {
    let images = [image("a", 1, -99, None), image("young", 1, -59, None), image("used", 1, -99, None)];
    let outcome = run(&policy(85, 80, 60, 100), CollectionMode::AllUnused, &images, &["used"], &[], fs(0, 0));
    assert_eq!(outcome.removed, ["a"]);
    assert_eq!((outcome.error, outcome.bytes_to_free), (None, None));
}

#[test]
fn measured_bytes_count_up_to_the_sizes() {
    // The run must free 10; the runtime reports smaller sizes than removal frees.
    let images = [image("a", 1, -99, None), image("b", 1, -90, None), image("c", 1, -80, None)];
    let none = HashSet::<&str>::new();
    let mut run =
        Collection::new(&policy(85, 80, 0, 0), CollectionMode::Policy { began: None }, at(0), &images, &none);
    run.step();
    run.measured(fs(100, 10));
    assert!(matches!(run.step(), CollectionStep::Remove(image, Reason::Space) if image.id == "a"));
    run.removed(3);
    assert!(matches!(run.step(), CollectionStep::Remove(image, _) if image.id == "b"));
    run.removed(7);
    assert_eq!(run.step(), CollectionStep::Done);
}

#[test]
fn a_concurrent_writer_costs_no_more_images_than_the_kubelet_would_remove() {
    let images = [image("a", 6, -99, None), image("b", 6, -90, None), image("c", 6, -80, None)];
    let none = HashSet::<&str>::new();
    let mut run =
        Collection::new(&policy(85, 80, 0, 0), CollectionMode::Policy { began: None }, at(0), &images, &none);
    run.step();
    run.measured(fs(100, 10));
    // Each removal frees 6, and a writer fills the same amount at the same time.
    for id in ["a", "b"] {
        assert!(matches!(run.step(), CollectionStep::Remove(image, _) if image.id == id));
        run.removed(0);
    }
    assert_eq!(run.step(), CollectionStep::Done);
    let outcome = run.outcome();
    assert_eq!((outcome.removed.len(), outcome.freed_bytes, outcome.error), (2, 0, None));
}

#[test]
fn an_image_found_in_use_at_the_last_moment_is_passed_over() {
    let images = [image("a", 10, -99, None), image("b", 10, -90, None)];
    let none = HashSet::<&str>::new();
    let mut run =
        Collection::new(&policy(85, 80, 0, 0), CollectionMode::Policy { began: None }, at(0), &images, &none);
    run.step();
    run.measured(fs(100, 10));
    run.step();
    run.spared();
    assert!(matches!(run.step(), CollectionStep::Remove(image, _) if image.id == "b"));
}

fn images() -> impl Strategy<Value = Vec<ImageRecord>> {
    let one = (0..40_u64, any::<bool>(), prop::option::of(-200..20_i64), prop::option::of(-200..20_i64));
    prop::collection::vec(one, 0..20).prop_map(|all| {
        let record =
            |(i, (size_bytes, pinned, first, used)): (usize, (u64, bool, Option<i64>, Option<i64>))| {
                ImageRecord {
                    id: format!("i{i:02}"),
                    size_bytes,
                    pinned,
                    first_detected: first.map(at),
                    last_used: used.map(at),
                }
            };
        all.into_iter().enumerate().map(record).collect()
    })
}

proptest! {
    #[test]
    fn never_an_image_in_use_pinned_or_too_young_for_its_space(
        images in images(), used in prop::collection::hash_set(0..20_usize, 0..8), stuck in prop::collection::hash_set(0..20_usize, 0..4),
        max_age in 0..150_u64, available in 0..100_u64, all in any::<bool>(),
    ) {
        let name = |i: &usize| format!("i{i:02}");
        let (used, stuck): (HashSet<String>, HashSet<String>) = (used.iter().map(name).collect(), stuck.iter().map(name).collect());
        let in_use: HashSet<&str> = used.iter().map(String::as_str).collect();
        let mode = if all { CollectionMode::AllUnused } else { CollectionMode::Policy { began: None } };
        let policy = policy(50, 40, 60, max_age);
        let mut run = Collection::new(&policy, mode, at(0), &images, &in_use);
        let mut asked = HashSet::new();
        loop {
            match run.step() {
                CollectionStep::Remove(image, reason) => {
                    prop_assert!(!image.pinned && !in_use.contains(image.id.as_str()));
                    prop_assert!(asked.insert((image.id.clone(), reason == Reason::Age)), "{} twice", image.id);
                    match reason {
                        Reason::Space => prop_assert!(image.first_detected.is_none_or(|t| t <= at(-60))),
                        Reason::Age => prop_assert!(image.last_used.is_none_or(|t| t < at(-max_age.cast_signed()))),
                    }
                    if stuck.contains(&image.id) { run.failed("no") } else { run.removed(image.size_bytes) }
                }
                CollectionStep::Measure => run.measured(FsUsage { capacity_bytes: 100, available_bytes: available }),
                CollectionStep::Done => break,
            }
        }
        let outcome = run.outcome();
        prop_assert!(outcome.removed.iter().all(|id| !stuck.contains(id)));
        // A second run on the remaining images, with the freed space free, removes only images that did not
        // fit the first time.
        let left: Vec<ImageRecord> = images.iter().filter(|i| !outcome.removed.contains(&i.id)).cloned().collect();
        if all {
            let stubborn: Vec<&str> = stuck.iter().map(String::as_str).collect();
            let used: Vec<&str> = in_use.iter().copied().collect();
            let again = self::run(&policy, mode, &left, &used, &stubborn, FsUsage { capacity_bytes: 100, available_bytes: available });
            prop_assert_eq!(again.removed, Vec::<String>::new());
        }
    }

    #[test]
    fn no_filesystem_breaks_the_arithmetic(capacity_bytes: u64, available_bytes: u64, low in 0..=100_i64) {
        let outcome = run(&policy(100, low, 0, 0), CollectionMode::Policy { began: None }, &[], &[], &[], FsUsage { capacity_bytes, available_bytes });
        prop_assert!(outcome.usage_percent.is_none_or(|p| p <= 100));
    }
}

#[test]
fn ages_are_what_they_were_after_the_clock_was_set() {
    let check = |step: i64, now: i64, expectation: [i64; 3]| {
        let mut times = [at(-90), at(-60), at(0)];
        follow_clock(&mut times, SignedDuration::from_secs(step), at(now));
        assert_eq!(times, expectation.map(at), "{step}");
    };
    check(0, 5, [-90, -60, 0]);
    check(3600, 3605, [3510, 3540, 3600]);
    check(-3600, -3595, [-3690, -3660, -3600]);
    // The clock was set back while the agent was down.
    check(0, -70, [-90, -70, -70]);
    check(i64::MAX, 5, [5, 5, 5]);
}
