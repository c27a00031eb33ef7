//! The kernel's random numbers, the same in each process: hash maps and tokio's own dice are thrown with them.
#![expect(unsafe_code, reason = "a function of the C library is replaced")]

use std::sync::atomic::{AtomicU64, Ordering};

static STATE: AtomicU64 = AtomicU64::new(0);

/// In place of the C library's: the standard library seeds its hash maps by it, and tokio its dice by those. Nothing
/// here keeps a secret.
///
/// # Safety
/// As getrandom(2): there is room for `length` bytes at `buffer`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, _flags: u32) -> isize {
    for offset in 0..length {
        let state = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // SAFETY: the caller has so much room there.
        unsafe { buffer.add(offset).write((mixed >> 56) as u8) };
    }
    isize::try_from(length).unwrap_or(isize::MAX)
}

/// Whether it is in place: two sets of keys made by the same steps are the same ones.
pub fn is_fixed() -> bool {
    use std::hash::{BuildHasher, RandomState};
    let seen = STATE.load(Ordering::Relaxed);
    RandomState::new().hash_one(0);
    // The keys of this thread were drawn from ours, now or before.
    seen != 0 || STATE.load(Ordering::Relaxed) != 0
}
