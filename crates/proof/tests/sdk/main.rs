//! Other products' SDKs, as published, against a real server: each is taken through every call by a script of ours, those
//! of sandboxes on every tier.
//!
//! `./test` installs them and says where: `ATOLL_TEST_E2B_PYTHONS` (interpreters, separated by colons, one for each version)
//! and `ATOLL_TEST_E2B_NODES` (directories with a `node_modules`), `ATOLL_TEST_E2B_CLIS` (the same, with `@e2b/cli`),
//! `ATOLL_TEST_E2B_VERSION_PYTHONS` and `_NODES` (older versions), `ATOLL_TEST_E2B_CREWAI`, `ATOLL_TEST_E2B_OPENAI_AGENTS`,
//! `ATOLL_TEST_LANGCHAIN_PYTHONS` (interpreters with `langchain-e2b`), `ATOLL_TEST_TEMPORAL_PYTHONS` (with `temporalio`),
//! `ATOLL_TEST_TEMPORAL_NODE` (the examples in TypeScript, with their `node_modules`).
//! Without them the tests are skipped, loudly.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod e2b;
mod e2b_templates;
mod e2b_versions;
mod e2b_wire;
mod examples;
mod temporal;
