//! The first bytes of an image. The first eight bytes of the input stand for the size of the file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, &[u8])| {
    let (size, header) = input;
    let known = ec_image::inspect(header, Some(size));
    let unknown = ec_image::inspect(header, None);
    // Knowing the size can only lead to a refusal, never away from one, except that nothing is empty.
    if let Ok(known) = known {
        assert!(known.virtual_size.is_some());
        assert_eq!(unknown.expect("accepted with its size").format, known.format);
    }
});
