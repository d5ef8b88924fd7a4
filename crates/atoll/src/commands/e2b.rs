//! `atoll e2b env`: how E2B's SDKs find the server.
//!
//! ```text
//!   TLS, names resolve         E2B_DOMAIN, certificate      every version of the SDKs
//!   TLS, they do not           the same, and E2B_*_URL      those that know these; a note says what is missing
//!   no TLS                     E2B_DOMAIN and E2B_*_URL     likewise
//! ```
//!
//! What must hold: whoever takes it in reaches this server and not E2B's cloud, whatever was set before; and other programs of the
//! same shell go on trusting what they trusted: `SSL_CERT_FILE` replaces what a program trusts, so the file that it names here
//! holds the machine's authorities, too.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use atoll_client::local::{self, ServerFile, TlsFile};
use atoll_client::output::{Doing as _, Error, Output, Result};
use reqwest::Url;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::args::{E2bCommand, E2bEnvArgs, EnvShell, Global};
use crate::data::write_whole;

/// Where systems keep the certificates of those that everybody trusts.
const SYSTEM: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// What leads elsewhere if it is left over from before.
const ADDRESSES: [&str; 4] = [
    "E2B_API_URL",
    "E2B_SANDBOX_URL",
    "E2B_VOLUME_API_URL",
    "E2B_DEBUG",
];

pub(crate) async fn run(global: &Global, output: Output, command: E2bCommand) -> Result<()> {
    let E2bCommand::Env(args) = command;
    env(global, output, &args).await
}

async fn env(global: &Global, output: Output, args: &E2bEnvArgs) -> Result<()> {
    let client = global.client()?;
    let key = client.key().ok_or_else(|| {
        Error::new("there is no key to give to E2B's SDKs")
            .hint("name one with --key or ATOLL_API_KEY; `atoll key create` makes one")
    })?;
    let url = client.base();
    let here = local::running_server(&global.data_dir()).filter(|server| is_at(server, url));
    let tls = here.and_then(|server| server.tls);
    let resolves = match &tls {
        Some(tls) => resolves(&format!("api.{}", tls.domain)).await,
        None => false,
    };
    let mut told = variables(url, key, tls.as_ref(), resolves);
    if let Some(authority) = tls.as_ref().and_then(|tls| tls.authority.as_deref()) {
        let bundle = bundle(authority, &mut told.notes)?;
        told.set.push(("SSL_CERT_FILE", shown(&bundle)?));
        told.set.push(("NODE_EXTRA_CA_CERTS", shown(authority)?));
    }
    told.unset.retain(|name| std::env::var_os(name).is_some());
    for (name, value) in &told.set {
        output.line(set(args.shell, name, value));
    }
    for name in &told.unset {
        output.line(unset(args.shell, name));
    }
    let gone = told.unset.iter().map(|name| ((*name).to_owned(), Value::Null));
    let there = told
        .set
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.as_str().into()));
    output.json(&there.chain(gone).collect());
    for note in &told.notes {
        output.note(note);
    }
    Ok(())
}

