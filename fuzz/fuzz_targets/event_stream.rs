#![no_main]
atoll_fuzz::libfuzzer!("event_stream");
