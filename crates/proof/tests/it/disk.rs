//! Room for files: on disk unless somebody says otherwise, more than memory, with a limit that is an error and never the end.

use atoll_proof::{GIB, MIB, Sandbox, Server, json, on_every_tier};

on_every_tier!(
    a_sandbox_has_room_for_real_work,
    more_than_its_memory_fits,
    a_full_disk_is_an_error_also_below_tmp,
    files_come_back_where_they_were_not,
    large_files_are_kept_however_it_rests,
);

mod sizes {
    use super::*;

    on_every_tier!(with atoll_proof::Options::default().config(
        "[sandbox]\ncpu = 0.5\nmemory = \"300M\"\ndisk = \"2G\"\npids = 200\nmax_cpu = 2\nmax_memory = \"2G\"\nmax_disk = \"5G\"\n\
         [[pool]]\ntemplate = \"base\"\ncount = 1\n");
        the_operator_says_how_large_sandboxes_are);

    async fn the_operator_says_how_large_sandboxes_are(server: &Server) {
        server.until_pool_is_full().await;
        let usual = server.sandbox().await;
        let expected = json!({"cpu_millis": 500, "memory_bytes": 300 * MIB, "disk_bytes": 2 * GIB,
                              "disk_backing": "disk", "pids": 200});
        assert_eq!(usual.get().await["resources"], expected);
        // The pool is of that size, too.
        let facts = usual.facts().await;
        let started = facts.iter().find(|fact| fact["kind"] == "sandbox.started");
        assert_eq!(started.unwrap()["data"]["warm"], true);
        // What is not asked for stays as usual.
        let larger = server
            .sandbox_with(&json!({"resources": {"memory_bytes": GIB, "disk_bytes": 4 * GIB}}))
            .await;
        let mut expected = expected;
        expected["memory_bytes"] = json!(GIB);
        expected["disk_bytes"] = json!(4 * GIB);
        assert_eq!(larger.get().await["resources"], expected);
        assert!(room(&larger, "/").await > 3 * GIB);
        for (asked, word, most) in [
            (json!({"disk_bytes": 6 * GIB}), "disk", "5 GiB"),
            (json!({"memory_bytes": 3 * GIB}), "memory", "2 GiB"),
            (json!({"cpu_millis": 4000}), "cpu", "2 cores"),
        ] {
            let request = server.request(&json!({"resources": asked}));
            let refused = server.client().post("/v1/sandboxes", &request).await;
            let detail = refused.refused(400, "resources_out_of_range");
            let message = detail["message"].as_str().unwrap();
            assert!(message.contains(word) && message.contains(most), "{message}");
        }
    }
}

/// The bytes of a filesystem, as programs see it.
async fn room(sandbox: &Sandbox, path: &str) -> u64 {
    let said = sandbox.run(&["stat", "-f", "-c", "%b %S", path]).await.ok();
    let numbers: Vec<u64> = said
        .split_whitespace()
        .map(|number| number.parse().unwrap())
        .collect();
    numbers[0] * numbers[1]
}

async fn a_sandbox_has_room_for_real_work(server: &Server) {
    let sandbox = server.sandbox().await;
    let resources = &sandbox.get().await["resources"];
    assert_eq!(resources["cpu_millis"], 2000);
    assert_eq!(
        (&resources["memory_bytes"], &resources["disk_bytes"]),
        (&json!(GIB), &json!(10 * GIB))
    );
    assert_eq!(resources["disk_backing"], "disk");
    for path in ["/", "/tmp", "/var/tmp", "/home/user"] {
        let room = room(&sandbox, path).await;
        assert!((9 * GIB..=10 * GIB).contains(&room), "{path} has {room} bytes");
    }
    // Whoever is in the sandbox may write where guides write, without sudo.
    let line =
        "touch /tmp/x /code/x /usr/local/bin/x /usr/local/lib/x && stat -c '%a %U' /tmp /code && id -un";
    assert_eq!(sandbox.sh(line).await.ok(), "1777 root\n777 user\nuser\n");
    // Nothing is taken before it is used.
    let metrics = sandbox.client.get(&sandbox.path("/metrics")).await.ok();
    assert!(metrics["disk_bytes"].as_u64().unwrap() < 64 * MIB, "{metrics}");
}

