use std::time::SystemTime;

use super::*;
use beelet_model::labels;

fn folder() -> Folder {
    let mut folder = Folder::new("/m".into(), "Node1".to_owned(), false);
    folder.set_standing(FolderState::Read);
    folder
}

fn pod(name: &str, more: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  {more}\n  containers: [{{name: c, image: 'x:1'}}]\n"
    )
}

#[test]
fn a_name_that_is_too_long_for_the_folder_of_its_logs_is_refused() {
    let mut folder = folder();
    // "default", "-node1", the UID's 32 digits and two "_".
    let longest = 255 - 7 - 6 - 32 - 2;
    write(&mut folder, "fits.yaml", &pod(&"a".repeat(longest), ""));
    write(&mut folder, "long.yaml", &pod(&"b".repeat(longest + 12), ""));
    let desired = folder.desired();
    assert_eq!((desired.pods.len(), desired.rejected.len()), (1, 1));
    let message = &desired.rejected[0].message;
    assert!(message.starts_with("long.yaml: metadata.name: "), "{message}");
    assert!(message.ends_with("shorten the pod's name by 12"), "{message}");
}

fn class(name: &str, value: i32) -> String {
    format!(
        "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {{name: {name}}}\nvalue: {value}\n"
    )
}

fn write(folder: &mut Folder, name: &str, text: &str) {
    write_at(folder, name, text, 0);
}

/// Updates a file with a modification time of `seconds`.
fn write_at(folder: &mut Folder, name: &str, text: &str, seconds: u64) {
    let modified = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    let content = Content::Bytes(text.into(), modified);
    folder.update(Path::new("/m").join(name), content, "2026-11-21T00:00:00Z");
}

fn unread(folder: &mut Folder, name: &str) {
    folder.update(Path::new("/m").join(name), Content::Unreadable("no".to_owned()), "2026-11-21T00:00:00Z");
}

/// Returns pods as `name@file`, and rejections as `file: message`.
fn shown(desired: &Desired) -> (Vec<String>, Vec<String>) {
    let file =
        |pod: &Arc<Pod>| pod.metadata.annotations.as_ref().unwrap()[labels::ANNOTATION_MANIFEST].clone();
    let pods = desired.pods.iter().map(|(name, pod)| format!("{}@{}", name.name, file(pod))).collect();
    (pods, desired.rejected.iter().map(|r| r.message.clone()).collect())
}

fn check(folder: &mut Folder, pods: &[&str], rejected: &[&str]) -> Desired {
    let desired = folder.desired();
    let (have, messages) = shown(&desired);
    assert_eq!(have, pods, "{messages:?}");
    assert_eq!(messages.len(), rejected.len(), "{messages:?}");
    for (message, part) in messages.iter().zip(rejected) {
        assert!(message.contains(part), "{message}");
    }
    desired
}

fn uid(folder: &mut Folder) -> String {
    folder.desired().pods.values().next().unwrap().metadata.uid.clone().unwrap()
}

#[test]
fn a_pod_gets_its_identity_on_the_node() {
    let mut folder = folder();
    write(&mut folder, "a.yaml", &pod("web", ""));
    let desired = check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
    let pod = desired.pods.values().next().unwrap();
    let annotations = pod.metadata.annotations.as_ref().unwrap();
    let uid = pod.metadata.uid.clone().unwrap();
    assert_eq!(uid.len(), 32);
    assert_eq!(annotations[labels::ANNOTATION_HASH], uid);
    assert_eq!(annotations[labels::ANNOTATION_SEEN], "2026-11-21T00:00:00Z");
    assert!(!annotations.contains_key(labels::ANNOTATION_SOURCE));
    let spec = pod.spec.as_ref().unwrap();
    assert_eq!(spec.node_name.as_deref(), Some("Node1"));
    assert_eq!(spec.priority, Some(0));
    assert_eq!(spec.tolerations.as_ref().unwrap()[0].effect.as_deref(), Some("NoExecute"));
}

#[test]
fn static_pods_are_critical_on_request_only() {
    let mut folder = Folder::new("/m".into(), "n".to_owned(), true);
    folder.set_standing(FolderState::Read);
    write(&mut folder, "a.yaml", &pod("web", ""));
    let desired = folder.desired();
    let annotations = desired.pods.values().next().unwrap().metadata.annotations.clone().unwrap();
    assert_eq!(annotations[labels::ANNOTATION_SOURCE], "file");
}

