use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

/// A pod whose kernel takes cold pages first. The pod reads all hot pages in each interval, and stalls for
/// those that the kernel took.
#[derive(Debug, Clone)]
struct Simulated {
    hot: u64,
    cold: u64,
    /// Hot bytes that were taken since the last interval.
    missing: u64,
    refaulted: u64,
    stalled: Duration,
    /// Hot bytes taken in all.
    harm: u64,
}

impl Simulated {
    fn new(hot: u64, cold: u64) -> Self {
        Self { hot, cold, missing: 0, refaulted: 0, stalled: Duration::ZERO, harm: 0 }
    }

    fn usage(&self) -> u64 {
        self.hot + self.cold - self.missing
    }

    fn sample(&self, cgroup: &str, class: QosClass) -> ColdSample {
        ColdSample {
            cgroup: cgroup.to_owned(),
            class,
            usage: self.usage(),
            clean_file: self.usage(),
            anon: 0,
            may_swap: true,
            refaulted: self.refaulted,
            stalled: self.stalled,
        }
    }

    fn reclaim(&mut self, bytes: u64) -> u64 {
        let cold = bytes.min(self.cold);
        let hot = (bytes - cold).min(self.hot - self.missing);
        self.cold -= cold;
        self.missing += hot;
        self.harm += hot;
        cold + hot
    }

    /// Lets an interval pass. A disk reads a MiB in 5 ms.
    fn run(&mut self) {
        self.refaulted += self.missing;
        self.stalled += Duration::from_micros(self.missing * 5_000 / MIB);
        self.missing = 0;
    }
}

/// A node of simulated pods.
struct Node {
    law: ColdLaw,
    state: ColdState,
    now: Moment,
    pods: Vec<Simulated>,
}

impl Node {
    fn new(law: ColdLaw, pods: Vec<Simulated>) -> Self {
        Self { law, state: ColdState::default(), now: Moment::default(), pods }
    }

    /// Runs one interval; returns the steps.
    fn tick(&mut self) -> Vec<ColdStep> {
        let name = |index: usize| format!("/kubepods/pod{index}");
        let samples = self.pods.iter().enumerate();
        let pods = samples.map(|(index, pod)| pod.sample(&name(index), QosClass::Burstable)).collect();
        let steps = self.state.decide(&self.law, self.now, &ColdSeen { pods, ..ColdSeen::default() });
        for step in &steps {
            let pod = (0..self.pods.len()).find(|index| name(*index) == step.cgroup).unwrap();
            let taken = self.pods[pod].reclaim(step.bytes);
            self.state.took(&self.law, self.now, &step.cgroup, taken);
        }
        self.pods.iter_mut().for_each(Simulated::run);
        self.now = self.now.plus(self.law.interval);
        steps
    }

    fn run(&mut self, time: Duration) {
        for _ in 0..time.as_secs() / self.law.interval.as_secs() {
            self.tick();
        }
    }
}

fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(60 * minutes)
}

#[test]
fn an_idle_pod_gives_back_its_cold_memory_and_keeps_the_rest() {
    let mut node = Node::new(ColdLaw::default(), vec![Simulated::new(700 * MIB, 300 * MIB)]);
    node.run(minutes(10));
    let early = node.pods[0].usage();
    assert!(early < 850 * MIB, "15 % within ten minutes: {} MiB are left", early / MIB);
    node.run(minutes(110));
    let pod = &node.pods[0];
    assert_eq!((pod.cold, pod.usage()), (0, 700 * MIB));
    assert!(pod.harm < 20 * MIB, "{} MiB were read again", pod.harm / MIB);
    let (_, effect) = node.state.effects().next().unwrap();
    assert_eq!(effect.given_back, 300 * MIB + pod.harm);
}

