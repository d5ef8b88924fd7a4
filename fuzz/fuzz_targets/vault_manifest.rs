#![no_main]
atoll_fuzz::libfuzzer!("vault_manifest");
