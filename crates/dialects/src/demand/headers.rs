//! Headers that change what a call can cost.
//!
//! What must hold: as with fields, what is harmless is listed. What a listed beta allows stands in fields, tools and parts, which
//! are looked at by themselves; one that is not listed may widen what the model reads, or set other prices.

use super::Unpriced;

/// Betas of Anthropic's without their dates; those of its SDK 2.8.0 (`AnthropicBetaParam`) were gone through. Left out on purpose:
/// other models that answer instead (`server-side-fallback`, `advisor-tool`), credits, agents and memories that it hosts.
const ANTHROPIC: [&str; 39] = [
    "adaptive-thinking",
    "advanced-tool-use",
    "cache-diagnosis",
    "claude-code",
    "code-execution",
    "compact",
    "computer-use",
    "context-management",
    "effort",
    "extended-cache-ttl",
    "fast-mode",
    "files-api",
    "fine-grained-tool-streaming",
    "interleaved-thinking",
    "max-tokens-3-5-sonnet",
    "mcp-client",
    "mcp-servers",
    "message-batches",
    "model-context-window-exceeded",
    "oauth",
    "output-128k",
    "output-300k",
    "pdfs",
    "prompt-caching",
    "prompt-caching-scope",
    "redact-thinking",
    "search-results",
    "skills",
    "structured-outputs",
    "task-budgets",
    "thinking-display-updates",
    "thinking-token-count",
    "token-counting",
    "token-efficient-tools",
    "tool-examples",
    "tool-search-tool",
    "tools",
    "web-fetch",
    "web-search",
];
/// Lets a model read this much.
const WIDER: (&str, u64) = ("context-1m", 1_000_000);
const OPENAI: [&str; 1] = ["responses=experimental"];

/// The first beta in a header that is passed on of which nobody here knows what it costs. `window`: what the model reads at
/// most as far as its price goes.
pub fn unpriced_header(name: &str, value: &str, window: Option<u64>) -> Option<Unpriced> {
    let is_harmless = |beta: &str| match name {
        "anthropic-version" => true,
        "anthropic-beta" => {
            let beta = undated(beta);
            ANTHROPIC.contains(&beta) || (beta == WIDER.0 && window.is_some_and(|window| window >= WIDER.1))
        }
        "openai-beta" => OPENAI.contains(&beta),
        _ => false,
    };
    let beta = value
        .split(',')
        .map(str::trim)
        .find(|beta| !beta.is_empty() && !is_harmless(beta))?;
    let beta: String = beta.chars().take(60).collect();
    Some(Unpriced {
        field: name.to_owned(),
        why: format!("nobody here knows what `{}` costs", beta.escape_default()),
    })
}

/// `context-1m-2025-08-07` and `claude-code-20250219` without their dates.
fn undated(beta: &str) -> &str {
    beta.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_widens_a_model_is_named() {
        let unpriced = |name, value, window| unpriced_header(name, value, window).map(|it| it.why);
        for fine in [
            "",
            "claude-code-20250219,interleaved-thinking-2025-05-14, fine-grained-tool-streaming-2025-05-14",
            "output-128k-2025-02-19",
            "max-tokens-3-5-sonnet-2024-07-15",
        ] {
            assert_eq!(unpriced("anthropic-beta", fine, None), None, "{fine}");
        }
        let wider = "claude-code-20250219,context-1m-2025-08-07";
        assert!(
            unpriced("anthropic-beta", wider, Some(200_000)).is_some_and(|why| why.contains("context-1m"))
        );
        assert!(unpriced("anthropic-beta", wider, None).is_some());
        assert_eq!(unpriced("anthropic-beta", wider, Some(1_000_000)), None);
        assert!(unpriced("anthropic-beta", "unheard-of-2030-01-01", None).is_some());
        assert_eq!(unpriced("openai-beta", "responses=experimental", None), None);
        assert!(unpriced("openai-beta", "assistants=v2", None).is_some());
        assert_eq!(unpriced("anthropic-version", "2023-06-01", None), None);
    }
}
