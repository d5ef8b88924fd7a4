//! Reading JSON objects field by field, so that what nobody has read is noticed.

use serde_json::{Map, Number, Value};

use crate::{Result, Untranslatable};

/// An object whose fields are taken out one by one. A field that is `null` is not there.
#[derive(Debug)]
pub(crate) struct Fields {
    path: String,
    fields: Map<String, Value>,
}

impl Fields {
    pub(crate) fn of(path: impl Into<String>, value: Value) -> Result<Self> {
        let path = path.into();
        match value {
            Value::Object(fields) => Ok(Self { path, fields }),
            other => Err(Untranslatable::new(
                path,
                format!("expected an object, not {}", kind(&other)),
            )),
        }
    }

    pub(crate) fn parse(body: &[u8]) -> Result<Self> {
        let value =
            serde_json::from_slice(body).map_err(|error| Untranslatable::new("body", error.to_string()))?;
        Self::of("", value)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", &other)),
        }
    }

    pub(crate) fn need_text(&mut self, name: &str) -> Result<String> {
        self.text(name)?
            .ok_or_else(|| Untranslatable::new(self.path(name), "it is missing"))
    }

    pub(crate) fn count(&mut self, name: &str) -> Result<Option<u64>> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(count) => Ok(Some(count)),
                None => Err(self.wrong(name, "a whole number", &value)),
            },
        }
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<Number>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Number(number)) => Ok(Some(number)),
            Some(other) => Err(self.wrong(name, "a number", &other)),
        }
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(self.wrong(name, "true or false", &other)),
        }
    }

    pub(crate) fn list(&mut self, name: &str) -> Result<Vec<Self>> {
        let path = self.path(name);
        let items = self.values(name)?;
        items
            .into_iter()
            .enumerate()
            .map(|(at, item)| Self::of(format!("{path}[{at}]"), item))
            .collect()
    }

    pub(crate) fn values(&mut self, name: &str) -> Result<Vec<Value>> {
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => Ok(items),
            Some(other) => Err(self.wrong(name, "a list", &other)),
        }
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Self>> {
        let path = self.path(name);
        self.take(name).map(|value| Self::of(path, value)).transpose()
    }

    /// Leaves out what changes nothing.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.fields.remove(*name);
        }
    }

    pub(crate) fn refuse<T>(&self, name: &str, why: impl Into<String>) -> Result<T> {
        Err(Untranslatable::new(self.path(name), why))
    }

    /// Refuses what nobody has read.
    pub(crate) fn end(self) -> Result<()> {
        match self.fields.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => Err(Untranslatable::new(
                self.path(name),
                "the model's provider speaks another wire, in which there is no place for it",
            )),
        }
    }

    fn wrong(&self, name: &str, wanted: &str, found: &Value) -> Untranslatable {
        Untranslatable::new(self.path(name), format!("expected {wanted}, not {}", kind(found)))
    }
}

pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// An object of the fields that are there. What it is given is moved into it: `json!` copies each tree that is put into
/// another, so one that is as large as a client likes would be copied once for each level that it stands in.
#[derive(Debug, Default)]
pub(crate) struct Built(Map<String, Value>);

impl Built {
    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    pub(crate) fn maybe(self, name: &str, value: Option<impl Into<Value>>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }
}

/// An object of one field.
pub(crate) fn only(name: &str, value: impl Into<Value>) -> Value {
    Built::default().with(name, value).into()
}

impl From<Built> for Value {
    fn from(built: Built) -> Self {
        Self::Object(built.0)
    }
}

/// The arguments of a tool call as JSON; a model may write what is none.
pub(crate) fn arguments(text: &str) -> Value {
    if text.trim().is_empty() {
        return Value::Object(Map::new());
    }
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// Arguments where they must be an object.
pub(crate) fn object(value: Value) -> Value {
    match value {
        value @ Value::Object(_) => value,
        other => Value::Object(Map::from_iter([("value".to_owned(), other)])),
    }
}
