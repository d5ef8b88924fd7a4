use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use sha2::{Digest, Sha256};

use super::*;
use crate::error::Error;
use crate::fixture::{Archive, gzip};
use crate::progress::Quiet;

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Two layers, one of them compressed, and a config as Docker writes it.
struct Sample {
    layers: Vec<(Vec<u8>, &'static str)>,
    config: Vec<u8>,
}

fn sample() -> Sample {
    let lower = Archive::new().file("etc/os", "test").file("old", "1").bytes();
    let upper = Archive::new().file(".wh.old", "").file("app/run", "#!").bytes();
    let config = json!({
        "os": "linux", "architecture": "amd64",
        "rootfs": {"type": "layers", "diff_ids": [digest(&lower), digest(&upper)]},
        "config": {
            "Env": ["PATH=/bin", "MODE=prod=1"], "WorkingDir": "/app", "User": "1000:1000", "Volumes": null,
            "Entrypoint": ["/app/run"], "Cmd": ["--serve"], "ExposedPorts": {"8080/tcp": {}, "53/udp": {}},
        },
    });
    Sample {
        layers: vec![
            (gzip(&lower), "application/vnd.oci.image.layer.v1.tar+gzip"),
            (
                zstd::encode_all(&upper[..], 1).unwrap(),
                "application/vnd.oci.image.layer.v1.tar+zstd",
            ),
        ],
        config: config.to_string().into_bytes(),
    }
}

fn write_layout(dir: &Path, sample: &Sample) -> String {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8], media: &str| {
        fs::write(blobs.join(&digest(bytes)[7..]), bytes).unwrap();
        json!({"mediaType": media, "digest": digest(bytes), "size": bytes.len()})
    };
    let config = put(&sample.config, "application/vnd.oci.image.config.v1+json");
    let layers: Vec<_> = sample
        .layers
        .iter()
        .map(|(bytes, media)| put(bytes, media))
        .collect();
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers}).to_string();
    let mut entry = put(manifest.as_bytes(), "application/vnd.oci.image.manifest.v1+json");
    entry["platform"] = json!({"os": "linux", "architecture": "amd64"});
    let other =
        json!({"digest": digest(b"x"), "size": 1, "platform": {"os": "linux", "architecture": "s390x"}});
    let index = json!({"schemaVersion": 2, "manifests": [other, entry]}).to_string();
    fs::write(dir.join("index.json"), index).unwrap();
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    digest(manifest.as_bytes())
}

struct Bench {
    dir: tempfile::TempDir,
    store: Templates,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Templates::open(dir.path().join("store")).unwrap();
        Self { dir, store }
    }

    async fn build(&self, source: ImageSource, start: bool) -> Result<TemplateManifest> {
        let options = OciOptions {
            name: "app".into(),
            source,
            start,
            limits: Limits::default(),
            now: Timestamp(5),
        };
        let result = self.store.build_oci(options, Arc::new(Quiet)).await;
        let left = fs::read_dir(self.store.dir().join("tmp")).unwrap().count();
        assert_eq!(left, 0, "a build leaves nothing behind");
        result
    }

    #[track_caller]
    fn check_sample(&self, manifest: &TemplateManifest) {
        let tree = self.store.tree(manifest).unwrap();
        assert_eq!(tree.read(b"/etc/os", 10).unwrap().unwrap(), b"test");
        assert_eq!(tree.read(b"/app/run", 10).unwrap().unwrap(), b"#!");
        assert!(tree.lookup(b"/old", LastLink::Keep).unwrap().is_none());
        assert_eq!(manifest.env["MODE"], "prod=1");
        assert_eq!(
            (manifest.workdir.as_str(), manifest.user.as_str()),
            ("/app", "1000")
        );
        assert_eq!(manifest.exposed_ports, [8080]);
    }
}

#[tokio::test]
async fn an_oci_layout_becomes_a_template() {
    let bench = Bench::new();
    let layout = bench.dir.path().join("layout");
    let digest = write_layout(&layout, &sample());
    let manifest = bench.build(ImageSource::Layout(layout), true).await.unwrap();
    bench.check_sample(&manifest);
    assert_eq!(manifest.start.unwrap().argv, ["/app/run", "--serve"]);
    assert!(matches!(manifest.source, TemplateSource::Image { digest: d, .. } if d == digest));
}

