//! Files: look, list, change, and names of any kind.

use std::collections::BTreeSet;

use atoll_proof::{Server, Value, from_base64, json, on_every_tier, to_base64};

on_every_tier!(
    a_file_is_written_read_and_described,
    writing_can_replace_append_or_insist_on_new,
    a_file_is_replaced_as_a_whole,
    directories_are_made_listed_renamed_and_removed,
    modes_owners_and_links_are_set,
    names_need_not_be_text,
    ten_thousand_files_are_listed,
    paths_are_resolved_as_inside,
    what_goes_wrong_is_said,
    content_and_commands_see_the_same_files,
    a_named_user_may_what_they_may,
);

fn names(entries: &[Value]) -> BTreeSet<String> {
    entries
        .iter()
        .map(|entry| entry["path"].as_str().unwrap().to_owned())
        .collect()
}

async fn a_file_is_written_read_and_described(server: &Server) {
    let sandbox = server.sandbox().await;
    let content = b"line one\nline two\n\x00\xff";
    let written = sandbox.write("/tmp/deep/er/file.bin", content).await;
    assert_eq!(
        (&written["kind"], &written["size_bytes"]),
        (&json!("file"), &json!(content.len()))
    );
    assert_eq!(sandbox.read("/tmp/deep/er/file.bin").await, content);
    let stat = sandbox.stat("/tmp/deep/er/file.bin").await;
    assert_eq!(stat["path"], "/tmp/deep/er/file.bin");
    assert_eq!(stat["mode"], "0644");
    let user = sandbox.sh("id -un; id -u").await.ok();
    let mut user = user.lines();
    assert_eq!(
        stat["owner"].as_str(),
        user.next(),
        "what is created belongs to the template's user"
    );
    assert_eq!(stat["uid"].to_string(), user.next().unwrap());
    assert!(stat["modified_at"].as_str().unwrap().ends_with('Z'));

    sandbox.write("relative.txt", b"home").await;
    assert_eq!(
        sandbox.sh("cat ~/relative.txt").await.ok(),
        "home",
        "a relative path starts at the user's home"
    );
    sandbox.write("/tmp/empty", b"").await;
    assert_eq!(sandbox.read("/tmp/empty").await, b"");
}

async fn writing_can_replace_append_or_insist_on_new(server: &Server) {
    let sandbox = server.sandbox().await;
    let put = |query: Vec<(&'static str, &'static str)>, content: &'static str| {
        let sandbox = sandbox.clone();
        async move {
            sandbox
                .files_put("/content", "/tmp/f", &query, content.into())
                .await
        }
    };
    put(vec![("write", "create"), ("mode", "0600")], "one").await.ok();
    put(vec![("write", "create")], "two")
        .await
        .refused(409, "already_exists");
    put(vec![("write", "append")], "+two").await.ok();
    assert_eq!(sandbox.read("/tmp/f").await, b"one+two");
    put(vec![], "three").await.ok();
    assert_eq!(sandbox.read("/tmp/f").await, b"three");
    assert_eq!(
        sandbox.stat("/tmp/f").await["mode"],
        "0600",
        "replacing keeps the mode"
    );
    let missing = sandbox
        .files_put(
            "/content",
            "/tmp/no/where",
            &[("parents", "false")],
            b"x".to_vec(),
        )
        .await;
    assert_eq!(missing.status, 404, "{missing:?}");
    let owned = sandbox
        .files_put("/content", "/tmp/roots", &[("user", "root")], b"x".to_vec())
        .await
        .ok();
    assert_eq!(owned["owner"], "root");
}

/// Whoever reads meanwhile sees the old content or the new one, never a mixture or nothing.
async fn a_file_is_replaced_as_a_whole(server: &Server) {
    let sandbox = server.sandbox().await;
    let content = |letter: u8| vec![letter; 300_000];
    sandbox.write("/tmp/whole", &content(b'a')).await;
    let look =
        "for _ in range(20):\n  seen = open('/tmp/whole', 'rb').read()\n  print(len(set(seen)), len(seen))\n";
    sandbox.write("/tmp/look.py", look.as_bytes()).await;
    let watcher = sandbox
        .background("while [ ! -e /tmp/stop ]; do python3 -c \"$(cat /tmp/look.py)\"; done")
        .await;
    for round in 0..10 {
        sandbox.write("/tmp/whole", &content(b'a' + round)).await;
    }
    sandbox.write("/tmp/stop", b"").await;
    sandbox.until_ended(&watcher).await;
    for line in sandbox.logs(&watcher).await.lines() {
        assert_eq!(line, "1 300000", "torn");
    }
    let left = sandbox.list("/tmp", 1).await;
    assert_eq!(
        names(&left).iter().filter(|name| name.contains("whole")).count(),
        1,
        "no temporary file is left"
    );
}

