//! The peers: raw `runsc`, `bwrap`, and podman or docker on the same root filesystem, started as a person with a shell would.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use atoll_client::find_in_path;
use atoll_client::output::{Doing, Error, Result};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::process::Command;

/// What a peer runs and prints; ours does the same. A shell builtin: `/bin/echo` would load the locale that our templates
/// set and a bare `runsc run` does not.
pub(crate) const ECHO: [&str; 3] = ["/bin/sh", "-c", "echo ready"];

/// `runsc` with an EROFS root, a memory overlay and no gofer: its fastest way.
#[derive(Debug)]
pub(crate) struct Runsc {
    program: PathBuf,
    image: PathBuf,
    dir: PathBuf,
    next: std::sync::atomic::AtomicUsize,
}

impl Runsc {
    pub(crate) fn new(program: &Path, image: &Path, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir.join("state")).doing("cannot prepare raw runsc")?;
        Ok(Self {
            program: program.into(),
            image: image.into(),
            dir: dir.into(),
            next: 0.into(),
        })
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("--root")
            .arg(self.dir.join("state"))
            .args([
                "--ignore-cgroups",
                "--network=none",
                "--platform=systrap",
                "--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
            ])
            .kill_on_drop(true);
        command
    }

    pub(crate) fn bundle(&self, argv: &[&str]) -> Result<(String, PathBuf)> {
        let number = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let id = format!("peer{number:06}");
        let bundle = self.dir.join(&id);
        std::fs::create_dir_all(bundle.join("root")).doing("cannot prepare raw runsc")?;
        let config = bundle_config(&self.image, &bundle.join("root"), argv);
        std::fs::write(bundle.join("config.json"), config.to_string()).doing("cannot prepare raw runsc")?;
        Ok((id, bundle))
    }

    /// Milliseconds from start to the first byte of output.
    pub(crate) async fn first_byte(&self) -> Result<f64> {
        let (id, bundle) = self.bundle(&ECHO)?;
        let mut command = self.command();
        command.args(["run", "-bundle"]).arg(&bundle).arg(&id);
        let elapsed = first_byte(command).await;
        let _leftover = std::fs::remove_dir_all(&bundle);
        elapsed
    }

    /// A sandbox that sleeps, for `exec` and for measuring what it holds. Its processes join `cgroup` if one is given.
    pub(crate) async fn sleeper(&self, cgroup: Option<&Path>) -> Result<String> {
        let (id, bundle) = self.bundle(&["/bin/sleep", "100000"])?;
        let runsc = self.command();
        let runsc = runsc.as_std();
        let mut command = Command::new("sh");
        command.args([
            "-c",
            r#"[ -z "$1" ] || echo $$ > "$1/cgroup.procs"; shift; exec "$@""#,
            "sh",
        ]);
        command
            .arg(cgroup.unwrap_or(Path::new("")))
            .arg(runsc.get_program())
            .args(runsc.get_args());
        command.args(["run", "-detach", "-bundle"]).arg(&bundle).arg(&id);
        let status = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .await
            .doing("cannot start raw runsc")?;
        if status.success() {
            Ok(id)
        } else {
            Err(Error::new("raw runsc did not start"))
        }
    }

    /// Milliseconds that `runsc exec ID /bin/true` takes.
    pub(crate) async fn exec(&self, id: &str) -> Result<f64> {
        let mut command = self.command();
        command.args(["exec", id, "/bin/true"]);
        let began = Instant::now();
        let output = command
            .stdin(Stdio::null())
            .output()
            .await
            .doing("cannot run runsc exec")?;
        let elapsed = millis(began.elapsed());
        if output.status.success() {
            Ok(elapsed)
        } else {
            Err(Error::new(format!(
                "runsc exec failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            )))
        }
    }

    pub(crate) async fn kill(&self, id: &str) {
        let mut command = self.command();
        let _gone = command
            .args(["delete", "-force", id])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .await;
    }
}

fn bundle_config(image: &Path, root: &Path, argv: &[&str]) -> Value {
    json!({
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
        },
        "root": {"path": root, "readonly": false},
        "hostname": "peer",
        "annotations": {
            "dev.gvisor.spec.rootfs.source": image,
            "dev.gvisor.spec.rootfs.type": "erofs",
            "dev.gvisor.spec.rootfs.overlay": "memory",
        },
        "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}]},
    })
}

/// The template's image, mounted read-only for peers that want a directory; unmounted when dropped.
#[derive(Debug)]
struct MountedImage {
    at: PathBuf,
}

impl MountedImage {
    /// `None` if it cannot be mounted here.
    async fn new(image: &Path, at: PathBuf) -> Option<Self> {
        std::fs::create_dir_all(&at).ok()?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "erofs", "-o", "loop,ro"]).arg(image).arg(&at);
        succeeds(mount).await.then_some(Self { at })
    }
}

impl Drop for MountedImage {
    fn drop(&mut self) {
        let _gone = std::process::Command::new("umount").arg(&self.at).status();
    }
}

async fn succeeds(mut command: Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().await.is_ok_and(|status| status.success())
}

