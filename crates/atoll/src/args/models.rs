//! Models: who serves them, what they are called, what they cost, and who may spend it.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::parse_duration;

/// Name those who serve models, and keep their keys
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  atoll provider set openai < key.txt
  atoll provider set claude --kind anthropic --key-file key.txt
  atoll provider set bedrock --base-url https://bedrock-runtime.eu-central-1.amazonaws.com < key.txt
  atoll provider set local --base-url http://127.0.0.1:11434/v1 --no-key --serves 'llama*'")]
pub(crate) enum ProviderCommand {
    Set(ProviderSetArgs),
    /// List providers
    List,
    /// Forget a provider and its key
    Delete {
        name: String,
    },
}

/// Add a provider, or change one; its key comes from a file or from standard input
#[derive(Debug, Args)]
pub(crate) struct ProviderSetArgs {
    /// How requests and reports name it
    pub(crate) name: String,
    /// Which wire it speaks: openai, azure, anthropic, gemini or bedrock [default: its name if that is one, else openai]
    #[arg(long)]
    pub(crate) kind: Option<String>,
    /// Where it is [default: where OpenAI, Anthropic and Gemini are]
    #[arg(long, value_name = "URL")]
    pub(crate) base_url: Option<String>,
    /// Names of models that it serves; `*` stands for anything; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) serves: Vec<String>,
    /// It speaks OpenAI's Responses beside Chat Completions
    #[arg(long)]
    pub(crate) responses: bool,
    /// Read the key from this file [default: standard input]. Bedrock's is an API key of its own, or
    /// ACCESS_KEY_ID:SECRET_ACCESS_KEY[:SESSION_TOKEN]
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// It needs no key, or keeps the one that it has
    #[arg(long, conflicts_with = "key_file")]
    pub(crate) no_key: bool,
}

/// List and name models, price them, and make keys that may call them
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  atoll model set smart --to claude/claude-opus-5 --to openai/gpt-5.5 --fallback cheap
  atoll model price set llama3 --input 0.2 --output 0.6
  atoll model key create ci --allow 'gpt-*' --requests 60")]
pub(crate) enum ModelCommand {
    /// List what can be called
    List,
    /// Give models a name of your own
    Set {
        name: String,
        /// PROVIDER/MODEL[=WEIGHT]; may be repeated, and then calls are spread
        #[arg(long, value_name = "TARGET")]
        to: Vec<String>,
        /// A name that is tried when these fail; may be repeated
        #[arg(long, value_name = "NAME")]
        fallback: Vec<String>,
    },
    /// Forget a name
    Delete { name: String },
    /// Set prices of your own
    #[command(subcommand)]
    Price(PriceCommand),
    /// Make keys that may call models and nothing else
    #[command(subcommand)]
    Key(ModelKeyCommand),
    /// Refuse or redact what may not leave for a provider
    #[command(subcommand)]
    Guard(GuardCommand),
}

#[derive(Debug, Subcommand)]
pub(crate) enum GuardCommand {
    /// Show what is guarded against
    Show,
    /// Replace all guards; without options there are none
    Set {
        /// Refuse requests that are estimated to be larger
        #[arg(long, value_name = "TOKENS")]
        max_input: Option<u64>,
        /// A model that nobody may call; `*` stands for anything; may be repeated
        #[arg(long, value_name = "NAME")]
        block: Vec<String>,
        /// Refuse requests that hold it: email, phone, card, iban, ssn or NAME=PATTERN; may be repeated
        #[arg(long, value_name = "RULE")]
        refuse: Vec<String>,
        /// Put the rule's name in its place instead; may be repeated
        #[arg(long, value_name = "RULE")]
        redact: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PriceCommand {
    /// Price a model, in dollars per million tokens
    Set {
        /// Its name, or PROVIDER/NAME for one provider's
        model: String,
        #[arg(long, value_name = "USD")]
        input: Option<String>,
        #[arg(long, value_name = "USD")]
        output: Option<String>,
        #[arg(long, value_name = "USD")]
        cache_read: Option<String>,
        #[arg(long, value_name = "USD")]
        cache_write: Option<String>,
    },
    /// List prices of your own, and the version of the table
    List,
    /// Go back to the price of the table
    Delete { model: String },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelKeyCommand {
    /// Create a key and print its secret, once
    Create {
        /// What it is for
        name: String,
        /// A model that it may ask for; `*` stands for anything; may be repeated [default: all]
        #[arg(long, value_name = "NAME")]
        allow: Vec<String>,
        /// Requests per minute
        #[arg(long, value_name = "COUNT")]
        requests: Option<u64>,
        /// Tokens per minute
        #[arg(long, value_name = "COUNT")]
        tokens: Option<u64>,
        /// It stops working after this long, e.g. 30d
        #[arg(long, value_parser = parse_duration, value_name = "TIME")]
        expires: Option<u64>,
    },
    /// List keys
    List,
    /// Revoke a key
    Revoke {
        #[arg(value_name = "KEY")]
        id: String,
    },
}

/// Cap what calls of models may cost
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  atoll budget set daily 20 --window day --alert 80
  atoll budget set per-run 1.50 --scope run
  atoll budget set intern 5 --scope key --subject intern --window month")]
pub(crate) enum BudgetCommand {
    Set(BudgetSetArgs),
    /// List budgets and how they stand
    List,
    /// Remove a budget
    Delete {
        name: String,
    },
}

/// Make a budget, or change one; what was spent stays
#[derive(Debug, Args)]
pub(crate) struct BudgetSetArgs {
    pub(crate) name: String,
    /// In dollars
    pub(crate) limit: String,
    /// day, week, month or total
    #[arg(long, default_value = "total")]
    pub(crate) window: String,
    /// project, key, workflow, run or sandbox
    #[arg(long, default_value = "project")]
    pub(crate) scope: String,
    /// Which one: an id, or the name of a virtual key, a workflow or a run; without it each has its own
    #[arg(long)]
    pub(crate) subject: Option<String>,
    /// Tell when this share is spent, in percent
    #[arg(long, value_name = "PERCENT")]
    pub(crate) alert: Option<u8>,
}

/// Show what calls of models have cost
///
/// By sandbox, day, hour or in total, what sandboxes used stands beside it.
#[derive(Debug, Args)]
pub(crate) struct SpendArgs {
    /// model, provider, key, sandbox, workflow, run, user, tag, day, hour or total
    #[arg(long, default_value = "model")]
    pub(crate) by: String,
    /// Only the last of it, e.g. 7d [default: all]
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub(crate) last: Option<u64>,
    /// Only this sandbox
    #[arg(long)]
    pub(crate) sandbox: Option<String>,
    /// Show single calls instead of sums
    #[arg(long)]
    pub(crate) calls: bool,
    /// Show one call, with what was asked and answered if the server keeps that
    #[arg(long, value_name = "CALL", conflicts_with = "calls")]
    pub(crate) call: Option<String>,
}

/// Serve models that follow a script, for tests and demos
///
/// Speaks OpenAI's, Anthropic's, Gemini's and Bedrock's wire, costs nothing, needs no key, and says in every answer that it is scripted.
/// The name of the model says what it does: scripted-echo, scripted-think, scripted-tool, scripted-full (as many tokens as
/// allowed), scripted-slow-MS, scripted-stream-COUNT, scripted-coder, and ways to misbehave: scripted-429, -500, -hang, -garbage, -html,
/// -cut, -longline.
#[derive(Debug, Args)]
pub(crate) struct ScriptedArgs {
    /// Address and port to listen on
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7071")]
    pub(crate) listen: SocketAddr,
}
