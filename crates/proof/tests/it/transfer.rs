//! Content in parts, and whole trees as archives.

use std::collections::BTreeMap;
use std::io::Read as _;

use atoll_proof::{MIB, Server, json, on_every_tier};

on_every_tier!(
    parts_of_a_file_are_read,
    large_files_stream_both_ways,
    a_tree_goes_out_as_tar_and_comes_in_again,
    a_broken_upload_changes_nothing,
    a_refusal_reaches_who_still_sends,
);

async fn parts_of_a_file_are_read(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/digits", b"0123456789").await;
    let range = |value: &'static str| {
        let sandbox = sandbox.clone();
        async move {
            let path = sandbox.path("/files/content?path=/tmp/digits");
            let request = sandbox
                .client
                .request(reqwest::Method::GET, &path)
                .header("range", value);
            sandbox.client.send(request).await
        }
    };
    for (asked, bytes, shown) in [
        ("bytes=2-4", "234", "bytes 2-4/10"),
        ("bytes=7-", "789", "bytes 7-9/10"),
        ("bytes=-2", "89", "bytes 8-9/10"),
        ("bytes=0-999", "0123456789", "bytes 0-9/10"),
    ] {
        let answer = range(asked).await.expect(206);
        assert_eq!(answer.text(), bytes, "{asked}");
        assert_eq!(answer.headers["content-range"], shown);
    }
    let beyond = range("bytes=10-").await;
    beyond.refused(416, "range_not_satisfiable");
    assert_eq!(beyond.headers["content-range"], "bytes */10");
    assert_eq!(
        range("bytes=a-b").await.expect(200).text(),
        "0123456789",
        "nonsense means the whole file"
    );
    let answer = sandbox
        .files_get("/content", "/tmp/digits", &[("offset", "3"), ("length", "4")])
        .await
        .expect(200);
    assert_eq!(answer.text(), "3456");
    let answer = sandbox
        .files_get("/content", "/tmp/digits", &[("offset", "99")])
        .await
        .expect(200);
    assert_eq!(answer.text(), "");
}

/// 64 MiB through a server whose memory does not grow by a fraction of it.
async fn large_files_stream_both_ways(server: &Server) {
    let sandbox = server.sandbox().await;
    let size = 64 * MIB;
    let content: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
    sandbox.write("/tmp/large", b"warm").await;
    let before = server.memory();
    let written = sandbox
        .files_put("/content", "/tmp/large", &[], content.clone())
        .await
        .ok();
    assert_eq!(written["size_bytes"], size);
    assert_eq!(sandbox.stat("/tmp/large").await["size_bytes"], size);
    let back = sandbox.files_get("/content", "/tmp/large", &[]).await.expect(200);
    assert_eq!(back.headers["content-length"], size.to_string().as_str());
    assert!(back.body == content, "what comes out is what went in");
    let grown = server.peak_memory().saturating_sub(before);
    assert!(grown < 24 * MIB, "the server grew by {} MiB", grown / MIB);
}

fn members(archive: &[u8]) -> BTreeMap<String, (tar::EntryType, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in tar::Archive::new(archive).entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let kind = entry.header().entry_type();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        found.insert(name.trim_end_matches('/').to_owned(), (kind, content));
    }
    found
}

