//! The language in which people ask for workflows: conditions as in SQL's WHERE, in an order, or counted by status.
//!
//! ```text
//!   WorkflowType = 'Order' AND (ExecutionStatus = 'Running' OR CloseTime > '2026-01-01T00:00:00Z') ORDER BY StartTime
//! ```

use atoll_store::{
    WorkflowColumn as Column, WorkflowField as Field, WorkflowFilter as Filter, WorkflowTest as Test,
};
use atoll_store::{WorkflowOrder, WorkflowValue as Value};
use atoll_workflow_core::Refusal;
use temporalio_protos::temporal::api::enums::v1::{
    IndexedValueType as Type, WorkflowExecutionStatus as Status,
};

/// What a query may hold: people and programs write far less, and each condition is asked of every workflow.
const MOST_BYTES: usize = 64 * 1024;
const MOST_CONDITIONS: usize = 200;
const MOST_VALUES: usize = 2_000;
/// Each is looked for in each sentence.
const MOST_WORDS: usize = 100;
const MOST_ORDERS: usize = 10;
const MOST_NESTED: usize = 50;

/// A query, understood.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Query {
    pub(crate) filter: Filter,
    pub(crate) order: Vec<WorkflowOrder>,
    pub(crate) by_status: bool,
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Number(String),
    Symbol(&'static str),
}

/// `kind_of` says what the values of an attribute are, if it is known.
pub(crate) fn parse(text: &str, kind_of: &dyn Fn(&str) -> Option<Type>) -> Result<Query, Refusal> {
    if text.len() > MOST_BYTES {
        return Err(invalid(&format!(
            "it has {} bytes, and may have {MOST_BYTES}",
            text.len()
        )));
    }
    let tokens = split(text)?;
    let mut parser = Parser {
        tokens,
        at: 0,
        depth: 0,
        conditions: 0,
        values: 0,
        words: 0,
        kind_of,
    };
    let filter = if parser.at_end() || parser.sees("ORDER") || parser.sees("GROUP") {
        Filter::All(Vec::new())
    } else {
        parser.any()?
    };
    let mut query = Query {
        filter,
        order: Vec::new(),
        by_status: false,
    };
    if parser.takes("GROUP") {
        parser.expect("BY")?;
        let name = parser.name()?;
        if name != "ExecutionStatus" {
            return Err(invalid("'GROUP BY' clause is only supported for ExecutionStatus"));
        }
        query.by_status = true;
    }
    if parser.takes("ORDER") {
        parser.expect("BY")?;
        loop {
            let name = parser.name()?;
            let (field, _) = parser.field(&name)?;
            let descending = parser.takes("DESC");
            if !descending {
                parser.takes("ASC");
            }
            query.order.push((field, descending));
            if query.order.len() > MOST_ORDERS {
                return Err(invalid(&format!("'ORDER BY' may name {MOST_ORDERS} fields")));
            }
            if !parser.takes_symbol(",") {
                break;
            }
        }
    }
    if parser.at_end() {
        Ok(query)
    } else {
        Err(invalid("malformed query: something is left over at its end"))
    }
}

fn invalid(text: &str) -> Refusal {
    Refusal::InvalidArgument(format!("invalid query: {text}"))
}

