//! A worker's poll stays open for a minute: it ends with the key that it was opened with.

use std::time::Duration;

use atoll_proof::{Client, Tier, json, wait};

const SERVICE: &str = "temporal.api.workflowservice.v1.WorkflowService";

/// Fields of protocol buffers that are short texts or messages.
fn fields(fields: &[(u8, &[u8])]) -> Vec<u8> {
    let mut message = Vec::new();
    for (number, bytes) in fields {
        message.extend([number << 3 | 2, u8::try_from(bytes.len()).unwrap()]);
        message.extend_from_slice(bytes);
    }
    message
}

fn call(port: u16, key: &str, method: &str, message: &[u8]) -> reqwest::RequestBuilder {
    let client = reqwest::Client::builder().http2_prior_knowledge().no_proxy();
    let mut body = vec![0];
    body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend_from_slice(message);
    let client = client.build().unwrap();
    client
        .post(format!("http://127.0.0.1:{port}/{SERVICE}/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .bearer_auth(key)
        .body(body)
}

/// A poll that the server knows of.
async fn poll(port: u16, admin: &str, key: &str, who: &str) -> tokio::task::JoinHandle<String> {
    let queue = fields(&[(1, b"nobody-fills-it")]);
    let message = fields(&[(1, b"default"), (2, &queue), (3, who.as_bytes())]);
    let request = call(port, key, "PollWorkflowTaskQueue", &message);
    let polling = tokio::spawn(async move {
        match request.send().await {
            Ok(answer) => format!("answered: {:?}", answer.headers().get("grpc-status")),
            Err(_) => "cut".to_owned(),
        }
    });
    // The type is that of workflows.
    let mut message = fields(&[(1, b"default"), (2, &queue)]);
    message.extend([3 << 3, 1]);
    wait::until("the poll is known", Duration::from_secs(30), async || {
        let answer = call(port, admin, "DescribeTaskQueue", &message)
            .send()
            .await
            .ok()?;
        let body = answer.bytes().await.ok()?;
        body.windows(who.len())
            .any(|bytes| bytes == who.as_bytes())
            .then_some(())
    })
    .await;
    polling
}

async fn key(client: &Client, name: &str) -> (String, String) {
    let made = client.post("/v1/keys", &json!({ "name": name })).await;
    let made = made.expect(201).json();
    let text = |value: &atoll_proof::Value| value.as_str().unwrap().to_owned();
    (text(&made["key"]["id"]), text(&made["secret"]))
}

#[tokio::test]
async fn a_poll_ends_with_its_key() {
    let (port, options) = super::with_workflows();
    atoll_proof::on(Tier::Jail, options, async |server| {
        let client = server.client();
        let admin = client.key().unwrap().to_owned();
        let (leaves, secret) = key(client, "leaves").await;
        let ends = poll(port, &admin, &secret, "who-leaves").await;
        let (_, secret) = key(client, "stays").await;
        let goes_on = poll(port, &admin, &secret, "who-stays").await;
        client.delete(&format!("/v1/keys/{leaves}")).await.expect(200);
        // Long before a poll that finds nothing is answered.
        let how = tokio::time::timeout(Duration::from_secs(30), ends).await;
        assert_eq!(how.expect("it goes on without its key").unwrap(), "cut");
        assert!(!goes_on.is_finished(), "another key's poll has ended");
        goes_on.abort();
    })
    .await;
}
