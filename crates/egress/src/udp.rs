//! Datagrams of guests other than DNS: each pair of a guest's port and a destination is a flow with a socket of its own
//! towards the world, allowed by a rule about addresses.
//!
//! What must hold: nothing is sent that the policy does not allow at that moment; answers reach only the guest that asked
//! and come from where it sent to; flows are bounded for each sandbox, and end when nothing moves.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use atoll_policy::{Decision, Flow, FlowKind, Name};
use atoll_types::{EgressVerdict, Protocol};
use tokio::net::UdpSocket;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::Shared;
use crate::datagram::{Arrival, Datagrams};
use crate::dial::DialError;
use crate::dns::Target;
use crate::events::{EgressProtocol, EventKind, Note};
use crate::limits::{Direction, Exhausted, Meter, Opened, Place};
use crate::tenants::{DATAGRAM_FLOWS, TenantState};

/// The longest datagram that is relayed.
const LONGEST: usize = 65_535;
/// Datagrams that wait while a flow is being opened; more are lost.
const WAITING: usize = 16;

type Key = (SocketAddr, SocketAddr);
type Flows = Arc<Mutex<HashMap<Key, mpsc::Sender<Vec<u8>>>>>;

/// Relays what arrives until it is dropped.
pub(crate) async fn relay(shared: Arc<Shared>, socket: Datagrams) {
    let flows = Flows::default();
    let mut tasks = JoinSet::new();
    let mut buffer = vec![0; LONGEST];
    loop {
        let arrival = tokio::select! {
            arrival = socket.receive(&mut buffer) => arrival,
            Some(_) = tasks.join_next() => continue,
        };
        let arrival = match arrival {
            Ok(arrival) => arrival,
            Err(error) => {
                tracing::debug!(%error, "a datagram could not be received");
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let Some(tenant) = shared.tenants.of(arrival.source.ip()) else {
            continue;
        };
        let Arrival {
            len,
            source,
            destination,
        } = arrival;
        let destination = shared.origin.of(destination, source);
        let key = (source, destination);
        let datagram = &buffer[..len];
        if let Some(flow) = flows.lock().get(&key) {
            // A flow that cannot keep up loses datagrams, as any network would.
            let _ = flow.try_send(datagram.to_vec());
            continue;
        }
        let Some(open) = admitted(&shared, &tenant, destination) else {
            continue;
        };
        let (sender, receiver) = mpsc::channel(WAITING);
        let _ = sender.try_send(datagram.to_vec());
        flows.lock().insert(key, sender);
        let (shared, flows) = (Arc::clone(&shared), Arc::clone(&flows));
        tasks.spawn(async move {
            let _entry = Entry { flows, key };
            let _open = open;
            tokio::select! {
                () = run(&shared, &tenant, key, receiver) => {}
                () = tenant.gone() => {}
            }
        });
    }
}

/// What a flow holds while it lasts: of its sandbox, and of the host.
type Held = (OwnedSemaphorePermit, Opened, Place);

/// Forgets a flow when it ends, however it ends.
struct Entry {
    flows: Flows,
    key: Key,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.flows.lock().remove(&self.key);
    }
}

/// Whether the policy allows a datagram of this flow now, and there is room for it. Asked before anything is made for
/// it, because a refused datagram must cost next to nothing.
fn admitted(shared: &Shared, tenant: &Arc<TenantState>, destination: SocketAddr) -> Option<Held> {
    let note = |decision: &Decision, name: Option<&Name>, address: Option<IpAddr>| {
        tenant.events.note(Note::decided(
            decision,
            EgressProtocol::Udp,
            name.map(Name::as_str),
            address,
            destination.port(),
        ));
    };
    let (name, address) = target(tenant, destination)?;
    let decision = tenant
        .policy()
        .connect(&flow(destination.port(), name.as_ref(), address));
    // A name may still be allowed by its addresses; those are asked for when it is dialled.
    if !decision.is_allowed() && (address.is_some() || !tenant.policy().name(name.as_ref()?).is_allowed()) {
        note(&decision, name.as_ref(), address);
        return None;
    }
    let Some(room) = tenant.datagram_room() else {
        let reason =
            format!("the sandbox has {DATAGRAM_FLOWS} flows of datagrams, which is the limit; close some");
        let decision = Decision {
            verdict: EgressVerdict::Denied,
            rule: "limits: udp".into(),
            reason,
        };
        note(&decision, name.as_ref(), address);
        return None;
    };
    let open = tenant.allowance.open(shared.total.crowded());
    match open.and_then(|open| Ok((open, shared.total.place(&tenant.now().project)?))) {
        Ok((open, total)) => Some((room, open, total)),
        Err(exhausted) => {
            note(&exhausted.decision(), name.as_ref(), address);
            None
        }
    }
}

/// What a destination is: a name, or a real address; `None` where it was a name that is forgotten.
fn target(tenant: &TenantState, destination: SocketAddr) -> Option<(Option<Name>, Option<IpAddr>)> {
    match tenant.names.target(destination.ip()) {
        Target::Name(name) => Some((Some(name), None)),
        Target::Address(address) => Some((None, Some(address))),
        Target::Forgotten => None,
    }
}

fn flow(port: u16, name: Option<&Name>, address: Option<IpAddr>) -> Flow<'_> {
    Flow {
        protocol: Protocol::Udp,
        port,
        name,
        address,
        kind: FlowKind::Opaque,
        claimed: None,
    }
}

