//! Templates: build, list, inspect, delete, keep-running, share, unshare, prune.

use std::path::Path;

use atoll_client::output::{Doing, Error, Output, Result, byte_bar};
use atoll_client::template::follow_build;
use atoll_client::{Client, segment, text, transfer};
use atoll_types::format_bytes;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use super::{Connection, net, relative, resources};
use crate::args::{Global, KeepRunningArgs, TemplateBuildArgs, TemplateCommand};

pub(crate) async fn run(global: &Global, output: Output, mut command: TemplateCommand) -> Result<()> {
    let connection = Connection::open(global).await?;
    if let TemplateCommand::Build(args) = &mut command {
        connection.note_wall(output).await?;
        args.shared |= connection.is_embedded();
    }
    let outcome = with(&connection.client, output, command).await;
    connection.close().await;
    outcome
}

async fn with(client: &Client, output: Output, command: TemplateCommand) -> Result<()> {
    match command {
        TemplateCommand::Build(args) => {
            let template = build(client, output, &args).await?;
            output.json(&template);
            output.line(describe(&args.name, &template));
        }
        TemplateCommand::List => {
            let templates = client.list("/v1/templates", &[]).await?;
            let rows: Vec<_> = templates
                .iter()
                .map(|template| {
                    [
                        names(template),
                        text(template, "id"),
                        shared(template),
                        source(template),
                        size(template),
                        relative(template, "created_at"),
                    ]
                })
                .collect();
            output.table(
                ["NAME", "ID", "SHARED", "SOURCE", "SIZE", "BUILT"],
                &rows,
                "no templates; `atoll template build base --shared` makes one",
            );
            output.json(&Value::Array(templates));
        }
        TemplateCommand::Inspect { template } => {
            let template = client
                .get(&format!("/v1/templates/{}", segment(&template)))
                .await?;
            // It is for people as it is for programs.
            Output { json: true }.json(&template);
        }
        TemplateCommand::Delete { template } => {
            let answer = client
                .delete(&format!("/v1/templates/{}", segment(&template)))
                .await?;
            output.json(&answer);
            output.line(format_args!("{template} is deleted"));
        }
        TemplateCommand::KeepRunning(args) => {
            let kept = keep_running(client, &args).await?;
            output.json(&kept);
            let memory = kept["memory_bytes"].as_u64().unwrap_or_default();
            let size = kept["total_bytes"].as_u64().unwrap_or_default();
            output.line(format_args!(
                "{} comes up running in sandboxes with {} of memory; {} are kept",
                args.template,
                format_bytes(memory),
                format_bytes(size)
            ));
        }
        TemplateCommand::Share { template, project } => {
            let body = project.map_or(json!({}), |project| json!({ "project": project }));
            let path = format!("/v1/templates/{}/share", segment(&template));
            output.json(&client.post(&path, &body).await?);
            output.line(format_args!("every project may use {template} now"));
        }
        TemplateCommand::Unshare { template } => {
            let path = format!("/v1/templates/{}/unshare", segment(&template));
            output.json(&client.post(&path, &json!({})).await?);
            output.line(format_args!("{template} is shared no more"));
        }
        TemplateCommand::Prune => {
            let answer = client.post("/v1/templates/prune", &json!({})).await?;
            output.json(&answer);
            let freed = answer["freed_bytes"].as_u64().unwrap_or_default();
            output.line(format_args!("{} freed", format_bytes(freed)));
        }
    }
    Ok(())
}

async fn keep_running(client: &Client, args: &KeepRunningArgs) -> Result<Value> {
    let mut body = json!({});
    if let Some(resources) = resources(&args.limits) {
        body["resources"] = resources;
    }
    if let Some(isolation) = args.isolation {
        body["isolation_floor"] = json!(isolation.name());
    }
    let path = format!("/v1/templates/{}/running", segment(&args.template));
    client.post(&path, &body).await
}

fn names(template: &Value) -> String {
    let names = template["names"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str);
    names.collect::<Vec<_>>().join(", ")
}

fn shared(template: &Value) -> String {
    let shared = template["shared"].as_bool().unwrap_or_default();
    if shared { "yes" } else { "no" }.to_owned()
}

fn source(template: &Value) -> String {
    let source = &template["source"];
    match text(source, "kind").as_str() {
        "debian" => format!("debian {}", text(source, "suite")),
        "image" => text(source, "reference"),
        kind => kind.to_owned(),
    }
}

fn describe(name: &str, template: &Value) -> String {
    format!("{name}: {} ({})", text(template, "id"), size(template))
}

/// Of all that it consists of; before that, what of it is its own.
fn size(template: &Value) -> String {
    let shown = |key: &str| template[key].as_u64().map(format_bytes);
    let whole = shown("size_bytes").unwrap_or_default();
    match shown("layer_bytes") {
        Some(own) => format!("{own} of {whole}"),
        None => whole,
    }
}

