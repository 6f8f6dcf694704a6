//! Resolves redirects of applications: probes and lifecycle hooks follow a redirect only to the same host
//! (`RedirectChecker` of pkg/probe/http).

use http::Uri;

/// Maximum number of redirects to follow, Go's own limit.
pub const MAX_REDIRECTS: usize = 10;

/// A step in a chain of redirects, all on the same host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// True for HTTPS.
    pub tls: bool,
    /// Port of the application.
    pub port: u16,
    /// Path and query.
    pub path: String,
    /// True while the Host header of the spec still applies.
    pub own_host: bool,
}

/// A redirect that cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedirectError {
    /// The location is not an address of HTTP.
    #[error("a redirect to the invalid address {0:?}")]
    NoAddress(String),
    /// The location's scheme is neither `http` nor `https`.
    #[error("a redirect to the unknown scheme {0:?}")]
    UnknownScheme(String),
}

/// Returns true if a reply with this status is a redirect.
#[must_use]
pub fn is_redirect(status: u16) -> bool {
    matches!(status, 301 | 302 | 303 | 307 | 308)
}

impl Place {
    /// Returns the host with its port, in the form of a Host header.
    #[must_use]
    pub fn authority(&self, host: &str) -> String {
        let port = self.port;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Returns the whole URL.
    #[must_use]
    pub fn url(&self, host: &str) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://{}{}", self.authority(host), self.path)
    }

    /// Resolves `location` against this step; `None` if it leads to another host.
    ///
    /// # Errors
    /// `location` is not an HTTP address.
    pub fn next(&self, host: &str, location: &str) -> Result<Option<Place>, RedirectError> {
        let bad = || RedirectError::NoAddress(location.to_owned());
        let absolute = match location.split_once(':') {
            Some((scheme, rest)) if rest.starts_with("//") && !scheme.contains('/') => location.to_owned(),
            _ if location.starts_with("//") => {
                format!("{}:{location}", if self.tls { "https" } else { "http" })
            }
            _ => {
                let path = match location {
                    path if path.starts_with('/') => path.to_owned(),
                    query if query.starts_with('?') => format!("{}{query}", without_query(&self.path)),
                    relative => {
                        let base = without_query(&self.path);
                        let folder = &base[..base.rfind('/').map_or(0, |slash| slash + 1)];
                        format!("{folder}{relative}")
                    }
                };
                let path = path.split('#').next().unwrap_or_default().to_owned();
                return Ok(Some(Place { path, ..self.clone() }));
            }
        };
        let uri: Uri = absolute.split('#').next().unwrap_or_default().parse().map_err(|_| bad())?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            other => return Err(RedirectError::UnknownScheme(other.unwrap_or_default().to_owned())),
        };
        let to = uri.host().ok_or_else(bad)?.trim_start_matches('[').trim_end_matches(']');
        if !to.eq_ignore_ascii_case(host) {
            return Ok(None);
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        Ok(Some(Place { tls, port, path, own_host: false }))
    }
}

fn without_query(path: &str) -> &str {
    path.split('?').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_with_colons_has_brackets() {
        let place = Place { tls: true, port: 8443, path: "/a?b".to_owned(), own_host: true };
        assert_eq!(place.url("10.0.0.7"), "https://10.0.0.7:8443/a?b");
        assert_eq!(place.url("fd00::1"), "https://[fd00::1]:8443/a?b");
    }

    #[test]
    fn a_redirect_leads_on_within_the_host_and_nowhere_else() {
        let from = Place { tls: false, port: 8080, path: "/a/b?c".to_owned(), own_host: true };
        let check = |location: &str, expected: Option<(bool, u16, &str)>| {
            let next = from.next("10.0.0.7", location).unwrap();
            let shown = next.as_ref().map(|place| (place.tls, place.port, place.path.as_str()));
            assert_eq!(shown, expected, "{location}");
        };
        check("/drain/", Some((false, 8080, "/drain/")));
        check("c#d", Some((false, 8080, "/a/c")));
        check("?e", Some((false, 8080, "/a/b?e")));
        check("https://10.0.0.7/x", Some((true, 443, "/x")));
        check("//10.0.0.7:81/x", Some((false, 81, "/x")));
        check("http://elsewhere/x", None);
        assert!(from.next("10.0.0.7", "ftp://10.0.0.7/").is_err());
        assert!(from.next("10.0.0.7", "http://").is_err());
    }
}