#[test]
fn the_uid_changes_with_the_content_the_file_and_the_node_only() {
    let mut one = folder();
    write(&mut one, "a.yaml", &pod("web", ""));
    let first = uid(&mut one);
    write(&mut one, "a.yaml", &format!("# a comment\n{}", pod("web", "")));
    assert_eq!(uid(&mut one), first);
    write(&mut one, "a.yaml", &pod("web", "hostNetwork: true"));
    assert_ne!(uid(&mut one), first);
    let mut other_file = folder();
    write(&mut other_file, "b.yaml", &pod("web", ""));
    assert_ne!(uid(&mut other_file), first);
    let mut other_node = Folder::new("/m".into(), "n2".to_owned(), false);
    write(&mut other_node, "a.yaml", &pod("web", ""));
    assert_ne!(uid(&mut other_node), first);
}

#[test]
fn a_uid_that_is_written_is_kept_and_the_hash_still_tells_a_change() {
    let mut folder = folder();
    let text = pod("web", "").replace("name: web", "name: web, uid: my-own");
    write(&mut folder, "a.yaml", &text);
    let hash = |folder: &mut Folder| {
        let desired = folder.desired();
        desired.pods.values().next().unwrap().metadata.annotations.clone().unwrap()[labels::ANNOTATION_HASH]
            .clone()
    };
    let first = hash(&mut folder);
    assert_eq!(uid(&mut folder), "my-own");
    write(&mut folder, "a.yaml", &text.replace("x:1", "x:2"));
    assert_eq!(uid(&mut folder), "my-own");
    assert_ne!(hash(&mut folder), first);
}

#[test]
fn an_unchanged_pod_stays_the_same_value() {
    let mut folder = folder();
    write(&mut folder, "a.yaml", &pod("web", ""));
    let before = folder.desired().pods.into_values().next().unwrap();
    write(&mut folder, "a.yaml", &format!("{}\n# later\n", pod("web", "")));
    write(&mut folder, "b.yaml", &pod("other", ""));
    let after = folder.desired().pods.into_values().last().unwrap();
    assert!(Arc::ptr_eq(&before, &after));
}

#[test]
fn a_copy_does_not_take_the_name_from_the_pod_that_runs() {
    let mut folder = folder();
    write_at(&mut folder, "b.yaml", &pod("web", ""), 9);
    check(&mut folder, &["web-node1@/m/b.yaml"], &[]);
    // Regardless of the copy's name and modification time.
    write_at(&mut folder, "a.yaml", &pod("web", ""), 1);
    let clash =
        "a.yaml: metadata.name: the Pod default/web-node1 is in /m/b.yaml already: only one of the two";
    let desired = check(&mut folder, &["web-node1@/m/b.yaml"], &[clash]);
    assert!(desired.unreadable.is_empty());
    write(&mut folder, "b.yaml", "kind: [");
    check(&mut folder, &["web-node1@/m/b.yaml"], &[clash, "b.yaml:1:7:"]);
    write(&mut folder, "b.yaml", &pod("web", "hostNetwork: true"));
    check(&mut folder, &["web-node1@/m/b.yaml"], &[clash]);
    folder.forget(Path::new("/m/b.yaml"));
    check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
    write(&mut folder, "b.yaml", &pod("web", ""));
    check(
        &mut folder,
        &["web-node1@/m/a.yaml"],
        &["b.yaml: metadata.name: the Pod default/web-node1 is in /m/a.yaml"],
    );
}

#[test]
fn a_file_with_another_ending_never_has_the_name_before_a_manifest() {
    let mut folder = folder();
    write_at(&mut folder, "shop.yaml.v1", &pod("web", ""), 1);
    write_at(&mut folder, "shop.yaml", &pod("web", ""), 9);
    let clash = "shop.yaml.v1: metadata.name: the Pod default/web-node1 is in /m/shop.yaml already";
    check(&mut folder, &["web-node1@/m/shop.yaml"], &[clash]);
    // Also if the other file owned the name: `mv shop.yaml shop.yaml.v1`, then a new shop.yaml.
    folder.forget(Path::new("/m/shop.yaml"));
    check(&mut folder, &["web-node1@/m/shop.yaml.v1"], &[]);
    write(&mut folder, "shop.yaml", &pod("web", ""));
    check(&mut folder, &["web-node1@/m/shop.yaml"], &[clash]);
}

