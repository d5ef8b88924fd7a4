//! Whether a sandbox may be created as asked, and behind which wall.
//!
//! What must hold: the answer is the strongest tier that works here and is at least as strong as the floor; when there
//! is none, the request is refused with the reason and the remedy. Nothing goes below what the caller or the operator
//! accepts, and `jail`, which is no tenant boundary, is chosen only where one of them has named it as the floor. Every
//! refusal names the field, what it was, what is allowed, and what to do.

mod keeping;

use std::fmt::Display;
use std::ops::RangeInclusive;

use atoll_types::{Code, DiskBacking, Fault, GIB, Isolation, MIB, SandboxSpec, format_bytes};

/// What the operator allows one sandbox to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    pub cpu_millis: RangeInclusive<u32>,
    pub memory_bytes: RangeInclusive<u64>,
    pub disk_bytes: RangeInclusive<u64>,
    pub pids: RangeInclusive<u32>,
    /// The longest lifetime; `None` allows any, and none at all.
    pub max_timeout_millis: Option<u64>,
    pub min_timeout_millis: u64,
    pub min_idle_millis: u64,
    pub max_labels: usize,
    pub max_label_key_bytes: usize,
    pub max_label_value_bytes: usize,
    pub max_env: usize,
    /// All names and values together.
    pub max_env_bytes: usize,
    /// For each turn of its life.
    pub max_hooks: usize,
    /// All arguments of one hook together.
    pub max_hook_bytes: usize,
    pub max_hook_millis: u64,
    pub max_volumes: usize,
    /// The floor of requests that name none; `None` means the weakest tenant boundary. Only `Some(Jail)` lets a request
    /// without a floor end up in a jail.
    pub default_floor: Option<Isolation>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cpu_millis: 50..=64_000,
            memory_bytes: 32 * MIB..=64 * GIB,
            disk_bytes: MIB..=1024 * GIB,
            pids: 8..=32_768,
            max_timeout_millis: Some(24 * 60 * 60 * 1000),
            min_timeout_millis: 1000,
            min_idle_millis: 1000,
            max_labels: 64,
            max_label_key_bytes: 128,
            max_label_value_bytes: 1024,
            max_env: 256,
            max_env_bytes: 64 * 1024,
            max_hooks: 16,
            max_hook_bytes: 32 * 1024,
            max_hook_millis: 60 * 60 * 1000,
            max_volumes: 16,
            default_floor: None,
        }
    }
}

/// One tier as the probe of this machine found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tier {
    pub isolation: Isolation,
    /// Why a writable layer cannot be on disk there; `None` when it can.
    pub no_disk: Option<String>,
    /// `None` when it works here.
    pub missing: Option<Missing>,
}

/// Why a tier does not work here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// The end of a sentence: `runsc was not found`.
    pub why: String,
    /// An instruction: `run ./atoll once, which builds it`.
    pub remedy: String,
}

/// A spec that passed [`admit`]; only that makes one.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Admitted {
    pub spec: SandboxSpec,
    /// The tier it will run on.
    pub isolation: Isolation,
}

/// Checks a request against the operator's limits and the tiers of this machine.
pub fn admit(mut spec: SandboxSpec, limits: &Limits, tiers: &[Tier]) -> Result<Admitted, Fault> {
    template(&spec.template)?;
    let r = &spec.resources;
    within("cpu", r.cpu_millis, &limits.cpu_millis, |millis| {
        format!("{} cores", f64::from(millis) / 1000.0)
    })?;
    within("memory", r.memory_bytes, &limits.memory_bytes, format_bytes)?;
    within("disk", r.disk_bytes, &limits.disk_bytes, format_bytes)?;
    within("pids", r.pids, &limits.pids, |pids| pids.to_string())?;
    admit_timeout(spec.timeout_millis, limits)?;
    if let Some(idle) = spec.idle
        && idle.after_millis < limits.min_idle_millis
    {
        return Err(Fault::new(
            Code::IdleOutOfRange,
            format!(
                "idle time {} is below the minimum of {}",
                millis(idle.after_millis),
                millis(limits.min_idle_millis)
            ),
        ));
    }
    labels(&spec, limits)?;
    env(&spec, limits)?;
    // A tier that cannot keep memory is no reason to refuse a pause at a deadline: it keeps the files, and says so.
    keeping::keeping(&spec, limits)?;
    let isolation = choose_tier(spec.isolation_floor, limits.default_floor, tiers)?;
    let tier = tiers.iter().find(|tier| tier.isolation == isolation);
    if let Some(why) = tier.and_then(|tier| tier.no_disk.as_ref())
        && spec.resources.disk_backing == DiskBacking::Disk
    {
        return Err(Fault::new(
            Code::ResourcesOutOfRange,
            format!("the writable layer cannot be on disk on the {isolation} tier of this server: {why}"),
        )
        .hint("ask for `disk_backing` `memory`, or leave it out"));
    }
    spec.resources = spec.resources.with_room_for_disk();
    Ok(Admitted { spec, isolation })
}

