//! Attacks on the guest agent, PID 1 of the sandbox: signals, ptrace, and its channel to the host.

use std::time::Duration;

use atoll_guest_protocol::{
    CommandState, EntryKind, FileEntry, FileStat, FrameKind, MAX_PAYLOAD, Message, Welcome, encode,
    encode_into,
};
use atoll_proof::random::Random;
use atoll_proof::wait::within;
use atoll_proof::{Sandbox, Server, Tier, json, on_every_tier};

use crate::Scene;

on_every_tier!(
    the_agent_is_killed_by_the_user,
    everything_is_killed,
    the_agent_is_traced,
    a_stopped_agent_has_no_veto,
    the_agents_memory_is_off_limits_to_the_user,
    garbage_in_the_channel,
    forged_frames_in_the_channel,
    the_channel_is_drained,
);

async fn the_agent_is_killed_by_the_user(server: &Server) {
    let scene = Scene::new(server).await;
    let refused = scene.attacker.sh("kill -9 1; kill -STOP 1; kill -TERM 1").await;
    assert!(refused.stderr.contains("not permitted"), "{refused:?}");
    scene.assert_attacker_works().await;
    // As root, with every signal there is. It may kill the sandbox; it may not leave it hanging.
    scene
        .attack(&json!({"argv": ["bash", "-c", "for s in $(seq 1 64); do kill -$s 1; done"], "user": "root"}))
        .await;
    assert_answers_or_ends(&scene.attacker).await;
    scene.assert_unharmed().await;
}

/// Either it answers, or it says what became of it; within a time that a person would wait. Whether it works.
async fn assert_answers_or_ends(sandbox: &Sandbox) -> bool {
    let answer = within(
        "a damaged sandbox answers",
        Duration::from_secs(60),
        sandbox.exec(&json!({"cmd": "echo alive"})),
    )
    .await;
    match answer.status {
        200 => assert_eq!(answer.json()["stdout"], "alive\n"),
        status => {
            answer.error();
            assert!(
                [400, 409, 410, 429, 502, 503, 504].contains(&status),
                "{answer:?}"
            );
        }
    }
    answer.status == 200
}

async fn everything_is_killed(server: &Server) {
    let scene = Scene::new(server).await;
    let background = scene.attacker.background("sleep 1000").await;
    for user in ["nobody", "root"] {
        scene
            .attack(&json!({"argv": ["bash", "-c", "kill -9 -1"], "user": user}))
            .await;
        scene.assert_attacker_works().await;
    }
    scene.attack(&json!({"argv": ["bash", "-c", "kill -9 -1"]})).await;
    scene.assert_attacker_works().await;
    let ended = scene.attacker.until_ended(&background).await;
    assert_eq!(
        (&ended["state"], &ended["signal"]),
        (&json!("signaled"), &json!(9)),
        "its own are killed, and it is told"
    );
    scene.assert_unharmed().await;
}

const PTRACE: &str = r#"
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
    if libc.ptrace(request, 1, None, None) == 0:
        print('attached', flush=True)
        if request == 0x4206:
            libc.ptrace(0x4207, 1, None, None)  # PTRACE_INTERRUPT
        time.sleep(1000)
    print('refused', ctypes.get_errno(), flush=True)
"#;

async fn the_agent_is_traced(server: &Server) {
    let scene = Scene::new(server).await;
    scene.attacker.write("/tmp/ptrace.py", PTRACE.as_bytes()).await;
    let output = scene.attacker.run(&["python3", "/tmp/ptrace.py"]).await;
    assert_eq!(
        output.stdout.matches("refused").count(),
        2,
        "an ordinary user: {output:?}"
    );
    // Root of a sandbox owns its PID 1. If it stops it, its own sandbox fails, and says so; nobody waits for ever.
    let body = json!({"argv": ["python3", "/tmp/ptrace.py"], "user": "root", "background": true});
    // Nor one whose command had begun.
    let sleeper = scene.attacker.clone();
    let waiting = tokio::spawn(async move { sleeper.exec(&json!({"cmd": "sleep 1000"})).await });
    let started = scene.attacker.exec(&body).await;
    if started.status == 202 {
        let began = std::time::Instant::now();
        let mut works = true;
        while works && began.elapsed() < Duration::from_secs(3) {
            works = assert_answers_or_ends(&scene.attacker).await;
        }
        if !works {
            let answer = within("who waits for a command hears", Duration::from_secs(90), waiting);
            let answer = answer.await.expect("it is heard");
            assert!([410, 502, 503, 504].contains(&answer.status), "{answer:?}");
        }
    }
    scene.assert_unharmed().await;
}

