//! Reads kubeconfigs and creates clients of the API server.
//!
//! This module overrides the library's connection settings to detect a vanished server within half a minute:
//! a watch on a dead connection looks like a watch of a quiet cluster.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use base64::Engine;
use beelet_base::simulation;
use http::Uri;
use hyper::rt::{Read, Write};
use hyper_util::{
    client::legacy::{
        Client as Http,
        connect::{Connection, HttpConnector},
    },
    rt::TokioExecutor,
};
use kube::{
    Config,
    client::{Body, ClientBuilder, ConfigExt},
    config::Kubeconfig,
};
use secrecy::ExposeSecret as _;
use tower::{BoxError, Service, ServiceBuilder, util::Either};

use crate::{
    certificate::Lifetime,
    credential::{self, Authenticated},
    requests, simulated,
};

/// Maximum time for the server to accept a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Keepalive of a silent connection: time before the first probe, time between two, and their number.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);
/// Maximum time for the server to acknowledge sent data.
const ACKNOWLEDGED: Duration = Duration::from_secs(30);
/// Maximum age of an unused connection.
const IDLE: Duration = Duration::from_secs(90);

/// Error of an unusable kubeconfig.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig is unusable.
    #[error("cannot use the kubeconfig {path}: {cause}", path = .path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The reason.
        cause: String,
    },
}

/// Prefix of the user name of a node (`system:node:<name>`).
const NODE_USER: &str = "system:node:";

/// Returns the lifetime of the kubeconfig's client certificate, if it has one. Blocking.
pub(crate) fn lifetime(kubeconfig: &Path) -> Result<Option<Lifetime>, Error> {
    let fail = |cause: String| Error::Kubeconfig { path: kubeconfig.to_owned(), cause };
    let Some(pem) = certificate(kubeconfig)? else { return Ok(None) };
    Lifetime::of(&pem).map(Some).map_err(|cause| fail(format!("client certificate: {cause}")))
}

/// Returns the name of the node whose identity the kubeconfig contains: the common name of its client
/// certificate is `system:node:<name>`. None for another identity. Blocking.
///
/// # Errors
/// The kubeconfig is unusable.
pub fn node_name(kubeconfig: &Path) -> Result<Option<String>, Error> {
    let Some(pem) = certificate(kubeconfig)? else { return Ok(None) };
    let first = x509_parser::pem::Pem::iter_from_buffer(&pem).next().and_then(Result::ok);
    let parsed = first.as_ref().and_then(|pem| pem.parse_x509().ok());
    let name = parsed.and_then(|certificate| {
        let name = certificate.subject().iter_common_name().next()?;
        name.as_str().ok()?.strip_prefix(NODE_USER).map(str::to_owned)
    });
    Ok(name)
}

/// Returns the client certificate of a kubeconfig in PEM, if it has one. Blocking.
fn certificate(kubeconfig: &Path) -> Result<Option<Vec<u8>>, Error> {
    let fail = |cause: String| Error::Kubeconfig { path: kubeconfig.to_owned(), cause };
    let user = config(kubeconfig)?.auth_info;
    let pem = match (&user.client_certificate_data, &user.client_certificate) {
        (Some(data), _) => base64::engine::general_purpose::STANDARD
            .decode(data.trim())
            .map_err(|error| fail(format!("client-certificate-data: {error}")))?,
        (None, Some(path)) => std::fs::read(path).map_err(|error| fail(format!("{path}: {error}")))?,
        (None, None) => return Ok(None),
    };
    Ok(Some(pem))
}

/// Returns the client certificate and its key in PEM, if the kubeconfig itself contains both. Blocking.
pub(crate) fn embedded(kubeconfig: &Path) -> Result<Option<(String, String)>, Error> {
    let fail = |cause: String| Error::Kubeconfig { path: kubeconfig.to_owned(), cause };
    let user = config(kubeconfig)?.auth_info;
    let (Some(certificate), Some(key)) = (&user.client_certificate_data, &user.client_key_data) else {
        return Ok(None);
    };
    let text = |field: &str, data: &str| {
        let bytes = base64::engine::general_purpose::STANDARD.decode(data.trim());
        let text = bytes.map_err(|error| error.to_string()).map(String::from_utf8);
        text.and_then(|text| text.map_err(|error| error.to_string()))
            .map_err(|error| fail(format!("{field}: {error}")))
    };
    let certificate = text("client-certificate-data", certificate)?;
    Ok(Some((certificate, text("client-key-data", key.expose_secret())?)))
}

/// Returns the kubeconfig and the files to which it refers. Blocking.
pub(crate) fn files(kubeconfig: &Path) -> Vec<PathBuf> {
    let mut files = vec![kubeconfig.to_owned()];
    if let Ok(read) = Kubeconfig::read_from(kubeconfig) {
        let users = read.auth_infos.into_iter().filter_map(|user| user.auth_info);
        files.extend(
            users.flat_map(|user| [user.client_certificate, user.client_key]).flatten().map(PathBuf::from),
        );
        let clusters = read.clusters.into_iter().filter_map(|cluster| cluster.cluster);
        files.extend(clusters.filter_map(|cluster| cluster.certificate_authority).map(PathBuf::from));
    }
    files
}

/// Reads a kubeconfig and its files, and checks that they are usable. Blocking.
///
/// # Errors
/// The kubeconfig is unusable.
pub fn check(kubeconfig: &Path) -> Result<(), Error> {
    let plugin = credential::extract_plugin(&mut config(kubeconfig)?);
    let fail = |cause: credential::Error| Error::Kubeconfig {
        path: kubeconfig.to_owned(),
        cause: cause.to_string(),
    };
    plugin.map(drop).map_err(fail)
}

