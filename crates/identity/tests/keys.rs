//! Keys from their making to their end, on rows in memory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use async_trait::async_trait;
use atoll_identity::{
    Action, Caller, CreateKey, Identity, IdentityStore, Key, ModelKey, NewKey, NewSecret, NewSession,
    Project, Role, Scope, StoreError,
};
use atoll_types::{Code, Cursor, KeyId, Page, ProjectId, Timestamp};

#[derive(Debug, Default)]
struct Rows {
    projects: Mutex<Vec<Project>>,
    keys: Mutex<Vec<(Key, [u8; 32])>>,
    model_keys: Mutex<Vec<(ModelKey, [u8; 32])>>,
    sessions: Mutex<Vec<NewSession>>,
    lookups: AtomicUsize,
}

impl Rows {
    fn keys(&self) -> MutexGuard<'_, Vec<(Key, [u8; 32])>> {
        self.keys.lock()
    }
}

#[async_trait]
impl IdentityStore for Rows {
    async fn ensure_project(
        &self,
        name: &str,
        new: ProjectId,
        now: Timestamp,
    ) -> Result<Project, StoreError> {
        let mut projects = self.projects.lock();
        if let Some(known) = projects.iter().find(|project| project.name == name) {
            return Ok(known.clone());
        }
        let project = Project {
            id: new,
            name: name.to_owned(),
            created_at: now,
        };
        projects.push(project.clone());
        Ok(project)
    }

    async fn projects(&self) -> Result<Vec<Project>, StoreError> {
        Ok(self.projects.lock().clone())
    }

    async fn insert_key(&self, key: NewKey, most: usize) -> Result<Option<Key>, StoreError> {
        let working = |(known, _): &&(Key, [u8; 32])| {
            known.project == key.project
                && known.revoked_at.is_none()
                && known.expires_at.is_none_or(|at| at > key.created_at)
        };
        if self.keys().iter().filter(working).count() >= most {
            return Ok(None);
        }
        let made = Key {
            id: key.id,
            project: key.project,
            name: key.name,
            prefix: key.prefix,
            role: key.role,
            scopes: key.scopes,
            made_by: key.made_by,
            created_at: key.created_at,
            expires_at: key.expires_at,
            revoked_at: None,
            last_used_at: None,
        };
        self.keys().push((made.clone(), key.hash));
        Ok(Some(made))
    }

    async fn find_active_key(&self, hash: [u8; 32]) -> Result<Option<Key>, StoreError> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        let keys = self.keys();
        let found = keys
            .iter()
            .find(|(key, known)| *known == hash && key.revoked_at.is_none());
        Ok(found.map(|(key, _)| key.clone()))
    }

    async fn find_active_model_key(&self, hash: [u8; 32]) -> Result<Option<ModelKey>, StoreError> {
        let keys = self.model_keys.lock();
        let found = keys.iter().find(|(_, known)| *known == hash);
        Ok(found.map(|(key, _)| key.clone()))
    }

    async fn keys(
        &self,
        project: &ProjectId,
        _: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<Key>, StoreError> {
        let keys = self.keys();
        let own = keys.iter().rev().filter(|(key, _)| key.project == *project);
        Ok(Page {
            items: own.take(limit).map(|(key, _)| key.clone()).collect(),
            next: None,
        })
    }

    async fn key(&self, project: &ProjectId, id: &KeyId) -> Result<Option<Key>, StoreError> {
        let keys = self.keys();
        let mut own = keys.iter().filter(|(key, _)| key.project == *project);
        Ok(own.find(|(key, _)| key.id == *id).map(|(key, _)| key.clone()))
    }

    async fn revoke_key(
        &self,
        project: &ProjectId,
        id: &KeyId,
        now: Timestamp,
    ) -> Result<Option<Key>, StoreError> {
        let mut keys = self.keys();
        let found = keys
            .iter_mut()
            .find(|(key, _)| key.project == *project && key.id == *id);
        Ok(found.map(|(key, _)| {
            key.revoked_at.get_or_insert(now);
            key.clone()
        }))
    }

    async fn insert_session(&self, session: NewSession) -> Result<Vec<[u8; 32]>, StoreError> {
        let mut sessions = self.sessions.lock();
        sessions.push(session);
        let surplus = sessions.len().saturating_sub(MOST_SESSIONS);
        Ok(sessions.drain(..surplus).map(|ended| ended.hash).collect())
    }

    async fn find_session(&self, hash: [u8; 32]) -> Result<Option<(Key, Timestamp)>, StoreError> {
        let sessions = self.sessions.lock();
        let Some(session) = sessions.iter().find(|session| session.hash == hash) else {
            return Ok(None);
        };
        let keys = self.keys();
        let key = keys
            .iter()
            .find(|(key, _)| key.id == session.key && key.revoked_at.is_none());
        Ok(key.map(|(key, _)| (key.clone(), session.expires_at)))
    }

    async fn delete_session(&self, hash: [u8; 32]) -> Result<(), StoreError> {
        self.sessions.lock().retain(|session| session.hash != hash);
        Ok(())
    }

    fn note_key_used(&self, _: &KeyId, _: Timestamp) {}
}

