//! One connection: what it is, whether it may be, and then either copied or read.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use atoll_policy::{Decision, Flow, FlowKind, Name, RuleName};
use atoll_types::{EgressVerdict, Protocol};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use super::classify::{CLIENT_FIRST, First, Gate, SERVER_FIRST, SSL_REQUEST, classify, host_of};
use super::copy::{End, Terms, copy};
use super::hello::Hello;
use super::peek::{Opening, PeekError};
use super::refuse;
use crate::Shared;
use crate::dial::{DialError, Dialled};
use crate::dns::Target;
use crate::events::{EgressProtocol, EventKind, Note};
use crate::intercept::Cut;
use crate::limits::Meter;
use crate::seam;
use crate::sever::{Severable, Severed, reset};
use crate::tenants::TenantState;

/// Names that ECH uses for everybody behind one operator; no site is to be found there.
const ECH_FRONTS: [&str; 1] = ["cloudflare-ech.com"];
/// For a request that is refused anyway, so that it can be answered rather than broken off.
const COURTESY: Duration = Duration::from_secs(1);

/// Where a connection leads and what is known of it.
struct Connection<'a> {
    shared: &'a Arc<Shared>,
    tenant: &'a Arc<TenantState>,
    port: u16,
    changes: watch::Receiver<u64>,
}

/// What it turned out to be.
struct Found {
    name: Option<Name>,
    /// The real address that the guest dialled.
    address: Option<IpAddr>,
    kind: FlowKind,
    claimed: Option<Name>,
    protocol: EgressProtocol,
}

impl Found {
    fn flow(&self, port: u16) -> Flow<'_> {
        Flow {
            protocol: Protocol::Tcp,
            port,
            name: self.name.as_ref(),
            address: self.address,
            kind: self.kind,
            claimed: self.claimed.as_ref(),
        }
    }

    /// Something of which neither the beginning nor a name is known.
    fn opaque(name: Option<Name>, address: Option<IpAddr>) -> Self {
        Self {
            name,
            address,
            kind: FlowKind::Opaque,
            claimed: None,
            protocol: EgressProtocol::Tcp,
        }
    }
}

/// Why a connection goes no further.
enum Refusal {
    Denied(Decision),
    /// It ended by itself before there was anything to decide.
    Gone,
}

pub(super) async fn run(
    shared: &Arc<Shared>,
    tenant: &Arc<TenantState>,
    stream: TcpStream,
    destination: SocketAddr,
) {
    let connection = Connection {
        shared,
        tenant,
        port: destination.port(),
        // Before anything is decided, so that no change is missed.
        changes: tenant.changes(),
    };
    let meter = Meter::new(Arc::clone(&tenant.allowance));
    let mut opening = Opening::new(stream, meter, shared.config.timeouts.peek);
    loop {
        let found = match tenant.names.target(destination.ip()) {
            Target::Name(name) => connection.look(&mut opening, Some(name)).await,
            Target::Forgotten => connection.look(&mut opening, None).await,
            Target::Address(address) => connection.look_at_address(&mut opening, address).await,
        };
        let found = match found {
            Ok(found) => found,
            Err((_, Refusal::Gone)) => return,
            Err((found, Refusal::Denied(decision))) => {
                return connection.refuse(opening, &found, &decision, None).await;
            }
        };
        let read = match found.kind {
            FlowKind::Http => found.name.is_some(),
            FlowKind::Tls => {
                found.claimed.is_some() && found.name.as_ref().is_some_and(|name| connection.inspects(name))
            }
            FlowKind::Opaque => false,
        };
        if read {
            return Box::pin(connection.read(opening, &found)).await;
        }
        match connection.splice(opening, &found).await {
            // It was silent, and speaks now.
            Some(speaking) => opening = speaking,
            None => return,
        }
    }
}

type Looked = Result<Found, (Found, Refusal)>;

