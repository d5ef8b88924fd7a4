//! The channel to the guest: whatever it sends, the host finds the frames that are there, and nothing hangs.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use atoll_guest_protocol::{
    Decoder, FILLER_LEN, Failure, FrameKind, GENERATION, HEADER_LEN, Hello, MAX_PAYLOAD, Message, Request,
    Welcome, decode, encode, encode_into,
};
use atoll_runtime::channel::{AgentState, ChannelError, Connect, Fifos, Guest};

use super::{block_on, scratch};

type Owned = (FrameKind, u8, u32, Vec<u8>);

/// What a decoder finds when the bytes arrive in pieces of this size, and how many bytes it skipped.
fn frames(input: &[u8], piece: usize, runs: bool) -> (Vec<Owned>, u64) {
    let (mut decoder, mut found) = (Decoder::new(), Vec::new());
    let mut rest = input;
    while !rest.is_empty() {
        let space = decoder.space();
        let count = space.len().min(piece).min(rest.len());
        space[..count].copy_from_slice(&rest[..count]);
        decoder.filled(count);
        rest = &rest[count..];
        if runs {
            while let Some(run) = decoder.next_run() {
                let (kind, sub, stream) = (run.first.kind, run.first.sub, run.first.stream);
                found.push((kind, sub, stream, run.first.payload.to_vec()));
                for payload in run.more {
                    assert!(
                        !payload.is_empty(),
                        "an empty frame means something, and is in no run"
                    );
                    found.push((kind, sub, stream, payload.to_vec()));
                }
            }
        } else {
            while let Some(frame) = decoder.next_frame() {
                found.push((frame.kind, frame.sub, frame.stream, frame.payload.to_vec()));
            }
        }
    }
    let skipped = decoder.skipped();
    (found, skipped)
}

/// Frames are the same however the bytes are cut, each stands in the input as it would be written, and no byte is counted
/// twice.
pub fn guest_frames(input: &[u8]) {
    let (found, skipped) = frames(input, usize::MAX, false);
    let mut length = skipped;
    for (kind, sub, stream, payload) in &found {
        assert!(payload.len() <= MAX_PAYLOAD);
        let mut written = Vec::new();
        encode_into(&mut written, *kind, *sub, *stream, payload);
        length += written.len() as u64;
    }
    assert!(length <= input.len() as u64, "{length} bytes of {}", input.len());
    for (piece, runs) in [(1, false), (7, true), (4096, false), (usize::MAX, true)] {
        // Byte by byte is quadratic in the driver, not in the decoder.
        if piece > 1 || input.len() < 4096 {
            assert_eq!(frames(input, piece, runs).0, found, "in pieces of {piece}");
        }
    }
}

fn round_trip<T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug>(input: &[u8]) {
    if let Ok(message) = decode::<T>(input) {
        let written = encode(&message);
        assert_eq!(decode::<T>(&written).as_ref(), Ok(&message));
    }
}

pub fn guest_messages(input: &[u8]) {
    round_trip::<Message>(input);
    round_trip::<Request>(input);
    round_trip::<Hello>(input);
    round_trip::<Welcome>(input);
    round_trip::<Result<(), Failure>>(input);
}

/// How long anything may take that waits for nobody.
const SOON: Duration = Duration::from_secs(20);
const STREAMS: u32 = 3;

/// A guest greets properly, sends the input, and then ends all streams: whatever the input was, each stream has ended.
pub fn guest_channel(input: &[u8]) {
    let directory = scratch();
    let fifos = Fifos::create(directory.path()).expect("FIFOs can be made");
    let (from_host, to_host) = fifos.open_for_guest().expect("the guest's ends can be opened");
    let said = input.to_vec();
    let (done, is_done) = tokio::sync::oneshot::channel();
    let guest = std::thread::spawn(move || {
        let (mut from_host, mut to_host) = (std::fs::File::from(from_host), std::fs::File::from(to_host));
        let mut decoder = Decoder::new();
        let (mut welcomed, mut opened) = (false, 0);
        while opened < STREAMS {
            let count = from_host.read(decoder.space())?;
            decoder.filled(count);
            if count == 0 {
                return Ok(());
            }
            while let Some(frame) = decoder.next_frame() {
                match frame.kind {
                    FrameKind::Hello if !welcomed => {
                        let nonce = decode::<Hello>(frame.payload).map_or(0, |hello| hello.nonce);
                        let mut welcome = Vec::new();
                        let words = encode(&Welcome {
                            generation: GENERATION,
                            nonce,
                        });
                        encode_into(&mut welcome, FrameKind::Welcome, 0, 0, &words);
                        to_host.write_all(&welcome)?;
                        welcomed = true;
                    }
                    FrameKind::Open => opened += 1,
                    _ => {}
                }
            }
        }
        to_host.write_all(&said)?;
        // What the input left unfinished costs a frame at most.
        to_host.write_all(&vec![0; FILLER_LEN + HEADER_LEN])?;
        let mut ends = Vec::new();
        for stream in 1..=STREAMS {
            encode_into(
                &mut ends,
                FrameKind::End,
                0,
                stream,
                &encode(&Ok::<(), Failure>(())),
            );
        }
        to_host.write_all(&ends)?;
        // The host reads until all of it was written.
        let _ = done.send(());
        Ok::<_, std::io::Error>(())
    });
    block_on(async {
        let how = Connect {
            agent: AgentState::Booting,
            within: SOON,
        };
        let host = Guest::connect(&fifos.to_guest, &fifos.from_guest, how)
            .await
            .expect("a guest that greets properly is heard");
        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            streams.push(host.open(&Request::Usage).await.expect("a stream can be opened"));
        }
        for mut stream in streams {
            let drained = async {
                let mut bytes = 0_usize;
                while let Some(next) = stream.next().await {
                    match next {
                        Ok(_) => bytes += 1,
                        Err(ChannelError::Closed) => panic!("the channel is over, but the guest is there"),
                        Err(_) => break,
                    }
                }
                bytes
            };
            let drained = tokio::time::timeout(SOON, drained).await;
            assert!(drained.is_ok(), "a stream that was ended has not ended");
        }
        let heard = tokio::time::timeout(SOON, is_done).await;
        assert!(
            matches!(heard, Ok(Ok(()))),
            "the host no longer reads what the guest writes"
        );
        assert!(!host.is_closed(), "one guest's nonsense ended the channel");
        host.close();
    });
    drop(fifos);
    drop(directory);
    let _ = guest.join().expect("the guest does not panic");
}
