#![no_main]
atoll_fuzz::libfuzzer!("model_answer");
