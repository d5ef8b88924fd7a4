//! State that survives: what was paused, stopped, kept or put into a volume is there after every kind of end.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use atoll_proof::{Answer, Client, Sandbox, Server, Tier, Value, host, json, wait};
use reqwest::{Method, RequestBuilder};

mod clock;
mod crashes;
mod damage;
mod disk;
mod load;
mod races;
mod reboot;
mod transfers;

const PATIENCE: Duration = Duration::from_secs(60);

/// States in which a sandbox does not stay.
const MOVING: [&str; 5] = ["starting", "pausing", "resuming", "stopping", "deleting"];

/// Counts in memory, and shows how far it is.
const COUNT: &str = "
import os, sys, time
n = 0
while True:
    n += 1
    with open('/tmp/count.new', 'w') as file:
        file.write(f'{sys.argv[1]} {n}')
    os.replace('/tmp/count.new', '/tmp/count')
    time.sleep(0.1)
";

/// The server was killed before it answered.
#[derive(Debug)]
struct Dead;

type Alive<T> = Result<T, Dead>;

/// How much is kept of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Memory,
    Files,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Files => "filesystem",
        }
    }

    /// As much as a tier can keep.
    fn most(tier: Tier) -> Self {
        match tier {
            Tier::Gvisor => Self::Memory,
            Tier::Jail => Self::Files,
        }
    }
}

/// A process that counts, and how far it was seen to have come.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Counter {
    name: String,
    seen: u64,
}

impl Counter {
    /// Starts one; the server must live.
    async fn start(sandbox: &Sandbox, name: &str) -> Self {
        Self::try_start(sandbox, name).await.unwrap()
    }

    async fn try_start(sandbox: &Sandbox, name: &str) -> Alive<Self> {
        let body = json!({"argv": ["python3", "-c", COUNT, name], "background": true});
        let request = sandbox
            .client
            .request(Method::POST, &sandbox.path("/exec"))
            .json(&body);
        call(&sandbox.client, request, 202).await?;
        let mut counter = Self {
            name: name.to_owned(),
            seen: 0,
        };
        counter.try_goes_on(sandbox).await?;
        Ok(counter)
    }

    /// Waits until the very same process has counted on. Never returns if it is another, or none.
    async fn goes_on(&mut self, sandbox: &Sandbox) {
        self.try_goes_on(sandbox).await.unwrap();
    }

    async fn try_goes_on(&mut self, sandbox: &Sandbox) -> Alive<()> {
        let what = format!("{} counts on in {}, beyond {}", self.name, sandbox.id, self.seen);
        self.seen = wait::until(&what, PATIENCE, || async {
            let request = sandbox
                .client
                .request(Method::GET, &sandbox.path("/files/content"));
            let answer = sandbox
                .client
                .try_send(request.query(&[("path", "/tmp/count")]))
                .await;
            let Ok(answer) = answer else {
                return Some(Err(Dead));
            };
            if answer.status == 404 {
                return None;
            }
            let text = answer.expect(200).text();
            let (name, count) = text.split_once(' ').unwrap();
            let count: u64 = count.parse().unwrap();
            // The file of another may be there where `/tmp` is kept; it does not count on.
            if name != self.name {
                return None;
            }
            (count > self.seen).then_some(Ok(count))
        })
        .await?;
        Ok(())
    }
}

/// Sends a request to a server that may be killed meanwhile; as long as it lives it must answer with this status.
async fn call(client: &Client, request: RequestBuilder, status: u16) -> Alive<Value> {
    match client.try_send(request).await {
        Ok(answer) => Ok(answer.expect(status).json()),
        Err(error) => {
            assert!(!error.is_timeout(), "the server hangs: {error:?}");
            Err(Dead)
        }
    }
}

/// `POST` of a word at the end of a sandbox's path: pause, resume, stop, start, fork, snapshots.
async fn ask(sandbox: &Sandbox, word: &str, body: &Value) -> Answer {
    sandbox
        .client
        .post(&sandbox.path(&format!("/{word}")), body)
        .await
}

async fn pause(sandbox: &Sandbox) {
    let paused = ask(sandbox, "pause", &json!({})).await.ok();
    assert_eq!(paused["state"], "paused", "{paused}");
}

async fn resume(sandbox: &Sandbox) {
    let resumed = ask(sandbox, "resume", &json!({})).await.ok();
    assert_eq!(resumed["state"], "running", "{resumed}");
}

