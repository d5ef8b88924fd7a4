//! The messages of E2B's `process` and `filesystem` services. One definition serves both codecs: the tags are those of
//! the protocol buffers, the names those of their JSON mapping (bytes in base64, 64-bit numbers as text, enums by name,
//! times in RFC 3339).
//!
//! Written by hand. E2B publishes no `.proto` files with its SDKs, only their descriptors inside generated code; generated types
//! would need those in the repository, two generators at build time and a second runtime with a calendar of its own for JSON,
//! in place of these structs and the hundred lines of [`json`], and JSON with a field that only newer clients know would be
//! refused by default. Fields and numbers are held against the published descriptors by a test (`fields`).

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::json;

#[derive(Clone, PartialEq, prost::Message, Serialize, Deserialize)]
pub(crate) struct Nothing {}

// ---- process

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Pty {
    #[prost(message, optional, tag = "1")]
    pub(crate) size: Option<PtySize>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PtySize {
    #[prost(uint32, tag = "1")]
    pub(crate) cols: u32,
    #[prost(uint32, tag = "2")]
    pub(crate) rows: u32,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ProcessConfig {
    #[prost(string, tag = "1")]
    pub(crate) cmd: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) args: Vec<String>,
    #[prost(map = "string, string", tag = "3")]
    pub(crate) envs: HashMap<String, String>,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cwd: Option<String>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ProcessInfo {
    #[prost(message, optional, tag = "1")]
    pub(crate) config: Option<ProcessConfig>,
    #[prost(uint32, tag = "2")]
    pub(crate) pid: u32,
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tag: Option<String>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct ProcessList {
    #[prost(message, repeated, tag = "1")]
    pub(crate) processes: Vec<ProcessInfo>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct StartRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) process: Option<ProcessConfig>,
    #[prost(message, optional, tag = "2")]
    pub(crate) pty: Option<Pty>,
    #[prost(string, optional, tag = "3")]
    pub(crate) tag: Option<String>,
    #[prost(bool, optional, tag = "4")]
    pub(crate) stdin: Option<bool>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct UpdateRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    pub(crate) pty: Option<Pty>,
}

/// Of `Connect`, `CloseStdin`, and the first message of `StreamInput`.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SelectRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) process: Option<ProcessSelector>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SendInputRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    pub(crate) input: Option<ProcessInput>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SendSignalRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) process: Option<ProcessSelector>,
    #[prost(int32, tag = "2")]
    #[serde(with = "json::signal")]
    pub(crate) signal: i32,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct StreamInputRequest {
    #[prost(oneof = "StreamInput", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub(crate) event: Option<StreamInput>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum StreamInput {
    #[prost(message, tag = "1")]
    Start(SelectRequest),
    #[prost(message, tag = "2")]
    Data(StreamInputData),
    #[prost(message, tag = "3")]
    Keepalive(Nothing),
}

impl Eq for Nothing {}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct StreamInputData {
    #[prost(message, optional, tag = "2")]
    pub(crate) input: Option<ProcessInput>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct ProcessInput {
    #[prost(oneof = "Input", tags = "1, 2")]
    #[serde(flatten)]
    pub(crate) input: Option<Input>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Input {
    #[prost(bytes = "bytes", tag = "1")]
    Stdin(#[serde(with = "json::base64")] bytes::Bytes),
    #[prost(bytes = "bytes", tag = "2")]
    Pty(#[serde(with = "json::base64")] bytes::Bytes),
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct ProcessSelector {
    #[prost(oneof = "Selector", tags = "1, 2")]
    #[serde(flatten)]
    pub(crate) selector: Option<Selector>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Selector {
    #[prost(uint32, tag = "1")]
    Pid(u32),
    #[prost(string, tag = "2")]
    Tag(String),
}

/// Of `Start` and `Connect`.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct EventResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) event: Option<ProcessEvent>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct ProcessEvent {
    #[prost(oneof = "Event", tags = "1, 2, 3, 4")]
    #[serde(flatten)]
    pub(crate) event: Option<Event>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Event {
    #[prost(message, tag = "1")]
    Start(StartEvent),
    #[prost(message, tag = "2")]
    Data(DataEvent),
    #[prost(message, tag = "3")]
    End(EndEvent),
    #[prost(message, tag = "4")]
    Keepalive(Nothing),
}

impl Event {
    pub(crate) fn into_response(self) -> EventResponse {
        EventResponse {
            event: Some(ProcessEvent { event: Some(self) }),
        }
    }
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct StartEvent {
    #[prost(uint32, tag = "1")]
    pub(crate) pid: u32,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct DataEvent {
    #[prost(oneof = "Output", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub(crate) output: Option<Output>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Output {
    #[prost(bytes = "bytes", tag = "1")]
    Stdout(#[serde(with = "json::base64")] bytes::Bytes),
    #[prost(bytes = "bytes", tag = "2")]
    Stderr(#[serde(with = "json::base64")] bytes::Bytes),
    #[prost(bytes = "bytes", tag = "3")]
    Pty(#[serde(with = "json::base64")] bytes::Bytes),
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct EndEvent {
    #[prost(sint32, tag = "1")]
    pub(crate) exit_code: i32,
    #[prost(bool, tag = "2")]
    pub(crate) exited: bool,
    #[prost(string, tag = "3")]
    pub(crate) status: String,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

// ---- filesystem

/// Of `Stat`, `MakeDir` and `Remove`.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PathRequest {
    #[prost(string, tag = "1")]
    pub(crate) path: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct MoveRequest {
    #[prost(string, tag = "1")]
    pub(crate) source: String,
    #[prost(string, tag = "2")]
    pub(crate) destination: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ListDirRequest {
    #[prost(string, tag = "1")]
    pub(crate) path: String,
    #[prost(uint32, tag = "2")]
    pub(crate) depth: u32,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct EntryResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct ListDirResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<EntryInfo>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum FileType {
    Unspecified = 0,
    File = 1,
    Directory = 2,
    Symlink = 3,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct EntryInfo {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(enumeration = "FileType", tag = "2")]
    #[serde(with = "json::file_type")]
    pub(crate) r#type: i32,
    #[prost(string, tag = "3")]
    pub(crate) path: String,
    #[prost(int64, tag = "4")]
    #[serde(with = "json::text")]
    pub(crate) size: i64,
    #[prost(uint32, tag = "5")]
    pub(crate) mode: u32,
    #[prost(string, tag = "6")]
    pub(crate) permissions: String,
    #[prost(string, tag = "7")]
    pub(crate) owner: String,
    #[prost(string, tag = "8")]
    pub(crate) group: String,
    #[prost(message, optional, tag = "9")]
    #[serde(with = "json::time")]
    pub(crate) modified_time: Option<Time>,
    #[prost(string, optional, tag = "10")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) symlink_target: Option<String>,
    #[prost(map = "string, string", tag = "11")]
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    pub(crate) metadata: HashMap<String, String>,
    #[prost(bool, tag = "12")]
    pub(crate) is_symlink: bool,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct Time {
    #[prost(int64, tag = "1")]
    pub(crate) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(crate) nanos: i32,
}

/// Of `WatchDir` and `CreateWatcher`.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct WatchRequest {
    #[prost(string, tag = "1")]
    pub(crate) path: String,
    #[prost(bool, tag = "2")]
    pub(crate) recursive: bool,
    #[prost(bool, tag = "3")]
    pub(crate) include_entry: bool,
    /// There are no network mounts in our sandboxes, so this changes nothing.
    #[prost(bool, tag = "4")]
    pub(crate) allow_network_mounts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum EventType {
    Unspecified = 0,
    Create = 1,
    Write = 2,
    Remove = 3,
    Rename = 4,
    Chmod = 5,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct FilesystemEvent {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(enumeration = "EventType", tag = "2")]
    #[serde(with = "json::event_type")]
    pub(crate) r#type: i32,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct WatchDirResponse {
    #[prost(oneof = "WatchEvent", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub(crate) event: Option<WatchEvent>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum WatchEvent {
    #[prost(message, tag = "1")]
    Start(Nothing),
    #[prost(message, tag = "2")]
    Filesystem(Box<FilesystemEvent>),
    #[prost(message, tag = "3")]
    Keepalive(Nothing),
}

/// Of `GetWatcherEvents` and `RemoveWatcher`, and the answer of `CreateWatcher`.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Watcher {
    #[prost(string, tag = "1")]
    pub(crate) watcher_id: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub(crate) struct WatcherEvents {
    #[prost(message, repeated, tag = "1")]
    pub(crate) events: Vec<FilesystemEvent>,
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn json_is_that_of_protocol_buffers() {
        let event = Event::Data(DataEvent {
            output: Some(Output::Stdout("hi".into())),
        })
        .into_response();
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(text, r#"{"event":{"data":{"stdout":"aGk="}}}"#);
        assert_eq!(serde_json::from_str::<EventResponse>(&text).unwrap(), event);
        assert_eq!(EventResponse::decode(&event.encode_to_vec()[..]).unwrap(), event);

        let request: SendSignalRequest =
            serde_json::from_str(r#"{"process":{"pid":7},"signal":"SIGNAL_SIGKILL"}"#).unwrap();
        assert_eq!(request.signal, 9);
        let selector = request.process.and_then(|process| process.selector);
        assert_eq!(selector, Some(Selector::Pid(7)));
        assert!(serde_json::from_str::<SendSignalRequest>(r#"{"signal":"SIGNAL_NONE"}"#).is_err());

        let entry = EntryInfo {
            size: 5,
            r#type: FileType::Directory.into(),
            modified_time: Some(Time {
                seconds: 1,
                nanos: 500_000_000,
            }),
            ..EntryInfo::default()
        };
        let json = serde_json::to_value(&entry).unwrap();
        assert_eq!(json["size"], "5");
        assert_eq!(json["type"], "FILE_TYPE_DIRECTORY");
        assert_eq!(json["modifiedTime"], "1970-01-01T00:00:01.5Z");
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        let request: StartRequest = serde_json::from_str(r#"{"process":{"cmd":"true"}}"#).unwrap();
        assert_eq!((request.stdin, request.pty), (None, None));
        let request: ListDirRequest = serde_json::from_str(r#"{"path":"/"}"#).unwrap();
        assert_eq!(request.depth, 0);
    }
}
