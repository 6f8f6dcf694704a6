//! The way from a kubeconfig to clients of the API server and the identity that they share. Where there is no
//! kubeconfig yet, a bootstrap kubeconfig gets one.

use std::{path::Path, time::Duration};

use beelet_base::blocking::blocking;
use jiff::Timestamp;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::{
    backoff::Backoff,
    bootstrap,
    certificate::Lifetime,
    client::Client,
    identity::{Connections, Options},
    kubeconfig, requests,
    rotation::Identity,
};

/// Reads the kubeconfig, or makes it with the help of the bootstrap kubeconfig, however long that takes.
/// Clients of what is returned follow the identity as long as [`Identity::keep`] runs.
///
/// # Errors
/// The kubeconfig can't be used, and there is no bootstrap kubeconfig.
pub async fn connect(options: Options) -> Result<(Client, Identity), kubeconfig::Error> {
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
    loop {
        let found = read(&options.kubeconfig).await;
        let expired = match (&options.bootstrap, found) {
            // The server is asked whether it takes the certificate: it is the clock that may be wrong.
            (None, Ok(_)) => break,
            (None, Err(error)) => return Err(error),
            (Some(_), Ok(Some(lifetime))) => !lifetime.covers(Timestamp::now()),
            (Some(_), Ok(None)) => false,
            (Some(_), Err(_)) => true,
        };
        let Some(bootstrap) = options.bootstrap.as_deref().filter(|_| expired) else { break };
        info!(kubeconfig = %bootstrap.display(), "asking for a client certificate");
        match bootstrap::run(bootstrap, &options).await {
            Ok(()) => info!(kubeconfig = %options.kubeconfig.display(), "got a client certificate"),
            Err(error) => {
                warn!("cannot get a client certificate, trying on: {error}");
                backoff.wait(None).await;
            }
        }
    }
    let changes = watch::Sender::new(0);
    let first = Connections::new(&options, &changes).open().await?;
    let newest = watch::Sender::new(first);
    let client = Client::noting(newest.subscribe(), options.presence.clone());
    Ok((client, Identity::new(options, newest, changes)))
}

/// Checks that the kubeconfig can be used. Returns the lifetime of its client certificate, if it has one.
async fn read(kubeconfig: &Path) -> Result<Option<Lifetime>, kubeconfig::Error> {
    let path = kubeconfig.to_owned();
    blocking("the kubeconfig", move || {
        kubeconfig::client(&path, &requests::Metrics::default())?;
        kubeconfig::lifetime(&path)
    })
    .await
}