/// Takes a snapshot and returns its id.
async fn snapshot(sandbox: &Sandbox, name: &str, kind: Kind) -> String {
    let taken = ask(sandbox, "snapshots", &json!({"name": name, "kind": kind.name()})).await;
    taken.expect(201).json()["id"].as_str().unwrap().to_owned()
}

async fn snapshots(server: &Server) -> Vec<Value> {
    let page = server.client().get("/v1/snapshots?limit=100").await.ok();
    assert!(page["next"].is_null(), "this test does not turn pages");
    page["items"].as_array().unwrap().clone()
}

/// Waits until no sandbox is on its way from one state to another, and returns those that live.
async fn settled(server: &Server) -> Vec<Value> {
    wait::until("every sandbox has settled", PATIENCE, || async {
        server.list(&MOVING).await.is_empty().then_some(())
    })
    .await;
    server.list(&[]).await
}

fn vault(server: &Server) -> PathBuf {
    server.data().join("vault")
}

fn manifests(server: &Server) -> BTreeSet<String> {
    host::names_in(&vault(server).join("manifests"))
}

fn packs(server: &Server) -> BTreeSet<String> {
    host::names_in(&vault(server).join("packs"))
}

/// What is new in a set.
fn news(before: &BTreeSet<String>, after: &BTreeSet<String>) -> String {
    let mut new = after.difference(before);
    let one = new.next().expect("something new").clone();
    assert_eq!(new.next(), None, "one thing is new");
    one
}

/// Everything on this machine that no sandbox, snapshot or volume of these rows accounts for.
async fn leaks(server: &Server, rows: &[Value]) -> Vec<String> {
    let held = server.held();
    let running: BTreeSet<String> = rows
        .iter()
        .filter_map(|row| row["instance"].as_str())
        .map(str::to_owned)
        .collect();
    let mut leaks = Vec::new();
    for (what, names) in [("instance", &held.instances), ("cgroup", &held.cgroups)] {
        let names: BTreeSet<String> = names.iter().cloned().collect();
        leaks.extend(
            names
                .symmetric_difference(&running)
                .map(|name| format!("{what} {name}")),
        );
    }
    if held.uid_ranges.len() != running.len() {
        leaks.push(format!(
            "{} ranges of user ids, {} instances",
            held.uid_ranges.len(),
            running.len()
        ));
    }
    let owned = |text: &str| running.iter().any(|instance| text.contains(instance));
    leaks.extend(held.fifos.into_iter().filter(|fifo| !owned(fifo)));
    let strays = held
        .processes
        .into_iter()
        .map(|(pid, line)| format!("process {pid}: {line}"));
    leaks.extend(strays.filter(|line| line.contains("ins_") && !owned(line)));
    let uses_volumes = |row: &&Value| row["instance"].is_string() && row["volumes"] != json!([]);
    if rows.iter().filter(uses_volumes).count() == 0 {
        leaks.extend(held.mounts.into_iter().map(|path| format!("mount {path}")));
        leaks.extend(
            held.loop_devices
                .into_iter()
                // A jail's files are on one.
                .filter(|file| !owned(file))
                .map(|file| format!("loop device of {file}")),
        );
    }
    for dir in ["vault/tmp", "scratch"] {
        let names = host::names_in(&server.data().join(dir));
        leaks.extend(names.into_iter().map(|name| format!("{dir}/{name}")));
    }
    let resting = rows.iter().filter(|row| row["saved"].is_object()).count();
    let (kept, saved) = (snapshots(server).await.len(), manifests(server).len());
    if saved != kept + resting {
        leaks.push(format!(
            "{saved} saved states for {kept} snapshots and {resting} resting sandboxes"
        ));
    }
    leaks
}

/// Asserts that a collection leaves no garbage, and that everything on this machine is accounted for.
async fn assert_no_leaks(server: &Server) {
    let mut found = Vec::new();
    for _ in 0..400 {
        let rows = settled(server).await;
        found = leaks(server, &rows).await;
        server.client().post("/v1/gc", &json!({})).await.ok();
        let garbage = server
            .client()
            .post("/v1/gc", &json!({"dry_run": true}))
            .await
            .ok();
        let nothing = json!({"dry_run": true, "snapshots": [], "volumes": [], "bytes": 0, "unreadable": []});
        if garbage != nothing {
            found.push(format!("garbage {garbage}"));
        }
        if found.is_empty() {
            return;
        }
        // What was let go of takes a moment to be gone; a leak stays.
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("leaks: {found:#?}");
}
