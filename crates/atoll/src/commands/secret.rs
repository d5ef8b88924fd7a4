//! Secrets: set, list, inspect, rotate, delete. A value goes from a file, a pipe or a terminal to the server and is never
//! shown, here or there.

use std::io::{self, IsTerminal, Read};
use std::path::Path;

use atoll_client::output::{Doing, Error, Output, Result};
use atoll_client::{Client, segment, text};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::termios::{self, LocalModes, OptionalActions, Termios};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::relative;
use crate::args::{Global, SecretCommand, SecretRotateArgs, SecretSetArgs, ShapeArgs, ValueArgs};

/// More than any header takes.
const MOST: u64 = 256 * 1024;

pub(crate) async fn run(global: &Global, output: Output, command: SecretCommand) -> Result<()> {
    let client = &global.client()?;
    match command {
        SecretCommand::Set(args) => set(client, output, args).await?,
        SecretCommand::List => list(client, output).await?,
        SecretCommand::Inspect { secret } => {
            let secret = client.get(&path(&secret)).await?;
            // It is for people as it is for programs.
            Output { json: true }.json(&secret);
        }
        SecretCommand::Rotate(args) => rotate(client, output, args).await?,
        SecretCommand::Delete { secret } => {
            client.delete(&path(&secret)).await?;
            output.json(&json!({"deleted": secret}));
            output.line(format_args!("{secret} is deleted"));
        }
    }
    Ok(())
}

fn path(name: &str) -> String {
    format!("/v1/secrets/{}", segment(name))
}

async fn set(client: &Client, output: Output, args: SecretSetArgs) -> Result<()> {
    let mut body = binding(&args);
    let name = args.name;
    add_value(output, &name, args.value, &mut body).await?;
    let secret = client.put(&path(&name), &body).await?;
    output.json(&secret);
    output.line(format_args!(
        "{name} is kept; it goes to {}",
        words(&secret, "hosts")
    ));
    Ok(())
}

async fn rotate(client: &Client, output: Output, args: SecretRotateArgs) -> Result<()> {
    let mut body = json!({});
    add_value(output, &args.name, args.value, &mut body).await?;
    let secret = client
        .post(&format!("{}/rotate", path(&args.name)), &body)
        .await?;
    output.json(&secret);
    output.line(format_args!("{} has its new value", args.name));
    Ok(())
}

/// All of a request but the value.
fn binding(args: &SecretSetArgs) -> Value {
    json!({
        "hosts": args.host,
        "ports": args.port,
        "methods": args.method,
        "paths": args.path,
        "plain_http": args.plain_http,
        "redact": args.redact,
        "inject": shape(&args.shape),
    })
}

fn shape(shape: &ShapeArgs) -> Value {
    let ShapeArgs {
        header,
        bearer,
        basic,
        query,
        placeholder: _,
    } = shape;
    match (header, bearer, basic, query) {
        (Some(name), ..) => json!({"header": {"name": name}}),
        (_, true, ..) => json!("bearer"),
        (_, _, Some(username), _) => json!({"basic": {"username": username}}),
        (_, _, _, Some(name)) => json!({"query": {"name": name}}),
        // One of them is given: clap sees to it.
        _ => json!("placeholder"),
    }
}

async fn add_value(output: Output, name: &str, args: ValueArgs, body: &mut Value) -> Result<()> {
    if let Some(millis) = args.expires {
        body["expires_at"] = json!(super::after(millis)?);
    }
    let value = read_value(output, name, args.file.as_deref()).await?;
    match std::str::from_utf8(&value) {
        Ok(text) => body["value"] = json!(text),
        Err(_) => body["value_base64"] = json!(STANDARD.encode(&*value)),
    }
    Ok(())
}

