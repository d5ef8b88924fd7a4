//! The requests that are one or two system calls.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::failure::{Outcome, from_io, show};
use crate::files::{Owner, Place, bytes};
use crate::users::Users;

/// `mkdir -p`; whether the last one is new. What is created belongs to `owner`.
pub(crate) fn make_directories(path: &Path, owner: Option<Owner>, mode: u32) -> Outcome<bool> {
    let fail = |error: &io::Error| from_io(format!("cannot create {}", show(bytes(path))), error);
    let not_a_directory = || fail(&io::Error::from_raw_os_error(libc::ENOTDIR));
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(false),
        Ok(_) => return Err(not_a_directory()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(fail(&error)),
    }
    let missing: Vec<&Path> = path
        .ancestors()
        .take_while(|ancestor| matches!(fs::metadata(ancestor), Err(error) if error.kind() == io::ErrorKind::NotFound))
        .collect();
    for directory in missing.iter().rev() {
        match fs::create_dir(directory) {
            Ok(()) => {
                if let Some(owner) = owner {
                    let _ = std::os::unix::fs::lchown(directory, Some(owner.uid), Some(owner.gid));
                }
                let wanted = if *directory == path { mode & 0o7777 } else { 0o755 };
                fs::set_permissions(directory, fs::Permissions::from_mode(wanted))
                    .map_err(|error| fail(&error))?;
            }
            // Someone else was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => {}
            Err(error) => return Err(fail(&error)),
        }
    }
    Ok(true)
}

pub(crate) fn rename(place: &Place, to: &Path) -> Outcome {
    fs::rename(&place.path, to).map_err(|error| {
        let to = show(bytes(to));
        from_io(
            format!("cannot rename {} to {to}", show(bytes(&place.path))),
            &error,
        )
    })
}

pub(crate) fn set_mode(place: &Place, mode: u32) -> Outcome {
    fs::set_permissions(&place.path, fs::Permissions::from_mode(mode & 0o7777))
        .map_err(|error| place.failure("cannot set the mode of", &error))
}

/// Of the thing itself: giving away what a symlink points to would be a trap.
pub(crate) fn set_owner(place: &Place, owner: &str) -> Outcome {
    let (uid, gid) = Users::load().owner(owner)?;
    std::os::unix::fs::lchown(&place.path, uid, gid)
        .map_err(|error| place.failure("cannot set the owner of", &error))
}

pub(crate) fn make_symlink(place: &Place, target: &[u8]) -> Outcome {
    if target.is_empty() || target.contains(&0) {
        return Err(crate::failure::invalid(
            "the target of a symlink is empty or contains a zero byte",
        ));
    }
    symlink(super::name(target), &place.path)
        .map_err(|error| place.failure("cannot create the symlink", &error))?;
    if let Some(owner) = place.owner {
        let _ = std::os::unix::fs::lchown(&place.path, Some(owner.uid), Some(owner.gid));
    }
    Ok(())
}
