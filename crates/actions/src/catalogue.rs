//! The actions that there are: their names, what each takes, what it needs the right to.

use atoll_identity::{Action as Right, Caller};
use atoll_types::{Code, Fault, SandboxId};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::approval::AskApproval;
use crate::files::{ReadFile, WriteFile};
use crate::model::CallModel;
use crate::outcome::Failure;
use crate::spelling;
use crate::words::command::ExecRequest;
use crate::words::{
    CreateSandboxRequest, ForkRequest, PauseRequest, ResumeRequest, SaveArtifactRequest, SnapshotRequest,
};

/// An action as those are told of it who choose one.
#[derive(Debug, Clone, Copy)]
pub struct Described {
    pub name: &'static str,
    pub description: &'static str,
    schema: fn() -> Value,
}

impl Described {
    /// What it takes, as a JSON schema that stands for itself.
    pub fn schema(&self) -> Value {
        (self.schema)()
    }
}

macro_rules! actions {
    ($($variant:ident($input:ty) $name:literal $right:expr, $description:literal;)+) => {
        /// Something to do, with all that it takes.
        #[derive(Debug)]
        #[expect(clippy::large_enum_variant, reason = "there is one at a time, which is taken apart at once")]
        pub enum Action {
            $(#[doc = $description] $variant($input),)+
        }

        impl Action {
            pub const ALL: &'static [Described] = &[$(
                Described { name: $name, description: $description, schema: <$input as Input>::schema },
            )+];

            /// What is asked for, by name.
            pub fn read(name: &str, input: Map<String, Value>) -> Result<Self, Failure> {
                match name {
                    $($name => <$input as Input>::read(input).map(Self::$variant),)+
                    _ => Err(unknown(name)),
                }
            }

            /// What a caller must have the right to, and the sandbox that it is about. Nothing: it comes with being what asks.
            fn needs(&self) -> (Option<Right>, Option<&SandboxId>) {
                match self {
                    $(Self::$variant(input) => ($right, <$input as Input>::sandbox(input)),)+
                }
            }
        }
    };
}

actions! {
    CreateSandbox(CreateSandbox) "sandbox.create" Some(Right::CreateSandboxes),
        "Creates a sandbox and answers when it runs.";
    Exec(In<ExecRequest>) "sandbox.exec" Some(Right::UseSandbox),
        "Runs a command in a sandbox, and answers with its output and how it ended.";
    WriteFile(In<WriteFile>) "sandbox.write" Some(Right::UseSandbox),
        "Writes a file in a sandbox; missing directories are made.";
    ReadFile(In<ReadFile>) "sandbox.read" Some(Right::UseSandbox),
        "Reads a file of a sandbox.";
    Pause(In<PauseRequest>) "sandbox.pause" Some(Right::UseSandbox),
        "Pauses a sandbox: its state is kept, its processes hold no memory or CPU any more.";
    Resume(In<ResumeRequest>) "sandbox.resume" Some(Right::UseSandbox),
        "Resumes a paused sandbox, and answers when it runs.";
    Snapshot(In<SnapshotRequest>) "sandbox.snapshot" Some(Right::ManageStorage),
        "Takes a snapshot of a sandbox, of which others can be made.";
    Fork(In<ForkRequest>) "sandbox.fork" Some(Right::CreateSandboxes),
        "Makes running copies of a running sandbox.";
    Delete(In<Nothing>) "sandbox.delete" Some(Right::UseSandbox),
        "Ends a sandbox, and answers when nothing of it is left.";
    SaveArtifact(In<SaveArtifactRequest>) "artifact.save" Some(Right::ManageStorage),
        "Keeps a file or directory of a sandbox under a name, beyond the sandbox's end.";
    CallModel(CallModel) "model.call" Some(Right::CallModels),
        "Calls a model with the request of a wire, and answers with the model's answer and what it cost.";
    AskApproval(AskApproval) "approval.request" None,
        "Asks a person for approval of an action, and waits for the answer. For steps of workflows.";
}

