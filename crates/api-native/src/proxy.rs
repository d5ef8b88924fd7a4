//! Who may pass to a port of a sandbox of this API: `http://{port}-{sandbox}.localhost`, with the port's own token.
//!
//! What must hold: nothing passes without it. The way itself is [`atoll_front::proxy`].

use atoll_front::extract::cookies;
use atoll_front::proxy::{
    self, HOST_TOKEN_NAME, Passing, Secrets, TOKEN_NAME, is_token_cookie, without_token,
};
use atoll_front::{host, serve};
use atoll_identity::{Caller, Opens, kind_of_secret};
use atoll_types::{Code, Fault, SandboxId};
use axum::extract::Request;
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};

use crate::App;
use crate::error::{Answer, Failure};
use crate::extract::{admit as admit_to, bearer};

const TOKEN_HEADER: HeaderName = HeaderName::from_static("x-atoll-token");
/// More tokens than this in one request are not looked at.
const MAX_TOKENS: usize = 8;

pub(crate) async fn pass(app: &App, sandbox: &SandboxId, port: u16, request: Request) -> Answer<Response> {
    if request.method() == Method::CONNECT {
        return Err(Failure::new(
            Code::MethodNotAllowed,
            "a sandbox's port is not a proxy",
        ));
    }
    let Some(admitted) = admit(app, sandbox, port, request.headers(), request.uri()) else {
        // A token says nothing of a sandbox that is not there any more.
        if app.sandboxes.owner(sandbox).is_none() {
            return Err(Fault::new(
                Code::SandboxNotFound,
                format!("there is no sandbox {sandbox}, or it has ended"),
            )
            .into());
        }
        let shown = tokens(request.headers(), request.uri()).find_map(|(_, token)| kind_of_secret(token));
        return Err(Fault::new(
            Code::InvalidPortToken,
            match shown {
                Some(kind) => format!(
                    "port {port} of sandbox {sandbox} opens with this port's token only; what was sent looks like {kind}"
                ),
                None => format!("port {port} of sandbox {sandbox} opens with this port's token only"),
            },
        )
        .hint(format!(
            "GET /v1/sandboxes/{sandbox}/ports/{port} tells the token; send it as `X-Atoll-Token`, or open the page \
             once with `?{TOKEN_NAME}=`"
        ))
        .into());
    };
    admit_to(request.extensions(), &admitted.caller)?;
    let safe = matches!(*request.method(), Method::GET | Method::HEAD);
    if admitted.by == Source::Query && safe && proxy::upgrade_to(request.headers()).is_none() {
        return Ok(remember(app, &request, &admitted.token));
    }
    let scheme = serve::scheme(request.extensions(), &app.options.public_scheme);
    let connecting = app.sandboxes.connect(&admitted.caller, sandbox, port);
    let stream = proxy::connect(port, connecting).await?;
    let passing = Passing {
        port,
        secrets: Secrets {
            headers: &[TOKEN_HEADER],
            token: Some(&admitted.token),
            is_ours: |word| kind_of_secret(word).is_some(),
        },
        host: None,
        scheme,
        shares_host: false,
    };
    Ok(proxy::pass(stream.into_io(), request, passing).await?)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Header,
    Bearer,
    Cookie,
    Query,
}

struct Admitted {
    caller: Caller,
    token: String,
    by: Source,
}

fn admit(app: &App, sandbox: &SandboxId, port: u16, headers: &HeaderMap, uri: &Uri) -> Option<Admitted> {
    tokens(headers, uri).find_map(|(by, token)| {
        let proof = app.identity.prove(&Opens::Port { sandbox, port }, token)?;
        let caller = proof.acting_for(app.sandboxes.owner(sandbox)?);
        let token = token.to_owned();
        Some(Admitted { caller, token, by })
    })
}

/// Everything in a request that might be the token.
fn tokens<'a>(headers: &'a HeaderMap, uri: &'a Uri) -> impl Iterator<Item = (Source, &'a str)> {
    let from_header = headers
        .get(TOKEN_HEADER)
        .and_then(|value| value.to_str().ok())
        .map(|token| (Source::Header, token.trim()));
    let from_bearer = bearer(headers).map(|token| (Source::Bearer, token));
    // several, because another host of the domain may have planted one of the same name
    let from_cookies = cookies(headers)
        .filter(|(name, _)| is_token_cookie(name))
        .map(|(_, token)| (Source::Cookie, token));
    let from_query = uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.strip_prefix(TOKEN_NAME)?.strip_prefix('='))
        .map(|token| (Source::Query, token));
    from_header
        .into_iter()
        .chain(from_bearer)
        .chain(from_query)
        .chain(from_cookies)
        .filter(|(_, token)| !token.is_empty())
        .take(MAX_TOKENS)
}

/// Puts the token of a URL into a cookie and leads to the URL without it.
fn remember(app: &App, request: &Request, token: &str) -> Response {
    let host = host::authority(request.uri(), request.headers()).unwrap_or_default();
    let scheme = serve::scheme(request.extensions(), &app.options.public_scheme);
    // With scheme and host: a path that begins with `//` would otherwise lead to another host.
    let location = format!("{scheme}://{host}{}", without_token(request.uri()));
    let (name, secure) = match scheme == "https" {
        true => (HOST_TOKEN_NAME, "; Secure"),
        false => (TOKEN_NAME, ""),
    };
    let cookie = format!("{name}={token}; Path=/; HttpOnly; SameSite=Lax{secure}");
    let headers = [
        (header::LOCATION, location),
        (header::SET_COOKIE, cookie),
        (header::CACHE_CONTROL, "no-store".into()),
        (header::REFERRER_POLICY, "no-referrer".into()),
    ];
    (StatusCode::SEE_OTHER, headers).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn the_token_is_looked_for_in_four_places() {
        let headers = headers(&[
            ("x-atoll-token", "t1"),
            ("authorization", "Bearer t2"),
            ("cookie", "a=b; atoll_token=t3; __Host-atoll_token=t4"),
        ]);
        let uri: Uri = "/x?atoll_token=t5&y=1".parse().unwrap();
        let found: Vec<_> = tokens(&headers, &uri).collect();
        assert_eq!(
            found,
            [
                (Source::Header, "t1"),
                (Source::Bearer, "t2"),
                (Source::Query, "t5"),
                (Source::Cookie, "t3"),
                (Source::Cookie, "t4"),
            ]
        );
    }

    #[test]
    fn keys_and_tokens_of_every_kind_are_known_as_ours() {
        for ours in [
            "atl_key",
            "e2b_0000000000000000000000000000000000000000",
            "atm_key",
            "atv_key",
            "ats_key",
            "atp_of-another-port",
            "att_token",
            "ate_token",
        ] {
            assert!(kind_of_secret(ours).is_some(), "{ours}");
        }
        assert!(kind_of_secret("theirs").is_none());
    }
}