/// Of more, the oldest end.
const MOST_SESSIONS: usize = 3;

/// Each test runs in a process or thread of its own, and only one of them moves it.
static NOW: AtomicI64 = AtomicI64::new(1000);

fn now() -> Timestamp {
    Timestamp(NOW.load(Ordering::Relaxed))
}

fn still() -> Timestamp {
    Timestamp(1000)
}

struct World {
    identity: Identity,
    rows: Arc<Rows>,
    operator: Caller,
    _directory: tempfile::TempDir,
}

impl World {
    async fn new(clock: fn() -> Timestamp) -> Self {
        let rows = Arc::new(Rows::default());
        let directory = tempfile::tempdir().unwrap();
        let opened = Identity::open(Arc::<Rows>::clone(&rows), directory.path(), clock);
        let identity = opened.await.unwrap();
        let operator = identity.server(identity.default_project().clone());
        Self {
            identity,
            rows,
            operator,
            _directory: directory,
        }
    }

    fn wanted(&self) -> CreateKey {
        CreateKey {
            project: self.identity.default_project().clone(),
            name: "key".into(),
            role: None,
            scopes: Vec::new(),
            expires_at: None,
        }
    }

    /// A key, and whoever holds it.
    async fn holder(&self, wanted: CreateKey) -> (Key, String, Caller) {
        let (key, secret) = self.identity.create_key(&self.operator, wanted).await.unwrap();
        let caller = self.identity.authenticate(&secret).await.unwrap().unwrap();
        (key, secret, caller)
    }
}

#[tokio::test]
async fn a_key_is_found_until_it_is_revoked_and_the_rows_are_asked_once() {
    let world = World::new(still).await;
    let identity = &world.identity;
    let (key, secret, caller) = world.holder(world.wanted()).await;
    assert_eq!(caller.key(), Some(&key.id));
    assert_eq!(caller.role(), Role::Member, "unless its maker says otherwise");
    identity.authenticate(&secret).await.unwrap().unwrap();
    assert_eq!(world.rows.lookups.load(Ordering::Relaxed), 1);
    for wrong in ["", "e2b_", "atm_x", &secret[1..], &format!("{secret}x")] {
        assert!(identity.authenticate(wrong).await.unwrap().is_none(), "{wrong}");
    }
    let lookups = world.rows.lookups.load(Ordering::Relaxed);
    assert_eq!(lookups, 1, "what cannot be a key costs nothing");
    assert!(!format!("{:?}", world.rows).contains(&secret), "kept as a hash");

    let revoked = identity.revoke_key(&caller, &key.project, &key.id).await.unwrap();
    assert!(revoked.revoked_at.is_some());
    assert!(identity.authenticate(&secret).await.unwrap().is_none());
}

