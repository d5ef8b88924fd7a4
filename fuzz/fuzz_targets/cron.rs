#![no_main]
atoll_fuzz::libfuzzer!("cron");
