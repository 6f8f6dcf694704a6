use std::ffi::OsStr;

use super::files::temporary;
use super::*;

const POD: &str =
    "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: c, image: 'x:1'}]}\n";

struct Fixture {
    dir: tempfile::TempDir,
    service: Service,
    _requests: mpsc::Receiver<PodRequest>,
    cancel: tokio_util::sync::CancellationToken,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

fn folder_at(path: &Path) -> Folder {
    Folder {
        path: Some(path.to_owned()),
        node_name: "N1".to_owned(),
        rules: Rules::default(),
        runtime: Runtime::new("unix:///nowhere.sock", Duration::from_secs(1)).unwrap(),
    }
}

/// A service on a directory that the real source watches.
async fn fixture() -> Fixture {
    use beelet_manifests::source::{ManifestSource, Options};
    let dir = tempfile::tempdir().unwrap();
    let cancel = tokio_util::sync::CancellationToken::new();
    let options = Options {
        check_frequency: Duration::from_secs(3600),
        rules: Rules::default(),
        put_back_restarts: false,
        events: beelet_state::events::Recorder::default(),
        cancel: cancel.clone(),
    };
    let desired = ManifestSource::start(dir.path().to_owned(), "N1".to_owned(), options).await;
    let (requests, receiver) = mpsc::channel(4);
    let running = Arc::new(SetOnce::new());
    let table = watch::channel(Arc::default()).1;
    running.set(Running { desired, requests, table }).unwrap();
    let folder = folder_at(dir.path());
    let service = Service { folder, running, turn: Mutex::default() };
    Fixture { dir, service, _requests: receiver, cancel }
}

fn given(texts: &[&str]) -> proto::ApplyRequest {
    let manifest = |text: &&str| proto::Manifest { text: (*text).to_owned(), name: "f.yaml".to_owned() };
    proto::ApplyRequest { manifests: texts.iter().map(manifest).collect(), ..Default::default() }
}

#[tokio::test(start_paused = true)]
async fn right_after_the_agents_start_it_waits_for_the_runtime_but_not_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let running = Arc::new(SetOnce::new());
    let folder = folder_at(dir.path());
    let service = Service { folder, running: Arc::clone(&running), turn: Mutex::default() };
    let error = service.running().await.unwrap_err();
    assert!(error.message().contains("has not answered yet (waited 10 s)"), "{error}");
    let set = async {
        tokio::time::sleep(STARTED / 2).await;
        let (desired, requests) = (watch::channel(Arc::default()).1, mpsc::channel(1).0);
        let table = watch::channel(Arc::default()).1;
        running.set(Running { desired, requests, table }).unwrap();
    };
    let (found, ()) = tokio::join!(service.running(), set);
    assert!(found.is_ok());
}

impl Fixture {
    async fn ask(&self, request: proto::ApplyRequest) -> Result<proto::ApplyResponse, String> {
        let answer = self.service.apply(Request::new(request)).await;
        answer.map(Response::into_inner).map_err(|status| status.message().to_owned())
    }

    /// Applies one manifest and returns the result, the file name and the rejections.
    async fn apply(&self, text: &str) -> Result<(Applied, String, Vec<String>), String> {
        let mut answer = self.ask(given(&[text])).await?;
        assert!(answer.pruned.is_empty());
        let applied = answer.applied.remove(0);
        let file = Path::new(&applied.file).file_name().unwrap().to_string_lossy().into_owned();
        Ok((applied.result(), file, applied.refused))
    }

    /// Returns the names of the listed objects.
    async fn list(&self, kind: &str, selector: &str) -> Vec<String> {
        let (kind, selector) = (kind.to_owned(), selector.to_owned());
        let request = proto::ListRequest { kind, selector, ..Default::default() };
        let listed = self.service.list(Request::new(request)).await.unwrap().into_inner();
        listed.objects.into_iter().map(|one| format!("{} {}", one.kind, one.name)).collect()
    }

