//! Access to containers: logs, commands, main processes and ports; and restarts.

mod debug;
mod ports;
mod restart;

use std::path::PathBuf;
use std::sync::Arc;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::containers_server::{Containers, ContainersServer};
use beelet_proto::beelet::exec_input::Input;
use beelet_proto::beelet::exec_output::Output;
use beelet_proto::cri;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::{SetOnce, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::manifests::Running;
use beelet_cri::{Runtime, stream as exec};
use beelet_logs::read::{self, Piece, Wanted};
use beelet_logs::{Error as LogError, Stream};
use beelet_model::pod::{container_names, default_container, log_folder};
use beelet_model::status::runtime_id;
use beelet_model::table::{FindError, PodName, PodTable};
use beelet_policy::pod::ephemeral_containers;

/// Messages queued to and from one client. A slower side blocks the other one, as a pipe does.
const QUEUE: usize = 16;

/// Returns the service. `logs` is the directory of all pods' logs.
#[must_use]
pub fn service(
    pods: watch::Receiver<Arc<PodTable>>,
    runtime: Runtime,
    logs: PathBuf,
    running: Arc<SetOnce<Running>>,
    shutdown: CancellationToken,
) -> ContainersServer<impl Containers + use<>> {
    ContainersServer::new(Service { pods, runtime, logs, running, shutdown })
}

struct Service {
    pods: watch::Receiver<Arc<PodTable>>,
    runtime: Runtime,
    logs: PathBuf,
    running: Arc<SetOnce<Running>>,
    shutdown: CancellationToken,
}

/// A container as in the table.
struct Found {
    pod: PodName,
    uid: String,
    spec: core::Container,
    status: core::ContainerStatus,
    /// Init container for which the pod's other containers wait.
    initializing: Option<String>,
    /// Names of the pod's main containers.
    others: Vec<String>,
}

impl Found {
    /// Returns the runtime's ID of the newest instance.
    fn id(&self) -> Option<&str> {
        runtime_id(&self.status)
    }

    /// Returns the runtime's ID of a running instance.
    #[allow(clippy::result_large_err)] // tonic's own error type
    fn running(&self) -> Result<&str, Status> {
        let runs = self.status.state.as_ref().is_some_and(|state| state.running.is_some());
        self.id().filter(|_| runs).ok_or_else(|| {
            let name = &self.status.name;
            Status::failed_precondition(format!("container {name} of {} is not running", self.pod))
        })
    }
}

#[tonic::async_trait]
impl Containers for Service {
    type LogsStream = ReceiverStream<Result<proto::LogsPiece, Status>>;

    async fn logs(&self, request: Request<proto::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let target = request.target.unwrap_or_default();
        let found = find(&self.pods.borrow(), &target)?;
        let others = found.others.join(", ");
        let is_chosen = target.container.is_empty() && found.others.len() > 1;
        let chosen = is_chosen.then(|| format!("{} of {others}", found.status.name));
        let attempt = attempt(&found, request.previous)?;
        let folder = log_folder(&self.logs, &found.pod, &found.uid).join(&found.status.name);
        let path = folder.join(format!("{attempt}.log"));
        if !folder.exists() {
            return Err(Status::not_found(format!("the logs of {} no longer exist", found.status.name)));
        }
        let since = request.since_ns.and_then(|ns| Timestamp::from_nanosecond(ns.into()).ok());
        let wanted = Wanted { tail: request.tail, since, timestamps: request.timestamps, stream: None };
        let runs = found.status.state.as_ref().is_some_and(|state| state.running.is_some());
        let ended = (request.follow && !request.previous && runs).then(|| ended(self.pods.clone(), found));
        let (pieces, read) = mpsc::channel(QUEUE);
        // The stream's end alone means that the container terminated, so room for the agent's shutdown error
        // is reserved.
        let (sender, receiver) = mpsc::channel(QUEUE + 2);
        let last = sender.clone().try_reserve_owned();
        if let Some(chosen) = chosen {
            let _ = sender.try_send(Ok(proto::LogsPiece { chosen, ..proto::LogsPiece::default() }));
        }
        let shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            let reading = read::read(path, wanted, pieces, ended);
            tokio::select! {
                () = forward(reading, read, &sender) => {}
                () = sender.closed() => {}
                () = shutdown.cancelled() => {
                    if let Ok(last) = last {
                        last.send(Err(Status::unavailable("the agent is shutting down")));
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type ExecStream = ReceiverStream<Result<proto::ExecOutput, Status>>;

    async fn exec(
        &self,
        request: Request<Streaming<proto::ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let mut inputs = request.into_inner();
        let first = inputs.message().await?.and_then(|input| input.input);
        let Some(Input::Start(start)) = first else {
            return Err(Status::invalid_argument("the first input must contain the command"));
        };
        if start.command.is_empty() {
            return Err(Status::invalid_argument("the command is empty"));
        }
        let found = find(&self.pods.borrow(), &start.target.clone().unwrap_or_default())?;
        let command = cri::ExecRequest {
            container_id: found.running()?.to_owned(),
            cmd: start.command,
            tty: start.tty,
            stdin: start.stdin,
            stdout: true,
            // A terminal has a single output.
            stderr: !start.tty,
        };
        let url = self.runtime.streams.exec(command).await.map_err(|e| Status::unavailable(e.to_string()))?;
        let streams = exec::Streams { stdin: start.stdin, tty: start.tty };
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(run(url, streams, inputs, sender, self.shutdown.clone()));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type AttachStream = ReceiverStream<Result<proto::ExecOutput, Status>>;

    async fn attach(
        &self,
        request: Request<Streaming<proto::ExecInput>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut inputs = request.into_inner();
        let first = inputs.message().await?.and_then(|input| input.input);
        let Some(Input::Start(start)) = first else {
            return Err(Status::invalid_argument("the first input must name the container"));
        };
        let found = find(&self.pods.borrow(), &start.target.unwrap_or_default())?;
        if start.stdin && !found.spec.stdin.unwrap_or_default() {
            let (name, pod) = (&found.status.name, &found.pod);
            let why = "has no standard input (its manifest does not set `stdin: true`)";
            return Err(Status::failed_precondition(format!("container {name} of {pod} {why}: omit `-i`")));
        }
        // The container's creation decided whether it has a terminal.
        let streams = exec::Streams { stdin: start.stdin, tty: found.spec.tty.unwrap_or_default() };
        let wanted = cri::AttachRequest {
            container_id: found.running()?.to_owned(),
            stdin: streams.stdin,
            tty: streams.tty,
            stdout: true,
            stderr: !streams.tty,
        };
        let url =
            self.runtime.streams.attach(wanted).await.map_err(|e| Status::unavailable(e.to_string()))?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(run(url, streams, inputs, sender, self.shutdown.clone()));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type PortForwardStream = ReceiverStream<Result<proto::PortOutput, Status>>;

    async fn port_forward(
        &self,
        request: Request<Streaming<proto::PortInput>>,
    ) -> Result<Response<Self::PortForwardStream>, Status> {
        self.forward_port(request.into_inner()).await.map(Response::new)
    }

    async fn restart(
        &self,
        request: Request<proto::RestartRequest>,
    ) -> Result<Response<proto::RestartResponse>, Status> {
        self.restart_containers(request.into_inner()).await.map(Response::new)
    }

    async fn debug(
        &self,
        request: Request<proto::DebugRequest>,
    ) -> Result<Response<proto::DebugResponse>, Status> {
        self.debug_pod(request.into_inner()).await.map(Response::new)
    }
}

/// Forwards a log's pieces, and finally the error, if any.
async fn forward(
    reading: impl Future<Output = Result<(), LogError>>,
    mut pieces: mpsc::Receiver<Piece>,
    sender: &mpsc::Sender<Result<proto::LogsPiece, Status>>,
) {
    let sending = async {
        while let Some(piece) = pieces.recv().await {
            let time_ns = piece.time.and_then(|time| i64::try_from(time.as_nanosecond()).ok());
            let piece = proto::LogsPiece {
                stderr: piece.stream == Stream::Err,
                data: piece.bytes,
                time_ns: time_ns.unwrap_or_default(),
                chosen: String::new(),
            };
            if sender.send(Ok(piece)).await.is_err() {
                return;
            }
        }
    };
    let (read, ()) = tokio::join!(reading, sending);
    if let Err(error) = read
        && !matches!(error, LogError::Closed)
    {
        // The client may have disconnected.
        let _ = sender.send(Err(Status::internal(format!("cannot read the log: {error}")))).await;
    }
}

/// Connects a client with a command, both ways, until the command has exited or the client has disconnected.
async fn run(
    url: String,
    streams: exec::Streams,
    mut inputs: Streaming<proto::ExecInput>,
    sender: mpsc::Sender<Result<proto::ExecOutput, Status>>,
    shutdown: CancellationToken,
) {
    let (to_command, input) = mpsc::channel(QUEUE);
    let (output, mut from_command) = mpsc::channel(QUEUE);
    let reading = async move {
        while let Ok(Some(message)) = inputs.message().await {
            let input = match message.input {
                Some(Input::Stdin(bytes)) => exec::Input::Stdin(bytes),
                Some(Input::StdinClosed(_)) => exec::Input::StdinClosed,
                Some(Input::Resize(size)) => exec::Input::Resize { columns: size.columns, rows: size.rows },
                Some(Input::Start(_)) | None => continue,
            };
            if to_command.send(input).await.is_err() {
                return;
            }
        }
    };
    let sending = async {
        while let Some(output) = from_command.recv().await {
            let output = match output {
                exec::Output::Stdout(bytes) => Output::Stdout(bytes),
                exec::Output::Stderr(bytes) => Output::Stderr(bytes),
                exec::Output::Exit(code) => Output::ExitCode(code),
            };
            if sender.send(Ok(proto::ExecOutput { output: Some(output) })).await.is_err() {
                return;
            }
        }
    };
    let session = exec::stream(&url, streams, input, output);
    let whole = async {
        // The client may close its side first; the command continues.
        let never = async {
            reading.await;
            std::future::pending::<()>().await;
        };
        let both = async { tokio::join!(session, sending).0 };
        tokio::select! {
            ended = both => ended,
            () = never => Ok(()),
        }
    };
    let failed = tokio::select! {
        ended = whole => ended.err().map(|error| error.to_string()),
        () = sender.closed() => None,
        () = shutdown.cancelled() => Some("the agent is shutting down".to_owned()),
    };
    if let Some(error) = failed {
        // The client may have disconnected.
        let _ = sender.try_send(Err(Status::unavailable(error)));
    }
}

/// Returns the status for a missing or ambiguous pod name.
#[allow(clippy::needless_pass_by_value)] // for map_err
fn not_found(error: FindError) -> Status {
    Status::not_found(error.to_string())
}

/// Finds a container by the names in a request.
#[allow(clippy::result_large_err)] // tonic's own error type
fn find(table: &PodTable, target: &proto::ContainerTarget) -> Result<Found, Status> {
    let (name, entry) = table.find(&target.namespace, &target.pod).map_err(not_found)?;
    let spec = entry.pod.spec.clone().unwrap_or_default();
    let wanted = match target.container.as_str() {
        "" => default_container(&entry.pod).to_owned(),
        container => container.to_owned(),
    };
    let status = entry.pod.status.as_ref();
    let statuses: Vec<&core::ContainerStatus> = status.into_iter().flat_map(statuses_of).collect();
    let found = statuses.iter().find(|status| status.name == wanted).ok_or_else(|| {
        let names = container_names(&spec);
        if !names.contains(&wanted.as_str()) {
            return Status::not_found(format!(
                "{name} has no container {wanted:?}; it has {}",
                names.join(", ")
            ));
        }
        // A rejected pod has no container statuses.
        let words = [status.and_then(|s| s.reason.as_ref()), status.and_then(|s| s.message.as_ref())];
        let why: Vec<&str> = words.into_iter().flatten().map(String::as_str).collect();
        let why = if why.is_empty() { String::new() } else { format!(": {}", why.join(": ")) };
        Status::not_found(format!("container {wanted} of {name} was never started{why}"))
    })?;
    let others = spec.containers.iter().map(|container| container.name.clone()).collect();
    let uid = entry.pod.metadata.uid.clone().unwrap_or_default();
    let ephemeral = ephemeral_containers(&spec);
    let usual = spec.containers.into_iter().chain(spec.init_containers.into_iter().flatten());
    let mut containers = usual.chain(ephemeral);
    let spec = containers.find(|container| container.name == wanted).unwrap_or_default();
    let initializing = status.and_then(initializing);
    Ok(Found { pod: name.clone(), uid, spec, status: (*found).clone(), initializing, others })
}

/// Returns the first init container that has neither completed nor, as a sidecar, started.
fn initializing(status: &core::PodStatus) -> Option<String> {
    let waits = |status: &&core::ContainerStatus| {
        let ended = status.state.as_ref().and_then(|state| state.terminated.as_ref());
        ended.is_none_or(|ended| ended.exit_code != 0) && status.started != Some(true)
    };
    status.init_container_statuses.iter().flatten().find(waits).map(|status| status.name.clone())
}

/// Returns the statuses of all kinds of containers of a pod.
fn statuses_of(status: &core::PodStatus) -> impl Iterator<Item = &core::ContainerStatus> {
    let usual = status.container_statuses.iter().chain(&status.init_container_statuses);
    usual.chain(&status.ephemeral_container_statuses).flatten()
}

/// Returns the attempt number of the instance whose log is requested.
#[allow(clippy::result_large_err)] // tonic's own error type
fn attempt(found: &Found, previous: bool) -> Result<u32, Status> {
    let name = &found.status.name;
    let newest = u32::try_from(found.status.restart_count).unwrap_or(0);
    if previous {
        let before = newest.checked_sub(1);
        return before.ok_or_else(|| {
            Status::not_found(format!("container {name} of {} has not been restarted yet", found.pod))
        });
    }
    if found.status.container_id.is_none() {
        let waiting = found.status.state.as_ref().and_then(|state| state.waiting.as_ref());
        let why = waiting.and_then(|waiting| waiting.reason.clone()).unwrap_or_default();
        let init = found.initializing.as_ref().filter(|init| *init != name);
        let hint = init.map(|init| format!(": waiting for init container {init} (`-c {init}`)"));
        return Err(Status::failed_precondition(format!(
            "container {name} of {} has not started yet ({why}){}",
            found.pod,
            hint.unwrap_or_default()
        )));
    }
    Ok(newest)
}

/// Waits until the given instance no longer runs.
async fn ended(mut pods: watch::Receiver<Arc<PodTable>>, found: Found) {
    let over = |table: &Arc<PodTable>| {
        let Some(entry) = table.pods.get(&found.pod) else { return true };
        let status = entry.pod.status.as_ref();
        let mut statuses = status.into_iter().flat_map(statuses_of);
        let now = statuses.find(|status| status.name == found.status.name);
        let same = now.is_some_and(|now| now.container_id == found.status.container_id);
        !same || now.is_none_or(|now| now.state.as_ref().is_none_or(|state| state.running.is_none()))
    };
    if pods.wait_for(over).await.is_err() {
        // The table was dropped: the agent is shutting down, but the container runs.
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio_stream::StreamExt;

    use super::*;
    use beelet_model::table::PodEntry;

    fn table(state: serde_json::Value, restarts: i32) -> PodTable {
        let id = (state["waiting"] == serde_json::Value::Null || restarts > 0).then_some("fake://c1");
        let pod = json!({
            "metadata": {"name": "web-n1", "namespace": "default", "uid": "u1"},
            "spec": {"nodeName": "n1", "containers": [{"name": "main"}, {"name": "side"}]},
            "status": {"containerStatuses": [
                {"name": "main", "image": "", "imageID": "", "ready": true, "restartCount": restarts, "state": state, "containerID": id},
                {"name": "side", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull"}}},
            ]},
        });
        let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
        let mut table = PodTable::default();
        table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        table
    }

    fn running() -> serde_json::Value {
        json!({"running": {"startedAt": "2026-11-21T19:00:00Z"}})
    }

    fn target(container: &str) -> proto::ContainerTarget {
        proto::ContainerTarget {
            pod: "web".to_owned(),
            container: container.to_owned(),
            ..Default::default()
        }
    }

    struct Fixture {
        dir: tempfile::TempDir,
        table: watch::Sender<Arc<PodTable>>,
        service: Service,
    }

    fn fixture(restarts: i32) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("default_web-n1_u1/main");
        std::fs::create_dir_all(&folder).unwrap();
        for attempt in 0..=restarts {
            let text = format!("2026-11-21T19:00:00Z stdout F attempt {attempt}\n");
            std::fs::write(folder.join(format!("{attempt}.log")), text).unwrap();
        }
        let (table, pods) = watch::channel(Arc::new(table(running(), restarts)));
        let runtime = Runtime::new("unix:///none.sock", std::time::Duration::from_secs(1)).unwrap();
        let (logs, shutdown) = (dir.path().to_owned(), CancellationToken::new());
        Fixture { dir, table, service: Service { pods, runtime, logs, running: Arc::default(), shutdown } }
    }

    async fn text(mut stream: ReceiverStream<Result<proto::LogsPiece, Status>>) -> String {
        let mut text = String::new();
        while let Some(piece) = stream.next().await {
            text.push_str(&String::from_utf8(piece.unwrap().data).unwrap());
        }
        text
    }

    #[tokio::test]
    async fn logs_of_the_newest_instance_or_of_the_one_before() {
        let fixture = fixture(1);
        let ask = async |container: &str, previous: bool| {
            let request =
                proto::LogsRequest { target: Some(target(container)), previous, ..Default::default() };
            let answer = fixture.service.logs(Request::new(request)).await;
            match answer {
                Ok(answer) => Ok(text(answer.into_inner()).await),
                Err(status) => Err(status.message().to_owned()),
            }
        };
        assert_eq!(ask("", false).await.as_deref(), Ok("attempt 1\n"));
        assert_eq!(ask("main", true).await.as_deref(), Ok("attempt 0\n"));
        let error = |answer: Result<String, String>| answer.unwrap_err();
        assert!(error(ask("side", false).await).contains("has not started yet (ErrImagePull)"));
        assert!(error(ask("side", true).await).contains("has not been restarted yet"));
        assert!(error(ask("none", false).await).contains("it has main, side"));
    }

    #[tokio::test]
    async fn which_container_was_taken_is_told_where_it_was_not_named() {
        let fixture = fixture(0);
        let chosen = async |container: &str| {
            let request = proto::LogsRequest { target: Some(target(container)), ..Default::default() };
            let mut pieces = fixture.service.logs(Request::new(request)).await.unwrap().into_inner();
            pieces.next().await.unwrap().unwrap().chosen
        };
        assert_eq!(chosen("").await, "main of main, side");
        assert_eq!(chosen("main").await, "");
    }

    #[test]
    fn a_pod_that_was_refused_has_its_containers_all_the_same() {
        let pod = json!({"metadata": {"name": "web-n1", "namespace": "default"},
            "spec": {"nodeName": "n1", "containers": [{"name": "main"}]},
            "status": {"phase": "Failed", "reason": "OutOfcpu", "message": "no room"}});
        let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
        let mut table = PodTable::default();
        table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        let error = |container: &str| match find(&table, &target(container)) {
            Ok(_) => String::new(),
            Err(status) => status.message().to_owned(),
        };
        assert_eq!(error(""), "container main of default/web-n1 was never started: OutOfcpu: no room");
        assert_eq!(error("none"), "default/web-n1 has no container \"none\"; it has main");
    }

    #[tokio::test]
    async fn a_followed_log_does_not_end_with_the_agent_as_if_its_container_had() {
        let fixture = fixture(0);
        let found = find(&fixture.service.pods.borrow(), &target("main")).unwrap();
        let log = fixture.dir.path().join("default_web-n1_u1/main/0.log");
        // More than the queue of one client holds.
        let lines = "2026-11-21T19:00:00Z stdout F attempt 0\n".repeat(100_000);
        std::fs::write(&log, lines).unwrap();
        let request = proto::LogsRequest { target: Some(target("main")), follow: true, ..Default::default() };
        let mut stream = fixture.service.logs(Request::new(request)).await.unwrap().into_inner();
        assert!(stream.next().await.unwrap().is_ok());
        // The table is dropped first.
        let mut over = std::pin::pin!(ended(fixture.service.pods.clone(), found));
        drop(fixture.table);
        let polled =
            std::future::poll_fn(|context| std::task::Poll::Ready(over.as_mut().poll(context))).await;
        assert!(polled.is_pending(), "a dropped table does not end the container");
        fixture.service.shutdown.cancel();
        let mut last = None;
        while let Some(piece) = stream.next().await {
            last = Some(piece);
        }
        assert_eq!(last.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
    }

    #[tokio::test]
    async fn a_followed_log_ends_with_its_container() {
        let fixture = fixture(0);
        let request = proto::LogsRequest { target: Some(target("main")), follow: true, ..Default::default() };
        let mut stream = fixture.service.logs(Request::new(request)).await.unwrap().into_inner();
        assert_eq!(stream.next().await.unwrap().unwrap().data, b"attempt 0\n");
        let log = fixture.dir.path().join("default_web-n1_u1/main/0.log");
        let more = "2026-11-21T19:00:00Z stdout F attempt 0\n2026-11-21T19:00:01Z stderr F last\n";
        std::fs::write(&log, more).unwrap();
        let piece = stream.next().await.unwrap().unwrap();
        assert_eq!((piece.data.as_slice(), piece.stderr), (b"last\n".as_slice(), true));
        let ended = json!({"terminated": {"exitCode": 0}});
        fixture.table.send_replace(Arc::new(table(ended, 0)));
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn nothing_runs_in_a_container_that_does_not_run() {
        let found = find(&table(json!({"waiting": {"reason": "CrashLoopBackOff"}}), 1), &target("")).unwrap();
        assert!(found.status.state.unwrap().running.is_none());
    }
}
