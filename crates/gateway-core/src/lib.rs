//! What the model gateway decides: what a call costs, whether budgets allow it, where it goes and what is tried next.
//!
//! ```text
//!   model, wishes ── Catalogue::plan ──> targets in order        Breaker, RetryBudget: may this one be tried (again)?
//!   body, limits ─── estimate ─────────> at most so many tokens, whatever the caller writes
//!   tokens ───────── Prices::cost ─────> dollars, exactly
//!   dollars ──────── Books::reserve ───> a reservation, or which budget refuses ── Books::settle ──> alerts
//! ```
//! What must hold:
//! - No clock, no randomness, no I/O: what varies is an argument.
//! - A reservation is taken from every budget that applies or from none, so the sum of what is spent and reserved never
//!   exceeds a limit, however many calls run at once, as long as no call costs more than was reserved for it.
//! - A token is in one bucket and is paid once.

mod breaker;
mod budget;
mod calendar;
mod estimate;
mod prices;
mod rate;
mod route;

pub use breaker::{Breaker, BreakerState, RetryBudget};
pub use budget::{Alert, Books, Budget, Exhausted, MOST_SUBJECTS, Reservation, Spender, Standing};
pub use calendar::Window;
pub use estimate::{Reading, input_tokens, most_input_tokens, output_tokens};
pub use prices::{Most, Price, PriceError, Prices, Rates};
pub use rate::{Rate, RateLimit};
pub use route::{Catalogue, NoRoute, Pattern, Provider, Route, Sort, Target, TargetHealth, Wishes};
