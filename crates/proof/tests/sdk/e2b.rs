//! E2B's SDKs for Python and JavaScript, its command line, and what others built on them; and who gets nothing.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use atoll_proof::{Server, Value, json, on_every_tier};
use tokio::process::Command;

on_every_tier!(with atoll_proof::Options::default().own_templates();
    python_goes_through_every_call,
    javascript_goes_through_every_call,
    a_field_that_is_not_supported_is_named,
    a_sandbox_of_this_wire_opens_to_its_token_only,
    the_command_line_works_unchanged,
    an_agent_of_langchain_works_in_a_sandbox,
    what_opens_one_sandbox_opens_no_other,
    a_link_acts_as_whom_it_was_signed_for,
    a_volume_opens_to_its_token_only,
    frames_that_lie_are_refused,
);

pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk").join(name)
}

/// What the environment names, or nothing, loudly.
pub(crate) fn installed(variable: &str) -> Vec<PathBuf> {
    let named = std::env::var_os(variable).unwrap_or_default();
    let found: Vec<PathBuf> = std::env::split_paths(&named)
        .filter(|path| !path.as_os_str().is_empty())
        .collect();
    if found.is_empty() {
        eprintln!("SKIPPED: {variable} names no SDK; ./test installs them");
    }
    found
}

pub(crate) async fn run(server: &Server, mut command: Command) {
    let client = server.client();
    command
        .env("E2B_API_URL", client.url())
        .env("E2B_SANDBOX_URL", client.url())
        .env("E2B_VOLUME_API_URL", client.url())
        .env("E2B_API_KEY", client.key().unwrap())
        .env("ATOLL_TIER", server.tier.name());
    finished(command).await;
}

/// Runs a script to its end, which must be a good one.
pub(crate) async fn finished(mut command: Command) {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.expect("the SDK's interpreter runs");
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.trim_end().ends_with("all ok"), "{out}\n{err}");
}

async fn python_goes_through_every_call(server: &Server) {
    for python in installed("ATOLL_TEST_E2B_PYTHONS") {
        let mut command = Command::new(python);
        command.arg(script("through_e2b.py"));
        run(server, command).await;
    }
}

async fn javascript_goes_through_every_call(server: &Server) {
    for directory in installed("ATOLL_TEST_E2B_NODES") {
        let mut command = Command::new("node");
        command.arg(script("through_e2b.mjs")).arg(directory);
        run(server, command).await;
    }
}

async fn the_command_line_works_unchanged(server: &Server) {
    for directory in installed("ATOLL_TEST_E2B_CLIS") {
        let mut command = Command::new("node");
        command.arg(script("through_cli.mjs")).arg(directory);
        run(server, command).await;
    }
}

async fn an_agent_of_langchain_works_in_a_sandbox(server: &Server) {
    for python in installed("ATOLL_TEST_LANGCHAIN_PYTHONS") {
        let mut command = Command::new(python);
        command.arg(script("through_langchain.py"));
        run(server, command).await;
    }
}

async fn a_field_that_is_not_supported_is_named(server: &Server) {
    let client = server.client();
    for (body, named) in [
        (json!({"templateID": "base", "colour": "red"}), "colour"),
        (
            json!({"templateID": "base", "iam": {"tokens": {"a": {}}}}),
            "iam.tokens",
        ),
        (
            json!({"templateID": "base", "timeout": 0}),
            "Timeout must be greater than 0",
        ),
    ] {
        let answer = client.post("/v2/sandboxes", &body).await.expect(400).json();
        assert_eq!(answer["code"], 400);
        assert!(answer["message"].as_str().unwrap().contains(named), "{answer}");
    }
    let answer = client.get("/sandboxes/nonsense").await.expect(404).json();
    assert_eq!(answer["code"], 404);
}

async fn a_volume_opens_to_its_token_only(server: &Server) {
    let client = server.client();
    let make = async |name: &str| {
        let made = client
            .post("/volumes", &json!({"name": name}))
            .await
            .expect(201)
            .json();
        let word = |key: &str| made[key].as_str().unwrap().to_owned();
        (word("volumeID"), word("token"))
    };
    let ((one, one_token), (two, two_token)) = (make("one").await, make("two").await);
    let list = async |id: &str, token: &str, rest: &str| {
        let url = format!("{}/volumecontent/{id}/{rest}", client.url());
        let request = reqwest::Client::new().get(url).bearer_auth(token);
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        (status, answer.json::<Value>().await.unwrap_or_default())
    };
    assert_eq!(list(&one, &one_token, "dir?path=/").await, (200, json!([])));
    for token in [&two_token, "", "x", client.key().unwrap()] {
        let (status, body) = list(&one, token, "dir?path=/").await;
        assert_eq!((status, &body["code"]), (401, &json!("401")), "{body}");
    }
    for (rest, expected) in [
        ("dir?path=/../..", 400),
        ("file?path=..%2f..%2fetc%2fpasswd", 400),
        ("path?path=/none", 404),
        ("dir", 400),
        ("dir?path=/&depth=0", 400),
        ("dir?path=/&colour=red", 400),
    ] {
        assert_eq!(list(&two, &two_token, rest).await.0, expected, "{rest}");
    }
    for id in [&one, &two] {
        client.delete(&format!("/volumes/{id}")).await.expect(204);
    }
    assert_eq!(list(&one, &one_token, "dir?path=/").await.0, 401);
}

