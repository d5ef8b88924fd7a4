//! Extended attributes: what programs keep beside a file's content.

use std::io;

use atoll_guest_protocol::Attributes;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::failure::Outcome;
use crate::files::Place;

/// All names of one file, and one value; the kernel's own limits.
const LONGEST: usize = 64 * 1024;

/// Those whose name begins with `prefix`, without it. A file that has none, or cannot have any, is no failure.
pub(crate) fn read(place: &Place, prefix: &str) -> Attributes {
    let mut found = Attributes::new();
    for name in names(place, prefix).unwrap_or_default() {
        let mut value = vec![0; LONGEST];
        if let Ok(length) = rustix::fs::getxattr(&place.path, format!("{prefix}{name}"), &mut value[..]) {
            value.truncate(length);
            found.push((name, value));
        }
    }
    found
}

/// What was there under `prefix` and is not named goes.
pub(crate) fn replace(place: &Place, prefix: &str, attributes: &Attributes) -> Outcome {
    let failed = |error: Errno| place.failure("cannot set the attributes of", &io::Error::from(error));
    for (name, value) in attributes {
        rustix::fs::setxattr(&place.path, format!("{prefix}{name}"), value, XattrFlags::empty())
            .map_err(failed)?;
    }
    let stale = match names(place, prefix) {
        Ok(names) => names,
        // A filesystem without attributes has none to remove.
        Err(Errno::NOTSUP) => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    for name in stale {
        if !attributes.iter().any(|(kept, _)| *kept == name) {
            rustix::fs::removexattr(&place.path, format!("{prefix}{name}")).map_err(failed)?;
        }
    }
    Ok(())
}

fn names(place: &Place, prefix: &str) -> Result<Vec<String>, Errno> {
    let mut list = vec![0; LONGEST];
    let length = rustix::fs::listxattr(&place.path, &mut list[..])?;
    let named = list[..length].split(|&byte| byte == 0);
    Ok(named
        .filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix(prefix))
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect())
}
