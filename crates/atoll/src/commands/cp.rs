//! `atoll cp`: files and directories in and out, with the manners of cp.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use atoll_client::output::{Doing, Error, Output, Result, byte_bar};
use atoll_client::{Client, text, transfer};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use super::{resolve, split_location};
use crate::args::{CpArgs, Global};

pub(crate) async fn cp(global: &Global, output: Output, args: CpArgs) -> Result<()> {
    let client = global.client()?;
    match (split_location(&args.from), split_location(&args.to)) {
        (None, Some((sandbox, path))) => {
            let there = There::new(&client, sandbox, path, args.user).await?;
            upload(output, &args.from, there).await
        }
        (Some((sandbox, path)), None) => {
            let there = There::new(&client, sandbox, path, args.user).await?;
            download(output, there, Path::new(&args.to)).await
        }
        (None, None) => {
            Err(Error::new("neither side is in a sandbox").hint("write one of them as SANDBOX:PATH"))
        }
        (Some(_), Some(_)) => Err(Error::new("both sides are in a sandbox")
            .hint("copy to this machine first, or pipe: atoll cp A:x - | atoll cp - B:x")),
    }
}

/// A path in a sandbox.
#[derive(Debug)]
struct There<'a> {
    client: &'a Client,
    sandbox: String,
    path: String,
    user: Option<String>,
}

impl<'a> There<'a> {
    async fn new(client: &'a Client, sandbox: &str, path: &str, user: Option<String>) -> Result<Self> {
        let sandbox = resolve(client, sandbox).await?;
        let path = if path.is_empty() {
            ".".to_owned()
        } else {
            path.to_owned()
        };
        Ok(Self {
            client,
            sandbox,
            path,
            user,
        })
    }

    fn request(&self, method: Method, route: &str, path: &str) -> RequestBuilder {
        let request = self
            .client
            .request(method, &format!("/v1/sandboxes/{}/files/{route}", self.sandbox));
        let request = request.query(&[("path", path)]);
        match &self.user {
            Some(user) => request.query(&[("user", user)]),
            None => request,
        }
    }

    /// What is there, and where: a symlink counts as what it leads to, under its own name. One that leads nowhere is itself.
    /// `None`: nothing.
    async fn stat(&self) -> Result<Option<Found>> {
        let path = self.path.trim_end_matches('/');
        let mut at = if path.is_empty() { "/" } else { path }.to_owned();
        let link = match self.client.json(self.request(Method::GET, "stat", &at)).await {
            Ok(found) => found,
            Err(error) if error.is(atoll_types::Code::NotFoundInSandbox) => return Ok(None),
            Err(error) => return Err(error),
        };
        let own = Found {
            view: link.clone(),
            at: at.clone(),
            behind_a_link: false,
        };
        let mut found = link;
        for links in 0..MOST_LINKS {
            let Some(target) = found["target"].as_str().filter(|_| found["kind"] == "symlink") else {
                found["path"] = own.view["path"].clone();
                return Ok(Some(Found {
                    view: found,
                    at,
                    behind_a_link: links > 0,
                }));
            };
            at = led_to(&at, target);
            match self.client.json(self.request(Method::GET, "stat", &at)).await {
                Ok(next) => found = next,
                Err(_) => break,
            }
        }
        Ok(Some(own))
    }
}

/// What a path of a sandbox stands for.
#[derive(Debug)]
struct Found {
    /// As the API shows it, but for the path, which is what was asked for.
    view: Value,
    /// Where it is.
    at: String,
    behind_a_link: bool,
}

/// As many as Linux follows.
const MOST_LINKS: usize = 40;

/// Where a link at `path` leads.
fn led_to(path: &str, target: &str) -> String {
    match path.rsplit_once('/') {
        _ if target.starts_with('/') => target.to_owned(),
        Some((parent, _)) => format!("{parent}/{target}"),
        None => target.to_owned(),
    }
}

fn is_directory(found: Option<&Value>) -> bool {
    found.is_some_and(|found| found["kind"] == "directory")
}

