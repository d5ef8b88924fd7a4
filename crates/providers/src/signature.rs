//! Signatures of requests as Amazon wants them: Signature Version 4.
//!
//! The key is never sent: what is sent is a keyed hash over the request and its time, which holds for some minutes, for one
//! service in one region.

use atoll_types::Timestamp;
use aws_lc_rs::{digest, hmac};

/// A key as the operator gives it: `ACCESS_KEY_ID:SECRET_ACCESS_KEY`, with `:SESSION_TOKEN` where it is a borrowed one.
pub(crate) struct Credentials<'a> {
    pub(crate) id: &'a str,
    secret: &'a str,
    pub(crate) token: Option<&'a str>,
}

impl<'a> Credentials<'a> {
    /// `None`: it is something else, such as a Bedrock API key, which is sent as it is.
    pub(crate) fn read(key: &'a [u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(key).ok()?.trim().splitn(3, ':');
        let (id, secret, token) = (parts.next()?, parts.next()?, parts.next());
        let is_id = id.len() >= 16 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        (is_id && !secret.is_empty()).then_some(Self { id, secret, token })
    }
}

/// What is signed.
pub(crate) struct Signed<'a> {
    pub(crate) method: &'a str,
    /// As it is sent.
    pub(crate) path: &'a str,
    /// In small letters, sorted.
    pub(crate) headers: &'a [(&'a str, &'a str)],
    pub(crate) body: &'a [u8],
    pub(crate) region: &'a str,
    pub(crate) service: &'a str,
}

/// `20300131T120000Z`.
pub(crate) fn stamp(now: Timestamp) -> Option<String> {
    let now = jiff::Timestamp::from_millisecond(now.0).ok()?;
    Some(now.strftime("%Y%m%dT%H%M%SZ").to_string())
}

/// The value of the `Authorization` header.
pub(crate) fn authorization(credentials: &Credentials<'_>, request: &Signed<'_>, stamp: &str) -> String {
    let day = stamp.get(..8).unwrap_or_default();
    let scope = format!("{day}/{}/{}/aws4_request", request.region, request.service);
    let names: Vec<&str> = request.headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let mut canonical = format!("{}\n{}\n\n", request.method, twice_encoded(request.path));
    for (name, value) in request.headers {
        canonical.push_str(&format!("{name}:{}\n", value.trim()));
    }
    canonical.push_str(&format!("\n{names}\n{}", hash(request.body)));
    let text = format!(
        "AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{}",
        hash(canonical.as_bytes())
    );
    let mut key = keyed(format!("AWS4{}", credentials.secret).as_bytes(), day.as_bytes());
    for part in [request.region, request.service, "aws4_request"] {
        key = keyed(key.as_ref(), part.as_bytes());
    }
    let signature = hex(keyed(key.as_ref(), text.as_bytes()).as_ref());
    format!(
        "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
        credentials.id
    )
}

/// A path that is encoded already is encoded once more to be signed.
fn twice_encoded(path: &str) -> String {
    path.replace('%', "%25")
}

fn keyed(key: &[u8], data: &[u8]) -> hmac::Tag {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), data)
}

fn hash(data: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, data).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The region in an address such as `bedrock-runtime.eu-central-1.amazonaws.com`; elsewhere the one that Amazon itself falls
/// back to.
pub(crate) fn region(host: &str) -> &str {
    let mut labels = host.split('.');
    labels
        .find(|label| label.starts_with("bedrock-runtime"))
        .and_then(|_| labels.next())
        .unwrap_or("us-east-1")
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Timestamp = Timestamp(1_440_938_160_000);

    /// The vectors that Amazon publishes for those who write signatures.
    #[test]
    fn signatures_are_those_that_amazon_publishes() {
        let key = b"AKIDEXAMPLE00000:wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
        let mut credentials = Credentials::read(key).unwrap();
        credentials.id = "AKIDEXAMPLE";
        let stamp = stamp(AT).unwrap();
        assert_eq!(stamp, "20150830T123600Z");
        for (method, signature) in [
            (
                "GET",
                "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
            ),
            (
                "POST",
                "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
            ),
        ] {
            let request = Signed {
                method,
                path: "/",
                headers: &[("host", "example.amazonaws.com"), ("x-amz-date", &stamp)],
                body: b"",
                region: "us-east-1",
                service: "service",
            };
            assert_eq!(
                authorization(&credentials, &request, &stamp),
                format!(
                    "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
                     SignedHeaders=host;x-amz-date, Signature={signature}"
                )
            );
        }
    }

    #[test]
    fn keys_are_told_apart() {
        let read =
            |text: &'static str| Credentials::read(text.as_bytes()).map(|it| (it.id, it.secret, it.token));
        assert_eq!(
            read("ASIAIOSFODNN7EXAMPLE:a/b+c:token=="),
            Some(("ASIAIOSFODNN7EXAMPLE", "a/b+c", Some("token==")))
        );
        assert_eq!(read("bedrock-api-key-YmVkcm9jaw=="), None);
        assert_eq!(read("ABSKQmVkcm9ja0FQSUtleS0xMjM0"), None);
    }

    #[test]
    fn the_region_is_in_the_address() {
        assert_eq!(
            region("bedrock-runtime.eu-central-1.amazonaws.com"),
            "eu-central-1"
        );
        assert_eq!(
            region("vpce-1.bedrock-runtime.us-west-2.vpce.amazonaws.com"),
            "us-west-2"
        );
        assert_eq!(region("127.0.0.1"), "us-east-1");
    }
}
