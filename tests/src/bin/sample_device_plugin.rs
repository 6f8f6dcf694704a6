//! Device plugin that follows a script: v1beta1 over real sockets, in its own process. For tests and the
//! demo.
//!
//!     sample_device_plugin --dir DEVICE_PLUGINS_DIR [--resource NAME] [--socket NAME] [--registry]
//!                          [--devices LIST] [--pre-start] [--preferred] [--deaf] [--mount HOST:CONTAINER]
//!                          [--device HOST:CONTAINER] [--cdi NAME] [--env NAME]
//!
//! The plugin registers at `kubelet.sock` in the folder, and again whenever that socket is created again
//! (unless `--deaf`), like real plugins; with `--registry` it waits there until the agent finds it. Lines on
//! standard input change the plugin's behavior; it prints a line for each event to standard output.
//!
//! | line | effect |
//! | --- | --- |
//! | `devices a b@1 !c` | lists these; `@` sets a NUMA node, `!` marks an unhealthy device |
//! | `many N` | lists N devices |
//! | `allocate ok`, `allocate fail WHY`, `allocate hang`, `allocate empty` | sets the answer to Allocate |
//! | `allocate hold`, `allocate hold ID` | answers only after `go`; with ID, only for allocations of that device |
//! | `preferred ok`, `preferred hold`, `prestart ok`, `prestart fail WHY`, `prestart hold` | the same for the other calls |
//! | `go` | answers the held calls |
//! | `prefer a b` | sets the preferred devices |
//! | `end` | ends the list |
//! | `register` | registers again |
//! | `quit` | removes the socket and exits |

#![allow(clippy::unwrap_used, clippy::panic)] // a test tool: any error ends it

use std::collections::HashMap;
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use beelet_proto::deviceplugin as api;
use beelet_proto::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use beelet_proto::deviceplugin::registration_client::RegistrationClient;
use beelet_proto::pluginregistration as found;
use beelet_proto::pluginregistration::registration_server::{Registration, RegistrationServer};
use inotify::{Inotify, WatchMask};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// State set by the last commands.
#[derive(Clone, Debug, Default)]
struct Script {
    devices: Vec<api::Device>,
    allocate: String,
    preferred: String,
    prestart: String,
    prefer: Vec<String>,
    /// Counts of the ended lists and of the `go` commands.
    ended: u64,
    gone: u64,
}

/// The command line.
#[derive(Debug, Default)]
struct Arguments {
    dir: PathBuf,
    resource: String,
    socket: String,
    registry: bool,
    deaf: bool,
    pre_start: bool,
    preferred: bool,
    mounts: Vec<String>,
    nodes: Vec<String>,
    cdi: Vec<String>,
    devices: String,
    /// Environment variable in which a container finds its devices.
    env: String,
}

fn arguments() -> Arguments {
    let mut all = Arguments {
        resource: "example.com/sample".to_owned(),
        socket: "sample.sock".to_owned(),
        devices: "dev-1 dev-2".to_owned(),
        env: "SAMPLE_DEVICES".to_owned(),
        ..Arguments::default()
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        match word.as_str() {
            "--dir" => all.dir = value().into(),
            "--resource" => all.resource = value(),
            "--socket" => all.socket = value(),
            "--devices" => all.devices = value(),
            "--env" => all.env = value(),
            "--mount" => all.mounts.push(value()),
            "--device" => all.nodes.push(value()),
            "--cdi" => all.cdi.push(value()),
            "--registry" => all.registry = true,
            "--deaf" => all.deaf = true,
            "--pre-start" => all.pre_start = true,
            "--preferred" => all.preferred = true,
            other => panic!("unknown argument {other}; see the head of this program's source"),
        }
    }
    all
}

/// Prints an event.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A failure means that the reader is gone.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn parse(list: &str) -> Vec<api::Device> {
    let device = |word: &str| {
        let (id, node) = word.trim_start_matches('!').split_once('@').unwrap_or((word, ""));
        let node = node.parse().ok().map(|id| api::NumaNode { id });
        api::Device {
            id: id.trim_start_matches('!').to_owned(),
            health: if word.starts_with('!') { "Unhealthy" } else { "Healthy" }.to_owned(),
            topology: node.map(|node| api::TopologyInfo { nodes: vec![node] }),
        }
    };
    list.split_whitespace().map(device).collect()
}