#[test]
fn after_a_restart_the_recorded_file_has_the_name_else_the_shortest_and_first() {
    let files = |recorded: Option<&str>| {
        let mut folder = folder();
        let owner = recorded.map(|file| ("Pod default/web-node1".to_owned(), Path::new("/m").join(file)));
        folder.remember(owner.into_iter().collect());
        write_at(&mut folder, "a-copy.yaml", &pod("web", ""), 1);
        write_at(&mut folder, "a.yaml", &pod("web", ""), 5);
        write_at(&mut folder, "b.yaml", &pod("web", ""), 2);
        write_at(&mut folder, "c.yaml", &pod("web", ""), 2);
        folder
    };
    let check = |recorded, owner: &str| {
        let pods = shown(&files(recorded).desired()).0;
        assert_eq!(pods, [format!("web-node1@/m/{owner}")], "{recorded:?}");
    };
    check(Some("c.yaml"), "c.yaml");
    check(Some("a.yaml"), "a.yaml");
    check(Some("a-copy.yaml"), "a-copy.yaml");
    check(None, "a.yaml");
    check(Some("gone.yaml"), "a.yaml");
}

#[test]
fn a_file_that_can_not_be_read_after_a_restart_still_has_its_pods_name() {
    let mut folder = folder();
    let owner = ("Pod default/web-node1".to_owned(), "/m/b.yaml".into());
    folder.remember([owner].into());
    write(&mut folder, "a.yaml", &pod("web", ""));
    write(&mut folder, "b.yaml", "kind: [");
    let desired = check(
        &mut folder,
        &[],
        &["a.yaml: metadata.name: the Pod default/web-node1 is in /m/b.yaml", "b.yaml:1:7:"],
    );
    assert!(!desired.may_remove(Some(Path::new("/m/b.yaml"))));
    write(&mut folder, "b.yaml", &pod("other", ""));
    check(&mut folder, &["other-node1@/m/b.yaml", "web-node1@/m/a.yaml"], &[]);
}

#[test]
fn a_folder_that_was_not_read_does_not_change_who_has_a_name() {
    let mut folder = Folder::new("/m".into(), "Node1".to_owned(), false);
    let owners: Owners = [("Pod default/web-node1".to_owned(), "/m/b.yaml".into())].into();
    folder.remember(owners.clone());
    folder.set_standing(FolderState::Unreadable("no".to_owned()));
    folder.desired();
    assert_eq!(folder.owners(), &owners);
}

#[test]
fn a_file_that_is_being_renamed_clashes_with_nothing() {
    let mut folder = folder();
    write(&mut folder, "a.yaml", &pod("web", ""));
    check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
    assert!(folder.miss(Path::new("/m/a.yaml")) && !folder.miss(Path::new("/m/never.yaml")));
    write(&mut folder, "z.yaml", &pod("web", ""));
    check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
    write(&mut folder, "a.yaml", &pod("web", ""));
    check(&mut folder, &["web-node1@/m/a.yaml"], &["z.yaml: metadata.name"]);
    folder.forget(Path::new("/m/a.yaml"));
    check(&mut folder, &["web-node1@/m/z.yaml"], &[]);
}

#[test]
fn a_uid_is_had_once() {
    let mut folder = folder();
    write(&mut folder, "a.yaml", &pod("web", "").replace("name: web", "name: web, uid: u"));
    write(&mut folder, "b.yaml", &pod("other", "").replace("name: other", "name: other, uid: u"));
    check(&mut folder, &["web-node1@/m/a.yaml"], &["b.yaml: metadata.uid: u is in /m/a.yaml already"]);
}