#[tokio::test]
async fn a_project_has_a_bounded_number_of_keys() {
    let world = World::new(still).await;
    let (_, _, maker) = world.holder(world.wanted()).await;
    let make = async || world.identity.create_key(&maker, world.wanted()).await;
    let (first, _) = make().await.unwrap();
    for _ in 2..1000 {
        make().await.unwrap();
    }
    let refused = make().await.unwrap_err();
    assert_eq!(refused.code, Code::TooManyKeys);
    let revoked = world.identity.revoke_key(&maker, &first.project, &first.id);
    revoked.await.unwrap();
    make().await.unwrap();
    // The server itself makes one whenever it must.
    world.holder(world.wanted()).await;
}

#[tokio::test]
async fn a_key_expires_by_itself_and_says_so_once() {
    let world = World::new(now).await;
    let wanted = CreateKey {
        expires_at: Some(Timestamp(2000)),
        ..world.wanted()
    };
    let (key, secret, caller) = world.holder(wanted.clone()).await;
    // One for models ends what is open with it, too.
    let for_models = NewSecret::for_models();
    let model_key = ModelKey {
        id: KeyId::from_entropy([9; 20]),
        project: key.project.clone(),
        expires_at: Some(Timestamp(1999)),
    };
    let row = (model_key.clone(), for_models.hash);
    world.rows.model_keys.lock().push(row);
    let calls = world.identity.authenticate_for_models(&for_models.text).await;
    assert_eq!(calls.unwrap().unwrap().key(), Some(&model_key.id));
    assert!(world.identity.take_expired().is_empty());

    // What it makes ends with it.
    let made = world.identity.create_key(&caller, world.wanted()).await.unwrap();
    assert_eq!((key.made_by, made.0.made_by), (None, Some(key.id.clone())));
    assert_eq!(made.0.expires_at, Some(Timestamp(2000)));
    let longer = CreateKey {
        expires_at: Some(Timestamp(2001)),
        ..world.wanted()
    };
    let refused = world.identity.create_key(&caller, longer).await.unwrap_err();
    assert_eq!(refused.code, Code::NotAllowed);

    NOW.store(2000, Ordering::Relaxed);
    assert!(world.identity.authenticate(&secret).await.unwrap().is_none());
    let calls = world.identity.authenticate_for_models(&for_models.text).await;
    assert!(calls.unwrap().is_none());
    assert_eq!(
        world.identity.take_expired(),
        [model_key.id.to_string(), key.id.to_string()]
    );
    assert!(world.identity.take_expired().is_empty());
    let late = world
        .identity
        .create_key(&world.operator, wanted)
        .await
        .unwrap_err();
    assert_eq!(late.code, Code::KeyExpiryInvalid);
}

