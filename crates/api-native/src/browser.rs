//! `/v1/session`: a key exchanged for a cookie, for the server's own pages in a browser.
//!
//! What must hold: a cookie alone changes nothing. Pages of sandboxes may be on the same site as the server, and a browser
//! sends cookies along with what they ask for; so whatever changes something, and whatever becomes a WebSocket, comes from a
//! page of this very origin, and what changes something carries a word that is in no cookie.

use atoll_front::extract::cookies;
use atoll_front::proxy::{HOST_SESSION_NAME, SESSION_NAME};
use atoll_front::{Visit, host, serve};
use atoll_identity::{Caller, SessionWord};
use atoll_types::{Code, Fault};
use axum::extract::{Extension, State};
use axum::http::header::{self, HeaderName};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, Failure};
use crate::extract::As;
use crate::{App, wire};

const CSRF: HeaderName = HeaderName::from_static("x-atoll-csrf");

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(get_session, begin_session, end_session))
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Session)]
pub(crate) struct SessionView {
    /// Send it as `X-Atoll-CSRF` with whatever is not GET or HEAD.
    csrf: String,
    #[schema(format = DateTime)]
    expires_at: String,
    project: String,
    role: String,
}

impl SessionView {
    fn of(caller: &Caller, word: SessionWord) -> Self {
        Self {
            csrf: word.csrf,
            expires_at: wire::time(word.expires_at),
            project: caller.project().to_string(),
            role: caller.role().to_string(),
        }
    }
}

/// Exchanges the key for a cookie that may what the key may, for twelve hours at most.
#[utoipa::path(
    post, path = "/v1/session", tag = "sessions",
    security(("key" = ["server.read"])),
    responses((status = 201, description = "The session; the cookie is in `Set-Cookie`.", body = SessionView))
)]
pub(crate) async fn begin_session(
    State(app): State<App>,
    As(caller): As,
    extensions: axum::http::Extensions,
) -> Answer<Response> {
    let session = app.identity.begin_session(&caller).await?;
    let secured = serve::scheme(&extensions, &app.options.public_scheme) == "https";
    let (name, secure) = match secured {
        true => (HOST_SESSION_NAME, "; Secure"),
        false => (SESSION_NAME, ""),
    };
    let cookie = format!(
        "{name}={}; Path=/; Max-Age={}; HttpOnly; SameSite=Strict{secure}",
        session.secret, session.lasts_seconds
    );
    let headers = [
        (header::SET_COOKIE, cookie),
        (header::CACHE_CONTROL, "no-store".into()),
    ];
    let view = axum::Json(SessionView::of(&caller, session.word));
    Ok((StatusCode::CREATED, headers, view).into_response())
}

/// Tells a page that was loaded anew which session it is in.
#[utoipa::path(
    get, path = "/v1/session", tag = "sessions",
    security(("key" = ["server.read"])),
    responses((status = 200, description = "The session of the cookie.", body = SessionView))
)]
pub(crate) async fn get_session(State(app): State<App>, As(caller): As) -> Answer<Response> {
    let word = app.identity.session_word(&caller)?;
    let view = axum::Json(SessionView::of(&caller, word));
    Ok(([(header::CACHE_CONTROL, "no-store")], view).into_response())
}

/// Ends the session of the cookie, and what is open with it.
#[utoipa::path(
    delete, path = "/v1/session", tag = "sessions",
    security(("key" = ["server.read"])),
    responses((status = 204, description = "It has ended."))
)]
pub(crate) async fn end_session(
    State(app): State<App>,
    As(caller): As,
    Extension(visit): Extension<Visit>,
) -> Answer<Response> {
    let ended = app.identity.end_session(&caller).await?;
    visit.revoke(&ended);
    let gone = |name: &str, secure: &str| {
        let cookie = format!("{name}=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict{secure}");
        (header::SET_COOKIE, cookie)
    };
    let headers =
        axum::response::AppendHeaders([gone(SESSION_NAME, ""), gone(HOST_SESSION_NAME, "; Secure")]);
    Ok((StatusCode::NO_CONTENT, headers).into_response())
}