#[derive(Clone)]
struct Plugin {
    arguments: Arc<Arguments>,
    script: watch::Receiver<Script>,
}

impl Plugin {
    fn options(&self) -> api::DevicePluginOptions {
        api::DevicePluginOptions {
            pre_start_required: self.arguments.pre_start,
            get_preferred_allocation_available: self.arguments.preferred,
        }
    }

    /// Returns the current script, and a future that ends at the next `go`.
    fn current_script(&self) -> (Script, impl Future<Output = ()> + use<>) {
        let (now, mut script) = (self.script.borrow().clone(), self.script.clone());
        let gone = now.gone;
        (now, async move { drop(script.wait_for(|now| now.gone != gone).await) })
    }

    fn answer(&self, ids: &[String]) -> api::ContainerAllocateResponse {
        let pair = |text: &String| {
            let (host, container) = text.split_once(':').unwrap_or((text, text));
            (host.to_owned(), container.to_owned())
        };
        let (mounts, nodes) = (self.arguments.mounts.iter(), self.arguments.nodes.iter());
        api::ContainerAllocateResponse {
            envs: HashMap::from([(self.arguments.env.clone(), ids.join(","))]),
            annotations: HashMap::from([("sample.beelet.dev/devices".to_owned(), ids.join(","))]),
            mounts: mounts
                .map(pair)
                .map(|(host_path, container_path)| api::Mount { container_path, host_path, read_only: true })
                .collect(),
            devices: nodes
                .map(pair)
                .map(|(host_path, container_path)| api::DeviceSpec {
                    container_path,
                    host_path,
                    permissions: "rw".to_owned(),
                })
                .collect(),
            cdi_devices: self
                .arguments
                .cdi
                .iter()
                .map(|name| api::CdiDevice { name: name.clone() })
                .collect(),
        }
    }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(
        &self,
        _request: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(self.options()))
    }

    type ListAndWatchStream = ReceiverStream<Result<api::ListAndWatchResponse, Status>>;

    async fn list_and_watch(
        &self,
        _request: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        say("watched");
        let (sender, receiver) = mpsc::channel(1);
        let mut script = self.script.clone();
        tokio::spawn(async move {
            let ended = script.borrow().ended;
            let mut sent: Option<Vec<api::Device>> = None;
            loop {
                let now = script.borrow_and_update().clone();
                if now.ended != ended {
                    return;
                }
                if sent.as_ref() != Some(&now.devices) {
                    let list = api::ListAndWatchResponse { devices: now.devices.clone() };
                    if sender.send(Ok(list)).await.is_err() {
                        return;
                    }
                    sent = Some(now.devices);
                }
                tokio::select! {
                    changed = script.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let request = request.into_inner().container_requests.into_iter().next().unwrap_or_default();
        let (script, go) = self.current_script();
        say(&format!("preferred {} of {}", request.allocation_size, request.available_device_i_ds.join(" ")));
        if script.preferred == "hold" {
            go.await;
        }
        let answer = api::ContainerPreferredAllocationResponse { device_i_ds: script.prefer };
        Ok(Response::new(api::PreferredAllocationResponse { container_responses: vec![answer] }))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let ids = requests.into_iter().next().unwrap_or_default().devices_ids;
        let (script, go) = self.current_script();
        say(&format!("allocate {}", ids.join(" ")));
        let mut container_responses = vec![self.answer(&ids)];
        match script.allocate.split_once(' ').unwrap_or((&script.allocate, "")) {
            ("fail", why) => return Err(Status::unknown(why)),
            ("hang", _) => std::future::pending().await,
            ("empty", _) => container_responses.clear(),
            ("hold", id) if id.is_empty() || ids.iter().any(|other| other == id) => go.await,
            _ => {}
        }
        say(&format!("allocated {}", ids.join(" ")));
        Ok(Response::new(api::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        let (script, go) = self.current_script();
        say(&format!("prestart {}", request.into_inner().devices_ids.join(" ")));
        match script.prestart.split_once(' ').unwrap_or((&script.prestart, "")) {
            ("fail", why) => return Err(Status::unknown(why)),
            ("hold", _) => go.await,
            _ => {}
        }
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

/// Registration service of a plugin that waits for the agent to find it.
struct Found(Arc<Arguments>);

#[tonic::async_trait]
impl Registration for Found {
    async fn get_info(
        &self,
        _request: Request<found::InfoRequest>,
    ) -> Result<Response<found::PluginInfo>, Status> {
        Ok(Response::new(found::PluginInfo {
            r#type: "DevicePlugin".to_owned(),
            name: self.0.resource.clone(),
            endpoint: String::new(),
            supported_versions: vec!["v1beta1".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<found::RegistrationStatus>,
    ) -> Result<Response<found::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        say(&if status.plugin_registered {
            "registered".to_owned()
        } else {
            format!("refused {}", status.error)
        });
        Ok(Response::new(found::RegistrationStatusResponse {}))
    }
}

async fn register(arguments: &Arguments, options: api::DevicePluginOptions) {
    let request = api::RegisterRequest {
        version: "v1beta1".to_owned(),
        endpoint: arguments.socket.clone(),
        resource_name: arguments.resource.clone(),
        options: Some(options),
    };
    let socket = arguments.dir.join("kubelet.sock");
    let registered = async {
        let channel = beelet_tests::containerd::connect(&socket).await.map_err(|error| error.to_string())?;
        let answer = RegistrationClient::new(channel).register(request).await;
        answer.map_err(|status| status.message().to_owned())
    };
    match registered.await {
        Ok(_) => say("registered"),
        Err(why) => say(&format!("refused {why}")),
    }
}

/// Follows the lines on standard input until `quit` or end of input.
fn obey(script: &watch::Sender<Script>, register: &mpsc::UnboundedSender<()>) {
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "devices" => script.send_modify(|now| now.devices = parse(rest)),
            "many" => {
                let list: Vec<String> =
                    (0..rest.parse().unwrap_or(0)).map(|n: u32| format!("d{n}")).collect();
                script.send_modify(|now| now.devices = parse(&list.join(" ")));
            }
            "allocate" => script.send_modify(|now| now.allocate = rest.to_owned()),
            "preferred" => script.send_modify(|now| now.preferred = rest.to_owned()),
            "prestart" => script.send_modify(|now| now.prestart = rest.to_owned()),
            "prefer" => {
                script.send_modify(|now| now.prefer = rest.split_whitespace().map(str::to_owned).collect());
            }
            "go" => script.send_modify(|now| now.gone += 1),
            "end" => script.send_modify(|now| now.ended += 1),
            "register" => drop(register.send(())),
            "quit" => return,
            _ => say(&format!("unknown {word}")),
        }
        say("done");
    }
}

/// Requests a registration whenever `kubelet.sock` is created again.
fn watch_kubelet(dir: PathBuf, register: mpsc::UnboundedSender<()>) {
    let mut inotify = Inotify::init().unwrap();
    inotify.watches().add(dir, WatchMask::CREATE | WatchMask::MOVED_TO).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(events) = inotify.read_events_blocking(&mut buffer) {
            if events.into_iter().any(|event| event.name.is_some_and(|name| name == "kubelet.sock"))
                && register.send(()).is_err()
            {
                return;
            }
        }
    });
}

/// Starts to serve at the plugin's socket.
fn serve(plugin: &Plugin) {
    let path = plugin.arguments.dir.join(&plugin.arguments.socket);
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut server = Server::builder().add_service(DevicePluginServer::new(plugin.clone()));
    if plugin.arguments.registry {
        server = server.add_service(RegistrationServer::new(Found(Arc::clone(&plugin.arguments))));
    }
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments = Arc::new(arguments());
    let path = arguments.dir.join(&arguments.socket);
    let script = watch::Sender::new(Script { devices: parse(&arguments.devices), ..Script::default() });
    let plugin = Plugin { arguments: Arc::clone(&arguments), script: script.subscribe() };
    let (again, mut asked) = mpsc::unbounded_channel();
    serve(&plugin);
    if !arguments.registry {
        let _ = again.send(());
        if !arguments.deaf {
            watch_kubelet(arguments.dir.clone(), again.clone());
        }
    }
    let obeyed = tokio::task::spawn_blocking(move || obey(&script, &again));
    let registering = async {
        while asked.recv().await.is_some() {
            if !path.exists() {
                serve(&plugin);
            }
            register(&arguments, plugin.options()).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        _ = obeyed => {}
        () = registering => {}
    }
    let _ = std::fs::remove_file(&path);
}
