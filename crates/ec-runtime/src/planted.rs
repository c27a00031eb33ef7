//! Classic mistakes, planted where they could have been made, so that a simulation can show that it finds them. In a
//! shipped binary there are none: without the feature `planted` the question is a constant.

/// Whether this mistake is to be made: the one that the environment variable `PLANTED` names.
#[cfg(feature = "planted")]
pub fn planted(mistake: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("PLANTED").ok()).as_deref() == Some(mistake)
}

/// Whether this mistake is to be made: never.
#[cfg(not(feature = "planted"))]
pub const fn planted(_: &str) -> bool {
    false
}

/// Whether what the caller is called for is to be left out: where `PLANTED` names that place, as `path:line`.
#[cfg(feature = "planted")]
#[track_caller]
pub fn left_out_here() -> bool {
    let caller = std::panic::Location::caller();
    planted(&format!("{}:{}", caller.file(), caller.line()))
}

/// Whether what the caller is called for is to be left out: never.
#[cfg(not(feature = "planted"))]
pub const fn left_out_here() -> bool {
    false
}