/// What a shell is told.
#[derive(Debug, Default)]
struct Told {
    set: Vec<(&'static str, String)>,
    unset: Vec<&'static str>,
    notes: Vec<String>,
}

fn variables(url: &Url, key: &str, tls: Option<&TlsFile>, resolves: bool) -> Told {
    let mut told = Told::default();
    told.set.push(("E2B_API_KEY", for_every_sdk(key)));
    let origin = url.as_str().trim_end_matches('/').to_owned();
    let (domain, by_domain_alone) = match tls {
        Some(tls) => (with_port(&tls.domain, tls.port), resolves),
        // Somebody else's machine, or one in front of ours.
        None => (domain_of(url), url.scheme() == "https"),
    };
    told.set.push(("E2B_DOMAIN", domain));
    let (addresses, debug) = ADDRESSES.split_at(3);
    if by_domain_alone {
        told.unset.extend(addresses);
    } else {
        told.set
            .extend(addresses.iter().map(|name| (*name, origin.clone())));
    }
    told.unset.extend(debug);
    match tls {
        Some(tls) if !resolves => told.notes.push(format!(
            "note: names below {} do not resolve on this machine, so E2B_API_URL and E2B_SANDBOX_URL are set, which \
             SDKs know from 2.7 on (JavaScript 2.8). For older ones, and for links to ports: {}",
            tls.domain,
            match tls.domain.ends_with("localhost") {
                true => "apt-get install libnss-myhostname",
                false => "a DNS record for all names below it",
            }
        )),
        None if url.scheme() == "http" => told.notes.push(
            "note: this server speaks no TLS, so E2B_API_URL and E2B_SANDBOX_URL are set, which SDKs know from 2.7 on \
             (JavaScript 2.8). `atoll server --e2b` serves older ones, too"
                .to_owned(),
        ),
        _ => {}
    }
    told
}

/// Keys of earlier versions, in the form that some SDKs insist on.
fn for_every_sdk(key: &str) -> String {
    match key.starts_with("e2b_") {
        true => key.to_owned(),
        false => format!("e2b_{}", hex::encode(key)),
    }
}

fn with_port(domain: &str, port: u16) -> String {
    match port {
        443 => domain.to_owned(),
        port => format!("{domain}:{port}"),
    }
}

/// What stands for the domain of a server of which nothing but its address is known.
fn domain_of(url: &Url) -> String {
    let host = url.host_str().unwrap_or("localhost");
    let is_here = host
        .trim_matches(['[', ']'])
        .parse::<IpAddr>()
        .is_ok_and(|ip| ip.is_loopback());
    let name = if is_here {
        "localhost"
    } else {
        host.strip_prefix("api.").unwrap_or(host)
    };
    with_port(name, url.port_or_known_default().unwrap_or(443))
}

/// Whether a server of this machine is the one that is meant.
fn is_at(server: &ServerFile, url: &Url) -> bool {
    Url::parse(&server.url).is_ok_and(|own| own == *url)
}

async fn resolves(name: &str) -> bool {
    tokio::net::lookup_host((name, 0))
        .await
        .is_ok_and(|mut found| found.next().is_some())
}

/// A file with the authorities of this machine and ours, named after what is in it.
fn bundle(authority: &Path, notes: &mut Vec<String>) -> Result<PathBuf> {
    let own = fs::read_to_string(authority).doing(format_args!(
        "cannot read the certificate of the server's authority, {}",
        authority.display()
    ))?;
    let dir = cache();
    let given = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    // One of these, from the last time.
    let given = given.filter(|path| !path.starts_with(&dir));
    let mut trusted = given.into_iter().chain(SYSTEM.map(PathBuf::from));
    let trusted = trusted.find_map(|path| fs::read_to_string(path).ok());
    if trusted.is_none() {
        notes.push("note: this machine has no certificates of public authorities; programs that use SSL_CERT_FILE will trust this server alone".into());
    }
    let text = format!("{}\n{own}", trusted.unwrap_or_default().trim_end());
    let name = hex::encode(&Sha256::digest(&text)[..8]);
    let path = dir.join(format!("{name}.pem"));
    fs::create_dir_all(&dir).doing(format_args!("cannot create {}", dir.display()))?;
    write_whole(&path, text.as_bytes(), 0o644)?;
    Ok(path)
}

/// Where they are kept, for this user.
fn cache() -> PathBuf {
    let given = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let given = given.filter(|path| path.is_absolute());
    let own = given.or_else(|| std::env::home_dir().map(|home| home.join(".cache")));
    own.unwrap_or_else(std::env::temp_dir).join("atoll/trusted")
}

fn shown(path: &Path) -> Result<String> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| Error::new(format!("the path {} is not UTF-8", path.display())))
}

