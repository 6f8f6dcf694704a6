//! Registration service for plugins: `v1beta1.Registration` on `<kubelet dir>/device-plugins/kubelet.sock`.

use std::{path::Path, sync::Arc};

use beelet_policy::devices::registration;
use beelet_proto::deviceplugin::{
    DevicePluginOptions, Empty, RegisterRequest,
    registration_server::{Registration, RegistrationServer},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, service::Routes};
use tracing::{error, info, warn};

use super::{Error, folder, follow::follow, ledger::Shared, plugin::Plugin};
use beelet_base::blocking::blocking;
use beelet_serve::{client::dial, grpc};

/// Connects to a plugin and follows it, in place of an earlier one of the resource.
///
/// # Errors
/// The plugin does not answer, or the maximum number of plugins is registered.
pub(super) async fn connect(
    shared: &Arc<Shared>,
    resource: &str,
    socket: &Path,
    registered: Option<DevicePluginOptions>,
    (tracker, shutdown): (&TaskTracker, &CancellationToken),
) -> Result<(), Error> {
    let plugin = Plugin::new(dial(socket).await?);
    let options = plugin.options(registered).await;
    let options = options.map_err(|status| Error::Options(Box::new(status)))?;
    let current = shared.register(resource, plugin.clone(), options, socket.to_owned())?;
    info!(resource, socket = %socket.display(), "registered a device plugin");
    tracker.spawn(follow(Arc::clone(shared), resource.to_owned(), plugin, current, shutdown.clone()));
    Ok(())
}

/// Serves until `shutdown`. If the socket cannot be created, no plugin can register; the error is logged and
/// the rest of the agent continues.
pub(super) async fn serve(shared: Arc<Shared>, shutdown: CancellationToken) {
    let dir = shared.settings.plugins_dir();
    let socket = shared.settings.registration_socket();
    let prepared = prepare(&dir, &socket).await;
    let listener = match prepared {
        Ok(listener) => listener,
        Err(cause) => {
            error!("device plugins cannot register: {cause}");
            shared.with_ledger(|ledger| ledger.trouble = Some(cause.to_string()));
            return shutdown.cancelled().await;
        }
    };
    let tracker = TaskTracker::new();
    let service = Service { shared, tracker: tracker.clone(), shutdown: shutdown.clone() };
    info!(socket = %socket.display(), "listening for device plugins");
    let services = Routes::new(RegistrationServer::new(service));
    if let Err(error) = grpc::serve_others(listener, services, shutdown).await {
        error!("device plugins can no longer register: {error:#}");
    }
    tracker.close();
    tracker.wait().await;
}

/// Clears the folder, which makes plugins register again, and listens.
async fn prepare(dir: &Path, socket: &Path) -> Result<grpc::Listener, Error> {
    // A kubelet's socket must not be taken over.
    if tokio::net::UnixStream::connect(socket).await.is_ok() {
        return Err(Error::InUse(socket.to_owned()));
    }
    let folder = dir.to_owned();
    blocking("clearing the folder of device plugins", move || folder::clear(&folder)).await?;
    grpc::bind(socket).await.map_err(Error::Listen)
}

#[derive(Debug)]
struct Service {
    shared: Arc<Shared>,
    tracker: TaskTracker,
    shutdown: CancellationToken,
}

impl Service {
    async fn accept(&self, request: RegisterRequest) -> Result<(), Error> {
        registration::check(&[&request.version], &request.resource_name)?;
        let (dir, endpoint) = (self.shared.settings.plugins_dir(), request.endpoint);
        let socket =
            blocking("finding a plugin's socket", move || folder::socket_in(&dir, &endpoint)).await?;
        if socket.file_name() == self.shared.settings.registration_socket().file_name() {
            return Err(Error::OwnSocket(socket));
        }
        let tasks = (&self.tracker, &self.shutdown);
        connect(&self.shared, &request.resource_name, &socket, request.options, tasks).await
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let resource = request.resource_name.clone();
        self.accept(request).await.map_err(|cause| {
            self.shared.metrics.refused_registrations.inc();
            warn!(resource, "refused the registration of a device plugin: {cause}");
            Status::unknown(cause.to_string())
        })?;
        Ok(Response::new(Empty {}))
    }
}