async fn read_value(output: Output, name: &str, file: Option<&Path>) -> Result<Zeroizing<Vec<u8>>> {
    let value = match file {
        Some(file) => {
            let reading = || format!("cannot read {}", file.display());
            read_to_end(std::fs::File::open(file).doing(reading())?).doing(reading())?
        }
        None if io::stdin().is_terminal() => ask(output, name).await?,
        None => read_to_end(io::stdin()).doing("cannot read the value from standard input")?,
    };
    if value.len() as u64 > MOST {
        return Err(Error::new(format!("the value is larger than {MOST} bytes")));
    }
    let value = trimmed(value);
    if value.is_empty() {
        return Err(Error::new("the value is empty")
            .hint("give it on standard input or with --file; it is never an argument"));
    }
    Ok(value)
}

/// A little more than may be, to tell it from what may.
fn read_to_end(from: impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
    // As large as it can get: growing would leave copies behind.
    let mut value = Zeroizing::new(Vec::with_capacity(MOST as usize + 2));
    from.take(MOST + 1).read_to_end(&mut value)?;
    Ok(value)
}

/// Without the line break that `echo` and editors put at the end.
fn trimmed(mut value: Zeroizing<Vec<u8>>) -> Zeroizing<Vec<u8>> {
    if value.last() == Some(&b'\n') {
        value.pop();
        if value.last() == Some(&b'\r') {
            value.pop();
        }
    }
    value
}

/// One line from the terminal, which does not show it.
async fn ask(output: Output, name: &str) -> Result<Zeroizing<Vec<u8>>> {
    let silent = Silent::start()?;
    atoll_client::output::prompt(format_args!("Value of {name}: "));
    let line = tokio::task::spawn_blocking(|| {
        let mut line = Zeroizing::new(String::with_capacity(MOST as usize));
        io::stdin().read_line(&mut line)?;
        Ok(Zeroizing::new(std::mem::take(&mut *line).into_bytes()))
    });
    let line: io::Result<_> = tokio::select! {
        line = line => line.doing("the terminal could not be read")?,
        _ = tokio::signal::ctrl_c() => {
            drop(silent);
            return Err(Error::new("interrupted; nothing was changed"));
        }
    };
    drop(silent);
    output.note("");
    line.doing("cannot read the terminal")
}

/// While this lives the terminal shows nothing of what is typed.
struct Silent {
    before: Termios,
}

