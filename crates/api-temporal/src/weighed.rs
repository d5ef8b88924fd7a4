//! Messages as prost reads them, once it is known what they will take: that is paid for by the caller until the answer is
//! written, and what would take too much is not decoded at all.

use std::marker::PhantomData;

use atoll_front::proto::{self, Unfit};
use prost::{Message, Name};
use tonic::Status;
use tonic::codec::{BufferSettings, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

use crate::access;

mod shapes {
    use atoll_front::proto::{Field, Holds, Message};

    include!(concat!(env!("OUT_DIR"), "/shapes.rs"));
}

/// The most that one request may take in memory: sixteen times its largest size.
const MOST: u64 = 64 * 1024 * 1024;
/// The same for requests that wait for work, of which every worker has many: they hold a few names.
const MOST_OF_POLL: u64 = 128 * 1024;

/// Used for every method of the services that read more than health does.
#[derive(Debug)]
pub(crate) struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Name + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = Weighing<U>;

    fn encoder(&mut self) -> ProstEncoder<T> {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::default())
    }

    fn decoder(&mut self) -> Weighing<U> {
        Weighing(ProstDecoder::default())
    }
}

#[derive(Debug)]
pub(crate) struct Weighing<U>(ProstDecoder<U>);

impl<U: Message + Name + Default> Decoder for Weighing<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // The whole message: it was gathered in one piece.
        access::pay(weigh::<U>(bytes::Buf::chunk(buffer))?)?;
        self.0.decode(buffer)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}

/// What a request takes once it is decoded.
fn weigh<U: Name>(bytes: &[u8]) -> Result<u64, Status> {
    let name = U::full_name();
    let place = shapes::REQUESTS
        .binary_search_by(|(known, _)| (*known).cmp(&name))
        .map_err(|_| Status::internal(format!("{name} is not a request")))?;
    let polls = U::NAME.starts_with("Poll") && U::NAME.ends_with("TaskQueueRequest");
    let most = if polls { MOST_OF_POLL } else { MOST };
    let weighed = proto::weigh(shapes::MESSAGES, shapes::REQUESTS[place].1, bytes, most);
    weighed.map_err(|unfit| match unfit {
        // By these words a worker knows that sending it again is of no use.
        Unfit::TooHeavy { .. } => {
            Status::resource_exhausted(format!("{}: {unfit}", crate::oversize::words()))
        }
        Unfit::Broken => Status::internal(unfit.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use std::mem::size_of;

    use atoll_front::proto::Holds;
    use temporalio_protos::temporal::api::common::v1::{Payload, Payloads};
    use temporalio_protos::temporal::api::failure::v1::Failure;
    use temporalio_protos::temporal::api::workflowservice::v1 as wire;
    use temporalio_protos::temporal::api::{command, protocol, schedule};
    use tonic::Code;

    use super::*;

    /// A field with so many bytes.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut field = vec![number << 3 | 2];
        let mut length = bytes.len();
        while length > 127 {
            field.push((length & 127) as u8 | 128);
            length >>= 7;
        }
        field.push(length as u8);
        field.extend(bytes);
        field
    }

    #[test]
    fn a_short_message_that_stands_for_much_is_not_decoded() {
        // `operations`, `commands`, and within `messages` what is decoded later.
        let operations = field(2, b"").repeat(300_000);
        let commands = field(2, b"").repeat(300_000);
        let carried = field(2, &field(3, &field(4, b"").repeat(300_000)));
        let messages = field(11, &field(5, &carried));
        let refusals = [
            weigh::<wire::ExecuteMultiOperationRequest>(&operations),
            weigh::<wire::RespondWorkflowTaskCompletedRequest>(&commands),
            weigh::<wire::RespondWorkflowTaskCompletedRequest>(&messages),
            weigh::<wire::PollWorkflowTaskQueueRequest>(&field(5, &field(1, &vec![b'x'; 1 << 20]))),
        ];
        for refused in refusals {
            let refused = refused.unwrap_err();
            assert_eq!(refused.code(), Code::ResourceExhausted);
            assert!(
                refused
                    .message()
                    .starts_with("grpc: received message larger than max")
            );
        }
    }

    #[test]
    fn what_workers_send_fits() {
        let payload = |bytes: usize| Payload {
            metadata: [("encoding".to_owned(), b"json/plain".to_vec())].into(),
            data: vec![b'x'; bytes],
            ..Default::default()
        };
        let start = wire::StartWorkflowExecutionRequest {
            input: Some(Payloads {
                payloads: vec![payload(100_000); 20],
            }),
            ..Default::default()
        };
        let bytes = start.encode_to_vec();
        let weight = weigh::<wire::StartWorkflowExecutionRequest>(&bytes).unwrap();
        assert!(weight < bytes.len() as u64 + 100_000, "{weight}");
        // As many commands as a run has room for events in one go.
        let completed = wire::RespondWorkflowTaskCompletedRequest {
            commands: vec![command::v1::Command::default(); 10_000],
            ..Default::default()
        };
        weigh::<wire::RespondWorkflowTaskCompletedRequest>(&completed.encode_to_vec()).unwrap();
    }

    /// What each further value of the field costs that is found so far below a request.
    fn costs<U: Name>(path: &[u32]) -> usize {
        let name = U::full_name();
        let at = shapes::REQUESTS
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap()
            .1;
        let (mut at, mut cost) = (at, 0);
        for number in path {
            let fields = shapes::MESSAGES[at].fields;
            let field = fields.iter().find(|field| field.number == *number).unwrap();
            cost = field.first.max(field.next) as usize;
            if let Holds::Message(inside) = field.holds {
                at = inside.into();
            }
        }
        cost
    }

    #[test]
    fn structs_are_not_larger_than_they_are_reckoned() {
        type Completed = wire::RespondWorkflowTaskCompletedRequest;
        type Operation = wire::execute_multi_operation_request::Operation;
        for (reckoned, real) in [
            (
                costs::<wire::ExecuteMultiOperationRequest>(&[2]),
                size_of::<Operation>(),
            ),
            (costs::<Completed>(&[2]), size_of::<command::v1::Command>()),
            (costs::<Completed>(&[11]), size_of::<protocol::v1::Message>()),
            (
                costs::<wire::StartWorkflowExecutionRequest>(&[5, 1]),
                size_of::<Payload>(),
            ),
            (
                costs::<wire::RespondActivityTaskFailedRequest>(&[2, 4]),
                size_of::<Failure>(),
            ),
            (
                costs::<wire::CreateScheduleRequest>(&[3, 1, 1]),
                size_of::<schedule::v1::CalendarSpec>(),
            ),
        ] {
            assert!(reckoned >= real, "{reckoned} for {real}");
            assert!(reckoned <= real * 5, "{reckoned} for {real}");
        }
    }
}
