//! Tests of the decisions of a hand-over.

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const ALL: Sources = Sources { api: true, manifests: true };

fn sandbox(maker: Maker) -> FoundSandbox {
    FoundSandbox { ready: true, created_at: 100, maker }
}

fn container(name: &str, maker: Maker, hash: &str) -> FoundContainer {
    FoundContainer {
        name: name.to_owned(),
        attempt: 0,
        running: true,
        maker,
        hash: Some(hash.to_owned()),
        exit_code: None,
    }
}

fn found(source: Source, sandboxes: &[Maker], containers: &[FoundContainer]) -> Found {
    Found {
        uid: "u1".to_owned(),
        namespace: "default".to_owned(),
        name: "web".to_owned(),
        source,
        sandboxes: sandboxes.iter().copied().map(sandbox).collect(),
        containers: containers.to_vec(),
    }
}

fn pod(containers: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": {"containers": containers}})).unwrap()
}

fn wanted(pod: &Pod) -> Wanted<'_> {
    Wanted { pod, changed: None, uid_in_manifest: false, has_folder: true, places: Places::default() }
}

#[test]
fn the_digest_is_the_kubelets() {
    // The value of TestHashContainer in pkg/kubelet/container/helpers_test.go of 1.36.
    assert_eq!(container_hash("test_container", "foo/image:v1"), 0x8e45_cbd0);
    // And of TestHashContainerWithoutResources.
    assert_eq!(container_hash_of("foo", "bar"), "11a6d6d6");
    assert_ne!(container_hash("a", "<b>"), container_hash("a", "b"));
}

#[test]
fn a_pod_is_adopted_only_on_request_and_from_a_source_that_the_agent_has() {
    use Maker::{Beelet, Kubelet};
    let check = |source, sandboxes: &[Maker], makers: &[Maker], requested, sources, expected: Adoption| {
        let containers: Vec<_> = makers.iter().map(|maker| container("main", *maker, "1")).collect();
        let found = found(source, sandboxes, &containers);
        assert_eq!(adoption(&found, requested, sources), expected, "{found:?} {requested}");
    };
    let left = Adoption::LeftAlone;
    check(Source::Unnamed, &[Beelet], &[Beelet], false, ALL, Adoption::Own);
    check(Source::Api, &[Kubelet], &[Kubelet], false, ALL, left(LeftAlone::NotRequested));
    check(Source::Api, &[Kubelet], &[Kubelet], true, ALL, Adoption::Adopted);
    check(Source::File, &[Kubelet], &[Kubelet], true, ALL, Adoption::Adopted);
    let (api, files) = (Sources { api: true, manifests: false }, Sources { api: false, manifests: true });
    check(Source::Api, &[Kubelet], &[Kubelet], true, files, left(LeftAlone::NoApiServer));
    check(Source::File, &[Kubelet], &[], true, api, left(LeftAlone::NoManifests));
    // crictl and other programs may write the labels, but no source.
    check(Source::Unnamed, &[Kubelet], &[Kubelet], true, ALL, left(LeftAlone::UnknownSource));
    check(Source::Other, &[Kubelet], &[], true, ALL, left(LeftAlone::UnknownSource));
    // A kubelet restarted a container in a sandbox of the agent.
    check(Source::Unnamed, &[Beelet], &[Beelet, Kubelet], false, files, Adoption::Divided);
    check(Source::Unnamed, &[Beelet], &[Beelet, Kubelet], true, files, Adoption::Adopted);
    // The agent restarted a container in an adopted sandbox, and the record of the adoption is lost.
    check(Source::Api, &[Kubelet], &[Kubelet, Beelet], false, files, Adoption::Divided);
}

