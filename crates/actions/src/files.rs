//! Files of a sandbox, whole: their content travels in the JSON itself.

use atoll_guest_protocol::WriteMode;
use atoll_memory::Permit;
use atoll_sandboxes::{ByteStream, FilePath, WriteSpec};
use atoll_types::Fault;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::catalogue::Part;
use crate::outcome::{Failure, MOST};
use crate::spelling;

/// A file to read.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadFile {
    /// Absolute, or relative to the home of the user.
    path: Option<String>,
    /// Who reads, with the permissions that they have in the sandbox. Absent: the sandbox's owner, who may all.
    user: Option<String>,
}

/// A file to write: give either `content` or `content_base64`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteFile {
    /// Absolute, or relative to the home of the user.
    path: Option<String>,
    /// Who writes, with the permissions that they have in the sandbox, and owns what is created. Absent: the sandbox's
    /// owner, who may all, for the template's user.
    user: Option<String>,
    /// Octal permission bits.
    #[schema(pattern = "^(0o)?[0-7]{1,5}$", examples("0644"))]
    mode: Option<String>,
    content: Option<String>,
    /// Instead of `content`, where it is not UTF-8.
    content_base64: Option<String>,
}

impl Part for ReadFile {
    fn refused(fault: Fault) -> Failure {
        Failure::invalid(fault.message)
    }
}

impl Part for WriteFile {
    fn refused(fault: Fault) -> Failure {
        Failure::invalid(fault.message)
    }
}

impl ReadFile {
    pub(crate) fn into_path(self) -> Result<FilePath, Failure> {
        Ok(FilePath {
            path: spelling::exactly_one("path", self.path, None)?,
            user: self.user,
        })
    }
}

impl WriteFile {
    pub(crate) fn into_write(self) -> Result<(WriteSpec, Bytes), Failure> {
        let content = match (self.content, self.content_base64) {
            (Some(text), None) => text.into_bytes(),
            (None, Some(encoded)) => STANDARD
                .decode(encoded)
                .map_err(|error| Failure::invalid(format!("`content_base64` is not base64: {error}")))?,
            _ => return Err(Failure::invalid("give either `content` or `content_base64`")),
        };
        let spec = WriteSpec {
            at: FilePath {
                path: spelling::exactly_one("path", self.path, None)?,
                user: self.user,
            },
            mode: self.mode.as_deref().map(spelling::mode).transpose()?,
            write: WriteMode::Replace,
            parents: true,
        };
        Ok((spec, content.into()))
    }
}

/// All of a file, if that is not too much.
pub(crate) async fn content(mut body: ByteStream, mut permit: Permit) -> Result<Value, Failure> {
    let mut bytes = Vec::new();
    while let Some(chunk) = body.next().await {
        let chunk = chunk?;
        if bytes.len() + chunk.len() > MOST {
            return Err(Failure::too_large());
        }
        permit.grow(chunk.len() as u64)?;
        bytes.extend_from_slice(&chunk);
    }
    Ok(match String::from_utf8(bytes) {
        Ok(text) => json!({"content": text}),
        Err(error) => json!({"content_base64": STANDARD.encode(error.as_bytes())}),
    })
}

#[cfg(test)]
mod tests {
    use atoll_memory::{Limits, Memory};
    use atoll_types::{Code, ProjectId};
    use futures_util::stream;

    use super::*;

    fn write(input: Value) -> Result<(WriteSpec, Bytes), Failure> {
        spelling::parse_value::<WriteFile>(input).unwrap().into_write()
    }

    #[test]
    fn content_comes_as_text_or_exactly() {
        let (spec, content) = write(json!({"path": "a b", "content": "c", "mode": "0600"})).unwrap();
        assert_eq!((&*spec.at.path, spec.mode), (&b"a b"[..], Some(0o600)));
        assert_eq!(content, "c");
        assert!(spec.parents && spec.write == WriteMode::Replace);
        let (_, content) = write(json!({"path": "/a", "content_base64": "/w=="})).unwrap();
        assert_eq!(content, &[0xff_u8][..]);
        for (input, kind) in [
            (json!({"path": "/a"}), "InvalidInput"),
            (
                json!({"path": "/a", "content": "a", "content_base64": "YQ=="}),
                "InvalidInput",
            ),
            (json!({"path": "/a", "content_base64": "%"}), "InvalidInput"),
            (json!({"content": "a"}), Code::MissingField.text()),
            (
                json!({"path": "/a", "content": "a", "mode": "rwx"}),
                Code::InvalidMode.text(),
            ),
        ] {
            assert_eq!(write(input.clone()).unwrap_err().kind, kind, "{input}");
        }
    }

    #[tokio::test]
    async fn a_file_is_read_whole_or_not_at_all() {
        let memory = Memory::new(Limits::within(4 * MOST as u64));
        let account = memory.account(&ProjectId::from_entropy([1; 20]), None);
        let read = |chunks: Vec<Vec<u8>>| {
            let chunks = chunks.into_iter().map(|chunk| Ok(Bytes::from(chunk)));
            content(Box::pin(stream::iter(chunks)), account.open())
        };
        assert_eq!(read(vec![]).await, Ok(json!({"content": ""})));
        // A character in two chunks is one.
        let euro = "€".as_bytes();
        let chunks = vec![euro[..1].to_vec(), euro[1..].to_vec()];
        assert_eq!(read(chunks).await, Ok(json!({"content": "€"})));
        assert_eq!(
            read(vec![vec![0xff]]).await,
            Ok(json!({"content_base64": "/w=="}))
        );
        assert!(read(vec![vec![b'x'; MOST]]).await.is_ok());
        let failure = read(vec![vec![b'x'; MOST], vec![b'x']]).await.unwrap_err();
        assert_eq!(failure.kind, "TooLarge");
        assert_eq!(memory.held(), 0);
        // Who has no room is told so.
        let mut other = account.open();
        other.set(2 * MOST as u64).unwrap();
        let failure = read(vec![vec![b'x']]).await.unwrap_err();
        assert_eq!(
            (&*failure.kind, failure.again),
            (Code::TooMuchBuffered.text(), true)
        );
    }
}