/// One flow, from its first datagram to the end.
async fn run(
    shared: &Shared,
    tenant: &Arc<TenantState>,
    (source, destination): Key,
    mut waiting: mpsc::Receiver<Vec<u8>>,
) {
    let mut changes = tenant.changes();
    let Some((name, address)) = target(tenant, destination) else {
        return;
    };
    let port = destination.port();
    let note = |kind, decision: &Decision, address| Note {
        kind,
        ..Note::decided(
            decision,
            EgressProtocol::Udp,
            name.as_ref().map(Name::as_str),
            address,
            port,
        )
    };
    let dialled = shared
        .dialer
        .datagrams(tenant, &flow(port, name.as_ref(), address))
        .await;
    let (world, dialled, decision) = match dialled {
        Ok(dialled) => dialled,
        Err(DialError::Denied { decision, address }) => {
            tenant.events.note(note(EventKind::Decided, &decision, address));
            return;
        }
        Err(error) => {
            tracing::debug!(%error, "a datagram could not be relayed");
            return;
        }
    };
    let back = match shared.answers.from(destination).and_then(nonblocking) {
        Ok(back) => back,
        Err(error) => {
            tracing::warn!(%error, "no socket to answer a guest's datagrams");
            return;
        }
    };
    tenant
        .events
        .note(note(EventKind::Decided, &decision, Some(dialled)));
    let meter = Meter::new(Arc::clone(&tenant.allowance));
    let pump = Pump {
        world: &world,
        back: &back,
        source,
        meter: &meter,
        idle: shared.config.timeouts.udp_idle,
    };
    let still = || tenant.policy().connect(&flow(port, name.as_ref(), Some(dialled)));
    let mut closing = Closing {
        tenant,
        meter: &meter,
        note: Some(note(EventKind::Closed, &decision, Some(dialled))),
    };
    let mut end = decision;
    loop {
        tokio::select! {
            biased;
            Ok(()) = changes.changed() => {
                let now = still();
                if !now.is_allowed() {
                    end = now;
                    break;
                }
            }
            turn = pump.turn(&mut waiting) => if let Err(over) = turn {
                match over {
                    Over::Idle => "nothing moved for a while".clone_into(&mut end.reason),
                    Over::Exhausted(exhausted) => end = exhausted.decision(),
                }
                break;
            },
        }
    }
    closing.note = Some(note(EventKind::Closed, &end, Some(dialled)));
}

/// Tells the end of a flow, with its bytes, however it comes.
struct Closing<'a> {
    tenant: &'a TenantState,
    meter: &'a Meter,
    note: Option<Note>,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        if let Some(note) = self.note.take() {
            self.tenant.events.note(Note {
                bytes_up: self.meter.up(),
                bytes_down: self.meter.down(),
                ..note
            });
        }
    }
}

fn nonblocking(socket: std::net::UdpSocket) -> io::Result<UdpSocket> {
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket)
}

struct Pump<'a> {
    world: &'a UdpSocket,
    back: &'a UdpSocket,
    source: SocketAddr,
    meter: &'a Meter,
    idle: Duration,
}

/// Why a flow ends.
enum Over {
    Idle,
    Exhausted(Exhausted),
}