async fn directories_are_made_listed_renamed_and_removed(server: &Server) {
    let sandbox = server.sandbox().await;
    let made = sandbox
        .files_post("/mkdir", &json!({"path": "/tmp/tree/a/b", "mode": "0750"}))
        .await
        .ok();
    assert_eq!(made["created"], true);
    let again = sandbox
        .files_post("/mkdir", &json!({"path": "/tmp/tree/a/b"}))
        .await
        .ok();
    assert_eq!(again["created"], false);
    sandbox.write("/tmp/tree/one", b"1").await;
    sandbox.write("/tmp/tree/a/two", b"22").await;
    sandbox.write("/tmp/tree/a/b/three", b"333").await;

    let flat = sandbox.list("/tmp/tree", 1).await;
    assert_eq!(
        names(&flat),
        BTreeSet::from(["/tmp/tree/one".to_owned(), "/tmp/tree/a".to_owned()])
    );
    let deep = sandbox.list("/tmp/tree", 3).await;
    assert_eq!(deep.len(), 5);
    let three = deep
        .iter()
        .find(|entry| entry["path"] == "/tmp/tree/a/b/three")
        .unwrap();
    assert_eq!(
        (&three["depth"], &three["size_bytes"], &three["kind"]),
        (&json!(3), &json!(3), &json!("file"))
    );

    let rename = json!({"path": "/tmp/tree/a", "to": "/tmp/tree/z"});
    sandbox.files_post("/rename", &rename).await.expect(204);
    assert_eq!(sandbox.read("/tmp/tree/z/b/three").await, b"333");
    let full = sandbox.files_post("/remove", &json!({"path": "/tmp/tree"})).await;
    assert!(
        [400, 409].contains(&full.status),
        "a directory needs `recursive`: {full:?}"
    );
    sandbox
        .files_post("/remove", &json!({"path": "/tmp/tree/one"}))
        .await
        .expect(204);
    sandbox
        .files_post("/remove", &json!({"path": "/tmp/tree", "recursive": true}))
        .await
        .expect(204);
    sandbox
        .files_get("/stat", "/tmp/tree", &[])
        .await
        .refused(404, "not_found_in_sandbox");
}

async fn modes_owners_and_links_are_set(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/target", b"content").await;
    sandbox
        .files_post("/chmod", &json!({"path": "/tmp/target", "mode": "4711"}))
        .await
        .expect(204);
    assert_eq!(sandbox.stat("/tmp/target").await["mode"], "4711");
    sandbox
        .files_post(
            "/chown",
            &json!({"path": "/tmp/target", "owner": "nobody:nogroup"}),
        )
        .await
        .expect(204);
    let stat = sandbox.stat("/tmp/target").await;
    assert_eq!(
        (&stat["owner"], &stat["group"]),
        (&json!("nobody"), &json!("nogroup"))
    );
    sandbox
        .files_post("/chown", &json!({"path": "/tmp/target", "owner": "1234:4321"}))
        .await
        .expect(204);
    let stat = sandbox.stat("/tmp/target").await;
    assert_eq!(
        (&stat["uid"], &stat["gid"], &stat["owner"]),
        (&json!(1234), &json!(4321), &Value::Null)
    );

    sandbox
        .files_post("/symlink", &json!({"path": "/tmp/link", "target": "target"}))
        .await
        .expect(204);
    let link = sandbox.stat("/tmp/link").await;
    assert_eq!(
        (&link["kind"], &link["target"]),
        (&json!("symlink"), &json!("target")),
        "stat does not follow"
    );
    assert_eq!(sandbox.read("/tmp/link").await, b"content", "reading does");
    sandbox
        .files_post("/symlink", &json!({"path": "/tmp/link", "target": "x"}))
        .await
        .refused(409, "already_exists");
    for bad in ["rwx", "99999", ""] {
        sandbox
            .files_post("/chmod", &json!({"path": "/tmp/target", "mode": bad}))
            .await
            .expect(400)
            .error();
    }
    sandbox
        .files_post("/chown", &json!({"path": "/tmp/target", "owner": "nosuchuser"}))
        .await
        .error();
}

