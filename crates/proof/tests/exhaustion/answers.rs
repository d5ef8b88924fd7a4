//! What is small on the way and large once it is here; what is made and not read; what is kept after the answer.

use std::time::Duration;

use atoll_proof::{MIB, Sandbox, Server, json, wait};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::{assert_nothing_held, gauge, grpc, meanwhile, neighbour, routes, tenant};

/// A field of protocol buffers with so many bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut length = bytes.len();
    while length > 127 {
        field.push(u8::try_from(length & 127).unwrap() | 128);
        length >>= 7;
    }
    field.push(u8::try_from(length).unwrap());
    field.extend_from_slice(bytes);
    field
}

/// Each message takes hundreds of megabytes if it is decoded, or waits with half of one.
pub(crate) async fn short_messages_that_stand_for_much_are_not_decoded(server: &Server) {
    let neighbour = neighbour(server).await;
    let attacker = tenant(server, "attacker").await;
    let right = format!("Bearer {}", attacker.client.key().unwrap());
    let authority = grpc::authority(server);
    let before = server.memory();
    let many = [0x12, 0].repeat(300_000);
    let poll = [field(1, b"default"), field(5, &field(1, &vec![b'x'; 500_000]))].concat();
    let attacks = async {
        for (method, message) in [
            ("ExecuteMultiOperation", &many),
            ("RespondWorkflowTaskCompleted", &many),
            ("PollWorkflowTaskQueue", &poll),
        ] {
            let path = format!("/temporal.api.workflowservice.v1.WorkflowService/{method}");
            let mut crowd = Vec::new();
            for _ in 0..20 {
                let mut tcp = grpc::connect(&authority).await;
                tcp.write_all(&grpc::whole_call(1, &path, &right, message))
                    .await
                    .unwrap();
                crowd.push(tcp);
            }
            for tcp in &mut crowd {
                let how = grpc::until_answered(tcp, 1, method).await;
                assert_eq!(how, "answered", "{method}");
            }
        }
    };
    meanwhile(server, &neighbour, attacks).await;
    assert_nothing_held(server, before).await;
    attacker.kill().await;
    neighbour.kill().await;
}

/// Twenty answers of some fifteen megabytes each.
pub(crate) async fn answers_that_nobody_reads_are_paid_for(server: &Server) {
    let neighbour = neighbour(server).await;
    let attacker = tenant(server, "attacker").await;
    let before = server.memory();
    let write =
        "import sys\nd = b'\\xff' + bytes(1 << 20)\nsys.stdout.buffer.write(d)\nsys.stderr.buffer.write(d)";
    let body = json!({"argv": ["python3", "-c", write]}).to_string();
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        attacker.path("/exec"),
        attacker.client.key().unwrap(),
        body.len()
    );
    let attacks = async {
        let mut crowd = Vec::new();
        for _ in 0..20 {
            let mut tcp = TcpStream::connect(server.client().authority()).await.unwrap();
            tcp.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
            crowd.push(tcp);
        }
        // Until every command was run or refused.
        for tcp in &crowd {
            tcp.readable().await.unwrap();
        }
        let held = gauge(server, "atoll_buffered_bytes ").await;
        println!("20 answers that nobody reads: {} MiB held", held / MIB);
        assert!(held <= 45 * MIB, "{held}");
        crowd
    };
    let crowd = meanwhile(server, &neighbour, attacks).await;
    drop(crowd);
    assert_nothing_held(server, before).await;
    attacker.kill().await;
    neighbour.kill().await;
}