#[test]
fn a_check_names_each_container_that_the_next_agent_would_restart() {
    use Maker::{Beelet, Kubelet};
    let current = container_hash_of("main", "x:1");
    let old_beelet = "0123456789abcdef";
    let check = |source, maker, hash: &str, next, expected: &[Reason]| {
        let found = found(source, &[maker], &[container("main", maker, hash)]);
        let pod = pod(json!([{"name": "main", "image": "x:1"}]));
        let wanted = Wanted { changed: Some(99), ..wanted(&pod) };
        let expected = if expected.is_empty() { Outcome::Kept } else { Outcome::Restarts(expected.to_vec()) };
        assert_eq!(check(&found, Some(&wanted), next), expected, "{found:?} {next:?}");
    };
    let name = || "main".to_owned();
    let (new, old, beelet) = (Next::Kubelet { minor: 36 }, Next::Kubelet { minor: 20 }, Next::Beelet(ALL));
    check(Source::Api, Kubelet, &current, new, &[]);
    check(Source::Api, Kubelet, &current, beelet, &[]);
    check(Source::Api, Kubelet, "abcd", beelet, &[]);
    check(Source::Api, Kubelet, "abcd", old, &[]);
    check(Source::Api, Kubelet, "abcd", new, &[Reason::OldDigest(name())]);
    check(Source::Api, Beelet, &current, new, &[]);
    check(Source::Api, Beelet, &current, old, &[Reason::WholeDigest(name())]);
    check(Source::Api, Beelet, old_beelet, new, &[Reason::OldDigest(name())]);
    check(Source::Api, Beelet, old_beelet, beelet, &[]);
    check(Source::Api, Beelet, "abcd", beelet, &[Reason::OtherImage(name())]);
    // Static pods: the UID of a pod that beelet started is its own.
    check(Source::File, Kubelet, &current, new, &[]);
    check(Source::Unnamed, Beelet, &current, new, &[Reason::OtherUid]);
    check(Source::File, Kubelet, &current, beelet, &[]);
}

#[test]
fn a_manifest_that_is_newer_than_the_sandbox_is_another_pod() {
    let found = found(Source::File, &[Maker::Kubelet], &[container("main", Maker::Kubelet, "1")]);
    let pod = pod(json!([{"name": "main", "image": "x:1"}]));
    let check = |changed, uid_in_manifest, expected: Outcome| {
        let wanted = Wanted { changed, uid_in_manifest, ..wanted(&pod) };
        assert_eq!(check(&found, Some(&wanted), Next::Beelet(ALL)), expected, "{changed:?}");
    };
    let changed = Outcome::Restarts(vec![Reason::ManifestChanged]);
    check(Some(100), false, Outcome::Kept);
    check(Some(101), false, changed.clone());
    check(None, false, changed);
    check(Some(101), true, Outcome::Kept);
    assert_eq!(super::check(&found, None, Next::Beelet(ALL)), Outcome::Unwanted);
}

#[test]
fn a_resize_and_many_sandboxes_are_reasons_while_the_pod_runs() {
    let mut pod = pod(json!([{"name": "main", "image": "x:1"}]));
    pod.status =
        serde_json::from_value(json!({"conditions": [{"type": "PodResizePending", "status": "True"}]}))
            .unwrap();
    let wanted = wanted(&pod);
    let mut found = found(Source::Api, &[Maker::Kubelet, Maker::Kubelet], &[]);
    let next = Next::Kubelet { minor: 36 };
    let both = Outcome::Restarts(vec![Reason::ManySandboxes, Reason::Resizing]);
    assert_eq!(check(&found, Some(&wanted), next), both);
    found.sandboxes.iter_mut().for_each(|sandbox| sandbox.ready = false);
    assert_eq!(check(&found, Some(&wanted), next), Outcome::Kept);
}

#[test]
fn a_pod_whose_volumes_are_elsewhere_is_named() {
    let pod = pod(json!([{"name": "main", "image": "x:1"}]));
    let found = found(Source::Api, &[Maker::Kubelet], &[]);
    let wanted = Wanted { has_folder: false, ..wanted(&pod) };
    let outcome = check(&found, Some(&wanted), Next::Beelet(ALL));
    assert_eq!(outcome, Outcome::Restarts(vec![Reason::OtherFolder]));
    assert!(!outcome.is_harmless() && Outcome::Kept.is_harmless());
}

