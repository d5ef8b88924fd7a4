//! Inputs that are no text, made by those who write such things; the others lie as files beside them. `atoll-fuzz seeds` writes
//! them.

use std::os::fd::AsFd as _;
use std::sync::{Arc, LazyLock};

use atoll_archive::{Dialect, Ids};
use atoll_dialects::event_stream;
use atoll_guest_protocol::{
    Exec, Failure, FrameKind, GENERATION, Hello, Message, Request, SUB_STDOUT, Welcome, encode, encode_into,
};
use atoll_image::{Content, Limits, Meta, Tree};
use hickory_proto::op::{Edns, Message as Dns, Query};
use hickory_proto::rr::rdata::{A, CNAME, SOA, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use prost::Message as _;
use temporalio_protos::temporal::api as temporal;
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::workflowservice::v1::RespondWorkflowTaskCompletedRequest;

type Seed = (&'static str, &'static str, Vec<u8>);

/// Target, name of the file, bytes.
pub fn binary_seeds() -> Vec<Seed> {
    let mut all = guest();
    all.extend(files());
    all.extend(network());
    all.extend(models());
    all.extend(workflows());
    all
}

fn guest() -> Vec<Seed> {
    let mut frames = Vec::new();
    encode_into(&mut frames, FrameKind::Data, SUB_STDOUT, 1, b"some output");
    encode_into(&mut frames, FrameKind::Data, SUB_STDOUT, 1, b"more of it");
    encode_into(&mut frames, FrameKind::Credit, 0, 1, &70_000_u32.to_le_bytes());
    encode_into(&mut frames, FrameKind::End, 0, 1, &encode(&Ok::<(), Failure>(())));
    let mut torn = frames[..30].to_vec();
    torn.extend_from_slice(&frames);
    let mut others = Vec::new();
    encode_into(&mut others, FrameKind::Ping, 0, 0, b"12345678");
    encode_into(&mut others, FrameKind::Message, 0, 2, &encode(&Message::Watching));
    encode_into(&mut others, FrameKind::Data, 9, 77, b"for nobody");
    encode_into(
        &mut others,
        FrameKind::Welcome,
        0,
        0,
        &encode(&Welcome {
            generation: GENERATION,
            nonce: 1,
        }),
    );
    let mut flood = Vec::new();
    for _ in 0..9 {
        encode_into(&mut flood, FrameKind::Data, SUB_STDOUT, 1, &[b'x'; 6000]);
    }
    let exec = Exec {
        command: "c1".into(),
        argv: vec!["sh".into(), "-c".into(), "true".into()],
        env: vec![("A".into(), "b".into())],
        cwd: Some(b"/tmp".to_vec()),
        user: None,
        pty: None,
        stdin: true,
        timeout_millis: Some(1000),
        log_bytes: 4096,
        wait_for_reader: true,
        kill_on_close: true,
    };
    vec![
        ("guest_frames", "frames", frames.clone()),
        ("guest_frames", "torn", torn.clone()),
        ("guest_frames", "others", others.clone()),
        ("guest_channel", "frames", frames),
        ("guest_channel", "torn", torn),
        ("guest_channel", "others", others),
        ("guest_channel", "flood", flood),
        ("guest_messages", "exec", encode(&Request::Exec(exec))),
        (
            "guest_messages",
            "hello",
            encode(&Hello {
                generation: GENERATION,
                nonce: 7,
                restored: false,
            }),
        ),
        ("guest_messages", "watching", encode(&Message::Watching)),
        (
            "guest_messages",
            "attach",
            encode(&Request::Attach {
                command: "c1".into(),
                from: 12,
            }),
        ),
        ("guest_messages", "end", encode(&Ok::<(), Failure>(()))),
    ]
}

/// An image, and its digest.
pub(crate) static SMALL_IMAGE: LazyLock<(String, Vec<u8>)> = LazyLock::new(|| {
    let mut image = Vec::new();
    let tree = tree().expect("a small tree");
    let written = atoll_image::write_image(&tree, &mut image, |_, _| Ok(()));
    (written.expect("a small tree can be written").digest, image)
});

/// A layer on it.
fn layer_on_small() -> Vec<u8> {
    let (digest, image) = &*SMALL_IMAGE;
    let mut file = tempfile::NamedTempFile::new().expect("a file can be made");
    std::io::Write::write_all(&mut file, image).expect("and be written");
    let backing = atoll_image::Backing::open(file.path()).expect("and be opened");
    let stack = atoll_image::Stack::open(vec![(digest.clone(), backing)]).map(Arc::new);
    let stack = stack.expect("an image");
    let mut tree = atoll_image::read_stack(&stack, atoll_image::Limits::default()).expect("a small tree");
    let meta = atoll_image::Meta::root(0o644);
    tree.put_file(b"d/new", meta, atoll_image::Content::bytes(*b"new"))
        .expect("there is room");
    let mut layer = Vec::new();
    atoll_image::write_layer(&tree, &stack, &mut layer, |_, _| Ok(())).expect("a layer can be written");
    layer
}

fn files() -> Vec<Seed> {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let path = directory.path();
    let made = std::fs::create_dir(path.join("d"))
        .and_then(|()| std::fs::write(path.join("d/file"), "content"))
        .and_then(|()| std::fs::hard_link(path.join("d/file"), path.join("again")))
        .and_then(|()| std::os::unix::fs::symlink("d/file", path.join("link")))
        .and_then(|()| std::fs::write(path.join("x".repeat(120)), ""));
    made.expect("a tree can be made");
    let open = std::fs::File::open(path).expect("a directory can be opened");
    let mut packed = Vec::new();
    atoll_archive::pack(open.as_fd(), Dialect::Plain, Ids::Own, &mut packed).expect("a tree can be packed");
    let plain = tarball(&[("./a", b'0', "content"), ("b/c", b'0', ""), ("d", b'5', "")]);
    let hostile = tarball(&[
        ("../a", b'0', "x"),
        ("l", b'2', ""),
        ("l/x", b'0', "y"),
        ("dev", b'3', ""),
    ]);
    let whiteouts = tarball(&[
        ("a/b", b'0', "x"),
        ("a/.wh.b", b'0', ""),
        ("a/.wh..wh..opq", b'0', ""),
    ]);
    let image = SMALL_IMAGE.1.clone();
    let mut manifest = vec![2, b'i', b'd', 3, b'd', b'o', b'm', 1, 1, b'm'];
    manifest.push(1);
    manifest.extend([5; 16]);
    manifest.extend([0, 1, 1, b's', 2, 0, 200, 1, 1, 0, 100]);
    manifest.extend([6; 32]);
    let mut all = vec![
        ("erofs_layers", "small", layer_on_small()),
        ("erofs", "small", image),
        ("vault_manifest", "small", manifest),
        ("snapshot_file", "small", snapshot()),
    ];
    for target in ["tar_heads", "tar_layer", "tar_unpack"] {
        all.push((target, "packed", packed.clone()));
        all.push((target, "plain", plain.clone()));
        all.push((target, "hostile", hostile.clone()));
        all.push((target, "whiteouts", whiteouts.clone()));
    }
    all
}

fn tree() -> atoll_image::Result<Tree> {
    let mut tree = Tree::new(Limits::default());
    tree.make_dirs(b"/d/e", &Meta::root(0o755))?;
    let file = tree.put_file(b"/d/file", Meta::root(0o644), Content::bytes(b"content".to_vec()))?;
    tree.put_file(
        b"/d/long",
        Meta::root(0o600).owned(1000, 70_000),
        Content::bytes(vec![7; 5000]),
    )?;
    tree.put_symlink(b"/link", b"d/file")?;
    tree.link(b"/again", file)?;
    Ok(tree)
}

/// Entries as they are: name, type, content; links lead up.
fn tarball(entries: &[(&str, u8, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, kind, content) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(tar::EntryType::new(*kind));
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        let raw = header.as_old_mut();
        raw.name[..name.len()].copy_from_slice(name.as_bytes());
        if *kind == b'2' {
            raw.linkname[..2].copy_from_slice(b"..");
        }
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(content.as_bytes());
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

/// Without the hash at its end, which the target adds.
fn snapshot() -> Vec<u8> {
    let mut out = b"ATOLLSAV".to_vec();
    out.extend(1_u32.to_le_bytes());
    for part in [&br#"{"version":1}"#[..], b"meta"] {
        out.extend(u32::try_from(part.len()).unwrap_or(0).to_le_bytes());
        out.extend_from_slice(part);
    }
    out.extend([1, 4, 0]);
    out.extend_from_slice(b"file");
    out.push(2);
    out.extend(7_u32.to_le_bytes());
    out.extend_from_slice(b"content");
    out.push(3);
    out.extend(5000_u64.to_le_bytes());
    out.push(4);
    out.extend(5007_u64.to_le_bytes());
    out.push(0);
    out.extend(1_u32.to_le_bytes());
    out
}

fn network() -> Vec<Seed> {
    let question = |name: &str, kind: RecordType, edns: bool| {
        let mut message = Dns::query();
        message.metadata.id = 7;
        message.add_query(Query::query(Name::from_ascii(name).expect("a name"), kind));
        if edns {
            message.set_edns(Edns::new());
        }
        message
    };
    let asked = |name, kind, edns| {
        let mut bytes = vec![0];
        bytes.extend(
            question(name, kind, edns)
                .to_vec()
                .expect("a question can be written"),
        );
        bytes
    };
    let name = || Name::from_ascii("a.example.").expect("a name");
    let other = || Name::from_ascii("b.example.").expect("a name");
    let mut reply = question("a.example.", RecordType::A, true);
    reply.metadata.message_type = hickory_proto::op::MessageType::Response;
    reply.add_answer(Record::from_rdata(name(), 60, RData::CNAME(CNAME(other()))));
    reply.add_answer(Record::from_rdata(other(), 30, RData::A(A::new(192, 0, 2, 1))));
    reply.add_answer(Record::from_rdata(
        name(),
        1,
        RData::TXT(TXT::new(vec!["text".into()])),
    ));
    let mut none = question("a.example.", RecordType::AAAA, false);
    none.metadata.message_type = hickory_proto::op::MessageType::Response;
    none.add_authority(Record::from_rdata(
        name(),
        60,
        RData::SOA(SOA::new(name(), other(), 1, 2, 3, 4, 5)),
    ));
    let written = |message: &Dns| message.to_vec().expect("an answer can be written");
    vec![
        (
            "dns_question",
            "own",
            asked("models.atoll.internal.", RecordType::A, true),
        ),
        (
            "dns_question",
            "refused",
            asked("a.example.", RecordType::AAAA, false),
        ),
        (
            "dns_question",
            "reverse",
            asked("1.0.18.198.in-addr.arpa.", RecordType::PTR, true),
        ),
        ("dns_answer", "alias", written(&reply)),
        ("dns_answer", "none", written(&none)),
        ("tls_hello", "rustls", rustls_hello("a.example")),
        (
            "tls_hello",
            "plain",
            hello(&[(0, &names(b"a.example")), (43, &[2, 3, 4])]),
        ),
        (
            "tls_hello",
            "two",
            hello(&[(0, &names(b"a.example")), (0, &names(b"b.example"))]),
        ),
        (
            "tls_hello",
            "encrypted",
            hello(&[(0, &names(b"a.example")), (0xfe0d, &[0; 40])]),
        ),
        ("tls_hello", "nameless", hello(&[(43, &[2, 3, 4])])),
    ]
}

fn vector(data: &[u8]) -> Vec<u8> {
    let mut out = u16::try_from(data.len()).unwrap_or(0).to_be_bytes().to_vec();
    out.extend_from_slice(data);
    out
}

fn names(name: &[u8]) -> Vec<u8> {
    let mut list = vec![0];
    list.extend(vector(name));
    vector(&list)
}

/// A ClientHello in two records.
fn hello(extensions: &[(u16, &[u8])]) -> Vec<u8> {
    let mut all = Vec::new();
    for (kind, data) in extensions {
        all.extend(kind.to_be_bytes());
        all.extend(vector(data));
    }
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    body.extend(vector(&all));
    let mut message = vec![1, 0];
    message.extend(vector(&body));
    let mut out = Vec::new();
    for part in message.chunks(60) {
        out.extend([22, 3, 1]);
        out.extend(vector(part));
    }
    out
}

/// As a client of today writes it.
fn rustls_hello(name: &'static str) -> Vec<u8> {
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("TLS has versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = name.try_into().expect("a name");
    let mut client = rustls::ClientConnection::new(std::sync::Arc::new(config), name).expect("a client");
    let mut out = Vec::new();
    client.write_tls(&mut out).expect("a client speaks first");
    out
}

fn models() -> Vec<Seed> {
    let mut stream = Vec::new();
    event_stream::write(&mut stream, "messageStart", br#"{"role":"assistant"}"#);
    event_stream::write(&mut stream, "throttlingException", br#"{"message":"slow down"}"#);
    let start = envelope(
        0,
        br#"{"process":{"cmd":"sh","args":["-c","true"],"envs":{"A":"b"}},"stdin":true}"#,
    );
    let mut two = start.clone();
    two.extend(envelope(2, b"{}"));
    vec![
        ("event_stream", "two", stream),
        (
            "event_stream",
            "headers",
            [&[15][..], b"\x0b:event-type\x07\x00\x01a{}"].concat(),
        ),
        ("e2b_messages", "start_frame", start),
        ("e2b_messages", "stream", two),
        ("e2b_messages", "compressed", envelope(1, b"xx")),
        // A selector by process id, and input for it.
        (
            "e2b_messages",
            "input",
            vec![10, 2, 8, 7, 18, 5, 10, 3, b'a', b'b', b'c'],
        ),
    ]
}

fn envelope(flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![flags];
    out.extend(u32::try_from(payload.len()).unwrap_or(0).to_be_bytes());
    out.extend_from_slice(payload);
    out
}

fn workflows() -> Vec<Seed> {
    use temporal::command::v1 as command;
    let seconds = |seconds| Some(prost_wkt_types::Duration { seconds, nanos: 0 });
    let one = |attributes| command::Command {
        attributes: Some(attributes),
        ..Default::default()
    };
    let task = |commands: Vec<command::Command>| {
        RespondWorkflowTaskCompletedRequest {
            commands,
            identity: "worker".into(),
            ..Default::default()
        }
        .encode_to_vec()
    };
    let timer = || {
        one(Attributes::StartTimerCommandAttributes(
            command::StartTimerCommandAttributes {
                timer_id: "t".into(),
                start_to_fire_timeout: seconds(60),
            },
        ))
    };
    let cancel = || {
        one(Attributes::CancelTimerCommandAttributes(
            command::CancelTimerCommandAttributes { timer_id: "t".into() },
        ))
    };
    let activity = || {
        one(Attributes::ScheduleActivityTaskCommandAttributes(
            command::ScheduleActivityTaskCommandAttributes {
                activity_id: "a".into(),
                activity_type: Some(temporal::common::v1::ActivityType { name: "Type".into() }),
                task_queue: Some(temporal::taskqueue::v1::TaskQueue {
                    name: "queue".into(),
                    ..Default::default()
                }),
                start_to_close_timeout: seconds(10),
                schedule_to_close_timeout: seconds(100),
                ..Default::default()
            },
        ))
    };
    let complete = || {
        one(Attributes::CompleteWorkflowExecutionCommandAttributes(
            Default::default(),
        ))
    };
    let again = || {
        one(Attributes::ContinueAsNewWorkflowExecutionCommandAttributes(
            command::ContinueAsNewWorkflowExecutionCommandAttributes {
                workflow_run_timeout: seconds(100),
                ..Default::default()
            },
        ))
    };
    let child = || {
        one(Attributes::StartChildWorkflowExecutionCommandAttributes(
            command::StartChildWorkflowExecutionCommandAttributes {
                workflow_id: "child".into(),
                workflow_type: Some(temporal::common::v1::WorkflowType { name: "Child".into() }),
                cron_schedule: "* * * * *".into(),
                ..Default::default()
            },
        ))
    };
    let history = temporal::history::v1::History {
        events: vec![temporal::history::v1::HistoryEvent {
            event_id: 1,
            event_type: 1,
            ..Default::default()
        }],
    };
    let token = atoll_workflow_core::TaskToken {
        namespace: "default".into(),
        workflow_id: "workflow".into(),
        ..Default::default()
    };
    vec![
        ("workflow_task", "timer", task(vec![timer(), cancel()])),
        ("workflow_task", "activity", task(vec![activity(), timer()])),
        ("workflow_task", "complete", task(vec![complete()])),
        ("workflow_task", "again", task(vec![again()])),
        ("workflow_task", "child", task(vec![child(), timer(), activity()])),
        ("workflow_history", "one", history.encode_to_vec()),
        ("workflow_history", "token", token.encode()),
        ("schedule", "structure", structure()),
    ]
}

/// A schedule with a calendar of numbers; its last byte is no text, so that it is read as a message.
fn structure() -> Vec<u8> {
    use temporal::schedule::v1 as schedule;
    let range = |start, end, step| schedule::Range { start, end, step };
    let calendar = schedule::StructuredCalendarSpec {
        second: vec![range(0, 0, 1)],
        minute: vec![range(0, 59, 5)],
        hour: vec![range(8, 18, 1)],
        comment: "office hours".into(),
        ..Default::default()
    };
    let spec = schedule::ScheduleSpec {
        structured_calendar: vec![calendar.clone()],
        exclude_structured_calendar: vec![schedule::StructuredCalendarSpec {
            minute: vec![range(0, 0, 0)],
            ..calendar
        }],
        interval: vec![schedule::IntervalSpec {
            interval: Some(prost_wkt_types::Duration {
                seconds: -300,
                nanos: 0,
            }),
            phase: None,
        }],
        ..Default::default()
    };
    schedule::Schedule {
        spec: Some(spec),
        ..Default::default()
    }
    .encode_to_vec()
}
