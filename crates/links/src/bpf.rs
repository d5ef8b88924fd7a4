//! The two programs that the kernel runs on guests' packets, and the little assembler that they are written in.
//!
//! ```text
//!   packet ──> [source check, at the link's end] ──> known connection? ──no──> [socket choice] ──> listener, DNS, relay
//! ```
//! What must hold:
//! - No packet gets past the source check unless it is whole, TCP or UDP, comes from the address of its link's slot, and
//!   goes to a unicast address. It looks at *every* packet, not just at first ones, so that no guest can inject into the
//!   connection of another; nor can it by ICMP errors, of which none are taken. Nobody resolves neighbours on a link, so
//!   ARP and neighbour discovery end here too.
//! - The check is part of the link and outlives the server; the choice ends with it, and then nothing is found.
//! - UDP to port 443 (QUIC) finds no socket, so that the kernel refuses it at once and clients fall back to TCP.
//! - All guests share the queues of a few sockets, so what one of them may put there is bounded at its own link, before it is
//!   there: a flood is dropped where it begins and takes no place that a neighbour needs.
//!
//! Helpers that only programs under the GPL may call are not needed.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::slot::{FIRST_INDEX, FIRST_V4, FIRST_V6, Slot};
use crate::sys::{self, Purpose};

/// Places in the table of sockets; for IPv6 the one behind.
pub(crate) const TCP: u32 = 0;
pub(crate) const DNS: u32 = 2;
pub(crate) const UDP: u32 = 4;
pub(crate) const SOCKETS: u32 = 6;

const PORT_DNS: i32 = 53;
const PORT_QUIC: i32 = 443;

/// What a link may put into a queue that all share: so many a second, so many at once after a pause, and what each byte
/// costs beside. The times are in nanoseconds; a link that has used up its time is not heard until it has passed.
#[derive(Debug, Clone, Copy)]
struct Rate {
    /// Where in a link's record its time is.
    place: i16,
    each: i32,
    byte: i32,
    at_once: i32,
}

const SECOND: i32 = 1_000_000_000;
/// The proxy answers fewer than these, and says so to the rest.
const QUESTIONS: Rate = Rate {
    place: 0,
    each: SECOND / 256,
    byte: 0,
    at_once: 2 * SECOND,
};
/// 10,000 a second and 50 MB, a tenth of it at once.
const DATAGRAMS: Rate = Rate {
    place: 8,
    each: SECOND / 10_000,
    byte: 20,
    at_once: SECOND / 10,
};
/// Packets that begin a connection.
const BEGINNINGS: Rate = Rate {
    place: 16,
    each: SECOND / 4_000,
    byte: 0,
    at_once: SECOND / 2,
};
const RECORD_BYTES: u32 = 24;
/// The longest packet with a question in it: no proxy reads a longer one.
const LONGEST_QUESTION: i32 = 14 + 60 + 8 + 1232;

/// Loads the source check.
pub(crate) fn source_check() -> io::Result<OwnedFd> {
    let records = sys::array_map(u32::from(Slot::COUNT) + 1, RECORD_BYTES)?;
    // The program keeps the records.
    sys::load_program(Purpose::Ingress, &source_check_code(records.as_fd()).finish())
}

/// Loads the socket choice, from this table.
pub(crate) fn socket_choice(map: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    sys::load_program(Purpose::SocketLookup, &socket_choice_code(map).finish())
}

