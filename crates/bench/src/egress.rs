//! The rows of `atoll bench egress`: what it costs that everything a sandbox sends goes through Atoll.
//!
//! The same client does the same in a sandbox behind Atoll, and outside of it through a plain SOCKS proxy and through
//! nothing at all, in turn. For the jail the client outside has no wall, for gVisor it is in raw `runsc`, whose network
//! stack is the same. What is "added" is the difference to the client without any proxy.

mod clients;
mod targets;
mod world;

use std::time::Duration;

use atoll_client::Client;
use atoll_client::output::{Doing, Error, Result};
use atoll_types::MIB;
use futures_util::{StreamExt, TryStreamExt};
use reqwest::Method;
use serde_json::{Value, json};

use super::host::resident;
use super::peers::{Bwrap, Runsc};
use super::row::{Bar, Row, Samples};
use super::subject::{Subject, create, create_to_first_byte, exec, kill};
use super::{Measured, Setting};

use clients::{Cell, Runner, Way};
use targets::{READ, SPLICED};
use world::From;
pub(crate) use world::World;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EgressCase {
    Throughput(Wall),
    Connection(Wall),
    Request(Wall),
    /// The same, copied rather than read: what is left is the way there.
    SplicedRequest(Wall),
    Held(Wall),
    AttachCold(Wall),
    AttachWarm(Wall),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wall {
    Gvisor,
    Jail,
}

impl Wall {
    fn server(self) -> &'static [&'static str] {
        match self {
            Self::Gvisor => &["--isolation", "gvisor"],
            Self::Jail => &["--isolation", "jail", "--runsc", "none"],
        }
    }

    /// The peer's name in the rows.
    fn outside(self, what: &str) -> String {
        match self {
            Self::Gvisor => format!("raw runsc, {what}"),
            Self::Jail => format!("no wall, {what}"),
        }
    }
}

impl EgressCase {
    pub(crate) const ALL: [Self; 13] = [
        Self::Throughput(Wall::Jail),
        Self::Throughput(Wall::Gvisor),
        Self::Connection(Wall::Jail),
        Self::Connection(Wall::Gvisor),
        Self::Request(Wall::Jail),
        Self::Request(Wall::Gvisor),
        Self::SplicedRequest(Wall::Jail),
        Self::SplicedRequest(Wall::Gvisor),
        Self::Held(Wall::Jail),
        Self::Held(Wall::Gvisor),
        Self::AttachCold(Wall::Jail),
        Self::AttachCold(Wall::Gvisor),
        Self::AttachWarm(Wall::Gvisor),
    ];

    fn rows(self) -> &'static [&'static str] {
        match self {
            Self::Throughput(Wall::Jail) => &[
                "spliced_tls_throughput_jail",
                "spliced_tls_throughput_jail_vs_loopback",
            ],
            Self::Throughput(Wall::Gvisor) => &[
                "spliced_tls_throughput_gvisor",
                "spliced_tls_throughput_gvisor_vs_no_proxy",
            ],
            Self::Connection(Wall::Jail) => &["spliced_tls_new_connection_added_jail"],
            Self::Connection(Wall::Gvisor) => &["spliced_tls_new_connection_added_gvisor"],
            Self::Request(Wall::Jail) => &["intercepted_keepalive_request_added_jail"],
            Self::Request(Wall::Gvisor) => &["intercepted_keepalive_request_added_gvisor"],
            Self::SplicedRequest(Wall::Jail) => &["spliced_keepalive_request_added_jail"],
            Self::SplicedRequest(Wall::Gvisor) => &["spliced_keepalive_request_added_gvisor"],
            Self::Held(Wall::Jail) => &[
                "1000_connections_held_jail",
                "1000_connections_server_memory_jail",
            ],
            Self::Held(Wall::Gvisor) => &[
                "1000_connections_held_gvisor",
                "1000_connections_server_memory_gvisor",
            ],
            Self::AttachCold(Wall::Jail) => &["network_added_to_cold_create_jail"],
            Self::AttachCold(Wall::Gvisor) => &["network_added_to_cold_create_gvisor"],
            Self::AttachWarm(Wall::Jail) => &["network_added_to_warm_create_jail"],
            Self::AttachWarm(Wall::Gvisor) => &["network_added_to_warm_create_gvisor"],
        }
    }

    fn wall(self) -> Wall {
        match self {
            Self::Throughput(wall)
            | Self::Connection(wall)
            | Self::Request(wall)
            | Self::SplicedRequest(wall)
            | Self::Held(wall)
            | Self::AttachCold(wall)
            | Self::AttachWarm(wall) => wall,
        }
    }
}