async fn upload(output: Output, from: &str, there: There<'_>) -> Result<()> {
    let found = there.stat().await?.map(|found| found.view);
    let into = is_directory(found.as_ref()) || there.path.ends_with('/') || there.path == ".";
    if from == "-" {
        if into {
            return Err(Error::new("standard input has no name to be put under").hint("write the whole path"));
        }
        let bar = byte_bar(output, "copying", None);
        let request = there.request(Method::PUT, "content", &there.path);
        let request = request.body(transfer::body_from(std::io::stdin(), bar.clone()));
        let written = there.client.json(request).await?;
        bar.finish_and_clear();
        return report(output, &there, &written);
    }

    let local = Path::new(from);
    let metadata = std::fs::metadata(local).doing(format_args!("cannot read {from}"))?;
    let name = own_name(local)?;
    if metadata.is_dir() {
        let target = there.path.trim_end_matches('/').to_owned();
        let target = if target.is_empty() { "/".to_owned() } else { target };
        if found.is_some() && !into {
            return Err(Error::new(format!("{} is not a directory", there.path)));
        }
        // Into an existing directory under its own name; else it becomes the target.
        let inside = if into { name } else { String::new() };
        let bar = byte_bar(output, from, None);
        let request = there
            .request(Method::PUT, "tar", &target)
            .header("content-type", "application/x-tar")
            .body(transfer::body_from_tar(local.to_owned(), inside, bar.clone()));
        there.client.send(request).await?;
        bar.finish_and_clear();
        return report(output, &there, &json!({"path": target}));
    }

    let target = if into {
        join(&there.path, &name)
    } else {
        there.path.clone()
    };
    let bar = byte_bar(output, &name, Some(metadata.len()));
    let file = std::fs::File::open(local).doing(format_args!("cannot read {from}"))?;
    let mode = format!("{:04o}", metadata.permissions().mode() & 0o777);
    let request = there
        .request(Method::PUT, "content", &target)
        .query(&[("mode", mode)])
        .header("content-length", metadata.len())
        .body(transfer::body_from(file, bar.clone()));
    let written = there.client.json(request).await?;
    bar.finish_and_clear();
    report(output, &there, &written)
}

async fn download(output: Output, there: There<'_>, to: &Path) -> Result<()> {
    let Found {
        view: found,
        at,
        behind_a_link,
    } = there
        .stat()
        .await?
        .ok_or_else(|| Error::new(format!("there is no {} in {}", there.path, there.sandbox)))?;
    let name = own_name(Path::new(&text(&found, "path"))).unwrap_or_else(|_| there.sandbox.clone());
    let to_stdout = to == Path::new("-");
    if found["kind"] == "directory" {
        let bar = byte_bar(output, &name, None);
        let response = there.client.send(there.request(Method::GET, "tar", &at)).await?;
        let mut target = to.to_owned();
        if to_stdout {
            transfer::save(response, to, &bar).await?;
        } else if to.is_dir() {
            // What was found behind a link is called like the link.
            transfer::unpack(response, to, behind_a_link.then(|| name.clone()), &bar).await?;
            target = to.join(&name);
        } else {
            let parent = to
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty())
                .unwrap_or(Path::new("."));
            transfer::unpack(response, parent, Some(own_name(to)?), &bar).await?;
        }
        bar.finish_and_clear();
        if !to_stdout {
            output.json(&json!({"path": target}));
        }
        return Ok(());
    }
    let target: PathBuf = if !to_stdout && (to.is_dir() || to.to_string_lossy().ends_with('/')) {
        to.join(&name)
    } else {
        to.to_owned()
    };
    let bar = byte_bar(output, &name, found["size_bytes"].as_u64());
    let response = there
        .client
        .send(there.request(Method::GET, "content", &there.path))
        .await?;
    transfer::save(response, &target, &bar).await?;
    bar.finish_and_clear();
    if to_stdout {
        return Ok(());
    }
    // A link's mode says nothing about what it leads to.
    if found["kind"] != "symlink"
        && let Ok(mode) = u32::from_str_radix(&text(&found, "mode"), 8)
    {
        // Never setuid: what comes out of a sandbox is not trusted.
        let permissions = std::fs::Permissions::from_mode(mode & 0o777);
        std::fs::set_permissions(&target, permissions)
            .doing(format_args!("cannot set the mode of {}", target.display()))?;
    }
    output.json(&json!({"path": target}));
    Ok(())
}

fn report(output: Output, there: &There<'_>, written: &Value) -> Result<()> {
    output.json(&json!({"sandbox": there.sandbox, "path": written["path"]}));
    Ok(())
}

fn join(directory: &str, name: &str) -> String {
    format!("{}/{name}", directory.trim_end_matches('/'))
}

/// The last part of a path, also of `.` and `dir/..`.
fn own_name(path: &Path) -> Result<String> {
    let named = match path.file_name() {
        Some(name) => Some(name.to_owned()),
        None => path
            .canonicalize()
            .ok()
            .and_then(|path| path.file_name().map(ToOwned::to_owned)),
    };
    named
        .map(|name| name.to_string_lossy().into_owned())
        .ok_or_else(|| Error::new(format!("{} has no name of its own", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_from_where_they_are() {
        for (path, target, there) in [
            ("/tmp/link", "file", "/tmp/file"),
            ("/tmp/link", "../etc/a", "/tmp/../etc/a"),
            ("dir/link", "/etc/a", "/etc/a"),
            ("link", "file", "file"),
            ("/link", "file", "/file"),
        ] {
            assert_eq!(led_to(path, target), there);
        }
    }
}
