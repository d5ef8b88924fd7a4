//! Calendars, intervals, and what schedules do when a start overlaps the one before.

use atoll_workflow_core::{Act, Cron, ScheduleSpec, Scheduler, parse_time};
use temporalio_protos::temporal::api::enums::v1::ScheduleOverlapPolicy as Overlap;
use temporalio_protos::temporal::api::schedule::v1 as proto;
use temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo;

use crate::support::{BEGIN, SECOND};

fn at(text: &str) -> i64 {
    parse_time(text).unwrap()
}

fn next(spec: &proto::ScheduleSpec, after: &str) -> Option<String> {
    ScheduleSpec::parse(spec)
        .unwrap()
        .next(at(after), "seed")
        .map(|(nominal, _)| atoll_workflow_core::time_text(nominal))
}

#[test]
fn cron_strings() {
    let cron = |text: &str| proto::ScheduleSpec {
        cron_string: vec![text.to_owned()],
        ..Default::default()
    };
    let check = |text: &str, after: &str, want: &str| {
        assert_eq!(
            next(&cron(text), after).as_deref(),
            Some(want),
            "{text} after {after}"
        );
    };
    check("0 12 * * *", "2026-01-01T12:00:00Z", "2026-01-02T12:00:00Z");
    check("*/15 * * * *", "2026-01-01T00:01:00Z", "2026-01-01T00:15:00Z");
    check("0 0 29 2 *", "2026-01-01T00:00:00Z", "2028-02-29T00:00:00Z");
    check("0 9 * * mon-fri", "2026-01-02T10:00:00Z", "2026-01-05T09:00:00Z");
    check("@hourly", "2026-01-01T00:30:00Z", "2026-01-01T01:00:00Z");
    check(
        "CRON_TZ=Europe/Berlin 0 9 * * *",
        "2026-07-01T00:00:00Z",
        "2026-07-01T07:00:00Z",
    );
    check("@every 10m", "2026-01-01T00:01:00Z", "2026-01-01T00:10:00Z");
    assert!(ScheduleSpec::parse(&cron("61 * * * *")).is_err());
    assert!(ScheduleSpec::parse(&cron("nonsense")).is_err());
}

#[test]
fn a_time_that_the_clock_skips_does_not_come() {
    let spec = proto::ScheduleSpec {
        cron_string: vec!["30 2 * * *".to_owned()],
        timezone_name: "Europe/Berlin".to_owned(),
        ..Default::default()
    };
    // On the night of 29 March 2026 clocks go from 2:00 to 3:00.
    assert_eq!(
        next(&spec, "2026-03-28T12:00:00Z").as_deref(),
        Some("2026-03-30T00:30:00Z")
    );
}

#[test]
fn workflow_cron_waits_whole_seconds() {
    let cron = Cron::parse("@every 5s").unwrap();
    assert_eq!(
        cron.next_after(BEGIN, BEGIN + 12 * SECOND),
        Some(BEGIN + 15 * SECOND)
    );
    let cron = Cron::parse("* * * * *").unwrap();
    let next = cron.next_after(BEGIN, BEGIN).unwrap();
    assert_eq!(next % (60 * SECOND), 0);
}

fn scheduler(overlap: Overlap) -> Scheduler {
    let schedule = proto::Schedule {
        spec: Some(proto::ScheduleSpec {
            interval: vec![proto::IntervalSpec {
                interval: Some(atoll_workflow_core::duration(10 * SECOND)),
                phase: None,
            }],
            ..Default::default()
        }),
        action: Some(proto::ScheduleAction {
            action: Some(proto::schedule_action::Action::StartWorkflow(
                NewWorkflowExecutionInfo {
                    workflow_id: "wf".to_owned(),
                    ..Default::default()
                },
            )),
        }),
        policies: Some(proto::SchedulePolicies {
            overlap_policy: overlap.into(),
            ..Default::default()
        }),
        state: None,
    };
    Scheduler::new("default", "s", schedule, BEGIN).unwrap()
}

#[test]
fn overlap_policies() {
    for (overlap, starts, waits) in [
        (Overlap::Skip, 1, 0),
        (Overlap::BufferOne, 1, 1),
        (Overlap::BufferAll, 1, 3),
        (Overlap::AllowAll, 4, 0),
        (Overlap::CancelOther, 1, 1),
    ] {
        let mut scheduler = scheduler(overlap);
        let mut started = 0;
        for round in 1..=4 {
            let now = BEGIN + round * 10 * SECOND;
            for act in scheduler.tick(now) {
                if let Act::Start(start) = act {
                    started += 1;
                    let id = scheduler.workflow_id(&start);
                    scheduler.started(&start, &id, &format!("run-{round}"), now);
                }
            }
        }
        assert_eq!(started, starts, "{overlap:?}");
        assert_eq!(scheduler.waiting.len(), waits, "{overlap:?}");
    }
}

#[test]
fn what_was_missed_for_too_long_is_not_caught_up() {
    let mut scheduler = scheduler(Overlap::AllowAll);
    if let Some(policies) = scheduler
        .schedule
        .as_mut()
        .and_then(|schedule| schedule.policies.as_mut())
    {
        policies.catchup_window = Some(atoll_workflow_core::duration(25 * SECOND));
    }
    let acts = scheduler.tick(BEGIN + 100 * SECOND);
    assert_eq!(acts.len(), 3);
    assert_eq!(scheduler.info.unwrap().missed_catchup_window, 7);
}
