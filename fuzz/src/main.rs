//! Fuzzing on any toolchain: tries the committed seeds and then a number of inputs made of them by chance. No coverage guides
//! it; for that there is `scripts/fuzz`.
//!
//! ```text
//!   atoll-fuzz run [TARGET…] [--seed N] [--percent N | --seconds N]
//!     └── for each target a process of its own: a crash, a hang or memory without end costs that process, and its progress
//!         (the number of the input, which names it) lies in a file, so that whoever watches can write the input down.
//! ```

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use atoll_fuzz::{TARGETS, Target, binary_seeds, find, mutate};

/// An input that takes longer never ends.
const PATIENCE: Duration = Duration::from_secs(20);
/// No input needs as much memory as this.
const MEMORY: u64 = 8 << 30;
/// The seed of every run that names none: a run that passed passes again.
const SEED: u64 = 1;
const LOOK: Duration = Duration::from_millis(20);

const HELP: &str = "\
atoll-fuzz list                     what can be fuzzed
atoll-fuzz run [TARGET…]            tries the seeds and inputs made of them
    --seed N                        other inputs
    --percent N                     of the usual number of inputs
    --seconds N                     as many inputs as that takes, for each target
atoll-fuzz replay TARGET FILE…      tries the inputs in files
atoll-fuzz seeds                    writes those seeds that are no text
";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["list"] => {
            for target in TARGETS {
                println!("{:18} {}", target.name, target.what);
            }
            Ok(true)
        }
        ["run", rest @ ..] => Plan::read(rest).and_then(|plan| plan.run()),
        ["work", target, progress, rest @ ..] => {
            Plan::read(rest).and_then(|plan| work(known(target)?, Path::new(progress), &plan))
        }
        ["replay", target, files @ ..] => known(target).and_then(|target| replay(target, files)),
        ["seeds"] => write_seeds(),
        _ => {
            print!("{HELP}");
            Ok(words.iter().any(|word| word.contains("help")))
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn known(name: &str) -> Result<&'static Target, String> {
    find(name).ok_or_else(|| format!("there is no target `{name}`; see: atoll-fuzz list"))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// The committed inputs of a target, in the order of their names.
fn seeds(target: &Target) -> Result<Vec<Vec<u8>>, String> {
    let directory = root().join("seeds").join(target.name);
    let fail = |error: std::io::Error| format!("cannot read {}: {error}", directory.display());
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&directory)
        .map_err(fail)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()
        .map_err(fail)?;
    paths.sort();
    if paths.is_empty() {
        return Err(format!("there are no seeds in {}", directory.display()));
    }
    paths
        .iter()
        .map(|path| std::fs::read(path).map_err(fail))
        .collect()
}

fn input(target: &Target, seeds: &[Vec<u8>], seed: u64, number: u64) -> Vec<u8> {
    match usize::try_from(number).ok().and_then(|number| seeds.get(number)) {
        Some(known) => known.clone(),
        None => mutate::input(seeds, seed, number, target.longest),
    }
}

#[derive(Debug, Clone)]
struct Plan {
    targets: Vec<&'static Target>,
    seed: u64,
    percent: u64,
    seconds: Option<u64>,
}

impl Plan {
    fn read(words: &[&str]) -> Result<Self, String> {
        let mut plan = Self {
            targets: Vec::new(),
            seed: SEED,
            percent: 100,
            seconds: None,
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut number = || -> Result<u64, String> {
                let text = words.next().ok_or_else(|| format!("{word} needs a number"))?;
                text.parse().map_err(|_| format!("`{text}` is not a number"))
            };
            match *word {
                "--seed" => plan.seed = number()?,
                "--percent" => plan.percent = number()?,
                "--seconds" => plan.seconds = Some(number()?),
                name => plan.targets.push(known(name)?),
            }
        }
        if plan.targets.is_empty() {
            plan.targets = TARGETS.iter().collect();
        }
        Ok(plan)
    }

    fn words(&self) -> Vec<String> {
        let mut words = vec!["--seed".to_owned(), self.seed.to_string()];
        words.extend(["--percent".to_owned(), self.percent.to_string()]);
        if let Some(seconds) = self.seconds {
            words.extend(["--seconds".to_owned(), seconds.to_string()]);
        }
        words
    }

    /// Whether all targets held.
    fn run(&self) -> Result<bool, String> {
        println!("seed {}", self.seed);
        let at_once = std::thread::available_parallelism().map_or(1, usize::from);
        let mut waiting = self.targets.iter().rev().copied().collect::<Vec<_>>();
        let mut running: Vec<Worker> = Vec::new();
        let mut held = true;
        while !waiting.is_empty() || !running.is_empty() {
            while running.len() < at_once
                && let Some(target) = waiting.pop()
            {
                running.push(Worker::start(target, self)?);
            }
            let mut still = Vec::new();
            for mut worker in running {
                match worker.look()? {
                    None => still.push(worker),
                    Some(end) => held &= worker.report(end, self)?,
                }
            }
            running = still;
            std::thread::sleep(LOOK);
        }
        Ok(held)
    }
}

