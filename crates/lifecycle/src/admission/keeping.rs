//! What a request says about state that survives: hooks, volumes, how long it may rest.

use atoll_types::{Code, Fault, Hook, SandboxSpec, VolumeMount};

use super::{Limits, at_most, millis, shown};

/// Where the sandbox's own machinery lives; a volume there would hide it.
const RESERVED: [&str; 4] = ["/proc", "/sys", "/dev", "/.atoll"];
/// What Linux takes as a path.
const MAX_PATH_BYTES: usize = 4095;

pub(super) fn keeping(spec: &SandboxSpec, limits: &Limits) -> Result<(), Fault> {
    if spec.retention_millis == Some(0) {
        return Err(Fault::new(
            Code::RetentionOutOfRange,
            "a retention of 0 would delete the sandbox as soon as it rests",
        )
        .hint("leave it out to keep a resting sandbox until it is deleted, or use the action `kill`"));
    }
    hooks("on_create", &spec.hooks.on_create, limits)?;
    hooks("on_resume", &spec.hooks.on_resume, limits)?;
    volumes(&spec.volumes, limits)
}

fn hooks(when: &str, hooks: &[Hook], limits: &Limits) -> Result<(), Fault> {
    at_most(
        Code::HooksTooMany,
        format!("{when} hooks"),
        hooks.len(),
        limits.max_hooks,
    )?;
    for (hook, number) in hooks.iter().zip(1..) {
        let bad = |what: String| {
            Err(Fault::new(
                Code::HookInvalid,
                format!("{when} hook {number} {what}"),
            ))
        };
        if hook.argv.first().is_none_or(String::is_empty) {
            return bad("names no program".into());
        }
        if hook.argv.iter().any(|word| word.contains('\0')) {
            return bad("has an argument with a NUL character".into());
        }
        let bytes: usize = hook.argv.iter().map(|word| word.len() + 1).sum();
        if bytes > limits.max_hook_bytes {
            return bad(format!(
                "has {bytes} bytes of arguments; at most {} are allowed",
                limits.max_hook_bytes
            ));
        }
        if !(1..=limits.max_hook_millis).contains(&hook.timeout_millis) {
            return bad(format!(
                "has a timeout of {}; 1 ms to {} are allowed",
                millis(hook.timeout_millis),
                millis(limits.max_hook_millis)
            ));
        }
    }
    Ok(())
}

fn volumes(mounts: &[VolumeMount], limits: &Limits) -> Result<(), Fault> {
    at_most(Code::VolumesTooMany, "volumes", mounts.len(), limits.max_volumes)?;
    for mount in mounts {
        let name = &mount.volume;
        if name.is_empty() || name.len() > 256 || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(Fault::new(
                Code::VolumeNameInvalid,
                "a volume is named by 1 to 256 bytes without spaces or control characters",
            ));
        }
        path(&mount.path)?;
    }
    for (index, mount) in mounts.iter().enumerate() {
        for other in &mounts[..index] {
            if is_at_or_under(&mount.path, &other.path) || is_at_or_under(&other.path, &mount.path) {
                return Err(Fault::new(
                    Code::VolumePathsOverlap,
                    format!(
                        "the volumes at {:?} and {:?} would hide each other",
                        shown(&other.path),
                        shown(&mount.path)
                    ),
                )
                .hint("give each volume a path that is not inside of another's"));
            }
        }
    }
    Ok(())
}

fn path(path: &str) -> Result<(), Fault> {
    let bad = |what: &str| {
        Err(Fault::new(
            Code::VolumePathInvalid,
            format!("volume path {:?} {what}", shown(path)),
        ))
    };
    let Some(inner) = path.strip_prefix('/') else {
        return bad("is not absolute");
    };
    if inner.is_empty() {
        return bad("is the root directory itself");
    }
    if path.len() > MAX_PATH_BYTES {
        return bad("is too long");
    }
    if path.contains(char::is_control) {
        return bad("contains a control character");
    }
    // One spelling per place, so that what overlaps can be seen.
    if inner.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return bad("is not in its plain form: no `.`, no `..`, no double or trailing `/`");
    }
    if let Some(reserved) = RESERVED
        .into_iter()
        .find(|reserved| is_at_or_under(path, reserved))
    {
        return bad(&format!("is in {reserved}, which the sandbox itself needs"));
    }
    Ok(())
}

fn is_at_or_under(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
