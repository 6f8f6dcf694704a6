//! `beelet cp` into and out of a container, also out of a hostile one.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::fs;

use beelet_tests::pods::PodView;
use beelet_tests::{manifests, require};

use crate::node::Node;

/// Starts a node with a pod that serves.
fn node() -> Node {
    let node = Node::start(|options| options);
    node.apply(&manifests::pod("web", &["/bin/testapp", "serve"]));
    node.wait("web", "to run", |pod: &PodView| pod.phase() == "Running");
    node
}

#[test]
fn files_and_folders_are_copied_both_ways() {
    require!(containerd);
    let node = node();
    let here = node.agent.dir().join("copies");
    fs::create_dir_all(here.join("site/sub")).unwrap();
    // The data exceed every buffer on the way.
    let large: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(here.join("site/sub/large"), &large).unwrap();
    std::os::unix::fs::symlink("sub/large", here.join("site/link")).unwrap();
    let path = |name: &str| here.join(name).to_str().unwrap().to_owned();
    let copy = |from: &str, to: &str| {
        let (code, _, error) = node.cli(&["cp", from, to]);
        assert_eq!(code, Some(0), "{from} to {to}: {error}");
        error
    };
    copy(&path("site"), "web:/tmp/www");
    copy("web:/tmp/www", &path("back"));
    assert!(fs::read(here.join("back/sub/large")).unwrap() == large);
    assert_eq!(fs::read_link(here.join("back/link")).unwrap().to_str(), Some("sub/large"));
    // Targets are existing folders, or a new name for a single file.
    copy(&path("site"), "web:/tmp");
    copy("web:/tmp/site/sub/large", &path("single"));
    assert!(fs::read(here.join("single")).unwrap() == large);
    // The content of the target file is copied for a link that is named.
    copy("web:/tmp/site/link", &path("followed"));
    assert!(fs::read(here.join("followed")).unwrap() == large);
    let (code, _, error) = node.cli(&["cp", "web:/dev/null", &path("none")]);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("nothing was copied"), "{error}");
    copy("web:/tmp/site/.", &here.to_string_lossy());
    assert!(here.join("sub/large").is_file());
    let (code, _, error) = node.cli(&["cp", "web:/nowhere/at/all", &path("none")]);
    assert_eq!(code, Some(1));
    assert!(error.contains("tar in the container failed"), "{error}");
    let (code, _, error) = node.cli(&["cp", &path("site"), &path("other")]);
    assert_eq!(code, Some(1));
    assert!(error.contains("POD:PATH"), "{error}");
}

#[test]
fn files_from_a_container_stay_in_the_target() {
    require!(containerd);
    let node = node();
    let here = node.agent.dir().join("copies");
    fs::create_dir_all(&here).unwrap();
    // The container's tar is its own: this one sends an archive with a path out of the target, and links.
    let script = "mkdir -p /tmp/x /tmp/evil && cd /tmp/x && echo fine > fine && ln -s / out && ln -s ../.. up && \
                  echo '#!/bin/sh\necho oops > /tmp/ran; exec /bin/busybox tar cf - -C /tmp x ../tmp/x/fine' > /bin/tar";
    let (code, _, error) = node.cli(&[
        "exec",
        "web",
        "--",
        "/bin/sh",
        "-c",
        &format!("rm /bin/tar; {script}; chmod +x /bin/tar"),
    ]);
    assert_eq!(code, Some(0), "{error}");
    let to = here.join("x");
    let (code, _, error) = node.cli(&["cp", "web:/tmp/x", to.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(error.matches("skipped").count(), 3, "{error}");
    let names: Vec<_> = fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["fine"]);
}