/// A directory whose listing takes tens of megabytes, listed many times at once by both wires.
pub(crate) async fn listings_that_nobody_reads_are_paid_for(server: &Server) {
    let neighbour = neighbour(server).await;
    let attacker = tenant(server, "attacker").await;
    let (id, token) = routes::e2b_sandbox(server).await;
    let own = Sandbox::of(server.client(), &json!({ "id": format!("sbx_{id}") }));
    let script = "import os\nos.mkdir('/tmp/many')\nos.chdir('/tmp/many')\n\
                  for i in range(40000): open('%06d' % i + 'x' * 240, 'x').close()\nprint('made')";
    for sandbox in [&attacker, &own] {
        sandbox.run(&["python3", "-c", script]).await.ok();
    }
    let before = server.memory();
    let native = format!(
        "GET {} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\r\n",
        attacker.path("/files?path=/tmp/many"),
        attacker.client.key().unwrap(),
    );
    let body = json!({"path": "/tmp/many"}).to_string();
    let e2b = format!(
        "POST /filesystem.Filesystem/ListDir HTTP/1.1\r\nhost: 49983-{id}.localhost\r\nx-access-token: {token}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let attacks = async {
        let mut crowd = Vec::new();
        for _ in 0..20 {
            for request in [&native, &e2b] {
                let mut tcp = TcpStream::connect(server.client().authority()).await.unwrap();
                tcp.write_all(request.as_bytes()).await.unwrap();
                crowd.push(tcp);
            }
        }
        // Until every listing was made or refused.
        let mut most = 0;
        for tcp in &crowd {
            tcp.readable().await.unwrap();
            most = most.max(gauge(server, "atoll_buffered_bytes ").await);
        }
        println!("40 listings that nobody reads: up to {} MiB held", most / MIB);
        assert!(most > 10 * MIB, "{most}");
        assert!(most <= 72 * MIB, "{most}");
        let mut heads = Vec::new();
        for tcp in &crowd {
            let mut head = [0; 12];
            let read = tcp.try_read(&mut head).unwrap();
            heads.push(String::from_utf8_lossy(&head[..read]).into_owned());
        }
        // How many are refused is chance: they grow side by side, and may take the room from each other.
        assert!(heads.iter().any(|head| head.ends_with("429")), "{heads:?}");
        assert!(
            heads
                .iter()
                .all(|head| head.ends_with("429") || head.ends_with("200")),
            "{heads:?}"
        );
        crowd
    };
    let crowd = meanwhile(server, &neighbour, attacks).await;
    drop(crowd);
    assert_nothing_held(server, before).await;
    // Alone and read, it is whole.
    let listed = attacker
        .client
        .get(&attacker.path("/files?path=/tmp/many"))
        .await
        .ok();
    assert_eq!(listed["items"].as_array().unwrap().len(), 40_000);
    attacker.kill().await;
    own.kill().await;
    neighbour.kill().await;
}

/// Downloads that stand still, of which each has a thread: others need threads, too.
pub(crate) async fn downloads_that_nobody_reads_leave_threads_for_others(server: &Server) {
    let neighbour = neighbour(server).await;
    let before = server.memory();
    let client = server.client();
    let volume = json!({"name": "large", "size_bytes": 128 * MIB});
    client.post("/v1/volumes", &volume).await.expect(201);
    let with = json!({"volumes": [{"volume": "large", "path": "/large"}]});
    let writer = server.sandbox_with(&with).await;
    writer
        .sh("dd if=/dev/urandom of=/large/file bs=1M count=64 status=none && sync")
        .await
        .ok();
    let request = format!(
        "GET /v1/volumes/large/content HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\r\n",
        client.key().unwrap(),
    );
    let attack = async {
        let mut crowd = Vec::new();
        for _ in 0..60 {
            let mut tcp = TcpStream::connect(client.authority()).await.unwrap();
            tcp.write_all(request.as_bytes()).await.unwrap();
            crowd.push(tcp);
        }
        let mut heads = Vec::new();
        for tcp in &crowd {
            let mut head = [0; 12];
            tcp.readable().await.unwrap();
            let read = tcp.try_read(&mut head).unwrap();
            heads.push(String::from_utf8_lossy(&head[..read]).into_owned());
        }
        let told = |status: &str| heads.iter().filter(|head| head.ends_with(status)).count();
        assert_eq!((told("200"), told("503")), (32, 28), "{heads:?}");
        // Threads are there for whoever starts something.
        server.sandbox().await.kill().await;
        crowd
    };
    let crowd = meanwhile(server, &neighbour, attack).await;
    drop(crowd);
    assert_nothing_held(server, before).await;
    writer.kill().await;
    wait::until("the volume is free", Duration::from_secs(60), || async {
        (client.delete("/v1/volumes/large").await.status == 204).then_some(())
    })
    .await;
    neighbour.kill().await;
}