fn split(text: &str) -> Result<Vec<Token>, Refusal> {
    let mut tokens = Vec::new();
    let letters: Vec<char> = text.chars().collect();
    let mut at = 0;
    while let Some(&letter) = letters.get(at) {
        match letter {
            letter if letter.is_whitespace() => at += 1,
            '\'' | '"' => {
                let mut value = String::new();
                at += 1;
                loop {
                    match letters.get(at) {
                        None => return Err(invalid("a quote is not closed")),
                        Some('\\') => {
                            value.extend(letters.get(at + 1));
                            at += 2;
                        }
                        Some(&other) if other == letter => {
                            if letters.get(at + 1) == Some(&letter) {
                                value.push(letter);
                                at += 2;
                                continue;
                            }
                            at += 1;
                            break;
                        }
                        Some(&other) => {
                            value.push(other);
                            at += 1;
                        }
                    }
                }
                tokens.push(Token::Text(value));
            }
            '`' => {
                let end = letters[at + 1..]
                    .iter()
                    .position(|letter| *letter == '`')
                    .ok_or_else(|| invalid("a backquote is not closed"))?;
                tokens.push(Token::Word(letters[at + 1..at + 1 + end].iter().collect()));
                at += end + 2;
            }
            '-' | '0'..='9' => {
                let start = at;
                at += 1;
                while letters
                    .get(at)
                    .is_some_and(|letter| letter.is_ascii_alphanumeric() || *letter == '.')
                {
                    at += 1;
                }
                tokens.push(Token::Number(letters[start..at].iter().collect()));
            }
            letter if letter.is_alphabetic() || letter == '_' => {
                let start = at;
                while letters
                    .get(at)
                    .is_some_and(|letter| letter.is_alphanumeric() || matches!(letter, '_' | '.' | '-'))
                {
                    at += 1;
                }
                tokens.push(Token::Word(letters[start..at].iter().collect()));
            }
            _ => {
                let two: String = letters[at..].iter().take(2).collect();
                let symbol = ["!=", "<>", ">=", "<="]
                    .into_iter()
                    .find(|symbol| **symbol == *two)
                    .or_else(|| {
                        ["=", "<", ">", "(", ")", ","]
                            .into_iter()
                            .find(|symbol| symbol.starts_with(letter))
                    })
                    .ok_or_else(|| invalid(&format!("unexpected character {letter:?}")))?;
                tokens.push(Token::Symbol(symbol));
                at += symbol.len();
            }
        }
    }
    Ok(tokens)
}

struct Parser<'a> {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
    conditions: usize,
    values: usize,
    words: usize,
    kind_of: &'a dyn Fn(&str) -> Option<Type>,
}