enum End {
    Well,
    Crashed(String),
    Hung,
}

/// A process that tries the inputs of one target.
struct Worker {
    target: &'static Target,
    process: Child,
    progress: tempfile::NamedTempFile,
    began: Instant,
    /// The number of the input that it was seen at, and when it came there.
    at: (u64, Instant),
}

impl Worker {
    fn start(target: &'static Target, plan: &Plan) -> Result<Self, String> {
        let fail = |error: std::io::Error| format!("cannot start a process for {}: {error}", target.name);
        let progress = tempfile::NamedTempFile::new().map_err(fail)?;
        let process = Command::new(std::env::current_exe().map_err(fail)?)
            .args(["work", target.name])
            .arg(progress.path())
            .args(plan.words())
            .stdin(Stdio::null())
            .spawn()
            .map_err(fail)?;
        Ok(Self {
            target,
            process,
            progress,
            began: Instant::now(),
            at: (0, Instant::now()),
        })
    }

    fn number(&self) -> u64 {
        let mut bytes = [0; 8];
        let _ = self.progress.as_file().read_exact_at(&mut bytes, 0);
        u64::from_le_bytes(bytes)
    }

    fn look(&mut self) -> Result<Option<End>, String> {
        let ended = self.process.try_wait().map_err(|error| error.to_string())?;
        if let Some(status) = ended {
            return Ok(Some(match status.success() {
                true => End::Well,
                false => End::Crashed(status.to_string()),
            }));
        }
        let number = self.number();
        if number != self.at.0 {
            self.at = (number, Instant::now());
        } else if self.at.1.elapsed() > PATIENCE {
            let _ = self.process.kill();
            let _ = self.process.wait();
            return Ok(Some(End::Hung));
        }
        Ok(None)
    }

    /// Whether it ended well; otherwise the input is written down.
    fn report(&self, end: End, plan: &Plan) -> Result<bool, String> {
        let (name, number, took) = (
            self.target.name,
            self.number(),
            self.began.elapsed().as_secs_f32(),
        );
        let why = match end {
            End::Well => {
                println!("{name:18} {number:8} inputs {took:6.1} s");
                return Ok(true);
            }
            End::Crashed(status) => status,
            End::Hung => format!("no end within {} s", PATIENCE.as_secs()),
        };
        let bytes = input(self.target, &seeds(self.target)?, plan.seed, number);
        let directory = root().join("artifacts").join(name);
        let path = directory.join(format!("seed-{}-input-{number}", plan.seed));
        std::fs::create_dir_all(&directory)
            .and_then(|()| std::fs::write(&path, &bytes))
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!(
            "{name:18} FAILED at input {number} ({} bytes) of seed {}: {why}\n    {}\n    try it again: atoll-fuzz replay {name} {}",
            bytes.len(),
            plan.seed,
            path.display(),
            path.display()
        );
        Ok(false)
    }
}

/// What a worker does.
fn work(target: &Target, progress: &Path, plan: &Plan) -> Result<bool, String> {
    let fail = |error: std::io::Error| format!("cannot write {}: {error}", progress.display());
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(progress)
        .map_err(fail)?;
    limit_memory();
    let seeds = seeds(target)?;
    let inputs = match plan.seconds {
        Some(_) => u64::MAX,
        None => seeds.len() as u64 + target.inputs * plan.percent / 100,
    };
    let end = plan
        .seconds
        .map(|seconds| Instant::now() + Duration::from_secs(seconds));
    for number in 0..inputs {
        file.write_all_at(&number.to_le_bytes(), 0).map_err(fail)?;
        target.check(&input(target, &seeds, plan.seed, number));
        if end.is_some_and(|end| Instant::now() > end) {
            break;
        }
    }
    Ok(true)
}

fn limit_memory() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit {
        current: Some(MEMORY),
        maximum: Some(MEMORY),
    };
    let _ = setrlimit(Resource::As, limit);
}

fn replay(target: &Target, files: &[&str]) -> Result<bool, String> {
    limit_memory();
    for file in files {
        let bytes = std::fs::read(file).map_err(|error| format!("cannot read {file}: {error}"))?;
        let began = Instant::now();
        target.check(&bytes);
        println!("{file}: {} bytes, {:?}", bytes.len(), began.elapsed());
    }
    Ok(true)
}

fn write_seeds() -> Result<bool, String> {
    for (target, name, bytes) in binary_seeds() {
        let path = root().join("seeds").join(known(target)?.name).join(name);
        let written = path
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::File::create(&path))
            .and_then(|mut file| file.write_all(&bytes));
        written.map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(true)
}
