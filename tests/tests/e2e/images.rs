//! Images as files: imports without a registry, by command and from the folder next to the manifests, and
//! exports.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::path::PathBuf;

use beelet_tests::containerd::Containerd;
use beelet_tests::pods::PodView;
use beelet_tests::registry::Registry;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{images, require};
use serde_json::{Value, json};

use crate::node::{Node, installed, on_every_containerd};

/// Returns a pod that runs only if its image is already present.
fn pod(name: &str, image: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "restartPolicy": "Never",
            "containers": [{
                "name": "main",
                "image": image,
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", "echo $VARIANT"],
            }],
        },
    })
}

/// Returns an archive whose image no containerd has before.
fn archive(name: &str) -> PathBuf {
    images::variant(name).unwrap().path
}

#[test]
fn an_imported_image_runs_is_exported_and_comes_back() {
    require!(containerd);
    on_every_containerd(|containerd| {
        let name = "localhost/beelet/imported:1";
        let node = Node::on(containerd, |options| options);
        let tar = archive(name);
        let (code, out, error) = node.cli(&["images", "import", tar.to_str().unwrap()]);
        assert_eq!((code, out.as_str()), (Some(0), "localhost/beelet/imported:1 imported\n"), "{error}");
        let (_, again, _) = node.cli(&["images", "import", tar.to_str().unwrap()]);
        assert_eq!(again, "localhost/beelet/imported:1 already present\n");
        node.apply(&pod("first", name));
        assert_eq!(node.output("first"), format!("{name}\n"));

        // The image is exported, removed and imported again.
        let copy = node.agent.dir().join("copy.tar");
        let (code, _, error) = node.cli(&["images", "export", name, "-o", copy.to_str().unwrap()]);
        assert_eq!(code, Some(0), "{error}");
        node.remove("first");
        node.wait_gone("first");
        let (code, _, error) = node.cli(&["images", "rm", name]);
        assert_eq!(code, Some(0), "{error}");
        let (code, out, error) =
            node.cli(&["images", "import", copy.to_str().unwrap(), "--name", "localhost/other:2"]);
        assert_eq!((code, out.as_str()), (Some(0), "localhost/other:2 imported\n"), "{error}");
        node.apply(&pod("second", "localhost/other:2"));
        assert_eq!(node.output("second"), format!("{name}\n"));
        // A file that is not an archive is refused with a reason, and no image is named.
        let (code, _, error) = node.cli(&["images", "import", "/bin/busybox"]);
        assert_eq!(code, Some(1));
        assert!(error.contains("byte 0 does not begin a tar header"), "{error}");
    });
}

#[test]
fn archives_next_to_the_manifests_are_imported_once_with_events() {
    require!(containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let options = installed(&containerd);
    let folder = options.manifests().with_file_name("images");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(archive("localhost/beelet/early:1"), folder.join("early.tar")).unwrap();
    let node = Node::on(containerd, |_| options);
    node.apply(&pod("early", "localhost/beelet/early:1"));
    assert_eq!(node.output("early"), "localhost/beelet/early:1\n");
    // An archive arrives while the agent runs, and a file that is not an archive.
    std::fs::copy(archive("localhost/beelet/late:1"), folder.join("late.part")).unwrap();
    std::fs::rename(folder.join("late.part"), folder.join("late.tar")).unwrap();
    std::fs::write(folder.join("broken.tar"), [7; 2000]).unwrap();
    node.apply(&pod("late", "localhost/beelet/late:1"));
    node.wait("late", "to have run", |pod: &PodView| pod.phase() == "Succeeded");
    let events = wait_for("the events of all archives", PATIENCE, || {
        let events = node.cli(&["events"]).1;
        let wanted = ["Imported localhost/beelet/early:1", "Imported localhost/beelet/late:1", "broken.tar"];
        if wanted.iter().all(|one| events.contains(one)) { Ok(events) } else { Err(events) }
    })
    .unwrap();
    assert_eq!(events.matches("ImagesImported").count(), 2, "{events}");
    assert_eq!(events.matches("FailedToImportImages").count(), 1, "{events}");
}

#[test]
fn a_private_registry_opens_to_a_pod_that_has_the_secret_alone() {
    require!(containerd);
    on_every_containerd(|containerd| {
        let name = "localhost/beelet/private:1";
        let registry = Registry::start(&images::variant(name).unwrap(), "me", "hush").unwrap();
        let image = format!("{}/beelet/private:1", registry.host());
        let node = Node::on(containerd, |options| options);
        let auths = json!({ "auths": { registry.host(): { "username": "me", "password": "hush" } } });
        node.apply(&json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": { "name": "login" },
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": { ".dockerconfigjson": auths.to_string() },
        }));
        let mut stranger = pod("stranger", &image);
        stranger["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
        let mut owner = stranger.clone();
        owner["metadata"]["name"] = json!("owner");
        owner["spec"]["imagePullSecrets"] = json!([{ "name": "login" }]);
        node.apply(&stranger);
        let why = node.waiting("stranger", "main", "ImagePullBackOff");
        assert!(["401 Unauthorized", "authorization failed"].iter().any(|word| why.contains(word)), "{why}");
        node.apply(&owner);
        assert_eq!(node.output("owner"), format!("{name}\n"));
    });
}
