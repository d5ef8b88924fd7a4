//! Rows of calls that go, and what they leave: what each subject of a budget has spent by them.
//!
//! What must hold: budgets count the same before and after. One asks for what was spent since its window began, and its window
//! contains now; calls go oldest first, so of each kind of window the last that a call was in is the only one that can still be
//! asked for. A subject that called long ago is forgotten when there are too many, as budgets forget it themselves.

use atoll_types::{BudgetScope, BudgetWindow, ProjectId, Timestamp};
use rusqlite::Connection;

use crate::Error;
use crate::sqlite::sql;

/// The most subjects of each scope that are remembered of one project: what budgets remember of them.
const SUBJECTS: i64 = 16 * 1024;
const DAY_MILLIS: i64 = 24 * 60 * 60 * 1000;

/// A call that goes.
pub(crate) struct Gone {
    id: String,
    pub(crate) at: i64,
    /// By [`BudgetScope`], but that of the project.
    subjects: [(BudgetScope, Option<String>); 4],
    cost: i64,
}

/// The oldest calls of a project that began before a time and have ended.
pub(crate) fn oldest(
    db: &Connection,
    project: &ProjectId,
    before: i64,
    limit: usize,
) -> Result<Vec<Gone>, Error> {
    sql::rows(
        db,
        "SELECT id, created_at, key, workflow, run, sandbox, cost_pico FROM model_calls
         WHERE project = ?1 AND created_at < ?2 AND outcome != 'open' ORDER BY created_at, id LIMIT ?3",
        &[&project.as_str(), &before, &sql::as_limit(limit)],
        |row| {
            Ok(Gone {
                id: row.get("id")?,
                at: row.get("created_at")?,
                subjects: [
                    (BudgetScope::Key, row.get("key")?),
                    (BudgetScope::Workflow, row.get("workflow")?),
                    (BudgetScope::Run, row.get("run")?),
                    (BudgetScope::Sandbox, row.get("sandbox")?),
                ],
                cost: row.get("cost_pico")?,
            })
        },
    )
}

/// Removes a call of a project, after all that are older. Whether it has cost something: then
/// [`forget_subjects`] is to follow.
pub(crate) fn remove(db: &Connection, project: &ProjectId, call: &Gone) -> Result<bool, Error> {
    sql::execute(db, "DELETE FROM model_calls WHERE id = ?1", &[&call.id])?;
    if call.cost <= 0 {
        return Ok(false);
    }
    add(db, project, BudgetScope::Project, project.as_str(), call)?;
    for (scope, subject) in &call.subjects {
        if let Some(subject) = subject {
            add(db, project, *scope, subject, call)?;
        }
    }
    Ok(true)
}

fn add(
    db: &Connection,
    project: &ProjectId,
    scope: BudgetScope,
    subject: &str,
    call: &Gone,
) -> Result<(), Error> {
    let days = call.at.div_euclid(DAY_MILLIS);
    let day = days.saturating_mul(DAY_MILLIS);
    // The first day of all was a Thursday, and weeks begin on Mondays.
    let week = (days - (days + 3).rem_euclid(7)).saturating_mul(DAY_MILLIS);
    sql::execute(
        db,
        "INSERT INTO model_spent_trimmed (project, scope, subject, called_at, total_pico, day, day_pico, week, week_pico,
             month, month_pico)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?5, ?7, ?5, ifnull(unixepoch(?4 / 1000, 'unixepoch', 'start of month') * 1000, ?6), ?5)
         ON CONFLICT (project, scope, subject) DO UPDATE SET
             called_at = max(called_at, excluded.called_at),
             total_pico = total_pico + min(?5, 9223372036854775807 - total_pico),
             day_pico = CASE WHEN day = excluded.day THEN day_pico + min(?5, 9223372036854775807 - day_pico)
                             WHEN day < excluded.day THEN ?5 ELSE day_pico END,
             day = max(day, excluded.day),
             week_pico = CASE WHEN week = excluded.week THEN week_pico + min(?5, 9223372036854775807 - week_pico)
                              WHEN week < excluded.week THEN ?5 ELSE week_pico END,
             week = max(week, excluded.week),
             month_pico = CASE WHEN month = excluded.month THEN month_pico + min(?5, 9223372036854775807 - month_pico)
                               WHEN month < excluded.month THEN ?5 ELSE month_pico END,
             month = max(month, excluded.month)",
        &[
            &project.as_str(),
            &scope.name(),
            &subject,
            &call.at,
            &call.cost,
            &day,
            &week,
        ],
    )?;
    Ok(())
}

/// Of more than are remembered, those that called longest ago.
pub(crate) fn forget_subjects(db: &Connection, project: &ProjectId) -> Result<(), Error> {
    for scope in BudgetScope::ALL {
        sql::execute(
            db,
            "DELETE FROM model_spent_trimmed WHERE project = ?1 AND scope = ?2 AND subject IN
                 (SELECT subject FROM model_spent_trimmed WHERE project = ?1 AND scope = ?2
                  ORDER BY called_at DESC LIMIT -1 OFFSET ?3)",
            &[&project.as_str(), &scope.name(), &SUBJECTS],
        )?;
    }
    Ok(())
}

/// What subjects have spent by calls that are gone, in the window that began at `from`; those that called last come first.
pub(crate) fn spent(
    db: &Connection,
    project: &ProjectId,
    scope: BudgetScope,
    subject: Option<&str>,
    window: BudgetWindow,
    from: Timestamp,
    most: usize,
) -> Result<Vec<(String, i64)>, Error> {
    let (sum, begins) = match window {
        BudgetWindow::Day => ("day_pico", "day = ?4"),
        BudgetWindow::Week => ("week_pico", "week = ?4"),
        BudgetWindow::Month => ("month_pico", "month = ?4"),
        BudgetWindow::Total => ("total_pico", "?4 IS NOT NULL"),
    };
    sql::rows(
        db,
        &format!(
            "SELECT subject, {sum} AS spent FROM model_spent_trimmed
             WHERE project = ?1 AND scope = ?2 AND (?3 IS NULL OR subject = ?3) AND {begins}
             ORDER BY called_at DESC LIMIT ?5"
        ),
        &[
            &project.as_str(),
            &scope.name(),
            &subject,
            &from.0,
            &sql::as_limit(most),
        ],
        |row| Ok((row.get("subject")?, row.get("spent")?)),
    )
}

/// Retention, as for facts: at most so many that began before a time, and how many went.
pub(crate) fn expire(db: &Connection, before: Timestamp, limit: usize) -> Result<usize, Error> {
    let projects = sql::rows(db, "SELECT project FROM ledger_sizes", &[], |row| {
        sql::word::<ProjectId>(row, "project")
    })?;
    let mut gone = 0;
    for project in projects {
        let old = oldest(db, &project, before.0, limit - gone)?;
        let mut has_spent = false;
        for call in &old {
            has_spent |= remove(db, &project, call)?;
        }
        if has_spent {
            forget_subjects(db, &project)?;
        }
        gone += old.len();
        if gone >= limit {
            break;
        }
    }
    Ok(gone)
}