#[tokio::test]
async fn nobody_makes_or_revokes_a_key_that_may_do_more_than_their_own() {
    let world = World::new(still).await;
    let identity = &world.identity;
    let tenant = identity.create_project(&world.operator, "tenant").await.unwrap();
    for maker in Role::ALL {
        let (_, _, caller) = world
            .holder(CreateKey {
                role: Some(maker),
                ..world.wanted()
            })
            .await;
        for role in Role::ALL {
            let wanted = CreateKey {
                role: Some(role),
                ..world.wanted()
            };
            let allowed = match maker {
                Role::Operator => true,
                // Nor one that answers for people: what workers hold would do so by a key that it made.
                Role::Member => matches!(role, Role::Member | Role::Viewer),
                Role::Viewer | Role::Approver => false,
            };
            let made = identity.create_key(&caller, wanted.clone()).await;
            assert_eq!(made.is_ok(), allowed, "{maker} makes {role}: {made:?}");
            let (key, ..) = world.holder(wanted).await;
            let revoked = identity.revoke_key(&caller, &key.project, &key.id).await;
            assert_eq!(revoked.is_ok(), allowed, "{maker} revokes {role}: {revoked:?}");
        }
    }
    // A key that is restricted makes none at all: whatever it made could be used from elsewhere.
    let (_, _, restricted) = world
        .holder(CreateKey {
            scopes: vec![Scope::Sandboxes],
            ..world.wanted()
        })
        .await;
    let refused = identity
        .create_key(&restricted, world.wanted())
        .await
        .unwrap_err();
    assert_eq!(refused.code, Code::NotAllowed);
    // Whoever runs the server does so from the first project, and makes members elsewhere.
    let elsewhere = CreateKey {
        project: tenant.id.clone(),
        ..world.wanted()
    };
    let (key, _, member) = world.holder(elsewhere.clone()).await;
    assert_eq!(key.role, Role::Member);
    assert_eq!(
        member.may(Action::ManageProjects, None).unwrap_err().code,
        Code::OperatorsOnly
    );
    assert_eq!(identity.projects(&member).await.unwrap(), [tenant]);
    let operator = CreateKey {
        role: Some(Role::Operator),
        ..elsewhere
    };
    let refused = identity.create_key(&world.operator, operator).await.unwrap_err();
    assert_eq!(refused.code, Code::RoleInvalid);
}

#[tokio::test]
async fn of_too_many_sessions_the_oldest_end() {
    let world = World::new(still).await;
    let identity = &world.identity;
    let (_, _, caller) = world.holder(world.wanted()).await;
    let mut sessions = Vec::new();
    for _ in 0..=MOST_SESSIONS {
        let session = identity.begin_session(&caller).await.unwrap();
        assert!(identity.find_session(&session.secret).await.unwrap().is_some());
        sessions.push(session);
    }
    for (at, session) in sessions.iter().enumerate() {
        let found = identity.find_session(&session.secret).await.unwrap();
        assert_eq!(found.is_some(), at > 0, "{at}");
    }
}

#[tokio::test]
async fn who_is_restricted_or_runs_nothing_sees_their_own_project_alone() {
    let world = World::new(still).await;
    let identity = &world.identity;
    let other = identity.create_project(&world.operator, "other").await.unwrap();
    for (role, scopes, sees_all) in [
        (Role::Operator, vec![], true),
        (Role::Operator, vec![Scope::Ledger], false),
        (Role::Member, vec![], false),
    ] {
        let wanted = CreateKey {
            role: Some(role),
            scopes,
            ..world.wanted()
        };
        let (key, _, caller) = world.holder(wanted).await;
        assert_eq!(caller.sees_all_projects(), sees_all, "{key:?}");
        let seen = identity.projects(&caller).await.unwrap();
        assert_eq!(seen.len(), if sees_all { 2 } else { 1 }, "{key:?}");
        let named = identity.project_named(&caller, Some("other")).await;
        assert_eq!(named.ok(), sees_all.then(|| other.id.clone()), "{key:?}");
    }
}

/// Whoever has any key begins and ends sessions as often as they like: that makes no work for others.
#[tokio::test]
async fn what_one_ends_is_forgotten_for_nobody_else() {
    let world = World::new(still).await;
    let identity = &world.identity;
    let (_, secret, _) = world.holder(world.wanted()).await;
    let (noisy, _, caller) = world.holder(world.wanted()).await;
    let known = world.rows.lookups.load(Ordering::Relaxed);
    for _ in 0..=MOST_SESSIONS {
        let session = identity.begin_session(&caller).await.unwrap();
        let inside = identity.find_session(&session.secret).await.unwrap().unwrap();
        identity.authenticate(&secret).await.unwrap().unwrap();
        let session = identity.begin_session(&caller).await.unwrap();
        identity.end_session(&inside).await.unwrap();
        identity.find_session(&session.secret).await.unwrap().unwrap();
        identity.authenticate(&secret).await.unwrap().unwrap();
    }
    let last = identity.begin_session(&caller).await.unwrap();
    identity.find_session(&last.secret).await.unwrap().unwrap();
    identity
        .revoke_key(&caller, &noisy.project, &noisy.id)
        .await
        .unwrap();
    assert!(identity.find_session(&last.secret).await.unwrap().is_none());
    identity.key_was_revoked(&KeyId::from_entropy([9; 20]));
    identity.authenticate(&secret).await.unwrap().unwrap();
    assert_eq!(world.rows.lookups.load(Ordering::Relaxed), known);
}

