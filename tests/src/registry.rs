//! Private container registry on loopback with one image, protected by name and password. Implements the part
//! of the OCI distribution specification that a pull needs.

use crate::images::ImageTar;
use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use std::collections::HashMap;
use std::convert::Infallible;
use std::io::Read as _;
use std::sync::Arc;
use tokio::sync::oneshot;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Files of the image's layout, the digest of its manifest, and the expected `Authorization` header.
#[derive(Debug)]
struct Content {
    blobs: HashMap<String, Bytes>,
    manifest: String,
    authorization: String,
}

/// Running registry, stopped on drop.
#[derive(Debug)]
pub struct Registry {
    host: String,
    _stop: oneshot::Sender<()>,
}

impl Registry {
    /// Starts a registry with this image, available under any name.
    ///
    /// # Errors
    /// The image's file cannot be read, or no port is free.
    pub fn start(image: &ImageTar, user: &str, password: &str) -> Result<Registry> {
        let content = Arc::new(content(image, user, password)?);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").context("no port is free")?;
        listener.set_nonblocking(true)?;
        let host = listener.local_addr()?.to_string();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, mut stopped) = oneshot::channel();
        std::thread::spawn(move || {
            runtime.block_on(async {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
                loop {
                    tokio::select! {
                        _ = &mut stopped => return,
                        Ok((stream, _)) = listener.accept() => {
                            let content = Arc::clone(&content);
                            let service =
                                service_fn(move |request| std::future::ready(Ok::<_, Infallible>(content.answer(&request))));
                            let served = hyper::server::conn::http1::Builder::new()
                                .serve_connection(TokioIo::new(stream), service);
                            tokio::spawn(served);
                        }
                    }
                }
            });
        });
        Ok(Registry { host, _stop: stop })
    }

    /// Returns the registry's host in an image's reference: address and port.
    pub fn host(&self) -> &str {
        &self.host
    }
}

fn content(image: &ImageTar, user: &str, password: &str) -> Result<Content> {
    let file =
        std::fs::File::open(&image.path).with_context(|| format!("cannot open {}", image.path.display()))?;
    let (mut blobs, mut index) = (HashMap::new(), serde_json::Value::Null);
    for entry in tar::Archive::new(file).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        if path == "index.json" {
            index = serde_json::from_slice(&bytes)?;
        } else if let Some(hex) = path.strip_prefix("blobs/sha256/") {
            blobs.insert(format!("sha256:{hex}"), Bytes::from(bytes));
        }
    }
    let manifest = index["manifests"][0]["digest"].as_str().context("the image has no manifest")?.to_owned();
    let authorization = format!("Basic {}", STANDARD.encode(format!("{user}:{password}")));
    Ok(Content { blobs, manifest, authorization })
}

impl Content {
    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let sent = request.headers().get(header::AUTHORIZATION).map(header::HeaderValue::as_bytes);
        if sent != Some(self.authorization.as_bytes()) {
            let challenge = (header::WWW_AUTHENTICATE, "Basic realm=\"private\"");
            return with(StatusCode::UNAUTHORIZED, [challenge], Bytes::new());
        }
        let path = request.uri().path();
        let last = path.rsplit('/').next().unwrap_or_default();
        let (digest, kind) = if path.contains("/manifests/") {
            (if last.starts_with("sha256:") { last } else { &self.manifest }, MANIFEST)
        } else {
            (last, "application/octet-stream")
        };
        match self.blobs.get(digest) {
            Some(bytes) => {
                let digest = (header::HeaderName::from_static("docker-content-digest"), digest);
                with(StatusCode::OK, [(header::CONTENT_TYPE, kind), digest], bytes.clone())
            }
            None if path == "/v2/" => with(StatusCode::OK, [], Bytes::new()),
            None => with(StatusCode::NOT_FOUND, [], Bytes::new()),
        }
    }
}

fn with<const N: usize>(
    status: StatusCode,
    headers: [(header::HeaderName, &str); N],
    body: Bytes,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    for (name, value) in headers {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(name, value);
        }
    }
    response
}
