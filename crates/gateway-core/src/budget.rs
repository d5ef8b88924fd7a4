//! Budgets that hold: what a call may cost is reserved before it begins and settled when it has ended.
//!
//! ```text
//!   limit ├──────── spent ────────┼──── reserved ────┼─── left ───┤
//!                                 reserve: left -> reserved, in every budget that applies, or in none
//!                                 settle:  reserved -> spent (what it cost) and left (the rest)
//! ```
//! A budget with a subject caps that one key, workflow, run or sandbox; one without caps each of them alike.
//!
//! What must hold: `spent + reserved <= limit` after every reservation; what was reserved is settled exactly once; a call
//! counts in the window in which it began. A clock that goes back opens no old window. Calls under way are known whether or
//! not a budget applies to them: one that is set meanwhile reserves for them, and counts them when they end.

use std::collections::HashMap;

use atoll_types::{BudgetId, BudgetScope, BudgetWindow, KeyId, ProjectId, SandboxId, Timestamp, Usd};

use crate::Window;

/// Subjects of one budget from which on it is tidied up now and then.
const MANY: usize = 1024;
/// The most subjects of one budget that are remembered. Names of runs and workflows are callers' own: who thinks of so many
/// has as many budgets anyway, and those that called longest ago are forgotten.
pub const MOST_SUBJECTS: usize = 16 * MANY;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    pub id: BudgetId,
    pub project: ProjectId,
    pub name: String,
    pub scope: BudgetScope,
    /// Which key, workflow, run or sandbox; `None`: each of them has its own.
    pub subject: Option<String>,
    pub window: BudgetWindow,
    pub limit: Usd,
    /// Tell when this share of the limit, in percent, is spent.
    pub alert_percent: Option<u8>,
}

/// On whose behalf a call is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spender {
    pub project: ProjectId,
    pub key: Option<KeyId>,
    pub sandbox: Option<SandboxId>,
    pub workflow: Option<String>,
    pub run: Option<String>,
}

impl Spender {
    fn subject(&self, scope: BudgetScope) -> Option<&str> {
        match scope {
            BudgetScope::Project => Some(self.project.as_str()),
            BudgetScope::Key => self.key.as_ref().map(KeyId::as_str),
            BudgetScope::Sandbox => self.sandbox.as_ref().map(SandboxId::as_str),
            BudgetScope::Workflow => self.workflow.as_deref(),
            BudgetScope::Run => self.run.as_deref(),
        }
    }
}

/// Money set aside for a call. To be given to [`Books::settle`], once. The default is that of a call that costs nothing.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "what is reserved must be settled"]
pub struct Reservation {
    /// Which of the calls under way.
    call: Option<u64>,
    amount: Usd,
    is_capped: bool,
}

impl Reservation {
    pub fn amount(&self) -> Usd {
        self.amount
    }

    /// Whether any budget stood behind it when it was made.
    pub fn is_capped(&self) -> bool {
        self.is_capped
    }
}

/// Which budget refuses a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exhausted {
    pub budget: Budget,
    pub subject: String,
    pub spent: Usd,
    pub reserved: Usd,
    pub wanted: Usd,
    /// When it begins anew; `None`: never.
    pub resets_at: Option<Timestamp>,
    /// What was spent is known; if not, nothing is let through until it is.
    pub is_known: bool,
}

/// A budget of which a share is spent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alert {
    pub budget: Budget,
    pub subject: String,
    pub spent: Usd,
}

/// How a budget stands for one subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub subject: String,
    pub spent: Usd,
    pub reserved: Usd,
    pub resets_at: Option<Timestamp>,
}

#[derive(Debug, Clone, Default)]
pub struct Books {
    entries: HashMap<BudgetId, Entry>,
    of_project: HashMap<ProjectId, Vec<BudgetId>>,
    /// Calls under way, by number.
    under_way: HashMap<u64, UnderWay>,
    /// The number of the next.
    next: u64,
}

/// A call that has begun and is not settled.
#[derive(Debug, Clone)]
struct UnderWay {
    spender: Spender,
    amount: Usd,
    began: Timestamp,
    /// Where it is set aside, for which subject, and in which window the call counts there.
    from: Vec<(BudgetId, String, Timestamp)>,
}

#[derive(Debug, Clone)]
struct Entry {
    budget: Budget,
    /// What was spent before is in the counters.
    is_known: bool,
    counters: HashMap<String, Counter>,
    /// Counts uses.
    uses: u64,
}

