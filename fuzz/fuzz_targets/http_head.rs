#![no_main]
atoll_fuzz::libfuzzer!("http_head");
