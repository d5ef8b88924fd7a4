//! The system calls that have no safe form elsewhere.
#![allow(
    unsafe_code,
    reason = "bpf(2), options of sockets and namespaces of single threads have no safe wrappers"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::thread::UnshareFlags;

const BPF_MAP_CREATE: u32 = 0;
const BPF_MAP_UPDATE_ELEM: u32 = 2;
const BPF_PROG_LOAD: u32 = 5;
const BPF_LINK_CREATE: u32 = 28;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_SOCKMAP: u32 = 15;
const BPF_SK_LOOKUP: u32 = 36;

/// What a program is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    /// Decides about packets that come in through an interface.
    Ingress,
    /// Chooses the socket for a new connection or a datagram.
    SocketLookup,
}

/// Moves the calling thread, and no other, into a new network namespace. Its owner is the user namespace of this process.
pub(crate) fn leave_network() -> io::Result<()> {
    // SAFETY: a network namespace concerns neither memory nor open descriptors; only CLONE_FILES would.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(Into::into)
}

/// Sets an option whose value is an `int`.
pub(crate) fn set_option(socket: impl AsFd, level: i32, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: `value` outlives the call, and its length is told.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A table of sockets for a [`Purpose::SocketLookup`] to choose from.
pub(crate) fn socket_map(entries: u32) -> io::Result<OwnedFd> {
    make_map(BPF_MAP_TYPE_SOCKMAP, 8, entries)
}

/// Records that programs count in, all zero at first.
pub(crate) fn array_map(entries: u32, bytes_each: u32) -> io::Result<OwnedFd> {
    make_map(BPF_MAP_TYPE_ARRAY, bytes_each, entries)
}

fn make_map(kind: u32, value_bytes: u32, entries: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Arguments {
        kind: u32,
        key_bytes: u32,
        value_bytes: u32,
        entries: u32,
    }
    // SAFETY: BPF_MAP_CREATE reads these fields, of which none is a pointer, and gives a descriptor.
    unsafe {
        bpf_open(
            BPF_MAP_CREATE,
            &Arguments {
                kind,
                key_bytes: 4,
                value_bytes,
                entries,
            },
        )
    }
}

/// The table does not keep the socket: when it is closed, its entry is empty.
pub(crate) fn put_socket(map: BorrowedFd<'_>, index: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Arguments<'a> {
        map: RawFd,
        unused: u32,
        key: &'a u32,
        value: &'a u64,
        flags: u64,
    }
    let arguments = Arguments {
        map: map.as_raw_fd(),
        unused: 0,
        key: &index,
        value: &(socket.as_raw_fd() as u64),
        flags: 0,
    };
    // SAFETY: key and value are as long as `socket_map` said that they are, and outlive the call.
    unsafe { bpf(BPF_MAP_UPDATE_ELEM, &arguments) }.map(drop)
}

/// Has a program verified and translated by the kernel. A refusal brings along what the verifier said.
pub(crate) fn load_program(purpose: Purpose, instructions: &[u64]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Arguments {
        kind: u32,
        count: u32,
        instructions: *const u64,
        license: *const libc::c_char,
        log_level: u32,
        log_bytes: u32,
        log: *mut u8,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
        interface: u32,
        attach: u32,
    }
    let (kind, attach, name) = match purpose {
        Purpose::Ingress => (3, 0, b"atoll_source\0\0\0\0"),
        Purpose::SocketLookup => (30, BPF_SK_LOOKUP, b"atoll_lookup\0\0\0\0"),
    };
    let mut log = Vec::new();
    loop {
        let arguments = Arguments {
            kind,
            count: instructions.len() as u32,
            instructions: instructions.as_ptr(),
            license: c"Apache-2.0".as_ptr(),
            log_level: u32::from(!log.is_empty()),
            log_bytes: log.len() as u32,
            log: if log.is_empty() {
                std::ptr::null_mut()
            } else {
                log.as_mut_ptr()
            },
            kernel_version: 0,
            flags: 0,
            name: *name,
            interface: 0,
            attach,
        };
        // SAFETY: instructions, license and log outlive the call; the kernel writes at most `log_bytes` into the log.
        match unsafe { bpf_open(BPF_PROG_LOAD, &arguments) } {
            Ok(program) => return Ok(program),
            // Once more, for the reasons.
            Err(error) if log.is_empty() && error.raw_os_error() != Some(libc::EPERM) => {
                log = vec![0; 64 << 10];
            }
            Err(error) => {
                let said: Vec<u8> = log.into_iter().take_while(|byte| *byte != 0).collect();
                let said = String::from_utf8_lossy(&said);
                let last = said.lines().rev().take(3).collect::<Vec<_>>().join("; ");
                return Err(io::Error::new(error.kind(), format!("{error} {last}")));
            }
        }
    }
}

/// Lets a [`Purpose::SocketLookup`] choose in that network namespace for as long as the result is open.
pub(crate) fn attach_lookup(program: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Arguments {
        program: RawFd,
        target: RawFd,
        attach: u32,
        flags: u32,
    }
    // SAFETY: BPF_LINK_CREATE reads these fields, of which none is a pointer, and gives a descriptor.
    unsafe {
        bpf_open(
            BPF_LINK_CREATE,
            &Arguments {
                program: program.as_raw_fd(),
                target: namespace.as_raw_fd(),
                attach: BPF_SK_LOOKUP,
                flags: 0,
            },
        )
    }
}

/// # Safety
/// As [`bpf`]; and the command must be one that gives a descriptor.
unsafe fn bpf_open<T>(command: u32, arguments: &T) -> io::Result<OwnedFd> {
    // SAFETY: as the caller promises.
    let descriptor = unsafe { bpf(command, arguments) }?;
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as RawFd) })
}

/// # Safety
/// `T` must begin as `union bpf_attr` does for this command, without padding, and its pointers must be valid for it.
unsafe fn bpf<T>(command: u32, arguments: &T) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads no more than the length that it is told; the rest is the caller's promise.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(arguments),
            size_of::<T>(),
        )
    };
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}