impl Parser<'_> {
    fn at_end(&self) -> bool {
        self.at >= self.tokens.len()
    }

    fn sees(&self, word: &str) -> bool {
        matches!(self.tokens.get(self.at), Some(Token::Word(found)) if found.eq_ignore_ascii_case(word))
    }

    fn takes(&mut self, word: &str) -> bool {
        let found = self.sees(word);
        self.at += usize::from(found);
        found
    }

    fn takes_symbol(&mut self, symbol: &str) -> bool {
        let found = matches!(self.tokens.get(self.at), Some(Token::Symbol(found)) if *found == symbol);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, word: &str) -> Result<(), Refusal> {
        if self.takes(word) {
            Ok(())
        } else {
            Err(invalid(&format!("{word} expected")))
        }
    }

    fn expect_symbol(&mut self, symbol: &str) -> Result<(), Refusal> {
        if self.takes_symbol(symbol) {
            Ok(())
        } else {
            Err(invalid(&format!("{symbol:?} expected")))
        }
    }

    fn name(&mut self) -> Result<String, Refusal> {
        match self.tokens.get(self.at) {
            Some(Token::Word(word)) => {
                self.at += 1;
                Ok(word.clone())
            }
            _ => Err(invalid("a name expected")),
        }
    }

    fn any(&mut self) -> Result<Filter, Refusal> {
        let mut parts = vec![self.all()?];
        while self.takes("OR") {
            parts.push(self.all()?);
        }
        Ok(if parts.len() == 1 {
            parts.remove(0)
        } else {
            Filter::Any(parts)
        })
    }

    fn all(&mut self) -> Result<Filter, Refusal> {
        let mut parts = vec![self.not()?];
        while self.takes("AND") {
            parts.push(self.not()?);
        }
        Ok(if parts.len() == 1 {
            parts.remove(0)
        } else {
            Filter::All(parts)
        })
    }

    fn not(&mut self) -> Result<Filter, Refusal> {
        self.depth += 1;
        if self.depth > MOST_NESTED {
            return Err(invalid(&format!("nested more than {MOST_NESTED} deep")));
        }
        let filter = if self.takes("NOT") {
            Filter::Not(Box::new(self.not()?))
        } else if self.takes_symbol("(") {
            let inner = self.any()?;
            self.expect_symbol(")")?;
            inner
        } else {
            self.condition()?
        };
        self.depth -= 1;
        Ok(filter)
    }

    fn condition(&mut self) -> Result<Filter, Refusal> {
        self.conditions += 1;
        if self.conditions > MOST_CONDITIONS {
            return Err(invalid(&format!(
                "more than {MOST_CONDITIONS} conditions: use IN (...) where they compare the same field"
            )));
        }
        let name = self.name()?;
        let (field, kind) = self.field(&name)?;
        let test = self.test(&name, kind)?;
        Ok(Filter::Is(field, test))
    }

    fn test(&mut self, name: &str, kind: Type) -> Result<Test, Refusal> {
        if self.takes("IS") {
            let not = self.takes("NOT");
            self.expect("NULL")?;
            return Ok(if not { Test::IsNotNull } else { Test::IsNull });
        }
        if self.takes("NOT") {
            if self.takes("IN") {
                return Ok(Test::NotIn(self.values(name, kind)?));
            }
            if self.takes("BETWEEN") {
                let (low, high) = self.pair(name, kind)?;
                return Ok(Test::NotBetween(low, high));
            }
            self.expect("STARTS_WITH")?;
            return Ok(Test::NotStartsWith(self.prefix()?));
        }
        if self.takes("IN") {
            return Ok(Test::In(self.values(name, kind)?));
        }
        if self.takes("BETWEEN") {
            let (low, high) = self.pair(name, kind)?;
            return Ok(Test::Between(low, high));
        }
        if self.takes("STARTS_WITH") {
            return Ok(Test::StartsWith(self.prefix()?));
        }
        let Some(Token::Symbol(symbol)) = self.tokens.get(self.at).cloned() else {
            return Err(invalid(&format!("a comparison expected after {name}")));
        };
        self.at += 1;
        let value = self.value(name, kind)?;
        match symbol {
            "=" => Ok(Test::Equal(value)),
            "!=" | "<>" => Ok(Test::NotEqual(value)),
            "<" => Ok(Test::Less(value)),
            "<=" => Ok(Test::LessOrEqual(value)),
            ">" => Ok(Test::Greater(value)),
            ">=" => Ok(Test::GreaterOrEqual(value)),
            other => Err(invalid(&format!("operator {other} is not supported"))),
        }
    }

    fn values(&mut self, name: &str, kind: Type) -> Result<Vec<Value>, Refusal> {
        self.expect_symbol("(")?;
        let mut values = vec![self.value(name, kind)?];
        while self.takes_symbol(",") {
            values.push(self.value(name, kind)?);
        }
        self.expect_symbol(")")?;
        Ok(values)
    }

    fn pair(&mut self, name: &str, kind: Type) -> Result<(Value, Value), Refusal> {
        let low = self.value(name, kind)?;
        self.expect("AND")?;
        Ok((low, self.value(name, kind)?))
    }

    fn prefix(&mut self) -> Result<String, Refusal> {
        match self.tokens.get(self.at) {
            Some(Token::Text(text)) => {
                self.at += 1;
                Ok(text.clone())
            }
            _ => Err(invalid("right-hand side of STARTS_WITH must be a literal string")),
        }
    }

    fn value(&mut self, name: &str, kind: Type) -> Result<Value, Refusal> {
        let Some(token) = self.tokens.get(self.at).cloned() else {
            return Err(invalid(&format!("a value for {name} expected")));
        };
        // Each word of a sentence is compared for itself.
        self.values += 1;
        if let (Type::Text, Token::Text(text)) = (kind, &token) {
            self.words += text.split_whitespace().count();
        }
        if self.words > MOST_WORDS {
            return Err(invalid(&format!(
                "more than {MOST_WORDS} words: ask several times"
            )));
        }
        if self.values > MOST_VALUES {
            return Err(invalid(&format!(
                "more than {MOST_VALUES} values: ask several times"
            )));
        }
        self.at += 1;
        let bad = |text: &str| invalid(&format!("invalid value for search attribute {name}: {text:?}"));
        if name == "ExecutionStatus" {
            return status(&token).ok_or_else(|| bad(&format!("{token:?}")));
        }
        if name == "ExecutionDuration" {
            return length(&token).ok_or_else(|| bad(&format!("{token:?}")));
        }
        match (kind, token) {
            (Type::Datetime, Token::Text(text)) => crate::visibility::datetime(&text)
                .map(Value::Int)
                .ok_or_else(|| bad(&text)),
            (Type::Bool, Token::Word(word) | Token::Text(word)) => match word.to_ascii_lowercase().as_str() {
                "true" => Ok(Value::Bool(true)),
                "false" => Ok(Value::Bool(false)),
                _ => Err(bad(&word)),
            },
            (Type::Int | Type::Datetime, Token::Number(number) | Token::Text(number)) => {
                number.parse().map(Value::Int).map_err(|_| bad(&number))
            }
            (Type::Double, Token::Number(number) | Token::Text(number)) => {
                number.parse().map(Value::Float).map_err(|_| bad(&number))
            }
            (Type::Keyword | Type::KeywordList | Type::Text, Token::Text(text)) => Ok(Value::Text(text)),
            (_, token) => Err(bad(&format!("{token:?}"))),
        }
    }

    fn field(&self, name: &str) -> Result<(Field, Type), Refusal> {
        let column = match name {
            "WorkflowId" => Some(Column::WorkflowId),
            "RunId" => Some(Column::RunId),
            "WorkflowType" | "WorkflowTypeName" => Some(Column::WorkflowType),
            "StartTime" => Some(Column::StartedAt),
            "ExecutionTime" => Some(Column::ExecutionAt),
            "CloseTime" => Some(Column::ClosedAt),
            "ExecutionStatus" => Some(Column::Status),
            "TaskQueue" => Some(Column::TaskQueue),
            "HistoryLength" => Some(Column::HistoryLength),
            "HistorySizeBytes" => Some(Column::HistoryBytes),
            "StateTransitionCount" => Some(Column::Transitions),
            "ExecutionDuration" => Some(Column::Duration),
            "ParentWorkflowId" => Some(Column::ParentId),
            "ParentRunId" => Some(Column::ParentRunId),
            "RootWorkflowId" => Some(Column::RootId),
            "RootRunId" => Some(Column::RootRunId),
            _ => None,
        };
        let kind = match column {
            Some(Column::StartedAt | Column::ExecutionAt | Column::ClosedAt) => Type::Datetime,
            Some(Column::HistoryLength | Column::HistoryBytes | Column::Transitions | Column::Duration) => {
                Type::Int
            }
            Some(_) => Type::Keyword,
            None => (self.kind_of)(name)
                .ok_or_else(|| invalid(&format!("column name '{name}' is not a valid search attribute")))?,
        };
        let field = match (column, kind) {
            (Some(column), _) => Field::Column(column),
            (None, Type::KeywordList) => Field::List(name.to_owned()),
            (None, Type::Text) => Field::Text(name.to_owned()),
            (None, _) => Field::Attribute(name.to_owned()),
        };
        Ok((field, kind))
    }
}

