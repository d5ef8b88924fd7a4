//! Stories as E2B's SDKs tell them: REST for sandboxes, Connect for what is inside.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::soak::caller::{Caller, Told};
use crate::soak::random::Random;

/// Longer than any clock jumps; in seconds, as this wire has it.
const LIFETIME: u64 = 12 * 3600;
/// Where the agent of a sandbox is asked.
pub(in crate::soak) const ENVD: &str = "49983";

struct Sandbox<'a> {
    caller: &'a Caller,
    id: String,
    token: String,
}

pub(super) async fn story(caller: &Caller, random: &mut Random) -> Told<()> {
    let sandbox = Sandbox::create(caller, random).await?;
    let told = sandbox.live(random).await;
    let request = sandbox.rest(Method::DELETE, "");
    caller.ask("e2b kill", request, &[404]).await?;
    told
}

impl<'a> Sandbox<'a> {
    async fn create(caller: &'a Caller, random: &mut Random) -> Told<Self> {
        let canary = caller.canary();
        let body = json!({
            "templateID": "base", "timeout": LIFETIME, "secure": true, "allow_internet_access": false,
            "metadata": {"soak": canary}, "envVars": {"CANARY": canary},
        });
        let request = keyed(caller, Method::POST, "/sandboxes")
            .json(&body)
            .header("idempotency-key", random.word());
        let made = caller.ask("e2b create", request, &[]).await?.json();
        let text = |name: &str| made[name].as_str().unwrap_or_default().to_owned();
        let sandbox = Self {
            caller,
            id: text("sandboxID"),
            token: text("envdAccessToken"),
        };
        let id = format!("sbx_{}", sandbox.id);
        caller.world.board.tell("sandbox", caller.project.index, &id);
        Ok(sandbox)
    }

    fn rest(&self, method: Method, path: &str) -> RequestBuilder {
        keyed(self.caller, method, &format!("/sandboxes/{}{path}", self.id))
    }

    fn agent(&self, method: Method, path: &str) -> RequestBuilder {
        self.caller
            .bare(method, path)
            .header("e2b-sandbox-id", &self.id)
            .header("e2b-sandbox-port", ENVD)
            .header("x-access-token", &self.token)
            .basic_auth("user", Some(""))
    }

    async fn live(&self, random: &mut Random) -> Told<()> {
        let caller = self.caller;
        self.says_its_word().await?;
        let length = 16 + random.index(60_000);
        let content = random.bytes(length);
        let path = format!("/home/user/{}", caller.canary());
        let request = self
            .agent(Method::POST, "/files")
            .query(&[("path", &path)])
            .header("content-type", "application/octet-stream")
            .body(content.clone());
        caller.ask("e2b files", request, &[]).await?;
        if random.chance(2) {
            let listed = self
                .agent(Method::POST, "/filesystem.Filesystem/ListDir")
                .json(&json!({"path": "/home/user", "depth": 1}));
            caller.ask("e2b files", listed, &[]).await?;
        }
        if random.chance(3) {
            let request = self.rest(Method::POST, "/pause").json(&json!({}));
            caller.ask("e2b pause", request, &[409]).await?;
            let request = self
                .rest(Method::POST, "/connect")
                .json(&json!({"timeout": LIFETIME}));
            caller.ask("e2b connect", request, &[]).await?;
        }
        if random.chance(3) {
            caller.ask("e2b get", self.rest(Method::GET, ""), &[]).await?;
            caller
                .ask("e2b list", keyed(caller, Method::GET, "/v2/sandboxes"), &[])
                .await?;
            caller
                .ask("e2b metrics", self.rest(Method::GET, "/metrics"), &[])
                .await?;
        }
        let request = self.agent(Method::GET, "/files").query(&[("path", &path)]);
        let found = caller.ask("e2b files", request, &[]).await?;
        match found.body == content {
            true => Ok(()),
            false => Err(caller.wrong("e2b files", "a file came back different")),
        }
    }

    /// Runs a command as the SDK does: one framed message, answered with a stream of them.
    async fn says_its_word(&self) -> Told<()> {
        let caller = self.caller;
        let start = json!({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "printf %s \"$CANARY\""], "envs": {}}});
        let request = self
            .agent(Method::POST, "/process.Process/Start")
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1")
            .body(framed(&start));
        loop {
            let (epoch, full) = (caller.world.epoch(), caller.world.is_full());
            let Some(this) = request.try_clone() else {
                return Err(caller.wrong("e2b run", "the request cannot be repeated"));
            };
            let answer = caller.ask("e2b run", this, &[]).await?;
            let (said, error) = output(&answer.body);
            if said == caller.canary().as_bytes() {
                return Ok(());
            }
            // A stream that has begun says in its last message what became of it, and not by its status.
            let cut = caller.world.epoch() != epoch;
            let full = full || caller.world.is_full();
            if error.is_none() || !(cut || full) {
                let said = String::from_utf8_lossy(&said).into_owned();
                let end = error.unwrap_or_else(|| answer.text());
                return Err(caller.wrong("e2b run", format!("said {said:?} instead of its word: {end}")));
            }
            match cut {
                true => caller.world.tally.cut("e2b run"),
                false => caller.world.tally.full("e2b run"),
            }
            caller.world.rest(200).await;
        }
    }
}

/// With the project's key, as the SDKs send it.
pub(in crate::soak) fn keyed(caller: &Caller, method: Method, path: &str) -> RequestBuilder {
    let key = caller.project.key.clone();
    caller.bare(method, path).header("x-api-key", key)
}

/// One message of a stream.
pub(in crate::soak) fn framed(message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let mut frame = vec![0];
    frame.extend_from_slice(&u32::try_from(text.len()).unwrap_or_default().to_be_bytes());
    frame.extend_from_slice(text.as_bytes());
    frame
}

/// What a process wrote, from the messages of its stream; and the error that the stream ended with.
fn output(mut body: &[u8]) -> (Vec<u8>, Option<String>) {
    /// The last message of a stream, which has no event in it.
    const LAST: u8 = 2;
    let mut said = Vec::new();
    while let Some((head, rest)) = body.split_first_chunk::<5>() {
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let Some((message, rest)) = rest.split_at_checked(length) else {
            break;
        };
        let message: Value = serde_json::from_slice(message).unwrap_or_default();
        if head[0] & LAST != 0 {
            let error = &message["error"];
            return (said, (!error.is_null()).then(|| error.to_string()));
        }
        if let Some(text) = message["event"]["data"]["stdout"].as_str() {
            said.extend(STANDARD.decode(text).unwrap_or_default());
        }
        body = rest;
    }
    (said, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_put_together_from_messages() {
        let mut body = framed(&json!({"event": {"start": {"pid": 1}}}));
        for piece in ["ab", "c"] {
            let data = json!({"event": {"data": {"stdout": STANDARD.encode(piece)}}});
            body.extend(framed(&data));
        }
        body.extend([0, 0, 0, 0, 9, b'{']);
        assert_eq!(output(&body), (b"abc".to_vec(), None));
        body.truncate(body.len() - 6);
        let mut last = framed(&json!({"error": {"code": "unavailable"}}));
        last[0] = 2;
        body.extend(last);
        let (said, error) = output(&body);
        assert_eq!(said, b"abc");
        assert_eq!(error.as_deref(), Some(r#"{"code":"unavailable"}"#));
    }
}
