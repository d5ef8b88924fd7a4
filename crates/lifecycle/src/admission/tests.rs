use super::*;
use Isolation::{Gvisor, Jail, Microvm};
use atoll_types::{Hook, IdleAction, IdlePolicy, TimeoutAction, VolumeMount};

fn spec() -> SandboxSpec {
    SandboxSpec {
        template: "base".into(),
        timeout_millis: Some(60_000),
        ..SandboxSpec::default()
    }
}

fn tiers(working: &[Isolation]) -> Vec<Tier> {
    Isolation::ALL
        .into_iter()
        .map(|isolation| Tier {
            isolation,
            no_disk: None,
            missing: (!working.contains(&isolation)).then(|| match isolation {
                Microvm => Missing {
                    why: "/dev/kvm is not there".into(),
                    remedy: "use a machine with KVM".into(),
                },
                Gvisor => Missing {
                    why: "runsc was not found".into(),
                    remedy: "run `./atoll` once".into(),
                },
                Jail => Missing {
                    why: "user namespaces are disabled".into(),
                    remedy: "run as root".into(),
                },
            }),
        })
        .collect()
}

fn check(change: impl FnOnce(&mut SandboxSpec, &mut Limits), expected: &str) {
    let (mut spec, mut limits) = (spec(), Limits::default());
    change(&mut spec, &mut limits);
    let answer = match admit(spec, &limits, &tiers(&[Jail, Gvisor])) {
        Ok(admitted) => admitted.isolation.to_string(),
        Err(fault) => format!("{}: {fault}", fault.code),
    };
    assert_eq!(answer, expected);
}

#[test]
fn the_strongest_tier_at_or_above_the_floor_is_chosen() {
    let table = [
        // asked, operator's default, working, chosen
        (None, None, vec![Jail, Gvisor, Microvm], Some(Microvm)),
        (None, None, vec![Jail, Gvisor], Some(Gvisor)),
        (None, None, vec![Jail], None),
        (None, Some(Jail), vec![Jail], Some(Jail)),
        (None, Some(Jail), vec![Jail, Gvisor], Some(Gvisor)),
        (None, Some(Microvm), vec![Jail, Gvisor], None),
        (Some(Jail), None, vec![Jail], Some(Jail)),
        (Some(Jail), None, vec![Jail, Gvisor], Some(Gvisor)),
        (Some(Gvisor), Some(Jail), vec![Jail], None),
        (Some(Gvisor), None, vec![Jail, Microvm], Some(Microvm)),
        (Some(Microvm), None, vec![Jail, Gvisor], None),
        (Some(Jail), None, vec![], None),
    ];
    for (asked, operators, working, expected) in table {
        let chosen = choose_tier(asked, operators, &tiers(&working));
        assert_eq!(
            chosen.as_ref().ok(),
            expected.as_ref(),
            "asked {asked:?}, default {operators:?}, working {working:?}"
        );
    }
}

#[test]
fn a_floor_that_cannot_be_met_says_why_and_what_to_do() {
    let fault = choose_tier(None, None, &tiers(&[Jail])).unwrap_err();
    assert_eq!(fault.code, Code::IsolationUnavailable);
    assert_eq!(
        fault.to_string(),
        "the default isolation floor (a tenant boundary) `gvisor` cannot be met on this machine: gvisor: runsc was \
         not found; microvm: /dev/kvm is not there (for gvisor, run `./atoll` once; for microvm, use a \
         machine with KVM; or accept a wall that is not a tenant boundary by asking for the floor `jail`)"
    );
    let fault = choose_tier(Some(Microvm), None, &[]).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "the request's isolation floor `microvm` cannot be met on this machine: microvm: this server does not offer \
         it (run `atoll doctor` on the server)"
    );
}