fn status(token: &Token) -> Option<Value> {
    let text = match token {
        Token::Text(text) | Token::Word(text) => text.as_str(),
        Token::Number(number) => return number.parse().ok().map(Value::Int),
        Token::Symbol(_) => return None,
    };
    let status = match text {
        "Running" => Status::Running,
        "Completed" => Status::Completed,
        "Failed" => Status::Failed,
        "Canceled" | "Cancelled" => Status::Canceled,
        "Terminated" => Status::Terminated,
        "ContinuedAsNew" => Status::ContinuedAsNew,
        "TimedOut" => Status::TimedOut,
        "Paused" => Status::Paused,
        other => return other.parse().ok().map(Value::Int),
    };
    Some(Value::Int(i32::from(status).into()))
}

/// Nanoseconds, "1h30m", or "01:30:00".
fn length(token: &Token) -> Option<Value> {
    let (Token::Text(text) | Token::Number(text)) = token else {
        return None;
    };
    if let Ok(number) = text.parse() {
        return Some(Value::Int(number));
    }
    let parts: Vec<_> = text.split(':').collect();
    if let [hours, minutes, seconds] = parts.as_slice() {
        let number = |text: &str| text.parse::<i64>().ok();
        let total = number(hours)?
            .checked_mul(3600)?
            .checked_add(number(minutes)?.checked_mul(60)?)?
            .checked_add(number(seconds)?)?;
        return total.checked_mul(1_000_000_000).map(Value::Int);
    }
    atoll_workflow_core::parse_length(text).map(Value::Int)
}

