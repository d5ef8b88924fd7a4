//! What the guest sees of itself: memory, disk, processes, load, and who listens on which port.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use atoll_guest_protocol::{GuestUsage, ListeningPort};

/// What cannot be found out is 0.
pub(crate) fn usage() -> GuestUsage {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let mut usage = GuestUsage {
        memory_total_bytes: memory_line(&memory, "MemTotal:"),
        memory_available_bytes: memory_line(&memory, "MemAvailable:"),
        processes: processes(),
        load_1m_milli: load(&fs::read_to_string("/proc/loadavg").unwrap_or_default()),
        ..GuestUsage::default()
    };
    if let Ok(disk) = rustix::fs::statvfs("/") {
        usage.disk_total_bytes = disk.f_blocks.saturating_mul(disk.f_frsize);
        usage.disk_used_bytes = disk
            .f_blocks
            .saturating_sub(disk.f_bfree)
            .saturating_mul(disk.f_frsize);
    }
    usage
}

/// Every TCP socket that listens, each port and address once. Bounded: a guest may open many.
pub(crate) fn ports() -> Vec<ListeningPort> {
    const MOST: usize = 1024;
    let mut found: Vec<(u16, IpAddr)> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .flat_map(|path| {
            let table = fs::read_to_string(path).unwrap_or_default();
            table.lines().skip(1).filter_map(listener).collect::<Vec<_>>()
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found.truncate(MOST);
    found
        .into_iter()
        .map(|(port, address)| ListeningPort {
            port,
            address: address.to_string(),
        })
        .collect()
}

fn memory_line(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .map_or(0, |kilobytes| kilobytes.saturating_mul(1024))
}

fn load(text: &str) -> u32 {
    let first = text.split_whitespace().next().unwrap_or("0");
    let (whole, fraction) = first.split_once('.').unwrap_or((first, "0"));
    let whole: u32 = whole.parse().unwrap_or(0);
    let milli: u32 = format!("{fraction:0<3}")[..3].parse().unwrap_or(0);
    whole.saturating_mul(1000).saturating_add(milli)
}

fn processes() -> u32 {
    let numbers = fs::read_dir("/proc").map_or(0, |entries| {
        entries
            .flatten()
            .filter(|entry| {
                entry
                    .file_name()
                    .as_encoded_bytes()
                    .iter()
                    .all(u8::is_ascii_digit)
            })
            .count()
    });
    u32::try_from(numbers).unwrap_or(u32::MAX)
}

/// A line of `/proc/net/tcp`: `0: 0100007F:1F90 00000000:0000 0A ...`; state 0A listens.
fn listener(line: &str) -> Option<(u16, IpAddr)> {
    let mut fields = line.split_whitespace();
    let (address, port) = fields.nth(1)?.split_once(':')?;
    if fields.nth(1)? != "0A" {
        return None;
    }
    let words: Vec<u32> = (0..address.len() / 8)
        .map(|word| address.get(word * 8..word * 8 + 8))
        .map(|word| u32::from_str_radix(word?, 16).ok())
        .collect::<Option<_>>()?;
    // The kernel prints each 32-bit word in the machine's byte order.
    let address = match *words {
        [word] => IpAddr::V4(Ipv4Addr::from(word.to_ne_bytes())),
        [a, b, c, d] => {
            let mut bytes = [0; 16];
            for (at, word) in [a, b, c, d].into_iter().enumerate() {
                bytes[at * 4..at * 4 + 4].copy_from_slice(&word.to_ne_bytes());
            }
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some((u16::from_str_radix(port, 16).ok()?, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_found_in_the_kernels_table() {
        let v4 = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 1 1";
        assert_eq!(listener(v4), Some((8080, IpAddr::V4(Ipv4Addr::LOCALHOST))));
        let v6 = "   1: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0";
        assert_eq!(listener(v6), Some((80, IpAddr::V6(Ipv6Addr::LOCALHOST))));
        assert_eq!(listener(&v4.replace("0A", "01")), None);
        for bad in [
            "",
            "x",
            "0: zz:1 y 0A",
            "0: 0100007F 0 0A",
            "0: 0100007é:1F90 0 0A",
        ] {
            assert_eq!(listener(bad), None, "{bad}");
        }
    }

    #[test]
    fn numbers_of_proc() {
        assert_eq!(
            memory_line("MemTotal:  16 kB\nMemAvailable: 8 kB\n", "MemAvailable:"),
            8192
        );
        assert_eq!(memory_line("nonsense", "MemTotal:"), 0);
        assert_eq!(load("1.25 0.5 0.1 1/2 3"), 1250);
        assert_eq!(load("garbage"), 0);
        assert_eq!(load("0.é"), 0);
    }
}
