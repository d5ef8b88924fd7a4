//! Create, look, list, extend, kill.

use std::collections::BTreeSet;

use atoll_proof::{MIB, Server, Value, json, on_every_tier};

on_every_tier!(
    a_sandbox_is_what_was_asked_for,
    killing_leaves_a_record_and_nothing_else,
    lists_are_filtered_and_paged,
    an_idempotency_key_finds_the_first_sandbox,
    a_deadline_can_be_moved,
    labels_times_and_limits_can_be_changed,
    a_name_stands_for_the_id_of_the_one_that_has_it,
    whoever_wants_the_sandbox_of_a_name_gets_the_one_that_has_it,
    the_environment_is_given_to_every_command,
    many_at_once_all_run,
    the_agent_is_small,
    the_strongest_wall_is_not_the_only_answer,
);

async fn a_sandbox_is_what_was_asked_for(server: &Server) {
    let asked = json!({
        "resources": {"cpu_millis": 500, "memory_bytes": 256 * MIB, "disk_bytes": 64 * MIB, "pids": 64},
        "labels": {"team": "proof", "name": "größe"},
        "timeout_ms": 120_000,
        "idle": {"after_ms": 60_000},
    });
    let answer = server
        .client()
        .post("/v1/sandboxes", &server.request(&asked))
        .await
        .expect(201);
    let created = answer.json();
    let location = answer
        .headers
        .get("location")
        .and_then(|value| value.to_str().ok());
    assert_eq!(
        location,
        Some(format!("/v1/sandboxes/{}", created["id"].as_str().unwrap()).as_str())
    );

    assert_eq!(created["state"], "running");
    assert_eq!(created["isolation"], server.tier.name());
    assert_eq!(created["tenant_boundary"], server.tier.is_tenant_boundary());
    assert_eq!(created["template"], "base");
    assert_eq!(created["labels"], asked["labels"]);
    for (name, value) in asked["resources"].as_object().unwrap() {
        assert_eq!(&created["resources"][name], value, "{name}");
    }
    assert_eq!(created["timeout_ms"], 120_000);
    assert_eq!(created["idle"], json!({"after_ms": 60_000, "action": "kill"}));
    assert!(created["instance"].as_str().unwrap().starts_with("ins_"));
    assert!(created["deadline"].as_str().unwrap() > created["created_at"].as_str().unwrap());
    assert_eq!(
        (&created["ended_at"], &created["end"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(
        created.get("env"),
        None,
        "an environment may hold secrets and is not shown"
    );

    let sandbox = atoll_proof::Sandbox::of(server.client(), &created);
    assert_eq!(sandbox.get().await, created);
    sandbox.assert_works().await;
}

async fn killing_leaves_a_record_and_nothing_else(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.background("sleep 1000").await;
    assert!(!server.held().is_nothing(), "a running sandbox holds something");
    let ended = sandbox.kill().await;
    assert_eq!(ended["state"], "deleted");
    assert_eq!(ended["end"]["reason"], "killed");
    assert!(
        ended["ended_at"].is_string() && ended["instance"].is_null(),
        "{ended}"
    );
    // The answer came after everything was gone, so there is nothing to wait for but the kernel's bookkeeping.
    server.assert_nothing_held().await;

    assert_eq!(
        sandbox.kill().await,
        ended,
        "killing what is gone succeeds and changes nothing"
    );
    assert_eq!(sandbox.get().await, ended);
    let refused = sandbox.exec(&json!({"cmd": "true"})).await;
    assert!([409, 410].contains(&refused.status), "{refused:?}");
    refused.error();
}

async fn lists_are_filtered_and_paged(server: &Server) {
    let mut made = Vec::new();
    for number in 0..5 {
        let parity = if number % 2 == 0 { "even" } else { "odd" };
        let labels = json!({"labels": {"parity": parity, "number": number.to_string()}});
        made.push(server.sandbox_with(&labels).await);
    }
    made[4].kill().await;
    let ids = |page: &Value| -> Vec<String> {
        page["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["id"].as_str().unwrap().to_owned())
            .collect()
    };
    let client = server.client();

    let live = ids(&client.get("/v1/sandboxes").await.ok());
    let newest_first: Vec<_> = made[..4].iter().rev().map(|sandbox| sandbox.id.clone()).collect();
    assert_eq!(live, newest_first, "those that live, newest first");

    let even = ids(&client.get("/v1/sandboxes?label=parity=even").await.ok());
    assert_eq!(even, [made[2].id.clone(), made[0].id.clone()]);
    let both = ids(&client
        .get("/v1/sandboxes?label=parity=even&label=number=2")
        .await
        .ok());
    assert_eq!(both, [made[2].id.clone()]);
    let deleted = ids(&client.get("/v1/sandboxes?state=deleted").await.ok());
    assert_eq!(deleted, [made[4].id.clone()]);
    let all = ids(&client.get("/v1/sandboxes?state=deleted&state=running").await.ok());
    assert_eq!(all.len(), 5);

    // Page by page, with one more made and one killed in between: nobody is seen twice, nobody who stays is missed.
    let mut seen = Vec::new();
    let mut cursor: Option<String> = None;
    for round in 0.. {
        let mut query = vec![("limit", "2")];
        query.extend(cursor.as_deref().map(|cursor| ("cursor", cursor)));
        let page = client.get_with("/v1/sandboxes", &query).await.ok();
        seen.extend(ids(&page));
        if round == 0 {
            server.sandbox().await;
            made[1].kill().await;
        }
        match page["next"].as_str() {
            Some(next) => cursor = Some(next.to_owned()),
            None => break,
        }
    }
    let distinct: BTreeSet<_> = seen.iter().collect();
    assert_eq!(distinct.len(), seen.len(), "{seen:?}");
    for stays in [&made[0], &made[2], &made[3]] {
        assert!(seen.contains(&stays.id), "{} was missed", stays.id);
    }
    client
        .get("/v1/sandboxes?cursor=nonsense")
        .await
        .expect(400)
        .error();
}

async fn an_idempotency_key_finds_the_first_sandbox(server: &Server) {
    let client = server.client();
    let create = |key: &'static str, body: Value| async move {
        let request = client.request(reqwest::Method::POST, "/v1/sandboxes").json(&body);
        client.send(request.header("idempotency-key", key)).await
    };
    let body = server.request(&json!({"labels": {"a": "b"}}));
    // At the same time, as a client that lost its connection would.
    let answers = futures_util::future::join_all((0..4).map(|_| create("once", body.clone()))).await;
    let ids: BTreeSet<String> = answers
        .into_iter()
        .map(|answer| answer.expect(201).json()["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_eq!(server.list(&[]).await.len(), 1);

    let other = create("once", server.request(&json!({"labels": {"a": "c"}}))).await;
    assert_eq!(other.expect(409).error()["code"], "idempotency_conflict");
    let second = create("twice", body).await.expect(201).json();
    assert!(!ids.contains(second["id"].as_str().unwrap()));

    // What could not be made is not found again as if it had been.
    let failing = server.request(&json!({"hooks": {"on_create": [{"argv": ["false"]}]}}));
    for _ in 0..2 {
        create("fails", failing.clone()).await.refused(502, "hook_failed");
    }
}

async fn a_deadline_can_be_moved(server: &Server) {
    let sandbox = server.sandbox_with(&json!({"timeout_ms": 60_000})).await;
    let before = sandbox.get().await["deadline"].as_str().unwrap().to_owned();
    let extended = sandbox
        .client
        .post(&sandbox.path("/extend"), &json!({"timeout_ms": 600_000}))
        .await
        .ok();
    assert!(
        extended["deadline"].as_str().unwrap() > before.as_str(),
        "{extended}"
    );
    assert_eq!(sandbox.get().await["deadline"], extended["deadline"]);
    let too_long = json!({"timeout_ms": 1000 * 24 * 3600 * 1000_u64});
    let refused = sandbox.client.post(&sandbox.path("/extend"), &too_long).await;
    let detail = refused.refused(400, "timeout_out_of_range");
    assert!(
        detail["message"].as_str().unwrap().contains("maximum"),
        "{detail}"
    );
    sandbox.kill().await;
    sandbox
        .client
        .post(&sandbox.path("/extend"), &json!({"timeout_ms": 60_000}))
        .await
        .refused(410, "sandbox_deleted");
}

async fn the_environment_is_given_to_every_command(server: &Server) {
    let sandbox = server
        .sandbox_with(&json!({"env": {"GREETING": "héllo\nworld", "EMPTY": ""}}))
        .await;
    let output = sandbox
        .sh("printf '%s|%s|%s' \"$GREETING\" \"${EMPTY-unset}\" \"${OTHER-unset}\"")
        .await;
    assert_eq!(output.ok(), "héllo\nworld||unset");
    let own = json!({"cmd": "printf '%s' \"$GREETING\"", "env": {"GREETING": "mine"}});
    assert_eq!(
        sandbox.run_with(own).await.ok(),
        "mine",
        "a command's own comes before the sandbox's"
    );
}

/// PID 1 takes at most 3 MB, also after it has carried megabytes and started programs.
async fn the_agent_is_small(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/large", &vec![b'x'; 8 << 20]).await;
    for _ in 0..10 {
        sandbox.sh("head -c 1000000 /tmp/large | wc -c").await.ok();
    }
    assert_eq!(sandbox.read("/tmp/large").await.len(), 8 << 20);
    // Buffers of a burst are given back after a while without one.
    let small = atoll_proof::wait::until(
        "the agent is small",
        std::time::Duration::from_secs(30),
        || async {
            // It rests when nobody has asked for two seconds, so this does not ask at once.
            tokio::time::sleep(std::time::Duration::from_secs(3)).await;
            let status = sandbox.root_sh("cat /proc/1/status").await.ok();
            let line = status.lines().find(|line| line.starts_with("VmRSS:"))?.to_owned();
            let kilobytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
            (kilobytes <= 3 * 1024).then_some(kilobytes)
        },
    )
    .await;
    assert!(small > 0);
}

async fn many_at_once_all_run(server: &Server) {
    let sandboxes = futures_util::future::join_all((0..8).map(|_| server.sandbox())).await;
    let names = sandboxes.iter().map(|sandbox| async {
        sandbox
            .sh(&format!("echo {} > /tmp/me && cat /tmp/me", sandbox.id))
            .await
            .ok()
    });
    for (sandbox, name) in sandboxes.iter().zip(futures_util::future::join_all(names).await) {
        assert_eq!(name.trim(), sandbox.id);
    }
    let info = server.client().get("/v1/info").await.ok();
    assert_eq!(info["running"], 8);
    let killed = futures_util::future::join_all(sandboxes.iter().map(atoll_proof::Sandbox::kill)).await;
    assert!(killed.iter().all(|sandbox| sandbox["state"] == "deleted"));
}

/// No hardware virtualization here: a floor of `microvm` is refused, with a reason and a way out, never lowered.
async fn the_strongest_wall_is_not_the_only_answer(server: &Server) {
    let info = server.client().get("/v1/info").await.ok();
    let tiers = info["tiers"].as_array().unwrap();
    assert_eq!(tiers.len(), 3, "{info}");
    for tier in tiers {
        assert_eq!(
            tier["tenant_boundary"],
            json!(tier["isolation"] != "jail"),
            "{tier}"
        );
        assert!(!tier["detail"].as_str().unwrap().is_empty(), "{tier}");
    }
    let works = |name: &str| {
        tiers
            .iter()
            .any(|tier| tier["isolation"] == json!(name) && tier["available"] == json!(true))
    };
    let mut refused_floors = vec![];
    if !works("microvm") {
        refused_floors.push("microvm");
        if !works("gvisor") {
            refused_floors.push("gvisor");
        }
    }
    for floor in refused_floors {
        let body = server.request(&json!({"isolation_floor": floor}));
        let detail = server
            .client()
            .post("/v1/sandboxes", &body)
            .await
            .refused(422, "isolation_unavailable");
        assert!(detail["message"].as_str().unwrap().contains(floor), "{detail}");
        let instead = format!("`{}`", server.tier.name());
        assert!(
            detail["hint"].as_str().unwrap().contains(&instead),
            "it names the strongest that works: {detail}"
        );
    }
    assert!(
        server
            .list(&["starting", "running", "deleting", "deleted", "failed"])
            .await
            .is_empty()
    );
}

async fn whoever_wants_the_sandbox_of_a_name_gets_the_one_that_has_it(server: &Server) {
    let client = server.client();
    let wanted = |more: Value| {
        let mut body = server.request(&json!({"name": "shared", "if_exists": "return"}));
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        body
    };
    let asked = wanted(json!({"auto_resume": true}));
    let wanting = (0..10).map(|_| client.post("/v1/sandboxes", &asked));
    let answers = futures_util::future::join_all(wanting).await;
    let made: Vec<_> = answers.iter().filter(|answer| answer.status == 201).collect();
    assert_eq!(made.len(), 1, "{answers:?}");
    let id = made[0].json()["id"].clone();
    for answer in &answers {
        assert!([200, 201].contains(&answer.status), "{answer:?}");
        assert_eq!(
            (&answer.json()["id"], &answer.json()["state"]),
            (&id, &json!("running"))
        );
    }
    // It is as it was made, awake, and there is one of it.
    let sandbox = atoll_proof::Sandbox::of(client, &answers[0].json());
    sandbox.write("/home/user/kept", b"kept").await;
    sandbox.ask("/pause", json!({})).await.ok();
    let found = client
        .post("/v1/sandboxes", &wanted(json!({"labels": {"not": "this"}})))
        .await
        .expect(200)
        .json();
    assert_eq!(
        (&found["id"], &found["state"], &found["labels"]),
        (&id, &json!("running"), &json!({}))
    );
    assert_eq!(sandbox.read("/home/user/kept").await, b"kept");
    assert_eq!(server.list(&[]).await.len(), 1);
    client
        .post("/v1/sandboxes", &wanted(json!({"if_exists": "fail"})))
        .await
        .refused(409, "name_taken");
    // Whoever may use one sandbox alone does not come by another by its name.
    let other = server.sandbox().await;
    let key = json!({"name": "one", "role": "member", "scopes": [format!("sandbox:{}", other.id)]});
    let key = client.post("/v1/keys", &key).await.expect(201).json();
    client
        .with_key(key["secret"].as_str())
        .post("/v1/sandboxes", &asked)
        .await
        .refused(403, "not_allowed");
    // What can be found has a name, and a run has a sandbox of its own.
    client
        .post("/v1/sandboxes", &server.request(&json!({"if_exists": "return"})))
        .await
        .refused(400, "contradicting_fields");
    client
        .post("/v1/run", &json!({"sandbox": asked, "command": {"cmd": "true"}}))
        .await
        .refused(400, "contradicting_fields");
    let made = server.atoll(&["create", "--name", "shared", "--if-exists", "return"]);
    assert_eq!(atoll_proof::printed(&made).trim(), id.as_str().unwrap());
    sandbox.kill().await;
    let next = client.post("/v1/sandboxes", &asked).await.expect(201).json();
    assert_ne!(next["id"], id);
}

async fn a_name_stands_for_the_id_of_the_one_that_has_it(server: &Server) {
    let client = server.client();
    let asked = server.request(&json!({"name": "agent-7"}));
    let wanting = (0..4).map(|_| client.post("/v1/sandboxes", &asked));
    let answers = futures_util::future::join_all(wanting).await;
    let (made, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 201);
    assert_eq!((made.len(), refused.len()), (1, 3), "{refused:?}");
    for refused in refused {
        refused.refused(409, "name_taken");
    }
    let made = made[0].json();
    assert_eq!(made["name"], "agent-7");

    let by_name = |rest: &str| format!("/v1/sandboxes/agent-7{rest}");
    assert_eq!(client.get(&by_name("")).await.ok()["id"], made["id"]);
    let ran = client
        .post(&by_name("/exec"), &json!({"cmd": "echo hi"}))
        .await
        .ok();
    assert_eq!(ran["stdout"], "hi\n", "{ran}");
    client.post(&by_name("/pause"), &json!({})).await.ok();
    let resumed = client.post(&by_name("/resume"), &json!({})).await.ok();
    assert_eq!(
        (&resumed["id"], &resumed["name"]),
        (&made["id"], &json!("agent-7"))
    );
    let facts = client.get(&by_name("/facts")).await.ok();
    assert_eq!(facts["items"][0]["kind"], "sandbox.created");
    client
        .get("/v1/sandboxes/agent-8")
        .await
        .refused(404, "sandbox_not_found");
    client
        .get("/v1/sandboxes/sbx_agent")
        .await
        .refused(400, "invalid_path_parameter");

    let change = |body: Value| {
        let request = client
            .request(
                reqwest::Method::PATCH,
                &format!("/v1/sandboxes/{}", made["id"].as_str().unwrap()),
            )
            .json(&body);
        async move { client.send(request).await }
    };
    for wrong in ["Agent", "a_b", "-a", "", "abcdefghijkmnpqrstuv"] {
        change(json!({"name": wrong})).await.refused(400, "name_invalid");
    }
    assert_eq!(change(json!({"name": "agent-8"})).await.ok()["name"], "agent-8");
    let other = client.post("/v1/sandboxes", &asked).await.expect(201).json();
    change(json!({"name": "agent-7"}))
        .await
        .refused(409, "name_taken");
    // Free again with its end, at once.
    client.delete(&by_name("")).await.ok();
    client.get(&by_name("")).await.refused(404, "sandbox_not_found");
    assert_eq!(change(json!({"name": "agent-7"})).await.ok()["name"], "agent-7");
    let record = client
        .get(&format!("/v1/sandboxes/{}", other["id"].as_str().unwrap()))
        .await
        .ok();
    assert_eq!(
        (&record["state"], &record["name"]),
        (&json!("deleted"), &json!("agent-7"))
    );
    assert_eq!(change(json!({"name": null})).await.ok()["name"], Value::Null);
}

async fn labels_times_and_limits_can_be_changed(server: &Server) {
    let asked = json!({
        "resources": {"memory_bytes": 256 * MIB, "disk_bytes": 64 * MIB, "disk_backing": "memory"},
        "labels": {"stage": "draft", "team": "proof"},
        "idle": {"after_ms": 60_000},
        "timeout_ms": 120_000,
    });
    let sandbox = server.sandbox_with(&asked).await;
    let change = |body: Value| {
        let request = server
            .client()
            .request(reqwest::Method::PATCH, &sandbox.path(""))
            .json(&body);
        async move { server.client().send(request).await }
    };
    let before = server.client().get(&sandbox.path("")).await.ok();
    let changed = change(json!({
        "labels": {"stage": null, "reviewer": "ada"},
        "resources": {"memory_bytes": 768 * MIB, "pids": 99},
        "timeout_ms": 600_000, "on_timeout": "stop", "idle": null, "auto_resume": true, "retention_ms": 1_000_000,
    }))
    .await
    .ok();
    assert_eq!(changed["labels"], json!({"reviewer": "ada", "team": "proof"}));
    assert_eq!(changed["resources"]["memory_bytes"], 768 * MIB);
    assert_eq!(changed["resources"]["pids"], 99);
    assert_eq!(
        changed["resources"]["cpu_millis"],
        before["resources"]["cpu_millis"]
    );
    assert_eq!(
        (&changed["on_timeout"], &changed["idle"], &changed["auto_resume"]),
        (&json!("stop"), &Value::Null, &json!(true))
    );
    assert!(changed["deadline"].as_str() > before["deadline"].as_str());
    assert_eq!(server.client().get(&sandbox.path("")).await.ok(), changed);
    // Lists know the new labels, and the host the new limit: as much as this was too much before.
    let listed = server
        .client()
        .get_with("/v1/sandboxes", &[("label", "reviewer=ada")])
        .await
        .ok();
    assert_eq!(listed["items"].as_array().unwrap().len(), 1);
    let held = sandbox
        .run(&["python3", "-c", "print(len(b'x' * (450 << 20)))"])
        .await;
    assert_eq!(held.stdout.trim(), (450 << 20).to_string());

    // All or nothing, and nothing that a new sandbox could not have.
    for (body, code) in [
        (
            json!({"labels": {"x": "y"}, "timeout_ms": 1}),
            "timeout_out_of_range",
        ),
        (
            json!({"resources": {"memory_bytes": 1_u64 << 60}}),
            "resources_out_of_range",
        ),
        (
            json!({"resources": {"memory_bytes": 64 * MIB}}),
            "resources_out_of_range",
        ),
    ] {
        change(body).await.refused(400, code);
    }
    change(json!({"template": "other"})).await.expect(400);
    assert_eq!(server.client().get(&sandbox.path("")).await.ok(), changed);

    // At rest it can be changed too; what it is after that holds when it comes back.
    server
        .client()
        .post(&sandbox.path("/stop"), &json!({}))
        .await
        .ok();
    change(json!({"labels": {"reviewer": null}})).await.ok();
    let back = server
        .client()
        .post(&sandbox.path("/start"), &json!({}))
        .await
        .ok();
    assert_eq!(back["labels"], json!({"team": "proof"}));
    sandbox.kill().await;
    let gone = change(json!({"labels": {"a": "b"}})).await;
    assert!([409, 410].contains(&gone.status), "{gone:?}");
}
