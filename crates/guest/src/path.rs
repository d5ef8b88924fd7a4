//! Where a request's path points. Paths are bytes; what is not absolute starts at the user's directory.

use crate::failure::{Outcome, invalid};

const LONGEST: usize = 4095;

/// Joins and tidies: no empty or `.` components, no trailing slash. `..` stays, since what it means depends on symlinks.
pub(crate) fn absolute(base: &[u8], path: &[u8]) -> Outcome<Vec<u8>> {
    if path.is_empty() {
        return Err(invalid("the path is empty"));
    }
    if path.contains(&0) {
        return Err(invalid("the path contains a zero byte"));
    }
    let mut whole = Vec::with_capacity(base.len() + path.len() + 1);
    let base = if path[0] == b'/' { &b""[..] } else { base };
    for component in base
        .split(|&byte| byte == b'/')
        .chain(path.split(|&byte| byte == b'/'))
    {
        if !component.is_empty() && component != b"." {
            whole.push(b'/');
            whole.extend_from_slice(component);
        }
    }
    if whole.is_empty() {
        whole.push(b'/');
    }
    if whole.len() > LONGEST {
        return Err(invalid("the path is too long"));
    }
    Ok(whole)
}

/// The directory that holds it, and its name there. `None` for the root and for what ends in `..`.
pub(crate) fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = path.iter().rposition(|&byte| byte == b'/')?;
    let name = &path[at + 1..];
    if name.is_empty() || name == b".." {
        return None;
    }
    Some((if at == 0 { b"/" } else { &path[..at] }, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_start_at_the_base() {
        let cases: [(&str, &str); 7] = [
            ("a/b", "/home/u/a/b"),
            (".", "/home/u"),
            ("./a//b/", "/home/u/a/b"),
            ("../x", "/home/u/../x"),
            ("/", "/"),
            ("//etc/./passwd", "/etc/passwd"),
            ("~", "/home/u/~"),
        ];
        for (path, expected) in cases {
            let found = absolute(b"/home/u/", path.as_bytes()).expect("valid");
            assert_eq!(String::from_utf8_lossy(&found), expected);
        }
    }

    #[test]
    fn impossible_paths_are_refused() {
        assert!(absolute(b"/", b"").is_err());
        assert!(absolute(b"/", b"a\0b").is_err());
        assert!(absolute(b"/", &[b'a'; 5000]).is_err());
        assert_eq!(absolute(b"", b"\xff\xfe").expect("bytes are fine"), b"/\xff\xfe");
    }

    #[test]
    fn splitting() {
        assert_eq!(split(b"/a/b"), Some((&b"/a"[..], &b"b"[..])));
        assert_eq!(split(b"/a"), Some((&b"/"[..], &b"a"[..])));
        assert_eq!(split(b"/"), None);
        assert_eq!(split(b"/a/.."), None);
    }
}
