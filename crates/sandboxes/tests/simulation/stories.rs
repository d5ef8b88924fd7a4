//! What happens in one known order: the runtime does as it is told, step by step.

use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use atoll_runtime::InstanceEnd;
use atoll_runtime::scripted::{Answer, How, Step};
use atoll_sandboxes::{CreateSandbox, ExecSpec, ForkSandbox, ListSandboxes, Obtained, Sandbox};
use atoll_types::{
    Code, EndReason, Fault, IdleAction, IdlePolicy, InstanceId, KeyId, Owner, ResourcesAsked, SandboxId,
    SandboxSpec, SandboxState,
};

use crate::world::{Home, Server, TEMPLATE, Trace, World};

/// A world in which everything works at once, but the first of these steps.
fn world<'a>(home: &'a Home, steps: impl IntoIterator<Item = (Step, u64, How)>) -> World<'a> {
    let mut world = World::new(home, 1, &Trace::default());
    world.pool = 0;
    let mut steps: VecDeque<_> = steps.into_iter().collect();
    world.machine.follow(move |step, _: &_| {
        let is_next = steps.front().is_some_and(|(next, _, _)| *next == step);
        let scripted = is_next.then(|| steps.pop_front()).flatten();
        scripted.map_or(Answer::AT_ONCE, |(_, millis, how)| Answer {
            after: Duration::from_millis(millis),
            how,
        })
    });
    world
}

async fn make(server: &Server, key: Option<&str>) -> Result<Sandbox, Fault> {
    make_named(server, None, key).await
}

async fn make_named(server: &Server, name: Option<&str>, key: Option<&str>) -> Result<Sandbox, Fault> {
    let request = named(name, key, false);
    server.sandboxes.create(&server.caller, request).await
}