/// `bwrap` on the same root, mounted read-only, with every namespace of its own. The image has no mount points for
/// /proc and /dev, and bwrap no overlay, so its top directory is put together anew, as people do with bwrap.
#[derive(Debug)]
pub(crate) struct Bwrap {
    program: PathBuf,
    root: MountedImage,
}

impl Bwrap {
    /// `None` if there is no bwrap, or the image cannot be mounted here.
    pub(crate) async fn new(image: &Path, dir: &Path) -> Option<Self> {
        let program = find_in_path("bwrap")?;
        let root = MountedImage::new(image, dir.join("bwrap-root")).await?;
        Some(Self { program, root })
    }

    /// Milliseconds from start to the first byte of output.
    pub(crate) async fn first_byte(&self) -> Result<f64> {
        let mut command = Command::new(&self.program);
        command
            .arg("--unshare-all")
            .args(self.rest())
            .args(ECHO)
            .kill_on_drop(true);
        first_byte(command).await
    }

    /// A command on the same root, in the network namespace at `network`.
    pub(crate) fn command_in(&self, network: &Path) -> Command {
        let mut namespace = OsString::from("--net=");
        namespace.push(network);
        let mut command = Command::new("nsenter");
        command
            .arg(namespace)
            .arg(&self.program)
            .args(["--unshare-all", "--share-net"])
            .args(self.rest())
            .kill_on_drop(true);
        command
    }

    /// Everything but namespaces and command.
    fn rest(&self) -> Vec<OsString> {
        let at = |dir: &str| self.root.at.join(dir).into_os_string();
        let mut rest: Vec<OsString> = Vec::new();
        rest.extend(["--die-with-parent", "--cap-drop", "ALL", "--tmpfs", "/"].map(OsString::from));
        for (dir, to) in [("usr", "/usr"), ("etc", "/etc")] {
            rest.extend(["--ro-bind".into(), at(dir), to.into()]);
        }
        for (dir, link) in [
            ("usr/bin", "/bin"),
            ("usr/lib", "/lib"),
            ("usr/lib64", "/lib64"),
            ("usr/sbin", "/sbin"),
        ] {
            rest.extend(["--symlink", dir, link].map(OsString::from));
        }
        rest.extend(["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"].map(OsString::from));
        rest
    }
}

/// Podman, or docker where a daemon answers, without a network.
#[derive(Debug)]
pub(crate) struct Containers {
    pub(crate) name: &'static str,
    run: Vec<String>,
    root: MountedImage,
}

impl Containers {
    /// `None` if there is neither, or none that can run a container on this machine.
    pub(crate) async fn new(image: &Path, dir: &Path) -> Option<Self> {
        let mut root = MountedImage::new(image, dir.join("container-root")).await?;
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let mut ways = Vec::new();
        if find_in_path("podman").is_some() {
            let rootfs = format!("{}:O", root.at.display());
            let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"];
            let begin = ["run", "--rm", "--network=none"];
            let end = ["--rootfs", &rootfs];
            ways.push(("podman", words(&[&["podman"], &begin[..], &end].concat())));
            // For machines with the older cgroups, which Debian's default runtime refuses.
            let runc = ["podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs"];
            ways.push(("podman", words(&[&runc, &begin[..], &limits, &end].concat())));
        }
        if find_in_path("docker").is_some() {
            const IMAGE: &str = "atoll-bench-peer";
            let mut import = Command::new("sh");
            let line = format!("docker info >/dev/null && tar -C \"$0\" -c . | docker import - {IMAGE}");
            import.args(["-c", &line]).arg(&root.at);
            if ways.is_empty() && succeeds(import).await {
                ways.push((
                    "docker",
                    words(&["docker", "run", "--rm", "--network=none", IMAGE]),
                ));
            }
        }
        for (name, run) in ways {
            let peer = Self { name, run, root };
            if peer.first_byte().await.is_ok() {
                return Some(peer);
            }
            let Self { root: again, .. } = peer;
            root = again;
        }
        None
    }

    /// Milliseconds from start to the first byte of output.
    pub(crate) async fn first_byte(&self) -> Result<f64> {
        let mut command = Command::new(&self.run[0]);
        command.args(&self.run[1..]).args(ECHO).kill_on_drop(true);
        first_byte(command).await
    }
}

async fn first_byte(mut command: Command) -> Result<f64> {
    let began = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .doing("cannot start the peer")?;
    let mut stdout = child
        .stdout
        .take()
        .ok_or_else(|| Error::new("the peer has no stdout"))?;
    let mut byte = [0; 1];
    let got = stdout.read(&mut byte).await.doing("cannot read from the peer")?;
    let elapsed = millis(began.elapsed());
    let output = child.wait_with_output().await.doing("cannot wait for the peer")?;
    if got == 1 && output.status.success() {
        return Ok(elapsed);
    }
    Err(Error::new(format!(
        "the peer failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    )))
}

pub(crate) fn millis(elapsed: Duration) -> f64 {
    elapsed.as_secs_f64() * 1000.0
}