#[test]
fn a_manifest_that_becomes_invalid_takes_nothing_away() {
    let mut folder = folder();
    write(&mut folder, "a.yaml", &pod("web", ""));
    let before = uid(&mut folder);
    for broken in ["kind: [", "", "apiVersion: v1\nkind: List\n"] {
        write(&mut folder, "a.yaml", broken);
        let desired = check(&mut folder, &["web-node1@/m/a.yaml"], &["a.yaml:"]);
        assert!(desired.unreadable.is_empty());
    }
    unread(&mut folder, "a.yaml");
    check(&mut folder, &["web-node1@/m/a.yaml"], &["a.yaml: no"]);
    write(&mut folder, "a.yaml", &pod("web", ""));
    check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
    assert_eq!(uid(&mut folder), before);
}

#[test]
fn a_file_that_was_never_valid_protects_what_runs_from_it() {
    let mut folder = folder();
    write(&mut folder, "a.yaml", "kind: [");
    let desired = check(&mut folder, &[], &["a.yaml:1:7:"]);
    assert!(!desired.may_remove(Some(Path::new("/m/a.yaml"))));
    assert!(desired.may_remove(Some(Path::new("/m/b.yaml"))));
    assert!(desired.may_remove(None));
    folder.forget(Path::new("/m/a.yaml"));
    assert!(folder.desired().may_remove(Some(Path::new("/m/a.yaml"))));
}

#[test]
fn a_folder_that_was_never_read_says_nothing_about_its_pods() {
    let mut folder = Folder::new("/m".into(), "n".to_owned(), false);
    folder.set_standing(FolderState::Missing);
    // A worker of a cluster usually lacks the folder: its absence is a notice, not a rejected manifest.
    let desired = check(&mut folder, &[], &[]);
    assert!(!desired.may_remove(None));
    assert!(
        folder
            .standing()
            .absence(Path::new("/m"))
            .unwrap()
            .starts_with("/m: the folder of static pods does not exist")
    );
    folder.set_standing(FolderState::Unreadable("cannot be read (EIO)".to_owned()));
    let desired = check(&mut folder, &[], &["/m: cannot be read (EIO); its running pods stay"]);
    assert!(!desired.may_remove(None));
}

#[test]
fn a_folder_that_is_taken_away_takes_its_pods_along() {
    let mut folder = folder();
    write(&mut folder, "a.yaml", &pod("web", ""));
    folder.set_standing(FolderState::Unreadable("cannot be read (EIO)".to_owned()));
    let desired = check(&mut folder, &["web-node1@/m/a.yaml"], &["cannot be read"]);
    assert!(!desired.may_remove(None));
    folder.set_standing(FolderState::Missing);
    assert_eq!(folder.standing().absence(Path::new("/m")), None);
    let desired =
        check(&mut folder, &[], &["/m: the folder of static pods was removed; its pods are terminated"]);
    assert!(desired.may_remove(Some(Path::new("/m/a.yaml"))));
}

#[test]
fn priority_classes_beside_the_pods_count() {
    let mut folder = folder();
    let priority =
        |folder: &mut Folder| folder.desired().pods.values().next().and_then(|p| p.spec.as_ref()?.priority);
    write(&mut folder, "web.yaml", &pod("web", "priorityClassName: high"));
    let desired =
        check(&mut folder, &[], &["web.yaml: spec.priorityClassName: PriorityClass \"high\" not found"]);
    assert!(!desired.may_remove(Some(Path::new("/m/web.yaml"))));
    write(&mut folder, "z.yaml", &class("high", 1000));
    check(&mut folder, &["web-node1@/m/web.yaml"], &[]);
    assert_eq!(priority(&mut folder), Some(1000));
    let before = uid(&mut folder);
    write(&mut folder, "z.yaml", &class("high", 2000));
    assert_eq!(priority(&mut folder), Some(2000));
    assert_eq!(uid(&mut folder), before);
    write(&mut folder, "zz.yaml", &class("high", 3000));
    check(
        &mut folder,
        &["web-node1@/m/web.yaml"],
        &["zz.yaml: metadata.name: the PriorityClass high is in /m/z.yaml already"],
    );
    folder.forget(Path::new("/m/z.yaml"));
    folder.forget(Path::new("/m/zz.yaml"));
    check(&mut folder, &["web-node1@/m/web.yaml"], &["PriorityClass \"high\" not found"]);
    assert_eq!(priority(&mut folder), Some(2000));
}

