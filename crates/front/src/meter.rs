//! Counters and latencies of requests, and the one form in which metrics are told: OpenMetrics, which is what Prometheus and
//! those who read like it ask for first.
//!
//! What must hold: labels have a bounded number of values, whatever clients send. Routes and APIs are ours, and methods that
//! clients invent are one.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode, header};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// What [`exposition`] is declared as.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Upper bounds of the histogram's buckets, in seconds.
const BOUNDS: [f64; 14] = [
    0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];

#[derive(Debug, Clone)]
pub struct Meter {
    in_flight: Gauge,
    answered: Family<Answered, Counter>,
    took: Family<Asked, Histogram, fn() -> Histogram>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Asked {
    api: &'static str,
    method: &'static str,
    route: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    #[prometheus(flatten)]
    asked: Asked,
    status: u16,
}

/// Counts a request as being answered until dropped, so that a client that hangs up is not counted for ever.
#[derive(Debug)]
pub struct InFlight<'a>(&'a Gauge);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Default for Meter {
    fn default() -> Self {
        Self {
            in_flight: Gauge::default(),
            answered: Family::default(),
            took: Family::new_with_constructor(|| Histogram::new(BOUNDS)),
        }
    }
}

impl Meter {
    pub fn begin(&self) -> InFlight<'_> {
        self.in_flight.inc();
        InFlight(&self.in_flight)
    }

    pub fn record(
        &self,
        api: &'static str,
        method: &Method,
        route: &str,
        status: StatusCode,
        took: Duration,
    ) {
        let asked = Asked {
            api,
            method: method_name(method),
            route: route.to_owned(),
        };
        self.took.get_or_create(&asked).observe(took.as_secs_f64());
        let answered = Answered {
            asked,
            status: status.as_u16(),
        };
        self.answered.get_or_create(&answered).inc();
    }

    /// Adds what was counted to what is about to be told.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "atoll_http_requests_in_flight",
            "Requests whose response has not begun",
            self.in_flight.clone(),
        );
        registry.register("atoll_http_requests", "Requests answered", self.answered.clone());
        registry.register(
            "atoll_http_request_duration_seconds",
            "From the request to the head of its response",
            self.took.clone(),
        );
    }
}

/// Everything in a registry, as an answer.
pub fn exposition(registry: &Registry) -> Response {
    let mut text = String::with_capacity(16 * 1024);
    match encode(&mut text, registry) {
        Ok(()) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        // Writing to memory does not fail, and no number here is out of range.
        Err(error) => {
            tracing::error!(%error, "metrics could not be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Clients invent methods; series must not multiply by them.
fn method_name(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "PATCH" => "PATCH",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_are_counted_and_timed() {
        let meter = Meter::default();
        let begun = meter.begin();
        let record = |method: &Method, took| {
            meter.record("native", method, "/healthz", StatusCode::OK, took);
        };
        record(&Method::GET, Duration::from_millis(2));
        record(&Method::GET, Duration::from_secs(60));
        for invented in ["BREW", "brew"] {
            record(&Method::from_bytes(invented.as_bytes()).unwrap(), Duration::ZERO);
        }
        let mut registry = Registry::default();
        meter.register(&mut registry);
        let answer = exposition(&registry);
        assert_eq!(answer.headers()[header::CONTENT_TYPE], CONTENT_TYPE);
        let body = axum::body::to_bytes(answer.into_body(), 100_000).await.unwrap();
        let out = std::str::from_utf8(&body).unwrap();
        for expected in [
            "# TYPE atoll_http_requests_in_flight gauge",
            "atoll_http_requests_in_flight 1",
            "# TYPE atoll_http_requests counter",
            "atoll_http_requests_total{api=\"native\",method=\"GET\",route=\"/healthz\",status=\"200\"} 2",
            "atoll_http_requests_total{api=\"native\",method=\"other\",route=\"/healthz\",status=\"200\"} 2",
            "# HELP atoll_http_request_duration_seconds From the request to the head of its response.",
            "atoll_http_request_duration_seconds_bucket{le=\"0.001\",api=\"native\",method=\"GET\",route=\"/healthz\"} 0",
            "atoll_http_request_duration_seconds_bucket{le=\"0.0025\",api=\"native\",method=\"GET\",route=\"/healthz\"} 1",
            "atoll_http_request_duration_seconds_bucket{le=\"+Inf\",api=\"native\",method=\"GET\",route=\"/healthz\"} 2",
            "atoll_http_request_duration_seconds_count{api=\"native\",method=\"GET\",route=\"/healthz\"} 2",
        ] {
            assert!(
                out.lines().any(|line| line == expected),
                "{expected} not in\n{out}"
            );
        }
        assert!(out.ends_with("# EOF\n"), "{out}");
        drop(begun);
        let mut after = String::new();
        encode(&mut after, &registry).unwrap();
        assert!(after.contains("atoll_http_requests_in_flight 0\n"), "{after}");
    }
}