/// A case, and where it takes place, or why it cannot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InWorld<'a> {
    pub(crate) case: EgressCase,
    pub(crate) world: std::result::Result<&'a World, &'a str>,
}

impl Measured for InWorld<'_> {
    fn rows(self) -> &'static [&'static str] {
        self.case.rows()
    }

    fn is_slow(self) -> bool {
        self.case == EgressCase::Held(Wall::Gvisor)
    }

    async fn measure(self, setting: &Setting) -> Result<Vec<Row>> {
        let world = self.world.map_err(Error::new)?;
        let (names, wall) = (self.case.rows(), self.case.wall());
        let config = world.config();
        if matches!(self.case, EgressCase::AttachCold(_) | EgressCase::AttachWarm(_)) {
            return attach(setting, &config, self.case).await;
        }
        let subject = start(setting, wall, "network", &config, &[]).await?;
        let measured = match self.case {
            EgressCase::Held(_) => held(setting, world, &subject, names).await,
            _ => outside(setting, world, &subject, self.case).await,
        };
        subject.stop().await;
        measured
    }
}

async fn start(
    setting: &Setting,
    wall: Wall,
    name: &str,
    config: &str,
    arguments: &[&str],
) -> Result<Subject> {
    let path = setting.dir().join(format!("{name}.toml"));
    std::fs::write(&path, config).doing("cannot write a configuration")?;
    let path = path.to_string_lossy();
    let arguments = [wall.server(), &["--config", &path], arguments].concat();
    Subject::start(&setting.templates, &arguments).await
}

/// A sandbox that may reach the targets, with both processors as the peers have them.
async fn sandbox(client: &Client, resources: Value) -> Result<String> {
    let request = client.request(Method::PUT, "/v1/secrets/bench").json(&json!({
        "value": "a-value-that-only-the-target-sees", "hosts": [READ], "inject": "bearer",
    }));
    client.send(request).await?;
    let rules = json!([{"action": "allow", "to": SPLICED}, {"action": "allow", "to": READ}]);
    let body = json!({
        "template": "base",
        "resources": resources,
        "network": {"rules": rules},
        "secrets": [{"secret": "bench"}],
    });
    create(client, &body).await
}

/// Cases with a client in one sandbox, and the same client outside.
async fn outside(setting: &Setting, world: &World, subject: &Subject, case: EgressCase) -> Result<Vec<Row>> {
    let client = &subject.client;
    let id = sandbox(client, json!({"cpu_millis": 2000})).await?;
    let bwrap = Bwrap::new(&setting.image, setting.dir())
        .await
        .ok_or_else(|| Error::new("the clients outside need bwrap").hint("apt-get install bubblewrap"))?;
    let cell = match case.wall() {
        Wall::Jail => None,
        Wall::Gvisor => {
            let runsc = Runsc::new(
                setting.runsc()?,
                &setting.image,
                &setting.dir().join(case.rows()[0]),
            )?;
            Some(Cell::start(world, runsc).await?)
        }
    };
    let bare = |from| Runner::Bare { bwrap: &bwrap, from };
    let runner = cell.as_ref().map_or_else(|| bare(From::Plain), Runner::Cell);
    let host = match case {
        EgressCase::Request(_) => READ,
        _ => SPLICED,
    };
    let ways = Ways {
        atoll: Way::atoll(world, client, &id, host),
        socks: Way::socks(world, runner),
        straight: Way::straight(world, runner),
        loopback: Way::straight(world, bare(From::Home)),
    };
    let socks = case.wall().outside(&format!("through {}", world.socks_name()));
    let measured = match case {
        EgressCase::Throughput(wall) => throughput(setting, &ways, wall, case.rows(), &socks).await,
        _ => added(setting, &ways, case, &socks).await,
    };
    if let Some(cell) = cell {
        cell.stop().await;
    }
    measured
}

