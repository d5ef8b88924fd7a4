//! Stories on the native API: a sandbox, what is done with it, and its end.

use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::features::ALL;
use crate::soak::caller::{Caller, Told};
use crate::soak::random::Random;

/// Longer than any clock jumps: a sandbox must not end before its story.
pub(in crate::soak) const LIFETIME_MILLIS: u64 = 12 * 3600 * 1000;

/// A sandbox of a story, with a file whose content is known.
pub(super) struct Sandbox<'a> {
    pub(super) caller: &'a Caller,
    pub(super) id: String,
    pub(super) file: Vec<u8>,
}

/// Where every sandbox keeps its file.
pub(super) const FILE: &str = "/home/user/kept";

pub(super) async fn story(caller: &Caller, random: &mut Random) -> Told<()> {
    let sandbox = Sandbox::create(caller, random, &json!({})).await?;
    let told = sandbox.live(random).await;
    sandbox.end().await?;
    told
}

/// One sandbox with all that there is.
pub(super) async fn everything(caller: &Caller) -> Told<()> {
    let mut random = caller.random("everything");
    let sandbox = Sandbox::create(caller, &mut random, &json!({})).await?;
    for feature in ALL {
        feature.show(&sandbox, &mut random).await?;
    }
    sandbox.end().await
}

impl<'a> Sandbox<'a> {
    /// Makes one with words of the project in its environment and labels, and in a file.
    pub(super) async fn create(caller: &'a Caller, random: &mut Random, more: &Value) -> Told<Self> {
        let canary = caller.canary();
        let mut body = json!({
            "timeout_ms": LIFETIME_MILLIS,
            "resources": {"memory_bytes": 256 << 20, "cpu_millis": 1000},
            "env": {"CANARY": canary}, "labels": {"soak": canary},
        });
        for (name, value) in more.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        let request = caller
            .post("/v1/sandboxes", &body)
            .header("idempotency-key", random.word());
        let made = caller.ask("create", request, &[]).await?.json();
        let id = made["id"].as_str().unwrap_or_default().to_owned();
        caller.world.board.tell("sandbox", caller.project.index, &id);
        let size = 64 + random.index(32 * 1024);
        let mut file = random.bytes(size);
        file.extend_from_slice(canary.as_bytes());
        let sandbox = Self { caller, id, file };
        sandbox.write(FILE, sandbox.file.clone()).await?;
        Ok(sandbox)
    }

    async fn live(&self, random: &mut Random) -> Told<()> {
        self.says_its_word().await?;
        for _ in 0..1 + random.below(3) {
            if self.caller.world.is_over() {
                break;
            }
            if let Some(feature) = random.one(&ALL) {
                feature.show(self, random).await?;
            }
        }
        self.has_its_file().await
    }

    pub(super) fn path(&self, rest: &str) -> String {
        format!("/v1/sandboxes/{}{rest}", self.id)
    }

    /// A command knows what the sandbox was created with.
    pub(super) async fn says_its_word(&self) -> Told<()> {
        let said = self.exec("printf %s \"$CANARY\"").await?;
        match said == self.caller.canary() {
            true => Ok(()),
            false => Err(self
                .caller
                .wrong("exec", format!("said {said:?} instead of its word"))),
        }
    }

    pub(super) async fn exec(&self, line: &str) -> Told<String> {
        let body = json!({"cmd": line, "timeout_ms": 50_000});
        let request = self.caller.post(&self.path("/exec"), &body);
        let ran = self.caller.ask("exec", request, &[]).await?.json();
        match ran["exit_code"] == json!(0) {
            true => Ok(ran["stdout"].as_str().unwrap_or_default().to_owned()),
            false => Err(self.caller.wrong("exec", format!("{line}: {ran}"))),
        }
    }

    pub(super) async fn write(&self, path: &str, content: Vec<u8>) -> Told<()> {
        let request = self
            .caller
            .request(reqwest::Method::PUT, &self.path("/files/content"))
            .query(&[("path", path)])
            .body(content);
        self.caller.ask("write file", request, &[]).await.map(drop)
    }

    pub(super) async fn read(&self, path: &str) -> Told<Vec<u8>> {
        let request = self
            .caller
            .get(&self.path("/files/content"))
            .query(&[("path", path)]);
        let answer = self.caller.ask("read file", request, &[]).await?;
        Ok(answer.body.to_vec())
    }

    pub(super) async fn has_its_file(&self) -> Told<()> {
        let found = self.read(FILE).await?;
        match found == self.file {
            true => Ok(()),
            false => Err(self.caller.wrong(
                "read file",
                format!(
                    "{} has {} bytes in {FILE} that are not the {} it was given",
                    self.id,
                    found.len(),
                    self.file.len()
                ),
            )),
        }
    }

    /// A copy or a successor that must have the same file.
    pub(super) fn like(&self, id: &str) -> Sandbox<'_> {
        self.caller
            .world
            .board
            .tell("sandbox", self.caller.project.index, id);
        Sandbox {
            caller: self.caller,
            id: id.to_owned(),
            file: self.file.clone(),
        }
    }

    pub(super) async fn end(self) -> Told<()> {
        // A story that failed ends its sandbox all the same.
        let request = self.caller.delete(&self.path(""));
        self.caller.ask("kill", request, &[404, 409, 410]).await.map(drop)
    }

    /// Asks until something is so, for a while.
    pub(super) async fn until<'f, T>(
        &self,
        kind: &'static str,
        what: &str,
        look: impl Fn() -> BoxFuture<'f, Told<Option<T>>>,
    ) -> Told<T> {
        for _ in 0..300 {
            if let Some(found) = look().await? {
                return Ok(found);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Err(self.caller.wrong(kind, format!("{what}: not within 30 s")))
    }
}
