//! How fast the store commits on a disk: `cargo run --release -p atoll-store --example commit-rate [directory]`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use atoll_store::{Fact, NewFact, Stores, sqlite};
use atoll_types::{ProjectId, Timestamp};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args_os()
        .nth(1)
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let directory = tempfile::tempdir_in(directory)?;
    let store = sqlite::open(&directory.path().join("atoll.db"))?;
    let id = ProjectId::from_entropy([1; 20]);
    let project = store.identity.ensure_project("bench", id, Timestamp(0)).await?.id;

    println!(
        "{:>8} {:>10} {:>10} {:>10}",
        "writers", "writes/s", "p50 µs", "p99 µs"
    );
    for writers in [1, 8, 64, 512] {
        let began = Instant::now();
        let tasks: Vec<_> = (0..writers)
            .map(|_| tokio::spawn(write_for(store.clone(), project.clone(), Duration::from_secs(3))))
            .collect();
        let mut latencies = Vec::new();
        for task in tasks {
            latencies.extend(task.await??);
        }
        let seconds = began.elapsed().as_secs_f64();
        latencies.sort_unstable();
        let at = |per_mille: usize| latencies[(latencies.len() - 1) * per_mille / 1000].as_micros();
        println!(
            "{writers:>8} {:>10.0} {:>10} {:>10}",
            latencies.len() as f64 / seconds,
            at(500),
            at(990)
        );
    }

    let reads = 20_000;
    let began = Instant::now();
    for _ in 0..reads {
        store.identity.find_active_key([0; 32]).await?;
    }
    println!("one read: {} ns", began.elapsed().as_nanos() / reads);
    store.database.close().await;
    Ok(())
}

async fn write_for(
    store: Stores,
    project: ProjectId,
    time: Duration,
) -> Result<Vec<Duration>, atoll_store::Error> {
    let end = Instant::now() + time;
    let mut latencies = Vec::new();
    while Instant::now() < end {
        let fact = NewFact {
            at: Timestamp(1),
            project: project.clone(),
            sandbox: None,
            fact: Fact::Usage {
                instance: None,
                wall_millis: 1000,
                cpu_micros: 5000,
                memory_byte_seconds: 1 << 29,
                disk_byte_seconds: 1 << 30,
            },
        };
        let began = Instant::now();
        store.ledger.append_facts(vec![fact]).await?;
        latencies.push(began.elapsed());
    }
    Ok(latencies)
}