#[tokio::test]
async fn archives_of_docker_save_become_templates() {
    let bench = Bench::new();
    let sample = sample();
    // The older form: layers and config by path, layers mostly uncompressed.
    let lower = Archive::new().file("etc/os", "test").file("old", "1").bytes();
    let upper = Archive::new().file(".wh.old", "").file("app/run", "#!").bytes();
    let index =
        json!([{"Config": "c.json", "RepoTags": ["app:1"], "Layers": ["1/layer.tar", "2/layer.tar"]}]);
    let saved = Archive::new()
        .file("c.json", &sample.config)
        .file("1/layer.tar", &lower)
        .file("layers/real.tar", gzip(&upper))
        .symlink("2/layer.tar", "../layers/real.tar")
        .file("manifest.json", index.to_string());
    let path = bench.dir.path().join("saved.tar");
    fs::write(&path, saved.bytes()).unwrap();
    let old = bench
        .build(ImageSource::Archive(path.clone()), false)
        .await
        .unwrap();
    bench.check_sample(&old);
    assert_eq!(old.start, None);

    // The newer form: a layout in an archive.
    let layout = bench.dir.path().join("layout");
    write_layout(&layout, &sample);
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_dir_all(".", &layout).unwrap();
    fs::write(&path, archive.into_inner().unwrap()).unwrap();
    let new = bench.build(ImageSource::Archive(path), false).await.unwrap();
    bench.check_sample(&new);
    assert_eq!(
        new.digest, old.digest,
        "the same files are the same image, whatever they came in"
    );
}

