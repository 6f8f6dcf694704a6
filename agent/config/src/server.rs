//! Settings of the HTTPS server for the API server and monitors: address, access and endpoints.
//!
//! Source of the defaults: pkg/kubelet/apis/config/v1beta1/defaults.go. They differ in one point: without an
//! API server, which authorizes clients, the server is off unless `port` is set.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use super::error::Problem;
use super::kubelet::{AuthenticationWire, AuthorizationWire, KubeletWire, WebhookAuthenticationWire};
use super::words::{duration, number, path, word};

/// Settings of the node's server.
#[derive(Debug, Clone, PartialEq)]
pub struct Server {
    /// True if the server is on.
    pub enabled: bool,
    /// Listening address.
    pub address: IpAddr,
    /// Port; 0: off. None: 10250 on a cluster's node, off without an API server.
    pub port: Option<u16>,
    /// Port of the endpoints without authentication; 0: off.
    pub read_only_port: u16,
    /// Certificate and key; None: self-signed.
    pub tls_files: Option<TlsFiles>,
    /// True to request the certificate from the API server's signer if `tls_files` is None.
    pub tls_bootstrap: bool,
    /// Folder of generated keys; None: `pki` in the kubelet's folder.
    pub cert_dir: Option<PathBuf>,
    /// Minimum TLS version.
    pub min_version: TlsVersion,
    /// Suites of TLS 1.2, by Go's names; empty: all safe ones.
    pub cipher_suites: Vec<String>,
    /// Authority of client certificates; None: client certificates are ignored.
    pub client_ca_file: Option<PathBuf>,
    /// True if a client without credentials is the user `system:anonymous`.
    pub anonymous: bool,
    /// Cache time of the API server's answer on a bearer token; None: tokens are not accepted.
    pub token_ttl: Option<Duration>,
    /// Authorization of requests.
    pub authorization: Authorization,
    /// True to serve containers' logs, commands and ports.
    pub debugging_handlers: bool,
    /// True to serve the machine's own logs.
    pub system_logs: bool,
    /// True to serve the machine's logs by service.
    pub log_query: bool,
    /// True to allow changes of the log level.
    pub debug_flags: bool,
    /// Maximum silence of a stream.
    pub stream_idle_timeout: Duration,
}

/// A certificate with its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate and its chain.
    pub certificate: PathBuf,
    /// The certificate's key.
    pub key: PathBuf,
}

/// Authorization of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Authorization {
    /// Any authenticated client may send any request.
    AlwaysAllow,
    /// The API server decides.
    Webhook {
        /// Cache time of a permission.
        allowed: Duration,
        /// Cache time of a refusal.
        refused: Duration,
    },
}

/// Minimum TLS version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsVersion {
    /// TLS 1.2 and newer.
    Tls12,
    /// TLS 1.3 only.
    Tls13,
}

/// Configurable suites of TLS 1.2, by Go's names. As in Go, the suites of TLS 1.3 are not configurable.
pub const CIPHER_SUITES: [&str; 6] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];
/// Suites of TLS 1.3, which are always on; Go accepts and ignores their names.
const TLS13_SUITES: [&str; 3] =
    ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"];
/// Two suites' legacy names and their full names.
const OLD_NAMES: [(&str, &str); 2] = [
    ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"),
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256"),
];
/// Minimum versions by name. Versions before 1.2 are obsolete and mean 1.2.
const VERSIONS: [(&str, TlsVersion); 4] = [
    ("VersionTLS12", TlsVersion::Tls12),
    ("VersionTLS13", TlsVersion::Tls13),
    ("VersionTLS10", TlsVersion::Tls12),
    ("VersionTLS11", TlsVersion::Tls12),
];

const TOKEN_TTL: Duration = Duration::from_secs(120);
const ALLOWED_TTL: Duration = Duration::from_secs(300);
const REFUSED_TTL: Duration = Duration::from_secs(30);