async fn a_sandbox_of_this_wire_opens_to_its_token_only(server: &Server) {
    let client = server.client();
    let body = json!({"templateID": "base", "timeout": 60});
    let made = client.post("/v2/sandboxes", &body).await.expect(201).json();
    let id = made["sandboxID"].as_str().unwrap();
    let token = made["envdAccessToken"].as_str().unwrap();
    let list = |token: Option<&str>, port: &str| {
        let mut request = client
            .with_key(None)
            .request("POST".parse().unwrap(), "/process.Process/List")
            .header("e2b-sandbox-id", id)
            .header("e2b-sandbox-port", port)
            .header("content-type", "application/json")
            .body("{}");
        if let Some(token) = token {
            request = request.header("x-access-token", token);
        }
        client.send(request)
    };
    list(None, "49983").await.expect(401);
    list(Some("wrong"), "49983").await.expect(401);
    list(Some(token), "49983").await.expect(200);
    // Nobody listens there.
    let closed = list(Some(token), "4444").await.expect(502).json();
    assert!(
        closed["message"].as_str().unwrap().contains("port is not open"),
        "{closed}"
    );
    client.delete(&format!("/sandboxes/{id}")).await.expect(204);
    let gone = list(Some(token), "49983").await.expect(502).json();
    assert!(
        gone["message"].as_str().unwrap().contains("was not found"),
        "{gone}"
    );
}

/// What a request without a key says, to a sandbox's own port.
fn to_envd(server: &Server, method: &str, path: &str, id: &str) -> reqwest::RequestBuilder {
    to_port(server, method, path, id, "49983")
}

fn to_port(server: &Server, method: &str, path: &str, id: &str, port: &str) -> reqwest::RequestBuilder {
    server
        .client()
        .with_key(None)
        .request(method.parse().unwrap(), path)
        .header("e2b-sandbox-id", id)
        .header("e2b-sandbox-port", port)
}