impl Connection<'_> {
    fn inspects(&self, name: &Name) -> bool {
        self.tenant.policy().inspects(name, self.port)
    }

    /// What a connection to `name`, or to a name that it has to tell itself, is.
    async fn look(&self, opening: &mut Opening, name: Option<Name>) -> Looked {
        let mut found = Found::opaque(name, None);
        loop {
            let first = match self.first(opening, &found).await {
                Ok(first) => first,
                Err(refusal) => return Err((found, refusal)),
            };
            match first {
                First::More | First::Opaque if found.name.is_some() => return Ok(found),
                First::More | First::Opaque => {
                    let reason = "what the address stood for is no longer known, and the connection does not say; resolve the name again";
                    return Err((found, denied("address", reason)));
                }
                First::Http => return self.look_at_request(opening, found).await,
                First::Tls(hello) => return look_at_hello(found, hello),
                First::BadTls(error) => {
                    found.protocol = EgressProtocol::Tls;
                    let reason = format!("the TLS handshake cannot be trusted: {error}");
                    return Err((found, denied("tls", reason)));
                }
                First::PostgresTls => {
                    if found.protocol == EgressProtocol::Postgres || !answer(opening, b"S").await {
                        return Err((found, Refusal::Gone));
                    }
                    found.protocol = EgressProtocol::Postgres;
                }
                // It then goes on with TLS or without anything.
                First::PostgresGss => {
                    if !answer(opening, b"N").await {
                        return Err((found, Refusal::Gone));
                    }
                }
            }
        }
    }

    /// The first bytes, waited for where they matter. `More` where nothing is clear and it may go on all the same: the
    /// server speaks first, or waits for no more than it got. Whoever passes it on goes on looking.
    async fn first(&self, opening: &mut Opening, found: &Found) -> Result<First, Refusal> {
        let waits_for_server = |name: &Name| SERVER_FIRST.contains(&self.port) && !self.inspects(name);
        if opening.bytes.is_empty() && found.name.as_ref().is_some_and(waits_for_server) {
            return Ok(First::More);
        }
        let mut patient = found.name.is_none() || found.protocol == EgressProtocol::Postgres;
        loop {
            let first = classify(&opening.bytes);
            if first != First::More {
                return Ok(first);
            }
            let more = if patient || !may_be_a_word(&opening.bytes) {
                opening.more().await
            } else {
                match opening.speaks_within(self.shared.config.timeouts.patience).await {
                    Ok(true) => Ok(()),
                    Ok(false) if self.may_be_silent(found).await => return Ok(First::More),
                    Ok(false) => {
                        patient = true;
                        Ok(())
                    }
                    Err(error) => Err(error),
                }
            };
            match more {
                Ok(()) => {}
                Err(PeekError::Full) => {
                    return Err(denied("peek", "its first message is too long to tell what it is"));
                }
                Err(PeekError::Late) => {
                    return Err(denied("peek", "it did not say in time what it is"));
                }
                Err(PeekError::Finished) if opening.bytes.is_empty() => return Err(Refusal::Gone),
                // Some take the end for the end of a line.
                Err(PeekError::Finished) => {
                    return Ok(match Gate::new(&opening.bytes).finish() {
                        First::Http => First::Http,
                        _ => First::Opaque,
                    });
                }
                Err(PeekError::Broken) => return Err(Refusal::Gone),
            }
        }
    }

    /// Whether a client that says nothing could be allowed, whatever it says later.
    async fn may_be_silent(&self, found: &Found) -> bool {
        let flow = found.flow(self.port);
        let decision = self.shared.dialer.decide(self.tenant, &flow).await;
        decision.is_ok_and(|decision| decision.is_allowed())
    }

    async fn look_at_request(&self, opening: &mut Opening, mut found: Found) -> Looked {
        found.protocol = EgressProtocol::Http;
        found.kind = FlowKind::Http;
        if found.name.is_none() {
            let host = loop {
                match host_of(&opening.bytes) {
                    Ok(host) => break host,
                    Err(_) => match opening.more().await {
                        Ok(()) => {}
                        Err(PeekError::Broken) => return Err((found, Refusal::Gone)),
                        Err(_) => break None,
                    },
                }
            };
            let Some(host) = host else {
                let reason = "what the address stood for is no longer known, and the request does not name one host; resolve the name again";
                return Err((found, denied("address", reason)));
            };
            found.name = Some(host);
        }
        // Whoever reads the requests asks again with what each of them says.
        found.claimed.clone_from(&found.name);
        Ok(found)
    }

    /// A connection to a real address: the name that it shows can only lose it something.
    async fn look_at_address(&self, opening: &mut Opening, address: IpAddr) -> Looked {
        let mut found = Found::opaque(None, Some(address));
        let decision = self.tenant.policy().connect(&found.flow(self.port));
        if !decision.is_allowed() {
            return Err((found, Refusal::Denied(decision)));
        }
        if !CLIENT_FIRST.contains(&self.port) {
            return Ok(found);
        }
        let patience = self.shared.config.timeouts.patience;
        loop {
            match classify(&opening.bytes) {
                First::More => {}
                First::Tls(hello) => {
                    found.kind = FlowKind::Tls;
                    found.protocol = EgressProtocol::Tls;
                    found.claimed = hello.name;
                    return Ok(found);
                }
                First::Http => {
                    found.protocol = EgressProtocol::Http;
                    // Its requests are not read, so it stays opaque.
                    if let Ok(host) = host_of(&opening.bytes) {
                        found.claimed = host;
                        return Ok(found);
                    }
                }
                _ => return Ok(found),
            }
            match opening.speaks_within(patience).await {
                Ok(true) => {}
                Ok(false) | Err(PeekError::Full | PeekError::Finished | PeekError::Late) => return Ok(found),
                Err(PeekError::Broken) => return Err((found, Refusal::Gone)),
            }
        }
    }

    async fn refuse(
        &self,
        mut opening: Opening,
        found: &Found,
        decision: &Decision,
        address: Option<IpAddr>,
    ) {
        self.tenant.events.note(self.note(found, decision, address));
        let mut http = found.kind == FlowKind::Http;
        if !http && CLIENT_FIRST.contains(&self.port) {
            while classify(&opening.bytes) == First::More
                && matches!(opening.speaks_within(COURTESY).await, Ok(true))
            {}
            http = classify(&opening.bytes) == First::Http;
        }
        if http {
            refuse::answer_http(opening.stream, decision).await;
        } else {
            reset(&opening.stream);
        }
    }

    /// Hands it over to be read.
    async fn read(&self, opening: Opening, found: &Found) {
        let Some(name) = found.name.clone() else {
            return;
        };
        let flow = found.flow(self.port);
        let decision = match self.shared.dialer.decide(self.tenant, &flow).await {
            Ok(decision) => decision,
            Err(error) => {
                self.failed(&opening.stream, found, &error);
                return;
            }
        };
        if !decision.is_allowed() {
            return self.refuse(opening, found, &decision, None).await;
        }
        self.tenant.events.note(self.note(found, &decision, None));
        let meter = opening.meter.clone();
        let severed = Severed::new(Arc::clone(self.tenant));
        let served = Box::pin(self.shared.interceptor.serve(
            meter.wrap(Severable::new(opening.stream, severed.clone(), None)),
            opening.bytes.freeze(),
            seam::Flow {
                tenant: Arc::clone(self.tenant),
                name,
                port: self.port,
                tls: found.kind == FlowKind::Tls,
                dialer: Arc::clone(&self.shared.dialer),
                severed: severed.clone(),
            },
        ));
        let flow = &flow;
        let mut closing = Closing::new(self, found, decision, None, &meter);
        let still = move || async move {
            match self.shared.dialer.decide(self.tenant, flow).await {
                Ok(decision) => (!decision.is_allowed()).then_some(decision),
                // What cannot be resolved now goes on as it was.
                Err(_) => None,
            }
        };
        match self.hold(still, served, || severed.sever()).await {
            Err(cut) => closing.decision = cut,
            Ok(Ok(())) => "it was finished".clone_into(&mut closing.decision.reason),
            Ok(Err(error)) => match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(Cut(decision)) => closing.decision = decision.clone(),
                None => closing.decision.reason = format!("it broke: {error}"),
            },
        }
    }

    /// Dials and copies. Gives it back where it had been silent and now says what it is.
    async fn splice(&self, mut opening: Opening, found: &Found) -> Option<Opening> {
        let dialled = self
            .shared
            .dialer
            .connect(self.tenant, &found.flow(self.port))
            .await;
        let Dialled {
            mut stream,
            address,
            decision,
        } = match dialled {
            Ok(dialled) => dialled,
            Err(DialError::Denied { decision, address }) => {
                self.refuse(opening, found, &decision, address).await;
                return None;
            }
            Err(error) => {
                self.failed(&opening.stream, found, &error);
                return None;
            }
        };
        self.tenant
            .events
            .note(self.note(found, &decision, Some(address)));
        let timeouts = &self.shared.config.timeouts;
        if found.protocol == EgressProtocol::Postgres && !begin_postgres(&mut stream, timeouts.connect).await
        {
            let error = DialError::Unreachable(std::io::Error::other("the server does not offer TLS"));
            self.failed(&opening.stream, found, &error);
            return None;
        }
        let meter = opening.meter.clone();
        let mut closing = Closing::new(self, found, decision, Some(address), &meter);
        // By address nothing follows from what it says.
        let unclear =
            found.name.is_some() && found.kind == FlowKind::Opaque && classify(&opening.bytes) == First::More;
        let gate = unclear.then(|| Gate::new(&opening.bytes));
        let first = std::mem::take(&mut opening.bytes);
        let terms = Terms {
            meter: &meter,
            buffers: &self.tenant.buffers,
            pool: &self.shared.pool,
            timeouts,
        };
        let copied = copy(&mut opening.stream, &mut stream, first, gate, terms);
        let still = || async {
            let policy = self.tenant.policy();
            let mut flow = found.flow(self.port);
            flow.address = Some(address);
            let decision = policy.connect(&flow);
            if !decision.is_allowed() {
                return Some(decision);
            }
            let now_read =
                found.kind == FlowKind::Tls && found.name.as_ref().is_some_and(|name| self.inspects(name));
            now_read.then(|| Decision {
                verdict: EgressVerdict::Denied,
                rule: RuleName::from("policy changed"),
                reason: "its requests must be read from now on; connect again".to_owned(),
            })
        };
        // Both ends are still here when it is over, and broken off below.
        let broken = match self.hold(still, copied, || {}).await {
            Ok(End::Finished) => {
                "it was finished".clone_into(&mut closing.decision.reason);
                false
            }
            Ok(End::Broken(error)) => {
                closing.decision.reason = format!("it was broken off: {error}");
                true
            }
            Ok(End::Idle) => {
                "nothing moved for too long".clone_into(&mut closing.decision.reason);
                true
            }
            Ok(End::Exhausted(exhausted)) => {
                closing.decision = exhausted.decision();
                true
            }
            Ok(End::Spoke { bytes, fresh: true }) => {
                closing.goes_on = true;
                return Some(opening.again(bytes, timeouts.peek));
            }
            Ok(End::Spoke { .. }) => {
                closing.decision = Decision {
                    verdict: EgressVerdict::Denied,
                    rule: RuleName::from(RuleName::PROTOCOL),
                    reason: "it turned into TLS or HTTP after it had begun as something else; begin with it"
                        .to_owned(),
                };
                true
            }
            Err(cut) => {
                closing.decision = cut;
                true
            }
        };
        if broken {
            reset(&opening.stream);
            reset(&stream);
        }
        None
    }

    /// Does `work` for as long as the policy, whenever it changes, still allows it; else says why not, having called `cut`
    /// before the work is dropped. The work goes on while that is found out: it may have to look at its own parts.
    async fn hold<T, S: Future<Output = Option<Decision>>>(
        &self,
        still: impl Fn() -> S,
        work: impl Future<Output = T>,
        cut: impl FnOnce(),
    ) -> Result<T, Decision> {
        let mut changes = self.changes.clone();
        let mut asked = None;
        tokio::pin!(work);
        loop {
            let answered = async {
                match &mut asked {
                    Some(asked) => Pin::as_mut(asked).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                Ok(()) = changes.changed() => asked = Some(Box::pin(still())),
                decision = answered => match decision {
                    Some(decision) => {
                        cut();
                        return Err(decision);
                    }
                    None => asked = None,
                },
                outcome = &mut work => return Ok(outcome),
            }
        }
    }

    fn note(&self, found: &Found, decision: &Decision, address: Option<IpAddr>) -> Note {
        let host = found.name.as_ref().or(found.claimed.as_ref());
        Note::decided(
            decision,
            found.protocol,
            host.map(Name::as_str),
            address.or(found.address),
            self.port,
        )
    }

    /// Allowed, but not to be had.
    fn failed(&self, stream: &TcpStream, found: &Found, error: &DialError) {
        let decision = Decision {
            verdict: EgressVerdict::Allowed,
            rule: RuleName::from(""),
            reason: error.to_string(),
        };
        self.tenant.events.note(Note {
            kind: EventKind::Failed,
            ..self.note(found, &decision, None)
        });
        reset(stream);
    }
}

