#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::PermissionsExt;

use super::*;

fn project(n: u8) -> ProjectId {
    ProjectId::from_entropy([n; 20])
}

fn id(n: u8) -> SecretId {
    SecretId::from_entropy([n; 20])
}

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec()).unwrap()
}

fn broker(key: u8) -> Broker {
    Broker::new(&MasterKey::new([key; 32])).unwrap()
}

/// Compiles only while `Secret` has none of these: an implementation would make the call ambiguous.
#[test]
fn a_secret_has_no_printable_form() {
    trait Not<A> {
        fn check() {}
    }
    struct Printable;
    struct Shown;
    struct Copied;
    impl<T: ?Sized> Not<()> for T {}
    impl<T: ?Sized + std::fmt::Debug> Not<Printable> for T {}
    impl<T: ?Sized + std::fmt::Display> Not<Shown> for T {}
    impl<T: Clone> Not<Copied> for T {}
    <Secret as Not<_>>::check();
}

#[test]
fn what_is_sealed_opens_only_where_it_belongs() {
    let broker = broker(1);
    let sealed = broker
        .seal(&project(1), &id(1), &secret("a value of some length"))
        .unwrap();
    let text = String::from_utf8_lossy(&sealed);
    assert!(!text.contains("value"));
    assert_ne!(
        sealed,
        broker
            .seal(&project(1), &id(1), &secret("a value of some length"))
            .unwrap()
    );
    broker.load(&project(1), &id(1), &sealed, None).unwrap();
    let value = broker.current(&id(1), Timestamp(0)).unwrap();
    assert_eq!(value.value.expose(), b"a value of some length");

    let cannot = |result: Result<u64, BrokerError>| matches!(result, Err(BrokerError::CannotOpen { .. }));
    assert!(cannot(broker.load(&project(2), &id(1), &sealed, None)));
    assert!(cannot(broker.load(&project(1), &id(2), &sealed, None)));
    assert!(cannot(super::tests::broker(2).load(
        &project(1),
        &id(1),
        &sealed,
        None
    )));
    assert!(cannot(broker.load(&project(1), &id(1), &[], None)));
    for at in 0..sealed.len() {
        let mut damaged = sealed.clone();
        damaged[at] ^= 1;
        assert!(broker.load(&project(1), &id(1), &damaged, None).is_err(), "{at}");
        assert!(
            broker.load(&project(1), &id(1), &sealed[..at], None).is_err(),
            "{at}"
        );
    }
    let mut newer = sealed;
    newer[0] = 2;
    let error = broker.load(&project(1), &id(1), &newer, None).unwrap_err();
    assert!(
        matches!(error, BrokerError::NewerFormat { format: 2, .. }),
        "{error}"
    );
}

#[test]
fn a_new_value_keeps_the_placeholders_of_the_first() {
    let broker = broker(1);
    let trust = TrustId::new("origin");
    let first = broker
        .seal(
            &project(1),
            &id(1),
            &secret("ghp_0123456789abcdefABCDEF0123456789abcd"),
        )
        .unwrap();
    assert_eq!(broker.placeholder(&trust, &id(1)), None);
    broker.load(&project(1), &id(1), &first, None).unwrap();
    let placeholder = broker.placeholder(&trust, &id(1)).unwrap();
    let second = broker
        .reseal(&project(1), &id(1), &first, &secret("of quite another shape"))
        .unwrap();
    broker.load(&project(1), &id(1), &second, None).unwrap();
    assert_eq!(broker.placeholder(&trust, &id(1)).unwrap(), placeholder);
    assert_eq!(
        broker.current(&id(1), Timestamp(0)).unwrap().value.expose(),
        b"of quite another shape"
    );
    // And so after a restart.
    let again = super::tests::broker(1);
    again.load(&project(1), &id(1), &second, None).unwrap();
    assert_eq!(again.placeholder(&trust, &id(1)).unwrap(), placeholder);
}

/// Who knows a secret by an earlier value is not lent the later one.
#[test]
fn only_the_version_that_was_asked_for_is_lent() {
    let broker = broker(1);
    let seal = |value: &str| broker.seal(&project(1), &id(1), &secret(value)).unwrap();
    let load = |value: &str| broker.load(&project(1), &id(1), &seal(value), None).unwrap();
    let lend = |version| {
        broker.lend(&id(1), version, Timestamp(0), |key, redactor| {
            (
                key.to_vec(),
                redactor.text("it was the first value, or another value"),
            )
        })
    };
    let first = load("the first value");
    let (key, shown) = lend(first).unwrap();
    assert_eq!(key, b"the first value");
    assert_eq!(shown, "it was ***************, or another value");
    assert_eq!(
        load("the first value"),
        first,
        "the same value is the same version"
    );
    let second = load("another value");
    assert!(lend(first).is_none());
    assert_eq!(lend(second).unwrap().0, b"another value");
    broker.forget(&id(1));
    assert!(lend(second).is_none());
}

