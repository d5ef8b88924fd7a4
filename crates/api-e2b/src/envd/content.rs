//! Bodies of `/files`: ranges on the way out, gzip on the way in.

use std::io::{self, Write as _};

use atoll_front::range::{self, Part};
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use futures_util::{Stream, StreamExt as _};

use super::file_refusal;
use crate::error::{Answer, Refusal};

/// The part of a file that is asked for; several, or what is not understood, mean the whole (RFC 9110, 14.2).
pub(crate) fn range(headers: &HeaderMap, size: u64) -> Answer<Option<Part>> {
    let Some(asked) = range::asked(headers) else {
        return Ok(None);
    };
    match asked.of(size) {
        Some(part) => Ok(Some(part)),
        None => Err(file_refusal(
            StatusCode::RANGE_NOT_SATISFIABLE,
            format!("the file has {size} bytes"),
        )),
    }
}

pub(crate) fn is_gzip(headers: &HeaderMap) -> Answer<bool> {
    let coding = headers
        .get(header::CONTENT_ENCODING)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("identity");
    match coding.trim() {
        "identity" | "" => Ok(false),
        "gzip" => Ok(true),
        other => Err(Refusal::invalid(format!(
            "`Content-Encoding: {other}` is not supported; send gzip or nothing"
        ))),
    }
}

/// What is inflated at once: a thousand times as much may come of it.
const INFLATED_AT_ONCE: usize = 1 << 10;

/// The body as it was before it was compressed. Nothing is inflated before somebody asks for it, and then no more than a
/// megabyte or so.
pub(crate) fn decoded(body: Body, gzip: bool) -> impl Stream<Item = io::Result<Bytes>> + Send + Unpin {
    let pieces = body
        .into_data_stream()
        .map(|piece| piece.map_err(io::Error::other));
    if !gzip {
        return pieces.boxed();
    }
    let state = Some((pieces, Bytes::new(), MultiGzDecoder::new(Vec::new())));
    futures_util::stream::unfold(state, |state| async move {
        let (mut pieces, mut packed, mut decoder) = state?;
        loop {
            let mut more = true;
            let outcome = if packed.is_empty() {
                match pieces.next().await {
                    Some(piece) => piece.map(|piece| packed = piece),
                    None => {
                        more = false;
                        decoder.try_finish()
                    }
                }
            } else {
                let slice = packed.split_to(packed.len().min(INFLATED_AT_ONCE));
                decoder.write_all(&slice)
            };
            if let Err(error) = outcome {
                return Some((Err(error), None));
            }
            let bytes = Bytes::from(std::mem::take(decoder.get_mut()));
            match (more, bytes.is_empty()) {
                (true, true) => {}
                (true, false) => return Some((Ok(bytes), Some((pieces, packed, decoder)))),
                (false, true) => return None,
                (false, false) => return Some((Ok(bytes), None)),
            }
        }
    })
    .boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_has_no_such_part_of_is_refused() {
        let of = |text: &str| {
            range(
                &HeaderMap::from_iter([(header::RANGE, text.parse().unwrap())]),
                10,
            )
        };
        assert_eq!(of("bytes=2-4").unwrap(), Some(Part { first: 2, length: 3 }));
        assert_eq!(of("lines=1-2").unwrap(), None);
        assert_eq!(
            of("bytes=10-").unwrap_err().status,
            StatusCode::RANGE_NOT_SATISFIABLE
        );
    }

    #[tokio::test]
    async fn gzip_is_undone_whatever_the_pieces() {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        let content = b"some content, some content, some content".repeat(100);
        encoder.write_all(&content).unwrap();
        let packed = encoder.finish().unwrap();
        let pieces: Vec<_> = packed
            .chunks(7)
            .map(|piece| Ok::<_, io::Error>(Bytes::copy_from_slice(piece)))
            .collect();
        let body = Body::from_stream(futures_util::stream::iter(pieces));
        let whole: Vec<Bytes> = decoded(body, true).map(|piece| piece.unwrap()).collect().await;
        assert_eq!(whole.concat(), content);
        let broken = Body::from(packed[..packed.len() - 9].to_vec());
        let outcome: Vec<_> = decoded(broken, true).collect().await;
        assert!(outcome.last().is_some_and(Result::is_err));
    }

    #[tokio::test]
    async fn a_bomb_comes_in_small_pieces() {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        let megabyte = vec![0; 1 << 20];
        for _ in 0..64 {
            encoder.write_all(&megabyte).unwrap();
        }
        let packed = encoder.finish().unwrap();
        let mut pieces = decoded(Body::from(packed), true);
        let mut total = 0;
        while let Some(piece) = pieces.next().await {
            let piece = piece.unwrap();
            assert!(piece.len() <= 2 << 20, "{}", piece.len());
            total += piece.len();
        }
        assert_eq!(total, 64 << 20);
    }
}
