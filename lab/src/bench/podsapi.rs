//! The pods API (KEP-4188) of a full node, as its clients see it.

use super::probes::Change;
use anyhow::{Context as _, Result};
use beelet_proto::pods::{
    EventType, GetPodRequest, ListPodsRequest, WatchPodsRequest, pods_client::PodsClient,
};
use beelet_tests::agent::{Agent, monotonic_ns};
use beelet_tests::containerd::{block_on, connect};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Instant;

/// Text in the kubelet's status of a pod whose containers are not ready: the pod's bytes contain it only
/// then.
const UNREADY: &[u8] = b"ContainersNotReady";

fn socket(agent: &Agent) -> PathBuf {
    agent.dir().join("kubelet/pods-api/pods-api.sock")
}

/// Returns the duration of each of `calls` lists on one connection, in milliseconds.
pub(super) fn lists(agent: &Agent, calls: usize, pods: usize) -> Result<Vec<f64>> {
    let socket = socket(agent);
    block_on(async move {
        let mut client = PodsClient::new(connect(&socket).await?);
        let mut samples = Vec::new();
        for _ in 0..calls {
            let began = Instant::now();
            let listed = client.list_pods(ListPodsRequest {}).await.context("ListPods")?.into_inner();
            samples.push(began.elapsed().as_secs_f64() * 1e3);
            anyhow::ensure!(listed.pods.len() == pods, "{} pods are listed of {pods}", listed.pods.len());
        }
        Ok(samples)
    })
}

/// Returns the duration of each of `calls` queries for one pod on one connection, in milliseconds: the cost
/// of a call with almost no data.
pub(super) fn gets(agent: &Agent, calls: usize, pod: &str) -> Result<Vec<f64>> {
    let socket = socket(agent);
    let pod_uid = agent.until("the pod's UID", |watch| Some(watch.pod(pod)?.uid().to_owned()))?;
    block_on(async move {
        let mut client = PodsClient::new(connect(&socket).await?);
        let mut samples = Vec::new();
        for _ in 0..calls {
            let began = Instant::now();
            client.get_pod(GetPodRequest { pod_uid: pod_uid.clone() }).await.context("GetPod")?;
            samples.push(began.elapsed().as_secs_f64() * 1e3);
        }
        Ok(samples)
    })
}

/// Watches a pod on a separate thread, which timestamps each change of readiness on arrival.
pub(super) fn watch_readiness(agent: &Agent, pod: &'static str) -> Result<mpsc::Receiver<Change>> {
    let socket = socket(agent);
    let (sender, receiver) = mpsc::channel();
    let (watching, started) = mpsc::channel();
    std::thread::spawn(move || {
        let watched = block_on(async move {
            let mut client = PodsClient::new(connect(&socket).await?);
            let mut events = client.watch_pods(WatchPodsRequest {}).await.context("WatchPods")?.into_inner();
            let mut last = None;
            while let Some(event) = events.message().await? {
                let at = monotonic_ns();
                if event.r#type() == EventType::InitialSyncComplete {
                    let _ = watching.send(());
                }
                if !has(&event.pod, pod.as_bytes()) {
                    continue;
                }
                let ready = !has(&event.pod, UNREADY);
                if last.replace(ready).is_some_and(|last| last != ready)
                    && sender.send(Change { ready, at }).is_err()
                {
                    break;
                }
            }
            anyhow::Ok(())
        });
        // The stream breaks when the agent ends; an earlier break is reported by the receiver as a missing
        // change.
        watched.unwrap_or_default();
    });
    started.recv().context("cannot watch the pods API")?;
    Ok(receiver)
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