fn source_check_code(records: BorrowedFd<'_>) -> Code {
    // struct __sk_buff
    const LENGTH: i16 = 0;
    const PROTOCOL: i16 = 16;
    const INDEX: i16 = 40;
    // Of the protocol, as it is in the packet.
    const IPV4: i32 = 0x0800_u16.to_be() as i32;
    const IPV6: i32 = 0x86dd_u16.to_be() as i32;
    // What is looked at, from the start of the Ethernet header: of IPv4 what says whether it is a fragment, the protocol and
    // the addresses; of IPv6 the protocol (or extension) and the addresses.
    const V4_FIELDS: i32 = 14 + 6;
    const V6_FIELDS: i32 = 14 + 6;
    // Below the frame pointer: the slot, what these are copied to, so that the source is aligned, and what else is looked at.
    const SLOT: i16 = -4;
    const COPY: i16 = -26;
    const MORE: i16 = -32;
    const V4_PROTOCOL: i16 = COPY + 3;
    const V4_SOURCE: i16 = COPY + 6;
    const V4_DESTINATION: i16 = COPY + 10;
    const V6_PROTOCOL: i16 = COPY;
    const V6_SOURCE: i16 = COPY + 2;
    const V6_DESTINATION: i16 = COPY + 18;
    const FRAGMENT: i32 = 0x3fff_u16.to_be() as i32;
    const PASS: i32 = 0;
    const DROP: i32 = 2;
    // Of the header behind.
    const UDP_DESTINATION: i32 = 2;
    const TCP_FLAGS: i32 = 13;
    const SYN: i32 = 0x02;
    const SYN_AND_ACK: i32 = 0x12;
    const DNS_PORT: i32 = (PORT_DNS as u16).to_be() as i32;
    const MAP_LOOKUP: i32 = 1;
    const KTIME: i32 = 5;
    let network = FIRST_V6.octets();
    let network = u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|at: usize| network[at]));

    let mut code = Code::default();
    code.copy(R6, R1)
        .load32(R7, R6, INDEX)
        .add32(R7, -(FIRST_INDEX as i32)) // the slot
        .store32(FRAME, SLOT, R7)
        .load32(R2, R6, PROTOCOL)
        .jump_if_equal(R2, IPV4, "IPv4")
        .jump_if_equal(R2, IPV6, "IPv6")
        .jump("drop");
    code.label("IPv4")
        .copy_packet(V4_FIELDS, COPY, 11)
        .jump_unless_equal(R0, 0, "drop")
        .load16(R1, FRAME, COPY)
        .and(R1, FRAGMENT)
        .jump_unless_equal(R1, 0, "drop")
        .load32(R1, FRAME, V4_SOURCE)
        .network_to_host32(R1)
        .add32(R7, FIRST_V4.to_bits() as i32)
        .jump_unless_same32(R1, R7, "drop")
        .load8(R1, FRAME, V4_DESTINATION)
        .jump_if_at_least(R1, 224, "drop")
        .copy_packet(14, MORE, 1)
        .jump_unless_equal(R0, 0, "drop")
        .load8(R8, FRAME, MORE)
        .and(R8, 0x0f)
        .shift_left(R8, 2)
        .add(R8, 14) // where the next header is
        .load8(R1, FRAME, V4_PROTOCOL)
        .jump("protocol");
    code.label("IPv6")
        .copy_packet(V6_FIELDS, COPY, 19)
        .jump_unless_equal(R0, 0, "drop")
        .load64(R1, FRAME, V6_SOURCE)
        .set64(R2, network)
        .jump_unless_same(R1, R2, "drop")
        .load32(R1, FRAME, V6_SOURCE + 8)
        .jump_unless_equal(R1, 0, "drop")
        .load32(R1, FRAME, V6_SOURCE + 12)
        .network_to_host32(R1)
        .jump_unless_same32(R1, R7, "drop")
        .load8(R1, FRAME, V6_DESTINATION)
        .jump_if_equal(R1, 0xff, "drop")
        .set(R8, 14 + 40)
        .load8(R1, FRAME, V6_PROTOCOL);
    code.label("protocol")
        .jump_if_equal(R1, libc::IPPROTO_TCP, "TCP")
        .jump_unless_equal(R1, libc::IPPROTO_UDP, "drop");
    code.copy_packet_from(R8, UDP_DESTINATION, MORE, 2)
        .jump_unless_equal(R0, 0, "drop")
        .load16(R1, FRAME, MORE)
        .load32(R7, R6, LENGTH)
        .jump_if_equal(R1, DNS_PORT, "question")
        .multiply(R7, DATAGRAMS.byte)
        .charge(&DATAGRAMS)
        .jump("charge");
    code.label("question")
        .jump_if_at_least(R7, LONGEST_QUESTION + 1, "drop")
        .set(R7, 0)
        .charge(&QUESTIONS)
        .jump("charge");
    code.label("TCP")
        .copy_packet_from(R8, TCP_FLAGS, MORE, 1)
        .jump_unless_equal(R0, 0, "drop")
        .load8(R1, FRAME, MORE)
        .and(R1, SYN_AND_ACK)
        .jump_unless_equal(R1, SYN, "pass")
        .set(R7, 0)
        .charge(&BEGINNINGS);
    // R7: what it costs; R8: how much may be owed; R9: where in the record.
    code.label("charge")
        .set_map(R1, records)
        .copy(R2, FRAME)
        .add(R2, i32::from(SLOT))
        .call(MAP_LOOKUP)
        .jump_if_equal(R0, 0, "drop")
        .copy(R6, R0)
        .add_register(R6, R9)
        .call(KTIME)
        .load64(R1, R6, 0) // when all before is paid for
        .jump_if_no_less(R1, R0, "owes")
        .copy(R1, R0);
    code.label("owes")
        .add_register(R1, R7)
        .add_register(R0, R8)
        .jump_if_greater(R1, R0, "drop")
        // Two processors at once may lose one of their charges: the bound is that much less exact.
        .store64(R6, 0, R1);
    code.label("pass").set(R0, PASS).exit();
    code.label("drop").set(R0, DROP).exit();
    code
}