/// Checks a lifetime, of a new sandbox or of an extension.
pub fn admit_timeout(timeout_millis: Option<u64>, limits: &Limits) -> Result<(), Fault> {
    match (timeout_millis, limits.max_timeout_millis) {
        (Some(timeout), _) if timeout < limits.min_timeout_millis => Err(Fault::new(
            Code::TimeoutOutOfRange,
            format!(
                "timeout {} is below the minimum of {}",
                millis(timeout),
                millis(limits.min_timeout_millis)
            ),
        )),
        (Some(timeout), Some(max)) if timeout > max => Err(Fault::new(
            Code::TimeoutOutOfRange,
            format!(
                "timeout {} exceeds this server's maximum of {}",
                millis(timeout),
                millis(max)
            ),
        )
        .hint(
            "ask for less and extend the sandbox while it is needed, or have the operator raise the maximum",
        )),
        (None, Some(max)) => Err(Fault::new(
            Code::TimeoutOutOfRange,
            "a sandbox without a timeout is not allowed on this server",
        )
        .hint(format!("set a timeout of at most {}", millis(max)))),
        _ => Ok(()),
    }
}

fn choose_tier(
    asked: Option<Isolation>,
    operators: Option<Isolation>,
    tiers: &[Tier],
) -> Result<Isolation, Fault> {
    let floor = asked.or(operators).unwrap_or(Isolation::Gvisor);
    let works = |tier: Isolation| tiers.iter().any(|t| t.isolation == tier && t.missing.is_none());
    // Strongest first.
    let acceptable = || {
        Isolation::ALL
            .into_iter()
            .rev()
            .filter(move |tier| *tier >= floor)
    };
    if let Some(tier) = acceptable().find(|tier| works(*tier)) {
        return Ok(tier);
    }
    let whose = match (asked, operators) {
        (Some(_), _) => "the request's isolation floor",
        (None, Some(_)) => "this server's default isolation floor",
        (None, None) => "the default isolation floor (a tenant boundary)",
    };
    let mut why = Vec::new();
    let mut remedies = Vec::new();
    // Weakest first: the easiest remedy comes first.
    for tier in acceptable().collect::<Vec<_>>().into_iter().rev() {
        match tiers
            .iter()
            .find(|t| t.isolation == tier)
            .and_then(|t| t.missing.as_ref())
        {
            Some(missing) => {
                why.push(format!("{tier}: {}", missing.why));
                remedies.push(format!("for {tier}, {}", missing.remedy));
            }
            None => why.push(format!("{tier}: this server does not offer it")),
        }
    }
    // The best of what is left, for those who can do with less.
    match Isolation::ALL
        .into_iter()
        .rev()
        .find(|tier| *tier < floor && works(*tier))
    {
        Some(Isolation::Jail) => {
            remedies
                .push("or accept a wall that is not a tenant boundary by asking for the floor `jail`".into());
        }
        Some(weaker) => {
            remedies.push(format!(
                "or ask for the floor `{weaker}`, the strongest that works here"
            ));
        }
        None => {}
    }
    if remedies.is_empty() {
        remedies.push("run `atoll doctor` on the server".into());
    }
    Err(Fault::new(
        Code::IsolationUnavailable,
        format!(
            "{whose} `{floor}` cannot be met on this machine: {}",
            why.join("; ")
        ),
    )
    .hint(remedies.join("; ")))
}

