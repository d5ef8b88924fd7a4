//! Counters and latencies of requests, in Prometheus' text form. A few dozen series under one short lock: a registry
//! crate would be more code than this.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http::{Method, StatusCode};

/// Upper bounds of the histogram's buckets, in seconds.
const BOUNDS: [f64; 14] = [
    0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];

#[derive(Debug, Default)]
pub struct Meter {
    in_flight: AtomicI64,
    /// By API and route, then method: the routes are ours, so there is a bounded number of them.
    routes: Mutex<Routes>,
}

type Routes = BTreeMap<&'static str, BTreeMap<String, BTreeMap<&'static str, Series>>>;

#[derive(Debug, Default)]
struct Series {
    statuses: BTreeMap<u16, u64>,
    buckets: [u64; BOUNDS.len()],
    count: u64,
    seconds: f64,
}

/// Counts a request as being answered until dropped, so that a client that hangs up is not counted for ever.
#[derive(Debug)]
pub struct InFlight<'a>(&'a AtomicI64);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Meter {
    pub fn begin(&self) -> InFlight<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
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
        let seconds = took.as_secs_f64();
        let mut apis = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let routes = apis.entry(api).or_default();
        if !routes.contains_key(route) {
            routes.insert(route.to_owned(), BTreeMap::new());
        }
        let Some(methods) = routes.get_mut(route) else {
            return;
        };
        let series = methods.entry(method_name(method)).or_default();
        *series.statuses.entry(status.as_u16()).or_default() += 1;
        if let Some(bucket) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            series.buckets[bucket] += 1;
        }
        series.count += 1;
        series.seconds += seconds;
    }

    /// Appends everything in Prometheus' text form.
    pub fn write(&self, out: &mut String) {
        gauge(
            out,
            "atoll_http_requests_in_flight",
            "Requests whose response has not begun.",
        );
        line(
            out,
            "atoll_http_requests_in_flight",
            &[],
            self.in_flight.load(Ordering::Relaxed),
        );
        let routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        head(out, "atoll_http_requests_total", "counter", "Requests answered.");
        for (api, route, method, series) in each(&routes) {
            for (status, count) in &series.statuses {
                let status = status.to_string();
                let labels = [
                    ("api", api),
                    ("method", method),
                    ("route", route),
                    ("status", status.as_str()),
                ];
                line(out, "atoll_http_requests_total", &labels, count);
            }
        }
        let name = "atoll_http_request_duration_seconds";
        head(
            out,
            name,
            "histogram",
            "From the request to the head of its response.",
        );
        for (api, route, method, series) in each(&routes) {
            let mut below = 0;
            for (bound, count) in BOUNDS.iter().zip(series.buckets) {
                below += count;
                let bound = bound.to_string();
                let labels = [
                    ("api", api),
                    ("method", method),
                    ("route", route),
                    ("le", bound.as_str()),
                ];
                line(out, "atoll_http_request_duration_seconds_bucket", &labels, below);
            }
            let labels = [("api", api), ("method", method), ("route", route), ("le", "+Inf")];
            line(
                out,
                "atoll_http_request_duration_seconds_bucket",
                &labels,
                series.count,
            );
            line(
                out,
                "atoll_http_request_duration_seconds_sum",
                &labels[..3],
                series.seconds,
            );
            line(
                out,
                "atoll_http_request_duration_seconds_count",
                &labels[..3],
                series.count,
            );
        }
    }
}

fn each(apis: &Routes) -> impl Iterator<Item = (&'static str, &str, &'static str, &Series)> {
    apis.iter().flat_map(|(api, routes)| {
        routes.iter().flat_map(move |(route, methods)| {
            methods
                .iter()
                .map(move |(method, series)| (*api, route.as_str(), *method, series))
        })
    })
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

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

pub fn gauge(out: &mut String, name: &str, help: &str) {
    head(out, name, "gauge", help);
}

pub fn line(out: &mut String, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
    out.push_str(name);
    for (at, (label, text)) in labels.iter().enumerate() {
        out.push(if at == 0 { '{' } else { ',' });
        let _ = write!(out, "{label}=\"");
        for character in text.chars() {
            match character {
                '\\' => out.push_str("\\\\"),
                '"' => out.push_str("\\\""),
                '\n' => out.push_str("\\n"),
                other => out.push(other),
            }
        }
        out.push('"');
    }
    if !labels.is_empty() {
        out.push('}');
    }
    let _ = writeln!(out, " {value}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_and_timed() {
        let meter = Meter::default();
        let begun = meter.begin();
        meter.record(
            "native",
            &Method::GET,
            "/healthz",
            StatusCode::OK,
            Duration::from_millis(2),
        );
        meter.record(
            "native",
            &Method::GET,
            "/healthz",
            StatusCode::OK,
            Duration::from_secs(60),
        );
        let mut out = String::new();
        meter.write(&mut out);
        for expected in [
            "atoll_http_requests_in_flight 1",
            "atoll_http_requests_total{api=\"native\",method=\"GET\",route=\"/healthz\",status=\"200\"} 2",
            "atoll_http_request_duration_seconds_bucket{api=\"native\",method=\"GET\",route=\"/healthz\",le=\"0.001\"} 0",
            "atoll_http_request_duration_seconds_bucket{api=\"native\",method=\"GET\",route=\"/healthz\",le=\"0.0025\"} 1",
            "atoll_http_request_duration_seconds_bucket{api=\"native\",method=\"GET\",route=\"/healthz\",le=\"+Inf\"} 2",
            "atoll_http_request_duration_seconds_count{api=\"native\",method=\"GET\",route=\"/healthz\"} 2",
        ] {
            assert!(
                out.lines().any(|line| line == expected),
                "{expected} not in\n{out}"
            );
        }
        drop(begun);
    }

    #[test]
    fn labels_are_escaped() {
        let mut out = String::new();
        line(&mut out, "x", &[("a", "q\"\\\n")], 1);
        assert_eq!(out, "x{a=\"q\\\"\\\\\\n\"} 1\n");
    }
}