fn socket_choice_code(map: BorrowedFd<'_>) -> Code {
    // struct bpf_sk_lookup
    const FAMILY: i16 = 8;
    const PROTOCOL: i16 = 12;
    const PORT: i16 = 60;
    const KEY: i16 = -4;
    const MAP_LOOKUP: i32 = 1;
    const SOCKET_RELEASE: i32 = 86;
    const SOCKET_ASSIGN: i32 = 124;
    // "As if there were no program": if none was assigned, nothing listens there.
    const PASS: i32 = 1;

    let mut code = Code::default();
    code.copy(R6, R1)
        .load32(R2, R6, PROTOCOL)
        .set(R7, TCP as i32)
        .jump_if_equal(R2, libc::IPPROTO_TCP, "family")
        .jump_unless_equal(R2, libc::IPPROTO_UDP, "end")
        .load32(R2, R6, PORT)
        .jump_if_equal(R2, PORT_QUIC, "end")
        .set(R7, DNS as i32)
        .jump_if_equal(R2, PORT_DNS, "family")
        .set(R7, UDP as i32);
    code.label("family")
        .load32(R2, R6, FAMILY)
        .jump_if_equal(R2, libc::AF_INET, "look up")
        .add32(R7, 1);
    code.label("look up")
        .store32(FRAME, KEY, R7)
        .set_map(R1, map)
        .copy(R2, FRAME)
        .add(R2, i32::from(KEY))
        .call(MAP_LOOKUP)
        .jump_if_equal(R0, 0, "end")
        .copy(R7, R0)
        .copy(R1, R6)
        .copy(R2, R7)
        .set(R3, 0)
        .call(SOCKET_ASSIGN)
        .copy(R1, R7)
        .call(SOCKET_RELEASE);
    code.label("end").set(R0, PASS).exit();
    code
}

/// R0: results. R1 to R5: arguments, lost in calls. R6 to R9: kept. At the start, R1 is the packet or the lookup.
#[derive(Debug, Clone, Copy)]
struct Register(u8);
const R0: Register = Register(0);
const R1: Register = Register(1);
const R2: Register = Register(2);
const R3: Register = Register(3);
const R4: Register = Register(4);
const R6: Register = Register(6);
const R7: Register = Register(7);
const R8: Register = Register(8);
const R9: Register = Register(9);
const FRAME: Register = Register(10);

