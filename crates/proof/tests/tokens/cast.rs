//! Who comes to the doors, and what is behind them.

use std::time::Duration;

use atoll_proof::{Client, Sandbox, Server, Value, json, wait};

/// What the doors are to, and every kind of secret, each by the name that it has in the table.
#[derive(Debug)]
pub(crate) struct Cast {
    pub(crate) anonymous: Client,
    /// Of the project that everything here belongs to.
    owner: Client,
    pub(crate) workflows: u16,
    /// Made by our own API.
    pub(crate) native: Sandbox,
    other_native: Sandbox,
    /// Made through E2B's wire, with ports that are not public.
    pub(crate) e2b: String,
    other_e2b: String,
    /// Made through E2B's wire with `secure: false`: its agent and its ports are public.
    pub(crate) public: String,
    /// Ended, and of E2B's wire.
    pub(crate) dead: String,
    pub(crate) volume: String,
    other_volume: String,
    pub(crate) dead_volume: String,
    /// One that the project has built.
    pub(crate) template: &'static str,
    /// Path and query of a link to upload to, without its proof.
    pub(crate) upload: String,
    pub(crate) shown: Vec<(&'static str, Option<String>)>,
}

fn text(value: &Value, name: &str) -> String {
    let found = value[name].as_str();
    found
        .unwrap_or_else(|| panic!("no `{name}` in {value}"))
        .to_owned()
}

/// A server that answers, inside, on this port.
async fn serve(sandbox: &Sandbox, port: u16) {
    let line = format!("cd /etc && exec python3 -m http.server {port} --bind 127.0.0.1");
    sandbox.background(&line).await;
    wait::until(
        &format!("port {port} listens"),
        Duration::from_secs(60),
        || async {
            let list = sandbox.client.get(&sandbox.path("/ports")).await.ok();
            let listening = list["items"].as_array().unwrap();
            listening
                .iter()
                .any(|item| item["port"] == json!(port))
                .then_some(())
        },
    )
    .await;
}

/// A key of a project.
async fn key(operator: &Client, project: &str, name: &str) -> (String, String) {
    let body = json!({"name": name, "project": project});
    let made = operator.post("/v1/keys", &body).await.expect(201).json();
    (text(&made["key"], "id"), text(&made, "secret"))
}

/// Builds a template that is `base` with a word more.
async fn build(client: &Client, name: &str) {
    let dockerfile = b"FROM base\nENV WHOSE=theirs\n";
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(dockerfile.len() as u64);
    header.set_mode(0o644);
    builder
        .append_data(&mut header, "Dockerfile", &dockerfile[..])
        .unwrap();
    let path = format!("/v1/templates/build-context?name={name}");
    let request = client
        .request(reqwest::Method::POST, &path)
        .header("content-type", "application/octet-stream")
        .body(builder.into_inner().unwrap());
    let said = client.send(request).await.expect(200).text();
    assert!(said.contains("event: done"), "{said}");
}

async fn port_token(client: &Client, id: &str, port: u16) -> String {
    let answer = client.get(&format!("/v1/sandboxes/{id}/ports/{port}")).await.ok();
    text(&answer, "token")
}

impl Cast {
    /// `None`: sandboxes reach nothing on this machine.
    pub(crate) async fn assemble(server: &Server, workflows: u16) -> Option<Self> {
        let operator = server.client();
        for project in ["team", "others"] {
            operator
                .post("/v1/projects", &json!({"name": project}))
                .await
                .expect(201);
        }
        let (_, own) = key(operator, "team", "own").await;
        let (_, others) = key(operator, "others", "own").await;
        let (revoked_id, revoked) = key(operator, "team", "revoked").await;
        operator
            .delete(&format!("/v1/keys/{revoked_id}?project=team"))
            .await
            .expect(200);
        let owner = operator.with_key(Some(&own));

        let models = json!({"network": {"rules": [{"action": "allow", "to": "models.atoll.internal"}]}});
        let wanted = server.request(&models);
        let made = owner.post("/v1/sandboxes", &wanted).await.json();
        if made["error"]["code"] == "network_unavailable" {
            return None;
        }
        let native = Sandbox::of(&owner, &made);
        serve(&native, 8000).await;
        serve(&native, 8001).await;
        let model_token = native.sh("printf %s \"$OPENAI_API_KEY\"").await.ok();
        let made = owner.post("/v1/sandboxes", &wanted).await.expect(201).json();
        let other_native = Sandbox::of(&owner, &made);
        let other_model_token = other_native.sh("printf %s \"$OPENAI_API_KEY\"").await.ok();

        let e2b = async |route: &str, body: Value| owner.post(route, &body).await.expect(201).json();
        let private = json!({"templateID": "base", "timeout": 300, "network": {"allowPublicTraffic": false}});
        let mine = e2b("/v2/sandboxes", private.clone()).await;
        let other = e2b("/v2/sandboxes", private.clone()).await;
        let ended = e2b("/v2/sandboxes", private).await;
        let open = json!({"templateID": "base", "timeout": 300, "secure": false});
        let public = text(&e2b("/sandboxes", open).await, "sandboxID");
        for id in [&text(&mine, "sandboxID"), &public] {
            let id = format!("sbx_{id}");
            serve(&Sandbox::of(&owner, &json!({"id": id})), 8000).await;
        }
        let native_agent = format!("/sandboxes/{}/connect", native.bare());
        let native_agent = owner.post(&native_agent, &json!({"timeout": 60})).await.ok();

        let dead = text(&ended, "sandboxID");
        let dead_port = port_token(&owner, &format!("sbx_{dead}"), 8000).await;
        owner.delete(&format!("/sandboxes/{dead}")).await.expect(204);
        let made = owner.post("/v1/sandboxes", &wanted).await.expect(201).json();
        let ended_native = Sandbox::of(&owner, &made);
        let dead_model_token = ended_native.sh("printf %s \"$OPENAI_API_KEY\"").await.ok();
        ended_native.kill().await;

        let make_volume = async |name: &str| {
            let made = owner
                .post("/volumes", &json!({"name": name}))
                .await
                .expect(201)
                .json();
            (text(&made, "volumeID"), text(&made, "token"))
        };
        let (volume, volume_key) = make_volume("one").await;
        let (other_volume, other_volume_key) = make_volume("two").await;
        let (dead_volume, dead_volume_key) = make_volume("three").await;
        owner.delete(&format!("/volumes/{dead_volume}")).await.expect(204);

        let virtual_key = async |name: &str| {
            let made = owner.post("/v1/gateway/keys", &json!({"name": name})).await.ok();
            (text(&made["key"], "id"), text(&made, "secret"))
        };
        let (_, for_models) = virtual_key("calls").await;
        let (gone, gone_for_models) = virtual_key("gone").await;
        owner.delete(&format!("/v1/gateway/keys/{gone}")).await.ok();

        let template = "theirs";
        build(&owner, template).await;
        let link = operator
            .get("/templates/any/files/abc123")
            .await
            .expect(201)
            .json();
        let link = text(&link, "url");
        let (upload, proof) = link.split_once("&proof=").unwrap();
        let upload = upload.strip_prefix(operator.url()).unwrap().to_owned();

        let shown = [
            ("none", None),
            ("junk", Some("junk".to_owned())),
            ("atl", Some(own)),
            ("atl rev", Some(revoked)),
            ("atl oth", Some(others)),
            ("atl op", operator.key().map(str::to_owned)),
            ("atm", Some(for_models)),
            ("atm rev", Some(gone_for_models)),
            ("atp", Some(port_token(&owner, &native.id, 8000).await)),
            ("atp 8001", Some(port_token(&owner, &native.id, 8001).await)),
            ("atp oth", Some(port_token(&owner, &other_native.id, 8000).await)),
            ("atp dead", Some(dead_port)),
            ("ate", Some(text(&mine, "envdAccessToken"))),
            ("ate nat", Some(text(&native_agent, "envdAccessToken"))),
            ("ate oth", Some(text(&other, "envdAccessToken"))),
            ("ate dead", Some(text(&ended, "envdAccessToken"))),
            ("att", Some(text(&mine, "trafficAccessToken"))),
            ("att oth", Some(text(&other, "trafficAccessToken"))),
            ("att dead", Some(text(&ended, "trafficAccessToken"))),
            ("ats", Some(model_token)),
            ("ats oth", Some(other_model_token)),
            ("ats dead", Some(dead_model_token)),
            ("atv", Some(volume_key)),
            ("atv oth", Some(other_volume_key)),
            ("atv dead", Some(dead_volume_key)),
            ("atu", Some(proof.to_owned())),
        ];
        Some(Self {
            anonymous: operator.with_key(None),
            owner,
            workflows,
            native,
            other_native,
            e2b: text(&mine, "sandboxID"),
            other_e2b: text(&other, "sandboxID"),
            public,
            dead,
            volume,
            other_volume,
            dead_volume,
            template,
            upload,
            shown: shown.into(),
        })
    }