impl Action {
    /// Whether whoever asks may have this done.
    pub(crate) fn allowed_to(&self, caller: &Caller) -> Result<(), Fault> {
        match self.needs() {
            (Some(right), sandbox) => caller.may(right, sandbox),
            (None, _) => Ok(()),
        }
    }
}

fn unknown(name: &str) -> Failure {
    let mut known: Vec<_> = Action::ALL.iter().map(|action| action.name).collect();
    known.sort_unstable();
    Failure::new(
        "UnknownStep",
        format!("there is no step `{name}`; there are {}", known.join(", ")),
    )
}

/// What an action takes.
pub(crate) trait Input: Sized {
    fn read(fields: Map<String, Value>) -> Result<Self, Failure>;

    fn schema() -> Value;

    /// The sandbox that it is about.
    fn sandbox(&self) -> Option<&SandboxId> {
        None
    }
}

/// What is asked of one sandbox: its id, and the rest beside it.
#[derive(Debug)]
pub struct In<T> {
    pub(crate) sandbox: SandboxId,
    pub(crate) rest: T,
}

/// What is read from JSON, with the mistakes in it told by the API's code for them.
pub(crate) trait Part: DeserializeOwned + ToSchema {
    fn refused(fault: Fault) -> Failure {
        fault.into()
    }
}

impl Part for CreateSandboxRequest {}
impl Part for ExecRequest {}
impl Part for PauseRequest {}
impl Part for ResumeRequest {}
impl Part for SnapshotRequest {}
impl Part for ForkRequest {}
impl Part for SaveArtifactRequest {}

/// Nothing but the sandbox.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

impl Part for Nothing {
    fn refused(fault: Fault) -> Failure {
        Failure::invalid(fault.message)
    }
}

impl<T: Part> Input for In<T> {
    fn read(mut fields: Map<String, Value>) -> Result<Self, Failure> {
        let sandbox = match fields.remove("sandbox") {
            None => return Err(Failure::invalid("`sandbox` is missing: its id")),
            Some(Value::String(text)) => text
                .parse()
                .map_err(|error| Fault::new(Code::InvalidPathParameter, format!("`sandbox`: {error}")))?,
            Some(_) => return Err(Failure::invalid("`sandbox` must be text")),
        };
        let rest = spelling::parse_value(Value::Object(fields)).map_err(T::refused)?;
        Ok(Self { sandbox, rest })
    }

    fn schema() -> Value {
        let sandbox = json!({"type": "string", "description": "The id of the sandbox.", "pattern": "^sbx_[a-z0-9]{20}$"});
        with(schema_of::<T>(), "sandbox", sandbox, true)
    }

    fn sandbox(&self) -> Option<&SandboxId> {
        Some(&self.sandbox)
    }
}

/// A sandbox to make.
#[derive(Debug)]
pub struct CreateSandbox {
    pub(crate) request: CreateSandboxRequest,
    /// Whether it stays when the workflow is over that it is made for.
    pub(crate) keep: bool,
}

impl Input for CreateSandbox {
    fn read(mut fields: Map<String, Value>) -> Result<Self, Failure> {
        let keep = match fields.remove("keep") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(keep)) => keep,
            Some(_) => return Err(Failure::invalid("`keep` must be true or false")),
        };
        let request = spelling::parse_value(Value::Object(fields)).map_err(CreateSandboxRequest::refused)?;
        Ok(Self { request, keep })
    }

    fn schema() -> Value {
        let keep = json!({
            "type": "boolean",
            "default": false,
            "description": "Whether it stays when the workflow is over that it is made for.",
        });
        with(schema_of::<CreateSandboxRequest>(), "keep", keep, false)
    }
}

