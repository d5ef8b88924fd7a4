#![no_main]
atoll_fuzz::libfuzzer!("workflow_query");