fn template(name: &str) -> Result<(), Fault> {
    if name.is_empty() || name.len() > 256 || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(Fault::new(
            Code::TemplateNameInvalid,
            "a template is named by 1 to 256 bytes without spaces or control characters",
        )
        .hint("`atoll template list` shows those that exist"));
    }
    Ok(())
}

fn within<T: PartialOrd + Copy>(
    field: &'static str,
    value: T,
    range: &RangeInclusive<T>,
    show: impl Fn(T) -> String,
) -> Result<(), Fault> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Fault::new(
        Code::ResourcesOutOfRange,
        format!(
            "{field} {} is outside of what this server allows: {} to {}",
            show(value),
            show(*range.start()),
            show(*range.end())
        ),
    ))
}

fn labels(spec: &SandboxSpec, limits: &Limits) -> Result<(), Fault> {
    at_most(
        Code::LabelsTooMany,
        "labels",
        spec.labels.len(),
        limits.max_labels,
    )?;
    for (key, value) in &spec.labels {
        let bad = |what: String| {
            Err(Fault::new(
                Code::LabelInvalid,
                format!("label {:?} {what}", shown(key)),
            ))
        };
        if key.is_empty() {
            return bad("has an empty key".into());
        }
        if key.len() > limits.max_label_key_bytes {
            return bad(format!(
                "has a key of {} bytes; at most {} are allowed",
                key.len(),
                limits.max_label_key_bytes
            ));
        }
        // `=` and `,` separate filters in lists.
        if key.contains(['=', ',']) || key.contains(char::is_control) || key.trim() != key {
            return bad(
                "has a key with `=`, `,`, a control character or a space at its ends; none is allowed".into(),
            );
        }
        if value.len() > limits.max_label_value_bytes {
            return bad(format!(
                "has a value of {} bytes; at most {} are allowed",
                value.len(),
                limits.max_label_value_bytes
            ));
        }
        if value.contains('\0') {
            return bad("has a value with a NUL character".into());
        }
    }
    Ok(())
}

fn env(spec: &SandboxSpec, limits: &Limits) -> Result<(), Fault> {
    at_most(
        Code::EnvTooMany,
        "environment variables",
        spec.env.len(),
        limits.max_env,
    )?;
    for (name, value) in &spec.env {
        let mut bytes = name.bytes();
        let starts_well = bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
        if !starts_well || !bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            return Err(Fault::new(
                Code::EnvInvalid,
                format!(
                    "environment variable name {:?} is not valid: letters, digits and `_`, not starting with a digit",
                    shown(name)
                ),
            ));
        }
        // The value itself may be confidential, so it is never repeated.
        if value.contains('\0') {
            return Err(Fault::new(
                Code::EnvInvalid,
                format!("the value of environment variable {name} contains a NUL character"),
            ));
        }
    }
    let total: usize = spec
        .env
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    at_most(
        Code::EnvTooLarge,
        "bytes of environment",
        total,
        limits.max_env_bytes,
    )
    .map_err(|fault| fault.hint("write large values to a file in the sandbox"))
}

fn at_most(code: Code, what: impl Display, count: usize, max: usize) -> Result<(), Fault> {
    if count <= max {
        return Ok(());
    }
    Err(Fault::new(
        code,
        format!("{count} {what} are too many; at most {max} are allowed"),
    ))
}

/// As much of a caller's text as belongs in a message.
fn shown(text: &str) -> String {
    match text.char_indices().nth(64) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A span of time as people say it.
fn millis(millis: u64) -> String {
    for (unit, size) in [("h", 3_600_000), ("min", 60_000), ("s", 1000)] {
        if millis >= size && millis.is_multiple_of(size) {
            return format!("{} {unit}", millis / size);
        }
    }
    format!("{millis} ms")
}

#[cfg(test)]
mod tests;