#[tokio::test]
async fn a_session_may_what_its_key_may_and_ends_with_it() {
    let world = World::new(still).await;
    let identity = &world.identity;
    let (key, _, caller) = world
        .holder(CreateKey {
            role: Some(Role::Viewer),
            scopes: vec![Scope::Ledger],
            expires_at: Some(Timestamp(5000)),
            ..world.wanted()
        })
        .await;
    let first = identity.begin_session(&caller).await.unwrap();
    let second = identity.begin_session(&caller).await.unwrap();
    assert_eq!(first.word.expires_at, Timestamp(5000), "not longer than its key");
    assert!(
        !format!("{:?}", world.rows).contains(&first.secret),
        "kept as a hash"
    );
    let inside = identity.find_session(&first.secret).await.unwrap().unwrap();
    assert_eq!((inside.role(), inside.key()), (Role::Viewer, Some(&key.id)));
    for action in Action::ALL {
        assert_eq!(
            inside.may(action, None).is_ok(),
            caller.may(action, None).is_ok(),
            "{action}"
        );
    }
    // One does not follow from another, and neither secret is a key.
    assert!(identity.begin_session(&inside).await.is_err());
    assert!(identity.authenticate(&first.secret).await.unwrap().is_none());
    assert!(identity.session_word(&caller).is_err());

    let word = identity.session_word(&inside).unwrap().csrf;
    assert_eq!(word, first.word.csrf);
    assert!(identity.is_csrf(&inside, &word));
    for wrong in ["", &second.word.csrf, &first.secret] {
        assert!(!identity.is_csrf(&inside, wrong), "{wrong}");
    }
    assert!(!identity.is_csrf(&caller, &word), "a key has none");

    identity.end_session(&inside).await.unwrap();
    assert!(identity.find_session(&first.secret).await.unwrap().is_none());
    assert!(identity.find_session(&second.secret).await.unwrap().is_some());
    identity
        .revoke_key(&world.operator, &key.project, &key.id)
        .await
        .unwrap();
    assert!(identity.find_session(&second.secret).await.unwrap().is_none());
}

#[tokio::test]
async fn a_step_may_no_more_than_whoever_started_its_workflow() {
    let world = World::new(still).await;
    let project = world.identity.default_project();
    for role in Role::ALL {
        for scopes in [
            vec![],
            vec![Scope::Workflows],
            vec![Scope::Workflows, Scope::Sandboxes],
            vec![Scope::Models],
        ] {
            let wanted = CreateKey {
                role: Some(role),
                scopes,
                ..world.wanted()
            };
            let (_, _, starter) = world.holder(wanted).await;
            let step = world.identity.step(project.clone(), &starter.rights()).unwrap();
            for action in Action::ALL {
                let may = step.may(action, None).is_ok();
                assert!(!may || starter.may(action, None).is_ok(), "{role} {action}");
            }
        }
    }
    let may = |rights: &str, action| {
        let step = world.identity.step(project.clone(), rights).unwrap();
        step.may(action, None).is_ok()
    };
    // As before where nobody has said; and an operator's steps do not run the server.
    assert!(may("", Action::CreateSandboxes) && may("operator", Action::CreateSandboxes));
    assert!(!may("operator", Action::RunServer));
    assert!(!may("member workflows", Action::CreateSandboxes));
    assert!(may("member workflows sandboxes", Action::CreateSandboxes));
    for broken in ["king", "member everything"] {
        assert!(world.identity.step(project.clone(), broken).is_err(), "{broken}");
    }
}