impl Pump<'_> {
    /// Relays one datagram in either direction.
    async fn turn(&self, waiting: &mut mpsc::Receiver<Vec<u8>>) -> Result<(), Over> {
        let (direction, len) = tokio::select! {
            datagram = waiting.recv() => {
                let datagram = datagram.ok_or(Over::Idle)?;
                // Nobody may listen there; that is the guest's business.
                let _ = self.world.send(&datagram).await;
                (Direction::Up, datagram.len())
            }
            readable = self.world.readable() => {
                readable.map_err(|_| Over::Idle)?;
                let mut buffer = vec![0; LONGEST];
                match self.world.try_recv(&mut buffer) {
                    Ok(len) => {
                        let _ = self.back.send_to(&buffer[..len], self.source).await;
                        (Direction::Down, len)
                    }
                    // Also "port unreachable", which the guest would only see if it asked.
                    Err(_) => return Ok(()),
                }
            }
            () = sleep_until(Instant::now() + self.idle) => return Err(Over::Idle),
        };
        if let Some(until) = self.meter.count(direction, len).map_err(Over::Exhausted)? {
            sleep_until(until).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::testing::{Guest, World};

    use super::*;

    const GUEST: Guest = Guest(1);

    fn allow_udp(to: &str, port: u16) -> serde_json::Value {
        json!({ "rules": [{ "action": "allow", "to": to, "ports": [port], "protocol": "udp" }] })
    }

    #[tokio::test]
    async fn datagrams_pass_by_a_rule_about_addresses_and_answers_come_back() {
        let world = World::new().await;
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let to = server.local_addr().unwrap();
        world.admit(GUEST, &allow_udp("127.0.0.1", to.port()));
        let guest = world.datagrams(GUEST, to).await;
        let mut buffer = [0; 64];
        for n in 0..3_u8 {
            guest.send_to(&[n; 10], world.relay()).await.unwrap();
            let (len, from) = server.recv_from(&mut buffer).await.unwrap();
            assert_eq!(buffer[..len], [n; 10]);
            server.send_to(&[n; 20], from).await.unwrap();
            let (len, _) = guest.recv_from(&mut buffer).await.unwrap();
            assert_eq!(buffer[..len], [n; 20]);
        }
        // A narrower policy ends it; what then comes is refused.
        world.admit(GUEST, &json!({}));
        let event = world.seen.find(|event| event.kind == EventKind::Closed).await;
        assert_eq!((event.bytes_up, event.bytes_down), (30, 60));
        assert_eq!(event.verdict, EgressVerdict::Denied);
        guest.send_to(b"again", world.relay()).await.unwrap();
        let refused = world
            .seen
            .find(|event| event.kind == EventKind::Decided && event.verdict == EgressVerdict::Denied)
            .await;
        assert_eq!(refused.address, Some(to.ip()));
    }

    #[tokio::test]
    async fn nothing_else_passes() {
        let world = World::new().await;
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let to = server.local_addr().unwrap();
        world.admit(
            GUEST,
            &json!({ "rules": [
                { "action": "allow", "to": "127.0.0.1" },
                { "action": "allow", "to": "0.0.0.0/0", "protocol": "udp" },
            ]}),
        );
        for (address, rule) in [
            ("10.0.0.1:5000", "floor"),
            ("169.254.169.254:123", "floor"),
            ("127.0.0.1:443", "protocol"),
            ("127.0.0.1:5353", "protocol"),
        ] {
            let guest = world.datagrams(GUEST, address.parse().unwrap()).await;
            guest.send_to(b"x", world.relay()).await.unwrap();
            let port = address.rsplit(':').next().unwrap().parse::<u16>().unwrap();
            let event = world.seen.find(|event| event.port == port).await;
            assert_eq!(event.verdict, EgressVerdict::Denied);
            assert!(event.rule.starts_with(rule), "{address}: {}", event.rule);
        }
        // Over TCP it is allowed, over UDP to this address too: the rule about all addresses.
        let guest = world.datagrams(GUEST, to).await;
        guest.send_to(b"y", world.relay()).await.unwrap();
        let mut buffer = [0; 8];
        let (len, _) = server.recv_from(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..len], b"y");
    }

    #[tokio::test]
    async fn the_host_itself_is_not_reached() {
        let world = World::new().await;
        let server = UdpSocket::bind("127.0.0.2:0").await.unwrap();
        let to = server.local_addr().unwrap();
        world.admit(GUEST, &allow_udp("127.0.0.0/8", to.port()));
        let guest = world.datagrams(GUEST, to).await;
        guest.send_to(b"x", world.relay()).await.unwrap();
        let event = world.seen.find(|event| event.port == to.port()).await;
        assert_eq!(event.rule, "floor: own address");
        assert!(server.try_recv(&mut [0; 8]).is_err());
    }

    #[tokio::test]
    async fn flows_are_bounded() {
        let world = World::new().await;
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let to = server.local_addr().unwrap();
        world.admit(GUEST, &allow_udp("127.0.0.1", to.port()));
        let mut buffer = [0; 8];
        let mut held = Vec::new();
        for _ in 0..DATAGRAM_FLOWS {
            let guest = world.datagrams(GUEST, to).await;
            guest.send_to(b"x", world.relay()).await.unwrap();
            server.recv_from(&mut buffer).await.unwrap();
            held.push(guest);
        }
        let guest = world.datagrams(GUEST, to).await;
        guest.send_to(b"x", world.relay()).await.unwrap();
        let event = world.seen.find(|event| event.rule == "limits: udp").await;
        assert_eq!(event.verdict, EgressVerdict::Denied);
    }
}