/// The same to the same target, four times.
struct Ways<'a> {
    atoll: Way<'a>,
    socks: Option<Way<'a>>,
    straight: Way<'a>,
    loopback: Way<'a>,
}

/// What was measured on each.
#[derive(Debug, Default)]
struct Times {
    atoll: Samples,
    socks: Samples,
    straight: Samples,
    loopback: Samples,
}

impl Ways<'_> {
    /// One round of each, in turn. The first round only warms up.
    async fn rounds<'a, F: Future<Output = Result<Vec<f64>>>>(
        &'a self,
        rounds: usize,
        measure: impl Fn(&'a Way<'a>) -> F,
    ) -> Result<Times> {
        let mut times = Times::default();
        for round in 0..=rounds {
            let atoll = measure(&self.atoll).await?;
            let socks = match &self.socks {
                Some(socks) => measure(socks).await?,
                None => Vec::new(),
            };
            let straight = measure(&self.straight).await?;
            let loopback = measure(&self.loopback).await?;
            if round > 0 {
                times.atoll.0.extend(atoll);
                times.socks.0.extend(socks);
                times.straight.0.extend(straight);
                times.loopback.0.extend(loopback);
            }
        }
        Ok(times)
    }
}

async fn throughput(
    setting: &Setting,
    ways: &Ways<'_>,
    wall: Wall,
    names: &[&str],
    socks: &str,
) -> Result<Vec<Row>> {
    let bytes = if setting.quick { 128 * MIB } else { 512 * MIB };
    let times = ways
        .rounds(setting.rounds(15), |way| async move {
            Ok(vec![way.throughput(bytes).await?])
        })
        .await?;
    let (peer, base) = match wall {
        Wall::Jail => ("no wall, the host's loopback".to_owned(), &times.loopback),
        Wall::Gvisor => (wall.outside("no proxy"), &times.straight),
    };
    let bar = Bar::RatioAtLeast(0.5);
    let note = format!(
        "one download of {} MiB; {:.0} MB/s over the same cables without a proxy",
        bytes / MIB,
        times.straight.median().unwrap_or_default()
    );
    Ok(vec![
        Row::compare(names[0], "MB/s", &times.atoll, socks, &times.socks, bar).note(note),
        Row::compare(names[1], "MB/s", &times.atoll, &peer, base, Bar::Shown),
    ])
}

/// How much longer something takes than without any proxy.
async fn added(setting: &Setting, ways: &Ways<'_>, case: EgressCase, socks: &str) -> Result<Vec<Row>> {
    let median = |samples: &Samples| samples.median().unwrap_or_default();
    let times = ways
        .rounds(setting.rounds(25), |way| async move {
            let times = match case {
                EgressCase::Connection(_) => way.connections(30).await?,
                _ => way.requests(200).await?,
            };
            Ok(Samples(times).median().into_iter().collect())
        })
        .await?;
    let (what, bar) = match case {
        EgressCase::Connection(_) => ("connect, TLS and first answer", Bar::AtMost(0.3)),
        EgressCase::Request(_) => ("a request that gets a secret", Bar::AtMost(0.5)),
        _ => ("a request", Bar::Shown),
    };
    let base = median(&times.straight);
    // Of each round, since what else the machine does changes from one to the next.
    let over = |samples: &Samples| {
        let pairs = samples.0.iter().zip(&times.straight.0);
        Samples(pairs.map(|(time, straight)| time - straight).collect())
    };
    let added = over(&times.atoll);
    let row = Row::single(case.rows()[0], "ms", added.median(), bar);
    let mut row = row.against(socks, over(&times.socks).median(), bar);
    row.samples = Some(added.0.len());
    Ok(vec![row.note(format!(
        "{what}, p50 of rounds: {:.3} ms; {base:.3} ms over the same cables without a proxy, which is subtracted; {:.3} ms through SOCKS; \
         {:.3} ms on the host's loopback",
        median(&times.atoll),
        median(&times.socks),
        median(&times.loopback),
    ))])
}