async fn what_opens_one_sandbox_opens_no_other(server: &Server) {
    let client = server.client();
    let body = json!({"templateID": "base", "timeout": 120, "network": {"allowPublicTraffic": false}});
    let mine = client.post("/v2/sandboxes", &body).await.expect(201).json();
    let yours = client.post("/v2/sandboxes", &body).await.expect(201).json();
    let text = |of: &atoll_proof::Value, name: &str| of[name].as_str().unwrap().to_owned();
    let (my_token, your_id) = (text(&mine, "envdAccessToken"), text(&yours, "sandboxID"));

    let read = "/files?path=/etc/passwd";
    let request = to_envd(server, "GET", read, &your_id).header("x-access-token", &my_token);
    client.send(request).await.expect(401);
    // Neither does what opens ports open files, nor the other way round.
    let traffic = text(&yours, "trafficAccessToken");
    let request = to_envd(server, "GET", read, &your_id).header("x-access-token", &traffic);
    client.send(request).await.expect(401);
    for token in [
        &text(&mine, "trafficAccessToken"),
        &text(&yours, "envdAccessToken"),
    ] {
        let request = to_port(server, "GET", "/", &your_id, "8080").header("e2b-traffic-access-token", token);
        client.send(request).await.expect(403);
    }

    // Whoever says nothing but the token (older SDKs for JavaScript) gets the files of that sandbox.
    let by_token = |token: &str| {
        let request = client
            .with_key(None)
            .request("GET".parse().unwrap(), "/files?path=/etc/hostname");
        client.send(request.header("x-access-token", token))
    };
    by_token(&my_token).await.expect(200);
    by_token(&traffic).await.expect(401);
    let health = |token: &str| {
        let request = client.with_key(None).request("GET".parse().unwrap(), "/health");
        client.send(request.header("x-access-token", token))
    };
    health(&my_token).await.expect(204);
    health("ate_of-one-that-is-gone").await.expect(502);
    let processes = |token: &str| {
        let request = client
            .with_key(None)
            .request("POST".parse().unwrap(), "//process.Process/List");
        client.send(request.header("x-access-token", token).json(&json!({})))
    };
    processes(&my_token).await.expect(200);
    processes(&traffic).await.expect(502);
    client.with_key(None).get("/health").await.expect(200);

    // A link that was signed for one is none for the other, with or without a name on it.
    let signature = signed(&format!("/etc/hostname:read::{my_token}"));
    let link = format!("/files?path=/etc/hostname&signature={signature}");
    client
        .send(to_envd(server, "GET", &link, &text(&mine, "sandboxID")))
        .await
        .expect(200);
    client
        .send(to_envd(server, "GET", &link, &your_id))
        .await
        .expect(401);
    // It is for one path and for reading.
    let other = link.replace("hostname", "passwd");
    client
        .send(to_envd(server, "GET", &other, &text(&mine, "sandboxID")))
        .await
        .expect(401);
    client
        .send(to_envd(server, "POST", &link, &text(&mine, "sandboxID")))
        .await
        .expect(401);
    let anonymous = client.with_key(None);
    anonymous.get(&link).await.expect(200);
    anonymous.get(&other).await.expect(401);

    // Two names are none.
    let request =
        to_envd(server, "GET", "/health", &your_id).header("e2b-sandbox-id", text(&mine, "sandboxID"));
    client.send(request).await.expect(400);
    // Some clients name a sandbox when they ask the API about it (Python 2.8 to 2.26): that is the API's, and opens to a key alone.
    let connect = format!("/sandboxes/{your_id}/connect");
    let asked = || to_envd(server, "POST", &connect, &your_id).json(&json!({"timeout": 60}));
    let with_key = asked().header("x-api-key", client.key().unwrap());
    let connected = client.send(with_key).await.expect(200).json();
    assert_eq!(connected["sandboxID"], json!(your_id));
    let with_token = asked().header("x-access-token", text(&yours, "envdAccessToken"));
    client.send(with_token).await.expect(401);
    // By its own host, and on ports of its own, nothing of the API answers, whatever the path.
    let asked =
        to_port(server, "POST", &connect, &your_id, "8080").header("x-api-key", client.key().unwrap());
    client.send(asked).await.expect(403);
    let host = format!("49983-{your_id}.localhost");
    for path in ["/sandboxes", "/v2/sandboxes", "/v1/keys"] {
        let request = client.request("GET".parse().unwrap(), path).header("host", &host);
        let answer = client.send(request).await;
        assert!(matches!(answer.status, 401 | 404), "{path}: {answer:?}");
    }
    for path in ["/v1/keys", "//v1/keys", "/files/../v1/keys"] {
        let request = to_envd(server, "GET", path, &your_id).header("x-api-key", client.key().unwrap());
        let answer = client.send(request).await;
        assert!(matches!(answer.status, 401 | 404), "{path}: {answer:?}");
    }
    for id in [text(&mine, "sandboxID"), your_id] {
        client.delete(&format!("/sandboxes/{id}")).await.expect(204);
    }
}