/// Reads a kubeconfig, without running a program.
pub(crate) fn config(path: &Path) -> Result<Config, Error> {
    let fail = |cause: String| Error::Kubeconfig { path: path.to_owned(), cause };
    let read = Kubeconfig::read_from(path).map_err(|cause| fail(causes(&cause)))?;
    let config = Config::try_from(read).map_err(|cause| fail(causes(&cause)))?;
    if config.auth_info.auth_provider.as_ref().is_some_and(|provider| provider.name == "gcp") {
        // The library would run a program at each expiry of a token, without a timeout.
        return Err(fail(
            "the auth-provider gcp is not supported; use exec with gke-gcloud-auth-plugin".to_owned(),
        ));
    }
    if config.proxy_url.is_some() {
        return Err(fail(
            "`proxy-url` is not supported; remove it and set `server` to a directly reachable address"
                .to_owned(),
        ));
    }
    Ok(config)
}

/// Returns a client for the kubeconfig at `path`. Must be called within a runtime. Blocking.
pub(crate) fn client(path: &Path, requests: &requests::Metrics) -> Result<kube::Client, Error> {
    let config = config(path)?;
    client_of(config, requests).map_err(|cause| Error::Kubeconfig { path: path.to_owned(), cause })
}

fn client_of(config: Config, requests: &requests::Metrics) -> Result<kube::Client, String> {
    if simulation::is_on() {
        return client_over(simulated::Connector, config, requests);
    }
    client_over(tcp(), config, requests)
}

/// Returns a client whose connections `connector` opens.
fn client_over<C>(
    connector: C,
    mut config: Config,
    requests: &requests::Metrics,
) -> Result<kube::Client, String>
where
    C: Service<Uri> + Clone + Send + Sync + 'static,
    C::Response: Connection + Read + Write + Send + Unpin,
    C::Future: Send + 'static,
    C::Error: Into<BoxError>,
{
    let fail = |cause: kube::Error| causes(&cause);
    let plugin = credential::extract_plugin(&mut config).map_err(|cause| cause.to_string())?;
    let requests = requests.clone();
    let way = move |config: &Config| {
        let tls = config.rustls_https_connector_with_connector(connector.clone());
        let tls = tls.map_err(|cause| causes(&cause))?;
        let http: Http<_, Body> = Http::builder(TokioExecutor::new()).pool_idle_timeout(IDLE).build(tls);
        Ok::<_, String>(ServiceBuilder::new().map_err(BoxError::from).layer(requests.clone()).service(http))
    };
    let without_plugin = way(&config)?;
    let service = match plugin {
        None => Either::Left(without_plugin),
        Some(exec) => {
            let config = config.clone();
            let with_pair = move |user| {
                let mut config = config.clone();
                config.auth_info = user;
                way(&config)
            };
            Either::Right(Authenticated::new(exec, without_plugin, with_pair))
        }
    };
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(fail)?)
        .layer(config.extra_headers_layer().map_err(fail)?)
        .service(service);
    Ok(ClientBuilder::new(service, config.default_namespace).build())
}

/// Returns a connector for TCP connections that detect a vanished server.
fn tcp() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    let (after, every, times) = KEEPALIVE;
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT));
    tcp.set_keepalive(Some(after));
    tcp.set_keepalive_interval(Some(every));
    tcp.set_keepalive_retries(Some(times));
    tcp.set_tcp_user_timeout(Some(ACKNOWLEDGED));
    tcp
}

/// Returns the error's text with its causes: the innermost one names the fault, the outer ones the place.
fn causes(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_words = cause.to_string();
        if !words.contains(&cause_words) {
            words = format!("{words}: {cause_words}");
        }
        source = cause.source();
    }
    words
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn kubeconfig(cluster: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{{cluster}}}}}]\nusers: [{{name: u, user: {{client-certificate: cert.pem, client-key: cert.pem}}}}]\n"
        );
        fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[test]
    fn a_kubeconfig_that_cannot_be_used_is_named_with_the_cause() {
        let (dir, path) = kubeconfig("server: https://127.0.0.1:1, proxy-url: http://127.0.0.1:2");
        let error = check(&path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot use the kubeconfig {}: ", path.display())), "{error}");
        assert!(error.contains("proxy-url"), "{error}");
        let error = check(&dir.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("none") && error.contains("No such file"), "{error}");
        let (_dir, path) = kubeconfig("certificate-authority: none.crt, server: https://127.0.0.1:1");
        let error = check(&path).unwrap_err().to_string();
        assert!(error.contains("none.crt"), "{error}");
    }

    #[test]
    fn a_kubeconfig_of_a_node_has_the_nodes_name() {
        let (dir, path) = kubeconfig("server: https://127.0.0.1:1");
        let check = |user: &str, expected: Option<&str>| {
            let mut params = rcgen::CertificateParams::default();
            params.distinguished_name.push(rcgen::DnType::CommonName, user);
            let key = rcgen::KeyPair::generate().unwrap();
            fs::write(dir.path().join("cert.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
            assert_eq!(node_name(&path).unwrap().as_deref(), expected, "{user}");
        };
        check("system:node:w1.example", Some("w1.example"));
        check("kubernetes-admin", None);
        assert!(node_name(&dir.path().join("none")).is_err());
    }

    #[tokio::test]
    async fn a_client_certificate_that_is_not_there_is_an_error_with_its_file() {
        let (_dir, path) = kubeconfig("server: https://127.0.0.1:1");
        let error = client(&path, &requests::Metrics::default()).err().unwrap().to_string();
        assert!(error.contains("cert.pem"), "{error}");
    }
}
