//! The agent's client of the container runtime, against a runtime that fails on demand.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::time::{Duration, Instant};

use beelet_cri::{Kind, Operation, Runtime};
use beelet_proto::cri;
use beelet_tests::cri::{Asked, FakeCri, Op, Outcome, PATIENCE};
use beelet_units::cgroup_driver::CgroupDriver;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;
use tonic::Code;

/// Time longer than any test takes.
const LONG: Duration = Duration::from_secs(120);

fn client(cri: &FakeCri) -> Runtime {
    client_with(cri, LONG)
}

fn client_with(cri: &FakeCri, timeout: Duration) -> Runtime {
    Runtime::new(&cri.endpoint(), timeout).unwrap()
}

fn sandbox_config(name: &str) -> cri::PodSandboxConfig {
    let metadata = cri::PodSandboxMetadata {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        uid: format!("{name}-uid"),
        attempt: 0,
    };
    cri::PodSandboxConfig {
        metadata: Some(metadata),
        log_directory: "/var/log/pods/x".to_owned(),
        ..cri::PodSandboxConfig::default()
    }
}

fn container_config(name: &str) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: "busybox:1.36".to_owned(), ..cri::ImageSpec::default() }),
        log_path: format!("{name}/0.log"),
        ..cri::ContainerConfig::default()
    }
}

#[tokio::test]
async fn a_pod_is_created_and_removed_through_the_client() {
    let cri = FakeCri::start();
    cri.add_to_registry("busybox:1.36");
    let runtime = client(&cri);
    let config = sandbox_config("web");

    assert_eq!(runtime.images.status("busybox:1.36").await.unwrap(), None);
    let image = runtime.images.pull("busybox:1.36", None, &config).await.unwrap();
    assert_eq!(
        runtime.images.status("busybox:1.36").await.unwrap().map(|found| found.id),
        Some(image.clone())
    );
    assert_eq!(runtime.images.list().await.unwrap().len(), 1);

    let sandbox = runtime.sandboxes.run(config.clone(), "").await.unwrap();
    let container = runtime.containers.create(&sandbox, container_config("main"), &config).await.unwrap();
    runtime.containers.start(&container).await.unwrap();
    let status = runtime.containers.status(&container, false).await.unwrap().status.unwrap();
    assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
    assert_eq!(status.log_path, "/var/log/pods/x/main/0.log");
    assert_eq!(status.image_ref, image);

    let running = cri::ContainerStateValue { state: cri::ContainerState::ContainerRunning.into() };
    let filter = cri::ContainerFilter { state: Some(running), ..cri::ContainerFilter::default() };
    assert_eq!(runtime.containers.list(Some(filter.clone())).await.unwrap().len(), 1);
    cri.exit(&container, 3);
    assert_eq!(runtime.containers.list(Some(filter)).await.unwrap().len(), 0);
    let status = runtime.containers.status(&container, false).await.unwrap().status.unwrap();
    assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"));

    runtime.containers.stop(&container, Duration::from_secs(30)).await.unwrap();
    runtime.containers.remove(&container).await.unwrap();
    runtime.sandboxes.stop(&sandbox).await.unwrap();
    let state = runtime.sandboxes.status(&sandbox, false).await.unwrap().status.unwrap().state();
    assert_eq!(state, cri::PodSandboxState::SandboxNotready);
    runtime.sandboxes.remove(&sandbox).await.unwrap();
    assert_eq!(runtime.sandboxes.list(None).await.unwrap(), []);
    assert!(runtime.containers.status(&container, false).await.unwrap_err().is_not_found());
    runtime.images.remove("busybox:1.36").await.unwrap();
    assert_eq!(runtime.images.list().await.unwrap(), []);
}

#[tokio::test]
async fn a_verbose_status_carries_the_runtimes_info() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    let id = runtime.sandboxes.run(sandbox_config("web"), "").await.unwrap();
    cri.set_sandbox_info(&id, serde_json::json!({ "pid": 42 }));
    let info = runtime.sandboxes.status(&id, true).await.unwrap().info;
    assert_eq!(info["info"], r#"{"pid":42}"#);
    assert!(runtime.sandboxes.status(&id, false).await.unwrap().info.is_empty());
}

