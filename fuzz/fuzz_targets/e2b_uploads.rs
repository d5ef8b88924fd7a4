#![no_main]
atoll_fuzz::libfuzzer!("e2b_uploads");
