//! Counts requests to the API server under client-go's metric names. The innermost layer counts all requests,
//! including those cancelled before an answer.

use std::{
    task::{Context, Poll},
    time::Instant,
};

use futures::{FutureExt, future::BoxFuture};
use http::{Request, Response};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};
use tower::{Layer, Service};

/// Histogram buckets of durations, in seconds: client-go's.
const BUCKETS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
/// client-go's code of a request without an answer.
const NO_ANSWER: &str = "<error>";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    code: String,
    method: String,
    host: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Asked {
    verb: String,
    host: String,
}

fn durations() -> Histogram {
    Histogram::new(BUCKETS)
}

/// Metrics of requests. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    requests: Family<Answered, Counter>,
    durations: Family<Asked, Histogram, fn() -> Histogram>,
}

impl Default for Metrics {
    fn default() -> Self {
        let durations = Family::new_with_constructor(durations as fn() -> Histogram);
        Self { requests: Family::default(), durations }
    }
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Requests to the API server, by status, method and host";
        registry.register("rest_client_requests", help, self.requests.clone());
        let help = "Time until the API server's answer began, in seconds, by method and host";
        registry.register("rest_client_request_duration_seconds", help, self.durations.clone());
    }
}

impl<S> Layer<S> for Metrics {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner, metrics: self.clone() }
    }
}

/// Service that counts its requests.
#[derive(Clone, Debug)]
pub struct Counted<S> {
    inner: S,
    metrics: Metrics,
}

impl<S, B, R> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let under_way = UnderWay {
            metrics: self.metrics.clone(),
            method: request.method().to_string(),
            host: request.uri().authority().map(ToString::to_string).unwrap_or_default(),
            code: NO_ANSWER.to_owned(),
            began: Instant::now(),
        };
        let answer = self.inner.call(request);
        async move {
            // Move the whole value into this future, so that dropping the future counts the request.
            let mut under_way = under_way;
            let answer = answer.await;
            if let Ok(answer) = &answer {
                under_way.code = answer.status().as_str().to_owned();
            }
            answer
        }
        .boxed()
    }
}

/// A request, counted on drop: after its answer, its failure or its cancellation.
struct UnderWay {
    metrics: Metrics,
    method: String,
    host: String,
    code: String,
    began: Instant,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let (method, host) = (std::mem::take(&mut self.method), std::mem::take(&mut self.host));
        let asked = Asked { verb: method.clone(), host: host.clone() };
        self.metrics.durations.get_or_create(&asked).observe(self.began.elapsed().as_secs_f64());
        let code = std::mem::take(&mut self.code);
        self.metrics.requests.get_or_create(&Answered { code, method, host }).inc();
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::pending};

    use prometheus_client::encoding::text::encode;
    use tower::{ServiceBuilder, ServiceExt, service_fn};

    use super::*;

    #[tokio::test]
    async fn each_request_is_counted_once_whether_it_is_answered_or_given_up() {
        let metrics = Metrics::default();
        let answers = service_fn(|request: Request<()>| async move {
            if request.uri().path() == "/never" {
                pending::<()>().await;
            }
            Ok::<_, Infallible>(Response::builder().status(404).body(()).unwrap())
        });
        let mut service = ServiceBuilder::new().layer(metrics.clone()).service(answers);
        let request = |path: &str| Request::get(format!("https://api:6443{path}")).body(()).unwrap();
        let answer = service.ready().await.unwrap().call(request("/pods?watch=1")).await.unwrap();
        assert_eq!(answer.status(), 404);
        let given_up = service.ready().await.unwrap().call(request("/never"));
        assert!(given_up.now_or_never().is_none());
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "rest_client_requests_total{code=\"404\",method=\"GET\",host=\"api:6443\"} 1",
            "rest_client_requests_total{code=\"<error>\",method=\"GET\",host=\"api:6443\"} 1",
            "rest_client_request_duration_seconds_count{verb=\"GET\",host=\"api:6443\"} 2",
        ] {
            assert!(text.lines().any(|one| one == line), "no {line} in\n{text}");
        }
    }
}
