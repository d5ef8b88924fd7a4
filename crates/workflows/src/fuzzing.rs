//! What the fuzzer may see: the language of queries.

use temporalio_protos::temporal::api::enums::v1::IndexedValueType as Type;

use crate::filter;

/// Reads a query and holds it against an object; `None` where it is refused.
pub fn query(text: &str, object: &serde_json::Map<String, serde_json::Value>) -> Option<bool> {
    let kind_of = |name: &str| match name {
        "CustomKeyword" => Some(Type::Keyword),
        "CustomText" => Some(Type::Text),
        "CustomInt" => Some(Type::Int),
        "CustomDouble" => Some(Type::Double),
        "CustomBool" => Some(Type::Bool),
        "CustomTime" => Some(Type::Datetime),
        "CustomList" => Some(Type::KeywordList),
        _ => None,
    };
    let query = filter::parse(text, &kind_of).ok()?;
    Some(filter::fits(&query.filter, object))
}
