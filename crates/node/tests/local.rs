//! A node on a scripted machine: whose an instance is, what is told of its end, and what stays of captured state.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_image::Templates;
use atoll_lifecycle::InstanceFate;
use atoll_node::{
    Boot, Bytes, ChannelError, Event, Failed, Greeting, Guests as _, Instances as _, LocalNode, Node as _,
    Origin, Outside, PoolSetting, Probe, Recorder, SavedState as _, Settings, State, Verdict,
    VolumeBytes as _, Wanted, entropy, wall_clock,
};
use atoll_runtime::InstanceEnd;
use atoll_runtime::scripted::{Answer, Scripted};
use atoll_types::{
    DiskBacking, GIB, InstanceId, Isolation, Resources, SandboxId, SaveKind, SnapshotId, TemplateId,
    TemplateManifest, TemplateSource, Timestamp,
};
use atoll_vault::Vault;
use atoll_volumes::Volumes;

const TIER: Isolation = Isolation::Gvisor;
const TEMPLATE: &str = "base";

struct World {
    _dir: tempfile::TempDir,
    machine: Scripted,
    node: LocalNode,
    template: TemplateManifest,
}

/// A node with so many instances in its pool.
fn world(pooled: usize) -> World {
    atoll_node::testing::determined_by(1);
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir_all(data.join("scratch")).unwrap();
    let templates = Templates::open(dir.path().join("templates")).unwrap();
    let template = TemplateManifest {
        id: TemplateId::from_entropy([7; 20]),
        digest: "0".repeat(64),
        size_bytes: 1,
        layer_bytes: None,
        created_at: Timestamp(0),
        source: TemplateSource::Debian {
            suite: "none".into(),
            packages: Vec::new(),
        },
        env: BTreeMap::new(),
        workdir: "/".into(),
        user: "user".into(),
        start: None,
        command: None,
        exposed_ports: Vec::new(),
        network: None,
        resources: None,
    };
    let path = templates
        .dir()
        .join("manifests")
        .join(format!("{}.json", template.id));
    std::fs::write(path, serde_json::to_vec(&template).unwrap()).unwrap();
    std::fs::write(templates.dir().join("names").join(TEMPLATE), template.id.as_str()).unwrap();
    let machine = Scripted::new(TIER, true, |_, _: &_| Answer::AT_ONCE);
    let settings = Settings {
        data_dir: data.clone(),
        limits: atoll_lifecycle::Limits::default(),
        pools: vec![PoolSetting {
            template: TEMPLATE.into(),
            size: pooled,
            resources: Resources::default(),
            isolation: None,
        }],
        pools_of: atoll_types::ProjectId::from_entropy([1; 20]),
        durable_saves: false,
        min_free_disk: 0,
        build_resources: Resources {
            cpu_millis: 1000,
            memory_bytes: GIB,
            disk_bytes: GIB,
            disk_backing: DiskBacking::Disk,
            pids: 64,
        },
        now: wall_clock,
    };
    let tiers = vec![Probe {
        isolation: TIER,
        verdict: Verdict::Works {
            detail: "scripted".into(),
            no_disk: None,
        },
    }];
    let bytes = Bytes {
        templates,
        vault: Vault::open(data.join("vault"), None).unwrap(),
        volumes: Volumes::open(data.join("volumes")).unwrap(),
    };
    let outside = Outside {
        way: Err("this machine is scripted".into()),
        recorder: Arc::new(Recorder::default()),
    };
    let node = LocalNode::new(settings, vec![Arc::new(machine.clone())], tiers, bytes, outside);
    World {
        _dir: dir,
        machine,
        node,
        template,
    }
}

impl World {
    fn wanted(&self) -> Wanted {
        Wanted {
            template: self.template.id.clone(),
            isolation: TIER,
            resources: Resources::default().with_room_for_disk(),
        }
    }

    fn boot(&self, instance: &InstanceId, origin: Option<Origin>) -> Boot {
        Boot {
            project: None,
            instance: instance.clone(),
            isolation: TIER,
            image: self.template.digest.clone(),
            resources: Resources::default(),
            hostname: "one".into(),
            origin,
            volumes: Vec::new(),
            admission: None,
        }
    }