/// Where root can stop the agent, the sandbox's policy still changes, its end still comes, and so does everybody's.
async fn a_stopped_agent_has_no_veto(server: &Server) {
    let scene = Scene::new(server).await;
    scene.attacker.write("/tmp/ptrace.py", PTRACE.as_bytes()).await;
    let body = json!({"argv": ["python3", "/tmp/ptrace.py"], "user": "root", "background": true});
    scene.attacker.exec(&body).await;
    let client = &scene.attacker.client;
    let path = scene.attacker.path("/network");
    let set = client.send(
        client
            .request(reqwest::Method::PUT, &path)
            .json(&json!({"policy": {}})),
    );
    let deadline = Duration::from_secs(50);
    let other = async {
        let short = scene.server.sandbox_with(&json!({"timeout_ms": 5000})).await;
        short.until_state("deleted").await
    };
    let (set, _reaped) = tokio::join!(
        within("the policy is set, or it is said why not", deadline, set),
        within("another's deadline is kept", deadline, other)
    );
    assert!([200, 502].contains(&set.status), "{set:?}");
    let now = client.get(&path).await.ok();
    assert_eq!(
        now["source"], "sandbox",
        "it holds, whatever the guest says: {now}"
    );
    // And it can be killed at once, which this looks at.
    scene.assert_unharmed().await;
}

