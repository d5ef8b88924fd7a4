//! Whether to try again, and when.

use crate::time::{Nanos, duration, nanos, seconds};
use crate::words::common::RetryPolicy;
use crate::words::enums::{RetryState, TimeoutType};
use crate::words::failure::Failure;
use crate::words::failure::failure::FailureInfo;

/// Another attempt after this long, or why not.
pub(crate) type Decision = Result<Nanos, RetryState>;

/// Fills in what the caller left out, as Temporal does.
pub(crate) fn with_defaults(policy: Option<&RetryPolicy>) -> RetryPolicy {
    let mut policy = policy.cloned().unwrap_or_default();
    if nanos(policy.initial_interval.as_ref()) == 0 {
        policy.initial_interval = Some(duration(seconds(1)));
    }
    if policy.backoff_coefficient == 0.0 {
        policy.backoff_coefficient = 2.0;
    }
    if nanos(policy.maximum_interval.as_ref()) == 0 {
        policy.maximum_interval = Some(duration(
            nanos(policy.initial_interval.as_ref()).saturating_mul(100),
        ));
    }
    policy
}

/// Says what is wrong with a policy, if anything is.
pub(crate) fn check(policy: &RetryPolicy) -> Result<(), String> {
    let initial = nanos(policy.initial_interval.as_ref());
    let maximum = nanos(policy.maximum_interval.as_ref());
    if policy.maximum_attempts == 1 {
        return Ok(());
    }
    if initial < 0 {
        return Err("InitialInterval cannot be negative on retry policy.".to_owned());
    }
    let coefficient = policy.backoff_coefficient;
    if coefficient.is_nan() || (coefficient != 0.0 && coefficient < 1.0) {
        return Err("BackoffCoefficient cannot be less than 1 on retry policy.".to_owned());
    }
    if maximum < 0 {
        return Err("MaximumInterval cannot be negative on retry policy.".to_owned());
    }
    if maximum > 0 && maximum < initial {
        return Err("MaximumInterval cannot be less than InitialInterval on retry policy.".to_owned());
    }
    if policy.maximum_attempts < 0 {
        return Err("MaximumAttempts cannot be negative on retry policy.".to_owned());
    }
    Ok(())
}

/// `attempt` is the one that has failed; `expires_at` is when it is too late for everything.
pub(crate) fn decide(
    policy: &RetryPolicy,
    attempt: i32,
    failure: &Failure,
    now: Nanos,
    expires_at: Nanos,
) -> Decision {
    if !is_retryable(failure, &policy.non_retryable_error_types) {
        return Err(RetryState::NonRetryableFailure);
    }
    if policy.maximum_attempts > 0 && attempt >= policy.maximum_attempts {
        return Err(RetryState::MaximumAttemptsReached);
    }
    let wait = requested_delay(failure).unwrap_or_else(|| backoff(policy, attempt));
    if expires_at != 0 && now.saturating_add(wait) > expires_at {
        return Err(RetryState::Timeout);
    }
    Ok(wait)
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "an interval is bounded before it is converted back"
)]
pub(crate) fn backoff(policy: &RetryPolicy, attempt: i32) -> Nanos {
    let initial = nanos(policy.initial_interval.as_ref());
    let maximum = nanos(policy.maximum_interval.as_ref());
    let wait = initial as f64 * policy.backoff_coefficient.powi(attempt.saturating_sub(1).max(0));
    let ceiling = if maximum > 0 { maximum } else { i64::MAX / 4 };
    if wait >= ceiling as f64 {
        ceiling
    } else {
        wait as i64
    }
}

fn requested_delay(failure: &Failure) -> Option<Nanos> {
    match &failure.failure_info {
        Some(FailureInfo::ApplicationFailureInfo(info)) => {
            info.next_retry_delay.as_ref().map(|delay| nanos(Some(delay)))
        }
        _ => None,
    }
}

pub(crate) fn is_retryable(failure: &Failure, not: &[String]) -> bool {
    match &failure.failure_info {
        Some(FailureInfo::TerminatedFailureInfo(_) | FailureInfo::CanceledFailureInfo(_)) => false,
        Some(FailureInfo::TimeoutFailureInfo(info)) => {
            let kind = TimeoutType::try_from(info.timeout_type).unwrap_or_default();
            matches!(kind, TimeoutType::StartToClose | TimeoutType::Heartbeat)
                && !not
                    .iter()
                    .any(|name| *name == format!("TemporalTimeout:{}", timeout_name(kind)))
        }
        Some(FailureInfo::ServerFailureInfo(info)) => !info.non_retryable,
        Some(FailureInfo::ApplicationFailureInfo(info)) => !info.non_retryable && !not.contains(&info.r#type),
        Some(
            FailureInfo::ResetWorkflowFailureInfo(_)
            | FailureInfo::ActivityFailureInfo(_)
            | FailureInfo::ChildWorkflowExecutionFailureInfo(_)
            | FailureInfo::NexusOperationExecutionFailureInfo(_)
            | FailureInfo::NexusHandlerFailureInfo(_),
        )
        | None => true,
    }
}

pub(crate) fn timeout_name(kind: TimeoutType) -> &'static str {
    match kind {
        TimeoutType::StartToClose => "StartToClose",
        TimeoutType::ScheduleToStart => "ScheduleToStart",
        TimeoutType::ScheduleToClose => "ScheduleToClose",
        TimeoutType::Heartbeat => "Heartbeat",
        TimeoutType::Unspecified => "Unspecified",
    }
}
