#![no_main]
atoll_fuzz::libfuzzer!("native_bodies");