/// Tells the end of a flow, with its bytes, however it comes.
struct Closing<'a> {
    connection: &'a Connection<'a>,
    found: &'a Found,
    address: Option<IpAddr>,
    meter: &'a Meter,
    decision: Decision,
    /// It is not over: somebody else will tell its end.
    goes_on: bool,
}

impl<'a> Closing<'a> {
    fn new(
        connection: &'a Connection<'a>,
        found: &'a Found,
        decision: Decision,
        address: Option<IpAddr>,
        meter: &'a Meter,
    ) -> Self {
        Self {
            connection,
            found,
            address,
            meter,
            // Unless somebody knows better.
            decision: Decision {
                reason: "the sandbox was detached".to_owned(),
                ..decision
            },
            goes_on: false,
        }
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        if self.goes_on {
            return;
        }
        let note = self.connection.note(self.found, &self.decision, self.address);
        self.connection.tenant.events.note(Note {
            kind: EventKind::Closed,
            bytes_up: self.meter.up(),
            bytes_down: self.meter.down(),
            ..note
        });
    }
}

/// Whether these may be the first bytes of a protocol of words, whose client may wait for an answer to them; nothing, too.
fn may_be_a_word(bytes: &[u8]) -> bool {
    bytes
        .first()
        .is_none_or(|first| *first >= b' ' || first.is_ascii_whitespace())
}