async fn names_need_not_be_text(server: &Server) {
    let sandbox = server.sandbox().await;
    let name = b"/tmp/odd/\xff\xfe \n'\"\\$(x)";
    sandbox.write(name, b"odd").await;
    assert_eq!(sandbox.read(name).await, b"odd");
    let listed = sandbox.list("/tmp/odd", 1).await;
    assert_eq!(listed.len(), 1);
    assert_eq!(from_base64(listed[0]["path_base64"].as_str().unwrap()), name);
    assert_eq!(
        sandbox.sh("ls /tmp/odd | wc -c").await.ok().trim(),
        (name.len() - 9 + 1).to_string()
    );

    let to = b"/tmp/odd/\x80new";
    let rename = json!({"path_base64": to_base64(name), "to_base64": to_base64(to)});
    sandbox.files_post("/rename", &rename).await.expect(204);
    assert_eq!(sandbox.read(to).await, b"odd");
    sandbox
        .files_post("/remove", &json!({"path_base64": to_base64(to)}))
        .await
        .expect(204);
    sandbox.write("/tmp/grün/日本語.txt", "☃".as_bytes()).await;
    assert_eq!(sandbox.sh("cat /tmp/grün/日本語.txt").await.ok(), "☃");
    // Raw bytes in a query would silently name another file.
    let raw = sandbox
        .client
        .get(&sandbox.path("/files/stat?path=%2Ftmp%2F%ff"))
        .await;
    raw.refused(400, "invalid_query");
}

async fn ten_thousand_files_are_listed(server: &Server) {
    let sandbox = server.sandbox().await;
    let script = "import os; os.mkdir('/tmp/many'); [open(f'/tmp/many/file-{i:05}', 'w').close() for i in range(10000)]";
    sandbox.run(&["python3", "-c", script]).await.ok();
    let listed = sandbox.list("/tmp/many", 1).await;
    let names = names(&listed);
    assert_eq!((listed.len(), names.len()), (10_000, 10_000));
    assert!(names.contains("/tmp/many/file-00000") && names.contains("/tmp/many/file-09999"));
    sandbox
        .files_post("/remove", &json!({"path": "/tmp/many", "recursive": true}))
        .await
        .expect(204);
    assert_eq!(sandbox.sh("ls /tmp | grep -c many").await.stdout.trim(), "0");
}

/// `..` and symlinks mean what they mean to a process inside: the root of the sandbox is the end of the world.
async fn paths_are_resolved_as_inside(server: &Server) {
    let sandbox = server.sandbox().await;
    let inside = sandbox
        .root_sh("cat /etc/hostname; cat /etc/passwd | sha256sum")
        .await
        .ok();
    let passwd = sandbox.read("/../../../../../../etc/passwd").await;
    let host = std::fs::read("/etc/passwd").unwrap();
    assert_ne!(passwd, host, "the host's file must never be seen");
    let same = sandbox
        .run_with(json!({"argv": ["sha256sum"], "stdin_base64": to_base64(&passwd)}))
        .await
        .ok();
    assert!(inside.contains(same.split_whitespace().next().unwrap()));
    sandbox
        .sh("mkdir -p /tmp/a/b; ln -s / /tmp/a/root; ln -s /tmp/a/b /tmp/sym")
        .await
        .ok();
    assert_eq!(sandbox.read("/tmp/a/root/etc/passwd").await, passwd);
    sandbox.write("/tmp/sym/../x", b"beside b").await;
    assert_eq!(sandbox.sh("cat /tmp/a/x").await.ok(), "beside b");
    sandbox.sh("ln -s loop /tmp/loop").await.ok();
    sandbox.files_get("/content", "/tmp/loop", &[]).await.error();
}

async fn what_goes_wrong_is_said(server: &Server) {
    let sandbox = server.sandbox().await;
    let get = |path: &'static str| sandbox.files_get("/content", path, &[]);
    let missing = get("/no/such/file").await;
    let detail = missing.refused(404, "not_found_in_sandbox");
    assert!(
        detail["message"].as_str().unwrap().contains("/no/such/file"),
        "{detail}"
    );
    get("/etc").await.refused(400, "is_a_directory");
    let under_file = sandbox.files_get("", "/etc/passwd", &[]).await;
    assert_eq!(under_file.status, 400, "{under_file:?}");
    let under_file = sandbox
        .files_put("/content", "/etc/passwd/x", &[], b"x".to_vec())
        .await;
    assert_eq!(under_file.status, 400, "{under_file:?}");
    let special = get("/dev/zero").await;
    assert_eq!(special.status, 400, "a device would never end: {special:?}");
    let long = format!("/tmp/{}", "x".repeat(5000));
    sandbox
        .files_put("/content", &long, &[], b"x".to_vec())
        .await
        .expect(400)
        .error();
    for query in [
        "",
        "?path=",
        "?path=/a&path_base64=YQ==",
        "?path=/etc&colour=red",
        "?path_base64=%25",
    ] {
        let refused = sandbox
            .client
            .get(&sandbox.path(&format!("/files/stat{query}")))
            .await;
        assert_eq!(refused.status, 400, "{query}: {refused:?}");
        refused.error();
    }
    let nobody = sandbox
        .files_get("/stat", "/tmp", &[("user", "nosuchuser")])
        .await;
    assert!((400..500).contains(&nobody.status), "{nobody:?}");
    sandbox.assert_works().await;
}

