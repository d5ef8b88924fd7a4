#![no_main]
atoll_fuzz::libfuzzer!("tls_hello");
