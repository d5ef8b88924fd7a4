//! The jail of an ordinary user: no root anywhere, one id, the template extracted; the limits hold where cgroups were
//! delegated.

use atoll_proof::{MIB, Options, Server, Tier, host, json, ordinary};

#[tokio::test]
async fn an_ordinary_user_has_jails_of_one_id() {
    let mut server = Server::start(Tier::Jail, Options::default().by_an_ordinary_user()).await;
    if let Some(why) = server.missing_tier().await {
        eprintln!("SKIPPED: this machine has no jail for ordinary users: {why}");
        return;
    }
    let sandbox = server
        .sandbox_with(&json!({"resources": {"memory_bytes": 256 * MIB}}))
        .await;
    // Nobody asked for a disk that there cannot be, and whoever does is told.
    let resources = &sandbox.get().await["resources"];
    assert_eq!(
        (&resources["disk_backing"], &resources["disk_bytes"]),
        (&json!("memory"), &json!(192 * MIB))
    );
    let request = server.request(&json!({"resources": {"disk_backing": "disk"}}));
    let refused = server.client().post("/v1/sandboxes", &request).await;
    let detail = refused.refused(400, "resources_out_of_range");
    assert!(detail["message"].as_str().unwrap().contains("root"), "{detail}");
    // Whoever is asked for, with that home and name.
    let who = sandbox
        .sh("id -u; pwd; echo $USER; wc -w < /proc/self/uid_map; awk '{print $3}' /proc/self/uid_map")
        .await
        .ok();
    let who: Vec<&str> = who.split_whitespace().collect();
    assert_eq!(who, ["0", "/home/user", "user", "3", "1"], "one line, for one id");
    let asked = sandbox
        .run_with(json!({"cmd": "id -u; echo $HOME", "user": "root"}))
        .await;
    assert_eq!(asked.ok(), "0\n/root\n");
    sandbox.write("/home/user/made", b"here").await;
    assert_eq!(
        sandbox
            .sh("cat made; rm made; python3 -c 'print(6 * 7)'")
            .await
            .ok(),
        "here42\n"
    );
    // From outside nothing of it is anybody else's.
    for pid in host::cgroup_processes(server.cgroup()) {
        assert_eq!(host::uid(pid), Some(ordinary::USER));
    }
    // What it was not given it does not have.
    for line in [
        "mount -t tmpfs none /mnt",
        "mknod /tmp/null c 1 3",
        "echo 1 > /proc/sys/kernel/panic",
    ] {
        assert_ne!(sandbox.sh(line).await.code, Some(0), "{line}");
    }
    let hog = sandbox
        .exec(&json!({"argv": ["python3", "-c", "x = bytearray(1 << 30)"]}))
        .await;
    assert_eq!(hog.error()["code"], "sandbox_out_of_memory", "{hog:?}");

    let other = server.sandbox().await;
    let command = other
        .background("echo before; while [ ! -e /tmp/go ]; do sleep 0.01; done; echo after")
        .await;
    other.until_logged(&command, "before").await;
    server.kill_9();
    server.start_again().await;
    let other = server.again(&other);
    other.write("/tmp/go", b"").await;
    assert!(other.until_logged(&command, "after").await.contains("before"));
    server.finish().await;
}
