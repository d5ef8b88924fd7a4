//! Taking powers away from processes: system call filters, Landlock, capabilities.
//!
//! Two users: the jailer, which confines what runs in a jail, and the server, which confines itself ([`server`]). What each
//! of them takes away is their business; how the kernel is told is here.
//!
//! What must hold: everything here concerns the calling thread and whatever it starts afterwards. So it is done before there
//! are other threads, or they would keep what was taken.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!(
    "atoll-confine knows the system call table of x86_64 Linux only; add one to seccomp.rs for this target"
);

pub mod capabilities;
pub mod error;
pub mod landlock;
pub mod seccomp;
pub mod server;
pub mod sys;