/// Written, synced, mapped and read again: what is in the page cache is not held against a sandbox.
async fn more_than_its_memory_fits(server: &Server) {
    let sandbox = server
        .sandbox_with(&json!({"resources": {"memory_bytes": 256 * MIB, "disk_bytes": 2 * GIB}}))
        .await;
    let write = "head -c 500M /dev/urandom > big && sync && cp big /tmp/copy && sha256sum < big && sha256sum < /tmp/copy";
    let sums = sandbox
        .run_with(json!({"cmd": write, "timeout_ms": 240_000}))
        .await
        .ok();
    let sums: Vec<&str> = sums.lines().collect();
    assert_eq!(sums[0], sums[1]);
    let map = "import mmap, os\n\
               with open('mapped', 'w+b') as file:\n\
               \x20   file.truncate(400 << 20)\n\
               \x20   with mmap.mmap(file.fileno(), 0) as memory:\n\
               \x20       for at in range(0, len(memory), 4096): memory[at:at + 8] = at.to_bytes(8, 'little')\n\
               \x20       memory.flush()\n\
               with open('mapped', 'rb') as file:\n\
               \x20   for at in range(0, 400 << 20, 4096):\n\
               \x20       assert int.from_bytes(file.read(4096)[:8], 'little') == at\n\
               print('whole')";
    let mapped = sandbox
        .run_with(json!({"argv": ["python3", "-c", map], "timeout_ms": 240_000}))
        .await;
    assert_eq!(mapped.ok(), "whole\n");
    sandbox.assert_works().await;
}

async fn a_full_disk_is_an_error_also_below_tmp(server: &Server) {
    let sandbox = server
        .sandbox_with(&json!({"resources": {"memory_bytes": 256 * MIB, "disk_bytes": 400 * MIB}}))
        .await;
    let full = sandbox
        .sh("head -c 1G /dev/zero > /tmp/fill; echo ended with $?; stat -c %s /tmp/fill; echo x > ~/more")
        .await;
    assert_eq!(full.stderr.matches("No space left").count(), 2, "{full:?}");
    let size: u64 = full.stdout.lines().nth(1).unwrap().parse().unwrap();
    assert!((300 * MIB..=400 * MIB).contains(&size), "{full:?}");
    assert_eq!(
        sandbox
            .sh("rm /tmp/fill; head -c 200M /dev/zero > more && echo fits")
            .await
            .ok(),
        "fits\n"
    );
    assert_eq!(sandbox.state().await, "running");
}

/// What was saved of files is an archive, so it does not matter where they lay.
async fn files_come_back_where_they_were_not(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox
        .sh("echo here > /tmp/kept; echo there > ~/kept")
        .await
        .ok();
    let taken = sandbox
        .ask("/snapshots", json!({"name": "files", "kind": "filesystem"}))
        .await;
    taken.expect(201);
    let copy = server.sandbox_with(&json!({"template": "files"})).await;
    assert_eq!(copy.sh("cat /tmp/kept ~/kept").await.ok(), "here\nthere\n");
}

mod little_left {
    use super::*;

    on_every_tier!(with atoll_proof::Options::default().config("min_free_disk = \"1000000G\"");
        nobody_new_writes_when_little_is_left);

    async fn nobody_new_writes_when_little_is_left(server: &Server) {
        let request = server.request(&json!({}));
        let refused = server.client().post("/v1/sandboxes", &request).await;
        let detail = refused.refused(503, "server_disk_full");
        assert!(
            detail["message"].as_str().unwrap().contains("min_free_disk"),
            "{detail}"
        );
        // What needs no disk is served.
        let in_memory = server
            .sandbox_with(&json!({"resources": {"disk_backing": "memory"}}))
            .await;
        in_memory.assert_works().await;
        let resources = &in_memory.get().await["resources"];
        assert_eq!(
            resources["disk_bytes"],
            768 * MIB,
            "as much as fits into its memory"
        );
    }
}

/// More than its memory, with a hole, through every way of resting.
async fn large_files_are_kept_however_it_rests(server: &Server) {
    let sandbox = server
        .sandbox_with(&json!({"resources": {"memory_bytes": 256 * MIB, "disk_bytes": 3 * GIB}}))
        .await;
    let look = "sha256sum < large && cksum < /tmp/sparse";
    let make = format!(
        "head -c 300M /dev/urandom > large && truncate -s 300M /tmp/sparse && echo end >> /tmp/sparse && {look}"
    );
    let run = async |sandbox: &Sandbox, line: &str| -> String {
        let command = json!({"cmd": line, "timeout_ms": 240_000});
        sandbox.run_with(command).await.ok()
    };
    let made = run(&sandbox, &make).await;
    for (rest, back) in [("/pause", "/resume"), ("/stop", "/start")] {
        sandbox.ask(rest, json!({})).await.ok();
        sandbox.ask(back, json!({})).await.ok();
        assert_eq!(run(&sandbox, look).await, made, "{rest}");
    }
    sandbox
        .ask("/snapshots", json!({"name": "large"}))
        .await
        .expect(201);
    sandbox.kill().await;
    let copy = server.sandbox_with(&json!({"template": "large"})).await;
    assert_eq!(run(&copy, look).await, made, "from a snapshot");
}
