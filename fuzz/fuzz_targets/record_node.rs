//! Node records, as agents write them: whatever is read is written and read again the same.
#![no_main]

use ec_model::{NodeRecord, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|value: &[u8]| {
    if let Ok(record) = decode::<NodeRecord>(value) {
        assert_eq!(decode::<NodeRecord>(&encode(&record)).expect("what we write, we read"), record);
    }
});
