//! Who may call: an API key of the server opens the namespaces of its project, and no others.
//!
//! The key is looked at before a message is read, so that strangers cannot make the server read any; from then on what is
//! read is paid for by the key's project: what comes, what it becomes ([`crate::weighed`]) until the method has answered, and
//! the answer until it is written. Heads are nobody's, so nothing of one is kept but what is read ([`slim`]). What a method
//! then does is confined by [`Caller::check`]: a namespace of another project does not exist for it. Health tells strangers
//! that the server is up, and nothing else.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use atoll_front::body::Awaited;
use atoll_front::extract::bearer;
use atoll_front::{Front, Refused, Visit, status};
use atoll_identity::{Action, Identity};
use atoll_types::Fault;
use atoll_workflow_core::Refusal;
use atoll_workflows::{Engine, Namespace};
use futures_util::FutureExt as _;
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt as _, BodyStream, StreamBody};
use tokio_stream::StreamExt as _;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response};
use tonic::{Status, async_trait};
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument as _;

use crate::connection::Place;

/// Knows who holds a key.
#[async_trait]
pub trait Keys: fmt::Debug + Send + Sync + 'static {
    /// `Ok(None)`: the key is unknown or was revoked. `Err`: it cannot be found out now.
    async fn holder(&self, secret: &str) -> Result<Option<atoll_identity::Caller>, Fault>;
}

#[async_trait]
impl Keys for Identity {
    async fn holder(&self, secret: &str) -> Result<Option<atoll_identity::Caller>, Fault> {
        self.authenticate(secret).await
    }
}

/// Whom the server lets in.
#[derive(Debug, Clone)]
pub enum Access {
    /// Everybody, to everything: for tests of the engine alone.
    Open,
    /// Who holds a key.
    WithKey(Arc<dyn Keys>),
}

/// On whose behalf a method runs.
#[derive(Debug, Clone)]
pub(crate) enum Caller {
    Anyone,
    Project {
        id: Arc<str>,
        /// What they may do, for what they start.
        rights: Arc<str>,
    },
}

impl Caller {
    /// Of a project, who may do so much.
    fn of_project(id: &str, rights: &str) -> Self {
        Self::Project {
            id: id.into(),
            rights: rights.into(),
        }
    }

    /// Put there by the gate; without it nothing is answered.
    pub(crate) fn of<T>(request: &tonic::Request<T>) -> Result<Self, Status> {
        let known = request.extensions().get::<Self>().cloned();
        known.ok_or_else(|| Status::unauthenticated("this request did not come through the gate"))
    }

    pub(crate) fn may_see(&self, namespace: &Namespace) -> bool {
        match self {
            Self::Anyone => true,
            Self::Project { id, .. } => *namespace.project == **id,
        }
    }

    /// Refuses a namespace of another project just as one that does not exist. A request that names none is the engine's to
    /// refuse.
    pub(crate) fn check(&self, engine: &Engine, namespace: &str) -> Result<(), Refusal> {
        match engine.namespace(namespace, "") {
            Ok(known) if self.may_see(&known) => Ok(()),
            // Also one that is not there now: by the time that the engine looks, it may be another project's.
            _ if !namespace.is_empty() => Err(Refusal::NamespaceNotFound(namespace.to_owned())),
            _ => Ok(()),
        }
    }

    /// The project that new namespaces belong to.
    pub(crate) fn project(&self) -> String {
        match self {
            Self::Anyone => String::new(),
            Self::Project { id, .. } => id.to_string(),
        }
    }

    fn rights(&self) -> String {
        match self {
            Self::Anyone => String::new(),
            Self::Project { rights, .. } => rights.to_string(),
        }
    }
}

/// The service that answers without a key: it asks nothing and tells nothing of anybody.
const HEALTH: &str = "/grpc.health.v1.Health/";

tokio::task_local! {
    /// The request that is being answered, for whoever decodes its message.
    static VISIT: Visit;
}

/// Lets the caller pay for so many bytes until they are answered.
pub(crate) fn pay(bytes: u64) -> Result<(), Status> {
    let paid = VISIT.try_with(|visit| pay_by(visit, bytes));
    paid.unwrap_or_else(|_| Err(Status::internal("this request did not come through the gate")))
}

fn pay_by(visit: &Visit, bytes: u64) -> Result<(), Status> {
    // Nobody pays where everybody is let in; what they send is bounded all the same.
    let Ok(mut permit) = visit.permit() else {
        return Ok(());
    };
    permit.grow(bytes).map_err(|fault| told(&fault))?;
    visit.keep(permit);
    Ok(())
}