/// Who comes with a cookie of ours, from a page that may send it. `None`: there is no such cookie.
pub(crate) async fn by_cookie(app: &App, parts: &Parts) -> Result<Option<Caller>, Failure> {
    let secured = serve::scheme(&parts.extensions, &app.options.public_scheme) == "https";
    let name = if secured { HOST_SESSION_NAME } else { SESSION_NAME };
    let Some(secret) = cookie(&parts.headers, name) else {
        return Ok(None);
    };
    let Some(caller) = app.identity.find_session(secret).await? else {
        return Err(Fault::new(Code::InvalidSession, "this session has ended")
            .hint("POST /v1/session with a key begins another")
            .into());
    };
    let safe = matches!(parts.method, Method::GET | Method::HEAD);
    let upgrades = parts.headers.contains_key(header::UPGRADE);
    let scheme = serve::scheme(&parts.extensions, &app.options.public_scheme);
    match origin(parts, scheme) {
        Origin::Own => {}
        // Browsers leave it out where a page of the same origin only looks.
        Origin::Unsaid if safe && !upgrades => {}
        Origin::Unsaid | Origin::Foreign => {
            return Err(refused(
                Code::WrongOrigin,
                "a session is used by pages of this server alone; `Origin` says otherwise, or nothing",
            ));
        }
    }
    let word = parts.headers.get(CSRF).and_then(|value| value.to_str().ok());
    if !safe && !app.identity.is_csrf(&caller, word.unwrap_or_default()) {
        return Err(refused(
            Code::WrongCsrf,
            "what changes something carries the session's own word in `X-Atoll-CSRF`",
        ));
    }
    Ok(Some(caller))
}

fn refused(code: Code, message: &str) -> Failure {
    Fault::new(code, message)
        .hint("GET /v1/session tells the word; programs send a key instead of a cookie")
        .into()
}

#[derive(Debug, PartialEq, Eq)]
enum Origin {
    Own,
    Foreign,
    Unsaid,
}

/// Whether the page that asks is one of the host that is asked.
fn origin(parts: &Parts, scheme: &str) -> Origin {
    let mut said = parts.headers.get_all(header::ORIGIN).iter();
    let (first, second) = (said.next(), said.next());
    let Some(first) = first else {
        return Origin::Unsaid;
    };
    let own = host::authority(&parts.uri, &parts.headers).map(|host| format!("{scheme}://{host}"));
    match (first.to_str(), own) {
        (Ok(said), Some(own)) if second.is_none() && said.eq_ignore_ascii_case(&own) => Origin::Own,
        _ => Origin::Foreign,
    }
}

/// The cookie of this name; one that comes twice is none: another page may have planted the other.
fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut found = cookies(headers)
        .filter(|(known, _)| *known == name)
        .map(|(_, value)| value);
    match (found.next(), found.next()) {
        (Some(value), None) => Some(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    fn parts(headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri("/v1/keys");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn only_pages_of_this_very_origin_are_our_own() {
        let host = ("host", "atoll.example:7070");
        type Headers<'a> = &'a [(&'a str, &'a str)];
        let cases: [(Headers<'_>, &str, Origin); 9] = [
            (&[host], "http", Origin::Unsaid),
            (
                &[host, ("origin", "http://atoll.example:7070")],
                "http",
                Origin::Own,
            ),
            (
                &[host, ("origin", "http://atoll.example:7070")],
                "https",
                Origin::Foreign,
            ),
            (
                &[host, ("origin", "https://atoll.example:7070")],
                "http",
                Origin::Foreign,
            ),
            (
                &[host, ("origin", "http://atoll.example")],
                "http",
                Origin::Foreign,
            ),
            (
                &[host, ("origin", "http://8080-sbx.atoll.example:7070")],
                "http",
                Origin::Foreign,
            ),
            (&[host, ("origin", "null")], "http", Origin::Foreign),
            (
                &[
                    host,
                    ("origin", "http://atoll.example:7070"),
                    ("origin", "http://evil.example"),
                ],
                "http",
                Origin::Foreign,
            ),
            (&[("origin", "http://")], "http", Origin::Foreign),
        ];
        for (headers, scheme, expected) in cases {
            assert_eq!(origin(&parts(headers), scheme), expected, "{headers:?} {scheme}");
        }
    }

    #[test]
    fn a_cookie_that_comes_twice_is_none() {
        let one = parts(&[("cookie", "a=b; atoll_session=s; c=d")]);
        assert_eq!(cookie(&one.headers, SESSION_NAME), Some("s"));
        assert_eq!(cookie(&one.headers, HOST_SESSION_NAME), None);
        for twice in [
            &[("cookie", "atoll_session=s; atoll_session=t")][..],
            &[("cookie", "atoll_session=s"), ("cookie", "atoll_session=t")],
        ] {
            assert_eq!(cookie(&parts(twice).headers, SESSION_NAME), None);
        }
    }
}