    async fn delete(
        &self,
        kind: &str,
        name: &str,
        keep_manifest: bool,
    ) -> Result<proto::DeleteResponse, String> {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        let request = proto::DeleteRequest { kind, name, keep_manifest, ..Default::default() };
        let answer = self.service.delete(Request::new(request)).await;
        answer.map(Response::into_inner).map_err(|status| status.message().to_owned())
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[tokio::test]
async fn a_manifest_is_created_changed_and_left_alone() {
    let fixture = fixture().await;
    let file = "web.yaml".to_owned();
    // Leftover of an agent that was killed during a write.
    fs::write(temporary(fixture.dir.path(), OsStr::new("web.yaml")), "kind: Po").unwrap();
    assert_eq!(fixture.apply(POD).await, Ok((Applied::Created, file.clone(), vec![])));
    assert_eq!(fixture.apply(POD).await, Ok((Applied::Unchanged, file.clone(), vec![])));
    let changed = POD.replace("x:1", "x:2");
    assert_eq!(fixture.apply(&changed).await, Ok((Applied::Configured, file, vec![])));
    assert_eq!(fs::read_to_string(fixture.dir.path().join("web.yaml")).unwrap(), changed);
    assert_eq!(fixture.files(), ["web.yaml"]);
}

#[tokio::test]
async fn a_pod_stays_in_the_file_that_describes_it() {
    let fixture = fixture().await;
    fs::write(fixture.dir.path().join("mine.yml"), POD).unwrap();
    let mut desired = fixture.service.running().await.unwrap().desired.clone();
    let wait = desired.wait_for(|desired| !desired.pods.is_empty());
    drop(tokio::time::timeout(Duration::from_secs(30), wait).await.unwrap().unwrap());
    let changed = POD.replace("x:1", "x:2");
    assert_eq!(fixture.apply(&changed).await, Ok((Applied::Configured, "mine.yml".to_owned(), vec![])));
    fs::write(fixture.dir.path().join("web2.yaml"), "kind: [").unwrap();
    let other = fixture.apply(&POD.replace("web", "web2")).await;
    assert!(other.unwrap_err().contains("move the file away"));
}

#[tokio::test]
async fn what_is_wrong_is_told_before_anything_is_written() {
    let fixture = fixture().await;
    let error = fixture.apply(&POD.replace("web", "Web")).await.unwrap_err();
    assert!(error.contains("f.yaml:3:18: metadata.name: \"Web\" is not a name"), "{error}");
    assert!(fixture.files().is_empty());
    // Errors that depend on the whole directory are in the answer.
    let (result, _, warnings) =
        fixture.apply(&POD.replace("spec: {", "spec: {priorityClassName: none, ")).await.unwrap();
    assert_eq!(result, Applied::Created);
    assert!(warnings[0].contains("PriorityClass \"none\" not found"), "{warnings:?}");
}

const CLASS: &str =
    "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: high}\nvalue: 5\n";

#[tokio::test]
async fn a_dry_run_tells_what_would_be_done_and_does_nothing() {
    let fixture = fixture().await;
    fixture.apply(POD).await.unwrap();
    let changed = POD.replace("spec: {", "spec: {priorityClassName: high, ");
    let dry = |texts: &[&str]| proto::ApplyRequest { dry_run: true, ..given(texts) };
    let refused = fixture.ask(dry(&[&changed])).await.unwrap().applied.remove(0);
    assert_eq!((refused.result(), refused.before.as_deref()), (Applied::Configured, Some(POD)));
    assert!(refused.refused[0].contains("PriorityClass \"high\" not found"), "{refused:?}");
    // Together with the class, the pod is accepted: both are evaluated together.
    let taken = fixture.ask(dry(&[&changed, CLASS])).await.unwrap();
    let results: Vec<_> = taken.applied.iter().map(|one| (one.result(), one.refused.len())).collect();
    assert_eq!(results, [(Applied::Configured, 0), (Applied::Created, 0)]);
    assert_eq!(taken.applied[0].pod, "web-n1");
    assert_eq!(fixture.files(), ["web.yaml"]);
    assert_eq!(fs::read_to_string(fixture.dir.path().join("web.yaml")).unwrap(), POD);
    // The dry run returns the future UID of the pod.
    let real = fixture.ask(given(&[&changed, CLASS])).await.unwrap();
    assert_eq!(real.applied[0].uid, taken.applied[0].uid);
}

#[tokio::test]
async fn none_is_written_if_one_cannot_be() {
    let fixture = fixture().await;
    fs::write(fixture.dir.path().join("web2.yaml"), "kind: [").unwrap();
    let other = POD.replace("web", "web2");
    assert!(fixture.ask(given(&[POD, &other])).await.unwrap_err().contains("move the file away"));
    assert!(fixture.ask(given(&[POD, POD])).await.unwrap_err().contains("duplicate Pod web"));
    assert_eq!(fixture.files(), ["web2.yaml"]);
}

#[tokio::test]
async fn what_is_not_given_and_has_the_labels_is_pruned() {
    let fixture = fixture().await;
    let labelled =
        |name: &str| POD.replace("{name: web}", &format!("{{name: {name}, labels: {{app: shop}}}}"));
    let (one, two) = (labelled("one"), labelled("two"));
    fixture.ask(given(&[POD, CLASS, &one, &two])).await.unwrap();
    assert_eq!(fixture.list("", "").await.len(), 4);
    assert_eq!(fixture.list("Pod", "app=shop").await, ["Pod one-n1", "Pod two-n1"]);
    let prune = |selector: &str| Some(proto::Prune { selector: selector.to_owned() });
    let dry = proto::ApplyRequest { dry_run: true, prune: prune(""), ..given(&[&one]) };
    let names = |pruned: Vec<proto::Applied>| pruned.into_iter().map(|one| one.name).collect::<Vec<_>>();
    assert_eq!(names(fixture.ask(dry).await.unwrap().pruned), ["high", "two-n1", "web-n1"]);
    assert_eq!(fixture.files().len(), 4);
    let real = proto::ApplyRequest { prune: prune("app=shop"), ..given(&[&one]) };
    assert_eq!(names(fixture.ask(real).await.unwrap().pruned), ["two-n1"]);
    assert_eq!(fixture.files(), ["one.yaml", "priorityclass.high.yaml", "web.yaml"]);
    let wrong = proto::ApplyRequest { prune: prune("a b"), ..given(&[&one]) };
    assert!(fixture.ask(wrong).await.unwrap_err().contains("invalid label requirement"));
}

#[tokio::test]
async fn objects_have_files_of_their_own() {
    let fixture = fixture().await;
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: conf, namespace: shop}\ndata: {a: b}\n";
    assert_eq!(fixture.apply(map).await.unwrap().1, "configmap.shop_conf.yaml");
    assert_eq!(fixture.apply(CLASS).await.unwrap().1, "priorityclass.high.yaml");
    assert_eq!(fixture.apply(&CLASS.replace('5', "6")).await.unwrap().0, Applied::Configured);
}

#[tokio::test]
async fn a_deleted_pods_manifest_goes_or_is_kept_beside() {
    let fixture = fixture().await;
    fixture.apply(POD).await.unwrap();
    assert!(fixture.delete("Pod", "none", false).await.unwrap_err().contains("no manifest describes"));
    let deleted = fixture.delete("Pod", "web", true).await.unwrap();
    assert_eq!((deleted.name.as_str(), deleted.uid.len()), ("web-n1", 32));
    assert_eq!(fixture.files(), ["web.yaml.bak"]);
    fixture.apply(POD).await.unwrap();
    fixture.delete("Pod", "web-n1", false).await.unwrap();
    assert_eq!(fixture.files(), ["web.yaml.bak"]);
}