/// The answer, paid for until it is written. It is encoded here and now: one that waits for its reader would be held as what
/// it was made of, for as long as the reader likes.
fn settle(visit: &Visit, response: Response<Body>) -> Response<Body> {
    // A status alone: that it is the end of the stream tells clients that it is the last word.
    if response.body().is_end_stream() {
        return response;
    }
    let (parts, mut body) = response.into_parts();
    let mut frames = Vec::new();
    while let Some(next) = body.frame().now_or_never() {
        let frame = match next.map(|frame| frame.map(Frame::into_data)) {
            Some(Ok(Ok(data))) => match visit.pay(data) {
                Ok(data) => Ok(Frame::data(data)),
                Err(fault) => return told(&fault).into_http(),
            },
            Some(Ok(Err(trailers))) => Ok(trailers),
            Some(Err(status)) => Err(status),
            None => {
                let whole = StreamBody::new(tokio_stream::iter(frames));
                return Response::from_parts(parts, Body::new(whole));
            }
        };
        frames.push(frame);
    }
    // It takes its time, so it makes no more than is read.
    let joined = tokio_stream::iter(frames).chain(BodyStream::new(body));
    Response::from_parts(parts, Body::new(StreamBody::new(joined)))
}

/// The answer, given up with its connection if there is no room for it for too long.
fn watched(place: Option<&Place>, response: Response<Body>) -> Response<Body> {
    match place {
        // A status alone is in the head, for which there is always room.
        Some(place) if !response.body().is_end_stream() => {
            response.map(|body| Body::new(place.unread.watch(body)))
        }
        _ => response,
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Gate {
    pub(crate) access: Access,
    pub(crate) front: Front,
}

impl<S> Layer<S> for Gate {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded {
            inner,
            access: self.access.clone(),
            front: self.front.clone(),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Guarded<S> {
    inner: S,
    access: Access,
    front: Front,
}

type Answer<E> = Pin<Box<dyn Future<Output = Result<Response<Body>, E>> + Send>>;

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer<Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The clone takes the place of the one that was found ready.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let access = self.access.clone();
        let front = self.front.clone();
        let doing = tracing::debug_span!(
            "call",
            method = request.uri().path(),
            project = tracing::field::Empty
        );
        let answered = async move {
            let place = request.extensions().get::<Place>().cloned();
            let health = request.uri().path().starts_with(HEALTH);
            let visit = front.visit(place.as_ref().map(|place| place.line.clone()));
            let caller = match &access {
                Access::Open => Ok(Caller::Anyone),
                Access::WithKey(_) if health => Ok(Caller::of_project("", "")),
                Access::WithKey(keys) => {
                    let action = action(request.uri().path());
                    admit(keys.as_ref(), &visit, request.headers(), action).await
                }
            };
            // A call takes more than its bytes, for as long as it waits.
            let room = match (health, &place) {
                (true, Some(place)) => match Arc::clone(&place.health).try_acquire_owned() {
                    Ok(room) => Some(room),
                    Err(_) => return Ok(crowded().into_http()),
                },
                _ => None,
            };
            match caller {
                Ok(caller) => {
                    let _room = room;
                    if let Err(status) = pay_by(&visit, CALL_BYTES) {
                        return Ok(status.into_http());
                    }
                    // So that whoever looks for what is slow learns whose it is.
                    tracing::Span::current().record("project", caller.project());
                    let mut request = match received(&front, &visit, &caller, slim(request)) {
                        Ok(request) => request,
                        Err(status) => return Ok(status.into_http()),
                    };
                    let rights = caller.rights();
                    request.extensions_mut().insert(caller);
                    let answering = VISIT.scope(visit.clone(), inner.call(request));
                    let answering = atoll_workflows::acting_with(rights, answering);
                    let answered = match health {
                        false => answering.await,
                        // There is nothing to wait for but the caller's own message, of a few bytes.
                        true => match tokio::time::timeout(front.patience.body, answering).await {
                            Ok(answered) => answered,
                            Err(_) => {
                                return Ok(Status::deadline_exceeded("the message did not come").into_http());
                            }
                        },
                    };
                    visit.answered();
                    answered.map(|response| {
                        let response = settle(&visit, crate::oversize::retell(response));
                        watched(place.as_ref(), response)
                    })
                }
                Err(status) => Ok(status.into_http()),
            }
        };
        Box::pin(answered.instrument(doing))
    }
}

fn crowded() -> Status {
    Status::resource_exhausted("this connection has as many health checks open as it may have; wait for one")
}

/// What a call takes beside what it sends and is answered.
const CALL_BYTES: u64 = 16 * 1024;

/// What the services read of a head, and how long such a value may be.
const READ: [&str; 5] = [
    "content-type",
    "te",
    "grpc-encoding",
    "grpc-accept-encoding",
    "grpc-timeout",
];
const LONGEST_READ: usize = 256;

/// The same call with a head of its own. A call may wait for minutes, and what h2 has read lies in one piece: a single value
/// of it that is kept would keep all of it.
fn slim(request: Request<Body>) -> Request<Body> {
    let (parts, body) = request.into_parts();
    let mut slim = Request::new(body);
    *slim.method_mut() = parts.method;
    *slim.version_mut() = parts.version;
    *slim.uri_mut() = parts.uri.path().to_owned().try_into().unwrap_or_default();
    for name in READ {
        let value = parts.headers.get(name).map(HeaderValue::as_bytes);
        let short = value.filter(|value| value.len() <= LONGEST_READ);
        if let Some(Ok(copy)) = short.map(HeaderValue::from_bytes) {
            slim.headers_mut().insert(name, copy);
        }
    }
    *slim.extensions_mut() = parts.extensions;
    slim
}

/// The request with a body that must keep coming, and that the caller pays for.
fn received(
    front: &Front,
    visit: &Visit,
    caller: &Caller,
    request: Request<Body>,
) -> Result<Request<Body>, Status> {
    match caller {
        Caller::Project { id, .. } if !id.is_empty() => {}
        // Their messages are small, and whole ones.
        Caller::Project { .. } | Caller::Anyone => {
            let silence = front.patience.body;
            let awaited = |body| Awaited::new(body, silence).map_err(refused);
            return Ok(request.map(|body| Body::new(awaited(body))));
        }
    }
    let compressed = request
        .headers()
        .get("grpc-encoding")
        .is_some_and(|encoding| encoding != "identity");
    let weigh = if compressed { inflated } else { plain };
    let (parts, body) = request.into_parts();
    let body = visit.meter(body, weigh).map_err(refused)?;
    Ok(Request::from_parts(parts, Body::new(body.map_err(refused))))
}

/// What so many bytes of messages take: themselves, and what is made of them.
fn plain(bytes: u64) -> u64 {
    bytes * 2
}

/// The same for messages that are compressed; no byte of gzip stands for more than 1032.
fn inflated(bytes: u64) -> u64 {
    bytes + (bytes * 1032).min(crate::oversize::MAX_REQUEST as u64) * 2
}

fn refused(refused: Refused) -> Status {
    told(&refused.fault())
}

fn told(fault: &Fault) -> Status {
    let code = tonic::Code::from_i32(status::grpc(fault.code).number);
    Status::new(code, fault.to_string())
}

/// Which action a method is: those that only look say so by their names.
fn action(path: &str) -> Action {
    let method = path.rsplit('/').next().unwrap_or_default();
    let looks = ["Get", "List", "Describe", "Count", "Scan", "Query"];
    match looks.iter().any(|beginning| method.starts_with(beginning)) {
        true => Action::ReadWorkflows,
        false => Action::RunWorkflows,
    }
}

async fn admit(
    keys: &dyn Keys,
    visit: &Visit,
    headers: &HeaderMap,
    action: Action,
) -> Result<Caller, Status> {
    let secret = bearer(headers).ok_or_else(|| {
        Status::unauthenticated(
            "this request carries no API key: give your client one (api_key); `atoll key create` makes it",
        )
    })?;
    match keys.holder(secret).await {
        Ok(Some(caller)) => {
            visit.admit_caller(&caller).map_err(|fault| told(&fault))?;
            caller.may(action, None).map_err(|fault| told(&fault))?;
            Ok(Caller::of_project(caller.project().as_str(), &caller.rights()))
        }
        Ok(None) => Err(Status::unauthenticated(
            "this API key is unknown, was revoked or has expired; `atoll key create` makes one",
        )),
        Err(fault) => Err(Status::unavailable(fault.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use atoll_types::ProjectId;
    use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
    use temporalio_protos::temporal::api::workflowservice::v1 as wire;

    use super::*;
    use crate::generated::workflow::workflow_service_server::WorkflowServiceServer;

    #[test]
    fn methods_that_change_something_are_told_from_those_that_look() {
        let service = "/temporal.api.workflowservice.v1.WorkflowService/";
        for looks in [
            "GetWorkflowExecutionHistory",
            "ListWorkflowExecutions",
            "DescribeNamespace",
            "QueryWorkflow",
        ] {
            assert_eq!(
                action(&format!("{service}{looks}")),
                Action::ReadWorkflows,
                "{looks}"
            );
        }
        for changes in [
            "StartWorkflowExecution",
            "PollWorkflowTaskQueue",
            "RespondQueryTaskCompleted",
            "ResetWorkflowExecution",
            "DeleteNamespace",
            "",
        ] {
            assert_eq!(
                action(&format!("{service}{changes}")),
                Action::RunWorkflows,
                "{changes}"
            );
        }
    }

    fn project() -> String {
        ProjectId::from_entropy([1; 20]).to_string()
    }

    #[derive(Debug)]
    struct OneKey;

    #[async_trait]
    impl Keys for OneKey {
        async fn holder(&self, secret: &str) -> Result<Option<atoll_identity::Caller>, Fault> {
            match secret {
                "right" => Ok(Some(atoll_identity::Caller::for_test(ProjectId::from_entropy(
                    [1; 20],
                )))),
                "of a worker" => Ok(Some(atoll_identity::Caller::with_rights_for_test(
                    ProjectId::from_entropy([1; 20]),
                    atoll_identity::Role::Member,
                    vec![atoll_identity::Scope::Workflows],
                ))),
                "broken" => Err(Fault::internal("the store is away")),
                _ => Ok(None),
            }
        }
    }

    /// Answers with the project on whose behalf it was called.
    #[derive(Debug, Clone)]
    struct Tells;

    impl Service<Request<Body>> for Tells {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Request<Body>) -> Self::Future {
            let project = request.extensions().get::<Caller>().unwrap().project();
            let response = Response::builder().header("called-by", project);
            std::future::ready(Ok(response.body(Body::empty()).unwrap()))
        }
    }

    /// Who was let in, or with which gRPC code not.
    async fn knock(path: &str, authorization: Option<&str>) -> Result<String, String> {
        let mut request = Request::builder().uri(path);
        if let Some(authorization) = authorization {
            request = request.header("authorization", authorization);
        }
        let gate = Gate {
            access: Access::WithKey(Arc::new(OneKey)),
            front: Front::new(atoll_front::Limits::for_machine(1 << 30, 1000)),
        };
        let mut gate = gate.layer(Tells);
        let response = gate.call(request.body(Body::empty()).unwrap()).await.unwrap();
        let header = |name: &str| {
            let value = response.headers().get(name)?;
            Some(value.to_str().unwrap().to_owned())
        };
        header("called-by").ok_or_else(|| header("grpc-status").unwrap())
    }

    #[tokio::test]
    async fn only_keys_open_the_gate() {
        const START: &str = "/temporal.api.workflowservice.v1.WorkflowService/StartWorkflowExecution";
        const UNAUTHENTICATED: &str = "16";
        assert_eq!(knock(START, Some("Bearer right")).await.unwrap(), project());
        assert_eq!(knock(START, Some("bearer right")).await.unwrap(), project());
        for wrong in [
            None,
            Some("Bearer wrong"),
            Some("Bearer "),
            Some("Basic right"),
            Some("right"),
        ] {
            assert_eq!(
                knock(START, wrong).await.unwrap_err(),
                UNAUTHENTICATED,
                "{wrong:?}"
            );
        }
        let unavailable = "14";
        assert_eq!(
            knock(START, Some("Bearer broken")).await.unwrap_err(),
            unavailable
        );
        // Whoever only asks for health is nobody, and sees nothing.
        assert_eq!(knock("/grpc.health.v1.Health/Check", None).await.unwrap(), "");
    }

    #[test]
    fn nothing_of_a_head_is_kept_but_what_is_read() {
        let long = "x".repeat(10_000);
        let encoding = HeaderValue::from_maybe_shared(bytes::Bytes::from("gzip")).unwrap();
        let read = encoding.as_bytes().as_ptr();
        let request = Request::builder()
            .method("POST")
            .uri(format!("https://host.example{HEALTH}Check?{long}"))
            .header("authorization", "Bearer right")
            .header("grpc-encoding", encoding)
            .header("grpc-timeout", &long)
            .header("own", &long)
            .extension(7_u8)
            .body(Body::empty());
        let slim = slim(request.unwrap());
        assert_eq!(
            (slim.method().as_str(), slim.uri().to_string()),
            ("POST", format!("{HEALTH}Check"))
        );
        assert_eq!(slim.extensions().get(), Some(&7_u8));
        let kept: Vec<_> = slim.headers().keys().collect();
        assert_eq!(kept, ["grpc-encoding"]);
        assert_ne!(
            slim.headers()["grpc-encoding"].as_bytes().as_ptr(),
            read,
            "it is a copy"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn health_is_not_waited_for_longer_than_a_message_may_take() {
        let gate = Gate {
            access: Access::WithKey(Arc::new(OneKey)),
            front: Front::new(atoll_front::Limits::for_machine(1 << 30, 1000)),
        };
        let mut gate = gate.layer(crate::HealthServer::new(crate::health::Service));
        // A message of 4,000 bytes, one every second: it never falls silent.
        let announced = std::iter::once(&[0, 0, 0, 0x0f, 0xa0][..]);
        let bytes = announced.chain(std::iter::repeat(&[0][..]));
        let dribble = tokio_stream::iter(bytes).then(async |bytes| {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok::<_, Status>(Frame::data(bytes::Bytes::from_static(bytes)))
        });
        let request = Request::builder()
            .method("POST")
            .uri(format!("{HEALTH}Check"))
            .header("content-type", "application/grpc")
            .body(Body::new(StreamBody::new(Box::pin(dribble))));
        let response = gate.call(request.unwrap()).await.unwrap();
        assert_eq!(response.headers()["grpc-status"], "4");
    }

    /// Asks a method with the key of a worker, which is for workflows alone. The gRPC code.
    async fn work(engine: &Engine, method: &str, message: &impl prost::Message) -> String {
        let gate = Gate {
            access: Access::WithKey(Arc::new(OneKey)),
            front: Front::new(atoll_front::Limits::for_machine(1 << 30, 1000)),
        };
        let service = crate::workflow::Service::new(engine.clone());
        let mut gate = gate.layer(WorkflowServiceServer::new(service));
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        let body = [&[0][..], &length, &message].concat();
        let request = Request::builder()
            .method("POST")
            .uri(format!(
                "/temporal.api.workflowservice.v1.WorkflowService/{method}"
            ))
            .header("authorization", "Bearer of a worker")
            .header("content-type", "application/grpc")
            .body(Body::new(http_body_util::Full::from(body)));
        let response = gate.call(request.unwrap()).await.unwrap();
        response.headers()["grpc-status"].to_str().unwrap().to_owned()
    }

    #[tokio::test]
    async fn a_workers_key_does_not_open_the_queue_of_the_servers_own_steps() {
        const PERMISSION_DENIED: &str = "7";
        const NOT_FOUND: &str = "5";
        let dir = tempfile::tempdir().unwrap();
        let store = atoll_store::sqlite::open_workflows(&dir.path().join("workflows.db")).unwrap();
        let options = atoll_workflows::Options {
            project: project(),
            ..atoll_workflows::Options::default()
        };
        let engine = Engine::open(store.clone(), options).await.unwrap();
        let poll = wire::PollActivityTaskQueueRequest {
            namespace: "default".to_owned(),
            task_queue: Some(TaskQueue {
                name: atoll_types::STEPS_QUEUE.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        assert_eq!(
            work(&engine, "PollActivityTaskQueue", &poll).await,
            PERMISSION_DENIED
        );
        let answer = wire::RespondActivityTaskCompletedByIdRequest {
            namespace: "default".to_owned(),
            workflow_id: "none".to_owned(),
            activity_id: "none".to_owned(),
            ..Default::default()
        };
        assert_eq!(
            work(&engine, "RespondActivityTaskCompletedById", &answer).await,
            NOT_FOUND,
            "the key itself is let in"
        );
        engine.close();
        store.close().await;
    }

    #[tokio::test]
    async fn a_namespace_of_another_project_does_not_exist() {
        let dir = tempfile::tempdir().unwrap();
        let store = atoll_store::sqlite::open_workflows(&dir.path().join("workflows.db")).unwrap();
        let options = atoll_workflows::Options {
            project: "prj".to_owned(),
            ..atoll_workflows::Options::default()
        };
        let engine = Engine::open(store.clone(), options).await.unwrap();
        let theirs = Namespace {
            name: "theirs".to_owned(),
            project: "other".to_owned(),
            retention: i64::MAX,
            ..Namespace::default()
        };
        engine.register_namespace(theirs).await.unwrap();
        let us = Caller::of_project("prj", "");
        us.check(&engine, "default").unwrap();
        let refused = us.check(&engine, "theirs").unwrap_err();
        assert!(matches!(refused, Refusal::NamespaceNotFound(name) if name == "theirs"));
        Caller::of_project("other", "").check(&engine, "theirs").unwrap();
        assert!(us.check(&engine, "nobody's yet").is_err());
        // Nobody's key gives nobody's project.
        assert!(Caller::of_project("", "").check(&engine, "default").is_err());
        engine.close();
        store.close().await;
    }

    /// Decodes a request as the generated services do, tells what is held meanwhile, and answers with so many bytes.
    #[derive(Debug, Clone)]
    struct Decodes {
        front: Front,
        answer: usize,
    }

    impl Service<Request<Body>> for Decodes {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = Answer<Infallible>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Request<Body>) -> Self::Future {
            let method = self.clone();
            Box::pin(async move {
                let codec = crate::weighed::Codec::default();
                Ok(tonic::server::Grpc::new(codec).unary(method, request).await)
            })
        }
    }

    impl tonic::server::UnaryService<wire::StartWorkflowExecutionRequest> for Decodes {
        type Response = wire::StartWorkflowExecutionResponse;
        type Future = std::future::Ready<Result<tonic::Response<Self::Response>, Status>>;

        fn call(&mut self, _: tonic::Request<wire::StartWorkflowExecutionRequest>) -> Self::Future {
            let mut response = tonic::Response::new(wire::StartWorkflowExecutionResponse {
                run_id: "x".repeat(self.answer),
                ..Default::default()
            });
            let held = self.front.memory.held().into();
            response.metadata_mut().insert("held", held);
            std::future::ready(Ok(response))
        }
    }

    #[tokio::test]
    async fn what_was_decoded_and_what_is_answered_are_paid_for() {
        const MIB: u64 = 1 << 20;
        let mut limits = atoll_front::Limits::for_machine(1 << 30, 1000);
        limits.memory = atoll_front::memory::Limits::within(20 * MIB);
        let front = Front::new(limits);
        let ask = async |carried: u64, answer: u64| {
            let gate = Gate {
                access: Access::WithKey(Arc::new(OneKey)),
                front: front.clone(),
            };
            let mut gate = gate.layer(Decodes {
                front: front.clone(),
                answer: usize::try_from(answer).unwrap(),
            });
            let message = prost::Message::encode_to_vec(&wire::StartWorkflowExecutionRequest {
                workflow_id: "x".repeat(usize::try_from(carried).unwrap()),
                ..Default::default()
            });
            let length = u32::try_from(message.len()).unwrap().to_be_bytes();
            let body = [&[0][..], &length, &message].concat();
            let request = Request::builder()
                .uri("/x")
                .header("authorization", "Bearer right")
                .header("content-type", "application/grpc")
                .body(Body::new(http_body_util::Full::from(body)));
            gate.call(request.unwrap()).await.unwrap()
        };
        let header = |response: &Response<Body>, name: &str| {
            let value = response.headers().get(name).unwrap().to_str().unwrap();
            value.parse::<u64>().unwrap()
        };
        let first = ask(2 * MIB, 100).await;
        let held = header(&first, "held");
        assert!((2 * MIB..3 * MIB).contains(&held), "{held}");
        assert_eq!(front.memory.held(), 0);

        // Ten for the project: two answers of four, and a third of which nobody has room for a byte.
        let (first, second) = (ask(10, 4 * MIB).await, ask(10, 4 * MIB).await);
        assert!(front.memory.held() >= 8 * MIB);
        let refused = ask(10, 4 * MIB).await;
        assert_eq!(header(&refused, "grpc-status"), 8);
        assert!(refused.body().is_end_stream());
        drop(first);
        let third = ask(10, 4 * MIB).await;
        let mut body = third.into_body();
        let data = body.frame().await.unwrap().unwrap().into_data().unwrap();
        let trailers = body.frame().await.unwrap().unwrap().into_trailers().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
        assert!(body.frame().await.is_none());
        drop((body, second));
        assert!(front.memory.held() >= 4 * MIB);
        drop(data);
        assert_eq!(front.memory.held(), 0);
    }
}
