//! What callers ask for and what befalls the server, as a seed says.

use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use atoll_identity::Caller;
use atoll_runtime::InstanceEnd;
use atoll_sandboxes::{CreateSandbox, ExecSpec, ForkSandbox, Obtained, Sandbox, Sandboxes, TakeSnapshot};
use atoll_types::{
    Code, Fault, IdleAction, IdlePolicy, ResourcesAsked, SandboxId, SandboxSpec, SaveKind, TimeoutAction,
};

use crate::chance::Chance;
use crate::check;
use crate::world::{Home, Server, TEMPLATE, Told, Trace, World};

/// Nothing takes longer when everything works again.
const SETTLES_WITHIN: Duration = Duration::from_secs(600);

/// How a server's time ended.
enum End {
    Killed,
    Stopped,
    Done,
}

/// What callers wait for: by number, what it is.
type Waiting = Rc<RefCell<BTreeMap<u64, String>>>;

pub(crate) fn play(home: &Home, seed: u64, trace: &Trace) -> Result<(), String> {
    let mut world = World::new(home, seed, trace);
    let mut chance = Chance::new(seed, 2);
    let mut asked = 0;
    // Most are short: what is wrong mostly shows after a few steps.
    let (epochs, most) = match chance.one_in(10) {
        true => (1 + chance.below(3), 16),
        false => (1 + u64::from(chance.one_in(4)), 5),
    };
    for epoch in 0..=epochs {
        let last = epoch == epochs;
        if last {
            world.calm();
        } else {
            world.trouble_again(seed, epoch);
        }
        let server = started(&mut world)?;
        check::misuses(&world)?;
        let end = {
            let tasks = tokio::task::LocalSet::new();
            let (world, chance, server, asked) = (&world, &mut chance, &server, &mut asked);
            let lived = async {
                let waiting = Waiting::default();
                let end = match last {
                    true => End::Done,
                    false => live(world, chance, server, &waiting, asked, most).await?,
                };
                if !matches!(end, End::Killed) {
                    settle(world, server, &waiting).await?;
                }
                if last {
                    leave_nothing(world, server).await?;
                }
                if matches!(end, End::Stopped) {
                    let stopped =
                        tokio::time::timeout(SETTLES_WITHIN, world.releasing(server.sandboxes.shutdown()))
                            .await;
                    stopped.map_err(|_| "the server does not stop")?;
                }
                Ok::<_, String>(end)
            };
            server.runtime.block_on(tasks.run_until(lived))?
        };
        let down = Duration::from_millis(chance.below(60_000));
        let how = match end {
            End::Killed => "the server is killed",
            End::Stopped => "the server stops",
            End::Done => "done",
        };
        world.gone(server, how, down);
        check::misuses(&world)?;
    }
    Ok(())
}

/// A server that cannot take over what runs is started again, as its operator would.
fn started(world: &mut World<'_>) -> Result<Server, String> {
    world
        .start()
        .map_err(|fault| format!("the server does not start: {fault}"))
}

async fn live(
    world: &World<'_>,
    chance: &mut Chance,
    server: &Server,
    waiting: &Waiting,
    asked: &mut u64,
    most: u64,
) -> Result<End, String> {
    for step in 0..(2 + chance.below(most)) {
        if step % 2 == 1 {
            // Of these some, always the same.
            let rows = check::rows(server).await?;
            rows.iter().step_by(2).for_each(|row| world.compute(row));
        }
        match chance.below(24) {
            0 => {
                let ids: Vec<_> = world.machine.instances().into_keys().collect();
                if let Some(id) = chance.of(&ids) {
                    world.trace.note(format!("{id} dies"));
                    let how = match chance.one_in(2) {
                        true => InstanceEnd::OutOfMemory,
                        false => InstanceEnd::Died("it was killed".into()),
                    };
                    world.machine.end(id, how);
                }
            }
            1 => {
                world.trace.note("what hangs goes on");
                world.machine.release();
            }
            2 if chance.one_in(2) => return Ok(End::Killed),
            3 if chance.one_in(4) => {
                world.calm();
                return Ok(End::Stopped);
            }
            4 => {
                let full = chance.one_in(2);
                world.fill_disk(full);
            }
            5 | 6 => {}
            _ => {
                *asked += 1;
                ask(world, chance, server, waiting, *asked);
            }
        }
        let pause = chance.pause();
        tokio::time::sleep(pause).await;
        check::at_all_times(world, server).await?;
    }
    world.calm();
    Ok(match chance.below(3) {
        0 => End::Killed,
        _ => End::Stopped,
    })
}

