//! Instances, as control tools write them: whatever is read is written and read again the same.
#![no_main]

use ec_model::{Instance, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|value: &[u8]| {
    if let Ok(record) = decode::<Instance>(value) {
        assert_eq!(decode::<Instance>(&encode(&record)).expect("what we write, we read"), record);
    }
});
