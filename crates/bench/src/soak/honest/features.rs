//! What a sandbox is used for on the native API.

use reqwest::Method;
use serde_json::json;

use super::native::{FILE, Sandbox};
use crate::soak::caller::Told;
use crate::soak::random::Random;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Feature {
    Files,
    Port,
    Pause,
    Stop,
    Fork,
    Snapshot,
    Volume,
    Artifact,
    Network,
    Secret,
    Background,
}

pub(super) const ALL: [Feature; 11] = [
    Feature::Files,
    Feature::Port,
    Feature::Pause,
    Feature::Stop,
    Feature::Fork,
    Feature::Snapshot,
    Feature::Volume,
    Feature::Artifact,
    Feature::Network,
    Feature::Secret,
    Feature::Background,
];

/// Answers on a port with what it was told on its command line.
/// Shares its port: a command that was started twice, because nobody heard that it was, runs twice.
const SERVE: &str = "import http.server,sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(s):
        b=sys.argv[1].encode(); s.send_response(200); s.send_header('content-length',str(len(b))); s.end_headers(); s.wfile.write(b)
    def log_message(s,*a): pass
http.server.HTTPServer.allow_reuse_port=True
http.server.HTTPServer(('127.0.0.1',8000),H).serve_forever()";

impl Feature {
    pub(super) async fn show(self, sandbox: &Sandbox<'_>, random: &mut Random) -> Told<()> {
        match self {
            Self::Files => files(sandbox, random).await,
            Self::Port => port(sandbox).await,
            Self::Pause => pause(sandbox, random).await,
            Self::Stop => rest(sandbox, "stop", "start").await,
            Self::Fork => fork(sandbox).await,
            Self::Snapshot => snapshot(sandbox, random).await,
            Self::Volume => volume(sandbox, random).await,
            Self::Artifact => artifact(sandbox, random).await,
            Self::Network => network(sandbox).await,
            Self::Secret => secret(sandbox, random).await,
            Self::Background => background(sandbox).await,
        }
    }
}

async fn files(sandbox: &Sandbox<'_>, random: &mut Random) -> Told<()> {
    let caller = sandbox.caller;
    let dir = format!("/home/user/{}-{}", caller.canary(), random.word());
    let request = caller.post(&sandbox.path("/files/mkdir"), &json!({"path": dir}));
    caller.ask("files", request, &[409]).await?;
    let length = random.index(200_000);
    let content = random.bytes(length);
    sandbox.write(&format!("{dir}/data"), content.clone()).await?;
    let listed = caller
        .get(&sandbox.path("/files"))
        .query(&[("path", dir.as_str())]);
    let listed = caller.ask("files", listed, &[]).await?;
    if !listed.text().contains("data") {
        return Err(caller.wrong("files", format!("a file is not listed: {}", listed.text())));
    }
    if sandbox.read(&format!("{dir}/data")).await? != content {
        return Err(caller.wrong("files", "a file came back different"));
    }
    let archive = caller
        .get(&sandbox.path("/files/tar"))
        .query(&[("path", dir.as_str())]);
    caller.ask("files", archive, &[]).await?;
    let body = json!({"path": dir, "recursive": true});
    let request = caller.post(&sandbox.path("/files/remove"), &body);
    caller.ask("files", request, &[404]).await.map(drop)
}

async fn port(sandbox: &Sandbox<'_>) -> Told<()> {
    let caller = sandbox.caller;
    let body = json!({"argv": ["python3", "-c", SERVE, caller.canary()], "background": true});
    let request = caller.post(&sandbox.path("/exec"), &body);
    let started = caller.ask("exec", request, &[]).await?.json();
    let access = caller.ask("ports", caller.get(&sandbox.path("/ports/8000")), &[]);
    let access = access.await?.json();
    let host = access["url"].as_str().unwrap_or_default();
    let host = host.trim_start_matches("http://").to_owned();
    let token = access["token"].as_str().unwrap_or_default().to_owned();
    caller
        .world
        .board
        .tell("port token", caller.project.index, &token);
    sandbox
        .until("ports", "the port answers", || {
            Box::pin(async {
                let request = caller
                    .bare(Method::GET, "/")
                    .header("host", &host)
                    .header("x-atoll-token", &token);
                let answer = caller.attempt("ports", request).await;
                let answer = answer.filter(|answer| answer.status == 200);
                Ok(answer.filter(|answer| answer.text() == caller.canary()).map(drop))
            })
        })
        .await?;
    let request = caller
        .bare(Method::GET, "/")
        .header("host", &host)
        .header("x-atoll-token", &token);
    caller.ask("port", request, &[]).await?;
    let command = started["command"].as_str().unwrap_or_default();
    let path = sandbox.path(&format!("/commands/{command}/signal"));
    let request = caller.post(&path, &json!({"signal": 9}));
    caller.ask("signal", request, &[404, 409]).await.map(drop)
}