/// A program that is being written.
#[derive(Debug, Default)]
struct Code {
    instructions: Vec<u64>,
    labels: HashMap<&'static str, usize>,
    /// Instructions that jump, and where to.
    jumps: Vec<(usize, &'static str)>,
}

impl Code {
    fn put(&mut self, code: u8, to: Register, from: Register, offset: i16, value: i32) -> &mut Self {
        // As `struct bpf_insn` lies in memory.
        let [offset0, offset1] = offset.to_ne_bytes();
        let [value0, value1, value2, value3] = value.to_ne_bytes();
        let registers = match cfg!(target_endian = "little") {
            true => to.0 | from.0 << 4,
            false => to.0 << 4 | from.0,
        };
        self.instructions.push(u64::from_ne_bytes([
            code, registers, offset0, offset1, value0, value1, value2, value3,
        ]));
        self
    }

    fn put_jump(&mut self, code: u8, a: Register, b: Register, value: i32, label: &'static str) -> &mut Self {
        self.jumps.push((self.instructions.len(), label));
        self.put(code, a, b, 0, value)
    }

    /// The next instruction is what jumps to this label lead to.
    fn label(&mut self, label: &'static str) -> &mut Self {
        self.labels.insert(label, self.instructions.len());
        self
    }

    fn set(&mut self, to: Register, value: i32) -> &mut Self {
        self.put(0xb7, to, R0, 0, value)
    }

    fn set64(&mut self, to: Register, value: u64) -> &mut Self {
        self.put(0x18, to, R0, 0, value as i32)
            .put(0, R0, R0, 0, (value >> 32) as i32)
    }

    fn set_map(&mut self, to: Register, map: BorrowedFd<'_>) -> &mut Self {
        const BPF_PSEUDO_MAP_FD: Register = Register(1);
        self.put(0x18, to, BPF_PSEUDO_MAP_FD, 0, map.as_raw_fd())
            .put(0, R0, R0, 0, 0)
    }

    fn copy(&mut self, to: Register, from: Register) -> &mut Self {
        self.put(0xbf, to, from, 0, 0)
    }

    fn add(&mut self, to: Register, value: i32) -> &mut Self {
        self.put(0x07, to, R0, 0, value)
    }

    fn add_register(&mut self, to: Register, from: Register) -> &mut Self {
        self.put(0x0f, to, from, 0, 0)
    }

    fn multiply(&mut self, to: Register, value: i32) -> &mut Self {
        self.put(0x27, to, R0, 0, value)
    }

    fn shift_left(&mut self, to: Register, bits: i32) -> &mut Self {
        self.put(0x67, to, R0, 0, bits)
    }

    /// What "charge" needs, with what the length costs in R7.
    fn charge(&mut self, rate: &Rate) -> &mut Self {
        self.add(R7, rate.each)
            .set(R8, rate.at_once)
            .set(R9, i32::from(rate.place))
    }

    fn and(&mut self, to: Register, value: i32) -> &mut Self {
        self.put(0x57, to, R0, 0, value)
    }

    /// With a carry that is lost, and the upper half cleared.
    fn add32(&mut self, to: Register, value: i32) -> &mut Self {
        self.put(0x04, to, R0, 0, value)
    }

    fn network_to_host32(&mut self, to: Register) -> &mut Self {
        self.put(0xdc, to, R0, 0, 32)
    }

    fn load8(&mut self, to: Register, base: Register, offset: i16) -> &mut Self {
        self.put(0x71, to, base, offset, 0)
    }

    fn load16(&mut self, to: Register, base: Register, offset: i16) -> &mut Self {
        self.put(0x69, to, base, offset, 0)
    }

    fn load32(&mut self, to: Register, base: Register, offset: i16) -> &mut Self {
        self.put(0x61, to, base, offset, 0)
    }

    fn load64(&mut self, to: Register, base: Register, offset: i16) -> &mut Self {
        self.put(0x79, to, base, offset, 0)
    }

    fn store32(&mut self, base: Register, offset: i16, from: Register) -> &mut Self {
        self.put(0x63, base, from, offset, 0)
    }

    fn store64(&mut self, base: Register, offset: i16, from: Register) -> &mut Self {
        self.put(0x7b, base, from, offset, 0)
    }

