//! A whole image, with the walk over its tables.
#![no_main]

use std::io::Cursor;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|image: &[u8]| {
    let header = &image[..image.len().min(ec_image::HEADER_LEN)];
    let whole = ec_image::inspect_file(&mut Cursor::new(image));
    if ec_image::inspect(header, Some(image.len() as u64)).is_err() {
        assert!(whole.is_err(), "the walk accepts what the header forbids");
    }
});
