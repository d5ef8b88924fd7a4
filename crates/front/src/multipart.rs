//! The parts of a `multipart/form-data` body, in bounded memory.
//!
//! The parser takes all that its stream has ready, and waits in memory for the end of a part's headers. A body that was
//! compressed is always ready and may be endless, so what the parser is given is rationed: one piece each time that it
//! asks, and no more than [`MOST_HELD`] before a part's name or content has come out at the other end.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use atoll_types::{Code, Fault};
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _};

const PIECE: usize = 64 << 10;
const MOST_HELD: usize = 256 << 10;
/// Parts of one request.
const MOST_PARTS: usize = 10_000;

/// The parts, one after the other.
pub struct Parts {
    inner: multer::Multipart<'static>,
    held: Arc<AtomicUsize>,
    count: usize,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

/// A part whose content has not been read.
pub struct Part {
    pub name: Option<String>,
    pub file_name: Option<String>,
    pub content: BoxStream<'static, Result<Bytes, multer::Error>>,
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, file_name, .. } = self;
        write!(f, "Part({name:?}, {file_name:?})")
    }
}

impl Parts {
    pub fn new(
        body: impl Stream<Item = io::Result<Bytes>> + Send + Unpin + 'static,
        media: &str,
    ) -> Result<Self, Fault> {
        let boundary = multer::parse_boundary(media)
            .map_err(|error| broken(format!("the multipart body has no boundary: {error}")))?;
        let held = Arc::new(AtomicUsize::new(0));
        let rationed = Rationed {
            body,
            piece: Bytes::new(),
            given: false,
            held: Arc::clone(&held),
        };
        Ok(Self {
            inner: multer::Multipart::new(rationed, boundary),
            held,
            count: 0,
        })
    }

    /// The next part. The one before must have been read to its end or dropped.
    pub async fn next(&mut self) -> Result<Option<Part>, Fault> {
        let part = self.inner.next_field().await;
        let part = part.map_err(|error| broken(format!("the multipart body is broken: {error}")))?;
        let Some(part) = part else { return Ok(None) };
        self.count += 1;
        if self.count > MOST_PARTS {
            return Err(broken(format!("a body may hold at most {MOST_PARTS} parts")));
        }
        self.held.store(0, Ordering::Relaxed);
        let held = Arc::clone(&self.held);
        Ok(Some(Part {
            name: part.name().map(str::to_owned),
            file_name: part.file_name().map(str::to_owned),
            content: part
                .inspect(move |piece| {
                    if piece.as_ref().is_ok_and(|piece| !piece.is_empty()) {
                        held.store(0, Ordering::Relaxed);
                    }
                })
                .boxed(),
        }))
    }
}

fn broken(why: String) -> Fault {
    Fault::new(Code::InvalidBody, why)
}

struct Rationed<S> {
    body: S,
    piece: Bytes,
    /// Whether it had its ration since it last was told to wait.
    given: bool,
    /// What was given since something came out.
    held: Arc<AtomicUsize>,
}

impl<S: Stream<Item = io::Result<Bytes>> + Unpin> Stream for Rationed<S> {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if std::mem::take(&mut self.given) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        while self.piece.is_empty() {
            match self.body.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(piece))) => self.piece = piece,
                other => return other,
            }
        }
        let length = self.piece.len().min(PIECE);
        if self.held.fetch_add(length, Ordering::Relaxed) + length > MOST_HELD {
            let why = format!("a part's head is longer than {MOST_HELD} bytes");
            return Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::InvalidData, why))));
        }
        self.given = true;
        Poll::Ready(Some(Ok(self.piece.split_to(length))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;

    const MEDIA: &str = "multipart/form-data; boundary=xyz";

    fn head(name: &str) -> String {
        format!("--xyz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n")
    }

    /// An endless body, and how much of it was taken.
    fn endless(start: &str) -> (BoxStream<'static, io::Result<Bytes>>, Arc<AtomicUsize>) {
        let taken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&taken);
        let rest = stream::repeat(Bytes::from(vec![b'a'; 1 << 20]));
        let body = stream::iter([Bytes::from(start.to_owned())])
            .chain(rest)
            .map(move |piece| {
                count.fetch_add(piece.len(), Ordering::Relaxed);
                Ok(piece)
            });
        (body.boxed(), taken)
    }

    #[tokio::test]
    async fn files_arrive_whatever_the_pieces() {
        let large = "content\r\n--xy".repeat(100_000);
        let text = format!(
            "{}small\r\n{}{large}\r\n{}\r\n--xyz--\r\n",
            head("a"),
            head("b"),
            head("c")
        );
        for size in [11, 4096, text.len()] {
            let pieces: Vec<io::Result<Bytes>> = text
                .as_bytes()
                .chunks(size)
                .map(|piece| Ok(Bytes::copy_from_slice(piece)))
                .collect();
            let mut parts = Parts::new(stream::iter(pieces), MEDIA).unwrap();
            for (name, content) in [("a", "small"), ("b", large.as_str()), ("c", "")] {
                let part = parts.next().await.unwrap().unwrap();
                assert_eq!(
                    (part.name.as_deref(), part.file_name.as_deref()),
                    (Some("file"), Some(name))
                );
                let whole: Vec<Bytes> = part.content.map(Result::unwrap).collect().await;
                assert!(whole.concat() == content.as_bytes(), "{name} in pieces of {size}");
            }
            assert!(parts.next().await.unwrap().is_none());
        }
    }

    #[tokio::test]
    async fn endless_heads_are_refused_and_endless_content_is_not_gathered() {
        // No boundary ever, and headers without an end.
        for start in ["", "--xyz\r\nX-Header: "] {
            let (body, taken) = endless(start);
            let mut parts = Parts::new(body, MEDIA).unwrap();
            assert!(parts.next().await.is_err());
            assert!(taken.load(Ordering::Relaxed) < 4 << 20, "{start}");
        }
        let (body, taken) = endless(&head("a"));
        let mut parts = Parts::new(body, MEDIA).unwrap();
        let mut content = parts.next().await.unwrap().unwrap().content;
        for _ in 0..100 {
            assert!(content.next().await.unwrap().unwrap().len() <= 2 * PIECE);
        }
        assert!(taken.load(Ordering::Relaxed) < 16 << 20);
    }
}
