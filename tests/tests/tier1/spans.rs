//! Spans of a pod's start, as a collector receives them.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

use beelet_tests::cri::Op;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{manifests, ports, require};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::hostile::scene::Scene;

/// A collector that keeps the received spans.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let all = request.into_inner().resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        self.0.lock().unwrap().extend(all.flat_map(|scope| scope.spans));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Starts a collector on a separate port.
fn collect() -> (Collector, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let collector = Collector::default();
    let service = TraceServiceServer::new(collector.clone());
    let listener = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(listener));
    (collector, address)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const RUN: &str = "runtime.v1.RuntimeService/RunPodSandbox";
const START: &str = "runtime.v1.RuntimeService/StartContainer";

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_gets_the_nested_spans_of_a_pods_start() {
    require!(root);
    let (collector, address) = collect();
    let scene = Scene::start(|_, options| {
        let tracing = json!({ "endpoint": address.to_string(), "samplingRatePerMillion": 1_000_000 });
        options.kubelet("tracing", tracing)
    });
    scene.apply(&manifests::pod("web", &["/bin/testapp"]));
    scene.until_ready("web");
    let wanted = [
        "startPod",
        "syncPod",
        "createSandbox",
        RUN,
        "ensureImageExists",
        "startContainer",
        START,
        "firstReady",
    ];
    // Spans arrive in several batches, and other work has spans of the same names.
    let (spans, trace) = wait_for("the spans of the pod, in one trace", PATIENCE, || {
        let spans = collector.0.lock().unwrap().clone();
        let is_in =
            |trace: &[u8], name: &str| spans.iter().any(|span| span.name == name && span.trace_id == trace);
        let whole = |span: &&Span| wanted.iter().all(|name| is_in(&span.trace_id, name));
        let trace = spans.iter().find(whole).map(|span| span.trace_id.clone());
        trace.map(|trace| (spans.clone(), trace)).ok_or_else(|| {
            let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
            format!("each trace lacks some of {wanted:?}; received {names:?}")
        })
    })
    .unwrap();
    let by_id: BTreeMap<&[u8], &Span> = spans.iter().map(|span| (&span.span_id[..], span)).collect();
    let named = |name: &str| spans.iter().find(|span| span.name == name && span.trace_id == trace).unwrap();
    // Returns the names from a span up to its root.
    let way = |name: &str| {
        let mut span = named(name);
        let mut names = vec![span.name.as_str()];
        while let Some(above) = by_id.get(&span.parent_span_id[..]) {
            span = above;
            names.push(span.name.as_str());
        }
        names
    };
    assert_eq!(way(RUN), [RUN, "createSandbox", "syncPod", "startPod"]);
    assert_eq!(way(START), [START, "startContainer", "syncPod", "startPod"]);
    assert_eq!(way("ensureImageExists"), ["ensureImageExists", "startContainer", "syncPod", "startPod"]);
    assert_eq!(way("firstReady"), ["firstReady", "startPod"]);
    // The call carries the parent span for the runtime's own spans.
    let ran = scene.cri.calls().into_iter().find(|call| call.op() == Op::RunPodSandbox).unwrap();
    let expected = format!("00-{}-{}-01", hex(&trace), hex(&named(RUN).span_id));
    assert_eq!(ran.parent, Some(expected));
    let lines = scene.agent.log();
    assert!(!lines.contains("syncPod") && !lines.contains("startPod"), "spans appear in the log: {lines}");
    scene.is_well();
}

#[test]
fn without_tracing_no_call_has_a_span() {
    require!(root);
    let scene = Scene::start(|_, options| {
        options.kubelet("tracing", json!({ "endpoint": "127.0.0.1:1", "samplingRatePerMillion": 0 }))
    });
    scene.apply(&manifests::pod("web", &["/bin/testapp"]));
    scene.until_ready("web");
    let calls = scene.cri.calls();
    assert!(calls.iter().all(|call| call.parent.is_none()), "{calls:?}");
}

#[test]
fn an_absent_collector_is_reported_once_and_delays_nothing() {
    require!(root);
    let [port] = ports::free().unwrap();
    let scene = Scene::start(|_, options| {
        let tracing = json!({ "endpoint": format!("127.0.0.1:{port}"), "samplingRatePerMillion": 1_000_000 });
        options.kubelet("tracing", tracing)
    });
    scene.until_logged("cannot send spans; dropping them");
    scene.apply(&manifests::pod("web", &["/bin/testapp"]));
    scene.until_ready("web");
    scene.is_well();
}