#[derive(Debug, Clone)]
struct Counter {
    window: Window,
    spent: Usd,
    reserved: Usd,
    alerted: bool,
    /// Which use of its budget was its last.
    used: u64,
}

impl Books {
    /// Adds a budget of which is not known yet what was spent: until it is [`Books::set`], calls that it applies to are
    /// refused.
    pub fn close(&mut self, budget: Budget) {
        self.remove(&budget.id);
        let ids = self.of_project.entry(budget.project.clone()).or_default();
        ids.push(budget.id.clone());
        let entry = Entry {
            is_known: false,
            counters: HashMap::new(),
            uses: 0,
            budget,
        };
        self.entries.insert(entry.budget.id.clone(), entry);
    }

    /// Adds a budget, or changes one. `spent` is what each subject has spent in its present window, without calls under way,
    /// for which is reserved here; where the budget was here and counts the same things as before, what was counted here stays
    /// instead, with what is reserved.
    pub fn set(&mut self, budget: Budget, spent: impl IntoIterator<Item = (String, Usd)>, now: Timestamp) {
        let what = |budget: &Budget| (budget.scope, budget.subject.clone(), budget.window);
        if let Some(entry) = self.entries.get_mut(&budget.id)
            && what(&entry.budget) == what(&budget)
            && entry.is_known
        {
            entry
                .counters
                .values_mut()
                .for_each(|counter| counter.alerted = false);
            entry.budget = budget;
            return;
        }
        self.remove(&budget.id);
        self.of_project
            .entry(budget.project.clone())
            .or_default()
            .push(budget.id.clone());
        let window = Window::containing(budget.window, now);
        let counters = spent
            .into_iter()
            .map(|(subject, spent)| {
                let counter = Counter {
                    window,
                    spent,
                    reserved: Usd::ZERO,
                    alerted: false,
                    used: 0,
                };
                (subject, counter)
            })
            .collect();
        let mut entry = Entry {
            budget,
            is_known: true,
            counters,
            uses: 0,
        };
        for call in self.under_way.values_mut() {
            let Some(subject) = entry.budget.applies(&call.spender) else {
                continue;
            };
            let counter = entry.counter(&subject, now);
            counter.reserved += call.amount;
            let began = Window::containing(entry.budget.window, call.began).start;
            call.from.push((entry.budget.id.clone(), subject, began));
        }
        self.entries.insert(entry.budget.id.clone(), entry);
    }

    pub fn remove(&mut self, id: &BudgetId) {
        if let Some(entry) = self.entries.remove(id)
            && let Some(ids) = self.of_project.get_mut(&entry.budget.project)
        {
            ids.retain(|one| one != id);
        }
        for call in self.under_way.values_mut() {
            call.from.retain(|(one, ..)| one != id);
        }
    }

    /// Whether any budget would be asked about this spender.
    pub fn caps(&self, spender: &Spender) -> bool {
        !self.applying(spender).is_empty()
    }

    /// What is left of the tightest budget that applies, among those whose scope is one of `told`; `None`: none does.
    pub fn left(&mut self, spender: &Spender, told: fn(BudgetScope) -> bool, now: Timestamp) -> Option<Usd> {
        let applying = self.applying(spender);
        let left = applying.into_iter().filter_map(|(id, subject)| {
            let entry = self.entries.get_mut(&id)?;
            if !told(entry.budget.scope) {
                return None;
            }
            let limit = entry.budget.limit;
            let counter = entry.counter(&subject, now);
            Some(limit.minus(counter.spent + counter.reserved).max(Usd::ZERO))
        });
        left.min()
    }

    /// Begins a call that costs `amount` at most: sets that aside in every budget that applies, or in none. Where none does,
    /// `amount` may be a guess.
    pub fn reserve(
        &mut self,
        spender: &Spender,
        amount: Usd,
        now: Timestamp,
    ) -> Result<Reservation, Box<Exhausted>> {
        let applying = self.applying(spender);
        for (id, subject) in &applying {
            let Some(entry) = self.entries.get_mut(id) else {
                continue;
            };
            let (limit, is_known) = (entry.budget.limit, entry.is_known);
            let counter = entry.counter(subject, now);
            if !is_known || counter.spent + counter.reserved + amount > limit {
                let (spent, reserved, resets_at) = (counter.spent, counter.reserved, counter.window.end);
                return Err(Box::new(Exhausted {
                    budget: entry.budget.clone(),
                    subject: subject.clone(),
                    spent,
                    reserved,
                    wanted: amount,
                    resets_at,
                    is_known,
                }));
            }
        }
        let mut from = Vec::with_capacity(applying.len());
        for (id, subject) in applying {
            if let Some(entry) = self.entries.get_mut(&id) {
                let counter = entry.counter(&subject, now);
                counter.reserved += amount;
                from.push((id, subject, counter.window.start));
            }
        }
        let (call, is_capped) = (self.next, !from.is_empty());
        self.next += 1;
        self.under_way.insert(
            call,
            UnderWay {
                spender: spender.clone(),
                amount,
                began: now,
                from,
            },
        );
        Ok(Reservation {
            call: Some(call),
            amount,
            is_capped,
        })
    }