#[test]
fn a_secret_that_has_expired_is_not_there() {
    let broker = broker(1);
    let sealed = broker.seal(&project(1), &id(1), &secret("value")).unwrap();
    broker
        .load(&project(1), &id(1), &sealed, Some(Timestamp(10)))
        .unwrap();
    assert!(broker.current(&id(1), Timestamp(9)).is_some());
    assert!(broker.current(&id(1), Timestamp(10)).is_none());
    broker.load(&project(1), &id(1), &sealed, None).unwrap();
    assert!(broker.current(&id(1), Timestamp(10)).is_some());
    broker.forget(&id(1));
    assert!(broker.current(&id(1), Timestamp(0)).is_none());
}

#[test]
fn values_have_bounds_and_lose_the_end_of_their_line() {
    assert!(matches!(Secret::new(Vec::new()), Err(BrokerError::Empty)));
    assert!(matches!(
        Secret::from_input(b"\n".to_vec()),
        Err(BrokerError::Empty)
    ));
    let long = vec![b'x'; Secret::MAX_BYTES + 1];
    assert!(matches!(Secret::new(long), Err(BrokerError::TooLong { .. })));
    for (input, value) in [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a b ", "a b ")] {
        assert_eq!(
            Secret::from_input(input.into()).unwrap().expose(),
            value.as_bytes()
        );
    }
}

#[test]
fn a_key_file_is_its_owners_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    let missing = MasterKey::load(&path).unwrap_err().to_string();
    assert!(missing.contains("cannot read the key file"), "{missing}");

    let made = MasterKey::load_or_create(&path).unwrap();
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let same = |a: &MasterKey, b: &MasterKey| {
        *a.derive::<32>("x", &[]).unwrap() == *b.derive::<32>("x", &[]).unwrap()
    };
    assert!(same(&made, &MasterKey::load_or_create(&path).unwrap()));
    assert!(same(&made, &MasterKey::load(&path).unwrap()));

    for mode in [0o640, 0o604, 0o660, 0o777] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let error = MasterKey::load(&path).unwrap_err();
        assert!(
            matches!(error, BrokerError::KeyFileOpen { .. }),
            "{mode:o} {error}"
        );
    }
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::write(&path, "too short").unwrap();
    let error = MasterKey::load_or_create(&path).unwrap_err();
    assert!(matches!(error, BrokerError::NotAKey { .. }), "{error}");
    assert!(!error.to_string().contains("too short"));
    assert!(matches!(
        MasterKey::load(dir.path()),
        Err(BrokerError::KeyFileOpen { .. })
    ));
}

#[test]
fn a_key_is_32_bytes_or_64_digits_and_never_shown() {
    let raw = MasterKey::parse(&[0xab; 32], "x").unwrap();
    let text = MasterKey::parse(format!(" {}\n", "aB".repeat(32)).as_bytes(), "x").unwrap();
    assert_eq!(
        *raw.derive::<32>("x", &["y"]).unwrap(),
        *text.derive::<32>("x", &["y"]).unwrap()
    );
    for bad in [&[1; 31][..], &[1; 33], b"", "zz".repeat(32).as_bytes()] {
        let error = MasterKey::parse(bad, "the variable ATOLL_KEY").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("the variable ATOLL_KEY does not hold a key")
        );
    }
    let shown = format!("{raw:?} {:?}", broker(0xab));
    assert_eq!(shown, "MasterKey(..) Broker { secrets: 0, .. }");
}

#[test]
fn what_is_derived_for_one_purpose_says_nothing_of_another() {
    let key = MasterKey::new([1; 32]);
    let derived = [
        key.derive::<32>("a", &[]),
        key.derive::<32>("b", &[]),
        key.derive::<32>("a", &["b"]),
        key.derive::<32>("a", &["b", "c"]),
        key.derive::<32>("a", &["bc"]),
        key.derive::<32>("ab", &["c"]),
        MasterKey::new([2; 32]).derive::<32>("a", &[]),
    ];
    let distinct: std::collections::HashSet<_> = derived.into_iter().map(|bytes| *bytes.unwrap()).collect();
    assert_eq!(distinct.len(), 7);
}

/// What a value is found by takes many times its memory: a server with many secrets makes it for those that are used.
#[test]
fn a_secret_that_nobody_uses_is_not_made_ready_to_be_found() {
    let broker = broker(1);
    let sealed = broker
        .seal(
            &project(1),
            &id(1),
            &Secret::new(b"0123456789abcdef".to_vec()).unwrap(),
        )
        .unwrap();
    let version = broker.load(&project(1), &id(1), &sealed, None).unwrap();
    let needles = broker.needles(&id(1)).unwrap();
    assert!(!needles.are_made());
    let blotted = broker.lend(&id(1), version, Timestamp(0), |_, redactor| {
        redactor.text("it is 0123456789abcdef")
    });
    assert_eq!(blotted.unwrap(), "it is ****************");
    assert!(needles.are_made());
}
