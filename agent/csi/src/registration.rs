//! Registration and deregistration of drivers that the registry of plugins finds in its folder.

use std::{path::Path, sync::Arc};

use beelet_model::plugins::{PluginHandler, Registering, RegistrationRefusal};
use beelet_policy::volumes::csi as policy;
use tracing::info;

use crate::{Csi, driver::Driver, lock};

/// Type of CSI drivers in the registry of plugins.
pub const KIND: &str = "CSIPlugin";

impl PluginHandler for Csi {
    fn register<'a>(&'a self, name: &'a str, versions: &'a [String], socket: &'a Path) -> Registering<'a> {
        Box::pin(
            async move { register_driver(self, name, versions, socket).await.map_err(RegistrationRefusal) },
        )
    }

    /// Removes a driver, unless another driver has replaced it.
    fn deregister(&self, name: &str, socket: &Path) {
        let mut drivers = lock(&self.0.drivers);
        if drivers.get(name).is_none_or(|driver| driver.socket() != socket) {
            return;
        }
        drivers.remove(name);
        info!(driver = name, "storage plugin deregistered");
        self.0.known.send_modify(|known| drop(Arc::make_mut(known).insert(name.to_owned(), None)));
    }
}

/// Connects to a driver, reads its facts about the node and adds it to the registered drivers.
async fn register_driver(csi: &Csi, name: &str, versions: &[String], socket: &Path) -> Result<(), String> {
    if !policy::is_supported(versions) {
        let versions = versions.join(",");
        return Err(format!("no supported version of CSI among {versions}: 1.x is needed"));
    }
    if !is_name(name) {
        return Err(format!("{name:?} is not the name of a CSI driver"));
    }
    let driver = Driver::dial(name, socket, csi.0.metrics.clone()).await;
    let driver = driver.map_err(|error| error.to_string())?;
    let node = driver.node().await.map_err(|error| error.to_string())?;
    node.check().map_err(|error| error.to_string())?;
    info!(driver = name, socket = %socket.display(), node_id = node.node_id, "storage plugin registered");
    lock(&csi.0.drivers).insert(name.to_owned(), driver);
    csi.0.known.send_modify(|known| drop(Arc::make_mut(known).insert(name.to_owned(), Some(node))));
    Ok(())
}

/// Returns true for a domain name of at most 63 characters, as the specification requires: the name becomes a
/// part of paths.
fn is_name(name: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    name.len() <= 63
        && ends(name.chars().next())
        && ends(name.chars().last())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drivers_name_is_a_domain_name() {
        let check = |name: &str, expected: bool| assert_eq!(is_name(name), expected, "{name:?}");
        check("ebs.csi.aws.com", true);
        check("a", true);
        check("", false);
        check("..", false);
        check("a/b", false);
        check(&"a".repeat(64), false);
    }
}
