//! Other products' SDKs, as published, against a real server: each is taken through its calls by a script of ours.
//!
//! `./test` installs them and says where: `ATOLL_TEST_TEMPORAL_PYTHONS` (interpreters, separated by colons, one for each
//! version). Without them the tests are skipped, loudly.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod temporal;
