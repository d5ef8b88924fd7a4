//! The clients that people use. Those that are not installed are left out.

use std::path::PathBuf;
use std::process::Stdio;

use atoll_broker::TrustId;
use atoll_types::Injection;
use hyper::body::Incoming;
use hyper::{Request, Response};
use tempfile::TempDir;
use tokio::process::Command;

use super::world::{HOST, Setup, World, echo, full, http, name};

struct Tools {
    world: World,
    port: u16,
    dir: TempDir,
}

impl Tools {
    async fn new(setup: Setup) -> Self {
        let mut world = setup.start();
        let port = world.listen().await.port();
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("ca.pem"), world.authority_pem()).unwrap();
        Self { world, port, dir }
    }

    fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Its output, where the program is there.
    async fn run(&self, program: &str, args: &[&str]) -> Option<String> {
        let output = Command::new(program)
            .args(args)
            .env("CA", self.ca())
            .env("PORT", self.port.to_string())
            .env("HOST_NAME", HOST)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await;
        match output {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("{program} is not installed; left out");
                None
            }
            Err(error) => panic!("{program}: {error}"),
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{program} {args:?}: {text} {errors}");
                Some(text)
            }
        }
    }

    async fn curl(&self, args: &[&str]) -> Option<String> {
        let ca = self.ca();
        let to = format!("{HOST}:443:127.0.0.1:{}", self.port);
        let mut all = vec![
            "-sS",
            "--noproxy",
            "*",
            "--cacert",
            ca.to_str().unwrap(),
            "--connect-to",
            &to,
        ];
        all.extend(args);
        self.run("curl", &all).await
    }
}

const VALUE: &str = "sk-0123456789abcdefghijklmnop";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_speaks_both_versions() {
    let tools = Tools::new(Setup::new(echo()).secret("token", VALUE, Injection::Bearer)).await;
    for (version, shown) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let args = [version, "-w", "%{http_version}", "https://api.test/path?q=1"];
        let Some(out) = tools.curl(&args).await else {
            return;
        };
        assert!(
            out.contains("/path?q=1\n") && out.contains(&format!("Bearer {VALUE}\n")),
            "{out}"
        );
        assert!(out.ends_with(shown), "{out}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_uploads_a_large_file() {
    let behaviour = http(|request: Request<Incoming>| async move {
        let mut body = request.into_body();
        let mut size = 0;
        while let Some(frame) = http_body_util::BodyExt::frame(&mut body).await {
            size += frame.unwrap().data_ref().map_or(0, bytes::Bytes::len);
        }
        Response::new(full(size.to_string()))
    });
    let tools = Tools::new(Setup::new(behaviour)).await;
    let file = tools.dir.path().join("large");
    std::fs::File::create(&file).unwrap().set_len(48 << 20).unwrap();
    let file = file.to_str().unwrap();
    // With a length curl asks leave to send it; without, it sends chunks.
    for more in [
        &["--http1.1"][..],
        &["--http1.1", "-H", "Transfer-Encoding: chunked"],
        &["--http2"],
    ] {
        let args = [more, &["-T", file, "https://api.test/upload"]].concat();
        let Some(out) = tools.curl(&args).await else {
            return;
        };
        assert_eq!(out, (48 << 20).to_string(), "{more:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_shows_why_it_was_refused() {
    let mut setup = Setup::new(echo());
    setup.rules[0].methods = vec!["GET".to_owned()];
    let tools = Tools::new(setup).await;
    for version in ["--http1.1", "--http2"] {
        let args = [
            version,
            "-w",
            "%{http_code}",
            "-d",
            "some data",
            "https://api.test/",
        ];
        let Some(out) = tools.curl(&args).await else {
            return;
        };
        assert!(out.contains("\"egress_denied\"") && out.ends_with("403"), "{out}");
    }
    assert_eq!(tools.world.denials().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn python_verifies_strictly() {
    let tools = Tools::new(Setup::new(echo()).secret("token", VALUE, Injection::Bearer)).await;
    let script = r"
import http.client, os, socket, ssl
context = ssl.create_default_context(cafile=os.environ['CA'])
context.verify_flags |= ssl.VERIFY_X509_STRICT
name = os.environ['HOST_NAME']
connection = http.client.HTTPSConnection(name, 443, context=context)
plain = socket.create_connection(('127.0.0.1', int(os.environ['PORT'])))
connection.sock = context.wrap_socket(plain, server_hostname=name)
for number in range(3):
    connection.request('POST', '/n%d' % number, body=b'x' * 100000)
    answer = connection.getresponse()
    print(answer.status, answer.read().decode())
";
    let Some(out) = tools.run("python3", &["-c", script]).await else {
        return;
    };
    assert_eq!(out.matches("200 POST /n").count(), 3, "{out}");
    assert_eq!(out.matches(VALUE).count(), 3, "{out}");
    assert_eq!(tools.world.dialled(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_verifies() {
    let tools = Tools::new(Setup::new(echo()).secret("token", VALUE, Injection::Bearer)).await;
    let script = r"
const https = require('https'), fs = require('fs'), { CA, PORT, HOST_NAME } = process.env;
https.get({ host: '127.0.0.1', port: PORT, servername: HOST_NAME, ca: fs.readFileSync(CA), path: '/node',
            headers: { host: HOST_NAME } },
  answer => { let text = ''; answer.on('data', data => text += data); answer.on('end', () => console.log(text)); });
";
    let Some(out) = tools.run("node", &["-e", script]).await else {
        return;
    };
    assert!(out.starts_with("GET /node\n") && out.contains(VALUE), "{out}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openssl_verifies_strictly() {
    let tools = Tools::new(Setup::new(echo())).await;
    let leaves = &tools.world.interceptor.shared.leaves;
    let trust = TrustId::new("origin");
    let leaf = leaves.get(&trust, &name(HOST)).unwrap();
    let path = tools.dir.path().join("leaf.pem");
    std::fs::write(&path, crate::intercept::authority::pem(&leaf.cert[0])).unwrap();
    let (ca, leaf) = (tools.ca(), path.to_str().unwrap().to_owned());
    let args = [
        "verify",
        "-x509_strict",
        "-purpose",
        "sslserver",
        "-verify_hostname",
        HOST,
        "-CAfile",
        ca.to_str().unwrap(),
        &leaf,
    ];
    if tools.run("openssl", &args).await.is_none() {
        return;
    }
    let args = [
        "x509",
        "-in",
        &leaf,
        "-noout",
        "-ext",
        "subjectAltName,basicConstraints,keyUsage,extendedKeyUsage",
    ];
    let shown = tools.run("openssl", &args).await.unwrap();
    assert_eq!(shown.matches("DNS:").count(), 1, "{shown}");
    assert!(
        shown.contains("DNS:api.test") && shown.contains("CA:FALSE"),
        "{shown}"
    );
}
