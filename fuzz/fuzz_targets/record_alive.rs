//! Signs of life, as agents write them: whatever is read is written and read again the same.
#![no_main]

use ec_model::{Alive, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|value: &[u8]| {
    if let Ok(record) = decode::<Alive>(value) {
        assert_eq!(decode::<Alive>(&encode(&record)).expect("what we write, we read"), record);
    }
});