    /// Gives back what was set aside and takes what the call has cost.
    pub fn settle(&mut self, reservation: &Reservation, cost: Usd, now: Timestamp) -> Vec<Alert> {
        let mut alerts = Vec::new();
        let call = reservation.call.and_then(|call| self.under_way.remove(&call));
        let Some(UnderWay { amount, from, .. }) = call else {
            return alerts;
        };
        for (id, subject, began_in) in &from {
            let Some(entry) = self.entries.get_mut(id) else {
                continue;
            };
            let (limit, share) = (entry.budget.limit, entry.budget.alert_percent);
            let counter = entry.counter(subject, now);
            counter.reserved = counter.reserved.minus(amount).max(Usd::ZERO);
            // One that began in an earlier window was counted there.
            if counter.window.start != *began_in {
                continue;
            }
            counter.spent += cost;
            let reached = |percent: u8| {
                i128::from(counter.spent.pico()) * 100 >= i128::from(limit.pico()) * i128::from(percent)
            };
            if !counter.alerted && share.is_some_and(reached) {
                counter.alerted = true;
                let spent = counter.spent;
                alerts.push(Alert {
                    budget: entry.budget.clone(),
                    subject: subject.clone(),
                    spent,
                });
            }
        }
        alerts
    }

    /// How a budget stands, for each subject that has used it.
    pub fn standing(&mut self, id: &BudgetId, now: Timestamp) -> Vec<Standing> {
        let Some(entry) = self.entries.get_mut(id) else {
            return Vec::new();
        };
        let subjects: Vec<String> = entry.counters.keys().cloned().collect();
        let mut standing: Vec<Standing> = subjects
            .into_iter()
            .map(|subject| {
                let counter = entry.counter(&subject, now);
                let (spent, reserved, resets_at) = (counter.spent, counter.reserved, counter.window.end);
                Standing {
                    subject,
                    spent,
                    reserved,
                    resets_at,
                }
            })
            .collect();
        standing.sort_by(|a, b| a.subject.cmp(&b.subject));
        standing
    }

    fn applying(&self, spender: &Spender) -> Vec<(BudgetId, String)> {
        let ids = self.of_project.get(&spender.project);
        ids.into_iter()
            .flatten()
            .filter_map(|id| {
                let subject = self.entries.get(id)?.budget.applies(spender)?;
                Some((id.clone(), subject))
            })
            .collect()
    }
}

impl Budget {
    /// As whose spending it counts what this one spends; `None`: it does not.
    fn applies(&self, spender: &Spender) -> Option<String> {
        let subject = spender.subject(self.scope)?;
        let is_meant =
            self.project == spender.project && self.subject.as_deref().is_none_or(|only| only == subject);
        is_meant.then(|| subject.to_owned())
    }
}

impl Entry {
    /// The counter of a subject, moved on to the window of `now`.
    fn counter(&mut self, subject: &str, now: Timestamp) -> &mut Counter {
        let window = Window::containing(self.budget.window, now);
        // Sandboxes and runs that are gone take no room once their window is over.
        if self.counters.len() >= MANY
            && self.counters.len().is_power_of_two()
            && !self.counters.contains_key(subject)
        {
            // Nor do names that somebody thought of and spent nothing under.
            self.counters.retain(|_, counter| {
                let counts = counter.spent > Usd::ZERO && counter.window.end.is_none_or(|end| now < end);
                counter.reserved > Usd::ZERO || counts
            });
        }
        if self.counters.len() >= MOST_SUBJECTS && !self.counters.contains_key(subject) {
            self.forget_half();
        }
        self.uses += 1;
        let used = self.uses;
        let counter = self
            .counters
            .entry(subject.to_owned())
            .or_insert_with(|| Counter {
                window,
                spent: Usd::ZERO,
                reserved: Usd::ZERO,
                alerted: false,
                used,
            });
        counter.used = used;
        if window.start > counter.window.start {
            *counter = Counter {
                window,
                spent: Usd::ZERO,
                reserved: counter.reserved,
                alerted: false,
                used,
            };
        }
        counter
    }

