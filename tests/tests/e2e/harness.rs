//! The private containerd of the other end-to-end tests: it runs pods, survives a kill, and leaves nothing on
//! the machine.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use anyhow::{Context as _, Result};
use beelet_proto::cri;
use beelet_tests::containerd::{Containerd, Cri, Leftovers, block_on};
use beelet_tests::{images, require, workdir};
use std::collections::HashMap;

/// Returns the configuration of a sandbox whose cgroup is under `parent`.
fn sandbox(name: &str, parent: &str) -> cri::PodSandboxConfig {
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.into(),
            uid: format!("{name}-uid"),
            namespace: "default".into(),
            attempt: 0,
        }),
        hostname: name.into(),
        linux: Some(cri::LinuxPodSandboxConfig { cgroup_parent: parent.into(), ..Default::default() }),
        ..Default::default()
    }
}

/// Runs a sandbox with one container of the standard image. Returns both ids.
async fn run_pod(
    cri: &mut Cri,
    sandbox: &cri::PodSandboxConfig,
    command: &[&str],
) -> Result<(String, String)> {
    let request = cri::RunPodSandboxRequest { config: Some(sandbox.clone()), runtime_handler: String::new() };
    let sandbox_id = cri.runtime.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id;
    let config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: images::APP.into(), ..Default::default() }),
        command: command.iter().map(ToString::to_string).collect(),
        linux: Some(cri::LinuxContainerConfig::default()),
        ..Default::default()
    };
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: sandbox_id.clone(),
        config: Some(config),
        sandbox_config: Some(sandbox.clone()),
    };
    let container_id = cri.runtime.create_container(request).await?.into_inner().container_id;
    let request = cri::StartContainerRequest { container_id: container_id.clone() };
    cri.runtime.start_container(request).await?;
    Ok((sandbox_id, container_id))
}

async fn states(cri: &mut Cri) -> Result<HashMap<String, i32>> {
    let listed = cri.runtime.list_containers(cri::ListContainersRequest { filter: None }).await?.into_inner();
    Ok(listed.containers.into_iter().map(|container| (container.id, container.state)).collect())
}

#[test]
fn a_private_containerd_runs_pods_survives_kill_9_and_leaves_nothing() {
    require!(containerd);
    check(Containerd::start_for_test().unwrap());
}

#[test]
fn so_does_a_private_containerd_2() {
    require!(containerd_2);
    check(Containerd::start_version_2_for_test().unwrap());
}

fn check(mut containerd: Containerd) {
    let (dir, socket) = (containerd.dir().to_path_buf(), containerd.socket());
    let parent = containerd.cgroup().path().to_owned();
    let config = sandbox("one", &parent);
    let (address, container) = block_on(async move {
        let mut cri = Cri::connect(&socket).await?;
        let command = ["/bin/testapp", "serve", "--http", "80"];
        let (sandbox, container) = run_pod(&mut cri, &config, &command).await?;
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox, verbose: false };
        let status =
            cri.runtime.pod_sandbox_status(request).await?.into_inner().status.context("no status")?;
        Ok((status.network.context("no network")?.ip, container))
    })
    .unwrap();

    // The pod serves on its own address, and its processes are in the test's cgroup.
    let answer = workdir::wait_for("the pod to answer", workdir::PATIENCE, || {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect((address.as_str(), 80))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: pod\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map(|_| answer)
    })
    .unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let processes = beelet_tests::guards::processes_below(&containerd.cgroup().dir("cpu").unwrap());
    assert!(processes.len() >= 2, "the sandbox's and the container's: {processes:?}");

    // A containerd that is killed and restarted still knows the container, which kept running.
    containerd.kill9();
    containerd.resume().unwrap();
    let socket = containerd.socket();
    let states = block_on(async move { states(&mut Cri::connect(&socket).await?).await }).unwrap();
    assert_eq!(states, HashMap::from([(container, cri::ContainerState::ContainerRunning as i32)]));

    assert_ne!(Leftovers::of(&dir).unwrap(), Leftovers::default(), "the running pods left no traces");
    drop(containerd);
    assert_eq!(Leftovers::of(&dir).unwrap(), Leftovers::default());
    // A process that has ended stays listed until its parent, which is init by now, has reaped it.
    workdir::wait_for("the pods' processes to end", workdir::PATIENCE, || {
        let alive: Vec<_> =
            processes.iter().filter(|pid| rustix::process::test_kill_process(**pid).is_ok()).collect();
        if alive.is_empty() { Ok(()) } else { Err(format!("{alive:?} are still there")) }
    })
    .unwrap();
}