#[test]
fn a_pause_that_fails_is_told_to_all_who_waited_for_it_whatever_comes_next() {
    let home = Home::new();
    let mut world = world(&home, [(Step::Save, 10, How::Fails)]);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let id = make(&server, None).await.unwrap().id;
        let pause = |after| {
            let (server, id) = (&server, &id);
            async move {
                tokio::time::sleep(Duration::from_millis(after)).await;
                server.sandboxes.pause(&server.caller, id, None).await
            }
        };
        // The third comes at the very moment at which the first fails, and works.
        let (first, joined, next) = tokio::join!(pause(0), pause(5), pause(10));
        assert_eq!(first.unwrap_err().code, Code::RuntimeFailed);
        assert_eq!(joined.unwrap_err().code, Code::RuntimeFailed);
        let next = match next {
            // It was early, and joined.
            Err(fault) => {
                assert_eq!(fault.code, Code::RuntimeFailed);
                pause(0).await
            }
            paused => paused,
        };
        assert_eq!(next.unwrap().state, SandboxState::Paused);
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn a_kill_does_not_wait_for_a_save_and_a_pause_not_for_what_was_killed() {
    let home = Home::new();
    let mut world = world(&home, [(Step::Save, 0, How::Hangs)]);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let id = make(&server, None).await.unwrap().id;
        let (paused, killed) = tokio::join!(server.sandboxes.pause(&server.caller, &id, None), async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            server.sandboxes.kill(&server.caller, &id).await
        });
        assert_eq!(paused.unwrap_err().code, Code::SandboxEnded);
        assert_eq!(killed.unwrap().state, SandboxState::Deleted);
        world.machine.release();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(server.vault.ids().unwrap(), Vec::<String>::new());
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn what_has_failed_is_killed_by_two_at_once_and_both_succeed() {
    let home = Home::new();
    let mut world = world(&home, []);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let id = make(&server, None).await.unwrap().id;
        let instances = world.machine.instances();
        world
            .machine
            .end(instances.keys().next().unwrap(), InstanceEnd::OutOfMemory);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let failed = server.sandboxes.get(&server.caller, &id).await.unwrap();
        assert_eq!(failed.state, SandboxState::Failed);
        let kill = || server.sandboxes.kill(&server.caller, &id);
        let (one, other) = tokio::join!(kill(), kill());
        assert_eq!(one.unwrap().state, SandboxState::Deleted);
        assert_eq!(other.unwrap().state, SandboxState::Deleted);
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn a_resume_that_fails_is_told_to_all_and_can_be_tried_again() {
    let home = Home::new();
    let mut world = world(&home, [(Step::Restore, 10, How::Fails)]);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let id = make(&server, None).await.unwrap().id;
        let (sandboxes, caller) = (&server.sandboxes, &server.caller);
        sandboxes.pause(caller, &id, None).await.unwrap();
        let resume = || sandboxes.resume(caller, &id, None);
        let (one, other) = tokio::join!(resume(), resume());
        assert_eq!(one.unwrap_err().code, Code::RuntimeFailed);
        assert_eq!(other.unwrap_err().code, Code::RuntimeFailed);
        assert_eq!(resume().await.unwrap().state, SandboxState::Running);
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn a_full_disk_of_the_host_is_told_as_such_and_not_as_the_runtime_s_failure() {
    let home = Home::new();
    let full = [Step::Start, Step::Save, Step::Save, Step::Restore];
    let mut world = world(&home, full.map(|step| (step, 10, How::Full)));
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let (sandboxes, caller) = (&server.sandboxes, &server.caller);
        let code = Code::ServerDiskFull;
        let copies = ForkSandbox {
            count: 1,
            kind: None,
            timeout_millis: None,
            labels: BTreeMap::new(),
        };
        assert_eq!(make(&server, None).await.unwrap_err().code, code);
        let id = make(&server, None).await.unwrap().id;
        assert_eq!(sandboxes.pause(caller, &id, None).await.unwrap_err().code, code);
        let forked = sandboxes.fork(caller, &id, copies).await;
        assert_eq!(forked.unwrap_err().code, code);
        sandboxes.pause(caller, &id, None).await.unwrap();
        assert_eq!(sandboxes.resume(caller, &id, None).await.unwrap_err().code, code);
        sandboxes.resume(caller, &id, None).await.unwrap();
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn who_comes_second_under_a_key_gets_what_the_first_made_or_hears_that_it_failed() {
    let home = Home::new();
    // Each begins to boot before it knows whether it is the first.
    let outcomes = [How::Works, How::Works, How::Fails, How::Fails];
    let mut world = world(&home, outcomes.map(|how| (Step::Start, 5000, how)));
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let (one, other) = tokio::join!(make(&server, Some("a")), make(&server, Some("a")));
        assert_eq!(one.unwrap().id, other.unwrap().id);
        let (one, other) = tokio::join!(make(&server, Some("b")), make(&server, Some("b")));
        let mut codes = [one.unwrap_err().code.text(), other.unwrap_err().code.text()];
        codes.sort_unstable();
        assert_eq!(codes, ["runtime_failed", "start_failed"]);
        make(&server, Some("b")).await.unwrap();
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn of_two_that_want_a_name_one_is_made_and_the_name_is_found_until_it_ends() {
    let home = Home::new();
    let mut world = world(&home, []);
    let server = world.start().unwrap();
    let (sandboxes, caller) = (server.sandboxes.clone(), server.caller.clone());
    let id = server.runtime.block_on(async {
        let want = |key| make_named(&server, Some("agent"), key);
        let (one, other) = tokio::join!(want(Some("a")), want(None));
        let (made, refused) = match (one, other) {
            (Ok(made), Err(refused)) | (Err(refused), Ok(made)) => (made, refused),
            both => panic!("{both:?}"),
        };
        assert_eq!(refused.code, Code::NameTaken);
        let found = async || {
            sandboxes
                .named(&caller, "agent")
                .await
                .map_err(|fault| fault.code)
        };
        assert_eq!(found().await, Ok(made.id.clone()));
        // A copy has no name, and a resume keeps it.
        let copies = ForkSandbox {
            count: 1,
            kind: None,
            timeout_millis: None,
            labels: BTreeMap::new(),
        };
        let copies = sandboxes.fork(&caller, &made.id, copies).await.unwrap();
        assert_eq!(copies[0].spec.name, None);
        sandboxes.pause(&caller, &made.id, None).await.unwrap();
        assert_eq!(want(None).await.unwrap_err().code, Code::NameTaken);
        sandboxes.resume(&caller, &made.id, None).await.unwrap();
        assert_eq!(found().await, Ok(made.id.clone()));
        sandboxes.kill(&caller, &made.id).await.unwrap();
        assert_eq!(found().await, Err(Code::SandboxNotFound));
        want(None).await.unwrap().id
    });
    drop(sandboxes);
    // The next server knows it by the same name.
    world.gone(server, "killed", Duration::ZERO);
    let server = world.start().unwrap();
    let found = server
        .runtime
        .block_on(server.sandboxes.named(&server.caller, "agent"));
    assert_eq!(found.unwrap(), id);
    world.gone(server, "done", Duration::ZERO);
}

/// Whoever wants the sandbox of this name, as it is or a new one.
fn named(name: Option<&str>, key: Option<&str>, auto_resume: bool) -> CreateSandbox {
    CreateSandbox {
        spec: SandboxSpec {
            name: name.map(|name| name.parse().unwrap()),
            template: TEMPLATE.into(),
            timeout_millis: Some(3_600_000),
            auto_resume,
            ..SandboxSpec::default()
        },
        resources: ResourcesAsked::default(),
        idempotency_key: key.map(str::to_owned),
    }
}

async fn obtain(server: &Server, request: CreateSandbox) -> Result<(bool, Sandbox), Fault> {
    match server.sandboxes.find_or_create(&server.caller, request).await? {
        Obtained::Made(sandbox) => Ok((true, sandbox)),
        Obtained::Found(sandbox) => Ok((false, sandbox)),
    }
}

#[test]
fn of_ten_who_want_the_sandbox_of_a_name_one_makes_it_and_all_get_it() {
    let home = Home::new();
    // Each begins to boot before it knows whether it is the first.
    let mut world = world(&home, [(Step::Start, 5000, How::Works)]);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let want = || obtain(&server, named(Some("agent"), None, false));
        let got: Vec<_> = futures_util::future::join_all((0..10).map(|_| want())).await;
        let got: Vec<_> = got.into_iter().map(Result::unwrap).collect();
        assert_eq!(got.iter().filter(|(made, _)| *made).count(), 1);
        let one = &got[0].1.id;
        assert!(
            got.iter()
                .all(|(_, it)| it.id == *one && it.state == SandboxState::Running)
        );
        // There is no room for another one, and none is needed.
        while make(&server, None).await.is_ok() {}
        let (made, found) = want().await.unwrap();
        assert!(!made && found.id == *one);
        let other = obtain(&server, named(Some("other"), None, false)).await;
        assert_eq!(other.unwrap_err().code, Code::TooManySandboxes);
        let nameless = obtain(&server, named(None, None, false)).await;
        assert_eq!(nameless.unwrap_err().code, Code::ContradictingFields);
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn who_wants_the_sandbox_of_a_name_makes_one_where_the_other_fails_or_goes() {
    let home = Home::new();
    // Whoever is the first fails; the other one has begun to boot in vain.
    let mut world = world(&home, [(Step::Start, 5000, How::Fails); 2]);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let want = || obtain(&server, named(Some("agent"), None, false));
        let (one, other) = tokio::join!(want(), want());
        let ((made, first), failed) = match (one, other) {
            (Ok(got), Err(failed)) | (Err(failed), Ok(got)) => (got, failed),
            both => panic!("{both:?}"),
        };
        assert_eq!(failed.code, Code::RuntimeFailed);
        assert!(made && first.state == SandboxState::Running);
        // One that is on its way out has the name until it is gone.
        world.machine.follow(|step, _: &_| Answer {
            after: Duration::from_secs(if step == Step::Destroy { 3 } else { 0 }),
            how: How::Works,
        });
        let (killed, next) = tokio::join!(server.sandboxes.kill(&server.caller, &first.id), async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            want().await
        });
        assert_eq!(killed.unwrap().state, SandboxState::Deleted);
        let (made, next) = next.unwrap();
        assert!(made && next.id != first.id);
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn a_sandbox_that_is_found_by_name_is_as_it_was_and_wakes_if_it_asks_for_that() {
    let home = Home::new();
    let mut world = world(&home, []);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        for (name, auto_resume, state) in [
            ("sleeper", false, SandboxState::Paused),
            ("waker", true, SandboxState::Running),
        ] {
            let (_, first) = obtain(&server, named(Some(name), None, auto_resume))
                .await
                .unwrap();
            server
                .sandboxes
                .pause(&server.caller, &first.id, None)
                .await
                .unwrap();
            // What else is asked for does not count.
            let mut request = named(Some(name), None, !auto_resume);
            request.spec.template = "no such template".into();
            let (made, found) = obtain(&server, request).await.unwrap();
            assert!(!made && found.id == first.id);
            assert_eq!((found.state, found.spec.auto_resume), (state, auto_resume));
        }
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn an_idempotency_key_finds_what_it_has_made_whatever_has_the_name_now() {
    let home = Home::new();
    let mut world = world(&home, []);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let want = |key| obtain(&server, named(Some("agent"), Some(key), false));
        let kill = async |id: &SandboxId| server.sandboxes.kill(&server.caller, id).await.unwrap();
        let (_, first) = want("a").await.unwrap();
        let (made, again) = want("a").await.unwrap();
        assert!(
            made && again.id == first.id,
            "the answer to the same request is the same"
        );
        // One that found its sandbox by name has not used its key.
        let (made, found) = want("b").await.unwrap();
        assert!(!made && found.id == first.id);
        kill(&first.id).await;
        let (made, second) = want("b").await.unwrap();
        assert!(made && second.id != first.id);
        let (made, over) = want("a").await.unwrap();
        assert!(made && over.id == first.id);
        assert_eq!(over.state, SandboxState::Deleted, "as without a name");
        let mut other = named(Some("agent"), Some("a"), false);
        other.spec.timeout_millis = Some(60_000);
        assert_eq!(
            obtain(&server, other).await.unwrap_err().code,
            Code::IdempotencyConflict
        );
    });
    world.gone(server, "done", Duration::ZERO);
}

/// Ends when it was idle for ten seconds.
async fn make_idle(server: &Server) -> SandboxId {
    let mut request = named(None, None, false);
    request.spec.idle = Some(IdlePolicy {
        after_millis: 10_000,
        action: IdleAction::Kill,
    });
    let made = server.sandboxes.create(&server.caller, request).await;
    made.unwrap().id
}

async fn seen(server: &Server, id: &SandboxId) -> (SandboxState, Option<EndReason>) {
    let sandbox = server.sandboxes.get(&server.caller, id).await.unwrap();
    (sandbox.state, sandbox.end)
}

const RUNS: (SandboxState, Option<EndReason>) = (SandboxState::Running, None);
const WAS_IDLE: (SandboxState, Option<EndReason>) = (SandboxState::Deleted, Some(EndReason::Idle));

#[test]
fn one_that_computes_is_not_idle_until_it_stops() {
    let home = Home::new();
    let mut world = world(&home, []);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        let seconds = |count| tokio::time::sleep(Duration::from_secs(count));
        let (works, dozes) = (make_idle(&server).await, make_idle(&server).await);
        let instance_of = |id: &SandboxId| {
            let instances = world.machine.instances();
            let mut its = instances.into_iter();
            its.find(|(_, look)| look.hostname.as_deref() == Some(id.bare()))
                .unwrap()
                .0
        };
        let (busy, quiet) = (instance_of(&works), instance_of(&dozes));
        for second in 1..=60 {
            seconds(1).await;
            // Two percent of a processor, and what an agent and a kernel take by themselves.
            world.machine.spend(&busy, 20_000);
            if second <= 9 {
                world.machine.spend(&quiet, 2_000);
            }
            if second == 9 {
                assert_eq!(seen(&server, &dozes).await, RUNS, "not before its time");
            }
        }
        assert_eq!(seen(&server, &works).await, RUNS);
        assert_eq!(seen(&server, &dozes).await, WAS_IDLE);
        // Looked at when its idle time is over, and then once more.
        seconds(21).await;
        assert_eq!(seen(&server, &works).await, WAS_IDLE);
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn one_in_which_a_command_runs_is_in_use_until_the_command_ends_also_under_the_next_server() {
    let home = Home::new();
    let mut world = world(&home, []);
    let server = world.start().unwrap();
    let minute = Duration::from_secs(60);
    let start = async |server: &Server, id: &SandboxId, program: &str| {
        let spec = ExecSpec {
            background: true,
            ..ExecSpec::new([program])
        };
        let begun = server.sandboxes.exec(&server.caller, id, spec).await;
        begun.unwrap().command
    };
    let (id, command) = server.runtime.block_on(async {
        let (busy, done) = (make_idle(&server).await, make_idle(&server).await);
        let command = start(&server, &busy, "sleep").await;
        start(&server, &done, "true").await;
        tokio::time::sleep(minute).await;
        assert_eq!(seen(&server, &busy).await, RUNS);
        assert_eq!(seen(&server, &done).await, WAS_IDLE);
        (busy, command)
    });
    world.gone(server, "killed", Duration::from_secs(1));
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        tokio::time::sleep(minute).await;
        assert_eq!(seen(&server, &id).await, RUNS);
        let ended = server.sandboxes.signal(&server.caller, &id, &command, 9).await;
        ended.unwrap();
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert_eq!(
            seen(&server, &id).await,
            RUNS,
            "its idle time begins with the end"
        );
        tokio::time::sleep(Duration::from_secs(12)).await;
        assert_eq!(seen(&server, &id).await, WAS_IDLE);
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn no_command_runs_in_a_sandbox_whose_name_is_taken() {
    let home = Home::new();
    let mut world = world(&home, []);
    world.pool = 2;
    // By instance. One that is kept ready runs a command of the server's own to warm up, and no other.
    let ran: Arc<Mutex<BTreeMap<InstanceId, usize>>> = Arc::default();
    let count = Arc::clone(&ran);
    world.machine.follow(move |step, instance: &InstanceId| {
        if step == Step::Exec {
            *count.lock().entry(instance.clone()).or_default() += 1;
        }
        Answer::AT_ONCE
    });
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        // Until the pool is full.
        tokio::time::sleep(Duration::from_secs(1)).await;
        make_named(&server, Some("agent"), None).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let request = CreateSandbox {
            spec: SandboxSpec {
                name: Some("agent".parse().unwrap()),
                template: TEMPLATE.into(),
                timeout_millis: Some(3_600_000),
                ..SandboxSpec::default()
            },
            resources: ResourcesAsked::default(),
            idempotency_key: None,
        };
        let command = ExecSpec::new(["touch", "file"]);
        let refused = server.sandboxes.run(&server.caller, request, command, true).await;
        assert_eq!(refused.unwrap_err().code, Code::NameTaken);
        assert_eq!(ran.lock().values().max(), Some(&1));
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn what_belongs_to_a_sandbox_ends_with_it_also_while_no_server_runs() {
    let home = Home::new();
    let mut world = world(&home, []);
    let server = world.start().unwrap();
    let owned_by = async |server: &Server, owner: Owner| {
        let request = CreateSandbox {
            spec: SandboxSpec {
                owner: Some(owner),
                template: TEMPLATE.into(),
                timeout_millis: Some(3_600_000),
                ..SandboxSpec::default()
            },
            resources: ResourcesAsked::default(),
            idempotency_key: None,
        };
        server.sandboxes.create(&server.caller, request).await
    };
    let state = async |server: &Server, id: &SandboxId| {
        tokio::time::sleep(Duration::from_secs(1)).await;
        server.sandboxes.get(&server.caller, id).await.unwrap().state
    };
    let (other, its) = server.runtime.block_on(async {
        let owner = make(&server, None).await.unwrap();
        assert_eq!(owner.spec.owner, None, "the server has no key");
        let own = owned_by(&server, Owner::Sandbox(owner.id.clone())).await.unwrap();
        let mut listed = ListSandboxes {
            owner: Some("sandbox".parse().unwrap()),
            limit: 10,
            ..ListSandboxes::default()
        };
        let page = server
            .sandboxes
            .list(&server.caller, listed.clone())
            .await
            .unwrap();
        assert_eq!(page.items.iter().map(|it| &it.id).collect::<Vec<_>>(), [&own.id]);
        listed.owner = Some("workflow".parse().unwrap());
        let page = server.sandboxes.list(&server.caller, listed).await.unwrap();
        assert!(page.items.is_empty());
        server.sandboxes.kill(&server.caller, &owner.id).await.unwrap();
        assert_eq!(state(&server, &own.id).await, SandboxState::Deleted);
        // Nothing can come to belong to what is over, and nobody gives away what is another key's.
        let late = owned_by(&server, Owner::Sandbox(owner.id)).await;
        assert_eq!(late.unwrap_err().code, Code::OwnerInvalid);
        let foreign = owned_by(&server, Owner::Key(KeyId::from_entropy([1; 20]))).await;
        assert_eq!(foreign.unwrap_err().code, Code::OwnerInvalid);

        let other = make(&server, None).await.unwrap().id;
        let its = owned_by(&server, Owner::Sandbox(other.clone())).await.unwrap().id;
        (other, its)
    });
    world.gone(server, "killed", Duration::from_secs(1));
    let instances = world.machine.instances();
    let (instance, _) = instances
        .iter()
        .find(|(_, look)| look.hostname.as_deref() == Some(other.bare()))
        .unwrap();
    world.machine.end(instance, InstanceEnd::OutOfMemory);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        assert_eq!(state(&server, &other).await, SandboxState::Failed);
        assert_eq!(state(&server, &its).await, SandboxState::Deleted);
    });
    world.gone(server, "done", Duration::ZERO);
}

#[test]
fn a_new_server_takes_over_what_runs_and_ends_what_died() {
    let home = Home::new();
    let mut world = world(&home, []);
    let server = world.start().unwrap();
    let (lives, dies) = server.runtime.block_on(async {
        let (one, other) = (make(&server, None).await, make(&server, None).await);
        (one.unwrap().id, other.unwrap().id)
    });
    world.gone(server, "killed", Duration::from_secs(1));
    let instances = world.machine.instances();
    let its = |name: &str| {
        instances
            .iter()
            .find(|(_, look)| look.hostname.as_deref() == Some(name))
    };
    let (instance, _) = its(dies.bare()).unwrap();
    world.machine.end(instance, InstanceEnd::OutOfMemory);
    let server = world.start().unwrap();
    server.runtime.block_on(async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let state = async |id| server.sandboxes.get(&server.caller, id).await.unwrap().state;
        assert_eq!(state(&lives).await, SandboxState::Running);
        assert_eq!(state(&dies).await, SandboxState::Failed);
    });
    assert_eq!(world.machine.instances().len(), 1);
    world.gone(server, "done", Duration::ZERO);
}
