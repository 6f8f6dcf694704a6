//! Creates clients of the API server and their shared identity from a kubeconfig. A bootstrap kubeconfig, if
//! set, creates a missing kubeconfig.

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

/// Reads the kubeconfig, or creates it through the bootstrap kubeconfig, without a time limit. The returned
/// client follows changes of the identity while [`Identity::keep`] runs.
///
/// # Errors
/// The kubeconfig is unusable and no bootstrap kubeconfig is set.
pub async fn connect(options: Options) -> Result<(Client, Identity), kubeconfig::Error> {
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
    loop {
        let found = read(&options.kubeconfig).await;
        let expired = match (&options.bootstrap, found) {
            // The server decides on the certificate's lifetime: the node's clock may be wrong.
            (None, Ok(_)) => break,
            (None, Err(error)) => return Err(error),
            (Some(_), Ok(Some(lifetime))) => !lifetime.covers(Timestamp::now()),
            (Some(_), Ok(None)) => false,
            (Some(_), Err(_)) => true,
        };
        let Some(bootstrap) = options.bootstrap.as_deref().filter(|_| expired) else { break };
        info!(kubeconfig = %bootstrap.display(), "requesting a client certificate");
        match bootstrap::run(bootstrap, &options).await {
            Ok(()) => info!(kubeconfig = %options.kubeconfig.display(), "got a client certificate"),
            Err(error) => {
                warn!("cannot get a client certificate, retrying: {error}");
                backoff.wait(None).await;
            }
        }
    }
    let changes = watch::Sender::new(0);
    let first = Connections::new(&options, &changes).open().await?;
    let newest = watch::Sender::new(first);
    let client = Client::with_presence(newest.subscribe(), options.presence.clone());
    Ok((client, Identity::new(options, newest, changes)))
}

/// Checks that the kubeconfig is usable. Returns the lifetime of its client certificate, if it has one.
async fn read(kubeconfig: &Path) -> Result<Option<Lifetime>, kubeconfig::Error> {
    let path = kubeconfig.to_owned();
    blocking("the kubeconfig", move || {
        kubeconfig::client(&path, &requests::Metrics::default())?;
        kubeconfig::lifetime(&path)
    })
    .await
}
