//! What strangers can send to Atoll, and what must hold whatever they send. One [`Target`] for each thing that reads it.
//!
//! ```text
//!   libFuzzer (fuzz_targets/, by coverage: scripts/fuzz) ──┐
//!                                                          ├──> Target::check(bytes) ──> targets::…: no panic, round trips,
//!   atoll-fuzz (seeds, changed by chance: ./test) ─────────┘         memory bounded        a second reader that agrees
//! ```
//! What must hold:
//! - A target depends on its input alone: no clock, no randomness, nothing kept from one input to the next. So an input that
//!   fails, fails again.
//! - What an input of N bytes may cost in memory is a number for each target, which is checked each time. Time is checked by
//!   whoever drives: an input that takes seconds is a failure.
//! - No target reaches another machine.

#![allow(clippy::panic, reason = "that is how a target says that something is wrong")]

pub mod cost;
pub mod mutate;
mod seeds;
pub mod targets;

pub use seeds::binary_seeds;

/// Something that reads what strangers send.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    /// What is read.
    pub what: &'static str,
    /// The longest input that is tried.
    pub longest: usize,
    /// What any input may cost in memory at once, and what each of its bytes may add.
    pub memory: (u64, u64),
    /// How many inputs `./test` makes of the seeds: some seconds' worth.
    pub inputs: u64,
    run: fn(&[u8]),
}

/// Memory taken in all, freed or not, may be so many times what may be held at once.
const WORK: u64 = 64;

impl Target {
    /// Tries an input. Panics if something is wrong.
    pub fn check(&self, input: &[u8]) {
        let cost = cost::of(|| (self.run)(input));
        let (base, each) = self.memory;
        let most = base + each * input.len() as u64;
        assert!(
            cost.peak <= most && cost.total <= most * WORK,
            "{}: an input of {} bytes took {} bytes at once and {} in all; {most} at once are allowed",
            self.name,
            input.len(),
            cost.peak,
            cost.total
        );
    }
}

pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

#[cfg(feature = "libfuzzer")]
#[doc(hidden)]
pub use libfuzzer_sys;

/// The program of one target, for libFuzzer.
#[cfg(feature = "libfuzzer")]
#[macro_export]
macro_rules! libfuzzer {
    ($name:literal) => {
        $crate::libfuzzer_sys::fuzz_target!(|input: &[u8]| {
            $crate::find($name)
                .expect("a target of this name")
                .check(input);
        });
    };
}

const KIB: u64 = 1024;

macro_rules! targets {
    ($($name:ident = $module:ident, $longest:expr, $memory:expr, $inputs:expr, $what:literal;)*) => {
        pub const TARGETS: &[Target] = &[$(Target {
            name: stringify!($name),
            what: $what,
            longest: $longest,
            memory: $memory,
            inputs: $inputs,
            run: targets::$module::$name,
        },)*];
    };
}

targets! {
    guest_frames = guest, 300_000, (1024 * KIB, 16), 10_000, "frames of the guest channel";
    guest_messages = guest, 16_384, (64 * KIB, 200), 10_000, "messages of the guest channel";
    guest_channel = guest, 65_536, (4096 * KIB, 64), 300, "the host's end of the channel, against a guest that sends anything";
    erofs = files, 65_536, (4096 * KIB, 400), 2_000, "EROFS images";
    erofs_layers = files, 65_536, (4096 * KIB, 400), 2_000, "layers on an EROFS image";
    tar_heads = files, 65_536, (256 * KIB, 64), 10_000, "heads of tar streams, by three readers";
    tar_layer = files, 65_536, (1024 * KIB, 400), 3_000, "layers of images";
    tar_unpack = files, 65_536, (1024 * KIB, 64), 3_000, "tar streams, unpacked onto a disk";
    oci_documents = files, 16_384, (256 * KIB, 400), 10_000, "manifests and configs of OCI images";
    dockerfile = files, 16_384, (256 * KIB, 400), 10_000, "Dockerfiles";
    dockerignore = files, 16_384, (64 * KIB, 200), 10_000, ".dockerignore and wildcards";
    vault_manifest = files, 16_384, (64 * KIB, 400), 10_000, "manifests of saved state";
    snapshot_file = files, 65_536, (32 * 1024 * KIB, 64), 600, "exported snapshots";
    tls_hello = network, 32_768, (256 * KIB, 64), 10_000, "the ClientHello, held against rustls";
    http_head = network, 16_384, (64 * KIB, 32), 10_000, "first bytes and heads of requests, held against httparse";
    dns_question = network, 4096, (1024 * KIB, 400), 10_000, "questions of guests";
    dns_answer = network, 4096, (256 * KIB, 800), 10_000, "answers of resolvers";
    policy = network, 16_384, (4096 * KIB, 2000), 10_000, "network policies, names, paths and questions about them";
    host_names = network, 1024, (64 * KIB, 64), 10_000, "host names of ports";
    sse = models, 65_536, (256 * KIB, 64), 10_000, "server-sent events";
    event_stream = models, 65_536, (256 * KIB, 64), 10_000, "Amazon's event streams";
    model_peek = models, 16_384, (256 * KIB, 200), 10_000, "requests to models, as they are peeked at and rewritten";
    model_request = models, 16_384, (1024 * KIB, 2000), 5_000, "requests to models, on all wires and between them";
    model_answer = models, 16_384, (1024 * KIB, 2000), 5_000, "answers of models, on all wires and between them";
    model_stream = models, 32_768, (1024 * KIB, 2000), 1_500, "streams of models, on all wires and between them";
    screen = models, 16_384, (8192 * KIB, 400), 10_000, "texts that are looked through for personal data";
    native_bodies = apis, 16_384, (1024 * KIB, 1000), 4_000, "JSON of the native API and of the gateway's own";
    native_queries = apis, 4096, (256 * KIB, 200), 10_000, "queries and ranges of the native API";
    e2b_bodies = apis, 16_384, (1024 * KIB, 1000), 10_000, "JSON of E2B's control plane, and build steps";
    e2b_messages = apis, 16_384, (1024 * KIB, 2000), 6_000, "Connect frames and messages in a sandbox, JSON and protobuf";
    e2b_uploads = apis, 65_536, (1024 * KIB, 64), 5_000, "multipart bodies, signed links, Basic headers";
    schedule = workflows, 4096, (1024 * KIB, 4000), 10_000, "schedules";
    cron = workflows, 1024, (64 * KIB, 1000), 10_000, "cron strings";
    workflow_task = workflows, 16_384, (4096 * KIB, 4000), 10_000, "commands of workers, carried out on a run";
    workflow_history = workflows, 16_384, (1024 * KIB, 2000), 10_000, "histories, tokens and requests as protobuf";
    workflow_query = workflows, 4096, (256 * KIB, 2000), 10_000, "the language of visibility queries";
}