#[test]
fn memory_that_a_pod_reads_again_late_counts_and_never_more_than_was_taken() {
    let mut node = Node::new(ColdLaw::default(), vec![Simulated::new(700 * MIB, 300 * MIB)]);
    let effect = |node: &Node| node.state.effects().next().unwrap().1;
    node.run(minutes(4));
    let before = effect(&node);
    assert!(before.given_back > 10 * MIB && before.read_again == 0, "{before:?}");
    // After a stall no step follows for a while.
    node.pods[0].stalled += node.law.interval;
    node.tick();
    node.pods[0].refaulted += 10 * MIB;
    node.tick();
    assert_eq!(effect(&node), ColdEffect { read_again: 10 * MIB, ..before });
    node.pods[0].refaulted += 1000 * MIB;
    node.tick();
    assert_eq!(effect(&node).read_again, effect(&node).given_back);
}

#[test]
fn steps_become_rare_and_small_at_the_working_set() {
    let mut node = Node::new(ColdLaw::default(), vec![Simulated::new(1000 * MIB, 0)]);
    node.run(minutes(24 * 60));
    let pod = &node.pods[0];
    // Nearly all back-offs are of 80 minutes or more.
    assert!(pod.harm < 50 * MIB, "{} MiB in a day", pod.harm / MIB);
}

#[test]
fn a_new_a_growing_and_a_small_pod_are_left_alone() {
    let law = ColdLaw::default();
    let mut node =
        Node::new(law, vec![Simulated::new(100 * MIB, 100 * MIB), Simulated::new(10 * MIB, 50 * MIB)]);
    for _ in 0..law.settle.as_secs() / law.interval.as_secs() {
        assert_eq!(node.tick(), []);
    }
    let steps = node.tick();
    assert_eq!(steps.len(), 1, "the small pod is at the floor: {steps:?}");
    for _ in 0..30 {
        node.pods[0].hot += 10 * MIB;
        assert_eq!(node.tick(), []);
    }
}

#[test]
fn a_pod_that_waits_for_memory_is_left_alone() {
    let law = ColdLaw::default();
    let mut node = Node::new(law, vec![Simulated::new(100 * MIB, 900 * MIB)]);
    node.run(minutes(2));
    node.pods[0].stalled += law.interval / 500;
    let until = node.now.plus(law.back_off);
    while node.now < until {
        assert_eq!(node.tick(), []);
    }
    assert_eq!(node.tick().len(), 1);
}

#[test]
fn pods_without_requests_give_first_and_the_budget_is_for_all() {
    let law = ColdLaw { bytes_per_second: MIB, step_permille: 1000, ..ColdLaw::default() };
    let mut state = ColdState::default();
    let pod = |name: &str, class| Simulated::new(0, 100 * MIB).sample(name, class);
    let pods = vec![pod("/a", QosClass::Guaranteed), pod("/b", QosClass::BestEffort)];
    let seen = ColdSeen { pods, ..ColdSeen::default() };
    let mut steps = Vec::new();
    for tick in 0..7 {
        steps = state.decide(&law, Moment::after_start(law.interval * tick), &seen);
    }
    // The budget of ten seconds.
    assert_eq!(steps, [ColdStep { cgroup: "/b".to_owned(), bytes: 10 * MIB, may_swap: false }]);
}

#[test]
fn anonymous_memory_moves_only_to_swap_with_room_and_within_the_budget_of_writes() {
    #[track_caller]
    fn check(free_swap: u64, written_per_second: u64, expected: Option<bool>) {
        let law = ColdLaw::default();
        let mut state = ColdState::default();
        let mut steps = Vec::new();
        for tick in 0..8 {
            let pod = ColdSample {
                anon: 500 * MIB,
                clean_file: 0,
                ..Simulated::new(500 * MIB, 0).sample("/a", QosClass::Burstable)
            };
            let swapped_out = written_per_second * 10 * u64::from(tick);
            let seen = ColdSeen { pods: vec![pod], free_swap, swapped_out };
            steps = state.decide(&law, Moment::after_start(law.interval * tick), &seen);
        }
        assert_eq!(steps.first().map(|step| step.may_swap), expected);
    }
    check(1000 * MIB, 0, Some(true));
    check(1000 * MIB, MIB / 2, Some(true));
    check(1000 * MIB, 2 * MIB, None);
    check(9 * MIB, 0, None);
    check(0, 0, None);
}

