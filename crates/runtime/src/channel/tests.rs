//! Honest and hostile guests on the other end of real FIFOs.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::thread::JoinHandle;

use atoll_guest_protocol::{
    CommandState, FRAME_COST, FailureKind, INITIAL_CREDIT, SUB_STDOUT, encode_header, encode_into,
};

use super::*;

const SOON: Duration = Duration::from_secs(10);

/// The guest's end: blocking, driven by a script on a thread of its own.
struct Agent {
    input: File,
    output: File,
    decoder: Decoder,
}

#[derive(Debug, PartialEq)]
struct Heard {
    kind: FrameKind,
    stream: u32,
    payload: Vec<u8>,
}

impl Agent {
    fn hear(&mut self) -> Heard {
        loop {
            if let Some(frame) = self.decoder.next_frame() {
                return Heard {
                    kind: frame.kind,
                    stream: frame.stream,
                    payload: frame.payload.to_vec(),
                };
            }
            let count = self.input.read(self.decoder.space()).unwrap();
            self.decoder.filled(count);
        }
    }

    /// Skips to the next frame of this kind and returns its stream.
    fn hear_next(&mut self, kind: FrameKind) -> u32 {
        loop {
            let heard = self.hear();
            if heard.kind == kind {
                return heard.stream;
            }
        }
    }

    fn welcome(&mut self) {
        loop {
            let heard = self.hear();
            if heard.kind == FrameKind::Hello {
                let hello: Hello = decode(&heard.payload).unwrap();
                let welcome = Welcome {
                    generation: GENERATION,
                    nonce: hello.nonce,
                };
                return self.say(FrameKind::Welcome, 0, 0, &encode(&welcome));
            }
        }
    }

    fn say(&mut self, kind: FrameKind, sub: u8, stream: u32, payload: &[u8]) {
        let mut bytes = Vec::new();
        encode_into(&mut bytes, kind, sub, stream, payload);
        self.output.write_all(&bytes).unwrap();
    }

    fn data(&mut self, stream: u32, payload: &[u8]) {
        self.say(FrameKind::Data, SUB_STDOUT, stream, payload);
    }

    fn end(&mut self, stream: u32) {
        self.say(FrameKind::End, 0, stream, &encode(&Ok::<(), Failure>(())));
    }
}

struct Bench {
    _dir: tempfile::TempDir,
    fifos: Fifos,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fifos = Fifos::create(dir.path()).unwrap();
        Self { _dir: dir, fifos }
    }

    fn agent<T: Send + 'static>(
        &self,
        script: impl FnOnce(&mut Agent) -> T + Send + 'static,
    ) -> JoinHandle<(Agent, T)> {
        let (input, output) = self.fifos.open_for_guest().unwrap();
        let mut agent = Agent {
            input: input.into(),
            output: output.into(),
            decoder: Decoder::new(),
        };
        std::thread::spawn(move || {
            let result = script(&mut agent);
            (agent, result)
        })
    }

    async fn connect(&self, fresh: bool) -> Result<Guest, ChannelError> {
        let agent = if fresh {
            AgentState::Booting
        } else {
            AgentState::Running
        };
        let how = Connect { agent, within: SOON };
        Guest::connect(&self.fifos.to_guest, &self.fifos.from_guest, how).await
    }
}

/// A guest that follows the script after the greeting, and the host's handle to it.
async fn pair<T: Send + 'static>(
    script: impl FnOnce(&mut Agent) -> T + Send + 'static,
) -> (Bench, Guest, JoinHandle<(Agent, T)>) {
    let bench = Bench::new();
    let agent = bench.agent(move |agent| {
        agent.welcome();
        script(agent)
    });
    let guest = bench.connect(true).await.unwrap();
    (bench, guest, agent)
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.expect("took too long")
}

/// Waits for a guest's script without holding up the host's tasks: a guest may still be writing what the host must read.
async fn ended<T: Send + 'static>(agent: JoinHandle<T>) -> T {
    let joined = soon(tokio::task::spawn_blocking(move || agent.join())).await;
    joined.unwrap().unwrap()
}

/// Everything up to the end of a stream.
async fn drain(stream: &mut Stream) -> Result<Vec<u8>, ChannelError> {
    let mut bytes = Vec::new();
    while let Some(incoming) = soon(stream.next()).await {
        if let Incoming::Data { bytes: more, .. } = incoming? {
            bytes.extend_from_slice(&more);
        }
    }
    Ok(bytes)
}

