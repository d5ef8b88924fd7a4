#![no_main]
atoll_fuzz::libfuzzer!("host_names");
