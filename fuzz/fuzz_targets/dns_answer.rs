#![no_main]
atoll_fuzz::libfuzzer!("dns_answer");
