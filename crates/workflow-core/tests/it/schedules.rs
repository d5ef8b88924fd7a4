//! Calendars, intervals, and what schedules do when a start overlaps the one before.

use atoll_workflow_core::{Act, Cron, Next, Refusal, ScheduleSpec, Scheduler, Wake, Work, parse_time};
use temporalio_protos::temporal::api::enums::v1::ScheduleOverlapPolicy as Overlap;
use temporalio_protos::temporal::api::schedule::v1 as proto;
use temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo;

use crate::support::{BEGIN, SECOND};

fn at(text: &str) -> i64 {
    parse_time(text).unwrap()
}

fn next(spec: &proto::ScheduleSpec, after: &str) -> Option<String> {
    let found = ScheduleSpec::parse(spec)
        .unwrap()
        .next(at(after), "seed", &mut Work::new(u32::MAX));
    match found {
        Next::At { nominal, .. } => Some(atoll_workflow_core::time_text(nominal)),
        Next::Never | Next::NotUntil(_) => None,
    }
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

fn every(length: i64) -> proto::ScheduleSpec {
    proto::ScheduleSpec {
        interval: vec![proto::IntervalSpec {
            interval: Some(atoll_workflow_core::duration(length)),
            phase: None,
        }],
        ..Default::default()
    }
}

fn scheduler(overlap: Overlap) -> Scheduler {
    Scheduler::new("default", "s", schedule(every(10 * SECOND), overlap), BEGIN).unwrap()
}

fn schedule(spec: proto::ScheduleSpec, overlap: Overlap) -> proto::Schedule {
    proto::Schedule {
        spec: Some(spec),
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
    }
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

/// A calendar whose fields are all given, as an exclusion or a match.
fn calendar(second: &str, minute: &str, hour: &str) -> proto::CalendarSpec {
    proto::CalendarSpec {
        second: second.to_owned(),
        minute: minute.to_owned(),
        hour: hour.to_owned(),
        ..Default::default()
    }
}

/// As an older server has stored it: nobody looked at it before.
fn stored(spec: proto::ScheduleSpec) -> Scheduler {
    let mut scheduler = scheduler(Overlap::Skip);
    scheduler.schedule = Some(schedule(spec, Overlap::Skip));
    scheduler
}

/// Specs that match nothing, or nothing within reach, each in its own way.
fn poisons() -> Vec<(&'static str, proto::ScheduleSpec)> {
    let seconds_one_by_one = (0..60).map(|second| calendar(&second.to_string(), "*", "*"));
    vec![
        (
            "every second, all of them excluded",
            proto::ScheduleSpec {
                exclude_calendar: vec![calendar("*", "*", "*")],
                ..every(SECOND)
            },
        ),
        (
            "a calendar that is excluded itself",
            proto::ScheduleSpec {
                calendar: vec![calendar("0", "*", "*")],
                exclude_calendar: vec![calendar("0", "*", "*")],
                ..Default::default()
            },
        ),
        (
            "every hour, whose first second is excluded",
            proto::ScheduleSpec {
                exclude_calendar: vec![calendar("0", "0", "*")],
                ..every(3600 * SECOND)
            },
        ),
        (
            "all seconds, each excluded by a calendar of its own",
            proto::ScheduleSpec {
                calendar: vec![calendar("*", "*", "*")],
                exclude_calendar: seconds_one_by_one.collect(),
                ..Default::default()
            },
        ),
        (
            "a day that no month has",
            proto::ScheduleSpec {
                cron_string: vec!["0 0 30 2 *".to_owned()],
                ..Default::default()
            },
        ),
        (
            "halves of a day, both excluded",
            proto::ScheduleSpec {
                timezone_name: "Europe/Berlin".to_owned(),
                exclude_calendar: vec![calendar("*", "*", "0-11"), calendar("*", "*", "12-23")],
                ..every(7 * SECOND)
            },
        ),
    ]
}

#[test]
fn a_spec_without_a_match_within_reach_is_refused() {
    for (what, spec) in poisons() {
        let refused =
            Scheduler::new("default", "s", schedule(spec.clone(), Overlap::Skip), BEGIN).unwrap_err();
        let Refusal::InvalidArgument(text) = &refused else {
            panic!("{what}: {refused:?}");
        };
        assert!(
            text.contains("never matches") || text.contains("no match was found within"),
            "{what}: {text}"
        );
        // Nor may a schedule become so.
        let mut known = scheduler(Overlap::Skip);
        assert!(
            known.replace(schedule(spec, Overlap::Skip), BEGIN).is_err(),
            "{what}"
        );
    }
    // One that says nothing, or is over, may be triggered by hand.
    let over = proto::ScheduleSpec {
        end_time: Some(atoll_workflow_core::stamp(BEGIN - 1)),
        ..every(SECOND)
    };
    for spec in [proto::ScheduleSpec::default(), over] {
        Scheduler::new("default", "s", schedule(spec, Overlap::Skip), BEGIN).unwrap();
    }
}

#[test]
fn a_stored_spec_without_a_match_does_nothing_and_can_be_handled() {
    let later = BEGIN + 400 * 24 * 3600 * SECOND;
    for (what, spec) in poisons() {
        let mut scheduler = stored(spec);
        assert!(!matches!(scheduler.wake(), Wake::Due(_)), "{what}");
        assert!(scheduler.tick(later).is_empty(), "{what}");
        let (_, info) = scheduler.view(later);
        assert!(info.future_action_times.is_empty(), "{what}");
        assert!(!info.invalid_schedule_error.is_empty(), "{what}");
        let pause = proto::SchedulePatch {
            pause: "stop it".to_owned(),
            ..Default::default()
        };
        scheduler.patch(&pause, later).unwrap();
        assert!(scheduler.is_paused(), "{what}");
        scheduler.tick(later);
        // Other than by chance: what cannot be searched is said not to be.
        if let Ok(times) = scheduler.times(0, i64::MAX, 10) {
            assert_eq!(times, [], "{what}");
        }
    }
}

#[test]
fn a_search_that_was_cut_short_goes_on_where_it_stopped() {
    // Excluded second by second until the end of the year: more steps than one search may make.
    let year = proto::CalendarSpec {
        year: "2026".to_owned(),
        ..calendar("*", "*", "*")
    };
    let exclude_calendar = (0..60)
        .map(|second| proto::CalendarSpec {
            second: second.to_string(),
            ..year.clone()
        })
        .collect();
    let spec = proto::ScheduleSpec {
        calendar: vec![calendar("*", "*", "*")],
        exclude_calendar,
        ..Default::default()
    };
    let mut scheduler = stored(spec);
    scheduler.looked_until = at("2026-12-20T00:00:00Z");
    let mut looks = 0;
    let due = loop {
        match scheduler.wake() {
            Wake::Due(due) => break due,
            Wake::Look(again) => {
                assert!(again > scheduler.looked_until);
                assert!(scheduler.tick(again).is_empty());
                looks += 1;
                assert!(looks < 1000, "the search gets nowhere");
            }
            Wake::Never => panic!("the search was given up"),
        }
    };
    assert!(looks > 0, "one search was enough");
    assert_eq!(due, at("2027-01-01T00:00:00Z"));
}

#[test]
fn exclusions_are_skipped_as_a_whole() {
    let named = |day: &str, month: &str| proto::CalendarSpec {
        day_of_week: day.to_owned(),
        month: month.to_owned(),
        // As people write it: the second is left out, and is 0.
        ..calendar("", "*", "*")
    };
    let check = |spec: proto::ScheduleSpec, after: &str, want: &str| {
        ScheduleSpec::parse(&spec).unwrap().check(at(after)).unwrap();
        assert_eq!(next(&spec, after).as_deref(), Some(want));
    };
    // A quarter of a year of minutes and a weekend.
    let spec = proto::ScheduleSpec {
        exclude_calendar: vec![named("", "7-9"), named("sat,sun", "")],
        ..every(60 * SECOND)
    };
    check(spec.clone(), "2026-06-30T23:59:00Z", "2026-10-01T00:00:00Z");
    check(spec, "2026-10-02T23:59:00Z", "2026-10-05T00:00:00Z");
    // A year of minutes, as a cron string.
    let spec = proto::ScheduleSpec {
        cron_string: vec!["* * * * *".to_owned()],
        exclude_calendar: vec![proto::CalendarSpec {
            year: "2026-2030".to_owned(),
            ..calendar("", "*", "*")
        }],
        ..Default::default()
    };
    check(spec, "2026-06-30T23:59:00Z", "2031-01-01T00:00:00Z");
    // Clocks are put back from 3:00 to 2:00 on 25 October 2026; the first half of that hour comes twice and is free twice.
    let spec = proto::ScheduleSpec {
        timezone_name: "Europe/Berlin".to_owned(),
        exclude_calendar: vec![calendar("*", "30-59", "2")],
        ..every(600 * SECOND)
    };
    check(spec, "2026-10-25T00:20:00Z", "2026-10-25T01:00:00Z");
}

/// All times in between.
fn all_times(spec: &ScheduleSpec, after: i64, until: i64) -> Vec<i64> {
    let mut found = Vec::new();
    let mut after = after;
    loop {
        match spec.next(after, "", &mut Work::new(u32::MAX)) {
            Next::At { nominal, .. } if nominal <= until => {
                found.push(nominal);
                after = nominal;
            }
            Next::NotUntil(known) if known < until => after = known,
            _ => return found,
        }
    }
}

#[test]
fn what_is_skipped_is_what_is_excluded() {
    // Random specs over a few hours, with and without exclusions: the second is the first less what is excluded.
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    for round in 0..60 {
        let mut field = |most: u64| {
            let (one, other) = (random(most), random(most));
            match random(4) {
                0 => "*".to_owned(),
                1 => format!("*/{}", 1 + random(7)),
                2 => format!("{}-{}", one.min(other), one.max(other)),
                _ => one.to_string(),
            }
        };
        let exclude_calendar: Vec<_> = (0..2 + round % 3)
            .map(|_| proto::CalendarSpec {
                day_of_week: field(7),
                ..calendar(&field(60), &field(60), &field(24))
            })
            .collect();
        let matching = calendar(&field(60), &field(60), &field(24));
        let (length, phase) = (30 + random(90), random(30));
        let mut plain = proto::ScheduleSpec {
            timezone_name: ["", "America/New_York"][round % 2].to_owned(),
            ..Default::default()
        };
        if round % 4 < 2 {
            plain.calendar.push(matching);
        } else {
            let seconds = |count: u64| Some(atoll_workflow_core::duration(count.cast_signed() * SECOND));
            plain.interval.push(proto::IntervalSpec {
                interval: seconds(length),
                phase: seconds(phase),
            });
        }
        let less = proto::ScheduleSpec {
            exclude_calendar: exclude_calendar.clone(),
            ..plain.clone()
        };
        // Over the night in which clocks are put back in New York.
        let (from, until) = (at("2026-11-01T03:00:00Z"), at("2026-11-01T08:00:00Z"));
        let excluded = ScheduleSpec::parse(&proto::ScheduleSpec {
            calendar: exclude_calendar,
            timezone_name: plain.timezone_name.clone(),
            ..Default::default()
        })
        .unwrap();
        let zone = jiff::tz::TimeZone::get(if plain.timezone_name.is_empty() {
            "UTC"
        } else {
            &plain.timezone_name
        })
        .unwrap();
        let shown =
            |nanos: i64| zone.to_datetime(jiff::Timestamp::from_nanosecond(i128::from(nanos)).unwrap());
        // A calendar names what clocks show, so what they show twice is excluded twice.
        let taken: std::collections::BTreeSet<_> = all_times(&excluded, from - 7200 * SECOND, until)
            .into_iter()
            .map(shown)
            .collect();
        let want: Vec<_> = all_times(&ScheduleSpec::parse(&plain).unwrap(), from, until)
            .into_iter()
            .filter(|nanos| !taken.contains(&shown(*nanos)))
            .collect();
        let found = all_times(&ScheduleSpec::parse(&less).unwrap(), from, until);
        assert_eq!(found, want, "{less:?}");
    }
}

#[test]
fn intervals_below_a_second_are_refused_however_they_are_written() {
    for text in ["@every 0s", "@every 1ns", "@every 999ms", "@every 10s/10s"] {
        let spec = proto::ScheduleSpec {
            cron_string: vec![text.to_owned()],
            ..Default::default()
        };
        assert!(ScheduleSpec::parse(&spec).is_err(), "{text}");
        // Stored by an older server, it does nothing.
        let mut scheduler = stored(spec);
        assert_eq!(scheduler.wake(), Wake::Never, "{text}");
        assert!(scheduler.tick(BEGIN + 3600 * SECOND).is_empty(), "{text}");
    }
}

#[test]
fn numbers_at_their_ends_do_not_overflow() {
    let extreme = [i32::MIN, -1, 0, 1, i32::MAX];
    for start in extreme {
        for end in extreme {
            for step in extreme {
                let range = vec![proto::Range { start, end, step }];
                let spec = proto::ScheduleSpec {
                    structured_calendar: vec![proto::StructuredCalendarSpec {
                        second: range.clone(),
                        year: range,
                        ..Default::default()
                    }],
                    ..Default::default()
                };
                let spec = ScheduleSpec::parse(&spec).unwrap();
                for after in [i64::MIN, BEGIN, i64::MAX] {
                    spec.next(after, "", &mut Work::new(1));
                }
            }
        }
    }
    let spec = proto::ScheduleSpec {
        jitter: Some(atoll_workflow_core::duration(i64::MAX)),
        start_time: Some(atoll_workflow_core::stamp(i64::MIN)),
        ..every(i64::MAX - SECOND)
    };
    let mut scheduler = stored(spec);
    for now in [i64::MIN, 0, i64::MAX] {
        scheduler.tick(now);
        scheduler.wake();
        let _ = scheduler.times(i64::MIN, i64::MAX, 1000);
    }
    let cron = Cron::parse("@every 2400000h").unwrap();
    assert!(cron.next_after(i64::MIN, i64::MAX).is_some());
}

#[test]
fn long_absence_costs_one_look() {
    // A year of seconds has passed; as many as may wait are kept, and the rest is gone.
    let mut scheduler =
        Scheduler::new("default", "s", schedule(every(SECOND), Overlap::BufferAll), BEGIN).unwrap();
    let later = BEGIN + 300 * 24 * 3600 * SECOND;
    scheduler.tick(later);
    assert_eq!(scheduler.waiting.len(), 999, "one of a thousand has started");
    assert_eq!(scheduler.looked_until, later);
    // Paused, nothing is kept of it.
    let mut scheduler =
        Scheduler::new("default", "s", schedule(every(SECOND), Overlap::AllowAll), BEGIN).unwrap();
    let pause = proto::SchedulePatch {
        pause: "for a year".to_owned(),
        ..Default::default()
    };
    scheduler.patch(&pause, BEGIN).unwrap();
    assert!(scheduler.tick(later).is_empty());
    assert_eq!(scheduler.looked_until, later);
}

#[test]
fn backfills_are_bounded_together() {
    let mut scheduler = scheduler(Overlap::AllowAll);
    let range = proto::BackfillRequest {
        start_time: Some(atoll_workflow_core::stamp(0)),
        end_time: Some(atoll_workflow_core::stamp(BEGIN)),
        overlap_policy: Overlap::AllowAll.into(),
    };
    let patch = |count: usize| proto::SchedulePatch {
        backfill_request: vec![range; count],
        ..Default::default()
    };
    scheduler.patch(&patch(1), BEGIN).unwrap();
    assert_eq!(scheduler.waiting.len(), 1000);
    for count in [100, 101, 100_000] {
        let refused = scheduler.patch(&patch(count), BEGIN).unwrap_err();
        assert!(matches!(refused, Refusal::InvalidArgument(_)), "{refused:?}");
    }
}

#[test]
fn each_overlapped_workflow_is_stopped_once() {
    let mut scheduler = scheduler(Overlap::CancelOther);
    let mut running = 0;
    for act in scheduler.tick(BEGIN + 10 * SECOND) {
        if let Act::Start(start) = act {
            running += 1;
            scheduler.started(&start, "wf", "run", BEGIN);
        }
    }
    let acts = scheduler.tick(BEGIN + 5000 * SECOND);
    assert_eq!((running, acts.len()), (1, 1), "{acts:?}");
}

#[test]
fn specs_are_bounded_in_size() {
    let too_many = [
        proto::ScheduleSpec {
            cron_string: vec!["* * * * *".to_owned(); 101],
            ..Default::default()
        },
        proto::ScheduleSpec {
            exclude_calendar: vec![calendar("0", "0", "0"); 501],
            ..every(SECOND)
        },
        proto::ScheduleSpec {
            calendar: vec![calendar(&"1,".repeat(500_000), "0", "0")],
            ..Default::default()
        },
        proto::ScheduleSpec {
            structured_calendar: vec![proto::StructuredCalendarSpec {
                hour: vec![proto::Range::default(); 100_000],
                ..Default::default()
            }],
            ..Default::default()
        },
    ];
    for spec in too_many {
        let refused = ScheduleSpec::parse(&spec).unwrap_err().to_string();
        assert!(refused.contains("may have") && refused.len() < 200, "{refused}");
    }
}
