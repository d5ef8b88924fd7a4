//! How fast the vault is on this machine: `cargo run --release -p atoll-vault --example measure [directory]`.
//!
//! Streams come through pipes, written by a thread of their own, as a runtime would.

#![allow(
    clippy::unwrap_used,
    reason = "a measurement that cannot be made has nothing to say"
)]

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use atoll_vault::{Saved, Vault, VaultKey};

const MIB: usize = 1 << 20;

fn main() {
    let place = std::env::args().nth(1).unwrap_or_else(|| ".".into());
    let scratch = tempfile::tempdir_in(place).unwrap();
    for encrypted in [false, true] {
        println!("{}", if encrypted { "encrypted" } else { "plain" });
        let dir = scratch.path().join(if encrypted { "e" } else { "p" });
        let key = || encrypted.then(|| VaultKey::new([7; 32]));
        let vault = Vault::open(&dir, key()).unwrap();
        let mut big = noise(1, 1024 * MIB);

        let (first, saved) = timed(|| save(&vault, "first", &big, false));
        report("save 1 GiB, all new, not durable", big.len(), first, Some(&saved));
        for (n, durable) in [(1, false), (2, true), (3, true)] {
            // 1 MB in four places.
            for part in 0..4 {
                let at = (part * 250 + n) * MIB;
                big[at..at + 250_000].copy_from_slice(&noise(n as u64 * 10 + part as u64, 250_000));
            }
            let (took, saved) = timed(|| save(&vault, &format!("next-{n}"), &big, durable));
            let what = if durable {
                "save 1 GiB, 1 MB changed, durable"
            } else {
                "save 1 GiB, 1 MB changed, not durable"
            };
            report(what, big.len(), took, Some(&saved));
        }
        for durable in [false, true] {
            let mut times: Vec<Took> = Vec::new();
            for n in 0..11_u64 {
                let data = noise(100 + n + u64::from(durable) * 50, 20 * MIB);
                let (took, _) = timed(|| save(&vault, &format!("small-{durable}-{n}"), &data, durable));
                times.push(took);
            }
            times.sort();
            let what = if durable {
                "save 20 MiB, all new, durable (median)"
            } else {
                "save 20 MiB, all new, not durable (median)"
            };
            report(what, 20 * MIB, times[times.len() / 2], None);
        }
        let opened = vault.open_saved("next-3").unwrap();
        for (what, place) in [("a file", scratch.path()), ("memory", Path::new("/dev/shm"))] {
            let file = tempfile::tempfile_in(place).unwrap();
            let (took, _) = timed(|| opened.read_to("pages", &file).unwrap());
            report(&format!("read back 1 GiB to {what}"), big.len(), took, None);
        }
        let (took, ()) = timed(|| opened.verify().unwrap());
        report("verify 1 GiB, one thread", big.len(), took, None);
        let (took, ()) = timed(|| {
            vault
                .export("next-3", b"", &mut File::create("/dev/null").unwrap())
                .unwrap();
        });
        report("export 1 GiB", big.len(), took, None);
        drop(opened);
        drop(vault);
        let (took, vault) = timed(|| Vault::open(&dir, key()).unwrap());
        println!("  open, {} saves: {:.1?}", vault.ids().unwrap().len(), took.wall);
        let (took, gc) = timed(|| vault.gc(&|id| id == "next-3", false).unwrap());
        println!(
            "  gc: {:.1?}, {} MiB given back",
            took.wall,
            gc.bytes / MIB as u64
        );
        let left = vault.usage().unwrap().bytes;
        println!(
            "  usage for 1 GiB in one save: {:.1} MiB",
            left as f64 / MIB as f64
        );
        drop(vault);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

fn save(vault: &Vault, id: &str, data: &[u8], durable: bool) -> Saved {
    let save = vault.begin(id, "project").unwrap();
    let pipe = save.stream("pages").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut pipe = File::from(pipe);
            for part in data.chunks(MIB) {
                pipe.write_all(part).unwrap();
            }
        });
    });
    save.finish(Vec::new(), durable).unwrap()
}

fn timed<T>(work: impl FnOnce() -> T) -> (Took, T) {
    let (start, cpu) = (Instant::now(), cpu_time());
    let result = work();
    let (wall, cpu) = (start.elapsed(), cpu_time() - cpu);
    (Took { wall, cpu }, result)
}

/// The second says what it would be on a machine that others leave alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Took {
    wall: Duration,
    cpu: Duration,
}

/// User and system time of this process, its ended threads included; in steps of 10 ms.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

fn report(what: &str, len: usize, took: Took, saved: Option<&Saved>) {
    let rate = len as f64 / took.wall.as_secs_f64() / 1e9;
    let stored = saved.map_or(String::new(), |saved| {
        format!(", {:.2} MB stored", saved.stored_bytes as f64 / 1e6)
    });
    println!(
        "  {what}: {:.1} ms ({:.0} ms of CPU), {rate:.2} GB/s{stored}",
        took.wall.as_secs_f64() * 1e3,
        took.cpu.as_secs_f64() * 1e3
    );
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for part in out.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        part.copy_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()[..part.len()]);
    }
    out
}