async fn held(setting: &Setting, world: &World, subject: &Subject, names: &[&str]) -> Result<Vec<Row>> {
    const CONNECTIONS: usize = 1000;
    const TURNS: usize = 3;
    let client = &subject.client;
    let each = CONNECTIONS.div_ceil(setting.many).to_string();
    let small = json!({"memory_bytes": 128 * MIB});
    let ids: Vec<String> = futures_util::stream::iter(0..setting.many)
        .map(|_| sandbox(client, small.clone()))
        .buffer_unordered(4)
        .try_collect()
        .await?;
    let memory = || resident(subject.pid).unwrap_or_default() as f64 / 1e6;
    for id in &ids {
        // Each knows the names, so that what follows is about connections only.
        exec(client, id, &["/usr/bin/getent", "hosts", SPLICED]).await?;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let idle = memory();
    for id in &ids {
        let way = Way::atoll(world, client, id, SPLICED);
        let body = json!({"argv": way.script("hold", &each), "background": true});
        client.post(&format!("/v1/sandboxes/{id}/exec"), &body).await?;
    }
    let (mut most, mut open) = (Vec::new(), usize::MAX);
    for turn in 0..TURNS {
        let wait = format!("timeout 60 sh -c 'until [ -e /tmp/held-{turn} ]; do sleep 0.1; done'");
        for id in &ids {
            if turn > 0 {
                exec(client, id, &["/usr/bin/touch", &format!("/tmp/next-{turn}")]).await?;
            }
        }
        for id in &ids {
            exec(client, id, &["/bin/sh", "-c", &wait]).await?;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        open = open.min(world.open());
        most.push(memory());
    }
    let (first, last) = (most.first().copied(), most.last().copied());
    let bar = Bar::RatioAtMost(1.1);
    let peer = "ours with the first 1000";
    let grown = first.unwrap_or_default() - idle;
    Ok(vec![
        Row::single(names[0], "connections", Some(open as f64), Bar::AtLeast(1000.0)).note(format!(
            "from {} sandboxes, as the target counts them once every one got its answer; the least of {TURNS} times",
            ids.len()
        )),
        Row::single(names[1], "MB", last, bar)
            .against(peer, first, bar)
            .note(format!(
                "with the third 1000, the former ones closed; {idle:.1} MB before any: {:.1} KB for each held",
                grown * 1e3 / CONNECTIONS as f64
            )),
    ])
}

/// Two servers, one without network, asked in turn.
async fn attach(setting: &Setting, config: &str, case: EgressCase) -> Result<Vec<Row>> {
    let wall = case.wall();
    let warm = matches!(case, EgressCase::AttachWarm(_));
    let pool: &[&str] = if warm { &["--pool", "base=4"] } else { &[] };
    let with = start(setting, wall, "with", config, pool).await?;
    let without = start(setting, wall, "without", "[network]\nenabled = false\n", pool).await;
    let measured = match &without {
        Ok(without) => in_turn(setting, &with, without, warm).await,
        Err(error) => Err(Error::new(error.to_string())),
    };
    with.stop().await;
    if let Ok(without) = without {
        without.stop().await;
    }
    let (ours, theirs) = measured?;
    let base = theirs.median().unwrap_or_default();
    // What is called nothing must be more than what the clock and the machine do by themselves.
    let bar = Bar::AtMost(if warm { 0.5 } else { 5.0 });
    let added = Samples(ours.0.iter().map(|time| time - base).collect());
    let mut row = Row::single(case.rows()[0], "ms", added.median(), bar);
    row.ours_p99 = added.p99();
    row.samples = Some(ours.0.len());
    Ok(vec![row.note(format!(
        "create to first byte: {:.2} ms with a link, {base:.2} ms on a server without network, which is subtracted",
        ours.median().unwrap_or_default()
    ))])
}

async fn in_turn(
    setting: &Setting,
    with: &Subject,
    without: &Subject,
    warm: bool,
) -> Result<(Samples, Samples)> {
    let body = json!({"template": "base"});
    let mut times = [Samples::default(), Samples::default()];
    for round in 0..=setting.rounds(100) {
        for (subject, times) in [with, without].into_iter().zip(&mut times) {
            if warm {
                with.pools_full().await?;
                without.pools_full().await?;
            }
            let (elapsed, id) = create_to_first_byte(&subject.client, &body).await?;
            kill(&subject.client, &id).await?;
            if round > 0 {
                times.push(elapsed);
            }
        }
    }
    let [ours, theirs] = times;
    Ok((ours, theirs))
}
