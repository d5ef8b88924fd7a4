//! What must hold.
//!
//! - The runtime is never misused: nothing is started twice, saved twice at once, or let go on while it is saved.
//! - At every moment: no two rows name one instance; no more rows have instances than the quota allows; what a sandbox at
//!   rest comes back from has a row and is whole; who was told that a sandbox was killed never sees it live.
//! - When all has settled: no row is on its way; one that runs has its instance, which runs, knows its name, and has seen
//!   every command that a caller was told of; one at rest has none; no other instance is there.
//! - None ends for being idle that has computed within the second half of its idle time.
//! - The ledger: every sandbox was created once and has ended once, or lives; every command that was started has one end.
//! - Instances: one that runs has one without an end, which is its own; all others have ended.
//! - When all were killed and all snapshots deleted: no instance, no live row, no saved bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use atoll_store::{Fact, FactQuery, InstanceQuery, SandboxRow};
use atoll_types::{EndReason, InstanceId, SandboxId, SandboxState, Timestamp};

use crate::world::{MAX_LIVE, Server, World, project};

/// What is looked at in the ledger.
const LEDGER: [&str; 5] = [
    "sandbox.created",
    "sandbox.ended",
    "sandbox.failed",
    "command.started",
    "command.exited",
];

pub(crate) fn misuses(world: &World<'_>) -> Result<(), String> {
    match world.machine.misuses().as_slice() {
        [] => Ok(()),
        misuses => Err(misuses.join("; ")),
    }
}

pub(crate) async fn rows(server: &Server) -> Result<Vec<SandboxRow>, String> {
    let rows = server.store.sandboxes.live_sandboxes().await;
    rows.map_err(|error| error.to_string())
}

pub(crate) async fn at_all_times(world: &World<'_>, server: &Server) -> Result<(), String> {
    misuses(world)?;
    // Looked at before the rows: what is told meanwhile is not in them yet.
    let killed = {
        let told = world.told.lock();
        if let Some(broken) = told.broken.first() {
            return Err(broken.clone());
        }
        told.killed.clone()
    };
    let rows = rows(server).await?;
    let mut owners: BTreeMap<InstanceId, &SandboxRow> = BTreeMap::new();
    for row in &rows {
        if let Some(instance) = &row.record.instance
            && let Some(other) = owners.insert(instance.clone(), row)
        {
            return Err(format!("{} and {} both have {instance}", row.id, other.id));
        }
        if killed.contains(&row.id) {
            return Err(format!("{} was killed, and is {}", row.id, row.record.state));
        }
        if let (SandboxState::Paused | SandboxState::Stopped, Some(saved)) =
            (row.record.state, &row.record.saved)
            && world.is_new(row)
        {
            let found = server.store.saved.snapshot(&row.project, &saved.snapshot).await;
            let whole = found.map_err(|error| error.to_string())?.is_some()
                && server.vault.contains(saved.snapshot.as_str());
            let now = server.store.sandboxes.sandbox(&row.project, &row.id).await;
            let unchanged = now
                .map_err(|error| error.to_string())?
                .is_some_and(|now| now.version == row.version);
            if !whole && unchanged {
                return Err(format!(
                    "{} rests on {}, which is not there",
                    row.id, saved.snapshot
                ));
            }
        }
    }
    // What is left of one at rest is not counted: it is on its way out.
    let counted = rows
        .iter()
        .filter(|row| row.record.state.holds_instance())
        .count();
    if counted as u64 > MAX_LIVE {
        return Err(format!("{counted} sandboxes have instances"));
    }
    Ok(())
}

pub(crate) async fn settled(world: &World<'_>, server: &Server) -> Result<(), String> {
    at_all_times(world, server).await?;
    let mut expected = BTreeSet::new();
    let rows = rows(server).await?;
    let instances = world.machine.instances();
    for row in &rows {
        let id = &row.id;
        match row.record.state {
            SandboxState::Running => {
                let Some(instance) = row.record.instance.clone() else {
                    return Err(format!("{id} runs without an instance"));
                };
                let Some(look) = instances.get(&instance) else {
                    return Err(format!("{id} runs, and {instance} is not there"));
                };
                if !look.whole || !look.alive || look.still {
                    return Err(format!("{id} runs, and {instance} does not: {look:?}"));
                }
                if look.hostname.as_deref() != Some(id.bare()) {
                    return Err(format!("{id} does not know its name: {look:?}"));
                }
                let told = world.told.lock();
                for word in told.ran.get(id).into_iter().flatten() {
                    if !look.ran.contains(word) {
                        return Err(format!("{id} has forgotten {word}: {look:?}"));
                    }
                }
                expected.insert(instance);
            }
            SandboxState::Paused | SandboxState::Stopped if row.record.instance.is_none() => {}
            state => {
                let instance = &row.record.instance;
                return Err(format!("{id} has settled as {state} with {instance:?}"));
            }
        }
    }
    let others: Vec<_> = instances
        .iter()
        .filter(|(id, _)| !expected.contains(id))
        .collect();
    // Those of pools have no row.
    if others.len() > world.pool {
        return Err(format!("instances without a row: {others:?}"));
    }
    // What is over has none, which is looked at in the end.
    times_that_it_ran(server, &rows, rows.iter().map(|row| &row.id)).await
}

