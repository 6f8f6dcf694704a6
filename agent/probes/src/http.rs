//! An httpGet probe: a status from 200 to 399 is a success. The probe follows redirects to the same host
//! (`RedirectChecker`, pkg/probe/http); a redirect to another host ends the probe as a success with a
//! warning. A server may keep the connection open for the next probe (`kept.rs`).

use std::{net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Empty};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::{http1, http2},
    header,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
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
    kept::{Connection, Slot, Turn},
    tcp,
};

/// User agent of probes: the kubelet's name, which some applications exempt from login.
pub(super) const USER_AGENT: &str = "kube-probe/1.36";
/// Request of the probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Get {
    /// True for HTTPS.
    pub tls: bool,
    /// True for HTTP/2 without TLS (KEP-5999).
    pub http2: bool,
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
    /// True if the whole body was read.
    is_complete: bool,
}

/// Sends the request to `host` and judges the reply.
pub(super) async fn get(
    get: &Get,
    host: &str,
    port: u16,
    tls: &Arc<ClientConfig>,
    within: Duration,
    kept: Option<&Slot>,
) -> Answer {
    let kept = kept.filter(|_| !get.http2);
    if let Some(slot) = kept
        && let Ok(Ok(address)) = timeout(within, tcp::resolve(host, port)).await
        && let Ok(Some(answer)) = timeout(within, again(get, host, port, slot, address)).await
    {
        return answer;
    }
    let place = Place { tls: get.tls, port, path: get.path.clone(), own_host: true };
    let url = place.url(host);
    match timeout(within, follow(get, host, place, tls, kept)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(Broken::Request(error))) => Answer::error(error),
        Ok(Err(Broken::Answer(error))) => Answer::failure(format!("Get {url:?}: {error}")),
        Err(_) => Answer::failure(format!("Get {url:?}: no answer within {} s", within.as_secs_f64())),
    }
}

/// Follows redirects within the host, and judges the last reply.
async fn follow(
    get: &Get,
    host: &str,
    first: Place,
    tls: &Arc<ClientConfig>,
    kept: Option<&Slot>,
) -> Result<Answer, Broken> {
    let mut stop = first;
    for hop in 0..=MAX_REDIRECTS {
        let address = tcp::resolve(host, stop.port).await.map_err(Broken::Answer)?;
        let reply = exchange(get, &stop, host, address, tls, kept.filter(|_| hop == 0)).await?;
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
    kept: Option<&Slot>,
) -> Result<Reply, Broken> {
    let request = request(get, stop, host, kept.is_some())?;
    let answer = |e: &dyn std::fmt::Display| Broken::Answer(e.to_string());
    let stream = TcpStream::connect(address).await.map_err(|e| answer(&e))?;
    if kept.is_some() {
        // A kept connection is closed between two requests, so the reset loses no data.
        tcp::hang_up(&stream);
    }
    let stream: Pin<Box<dyn Stream>> = if stop.tls {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|e| Broken::Request(format!("the probe's host {host:?}: {e}")))?;
        let connector = TlsConnector::from(Arc::clone(tls));
        Box::pin(connector.connect(name, stream).await.map_err(|e| answer(&e))?)
    } else {
        Box::pin(stream)
    };
    // Drivers are aborted at every return of this function, unless the connection is kept.
    if get.http2 {
        let made = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (mut sender, connection) = made.map_err(|e| answer(&e))?;
        let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
        let response = sender.send_request(request).await.map_err(|e| answer(&e))?;
        return reply_of(response).await.map_err(|e| answer(&e));
    }
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| answer(&e))?;
    let driver = AbortOnDropHandle::new(tokio::spawn(async move {
        // The sender reports the connection's errors.
        let _ = connection.await;
    }));
    let response = sender.send_request(request).await.map_err(|e| answer(&e))?;
    let reply = reply_of(response).await.map_err(|e| answer(&e))?;
    if let Some(slot) = kept.filter(|_| reply.may_keep()) {
        slot.keep(Connection::Http(sender, driver), Turn::first(address)).await;
    }
    Ok(reply)
}

/// Sends the request on the kept connection. Returns only a success; anything else closes the connection.
async fn again(get: &Get, host: &str, port: u16, slot: &Slot, address: SocketAddr) -> Option<Answer> {
    let (Connection::Http(mut sender, driver), turn) = slot.claim(address).await? else { return None };
    let place = Place { tls: get.tls, port, path: get.path.clone(), own_host: true };
    let request = request(get, &place, host, true).ok()?;
    sender.ready().await.ok()?;
    let reply = reply_of(sender.send_request(request).await.ok()?).await.ok()?;
    if !reply.status.is_success() {
        return None;
    }
    if reply.may_keep() {
        slot.keep(Connection::Http(sender, driver), turn).await;
    }
    Some(judge(reply))
}

impl Reply {
    /// Returns true if the connection may serve another request, as far as the reply shows.
    fn may_keep(&self) -> bool {
        self.status.is_success() && self.is_complete
    }
}

async fn reply_of(response: Response<Incoming>) -> Result<Reply, hyper::Error> {
    let status = response.status();
    let location = response.headers().get(header::LOCATION);
    let location = location.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let (body, is_complete) = read(response).await?;
    Ok(Reply { status, location, body, is_complete })
}

/// A byte stream for HTTP.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Stream for T {}

/// Reads the body, up to [`MAX_OUTPUT`]. The second value is true if it was read to its end.
async fn read(response: Response<Incoming>) -> Result<(String, bool), hyper::Error> {
    let mut body = response.into_body();
    let mut read = Vec::new();
    let mut is_complete = false;
    while read.len() < MAX_OUTPUT {
        let Some(frame) = body.frame().await else {
            is_complete = true;
            break;
        };
        if let Some(data) = frame?.data_ref() {
            read.extend_from_slice(&data[..data.len().min(MAX_OUTPUT - read.len())]);
        }
    }
    Ok((String::from_utf8_lossy(&read).into_owned(), is_complete))
}

fn request(get: &Get, stop: &Place, host: &str, keep: bool) -> Result<Request<Empty<Bytes>>, Broken> {
    // HTTP/2 has pseudo-header fields in place of the host and the connection (RFC 9113, 8.2.2 and 8.3.1).
    let mut request = match get.http2 {
        true => Request::get(stop.url(host)).version(http::Version::HTTP_2),
        false => Request::get(stop.path.as_str()),
    };
    let given = |wanted: &str| get.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case(wanted));
    if !(get.http2 || stop.own_host && given("host")) {
        request = request.header("Host", stop.authority(host));
    }
    for (name, default) in [("User-Agent", USER_AGENT), ("Accept", "*/*"), ("Connection", "close")] {
        if !given(name) && !(name == "Connection" && (keep || get.http2)) {
            request = request.header(name, default);
        }
    }
    for (name, value) in &get.headers {
        // An empty Accept or User-Agent removes the default, as in the kubelet.
        let nothing = value.is_empty() && ["accept", "user-agent"].contains(&name.to_lowercase().as_str());
        let refused = get.http2 && ["host", "connection"].contains(&name.to_lowercase().as_str());
        if !nothing && !refused && (stop.own_host || !name.eq_ignore_ascii_case("host")) {
            request = request.header(name, value);
        }
    }
    request.body(Empty::<Bytes>::new()).map_err(|e| Broken::Request(format!("the probe's request: {e}")))
}

#[cfg(test)]
mod tests;