fn look_at_hello(mut found: Found, hello: Hello) -> Looked {
    // What PostgreSQL says inside cannot be read, so to the rules it is as opaque as without TLS. Its name still has to
    // agree, where it shows one; old clients show none.
    if found.protocol != EgressProtocol::Postgres {
        found.protocol = EgressProtocol::Tls;
        found.kind = FlowKind::Tls;
    }
    if found.name.is_none() {
        found.name.clone_from(&hello.name);
    }
    found.claimed = hello.name;
    let Some(name) = &found.name else {
        let reason = "what the address stood for is no longer known, and the TLS handshake names no host (SNI); resolve the name again";
        return Err((found, denied("address", reason)));
    };
    if hello.encrypted && ECH_FRONTS.contains(&name.as_str()) {
        let reason = format!("{name} hides who is really meant (ECH); connect without it");
        return Err((found, denied("tls", reason)));
    }
    Ok(found)
}

fn denied(rule: &str, reason: impl Into<String>) -> Refusal {
    Refusal::Denied(Decision {
        verdict: EgressVerdict::Denied,
        rule: RuleName::from(rule),
        reason: reason.into(),
    })
}

/// Answers a question that stands alone, and forgets it.
async fn answer(opening: &mut Opening, bytes: &[u8]) -> bool {
    opening.bytes.clear();
    opening.stream.write_all(bytes).await.is_ok()
}

/// Asks a PostgreSQL server for TLS, as its client asked us.
async fn begin_postgres(stream: &mut TcpStream, patience: Duration) -> bool {
    let asked = async {
        stream.write_all(&SSL_REQUEST).await?;
        stream.read_u8().await
    };
    matches!(timeout(patience, asked).await, Ok(Ok(b'S')))
}