    /// Half at once, so that it is seldom done. What is reserved stays.
    fn forget_half(&mut self) {
        let mut uses: Vec<u64> = self.counters.values().map(|counter| counter.used).collect();
        let middle = uses.len() / 2;
        let (_, &mut median, _) = uses.select_nth_unstable(middle);
        self.counters
            .retain(|_, counter| counter.used > median || counter.reserved > Usd::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Timestamp = Timestamp(1_709_208_000_000);
    const DAY: u64 = 24 * 60 * 60 * 1000;

    fn budget(n: u8, scope: BudgetScope, window: BudgetWindow, limit: i64) -> Budget {
        Budget {
            id: BudgetId::from_entropy([n; 20]),
            project: ProjectId::from_entropy([1; 20]),
            name: format!("b{n}"),
            scope,
            subject: None,
            window,
            limit: Usd::from_pico(limit),
            alert_percent: Some(80),
        }
    }

    fn spender(run: &str) -> Spender {
        Spender {
            project: ProjectId::from_entropy([1; 20]),
            key: None,
            sandbox: None,
            workflow: None,
            run: Some(run.into()),
        }
    }

    #[test]
    fn all_or_nothing() {
        let mut books = Books::default();
        books.set(budget(1, BudgetScope::Project, BudgetWindow::Day, 100), [], NOW);
        books.set(budget(2, BudgetScope::Run, BudgetWindow::Total, 10), [], NOW);
        let taken = books.reserve(&spender("a"), Usd::from_pico(10), NOW).unwrap();
        let refused = books.reserve(&spender("a"), Usd::from_pico(1), NOW).unwrap_err();
        assert_eq!(
            (refused.budget.name.as_str(), refused.subject.as_str()),
            ("b2", "a")
        );
        assert_eq!(refused.resets_at, None);
        // Another run has its own, and the project's was not touched by the refusal.
        let other = books.reserve(&spender("b"), Usd::from_pico(10), NOW).unwrap();
        assert_eq!(
            books.standing(&BudgetId::from_entropy([1; 20]), NOW)[0].reserved,
            Usd::from_pico(20)
        );
        let _ = books.settle(&taken, Usd::from_pico(3), NOW);
        let _ = books.settle(&other, Usd::ZERO, NOW);
        let again = books.reserve(&spender("a"), Usd::from_pico(7), NOW).unwrap();
        let _ = books.settle(&again, Usd::from_pico(7), NOW);
    }

    #[test]
    fn exactly_as_many_pass_as_there_is_money_for() {
        let mut books = Books::default();
        books.set(
            budget(1, BudgetScope::Project, BudgetWindow::Month, 1000),
            [],
            NOW,
        );
        let passed: Vec<_> = (0..10_000)
            .filter_map(|_| books.reserve(&spender("a"), Usd::from_pico(10), NOW).ok())
            .collect();
        assert_eq!(passed.len(), 100);
        for reservation in &passed {
            let _ = books.settle(reservation, Usd::from_pico(10), NOW);
        }
        assert!(books.reserve(&spender("a"), Usd::from_pico(1), NOW).is_err());
    }

    #[test]
    fn names_that_spend_nothing_take_no_room() {
        let mut books = Books::default();
        books.set(budget(1, BudgetScope::Run, BudgetWindow::Total, 10), [], NOW);
        for n in 0..10 * MANY {
            assert!(
                books
                    .reserve(&spender(&n.to_string()), Usd::from_pico(11), NOW)
                    .is_err()
            );
        }
        assert!(books.standing(&BudgetId::from_entropy([1; 20]), NOW).len() <= 2 * MANY);
    }

    #[test]
    fn names_that_spend_little_are_forgotten_in_time() {
        let mut books = Books::default();
        let id = BudgetId::from_entropy([1; 20]);
        books.set(budget(1, BudgetScope::Run, BudgetWindow::Total, 10), [], NOW);
        let held = books.reserve(&spender("held"), Usd::from_pico(9), NOW).unwrap();
        for n in 0..2 * MOST_SUBJECTS {
            let one = books
                .reserve(&spender(&n.to_string()), Usd::from_pico(1), NOW)
                .unwrap();
            let _ = books.settle(&one, Usd::from_pico(1), NOW);
        }
        assert!(books.standing(&id, NOW).len() <= MOST_SUBJECTS);
        // What is under way is not, nor who called last.
        assert!(books.reserve(&spender("held"), Usd::from_pico(2), NOW).is_err());
        let last = (2 * MOST_SUBJECTS - 1).to_string();
        assert!(books.reserve(&spender(&last), Usd::from_pico(10), NOW).is_err());
        let _ = books.settle(&held, Usd::ZERO, NOW);
    }

    #[test]
    fn a_budget_of_which_nothing_is_known_lets_nothing_through() {
        let mut books = Books::default();
        books.close(budget(1, BudgetScope::Run, BudgetWindow::Total, 10));
        assert!(books.caps(&spender("a")));
        let refused = books.reserve(&spender("a"), Usd::ZERO, NOW).unwrap_err();
        assert!(!refused.is_known);
        books.set(
            budget(1, BudgetScope::Run, BudgetWindow::Total, 10),
            [("a".to_owned(), Usd::from_pico(4))],
            NOW,
        );
        let refused = books.reserve(&spender("a"), Usd::from_pico(7), NOW).unwrap_err();
        assert!(refused.is_known);
        let taken = books.reserve(&spender("a"), Usd::from_pico(6), NOW).unwrap();
        let _ = books.settle(&taken, Usd::ZERO, NOW);
    }

    #[test]
    fn windows_roll_forward_only() {
        let mut books = Books::default();
        books.set(budget(1, BudgetScope::Project, BudgetWindow::Day, 10), [], NOW);
        let late = books.reserve(&spender("a"), Usd::from_pico(6), NOW).unwrap();
        let tomorrow = NOW.plus_millis(DAY);
        let next = books.reserve(&spender("a"), Usd::from_pico(4), tomorrow).unwrap();
        // What began yesterday is not counted today, and is no longer set aside.
        let _ = books.settle(&late, Usd::from_pico(6), tomorrow);
        let _ = books.settle(&next, Usd::from_pico(4), tomorrow);
        let refused = books.reserve(&spender("a"), Usd::from_pico(7), NOW).unwrap_err();
        assert_eq!(
            refused.spent,
            Usd::from_pico(4),
            "a clock that goes back opens nothing"
        );
    }

    #[test]
    fn a_change_keeps_what_is_spent_and_reserved() {
        let mut books = Books::default();
        books.set(budget(1, BudgetScope::Project, BudgetWindow::Day, 10), [], NOW);
        let open = books.reserve(&spender("a"), Usd::from_pico(6), NOW).unwrap();
        books.set(budget(1, BudgetScope::Project, BudgetWindow::Day, 8), [], NOW);
        assert!(
            books.reserve(&spender("a"), Usd::from_pico(3), NOW).is_err(),
            "six are reserved"
        );
        let _ = books.settle(&open, Usd::from_pico(6), NOW);
        assert!(
            books.reserve(&spender("a"), Usd::from_pico(3), NOW).is_err(),
            "six are spent"
        );
        let spent = [("prj".to_owned(), Usd::from_pico(1))];
        books.set(budget(1, BudgetScope::Run, BudgetWindow::Day, 8), spent, NOW);
        assert_eq!(
            books.standing(&BudgetId::from_entropy([1; 20]), NOW)[0].spent,
            Usd::from_pico(1)
        );
    }

    /// Calls that were under way when a budget came, or when it began to count something else, are in it.
    #[test]
    fn a_budget_that_is_set_meanwhile_counts_calls_under_way() {
        let mut books = Books::default();
        let id = BudgetId::from_entropy([1; 20]);
        let now = |books: &mut Books| {
            let standing = books.standing(&id, NOW);
            standing
                .iter()
                .map(|one| (one.spent.pico(), one.reserved.pico()))
                .fold((0, 0), |(a, b), (c, d)| (a + c, b + d))
        };
        let first = books.reserve(&spender("a"), Usd::from_pico(6), NOW).unwrap();
        assert!(!first.is_capped());
        books.set(budget(1, BudgetScope::Project, BudgetWindow::Day, 10), [], NOW);
        assert_eq!(now(&mut books), (0, 6));
        assert_eq!(books.left(&spender("a"), |_| true, NOW), Some(Usd::from_pico(4)));
        assert!(books.reserve(&spender("b"), Usd::from_pico(5), NOW).is_err());
        let second = books.reserve(&spender("b"), Usd::from_pico(4), NOW).unwrap();
        // Another scope, another window, gone and back again: the calls stay, each once.
        books.set(budget(1, BudgetScope::Run, BudgetWindow::Day, 10), [], NOW);
        assert_eq!(now(&mut books), (0, 10));
        books.set(budget(1, BudgetScope::Project, BudgetWindow::Total, 10), [], NOW);
        assert_eq!(now(&mut books), (0, 10));
        books.remove(&id);
        assert_eq!(books.left(&spender("a"), |_| true, NOW), None);
        books.set(budget(1, BudgetScope::Project, BudgetWindow::Day, 10), [], NOW);
        assert_eq!(now(&mut books), (0, 10));
        let _ = books.settle(&first, Usd::from_pico(5), NOW);
        assert_eq!(now(&mut books), (5, 4));
        let _ = books.settle(&first, Usd::from_pico(5), NOW);
        let _ = books.settle(&second, Usd::from_pico(1), NOW);
        assert_eq!(now(&mut books), (6, 0));
        // One that is not meant is not counted.
        let other = books.reserve(&spender("b"), Usd::from_pico(1), NOW).unwrap();
        let only = Budget {
            subject: Some("a".into()),
            ..budget(1, BudgetScope::Run, BudgetWindow::Day, 10)
        };
        books.set(only, [], NOW);
        assert_eq!(now(&mut books), (0, 0));
        let _ = books.settle(&other, Usd::from_pico(1), NOW);
        assert!(books.under_way.is_empty());
    }

    #[test]
    fn subjects_whose_window_is_over_are_forgotten() {
        let mut books = Books::default();
        books.set(budget(1, BudgetScope::Run, BudgetWindow::Day, 10), [], NOW);
        for day in 0..3_u64 {
            for run in 0..MANY {
                let now = NOW.plus_millis(day * DAY);
                let one = books
                    .reserve(&spender(&format!("{day}-{run}")), Usd::from_pico(1), now)
                    .unwrap();
                let _ = books.settle(&one, Usd::from_pico(1), now);
            }
        }
        let kept = books
            .standing(&BudgetId::from_entropy([1; 20]), NOW.plus_millis(2 * DAY))
            .len();
        assert!(kept <= 2 * MANY, "{kept}");
    }

    #[test]
    fn an_alert_is_told_once() {
        let mut books = Books::default();
        books.set(budget(1, BudgetScope::Project, BudgetWindow::Day, 10), [], NOW);
        let mut told = Vec::new();
        for _ in 0..10 {
            let one = books.reserve(&spender("a"), Usd::from_pico(1), NOW).unwrap();
            told.push(books.settle(&one, Usd::from_pico(1), NOW).len());
        }
        assert_eq!(told, [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
    }

    proptest! {
        /// Whatever is asked for and whatever it costs in the end, nothing is overspent and nothing stays reserved.
        #[test]
        fn no_budget_is_ever_overspent(calls in prop::collection::vec((0_u8..3, 1_i64..40, 0_i64..100, any::<bool>()), 1..200)) {
            let mut books = Books::default();
            books.set(budget(1, BudgetScope::Project, BudgetWindow::Month, 500), [], NOW);
            books.set(budget(2, BudgetScope::Run, BudgetWindow::Day, 200), [], NOW);
            let mut open = Vec::new();
            for (run, amount, percent, settle_one) in calls {
                if let Ok(taken) = books.reserve(&spender(&run.to_string()), Usd::from_pico(amount), NOW) {
                    open.push((taken, Usd::from_pico(amount * percent / 100)));
                }
                if settle_one && !open.is_empty() {
                    let (taken, cost) = open.swap_remove(0);
                    let _ = books.settle(&taken, cost, NOW);
                }
                for (n, limit) in [(1, 500), (2, 200)] {
                    for standing in books.standing(&BudgetId::from_entropy([n; 20]), NOW) {
                        prop_assert!(standing.spent + standing.reserved <= Usd::from_pico(limit));
                    }
                }
            }
            for (taken, cost) in open {
                let _ = books.settle(&taken, cost, NOW);
            }
            for n in [1, 2] {
                for standing in books.standing(&BudgetId::from_entropy([n; 20]), NOW) {
                    prop_assert_eq!(standing.reserved, Usd::ZERO);
                }
            }
        }
    }
}
