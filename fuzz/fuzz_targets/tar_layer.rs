#![no_main]
atoll_fuzz::libfuzzer!("tar_layer");