pub(super) fn resolve(wire: &mut KubeletWire, partly: &mut Vec<Problem>) -> Result<Server, Problem> {
    let port = |field, value: &mut Option<i64>| number(field, value, 0, 0, i64::from(u16::MAX));
    let authentication = wire.authentication.get_or_insert_default();
    let anonymous = *authentication.anonymous.get_or_insert_default().enabled.get_or_insert(false);
    let token_ttl = token_ttl(authentication.webhook.get_or_insert_default());
    Ok(Server {
        enabled: *wire.enable_server.get_or_insert(true),
        address: address(&mut wire.address)?,
        port: if wire.port.is_some() { Some(port("port", &mut wire.port)?) } else { None },
        read_only_port: port("readOnlyPort", &mut wire.read_only_port)?,
        tls_files: tls_files(wire)?,
        tls_bootstrap: *wire.server_tls_bootstrap.get_or_insert(false),
        cert_dir: None,
        min_version: word("tlsMinVersion", &mut wire.tls_min_version, VERSIONS)?,
        cipher_suites: cipher_suites(wire.tls_cipher_suites.get_or_insert_default(), partly)?,
        client_ca_file: authority(wire.authentication.get_or_insert_default())?,
        anonymous,
        token_ttl,
        authorization: resolve_authorization(wire.authorization.get_or_insert_default())?,
        debugging_handlers: *wire.enable_debugging_handlers.get_or_insert(true),
        system_logs: *wire.enable_system_log_handler.get_or_insert(true),
        log_query: *wire.enable_system_log_query.get_or_insert(false),
        debug_flags: *wire.enable_debug_flags_handler.get_or_insert(true),
        stream_idle_timeout: duration(
            &mut wire.streaming_connection_idle_timeout,
            Duration::from_secs(4 * 60 * 60),
        ),
    })
}

fn address(value: &mut Option<String>) -> Result<IpAddr, Problem> {
    let address: IpAddr = match value.as_deref().filter(|value| !value.is_empty()) {
        None => Ipv4Addr::UNSPECIFIED.into(),
        Some(value) => {
            value.parse().map_err(|_| Problem::new("address", format!("{value:?} is not an IP address")))?
        }
    };
    *value = Some(address.to_string());
    Ok(address)
}

fn tls_files(wire: &mut KubeletWire) -> Result<Option<TlsFiles>, Problem> {
    let certificate = path("tlsCertFile", &mut wire.tls_cert_file)?;
    let key = path("tlsPrivateKeyFile", &mut wire.tls_private_key_file)?;
    match (certificate, key) {
        (None, None) => Ok(None),
        (Some(certificate), Some(key)) => Ok(Some(TlsFiles { certificate, key })),
        (Some(_), None) => Err(Problem::new("tlsPrivateKeyFile", "must be set, because tlsCertFile is")),
        (None, Some(_)) => Err(Problem::new("tlsCertFile", "must be set, because tlsPrivateKeyFile is")),
    }
}

/// Returns the supported suites of `names`. A kubelet accepts every suite that Go knows and warns of the
/// insecure ones, which guides for hardened nodes list as well: unsupported suites are dropped with a
/// warning.
fn cipher_suites(names: &mut Vec<String>, partly: &mut Vec<Problem>) -> Result<Vec<String>, Problem> {
    let mut suites: Vec<String> = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let name = OLD_NAMES.iter().find(|(old, _)| old == name).map_or(name.as_str(), |(_, new)| *new);
        if !CIPHER_SUITES.contains(&name) && !TLS13_SUITES.contains(&name) {
            let message = format!(
                "{name:?} is ignored: the suite is unknown, or lacks forward secrecy or authenticated encryption; \
                 beelet offers {}",
                CIPHER_SUITES.join(", ")
            );
            partly.push(Problem::new(format!("tlsCipherSuites[{index}]"), message));
            continue;
        }
        if !suites.iter().any(|known| known == name) {
            suites.push(name.to_owned());
        }
    }
    if suites.is_empty() && !names.is_empty() {
        let message = format!("none of these suites is offered; beelet offers {}", CIPHER_SUITES.join(", "));
        return Err(Problem::new("tlsCipherSuites", message));
    }
    names.clone_from(&suites);
    Ok(suites)
}