async fn content_and_commands_see_the_same_files(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox
        .sh(
            "mkdir /tmp/w && cd /tmp/w && git init -q . && echo hello > f && git add f && \
                git -c user.name=n -c user.email=e@x commit -qm first",
        )
        .await
        .ok();
    assert!(
        sandbox
            .read("/tmp/w/.git/HEAD")
            .await
            .starts_with(b"ref: refs/heads/")
    );
    sandbox.write("/tmp/w/f", b"changed\n").await;
    assert_eq!(
        sandbox.sh("cd /tmp/w && git status --porcelain").await.ok(),
        " M f\n"
    );
    let process = sandbox.read("/proc/self/cmdline").await;
    assert!(
        !process.is_empty(),
        "files in /proc do not know their size, and are read all the same"
    );
}

/// Whoever a call names acts, with the permissions that they have inside; whoever names nobody owns the sandbox.
async fn a_named_user_may_what_they_may(server: &Server) {
    let sandbox = server.sandbox().await;
    let name = sandbox.sh("id -un").await.ok();
    let user = name.trim();
    assert_ne!(user, "root", "the template has a user of its own");
    let root = [("user", "root")];
    sandbox
        .files_put("/content", "/srv/closed/secret", &root, b"s".to_vec())
        .await
        .ok();
    for body in [
        json!({"path": "/srv/closed", "mode": "0700", "user": "root"}),
        json!({"path": "/srv/closed/secret", "mode": "0600", "user": "root"}),
    ] {
        sandbox.files_post("/chmod", &body).await.expect(204);
    }
    sandbox
        .sh("ln -s /srv/closed/secret ~/way; mkdir ~/own")
        .await
        .ok();
    let theirs = [("user", user)];
    for (route, path) in [
        ("/content", "/srv/closed/secret"),
        ("/content", "way"),
        ("/stat", "/srv/closed/secret"),
        ("", "/srv/closed"),
        ("/watch", "/srv/closed"),
        ("/tar", "/srv/closed"),
    ] {
        let answer = sandbox.files_get(route, path, &theirs).await;
        answer.refused(403, "permission_denied_in_sandbox");
    }
    for path in ["/srv/closed/new", "/srv/new", "way", "/etc/passwd"] {
        let answer = sandbox.files_put("/content", path, &theirs, b"x".to_vec()).await;
        answer.refused(403, "permission_denied_in_sandbox");
    }
    for (route, body) in [
        ("/mkdir", json!({"path": "/srv/closed/new"})),
        ("/rename", json!({"path": "/srv/closed/secret", "to": "own/s"})),
        ("/remove", json!({"path": "/srv/closed", "recursive": true})),
        ("/chmod", json!({"path": "/srv/closed", "mode": "0777"})),
        ("/chown", json!({"path": "/srv/closed", "owner": user})),
        ("/symlink", json!({"path": "/srv/closed/new", "target": "x"})),
    ] {
        let mut body = body;
        body["user"] = json!(user);
        let answer = sandbox.files_post(route, &body).await;
        answer.refused(403, "permission_denied_in_sandbox");
    }
    // What is theirs they change, and it stays theirs.
    let made = sandbox
        .files_put("/content", "own/file", &theirs, b"x".to_vec())
        .await
        .ok();
    assert_eq!(made["owner"], json!(user));
    // Nobody named: the owner of the sandbox, to whom the agent listens as before.
    assert_eq!(sandbox.read("/srv/closed/secret").await, b"s");
    sandbox.write("/srv/closed/new", b"n").await;
    assert_eq!(sandbox.root_sh("id -u").await.ok(), "0\n");
    // An empty name is the template's user, not root.
    sandbox
        .files_get("/content", "/srv/closed/secret", &[("user", "")])
        .await
        .refused(403, "permission_denied_in_sandbox");
    let ran = sandbox.run_with(json!({"argv": ["id", "-un"], "user": ""})).await;
    assert_eq!(ran.ok(), name);
}