    fn jump(&mut self, label: &'static str) -> &mut Self {
        self.put_jump(0x05, R0, R0, 0, label)
    }

    fn jump_if_equal(&mut self, a: Register, value: i32, label: &'static str) -> &mut Self {
        self.put_jump(0x15, a, R0, value, label)
    }

    fn jump_unless_equal(&mut self, a: Register, value: i32, label: &'static str) -> &mut Self {
        self.put_jump(0x55, a, R0, value, label)
    }

    fn jump_if_at_least(&mut self, a: Register, value: i32, label: &'static str) -> &mut Self {
        self.put_jump(0x35, a, R0, value, label)
    }

    /// Without sign, as all comparisons here.
    fn jump_if_greater(&mut self, a: Register, b: Register, label: &'static str) -> &mut Self {
        self.put_jump(0x2d, a, b, 0, label)
    }

    fn jump_if_no_less(&mut self, a: Register, b: Register, label: &'static str) -> &mut Self {
        self.put_jump(0x3d, a, b, 0, label)
    }

    fn jump_unless_same(&mut self, a: Register, b: Register, label: &'static str) -> &mut Self {
        self.put_jump(0x5d, a, b, 0, label)
    }

    /// Of the lower halves.
    fn jump_unless_same32(&mut self, a: Register, b: Register, label: &'static str) -> &mut Self {
        self.put_jump(0x5e, a, b, 0, label)
    }

    fn call(&mut self, helper: i32) -> &mut Self {
        self.put(0x85, R0, R0, 0, helper)
    }

    /// Copies bytes of the packet (R6) below the frame pointer; R0 is 0 if it has that many. (Only a copy reaches all of a
    /// packet: how much of it lies in one piece is up to whoever sent it.)
    fn copy_packet(&mut self, at: i32, below: i16, bytes: i32) -> &mut Self {
        self.set(R2, at).copy_bytes(below, bytes)
    }

    /// The same from a place that is counted from another.
    fn copy_packet_from(&mut self, base: Register, at: i32, below: i16, bytes: i32) -> &mut Self {
        self.copy(R2, base).add(R2, at).copy_bytes(below, bytes)
    }

    fn copy_bytes(&mut self, below: i16, bytes: i32) -> &mut Self {
        const SKB_LOAD_BYTES: i32 = 26;
        self.copy(R1, R6)
            .copy(R3, FRAME)
            .add(R3, i32::from(below))
            .set(R4, bytes)
            .call(SKB_LOAD_BYTES)
    }

    fn exit(&mut self) -> &mut Self {
        self.put(0x95, R0, R0, 0, 0)
    }

    fn finish(mut self) -> Vec<u64> {
        for (from, label) in self.jumps {
            let to = self.labels[label];
            let distance = (to as isize - from as isize - 1) as i16;
            let mut bytes = self.instructions[from].to_ne_bytes();
            bytes[2..4].copy_from_slice(&distance.to_ne_bytes());
            self.instructions[from] = u64::from_ne_bytes(bytes);
        }
        self.instructions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_takes_both_programs() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED, programs are NOT loaded here: needs root");
            return;
        }
        source_check().unwrap();
        socket_choice(sys::socket_map(SOCKETS).unwrap().as_fd()).unwrap();
    }

    #[test]
    fn a_refused_program_brings_the_verifiers_reason() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED, programs are NOT loaded here: needs root");
            return;
        }
        let mut code = Code::default();
        code.copy(R0, R7).exit();
        let error = sys::load_program(Purpose::Ingress, &code.finish()).unwrap_err();
        assert!(error.to_string().contains("R7 !read_ok"), "{error}");
    }

    #[test]
    fn jumps_lead_to_their_labels() {
        let mut code = Code::default();
        code.jump("end").set64(R1, 1).label("back").exit();
        code.label("end").jump("back");
        let code = code.finish();
        let distance = |at: usize| {
            let bytes = code[at].to_ne_bytes();
            i16::from_ne_bytes([bytes[2], bytes[3]])
        };
        assert_eq!((code.len(), distance(0), distance(4)), (5, 3, -2));
    }
}