fn authority(wire: &mut AuthenticationWire) -> Result<Option<PathBuf>, Problem> {
    path("authentication.x509.clientCAFile", &mut wire.x509.get_or_insert_default().client_ca_file)
}

/// Returns the cache time of the API server's answer on a bearer token; None if tokens are not accepted.
fn token_ttl(wire: &mut WebhookAuthenticationWire) -> Option<Duration> {
    let asks = *wire.enabled.get_or_insert(true);
    // Without the webhook its time has no effect.
    wire.cache_ttl.take_if(|_| !asks);
    let ttl = duration(&mut wire.cache_ttl, TOKEN_TTL);
    asks.then_some(ttl)
}

fn resolve_authorization(wire: &mut AuthorizationWire) -> Result<Authorization, Problem> {
    let asks = word("authorization.mode", &mut wire.mode, [("Webhook", true), ("AlwaysAllow", false)])?;
    let ttls = wire.webhook.get_or_insert_default();
    if !asks {
        // Without the webhook its times have no effect.
        (ttls.cache_authorized_ttl, ttls.cache_unauthorized_ttl) = (None, None);
    }
    let allowed = duration(&mut ttls.cache_authorized_ttl, ALLOWED_TTL);
    let refused = duration(&mut ttls.cache_unauthorized_ttl, REFUSED_TTL);
    Ok(if asks { Authorization::Webhook { allowed, refused } } else { Authorization::AlwaysAllow })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::parse;

    fn server(body: &str) -> Result<Server, String> {
        let text = format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{body}\n");
        parse(Path::new("f"), &text).map(|(config, _)| config.server).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_said_is_the_kubelets_defaults_without_a_port() {
        let server = server("").unwrap();
        assert_eq!((server.port, server.read_only_port), (None, 0));
        assert!(server.enabled && !server.anonymous && server.debugging_handlers && server.system_logs);
        assert_eq!(server.token_ttl, Some(TOKEN_TTL));
        let webhook = Authorization::Webhook { allowed: ALLOWED_TTL, refused: REFUSED_TTL };
        assert_eq!(server.authorization, webhook);
        assert_eq!(server.address.to_string(), "0.0.0.0");
    }

    #[test]
    fn what_can_not_be_is_refused_with_its_field() {
        let check = |body: &str, part: &str| {
            let error = server(body).unwrap_err();
            assert!(error.contains(part), "{body}: {error}");
        };
        check("port: 65536", "port: 65536 is out of range");
        check("address: here", "address: \"here\" is not an IP address");
        check("tlsCertFile: /a.crt", "tlsPrivateKeyFile: must be set");
        check("tlsPrivateKeyFile: /a.key", "tlsCertFile: must be set");
        check("tlsMinVersion: VersionTLS14", "tlsMinVersion");
        check("tlsCipherSuites: [TLS_RSA_WITH_AES_128_CBC_SHA]", "tlsCipherSuites: none of these suites");
        check(
            "authorization: {mode: RBAC}",
            "authorization.mode: \"RBAC\" is not one of Webhook, AlwaysAllow",
        );
        check("authentication: {x509: {clientCAFile: /a/../ca.crt}}", "authentication.x509.clientCAFile");
    }

    #[test]
    fn what_is_written_is_what_is_meant() {
        let server = server(
            "port: 0\nauthentication: {anonymous: {enabled: true}, webhook: {enabled: false}, x509: {clientCAFile: /ca.crt}}\n\
             authorization: {mode: AlwaysAllow}\ntlsMinVersion: VersionTLS13\n\
             tlsCipherSuites: [TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305, TLS_AES_128_GCM_SHA256]",
        )
        .unwrap();
        assert_eq!((server.port, server.anonymous, server.token_ttl), (Some(0), true, None));
        assert_eq!(server.authorization, Authorization::AlwaysAllow);
        assert_eq!(server.client_ca_file, Some("/ca.crt".into()));
        assert_eq!(server.min_version, TlsVersion::Tls13);
        assert_eq!(
            server.cipher_suites,
            ["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", "TLS_AES_128_GCM_SHA256"]
        );
    }
}
