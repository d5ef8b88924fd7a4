//! A process that is killed with -9 wherever it happens to be. It tells what it is about to do and what was acknowledged through
//! its output; after each kill the vault has to hold exactly what was told.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use atoll_vault::{Error, Vault, VaultKey};

use crate::support::{KIB, files, load, noise, nowhere};

const ROUNDS: u64 = 60;
const CHILD: &str = "VAULT_CRASH_CHILD";

/// Without a key the file that is written becomes the pack; with one it is copied.
fn key(sealed: bool) -> Option<VaultKey> {
    sealed.then(|| VaultKey::new([3; 32]))
}

/// What is saved under an id: parts that others have too, and some of its own.
fn content(id: &str) -> Vec<u8> {
    let seed: u64 = id
        .bytes()
        .fold(7, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    [
        noise(seed % 4, 700 * KIB),
        vec![0; 64 * KIB],
        noise(seed, 900 * KIB),
        noise(seed % 3, 500 * KIB),
    ]
    .concat()
}

/// Not a test of its own: what the killed process does.
#[test]
fn child() {
    let Ok(job) = std::env::var(CHILD) else { return };
    let [dir, sealed, round] = job.split('|').collect::<Vec<_>>().try_into().unwrap();
    let sealed = sealed == "true";
    let vault = Vault::open(dir, key(sealed)).unwrap();
    let say = |what: &str, id: &str| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "@{what} {id}").unwrap();
        out.flush().unwrap();
    };
    let mut kept = vault.ids().unwrap();
    for n in 0_u64.. {
        let id = format!("r{round}-{n}");
        // Before it is told, so that the time after it is spent in the vault.
        let data = content(&id);
        let save = vault.begin(&id, "prj").unwrap();
        say("saving", &id);
        if n % 2 == 0 && !sealed {
            let (mut file, growing) = save.grow("data", nowhere).unwrap();
            for piece in data.chunks(200_000) {
                file.write_all(piece).unwrap();
            }
            drop(file);
            growing.finish().unwrap();
        } else {
            save.file("data", &mut &data[..]).unwrap();
        }
        drop(save.finish(id.clone().into_bytes(), n % 4 == 0).unwrap());
        say("saved", &id);
        kept.push(id);
        if kept.len() > 4 {
            let id = kept.remove(0);
            say("deleting", &id);
            vault.delete(&id).unwrap();
            say("deleted", &id);
        }
        if n % 2 == 1 {
            say("collecting", "-");
            // Takes one more: through `live`.
            let gone = kept.remove(0);
            say("deleting", &gone);
            vault.gc(&|id| id != gone, false).unwrap();
            say("deleted", &gone);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Told {
    There,
    Gone,
    Either,
}

#[test]
fn whatever_was_acknowledged_survives_a_kill_anywhere() {
    kill_again_and_again(true);
}

#[test]
fn so_does_what_was_written_into_the_pack_itself() {
    kill_again_and_again(false);
}

fn kill_again_and_again(sealed: bool) {
    let dir = tempfile::tempdir().unwrap();
    let mut told: BTreeMap<String, Told> = BTreeMap::new();
    let mut killed_while: BTreeMap<String, u64> = BTreeMap::new();
    let mut half_made = 0;
    let mut round = 0;
    // Where a kill falls is a matter of luck, and of what else the machine does: more of them until they fell into several
    // places, one into the middle of a save.
    while round < ROUNDS || ((half_made == 0 || killed_while.len() < 3) && round < 10 * ROUNDS) {
        let mut child = start(dir.path(), sealed, round);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // After so many lines, and a moment that differs: the kill lands anywhere between two lines.
        let mut left = 1 + (round * 7) % 12;
        let mut last = String::new();
        let mut hear = |line: &str, last: &mut String| {
            let Some((what, id)) = line.strip_prefix('@').and_then(|line| line.split_once(' ')) else {
                return false;
            };
            let state = match what {
                "saved" => Some(Told::There),
                "saving" | "deleting" => Some(Told::Either),
                "deleted" => Some(Told::Gone),
                _ => None,
            };
            state.map(|state| told.insert(id.to_owned(), state));
            what.clone_into(last);
            true
        };
        while left > 0 {
            let line = lines
                .next()
                .expect("the child goes on until it is killed")
                .unwrap();
            left -= u64::from(hear(&line, &mut last));
        }
        let moment = noise(round, 8)
            .iter()
            .fold(0_u64, |sum, byte| sum * 7 + u64::from(*byte))
            % 12_000;
        std::hint::black_box(spin(moment));
        child.kill().unwrap();
        child.wait().unwrap();
        for line in lines.map_while(Result::ok) {
            hear(&line, &mut last);
        }
        *killed_while.entry(last).or_default() += 1;
        half_made += u64::from(!files(dir.path(), "tmp").is_empty());
        check(dir.path(), sealed, &mut told, round);
        round += 1;
    }
    println!("killed {round} times, with half-made files {half_made} times, after: {killed_while:?}");
    assert!(half_made >= 1, "no kill fell into a save");
    assert!(
        killed_while.len() >= 3,
        "the kills all fell into the same place: {killed_while:?}"
    );
}

/// Lets some microseconds pass.
fn spin(micros: u64) -> u64 {
    let start = std::time::Instant::now();
    let mut turns = 0;
    while u128::from(micros) > start.elapsed().as_micros() {
        turns += 1;
        std::hint::spin_loop();
    }
    turns
}

fn start(dir: &std::path::Path, sealed: bool, round: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["crash::child", "--exact", "--nocapture"])
        .env(CHILD, format!("{}|{sealed}|{round}", dir.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn check(dir: &std::path::Path, sealed: bool, told: &mut BTreeMap<String, Told>, round: u64) {
    let vault = Vault::open(dir, key(sealed)).unwrap();
    assert!(files(dir, "tmp").is_empty());
    assert!(vault.damaged().is_empty(), "{:?}", vault.damaged());
    for id in vault.ids().unwrap() {
        assert!(
            matches!(told.get(&id), Some(Told::There | Told::Either)),
            "round {round}: {id} is there"
        );
    }
    // Reads everything, before and after a collection.
    for _ in 0..2 {
        for (id, state) in told.iter_mut() {
            match load(&vault, id) {
                Ok(data) => {
                    assert_ne!(*state, Told::Gone, "round {round}: {id}");
                    assert!(data == content(id), "round {round}: {id}");
                    assert_eq!(vault.open_saved(id).unwrap().meta(), id.as_bytes());
                    *state = Told::There;
                }
                Err(Error::NotFound { .. }) => {
                    assert_ne!(*state, Told::There, "round {round}: {id} is lost");
                    *state = Told::Gone;
                }
                Err(error) => panic!("round {round}: {id}: {error}"),
            }
        }
        vault.gc(&|_| true, false).unwrap();
    }
    let again = vault.gc(&|_| true, false).unwrap();
    assert_eq!(
        (again.bytes, again.packs),
        (0, 0),
        "round {round}: garbage is left"
    );
    told.retain(|_, state| *state != Told::Gone);
}
