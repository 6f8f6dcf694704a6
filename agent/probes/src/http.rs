//! An httpGet probe: a status from 200 to 399 is a success. The probe follows redirects to the same host
//! (`RedirectChecker`, pkg/probe/http); a redirect to another host ends the probe as a success with a
//! warning.

use std::{net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Empty};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, pki_types::ServerName},
};
use tokio_util::task::AbortOnDropHandle;

use beelet_base::redirect::{MAX_REDIRECTS, Place, is_redirect};

use super::{
    answer::{Answer, MAX_OUTPUT},
    tcp,
};

/// User agent of probes: the kubelet's name, which some applications exempt from login.
pub(super) const USER_AGENT: &str = "kube-probe/1.36";
/// Request of the probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Get {
    /// True for HTTPS.
    pub tls: bool,
    /// Path and query.
    pub path: String,
    /// Headers, in order.
    pub headers: Vec<(String, String)>,
}

/// Failure of a request.
enum Broken {
    /// The probe itself is invalid: no verdict on the application.
    Request(String),
    /// The application did not answer as expected.
    Answer(String),
}

/// Reply of the application.
struct Reply {
    status: StatusCode,
    location: Option<String>,
    body: String,
}

/// Sends the request to `host` and judges the reply.
pub(super) async fn get(
    get: &Get,
    host: &str,
    port: u16,
    tls: &Arc<ClientConfig>,
    within: Duration,
) -> Answer {
    let place = Place { tls: get.tls, port, path: get.path.clone(), own_host: true };
    let url = place.url(host);
    match timeout(within, follow(get, host, place, tls)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(Broken::Request(error))) => Answer::error(error),
        Ok(Err(Broken::Answer(error))) => Answer::failure(format!("Get {url:?}: {error}")),
        Err(_) => Answer::failure(format!("Get {url:?}: no answer within {} s", within.as_secs_f64())),
    }
}

/// Follows redirects within the host, and judges the last reply.
async fn follow(get: &Get, host: &str, first: Place, tls: &Arc<ClientConfig>) -> Result<Answer, Broken> {
    let mut stop = first;
    for _ in 0..=MAX_REDIRECTS {
        let address = tcp::resolve(host, stop.port).await.map_err(Broken::Answer)?;
        let reply = exchange(get, &stop, host, address, tls).await?;
        let moved = is_redirect(reply.status.as_u16());
        match reply.location.as_deref().filter(|_| moved) {
            Some(location) => match stop.next(host, location) {
                Ok(Some(next)) => stop = next,
                Ok(None) => return Ok(judge(reply)),
                Err(error) => return Err(Broken::Answer(error.to_string())),
            },
            None => return Ok(judge(reply)),
        }
    }
    Err(Broken::Answer(format!("stopped after {MAX_REDIRECTS} redirects")))
}

fn judge(reply: Reply) -> Answer {
    match reply.status.as_u16() {
        200..300 => Answer::success(reply.body),
        300..400 => Answer::warning(format!("Probe terminated redirects, Response body: {}", reply.body)),
        status => Answer::failure(format!("HTTP probe failed with statuscode: {status}")),
    }
}

/// Follows a single redirect, which must stay on the host and lead to a valid request; for fuzzing.
pub fn redirect(tls: bool, path: &str, host: &str, location: &str) {
    let from = Place { tls, port: 80, path: path.to_owned(), own_host: true };
    if let Ok(Some(next)) = from.next(host, location) {
        assert!(next.port != 0 || location.contains(":0"), "{location:?} leads to no port");
        let _ = Request::builder().uri(&next.path).body(Empty::<Bytes>::new());
    }
}

async fn exchange(
    get: &Get,
    stop: &Place,
    host: &str,
    address: SocketAddr,
    tls: &Arc<ClientConfig>,
) -> Result<Reply, Broken> {
    let request = request(get, stop, host)?;
    let answer = |e: &dyn std::fmt::Display| Broken::Answer(e.to_string());
    let stream = TcpStream::connect(address).await.map_err(|e| answer(&e))?;
    let stream: Pin<Box<dyn Stream>> = if stop.tls {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|e| Broken::Request(format!("the probe's host {host:?}: {e}")))?;
        let connector = TlsConnector::from(Arc::clone(tls));
        Box::pin(connector.connect(name, stream).await.map_err(|e| answer(&e))?)
    } else {
        Box::pin(stream)
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| answer(&e))?;
    // Aborted at every return of this function.
    let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
    let response = sender.send_request(request).await.map_err(|e| answer(&e))?;
    let status = response.status();
    let location = response.headers().get(header::LOCATION);
    let location = location.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    Ok(Reply { status, location, body: read(response).await.map_err(|e| answer(&e))? })
}

/// A byte stream for HTTP.
trait Stream: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Stream for T {}

/// Reads the body, up to [`MAX_OUTPUT`].
async fn read(response: Response<Incoming>) -> Result<String, hyper::Error> {
    let mut body = response.into_body();
    let mut read = Vec::new();
    while read.len() < MAX_OUTPUT
        && let Some(frame) = body.frame().await
    {
        if let Some(data) = frame?.data_ref() {
            read.extend_from_slice(&data[..data.len().min(MAX_OUTPUT - read.len())]);
        }
    }
    Ok(String::from_utf8_lossy(&read).into_owned())
}

fn request(get: &Get, stop: &Place, host: &str) -> Result<Request<Empty<Bytes>>, Broken> {
    let mut request = Request::get(stop.path.as_str());
    let given = |wanted: &str| get.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case(wanted));
    if !(stop.own_host && given("host")) {
        request = request.header("Host", stop.authority(host));
    }
    for (name, default) in [("User-Agent", USER_AGENT), ("Accept", "*/*"), ("Connection", "close")] {
        if !given(name) {
            request = request.header(name, default);
        }
    }
    for (name, value) in &get.headers {
        // An empty Accept or User-Agent removes the default, as in the kubelet.
        let nothing = value.is_empty() && ["accept", "user-agent"].contains(&name.to_lowercase().as_str());
        if !nothing && (stop.own_host || !name.eq_ignore_ascii_case("host")) {
            request = request.header(name, value);
        }
    }
    request.body(Empty::<Bytes>::new()).map_err(|e| Broken::Request(format!("the probe's request: {e}")))
}

#[cfg(test)]
mod tests;
