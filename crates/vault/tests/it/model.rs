//! Any order of saving, deleting, collecting and reopening, against a map in memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use proptest::prelude::*;

use crate::support::{Context, KIB, load, noise, save};

#[derive(Debug, Clone)]
enum Step {
    /// Parts: kind of data and length in KiB.
    Save(u8, u8, Vec<(u8, u16)>),
    Abort(Vec<(u8, u16)>),
    Delete(u8),
    Collect(u8),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let parts = || prop::collection::vec((0_u8..5, 0_u16..300), 0..5);
    let step = prop_oneof![
        4 => (0_u8..8, 0_u8..2, parts()).prop_map(|(id, domain, parts)| Step::Save(id, domain, parts)),
        1 => parts().prop_map(Step::Abort),
        2 => (0_u8..8).prop_map(Step::Delete),
        2 => any::<u8>().prop_map(Step::Collect),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..14)
}

fn bytes(parts: &[(u8, u16)]) -> Vec<u8> {
    let part = |(kind, len): &(u8, u16)| match kind {
        0 => vec![0; usize::from(*len) * KIB],
        kind => noise(u64::from(*kind), usize::from(*len) * KIB + usize::from(*kind)),
    };
    parts.iter().flat_map(part).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_vault_holds_what_the_model_holds(steps in steps()) {
        let mut context = Context::new();
        let mut model: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Save(id_number, domain, parts) => {
                    let (id, data) = (format!("s{id_number}"), bytes(&parts));
                    if let Entry::Vacant(free) = model.entry(id) {
                        let saved = save(&context.vault, free.key(), &format!("d{domain}"), &data);
                        prop_assert_eq!(saved.total_bytes as usize, data.len());
                        free.insert(data);
                    } else {
                        let taken = context.vault.begin(&format!("s{id_number}"), "d");
                        prop_assert!(taken.is_err());
                    }
                }
                Step::Abort(parts) => {
                    let save = context.vault.begin("aborted", "d0").unwrap();
                    save.file("data", &mut &bytes(&parts)[..]).unwrap();
                }
                Step::Delete(id) => {
                    let id = format!("s{id}");
                    prop_assert_eq!(context.vault.delete(&id).is_ok(), model.remove(&id).is_some());
                }
                Step::Collect(mask) => {
                    let live = |id: &str| mask & (1 << (id.as_bytes()[1] - b'0')) != 0;
                    model.retain(|id, _| live(id));
                    let dry = context.vault.gc(&live, true).unwrap();
                    prop_assert_eq!(context.vault.gc(&live, false).unwrap(), dry);
                    prop_assert_eq!(context.vault.gc(&live, false).unwrap().bytes, 0);
                }
                Step::Reopen => context = context.reopen(),
            }
            prop_assert_eq!(context.vault.ids().unwrap(), model.keys().cloned().collect::<Vec<_>>());
            for (id, data) in &model {
                prop_assert!(load(&context.vault, id).unwrap() == *data, "{}", id);
            }
        }
        context.vault.gc(&|_| false, false).unwrap();
        prop_assert_eq!(context.vault.usage().unwrap().bytes, 0);
    }
}
