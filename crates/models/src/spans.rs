//! A span for each call, in OpenTelemetry's words for generative AI, so that any trace viewer shows what was called, what it
//! used and what it cost. Nothing that was asked or answered is in it.
//!
//! `otel.name` and `otel.kind` say how the exporter should name and draw it.

use atoll_dialects::Dialect;
use atoll_store::ModelCallRow;
use atoll_types::{CallOutcome, ProviderKind};
use tracing::Span;
use tracing::field::Empty;

use crate::setup::ProjectSetup;

/// Opens the span of a call, below that of the request which it came with.
pub(crate) fn begin(row: &ModelCallRow, dialect: Dialect) -> Span {
    let operation = match dialect {
        Dialect::Embeddings | Dialect::AiSdkEmbeddings => "embeddings",
        Dialect::Gemini => "generate_content",
        Dialect::Chat | Dialect::Responses | Dialect::Messages | Dialect::Converse | Dialect::AiSdk => "chat",
    };
    let span = tracing::info_span!(
        "model_call",
        otel.name = format!("{operation} {}", row.asked),
        otel.kind = "client",
        gen_ai.operation.name = operation,
        gen_ai.request.model = row.asked.as_str(),
        gen_ai.provider.name = Empty,
        gen_ai.response.model = Empty,
        gen_ai.response.finish_reasons = Empty,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
        gen_ai.usage.cache_read.input_tokens = Empty,
        gen_ai.usage.cache_creation.input_tokens = Empty,
        "error.type" = Empty,
        atoll.call = row.id.as_str(),
        atoll.provider = Empty,
        atoll.attempts = Empty,
        atoll.cost_usd = Empty,
        atoll.estimated = Empty,
        atoll.key = Empty,
        atoll.sandbox = Empty,
        atoll.workflow = Empty,
        atoll.run = Empty,
    );
    let caller = [
        ("atoll.key", row.key.as_ref().map(|key| key.as_str())),
        (
            "atoll.sandbox",
            row.sandbox.as_ref().map(|sandbox| sandbox.as_str()),
        ),
        ("atoll.workflow", row.workflow.as_deref()),
        ("atoll.run", row.run.as_deref()),
    ];
    for (name, value) in caller {
        if let Some(value) = value {
            span.record(name, value);
        }
    }
    span
}

/// Writes into the span how its call ended.
pub(crate) fn end(span: &Span, row: &ModelCallRow, setup: &ProjectSetup) {
    if span.is_disabled() {
        return;
    }
    let kind = setup
        .providers
        .get(&row.provider)
        .map(|provider| provider.row.kind);
    // The conventions' names of vendors. Whoever speaks like OpenAI is called so; `atoll.provider` tells them apart.
    let vendor = match kind {
        Some(ProviderKind::Anthropic) => "anthropic",
        Some(ProviderKind::Gemini) => "gcp.gemini",
        Some(ProviderKind::Azure) => "azure.ai.openai",
        Some(ProviderKind::Bedrock) => "aws.bedrock",
        Some(ProviderKind::Openai) | None => "openai",
    };
    let usage = &row.usage;
    span.record("gen_ai.provider.name", vendor);
    span.record("gen_ai.response.model", row.model.as_str());
    // What was read from a cache or written to one is part of the input there.
    span.record("gen_ai.usage.input_tokens", usage.total_input());
    span.record("gen_ai.usage.output_tokens", usage.total_output());
    span.record("gen_ai.usage.cache_read.input_tokens", usage.cache_read);
    span.record(
        "gen_ai.usage.cache_creation.input_tokens",
        usage.cache_write.saturating_add(usage.cache_write_1h),
    );
    span.record("atoll.provider", row.provider.as_str());
    span.record("atoll.attempts", u64::from(row.attempts));
    span.record("atoll.cost_usd", row.cost.to_string());
    span.record("atoll.estimated", row.estimated);
    if let Some(finish) = &row.finish {
        span.record("gen_ai.response.finish_reasons", finish.as_str());
    }
    if !matches!(row.outcome, CallOutcome::Done) {
        span.record("error.type", row.outcome.name());
    }
}
