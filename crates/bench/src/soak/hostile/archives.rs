//! Archives that lie: names that climb out, sizes that are not there, links to elsewhere, nothing of an archive at all.

use reqwest::Method;
use serde_json::json;

use super::Hand;
use crate::soak::random::Random;

pub(super) async fn archives(hand: &Hand, random: &mut Random) -> u64 {
    let Some(id) = hand.sandbox(&json!({})).await else {
        return 1;
    };
    let caller = &hand.caller;
    let name = format!("h{}", random.word());
    let mark = format!("{}-{}", caller.canary(), random.word());
    let bodies = [
        entry("../../../../../../../../tmp/", &mark, b'0', "", 4),
        entry("/tmp/", &mark, b'0', "", 4),
        entry("", "link", b'2', "/", 0),
        entry("", "hard", b'1', "../../../../etc/shadow", 0),
        entry("", "huge", b'0', "", u64::MAX >> 4),
        entry("", "device", b'3', "", 0),
        random.bytes(20_000),
        vec![0; 1024],
    ];
    let mut moves = 0;
    for body in bodies {
        let request = match random.below(4) {
            0 => caller
                .request(Method::PUT, &format!("/v1/sandboxes/{id}/files/tar"))
                .query(&[("path", "/home/user")]),
            1 => caller
                .request(Method::POST, "/v1/volumes/seal")
                .query(&[("name", &name)]),
            2 => caller.request(Method::POST, "/v1/snapshots/import"),
            _ => caller.request(Method::POST, "/v1/templates/build-context"),
        };
        let request = request
            .header("content-type", "application/octet-stream")
            .timeout(std::time::Duration::from_secs(10))
            .body(body);
        moves += 1;
        let _refused = caller.attempt("archives", request).await;
        let _gone = caller
            .attempt("archives", caller.delete(&format!("/v1/volumes/{name}")))
            .await;
    }
    if std::path::Path::new("/tmp").join(&mark).exists() {
        hand.got("a file of the host was written", format!("/tmp/{mark}"));
        let _gone = std::fs::remove_file(std::path::Path::new("/tmp").join(&mark));
    }
    hand.kill(&id).await;
    moves
}

/// One entry of a tar archive, written by hand: libraries refuse to lie.
fn entry(dir: &str, name: &str, kind: u8, link: &str, size: u64) -> Vec<u8> {
    let mut block = [0_u8; 512];
    let mut put = |at: usize, text: &[u8]| block[at..at + text.len()].copy_from_slice(text);
    let full = format!("{dir}{name}");
    put(0, &full.as_bytes()[..full.len().min(100)]);
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    match size <= 0o77_777_777_777 {
        true => put(124, format!("{size:011o}\0").as_bytes()),
        false => {
            // In binary, as GNU does with what is larger.
            let mut large = [0_u8; 12];
            large[0] = 0x80;
            large[4..].copy_from_slice(&size.to_be_bytes());
            put(124, &large);
        }
    }
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, &[kind]);
    put(157, &link.as_bytes()[..link.len().min(100)]);
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().copied().map(u32::from).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut archive = block.to_vec();
    if size == 4 {
        archive.extend_from_slice(b"evil");
        archive.resize(1024, 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_lie_is_an_archive_all_the_same() {
        let archive = super::entry("../", "x", b'0', "", 4);
        let mut archive = tar::Archive::new(&archive[..]);
        let entry = archive.entries().unwrap().next().unwrap().unwrap();
        assert_eq!(&*entry.path_bytes(), b"../x");
        assert_eq!(entry.size(), 4);
    }
}