async fn a_tree_goes_out_as_tar_and_comes_in_again(server: &Server) {
    let sandbox = server.sandbox().await;
    let long = "n".repeat(150);
    let line = format!(
        "mkdir -p /tmp/src/sub/{long} && cd /tmp/src && printf one > one && printf two > sub/two && printf deep > \
         sub/{long}/deep && ln -s ../one sub/link && chmod 750 one && mkfifo pipe && : > empty"
    );
    sandbox.sh(&line).await.ok();
    let archive = sandbox.files_get("/tar", "/tmp/src", &[]).await.expect(200);
    assert_eq!(archive.headers["content-type"], "application/x-tar");
    let found = members(&archive.body);
    assert_eq!(found["src/one"].1, b"one", "names are relative to the parent");
    assert_eq!(found["src/sub/two"].1, b"two");
    assert_eq!(found[&format!("src/sub/{long}/deep")].1, b"deep");
    assert_eq!(found["src/sub/link"].0, tar::EntryType::Symlink);
    assert_eq!(found["src/empty"].1, b"");

    // The host's tar is the judge of the format, and the sandbox's own of what is unpacked.
    sandbox
        .files_put("/tar", "/tmp/copy", &[], archive.body)
        .await
        .expect(204);
    let compare = "cd /tmp/copy/src && cat one sub/two sub/n*/deep && readlink sub/link && stat -c %a one && id -un && \
                   stat -c %U one";
    let seen = sandbox.sh(compare).await.ok();
    let lines: Vec<&str> = seen.lines().collect();
    assert_eq!(lines[0], "onetwodeep../one");
    assert_eq!(lines[1], "750");
    assert_eq!(lines[2], lines[3], "what is unpacked belongs to the user");

    let single = sandbox.files_get("/tar", "/tmp/src/one", &[]).await.expect(200);
    assert_eq!(members(&single.body)["one"].1, b"one");
    let mut builder = tar::Builder::new(Vec::new());
    for number in 0..500 {
        let mut header = tar::Header::new_gnu();
        header.set_size(10);
        header.set_mode(0o644);
        builder
            .append_data(&mut header, format!("many/{number}"), &b"0123456789"[..])
            .unwrap();
    }
    sandbox
        .files_put("/tar", "/tmp/in", &[], builder.into_inner().unwrap())
        .await
        .expect(204);
    assert_eq!(sandbox.sh("cat /tmp/in/many/* | wc -c").await.ok().trim(), "5000");
}

async fn a_broken_upload_changes_nothing(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/kept", b"old").await;
    // Promises a megabyte, sends some of it, and hangs up.
    let path = sandbox.path("/files/content?path=/tmp/kept");
    let head = format!(
        "PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: 1000000\r\n\r\n",
        sandbox.client.key().unwrap()
    );
    {
        use tokio::io::AsyncWriteExt as _;
        let mut tcp = tokio::net::TcpStream::connect(sandbox.client.authority())
            .await
            .unwrap();
        tcp.write_all(head.as_bytes()).await.unwrap();
        tcp.write_all(&vec![b'x'; 200_000]).await.unwrap();
        tcp.flush().await.unwrap();
    }
    // The next write goes through the same sandbox; when it is done, the broken one was seen.
    sandbox.write("/tmp/other", b"x").await;
    assert_eq!(sandbox.read("/tmp/kept").await, b"old");
    atoll_proof::wait::until(
        "its temporary file is removed",
        std::time::Duration::from_secs(20),
        || async {
            let listed = sandbox.list("/tmp", 1).await;
            let left = listed
                .iter()
                .filter(|entry| entry["path"].as_str().unwrap().contains("kept"))
                .count();
            (left == 1).then_some(())
        },
    )
    .await;
    let torn = sandbox
        .files_put("/tar", "/tmp/torn", &[], vec![b'z'; 1000])
        .await;
    assert_eq!(torn.status, 400, "not an archive: {torn:?}");
    sandbox
        .files_post("/remove", &json!({"path": "/tmp/kept"}))
        .await
        .expect(204);
    sandbox.assert_works().await;
}

/// An upload that is refused at its beginning: the client is still sending, and hears why all the same.
async fn a_refusal_reaches_who_still_sends(server: &Server) {
    let sandbox = server.sandbox().await;
    for round in 0..20 {
        let body = vec![b'x'; 1 << 20];
        let request = sandbox.client.request(
            reqwest::Method::PUT,
            &sandbox.path("/files/content?path=/etc/passwd/x"),
        );
        match sandbox.client.try_send(request.body(body)).await {
            Ok(answer) => drop(answer.expect(400).error()),
            Err(error) => panic!(
                "round {round}: the refusal was lost: {}",
                atoll_proof::client::causes(&error)
            ),
        }
    }
}