#[test]
fn objects_beside_the_pods_are_theirs_to_refer_to() {
    let map = |name: &str, value: &str| {
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata: {{k: '{value}'}}\n")
    };
    let value = |folder: &mut Folder| {
        let objects = folder.desired().objects;
        objects.config_map("default", "m").and_then(|map| map.data.clone()?.get("k").cloned())
    };
    let mut folder = folder();
    write(&mut folder, "b.yaml", &map("m", "1"));
    assert_eq!(value(&mut folder).as_deref(), Some("1"));
    write(&mut folder, "b.yaml", &map("m", "2"));
    assert_eq!(value(&mut folder).as_deref(), Some("2"));
    // An unreadable file removes no object; the owner of a name keeps it against a second file.
    write(&mut folder, "b.yaml", "kind: [");
    assert_eq!(value(&mut folder).as_deref(), Some("2"));
    write(&mut folder, "b.yaml", &map("m", "3"));
    write(&mut folder, "a.yaml", &map("m", "4"));
    let clash = "a.yaml: metadata.name: the ConfigMap default/m is in /m/b.yaml already";
    let desired = check(&mut folder, &[], &[clash]);
    assert_eq!(desired.file("ConfigMap", "default", "m"), Some("/m/b.yaml".into()));
    assert_eq!(value(&mut folder).as_deref(), Some("3"));
    folder.forget(Path::new("/m/b.yaml"));
    assert_eq!(value(&mut folder).as_deref(), Some("4"));
}

#[test]
fn a_pod_costs_what_its_runtime_class_says() {
    let class = "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: vm}\nhandler: kata\noverhead: {podFixed: {memory: 64Mi}}\n";
    let overhead = |folder: &mut Folder| {
        let desired = folder.desired();
        let spec = desired.pods.values().next().and_then(|pod| pod.spec.clone());
        spec.and_then(|spec| spec.overhead).map(|costs| costs["memory"].0.clone())
    };
    let mut folder = folder();
    write(&mut folder, "a.yaml", &pod("web", "runtimeClassName: vm"));
    let before = uid(&mut folder);
    assert_eq!(overhead(&mut folder), None);
    write(&mut folder, "z.yaml", class);
    assert_eq!((overhead(&mut folder).as_deref(), uid(&mut folder)), (Some("64Mi"), before));
    write(&mut folder, "b.yaml", &pod("other", "runtimeClassName: vm\n  overhead: {memory: 1Gi}"));
    check(
        &mut folder,
        &["web-node1@/m/a.yaml"],
        &["b.yaml: spec.overhead: differs from the overhead of the runtime class"],
    );
}

#[test]
fn kernel_settings_that_reach_beyond_the_pod_are_refused() {
    let sysctl =
        |name: &str| pod("web", &format!("securityContext: {{sysctls: [{{name: {name}, value: '1'}}]}}"));
    let mut folder = folder();
    write(&mut folder, "a.yaml", &sysctl("net.core.somaxconn"));
    check(
        &mut folder,
        &[],
        &["a.yaml: spec.securityContext.sysctls[0].name: net.core.somaxconn is not one of"],
    );
    folder.allow_sysctls(vec!["net.core.*".to_owned()]);
    write(&mut folder, "a.yaml", &format!("{}\n", sysctl("net.core.somaxconn")));
    check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
}

#[test]
fn the_same_bytes_are_not_parsed_again() {
    let mut folder = folder();
    let warned = pod("web", "nodeSelector: {a: b}");
    let update = |folder: &mut Folder, text: &str| {
        folder.update("/m/a.yaml".into(), Content::Bytes(text.into(), SystemTime::UNIX_EPOCH), "now").len()
    };
    assert_eq!(update(&mut folder, &warned), 1);
    assert_eq!(update(&mut folder, &warned), 0);
    assert_eq!(update(&mut folder, &format!("{warned}\n")), 1);
}

#[test]
fn bytes_that_are_no_text_are_rejected() {
    let mut folder = folder();
    let content = Content::Bytes(vec![b'a', 0xff], SystemTime::UNIX_EPOCH);
    folder.update("/m/a.yaml".into(), content, "now");
    check(&mut folder, &[], &["a.yaml: is not UTF-8 text (byte 1)"]);
}