#[tokio::test]
async fn a_runtime_without_runtime_config_is_accepted() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    assert_eq!(runtime.runtime_config().await.unwrap(), None);
    cri.change(|world| world.cgroup_driver = Some(cri::CgroupDriver::Systemd));
    assert_eq!(runtime.runtime_config().await.unwrap(), Some(CgroupDriver::Systemd));
    cri.change(|world| world.cgroup_driver = Some(cri::CgroupDriver::Cgroupfs));
    assert_eq!(runtime.runtime_config().await.unwrap(), Some(CgroupDriver::Cgroupfs));
}

#[tokio::test]
async fn an_absent_runtime_is_named_with_its_socket() {
    let cri = FakeCri::absent();
    let error = client(&cri).version().await.unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable);
    assert!(error.is_transient());
    let text = error.to_string();
    let socket = cri.socket().display().to_string();
    assert!(text.starts_with("cannot ask the container runtime for its version: "), "{text}");
    assert!(text.contains(&socket) && text.contains("No such file") && text.contains("start it"), "{text}");
}

#[tokio::test]
async fn an_error_names_the_pod_and_the_container() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    let config = sandbox_config("web");
    cri.on(Op::RunPodSandbox).fail(Code::Unknown, "failed to set up network: no addresses left");
    let error = runtime.sandboxes.run(config.clone(), "").await.unwrap_err();
    assert_eq!(error.operation, Operation::RunSandbox);
    assert_eq!(
        error.to_string(),
        "cannot run the sandbox of pod default/web: failed to set up network: no addresses left"
    );
    let sandbox = runtime.sandboxes.run(config.clone(), "").await.unwrap();
    let error = runtime.containers.create(&sandbox, container_config("main"), &config).await.unwrap_err();
    assert!(error.is_not_found(), "{error}");
    assert!(error.to_string().starts_with("cannot create container main of pod default/web: "), "{error}");
    let error = runtime.images.pull("nowhere/none:1", None, &config).await.unwrap_err();
    assert!(
        error.to_string().starts_with("cannot pull image nowhere/none:1 for pod default/web: "),
        "{error}"
    );
    let error = runtime.containers.start(&"0123456789abcdef".repeat(4)).await.unwrap_err();
    assert!(error.to_string().starts_with("cannot start container 0123456789abc: "), "{error}");
}

#[tokio::test]
async fn a_runtime_that_restarts_is_found_again_at_the_next_call() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    let id = runtime.sandboxes.run(sandbox_config("web"), "").await.unwrap();
    for _ in 0..5 {
        cri.restart();
        assert_eq!(runtime.sandboxes.list(None).await.unwrap()[0].id, id);
        cri.crash();
        let error = runtime.sandboxes.list(None).await.unwrap_err();
        assert_eq!(error.kind, Kind::Unavailable, "{error}");
        cri.come_back();
        assert_eq!(runtime.sandboxes.list(None).await.unwrap()[0].id, id);
        // A call that changes state is not retried, so it must find the new connection at once.
        runtime.sandboxes.stop(&id).await.unwrap();
    }
}

#[tokio::test]
async fn a_restarted_runtime_is_used_at_once_after_any_downtime() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    runtime.version().await.unwrap();
    cri.go_away();
    for _ in 0..50 {
        assert!(runtime.version().await.unwrap_err().is_transient());
    }
    cri.come_back();
    runtime.version().await.unwrap();
}

#[tokio::test]
async fn a_read_is_repeated_when_its_connection_breaks() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    cri.on(Op::ListContainers).break_connections();
    assert_eq!(runtime.containers.list(None).await.unwrap(), []);
    assert_eq!(cri.count(Op::ListContainers), 2);
}

#[tokio::test]
async fn a_change_is_never_repeated() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    cri.on(Op::RunPodSandbox).break_connections();
    let error = runtime.sandboxes.run(sandbox_config("web"), "").await.unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    assert!(error.to_string().contains("the connection to the container runtime at"), "{error}");
    assert_eq!(cri.count(Op::RunPodSandbox), 1);
    assert_eq!(runtime.sandboxes.list(None).await.unwrap().len(), 1, "the call was not executed");
}

#[tokio::test]
async fn a_lost_reply_is_unavailable_and_was_done() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    cri.on(Op::RunPodSandbox).lose_reply();
    let error = runtime.sandboxes.run(sandbox_config("web"), "").await.unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    assert_eq!(cri.world().sandboxes.len(), 1);
}

