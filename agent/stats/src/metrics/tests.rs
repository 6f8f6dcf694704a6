use super::*;

#[test]
fn a_page_has_a_metrics_help_once_and_escapes_labels() {
    let mut page = Page::default();
    let metric = ("container_x", Kind::Gauge, "An x");
    page.sample(metric, &[("pod", "a\\b\"c\nd"), ("namespace", "n")], 1.5, Some(1_000));
    page.sample(metric, &[], 2.0, None);
    let pod = LabelText::new(&[("pod", "p"), ("namespace", "n")]);
    page.sample_of(metric, &pod, &[], 3.0, None);
    page.sample_of(metric, &pod, &[("cpu", "total")], 4.0, None);
    let expected = "# HELP container_x An x\n# TYPE container_x gauge\ncontainer_x{pod=\"a\\\\b\\\"c\\nd\",namespace=\"n\"} 1.5 1000\ncontainer_x 2\n\
                    container_x{pod=\"p\",namespace=\"n\"} 3\ncontainer_x{pod=\"p\",namespace=\"n\",cpu=\"total\"} 4\n";
    assert_eq!(page.finish(), expected);
}

#[test]
fn the_histogram_has_few_buckets_and_loses_no_wait() {
    let counts: [u64; WAIT_BUCKETS] = std::array::from_fn(|bucket| bucket as u64 + 1);
    let buckets = buckets(&counts);
    assert_eq!(buckets.len(), WAIT_BUCKETS / 2 + 1);
    assert_eq!(buckets.iter().map(|(_, count)| count).sum::<u64>(), counts.iter().sum::<u64>());
    assert!(buckets.is_sorted_by(|a, b| a.0 < b.0), "{buckets:?}");
    assert!((buckets[0].0 - 1.024e-6).abs() < 1e-12 && buckets[WAIT_BUCKETS / 2].0.is_infinite());
}

#[test]
fn names_follow_the_conventions() {
    for metric in CADVISOR.iter().chain(KERNEL) {
        // The only name of cAdvisor that does not follow them.
        let counts = metric.name.ends_with("_total") || metric.name == "container_memory_failcnt";
        assert_eq!(metric.kind == Kind::Counter, counts, "{metric:?}");
        assert!(metric.help.starts_with(char::is_uppercase) && !metric.help.ends_with('.'), "{metric:?}");
    }
}