/// Everything works again, so everybody must get an answer.
async fn settle(world: &World<'_>, server: &Server, waiting: &Waiting) -> Result<(), String> {
    let until = tokio::time::Instant::now() + SETTLES_WITHIN;
    while !waiting.borrow().is_empty() {
        if tokio::time::Instant::now() > until {
            return Err(format!("never answered: {:?}", waiting.borrow()));
        }
        // What was asked to hang before it was told otherwise.
        world.machine.release();
        tokio::time::sleep(Duration::from_secs(10)).await;
        check::at_all_times(world, server).await?;
    }
    // What goes on behind their backs, retries of what failed for instance, ends as well.
    loop {
        world.machine.release();
        tokio::time::sleep(Duration::from_secs(2)).await;
        match check::settled(world, server).await {
            Err(_) if tokio::time::Instant::now() < until => {}
            outcome => return outcome,
        }
    }
}

/// Kills all, and looks for what is left.
async fn leave_nothing(world: &World<'_>, server: &Server) -> Result<(), String> {
    let told: Vec<_> = world.told.lock().sandboxes.clone();
    for id in told {
        let killed = server.sandboxes.kill(&server.caller, &id).await;
        world
            .trace
            .note(format!("last kill {id}: {}", shown(&killed, state)));
        // One that ended long ago may have been forgotten.
        if let Err(fault) = killed
            && fault.code != Code::SandboxNotFound
        {
            return Err(format!("{id} cannot be killed: {fault}"));
        }
    }
    check::all_killed(world, server).await
}

fn state(sandbox: &Sandbox) -> String {
    sandbox.state.to_string()
}

fn shown<T>(outcome: &Result<T, Fault>, show: impl Fn(&T) -> String) -> String {
    match outcome {
        Ok(value) => show(value),
        Err(fault) if fault.code == Code::Internal => format!("refused: internal: {}", fault.message),
        Err(fault) => format!("refused: {}", fault.code),
    }
}

/// Has somebody ask for something and wait for the answer.
fn ask(world: &World<'_>, chance: &mut Chance, server: &Server, waiting: &Waiting, number: u64) {
    let (sandboxes, caller) = (server.sandboxes.clone(), server.caller.clone());
    let told = Arc::clone(&world.told);
    let known = told.lock().sandboxes.clone();
    let id = chance.of(&known).cloned();
    let snapshot = {
        let taken = told.lock().snapshots.clone();
        chance.of(&taken).cloned()
    };
    let Some((what, work)) = choose(chance, sandboxes, caller, told, id, snapshot, number) else {
        return;
    };
    world.trace.note(format!("#{number} {what}"));
    waiting.borrow_mut().insert(number, what);
    let (waiting, trace, told) = (Rc::clone(waiting), world.trace.clone(), Arc::clone(&world.told));
    tokio::task::spawn_local(async move {
        let outcome = work.await;
        trace.note(format!("#{number} => {outcome}"));
        // Only what nobody has thought of is told so.
        if outcome.starts_with("refused: internal") {
            told.lock()
                .broken
                .push(format!("#{number} met an internal error"));
        }
        if waiting.borrow_mut().remove(&number).is_none() {
            told.lock().broken.push(format!("#{number} was answered twice"));
        }
    });
}

type Work = std::pin::Pin<Box<dyn Future<Output = String>>>;