#[tokio::test]
async fn a_call_that_hangs_ends_at_its_deadline_and_is_cancelled_in_the_runtime() {
    let cri = FakeCri::start();
    let runtime = client_with(&cri, Duration::from_millis(200));
    let held = cri.on(Op::StartContainer).always().hold();
    let error = runtime.containers.start("x").await.unwrap_err();
    assert_eq!(error.kind, Kind::Timeout, "{error}");
    assert!(error.to_string().contains("did not answer within 200ms"), "{error}");
    let dropped =
        |call: &beelet_tests::cri::Call| call.op() == Op::StartContainer && call.outcome != Outcome::Pending;
    let call = cri.wait_for("the call to be cancelled", dropped).await;
    assert_ne!(call.outcome, Outcome::Answered(Code::Ok));
    drop(held);
    runtime.version().await.unwrap();
}

#[tokio::test]
async fn other_calls_continue_while_one_hangs() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    let held = cri.on(Op::Status).hold();
    let hanging = tokio::spawn({
        let runtime = runtime.clone();
        async move { runtime.status(false).await }
    });
    held.reached().await;
    for _ in 0..20 {
        runtime.version().await.unwrap();
    }
    held.release();
    assert_eq!(hanging.await.unwrap().unwrap().status.unwrap().conditions.len(), 2);
}

#[tokio::test]
async fn each_call_carries_its_deadline() {
    let cri = FakeCri::start();
    cri.add_to_registry("busybox:1.36");
    let runtime = client(&cri);
    let config = sandbox_config("web");
    let id = runtime.sandboxes.run(config.clone(), "").await.unwrap();
    runtime.containers.stop("x", Duration::from_secs(30)).await.unwrap();
    runtime.images.pull("busybox:1.36", None, &config).await.unwrap();
    runtime.sandboxes.stop(&id).await.unwrap();
    let deadline = |op: Op| {
        let call = cri.calls().into_iter().find(|call| call.op() == op).unwrap();
        call.timeout.map(|text| {
            let (number, unit) = text.split_at(text.len() - 1);
            let scale = match unit {
                "S" => 1.0,
                "m" => 1e-3,
                "u" => 1e-6,
                "n" => 1e-9,
                other => panic!("a unit of {other}"),
            };
            number.parse::<f64>().unwrap() * scale
        })
    };
    assert_eq!(deadline(Op::StopPodSandbox), Some(120.0));
    assert_eq!(deadline(Op::RunPodSandbox), Some(240.0), "CNI and the pause image take longer");
    assert_eq!(deadline(Op::StopContainer), Some(150.0), "the grace period is added");
    assert_eq!(deadline(Op::PullImage), None, "the runtime checks a pull's progress");
    let stop = cri.wait_for("a stop", |call| call.op() == Op::StopContainer).await;
    assert_eq!(
        stop.asked,
        Asked::StopContainer(cri::StopContainerRequest { container_id: "x".into(), timeout: 30 })
    );
}

#[tokio::test]
async fn no_timeout_exceeds_the_runtimes_maximum() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    // The results don't matter here: the requests do.
    for time in
        [Duration::MAX, Duration::from_secs(i64::MAX.unsigned_abs()), Duration::from_secs(400_000_000_000)]
    {
        runtime.containers.stop("x", time).await.unwrap();
        let _ = runtime.containers.exec_sync("x", vec!["true".to_owned()], time).await;
        let _ = runtime.containers.checkpoint("x", std::path::Path::new("/x"), time).await;
    }
    let seconds = |call: beelet_tests::cri::Call| match call.asked {
        Asked::StopContainer(request) => Some(request.timeout),
        Asked::ExecSync(request) => Some(request.timeout),
        Asked::CheckpointContainer(request) => Some(request.timeout),
        _ => None,
    };
    let seconds: Vec<i64> = cri.calls().into_iter().filter_map(seconds).collect();
    assert_eq!(seconds.len(), 9);
    assert!(
        seconds.iter().all(|seconds| *seconds > 0 && seconds.checked_mul(1_000_000_000).is_some()),
        "{seconds:?}"
    );
}

#[tokio::test]
async fn waiting_for_the_runtime_ends_when_it_answers() {
    let cri = FakeCri::absent();
    let runtime = client(&cri);
    let cancel = CancellationToken::new();
    let waiting = tokio::spawn({
        let (runtime, cancel) = (runtime.clone(), cancel.clone());
        async move { runtime.wait_ready(&cancel).await }
    });
    // The runtime listens before it can answer, as containerd does while its plugins load.
    cri.on(Op::Version).times(3).fail(Code::Unimplemented, "unknown service runtime.v1.RuntimeService");
    cri.come_back();
    let version = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap();
    assert_eq!(version.map(|version| version.runtime_name).as_deref(), Some("fake"));
    assert_eq!(cri.count(Op::Version), 4);
}