#[test]
fn a_pod_whose_volumes_the_next_agent_has_elsewhere_is_named() {
    use Maker::{Beelet, Kubelet};
    const KINDS: [(&str, &str); 10] = [
        ("scratch", "emptyDir"),
        ("memory", "emptyDir"),
        ("settings", "configMap"),
        ("word", "secret"),
        ("token", "projected"),
        ("about", "downwardAPI"),
        ("host", "hostPath"),
        ("claim", "persistentVolumeClaim"),
        ("own", "ephemeral"),
        ("unused", "emptyDir"),
    ];
    let volume = |(name, kind): (&str, &str)| {
        let source = match kind {
            "hostPath" => json!({"path": "/"}),
            "persistentVolumeClaim" => json!({"claimName": "c"}),
            _ => json!({}),
        };
        json!({"name": name, kind: source})
    };
    let mounts = |of: &[&str]| -> Vec<Value> {
        of.iter().map(|name| json!({"name": name, "mountPath": format!("/{name}")})).collect()
    };
    let main = ["scratch", "memory", "settings", "word", "token", "host", "claim", "own"];
    let mut pod = pod(json!([
        {"name": "main", "image": "x:1", "volumeMounts": mounts(&main)},
        {"name": "other", "image": "x:1", "volumeMounts": mounts(&["about"])},
    ]));
    let volumes: Vec<Value> = KINDS.map(volume).into();
    pod.spec.as_mut().unwrap().volumes = serde_json::from_value(json!(volumes)).unwrap();
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let check = |makers: [Maker; 2], own: &[&str], kubelets: &[&str], next, expected: &[Reason]| {
        let containers: Vec<_> = ["main", "other"]
            .into_iter()
            .zip(makers)
            .map(|(name, maker)| container(name, maker, &container_hash_of(name, "x:1")))
            .collect();
        let mut found = found(Source::Api, &[Beelet], &containers);
        let places = Places { of_beelet: set(own), of_kubelet: set(kubelets) };
        let wanted = Wanted { places, ..wanted(&pod) };
        let outcome = check(&found, Some(&wanted), next);
        let reasons = expected.to_vec();
        let lossy = if reasons.is_empty() { Outcome::Kept } else { Outcome::LosesVolumes(reasons) };
        assert_eq!(outcome, lossy, "{makers:?} {own:?} {kubelets:?} {next:?}");
        assert!(outcome.runs_on() && outcome.is_harmless() == expected.is_empty());
        // A restart has the volumes' reasons too, and a pod that has ended has none.
        found.sandboxes.push(sandbox(Beelet));
        let restart = [&[Reason::ManySandboxes], expected].concat();
        assert_eq!(check(&found, Some(&wanted), next), Outcome::Restarts(restart));
        found.sandboxes.iter_mut().for_each(|one| one.ready = false);
        found.containers.iter_mut().for_each(|one| one.running = false);
        assert_eq!(check(&found, Some(&wanted), next), Outcome::Kept);
    };
    let empty = |names: &str| Reason::EmptyDirElsewhere(names.to_owned());
    let objects = |names: &str| Reason::ObjectsElsewhere(names.to_owned());
    let all: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
    let (back, over) = (Next::Kubelet { minor: 36 }, Next::Beelet(ALL));
    let both = [empty("scratch, memory"), objects("settings, word, token, about")];
    check([Beelet; 2], &all, &[], back, &both);
    check([Beelet; 2], &["scratch"], &["memory", "settings"], back, &[empty("scratch")]);
    check([Beelet; 2], &["token"], &[], back, &[objects("token")]);
    check([Beelet; 2], &["host", "claim", "own", "unused", "gone"], &[], back, &[]);
    // beelet restarted the containers of an adopted pod, whose volumes stayed in the kubelet's folders.
    check([Beelet; 2], &[], &all, back, &[]);
    // A kubelet that ran in between made folders of its own: only its containers have them.
    check([Beelet; 2], &all, &all, back, &both);
    check([Beelet; 2], &all, &all, over, &[]);
    check([Kubelet, Beelet], &all, &all, over, &[empty("scratch, memory"), objects("settings, word, token")]);
    check([Beelet, Kubelet], &all, &all, over, &[objects("about")]);
    check([Kubelet; 2], &[], &all, over, &[]);
    check([Beelet; 2], &all, &[], over, &[]);
}

