//! Entries of the index of instances: whatever is read is written and read again the same.
#![no_main]

use ec_model::{IndexEntry, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|value: &[u8]| {
    if let Ok(record) = decode::<IndexEntry>(value) {
        assert_eq!(decode::<IndexEntry>(&encode(&record)).expect("what we write, we read"), record);
    }
});
