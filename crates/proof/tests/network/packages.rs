//! What people need a network for: packages and sources, under an allow-list.

use atoll_proof::{Server, World};

use crate::{allow, assert_refused, get, sandbox};

in_a_world!(
    nothing_leaves_unless_allowed,
    package_managers_work_under_an_allow_list,
);

async fn nothing_leaves_unless_allowed(server: &mut Server, world: &World) {
    let sandbox = server.sandbox().await;
    for url in [
        "https://api.example.org/",
        "http://api.example.org/",
        "http://203.0.113.10/",
        "https://203.0.113.10/",
        "http://[2001:db8::10]/",
        "http://169.254.169.254/latest/meta-data/",
    ] {
        assert_refused(&sandbox, &format!("-k {url}")).await;
    }
    assert_ne!(sandbox.sh("getent hosts api.example.org").await.code, Some(0));
    assert_eq!(world.seen(), Vec::<atoll_proof::Value>::new());
}

async fn package_managers_work_under_an_allow_list(server: &mut Server, world: &World) {
    let hosts = ["index.example.org", "registry.example.org", "git.example.org"];
    let sandbox = sandbox(server, world, allow(&hosts)).await;
    let pip = "pip install -q --disable-pip-version-check --index-url https://index.example.org/simple \
               --cert ~/world.pem --target ~/py tinything && PYTHONPATH=~/py python3 -c 'import tinything; print(tinything.ANSWER)'";
    assert_eq!(sandbox.sh(pip).await.ok().trim(), "42");
    let npm = "mkdir -p ~/js && cd ~/js && npm init -y >/dev/null && NODE_EXTRA_CA_CERTS=~/world.pem \
               npm install --silent --no-audit --no-fund --registry https://registry.example.org tiny-thing \
               && node -e 'console.log(require(\"tiny-thing\"))'";
    assert_eq!(sandbox.sh(npm).await.ok().trim(), "42");
    let git = "GIT_SSL_CAINFO=~/world.pem git clone -q https://git.example.org/thing.git ~/thing && cat ~/thing/README";
    assert_eq!(sandbox.sh(git).await.ok(), "forty-two\n");

    // The names on the same address that nobody allowed, and everything else.
    for url in [
        "https://api.example.org/",
        "https://other.example.org/",
        "http://203.0.113.10/",
        "https://nowhere.example.org/",
    ] {
        assert_refused(&sandbox, url).await;
    }
    assert!(
        world
            .saw("http")
            .iter()
            .all(|seen| hosts.iter().any(|host| seen["host"] == *host))
    );
    assert!(
        world.asked().iter().all(|name| hosts.contains(&name.as_str())),
        "{:?}",
        world.asked()
    );
    // Spliced, not read: the certificate that the guest saw was the server's own, which it was told to trust.
    let (status, _) = get(&sandbox, "https://index.example.org/simple/tinything/").await;
    assert_eq!(status, 200);
}