#[test]
fn a_pod_that_no_source_names_is_no_harmless_outcome_and_a_deletion_is() {
    let found = found(Source::File, &[Maker::Kubelet], &[container("main", Maker::Kubelet, "1")]);
    for next in [Next::Beelet(ALL), Next::Kubelet { minor: 36 }] {
        let outcome = check(&found, None, next);
        assert!(outcome == Outcome::Unwanted && !outcome.is_harmless(), "{next:?}");
        let mut pod = pod(json!([{"name": "main", "image": "x:1"}]));
        pod.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        let wanted = wanted(&pod);
        let outcome = check(&found, Some(&wanted), next);
        assert!(outcome == Outcome::Leaving && outcome.is_harmless(), "{next:?}");
    }
}

#[test]
fn amounts_that_only_a_restart_changes_need_a_kubelets_record() {
    let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let main = json!({"name": "main", "image": "x:1", "resizePolicy": policy,
        "resources": {"limits": {"memory": "1Gi"}}});
    let (with, without) = (pod(json!([main])), pod(json!([{"name": "main", "image": "x:1"}])));
    let check = |maker, pod: &Pod, minor, expected: Outcome| {
        let hash = container_hash_of("main", "x:1");
        let found = found(Source::Api, &[maker], &[container("main", maker, &hash)]);
        let wanted = wanted(pod);
        assert_eq!(check(&found, Some(&wanted), Next::Kubelet { minor }), expected, "{maker:?} {minor}");
    };
    let restarts = Outcome::Restarts(vec![Reason::UnknownAmounts("main".to_owned())]);
    check(Maker::Beelet, &with, 36, restarts);
    check(Maker::Beelet, &with, 32, Outcome::Kept);
    check(Maker::Kubelet, &with, 36, Outcome::Kept);
    check(Maker::Beelet, &without, 36, Outcome::Kept);
    assert!(
        forgets_readiness(Next::Kubelet { minor: 34 }) && !forgets_readiness(Next::Kubelet { minor: 35 })
    );
    assert!(!forgets_readiness(Next::Beelet(ALL)));
}

#[test]
fn a_container_that_does_not_run_on_is_a_loss() {
    use Maker::Kubelet;
    let (a, b) = (container("a", Kubelet, "1"), container("b", Kubelet, "1"));
    let before = found(Source::Api, &[Kubelet], &[a.clone(), b.clone()]);
    let pod = pod(json!([{"name": "a", "image": "x:1"}, {"name": "b", "image": "x:1"}]));
    let check = |now: Option<&Found>, expected: Option<Loss>| assert_eq!(loss(&before, now, &pod), expected);
    check(Some(&before), None);
    check(None, Some(Loss::Pod));
    let again = FoundContainer { attempt: 1, ..b.clone() };
    check(Some(&found(Source::Api, &[Kubelet], &[a.clone(), again])), Some(Loss::Container("b".to_owned())));
    let ended = FoundContainer { running: false, ..b };
    let mut now = found(Source::Api, &[Kubelet], &[a, ended]);
    check(Some(&now), Some(Loss::Container("b".to_owned())));
    now.sandboxes.clear();
    check(Some(&now), Some(Loss::Sandbox));
}

