#![no_main]
atoll_fuzz::libfuzzer!("oci_documents");