/// The schema of a type, with those that it refers to.
pub(crate) fn schema_of<T: ToSchema>() -> Value {
    let mut named = Vec::new();
    T::schemas(&mut named);
    let mut schema = json!(T::schema());
    let parts: Map<String, Value> = named
        .into_iter()
        .map(|(name, schema)| (name, json!(schema)))
        .collect();
    if !parts.is_empty() {
        schema["$defs"] = Value::Object(parts);
    }
    refer_within(&mut schema);
    schema
}

/// What an API's document has apart stands in the schema itself.
fn refer_within(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(target)) = fields.get_mut("$ref") {
                *target = target.replace("#/components/schemas/", "#/$defs/");
            }
            fields.values_mut().for_each(refer_within);
        }
        Value::Array(items) => items.iter_mut().for_each(refer_within),
        _ => {}
    }
}

fn with(mut schema: Value, name: &str, property: Value, is_required: bool) -> Value {
    schema["properties"][name] = property;
    if is_required {
        match schema.get_mut("required").and_then(Value::as_array_mut) {
            Some(required) => required.push(json!(name)),
            None => schema["required"] = json!([name]),
        }
    }
    schema
}

#[cfg(test)]
mod tests {
    use atoll_identity::{Role, Scope};
    use atoll_types::ProjectId;

    use super::*;

    const ID: &str = "sbx_aaaaaaaaaaaaaaaaaaaa";

    fn read(name: &str, input: Value) -> Result<Action, Failure> {
        let Value::Object(fields) = input else {
            panic!("{input}")
        };
        Action::read(name, fields)
    }

    /// The least that each takes.
    fn least() -> Vec<(&'static str, Value)> {
        vec![
            ("sandbox.create", json!({})),
            ("sandbox.exec", json!({"sandbox": ID, "cmd": "ls"})),
            (
                "sandbox.write",
                json!({"sandbox": ID, "path": "/a", "content": "b"}),
            ),
            ("sandbox.read", json!({"sandbox": ID, "path": "/a"})),
            ("sandbox.pause", json!({"sandbox": ID})),
            ("sandbox.resume", json!({"sandbox": ID})),
            ("sandbox.snapshot", json!({"sandbox": ID})),
            ("sandbox.fork", json!({"sandbox": ID})),
            ("sandbox.delete", json!({"sandbox": ID})),
            ("artifact.save", json!({"sandbox": ID, "name": "a", "path": "/a"})),
            ("model.call", json!({"model": "m"})),
            ("approval.request", json!({"action": {"drop": "all"}})),
        ]
    }

    #[test]
    fn every_action_is_read_by_its_name_and_names_its_right() {
        let least = least();
        let names: Vec<_> = least.iter().map(|(name, _)| *name).collect();
        let known: Vec<_> = Action::ALL.iter().map(|action| action.name).collect();
        assert_eq!(names, known);
        for (name, input) in least {
            let about = input.get("sandbox").map(|_| ID.parse().unwrap());
            let action = read(name, input).unwrap();
            let (right, sandbox) = action.needs();
            assert_eq!(sandbox, about.as_ref(), "{name}");
            assert_eq!(right.is_none(), name == "approval.request", "{name}");
        }
    }

    #[test]
    fn nothing_is_done_for_those_who_may_not() {
        let project = || ProjectId::from_entropy([1; 20]);
        let caller = |role, scopes| Caller::with_rights_for_test(project(), role, scopes);
        let own: SandboxId = ID.parse().unwrap();
        let other = SandboxId::from_entropy([7; 20]);
        let allowed = |caller: &Caller| -> Vec<&str> {
            let all = least().into_iter();
            let allowed = all.filter(|(name, input)| {
                let action = read(name, input.clone()).unwrap();
                action.allowed_to(caller).is_ok()
            });
            allowed.map(|(name, _)| name).collect()
        };
        let all: Vec<_> = Action::ALL.iter().map(|action| action.name).collect();
        assert_eq!(allowed(&Caller::step_for_test(project())), all);
        assert_eq!(allowed(&caller(Role::Member, vec![])), all);
        // Who looks, does nothing; who may call models, nothing else. Asking is refused to all but workflows later.
        assert_eq!(allowed(&caller(Role::Viewer, vec![])), ["approval.request"]);
        let models = caller(Role::Member, vec![Scope::Models]);
        assert_eq!(allowed(&models), ["model.call", "approval.request"]);
        // A key for one sandbox opens that one, and makes no other.
        let one = allowed(&caller(Role::Member, vec![Scope::Sandbox(own)]));
        assert!(
            one.contains(&"sandbox.exec") && !one.contains(&"sandbox.create"),
            "{one:?}"
        );
        let elsewhere = allowed(&caller(Role::Member, vec![Scope::Sandbox(other)]));
        assert_eq!(elsewhere, ["approval.request"]);
    }

