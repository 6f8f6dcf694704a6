//! `/debug/flags/v`: changes the log level at run time.

use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, Limited};

use crate::App;

/// Maximum bytes of the number.
const LEVEL_MAX: usize = 64;

/// Sets the log level by the kubelet's levels (`--v`); an error has the reason for a failure.
#[derive(Clone)]
pub struct Verbosity(Arc<dyn Fn(u8) -> Result<(), BoxError> + Send + Sync>);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Verbosity {
    /// Returns a value that calls this function.
    pub fn new<E: Into<BoxError>>(set: impl Fn(u8) -> Result<(), E> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move |level| set(level).map_err(Into::into)))
    }
}

impl fmt::Debug for Verbosity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Verbosity")
    }
}

pub(crate) async fn verbosity(State(app): State<App>, method: Method, body: Body) -> Response {
    if method != Method::PUT {
        return (StatusCode::NOT_ACCEPTABLE, "unsupported http method").into_response();
    }
    let Ok(body) = Limited::new(body, LEVEL_MAX).collect().await else {
        return (StatusCode::BAD_REQUEST, "error reading request body: not a number").into_response();
    };
    match set(app.verbosity.as_ref(), &body.to_bytes()) {
        Ok(level) => format!("successfully set klog.logging.verbosity to {level}").into_response(),
        Err(why) => (StatusCode::BAD_REQUEST, why).into_response(),
    }
}

fn set(verbosity: Option<&Verbosity>, body: &[u8]) -> Result<u8, String> {
    let text = String::from_utf8_lossy(body);
    let level: u8 = text.trim().parse().map_err(|_| {
        format!("failed to set klog.logging.verbosity {text:?}: not a whole number from 0 to 255")
    })?;
    let Verbosity(set) = verbosity.ok_or("this agent cannot change its log level")?;
    set(level).map_err(|why| format!("failed to set klog.logging.verbosity {level}: {why}"))?;
    tracing::info!(level, "a client of the server changed the log level");
    Ok(level)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_level_is_taken() {
        let any = Verbosity::new(|level| if level < 100 { Ok(()) } else { Err("too much".to_owned()) });
        assert_eq!(set(Some(&any), b"4\n"), Ok(4));
        for wrong in [&b""[..], b"-1", b"256", b"debug", b"\xff", b"4 4"] {
            assert!(set(Some(&any), wrong).unwrap_err().contains("not a whole number"));
        }
        assert!(set(Some(&any), b"100").unwrap_err().ends_with("too much"));
        assert!(set(None, b"4").is_err());
    }
}