/// Whether an object has what a filter asks for. For what is few and in memory; runs are found by the store.
pub(crate) fn fits(filter: &Filter, object: &serde_json::Map<String, serde_json::Value>) -> bool {
    match filter {
        Filter::All(parts) => parts.iter().all(|part| fits(part, object)),
        Filter::Any(parts) => parts.iter().any(|part| fits(part, object)),
        Filter::Not(part) => !fits(part, object),
        Filter::Is(field, test) => {
            let name = match field {
                Field::Column(Column::WorkflowId) => "WorkflowId",
                Field::Column(_) => return false,
                Field::Attribute(name) | Field::List(name) | Field::Text(name) => name,
            };
            passes(object.get(name).filter(|value| !value.is_null()), test)
        }
    }
}

fn passes(found: Option<&serde_json::Value>, test: &Test) -> bool {
    use std::cmp::Ordering;
    let Some(found) = found else {
        return matches!(test, Test::IsNull);
    };
    if let serde_json::Value::Array(list) = found {
        return match test {
            Test::NotEqual(_) | Test::NotIn(_) => list.iter().all(|one| passes(Some(one), test)),
            _ => list.iter().any(|one| passes(Some(one), test)),
        };
    }
    let order = |value: &Value| match (found, value) {
        (serde_json::Value::String(found), Value::Text(value)) => Some(found.as_str().cmp(value)),
        (serde_json::Value::Bool(found), Value::Bool(value)) => Some(found.cmp(value)),
        (serde_json::Value::Number(found), Value::Int(value)) => found.as_i64().map(|found| found.cmp(value)),
        (serde_json::Value::Number(found), Value::Float(value)) => found.as_f64()?.partial_cmp(value),
        _ => None,
    };
    let is = |value: &Value, wanted: &[Ordering]| order(value).is_some_and(|found| wanted.contains(&found));
    let starts = |prefix: &str| found.as_str().is_some_and(|found| found.starts_with(prefix));
    match test {
        Test::Equal(value) => is(value, &[Ordering::Equal]),
        Test::NotEqual(value) => !is(value, &[Ordering::Equal]),
        Test::Less(value) => is(value, &[Ordering::Less]),
        Test::LessOrEqual(value) => is(value, &[Ordering::Less, Ordering::Equal]),
        Test::Greater(value) => is(value, &[Ordering::Greater]),
        Test::GreaterOrEqual(value) => is(value, &[Ordering::Greater, Ordering::Equal]),
        Test::In(values) => values.iter().any(|value| is(value, &[Ordering::Equal])),
        Test::NotIn(values) => !values.iter().any(|value| is(value, &[Ordering::Equal])),
        Test::Between(low, high) => {
            is(low, &[Ordering::Greater, Ordering::Equal]) && is(high, &[Ordering::Less, Ordering::Equal])
        }
        Test::NotBetween(low, high) => is(low, &[Ordering::Less]) || is(high, &[Ordering::Greater]),
        Test::StartsWith(prefix) => starts(prefix),
        Test::NotStartsWith(prefix) => !starts(prefix),
        Test::IsNull => false,
        Test::IsNotNull => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        match parse(text, &|_| Some(Type::Keyword)) {
            Err(Refusal::InvalidArgument(text)) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn queries_are_bounded() {
        let many = |count: usize, with: &str| vec!["RunId = 'x'"; count].join(with);
        parse(&many(MOST_CONDITIONS, " OR "), &|_| None).unwrap();
        assert!(refusal(&many(MOST_CONDITIONS + 1, " AND ")).contains("conditions"));
        let nested = |depth: usize| format!("{}RunId = 'x'{}", "(".repeat(depth), ")".repeat(depth));
        parse(&nested(MOST_NESTED - 1), &|_| None).unwrap();
        assert!(refusal(&nested(MOST_NESTED)).contains("deep"));
        assert!(refusal(&"NOT ".repeat(10_000)).contains("deep"));
        let values = vec!["'x'"; MOST_VALUES + 1].join(",");
        assert!(refusal(&format!("RunId IN ({values})")).contains("values"));
        let words = "w ".repeat(MOST_WORDS + 1);
        let sentence = format!("Said = '{words}'");
        assert!(parse(&sentence, &|_| Some(Type::Text)).is_err());
        let order = ["RunId"; MOST_ORDERS + 1].join(",");
        assert!(refusal(&format!("ORDER BY {order}")).contains("ORDER BY"));
        assert!(refusal(&" ".repeat(MOST_BYTES + 1)).contains("bytes"));
        assert!(refusal("ExecutionDuration = '9999999999999999:0:0'").contains("invalid value"));
    }
}