#[test]
fn a_success_that_ends_a_container_for_good_and_a_deletion_are_no_losses() {
    use Maker::Kubelet;
    let running = ["a", "b", "side"].map(|name| container(name, Kubelet, "1"));
    let before = found(Source::Api, &[Kubelet], &running);
    let mut pod = pod(json!([{"name": "a", "image": "x:1"}, {"name": "b", "image": "x:1"}]));
    let spec = pod.spec.as_mut().unwrap();
    let sidecar = json!([{"name": "side", "restartPolicy": "Always"}]);
    spec.init_containers = serde_json::from_value(sidecar).unwrap();
    let after = |codes: [Option<i32>; 3], ready: bool| {
        let of = |(one, code): (&FoundContainer, Option<i32>)| FoundContainer {
            running: code.is_none(),
            exit_code: code,
            ..one.clone()
        };
        let containers: Vec<_> = running.iter().zip(codes).map(of).collect();
        let mut now = found(Source::Api, &[Kubelet], &containers);
        now.sandboxes.iter_mut().for_each(|sandbox| sandbox.ready = ready);
        now
    };
    let of = |name: &str| Some(Loss::Container(name.to_owned()));
    let mut check = |policy: &str, codes, ready, expected: Option<Loss>| {
        pod.spec.as_mut().unwrap().restart_policy = Some(policy.to_owned());
        assert_eq!(loss(&before, Some(&after(codes, ready)), &pod), expected, "{policy} {codes:?} {ready}");
    };
    for policy in ["Never", "OnFailure"] {
        check(policy, [Some(0), None, None], true, None);
        check(policy, [Some(1), None, None], true, of("a"));
        check(policy, [Some(0), None, Some(143)], true, of("side"));
        check(policy, [Some(0), Some(0), Some(143)], true, None);
        check(policy, [Some(0), Some(0), Some(143)], false, None);
        check(policy, [Some(0), None, None], false, Some(Loss::Sandbox));
    }
    check("Always", [Some(0), None, None], true, of("a"));
    pod.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(loss(&before, None, &pod), None);
}

fn makers() -> impl Strategy<Value = Vec<Maker>> {
    prop::collection::vec(prop_oneof![Just(Maker::Beelet), Just(Maker::Kubelet)], 0..4)
}

fn sources() -> impl Strategy<Value = Source> {
    prop_oneof![Just(Source::Unnamed), Just(Source::Api), Just(Source::File), Just(Source::Other)]
}

proptest! {
    #[test]
    fn without_a_request_nothing_of_a_kubelet_is_touched(
        source in sources(), sandboxes in makers(), containers in makers(), api: bool, manifests: bool,
    ) {
        let containers: Vec<_> = containers.iter().map(|maker| container("main", *maker, "1")).collect();
        let found = found(source, &sandboxes, &containers);
        let decided = adoption(&found, false, Sources { api, manifests });
        prop_assert_ne!(&decided, &Adoption::Adopted);
        prop_assert_eq!(decided == Adoption::Own, !found.has_any_of(Maker::Kubelet));
        // A request never makes the agent drop a pod of its own.
        let requested = adoption(&found, true, Sources { api, manifests });
        prop_assert_ne!(&requested, &Adoption::Divided);
        prop_assert_eq!(requested == Adoption::Own, !found.has_any_of(Maker::Kubelet));
    }

    #[test]
    fn what_a_kubelet_wrote_for_the_pods_spec_restarts_under_no_agent(
        names in prop::collection::btree_set("[a-z]{1,8}", 1..5), image in "[ -~]{0,40}", minor in 31_u32..40,
    ) {
        let specs: Vec<_> = names.iter().map(|name| json!({"name": name, "image": image})).collect();
        let made: Vec<_> = names
            .iter()
            .map(|name| container(name, Maker::Kubelet, &container_hash_of(name, &image)))
            .collect();
        let found = found(Source::Api, &[Maker::Kubelet], &made);
        let pod = pod(json!(specs));
        let wanted = wanted(&pod);
        for next in [Next::Kubelet { minor }, Next::Beelet(ALL)] {
            prop_assert_eq!(check(&found, Some(&wanted), next), Outcome::Kept);
        }
    }
}
