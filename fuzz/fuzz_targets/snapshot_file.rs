#![no_main]
atoll_fuzz::libfuzzer!("snapshot_file");