    #[test]
    fn what_is_not_a_field_is_refused() {
        for (name, mut input) in least() {
            // The rest of a model's request is the provider's.
            if name == "model.call" {
                continue;
            }
            input["zz_unknown"] = json!(1);
            let failure = read(name, input).unwrap_err();
            assert!(failure.message.contains("zz_unknown"), "{name}: {failure:?}");
            assert!(!failure.again, "{name}");
        }
        for (name, input, kind) in [
            ("sandbox.exec", json!({"cmd": "ls"}), "InvalidInput"),
            ("sandbox.exec", json!({"sandbox": 7, "cmd": "ls"}), "InvalidInput"),
            (
                "sandbox.exec",
                json!({"sandbox": "../x", "cmd": "ls"}),
                "invalid_path_parameter",
            ),
            ("sandbox.exec", json!({"sandbox": ID, "cmd": 7}), "invalid_body"),
            (
                "sandbox.delete",
                json!({"sandbox": ID, "force": true}),
                "InvalidInput",
            ),
            ("sandbox.read", json!({"sandbox": ID, "path": 7}), "InvalidInput"),
            ("sandbox.create", json!({"keep": "yes"}), "InvalidInput"),
            ("sandbox.create", json!({"memory": 1}), "invalid_body"),
            ("model.call", json!({"wire": "smoke"}), "InvalidInput"),
            ("approval.request", json!({"reason": "why?"}), "InvalidInput"),
            ("sandbox.boil", json!({"sandbox": ID}), "UnknownStep"),
        ] {
            let failure = read(name, input).unwrap_err();
            assert_eq!(
                (&*failure.kind, failure.again),
                (kind, false),
                "{name}: {failure:?}"
            );
        }
    }

    /// Whatever a schema says there is, is read; and what it refers to is in it.
    #[test]
    fn a_schema_stands_for_itself() {
        for (action, (name, least)) in Action::ALL.iter().zip(least()) {
            let schema = action.schema();
            assert_eq!(schema["type"], "object", "{name}: {schema}");
            let required = schema["required"].as_array().cloned().unwrap_or_default();
            for field in &required {
                assert!(
                    least.get(field.as_str().unwrap()).is_some(),
                    "{name} can do without {field}"
                );
            }
            for field in least.as_object().unwrap().keys() {
                let is_free = schema["additionalProperties"] == json!(true);
                assert!(
                    is_free || schema["properties"].get(field).is_some(),
                    "{name}: {field} is in no schema"
                );
            }
            assert_eq!(
                schema["additionalProperties"],
                json!(name == "model.call"),
                "{name}: {schema}"
            );
            for reference in references(&schema) {
                let target = reference.strip_prefix("#/$defs/").unwrap();
                assert!(schema["$defs"].get(target).is_some(), "{name}: {reference}");
            }
        }
    }

    fn references(schema: &Value) -> Vec<String> {
        match schema {
            Value::Object(fields) => {
                let own = fields.get("$ref").and_then(Value::as_str).map(str::to_owned);
                own.into_iter()
                    .chain(fields.values().flat_map(references))
                    .collect()
            }
            Value::Array(items) => items.iter().flat_map(references).collect(),
            _ => Vec::new(),
        }
    }
}