    /// What models answer to everybody's secrets when asked by a program in a sandbox that may.
    pub(crate) async fn asked_inside(&self) -> Vec<String> {
        const SCRIPT: &str = r#"
import json, os, sys, urllib.request, urllib.error
url = os.environ["OPENAI_BASE_URL"] + "/models"
def ask(headers):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code
said = []
for secret in json.loads(sys.argv[1]):
    ways = [{}] if secret is None else [{"authorization": "Bearer " + secret}, {"x-api-key": secret}]
    statuses = [ask(way) for way in ways]
    opened = any(status < 400 for status in statuses)
    said.append("yes" if opened else str(statuses[0]))
print(json.dumps(said))
"#;
        let secrets: Vec<_> = self.shown.iter().map(|(_, secret)| secret).collect();
        let secrets = json!(secrets).to_string();
        let said = self.native.run(&["python3", "-c", SCRIPT, &secrets]).await.ok();
        serde_json::from_str(&said).unwrap()
    }

    /// Ends what was made.
    pub(crate) async fn leave(self) {
        for sandbox in [&self.native, &self.other_native] {
            sandbox.kill().await;
        }
        for id in [&self.e2b, &self.other_e2b, &self.public] {
            self.owner.delete(&format!("/sandboxes/{id}")).await.expect(204);
        }
        for id in [&self.volume, &self.other_volume] {
            self.owner.delete(&format!("/volumes/{id}")).await.expect(204);
        }
    }
}