    fn greeting(&self, instance: &InstanceId, sandbox: &SandboxId) -> Greeting {
        Greeting {
            instance: instance.clone(),
            identity: atoll_node::identity(
                sandbox,
                &atoll_types::SandboxSpec::default(),
                &self.template,
                None,
            ),
            admission: None,
            command: None,
        }
    }

    async fn pools_are_full(&self, size: usize) {
        while self.node.pools().await[0].ready < size {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_pooled_or_claimed_is_the_nodes_own_until_somebody_speaks_of_it() {
    let world = world(1);
    world.node.start();
    world.pools_are_full(1).await;
    let own = || async { world.node.discover(TIER).await.unwrap() };
    assert_eq!(own().await, [], "control would destroy what is pooled");
    let claimed = world.node.claim(&world.wanted()).await.unwrap();
    assert_eq!(own().await, [], "control would destroy what it has just claimed");
    let greeting = world.greeting(&claimed.instance, &claimed.sandbox);
    world.node.greet(greeting).await.unwrap();
    assert!(own().await.contains(&claimed.instance));
    world.node.destroy(TIER, &claimed.instance).await;
    assert!(!own().await.contains(&claimed.instance));
    world.node.close().await;
    let left: Vec<_> = own().await;
    assert_eq!(left, [], "what is pooled goes with its node");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_an_instance_is_told_to_whoever_attends_to_it() {
    let world = world(0);
    let mut events = world.node.events();
    let (sandbox, instance): (SandboxId, InstanceId) = (entropy::id(), entropy::id());
    world.node.boot(world.boot(&instance, None)).await.unwrap();
    world
        .machine
        .end(&instance, InstanceEnd::Died("as the test says".into()));
    // Also of one that is over by then.
    world.node.attend(&sandbox, &instance);
    let Some(Event::Ended {
        sandbox: whose,
        instance: which,
        fate: InstanceFate::Died(_),
    }) = events.recv().await
    else {
        panic!("an instance that died has not ended");
    };
    assert_eq!((whose, which), (sandbox, instance));
}

#[tokio::test(start_paused = true)]
async fn whoever_speaks_to_an_instance_that_is_gone_hears_that() {
    let world = world(0);
    let (sandbox, instance): (SandboxId, InstanceId) = (entropy::id(), entropy::id());
    world.node.boot(world.boot(&instance, None)).await.unwrap();
    world.node.hang_up(&instance);
    let opened = world
        .node
        .open(&instance, &atoll_guest_protocol::Request::ListPorts)
        .await;
    assert!(matches!(opened, Err(ChannelError::Closed)));
    let greeted = world.node.greet(world.greeting(&instance, &sandbox)).await;
    assert!(matches!(greeted, Err(Failed::Guest(ChannelError::Closed))));
    // It is not silent: it is not there.
    assert!(!world.node.is_silent(&instance, Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn captured_state_makes_others_until_it_is_released() {
    let world = world(0);
    let (first, second): (InstanceId, InstanceId) = (entropy::id(), entropy::id());
    let captured: SnapshotId = entropy::id();
    world.node.boot(world.boot(&first, None)).await.unwrap();
    let kind = SaveKind::Memory;
    world.node.capture(TIER, &first, kind, &captured).await.unwrap();
    world.node.thaw(TIER, &first).await.unwrap();
    let origin = Origin {
        kind,
        state: State::Captured(captured.clone()),
    };
    let copy = world.boot(&second, Some(origin.clone()));
    world.node.boot(copy).await.unwrap();
    world.node.release(&captured);
    let late = world.boot(&entropy::id(), Some(origin));
    assert!(world.node.boot(late).await.is_err());
    // Nothing of it lies in the vault, and no volume is there.
    assert_eq!(world.node.saved().await.unwrap(), Vec::<String>::new());
    assert_eq!(world.node.volumes().await.unwrap(), Vec::<String>::new());
}
