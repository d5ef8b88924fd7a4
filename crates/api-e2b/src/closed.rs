//! What the edge says of a sandbox or a port that cannot be reached: JSON for programs, a page for people who came by a browser.
//!
//! What must hold: clients read statuses and parts of these sentences, which are E2B's; and nothing of a request stands in a page
//! but ids and paths, escaped. A page loads nothing and runs nothing, because it is shown on a sandbox's own origin.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// What cannot be reached, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Closed {
    /// As it was named: it need not be one of ours.
    pub(crate) sandbox: String,
    pub(crate) port: Option<u16>,
    pub(crate) why: Why,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Why {
    /// It ended, rests, or never was.
    NotFound,
    PortClosed,
    TokenMissing,
    TokenInvalid,
    /// It rests, and who asked may not wake it.
    MayNotWake,
    /// A path that E2B's own servers use, and nobody else.
    Reserved {
        path: String,
    },
    Other {
        status: StatusCode,
        message: String,
    },
}

/// The header that opens private ports.
pub(crate) const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

impl Why {
    fn status(&self) -> StatusCode {
        match self {
            Self::NotFound | Self::PortClosed => StatusCode::BAD_GATEWAY,
            Self::TokenMissing | Self::TokenInvalid | Self::MayNotWake => StatusCode::FORBIDDEN,
            Self::Reserved { .. } => StatusCode::NOT_FOUND,
            Self::Other { status, .. } => *status,
        }
    }

    /// For clients.
    fn message(&self) -> String {
        match self {
            Self::NotFound => "The sandbox was not found".to_owned(),
            Self::PortClosed => "The sandbox is running but port is not open".to_owned(),
            Self::TokenMissing => format!(
                "Sandbox is secured with traffic access token. Token header '{TRAFFIC_TOKEN}' is missing"
            ),
            Self::TokenInvalid => format!(
                "Sandbox is secured with traffic access token. Provided token in header '{TRAFFIC_TOKEN}' is invalid"
            ),
            Self::MayNotWake => "This sandbox can't be resumed with the credentials provided. Check your access token and \
                                 try again."
                .to_owned(),
            Self::Reserved { .. } => {
                "This endpoint is reserved for the E2B control plane and is not reachable through the sandbox URL".to_owned()
            }
            Self::Other { message, .. } => message.clone(),
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::NotFound => "Sandbox Not Found",
            Self::PortClosed => "Closed Port Error",
            Self::TokenMissing => "Missing Traffic Access Token",
            Self::TokenInvalid => "Invalid Traffic Access Token",
            Self::MayNotWake => "Unable to Resume Sandbox",
            Self::Reserved { .. } => "Endpoint Not Available",
            Self::Other { .. } => "Sandbox Not Reachable",
        }
    }
}

impl Closed {
    pub(crate) fn not_found(sandbox: &str) -> Self {
        Self::new(sandbox, Why::NotFound)
    }

    pub(crate) fn new(sandbox: &str, why: Why) -> Self {
        Self {
            sandbox: sandbox.to_owned(),
            port: None,
            why,
        }
    }

    pub(crate) fn at_port(sandbox: &str, port: u16, why: Why) -> Self {
        Self {
            port: Some(port),
            ..Self::new(sandbox, why)
        }
    }

    fn page(&self) -> String {
        let text = match (&self.why, self.port) {
            (Why::NotFound, _) => format!("The sandbox {} wasn't found.", self.sandbox),
            (Why::PortClosed, Some(port)) => format!(
                "The sandbox {} is running but there's no service running on port {port}. Make sure that your server \
                 listens there.",
                self.sandbox
            ),
            (Why::Reserved { path }, _) => {
                format!(
                    "The endpoint {path} of the sandbox {} is not reachable from outside.",
                    self.sandbox
                )
            }
            (why, _) => format!("{} (sandbox {})", why.message(), self.sandbox),
        };
        let (title, text) = (self.why.title(), escaped(&text));
        format!(
            "<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title></head><body><h1>{title}</h1>\
             <p>{text}</p></body></html>"
        )
    }
}

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