#[tokio::test]
async fn a_call_is_answered() {
    let (_bench, guest, agent) = pair(|agent| {
        for answer in [
            Ok(Message::Created(true)),
            Err(Failure {
                kind: FailureKind::NotFound,
                message: "no such file".into(),
            }),
        ] {
            let heard = agent.hear();
            assert_eq!(heard.kind, FrameKind::Open);
            assert_eq!(decode::<Request>(&heard.payload).unwrap(), Request::ListPorts);
            let end = answer.map(|message| agent.say(FrameKind::Message, 0, heard.stream, &encode(&message)));
            agent.say(FrameKind::End, 0, heard.stream, &encode(&end));
        }
    })
    .await;
    assert_eq!(
        soon(guest.call(&Request::ListPorts)).await.unwrap(),
        Some(Message::Created(true))
    );
    match soon(guest.call(&Request::ListPorts)).await {
        Err(ChannelError::Failed(failure)) => assert_eq!(failure.kind, FailureKind::NotFound),
        other => panic!("{other:?}"),
    }
    ended(agent).await;
}

#[tokio::test]
async fn megabytes_flow_both_ways_within_credit() {
    const TOTAL: usize = 20 << 20;
    // Echoes, as an honest guest: spends only what it has, returns what it took.
    let (_bench, guest, agent) = pair(|agent| {
        let stream = agent.hear_next(FrameKind::Open);
        let (mut credit, mut waiting) = (INITIAL_CREDIT, Vec::<Vec<u8>>::new());
        loop {
            let heard = agent.hear();
            match heard.kind {
                FrameKind::Data if heard.payload.is_empty() => {
                    waiting.push(Vec::new());
                }
                FrameKind::Data => {
                    let back = u32::try_from(heard.payload.len()).unwrap() + FRAME_COST;
                    agent.say(FrameKind::Credit, 0, stream, &back.to_le_bytes());
                    waiting.push(heard.payload);
                }
                FrameKind::Credit => credit += u32::from_le_bytes(heard.payload.try_into().unwrap()),
                other => panic!("{other:?}"),
            }
            while let Some(piece) = waiting.first() {
                let cost = u32::try_from(piece.len()).unwrap() + FRAME_COST;
                if cost > credit {
                    break;
                }
                credit -= cost;
                let piece = waiting.remove(0);
                if piece.is_empty() {
                    return agent.end(stream);
                }
                agent.data(stream, &piece);
            }
        }
    })
    .await;
    let (mut sender, mut receiver) = guest.open(&Request::Connect { port: 1 }).await.unwrap().split();
    let sent: Vec<u8> = (0..TOTAL).map(|at| (at / 7 % 251) as u8).collect();
    let sending = tokio::spawn({
        let sent = Bytes::from(sent.clone());
        async move {
            sender.send_data(sent).await.unwrap();
            sender.send_end().await.unwrap();
        }
    });
    let mut received = Vec::with_capacity(TOTAL);
    while let Some(incoming) = soon(receiver.next()).await {
        match incoming.unwrap() {
            Incoming::Data { bytes, .. } => received.extend_from_slice(&bytes),
            Incoming::Message(message) => panic!("{message:?}"),
        }
    }
    assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
    sending.await.unwrap();
    ended(agent).await;
}

