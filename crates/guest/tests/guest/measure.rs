//! Figures, for people: `cargo test -p atoll-guest -- --ignored --nocapture measure`, also with `ATOLL_GUEST_PROGRAM`.

use std::time::{Duration, Instant};

use atoll_guest_protocol::{Request, WriteFile, WriteMode};

use crate::client::{Event, Guest, exec};

/// The median, and the tenth percentile, which says more on a busy machine.
fn typical(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    format!(
        "p50 {:?}, p10 {:?}",
        times[times.len() / 2],
        times[times.len() / 10]
    )
}

#[test]
#[ignore = "prints figures"]
fn measure_commands() {
    let mut starts = Vec::new();
    for _ in 0..11 {
        let begin = Instant::now();
        let guest = Guest::start();
        starts.push(begin.elapsed());
        drop(guest);
    }
    println!("start to Welcome: {}", typical(starts));

    let mut guest = Guest::start();
    println!("idle: {}", memory(&mut guest));
    for round in 0..2 {
        let times = (0..200)
            .map(|number| {
                let begin = Instant::now();
                let stream = guest.open(&Request::Exec(exec(
                    &format!("t{round}-{number}"),
                    &["/bin/true"],
                )));
                guest.finish(stream);
                begin.elapsed()
            })
            .collect();
        println!("exec true: {}", typical(times));
    }
    let script = "import os,time\nt=[]\nfor _ in range(200):\n  b=time.monotonic(); p=os.posix_spawn('/bin/true',['true'],{}); \
                  os.waitpid(p,0); t.append(time.monotonic()-b)\nt.sort(); print('p50 %.0f us, p10 %.0f us' % (t[100]*1e6, t[20]*1e6))";
    let stream = guest.open(&Request::Exec(exec("python", &["python3", "-c", script])));
    println!(
        "spawn true inside, by python: {}",
        String::from_utf8_lossy(&guest.finish(stream).stdout).trim()
    );
}

#[test]
#[ignore = "prints figures"]
fn measure_bulk() {
    const SIZE: usize = 512 << 20;
    let mut guest = Guest::start();
    let path = guest.path("big");
    let begin = Instant::now();
    let stream = guest.open(&Request::WriteFile(WriteFile {
        path: path.clone(),
        user: None,
        mode: None,
        write: WriteMode::Replace,
        parents: true,
    }));
    let piece = vec![3; 1 << 20];
    for _ in 0..SIZE >> 20 {
        guest.send(stream, &piece);
    }
    guest.send_end(stream);
    guest.next(stream);
    guest.end(stream).expect("written");
    report("upload", SIZE, begin);

    let begin = Instant::now();
    let stream = guest.open(&Request::ReadFile {
        path: path.clone(),
        user: None,
        offset: 0,
        length: None,
    });
    while !matches!(guest.next(stream), Event::End(_)) {}
    report("download", SIZE, begin);

    let begin = Instant::now();
    let stream = guest.open(&Request::Exec(exec(
        "zeros",
        &["head", "-c", "536870912", "/dev/zero"],
    )));
    guest.finish(stream);
    report("exec output", SIZE, begin);
    println!("after: {}", memory(&mut guest));
    std::thread::sleep(Duration::from_secs(3));
    println!("rested: {}", memory(&mut guest));
    guest
        .call(&Request::Remove {
            path,
            user: None,
            recursive: false,
        })
        .expect("removed");
}

fn memory(guest: &mut Guest) -> String {
    let done = guest.run("grep -E 'VmRSS|VmHWM|RssAnon' /proc/$PPID/status | tr '\\n' ' '");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

fn report(what: &str, size: usize, begin: Instant) {
    println!(
        "{what}: {:.0} MB/s",
        size as f64 / 1e6 / begin.elapsed().as_secs_f64()
    );
}