impl IntoResponse for Closed {
    fn into_response(self) -> Response {
        let status = self.why.status();
        let mut body = json!({
            "sandboxId": self.sandbox,
            "message": self.why.message(),
            "code": status.as_u16(),
        });
        if let Some(port) = self.port {
            body["port"] = port.into();
        }
        let kind = HeaderValue::from_static("application/json; charset=utf-8");
        let mut response = (status, [(header::CONTENT_TYPE, kind)], body.to_string()).into_response();
        // Who asks is known further out.
        response.extensions_mut().insert(self);
        response
    }
}

/// The same refusal as a page, if it is one and its reader has a browser.
pub(crate) fn as_page(mut response: Response, is_browser: bool) -> Response {
    let Some(closed) = response
        .extensions_mut()
        .remove::<Closed>()
        .filter(|_| is_browser)
    else {
        return response;
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.remove(header::CONTENT_LENGTH);
    *response.body_mut() = Body::from(closed.page());
    response
}

/// Whether somebody navigates here, rather than a program or a page's script: those read JSON, whatever browser they run in.
pub(crate) fn is_browser(headers: &HeaderMap) -> bool {
    let text = |name: &str| {
        let value = headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_ascii_lowercase()
    };
    let accept = text("accept");
    if accept.contains("application/json") && !accept.contains("text/html") {
        return false;
    }
    match text("sec-fetch-mode").as_str() {
        "cors" | "no-cors" | "same-origin" | "websocket" => return false,
        "navigate" => {}
        _ if headers.contains_key("x-requested-with") => return false,
        _ => {}
    }
    let agent = text("user-agent");
    ["mozilla", "chrome", "safari", "firefox", "edge", "opera", "msie"]
        .iter()
        .any(|name| agent.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (
                header::HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        };
        pairs.iter().map(pair).collect()
    }

    async fn body(response: Response) -> String {
        let bytes = axum::body::to_bytes(response.into_body(), 10_000).await.unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[test]
    fn who_navigates_is_told_from_programs() {
        let mozilla = ("user-agent", "Mozilla/5.0 (X11; Linux) Firefox/140");
        assert!(is_browser(&headers(&[mozilla])));
        assert!(is_browser(&headers(&[
            mozilla,
            ("sec-fetch-mode", "navigate"),
            ("x-requested-with", "x")
        ])));
        for program in [
            &[][..],
            &[("user-agent", "curl/8")],
            &[mozilla, ("accept", "application/json")],
            &[mozilla, ("sec-fetch-mode", "cors")],
            &[mozilla, ("x-requested-with", "XMLHttpRequest")],
        ] {
            assert!(!is_browser(&headers(program)), "{program:?}");
        }
    }

    #[tokio::test]
    async fn programs_get_json_and_browsers_a_page() {
        let closed = || Closed::at_port("isandbox", 3210, Why::PortClosed).into_response();
        let response = as_page(closed(), false);
        assert_eq!(
            response.headers()[header::CONTENT_TYPE],
            "application/json; charset=utf-8"
        );
        let told: serde_json::Value = serde_json::from_str(&body(response).await).unwrap();
        assert_eq!(
            told,
            json!({"sandboxId": "isandbox", "message": "The sandbox is running but port is not open", "port": 3210, "code": 502})
        );
        let response = as_page(closed(), true);
        assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
        assert_eq!(
            response.headers()[header::CONTENT_TYPE],
            "text/html; charset=utf-8"
        );
        let page = body(response).await;
        assert!(page.starts_with("<html") && page.ends_with("</html>"), "{page}");
        assert!(
            page.contains("no service running on port 3210") && page.contains("isandbox"),
            "{page}"
        );
    }

    #[tokio::test]
    async fn nothing_of_a_request_becomes_markup() {
        let path = "/<script>alert(1)</script>\"&".to_owned();
        let page = as_page(Closed::new("x", Why::Reserved { path }).into_response(), true);
        let page = body(page).await;
        assert!(!page.contains("<script>"), "{page}");
        assert!(page.contains("&lt;script&gt;"), "{page}");
    }

    #[tokio::test]
    async fn what_is_no_refusal_of_the_edge_stays_as_it_is() {
        let response = as_page(
            (StatusCode::BAD_GATEWAY, "of the sandbox's server").into_response(),
            true,
        );
        assert_eq!(body(response).await, "of the sandbox's server");
    }
}