#[test]
fn refusals_name_the_field_the_value_and_the_limit() {
    check(|_, _| {}, "gvisor");
    check(
        |spec, _| spec.resources.cpu_millis = 0,
        "resources_out_of_range: cpu 0 cores is outside of what this server allows: 0.05 cores to 64 cores",
    );
    check(
        |spec, _| spec.resources.memory_bytes = 1,
        "resources_out_of_range: memory 1 B is outside of what this server allows: 32 MiB to 64 GiB",
    );
    check(
        |spec, _| spec.resources.disk_bytes = u64::MAX,
        "resources_out_of_range: disk 17179869184.0 GiB is outside of what this server allows: 1 MiB to 1024 GiB",
    );
    check(
        |spec, _| spec.resources.pids = 1,
        "resources_out_of_range: pids 1 is outside of what this server allows: 8 to 32768",
    );
    check(
        |spec, _| spec.timeout_millis = Some(90_000_000),
        "timeout_out_of_range: timeout 25 h exceeds this server's maximum of 24 h (ask for less and extend the \
         sandbox while it is needed, or have the operator raise the maximum)",
    );
    check(
        |spec, _| spec.timeout_millis = Some(10),
        "timeout_out_of_range: timeout 10 ms is below the minimum of 1 s",
    );
    check(
        |spec, _| spec.timeout_millis = None,
        "timeout_out_of_range: a sandbox without a timeout is not allowed on this server (set a timeout of at most \
         24 h)",
    );
    check(
        |spec, limits| {
            spec.timeout_millis = None;
            limits.max_timeout_millis = None;
        },
        "gvisor",
    );
    check(
        |spec, _| {
            spec.idle = Some(IdlePolicy {
                after_millis: 5,
                action: IdleAction::Kill,
            });
        },
        "idle_out_of_range: idle time 5 ms is below the minimum of 1 s",
    );
    check(
        |spec, _| spec.template = "a b".into(),
        "template_name_invalid: a template is named by 1 to 256 bytes without spaces or control characters \
         (`atoll template list` shows those that exist)",
    );
}

#[test]
fn labels_and_environment_are_bounded() {
    let label = |key: &str, value: &str| {
        let (key, value) = (key.to_owned(), value.to_owned());
        move |spec: &mut SandboxSpec, _: &mut Limits| {
            spec.labels.insert(key, value);
        }
    };
    let env = |name: &str, value: &str| {
        let (name, value) = (name.to_owned(), value.to_owned());
        move |spec: &mut SandboxSpec, _: &mut Limits| {
            spec.env.insert(name, value);
        }
    };
    check(label("user.id/é", "x=1, y"), "gvisor");
    check(label("", ""), "label_invalid: label \"\" has an empty key");
    check(
        label("a=b", ""),
        "label_invalid: label \"a=b\" has a key with `=`, `,`, a control character or a space at its ends; none is \
         allowed",
    );
    check(
        label("a", &"x".repeat(1025)),
        "label_invalid: label \"a\" has a value of 1025 bytes; at most 1024 are allowed",
    );
    check(
        label(&"é".repeat(100), ""),
        &format!(
            "label_invalid: label \"{}…\" has a key of 200 bytes; at most 128 are allowed",
            "é".repeat(64)
        ),
    );
    check(
        |spec, limits| {
            limits.max_labels = 1;
            spec.labels = ["a", "b"].map(|key| (key.into(), String::new())).into();
        },
        "labels_too_many: 2 labels are too many; at most 1 are allowed",
    );
    check(env("_PATH1", "any thing"), "gvisor");
    for name in ["", "1A", "A-B", "A=B", "é"] {
        check(
            env(name, ""),
            &format!(
                "env_invalid: environment variable name {name:?} is not valid: letters, digits and `_`, not starting \
                 with a digit"
            ),
        );
    }
    check(
        env("A", "secret\0"),
        "env_invalid: the value of environment variable A contains a NUL character",
    );
    check(
        env("A", &"x".repeat(65536)),
        "env_too_large: 65537 bytes of environment are too many; at most 65536 are allowed (write large values to a \
         file in the sandbox)",
    );
}

#[test]
fn hooks_name_a_program_and_end() {
    let hook = |argv: &[&str], timeout_millis| {
        let argv = argv.iter().map(|word| (*word).to_owned()).collect();
        move |spec: &mut SandboxSpec, _: &mut Limits| {
            spec.hooks.on_resume.push(Hook { argv, timeout_millis });
        }
    };
    check(hook(&["/bin/true", ""], 1000), "gvisor");
    for argv in [&[][..], &[""], &["", "x"]] {
        check(
            hook(argv, 1000),
            "hook_invalid: on_resume hook 1 names no program",
        );
    }
    check(
        hook(&["a", "b\0"], 1000),
        "hook_invalid: on_resume hook 1 has an argument with a NUL character",
    );
    check(
        hook(&["a", &"x".repeat(32 * 1024)], 1000),
        "hook_invalid: on_resume hook 1 has 32771 bytes of arguments; at most 32768 are allowed",
    );
    for (timeout, shown) in [(0, "0 ms"), (7_200_000, "2 h")] {
        check(
            hook(&["a"], timeout),
            &format!("hook_invalid: on_resume hook 1 has a timeout of {shown}; 1 ms to 1 h are allowed"),
        );
    }
    check(
        |spec, _| {
            let hook = Hook {
                argv: vec!["a".into()],
                timeout_millis: 1,
            };
            spec.hooks.on_create = vec![hook; 17];
        },
        "hooks_too_many: 17 on_create hooks are too many; at most 16 are allowed",
    );
}

