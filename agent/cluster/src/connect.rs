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
        let Some(bootstrap) = options.bootstrap.as_deref() else {
            // The server decides on the certificate's lifetime: the node's clock may be wrong.
            found?;
            break;
        };
        let path = bootstrap.to_owned();
        let can_bootstrap = blocking("the bootstrap kubeconfig", move || path.exists()).await;
        let now = Timestamp::now();
        match way(found.ok(), now, can_bootstrap) {
            Way::Use => break,
            Way::UseRegardless(Lifetime { from, until }) => {
                warn!(
                    "the client certificate of {} is valid from {from} to {until}, and this machine's clock says {now}: \
                     using it all the same, since {} does not exist; set the clock, or, if the clock is \
                     right, join the node to the cluster again",
                    options.kubeconfig.display(),
                    bootstrap.display()
                );
                break;
            }
            Way::Bootstrap => {}
        }
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

/// Way to an identity.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    /// The kubeconfig's identity.
    Use,
    /// The kubeconfig's identity, whose certificate is not valid by this machine's clock: the clock may be
    /// wrong, and nothing else is there. The server decides.
    UseRegardless(Lifetime),
    /// A new certificate, by the bootstrap kubeconfig.
    Bootstrap,
}

/// Chooses the way, by the kubeconfig's identity and the lifetime of its certificate, if it has one. kubeadm
/// removes the bootstrap kubeconfig once the node has joined.
fn way(found: Option<Option<Lifetime>>, now: Timestamp, can_bootstrap: bool) -> Way {
    match found {
        None => Way::Bootstrap,
        Some(Some(lifetime)) if !lifetime.covers(now) => {
            if can_bootstrap {
                Way::Bootstrap
            } else {
                Way::UseRegardless(lifetime)
            }
        }
        Some(_) => Way::Use,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_is_not_valid_by_the_clock_is_used_if_nothing_else_is_there() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let lifetime = Lifetime { from: at(100), until: at(200) };
        let check =
            |found, now, can_bootstrap, expected| assert_eq!(way(found, at(now), can_bootstrap), expected);
        check(Some(Some(lifetime)), 150, false, Way::Use);
        check(Some(None), 150, true, Way::Use);
        check(None, 150, false, Way::Bootstrap);
        for wrong in [50, 200, 9999] {
            check(Some(Some(lifetime)), wrong, true, Way::Bootstrap);
            check(Some(Some(lifetime)), wrong, false, Way::UseRegardless(lifetime));
        }
    }
}
