//! `/v1/sandboxes/{id}/ports`: what listens inside, and the way to it.

use atoll_identity::Opens;
use atoll_types::{Code, SandboxId};
use axum::extract::State;
use axum::http::HeaderMap;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, Failure};
use crate::extract::{As, At};
use crate::named::Named;
use crate::{App, Options};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_ports))
        .routes(routes!(get_port))
}

/// Something that listens on TCP inside a sandbox.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PortView {
    port: u16,
    address: String,
    /// Where it is reached from outside, with a token.
    #[schema(format = "uri")]
    url: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PortList {
    items: Vec<PortView>,
}

/// The way to a port.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PortAccess {
    port: u16,
    #[schema(format = "uri")]
    url: String,
    /// Opens this port of this sandbox and nothing else. Send it as `X-Atoll-Token` or `Authorization: Bearer`, or open
    /// `url` with `?atoll_token=` in a browser once.
    token: String,
}

/// Lists what listens inside a sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/ports", tag = "ports",
    security(("key" = ["sandbox.read"])),
    responses((status = 200, description = "The ports.", body = PortList))
)]
pub(crate) async fn list_ports(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    headers: HeaderMap,
) -> Answer<axum::Json<PortList>> {
    let ports = app.sandboxes.ports(&caller, &id).await?;
    let items = ports.into_iter().map(|listening| PortView {
        url: url(&app.options, &headers, &id, listening.port),
        port: listening.port,
        address: listening.address,
    });
    Ok(axum::Json(PortList {
        items: items.collect(),
    }))
}

/// Tells how to reach a port from outside, whether or not anything listens there yet.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/ports/{port}", tag = "ports",
    security(("key" = ["sandbox.use"])),
    responses((status = 200, description = "The way to it.", body = PortAccess))
)]
pub(crate) async fn get_port(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    At((_, port)): At<(String, u16)>,
    headers: HeaderMap,
) -> Answer<axum::Json<PortAccess>> {
    if port == 0 {
        return Err(Failure::new(Code::InvalidPathParameter, "0 is not a port"));
    }
    app.sandboxes.check_entry(&caller, &id).await?;
    let token = app.identity.token(&Opens::Port { sandbox: &id, port });
    Ok(axum::Json(PortAccess {
        port,
        url: url(&app.options, &headers, &id, port),
        token,
    }))
}

fn url(options: &Options, headers: &HeaderMap, id: &SandboxId, port: u16) -> String {
    let scheme = &options.public_scheme;
    let domain = options.port_domains.first().map_or("localhost", String::as_str);
    let bare = id.bare();
    match options
        .public_port
        .or_else(|| atoll_front::host::port_of(headers))
    {
        Some(public) => format!("{scheme}://{port}-{bare}.{domain}:{public}"),
        None => format!("{scheme}://{port}-{bare}.{domain}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_leads_to_where_the_request_came_in() {
        let id = "sbx_abcdefghijkmnpqrstuv".parse::<SandboxId>().unwrap();
        let headers = HeaderMap::from_iter([(axum::http::header::HOST, "127.0.0.1:4000".parse().unwrap())]);
        let mut options = Options::default();
        assert_eq!(
            url(&options, &headers, &id, 80),
            "http://80-abcdefghijkmnpqrstuv.localhost:4000"
        );
        options.public_scheme = "https".into();
        options.port_domains = vec!["boxes.example.org".into()];
        assert_eq!(
            url(&options, &HeaderMap::new(), &id, 80),
            "https://80-abcdefghijkmnpqrstuv.boxes.example.org"
        );
    }
}