fn set(shell: EnvShell, name: &str, value: &str) -> String {
    match shell {
        EnvShell::Sh => format!("export {name}={}", quoted(value, "'\\''")),
        EnvShell::Fish => format!("set -gx {name} {};", quoted(&value.replace('\\', "\\\\"), "\\'")),
    }
}

fn unset(shell: EnvShell, name: &str) -> String {
    match shell {
        EnvShell::Sh => format!("unset {name}"),
        EnvShell::Fish => format!("set -e {name};"),
    }
}

/// As one word, whatever is in it.
fn quoted(value: &str, quote: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./:,@%+".contains(&byte);
    match value.bytes().all(plain) && !value.is_empty() {
        true => value.to_owned(),
        false => format!("'{}'", value.replace('\'', quote)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tls(domain: &str, port: u16) -> TlsFile {
        TlsFile {
            domain: domain.into(),
            port,
            authority: None,
        }
    }

    fn told(url: &str, tls: Option<&TlsFile>, resolves: bool) -> (Vec<String>, Vec<&'static str>, usize) {
        let told = variables(&Url::parse(url).unwrap(), "e2b_00", tls, resolves);
        let set = told.set.iter().map(|(name, value)| format!("{name}={value}"));
        (set.collect(), told.unset, told.notes.len())
    }

    #[test]
    fn the_domain_alone_is_enough_where_it_leads_here() {
        let local = tls("e2b.localhost", 7070);
        let (set, unset, notes) = told("http://127.0.0.1:7070/", Some(&local), true);
        assert_eq!(set, ["E2B_API_KEY=e2b_00", "E2B_DOMAIN=e2b.localhost:7070"]);
        assert_eq!(
            (unset.as_slice(), notes),
            (&ADDRESSES[..], 0),
            "what was set before leads elsewhere"
        );
        let (set, ..) = told(
            "http://127.0.0.1:7070/",
            Some(&tls("boxes.example.org", 443)),
            true,
        );
        assert_eq!(set[1], "E2B_DOMAIN=boxes.example.org");
        let (set, _, notes) = told("https://api.boxes.example.org/", None, false);
        assert_eq!(
            (set[1].as_str(), set.len(), notes),
            ("E2B_DOMAIN=boxes.example.org", 2, 0)
        );
    }

    #[test]
    fn addresses_help_where_names_do_not_resolve_or_tls_is_not_spoken() {
        let expected = |domain: &str, url: &str| {
            let mut set = vec!["E2B_API_KEY=e2b_00".to_owned(), format!("E2B_DOMAIN={domain}")];
            set.extend(ADDRESSES[..3].iter().map(|name| format!("{name}={url}")));
            (set, vec!["E2B_DEBUG"], 1)
        };
        let local = tls("e2b.localhost", 7070);
        let url = "http://127.0.0.1:7070";
        assert_eq!(
            told(url, Some(&local), false),
            expected("e2b.localhost:7070", url)
        );
        for url in ["http://127.0.0.1:7070", "http://[::1]:7070"] {
            assert_eq!(told(url, None, false), expected("localhost:7070", url));
        }
        let url = "http://10.0.0.5:7070";
        assert_eq!(told(url, None, false), expected("10.0.0.5:7070", url));
    }

    #[test]
    fn every_sdk_takes_the_key() {
        assert_eq!(for_every_sdk("e2b_12"), "e2b_12");
        assert_eq!(for_every_sdk("atl_abc"), "e2b_61746c5f616263");
    }

    #[test]
    fn a_value_is_one_word_for_its_shell() {
        assert_eq!(set(EnvShell::Sh, "A", "/x/y-1.pem"), "export A=/x/y-1.pem");
        assert_eq!(set(EnvShell::Sh, "A", "a b'c$d"), r"export A='a b'\''c$d'");
        assert_eq!(set(EnvShell::Fish, "A", r"a'b\c"), r"set -gx A 'a\'b\\c';");
        assert_eq!(unset(EnvShell::Fish, "A"), "set -e A;");
    }
}
