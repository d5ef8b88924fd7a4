#![no_main]
atoll_fuzz::libfuzzer!("erofs_layers");