/// Many readers of events at once, who do not read.
pub(crate) async fn readers_of_events_pay_for_what_was_read_for_them(server: &Server) {
    const READERS: u64 = 50;
    const OF_ONE: u64 = 16 * 1024;
    let before = server.memory();
    let request = format!(
        "GET /v1/events?after=0 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\r\n",
        server.client().key().unwrap(),
    );
    let mut readers = Vec::new();
    for _ in 0..READERS {
        let mut tcp = TcpStream::connect(server.client().authority()).await.unwrap();
        tcp.write_all(request.as_bytes()).await.unwrap();
        readers.push(tcp);
    }
    for tcp in &readers {
        tcp.readable().await.unwrap();
    }
    assert!(gauge(server, "atoll_buffered_bytes ").await >= READERS * OF_ONE);
    drop(readers);
    assert_nothing_held(server, before).await;
}

/// By E2B's agent: processes with long names, long lists of arguments, and watchers that nobody asks.
pub(crate) async fn what_is_kept_for_a_sandbox_is_bounded(server: &Server) {
    let neighbour = neighbour(server).await;
    let (id, token) = routes::e2b_sandbox(server).await;
    let before = server.memory();
    let call = async |method: &str, kind: &str, body: Vec<u8>| {
        let request = server
            .client()
            .with_key(None)
            .request(reqwest::Method::POST, method)
            .header("host", format!("49983-{id}.localhost"))
            .header("x-access-token", &token)
            .header("content-type", kind)
            .timeout(Duration::from_secs(60));
        server.client().send(request.body(body)).await
    };
    const JSON: &str = "application/json";
    let framed = |message: &[u8]| {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0][..], &length, message].concat()
    };
    let attacks = async {
        let long = json!({"process": {"cmd": "true"}, "tag": "x".repeat(300)}).to_string();
        let answer = call(
            "/process.Process/Start",
            "application/connect+json",
            framed(long.as_bytes()),
        );
        let answer = answer.await.text();
        assert!(answer.contains("invalid_argument"), "{answer}");

        let arguments = field(1, &[field(1, b"true"), [0x12, 0].repeat(500_000)].concat());
        let many = (0..10).map(|_| {
            call(
                "/process.Process/Start",
                "application/connect+proto",
                framed(&arguments),
            )
        });
        for answer in futures_util::future::join_all(many).await {
            assert!(answer.text().contains("resource_exhausted"), "{answer:?}");
        }

        let place = format!("/tmp/{}", "d".repeat(200));
        let made = json!({ "path": place }).to_string().into_bytes();
        call("/filesystem.Filesystem/MakeDir", JSON, made.clone())
            .await
            .expect(200);
        for _ in 0..100 {
            call("/filesystem.Filesystem/CreateWatcher", JSON, made.clone())
                .await
                .expect(200);
        }
        let script = format!(
            "import os\nos.chdir('{place}')\nfor i in range(3000): os.mkdir('%06d' % i + 'x' * 240)\nprint('made')"
        );
        let own = Sandbox::of(server.client(), &json!({ "id": format!("sbx_{id}") }));
        own.run(&["python3", "-c", &script]).await.ok();
        let held = gauge(server, "atoll_buffered_bytes ").await;
        println!("100 watchers of 3000 changes: {} MiB held", held / MIB);
        assert!(held <= 5 * MIB, "{held}");
        own.kill().await;
    };
    meanwhile(server, &neighbour, attacks).await;
    assert_nothing_held(server, before).await;
    neighbour.kill().await;
}