#[tokio::test]
async fn a_guest_that_overspends_loses_the_stream_and_nothing_else() {
    let (_bench, guest, agent) = pair(|agent| {
        let greedy = agent.hear_next(FrameKind::Open);
        let honest = agent.hear_next(FrameKind::Open);
        for _ in 0..100 {
            agent.data(greedy, &[7; MAX_PAYLOAD]);
        }
        agent.data(honest, b"still here");
        agent.end(honest);
        agent.hear_next(FrameKind::Close)
    })
    .await;
    let mut greedy = guest.open(&Request::ListPorts).await.unwrap();
    let mut honest = guest.open(&Request::ListPorts).await.unwrap();
    assert_eq!(drain(&mut honest).await.unwrap(), b"still here");
    let mut got = 0;
    let error = loop {
        match soon(greedy.next()).await.unwrap() {
            Ok(Incoming::Data { bytes, .. }) => got += bytes.len(),
            Ok(other) => panic!("{other:?}"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ChannelError::Protocol(_)), "{error:?}");
    assert!(got <= INITIAL_CREDIT as usize);
    assert!(greedy.next().await.is_none());
    assert!(guest.ignored_frames() > 90);
    assert_eq!(ended(agent).await.1, 1, "the greedy stream was closed");
}

#[tokio::test]
async fn a_slow_reader_does_not_stall_others() {
    let (_bench, guest, agent) = pair(|agent| {
        let slow = agent.hear_next(FrameKind::Open);
        let fast = agent.hear_next(FrameKind::Open);
        for _ in 0..3 {
            agent.data(slow, &[1; MAX_PAYLOAD]);
        }
        for _ in 0..1000 {
            agent.data(fast, b"x");
        }
        agent.end(fast);
        slow
    })
    .await;
    let slow = guest.open(&Request::ListPorts).await.unwrap();
    let mut fast = guest.open(&Request::ListPorts).await.unwrap();
    assert_eq!(drain(&mut fast).await.unwrap().len(), 1000);
    ended(agent).await;
    drop(slow);
}

#[tokio::test]
async fn garbage_torn_frames_and_unknown_streams_are_skipped() {
    let (_bench, guest, agent) = pair(|agent| {
        let stream = agent.hear_next(FrameKind::Open);
        agent.output.write_all(&[0x5a; 100_000]).unwrap();
        let torn = encode_header(FrameKind::Data, 0, stream, &[9; 5000]);
        agent.output.write_all(&torn).unwrap();
        agent.output.write_all(&[9; 100]).unwrap();
        agent.output.write_all(&vec![0; FILLER_LEN]).unwrap();
        for id in 1000..3000 {
            agent.data(id, b"who is that?");
            agent.say(FrameKind::Credit, 0, id, &[255; 4]);
            agent.say(FrameKind::End, 0, id, b"");
        }
        for kind in [
            FrameKind::Hello,
            FrameKind::Open,
            FrameKind::Close,
            FrameKind::Pong,
        ] {
            agent.say(kind, 0, stream, b"not for a guest to say");
        }
        agent.say(FrameKind::Credit, 0, stream, b"not four bytes");
        agent.data(stream, b"sense");
        agent.end(stream);
    })
    .await;
    let mut stream = guest.open(&Request::ListPorts).await.unwrap();
    assert_eq!(drain(&mut stream).await.unwrap(), b"sense");
    assert_eq!(guest.ignored_frames(), 3 * 2000 + 5);
    ended(agent).await;
}

#[tokio::test]
async fn messages_and_ends_that_cannot_be_read_fail_their_stream() {
    let (_bench, guest, agent) = pair(|agent| {
        let one = agent.hear_next(FrameKind::Open);
        agent.say(FrameKind::Message, 0, one, &[255; 300]);
        agent.hear_next(FrameKind::Close);
        let two = agent.hear_next(FrameKind::Open);
        agent.say(FrameKind::End, 0, two, &[255; 300]);
    })
    .await;
    for _ in 0..2 {
        let error = soon(guest.call(&Request::ListPorts)).await.unwrap_err();
        assert!(matches!(error, ChannelError::Protocol(_)), "{error:?}");
    }
    ended(agent).await;
}

#[tokio::test]
async fn a_guest_that_never_reads_makes_senders_wait_and_nothing_grow() {
    let (_bench, guest, agent) = pair(|_| ()).await;
    let (agent, ()) = ended(agent).await; // keeps the pipe open, reads nothing
    let block = Bytes::from(vec![0; 200 * 1024]);
    let mut streams = Vec::new();
    // The pipe takes 1 MiB, the outbox half of one; the rest has to wait.
    let stuck = loop {
        let opened = tokio::time::timeout(Duration::from_millis(200), guest.open(&Request::ListPorts)).await;
        let Ok(opened) = opened else { break true };
        let mut stream = opened.unwrap();
        let sent = tokio::time::timeout(Duration::from_millis(200), stream.send_data(block.clone())).await;
        streams.push(stream);
        if sent.is_err() {
            break true;
        }
        if streams.len() > 20 {
            break false;
        }
    };
    assert!(stuck, "{} streams", streams.len());
    // Dropping streams needs no room, and closing frees whoever waits.
    streams.clear();
    let waiting = tokio::spawn({
        let guest = guest.clone();
        async move { guest.call(&Request::ListPorts).await }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    guest.close();
    assert!(matches!(soon(waiting).await.unwrap(), Err(ChannelError::Closed)));
    drop(agent);
}

#[tokio::test]
async fn what_piled_up_is_delivered_in_order_once_the_guest_reads() {
    let (bench, guest, agent) = pair(|_| ()).await;
    let (mut agent, ()) = ended(agent).await;
    let mut abandoned = guest.open(&Request::ListPorts).await.unwrap();
    let uploads: Vec<_> = (0..12)
        .map(|n: u8| {
            let guest = guest.clone();
            tokio::spawn(async move {
                let mut stream = guest.open(&Request::Connect { port: n.into() }).await.unwrap();
                stream.send_data(vec![n; 200_000].into()).await.unwrap();
                stream.send_end().await.unwrap();
                drain(&mut stream).await.unwrap();
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let _ = tokio::time::timeout(
        Duration::from_millis(50),
        abandoned.send_data(vec![0; 200_000].into()),
    )
    .await;
    drop(abandoned);
    let reader = std::thread::spawn(move || {
        let mut got = HashMap::<u32, usize>::new();
        let (mut ended, mut closed) = (0, false);
        while ended < 12 || !closed {
            let heard = agent.hear();
            match heard.kind {
                FrameKind::Open => assert!(got.insert(heard.stream, 0).is_none()),
                FrameKind::Data if heard.payload.is_empty() => {
                    assert_eq!(got[&heard.stream], 200_000);
                    agent.end(heard.stream);
                    ended += 1;
                }
                FrameKind::Data => *got.get_mut(&heard.stream).expect("opened before") += heard.payload.len(),
                FrameKind::Close => {
                    assert!(got.contains_key(&heard.stream), "closed before it was opened");
                    closed = true;
                }
                other => panic!("{other:?}"),
            }
        }
    });
    for upload in uploads {
        soon(upload).await.unwrap();
    }
    ended(reader).await;
    drop(bench);
}

#[tokio::test]
async fn a_flood_that_nobody_reads_is_bounded() {
    let (_bench, guest, agent) = pair(|agent| {
        let streams: Vec<u32> = (0..4).map(|_| agent.hear_next(FrameKind::Open)).collect();
        // 400 MB, most of it empty frames and pings, without looking at an answer.
        for _ in 0..1000 {
            for &stream in &streams {
                agent.data(stream, &[3; MAX_PAYLOAD]);
            }
            for _ in 0..500 {
                agent.data(streams[0], b"");
                agent.say(FrameKind::Ping, 0, 0, &[1; 64]);
            }
        }
    })
    .await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        streams.push(guest.open(&Request::ListPorts).await.unwrap());
    }
    let before = resident();
    tokio::time::timeout(
        Duration::from_secs(60),
        tokio::task::spawn_blocking(move || agent.join()),
    )
    .await
    .unwrap()
    .unwrap()
    .unwrap();
    let grown = resident().saturating_sub(before);
    assert!(grown < 24 << 20, "grew by {grown} bytes");
    for mut stream in streams {
        assert!(matches!(drain(&mut stream).await, Err(ChannelError::Protocol(_))));
    }
}

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[tokio::test]
async fn a_consumed_flood_pays_for_itself_although_credit_is_never_read() {
    // Knows when it will have been given credit, so it never needs to look; credits must not pile up.
    let (_bench, guest, agent) = pair(|agent| {
        let stream = agent.hear_next(FrameKind::Open);
        for _ in 0..2000 {
            agent.data(stream, &[3; 1000]);
            std::thread::yield_now();
        }
        agent.end(stream);
    })
    .await;
    let mut stream = guest.open(&Request::ListPorts).await.unwrap();
    let result = drain(&mut stream).await;
    assert!(matches!(result, Ok(_) | Err(ChannelError::Protocol(_))));
    ended(agent).await;
}

#[tokio::test]
async fn a_new_host_greets_over_the_remains_of_the_old_one() {
    let bench = Bench::new();
    // The old host died in the middle of a frame; the old guest's answers still stand in the pipe.
    let (input, output) = bench.fifos.open_for_guest().unwrap();
    let (mut input, mut output) = (File::from(input), File::from(output));
    let torn = encode_header(FrameKind::Data, 0, 3, &[1; 60_000]);
    input.write_all(&torn).unwrap();
    input.write_all(&[1; 1000]).unwrap();
    let mut stale = Vec::new();
    encode_into(
        &mut stale,
        FrameKind::Welcome,
        0,
        0,
        &encode(&Welcome {
            generation: GENERATION,
            nonce: 1,
        }),
    );
    encode_into(&mut stale, FrameKind::Data, 0, 1, b"for somebody else");
    output.write_all(&stale).unwrap();
    let agent = bench.agent(|agent| {
        agent.welcome();
        let stream = agent.hear_next(FrameKind::Open);
        agent.data(stream, b"for you");
        agent.end(stream);
    });
    let guest = bench.connect(false).await.unwrap();
    let mut stream = guest.open(&Request::ListPorts).await.unwrap();
    assert_eq!(drain(&mut stream).await.unwrap(), b"for you");
    ended(agent).await;
}

#[tokio::test]
async fn who_does_not_answer_or_speaks_another_generation_is_refused() {
    let bench = Bench::new();
    let how = Connect {
        agent: AgentState::Booting,
        within: Duration::from_millis(50),
    };
    let silent = Guest::connect(&bench.fifos.to_guest, &bench.fifos.from_guest, how).await;
    assert!(matches!(silent, Err(ChannelError::TimedOut(_))), "{silent:?}");

    let bench = Bench::new();
    let agent = bench.agent(|agent| {
        let hello: Hello = decode(&agent.hear().payload).unwrap();
        let welcome = Welcome {
            generation: GENERATION + 1,
            nonce: hello.nonce,
        };
        agent.say(FrameKind::Welcome, 0, 0, &encode(&welcome));
    });
    let other = bench.connect(true).await;
    assert!(matches!(other, Err(ChannelError::Generation { .. })), "{other:?}");
    ended(agent).await;

    let file = bench.fifos.to_guest.with_file_name("plain");
    std::fs::write(&file, "").unwrap();
    let plain = Guest::connect(&file, &PathBuf::from("/nonexistent"), how).await;
    assert!(matches!(plain, Err(ChannelError::Io { .. })), "{plain:?}");
}

#[tokio::test]
async fn streams_are_limited_and_come_back() {
    let (_bench, guest, agent) = pair(|_| ()).await;
    let (_agent, ()) = ended(agent).await;
    let mut streams = Vec::new();
    for _ in 0..MAX_STREAMS {
        streams.push(guest.open(&Request::ListPorts).await.unwrap());
    }
    assert!(matches!(
        guest.open(&Request::ListPorts).await,
        Err(ChannelError::Busy)
    ));
    streams.pop();
    guest.open(&Request::ListPorts).await.unwrap();
    let large = Request::Stat {
        path: vec![b'x'; MAX_REQUEST],
        user: None,
    };
    assert!(matches!(
        guest.open(&large).await,
        Err(ChannelError::TooLarge { .. })
    ));
}

#[tokio::test]
async fn the_last_words_of_a_dead_guest_are_delivered() {
    let (_bench, guest, agent) = pair(|agent| {
        let stream = agent.hear_next(FrameKind::Open);
        let other = agent.hear_next(FrameKind::Open);
        agent.data(stream, b"goodbye");
        agent.say(
            FrameKind::Message,
            0,
            stream,
            &encode(&Message::Exited(CommandState::Exited { code: 3 })),
        );
        agent.end(stream);
        other
    })
    .await;
    let mut stream = guest.open(&Request::ListPorts).await.unwrap();
    let mut other = guest.open(&Request::ListPorts).await.unwrap();
    ended(agent).await;
    guest.finish();
    assert_eq!(drain(&mut stream).await.unwrap(), b"goodbye");
    assert!(matches!(drain(&mut other).await, Err(ChannelError::Closed)));
    assert!(guest.is_closed());
    assert!(matches!(
        guest.open(&Request::ListPorts).await,
        Err(ChannelError::Closed)
    ));
    let failed = other.send_data(Bytes::from_static(b"x")).await;
    assert!(matches!(failed, Err(ChannelError::Closed)), "{failed:?}");
}

#[tokio::test]
async fn an_upload_fails_with_the_guests_reason() {
    let (_bench, guest, agent) = pair(|agent| {
        let stream = agent.hear_next(FrameKind::Open);
        agent.hear_next(FrameKind::Data);
        let failure = Failure {
            kind: FailureKind::NoSpace,
            message: "disk full".into(),
        };
        agent.say(FrameKind::End, 0, stream, &encode(&Err::<(), _>(failure)));
    })
    .await;
    let mut stream = guest.open(&Request::ListPorts).await.unwrap();
    match soon(stream.send_data(vec![0; 8 << 20].into())).await {
        Err(ChannelError::Failed(failure)) => assert_eq!(failure.kind, FailureKind::NoSpace),
        other => panic!("{other:?}"),
    }
    ended(agent).await;
}