#[test]
fn a_step_is_a_share_of_the_memory_that_the_pod_may_lose() {
    #[track_caller]
    fn check(may_swap: bool, expected: u64) {
        let law = ColdLaw::default();
        let mut state = ColdState::default();
        let mut steps = Vec::new();
        for tick in 0..8 {
            let pod = ColdSample {
                clean_file: 100 * MIB,
                anon: 800 * MIB,
                may_swap,
                ..Simulated::new(1000 * MIB, 0).sample("/a", QosClass::Burstable)
            };
            let seen = ColdSeen { pods: vec![pod], free_swap: 1000 * MIB, swapped_out: 0 };
            steps = state.decide(&law, Moment::after_start(law.interval * tick), &seen);
        }
        assert_eq!(steps, [ColdStep { cgroup: "/a".to_owned(), bytes: expected, may_swap }]);
    }
    check(false, MIB);
    check(true, 9 * MIB);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_schedule_exceeds_the_budget_the_floor_or_one_step_per_back_off(
        pods in prop::collection::vec((1..2000_u64, 0..2000_u64), 1..4),
        changes in prop::collection::vec((0..4_usize, -300..300_i64), 0..20),
    ) {
        let law = ColdLaw::default();
        let pods = pods.into_iter().map(|(hot, cold)| Simulated::new(hot * MIB, cold * MIB)).collect();
        let mut node = Node::new(law, pods);
        for (index, change) in changes.into_iter().chain([(0, 0); 5]) {
            if let Some(pod) = node.pods.get_mut(index) {
                // Memory becomes hot or cold.
                if change > 0 {
                    pod.hot += change.unsigned_abs() * MIB;
                } else {
                    let colder = (change.unsigned_abs() * MIB).min(pod.hot - pod.missing);
                    (pod.hot, pod.cold) = (pod.hot - colder, pod.cold + colder);
                }
            }
            for _ in 0..60 {
                let before: Vec<u64> = node.pods.iter().map(Simulated::usage).collect();
                let steps = node.tick();
                let all: u64 = steps.iter().map(|step| step.bytes).sum();
                prop_assert!(all <= amount(law.bytes_per_second, law.interval));
                for step in steps {
                    let index: usize = step.cgroup.trim_start_matches("/kubepods/pod").parse().unwrap();
                    prop_assert!(before[index] - step.bytes >= law.floor);
                    prop_assert!(step.bytes <= part(before[index], 10, 1000).max(LEAST));
                }
            }
        }
        let back_offs = node.now.since(Moment::default()).as_secs() / law.back_off.as_secs() + 1;
        for pod in &node.pods {
            let step = part(pod.hot + 6000 * MIB, 10, 1000);
            prop_assert!(pod.harm <= 2 * back_offs * step, "{pod:?}");
        }
    }

    #[test]
    fn no_numbers_overflow(
        samples in prop::collection::vec((any::<u32>(), any::<[u64; 7]>()), 1..20),
    ) {
        let (law, mut state, mut now) = (ColdLaw::default(), ColdState::default(), Moment::default());
        for (pause, [usage, clean_file, anon, refaulted, stalled, free_swap, swapped_out]) in samples {
            now = now.plus(Duration::from_millis(u64::from(pause)));
            let stalled = Duration::from_micros(stalled);
            let pod = ColdSample {
                cgroup: "/a".to_owned(), class: QosClass::Burstable, usage, clean_file, anon,
                may_swap: refaulted < anon, refaulted, stalled,
            };
            for step in state.decide(&law, now, &ColdSeen { pods: vec![pod], free_swap, swapped_out }) {
                prop_assert!(step.bytes <= usage);
                state.took(&law, now, &step.cgroup, u64::MAX);
            }
        }
    }
}