fn choose(
    chance: &mut Chance,
    sandboxes: Sandboxes,
    caller: Caller,
    told: Arc<Mutex<Told>>,
    id: Option<SandboxId>,
    snapshot: Option<String>,
    number: u64,
) -> Option<(String, Work)> {
    let kind = chance.below(20);
    let (Some(id), true) = (id, kind > 3) else {
        let mut request = wanted(chance, snapshot.filter(|_| kind == 3), number);
        // Several want the same one, whoever makes it.
        if number % 3 == 2 {
            request.spec.name = Some(format!("name-{}", number / 6 % 2).parse().unwrap());
        }
        let what = format!("create {} {:?}", request.spec.template, request.spec.name);
        let work = async move {
            let made = match request.spec.name {
                Some(_) => sandboxes.find_or_create(&caller, request).await,
                None => sandboxes.create(&caller, request).await.map(Obtained::Made),
            };
            shown(&made, |made| {
                let (how, sandbox) = match made {
                    Obtained::Made(sandbox) => ("made", sandbox),
                    Obtained::Found(sandbox) => ("found", sandbox),
                };
                born(&told, sandbox);
                format!("{how} {} {}", sandbox.id, sandbox.state)
            })
        };
        return Some((what, Box::pin(work)));
    };
    Some(match kind {
        4..=6 => {
            // Some go on until their sandbox ends.
            let word = match number % 4 {
                0 => format!("sleep c{number}"),
                _ => format!("c{number}"),
            };
            let what = format!("exec {word} in {id}");
            let spec = ExecSpec {
                background: true,
                ..ExecSpec::new(word.split(' '))
            };
            let work = async move {
                let ran = sandboxes.exec(&caller, &id, spec).await;
                if ran.is_ok() {
                    told.lock().ran.entry(id).or_default().insert(word);
                }
                shown(&ran, |_| "ran".into())
            };
            (what, Box::pin(work))
        }
        7..=9 => {
            let kind = chance.of(&[None, Some(SaveKind::Memory), Some(SaveKind::Filesystem)]);
            let kind = kind.copied().flatten();
            let what = format!("pause {id} {kind:?}");
            let work = async move { shown(&sandboxes.pause(&caller, &id, kind).await, state) };
            (what, Box::pin(work))
        }
        10 => {
            let what = format!("stop {id}");
            let work = async move { shown(&sandboxes.stop(&caller, &id).await, state) };
            (what, Box::pin(work))
        }
        11..=13 => {
            let what = format!("resume {id}");
            let timeout = chance.one_in(2).then_some(120_000);
            let work = async move { shown(&sandboxes.resume(&caller, &id, timeout).await, state) };
            (what, Box::pin(work))
        }
        14 => {
            let count = 1 + usize::from(chance.one_in(2));
            let what = format!("fork {id} {count}");
            let request = ForkSandbox {
                count,
                kind: None,
                timeout_millis: None,
                labels: BTreeMap::new(),
            };
            let work = async move {
                let before = told.lock().ran.get(&id).cloned().unwrap_or_default();
                let forked = sandboxes.fork(&caller, &id, request).await;
                for copy in forked.iter().flatten() {
                    born(&told, copy);
                    told.lock().ran.insert(copy.id.clone(), before.clone());
                }
                shown(&forked, |copies| {
                    let ids: Vec<_> = copies.iter().map(|copy| copy.id.to_string()).collect();
                    ids.join(" ")
                })
            };
            (what, Box::pin(work))
        }
        15 | 16 => {
            let what = format!("snapshot {id}");
            let work = async move {
                let taken = sandboxes
                    .take_snapshot(&caller, &id, TakeSnapshot::default())
                    .await;
                if let Ok(taken) = &taken {
                    told.lock().snapshots.push(taken.id.to_string());
                }
                shown(&taken, |taken| taken.id.to_string())
            };
            (what, Box::pin(work))
        }
        17 => {
            let what = format!("extend {id}");
            let work = async move { shown(&sandboxes.extend(&caller, &id, 60_000).await, state) };
            (what, Box::pin(work))
        }
        _ => {
            let what = format!("kill {id}");
            let work = async move {
                let killed = sandboxes.kill(&caller, &id).await;
                if killed.is_ok() {
                    told.lock().killed.insert(id);
                }
                shown(&killed, state)
            };
            (what, Box::pin(work))
        }
    })
}

fn born(told: &Mutex<Told>, sandbox: &Sandbox) {
    let mut told = told.lock();
    if !told.sandboxes.contains(&sandbox.id) {
        told.sandboxes.push(sandbox.id.clone());
    }
}

fn wanted(chance: &mut Chance, snapshot: Option<String>, number: u64) -> CreateSandbox {
    let actions = [TimeoutAction::Kill, TimeoutAction::Pause, TimeoutAction::Stop];
    let idle = [IdleAction::Kill, IdleAction::Pause, IdleAction::Stop];
    // Some come again under the same key.
    let keyed = chance.one_in(4).then_some(number / 4);
    let mut chance = match keyed {
        Some(key) => Chance::new(key, 3),
        None => chance.clone(),
    };
    let spec = SandboxSpec {
        template: snapshot.unwrap_or_else(|| TEMPLATE.into()),
        timeout_millis: Some(1000 + chance.below(120_000)),
        on_timeout: chance.of(&actions).copied().unwrap_or_default(),
        idle: chance.one_in(3).then(|| IdlePolicy {
            after_millis: 1000 + chance.below(30_000),
            action: chance.of(&idle).copied().unwrap_or(IdleAction::Pause),
        }),
        auto_resume: chance.one_in(2),
        retention_millis: chance.one_in(3).then(|| 1000 + chance.below(60_000)),
        fallback_to_files: chance.one_in(4),
        ..SandboxSpec::default()
    };
    CreateSandbox {
        spec,
        resources: ResourcesAsked::default(),
        idempotency_key: keyed.map(|key| format!("key-{key}")),
    }
}