/// Who a file operation acts as is what the query says, which a signature covers; never a header. Whoever is named has the
/// permissions that they have inside.
async fn a_link_acts_as_whom_it_was_signed_for(server: &Server) {
    let client = server.client();
    let body = json!({"templateID": "base", "timeout": 120});
    let made = client.post("/v2/sandboxes", &body).await.expect(201).json();
    let (id, token) = (
        made["sandboxID"].as_str().unwrap(),
        made["envdAccessToken"].as_str().unwrap(),
    );
    let ask = async |method: &str, path: &str, headers: &[(&str, &str)]| {
        let mut request = to_envd(server, method, path, id);
        if method == "POST" {
            request = request
                .header("content-type", "application/octet-stream")
                .body("x");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        client.send(request).await
    };
    let owner = [("x-access-token", token)];
    // `Basic root:`
    let as_root = ("authorization", "Basic cm9vdDo=");
    // One name in two homes, and what is root's alone.
    for path in [
        "/files?path=/root/note&username=root",
        "/files?path=/root/secret&username=root",
    ] {
        ask("POST", path, &owner).await.expect(200);
    }
    ask("POST", "/files?path=/home/user/note", &owner)
        .await
        .expect(200);
    let sandbox = atoll_proof::Sandbox::of(client, &json!({"id": format!("sbx_{id}")}));
    sandbox
        .root_sh("chmod 700 /root; echo root > /root/note; chmod 600 /root/*")
        .await
        .ok();
    sandbox
        .sh("echo user > ~/note; ln -s /root/secret ~/way; id -un")
        .await
        .ok();

    let link = |path: &str, operation: &str, user: &str| {
        let signature = signed(&format!("{path}:{operation}:{user}:{token}"));
        let user = match user {
            "" => String::new(),
            user => format!("&username={user}"),
        };
        format!("/files?path={path}{user}&signature={signature}")
    };
    let note = link("note", "read", "");
    for headers in [&[][..], &[as_root]] {
        assert_eq!(ask("GET", &note, headers).await.expect(200).text(), "user\n");
        let by_token = [&[("x-access-token", token)][..], headers].concat();
        let read = ask("GET", "/files?path=note", &by_token).await.expect(200);
        assert_eq!(read.text(), "user\n", "no header has a say");
        for closed in ["/root/secret", "way"] {
            for user in ["", "user"] {
                ask("GET", &link(closed, "read", user), headers).await.expect(403);
                ask("POST", &link(closed, "write", user), headers)
                    .await
                    .expect(403);
            }
            let named = format!("/files?path={closed}&username=user");
            ask("GET", &named, &by_token).await.expect(403);
            ask("POST", &named, &by_token).await.expect(403);
        }
    }
    // Those who were named by who signed get what is theirs; and a name that was not signed is none.
    let roots = link("note", "read", "root");
    assert_eq!(ask("GET", &roots, &[]).await.expect(200).text(), "root\n");
    let forged = format!("{note}&username=root");
    ask("GET", &forged, &[]).await.expect(401);
    // The owner, who names nobody, may all, as at E2B.
    ask("GET", "/files?path=/root/secret", &owner).await.expect(200);
    ask("POST", "/files?path=/app/state.json", &owner)
        .await
        .expect(200);
    client.delete(&format!("/sandboxes/{id}")).await.expect(204);
}

/// As E2B's clients sign, percent-encoded.
fn signed(text: &str) -> String {
    use base64::Engine as _;
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(text);
    let encoded = base64::engine::general_purpose::STANDARD_NO_PAD.encode(digest);
    format!("v1_{}", encoded.replace('+', "%2B").replace('/', "%2F"))
}

async fn frames_that_lie_are_refused(server: &Server) {
    let client = server.client();
    let body = json!({"templateID": "base", "timeout": 120});
    let made = client.post("/v2/sandboxes", &body).await.expect(201).json();
    let (id, token) = (
        made["sandboxID"].as_str().unwrap(),
        made["envdAccessToken"].as_str().unwrap(),
    );
    let start = |kind: &str, body: Vec<u8>| {
        let request = to_envd(server, "POST", "/process.Process/Start", id)
            .header("x-access-token", token)
            .header("content-type", kind)
            .body(body);
        client.send(request)
    };
    let frame = |flags: u8, length: u32, payload: &[u8]| {
        let mut frame = vec![flags];
        frame.extend(length.to_be_bytes());
        frame.extend(payload);
        frame
    };
    let fine = json!({"process": {"cmd": "true"}}).to_string().into_bytes();
    let length = u32::try_from(fine.len()).unwrap();
    for (what, body) in [
        ("longer than anything", frame(0, u32::MAX, &fine)),
        ("longer than what follows", frame(0, length + 1, &fine)),
        ("shorter than what it holds", frame(0, length - 1, &fine)),
        ("compressed with nothing", frame(1, length, &fine)),
        ("no message", frame(0, 0, b"")),
        ("half a head", vec![0, 0, 0]),
        ("nothing", Vec::new()),
        ("not JSON", frame(0, 4, b"\xff\xfe{}")),
    ] {
        for kind in ["application/connect+json", "application/connect+proto"] {
            let answer = start(kind, body.clone()).await;
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            let refused = answer.status >= 400 || text.contains("\"error\"") || text.contains("\"code\"");
            // Read as protobuf, "no message" is an empty one, which starts nothing either.
            assert!(refused, "{what} as {kind}: {} {text}", answer.status);
        }
    }
    let unary = |body: Vec<u8>| {
        let request = to_envd(server, "POST", "/filesystem.Filesystem/Stat", id)
            .header("x-access-token", token)
            .header("content-type", "application/json")
            .body(body);
        client.try_send(request)
    };
    for body in [
        format!("{{\"path\":\"{}\"}}", "a".repeat(20 * 1024 * 1024)),
        format!("{{\"path\":{}", "[".repeat(100_000)),
    ] {
        // The server need not read to the end before it says no.
        let answer = unary(body.into_bytes()).await;
        assert!(answer.is_err() || answer.is_ok_and(|answer| answer.status >= 400));
    }
    // It still works.
    let stat = unary(br#"{"path":"/etc/hostname"}"#.to_vec())
        .await
        .unwrap()
        .expect(200)
        .json();
    assert_eq!(stat["entry"]["path"], "/etc/hostname");
    client.delete(&format!("/sandboxes/{id}")).await.expect(204);
}