async fn build(client: &Client, output: Output, args: &TemplateBuildArgs) -> Result<Value> {
    if let Some(dockerfile) = &args.dockerfile {
        return build_dockerfile(client, output, args, dockerfile).await;
    }
    let files = args.image.as_deref().and_then(|reference| {
        ["oci:", "docker-archive:"]
            .into_iter()
            .find_map(|scheme| reference.strip_prefix(scheme))
    });
    if let Some(path) = files {
        return build_archive(client, output, args, Path::new(path)).await;
    }
    let mut body = json!({"name": args.name, "shared": args.shared});
    if let Some(reference) = &args.image {
        body["image"] = json!(reference);
    } else {
        body["debian"] = json!({"packages": args.package});
        if let Some(suite) = &args.suite {
            body["debian"]["suite"] = json!(suite);
        }
    }
    if let Some(start) = start(args) {
        body["start"] = start;
    }
    if let Some(network) = net::reach(&args.reach)? {
        body["network"] = network;
    }
    if let Some(resources) = resources(&args.limits) {
        body["resources"] = resources;
    }
    let request = client.request(Method::POST, "/v1/templates/build").json(&body);
    follow_build(output, client.send(with_login(request, args)?).await?).await
}

/// Says who to be for registries, if anybody.
fn with_login(request: RequestBuilder, args: &TemplateBuildArgs) -> Result<RequestBuilder> {
    use base64::Engine as _;
    let (Some(user), Some(file)) = (&args.registry_user, &args.registry_password_file) else {
        return Ok(request);
    };
    let password = if file == Path::new("-") {
        std::io::read_to_string(std::io::stdin()).doing("cannot read the password")?
    } else {
        std::fs::read_to_string(file).doing(format_args!("cannot read {}", file.display()))?
    };
    let pair = format!("{user}:{}", password.trim_end_matches(['\r', '\n']));
    let encoded = base64::engine::general_purpose::STANDARD.encode(pair);
    let request = request.header("x-registry-auth", format!("Basic {encoded}"));
    Ok(match &args.registry {
        Some(registry) => request.header("x-registry", registry),
        None => request,
    })
}

/// An image in files on this machine is sent as one archive.
async fn build_archive(
    client: &Client,
    output: Output,
    args: &TemplateBuildArgs,
    path: &Path,
) -> Result<Value> {
    let bar = byte_bar(
        output,
        "sending the image",
        std::fs::metadata(path).ok().map(|found| found.len()),
    );
    let body = if path.is_dir() {
        transfer::body_from_tar(path.to_owned(), String::new(), bar.clone())
    } else {
        let file = std::fs::File::open(path).doing(format_args!("cannot read {}", path.display()))?;
        transfer::body_from(file, bar.clone())
    };
    let mut query = vec![("name".to_owned(), args.name.clone())];
    query.extend(settings_query(args)?);
    let request = client
        .request(Method::POST, "/v1/templates/build-archive")
        .query(&query)
        .header("content-type", "application/x-tar")
        .body(body);
    let response = client.send(request).await?;
    bar.finish_and_clear();
    follow_build(output, response).await
}

/// What sandboxes are to have of the template beside its files, as parameters of an upload.
fn settings_query(args: &TemplateBuildArgs) -> Result<impl Iterator<Item = (String, String)> + use<>> {
    let given = [
        ("shared", args.shared.then_some(Value::Bool(true))),
        ("start", start(args)),
        ("network", net::reach(&args.reach)?),
        ("resources", resources(&args.limits)),
    ];
    Ok(as_query(given))
}

fn as_query<const N: usize>(
    given: [(&'static str, Option<Value>); N],
) -> impl Iterator<Item = (String, String)> + use<N> {
    given
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?.to_string())))
}

async fn build_dockerfile(
    client: &Client,
    output: Output,
    args: &TemplateBuildArgs,
    dockerfile: &Path,
) -> Result<Value> {
    let file = if dockerfile.is_dir() {
        dockerfile.join("Dockerfile")
    } else {
        dockerfile.to_owned()
    };
    let file = file
        .canonicalize()
        .doing(format_args!("cannot read {}", file.display()))?;
    let context = match &args.context {
        Some(context) => context
            .canonicalize()
            .doing(format_args!("cannot find {}", context.display()))?,
        None => file.parent().unwrap_or(Path::new("/")).to_owned(),
    };
    let inside = file
        .strip_prefix(&context)
        .ok()
        .and_then(Path::to_str)
        .ok_or_else(|| {
            Error::new(format!(
                "{} is not in the build context {}",
                file.display(),
                context.display()
            ))
            .hint("put it there, or choose another with --context")
        })?;
    let mut query = vec![
        ("name".to_owned(), args.name.clone()),
        ("dockerfile".to_owned(), inside.to_owned()),
    ];
    query.extend(
        args.build_arg
            .iter()
            .map(|(name, value)| ("arg".to_owned(), format!("{name}={value}"))),
    );
    query.extend(
        args.target
            .iter()
            .map(|stage| ("target".to_owned(), stage.clone())),
    );
    if args.no_cache {
        query.push(("no_cache".to_owned(), "true".to_owned()));
    }
    query.extend(settings_query(args)?);
    query.extend(as_query([(
        "build_network",
        net::build_reach(&args.build_reach)?,
    )]));
    let request = client
        .request(Method::POST, "/v1/templates/build-context")
        .query(&query)
        .header("content-type", "application/x-tar")
        .body(transfer::body_from_tar(
            context,
            String::new(),
            indicatif::ProgressBar::hidden(),
        ));
    follow_build(output, client.send(with_login(request, args)?).await?).await
}

/// The start command: a line for the shell, or what the image says.
fn start(args: &TemplateBuildArgs) -> Option<Value> {
    if args.start_from_image {
        return Some(json!("image"));
    }
    let line = args.start.as_ref()?;
    let mut start = json!({"argv": ["/bin/sh", "-c", line]});
    if let Some(port) = args.ready_port {
        start["ready"] = json!({ "port": port });
    }
    Some(start)
}
