//! How much one run may hold. The numbers are Temporal's, so that a workflow that fits here fits there.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub pending_activities: usize,
    pub pending_children: usize,
    pub pending_signals: usize,
    pub pending_cancels: usize,
    pub signals: i64,
    pub updates_in_flight: usize,
    pub updates: usize,
    pub history_events: i64,
    pub history_bytes: i64,
    /// What arrives while a worker has the workflow task, and waits for its end. It is written again with each change.
    pub buffered_bytes: usize,
    /// From here on workers are told to continue as new.
    pub suggest_events: i64,
    pub suggest_bytes: i64,
    pub blob_bytes: usize,
    /// All that a worker may ask for in answer to one task.
    pub completion_bytes: usize,
    pub id_length: usize,
    /// What a run is searched by: how many, what one may hold, and all of them.
    pub attributes: usize,
    pub attribute_bytes: usize,
    pub attributes_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pending_activities: 2_000,
            pending_children: 2_000,
            pending_signals: 2_000,
            pending_cancels: 2_000,
            signals: 10_000,
            updates_in_flight: 10,
            updates: 2_000,
            history_events: 51_200,
            history_bytes: 50 * 1024 * 1024,
            buffered_bytes: 8 * 1024 * 1024,
            suggest_events: 4_096,
            suggest_bytes: 4 * 1024 * 1024,
            blob_bytes: 2 * 1024 * 1024,
            completion_bytes: 32 * 1024 * 1024,
            id_length: 1_000,
            attributes: 100,
            attribute_bytes: 2 * 1024,
            attributes_bytes: 40 * 1024,
        }
    }
}