async fn the_agents_memory_is_off_limits_to_the_user(server: &Server) {
    let scene = Scene::new(server).await;
    let line = "for f in mem environ maps fd/0 fd/1 root/etc/shadow cwd exe; do \
                  (cat /proc/1/$f || ls -l /proc/1/$f/) > /tmp/got 2> /dev/null && \
                  [ -s /tmp/got ] && echo leaked $f; \
                done; \
                echo x > /proc/1/oom_score_adj && echo leaked oom; \
                echo x > /.atoll/atoll-guest && echo leaked binary; true";
    let output = scene
        .attacker
        .run_with(json!({"argv": ["bash", "-c", line], "timeout_ms": 20_000}))
        .await;
    assert!(!output.stdout.contains("leaked"), "{output:?}");
    // Not even root changes the agent's program.
    let output = scene
        .attacker
        .root_sh("echo x > /.atoll/atoll-guest && echo changed; rm -rf /.atoll; ls /.atoll")
        .await;
    assert!(
        !output.stdout.contains("changed") && output.stdout.contains("atoll-guest"),
        "{output:?}"
    );
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

/// Writes a file into everything that might be the agent's way to the host.
const INTO_THE_CHANNEL: &str = "for f in /proc/1/fd/* $(find / -xdev -type p 2>/dev/null); do \
    (timeout 2 cat /tmp/payload > $f) 2>/dev/null && echo wrote $f; done; true";

/// Only root behind gVisor is the agent's equal and gets at its pipes; were that no longer so, what is sent would prove
/// nothing there. In a jail not even root does.
async fn into_the_channel(scene: &Scene<'_>, payload: &[u8]) {
    scene.attacker.write("/tmp/payload", payload).await;
    for user in ["nobody", "root"] {
        let body = json!({"argv": ["bash", "-c", INTO_THE_CHANNEL], "user": user, "timeout_ms": 20_000});
        if let Some(output) = scene.attack(&body).await {
            let reached = output
                .stdout
                .lines()
                .filter(|line| line.starts_with("wrote /"))
                .count();
            eprintln!("as {user}: {reached} ways were open");
            let expected = user == "root" && scene.server.tier == Tier::Gvisor;
            assert_eq!(reached > 0, expected, "as {user}: {output:?}");
        } else {
            // It may end with its sandbox, but only if it got through.
            assert_eq!(
                (user, scene.server.tier),
                ("root", Tier::Gvisor),
                "what broke it?"
            );
        }
    }
}

async fn garbage_in_the_channel(server: &Server) {
    let scene = Scene::new(server).await;
    let mut random = Random::seeded();
    let payload: Vec<u8> = (0..500_000).flat_map(|_| random.next().to_le_bytes()).collect();
    into_the_channel(&scene, &payload).await;
    assert_answers_or_ends(&scene.attacker).await;
    scene.assert_unharmed().await;
}

/// Frames that are well formed and lie: for streams that exist and that do not, of kinds that only a host sends, with
/// lengths that are not there, without credit, with contents that make no sense.
async fn forged_frames_in_the_channel(server: &Server) {
    let scene = Scene::new(server).await;
    let mut payload = Vec::new();
    let big = vec![b'x'; MAX_PAYLOAD];
    let stat = FileStat {
        path: b"/../../../etc/passwd".to_vec(),
        kind: EntryKind::File,
        size: u64::MAX,
        mode: u32::MAX,
        uid: 0,
        gid: 0,
        owner: Some("\u{1b}[31mroot".into()),
        group: None,
        modified_millis: i64::MIN,
        target: None,
    };
    let entry = FileEntry {
        stat: stat.clone(),
        depth: u32::MAX,
    };
    let messages = [
        Message::Started { pid: u32::MAX },
        Message::Exited(CommandState::Exited { code: i32::MIN }),
        Message::Stat(stat),
        Message::Entries(vec![entry; 100]),
        Message::Dropped {
            bytes: u64::MAX,
            next: u64::MAX,
        },
        Message::Connected,
        Message::Watching,
    ];
    for stream in (0..200).chain([u32::MAX, u32::MAX - 1, 1 << 31]) {
        for message in &messages {
            encode_into(&mut payload, FrameKind::Message, 0, stream, &encode(message));
        }
        encode_into(&mut payload, FrameKind::Data, 1, stream, &big[..1000]);
        encode_into(&mut payload, FrameKind::Data, 255, stream, &[]);
        encode_into(
            &mut payload,
            FrameKind::Credit,
            0,
            stream,
            &u32::MAX.to_le_bytes(),
        );
        encode_into(&mut payload, FrameKind::Credit, 0, stream, &[1]);
        encode_into(&mut payload, FrameKind::End, 0, stream, &[0xff; 40]);
        encode_into(&mut payload, FrameKind::Open, 0, stream, &big[..100]);
        encode_into(&mut payload, FrameKind::Close, 0, stream, &[]);
        encode_into(&mut payload, FrameKind::Ping, 0, stream, &[7; 64]);
    }
    encode_into(
        &mut payload,
        FrameKind::Welcome,
        0,
        0,
        &encode(&Welcome {
            generation: 99,
            nonce: 1,
        }),
    );
    encode_into(&mut payload, FrameKind::Hello, 0, 0, &big);
    // More than was ever granted, on every stream that may be open.
    for stream in 0..40 {
        for _ in 0..16 {
            encode_into(&mut payload, FrameKind::Data, 1, stream, &big);
        }
    }
    // A header that promises more than any frame may hold, with the magic of a real one.
    let mut header = atoll_guest_protocol::encode_header(FrameKind::Data, 0, 1, &[]).to_vec();
    header[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    for _ in 0..1000 {
        payload.extend_from_slice(&header);
    }
    into_the_channel(&scene, &payload).await;
    assert_answers_or_ends(&scene.attacker).await;
    scene.assert_unharmed().await;
}

/// Steals what the host says to the agent.
async fn the_channel_is_drained(server: &Server) {
    let scene = Scene::new(server).await;
    let line = "for f in /proc/1/fd/0 /proc/1/fd/1 $(find / -xdev -type p 2>/dev/null); do \
                (timeout 20 cat $f > /dev/null) 2>/dev/null & done; echo draining; wait";
    let body = json!({"argv": ["bash", "-c", line], "user": "root", "background": true});
    let started = scene.attacker.exec(&body).await;
    assert_eq!(started.status, 202, "{started:?}");
    for _ in 0..3 {
        assert_answers_or_ends(&scene.attacker).await;
    }
    scene.assert_unharmed().await;
}