/// To rest and back.
async fn rest(sandbox: &Sandbox<'_>, down: &'static str, up: &'static str) -> Told<()> {
    let caller = sandbox.caller;
    let request = caller.post(&sandbox.path(&format!("/{down}")), &json!({}));
    caller.ask(down, request, &[409]).await?;
    let request = caller.post(&sandbox.path(&format!("/{up}")), &json!({}));
    caller.ask(up, request, &[409]).await?;
    sandbox.has_its_file().await
}

async fn pause(sandbox: &Sandbox<'_>, random: &mut Random) -> Told<()> {
    if random.chance(3) {
        let kind = json!({"kind": "filesystem"});
        let request = sandbox.caller.post(&sandbox.path("/pause"), &kind);
        sandbox.caller.ask("pause", request, &[409]).await?;
        let request = sandbox.caller.post(&sandbox.path("/resume"), &json!({}));
        sandbox.caller.ask("resume", request, &[409]).await?;
        return sandbox.has_its_file().await;
    }
    rest(sandbox, "pause", "resume").await
}

async fn fork(sandbox: &Sandbox<'_>) -> Told<()> {
    let caller = sandbox.caller;
    let tiers = caller
        .ask("inspect", caller.get(&sandbox.path("")), &[])
        .await?
        .json();
    let kind = match tiers["isolation"].as_str() {
        Some("gvisor") => "memory",
        _ => "filesystem",
    };
    let request = caller.post(&sandbox.path("/fork"), &json!({"count": 1, "kind": kind}));
    let copies = caller.ask("fork", request, &[]).await?.json();
    let Some(id) = copies["items"][0]["id"].as_str() else {
        return Err(caller.wrong("fork", format!("no copy: {copies}")));
    };
    let copy = sandbox.like(id);
    let told = async {
        copy.has_its_file().await?;
        copy.says_its_word().await
    };
    let told = told.await;
    copy.end().await?;
    told
}

async fn snapshot(sandbox: &Sandbox<'_>, random: &mut Random) -> Told<()> {
    let caller = sandbox.caller;
    let name = format!("{}-{}", caller.canary(), random.word());
    let mut body = json!({"name": name});
    if random.chance(2) {
        body["kind"] = "filesystem".into();
    }
    let request = caller
        .post(&sandbox.path("/snapshots"), &body)
        .header("idempotency-key", random.word());
    let taken = caller.ask("snapshot", request, &[]).await?.json();
    let id = taken["id"].as_str().unwrap_or_default().to_owned();
    caller.world.board.tell("snapshot", caller.project.index, &id);
    let body = json!({"template": id, "timeout_ms": super::native::LIFETIME_MILLIS});
    let request = caller
        .post("/v1/sandboxes", &body)
        .header("idempotency-key", random.word());
    let made = caller.ask("create from snapshot", request, &[]).await?.json();
    let copy = sandbox.like(made["id"].as_str().unwrap_or_default());
    let told = copy.has_its_file().await;
    copy.end().await?;
    let request = caller.delete(&format!("/v1/snapshots/{id}"));
    caller.ask("snapshot", request, &[404]).await?;
    told
}

async fn volume(sandbox: &Sandbox<'_>, random: &mut Random) -> Told<()> {
    let caller = sandbox.caller;
    let name = format!("v{}", random.word());
    let body = json!({"name": name, "size_bytes": 32 << 20});
    caller
        .ask("volume", caller.post("/v1/volumes", &body), &[409])
        .await?;
    caller.world.board.tell("volume", caller.project.index, &name);
    let mounts = json!({"volumes": [{"volume": name, "path": "/data"}]});
    let made = Sandbox::create(caller, random, &mounts).await;
    let told = match made {
        Ok(other) => {
            let told = async {
                // As root: a volume belongs to root until somebody says otherwise.
                let body =
                    json!({"cmd": "printf %s \"$CANARY\" > /data/word && cat /data/word", "user": "root"});
                let request = caller.post(&other.path("/exec"), &body);
                let ran = caller.ask("exec", request, &[]).await?.json();
                match ran["stdout"].as_str() == Some(caller.canary()) {
                    true => Ok(()),
                    false => Err(caller.wrong("volume", format!("{ran}"))),
                }
            };
            let told = told.await;
            other.end().await?;
            told
        }
        Err(end) => Err(end),
    };
    let content = caller.get(&format!("/v1/volumes/{name}/content"));
    if told.is_ok() {
        caller.ask("volume", content, &[]).await?;
    }
    // It is free when the instance that had it is gone.
    sandbox
        .until("volume", "a volume can be deleted", || {
            Box::pin(async {
                let request = caller.delete(&format!("/v1/volumes/{name}"));
                let answer = caller.attempt("volume", request).await;
                Ok(answer
                    .filter(|answer| answer.is_success() || answer.status == 404)
                    .map(drop))
            })
        })
        .await?;
    told
}