#[tokio::test]
async fn tampered_images_are_refused() {
    for (what, tamper) in [("layer", 0usize), ("config", 1), ("content", 2)] {
        let bench = Bench::new();
        let layout = bench.dir.path().join("layout");
        let mut sample = sample();
        if tamper == 2 {
            // Honest digests of a layer that is not the one in the config.
            sample.layers[0].0 = gzip(&Archive::new().file("evil", "x").bytes());
        }
        write_layout(&layout, &sample);
        let victim = match tamper {
            0 => &sample.layers[0].0,
            _ => &sample.config,
        };
        if tamper < 2 {
            let path = layout.join("blobs/sha256").join(&digest(victim)[7..]);
            let mut bytes = victim.clone();
            let at = bytes.len() / 2;
            bytes[at] ^= 1;
            fs::write(path, bytes).unwrap();
        }
        let error = bench.build(ImageSource::Layout(layout), false).await.unwrap_err();
        let expected = matches!(error, Error::Digest { .. } | Error::Layer { .. });
        assert!(expected, "{what}: {error}");
        assert!(bench.store.list().unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_decompression_bomb_is_stopped() {
    let bench = Bench::new();
    let bomb = vec![0; 64 << 20];
    let config = json!({"rootfs": {"diff_ids": [digest(b"whatever")]}})
        .to_string()
        .into_bytes();
    let layout = bench.dir.path().join("layout");
    let layers = vec![(gzip(&bomb), "application/vnd.oci.image.layer.v1.tar+gzip")];
    write_layout(&layout, &Sample { layers, config });
    let options = OciOptions {
        name: "bomb".into(),
        source: ImageSource::Layout(layout),
        start: false,
        limits: Limits {
            bytes: 1 << 20,
            ..Limits::default()
        },
        now: Timestamp(0),
    };
    let error = bench.store.build_oci(options, Arc::new(Quiet)).await.unwrap_err();
    assert!(matches!(error, Error::Limit { limit: 1_048_576, .. }), "{error}");
}

/// Debian's `docker-registry` on a loopback port, gone with the test.
struct Registry {
    child: Child,
    address: String,
}

impl Registry {
    fn start(dir: &Path) -> Option<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let address = format!("127.0.0.1:{port}");
        let config = dir.join("registry.yml");
        let root = dir.join("registry");
        fs::write(
            &config,
            format!(
                "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n",
                root.display()
            ),
        )
        .unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(child) = child else {
            eprintln!("SKIPPED: docker-registry is not installed (apt install docker-registry)");
            return None;
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        while std::net::TcpStream::connect(&address).is_err() {
            assert!(Instant::now() < deadline, "docker-registry did not come up");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(Self { child, address })
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _already_gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

#[tokio::test]
async fn an_image_is_pulled_from_a_real_registry() {
    use oci_client::client::{Client, ClientConfig, ClientProtocol, Config, ImageLayer};

    let bench = Bench::new();
    let Some(registry) = Registry::start(bench.dir.path()) else {
        return;
    };
    let sample = sample();
    let client = Client::new(ClientConfig {
        protocol: ClientProtocol::Http,
        ..ClientConfig::default()
    });
    let layers: Vec<ImageLayer> = sample
        .layers
        .iter()
        .map(|(bytes, media)| ImageLayer::new(bytes.clone(), (*media).to_owned(), None))
        .collect();
    let config = Config::oci_v1(sample.config.clone(), None);
    let name = format!("{}/team/app", registry.address);
    let reference = format!("{name}:1").parse().unwrap();
    let auth = oci_client::secrets::RegistryAuth::Anonymous;
    client
        .push(&reference, &layers, config, &auth, None)
        .await
        .unwrap();

    let source = |reference: String| ImageSource::Registry {
        reference,
        login: None,
    };
    let manifest = bench.build(source(format!("{name}:1")), false).await.unwrap();
    bench.check_sample(&manifest);
    let TemplateSource::Image { digest, reference } = &manifest.source else {
        panic!("{manifest:?}")
    };
    assert_eq!(*reference, format!("{name}:1"));

    // Pinned by digest it is the same image; a digest that is not there, or a wrong name, says so.
    let pinned = bench
        .build(source(format!("{name}@{digest}")), false)
        .await
        .unwrap();
    assert_eq!(pinned.digest, manifest.digest);
    let missing = format!("{name}@sha256:{}", "0".repeat(64));
    let error = bench.build(source(missing), false).await.unwrap_err();
    assert!(matches!(error, Error::Registry { .. }), "{error}");
    let error = bench
        .build(source("Not A Reference".into()), false)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::BadReference { .. }), "{error}");

    // A Dockerfile may begin with it; the second build takes its files from the cache, as the next part shows.
    let context = bench.dir.path().join("context");
    fs::create_dir(&context).unwrap();
    let from = crate::DockerfileOptions {
        name: "from".into(),
        context,
        dockerfile: format!("FROM {name}:1\nRUN true\nENV X=1\n"),
        args: BTreeMap::new(),
        target: None,
        start: true,
        no_cache: true,
        network: None,
        login: None,
        now: Timestamp(6),
    };
    let built = bench
        .store
        .build_dockerfile(from.clone(), &Nothing, Arc::new(Quiet))
        .await
        .unwrap();
    assert_eq!(built.start.unwrap().argv, ["/app/run", "--serve"]);
    assert_eq!((built.user.as_str(), built.env["X"].as_str()), ("1000", "1"));

    // A registry whose disk was tampered with.
    let stored = bench.dir.path().join("registry/docker/registry/v2/blobs/sha256");
    let hex = &digest_of(&sample.layers[1].0)[..];
    let blob = stored.join(&hex[..2]).join(hex).join("data");
    let mut bytes = fs::read(&blob).unwrap();
    bytes[20] ^= 1;
    fs::write(&blob, bytes).unwrap();
    let error = bench.build(source(format!("{name}:1")), false).await.unwrap_err();
    assert!(
        matches!(error, Error::Digest { .. } | Error::Registry { .. }),
        "{error}"
    );
}

/// Runs nothing and changes nothing.
struct Nothing;

#[async_trait::async_trait]
impl crate::StepRunner for Nothing {
    async fn start(&self, _: &str) -> Result<Box<dyn crate::BuildSandbox>, String> {
        Ok(Box::new(Self))
    }
}

#[async_trait::async_trait]
impl crate::BuildSandbox for Nothing {
    async fn run(&mut self, _: crate::RunCommand, _: &crate::Output<'_>) -> Result<i32, String> {
        Ok(0)
    }

    async fn export(&mut self, archive: &Path) -> Result<crate::Whiteouts, String> {
        fs::write(archive, Archive::new().bytes()).unwrap();
        Ok(crate::Whiteouts::Oci)
    }

    async fn destroy(self: Box<Self>) {}
}

fn digest_of(bytes: &[u8]) -> String {
    digest(bytes)[7..].to_owned()
}

#[test]
fn reading_a_config_forgives_nulls() {
    let config: ImageConfig = serde_json::from_value(json!({
        "config": {"Env": null, "User": "", "WorkingDir": null, "Cmd": null},
        "rootfs": {"diff_ids": []},
    }))
    .unwrap();
    assert_eq!(
        (config.user(), config.workdir()),
        ("root".to_owned(), "/".to_owned())
    );
    assert_eq!(config.command(), None);
}