#[test]
fn volumes_have_places_of_their_own() {
    let at = |paths: &[&str]| {
        let mounts: Vec<_> = paths
            .iter()
            .map(|path| VolumeMount {
                volume: "data".into(),
                path: (*path).into(),
                read_only: false,
            })
            .collect();
        move |spec: &mut SandboxSpec, _: &mut Limits| spec.volumes = mounts
    };
    check(at(&["/data", "/data2", "/proclaim/a..b", "/devel"]), "gvisor");
    for (path, why) in [
        ("", "is not absolute"),
        ("data", "is not absolute"),
        ("/", "is the root directory itself"),
        ("/a\0", "contains a control character"),
        ("/proc", "is in /proc, which the sandbox itself needs"),
        ("/proc/self", "is in /proc, which the sandbox itself needs"),
        ("/sys/x", "is in /sys, which the sandbox itself needs"),
        ("/dev", "is in /dev, which the sandbox itself needs"),
        ("/.atoll/x", "is in /.atoll, which the sandbox itself needs"),
    ] {
        check(
            at(&[path]),
            &format!("volume_path_invalid: volume path {path:?} {why}"),
        );
    }
    for path in ["/a/", "//a", "/a//b", "/a/./b", "/a/../proc", "/..", "/a/.."] {
        check(
            at(&[path]),
            &format!(
                "volume_path_invalid: volume path {path:?} is not in its plain form: no `.`, no `..`, no double or \
                 trailing `/`"
            ),
        );
    }
    for (one, two) in [("/a", "/a"), ("/a", "/a/b"), ("/a/b/c", "/a")] {
        check(
            at(&["/z", one, two]),
            &format!(
                "volume_paths_overlap: the volumes at {one:?} and {two:?} would hide each other (give each volume a \
                 path that is not inside of another's)"
            ),
        );
    }
    check(
        |spec, _| {
            spec.volumes = vec![VolumeMount {
                volume: "a b".into(),
                path: "/a".into(),
                read_only: true,
            }];
        },
        "volume_name_invalid: a volume is named by 1 to 256 bytes without spaces or control characters",
    );
    let many: Vec<String> = (0..17).map(|n| format!("/v{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    check(
        at(&many),
        "volumes_too_many: 17 volumes are too many; at most 16 are allowed",
    );
}

#[test]
fn rest_is_kept_for_some_time_or_for_good() {
    check(|spec, _| spec.retention_millis = Some(1), "gvisor");
    check(
        |spec, _| spec.retention_millis = Some(0),
        "retention_out_of_range: a retention of 0 would delete the sandbox as soon as it rests (leave it out to keep a \
         resting sandbox until it is deleted, or use the action `kill`)",
    );
    // A jail keeps the files.
    check(
        |spec, _| {
            spec.on_timeout = TimeoutAction::Pause;
            spec.isolation_floor = Some(Jail);
        },
        "gvisor",
    );
}

#[test]
fn a_disk_that_there_cannot_be_is_refused() {
    let mut tiers = tiers(&[Jail, Gvisor]);
    for tier in &mut tiers {
        tier.no_disk = (tier.isolation == Gvisor).then(|| "there is none".into());
    }
    let refused = admit(spec(), &Limits::default(), &tiers).unwrap_err();
    assert_eq!(refused.code, Code::ResourcesOutOfRange);
    assert!(
        refused
            .message
            .contains("gvisor tier of this server: there is none"),
        "{refused}"
    );
    let mut in_memory = spec();
    in_memory.resources.disk_backing = DiskBacking::Memory;
    let admitted = admit(in_memory, &Limits::default(), &tiers).unwrap();
    assert_eq!(
        admitted.spec.resources.disk_bytes,
        admitted.spec.resources.memory_bytes / 4 * 3
    );
}