async fn artifact(sandbox: &Sandbox<'_>, random: &mut Random) -> Told<()> {
    let caller = sandbox.caller;
    let name = format!("{}-{}", caller.canary(), random.word());
    let body = json!({"name": name, "path": FILE});
    let request = caller.post(&sandbox.path("/artifacts"), &body);
    let saved = caller.ask("artifact", request, &[409]).await?.json();
    let id = saved["id"].as_str().unwrap_or_default();
    caller.world.board.tell("artifact", caller.project.index, id);
    let content = caller.get(&format!("/v1/artifacts/{name}/content"));
    let content = caller.ask("artifact", content, &[]).await?;
    if content.body != sandbox.file {
        return Err(caller.wrong("artifact", "an artifact came back different"));
    }
    // A request that was cut may have saved it twice under one name.
    for _ in 0..4 {
        let request = caller.delete(&format!("/v1/artifacts/{name}"));
        match caller.attempt("artifact", request).await {
            Some(answer) if answer.status == 404 => return Ok(()),
            _ => {}
        }
    }
    Ok(())
}

async fn network(sandbox: &Sandbox<'_>) -> Told<()> {
    let caller = sandbox.caller;
    let policy = json!({"rules": [{"name": "docs", "action": "allow", "to": "docs.example.org"}]});
    let request = caller.put(&sandbox.path("/network"), &json!({"policy": policy}));
    let set = caller.ask("network", request, &[]).await?;
    if !set.text().contains("docs.example.org") {
        return Err(caller.wrong("network", format!("the policy was not set: {}", set.text())));
    }
    let denied = sandbox
        .exec("python3 -c \"import socket\ntry: socket.create_connection(('evil.example.org',80),3); print('reached')\nexcept OSError: print('refused')\"")
        .await?;
    if denied.trim() != "refused" {
        return Err(caller.wrong("network", "a host that no rule allows was reached"));
    }
    let request = caller.get(&sandbox.path("/network/log"));
    caller.ask("network", request, &[]).await.map(drop)
}

async fn secret(sandbox: &Sandbox<'_>, random: &mut Random) -> Told<()> {
    let caller = sandbox.caller;
    let name = format!("s{}", random.word());
    let body = json!({"value": caller.canary(), "hosts": ["api.example.org"], "inject": "bearer"});
    let path = format!("/v1/secrets/{name}");
    caller.ask("secret", caller.put(&path, &body), &[]).await?;
    caller.world.board.tell("secret", caller.project.index, &name);
    let shown = caller.ask("secret", caller.get(&path), &[]).await?;
    if shown.text().contains(caller.canary()) {
        return Err(caller.wrong("secret", "the value of a secret was shown"));
    }
    let with = json!({"secrets": [{"secret": name}]});
    let other = Sandbox::create(caller, random, &with).await?;
    let told = other.says_its_word().await;
    other.end().await?;
    sandbox
        .until("secret", "a secret can be deleted", || {
            Box::pin(async {
                let answer = caller.attempt("secret", caller.delete(&path)).await;
                Ok(answer
                    .filter(|answer| answer.is_success() || answer.status == 404)
                    .map(drop))
            })
        })
        .await?;
    told
}

/// A command that goes on while nobody looks, and its output.
async fn background(sandbox: &Sandbox<'_>) -> Told<()> {
    let caller = sandbox.caller;
    let body = json!({"cmd": "echo begun; sleep 0.3; printf %s \"$CANARY\"", "background": true});
    let started = caller
        .ask("exec", caller.post(&sandbox.path("/exec"), &body), &[])
        .await?
        .json();
    let command = started["command"].as_str().unwrap_or_default().to_owned();
    caller.world.board.tell("command", caller.project.index, &command);
    let path = sandbox.path("/commands");
    sandbox
        .until("commands", "a command ends", || {
            Box::pin(async {
                let all = caller.ask("commands", caller.get(&path), &[]).await?.json();
                let mut all = all["items"].as_array().into_iter().flatten();
                let ends = all.any(|one| one["id"] == json!(command) && one["state"] != json!("running"));
                Ok(ends.then_some(()))
            })
        })
        .await
}