/// Those of every sandbox that ever was.
async fn times_that_it_ran<'a>(
    server: &Server,
    live: &[SandboxRow],
    sandboxes: impl Iterator<Item = &'a SandboxId>,
) -> Result<(), String> {
    for sandbox in sandboxes {
        let query = InstanceQuery {
            project: project(server),
            sandbox: sandbox.clone(),
            after: None,
            limit: 100,
        };
        let page = server.store.sandboxes.instances(query).await;
        let page = page.map_err(|error| error.to_string())?;
        let open: Vec<_> = page.items.iter().filter(|row| row.ended_at.is_none()).collect();
        let own = live.iter().find(|row| row.id == *sandbox);
        let runs = own.and_then(|row| row.record.running_instance());
        if !open.iter().map(|row| &row.id).eq(runs) {
            return Err(format!(
                "{sandbox} runs as {runs:?}, and these have not ended: {open:?}"
            ));
        }
    }
    Ok(())
}

async fn ledger(world: &World<'_>, server: &Server, live: &[SandboxRow]) -> Result<(), String> {
    let mut facts = Vec::new();
    let mut after = Some(0);
    while let Some(after_seq) = after {
        let query = FactQuery {
            project: project(server),
            sandbox: None,
            kinds: LEDGER.iter().map(|kind| (*kind).to_owned()).collect(),
            after_seq,
            limit: 1000,
        };
        let page = server.store.ledger.facts_page(query).await;
        let page = page.map_err(|error| error.to_string())?;
        facts.extend(page.rows);
        after = page.next;
    }
    let mut created = BTreeMap::<_, u64>::new();
    let mut ended = BTreeMap::<_, u64>::new();
    let mut commands = BTreeMap::<_, (u64, u64)>::new();
    for row in &facts {
        let Some(sandbox) = row.sandbox.clone() else {
            continue;
        };
        match &row.fact {
            Fact::SandboxCreated { .. } => *created.entry(sandbox).or_default() += 1,
            Fact::SandboxEnded { end } | Fact::SandboxFailed { end } => {
                if *end == EndReason::Idle {
                    was_idle(world, server, &sandbox, row.at).await?;
                }
                *ended.entry(sandbox).or_default() += 1;
            }
            Fact::CommandStarted { command, .. } => {
                commands.entry((sandbox, command.clone())).or_default().0 += 1;
            }
            Fact::CommandExited { command, .. } => {
                commands.entry((sandbox, command.clone())).or_default().1 += 1;
            }
            _ => {}
        }
    }
    for (sandbox, times) in &created {
        let lives = live.iter().any(|row| row.id == *sandbox);
        let ends = ended.get(sandbox).copied().unwrap_or(0);
        if *times != 1 || ends != u64::from(!lives) {
            return Err(format!(
                "{sandbox} was created {times} times and has ended {ends} times; it lives: {lives}"
            ));
        }
    }
    times_that_it_ran(server, live, created.keys()).await?;
    if let Some(stranger) = ended.keys().find(|id| !created.contains_key(*id)) {
        return Err(format!("{stranger} has ended and was never created"));
    }
    for ((sandbox, command), (started, exited)) in &commands {
        let lives = live.iter().any(|row| row.id == *sandbox);
        if *started > 1 || *exited > 1 || (!lives && started != exited) {
            return Err(format!(
                "{command} of {sandbox} was started {started} times and has ended {exited} times"
            ));
        }
    }
    Ok(())
}

async fn was_idle(
    world: &World<'_>,
    server: &Server,
    sandbox: &SandboxId,
    ended_at: Timestamp,
) -> Result<(), String> {
    let Some(computed_at) = world.told.lock().computed.get(sandbox).copied() else {
        return Ok(());
    };
    let row = server.store.sandboxes.sandbox(&project(server), sandbox).await;
    let row = row.map_err(|error| error.to_string())?;
    // One that ended long ago may have been forgotten.
    match row.and_then(|row| row.record.policy.idle) {
        Some(idle) if ended_at.millis_since(computed_at) < idle.after_millis / 2 => Err(format!(
            "{sandbox} ended for being idle at {ended_at:?}, and computed at {computed_at:?}: {idle:?}"
        )),
        _ => Ok(()),
    }
}

/// After a kill of all.
pub(crate) async fn all_killed(world: &World<'_>, server: &Server) -> Result<(), String> {
    // Also those that nobody was told of.
    for row in rows(server).await? {
        let killed = server.sandboxes.kill(&server.caller, &row.id).await;
        killed.map_err(|fault| format!("{} cannot be killed: {fault}", row.id))?;
    }
    let snapshots = server.sandboxes.snapshots(&server.caller, None, 1000).await;
    for snapshot in snapshots.map_err(|fault| fault.to_string())?.items {
        let deleted = server
            .sandboxes
            .delete_snapshot(&server.caller, snapshot.id.as_str())
            .await;
        deleted.map_err(|fault| fault.to_string())?;
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    settled(world, server).await?;
    let left = rows(server).await?;
    ledger(world, server, &left).await?;
    if !left.is_empty() {
        return Err(format!("{} rows live on", left.len()));
    }
    let collected = server.sandboxes.collect_garbage(false).await;
    collected.map_err(|fault| fault.to_string())?;
    match server.vault.ids().map_err(|error| error.to_string())?.as_slice() {
        [] => Ok(()),
        ids => Err(format!("saved state that nobody has: {ids:?}")),
    }
}