#[tokio::test]
async fn waiting_for_the_runtime_can_be_cancelled() {
    let cri = FakeCri::absent();
    let cancel = CancellationToken::new();
    let runtime = client(&cri);
    let waiting = tokio::spawn({
        let cancel = cancel.clone();
        async move { runtime.wait_ready(&cancel).await }
    });
    cancel.cancel();
    assert_eq!(tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap(), None);
}

#[tokio::test]
async fn answers_larger_than_four_mebibytes_are_read() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    cri.change(|world| {
        world.image_fs.image_filesystems = vec![cri::FilesystemUsage {
            fs_id: Some(cri::FilesystemIdentifier { mountpoint: "x".repeat(10 << 20) }),
            ..cri::FilesystemUsage::default()
        }];
    });
    assert_eq!(runtime.images.fs_info().await.unwrap().image_filesystems.len(), 1);
    cri.change(|world| {
        let again = world.image_fs.image_filesystems[0].clone();
        world.image_fs.image_filesystems.push(again);
    });
    let error = runtime.images.fs_info().await.unwrap_err();
    assert_eq!(error.kind, Kind::Other, "{error}");
    assert!(error.to_string().contains("16 MiB"), "{error}");
}

#[tokio::test]
async fn images_may_have_their_own_socket() {
    let (calls, images) = (FakeCri::start(), FakeCri::start());
    let runtime = client(&calls).with_image_endpoint(&images.endpoint()).unwrap();
    images.add_image("busybox:1.36");
    assert_eq!(runtime.images.list().await.unwrap().len(), 1);
    runtime.version().await.unwrap();
    assert_eq!((calls.count(Op::ListImages), images.count(Op::Version)), (0, 0));
}

#[tokio::test]
async fn calls_are_counted_as_the_kubelet_counts_them() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    cri.on(Op::Status).fail(Code::Unknown, "no");
    runtime.status(false).await.unwrap_err();
    runtime.clone().status(false).await.unwrap();
    runtime.sandboxes.list(None).await.unwrap();
    let mut registry = Registry::default();
    runtime.register_metrics(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in [
        "kubelet_runtime_operations_total{operation_type=\"status\"} 2",
        "kubelet_runtime_operations_total{operation_type=\"list_podsandbox\"} 1",
        "kubelet_runtime_operations_errors_total{operation_type=\"status\"} 1",
        "kubelet_runtime_operations_duration_seconds_count{operation_type=\"status\"} 2",
        "kubelet_runtime_operations_duration_seconds_bucket{le=\"0.005\",operation_type=\"list_podsandbox\"}",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn a_slow_runtime_is_waited_for() {
    let cri = FakeCri::start();
    let delay = Duration::from_millis(300);
    cri.on(Op::Version).after(delay).proceed();
    let started = Instant::now();
    client(&cri).version().await.unwrap();
    assert!(started.elapsed() >= delay);
}

#[tokio::test]
async fn a_name_is_taken_until_its_owner_is_removed() {
    let cri = FakeCri::start();
    let runtime = client(&cri);
    let first = runtime.sandboxes.run(sandbox_config("web"), "").await.unwrap();
    let error = runtime.sandboxes.run(sandbox_config("web"), "").await.unwrap_err();
    assert!(error.to_string().contains("is reserved for"), "{error}");
    runtime.sandboxes.remove(&first).await.unwrap();
    runtime.sandboxes.run(sandbox_config("web"), "").await.unwrap();
}

#[tokio::test]
async fn a_container_needs_a_ready_sandbox_and_starts_once() {
    let cri = FakeCri::start();
    cri.add_image("busybox:1.36");
    let runtime = client(&cri);
    let config = sandbox_config("web");
    let sandbox = runtime.sandboxes.run(config.clone(), "").await.unwrap();
    let container = runtime.containers.create(&sandbox, container_config("main"), &config).await.unwrap();
    runtime.containers.start(&container).await.unwrap();
    let error = runtime.containers.start(&container).await.unwrap_err();
    assert!(error.to_string().contains("CONTAINER_RUNNING"), "{error}");
    runtime.sandboxes.stop(&sandbox).await.unwrap();
    assert_eq!(cri.container("web", "main").unwrap().exit_code, 137);
    let error = runtime.containers.create(&sandbox, container_config("side"), &config).await.unwrap_err();
    assert!(error.to_string().contains("is not running"), "{error}");
}
