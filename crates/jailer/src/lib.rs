//! The jail: a room built out of the host kernel's own namespaces. **Not a tenant boundary**: one kernel bug is enough
//! to leave it.
//!
//! The runtime starts the program `atoll-jailer` with a [`spec::Spec`]; the program builds the room, puts the guest agent
//! into it as PID 1, says so and goes away.
//!
//! ```text
//!   server ── spawns ──> jailer A                         private mount namespace, still the host's root
//!                          │  joins the cgroup
//!                          ├── clone(user, pid) ──> B     no privilege over A's mounts, ever
//!                          │  writes B's id maps          │  unshares net, ipc, uts, cgroup; lo up; host name
//!                          │  builds the tree below       │
//!                          │  pivot_root, detaches the host
//!                          │ ── go ─────────────────────> │  uid 0 of the range, Landlock, few capabilities,
//!                          │                              │  no_new_privs, seccomp, execve(agent): PID 1
//!                          │ <──────────── exec or error ─┘
//!   server <── "pid N" ── exits; B belongs to the host's init and outlives the server
//! ```
//!
//! ```text
//!   /                overlay: the template's EROFS image (shared, idmapped) below, tmpfs or ext4 of fixed size above
//!   ├── .atoll/      atoll-guest, bound read-only
//!   ├── dev/         the writable layer itself, to be found again for saving; hidden below what follows
//!   ├── dev/         tmpfs, read-only: null zero full random urandom tty; pts/ (own instance), shm/ (tmpfs)
//!   ├── proc/        of the jail's pid namespace; kernel tunables read-only, what tells of the host is masked
//!   ├── sys/         tmpfs, read-only: the CPU list and nothing else
//!   └── ...          volumes and inputs, with the ids of their files mapped so that all jails agree on them
//! ```
//!
//! What must hold:
//! - The mount namespace belongs to the *host's* user namespace. No capability inside the jail reaches it, not even the
//!   agent's, so a mount can neither be added nor uncovered from inside.
//! - Every step that fails stops the start. There is no weaker jail.
//! - Nothing is mounted on the host: when the last process is gone, so are the mounts, the loop device and the namespaces.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!(
    "atoll-jailer knows the system call table of x86_64 Linux only; add one to seccomp.rs for this target"
);

pub use atoll_confine::error;

pub mod disk;
pub mod inside;
pub mod landlock;
pub mod layer;
mod mounts;
pub mod outside;
pub mod seccomp;
pub mod spec;
mod sys;
pub mod tree;
