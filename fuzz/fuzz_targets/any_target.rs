//! Any target, named by `ATOLL_FUZZ_TARGET`: built once for all of them, and easily carried to a larger machine.
#![no_main]
use std::sync::LazyLock;

static TARGET: LazyLock<&'static atoll_fuzz::Target> = LazyLock::new(|| {
    let name = std::env::var("ATOLL_FUZZ_TARGET").unwrap_or_default();
    atoll_fuzz::find(&name).expect("ATOLL_FUZZ_TARGET names no target")
});

atoll_fuzz::libfuzzer_sys::fuzz_target!(|input: &[u8]| TARGET.check(input));