impl Silent {
    fn start() -> Result<Self> {
        let before = termios::tcgetattr(io::stdin()).doing("cannot read the state of the terminal")?;
        let mut silent = before.clone();
        silent.local_modes.remove(LocalModes::ECHO);
        termios::tcsetattr(io::stdin(), OptionalActions::Flush, &silent)
            .doing("cannot change the terminal")?;
        Ok(Self { before })
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        let _gone = termios::tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

async fn list(client: &Client, output: Output) -> Result<()> {
    let secrets = client.list("/v1/secrets", &[]).await?;
    let rows: Vec<_> = secrets
        .iter()
        .map(|secret| {
            let changed = if secret["rotated_at"].is_null() {
                "created_at"
            } else {
                "rotated_at"
            };
            [
                text(secret, "name"),
                words(secret, "hosts"),
                describe_shape(&secret["inject"]),
                relative(secret, changed),
                relative(secret, "expires_at"),
            ]
        })
        .collect();
    output.table(
        ["NAME", "HOSTS", "AS", "SET", "EXPIRES"],
        &rows,
        "no secrets; `atoll secret set NAME --host HOST --bearer` keeps one",
    );
    output.json(&Value::Array(secrets));
    Ok(())
}

fn words(value: &Value, field: &str) -> String {
    let items = value[field].as_array().into_iter().flatten();
    items.filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
}

/// `header x-api-key`, `bearer`, `basic git`, …
fn describe_shape(inject: &Value) -> String {
    let named = inject.as_object().and_then(|shapes| shapes.iter().next());
    match named {
        Some((kind, of)) => {
            let detail = of["name"].as_str().or(of["username"].as_str());
            format!("{kind} {}", detail.unwrap_or_default())
        }
        None => inject.as_str().unwrap_or_default().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn set(options: &[&str]) -> Value {
        let words = ["atoll", "secret", "set", "github"]
            .into_iter()
            .chain(options.iter().copied());
        match Cli::parse_from(words).command {
            Command::Secret(SecretCommand::Set(args)) => binding(&args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_become_a_binding() {
        insta::assert_snapshot!(
            set(&["--host", "a.example", "--host", "*.b.example", "--port", "8443", "--method", "GET", "--path", "/v1/**",
                "--header", "x-api-key", "--redact"]),
            @r#"{"hosts":["a.example","*.b.example"],"inject":{"header":{"name":"x-api-key"}},"methods":["GET"],"paths":["/v1/**"],"plain_http":false,"ports":[8443],"redact":true}"#
        );
        for (options, kind) in [
            (&["--bearer"][..], json!("bearer")),
            (&["--basic", "git"][..], json!({"basic": {"username": "git"}})),
            (&["--query", "key"][..], json!({"query": {"name": "key"}})),
            (&["--placeholder"][..], json!("placeholder")),
        ] {
            let options = [&["--host", "a.example"], options].concat();
            assert_eq!(set(&options)["inject"], kind);
        }
    }

    #[test]
    fn shapes_read_well() {
        assert_eq!(describe_shape(&json!("bearer")), "bearer");
        assert_eq!(
            describe_shape(&json!({"basic": {"username": "git"}})),
            "basic git"
        );
        assert_eq!(
            describe_shape(&json!({"header": {"name": "x-api-key"}})),
            "header x-api-key"
        );
    }

    #[test]
    fn hosts_and_exactly_one_shape_are_needed() {
        for options in [
            &["--bearer"][..],
            &["--host", "a.example"][..],
            &["--host", "a.example", "--bearer", "--placeholder"][..],
            // Whoever tries this has leaked it to the list of processes; it must not look as if it worked.
            &["--host", "a.example", "--bearer", "--value", "s3cr3t"][..],
            &["--host", "a.example", "--bearer", "s3cr3t"][..],
        ] {
            let words = ["atoll", "secret", "set", "github"]
                .into_iter()
                .chain(options.iter().copied());
            assert!(Cli::try_parse_from(words).is_err(), "{options:?}");
        }
    }

    #[tokio::test]
    async fn a_value_is_read_from_a_file_without_its_line_break() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("value");
        for (content, value) in [
            (&b"s3cr3t\n"[..], &b"s3cr3t"[..]),
            (b"s3cr3t\r\n", b"s3cr3t"),
            (b"two\n\n", b"two\n"),
            (b" s3cr3t ", b" s3cr3t "),
            (b"\xff\x00", b"\xff\x00"),
        ] {
            std::fs::write(&file, content).unwrap();
            let read = read_value(Output { json: true }, "x", Some(&file)).await.unwrap();
            assert_eq!(*read, value);
        }
        for content in [Vec::new(), b"\n".to_vec(), vec![b'x'; MOST as usize + 1]] {
            std::fs::write(&file, content).unwrap();
            assert!(read_value(Output { json: true }, "x", Some(&file)).await.is_err());
        }
    }

    #[tokio::test]
    async fn what_is_not_text_travels_exactly() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("value");
        std::fs::write(&file, b"\xff").unwrap();
        let args = ValueArgs {
            file: Some(file),
            expires: Some(3_600_000),
        };
        let mut body = json!({});
        add_value(Output { json: true }, "x", args, &mut body)
            .await
            .unwrap();
        assert_eq!(body["value_base64"], "/w==");
        assert!(body.get("value").is_none());
        let at: jiff::Timestamp = body["expires_at"].as_str().unwrap().parse().unwrap();
        let minutes = (at.as_millisecond() - jiff::Timestamp::now().as_millisecond()) / 60_000;
        assert!((58..=60).contains(&minutes), "{minutes}");
    }
}
