#![no_main]
atoll_fuzz::libfuzzer!("guest_channel");
