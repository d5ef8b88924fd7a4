//! Where the JSON mapping of protocol buffers differs from what serde does by itself.

use serde::{Deserialize, Deserializer, Serializer, de};

/// Names of an enum's numbers, both ways; numbers are understood too.
macro_rules! names {
    ($module:ident, $noun:literal, $($number:literal => $name:literal),+ $(,)?) => {
        pub(crate) mod $module {
            use super::*;

            pub(crate) fn serialize<S: Serializer>(number: &i32, serializer: S) -> Result<S::Ok, S::Error> {
                match number {
                    $($number => serializer.serialize_str($name),)+
                    other => serializer.serialize_i32(*other),
                }
            }

            pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
                match NameOrNumber::deserialize(deserializer)? {
                    NameOrNumber::Number(number) => Ok(number),
                    NameOrNumber::Name(name) => match name.as_str() {
                        $($name => Ok($number),)+
                        other => Err(de::Error::custom(format!(concat!("unknown ", $noun, " `{}`"), other))),
                    },
                }
            }
        }
    };
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NameOrNumber {
    Number(i32),
    Name(String),
}

names!(signal, "signal", 0 => "SIGNAL_UNSPECIFIED", 9 => "SIGNAL_SIGKILL", 15 => "SIGNAL_SIGTERM");
names!(file_type, "file type",
    0 => "FILE_TYPE_UNSPECIFIED", 1 => "FILE_TYPE_FILE", 2 => "FILE_TYPE_DIRECTORY", 3 => "FILE_TYPE_SYMLINK");
names!(event_type, "event type",
    0 => "EVENT_TYPE_UNSPECIFIED", 1 => "EVENT_TYPE_CREATE", 2 => "EVENT_TYPE_WRITE", 3 => "EVENT_TYPE_REMOVE",
    4 => "EVENT_TYPE_RENAME", 5 => "EVENT_TYPE_CHMOD");

/// Bytes.
pub(crate) mod base64 {
    use ::base64::Engine as _;
    use ::base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
    use bytes::Bytes;

    use super::*;

    pub(crate) fn serialize<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(bytes))
    }

    /// Either alphabet, with or without padding.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bare = text.trim_end_matches('=');
        let decoded = if bare.contains(['-', '_']) {
            URL_SAFE_NO_PAD.decode(bare)
        } else {
            STANDARD_NO_PAD.decode(bare)
        };
        decoded
            .map(Bytes::from)
            .map_err(|_| de::Error::custom("bytes that are not base64"))
    }
}

/// 64-bit numbers.
pub(crate) mod text {
    use super::*;

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum TextOrNumber {
        Number(i64),
        Text(String),
    }

    pub(crate) fn serialize<S: Serializer>(number: &i64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(number)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
        match TextOrNumber::deserialize(deserializer)? {
            TextOrNumber::Number(number) => Ok(number),
            TextOrNumber::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

/// Times.
pub(crate) mod time {
    use super::*;
    use crate::envd::messages::Time;

    pub(crate) fn serialize<S: Serializer>(time: &Option<Time>, serializer: S) -> Result<S::Ok, S::Error> {
        match time.map(|time| jiff::Timestamp::new(time.seconds, time.nanos)) {
            Some(Ok(time)) => serializer.collect_str(&time),
            Some(Err(_)) | None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Time>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else {
            return Ok(None);
        };
        let time: jiff::Timestamp = text.parse().map_err(de::Error::custom)?;
        Ok(Some(Time {
            seconds: time.as_second(),
            nanos: time.subsec_nanosecond(),
        }))
    }
}
