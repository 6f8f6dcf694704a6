//! The HTTPS server that the API server and monitors talk to: where it listens, which clients may ask, and
//! what it offers.
//!
//! Defaults: pkg/kubelet/apis/config/v1beta1/defaults.go. Ours differ in one: without an API server there is
//! no server unless `port` says so, because nobody could be asked who may use it.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use super::error::Problem;
use super::kubelet::{AuthenticationWire, AuthorizationWire, KubeletWire, WebhookAuthenticationWire};
use super::words::{duration, number, path, word};

/// The server of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Server {
    /// Whether there is one at all.
    pub enabled: bool,
    /// Where it listens.
    pub address: IpAddr,
    /// Its port; 0: not served. None: 10250 on a node of a cluster, not served on one without an API server.
    pub port: Option<u16>,
    /// The port of what needs no authentication; 0: not served.
    pub read_only_port: u16,
    /// Where its certificate and key come from; None: they are self-signed.
    pub tls_files: Option<TlsFiles>,
    /// Its certificate is asked for from the API server's signer, where it does not come from files.
    pub tls_bootstrap: bool,
    /// The folder of its own keys; None: `pki` in the kubelet's folder.
    pub cert_dir: Option<PathBuf>,
    /// The oldest TLS that it speaks.
    pub min_version: TlsVersion,
    /// Suites for TLS 1.2, by Go's names; empty: all that are safe.
    pub cipher_suites: Vec<String>,
    /// The authority that signs clients' certificates; None: no certificate says anything.
    pub client_ca_file: Option<PathBuf>,
    /// Whether a client without credentials is the user `system:anonymous`.
    pub anonymous: bool,
    /// How long the API server's word on a bearer token counts; None: it isn't asked.
    pub token_ttl: Option<Duration>,
    /// How requests are authorized.
    pub authorization: Authorization,
    /// Whether containers can be reached: their logs, commands in them, ports.
    pub debugging_handlers: bool,
    /// Whether the machine's own logs are served.
    pub system_logs: bool,
    /// Whether the machine's logs can be asked for by service.
    pub log_query: bool,
    /// Whether the log's level can be set.
    pub debug_flags: bool,
    /// How long a stream may be silent.
    pub stream_idle_timeout: Duration,
}

/// A certificate with its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, and those that lead from it to an authority.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// How requests are authorized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Authorization {
    /// Everybody who is somebody may do everything.
    AlwaysAllow,
    /// The API server is asked.
    Webhook {
        /// How long its yes counts.
        allowed: Duration,
        /// How long its no counts.
        refused: Duration,
    },
}

/// The oldest TLS that is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsVersion {
    /// 1.2, and what is newer.
    Tls12,
    /// 1.3 alone.
    Tls13,
}

/// The suites of TLS 1.2 that can be chosen, by Go's names. Those of TLS 1.3 can't be, in Go neither.
pub const CIPHER_SUITES: [&str; 6] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];
/// Suites of TLS 1.3, which are always on; Go takes their names and leaves it at that.
const TLS13_SUITES: [&str; 3] =
    ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"];
/// Names of two suites before they were whole.
const OLD_NAMES: [(&str, &str); 2] = [
    ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"),
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256"),
];
/// Older versions than 1.2 are nobody's wish any more: 1.2 is the oldest that is spoken.
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

/// The suites of `names` that are offered. A kubelet takes every suite that Go knows, and warns of the
/// insecure ones, which guides for hardened nodes list as well: a file that asks for more is honoured in
/// part.
fn cipher_suites(names: &mut Vec<String>, partly: &mut Vec<Problem>) -> Result<Vec<String>, Problem> {
    let mut suites: Vec<String> = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let name = OLD_NAMES.iter().find(|(old, _)| old == name).map_or(name.as_str(), |(_, new)| *new);
        if !CIPHER_SUITES.contains(&name) && !TLS13_SUITES.contains(&name) {
            let message = format!(
                "{name:?} is left out: the suite is unknown, or lacks forward secrecy or authenticated encryption; \
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

/// The time for which the API server's answer about a bearer token counts; None if it is not asked.
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
